"""Which dimensions of a step's arrays count its layers?

A model whose layers are one loop keeps the parameters of all L of them in one array, ``scan`` takes row ℓ of it in trip ℓ, and
its backward pass leaves row ℓ of the gradient.  A value v *is a stack* if one of its dimensions has the layers for its
major part,

    v[ℓ·k + r]     ℓ = 0 … L−1 the layer, r < k

From the operands of a loop over layers this reaches through the program along the factors of its operators, forwards and
backwards: an elementwise operator on stacks makes a stack, so does the loop of the backward pass, so do the moments of an
optimizer have layers because its parameters have.  A sum, maximum or minimum over the layers is made of those of parts.
Whatever else an operator does to the layers (it sorts or shuffles them, or looks one up) it does to the whole array.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar import _compat
from autopar.cluster import Mesh
from autopar.graph.build import BARRIER, LoopKind
from autopar.graph.ir import FactorKind, Graph, Operator
from autopar.schedule.local_ops import check_local

_KEPT = (FactorKind.PARALLEL,)
_COMBINED = {
    FactorKind.SUM: ("reduce_sum", "dot_general"),
    FactorKind.MAX: ("reduce_max", "reduce_or"),
    FactorKind.MIN: ("reduce_min", "reduce_and"),
}
"""Operators that may see some layers at a time, by what they do with them."""

_UNEVEN_REFUSED = ("conv_general_dilated",)
"""Their parameters count groups, which follow from pieces of equal size only."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Dimension ``dim`` of an array has ``count`` layers for its major part."""

    dim: int
    count: int


@dataclass(frozen=True)
class Stacks:
    """Stacks of one program by value; the loops over layers, and the factor of each other operator that counts layers."""

    values: Mapping[int, Rows]
    loops: frozenset[int]
    factors: Mapping[int, tuple[int, int]]
    """(factor, layers) by operator."""


def stacks_of(
    graph: Graph,
    state_pairs: Sequence[tuple[int, int]],
    layered: Iterable[int],
    known: Mapping[int, Rows] | None = None,
) -> Stacks:
    """The stacks of a program: what follows from its loops ``layered`` (operator ids) and from values ``known`` to be stacks."""
    reader, loops = _Reader(graph, state_pairs), frozenset(layered)
    for operator in graph.operators:
        if operator.id in loops:
            reader.open(operator)
    for value, rows in (known or {}).items():
        reader.note(value, rows)
    reader.settle()
    return Stacks(reader.values, frozenset(reader.loops), reader.factors)


def layer_loops(graph: Graph, batch: Sequence[int], keys: Sequence[int]) -> tuple[Operator, ...]:
    """The loops of a step that take the layers of its arguments one by one.

    Those are rows of arrays which are made, layer by layer, of a leaf that is neither batch nor key, and not of the batch:
    a loop over time takes rows of the batch.
    """
    makers = {result: (operator, k) for operator in graph.operators for k, result in enumerate(operator.results)}
    rows = {graph.inputs[position] for position in batch}
    for operator in graph.operators:
        if not rows.isdisjoint(operator.operands):
            rows.update(operator.results)
    leaves = {value for position, value in enumerate(graph.inputs) if position not in {*batch, *keys}}
    found = []
    for operator in graph.operators:
        if is_layered(operator) and any(
            value not in rows and _is_of_leaf(value, operator.bodies[0].trips, makers, leaves)
            for value in _stacked_operands(operator)
        ):
            found.append(operator)
    return tuple(found)


def is_layered(operator: Operator) -> bool:
    """Whether an operator is a loop that can be cut between trips."""
    if operator.primitive != LoopKind.SCAN or operator.equation.effects:
        return False
    return operator.bodies[0].trips > 1


def _stacked_operands(operator: Operator) -> Iterator[int]:
    consts, carries = _compat.scan_arity(operator.equation.params)
    return (value for value in operator.operands[consts + carries :] if value is not None)


def _is_of_leaf(value: int, count: int, makers: Mapping[int, tuple[Operator, int]], leaves: set[int]) -> bool:
    """Whether the rows of a value are made of the rows of a leaf."""
    seen: set[tuple[int, Rows]] = set()
    todo = [(value, Rows(0, count))]
    while todo:
        value, rows = one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if value in leaves:
            return True
        if value not in makers:
            continue
        operator, position = makers[value]
        if operator.primitive == BARRIER:
            source = operator.operands[position]
            todo += [] if source is None else [(source, rows)]
        elif (factor := _factor_at(operator, operator.rule.results, position, rows)) is not None:
            todo += [(v, at) for v, at in _places(operator, operator.operands, operator.rule.operands, factor, rows)]
    return False


