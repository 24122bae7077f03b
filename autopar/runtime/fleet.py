"""The driver's side of a Ray cluster: worlds of processes, one for each mesh, and what fails in them.

    placement group    a bundle for each host of a mesh, on the node that the plan says
    actor              one :class:`~autopar.runtime.mesh_host.MeshHost` for each bundle
    coordinator        of the mesh's JAX world; it is served by the driver, so that no worker's death takes it along

A world lives until the fleet is closed, or until it is lost: one process that dies takes its mesh with it, for the others may
wait for it inside a collective for ever.  Other meshes live on.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from autopar import _compat
from autopar.cluster import Mesh, Platform
from autopar.errors import AutoparError, ClusterError, DataError, InternalError, WorkerError
from autopar.ray_hosts import RayHosts
from autopar.runtime.distributed_array import RemoteArray
from autopar.runtime.host_data import HostData, HostLeaf
from autopar.runtime.messages import HostPieces, HostRows, HostStatus, Where, World
from autopar.runtime.nccl import UniqueId
from autopar.runtime.processes import (
    ASIDE,
    CONTROL,
    await_ends,
    await_group,
    environment_of,
    free_port,
    kill_there,
    our_versions,
    own_address,
    placement_group,
    start_actor,
)
from autopar.runtime.pulled import PullPeers
from autopar.runtime.waiting import (
    FETCHING_SECONDS,
    RESTING_SECONDS,
    SILENT_SECONDS,
    SLOWEST_BYTES_PER_SECOND,
    STARTING_SECONDS,
    checked,
    collected,
    first_line,
)
from autopar.schedule.cross_mesh import piece_box

_SETTINGS = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable", "jax_default_matmul_precision")


class Fleet:
    """Owns the worlds on the hosts of a Ray cluster; made by the first program that runs there."""

    def __init__(self, hosts: RayHosts) -> None:
        self.hosts = hosts
        self.secret = secrets.token_bytes(16)
        self.run = secrets.token_hex(4)
        self.epoch = 0
        self.numbers = itertools.count()
        self.meetings: dict[tuple[MeshWorld, MeshWorld], UniqueId] = {}
        """Names of the communicators between meshes, until something fails."""
        self.endings: list[Any] = []
        """Tasks that end processes."""
        self._worlds: dict[tuple[int, ...], MeshWorld] = {}
        self._under_way: set[Any] = set()
        self.rests = 0
        """So often all meshes came to rest; programs that were connected before are to be connected anew."""
        self._is_hurt = False  # something has failed, and meshes may wait for each other since

    def worlds(self, wanted: Sequence[tuple[int, ...]], backend: Platform) -> list[MeshWorld]:
        """A living world on each of some sets of devices; those that are missing are started together.

        Raises ``ClusterError`` where processes cannot be placed, or run other versions than the driver.
        """
        for devices in wanted:
            if devices in self._worlds and not self._worlds[devices].is_lost:
                with contextlib.suppress(WorkerError):  # it died while nobody asked, and is marked as lost now
                    self._worlds[devices].check_pulse()
        if self._is_hurt:
            self.mend()
        missing = [devices for devices in wanted if devices not in self._worlds or self._worlds[devices].is_lost]
        started: list[MeshWorld] = []
        try:
            for devices in dict.fromkeys(missing):
                started.append(MeshWorld(self, wanted.index(devices), devices, backend))
            for world in started:
                world.meet()
        except BaseException:
            for world in started:
                world.close()
            raise
        self._worlds.update({world.devices: world for world in started})
        if started:
            self.epoch += 1
        return [self._worlds[devices] for devices in wanted]

    def peers(self, worlds: Iterable[MeshWorld]) -> PullPeers:
        """The transfer addresses of the processes of some worlds."""
        refs = {world: world.call("serve") for world in worlds}
        addresses: dict[int, str] = {}
        for world, asked in refs.items():
            for rank, address in enumerate(collected(asked, STARTING_SECONDS, f"{world.name} to serve arrays")):
                addresses.update(dict.fromkeys(world.devices_of(rank), address))
        return PullPeers(addresses, self.secret, self.epoch)

    def collected(
        self, refs: Sequence[Any], limit_seconds: float, what: str, world: MeshWorld | None = None
    ) -> list[Any]:
        """As :func:`collected`; what fails meanwhile anywhere is raised, for it may be what is waited for.

        ``world`` is the one that is waited for, which another thread may give up.
        """

        def pulse() -> None:
            if world is not None:
                world.check()
            self.check_pulse()

        try:
            found = collected(refs, limit_seconds, what, pulse)
        except AutoparError:  # whatever a process raised: others may wait for its part of a step
            self.hurt()
            raise
        self._under_way.difference_update(refs)  # what is held on to, Ray keeps
        return found

    def watch(self, refs: Iterable[Any]) -> None:
        """Calls whose failure concerns everybody who waits: the steps."""
        self._under_way.update(refs)

    def hurt(self) -> None:
        """Something has failed: before anything new begins, all meshes must come to rest."""
        self._is_hurt = True

    def check_pulse(self) -> None:
        """Raise ``WorkerError`` naming a process that is dead or silent, or a step that has failed."""
        import ray

        for world in self._worlds.values():
            if not world.is_lost:
                world.check_pulse()
        done, _ = (
            ray.wait(list(self._under_way), num_returns=len(self._under_way), timeout=0)
            if self._under_way
            else ([], [])
        )
        self._under_way.difference_update(done)
        for ref in done:
            checked(ref, "a step")

    def settle(self) -> None:
        """After a failure: bring living meshes to rest, without arrays, and give up those that do not come to rest.

        A mesh whose neighbour died may wait for it in a collective or a pull for ever; then it is lost as well.
        """
        resting = {world: world.try_to_rest() for world in self._worlds.values() if not world.is_lost}
        until = time.monotonic() + RESTING_SECONDS
        for world, refs in resting.items():
            try:
                collected(refs, max(0.1, until - time.monotonic()), f"{world.name} to rest")
            except WorkerError:
                world.lose()
        self.epoch += 1
        self.rests += 1
        self.meetings.clear()
        self._under_way.clear()

    def mend(self) -> None:
        """After a failure: as :meth:`settle`, and end what is left of the meshes that are lost."""
        self.settle()
        for world in self._worlds.values():
            if world.is_lost:
                world.close()
        self._is_hurt = False

    def status(self) -> list[HostStatus]:
        """How each process is; those that do not answer are left out."""
        return [status for world in self._worlds.values() if not world.is_lost for status in world.status()]

    def close(self) -> None:
        """Stop all processes."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
        await_ends(self.endings)
        self.endings.clear()


