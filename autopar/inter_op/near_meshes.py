"""Which meshes share a host, so that little goes over the network?

Stages follow each other along the hosts, so of what neighbours send each other only that leaves a host which is sent where one
ends.  Some stages send far more to one that is not next to them: the last to the first, where the head is the embedding
transposed (its gradient, in every step, and its new weights), or one arm of a U to the other.  Let b(m, m') be the bytes that
the meshes m and m' send each other in a step, n(m) the devices of m, no more than the d of a host, and h(m) its host:

    minimise    Σ b(m, m') [h(m) ≠ h(m')]
    subject to  Σ n(m) [h(m) = k] ≤ d          for every host k

a graph cut into parts of bounded size, which is NP-hard (Garey, Johnson and Stockmeyer, 1976).  Two meshes change places, or
one moves to where there is room, whichever spares most, until nothing spares anything (after Kernighan and Lin, 1970, without
their steps back).  That begins with the orders that pipelines suggest, packed host by host: every turn k, k + 1, …, k − 1 of the
meshes, which brings the ends of a chain together, and 0, M − 1, 1, M − 2, …, which folds a U.  The best end counts; it need not
be the least there is.

Nor need few bytes make a fast step, for neighbours may be parted for it: whoever asks has both simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.inter_op.sites import placed
from autopar.schedule.stage_program import Crossing, Passing

Pair = tuple[int, int]

WORTH_SHARE = 0.02
"""Where no more than this share of the bytes is spared, meshes stay where they are."""


def bytes_between_meshes(crossings: Sequence[Crossing], homes: Sequence[int], count: int) -> dict[Pair, int]:
    """Bytes that two meshes send each other in a step of ``count`` microbatches, each array once, by their numbers m < m'."""
    found: defaultdict[Pair, int] = defaultdict(int)
    for crossing in crossings:
        first, second = sorted((homes[crossing.source], homes[crossing.target]))
        if first != second:
            found[first, second] += crossing.size_bytes * (count if crossing.passing is Passing.MICRO else 1)
    return dict(found)


def near_meshes(
    meshes: Sequence[tuple[int, ...]], sent_bytes: Mapping[Pair, int], cluster: Cluster
) -> tuple[tuple[int, ...], ...] | None:
    """The devices of meshes of these sizes, so that little goes over the network.

    None where that is hardly less than now, where hosts are not alike, or where a mesh has more devices than a host.
    """
    per_host = cluster.devices_per_host
    are_neighbours_only = all(second - first == 1 for first, second in sent_bytes)
    if are_neighbours_only or not cluster.has_like_hosts or max(map(len, meshes)) > per_host:
        return None
    sizes = np.array([len(mesh) for mesh in meshes])
    sent = np.zeros((len(meshes), len(meshes)), dtype=np.int64)
    for (first, second), size_bytes in sent_bytes.items():
        sent[first, second] = sent[second, first] = size_bytes
    now = np.array([mesh[0] // per_host for mesh in meshes])
    ends = [_improved(start, sizes, sent, cluster) for start in (now, *_starts(sizes, cluster))]
    best = min(ends, key=lambda hosts: _between_hosts(hosts, sent))
    if _between_hosts(best, sent) > (1 - WORTH_SHARE) * _between_hosts(now, sent):
        return None
    return _packed(best, sizes, per_host)


def _starts(sizes: np.ndarray, cluster: Cluster) -> Iterator[np.ndarray]:
    """The hosts of meshes that lie side by side in the orders that pipelines suggest, as far as they have room so."""
    number = len(sizes)
    turns = [np.roll(np.arange(number), -first) for first in range(number)]
    fold = np.array([mesh for k in range(number) for mesh in (k, number - 1 - k)][:number])
    for order in (*turns, fold):
        if (side_by_side := placed(sizes[order].tolist(), cluster)) is not None:
            hosts = np.empty(number, dtype=int)
            hosts[order] = [devices[0] // cluster.devices_per_host for devices in side_by_side]
            yield hosts


def _improved(hosts: np.ndarray, sizes: np.ndarray, sent: np.ndarray, cluster: Cluster) -> np.ndarray:
    """The hosts of the meshes after all changes that spare something, the one that spares most first."""
    numbers, hosts = np.arange(len(hosts)), hosts.copy()
    while True:
        there = hosts[:, None] == np.arange(cluster.hosts)
        left = cluster.devices_per_host - sizes @ there
        near = sent @ there  # what each mesh sends to each host
        spared = near - near[numbers, hosts][:, None]
        moving = np.where(sizes[:, None] <= left, spared, 0)
        fits = sizes[:, None] <= left[hosts] + sizes  # that mesh where this one is
        to_other = spared[:, hosts]
        changing = np.where(fits & fits.T, to_other + to_other.T - 2 * sent, 0)
        if max(moving.max(), changing.max()) <= 0:
            return hosts
        if moving.max() >= changing.max():
            mesh, host = np.unravel_index(moving.argmax(), moving.shape)
            hosts[mesh] = host
        else:
            one, other = np.unravel_index(changing.argmax(), changing.shape)
            hosts[one], hosts[other] = hosts[other], hosts[one]


def _between_hosts(hosts: np.ndarray, sent: np.ndarray) -> int:
    """Bytes over the network."""
    return int(np.where(hosts[:, None] != hosts, sent, 0).sum()) // 2


def _packed(hosts: np.ndarray, sizes: np.ndarray, per_host: int) -> tuple[tuple[int, ...], ...]:
    """The devices of meshes side by side on their hosts, which are numbered as meshes come to them."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts.tolist()))}
    free = [number * per_host for number in range(len(numbers))]
    found = []
    for host, size in zip(hosts.tolist(), sizes.tolist(), strict=True):
        start = free[numbers[host]]
        found.append(tuple(range(start, start + size)))
        free[numbers[host]] += size
    return tuple(found)
