"""Kernels of compiled programs are priced by what a profile measured: every figure is computed by hand from lines of HLO."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.cluster import Cluster
from autopar.cost_model.hlo import step_seconds
from autopar.cost_model.hlo_parser import parse_module, parse_shape
from autopar.cost_model.product_orders import product_order
from autopar.curves import Curve
from autopar.measured_operations import OPERATIONS
from autopar.measured_products import multiplied, operand_shapes
from autopar.products import Product, ProductCurve, ProductOrder
from autopar.profile import OperationRate, Profile, Reductions
from tests.test_profile import profile_of

DEAR = 1e-6
"""Seconds per FLOP of operations, far more than a byte costs."""
RATE = 1e3
"""Bytes per second of what is turned, far less than of what is not."""
ELEMENTWISE = Curve(((1.0, 1e-9), (1e9, 1.0)))
STREAMED = Curve(((1.0, 3e-9), (1e9, 3.0)))
ROWS, COLUMNS = 512, 384
SIZE = ROWS * COLUMNS


def profile(*primitives: str, **changes: object) -> Profile:
    operations = tuple(OperationRate(primitive, DEAR) for primitive in primitives)
    return profile_of(operations=operations, elementwise=ELEMENTWISE, **changes)


def seconds_of(text: str, priced_by: Profile) -> float:
    return step_seconds(parse_module("HloModule m\n\n" + text), Cluster.local(profile=priced_by)).compute_seconds


def of_function(function: object, *shapes: tuple[int, ...], priced_by: Profile) -> float:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return step_seconds(parse_module(text), Cluster.local(profile=priced_by)).compute_seconds


# ------------------------------------------------------------------------------------------------------------- layouts


def test_layouts_say_how_elements_lie() -> None:
    assert parse_shape("f32[4,8]{0,1}").major_to_minor == (1, 0)
    assert parse_shape("f32[4,8,2]{1,2,0:T(8,128)S(1)}").major_to_minor == (0, 2, 1)
    assert parse_shape("f32[4,8]").major_to_minor == (0, 1)
    assert parse_shape("f32[]{:T(256)}").major_to_minor == ()


TURNED = 2 * 4 * SIZE / RATE
STRAIGHT = 2 * 4 * SIZE / 1e9


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        (f"copy(%p), p=f32[{ROWS},{COLUMNS}]{{0,1}}, to=f32[{ROWS},{COLUMNS}]{{1,0}}", TURNED),
        (f"copy(%p), p=f32[{ROWS},{COLUMNS}]{{1,0}}, to=f32[{ROWS},{COLUMNS}]{{1,0}}", STRAIGHT),
        (f"transpose(%p), dimensions={{1,0}}, p=f32[{ROWS},{COLUMNS}]{{1,0}}, to=f32[{COLUMNS},{ROWS}]{{1,0}}", TURNED),
        (
            f"transpose(%p), dimensions={{1,0}}, p=f32[{ROWS},{COLUMNS}]{{1,0}}, to=f32[{COLUMNS},{ROWS}]{{0,1}}",
            STRAIGHT,
        ),
        # a dimension of one element may stand anywhere
        (f"transpose(%p), dimensions={{1,0,2}}, p=f32[1,{ROWS},{COLUMNS}], to=f32[{ROWS},1,{COLUMNS}]", STRAIGHT),
        # heads come before time: the 16 numbers of a head at a time fill a cache line
        (
            f"transpose(%p), dimensions={{1,0,2}}, p=f32[{ROWS},{COLUMNS // 16},16], to=f32[{COLUMNS // 16},{ROWS},16]",
            STRAIGHT,
        ),
        (
            f"transpose(%p), dimensions={{1,0,2}}, p=f32[{ROWS},{COLUMNS // 8},8], to=f32[{COLUMNS // 8},{ROWS},8]",
            TURNED,
        ),
    ],
    ids=[
        "copy turned",
        "copy",
        "transposed",
        "transposed in name only",
        "a dimension of one",
        "long runs",
        "short runs",
    ],
)
@pytest.mark.parametrize("fused", [False, True], ids=["alone", "in a fusion"])
def test_what_lies_in_another_order_afterwards_is_turned(line: str, seconds: float, fused: bool) -> None:
    call, shapes = line.split(", p=")
    given, made = shapes.split(", to=")
    if fused:
        text = f"%f (p: {given}) -> {made} {{\n  %p = {given} parameter(0)\n  ROOT %t = {made} {call}\n}}\n\n"
        text += f"ENTRY %e (x: {given}) -> {made} {{\n  %x = {given} parameter(0)\n"
        text += f"  ROOT %r = {made} fusion(%x), kind=kLoop, calls=%f\n}}\n"
    else:
        text = f"ENTRY %e (p: {given}) -> {made} {{\n  %p = {given} parameter(0)\n  ROOT %t = {made} {call}\n}}\n"
    assert seconds_of(text, profile(turned_bytes_per_second=RATE)) == pytest.approx(seconds, rel=1e-6)
    assert seconds_of(text, profile()) == pytest.approx(STRAIGHT, rel=1e-6)  # where no rate was measured


# ---------------------------------------------------------------------------------------------------------- operations


@pytest.mark.parametrize(
    ("primitive", "function"),
    [
        ("exp", jnp.exp),
        ("log", jnp.log),
        ("tanh", jnp.tanh),
        ("log1p", jnp.log1p),
        ("expm1", jnp.expm1),
        ("sin", jnp.sin),
        ("cos", jnp.cos),
        ("sqrt", jnp.sqrt),
        ("rsqrt", lax.rsqrt),
        ("erf", lax.erf),
    ],
)
def test_an_operation_takes_its_measured_rate(primitive: str, function: object) -> None:
    wanted = next(one for one in OPERATIONS if one.primitive == primitive).flops(SIZE) * DEAR
    assert of_function(function, (ROWS, COLUMNS), priced_by=profile(primitive)) == pytest.approx(wanted, rel=0.01)
    assert of_function(function, (ROWS, COLUMNS), priced_by=profile()) < 0.01 * wanted


def test_operations_of_two_operands() -> None:
    shapes = (ROWS, COLUMNS), (ROWS, COLUMNS)
    assert of_function(jnp.divide, *shapes, priced_by=profile("div")) == pytest.approx(4 * SIZE * DEAR, rel=0.01)
    assert of_function(jnp.power, *shapes, priced_by=profile("pow")) == pytest.approx(10 * SIZE * DEAR, rel=0.01)


def test_random_bits_cost_what_they_were_measured_to_cost() -> None:
    def bits(key: jax.Array, x: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.wrap_key_data(key, impl="threefry2x32"), x.shape)

    text = jax.jit(bits).lower(jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((SIZE,), jnp.float32))
    module = parse_module(text.compile().as_text())
    seconds = step_seconds(module, Cluster.local(profile=profile("random_bits"))).compute_seconds
    # 110 operations per element by the primitive's weight; XLA repeats some of them in two kernels, and additions are free here
    assert 0.7 < seconds / (110 * SIZE * DEAR) < 1.4


# ---------------------------------------------------------------------------------------------------------- reductions


SUMS = Reductions(short_row_seconds=5e-5, column_seconds_per_flop=7e-6)


@pytest.mark.parametrize(
    ("given", "dims", "made", "seconds"),
    [
        (f"f32[{ROWS},{COLUMNS}]{{1,0}}", "1", f"f32[{ROWS}]", SIZE * DEAR),
        (f"f32[{ROWS},{COLUMNS}]{{0,1}}", "1", f"f32[{ROWS}]", SIZE * 7e-6),
        (f"f32[{ROWS},{COLUMNS}]{{1,0}}", "0", f"f32[{COLUMNS}]", SIZE * 7e-6),
        (f"f32[{SIZE // 4},4]{{1,0}}", "1", f"f32[{SIZE // 4}]", SIZE * DEAR + SIZE / 4 * 5e-5),
        (f"f32[{ROWS},{COLUMNS}]{{0,1}}", "0,1", "f32[]", SIZE * DEAR),
    ],
    ids=["long rows", "columns by layout", "columns", "short rows", "everything"],
)
def test_a_reduction_costs_by_how_its_elements_lie(given: str, dims: str, made: str, seconds: float) -> None:
    text = (
        "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        "  ROOT %s = f32[] add(%a, %b)\n}\n\n"
        f"ENTRY %e (x: {given}) -> {made} {{\n  %x = {given} parameter(0)\n  %z = f32[] constant(0)\n"
        f"  ROOT %r = {made} reduce(%x, %z), dimensions={{{dims}}}, to_apply=%add\n}}\n"
    )
    assert seconds_of(text, profile("reduce_sum", reductions=SUMS)) == pytest.approx(seconds, rel=1e-6)


def test_the_greatest_and_its_place_are_priced_as_such() -> None:
    seconds = of_function(lambda x: jnp.argmax(x, axis=1), (ROWS, COLUMNS), priced_by=profile("argmax"))
    assert seconds == pytest.approx(SIZE * DEAR, rel=0.01)


def test_windows_are_priced_by_what_they_look_at() -> None:
    def pooled(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, (4, 4), (4, 4), "VALID")

    seconds = of_function(pooled, (ROWS, COLUMNS), priced_by=profile("reduce_window_max"))
    assert seconds == pytest.approx(SIZE * DEAR, rel=0.1)  # the first element of each window is folded in for nothing


# ------------------------------------------------------------------------------------------------- products and the update


def test_a_product_is_priced_by_its_own_bytes_and_what_is_fused_to_it_by_its_rate() -> None:
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.exp(x @ y)

    priced_by = profile("exp")
    work = Product(2 * ROWS * COLUMNS * 256, ROWS * COLUMNS, COLUMNS * 256, ROWS * 256)
    wanted = priced_by.product_seconds(work, "float32")
    assert wanted is not None
    wanted += 10 * ROWS * 256 * DEAR
    assert of_function(product, (ROWS, COLUMNS), (COLUMNS, 256), priced_by=priced_by) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("order", ProductOrder, ids=lambda order: order.value)
def test_a_product_is_priced_by_how_its_operands_lie(order: ProductOrder) -> None:
    """And alike where the program is compiled and where it is not."""
    seconds = {one: 1.0 + number for number, one in enumerate(ProductOrder)}
    flops = 2.0 * ROWS * COLUMNS * 256
    squares = tuple(ProductCurve("float32", 4, one, Curve(((flops, each),))) for one, each in seconds.items())
    shapes = operand_shapes(order, ROWS, COLUMNS, 256)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return multiplied(jnp.exp(x), jnp.exp(y), order=order)

    priced_by = profile(products=squares, uses=())
    assert of_function(product, *shapes, priced_by=priced_by) == pytest.approx(seconds[order], rel=0.01)
    (equation,) = jax.make_jaxpr(lambda x, y: multiplied(x, y, order=order))(
        *(jnp.zeros(shape) for shape in shapes)
    ).eqns
    assert product_order(shapes, equation.params["dimension_numbers"], on_cpu=True) is order


CALLED = """ENTRY %e (a: f32[{left}], b: f32[{right}]) -> f32[512,256] {{
  %a = f32[{left}]{{1,0}} parameter(0)
  %b = f32[{right}]{{1,0}} parameter(1)
  ROOT %r = f32[512,256]{{1,0}} custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={{\
"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["{of_left}"],\
"rhs_contracting_dimensions":["{of_right}"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}}}}
}}
"""


@pytest.mark.parametrize(
    ("left", "right", "of_left", "of_right", "order"),
    [
        ("512,384", "384,256", 1, 0, ProductOrder.PLAIN),
        ("512,384", "256,384", 1, 1, ProductOrder.RIGHT_TURNED),
        ("384,512", "384,256", 0, 0, ProductOrder.LEFT_TURNED),
    ],
    ids=lambda one: one.value if isinstance(one, ProductOrder) else "",
)
def test_a_call_of_a_library_is_priced_by_how_its_operands_lie(
    left: str, right: str, of_left: int, of_right: int, order: ProductOrder
) -> None:
    seconds = {one: 1.0 + number for number, one in enumerate(ProductOrder)}
    flops = 2.0 * 512 * 384 * 256
    squares = tuple(ProductCurve("float32", 4, one, Curve(((flops, each),))) for one, each in seconds.items())
    text = CALLED.format(left=left, right=right, of_left=of_left, of_right=of_right)
    assert seconds_of(text, profile(products=squares, uses=())) == pytest.approx(seconds[order], rel=0.01)


def test_kernels_from_arguments_to_results_stream() -> None:
    """Which is what an update does; what the passes keep is read soon after it was written."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient = x.T @ x
        return w - 0.1 * gradient, gradient[0, 0]

    near, far = (
        of_function(step, (COLUMNS, COLUMNS), (ROWS, COLUMNS), priced_by=profile(streamed=curve))
        for curve in (ELEMENTWISE, STREAMED)
    )
    assert far - near == pytest.approx(2 * 3 * 4 * COLUMNS**2 / 1e9, rel=0.01)
