"""Which arrays live in bytes that a program has anyway?

The bytes of each result, and of each donated argument with the result that replaces it, are a *room* r of s_r bytes.  XLA fills
the rooms before it makes a heap of the rest.  It goes through all other arrays, the largest first; array a may enter r if

    s_a ≤ s_r        and for every b in r:    e_b < start_a    or    e_a < start_b
                                           or e_b = start_a and a is written over b    or the other way round

and enters the room of an operand that it is written over if it may, else the smallest.  Among equal sizes arrays enter, and
rooms were made, in the order in which their makers are read from the program's results; the last room is tried first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

NEGLIGIBLE_SHARE = 1e-3
"""Arrays below this share of the biggest enter no room: they are many, and it changes nothing."""

_NOBODY = -1


@dataclass(slots=True)
class Tenancy:
    """A buffer: which node's array lives in it, and from when to when; both moments are its own.

    ``is_shared`` where several arrays must have it, one after the other, as those that are made in place.
    """

    node: int
    size_bytes: int
    start: int
    end: int
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a result or a donated argument, and who has them when; the last one stays."""

    size_bytes: int
    tenants: tuple[Tenancy, ...]
    rank: int = 0


def without_lodgers(
    buffers: Sequence[Tenancy],
    rooms: Sequence[Room],
    overwrites: Mapping[int, Collection[int]],
    rank: Mapping[int, int],
) -> list[Tenancy]:
    """The buffers that find no room.

    ``overwrites`` are the nodes that a node may be written over, ``rank`` says in which order makers are read from the
    results.
    """
    if not buffers or not rooms:
        return [*buffers]
    least = NEGLIGIBLE_SHARE * max(buffer.size_bytes for buffer in buffers)
    holes = _Holes([room for room in rooms if room.size_bytes >= least])
    kept = []
    for buffer in sorted(buffers, key=lambda buffer: (-buffer.size_bytes, rank.get(buffer.node, 0))):
        if buffer.size_bytes < least or not holes.take(buffer, overwrites):
            kept.append(buffer)
    return kept


class _Holes:
    """Owns the times at which rooms are empty, in the order in which they are tried, and who is there before and after."""

    def __init__(self, rooms: Sequence[Room]) -> None:
        found = []
        for room in sorted(rooms, key=lambda room: (room.size_bytes, -room.rank)):
            before, since = _NOBODY, 0
            for tenant in room.tenants:
                found.append((room.size_bytes, since, tenant.start - 1, before, tenant.node))
                before, since = tenant.node, tenant.end + 1
        self._sizes, self._starts, self._ends, self._before, self._after = (
            np.array(found, dtype=np.int64).reshape(-1, 5).T
        )

    def take(self, buffer: Tenancy, overwrites: Mapping[int, Collection[int]]) -> bool:
        """Let a buffer in, if a room is empty while it lives."""
        node, same = buffer.node, self._sizes == buffer.size_bytes
        under = overwrites.get(node, ())
        over_another = [
            k for k in np.flatnonzero(same & (self._starts == buffer.start + 1)) if self._before[k] in under
        ]
        under_another = [
            k
            for k in np.flatnonzero(same & (self._ends == buffer.end - 1))
            if node in overwrites.get(self._after[k], ())
        ]
        begins = self._starts <= buffer.start
        begins[over_another] = True
        lasts = self._ends >= buffer.end
        lasts[under_another] = True
        fits = (self._sizes >= buffer.size_bytes) & begins & lasts
        preferred = [k for k in over_another if fits[k]]
        if preferred or fits.any():
            self._split(int(preferred[0] if preferred else fits.argmax()), buffer)
            return True
        return False

    def _split(self, k: int, buffer: Tenancy) -> None:
        """What is left of a hole are two, before and after."""
        self._sizes = np.insert(self._sizes, k, self._sizes[k])
        self._starts = np.insert(self._starts, k + 1, buffer.end + 1)
        self._ends = np.insert(self._ends, k, buffer.start - 1)
        self._before = np.insert(self._before, k + 1, buffer.node)
        self._after = np.insert(self._after, k, buffer.node)
