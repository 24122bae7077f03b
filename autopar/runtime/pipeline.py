"""Run a pipeline in this process: one thread per mesh walks down that mesh's list of instructions.

Calls of executables and sends return before they are carried out, so a thread runs ahead of its devices.  It waits only for
messages that no other thread has sent yet, and on CPUs where it is too far ahead (:mod:`autopar.runtime.run_ahead`).  Whatever
fails on one mesh ends the step on all of them with that one error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from autopar import _compat
from autopar.errors import TransportError
from autopar.graph.build import avals_of
from autopar.plan import Layout
from autopar.runtime.cross_mesh import placed_mesh
from autopar.runtime.interpreter import Interpreter, Key, finisher
from autopar.runtime.on_devices import Place, given_twice
from autopar.runtime.run_ahead import run_ahead, telling
from autopar.runtime.stage_executable import StageExecutable, compiled_stage, stored_sharding, titled
from autopar.runtime.transport import InProcessTransport
from autopar.schedule.cross_mesh import CrossMeshTransfer, Placement
from autopar.schedule.instructions import Instruction, Slot
from autopar.schedule.pipeline import Pipeline


@dataclass(frozen=True)
class _Entry:
    """The leaf at ``position`` of the step goes to a slot of a mesh."""

    mesh: int
    slot: Slot
    position: int
    place: Place


class PipelineExecutor:
    """Owns the executables of a pipeline over the devices of this process."""

    def __init__(
        self,
        pipeline: Pipeline,
        transfers: Mapping[int, CrossMeshTransfer],
        devices: Sequence[Any],
        report_progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        """``transfers`` are by the number of their crossing; ``devices[i]`` is the JAX device with global id ``i``."""
        self._pipeline = pipeline
        began = time.monotonic()
        self._meshes = [
            placed_mesh(Placement(Layout(()), one.stage.mesh, one.stage.devices), devices) for one in pipeline.stages
        ]
        self.executables: dict[Key, StageExecutable] = {}
        for stage, mesh in enumerate(self._meshes):
            self.executables.update(compiled_stage(pipeline, stage, mesh, transfers, report_progress))
        ahead = {home: run_ahead(self._meshes[stage]) for stage, home in enumerate(pipeline.homes)}
        started = [ahead[home] for home in pipeline.homes]
        sent = {one.number: transfers[one.number] for one in pipeline.crossings if not pipeline.stays(one)}
        self._transport = InProcessTransport(
            sent,
            devices,
            started=lambda number: (
                started[pipeline.crossings[number].source],
                started[pipeline.crossings[number].target],
            ),
        )
        finish = {
            number: telling(finisher(transfer, self._meshes[target]), started[target])
            for number, transfer in sent.items()
            if transfer.moves
            for target in [pipeline.crossings[number].target]
        }
        programs = {key: telling(one, started[key[0]]) for key, one in self.executables.items()}
        self._interpreter = Interpreter(programs, self._transport, finish)
        self._whole, self._rows = tuple(self._entries()), tuple(self._row_entries())
        self._counted = tuple(self._numbers())
        self._threads = ThreadPoolExecutor(len(pipeline.lists.lists), thread_name_prefix="autopar-mesh")
        self.compile_seconds = time.monotonic() - began

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Run one step on flat leaves; batch leaves are (N, B/N, …). Results are in the order of the step's outputs.

        What fails on any mesh is raised; then all meshes have come to rest, and another step may follow.
        """
        with jax.disable_jit(False):  # which would ask for functions, to run them in Python
            arrays = self._given(leaves)
        lists = self._pipeline.lists.lists
        wide = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        walks = [partial(self._walk, mesh, lists[mesh], arrays[mesh], wide) for mesh in range(len(lists))]
        del arrays  # the lists free what is in their slots
        futures = [self._threads.submit(walk) for walk in walks]
        del walks
        try:
            failures = [error for future in futures if (error := future.exception()) is not None]
        except BaseException as error:  # an interrupt, while this thread waits
            self._transport.fail(error)
            raise
        finally:
            wait(futures)
            self._transport.clear()
        if failures:
            raise next((error for error in failures if not isinstance(error, TransportError)), failures[0])
        return self._results([future.result() for future in futures])

    def _walk(
        self, mesh: int, instructions: Sequence[Instruction], arrays: dict[Slot, jax.Array], wide: bool
    ) -> dict[Slot, jax.Array]:
        try:
            with jax.enable_x64(wide), jax.disable_jit(False):  # what the caller's thread says holds there alone
                return self._interpreter.run(instructions, arrays)
        except BaseException as error:
            self._transport.fail(error)
            raise

    # --- what goes in and what comes out ---

    def _entries(self) -> Iterator[_Entry]:
        """What the caller gives, slot by slot."""
        given = self._pipeline.lists.given
        for stage, lowering in enumerate(self._pipeline.stages):
            names, slices, avals = lowering.names, lowering.slices, avals_of(lowering.graph)
            donated = {one.arguments[position].place for one in slices.executables for position in one.donated}
            mesh = self._pipeline.homes[stage]
            for end, place in zip(lowering.program.inputs, slices.inputs, strict=True):
                slot = Slot(stage, names[place])
                if end.crossing is None and slot in given:
                    sharding = stored_sharding(place.buffer.layout, self._meshes[stage])
                    dtype = avals[place.buffer.value].dtype
                    yield _Entry(mesh, slot, end.position, Place(sharding, dtype, place in donated))

    def _row_entries(self) -> Iterator[_Entry]:
        """Rows of batch leaves, one entry for all microbatches."""
        for stage, lowering in enumerate(self._pipeline.stages):
            avals, mesh = avals_of(lowering.graph), self._pipeline.homes[stage]
            for source, place in lowering.slices.rows:
                if source is not None:
                    sharding = stored_sharding(place.buffer.layout, self._meshes[stage])
                    slot, dtype = Slot(stage, lowering.names[place]), avals[place.buffer.value].dtype
                    yield _Entry(mesh, slot, lowering.program.inputs[source].position, Place(sharding, dtype))

    def _numbers(self) -> Iterator[tuple[int, Slot, jax.Array]]:
        """The numbers of the microbatches where a stage reads them: the same in every step."""
        for stage, lowering in enumerate(self._pipeline.stages):
            for source, place in lowering.slices.rows:
                if source is None:
                    sharding = stored_sharding(place.buffer.layout, self._meshes[stage])
                    for number in range(self._pipeline.order.num_microbatches):
                        array = jax.device_put(np.int32(number), sharding)
                        yield self._pipeline.homes[stage], Slot(stage, lowering.names[place], number), array

    def _given(self, leaves: Sequence[Any]) -> list[dict[Slot, jax.Array]]:
        """The arrays in the slots that are given, for each mesh."""
        given: list[dict[Slot, jax.Array]] = [{} for _ in self._pipeline.lists.lists]
        twice = given_twice(leaves)
        for entry in self._whole:
            leaf = leaves[entry.position]
            given[entry.mesh][entry.slot] = entry.place.put(leaf, is_given_twice=id(leaf) in twice)
        for entry in self._rows:
            for number in range(self._pipeline.order.num_microbatches):
                slot = Slot(entry.slot.stage, entry.slot.name, number)
                given[entry.mesh][slot] = entry.place.put(leaves[entry.position][number])
        for mesh, slot, array in self._counted:
            given[mesh][slot] = array
        return given

    def _results(self, left: Sequence[dict[Slot, jax.Array]]) -> list[Any]:
        found: dict[int, Any] = {}
        for stage, lowering in enumerate(self._pipeline.stages):
            mesh = self._pipeline.homes[stage]
            atoms = _compat.jaxpr_of(lowering.graph.jaxpr).outvars
            ends = zip(lowering.program.outputs, lowering.slices.outputs, atoms, strict=True)
            for end, place, atom in ends:
                if end.crossing is None:
                    found[end.position] = (
                        jax.numpy.asarray(atom.val, atom.aval.dtype)
                        if place is None
                        else left[mesh][self._pipeline.lists.kept[stage, lowering.names[place]][0]]
                    )
        return [found[position] for position in sorted(found)]

    def wait(self, results: Sequence[Any]) -> None:
        """Wait until the results of a step are there."""
        jax.block_until_ready(results)

    # --- inspecting ---

    def as_text(self) -> str:
        """The optimized HLO of all executables, one after the other, each under a line that names it."""
        return titled((key, one.as_text()) for key, one in self.executables.items())

    def memory_analysis(self) -> dict[Key, Any]:
        """XLA's own account of bytes on one device, for each executable."""
        return {key: one.memory_analysis() for key, one in self.executables.items()}
