"""One compiled step: a plan and a program become one XLA executable over the devices of a mesh.

The program runs inside one ``jax.shard_map`` that is manual over every mesh axis, under ``jax.jit`` with the plan's
input and output shardings and donation; nothing is left for XLA's partitioner to decide.

Arrays that lie in the memory of the host between steps are copied to the device where the steps begin and back where they end;
it is the compiler that moves the copies to where they are used (XLA:GPU lets the kernels that read such an array read it over the
link, and starts a copy back as soon as the array is made).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar.cluster import Mesh
from autopar.errors import ClusterError
from autopar.plan import Layout
from autopar.runtime.host_data import HostLeaf
from autopar.runtime.interpret import interpret
from autopar.runtime.on_devices import Place, arrays_of, as_numpy, given_twice, pieces_by, pieces_of
from autopar.runtime.run_ahead import run_ahead, telling
from autopar.runtime.xla_options import Foretold, compiled
from autopar.schedule.cross_mesh import Box
from autopar.schedule.spmd import SpmdProgram, rematerialises


def device_mesh(mesh: Mesh, devices: Sequence[Any]) -> jax.sharding.Mesh:
    """The JAX mesh of a logical mesh; raises ClusterError when there are too few devices."""
    if len(devices) < mesh.size:
        raise ClusterError(
            f"the plan is for {mesh.size} devices ({mesh}) but this process has {len(devices)}; plan for this cluster, "
            f"or on CPU set jax_num_cpu_devices={mesh.size} before JAX starts"
        )
    grid = np.array(devices[: mesh.size]).reshape(mesh.axis_sizes)
    return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def partition_spec(layout: Layout) -> PartitionSpec:
    """The PartitionSpec of a layout without partial axes, without trailing empty entries."""
    entries = [axes if len(axes) > 1 else (axes[0] if axes else None) for axes in layout.dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


HOST_MEMORY = "pinned_host"
"""What JAX calls the memory of the host that devices read and write themselves."""


def shardings_of(mesh: Any, layouts: Sequence[Layout], hosted: Collection[int]) -> tuple[NamedSharding, ...]:
    """Where arrays lie that are laid out so; ``hosted`` are the positions of those in the memory of the host."""
    return tuple(
        NamedSharding(mesh, partition_spec(layout), memory_kind=HOST_MEMORY if position in hosted else None)
        for position, layout in enumerate(layouts)
    )


@dataclass(frozen=True)
class JittedStep:
    """A whole step as a function of ``jax.jit`` over a mesh, which may be an abstract one."""

    function: Any
    in_layouts: tuple[Layout, ...]
    out_layouts: tuple[Layout, ...]
    saves_memory: bool
    """Whether it was made what it is to need less memory: it does work again, or has arrays in the memory of the host."""


def jitted_step(program: SpmdProgram, mesh: Any, donated: frozenset[int]) -> JittedStep:
    """The function of a step's flat leaves, which are laid out as the program says."""
    in_layouts = tuple(buffer.layout for buffer in program.inputs)
    out_layouts = tuple(Layout(()) if buffer is None else buffer.layout for buffer in program.outputs)
    hosted = program.hosted
    local = jax.shard_map(
        lambda *arguments: tuple(
            _moved(
                interpret(program, _moved(arguments, hosted.inputs, jax.memory.Space.Device)),
                hosted.outputs,
                jax.memory.Space.Host,
            )
        ),
        mesh=mesh,
        in_specs=tuple(map(partition_spec, in_layouts)),
        out_specs=tuple(map(partition_spec, out_layouts)),
        check_vma=False,
    )
    jitted = jax.jit(
        local,
        in_shardings=shardings_of(mesh, in_layouts, hosted.inputs),
        out_shardings=shardings_of(mesh, out_layouts, hosted.outputs),
        donate_argnums=tuple(sorted(donated)),
        keep_unused=True,
    )
    saves_memory = rematerialises(program.steps) or hosted.is_any
    return JittedStep(jitted, in_layouts, out_layouts, saves_memory)


def _moved(arrays: Sequence[Any], positions: Collection[int], space: Any) -> list[Any]:
    """The arrays, those at the positions in another memory."""
    return [jax.device_put(one, space) if place in positions else one for place, one in enumerate(arrays)]


class Executor:
    """Owns one executable, and remembers how long its steps took.

    ``devices`` are those of this process or of a topology; with the latter the executable can be read, not run.
    ``options`` are the compiler's, ``foretold`` is what the plan says of memory.
    """

    def __init__(
        self,
        program: SpmdProgram,
        avals: Sequence[Any],
        donated: frozenset[int],
        devices: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        foretold: Foretold | None = None,
    ) -> None:
        mesh = device_mesh(program.mesh, devices)
        step = jitted_step(program, mesh, donated)
        self.in_shardings = shardings_of(mesh, step.in_layouts, program.hosted.inputs)
        self.out_shardings = shardings_of(mesh, step.out_layouts, program.hosted.outputs)
        shapes = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
            for aval, sharding in zip(avals, self.in_shardings, strict=True)
        ]
        started = time.monotonic()
        with (
            jax.disable_jit(False),
            jax.set_mesh(mesh),
        ):  # shard_map refuses a mesh other than the one in scope, which may be the user's
            lowered = step.function.lower(*shapes)
            self._compiled = compiled(lowered, mesh, saves_memory=step.saves_memory, options=options, foretold=foretold)
        self.compile_seconds = time.monotonic() - started
        self._run = telling(self._compiled, run_ahead(mesh))
        self._places = [
            Place(sharding, aval.dtype, position in donated)
            for position, (sharding, aval) in enumerate(zip(self.in_shardings, avals, strict=True))
        ]

    def place(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The leaves on their devices, as the executable wants them.

        What is donated shares no memory with what the caller keeps, nor with another leaf: XLA:CPU ends the process
        where a donated buffer is passed twice.
        """
        twice = given_twice(leaves)
        return [
            place.put(leaf, is_given_twice=id(leaf) in twice)
            if place.sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and leaf.sharding == place.sharding)
            else _from_own_pieces(leaf, place)
            for leaf, place in zip(leaves, self._places, strict=True)
        ]

    def __call__(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Run one step; asynchronous, as every JAX call."""
        with jax.disable_jit(False):  # which would ask for the function, to run it in Python
            return list(self._run(*self.place(leaves)))

    def wait(self, results: Sequence[Any]) -> None:
        """Wait until the results of a step are there."""
        jax.block_until_ready(results)

    def as_text(self) -> str:
        """The optimized HLO."""
        return str(self._compiled.as_text())

    def memory_analysis(self) -> Any:
        """XLA's own account of bytes on one device."""
        return self._compiled.memory_analysis()


def _from_own_pieces(leaf: Any, place: Place) -> jax.Array:
    """An array over the devices of several processes, each of which has the whole leaf, or reads its own rows."""
    if isinstance(leaf, HostLeaf):
        rows = partial(_rows, leaf, place.dtype)
        pieces = pieces_by(rows, leaf.shape, place.sharding)
    else:
        value, key_impl = as_numpy(leaf, -1, place.dtype)
        pieces = pieces_of(value, place.sharding, key_impl)
    (array,) = arrays_of([(pieces, place.sharding)])
    return array


def _rows(leaf: HostLeaf, dtype: Any, box: Box) -> np.ndarray[Any, Any]:
    return np.asarray(leaf.read(tuple(slice(*ends) for ends in box)), dtype=dtype)
