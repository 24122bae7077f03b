"""From a plan to its explanation: everything is read off the plan, the steps that it lowers to, and their prices.

Nothing is planned here.  What needs a planner (the hand-made methods' plans, the runner-ups) is asked of the
parallelized function, which is known by its methods only.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from autopar.errors import AutoparError, PlanError
from autopar.explain.data import Leaf, LeafKind, Measured, MemoryUse, MethodTotals, Time
from autopar.explain.explanation import Explanation
from autopar.explain.layouts import leaves_of, parameter_groups, parameters_of, undivided
from autopar.explain.pipeline import PipelineExplanation, StageRow
from autopar.explain.stages import leaves_on_stages, passage_rows, shared_host_notes, stage_rows, timeline_rows
from autopar.explain.verdict import pipeline_verdict, verdict_text
from autopar.explain.words import seconds_text
from autopar.explain.work import collective_groups, communication_of, operator_uses, wasted_seconds
from autopar.graph.fusion import fuse
from autopar.plan import Offload, Plan, Prediction, SumScatter
from autopar.schedule.orders import bubble_fraction
from autopar.schedule.spmd import lower
from autopar.wording import bytes_text, family_name, slashed

if TYPE_CHECKING:
    from autopar.cluster import Cluster
    from autopar.inter_op.account import PipelineAccount
    from autopar.intra_op.task import Found
    from autopar.intra_op.why import Why
    from autopar.subjects import Demands, Subjected

WITHOUT_PIPELINE = "intra_op"
"""The method that gives the best plan of a single stage."""

FAR_FROM_FORETOLD = 1.5
"""Steps that take so many times what was foretold, or that part of it, are worth a word."""

REPEATED_SHARE = 0.01
"""Repeated work below this share of the step is not worth a word."""


class Ran(Protocol):
    """A compiled step that ran."""

    step_seconds: list[float]

    def memory_analysis(self) -> Any:
        """XLA's account of bytes."""


class Step(Protocol):
    """What :class:`autopar.parallelized.Parallelized` offers to explanations."""

    __name__: str

    @property
    def cluster(self) -> Cluster:
        """The cluster that is planned for."""

    @property
    def demands(self) -> Demands:
        """What the user asked of every plan."""

    @property
    def last(self) -> Ran | None:
        """What the last call ran."""

    @property
    def opponents(self) -> tuple[str, ...]:
        """Names of the hand-made methods."""

    def records(
        self, *args: Any, cluster: Cluster | None = None, method: Any = None, **kwargs: Any
    ) -> tuple[Subjected, Plan, Found | None]:
        """Trace and plan."""

    def last_records(self) -> tuple[Subjected, Plan, Found | None] | None:
        """What the last call ran."""

    def records_of(
        self, subject: Subjected, *, cluster: Cluster, method: Any = None, within_budget: bool = True
    ) -> tuple[Subjected, Plan, Found | None]:
        """Plan what was traced before."""

    def account(self, subject: Subjected, plan: Plan, cluster: Cluster) -> PipelineAccount:
        """The pipeline of a plan, priced and simulated."""

    def said_by_user(self, subject: Subjected, cluster: Cluster, method: Any) -> tuple[dict[int, str], tuple[str, ...]]:
        """What the user has demanded of inputs (positions), and notes on demands that were not kept."""

    def runner_ups(
        self, subject: Subjected, found: Found, cluster: Cluster, groups: Sequence[Sequence[int]]
    ) -> tuple[Why, ...]:
        """The best plans in which groups of inputs (positions) lie otherwise."""


@dataclass(frozen=True)
class _Case:
    """What is explained."""

    step: Step
    cluster: Cluster
    subject: Subjected
    plan: Plan
    found: Found | None
    ran: Ran | None
    said: tuple[dict[int, str], tuple[str, ...]] = ({}, ())
    """What the user has demanded of inputs, by position, and notes on what was not kept of it."""

    @property
    def place(self) -> Cluster:
        """The devices of a plan on one mesh as a cluster of their own: it may leave others idle."""
        return self.cluster.part(self.plan.devices_of(0))


