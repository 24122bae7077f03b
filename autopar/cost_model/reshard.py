"""What a reshard costs: the price of its moves, of which each handles a fixed share of the array.

So for one class of shapes (same rank, same divisible dimensions) and α-β prices, the seconds of the way from layout *a* to
layout *b* are ``latency[a, b] + seconds_per_byte[a, b] · bytes``, with ``bytes`` the size of the whole array.  The table of
both is computed once per class and mesh.

Measured prices are not affine, nor is a latency that merged collectives share.  Then the table holds for every way the
*legs* that it is made of.  Legs of one kind, group size and share of the array cost the same and are one entry; all entries
of a table are priced at the size that is asked for, one interpolation per curve, and a way is the sum of at most a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np

from autopar.cluster import Cluster, Mesh, Platform
from autopar.cost_model.collectives import Collective, axes_cost, sum_scatter_of, wire_bytes
from autopar.curves import Curve
from autopar.graph.merging import Merged
from autopar.plan import Layout, SumScatter
from autopar.schedule.reshard import SCATTERS, Move, MoveKind, Ways, representative, scattered, shares, ways_between

COLLECTIVE_OF_MOVE = {
    MoveKind.ALL_GATHER: Collective.ALL_GATHER,
    MoveKind.ALL_REDUCE: Collective.ALL_REDUCE,
    MoveKind.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    MoveKind.EXCHANGE_SUM: Collective.ALL_TO_ALL,
    MoveKind.ALL_TO_ALL: Collective.ALL_TO_ALL,
}
"""The collective behind each move; slices and masks need none."""


CUT = frozenset((MoveKind.ALL_GATHER,)) | SCATTERS
"""Moves whose pieces stand one after the other in what is sent or received."""


def collective_bytes(move: Move, layout: Layout, array_bytes: float, mesh: Mesh) -> float:
    """Bytes of the full tensor of a move's collective, for an array that lies in ``layout`` before it."""
    local = array_bytes / shares(layout, mesh)
    return local * mesh.axis_size(*move.axes) if move.kind is MoveKind.ALL_GATHER else local


def move_seconds(
    move: Move, layout: Layout, array_bytes: float, mesh: Mesh, cluster: Cluster, *, joins: bool = False
) -> float:
    """Seconds on the links of one move of an array of ``array_bytes`` (whole) that lies in ``layout`` before it.

    One that ``joins`` others in a collective of the backend's making costs what it adds to that.
    """
    if (kind := COLLECTIVE_OF_MOVE.get(move.kind)) is None:
        return 0.0
    group_size, cost = axes_cost(kind, move.axes, mesh, cluster)
    sent = wire_bytes(kind, collective_bytes(move, layout, array_bytes, mesh), group_size)
    return (cost.joined if joins else cost).seconds(sent)


def outermost_of(shape: tuple[int, ...]) -> int:
    """The first dimension that is longer than one: what is cut along it lies in one piece."""
    return next((dim for dim, extent in enumerate(shape) if extent > 1), 0)


def copy_seconds(move: Move, layout: Layout, array_bytes: float, mesh: Mesh, cluster: Cluster, outermost: int) -> float:
    """Seconds in memory of the same move: of sums that are added up by hand, and of copies.

    Pieces that are gathered or scattered along another dimension than the outermost do not lie one after the other: on CPU the
    full tensor is copied once for it.  So is what is sent of an all-to-all that cuts such a dimension, and what comes is put
    together along one as slowly as if it were turned.  What other backends do about it is not known, and not priced.
    """
    full_bytes = collective_bytes(move, layout, array_bytes, mesh)
    added = 0.0
    if move.kind is MoveKind.EXCHANGE_SUM:
        added = full_bytes * (1 + 1 / mesh.axis_size(*move.axes)) / cluster.per_device_memory_bytes_per_second
    if cluster.device.platform is not Platform.CPU:
        return added
    cut_seconds = 2 * full_bytes / cluster.per_device_cut_bytes_per_second
    if move.kind is MoveKind.ALL_TO_ALL:
        joined_seconds = 2 * full_bytes / cluster.per_device_turned_bytes_per_second
        return (cut_seconds if move.to_dim > outermost else 0.0) + (joined_seconds if move.dim > outermost else 0.0)
    return added + (cut_seconds if move.kind in CUT and move.dim > outermost else 0.0)


class ReshardTable(Protocol):
    """Prices between all layouts of one class of shapes."""

    def between(self, sources: list[Layout], targets: list[Layout], array_bytes: float) -> np.ndarray:
        """Matrix [len(sources), len(targets)] of seconds."""


