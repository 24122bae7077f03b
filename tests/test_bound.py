"""Is the bound a bound, is it tight where it must be, and does a narrowed program lose nothing that it promises?"""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.intra_op.bound import Messages, lower_bound
from autopar.intra_op.model import Model

MOST_NODES = 6


@st.composite
def models(draw: st.DrawFn, *, trees: bool = False) -> Model:
    """Small models with negative, equal and forbidden costs; of any shape, or trees."""
    seed = draw(st.integers(0, 2**32 - 1))
    count = draw(st.integers(1, MOST_NODES))
    forbidden = draw(st.sampled_from([0.0, 0.2]))
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, count)

    def costs(*shape: int) -> np.ndarray:
        whole = rng.integers(-4, 9, shape).astype(float)
        return np.where(rng.random(shape) < forbidden, np.inf, whole)

    nodes = [rng.integers(-4, 9, size).astype(float) for size in sizes]
    if trees:
        pairs = [(int(rng.integers(0, j)), j) for j in range(1, count)]
    else:
        pairs = [pair for pair in itertools.combinations(range(count), 2) if rng.random() < 0.6]
    return Model(nodes, {(i, j): costs(sizes[i], sizes[j]) for i, j in pairs})


def optimum(model: Model) -> float:
    return min(model.cost(solution) for solution in itertools.product(*(range(len(c)) for c in model.nodes)))


@given(models())
def test_no_solution_is_below_the_bound(model: Model) -> None:
    best = optimum(model)
    if np.isfinite(best):
        assert lower_bound(model).cost <= best + 1e-9 * (1 + abs(best))


@given(models(trees=True))
def test_on_trees_the_bound_is_the_optimum_and_regret_finds_it(model: Model) -> None:
    best = optimum(model)
    bound = lower_bound(model)
    if np.isfinite(best):
        np.testing.assert_allclose(bound.cost, best, rtol=1e-9, atol=1e-9)
        likeliest = [np.flatnonzero(regrets <= 1e-9) for regrets in bound.regrets]
        assert min(model.cost(solution) for solution in itertools.product(*likeliest)) <= best + 1e-9


@given(models())
def test_enough_is_enough(model: Model) -> None:
    once = Messages(model)
    once.sweep(forward=True)
    assert lower_bound(model, enough=-np.inf).cost == once.sweep(forward=False)


def test_a_frustrated_cycle_leaves_a_gap() -> None:
    """Three nodes of two options that all want to differ: the relaxation pays nothing, a solution pays for one pair."""
    differ = np.array([[1.0, 0.0], [0.0, 1.0]])
    model = Model([np.zeros(2)] * 3, {(0, 1): differ, (1, 2): differ, (0, 2): differ})
    assert optimum(model) == 1.0
    assert lower_bound(model).cost == 0.0
