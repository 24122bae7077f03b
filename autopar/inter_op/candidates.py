"""Which groupings of layers and devices into stages are there, and what are their bounds?

For each number of microbatches N that the step may be asked for, the forward pass is cut into layers; estimates of every run of
layers on every number of devices are made for one N and scaled to the others.  Of these come (:mod:`autopar.inter_op.grouping`)

    alone     stages of a mesh each, the best by the dynamic program, for each N and each number of stages
    dealt     stages that are dealt round over fewer meshes of one size

both by their bounds, the least first.  What turned out not to fit is learnt, and is in no grouping any more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.cluster import Cluster
from autopar.errors import ScheduleError
from autopar.graph.rules import Rulebook
from autopar.inter_op.arranged import Arrangement, PipelineTask
from autopar.inter_op.dealing import dealt_homes, homes_of
from autopar.inter_op.grouping import Estimates, Grouping, TooLarge, best_groupings, shared_grouping
from autopar.inter_op.hosting import Hosting
from autopar.inter_op.layer_costs import layer_map
from autopar.inter_op.layers import layers
from autopar.inter_op.looped import Looped
from autopar.inter_op.part_costs import costs_of_parts
from autopar.inter_op.sites import host_order, host_orders, largest_packed, placed, stage_sizes
from autopar.inter_op.stages import StagePlanner
from autopar.inter_op.wanted import Wanted
from autopar.intra_op.search import LARGE_OPERATORS
from autopar.plan import Schedule
from autopar.schedule.orders import OrderFunction

MOST_LAYERS = 16
"""The forward pass is cut into so many layers at most; a stage is one or several."""

ESTIMATED_COUNT = 16
"""Estimates are made for so many microbatches, or the next smaller number that divides the batch, of small programs.

