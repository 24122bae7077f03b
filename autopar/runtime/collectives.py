"""How a layout changes while the program runs: each move is at most one collective on local shards.

Everything here is called while tracing inside a ``jax.shard_map`` that is manual over all mesh axes.  Several axes
(in mesh order) act as one of the product size: device (i, j) on axes of sizes (m, n) has index i·n + j, and holds the
piece of that index.  Typed PRNG keys travel as their words.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from autopar.cluster import Mesh
from autopar.errors import PlanError
from autopar.plan import Axes, Layout
from autopar.schedule.reshard import SCATTERS, Move, MoveKind

_OF_SUMMANDS = frozenset((MoveKind.ALL_REDUCE, MoveKind.MASK)) | SCATTERS


def apply_moves(x: jax.Array, moves: tuple[Move, ...], mesh: Mesh) -> jax.Array:
    """The local shard after ``moves``, given the local shard ``x`` before them.

    Raises :class:`PlanError` if a dimension cannot be cut evenly or if Booleans or keys should be summed.
    """
    if not moves:
        return x
    if is_key(x):
        if any(move.kind in _OF_SUMMANDS for move in moves):
            raise PlanError(f"keys of type {x.dtype} cannot be partial sums; give them a layout without partial axes")
        words = apply_moves(jax.random.key_data(x), moves, mesh)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    for move in moves:
        x = _apply(x, move, mesh)
    return x


def to_shard(x_full: jax.Array, layout: Layout, mesh: Mesh) -> jax.Array:
    """The local shard of ``x_full``, a copy of which is on every device; of summands, the first device has all.

    Raises :class:`PlanError` if a dimension cannot be cut evenly, or if Booleans or keys should be partial.
    """
    moves = tuple(Move(MoveKind.SLICE, axes, dim) for dim, axes in enumerate(layout.dims) if axes)
    if layout.partial:
        moves = (*moves, Move(MoveKind.MASK, layout.partial))
    return apply_moves(x_full, moves, mesh)


def is_first(axes: Axes) -> jax.Array:
    """Whether this device has index 0 on ``axes`` (a scalar Boolean)."""
    return lax.axis_index(axes) == 0


def is_key(x: jax.Array) -> bool:
    """Whether ``x`` is an array of typed PRNG keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def unwrapped(array: jax.Array) -> Any:
    """The array, or the words of keys: an array of numbers, which can do what JAX's arrays of keys cannot."""
    return jax.random.key_data(array) if is_key(array) else array


def piece_start(axes: Axes, extent: int) -> jax.Array:
    """Where this device's piece begins in a dimension cut by ``axes`` into pieces of ``extent`` elements (int32)."""
    return lax.axis_index(axes) * extent


def _apply(x: jax.Array, move: Move, mesh: Mesh) -> jax.Array:
    if move.kind in _OF_SUMMANDS and x.dtype == jnp.bool_:
        raise PlanError(f"{move} would sum Booleans; give the value a layout without partial axes")
    pieces = mesh.axis_size(*move.axes)
    match move.kind:
        case MoveKind.SLICE:
            extent = _piece_extent(x, move.dim, pieces, move)
            return lax.dynamic_slice_in_dim(x, piece_start(move.axes, extent), extent, move.dim)
        case MoveKind.ALL_GATHER:
            return lax.all_gather(x, move.axes, axis=move.dim, tiled=True)
        case MoveKind.ALL_REDUCE:
            return lax.psum(x, move.axes)
        case MoveKind.REDUCE_SCATTER:
            _piece_extent(x, move.dim, pieces, move)
            if math.prod(x.shape[: move.dim]) == 1:  # pieces lie one after the other as it is
                return _scattered(x, move)
            return lax.platform_dependent(
                x, cpu=partial(_scattered_in_order, move=move), default=partial(_scattered, move=move)
            )
        case MoveKind.EXCHANGE_SUM:
            return _exchanged(x, move, _piece_extent(x, move.dim, pieces, move))
        case MoveKind.ALL_TO_ALL:
            _piece_extent(x, move.to_dim, pieces, move)
            # XLA:CPU else merges a transposition into it and refuses its own result.
            return lax.all_to_all(
                lax.optimization_barrier(x), move.axes, split_axis=move.to_dim, concat_axis=move.dim, tiled=True
            )
        case MoveKind.MASK:
            return jnp.where(is_first(move.axes), x, jnp.zeros_like(x))


def _scattered(x: jax.Array, move: Move) -> jax.Array:
    return lax.psum_scatter(x, move.axes, scatter_dimension=move.dim, tiled=True)


def _scattered_in_order(x: jax.Array, move: Move) -> jax.Array:
    """The same where pieces must lie one after the other, so that the whole array is copied into another order first.

    XLA:CPU turns an array by tiles if it is told to transpose a matrix, and element by element if it finds out by itself.
    """
    before, after = x.shape[: move.dim], x.shape[move.dim :]
    turned = _turned(x, before, after).reshape(*after, *before)
    piece = lax.psum_scatter(turned, move.axes, scatter_dimension=0, tiled=True)
    return _turned_back(piece, before, after[1:])


def _exchanged(x: jax.Array, move: Move, extent: int) -> jax.Array:
    """The same by hand: every device sends to each other one the piece that is kept there, and adds up what it gets."""
    before, after = x.shape[: move.dim], x.shape[move.dim :]
    turned = _turned(x, before, after).reshape(-1, extent, *after[1:], *before)
    got = lax.all_to_all(lax.optimization_barrier(turned), move.axes, split_axis=0, concat_axis=0, tiled=True)
    return _turned_back(jnp.sum(got, axis=0, dtype=x.dtype), before, after[1:])


def _turned(x: jax.Array, before: tuple[int, ...], after: tuple[int, ...]) -> jax.Array:
    """An array [*before, *after] as a matrix [after, before].

    Were it not for the barrier, XLA:CPU would take the transposition into the product that makes the array (a gradient of
    weights), and read both operands of that across: up to twice as long, where the copy costs the same however much is
    summed over.
    """
    return lax.optimization_barrier(x).reshape(math.prod(before), math.prod(after)).T


def _turned_back(piece: jax.Array, before: tuple[int, ...], behind: tuple[int, ...]) -> jax.Array:
    """A piece [extent, *behind, *before] as [*before, extent, *behind]."""
    return piece.reshape(-1, math.prod(before)).T.reshape(*before, piece.shape[0], *behind)


def _piece_extent(x: jax.Array, dim: int, pieces: int, move: Move) -> int:
    extent, rest = divmod(x.shape[dim], pieces)
    if rest:
        raise PlanError(
            f"{move} cuts dimension {dim} of a shard of shape {x.shape} into {pieces} pieces, which is no divisor; "
            "choose a layout whose axes divide the dimension"
        )
    return extent
