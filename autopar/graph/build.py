"""From a closed jaxpr to a :class:`~autopar.graph.ir.Graph`.

One pass numbers values and operators over the whole tree of bodies, asks once for the rules of all equations that have
no body, and reads from each equation its phase:

    backward   its name stack holds ``transpose(…)`` (JAX writes that on every transposed equation)
    forward    its name stack holds ``jvp(…)``, or its result is needed by an equation of these two kinds
    update     everything else (where nothing is differentiated, all is forward)

An operator inside a loop or branch inherits the phase of the loop, unless the loop runs whole passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import jax
import numpy as np

from autopar import _compat
from autopar.graph.flops import bytes_of, flops_of
from autopar.graph.ir import Graph, Operator, Phase, Rule, Source, Value
from autopar.graph.rules import Rulebook

LINEAR_IN_ALL_OPERANDS = frozenset({"add", "add_any", "sub"})
LINEAR_IN_THE_OPERAND = frozenset(
    {"neg", "transpose", "reshape", "broadcast_in_dim", "reduce_sum", "copy", "squeeze", "split"}
)
LINEAR_WITH_A_LITERAL = frozenset({"mul", "div"})


BARRIER = "optimization_barrier"
"""Result k of this primitive is operand k; the operands have nothing to do with each other."""


class LoopKind(StrEnum):
    """The primitives whose bodies stay bodies, and how to read them from an equation."""

    SCAN = "scan"
    WHILE = "while"
    COND = "cond"


def build_graph(closed_jaxpr: Any, *, platform: str) -> Graph:
    """The graph of an inlined closed jaxpr, with factors as the lowering for ``platform`` (``"cpu"``, …) shows them."""
    return build_graph_by(Rulebook(platform), closed_jaxpr)


def build_graph_by(rulebook: Rulebook, closed_jaxpr: Any) -> Graph:
    """The same, with rules that may have been found for other graphs."""
    plain = [equation for equation in _all_equations(closed_jaxpr) if not bodies_of(equation)]
    rules = {id(equation): rule for equation, rule in zip(plain, rulebook.of(plain), strict=True)}
    return _Builder(rules).graph(closed_jaxpr, trips=1, phase=None)


def avals_of(graph: Graph) -> dict[int, Any]:
    """The abstract array of every value of the tree, by id."""
    jaxpr = _compat.jaxpr_of(graph.jaxpr)
    found = dict(zip(graph.inputs, (variable.aval for variable in jaxpr.invars), strict=True))
    found.update(zip(graph.constants, (variable.aval for variable in jaxpr.constvars), strict=True))
    for operator in graph.operators:
        found.update(zip(operator.results, (variable.aval for variable in operator.equation.outvars), strict=True))
        for body in operator.bodies:
            found.update(avals_of(body))
    return found


def bodies_of(equation: Any) -> tuple[tuple[Any, int], ...]:
    """The closed jaxprs that an equation runs, each with its number of trips; empty for an ordinary operator."""
    params = equation.params
    match equation.primitive.name:
        case LoopKind.SCAN:
            return ((params["jaxpr"], params["length"]),)
        case LoopKind.WHILE:
            return (params["cond_jaxpr"], 1), (params["body_jaxpr"], 1)
        case LoopKind.COND:
            return tuple((branch, 1) for branch in params["branches"])
    return ()


def _all_equations(closed_jaxpr: Any) -> Iterator[Any]:
    for equation in _compat.jaxpr_of(closed_jaxpr).eqns:
        yield equation
        for body, _ in bodies_of(equation):
            yield from _all_equations(body)


class _Builder:
    """Owns the counters that make ids unique over the tree."""

    def __init__(self, rules: dict[int, Rule]) -> None:
        self._rules = rules
        self._value_ids = itertools.count()
        self._operator_ids = itertools.count()

    def graph(self, closed_jaxpr: Any, *, trips: int, phase: Phase | None) -> Graph:
        jaxpr = _compat.jaxpr_of(closed_jaxpr)
        ids: dict[Any, int] = {}
        values: dict[int, Value] = {}

        def number(variable: Any) -> int:
            if (known := ids.get(variable)) is not None:
                return known
            ids[variable] = identity = next(self._value_ids)
            values[identity] = _value(identity, variable.aval)
            return identity

        constants = tuple(number(variable) for variable in jaxpr.constvars)
        inputs = tuple(number(variable) for variable in jaxpr.invars)
        operators = []
        phases = [phase] * len(jaxpr.eqns) if phase else _phases(jaxpr)
        for equation, own_phase in zip(jaxpr.eqns, phases, strict=True):
            operands = tuple(None if isinstance(atom, _compat.Literal) else ids[atom] for atom in equation.invars)
            results = tuple(number(variable) for variable in equation.outvars)
            operators.append(self._operator(equation, operands, results, own_phase, values))
        outputs = tuple(None if isinstance(atom, _compat.Literal) else ids[atom] for atom in jaxpr.outvars)
        return Graph(values, tuple(operators), inputs, outputs, constants, closed_jaxpr, trips)

    def _operator(
        self,
        equation: Any,
        operands: tuple[int | None, ...],
        results: tuple[int, ...],
        phase: Phase,
        values: dict[int, Value],
    ) -> Operator:
        file, line = _compat.user_source(equation)
        inner = None if _holds_passes(equation) else phase
        bodies = tuple(self.graph(body, trips=trips, phase=inner) for body, trips in bodies_of(equation))
        return Operator(
            id=next(self._operator_ids),
            primitive=equation.primitive.name,
            equation=equation,
            operands=operands,
            results=results,
            rule=Rule((), (), ()) if bodies else self._rules.get(id(equation)) or _opaque(operands, results, values),
            flops=0.0 if bodies else flops_of(equation),
            bytes_moved=0.0 if bodies else bytes_of(equation),
            phase=phase,
            source=Source(file, line, _compat.name_stack_text(equation)),
            linear=_is_linear(equation),
            bodies=bodies,
        )


def _opaque(operands: tuple[int | None, ...], results: tuple[int, ...], values: dict[int, Value]) -> Rule:
    """A rule that cuts nothing."""

    def uncut(identity: int | None) -> tuple[tuple[int, ...], ...]:
        return () if identity is None else ((),) * len(values[identity].shape)

    return Rule((), tuple(map(uncut, operands)), tuple(map(uncut, results)), known=False)


def _value(identity: int, aval: Any) -> Value:
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return Value(identity, (), "token", 0)
    itemsize = getattr(dtype, "itemsize", 0) if not isinstance(dtype, np.dtype) else dtype.itemsize
    return Value(identity, shape, str(dtype), int(itemsize))


def _phases(jaxpr: Any) -> list[Phase]:
    stacks = [_compat.name_stack_text(equation) for equation in jaxpr.eqns]
    if not any("transpose(" in stack for stack in stacks) and not any(map(_holds_passes, jaxpr.eqns)):
        return [Phase.FORWARD] * len(stacks)
    phases = []
    needed: set[Any] = set()
    for equation, stack in zip(reversed(jaxpr.eqns), reversed(stacks), strict=True):
        if "transpose(" in stack or _holds_passes(equation):
            phases.append(Phase.BACKWARD)
        elif "jvp(" in stack or not needed.isdisjoint(equation.outvars):
            phases.append(Phase.FORWARD)
        else:
            phases.append(Phase.UPDATE)
            continue
        needed.update(atom for atom in equation.invars if not isinstance(atom, _compat.Literal))
    return phases[::-1]


def _holds_passes(equation: Any) -> bool:
    """Whether a loop that is no part of a pass itself runs a forward and a backward pass, as one over microbatches does."""
    if "jvp(" in _compat.name_stack_text(equation):
        return False
    return any(
        "transpose(" in _compat.name_stack_text(inner) or _holds_passes(inner)
        for body, _ in bodies_of(equation)
        for inner in _compat.jaxpr_of(body).eqns
    )


def _is_linear(equation: Any) -> bool:
    name = equation.primitive.name
    if not equation.outvars or not _is_inexact(equation.outvars[0]):
        return False
    literals = [isinstance(atom, _compat.Literal) for atom in equation.invars]
    if name in LINEAR_IN_ALL_OPERANDS:
        # Adding zero (as Python's sum begins) keeps a partial sum what it is; adding anything else does not.
        return all(not literal or not np.any(atom.val) for atom, literal in zip(equation.invars, literals, strict=True))
    if name in LINEAR_WITH_A_LITERAL:
        return literals == [False, True] or (name == "mul" and literals == [True, False])
    if name == "convert_element_type":
        return not literals[0] and _is_inexact(equation.invars[0])
    return name in LINEAR_IN_THE_OPERAND and not literals[0]


def _is_inexact(variable: Any) -> bool:
    """Whether it holds real or complex numbers; NumPy itself takes bfloat16 for neither."""
    return bool(jax.numpy.issubdtype(_dtype(variable), jax.numpy.inexact))


def _dtype(variable: Any) -> Any:
    dtype = getattr(variable.aval, "dtype", np.dtype(bool))
    return dtype if isinstance(dtype, np.dtype) else np.dtype(bool)
