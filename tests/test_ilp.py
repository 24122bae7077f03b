"""The integer program finds the optimum that enumeration finds, however it reaches the solver."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.errors import PlanError
from autopar.intra_op import eliminate
from autopar.intra_op.ilp import (
    Answer,
    Backend,
    Program,
    build_program,
    default_backend,
    solve,
    solve_with_highs,
    solve_with_pulp,
)
from autopar.intra_op.model import MemoryRow, Model
from tests.test_reduce import close, cost_by_hand, fits_by_hand, models, optimum_by_enumeration

SOLVER_TOLERANCE = 2e-6
"""Relative: twice the gap at which the solver may stop."""


def _check(model: Model, backend: Backend) -> None:
    expected = optimum_by_enumeration(model)
    solution = solve(model, backend=backend)
    if np.isinf(expected):
        assert solution is None
        return
    assert solution is not None
    assert fits_by_hand(model, solution.options)
    assert close(solution.cost, cost_by_hand(model, solution.options))
    assert close(solution.cost, expected, SOLVER_TOLERANCE)
    assert solution.bound <= solution.cost
    assert solution.gap <= SOLVER_TOLERANCE


@settings(max_examples=200)
@given(models())
def test_highs_finds_the_optimum(model: Model) -> None:
    _check(model, solve_with_highs)


@settings(max_examples=200)
@given(models(memory=True))
def test_highs_finds_the_optimum_under_memory_rows(model: Model) -> None:
    _check(model, solve_with_highs)


@settings(max_examples=60)
@given(models(memory=True))
def test_pulp_finds_the_optimum_under_memory_rows(model: Model) -> None:
    _check(model, solve_with_pulp)


@settings(max_examples=100)
@given(models(memory=True))
def test_the_program_itself_needs_no_reduction(model: Model) -> None:
    """Without the reductions, which leave little of models this small: the optimum of the sparse program alone."""
    expected = optimum_by_enumeration(model)
    program, _ = build_program(model)
    if program is None:
        assert np.isinf(expected)
        return
    answer = solve_with_highs(program, True, 60.0)
    assert (answer.values is None) == np.isinf(expected)
    if answer.values is not None:
        assert answer.objective == pytest.approx(expected, rel=SOLVER_TOLERANCE, abs=1e-9)


def _clique(count: int, options: int, *, seed: int, budget: float | None = None) -> Model:
    """No reduction gets hold of it: all nodes meet, all costs are of one size."""
    rng = np.random.default_rng(seed)
    nodes = [rng.random(options) for _ in range(count)]
    edges = {pair: rng.random((options, options)) for pair in itertools.combinations(range(count), 2)}
    rows = []
    if budget is not None:
        rows = [MemoryRow({i: rng.integers(1, 10, options).astype(float) for i in range(count)}, {}, budget)]
    return Model(nodes, edges, rows)


@pytest.mark.parametrize("seed", [0, 2, 3])
@pytest.mark.parametrize("budget", [None, 30.0])
def test_fractional_relaxations_are_made_integral(
    seed: int, budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eliminate, "MOST_ENTRIES", 100)  # too few for this
    model = _clique(8, 3, seed=seed, budget=budget)
    asked: list[bool] = []

    def spy(program: Program, integral: bool, time_limit_seconds: float) -> Answer:
        asked.append(integral)
        return solve_with_highs(program, integral, time_limit_seconds)

    _check(model, spy)
    assert asked == [False, True]


def test_fractional_relaxations_of_few_options_ask_for_no_integers() -> None:
    asked: list[bool] = []

    def spy(program: Program, integral: bool, time_limit_seconds: float) -> Answer:
        asked.append(integral)
        return solve_with_highs(program, integral, time_limit_seconds)

    _check(_clique(8, 3, seed=0), spy)
    assert asked == [False]


def test_both_backends_agree_where_both_must_work() -> None:
    model = _clique(5, 4, seed=7, budget=20.0)
    highs, pulp = solve(model, backend=solve_with_highs), solve(model, backend=solve_with_pulp)
    assert highs is not None
    assert pulp is not None
    assert close(highs.cost, pulp.cost, SOLVER_TOLERANCE)


@pytest.mark.parametrize("backend", [solve_with_highs, solve_with_pulp])
def test_impossible_budgets_have_no_solution(backend: Backend) -> None:
    model = _clique(4, 3, seed=1, budget=3.5)  # four nodes, each of one byte or more
    assert solve(model, backend=backend) is None


def test_forbidding_everything_has_no_solution() -> None:
    nothing = np.full((2, 2), np.inf)
    assert solve(Model([np.zeros(2), np.zeros(2)], {(0, 1): nothing})) is None
    assert solve(Model([np.array([np.inf, np.inf])], {})) is None


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_the_scale_of_costs_does_not_matter(scale: float) -> None:
    """Solvers have absolute tolerances of about 1e-6, a step may take microseconds."""
    model = _clique(6, 4, seed=3)
    scaled = Model([costs * scale for costs in model.nodes], {pair: m * scale for pair, m in model.edges.items()})
    _check(scaled, default_backend())


def test_a_solution_found_in_time_comes_with_its_gap() -> None:
    """The solver stopped early: a solution 10 % above its bound."""
    model = _clique(5, 3, seed=5)
    best = optimum_by_enumeration(model)

    def stopped(program: Program, integral: bool, time_limit_seconds: float) -> Answer:
        if not integral:
            return Answer(None, np.inf, -np.inf, infeasible=False)
        answer = solve_with_highs(program, True, time_limit_seconds)
        return Answer(answer.values, answer.objective, 0.9 * answer.objective, infeasible=False)

    solution = solve(model, backend=stopped)
    assert solution is not None
    assert close(solution.cost, best, SOLVER_TOLERANCE)
    assert 0.05 < solution.gap < 0.1001  # what the reduction decided has no gap


def test_no_solution_in_time_is_an_error_that_says_what_to_do() -> None:
    def late(_program: Program, _integral: bool, _time_limit_seconds: float) -> Answer:
        return Answer(None, np.inf, -np.inf, infeasible=False)

    with pytest.raises(PlanError, match=r"found no plan within 7 s.*solver_seconds"):
        solve(_clique(5, 3, seed=5), time_limit_seconds=7.0, backend=late)


@pytest.mark.verify
def test_a_real_time_limit_is_kept() -> None:
    """Too large to be solved at once: either something is found, with an honest bound, or the error is raised."""
    model = _clique(30, 6, seed=9)
    try:
        solution = solve(model, time_limit_seconds=0.2)
    except PlanError:
        return
    assert solution is not None
    assert solution.bound <= solution.cost
    assert close(solution.cost, cost_by_hand(model, solution.options))


def test_the_default_backend_is_the_fast_one_where_it_is_installed() -> None:
    installed = importlib.util.find_spec("highspy") is not None
    assert default_backend() is (solve_with_highs if installed else solve_with_pulp)
