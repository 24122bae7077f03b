"""Which arrays get a buffer, and in which order the kernels that fill them run.

XLA computes an array inside the kernels that read it when that is cheap, and keeps it otherwise.  Its rules:

* what a matrix product, a collective, a loop, a scatter or the program's end reads is kept;
* costly work is done once, so what several kernels need is kept, be it through cheap work that each of them repeats;
* cheap work is repeated in each reader, unless it has several large inputs and a reader of its own waits for another besides
  (on GPUs: a reader of what cheap work makes of it);
* XLA:CPU's reductions read memory, but for what its library computes with them (:mod:`autopar.cost_model.library`);
* a kernel writes over an operand only if both have one element type and it reads the array itself, not another shape of its
  bytes; XLA:CPU lets what a product of matrices made be overwritten by arrays of that shape, and its library overwrites nothing.

XLA:CPU then runs kernels breadth first: a kernel queues up when the last of its operands is there, and first come is
first served.  So gathered parameters and zeros to accumulate into exist from the very start.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from autopar.cost_model.library import library_kernels
from autopar.cost_model.nodes import Arrays, Form, Node

FUSED = frozenset((Form.CHEAP, Form.COSTLY))
READ_BUFFERS = frozenset((Form.KERNEL, Form.IN_PLACE, Form.LOOP, Form.BARRIER))
REPEATED_READS = 2
"""A cheap array that is kept for some readers is computed again by others when that reads no more than so many arrays, or, on
CPU, than so many times its own bytes."""

_NOTHING: frozenset[int] = frozenset()
_NO_KERNEL, _SEVERAL_KERNELS = -1, -2


class Place(Enum):
    """Where an array is while the program runs."""

    UNREAD = "unread"  # nobody needs it
    REGISTERS = "registers"  # inside the kernels that need it
    LIBRARY = "library"  # inside one kernel of a library, which reads all else from memory
    MEMORY = "memory"


@dataclass(slots=True)
class Kernels:
    """What runs, by the number of the node that it makes.

    ``reads[k]`` are the nodes (with buffers, changes of shape, or loops) that kernel k waits for; ``overwrites[k]``
    those of them that it may write over; ``owner`` maps a node with a buffer to the node whose buffer that is.
    """

    nodes: list[Node]
    reads: dict[int, frozenset[int]]
    overwrites: dict[int, frozenset[int]]
    owner: dict[int, int]


def kernels_of(arrays: Arrays, platform: str) -> Kernels:
    """The kernels into which XLA cuts a list of arrays."""
    tracer = _Tracer(arrays, on_cpu=platform == "cpu")
    for number in range(len(arrays.nodes)):
        tracer.visit(number)
    return tracer.kernels


class _Tracer:
    """Owns, for each node, what is read by a kernel that …

    * ``inside``: … computes the node itself;
    * ``equal``:  … does so, and reads at equal positions only;
    * ``given``:  … is handed the node's buffer.
    """

    def __init__(self, arrays: Arrays, *, on_cpu: bool) -> None:
        nodes = arrays.nodes
        self._on_cpu = on_cpu
        self._library = library_kernels(arrays) if on_cpu else {}
        self._places = places_of(arrays, self._library, on_cpu=on_cpu)
        self._standing = _standing_renames(nodes)
        self._inside = [_NOTHING] * len(nodes)
        self._equal = [_NOTHING] * len(nodes)
        self._given = [_NOTHING] * len(nodes)
        self.kernels = Kernels(nodes, {}, {}, {})

    def visit(self, number: int) -> None:
        node, place = self.kernels.nodes[number], self._places[number]
        if node.form is Form.INPUT:
            self.kernels.owner[number] = number
            self._inside[number] = self._equal[number] = self._given[number] = frozenset((number,))
        elif place is Place.UNREAD:
            return
        elif number in self._library:
            self._by_library(number, node)
        elif node.form is Form.RENAME:
            self._rename(number, node)
        elif place is Place.MEMORY:
            self._kernel(number, node)
        else:
            self._inside[number] = self._given[number] = _union(self._inside[i] for i in node.inputs)
            self._equal[number] = self._equally_read(node)

    def _by_library(self, number: int, node: Node) -> None:
        """A part of a library's kernel, which is handed all that it reads."""
        root = self._library[number]
        given = _union(self._given[i] for i in node.inputs)
        equal = {
            i: self._equal[i] if self._library.get(i) == root or i not in self.kernels.owner else self._given[i]
            for i in node.inputs
        }
        if node.elementwise or node.form is Form.RENAME:
            moved = _union(self._given[i] - equal[i] for i in node.inputs)
            equally = _union(equal.values()) - moved
        else:
            equally = _NOTHING
        if number == root:
            self.kernels.owner[number], self.kernels.reads[number] = number, given
            given = equally = frozenset((number,))
        self._given[number] = self._inside[number] = given
        self._equal[number] = equally

    def _rename(self, number: int, node: Node) -> None:
        """Another shape of the same bytes; after a loop or a barrier, another name that waits for it."""
        source, *others = node.inputs
        if source in self.kernels.owner:
            self.kernels.owner[number] = self.kernels.owner[source]
        given = _union(self._given[i] for i in node.inputs)
        self._given[number] = given
        self._inside[number] = self._inside[source] | given if others else self._inside[source]
        is_view = node.shape != self.kernels.nodes[source].shape if self._on_cpu else source in self.kernels.owner
        self._equal[number] = _NOTHING if is_view else self._equal[source]
        if number in self._standing and source in self.kernels.owner and not others:
            self.kernels.reads[number] = given
            self._given[number] = frozenset((number,))

    def _kernel(self, number: int, node: Node) -> None:
        kernels, own = self.kernels, frozenset((number,))
        fused = node.form in FUSED
        reaches_inside = fused or (node.form is Form.REDUCE and not self._on_cpu)
        sets = self._inside if reaches_inside else self._given
        reads = _union(sets[i] for i in node.inputs)
        kernels.owner[number], kernels.reads[number] = number, reads
        self._given[number] = self._inside[number] = self._equal[number] = own
        if fused:
            equal = self._equally_read(node)
            kernels.overwrites[number] = frozenset(i for i in equal if kernels.nodes[i].dtype == node.dtype)
            if node.form is Form.CHEAP and node.unary and self._reads_little(node, reads):
                self._inside[number], self._equal[number] = reads, equal
        elif node.form is Form.IN_PLACE and node.inputs:
            kernels.overwrites[number] = self._given[node.inputs[0]]

    def _reads_little(self, node: Node, reads: frozenset[int]) -> bool:
        """See :data:`REPEATED_READS`."""
        if len(reads) <= REPEATED_READS or not self._on_cpu:
            return len(reads) <= REPEATED_READS
        return sum(self.kernels.nodes[i].size_bytes for i in reads) <= REPEATED_READS * node.size_bytes

    def _equally_read(self, node: Node) -> frozenset[int]:
        if not node.elementwise:
            return _NOTHING
        moved = _union(self._inside[i] - self._equal[i] for i in node.inputs)
        return _union(self._equal[i] for i in node.inputs) - moved


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return _NOTHING.union(*sets)


