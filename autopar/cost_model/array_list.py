"""The list of a level's arrays while it grows: what is made once, made again, laid out otherwise, copied to be written into.

It knows the program whose values the arrays are, and adds nodes one after the other, each after its inputs.  Who decides which
nodes an operator becomes is :mod:`autopar.cost_model.arrays`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

from autopar.cost_model.nodes import Arrays, Form, Node, Tenant
from autopar.devices import DeviceKind, Platform
from autopar.graph.ir import Operator, Phase
from autopar.plan import Layout
from autopar.schedule.reshard import local_shape
from autopar.schedule.spmd import Buffer, SpmdProgram

TENANT_OF_PHASE = {
    Phase.FORWARD: Tenant.ACTIVATION,
    Phase.BACKWARD: Tenant.GRADIENT,
    Phase.UPDATE: Tenant.UPDATE,
}

LIBRARY_TYPES = frozenset(("float32", "float64", "bfloat16"))
"""What XLA:CPU's library computes with (:mod:`autopar.cost_model.library`)."""

NARROW = frozenset(("bfloat16", "float16"))

MOST_ORIGINS = 2
"""More are not told apart."""


class ArrayList:
    """Owns the growing list of one level, and where each buffer of the program is in it."""

    def __init__(self, program: SpmdProgram, device: DeviceKind, donated: frozenset[int]) -> None:
        """``donated`` are the positions of inputs that may be written over."""
        self.program, self.device = program, device
        self.on_cpu = device.platform is Platform.CPU
        self.arrays = Arrays()
        self.at: dict[Buffer, int] = {}
        self._made: dict[object, int] = {}
        self._written_zeros: set[int] = set()  # zeros in whose memory something is scattered
        for buffer in program.inputs:
            self.arrays.inputs.append(self.buffer(Form.INPUT, (), buffer, Tenant.ACTIVATION, None))
        for value in program.graph.constants:
            constant = Buffer(value, Layout(((),) * len(program.values[value].shape)))
            self.buffer(Form.INPUT, (), constant, Tenant.ACTIVATION, None)
        self._donated = {self.arrays.inputs[position] for position in donated}

    def __getitem__(self, number: int) -> Node:
        return self.arrays.nodes[number]

    def shape_of(self, buffer: Buffer) -> tuple[int, ...]:
        """The shape on one device."""
        return local_shape(self.program.values[buffer.value].shape, buffer.layout, self.program.mesh)

    def bytes_of(self, buffer: Buffer) -> int:
        """The bytes on one device."""
        return self.program.values[buffer.value].itemsize_bytes * math.prod(self.shape_of(buffer))

    def add(
        self, form: Form, inputs: tuple[int, ...], size: int, tenant: Tenant, value: int, source: Operator | None
    ) -> int:
        """A node, of a value or (-1) of none."""
        node = Node(form, inputs, size, tenant, value, source)
        fused = form in (Form.CHEAP, Form.COSTLY, Form.RENAME)
        node.source_bytes = max((self[i].source_bytes for i in inputs), default=0) if fused else size
        if not self.on_cpu and form is not Form.INPUT:
            node.origins = self._origins(inputs) if fused else frozenset((len(self.arrays.nodes),))
        node.dtype = self.dtype_of(value) if value >= 0 else ""
        self.arrays.nodes.append(node)
        return len(self.arrays.nodes) - 1

    def _origins(self, inputs: tuple[int, ...]) -> frozenset[int]:
        found = frozenset[int]().union(*(self[i].origins for i in inputs))
        return frozenset(itertools.islice(found, MOST_ORIGINS))

    def buffer(
        self, form: Form, inputs: tuple[int, ...], buffer: Buffer, tenant: Tenant, source: Operator | None
    ) -> int:
        """A node that is the array of a buffer of the program."""
        shape = self.shape_of(buffer)
        size = self.program.values[buffer.value].itemsize_bytes * math.prod(shape)
        self.at[buffer] = number = self.add(form, inputs, size, tenant, buffer.value, source)
        self[number].shape = shape
        return number

    def once(self, key: tuple[object, ...], make: Callable[[], int]) -> int:
        """What was made before for this key, or made now."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def again(self, node: int, form: Form) -> int:
        """A node for the same array once more."""
        old = self[node]
        number = self.add(form, (node,), old.size_bytes, old.tenant, old.value, old.source)
        self[number].shape = old.shape
        return number

    def relayout(self, node: int, order: tuple[int, ...]) -> int:
        """The same array with its dimensions in another order in memory."""
        return self.once((node, order), partial(self.again, node, Form.CHEAP))

    def relayout_for(self, operator: Operator, node: int, order: tuple[int, ...]) -> int:
        """The same because an operator reads it so; who comes first has the copy to its account."""
        if (node, order) not in self._made:
            counted = self.arrays.reordered
            counted[operator.id] = counted.get(operator.id, 0) + self[node].size_bytes
        return self.relayout(node, order)

    def slice_of(self, node: int) -> int:
        """One trip's slice of a stacked array, read or written: work for the kernel that makes or needs it."""
        return self.again(node, Form.CHEAP)

    def dtype_of(self, value: int) -> str:
        """The element type of a value."""
        return self.program.values[value].dtype

    def tenant_of(self, operator: Operator | None) -> Tenant:
        """What arrays of an operator are for."""
        return Tenant.UPDATE if operator is None else TENANT_OF_PHASE[operator.phase]

    def own_copy(self, onto: int) -> int:
        """What is written into: XLA:CPU copies inputs that are not given away, before anything else is done.

        Equal zeros it makes once, and copies of them for all others that write there.
        """
        node, bytes_of = self[onto], onto
        while self[bytes_of].form is Form.RENAME:
            bytes_of = self[bytes_of].inputs[0]
        is_kept = self[bytes_of].form is Form.INPUT and bytes_of not in self._donated
        if not self.on_cpu or not (is_kept or node.is_zero):
            return onto
        if node.is_zero and onto not in self._written_zeros:
            self._written_zeros.add(onto)
            return onto
        copied = self.again(onto, Form.KERNEL)
        self[copied].is_zero = node.is_zero
        return copied

    def widened(self, node: int, shape: tuple[int, ...]) -> int:
        """An operand of elementwise work in the shape of the result: dimensions of size one are broadcast first."""
        narrow = self[node].shape
        return node if not narrow or narrow == shape else self.once((node, shape), partial(self.broadcast, node, shape))

    def broadcast(self, narrow: int, shape: tuple[int, ...]) -> int:
        """An array in a shape into which it is repeated."""
        number = self.again(narrow, Form.CHEAP)
        node = self[number]
        node.size_bytes = self.program.values[node.value].itemsize_bytes * math.prod(shape)
        node.shape = shape
        node.widens = True
        node.in_library = self.dtype_of(node.value) in LIBRARY_TYPES
        return number
