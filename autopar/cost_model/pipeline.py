"""What a pipeline will cost: its executables priced one by one, its lists of instructions simulated.

An executable takes Σ runs + Σ collectives − what is hidden of these, as a whole step does
(:mod:`autopar.cost_model.predict`), and where the cluster carries a profile the seconds of a call, of which a step has many,
and of the memory that is new to it; a message takes those of a transfer.  What of messages is hidden, and what waits, is the
simulator's to say, which lets meshes compute side by side and messages travel meanwhile:

What executables copy from and to the memory of the host (:mod:`autopar.schedule.residuals`) is part of their seconds.

    step seconds = when the last instruction of the last list is done
    bytes of a device = its slots at the fullest moment, each as long as its list keeps it, and the running executable's scratch
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster import Cluster, Platform
from autopar.cost_model.arrays import arrays_of
from autopar.cost_model.exchanges import exchange_seconds
from autopar.cost_model.forecast import Forecast
from autopar.cost_model.hosted import has_host_memory, host_seconds
from autopar.cost_model.machine import Load, Machine, make_machine, message_load
from autopar.cost_model.memory import timeline
from autopar.cost_model.predict import priced
from autopar.cost_model.roofline import operator_seconds
from autopar.cost_model.simulate import Simulation, Work, simulate
from autopar.cost_model.transfers import cheapest_transfer, finishing_seconds
from autopar.graph.fusion import Fusion
from autopar.plan import CollectiveUse, Memory, Prediction
from autopar.profile import Dispatch
from autopar.schedule.cross_mesh import CrossMeshTransfer, Placement, move_on_mesh
from autopar.schedule.instructions import ONCE, Free, InstructionList, Part, Run, Slot, Task
from autopar.schedule.pipeline import Pipeline, StageLowering, layouts_of_crossing
from autopar.schedule.reshard import local_shape
from autopar.schedule.residuals import hosted_places
from autopar.schedule.slices import Executable, Scope
from autopar.schedule.spmd import SpmdProgram, local_bytes


@dataclass(frozen=True)
class ExecutableCost:
    """One call of an executable on one device: seconds of compute and of collectives, FLOPs, bytes, scratch bytes."""

    compute_seconds: float
    communication_seconds: float
    update_seconds: float
    flops: float
    bytes_moved: float
    temp_bytes: int
    collectives: tuple[CollectiveUse, ...]
    call_seconds: float = 0.0
    allocation_seconds: float = 0.0
    hidden_seconds: float = 0.0
    host_seconds: float = 0.0
    """Of copies from and to the memory of the host."""

    @property
    def seconds(self) -> float:
        """The call, its new memory, copies from and to the host, compute and collectives, one after the other, less what is
        hidden of the last.
        """
        own = self.compute_seconds + self.communication_seconds - self.hidden_seconds
        return self.call_seconds + self.allocation_seconds + self.host_seconds + own


@dataclass(frozen=True)
class StageCost:
    """The price of every executable of a stage, and the bytes of its arrays on one device."""

    lowering: StageLowering
    executables: Mapping[tuple[Part, int], ExecutableCost]
    in_host: frozenset[int] = frozenset()
    """Numbers of the places that lie in the memory of the host, where that is another one."""

    def seconds(self, part: Part, segment: int = 0) -> float:
        """Seconds of one call; 0 where the stage has no such executable."""
        cost = self.executables.get((part, segment))
        return 0.0 if cost is None else cost.seconds

    def step_seconds(self, count: int) -> float:
        """Seconds of all calls in a step of ``count`` microbatches."""
        return sum(cost.seconds * (count if part.per_microbatch else 1) for (part, _), cost in self.executables.items())

    def host_seconds(self, count: int) -> float:
        """Of those the seconds of copies from and to the memory of the host."""
        costs = self.executables.items()
        return sum(cost.host_seconds * (count if part.per_microbatch else 1) for (part, _), cost in costs)

    @cached_property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes on one device of the array in a place, by the number of the place."""
        return tuple(0 if name in self.in_host else size for name, size in enumerate(self._array_bytes))

    @cached_property
    def host_bytes(self) -> tuple[int, ...]:
        """Bytes in the memory of the host of one device's part of the array in a place, by the number of the place."""
        return tuple(size if name in self.in_host else 0 for name, size in enumerate(self._array_bytes))

    @cached_property
    def _array_bytes(self) -> tuple[int, ...]:
        values, mesh = self.lowering.slices.program.values, self.lowering.stage.mesh
        found = []
        for place in self.lowering.names:
            value = values[place.buffer.value]
            found.append(math.prod(local_shape(value.shape, place.buffer.layout, mesh)) * value.itemsize_bytes)
        return tuple(found)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes on one device of what the stage is given once in a step."""
        names = self.lowering.names
        return sum(
            self.slot_bytes[names[place]] for place in set(self.lowering.slices.inputs) if place.scope is Scope.ONCE
        )


def stage_cost(lowering: StageLowering, fusion: Fusion, cluster: Cluster) -> StageCost:
    """The price of a stage on a cluster of its devices alone."""
    in_host: frozenset[int] = frozenset()
    if has_host_memory(cluster.device.platform):
        in_host = frozenset(lowering.names[place] for place in hosted_places(lowering.slices))
    return StageCost(
        lowering,
        {(one.part, one.segment): executable_cost(one, fusion, cluster) for one in lowering.slices.executables},
        in_host,
    )


def executable_cost(one: Executable, fusion: Fusion, cluster: Cluster) -> ExecutableCost:
    """The price of one executable."""
    program = _as_program(one)
    platform = cluster.device.platform
    arrays = arrays_of(program, one.donations, cluster.device)
    elsewhere = replace(program, hosted=one.hosted)
    price = priced(elsewhere, fusion, cluster, arrays)
    temp_bytes = timeline(arrays, platform).temp_bytes + _bytes_on_device(elsewhere, platform)
    return ExecutableCost(
        compute_seconds=price.compute_seconds,
        communication_seconds=price.communication_seconds,
        update_seconds=price.update_seconds,
        flops=price.flops,
        bytes_moved=price.bytes_moved,
        temp_bytes=temp_bytes,
        collectives=price.collectives,
        call_seconds=_call_seconds(cluster),
        allocation_seconds=_allocation_seconds(one, temp_bytes, cluster),
        hidden_seconds=price.hidden_seconds,
        host_seconds=host_seconds(elsewhere, cluster),
    )


def _bytes_on_device(program: SpmdProgram, platform: Platform) -> int:
    """Bytes on a device of what lies in the memory of the host but while the executable runs."""
    if not has_host_memory(platform):
        return 0
    copied = [program.inputs[k] for k in program.hosted.inputs] + [program.outputs[k] for k in program.hosted.outputs]
    return sum(local_bytes(program, buffer) for buffer in copied if buffer is not None)


def _allocation_seconds(one: Executable, temp_bytes: int, cluster: Cluster) -> float:
    """Seconds of results that take over no argument's memory, and of scratch memory."""
    if cluster.profile is None or (fresh := cluster.profile.fresh) is None:
        return 0.0
    taken_over = {result for _, result in one.donations}
    new = [result.place.buffer for number, result in enumerate(one.results) if number not in taken_over]
    return fresh.seconds((local_bytes(one.program, buffer) for buffer in new), temp_bytes)


