"""How does a leaf that a step is given come onto the devices that read it?

    the leaf                                  how
    lies there as it is wanted                as it is
    lies on the same devices, cut otherwise   :func:`relaid`, by a program that all their processes run
    is to lie on devices of this process      :meth:`Place.put`, by JAX
    is to lie on those of several processes   :func:`arrays_of`: each process puts the pieces of its own devices, which it was
                                              sent, reads (:func:`pieces_by`), or cuts out of the value (:func:`pieces_of`)

What a program takes the memory of, a donated leaf, is shared with nobody: neither with the caller nor with another leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar import _compat
from autopar.runtime.distributed_array import DistributedArray
from autopar.runtime.messages import HostPieces
from autopar.schedule.cross_mesh import Box


@dataclass(frozen=True)
class Place:
    """Where a leaf is read, all in this process: how it is stored there, and whether a result takes its memory over."""

    sharding: NamedSharding
    dtype: Any
    is_donated: bool = False

    def put(self, leaf: Any, *, is_given_twice: bool = False) -> jax.Array:
        """The leaf there; ``is_given_twice`` says that the step gets it as another leaf too."""
        if not isinstance(leaf, jax.Array):
            leaf = np.asarray(leaf, dtype=self.dtype)
        else:
            lies_there = leaf.sharding == self.sharding
            if self.is_donated and (is_given_twice or not lies_there):
                leaf = leaf.copy()  # device_put would share the piece that stays where it is
            if lies_there:
                return leaf
        return jax.device_put(leaf, self.sharding, may_alias=False if self.is_donated else None)


def given_twice(leaves: Sequence[Any]) -> frozenset[int]:
    """The ids of objects that are several of the leaves."""
    return frozenset(one for one, times in Counter(map(id, leaves)).items() if times > 1)


def lies_so(leaf: jax.Array, sharding: NamedSharding) -> bool:
    """Whether an array lies so, on the same devices."""
    same_devices: bool = leaf.sharding.device_set == sharding.device_set
    return same_devices and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def relaid(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array in another layout on its devices; all their processes call this."""
    return jax.jit(_as_it_is, out_shardings=sharding)(array)


def _as_it_is(array: jax.Array) -> jax.Array:
    return array  # of the module, so that JAX knows the program again


def as_numpy(leaf: Any, row: int, dtype: Any) -> tuple[np.ndarray[Any, Any], str | None]:
    """A leaf, or its microbatch ``row`` (negative: all of it), in a dtype; of typed keys the words, and how they are made."""
    is_key = _compat.is_key_dtype(dtype)
    if is_key:
        leaf = jax.random.key_data(leaf.__jax_array__() if isinstance(leaf, DistributedArray) else leaf)
    value = np.asarray(leaf)
    value = value if row < 0 else value[row]
    return (value, _compat.key_impl_name(_compat.dtype_name(dtype))) if is_key else (np.asarray(value, dtype), None)


def pieces_of(value: np.ndarray[Any, Any], sharding: NamedSharding, key_impl: str | None) -> HostPieces:
    """What this process's devices hold of a value; of typed keys it is the words."""
    pieces = pieces_by(lambda box: value[tuple(slice(*ends) for ends in box)], value.shape, sharding)
    return replace(pieces, key_impl=key_impl)


def pieces_by(
    piece: Callable[[Box], np.ndarray[Any, Any]], shape: tuple[int, ...], sharding: NamedSharding
) -> HostPieces:
    """What this process's devices hold of an array; ``piece`` is asked for each part once."""
    indices = sharding.addressable_devices_indices_map(shape)
    boxes: list[Box] = [
        tuple((*one.indices(extent)[:2],) for one, extent in zip(indices[device] or (), shape, strict=True))
        for device in own_devices(sharding)
    ]
    found = {box: piece(box) for box in dict.fromkeys(boxes)}
    return HostPieces(shape, tuple(found[box] for box in boxes))


def arrays_of(given: Sequence[tuple[HostPieces, NamedSharding]]) -> list[jax.Array]:
    """Arrays of this process's pieces, which are all put in one call: each costs half a millisecond."""
    devices = [own_devices(sharding) for _, sharding in given]
    there = jax.device_put([list(pieces.pieces) for pieces, _ in given], devices, may_alias=False)
    made = [
        (jax.make_array_from_single_device_arrays(pieces.shape, sharding, arrays), pieces.key_impl)
        for (pieces, sharding), arrays in zip(given, there, strict=True)
    ]
    return [array if impl is None else jax.random.wrap_key_data(array, impl=impl) for array, impl in made]


def own_devices(sharding: NamedSharding) -> list[Any]:
    """The devices of this process, in the order of the mesh."""
    own = jax.process_index()
    return [device for device in sharding.mesh.devices.flat if device.process_index == own]
