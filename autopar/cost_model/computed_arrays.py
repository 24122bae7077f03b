"""Which arrays does an operator make that computes?

One per result, but for what XLA simplifies or takes apart: work that was done before is not done again, x + 0 is x, adding to
scattered sums scatters onto the addend, dividing by what is broadcast multiplies with its inverse, and a sum over one element is
another shape of it.  Products, convolutions (:mod:`autopar.cost_model.operand_orders`), random bits and the gradient of max
pooling (:mod:`autopar.cost_model.expansions`) need arrays besides.  Read off compiled programs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from autopar import _compat
from autopar.cost_model.array_list import LIBRARY_TYPES, ArrayList
from autopar.cost_model.expansions import random_bits, scattered_to_greatest, threefry
from autopar.cost_model.made_again import is_made_again
from autopar.cost_model.nodes import Form, Node
from autopar.cost_model.operand_orders import (
    is_made_anew,
    operands_of_convolution,
    operands_of_product,
    result_of_convolution,
    result_of_product,
)
from autopar.cost_model.places import WHOLE_REDUCTION
from autopar.graph.fusion import COSTLY, FREE, FUSIBLE, INPUT_FUSIBLE
from autopar.graph.ir import Operator
from autopar.graph.zeros import is_zero_literal
from autopar.schedule.spmd import FREE_MOVES, Buffer, Reshard, Run, SpmdProgram

ELEMENTWISE_EXCEPTIONS = frozenset(
    """broadcast_in_dim transpose rev pad slice dynamic_slice gather concatenate iota reshape squeeze expand_dims
    copy random_bits""".split()
)
"""Fusible primitives that do not map equal positions to equal positions."""

LIBRARY_WORK = frozenset(
    """abs add add_any broadcast_in_dim ceil convert_element_type copy div erf exp exp2 expand_dims expm1 floor integer_pow
    log log1p logistic max min mul neg pow reduce_max reduce_min reduce_sum reshape round rsqrt sign sqrt square squeeze
    stop_gradient sub tanh""".split()
)
"""What XLA:CPU's library computes in one kernel with a reduction (:mod:`autopar.cost_model.library`)."""

REDUCTIONS_OF_VALUES = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())
"""Of one element the result is that element."""

RESHAPES = REDUCTIONS_OF_VALUES | frozenset("reshape squeeze expand_dims".split())

SCATTERED_SUMS = frozenset(("scatter-add", "select_and_scatter_add"))

ADDITIONS = frozenset(("add", "add_any"))

PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))

DRAWS = frozenset(("random_bits", "threefry2x32"))

_SINGLE_USE_WORK = ("scatter", "dynamic_update_slice")


