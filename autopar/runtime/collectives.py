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
from autopar.plan import Axes
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
    if x.size == 0:  # nothing to send, and StableHLO neither gathers nor scatters along an empty dimension
        return jnp.zeros(_shape_after(x, move, pieces), x.dtype)
    match move.kind:
        case MoveKind.SLICE:
            extent = _piece_extent(x, move.dim, pieces, move)
            return lax.dynamic_slice_in_dim(x, piece_start(move.axes, extent), extent, move.dim)
        case MoveKind.ALL_GATHER:
            if math.prod(x.shape[: move.dim]) == 1:  # pieces lie one after the other as it is
                return _gathered(x, move)
            return lax.platform_dependent(
                x,
                cpu=partial(_gathered_in_order, move=move, pieces=pieces),
                default=partial(_gathered, move=move),
            )
        case MoveKind.ALL_REDUCE:
            return lax.psum(x, move.axes)
        case MoveKind.REDUCE_SCATTER:
            _piece_extent(x, move.dim, pieces, move)
            if math.prod(x.shape[: move.dim]) == 1:  # pieces lie one after the other as it is
                return _scattered(x, move)
            return lax.platform_dependent(
                x,
                cpu=partial(_scattered_in_order, move=move, pieces=pieces),
                default=partial(_scattered, move=move),
            )
        case MoveKind.EXCHANGE_SUM:
            _piece_extent(x, move.dim, pieces, move)
            return _exchanged(x, move, pieces)
        case MoveKind.ALL_TO_ALL:
            _piece_extent(x, move.to_dim, pieces, move)
            return lax.platform_dependent(
                x, cpu=partial(_dealt_in_order, move=move, pieces=pieces), default=partial(_dealt, move=move)
            )
        case MoveKind.MASK:
            return jnp.where(is_first(move.axes), x, jnp.zeros_like(x))


def _shape_after(x: jax.Array, move: Move, pieces: int) -> tuple[int, ...]:
    """Of the shard that a move leaves of ``x``."""
    shape = list(x.shape)
    match move.kind:
        case MoveKind.ALL_GATHER:
            shape[move.dim] *= pieces
        case MoveKind.SLICE | MoveKind.REDUCE_SCATTER | MoveKind.EXCHANGE_SUM:
            shape[move.dim] = _piece_extent(x, move.dim, pieces, move)
        case MoveKind.ALL_TO_ALL:
            shape[move.to_dim] = _piece_extent(x, move.to_dim, pieces, move)
            shape[move.dim] *= pieces
        case MoveKind.ALL_REDUCE | MoveKind.MASK:
            pass
    return tuple(shape)


def _gathered(x: jax.Array, move: Move) -> jax.Array:
    return lax.all_gather(x, move.axes, axis=move.dim, tiled=True)


def _gathered_in_order(x: jax.Array, move: Move, pieces: int) -> jax.Array:
    """The same where pieces do not stand one after the other in the whole: they come so, and are put in their places then.

    XLA:CPU itself would turn each piece and the whole, element by element.  The barrier keeps it from laying out what is gathered
    so that nothing is left to copy, which comes to the same.
    """
    gathered = lax.optimization_barrier(lax.all_gather(x, move.axes, axis=0, tiled=True))
    placed = jnp.moveaxis(gathered.reshape(pieces, *x.shape), 0, move.dim)
    before, extent, after = x.shape[: move.dim], x.shape[move.dim], x.shape[move.dim + 1 :]
    return placed.reshape(*before, pieces * extent, *after)


def _scattered(x: jax.Array, move: Move) -> jax.Array:
    return lax.psum_scatter(x, move.axes, scatter_dimension=move.dim, tiled=True)


def _scattered_in_order(x: jax.Array, move: Move, pieces: int) -> jax.Array:
    """The same where the pieces do not stand one after the other in the whole."""
    return lax.psum_scatter(_cut(x, move.dim, pieces), move.axes)


def _exchanged(x: jax.Array, move: Move, pieces: int) -> jax.Array:
    """The same by hand: every device adds up what it gets from all."""
    return jnp.sum(_swapped(x, move.dim, move, pieces), axis=0, dtype=x.dtype)


def _dealt(x: jax.Array, move: Move) -> jax.Array:
    # The memory of programs for GPUs was held against what compilers make of it behind a barrier.
    return lax.all_to_all(
        lax.optimization_barrier(x), move.axes, split_axis=move.to_dim, concat_axis=move.dim, tiled=True
    )


def _dealt_in_order(x: jax.Array, move: Move, pieces: int) -> jax.Array:
    """The same, of pieces that are cut out once and put together once.

    XLA:CPU itself puts together what came along the dimension that was cut, and copies that into the order that is wanted.
    """
    got = _swapped(x, move.to_dim, move, pieces)
    return lax.concatenate([got[piece] for piece in range(pieces)], move.dim)


def _swapped(x: jax.Array, dim: int, move: Move, pieces: int) -> jax.Array:
    """What every device cut out for this one along a dimension, [pieces, …]."""
    return lax.all_to_all(_cut(x, dim, pieces), move.axes, split_axis=0, concat_axis=0, tiled=True)


def _cut(x: jax.Array, dim: int, pieces: int) -> jax.Array:
    """An array [*before, pieces · extent, *after] as [pieces, *before, extent, *after].

    Slices, for a transposition that says the same XLA:CPU carries out element by element.  The barrier keeps it from changing
    what makes the array for them: it took a transposition into the product that makes a gradient, and merged one into an
    all-to-all so that it refused its own result.
    """
    return jnp.stack(jnp.split(lax.optimization_barrier(x), pieces, axis=dim))


def _piece_extent(x: jax.Array, dim: int, pieces: int, move: Move) -> int:
    extent, rest = divmod(x.shape[dim], pieces)
    if rest:
        raise PlanError(
            f"{move} cuts dimension {dim} of a shard of shape {x.shape} into {pieces} pieces, which is no divisor; "
            "choose a layout whose axes divide the dimension"
        )
    return extent
