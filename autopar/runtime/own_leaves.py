"""What does one of several processes put on its devices, of a leaf that all of them are given?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar import _compat
from autopar.errors import TraceError
from autopar.runtime.host_data import HostLeaf
from autopar.runtime.row_reader import RowReader
from autopar.schedule.cross_mesh import Box


class OwnLeaves:
    """Owns the readers of the batches that hosts read for themselves, and what changes the layout of arrays."""

    def __init__(self) -> None:
        self._readers: dict[int, RowReader] = {}
        self._changes: dict[NamedSharding, Callable[[jax.Array], jax.Array]] = {}

    def put(self, leaf: Any, row: int, sharding: NamedSharding, dtype: Any) -> jax.Array:
        """The leaf, or the microbatch ``row`` of it, as an array of that sharding; no memory is shared with the caller's.

        Raises ``TraceError`` for an array that lies in other processes and otherwise than it is wanted.
        """
        if isinstance(leaf, HostLeaf):
            return self._read(leaf, row, sharding, dtype)
        if isinstance(leaf, jax.Array) and row < 0 and leaf.sharding.device_set == sharding.device_set:
            return self._laid_otherwise(leaf, sharding)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not _is_readable(leaf):
            raise TraceError(
                f"an argument of type {leaf.aval.str_short()} lies on devices of other processes "
                f"({leaf.sharding}), and a stage on devices {_numbers(sharding)} reads it. Pass the state that init or the step "
                "has returned, and anything else as NumPy arrays that every process has"
            )
        impl = _compat.key_impl_name(_compat.dtype_name(dtype)) if _compat.is_key_dtype(dtype) else None
        whole = np.asarray(leaf if impl is None else jax.random.key_data(leaf))
        value = np.asarray(whole if row < 0 else whole[row], dtype=dtype if impl is None else None)
        shape = value.shape if impl is None else value.shape[:-1]
        pieces = {box: value[tuple(slice(*ends) for ends in box)] for box in _boxes(sharding, shape).values()}
        return _array(pieces, value.shape, shape, sharding, impl)

    def steps_are_over(self, leaves: Sequence[Any]) -> None:
        """Read for the next step what was read for this one."""
        for token, step in {(one.data.token, one.step) for one in leaves if isinstance(one, HostLeaf)}:
            if token in self._readers:
                self._readers[token].step_is_over(step)

    def _laid_otherwise(self, array: jax.Array, sharding: NamedSharding) -> jax.Array:
        """An array on the same devices, which all their processes change alike."""
        if sharding not in self._changes:
            self._changes[sharding] = jax.jit(lambda x: x, out_shardings=sharding)
        return self._changes[sharding](array)

    def _read(self, leaf: HostLeaf, row: int, sharding: NamedSharding, dtype: Any) -> jax.Array:
        """Only the rows that this process's devices need are read."""
        if leaf.data.token not in self._readers:
            self._readers[leaf.data.token] = RowReader(leaf.data.read, leaf.data.num_leaves)
        reader = self._readers[leaf.data.token]
        shape = leaf.shape if row < 0 else leaf.shape[1:]
        pieces = {}
        for box in set(_boxes(sharding, shape).values()):
            part = leaf.part(row, box)
            rows = np.concatenate([reader.rows(leaf.step, ends, leaf.leaf) for ends in part.ranges])
            rest = tuple(slice(*ends) for ends in part.rest)
            pieces[box] = np.asarray(rows[(slice(None), *rest)], dtype=dtype).reshape(part.shape)
        return _array(pieces, shape, shape, sharding, None)


def _is_readable(leaf: jax.Array) -> bool:
    return leaf.is_fully_replicated and bool(leaf.sharding.addressable_devices)


def _boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Any, Box]:
    """What of an array each device of this process holds."""
    return {
        device: tuple((*one.indices(extent)[:2],) for one, extent in zip(index or (), shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }


def _array(
    pieces: dict[Box, Any], stored: tuple[int, ...], shape: tuple[int, ...], sharding: NamedSharding, impl: str | None
) -> jax.Array:
    """The array of its pieces in this process; of keys with ``impl``, the words of which are ``stored``."""
    boxes = _boxes(sharding, shape)
    arrays = [jax.device_put(pieces[box], device, may_alias=False) for device, box in boxes.items()]
    array = jax.make_array_from_single_device_arrays(stored, sharding, arrays)
    return array if impl is None else jax.random.wrap_key_data(array, impl=impl)


def _numbers(sharding: NamedSharding) -> str:
    return ", ".join(str(device.id) for device in sharding.mesh.devices.flat)
