"""Which arrays does an operator make that computes?

One per result, but for what XLA writes in another way (:mod:`autopar.cost_model.simplified`).  Products and convolutions
(:mod:`autopar.cost_model.operand_orders`), random bits and the gradient of max pooling (:mod:`autopar.cost_model.expansions`)
need arrays besides.  Read off compiled programs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
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
from autopar.cost_model.simplified import (
    as_before,
    but_zero,
    inverse,
    multiplies,
    reduces_nothing,
    same_equation,
    scattered_onto,
)
from autopar.graph.fusion import COSTLY, FREE, FUSIBLE, INPUT_FUSIBLE, PRODUCTS
from autopar.graph.ir import Operator
from autopar.graph.zeros import is_zero_literal
from autopar.schedule.spmd import ADDITIONS, FREE_MOVES, Buffer, Reshard, Run, SpmdProgram

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

TAKEN_APART = {"random_bits": random_bits, "select_and_scatter_add": scattered_to_greatest}
"""By XLA:CPU, and who does it."""

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
        self._kept_anyway = frozenset() if nodes.on_cpu else _kept_anyway(program)
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
        """Of an operator with one result."""
        operator, nodes = step.operator, self._nodes
        form = Form.RENAME if reduces_nothing(nodes, step) else self._form(operator)
        if self._is_something_else(step, inputs, form):
            return
        if form is Form.IN_PLACE and inputs:
            inputs = nodes.own_copy(inputs[0]), *inputs[1:]
        elementwise = operator.primitive in FUSIBLE and operator.primitive not in ELEMENTWISE_EXCEPTIONS
        if elementwise:
            shape = nodes.shape_of(step.results[0])
            inputs = tuple(nodes.widened(node, shape) for node in inputs)
        is_product = operator.primitive == "div" and multiplies(nodes, step, inputs)
        if is_product and nodes.on_cpu and len(inputs) == 2:
            inputs = inputs[0], inverse(nodes, inputs[1])
        number, fresh = self._computed(form, inputs, step)
        if not fresh:
            return
        node = nodes[number]
        node.elementwise = elementwise
        is_weighed = elementwise and form is Form.COSTLY and not nodes.on_cpu
        is_left = is_weighed and step.results[0] not in self._kept_anyway and self._is_computed_again(node, operator)
        if is_product or is_left:
            node.form = Form.CHEAP
        self._draw(node, operator, step.results[0])
        self._describe(node, step)

    def _is_something_else(self, step: Run, inputs: tuple[int, ...], form: Form) -> bool:
        """Whether XLA makes of the operator what is no array of its own, or a loop or a search; it is in the list then."""
        name, nodes, result = step.operator.primitive, self._nodes, step.results[0]
        if name in ADDITIONS and (onto := scattered_onto(nodes, step, self._uses)) is not None:
            onto = nodes.own_copy(onto[0]), *onto[1:]
            nodes.buffer(Form.IN_PLACE, onto, result, nodes.tenant_of(step.operator), step.operator)
            return True
        if name in TAKEN_APART and nodes.on_cpu:
            TAKEN_APART[name](nodes, step, inputs)
            return True
        other = None
        if name in ADDITIONS:
            other = but_zero(nodes, inputs)
        elif form is Form.RENAME:
            other = as_before(nodes, step, inputs)
        if other is not None:
            nodes.at[result] = other
        return other is not None

    def _describe(self, node: Node, step: Run) -> None:
        """What fusion will ask of an array."""
        operator, nodes = step.operator, self._nodes
        given = [nodes[i] for i in set(node.inputs)]
        large = [other.size_bytes for other in given if not other.widens and other.size_bytes >= node.size_bytes]
        node.unary = len(large) <= 1 or sum(other.size_bytes for other in given) <= node.size_bytes
        node.widens = operator.primitive in ("broadcast_in_dim", "iota")
        node.reshapes = node.form is Form.RENAME and any(other.shape != node.shape for other in given)
        node.is_number = operator.primitive == "broadcast_in_dim" and not given
        node.is_zero = node.is_number and is_zero_literal(operator.equation.invars[0])
        node.is_zero |= operator.primitive == "square" and given[0].is_zero
        types = {nodes.dtype_of(value) for value in (*operator.operands, *operator.results) if value is not None}
        node.in_library = operator.primitive in LIBRARY_WORK and types <= LIBRARY_TYPES
        if node.form is Form.REDUCE and step.operands[0] is not None:
            shape = nodes.shape_of(step.operands[0])
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
