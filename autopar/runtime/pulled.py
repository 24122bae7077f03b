"""How does a value get from one mesh to another when each is a world of processes of its own?

The sender offers, the receiver pulls (``jax.experimental.transfer``).  For each message and each pair of a sending and a
receiving process there is one offer and one pull: of all cells between the two, in the order of the route.

    sender      cut (a program of its mesh), then one offer for every receiving process; it does not wait
    receiver    one pull from every sending process, posted at once; relays between its devices; join

A pull gives arrays that are not yet there: whoever reads them waits.  An offer keeps its arrays alive until it is pulled, so
what is under way is bounded by how far a sender may run ahead.

Both ends know the name of an offer without speaking to each other: a keyed hash of run, epoch, step, message and the two
processes.  The key is secret to the run, so that a stray process cannot guess what to pull; the epoch changes when a mesh is
built anew, so that offers of the dead are never taken for those of the living.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from autopar import _compat
from autopar.errors import InternalError, TransportError
from autopar.runtime.collectives import is_key
from autopar.runtime.cross_mesh import Cutter, Joiner, Receiver, Route, check_departure, route_of
from autopar.runtime.shipment import Wire
from autopar.runtime.transport import Message


class Server(Protocol):
    """What is used of ``jax.experimental.transfer.TransferServer``."""

    def address(self) -> str:
        """Where others find it."""

    def connect(self, address: str) -> Any:
        """A connection to another server, with a method ``pull``."""

    def await_pull(self, uuid: int, arrays: Any) -> None:
        """Offer arrays for one pull."""


@dataclass(frozen=True)
class Peers:
    """Who takes part in a run: the transfer address of each process by the cluster's ids of its devices."""

    addresses: Mapping[int, str]
    secret: bytes
    epoch: int

    def process(self, device: int) -> str:
        """The process that holds a device."""
        return self.addresses[device]


