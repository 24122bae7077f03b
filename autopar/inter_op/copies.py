"""How is work of the forward pass written once more, into the backward pass that reads what it makes?

Given operators A of the forward pass, the values I ⊆ results(A) that the backward pass reads, and what A reads and does not make,

    guarded = optimization_barrier(what A reads and changes from step to step, a cotangent)
    I′      = A on what is guarded
    backward operators:  v ∈ I  ⟶  v′ ∈ I′

The barrier keeps a compiler from finding that A and its copy do the same work; the cotangent, which the first reader then takes
from behind the barrier, keeps it from doing the work early.  Each copy stands before its first reader.  Nobody reads A any more,
as far as only the backward pass did: it is for whoever asks for the copies to drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from autopar import _compat
from autopar._compat import DropVar, Literal, Var
from autopar.graph.ir import Graph, Operator, Phase


@dataclass(frozen=True)
class Again:
    """Work that is done again: what the backward pass reads, operators that make it, and what of their operands is guarded."""

    needed: frozenset[int]
    operators: tuple[Operator, ...]
    guarded: tuple[int, ...]


def leading_to(
    operators: Sequence[Operator], needed: Iterable[int], is_kept: Callable[[int], bool]
) -> tuple[tuple[Operator, ...], tuple[int, ...]]:
    """Those of ``operators`` that lead to values ``needed`` from values that are kept, and these, once each."""
    made: set[int] = set()
    starts: dict[int, None] = {}
    wanted = set(needed)
    for operator in reversed(operators):
        if wanted.isdisjoint(operator.results):
            continue
        made.add(operator.id)
        for value in operator.operands:
            if value is not None and is_kept(value):
                starts[value] = None
            elif value is not None:
                wanted.add(value)
    return tuple(one for one in operators if one.id in made), tuple(starts)


def made_of(graph: Graph, values: Set[int]) -> set[int]:
    """The values and all that is made of any of them."""
    found = set(values)
    for operator in graph.operators:
        if not found.isdisjoint(operator.operands):
            found.update(operator.results)
    return found


def variables_of(graph: Graph) -> dict[int, Any]:
    """The variables of one level of a program, by value."""
    jaxpr = _compat.jaxpr_of(graph.jaxpr)
    found = dict(zip(graph.inputs, jaxpr.invars, strict=True))
    found.update(zip(graph.constants, jaxpr.constvars, strict=True))
    for operator in graph.operators:
        found.update(zip(operator.results, operator.equation.outvars, strict=True))
    return found


class CopyWriter:
    """Owns the copies that are written so far."""

    def __init__(self, graph: Graph, layers: Iterable[Again], cotangents: Set[int]) -> None:
        """``cotangents`` are values of the backward pass that a barrier may wait for."""
        self._graph = graph
        self._layers = tuple(layers)
        self._of_value = {value: layer for layer in self._layers for value in layer.needed}
        self._copies: dict[int, Any] = {}  # by value: its copy
        self._behind: dict[int, dict[int, Any]] = {}  # by layer (its identity), value: what stands behind the barrier
        self._variable = variables_of(graph)
        self._cotangents = cotangents
        self._makers = {id(one): {v: o for o in one.operators for v in o.results} for one in self._layers}

    def equations(self) -> Iterator[Any]:
        """The equations of the whole program, copies among them."""
        for operator in self._graph.operators:
            reads = [v for v in operator.operands if v in self._of_value] if operator.phase is Phase.BACKWARD else []
            if not reads:
                yield operator.equation
                continue
            swapped: dict[int, Any] = {}
            for value in reads:
                assert value is not None
                layer = self._of_value[value]
                if id(layer) not in self._behind:
                    yield from self._barrier(layer, operator)
                    gates = [v for v in operator.operands if v is not None and v in self._behind[id(layer)]]
                    swapped.update({v: self._behind[id(layer)][v] for v in gates if v in self._cotangents})
                yield from self._copy(value, layer)
                swapped[value] = self._copies[value]
            yield self._reading(operator, swapped, operator.equation.source_info)

    def _barrier(self, layer: Again, first_reader: Operator) -> Iterator[Any]:
        """The barrier of a layer, if there is anything to guard."""
        cotangents = [v for v in first_reader.operands if v is not None and v in self._cotangents]
        values = list(dict.fromkeys((*layer.guarded, *cotangents)))
        found = {value: Var(self._variable[value].aval) for value in values}
        self._behind[id(layer)] = dict(found)
        like = layer.operators[0].equation
        if not values:
            return
        yield like.replace(
            invars=[self._variable[value] for value in values],
            outvars=list(found.values()),
            primitive=_compat.optimization_barrier_primitive(),
            params={},
            effects=frozenset(),
            source_info=_compat.in_backward_pass(like),
        )

    def _copy(self, value: int, layer: Again) -> Iterator[Any]:
        """The equations that make the copy of a value, those of what it is made of first; none if it is there."""
        makers = self._makers[id(layer)]
        stack = [value]
        while stack:
            if stack[-1] in self._copies:
                stack.pop()
                continue
            operator = makers[stack[-1]]
            missing = [v for v in operator.operands if v in makers and self._is_own(v, layer) and v not in self._copies]
            if missing:
                stack.extend(v for v in missing if v is not None)
                continue
            read = {v: self._copies[v] for v in operator.operands if v in self._copies and self._is_own(v, layer)}
            read |= {v: self._behind[id(layer)][v] for v in layer.guarded if v in operator.operands}
            equation = self._reading(operator, read, _compat.in_backward_pass(operator.equation))
            outvars = [v if isinstance(v, DropVar) else Var(v.aval) for v in operator.equation.outvars]
            self._copies.update(zip(operator.results, outvars, strict=True))
            yield equation.replace(outvars=outvars)

    def _is_own(self, value: int | None, layer: Again) -> bool:
        """Whether copies read a copy of a value and not what was kept of it."""
        return value not in layer.guarded

    def _reading(self, operator: Operator, instead: dict[int, Any], source_info: Any) -> Any:
        atoms = [
            atom if value is None or isinstance(atom, Literal) else instead.get(value, atom)
            for value, atom in zip(operator.operands, operator.equation.invars, strict=True)
        ]
        return operator.equation.replace(invars=atoms, source_info=source_info)
