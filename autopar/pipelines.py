"""Pipelines: those that the user asks for, and those that are faster than any plan on one mesh.

What the user leaves open is searched (:mod:`autopar.inter_op.pipeline_search`).  Where devices, mesh shapes or layouts are
demanded, or a hand-made method is, the forward pass is cut into stages of about the same work; each stage is laid out on
its own devices by the integer program, under what the method and the user forbid there (:mod:`autopar.inter_op.stages`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax

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
from autopar.cost_model.pipeline import predict_pipeline
from autopar.errors import BudgetError, PlanError
from autopar.graph.build import LoopKind
from autopar.graph.ir import Graph
from autopar.graph.roles import Role
from autopar.graph.wishes import Origin, wishes_of
from autopar.inter_op.assemble import Assembled, assemble_plan, layouts_of_leaves
from autopar.inter_op.crossings import boundaries
from autopar.inter_op.dealing import check_homes, homes_of, schedule_of, stages_per_mesh_of
from autopar.inter_op.examples import CoupledBatchError
from autopar.inter_op.hosting import Hosting
from autopar.inter_op.layers import layers
from autopar.inter_op.looped import Looped, looped
from autopar.inter_op.pipeline_search import (
    ESTIMATED_COUNT,
    SCHEDULES,
    SPLIT_SCHEDULES,
    Wanted,
    estimated_examples,
    search_pipelines,
)
from autopar.inter_op.searched import Searched
from autopar.inter_op.shares import looped_in_shares
from autopar.inter_op.sites import split_evenly
from autopar.inter_op.stages import (
    Arrangement,
    PipelineFound,
    PipelineTask,
    StageDemands,
    StagePlanner,
    leaves_of,
)
from autopar.intra_op.restrict import Reach, Restriction
from autopar.intra_op.search import LARGE_OPERATORS, MANY_OPERATORS
from autopar.likeness import Likeness, StageAsThere, as_there, cuts_as_there
from autopar.methods import InterOp, IntraOp, mesh_of, method_of
from autopar.plan import UNOPENED, Offload, Opening, Plan, Schedule, SolverReport
from autopar.reach import Subject, batch_reach
from autopar.remat_search import Alike
from autopar.schedule.orders import OrderFunction, as_entries
from autopar.schedule.stage_program import Passing, StageProgram
from autopar.subjects import Demands, Rewritings, Subjected, as_loop, cut_between_trips, layer_loops_of
from autopar.user_shardings import UserDemands, UserShardings, user_demands, with_wishes

MOST_MICROBATCHES = 64
"""The planner itself cuts a batch into so many microbatches at most on one mesh."""

MOST_MICROBATCHES_OF_PIPELINES = 1024
"""The same for pipelines, whose stages keep the residuals of several microbatches."""

WORTH_SHARE = 0.03
"""Where so little of a step is communication or repeated work, no pipeline is looked for."""

MICROBATCHES_PER_MESH = 4
"""Unless told otherwise a pipeline runs up to so many microbatches for each mesh: the bubble is then below a fifth."""

FINER = (1, 2, 4)
"""Layers are looked for so many times as fine as stages, until there are enough."""


PlannedPipeline = tuple[Subjected, Plan, None]
"""A plan of several stages, with the program that it is a plan of."""


def wants_pipeline(demands: Demands) -> bool:
    """Whether several stages are demanded."""
    if demands.stages is None:
        return isinstance(method_of(demands.method), InterOp)
    return demands.stages != 1


def plan_pipeline(
    subject: Subjected, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
) -> PlannedPipeline:
    """The plan of the pipeline that is demanded, with the program that it is a plan of.

    Raises :class:`~autopar.errors.PlanError` where a demand cannot be met.
    """
    check_patterns(demands.constraints, subject.program.in_paths)
    has_layers = bool(layer_loops_of(subject))
    if leaves_layouts_open(subject, demands) and isinstance(demands.stages, int) and not has_layers:
        wanted = Wanted(demands.stages, demands.schedule, stages_per_mesh=demands.stages_per_mesh)
        forms = Rewritings(subject, cluster.device.platform.value)
        if (chosen := _searched(forms, cluster, demands, wanted, report_progress).best) is not None:
            return chosen
    refusal: PlanError | None = None  # what now follows finds finer cuts, or says why there are none
    for num_stages in _stages_demanded(demands, cluster):
        try:
            return _in_even_stages(subject, num_stages, cluster, demands, report_progress)
        except _TooFewLayersError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


class _TooFewLayersError(PlanError):
    """The forward pass has fewer layers than stages are wanted."""


def _in_even_stages(
    subject: Subjected,
    num_stages: int,
    cluster: Cluster,
    demands: Demands,
    report_progress: Callable[[str], None],
    give_up_seconds: float = math.inf,
) -> PlannedPipeline:
    """The plan of so many stages of about the same work; loops over layers are cut for them.

    One that takes ``give_up_seconds`` before it keeps the memory budget is returned as it is.
    """
    schedule = _schedule_of(demands)
    num_meshes = _num_meshes(num_stages, schedule, cluster, demands)
    one = _as_microbatches(subject, num_meshes, cluster, demands, opening_for(subject, num_stages))
    homes = homes_of(schedule, num_stages, one.num_microbatches, num_meshes)
    devices = _devices_of(homes, cluster, demands)
    loop = loop_of(one)
    report_progress("finding the layers")
    cuts = cuts_for(loop, one.roles.state_pairs, num_stages)
    if len(cuts) != num_stages - 1:
        many = f"{len(cuts) + 1} layers" if cuts else "1 layer"
        raise _TooFewLayersError(
            f"the forward pass can be cut into {many}, too few for {num_stages} stages; ask for fewer stages{_kept_loop(one)}"
        )
    planner = StagePlanner(pipeline_task(one, loop, cluster, demands, report_progress))
    arrangement = Arrangement(cuts, devices, schedule)
    is_free = one.opened is not None and schedule is Schedule.ONE_F_ONE_B and demands.schedule is None
    if not is_free:
        return one, plan_of_pipeline(one, cluster, demands, planner.plan(arrangement, give_up_seconds)), None
    found = _under_the_fastest_of(SCHEDULES, planner, arrangement, give_up_seconds)
    return one, plan_of_pipeline(one, cluster, demands, found), None


def _under_the_fastest_of(
    schedules: Sequence[Schedule], planner: StagePlanner, arrangement: Arrangement, give_up_seconds: float
) -> PipelineFound:
    """The pipeline under the fastest of some schedules; under the others only with the same stages, or residuals on the hosts.

    Raises :class:`~autopar.errors.BudgetError`, of the first schedule, where none keeps the budget.
    """
    first, *others = schedules
    try:
        found = planner.plan(replace(arrangement, schedule=first), give_up_seconds)
    except BudgetError:
        hosted = [planner.with_hosts(replace(arrangement, schedule=other), give_up_seconds) for other in others]
        if not any(hosted):
            raise
        return min((one for one in hosted if one is not None), key=lambda one: one.step_seconds)
    under = [planner.under(found, other) for other in others]
    return min((found, *(one for one in under if one is not None)), key=lambda one: one.step_seconds)


def plan_pipeline_like(
    like: Likeness, subject: Subjected, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
) -> PlannedPipeline:
    """The plan of a pipeline whose stages are those of another step's, as far as the leaves of both are the same.

    Raises :class:`~autopar.errors.PlanError` where this step has no such stages.
    """
    if like.plan.shares:
        raise PlanError(
            "the step that like= names deals its microbatches to meshes of which each reads the whole model, which no other step "
            "can be like; leave like= out: its arguments are then moved to where its own plan wants them"
        )
    opening = like.opening_of(subject.program)
    if opening.pieces > 1:
        subject = cut_between_trips(subject, opening, cluster.device.platform.value)
    there = as_there(like, subject.program)
    count, size = like.plan.num_microbatches, subject.roles.batch_size
    if demands.num_microbatches is None and size is not None and size % count == 0:
        demands = replace(demands, num_microbatches=count)
    one = _as_microbatches(subject, len(there.devices), cluster, demands)
    loop = loop_of(one)
    cuts = cuts_as_there(loop, one.roles.state_pairs, there)
    if len(cuts) != len(there.devices) - 1:
        raise PlanError(
            f"the step that like= names runs in {len(there.devices)} stages, and this one has too few operators for as "
            "many; leave like= out: its arguments are then moved to where its own plan wants them"
        )
    task = replace(
        pipeline_task(one, loop, cluster, demands, report_progress),
        demands=StageAsThere(there, one.program.in_paths),
    )
    schedule = schedule_of(like.plan, one.num_microbatches)
    found = StagePlanner(task).plan(Arrangement(cuts, there.devices, schedule))
    return one, plan_of_pipeline(one, cluster, demands, found), None


def pipeline_alike(
    subject: Subjected,
    cluster: Cluster,
    demands: Demands,
    plan: Plan,
    cuts: tuple[int, ...],
    report_progress: Callable[[str], None],
) -> Alike:
    """A pipeline of the same stages, devices and microbatches as another one, with stages cut before other operators.

    It is laid out for the schedule of the other, and runs under whichever is the fastest then, unless one is demanded.
    There is none if its stages do not keep the budget at any price of memory, nor with residuals in the memory of the hosts,
    where they may lie there; of a large program if the fastest plans of its stages do not.
    """
    terms = replace(demands.terms(plan.num_microbatches), shares=plan.shares)
    one = as_loop(subject, terms, cluster.device.platform.value, opening=Opening(plan.opening.pieces))
    planner = StagePlanner(pipeline_task(one, loop_of(one), cluster, demands, report_progress))
    schedule = schedule_of(plan, plan.trips) if demands.schedule is None else demands.schedule
    arrangement = Arrangement(cuts, tuple(stage.devices for stage in plan.stages), schedule)
    is_free = demands.schedule is None and not (plan.shares or plan.num_meshes < len(plan.stages) or planner.is_large)
    squeezed = planner.squeezed(arrangement)
    if plan.shares:  # a layer is on all meshes, and counts as on the first
        squeezed = any(squeezed), *(False for _ in squeezed[1:])
    # Under 1F1B fewest microbatches are in flight; of those that lie on the hosts GPipe has fewest on a device.
    others = [one for one in SCHEDULES if one is not schedule] if is_free else []
    tried = (_within_budget(planner, replace(arrangement, schedule=one)) for one in (schedule, *others))
    found = next((one for one in tried if one is not None), None)
    if found is not None and is_free:
        found = _under_the_fastest(planner, found)
    return Alike(None if found is None else (one, plan_of_pipeline(one, cluster, demands, found), None), squeezed)


def _within_budget(planner: StagePlanner, arrangement: Arrangement) -> PipelineFound | None:
    """The pipeline of an arrangement that keeps the budget; of a large program, for which prices take long, only without them."""
    if planner.is_large and any(planner.squeezed(arrangement)):
        return planner.with_hosts(arrangement)
    try:
        return planner.plan(arrangement)
    except BudgetError:
        return None


def _under_the_fastest(planner: StagePlanner, found: PipelineFound) -> PipelineFound:
    """The same stages, each on a mesh of its own, under the schedule that is the fastest of those that keep the budget."""
    best = found
    for schedule in (*SCHEDULES, *SPLIT_SCHEDULES):
        is_hopeless = schedule in SPLIT_SCHEDULES and found.least_seconds >= best.step_seconds
        if schedule is found.arrangement.schedule or is_hopeless:
            continue
        other = planner.leanest_under(found, schedule, best.step_seconds)
        if other is not None and other.step_seconds < best.step_seconds:
            best = other
    return best


def come_first(subject: Subjected, cluster: Cluster) -> bool:
    """Whether pipelines are looked for before plans on one mesh, which then all have to be faster than the best of them."""
    return cluster.hosts > 1 and len(subject.graph.operators) > MANY_OPERATORS


def may_be_pipeline(subject: Subjected, cluster: Cluster, demands: Demands, whole: Plan | None) -> bool:
    """Whether a pipeline may be chosen, and might be faster than the plan ``whole`` on one mesh.

    A pipeline idles; what it may save is communication, and work that is repeated to avoid it.  Devices that share their
    cores gain nothing by waiting for each other less, so on one host of them there is none to look for.
    """
    is_free = demands.stages is None and leaves_layouts_open(subject, demands)
    if not is_free or cluster.num_devices == 1 or not subject.roles.leaves(Role.BATCH):
        return False
    if cluster.hosts == 1 and cluster.compute_shared_by > 1:
        return False
    if cluster.host_devices:
        return (
            True  # on one mesh the faster devices wait for the slower ones, which a prediction does not tell from work
        )
    return whole is None or useful_seconds(subject, cluster, whole) < (1 - WORTH_SHARE) * whole.step_seconds


def useful_seconds(subject: Subjected, cluster: Cluster, whole: Plan) -> float:
    """Seconds of a step in which no device communicates or repeats what another does as well."""
    total = sum(operator.flops * trips for operator, trips in subject.graph.all_operators())
    done = whole.prediction.flops * (len(whole.stages[0].devices) or cluster.num_devices)
    return whole.prediction.compute_seconds * (min(1.0, total / done) if done else 1.0)


def leaves_layouts_open(subject: Subjected, demands: Demands) -> bool:
    """Whether neither the method nor the user says how arrays lie on which mesh."""
    return (
        method_of(demands.method).name == "auto"
        and demands.mesh_shape is None
        and not demands.constraints
        and (demands.user_shardings is UserShardings.IGNORE or not subject.wishes.texts)
    )


def best_pipeline(
    forms: Rewritings, cluster: Cluster, demands: Demands, to_beat_seconds: float, report: Callable[[str], None]
) -> Searched[PlannedPipeline]:
    """The fastest pipeline of two stages or more, if one is faster than ``to_beat_seconds``.

    Loops over layers are whole in the search: priced as one program, their pieces are too much for it.  Pipelines with them cut
    are planned beside it, a stage on each host, and two on each, dealt round.
    """
    found = _searched(forms, cluster, demands, Wanted(schedule=demands.schedule), report, to_beat_seconds)
    if cluster.hosts == 1 or not layer_loops_of(forms.subject):
        return found
    for asked in _with_loops_cut(cluster, demands):
        best_seconds = to_beat_seconds if found.best is None else found.best[1].step_seconds
        assert isinstance(asked.stages, int)
        try:
            cut = _in_even_stages(forms.subject, asked.stages, cluster, asked, report, best_seconds)
        except BudgetError:
            found = replace(found, lacks_memory=True)
            continue
        except PlanError:
            break
        if cut[1].step_seconds < best_seconds:
            found = replace(found, best=cut)
    return found


def _with_loops_cut(cluster: Cluster, demands: Demands) -> Iterator[Demands]:
    """Demands of the pipelines in which loops over layers are cut: a stage on each host, then two that are dealt round."""
    yield replace(demands, stages=cluster.hosts)
    if demands.schedule is None:
        yield replace(demands, stages=2 * cluster.hosts, stages_per_mesh=2)


def _searched(
    forms: Rewritings,
    cluster: Cluster,
    demands: Demands,
    wanted: Wanted,
    report: Callable[[str], None],
    to_beat_seconds: float = math.inf,
) -> Searched[PlannedPipeline]:
    """The fastest pipeline that is as wanted, if one is found, and as fast."""
    subject, coupling = forms.subject, ""
    known: dict[int, tuple[Subjected, PipelineTask]] = {}

    def task(count: int) -> PipelineTask:
        if count not in known:
            report(f"cutting the batch into {count} microbatches")
            one = forms.as_loop(demands.terms(count))
            task = pipeline_task(one, loop_of(one), cluster, demands, report)
            known[count] = one, replace(task, ground=functools.partial(forms.ground, one))
        return known[count][1]

    asked = demands.num_microbatches
    free = counts_of(subject.roles.batch_size, MOST_MICROBATCHES_OF_PIPELINES)
    counts = free if asked is None else [asked]
    estimated_count = ESTIMATED_COUNT
    if len(subject.graph.operators) > LARGE_OPERATORS:
        estimated_count = max(ESTIMATED_COUNT, (subject.roles.batch_size or 1) // estimated_examples(cluster))
    try:
        try:
            found = search_pipelines(
                task, counts, wanted, to_beat_seconds=to_beat_seconds, estimated_count=estimated_count
            )
        except CoupledBatchError as error:
            if asked is not None:
                return Searched(None)
            coupling = str(error)
            found = search_pipelines(task, [1], wanted, to_beat_seconds=to_beat_seconds)
    except BudgetError:  # the refusal of the plan on one mesh, or of one grouping, says more
        return Searched(None, lacks_memory=True)

    def as_plan(one: PipelineFound) -> PlannedPipeline:
        of_count = replace(known[one.count][0], coupling=coupling)
        return of_count, plan_of_pipeline(of_count, cluster, demands, one), None

    return found.mapped(as_plan)


def counts_of(batch_size: int | None, most: int = MOST_MICROBATCHES) -> list[int]:
    """Numbers of microbatches that the planner itself tries: each is the one before by the least factor of what is left."""
    counts = [1]
    left = batch_size or 1
    while left > 1 and counts[-1] * (factor := _least_factor(left, most)) <= most:
        counts.append(counts[-1] * factor)
        left //= factor
    return counts


def _least_factor(number: int, most: int) -> int:
    """The least that divides a number of two or more."""
    return next(factor for factor in range(2, number + 1) if number % factor == 0 or factor > most)


def opening_for(subject: Subjected, num_stages: int) -> Opening:
    """How loops over layers are cut for so many stages: into a piece for each, for more pieces take longer to plan."""
    trips = max((loop.bodies[0].trips for loop in layer_loops_of(subject)), default=1)
    return Opening(min(trips, num_stages))


def _kept_loop(subject: Subjected) -> str:
    """Advice where a loop over layers could not be cut."""
    is_kept = any(one.primitive == LoopKind.SCAN for one in loop_of(subject).body.operators) and subject.opened is None
    if not is_kept:
        return ""
    return ", or give the layers of a loop (scan) as arguments that are stacked along the loop: other loops stay on one stage"


def loop_of(subject: Subjected) -> Looped:
    """The loop over microbatches in a step that was rewritten as one, or the trip that holds those of its shares."""
    if subject.shares:
        return looped_in_shares(subject.graph, subject.roles.leaves(Role.BATCH), subject.shares)
    return looped(subject.graph, subject.roles.leaves(Role.BATCH), subject.num_microbatches)


def cuts_for(loop: Looped, state_pairs: Sequence[tuple[int, int]], num_stages: int) -> tuple[int, ...]:
    """Where so many stages of about the same work begin; fewer than that many cuts where the model has fewer layers."""
    found: tuple[int, ...] = ()
    for finer in FINER:
        found = layers(loop, state_pairs, at_most=finer * num_stages, at_least=num_stages)
        if len(found) >= num_stages - 1:
            return _evenly(found, boundaries(loop, state_pairs).flops.tolist(), num_stages)
    return found


def _evenly(positions: Sequence[int], flops: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """So many of the positions less one that the heaviest run of operators between them is lightest."""
    ends = [0, *positions, len(flops)]
    done = [sum(flops[:end]) for end in ends]
    best: list[tuple[float, tuple[int, ...]]] = [
        (work, ()) for work in done
    ]  # by end: heaviest of the runs up to it, cuts
    for runs in range(2, num_stages + 1):
        best = [
            min((max(best[cut][0], done[end] - done[cut]), (*best[cut][1], ends[cut])) for cut in range(runs - 1, end))
            if end >= runs
            else (math.inf, ())
            for end in range(len(ends))
        ]
    return best[-1][1]


def pipeline_task(
    subject: Subjected, loop: Looped, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
) -> PipelineTask:
    """The task of planning stages of a looped step, whichever they are."""
    return PipelineTask(
        loop,
        subject.roles.state_pairs,
        cluster,
        float(demands.memory_per_device or cluster.per_device_memory_bytes),
        subject.program.in_paths,
        donates_state=demands.donate_state,
        solver_seconds=demands.solver_seconds,
        report_progress=report_progress,
        demands=_StageDemands(subject, demands),
        hosting=_hosting(cluster, demands),
        budget_by_host=_budget_by_host(cluster, demands),
    )


def _hosting(cluster: Cluster, demands: Demands) -> Hosting:
    """Which residuals may lie in the memory of the hosts; whether a demand can be met was asked before."""
    if demands.offload is Offload.ACTIVATIONS:
        return Hosting.ALL
    is_free = demands.offload is None and demands.like is None and isinstance(method_of(demands.method), IntraOp)
    return Hosting.NEEDED if is_free and may_offload(cluster) else Hosting.NONE


def may_offload(cluster: Cluster) -> bool:
    """Whether the memory of the hosts is another one than that of the devices, and its link known."""
    return cluster.host_memory_link is not None and has_host_memory(cluster.device.platform.value)


def _budget_by_host(cluster: Cluster, demands: Demands) -> tuple[float, ...]:
    """Bytes of a device of each host, where these are of several kinds and the user names no budget."""
    if demands.memory_per_device is not None or not cluster.host_devices:
        return ()
    return tuple(
        float(cluster.kind_of(host).memory_bytes // cluster.compute_shared_by) for host in range(cluster.hosts)
    )


def assembled(plan: Plan, subject: Subjected, cluster: Cluster, *, donates_state: bool) -> Assembled:
    """What a plan of several stages runs; ``subject`` runs in the plan's microbatches (:func:`as_loop`)."""
    return assemble_plan(plan, loop_of(subject), subject.roles.state_pairs, cluster, donates_state=donates_state)


