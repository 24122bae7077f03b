"""What does a step of many microbatches take, if steps of few were simulated?

After a lead-in a schedule does the same again and again, microbatch after microbatch (in groups of P, the meshes, where stages
are dealt round them).  So with two numbers of microbatches n₁ < n₂ beyond the lead-in, both as far from N as whole groups,

    T(N) = T(n₂) + (N − n₂) · (T(n₂) − T(n₁)) / (n₂ − n₁)

Where a schedule bounds the microbatches in flight, bytes grow with N by no more than the rows of the batch that wait to be used.
Between the start and the end of what repeats they go straight, so the fullest moment of any N is that of n₂, with its own
growth, or one in its first half, with that of the rows:

    M(N) = max { M(n₂) + (N − n₂) · max(0, M(n₂) − M(n₁)) / (n₂ − n₁),  M½(n₂) + (N − n₂) · row }

Where all forwards come first (GPipe) the fullest moment may be another one with every N, and a schedule of the user's need not
repeat itself: of these a step is simulated as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_model.simulate import Simulation
from autopar.plan import Schedule

LEAD_IN, REPEATS = 6, 2
"""What repeats has begun after so many microbatches for each mesh, and is looked at for so many.

With slow messages between uneven stages a lead-in of 3 was too short: of random pipelines the worst was foretold 7 % too fast,
with this one 0.6 % too slow, and most to the last digit."""

SIMULATED_AT_LEAST = 32
"""Steps of so many microbatches are simulated as they are."""


@dataclass(frozen=True)
class Forecast:
    """Seconds of a step, and the most bytes on a device of each mesh, and in the memory of its host for it."""

    step_seconds: float
    peak_bytes: tuple[float, ...]
    host_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """A simulated step of ``count`` microbatches; ``row_bytes`` are given to a device of each mesh for every microbatch.

    ``host_bytes`` are the most in the memory of the host: where a step repeats itself, the same in longer ones.
    """

    count: int
    simulation: Simulation
    row_bytes: tuple[float, ...]
    host_bytes: tuple[int, ...] = ()


REPEATING = frozenset(
    {
        Schedule.ONE_F_ONE_B,
        Schedule.EAGER_ONE_F_ONE_B,
        Schedule.INTERLEAVED_ONE_F_ONE_B,
        Schedule.ZERO_BUBBLE_H1,
        Schedule.ZERO_BUBBLE_H2,
    }
)
"""Schedules of several stages that do the same again and again, with a bounded number of microbatches in flight."""


def rehearsed_counts(schedule: object, count: int, num_meshes: int) -> tuple[int, ...]:
    """The numbers of microbatches to simulate for a forecast of ``count``: two, or ``count`` itself where it is not large.

    ``schedule`` is a :class:`~autopar.plan.Schedule` or a function of the user's.
    """
    group = num_meshes
    first = LEAD_IN * group + count % group
    last = first + REPEATS * group
    if schedule not in REPEATING or count <= max(SIMULATED_AT_LEAST, last):
        return (count,)
    return first, last


def lean_count(schedule: object, count: int, num_meshes: int) -> int | None:
    """A small number of microbatches with which a step holds no more bytes than with ``count``; None: none is known.

    Of GPipe every microbatch that is left out leaves out its residuals.
    """
    few = LEAD_IN * num_meshes
    return few if schedule is Schedule.GPIPE and count > max(SIMULATED_AT_LEAST, few) else None


def forecast(rehearsals: Sequence[Rehearsal], count: int) -> Forecast:
    """What a step of ``count`` microbatches takes; ``rehearsals`` are those of :func:`rehearsed_counts`."""
    last = rehearsals[-1]
    if last.count == count:
        return Forecast(last.simulation.step_seconds, last.simulation.peak_bytes, last.host_bytes)
    first, more = rehearsals[0], count - last.count
    repeats = more / (last.count - first.count)
    seconds = last.simulation.step_seconds
    peaks = zip(
        first.simulation.peak_bytes,
        last.simulation.peak_bytes,
        _early_peaks(last.simulation),
        last.row_bytes,
        strict=True,
    )
    return Forecast(
        seconds + repeats * (seconds - first.simulation.step_seconds),
        tuple(max(peak + repeats * max(0.0, peak - before), early + more * row) for before, peak, early, row in peaks),
        last.host_bytes,
    )


def _early_peaks(simulation: Simulation) -> tuple[float, ...]:
    """The most bytes on a device of each mesh in the first half of a step."""
    half_seconds = simulation.step_seconds / 2
    return tuple(
        max((size for seconds, size in curve if seconds <= half_seconds), default=0.0) for curve in simulation.memory
    )