@dataclass(frozen=True)
class AffineTable:
    """Prices by α and β: seconds = ``latency_seconds + seconds_per_byte · bytes``."""

    index: dict[Layout, int]
    latency_seconds: np.ndarray
    seconds_per_byte: np.ndarray

    def between(self, sources: list[Layout], targets: list[Layout], array_bytes: float) -> np.ndarray:
        """Matrix [len(sources), len(targets)] of seconds."""
        per_byte = _between(self.seconds_per_byte, self.index, sources, targets)
        return _between(self.latency_seconds, self.index, sources, targets) + per_byte * array_bytes


@dataclass(frozen=True)
class SharedLatency:
    """The latency of a set of merged collectives: who fills a share of the set pays that share, who is larger pays it once."""

    seconds: float

    def at_all(self, shares_of_set: np.ndarray) -> np.ndarray:
        """Seconds for each share."""
        return self.seconds * np.minimum(shares_of_set, 1.0)


@dataclass(frozen=True)
class LegTable:
    """Prices that are not affine; ``legs[a, b]`` are the entries whose sum is the way from *a* to *b*, filled up with entry 0.

    Entry 0 costs nothing, an entry of ``affine`` ``latency + seconds_per_byte · bytes`` (ends of analytic ways, what
    joins others, and copies), one of ``curves`` in addition what its curve says at ``share · bytes``.
    """

    index: dict[Layout, int]
    legs: np.ndarray
    affine: np.ndarray
    """[entries, 2]: latency and seconds per byte of the whole array."""
    curves: tuple[tuple[Curve | SharedLatency, np.ndarray, np.ndarray], ...]
    """Each curve with its entries and their shares: bytes on the wire per byte of the whole array, or what fills a set."""
    _priced: dict[float, np.ndarray] = field(default_factory=dict, compare=False)

    def between(self, sources: list[Layout], targets: list[Layout], array_bytes: float) -> np.ndarray:
        """Matrix [len(sources), len(targets)] of seconds."""
        if (seconds := self._priced.get(array_bytes)) is None:
            seconds = self.affine[:, 0] + self.affine[:, 1] * array_bytes
            for curve, entries, shares_of_bytes in self.curves:
                seconds[entries] += curve.at_all(shares_of_bytes * array_bytes)
            self._priced[array_bytes] = seconds
        return seconds[_between(self.legs, self.index, sources, targets)].sum(axis=-1)


def _between(table: np.ndarray, index: dict[Layout, int], sources: list[Layout], targets: list[Layout]) -> np.ndarray:
    """The rows of the sources, of which the columns of the targets: one after the other takes less than both at once."""
    rows, columns = ([index[layout] for layout in layouts] for layouts in (sources, targets))
    return table.take(rows, axis=0).take(columns, axis=1)


COMBINED = {
    Platform.CPU: frozenset({Collective.ALL_REDUCE}),
    Platform.CUDA: frozenset({Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER}),
    Platform.TPU: frozenset({Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER}),
}
"""Kinds of collectives that each backend's compiler merges when they do not depend on each other."""

GATHERS_COMBINED = {Platform.CUDA: frozenset({Collective.ALL_GATHER})}
"""… of which those of parameters, read off XLA:GPU; XLA:CPU does not, and of others it is not known."""

COMBINED_RESULT_BYTES: Mapping[Platform, float] = {Platform.CUDA: 30 * 2.0**20}
"""So many bytes of results become one collective at most: XLA:GPU's default for each kind.  XLA:CPU has no such bound."""


def merging(merged: Merged, platform: Platform) -> frozenset[Collective]:
    """The kinds of collectives of a value that become one with those of others."""
    match merged:
        case Merged.ALL:
            return COMBINED[platform]
        case Merged.GATHERS:
            return GATHERS_COMBINED.get(platform, frozenset())
        case Merged.NONE:
            return frozenset()


def reshard_table(
    shape: tuple[int, ...],
    mesh: Mesh,
    cluster: Cluster,
    merged: Merged = Merged.NONE,
) -> ReshardTable:
    """The table of the class that ``shape`` belongs to.

    Collectives that the backend makes one with others (:func:`merging`) cost what they add to these, and where sets are limited
    (:data:`COMBINED_RESULT_BYTES`) their share of a full set's latency.
    """
    return _table(
        representative(shape, mesh), outermost_of(shape), mesh, cluster, merging(merged, cluster.device.platform)
    )