def explain(
    train_step: Step, *args: Any, cluster: Cluster | None = None, method: Any = None, **kwargs: Any
) -> Explanation | PipelineExplanation:
    """Why a parallelized step is spread as it is, and what that costs.

    After a call, ``explain(train_step)`` explains what ran, predicted against measured.  With the step's arguments
    (``jax.ShapeDtypeStruct`` leaves suffice) it plans and explains without running, for any ``cluster`` and ``method``.
    ``print`` the result, or look at its fields.  A plan of several stages has an explanation of its own kind.

    Raises :class:`~autopar.errors.AutoparError` if there is nothing to explain yet, and
    :class:`~autopar.errors.PlanError` where there is no plan.
    """
    if not hasattr(train_step, "last_records"):
        raise AutoparError(
            f"explain() wants a function made by autopar.parallelize, not {type(train_step).__name__}; "
            "write autopar.explain(autopar.parallelize(function), *arguments)"
        )
    if args or kwargs:
        subject, plan, found = train_step.records(*args, cluster=cluster, method=method, **kwargs)
        place = cluster or train_step.cluster
        said = train_step.said_by_user(subject, place, method)
        return _explained(_Case(train_step, place, subject, plan, found, None, said))
    if (known := train_step.last_records()) is None:
        raise AutoparError(
            f"{train_step.__name__} has not been called yet; call it first, or pass its arguments "
            "(shapes suffice): autopar.explain(train_step, state, batch)"
        )
    subject, plan, found = known
    if cluster is None and method is None:
        said = train_step.said_by_user(subject, train_step.cluster, None)
        return _explained(_Case(train_step, train_step.cluster, subject, plan, found, train_step.last, said))
    if cluster is not None and cluster.device.platform is not train_step.cluster.device.platform:
        raise AutoparError(
            f"{cluster.name} is of another platform than {train_step.cluster.name}, so the step must be traced for it; "
            "pass the arguments: autopar.explain(train_step, state, batch, cluster=…)"
        )
    cluster = cluster or train_step.cluster
    subject, plan, found = train_step.records_of(subject, cluster=cluster, method=method)
    said = train_step.said_by_user(subject, cluster, None) if method is None else ({}, ())
    return _explained(_Case(train_step, cluster, subject, plan, found, None, said))


def _explained(case: _Case) -> Explanation | PipelineExplanation:
    return _pipeline_explanation(case) if case.plan.is_pipeline else _explanation(case)


def _pipeline_explanation(case: _Case) -> PipelineExplanation:
    plan, subject = case.plan, case.subject
    account = case.step.account(subject, plan, case.cluster)
    stages = stage_rows(account, case.cluster, case.step.demands.memory_per_device, plan.shares)
    leaves = leaves_on_stages(account, subject)
    single = _opponent(case, WITHOUT_PIPELINE)
    budget = max(stages, key=lambda row: row.peak_bytes / row.budget_bytes).budget_bytes
    steps = case.ran.step_seconds if case.ran is not None else []
    positions = range(len(leaves))
    passages = passage_rows(account, subject.program.in_paths, case.cluster)
    return PipelineExplanation(
        function=case.step.__name__,
        cluster=case.cluster.name,
        hardware=_hardware(case.cluster, plan),
        num_devices=plan.num_devices,
        method=plan.method,
        verdict=pipeline_verdict(plan, stages, account.simulation.step_seconds, single),
        schedule=plan.schedule.value,
        num_microbatches=plan.num_microbatches,
        microbatch_size=(subject.roles.batch_size or 0) // plan.num_microbatches,
        bubble_fraction=bubble_fraction(account.whole.pipeline.order),
        stages=stages,
        passages=passages,
        timeline=timeline_rows(account),
        step_seconds=account.simulation.step_seconds,
        measured_seconds=statistics.median(steps) if steps else None,
        measured_steps=len(steps),
        budget_bytes=budget,
        leaves=leaves,
        parameters=parameters_of(leaves, parameter_groups(leaves), (), positions, plan, case.said[0]),
        methods=tuple(_opponent(case, name) for name in case.step.opponents),
        alternatives=_alternatives(single),
        solver=plan.solver,
        notes=(*shared_host_notes(stages, passages, case.cluster), *_pipeline_notes(case, stages)),
    )


