"""From a planned and simulated pipeline to the rows of its explanation: stages, passages, timeline, leaves."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.cost_model.pipeline import host_bytes
from autopar.cost_model.transfers import Direction, Level, link_loads, transfer_seconds
from autopar.explain.data import Leaf
from autopar.explain.layouts import kinds_of_inputs, layouts_in_use, leaf_at
from autopar.explain.pipeline import PassageRow, Sent, Span, StageRow, TimelineRow, Work
from autopar.explain.words import seconds_text
from autopar.plan import Layout, Stage
from autopar.schedule.instructions import Part
from autopar.schedule.orders import in_flight
from autopar.schedule.pipeline import Pipeline
from autopar.schedule.stage_program import Crossing, Passing
from autopar.wording import array_text, bytes_text, source_text

if TYPE_CHECKING:
    from autopar.cluster import Cluster
    from autopar.graph.ir import Operator
    from autopar.inter_op.account import PipelineAccount
    from autopar.subjects import Subjected

_WORK = {
    Part.BEFORE: Work.ONCE,
    Part.FORWARD: Work.FORWARD,
    Part.BACKWARD: Work.BACKWARD,
    Part.WEIGHT: Work.WEIGHT,
    Part.AFTER: Work.ONCE,
    Part.MOVE: Work.MOVE,
}

MOST_SHARED = 2
"""Of so many pairs of stages it is said that they lie on one host."""

# ---------------------------------------------------------------------------------------------------------------- stages


def stage_rows(
    account: PipelineAccount, cluster: Cluster, memory_per_device: float | None, shares: Sequence[int]
) -> tuple[StageRow, ...]:
    """One row for every stage, in order; ``memory_per_device`` is the user's budget, if any, ``shares`` the plan's."""
    pipeline, simulation = account.whole.pipeline, account.simulation
    order = pipeline.order
    seconds: dict[tuple[int, Part], float] = defaultdict(float)
    for event in simulation.tasks:
        seconds[event.task.stage, event.task.part] += event.end_seconds - event.start_seconds
    hosted = host_bytes(pipeline, account.costs)
    rows = []
    for number, (lowering, cost) in enumerate(zip(pipeline.stages, account.costs, strict=True)):
        mesh, operators = pipeline.homes[number], account.forward[number]
        place = cluster.part(lowering.stage.devices)
        share = shares[number] if shares else 0
        trips = share or order.num_microbatches
        rows.append(
            StageRow(
                number=number + 1,
                devices=lowering.stage.devices,
                mesh=lowering.stage.mesh,
                axes_in_use=_axes_in_use(lowering.stage),
                first=place_text(operators[0]) if operators else "",
                last=place_text(operators[-1]) if operators else "",
                num_operators=len(operators),
                forward_seconds=seconds[number, Part.FORWARD] / trips,
                backward_seconds=seconds[number, Part.BACKWARD] / trips,
                weight_seconds=seconds[number, Part.WEIGHT] / trips,
                before_seconds=seconds[number, Part.BEFORE],
                update_seconds=seconds[number, Part.AFTER],
                busy_fraction=simulation.busy_fractions[mesh],
                in_flight=in_flight(order, number),
                state_bytes=cost.state_bytes,
                peak_bytes=int(simulation.peak_bytes[mesh]),
                budget_bytes=float(memory_per_device or place.per_device_memory_bytes),
                kind=place.device.name if cluster.host_devices else "",
                num_hosted=len(lowering.stage.hosted),
                host_bytes=hosted[mesh],
                host_seconds=sum(one.host_seconds for one in cost.executables.values()),
                share=share,
            )
        )
    return tuple(rows)


def _axes_in_use(stage: Stage) -> tuple[str, ...]:
    used = {axis for layout in stage.homes.values() for axis in layout.axes}
    used |= {axis for strategy in stage.strategies.values() for axes in strategy.factors for axis in axes}
    return tuple(name for name in stage.mesh.axis_names if name in used)


def place_text(operator: Operator) -> str:
    """The user's module path with file and line; without a module the line alone."""
    line = source_text(str(operator.source))
    path = module_path(operator.source.path)
    return f"{path} ({line})" if path else line


def module_path(names: str) -> str:
    """``GPT/layer0/norm1`` of the names stack ``transpose(jvp(GPT))/layer0/norm1``: modules without transformations."""
    parts = (re.sub(r"^(\w+\()*|\)*$", "", part) for part in names.split("/"))
    return "/".join(part for part in parts if part)


# -------------------------------------------------------------------------------------------------------------- passages


