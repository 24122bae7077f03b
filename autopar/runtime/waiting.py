"""What the driver waits for from processes, for how long, and what it says when that does not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import AutoparError, OutOfMemoryError, WorkerError

STARTING_SECONDS = 120.0
"""So long the processes of a mesh may take to start and to meet."""
COMPILING_SECONDS = 1800.0
FETCHING_SECONDS = 600.0
"""So long the hosts may take to copy, to write or to read a state."""
SLOWEST_BYTES_PER_SECOND = 1e6
"""An array that comes more slowly does not come."""
PULSE_SECONDS = 2.0
"""So often processes are asked for a sign of life while they are waited for."""
SILENT_SECONDS = 10.0
"""So long a process may take to give it."""
RESTING_SECONDS = 15.0
"""So long a mesh may take to come to rest when another has failed."""


def collected(
    refs: Sequence[Any], limit_seconds: float, what: str, while_waiting: Callable[[], None] = lambda: None
) -> list[Any]:
    """What calls return, in their order; the first that fails is raised at once, whatever the others still do.

    ``while_waiting`` is called every :data:`PULSE_SECONDS` and may raise.
    Raises ``WorkerError``: a process died, raised, or did not answer within the limit.
    """
    import ray

    left, until = list(refs), time.monotonic() + limit_seconds
    while left:
        pause = min(PULSE_SECONDS, max(0.0, until - time.monotonic()))
        ready, left = ray.wait(left, num_returns=1, timeout=pause)
        if not ready and time.monotonic() < until:
            while_waiting()
        elif not ready:
            raise WorkerError(f"waited {limit_seconds:g} s for {what}; {len(left)} of {len(refs)} did not answer")
        for ref in ready:
            checked(ref, what)
    return [ray.get(ref) for ref in refs]


def checked(ref: Any, what: str) -> None:
    """Raise ``WorkerError``, or the error of ours, with which a call ended."""
    import ray

    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, AutoparError):
            raise cause from error
        said = f"while waiting for {what}: {type(cause).__name__}: {cause}"
        if "RESOURCE_EXHAUSTED" in said or "Out of memory" in said:
            raise OutOfMemoryError(
                f"{said}. The devices have too little memory: plan with memory_per_device=..., or more microbatches"
            ) from error
        raise WorkerError(said) from error
    except ray.exceptions.RayError as error:
        raise WorkerError(f"while waiting for {what}: a process is gone ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """Kind and first line of an error of Ray's, which are long."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
