"""How is a matrix product written whose operands lie in one order or another?

plain           [m, k] × [k, n]        as a layer multiplies
right turned    [m, k] × [n, k]        as the gradient of its input does
left turned     [k, m] × [k, n]        as that of its weights does
"""

from __future__ import annotations

import jax
from jax import lax

from autopar.products import ProductOrder

_SUMMED = {ProductOrder.PLAIN: (1, 0), ProductOrder.RIGHT_TURNED: (1, 1), ProductOrder.LEFT_TURNED: (0, 0)}
"""Dimensions of the left and the right operand."""


def operand_shapes(
    order: ProductOrder, rows: int, summed: int, columns: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the left and the right operand."""
    left, right = (rows, summed), (summed, columns)
    if order is ProductOrder.LEFT_TURNED:
        return left[::-1], right
    return left, right[::-1] if order is ProductOrder.RIGHT_TURNED else right


def multiplied(left: jax.Array, right: jax.Array, *, order: ProductOrder) -> jax.Array:
    """[rows, columns]."""
    summed_left, summed_right = _SUMMED[order]
    return lax.dot_general(left, right, (((summed_left,), (summed_right,)), ((), ())))
