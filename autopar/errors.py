"""The exceptions of this library: each says what was wrong, where, and what to do."""

from __future__ import annotations

import math


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""


class TraceError(AutoparError):
    """The function or its arguments cannot be traced or understood."""


class ClusterError(AutoparError):
    """A cluster description is wrong, or the devices at hand do not match it."""


class PlanError(AutoparError):
    """No plan meets the demands, or a plan does not fit the function or the cluster."""


class BudgetError(PlanError):
    """No plan keeps the memory of a device; the leanest that was looked at needs ``needed_bytes`` there.

    Of a pipeline ``stages`` are the numbers of those that are too large.
    """

    def __init__(  # has defaults to be picklable
        self, message: str, *, needed_bytes: float = math.nan, stages: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.stages = stages


class ScheduleError(PlanError):
    """An order of tasks over stages is not complete, or lets meshes wait for each other for ever."""


class TransportError(AutoparError):
    """A value did not come from another mesh."""


class CheckpointError(AutoparError):
    """A checkpoint cannot be written or read, or is one of another state."""


class DataError(AutoparError):
    """The user's function that reads batches raised, or cannot be sent to the hosts."""


class WorkerError(AutoparError):
    """A process on another host died, hangs, or raised."""


class OutOfMemoryError(WorkerError):
    """A step needs more memory than the devices of another host have; trying again would end in the same way."""


class InternalError(AutoparError):
    """A pass of this library broke a promise that the next one relies on; a bug to report, with the program at hand."""
