"""Does a wide program lose nothing but what it says it may?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.intra_op import wide
from autopar.intra_op.model import Model, Solution

MOST_NODES = 4


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Models of few nodes with more options than an incumbent looks at; half of them full of ties, some hopeless."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    whole, forbidden = draw(st.booleans()), draw(st.sampled_from([0.0, 0.3, 0.97]))
    sizes = rng.integers(6, 10, draw(st.integers(1, MOST_NODES)))

    def costs(*shape: int) -> np.ndarray:
        drawn = rng.integers(0, 4, shape).astype(float) if whole else rng.random(shape)
        return np.where(rng.random(shape) < forbidden, np.inf, drawn)

    pairs = itertools.combinations(range(len(sizes)), 2)
    return Model([costs(size) for size in sizes], {(i, j): costs(sizes[i], sizes[j]) for i, j in pairs})


def by_trying(model: Model) -> Solution | None:
    """The optimum, from all combinations at once."""
    total = np.zeros([len(costs) for costs in model.nodes])
    for i, costs in enumerate(model.nodes):
        total = total + costs.reshape([-1 if k == i else 1 for k in range(total.ndim)])
    for (i, j), matrix in model.edges.items():
        total = total + matrix.reshape([matrix.shape[(i, j).index(k)] if k in (i, j) else 1 for k in range(total.ndim)])
    cost = float(total.min())
    options = np.unravel_index(int(total.argmin()), total.shape)
    return Solution(tuple(int(option) for option in options), cost, cost) if np.isfinite(cost) else None


@given(models())
def test_the_optimum_is_found_up_to_what_is_enough(model: Model) -> None:
    best, found = by_trying(model), wide.solve_wide(model, by_trying)
    assert (best is None) == (found is None)
    if best is not None and found is not None:
        assert model.cost(found.options) == found.cost
        assert found.bound <= best.cost + 1e-9
        assert found.cost <= best.cost + wide.ENOUGH * found.cost + 1e-12


@given(models(), st.floats(0.5, 1.5))
def test_what_is_not_wanted_is_given_up(model: Model, share: float) -> None:
    """Nothing that costs less than what is wanted is missed."""
    best = by_trying(model)
    if best is None:
        return
    found = wide.solve_wide(model, by_trying, below=share * best.cost)
    assert found is not None or share * best.cost <= best.cost + 1e-9
    if found is not None:
        assert found.cost <= best.cost + wide.ENOUGH * found.cost + 1e-12


@given(models())
def test_when_the_time_is_up_what_was_found_will_do(model: Model) -> None:
    best = by_trying(model)
    found = wide.solve_wide(model, by_trying, until_seconds=0.0)
    assert (best is None) == (found is None)
    if best is not None and found is not None:
        assert model.cost(found.options) == found.cost >= best.cost - 1e-9
        assert found.bound <= best.cost + 1e-9


@given(models(), st.sampled_from([(0, 10**9), (0, 0)]), st.sampled_from([1e-3, 0.05]))
def test_what_takes_very_many_messages_is_left_with_a_bound_that_holds(
    model: Model, sent: tuple[int, int], share: float
) -> None:
    """After many messages a gap that is worth nothing is left, after very many any gap; what is said of it stays true."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wide, "MUCH_SENT", sent[0])
        patched.setattr(wide, "MOST_SENT", sent[1])
        best, found = by_trying(model), wide.solve_wide(model, by_trying, gaps=wide.Gaps(at_last=share))
    assert (best is None) == (found is None)
    if best is not None and found is not None:
        assert np.isclose(model.cost(found.options), found.cost)
        assert found.bound <= best.cost + 1e-9 <= found.cost + 2e-9


def test_most_options_never_meet_the_solver() -> None:
    """A chain of nodes with a hundred options each is settled by its messages."""
    rng = np.random.default_rng(0)
    model = Model([rng.random(100) for _ in range(8)], {(i, i + 1): rng.random((100, 100)) for i in range(7)})
    sizes: list[int] = []

    def solve(part: Model) -> Solution | None:
        sizes.append(part.num_variables)
        return by_trying(part)

    found = wide.solve_wide(model, solve)
    assert found is not None and found.gap <= wide.ENOUGH
    assert max(sizes, default=0) < model.num_variables / 100


@given(models(), st.sampled_from([1e-3, 0.05, 1.0]))
def test_what_is_worth_no_enumeration_is_proven_still(model: Model, share: float) -> None:
    best, found = by_trying(model), wide.solve_wide(model, by_trying, gaps=wide.Gaps(at_last=share))
    assert (best is None) == (found is None)
    if best is not None and found is not None:
        assert np.isclose(model.cost(found.options), found.cost)
        assert found.bound <= best.cost + 1e-9
        assert found.cost <= best.cost + share * found.cost + 1e-12


def test_a_gap_that_is_worth_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node with every other: the bound of messages stays below the optimum, and two states are no enumeration."""
    monkeypatch.setattr(wide, "STATES_TIMES_NODES", 2)
    monkeypatch.setattr(wide, "FEW_STATES", 2)
    monkeypatch.setattr(wide, "CLOSE_STATES", 2)
    rng = np.random.default_rng(1)
    edges = {(i, j): rng.random((6, 6)) for i, j in itertools.combinations(range(7), 2)}
    model = Model([rng.random(6) for _ in range(7)], edges)
    left, settled = (wide.solve_wide(model, by_trying, gaps=wide.Gaps(at_last=share)) for share in (1.0, wide.ENOUGH))
    assert left is not None and settled is not None
    assert settled.gap <= wide.ENOUGH < left.gap <= 1.0
    assert left.bound <= settled.cost <= left.cost + 1e-9
