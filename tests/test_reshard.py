"""Every way between two layouts is legal, as cheap as any other, and leads to the right array."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from autopar.cluster import Mesh
from autopar.plan import Layout, SumScatter
from autopar.runtime.collectives import apply_moves
from autopar.runtime.executor import device_mesh, partition_spec
from autopar.schedule.reshard import (
    PER_ARC_WEIGHT,
    Move,
    MoveKind,
    after_move,
    divides,
    layouts_of,
    local_shape,
    moves_between,
    scattered,
    shares,
)
from tests.shards import to_shard

NAMES = ("data", "model", "extra")
SIZES = ((2,), (8,), (2, 2), (2, 4), (4, 2), (2, 2, 2), (3, 2), (1, 8), (6,))
MESHES = [Mesh(NAMES[: len(sizes)], sizes) for sizes in SIZES]
EXTENTS = (1, 2, 3, 4, 6, 8, 16, 24, 5, 0)


@st.composite
def journeys(draw: st.DrawFn, max_rank: int = 4) -> tuple[tuple[int, ...], Mesh, Layout, Layout]:
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.sampled_from(EXTENTS), min_size=0, max_size=max_rank)))
    layouts = layouts_of(shape, mesh, partial=True)
    source, target = (draw(st.sampled_from(layouts)) for _ in range(2))
    return shape, mesh, source, target


def after_by_definition(layout: Layout, move: Move, mesh: Mesh) -> Layout:
    """What :class:`MoveKind` says of a move, on the map axis → place; asserts that the axes are where they must be."""
    place: dict[str, int | str] = {axis: dim for dim, axes in enumerate(layout.dims) for axis in axes}
    place |= dict.fromkeys(layout.partial, "sum")
    assert move.axes
    assert list(move.axes) == [name for name in mesh.axis_names if name in move.axes]
    before = {place.get(axis) for axis in move.axes}
    wanted: set[int | str | None]
    after: int | str | None
    match move.kind:
        case MoveKind.SLICE:
            wanted, after = {None}, move.dim
        case MoveKind.MASK:
            wanted, after = {None}, "sum"
        case MoveKind.ALL_REDUCE:
            wanted, after = {"sum"}, None
        case MoveKind.REDUCE_SCATTER | MoveKind.EXCHANGE_SUM:
            wanted, after = {"sum"}, move.dim
        case MoveKind.ALL_GATHER:
            wanted, after = {move.dim}, None
        case MoveKind.ALL_TO_ALL:
            wanted, after = {move.dim}, move.to_dim
            assert move.dim != move.to_dim
    assert before == wanted, f"{move} in {layout}"
    if move.kind in (MoveKind.ALL_GATHER, MoveKind.ALL_TO_ALL):
        assert layout.dims[move.dim][-len(move.axes) :] == move.axes, "only the minor-most axes can leave a dimension"
    for axis in move.axes:
        place.pop(axis, None)
        if after is not None:
            place[axis] = after
    dims = [tuple(name for name in mesh.axis_names if place.get(name) == dim) for dim in range(len(layout.dims))]
    if isinstance(after, int):
        assert dims[after][-len(move.axes) :] == move.axes, "new axes become the minor-most of a dimension"
    return Layout(tuple(dims), tuple(name for name in mesh.axis_names if place.get(name) == "sum"))


@settings(max_examples=500)
@given(journeys(), st.sampled_from(SumScatter))
def test_every_way_is_legal_and_ends_at_the_target(
    journey: tuple[tuple[int, ...], Mesh, Layout, Layout], scatter: SumScatter
) -> None:
    shape, mesh, source, target = journey
    layout = source
    for way in moves_between(shape, source, target, mesh):
        move = scattered(way, scatter)
        assert (move.kind is not MoveKind.REDUCE_SCATTER) or scatter is SumScatter.COLLECTIVE
        expected = after_by_definition(layout, move, mesh)
        layout = after_move(layout, move, mesh)
        assert layout == expected
        assert divides(shape, layout, mesh)
    assert layout == target


# ----------------------------------------------------------------------------------------- the cheapest way, once more


def _steps_from(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> dict[Layout, float]:
    """Every layout that one move leads to and the weight of the cheapest such move, by trying all layouts."""
    found: dict[Layout, float] = {}
    place = _places(layout)
    share = 1.0 / math.prod(mesh.axis_size(*axes) for axes in layout.dims)
    for other in layouts_of(shape, mesh, partial=True):
        there = _places(other)
        moved = [axis for axis in mesh.axis_names if place.get(axis) != there.get(axis)]
        if not moved or len({(place.get(axis), there.get(axis)) for axis in moved}) != 1:
            continue
        source, target = place.get(moved[0]), there.get(moved[0])
        minor_before = source in (None, "sum") or layout.dims[source][-len(moved) :] == tuple(moved)  # type: ignore[index]
        minor_after = target in (None, "sum") or other.dims[target][-len(moved) :] == tuple(moved)  # type: ignore[index]
        if not (minor_before and minor_after):
            continue
        if (weight := _weight(source, target, share, mesh.axis_size(*moved))) is not None:
            found[other] = weight
    return found


def _places(layout: Layout) -> dict[str, int | str]:
    place: dict[str, int | str] = {axis: dim for dim, axes in enumerate(layout.dims) for axis in axes}
    return place | dict.fromkeys(layout.partial, "sum")


def _weight(source: int | str | None, target: int | str | None, share: float, pieces: int) -> float | None:
    """Wire bytes of a ring in shares of the array (see the module docstring of reshard) and the constant per arc."""
    if source is None:
        return PER_ARC_WEIGHT * (2e-3 if target == "sum" else 1e-3)
    if source == "sum":
        passes = 2 if target is None else 1
        return passes * share * (pieces - 1) / pieces + PER_ARC_WEIGHT
    if target == "sum":
        return None  # a cut dimension cannot become a sum without being gathered first
    return share * (pieces - 1) * (1 if target is None else 1 / pieces) + PER_ARC_WEIGHT


def _weight_of_way(moves: tuple[Move, ...], source: Layout, mesh: Mesh) -> float:
    total, layout = 0.0, source
    for move in moves:
        after = after_by_definition(layout, move, mesh)
        was, becomes = _places(layout).get(move.axes[0]), _places(after).get(move.axes[0])
        weight = _weight(was, becomes, 1.0 / shares(layout, mesh), mesh.axis_size(*move.axes))
        assert weight is not None
        total += weight
        layout = after
    return total


def _distances(shape: tuple[int, ...], mesh: Mesh) -> dict[tuple[Layout, Layout], float]:
    """All shortest distances by relaxing all triangles (Floyd, 1962; Warshall, 1962), not by Dijkstra's search."""
    layouts = layouts_of(shape, mesh, partial=True)
    index = {layout: number for number, layout in enumerate(layouts)}
    distance = np.full((len(layouts), len(layouts)), np.inf)
    np.fill_diagonal(distance, 0.0)
    for layout in layouts:
        for other, weight in _steps_from(shape, layout, mesh).items():
            distance[index[layout], index[other]] = weight
    for middle in range(len(layouts)):
        distance = np.minimum(distance, distance[:, middle, None] + distance[None, middle, :])
    return {(a, b): float(distance[index[a], index[b]]) for a in layouts for b in layouts}


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((8,), (8,)),
        ((8, 8), (2, 4)),
        ((8, 4), (4, 2)),
        ((8, 8, 8), (2, 2)),
        ((8, 8), (2, 2, 2)),
        ((6, 4), (3, 2)),
        ((), (2, 2)),
    ],
)
def test_no_way_is_shorter(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    mesh = Mesh(NAMES[: len(sizes)], sizes)
    for (source, target), expected in _distances(shape, mesh).items():
        moves = moves_between(shape, source, target, mesh)
        assert _weight_of_way(moves, source, mesh) == pytest.approx(expected, rel=1e-9, abs=1e-15), (
            f"{source} → {target}"
        )


# -------------------------------------------------------------------------------------------------------- execution


def _pairs(shape: tuple[int, ...], mesh: Mesh, count: int, seed: int) -> list[tuple[Layout, Layout]]:
    layouts = layouts_of(shape, mesh, partial=True)
    pairs = list(itertools.product(layouts, repeat=2))
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(pairs))[:count]
    return [pairs[number] for number in chosen]


