"""What do the two ends of a wire do, however its cells travel between them?

    departure      array on the sending mesh → cells, each on the device that sends it
    arrival        cells, each on the device that wants it → array on the receiving mesh

A transport between processes carries the cells of ``route.first`` from one to the other; what receivers pass on to each other
(``route.relays``) stays inside the receiving process.  Typed PRNG keys travel as their words.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar import _compat
from autopar.runtime.collectives import unwrapped
from autopar.runtime.cross_mesh import Cutter, Joiner, Receiver, check_departure, route_of
from autopar.runtime.shipment import Wire


class Departure:
    """The sending end of one wire, in one process of its mesh."""

    def __init__(self, wire: Wire, mesh: jax.sharding.Mesh) -> None:
        self.transfer = wire.transfer
        self.route = route_of(wire.transfer)
        # A cut makes new arrays; what is sent as it is must be copied if a program will take its memory over.
        self._copies = wire.is_donated and self.route.is_whole
        self._cutter = Cutter(wire.transfer, self.route, mesh)

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """How an array lies that leaves here."""
        return self._cutter.sharding

    def cells(self, array: jax.Array) -> dict[Receiver, jax.Array]:
        """Every cell that leaves a device of this process, by where it goes; their memory is nobody else's to take over."""
        check_departure(self.transfer, self._cutter.sharding, array)
        if not self.transfer.tiles:
            return {}
        cells = self._cutter.cells(unwrapped(array))
        if not self._copies:
            return cells
        there = [cell.device for cell in cells.values()]
        return dict(zip(cells, jax.device_put(list(cells.values()), there, may_alias=False), strict=True))


class Arrival:
    """The receiving end of one wire, in one process of its mesh; ``cell`` is the shape and dtype of what travels."""

    def __init__(self, wire: Wire, mesh: jax.sharding.Mesh) -> None:
        self.transfer = wire.transfer
        self.route = route_of(wire.transfer)
        self._joiner = Joiner(wire.transfer, self.route, mesh)
        self._key_impl, dtype, self._more = words_of(wire.dtype)
        self.cell = jax.ShapeDtypeStruct((*wire.transfer.tile_shape, *self._more), dtype)

    def land(self, cells: dict[Receiver, jax.Array]) -> jax.Array:
        """The landed array of the cells that have come from other processes; it adds those that are passed on here."""
        shape = (*self.transfer.shape, *self._more)
        if self.transfer.tiles:
            self._joiner.relay(cells)
            whole = self._joiner.join(cells, shape)
        else:
            whole = zeros(shape, self.cell.dtype, self._joiner.sharding)
        return whole if self._key_impl is None else jax.random.wrap_key_data(whole, impl=self._key_impl)


def zeros(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    """An array of zeros over devices of which some may be in other processes."""
    return jax.make_array_from_callback(shape, sharding, lambda index: np.zeros(shape, dtype)[index])


def warm(mesh: jax.sharding.Mesh) -> None:
    """Run one small sum over every group of a mesh's axes: its processes make their communicators now, all of them at once."""
    sharding = NamedSharding(mesh, PartitionSpec())
    for count in range(1, len(mesh.axis_names) + 1):
        for axes in itertools.combinations(mesh.axis_names, count):
            sums = partial(jax.lax.psum, axis_name=axes)
            total = jax.shard_map(sums, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
            jax.block_until_ready(jax.jit(total)(zeros((1,), "float32", sharding)))


def words_of(dtype: str) -> tuple[str | None, np.dtype[Any], tuple[int, ...]]:
    """Implementation of keys (None: no keys), type of the words that travel, and their dimensions behind the others."""
    if not dtype.startswith("key<"):
        return None, jax.numpy.dtype(dtype), ()
    impl = _compat.key_impl_name(dtype)
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return impl, words.dtype, words.shape
