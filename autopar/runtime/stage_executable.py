"""One part of a stage, compiled: some steps of its list become one XLA executable over the stage's devices.

It runs inside one ``jax.shard_map``, manual over all axes, as a whole step does.  An array that is a partial sum crosses from
one executable to another with a leading dimension of one entry per summand, cut over the axes that it is partial over:

    x = Σᵢ xᵢ on axes of size n       ⇒       array of shape (n, …), of which device i holds row i

which is an ordinary sharding; no sum is taken on the way.

What lies in the memory of the host between the passes of a microbatch is copied by the executables themselves: to the device
before the first step that reads it, to the host after the last.  Where in between is the compiler's choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.cluster import Mesh
from autopar.graph.build import avals_of
from autopar.plan import Layout
from autopar.runtime.collectives import apply_moves
from autopar.runtime.executor import HOST_MEMORY, partition_spec
from autopar.runtime.interpret import run_steps
from autopar.runtime.interpreter import Key
from autopar.runtime.xla_options import compiled
from autopar.schedule.cross_mesh import CrossMeshTransfer
from autopar.schedule.instructions import Part
from autopar.schedule.pipeline import Pipeline
from autopar.schedule.slices import Argument, Executable, Result
from autopar.schedule.spmd import NOTHING_HOSTED, Buffer, Hosted, rematerialises
from autopar.schedule.stage_program import Crossing


def stored_sharding(layout: Layout, mesh: Any) -> NamedSharding:
    """How an array in a layout is stored between executables, on the devices; the mesh may be an abstract one."""
    return NamedSharding(mesh, stored_spec(layout))


def stored_shardings(layouts: Sequence[Layout], mesh: Any, hosted: Collection[int]) -> tuple[NamedSharding, ...]:
    """The same for several, of which those at the positions ``hosted`` are stored in the memory of the host."""
    return tuple(
        NamedSharding(mesh, stored_spec(layout), memory_kind=HOST_MEMORY if position in hosted else None)
        for position, layout in enumerate(layouts)
    )


def stored_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape in which an array is stored between executables (see the module docstring)."""
    return (mesh.axis_size(*layout.partial), *shape) if layout.partial else shape


def stored_spec(layout: Layout) -> PartitionSpec:
    """The PartitionSpec of an array as it is stored between executables."""
    spec = partition_spec(layout)
    return PartitionSpec(layout.partial, *spec) if layout.partial else spec


@dataclass(frozen=True)
class JittedPart:
    """One part of a stage as a function of ``jax.jit`` over a mesh, which may be an abstract one."""

    function: Any
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    """What a call is given, with shardings."""
    in_layouts: tuple[Layout, ...]
    out_layouts: tuple[Layout, ...]
    donated: tuple[int, ...]
    """Positions of arguments whose memory results take over."""
    saves_memory: bool = False
    """Whether it was made what it is to need less memory: it does work again, or has arrays in the memory of the host."""
    hosted: Hosted = NOTHING_HOSTED
    """Which of the arguments and results lie there."""


def jitted_part(executable: Executable, mesh: Any, count: int, avals: Mapping[int, Any]) -> JittedPart:
    """The function of a part; a stacked argument is ``count`` arguments, one per microbatch.

    ``avals`` are the abstract arrays of the stage's values.
    """
    flat: list[Argument] = []
    in_host: set[int] = set()
    for position, argument in enumerate(executable.arguments):
        often = count if argument.is_stacked else 1
        if position in executable.hosted.inputs:
            in_host.update(range(len(flat), len(flat) + often))
        flat += [argument] * often
    hosted = Hosted(frozenset(in_host), executable.hosted.outputs)
    layouts = tuple(argument.place.buffer.layout for argument in flat)
    shardings = stored_shardings(layouts, mesh, hosted.inputs)
    out_layouts = tuple(result.place.buffer.layout for result in executable.results)
    donated = _donated(executable, count)
    local = jax.shard_map(
        partial(_run_local, executable, count),
        mesh=mesh,
        in_specs=tuple(map(stored_spec, layouts)),
        out_specs=tuple(map(stored_spec, out_layouts)),
        check_vma=False,
    )
    jitted = jax.jit(
        local,
        in_shardings=shardings,
        out_shardings=stored_shardings(out_layouts, mesh, hosted.outputs),
        donate_argnums=donated,
        keep_unused=True,
    )
    arguments = []
    for argument, layout, sharding in zip(flat, layouts, shardings, strict=True):
        aval = avals[argument.place.buffer.value]
        shape = stored_shape(aval.shape, layout, executable.program.mesh)
        arguments.append(jax.ShapeDtypeStruct(shape, aval.dtype, sharding=sharding))
    saves_memory = rematerialises(executable.steps) or hosted.is_any
    return JittedPart(jitted, tuple(arguments), layouts, out_layouts, donated, saves_memory, hosted)


