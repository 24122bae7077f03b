"""How long is the block in which all scratch buffers lie, each at an offset that it keeps?

With buffers b of s_b bytes, alive from a_b to e_b in the order of work, offsets o_b are wanted such that

    [o_b, o_b + s_b) and [o_c, o_c + s_c) are disjoint where [a_b, e_b) and [a_c, e_c) meet        bytes = max_b o_b + s_b

XLA goes through the buffers in two orders, by s and by e − a, the greater first, puts each into the shortest hole that
is long enough, and takes the shorter of both blocks.  Time is counted in events, one for each buffer that comes or goes, not
in kernels; what still ties is placed in the order in which its makers are read from the program's results.

That is chaotic: of a U-Net whose foretold buffers pack without a hole, one order in twenty in which a few moments change places
leaves holes of a seventh, and XLA's own order is one of those.  A plan must not need more memory than was foretold, so
:func:`bytes_in_near_orders` packs n orders like the one that is foretold, in which moment i is moved to i + u_i, u_i uniform
below h, and takes the worst share of holes among them:

    bytes = live · max_k packed_k / live_k        live = max_t Σ {s_b : a_b ≤ t < e_b}

(what lives at once may differ from order to order as well, but that is not what is uncertain).  n draws find what one order in n
does with a chance of 1 − 1/e.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

PACKED_BUFFERS = 512
"""So many of the biggest buffers are given offsets; smaller ones fit between them."""

NEAR_ORDERS = 32
"""So many orders of work are packed besides the one foretold."""
NEAR_MOMENTS = 4
"""So many moments later, at most, something may come or go in them."""


@dataclass(frozen=True, slots=True)
class Span:
    """``size_bytes`` needed from one time to another; what runs in a loop's body lies within the loop's one unit.

    ``rank`` is the place of its maker among all; ``handed_over`` are the times at which one array that lies there gives way to
    the next: among equal sizes XLA asks how long the first one stays.
    """

    size_bytes: int
    start: float
    stop: float
    rank: int = 0
    handed_over: tuple[float, ...] = ()


def packed_bytes(spans: Sequence[Span], enough_bytes: float = 0.0) -> int:
    """Bytes of one block that holds the biggest of ``spans`` at fixed offsets, those of overlapping times apart.

    Where one order needs no more than ``enough_bytes`` the other is not tried, which could only need less.
    """
    if not spans:
        return 0
    length, first = _events(spans)
    biggest = sorted(
        range(len(spans)), key=lambda number: (-spans[number].size_bytes, -first[number], spans[number].rank)
    )[:PACKED_BUFFERS]
    by_size = _pack([spans[number] for number in biggest])
    if by_size <= enough_bytes:
        return by_size
    longest = sorted(biggest, key=lambda number: (-length[number], -spans[number].size_bytes, spans[number].rank))
    return min(by_size, _pack([spans[number] for number in longest]))


def bytes_in_near_orders(spans: Sequence[Span]) -> int:
    """Bytes of a block that is long enough for ``spans`` in their own order, and for their holes in orders like it.

    The same spans give the same bytes.
    """
    own, live = packed_bytes(spans), _live_bytes(spans)
    worst_share = own / max(live, 1)
    for moved in _near(spans):
        live_then = max(_live_bytes(moved), 1)
        worst_share = max(worst_share, packed_bytes(moved, worst_share * live_then) / live_then)
    return max(own, round(live * worst_share))


def _near(spans: Sequence[Span]) -> Iterator[list[Span]]:
    moments = sorted({moment for span in spans for moment in (span.start, *span.handed_over, span.stop)})
    drawn = random.Random(0)
    for _ in range(NEAR_ORDERS):
        moved = {moment: number + drawn.uniform(0, NEAR_MOMENTS) for number, moment in enumerate(moments)}
        yield [_moved(span, moved) for span in spans]


def _moved(span: Span, moved: Mapping[float, float]) -> Span:
    start, stop = sorted((moved[span.start], moved[span.stop]))
    between = sorted(moment for one in span.handed_over if start < (moment := moved[one]) < stop)
    return replace(span, start=start, stop=math.nextafter(stop, math.inf), handed_over=tuple(between))


def _live_bytes(spans: Sequence[Span]) -> int:
    changes = sorted(
        change for span in spans for change in ((span.start, 1, span.size_bytes), (span.stop, 0, -span.size_bytes))
    )
    return max(accumulate(size_bytes for _, _, size_bytes in changes), default=0)


def _events(spans: Sequence[Span]) -> tuple[list[int], list[int]]:
    """How many arrays come or go while each span lasts, and while its first array does.

    Of what goes at one time the first to have come goes first, and all that goes before what comes.
    """
    comes, goes = 1, 0
    events: list[tuple[float, int, float, int, int]] = []
    for number, span in enumerate(spans):
        came = span.start
        for moment in (*span.handed_over, span.stop):
            events += ((came, comes, moment, span.rank, number), (moment, goes, came, span.rank, number))
            came = moment
    length, first = [0] * len(spans), [0] * len(spans)
    begun = [-1] * len(spans)
    for time, (_, kind, _, _, number) in enumerate(sorted(events)):
        if begun[number] < 0:
            begun[number] = time
        elif kind == goes:
            length[number] = time - begun[number]
            first[number] = first[number] or length[number]
    return length, first


def _pack(spans: Sequence[Span]) -> int:
    start, stop = np.array([(span.start, span.stop) for span in spans]).reshape(-1, 2).T
    low, high = np.zeros((2, len(spans)), dtype=np.int64)
    for number, span in enumerate(spans):
        near = np.flatnonzero((start[:number] < span.stop) & (stop[:number] > span.start))
        near = near[np.argsort(low[near], kind="stable")]
        tops = np.concatenate(([0], np.maximum.accumulate(high[near])))
        holes = low[near] - tops[:-1]
        fits = np.flatnonzero(holes >= span.size_bytes)
        low[number] = tops[fits[np.argmin(holes[fits])]] if len(fits) else tops[-1]
        high[number] = low[number] + span.size_bytes
    return int(high.max(initial=0))
