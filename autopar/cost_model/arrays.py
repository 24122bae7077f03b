"""The local program as a list of arrays, one node per array that a compiler could keep (:mod:`autopar.cost_model.nodes`).

An operator becomes one node per result, a collective one node per move, and what compilers insert of themselves becomes
a node too: the copy into another order of dimensions that a matrix product or a collective along a minor dimension
wants, the buffers that a loop fills, the pieces into which XLA:CPU takes an all-to-all apart.  All sizes are those of one
device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from autopar import _compat
from autopar.cluster import Platform
from autopar.cost_model.array_list import LIBRARY_TYPES, ArrayList
from autopar.cost_model.expansions import random_bits, scattered_to_greatest, threefry
from autopar.cost_model.hosted import bytes_in_flight, has_host_memory
from autopar.cost_model.nodes import Arrays, Form, Node, Tenant
from autopar.cost_model.operand_orders import (
    is_made_anew,
    operands_of_convolution,
    operands_of_product,
    result_of_convolution,
    result_of_product,
)
from autopar.cost_model.reshard import COLLECTIVE_OF_MOVE, merging
from autopar.graph.build import LoopKind
from autopar.graph.fusion import COSTLY, FREE, FUSIBLE, INPUT_FUSIBLE
from autopar.graph.ir import Operator
from autopar.graph.merging import Merged, merged_values
from autopar.graph.zeros import is_zero_literal
from autopar.schedule.reshard import Move, MoveKind, after_move
from autopar.schedule.spmd import Buffer, Reshard, Run, SpmdProgram, local_bytes

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

NARROW = frozenset(("bfloat16", "float16"))

DRAWS = frozenset(("random_bits", "threefry2x32"))

_SINGLE_USE_WORK = ("scatter", "dynamic_update_slice")


def arrays_of(
    program: SpmdProgram, pairs: tuple[tuple[int, int], ...], platform: str, scan: tuple[int, int] | None = None
) -> Arrays:
    """The nodes of a program; ``pairs`` are its donated inputs and the outputs that take their place.

    In the body of a ``scan`` (i, k) the inputs from position i on are slices that the body itself takes from stacked
    arrays, and the outputs from position k on are slices that it writes into stacked arrays.
    """
    builder = _Builder(program, platform, frozenset(position for position, _ in pairs))
    if scan is not None:
        for buffer in program.inputs[scan[0] :]:
            builder.at[buffer] = builder.slice_of(builder.at[buffer])
    for step in program.steps:
        if isinstance(step, Reshard):
            builder.reshard(step)
        else:
            builder.run(step)
    arrays = builder.arrays
    arrays.outputs = [None if buffer is None else builder.at[buffer] for buffer in program.outputs]
    if scan is not None:
        stacked = [None if node is None else builder.slice_of(node) for node in arrays.outputs[scan[1] :]]
        arrays.outputs[scan[1] :] = stacked
    arrays.pairs = pairs
    if has_host_memory(platform) and program.hosted.is_any:
        arrays.hosted = program.hosted
        arrays.in_flight = len(arrays.nodes)
        arrays.nodes.append(Node(Form.INPUT, (), bytes_in_flight(program), Tenant.HOSTED, -1, None))
    return arrays


def same_equation(one: Any, other: Any) -> bool:
    """Whether two equations of one primitive with the same array operands compute the same thing."""
    if one is other:
        return True
    literals = [
        [str(atom) if isinstance(atom, _compat.Literal) else None for atom in equation.invars]
        for equation in (one, other)
    ]
    return literals[0] == literals[1] and str(one.params) == str(other.params)


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


def _cut_before(body: SpmdProgram) -> dict[Buffer, list[int]]:
    """Bytes of the pieces of arrays of which a loop reads nothing else: XLA cuts what the loop does not change before it."""
    pieces: dict[Buffer, list[int]] = {}
    whole = set(body.outputs)
    for step in body.steps:
        if isinstance(step, Run):
            whole.update(step.operands)
        elif all(move.kind is MoveKind.SLICE for move in step.moves):
            pieces.setdefault(step.source, []).append(local_bytes(body, step.target))
        else:
            whole.add(step.source)
    return {buffer: sizes for buffer, sizes in pieces.items() if buffer not in whole}


class _Builder(ArrayList):
    """Adds the nodes of one step after the other."""

    def __init__(self, program: SpmdProgram, platform: str, donated: frozenset[int]) -> None:
        super().__init__(program, platform, donated)
        self._platform = platform
        self._merged = {} if self.on_cpu else merged_values(program.graph)  # XLA:CPU asks only what kind they are
        self._turned: dict[int, int] = {}  # a collective's result in another order of dimensions: the collective
        self._uses = Counter(
            buffer
            for step in program.steps
            for buffer in ((step.source,) if isinstance(step, Reshard) else set(step.operands))
        )
        self._uses.update(program.outputs)
        self._kept_narrow = _read_as_they_are(program) if self.on_cpu else frozenset()
        self._run: dict[object, list[tuple[Any, int]]] = {}

    # --- collectives ---

    def reshard(self, step: Reshard) -> None:
        """One node per move, and those around it."""
        layout, node = step.source.layout, self.at[step.source]
        for place, move in enumerate(step.moves):
            before, layout = layout, after_move(layout, move, self.program.mesh)
            ends = Buffer(step.source.value, before), Buffer(step.source.value, layout)
            make = partial(self._move, step, move, node, *ends)
            node = self.once((node, move), make)
            self.arrays.nodes[node].shape = self.shape_of(ends[1])
            self.arrays.moves[step.target, place] = self._turned.get(node, node)
        self.at[step.target] = node

    def _move(self, step: Reshard, move: Move, node: int, before: Buffer, after: Buffer) -> int:
        size, value = self.bytes_of(after), before.value
        shape = self.shape_of(before)
        tenant = Tenant.GATHERED if move.kind is MoveKind.ALL_GATHER else self.tenant_of(step.cause)
        match move.kind:
            case MoveKind.SLICE | MoveKind.MASK:
                return self.add(Form.CHEAP, (node,), size, self.tenant_of(step.cause), value, step.cause)
            case MoveKind.ALL_REDUCE:
                return self._collective(move, (node,), size, tenant, step)
            case MoveKind.ALL_TO_ALL if self.on_cpu:
                pieces = self.add(Form.KERNEL, (node,), size, tenant, value, step.cause)
                self.arrays.nodes[pieces].is_made_anew = True
                sent = self.add(Form.KERNEL, (pieces,), size, tenant, value, step.cause)
                return self.add(Form.COSTLY, (sent,), size, tenant, value, step.cause)
        order = (move.dim, *(dim for dim in range(len(shape)) if dim != move.dim))
        is_cut = any(extent > 1 for extent in shape[: max(move.dim, 0)])
        if self.on_cpu and is_cut:
            # The interpreter's own copy: of what is scattered before it is sent, of what is gathered once it is there.
            is_turned = move.kind is MoveKind.ALL_GATHER
            is_turned_before = not is_turned
        else:
            is_turned_before = is_cut or (self.on_cpu and move.dim > 0)
            lies_so = self._lies_transposed(node) and step.target not in self.program.outputs
            is_turned = is_turned_before or lies_so
        if is_turned_before:
            node = self.relayout(node, order)
        if move.kind is MoveKind.EXCHANGE_SUM:
            node = self.add(Form.KERNEL, (node,), self.bytes_of(before), tenant, value, step.cause)
            node = self._collective(move, (node,), self.bytes_of(before), tenant, step)
            node = self.add(Form.CHEAP, (node,), size, tenant, value, step.cause)
        else:
            node = self._collective(move, (node,), size, tenant, step)
        if is_turned:
            sent, node = node, self.relayout(node, ())
            self._turned[node] = sent
        return node

    def _lies_transposed(self, node: int) -> bool:
        """Whether XLA:CPU sends an array in the order of what it is the transpose of, so that nothing is moved for it."""
        source = self.arrays.nodes[node].source
        is_transpose = source is not None and source.primitive == "transpose"
        return self.on_cpu and is_transpose and self.arrays.nodes[node].form is Form.CHEAP

    def _collective(self, move: Move, inputs: tuple[int, ...], size: int, tenant: Tenant, step: Reshard) -> int:
        number = self.add(Form.KERNEL, inputs, size, tenant, step.source.value, step.cause)
        kind = COLLECTIVE_OF_MOVE[move.kind]
        merged = Merged.ALL if self.on_cpu else self._merged.get(step.source.value, Merged.NONE)
        if kind in merging(merged, Platform(self._platform)):
            dtype = self.program.values[step.source.value].dtype
            summed = "float32" if self.on_cpu and dtype in NARROW else dtype
            self.arrays.nodes[number].combines = kind, move.axes, summed
        return number

    # --- operators ---

    def run(self, step: Run) -> None:
        """The nodes of one operator."""
        operator = step.operator
        inputs = tuple(self.at[buffer] for buffer in step.operands if buffer is not None)
        if step.bodies:
            self._loop(step)
        elif operator.primitive == "dot_general":
            number, _ = self._computed(Form.KERNEL, operands_of_product(self, step), step)
            self.arrays.nodes[number].is_made_anew = is_made_anew(self, step)
            self.at[step.results[0]] = result_of_product(self, step, number)
        elif operator.primitive == "conv_general_dilated" and self.on_cpu:
            number, _ = self._computed(Form.KERNEL, operands_of_convolution(self, step), step)
            self.at[step.results[0]] = result_of_convolution(self, step, number)
        elif operator.primitive == "optimization_barrier":
            self._barrier(step)
        elif operator.primitive == "threefry2x32" and self.on_cpu:
            threefry(self, step)
        elif len(step.results) == 1:
            self._plain(step, inputs)
        else:
            for buffer in step.results:
                number = self.buffer(self._form(operator), inputs, buffer, self.tenant_of(operator), operator)
                self._draw(self.arrays.nodes[number], operator, buffer)

    def _barrier(self, step: Run) -> None:
        """Older XLA:CPUs drop barriers before they look for equal work, which undoes rematerialisation; others keep them.

        Those that XLA:CPU keeps stand while it fuses, orders kernels and lets arrays write over others.
        """
        operator = step.operator
        waits: tuple[int, ...] = ()
        if self.on_cpu and _compat.cpu_keeps_barriers():
            given = tuple(dict.fromkeys(self.at[operand] for operand in step.operands if operand is not None))
            waits = (self.add(Form.BARRIER, given, 0, self.tenant_of(operator), -1, operator),)
        for operand, result in zip(step.operands, step.results, strict=True):
            if operand is None:
                self.buffer(Form.CHEAP, (), result, self.tenant_of(operator), operator)
            elif self.on_cpu and not waits:
                self.at[result] = self.at[operand]
            else:
                self.buffer(Form.RENAME, (self.at[operand], *waits), result, self.tenant_of(operator), operator)

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
            onto = self.own_copy(onto[0]), *onto[1:]
            self.buffer(Form.IN_PLACE, onto, step.results[0], self.tenant_of(operator), operator)
            return
        if operator.primitive == "select_and_scatter_add" and self.on_cpu:
            scattered_to_greatest(self, step, inputs)
            return
        if operator.primitive == "random_bits" and self.on_cpu:
            random_bits(self, step, inputs)
            return
        if operator.primitive in ADDITIONS and (other := self._but_zero(inputs)) is not None:
            self.at[step.results[0]] = other
            return
        if form is Form.RENAME and (renamed := self._as_before(step, inputs)) is not None:
            self.at[step.results[0]] = renamed
            return
        if form is Form.IN_PLACE and inputs:
            inputs = self.own_copy(inputs[0]), *inputs[1:]
        if elementwise:
            shape = self.shape_of(step.results[0])
            inputs = tuple(self.widened(node, shape) for node in inputs)
        multiplies = operator.primitive == "div" and self._multiplies(step, inputs)
        if multiplies and self.on_cpu and len(inputs) == 2:
            inputs = inputs[0], self._inverse(inputs[1])
        number, fresh = self._computed(form, inputs, step)
        if not fresh:
            return
        node = self.arrays.nodes[number]
        node.elementwise = elementwise
        if multiplies:
            node.form = Form.CHEAP
        if elementwise and form is Form.COSTLY and not self.on_cpu and self._is_computed_again(node):
            node.form = Form.CHEAP
        self._draw(node, operator, step.results[0])
        given = [self.arrays.nodes[i] for i in set(inputs)]
        large = [other.size_bytes for other in given if not other.widens and other.size_bytes >= node.size_bytes]
        node.unary = len(large) <= 1 or sum(other.size_bytes for other in given) <= node.size_bytes
        node.widens = operator.primitive in ("broadcast_in_dim", "iota")
        node.is_zero = (
            operator.primitive == "broadcast_in_dim" and not inputs and is_zero_literal(operator.equation.invars[0])
        )
        node.is_zero |= operator.primitive == "square" and given[0].is_zero
        types = {self.dtype_of(value) for value in (*operator.operands, *operator.results) if value is not None}
        node.in_library = operator.primitive in LIBRARY_WORK and types <= LIBRARY_TYPES

    def _is_computed_again(self, node: Node) -> bool:
        """XLA:GPU weighs arithmetic against memory: it reads narrower floats again, and once more the one array that it was
        made of besides arguments of the program (a product and its bias), but for narrow floats, which it widens first.
        """
        if node.size_bytes == node.source_bytes > 0 and len(node.inputs) == 1:
            return len(node.origins) == 1 and node.dtype not in NARROW
        return node.size_bytes > node.source_bytes > 0

    def _draw(self, node: Node, operator: Operator, result: Buffer) -> None:
        """XLA:GPU hashes random bits inside the kernel that wants them, and only once.

        So of what they come to, the first array that several read is kept instead: of a dropout its mask.
        """
        if self.on_cpu or node.form not in (Form.CHEAP, Form.COSTLY, Form.RENAME):
            return
        if operator.primitive not in DRAWS and not any(self.arrays.nodes[i].is_drawn for i in node.inputs):
            return
        node.is_drawn = self._uses[result] == 1
        if not node.is_drawn and node.form is Form.CHEAP:
            node.form = Form.COSTLY

    def _multiplies(self, step: Run, inputs: tuple[int, ...]) -> bool:
        """Whether a division is a product to XLA: with the inverse of what is broadcast, or of a constant."""
        if len(inputs) == 2:
            return self.arrays.nodes[inputs[1]].widens
        is_whole = "int" in self.program.values[step.results[0].value].dtype
        return step.operands[-1] is None and not is_whole

    def _inverse(self, wide: int) -> int:
        """What is multiplied with instead of dividing by what is broadcast: the inverse, broadcast."""
        shape, narrow = self.arrays.nodes[wide].shape, self.arrays.nodes[wide].inputs
        if len(narrow) != 1:
            return wide
        inverse = self.once((*narrow, "inverse"), partial(self.again, *narrow, Form.COSTLY))
        node = self.arrays.nodes[inverse]
        node.elementwise = True
        node.in_library = self.dtype_of(node.value) in LIBRARY_TYPES
        return self.once((inverse, shape), partial(self.broadcast, inverse, shape))

    def _as_before(self, step: Run, inputs: tuple[int, ...]) -> int | None:
        """For what is reshaped to what it was before it was reshaped: that."""
        result, number = step.results[0], inputs[0] if inputs else None
        while number is not None:
            node = self.arrays.nodes[number]
            if node.shape == self.shape_of(result) and node.value >= 0:
                return number if self.dtype_of(node.value) == self.dtype_of(result.value) else None
            reshaped = node.form is Form.RENAME and node.source is not None and node.source.primitive in RESHAPES
            number = node.inputs[0] if reshaped else None
        return None

    def dtype_of(self, value: int) -> str:
        return self.program.values[value].dtype

    def _reduces_nothing(self, step: Run) -> bool:
        """Whether all dimensions reduced have one element on a device: XLA reshapes instead."""
        if step.operator.primitive not in REDUCTIONS_OF_VALUES or step.operands[0] is None:
            return False
        return math.prod(self.shape_of(step.operands[0])) == math.prod(self.shape_of(step.results[0]))

    def _but_zero(self, inputs: tuple[int, ...]) -> int | None:
        """For x + 0, where no compiler adds: x."""
        if len(inputs) != 2:
            return None
        first, second = (self.arrays.nodes[node] for node in inputs)
        if first.shape != second.shape or first.is_zero == second.is_zero:
            return None
        return inputs[0] if second.is_zero else inputs[1]

    def _scattered_onto(self, step: Run) -> tuple[int, ...] | None:
        """For x + scatter-add(0, …), which XLA turns into scatter-add(x, …): the inputs of that scatter."""
        for position, buffer in enumerate(step.operands):
            other = step.operands[1 - position]
            if buffer is None or other is None or other == buffer or self._uses[buffer] != 1:
                continue
            scatter = self.arrays.nodes[self.at[buffer]]
            if (
                scatter.form is not Form.IN_PLACE
                or scatter.source is None
                or scatter.source.primitive not in SCATTERED_SUMS
            ):
                continue
            if scatter.value == buffer.value and self.arrays.nodes[scatter.inputs[0]].is_zero:
                return self.at[other], *scatter.inputs[1:]
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
                self.at[result] = known
                return known, False
        number = self.buffer(form, inputs, result, self.tenant_of(operator), operator)
        alike.append((operator.equation, number))
        return number, True

    # --- loops ---

    def _loop(self, step: Run) -> None:
        operator = step.operator
        match operator.primitive:
            case LoopKind.SCAN:
                consts, carries = _compat.scan_arity(operator.equation.params)
                self._repeat(step, consts, carries, consts, (consts + carries, carries))
            case LoopKind.WHILE:
                params = operator.equation.params
                skipped = params["cond_nconsts"] + params["body_nconsts"]
                self._repeat(step, skipped, len(step.operands) - skipped, params["body_nconsts"])
            case _:
                self._branches(step)

    def _repeat(
        self, step: Run, start: int, carries: int, body_start: int, scan: tuple[int, int] | None = None
    ) -> None:
        """A loop overwrites its carry in place and fills stacked results that exist from the start."""
        operator, body = step.operator, step.bodies[-1]
        cut_before = _cut_before(body) if self.on_cpu else {}
        inputs, owned = [], []
        for position, buffer in enumerate(step.operands):
            node = None if buffer is None else self.at[buffer]
            within = position - start + body_start
            if node is not None and position < start and within >= 0:
                tenant, pieces = self.arrays.nodes[node].tenant, cut_before.get(body.inputs[within], ())
                inputs += [self.add(Form.KERNEL, (node,), size, tenant, -1, operator) for size in pieces]
                node = None if pieces else node
            if start <= position < start + carries:
                result = step.results[position - start]
                source = () if node is None else (node,)
                node = self.add(Form.IN_PLACE, source, self.bytes_of(result), Tenant.LOOP, result.value, operator)
                owned.append(node)
            if node is not None:
                inputs.append(node)
        for buffer in step.results[carries:]:
            owned.append(self.add(Form.KERNEL, (), self.bytes_of(buffer), Tenant.LOOP, buffer.value, operator))
        loop = self.add(Form.LOOP, (*inputs, *owned[carries:]), 0, Tenant.LOOP, -1, operator)
        pairs = tuple((body_start + k, k) for k in range(carries))
        self.arrays.nodes[loop].inner = arrays_of(body, pairs, self._platform, scan)
        for buffer, node in zip(step.results, owned, strict=True):
            self.buffer(Form.RENAME, (node, loop), buffer, Tenant.LOOP, operator)

    def _branches(self, step: Run) -> None:
        operator = step.operator
        inputs = tuple(self.at[buffer] for buffer in step.operands if buffer is not None)
        owned = [
            self.add(Form.KERNEL, inputs, self.bytes_of(buffer), self.tenant_of(operator), buffer.value, operator)
            for buffer in step.results
        ]
        branches = []
        for body in step.bodies:
            branches.append(self.add(Form.LOOP, (*inputs, *owned), 0, Tenant.LOOP, -1, operator))
            self.arrays.nodes[branches[-1]].inner = arrays_of(body, (), self._platform)
        for buffer, node in zip(step.results, owned, strict=True):
            self.buffer(Form.RENAME, (node, *branches), buffer, self.tenant_of(operator), operator)
