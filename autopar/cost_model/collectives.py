"""How long does a collective take, over which links?

Let ``n`` devices form a group and ``B`` be the *full bytes*: the tensor of an all-reduce, the output of an all-gather,
the input of a reduce-scatter, the local tensor of an all-to-all, the message of a permute.  Each device sends

    all-reduce               2 (n-1)/n · B        two passes around a ring (Patarasuk and Yuan, 2009)
    all-gather, reduce-scatter (n-1)/n · B        one pass
    all-to-all                 (n-1)/n · B        a piece to each other member, directly
    permute                            B          to the next member of the group

*wire bytes* ``W``.  All groups of one collective run at once (the groups of a mesh axis are the rows along it), so

    seconds = latency + W · max over links of (load of the link / its β)

where the load of a link is how many times ``W`` goes through it in one direction.  The links of a cluster are the
local links and the network cards of each host; device ``d`` owns or shares one of each (``Link.shared_by``).

*Ring.*  The members on one host are neighbours, so a group with ``m`` members on a host loads the local links of
``m-1`` of them with 1 (all ``m`` if the whole group is there), and, if it spans hosts, the cards of that host with 1 in
all: as NCCL does, several rings run side by side, one through each of the ``k`` cards next to its members, so that
each card gets ``1/k``.  Eight groups that cross hosts one device each load a shared card with 8.

Where hosts are linked differently, the ring visits them in the order of its members, and the links between neighbours are
loaded as the cards are: the slowest link on the ring decides.

*All-to-all.*  Of its ``W``, a member sends (m-1)/(n-1) over its local link and (n-m)/(n-1) over its card.

*Permute.*  Every message takes the sender's and the receiver's own link or card; these may differ, so both directions
are counted.

*Several made one.*  Where a compiler merges collectives (:mod:`autopar.cost_model.combine`), those behind the first cost XLA:GPU
and TPUs the bytes they send only.  XLA:CPU sends the arrays of a merged collective one after the other, and each pays in full but
for the waiting for devices that still work: 32 sums of 2 KiB among eight devices took 2.4 ms as one, and one of them 0.15 ms.

*Wires.*  Where a host has wires instead of a switch (:mod:`autopar.wiring`), a group sends within a host over those between its
members there.

*Latency.*  A ring passes on ``n-1`` times per pass: the edges of the ring but one (the cheapest), each with the α of
its level.  An all-to-all pays the α of every other member, a permute the largest α of its messages.

*Measured.*  Where the cluster carries a profile, a collective whose groups each lie on one host takes its seconds from
the curve of its kind and group size at ``W`` instead.  If the cluster has several hosts, the processes on them are a world, and
the curve that of a world, if there is one: processors carry its collectives, within hosts too, so that those across hosts take
no less than those within one.  Where the cluster carries a measured network, and groups of their shape are in it, collectives
across hosts take their seconds from that curve.

Groups of one device cost nothing.  Not modelled: trees, in-network reduction, the torus of TPUs, and contention
between different collectives.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache

from autopar.cluster import Cluster, Link, Mesh, Platform
from autopar.cost_model.groups import Groups, axes_groups, check_groups, check_ids, measured_span, on_hosts
from autopar.cost_model.waits import waiting
from autopar.curves import Curve
from autopar.errors import ClusterError
from autopar.plan import SumScatter


class Collective(Enum):
    """The kinds of collective communication (see the module docstring for the meaning of their bytes)."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    PERMUTE = "permute"


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Price of one kind of collective over given groups: ``latency_seconds + wire_bytes · seconds_per_wire_byte``.

    With a measured ``curve`` that decides, and the two numbers are its ends.  ``behind_others`` is the price of one that a
    compiler has made one with others before it, where that is another.
    """

    latency_seconds: float
    seconds_per_wire_byte: float
    curve: Curve | None = None
    behind_others: GroupCost | None = None

    def seconds(self, sent_bytes: float) -> float:
        """Seconds when each device sends so many bytes."""
        if self.curve is not None:
            return self.curve.at(sent_bytes)
        return self.latency_seconds + sent_bytes * self.seconds_per_wire_byte

    @property
    def joined(self) -> GroupCost:
        """The price of one that was made one with others before it."""
        return self.behind_others or self


_Port = tuple[int, int]
"""(host, number of the link on the host)."""


@dataclass
class _Traffic:
    """Load of every link, in wire bytes per wire byte.

    ``sent_to`` and ``received_from`` are those to and from one host, which matter where hosts are linked differently.
    """

    sent: defaultdict[_Port, float] = field(default_factory=lambda: defaultdict(float))
    received: defaultdict[_Port, float] = field(default_factory=lambda: defaultdict(float))
    sent_to: defaultdict[tuple[_Port, int], float] = field(default_factory=lambda: defaultdict(float))
    received_from: defaultdict[tuple[_Port, int], float] = field(default_factory=lambda: defaultdict(float))

    def add(self, source: _Port, target: _Port, share: float = 1.0) -> None:
        """A flow that leaves through one link and arrives through another (or the same)."""
        self.sent[source] += share
        self.received[target] += share

    def add_between(self, port: _Port, before: int, after: int, share: float) -> None:
        """A flow that passes a card on its way from one host to another."""
        self.add(port, port, share)
        self.received_from[port, before] += share
        self.sent_to[port, after] += share

    @property
    def peak(self) -> float:
        """The largest load in one direction (0 for no traffic)."""
        return max(max(self.sent.values(), default=0.0), max(self.received.values(), default=0.0))

    def slowest(self, cluster: Cluster) -> float:
        """Seconds of the slowest network link for each wire byte, of those of single cards and of pairs of hosts."""
        if not cluster.host_links:
            return self.peak / cluster.network_link.bytes_per_second
        seconds = [0.0]
        for loads in (self.sent, self.received):
            seconds += [load / cluster.card_bytes_per_second(host) for (host, _), load in loads.items()]
        for paths in (self.sent_to, self.received_from):
            seconds += [
                load / cluster.link_between(port[0], peer).bytes_per_second for (port, peer), load in paths.items()
            ]
        return max(seconds)


def wire_bytes(kind: Collective, full_bytes: float, group_size: int) -> float:
    """Bytes that each device of a group sends; ``full_bytes`` as in the module docstring.  None in a group of one.

    Raises ``ClusterError`` for negative or undefined bytes, or a group size below 1.
    """
    if not full_bytes >= 0 or group_size < 1:
        raise ClusterError(
            f"{kind.value} of {full_bytes} bytes in groups of {group_size}; give 0 or more bytes, a size of 1 or more"
        )
    if group_size == 1:
        return 0.0
    if kind is Collective.PERMUTE:
        return float(full_bytes)
    passes = 2 if kind is Collective.ALL_REDUCE else 1
    return passes * (group_size - 1) / group_size * full_bytes


def collective_seconds(
    kind: Collective, full_bytes: float, axes: tuple[str, ...], mesh: Mesh, cluster: Cluster
) -> float:
    """Seconds of one collective over ``axes`` of a mesh on the cluster's first ``mesh.size`` devices.

    Affine in ``full_bytes``, or piecewise linear where measured (see the module docstring).
    Over no axes, or axes of size 1, it is free.
    Raises ``ClusterError`` for unknown axes, a mesh larger than the cluster, or negative bytes.
    """
    group_size, cost = axes_cost(kind, axes, mesh, cluster)
    return cost.seconds(wire_bytes(kind, full_bytes, group_size))


def group_seconds(kind: Collective, full_bytes: float, groups: Groups, cluster: Cluster) -> float:
    """Seconds of one collective that runs in all ``groups`` of device ids at once, for example as compiled HLO says.

    The members of a permute's group send each to the next, the last to the first; for other patterns see
    :func:`permute_seconds`.  Raises ``ClusterError`` for groups that overlap, differ in size, or leave the cluster.
    """
    cost = group_cost(groups, cluster, kind)
    return cost.seconds(wire_bytes(kind, full_bytes, len(groups[0])))


def merged_seconds(kind: Collective, array_bytes: Sequence[float], groups: Groups, cluster: Cluster) -> float:
    """The same of a collective that a compiler has made of several, ``array_bytes`` the full bytes of each."""
    if _shares_latency(cluster):
        return group_seconds(kind, sum(array_bytes), groups, cluster)
    return sum(group_seconds(kind, one, groups, cluster) for one in array_bytes)


def permute_seconds(message_bytes: float, pairs: tuple[tuple[int, int], ...], cluster: Cluster) -> float:
    """Seconds of messages of equal size from the first to the second of each pair of device ids, all at once.

    Raises ``ClusterError`` for ids outside the cluster or negative bytes.
    """
    if not message_bytes >= 0:
        raise ClusterError(f"permute of {message_bytes} bytes; give bytes of 0 or more")
    cost = _pairs_cost(pairs, cluster)
    return cost.seconds(message_bytes)


def sum_scatter_of(cluster: Cluster) -> SumScatter:
    """How sums are best scattered on a mesh over all of a cluster.

    By reduce-scatters, unless all-to-alls between its hosts were measured to be faster (in the geometric mean of groups and
    sizes): gloo took 31 ms for a reduce-scatter of 1 MiB among four hosts, and 15 ms for an all-to-all.
    """
    if cluster.hosts < 2 or cluster.network is None:
        return SumScatter.COLLECTIVE
    return SumScatter.EXCHANGE if cluster.network.exchange_ratio < 1 else SumScatter.COLLECTIVE


@cache
def group_cost(groups: Groups, cluster: Cluster, kind: Collective = Collective.ALL_REDUCE) -> GroupCost:
    """The price of a collective of ``kind`` in all ``groups`` at once; errors as :func:`group_seconds`."""
    check_groups(groups, cluster)
    if len(groups[0]) == 1:
        return GroupCost(0.0, 0.0)
    if (measured := _measured(kind, groups, cluster)) is not None:
        return measured
    if kind is Collective.PERMUTE:
        pairs = tuple(pair for group in groups for pair in zip(group, group[1:] + group[:1], strict=True))
        return _pairs_cost(pairs, cluster)
    local, network = _Traffic(), _Traffic()
    latency = 0.0
    for group in groups:
        by_host = on_hosts(group, cluster)
        if kind is Collective.ALL_TO_ALL:
            _add_exchange(by_host, cluster, local, network)
            latency = max(latency, _exchange_latency(by_host, cluster))
        else:
            _add_ring(by_host, cluster, local, network)
            latency = max(latency, _ring_latency(by_host, cluster))
    passes = 2 if kind is Collective.ALL_REDUCE else 1
    return _carried(kind, groups, passes * latency, _seconds_per_wire_byte(local, network, cluster), cluster)


def _measured(kind: Collective, groups: Sequence[tuple[int, ...]], cluster: Cluster) -> GroupCost | None:
    """The price by the cluster's profile or network; None without one, or for what was not measured."""
    if any(len(on_hosts(group, cluster)) > 1 for group in groups):
        curves = _curves_across_hosts(kind, groups, cluster)
    else:
        curves = _curves_within_hosts(kind, groups, cluster)
    return None if curves is None else _by_curves(*curves, cluster)