class ComputedArrays:
    """Adds the nodes of operators that are no loops to a list."""

    def __init__(self, nodes: ArrayList) -> None:
        self._nodes, program = nodes, nodes.program
        self._uses = Counter(
            buffer
            for step in program.steps
            for buffer in ((step.source,) if isinstance(step, Reshard) else set(step.operands))
        )
        self._uses.update(program.outputs)
        self._kept_anyway = _kept_anyway(program)
        self._kept_narrow = _read_as_they_are(program) if nodes.on_cpu else frozenset()
        self._run: dict[object, list[tuple[Any, int]]] = {}

    def add(self, step: Run) -> None:
        """The nodes of one operator."""
        operator = step.operator
        inputs = tuple(self._nodes.at[buffer] for buffer in step.operands if buffer is not None)
        if operator.primitive == "dot_general":
            number, _ = self._computed(Form.KERNEL, operands_of_product(self._nodes, step), step)
            self._nodes[number].is_made_anew = is_made_anew(self._nodes, step)
            self._nodes.at[step.results[0]] = result_of_product(self._nodes, step, number)
        elif operator.primitive == "conv_general_dilated" and self._nodes.on_cpu:
            number, _ = self._computed(Form.KERNEL, operands_of_convolution(self._nodes, step), step)
            self._nodes.at[step.results[0]] = result_of_convolution(self._nodes, step, number)
        elif operator.primitive == "optimization_barrier":
            self._barrier(step)
        elif operator.primitive == "threefry2x32" and self._nodes.on_cpu:
            threefry(self._nodes, step)
        elif len(step.results) == 1:
            self._plain(step, inputs)
        else:
            for buffer in step.results:
                number = self._nodes.buffer(
                    self._form(operator), inputs, buffer, self._nodes.tenant_of(operator), operator
                )
                self._draw(self._nodes[number], operator, buffer)

    def _barrier(self, step: Run) -> None:
        """Older XLA:CPUs drop barriers before they look for equal work, which undoes rematerialisation; others keep them.

        Those that XLA:CPU keeps stand while it fuses, orders kernels and lets arrays write over others.
        """
        operator = step.operator
        waits: tuple[int, ...] = ()
        if self._nodes.on_cpu and _compat.cpu_keeps_barriers():
            given = tuple(dict.fromkeys(self._nodes.at[operand] for operand in step.operands if operand is not None))
            waits = (self._nodes.add(Form.BARRIER, given, 0, self._nodes.tenant_of(operator), -1, operator),)
        for operand, result in zip(step.operands, step.results, strict=True):
            if operand is None:
                self._nodes.buffer(Form.CHEAP, (), result, self._nodes.tenant_of(operator), operator)
            elif self._nodes.on_cpu and not waits:
                self._nodes.at[result] = self._nodes.at[operand]
            else:
                self._nodes.buffer(
                    Form.RENAME, (self._nodes.at[operand], *waits), result, self._nodes.tenant_of(operator), operator
                )

    def _form(self, operator: Operator) -> Form:
        name = operator.primitive
        if name in FREE:
            return Form.RENAME
        if name in COSTLY:
            return Form.COSTLY
        if name in FUSIBLE:
            return Form.CHEAP
        if name.startswith(_SINGLE_USE_WORK):
            return Form.IN_PLACE
        if name in INPUT_FUSIBLE:
            return Form.REDUCE
        return Form.KERNEL

    def _plain(self, step: Run, inputs: tuple[int, ...]) -> None:
        operator = step.operator
        form = Form.RENAME if self._reduces_nothing(step) else self._form(operator)
        elementwise = operator.primitive in FUSIBLE and operator.primitive not in ELEMENTWISE_EXCEPTIONS
        if operator.primitive in ADDITIONS and (onto := self._scattered_onto(step)) is not None:
            onto = self._nodes.own_copy(onto[0]), *onto[1:]
            self._nodes.buffer(Form.IN_PLACE, onto, step.results[0], self._nodes.tenant_of(operator), operator)
            return
        if operator.primitive == "select_and_scatter_add" and self._nodes.on_cpu:
            scattered_to_greatest(self._nodes, step, inputs)
            return
        if operator.primitive == "random_bits" and self._nodes.on_cpu:
            random_bits(self._nodes, step, inputs)
            return
        if operator.primitive in ADDITIONS and (other := self._but_zero(inputs)) is not None:
            self._nodes.at[step.results[0]] = other
            return
        if form is Form.RENAME and (renamed := self._as_before(step, inputs)) is not None:
            self._nodes.at[step.results[0]] = renamed
            return
        if form is Form.IN_PLACE and inputs:
            inputs = self._nodes.own_copy(inputs[0]), *inputs[1:]
        if elementwise:
            shape = self._nodes.shape_of(step.results[0])
            inputs = tuple(self._nodes.widened(node, shape) for node in inputs)
        multiplies = operator.primitive == "div" and self._multiplies(step, inputs)
        if multiplies and self._nodes.on_cpu and len(inputs) == 2:
            inputs = inputs[0], self._inverse(inputs[1])
        number, fresh = self._computed(form, inputs, step)
        if not fresh:
            return
        node = self._nodes[number]
        node.elementwise = elementwise
        if multiplies:
            node.form = Form.CHEAP
        is_weighed = elementwise and form is Form.COSTLY and not self._nodes.on_cpu
        if is_weighed and step.results[0] not in self._kept_anyway and self._is_computed_again(node, operator):
            node.form = Form.CHEAP
        self._draw(node, operator, step.results[0])
        given = [self._nodes[i] for i in set(inputs)]
        large = [other.size_bytes for other in given if not other.widens and other.size_bytes >= node.size_bytes]
        node.unary = len(large) <= 1 or sum(other.size_bytes for other in given) <= node.size_bytes
        node.widens = operator.primitive in ("broadcast_in_dim", "iota")
        node.is_zero = (
            operator.primitive == "broadcast_in_dim" and not inputs and is_zero_literal(operator.equation.invars[0])
        )
        node.is_zero |= operator.primitive == "square" and given[0].is_zero
        types = {self._nodes.dtype_of(value) for value in (*operator.operands, *operator.results) if value is not None}
        node.in_library = operator.primitive in LIBRARY_WORK and types <= LIBRARY_TYPES
        if form is Form.REDUCE and step.operands[0] is not None:
            shape = self._nodes.shape_of(step.operands[0])
            node.is_short = all(shape[dim] <= WHOLE_REDUCTION for dim in operator.equation.params.get("axes", ()))

    def _is_computed_again(self, node: Node, operator: Operator) -> bool:
        """XLA:GPU weighs arithmetic against memory: it reads narrower floats again, and, where the device's arithmetic is cheaper
        than its memory, once more the one array that it was made of besides arguments of the program (a product and its bias).
        What a product or a collective reads is in memory anyway.
        """
        if node.size_bytes == node.source_bytes > 0 and len(node.inputs) == 1:
            itemsize_bytes = self._nodes.program.values[node.value].itemsize_bytes
            return len(node.origins) == 1 and is_made_again(operator.primitive, itemsize_bytes, self._nodes.device)
        return node.size_bytes > node.source_bytes > 0

    def _draw(self, node: Node, operator: Operator, result: Buffer) -> None:
        """XLA:GPU hashes random bits inside the kernel that wants them, and only once.

        So of what they come to, the first array that several read is kept instead: of a dropout its mask.
        """
        if self._nodes.on_cpu or node.form not in (Form.CHEAP, Form.COSTLY, Form.RENAME):
            return
        if operator.primitive not in DRAWS and not any(self._nodes[i].is_drawn for i in node.inputs):
            return
        node.is_drawn = self._uses[result] == 1
        if not node.is_drawn and node.form is Form.CHEAP:
            node.form = Form.COSTLY

    def _multiplies(self, step: Run, inputs: tuple[int, ...]) -> bool:
        """Whether a division is a product to XLA: with the inverse of what is broadcast, or of a constant."""
        if len(inputs) == 2:
            return self._nodes[inputs[1]].widens
        is_whole = "int" in self._nodes.program.values[step.results[0].value].dtype
        return step.operands[-1] is None and not is_whole

    def _inverse(self, wide: int) -> int:
        """What is multiplied with instead of dividing by what is broadcast: the inverse, broadcast."""
        shape, narrow = self._nodes[wide].shape, self._nodes[wide].inputs
        if len(narrow) != 1:
            return wide
        inverse = self._nodes.once((*narrow, "inverse"), partial(self._nodes.again, *narrow, Form.COSTLY))
        node = self._nodes[inverse]
        node.elementwise = True
        node.in_library = self._nodes.dtype_of(node.value) in LIBRARY_TYPES
        return self._nodes.once((inverse, shape), partial(self._nodes.broadcast, inverse, shape))

    def _as_before(self, step: Run, inputs: tuple[int, ...]) -> int | None:
        """For what is reshaped to what it was before it was reshaped: that."""
        result, number = step.results[0], inputs[0] if inputs else None
        while number is not None:
            node = self._nodes[number]
            if node.shape == self._nodes.shape_of(result) and node.value >= 0:
                return number if self._nodes.dtype_of(node.value) == self._nodes.dtype_of(result.value) else None
            reshaped = node.form is Form.RENAME and node.source is not None and node.source.primitive in RESHAPES
            number = node.inputs[0] if reshaped else None
        return None

    def _reduces_nothing(self, step: Run) -> bool:
        """Whether all dimensions reduced have one element on a device: XLA reshapes instead."""
        if step.operator.primitive not in REDUCTIONS_OF_VALUES or step.operands[0] is None:
            return False
        return math.prod(self._nodes.shape_of(step.operands[0])) == math.prod(self._nodes.shape_of(step.results[0]))

    def _but_zero(self, inputs: tuple[int, ...]) -> int | None:
        """For x + 0, where no compiler adds: x."""
        if len(inputs) != 2:
            return None
        first, second = (self._nodes[node] for node in inputs)
        if first.shape != second.shape or first.is_zero == second.is_zero:
            return None
        return inputs[0] if second.is_zero else inputs[1]

    def _scattered_onto(self, step: Run) -> tuple[int, ...] | None:
        """For x + scatter-add(0, …), which XLA turns into scatter-add(x, …): the inputs of that scatter."""
        for position, buffer in enumerate(step.operands):
            other = step.operands[1 - position]
            if buffer is None or other is None or other == buffer or self._uses[buffer] != 1:
                continue
            scatter = self._nodes[self._nodes.at[buffer]]
            if (
                scatter.form is not Form.IN_PLACE
                or scatter.source is None
                or scatter.source.primitive not in SCATTERED_SUMS
            ):
                continue
            if scatter.value == buffer.value and self._nodes[scatter.inputs[0]].is_zero:
                return self._nodes.at[other], *scatter.inputs[1:]
        return None

    def _computed(self, form: Form, inputs: tuple[int, ...], step: Run) -> tuple[int, bool]:
        """The node of an operator's result, and whether it is new: equal work is done once, as XLA sees to it.

        XLA:CPU drops what is of size one from a result that is only broadcast, and then no longer finds it equal to another that
        is read as it is: of a layer norm whose backward pass is at hand the first of two equal inverse roots is another array.
        """
        operator, result = step.operator, step.results[0]
        is_narrow = len(inputs) == 1 and result in self._kept_narrow
        alike = self._run.setdefault((operator.primitive, inputs, step.strategy.factors, is_narrow), [])
        for equation, known in alike:
            if same_equation(equation, operator.equation):
                self._nodes.at[result] = known
                return known, False
        number = self._nodes.buffer(form, inputs, result, self._nodes.tenant_of(operator), operator)
        alike.append((operator.equation, number))
        return number, True


