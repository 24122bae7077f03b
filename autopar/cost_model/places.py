"""Where is each array while the program runs: in memory, or inside the kernels that need it?

XLA computes an array inside the kernels that read it when that is cheap, and keeps it otherwise.  Its rules:

* what a matrix product, a collective, a loop, a scatter or the program's end reads is kept;
* costly work is done once, so what several kernels need is kept, be it through cheap work that each of them repeats;
* cheap work on one large array that a kernel needs in memory in another shape, and others as it is, is done once for each shape,
  for XLA:CPU fuses it with the change of shape;
* cheap work is repeated in each reader, unless it has several large inputs and a reader of its own waits for another besides
  (on GPUs: a reader of what cheap work makes of it);
* XLA:CPU's reductions read memory, but for those along few elements (:data:`WHOLE_REDUCTION`) and for what its library computes
  with them (:mod:`autopar.cost_model.library`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum

from autopar.cost_model.nodes import Arrays, Form, Node

FUSED = frozenset((Form.CHEAP, Form.COSTLY))
READ_BUFFERS = frozenset((Form.KERNEL, Form.IN_PLACE, Form.LOOP, Form.BARRIER))

WHOLE_REDUCTION = 32
"""XLA:CPU reduces longer dimensions in two kernels, the first of which, over windows of so many elements, reads memory."""

_NO_KERNEL, _SEVERAL_KERNELS = -1, -2


class Place(Enum):
    """Where an array is while the program runs."""

    UNREAD = "unread"  # nobody needs it
    REGISTERS = "registers"  # inside the kernels that need it
    LIBRARY = "library"  # inside one kernel of a library, which reads all else from memory
    MEMORY = "memory"


def places_of(arrays: Arrays, library: Mapping[int, int], *, on_cpu: bool) -> list[Place]:
    """Where each array is (see the module docstring); decided from the last reader backwards.

    ``library`` are the roots of what a library computes.
    """
    nodes = arrays.nodes
    places = [Place.UNREAD] * len(nodes)
    whole = _not_repeated(nodes, library, own_readers=on_cpu)
    reshaped = _made_in_shape(arrays) if on_cpu else frozenset[int]()
    uses = [0] * len(nodes)
    kernel_of = [_NO_KERNEL] * len(nodes)
    needed = bytearray(len(nodes))
    inside = bytearray(len(nodes))  # whether a kernel besides makes it again of what it is computed from
    for output in arrays.outputs:
        if output is not None:
            uses[output] += 1
            kernel_of[output] = _SEVERAL_KERNELS
            needed[output] = 1
    for number in range(len(nodes) - 1, -1, -1):
        node = nodes[number]
        root = library.get(number)
        if node.form is Form.INPUT:
            places[number] = Place.MEMORY
        elif root is not None:
            places[number] = Place.MEMORY if root == number else Place.LIBRARY
            for i in dict.fromkeys(node.inputs):
                uses[i] += 1
                kernel_of[i] = _either(kernel_of[i], root)
                needed[i] |= library.get(i) != root
        elif number in reshaped and needed[number]:
            places[number] = Place.MEMORY
            (source,) = node.inputs
            uses[source] += 1
            kernel_of[source] = _either(kernel_of[source], number)
            inside[source] = 1
        elif node.form is Form.RENAME and uses[number]:
            places[number] = Place.REGISTERS
            for i in node.inputs:
                uses[i] += uses[number]
                kernel_of[i] = _either(kernel_of[i], kernel_of[number])
                needed[i] |= needed[number]
                inside[i] |= inside[number]
        elif uses[number] or node.form is Form.LOOP:
            kept = node.form not in FUSED or bool(needed[number]) or number in whole
            kept = kept or (node.form is Form.COSTLY and kernel_of[number] == _SEVERAL_KERNELS)
            places[number] = Place.MEMORY if kept else Place.REGISTERS
            is_made_again = node.form is Form.CHEAP and node.unary and inside[number]
            kernel = kernel_of[number] if not kept else _SEVERAL_KERNELS if is_made_again else number
            reads_memory = node.form in READ_BUFFERS or (node.form is Form.REDUCE and on_cpu and not node.is_short)
            for i in dict.fromkeys(node.inputs):
                uses[i] += 1
                kernel_of[i] = _either(kernel_of[i], kernel)
                # Inside a kernel costly work would be done once per element of the larger result.
                is_repeated = nodes[i].form is Form.COSTLY and nodes[i].size_bytes < node.size_bytes
                needed[i] |= reads_memory or is_repeated
                inside[i] |= not (reads_memory or is_repeated)
    return places


def _either(one: int, other: int) -> int:
    """The kernel that needs an array which two readers need."""
    if one in (_NO_KERNEL, other):
        return other
    return one if other == _NO_KERNEL else _SEVERAL_KERNELS


def _made_in_shape(arrays: Arrays) -> frozenset[int]:
    """Changes of shape of cheap work on one large array that others read as well: a kernel in memory can make it in its shape."""
    nodes = arrays.nodes
    users = Counter(i for node in nodes for i in set(node.inputs))
    users.update(output for output in set(arrays.outputs) if output is not None)

    def is_made_again(number: int) -> bool:
        return nodes[number].form is Form.CHEAP and nodes[number].unary and users[number] > 1

    return frozenset(
        number
        for number, node in enumerate(nodes)
        if node.form is Form.RENAME and len(node.inputs) == 1 and node.reshapes and is_made_again(node.inputs[0])
    )


def _not_repeated(nodes: list[Node], library: Mapping[int, int], *, own_readers: bool) -> set[int]:
    """Cheap nodes of several large inputs of which XLA keeps one array, for their readers cannot all be one kernel.

    A reader refuses a node if a path leads to it from the node through a kernel besides (as of a norm that reads its input and
    what it sums of it).  XLA:CPU asks the node's ``own_readers``, XLA:GPU, which weighs kernels against each other, was seen to
    keep what others refuse that cheap work leads to as well.  Bit b of ``near`` (``far``) says that a path leads here from
    candidate b through no kernel (through one).
    """
    users = Counter(i for node in nodes for i in set(node.inputs))
    bits: dict[int, int] = {}
    near = [0] * len(nodes)
    far = [0] * len(nodes)
    refused = 0
    for number, node in enumerate(nodes):
        close = distant = read = 0
        for i in node.inputs:
            close |= near[i]
            distant |= far[i]
            read |= bits.get(i, 0)
        if node.form is not Form.RENAME:
            refused |= (read if own_readers else close) & distant
            if number in library:
                if library[number] == number:
                    close, distant = 0, close | distant
            elif node.form not in FUSED or (node.form is Form.COSTLY and users[number] > 1):
                close, distant = 0, close | distant
            elif node.form is Form.CHEAP and not node.unary and users[number] > 1:
                bits[number] = 1 << len(bits)
                close |= bits[number]
        near[number], far[number] = close, distant
    return {number for number, bit in bits.items() if refused & bit}