class MeshWorld:
    """Owns the processes of one mesh, and its coordinator."""

    def __init__(self, fleet: Fleet, number: int, devices: tuple[int, ...], backend: Platform) -> None:
        """Starts the processes without waiting for them."""
        hosts = fleet.hosts
        by_host: dict[int, list[int]] = {}
        for device in sorted(devices):
            by_host.setdefault(device // hosts.devices_per_host, []).append(device)
        if max(by_host) >= len(hosts.nodes):
            raise ClusterError(
                f"the plan uses host {max(by_host) + 1}, and the Ray cluster has {len(hosts.nodes)}; plan for this cluster"
            )
        counts = {len(own) for own in by_host.values()}
        if len(counts) > 1:
            raise ClusterError(f"a mesh has {sorted(counts)} devices on its hosts; give it as many on each")
        self.devices = devices
        self.name = f"mesh {number + 1}"
        self._fleet = fleet
        self._number = number
        self._backend = backend
        self._by_rank = list(by_host.values())
        self.is_lost = self._is_closed = False
        self._released: deque[int] = deque()
        self._lock = threading.Lock()
        self._warmed: set[Mesh] = set()
        self._step_limits: dict[str, float] = {}
        self._service: Any = None
        self._pids: list[int] = []
        self._readers: set[int] = set()
        self._there_until = 0  # arrays up to that number are known to be computed
        nodes = [hosts.nodes[host] for host in by_host]
        self._nodes = nodes
        self._group = placement_group(nodes, len(self._by_rank[0]), backend)
        names = [f"{self.name}, host {host + 1} ({node.address})" for host, node in zip(by_host, nodes, strict=True)]
        self.host_names = names
        environment = environment_of(backend)
        identity = f"{fleet.run}.{next(fleet.numbers)}"
        self.actors = [
            start_actor((f"{identity}.{rank}", name), self._group, rank, len(self._by_rank[0]), backend, environment)
            for rank, name in enumerate(names)
        ]

    def meet(self) -> None:
        """Wait until the processes are there and have become one world."""
        await_group(self._group, self.name, self._fleet.hosts, self._nodes)
        ours = our_versions()
        found = collected(self.call("versions"), STARTING_SECONDS, f"the processes of {self.name} to start")
        for name, theirs in zip(self.host_names, found, strict=True):
            if theirs != ours:
                raise ClusterError(f"{name} runs {theirs}, the driver {ours}; install the same versions on every host")
        processes = len(self.actors)
        coordinator = ""
        if processes > 1:
            coordinator = f"{own_address()}:{free_port(own_address())}"
            self._service = _compat.serve_coordinator(coordinator, processes)
        settings = {name: getattr(jax.config, name) for name in _SETTINGS}
        refs = []
        for rank, (actor, node) in enumerate(zip(self.actors, self._nodes, strict=True)):
            world = World(
                self._number,
                coordinator,
                processes,
                rank,
                len(self._by_rank[rank]),
                self._backend.value,
                node.address,
                settings,
            )
            refs.append(actor.join.remote(world))
        self._pids = collected(refs, STARTING_SECONDS, f"the processes of {self.name} to meet")

    # ------------------------------------------------------------------------------------------------------ calling

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every process; the references of what they will return."""
        self.check()
        return [getattr(actor, method).remote(*arguments) for actor in self.actors]

    def aside(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every process beside what they are doing; for what touches no arrays of the steps."""
        self.check()
        return [getattr(actor, method).options(concurrency_group=ASIDE).remote(*arguments) for actor in self.actors]

    def check(self) -> None:
        """Raise ``WorkerError`` if this world is lost."""
        if self.is_lost:
            raise WorkerError(f"{self.name} was lost; start from a checkpoint, or from a state that is made anew")

    def devices_of(self, rank: int) -> list[int]:
        """The cluster's devices of a process."""
        return self._by_rank[rank]

    def expect(self, program: str, step_seconds: float) -> None:
        """Tell how long a step of a program may take before it counts as hanging."""
        self._step_limits[program] = step_seconds

    @property
    def limit_seconds(self) -> float:
        """How long what the processes were told may take them: a step, and a copy of the state before it."""
        return 2 * max(self._step_limits.values(), default=FETCHING_SECONDS)

    def warm(self, meshes: Sequence[Mesh]) -> list[Any]:
        """Make the communicators of logical meshes, where there are several processes."""
        new = [mesh for mesh in dict.fromkeys(meshes) if mesh not in self._warmed and len(self.actors) > 1]
        self._warmed.update(new)
        return self.call("warm", new) if new else []

    def status(self) -> list[HostStatus]:
        """How each process is, as far as they answer at once."""
        import ray

        refs = [actor.status.options(concurrency_group=CONTROL).remote() for actor in self.actors]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=2.0)
        found = []
        for ref in ready:
            try:
                found.append(ray.get(ref))
            except ray.exceptions.RayError:
                continue
        return found

    def collected(self, refs: Sequence[Any], limit_seconds: float, what: str) -> list[Any]:
        """As :meth:`Fleet.collected`; ends as well when this world is lost meanwhile."""
        self.check()
        return self._fleet.collected(refs, limit_seconds, what, self)

    def check_pulse(self) -> None:
        """Raise ``WorkerError`` if a process does not answer within :data:`SILENT_SECONDS`."""
        import ray

        refs = [actor.pulse.options(concurrency_group=CONTROL).remote() for actor in self.actors]
        _, silent = ray.wait(refs, num_returns=len(refs), timeout=SILENT_SECONDS)
        for rank, ref in enumerate(refs):
            if ref in silent:
                self._kill(rank)  # who waits for what a stopped process was to send would never come to rest
        for name, ref in zip(self.host_names, refs, strict=True):
            if ref in silent:
                self.lose()
                raise WorkerError(
                    f"{name} has not answered for {SILENT_SECONDS:g} s: it is stopped, or its network is cut"
                )
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                self.lose()
                raise WorkerError(f"{name}: the process is gone ({first_line(error)})") from error

    def try_to_rest(self) -> list[Any]:
        """Ask the processes to finish what they do, well or badly, and to forget all arrays."""
        self._released.clear()
        # At once, for a step may wait for the dead.
        hung_up = [actor.hang_up.options(concurrency_group=CONTROL).remote() for actor in self.actors]
        return [*hung_up, *self.call("rest")]

    def lose(self) -> None:
        """Give the mesh up: its arrays are gone.  Processes that are left end when the fleet is mended."""
        self._fleet.hurt()
        self.is_lost = True

    def _kill(self, rank: int) -> None:
        """End a process, if it has told its number already; it need not hear of it."""
        if rank < len(self._pids):
            self._fleet.endings.append(kill_there(self._nodes[rank], self._pids[rank]))

    def close(self) -> None:
        """Stop the processes and free what they were given."""
        import ray

        self.is_lost = True
        if self._is_closed:
            return
        self._is_closed = True
        for actor in self.actors:
            ray.kill(actor)
        for rank in range(len(self._pids)):
            self._kill(rank)
        ray.util.remove_placement_group(self._group)
        if self._service is not None:
            # It waits for processes that do not say goodbye any more.  No daemon: jaxlib aborts a program that ends meanwhile.
            threading.Thread(target=self._service.shutdown).start()
            self._service = None

    # ------------------------------------------------------------------------------------------------------- arrays

    def new_array(self, aval: Any, where: Where, number: int) -> RemoteArray:
        """The handle of an array that has, or will have, this number on the processes."""
        return RemoteArray(aval, where, self, number)

    def pieces(self, value: np.ndarray[Any, Any], where: Where, key_impl: str | None = None) -> list[HostPieces]:
        """An array cut for each process; of typed keys its words."""
        shape = value.shape
        placement = where.placement(value.ndim)
        cut: dict[Any, np.ndarray[Any, Any]] = {}
        of_device: dict[int, np.ndarray[Any, Any]] = {}
        for position, device in enumerate(where.devices):
            box = piece_box(shape, placement, position)
            if box not in cut:
                cut[box] = np.asarray(value[tuple(slice(*ends) for ends in box)], order="C")
            of_device[device] = cut[box]
        found = []
        for own in self._by_rank:
            mine = set(own)
            ordered = tuple(of_device[device] for device in where.devices if device in mine)
            found.append(HostPieces(shape, ordered, key_impl))
        return found

    def _send_reader(self, data: HostData) -> None:
        """Raises ``DataError`` if it cannot go to the hosts, or does not find there what it needs."""
        from ray import cloudpickle

        try:
            pickled = cloudpickle.dumps(data.read)
        except Exception as error:  # whatever what it holds on to raises
            raise DataError(
                f"the function of autopar.HostData cannot be sent to the hosts: {first_line(error)}; "
                "let it open and make what it needs when it is called"
            ) from error
        refs = self.call("take_reader", data.token, pickled, data.num_leaves)
        self.collected(refs, self.limit_seconds, f"{self.name} to take the function that reads batches")
        self._readers.add(data.token)

    def rows(self, leaf: HostLeaf, row: int, where: Where) -> list[HostRows]:
        """What each process reads of a leaf; ``row`` is the number of the microbatch, or -1 for the whole leaf."""
        if leaf.data.token not in self._readers:
            self._send_reader(leaf.data)
        shape = leaf.shape if row < 0 else leaf.shape[1:]
        placement = where.placement(len(shape))
        of_device = {
            device: leaf.part(row, piece_box(shape, placement, position))
            for position, device in enumerate(where.devices)
        }
        dtype = _compat.dtype_name(leaf.dtype)
        found = []
        for own in self._by_rank:
            mine = set(own)
            parts = tuple(of_device[device] for device in where.devices if device in mine)
            found.append(HostRows(leaf.data.token, leaf.step, leaf.leaf, shape, dtype, parts))
        return found

    def fetch(self, array: RemoteArray) -> np.ndarray[Any, Any]:
        """The value of an array, every piece of it from one process."""
        self.check()
        placement = array.where.placement(array.ndim)
        rank_of = {device: rank for rank, own in enumerate(self._by_rank) for device in own}
        holders: dict[tuple[int, ...], int] = {}
        for position in range(array.where.mesh.size):
            holders.setdefault(placement.piece(position), position)
        asked: dict[int, list[int]] = {}
        for position in holders.values():
            asked.setdefault(rank_of[array.where.devices[position]], []).append(position)
        refs = [self.actors[rank].fetch.remote(array.number, positions) for rank, positions in asked.items()]
        limit_seconds = self.limit_seconds + array.nbytes / SLOWEST_BYTES_PER_SECOND
        answers = self.collected(refs, limit_seconds, f"{self.name} to send an array")
        whole: np.ndarray[Any, Any] | None = None
        for positions, pieces in zip(asked.values(), answers, strict=True):
            for position, piece in zip(positions, pieces, strict=True):
                more = piece.shape[array.ndim :]
                if whole is None:
                    whole = np.empty((*array.shape, *more), piece.dtype)
                whole[tuple(slice(*ends) for ends in piece_box(array.shape, placement, position))] = piece
        if whole is None:
            raise InternalError(f"{array!r} has no piece; report this")
        return whole

    def wait(self, array: RemoteArray) -> None:
        """Return when an array is there; of many that are there already, as the leaves of a state, few are asked for."""
        if array.number > self._there_until:
            told = self.collected(
                self.call("wait", array.number), self.limit_seconds, f"{self.name} to compute an array"
            )
            self._there_until = max(self._there_until, min(told))

    def release(self, number: int) -> None:
        """Remember to free an array; may be called by any thread, at any time."""
        self._released.append(number)

    def released(self) -> tuple[int, ...]:
        """Numbers of arrays that nobody can ask for any more, told once."""
        found = []
        while self._released:
            found.append(self._released.popleft())
        return tuple(found)


def started_fleet(hosts: RayHosts) -> Fleet:
    """The fleet on some hosts: the one that runs there, or a new one."""
    start: Callable[[RayHosts], Fleet] = Fleet
    return hosts.fleet(start)