def plan_of_pipeline(subject: Subjected, cluster: Cluster, demands: Demands, found: PipelineFound) -> Plan:
    """The planner's answer as plain data."""
    stages, schedule = [cost.lowering for cost in found.costs], found.arrangement.schedule
    in_layouts, out_layouts = layouts_of_leaves(stages, subject.graph)
    reports = tuple({id(one): one.solver for one in found.found}.values())
    return Plan(
        fingerprint=subject.fingerprint,
        jax_version=jax.__version__,
        method=method_of(demands.method).name,
        cluster=cluster.name,
        num_devices=cluster.num_devices,
        stages=tuple(lowering.stage for lowering in stages),
        in_paths=subject.program.in_paths,
        out_paths=subject.program.out_paths,
        in_layouts=in_layouts,
        out_layouts=out_layouts,
        prediction=predict_pipeline(found.costs, found.homes, found.count, found.forecast),
        solver=SolverReport(
            variables=sum(one.variables for one in reports),
            variables_after_reduction=sum(one.variables_after_reduction for one in reports),
            seconds=sum(one.seconds for one in reports),
            gap=max(one.gap for one in reports),
            meshes_tried=tuple(dict.fromkeys(mesh for one in reports for mesh in one.meshes_tried)),
        ),
        num_microbatches=subject.num_microbatches,
        schedule=schedule if isinstance(schedule, Schedule) else Schedule.OWN,
        cuts=found.arrangement.cuts,
        order=() if isinstance(schedule, Schedule) else as_entries(found.order),
        opening=subject.opening,
        remat=subject.remat,
        shares=subject.shares,
    )


