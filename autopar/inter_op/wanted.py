"""What of a pipeline did the user fix?"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plan import Schedule
from autopar.schedule.orders import OrderFunction


@dataclass(frozen=True)
class Wanted:
    """What the user has fixed of a pipeline; None: free."""

    num_stages: int | None = None
    schedule: Schedule | OrderFunction | None = None
    stage_size: int | None = None
    """Devices of every stage."""
    stages_per_mesh: int | None = None

    @property
    def known_schedule(self) -> Schedule | None:
        """The schedule that is asked for by its name; several stages on a mesh ask for the one that deals them round."""
        if (self.stages_per_mesh or 1) > 1:
            return Schedule.INTERLEAVED_ONE_F_ONE_B
        return self.schedule if isinstance(self.schedule, Schedule) else None

    @property
    def own_schedule(self) -> OrderFunction | None:
        """The schedule that is asked for as a function."""
        return None if isinstance(self.schedule, Schedule) else self.schedule

    @property
    def may_be_alone(self) -> bool:
        """Whether every stage may have a mesh of its own."""
        return self.known_schedule is not Schedule.INTERLEAVED_ONE_F_ONE_B

    @property
    def may_be_dealt(self) -> bool:
        """Whether stages may be dealt round, or as a function says."""
        return self.stages_per_mesh != 1 and self.known_schedule in (None, Schedule.INTERLEAVED_ONE_F_ONE_B)
