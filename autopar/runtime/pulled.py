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

Who cannot send what others wait for offers nothing under its name: their pulls then fail, and so does what reads them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import SingleDeviceSharding

from autopar.errors import InternalError, TransportError
from autopar.runtime.cross_mesh import Receiver
from autopar.runtime.shipment import Wire
from autopar.runtime.transport import Message
from autopar.runtime.wire_ends import Arrival, Departure


class Server(Protocol):
    """What is used of ``jax.experimental.transfer.TransferServer``."""

    def address(self) -> str:
        """Where others find it."""

    def connect(self, address: str) -> Any:
        """A connection to another server, with a method ``pull``."""

    def await_pull(self, uuid: int, arrays: Any) -> None:
        """Offer arrays for one pull."""


@dataclass(frozen=True)
class PullPeers:
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
        peers: PullPeers,
        outgoing: Sequence[Wire],
        incoming: Sequence[Wire],
        mesh_of: Callable[[Any], jax.sharding.Mesh],
    ) -> None:
        """``mesh_of`` makes the JAX mesh of a placement on this process's own mesh."""
        self._server, self._peers = server, peers
        own = server.address()
        self._step = 0
        self._sent: set[Message] = set()
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
        self._sent.clear()

    def send(self, message: Message, array: jax.Array) -> None:
        """Cut the array and offer its cells; see :class:`~autopar.runtime.transport.Transport`."""
        if (end := self._outgoing.get(message.transfer)) is None:
            raise InternalError(f"{message} does not leave this mesh; report this with the program")
        cells = end.cells(array)
        self._sent.add(message)
        for receiver, own in cells.items():
            self._server.await_pull(self._name(message, self._server.address(), receiver), own)

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

    def break_off(self, steps: Iterable[int], messages: Iterable[Message]) -> None:
        """Let the pulls of those messages fail in these steps, as far as they were not sent; no others follow."""
        owed = list(messages)
        for step in steps:
            if step != self._step:
                self.begin(step)
            for message in owed:
                if message not in self._sent:
                    for receiver in self._outgoing[message.transfer].receivers:
                        self._server.await_pull(self._name(message, self._server.address(), receiver), [])

    def _name(self, message: Message, sender: str, receiver: str) -> int:
        """63 bits that only the processes of this run can know."""
        said = repr((self._peers.epoch, self._step, message.transfer, message.microbatch, sender, receiver))
        digest = hashlib.blake2b(said.encode(), key=self._peers.secret, digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


class _Outgoing:
    """The sending end of one wire, with the receivers that each process has."""

    def __init__(self, wire: Wire, mesh: jax.sharding.Mesh, peers: PullPeers, own: str) -> None:
        self._departure = Departure(wire, mesh)
        self._by_receiver: dict[str, list[Receiver]] = defaultdict(list)
        targets, sources = wire.transfer.target.devices, wire.transfer.source.devices
        for (position, _), to in self._departure.route.first:
            if peers.process(sources[position]) == own:
                self._by_receiver[peers.process(targets[to[0]])].append(to)

    @property
    def receivers(self) -> list[str]:
        """The processes that get something from this one."""
        return list(self._by_receiver)

    def cells(self, array: jax.Array) -> dict[str, list[jax.Array]]:
        """What every receiving process gets from this one."""
        cells = self._departure.cells(array)
        return {receiver: [cells[to] for to in order] for receiver, order in self._by_receiver.items()}


class _Incoming:
    """The receiving end of one wire; ``pulls`` says for each sending process whose cells come, and as what."""

    def __init__(self, wire: Wire, mesh: jax.sharding.Mesh, peers: PullPeers, own: str) -> None:
        arrival = Arrival(wire, mesh)
        self.land = arrival.land
        targets, sources = wire.transfer.target.devices, wire.transfer.source.devices
        devices = list(mesh.devices.flat)
        self.pulls: dict[str, tuple[list[Receiver], list[jax.ShapeDtypeStruct]]] = {}
        for (position, _), to in arrival.route.first:
            if peers.process(targets[to[0]]) == own:
                receivers, wanted = self.pulls.setdefault(peers.process(sources[position]), ([], []))
                receivers.append(to)
                sharding = SingleDeviceSharding(devices[to[0]])
                wanted.append(jax.ShapeDtypeStruct(arrival.cell.shape, arrival.cell.dtype, sharding=sharding))
