"""How long does an array take from one mesh to another, and by which landing layout is it quickest?

The tiles of a :class:`~autopar.schedule.cross_mesh.CrossMeshTransfer` are sent in two rounds: those of the source's devices,
then those that receivers pass on.  One round takes

    seconds = latency + max over ports of (bytes through the port / β of its level)

where a *port* is one direction of a link of :mod:`autopar.cluster`: tiles inside a host pass the local links of both devices,
tiles between hosts the network cards of both; ``Link.shared_by`` says how many devices share one.  Both directions run at
once.  Where hosts are linked differently, what the cards of two hosts have for each other is a port as well
(:mod:`autopar.cost_model.machine`).  The latency is that of an all-to-all (:mod:`autopar.cost_model.collectives`): the α of
all messages that one device sends, or receives, one after the other, whichever is more; tiles between the same two devices
are one message.  What stays on its device costs nothing.

Where the cluster carries a profile, α and β of the local level are the ends of its curve for permutes, in which all
devices send at once; so no link is shared any more than was measured.

The whole time to the target layout adds the collectives on the target mesh.  The landing with the least of it is taken;
with equal seconds the one with fewer messages, then the target layout itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from autopar.cluster import Cluster, Link
from autopar.cost_model.collectives import Collective, group_cost, wire_bytes
from autopar.cost_model.groups import axes_groups
from autopar.cost_model.reshard import COLLECTIVE_OF_MOVE, collective_bytes
from autopar.schedule.cross_mesh import CrossMeshTransfer, Placement, Tile, cross_mesh_transfer, landing_layouts
from autopar.schedule.reshard import after_move


class Level(Enum):
    """The two levels of the interconnect."""

    LOCAL = "local"
    NETWORK = "network"


class Direction(Enum):
    """Seen from the device."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class Port:
    """One direction of one link of a host; ``number`` is that of the link on the host (see :mod:`autopar.cluster`).

    ``peer``, where hosts are linked differently, is the one other host that it leads to (-1: to all).
    """

    level: Level
    direction: Direction
    host: int
    number: int
    peer: int = -1


def _bytes_per_second(port: Port, cluster: Cluster) -> float:
    if port.level is Level.LOCAL:
        return link_of(port.level, cluster).bytes_per_second
    if port.peer >= 0:
        return cluster.link_between(port.host, port.peer).bytes_per_second
    return cluster.card_bytes_per_second(port.host)


def link_of(level: Level, cluster: Cluster) -> Link:
    """α, β and ``shared_by`` of a level: as described, or (local level) as measured."""
    if level is Level.NETWORK:
        return cluster.network_link
    curve = None if cluster.profile is None else cluster.profile.collective(Collective.PERMUTE.value, 2)
    return cluster.local_link if curve is None else Link(curve.at(0.0), 1.0 / curve.slope)


def link_loads(transfer: CrossMeshTransfer, cluster: Cluster) -> Mapping[Port, int]:
    """Bytes that the transfer puts through every link in use, both rounds together."""
    loads = _loads(transfer.tiles, transfer.tile_bytes, cluster)
    return {port: size for port, size in loads.items() if port.peer < 0}


def latency_seconds(transfer: CrossMeshTransfer, cluster: Cluster) -> float:
    """The part of :func:`transfer_seconds` that no bandwidth shortens."""
    return sum(_latency(tiles, cluster) for tiles in _rounds(transfer))


def transfer_seconds(transfer: CrossMeshTransfer, cluster: Cluster) -> float:
    """Seconds from the first byte sent until the array lies in its landing layout, with all links idle otherwise."""
    busy_seconds = 0.0
    for tiles in _rounds(transfer):
        loads = _loads(tiles, transfer.tile_bytes, cluster)
        busy_seconds += max((n / _bytes_per_second(port, cluster) for port, n in loads.items()), default=0.0)
    return latency_seconds(transfer, cluster) + busy_seconds


