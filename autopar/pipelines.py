"""Pipelines: those that the user asks for, and those that are faster than any plan on one mesh.

What the user leaves open is searched (:mod:`autopar.inter_op.pipeline_search`).  Where devices, mesh shapes or layouts are
demanded, or a hand-made method is, the forward pass is cut into stages of about the same work; each stage is laid out on
its own devices by the integer program, under what the method and the user forbid there (:mod:`autopar.inter_op.stages`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax

from autopar.cluster import Cluster
from autopar.constraints import check_patterns
from autopar.cost_model.pipeline import predict_pipeline
from autopar.errors import BudgetError, PlanError
from autopar.graph.roles import Role
from autopar.inter_op.arranged import Arrangement, PipelineFound, PipelineTask
from autopar.inter_op.assemble import Assembled, assemble_plan, layouts_of_leaves
from autopar.inter_op.candidates import ESTIMATED_COUNT, SCHEDULES, estimated_examples
from autopar.inter_op.dealing import homes_of, schedule_of
from autopar.inter_op.examples import CoupledBatchError
from autopar.inter_op.pipeline_search import SPLIT_SCHEDULES, search_pipelines
from autopar.inter_op.searched import Searched
from autopar.inter_op.stages import StagePlanner
from autopar.inter_op.wanted import Wanted
from autopar.intra_op.search import LARGE_OPERATORS, MANY_OPERATORS
from autopar.likeness import Likeness, StageAsThere, as_there, cuts_as_there
from autopar.methods import InterOp, method_of
from autopar.pipeline_shape import (
    as_microbatches,
    counts_of,
    cuts_for,
    devices_asked,
    kept_loop_advice,
    num_meshes_asked,
    opening_for,
    schedule_asked,
    stages_asked,
)
from autopar.plan import Opening, Plan, Schedule, SolverReport
from autopar.remat_relief import Alike
from autopar.schedule.orders import as_entries
from autopar.stage_tasks import loop_of, pipeline_task
from autopar.subjects import Demands, Rewritings, Subjected, as_loop, cut_between_trips, layer_loops_of
from autopar.user_shardings import UserShardings

MOST_MICROBATCHES_OF_PIPELINES = 1024
"""The planner itself cuts a batch into so many microbatches at most for stages, which keep the residuals of several."""

WORTH_SHARE = 0.03
"""Where so little of a step is communication or repeated work, no pipeline is looked for."""

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
    for num_stages in stages_asked(demands, cluster):
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
    schedule = schedule_asked(demands)
    num_meshes = num_meshes_asked(num_stages, schedule, cluster, demands)
    one = as_microbatches(subject, num_meshes, cluster, demands, opening_for(subject, num_stages))
    homes = homes_of(schedule, num_stages, one.num_microbatches, num_meshes)
    devices = devices_asked(homes, cluster, demands)
    loop = loop_of(one)
    report_progress("finding the layers")
    cuts = cuts_for(loop, one.roles.state_pairs, num_stages)
    if len(cuts) != num_stages - 1:
        many = f"{len(cuts) + 1} layers" if cuts else "1 layer"
        raise _TooFewLayersError(
            f"the forward pass can be cut into {many}, too few for {num_stages} stages; ask for fewer stages"
            + kept_loop_advice(one)
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
    one = as_microbatches(subject, len(there.devices), cluster, demands)
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