def _curves_across_hosts(
    kind: Collective, groups: Sequence[tuple[int, ...]], cluster: Cluster
) -> tuple[Curve, Curve] | None:
    """What was measured of groups of that shape, after work and after another, while all devices of the hosts were at it."""
    if cluster.network is None or (span := measured_span(groups, cluster)) is None:
        return None
    if (soon := cluster.network.collective(kind.value, span)) is None:
        return None
    between = 0.0 if cluster.profile is None else cluster.profile.work_between_seconds
    return soon.raised(waiting(groups, cluster)(between) if between else 0.0), soon


def _carried(
    kind: Collective,
    groups: Iterable[tuple[int, ...]],
    latency_seconds: float,
    seconds_per_wire_byte: float,
    cluster: Cluster,
) -> GroupCost:
    """The price across hosts: that of the links, but no less than what processors take to carry as much within a host."""
    curves = None
    if cluster.profile is not None and cluster.profile.world_collectives:
        curves = _curves_within_hosts(kind, groups, cluster)
    if curves is None:
        behind = GroupCost(0.0, seconds_per_wire_byte) if _shares_latency(cluster) else None
        return GroupCost(latency_seconds, seconds_per_wire_byte, behind_others=behind)
    curve, soon = (one.at_least(latency_seconds, seconds_per_wire_byte) for one in curves)
    return _by_curves(curve, soon, cluster)


