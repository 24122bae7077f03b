"""In how many microbatches is a step on one mesh the fastest?

More microbatches cost more, for parameters are gathered and gradients added up once in each, and need less memory.  So

    a program       is planned in few of them first, then in more, as long as memory is what the plan so far pays for
    a large one     in ``MIDDLE_COUNT`` first or in the most, and in others where their bounds say that these may be faster

Where not even the leanest layouts have room by far, nothing is solved.  Meshes of many axes, which take longer than all others
together and make hardly a plan faster, are looked at in the number of microbatches that is the best on the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from autopar.errors import BudgetError
from autopar.inter_op.examples import CoupledBatchError
from autopar.intra_op.search import FEW_AXES
from autopar.intra_op.task import WORTH_SHARE, Found, TooSlow
from autopar.plan import Plan
from autopar.subjects import Subjected

MIDDLE_COUNT = 16
"""A large program that does not fit as a whole is planned in so many microbatches first."""

ANY_AXES = range(1, 9)
FEW, MANY = range(1, FEW_AXES + 1), range(FEW_AXES + 1, 9)
"""Numbers of axes of a mesh."""

OneMesh = tuple[Subjected, Plan, Found]


class Counted(Protocol):
    """A planner of one step on one mesh, asked for numbers of microbatches."""

    @property
    def is_wide(self) -> bool:
        """Whether there are meshes of few axes and of many, and those of many take long."""

    def may_fit(self, count: int) -> bool:
        """Whether a plan in so many microbatches might keep the budget."""

    def plan_below(self, count: int, seconds: float, axes: range) -> OneMesh | TooSlow:
        """The plan on meshes of so many axes, unless it is known that none costs less."""

    def bound_seconds(self, count: int, known: OneMesh, enough: float) -> float:
        """What a plan takes at least, by what is known of another number of microbatches."""


class MicrobatchSearch:
    """Owns the best plan over several numbers of microbatches, and what spoke against others."""

    def __init__(self, planner: Counted, below_seconds: float = math.inf) -> None:
        """Plans that cost ``below_seconds`` or more are of no use."""
        self._planner = planner
        self._below_seconds = below_seconds
        self._refusal: BudgetError | None = None
        self._coupling = ""
        self._hopeless: list[int] = []
        self.best: OneMesh | None = None

    def upwards(self, counts: Sequence[int]) -> None:
        """Plan for few microbatches first, then for more, as long as these might be faster."""
        for axes in (FEW, MANY) if self._planner.is_wide else (ANY_AXES,):
            for count in counts if self.best is None else [self.best[0].num_microbatches]:
                if not self._try(count, axes):
                    break

    def among(self, counts: Sequence[int]) -> OneMesh:
        """The best of a large program, whose every plan takes long: others are bounded by the first that fits.

        The first is in ``MIDDLE_COUNT`` microbatches, or in the most if that many need too much.
        """
        axes = FEW if self._planner.is_wide else ANY_AXES
        first = max((place for place, count in enumerate(counts) if count <= MIDDLE_COUNT), default=0)
        for place in dict.fromkeys((first, len(counts) - 1)):
            if not self._try(counts[place], axes) or self.best is not None:
                break
        if self.best is not None:
            place = counts.index(self.best[0].num_microbatches)
            for others in (counts[:place][::-1], counts[place + 1 :]):
                for count in others:
                    if not self._improves(count, axes):
                        break
            if axes is FEW:
                self._try(self.best[0].num_microbatches, MANY)
        return self.result()

    def result(self) -> OneMesh:
        """The best plan; raises :class:`~autopar.errors.BudgetError` where none has room."""
        if self.best is None and self._refusal is None:
            self._plan(self._hopeless[-1], ANY_AXES)  # what is short is told by a plan
        if self.best is not None:
            return replace(self.best[0], coupling=self._coupling), *self.best[1:]
        assert self._refusal is not None
        if not self._coupling:
            raise self._refusal
        raise BudgetError(f"{self._refusal} Besides, {self._coupling}.", needed_bytes=self._refusal.needed_bytes)

    def _try(self, count: int, axes: range = ANY_AXES) -> bool:
        """Plan for this many microbatches; whether more of them might still be faster."""
        try:
            if not self._planner.may_fit(count):
                self._hopeless.append(count)
                return True
            return self._plan(count, axes)
        except CoupledBatchError as error:
            self._coupling = str(error)
            return False

    def _plan(self, count: int, axes: range) -> bool:
        try:
            found = self._planner.plan_below(count, self._below_seconds, axes)
        except BudgetError as error:
            self._refusal = self._refusal or error
            return True
        if isinstance(found, TooSlow):
            return found is TooSlow.WITHIN_BUDGET  # more microbatches cost more, but need less memory
        if found[1].step_seconds < self._below_seconds:
            self.best, self._below_seconds = found, found[1].step_seconds
        return found[2].is_squeezed

    def _improves(self, count: int, axes: range) -> bool:
        """Plan for this many microbatches if that might be faster than the best so far; whether it was."""
        assert self.best is not None
        before = self.best
        enough = before[1].step_seconds * (1 - WORTH_SHARE)
        if self._planner.bound_seconds(count, before, enough) < enough:
            self._try(count, axes)
        return self.best is not before
