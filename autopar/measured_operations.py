"""Which primitives does a profile hold a rate of, and how is one of them made to repeat?

The functions map an array of numbers between 0 and 1 to one of the same shape, and a loop applies them again and again:
they keep values where they are costly to compute, and neither overflow nor settle on denormal numbers.

Primitives that are not here run at the rate of matrix products: additions, comparisons and the like, which memory outweighs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from autopar.graph.flops import WEIGHTS

ELEMENTS, ROW, SHORT_ROW, COLUMNS, IMAGE = 1 << 16, 256, 4, 128, (8, 8, 16)


@dataclass(frozen=True)
class Operation:
    """A primitive, the function that runs it once, and how often it is repeated; ``like_it`` are priced by the same rate."""

    primitive: str
    apply: Callable[[jax.Array], jax.Array]
    trips: int = 64
    elements: int = ELEMENTS
    like_it: tuple[str, ...] = ()

    def flops(self, elements: int) -> float:
        """FLOPs of applying it once to so many elements, as :mod:`autopar.graph.flops` counts them."""
        of_element = math.log2(elements) if self.primitive == "sort" else float(WEIGHTS.get(self.primitive, 1))
        return elements * of_element


def _random_bits(x: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(lax.bitcast_convert_type(x[:2], jnp.uint32), impl="threefry2x32")
    return x + lax.convert_element_type(jax.random.bits(key, x.shape), jnp.float32) * 1e-12


def _each_row(x: jax.Array, reduction: Callable[..., jax.Array], row: int = ROW) -> jax.Array:
    rows = x.reshape(-1, row)
    return (rows * 0.5 + reduction(rows, axis=1, keepdims=True) * (0.5 / row)).reshape(-1)


def _each_column(x: jax.Array) -> jax.Array:
    rows = x.reshape(-1, COLUMNS)
    return (rows * 0.5 + jnp.sum(rows, axis=0, keepdims=True) * (0.5 / len(rows))).reshape(-1)


def _pooled(images: jax.Array) -> jax.Array:
    return lax.reduce_window(images, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _pools(x: jax.Array) -> jax.Array:
    images = x.reshape(-1, *IMAGE)
    rows, columns, features = (size // stride for size, stride in zip(IMAGE, (2, 2, 1), strict=True))
    pooled = jnp.broadcast_to(_pooled(images)[:, :, None, :, None], (len(images), rows, 2, columns, 2, features))
    return (images * 0.5 + pooled.reshape(images.shape) * 0.5).reshape(-1)


def _gradient_of_pools(x: jax.Array) -> jax.Array:
    """Each pool's gradient goes to the largest of its elements."""
    images = x.reshape(-1, *IMAGE)
    _, pull = jax.vjp(_pooled, images)
    (gradient,) = pull(images[:, ::2, ::2])
    return (images * 0.5 + gradient * 0.4 + 0.05).reshape(-1)


def _shuffled_and_sorted(x: jax.Array) -> jax.Array:
    spread = x * 977.0
    return lax.sort(spread - lax.floor(spread))


LONG_ROWS = Operation("reduce_sum", lambda x: _each_row(x, jnp.sum))
SHORT_ROWS = Operation("reduce_sum", lambda x: _each_row(x, jnp.sum, SHORT_ROW), trips=16)
OF_COLUMNS = Operation("reduce_sum", _each_column)
"""The same sums, of elements that lie otherwise."""

OPERATIONS = (
    Operation("exp", lambda x: lax.exp(-x), like_it=("exp2",)),
    Operation("log", lambda x: lax.log(x + 1.5)),
    Operation("tanh", lambda x: lax.tanh(x + 0.1), like_it=("sinh", "cosh", "tan")),
    Operation("logistic", lax.logistic),
    Operation("erf", lambda x: lax.erf(x + 0.1)),
    Operation("erfc", lax.erfc),
    Operation("erf_inv", lambda x: lax.erf_inv(x * 0.5 + 0.1)),
    Operation("log1p", lambda x: lax.log1p(x + 0.1)),
    Operation("expm1", lambda x: lax.expm1(-x) + 1.0),
    Operation("sin", lambda x: lax.sin(x + 0.5)),
    Operation("cos", lax.cos),
    Operation("pow", lambda x: lax.pow(x * 0.5 + 0.3, x)),
    Operation("div", lambda x: 1.0 / (x + 0.5), like_it=("rem",)),
    Operation("sqrt", lambda x: lax.sqrt(x + 0.1)),
    Operation("rsqrt", lambda x: lax.rsqrt(x + 1.0)),
    Operation("random_bits", _random_bits, trips=16, like_it=("threefry2x32",)),
    LONG_ROWS,
    Operation("reduce_max", lambda x: _each_row(x, jnp.max), like_it=("reduce_min",)),
    Operation("argmax", lambda x: x + jnp.argmax(x).astype(jnp.float32) * 1e-12, trips=16, like_it=("argmin",)),
    Operation(
        "reduce_window_max", _pools, trips=16, like_it=("reduce_window_min", "reduce_window_sum", "reduce_window")
    ),
    Operation("select_and_scatter_add", _gradient_of_pools, trips=4, like_it=("select_and_gather_add",)),
    Operation("cumsum", lambda x: lax.cumsum(x.reshape(-1, ROW), axis=1).reshape(-1) / ROW + 0.1, trips=16),
    Operation("sort", _shuffled_and_sorted, trips=4),
)
