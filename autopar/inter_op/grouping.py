"""Which consecutive layers make the stages, and how many devices has each?  By dynamic programming.

For stages s = 1 … S of N microbatches, with t(i, j, n) the seconds of one microbatch in layers i … j−1 on n devices, u those
of the update, c(j) those of what crosses before layer j, there and back,

    T ≤ Σ_s t_s + Σ c + (N − 1) · max (max_s (t_s + u_s / N), max c / 2) + max_s u_s        (a bound: nothing is hidden)

is minimised over all groupings whose stages fit: state + in-flight residuals ≤ budget, where the p-th stage from the end
keeps min(N, p) microbatches in flight (1F1B), and none is known not to fit (:class:`TooLarge`).  As in Alpa (Zheng et al. 2022,
section 5.2) the maximum is guessed, from small to large, and for each guess

    g(p, i, d) = min { t(i, j, n) + c(j) + g(p − 1, j, d + n) : t + u/N ≤ guess, c(j)/2 ≤ guess }

(a link that carries a message of every microbatch is as slow a stage as any other, in either direction)
is the best for the layers from i and the devices from d in p stages.  A stage has a slice of a host or whole hosts; d says
where a host ends, and which devices may be left idle there.  O(guesses · S · D · n · L²), vectorised over L².  The hosts stand in
a given order, and runs of devices that are not alike have prices of their own (:mod:`autopar.inter_op.sites`).

Where stages share meshes, all of one size, stages are made as even as layers allow: the slowest is to be fastest.  With
T_r = Σ (t + u/N) over the stages of mesh r, their bound and what they take if all messages are hidden are

    T ≤ Σ_s t_s + Σ c + (N − 1) · max_r (T_r, C_r / 2) + max_r Σ u            T ≥ N · max_r T_r + (P − 1) · min_s t_s

(the latter for stages that are dealt round P meshes, and nearly equal), with C_r what crosses behind the stages of mesh r.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autopar.cluster import Cluster
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.sites import HostOrder, ends_before, last_ends

GUESSES = 24
"""So many values of the slowest stage's seconds are tried for each number of microbatches, and those of even stages."""

THERE = 0.5
"""Of what crosses there and back, what one direction of a link carries."""


@dataclass(frozen=True)
class Grouping:
    """Stages as runs of layers and of devices: ``ends`` are the layers at which stages end, ``devices`` the ids of each one's.

    ``bound_seconds`` is the estimate of a step, and ``least_seconds`` what it takes at least (see the module docstring).
    ``homes``, where stages share meshes, are the mesh of every stage; then all have the same size.  ``hosts`` are those of the
    cluster in the order in which stages follow each other.
    """

    count: int
    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    bound_seconds: float
    least_seconds: float = 0.0
    homes: tuple[int, ...] | None = None
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True)
class TooLarge:
    """Layers ``start`` … ``end`` − 1 as a stage, so many from the last, that exceeds the budget of its part of the cluster."""

    count: int
    part: Cluster
    from_end: int
    start: int
    end: int


@dataclass(frozen=True)
class Estimates:
    """What a grouping is made from: costs and what a device may hold by parts of the cluster, and bytes that cross before
    each layer for N₀ microbatches.
    """

    order: HostOrder
    budgets: Mapping[Cluster, float]
    costs: Mapping[Cluster, LayerCosts]
    crossing_bytes: np.ndarray
    most_stages: int
    most_in_flight: float = math.inf
    """Residuals of so many microbatches are on a device at most; those of others are elsewhere."""
    too_large: tuple[TooLarge, ...] = ()
    """Stages that were planned exactly, and did not fit although the estimates said so."""

    @property
    def num_layers(self) -> int:
        """How many layers the stages are made of."""
        return len(self.crossing_bytes) - 1


def best_groupings(estimates: Estimates, count: int) -> list[Grouping]:
    """For each number of stages (2 or more) the best grouping that fits, if there is one; the best first."""
    tables = _Tables(estimates, count)
    best: dict[int, Grouping] = {}
    for guess in tables.guesses():
        if best and (count - 1) * guess > 2 * min(one.bound_seconds for one in best.values()):
            break
        for stages, (seconds, ends, places) in enumerate(tables.solve(guess), start=1):
            if stages == 1 or not np.isfinite(seconds):
                continue
            total = seconds + (count - 1) * tables.slowest(ends, places)
            if total < best.get(stages, _NONE).bound_seconds:
                devices = tuple(map(estimates.order.devices, places))
                best[stages] = Grouping(count, ends, devices, total, hosts=estimates.order.hosts)
    return sorted(best.values(), key=lambda one: one.bound_seconds)


