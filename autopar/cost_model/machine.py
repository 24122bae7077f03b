"""What do meshes and messages share, and how fast is it?

A *resource* gives so many units per second: a direction of a link bytes, a pool of processor cores seconds of work.  Whoever
runs uses resources in fixed proportions:

    a task of a mesh    works at a speed v ≤ max_speed (1: as fast as when all devices compute at once) and takes a·v of
                        each pool (a = the mesh's devices in the pool / the devices that share it)
    a message           moves y bytes per second and takes a·y of each link (a = its bytes on the link / its most on any)

A message to another host uses the card of each, and where hosts are linked differently what the two cards have for each other: a
card carries as much as the fastest link of its host, and to one host as much as the link to it.

Who shares a resource gets the max-min fair rates v or y (:mod:`autopar.cost_model.fair`).  Resources that give as much, and of
which everybody takes the same, are full at the same time: one of them stands for all.  A message between meshes of many hosts
loads as many cards, all alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from autopar.cluster import Cluster, Link
from autopar.cost_model.fair import Usage
from autopar.errors import ClusterError


class ResourceKind(Enum):
    """What can be shared: links in each direction, and cores."""

    LOCAL_OUT = "local out"
    LOCAL_IN = "local in"
    NETWORK_OUT = "network out"
    NETWORK_IN = "network in"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Resource:
    """One link direction, number so-and-so of its host, or one pool of cores (``host`` 0)."""

    kind: ResourceKind
    host: int
    number: int
    peer: int = -1
    """Of what goes over the network: the other host, where the link to it is slower than the card."""

    def __str__(self) -> str:
        to = f" to and from host {self.peer}" if self.peer >= 0 else ""
        return f"{self.kind.value} {self.number} of host {self.host}{to}"


_NETWORK = (ResourceKind.NETWORK_OUT, ResourceKind.NETWORK_IN)

Amounts = tuple[tuple[Resource, float], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """One message: seconds until it begins to flow, and the bytes that then go through each resource."""

    latency_seconds: float = 0.0
    bytes_on: Amounts = ()


@dataclass(frozen=True, slots=True)
class Processor:
    """How a mesh computes: its largest speed, and what it takes of each pool for each second of work (none: its own)."""

    max_speed: float = 1.0
    share_of: Amounts = ()

    @property
    def fastest(self) -> float:
        """The speed at which it works while all others idle."""
        return min([self.max_speed, *(1 / share for _, share in self.share_of)])


@dataclass(frozen=True)
class Machine:
    """A processor for each mesh, and units per second of each resource in use."""

    meshes: tuple[Processor, ...]
    units_per_second: Mapping[Resource, float] = field(default_factory=dict)


def make_machine(cluster: Cluster, devices: Sequence[Sequence[int]], max_speed: float | None = None) -> Machine:
    """The machine of meshes on the given device ids of a cluster.

    ``max_speed`` says how much faster than with all devices at work a mesh becomes if the others are idle: at most
    ``cluster.compute_shared_by``; 1 where nothing is shared.  Default: as measured, or else that most.

    Raises ``ClusterError`` for ids outside the cluster or on two meshes, or a speed outside 1 … ``compute_shared_by``.
    """
    sharing = cluster.compute_shared_by
    speed = _alone_speed(cluster) if max_speed is None else max_speed
    if not 1 <= speed <= sharing:
        raise ClusterError(
            f"max_speed is {max_speed!r}; give 1 to {sharing}, the compute_shared_by of {cluster.name!r}"
        )
    ids = [device for mesh in devices for device in mesh]
    if len(set(ids)) != len(ids) or not all(0 <= device < cluster.num_devices for device in ids):
        raise ClusterError(
            f"meshes on devices {devices}; give each of 0 to {cluster.num_devices - 1} to one mesh at most"
        )
    units: dict[Resource, float] = {}
    if sharing > 1:
        units = {_pool(device, sharing): 1.0 for device in range(cluster.num_devices)}
    for host in range(cluster.hosts):
        rates = cluster.local_link.bytes_per_second, cluster.card_bytes_per_second(host)
        for (link, kinds), rate in zip(_links(cluster), rates, strict=True):
            for number in range(-(-cluster.devices_per_host // link.shared_by)):
                for kind in kinds:
                    units[Resource(kind, host, number)] = rate
                    if kind in _NETWORK:
                        units.update(_slow_paths(kind, host, number, cluster))
    return Machine(tuple(_processor(mesh, sharing, speed) for mesh in devices), units)


def _slow_paths(kind: ResourceKind, host: int, number: int, cluster: Cluster) -> dict[Resource, float]:
    """Links of a card to single hosts, where hosts are linked differently."""
    others = (other for other in range(cluster.hosts) if cluster.host_links and other != host)
    return {Resource(kind, host, number, other): cluster.link_between(host, other).bytes_per_second for other in others}


def _alone_speed(cluster: Cluster) -> float:
    most = float(cluster.compute_shared_by)
    dispatch = None if cluster.profile is None else cluster.profile.dispatch
    return most if dispatch is None else min(dispatch.alone_speed, most)


def message_load(pieces: Iterable[tuple[int, int, float]], cluster: Cluster) -> Load:
    """The load of a message made of (source device, target device, bytes) that all leave at once.

    What stays on its device costs nothing.  Raises ``ClusterError`` for ids outside the cluster or negative bytes.
    """
    local, network = _links(cluster)
    bytes_on: defaultdict[Resource, float] = defaultdict(float)
    latency = 0.0
    for source, target, size_bytes in pieces:
        if not (0 <= source < cluster.num_devices and 0 <= target < cluster.num_devices and size_bytes >= 0):
            raise ClusterError(
                f"{size_bytes} bytes from device {source} to {target}; give 0 or more, of 0 to {cluster.num_devices - 1}"
            )
        if source == target:
            continue
        from_host, from_place = divmod(source, cluster.devices_per_host)
        to_host, to_place = divmod(target, cluster.devices_per_host)
        link, (out, into) = local if from_host == to_host else network
        leaving = Resource(out, from_host, from_place // link.shared_by)
        coming = Resource(into, to_host, to_place // link.shared_by)
        used = [leaving, coming]
        if from_host != to_host:
            link = cluster.link_between(from_host, to_host)
            if cluster.host_links:
                used += [replace(leaving, peer=to_host), replace(coming, peer=from_host)]
        for resource in used:
            bytes_on[resource] += size_bytes
        latency = max(latency, link.latency_seconds)
    return Load(latency, tuple(bytes_on.items()))


@dataclass(frozen=True)
class SharedResources:
    """The resources of a machine by number, the same for all for which one stands; ``capacities`` are units per second."""

    number_of: Mapping[Resource, int]
    capacities: tuple[float, ...]

    def usage(self, amounts: Amounts, size: float) -> Usage:
        """What is taken of each per unit of rate, by number.

        Raises ``ClusterError`` for a resource that the machine lacks.
        """
        if missing := next((resource for resource, _ in amounts if resource not in self.number_of), None):
            raise ClusterError(f"{missing} is in use, but the machine does not say how fast it is; add it")
        return tuple({self.number_of[resource]: amount / size for resource, amount in amounts if amount}.items())


def shared_resources(machine: Machine, loads: Iterable[Amounts]) -> SharedResources:
    """The resources of a machine on which all these loads come, and no others beside those of its meshes."""
    taken: dict[Resource, list[tuple[int, float]]] = {resource: [] for resource in machine.units_per_second}
    for number, amounts in enumerate((*(mesh.share_of for mesh in machine.meshes), *loads)):
        for resource, amount in amounts:
            if amount and resource in taken:
                taken[resource].append((number, amount))
    numbers: dict[tuple[float, tuple[tuple[int, float], ...]], int] = {}
    number_of = {
        resource: numbers.setdefault((machine.units_per_second[resource], tuple(by_whom)), len(numbers))
        for resource, by_whom in taken.items()
    }
    return SharedResources(number_of, tuple(units for units, _ in numbers))


def _links(cluster: Cluster) -> tuple[tuple[Link, tuple[ResourceKind, ResourceKind]], ...]:
    return (
        (cluster.local_link, (ResourceKind.LOCAL_OUT, ResourceKind.LOCAL_IN)),
        (cluster.network_link, (ResourceKind.NETWORK_OUT, ResourceKind.NETWORK_IN)),
    )


def _pool(device: int, sharing: int) -> Resource:
    return Resource(ResourceKind.COMPUTE, 0, device // sharing)


def _processor(devices: Sequence[int], sharing: int, speed: float) -> Processor:
    if sharing == 1:
        return Processor()
    share_of: defaultdict[Resource, float] = defaultdict(float)
    for device in devices:
        share_of[_pool(device, sharing)] += 1 / sharing
    return Processor(speed, tuple(share_of.items()))
