"""Which consecutive layers make the stages, and how many devices has each?  By dynamic programming.

For stages s = 1 … S of N microbatches, with t(i, j, n) the seconds of one microbatch in layers i … j−1 on n devices, u those
of the update, c(j) those of what crosses before layer j,

    T ≤ Σ_s t_s + Σ c + (N − 1) · max_s (t_s + u_s / N) + max_s u_s                 (a bound: nothing is hidden)

is minimised over all groupings whose stages fit: state + in-flight residuals ≤ budget, where the p-th stage from the end
keeps min(N, p) microbatches in flight (1F1B).  As in Alpa (Zheng et al. 2022, section 5.2) the maximum is guessed, from small
to large, and for each guess

    g(p, i, d) = min { t(i, j, n) + c(j) + g(p − 1, j, d + n) : t + u/N ≤ guess }

is the best for the layers from i and the devices from d in p stages.  A stage has a slice of a host (a power of two) or whole
hosts; d says where a host ends.  O(guesses · S · D · n · L²), vectorised over L².

Where stages share meshes, all of one size, stages are made as even as layers allow: the slowest is to be fastest.  With
T_r = Σ (t + u/N) over the stages of mesh r, their bound and what they take if all messages are hidden are

    T ≤ Σ_s t_s + Σ c + (N − 1) · max_r T_r + max_r Σ u            T ≥ N · max_r T_r + (P − 1) · min_s t_s

(the latter for stages that are dealt round P meshes, and nearly equal).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.cluster import Cluster
from autopar.inter_op.dealing import devices_at
from autopar.inter_op.layer_costs import LayerCosts

GUESSES = 24
"""So many values of the slowest stage's seconds are tried for each number of microbatches."""


