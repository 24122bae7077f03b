"""Which meshes share a host, so that the least goes over the network?

Stages follow each other along the hosts, so of what neighbours send each other only that leaves a host which is sent where one
ends.  Some stages send far more to one that is not next to them: the last to the first, where the head is the embedding
transposed (its gradient, in every step, and its new weights), or one arm of a U to the other.  Let b(m, m') be the bytes that
the meshes m and m' send each other in a step, n(m) the devices of m, no more than the d of a host, and h(m) its host:

    minimise    Σ b(m, m') [h(m) ≠ h(m')]
    subject to  Σ n(m) [h(m) = k] ≤ d          for every host k

a graph cut into parts of bounded size, NP-hard in general (Garey, Johnson and Stockmeyer, 1976), and here of few meshes: an
integer program.  Hosts that are alike are numbered as meshes come to them, h(m) ≤ m, lest every plan be found many times.

The least bytes need not make the fastest step, for neighbours may be parted for it: whoever asks has both simulated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import MemoryRow, Model
from autopar.schedule.stage_program import Crossing, Passing

Pair = tuple[int, int]

WORTH_SHARE = 0.02
"""Where no more than this share of the bytes is spared, meshes stay in their order."""

SECONDS = 2.0
"""That the integer program may take; of sixteen meshes on eight hosts it takes a tenth of one."""


def bytes_between_meshes(crossings: Sequence[Crossing], homes: Sequence[int], count: int) -> dict[Pair, int]:
    """Bytes that two meshes send each other in a step of ``count`` microbatches, each array once, by their numbers m < m'."""
    found: defaultdict[Pair, int] = defaultdict(int)
    for crossing in crossings:
        first, second = sorted((homes[crossing.source], homes[crossing.target]))
        if first != second:
            found[first, second] += crossing.size_bytes * (count if crossing.passing is Passing.MICRO else 1)
    return dict(found)


def near_meshes(
    meshes: Sequence[tuple[int, ...]], sent_bytes: Mapping[Pair, float], cluster: Cluster
) -> tuple[tuple[int, ...], ...] | None:
    """The devices of meshes of these sizes, so that the least goes over the network.

    None where that is hardly less than now, where hosts are not alike, or where a mesh has more devices than a host.
    """
    per_host = cluster.devices_per_host
    are_neighbours_only = all(second - first == 1 for first, second in sent_bytes)
    if are_neighbours_only or not cluster.has_like_hosts or max(map(len, meshes)) > per_host:
        return None
    hosts = _hosts([len(mesh) for mesh in meshes], sent_bytes, cluster)
    now = [mesh[0] // per_host for mesh in meshes]
    if hosts is None or _sent(hosts, sent_bytes) > (1 - WORTH_SHARE) * _sent(now, sent_bytes):
        return None
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    taken = [0] * cluster.hosts
    found = []
    for mesh, host in zip(meshes, map(numbers.__getitem__, hosts), strict=True):
        start = host * per_host + taken[host]
        found.append(tuple(range(start, start + len(mesh))))
        taken[host] += len(mesh)
    return tuple(found)


def _hosts(sizes: Sequence[int], sent_bytes: Mapping[Pair, float], cluster: Cluster) -> tuple[int, ...] | None:
    """The host of every mesh; None where none was found in time."""
    numbers = np.arange(cluster.hosts)
    nodes = [np.where(numbers <= mesh, 0.0, math.inf) for mesh in range(len(sizes))]
    apart = 1.0 - np.eye(cluster.hosts)
    edges = {pair: size_bytes * apart for pair, size_bytes in sent_bytes.items()}
    full = [
        MemoryRow(
            {mesh: size * (numbers == host) for mesh, size in enumerate(sizes)}, {}, float(cluster.devices_per_host)
        )
        for host in numbers
    ]
    try:
        solution = solve(Model(nodes, edges, full), time_limit_seconds=SECONDS)
    except PlanError:
        return None
    return None if solution is None else solution.options


def _sent(hosts: Sequence[int], sent_bytes: Mapping[Pair, float]) -> float:
    """Bytes over the network."""
    return sum(size_bytes for (first, second), size_bytes in sent_bytes.items() if hosts[first] != hosts[second])
