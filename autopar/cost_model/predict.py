"""What a step will cost: the steps of an SPMD program priced one by one, nothing compiled.

    step seconds = Σ runs (roofline of one device's share) + Σ collectives (α-β over the links that they cross)
                 + copies of operands into the order in which products read them (as measured, where a profile says so)
                 + what memory costs that is new to the call (as measured, where a profile says so)
                 + copies between devices and their hosts (:mod:`autopar.cost_model.hosted`)
                 − what of the collectives is hidden behind work (:mod:`autopar.cost_model.overlap`)

Collectives that the backend combines (:mod:`autopar.cost_model.combine`) pay what they add to those before them.  Where devices
share cores, a profile says how long a collective waits for the last of its group, by the work since the collective before.
Inside one executable on CPU nothing is hidden; on GPUs no more than what XLA is known to hide.  The planner's integer program
(:mod:`autopar.intra_op`) is linear and hides nothing anywhere: a finished plan does, and plans are compared by that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster, Mesh
from autopar.cost_model.arrays import arrays_of
from autopar.cost_model.collectives import Collective, collective_seconds, wire_bytes
from autopar.cost_model.combine import led_by, left_out, levels
from autopar.cost_model.hosted import host_seconds
from autopar.cost_model.kernels import Kernel, kernel_cost
from autopar.cost_model.new_memory import new_memory_seconds
from autopar.cost_model.nodes import Arrays
from autopar.cost_model.overlap import Move, hidden_seconds
from autopar.cost_model.reshard import COLLECTIVE_OF_MOVE, collective_bytes, copy_seconds, move_seconds, outermost_of
from autopar.cost_model.waits import WorkSinceAxes, axes_waiting
from autopar.graph.fusion import Fusion
from autopar.graph.ir import Operator, Phase
from autopar.plan import CollectiveUse, Memory, Prediction
from autopar.schedule.reshard import after_move, local_shape
from autopar.schedule.spmd import Run, SpmdProgram, local_bytes
from autopar.schedule.wire import wire_itemsize_bytes


@dataclass(frozen=True)
class RunCost:
    """Cost of one operator in a step, on one device (all its trips)."""

    operator: Operator
    flops: float
    bytes_moved: float
    seconds: float


@dataclass(frozen=True)
class Priced:
    """What one device does in a step: operators, collectives, and the seconds of these that are hidden behind those."""

    runs: Sequence[RunCost]
    collectives: tuple[CollectiveUse, ...]
    hidden_seconds: float

    @property
    def compute_seconds(self) -> float:
        """Of all operators."""
        return sum(run.seconds for run in self.runs)

    @property
    def update_seconds(self) -> float:
        """Of those of the optimizer."""
        return sum(run.seconds for run in self.runs if run.operator.phase is Phase.UPDATE)

    @property
    def communication_seconds(self) -> float:
        """Of all collectives, hidden or not."""
        return sum(use.seconds for use in self.collectives)

    @property
    def flops(self) -> float:
        """Of all operators."""
        return sum(run.flops for run in self.runs)

    @property
    def bytes_moved(self) -> float:
        """By all operators."""
        return sum(run.bytes_moved for run in self.runs)


def priced(program: SpmdProgram, fusion: Fusion, cluster: Cluster, arrays: Arrays | None = None) -> Priced:
    """The price of a program; ``arrays`` are its own, if they are known already."""
    arrays = arrays or arrays_of(program, (), cluster.device)
    runs = run_costs(program, fusion, cluster, arrays)
    sent = _sent(program, cluster, runs, arrays)
    moved = {move: use for move, use in sent if move is not None}
    work_seconds: dict[int, float] = {}
    for run in runs:
        work_seconds[run.operator.id] = work_seconds.get(run.operator.id, 0.0) + run.seconds
    hidden = hidden_seconds(program, arrays, work_seconds, moved, cluster)
    return Priced(runs, tuple(use for _, use in sent), hidden)


def predict(
    program: SpmdProgram, fusion: Fusion, cluster: Cluster, memory: Memory, arrays: Arrays | None = None
) -> Prediction:
    """Price a program; ``memory`` is what :mod:`autopar.cost_model.memory` says of it, ``arrays`` are its own, if known."""
    price = priced(program, fusion, cluster, arrays)
    outputs = (local_bytes(program, buffer) for buffer in program.outputs if buffer is not None)
    return Prediction(
        compute_seconds=price.compute_seconds,
        communication_seconds=price.communication_seconds,
        update_seconds=price.update_seconds,
        flops=price.flops,
        bytes_moved=price.bytes_moved,
        collectives=price.collectives,
        memory=memory,
        allocation_seconds=new_memory_seconds(outputs, memory.alias_bytes, memory.temp_bytes, cluster),
        host_seconds=host_seconds(program, cluster),
        hidden_seconds=price.hidden_seconds,
    )


def run_costs(program: SpmdProgram, fusion: Fusion, cluster: Cluster, arrays: Arrays | None = None) -> list[RunCost]:
    """The price of every operator that is no loop itself; ``arrays`` are those of the program, if they are known already."""
    found = []
    reordered_seconds = _reordered_seconds(program, cluster, arrays)
    for step, trips in program.all_steps():
        if isinstance(step, Run) and not step.bodies:
            operator = step.operator
            kernel = Kernel(
                operator,
                tuple(None if value is None else program.values[value] for value in operator.operands),
                tuple(program.values[value] for value in operator.results),
                fusion.reads[operator.id],
                fusion.writes(operator),
            )
            cost = kernel_cost(kernel, step.strategy, program.mesh, cluster)
            seconds = cost.seconds + reordered_seconds.get(operator.id, 0.0)
            found.append(RunCost(operator, cost.flops * trips, cost.bytes_moved * trips, seconds * trips))
    return found


def _reordered_seconds(program: SpmdProgram, cluster: Cluster, arrays: Arrays | None) -> dict[int, float]:
    """What each product waits for operands that are copied into the order in which it reads them, as far as that was measured."""
    if cluster.profile is None or (rate := cluster.profile.turned_bytes_per_second) is None:
        return {}
    arrays = arrays or arrays_of(program, (), cluster.device)
    return {
        product: 2 * size_bytes / rate for level in levels(arrays) for product, size_bytes in level.reordered.items()
    }


def collectives_of(
    program: SpmdProgram, cluster: Cluster, runs: Iterable[RunCost], arrays: Arrays | None = None
) -> list[CollectiveUse]:
    """Every collective of a step, in program order; ``arrays`` are those of the program, if they are known already.

    ``runs`` are what :func:`run_costs` says of the program: collectives wait for devices that work.
    """
    arrays = arrays or arrays_of(program, (), cluster.device)
    return [use for _, use in _sent(program, cluster, runs, arrays)]


def _sent(
    program: SpmdProgram, cluster: Cluster, runs: Iterable[RunCost], arrays: Arrays
) -> list[tuple[Move | None, CollectiveUse]]:
    """The same with the move that each collective makes; None: an operator's own."""
    found: list[tuple[Move | None, CollectiveUse]] = []
    mesh = program.mesh
    waits = _Waits(mesh, cluster, runs)
    platform = cluster.device.platform
    leader = led_by(arrays, platform)
    # A combined collective starts when its last operand is there.
    last = {first: move for move, first in leader.items()}
    unsent = left_out(arrays)
    for step, trips in program.all_steps():
        if isinstance(step, Run):
            waits.work(step, trips)
            found.extend((None, use) for use in _extremes(step, program, cluster, trips, waits))
            continue
        value = program.values[step.source.value]
        layout = step.source.layout
        sent_bytes = math.prod(value.shape) * wire_itemsize_bytes(value, cluster.device.platform)
        for place, move in enumerate(step.moves):
            this = step.target, place
            if (kind := COLLECTIVE_OF_MOVE.get(move.kind)) is not None and this not in unsent:
                full = collective_bytes(move, layout, sent_bytes, mesh)
                first = leader.get(this, this)
                joins = first != this
                seconds = move_seconds(move, layout, sent_bytes, mesh, cluster, joins=joins)
                seconds += copy_seconds(move, layout, sent_bytes, mesh, cluster, outermost_of(value.shape))
                seconds += waits.wait(move.axes) if last.get(first, this) == this else 0.0
                wire = wire_bytes(kind, full, mesh.axis_size(*move.axes))
                phase = step.cause.phase if step.cause else Phase.UPDATE
                origin = f"{step.cause.primitive} at {step.cause.source}" if step.cause else "result of the step"
                use = CollectiveUse(
                    kind=kind.value,
                    axes=move.axes,
                    full_bytes=full,
                    count=trips,
                    wire_bytes=wire * trips,
                    seconds=seconds * trips,
                    phase=phase.value,
                    value=value.id,
                    origin=origin,
                )
                found.append((this, use))
            layout = after_move(layout, move, mesh)
    return found


