"""What the program is: values, operators, factors.

A :class:`Graph` is a closed jaxpr seen by the planner.  Every operator has a :class:`Rule`, an einsum-like statement

    operand dims → factors,   result dims → factors

so that cutting factor *f* into *n* equal pieces cuts every dimension that carries *f* (where *f* is the major factor of
it), and the operator may then run on each piece alone; what the pieces leave behind is said by the factor's kind:

* ``PARALLEL``  the results are cut likewise;
* ``SUM``       each piece yields a summand of the result (the only linear kind);
* ``MAX``/``MIN`` each piece yields a candidate, an all-reduce of that kind must follow at once;
* ``LOOKUP``    the factor is the looked-up dimension of a gather: each piece yields the rows that it holds and zeros
                elsewhere, so it leaves a sum as well, but the local program must offset and mask the indices;
* ``SCATTER``   the factor is the written dimension of a scatter: each piece keeps the updates that fall into it,
                nothing is left to reduce;
* ``BLOCKED``   never cut (the operator must see it whole).

Loops and branches carry their bodies as graphs of their own in ``bodies``; value and operator ids are unique over the
whole tree, so that a plan can speak of each by number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Phase(Enum):
    """Where in the step an operator stands."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class FactorKind(Enum):
    """What cutting a factor leaves behind (see the module docstring)."""

    PARALLEL = "parallel"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LOOKUP = "lookup"
    SCATTER = "scatter"
    BLOCKED = "blocked"

    @property
    def leaves_sum(self) -> bool:
        """Whether a cut leaves summands of the result on the devices."""
        return self in (FactorKind.SUM, FactorKind.LOOKUP)


@dataclass(frozen=True)
class Factor:
    """One dimension of an operator's iteration space."""

    size: int
    kind: FactorKind = FactorKind.PARALLEL


@dataclass(frozen=True)
class Rule:
    """Factors of an operator and where they appear: ``operands[k][d]``: those of dimension ``d``, major first."""

    factors: tuple[Factor, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    known: bool = True
    """False where no rule was found and every factor is blocked: the operator runs replicated and is reported."""


@dataclass(frozen=True)
class Value:
    """One array of the program. ``dtype`` is a numpy dtype name or the string of a typed PRNG key."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole (unsharded) array."""
        total = self.itemsize_bytes
        for extent in self.shape:
            total *= extent
        return total


@dataclass(frozen=True)
class Source:
    """The user's own line that an operator comes from, and the module path if the names stack tells it."""

    file: str
    line: int
    path: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Operator:
    """One equation.

    ``operands`` holds a value id, or ``None`` for a literal. ``flops`` and ``bytes_moved`` are of the whole operator,
    unsharded, once (an operator in a loop body is counted by its graph's ``trips``).
    """

    id: int
    primitive: str
    equation: Any = field(repr=False, compare=False)
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    rule: Rule
    flops: float
    bytes_moved: float
    phase: Phase
    source: Source
    linear: bool = False
    """The result is linear in all ranked operands together, so partial sums may pass through unreduced."""
    bodies: tuple[Graph, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A closed program: ``inputs`` and ``outputs`` are value ids (an output may be ``None`` for a literal).

    ``values`` holds the values of this level only; :meth:`all_values` walks the bodies too. ``constants`` are values
    baked into the program (small closed-over arrays): never sharded. ``trips`` is how often this graph runs per run of
    its parent (1 at the top; a ``while`` counts as 1).
    """

    values: dict[int, Value]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    constants: tuple[int, ...]
    jaxpr: Any = field(repr=False, compare=False)
    trips: int = 1

    def all_operators(self) -> Iterator[tuple[Operator, int]]:
        """Every operator of the tree with the number of times it runs in one step."""
        for operator in self.operators:
            yield operator, self.trips
            for body in operator.bodies:
                for inner, trips in body.all_operators():
                    yield inner, trips * self.trips

    def all_values(self) -> Iterator[Value]:
        """Every value of the tree."""
        yield from self.values.values()
        for operator in self.operators:
            for body in operator.bodies:
                yield from body.all_values()
