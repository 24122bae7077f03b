"""From one layout to another: which collectives, in which order.

Layouts are the nodes of a small graph; its arcs are the elementary changes of :class:`MoveKind`.  An arc weighs the
bytes that one device puts on the wire in a ring algorithm, as a share of the whole array (``p`` is the product of the
sizes of the axes that the arc acts on, ``s`` the share of the array that one device holds before it)

    slice, mask 0     all-gather s·(p−1)     all-reduce 2·s·(p−1)/p     reduce-scatter, all-to-all s·(p−1)/p

plus a small constant per arc, so that of two ways with equal bytes the one with fewer collectives wins.  A reshard is a
shortest path (Dijkstra, 1959), which is the same for every array with the same rank and the same divisible dimensions,
so it is searched once per such class.  The choice of the way needs no cluster: pricing a way is the cost model's work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

import numpy as np

from autopar.cluster import Mesh
from autopar.plan import Axes, Layout, SumScatter


class MoveKind(Enum):
    """One elementary change of layout, all of it inside ``shard_map`` over every mesh axis.

    * ``SLICE``           copies on ``axes`` → dimension ``dim`` cut by ``axes`` (each device keeps its piece; free)
    * ``ALL_GATHER``      dimension ``dim``, cut by … + ``axes`` (the minor-most) → no longer cut by ``axes``
    * ``ALL_REDUCE``      partial over ``axes`` → copies
    * ``REDUCE_SCATTER``  partial over ``axes`` → dimension ``dim`` cut by ``axes`` (as its new minor-most)
    * ``EXCHANGE_SUM``    the same as a reduce-scatter, in two: pieces go to who keeps them, who adds them up
    * ``ALL_TO_ALL``      ``axes`` leave dimension ``dim`` (where they are the minor-most) and become the minor-most
                          of dimension ``to_dim``
    * ``MASK``            copies on ``axes`` → partial over ``axes``: the first device along them keeps the value, the
                          others hold zeros (free)
    """

    SLICE = "slice"
    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    EXCHANGE_SUM = "all-to-all and sum"
    ALL_TO_ALL = "all-to-all"
    MASK = "mask"


@dataclass(frozen=True, slots=True)
class Move:
    """One elementary change of layout; ``axes`` in mesh order act together as one axis of the product size."""

    kind: MoveKind
    axes: Axes
    dim: int = -1
    to_dim: int = -1


SCATTERS = frozenset((MoveKind.REDUCE_SCATTER, MoveKind.EXCHANGE_SUM))
"""Kinds that end a partial sum with a piece on each device."""

_KIND_OF_SCATTER = {SumScatter.COLLECTIVE: MoveKind.REDUCE_SCATTER, SumScatter.EXCHANGE: MoveKind.EXCHANGE_SUM}

PER_ARC_WEIGHT = 1e-6
"""Weight of a collective beyond its bytes, in shares of the array; it only breaks ties."""


def shares(layout: Layout, mesh: Mesh) -> int:
    """How many pieces the array is cut into (copies and summands are not pieces)."""
    pieces = 1
    for axes in layout.dims:
        pieces *= mesh.axis_size(*axes)
    return pieces


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Shape of one device's piece; every cut dimension must divide."""
    return tuple(
        extent // mesh.axis_size(*axes) if axes else extent for extent, axes in zip(shape, layout.dims, strict=True)
    )