class PullTransport:
    """The transport of one process of one mesh."""

    def __init__(
        self,
        server: Server,
        peers: Peers,
        outgoing: Sequence[Wire],
        incoming: Sequence[Wire],
        mesh_of: Callable[[Any], jax.sharding.Mesh],
    ) -> None:
        """``mesh_of`` makes the JAX mesh of a placement on this process's own mesh."""
        self._server, self._peers = server, peers
        own = server.address()
        self._step = 0
        self._connections: dict[str, Any] = {}
        self._outgoing = {wire.number: _Outgoing(wire, mesh_of(wire.transfer.source), peers, own) for wire in outgoing}
        self._incoming = {wire.number: _Incoming(wire, mesh_of(wire.transfer.target), peers, own) for wire in incoming}
        for end in self._incoming.values():
            for sender in end.pulls:
                if sender not in self._connections:
                    self._connections[sender] = server.connect(sender)

    def begin(self, step: int) -> None:
        """Messages from now on belong to that step."""
        self._step = step

    def send(self, message: Message, array: jax.Array) -> None:
        """Cut the array and offer its cells; see :class:`~autopar.runtime.transport.Transport`."""
        if (end := self._outgoing.get(message.transfer)) is None:
            raise InternalError(f"{message} does not leave this mesh; report this with the program")
        for receiver, cells in end.cells(array).items():
            self._server.await_pull(self._name(message, self._server.address(), receiver), cells)

    def receive(self, message: Message) -> jax.Array:
        """Post the pulls and join what they will bring; see :class:`~autopar.runtime.transport.Transport`."""
        if (end := self._incoming.get(message.transfer)) is None:
            raise InternalError(f"{message} does not come to this mesh; report this with the program")
        cells: dict[Receiver, jax.Array] = {}
        for sender, (receivers, wanted) in end.pulls.items():
            name = self._name(message, sender, self._server.address())
            try:
                cells.update(zip(receivers, self._connections[sender].pull(name, wanted), strict=True))
            except (RuntimeError, ValueError) as error:
                raise TransportError(f"{message} cannot be pulled from {sender}: {error}") from error
        return end.land(cells)

    def _name(self, message: Message, sender: str, receiver: str) -> int:
        """63 bits that only the processes of this run can know."""
        said = repr((self._peers.epoch, self._step, message.transfer, message.microbatch, sender, receiver))
        digest = hashlib.blake2b(said.encode(), key=self._peers.secret, digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


class _Outgoing:
    """The sending end of one wire."""

    def __init__(self, wire: Wire, mesh: jax.sharding.Mesh, peers: Peers, own: str) -> None:
        self._transfer = wire.transfer
        route = route_of(wire.transfer)
        # A cut makes new arrays; what is sent as it is must be copied if a program will take its memory over.
        self._copies = wire.is_donated and route.is_whole
        self._cutter = Cutter(wire.transfer, route, mesh)
        targets, sources = wire.transfer.target.devices, wire.transfer.source.devices
        self._by_receiver: dict[str, list[Receiver]] = defaultdict(list)
        for (position, _), to in route.first:
            if peers.process(sources[position]) == own:
                self._by_receiver[peers.process(targets[to[0]])].append(to)

    def cells(self, array: jax.Array) -> dict[str, list[jax.Array]]:
        """What every receiving process gets from this one."""
        check_departure(self._transfer, self._cutter.sharding, array)
        if not self._transfer.tiles:
            return {}
        cells = self._cutter.cells(jax.random.key_data(array) if is_key(array) else array)
        if self._copies:
            there = [cell.device for cell in cells.values()]
            cells = dict(zip(cells, jax.device_put(list(cells.values()), there, may_alias=False), strict=True))
        return {receiver: [cells[to] for to in order] for receiver, order in self._by_receiver.items()}


class _Incoming:
    """The receiving end of one wire; ``pulls`` says for each sending process whose cells come, and as what."""

    def __init__(self, wire: Wire, mesh: jax.sharding.Mesh, peers: Peers, own: str) -> None:
        transfer = self._transfer = wire.transfer
        self._route: Route = route_of(transfer)
        self._joiner = Joiner(transfer, self._route, mesh)
        self._key_impl, self._dtype, self._more = _words(wire.dtype)
        targets, sources = transfer.target.devices, transfer.source.devices
        devices = list(mesh.devices.flat)
        self.pulls: dict[str, tuple[list[Receiver], list[jax.ShapeDtypeStruct]]] = {}
        for (position, _), to in self._route.first:
            if peers.process(targets[to[0]]) == own:
                receivers, wanted = self.pulls.setdefault(peers.process(sources[position]), ([], []))
                receivers.append(to)
                sharding = SingleDeviceSharding(devices[to[0]])
                shape = (*transfer.tile_shape, *self._more)
                wanted.append(jax.ShapeDtypeStruct(shape, self._dtype, sharding=sharding))

    def land(self, cells: dict[Receiver, jax.Array]) -> jax.Array:
        """The landed array of the cells that were pulled."""
        shape = (*self._transfer.shape, *self._more)
        if self._transfer.tiles:
            self._joiner.relay(cells)
            whole = self._joiner.join(cells, shape)
        else:
            whole = zeros(shape, self._dtype, self._joiner.sharding)
        return whole if self._key_impl is None else jax.random.wrap_key_data(whole, impl=self._key_impl)


def zeros(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    """An array of zeros over devices of which some may be in other processes."""
    return jax.make_array_from_callback(shape, sharding, lambda index: np.zeros(shape, dtype)[index])


def _words(dtype: str) -> tuple[str | None, np.dtype[Any], tuple[int, ...]]:
    """Implementation of keys (None: no keys), type of the words that travel, and their dimensions behind the others."""
    if not dtype.startswith("key<"):
        return None, jax.numpy.dtype(dtype), ()
    impl = _compat.key_impl_name(dtype)
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return impl, words.dtype, words.shape