@dataclass(frozen=True)
class Grouping:
    """Stages as runs of layers and of devices: ``ends`` are the layers at which stages end, ``sizes`` their devices.

    ``bound_seconds`` is the estimate of a step, and ``least_seconds`` what it takes at least (see the module docstring).
    ``homes``, where stages share meshes, are the mesh of every stage; then all have the same size.
    """

    count: int
    ends: tuple[int, ...]
    sizes: tuple[int, ...]
    bound_seconds: float
    least_seconds: float = 0.0
    homes: tuple[int, ...] | None = None

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The device ids of every stage."""
        if self.homes is not None:
            return devices_at(self.homes, self.sizes[0])
        found, start = [], 0
        for size in self.sizes:
            found.append(tuple(range(start, start + size)))
            start += size
        return tuple(found)


@dataclass(frozen=True)
class Estimates:
    """What a grouping is made from: costs by number of devices, bytes that cross before each layer for N₀ microbatches."""

    cluster: Cluster
    budget_bytes: float
    costs: Mapping[int, LayerCosts]
    crossing_bytes: np.ndarray
    most_stages: int

    @property
    def num_layers(self) -> int:
        """How many layers the stages are made of."""
        return len(self.crossing_bytes) - 1


def stage_sizes(cluster: Cluster) -> list[int]:
    """How many devices a stage may have, less than all: slices of a host by powers of two, and whole hosts."""
    sizes = [1 << bit for bit in range(cluster.devices_per_host.bit_length()) if 1 << bit <= cluster.devices_per_host]
    sizes = [size for size in sizes if cluster.devices_per_host % size == 0]
    hosts = [cluster.devices_per_host << bit for bit in range(cluster.hosts.bit_length())]
    return sorted({size for size in (*sizes, *hosts) if size < cluster.num_devices})


def fits_hosts(start: int, size: int, cluster: Cluster) -> bool:
    """Whether devices from ``start`` on lie in one host, or are whole hosts."""
    per_host = cluster.devices_per_host
    if size <= per_host:
        return start % per_host + size <= per_host
    return start % per_host == 0 and size % per_host == 0


def best_groupings(estimates: Estimates, count: int) -> list[Grouping]:
    """For each number of stages (2 or more) the best grouping that fits, if there is one; the best first."""
    tables = _Tables(estimates, count)
    best: dict[int, Grouping] = {}
    for guess in tables.guesses():
        waiting = (count - 1) * guess
        if best and waiting > 2 * min(one.bound_seconds for one in best.values()):
            break
        for stages, (seconds, ends, sizes) in enumerate(tables.solve(guess), start=1):
            total = seconds + waiting
            if stages > 1 and np.isfinite(total) and total < best.get(stages, _NONE).bound_seconds:
                best[stages] = Grouping(count, ends, sizes, float(total))
    return sorted(best.values(), key=lambda one: one.bound_seconds)


def shared_grouping(estimates: Estimates, count: int, homes: tuple[int, ...], size: int) -> Grouping | None:
    """The grouping of stages at given homes, each mesh of so many devices, whose slowest stage is fastest.

    None where there are too few layers, or where state and the residuals of a microbatch on each stage exceed the budget.
    """
    tables, stages = _Tables(estimates, count), len(homes)
    if stages > tables.num_layers or size not in tables.seconds:
        return None
    seconds, once = tables.seconds[size], tables.once[size]
    ends = _even_ends(seconds, stages)
    runs = list(pairwise((0, *ends)))
    on_mesh = np.zeros((3, max(homes) + 1))
    for home, (start, end) in zip(homes, runs, strict=True):
        on_mesh[0, home] += seconds[start, end]
        on_mesh[1, home] += once[start, end]
        on_mesh[2, home] += tables.state[size][start, end] + tables.residual[size][start, end]
    if on_mesh[2].max() > estimates.budget_bytes:
        return None
    crossing = sum(
        tables.crossing_seconds(max(homes[at], homes[at + 1]) * size, size)[end]
        for at, end in enumerate(ends[:-1])
        if homes[at] != homes[at + 1]
    )
    fill = sum(seconds[start, end] - once[start, end] / count for start, end in runs) + crossing
    slowest = float(on_mesh[0].max())
    bound = float(fill + (count - 1) * slowest + on_mesh[1].max())
    waiting = max(homes) * min(float(seconds[start, end] - once[start, end] / count) for start, end in runs)
    return Grouping(count, ends, (size,) * stages, bound, count * slowest + waiting, homes)


def _even_ends(seconds: np.ndarray, stages: int) -> tuple[int, ...]:
    """The ends of so many runs of layers of which the slowest is fastest; ``seconds[i, j]`` are those of layers i … j−1."""
    layers = len(seconds) - 1
    slowest = seconds[0]
    cuts = []
    for _ in range(stages - 1):
        worse = np.maximum(slowest[:, None], seconds)
        cuts.append(worse.argmin(axis=0))
        slowest = worse.min(axis=0)
    ends = [layers]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return tuple(ends[::-1])


_NONE = Grouping(0, (), (), float("inf"))


class _Tables:
    """Seconds and bytes of all runs of layers, for one number of microbatches."""

    def __init__(self, estimates: Estimates, count: int) -> None:
        self._estimates, self._count = estimates, count
        self.num_layers = estimates.num_layers
        self.seconds: dict[int, np.ndarray] = {}
        self.once: dict[int, np.ndarray] = {}
        self.state: dict[int, np.ndarray] = {}
        self.residual: dict[int, np.ndarray] = {}
        for size, costs in estimates.costs.items():
            each, once = _runs(costs.microbatch_seconds(count)), _runs(costs.once_seconds)
            self.seconds[size] = each + once / count
            self.once[size] = once
            self.state[size] = _runs(costs.state_bytes)
            self.residual[size] = _runs(costs.residual_bytes_of(count))
        first = next(iter(estimates.costs.values()))
        self._bytes = estimates.crossing_bytes * (first.count / count)

    def guesses(self) -> Iterator[float]:
        """Seconds of the slowest stage, from small to large."""
        values = np.unique(np.concatenate([t[np.isfinite(t)] for t in self.seconds.values()]))
        floor = min(float(np.diag(t, 1).max()) for t in self.seconds.values())
        values = values[values >= floor * (1 - 1e-9)]
        if len(values) > GUESSES:
            values = values[np.unique(np.geomspace(1, len(values), GUESSES).astype(int) - 1)]
        yield from map(float, values)

    def crossing_seconds(self, device: int, size: int) -> np.ndarray:
        """Of what crosses before each layer to a stage on ``size`` devices from ``device`` on."""
        cluster = self._estimates.cluster
        if device % cluster.devices_per_host == 0:
            link, ways = cluster.network_link, max(1, size // cluster.devices_per_host)
        else:
            link, ways = cluster.local_link, size
        return 2 * link.latency_seconds + self._bytes / (link.bytes_per_second * ways)

    def solve(self, guess: float) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
        """For each number of stages: seconds, ends, sizes of the best grouping whose stages take at most ``guess``."""
        cluster, layers = self._estimates.cluster, self.num_layers
        total = cluster.num_devices
        known: dict[int, np.ndarray] = {total: np.where(np.arange(layers + 1) == layers, 0.0, np.inf)}
        choice: list[dict[int, tuple[np.ndarray, np.ndarray]]] = []
        found: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []
        for last in range(1, self._estimates.most_stages + 1):
            allowed = {size: self._allowed(size, last, guess) for size in self.seconds}
            fresh: dict[int, np.ndarray] = {}
            picked: dict[int, tuple[np.ndarray, np.ndarray]] = {}
            for end, rest in known.items():
                for size, seconds in allowed.items():
                    start = end - size
                    if start < 0 or not fits_hosts(start, size, cluster):
                        continue
                    after = rest if end == total else rest + self.crossing_seconds(end, size)
                    sums = seconds + after[None, :]
                    to = sums.argmin(axis=1)
                    cost = sums[np.arange(layers + 1), to]
                    if start not in fresh:
                        fresh[start] = np.full(layers + 1, np.inf)
                        picked[start] = (np.zeros(layers + 1, int), np.zeros(layers + 1, int))
                    better = cost < fresh[start]
                    fresh[start] = np.where(better, cost, fresh[start])
                    picked[start][0][better] = to[better]
                    picked[start][1][better] = size
            choice.append(picked)
            known = fresh
            total_seconds = float(fresh[0][0]) if 0 in fresh else float("inf")
            ends, sizes = _read_back(choice, last) if np.isfinite(total_seconds) else ((), ())
            found.append((total_seconds, ends, sizes))
        return found

    def _allowed(self, size: int, from_end: int, guess: float) -> np.ndarray:
        in_flight = min(self._count, from_end)
        bytes_held = self.state[size] + in_flight * self.residual[size]
        fits = (self.seconds[size] <= guess * (1 + 1e-9)) & (bytes_held <= self._estimates.budget_bytes)
        return np.where(fits, self.seconds[size], np.inf)


def _read_back(
    choice: list[dict[int, tuple[np.ndarray, np.ndarray]]], stages: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    layer, device = 0, 0
    ends: list[int] = []
    sizes: list[int] = []
    for number in range(stages - 1, -1, -1):
        to, size = choice[number][device]
        layer, device = int(to[layer]), device + int(size[layer])
        ends.append(layer)
        sizes.append(device - sum(sizes))
    return tuple(ends), tuple(sizes)


def _runs(each: np.ndarray) -> np.ndarray:
    """Sums over all runs: entry (i, j) of layers i … j−1; infinite where the run is empty."""
    sums = np.concatenate([[0.0], np.cumsum(each)])
    table = sums[None, :] - sums[:, None]
    return np.where(np.arange(len(sums))[None, :] > np.arange(len(sums))[:, None], table, np.inf)
