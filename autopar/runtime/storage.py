"""Arrays on disk, written and read piece by piece by the processes that hold the pieces.

An array is a zarr array in a directory of its own, as plain orbax writes it without OCDBT; a chunk is the piece of one device,
so that processes which write different pieces never touch the same file.  TensorStore reads any part of any chunks: an array
comes back onto another plan or another number of devices as well.

The directory must be the same one for all hosts (a shared file system, or a bucket that is mounted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import CheckpointError

Box = tuple[tuple[int, int], ...]
"""Start and stop in every dimension of the whole array."""


@dataclass(frozen=True)
class StoredArray:
    """One array on disk: its directory, its shape and dtype (of typed keys, those of the words).

    It may be a part of what lies there, which then has the shape ``around``, and in which it begins at ``begin``.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    around: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()

    @property
    def shape_there(self) -> tuple[int, ...]:
        """The shape of what lies there."""
        return self.around or self.shape

    def part(self, dim: int, begin: int, end: int) -> StoredArray:
        """The part between two positions along a dimension."""
        shape = (*self.shape[:dim], end - begin, *self.shape[dim + 1 :])
        start = tuple(begin if one == dim else 0 for one in range(len(shape)))
        return StoredArray(self.path, shape, self.dtype, self.shape, start)

    def slices(self, box: Box) -> tuple[slice, ...]:
        """A box of this array in what lies there."""
        begin = self.begin or (0,) * len(box)
        return tuple(slice(start + first, stop + first) for (start, stop), first in zip(box, begin, strict=True))


def create_array(stored: StoredArray, chunk_shape: Sequence[int]) -> None:
    """Write the array's metadata; its pieces follow.  Several processes may do so at once: they write the same."""
    metadata = {
        "shape": list(stored.shape_there),
        "chunks": [max(1, extent) for extent in chunk_shape],
        "compressor": {"id": "zstd", "level": 1},
        "dimension_separator": ".",
    }
    _open({**_spec(stored.path), "dtype": stored.dtype, "metadata": metadata}, stored.path, create=True)


def write_piece(stored: StoredArray, box: Box, piece: np.ndarray[Any, Any]) -> None:
    """Write one piece, which is whole chunks."""
    array = _open(_spec(stored.path), stored.path)
    array[stored.slices(box)].write(piece).result()


def read_piece(stored: StoredArray, box: Box) -> np.ndarray[Any, Any]:
    """Read one piece; raises ``CheckpointError`` where another shape or dtype lies."""
    array = _open(_spec(stored.path), stored.path)
    found = tuple(array.shape), array.dtype.numpy_dtype.name
    if found != (stored.shape_there, stored.dtype):
        raise CheckpointError(
            f"{stored.path} holds {found[1]}{list(found[0])}, and the step wants {stored.dtype}{list(stored.shape_there)}; "
            "restore into the model and the precision that were saved"
        )
    return np.asarray(array[stored.slices(box)].read().result())


def _spec(path: str) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": str(Path(path)) + "/"}}


def _open(spec: dict[str, Any], path: str, *, create: bool = False) -> Any:
    import tensorstore

    try:
        return tensorstore.open(tensorstore.Spec(spec), open=True, create=create).result()
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be {'written' if create else 'read'}: {error}") from error
