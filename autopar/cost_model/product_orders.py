"""In which order of dimensions does a matrix product read an operand, and what does XLA:CPU's take as it lies?

A product reads stacks of matrices, (batch, free, summed) × (batch, summed, free), each matrix in either orientation.  What lies
otherwise is copied first (:mod:`autopar.cost_model.operand_orders`), and then lies as wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autopar.products import ProductOrder, order_of

MATRIX = 2
"""Dimensions."""


def wanted_order(rank: int, summed: Sequence[int], batch: Sequence[int], side: int) -> tuple[int, ...]:
    """The order of dimensions that products want of their left (0) or right (1) operand."""
    free = tuple(dim for dim in range(rank) if dim not in summed and dim not in batch)
    return (*batch, *free, *summed) if side == 0 else (*batch, *summed, *free)


def is_read_as_it_lies(shape: Sequence[int], order: Sequence[int], batch: Sequence[int], *, plain: bool) -> bool:
    """Whether a product reads an operand without a copy: in the order wanted, or matrices in either orientation.

    Unless the product is ``plain``, of (stacks of) matrices, XLA makes it so first, and then turns by a copy what has
    dimensions of size one besides.
    """
    long = [dim for dim in order if shape[dim] > 1]
    stacked = [dim for dim in long if dim in batch]
    rest = sorted(dim for dim in long if dim not in batch)
    either = len(rest) == MATRIX and (plain or len(long) == len(shape))
    return long == sorted(long) or (either and [*stacked, *rest] == sorted(long))


def is_plain(ranks: Sequence[int], batch: Sequence[int]) -> bool:
    """Whether a product is of (stacks of) matrices."""
    return set(ranks) == {len(batch) + MATRIX}


def product_order(operands: Sequence[Sequence[int]], numbers: Any, *, on_cpu: bool) -> ProductOrder:
    """How the operands lie that a product reads; ``numbers`` are the dimension numbers of ``lax.dot_general``.

    Elsewhere than on CPU operands are read as they lie, however many dimensions they have.
    """
    contracting, batch = numbers
    plain = is_plain([len(shape) for shape in operands], batch[0])
    turned = []
    for side, shape in enumerate(operands):
        order = wanted_order(len(shape), contracting[side], batch[side], side)
        as_it_lies = not on_cpu or is_read_as_it_lies(shape, order, batch[side], plain=plain)
        turned.append(as_it_lies and _innermost(order, shape) != _innermost(range(len(shape)), shape))
    return order_of(left_turned=turned[0], right_turned=turned[1])


def _innermost(order: Iterable[int], shape: Sequence[int]) -> int | None:
    """The last dimension in an order that has more than one element."""
    return next((dim for dim in reversed([*order]) if shape[dim] > 1), None)
