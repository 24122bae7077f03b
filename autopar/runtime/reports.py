"""How does every process of a world learn what a step returns besides its state, such as its loss?

Such an output lies on the mesh of one stage.  It is sent to each process that cannot read the whole of it there, onto that
process's first device, by the transport that carries arrays between meshes: nobody waits for it but who reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar import _compat
from autopar.cluster import Cluster, Mesh
from autopar.plan import Layout
from autopar.runtime.distributed_array import DistributedArray
from autopar.runtime.one_world import Neighbours
from autopar.runtime.promises import Promises
from autopar.runtime.shipment import Shipments, Wire
from autopar.schedule.cross_mesh import Placement, cross_mesh_transfer

ONE_DEVICE = Mesh(("data",), (1,))
"""The mesh on which a process gets what is reported to it."""


@dataclass(frozen=True)
class Report:
    """The output at ``position`` of the step on its way from the mesh ``source`` to one process."""

    position: int
    source: int
    process: int
    wire: Wire


def reports_of(
    shipments: Shipments, carried: Collection[int], cluster: Cluster, process_of: Sequence[int], first_number: int
) -> tuple[Report, ...]:
    """What is reported to whom; ``carried`` are the outputs that are state, device i is one of process ``process_of[i]``.

    Processes that hold the whole of an output need no report of it.  ``first_number`` and those behind it are no other wires'.
    """
    first = {process: process_of.index(process) for process in sorted(set(process_of))}
    found: list[Report] = []
    for position, output in enumerate(shipments.outputs):
        if output.result < 0 or position in carried:
            continue
        mesh, devices = shipments.meshes[output.mesh].stages[output.stage]
        source = Placement(output.layout, mesh, devices)
        target = Layout(((),) * len(output.layout.dims))
        holders = {process_of[device] for device in devices}
        readers = holders if len(holders) == 1 or not output.layout.axes else set()
        for process, device in first.items():
            if process in readers:
                continue
            transfer = cross_mesh_transfer(
                tuple(output.aval.shape),
                _compat.item_bytes(output.aval.dtype),
                source,
                Placement(target, ONE_DEVICE, (device,)),
                cluster,
            )
            wire = Wire(first_number + len(found), transfer, _compat.dtype_name(output.aval.dtype))
            found.append(Report(position, output.mesh, process, wire))
    return tuple(found)


def shared_with_state(shipments: Shipments, carried: Collection[int]) -> frozenset[int]:
    """Outputs that are the array of a state as well, whose memory the next step takes over."""
    state = {(shipments.outputs[position].mesh, shipments.outputs[position].result) for position in carried}
    return frozenset(
        position
        for position, output in enumerate(shipments.outputs)
        if output.result >= 0 and position not in carried and (output.mesh, output.result) in state
    )


class ReportedArray(DistributedArray):
    """What a step returns besides its state: an array that is whole in this process, or will be.

    Who asks for its value waits for no longer than ``wait`` does, which a ``jax.Array`` cannot offer.
    """

    __slots__ = ("_array", "_wait")

    def __init__(self, array: jax.Array, wait: Callable[[jax.Array], None]) -> None:
        """``wait`` returns when an array is there, or raises."""
        super().__init__(_compat.aval_of(array))
        self._array = array
        self._wait = wait

    def __repr__(self) -> str:
        return f"DistributedArray({self.aval.str_short()}, {'deleted' if self.is_deleted() else 'reported to every process'})"

    def is_deleted(self) -> bool:
        """Whether it was deleted."""
        return bool(self._array.is_deleted())

    def delete(self) -> None:
        """Give its memory back now."""
        self._array.delete()

    def block_until_ready(self) -> ReportedArray:
        """Wait until it is here."""
        self._wait(self._array)
        return self

    def words(self) -> np.ndarray[Any, Any]:
        """Its value; of typed keys, the words."""
        self._wait(self._array)
        return np.asarray(jax.random.key_data(self._array) if _compat.is_key_dtype(self.dtype) else self._array)


class Reporter:
    """Owns one process's part in the reports of a program."""

    def __init__(self, reports: Sequence[Report], here: Collection[int], world: Neighbours, promises: Promises) -> None:
        """``here`` are the meshes that have devices in this process."""
        self._outgoing = [one for one in reports if one.source in here]
        self._incoming = [one for one in reports if one.process == jax.process_index()]
        self._transport = world.pulls([one.wire for one in self._outgoing], [one.wire for one in self._incoming])
        promises.make(self._transport, [one.wire.once for one in self._outgoing])

    def __call__(self, step: int, outputs: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        """Send what of ``outputs`` (by position) others want; what comes in their place here, or will."""
        self._transport.begin(step)
        for one in self._outgoing:
            self._transport.send(one.wire.once, outputs[one.position])
        return {one.position: self._transport.receive(one.wire.once) for one in self._incoming}
