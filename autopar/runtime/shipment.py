"""What is each mesh told once, so that it can run its part of every step?  The driver's side of the wire.

A mesh in another process needs no jaxpr and no plan.  It gets, as plain data,

    programs       one exported StableHLO module for each executable of its stages, traced over an abstract mesh
    instructions   its static list (:mod:`autopar.schedule.instructions`)
    transfers      the arrays that it sends and receives, tile by tile
    entries        where the leaves of the step go
    results        where the outputs of the step come from

The modules are public, versioned bytes (``jax.export``); they name no device.  A plan on one mesh is the same with one
program and one instruction.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh, AxisType

from autopar import _compat
from autopar.cluster import Mesh, Platform
from autopar.errors import TraceError
from autopar.graph.build import avals_of
from autopar.graph.ir import Graph
from autopar.graph.tracing import TracedProgram
from autopar.plan import Layout
from autopar.runtime.executor import jitted_step
from autopar.runtime.interpreter import Key
from autopar.runtime.stage_executable import jitted_move, jitted_part, moves_of, stored_sharding
from autopar.runtime.transport import Message
from autopar.schedule.cross_mesh import CrossMeshTransfer
from autopar.schedule.host_calls import HOST_CALLS
from autopar.schedule.instructions import ONCE, Instruction, Part, Run, Send, Slot, Task
from autopar.schedule.pipeline import Pipeline
from autopar.schedule.spmd import NOTHING_HOSTED, Hosted, SpmdProgram

WHOLE = 0
"""The number of the one stage of a plan that is no pipeline."""


@dataclass(frozen=True)
class Program:
    """One executable as it travels: ``serialized`` is an exported module of ``jax.export``."""

    key: Key
    serialized: bytes = field(repr=False)
    in_layouts: tuple[Layout, ...]
    out_layouts: tuple[Layout, ...]
    donated: tuple[int, ...]
    saves_memory: bool = False
    hosted: Hosted = NOTHING_HOSTED


@dataclass(frozen=True)
class Entry:
    """Where a leaf of the step goes: ``slot``, in ``layout`` on the mesh of the slot's stage.

    ``row`` is the microbatch of a batch leaf (N, B/N, …), of which ``shape`` is that of one row; -1: the whole leaf.
    """

    slot: Slot
    position: int
    shape: tuple[int, ...]
    layout: Layout
    is_donated: bool = False
    row: int = -1


@dataclass(frozen=True)
class Wire:
    """One transfer and the type of what it carries: NumPy's name, or JAX's of a typed key.

    With ``is_donated`` a program of the sender takes the memory of what was sent over, perhaps before it has left.
    """

    number: int
    transfer: CrossMeshTransfer
    dtype: str
    is_donated: bool = False

    @property
    def once(self) -> Message:
        """The message of a wire that carries one in a step."""
        return Message(self.number, ONCE)


@dataclass(frozen=True)
class MeshShipment:
    """All that one mesh is told; ``stages`` are the logical mesh and the cluster's device ids of each of its stages."""

    mesh: int
    stages: Mapping[int, tuple[Mesh, tuple[int, ...]]]
    programs: tuple[Program, ...]
    instructions: tuple[Instruction, ...]
    entries: tuple[Entry, ...]
    counted: tuple[tuple[Slot, Layout], ...]
    """Slots that hold the number of their microbatch."""
    outgoing: tuple[Wire, ...]
    incoming: tuple[Wire, ...]
    results: tuple[Slot, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """The cluster's devices of this mesh, in order: device k of the mesh's own world is the k-th of them."""
        return tuple(sorted({device for _, devices in self.stages.values() for device in devices}))

    def digest(self) -> str:
        """A name for the content: equal programs and lists have equal names."""
        told = hashlib.blake2b(digest_size=16)
        for program in self.programs:
            told.update(program.serialized)
        told.update(
            repr(
                (self.stages, self.instructions, self.counted, self.outgoing, self.incoming, self.entries, self.results)
            ).encode()
        )
        return told.hexdigest()


@dataclass(frozen=True)
class Output:
    """Where an output of the step lies: ``result`` of a ``mesh``; or it is the same in every step (``literal``)."""

    aval: Any
    layout: Layout
    mesh: int = 0
    stage: int = WHOLE
    result: int = -1
    literal: Any = None


@dataclass(frozen=True)
class Shipments:
    """What all meshes are told, and where the outputs of the step will lie."""

    meshes: tuple[MeshShipment, ...]
    outputs: tuple[Output, ...]


def abstract_mesh(mesh: Mesh) -> AbstractMesh:
    """The mesh without devices."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


KERNELS = ("__gpu$xla.gpu.triton", "mosaic_gpu", "mosaic_gpu_v2", "tpu_custom_call")
"""Custom calls of Pallas.  The hosts run the driver's version of JAX, so they have them, whatever JAX promises of others."""

_CUSTOM_CALL = re.compile(r"custom_call @(\S+?)\(")
_FOREIGN = "ffi_call"


def refuse_what_cannot_travel(graph: Graph) -> None:
    """Raise ``TraceError`` for a call of the host, or of a kernel that the user has registered, naming the line that makes it."""
    for operator, _ in graph.all_operators():
        if operator.equation.primitive.name == _FOREIGN:
            file, line = _compat.user_source(operator.equation)
            raise _unknown_kernel(operator.equation.params["target_name"], f" at {file}:{line}")
        if operator.equation.primitive.name in HOST_CALLS:
            file, line = _compat.user_source(operator.equation)
            raise TraceError(
                f"{operator.equation.primitive.name} at {file}:{line} calls Python on the host, and on a Ray cluster the "
                "step runs in other processes, where that function is not. Return the value from the step and print or "
                "use it in the driver, or run on Cluster.local()"
            )


# -------------------------------------------------------------------------------------------------------- one mesh


def ship_step(
    program: SpmdProgram, traced: TracedProgram, donated: frozenset[int], platform: Platform, devices: tuple[int, ...]
) -> Shipments:
    """A step on one mesh; slot k of its only stage is leaf k, and the results come behind.

    ``devices`` are the cluster's, row-major on the mesh.
    """
    avals, out_avals = traced.in_avals, traced.out_avals
    refuse_what_cannot_travel(program.graph)
    abstract = abstract_mesh(program.mesh)
    step = jitted_step(program, abstract, donated)
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=stored_sharding(layout, abstract))
        for aval, layout in zip(avals, step.in_layouts, strict=True)
    ]
    task = Task(Part.FORWARD, WHOLE)
    inputs = tuple(Slot(WHOLE, number) for number in range(len(avals)))
    results = tuple(Slot(WHOLE, len(avals) + number) for number in range(len(out_avals)))
    exported = _exported(step.function, arguments, abstract, platform)
    sent = Program(
        (WHOLE, task.part, 0), exported, step.in_layouts, step.out_layouts, tuple(sorted(donated)), step.saves_memory
    )
    shipped = MeshShipment(
        mesh=0,
        stages={WHOLE: (program.mesh, devices)},
        programs=(sent,),
        instructions=(Run(task, inputs, results, tuple(sorted(donated))),),
        entries=tuple(
            Entry(slot, position, tuple(aval.shape), layout, position in donated)
            for position, (slot, aval, layout) in enumerate(zip(inputs, avals, step.in_layouts, strict=True))
        ),
        counted=(),
        outgoing=(),
        incoming=(),
        results=results,
    )
    outputs = tuple(
        Output(aval, layout, result=number)
        for number, (aval, layout) in enumerate(zip(out_avals, step.out_layouts, strict=True))
    )
    return Shipments((shipped,), outputs)