def finishing_seconds(transfer: CrossMeshTransfer, cluster: Cluster) -> float:
    """Seconds of the collectives on the target mesh, from the landing layout to the target layout."""
    mesh, devices, layout = transfer.target.mesh, transfer.target.devices, transfer.landing
    seconds = 0.0
    for move in transfer.moves:
        if (kind := COLLECTIVE_OF_MOVE.get(move.kind)) is not None:
            groups = tuple(tuple(devices[place] for place in group) for group in axes_groups(mesh, move.axes))
            full_bytes = collective_bytes(move, layout, transfer.array_bytes, mesh)
            seconds += group_cost(groups, cluster, kind).seconds(wire_bytes(kind, full_bytes, len(groups[0])))
        layout = after_move(layout, move, mesh)
    return seconds


@cache
def cheapest_transfer(
    shape: tuple[int, ...], itemsize_bytes: int, source: Placement, target: Placement, cluster: Cluster
) -> CrossMeshTransfer:
    """The transfer whose landing makes it quickest, collectives on the target mesh included.

    Where all hosts are alike, one between meshes some hosts further on is the same, some hosts further on.

    Raises ``PlanError`` as :func:`autopar.schedule.cross_mesh.cross_mesh_transfer`.
    """
    devices = source.devices + target.devices
    before = min(devices) // cluster.devices_per_host * cluster.devices_per_host
    if before <= 0 or max(devices) >= cluster.num_devices or not cluster.has_like_hosts:
        return _cheapest_from(shape, itemsize_bytes, source, target, cluster)
    ends = source.moved(-before), target.moved(-before)
    return _cheapest_from(shape, itemsize_bytes, *ends, cluster).moved(before)


@cache
def _cheapest_from(
    shape: tuple[int, ...], itemsize_bytes: int, source: Placement, target: Placement, cluster: Cluster
) -> CrossMeshTransfer:
    direct = cross_mesh_transfer(shape, itemsize_bytes, source, target, cluster)
    if not direct.tiles:
        return direct
    others = [
        cross_mesh_transfer(shape, itemsize_bytes, source, target, cluster, landing)
        for landing in landing_layouts(shape, target)[1:]
    ]
    return min((direct, *others), key=lambda one: _rank(one, cluster))


def _rank(transfer: CrossMeshTransfer, cluster: Cluster) -> tuple[float, int]:
    seconds = transfer_seconds(transfer, cluster) + finishing_seconds(transfer, cluster)
    return seconds, len(_messages(transfer.tiles)) + len(transfer.moves)


def _rounds(transfer: CrossMeshTransfer) -> tuple[list[Tile], list[Tile]]:
    return [tile for tile in transfer.tiles if not tile.relayed], [tile for tile in transfer.tiles if tile.relayed]


def _messages(tiles: Iterable[Tile]) -> set[tuple[int, int]]:
    return {(tile.sender, tile.receiver) for tile in tiles if tile.sender != tile.receiver}


def _level(sender: int, receiver: int, cluster: Cluster) -> Level:
    same_host = sender // cluster.devices_per_host == receiver // cluster.devices_per_host
    return Level.LOCAL if same_host else Level.NETWORK


def _loads(tiles: Iterable[Tile], tile_bytes: int, cluster: Cluster) -> dict[Port, int]:
    loads: dict[Port, int] = defaultdict(int)
    for tile in tiles:
        if tile.sender == tile.receiver:
            continue
        level = _level(tile.sender, tile.receiver, cluster)
        ends = tile.sender, tile.receiver
        for direction, device, other in zip(Direction, ends, ends[::-1], strict=True):
            host, place = divmod(device, cluster.devices_per_host)
            port = Port(level, direction, host, place // link_of(level, cluster).shared_by)
            loads[port] += tile_bytes
            if level is Level.NETWORK and cluster.host_links:
                loads[replace(port, peer=other // cluster.devices_per_host)] += tile_bytes
    return dict(loads)


def _latency(tiles: Iterable[Tile], cluster: Cluster) -> float:
    of_device: dict[tuple[Direction, int], float] = defaultdict(float)
    for sender, receiver in _messages(tiles):
        if _level(sender, receiver, cluster) is Level.LOCAL:
            alpha = link_of(Level.LOCAL, cluster).latency_seconds
        else:
            hosts = sender // cluster.devices_per_host, receiver // cluster.devices_per_host
            alpha = cluster.link_between(*hosts).latency_seconds
        of_device[Direction.OUT, sender] += alpha
        of_device[Direction.IN, receiver] += alpha
    return max(of_device.values(), default=0.0)