def _alternatives(single: MethodTotals) -> tuple[tuple[str, float], ...]:
    """What the pipeline was held against: the best plan of a single stage."""
    if single.step_seconds is None:
        return ()
    over = "" if single.fits else ", over the memory budget"
    return ((f"the best plan without a pipeline, on mesh {single.mesh}{over}", single.step_seconds),)


def _pipeline_notes(case: _Case, stages: Sequence[StageRow]) -> tuple[str, ...]:
    notes = []
    if case.subject.alone:
        notes.append(f"Each microbatch is treated as a batch of its own, for {case.subject.alone}.")
    if case.subject.coupling:
        notes.append(f"There is one microbatch, because {case.subject.coupling}.")
    if not case.subject.donated or not case.step.demands.donate_state:
        notes.append("No state is donated, so a step holds the old and the new state at once.")
    return (
        *notes,
        *_clock_notes(case),
        *_scatter_notes(case),
        *_remat_notes(case),
        *_residual_notes(case, stages),
        *case.said[1],
    )


def _clock_notes(case: _Case) -> tuple[str, ...]:
    """What to do where the clock says another thing than was foretold of devices that nobody has measured."""
    if case.ran is None or not case.ran.step_seconds or case.cluster.profile is not None:
        return ()
    ratio = statistics.median(case.ran.step_seconds) / case.plan.step_seconds
    if 1 / FAR_FROM_FORETOLD < ratio < FAR_FROM_FORETOLD:
        return ()
    found = f"The step took {ratio:.1f} times what was foretold by figures that are built in."
    return (
        f"{found} `autopar profile` measures the devices, once; steps that are planned after it go by what it found.",
    )


def _scatter_notes(case: _Case) -> tuple[str, ...]:
    """Why a plan has all-to-alls where one looks for reduce-scatters."""
    if all(stage.sum_scatter is SumScatter.COLLECTIVE for stage in case.plan.stages):
        return ()
    text = (
        "Where a sum ends cut into pieces, each device sends pieces to who keeps them (all-to-all) and adds up its own"
    )
    if (network := case.cluster.network) is None:
        return (f"{text}, not by reduce-scatters.",)
    return (f"{text}: between these hosts that was measured to take {network.exchange_ratio:.0%} of a reduce-scatter.",)


def _offload_notes(case: _Case) -> tuple[str, ...]:
    """What lies in the memory of the hosts, what that costs, and why."""
    plan = case.plan
    if not plan.hosted:
        return ()
    names = family_name([slashed(plan.in_paths[position]) for position in plan.hosted])
    text = f"{len(plan.hosted)} arrays of the state ({names}) lie in the memory of the hosts between steps"
    if case.subject.hosting:
        text += f": {case.subject.hosting}"
    memory, seconds = plan.prediction.memory, plan.prediction.host_seconds
    if not memory.host_bytes:
        return (f"{text}. Here that is the memory of the devices, so it saves nothing.",)
    text += f". That keeps {bytes_text(memory.host_bytes)} off each device; copies for the update and back take "
    return (f"{text}{seconds_text(seconds)}, {seconds / plan.step_seconds:.0%} of the step, if nothing hides them.",)


def _residual_notes(case: _Case, stages: Sequence[StageRow]) -> tuple[str, ...]:
    """What of microbatches lies in the memory of the hosts between their passes, on which stages, and what that costs."""
    there = [row for row in stages if row.num_hosted]
    if not there:
        return ()
    text = "Between forward and backward pass of a microbatch these lie in the memory of the hosts"
    if not any(row.host_bytes for row in there):
        arrays = "; ".join(f"of stage {row.number} {row.num_hosted} arrays" for row in there)
        return (f"{text}: {arrays}. Here that is the memory of the devices, so it saves nothing.",)
    parts = [
        f"of stage {row.number} {row.num_hosted} arrays, up to {bytes_text(row.host_bytes)} for each device, copied in "
        f"{seconds_text(row.host_seconds)} a microbatch"
        for row in there
    ]
    asked = "you asked for it" if case.step.demands.offload is Offload.ACTIVATIONS else "memory needs it"
    text += f" ({asked}): {'; '.join(parts)}"
    seconds = seconds_text(case.plan.prediction.host_seconds)
    return (f"{text}. Copies take a mesh {seconds} of its step at most, if nothing hides them.",)