def _dispatch(cluster: Cluster) -> Dispatch | None:
    return None if cluster.profile is None else cluster.profile.dispatch


def _call_seconds(cluster: Cluster) -> float:
    """A call was timed with all other devices idle, and seconds of tasks are those with all at work."""
    if (dispatch := _dispatch(cluster)) is None:
        return 0.0
    return dispatch.call_seconds * make_machine(cluster, [range(cluster.num_devices)]).meshes[0].fastest


def _as_program(one: Executable) -> SpmdProgram:
    """The executable as a program of its own that runs once."""
    return replace(
        one.program,
        graph=replace(one.program.graph, trips=1),
        steps=one.steps,
        inputs=tuple(argument.buffer for argument in one.arguments),
        outputs=tuple(result.buffer for result in one.results),
    )


def transfers_of(pipeline: Pipeline, cluster: Cluster) -> dict[int, CrossMeshTransfer]:
    """For every crossing, by number, how its array gets from mesh to mesh, or from layout to layout on one."""
    found = {}
    for crossing in pipeline.crossings:
        ends = layouts_of_crossing(pipeline, crossing)
        places = [
            Placement(buffer.layout, stage.mesh, stage.devices)
            for buffer, stage in zip(
                ends, (pipeline.stages[crossing.source].stage, pipeline.stages[crossing.target].stage), strict=True
            )
        ]
        itemsize_bytes = crossing.size_bytes // max(1, math.prod(crossing.shape))
        if pipeline.stays(crossing):
            found[crossing.number] = move_on_mesh(crossing.shape, itemsize_bytes, places[0], places[1])
        else:
            found[crossing.number] = cheapest_transfer(crossing.shape, itemsize_bytes, places[0], places[1], cluster)
    return found


