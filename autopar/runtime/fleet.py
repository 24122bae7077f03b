"""The driver's side of a Ray cluster: worlds of processes, one for each mesh, and what fails in them.

    placement group    a bundle for each host of a mesh, on the node that the plan says
    actor              one :class:`~autopar.runtime.mesh_host.MeshHost` for each bundle
    coordinator        of the mesh's JAX world; it is served by the driver, so that no worker's death takes it along

A world lives until the fleet is closed, or until it is lost: one process that dies takes its mesh with it, for the others may
wait for it inside a collective for ever.  Other meshes live on.
"""

from __future__ import annotations

import itertools
import os
import platform
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar import _compat, version
from autopar.cluster import Mesh, Platform
from autopar.disk_cache import VARIABLE
from autopar.errors import AutoparError, ClusterError, InternalError, WorkerError
from autopar.ray_hosts import RayHosts, RayNode
from autopar.runtime.distributed_array import DistributedArray
from autopar.runtime.host_data import HostLeaf
from autopar.runtime.mesh_host import MeshHost
from autopar.runtime.messages import HostPieces, HostRows, HostStatus, Versions, Where, World
from autopar.runtime.pulled import Peers
from autopar.schedule.cross_mesh import piece_box

STARTING_SECONDS = 120.0
"""So long the processes of a mesh may take to start and to meet."""
COMPILING_SECONDS = 1800.0
PULSE_SECONDS = 2.0
"""So often processes are asked for a sign of life while they are waited for."""
SILENT_SECONDS = 10.0
RESTING_SECONDS = 15.0
FETCHING_SECONDS = 600.0
NAMESPACE = "autopar"
"""Of the names of our actors in Ray."""
_CONTROL, _ASIDE = "control", "aside"  # groups of calls that do not wait for the steps
_TINY = 1e-3  # share of a node's resource that pins a bundle to it
_SETTINGS = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable", "jax_default_matmul_precision")
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