def _remat_notes(case: _Case) -> tuple[str, ...]:
    """What layers compute again, and what that adds to the work."""
    remat = case.plan.remat
    if not remat.is_any:
        return ()
    subject = case.subject
    work, before = (
        sum(operator.flops * trips for operator, trips in one.graph.all_operators())
        for one in (subject, subject.as_written)
    )
    layers = (
        f"Of {len(remat.kinds)} layers, counted along the forward pass, these are computed again in the backward pass"
    )
    return (
        f"{layers}, so that less is kept for it: {remat}. That adds {work / before - 1:.0%} to the FLOPs of a step.",
    )


def _explanation(case: _Case) -> Explanation:
    plan, subject, prediction = case.plan, case.subject, case.plan.prediction
    program = lower(subject.graph, plan.stages[0], plan.out_layouts, subject.hosted_ends)
    fusion = fuse(subject.graph)
    operators = operator_uses(program, fusion, case.place)
    leaves = leaves_of(subject, program, plan.stages[0])
    groups = parameter_groups(leaves)
    whys: tuple[Why, ...] = ()
    if case.found is not None:
        whys = _whys(case, case.found, leaves, groups)
    methods = tuple(_opponent(case, name) for name in case.step.opponents)
    worth = REPEATED_SHARE * prediction.step_seconds
    budget = float(case.step.demands.memory_per_device or case.place.per_device_memory_bytes)
    return Explanation(
        function=case.step.__name__,
        cluster=case.cluster.name,
        hardware=_hardware(case.cluster, plan),
        num_devices=plan.num_devices,
        mesh=plan.mesh,
        method=plan.method,
        verdict=verdict_text(plan, leaves, methods, budget),
        time=_time(prediction),
        memory=_memory(prediction, leaves, budget),
        leaves=leaves,
        parameters=parameters_of(leaves, groups, whys, _inputs_asked_about(case), plan, case.said[0]),
        operators=operators,
        collectives=collective_groups(prediction, program, subject.names),
        methods=methods,
        uncovered=tuple(use for use in operators if not use.covered),
        repeated=tuple(u for u in operators if u.covered and wasted_seconds(u, plan.mesh) >= worth),
        undivided=undivided(leaves, groups, operators, plan.mesh),
        solver=plan.solver,
        measured=_measured(case.ran),
        notes=_notes(case, whys),
    )


def _whys(case: _Case, found: Found, leaves: Sequence[Leaf], groups: Sequence[tuple[int, ...]]) -> tuple[Why, ...]:
    """Answers for the groups in their order; parameters are asked about first, for time may run out."""
    order = sorted(range(len(groups)), key=lambda number: leaves[groups[number][0]].kind is not LeafKind.PARAMETER)
    asked = [groups[number] for number in order]
    answers = dict(zip(order, case.step.runner_ups(case.subject, found, case.place, asked), strict=True))
    return tuple(answers[number] for number in range(len(groups)))


def _inputs_asked_about(case: _Case) -> tuple[int, ...]:
    """Ids of the inputs in the program that the plan was found for."""
    return case.subject.graph.inputs if case.found is None else case.found.program.graph.inputs


def _is_of_other_sizes(case: _Case) -> bool:
    """Whether the plan was found for other sizes than it is used for."""
    if case.found is None:
        return False
    graphs = (case.subject.graph, case.found.program.graph)
    ours, theirs = ([graph.values[value].shape for value in graph.inputs] for graph in graphs)
    return ours != theirs


def _hardware(cluster: Cluster, plan: Plan) -> str:
    hosts = f"{cluster.hosts} host{'s' if cluster.hosts > 1 else ''} × {cluster.devices_per_host}"
    shared = (
        f", {cluster.compute_shared_by} of them sharing one device's compute" if cluster.compute_shared_by > 1 else ""
    )
    kinds = [cluster.kind_of(host).name for host in range(cluster.hosts)]
    if len(cluster.kinds) > 1:
        each = ", ".join(f"{kinds.count(name)} of {name}" for name in dict.fromkeys(kinds))
        hosts, name = f"{hosts} devices", f"({each})"
    else:
        name = cluster.device.name
    linked = ", linked differently" if cluster.host_links else ""
    used = len({device for number in range(len(plan.stages)) for device in plan.devices_of(number)})
    idle = f", {used} of {cluster.num_devices} in use" if used < cluster.num_devices else ""
    return f"{hosts} {name}{shared}{linked}{idle}"


