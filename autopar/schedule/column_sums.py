"""In how many steps does a GPU add up columns?

A gradient of a bias is the sum of R rows of C columns.  With R = P · Q and row r = p · Q + q,

    Σ_r x[r, c]  =  Σ_p ( Σ_q x[p, q, c] ),      p < P,  q < Q.

XLA:GPU gives each block of threads 32 columns with all their rows, so C = 768 keeps 24 of an H100's 132 processors at work.
From more than 4,096 rows on it adds up in two steps, as above.  Below that the sums alone still cost little; but what a
kernel writes beside them (arrays of the whole size, made of the same operands) those few blocks write as well.  Where a
batch is cut into microbatches its sums have so few rows: a ViT's step in 4 of them takes 82.5 ms on an H100, with P = 16
it takes 66.4.

The barrier between the steps keeps XLA from making one of them again.  Other platforms add up in one step.
"""

from __future__ import annotations

import math

import jax
from jax import lax
from jax import numpy as jnp

ROWS = range(512, 4096 + 1)
"""That are worth two steps and do not get them from XLA."""
MOST_COLUMNS = 8192
"""More of them keep all processors busy by themselves."""
PARTS = range(16, 64 + 1)
"""That rows may be cut into: the least that divides them."""


def parts_of(shape: tuple[int, ...], axes: tuple[int, ...]) -> int | None:
    """How many parts the rows are cut into when an array of this shape is added up along ``axes``; None for one step."""
    if axes != tuple(range(len(axes))):
        return None  # rows do not lie one after the other
    rows, columns = math.prod(shape[: len(axes)]), math.prod(shape[len(axes) :])
    if rows not in ROWS or not 1 < columns <= MOST_COLUMNS:
        return None
    return next((parts for parts in PARTS if rows % parts == 0), None)


def sum_in_two_steps(x: jax.Array, *, dims: int, parts: int) -> jax.Array:
    """Real floats added up along their first ``dims`` dimensions, each of ``parts`` first, in no less than float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rows, columns = math.prod(x.shape[:dims]), x.shape[dims:]
    sums = jnp.sum(lax.reshape(x, (parts, rows // parts, *columns)), axis=1, dtype=wide)
    return jnp.sum(lax.optimization_barrier(sums), axis=0, dtype=wide).astype(x.dtype)
