"""What is chosen, and what does a choice reach?  The nodes and edges of an integer program, and how a plan is read off it.

A node is a set of values that share one layout, or an operator whose strategy is chosen; an edge joins a node that produces an
array with one that needs it.  The :class:`Port` says how to read a layout off the choice at either end.  Which nodes and edges
a program has is said by :mod:`autopar.intra_op.problem`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from autopar.cost_model.kernels import Kernel
from autopar.graph.fusion import Fusion
from autopar.graph.ir import Operator
from autopar.graph.merging import Merged


class Port(Enum):
    """How an edge reads a layout off the choice of the node at its end."""

    VALUE = "value"
    STACKED = "stacked"  # the node is a slice of the array: the array's leading dimension is whole
    OPERAND = "operand"
    RESULT = "result"


@dataclass(frozen=True)
class End:
    """One end of an edge: the node, and what is read there (``position`` of the operand or result)."""

    node: int
    port: Port = Port.VALUE
    position: int = 0


@dataclass(frozen=True)
class Edge:
    """An array of ``shape`` goes from ``source`` to ``target``, ``weight`` times a step.

    ``merged``: which of its collectives become one with those of other arrays.
    """

    source: End
    target: End
    shape: tuple[int, ...]
    itemsize_bytes: int
    dtype: str
    weight: int
    merged: Merged = Merged.NONE


class Work(NamedTuple):
    """What :func:`~autopar.cost_model.roofline.operator_seconds` is told of an elementwise operator, all devices together."""

    flops: float
    bytes_moved: float
    dtype: str
    primitive: str
    streamed: bool


@dataclass
class ValueNode:
    """Values that share a layout. ``work`` counts elementwise kernels."""

    shape: tuple[int, ...]
    itemsize_bytes: int
    may_be_partial: bool = False
    is_input: bool = False
    is_constant: bool = False
    members: list[int] = field(default_factory=list)
    work: Counter[Work] = field(default_factory=Counter)


@dataclass
class OperatorNode:
    """An operator whose strategy is chosen."""

    kernel: Kernel
    trips: int
    may_pass_partial: bool
    free_results: tuple[int, ...]
    """Positions of scalar results: no node stands for them, a partial one is reduced at once."""
    joining_results: frozenset[int] = frozenset()
    """Those of them of which the reduction becomes one with that of others (:mod:`autopar.graph.merging`)."""

    @property
    def operator(self) -> Operator:
        """The operator."""
        return self.kernel.operator


@dataclass
class Problem:
    """All nodes and edges, and how to read a plan off a choice for each node."""

    nodes: list[ValueNode | OperatorNode]
    edges: list[Edge]
    node_of_value: dict[int, int]
    node_of_operator: dict[int, int]
    copy_of_value: dict[int, int]
    followers: dict[int, int]
    """Elementwise operator id → the value node whose layout it follows."""
    fusion: Fusion