def _standing_renames(nodes: list[Node]) -> set[int]:
    """Changes of shape that are steps of their own: no kernel that makes the array can make it in the new shape."""
    users = Counter(i for node in nodes for i in set(node.inputs))

    def made_in_shape(source: int) -> bool:
        return nodes[source].form in FUSED and users[source] == 1

    return {
        number
        for number, node in enumerate(nodes)
        if node.form is Form.RENAME
        and nodes[node.inputs[0]].form is not Form.RENAME
        and not made_in_shape(node.inputs[0])
    }


def places_of(arrays: Arrays, library: Mapping[int, int], *, on_cpu: bool) -> list[Place]:
    """Where each array is (see the module docstring); decided from the last reader backwards.

    ``library`` are the roots of what a library computes.
    """
    nodes = arrays.nodes
    places = [Place.UNREAD] * len(nodes)
    whole = _not_repeated(nodes, library, own_readers=on_cpu)
    uses = [0] * len(nodes)
    kernel_of = [_NO_KERNEL] * len(nodes)
    needed = bytearray(len(nodes))
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
        elif node.form is Form.RENAME and uses[number]:
            places[number] = Place.REGISTERS
            for i in node.inputs:
                uses[i] += uses[number]
                kernel_of[i] = _either(kernel_of[i], kernel_of[number])
                needed[i] |= needed[number]
        elif uses[number] or node.form is Form.LOOP:
            kept = node.form not in FUSED or bool(needed[number]) or number in whole
            kept = kept or (node.form is Form.COSTLY and kernel_of[number] == _SEVERAL_KERNELS)
            places[number] = Place.MEMORY if kept else Place.REGISTERS
            kernel = number if kept else kernel_of[number]
            reads_memory = node.form in READ_BUFFERS or (node.form is Form.REDUCE and on_cpu)
            for i in dict.fromkeys(node.inputs):
                uses[i] += 1
                kernel_of[i] = _either(kernel_of[i], kernel)
                # Inside a kernel costly work would be done once per element of the larger result.
                is_repeated = nodes[i].form is Form.COSTLY and nodes[i].size_bytes < node.size_bytes
                needed[i] |= reads_memory or is_repeated
    return places


def _either(one: int, other: int) -> int:
    """The kernel that needs an array which two readers need."""
    if one in (_NO_KERNEL, other):
        return other
    return one if other == _NO_KERNEL else _SEVERAL_KERNELS


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


def order_of(kernels: Kernels, first: int, platform: str) -> dict[int, int]:
    """Position of each kernel, from ``first`` on; inputs stand at 0.

    Breadth first on CPU; elsewhere in program order, which is close to what schedulers that save memory choose.  XLA:GPU
    then moves kernels beside collectives, but not in programs that rematerialise (:mod:`autopar.runtime.xla_options`).
    """
    inputs = [number for number, node in enumerate(kernels.nodes) if node.form is Form.INPUT]
    position = dict.fromkeys(inputs, 0)
    if platform != "cpu":
        return position | {kernel: first + time for time, kernel in enumerate(sorted(kernels.reads))}
    users: dict[int, list[int]] = {}
    waiting: dict[int, int] = {}
    for kernel, reads in sorted(kernels.reads.items(), key=lambda item: kernels.nodes[item[0]].is_made_anew):
        waiting[kernel] = len(reads)
        for read in reads:
            users.setdefault(read, []).append(kernel)
    queue = deque([*inputs, *(kernel for kernel, count in waiting.items() if not count)])
    time = first
    while queue:
        number = queue.popleft()
        if number in kernels.reads:
            position[number] = time
            time += 1
        for user in users.get(number, ()):
            waiting[user] -= 1
            if not waiting[user]:
                queue.append(user)
    return position


def precedence(kernels: Kernels, position: Mapping[int, int], asked: set[int]) -> Callable[[int, int], bool]:
    """A test whether kernel a (one of ``asked``) must run before kernel b, whatever the order."""
    bits = {kernel: 1 << index for index, kernel in enumerate(sorted(asked))}
    reached: dict[int, int] = {}
    for kernel in sorted(kernels.reads, key=position.__getitem__):
        mask = bits.get(kernel, 0)
        for read in kernels.reads[kernel]:
            mask |= reached.get(read, 0)
        reached[kernel] = mask
    return lambda a, b: bool(reached[b] & bits[a])
