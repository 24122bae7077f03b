"""Carry out one transfer between meshes of one process: how do tiles get out of source shards and into landed ones?

With ``k`` the most cells that one source device sends and ``m`` the cells of a landed piece:

    cut     one program on the source mesh: every shard → its ``k`` cells        (not if a shard is one cell)
    put     one ``jax.device_put`` of all cells at once, one more for those that receivers pass on
    join    one program on the target mesh: ``m`` cells of every device → its landed piece    (not if m = 1)

What runs on the target mesh is started by whoever drives that mesh: two threads that start programs on the same devices may
start them in different orders on different devices, which then wait for each other for ever.

All of it is asynchronous.  A plain ``jax.device_put`` of the whole array is so only where every device's piece goes to the
device at the same position of a disjoint mesh of as many; there it is a little quicker, and is used.  Else it waits for
the source, fetches it to the host and lends the host's memory to the target.

The source may be donated or deleted as soon as the call has returned: ``device_put`` to another device holds on to its
operand until it is copied, and a cell that stays on its device is copied there (``may_alias=False``, where no cut has
already made a copy).  Typed PRNG keys travel as their words.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import ClusterError, InternalError
from autopar.runtime.collectives import is_key
from autopar.runtime.executor import device_mesh, partition_spec
from autopar.runtime.run_ahead import Started, freely, telling
from autopar.schedule.cross_mesh import Box, CrossMeshTransfer, Placement, piece_box
from autopar.schedule.reshard import local_shape

Receiver = tuple[int, int]
"""Position of a device on the target mesh, and the number of a cell of its landed piece."""


def placed_mesh(placement: Placement, devices: Sequence[Any]) -> jax.sharding.Mesh:
    """The JAX mesh of a placement; ``devices[i]`` is the JAX device with global id ``i``.

    Raises ``ClusterError`` if there are too few devices.
    """
    if max(placement.devices) >= len(devices):
        raise ClusterError(
            f"a transfer names device {max(placement.devices)}, but this process has {len(devices)} devices; plan for this "
            "cluster"
        )
    return device_mesh(placement.mesh, [devices[number] for number in placement.devices])


@dataclass(frozen=True)
class Route:
    """Which cells go where; devices are positions on their meshes, a slot is the number of a cell on a device.

    ``first`` and ``relays`` hold (position and slot of the sender, position and slot of the receiver); a relay's sender is a
    position on the target mesh.  ``starts[position][slot]`` is where a cell begins in the source's shard.
    """

    first: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    relays: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    starts: tuple[tuple[tuple[int, ...], ...], ...]
    is_whole: bool
    """Whether every shard of the source is one cell."""
    grid: tuple[int, ...]
    """How many cells make a landed piece, in every dimension."""


def route_of(transfer: CrossMeshTransfer) -> Route:
    """The way of every cell of a transfer; of an array without elements there are none."""
    shape, cell_shape = transfer.shape, transfer.tile_shape
    if not transfer.tiles:
        return Route((), (), (), True, ())
    source, landed = transfer.source, transfer.landed
    from_place = {device: place for place, device in enumerate(source.devices)}
    to_place = {device: place for place, device in enumerate(landed.devices)}
    grid = _ratio(local_shape(shape, landed.layout, landed.mesh), cell_shape)
    starts: list[list[tuple[int, ...]]] = [[] for _ in source.devices]
    first, relays = [], []
    for tile in transfer.tiles:
        receiver = to_place[tile.receiver]
        to = receiver, _slot(tile.box, piece_box(shape, landed, receiver), cell_shape, grid)
        if tile.relayed:
            relays.append(((to_place[tile.sender], to[1]), to))
            continue
        sender = from_place[tile.sender]
        begin = tuple(a - b for (a, _), (b, _) in zip(tile.box, piece_box(shape, source, sender), strict=True))
        if begin not in starts[sender]:
            starts[sender].append(begin)
        first.append(((sender, starts[sender].index(begin)), to))
    most = max(map(len, starts))
    for own in starts:
        own += [(0,) * len(shape)] * (most - len(own))
    is_whole = local_shape(shape, source.layout, source.mesh) == cell_shape
    return Route(tuple(first), tuple(relays), tuple(map(tuple, starts)), is_whole, grid)


def _is_one_to_one(transfer: CrossMeshTransfer) -> bool:
    """Whether the devices of two disjoint meshes of one size hold the same pieces in the same order."""
    source, landed = transfer.source, transfer.landed
    return (
        source.mesh.size == landed.mesh.size
        and not set(source.devices) & set(landed.devices)
        and source.pieces() == landed.pieces()
        and all(source.piece(place) == landed.piece(place) for place in range(source.mesh.size))
    )


def _ratio(extents: tuple[int, ...], parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent // part for extent, part in zip(extents, parts, strict=True))


def _slot(box: Box, piece: Box, cell_shape: tuple[int, ...], grid: tuple[int, ...]) -> int:
    """The row-major number of a cell in a landed piece."""
    number = 0
    for (start, _), (origin, _), extent, count in zip(box, piece, cell_shape, grid, strict=True):
        number = number * count + (start - origin) // extent
    return number


@dataclass(frozen=True)
class Sent:
    """An array on its way: already ``whole`` on the target mesh, or in ``cells`` by the position and slot of receivers.

    ``shape`` and both are those of its words, where it is an array of keys.
    """

    shape: tuple[int, ...]
    key_impl: Any
    whole: jax.Array | None
    cells: Mapping[Receiver, jax.Array] = field(default_factory=dict)


class _Programs:
    """Owns what was compiled for one end of a transfer, a program for each dtype and shape; may be asked by several threads."""

    def __init__(self, mesh: jax.sharding.Mesh, started: Started) -> None:
        self._mesh, self._started = mesh, started
        self._compiled: dict[tuple[Any, tuple[int, ...]], Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def get(
        self, local: Callable[..., Any], operands: Sequence[Any], in_spec: PartitionSpec, out_specs: Any
    ) -> Callable[..., Any]:
        """The compiled program of every device's part, made once for a dtype and shape."""
        first = operands[0]
        with self._lock:
            if (found := self._compiled.get((first.dtype, first.shape))) is None:
                in_specs = (in_spec,) * len(operands)
                program = jax.shard_map(local, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
                wanted = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding) for one in operands]
                with jax.set_mesh(self._mesh):  # the one in scope may be the user's
                    found = telling(jax.jit(program).lower(*wanted).compile(), self._started)
                self._compiled[first.dtype, first.shape] = found
        return found