def passage_rows(account: PipelineAccount, paths: Sequence[str], cluster: Cluster) -> tuple[PassageRow, ...]:
    """What crosses between stages, by source and target; ``paths`` are those of the step's inputs."""
    whole, count = account.whole, account.whole.pipeline.order.num_microbatches
    between: dict[tuple[int, int], list[Crossing]] = defaultdict(list)
    for crossing in whole.pipeline.crossings:
        between[crossing.source, crossing.target].append(crossing)
    rows = []
    for (source, target), crossings in sorted(between.items()):
        micro = [one for one in crossings if one.passing is Passing.MICRO]
        each = sum(one.size_bytes for one in micro)
        once = sum(one.size_bytes for one in crossings if one.passing is not Passing.MICRO)
        levels: set[Level] = set()
        link_bytes = 0
        for one in crossings:
            loads = link_loads(whole.transfers[one.number], cluster)
            levels |= {port.level for port in loads}
            out = sum(size for port, size in loads.items() if port.direction is Direction.OUT)
            link_bytes += out * (count if one.passing is Passing.MICRO else 1)
        rows.append(
            PassageRow(
                source=source + 1,
                target=target + 1,
                link=_level_text(levels),
                bytes_per_microbatch=each,
                bytes_per_step=each * count + once,
                link_bytes=link_bytes,
                seconds_per_microbatch=sum(transfer_seconds(whole.transfers[one.number], cluster) for one in micro),
                sent=_sent(whole.pipeline, crossings, paths),
            )
        )
    return tuple(rows)


def _level_text(levels: set[Level]) -> str:
    if Level.NETWORK in levels:
        return "network between hosts"
    return "links inside a host" if levels else "none"


def _sent(pipeline: Pipeline, crossings: Sequence[Crossing], paths: Sequence[str]) -> tuple[Sent, ...]:
    rows = []
    for crossing in crossings:
        what, source = array_text(crossing.shape, crossing.dtype), ""
        if crossing.passing is Passing.START:
            what = f"{paths[crossing.leaf]} {what}"
        elif (maker := _maker(pipeline, crossing)) is not None:
            what, source = f"{what} of {maker.primitive}", place_text(maker)
        rows.append(Sent(what, source, crossing.size_bytes, crossing.passing is Passing.MICRO))
    return tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.what)))


def _maker(pipeline: Pipeline, crossing: Crossing) -> Operator | None:
    """The operator on the source stage that makes what crosses."""
    source = pipeline.stages[crossing.source]
    value = source.output_place(crossing).buffer.value
    return next((operator for operator, _ in source.graph.all_operators() if value in operator.results), None)


def shared_host_notes(stages: Sequence[StageRow], passages: Sequence[PassageRow], cluster: Cluster) -> tuple[str, ...]:
    """Why stages do not follow each other along the hosts, where they do not: which of them are far apart, on one host."""
    per_host = cluster.devices_per_host
    hosts = [row.devices[0] // per_host for row in stages]
    if hosts == sorted(hosts) or len({row.devices for row in stages}) < len(stages):
        return ()
    sent_bytes: Counter[tuple[int, int]] = Counter()
    for row in passages:
        first, second = sorted((row.source, row.target))
        if second - first > 1 and hosts[first - 1] == hosts[second - 1]:
            sent_bytes[first, second] += row.bytes_per_step
    texts = []
    for (first, second), size_bytes in sent_bytes.most_common(MOST_SHARED):
        seconds = seconds_text(size_bytes / cluster.network_link.bytes_per_second)
        texts.append(
            f"Stages {first} and {second} lie on one host: the {bytes_text(size_bytes)} that they send each other in a step "
            f"would take {seconds} between hosts."
        )
    return tuple(texts)


# -------------------------------------------------------------------------------------------------------------- timeline


def timeline_rows(account: PipelineAccount) -> tuple[TimelineRow, ...]:
    """What every mesh does when."""
    spans: list[list[Span]] = [[] for _ in account.simulation.busy_seconds]
    stages: list[set[int]] = [set() for _ in spans]
    for event in account.simulation.tasks:
        task = event.task
        microbatch = task.microbatch + 1
        span = Span(_WORK[task.part], task.stage + 1, microbatch, event.start_seconds, event.end_seconds)
        spans[event.mesh].append(span)
        stages[event.mesh].add(task.stage + 1)
    return tuple(
        TimelineRow(tuple(sorted(here)), tuple(sorted(row, key=lambda span: span.start_seconds)))
        for here, row in zip(stages, spans, strict=True)
    )


# ---------------------------------------------------------------------------------------------------------------- leaves


def leaves_on_stages(account: PipelineAccount, subject: Subjected) -> tuple[Leaf, ...]:
    """Every input of the step, in order; its layout is that on the first stage that holds it, what no stage reads is whole."""
    kinds, paths = kinds_of_inputs(subject), subject.program.in_paths
    stages: dict[int, list[int]] = defaultdict(list)
    found: dict[int, Leaf] = {}
    for number, lowering in enumerate(account.whole.pipeline.stages, start=1):
        program = lowering.slices.program
        used = layouts_in_use(program)
        for value, end in zip(lowering.graph.inputs, lowering.program.inputs, strict=True):
            if end.crossing is None:
                position = end.position
                stages[position].append(number)
                if position not in found:
                    found[position] = leaf_at(value, paths[position], kinds[position], program, lowering.stage, used)
    for position, value_id in enumerate(subject.graph.inputs):
        if position not in found:
            array = subject.graph.values[value_id]
            whole = Layout(((),) * len(array.shape))
            found[position] = Leaf(
                paths[position], kinds[position], array.shape, array.dtype, whole, None, array.size_bytes, 0
            )
    return tuple(found[position].on_stages(stages[position]) for position in range(len(paths)))
