"""What does XLA write in another way before it decides which arrays it keeps?

    x + 0                          x
    x + scatter-add(0, …)          scatter-add(x, …)
    reshape(reshape(x))            x, where it comes back to its shape
    a sum over one element         another shape of it
    x / broadcast(y)               x · broadcast(1 / y), on CPU with an array for 1 / y
    x / c                          x · (1 / c)

And work that was done before is not done again, for which two equations have to be the same.  Read off compiled programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from autopar import _compat
from autopar.cost_model.array_list import LIBRARY_TYPES, ArrayList
from autopar.cost_model.nodes import Form
from autopar.schedule.spmd import Buffer, Run

REDUCTIONS_OF_VALUES = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())
"""Of one element the result is that element."""

RESHAPES = REDUCTIONS_OF_VALUES | frozenset("reshape squeeze expand_dims".split())

SCATTERED_SUMS = frozenset(("scatter-add", "select_and_scatter_add"))


def multiplies(nodes: ArrayList, step: Run, inputs: tuple[int, ...]) -> bool:
    """Whether a division is a product to XLA: with the inverse of what is broadcast, or of a constant."""
    if len(inputs) == 2:
        return nodes[inputs[1]].widens
    is_whole = "int" in nodes.program.values[step.results[0].value].dtype
    return step.operands[-1] is None and not is_whole


def inverse(nodes: ArrayList, wide: int) -> int:
    """What is multiplied with instead of dividing by what is broadcast: the inverse, broadcast."""
    shape, narrow = nodes[wide].shape, nodes[wide].inputs
    if len(narrow) != 1:
        return wide
    made = nodes.once((*narrow, "inverse"), partial(nodes.again, *narrow, Form.COSTLY))
    node = nodes[made]
    node.elementwise = True
    node.in_library = nodes.dtype_of(node.value) in LIBRARY_TYPES
    return nodes.once((made, shape), partial(nodes.broadcast, made, shape))


def as_before(nodes: ArrayList, step: Run, inputs: tuple[int, ...]) -> int | None:
    """For what is reshaped to what it was before it was reshaped: that."""
    result, number = step.results[0], inputs[0] if inputs else None
    while number is not None:
        node = nodes[number]
        if node.shape == nodes.shape_of(result) and node.value >= 0:
            return number if nodes.dtype_of(node.value) == nodes.dtype_of(result.value) else None
        reshaped = node.form is Form.RENAME and node.source is not None and node.source.primitive in RESHAPES
        number = node.inputs[0] if reshaped else None
    return None


def reduces_nothing(nodes: ArrayList, step: Run) -> bool:
    """Whether all dimensions reduced have one element on a device: XLA reshapes instead."""
    if step.operator.primitive not in REDUCTIONS_OF_VALUES or step.operands[0] is None:
        return False
    return math.prod(nodes.shape_of(step.operands[0])) == math.prod(nodes.shape_of(step.results[0]))


def but_zero(nodes: ArrayList, inputs: tuple[int, ...]) -> int | None:
    """For x + 0, where no compiler adds: x."""
    if len(inputs) != 2:
        return None
    first, second = (nodes[node] for node in inputs)
    if first.shape != second.shape or first.is_zero == second.is_zero:
        return None
    return inputs[0] if second.is_zero else inputs[1]


def scattered_onto(nodes: ArrayList, step: Run, uses: Mapping[Buffer | None, int]) -> tuple[int, ...] | None:
    """For x + scatter-add(0, …), which XLA turns into scatter-add(x, …): the inputs of that scatter."""
    for position, buffer in enumerate(step.operands):
        other = step.operands[1 - position]
        if buffer is None or other is None or other == buffer or uses[buffer] != 1:
            continue
        scatter = nodes[nodes.at[buffer]]
        if (
            scatter.form is not Form.IN_PLACE
            or scatter.source is None
            or scatter.source.primitive not in SCATTERED_SUMS
        ):
            continue
        if scatter.value == buffer.value and nodes[scatter.inputs[0]].is_zero:
            return nodes.at[other], *scatter.inputs[1:]
    return None


def same_equation(one: Any, other: Any) -> bool:
    """Whether two equations of one primitive with the same array operands compute the same thing."""
    if one is other:
        return True
    literals = [
        [str(atom) if isinstance(atom, _compat.Literal) else None for atom in equation.invars]
        for equation in (one, other)
    ]
    return literals[0] == literals[1] and str(one.params) == str(other.params)