def _by_curves(curve: Curve, soon: Curve, cluster: Cluster) -> GroupCost:
    behind = GroupCost(0.0, curve.slope) if _shares_latency(cluster) else GroupCost(soon.at(0.0), soon.slope, soon)
    return GroupCost(curve.at(0.0), curve.slope, curve, behind)


def _shares_latency(cluster: Cluster) -> bool:
    """Whether the backend starts all arrays of a merged collective together."""
    return cluster.device.platform is not Platform.CPU


def _curves_within_hosts(
    kind: Collective, groups: Iterable[tuple[int, ...]], cluster: Cluster
) -> tuple[Curve, Curve] | None:
    """What was measured of groups of that size, or the nearest one, on a host of this cluster: after work, and after another.

    None without a profile, or for a kind that was not measured.
    """
    if cluster.profile is None:
        return None
    size = max(len(group) for group in groups)
    profile = cluster.profile.in_world if cluster.hosts > 1 else cluster.profile
    curve, soon = profile.collective(kind.value, size), profile.soon_collective(kind.value, size)
    return None if curve is None or soon is None else (curve, soon)


@cache
def axes_cost(kind: Collective, axes: tuple[str, ...], mesh: Mesh, cluster: Cluster) -> tuple[int, GroupCost]:
    """(group size, price) of a collective over mesh axes.

    A cache of its own, because hashing a mesh is far cheaper than hashing all its groups.
    """
    groups = axes_groups(mesh, axes)
    return len(groups[0]), group_cost(groups, cluster, kind)


