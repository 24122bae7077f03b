"""How does a value get from one mesh of GPUs to another by sends and receives of NCCL?

One rank per device.  Every two meshes that exchange arrays have a communicator (:class:`Pair`) over the devices of both.  A
message is one group of sends and receives: all its cells, in the order of the route.

*Order.*  NCCL knows no names: of two ranks the n-th send meets the n-th receive.  Both block their stream until the other is
there.  Each device has one stream for all its messages, in the order of its mesh's list.  All lists are parts of one
sequence (:mod:`autopar.schedule.lists`), so the ends of a pair agree on the order; and of what is not yet done, what stands
first in that sequence is first in all its streams, so it can be done (:func:`autopar.schedule.instructions.verify_meetings`
proves it of every pipeline).  Nothing in a stream waits for what a list starts later.

*Readiness.*  What is sent is lent by DLPack, which makes our stream wait until it is computed.  What is received lands in
memory of JAX's own, lent to us likewise, and becomes an array whose readers' streams wait for ours.  The host waits for
neither.  Lent memory is held until the stream has passed, for its owner would give it to others sooner; beyond a limit the
host does wait, for the oldest.

What is needed of NCCL and of streams is small and stands in protocols, so that something else can keep their rules in tests.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeAlias

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import InternalError, TransportError
from autopar.runtime.cross_mesh import Receiver
from autopar.runtime.shipment import Wire
from autopar.runtime.transport import Message, Posted
from autopar.runtime.wire_ends import Arrival, Departure, words_of, zeros

IN_FLIGHT_BYTES = 1 << 30
"""So many bytes of each device may be lent to messages that are not over, besides the last."""

UniqueId: TypeAlias = bytes | tuple[int, ...]
"""NCCL's name of a communicator, as its library gives it and wants it back (cupy 13: numbers, cupy 14: bytes)."""


class Word(Enum):
    """What a message is counted in: elements of so many bytes; NCCL moves them as they are."""

    ONE_BYTE = 1
    TWO_BYTES = 2
    FOUR_BYTES = 4
    EIGHT_BYTES = 8


class Mark(Protocol):
    """A place in a stream."""

    def is_over(self) -> bool:
        """Whether the stream has passed it."""

    def wait(self) -> None:
        """Return when it has.  Raises ``TransportError`` if it never will, as far as that is noticed."""

    def go_before(self, handle: int | None) -> None:
        """Make another stream wait for it; None: :meth:`wait`."""


class Stream(Protocol):
    """The queue of one device in which messages are carried out one after the other."""

    @property
    def handle(self) -> int | None:
        """What DLPack knows it by; None on devices that have no streams."""

    def mark(self) -> Mark:
        """The end of the stream as it is now."""


class Communicator(Protocol):
    """One rank of a communicator."""

    def send(self, pointer: int, count: int, word: Word, peer: int, stream: Stream) -> None:
        """Put a send of so many words to a rank into a stream."""

    def receive(self, pointer: int, count: int, word: Word, peer: int, stream: Stream) -> None:
        """Put a receive from a rank into a stream."""

    def abort(self) -> None:
        """End all that is under way, well or badly; may be called by any thread."""


class Library(Protocol):
    """NCCL, with the streams of its devices."""

    def unique_id(self) -> UniqueId:
        """A new name; the process that asks for one must live until all ranks have joined."""

    def stream(self, device: Any) -> Stream:
        """A new stream of a JAX device."""

    def join(self, name: UniqueId, size: int, ranks: Mapping[int, Any]) -> dict[int, Communicator]:
        """Ranks of a communicator, of which these JAX devices are in this process; returns when all ranks have joined."""

    def group(self) -> AbstractContextManager[None]:
        """What this thread sends and receives inside is one: it begins at the end, all of it at once."""


@dataclass(frozen=True)
class Pair:
    """Two meshes that exchange arrays: ``devices`` are the cluster's ids of all their devices, of rank 0, 1, …"""

    devices: tuple[int, ...]
    name: UniqueId


