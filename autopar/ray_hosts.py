"""Which hosts of a Ray cluster are ours, and how is it reached?

This file speaks to Ray about nodes and nothing else; what runs on them is a matter of :mod:`autopar.runtime.fleet`.  A host of
ours is a node, or one of several parts of a node (``hosts=4`` on one machine: for trying things out, and for tests).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from autopar.errors import ClusterError

_Made = TypeVar("_Made")

_ACCELERATOR = "accelerator_type:"

_ASKING_SECONDS = 1.0
"""So often Ray is asked for hosts that are missing."""


class MeshTransport(Enum):
    """How arrays get from mesh to mesh: what the platform is best at, pulls, or NCCL's sends and receives between GPUs."""

    AUTO = "auto"
    PULL = "pull"
    NCCL = "nccl"


@dataclass(frozen=True)
class RayNode:
    """One node as Ray describes it; ``accelerator`` is Ray's name of its GPUs, if it has any."""

    node_id: str
    address: str
    cores: float
    gpus: int
    accelerator: str = ""


class RayHosts:
    """Owns the connection to a Ray cluster, and what was started on its hosts: see :meth:`close`.

    ``nodes`` are the hosts in order, a node several times if it counts as several hosts.
    """

    def __init__(
        self,
        address: str,
        nodes: tuple[RayNode, ...],
        devices_per_host: int,
        transport: MeshTransport = MeshTransport.AUTO,
    ) -> None:
        self.address = address
        self.transport = transport
        self.nodes = nodes
        self.devices_per_host = devices_per_host
        self._fleet: Any = None

    def __repr__(self) -> str:
        return f"RayHosts({self.address!r}, {len(self.nodes)} hosts × {self.devices_per_host} devices)"

    def fleet(self, start: Callable[[RayHosts], _Made]) -> _Made:
        """What runs on these hosts: started at the first question, the same one afterwards."""
        if self._fleet is None:
            self._fleet = start(self)
        return self._fleet

    def living(self) -> tuple[RayNode, ...]:
        """Those hosts whose nodes are alive now; a node that was started again at the address of ours is ours."""
        alive = _nodes(_ray())
        by_id = {node.node_id: node for node in alive}
        known = {node.node_id for node in self.nodes}
        by_address = {node.address: node for node in alive if node.node_id not in known}
        found = (by_id.get(node.node_id) or by_address.get(node.address) for node in self.nodes)
        return tuple(node for node in found if node is not None)

    def await_all(self, patience_seconds: float) -> bool:
        """Wait until all hosts are there, at most so long; whether they are."""
        until = time.monotonic() + patience_seconds
        while len(living := self.living()) < len(self.nodes):
            if time.monotonic() > until:
                return False
            time.sleep(_ASKING_SECONDS)
        self.nodes = living
        return True

    def without_lost(self) -> RayHosts:
        """Those that are alive now, as hosts of their own."""
        return RayHosts(self.address, self.living(), self.devices_per_host, self.transport)

    def numbers_of(self, left: RayHosts) -> tuple[int, ...]:
        """Which of these hosts those are that are left."""
        addresses = {node.address for node in left.nodes}
        return tuple(number for number, node in enumerate(self.nodes) if node.address in addresses)

    @property
    def running(self) -> Any:
        """What was started, or None."""
        return self._fleet

    def close(self) -> None:
        """Stop every process that was started on these hosts; their arrays are gone.  They may be started again."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()


def connect(
    address: str | None, hosts: int | None, devices_per_host: int | None, transport: MeshTransport | str = "auto"
) -> RayHosts:
    """The hosts of a Ray cluster; a connection of this process to Ray is used if there is one.

    ``address`` is one that ``ray.init`` takes (``"auto"``: the cluster that this machine belongs to; ``"local"``: a new one).
    Raises ``ClusterError`` if none is found, if it is smaller than what is asked for, or for an unknown transport.
    """
    known = [one.value for one in MeshTransport]
    if not isinstance(transport, MeshTransport) and transport not in known:
        raise ClusterError(f"transport={transport!r}; known are {', '.join(known)}")
    ray = _ray()
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=True, include_dashboard=False if address == "local" else None)
        except ConnectionError as error:
            raise ClusterError(
                f"no Ray cluster at {address!r}: {error}. Start one (`ray start --head` here, `ray start --address=...` on "
                'the other hosts), or take Cluster.ray("local") for one on this machine'
            ) from error
    nodes = _nodes(ray)
    if not nodes:
        raise ClusterError("the Ray cluster has no living node; look at `ray status`")
    if devices_per_host is None:
        devices_per_host = max(1, min(node.gpus for node in nodes))
    found = _hosts(nodes, hosts, devices_per_host)
    return RayHosts(ray.get_runtime_context().gcs_address, found, devices_per_host, MeshTransport(transport))


def _ray() -> Any:
    # Ray from 2.50 on speaks with tokens or without; all its processes must do the same, so what the user said stays.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray


def _nodes(ray: Any) -> list[RayNode]:
    """Living nodes, the head (where the cluster was started) first, then by address."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"]
            accelerator = next((name for name in resources if name.startswith(_ACCELERATOR)), "")
            one = RayNode(
                node["NodeID"],
                node["NodeManagerAddress"],
                float(resources.get("CPU", 0.0)),
                int(resources.get("GPU", 0)),
                accelerator.removeprefix(_ACCELERATOR),
            )
            found.append(("node:__internal_head__" not in resources, _sortable(one.address), one))
    return [one for *_, one in sorted(found, key=lambda row: (*row[:2], row[2].node_id))]


def _sortable(address: str) -> tuple[tuple[int, str], ...]:
    """Numbers of an address as numbers, so that neighbours are near each other."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in address.split("."))


def _hosts(nodes: list[RayNode], hosts: int | None, devices_per_host: int) -> tuple[RayNode, ...]:
    with_gpus = [node for node in nodes if node.gpus]
    if with_gpus:
        nodes = [node for node in nodes if node.gpus >= devices_per_host]
        if not nodes or (hosts or 0) > len(nodes):
            raise ClusterError(
                f"{len(nodes)} nodes of the Ray cluster have {devices_per_host} GPUs or more, and {hosts or 1} are asked for; "
                "ask for fewer hosts or devices_per_host, or add nodes"
            )
        return tuple(nodes[:hosts])
    if hosts is None or hosts <= len(nodes):
        return tuple(nodes[:hosts])
    if hosts % len(nodes):
        raise ClusterError(
            f"hosts={hosts} on the {len(nodes)} nodes of the Ray cluster: a node counts as several hosts only if all "
            f"count as equally many; give a multiple of {len(nodes)}"
        )
    return tuple(node for node in nodes for _ in range(hosts // len(nodes)))
