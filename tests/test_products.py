"""Products that are only turned afterwards become the products that are wanted, and nothing else changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autopar import _compat
from autopar.graph.inline import inline
from benchmarks.models import build


def names(closed: Any) -> list[str]:
    """Primitives of a closed jaxpr, loop bodies included."""
    found = []
    for equation in _compat.jaxpr_of(closed).eqns:
        found.append(equation.primitive.name)
        for body in _compat.inner_jaxprs(equation):
            found += names(body)
    return found


def run(closed: Any, *arguments: Any) -> list[Any]:
    jaxpr = _compat.jaxpr_of(closed)
    return jax.core.eval_jaxpr(jaxpr, _compat.consts_of(closed), *arguments)


def test_a_gradient_of_weights_needs_no_transpose() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w))

    traced = jax.make_jaxpr(jax.grad(loss))(np.ones((3, 5)), np.ones((7, 3)))
    assert "transpose" in names(traced)
    flat = inline(traced)
    assert "transpose" not in names(flat)
    w, x = np.linspace(-1, 1, 15).reshape(3, 5), np.linspace(-2, 1, 21).reshape(7, 3)
    with jax.enable_x64(True):
        expected = run(jax.make_jaxpr(jax.grad(loss))(w, x), w, x)
        np.testing.assert_allclose(run(inline(jax.make_jaxpr(jax.grad(loss))(w, x)), w, x)[0], expected[0], rtol=1e-14)


def test_bodies_of_loops_are_rewritten_too() -> None:
    def f(w: jax.Array, xs: jax.Array) -> jax.Array:
        return lax.scan(lambda carry, x: (jnp.tanh(x @ carry.T).T @ x, 0.0), w, xs)[0]

    traced = jax.make_jaxpr(jax.grad(lambda w, xs: jnp.sum(f(w, xs))))(np.ones((3, 3)), np.ones((4, 3, 3)))
    flat = inline(traced)
    assert names(flat).count("transpose") < names(traced).count("transpose")
    np.testing.assert_allclose(
        run(flat, np.eye(3), np.ones((4, 3, 3)))[0], run(traced, np.eye(3), np.ones((4, 3, 3)))[0], rtol=1e-6
    )


@st.composite
def turned_products(draw: st.DrawFn) -> tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Dimension numbers with as many batch, contracted and free dimensions as wanted, shapes, and a permutation."""
    batch, contracted, left, right = (draw(st.integers(0, 2)) for _ in range(4))
    sizes = {kind: [draw(st.integers(1, 3)) for _ in range(count)] for kind, count in (("b", batch), ("c", contracted))}
    shapes, numbers = [], []
    for free in (left, right):
        dims = (
            [("b", n) for n in range(batch)] + [("c", n) for n in range(contracted)] + [("f", n) for n in range(free)]
        )
        dims = draw(st.permutations(dims))
        shapes.append(tuple(draw(st.integers(1, 3)) if kind == "f" else sizes[kind][n] for kind, n in dims))
        numbers.append(
            [tuple(dims.index((kind, n)) for n in range(count)) for kind, count in (("c", contracted), ("b", batch))]
        )
    dimension_numbers = tuple(tuple(side[kind] for side in numbers) for kind in (0, 1))
    permutation = tuple(draw(st.permutations(range(batch + left + right))))
    swap = (*range(batch), *range(batch + left, batch + left + right), *range(batch, batch + left))
    return dimension_numbers, *shapes, draw(st.sampled_from((permutation, swap)))  # type: ignore[return-value]


@settings(deadline=None)
@given(turned_products())
def test_any_product_that_is_turned_comes_out_the_same(case: Any) -> None:
    dimension_numbers, left, right, permutation = case

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.transpose(lax.dot_general(a, b, dimension_numbers), permutation)

    a = np.arange(1.0, 1 + np.prod(left, dtype=int), dtype=np.float32).reshape(left)
    b = np.arange(2.0, 2 + np.prod(right, dtype=int), dtype=np.float32).reshape(right)
    traced = jax.make_jaxpr(f)(a, b)
    flat = inline(traced)
    np.testing.assert_array_equal(run(flat, a, b)[0], run(traced, a, b)[0])  # whole numbers: no rounding
    batch = len(dimension_numbers[1][0])
    ends = len(left) - len(dimension_numbers[0][0])
    swaps = permutation == (*range(batch), *range(ends, len(permutation)), *range(batch, ends))
    assert ("transpose" in names(flat)) == ("transpose" in names(traced) and not swaps)


@pytest.mark.parametrize("why", ["read twice", "an output", "another permutation"])
def test_what_is_wanted_as_it_stands_stays(why: str) -> None:
    def f(a: jax.Array, b: jax.Array) -> Any:
        product = jnp.einsum("bij,bjk->bik", a, b)
        turned = lax.transpose(product, (2, 1, 0) if why == "another permutation" else (0, 2, 1))
        return {"read twice": (turned, product * 2), "an output": (turned, product)}.get(why, turned)

    traced = jax.make_jaxpr(f)(np.ones((2, 3, 4)), np.ones((2, 4, 5)))
    assert names(inline(traced)).count("transpose") == 1


def test_precisions_go_with_their_operands() -> None:
    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.dot(a, b, precision=("highest", "default"), preferred_element_type=jnp.float32).T

    flat = inline(jax.make_jaxpr(f)(np.ones((2, 3), jnp.bfloat16), np.ones((3, 4), jnp.bfloat16)))
    (product,) = _compat.jaxpr_of(flat).eqns
    assert product.params["precision"] == (lax.Precision.DEFAULT, lax.Precision.HIGHEST)
    assert product.params["preferred_element_type"] == jnp.float32
    assert product.outvars[0].aval.shape == (4, 2)


def test_no_gradient_of_a_dense_layer_is_turned_in_a_model() -> None:
    """What transposes are left in an MLP's step stand behind no product."""
    model = build("mlp_nnx", "toy")
    flat = inline(jax.make_jaxpr(model.train_step)(model.abstract_state(), model.abstract_batch()))
    equations = _compat.jaxpr_of(flat).eqns
    products = {id(equation.outvars[0]) for equation in equations if equation.primitive.name == "dot_general"}
    turned = [one for one in equations if one.primitive.name == "transpose" and id(one.invars[0]) in products]
    assert products and not turned