def jitted_move(transfer: CrossMeshTransfer, mesh: Any, aval: Any) -> JittedPart:
    """The function that hands an array on to another stage on its mesh: a new array, in the layout that is wanted there."""
    layouts = (transfer.source.layout, transfer.target.layout)
    specs = tuple(map(stored_spec, layouts))

    def local(piece: Any) -> tuple[Any, ...]:
        return (apply_moves(piece, transfer.moves, transfer.target.mesh),)

    shardings = tuple(stored_sharding(layout, mesh) for layout in layouts)
    jitted = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=(specs[1],), check_vma=False),
        in_shardings=shardings[0],
        out_shardings=(shardings[1],),
        keep_unused=True,
    )
    argument = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=shardings[0])
    return JittedPart(jitted, (argument,), layouts[:1], layouts[1:], ())


def moves_of(pipeline: Pipeline) -> Iterator[tuple[Crossing, Any]]:
    """The values that pass between stages on one mesh, each with its abstract array (of one microbatch, if it is of one)."""
    for crossing in pipeline.crossings:
        if pipeline.stays(crossing):
            source = pipeline.stages[crossing.source]
            yield crossing, avals_of(source.graph)[source.output_place(crossing).buffer.value]


class PartExecutable:
    """Owns one compiled part of a stage, wherever it was traced; calls are asynchronous, as every JAX call."""

    def __init__(self, compiled: Any) -> None:
        """``compiled`` is what ``jax.stages.Lowered.compile`` gives."""
        self._compiled = compiled

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Run; a stacked argument is given as one array per microbatch."""
        return list(self._compiled(*arrays))

    def as_text(self) -> str:
        """The optimized HLO."""
        return str(self._compiled.as_text())

    def memory_analysis(self) -> Any:
        """XLA's own account of bytes on one device."""
        return self._compiled.memory_analysis()


class StageExecutable(PartExecutable):
    """A part that is traced and compiled for the devices of this process."""

    def __init__(self, part: JittedPart, mesh: jax.sharding.Mesh) -> None:
        """``mesh`` is the one for which the part was jitted."""
        self.arguments = part.arguments
        self.donated = part.donated
        started = time.monotonic()
        with jax.disable_jit(False), jax.set_mesh(mesh):
            lowered = part.function.lower(*part.arguments)
            super().__init__(compiled(lowered, mesh, saves_memory=part.saves_memory))
        self.compile_seconds = time.monotonic() - started


def titled(texts: Iterable[tuple[Key, str]]) -> str:
    """The optimized HLO of executables, one after the other, each under a line that names it."""
    return "\n".join(f"// stage {stage}, {part.value} {segment}\n{text}" for (stage, part, segment), text in texts)


def compiled_stage(
    pipeline: Pipeline,
    stage: int,
    mesh: jax.sharding.Mesh,
    transfers: Mapping[int, CrossMeshTransfer],
    report_progress: Callable[[str], None] = lambda message: None,
) -> dict[Key, StageExecutable]:
    """All executables of a stage over the devices of its mesh, and what hands its values on to others on that mesh."""
    lowering, count = pipeline.stages[stage], pipeline.order.num_microbatches
    avals = avals_of(lowering.graph)
    found: dict[Key, StageExecutable] = {}
    for one in lowering.slices.executables:
        report_progress(f"compiling stage {stage + 1} of {len(pipeline.stages)}: {one.part.value}")
        found[stage, one.part, one.segment] = StageExecutable(jitted_part(one, mesh, count, avals), mesh)
    for crossing, aval in moves_of(pipeline):
        if crossing.source == stage:
            part = jitted_move(transfers[crossing.number], mesh, aval)
            found[stage, Part.MOVE, crossing.number] = StageExecutable(part, mesh)
    return found


def _donated(executable: Executable, count: int) -> tuple[int, ...]:
    """Positions of flat arguments whose memory results take over."""
    positions, position = [], 0
    for number, argument in enumerate(executable.arguments):
        if number in executable.donated:
            positions.append(position)
        position += count if argument.is_stacked else 1
    return tuple(positions)


def _run_local(executable: Executable, count: int, *arrays: Any) -> tuple[Any, ...]:
    """The part on the shards of one device."""
    at_hand, rest = {}, list(arrays)
    for position, argument in enumerate(executable.arguments):
        number = count if argument.is_stacked else 1
        own, rest = rest[:number], rest[number:]
        if position in executable.hosted.inputs:
            own = [jax.device_put(array, jax.memory.Space.Device) for array in own]
        if argument.place.buffer.layout.partial:
            own = [array[0] for array in own]
        at_hand[argument.buffer] = jnp.stack(own) if argument.is_stacked else own[0]
    made = [result.buffer for result in executable.results if result.buffer is not None]
    run_steps(executable.program, executable.steps, at_hand, made)
    left = [_left(result, at_hand) for result in executable.results]
    for position in executable.hosted.outputs:
        left[position] = jax.device_put(left[position], jax.memory.Space.Host)
    return tuple(left)


def _left(result: Result, at_hand: Mapping[Buffer, Any]) -> Any:
    array = (
        jnp.asarray(result.literal.val, result.literal.aval.dtype) if result.buffer is None else at_hand[result.buffer]
    )
    return array[None] if result.place.buffer.layout.partial else array
