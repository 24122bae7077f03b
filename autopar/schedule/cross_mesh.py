"""From one mesh to another: which device sends which part of an array to whom?

An array lies on a *source* mesh and is wanted on a *target* mesh; their devices may be disjoint or overlap.  In each
dimension the source cuts it into ``p`` pieces and the target into ``q``; both are unions of *cells*, ``lcm(p, q)`` to the
dimension, so the cells of one transfer all have one shape.  A :class:`Tile` is one cell sent by one device to another.

*Landing.*  The tiles need not make the target layout at once.  They make the *landing* layout, and collectives on the
target mesh (:func:`autopar.schedule.reshard.moves_between`) do the rest.  This gives three strategies:

    direct      landing is the target layout, every receiver is served by a device of the source
    broadcast   landing is the target layout, but only one device of a receiving host is served from outside; the others
                with the same piece copy it from there (tiles that are ``relayed``)
    spread      landing cuts what the target holds copies of, so that no byte is sent twice; an all-gather finishes it

Which landing is cheapest is the cost model's question (:mod:`autopar.cost_model.transfers`); for a given landing the tiles
follow.  Whatever the landing, a byte enters a host over the network at most once, and only if no device there has it.

*Senders.*  Holders of a cell on the receiver's own host go before others.  Among equals the one with the least to send
is taken: first by the load of its network card (or local link), which several devices may share, then by its own.  All
tiles have equal bytes, so this is list scheduling (Graham, 1966).

Partial sums are not sent: they are reduced on the source mesh first.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from autopar.cluster import Cluster, Link, Mesh
from autopar.errors import PlanError
from autopar.plan import Layout
from autopar.schedule.reshard import Move, MoveKind, divides, layouts_of, local_shape, moves_between, shares

Box = tuple[tuple[int, int], ...]
"""Start and stop in every dimension of the whole array."""
_Cell = tuple[int, ...]


class Strategy(Enum):
    """The three ways of the module docstring."""

    DIRECT = "direct"
    BROADCAST = "broadcast"
    SPREAD = "spread"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an array lies: a layout on a mesh whose positions, row-major, are the devices with these global ids.

    Raises ``PlanError`` if ids and mesh do not pair up, or an id comes twice.
    """

    layout: Layout
    mesh: Mesh
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.devices) != self.mesh.size or len(set(self.devices)) != len(self.devices):
            raise PlanError(
                f"devices {self.devices} for mesh {self.mesh}; give {self.mesh.size} device ids, none of them twice"
            )

    def moved(self, by: int) -> Placement:
        """The same on devices whose ids are so much greater."""
        return replace(self, devices=tuple(device + by for device in self.devices))

    def piece(self, position: int) -> tuple[int, ...]:
        """The number of the piece, in every dimension, that the device at a position of the mesh holds."""
        numbers = []
        for axes in self.layout.dims:
            number = 0
            for axis in axes:
                size = self.mesh.axis_size(axis)
                number = number * size + position // self.mesh.stride(axis) % size
            numbers.append(number)
        return tuple(numbers)

    def pieces(self) -> tuple[int, ...]:
        """How many pieces every dimension is cut into."""
        return tuple(self.mesh.axis_size(*axes) for axes in self.layout.dims)


@dataclass(frozen=True, slots=True)
class Tile:
    """One part of the array on its way from one device to another (or staying where it is).

    A ``relayed`` tile is sent by a receiver of the same transfer, which must first have it.
    """

    sender: int
    receiver: int
    box: Box
    relayed: bool = False