@cache
def _pairs_cost(pairs: tuple[tuple[int, int], ...], cluster: Cluster) -> GroupCost:
    """The price of a permute; a device that sends to itself sends nothing."""
    check_ids(itertools.chain.from_iterable(pairs), cluster)
    moving = [pair for pair in pairs if pair[0] != pair[1]]
    if moving and (measured := _measured(Collective.PERMUTE, moving, cluster)) is not None:
        return measured
    local, network = _Traffic(), _Traffic()
    latency = 0.0
    for source, target in moving:
        same_host = source // cluster.devices_per_host == target // cluster.devices_per_host
        link = cluster.local_link if same_host else cluster.network_link
        ports = _port(source, link, cluster), _port(target, link, cluster)
        if same_host:
            local.add(*ports, 1.0 / _message_share(source, target, cluster))
        else:
            network.add(*ports)
            link = cluster.link_between(ports[0][0], ports[1][0])
            network.sent_to[ports[0], ports[1][0]] += 1.0
            network.received_from[ports[1], ports[0][0]] += 1.0
        latency = max(latency, link.latency_seconds)
    per_byte = _seconds_per_wire_byte(local, network, cluster)
    return _carried(Collective.PERMUTE, moving, latency, per_byte, cluster) if moving else GroupCost(0.0, 0.0)


def _port(device: int, link: Link, cluster: Cluster) -> tuple[int, int]:
    """(host, number of the link on it) that the device sends through."""
    host, position = divmod(device, cluster.devices_per_host)
    return host, position // link.shared_by