def given_grouping(
    estimates: Estimates, count: int, ends: tuple[int, ...], places: Sequence[tuple[int, ...]]
) -> Grouping | None:
    """The grouping of given stages, at places of the order, with its bound; None where one exceeds the budget, or is none."""
    tables, order = _Tables(estimates, count), estimates.order
    parts = [part for run in places if (part := order.parts.get((run[0], len(run)))) is not None]
    if len(parts) < len(places):
        return None
    runs = list(zip(pairwise((0, *ends)), parts, strict=True))
    for behind, ((start, end), part) in enumerate(reversed(runs), start=1):
        if not tables.fits(part, behind)[start, end]:
            return None
    seconds = [float(tables.seconds[part][run]) for run, part in runs]
    crossing = tables.crossing_of(ends, places)
    bound = sum(seconds) + sum(crossing) + (count - 1) * _slowest(seconds, crossing)
    return Grouping(count, ends, tuple(map(order.devices, places)), bound, hosts=order.hosts)


def shared_grouping(
    estimates: Estimates, count: int, homes: tuple[int, ...], meshes: Sequence[tuple[int, ...]]
) -> Grouping | None:
    """The grouping of stages at given homes, each at the places of one of the meshes, whose slowest stage is fastest.

    Where meshes are not alike all are taken for the slowest.  None where there are too few layers, or where state and the
    residuals of a microbatch on each stage exceed the budget.
    """
    tables, stages, order = _Tables(estimates, count), len(homes), estimates.order
    parts = [order.parts.get((mesh[0], len(mesh))) for mesh in meshes]
    known = [part for part in parts if part is not None]
    if stages > tables.num_layers or len(known) < len(parts):
        return None
    slowest_part = max(known, key=lambda part: float(tables.seconds[part][0, -1]))
    seconds, once = tables.seconds[slowest_part], tables.once[slowest_part]
    ends = _even_ends(seconds, stages)
    runs = list(pairwise((0, *ends)))
    on_mesh = np.zeros((3, max(homes) + 1))
    for home, (start, end) in zip(homes, runs, strict=True):
        on_mesh[0, home] += seconds[start, end]
        on_mesh[1, home] += once[start, end]
        on_mesh[2, home] += (tables.state[slowest_part] + tables.residual[slowest_part])[start, end]
    if on_mesh[2].max() > min(estimates.budgets[part] for part in known):
        return None
    crossing = np.zeros(max(homes) + 1)
    for home, following, end in zip(homes, homes[1:], ends, strict=False):
        if home != following:
            crossing[home] += tables.crossing_seconds(*sorted((meshes[home], meshes[following])))[end]
    fill = sum(seconds[start, end] - once[start, end] / count for start, end in runs) + crossing.sum()
    slowest = float(on_mesh[0].max())
    bound = float(fill + (count - 1) * _slowest(on_mesh[0], crossing) + on_mesh[1].max())
    waiting = max(homes) * min(float(seconds[start, end] - once[start, end] / count) for start, end in runs)
    devices = tuple(order.devices(meshes[home]) for home in homes)
    return Grouping(count, ends, devices, bound, count * slowest + waiting, homes, order.hosts)


