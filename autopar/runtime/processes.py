"""How the processes of a mesh are started on the nodes of a Ray cluster, found there by other programs, and ended."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from autopar import version
from autopar.cluster import Platform
from autopar.cores import DEVICES_FLAG
from autopar.disk_cache import VARIABLE
from autopar.errors import ClusterError, WorkerError
from autopar.host_memory import variables
from autopar.ray_hosts import RayHosts, RayNode
from autopar.runtime.mesh_host import MeshHost
from autopar.runtime.messages import HostStatus, Versions
from autopar.runtime.waiting import PULSE_SECONDS, SILENT_SECONDS, STARTING_SECONDS

NAMESPACE = "autopar"
"""Of the names of our actors in Ray."""

CONTROL, ASIDE = "control", "aside"
"""Groups of calls that do not wait for the steps of a process."""

ENDING_SECONDS = 5.0
"""So long the end of processes is waited for."""

_TINY = 1e-3  # share of a node's resource that pins a bundle to it


def kill_there(node: RayNode, pid: int) -> Any:
    """Kill a process on its node: Ray asks it to end itself, and one that is stopped does not hear that.

    Returns the reference of the task that does it, for :func:`await_ends`.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
    task: Any = ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return task.remote(pid, MeshHost.__name__)


def await_ends(refs: Sequence[Any]) -> None:
    """Wait for tasks of :func:`kill_there`; that they fail is well, for then their node is gone.

    Who lets go of such a task and ends has Ray say that a worker died unexpectedly.
    """
    import ray

    ended, _ = ray.wait(list(refs), num_returns=len(refs), timeout=ENDING_SECONDS) if refs else ([], [])
    for ref in ended:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(ref)


def _kill(pid: int, of_actor: str) -> None:
    """Kill a process if it is still an actor of ours: Ray's workers wear the actor's name."""
    import psutil

    try:
        process = psutil.Process(pid)
        if of_actor in " ".join(process.cmdline()):
            process.kill()
    except psutil.NoSuchProcess:
        return


def statuses() -> list[tuple[str, HostStatus]]:
    """How the processes of all runs on the Ray cluster are that this process is connected to, each with its run."""
    import ray

    refs: dict[Any, str] = {}
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE:
            actor = ray.get_actor(one["name"], namespace=NAMESPACE)
            refs[actor.status.options(concurrency_group=CONTROL).remote()] = one["name"].split(".")[0]
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=SILENT_SECONDS) if refs else ([], [])
    found = []
    for ref in ready:
        try:
            found.append((refs[ref], ray.get(ref)))
        except ray.exceptions.RayError:
            continue
    return sorted(found, key=lambda pair: (pair[0], pair[1].name))


def placement_group(nodes: Sequence[RayNode], devices: int, backend: Platform) -> Any:
    """A bundle on each node, with so many devices."""
    import ray

    bundles = []
    for node in nodes:
        bundle = {f"node:{node.address}": _TINY}
        if backend is Platform.CUDA:
            bundle["GPU"] = float(devices)
        bundles.append(bundle)
    return ray.util.placement_group(bundles, strategy="PACK")


def await_group(group: Any, name: str, hosts: RayHosts, nodes: Sequence[RayNode]) -> None:
    """Wait until Ray has placed a group; raises ``ClusterError`` where it does not, ``WorkerError`` if a node dies meanwhile."""
    until = time.monotonic() + STARTING_SECONDS
    while not group.wait(timeout_seconds=PULSE_SECONDS):
        alive = {node.node_id for node in hosts.living()}
        for node in nodes:
            if node.node_id not in alive:
                raise WorkerError(f"host {node.address} went away while {name} was being started there")
        if time.monotonic() < until:
            continue
        where = ", ".join(sorted({node.address for node in nodes}))
        raise ClusterError(
            f"Ray found no place for {name} on {where} within {STARTING_SECONDS:g} s; are its devices taken by another "
            "program? `ray status` says what is in use"
        )


def start_actor(
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
    return remote(concurrency_groups={CONTROL: 1, ASIDE: 1})(MeshHost).options(**options).remote(names[1])


def environment_of(backend: Platform) -> dict[str, str]:
    """The environment in which a process imports JAX."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICES_FLAG)]
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
        environment |= variables(os.environ)
    elif backend is Platform.CUDA:
        # A kernel that is loaded at its first launch may wait for all of the device, and so for a message of another mesh.
        environment["CUDA_MODULE_LOADING"] = os.environ.get("CUDA_MODULE_LOADING", "EAGER")
    return environment


def our_versions() -> Versions:
    """Those of the driver."""
    return Versions(version.VERSION, jax.__version__, platform.python_version())


def own_address() -> str:
    """The address by which Ray knows this host."""
    import ray

    return str(ray.util.get_node_ip_address())


def free_port(address: str) -> int:
    """A port of an address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