@dataclass(frozen=True)
class CrossMeshTransfer:
    """How one array gets from ``source`` to ``target``: ``tiles`` make ``landing`` on the target mesh, ``moves`` the rest.

    ``itemsize_bytes`` is that of one element; keys are elements (their words do not show in ``shape``).  All tiles have
    the shape ``tile_shape``.  An array without elements has no tiles.
    """

    shape: tuple[int, ...]
    itemsize_bytes: int
    source: Placement
    target: Placement
    landing: Layout
    tiles: tuple[Tile, ...] = field(repr=False)

    @property
    def landed(self) -> Placement:
        """Where the array lies when the tiles have come."""
        return Placement(self.landing, self.target.mesh, self.target.devices)

    def moved(self, by: int) -> CrossMeshTransfer:
        """The same between devices whose ids are so much greater."""
        tiles = tuple(Tile(one.sender + by, one.receiver + by, one.box, one.relayed) for one in self.tiles)
        return replace(self, source=self.source.moved(by), target=self.target.moved(by), tiles=tiles)

    @property
    def moves(self) -> tuple[Move, ...]:
        """What is left to do on the target mesh, from ``landing`` to the target layout.

        Gathers of different dimensions may come in any order.  Those over far neighbours come first, while pieces are small:
        the other way round every device of a host would fetch from far what its neighbour fetches too.
        """
        mesh = self.target.mesh
        moves = moves_between(self.shape, self.landing, self.target.layout, mesh)
        if any(move.kind is not MoveKind.ALL_GATHER for move in moves) or len({m.dim for m in moves}) < len(moves):
            return moves
        return tuple(sorted(moves, key=lambda move: -max(mesh.stride(axis) for axis in move.axes)))

    @property
    def array_bytes(self) -> int:
        """Bytes of the whole array, counted once."""
        return math.prod(self.shape) * self.itemsize_bytes

    @cached_property
    def tile_shape(self) -> tuple[int, ...]:
        """The shape of every tile."""
        return tuple(
            extent // cells for extent, cells in zip(self.shape, _cells(self.source, self.landed), strict=True)
        )

    @cached_property
    def tile_bytes(self) -> int:
        """Bytes of every tile."""
        return math.prod(self.tile_shape) * self.itemsize_bytes

    @property
    def strategy(self) -> Strategy:
        """Which of the three ways this is."""
        if self.landing != self.target.layout:
            return Strategy.SPREAD
        return Strategy.BROADCAST if any(tile.relayed for tile in self.tiles) else Strategy.DIRECT


def landing_layouts(shape: tuple[int, ...], target: Placement) -> tuple[Layout, ...]:
    """The target layout, then all that cut by axes on which it holds copies as well."""
    layout, mesh = target.layout, target.mesh
    finer = [
        other
        for other in layouts_of(shape, mesh)
        if other != layout
        and all(set(axes) <= set(more) for axes, more in zip(layout.dims, other.dims, strict=True))
        and shares(other, mesh) > shares(layout, mesh)
        and all(mesh.axis_size(axis) > 1 for axis in other.axes - layout.axes)
    ]
    return (layout, *finer)


def cross_mesh_transfer(
    shape: tuple[int, ...],
    itemsize_bytes: int,
    source: Placement,
    target: Placement,
    cluster: Cluster,
    landing: Layout | None = None,
) -> CrossMeshTransfer:
    """The transfer by way of ``landing`` (None: the target layout itself).

    Raises ``PlanError`` for partial layouts, layouts that do not fit the shape or cut it unevenly, and devices that
    the cluster does not have.
    """
    landed = Placement(target.layout if landing is None else landing, target.mesh, target.devices)
    for name, placement in (("source", source), ("target", target), ("landing", landed)):
        _check(name, shape, placement, cluster)
    tiles = _Assignment(source, landed, cluster).tiles(shape) if math.prod(shape) else ()
    return CrossMeshTransfer(shape, itemsize_bytes, source, target, landed.layout, tiles)


def move_on_mesh(
    shape: tuple[int, ...], itemsize_bytes: int, source: Placement, target: Placement
) -> CrossMeshTransfer:
    """The way from layout to layout on one mesh: nothing is sent, collectives of the mesh do it all."""
    return CrossMeshTransfer(shape, itemsize_bytes, source, target, source.layout, ())


def _check(name: str, shape: tuple[int, ...], placement: Placement, cluster: Cluster) -> None:
    layout = placement.layout
    if layout.partial:
        raise PlanError(
            f"the {name} layout {layout} of a transfer between meshes is a partial sum over {layout.partial}; "
            "reduce it on its own mesh first, and send the value"
        )
    if len(layout.dims) != len(shape) or not divides(shape, layout, placement.mesh):
        raise PlanError(
            f"the {name} layout {layout} on {placement.mesh} does not cut an array of shape {shape} evenly; "
            "choose axes whose product divides the dimension"
        )
    if unknown := [device for device in placement.devices if not 0 <= device < cluster.num_devices]:
        raise PlanError(
            f"the {name} of a transfer names devices {unknown}, but cluster {cluster.name!r} has {cluster.num_devices}; "
            f"use 0 to {cluster.num_devices - 1}"
        )


