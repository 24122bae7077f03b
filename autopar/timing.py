"""How long does a call take, on a machine that does other things as well?

    least       the fewest seconds of many calls: the machine at rest
    difference  (long chain − short chain) / links more: the cost of a call drops out
    typical     the median of many calls: where calls differ in earnest, as allocations do
    processor   the median of what all threads compute meanwhile, however long they wait

The chains of a difference take turns, so that a drift of the machine hits both, and the least of each counts.  Where a busy
machine makes the difference vanish, the long chain over its links, an upper bound, stands instead.  No figure is below the
resolution of the clock, so none is zero.

Where processor time is rationed to q cores (:mod:`autopar.cores`) all threads stop when a period's share is spent.  Most short
calls are not stopped, a few for long, and the clock tells nothing of any of them.  In the long run a call takes

    max( least seconds by the clock,  median of its processor seconds / q )

of which the first is that of calls that wait more than they compute, and so are never stopped.  Only of threads that wait for
each other the mean of the clock counts: one that was stopped keeps the others waiting, and what they do not use is lost.
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


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a call: by the clock, and what all threads of the process computed meanwhile."""

    seconds: float
    processor_seconds: float


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

    def waiting(self, short: Callable[[], Any], long: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of a call whose threads wait for each other, and what another one takes longer.

        Each run is held against the one before it, so that no drift of the machine hits one more than the other.
        """
        runs = self._runs((short, long))
        more = [
            Run(after.seconds - before.seconds, after.processor_seconds - before.processor_seconds)
            for before, after in zip(*runs, strict=True)
        ]
        return self.of_waiting(runs[0]), self.of_waiting(more)

    def processor_seconds(self, call: Callable[[], Any]) -> float:
        """The median of what all threads of this process compute while a call's result is waited for."""
        return statistics.median(run.processor_seconds for run in self._runs((call,))[0])

    def difference(self, short: Callable[[], Any], long: Callable[[], Any], *, extra: int) -> float:
        """Seconds of one of the ``extra`` links that the long chain has more than the short one."""
        least, most = (self.of_many(one) for one in self._runs((short, long)))
        return max((most - least) / extra if most > least else most / (extra + 1), LEAST_SECONDS)

    def of_many(self, runs: Sequence[Run]) -> float:
        """What stands for the runs of a call that takes as long each time."""
        return min(run.seconds for run in runs)

    def of_varying(self, runs: Sequence[Run]) -> float:
        """What stands for the runs of a call that takes now more and now less."""
        return statistics.median(run.seconds for run in runs)

    def of_waiting(self, runs: Sequence[Run]) -> float:
        """What stands for the runs of a call in which threads wait for each other."""
        return self.of_varying(runs)

    def _runs(self, calls: Sequence[Callable[[], Any]]) -> list[list[Run]]:
        """Every run of each call, after one that warms up; the calls take turns."""
        for call in calls:
            jax.block_until_ready(call())
        found: list[list[Run]] = [[] for _ in calls]
        started = time.perf_counter()
        while len(found[0]) < self.least_runs or time.perf_counter() - started < self.seconds:
            for call, runs in zip(calls, found, strict=True):
                begun, spent = time.perf_counter(), time.process_time()
                jax.block_until_ready(call())
                runs.append(Run(_positive(time.perf_counter() - begun), _positive(time.process_time() - spent)))
        return found


def _positive(seconds: float) -> float:
    return max(seconds, LEAST_SECONDS)


@dataclass(frozen=True)
class RationedTimer(Timer):
    """For work on processors of which a control group leaves this process ``cores``."""

    cores: float

    def of_many(self, runs: Sequence[Run]) -> float:
        """What the ration allows, or what it does not hinder."""
        computed = statistics.median(run.processor_seconds for run in runs)
        return max(super().of_many(runs), computed / self.cores)

    def of_varying(self, runs: Sequence[Run]) -> float:
        """The same."""
        return self.of_many(runs)

    def of_waiting(self, runs: Sequence[Run]) -> float:
        """The mean."""
        return statistics.fmean(run.seconds for run in runs)


def timer_of(seconds: float, least_runs: int, cores: float | None) -> Timer:
    """That of a machine which leaves this process ``cores`` (None: all that there are)."""
    return Timer(seconds, least_runs) if cores is None else RationedTimer(seconds, least_runs, cores)
