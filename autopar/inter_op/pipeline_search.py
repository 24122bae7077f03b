"""The best pipeline: how many stages, which layers and devices for each, how many microbatches, which schedule.

    1  layers           the forward pass cut where least crosses (:mod:`autopar.inter_op.layers`)
    2  estimates        every run of layers on every number of devices (:mod:`autopar.inter_op.layer_costs`)
    3  groupings        by dynamic programming, for each number of microbatches and of stages (:mod:`autopar.inter_op.grouping`)
    4  pipelines        the groupings of least bound are planned exactly (:mod:`autopar.inter_op.stages`), and the simulator says
                        under which schedule each is fastest

Of small programs step 3 is done again without the stages that turned out not to fit.

The bound of step 3 hides nothing behind anything; a grouping is planned as long as its bound, less all that could be hidden,
may still beat the best pipeline so far, ``MOST_PLANNED`` of them at most (fewer of large programs).  Of programs that are not
large, more and fewer microbatches are tried first, as long as that is faster; last, the stages of the best pipeline, and of the
best in another number of stages, try to end a layer earlier or later, and those of the best to lie on their other meshes.

Behind these come stages that are dealt round (:mod:`autopar.inter_op.dealing`), where even with all messages hidden, and the
bubble as short as it then is, they would be faster than the best pipeline so far.  What they save, a part of the bubble, they
pay with messages; the simulator says whether that was worth it.

Pipelines of a stage on each mesh are also tried with the gradients of weights apart: ZB-H1, then ZB-H2, which holds more.  That
takes executables of their own, so it is left where the work alone takes too long (:mod:`autopar.cost_model.least`), and where
ZB-H1 exceeds the budget; of a large program only the fastest pipeline is tried so, at the very end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.errors import BudgetError
from autopar.inter_op.arranged import LARGE_WORTH_SHARE, Arrangement, PipelineFound, PipelineTask
from autopar.inter_op.candidates import ESTIMATED_COUNT, Candidates
from autopar.inter_op.grouping import Grouping, given_grouping
from autopar.inter_op.moves import near
from autopar.inter_op.searched import Searched
from autopar.inter_op.sites import may_idle
from autopar.inter_op.stages import StagePlanner
from autopar.inter_op.wanted import Wanted
from autopar.intra_op.search import LARGE_OPERATORS
from autopar.plan import Schedule
from autopar.schedule.orders import OrderFunction

MOST_PLANNED = 12
PLANNED_OPERATORS = LARGE_OPERATORS
"""So many groupings are planned exactly, or as many as together have so many operators, but at least two."""

NEARLY = 1.25
NEARLY_LARGE = 1.15
"""A grouping, of a large program, is not planned if its bound exceeds the best plan's seconds by this factor."""

GIVE_UP = 1.02
"""Stages of a large program that are so many times slower than the best plan are not lowered, or not made leaner; groupings
that were estimated to be slower still are not looked at.

What integer programs say of stages is within two thousandths of what their simulation says.
"""

MOST_DEALT = 3
"""So many groupings whose stages are dealt round are planned exactly; of a large program one."""

MOST_STARTS = 2
"""So many pipelines of a small program move the ends of their stages."""

SPLIT_SCHEDULES = (Schedule.ZERO_BUBBLE_H1, Schedule.ZERO_BUBBLE_H2)
"""With the gradients of weights apart; on every mesh the second holds as many microbatches as the first, or more."""


def search_pipelines(
    tasks: Callable[[int], PipelineTask],
    counts: Sequence[int],
    wanted: Wanted,
    *,
    to_beat_seconds: float = float("inf"),
    starts: Mapping[int, tuple[int, ...]] | None = None,
    estimated_count: int = ESTIMATED_COUNT,
) -> Searched[PipelineFound]:
    """The fastest pipeline of two stages or more that is faster than ``to_beat_seconds``, if there is any.

    ``tasks`` gives the step looped over so many microbatches; ``counts`` are the numbers that it may be asked for; ``starts``
    are, by that number, the forward operators before which layers begin, unless they are to be found.  Estimates are made for
    ``estimated_count`` microbatches, or the next smaller number that may be asked for.
    Raises :class:`~autopar.errors.BudgetError` where pipelines were found but none keeps the budget.
    """
    few = Candidates(tasks, counts, wanted, wanted.num_stages or 2, estimated_count)
    few.starts.update(starts or {})
    coarse = _Search(few, wanted, to_beat_seconds)
    found = coarse.best()
    if wanted.num_stages is not None or starts is not None or not coarse.is_small:
        return Searched(found, coarse.others, coarse.lacks_memory)
    # A stage for each device needs as many layers.  They are looked at behind the few that cost least to part: more groupings
    # of more layers would crowd these out.
    enough = to_beat_seconds if found is None else found.step_seconds
    many = Candidates(tasks, counts, wanted, few.task.cluster.num_devices, estimated_count)
    fine = _Search(many, wanted, enough)
    if many.num_layers <= few.num_layers:
        return Searched(found, coarse.others, coarse.lacks_memory)
    finer = fine.best()
    return Searched(finer or found, (*coarse.others, *fine.others), coarse.lacks_memory or fine.lacks_memory)


