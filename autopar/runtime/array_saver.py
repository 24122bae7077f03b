"""How orbax saves arrays that lie in other processes: it hands them to this handler, which asks their holders to write.

Saving has two halves.  *Snapshot*: every holder copies its pieces to host memory, in order with the steps, so that a later step
may take the memory over.  *Write*: a second call, beside the steps, puts the copies on disk.  Orbax awaits the second, then moves
the finished checkpoint to its name in one rename: a crash in the middle leaves the last good one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp

from autopar import _compat
from autopar.runtime.distributed_array import DistributedArray, stored_type
from autopar.runtime.fleet import MeshWorld
from autopar.runtime.remote import as_numpy
from autopar.runtime.storage import StoredArray, create_array
from autopar.runtime.waiting import FETCHING_SECONDS, collected
from autopar.schedule.reshard import local_shape


@dataclass(frozen=True)
class _Snapshot:
    """Copies under way on the processes of one mesh: the arrays, and the calls that make the copies."""

    world: MeshWorld
    token: int
    arrays: tuple[DistributedArray, ...]
    names: tuple[str, ...]
    calls: tuple[Any, ...]


@dataclass
class Home(ocp.RestoreArgs):
    """Where an array of a checkpoint shall lie in other processes; ``numbers`` gives it its number there."""

    restore_type: Any = DistributedArray
    aval: Any = None
    where: Any = None
    world: Any = None
    numbers: Iterator[int] | None = None

    def new_array(self) -> DistributedArray:
        """The handle of an array that is about to be put there."""
        assert self.numbers is not None
        return self.world.new_array(self.aval, self.where, next(self.numbers))

    def put(self, value: Any) -> DistributedArray:
        """An array of this process, there."""
        array, (words, key_impl) = self.new_array(), as_numpy(value, self.aval.dtype)
        cut = self.world.pieces(words, self.where, key_impl)
        refs = [
            actor.put.remote(array.number, pieces, self.where)
            for actor, pieces in zip(self.world.actors, cut, strict=True)
        ]
        collected(refs, FETCHING_SECONDS, f"{self.world.name} to take an array")
        return array


class ArraySaver(ocp.type_handlers.ArrayHandler):
    """Saves ``DistributedArray`` and ``jax.Array`` leaves as orbax saves ``jax.Array``, and reads them where they shall lie."""

    def __init__(self) -> None:
        # Without orbax's file of shardings: it would list only the arrays of this process, and then look for all in it.
        self._store = _compat.array_metadata_store()
        super().__init__(enable_write_sharding_file=False, array_metadata_store=self._store)
        self._tokens = itertools.count()

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Arrays where the :class:`Home` among the arguments says, others in this process."""
        found: dict[int, Any] = {}
        wanted = list(args) if args is not None else [ocp.RestoreArgs()] * len(infos)
        away: dict[MeshWorld, list[int]] = {}
        for number, (info, arg) in enumerate(zip(infos, wanted, strict=True)):
            if isinstance(arg, Home) and not info.is_ocdbt_checkpoint:
                away.setdefault(arg.world, []).append(number)
        refs = []
        for world, numbers in away.items():
            read = []
            for number in numbers:
                home, path = wanted[number], str(infos[number].parent_dir / infos[number].name)
                array = home.new_array()
                found[number] = array
                shape, dtype, key_impl = stored_type(home.aval)
                read.append((array.number, home.where, StoredArray(path, shape, dtype), key_impl))
            refs += world.call("read", read)
        collected(refs, FETCHING_SECONDS, "the hosts to read the checkpoint")
        here = [number for number in range(len(infos)) if number not in found]
        if here:
            plain = [ocp.RestoreArgs(dtype=arg.aval.dtype) if isinstance(arg := wanted[n], Home) else arg for n in here]
            arrays = await super().deserialize([infos[number] for number in here], plain)
            for number, array in zip(here, arrays, strict=True):
                arg = wanted[number]
                found[number] = arg.put(array) if isinstance(arg, Home) else array
        return [found[number] for number in range(len(infos))]

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Start the snapshots now; the futures that come back write them."""
        ours: dict[MeshWorld, list[tuple[DistributedArray, Any]]] = {}
        plain: list[tuple[Any, Any, Any]] = []
        for number, (value, info) in enumerate(zip(values, infos, strict=True)):
            arg = args[number] if args is not None else ocp.SaveArgs()
            if not isinstance(value, DistributedArray):
                plain.append((value, info, arg))
            elif _compat.is_key_dtype(value.dtype):
                # A few words; and orbax writes beside them how they are made.
                plain.append((value.__jax_array__(), info, arg))
            else:
                ours.setdefault(value.holder, []).append((value, info))  # type: ignore[arg-type]
        snapshots = []
        for world, pairs in ours.items():
            arrays, of_arrays = zip(*pairs, strict=True)
            token = next(self._tokens)
            calls = world.call("snapshot", token, [(array.number, array.where) for array in arrays])
            names = tuple(info.name for info in of_arrays)
            snapshots.append(_Snapshot(world, token, arrays, names, tuple(calls)))
        rows = [list(row) for row in zip(*plain, strict=True)]
        others = await super().serialize(*rows) if plain else []
        if not snapshots:
            return others
        return [ocp.future.CommitFutureAwaitingContractedSignals(self._commit(snapshots, infos[0], others))]

    async def _commit(self, snapshots: Sequence[_Snapshot], info: Any, others: Sequence[Any]) -> None:
        """Wait for what orbax writes itself, let the holders of the rest write, and note it; runs in a thread of orbax."""
        await info.await_path_creation()
        for other in others:  # both add to one file of notes
            await asyncio.to_thread(other.result)
        for taken in snapshots:
            await asyncio.to_thread(_write, taken, info.parent_dir)
            noted = [
                (name, array.shape, array.dtype, _chunk_shape(array))
                for name, array in zip(taken.names, taken.arrays, strict=True)
            ]
            await _compat.note_arrays(self._store, info.parent_dir, noted)


def _chunk_shape(array: DistributedArray) -> tuple[int, ...]:
    return local_shape(array.shape, array.where.layout, array.where.mesh)


def _write(taken: _Snapshot, directory: Any) -> None:
    """Create the arrays, then let their holders write."""
    stored = []
    for array, name in zip(taken.arrays, taken.names, strict=True):
        one = StoredArray(str(directory / name), array.shape, _compat.dtype_name(array.dtype))
        create_array(one, _chunk_shape(array))
        stored.append(one)
    taken.world.collected(taken.calls, FETCHING_SECONDS, f"{taken.world.name} to copy its state")
    refs = taken.world.aside("write_snapshot", taken.token, stored)
    taken.world.collected(refs, FETCHING_SECONDS, f"{taken.world.name} to write its state")


def registry() -> Any:
    """Which handler saves which type: ours for arrays, those of orbax for the rest."""
    import numpy as np

    scalar = ocp.type_handlers.ScalarHandler()
    found = ocp.type_handlers.create_type_handler_registry(
        (int, scalar),
        (float, scalar),
        (bytes, scalar),
        (np.number, scalar),
        (np.ndarray, ocp.type_handlers.NumpyHandler()),
        (str, ocp.type_handlers.StringHandler()),
    )
    found.add(jax.Array, ArraySaver(), func=lambda kind: issubclass(kind, jax.Array | DistributedArray))
    return found
