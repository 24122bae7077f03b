"""A shipment at work in one process of its mesh: programs compiled, lists walked, transport connected."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import export

from autopar.cluster import Mesh
from autopar.runtime.collectives import is_key
from autopar.runtime.exchange import Exchange, Peers
from autopar.runtime.interpreter import Interpreter, Key, finisher
from autopar.runtime.run_ahead import Started, freely, telling
from autopar.runtime.shipment import MeshShipment, Program
from autopar.runtime.stage_executable import PartExecutable, stored_sharding, stored_shardings
from autopar.runtime.transport import SteppedTransport
from autopar.runtime.xla_options import compiled
from autopar.schedule.cross_mesh import Placement
from autopar.schedule.instructions import Run, Slot

MeshMaker = Callable[[Mesh, tuple[int, ...]], jax.sharding.Mesh]


class LoadedProgram(PartExecutable):
    """One exported module, compiled for the devices of a mesh."""

    def __init__(self, program: Program, mesh: jax.sharding.Mesh) -> None:
        # bytearray: the reader of jax 0.10 does not take bytes.
        exported = export.deserialize(bytearray(program.serialized))
        in_shardings = stored_shardings(program.in_layouts, mesh, program.hosted.inputs)
        out_shardings = stored_shardings(program.out_layouts, mesh, program.hosted.outputs)
        arguments = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
            for aval, sharding in zip(exported.in_avals, in_shardings, strict=True)
        ]
        jitted = jax.jit(
            exported.call,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate_argnums=program.donated,
            keep_unused=True,
        )
        with jax.set_mesh(mesh):
            super().__init__(compiled(jitted.lower(*arguments), mesh, saves_memory=program.saves_memory))


class Loaded:
    """Owns the compiled programs of a shipment, and what does not change from step to step."""

    def __init__(
        self,
        shipment: MeshShipment,
        mesh_of: MeshMaker,
        made_here: Mapping[Key, PartExecutable] | None = None,
        started: Started = freely,
    ) -> None:
        """``made_here`` are the programs of a shipment that comes without them; ``started`` bounds how many are under way."""
        self.shipment = shipment
        self._mesh_of = mesh_of
        self._meshes = {stage: mesh_of(mesh, devices) for stage, (mesh, devices) in shipment.stages.items()}
        self.programs = self._compiled() if made_here is None else made_here
        self._told = {key: telling(one, started) for key, one in self.programs.items()}
        self._finish = {
            wire.number: telling(finisher(wire.transfer, self._placed(wire.transfer.target)), started)
            for wire in shipment.incoming
            if wire.transfer.moves
        }
        self._counted = {
            slot: _replicated(slot.microbatch, stored_sharding(layout, self._meshes[slot.stage]))
            for slot, layout in shipment.counted
        }
        self.entry_shardings = [
            stored_sharding(entry.layout, self._meshes[entry.slot.stage]) for entry in shipment.entries
        ]
        """How the leaves are stored, in the order of the shipment's entries."""
        self._transport: SteppedTransport | None = None
        self._peers: Peers | None = None

    def _compiled(self) -> dict[Key, PartExecutable]:
        found: dict[Key, PartExecutable] = {}
        same: dict[tuple[str, int], LoadedProgram] = {}
        for program in self.shipment.programs:
            stage = program.key[0]
            name = hashlib.blake2b(program.serialized).hexdigest(), stage
            if name not in same:
                same[name] = LoadedProgram(program, self._meshes[stage])
            found[program.key] = same[name]
        return found

    def connect(self, exchange: Exchange, peers: Peers | None) -> None:
        """Make the transport to other meshes, anew if a peer is another process than before."""
        if peers is None or peers == self._peers:
            return
        self.use(exchange.transport(peers, self.shipment, self._placed))
        self._peers = peers

    def use(self, transport: SteppedTransport) -> None:
        """Exchange arrays with other meshes by this transport from now on."""
        self._transport = transport

    def run(self, step: int, given: Sequence[jax.Array]) -> list[jax.Array]:
        """Dispatch one step; the results in the order of the shipment."""
        arrays: dict[Slot, jax.Array] = dict(self._counted)
        arrays.update(zip((entry.slot for entry in self.shipment.entries), given, strict=True))
        if self._transport is not None:
            self._transport.begin(step)
        left = Interpreter(self._told, self._transport, self._finish).run(self.shipment.instructions, arrays)
        return [left[slot] for slot in self.shipment.results]

    def marks(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """Arrays that are there only when a step is done, and that nobody donates: of each executable's results one is read."""
        return [self._touch(results[position]) for position in self._last]

    @cached_property
    def _last(self) -> list[int]:
        """Of every call that makes results one of these, by position."""
        places = {slot: position for position, slot in enumerate(self.shipment.results)}
        made = [one.outputs for one in self.shipment.instructions if isinstance(one, Run)]
        return [min(own) for slots in made if (own := [places[slot] for slot in slots if slot in places])]

    @cached_property
    def _touch(self) -> Callable[[jax.Array], jax.Array]:
        def empty(array: jax.Array) -> jax.Array:
            return jax.numpy.zeros((), bool) if is_key(array) else jax.numpy.ravel(array)[:0]

        return jax.jit(empty, keep_unused=True)

    def _placed(self, placement: Placement) -> jax.sharding.Mesh:
        return self._mesh_of(placement.mesh, placement.devices)


def _replicated(number: int, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback((), sharding, lambda _: np.int32(number))
