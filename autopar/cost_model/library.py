"""Which work does XLA:CPU hand to a library, and how much of it as one kernel?

Before it fuses anything itself, XLA:CPU gathers work around each reduction for its library (YNNPACK).  With U(n) the
readers of array n, the program's end among them, a set S grows from the reduction until nothing is added any more:

    S ← S ∪ {n : U(n) ⊆ S}                           what only S reads
    S ← S ∪ {u} where U(root of S) = {u}             the only reader of what S leaves

each n and u being work that the library knows.  S is one kernel: what it reads has to be in memory, also what would be
cheap to compute in passing, and it leaves one array, its root.  So the scale that multiplies both a norm's input and, in the
backward pass, its gradient is kept in between, where a fusion of XLA's own would multiply again.

Read off XLA's sources (``library_rewriter``, ``ynn_support``) and off compiled programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.cost_model.nodes import Arrays, Form, Node

FEWEST_ELEMENTS = 4096
"""Arithmetic on arrays that are all smaller is not handed over."""

_END = -1
"""The reader of what leaves the program."""


def library_kernels(arrays: Arrays) -> Mapping[int, int]:
    """For each node inside such a kernel, its root, whose array the kernel writes."""
    nodes = arrays.nodes
    readers = _readers(arrays)
    root_of: dict[int, int] = {}
    for number in range(len(nodes) - 1, -1, -1):
        starts = nodes[number].form is Form.REDUCE and number not in root_of and readers[number]
        if starts and _is_known(nodes, number):
            members, root = _grown(number, nodes, readers, root_of)
            root_of.update(dict.fromkeys(members, root))
    return root_of


def _readers(arrays: Arrays) -> list[set[int]]:
    """Who reads each node; what nobody needs reads nothing."""
    readers: list[set[int]] = [set() for _ in arrays.nodes]
    for output in arrays.outputs:
        if output is not None:
            readers[output].add(_END)
    for number in range(len(arrays.nodes) - 1, -1, -1):
        node = arrays.nodes[number]
        if readers[number] or node.form is Form.LOOP:
            for read in node.inputs:
                readers[read].add(number)
    return readers


def _is_known(nodes: Sequence[Node], number: int) -> bool:
    """Whether the library computes a node, and is asked to."""
    node = nodes[number]
    if not node.in_library:
        return False
    is_arithmetic = node.form is not Form.RENAME and not node.widens
    largest = max(math.prod(nodes[one].shape) for one in (number, *node.inputs))
    return not is_arithmetic or largest >= FEWEST_ELEMENTS


def _grown(
    start: int, nodes: Sequence[Node], readers: Sequence[set[int]], taken: Mapping[int, int]
) -> tuple[set[int], int]:
    """The nodes of the kernel around a reduction, and its root."""
    members, root = {start}, start
    asked = [*nodes[start].inputs]
    while True:
        while asked:
            read = asked.pop()
            if read not in members and read not in taken and readers[read] <= members and _is_known(nodes, read):
                members.add(read)
                asked += nodes[read].inputs
        (below,) = readers[root] if len(readers[root]) == 1 else (_END,)
        if below == _END or below in taken or not _is_known(nodes, below):
            return members, root
        members.add(below)
        root = below
        asked = [read for member in members for read in nodes[member].inputs]
