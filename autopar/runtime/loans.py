"""How does a leaf get to all meshes that read it, when it lies on one of them?

State that a step hands on crosses as its program says.  A leaf that it only reads, such as parameters in an evaluation, may be
read by several stages: it lies where the first of them wants it, and is sent to the others in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar import _compat
from autopar.cluster import Cluster
from autopar.runtime.one_world import Neighbours
from autopar.runtime.owed import Owed
from autopar.runtime.shipment import Entry, Shipments, Wire
from autopar.runtime.stage_executable import stored_sharding
from autopar.runtime.transport import Message
from autopar.schedule.cross_mesh import Placement, cross_mesh_transfer
from autopar.schedule.instructions import Slot

_ONCE = -1


@dataclass(frozen=True)
class Loan:
    """The leaf at ``position`` on its way from the mesh ``source`` to a slot of the mesh ``target``."""

    position: int
    source: int
    target: int
    slot: Slot
    wire: Wire


def loans_of(shipments: Shipments, dtypes: Mapping[int, Any], cluster: Cluster, first_number: int) -> tuple[Loan, ...]:
    """What is lent where arrays lie as the plan says; ``first_number`` and those behind it are no other wires'."""
    entries = sorted(
        ((entry, number) for number, mesh in enumerate(shipments.meshes) for entry in mesh.entries if entry.row < 0),
        key=lambda pair: pair[0].slot.stage,
    )
    homes: dict[int, tuple[Entry, int]] = {}
    found: list[Loan] = []
    for entry, mesh in entries:
        home, source = homes.setdefault(entry.position, (entry, mesh))
        if mesh == source:
            continue
        dtype = dtypes[entry.position]
        ends = [
            Placement(one.layout, *shipments.meshes[number].stages[one.slot.stage])
            for one, number in ((home, source), (entry, mesh))
        ]
        transfer = cross_mesh_transfer(entry.shape, _compat.item_bytes(dtype), ends[0], ends[1], cluster)
        wire = Wire(first_number + len(found), transfer, _compat.dtype_name(dtype), home.is_donated)
        found.append(Loan(entry.position, source, mesh, entry.slot, wire))
    return tuple(found)


class Lender:
    """Owns one process's part in the loans of a program."""

    def __init__(self, loans: Sequence[Loan], here: Collection[int], world: Neighbours, owed: Owed) -> None:
        """``here`` are the meshes that have devices in this process."""
        self._outgoing = [one for one in loans if one.source in here]
        self._incoming = [one for one in loans if one.target in here]
        self._homes = {
            one.wire.number: stored_sharding(one.wire.transfer.source.layout, world.mesh_of(one.wire.transfer.source))
            for one in loans
        }
        self._transport = world.pulls([one.wire for one in self._outgoing], [one.wire for one in self._incoming])
        owed.add(self._transport, list(map(_message, self._outgoing)))

    def __call__(self, step: int, leaves: Sequence[Any]) -> dict[Slot, jax.Array]:
        """Send what lies on meshes of this process; what comes for slots of them.  Leaves that lie nowhere yet are not lent."""
        self._transport.begin(step)
        for one in self._outgoing:
            if self._is_home(one, leaves):
                self._transport.send(_message(one), leaves[one.position])
        return {
            one.slot: self._transport.receive(_message(one)) for one in self._incoming if self._is_home(one, leaves)
        }

    def _is_home(self, loan: Loan, leaves: Sequence[Any]) -> bool:
        leaf = leaves[loan.position]
        return isinstance(leaf, jax.Array) and lies_so(leaf, self._homes[loan.wire.number])


def lies_so(leaf: jax.Array, sharding: jax.sharding.NamedSharding) -> bool:
    """Whether an array lies so, on the same devices."""
    same_devices: bool = leaf.sharding.device_set == sharding.device_set
    return same_devices and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def _message(loan: Loan) -> Message:
    return Message(loan.wire.number, _ONCE)
