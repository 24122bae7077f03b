"""Which kernels does XLA make of a list of arrays, what does each read, and what may it write over?

With the arrays that are kept in memory (:mod:`autopar.cost_model.places`) as kernels' results,

* a kernel reads what it computes inside of itself down to the next arrays in memory;
* it writes over an operand only if both have one element type and it reads the array itself, not another shape of its bytes;
  XLA:CPU lets what a product of matrices made be overwritten by arrays of that shape, and its library overwrites nothing.

When they run is said by :mod:`autopar.cost_model.kernel_order`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.cost_model.library import library_kernels
from autopar.cost_model.nodes import Arrays, Form, Node
from autopar.cost_model.places import FUSED, Place, places_of
from autopar.devices import Platform

REPEATED_READS = 2
"""A cheap array that is kept for some readers is computed again by others when that reads no more than so many arrays; on CPU
what is broadcast does not count, and more may be read that are no more than so many times its own bytes."""

_NOTHING: frozenset[int] = frozenset()


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


def kernels_of(arrays: Arrays, platform: Platform) -> Kernels:
    """The kernels into which XLA cuts a list of arrays."""
    tracer = _Tracer(arrays, on_cpu=platform is Platform.CPU)
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
        """Another shape of the same bytes; after a loop or a barrier, another name that waits for it.

        In memory of its own the cheap work below it is done once more, in its shape.
        """
        source, *others = node.inputs
        if self._places[number] is Place.MEMORY and self._inside[source] != {source}:
            self.kernels.owner[number], self.kernels.reads[number] = number, self._inside[source]
            self._inside[number] = self._inside[source]
            self._given[number] = frozenset((number,))
            return
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
        reaches_inside = fused or (node.form is Form.REDUCE and (node.is_short or not self._on_cpu))
        sets = self._inside if reaches_inside else self._given
        reads = _union(sets[i] for i in node.inputs)
        kernels.owner[number], kernels.reads[number] = number, reads
        self._given[number] = self._inside[number] = self._equal[number] = own
        if fused:
            equal = self._equally_read(node)
            kernels.overwrites[number] = frozenset(i for i in equal if kernels.nodes[i].dtype == node.dtype)
            if node.form is Form.CHEAP and node.unary and self._reads_little(number, reads):
                self._inside[number], self._equal[number] = reads, equal
        elif node.form is Form.IN_PLACE and node.inputs:
            kernels.overwrites[number] = self._given[node.inputs[0]]

    def _reads_little(self, number: int, reads: frozenset[int]) -> bool:
        """See :data:`REPEATED_READS`."""
        if len(reads) <= REPEATED_READS or not self._on_cpu:
            return len(reads) <= REPEATED_READS
        nodes = self.kernels.nodes
        read_bytes = sum(nodes[i].size_bytes for i in reads)
        return read_bytes <= REPEATED_READS * nodes[number].size_bytes or self._read_whole(number) <= REPEATED_READS

    def _read_whole(self, number: int) -> int:
        """How many arrays a fused node reads an element of for each of its own: what is broadcast on the way does not count."""
        nodes, owner = self.kernels.nodes, self.kernels.owner
        found: set[int] = set()
        seen, asked = {number}, [number]
        while asked:
            reader = asked.pop()
            whole = [i for i in nodes[reader].inputs if math.prod(nodes[i].shape) >= math.prod(nodes[reader].shape)]
            found.update(owner[i] for i in whole if i in owner)
            inside = {i for i in whole if i not in owner} - seen
            seen |= inside
            asked += inside
        return len(found)

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
