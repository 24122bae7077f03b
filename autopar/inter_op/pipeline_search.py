"""The best pipeline: how many stages, which layers and devices for each, how many microbatches, which schedule.

    1  layers           the forward pass cut where least crosses (:mod:`autopar.inter_op.layers`)
    2  estimates        every run of layers on every number of devices (:mod:`autopar.inter_op.layer_costs`)
    3  groupings        by dynamic programming, for each number of microbatches and of stages (:mod:`autopar.inter_op.grouping`)
    4  pipelines        the groupings of least bound are planned exactly (:mod:`autopar.inter_op.stages`), and the simulator says
                        under which schedule each is fastest

Of small programs step 3 is done again without the stages that turned out not to fit.

The bound of step 3 hides nothing behind anything; a grouping is planned as long as its bound, less all that could be hidden,
may still beat the best pipeline so far, ``MOST_PLANNED`` of them at most (fewer of large programs).  Of programs that are not
large, more and fewer microbatches are tried first, as long as that is faster; last, the best pipeline's stages try to end a
layer earlier or later, and to lie on their other meshes.

Behind these come stages that are dealt round (:mod:`autopar.inter_op.dealing`), where even with all messages hidden, and the
bubble as short as it then is, they would be faster than the best pipeline so far.  What they save, a part of the bubble, they
pay with messages; the simulator says whether that was worth it.

Pipelines of a stage on each mesh are also tried with the gradients of weights apart: ZB-H1, then ZB-H2, which holds more.  That
takes executables of their own, so it is left where the work alone takes too long (:mod:`autopar.cost_model.least`), and where
ZB-H1 exceeds the budget; of a large program only the fastest pipeline is tried so, at the very end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.cluster import Cluster
from autopar.errors import BudgetError, ScheduleError
from autopar.graph.rules import Rulebook
from autopar.inter_op.arranged import LARGE_WORTH_SHARE, Arrangement, PipelineFound, PipelineTask
from autopar.inter_op.dealing import dealt_homes, homes_of
from autopar.inter_op.grouping import Estimates, Grouping, TooLarge, best_groupings, given_grouping, shared_grouping
from autopar.inter_op.hosting import Hosting
from autopar.inter_op.layer_costs import layer_map
from autopar.inter_op.layers import layers
from autopar.inter_op.looped import Looped
from autopar.inter_op.moves import near
from autopar.inter_op.part_costs import costs_of_parts
from autopar.inter_op.searched import Searched
from autopar.inter_op.sites import host_order, host_orders, largest_packed, may_idle, placed, stage_sizes
from autopar.inter_op.stages import StagePlanner
from autopar.intra_op.search import LARGE_OPERATORS
from autopar.plan import Schedule
from autopar.schedule.orders import OrderFunction

MOST_LAYERS = 16
"""The forward pass is cut into so many layers at most; a stage is one or several."""

MOST_PLANNED = 12
PLANNED_OPERATORS = LARGE_OPERATORS
"""So many groupings are planned exactly, or as many as together have so many operators, but at least two."""

ESTIMATED_COUNT = 16
"""Estimates are made for so many microbatches, or the next smaller number that divides the batch, of small programs.

Of these more and fewer are tried as well.
"""

ESTIMATED_EXAMPLES = 4
"""Estimates of a large program are made for microbatches of so many examples: it is planned in one or two numbers of them only,
and these are large.  What few examples cost, which cannot be cut over many devices, no estimate from many examples tells."""

NEARLY = 1.25
NEARLY_LARGE = 1.15
"""A grouping, of a large program, is not planned if its bound exceeds the best plan's seconds by this factor."""

GIVE_UP = 1.02
"""Stages of a large program that are so many times slower than the best plan are not lowered, or not made leaner; groupings
that were estimated to be slower still are not looked at.

What integer programs say of stages is within two thousandths of what their simulation says.
"""

HOSTED_IN_FLIGHT = 1
"""Of residuals that lie on the hosts those of one microbatch are on a device."""

MOST_DEALT = 3
"""So many groupings whose stages are dealt round are planned exactly; of a large program one."""

MOST_STAGES_PER_MESH = 4
"""The planner itself deals so many stages to a mesh at most."""

SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.EAGER_ONE_F_ONE_B, Schedule.GPIPE)
"""Stages are laid out for the first, which holds least; of equals the first is kept."""

SPLIT_SCHEDULES = (Schedule.ZERO_BUBBLE_H1, Schedule.ZERO_BUBBLE_H2)
"""With the gradients of weights apart; on every mesh the second holds as many microbatches as the first, or more."""


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


def estimated_examples(cluster: Cluster) -> int:
    """Examples of the microbatches for which estimates of a large program are made.

    With the most stages that there may be, each has so many hosts, over which examples are cut: layers that are cut over
    several hosts wait for the network.
    """
    return max(ESTIMATED_EXAMPLES, cluster.hosts // MOST_LAYERS)


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
    coarse = _Search(tasks, counts, wanted, to_beat_seconds, wanted.num_stages or 2, estimated_count)
    coarse.starts.update(starts or {})
    found = coarse.best()
    if wanted.num_stages is not None or starts is not None or not coarse.is_small:
        return Searched(found, coarse.others, coarse.lacks_memory)
    # A stage for each device needs as many layers.  They are looked at behind the few that cost least to part: more groupings
    # of more layers would crowd these out.
    enough = to_beat_seconds if found is None else found.step_seconds
    fine = _Search(tasks, counts, wanted, enough, coarse.num_devices, estimated_count)
    if fine.num_layers <= coarse.num_layers:
        return Searched(found, coarse.others, coarse.lacks_memory)
    finer = fine.best()
    return Searched(finer or found, (*coarse.others, *fine.others), coarse.lacks_memory or fine.lacks_memory)


class _Search:
    """Owns the best pipeline so far."""

    def __init__(
        self,
        tasks: Callable[[int], PipelineTask],
        counts: Sequence[int],
        wanted: Wanted,
        to_beat_seconds: float,
        at_least: int,
        estimated_count: int,
    ) -> None:
        """``at_least`` is the number of layers that are looked for."""
        self._tasks, self._counts, self._wanted = tasks, sorted(counts), wanted
        self._enough = self._enough_whole = to_beat_seconds
        """What is to be beaten; without pipelines tried with the gradients of weights apart, which bounds do not allow for."""
        self._at_least = at_least
        self._estimated_count = estimated_count
        self._best: PipelineFound | None = None
        self._grouping: Grouping | None = None
        self._planned: set[tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...], tuple[int, ...] | None]] = set()
        self._estimates: dict[tuple[int, ...], Estimates] = {}
        self._fastest: list[PipelineFound] = []
        self._least_seconds = float("inf")
        """Of the groupings of a large program that were planned, what integer programs say of the best."""
        self._known_homes: dict[int, tuple[int, ...] | None] = {}
        self._refusal: BudgetError | None = None
        self._too_large: list[TooLarge] = []
        self.lacks_memory = False
        """Whether pipelines that might be faster were left because they exceed the budget."""
        self._planners: dict[int, StagePlanner] = {}
        self._rulebook: Rulebook | None = None
        self.starts: dict[int, tuple[int, ...]] = {}

    @property
    def _base(self) -> int:
        """The number of microbatches that stands for the others."""
        return max((count for count in self._counts if count <= self._estimated_count), default=self._counts[0])

    @property
    def is_small(self) -> bool:
        """Whether many groupings may be planned."""
        return not self._tasks(self._base).is_large

    @property
    def others(self) -> tuple[PipelineFound, ...]:
        """Pipelines of other stages than the best that were planned of a small program; none whose stages share a mesh."""
        if not self.is_small or self._best is None:
            return ()
        return tuple(one for one in self._fastest if one.is_alone and not one.has_stages_of(self._best))

    @property
    def num_devices(self) -> int:
        """Of the cluster."""
        return self._tasks(self._base).cluster.num_devices

    @property
    def num_layers(self) -> int:
        """Into how many layers the step may be cut."""
        return len(self._layers(self._base)) + 1

    def best(self) -> PipelineFound | None:
        base = self._base
        task = self._tasks(base)
        if not self._layers(base):
            return None
        size = len(task.loop.graph.operators)
        most = min(MOST_PLANNED, max(2, PLANNED_OPERATORS // size))
        self._estimates = self._estimated(task)
        groupings = self._groupings(task)
        if self.is_small:
            self._walk(groupings)
            # Stages of one device are planned at once, for there is nothing to choose.  Bounds, which hide no message behind
            # work, say least of them: they have the most messages.
            self._walk([one for one in groupings if max(map(len, one.devices)) == 1])
        nearly = NEARLY if self.is_small else NEARLY_LARGE
        self._plan_hopeful(groupings, most, nearly)
        known = 0
        while self.is_small and known < len(self._too_large):
            known = len(self._too_large)
            self._plan_hopeful(self._groupings(task), most, nearly)
        if self._wanted.may_be_dealt:
            self._deal(MOST_DEALT if self.is_small else 1, nearly)
        if self._best is not None and self.is_small:
            self._climb()
            self._best = self._planner(self._best.count).refined(self._best)
            self._enough = self._best.step_seconds
        if not self.is_small:
            self._split_fastest()
        if self._best is None and self._refusal is not None and self._enough == float("inf"):
            raise self._refusal
        self.lacks_memory = self.lacks_memory or (self._best is None and self.is_small and self._misses_groupings())
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

    def _misses_groupings(self) -> bool:
        """Whether groupings that do not fit might be faster than what is to be beaten."""
        for where, count in itertools.product(self._estimates.values(), self._counts):
            free = best_groupings(replace(where, budgets=dict.fromkeys(where.budgets, math.inf)), count)
            hopeful = [one for one in free if one.bound_seconds <= NEARLY * self._enough_whole]
            if hopeful and not set(hopeful).issubset(best_groupings(where, count)):
                return True
        return False

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
        worth_share = self._tasks(found.count).worth_share
        for schedule in SPLIT_SCHEDULES:
            if found.least_seconds >= (1 - worth_share) * self._enough:
                return
            if (candidate := self._planner(found.count).leanest_under(found, schedule, self._enough)) is None:
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
        groupings = self._dealt()
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

    def _dealt(self) -> list[Grouping]:
        """Groupings whose stages share meshes of one size, by their bounds."""
        found = []
        for estimates, count in itertools.product(self._estimates.values(), self._counts):
            for homes in self._homes(count, estimates.num_layers):
                num_meshes = max(homes) + 1
                if num_meshes < len(homes) and (meshes := self._meshes(num_meshes, estimates.order.cluster)):
                    found.append(shared_grouping(estimates, count, homes, meshes))
        return sorted((one for one in found if one is not None), key=lambda one: one.bound_seconds)

    def _meshes(self, number: int, cluster: Cluster) -> tuple[tuple[int, ...], ...] | None:
        """So many meshes of one size, or None where there are no such."""
        size = self._wanted.stage_size
        return largest_packed(number, cluster) if size is None else placed([size] * number, cluster)

    def _homes(self, count: int, most_stages: int) -> Iterator[tuple[int, ...]]:
        """The meshes of the stages, in all ways that are allowed."""
        wanted = self._wanted
        if wanted.own_schedule is not None:
            if (homes := self._own_homes(count)) is not None:
                yield homes
            return
        most = most_stages // 2 if wanted.num_stages else MOST_STAGES_PER_MESH
        for stages_per_mesh in [wanted.stages_per_mesh] if wanted.stages_per_mesh else range(2, most + 1):
            for num_meshes in range(2, most_stages // stages_per_mesh + 1):
                if wanted.num_stages in (None, num_meshes * stages_per_mesh):
                    yield dealt_homes(num_meshes, stages_per_mesh)

    def _own_homes(self, count: int) -> tuple[int, ...] | None:
        """The meshes of the stages as the user's schedule has it; None where it has no order of so many microbatches."""
        own, stages = self._wanted.own_schedule, self._wanted.num_stages
        assert own is not None and stages is not None
        if count not in self._known_homes:
            try:
                self._known_homes[count] = homes_of(own, stages, count, stages)
            except ScheduleError:
                self._known_homes[count] = None
                if all(self._known_homes.get(other, ()) is None for other in self._counts):
                    raise
        return self._known_homes[count]

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

    def _climb(self) -> None:
        """Move single ends of the best pipeline's stages by a layer, as long as that makes it faster; likewise devices."""
        before = None
        while self._grouping is not None and self._grouping is not before:
            before = self._grouping
            last = before.ends[-1]
            for number, end in enumerate(before.ends[:-1]):
                for moved in (end - 1, end + 1):
                    ends = (*before.ends[:number], moved, *before.ends[number + 1 :])
                    if all(a < b for a, b in pairwise((0, *ends))) and ends[-1] == last:
                        self._plan(replace(before, ends=ends))
            self._move_devices(before)

    def _move_devices(self, grouping: Grouping) -> None:
        """Plan what is near a grouping, on devices that halves do not fill, and may be faster than the best pipeline."""
        estimates = self._estimates[grouping.hosts]
        order = estimates.order
        if grouping.homes is not None or self._wanted.stage_size is not None or not may_idle(order.cluster):
            return
        for ends, places in near(grouping.ends, tuple(map(order.places, grouping.devices)), order.cluster):
            if self._wanted.num_stages in (None, len(ends)):
                other = given_grouping(estimates, grouping.count, ends, places)
                if other is not None and other.bound_seconds <= NEARLY * self._enough_whole:
                    self._plan(other)

    def _layers(self, count: int) -> tuple[int, ...]:
        """The positions at which layers begin, but the first."""
        if count not in self.starts:
            task = self._tasks(count)
            same = self._starts_of_twin(task.loop)
            task.report_progress("finding the layers")
            self.starts[count] = same or layers(
                task.loop,
                task.state_pairs,
                at_most=MOST_LAYERS,
                at_least=min(MOST_LAYERS, self._at_least),
            )
        return self.starts[count]

    def _starts_of_twin(self, loop: Looped) -> tuple[int, ...] | None:
        """Where layers begin in a step of another number of microbatches with the same operators; None: there is none.

        Of small programs the layers are always found anew: a microbatch's size may move them.
        """
        if len(loop.graph.operators) <= PLANNED_OPERATORS:
            return None
        kinds = [operator.primitive for operator in loop.body.operators]
        for count, starts in self.starts.items():
            if [operator.primitive for operator in self._tasks(count).loop.body.operators] == kinds:
                return starts
        return None

    def _groupings(self, task: PipelineTask) -> list[Grouping]:
        """The groupings of stages that share no mesh, the least bound first."""
        if not self._wanted.may_be_alone:
            return []
        everywhere = itertools.product(self._estimates.values(), self._counts)
        found = [one for where, count in everywhere for one in self._best_groupings(task, where, count)]
        if self._wanted.num_stages is not None:
            found = [one for one in found if len(one.ends) == self._wanted.num_stages]
        return sorted(found, key=lambda one: one.bound_seconds)

    def _estimated(self, task: PipelineTask) -> dict[tuple[int, ...], Estimates]:
        """By the order of the hosts, what groupings are made from."""
        cluster, wanted = task.cluster, self._wanted
        planner = self._planner(task.loop.count)
        mapped = layer_map(task.loop, planner.cut(self._layers(task.loop.count)))
        sizes = [wanted.stage_size] if wanted.stage_size else stage_sizes(cluster)
        message_bytes = float(mapped.crossing_bytes.mean())
        orders = [host_order(cluster, hosts, sizes) for hosts in host_orders(cluster, message_bytes)]
        costs = costs_of_parts(task, mapped, dict.fromkeys(part for order in orders for part in order.firsts))
        if task.is_large:
            orders = [order.of_sizes({part.num_devices for part in costs}) for order in orders]
        most = min(mapped.num_layers, cluster.num_devices // min(sizes))
        return {
            order.hosts: Estimates(
                order,
                order.budgets(task.budget_of),
                costs,
                mapped.crossing_bytes,
                most,
                HOSTED_IN_FLIGHT if task.hosting is Hosting.ALL else math.inf,
            )
            for order in orders
        }

    def _learn(self, grouping: Grouping, stages: Sequence[int]) -> None:
        """Leave groupings with these stages of one that did not fit."""
        if grouping.homes is not None or not stages:
            return
        order = self._estimates[grouping.hosts].order
        runs = list(zip(pairwise((0, *grouping.ends)), map(order.places, grouping.devices), strict=True))
        for stage in stages:
            (start, end), places = runs[stage]
            part = order.parts[places[0], len(places)]
            self._too_large.append(TooLarge(grouping.count, part, len(runs) - stage, start, end))
        known = tuple(self._too_large)
        self._estimates = {hosts: replace(one, too_large=known) for hosts, one in self._estimates.items()}

    def _best_groupings(self, task: PipelineTask, estimates: Estimates, count: int) -> list[Grouping]:
        """The best groupings into so many microbatches; where none fits, those that fit with residuals on the hosts."""
        found = best_groupings(estimates, count)
        if found or task.hosting is not Hosting.NEEDED:
            return found
        return best_groupings(replace(estimates, most_in_flight=HOSTED_IN_FLIGHT), count)

    def _planner(self, count: int) -> StagePlanner:
        if count not in self._planners:
            task = self._tasks(count)
            self._rulebook = self._rulebook or Rulebook(task.cluster.device.platform.value)
            self._planners[count] = StagePlanner(task, self._rulebook)
        return self._planners[count]

    def _schedules(self, grouping: Grouping) -> tuple[Schedule | OrderFunction, ...]:
        """The schedules that a grouping may run under."""
        wanted = self._wanted
        if (own := wanted.own_schedule) is not None:
            homes = self._own_homes(grouping.count)
            is_its = homes is not None and (grouping.homes == homes or len(set(homes)) == len(homes))
            return (own,) if is_its else ()
        if grouping.homes is not None:
            return (Schedule.INTERLEAVED_ONE_F_ONE_B,)
        return SCHEDULES if wanted.known_schedule is None else (wanted.known_schedule,)

    def _arranged(self, grouping: Grouping, schedule: Schedule | OrderFunction) -> Arrangement | None:
        """A grouping in the step of its number of microbatches; None where that has other layers."""
        starts = self._layers(grouping.count)
        if max(grouping.ends[:-1]) > len(starts):
            return None
        return Arrangement(tuple(starts[end - 1] for end in grouping.ends[:-1]), grouping.devices, schedule)

    def _plan(self, grouping: Grouping) -> bool:
        """Plan a grouping exactly, under every schedule that is allowed, unless that was done before.

        Returns False for a grouping of a large program that was bounded, and given up as too slow.
        """
        key = (grouping.count, grouping.ends, grouping.devices, grouping.homes)
        if key in self._planned or not (schedules := self._schedules(grouping)):
            return True
        self._planned.add(key)
        first, *others = schedules
        arrangement = self._arranged(grouping, first)
        if arrangement is None:
            return True
        planner, give_up_seconds = self._planner(grouping.count), float("inf")
        if self._tasks(grouping.count).is_large:
            is_dealt = grouping.homes is not None and self._best is not None
            # What is given up is returned as it is, so it must not be faster than the best: it may exceed the budget.
            give_up_seconds = (1.0 if is_dealt else GIVE_UP) * self._enough
            least_seconds = planner.bound_seconds(arrangement)
            if least_seconds >= ((1 - LARGE_WORTH_SHARE) * self._enough if is_dealt else give_up_seconds):
                return False
            self._least_seconds = min(self._least_seconds, least_seconds)
            first, *others = planner.fastest_first(arrangement, schedules)
        found, too_large = self._first_within_budget(planner, arrangement, (first, *others), give_up_seconds)
        if found is None:
            self._learn(grouping, too_large)
            return True
        others = [
            schedule
            for schedule in schedules
            if schedule is not found.arrangement.schedule and planner.may_be_faster(found, schedule)
        ]
        enough = min(self._enough, found.step_seconds)
        under = [planner.leanest_under(found, schedule, enough) for schedule in others]
        candidates = [found, *(one for one in under if one is not None)]
        self._fastest.append(min(candidates, key=lambda one: one.step_seconds))
        if self.is_small:
            fastest = min(one.step_seconds for one in candidates)
            free_seconds = min(planner.free_seconds(replace(arrangement, schedule=one)) for one in schedules)
            self.lacks_memory = self.lacks_memory or free_seconds < fastest
        for candidate in itertools.chain(candidates, self._split(found) if self.is_small else ()):
            if self._take(candidate):
                self._grouping = grouping
        return True

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
