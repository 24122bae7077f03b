"""An array whose pieces along one dimension lie on several meshes: the stacked parameters of layers that stages share.

    a = p₀ ⧺ p₁ ⧺ … ⧺ pₙ          along dimension ``dim``; each piece is a ``jax.Array``, or lies on a mesh of other processes

A step takes the pieces as they are and returns others.  The whole exists nowhere until it is asked for, in host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from autopar import _compat
from autopar.errors import TraceError
from autopar.runtime.distributed_array import DistributedArray, RemoteArray

Piece = jax.Array | RemoteArray


class PiecedArray(DistributedArray):
    """See the module docstring."""

    __slots__ = ("dim", "pieces")

    def __init__(self, pieces: Sequence[Piece], dim: int) -> None:
        """``pieces`` agree on all but their extent along ``dim``."""
        first = _compat.aval_of(pieces[0])
        extent = sum(piece.shape[dim] for piece in pieces)
        shape = (*first.shape[:dim], extent, *first.shape[dim + 1 :])
        whole = jax.ShapeDtypeStruct(shape, first.dtype, weak_type=_compat.is_weak(first))
        super().__init__(_compat.aval_of(whole))
        self.dim = dim
        self.pieces = tuple(pieces)

    @property
    def ends(self) -> tuple[int, ...]:
        """Where the pieces end along the dimension."""
        return tuple(int(end) for end in np.cumsum([piece.shape[self.dim] for piece in self.pieces]))

    @property
    def shardings(self) -> tuple[Any, ...]:
        """Of the pieces that are ``jax.Array``: how they are sharded; of others: where they lie."""
        return tuple(piece.sharding if isinstance(piece, jax.Array) else piece.where for piece in self.pieces)

    def __repr__(self) -> str:
        said, begin = [], 0
        for place, those in itertools.groupby(zip(self.pieces, self.ends, strict=True), lambda pair: _place(pair[0])):
            *_, (_, end) = those
            said.append(f"[{':, ' * self.dim}{begin}:{end}] on {place}")
            begin = end
        state = ", deleted" if self.is_deleted() else ""
        return f"DistributedArray({self.aval.str_short()}, {'; '.join(said)}{state})"

    def is_deleted(self) -> bool:
        """Whether the memory of any piece was given back, or taken over by a step."""
        return any(piece.is_deleted() for piece in self.pieces)

    def delete(self) -> None:
        """Give the memory of all pieces back now."""
        for piece in self.pieces:
            piece.delete()

    def block_until_ready(self) -> PiecedArray:
        """Wait until all pieces are computed."""
        self._check()
        for piece in self.pieces:
            piece.block_until_ready()
        return self

    def words(self) -> np.ndarray[Any, Any]:
        """The value, put together in host memory; of typed keys, the words."""
        self._check()
        return np.concatenate([_words(piece) for piece in self.pieces], self.dim)

    def _check(self) -> None:
        if self.is_deleted():
            raise TraceError(
                f"{self!r} has no value any more. Pass on the state that the step returns, or keep the old one with "
                "parallelize(..., donate_argnums=())."
            )


def _words(piece: Piece) -> np.ndarray[Any, Any]:
    if isinstance(piece, RemoteArray):
        return piece.words()
    return np.asarray(jax.random.key_data(piece) if _compat.is_key_dtype(piece.dtype) else piece)


def _place(piece: Piece) -> str:
    if isinstance(piece, RemoteArray):
        devices, mesh = piece.where.devices, f"{piece.where.layout} on {piece.where.mesh}, "
        return f"{mesh}devices {', '.join(map(str, devices))}"
    here: set[Any] = piece.sharding.device_set
    return f"devices {', '.join(map(str, sorted(device.id for device in here)))}"


def cut(leaf: Any, dim: int, ends: Sequence[int]) -> list[Any]:
    """The pieces of an array along a dimension: its own where it has such, else sliced out."""
    if isinstance(leaf, PiecedArray) and (leaf.dim, leaf.ends) == (dim, tuple(ends)):
        return list(leaf.pieces)
    leaf = whole(leaf)
    starts = (0, *ends[:-1])
    if isinstance(leaf, jax.Array):
        return [lax.slice_in_dim(leaf, begin, end, axis=dim) for begin, end in zip(starts, ends, strict=True)]
    array, before = np.asarray(leaf), (slice(None),) * dim
    return [array[(*before, slice(begin, end))] for begin, end in zip(starts, ends, strict=True)]


def whole(leaf: Any) -> Any:
    """An array that is in pieces, or lies elsewhere, in this process; anything else as it is."""
    if not isinstance(leaf, DistributedArray):
        return leaf
    return leaf.__jax_array__() if _compat.is_key_dtype(leaf.dtype) else leaf.words()


Grouping = tuple[tuple[int, int] | None, ...]
"""Of each leaf that is in pieces how many, and along which dimension."""


def taken_apart(leaves: Sequence[Any]) -> tuple[list[Any], Grouping]:
    """Leaves with pieced arrays replaced by their pieces, and what :func:`put_together` has to know."""
    found: list[Any] = []
    for leaf in leaves:
        found += leaf.pieces if isinstance(leaf, PiecedArray) else [leaf]
    return found, tuple((len(one.pieces), one.dim) if isinstance(one, PiecedArray) else None for one in leaves)


def put_together(parts: Sequence[Any], grouping: Grouping) -> list[Any]:
    """The leaves again."""
    rest = iter(parts)
    return [
        next(rest) if group is None else PiecedArray([next(rest) for _ in range(group[0])], group[1])
        for group in grouping
    ]
