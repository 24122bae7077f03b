"""How long is the block in which all scratch buffers lie, each at an offset that it keeps?

With buffers b of s_b bytes, alive from a_b to e_b in the order of work, offsets o_b are wanted such that

    [o_b, o_b + s_b) and [o_c, o_c + s_c) are disjoint where [a_b, e_b) and [a_c, e_c) meet        bytes = max_b o_b + s_b

XLA goes through the buffers in two orders, by s and by e − a, the greater first, puts each into the shortest hole that
is long enough, and takes the shorter of both blocks.  Time is counted in events, one for each buffer that comes or goes, not
in kernels; what still ties is placed in the order in which its makers are read from the program's results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PACKED_BUFFERS = 512
"""So many of the biggest buffers are given offsets; smaller ones fit between them."""


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


def packed_bytes(spans: Sequence[Span]) -> int:
    """Bytes of one block that holds the biggest of ``spans`` at fixed offsets, those of overlapping times apart."""
    if not spans:
        return 0
    length, first = _events(spans)
    biggest = sorted(
        range(len(spans)), key=lambda number: (-spans[number].size_bytes, -first[number], spans[number].rank)
    )[:PACKED_BUFFERS]
    longest = sorted(biggest, key=lambda number: (-length[number], -spans[number].size_bytes, spans[number].rank))
    return min(_pack([spans[number] for number in order]) for order in (biggest, longest))


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
