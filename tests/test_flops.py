"""Work counts against XLA's own cost analysis where it has one, and against the textbook where it has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from autopar import _compat
from autopar.graph.flops import COUNTS, MOVEMENT, WEIGHTS, bytes_of, flops_of


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def equation_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """The last equation of a function, inner calls opened."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    while _compat.jaxpr_of(jaxpr).eqns[-1].primitive.name in ("jit", "pjit", "custom_jvp_call"):
        jaxpr = _compat.inner_jaxprs(_compat.jaxpr_of(jaxpr).eqns[-1])[0]
    return _compat.jaxpr_of(jaxpr).eqns[-1]


CONV = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x, y: x @ y, (zeros(8, 32), zeros(32, 16))),
        (lambda x, y: jnp.einsum("bhqd,bhkd->bhqk", x, y), (zeros(2, 4, 8, 16), zeros(2, 4, 10, 16))),
        (lambda x, y: lax.conv_general_dilated(x, y, (1, 1), "VALID", **CONV), (zeros(2, 9, 9, 4), zeros(3, 3, 4, 8))),
        (lambda x, y: lax.conv_general_dilated(x, y, (2, 2), "VALID", **CONV), (zeros(2, 9, 9, 4), zeros(3, 3, 4, 8))),
        (
            lambda x, y: lax.conv_general_dilated(x, y, (1, 1), "VALID", feature_group_count=2, **CONV),
            (zeros(2, 9, 9, 4), zeros(3, 3, 2, 8)),
        ),
        (
            lambda x, y: lax.conv_general_dilated(x, y, (1, 1), [(2, 3), (2, 3)], lhs_dilation=(2, 2), **CONV),
            (zeros(2, 32, 32, 4), zeros(3, 3, 4, 8)),
        ),
        (lambda x: lax.reduce_sum(x, axes=(1,)), (zeros(64, 64),)),
        (lambda x, y: x * y, (zeros(8, 32), zeros(8, 32))),
        (lambda x: lax.transpose(x, (1, 0)), (zeros(8, 32),)),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 11), (1, 11), "VALID"), (zeros(8, 33),)),
    ],
)
def test_flops_are_those_of_xla(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Within 15%: XLA leaves out the multiplications with padding, and a reduction of n elements is n - 1 additions."""
    analysis = jax.jit(function).lower(*arguments).cost_analysis()
    assert flops_of(equation_of(function, *arguments)) == pytest.approx(analysis.get("flops", 0.0), rel=0.15)


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (lambda x: lax.cumsum(x, axis=1), (zeros(8, 32),), 256),
        (lambda x: lax.argmax(x, 1, jnp.int32), (zeros(8, 32),), 256),
        (lambda x: lax.sort(x, dimension=1), (zeros(8, 32),), 256 * 5),
        (lambda x: lax.top_k(x, 7), (zeros(8, 32),), 256 * 3),
        (jnp.fft.fft, (zeros(8, 32, dtype=np.complex64),), 8 * 5 * 32 * 5),
        (jnp.fft.rfft, (zeros(8, 32),), 8 * 5 * 32 * 5 / 2),
        (jnp.fft.fft2, (zeros(3, 8, 32, dtype=np.complex64),), 3 * 5 * 256 * 8),
        (lax.linalg.lu, (zeros(2, 9, 9),), 2 * 2 / 3 * 9**3),
        (lax.linalg.lu, (zeros(12, 9),), 12 * 81 - 729 / 3),
        (lambda x: lax.linalg.qr(x, full_matrices=False), (zeros(12, 9),), 2 * (2 * 12 * 81 - 2 * 729 / 3)),
        (lambda x: lax.linalg.triangular_solve(x, x), (zeros(2, 9, 9),), 2 * 9**3),
        (lax.linalg.svd, (zeros(9, 9),), 21 * 9**3),
        (lambda x: lax.linalg.tridiagonal_solve(x, x, x, zeros(9, 4)), (zeros(9),), 8 * 36),
        (jnp.exp, (zeros(8, 32),), 256 * WEIGHTS["exp"]),
        (lambda k: jax.random.bits(k, (8, 32)), (jax.random.key(0),), 256 * WEIGHTS["random_bits"]),
        (lambda x: x.reshape(16, 16), (zeros(8, 32),), 0),
        (lambda x, i: x[i], (zeros(8, 32), np.int32(1)), 0),
        (lambda x: x.astype(jnp.bfloat16), (zeros(8, 32),), 256),
    ],
)
def test_flops_of_the_rest(function: Callable[..., Any], arguments: tuple[Any, ...], expected: float) -> None:
    assert flops_of(equation_of(function, *arguments)) == pytest.approx(expected)


def test_cholesky_is_a_third_of_the_cube() -> None:
    jaxpr = jax.make_jaxpr(lambda x: lax.linalg.cholesky(x, symmetrize_input=False))(zeros(2, 9, 9))
    (equation,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "cholesky"]
    assert flops_of(equation) == pytest.approx(2 * 9**3 / 3)


def test_scatter_add_adds_its_updates() -> None:
    equation = equation_of(lambda x, i, u: x.at[i].add(u), zeros(100, 8), np.zeros(6, np.int32), zeros(6, 8))
    assert equation.primitive.name == "scatter-add"
    assert flops_of(equation) == 48
    assert bytes_of(equation) == 3 * 48 * 4 + 6 * 4


def test_an_unknown_primitive_counts_as_pointwise() -> None:
    equation = equation_of(lambda x: jax.pure_callback(lambda v: v, x, x), zeros(8, 32))
    assert equation.primitive.name not in MOVEMENT | COUNTS.keys() | WEIGHTS.keys()
    assert flops_of(equation) == 256
    assert bytes_of(equation) == 2 * 256 * 4


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (lambda x, y: x * y, (zeros(8, 32), zeros(8, 32)), 3 * 1024),
        (lambda x: x * x, (zeros(8, 32),), 2 * 1024),
        (lambda x: x.astype(jnp.bfloat16), (zeros(8, 32),), 1024 + 512),
        (lambda x, y: x @ y, (zeros(8, 32), zeros(32, 16)), 4 * (256 + 512 + 128)),
        (lambda x: lax.slice_in_dim(x, 0, 2), (zeros(8, 32),), 2 * 256),
        (lambda x: lax.dynamic_slice(x, (0, 0), (2, 32)), (zeros(8, 32),), 2 * 256 + 2 * 4),
        (lambda x, y: lax.dynamic_update_slice(x, y, (0, 0)), (zeros(8, 32), zeros(2, 32)), 2 * 256 + 2 * 4),
        (
            lambda x, i: lax.gather(x, i, lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 32)),
            (zeros(8, 32), zeros(5, 1, dtype=np.int32)),
            2 * 5 * 128 + 20,
        ),
        (lambda x: x.reshape(16, 16), (zeros(8, 32),), 0),
        (lambda x: lax.transpose(x, (1, 0)), (zeros(8, 32),), 2 * 1024),
        (lambda x: lax.broadcast_in_dim(x, (8, 32), (1,)), (zeros(32),), 1024 + 128),
        (lambda: lax.iota(jnp.int32, 32), (), 128),
    ],
)
def test_bytes(function: Callable[..., Any], arguments: tuple[Any, ...], expected: float) -> None:
    assert bytes_of(equation_of(function, *arguments)) == expected


def test_keys_have_a_size() -> None:
    equation = equation_of(lambda k: jax.random.bits(k, (8, 32)), jax.random.key(0))
    assert bytes_of(equation) == 1024 + 8


def test_numbers_are_plain_floats_and_never_negative() -> None:
    """For everything in a gradient step of a small convolutional model."""

    def loss(kernel: Any, x: Any) -> Any:
        y = jax.nn.relu(lax.conv_general_dilated(x, kernel, (2, 2), "SAME", **CONV))
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jax.nn.logsumexp(y)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(zeros(3, 3, 4, 8), zeros(2, 9, 9, 4))
    for equation in jaxpr.eqns:
        for number in (flops_of(equation), bytes_of(equation)):
            assert type(number) is float
            assert number >= 0
            assert math.isfinite(number)