# -------------------------------------------------------------------------------------------- devices and microbatches


def _schedule_of(demands: Demands) -> Schedule | OrderFunction:
    """The schedule that is demanded; several stages on a mesh ask for the one that deals them round."""
    if demands.schedule is not None:
        return demands.schedule
    is_dealt = (demands.stages_per_mesh or 1) > 1
    if isinstance(demands.stages, tuple):
        is_dealt = len(set(demands.stages)) < len(demands.stages)
    return Schedule.INTERLEAVED_ONE_F_ONE_B if is_dealt else Schedule.ONE_F_ONE_B


def _stages_demanded(demands: Demands, cluster: Cluster) -> Iterator[int]:
    """How many stages; of the method that has a stage on every device also fewer."""
    if demands.stages is not None:
        yield demands.stages if isinstance(demands.stages, int) else len(demands.stages)
        return
    count = cluster.num_devices
    yield count
    lower = 1 << (count - 1).bit_length() - 1 if count > 1 else 0
    while lower > 1:
        yield lower
        lower //= 2


def _num_meshes(num_stages: int, schedule: Schedule | OrderFunction, cluster: Cluster, demands: Demands) -> int:
    """On how many meshes the stages lie; of a user's own schedule at most."""
    if isinstance(demands.stages, tuple):
        return len(set(demands.stages))
    if schedule is Schedule.INTERLEAVED_ONE_F_ONE_B:
        return num_stages // (demands.stages_per_mesh or stages_per_mesh_of(num_stages, cluster))
    return num_stages


