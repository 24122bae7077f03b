"""Does a walk along the nodes find the optimum if it may remember all, and tell how much it may have missed if not?"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.intra_op import frontier
from autopar.intra_op.bound import Messages, Residuals
from autopar.intra_op.frontier import best_along, in_order, narrow_order
from autopar.intra_op.model import Model
from tests.test_bound import models


def all_solutions(model: Model) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(costs)) for costs in model.nodes)))


def residual_of(residuals: Residuals, solution: tuple[int, ...]) -> float:
    return Model(residuals.nodes, residuals.edges).cost(solution)


@given(models(), st.integers(0, 3))
def test_residuals_say_what_a_solution_costs(model: Model, passes: int) -> None:
    messages = Messages(model)
    for number in range(passes):
        messages.sweep(forward=bool(number % 2))
    residuals = messages.residuals()
    assert all((costs >= 0).all() for costs in (*residuals.nodes, *residuals.edges.values()))
    for solution in all_solutions(model):
        if np.isfinite(cost := model.cost(solution)):
            np.testing.assert_allclose(residuals.bound + residual_of(residuals, solution), cost, atol=1e-8)


@given(models())
def test_after_a_pass_forward_the_bound_is_that_of_the_pass(model: Model) -> None:
    messages = Messages(model)
    messages.sweep(forward=False)
    np.testing.assert_allclose(messages.sweep(forward=True), messages.residuals().bound, atol=1e-8)


@given(models(), st.integers(0, 2))
def test_who_remembers_all_finds_the_optimum(model: Model, passes: int) -> None:
    messages = Messages(model)
    for _ in range(passes):
        messages.sweep(forward=True)
    residuals = messages.residuals()
    found = best_along(residuals, room=np.inf, most_states=10_000)
    best = min(residual_of(residuals, solution) for solution in all_solutions(model))
    assert found.options is not None
    np.testing.assert_allclose([found.cost, residual_of(residuals, found.options), found.floor], best, atol=1e-8)


@given(models(), st.integers(1, 3), st.floats(0.1, 20.0))
def test_who_forgets_says_what_may_have_been_missed(model: Model, most_states: int, room: float) -> None:
    residuals = Messages(model).residuals()
    found = best_along(residuals, room=room, most_states=most_states)
    best = min(residual_of(residuals, solution) for solution in all_solutions(model))
    assert found.floor <= max(best, room) + 1e-8 and found.floor <= room
    assert found.floor <= best + 1e-8
    if found.options is not None:
        np.testing.assert_allclose(found.cost, residual_of(residuals, found.options), atol=1e-8)


@given(models())
def test_an_order_names_every_node_once_and_keeps_costs(model: Model) -> None:
    order = narrow_order(model)
    assert sorted(order) == list(range(len(model.nodes)))
    other = in_order(model, order)
    for solution in all_solutions(model):
        cost = other.cost([solution[node] for node in order])
        assert cost == model.cost(solution) or abs(cost - model.cost(solution)) < 1e-9


@pytest.mark.parametrize("multiplier", [0, 1, 1 << 60])
def test_states_whose_keys_agree_are_told_apart(monkeypatch: pytest.MonkeyPatch, multiplier: int) -> None:
    """A star of wide nodes, whose combinations share few keys: with a multiplier of nothing a single one."""
    rng = np.random.default_rng(0)
    count, size = 8, 4
    model = Model([rng.random(size) for _ in range(count)], {(0, j): rng.random((size, size)) for j in range(1, count)})
    residuals = Messages(model).residuals()
    expected = best_along(residuals, room=np.inf, most_states=100_000)
    frontier.mixers.cache_clear()
    monkeypatch.setattr(frontier, "MULTIPLIER", multiplier)
    found = best_along(residuals, room=np.inf, most_states=100_000)
    frontier.mixers.cache_clear()
    assert found == expected


@given(models())
def test_an_order_widens_least_at_every_step(model: Model) -> None:
    """Beside the same choice made anew: the node whose decision leaves the fewest combinations open."""
    count = len(model.nodes)
    around: list[set[int]] = [set() for _ in range(count)]
    for i, j in model.edges:
        around[i].add(j)
        around[j].add(i)
    widths = [math.log(max(2, len(costs))) for costs in model.nodes]

    def width(decided: list[int]) -> float:
        return sum(widths[node] for node in decided if not around[node] <= set(decided))

    order = list(narrow_order(model))
    for step in range(1, count):
        decided = order[:step]
        near = {other for node in decided for other in around[node]} - set(decided)
        if near:
            least = min(width([*decided, node]) for node in near)
            np.testing.assert_allclose(width(order[: step + 1]), least, atol=1e-9)


def test_of_a_chain_one_node_is_open_at_a_time() -> None:
    """Whatever the numbers of its nodes are: states are no more than a node has options, so none is forgotten."""
    rng = np.random.default_rng(1)
    place = [int(node) for node in rng.permutation(30)]
    edges = {(min(pair), max(pair)): rng.random((9, 9)) for pair in itertools.pairwise(place)}
    model = Model([rng.random(9) for _ in range(30)], edges)
    residuals = Messages(in_order(model, narrow_order(model))).residuals()
    found = best_along(residuals, room=np.inf, most_states=81)
    assert found.floor == found.cost
