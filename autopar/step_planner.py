"""What is the fastest plan of one form of a step: on one mesh, on fewer devices, as a pipeline where that is faster?

This is where the demands of the API (method, cluster, memory, mesh, constraints) become a task for a planner, and the
planner's answer becomes a Plan with paths and predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax

from autopar.asked import demands_of_user, shape_asked
from autopar.cluster import Cluster, Mesh
from autopar.constraints import (
    Leaves,
    check_patterns,
    meshes_of_user,
    meshes_with_names,
    with_constraints,
    without_axes_of_one,
)
from autopar.cost_model.hosted import has_host_memory
from autopar.errors import BudgetError, PlanError
from autopar.graph.fusion import fuse
from autopar.graph.moments import critical_moments
from autopar.graph.roles import Role
from autopar.graph.wishes import Origin
from autopar.inter_op.examples import CoupledBatchError
from autopar.inter_op.looped import looped
from autopar.inter_op.rescaled import Rescaling
from autopar.inter_op.searched import Searched
from autopar.inter_op.sites import fewer_devices
from autopar.intra_op.restrict import Restriction
from autopar.intra_op.search import (
    FEW_AXES,
    LARGE_OPERATORS,
    MANY_OPERATORS,
    may_cost_less,
    may_fit,
    search_below,
    worth_trying,
)
from autopar.intra_op.task import WORTH_SHARE, Found, Task, TooSlow
from autopar.intra_op.within_budget import HOPELESS
from autopar.likeness import as_there
from autopar.methods import HAND_MADE, IntraOp, meshes_asked, method_of
from autopar.microbatch_search import ANY_AXES, MicrobatchSearch
from autopar.pipeline_shape import counts_of
from autopar.pipelines import (
    best_pipeline,
    leaves_layouts_open,
    may_be_pipeline,
    useful_seconds,
)
from autopar.plan import Plan
from autopar.reach import Subject
from autopar.remat_relief import Planned
from autopar.schedule.spmd import output_layouts
from autopar.share_search import shares_below
from autopar.subjects import Demands, Rewritings, Subjected
from autopar.user_shardings import UserDemands, check_undivided, with_wishes


class StepPlanner:
    """Owns what plans of one step share: its demands, and the forms of the step that were made so far."""

    def __init__(
        self,
        subject: Subjected,
        cluster: Cluster,
        demands: Demands,
        report_progress: Callable[[str], None],
        forms: Rewritings | None = None,
    ) -> None:
        self.subject, self.cluster, self.demands = subject, cluster, demands
        self._report_progress = report_progress
        self._forms = forms or Rewritings(subject, cluster.device.platform.value)

    def or_pipeline(self, whole: Planned | None) -> Searched[Planned]:
        """The plan on one mesh, or a pipeline if that is free to choose and faster."""
        known = None if whole is None else whole[1]
        if self.subject.hosted or not may_be_pipeline(self.subject, self.cluster, self.demands, known):
            return Searched(whole)
        found = self._pipelines_below(float("inf") if known is None else known.step_seconds)
        if found.best is None:
            return replace(found, best=whole)
        return found if whole is None or self.is_large else replace(found, others=(whole, *found.others))

    def pipelines_below(self, seconds: float) -> Searched[Planned]:
        """The fastest pipeline where one may be chosen; none if it takes longer."""
        if self.subject.hosted or not may_be_pipeline(self.subject, self.cluster, self.demands, None):
            return Searched(None)
        return self._pipelines_below(seconds)

    def _pipelines_below(self, seconds: float) -> Searched[Planned]:
        """The fastest pipeline, or the microbatches dealt to the kinds of devices, if there are several and that is faster."""
        found = best_pipeline(self._forms, self.cluster, self.demands, seconds, self._report_progress)
        if not self.cluster.host_devices:
            return found
        seconds = seconds if found.best is None else found.best[1].step_seconds
        dealt = shares_below(self.subject, self.cluster, self.demands, seconds, self._report_progress)
        return found if dealt is None else replace(found, best=dealt)

    @property
    def is_large(self) -> bool:
        """Whether every plan takes long."""
        return len(self.subject.graph.operators) > LARGE_OPERATORS

    @property
    def takes_long(self) -> bool:
        """Whether all plans on one mesh together take long."""
        return len(self.subject.graph.operators) > MANY_OPERATORS

    def one_mesh_may_beat(self, seconds: float) -> bool:
        """Whether a plan without stages may take less than that, in as few microbatches as can fit: more cost more.

        The whole batch at once, which costs least of all, is asked about first: its program is there already.
        """
        few = self._hopeful_counts[0]
        for count in dict.fromkeys((1, few)):
            try:
                one = self._forms.microbatched(self.demands.terms(count))
            except CoupledBatchError:
                return True
            task = self._task(one)
            if not may_cost_less(task, seconds, self._forms.ground(one, task.separate)):
                return False
        return True

    def as_asked(self) -> tuple[Subjected, Plan, Found]:
        """The fastest plan without stages, in as many microbatches as are asked for or in any."""
        asked = self.demands.num_microbatches
        return self.on_one_mesh() if asked is None else self.plan_in(asked)

    def on_one_mesh(self) -> tuple[Subjected, Plan, Found]:
        """The fastest plan without stages, in as few microbatches as the memory allows and as is fastest."""
        self._report_progress("planning the whole batch at once")
        search, counts = MicrobatchSearch(self), self._hopeful_counts
        if counts[0] > 1 and self.is_large:
            return search.among(counts)
        search.upwards(counts)
        return self._or_by_hand(search.result())

    def on_one_mesh_below(self, seconds: float) -> tuple[Subjected, Plan, Found] | None:
        """The fastest plan without stages, in as many microbatches as are asked for or in any; None if it takes longer."""
        search, asked = MicrobatchSearch(self, seconds), self.demands.num_microbatches
        search.upwards(self._hopeful_counts if asked is None else [asked])
        return None if search.best is None else search.result()

    def or_on_one_mesh(self, pipeline: tuple[Subjected, Plan, Found | None]) -> tuple[Subjected, Plan, Found | None]:
        """The pipeline, or a plan on one mesh if that is faster; raises BudgetError where none of a large step has room."""
        seconds = pipeline[1].step_seconds
        alone = self.on_one_mesh() if self.is_large else self.on_one_mesh_below(seconds)
        return pipeline if alone is None or alone[1].step_seconds >= seconds else alone

    @property
    def _hopeful_counts(self) -> list[int]:
        return _hopeful(counts_of(self.subject.roles.batch_size), self.subject, self.cluster, self.demands)

    def or_on_fewer(self, whole: tuple[Subjected, Plan, Found] | None) -> tuple[Subjected, Plan, Found] | None:
        """The plan on all devices, or one on fewer: where arrays are cut by their number alone, or they are of a better kind."""
        best = whole
        for devices, planner in self._on_fewer():
            if not self._may_need_fewer(best, len(devices)):
                continue
            try:
                rival = planner.as_asked()
            except BudgetError:
                continue
            if best is None or rival[1].step_seconds < best[1].step_seconds:
                best = on_devices(rival, devices, self.cluster)
        return best

    def on_any_mesh_below(self, seconds: float) -> tuple[Subjected, Plan, Found] | None:
        """The fastest plan without stages on all devices or on fewer (see :meth:`or_on_fewer`); None if it takes longer."""
        best = self.on_one_mesh_below(seconds)
        for devices, planner in self._on_fewer():
            if self._may_need_fewer(best, len(devices)):
                rival = planner.on_one_mesh_below(seconds if best is None else best[1].step_seconds)
                best = best if rival is None else on_devices(rival, devices, self.cluster)
        return best

    def _on_fewer(self) -> Iterator[tuple[tuple[int, ...], StepPlanner]]:
        """Planners of the same step on some of the devices only, where these may be chosen."""
        subject, cluster, demands = self.subject, self.cluster, self.demands
        if cluster.is_distributed or demands.like is not None or not leaves_layouts_open(subject, demands):
            return
        for devices in fewer_devices(cluster, subject.roles.batch_size):
            yield devices, StepPlanner(subject, cluster.part(devices), demands, self._report_progress, self._forms)

    def _may_need_fewer(self, best: tuple[Subjected, Plan, Found] | None, count: int) -> bool:
        """Whether so many devices might be faster than the best plan so far; where nothing fits, what they divide may."""
        if self.cluster.host_devices or best is None:
            return True
        return not _needs_all(self.subject, self.cluster, best[1], count)

    def _or_by_hand(self, free: tuple[Subjected, Plan, Found]) -> tuple[Subjected, Plan, Found]:
        """What an expert would write by hand (on the mesh asked for), where that is predicted to be faster; else what was found.

        The integer program leaves out what only a list of steps shows: a latency for each set of gradients whose reductions
        become one.  Many kinds of sets can cost more than what they save; hand-made plans have few.  Nor does it see what is
        hidden behind work, so where a plan leaves much unhidden, others may take less although they cost more.
        """
        subject, plan, found = free
        demands = self.demands
        is_asked = bool(demands.constraints or subject.wishes.texts or subject.wishes.wishes)
        if is_asked or subject.num_microbatches > 1 or found.model is None or found.is_squeezed:
            return free
        prediction = plan.prediction
        unhidden = self.cluster.hides_collectives and prediction.exposed_seconds > WORTH_SHARE * prediction.step_seconds
        if found.model.cost(found.options) >= (1 - WORTH_SHARE) * prediction.unhidden_seconds and not unhidden:
            return free  # no plan at all is faster
        best = free
        for expert in HAND_MADE:
            by_hand = replace(demands, method=expert, mesh_shape=shape_asked(demands))
            planner = StepPlanner(self.subject, self.cluster, by_hand, self._report_progress, self._forms)
            try:
                rival = planner.plan_in(1)
            except PlanError:
                continue
            if rival[1].step_seconds < best[1].step_seconds:
                best = rival[0], replace(rival[1], method=plan.method, solver=plan.solver), rival[2]
        return best

    def plan_in(self, count: int) -> tuple[Subjected, Plan, Found]:
        """The plan in so many microbatches."""
        found = self.plan_below(count, math.inf)
        assert not isinstance(found, TooSlow)
        return found

    def may_fit(self, count: int) -> bool:
        """Whether a plan in so many microbatches might keep the budget."""
        one = self._forms.microbatched(self.demands.terms(count))
        task = self._task(one)
        return may_fit(task, self._forms.ground(one, task.separate))

    @property
    def is_wide(self) -> bool:
        """Whether a mesh of more than ``FEW_AXES`` axes takes longer than all others together, and there are both."""
        has_both = len({len(mesh.axis_sizes) > FEW_AXES for mesh in worth_trying(self._task(self.subject))}) == 2
        return self.takes_long and has_both

    def plan_below(self, count: int, seconds: float, axes: range = ANY_AXES) -> tuple[Subjected, Plan, Found] | TooSlow:
        """The plan in so many microbatches on meshes of so many axes, unless it is known that none costs less than that."""
        if count > 1:
            self._report_progress(f"planning {count} microbatches")
        one = self._forms.microbatched(self.demands.terms(count))
        task = self._task(one)
        task = replace(task, meshes=tuple(mesh for mesh in task.meshes if len(mesh.axis_sizes) in axes))
        found = search_below(task, self._forms.ground(one, task.separate), seconds)
        if isinstance(found, TooSlow):
            return found
        return one, plan_of(one, self.cluster, method_of(self.demands.method).name, found), found

    def bound_seconds(self, count: int, known: tuple[Subjected, Plan, Found], enough: float) -> float:
        """What a plan in so many microbatches takes at least, by what is known of another number of them."""
        self._report_progress(f"bounding the plans in {count} microbatches")
        one, _, found = known
        task = self._task(one)
        loop = looped(one.graph, one.roles.leaves(Role.BATCH), one.num_microbatches)
        return Rescaling(task, self._forms.ground(one, task.separate), loop, found).bound_seconds(count, enough)

    def _task(self, subject: Subjected) -> Task:
        """What is asked of a planner on one mesh: the meshes, what may be chosen on each, and within which memory."""
        cluster, demands = self.cluster, self.demands
        method = method_of(demands.method)
        user = demands_of_user(subject, cluster, demands)
        meshes = meshes_of_user(meshes_asked(method, demands.mesh_shape, cluster), user, method)
        check_patterns(demands.constraints, subject.program.in_paths)
        examples_dim = 0 if subject.num_microbatches == 1 else 1
        state, rows = subject.roles.leaves(Role.STATE), subject.roles.leaves(Role.BATCH)
        view = Subject(subject.graph, state, rows, examples_dim, state_pairs=subject.roles.state_pairs)
        is_asked = bool(demands.constraints) or user.meshes is not None or demands.like is not None
        return Task(
            graph=subject.graph,
            state_pairs=subject.roles.state_pairs,
            donated=subject.donated if demands.donate_state else frozenset(),
            cluster=cluster,
            meshes=meshes_with_names(meshes, without_axes_of_one(demands)),
            budget_bytes=float(demands.memory_per_device or cluster.per_device_memory_bytes),
            restriction=self._restriction(subject, view, user),
            batch=view.batch if isinstance(method, IntraOp) and not is_asked else (),
            examples_dim=examples_dim,
            solver_seconds=demands.solver_seconds,
            names=subject.names,
            report_progress=self._report_progress,
            separate=frozenset(wish.value for wish in user.wishes if wish.origin is Origin.CODE),
            hosted=subject.hosted,
        )

    def _restriction(self, subject: Subjected, view: Subject, user: UserDemands) -> Callable[[Mesh], Restriction]:
        """What a mesh leaves to choose: by the method, then constraints, then the plan of another step, then the user's code.

        What the code says of the whole batch has to hold of it too where it is cut into microbatches.
        """
        cluster, demands, graph = self.cluster, self.demands, subject.graph
        method, constraints = method_of(demands.method), without_axes_of_one(demands)
        folded = frozenset(graph.inputs[position] for position in subject.folded)
        named = Leaves(graph, subject.names, folded)
        positions = {value: position for position, value in enumerate(graph.inputs)}
        there = None if demands.like is None else as_there(demands.like, subject.program)
        whole = subject.undivided
        user_of_whole = None if whole is None else demands_of_user(whole, cluster, demands)

        def restriction(mesh: Mesh) -> Restriction:
            if whole is not None and user_of_whole is not None:
                check_undivided(user_of_whole, whole.graph, mesh)
            allowed = with_constraints(method.restriction(view, mesh), named, constraints, mesh)
            if there is not None:
                allowed = there.kept(allowed, graph, positions, mesh)
            return with_wishes(allowed, user, graph, mesh)

        return restriction


def _needs_all(subject: Subjected, cluster: Cluster, plan: Plan, count: int) -> bool:
    """Whether so many devices take longer than a plan even if they do nothing but what is of use."""
    used = len(plan.devices_of(0))
    return useful_seconds(subject, cluster, plan) * used >= count * plan.step_seconds


def on_devices(
    found: tuple[Subjected, Plan, Found], devices: tuple[int, ...], cluster: Cluster
) -> tuple[Subjected, Plan, Found]:
    """What was planned on some of a cluster's devices alone, as a plan on the cluster."""
    subject, plan, records = found
    stages = (replace(plan.stages[0], devices=devices),)
    return subject, replace(plan, cluster=cluster.name, num_devices=cluster.num_devices, stages=stages), records


