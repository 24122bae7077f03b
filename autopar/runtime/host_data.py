"""Batches that every host reads for itself: of a batch only the rows that its own devices need.

A driver that sends each batch to all hosts is simple, and soon the slowest part of a step.  Instead the step may be given leaves
without values, which say how to come by them: a function of the user's, a step, and a place in what the function returns.  The
processes of a mesh call it for the rows of their devices, and call it for the next step while this one is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import tree_util

from autopar.errors import DataError, TraceError
from autopar.runtime.messages import RowsPart

Reader = Callable[[int, slice], Any]
"""``read(step, rows)`` gives a pytree of NumPy arrays: those rows of the batch of that step."""

_tokens = itertools.count()


@dataclass(frozen=True)
class HostLeaf:
    """One leaf of a batch that the hosts read: leaf number ``leaf`` of what ``data.read(step, rows)`` returns.

    ``aval`` is that of the whole leaf; ``folds`` of (N, B/N, …) is N where it stands for N microbatches, else 0.
    """

    data: HostData
    step: int
    leaf: int
    aval: Any
    folds: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole leaf."""
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        """Of its elements."""
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def reshape(self, shape: tuple[int, ...], order: str = "C") -> Any:
        """The same rows as microbatches; any other shape is an array of this process."""
        rows, *rest = self.shape
        if tuple(shape) == (shape[0], rows // shape[0], *rest) and order == "C":
            return replace(self, aval=self.aval.update(shape=tuple(shape)), folds=shape[0])
        return np.asarray(self).reshape(shape)

    def part(self, row: int, box: tuple[tuple[int, int], ...]) -> RowsPart:
        """Which rows a box of the leaf, or of its microbatch ``row``, is made of."""
        shape = tuple(stop - start for start, stop in box)
        folds, rows, rest = range(1), box[0], box[1:]
        if row >= 0:
            folds = range(row, row + 1)
        elif self.folds:
            folds, rows, rest = range(*box[0]), box[1], box[2:]
        extent = self.shape[1] if self.folds else 0
        return RowsPart(tuple((fold * extent + rows[0], fold * extent + rows[1]) for fold in folds), rest, shape)

    def read(self, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """A box of the leaf, for which only its rows are read."""
        box = tuple((*one.indices(extent)[:2],) for one, extent in zip(index, self.shape, strict=True))
        return joined(self.part(-1, box), lambda *ends: self.data.leaves_of(self.step, slice(*ends))[self.leaf])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        rows = self.shape[0] * (self.shape[1] if self.folds else 1)
        found = np.asarray(self.data.leaves_of(self.step, slice(0, rows))[self.leaf], dtype=dtype or self.dtype)
        return found.reshape(self.shape)


class HostData:
    """The batches of a run, by step: ``data[step]`` is a batch for the step function, ``data(step)`` all from there on."""

    def __init__(self, read: Reader, example: Any) -> None:
        """``example`` is one batch, or its ``jax.ShapeDtypeStruct``s; ``read`` must be free of state, and is sent to the hosts.

        Raises ``TraceError`` where leaves have no rows, or not equally many.
        """
        leaves, self._tree = tree_util.tree_flatten(example)
        self.read = read
        self.token = next(_tokens)
        self._avals = [
            jax.core.ShapedArray(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves
        ]
        rows = {aval.shape[:1] for aval in self._avals}
        if len(rows) != 1 or () in rows:
            raise TraceError(
                f"a batch that hosts read by rows has leaves of {sorted(rows)} rows; give all leaves the same first dimension"
            )

    @property
    def num_leaves(self) -> int:
        """Of a batch."""
        return len(self._avals)

    def __getitem__(self, step: int) -> Any:
        """The batch of a step; nothing is read yet."""
        leaves = [HostLeaf(self, step, number, aval) for number, aval in enumerate(self._avals)]
        return tree_util.tree_unflatten(self._tree, leaves)

    def __call__(self, step: int) -> Iterator[Any]:
        """The batches from a step on."""
        return map(self.__getitem__, itertools.count(step))

    def leaves_of(self, step: int, rows: slice) -> list[np.ndarray[Any, Any]]:
        """What the user's function gives; raises as :func:`rows_read`."""
        return rows_read(self.read, len(self._avals), step, rows)


def joined(part: RowsPart, rows: Callable[[int, int], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """What one device gets of a leaf, of which ``rows(start, stop)`` gives whole rows."""
    found = np.concatenate([rows(*ends) for ends in part.ranges])
    return found[(slice(None), *(slice(*ends) for ends in part.rest))].reshape(part.shape)


def rows_read(read: Reader, count: int, step: int, rows: slice) -> list[np.ndarray[Any, Any]]:
    """The leaves, ``count`` of them, that a reader of the user's gives for some rows.

    Raises ``DataError`` where it raises, with its file and line; ``TraceError`` if they are others than were asked for.
    """
    try:
        given = read(step, rows)
    except Exception as error:
        raise DataError(
            f"read(step={step}, rows={rows.start}:{rows.stop}) of autopar.HostData raised {type(error).__name__}: "
            f"{error}{_where(error)}"
        ) from error
    leaves = [np.asarray(leaf) for leaf in tree_util.tree_leaves(given)]
    if len(leaves) != count or any(leaf.shape[:1] != (rows.stop - rows.start,) for leaf in leaves):
        raise TraceError(
            f"read(step, {rows}) gave {len(leaves)} leaves of {[leaf.shape for leaf in leaves]}; give {count} leaves with "
            f"{rows.stop - rows.start} rows each, as in the example"
        )
    return leaves


def _where(error: Exception) -> str:
    """The line of the reader itself, which is the user's, whatever it calls."""
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "" if below is None else f" ({below.tb_frame.f_code.co_filename}:{below.tb_lineno})"