def _slowest(stages: Iterable[float], crossing: Iterable[float]) -> float:
    """What a microbatch takes at least after the one before: a link in either direction is a stage too."""
    return float(max((*stages, *(THERE * seconds for seconds in crossing))))


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
        self.seconds: dict[Cluster, np.ndarray] = {}
        self.once: dict[Cluster, np.ndarray] = {}
        self.state: dict[Cluster, np.ndarray] = {}
        self.residual: dict[Cluster, np.ndarray] = {}
        for part in estimates.order.firsts:
            costs = estimates.costs[part]
            each, once = _runs(costs.microbatch_seconds(count)), _runs(costs.once_seconds)
            self.seconds[part] = each + once / count
            self.once[part] = once
            self.state[part] = _runs(costs.state_bytes)
            self.residual[part] = _runs(costs.residual_bytes_of(count))
        first = next(iter(estimates.costs.values()))
        self._bytes = estimates.crossing_bytes * (first.count / count)
        self._passages: dict[tuple[int, int, int], np.ndarray] = {}

    def guesses(self) -> Iterator[float]:
        """Seconds of the slowest stage, from small to large; those of even stages on equally many devices are among them, and
        those of links between hosts.
        """
        values = np.unique(np.concatenate([t[np.isfinite(t)] for t in self.seconds.values()]))
        floor = min(float(np.diag(t, 1).max()) for t in self.seconds.values())
        values = values[values >= floor * (1 - 1e-9)]
        if len(values) > GUESSES:
            values = values[np.unique(np.geomspace(1, len(values), GUESSES).astype(int) - 1)]
        links = THERE * self._far_seconds()
        yield from sorted({*map(float, values), *self._even(), *map(float, links[links > floor])})

    def _even(self) -> Iterator[float]:
        """Seconds of the slowest stage where all have the same number of devices and are as even as layers allow."""
        num_devices = self._estimates.order.cluster.num_devices
        for part, seconds in self.seconds.items():
            stages = num_devices // part.num_devices
            if 1 < stages <= self._estimates.most_stages:
                yield max(float(seconds[run]) for run in pairwise((0, *_even_ends(seconds, stages))))

    def crossing_seconds(self, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
        """Of what crosses before each layer from the places of one stage to those of the next."""
        cluster, size = self._estimates.order.cluster, len(source)
        hosts = source[-1] // cluster.devices_per_host, target[0] // cluster.devices_per_host
        if hosts[0] != hosts[1]:
            link, ways = cluster.link_between(*hosts), max(1, size // cluster.devices_per_host)
        else:
            link, ways = cluster.local_link, size
        return 2 * link.latency_seconds + self._bytes / (link.bytes_per_second * ways)

    def _far_seconds(self) -> np.ndarray:
        """Of what crosses before each layer from the first host to the next, if there is one."""
        cluster = self._estimates.order.cluster
        if cluster.hosts == 1:
            return np.zeros(0)
        return self.crossing_seconds((cluster.devices_per_host - 1,), (cluster.devices_per_host,))

    def solve(self, guess: float) -> list[tuple[float, tuple[int, ...], tuple[tuple[int, ...], ...]]]:
        """For each number of stages: seconds, ends, places of the best grouping whose stages take at most ``guess``."""
        order, layers = self._estimates.order, self.num_layers
        done = np.where(np.arange(layers + 1) == layers, 0.0, np.inf)
        before = [_Following(end, end, done) for end in last_ends(order.cluster)]
        choice: list[dict[int, _Choice]] = []
        found: list[tuple[float, tuple[int, ...], tuple[tuple[int, ...], ...]]] = []
        for last in range(1, self._estimates.most_stages + 1):
            picked = _best_of(self._offers(before, last, guess))
            choice.append(picked)
            before = [
                _Following(end, start, best.seconds)
                for start, best in picked.items()
                for end in ends_before(start, order.cluster)
            ]
            total_seconds = float(picked[0].seconds[0]) if 0 in picked else float("inf")
            ends, places = _read_back(choice, last) if np.isfinite(total_seconds) else ((), ())
            found.append((total_seconds, ends, places))
        return found

    def _offers(self, before: Sequence[_Following], last: int, guess: float) -> Iterator[_Offers]:
        """Every stage, so many from the last, before what may follow it: all those of one kind at once."""
        parts = self._estimates.order.parts
        for size in sorted({part.num_devices for part in self.seconds}):
            runs: dict[int, tuple[Cluster, list[_Following]]] = {}
            for following in before:
                if (part := parts.get((following.end - size, size))) is not None:
                    runs.setdefault(id(part), (part, []))[1].append(following)
            for part, followings in runs.values():
                if (seconds := self._allowed(part, last, guess)) is None:
                    continue
                after = np.stack([one.seconds for one in followings])
                if last > 1:
                    passages = np.stack([self._passage(one.end - size, one.end, one.start) for one in followings])
                    after = np.where(THERE * passages <= guess * (1 + 1e-9), after + passages, np.inf)
                sums = seconds[None, :, :] + after[:, None, :]
                ends = sums.argmin(axis=2)
                best = np.take_along_axis(sums, ends[:, :, None], axis=2)[:, :, 0]
                yield _Offers(size, followings, best, ends)

    def slowest(self, ends: Sequence[int], places: Sequence[Sequence[int]]) -> float:
        """Seconds of the slowest of given stages and links; a guess is seldom met exactly."""
        parts = [self._estimates.order.parts[run[0], len(run)] for run in places]
        stages = [float(self.seconds[part][run]) for part, run in zip(parts, pairwise((0, *ends)), strict=True)]
        return _slowest(stages, self.crossing_of(ends, places))

    def crossing_of(self, ends: Sequence[int], places: Sequence[Sequence[int]]) -> list[float]:
        """Seconds of what crosses behind each of given stages but the last."""
        return [
            float(self._passage(source[0], source[-1] + 1, target[0])[end])
            for (source, target), end in zip(pairwise(places), ends, strict=False)
        ]

    def _passage(self, start: int, end: int, next_start: int) -> np.ndarray:
        run = start, end, next_start
        if run not in self._passages:
            self._passages[run] = self.crossing_seconds(range(start, end), (next_start,))
        return self._passages[run]

    def _allowed(self, part: Cluster, from_end: int, guess: float) -> np.ndarray | None:
        """Seconds of all runs, infinite of those that are too slow or too large; None where all are."""
        is_allowed = (self.seconds[part] <= guess * (1 + 1e-9)) & self.fits(part, from_end)
        return np.where(is_allowed, self.seconds[part], np.inf) if is_allowed.any() else None

    def fits(self, part: Cluster, from_end: int) -> np.ndarray:
        """Of which runs a stage, so many from the last, keeps the budget."""
        in_flight = min(self._count, from_end, self._estimates.most_in_flight)
        fits: np.ndarray = self.state[part] + in_flight * self.residual[part] <= self._estimates.budgets[part]
        for one in self._estimates.too_large:
            if one.count == self._count and one.from_end <= from_end and one.part == part:
                fits[: one.start + 1, one.end :] = False  # what holds these layers and more does not either
        return fits


class _Following(NamedTuple):
    """Stages that begin at device ``start``, before which others may end at ``end``; seconds by the layer they begin with."""

    end: int
    start: int
    seconds: np.ndarray


class _Offers(NamedTuple):
    """Stages of so many devices, one before each of ``followings``: entry (k, i) of those that begin with layer i are the
    seconds from there on, and the layer before which the stage ends.
    """

    size: int
    followings: Sequence[_Following]
    seconds: np.ndarray
    ends: np.ndarray


class _Choice(NamedTuple):
    """For every first layer of a stage that begins at one device, the best of what was offered; of equals the first."""

    seconds: np.ndarray
    end: np.ndarray
    size: np.ndarray
    next_start: np.ndarray


def _best_of(offers: Iterable[_Offers]) -> dict[int, _Choice]:
    """The best stages by the device at which they begin."""
    picked: dict[int, _Choice] = {}
    for offer in offers:
        for following, seconds, end in zip(offer.followings, offer.seconds, offer.ends, strict=True):
            start = following.end - offer.size
            if (known := picked.get(start)) is None:
                picked[start] = _Choice(seconds, end, np.full(len(end), offer.size), np.full(len(end), following.start))
            elif (is_better := seconds < known.seconds).any():
                picked[start] = _Choice(
                    np.where(is_better, seconds, known.seconds),
                    np.where(is_better, end, known.end),
                    np.where(is_better, offer.size, known.size),
                    np.where(is_better, following.start, known.next_start),
                )
    return picked


def _read_back(
    choice: Sequence[Mapping[int, _Choice]], stages: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Ends and places of so many stages, the first of which begins with the first layer and the first device."""
    layer, start = 0, 0
    ends: list[int] = []
    places: list[tuple[int, ...]] = []
    for number in range(stages - 1, -1, -1):
        best = choice[number][start]
        places.append(tuple(range(start, start + int(best.size[layer]))))
        layer, start = int(best.end[layer]), int(best.next_start[layer])
        ends.append(layer)
    return tuple(ends), tuple(places)


def _runs(each: np.ndarray) -> np.ndarray:
    """Sums over all runs: entry (i, j) of layers i … j−1; infinite where the run is empty."""
    sums = np.concatenate([[0.0], np.cumsum(each)])
    table = sums[None, :] - sums[:, None]
    return np.where(np.arange(len(sums))[None, :] > np.arange(len(sums))[:, None], table, np.inf)
