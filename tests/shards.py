"""The pieces of an array that is whole on every device, as a layout has them."""

from __future__ import annotations

import jax

from autopar.mesh import Mesh
from autopar.plan import Layout
from autopar.runtime.collectives import apply_moves
from autopar.schedule.reshard import Move, MoveKind


def to_shard(x_full: jax.Array, layout: Layout, mesh: Mesh) -> jax.Array:
    """The local shard of ``x_full``, a copy of which is on every device; of summands, the first device has all.

    Raises :class:`PlanError` if a dimension cannot be cut evenly, or if Booleans or keys should be partial.
    """
    moves = tuple(Move(MoveKind.SLICE, axes, dim) for dim, axes in enumerate(layout.dims) if axes)
    if layout.partial:
        moves = (*moves, Move(MoveKind.MASK, layout.partial))
    return apply_moves(x_full, moves, mesh)
