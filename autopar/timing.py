"""How long does a call take, on a machine that does other things as well?

    least       the fewest seconds of many calls: the machine at rest
    difference  (long chain − short chain) / links more: the cost of a call drops out
    typical     the median of many calls: where calls differ in earnest, as allocations do

The chains of a difference take turns, so that a drift of the machine hits both, and the least of each counts.  Where a busy
machine makes the difference vanish, the long chain over its links, an upper bound, stands instead.  No figure is below the
resolution of the clock, so none is zero.

Where processor time is rationed (:mod:`autopar.cores`) the least of many short calls are those that the ration does not
stop: none of a step's work is as fast in the long run.  There the mean counts everywhere.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import ClusterError

LEAST_SECONDS = max(time.get_clock_info("perf_counter").resolution, 1e-12)


@dataclass(frozen=True)
class Timer:
    """Calls go on for ``seconds``, at least ``least_runs`` of each.

    Raises ``ClusterError`` for less than one run, or seconds that are not finite and at least zero.
    """

    seconds: float
    least_runs: int

    def __post_init__(self) -> None:
        if not (self.least_runs >= 1 and math.isfinite(self.seconds) and self.seconds >= 0):
            raise ClusterError(
                f"an effort of {self.least_runs} runs and {self.seconds} seconds; give one run or more and finite seconds"
            )

    def least(self, call: Callable[[], Any]) -> float:
        """The fewest seconds in which a call's result is there."""
        return self.of_many(self._runs((call,))[0])

    def typical(self, *calls: Callable[[], Any]) -> list[float]:
        """The median seconds of each call; the calls take turns."""
        return [self.of_varying(one) for one in self._runs(calls)]

    def difference(self, short: Callable[[], Any], long: Callable[[], Any], *, extra: int) -> float:
        """Seconds of one of the ``extra`` links that the long chain has more than the short one."""
        least, most = (self.of_many(one) for one in self._runs((short, long)))
        return max((most - least) / extra if most > least else most / (extra + 1), LEAST_SECONDS)

    def of_many(self, seconds: Sequence[float]) -> float:
        """What stands for the runs of a call that takes as long each time."""
        return min(seconds)

    def of_varying(self, seconds: Sequence[float]) -> float:
        """What stands for the runs of a call that takes now more and now less."""
        return statistics.median(seconds)

    def _runs(self, calls: Sequence[Callable[[], Any]]) -> list[list[float]]:
        """Seconds of every run of each call, after one that warms up."""
        for call in calls:
            jax.block_until_ready(call())
        found: list[list[float]] = [[] for _ in calls]
        started = time.perf_counter()
        while len(found[0]) < self.least_runs or time.perf_counter() - started < self.seconds:
            for call, seconds in zip(calls, found, strict=True):
                begun = time.perf_counter()
                jax.block_until_ready(call())
                seconds.append(max(time.perf_counter() - begun, LEAST_SECONDS))
        return found


class RationedTimer(Timer):
    """Where a control group stops all threads when they have had their time: what calls take on average."""

    def of_many(self, seconds: Sequence[float]) -> float:
        """The mean."""
        return statistics.fmean(seconds)

    def of_varying(self, seconds: Sequence[float]) -> float:
        """The mean."""
        return statistics.fmean(seconds)
