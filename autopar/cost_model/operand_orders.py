"""In which order of dimensions do XLA:CPU's products and convolutions read their operands and leave their results?

A product reads (stacks of) matrices in orders of its own (:mod:`autopar.cost_model.product_orders`) and leaves
(batch, free, free); a convolution reads (batch, space, features) and (space, inward, outward).  What lies otherwise is copied
first.  The result of a product of more than matrices is another shape of the matrices' bytes: no kernel that reads it so can
write over it.
"""

from __future__ import annotations

import math
from functools import partial

from autopar.cost_model.array_list import ArrayList
from autopar.cost_model.nodes import Form
from autopar.cost_model.product_orders import MATRIX, is_plain, is_read_as_it_lies, wanted_order
from autopar.schedule.spmd import Run


def operands_of_product(nodes: ArrayList, step: Run) -> tuple[int, ...]:
    """What a product reads."""
    contracting, batch = step.operator.equation.params["dimension_numbers"]
    inputs = []
    plain = is_plain([len(nodes.shape_of(buffer)) for buffer in step.operands if buffer is not None], batch[0])
    for side, buffer in enumerate(step.operands):
        assert buffer is not None
        node = nodes.at[buffer] if batch[side] else _turned(nodes, nodes.at[buffer])
        shape = nodes[node].shape
        order = wanted_order(len(shape), contracting[side], batch[side], side)
        if nodes.on_cpu and not is_read_as_it_lies(shape, order, batch[side], plain=plain):
            node = nodes.relayout_for(step.operator, node, order)
        elif len(shape) > len(batch[side]) + 2:
            node = nodes.once((node, "matrix"), partial(nodes.again, node, Form.RENAME))
            nodes[node].reshapes = True
        inputs.append(node)
    return tuple(inputs)


def is_made_anew(nodes: ArrayList, step: Run) -> bool:
    """Whether XLA:CPU turns a product of matrices round: both are summed over their rows, as for the gradient of a matrix.

    Products of more than matrices are all made anew, in their order.
    """
    contracting, batch = step.operator.equation.params["dimension_numbers"]
    ranks = [len(nodes.shape_of(buffer)) for buffer in step.operands if buffer is not None]
    return not batch[0] and tuple(map(tuple, contracting)) == ((0,), (0,)) and ranks == [MATRIX, MATRIX]


def result_of_product(nodes: ArrayList, step: Run, product: int) -> int:
    """The array that a product leaves, where the product itself is of (stacks of) matrices."""
    contracting, batch = step.operator.equation.params["dimension_numbers"]
    shape, stacked = nodes.shape_of(step.results[0]), len(batch[0])
    if len(shape) <= stacked + 2:
        return product
    assert step.operands[0] is not None
    array = nodes.once((product, "array"), partial(nodes.again, product, Form.RENAME))
    nodes[array].shape = shape
    rows = len(nodes.shape_of(step.operands[0])) - len(contracting[0])
    nodes[product].shape = (
        *shape[:stacked],
        math.prod(shape[stacked:rows]),
        math.prod(shape[rows:]),
    )
    return array


def operands_of_convolution(nodes: ArrayList, step: Run) -> tuple[int, ...]:
    """What a convolution reads."""
    numbers = step.operator.equation.params["dimension_numbers"]
    batch, inward, *space = numbers.lhs_spec
    outward, summed, *window = numbers.rhs_spec
    inputs = []
    for buffer, order in zip(step.operands, ((batch, *space, inward), (*window, summed, outward)), strict=True):
        assert buffer is not None
        inputs.append(_in_order(nodes, nodes.at[buffer], order))
    return tuple(inputs)


def result_of_convolution(nodes: ArrayList, step: Run, made: int) -> int:
    """The array that a convolution leaves."""
    batch, features, *space = step.operator.equation.params["dimension_numbers"].out_spec
    return _in_order(nodes, made, (batch, *space, features))


def _turned(nodes: ArrayList, node: int) -> int:
    """A matrix as it lies where a product is written with its transpose: the product reads it in either orientation."""
    given = nodes.arrays.nodes
    while (
        (operator := given[node].source) is not None
        and operator.primitive == "transpose"
        and len(given[node].shape) == MATRIX
        and given[node].form is Form.CHEAP
        and given[given[node].inputs[0]].value != given[node].value  # which is no move of the transpose
    ):
        node = given[node].inputs[0]
    return node


def _in_order(nodes: ArrayList, node: int, order: tuple[int, ...]) -> int:
    """An array with its dimensions in an order, itself where no element moves for that."""
    long = [dim for dim in order if nodes[node].shape[dim] > 1]
    return node if long == sorted(long) else nodes.relayout(node, order)
