"""How long does a call take, on a machine that does other things as well?

    least       the fewest seconds of many calls: the machine at rest
    difference  (long chain − short chain) / links more: the cost of a call drops out
    typical     the median of many calls: where calls differ in earnest, as allocations do
    processor   the median of what all threads compute meanwhile, however long they wait

The chains of a difference take turns, so that a drift of the machine hits both, and the least of each counts.  Where a busy
machine makes the difference vanish, the long chain over its links, an upper bound, stands instead.  No figure is below the
resolution of the clock, so none is zero.

Where processor time is rationed to q cores (:mod:`autopar.cores`) all threads stop when a period's share is spent.  Most short
calls are not stopped, a few for long, and the clock tells nothing of any of them.  Calls that go on until they use up the
ration take in the long run

    seconds = processor seconds of the call / q

of which the median counts everywhere.  Calls that leave some of it unused were not stopped: for them the clock stands.
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

    def processor_seconds(self, call: Callable[[], Any]) -> float:
        """The median of what all threads of this process compute while a call's result is waited for."""
        return statistics.median(run.processor_seconds for run in self._timed((call,))[0])

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
        return [[run.seconds for run in runs] for runs in self._timed(calls)]

    def _timed(self, calls: Sequence[Callable[[], Any]]) -> list[list[_Run]]:
        """Every run of each call, after one that warms up; the calls take turns."""
        for call in calls:
            jax.block_until_ready(call())
        found: list[list[_Run]] = [[] for _ in calls]
        started = time.perf_counter()
        while len(found[0]) < self.least_runs or time.perf_counter() - started < self.seconds:
            for call, runs in zip(calls, found, strict=True):
                begun, spent = time.perf_counter(), time.process_time()
                jax.block_until_ready(call())
                runs.append(_Run(_positive(time.perf_counter() - begun), _positive(time.process_time() - spent)))
        return found


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of a call: by the clock, and what all threads of the process computed meanwhile."""

    seconds: float
    processor_seconds: float


def _positive(seconds: float) -> float:
    return max(seconds, LEAST_SECONDS)


USED_UP = 0.9
"""Calls that take so much of the ration are stopped for want of more."""


@dataclass(frozen=True)
class RationedTimer(Timer):
    """For work on processors of which a control group leaves this process ``cores``."""

    cores: float

    def of_many(self, seconds: Sequence[float]) -> float:
        """The median: of processor time no run is the machine at rest."""
        return statistics.median(seconds)

    def _runs(self, calls: Sequence[Callable[[], Any]]) -> list[list[float]]:
        timed = self._timed(calls)
        clock = sum(run.seconds for runs in timed for run in runs)
        spent = sum(run.processor_seconds for runs in timed for run in runs)
        if spent < USED_UP * self.cores * clock:
            return [[run.seconds for run in runs] for runs in timed]
        return [[run.processor_seconds / self.cores for run in runs] for runs in timed]
