"""Which devices talk to each other in a collective, and on which hosts are they?

A group is a tuple of device ids, in the order of a ring; all groups of a collective have one size, and no device is in two of
them.  Those of mesh axes are the rows along them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache

from autopar.cluster import Cluster, Mesh
from autopar.errors import ClusterError
from autopar.network import Span

Groups = tuple[tuple[int, ...], ...]


@cache
def axes_groups(mesh: Mesh, axes: tuple[str, ...]) -> Groups:
    """The groups of device ids that differ only along ``axes``: one group for each position on the other axes.

    Their union is ``0 … mesh.size-1``; ids ascend in each group, whatever the order of ``axes``.
    Raises ``ClusterError`` for an unknown or repeated axis.
    """
    if len(set(axes)) != len(axes):
        raise ClusterError(f"axes {axes} repeat a name; name each axis once")
    for axis in axes:
        mesh.position(axis)
    inner = _offsets(mesh, [axis for axis in mesh.axis_names if axis in axes])
    outer = _offsets(mesh, [axis for axis in mesh.axis_names if axis not in axes])
    return tuple(tuple(base + offset for offset in inner) for base in outer)


def mesh_axes_of(groups: Iterable[tuple[int, ...]], mesh: Mesh) -> tuple[str, ...] | None:
    """The mesh axes, in mesh order, over which groups of device ids talk; None if they are not the groups of any axes.

    Axes of size 1 are never named.  Source and target pairs of a permute: see :func:`permute_axes_of`.
    """
    wanted = {frozenset(group) for group in groups}
    names = [name for name in mesh.axis_names if mesh.axis_size(name) > 1]
    for count in range(len(names) + 1):
        for axes in itertools.combinations(names, count):
            if wanted == {frozenset(group) for group in axes_groups(mesh, axes)}:
                return axes
    return None


def permute_axes_of(pairs: Iterable[tuple[int, ...]], mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes, in mesh order, along which some source and its target differ."""
    different = set()
    for source, target in pairs:
        for name in mesh.axis_names:
            stride, size = mesh.stride(name), mesh.axis_size(name)
            if source // stride % size != target // stride % size:
                different.add(name)
    return tuple(name for name in mesh.axis_names if name in different)


def measured_span(groups: Iterable[tuple[int, ...]], cluster: Cluster) -> Span | None:
    """The shape of all groups, if they have the same and span hosts, and the network between such hosts was measured."""
    network = cluster.network
    hosts = [on_hosts(group, cluster) for group in groups]
    shapes = {(len(on), len(members)) for on in hosts for members in on.values()}
    if (
        network is None
        or len(shapes) != 1
        or cluster.host_links
        or cluster.devices_per_host != network.devices_per_host
    ):
        return None
    ((count, per_host),) = shapes
    return Span(count, per_host) if count > 1 else None


def _offsets(mesh: Mesh, axes: list[str]) -> list[int]:
    """Device ids of all positions along ``axes`` (in mesh order), the other positions 0, ascending."""
    ranges = [range(0, mesh.axis_size(axis) * mesh.stride(axis), mesh.stride(axis)) for axis in axes]
    return [sum(position) for position in itertools.product(*ranges)]


def check_ids(ids: Iterable[int], cluster: Cluster) -> None:
    """Raise ``ClusterError`` for a device that the cluster does not have."""
    for device in ids:
        if not 0 <= device < cluster.num_devices:
            raise ClusterError(
                f"device {device} is not in cluster {cluster.name!r} of {cluster.num_devices} devices; use 0 to "
                f"{cluster.num_devices - 1}, or a larger cluster"
            )


def check_groups(groups: Groups, cluster: Cluster) -> None:
    """Raise ``ClusterError`` for no groups, and for groups that overlap, differ in size, or leave the cluster."""
    if not groups or not groups[0]:
        raise ClusterError("a collective without groups; name the devices (in HLO, no groups mean one group of all)")
    if len({len(group) for group in groups}) > 1:
        raise ClusterError(f"groups of sizes {sorted({len(group) for group in groups})}; all must have the same size")
    members = [device for group in groups for device in group]
    if len(set(members)) != len(members):
        raise ClusterError("a device is in two groups of one collective; groups must not overlap")
    check_ids(members, cluster)


def on_hosts(group: tuple[int, ...], cluster: Cluster) -> dict[int, list[int]]:
    """Members of the group on each host."""
    hosts: dict[int, list[int]] = {}
    for device in group:
        hosts.setdefault(device // cluster.devices_per_host, []).append(device)
    return hosts