def _share_of_set(move: Move, layout: Layout, mesh: Mesh, limit_bytes: float) -> float:
    """Which share of a full set of merged collectives a byte of the whole array fills."""
    result = collective_bytes(move, layout, 1.0, mesh)
    return result / (mesh.axis_size(*move.axes) if move.kind is MoveKind.REDUCE_SCATTER else 1) / limit_bytes


@cache
def _table(
    shape: tuple[int, ...], outermost: int, mesh: Mesh, cluster: Cluster, joining: frozenset[Collective]
) -> ReshardTable:
    ways = ways_between(shape, mesh)
    is_measured = cluster.profile is not None or cluster.network is not None
    if is_measured or (joining and cluster.device.platform in COMBINED_RESULT_BYTES):
        return _leg_table(ways, outermost, mesh, cluster, joining)
    count = len(ways.layouts)
    arc_latency = np.zeros((count, count))
    arc_per_byte = np.zeros((count, count))
    for (source, target), move in _arcs(ways, sum_scatter_of(cluster)):
        joins = COLLECTIVE_OF_MOVE.get(move.kind) in joining
        small, large = (
            move_seconds(move, ways.layouts[source], size, mesh, cluster, joins=joins) for size in (0.0, 1e9)
        )
        arc_latency[source, target] = small
        copied = copy_seconds(move, ways.layouts[source], 1.0, mesh, cluster, outermost)
        arc_per_byte[source, target] = (large - small) / 1e9 + copied
    latency = np.zeros((count, count))
    per_byte = np.zeros((count, count))
    for previous, here, under_way in _backwards(ways):
        latency += np.where(under_way, arc_latency[previous, here], 0.0)
        per_byte += np.where(under_way, arc_per_byte[previous, here], 0.0)
    return AffineTable(dict(ways.index), latency, per_byte)


def _arcs(ways: Ways, scatter: SumScatter) -> Iterator[tuple[tuple[int, int], Move]]:
    """Every elementary change as it is made."""
    return ((ends, scattered(move, scatter)) for ends, move in ways.arcs.items())


def _backwards(ways: Ways) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """All ways at once, one arc back per round: matrices [start, end] of (arc's source, its target, whether there is one)."""
    start, here = np.indices((len(ways.layouts),) * 2)
    while (under_way := start != here).any():
        previous = np.where(under_way, ways.before[start, here], here)
        yield previous, here, under_way
        here = previous


def _leg_table(ways: Ways, outermost: int, mesh: Mesh, cluster: Cluster, joining: frozenset[Collective]) -> LegTable:
    limit_bytes = COMBINED_RESULT_BYTES.get(cluster.device.platform)
    entry_of: dict[tuple[float, float, Curve | SharedLatency | None, float], int] = {(0.0, 0.0, None, 0.0): 0}
    arc_entry = np.zeros((len(ways.layouts),) * 2, dtype=np.int32)
    for (source, target), move in _arcs(ways, sum_scatter_of(cluster)):
        if (kind := COLLECTIVE_OF_MOVE.get(move.kind)) is None:
            continue
        group_size, cost = axes_cost(kind, move.axes, mesh, cluster)
        share = wire_bytes(kind, collective_bytes(move, ways.layouts[source], 1.0, mesh), group_size)
        copied = copy_seconds(move, ways.layouts[source], 1.0, mesh, cluster, outermost)
        entry: tuple[float, float, Curve | SharedLatency | None, float]
        if kind in joining and limit_bytes is not None:
            latency, filled = (
                SharedLatency(cost.seconds(0.0)),
                _share_of_set(move, ways.layouts[source], mesh, limit_bytes),
            )
            entry = (0.0, share * cost.seconds_per_wire_byte + copied, latency, filled)
        elif (price := cost.joined if kind in joining else cost).curve is None:
            entry = (price.latency_seconds, share * price.seconds_per_wire_byte + copied, None, 0.0)
        else:
            entry = (0.0, copied, price.curve, share)
        arc_entry[source, target] = entry_of.setdefault(entry, len(entry_of))
    rounds = [np.where(under_way, arc_entry[previous, here], 0) for previous, here, under_way in _backwards(ways)]
    legs = np.stack(rounds, axis=-1) if rounds else np.zeros((*arc_entry.shape, 1), dtype=np.int32)
    by_curve: dict[Curve | SharedLatency, list[tuple[int, float]]] = {}
    for (_, _, curve, share), number in entry_of.items():
        if curve is not None:
            by_curve.setdefault(curve, []).append((number, share))
    curves = tuple(
        (curve, np.array([number for number, _ in entries]), np.array([share for _, share in entries]))
        for curve, entries in by_curve.items()
    )
    return LegTable(dict(ways.index), legs, np.array([entry[:2] for entry in entry_of]), curves)