@dataclass(frozen=True)
class NcclPeers:
    """Who takes part in a run.  All processes join the pairs in this order; the epoch changes when a mesh is built anew."""

    pairs: tuple[Pair, ...]
    epoch: int


@dataclass(frozen=True)
class _Lent:
    """Memory that a message reads or writes, until a place in the stream."""

    mark: Mark
    memory: Sequence[Any]
    size_bytes: int


class Station:
    """What one process owns of NCCL: a stream for each of its devices, its ranks, and what it has lent to messages."""

    def __init__(self, library: Library, devices: Mapping[int, Any], limit_bytes: int = IN_FLIGHT_BYTES) -> None:
        """``devices`` are the JAX devices of this process by the cluster's ids."""
        self._library = library
        self._devices = dict(devices)
        self._limit_bytes = limit_bytes
        self._streams = {number: library.stream(device) for number, device in self._devices.items()}
        self._ranks: dict[UniqueId, dict[int, Communicator]] = {}
        self._lent: dict[int, deque[_Lent]] = {number: deque() for number in self._devices}
        self._lent_bytes = dict.fromkeys(self._devices, 0)
        self._lock = threading.Lock()
        self._is_gone = False

    @property
    def group(self) -> Callable[[], AbstractContextManager[None]]:
        """See :meth:`Library.group`."""
        return self._library.group

    def owns(self, device: int) -> bool:
        """Whether a device of the cluster is in this process."""
        return device in self._devices

    def device(self, number: int) -> Any:
        """The JAX device with an id of the cluster's."""
        return self._devices[number]

    def stream(self, device: int) -> Stream:
        """The one stream in which all messages of a device are."""
        return self._streams[device]

    def ranks(self, pair: Pair) -> dict[int, Communicator]:
        """The ranks of this process in a pair, by the cluster's ids of their devices; joined when first asked for."""
        own = {rank: number for rank, number in enumerate(pair.devices) if number in self._devices}
        if pair.name not in self._ranks:
            joined = self._library.join(
                pair.name, len(pair.devices), {rank: self._devices[number] for rank, number in own.items()}
            )
            with self._lock:
                self._ranks[pair.name] = joined
        return {number: self._ranks[pair.name][rank] for rank, number in own.items()}

    def lend(self, device: int, memory: Sequence[Any], size_bytes: int) -> Mark:
        """Hold memory until all that is in the device's stream now is over, which is returned.

        Waits if more is held than the limit, for the oldest.
        """
        held, mark = self._lent[device], self._streams[device].mark()
        held.append(_Lent(mark, memory, size_bytes))
        self._lent_bytes[device] += size_bytes
        while len(held) > 1 and self._lent_bytes[device] > self._limit_bytes:
            held[0].mark.wait()
            self._take_back(device)
        while held and held[0].mark.is_over():
            self._take_back(device)
        return mark

    def settle(self) -> None:
        """Wait until all messages are over, and hold nothing any more."""
        for device, held in self._lent.items():
            while held:
                held[0].mark.wait()
                self._take_back(device)

    def lent_bytes(self, device: int) -> int:
        """How much of a device's memory is held for messages."""
        return self._lent_bytes[device]

    def check(self) -> None:
        """Raise ``TransportError`` after :meth:`hang_up`."""
        if self._is_gone:
            raise TransportError("the connections to other meshes were given up after a failure; connect anew")

    def hang_up(self) -> None:
        """Give up all that is under way, so that streams which wait for the dead go on; may be called by any thread."""
        with self._lock:
            self._is_gone = True
            for ranks in self._ranks.values():
                for rank in ranks.values():
                    rank.abort()
            self._ranks.clear()

    def _take_back(self, device: int) -> None:
        self._lent_bytes[device] -= self._lent[device].popleft().size_bytes