def _exported(function: Any, arguments: Sequence[Any], mesh: AbstractMesh, platform: Platform) -> bytes:
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in KERNELS]
    with jax.disable_jit(False), jax.sharding.use_abstract_mesh(mesh):
        try:
            exported = export.export(function, platforms=[platform.value], disabled_checks=checks)(*arguments)
        except ValueError as error:
            if (found := _CUSTOM_CALL.search(str(error))) is None:
                raise
            raise _unknown_kernel(found[1], "") from error
        return bytes(exported.serialize())


def _unknown_kernel(target: str, where: str) -> TraceError:
    return TraceError(
        f"the custom call {target!r}{where} is none that the hosts are known to have: those of JAX itself and of Pallas are. "
        "Write it with these, or run the step in one process"
    )


# ------------------------------------------------------------------------------------------------------- a pipeline


def ship_pipeline(
    pipeline: Pipeline,
    transfers: Mapping[int, CrossMeshTransfer],
    platform: Platform,
    report_progress: Callable[[str], None] = lambda message: None,
) -> Shipments:
    """A pipeline, mesh by mesh; ``transfers`` are by the number of their crossing."""
    for lowering in pipeline.stages:
        refuse_what_cannot_travel(lowering.graph)
    moves = list(_moves(pipeline, transfers, platform))
    without = shipped_without_programs(pipeline, transfers)
    meshes = []
    for mesh in without.meshes:
        programs: list[Program] = []
        for stage in mesh.stages:
            report_progress(f"exporting stage {stage + 1} of {len(pipeline.stages)}")
            programs += _programs(pipeline, stage, platform)
            programs += [one for one in moves if one.key[0] == stage]
        meshes.append(replace(mesh, programs=tuple(programs)))
    return Shipments(tuple(meshes), without.outputs)