def same_equation(one: Any, other: Any) -> bool:
    """Whether two equations of one primitive with the same array operands compute the same thing."""
    if one is other:
        return True
    literals = [
        [str(atom) if isinstance(atom, _compat.Literal) else None for atom in equation.invars]
        for equation in (one, other)
    ]
    return literals[0] == literals[1] and str(one.params) == str(other.params)


def _kept_anyway(program: SpmdProgram) -> frozenset[Buffer]:
    """Buffers that matrix products, convolutions or collectives read as they are, or that leave the program."""
    found = set(program.outputs)
    for step in program.steps:
        if isinstance(step, Reshard):
            found.update((step.source,) if any(move.kind not in FREE_MOVES for move in step.moves) else ())
        elif step.operator.primitive in PRODUCTS:
            found.update(step.operands)
    return frozenset(buffer for buffer in found if buffer is not None)


def _read_as_they_are(program: SpmdProgram) -> frozenset[Buffer]:
    """Buffers of arrays with a dimension of size one that not all of their readers broadcast."""
    values = program.values

    def narrow(buffers: Iterable[Buffer | None]) -> set[Buffer]:
        return {one for one in buffers if one is not None and 1 in values[one.value].shape}

    def size(buffer: Buffer) -> int:
        return math.prod(values[buffer.value].shape)

    found = narrow(program.outputs)
    for step in program.steps:
        if isinstance(step, Reshard):
            found |= narrow((step.source,))
        else:
            found |= {one for one in narrow(step.operands) if not step.results or size(one) >= size(step.results[0])}
    return frozenset(found)