class NcclTransport:
    """The transport of one process of one mesh."""

    def __init__(
        self,
        station: Station,
        peers: NcclPeers,
        outgoing: Sequence[Wire],
        incoming: Sequence[Wire],
        mesh_of: Callable[[Any], jax.sharding.Mesh],
    ) -> None:
        """Joins the pairs of this process; ``mesh_of`` makes the JAX mesh of a placement on this process's own mesh."""
        self._station = station
        mine = [pair for pair in peers.pairs if any(map(station.owns, pair.devices))]
        for pair in mine:
            station.ranks(pair)
        self._outgoing = {
            wire.number: _Outgoing(wire, mesh_of(wire.transfer.source), _pair_of(wire, mine), station)
            for wire in outgoing
        }
        self._incoming = {
            wire.number: _Incoming(wire, mesh_of(wire.transfer.target), _pair_of(wire, mine), station)
            for wire in incoming
        }

    def rehearse(self) -> None:
        """Carry one array of zeros over every wire, in the order of their numbers; all processes must do so at once.

        NCCL connects two ranks at their first message, and CUDA loads a program at its first run.  Both may wait for all
        that a device does, and while a message waits for its other end that is for ever.
        """
        for number in sorted({*self._outgoing, *self._incoming}):
            self._station.check()
            if (leaving := self._outgoing.get(number)) is not None:
                leaving.send(leaving.zeros())
            else:
                self._incoming[number].receive()()
        self._station.settle()

    def begin(self, step: int) -> None:
        """Messages from now on belong to that step; in NCCL's order they do so by themselves."""
        self._station.check()

    def send(self, message: Message, array: jax.Array) -> None:
        """Cut the array and send its cells; see :class:`~autopar.runtime.transport.Transport`."""
        if (end := self._outgoing.get(message.transfer)) is None:
            raise InternalError(f"{message} does not leave this mesh; report this with the program")
        self._station.check()
        end.send(array)

    def receive(self, message: Message) -> Posted:
        """Receive the cells, and join them when the array is read; see :class:`~autopar.runtime.transport.Transport`.

        A device runs its programs one after the other, and one that joins what has not come would keep all others waiting.
        """
        if (end := self._incoming.get(message.transfer)) is None:
            raise InternalError(f"{message} does not come to this mesh; report this with the program")
        self._station.check()
        return end.receive()


def _pair_of(wire: Wire, pairs: Iterable[Pair]) -> Pair:
    ends = {*wire.transfer.source.devices, *wire.transfer.target.devices}
    for pair in pairs:
        if ends <= set(pair.devices):
            return pair
    raise InternalError(f"transfer {wire.number} is between meshes that were not introduced to each other; report this")


class _Outgoing:
    """The sending end of one wire."""

    def __init__(self, wire: Wire, mesh: jax.sharding.Mesh, pair: Pair, station: Station) -> None:
        self._departure = Departure(wire, mesh)
        self._wire = wire
        self._ranks = station.ranks(pair)
        self._station = station
        sources, targets = wire.transfer.source.devices, wire.transfer.target.devices
        self._cells = [
            (to, sources[position], pair.devices.index(targets[to[0]]))
            for (position, _), to in self._departure.route.first
            if station.owns(sources[position])
        ]
        """Of each cell the receiver, the device that sends it, and the rank that gets it."""

    def zeros(self) -> jax.Array:
        """An array that may leave here."""
        key_impl, dtype, more = words_of(self._wire.dtype)
        sharding = self._departure.sharding
        if key_impl is None:
            return zeros(self._departure.transfer.shape, dtype, sharding)
        spec = PartitionSpec(*sharding.spec, *(None,) * (len(self._departure.transfer.shape) - len(sharding.spec)))
        words = zeros((*self._departure.transfer.shape, *more), dtype, NamedSharding(sharding.mesh, spec))
        return jax.random.wrap_key_data(words, impl=key_impl)

    def send(self, array: jax.Array) -> None:
        """Send the cells of an array: one group."""
        station = self._station
        cells: dict[Receiver, Any] = dict(self._departure.cells(array))
        lent = [
            (device, cells[to], cells[to].__dlpack__(stream=station.stream(device).handle))
            for to, device, _ in self._cells
        ]
        with station.group():
            for (_, device, peer), (_, cell, _) in zip(self._cells, lent, strict=True):
                count, word = _words(cell)
                pointer = cell.unsafe_buffer_pointer()
                self._ranks[device].send(pointer, count, word, peer, station.stream(device))
        for device in dict.fromkeys(device for device, *_ in lent):
            own = [(cell, capsule) for there, cell, capsule in lent if there == device]
            station.lend(device, own, sum(cell.nbytes for cell, _ in own))