def _hopeful(counts: list[int], subject: Subjected, cluster: Cluster, demands: Demands) -> list[int]:
    """Without the smallest numbers of microbatches, if the step would not fit were every array cut over all devices."""
    graph = subject.graph
    budget_bytes = float(demands.memory_per_device or cluster.per_device_memory_bytes) * cluster.num_devices
    elsewhere = _whole_bytes_elsewhere(subject, cluster)
    state = sum(graph.values[value].size_bytes for value in graph.inputs) - elsewhere
    if sum(value.size_bytes for value in graph.all_values()) <= budget_bytes:
        return counts
    fullest = max(sum(row.values()) for row in critical_moments(graph, fuse(graph))) - elsewhere
    fitting = [count for count in counts if state + (fullest - state) / count <= HOPELESS * budget_bytes]
    return fitting or list(dict.fromkeys((counts[0], counts[-1])))


def _whole_bytes_elsewhere(subject: Subjected, cluster: Cluster) -> int:
    """Bytes of whole inputs that no device has at rest."""
    if not has_host_memory(cluster.device.platform):
        return 0
    return sum(subject.graph.values[subject.graph.inputs[position]].size_bytes for position in subject.hosted)


def plan_of(subject: Subjected, cluster: Cluster, method_name: str, found: Found) -> Plan:
    """The planner's answer as plain data."""
    graph, stage = subject.graph, found.stage
    layouts = tuple(stage.home(value, len(graph.values[value].shape)) for value in graph.inputs)
    return Plan(
        fingerprint=subject.fingerprint,
        jax_version=jax.__version__,
        method=method_name,
        cluster=cluster.name,
        num_devices=cluster.num_devices,
        stages=(stage,),
        in_paths=subject.program.in_paths,
        out_paths=subject.program.out_paths,
        in_layouts=layouts,
        out_layouts=output_layouts(graph, stage, subject.roles.state_pairs),
        prediction=found.prediction,
        solver=found.solver,
        num_microbatches=subject.num_microbatches,
        remat=subject.remat,
        hosted=subject.hosted,
    )
