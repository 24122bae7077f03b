"""In which type do arrays travel: the cost model's words against the compiled program's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import autopar
from autopar.cluster import Mesh, Platform
from autopar.cost_model.collectives import Collective, wire_bytes
from autopar.cost_model.hlo import parse_module, step_seconds
from autopar.cost_model.reshard import COLLECTIVE_OF_MOVE, collective_bytes
from autopar.graph.ir import Value
from autopar.plan import Layout
from autopar.runtime.collectives import apply_moves
from autopar.schedule.reshard import Move, MoveKind
from autopar.schedule.wire import WIDENED, ordered_dtype, wire_itemsize_bytes
from tests.toy_runs import eight_slow_devices

pytestmark = pytest.mark.usefixtures("users_fusions")

MESH = Mesh(("data",), (8,))
EXTENT = 64
WHOLE = EXTENT * EXTENT
MOVES = {
    MoveKind.ALL_GATHER: (Move(MoveKind.ALL_GATHER, ("data",), 0), Layout((("data",), ()))),
    MoveKind.ALL_REDUCE: (Move(MoveKind.ALL_REDUCE, ("data",)), Layout(((), ()), ("data",))),
    MoveKind.REDUCE_SCATTER: (Move(MoveKind.REDUCE_SCATTER, ("data",), 0), Layout(((), ()), ("data",))),
    MoveKind.EXCHANGE_SUM: (Move(MoveKind.EXCHANGE_SUM, ("data",), 0), Layout(((), ()), ("data",))),
    MoveKind.ALL_TO_ALL: (Move(MoveKind.ALL_TO_ALL, ("data",), 0, 1), Layout((("data",), ()))),
}
DTYPES = ("int8", "int32", "float16", "float32", *WIDENED[Platform.CPU])
TINY = tuple(dtype for dtype in DTYPES if jnp.dtype(dtype).itemsize == 1 and dtype != "int8")
DRAWN = tuple(zip(TINY, itertools.cycle(MOVES), strict=False))
"""The default run moves each of these types in one way, and in each way some of them."""


def value(dtype: str) -> Value:
    return Value(0, (EXTENT, EXTENT), dtype, jnp.dtype(dtype).itemsize)


def sent_bytes(function: Callable[[jax.Array], Any], dtype: str, layout: Layout) -> float:
    """Bytes that a device sends in a compiled program of the function of one shard."""
    mesh = jax.make_mesh(MESH.axis_sizes, MESH.axis_names, (AxisType.Auto,))
    spec = PartitionSpec(*(axes or None for axes in layout.dims))
    program = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=PartitionSpec("data"), check_vma=False)
    compiled = jax.jit(program).lower(jax.ShapeDtypeStruct((EXTENT, EXTENT), dtype)).compile()
    return step_seconds(parse_module(compiled.as_text()), eight_slow_devices()).wire_bytes


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        pytest.param(dtype, kind, marks=pytest.mark.verify if dtype in TINY and (dtype, kind) not in DRAWN else ())
        for dtype in DTYPES
        for kind in MOVES
    ],
)
def test_a_moves_bytes_are_those_that_are_sent(dtype: str, kind: MoveKind) -> None:
    move, layout = MOVES[kind]
    array = value(dtype)
    full = collective_bytes(move, layout, WHOLE * wire_itemsize_bytes(array, Platform.CPU), MESH)
    assert sent_bytes(lambda x: apply_moves(x, (move,), MESH), dtype, layout) == wire_bytes(
        COLLECTIVE_OF_MOVE[kind], full, MESH.size
    )


def test_accelerators_send_what_they_hold() -> None:
    for platform in (Platform.CUDA, Platform.TPU):
        assert all(wire_itemsize_bytes(value(dtype), platform) == jnp.dtype(dtype).itemsize for dtype in DTYPES)


def test_keys_go_as_their_words() -> None:
    assert wire_itemsize_bytes(Value(0, (8,), "key<fry>", 8), Platform.CPU) == 8


@pytest.mark.parametrize(
    ("dtype", "ordered"),
    [("bool", "int32"), ("bfloat16", "int32"), ("float16", "int32"), ("float32", "int32"), ("float64", "int64")]
    + [(name, name) for name in ("int8", "uint16", "int32", "int64")],
)
def test_extremes_are_taken_of_integers(dtype: str, ordered: str) -> None:
    assert ordered_dtype(dtype) == ordered
    for platform in Platform:
        array = Value(0, (8,), dtype, 1)
        assert wire_itemsize_bytes(array, platform, extreme=True) == jnp.dtype(ordered).itemsize


@pytest.mark.parametrize("function", [jnp.max, jnp.min, jnp.any, jnp.all])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
def test_a_predicted_extreme_sends_what_is_said(function: Callable[..., Any], dtype: str) -> None:
    """The rows are cut, so that the maximum over them crosses the devices; columns do not divide."""

    def step(x: jax.Array) -> jax.Array:
        return function(jnp.tanh(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, axis=0)

    cluster = eight_slow_devices()
    rows = jax.ShapeDtypeStruct((EXTENT, 255), dtype)
    decorated = autopar.parallelize(cluster=cluster, mesh_shape=(8,), constraints={"x": PartitionSpec("data")})(step)
    plan = decorated.plan(rows)
    (use,) = plan.prediction.collectives
    assert use.kind == Collective.ALL_REDUCE.value
    compiled = decorated.compile(rows)
    assert use.wire_bytes == step_seconds(parse_module(compiled.as_text()), cluster).wire_bytes