def simulate_pipeline(
    pipeline: Pipeline,
    costs: Sequence[StageCost],
    transfers: Mapping[int, CrossMeshTransfer],
    cluster: Cluster,
) -> Simulation:
    """One step of a pipeline on a cluster; ``costs`` run parallel to its stages."""
    staying = {crossing.number for crossing in pipeline.crossings if pipeline.stays(crossing)}
    moves = {number: move_seconds(transfers[number], cluster) for number in staying}
    sent = {number: one for number, one in transfers.items() if number not in staying}
    loads = {number: transfer_load(one, cluster) for number, one in sent.items()}
    exchanges = exchange_seconds(pipeline.lists.lists, sent, cluster)

    def slot_bytes(slot: Slot) -> float:
        return costs[slot.stage].slot_bytes[slot.name]

    def task_seconds(task: Task) -> float:
        own = moves[task.segment] if task.part is Part.MOVE else costs[task.stage].seconds(task.part, task.segment)
        return own + exchanges.get(task, 0.0)

    def temporary_bytes(task: Task) -> float:
        return 0.0 if task.part is Part.MOVE else costs[task.stage].executables[task.part, task.segment].temp_bytes

    given: dict[int, list[Slot]] = {}
    for slot in pipeline.lists.given:
        given.setdefault(pipeline.homes[slot.stage], []).append(slot)
    work = Work(task_seconds, loads.__getitem__, slot_bytes, temporary_bytes, given)
    return simulate(pipeline.lists.lists, work, machine_of(pipeline, cluster))


def row_bytes(pipeline: Pipeline, costs: Sequence[StageCost]) -> tuple[float, ...]:
    """Bytes that a device of each mesh is given for every microbatch: rows of the batch, as they lie before the first pass."""
    given = [0.0] * len(pipeline.lists.lists)
    for slot in pipeline.lists.given:
        if slot.microbatch != ONCE:
            given[pipeline.homes[slot.stage]] += costs[slot.stage].slot_bytes[slot.name]
    return tuple(size / pipeline.order.num_microbatches for size in given)


def host_bytes(pipeline: Pipeline, costs: Sequence[StageCost]) -> tuple[int, ...]:
    """The most bytes in the memory of the host for one device of each mesh: what is between a forward and a backward pass."""
    return tuple(_most_hosted(instructions, costs) for instructions in pipeline.lists.lists)


def _most_hosted(instructions: InstructionList, costs: Sequence[StageCost]) -> int:
    now = most = 0
    for instruction in instructions:
        if isinstance(instruction, Run):
            now += sum(costs[slot.stage].host_bytes[slot.name] for slot in instruction.outputs)
            most = max(most, now)
        elif isinstance(instruction, Free):
            now -= sum(costs[slot.stage].host_bytes[slot.name] for slot in instruction.slots)
    return most