def shipped_without_programs(pipeline: Pipeline, transfers: Mapping[int, CrossMeshTransfer]) -> Shipments:
    """All but the programs: for who makes these where they run."""
    places = list(_outputs(pipeline))
    homes = dict(enumerate(pipeline.homes))
    donated = _sent_and_donated(pipeline)
    sent = [one for one in pipeline.crossings if not pipeline.stays(one)]
    wires = [Wire(one.number, transfers[one.number], one.dtype, one.number in donated) for one in sent]
    ends = [(homes[one.source], homes[one.target]) for one in sent]
    meshes = []
    for number, instructions in enumerate(pipeline.lists.lists):
        stages = [stage for stage, home in homes.items() if home == number]
        meshes.append(
            MeshShipment(
                mesh=number,
                stages={stage: (pipeline.stages[stage].stage.mesh, _devices(pipeline, stage)) for stage in stages},
                programs=(),
                instructions=tuple(instructions),
                entries=tuple(entry for stage in stages for entry in _entries(pipeline, stage)),
                counted=tuple(pair for stage in stages for pair in _counted(pipeline, stage)),
                outgoing=tuple(wire for wire, (source, _) in zip(wires, ends, strict=True) if source == number),
                incoming=tuple(wire for wire, (_, target) in zip(wires, ends, strict=True) if target == number),
                results=tuple(slot for _, slot in places if slot is not None and homes[slot.stage] == number),
            )
        )
    outputs = []
    for output, slot in places:
        if slot is None:
            outputs.append(output)
        else:
            result = meshes[output.mesh].results.index(slot)
            outputs.append(Output(output.aval, output.layout, output.mesh, slot.stage, result))
    return Shipments(tuple(meshes), tuple(outputs))


def _sent_and_donated(pipeline: Pipeline) -> set[int]:
    """Transfers of which a source is donated on its own mesh."""
    found: set[int] = set()
    for instructions in pipeline.lists.lists:
        runs = [one for one in instructions if isinstance(one, Run)]
        given_away = {run.inputs[position] for run in runs for position in run.donated}
        sends = [one for one in instructions if isinstance(one, Send)]
        found.update(one.transfer for one in sends if one.source in given_away)
    return found


def _devices(pipeline: Pipeline, stage: int) -> tuple[int, ...]:
    placed = pipeline.stages[stage].stage
    return placed.devices or tuple(range(placed.mesh.size))


def _programs(pipeline: Pipeline, stage: int, platform: Platform) -> Iterator[Program]:
    lowering, count = pipeline.stages[stage], pipeline.order.num_microbatches
    avals, abstract = avals_of(lowering.graph), abstract_mesh(lowering.stage.mesh)
    for one in lowering.slices.executables:
        part = jitted_part(one, abstract, count, avals)
        exported = _exported(part.function, part.arguments, abstract, platform)
        key = stage, one.part, one.segment
        yield Program(key, exported, part.in_layouts, part.out_layouts, part.donated, part.saves_memory, part.hosted)


def _moves(pipeline: Pipeline, transfers: Mapping[int, CrossMeshTransfer], platform: Platform) -> Iterator[Program]:
    """What hands values on between stages on one mesh."""
    for crossing, aval in moves_of(pipeline):
        abstract = abstract_mesh(pipeline.stages[crossing.source].stage.mesh)
        part = jitted_move(transfers[crossing.number], abstract, aval)
        key = crossing.source, Part.MOVE, crossing.number
        yield Program(
            key, _exported(part.function, part.arguments, abstract, platform), part.in_layouts, part.out_layouts, ()
        )


def _entries(pipeline: Pipeline, stage: int) -> Iterator[Entry]:
    """What the caller gives to a stage, slot by slot; rows of batch leaves microbatch by microbatch."""
    lowering = pipeline.stages[stage]
    names, slices, avals = lowering.names, lowering.slices, avals_of(lowering.graph)
    donated = {one.arguments[position].place for one in slices.executables for position in one.donated}
    for end, place in zip(lowering.program.inputs, slices.inputs, strict=True):
        slot = Slot(stage, names[place])
        if end.crossing is None and slot in pipeline.lists.given:
            shape = tuple(avals[place.buffer.value].shape)
            yield Entry(slot, end.position, shape, place.buffer.layout, place in donated)
    for source, place in slices.rows:
        if source is not None:
            position, shape = lowering.program.inputs[source].position, tuple(avals[place.buffer.value].shape)
            for row in range(pipeline.order.num_microbatches):
                yield Entry(Slot(stage, names[place], row), position, shape, place.buffer.layout, row=row)


def _counted(pipeline: Pipeline, stage: int) -> Iterator[tuple[Slot, Layout]]:
    lowering = pipeline.stages[stage]
    for source, place in lowering.slices.rows:
        if source is None:
            for row in range(pipeline.order.num_microbatches):
                yield Slot(stage, lowering.names[place], row), place.buffer.layout


def _outputs(pipeline: Pipeline) -> Iterator[tuple[Output, Slot | None]]:
    """The outputs of the step in their order, each with the slot that holds it at the end."""
    found: dict[int, tuple[Output, Slot | None]] = {}
    for stage, lowering in enumerate(pipeline.stages):
        mesh = pipeline.homes[stage]
        atoms = _compat.jaxpr_of(lowering.graph.jaxpr).outvars
        for end, place, atom in zip(lowering.program.outputs, lowering.slices.outputs, atoms, strict=True):
            if end.crossing is not None:
                continue
            if place is None:
                found[end.position] = Output(atom.aval, Layout(()), literal=atom.val), None
            else:
                slot = pipeline.lists.kept[stage, lowering.names[place]][0]
                found[end.position] = Output(atom.aval, place.buffer.layout, mesh, stage), slot
    return (found[position] for position in sorted(found))
