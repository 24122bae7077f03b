"""Which devices may make a stage?  A slice of one host, or whole hosts; runs of them, one after the other.

Of a host of d devices a slice has n of them, and of h hosts a stage has m, where with c = d, or c = h,

    c is a power of two    1, 2, 4, …, c             halves of halves fill a host
    otherwise              these, the divisors of c, and of few devices or hosts also what all of these leave of c

so that 3 of 6, 2 + 3 of 5 and 1 + 2 of 3 are stages.  Where a number is no power of two, devices at the end of a host, and
hosts at the end of the cluster, may be left idle as well: few arrays can be cut by 5 or 7.

Stages follow each other as hosts do, so where hosts are not all alike their order is a choice: all orders of few hosts are
looked at; of more, the paths that go from each host to the nearest one that is left (Rosenkrantz, Stearns and Lewis, 1977), of
its own kind first.  A stage has devices of one kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from autopar.cluster import Cluster

FEW = 8
"""Of so many devices of a host, or so many hosts, what a share leaves is a share as well."""

ALL_ORDERS = 5
"""Of so many hosts all orders are looked at."""

MOST_ORDERS = 24
"""Of so many orders groupings are made, those whose neighbours are linked best."""


@dataclass(frozen=True)
class HostOrder:
    """The hosts of a cluster in the order in which a pipeline goes through them; ``cluster`` has them so.

    Devices have *places*, from 0 on, in that order.  ``parts`` are, by first place and number of devices of the runs that may
    make a stage, what each is priced as: a cluster of its own, with all its links as slow as the slowest on its ring.
    """

    hosts: tuple[int, ...]
    cluster: Cluster
    parts: Mapping[tuple[int, int], Cluster]

    def devices(self, places: Iterable[int]) -> tuple[int, ...]:
        """The devices at these places, ascending."""
        per_host = self.cluster.devices_per_host
        return tuple(sorted(self.hosts[place // per_host] * per_host + place % per_host for place in places))

    @cached_property
    def firsts(self) -> Mapping[Cluster, tuple[int, int]]:
        """The first run of each of the parts that differ, in the order of ``parts``."""
        found: dict[int, tuple[Cluster, tuple[int, int]]] = {}
        for run, part in self.parts.items():
            found.setdefault(id(part), (part, run))  # hashing a cluster takes longer, and most parts are one object
        different: dict[Cluster, tuple[int, int]] = {}
        for part, run in found.values():
            different.setdefault(part, run)
        return different

    def budgets(self, budget_of: Callable[[Sequence[int]], float]) -> dict[Cluster, float]:
        """What a device of each part may hold."""
        return {
            part: budget_of(self.devices(range(start, start + size))) for part, (start, size) in self.firsts.items()
        }

    def of_sizes(self, sizes: Set[int]) -> HostOrder:
        """The same with runs of these numbers of devices only."""
        return replace(self, parts={run: part for run, part in self.parts.items() if run[1] in sizes})

    def places(self, devices: Iterable[int]) -> tuple[int, ...]:
        """The places of these devices, ascending."""
        per_host = self.cluster.devices_per_host
        return tuple(sorted(self.hosts.index(one // per_host) * per_host + one % per_host for one in devices))


def host_order(cluster: Cluster, hosts: Sequence[int], sizes: Sequence[int]) -> HostOrder:
    """The hosts in that order, with runs of these sizes."""
    ordered = cluster.of_hosts(hosts)
    known: dict[int, Cluster] = {}
    parts = {}
    for start, size in itertools.product(range(cluster.num_devices), sizes):
        if start + size <= cluster.num_devices and fits_hosts(start, size, cluster):
            part = known.get(size) if ordered.has_like_hosts else None
            part = part or _priced(ordered.part(range(start, start + size)))
            if not part.host_devices:
                parts[start, size] = known[size] = part
    return HostOrder(tuple(hosts), ordered, parts)


def _priced(part: Cluster) -> Cluster:
    if not part.host_links:
        return part
    return replace(part, network_link=part.slowest_link(range(part.hosts)), host_links={})


def host_orders(cluster: Cluster, message_bytes: float) -> list[tuple[int, ...]]:
    """Orders of the hosts that differ, those first between whose neighbours messages of that size take least."""
    everyone = tuple(range(cluster.hosts))
    if cluster.has_like_hosts:
        return [everyone]

    def seconds(one: int, other: int) -> float:
        link = cluster.link_between(one, other)
        return link.latency_seconds + message_bytes / link.bytes_per_second

    orders: Iterable[tuple[int, ...]] = itertools.permutations(everyone)
    if cluster.hosts > ALL_ORDERS:
        paths = [_nearest_first(host, cluster, seconds) for host in everyone]
        orders = [everyone, *paths, *(path[::-1] for path in paths)]
    different: dict[Hashable, tuple[int, ...]] = {}
    for order in orders:
        different.setdefault(_signature(cluster.of_hosts(order)), order)
    ranked = sorted(different.values(), key=lambda order: sum(itertools.starmap(seconds, pairwise(order))))
    return ranked[:MOST_ORDERS]


def _signature(ordered: Cluster) -> Hashable:
    return tuple(ordered.host_links.items()), tuple(map(ordered.kind_of, range(ordered.hosts)))


def _nearest_first(first: int, cluster: Cluster, seconds: Callable[[int, int], float]) -> tuple[int, ...]:
    path, left = [first], [host for host in range(cluster.hosts) if host != first]

    def distance(host: int) -> tuple[bool, float]:
        return cluster.kind_of(host) != cluster.kind_of(path[-1]), seconds(path[-1], host)

    while left:
        path.append(min(left, key=distance))
        left.remove(path[-1])
    return tuple(path)


def stage_sizes(cluster: Cluster) -> list[int]:
    """How many devices a stage may have, less than all."""
    hosts = [cluster.devices_per_host * number for number in shares_of(cluster.hosts)]
    return sorted({size for size in (*shares_of(cluster.devices_per_host), *hosts) if size < cluster.num_devices})


def shares_of(count: int) -> list[int]:
    """How many of ``count`` devices of a host, or hosts, a stage may have (see the module docstring)."""
    powers = {1 << bit for bit in range(count.bit_length())}
    if is_power_of_two(count):
        return sorted(powers)
    shares = powers | {number for number in range(1, count + 1) if count % number == 0}
    if count <= FEW:
        shares |= {count - share for share in shares if share < count}
    return sorted(shares)


def is_power_of_two(count: int) -> bool:
    """Whether halves of halves fill so many."""
    return count & (count - 1) == 0


def may_idle(cluster: Cluster) -> bool:
    """Whether stages may leave devices idle: where hosts, or their devices, are no power of two or of several kinds."""
    return bool(cluster.host_devices) or not (
        is_power_of_two(cluster.hosts) and is_power_of_two(cluster.devices_per_host)
    )


def fits_hosts(start: int, size: int, cluster: Cluster) -> bool:
    """Whether devices from ``start`` on lie in one host, or are whole hosts."""
    per_host = cluster.devices_per_host
    if size <= per_host:
        return start % per_host + size <= per_host
    return start % per_host == 0 and size % per_host == 0


def last_ends(cluster: Cluster) -> range:
    """Where the devices of the last stage may end."""
    return range(1 if may_idle(cluster) else cluster.num_devices, cluster.num_devices + 1)


def ends_before(start: int, cluster: Cluster) -> Iterator[int]:
    """Where a stage may end that the one from device ``start`` on follows: there, or with the rest of its host idle."""
    yield start
    if may_idle(cluster) and start % cluster.devices_per_host == 0:
        yield from range(start - 1, start - cluster.devices_per_host, -1)


def placed(sizes: Sequence[int], cluster: Cluster, start: int = 0) -> tuple[tuple[int, ...], ...] | None:
    """The devices of meshes of these sizes, each as near to device ``start`` as it fits; None if there are too few."""
    found: list[tuple[int, ...]] = []
    for size in sizes:
        while start + size <= cluster.num_devices and not fits_hosts(start, size, cluster):
            start += 1
        if start + size > cluster.num_devices:
            return None
        found.append(tuple(range(start, start + size)))
        start += size
    return tuple(found)


def largest_packed(number: int, cluster: Cluster) -> tuple[tuple[int, ...], ...] | None:
    """So many meshes of one size that a stage may have, the largest that fits; None where not one leaves no device idle.

    On clusters of which no device may be idle the meshes take all of them.
    """
    for size in reversed(stage_sizes(cluster)):
        if (runs := placed([size] * number, cluster)) and (may_idle(cluster) or number * size == cluster.num_devices):
            return runs
    return None


def split_evenly(number: int, cluster: Cluster) -> tuple[tuple[int, ...], ...] | None:
    """The devices of ``number`` meshes that together are all, of as nearly one size as hosts allow; None if there are too few.

    Meshes of one size are taken if each has as many devices on every host that it uses.
    """
    total, per_host = cluster.num_devices, cluster.devices_per_host
    if number > total:
        return None
    if total % number == 0:
        even = [range(start, start + total // number) for start in range(0, total, total // number)]
        if all(_is_balanced(run, per_host) for run in even):
            return tuple(map(tuple, even))
    if number <= cluster.hosts:
        return tuple(
            tuple(range(run.start * per_host, run.stop * per_host)) for run in _near_runs(0, cluster.hosts, number)
        )
    found: list[range] = []
    for host, meshes in enumerate(_near_runs(0, number, cluster.hosts)):
        found += _near_runs(host * per_host, per_host, len(meshes))
    return tuple(map(tuple, found))


def fewer_devices(cluster: Cluster, batch_size: int | None) -> list[tuple[int, ...]]:
    """Parts of the cluster on which a step may be faster than on all devices: the most that divide the batch, or are 2ᵏ.

    Of several kinds of devices, all hosts of one kind.  None of a cluster whose devices are all to be used.
    """
    if cluster.host_devices:
        per_host = range(cluster.devices_per_host)
        hosts = {kind: [h for h in range(cluster.hosts) if cluster.kind_of(h) == kind] for kind in cluster.kinds}
        return [tuple(host * len(per_host) + k for host in own for k in per_host) for own in hosts.values()]
    sizes = stage_sizes(cluster) if may_idle(cluster) else []
    dividing = max((size for size in sizes if batch_size is not None and batch_size % size == 0), default=0)
    halving = max((size for size in sizes if is_power_of_two(size)), default=0)
    return [_best_linked(size, cluster) for size in sorted({dividing, halving}, reverse=True) if size]


def _best_linked(size: int, cluster: Cluster) -> tuple[int, ...]:
    """The first devices of that number; of few hosts that are linked differently those whose slowest link is fastest."""
    per_host = cluster.devices_per_host
    if size <= per_host or not cluster.host_links or cluster.hosts > FEW:
        return tuple(range(size))

    def speed(hosts: tuple[int, ...]) -> tuple[float, float]:
        link = cluster.slowest_link(hosts)
        return link.bytes_per_second, -link.latency_seconds

    best = max(itertools.combinations(range(cluster.hosts), size // per_host), key=speed)
    return tuple(host * per_host + k for host in best for k in range(per_host))


def _is_balanced(run: range, per_host: int) -> bool:
    on_host: dict[int, int] = {}
    for device in run:
        on_host[device // per_host] = on_host.get(device // per_host, 0) + 1
    return len(set(on_host.values())) == 1


def _near_runs(start: int, count: int, number: int) -> Iterator[range]:
    """``number`` runs of all ``count`` from ``start`` on, the longer ones first, by one at most."""
    for place in range(number):
        size = count // number + (place < count % number)
        yield range(start, start + size)
        start += size