def _ring_share(members: Sequence[int], cluster: Cluster) -> float:
    """What devices of one host can send around a ring, as a share of the local link."""
    if cluster.local_wiring is None or len(members) == 1:
        return 1.0
    return cluster.local_wiring.ring_share([device % cluster.devices_per_host for device in members])


def _exchange_share(members: Sequence[int], cluster: Cluster) -> float:
    """What each of the devices of one host can send to the others, as a share of the local link."""
    if cluster.local_wiring is None or len(members) == 1:
        return 1.0
    return cluster.local_wiring.exchange_share([device % cluster.devices_per_host for device in members])


def _message_share(source: int, target: int, cluster: Cluster) -> float:
    """What a device can send to another of its host, as a share of the local link."""
    if cluster.local_wiring is None or source == target:
        return 1.0
    return cluster.local_wiring.message_share(source % cluster.devices_per_host, target % cluster.devices_per_host)


def _add_ring(by_host: dict[int, list[int]], cluster: Cluster, local: _Traffic, network: _Traffic) -> None:
    """One pass of a ring that visits the hosts one after the other."""
    hosts = list(by_host)
    for place, members in enumerate(by_host.values()):
        ports = [_port(device, cluster.local_link, cluster) for device in members]
        load = 1.0 / _ring_share(members, cluster)
        for source, target in itertools.pairwise(ports):
            local.add(source, target, load)
        if len(by_host) == 1:
            local.add(ports[-1], ports[0], load)
        else:
            cards = {_port(device, cluster.network_link, cluster) for device in members}
            before, after = hosts[place - 1], hosts[(place + 1) % len(hosts)]
            for card in cards:
                network.add_between(card, before, after, 1.0 / len(cards))


def _ring_latency(by_host: dict[int, list[int]], cluster: Cluster) -> float:
    """Seconds for the first byte to get around: every edge of the ring but the cheapest."""
    hosts = list(by_host) if len(by_host) > 1 else []
    size = sum(len(members) for members in by_host.values())
    around = zip(hosts, hosts[1:] + hosts[:1], strict=True)
    crossing = [cluster.link_between(host, other).latency_seconds for host, other in around]
    edges = [cluster.local_link.latency_seconds] * (size - len(crossing)) + crossing
    return sum(edges) - min(edges)


def _add_exchange(by_host: dict[int, list[int]], cluster: Cluster, local: _Traffic, network: _Traffic) -> None:
    """Every member sends an equal piece to every other."""
    others = sum(len(members) for members in by_host.values()) - 1
    for host, members in by_host.items():
        inside = (len(members) - 1) / others
        load = inside / _exchange_share(members, cluster)
        for device in members:
            port, card = _port(device, cluster.local_link, cluster), _port(device, cluster.network_link, cluster)
            local.add(port, port, load)
            network.add(card, card, 1.0 - inside)
            for peer, theirs in by_host.items() if cluster.host_links else ():
                if peer != host:
                    network.sent_to[card, peer] += len(theirs) / others
                    network.received_from[card, peer] += len(theirs) / others


def _exchange_latency(by_host: dict[int, list[int]], cluster: Cluster) -> float:
    """Seconds for a member to start a message to every other, the slowest member."""
    size = sum(len(members) for members in by_host.values())

    def to_other_hosts(host: int) -> float:
        if not cluster.host_links:
            return (size - len(by_host[host])) * cluster.network_link.latency_seconds
        return sum(
            len(theirs) * cluster.link_between(host, peer).latency_seconds
            for peer, theirs in by_host.items()
            if peer != host
        )

    return max(
        (len(members) - 1) * cluster.local_link.latency_seconds + to_other_hosts(host)
        for host, members in by_host.items()
    )


def _seconds_per_wire_byte(local: _Traffic, network: _Traffic, cluster: Cluster) -> float:
    """The slowest link decides: both levels carry their part of the stream at once."""
    return max(local.peak / cluster.local_link.bytes_per_second, network.slowest(cluster))