def predict_pipeline(costs: Sequence[StageCost], homes: Sequence[int], count: int, said: Forecast) -> Prediction:
    """What is said of a whole step of ``count`` microbatches, from the price of every stage and its mesh.

    Seconds as simulated; work and collectives of the busiest mesh, on one of its devices; bytes of the fullest device; copies and
    bytes in the memory of the host of the mesh that has most of them.
    """
    on_mesh: list[list[StageCost]] = [[] for _ in said.peak_bytes]
    for home, cost in zip(homes, costs, strict=True):
        on_mesh[home].append(cost)
    busiest = max(on_mesh, key=lambda own: sum(cost.step_seconds(count) for cost in own))
    runs = [
        (cost, count if part.per_microbatch else 1) for own in busiest for (part, _), cost in own.executables.items()
    ]
    collectives = [
        replace(use, count=use.count * times, wire_bytes=use.wire_bytes * times, seconds=use.seconds * times)
        for cost, times in runs
        for use in cost.collectives
    ]
    peaks = said.peak_bytes
    fullest = max(range(len(on_mesh)), key=lambda mesh: peaks[mesh])
    state, peak = sum(cost.state_bytes for cost in on_mesh[fullest]), int(peaks[fullest])
    return Prediction(
        compute_seconds=sum(cost.compute_seconds * times for cost, times in runs),
        communication_seconds=sum(cost.communication_seconds * times for cost, times in runs),
        update_seconds=sum(cost.update_seconds * times for cost, times in runs),
        flops=sum(cost.flops * times for cost, times in runs),
        bytes_moved=sum(cost.bytes_moved * times for cost, times in runs),
        collectives=tuple(collectives),
        memory=Memory(
            state,
            state,
            state,
            peak - state,
            {"state": state, "other": peak - state},
            host_bytes=max(said.host_bytes, default=0),
        ),
        simulated_seconds=said.step_seconds,
        allocation_seconds=sum(cost.allocation_seconds * times for cost, times in runs),
        host_seconds=max(sum(cost.host_seconds(count) for cost in own) for own in on_mesh),
        hidden_seconds=sum(cost.hidden_seconds * times for cost, times in runs),
    )


def machine_of(pipeline: Pipeline, cluster: Cluster) -> Machine:
    """The meshes of a pipeline, each on its devices of the cluster."""
    devices: list[tuple[int, ...]] = [()] * len(pipeline.lists.lists)
    for home, lowering in zip(pipeline.homes, pipeline.stages, strict=True):
        devices[home] = lowering.stage.devices
    return make_machine(cluster, devices)


def move_seconds(transfer: CrossMeshTransfer, cluster: Cluster) -> float:
    """Seconds of a value that stays on its mesh: read and written once, and the collectives to the layout that is wanted."""
    local_bytes = max(
        math.prod(local_shape(transfer.shape, layout, transfer.target.mesh)) * transfer.itemsize_bytes
        for layout in (transfer.landing, transfer.target.layout)
    )
    copy_seconds = operator_seconds(0.0, 2.0 * local_bytes, "float32", cluster.part(transfer.target.devices))
    return _call_seconds(cluster) + copy_seconds + finishing_seconds(transfer, cluster)


def transfer_load(transfer: CrossMeshTransfer, cluster: Cluster) -> Load:
    """The load of a message; its calls, and what finishes it on the target mesh, delay it like latency.

    What messages between processes cost their ends is in :mod:`autopar.cost_model.exchanges`.
    """
    load = message_load(((tile.sender, tile.receiver, transfer.tile_bytes) for tile in transfer.tiles), cluster)
    latency_seconds = load.latency_seconds + finishing_seconds(transfer, cluster)
    if (dispatch := _dispatch(cluster)) is not None:
        latency_seconds += 0.0 if cluster.meshes_are_processes else dispatch.message_seconds
        latency_seconds += dispatch.call_seconds if transfer.moves else 0.0
    return replace(load, latency_seconds=latency_seconds)
