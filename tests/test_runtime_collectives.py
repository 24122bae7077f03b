"""Moves do to real shards what they say: every one is compared with how XLA itself lays the same array out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from autopar.cluster import Mesh
from autopar.errors import PlanError
from autopar.plan import Axes, Layout
from autopar.runtime.collectives import apply_moves, is_first
from autopar.schedule.reshard import SCATTERS, Move, MoveKind, moves_between
from tests.shards import to_shard

MESHES = [Mesh(("a", "b"), (2, 4)), Mesh(("a",), (8,)), Mesh(("a", "b", "c"), (2, 2, 2))]
SHAPE = (16, 8)


def jax_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes), mesh.axis_names)


def layouts(mesh: Mesh, partial: bool) -> list[Layout]:
    """All layouts of a matrix: each axis cuts rows, cuts columns, leaves a sum, or does nothing."""
    found = []
    for roles in itertools.product(range(4 if partial else 3), repeat=len(mesh.axis_names)):
        rows, columns, summed = (
            tuple(axis for axis, role in zip(mesh.axis_names, roles, strict=True) if role == wanted)
            for wanted in (1, 2, 3)
        )
        found.append(Layout((rows, columns), summed))
    return found


def steps(layout: Layout, mesh: Mesh) -> Iterator[tuple[Move, Layout]]:
    """Every move that ``layout`` allows, and the layout after it: the definition in words, without any array."""

    def in_order(axes: Axes) -> bool:
        return list(axes) == sorted(axes, key=mesh.axis_names.index)

    def with_dim(of: Layout, dim: int, axes: Axes, partial: Axes | None = None) -> Layout:
        dims = tuple(axes if d == dim else old for d, old in enumerate(of.dims))
        return Layout(dims, of.partial if partial is None else partial)

    free = [axis for axis in mesh.axis_names if axis not in layout.axes]
    for axes in nonempty_subsets(free):
        summed = tuple(axis for axis in mesh.axis_names if axis in layout.partial + axes)
        yield Move(MoveKind.MASK, axes), Layout(layout.dims, summed)
        for dim, old in enumerate(layout.dims):
            if in_order(old + axes):
                yield Move(MoveKind.SLICE, axes, dim), with_dim(layout, dim, old + axes)
    for axes in nonempty_subsets(layout.partial):
        rest = tuple(axis for axis in layout.partial if axis not in axes)
        yield Move(MoveKind.ALL_REDUCE, axes), Layout(layout.dims, rest)
        for dim, old in enumerate(layout.dims):
            if in_order(old + axes):
                for kind in SCATTERS:
                    yield Move(kind, axes, dim), with_dim(layout, dim, old + axes, rest)
    for dim, old in enumerate(layout.dims):
        for count in range(1, len(old) + 1):
            axes, other = old[-count:], layout.dims[1 - dim]
            without = with_dim(layout, dim, old[:-count])
            yield Move(MoveKind.ALL_GATHER, axes, dim), without
            if in_order(other + axes):
                yield Move(MoveKind.ALL_TO_ALL, axes, dim, 1 - dim), with_dim(without, 1 - dim, other + axes)


def nonempty_subsets(axes: tuple[str, ...] | list[str]) -> Iterator[Axes]:
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


Job = tuple[Layout, tuple[Move, ...], Layout]


def assert_moves(jobs: list[Job], x: jax.Array, mesh: Mesh) -> None:
    """Let XLA place ``x``, run the moves, and let XLA put the shards together as the last layout says.

    Summands differ per device: device i of n holds i + 1 times its shard, so the value is n(n + 1)/2 times it. Axes
    that stay partial are summed at the end.
    """

    def summand(shard: jax.Array, layout: Layout) -> jax.Array:
        return shard * (lax.axis_index(layout.partial) + 1).astype(shard.dtype) if layout.partial else shard

    def program(*shards: jax.Array) -> list[jax.Array]:
        moved = [apply_moves(summand(shard, job[0]), job[1], mesh) for shard, job in zip(shards, jobs, strict=True)]
        return [lax.psum(y, job[2].partial) if job[2].partial else y for y, job in zip(moved, jobs, strict=True)]

    sharded = jax.shard_map(
        program,
        mesh=jax_mesh(mesh),
        in_specs=tuple(P(*before.dims) for before, _, _ in jobs),
        out_specs=[P(*after.dims) for _, _, after in jobs],
        check_vma=False,
    )
    for (before, moves, after), y in zip(jobs, jax.jit(sharded)(*[x] * len(jobs)), strict=True):
        n = mesh.axis_size(*before.partial)
        times = n * (n + 1) // 2 if before.partial else 1
        assert y.dtype == x.dtype
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            got, wanted = jax.random.key_data(y), jax.random.key_data(x)
        else:
            got, wanted = y, x * times if times > 1 else x
        where = f"{before} {moves} {after} on {mesh}"
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted), err_msg=where)


@pytest.mark.parametrize("mesh", [*MESHES[:2], pytest.param(MESHES[2], marks=pytest.mark.verify), *MESHES[3:]], ids=str)
def test_every_move(mesh: Mesh) -> None:
    chance = random.Random(1)
    jobs: list[Job] = [
        (layout, (move,), after) for layout in layouts(mesh, partial=True) for move, after in steps(layout, mesh)
    ]
    assert {job[1][0].kind for job in jobs} == set(MoveKind)
    assert_moves(chance.sample(jobs, min(150, len(jobs))), jnp.arange(128, dtype=jnp.float32).reshape(SHAPE), mesh)


@pytest.mark.parametrize("shape", [(0, 8), (16, 0)], ids=str)
def test_every_move_of_an_array_without_elements(shape: tuple[int, int]) -> None:
    mesh = MESHES[0]
    jobs: list[Job] = [
        (layout, (move,), after) for layout in layouts(mesh, partial=True) for move, after in steps(layout, mesh)
    ]
    assert_moves(jobs, jnp.zeros(shape), mesh)


@pytest.mark.parametrize("mesh", [pytest.param(MESHES[0], marks=pytest.mark.verify), MESHES[2]], ids=str)
def test_moves_in_a_row(mesh: Mesh) -> None:
    """The lists of moves that plans are made of, between any two layouts."""
    chance, every = random.Random(2), layouts(mesh, partial=True)
    pairs = chance.sample([(before, after) for before in every for after in every if before != after], 60)
    jobs = [(before, moves_between(SHAPE, before, after, mesh), after) for before, after in pairs]
    assert max(len(moves) for _, moves, _ in jobs) > 1
    assert_moves(jobs, jnp.arange(128, dtype=jnp.int32).reshape(SHAPE), mesh)


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "bfloat16",
        "key",
        *(pytest.param(one, marks=pytest.mark.verify) for one in ("int8", "uint16", "complex64")),
    ],
)
def test_moves_of_other_types(dtype: str) -> None:
    mesh, chance = MESHES[0], random.Random(3)
    numbers = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 4, SHAPE)
    x = jax.random.split(jax.random.key(0), SHAPE) if dtype == "key" else jnp.asarray(numbers, dtype)
    summable = dtype not in ("bool", "key")
    jobs: list[Job] = [
        (layout, (move,), after)
        for layout in layouts(mesh, partial=summable)
        for move, after in steps(layout, mesh)
        if summable or not after.partial
    ]
    picked = []
    for kind in MoveKind:
        of_kind = [job for job in jobs if job[1][0].kind is kind]
        picked += chance.sample(of_kind, min(3, len(of_kind)))
    assert {job[1][0].kind for job in picked} >= {MoveKind.SLICE, MoveKind.ALL_GATHER, MoveKind.ALL_TO_ALL}
    assert_moves(picked, x, mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_to_shard_gives_the_pieces_that_xla_would_give(mesh: Mesh) -> None:
    x = jnp.arange(128, dtype=jnp.float32).reshape(SHAPE)
    every = layouts(mesh, partial=True)

    def program(whole: jax.Array) -> list[jax.Array]:
        shards = [to_shard(whole, layout, mesh) for layout in every]
        return [lax.psum(y, layout.partial) if layout.partial else y for y, layout in zip(shards, every, strict=True)]

    out_specs = [P(*layout.dims) for layout in every]
    sharded = jax.shard_map(program, mesh=jax_mesh(mesh), in_specs=P(), out_specs=out_specs, check_vma=False)
    for layout, y in zip(every, jax.jit(sharded)(x), strict=True):
        np.testing.assert_array_equal(y, x, err_msg=str(layout))
        for shard in y.addressable_shards:
            assert shard.data.shape == tuple(
                extent // mesh.axis_size(*axes) for extent, axes in zip(SHAPE, layout.dims, strict=True)
            )


def test_one_device_is_first() -> None:
    mesh = MESHES[0]
    program = jax.shard_map(
        lambda: is_first(("a", "b"))[None, None],
        mesh=jax_mesh(mesh), in_specs=(), out_specs=P("a", "b"), check_vma=False,
    )  # fmt: skip
    assert np.argwhere(jax.jit(program)()).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("x", "move", "sentence"),
    [
        (jnp.ones((8, 8), bool), Move(MoveKind.ALL_REDUCE, ("a",)), "would sum Booleans"),
        (jnp.ones((8, 8), bool), Move(MoveKind.REDUCE_SCATTER, ("a",), 0), "would sum Booleans"),
        (jnp.ones((8, 8), bool), Move(MoveKind.MASK, ("a",)), "would sum Booleans"),
        (jnp.ones((6, 8)), Move(MoveKind.SLICE, ("b",), 0), "into 4 pieces"),
        (jnp.ones((6, 8)), Move(MoveKind.REDUCE_SCATTER, ("b",), 0), "into 4 pieces"),
        (jnp.ones((8, 8), bool), Move(MoveKind.EXCHANGE_SUM, ("a",), 0), "would sum Booleans"),
        (jnp.ones((6, 8)), Move(MoveKind.EXCHANGE_SUM, ("b",), 0), "into 4 pieces"),
        (jnp.ones((8, 6)), Move(MoveKind.ALL_TO_ALL, ("b",), 0, 1), "into 4 pieces"),
        (jax.random.split(jax.random.key(0), 8), Move(MoveKind.ALL_REDUCE, ("a",)), "keys of type"),
    ],
)
def test_impossible_moves_are_refused(x: jax.Array, move: Move, sentence: str) -> None:
    mesh = MESHES[0]
    program = jax.shard_map(
        lambda x: apply_moves(x, (move,), mesh), mesh=jax_mesh(mesh), in_specs=P(), out_specs=P(), check_vma=False
    )
    with pytest.raises(PlanError, match=sentence):
        jax.eval_shape(program, x)
