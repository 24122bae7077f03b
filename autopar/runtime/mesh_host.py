"""One process of one mesh: it owns arrays, compiled programs, and a place in its mesh's own JAX world.

It is told what to do by a driver (:mod:`autopar.runtime.fleet`) and says nothing unasked.  Calls come one after the other; all
processes of a mesh get the same calls in the same order, for each starts its part of programs that run on all of them.

A step's calls return when everything is dispatched.  So that not too much is under way, a step waits first until the one
:data:`AHEAD` before it is done; what went wrong there is raised then.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

AHEAD = 2
"""So many steps may be dispatched and not yet done."""
SHOWING_SECONDS = 1.0
"""Gauges are set so often at most: that takes half a millisecond, and nobody reads them more often."""


class MeshHost:
    """See the module docstring.  JAX is imported when a world is joined, not before: its environment is set first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arrays: dict[int, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._snapshots: dict[int, Any] = {}
        self._kept: Any = None
        self._readers: dict[int, Any] = {}
        self._running: deque[tuple[int, Future[float]]] = deque()
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="autopar-done")
        self._finished: dict[int, float] = {}
        self._step = -1
        self._since: float | None = None
        self._step_seconds = 0.0
        self._ended = 0.0  # when the last step was done
        self._gauges: Any = None
        self._shown = -SHOWING_SECONDS  # when the gauges were set
        self._exchange: Any = None
        self._means_nothing = False  # what the arrays hold, from hanging up until they are forgotten

    def __repr__(self) -> str:
        return self._name  # Ray writes it before every line of this process's log

    # ------------------------------------------------------------------------------------------------------ joining

    def versions(self) -> Any:
        """What this process runs."""
        import jax

        from autopar.runtime.messages import Versions
        from autopar.version import VERSION

        return Versions(VERSION, jax.__version__, platform.python_version())

    def join(self, world: Any) -> int:
        """Become a process of a world; returns this process's id when all its processes have."""
        import jax

        from autopar import _compat
        from autopar.cores import THREADS_VARIABLE, threads_of_xla
        from autopar.disk_cache import cache_directory
        from autopar.runtime.exchange import Exchange

        for name, value in world.settings.items():
            jax.config.update(name, value)
        if (kept := cache_directory("executables")) is not None:
            jax.config.update("jax_compilation_cache_dir", str(kept))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        if world.platform == "cpu":
            jax.config.update("jax_num_cpu_devices", world.devices_per_process)
            os.environ[THREADS_VARIABLE] = str(threads_of_xla(world.devices_per_process))
        if world.processes > 1:
            _compat.join_world(world.coordinator, world.processes, world.rank)
        self._world = world
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        if len(devices) != world.processes * world.devices_per_process:
            raise RuntimeError(
                f"{self._name} sees {len(devices)} devices, and its mesh has {world.processes} hosts with "
                f"{world.devices_per_process} each"
            )
        self._devices = devices
        self._exchange = Exchange(devices, world.address)
        self._gauges = _gauges(self._name)
        return os.getpid()

    def serve(self) -> str:
        """The address at which other meshes pull arrays from this process."""
        return str(self._exchange.serve())

    def nccl_lack(self) -> str | None:
        """Why this process cannot speak NCCL to others; None: it can."""
        from autopar.runtime.cupy_nccl import nccl_lack

        return nccl_lack()

    def unique_ids(self, count: int) -> list[Any]:
        """New names of communicators between meshes."""
        return [self._exchange.unique_id() for _ in range(count)]

    def hang_up(self) -> None:
        """Let go of what waits for other meshes, before :meth:`rest`; may be called while a step runs."""
        if self._exchange is not None and self._exchange.may_wait:
            self._means_nothing = True  # before anything that waited goes on
            self._exchange.hang_up()

    def warm(self, meshes: Iterable[Any]) -> None:
        """Run one small sum over every group of axes of some meshes: communicators are made now, not in a first step."""
        from autopar.runtime.wire_ends import warm

        for mesh in meshes:
            warm(self._jax_mesh(mesh, tuple(range(mesh.size)), tuple(range(mesh.size))))

    def compute(self, function: Any, *given: Any) -> Any:
        """What a function of the driver's makes of all devices of the world, host by host, and of what it is given."""
        return function(self._devices, *given)

    # ------------------------------------------------------------------------------------------------------ programs

    def load(self, shipment: Any, peers: Any, digest: str) -> float:
        """Compile what a shipment brings; returns the seconds it took.  ``peers`` are None where nothing is exchanged."""
        from autopar.runtime.loaded import Loaded

        started = time.monotonic()
        if (known := self._loaded.get(digest)) is None:
            known = self._loaded[digest] = Loaded(shipment, partial(self._jax_mesh, known=shipment.devices))
            # What compiling leaves stays; Python would look for cycles in it in every step, a sixteenth of a small step's work.
            gc.collect()
            gc.freeze()
        known.connect(self._exchange, peers)
        return time.monotonic() - started

    def texts(self, digest: str) -> list[tuple[Any, str]]:
        """The optimized HLO of every program, with its key."""
        return [(key, program.as_text()) for key, program in self._loaded[digest].programs.items()]

    def memory(self, digest: str) -> list[tuple[Any, Any]]:
        """XLA's account of the bytes on one device of every program, with its key."""
        import dataclasses

        from autopar.runtime.messages import ProgramMemory

        names = [one.name for one in dataclasses.fields(ProgramMemory)]
        accounts = [(key, program.memory_analysis()) for key, program in self._loaded[digest].programs.items()]
        return [(key, ProgramMemory(*(getattr(account, name) for name in names))) for key, account in accounts]

    def step(self, order: Any) -> Any:
        """Dispatch one step."""
        from autopar.runtime.messages import HostRows, StepReport

        self._since, self._step = time.monotonic(), order.step
        self.free(order.released)
        while len(self._running) >= AHEAD:
            self._finish_oldest()
        loaded = self._loaded[order.digest]
        try:
            results = loaded.run(order.step, self._given(loaded, order.given))
        except Exception as error:
            # Whoever asks for a result learns what happened, not that there is none.
            self._arrays.update((order.first_result + k, error) for k in range(len(loaded.shipment.results)))
            raise
        self._arrays.update(enumerate(results, order.first_result))
        for token, step in {(one.token, one.step) for one in order.given if isinstance(one, HostRows)}:
            self._readers[token].step_is_over(step)
        done = self._watcher.submit(self._seconds_of_step, loaded.marks(results), self._since)
        self._running.append((order.step, done))
        finished, self._finished = self._finished, {}
        dispatch_seconds = time.monotonic() - self._since
        self._since = None
        return StepReport(order.step, dispatch_seconds, finished)

    def finish(self) -> dict[int, float]:
        """Wait until every step is done; seconds of those not told before."""
        while self._running:
            self._finish_oldest()
        finished, self._finished = self._finished, {}
        return finished

    def rest(self) -> None:
        """After a failure elsewhere: wait for what was dispatched, whether it succeeds or not, and forget all arrays."""
        self.hang_up()
        while self._running:
            _, done = self._running.popleft()
            done.exception()  # it may have waited for what has failed
        self._arrays.clear()
        self._snapshots.clear()
        self._finished.clear()
        self._since = None
        self._means_nothing = False

    def pulse(self) -> int:
        """A sign of life: the step that this process is in."""
        return self._step

    def _seconds_of_step(self, marks: Any, called: float) -> float:
        """Wait, in a thread of its own, until arrays are there: seconds since the call, or since the end of the step before."""
        import jax

        jax.block_until_ready(marks)
        before, self._ended = self._ended, time.monotonic()
        return self._ended - max(called, before)

    def _finish_oldest(self) -> None:
        step, done = self._running.popleft()
        self._finished[step] = self._step_seconds = done.result()
        if self._gauges is not None and time.monotonic() - self._shown >= SHOWING_SECONDS:
            self._shown = time.monotonic()
            self._gauges.set(self.status())

    def _given(self, loaded: Any, given: Sequence[Any]) -> list[Any]:
        from autopar.runtime.messages import HostRows
        from autopar.runtime.on_devices import arrays_of, relaid

        times = Counter(one for one in given if isinstance(one, int))
        arrays: list[Any] = []
        coming: dict[int, tuple[Any, Any]] = {}
        for entry, sharding, one in zip(loaded.shipment.entries, loaded.entry_shardings, given, strict=True):
            if not isinstance(one, int):
                coming[len(arrays)] = self._read_rows(one) if isinstance(one, HostRows) else one, sharding
                arrays.append(None)
                continue
            array = self._array(one)
            if not array.sharding.is_equivalent_to(sharding, array.ndim):
                array = relaid(array, sharding)
            elif entry.is_donated and times[one] > 1:
                array = array.copy()
            arrays.append(array)
        for place, array in zip(coming, arrays_of(list(coming.values())), strict=True):
            arrays[place] = array
        for entry, one in zip(loaded.shipment.entries, given, strict=True):
            if isinstance(one, int) and entry.is_donated:
                self._arrays.pop(one, None)
        return arrays

    # -------------------------------------------------------------------------------------------------------- arrays

    def put(self, number: int, pieces: Any, where: Any) -> None:
        """Take an array from the driver."""
        from autopar.runtime.on_devices import arrays_of
        from autopar.runtime.stage_executable import stored_sharding

        mesh = self._jax_mesh(where.mesh, where.devices, tuple(sorted(where.devices)))
        (self._arrays[number],) = arrays_of([(pieces, stored_sharding(where.layout, mesh))])

    def take_reader(self, token: int, pickled: bytes, leaves: int) -> None:
        """Take a function of the user's that reads rows of batches, from the driver and from nobody else."""
        from ray import cloudpickle

        from autopar.errors import DataError
        from autopar.runtime.row_reader import RowReader

        try:
            self._readers[token] = RowReader(cloudpickle.loads(pickled), leaves)
        except Exception as error:  # whatever its modules raise when they are imported
            raise DataError(
                f"the function of autopar.HostData does not find on {self._name} what it needs: {type(error).__name__}: {error}; "
                "install it there, or put the function into the script itself"
            ) from error

    def _read_rows(self, wanted: Any) -> Any:
        from autopar.runtime.messages import HostPieces

        reader = self._readers[wanted.token]
        found = {
            part: reader.part(wanted.step, wanted.leaf, part, wanted.dtype) for part in dict.fromkeys(wanted.parts)
        }
        return HostPieces(wanted.shape, tuple(found[part] for part in wanted.parts))

    def fetch(self, number: int, positions: Sequence[int]) -> list[Any]:
        """Pieces of an array as NumPy arrays, of devices of this process by their position on the array's mesh."""
        import jax
        import numpy as np

        array = self._array(number)
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        devices = list(array.sharding.mesh.devices.flat)
        pieces = [np.array(shards[devices[position]]) for position in positions]
        self._check_meaning()
        return pieces

    def snapshot(self, token: int, arrays: Sequence[Any]) -> None:
        """Copy the pieces of some arrays that this process is the first to hold: (number, where) each."""
        import numpy as np

        from autopar.schedule.cross_mesh import piece_box

        copies: list[list[tuple[Any, Any]]] = []
        for number, where in arrays:
            array = self._array(number)
            placement = where.placement(array.ndim)
            first: dict[Any, int] = {}
            for position in range(where.mesh.size):
                first.setdefault(placement.piece(position), position)
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            devices = list(array.sharding.mesh.devices.flat)
            copies.append(
                [
                    (piece_box(array.shape, placement, position), np.array(shards[devices[position]]))
                    for position in first.values()
                    if devices[position] in shards
                ]
            )
        self._check_meaning()
        self._snapshots[token] = copies

    def write_snapshot(self, token: int, stored: Sequence[Any]) -> None:
        """Put a snapshot on disk and forget it."""
        from autopar.runtime.storage import write_piece

        for one, pieces in zip(stored, self._snapshots.pop(token), strict=True):
            for box, piece in pieces:
                write_piece(one, box, piece)

    def read(self, arrays: Sequence[Any]) -> None:
        """Take arrays from disk: (number, where, what is stored, implementation of keys) each."""
        import jax

        from autopar.runtime.messages import HostPieces
        from autopar.runtime.storage import read_piece
        from autopar.schedule.cross_mesh import piece_box

        own = jax.process_index()
        for number, where, stored, key_impl in arrays:
            mesh = self._jax_mesh(where.mesh, where.devices, tuple(sorted(where.devices)))
            boxes = {}
            ordered = []
            for position, device in enumerate(mesh.devices.flat):
                if device.process_index == own:
                    box = piece_box(stored.shape, where.placement(len(stored.shape)), position)
                    if box not in boxes:
                        boxes[box] = read_piece(stored, box)
                    ordered.append(boxes[box])
            self.put(number, HostPieces(stored.shape, tuple(ordered), key_impl), where)

    def keep(self, step: int, leaves: Sequence[Any], older_than: int) -> None:
        """Copy the pieces of some leaves, (leaf, number, where) each, into this host's memory; forget older copies."""
        from autopar.runtime.kept_copies import KeptCopies

        self._kept = self._kept or KeptCopies()
        self._kept.keep(step, [(leaf, self._array(number), where) for leaf, number, where in leaves], older_than)
        if self._means_nothing:
            self._kept.forget(step)
        self._check_meaning()

    def kept_steps(self) -> tuple[int, ...]:
        """Of which steps there are copies."""
        return () if self._kept is None else self._kept.steps

    def give_kept(self, step: int, wanted: Sequence[Any]) -> Any:
        """Pieces from the copies of a step."""
        return self._kept.give(step, wanted)

    def take_kept(self, step: int, leaves: Sequence[Any], boxes: Any, *given: Any) -> None:
        """Make leaves, (leaf, number, where, shape, implementation of keys) each, of copies: own ones, and those given."""
        from dataclasses import replace

        from autopar.runtime.kept_copies import KeptCopies

        self._kept = self._kept or KeptCopies()
        pieces = {key: piece for one in given for key, piece in one.items()}
        for leaf, number, where, shape, key_impl in leaves:
            together = self._kept.put_together(step, leaf, boxes[leaf], shape, pieces)
            self.put(number, replace(together, key_impl=key_impl), where)

    def wait(self, number: int) -> int:
        """Return when an array is there: the number up to which all are that are held then, with a value each."""
        import jax

        from autopar.runtime.awaited import is_there

        jax.block_until_ready(self._array(number))
        held = dict(self._arrays)
        missing = [one for one, array in held.items() if isinstance(array, Exception) or not is_there(array)]
        return min(missing) - 1 if missing else max(held, default=number)

    def _check_meaning(self) -> None:
        """Raise if messages were given up meanwhile; to be asked when a value was read, for it may have waited for them."""
        if self._means_nothing:
            from autopar.errors import WorkerError

            raise WorkerError(f"{self._name} has given its arrays up after a failure elsewhere")

    def _array(self, number: int) -> Any:
        """An array that was made or given; raises what its step raised."""
        array = self._arrays.get(number)
        if array is None:
            from autopar.errors import WorkerError

            raise WorkerError(f"{self._name} has no array {number} any more: it was given up after a failure elsewhere")
        if isinstance(array, Exception):
            raise array
        return array

    def free(self, numbers: Iterable[int]) -> None:
        """Forget arrays."""
        for number in numbers:
            self._arrays.pop(number, None)

    def status(self) -> Any:
        """How this process is; may be asked while a step runs."""
        import psutil

        from autopar.runtime.messages import HostStatus

        arrays = [one for one in list(self._arrays.values()) if not isinstance(one, Exception)]
        held = sum(
            shard.data.nbytes for array in arrays for shard in array.addressable_shards if not array.is_deleted()
        )
        busy = 0.0 if self._since is None else time.monotonic() - self._since
        resident = psutil.Process().memory_info().rss
        return HostStatus(self._name, os.getpid(), resident, held, self._step, busy, self._step_seconds)

    def _jax_mesh(self, mesh: Any, devices: tuple[int, ...], known: tuple[int, ...]) -> Any:
        """The JAX mesh over the cluster's devices ``devices``, where ``known`` are all those of this world, in order."""
        from autopar.runtime.executor import device_mesh

        places = {device: place for place, device in enumerate(known)}
        return device_mesh(mesh, [self._devices[places[device]] for device in devices])


def _gauges(name: str) -> Any:
    """Where Ray's dashboard and Prometheus read how this process is; None in a process that is none of Ray's."""
    if "ray" not in sys.modules:
        return None
    from autopar.runtime.gauges import Gauges

    return Gauges(name)
