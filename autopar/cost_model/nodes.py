"""What is a node?  One array that a compiler could keep, on one device.

The local program is a list of them (:mod:`autopar.cost_model.arrays` makes it); a node's ``inputs`` are earlier nodes, so the
list is in topological order.  Fusion, liveness, combined collectives and what hides behind them are read off it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from autopar.cost_model.collectives import Collective
from autopar.graph.ir import Operator
from autopar.plan import Axes
from autopar.schedule.spmd import NOTHING_HOSTED, Buffer, Hosted


class Form(Enum):
    """How an array comes about."""

    INPUT = "input"
    CHEAP = "cheap"  # computed inside the kernels that need it, again in each
    COSTLY = "costly"  # computed inside a kernel, but only once
    RENAME = "rename"  # the bytes of its input under another shape
    REDUCE = "reduce"
    KERNEL = "kernel"  # reads and writes real buffers
    IN_PLACE = "in place"  # a kernel that overwrites its first input
    LOOP = "loop"  # owns no buffer; its results are those it was given
    BARRIER = "barrier"  # owns no buffer; what reads it runs when all its operands are there


class Tenant(Enum):
    """What a buffer holds, for the report."""

    ACTIVATION = "activations"
    GRADIENT = "gradients"
    UPDATE = "update"
    GATHERED = "gathered copies"
    COPY = "copies"
    LOOP = "loop buffers"
    HOSTED = "copies of arrays in host memory"


@dataclass(slots=True)
class Node:
    """One array of ``size_bytes`` on one device; ``unary`` when at most one input is as large as the result."""

    form: Form
    inputs: tuple[int, ...]
    size_bytes: int
    tenant: Tenant
    value: int
    source: Operator | None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    elementwise: bool = False
    unary: bool = True
    widens: bool = False
    in_library: bool = False
    is_short: bool = False
    """Of a reduction: whether XLA:CPU leaves it whole, and computes what it reads in passing."""
    reshapes: bool = False
    """Of a change of name: whether the bytes have another shape afterwards."""
    is_zero: bool = False
    is_number: bool = False
    """Whether one literal number stands everywhere: no compiler sends it, it is written where it is wanted."""
    is_made_anew: bool = False
    """Whether XLA:CPU puts another operation in its place, which queues up behind all others that wait for the same."""
    is_drawn: bool = False
    """Whether XLA:GPU hashes random bits in the kernel that computes it."""
    source_bytes: int = 0
    """Size of the largest array in memory that the array is computed from (its own, if it is not fused)."""
    origins: frozenset[int] = frozenset()
    """Arrays in memory that the array is computed from, arguments of the program left out; no more than a few."""
    combines: tuple[Collective, Axes, str] | None = None
    """Kind, axes and element type of a collective that may be combined with others of the same."""
    inner: Arrays | None = None
    """The body of a loop."""


@dataclass
class Arrays:
    """All nodes of one level. ``outputs`` are nodes (``None``: a literal); ``pairs`` are positions of an input and of
    the output that takes its buffer; ``moves`` are the nodes of the moves that make a buffer, by their number; ``reordered``
    are bytes that are copied into another order because a product reads them so, by the product; ``hosted``
    are positions of inputs and outputs that have no buffer on the device, ``in_flight`` stands for those of them that are there
    for a moment.
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    pairs: tuple[tuple[int, int], ...] = ()
    moves: dict[tuple[Buffer, int], int] = field(default_factory=dict)
    reordered: dict[int, int] = field(default_factory=dict)
    hosted: Hosted = NOTHING_HOSTED
    in_flight: int | None = None