class _Incoming:
    """The receiving end of one wire."""

    def __init__(self, wire: Wire, mesh: jax.sharding.Mesh, pair: Pair, station: Station) -> None:
        self._arrival = Arrival(wire, mesh)
        self._ranks = station.ranks(pair)
        self._station = station
        sources, targets = wire.transfer.source.devices, wire.transfer.target.devices
        self._cells = [
            (to, targets[to[0]], pair.devices.index(sources[position]))
            for (position, _), to in self._arrival.route.first
            if station.owns(targets[to[0]])
        ]
        """Of each cell the receiver, its device, and the rank that sends it."""
        self._count = math.prod(self._arrival.route.grid)
        whole = NamedSharding(mesh, PartitionSpec())
        make = partial(_blank, self._arrival.cell.shape, self._arrival.cell.dtype, self._count)
        with jax.disable_jit(False), jax.set_mesh(mesh):  # the one in scope may be the user's
            self._blank = jax.jit(make, out_shardings=(whole,) * self._count).lower().compile()

    def receive(self) -> Posted:
        """Receive the cells: one group."""
        station = self._station
        blanks = _by_device(self._blank()) if self._arrival.transfer.tiles else []
        landings = {
            to: _Landing(blanks[to[1]][station.device(device)], station.stream(device)) for to, device, _ in self._cells
        }
        with station.group():
            for to, device, peer in self._cells:
                memory = landings[to].memory
                count, word = _words(memory)
                pointer = memory.unsafe_buffer_pointer()
                self._ranks[device].receive(pointer, count, word, peer, station.stream(device))
        for device in dict.fromkeys(device for _, device, _ in self._cells):
            own = [landings[to] for to, there, _ in self._cells if there == device]
            mark = station.lend(device, [one.memory for one in own], sum(one.memory.nbytes for one in own))
            for one in own:
                one.mark = mark
        return partial(self._land, landings)

    def _land(self, landings: Mapping[Receiver, _Landing]) -> jax.Array:
        cells = {
            to: jax.dlpack.from_dlpack(landings[to], device=self._station.device(device))
            for to, device, _ in self._cells
        }
        if self._count == 1:
            # What came by DLPack must not be donated; a join makes a new array, where there is something to join.
            cells = {to: cell.copy() for to, cell in cells.items()}
        return self._arrival.land(cells)


class _Landing:
    """Memory into which a stream receives, as DLPack asks for it: whoever reads it waits for ``mark`` first."""

    def __init__(self, memory: Any, stream: Stream) -> None:
        self.memory = memory
        self.mark: Mark | None = None
        # Asked for before the receive is in the stream: it waits until the memory is there.
        self._capsule = memory.__dlpack__(stream=stream.handle)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.memory.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        if self.mark is None:
            raise InternalError("memory is read into which nothing was received; report this")
        self.mark.go_before(stream)
        return self._capsule


def _blank(shape: tuple[int, ...], dtype: Any, count: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros(shape, dtype) for _ in range(count))


def _by_device(arrays: Sequence[jax.Array]) -> list[dict[Any, jax.Array]]:
    return [{shard.device: shard.data for shard in array.addressable_shards} for array in arrays]


def _words(cell: jax.Array) -> tuple[int, Word]:
    """How many words of which size an array is."""
    width = min(cell.dtype.itemsize, Word.EIGHT_BYTES.value)
    return cell.nbytes // width, Word(width)