def divides(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether every cut dimension is a multiple of its number of pieces."""
    return all(extent % mesh.axis_size(*axes) == 0 for extent, axes in zip(shape, layout.dims, strict=True) if axes)


def replicated(rank: int) -> Layout:
    """A copy on every device."""
    return Layout(((),) * rank)


def layouts_of(shape: tuple[int, ...], mesh: Mesh, *, partial: bool = False) -> tuple[Layout, ...]:
    """Every layout of an array of this shape: each axis cuts one dimension that divides, or none (or is partial).

    The fully replicated layout comes first.  Axes that share a dimension stand in mesh order.
    """
    return _layouts(len(shape), tuple(shape), mesh, partial)


@cache
def _layouts(rank: int, shape: tuple[int, ...], mesh: Mesh, partial: bool) -> tuple[Layout, ...]:
    places = [-1, *range(rank)] + ([-2] if partial else [])
    found = []
    for choice in itertools.product(places, repeat=len(mesh.axis_names)):
        dims = tuple(
            tuple(name for name, place in zip(mesh.axis_names, choice, strict=True) if place == dim)
            for dim in range(rank)
        )
        summed = tuple(name for name, place in zip(mesh.axis_names, choice, strict=True) if place == -2)
        layout = Layout(dims, summed)
        if divides(shape, layout, mesh):
            found.append(layout)
    return tuple(found)


def dividing(layout: Layout, mesh: Mesh) -> Layout:
    """The layout without axes of size one: the same pieces on the same devices, and no collective that moves nothing.

    XLA does not drop a collective in groups of one device, and turns arrays around for it.
    """
    names = mesh.dividing_names
    dims = tuple(tuple(name for name in axes if name in names) for axes in layout.dims)
    return Layout(dims, tuple(name for name in layout.partial if name in names))


@dataclass(frozen=True)
class Ways:
    """Shortest ways between all layouts of one class of shapes.

    ``before[a, b]`` is the last layout before b on the way from a (negative where a is b); ``arcs[a, b]`` is the move of
    an elementary change from a to b.  Layouts are meant by their position in ``layouts``.
    """

    layouts: tuple[Layout, ...]
    index: Mapping[Layout, int]
    before: np.ndarray
    arcs: Mapping[tuple[int, int], Move]

    def moves(self, source: Layout, target: Layout) -> tuple[Move, ...]:
        """The moves from one layout to another, first to last."""
        start, place = self.index[source], self.index[target]
        found = []
        while place != start:
            previous = int(self.before[start, place])
            found.append(self.arcs[previous, place])
            place = previous
        return tuple(reversed(found))


def moves_between(shape: tuple[int, ...], source: Layout, target: Layout, mesh: Mesh) -> tuple[Move, ...]:
    """The cheapest list of moves from ``source`` to ``target`` for an array of ``shape``; there is always one.

    Sums are scattered by reduce-scatters; :func:`scattered` says what it is on a mesh that does so otherwise.
    """
    return () if source == target else ways_between(shape, mesh).moves(source, target)


def scattered(move: Move, scatter: SumScatter) -> Move:
    """The move as a mesh makes it that scatters sums in that way."""
    return replace(move, kind=_KIND_OF_SCATTER[scatter]) if move.kind is MoveKind.REDUCE_SCATTER else move


def ways_between(shape: tuple[int, ...], mesh: Mesh) -> Ways:
    """The ways between all layouts of arrays of ``shape``, searched once per class of shapes."""
    return _ways(representative(shape, mesh), mesh)


def representative(shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """The smallest shape with the same divisible dimensions: gcd of each extent with the number of devices."""
    return tuple(math.gcd(extent, mesh.size) for extent in shape)


@cache
def _ways(shape: tuple[int, ...], mesh: Mesh) -> Ways:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import dijkstra

    layouts = layouts_of(shape, mesh, partial=True)
    index = {layout: number for number, layout in enumerate(layouts)}
    cuttable = _cuttable(shape, mesh)
    weights: dict[tuple[int, int], float] = {}
    arcs: dict[tuple[int, int], Move] = {}
    for number, layout in enumerate(layouts):
        for move, after, weight in _arcs(layout, cuttable, mesh):
            pair = (number, index[after])
            if weight < weights.get(pair, math.inf):
                weights[pair], arcs[pair] = weight, move
    rows, columns = np.array(list(weights), dtype=np.int32).reshape(-1, 2).T
    graph = csr_array((list(weights.values()), (rows, columns)), shape=(len(layouts), len(layouts)))
    _, before = dijkstra(graph, return_predecessors=True)
    return Ways(layouts, index, before, arcs)


def _cuttable(shape: tuple[int, ...], mesh: Mesh) -> tuple[tuple[bool, ...], ...]:
    """For each dimension and each product of axes (as a bit set), whether it divides."""
    products = [
        mesh.axis_size(*(name for bit, name in enumerate(mesh.axis_names) if mask >> bit & 1))
        for mask in range(1 << len(mesh.axis_names))
    ]
    return tuple(tuple(extent % product == 0 for product in products) for extent in shape)


def _arcs(layout: Layout, cuttable: tuple[tuple[bool, ...], ...], mesh: Mesh) -> Iterator[tuple[Move, Layout, float]]:
    """All elementary changes that are possible from ``layout``, with their results and weights."""
    share = 1.0 / shares(layout, mesh)
    order = {name: position for position, name in enumerate(mesh.axis_names)}
    idle = [name for name in mesh.axis_names if name not in layout.axes]
    rank = len(layout.dims)

    def appended(dim: int, axes: Axes) -> Axes | None:
        """``dims[dim]`` with ``axes`` as its new minor-most axes, if mesh order and divisibility allow that."""
        grown = layout.dims[dim] + axes
        if [order[name] for name in grown] != sorted(order[name] for name in grown):
            return None
        mask = sum(1 << order[name] for name in grown)
        return grown if cuttable[dim][mask] else None

    def with_dims(changes: dict[int, Axes], partial: Axes | None = None) -> Layout:
        dims = tuple(changes.get(dim, axes) for dim, axes in enumerate(layout.dims))
        return Layout(dims, layout.partial if partial is None else partial)

    for axes in _subsets(idle):
        summed = tuple(name for name in mesh.axis_names if name in layout.partial or name in axes)
        yield Move(MoveKind.MASK, axes), with_dims({}, summed), PER_ARC_WEIGHT * 2e-3
    for dim in range(rank):
        for axes in _subsets(idle):
            if (grown := appended(dim, axes)) is not None:
                yield Move(MoveKind.SLICE, axes, dim), with_dims({dim: grown}), PER_ARC_WEIGHT * 1e-3
        present = layout.dims[dim]
        for cut in range(len(present)):
            kept, leaving = present[:cut], present[cut:]
            p = mesh.axis_size(*leaving)
            yield Move(MoveKind.ALL_GATHER, leaving, dim), with_dims({dim: kept}), share * (p - 1) + PER_ARC_WEIGHT
            for other in range(rank):
                if other != dim and (grown := appended(other, leaving)) is not None:
                    after = with_dims({dim: kept, other: grown})
                    yield Move(MoveKind.ALL_TO_ALL, leaving, dim, other), after, share * (p - 1) / p + PER_ARC_WEIGHT
    for axes in _subsets(list(layout.partial)):
        p = mesh.axis_size(*axes)
        rest = tuple(name for name in layout.partial if name not in axes)
        yield Move(MoveKind.ALL_REDUCE, axes), with_dims({}, rest), 2 * share * (p - 1) / p + PER_ARC_WEIGHT
        for dim in range(rank):
            if (grown := appended(dim, axes)) is not None:
                after = with_dims({dim: grown}, rest)
                yield Move(MoveKind.REDUCE_SCATTER, axes, dim), after, share * (p - 1) / p + PER_ARC_WEIGHT


def _subsets(names: list[str]) -> Iterator[Axes]:
    for count in range(1, len(names) + 1):
        yield from itertools.combinations(names, count)


def after_move(layout: Layout, move: Move, mesh: Mesh) -> Layout:
    """The layout that a move leaves (the verifier's independent reading of :class:`MoveKind`)."""
    dims = list(layout.dims)
    partial = layout.partial
    if move.kind is MoveKind.SLICE:
        dims[move.dim] = dims[move.dim] + move.axes
    elif move.kind is MoveKind.ALL_GATHER:
        dims[move.dim] = dims[move.dim][: -len(move.axes)]
    elif move.kind is MoveKind.ALL_TO_ALL:
        dims[move.dim] = dims[move.dim][: -len(move.axes)]
        dims[move.to_dim] = dims[move.to_dim] + move.axes
    elif move.kind is MoveKind.MASK:
        partial = tuple(name for name in mesh.axis_names if name in partial or name in move.axes)
    else:
        partial = tuple(name for name in partial if name not in move.axes)
        if move.kind in SCATTERS:
            dims[move.dim] = dims[move.dim] + move.axes
    return Layout(tuple(dims), partial)
