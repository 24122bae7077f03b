"""How orbax saves arrays that lie in other processes, or in pieces: it hands them to this handler, which asks their holders to
write.  What lies on disk is the whole array, whatever its pieces were.

Saving has two halves.  *Snapshot*: every holder copies its pieces to host memory, in order with the steps, so that a later step
may take the memory over.  *Write*: a second call, beside the steps, puts the copies on disk.  Orbax awaits the second, then moves
the finished checkpoint to its name in one rename: a crash in the middle leaves the last good one.

Of a world of processes that run the same script (``Cluster.distributed()``) each is a holder.  Arrays on the devices of all of
them are orbax's own; of one that lies with some, a stage's, each process writes and reads its pieces, and those that have none
write none.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from autopar import _compat
from autopar.runtime.distributed_array import DistributedArray, RemoteArray, stored_type
from autopar.runtime.fleet import MeshWorld
from autopar.runtime.on_devices import as_numpy
from autopar.runtime.one_world import elsewhere, told_by_all
from autopar.runtime.pieced_array import PiecedArray, cut
from autopar.runtime.storage import Box, StoredArray, create_array, read_piece, write_piece
from autopar.runtime.waiting import FETCHING_SECONDS, collected
from autopar.schedule.reshard import local_shape


@dataclass(frozen=True)
class _Part:
    """An array on one mesh that goes to disk under a name: it is ``leaf``, or a piece that begins at ``begin`` in it."""

    array: RemoteArray | jax.Array
    name: str
    leaf: DistributedArray | jax.Array
    begin: int = 0

    def stored(self, directory: Any) -> StoredArray:
        """Where it goes."""
        whole = StoredArray(str(directory / self.name), self.leaf.shape, _compat.dtype_name(self.leaf.dtype))
        if not isinstance(self.leaf, PiecedArray):
            return whole
        return whole.part(self.leaf.dim, self.begin, self.begin + self.array.shape[self.leaf.dim])


@dataclass(frozen=True)
class _Snapshot:
    """Copies under way on the processes of one mesh: the arrays, and the calls that make the copies."""

    world: MeshWorld
    token: int
    parts: tuple[_Part, ...]
    calls: tuple[Any, ...]

    def write(self, directory: Any) -> None:
        """Let the holders write."""
        self.world.collected(self.calls, FETCHING_SECONDS, f"{self.world.name} to copy its state")
        stored = [part.stored(directory) for part in self.parts]
        refs = self.world.aside("write_snapshot", self.token, stored)
        self.world.collected(refs, FETCHING_SECONDS, f"{self.world.name} to write its state")


@dataclass(frozen=True)
class _Copies:
    """Copies of pieces that lie in this process: for each, boxes of it."""

    parts: tuple[_Part, ...]
    copies: tuple[dict[Box, np.ndarray[Any, Any]], ...]

    def write(self, directory: Any) -> None:
        """Write them."""
        for part, boxes in zip(self.parts, self.copies, strict=True):
            stored = part.stored(directory)
            for box, piece in boxes.items():
                write_piece(stored, box, piece)


@dataclass
class Home(ocp.RestoreArgs):
    """Where an array of a checkpoint shall lie in other processes; ``numbers`` gives it its number there."""

    restore_type: Any = DistributedArray
    aval: Any = None
    where: Any = None
    world: Any = None
    numbers: Iterator[int] | None = None

    def new_array(self) -> RemoteArray:
        """The handle of an array that is about to be put there."""
        assert self.numbers is not None
        return self.world.new_array(self.aval, self.where, next(self.numbers))

    def put(self, value: Any) -> RemoteArray:
        """An array of this process, there."""
        array, (words, key_impl) = self.new_array(), as_numpy(value, -1, self.aval.dtype)
        cut = self.world.pieces(words, self.where, key_impl)
        refs = [
            actor.put.remote(array.number, pieces, self.where)
            for actor, pieces in zip(self.world.actors, cut, strict=True)
        ]
        collected(refs, FETCHING_SECONDS, f"{self.world.name} to take an array")
        return array


@dataclass
class PiecedHome(ocp.RestoreArgs):
    """Where the pieces along ``dim`` of an array of a checkpoint shall lie: homes, or restore arguments of this process."""

    restore_type: Any = DistributedArray
    aval: Any = None
    dim: int = 0
    homes: tuple[Any, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """Where the pieces end."""
        shapes = [one.aval.shape if isinstance(one, Home) else one.global_shape for one in self.homes]
        return tuple(itertools.accumulate(shape[self.dim] for shape in shapes))

    def parts(self, path: str) -> tuple[tuple[Any, StoredArray], ...]:
        """Each piece's home, and what lies on disk of it."""
        shape, dtype, _ = stored_type(self.aval)
        whole, ends = StoredArray(path, shape, dtype), self.ends
        begins = (0, *ends[:-1])
        return tuple(
            (home, whole.part(self.dim, begin, end)) for home, begin, end in zip(self.homes, begins, ends, strict=True)
        )

    def put(self, value: Any) -> PiecedArray:
        """An array of this process, there."""
        pieces = cut(value, self.dim, self.ends)
        return PiecedArray(
            [
                home.put(piece) if isinstance(home, Home) else _laid(piece, home.sharding)
                for home, piece in zip(self.homes, pieces, strict=True)
            ],
            self.dim,
        )


