"""Products cost what was measured of them, in every order and for each array that is large; the rest lies between."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.product_orders import product_order
from autopar.curves import Curve
from autopar.errors import ClusterError
from autopar.measured_products import multiplied, operand_shapes
from autopar.products import (
    DeepCurve,
    Product,
    ProductArray,
    ProductCurve,
    ProductOrder,
    ProductPrices,
    UseCurve,
    square_product,
)
from autopar.profile_file import load_profile, profile_of_device, save_profile
from tests.test_profile import profile_of

DTYPES = ("float32", "bfloat16")
SIDE, FEW, OFTEN = 1024, 16, 64
SQUARES = tuple(
    ProductCurve("float32", 4, order, Curve(((1e3, 1e-6), (1e6, 1e-4 * dear), (1e9, 5e-2 * dear))))
    for order, dear in zip(ProductOrder, (1.0, 1.2, 1.5), strict=True)
)
USES = tuple(
    UseCurve("float32", order, array, ((FEW, SIDE, 0.03 + number / 100), (OFTEN, SIDE, 0.04 + number / 100)))
    for number, (order, array) in enumerate(itertools.product(ProductOrder, ProductArray))
)
PRICES = ProductPrices(SQUARES, USES)


def product_of(rows: int, summed: int, columns: int, order: ProductOrder = ProductOrder.PLAIN) -> Product:
    return Product(2.0 * rows * summed * columns, rows * summed, summed * columns, rows * columns, order)


def with_large(array: ProductArray, uses: int, order: ProductOrder) -> Product:
    """Whose array of a kind is [SIDE, SIDE]."""
    dims = {ProductArray.RIGHT: 0, ProductArray.RESULT: 1, ProductArray.LEFT: 2}  # the one that the array has not
    return product_of(*(uses if dims[array] == dim else SIDE for dim in range(3)), order)


@pytest.mark.parametrize("curve", USES, ids=lambda one: f"{one.order.value}, {one.array.value}")
def test_products_with_one_large_array_cost_what_was_measured_of_them(curve: UseCurve) -> None:
    for uses, _, seconds in curve.samples:
        assert PRICES.seconds(with_large(curve.array, int(uses), curve.order), "float32") == pytest.approx(seconds)


@pytest.mark.parametrize("square", SQUARES, ids=lambda one: one.order.value)
def test_square_products_cost_what_was_measured_of_them(square: ProductCurve) -> None:
    for side in (5, 100, 700):
        wanted = square.curve.at(2.0 * side**3)
        assert PRICES.seconds(product_of(side, side, side, square.order), "float32") == pytest.approx(wanted)


def test_between_and_beyond_the_uses_that_were_measured() -> None:
    """Seconds by the byte lie on a line over the logarithm, and stay what they are beyond its ends."""

    def by_the_byte(uses: int) -> float:
        product = with_large(ProductArray.RIGHT, uses, ProductOrder.PLAIN)
        seconds = PRICES.seconds(product, "float32")
        assert seconds is not None
        square = (product.flops / 2) ** (2 / 3)
        return (seconds - SQUARES[0].curve.at(product.flops)) / (4 * (SIDE**2 - square))

    assert by_the_byte(32) == pytest.approx((by_the_byte(FEW) + by_the_byte(OFTEN)) / 2)
    assert by_the_byte(4) == pytest.approx(by_the_byte(FEW))
    assert by_the_byte(256) == pytest.approx(by_the_byte(OFTEN))


@given(*(st.integers(1, 4096) for _ in range(3)), st.sampled_from(ProductOrder))
def test_no_product_is_cheaper_than_a_square_one_of_as_many_flops(
    rows: int, summed: int, columns: int, order: ProductOrder
) -> None:
    product = product_of(rows, summed, columns, order)
    (square,) = (one for one in SQUARES if one.order is order)
    seconds = PRICES.seconds(product, "float32")
    assert seconds is not None and seconds >= square.curve.at(product.flops)
    assert PRICES.seconds(product, "int8") is None


def test_what_was_not_measured_is_priced_by_its_likes() -> None:
    plain = ProductPrices(SQUARES[:1], [one for one in USES if one.order is ProductOrder.PLAIN])
    for array in ProductArray:
        wanted = PRICES.seconds(with_large(array, FEW, ProductOrder.PLAIN), "float32")
        assert plain.seconds(with_large(array, FEW, ProductOrder.LEFT_TURNED), "float32") == wanted
    right = ProductPrices(SQUARES[:1], [one for one in USES[:3] if one.array is ProductArray.RIGHT])
    found = {right.seconds(with_large(array, FEW, ProductOrder.PLAIN), "float32") for array in ProductArray}
    assert found == {PRICES.seconds(with_large(ProductArray.RIGHT, FEW, ProductOrder.PLAIN), "float32")}
    bare = ProductPrices(SQUARES[:1], ())
    assert bare.seconds(product_of(1, 1024, 1024), "float32") == SQUARES[0].curve.at(2.0 * 1024**2)


def test_few_results_keep_few_units_busy() -> None:
    deep = DeepCurve(
        "float32", ProductOrder.PLAIN, ((16, 1 << 14, 1.0), (64, 1 << 14, 4.0))
    )  # 1.2e-7 and 3e-8 seconds by the FLOP
    prices = ProductPrices(SQUARES, USES, (deep,))
    for side, depth, seconds in deep.samples:
        assert prices.seconds(product_of(int(side), int(depth), int(side)), "float32") == pytest.approx(seconds)
    between = prices.seconds(product_of(32, 1 << 14, 32), "float32")
    assert between == pytest.approx(2 * 32**2 * 2**14 * (1 / (2 * 16**2 * 2**14) + 4 / (2 * 64**2 * 2**14)) / 2)
    turned = product_of(16, 1 << 14, 16, ProductOrder.LEFT_TURNED)
    assert prices.seconds(turned, "float32") == pytest.approx(1.0)  # not measured in that order
    wide = product_of(4096, 4, 4096)
    assert prices.seconds(wide, "float32") == max(
        PRICES.seconds(wide, "float32") or 0.0, wide.flops * 4 / (2 * 64**2 * 2**14)
    )


def test_nothing_to_multiply_costs_what_the_smallest_product_does() -> None:
    assert PRICES.seconds(Product(0.0, 0, 10, 0), "float32") == SQUARES[0].curve.at(0.0)
    assert square_product(2e6) == Product(2e6, *(pytest.approx(1e4) for _ in range(3)))


@pytest.mark.parametrize(
    "samples",
    [(), ((1.0, 2.0, float("nan")),), ((1.0, 0.0, 1.0),), ((2.0, 1.0, 1.0), (1.0, 1.0, 1.0))],
    ids=["none", "nan", "zero", "descending"],
)
def test_bad_samples_are_refused(samples: tuple[tuple[float, float, float], ...]) -> None:
    for make in (
        lambda: UseCurve("float32", ProductOrder.PLAIN, ProductArray.LEFT, samples),
        lambda: DeepCurve("float32", ProductOrder.PLAIN, samples),
    ):
        with pytest.raises(ClusterError, match="sample"):
            make()


# -------------------------------------------------------------------------------------------------------------- orders


@pytest.mark.parametrize("order", ProductOrder, ids=lambda one: one.value)
def test_measured_products_multiply(order: ProductOrder) -> None:
    left, right = (
        np.random.default_rng(side).normal(size=shape) for side, shape in enumerate(operand_shapes(order, 4, 6, 5))
    )
    as_rows = (
        left.T if order is ProductOrder.LEFT_TURNED else left,
        right.T if order is ProductOrder.RIGHT_TURNED else right,
    )
    np.testing.assert_allclose(
        multiplied(jnp.asarray(left), jnp.asarray(right), order=order), as_rows[0] @ as_rows[1], rtol=1e-5
    )


MATRICES = (
    (((4, 6), (6, 5)), (((1,), (0,)), ((), ())), ProductOrder.PLAIN),
    (((4, 6), (5, 6)), (((1,), (1,)), ((), ())), ProductOrder.RIGHT_TURNED),
    (((6, 4), (6, 5)), (((0,), (0,)), ((), ())), ProductOrder.LEFT_TURNED),
    (((6, 4), (5, 6)), (((0,), (1,)), ((), ())), ProductOrder.LEFT_TURNED),
    (((2, 4, 6), (6, 5)), (((2,), (0,)), ((), ())), ProductOrder.PLAIN),
    (((2, 4, 6), (5, 6)), (((2,), (1,)), ((), ())), ProductOrder.RIGHT_TURNED),
    (((2, 4, 6), (2, 6, 5)), (((2,), (1,)), ((0,), (0,))), ProductOrder.PLAIN),
    (((2, 4, 6), (2, 5, 6)), (((2,), (2,)), ((0,), (0,))), ProductOrder.RIGHT_TURNED),
    (((2, 6, 4), (2, 6, 5)), (((1,), (1,)), ((0,), (0,))), ProductOrder.LEFT_TURNED),
    (((4, 6), (6,)), (((1,), (0,)), ((), ())), ProductOrder.PLAIN),  # a row lies as a column does
    (((6, 1), (6, 5)), (((0,), (0,)), ((), ())), ProductOrder.PLAIN),
)
GRADIENT = ((2, 4, 6), (2, 4, 5)), (((0, 1), (0, 1)), ((), ()))


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize(("shapes", "numbers", "order"), MATRICES)
def test_how_operands_lie_is_read_off_the_equation(
    shapes: Any, numbers: Any, order: ProductOrder, on_cpu: bool
) -> None:
    assert product_order(shapes, numbers, on_cpu=on_cpu) is order


def test_operands_that_are_copied_first_lie_as_wanted() -> None:
    """The gradient of a matrix, of a batch of sequences: XLA:CPU makes matrices of both, GPUs read them as they are."""
    assert product_order(*GRADIENT, on_cpu=True) is ProductOrder.PLAIN
    assert product_order(*GRADIENT, on_cpu=False) is ProductOrder.LEFT_TURNED


# --------------------------------------------------------------------------------------------------------------- files


def test_skinny_products_of_older_files_are_few_uses_of_the_right_operand(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile_of(uses=()), path)
    stored = json.loads(path.read_text())
    stored["version"] = 10
    (square,) = stored["profile"]["products"]
    del square["order"]
    flops, seconds = 2.0 * 64 * 1024 * 1024, 0.02
    stored["profile"]["products"] = [
        {**square, "shape": "square"},
        {**square, "shape": "skinny", "samples": [[flops, seconds]]},
    ]
    path.write_text(json.dumps(stored))
    found = load_profile(path)
    assert found.products == profile_of().products
    (uses,) = found.uses
    assert uses.samples == ((pytest.approx(64.0), pytest.approx(1024.0), seconds),)
    assert found.product_seconds(product_of(64, 1024, 1024), "float32") == pytest.approx(seconds)


def test_what_was_measured_of_a_device_has_all_that_products_cost() -> None:
    profile = profile_of_device("H100-SXM5-80GB")
    assert {one.array for one in profile.uses} == set(ProductArray)
    for dtype in DTYPES:
        deep, square = product_of(256, 1 << 16, 256), product_of(1 << 10, 1 << 12, 1 << 10)
        assert deep.flops == square.flops
        assert (profile.product_seconds(deep, dtype) or 0) > 1.3 * (profile.product_seconds(square, dtype) or 0)
    plain, turned = (product_of(2048, 2048, 2048, order) for order in (ProductOrder.PLAIN, ProductOrder.LEFT_TURNED))
    slower = [
        (profile.product_seconds(turned, dtype) or 0) / (profile.product_seconds(plain, dtype) or 1) for dtype in DTYPES
    ]
    assert slower[0] > 1.3 and slower[1] < 1.1  # tensor cores read float32 along what is summed over