class _Search:
    """Owns the best pipeline so far."""

    def __init__(self, candidates: Candidates, wanted: Wanted, to_beat_seconds: float) -> None:
        self._candidates, self._wanted = candidates, wanted
        self._enough = self._enough_whole = to_beat_seconds
        """What is to be beaten; without pipelines tried with the gradients of weights apart, which bounds do not allow for."""
        self._best: PipelineFound | None = None
        self._grouping: Grouping | None = None
        self._planned: dict[Hashable, tuple[float, Grouping]] = {}
        """Step seconds of what was planned, infinite where it does not fit."""
        self._fastest: list[PipelineFound] = []
        self._least_seconds = float("inf")
        """Of the groupings of a large program that were planned, what integer programs say of the best."""
        self._refusal: BudgetError | None = None
        self.lacks_memory = False
        """Whether pipelines that might be faster were left because they exceed the budget."""

    @property
    def is_small(self) -> bool:
        """Whether many groupings may be planned."""
        return not self._candidates.task.is_large

    @property
    def others(self) -> tuple[PipelineFound, ...]:
        """Pipelines of other stages than the best that were planned of a small program; none whose stages share a mesh."""
        if not self.is_small or self._best is None:
            return ()
        return tuple(one for one in self._fastest if one.is_alone and not one.has_stages_of(self._best))

    def best(self) -> PipelineFound | None:
        """The fastest; None where the step has one layer only, or no pipeline is fast enough.  Raises ``BudgetError``."""
        if self._candidates.num_layers < 2:
            return None
        size = len(self._candidates.task.loop.graph.operators)
        most = min(MOST_PLANNED, max(2, PLANNED_OPERATORS // size))
        groupings = self._candidates.alone()
        if self.is_small:
            self._walk(groupings)
            # Stages of one device are planned at once, for there is nothing to choose.  Bounds, which hide no message behind
            # work, say least of them: they have the most messages.
            self._walk([one for one in groupings if max(map(len, one.devices)) == 1])
        nearly = NEARLY if self.is_small else NEARLY_LARGE
        self._plan_hopeful(groupings, most, nearly)
        known = 0
        while self.is_small and known < self._candidates.num_too_large:
            known = self._candidates.num_too_large
            self._plan_hopeful(self._candidates.alone(), most, nearly)
        if self._wanted.may_be_dealt:
            self._deal(MOST_DEALT if self.is_small else 1, nearly)
        if self._best is not None and self.is_small:
            for start in self._starts():
                self._climb(start)
            self._best = self._candidates.planner(self._best.count).refined(self._best)
            self._enough = self._best.step_seconds
        if not self.is_small:
            if self._best is not None:
                self._take(self._candidates.planner(self._best.count).nearer(self._best))
            self._split_fastest()
        if self._best is None and self._refusal is not None and self._enough == float("inf"):
            raise self._refusal
        if self._best is None and self.is_small and not self.lacks_memory:
            self.lacks_memory = self._candidates.lacks_any_below(NEARLY * self._enough_whole)
        return self._best

    def _plan_hopeful(self, groupings: Sequence[Grouping], most: int, nearly: float) -> None:
        """Plan groupings, the least bound first, as long as they may be faster than what is to be beaten, so many at most."""
        for grouping in groupings:
            if len(self._planned) >= most or grouping.bound_seconds > nearly * self._enough_whole:
                break
            if self._best is not None and grouping.bound_seconds > (1 - LARGE_WORTH_SHARE) * self._least_seconds:
                break
            if not self._plan(grouping):
                break

    def _split_fastest(self) -> None:
        """Try the fastest pipeline of a stage on each mesh with the gradients of weights apart."""
        known = [] if self._best is None else [self._best]
        known += sorted(self._fastest, key=lambda one: one.step_seconds)
        alone = next((one for one in known if one.is_alone), None)
        for candidate in self._split(alone) if alone is not None else ():
            self._take(candidate)

    def _split(self, found: PipelineFound) -> Iterator[PipelineFound]:
        """The pipeline with the gradients of weights apart, as long as memory allows and the work may be done soon enough."""
        if self._wanted.schedule is not None or not found.is_alone:
            return
        worth_share = self._candidates.task_of(found.count).worth_share
        for schedule in SPLIT_SCHEDULES:
            if found.least_seconds >= (1 - worth_share) * self._enough:
                return
            if (
                candidate := self._candidates.planner(found.count).leanest_under(found, schedule, self._enough)
            ) is None:
                self.lacks_memory = True
                return
            yield candidate

    def _take(self, candidate: PipelineFound | None) -> bool:
        """Keep a pipeline if it is the fastest; whether it is."""
        is_fastest = candidate is not None and candidate.step_seconds < self._enough * (1 - 1e-9)
        if candidate is not None and is_fastest:
            self._best, self._enough = candidate, candidate.step_seconds
        is_asked_for = self._wanted.schedule is not None
        if candidate is not None and (is_asked_for or candidate.arrangement.schedule not in SPLIT_SCHEDULES):
            self._enough_whole = min(self._enough_whole, candidate.step_seconds)
        return is_fastest

    def _deal(self, most: int, nearly: float) -> None:
        """Plan groupings whose stages share meshes, those that may be faster, the least bound first."""
        groupings = self._candidates.dealt()
        if not self._wanted.may_be_alone:
            self._walk(groupings)
        before = len(self._planned)
        alone_seconds = float("inf")
        if not self.is_small and self._grouping is not None:
            alone_seconds = (1 - LARGE_WORTH_SHARE) * self._grouping.bound_seconds
        for grouping in groupings:
            is_hopeful = grouping.least_seconds < self._enough and grouping.bound_seconds <= nearly * self._enough_whole
            is_hopeful = is_hopeful and grouping.bound_seconds < alone_seconds  # both are estimates of the same kind
            if is_hopeful and len(self._planned) - before < most:
                self._plan(grouping)

    def _walk(self, groupings: Sequence[Grouping]) -> None:
        """Plan the first grouping of the first one's number of microbatches, then of the next numbers while that is faster.

        What a microbatch costs whatever its size is in the estimates of one number only, so that bounds of groupings of
        different numbers compare badly where microbatches are small.
        """
        leaders: dict[int, Grouping] = {}
        for grouping in groupings:
            leaders.setdefault(grouping.count, grouping)
        first = next(iter(leaders), None)
        if first is None:
            return
        self._plan(leaders[first])
        below = sorted((count for count in leaders if count < first), reverse=True)
        for counts in (below, sorted(count for count in leaders if count > first)):
            for count in counts:
                before = self._enough
                self._plan(leaders[count])
                if self._best is not None and self._enough >= before:
                    break

    def _starts(self) -> list[Grouping]:
        """What climbs: the best pipeline's stages, and the fastest in another number of stages, if it is nearly as fast.

        Which of the numbers is the best shows only when stages end where they should: bounds know little of messages.
        """
        if (best := self._grouping) is None:
            return []
        planned = sorted(self._planned.values(), key=lambda one: one[0])
        nearly = NEARLY * self._enough_whole
        others = (one for seconds, one in planned if len(one.ends) != len(best.ends) and seconds <= nearly)
        return [*itertools.islice((one for one in others if one.homes is None), MOST_STARTS - 1), best]

    def _climb(self, start: Grouping) -> None:
        """Move single ends of a pipeline's stages by a layer, as long as that makes it faster; likewise devices."""
        best, before = start, None
        while best is not before:
            before = best
            last = before.ends[-1]
            for number, end in enumerate(before.ends[:-1]):
                for moved in (end - 1, end + 1):
                    ends = (*before.ends[:number], moved, *before.ends[number + 1 :])
                    if all(a < b for a, b in pairwise((0, *ends))) and ends[-1] == last:
                        self._plan(other := replace(before, ends=ends))
                        best = min(best, other, key=self._seconds_of)
            best = min((best, *self._move_devices(before)), key=self._seconds_of)

    def _seconds_of(self, grouping: Grouping) -> float:
        """Of the step of a grouping that was planned."""
        return self._planned.get(_key(grouping), (float("inf"), grouping))[0]

    def _move_devices(self, grouping: Grouping) -> Iterator[Grouping]:
        """Plan what is near a grouping, on devices that halves do not fill, and may be faster than the best pipeline."""
        estimates = self._candidates.estimates_of(grouping)
        order = estimates.order
        if grouping.homes is not None or self._wanted.stage_size is not None or not may_idle(order.cluster):
            return
        for ends, places in near(grouping.ends, tuple(map(order.places, grouping.devices)), order.cluster):
            if self._wanted.num_stages in (None, len(ends)):
                other = given_grouping(estimates, grouping.count, ends, places)
                if other is not None and other.bound_seconds <= NEARLY * self._enough_whole:
                    self._plan(other)
                    yield other

    def _plan(self, grouping: Grouping) -> bool:
        """Plan a grouping exactly, under every schedule that is allowed, unless that was done before.

        Returns False for a grouping of a large program that was bounded, and given up as too slow.
        """
        key = _key(grouping)
        if key in self._planned or not (schedules := self._candidates.schedules(grouping)):
            return True
        self._planned[key] = float("inf"), grouping
        arrangement = self._candidates.arranged(grouping, schedules[0])
        if arrangement is None:
            return True
        planner, give_up_seconds = self._candidates.planner(grouping.count), float("inf")
        in_turn: Sequence[Schedule | OrderFunction] = schedules
        if self._candidates.task_of(grouping.count).is_large:
            give_up_seconds = self._give_up_seconds(grouping)
            if not self._may_win(grouping, least_seconds := planner.bound_seconds(arrangement)):
                return False
            self._least_seconds = min(self._least_seconds, least_seconds)
            in_turn = planner.fastest_first(arrangement, schedules)
        found, too_large = self._first_within_budget(planner, arrangement, in_turn, give_up_seconds)
        if found is None:
            self._candidates.learn(grouping, too_large)
            return True
        if self.is_small:
            found = planner.nearer(found)
        whole = self._under_all(planner, found, schedules)
        self._fastest.append(min(whole, key=lambda one: one.step_seconds))
        for candidate in itertools.chain(whole, self._split(found) if self.is_small else ()):
            self._planned[key] = min(self._planned[key][0], candidate.step_seconds), grouping
            if self._take(candidate):
                self._grouping = grouping
        return True

    def _give_up_seconds(self, grouping: Grouping) -> float:
        """Stages of a large program that are as slow as this are not lowered.

        What is given up is returned as it is, so it must not be faster than the best: it may exceed the budget.
        """
        return (1.0 if self._is_dealt_behind(grouping) else GIVE_UP) * self._enough

    def _may_win(self, grouping: Grouping, least_seconds: float) -> bool:
        """Whether a grouping of a large program may be worth planning, of whose step integer programs say ``least_seconds``."""
        if self._is_dealt_behind(grouping):
            return least_seconds < (1 - LARGE_WORTH_SHARE) * self._enough
        return least_seconds < self._give_up_seconds(grouping)

    def _is_dealt_behind(self, grouping: Grouping) -> bool:
        """Whether its stages are dealt round, and there is a pipeline already that this must beat."""
        return grouping.homes is not None and self._best is not None

    def _under_all(
        self, planner: StagePlanner, found: PipelineFound, schedules: Sequence[Schedule | OrderFunction]
    ) -> list[PipelineFound]:
        """A pipeline, and the same under each of the other schedules under which it may be faster and keeps the budget.

        Of a small program it is noted where only memory keeps one from being the fastest.
        """
        enough = min(self._enough, found.step_seconds)
        others = (
            one for one in schedules if one is not found.arrangement.schedule and planner.may_be_faster(found, one)
        )
        under = [planner.leanest_under(found, schedule, enough) for schedule in others]
        whole = [found, *(one for one in under if one is not None)]
        if self.is_small:
            free_seconds = min(planner.free_seconds(replace(found.arrangement, schedule=one)) for one in schedules)
            self.lacks_memory = self.lacks_memory or free_seconds < min(one.step_seconds for one in whole)
        return whole

    def _first_within_budget(
        self,
        planner: StagePlanner,
        arrangement: Arrangement,
        schedules: Sequence[Schedule | OrderFunction],
        give_up_seconds: float,
    ) -> tuple[PipelineFound | None, tuple[int, ...]]:
        """The pipeline under the first of the schedules that keeps the budget; or the stages that are too large under the first.

        Of a small program the others are tried only with residuals on the hosts: they keep more on the devices than the first.
        """
        hopeful = [schedule for schedule in schedules[1:] if schedule is not Schedule.GPIPE]  # which keeps most of all
        too_large: tuple[int, ...] = ()
        for schedule in (schedules[0], *(hopeful if planner.is_large else ())):
            try:
                return planner.plan(replace(arrangement, schedule=schedule), give_up_seconds), ()
            except BudgetError as error:
                too_large = too_large or error.stages
                self._refusal = self._refusal or error
                self.lacks_memory = True
        for schedule in () if planner.is_large else schedules[1:]:
            if (found := planner.with_hosts(replace(arrangement, schedule=schedule), give_up_seconds)) is not None:
                return found, ()
        return None, too_large


def _key(grouping: Grouping) -> Hashable:
    """What tells groupings apart: all but their bounds."""
    return grouping.count, grouping.ends, grouping.devices, grouping.homes