class Fleet:
    """Owns the worlds on the hosts of a Ray cluster; made by the first program that runs there."""

    def __init__(self, hosts: RayHosts) -> None:
        self.hosts = hosts
        self.secret = secrets.token_bytes(16)
        self.run = secrets.token_hex(4)
        self.epoch = 0
        self.numbers = itertools.count()
        self._worlds: dict[tuple[int, ...], MeshWorld] = {}

    def worlds(self, wanted: Sequence[tuple[int, ...]], backend: Platform) -> list[MeshWorld]:
        """A living world on each of some sets of devices; those that are missing are started together.

        Raises ``ClusterError`` where processes cannot be placed, or run other versions than the driver.
        """
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

    def peers(self, worlds: Iterable[MeshWorld]) -> Peers:
        """The transfer addresses of the processes of some worlds."""
        refs = {world: world.call("serve") for world in worlds}
        addresses: dict[int, str] = {}
        for world, asked in refs.items():
            for rank, address in enumerate(collected(asked, STARTING_SECONDS, f"{world.name} to serve arrays")):
                addresses.update(dict.fromkeys(world.devices_of(rank), address))
        return Peers(addresses, self.secret, self.epoch)

    def collected(self, refs: Sequence[Any], limit_seconds: float, what: str) -> list[Any]:
        """As :func:`collected`, and a process that is silent meanwhile is an error of its own."""
        return collected(refs, limit_seconds, what, self.check_pulse)

    def check_pulse(self) -> None:
        """Raise ``WorkerError`` naming a process that is dead or silent."""
        for world in self._worlds.values():
            if not world.is_lost:
                world.check_pulse()

    def mend(self) -> None:
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

    def status(self) -> list[HostStatus]:
        """How each process is; those that do not answer are left out."""
        return [status for world in self._worlds.values() if not world.is_lost for status in world.status()]

    def close(self) -> None:
        """Stop all processes."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()


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
        self.is_lost = False
        self._released: deque[int] = deque()
        self._lock = threading.Lock()
        self._warmed: set[Mesh] = set()
        self._service: Any = None
        self._pids: list[int] = []
        self._readers: set[int] = set()
        nodes = [hosts.nodes[host] for host in by_host]
        self._nodes = nodes
        self._group = _placement_group(nodes, len(self._by_rank[0]), backend)
        names = [f"{self.name}, host {host + 1} ({node.address})" for host, node in zip(by_host, nodes, strict=True)]
        self.host_names = names
        environment = _environment(backend, len(self._by_rank[0]))
        identity = f"{fleet.run}.{next(fleet.numbers)}"
        self.actors = [
            _actor((f"{identity}.{rank}", name), self._group, rank, len(self._by_rank[0]), backend, environment)
            for rank, name in enumerate(names)
        ]

    def meet(self) -> None:
        """Wait until the processes are there and have become one world."""
        _await_group(self._group, self.name, self._nodes)
        ours = _our_versions()
        found = collected(self.call("versions"), STARTING_SECONDS, f"the processes of {self.name} to start")
        for name, theirs in zip(self.host_names, found, strict=True):
            if theirs != ours:
                raise ClusterError(f"{name} runs {theirs}, the driver {ours}; install the same versions on every host")
        processes = len(self.actors)
        coordinator = ""
        if processes > 1:
            coordinator = f"{_own_address()}:{_free_port(_own_address())}"
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
        return [getattr(actor, method).options(concurrency_group=_ASIDE).remote(*arguments) for actor in self.actors]

    def check(self) -> None:
        """Raise ``WorkerError`` if this world is lost."""
        if self.is_lost:
            raise WorkerError(f"{self.name} was lost; start from a checkpoint, or from a state that is made anew")

    def devices_of(self, rank: int) -> list[int]:
        """The cluster's devices of a process."""
        return self._by_rank[rank]

    def warm(self, meshes: Sequence[Mesh]) -> list[Any]:
        """Make the communicators of logical meshes, where there are several processes."""
        new = [mesh for mesh in dict.fromkeys(meshes) if mesh not in self._warmed and len(self.actors) > 1]
        self._warmed.update(new)
        return self.call("warm", new) if new else []

    def status(self) -> list[HostStatus]:
        """How each process is, as far as they answer at once."""
        import ray

        refs = [actor.status.options(concurrency_group=_CONTROL).remote() for actor in self.actors]
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

        def pulse() -> None:
            self.check()
            self._fleet.check_pulse()

        return collected(refs, limit_seconds, what, pulse)

    def check_pulse(self) -> None:
        """Raise ``WorkerError`` if a process does not answer within :data:`SILENT_SECONDS`."""
        import ray

        refs = [actor.pulse.options(concurrency_group=_CONTROL).remote() for actor in self.actors]
        _, silent = ray.wait(refs, num_returns=len(refs), timeout=SILENT_SECONDS)
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
                raise WorkerError(f"{name}: the process is gone ({_first_line(error)})") from error

    def try_to_rest(self) -> list[Any]:
        """Ask the processes to finish what they do, well or badly, and to forget all arrays."""
        self._released.clear()
        return self.call("rest")

    def lose(self) -> None:
        """Kill what is left of the processes; the arrays on them are gone."""
        self.is_lost = True
        self.close()

    def close(self) -> None:
        """Stop the processes and free what they were given."""
        import ray

        self.is_lost = True
        for actor in self.actors:
            ray.kill(actor)
        for node, pid in zip(self._nodes, self._pids, strict=False):
            _kill_there(node, pid)
        ray.util.remove_placement_group(self._group)
        if self._service is not None:
            # It waits for processes that do not say goodbye any more.
            threading.Thread(target=self._service.shutdown, daemon=True).start()
            self._service = None

    # ------------------------------------------------------------------------------------------------------- arrays

    def new_array(self, aval: Any, where: Where, number: int) -> DistributedArray:
        """The handle of an array that has, or will have, this number on the processes."""
        return DistributedArray(aval, where, self, number)

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

    def rows(self, leaf: HostLeaf, row: int, where: Where) -> list[HostRows]:
        """What each process reads of a leaf; ``row`` is the number of the microbatch, or -1 for the whole leaf."""
        if leaf.data.token not in self._readers:
            self._readers.add(leaf.data.token)
            self.call("take_reader", leaf.data.token, leaf.data.read, leaf.data.num_leaves)
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

    def fetch(self, array: DistributedArray) -> np.ndarray[Any, Any]:
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
        answers = self.collected(refs, FETCHING_SECONDS, f"{self.name} to send an array")
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

    def wait(self, array: DistributedArray) -> None:
        """Return when an array is there."""
        self.collected(self.call("wait", array.number), FETCHING_SECONDS, f"{self.name} to compute an array")

    def release(self, number: int) -> None:
        """Remember to free an array; may be called by any thread, at any time."""
        self._released.append(number)

    def released(self) -> tuple[int, ...]:
        """Numbers of arrays that nobody can ask for any more, told once."""
        found = []
        while self._released:
            found.append(self._released.popleft())
        return tuple(found)


# ------------------------------------------------------------------------------------------------------ waiting


