"""Copies of a state in the memory of one host, for a host that dies (see :mod:`autopar.runtime.replicas`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.errors import WorkerError
from autopar.runtime.collectives import unwrapped
from autopar.runtime.messages import HostPieces, Where
from autopar.schedule.cross_mesh import piece_box

Box = tuple[tuple[int, int], ...]
Pieces = dict[tuple[int, Box], np.ndarray[Any, Any]]
"""Of leaf k the part in a box."""


class KeptCopies:
    """Owns the pieces that lie on this process's devices, of the last step or two that were kept."""

    def __init__(self) -> None:
        self._steps: dict[int, Pieces] = {}

    def keep(self, step: int, leaves: Sequence[tuple[int, jax.Array, Where]], older_than: int) -> None:
        """Copy the pieces of leaves (their numbers, arrays, and where they lie); waits until they are computed."""
        found: Pieces = {}
        for leaf, array, where in leaves:
            words = unwrapped(array)
            placement = where.placement(words.ndim)
            shards = {shard.device: shard.data for shard in words.addressable_shards}
            sharding: Any = words.sharding
            for position, device in enumerate(sharding.mesh.devices.flat):
                if device in shards:
                    box = piece_box(words.shape, placement, position)
                    if (leaf, box) not in found:
                        found[leaf, box] = np.array(shards[device])
        self._steps = {known: pieces for known, pieces in self._steps.items() if known >= older_than} | {step: found}

    def forget(self, step: int) -> None:
        """Drop the copies of a step: what they were made of meant nothing."""
        self._steps.pop(step, None)

    @property
    def steps(self) -> tuple[int, ...]:
        """Those of which there are copies."""
        return tuple(self._steps)

    def give(self, step: int, wanted: Sequence[tuple[int, Box]]) -> Pieces:
        """Some pieces of a step."""
        return {key: self._steps[step][key] for key in wanted}

    def put_together(
        self, step: int, leaf: int, boxes: Sequence[Box], shape: tuple[int, ...], given: Mapping[tuple[int, Box], Any]
    ) -> HostPieces:
        """A leaf for this process's devices, of each of which ``boxes`` says the part; from here, or from what was given."""
        own = self._steps.get(step, {})
        found = [given.get((leaf, box), own.get((leaf, box))) for box in boxes]
        if any(piece is None for piece in found):
            raise WorkerError(f"the copies of step {step} are not complete")
        return HostPieces(shape, tuple(found))
