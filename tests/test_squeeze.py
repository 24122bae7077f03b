"""Prices of memory beside all solutions there are."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.intra_op.ilp import solve
from autopar.intra_op.model import MemoryRow, Model, Solution
from autopar.intra_op.squeeze import solve_squeezed

NODES, OPTIONS = 6, 4


def squeezed_model(seed: int, share: float) -> Model:
    """A chain whose options hold the less the dearer they are, about, and a budget between the least and the most."""
    rng = np.random.default_rng(seed)
    nodes = [np.sort(rng.random(OPTIONS)) for _ in range(NODES)]
    edges = {(i, i + 1): 0.1 * rng.random((OPTIONS, OPTIONS)) for i in range(NODES - 1)}
    held = {i: np.sort(rng.random(OPTIONS))[::-1].copy() for i in range(NODES)}
    least, most = (sum(float(pick(one)) for one in held.values()) for pick in (np.min, np.max))
    return Model(nodes, edges, [MemoryRow(held, {}, least + share * (most - least))])


def by_trying(model: Model) -> float:
    """What the best solution within the rows costs."""
    options = itertools.product(range(OPTIONS), repeat=NODES)
    return min((model.cost(one) for one in options if model.fits(one)), default=math.inf)


def free_optimum(model: Model) -> Solution:
    free = solve(Model(model.nodes, model.edges))
    assert free is not None
    return free


@pytest.mark.parametrize("share", [0.2, 0.35, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(6))
def test_a_squeezed_plan_keeps_the_budget_and_its_bound_holds(seed: int, share: float) -> None:
    model = squeezed_model(seed, share)
    free = free_optimum(model)
    if model.fits(free.options):
        return
    best = by_trying(model)
    found = solve_squeezed(model, free, lambda one: model.fits(one.options), time_limit_seconds=30.0)
    assert found is not None and model.fits(found.options)
    assert found.bound <= best + 1e-9 <= found.cost + 2e-9
    # Lines of the lower hull: what lies between two of them is missed, by no more than one exchange.
    assert found.cost <= best + max(float(costs.max()) for costs in model.nodes)


@pytest.mark.parametrize("seed", range(6))
def test_what_cannot_beat_another_plan_is_left(seed: int) -> None:
    model = squeezed_model(seed, 0.3)
    free = free_optimum(model)
    wanted = 0.5 * free.cost
    assert (
        solve_squeezed(model, free, lambda one: model.fits(one.options), time_limit_seconds=30.0, below=wanted) is None
    )


def test_a_budget_below_all_solutions_is_given_up_after_one_price() -> None:
    model, asked = squeezed_model(0, -0.1), []

    def keeps_budget(solution: Solution) -> bool:
        asked.append(solution)
        return model.fits(solution.options)

    assert solve_squeezed(model, free_optimum(model), keeps_budget, time_limit_seconds=30.0) is None
    assert len(asked) == 1
