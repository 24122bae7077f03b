"""How long may a step take before its mesh counts as hanging?

    limit = FIRST_STEP_SECONDS                            while only the first step is known
    limit = max(HANGING_SECONDS, HANGING_SHARE · max t)   t: seconds of recent steps, each on its slowest process

The first step is no measure of those that follow: files are opened, caches and communicators made.  What was slow long ago is
none either, so that a run that has stumbled once notices the next fault as soon as before.
"""

from __future__ import annotations

FIRST_STEP_SECONDS = 300.0
"""How long a step may take while no other than the first was measured."""
HANGING_SHARE = 20.0
HANGING_SECONDS = 30.0
"""A mesh hangs when a step takes so many times as long as the slowest recent one, and so many seconds at least."""
RECENT_STEPS = 100
"""So many steps are recent."""


class Pace:
    """Owns the times of one program's recent steps."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def took(self, step: int, seconds: float) -> None:
        """A process has done a step, in so many seconds."""
        self._seconds[step] = max(seconds, self._seconds.get(step, 0.0))
        if len(self._seconds) > RECENT_STEPS + 1:  # with the oldest, which does not count
            del self._seconds[next(iter(self._seconds))]

    def start_over(self) -> None:
        """The next step is a first one."""
        self._seconds.clear()

    @property
    def limit_seconds(self) -> float:
        """How long a step may take."""
        _, *recent = self._seconds.values() or (0.0,)
        return max(HANGING_SECONDS, HANGING_SHARE * max(recent)) if recent else FIRST_STEP_SECONDS
