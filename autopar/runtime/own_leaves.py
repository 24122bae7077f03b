"""What does one of several processes put on its devices, of a leaf that all of them are given?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.errors import TraceError
from autopar.runtime.host_data import HostLeaf
from autopar.runtime.on_devices import arrays_of, as_numpy, pieces_by, pieces_of, relaid
from autopar.runtime.row_reader import RowReader


class OwnLeaves:
    """Owns the readers of the batches that hosts read for themselves."""

    def __init__(self) -> None:
        self._readers: dict[int, RowReader] = {}

    def put(self, leaf: Any, row: int, sharding: NamedSharding, dtype: Any) -> jax.Array:
        """The leaf, or the microbatch ``row`` of it, as an array of that sharding; no memory is shared with the caller's.

        Raises ``TraceError`` for an array that lies in other processes and otherwise than it is wanted.
        """
        if isinstance(leaf, jax.Array) and row < 0 and leaf.sharding.device_set == sharding.device_set:
            return relaid(leaf, sharding)
        if isinstance(leaf, HostLeaf):
            reader, shape = self._reader(leaf), leaf.shape if row < 0 else leaf.shape[1:]
            pieces = pieces_by(
                lambda box: reader.part(leaf.step, leaf.leaf, leaf.part(row, box), dtype), shape, sharding
            )
        else:
            _check_readable(leaf, sharding)
            value, key_impl = as_numpy(leaf, row, dtype)
            pieces = pieces_of(value, sharding, key_impl)
        (array,) = arrays_of([(pieces, sharding)])
        return array

    def steps_are_over(self, leaves: Sequence[Any]) -> None:
        """Read for the next step what was read for this one."""
        for token, step in {(one.data.token, one.step) for one in leaves if isinstance(one, HostLeaf)}:
            if token in self._readers:
                self._readers[token].step_is_over(step)

    def _reader(self, leaf: HostLeaf) -> RowReader:
        if leaf.data.token not in self._readers:
            self._readers[leaf.data.token] = RowReader(leaf.data.read, leaf.data.num_leaves)
        return self._readers[leaf.data.token]


def _check_readable(leaf: Any, sharding: NamedSharding) -> None:
    """Raise ``TraceError`` for an array of which a part lies in other processes only."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return
    if leaf.is_fully_replicated and leaf.sharding.addressable_devices:
        return
    wanted = ", ".join(str(device.id) for device in sharding.mesh.devices.flat)
    raise TraceError(
        f"an argument of type {leaf.aval.str_short()} lies on devices of other processes ({leaf.sharding}), and a stage on "
        f"devices {wanted} reads it. Pass the state that init or the step has returned, anything else as NumPy arrays that every "
        "process has"
    )