def _read_here(stored: StoredArray, home: Any) -> jax.Array:
    """An array or a piece, of which this process reads the part of each of its devices."""

    def part(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
        assert index is not None
        return read_piece(stored, _box_of(index, stored.shape))

    return _made_of(part, stored.shape, np.dtype(stored.dtype), home.sharding)


def _made_of(
    part: Callable[[tuple[slice, ...] | None], np.ndarray[Any, Any]], shape: Sequence[int], dtype: Any, sharding: Any
) -> jax.Array:
    if not sharding.addressable_devices:
        return elsewhere(jax.ShapeDtypeStruct(tuple(shape), dtype), sharding)
    return jax.make_array_from_callback(tuple(shape), sharding, part)


def lies_with_some(sharding: Any) -> bool:
    """Whether these are devices of some processes of this one's world, and not of all."""
    return len({device.process_index for device in sharding.device_set}) < jax.process_count()


def _known_to_all(key: jax.Array) -> jax.Array:
    """Keys that lie with some processes of the world, on the devices of all; all processes call this."""
    words: Any = jax.random.key_data(key)
    own = words.addressable_shards
    said = told_by_all(np.asarray(own[0].data).tobytes() if own else b"")
    found = np.frombuffer(next(one for one in said if one), words.dtype).reshape(words.shape)
    whole = jax.make_array_from_callback(words.shape, _everywhere(), lambda index: found[index])
    return jax.random.wrap_key_data(whole, impl=_compat.key_impl_name(_compat.dtype_name(key.dtype)))


def _everywhere() -> NamedSharding:
    return NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("all",)), PartitionSpec())


def _laid(array: Any, sharding: Any) -> jax.Array:
    """An array whose value this process has, as it shall lie: in this process, or with some of a world."""
    if not lies_with_some(sharding):
        return jax.device_put(array, sharding)
    words, key_impl = as_numpy(array, -1, array.dtype)
    held = _made_of(lambda index: words[index], words.shape, words.dtype, sharding)
    return held if key_impl is None else jax.random.wrap_key_data(held, impl=key_impl)


def _box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(one.indices(extent)[:2] for one, extent in zip(index, shape, strict=True))