Of these more and fewer are tried as well.
"""

ESTIMATED_EXAMPLES = 4
"""Estimates of a large program are made for microbatches of so many examples: it is planned in one or two numbers of them only,
and these are large.  What few examples cost, which cannot be cut over many devices, no estimate from many examples tells."""

HOSTED_IN_FLIGHT = 1
"""Of residuals that lie on the hosts those of one microbatch are on a device."""

MOST_STAGES_PER_MESH = 4
"""The planner itself deals so many stages to a mesh at most."""

SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.EAGER_ONE_F_ONE_B, Schedule.GPIPE)
"""Stages are laid out for the first, which holds least; of equals the first is kept."""


def estimated_examples(cluster: Cluster) -> int:
    """Examples of the microbatches for which estimates of a large program are made.

    With the most stages that there may be, each has so many hosts, over which examples are cut: layers that are cut over
    several hosts wait for the network.
    """
    return max(ESTIMATED_EXAMPLES, cluster.hosts // MOST_LAYERS)


class Candidates:
    """Owns what groupings are made from: layers and planners for each number of microbatches, estimates, and what did not fit."""

    def __init__(
        self,
        tasks: Callable[[int], PipelineTask],
        counts: Sequence[int],
        wanted: Wanted,
        at_least: int,
        estimated_count: int,
    ) -> None:
        """``at_least`` is the number of layers that are looked for; the others are those of
        :func:`~autopar.inter_op.pipeline_search.search_pipelines`.
        """
        self.task_of = tasks
        self._counts, self._wanted = sorted(counts), wanted
        self._base = max((count for count in self._counts if count <= estimated_count), default=self._counts[0])
        self._at_least = at_least
        self._estimates: dict[tuple[int, ...], Estimates] = {}
        self._known_homes: dict[int, tuple[int, ...] | None] = {}
        self._too_large: list[TooLarge] = []
        self._planners: dict[int, StagePlanner] = {}
        self._rulebook: Rulebook | None = None
        self.starts: dict[int, tuple[int, ...]] = {}

    @property
    def task(self) -> PipelineTask:
        """The step in the number of microbatches that stands for the others."""
        return self.task_of(self._base)

    @property
    def num_layers(self) -> int:
        """Into how many layers the step may be cut."""
        return len(self.layers(self._base)) + 1

    @property
    def num_too_large(self) -> int:
        """Of the stages that were learnt not to fit."""
        return len(self._too_large)

    # ------------------------------------------------------------------------------------------------ groupings

    def alone(self) -> list[Grouping]:
        """The groupings of stages that share no mesh, the least bound first."""
        if not self._wanted.may_be_alone:
            return []
        everywhere = itertools.product(self._estimated().values(), self._counts)
        found = [one for where, count in everywhere for one in self._best_groupings(where, count)]
        if self._wanted.num_stages is not None:
            found = [one for one in found if len(one.ends) == self._wanted.num_stages]
        return sorted(found, key=lambda one: one.bound_seconds)

    def dealt(self) -> list[Grouping]:
        """Groupings whose stages share meshes of one size, by their bounds."""
        found = []
        for estimates, count in itertools.product(self._estimated().values(), self._counts):
            for homes in self._homes(count, estimates.num_layers):
                num_meshes = max(homes) + 1
                if num_meshes < len(homes) and (meshes := self._meshes(num_meshes, estimates.order.cluster)):
                    found.append(shared_grouping(estimates, count, homes, meshes))
        return sorted((one for one in found if one is not None), key=lambda one: one.bound_seconds)

    def lacks_any_below(self, seconds: float) -> bool:
        """Whether groupings of a lower bound were left because they do not fit."""
        for where, count in itertools.product(self._estimated().values(), self._counts):
            free = best_groupings(replace(where, budgets=dict.fromkeys(where.budgets, math.inf)), count)
            hopeful = [one for one in free if one.bound_seconds <= seconds]
            if hopeful and not set(hopeful).issubset(best_groupings(where, count)):
                return True
        return False

    def learn(self, grouping: Grouping, stages: Sequence[int]) -> None:
        """Leave groupings with these stages of one that did not fit."""
        if grouping.homes is not None or not stages:
            return
        order = self.estimates_of(grouping).order
        runs = list(zip(pairwise((0, *grouping.ends)), map(order.places, grouping.devices), strict=True))
        for stage in stages:
            (start, end), places = runs[stage]
            part = order.parts[places[0], len(places)]
            self._too_large.append(TooLarge(grouping.count, part, len(runs) - stage, start, end))
        known = tuple(self._too_large)
        self._estimates = {hosts: replace(one, too_large=known) for hosts, one in self._estimated().items()}

    def _best_groupings(self, estimates: Estimates, count: int) -> list[Grouping]:
        """The best groupings into so many microbatches; where none fits, those that fit with residuals on the hosts."""
        found = best_groupings(estimates, count)
        if found or self.task.hosting is not Hosting.NEEDED:
            return found
        return best_groupings(replace(estimates, most_in_flight=HOSTED_IN_FLIGHT), count)

    # -------------------------------------------------------------------------------------- of one grouping

    def estimates_of(self, grouping: Grouping) -> Estimates:
        """What a grouping was made from."""
        return self._estimated()[grouping.hosts]

    def schedules(self, grouping: Grouping) -> tuple[Schedule | OrderFunction, ...]:
        """The schedules that a grouping may run under."""
        wanted = self._wanted
        if (own := wanted.own_schedule) is not None:
            homes = self._own_homes(grouping.count)
            is_its = homes is not None and (grouping.homes == homes or len(set(homes)) == len(homes))
            return (own,) if is_its else ()
        if grouping.homes is not None:
            return (Schedule.INTERLEAVED_ONE_F_ONE_B,)
        return SCHEDULES if wanted.known_schedule is None else (wanted.known_schedule,)

    def arranged(self, grouping: Grouping, schedule: Schedule | OrderFunction) -> Arrangement | None:
        """A grouping in the step of its number of microbatches; None where that has other layers."""
        starts = self.layers(grouping.count)
        if max(grouping.ends[:-1]) > len(starts):
            return None
        return Arrangement(tuple(starts[end - 1] for end in grouping.ends[:-1]), grouping.devices, schedule)

    def planner(self, count: int) -> StagePlanner:
        """Plans stages of the step in so many microbatches."""
        if count not in self._planners:
            task = self.task_of(count)
            self._rulebook = self._rulebook or Rulebook(task.cluster.device.platform.value)
            self._planners[count] = StagePlanner(task, self._rulebook)
        return self._planners[count]

    # ---------------------------------------------------------------------------------------- layers and estimates

    def layers(self, count: int) -> tuple[int, ...]:
        """The positions at which layers begin, but the first."""
        if count not in self.starts:
            task = self.task_of(count)
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
        if len(loop.graph.operators) <= LARGE_OPERATORS:
            return None
        kinds = [operator.primitive for operator in loop.body.operators]
        for count, starts in self.starts.items():
            if [operator.primitive for operator in self.task_of(count).loop.body.operators] == kinds:
                return starts
        return None

    def _estimated(self) -> dict[tuple[int, ...], Estimates]:
        """By the order of the hosts, what groupings are made from."""
        if self._estimates:
            return self._estimates
        task, cluster, wanted = self.task, self.task.cluster, self._wanted
        planner = self.planner(task.loop.count)
        mapped = layer_map(task.loop, planner.cut(self.layers(task.loop.count)))
        sizes = [wanted.stage_size] if wanted.stage_size else stage_sizes(cluster)
        message_bytes = float(mapped.crossing_bytes.mean())
        orders = [host_order(cluster, hosts, sizes) for hosts in host_orders(cluster, message_bytes)]
        costs = costs_of_parts(task, mapped, dict.fromkeys(part for order in orders for part in order.firsts))
        if task.is_large:
            orders = [order.of_sizes({part.num_devices for part in costs}) for order in orders]
        most = min(mapped.num_layers, cluster.num_devices // min(sizes))
        self._estimates = {
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
        return self._estimates

    # ------------------------------------------------------------------------------------------------------- meshes

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
