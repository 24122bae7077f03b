"""The referee reads compiled programs right: every figure is computed by hand and compared with what XLA printed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.cluster import Cluster, DeviceKind, Link, Mesh, Platform
from autopar.cost_model.collectives import Collective, group_seconds, permute_seconds
from autopar.cost_model.groups import axes_groups
from autopar.cost_model.hlo import (
    bytes_moved,
    collectives,
    flops,
    form_reduce_scatters,
    memory_bytes,
    parse_module,
    read_compiled,
    step_seconds,
    undo_widening,
)
from autopar.cost_model.hlo_parser import (
    HloModule,
    HloSyntaxError,
    expand_replica_groups,
    numpy_dtype_name,
    parse_shape,
)
from autopar.cost_model.hlo_steps import _rounds, executed_steps
from autopar.errors import ClusterError

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices: set the host platform device count"),
    pytest.mark.usefixtures("users_fusions"),
]

ROWS = tuple(tuple(range(4 * row, 4 * row + 4)) for row in range(2))
COLUMNS = tuple((column, column + 4) for column in range(4))
EVERYBODY = (tuple(range(8)),)
CLUSTER = Cluster(
    "two by four",
    2,
    4,
    DeviceKind("chip", Platform.CUDA, {"float32": 1e12, "bfloat16": 4e12}, 10**10, 1e11),
    Link(1e-6, 1e10),
    Link(1e-5, 1e9, shared_by=4),
)


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mesh(shape: tuple[int, ...] = (2, 4), names: tuple[str, ...] = ("x", "y")) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(shape), names)


def compiled(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return jax.jit(function, **options).lower(*arguments).compile()


def module_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> HloModule:
    return parse_module(compiled(function, *arguments, **options).as_text())


def manual(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(function, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False)


# --- FLOPs and bytes of real programs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "left", "right", "work"),
    [
        ("ij,jk->ik", (4, 4), (4, 4), 2 * 4**3),
        ("ij,jk->ik", (128, 96), (96, 64), 2 * 128 * 96 * 64),
        ("ij,kj->ik", (512, 256), (256, 256), 2 * 512 * 256 * 256),
        ("ij,j->i", (256, 512), (512,), 2 * 256 * 512),
        ("bij,bjk->bik", (8, 64, 32), (8, 32, 16), 2 * 8 * 64 * 32 * 16),
        ("bhqd,bhkd->bhqk", (2, 3, 64, 32), (2, 3, 16, 32), 2 * 2 * 3 * 64 * 32 * 16),
    ],
)
def test_dots_do_two_operations_per_contracted_element(equation, left, right, work):
    module = module_of(lambda a, b: jnp.einsum(equation, a, b), array(*left), array(*right))
    result = jax.eval_shape(lambda a, b: jnp.einsum(equation, a, b), array(*left), array(*right)).shape
    assert flops(module) == work
    moved = 4 * (math.prod(left) + math.prod(right) + math.prod(result))
    assert bytes_moved(module) >= moved
    if equation == "ij,jk->ik":
        assert bytes_moved(module) == moved


def hand_counted_convolution(length: int, kernel: int, stride: int, padding: tuple[int, int]) -> int:
    """Pairs of output and kernel positions that meet an input element, one dimension, by walking."""
    out = (length + sum(padding) - kernel) // stride + 1
    return sum(0 <= o * stride - padding[0] + k < length for o in range(out) for k in range(kernel))


@pytest.mark.parametrize(
    ("stride", "padding", "groups"), [(1, (1, 1), 1), (2, (0, 0), 4), (2, (2, 1), 2)], ids=["same", "strided", "odd"]
)
def test_convolutions_count_what_meets_the_input(stride, padding, groups):
    def run(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            image,
            kernel,
            (stride, stride),
            (padding, padding),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    module = module_of(run, array(2, 12, 10, 16), array(3, 3, 16 // groups, 32))
    rows, columns = (hand_counted_convolution(length, 3, stride, padding) for length in (12, 10))
    assert flops(module) == 2 * 2 * rows * columns * (16 // groups) * 32


def test_gradient_of_a_convolution_costs_as_much_as_the_convolution():
    def loss(kernel: jax.Array, image: jax.Array, cotangent: jax.Array) -> jax.Array:
        out = lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (out * cotangent).sum()

    module = module_of(jax.grad(loss), array(3, 3, 4, 8), array(2, 12, 12, 4), array(2, 6, 6, 8))
    pairs = hand_counted_convolution(12, 3, 2, (0, 1))
    assert flops(module) == 2 * 2 * pairs * pairs * 4 * 8


def test_holes_of_a_dilated_input_are_free():
    """A transposed convolution of stride 2: each input element meets each kernel element that lands on the output."""

    def run(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            image, kernel, (1,), ((2, 2),), lhs_dilation=(2,), dimension_numbers=("NHC", "HIO", "NHC")
        )

    length, kernel = 9, 3
    out = (2 * length - 1) + 4 - kernel + 1
    pairs = sum(0 <= o + k - 2 < 2 * length - 1 and (o + k) % 2 == 0 for o in range(out) for k in range(kernel))
    assert pairs == length * kernel
    module = module_of(run, array(2, length, 4), array(kernel, 4, 8))
    assert flops(module) == 2 * 2 * pairs * 4 * 8


def test_a_fusion_reads_its_operands_and_writes_its_result_once():
    module = module_of(lambda x, y: jnp.tanh(x * y) + x, array(64, 32), array(64, 32))
    assert flops(module) == 3 * 64 * 32
    assert bytes_moved(module) == 3 * 4 * 64 * 32


def test_reduction_folds_all_but_one():
    assert flops(module_of(lambda x: x.sum(1), array(16, 32))) == 16 * 31


def test_lookup_touches_rows_not_the_table():
    module = module_of(
        lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"), array(5000, 64), array(12, dtype="i4")
    )
    rows = 12 * 64 * 4
    assert 2 * rows <= bytes_moved(module) <= 2 * rows + 8 * 12 * 4


def test_scatter_touches_rows_not_the_table():
    module = module_of(
        lambda table, ids, rows: table.at[ids].add(rows, mode="promise_in_bounds"),
        array(5000, 64),
        array(12, dtype="i4"),
        array(12, 64),
        donate_argnums=0,
    )
    rows = 12 * 64 * 4
    assert 3 * rows <= bytes_moved(module) <= 6 * rows


def test_update_in_place_touches_the_slice():
    module = module_of(
        lambda x, row, at: lax.dynamic_update_slice(x, row * 2, (at, 0)),
        array(1000, 64),
        array(1, 64),
        array(dtype="i4"),
        donate_argnums=0,
    )
    assert bytes_moved(module) == 2 * 64 * 4 + 4


def test_scanned_weights_and_stacked_results_are_moved_slice_by_slice():
    def run(weights: jax.Array, x: jax.Array) -> Any:
        return lax.scan(lambda x, w: (x @ w, x), x, weights)

    trips, size = 50, 32
    module = module_of(run, array(trips, size, size), array(4, size))
    weights, x = 4 * size * size, 4 * 4 * size
    # per trip: cut the weights (2), the product reads them (1), activations a few times; once: zeros for the stack
    assert trips * 3 * weights <= bytes_moved(module) <= trips * (3 * weights + 12 * x)
    assert 0 <= flops(module) - trips * 2 * 4 * size * size < 10 * trips


def entry_module(body: str, before: str = "") -> HloModule:
    return parse_module(f"HloModule m, num_partitions=4\n\n{before}ENTRY %main () -> f32[] {{\n{body}}}\n")


@pytest.mark.parametrize(
    ("root", "moved"),
    [
        ("f32[5,64]{1,0} dynamic-slice(%table, %at, %at), dynamic_slice_sizes={5,64}", 2 * 5 * 64 * 4 + 2 * 4),
        ("f32[5,64]{1,0} slice(%table), slice={[0:5], [0:64]}", 2 * 5 * 64 * 4),
        ("f32[7,64]{1,0} gather(%table, %ids), offset_dims={1}, slice_sizes={1,64}", 2 * 7 * 64 * 4 + 7 * 4),
        ("f32[1000,64]{1,0} dynamic-update-slice(%table, %new, %at, %at)", 2 * 7 * 64 * 4 + 2 * 4),
        ("f32[1000,64]{1,0} scatter(%table, %ids, %new), to_apply=%add", 3 * 7 * 64 * 4 + 7 * 4),
    ],
)
def test_slicing_outside_of_fusions_moves_the_slice(root, moved):
    body = "".join(
        f"  %{name} = {shape} parameter({number})\n"
        for number, (name, shape) in enumerate(
            {"table": "f32[1000,64]{1,0}", "at": "s32[]", "ids": "s32[7,1]{1,0}", "new": "f32[7,64]{1,0}"}.items()
        )
    )
    assert bytes_moved(entry_module(body + f"  ROOT %r = {root}\n")) == moved


def test_an_update_of_something_made_inside_a_fusion_writes_all_of_it():
    fused = """%f (u: f32[1,64], i: s32[]) -> f32[100,64] {
  %u = f32[1,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = f32[] constant(0)
  %zeros = f32[100,64]{1,0} broadcast(%zero), dimensions={}
  ROOT %d = f32[100,64]{1,0} dynamic-update-slice(%zeros, %u, %i, %i)
}

"""
    body = """  %p = f32[1,64]{1,0} parameter(0)
  %q = s32[] parameter(1)
  ROOT %r = f32[100,64]{1,0} fusion(%p, %q), kind=kLoop, calls=%f
"""
    assert bytes_moved(entry_module(body, fused)) == 4 * 64 + 4 + 4 * 100 * 64


# --- loops and branches ----------------------------------------------------------------------------------------------


def scanned_sum(weights: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (lax.psum(x @ w, "y"), None), x, weights)[0]


def test_collectives_and_flops_of_a_scan_count_once_per_trip():
    module = module_of(manual(scanned_sum, (P(), P()), P()), array(7, 64, 64), array(16, 64))
    (found,) = collectives(module)
    assert (found.kind, found.full_bytes, found.count) == (Collective.ALL_REDUCE, 16 * 64 * 4, 7)
    assert found.groups == ROWS
    assert 0 <= flops(module) - 7 * 2 * 16 * 64 * 64 < 100


def test_nested_loops_multiply():
    def run(weights: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, x: scanned_sum(weights, x), x)

    (found,) = collectives(module_of(manual(run, (P(), P()), P()), array(5, 8, 8), array(8, 8)))
    assert found.count == 15


@pytest.mark.parametrize(("start", "stop", "step"), [(0, 7, 1), (3, 20, 4), (10, -3, -2), (5, 5, 1)])
def test_trips_are_told_from_the_counter_alone(start, stop, step):
    def run(x: jax.Array) -> jax.Array:
        def more(state: Any) -> jax.Array:
            return state[0] < stop if step > 0 else state[0] > stop

        return lax.while_loop(more, lambda state: (state[0] + step, lax.psum(state[1] * 0.5, "y")), (start, x))[1]

    text = compiled(manual(run, P(), P()), array(8, 8)).as_text()
    bare = re.sub(r", backend_config=\{.*?\}\}", "", text)
    assert "known_trip_count" not in bare
    expected = len(range(start, stop, step))
    assert sum(found.count for found in collectives(parse_module(bare))) == expected
    assert sum(found.count for found in collectives(parse_module(text))) == expected


@given(
    st.sampled_from(["LT", "LE", "GT", "GE", "NE", "EQ"]),
    st.integers(-30, 30),
    st.integers(-7, 7),
)
def test_rounds_are_those_of_the_loop(direction, gap, step):
    holds = {
        "LT": lambda value: value < 0,
        "LE": lambda value: value <= 0,
        "GT": lambda value: value > 0,
        "GE": lambda value: value >= 0,
        "NE": lambda value: value != 0,
        "EQ": lambda value: value == 0,
    }[direction]
    ran = next((k for k in range(100) if not holds(gap + k * step)), None)
    assert _rounds(direction, gap, step) == ran


def test_a_counter_that_is_not_affine_is_not_extrapolated():
    def run(x: jax.Array) -> jax.Array:
        state = (jnp.int32(1), x)
        return lax.while_loop(lambda s: s[0] < 100, lambda s: (s[0] * 2, lax.psum(s[1] * 0.5, "y")), state)[1]

    text = compiled(manual(run, P(), P()), array(8, 8)).as_text()
    module = parse_module(re.sub(r", backend_config=\{.*?\}\}", "", text))
    (found,) = collectives(module)
    assert found.count == 1
    assert any("trips" in note for note in step_seconds(module, CLUSTER).notes)


def test_a_loop_on_data_counts_once_and_says_so():
    module = module_of(lambda x: lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x), array(64, 64))
    assert flops(module) >= 2 * 64**3
    cost = step_seconds(module, CLUSTER)
    assert any("trips" in note for note in cost.notes)


def test_of_a_conditional_the_heaviest_branch_counts():
    module = module_of(lambda p, x: lax.cond(p, lambda x: x @ x, lambda x: x + 1, x), array(dtype=bool), array(64, 64))
    assert flops(module) == 2 * 64**3
    assert any("branch" in note for note in step_seconds(module, CLUSTER).notes)


# --- collectives of real programs ------------------------------------------------------------------------------------

AXES = ("x", "y")
PROGRAMS = {
    "psum of a row": (lambda v: lax.psum(v, "y"), P("x", "y"), P("x"), Collective.ALL_REDUCE, 256, ROWS, "add"),
    "psum of a column": (
        lambda v: lax.psum(v, "x"),
        P("x", "y"),
        P(None, "y"),
        Collective.ALL_REDUCE,
        256,
        COLUMNS,
        "add",
    ),
    "psum of all": (lambda v: lax.psum(v, AXES), P(AXES), P(), Collective.ALL_REDUCE, 256, EVERYBODY, "add"),
    "pmax": (lambda v: lax.pmax(v, AXES), P(AXES), P(), Collective.ALL_REDUCE, 256, EVERYBODY, "maximum"),
    "all_gather": (lambda v: lax.all_gather(v, "y", tiled=True), P("y"), P(), Collective.ALL_GATHER, 2048, ROWS, ""),
    "all_gather of columns": (
        lambda v: lax.all_gather(v, "x", axis=1, tiled=True),
        P(None, "x"),
        P(),
        Collective.ALL_GATHER,
        2048,
        COLUMNS,
        "",
    ),
    "psum_scatter": (
        lambda v: lax.psum_scatter(v, "y", tiled=True),
        P(),
        P("y"),
        Collective.REDUCE_SCATTER,
        2048,
        ROWS,
        "add",
    ),
    "all_to_all": (
        lambda v: lax.all_to_all(v, "y", 1, 0, tiled=True),
        P("y"),
        P(None, "y"),
        Collective.ALL_TO_ALL,
        512,
        ROWS,
        "",
    ),
    "ring": (
        lambda v: lax.ppermute(v, "y", [(i, (i + 1) % 4) for i in range(4)]),
        P("y"),
        P("y"),
        Collective.PERMUTE,
        512,
        tuple((4 * row + i, 4 * row + (i + 1) % 4) for row in range(2) for i in range(4)),
        "",
    ),
    "shift": (
        lambda v: lax.ppermute(v, "x", [(0, 1)]),
        P("x"),
        P("x"),
        Collective.PERMUTE,
        1024,
        COLUMNS,
        "",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_kind_of_collective(name):
    function, in_specs, out_specs, kind, full_bytes, groups, reduction = PROGRAMS[name]
    (found,) = collectives(module_of(manual(function, in_specs, out_specs), array(16, 32)))
    assert (found.kind, found.full_bytes, found.count) == (kind, full_bytes, 1)
    assert found.groups == groups
    assert (found.dtype, found.reduction) == ("float32", reduction)
    primitive = {"psum_scatter": "reduce_scatter", "ring": "ppermute", "shift": "ppermute"}.get(name, name.split()[0])
    assert found.op_name.endswith(primitive)


def test_collectives_of_several_arrays_count_the_sum():
    module = module_of(
        manual(lambda v: lax.psum((v, v * 2, v.sum()), AXES), P(AXES), P()),
        array(16, 32),
    )
    assert sum(found.full_bytes for found in collectives(module)) == 256 + 256 + 4


@pytest.mark.parametrize("kind", ["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"])
def test_bfloat16_is_counted_as_bfloat16_after_undoing_the_widening(kind):
    run = {
        "psum": lambda v: lax.psum(v, "y"),
        "all_gather": lambda v: lax.all_gather(v, "y", tiled=True),
        "psum_scatter": lambda v: lax.psum_scatter(v, "y", tiled=True),
        "all_to_all": lambda v: lax.all_to_all(v, "y", 1, 0, tiled=True),
        "ppermute": lambda v: lax.ppermute(v, "y", [(0, 1)]),
    }[kind]
    module = module_of(manual(run, P("y"), P("y")), array(64, 64, dtype="bfloat16"))
    (found,) = undo_widening(collectives(module))
    assert found.dtype == "bfloat16"
    assert found.full_bytes == 2 * 16 * 64 * (4 if kind == "all_gather" else 1)


def test_a_deliberate_float32_sum_of_bfloat16_stays_float32():
    module = module_of(
        manual(lambda v: lax.psum(v.astype("float32"), "y"), P("y"), P()), array(64, 64, dtype="bfloat16")
    )
    (found,) = undo_widening(collectives(module))
    assert (found.dtype, found.full_bytes) == ("float32", 4 * 16 * 64)


def train_step(weights: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        return ((jax.nn.relu(x @ weights[0]) @ weights[1] - y) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def compiled_train_step(weights_spec: P) -> Any:
    weights, batch = (NamedSharding(mesh((8,), ("d",)), spec) for spec in (weights_spec, P("d")))
    arguments = ((array(64, 256), array(256, 32)), array(128, 64), array(128, 32))
    return compiled(train_step, *arguments, in_shardings=(weights, batch, batch), out_shardings=weights)


WEIGHT_BYTES = 4 * (64 * 256 + 256 * 32)


def test_data_parallel_training_sums_each_gradient_once():
    module = parse_module(compiled_train_step(P()).as_text())
    found = collectives(module)
    assert {one.kind for one in found} == {Collective.ALL_REDUCE}
    assert sum(one.full_bytes for one in found) == WEIGHT_BYTES
    assert all(one.groups == EVERYBODY for one in found)
    products = 2 * 16 * (2 * 64 * 256 + 3 * 256 * 32)
    assert products <= flops(module) <= 1.1 * products
    assert form_reduce_scatters(module) == found


def test_sharded_weights_turn_gradient_sums_into_reduce_scatters():
    module = parse_module(compiled_train_step(P("d")).as_text())
    summed = [one for one in collectives(module) if one.kind is Collective.ALL_REDUCE]
    formed = [one for one in form_reduce_scatters(module) if one.reduce_scatter_formed]
    assert sum(one.full_bytes for one in summed) == WEIGHT_BYTES
    assert sum(one.full_bytes for one in formed) == WEIGHT_BYTES
    assert all(one.kind is Collective.REDUCE_SCATTER and one.reduction == "add" for one in formed)
    assert not any(one.kind is Collective.ALL_REDUCE for one in form_reduce_scatters(module))
    gathered = [one.full_bytes for one in collectives(module) if one.kind is Collective.ALL_GATHER]
    assert {4 * 64 * 256, 4 * 256 * 32} <= set(gathered)


@pytest.mark.parametrize(
    ("use", "formed"),
    [
        (lambda s: lax.dynamic_slice_in_dim(s, lax.axis_index("y") * 4, 4), True),
        (lambda s: jnp.tanh(lax.dynamic_slice_in_dim(s * 2, lax.axis_index("y") * 4, 4)), None),
        (lambda s: lax.dynamic_slice_in_dim(s, 4 * s[0, 0].astype("int32"), 4), False),
        (lambda s: lax.dynamic_slice_in_dim(s, lax.axis_index("y") * 4, 4) + s.sum(), False),
        (lambda s: lax.dynamic_slice_in_dim(s, lax.axis_index("y") * 8, 8), False),
        (lambda s: s, False),
    ],
    ids=["own piece", "scaled first", "data-dependent offset", "used whole too", "half of it", "kept"],
)
def test_only_own_pieces_form_reduce_scatters(use, formed):
    module = module_of(manual(lambda v: use(lax.psum(v, "y")), P(), P()), array(16, 32))
    (found,) = form_reduce_scatters(module)
    assert found.full_bytes == 16 * 32 * 4
    if formed is not None:
        assert found.reduce_scatter_formed is formed
        assert (found.kind is Collective.REDUCE_SCATTER) is formed


def test_a_piece_at_an_offset_of_the_program_forms_no_reduce_scatter():
    def run(v: jax.Array, at: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(lax.psum(v, "y"), at * 4, 4)

    (found,) = form_reduce_scatters(module_of(manual(run, (P(), P()), P()), array(16, 32), array(dtype="i4")))
    assert found.kind is Collective.ALL_REDUCE


@pytest.mark.parametrize("reader", ["piece", "whole"])
def test_a_sum_is_followed_through_a_fusion_that_only_moves_it(reader):
    before = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%turn (v: f32[8,4]) -> f32[4,8] {
  %v = f32[8,4]{1,0} parameter(0)
  ROOT %t = f32[4,8]{0,1} transpose(%v), dimensions={1,0}
}

"""
    uses = {
        "piece": "f32[1,8]{1,0} dynamic-slice(%m, %id, %zero), dynamic_slice_sizes={1,8}",
        "whole": "f32[4,8]{1,0} negate(%m)",
    }
    body = f"""  %p = f32[8,4]{{1,0}} parameter(0)
  %id = u32[] partition-id()
  %zero = u32[] constant(0)
  %s = f32[8,4]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={{}}, use_global_device_ids=true, to_apply=%add
  %m = f32[4,8]{{1,0}} fusion(%s), kind=kLoop, calls=%turn
  ROOT %r = {uses[reader]}
"""
    (found,) = form_reduce_scatters(entry_module(body, before))
    assert found.reduce_scatter_formed is (reader == "piece")


# --- replica groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ROWS),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("[4,2]<=[2,2,2]T(2,1,0)", ((0, 4), (2, 6), (1, 5), (3, 7))),
        ("mesh['x'=2,'y'=4] {'y'}", ROWS),
        ("mesh['x'=2,'y'=4] {'x'}", COLUMNS),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['x'=2,'y'=4] {'y':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=2,'y'=4] {'x','y':(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['x'=2,'y'=2,'z'=2] {'z','x'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=8,'b'=1] {'a'}", EVERYBODY),
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 1), (4, 5), (2, 3), (6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
    ],
)
def test_replica_groups_in_every_notation(text, groups):
    assert expand_replica_groups(text, 8) == groups


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), st.data())
def test_mesh_notation_means_the_groups_of_the_axes(sizes, data):
    names = tuple("abcd"[: len(sizes)])
    axes = tuple(data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1)))
    extents = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    text = f"mesh[{extents}] {{" + ",".join(f"'{axis}'" for axis in axes) + "}"
    found = expand_replica_groups(text, math.prod(sizes))
    expected = axes_groups(Mesh(names, tuple(sizes)), axes)
    assert sorted(tuple(sorted(group)) for group in found) == sorted(expected)