class ArraySaver(ocp.type_handlers.ArrayHandler):
    """Saves ``DistributedArray`` and ``jax.Array`` leaves as orbax saves ``jax.Array``, and reads them where they shall lie."""

    def __init__(self) -> None:
        # Without orbax's file of shardings: it would list only the arrays of this process, and then look for all in it.
        self._store = _compat.array_metadata_store()
        super().__init__(enable_write_sharding_file=False, array_metadata_store=self._store)
        self._tokens = itertools.count()

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Arrays where the :class:`Home` or :class:`PiecedHome` among the arguments says, others in this process."""
        found: dict[int, Any] = {}
        wanted = list(args) if args is not None else [ocp.RestoreArgs()] * len(infos)
        away: dict[MeshWorld, list[Any]] = {}
        for number, (info, arg) in enumerate(zip(infos, wanted, strict=True)):
            if info.is_ocdbt_checkpoint or not _is_ours(arg):
                continue
            path = str(info.parent_dir / info.name)
            if isinstance(arg, ocp.ArrayRestoreArgs):
                if not _compat.is_key_dtype(arg.dtype):
                    dtype = _compat.dtype_name(arg.dtype)
                    found[number] = _read_here(StoredArray(path, tuple(arg.global_shape), dtype), arg)
            elif isinstance(arg, Home):
                shape, dtype, _ = stored_type(arg.aval)
                found[number] = _asked(arg, StoredArray(path, shape, dtype), away)
            elif not _compat.is_key_dtype(arg.aval.dtype):
                pieces = [
                    _asked(home, part, away) if isinstance(home, Home) else _read_here(part, home)
                    for home, part in arg.parts(path)
                ]
                found[number] = PiecedArray(pieces, arg.dim)
        refs = [ref for world, read in away.items() for ref in world.call("read", read)]
        collected(refs, FETCHING_SECONDS, "the hosts to read the checkpoint")
        here = [number for number in range(len(infos)) if number not in found]
        if here:
            plain = [_whole(arg) if _is_ours(arg := wanted[number]) else arg for number in here]
            arrays = await super().deserialize([infos[number] for number in here], plain)
            for number, array in zip(here, arrays, strict=True):
                found[number] = _put(array, wanted[number])
        return [found[number] for number in range(len(infos))]

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Start the snapshots now; the futures that come back write them."""
        ours: list[tuple[str, DistributedArray | jax.Array]] = []
        plain: list[tuple[Any, Any, Any]] = []
        for number, (value, info) in enumerate(zip(values, infos, strict=True)):
            arg = args[number] if args is not None else ocp.SaveArgs()
            is_key = _compat.is_key_dtype(value.dtype)
            if isinstance(value, jax.Array):
                if not lies_with_some(value.sharding):
                    plain.append((value, info, arg))
                elif is_key:
                    plain.append((_known_to_all(value), info, arg))
                else:
                    ours.append((info.name, value))
            elif is_key:
                # A few words; and orbax writes beside them how they are made.
                plain.append((value.__jax_array__(), info, arg))
            else:
                ours.append((info.name, value))
        taken = self._taken([part for name, value in ours for part in _parts_of(name, value)])
        rows = [list(row) for row in zip(*plain, strict=True)]
        others = await super().serialize(*rows) if plain else []
        if not taken:
            return others
        return [ocp.future.CommitFutureAwaitingContractedSignals(self._commit(ours, taken, infos[0], others))]

    def _taken(self, parts: Sequence[_Part]) -> list[_Snapshot | _Copies]:
        """Copies of arrays and pieces, under way where they lie."""
        away: dict[MeshWorld, list[_Part]] = {}
        here: list[_Part] = []
        for part in parts:
            if isinstance(part.array, RemoteArray):
                away.setdefault(part.array.holder, []).append(part)  # type: ignore[arg-type]
            else:
                for shard in part.array.addressable_shards:
                    shard.data.copy_to_host_async()
                here.append(part)
        found: list[_Snapshot | _Copies] = []
        for world, those in away.items():
            token = next(self._tokens)
            told = [(part.array.number, part.array.where) for part in those if isinstance(part.array, RemoteArray)]
            found.append(_Snapshot(world, token, tuple(those), tuple(world.call("snapshot", token, told))))
        if here:
            found.append(_Copies(tuple(here), tuple(_copied(part.array) for part in here)))
        return found

    async def _commit(
        self,
        ours: Sequence[tuple[str, DistributedArray | jax.Array]],
        taken: Sequence[_Snapshot | _Copies],
        info: Any,
        others: Sequence[Any],
    ) -> None:
        """Wait for what orbax writes itself, let the holders of the rest write, and note it; runs in a thread of orbax."""
        await info.await_path_creation()
        for other in others:  # both add to one file of notes
            await asyncio.to_thread(other.result)
        for name, array in ours:
            whole = StoredArray(str(info.parent_dir / name), array.shape, _compat.dtype_name(array.dtype))
            await asyncio.to_thread(create_array, whole, _chunk_shape(array))
        for one in taken:
            await asyncio.to_thread(one.write, info.parent_dir)
        noted = [(name, array.shape, array.dtype, _chunk_shape(array)) for name, array in ours]
        await _compat.note_arrays(self._store, info.parent_dir, noted)


