"""How is a cluster written as a file?  Versioned JSON with the fields of the classes of :mod:`autopar.cluster`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from autopar.cluster import Cluster, DeviceKind, Link, Platform
from autopar.errors import ClusterError
from autopar.files import Header, write_atomically
from autopar.wiring import Wiring

_FILE_FORMAT = "autopar-cluster"
_FILE_VERSION = 5
_READ_VERSIONS = (1, 2, 3, 4, 5)
"""The first knows no differences between hosts, the second no link to their memory, the third neither wires nor hiding."""
_Made = TypeVar("_Made")


class _Link(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    latency_seconds: float
    bytes_per_second: float
    shared_by: int = 1
    source: str = ""


class _HostLink(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    hosts: tuple[int, int]
    link: _Link


class _Device(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    platform: Platform
    flops_per_second: dict[str, float]
    memory_bytes: int
    memory_bytes_per_second: float
    source: str = ""
    hides_collectives: bool = False
    vector_flops_per_second: float | None = None


class _HostDevice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    host: int
    device: _Device


class _Wiring(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    wires: tuple[tuple[int, ...], ...]
    per_device: int
    source: str = ""


class _Cluster(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    hosts: int
    devices_per_host: int
    device: _Device
    local_link: _Link
    network_link: _Link
    compute_shared_by: int = 1
    notes: str = ""
    host_links: tuple[_HostLink, ...] = ()
    host_devices: tuple[_HostDevice, ...] = ()
    host_memory_link: _Link | None = None
    local_wiring: _Wiring | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    version: int
    cluster: _Cluster


def read_cluster(path: Path) -> Cluster:
    """The cluster in the file; raises ``ClusterError`` that names the file, the field and what to do."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ClusterError(f"cannot read cluster file {path}: {error.strerror or error}; check the path") from error
    try:
        header = msgspec.json.decode(data, type=Header)
        if header.format != _FILE_FORMAT:
            raise ClusterError(
                f"{path}: $.format is {header.format!r}, not {_FILE_FORMAT!r}; this is not a cluster file"
            )
        if header.version not in _READ_VERSIONS:
            raise ClusterError(
                f"{path}: $.version is {header.version}, this release reads {_READ_VERSIONS[0]} to {_READ_VERSIONS[-1]}; write "
                "the file anew with Cluster.to_file, or use the release that wrote it"
            )
        stored = msgspec.json.decode(data, type=_File).cluster
    except msgspec.ValidationError as error:
        raise ClusterError(f"{path}: {error}; correct that field (the fields are those of Cluster)") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClusterError(
            f"{path} is not complete JSON ({error}); NaN and infinity have no place in it either: write it anew"
        ) from error
    return _to_cluster(path, stored)


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write the cluster; reading it back gives an equal one.  Raises ``ClusterError`` if the file cannot be written."""
    stored = _Cluster(
        name=cluster.name,
        hosts=cluster.hosts,
        devices_per_host=cluster.devices_per_host,
        device=_from_kind(cluster.device),
        local_link=_from_link(cluster.local_link),
        network_link=_from_link(cluster.network_link),
        compute_shared_by=cluster.compute_shared_by,
        notes=cluster.notes,
        host_links=tuple(_HostLink(hosts=pair, link=_from_link(link)) for pair, link in cluster.host_links.items()),
        host_devices=tuple(
            _HostDevice(host=host, device=_from_kind(kind)) for host, kind in cluster.host_devices.items()
        ),
        host_memory_link=None if cluster.host_memory_link is None else _from_link(cluster.host_memory_link),
        local_wiring=None if cluster.local_wiring is None else _from_wiring(cluster.local_wiring),
    )
    data = msgspec.json.encode(_File(format=_FILE_FORMAT, version=_FILE_VERSION, cluster=stored))
    try:
        write_atomically(path, msgspec.json.format(data, indent=2) + b"\n")
    except OSError as error:
        raise ClusterError(f"cannot write cluster file {path}: {error.strerror or error}; check the path") from error


def _from_kind(kind: DeviceKind) -> _Device:
    return _Device(
        name=kind.name,
        platform=kind.platform,
        flops_per_second=dict(kind.flops_per_second),
        memory_bytes=kind.memory_bytes,
        memory_bytes_per_second=kind.memory_bytes_per_second,
        source=kind.source,
        hides_collectives=kind.hides_collectives,
        vector_flops_per_second=kind.vector_flops_per_second,
    )


def _from_link(link: Link) -> _Link:
    return _Link(
        latency_seconds=link.latency_seconds,
        bytes_per_second=link.bytes_per_second,
        shared_by=link.shared_by,
        source=link.source,
    )


def _from_wiring(wiring: Wiring) -> _Wiring:
    return _Wiring(wires=wiring.wires, per_device=wiring.per_device, source=wiring.source)


def _to_cluster(path: Path, stored: _Cluster) -> Cluster:
    fields = msgspec.structs.asdict(stored)
    for name, kind in (("device", DeviceKind), ("local_link", Link), ("network_link", Link)):
        fields[name] = _checked(f"{path}: $.cluster.{name}", kind, msgspec.structs.asdict(fields[name]))
    if stored.host_memory_link is not None:
        entries = msgspec.structs.asdict(stored.host_memory_link)
        fields["host_memory_link"] = _checked(f"{path}: $.cluster.host_memory_link", Link, entries)
    if stored.local_wiring is not None:
        entries = msgspec.structs.asdict(stored.local_wiring)
        fields["local_wiring"] = _checked(f"{path}: $.cluster.local_wiring", Wiring, entries)
    links: dict[tuple[int, int], object] = {}
    for number, one in enumerate(stored.host_links):
        place = f"{path}: $.cluster.host_links[{number}]"
        if one.hosts in links:
            raise ClusterError(f"{place}: the hosts {list(one.hosts)} stand there twice; keep one of them")
        links[one.hosts] = _checked(f"{place}.link", Link, msgspec.structs.asdict(one.link))
    fields["host_links"] = links
    kinds: dict[int, object] = {}
    for number, entry in enumerate(stored.host_devices):
        place = f"{path}: $.cluster.host_devices[{number}]"
        if entry.host in kinds:
            raise ClusterError(f"{place}: the host {entry.host} stands there twice; keep one of them")
        kinds[entry.host] = _checked(f"{place}.device", DeviceKind, msgspec.structs.asdict(entry.device))
    fields["host_devices"] = kinds
    return _checked(f"{path}: $.cluster", Cluster, fields)


def _checked(where: str, make: Callable[..., _Made], fields: dict[str, object]) -> _Made:
    """``make(**fields)``, with the place in the file put before what the dataclass finds wrong."""
    try:
        return make(**fields)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error