class _Waits:
    """What collectives wait for devices that still work, on the way through a program."""

    def __init__(self, mesh: Mesh, cluster: Cluster, runs: Iterable[RunCost]) -> None:
        self._mesh, self._cluster = mesh, cluster
        self._runs = iter(runs)
        self._since = WorkSinceAxes()

    def work(self, step: Run, trips: int) -> None:
        """An operator of the program; loops are met as what runs in them, once."""
        if not step.bodies:
            self._since.work(next(self._runs).seconds / trips)

    def wait(self, axes: tuple[str, ...]) -> float:
        """Seconds that a collective over these axes waits here."""
        return axes_waiting(axes, self._mesh, self._cluster)(self._since.meet(axes))


def _extremes(step: Run, program: SpmdProgram, cluster: Cluster, trips: int, waits: _Waits) -> list[CollectiveUse]:
    """All-reduces by max or min that belong to an operator itself."""
    mesh = program.mesh
    if not (axes := step.extreme_axes(mesh)):
        return []
    found = []
    for buffer in step.results:
        value = program.values[buffer.value]
        itemsize_bytes = wire_itemsize_bytes(value, cluster.device.platform, extreme=True)
        full = float(itemsize_bytes * math.prod(local_shape(value.shape, buffer.layout, mesh)))
        seconds = collective_seconds(Collective.ALL_REDUCE, full, axes, mesh, cluster)
        seconds += waits.wait(axes)
        wire = wire_bytes(Collective.ALL_REDUCE, full, mesh.axis_size(*axes))
        origin = f"{step.operator.primitive} at {step.operator.source}"
        found.append(
            CollectiveUse(
                Collective.ALL_REDUCE.value,
                axes,
                full,
                trips,
                wire * trips,
                seconds * trips,
                step.operator.phase.value,
                buffer.value,
                origin,
            )
        )
    return found