def test_resharding_by_the_partitioner_is_readable():
    """GSPMD writes iota groups, parts of mesh axes and permuted devices: each list of groups covers all devices."""
    devices = mesh()
    arguments = {"in_shardings": NamedSharding(devices, P("y", "x")), "out_shardings": NamedSharding(devices, P())}
    for function in (lambda v: v.reshape(2, 256).sum(1), lambda v: v.reshape(2, 8, 32).sum(1)):
        for found in collectives(module_of(function, array(16, 32), **arguments)):
            if found.kind is not Collective.PERMUTE:
                assert sorted(itertools.chain.from_iterable(found.groups)) == list(range(8))


def reduction_module(attributes: str, header: str = "num_partitions=4") -> HloModule:
    return parse_module(
        f"""HloModule m, {header}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%p), {attributes}, to_apply=%add
}}
"""
    )


@pytest.mark.parametrize(
    ("attributes", "header", "groups"),
    [
        (
            "channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true",
            "num_partitions=4",
            ((0, 1), (2, 3)),
        ),
        ("channel_id=1, replica_groups={{0}}", "num_partitions=4", ((0, 1, 2, 3),)),
        ("channel_id=1, replica_groups={}", "replica_count=2, num_partitions=2", ((0, 1, 2, 3),)),
        ("replica_groups={{0,1}}", "replica_count=2, num_partitions=2", ((0, 2), (1, 3))),
        ("replica_groups={}", "replica_count=4", ((0, 1, 2, 3),)),
    ],
)
def test_whom_ids_mean_depends_on_channel_and_flag(attributes, header, groups):
    (found,) = collectives(reduction_module(attributes, header))
    assert found.groups == groups


