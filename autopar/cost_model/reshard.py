"""What a reshard costs: the α-β price of its moves, affine in the bytes of the array.

Every move of a reshard handles a fixed share of the array, so for one class of shapes (same rank, same divisible
dimensions) the seconds of the way from layout *a* to layout *b* are ``latency[a, b] + seconds_per_byte[a, b] · bytes``,
with ``bytes`` the size of the whole array.  The table of both is computed once per class and mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from autopar.cluster import Cluster, Mesh, Platform
from autopar.cost_model.collectives import Collective, collective_seconds
from autopar.plan import Layout
from autopar.schedule.reshard import Move, MoveKind, representative, shares, ways_between

COLLECTIVE_OF_MOVE = {
    MoveKind.ALL_GATHER: Collective.ALL_GATHER,
    MoveKind.ALL_REDUCE: Collective.ALL_REDUCE,
    MoveKind.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    MoveKind.ALL_TO_ALL: Collective.ALL_TO_ALL,
}
"""The collective behind each move; slices and masks need none."""


def collective_bytes(move: Move, layout: Layout, array_bytes: float, mesh: Mesh) -> float:
    """Bytes of the full tensor of a move's collective, for an array that lies in ``layout`` before it."""
    local = array_bytes / shares(layout, mesh)
    return local * mesh.axis_size(*move.axes) if move.kind is MoveKind.ALL_GATHER else local


def move_seconds(move: Move, layout: Layout, array_bytes: float, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of one move of an array of ``array_bytes`` (whole) that lies in ``layout`` before it."""
    if (kind := COLLECTIVE_OF_MOVE.get(move.kind)) is None:
        return 0.0
    return collective_seconds(kind, collective_bytes(move, layout, array_bytes, mesh), move.axes, mesh, cluster)


@dataclass(frozen=True)
class ReshardTable:
    """Prices between all layouts of one class of shapes: seconds = ``latency_seconds + seconds_per_byte · bytes``."""

    index: dict[Layout, int]
    latency_seconds: np.ndarray
    seconds_per_byte: np.ndarray

    def between(self, sources: list[Layout], targets: list[Layout], array_bytes: float) -> np.ndarray:
        """Matrix [len(sources), len(targets)] of seconds."""
        rows = np.array([self.index[layout] for layout in sources])[:, None]
        columns = np.array([self.index[layout] for layout in targets])[None, :]
        return self.latency_seconds[rows, columns] + self.seconds_per_byte[rows, columns] * array_bytes


COMBINED = {
    Platform.CPU: frozenset({Collective.ALL_REDUCE}),
    Platform.CUDA: frozenset({Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER}),
    Platform.TPU: frozenset({Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER}),
}
"""Kinds of collectives that each backend's compiler merges when they do not depend on each other."""


def reshard_table(shape: tuple[int, ...], mesh: Mesh, cluster: Cluster, *, combined: bool = False) -> ReshardTable:
    """The table of the class that ``shape`` belongs to.

    With ``combined``, the collectives that the backend merges (:data:`COMBINED`) cost no latency of their own.
    """
    return _table(representative(shape, mesh), mesh, cluster, combined)


@cache
def _table(shape: tuple[int, ...], mesh: Mesh, cluster: Cluster, combined: bool) -> ReshardTable:
    ways = ways_between(shape, mesh)
    count = len(ways.layouts)
    arc_latency = np.zeros((count, count))
    arc_per_byte = np.zeros((count, count))
    for (source, target), move in ways.arcs.items():
        alone = move_seconds(move, ways.layouts[source], 0.0, mesh, cluster)
        large = move_seconds(move, ways.layouts[source], 1e9, mesh, cluster)
        merged = combined and COLLECTIVE_OF_MOVE.get(move.kind) in COMBINED[cluster.device.platform]
        arc_latency[source, target] = 0.0 if merged else alone
        arc_per_byte[source, target] = (large - alone) / 1e9
    latency = np.zeros((count, count))
    per_byte = np.zeros((count, count))
    start, here = np.indices((count, count))
    while (under_way := start != here).any():  # all ways at once, one arc back per round
        previous = np.where(under_way, ways.before[start, here], here)
        latency += np.where(under_way, arc_latency[previous, here], 0.0)
        per_byte += np.where(under_way, arc_per_byte[previous, here], 0.0)
        here = previous
    return ReshardTable(dict(ways.index), latency, per_byte)