def _is_ours(arg: Any) -> bool:
    """Whether an array is wanted where orbax puts none: in other processes, in pieces, or with some of a world."""
    if isinstance(arg, ocp.ArrayRestoreArgs):
        return arg.sharding is not None and lies_with_some(arg.sharding)
    return isinstance(arg, Home | PiecedHome)


def _whole(arg: Any) -> ocp.ArrayRestoreArgs:
    """What reads the whole array first: into the memory of this host, or that of all devices of a world."""
    dtype = arg.dtype if isinstance(arg, ocp.ArrayRestoreArgs) else arg.aval.dtype
    if jax.process_count() > 1:
        return ocp.ArrayRestoreArgs(sharding=_everywhere(), dtype=dtype)
    memory = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    return ocp.ArrayRestoreArgs(sharding=memory, dtype=dtype)


def _put(array: jax.Array, arg: Any) -> Any:
    """What was read where the argument wants it."""
    if not _is_ours(arg):
        return array
    return _laid(array, arg.sharding) if isinstance(arg, ocp.ArrayRestoreArgs) else arg.put(array)


def _asked(home: Home, stored: StoredArray, away: dict[MeshWorld, list[Any]]) -> RemoteArray:
    """The handle of an array that a mesh is to read, which is noted in ``away``."""
    array = home.new_array()
    _, _, key_impl = stored_type(home.aval)
    away.setdefault(home.world, []).append((array.number, home.where, stored, key_impl))
    return array


def _parts_of(name: str, value: DistributedArray | jax.Array) -> list[_Part]:
    """The arrays that each lie on one mesh."""
    if isinstance(value, PiecedArray):
        begins = (0, *value.ends[:-1])
        return [_Part(piece, name, value, begin) for piece, begin in zip(value.pieces, begins, strict=True)]
    assert isinstance(value, RemoteArray | jax.Array)
    return [_Part(value, name, value)]


def _copied(array: Any) -> dict[Box, np.ndarray[Any, Any]]:
    """Copies of the parts of an array that this process is to write: of those on several devices one has the number 0."""
    return {
        _box_of(shard.index, array.shape): np.array(shard.data)  # a later step may take the memory of the array over
        for shard in array.addressable_shards
        if shard.replica_id == 0
    }


def _chunk_shape(array: DistributedArray | jax.Array) -> tuple[int, ...]:
    """Of the largest chunks of which every device's part is made: parts that differ never share one."""
    if isinstance(array, PiecedArray):
        shapes = [_part_shape(piece) for piece in array.pieces]
        begins = tuple(array.ends if dim == array.dim else () for dim in range(array.ndim))
        return tuple(
            math.gcd(*extents, *there) for extents, there in zip(zip(*shapes, strict=True), begins, strict=True)
        )
    return _part_shape(array)


def _part_shape(array: Any) -> tuple[int, ...]:
    if isinstance(array, RemoteArray):
        return local_shape(array.shape, array.where.layout, array.where.mesh)
    return tuple(array.sharding.shard_shape(array.shape))


def registry() -> Any:
    """Which handler saves which type: ours for arrays, those of orbax for the rest."""
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
