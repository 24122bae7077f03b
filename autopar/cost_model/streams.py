"""Two streams, one that works and one that sends: how long do both take together, and how much of it is hidden?

Kernels of w₁, w₂, … seconds run one after the other; a collective of c seconds runs beside them from its start until somebody
waits for its end.  In a given order of kernels, starts and ends

    kernel   t ← t + w            start   f ← max(t, f) + c            end   t ← max(t, f)

where t says when the kernels so far are done and f when the collectives so far are, one after the other.  The later of both at
the end is the time of all, and

    hidden = Σ w + Σ c − max(t, f),        0 ≤ hidden ≤ min(Σ w, Σ c)

for a kernel's seconds hide one collective at a time.  More seconds of anything never hide less in the same order.

:func:`backwards` finds an order as XLA's latency-hiding scheduler does.  From the results back, a collective's end stands right
before its first reader; then come kernels, the last of the program first, until they are believed to take as long as it; then
its start, and only now the next one's end: one is under way at a time.  That is no optimum, and is not meant to be: a kernel
beside a collective that is hidden already is missed by the next.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import starmap


class TwoStreams:
    """Owns the clocks of both streams on the way through an order."""

    def __init__(self) -> None:
        self._busy_seconds = 0.0
        self._worked_seconds = 0.0
        self._sent_seconds = 0.0
        self._ends: dict[Hashable, float] = {}

    def work(self, seconds: float) -> None:
        """A kernel, or a collective beside which nothing may run."""
        self._worked_seconds += seconds
        self._busy_seconds += seconds

    def start(self, name: Hashable, seconds: float) -> None:
        """A collective begins, when those before it are done."""
        self._sent_seconds = max(self._worked_seconds, self._sent_seconds) + seconds
        self._busy_seconds += seconds
        self._ends[name] = self._sent_seconds

    def end(self, name: Hashable) -> None:
        """Somebody waits for the collective that was started under this name."""
        self._worked_seconds = max(self._worked_seconds, self._ends.pop(name))

    def awaits(self, name: Hashable) -> bool:
        """Whether a collective was started under this name, and nobody has waited for it."""
        return name in self._ends

    @property
    def seconds(self) -> float:
        """Until both streams are done."""
        return max(self._worked_seconds, self._sent_seconds)

    @property
    def hidden_seconds(self) -> float:
        """By how much that is less than everything one after the other."""
        return max(0.0, self._busy_seconds - self.seconds)


class Deed(Enum):
    """What happens at one place of an order."""

    WORK = "work"
    START = "start"
    END = "end"


@dataclass(frozen=True)
class Tasks:
    """Kernels and collectives by number, in the order of the program: their seconds, which they wait for, which of them send."""

    seconds: Mapping[int, float]
    reads: Mapping[int, Collection[int]]
    sent: Collection[int]


@dataclass(frozen=True)
class Taste:
    """Of tasks that could stand at the same place, seen from the results, the one with the least comes first."""

    of_kernels: Callable[[int], float]
    of_collectives: Callable[[int], float]


def tastes(tasks: Tasks) -> Iterator[Taste]:
    """Kernels: the last in the program first, or the first; collectives: so as well, or the longest first, or the shortest."""
    ways: list[Callable[[int], float]] = [lambda task: -task, lambda task: task]
    lengths: list[Callable[[int], float]] = [lambda task: -tasks.seconds[task], lambda task: tasks.seconds[task]]
    return starmap(Taste, itertools.product(ways, [*ways, *lengths]))


def backwards(tasks: Tasks, taste: Taste, belief: float) -> list[tuple[Deed, int]]:
    """An order of all tasks as XLA finds it, which takes collectives for ``belief`` times as long as they are."""
    waiting = Counter(read for reads in tasks.reads.values() for read in reads)
    kernels: list[tuple[float, int]] = []
    ends: list[tuple[float, int]] = []

    def offer(task: int) -> None:
        if task in tasks.sent:
            heapq.heappush(ends, (taste.of_collectives(task), task))
        else:
            heapq.heappush(kernels, (taste.of_kernels(task), task))

    def done(task: int) -> None:
        for read in tasks.reads[task]:
            waiting[read] -= 1
            if not waiting[read]:
                offer(read)

    for task in tasks.reads:
        if not waiting[task]:
            offer(task)
    order: list[tuple[Deed, int]] = []
    under_way: tuple[int, float] | None = None
    worked_seconds = 0.0
    while kernels or ends or under_way:
        if under_way and (worked_seconds >= under_way[1] or not kernels):
            order.append((Deed.START, under_way[0]))
            done(under_way[0])
            under_way = None
        elif ends and not under_way:
            _, task = heapq.heappop(ends)
            order.append((Deed.END, task))
            under_way = task, worked_seconds + belief * tasks.seconds[task]
        else:
            _, task = heapq.heappop(kernels)
            order.append((Deed.WORK, task))
            worked_seconds += tasks.seconds[task]
            done(task)
    return order[::-1]


def hidden_in(order: Iterable[tuple[Deed, int]], seconds: Mapping[int, float]) -> float:
    """Hidden seconds of an order."""
    streams = TwoStreams()
    for deed, task in order:
        match deed:
            case Deed.WORK:
                streams.work(seconds[task])
            case Deed.START:
                streams.start(task, seconds[task])
            case Deed.END:
                streams.end(task)
    return streams.hidden_seconds


def surely_hidden(tasks: Tasks, belief: float) -> float:
    """The least that is hidden, whatever the taste."""
    return min(hidden_in(backwards(tasks, taste, belief), tasks.seconds) for taste in tastes(tasks))