class Cutter:
    """The sending end of a transfer: cuts an array on the source mesh into the cells that leave."""

    def __init__(
        self, transfer: CrossMeshTransfer, route: Route, mesh: jax.sharding.Mesh, started: Started = freely
    ) -> None:
        self._transfer, self._route, self._mesh = transfer, route, mesh
        self.sharding = NamedSharding(mesh, partition_spec(transfer.source.layout))
        self._programs = _Programs(mesh, started)

    def cells(self, array: jax.Array) -> dict[Receiver, jax.Array]:
        """Every cell that leaves a device of this process, on that device, by where it goes."""
        sent = [array] if self._route.is_whole else self._cut(array)
        of_sender = [_by_position(one, self._mesh) for one in sent]
        return {
            to: of_sender[slot][position] for (position, slot), to in self._route.first if position in of_sender[slot]
        }

    def _cut(self, array: jax.Array) -> list[jax.Array]:
        """Arrays over the source mesh, each with one cell of every device."""
        cell = (*self._transfer.tile_shape, *array.shape[len(self._transfer.shape) :])
        more = len(cell) - len(self._transfer.tile_shape)
        table = np.array([[(*start, *(0,) * more) for start in own] for own in self._route.starts], dtype=np.int32)
        axis_names = self._mesh.axis_names

        def local(shard: jax.Array) -> tuple[jax.Array, ...]:
            starts = jnp.asarray(table)[lax.axis_index(axis_names)]
            return tuple(lax.dynamic_slice(shard, list(start), cell) for start in starts)

        program = self._programs.get(local, [array], self.sharding.spec, (PartitionSpec(axis_names),) * table.shape[1])
        return list(program(array))