def _time(prediction: Prediction) -> Time:
    return Time(
        prediction.step_seconds,
        prediction.compute_seconds,
        prediction.update_seconds,
        prediction.communication_seconds,
        communication_of(prediction),
        prediction.allocation_seconds,
        prediction.host_seconds,
        prediction.hidden_seconds,
    )


def _memory(prediction: Prediction, leaves: Sequence[Leaf], budget_bytes: float) -> MemoryUse:
    """Arguments by what they are for, results that take over no argument's memory, and temporaries at the peak."""
    memory = prediction.memory
    kinds: Counter[str] = Counter()
    for leaf in leaves:
        if not (leaf.in_host and memory.host_bytes):  # else host and device are one memory
            kinds[leaf.kind.value] += leaf.bytes_per_device
    kinds["new results"] = memory.output_bytes - memory.alias_bytes
    kinds.update(memory.by_kind)
    heaviest = sorted(leaves, key=lambda leaf: -leaf.bytes_per_device)
    return MemoryUse(
        budget_bytes,
        memory.total_bytes,
        memory.argument_bytes,
        memory.output_bytes,
        memory.alias_bytes,
        memory.temp_bytes,
        tuple((kind, size) for kind, size in kinds.most_common() if size > 0),
        memory.largest or tuple((slashed(leaf.path), leaf.bytes_per_device) for leaf in heaviest[:3]),
        memory.host_bytes,
    )


def _opponent(case: _Case, name: str) -> MethodTotals:
    """The totals of a hand-made method; if it is over budget, those of its plan without one."""
    reason = ""
    try:
        _, plan, _ = case.step.records_of(case.subject, cluster=case.cluster, method=name)
    except PlanError as error:
        reason = str(error)
        try:
            _, plan, _ = case.step.records_of(case.subject, cluster=case.cluster, method=name, within_budget=False)
        except PlanError:
            return MethodTotals(name, "", None, None, None, None, fits=False, reason=reason)
    prediction = plan.prediction
    return MethodTotals(
        name,
        str(plan.mesh),
        prediction.step_seconds,
        prediction.compute_seconds,
        prediction.communication_seconds,
        prediction.memory.total_bytes,
        fits=not reason,
        reason=reason,
    )


def _measured(ran: Ran | None) -> Measured | None:
    if ran is None or not ran.step_seconds:
        return None
    account = ran.memory_analysis()
    return Measured(
        len(ran.step_seconds),
        statistics.median(ran.step_seconds),
        account.argument_size_in_bytes,
        account.output_size_in_bytes,
        account.alias_size_in_bytes,
        account.temp_size_in_bytes,
    )


def _notes(case: _Case, whys: tuple[Why, ...]) -> tuple[str, ...]:
    notes = []
    if case.found is None:
        notes.append(
            "This plan was loaded, so the planner's records are not at hand and no runner-ups are given; to see them, "
            "let autopar.explain(train_step, *arguments, method=…) plan again."
        )
    if _is_of_other_sizes(case):
        notes.append("The plan was carried over from other sizes; the runner-ups' seconds are of those.")
    if any(why.answer.value == "no_time" for why in whys):
        notes.append(
            "Runner-ups were looked for from the heaviest parameters on, for some seconds; the others have none."
        )
    if not case.subject.donated or not case.step.demands.donate_state:
        notes.append("No state is donated, so a step holds the old and the new state at once.")
    if (count := case.plan.num_microbatches) > 1:
        size = case.subject.roles.batch_size or 0
        notes.append(
            f"The batch of {size} examples runs as {count} microbatches of {size // count}, one after the other; gradients "
            "are summed on the way and reduced over devices once."
        )
    if case.subject.alone:
        notes.append(f"Each microbatch is treated as a batch of its own, for {case.subject.alone}.")
    if case.subject.coupling:
        notes.append(f"Microbatches would save memory, but {case.subject.coupling}.")
    if case.subject.wishes.wishes:
        notes.append("Shardings in your own code bind the plan, not those of the methods that it is compared with.")
    notes += [*_clock_notes(case), *_scatter_notes(case), *_remat_notes(case), *_offload_notes(case)]
    return (*notes, *case.said[1])