def _arrive(shape: tuple[int, ...], mesh: Mesh, pairs: list[tuple[Layout, Layout]]) -> None:
    """All reshards in one program; what arrives partial is summed over its axes, and so must be the array again.

    Summands are unlike on every device, so that a reduction over the wrong axes, or one that is left out, shows.
    """
    x = np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)

    def uneven(axes: tuple[str, ...]) -> jax.Array:
        """A summand of zero: summed over the axes it vanishes, on each device it does not."""
        index, count = jax.lax.axis_index(axes), mesh.axis_size(*axes)
        return (index - (count - 1) / 2).astype(jnp.float32)

    def local(whole: jax.Array) -> list[jax.Array]:
        arrived = []
        for source, target in pairs:
            shard = to_shard(whole, source, mesh)
            if source.partial:
                shard = shard + uneven(source.partial)
            assert shard.shape == local_shape(shape, source, mesh)
            result = apply_moves(shard, moves_between(shape, source, target, mesh), mesh)
            assert result.shape == local_shape(shape, target, mesh)
            arrived.append(jax.lax.psum(result, target.partial) if target.partial else result)
        return arrived

    run = jax.shard_map(
        local,
        mesh=device_mesh(mesh, jax.devices()),
        in_specs=PartitionSpec(),
        out_specs=[partition_spec(target) for _, target in pairs],
        check_vma=False,
    )
    for (source, target), result in zip(pairs, jax.jit(run)(x), strict=True):
        for shard in result.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index], err_msg=f"{source} → {target}")


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((8,), (8,)), ((8, 16), (2, 4)), ((8, 8, 2), (2, 2, 2)), ((6, 4, 5), (3, 2)), ((), (2, 2))],
)
def test_the_array_arrives(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    mesh = Mesh(NAMES[: len(sizes)], sizes)
    _arrive(shape, mesh, _pairs(shape, mesh, count=40, seed=len(shape)))


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2, 2), (8,), (2, 3)])
def test_the_array_arrives_by_many_more_ways(sizes: tuple[int, ...], seed: int) -> None:
    mesh = Mesh(NAMES[: len(sizes)], sizes)
    rng = np.random.default_rng(seed)
    shape = tuple(int(extent) for extent in rng.choice([1, 2, 4, 6, 8, 16, 24], size=int(rng.integers(1, 5))))
    _arrive(shape, mesh, _pairs(shape, mesh, count=120, seed=seed))


# ---------------------------------------------------------------------------------------------------------- layouts


@settings(max_examples=100)
@given(journeys(max_rank=3), st.booleans())
def test_layouts_are_all_and_each_once(journey: tuple[tuple[int, ...], Mesh, Layout, Layout], partial: bool) -> None:
    shape, mesh, _, _ = journey
    layouts = layouts_of(shape, mesh, partial=partial)
    assert layouts[0] == Layout(((),) * len(shape))
    assert len(set(layouts)) == len(layouts)
    places = [*range(len(shape)), None, *(["sum"] if partial else [])]
    count = 0
    for choice in itertools.product(places, repeat=len(mesh.axis_names)):
        cuts = [
            math.prod(s for s, place in zip(mesh.axis_sizes, choice, strict=True) if place == d)
            for d in range(len(shape))
        ]
        count += all(extent % cut == 0 for extent, cut in zip(shape, cuts, strict=True))
    assert len(layouts) == count