def _devices_of(homes: tuple[int, ...], cluster: Cluster, demands: Demands) -> tuple[tuple[int, ...], ...]:
    """The devices of each stage, of which the meshes are told; raises :class:`~autopar.errors.PlanError` where there are none."""
    stages, num_meshes = demands.stages, max(homes) + 1
    if isinstance(stages, tuple):
        check_devices(stages, cluster)
        check_homes(stages, homes)
        return stages
    meshes = split_evenly(num_meshes, cluster)
    if meshes is None:
        dealt = "" if num_meshes == len(homes) else f", which share {num_meshes} meshes,"
        raise PlanError(
            f"stages={stages}{dealt} are more than the {cluster.num_devices} devices of {cluster.name}; ask for fewer, or "
            "give the ids of each stage's devices, for example stages=[[0, 1], [2, 3]]"
        )
    if isinstance(method_of(demands.method), InterOp):
        return tuple((home,) for home in homes)
    return tuple(meshes[home] for home in homes)


def check_devices(stages: tuple[tuple[int, ...], ...], cluster: Cluster) -> None:
    """Check that the cluster has these devices, as many on each host of a stage; raises PlanError naming the stage."""
    for number, devices in enumerate(stages):
        if beyond := [device for device in devices if not 0 <= device < cluster.num_devices]:
            raise PlanError(
                f"stages: stage {number + 1} has the device {beyond[0]}, and the devices of {cluster.name} are 0 to "
                f"{cluster.num_devices - 1}"
            )
        on_host: dict[int, int] = {}
        for device in devices:
            on_host[device // cluster.devices_per_host] = on_host.get(device // cluster.devices_per_host, 0) + 1
        if len(set(on_host.values())) > 1:
            raise PlanError(
                f"stages: stage {number + 1} has {' and '.join(map(str, on_host.values()))} devices on its hosts; give it "
                "as many devices on each host that it uses"
            )


def _as_microbatches(
    subject: Subjected, num_meshes: int, cluster: Cluster, demands: Demands, opening: Opening = UNOPENED
) -> Subjected:
    """The step as a loop over the microbatches that are demanded, or over as many as are of use."""
    platform = cluster.device.platform.value
    if opening.pieces > 1:
        subject = cut_between_trips(subject, opening, platform)
    if demands.num_microbatches is not None:
        return as_loop(subject, demands.terms(demands.num_microbatches), platform)
    count = max(n for n in counts_of(subject.roles.batch_size) if n <= MICROBATCHES_PER_MESH * num_meshes)
    try:
        return as_loop(subject, demands.terms(count), platform)
    except CoupledBatchError as error:
        return replace(as_loop(subject, demands.terms(1), platform), coupling=str(error))


# ------------------------------------------------------------------------------------------------- what stages may do


class _StageDemands:
    """What the method and the user ask of a stage; called for each."""

    def __init__(self, subject: Subjected, demands: Demands) -> None:
        self._subject, self._demands = subject, demands
        self._method = method_of(demands.method)
        self._state = frozenset(subject.roles.leaves(Role.STATE))
        self._batch = frozenset(subject.roles.leaves(Role.BATCH))
        self._tied: dict[Mesh, Reach] = {}

    def __call__(self, program: StageProgram, graph: Graph, cluster: Cluster) -> StageDemands:
        demands, method = self._demands, self._method
        leaves = leaves_of(program, graph)
        names = {value: self._subject.program.in_paths[position] for value, position in leaves.items()}
        own = [k for k, value in enumerate(graph.inputs) if leaves.get(value) in self._state]
        rows = [k for k, value in enumerate(graph.inputs) if leaves.get(value) in self._batch]
        meshes = method.meshes(cluster)
        if demands.mesh_shape is not None:
            wanted = mesh_of(demands.mesh_shape, cluster)
            meshes = (wanted,) if isinstance(method, IntraOp) else tuple(mesh for mesh in meshes if mesh == wanted)
            if not meshes:
                raise PlanError(
                    f"method={method.name!r} cannot use mesh_shape={demands.mesh_shape}; leave one of them out"
                )
        user = self._of_user(graph, names, own, cluster)
        meshes = meshes_of_user(meshes, user, method)
        constraints = without_axes_of_one(demands)
        meshes = meshes_with_names(meshes, constraints)
        named = Leaves(graph, names, frozenset(graph.inputs[k] for k in rows))

        def restriction(mesh: Mesh) -> Restriction:
            received = self._received(program, graph, mesh)
            view = Subject(graph, tuple(own), tuple(rows), 1, received, program.state_pairs)
            allowed = with_constraints(method.restriction(view, mesh), named, constraints, mesh)
            return with_wishes(allowed, user, graph, mesh)

        separate = frozenset(wish.value for wish in user.wishes if wish.origin is Origin.CODE)
        return StageDemands(meshes, restriction, separate, not demands.constraints and user.meshes is None)

    def _of_user(self, graph: Graph, names: Mapping[int, str], state: list[int], cluster: Cluster) -> UserDemands:
        """What shardings in the user's code ask of a stage: meshes there are those of its devices alone."""
        subject, demands = self._subject, self._demands
        if demands.user_shardings is UserShardings.IGNORE or subject.leaves is None:
            return UserDemands()
        paths = [names.get(value, f"<received {number}>") for number, value in enumerate(graph.inputs)]
        wishes = wishes_of(graph, paths, state, subject.leaves)
        shape = demands.mesh_shape
        return user_demands(wishes, graph, cluster, mesh_shape=shape, is_free=isinstance(self._method, IntraOp))

    def _received(self, program: StageProgram, graph: Graph, mesh: Mesh) -> Reach:
        """Dimensions of what a stage receives along which a hand-made method would cut the examples."""
        if isinstance(self._method, IntraOp | InterOp) or "data" not in mesh.axis_names:
            return {}
        if mesh not in self._tied:
            whole = Subject(self._subject.graph, tuple(self._state), tuple(self._batch), 1)
            self._tied[mesh] = batch_reach(whole, mesh, "data")
        tied = self._tied[mesh]
        return {
            value: frozenset(dim + 1 for dim in tied[end.crossing.value])  # received is a stack over the microbatches
            for value, end in zip(graph.inputs, program.inputs, strict=True)
            if end.crossing is not None and end.crossing.passing is Passing.MICRO and end.crossing.value in tied
        }
