"""How does a leaf that several meshes read get to all of them?

State that a step hands on crosses as its program says.  A leaf that it only reads, such as parameters in an evaluation, has a
*home*, the mesh of the first stage that reads it, and in every step a *delivery* to each other mesh that does.

    the leaf lies at home, as it is stored there    its home's processes send it, the reader's receive it
    it lies anywhere else (a NumPy array, …)        every process puts it on its own devices; nothing is sent

The two ends do not speak about which it is.  They find the same, for all processes are given the same leaves, and how a leaf lies
is all they look at (:func:`~autopar.runtime.on_devices.lies_so`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar import _compat
from autopar.cluster import Cluster
from autopar.runtime.on_devices import lies_so
from autopar.runtime.one_world import Neighbours
from autopar.runtime.promises import Promises
from autopar.runtime.shipment import Entry, Shipments, Wire
from autopar.runtime.stage_executable import stored_sharding
from autopar.schedule.cross_mesh import Placement, cross_mesh_transfer
from autopar.schedule.instructions import Slot


@dataclass(frozen=True)
class Delivery:
    """The leaf at ``position`` of the step on its way from the mesh ``home`` to a slot of the mesh ``reader``."""

    position: int
    home: int
    reader: int
    slot: Slot
    wire: Wire


@dataclass(frozen=True)
class _Reader:
    """A slot of a mesh that reads a whole leaf, and how the leaf is stored there."""

    mesh: int
    entry: Entry
    placement: Placement


def deliveries_of(
    shipments: Shipments, dtypes: Mapping[int, Any], cluster: Cluster, first_number: int
) -> tuple[Delivery, ...]:
    """All of a program; ``dtypes`` are of its leaves, ``first_number`` and those behind it are no other wires'."""
    readers = sorted(_readers(shipments), key=lambda reader: reader.entry.slot.stage)
    homes: dict[int, _Reader] = {}
    for reader in readers:
        homes.setdefault(reader.entry.position, reader)
    abroad = [reader for reader in readers if reader.mesh != homes[reader.entry.position].mesh]
    return tuple(
        _delivery(homes[reader.entry.position], reader, dtypes[reader.entry.position], cluster, number)
        for number, reader in enumerate(abroad, first_number)
    )


def _readers(shipments: Shipments) -> Iterator[_Reader]:
    for number, mesh in enumerate(shipments.meshes):
        for entry in mesh.entries:
            if entry.row < 0:
                yield _Reader(number, entry, Placement(entry.layout, *mesh.stages[entry.slot.stage]))


def _delivery(home: _Reader, reader: _Reader, dtype: Any, cluster: Cluster, number: int) -> Delivery:
    shape, item_bytes = reader.entry.shape, _compat.item_bytes(dtype)
    transfer = cross_mesh_transfer(shape, item_bytes, home.placement, reader.placement, cluster)
    wire = Wire(number, transfer, _compat.dtype_name(dtype), home.entry.is_donated)
    return Delivery(reader.entry.position, home.mesh, reader.mesh, reader.entry.slot, wire)


class Deliverer:
    """Owns one process's part in the deliveries of a program."""

    def __init__(
        self, deliveries: Sequence[Delivery], here: Collection[int], world: Neighbours, promises: Promises
    ) -> None:
        """``here`` are the meshes that have devices in this process."""
        self._outgoing = [one for one in deliveries if one.home in here]
        self._incoming = [one for one in deliveries if one.reader in here]
        concerned = (*self._outgoing, *self._incoming)
        self._stored_at_home = {one.wire.number: _stored_at_home(one, world) for one in concerned}
        self._transport = world.pulls([one.wire for one in self._outgoing], [one.wire for one in self._incoming])
        promises.make(self._transport, [one.wire.once for one in self._outgoing])

    def __call__(self, step: int, leaves: Sequence[Any]) -> dict[Slot, jax.Array]:
        """Send what is at home in this process; what comes, or will come, for slots of its meshes."""
        self._transport.begin(step)
        for one in self._outgoing:
            if self._is_at_home(one, leaves):
                self._transport.send(one.wire.once, leaves[one.position])
        return {
            one.slot: self._transport.receive(one.wire.once) for one in self._incoming if self._is_at_home(one, leaves)
        }

    def _is_at_home(self, delivery: Delivery, leaves: Sequence[Any]) -> bool:
        leaf = leaves[delivery.position]
        return isinstance(leaf, jax.Array) and lies_so(leaf, self._stored_at_home[delivery.wire.number])


def _stored_at_home(delivery: Delivery, world: Neighbours) -> jax.sharding.NamedSharding:
    home = delivery.wire.transfer.source
    return stored_sharding(home.layout, world.mesh_of(home))
