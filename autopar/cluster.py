"""What the hardware is: devices, hosts and the links between them.

A cluster is ``hosts`` hosts of ``devices_per_host`` equal devices.  Device ``d`` lives on host
``d // devices_per_host``.  Two link levels join them: the *local* link inside a host and the *network* link
between hosts, each with its α, β and ``shared_by`` (:mod:`autopar.devices`).  Device ``d`` uses link number
``(d mod devices_per_host) // shared_by`` of its host.

Between single hosts links may be others (``host_links``).  A host then has cards that carry as much as the fastest of its links,
and to one host as much as the link to it: α and β of a pair are what a message between these hosts finds.

Without a switch a group of devices of one host has the wires between its members only (``local_wiring``,
:mod:`autopar.wiring`); β of the local link is then what a device sends over all of its wires.

``host_memory_link`` joins each device to the memory of its host: PCIe, or NVLink where the processor has it.

Hosts may have devices of another kind (``host_devices``).  A program on all devices is then as slow as on the slowest kind, and
has the memory of the kind with the least: all wait for each other.

A cluster may carry a :class:`~autopar.profile.Profile`: what was measured then goes before α, β and FLOP/s.

This file imports nothing of ours but other descriptions and the error type, and nothing of JAX at module level: a description
needs no devices.  The figures of known hardware are in :mod:`autopar.cluster_presets`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.devices import DeviceKind, Frozen, Link, Platform, check_count
from autopar.errors import ClusterError
from autopar.mesh import AXIS_NAMES, Mesh, meshes_of
from autopar.network import Network
from autopar.profile import Profile
from autopar.ray_hosts import RayHosts
from autopar.wiring import Wiring

__all__ = ["AXIS_NAMES", "Cluster", "DeviceKind", "Link", "Mesh", "Platform"]


@dataclass(frozen=True)
class Cluster:
    """Hardware as the planner sees it.

    ``compute_shared_by`` is the number of devices that share one device's worth of FLOP/s, memory and memory
    bandwidth (eight virtual CPU devices of one process share the machine: 8); 1 for real accelerators.

    Made by :meth:`local`, :meth:`preset`, :meth:`from_file`, or by hand.  Raises ``ClusterError`` for counts below 1.
    """

    name: str
    hosts: int
    devices_per_host: int
    device: DeviceKind
    local_link: Link
    network_link: Link
    compute_shared_by: int = 1
    notes: str = field(default="", compare=False)
    profile: Profile | None = None
    network: Network | None = field(default=None, kw_only=True)
    """What was measured between the hosts; None: ``network_link`` is all that is known of them."""
    runs_on: RayHosts | None = field(default=None, repr=False)
    """Where programs for this cluster run; None: in this process, if its devices are those."""
    is_distributed: bool = False
    """Whether this process is one of several that run the same script, each on a host of the cluster."""
    host_links: Mapping[tuple[int, int], Link] = field(default_factory=dict, kw_only=True)
    """By pairs of hosts, the link between them where it is another than ``network_link``, both ways."""
    host_devices: Mapping[int, DeviceKind] = field(default_factory=dict, kw_only=True)
    """By hosts, the kind of their devices where it is another than ``device``."""
    host_memory_link: Link | None = field(default=None, kw_only=True)
    """Between a device and the memory of its host; None: not known, so nothing is kept there."""
    local_wiring: Wiring | None = field(default=None, kw_only=True)
    """Which devices of a host are wired to each other, of the first of them if it is of more; None: a switch joins all."""
    device_ids: tuple[int, ...] = field(default=(), kw_only=True)
    """Ids of this process's JAX devices that the cluster is made of, in order; none: they are the first ones."""

    def __post_init__(self) -> None:
        for count in ("hosts", "devices_per_host", "compute_shared_by"):
            check_count(f"{count} of cluster {self.name!r}", getattr(self, count))
        if self.profile is not None:
            _check_profile(self.profile, self.name, self.device.platform, self.devices_per_host)
        for part, kind in (("device", DeviceKind), ("local_link", Link), ("network_link", Link)):
            if not isinstance(getattr(self, part), kind):
                raise ClusterError(
                    f"{part} of cluster {self.name!r} is {getattr(self, part)!r}; give a {kind.__name__}"
                )
        if not isinstance(self.host_memory_link, Link | None):
            raise ClusterError(
                f"host_memory_link of cluster {self.name!r} is {self.host_memory_link!r}; give a Link, or None"
            )
        object.__setattr__(self, "local_wiring", self._checked_wiring())
        if self.device_ids and len(set(self.device_ids)) != self.num_devices:
            raise ClusterError(
                f"device_ids of cluster {self.name!r} are {self.device_ids} for {self.num_devices} devices; give one for each"
            )
        object.__setattr__(self, "host_links", Frozen(dict(sorted(self._checked_links()))))
        kinds = dict(sorted(self._checked_kinds()))
        if len(kinds) == self.hosts and len(set(kinds.values())) == 1:  # then it is the kind of all
            object.__setattr__(self, "device", kinds[0])
            kinds = {}
        object.__setattr__(self, "host_devices", Frozen(kinds))
        if self.profile is not None and kinds:
            raise ClusterError(
                f"cluster {self.name!r} has devices of several kinds, and a profile is of one; leave it out (profile=None)"
            )

    def _checked_wiring(self) -> Wiring | None:
        """The wires between the devices that a host has here."""
        if self.local_wiring is None:
            return None
        where = f"local_wiring of cluster {self.name!r}"
        if not isinstance(self.local_wiring, Wiring):
            raise ClusterError(f"{where} is {self.local_wiring!r}; give a Wiring, or None")
        if self.local_link.shared_by != 1:
            raise ClusterError(
                f"{where}: local_link says shared_by={self.local_link.shared_by}; wires are a device's own"
            )
        return self.local_wiring.first(self.devices_per_host)

    def _checked_kinds(self) -> Iterator[tuple[int, DeviceKind]]:
        """Kinds of devices by host; those that are ``device`` itself are left out."""
        where = f"host_devices of cluster {self.name!r}"
        if not isinstance(self.host_devices, Mapping):
            raise ClusterError(f"{where} is {self.host_devices!r}; give kinds by host: {{2: DeviceKind(...)}}")
        for host, kind in self.host_devices.items():
            if type(host) is not int or not 0 <= host < self.hosts:
                raise ClusterError(f"{where} names host {host!r}; give numbers of 0 to {self.hosts - 1}")
            if not isinstance(kind, DeviceKind):
                raise ClusterError(f"{where} is {kind!r} for host {host}; give a DeviceKind")
            if kind.platform is not self.device.platform:
                raise ClusterError(
                    f"{where}: host {host} has devices of {kind.platform.value}, and device is of {self.device.platform.value}; "
                    "a step is compiled for one platform"
                )
            if kind != self.device:
                yield host, kind

    def _checked_links(self) -> Iterator[tuple[tuple[int, int], Link]]:
        """Links between hosts, each pair in ascending order; those that are ``network_link`` itself are left out."""
        where = f"host_links of cluster {self.name!r}"
        if not isinstance(self.host_links, Mapping):
            raise ClusterError(f"{where} is {self.host_links!r}; give links by pairs of hosts: {{(0, 2): Link(...)}}")
        for pair, link in self.host_links.items():
            is_pair = isinstance(pair, tuple) and len(pair) == 2 and all(type(host) is int for host in pair)
            if not is_pair or pair[0] == pair[1] or not all(0 <= host < self.hosts for host in pair):
                raise ClusterError(f"{where} names {pair!r}; give pairs of two hosts, of 0 to {self.hosts - 1}")
            if not isinstance(link, Link):
                raise ClusterError(f"{where} is {link!r} for {pair}; give a Link")
            if pair[0] > pair[1] and (pair[1], pair[0]) in self.host_links:
                raise ClusterError(f"{where} names {pair} and {pair[::-1]}; a link goes both ways, so give one of them")
            if link.shared_by != self.network_link.shared_by:
                raise ClusterError(
                    f"{where} says shared_by={link.shared_by} for {pair}, and network_link {self.network_link.shared_by}; as "
                    "many devices of a host share a card whatever host it talks to, so give the same number"
                )
            if link != self.network_link:
                yield (min(pair), max(pair)), link

    def __hash__(self) -> int:
        # Clusters key the caches of the cost model, which are asked some 10^5 times per plan: the fields that tell
        # clusters apart in practice are enough, and hash several times faster than all of them.
        return hash(
            (
                self.name,
                self.hosts,
                self.devices_per_host,
                self.compute_shared_by,
                self.local_link.bytes_per_second,
                self.network_link.bytes_per_second,
                self.device.memory_bytes,
                self.profile,
            )
        )

    @property
    def meshes_are_processes(self) -> bool:
        """Whether meshes of a pipeline run in processes of their own, and so do not share memory."""
        return self.runs_on is not None or self.is_distributed or self.hosts > 1

    @property
    def has_like_hosts(self) -> bool:
        """Whether all hosts have the same devices, and the same links between them."""
        return not (self.host_links or self.host_devices)

    @property
    def num_devices(self) -> int:
        """All devices of all hosts."""
        return self.hosts * self.devices_per_host

    def per_device_flops_per_second(self, dtype: str) -> float:
        """Dense matrix-product FLOP/s of one device, of the slowest kind, for the dtype when all devices compute at once."""
        rate = self.device.dense_flops_per_second(dtype)
        if self.host_devices:
            rate = min(kind.dense_flops_per_second(dtype) for kind in self.kinds)
        return rate / self.compute_shared_by

    @property
    def hides_collectives(self) -> bool:
        """Whether XLA runs kernels beside collectives on all kinds of devices."""
        return all(kind.hides_collectives for kind in self.kinds)

    @property
    def per_device_memory_bytes(self) -> int:
        """Bytes that one device's part of a program may use, of the kind with the least."""
        return min(kind.memory_bytes for kind in self.kinds) // self.compute_shared_by

    @property
    def per_device_memory_bytes_per_second(self) -> float:
        """Memory bandwidth of one device, of the slowest kind, when all devices use theirs at once."""
        rate = self.device.memory_bytes_per_second
        if self.host_devices:
            rate = min(kind.memory_bytes_per_second for kind in self.kinds)
        return rate / self.compute_shared_by

    @property
    def per_device_turned_bytes_per_second(self) -> float:
        """Bytes that one device reads and writes when it copies an array into another order of dimensions, all at once."""
        measured = None if self.profile is None else self.profile.turned_bytes_per_second
        return self.per_device_memory_bytes_per_second if measured is None else measured

    @property
    def per_device_cut_bytes_per_second(self) -> float:
        """The same of a copy that only cuts the array into pieces; as of others where that was not measured."""
        measured = None if self.profile is None else self.profile.cut_bytes_per_second
        return self.per_device_turned_bytes_per_second if measured is None else measured

    def kind_of(self, host: int) -> DeviceKind:
        """The kind of a host's devices."""
        return self.host_devices.get(host, self.device)

    @property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """All kinds of devices, in the order of the hosts."""
        return tuple(dict.fromkeys(map(self.kind_of, range(self.hosts)))) if self.host_devices else (self.device,)

    def link_between(self, host: int, other: int) -> Link:
        """The network link between two hosts."""
        return self.host_links.get((min(host, other), max(host, other)), self.network_link)

    def card_bytes_per_second(self, host: int) -> float:
        """What a network card of a host carries, in one direction: as much as the fastest of the host's links."""
        if not self.host_links:
            return self.network_link.bytes_per_second
        others = (other for other in range(self.hosts) if other != host)
        return max(self.link_between(host, other).bytes_per_second for other in others)

    def slowest_link(self, hosts: Sequence[int]) -> Link:
        """The slowest of the links between neighbours on a ring of hosts; ``network_link`` for a single one."""
        pairs = zip(hosts, (*hosts[1:], hosts[0]), strict=True)
        links = [self.link_between(one, other) for one, other in pairs if one != other]
        return min(links, key=lambda link: (link.bytes_per_second, -link.latency_seconds), default=self.network_link)

    def of_hosts(self, hosts: Sequence[int]) -> Cluster:
        """The description of some of the hosts, or of all in another order: its host k is this one's ``hosts[k]``."""
        place = {host: number for number, host in enumerate(hosts)}
        links = {(place[a], place[b]): link for (a, b), link in self.host_links.items() if a in place and b in place}
        kinds = {number: self.kind_of(host) for number, host in enumerate(hosts)} if self.host_devices else {}
        return dataclasses.replace(self, hosts=len(hosts), host_links=links, host_devices=kinds, device_ids=())

    def logical_mesh_shapes(self, max_axes: int = 3) -> list[Mesh]:
        """Every way to lay the devices out as a mesh of 1 to ``max_axes`` (at most 3) axes of size 2 or more.

        All *ordered* factorizations of ``num_devices``: ids are row-major, so the order of the axes decides which of
        them crosses hosts.  Axes are named ``data``, ``model``, ``extra``.  One device gives one axis of size 1.
        """
        return meshes_of(self.num_devices, max_axes)

    def replace(self, *, memory_bytes: int | None = None, **changes: Any) -> Cluster:
        """A cluster with other fields, the rest as here: ``cluster.replace(hosts=4, network_link=Link(1e-5, 25e6))``.

        ``memory_bytes`` stands for the field of that name of all kinds of devices, which ``compute_shared_by`` devices share.
        Raises ``ClusterError`` for a field that clusters do not have.
        """
        known = [one.name for one in dataclasses.fields(self)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise ClusterError(
                f"clusters have no field {', '.join(unknown)}; there are {', '.join(known)}, memory_bytes"
            )
        if memory_bytes is not None:
            device = changes.get("device", self.device)
            changes["device"] = dataclasses.replace(device, memory_bytes=memory_bytes)
            kinds = changes.get("host_devices", self.host_devices)
            changes["host_devices"] = {
                host: dataclasses.replace(kind, memory_bytes=memory_bytes) for host, kind in kinds.items()
            }
        return dataclasses.replace(self, **changes)

    def part(self, devices: Sequence[int]) -> Cluster:
        """The description of some of the devices as a cluster of their own: as many on each host that they are on."""
        if len(devices) == self.num_devices:
            return self
        hosts = sorted({device // self.devices_per_host for device in devices})
        per_host = len(devices) // len(hosts)
        profile = None if self.profile is None else self.profile.of_part(per_host)
        return dataclasses.replace(self.of_hosts(hosts), devices_per_host=per_host, profile=profile)

    def with_profile(self, profile: Profile | str | Path | None) -> Cluster:
        """This cluster priced by what was measured (a profile or its file), or by its plain figures for None.

        Collectives within a host, matrix products and elementwise kernels take their seconds from the profile; what it does
        not hold keeps its analytic price.  That of a single accelerator holds for all of a host, which share neither cores nor
        memory.  Raises ``ClusterError`` if the profile cannot be read, or is of another platform or of another number of devices
        than a host of this cluster has.
        """
        if profile is not None and not isinstance(profile, Profile):
            from autopar.profile_file import load_profile

            profile = load_profile(profile)
        return dataclasses.replace(self, profile=profile)

    def with_measured_device(self) -> Cluster:
        """This cluster priced by what was measured of one device of its kind and comes with this release.

        Products, convolutions, kernels and copies to and from the host take their seconds from there, collectives keep their
        analytic price.  Raises ``ClusterError`` for kinds of which nothing comes with it.
        """
        from autopar.profile_file import profile_of_device

        return self.with_profile(profile_of_device(self.device.name))

    def with_network(self, network: Network | str | Path) -> Cluster:
        """This cluster with ``network_link``, and prices of collectives between its hosts, by what was measured.

        ``network`` is what ``autopar network`` measured, or its file.  Groups of shapes that were not measured keep the price by
        α and β.  Raises ``ClusterError`` if the file cannot be read, or is of another platform or of another number of
        devices than a host of this cluster has.
        """
        if not isinstance(network, Network):
            from autopar.network_file import load_network

            network = load_network(network)
        theirs, ours = (network.platform, network.devices_per_host), (self.device.platform.value, self.devices_per_host)
        if theirs != ours:
            raise ClusterError(
                f"the network was measured between hosts with {theirs[1]} {theirs[0]} devices, a host of cluster {self.name!r} "
                f"has {ours[1]} of {ours[0]}; measure this cluster with `autopar network`"
            )
        source = f"measured at {network.measured_at}"
        link = Link(network.latency_seconds, network.bytes_per_second, network.devices_per_host, source)
        return dataclasses.replace(self, network_link=link, network=network)

    @classmethod
    def local(cls, devices: Sequence[Any] | None = None, *, profile: Profile | str | Path | None = "auto") -> Cluster:
        """The devices of this program, or the given ``jax.Device``s; imports JAX.

        ``profile`` is one, or its file, or ``"auto"``: the one that ``autopar profile`` left for these devices, if any (in a
        program of several processes none, for all must plan alike); None keeps the plain figures.
        See :func:`autopar.cluster_here.local_cluster` for what is found out, what is assumed, and the errors.
        """
        from autopar.cluster_here import local_cluster

        return local_cluster(devices, profile)

    @classmethod
    def ray(
        cls,
        address: str | None = "auto",
        *,
        hosts: int | None = None,
        devices_per_host: int | None = None,
        transport: str = "auto",
    ) -> Cluster:
        """The hosts of a Ray cluster: steps that are planned for it run there, one process per host of a mesh.

        ``address`` is what ``ray.init`` takes: ``"auto"`` (the cluster of this machine), ``"ip:port"``, or ``"local"`` for a
        new one on this machine.  ``hosts``: take so many; more than there are nodes makes each node count as several.
        ``devices_per_host``: GPUs of each, all if left out; on nodes without GPUs virtual CPU devices, one if left out.
        Links get assumed figures: :meth:`with_network` takes measured ones, ``.replace(network_link=Link(...))`` those that you
        state.  :meth:`close` ends it.
        ``transport``: how stages exchange arrays, ``"pull"``, ``"nccl"`` (GPUs, with the extra ``nccl``), or what suits.

        Raises ``ClusterError`` if there is no such cluster, or it is smaller.
        """
        from autopar.cluster_here import ray_cluster
        from autopar.ray_hosts import connect

        for name, count in (("hosts", hosts), ("devices_per_host", devices_per_host)):
            if count is not None:
                check_count(name, count)
        return ray_cluster(connect(address, hosts, devices_per_host, transport))

    @classmethod
    def distributed(cls, **options: Any) -> Cluster:
        """The devices of all processes that run this script, one on each host, without Ray (SLURM, TPU pods, mpirun).

        ``options`` are those of ``jax.distributed.initialize``, which is called unless it was before.  Process 0 plans, and
        all run its plan: of a pipeline, the stages on their own devices.  Raises ``ClusterError`` as :meth:`local` does.
        """
        import jax

        from autopar.cluster_here import local_cluster

        if not jax.distributed.is_initialized():
            jax.distributed.initialize(**options)
        return dataclasses.replace(local_cluster(profile=None), is_distributed=True)

    def on_ray(self, address: str | None = "auto", *, transport: str = "auto") -> Cluster:
        """This description, run on the hosts of a Ray cluster, of which it takes as many as it has.

        ``transport`` is that of :meth:`ray`.  Raises ``ClusterError`` if there are fewer.
        """
        from autopar.ray_hosts import connect

        return dataclasses.replace(self, runs_on=connect(address, self.hosts, self.devices_per_host, transport))

    def close(self) -> None:
        """Stop what was started on the hosts of a Ray cluster; a cluster in this process has nothing to stop."""
        if self.runs_on is not None:
            self.runs_on.close()

    @classmethod
    def preset(cls, name: str, hosts: int = 1) -> Cluster:
        """Known hardware that one need not have, for example ``Cluster.preset("p4d.24xlarge", hosts=8)``.

        The figures and their sources are in :mod:`autopar.cluster_presets`.  Raises ``ClusterError`` for an unknown
        name (with the known ones) or for more hosts than such a cluster can have.
        """
        from autopar.cluster_presets import preset_cluster

        return preset_cluster(name, hosts)

    @classmethod
    def from_file(cls, path: str | Path) -> Cluster:
        """Read a cluster written by :meth:`to_file` or by hand.

        The file is JSON, ``{"format": "autopar-cluster", "version": 1, "cluster": {…}}`` with the fields of this class
        and, inside, of ``DeviceKind`` and ``Link``.  Those with a default may be left out; unknown ones are refused,
        so that a misspelt field cannot silently mean its default.

        Raises ``ClusterError`` naming the file and the field for anything missing, unknown, ill-typed or out of range.
        """
        from autopar.cluster_file import read_cluster

        return read_cluster(Path(path))

    def to_file(self, path: str | Path) -> None:
        """Write this cluster as versioned JSON, without its profile, which is a file of its own.

        Raises ``ClusterError`` if the file cannot be written.
        """
        from autopar.cluster_file import write_cluster

        write_cluster(self, Path(path))


def _check_profile(profile: object, name: str, platform: Platform, devices_per_host: int) -> None:
    if not isinstance(profile, Profile):
        raise ClusterError(f"profile of cluster {name!r} is {profile!r}; give a Profile, or use with_profile")
    if profile.platform != platform.value:
        raise ClusterError(
            f"the profile was measured on {profile.platform}, the devices of cluster {name!r} are {platform.value}; "
            "measure on such devices, or leave the profile out (profile=None)"
        )
    if profile.num_devices != devices_per_host and not (profile.num_devices == 1 and platform is not Platform.CPU):
        raise ClusterError(
            f"the profile was measured on {profile.num_devices} devices at once, a host of cluster {name!r} has "
            f"{devices_per_host}; measure with as many, or leave the profile out (profile=None)"
        )