# --- text that other backends print ----------------------------------------------------------------------------------

GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %c = bf16[] add(%a, %b)
}

%wrapped (q: bf16[64]) -> bf16[8] {
  %q = bf16[64]{0} parameter(0)
  ROOT %rs = bf16[8]{0} reduce-scatter(%q), channel_id=6, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%add
}, execution_thread="communication"

%body (s: (s32[], bf16[16,8])) -> (s32[], bf16[16,8]) {
  %s = (s32[], bf16[16,8]{1,0}) parameter(0)
  %one = s32[] constant(1)
  %i = s32[] get-tuple-element(%s), index=0
  %v = bf16[16,8]{1,0} get-tuple-element(%s), index=1
  %next = s32[] add(%i, %one)
  %ps = (bf16[16,8]{1,0}, bf16[16,8]{1,0}) collective-permute-start(%v), channel_id=1, source_target_pairs={{0,1},{1,0},{2,2}}
  %pd = bf16[16,8]{1,0} collective-permute-done(%ps)
  ROOT %t = (s32[], bf16[16,8]{1,0}) tuple(%next, %pd)
}

%cond (s: (s32[], bf16[16,8])) -> pred[] {
  %s.1 = (s32[], bf16[16,8]{1,0}) parameter(0)
  %n = s32[] constant(12)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  ROOT %more = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (x: bf16[16,8], y: bf16[64]) -> bf16[16,8] {
  %x = bf16[16,8]{1,0} parameter(0), metadata={op_name="state['w{0}']"}
  %y = bf16[64]{0} parameter(1)
  %ags = (bf16[16,8]{1,0}, bf16[128,8]{1,0}) all-gather-start(%x), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(f)/all_gather, (\\"a\\")={"}, backend_config={"collective_backend_config":{"is_sync":true}}
  %agd = bf16[128,8]{1,0} all-gather-done(%ags)
  %ars = (bf16[128,8]{1,0}, bf16[64]{0}) all-reduce-start(%agd, %y), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add
  %ard = (bf16[128,8]{1,0}, bf16[64]{0}) all-reduce-done(%ars)
  %g = bf16[64]{0} get-tuple-element(%ard), index=1
  %rss = ((bf16[64]{0}), bf16[16]{0}) reduce-scatter-start(%g), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%add
  %rsd = bf16[16]{0} reduce-scatter-done(%rss)
  %as = ((bf16[64]{0}), bf16[8]{0}, s32[]) async-start(%g), calls=%wrapped
  %ad = bf16[8]{0} async-done(%as)
  %zero = s32[] constant(0)
  %t0 = (s32[], bf16[16,8]{1,0}) tuple(%zero, %x)
  %w = (s32[], bf16[16,8]{1,0}) while(%t0), condition=%cond, body=%body, backend_config="{\\"known_trip_count\\":{\\"n\\":\\"12\\"}}"
  ROOT %out = bf16[16,8]{1,0} get-tuple-element(%w), index=1
}
"""  # noqa: E501 - as XLA prints it


@pytest.mark.parametrize("text", [GPU, re.sub(r", backend_config=\S+\n", "\n", GPU)], ids=["given", "counted"])
def test_asynchronous_pairs_count_once(text):
    found = [(one.kind, one.full_bytes, one.count, one.dtype) for one in collectives(parse_module(text))]
    assert found == [
        (Collective.ALL_GATHER, 8 * 16 * 8 * 2, 1, "bfloat16"),
        (Collective.ALL_REDUCE, 2 * (128 * 8 + 64), 1, "bfloat16"),
        (Collective.REDUCE_SCATTER, 128, 1, "bfloat16"),
        (Collective.REDUCE_SCATTER, 128, 1, "bfloat16"),
        (Collective.PERMUTE, 256, 12, "bfloat16"),
    ]
    permute = collectives(parse_module(text))[-1]
    assert permute.groups == ((0, 1), (1, 0))


def test_sizes_of_loops_do_not_hide_in_the_flops():
    assert flops(parse_module(GPU)) == 12 + 13  # the counter's sums and comparisons


def test_names_and_shapes_in_their_short_and_long_forms():
    text = """HloModule m

fused {
  p0 = f32[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  p1 = f32[256,8]{1,0:T(8,128)} parameter(1)
  ROOT d = f32[128,8]{1,0:T(8,128)} dot(f32[128,256]{1,0:T(8,128)} p0, f32[256,8]{1,0:T(8,128)} p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY main {
  a = f32[128,256]{1,0:T(8,128)S(1)} parameter(0)
  b = f32[256,8]{1,0:T(8,128)} parameter(1)
  ROOT f = f32[128,8]{1,0:T(8,128)} fusion(a, b), kind=kOutput, calls=fused
}
"""  # noqa: E501 - as XLA prints it
    module = parse_module(text)
    assert flops(module) == 2 * 128 * 256 * 8
    assert bytes_moved(module) == 4 * (128 * 256 + 256 * 8 + 128 * 8)


def library_call(shape: str, operands: list[str], attributes: str) -> HloModule:
    lines = [f"  %p{i} = {operand} parameter({i})" for i, operand in enumerate(operands)]
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    return parse_module(
        "HloModule m\n\nENTRY %main () -> f32[] {\n"
        + "\n".join(lines)
        + f"\n  ROOT %c = {shape} custom-call({names}), {attributes}\n}}\n"
    )


DIMENSIONS = '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"]}}'
WINDOW = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, "


@pytest.mark.parametrize(
    ("shape", "operands", "attributes", "work", "moved"),
    [
        (
            "(f32[8,16]{1,0}, s8[4194304]{0})",
            ["f32[32,8]{1,0}", "f32[32,16]{1,0}"],
            'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":' + DIMENSIONS + "}",
            2 * 8 * 16 * 32,
            4 * (32 * 8 + 32 * 16 + 8 * 16),
        ),
        (
            "f32[8,16]{1,0}",
            ["f32[8,32]{1,0}", "f32[32,16]{1,0}"],
            'custom_call_target="__onednn$matmul", backend_config={"onednn_matmul_config":{}}',
            2 * 8 * 16 * 32,
            4 * (32 * 8 + 32 * 16 + 8 * 16),
        ),
        (
            "(f32[2,6,6,4]{3,2,1,0}, u8[0]{0})",
            ["f32[2,6,6,8]{3,2,1,0}", "f32[8,3,3,4]{3,2,1,0}"],
            'window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"',
            2 * 2 * 16 * 16 * 4 * 8,
            4 * (2 * 36 * 8 + 8 * 9 * 4 + 2 * 36 * 4),
        ),
        (
            "(f32[8,3,3,4]{3,2,1,0}, u8[0]{0})",
            ["f32[2,6,6,4]{3,2,1,0}", "f32[2,6,6,8]{3,2,1,0}"],
            WINDOW + 'custom_call_target="__cudnn$convBackwardFilter"',
            2 * 2 * 16 * 16 * 4 * 8,
            4 * (2 * 36 * 8 + 8 * 9 * 4 + 2 * 36 * 4),
        ),
    ],
    ids=["cublas", "onednn", "cudnn input", "cudnn filter"],
)
def test_products_that_libraries_do(shape, operands, attributes, work, moved):
    module = library_call(shape, operands, attributes)
    assert flops(module) == work
    assert bytes_moved(module) == moved


def test_unknown_library_calls_are_named():
    module = library_call("f32[4]{0}", ["f32[4]{0}"], 'custom_call_target="mystery"')
    assert any("mystery" in note for note in step_seconds(module, CLUSTER).notes)


def test_a_collective_repeated_in_fusions_counts_once():
    def fused(number: int) -> str:
        return f"""%f{number} (q: f32[4]) -> f32[32] {{
  %q{number} = f32[4]{{0}} parameter(0)
  ROOT %ag{number} = f32[32]{{0}} all-gather(%q{number}), channel_id=5, replica_groups=[1,8]<=[8], dimensions={{0}}, use_global_device_ids=true
}}

"""  # noqa: E501 - as XLA prints it

    text = "HloModule m, num_partitions=8\n\n" + fused(0) + fused(1)
    text += """ENTRY %main (p: f32[4]) -> f32[32] {
  %p = f32[4]{0} parameter(0)
  %a = f32[32]{0} fusion(%p), kind=kCustom, calls=%f0
  %b = f32[32]{0} fusion(%p), kind=kCustom, calls=%f1
  ROOT %c = f32[32]{0} add(%a, %b)
}
"""
    (found,) = collectives(parse_module(text))
    assert (found.kind, found.full_bytes) == (Collective.ALL_GATHER, 128)


def test_kernels_of_their_own_for_collectives_count_each():
    """XLA:GPU reduces small arrays by a kernel of its own, an asynchronous fusion; JAX gives all the same channel."""

    def reducing(number: int) -> str:
        return f"""%k{number} (q: f32[4]) -> f32[4] {{
  %q{number} = f32[4]{{0}} parameter(0)
  ROOT %ar{number} = f32[4]{{0}} all-reduce(%q{number}), channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add
}}

"""  # noqa: E501 - as XLA prints it

    config = 'backend_config={"fusion_backend_config":{"kind":"__triton_collective"}}'
    text = "HloModule m, num_partitions=8\n\n%add (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n"
    text += "  %y = f32[] parameter(1)\n  ROOT %s = f32[] add(%x, %y)\n}\n\n" + reducing(0) + reducing(1)
    text += f"""ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  %a = ((f32[4]{{0}}), f32[4]{{0}}) fusion-start(%p), kind=kCustom, calls=%k0, {config}
  %b = f32[4]{{0}} fusion-done(%a), kind=kCustom, calls=%k0, {config}
  %c = ((f32[4]{{0}}), f32[4]{{0}}) fusion-start(%b), kind=kCustom, calls=%k1, {config}
  ROOT %d = f32[4]{{0}} fusion-done(%c), kind=kCustom, calls=%k1, {config}
}}
"""
    found = collectives(parse_module(text))
    assert [(one.kind, one.full_bytes, one.count, one.name) for one in found] == [
        (Collective.ALL_REDUCE, 16, 1, "ar0"),
        (Collective.ALL_REDUCE, 16, 1, "ar1"),
    ]


@pytest.mark.parametrize(
    ("text", "elements", "size"),
    [
        ("f32[]", 1, 4),
        ("bf16[3,5]{1,0}", 15, 30),
        ("pred[7]", 7, 7),
        ("s4[7]{0}", 7, 7),
        ("s4[7]{0:E(4)}", 7, 4),
        ("f8e4m3fn[2,2]{1,0}", 4, 4),
        ("c64[2]", 2, 16),
        ("token[]", 1, 0),
        ("f32[0,4]{1,0}", 0, 0),
        ("(s32[], (f32[2]{0}, u8[3]{0:T(128)}))", 6, 15),
        ("f32[<=8,2]{1,0}", 16, 64),
    ],
)
def test_shapes(text, elements, size):
    shape = parse_shape(text)
    assert (shape.elements, shape.size_bytes) == (elements, size)


def test_dtype_names_are_those_of_numpy():
    names = {
        "f32": "float32",
        "bf16": "bfloat16",
        "s8": "int8",
        "u32": "uint32",
        "pred": "bool",
        "f8e5m2": "float8_e5m2",
    }
    assert {dtype: numpy_dtype_name(dtype) for dtype in names} == names


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("module @jit_f {}", "HloModule"),
        ("HloModule m\n\n%f (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n", "ENTRY"),
        ("HloModule m\n\nENTRY %f () -> f32[] {\n  what is this\n}\n", "what is this"),
        ("HloModule m\n\nENTRY %f () -> f32[] {\n  ROOT %a = f32[] add((%b\n}\n", "parentheses"),
    ],
)
def test_other_text_is_refused_with_the_reason(text, complaint):
    with pytest.raises(HloSyntaxError, match=complaint):
        parse_module(text)


def test_unknown_replica_groups_are_refused():
    with pytest.raises(HloSyntaxError, match="replica groups"):
        expand_replica_groups("ring(8)", 8)


def test_missing_operands_are_refused():
    text = "HloModule m\n\nENTRY %f () -> f32[] {\n  ROOT %a = f32[4] copy(%gone)\n}\n"
    with pytest.raises(HloSyntaxError, match="lacks operand 0"):
        bytes_moved(parse_module(text))


# --- seconds and memory ----------------------------------------------------------------------------------------------


def test_seconds_of_a_product_are_the_roofline():
    module = module_of(lambda a, b: a @ b, array(512, 512), array(512, 512))
    cost = step_seconds(module, CLUSTER)
    assert cost.compute_seconds == pytest.approx(max(2 * 512**3 / 1e12, 3 * 4 * 512**2 / 1e11))
    assert cost.communication_seconds == 0
    assert cost.seconds == cost.compute_seconds
    assert (cost.flops, cost.bytes_moved, cost.wire_bytes) == (2 * 512**3, 3 * 4 * 512**2, 0)


def test_seconds_of_a_loop_are_those_of_its_body_times_its_trips():
    def run(trips: int) -> HloModule:
        return module_of(lambda x: lax.fori_loop(0, trips, lambda _, x: x @ x, x), array(512, 512))

    few, many = (step_seconds(run(trips), CLUSTER).compute_seconds for trips in (5, 25))
    product = max(2 * 512**3 / 1e12, 3 * 4 * 512**2 / 1e11)
    assert few >= 5 * product
    assert many - few >= 20 * product
    assert many - few <= 20 * (product + 3 * 2 * 4 * 512**2 / 1e11)


def test_seconds_of_collectives_follow_their_groups_and_count():
    module = module_of(manual(scanned_sum, (P(), P()), P()), array(7, 64, 64), array(16, 64))
    cost = step_seconds(module, CLUSTER)
    size = 16 * 64 * 4
    expected = 7 * group_seconds(Collective.ALL_REDUCE, size, ROWS, CLUSTER)
    assert cost.communication_seconds == pytest.approx(expected)
    assert cost.seconds_by_kind == {Collective.ALL_REDUCE: pytest.approx(expected)}
    assert cost.wire_bytes == pytest.approx(7 * 2 * 3 / 4 * size)
    across = [dataclasses.replace(one, groups=COLUMNS) for one in cost.collectives]
    replaced = step_seconds(module, CLUSTER, across)
    assert replaced.communication_seconds == pytest.approx(
        7 * group_seconds(Collective.ALL_REDUCE, size, COLUMNS, CLUSTER)
    )
    assert replaced.compute_seconds == cost.compute_seconds


def test_seconds_of_a_permute_are_those_of_its_messages():
    function, in_specs, out_specs, _, size, pairs, _ = PROGRAMS["shift"]
    cost = step_seconds(module_of(manual(function, in_specs, out_specs), array(16, 32)), CLUSTER)
    assert cost.communication_seconds == pytest.approx(permute_seconds(size, pairs, CLUSTER))
    assert cost.wire_bytes_by_kind == {Collective.PERMUTE: size}


def test_groups_of_different_sizes_take_the_slowest():
    text = "channel_id=1, replica_groups={{0,1,2},{3}}, use_global_device_ids=true"
    module = reduction_module(text)
    cost = step_seconds(module, CLUSTER)
    assert cost.communication_seconds == pytest.approx(group_seconds(Collective.ALL_REDUCE, 32, ((0, 1, 2),), CLUSTER))


def test_too_small_a_cluster_is_refused():
    module = module_of(manual(lambda v: lax.psum(v, AXES), P(AXES), P()), array(16, 32))
    small = Cluster("small", 1, 4, CLUSTER.device, CLUSTER.local_link, CLUSTER.network_link)
    with pytest.raises(ClusterError, match="8 devices"):
        step_seconds(module, small)


def test_memory_counts_shared_arguments_and_outputs_once():
    executable = compiled(lambda x, y: (x + 1, y @ y), array(256, 256), array(32, 32), donate_argnums=0)
    memory = memory_bytes(executable)
    assert memory.argument == 4 * (256 * 256 + 32 * 32)
    assert memory.alias == 4 * 256 * 256
    assert memory.total == memory.argument + memory.output - memory.alias + memory.temp
    assert 4 * (256 * 256 + 2 * 32 * 32) <= memory.total < 4 * (256 * 256 + 3 * 32 * 32)


def test_everything_about_an_executable_at_once():
    executable = compiled_train_step(P())
    program = read_compiled(executable, CLUSTER)
    assert program.cost == step_seconds(parse_module(executable.as_text()), CLUSTER)
    assert program.memory == memory_bytes(executable)
    assert program.module.num_devices == 8
    steps, notes = executed_steps(program.module)
    assert notes == ()
    assert all(step.times == 1 for step in steps)
