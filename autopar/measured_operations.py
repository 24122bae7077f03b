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

ELEMENTS, ROW = 1 << 16, 256


@dataclass(frozen=True)
class Operation:
    """A primitive, the function that runs it once, and how often it is repeated; ``like_it`` are priced by the same rate."""

    primitive: str
    apply: Callable[[jax.Array], jax.Array]
    trips: int = 64
    elements: int = ELEMENTS
    like_it: tuple[str, ...] = ()

    def flops_of_element(self) -> float:
        """FLOPs of one element, as :mod:`autopar.graph.flops` counts them."""
        return math.log2(self.elements) if self.primitive == "sort" else float(WEIGHTS.get(self.primitive, 1))


def _random_bits(x: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(lax.bitcast_convert_type(x[:2], jnp.uint32), impl="threefry2x32")
    return x + lax.convert_element_type(jax.random.bits(key, x.shape), jnp.float32) * 1e-12


def _each_row(x: jax.Array, reduction: Callable[..., jax.Array]) -> jax.Array:
    rows = x.reshape(-1, ROW)
    return (rows * 0.5 + reduction(rows, axis=1, keepdims=True) * (0.5 / ROW)).reshape(-1)


def _shuffled_and_sorted(x: jax.Array) -> jax.Array:
    spread = x * 977.0
    return lax.sort(spread - lax.floor(spread))


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
    Operation("reduce_sum", lambda x: _each_row(x, jnp.sum)),
    Operation("reduce_max", lambda x: _each_row(x, jnp.max), like_it=("reduce_min",)),
    Operation("argmax", lambda x: x + jnp.argmax(x).astype(jnp.float32) * 1e-12, trips=16, like_it=("argmin",)),
    Operation("cumsum", lambda x: lax.cumsum(x.reshape(-1, ROW), axis=1).reshape(-1) / ROW + 0.1, trips=16),
    Operation("sort", _shuffled_and_sorted, trips=4),
)