class Joiner:
    """The receiving end of a transfer: makes the landed array of the cells that have come."""

    def __init__(
        self, transfer: CrossMeshTransfer, route: Route, mesh: jax.sharding.Mesh, started: Started = freely
    ) -> None:
        self._route, self._mesh = route, mesh
        self.sharding = NamedSharding(mesh, partition_spec(transfer.landing))
        self._programs = _Programs(mesh, started)
        own = jax.process_index()
        self.positions = [place for place, device in enumerate(mesh.devices.flat) if device.process_index == own]
        """Positions of the mesh that are devices of this process."""

    def relay(self, cells: dict[Receiver, jax.Array]) -> None:
        """Add the cells that devices of this process pass on to each other."""
        devices, own = list(self._mesh.devices.flat), set(self.positions)
        _put({to: cells[origin] for origin, to in self._route.relays if to[0] in own}, cells, devices)

    def join(self, cells: Mapping[Receiver, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """The landed array of that shape, from the cells of every device of this process."""
        grid, mesh = self._route.grid, self._mesh
        count = int(np.prod(grid, dtype=int))
        rows = [[cells[position, slot] for position in self.positions] for slot in range(count)]
        if count == 1:
            return jax.make_array_from_single_device_arrays(shape, self.sharding, rows[0])
        spec = PartitionSpec(mesh.axis_names)
        cell = rows[0][0].shape
        whole = (cell[0] * mesh.size, *cell[1:])
        operands = [jax.make_array_from_single_device_arrays(whole, NamedSharding(mesh, spec), row) for row in rows]
        program = self._programs.get(
            lambda *parts: _concatenated(list(parts), grid), operands, spec, self.sharding.spec
        )
        return program(*operands)


class Mover:
    """Carries arrays along one transfer; safe to call from several threads.

    Programs are compiled at the first array of a dtype.
    """

    def __init__(
        self, transfer: CrossMeshTransfer, devices: Sequence[Any], started: tuple[Started, Started] = (freely, freely)
    ) -> None:
        """``started`` is told of programs on the source mesh, and of those on the target mesh."""
        source_mesh, self._target_mesh = placed_mesh(transfer.source, devices), placed_mesh(transfer.target, devices)
        self._transfer = transfer
        self._route = route_of(transfer)
        self._cutter = Cutter(transfer, self._route, source_mesh, started[0])
        self._joiner = Joiner(transfer, self._route, self._target_mesh, started[1])
        self.source_sharding, self.landing_sharding = self._cutter.sharding, self._joiner.sharding
        self._is_one_to_one = _is_one_to_one(transfer)

    def __call__(self, array: jax.Array) -> jax.Array:
        """:meth:`send`, then :meth:`land`: where one thread drives both meshes."""
        return self.land(self.send(array))

    def send(self, array: jax.Array) -> Sent:
        """Put an array on its way, without waiting for it; nothing is run on the target mesh.

        Raises ``InternalError`` for an array of another shape or another sharding than the transfer's source.
        """
        check_departure(self._transfer, self.source_sharding, array)
        with jax.disable_jit(False):
            if not is_key(array):
                return self._send(array, None)
            return self._send(jax.random.key_data(array), jax.random.key_impl(array))

    def land(self, sent: Sent) -> jax.Array:
        """The array in its landing layout on the target mesh, whose thread must call this."""
        with jax.disable_jit(False):
            whole = self._joiner.join(sent.cells, sent.shape) if sent.whole is None else sent.whole
            return whole if sent.key_impl is None else jax.random.wrap_key_data(whole, impl=sent.key_impl)

    def _send(self, array: jax.Array, key_impl: Any) -> Sent:
        if not self._transfer.tiles:
            return Sent(
                array.shape, key_impl, jax.device_put(np.zeros(array.shape, array.dtype), self.landing_sharding)
            )
        if self._is_one_to_one:
            return Sent(array.shape, key_impl, jax.device_put(array, self.landing_sharding))
        cells: dict[Receiver, jax.Array] = {}
        may_alias = False if self._route.is_whole else None
        _put(self._cutter.cells(array), cells, list(self._target_mesh.devices.flat), may_alias=may_alias)
        self._joiner.relay(cells)
        return Sent(array.shape, key_impl, None, cells)


def check_departure(transfer: CrossMeshTransfer, expected: NamedSharding, array: jax.Array) -> None:
    """Refuse an array of another shape or another sharding than the transfer's source; raises ``InternalError``."""
    if array.shape != transfer.shape or not array.sharding.is_equivalent_to(expected, array.ndim):
        raise InternalError(
            f"an array of shape {array.shape} lies as {array.sharding}, but its transfer begins with shape "
            f"{transfer.shape} and {expected}; report this with the program"
        )


def _by_position(array: jax.Array, mesh: jax.sharding.Mesh) -> dict[int, jax.Array]:
    """The shards of an array that are in this process, by their position on a mesh."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    return {place: shards[device] for place, device in enumerate(mesh.devices.flat) if device in shards}


def _put(
    sent: dict[Receiver, jax.Array],
    cells: dict[Receiver, jax.Array],
    target_devices: list[Any],
    *,
    may_alias: bool | None = None,
) -> None:
    """Put cells, by the position and slot of their receivers, on those; all at once."""
    if sent:
        to = [target_devices[position] for position, _ in sent]
        cells.update(zip(sent, jax.device_put(list(sent.values()), to, may_alias=may_alias), strict=True))


def _concatenated(cells: list[jax.Array], grid: tuple[int, ...]) -> jax.Array:
    """The cells of a grid in row-major order as one array."""
    for dim in reversed(range(len(grid))):
        if (count := grid[dim]) > 1:
            cells = [jnp.concatenate(cells[n : n + count], axis=dim) for n in range(0, len(cells), count)]
    return cells[0]