def _cells(source: Placement, landed: Placement) -> tuple[int, ...]:
    """Number of cells in every dimension."""
    return tuple(math.lcm(p, q) for p, q in zip(source.pieces(), landed.pieces(), strict=True))


def _holders(placement: Placement) -> dict[tuple[int, ...], list[int]]:
    """The devices that hold each piece."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for position, device in enumerate(placement.devices):
        found[placement.piece(position)].append(device)
    return found


class _Loads:
    """Tiles that went through every link and every device in one direction, to find the least loaded one."""

    def __init__(self, link: Link, devices_per_host: int) -> None:
        self._shared_by, self._devices_per_host = link.shared_by, devices_per_host
        self._of_link: dict[tuple[int, int], int] = defaultdict(int)
        self._of_device: dict[int, int] = defaultdict(int)

    def _link(self, device: int) -> tuple[int, int]:
        host, place = divmod(device, self._devices_per_host)
        return host, place // self._shared_by

    def take_least(self, devices: Iterable[int]) -> int:
        """The device with the least loaded link, then the least loaded itself; it is charged with one tile more."""
        least = min(devices, key=lambda one: (self._of_link[self._link(one)], self._of_device[one], one))
        self.charge(least)
        return least

    def charge(self, device: int, tiles: int = 1) -> None:
        self._of_link[self._link(device)] += tiles
        self._of_device[device] += tiles


class _Assignment:
    """Finds a sender for every cell of every landed piece (see the module docstring for the rules)."""

    def __init__(self, source: Placement, landed: Placement, cluster: Cluster) -> None:
        self._source, self._landed = source, landed
        self._devices_per_host = cluster.devices_per_host
        self._local_out = _Loads(cluster.local_link, cluster.devices_per_host)
        self._network_out = _Loads(cluster.network_link, cluster.devices_per_host)
        self._network_in = _Loads(cluster.network_link, cluster.devices_per_host)

    def tiles(self, shape: tuple[int, ...]) -> tuple[Tile, ...]:
        """What stays and what is sent inside hosts, then what crosses hosts, each with its relays after it."""
        cells = _cells(self._source, self._landed)
        cell_shape = tuple(extent // count for extent, count in zip(shape, cells, strict=True))
        inside: list[Tile] = []
        crossing: list[Tile] = []
        distant: list[tuple[_Cell, list[int], list[int]]] = []
        for cell, holders, receivers in self._demands(cells):
            by_host: dict[int, list[int]] = defaultdict(list)
            for device in receivers:
                by_host[self._host(device)].append(device)
            for host, members in by_host.items():
                near = [device for device in holders if self._host(device) == host]
                if not near:
                    distant.append((cell, holders, members))
                for receiver in members if near else ():
                    sender = receiver if receiver in near else self._local_out.take_least(near)
                    inside.append(Tile(sender, receiver, _box(cell, cell_shape)))
        for cell, holders, members in distant:
            box = _box(cell, cell_shape)
            sender, first = self._network_out.take_least(holders), self._network_in.take_least(members)
            crossing.append(Tile(sender, first, box))
            crossing += [Tile(first, other, box, relayed=True) for other in members if other != first]
        return (*inside, *crossing)

    def _demands(self, cells: _Cell) -> Iterator[tuple[_Cell, list[int], list[int]]]:
        """Every cell, who holds it on the source and who must get it."""
        holders = _holders(self._source)
        per_source = [count // pieces for count, pieces in zip(cells, self._source.pieces(), strict=True)]
        per_landed = [count // pieces for count, pieces in zip(cells, self._landed.pieces(), strict=True)]
        for piece, receivers in _holders(self._landed).items():
            ranges = [range(n * count, (n + 1) * count) for n, count in zip(piece, per_landed, strict=True)]
            for cell in itertools.product(*ranges):
                held = tuple(number // count for number, count in zip(cell, per_source, strict=True))
                yield cell, holders[held], receivers

    def _host(self, device: int) -> int:
        return device // self._devices_per_host


def _box(cell: _Cell, cell_shape: tuple[int, ...]) -> Box:
    return tuple((number * extent, (number + 1) * extent) for number, extent in zip(cell, cell_shape, strict=True))


def piece_box(shape: tuple[int, ...], placement: Placement, position: int) -> Box:
    """Which part of the array the device at a position of the mesh holds."""
    return _box(placement.piece(position), local_shape(shape, placement.layout, placement.mesh))