def _factor_at(operator: Operator, sides: Sequence[Sequence[Sequence[int]]], position: int, rows: Rows) -> int | None:
    """The factor that counts the layers of an operand or result, if the operator may see some of them at a time."""
    rule, name = operator.rule, operator.primitive
    if not rule.known or operator.bodies or name in _UNEVEN_REFUSED:
        return None
    major = next((f for f in sides[position][rows.dim] if rule.factors[f].size > 1), None)
    if major is None or rule.factors[major].size % rows.count:
        return None
    kind = rule.factors[major].kind
    if kind not in _KEPT and name not in _COMBINED.get(kind, ()):
        return None
    axis = "rows"
    strategy = tuple((axis,) if f == major else () for f in range(len(rule.factors)))
    cannot = check_local(operator, strategy, Mesh((axis,), (rule.factors[major].size,)))
    everywhere = kind not in _KEPT or all(any(major in dim for dim in dims) for dims in rule.results)
    return major if cannot is None and everywhere else None


def _places(
    operator: Operator,
    values: Sequence[int | None],
    sides: Sequence[Sequence[Sequence[int]]],
    factor: int,
    rows: Rows,
) -> Iterator[tuple[int, Rows]]:
    for value, dims in zip(values, sides, strict=True):
        dim = dim_of(operator, dims, factor)
        if value is not None and dim is not None:
            yield value, Rows(dim, rows.count)


def dim_of(operator: Operator, dims: Sequence[Sequence[int]], factor: int) -> int | None:
    """The dimension whose major factor is ``factor``."""
    sizes = operator.rule.factors
    for dim, factors in enumerate(dims):
        if next((f for f in factors if sizes[f].size > 1), None) == factor:
            return dim
    return None


class _Reader:
    """Owns what is known so far, and what is still to be followed."""

    def __init__(self, graph: Graph, state_pairs: Sequence[tuple[int, int]]) -> None:
        self._graph = graph
        self._makers = {r: (o, k) for o in graph.operators for k, r in enumerate(o.results)}
        self._readers: dict[int, list[tuple[Operator, int]]] = defaultdict(list)
        for operator in graph.operators:
            for position, value in enumerate(operator.operands):
                if value is not None:
                    self._readers[value].append((operator, position))
        self._twins: dict[int, list[int]] = defaultdict(list)
        for before, after in state_pairs:
            one, other = graph.inputs[before], graph.outputs[after]
            if other is not None:
                self._twins[one].append(other)
                self._twins[other].append(one)
        self._todo: list[int] = []
        self.values: dict[int, Rows] = {}
        self.loops: set[int] = set()
        self.factors: dict[int, tuple[int, int]] = {}

    def note(self, value: int, rows: Rows) -> None:
        """A value is a stack; what was found first counts."""
        shape = self._graph.values[value].shape
        if value not in self.values and rows.dim < len(shape) and shape[rows.dim] % rows.count == 0:
            self.values[value] = rows
            self._todo.append(value)

    def open(self, operator: Operator) -> None:
        """A loop runs over layers."""
        if operator.id in self.loops or not is_layered(operator):
            return
        self.loops.add(operator.id)
        _, carries = _compat.scan_arity(operator.equation.params)
        for value in (*_stacked_operands(operator), *operator.results[carries:]):
            self.note(value, Rows(0, operator.bodies[0].trips))

    def settle(self) -> None:
        """Follow all that is known to its end."""
        while self._todo:
            value = self._todo.pop()
            rows = self.values[value]
            for twin in self._twins[value]:
                self.note(twin, rows)
            for operator, position in self._readers[value]:
                self._follow(operator, operator.operands, operator.rule.operands, position, rows)
            if value in self._makers:
                operator, position = self._makers[value]
                self._follow(operator, operator.results, operator.rule.results, position, rows)

    def _follow(
        self,
        operator: Operator,
        values: Sequence[int | None],
        sides: Sequence[Sequence[Sequence[int]]],
        position: int,
        rows: Rows,
    ) -> None:
        if operator.primitive == BARRIER:
            for value in (operator.operands[position], operator.results[position]):
                if value is not None:
                    self.note(value, rows)
            return
        if is_layered(operator):
            consts, carries = _compat.scan_arity(operator.equation.params)
            first = carries if values is operator.results else consts + carries
            if position >= first and rows == Rows(0, operator.bodies[0].trips):
                self.open(operator)
            return
        factor = _factor_at(operator, sides, position, rows)
        if factor is None or self.factors.setdefault(operator.id, (factor, rows.count)) != (factor, rows.count):
            return
        rule = operator.rule
        ends = ((operator.operands, rule.operands), (operator.results, rule.results))
        for of, dims in ends:
            for value, at in _places(operator, of, dims, factor, rows):
                self.note(value, at)