def collected(
    refs: Sequence[Any], limit_seconds: float, what: str, while_waiting: Callable[[], None] = lambda: None
) -> list[Any]:
    """What calls return, in their order; the first that fails is raised at once, whatever the others still do.

    ``while_waiting`` is called every :data:`PULSE_SECONDS` and may raise.
    Raises ``WorkerError``: a process died, raised, or did not answer within the limit.
    """
    import ray

    left, until = list(refs), time.monotonic() + limit_seconds
    while left:
        pause = min(PULSE_SECONDS, max(0.0, until - time.monotonic()))
        ready, left = ray.wait(left, num_returns=1, timeout=pause)
        if not ready and time.monotonic() < until:
            while_waiting()
        elif not ready:
            raise WorkerError(f"waited {limit_seconds:g} s for {what}; {len(left)} of {len(refs)} did not answer")
        for ref in ready:
            _checked(ref, what)
    return [ray.get(ref) for ref in refs]


def _checked(ref: Any, what: str) -> None:
    import ray

    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, AutoparError):
            raise cause from error
        raise WorkerError(f"while waiting for {what}: {type(cause).__name__}: {cause}{_advice(str(cause))}") from error
    except ray.exceptions.RayError as error:
        raise WorkerError(f"while waiting for {what}: a process is gone ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def _advice(text: str) -> str:
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        return ". Its devices have too little memory: plan with memory_per_device=..., or more microbatches"
    return ""


# ------------------------------------------------------------------------------------------------------ starting


def _kill_there(node: RayNode, pid: int) -> None:
    """Kill a process on its node: Ray asks it to end itself, and one that is stopped does not hear that."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
    ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(pid, MeshHost.__name__)


def _kill(pid: int, of_actor: str) -> None:
    """Kill a process if it is still an actor of ours: Ray's workers wear the actor's name."""
    import psutil

    try:
        process = psutil.Process(pid)
        if of_actor in " ".join(process.cmdline()):
            process.kill()
    except psutil.NoSuchProcess:
        return


def _placement_group(nodes: Sequence[RayNode], devices: int, backend: Platform) -> Any:
    import ray

    bundles = []
    for node in nodes:
        bundle = {f"node:{node.address}": _TINY}
        if backend is Platform.CUDA:
            bundle["GPU"] = float(devices)
        bundles.append(bundle)
    return ray.util.placement_group(bundles, strategy="PACK")


def _await_group(group: Any, name: str, nodes: Sequence[RayNode]) -> None:
    if not group.wait(timeout_seconds=STARTING_SECONDS):
        where = ", ".join(sorted({node.address for node in nodes}))
        raise ClusterError(
            f"Ray found no place for {name} on {where} within {STARTING_SECONDS:g} s; are its devices taken by another "
            "program? `ray status` says what is in use"
        )


def _actor(
    names: tuple[str, str], group: Any, rank: int, devices: int, backend: Platform, environment: Mapping[str, str]
) -> Any:
    """The actor of one process; ``names`` are what Ray finds it by, and what its log says."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": devices if backend is Platform.CUDA else 0,
        "scheduling_strategy": strategy,
        "name": names[0],
        "namespace": NAMESPACE,
        "runtime_env": {"env_vars": dict(environment)},
    }
    remote: Any = ray.remote
    return remote(concurrency_groups={_CONTROL: 1, _ASIDE: 1})(MeshHost).options(**options).remote(names[1])


def _environment(backend: Platform, devices: int) -> dict[str, str]:
    """The environment in which a process imports JAX."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT)]
    environment = {
        "XLA_FLAGS": " ".join(flags),
        **{name: os.environ[name] for name in (VARIABLE,) if name in os.environ},
        # Where it is installed for the driver, on this machine or a shared disk; elsewhere the path means nothing.
        "PYTHONPATH": os.pathsep.join(
            [str(Path(version.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        ),
    }
    if backend is Platform.CPU:
        environment["JAX_PLATFORMS"] = "cpu"
        # Fewer threads than twice the devices, and collectives that are in flight on several of them wait for ever.
        environment["NPROC"] = str(max(4, 2 * devices, os.cpu_count() or 1))
    return environment


def _our_versions() -> Versions:
    return Versions(version.VERSION, jax.__version__, platform.python_version())


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def statuses() -> list[tuple[str, HostStatus]]:
    """How the processes of all runs on the Ray cluster are that this process is connected to, each with its run."""
    import ray

    refs: dict[Any, str] = {}
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE:
            actor = ray.get_actor(one["name"], namespace=NAMESPACE)
            refs[actor.status.options(concurrency_group=_CONTROL).remote()] = one["name"].split(".")[0]
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=SILENT_SECONDS) if refs else ([], [])
    found = []
    for ref in ready:
        try:
            found.append((refs[ref], ray.get(ref)))
        except ray.exceptions.RayError:
            continue
    return sorted(found, key=lambda pair: (pair[0], pair[1].name))


def started_fleet(hosts: RayHosts) -> Fleet:
    """The fleet on some hosts: the one that runs there, or a new one."""
    start: Callable[[RayHosts], Fleet] = Fleet
    return hosts.fleet(start)
