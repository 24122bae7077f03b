"""Which consecutive parts of the forward pass are its layers, seen from the dataflow alone?

Alpa (Zheng et al., OSDI 2022, section 5.2) clusters operators so that the largest communication between layers is
smallest, while no layer has more than (1+δ) times the average work.  No division may come near the average (one block can
be most of a model), so the limit here is what can be reached: with L layers ℓ, as many as are allowed and can be cut,

    B* = min max_ℓ FLOPs(ℓ)
    C* = min over divisions with  max_ℓ FLOPs(ℓ) ≤ (1+δ)·B*  of the largest crossing
    then, of the divisions with crossings up to (1+δ)·C*, the one with least Σ_ℓ FLOPs(ℓ)²

FLOPs are those of the forward operators and of the backward operators that follow them (:mod:`autopar.inter_op.crossings`).
With what crosses counts what of the batch both sides read: it is loaded, and held, twice.

Where to cut is chosen among *candidates*: between any two heavy operators the position with the least crossing, the first
of them on a plateau.  In the largest stretches of the program that repeat with a period of u operators (identical blocks),
only one position per period is a candidate, the same in all: the cheapest, and of several the first from where the
repetition starts.  So repeated blocks become identical layers, whatever their insides would allow.  Last, a candidate is
dropped if a clearly cheaper one lies within half a layer's work of it, or another at almost no distance: a light head
belongs to the block before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.errors import PlanError
from autopar.inter_op.crossings import boundaries
from autopar.inter_op.looped import Looped
from autopar.inter_op.placing import forward_operators

SLACK = 0.1
"""δ: amounts of work, and of bytes, that differ by less than this share are as good as equal."""
HEAVY = 0.02
"""An operator with at least this share of the work of the heaviest one separates groups of positions."""

Array = NDArray[np.float64]


def crossing_bytes(loop: Looped, state_pairs: Sequence[tuple[int, int]]) -> Array:
    """Bytes that cross per microbatch if a step is cut before forward operator p = 0 … F alone, float64 (F+1,)."""
    return boundaries(loop, state_pairs).crossing_bytes


def layers(loop: Looped, state_pairs: Sequence[tuple[int, int]], *, at_most: int, at_least: int = 1) -> tuple[int, ...]:
    """Positions in ``forward_operators(loop)`` before which a layer begins, ascending: up to ``at_most`` − 1 of them.

    Blocks that repeat are not cut inside, unless fewer than ``at_least`` layers come out otherwise. There may be still fewer
    where nothing can be cut: blocks inside one ``scan``.
    Raises :class:`~autopar.errors.PlanError` unless 1 ≤ ``at_least`` ≤ ``at_most``.
    """
    if not 1 <= at_least <= at_most:
        raise PlanError(
            f"a model cannot be divided into at least {at_least} and at most {at_most} layers; give 1 <= at_least <= at_most"
        )
    found = boundaries(loop, state_pairs)
    if not found.flops.sum() > 0:
        return ()
    crossing, flops = found.crossing_bytes + found.shared_bytes, found.flops
    candidates = candidate_positions(crossing, flops, _looks(loop), at_most)
    if len(candidates) + 1 < at_least:
        alone = range(len(flops))  # as if no operator repeated another
        candidates = candidate_positions(crossing, flops, alone, at_most)
    done = np.concatenate([[0.0], np.cumsum(flops)])
    if len(candidates) + 1 < at_least:  # one operator has most of the work: whatever is narrow will do
        candidates = tuple(p for p in sorted(set(_narrow_positions(crossing, flops))) if 0 < done[p] < done[-1])
    work = np.diff(done[[0, *candidates, len(flops)]])
    chosen = divide(work, crossing[list(candidates)], at_most)
    return tuple(candidates[number] for number in chosen)


# -------------------------------------------------------------------------------------------------------- candidates


def candidate_positions(crossing: Array, flops: Array, looks: Sequence[Hashable], at_most: int) -> tuple[int, ...]:
    """Positions at which a cut is worth considering, ascending (see the module docstring).

    ``crossing`` (F+1,) in bytes, ``flops`` and ``looks`` (F,): operators that look alike repeat each other.
    """
    done = np.concatenate([[0.0], np.cumsum(flops)])
    total = float(done[-1])
    narrow = _narrow_positions(crossing, flops)
    kept = set(narrow)
    for start, stop, period in _repetitions(looks, flops, total / at_most):
        kept -= set(range(start, stop + 1))
        kept |= set(_one_per_period(crossing, start, stop, period))
    inside = sorted(p for p in kept if 0 < done[p] < total)
    if not inside:
        return ()
    pieces = np.sort(np.diff(done[[0, *inside, len(flops)]]))
    usual = float(
        pieces[np.searchsorted(np.cumsum(pieces), total / 2)]
    )  # half of all work lies in pieces up to this one
    reach = max(total / at_most, usual) / 2
    cheapest = _least_within(done, crossing, narrow, inside, reach)
    good = [p for p, least in zip(inside, cheapest, strict=True) if crossing[p] <= (1 + SLACK) * least]
    apart: list[int] = []
    for position in good:
        before = done[apart[-1]] if apart else 0.0
        if min(done[position] - before, total - done[position]) > SLACK * reach:
            apart.append(position)
    return tuple(apart)


def _narrow_positions(crossing: Array, flops: Array) -> list[int]:
    """The first of the cheapest positions before, between and after heavy operators."""
    heavy = np.flatnonzero(flops >= HEAVY * flops.max())
    ends = [0, *(int(p) + 1 for p in heavy), len(crossing)]
    return [start + int(np.argmin(crossing[start:stop])) for start, stop in pairwise(ends) if start < stop]


def _least_within(
    done: Array, crossing: Array, narrow: Sequence[int], inside: Sequence[int], reach: float
) -> list[float]:
    """For each position inside: the least crossing among positions with less than ``reach`` of work between."""
    where = np.array(sorted({*narrow, *inside}))
    return [float(crossing[where[np.abs(done[where] - done[p]) < reach]].min()) for p in inside]


# -------------------------------------------------------------------------------------------------------- repetitions


def _repetitions(looks: Sequence[Hashable], flops: Array, least: float) -> list[tuple[int, int, int]]:
    """Stretches (start, stop, period) of operators that repeat, with at least some work; the heaviest first, disjoint."""
    numbers = {look: number for number, look in enumerate(dict.fromkeys(looks))}
    codes = np.array([numbers[look] for look in looks])
    done = np.concatenate([[0.0], np.cumsum(flops)])
    found = []
    for period in _periods(codes, flops):
        same = np.concatenate([[False], codes[:-period] == codes[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if stop - start >= period:
                found.append((float(done[stop + period] - done[start]), start, stop + period, period))
    taken: list[tuple[int, int, int]] = []
    for work, start, stop, period in sorted(found, key=lambda one: (-one[0], one[3], one[1])):
        if work >= least and all(stop <= other[0] or start >= other[1] for other in taken):
            taken.append((start, stop, period))
    return taken


def _periods(codes: NDArray[np.int64], flops: Array) -> list[int]:
    """Distances at which heavy operators that look alike follow each other: what a period can be."""
    heavy = np.flatnonzero(flops >= HEAVY * flops.max())
    periods = set()
    for code in np.unique(codes[heavy]):
        at = np.flatnonzero(codes == code)
        for step in range(1, min(len(at), _STEPS + 1)):
            periods.update(np.unique(at[step:] - at[:-step]).tolist())
    return sorted(periods)


_STEPS = 8
"""How often an operator may occur in one period, for the period to be found by it."""


def _one_per_period(crossing: Array, start: int, stop: int, period: int) -> range:
    """The same position in every period: where the crossing, at its largest, is least; of several the first."""
    worst = [float(crossing[start + phase : stop + 1 : period].max()) for phase in range(period)]
    least = min(worst)
    phase = next(number for number, one in enumerate(worst) if one <= (1 + SLACK) * least)
    return range(start + phase, stop + 1, period)


def _looks(loop: Looped) -> list[Hashable]:
    """What operators must share to repeat each other: primitive, and types of operands and results."""
    values = loop.body.values

    def kind(value: int | None) -> Hashable:
        return None if value is None or value not in values else (values[value].shape, values[value].dtype)

    return [
        (o.primitive, tuple(kind(v) for v in o.operands), tuple(kind(v) for v in o.results))
        for o in forward_operators(loop)
    ]


# ------------------------------------------------------------------------------------------------------ dynamic program


def divide(work: Array, crossing: Array, at_most: int) -> tuple[int, ...]:
    """Numbers of the cuts to make: ``work`` (P+1,) lies between the cuts, which cost ``crossing`` (P,).

    The objective is that of the module docstring. O(L·P²) for L layers, in P vector operations a layer.
    """
    done = np.concatenate([[0.0], np.cumsum(work)])
    everywhere = np.ones(len(crossing), dtype=bool)
    count = min(at_most, len(work))
    limit = (1 + SLACK) * _least_bottleneck(done, count)
    allowed = everywhere
    for cost in np.unique(crossing):
        cheap = crossing <= cost
        fewest = _fewest(done, cheap, limit)
        if fewest is not None and fewest <= count <= cheap.sum() + 1:
            allowed = crossing <= (1 + SLACK) * cost
            break
    return _most_even(done, allowed, limit, count)


def _least_bottleneck(done: Array, at_most: int) -> float:
    """The least possible work of the heaviest of up to ``at_most`` layers."""
    everywhere = np.ones(len(done) - 2, dtype=bool)
    sums = np.unique(done[None, :] - done[:, None])
    low, high = int(np.searchsorted(sums, done[-1] / at_most * (1 - 1e-9))), len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        fewest = _fewest(done, everywhere, float(sums[middle]))
        if fewest is not None and fewest <= at_most:
            high = middle
        else:
            low = middle + 1
    return float(sums[low])


def _fewest(done: Array, allowed: NDArray[np.bool_], limit: float) -> int | None:
    """The least number of layers, none above the limit, with allowed cuts only; None if there is no such division."""
    ends = done[np.concatenate([[True], allowed, [True]])]
    count, at = 0, 0
    while at < len(ends) - 1:
        after = int(np.searchsorted(ends, ends[at] + limit * (1 + 1e-9), side="right")) - 1
        if after == at:
            return None
        at, count = after, count + 1
    return count


def _most_even(done: Array, allowed: NDArray[np.bool_], limit: float, count: int) -> tuple[int, ...]:
    """The division into exactly ``count`` layers within the limit with the least sum of squares; cuts at allowed ones."""
    numbers = np.flatnonzero(allowed)
    ends = done[np.concatenate([[True], allowed, [True]])]
    size = ends[None, :] - ends[:, None]
    possible = np.triu(np.ones_like(size, dtype=bool), 1) & (size <= limit * (1 + 1e-9))
    price = np.where(possible, (size / ends[-1]) ** 2, np.inf)
    best = np.full(len(ends), np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(count):
        through = best[:, None] + price
        choices.append(np.argmin(through, axis=0))
        best = through.min(axis=0)
    cuts: list[int] = []
    at = len(ends) - 1
    for choice in reversed(choices):
        at = int(choice[at])
        cuts.append(at)
    return tuple(int(numbers[one - 1]) for one in reversed(cuts) if one > 0)
