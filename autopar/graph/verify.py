"""Is this a graph?  The promises of :mod:`autopar.graph.ir` that every later pass relies on, checked one by one.

For every level of the tree: ids are unique, a value is made once and before it is used, a rule has one factor list for
each dimension, and the extent of a dimension that may be cut is the product of its factors

    n_d = ∏ size(f), f ∈ factors of d        (where the major factor of d is not blocked)

and what crosses the border of a loop or branch has the same shape on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar import _compat
from autopar.errors import InternalError
from autopar.graph.build import LoopKind
from autopar.graph.ir import FactorKind, Graph, Operator, Rule, Value

Shape = tuple[int, ...]


def verify_graph(graph: Graph) -> None:
    """Raise :class:`~autopar.errors.InternalError` at the first broken promise."""
    _Verifier().level(graph)


class _Verifier:
    """Owns the ids seen in the whole tree."""

    def __init__(self) -> None:
        self._values: set[int] = set()
        self._operators: set[int] = set()

    def level(self, graph: Graph) -> None:
        for key, value in graph.values.items():
            _demand(key == value.id, f"value {value.id} is listed as {key}")
            _demand(value.id not in self._values, f"value {value.id} stands twice in the tree")
            _demand(all(extent >= 0 for extent in value.shape), f"value {value.id} has shape {value.shape}")
            self._values.add(value.id)
        _demand(graph.trips >= 0, f"a graph runs {graph.trips} times")
        made: set[int] = set()
        for value_id in (*graph.constants, *graph.inputs):
            self._make(value_id, made, graph, "an input or constant")
        for operator in graph.operators:
            self._operator(operator, graph, made)
        for output in graph.outputs:
            _demand(output is None or output in made, f"output value {output} is never made")

    def _make(self, value: int, made: set[int], graph: Graph, maker: str) -> None:
        _demand(value in graph.values, f"value {value} of {maker} is not of this level")
        _demand(value not in made, f"value {value} of {maker} is made twice")
        made.add(value)

    def _operator(self, operator: Operator, graph: Graph, made: set[int]) -> None:
        name = f"operator {operator.id} ({operator.primitive})"
        _demand(operator.id not in self._operators, f"{name}: its id stands twice in the tree")
        self._operators.add(operator.id)
        for operand in operator.operands:
            _demand(operand is None or operand in made, f"{name}: operand value {operand} is used before it is made")
        for result in operator.results:
            self._make(result, made, graph, name)
        work = (operator.flops, operator.bytes_moved)
        _demand(all(math.isfinite(amount) and amount >= 0 for amount in work), f"{name}: FLOPs and bytes are {work}")
        operands = [None if value is None else graph.values[value] for value in operator.operands]
        results = [graph.values[value] for value in operator.results]
        if operator.bodies:
            _verify_bodies(name, operator, operands, results)
            for body in operator.bodies:
                self.level(body)
        else:
            _verify_rule(name, operator.rule, operands, results)


def _verify_rule(name: str, rule: Rule, operands: Sequence[Value | None], results: Sequence[Value]) -> None:
    _demand(len(rule.operands) == len(operands), f"{name}: its rule has {len(rule.operands)} operands")
    _demand(len(rule.results) == len(results), f"{name}: its rule has {len(rule.results)} results")
    count = len(rule.factors)
    for value, mapping in zip((*operands, *results), (*rule.operands, *rule.results), strict=True):
        shape = () if value is None else value.shape
        _demand(len(mapping) == len(shape), f"{name}: the rule has {len(mapping)} dimensions for shape {shape}")
        for extent, factors in zip(shape, mapping, strict=True):
            _demand(all(0 <= factor < count for factor in factors), f"{name}: factors {factors} of {count}")
            if factors and rule.factors[factors[0]].kind is not FactorKind.BLOCKED:
                product = math.prod(rule.factors[factor].size for factor in factors)
                _demand(product == extent, f"{name}: factors {factors} make {product} of a dimension of {extent}")
    used = {factor for mapping in rule.results for factors in mapping for factor in factors}
    for number, factor in enumerate(rule.factors):
        reduced = factor.kind.leaves_sum or factor.kind in (FactorKind.MAX, FactorKind.MIN)
        kept = factor.kind in (FactorKind.PARALLEL, FactorKind.SCATTER)
        _demand(not (reduced and number in used), f"{name}: factor {number} ({factor.kind.value}) reaches a result")
        _demand(not kept or number in used, f"{name}: factor {number} ({factor.kind.value}) reaches no result")


def _verify_bodies(name: str, operator: Operator, operands: Sequence[Value | None], results: Sequence[Value]) -> None:
    params = operator.equation.params
    match operator.primitive:
        case LoopKind.SCAN:
            _demand(len(operator.bodies) == 1, f"{name}: a scan has one body")
            (body,) = operator.bodies
            consts, carries = _compat.scan_arity(params)
            whole = consts + carries
            _demand(body.trips == params["length"], f"{name}: {body.trips} trips, its length is {params['length']}")
            _same(name, operands[:whole], body.inputs[:whole], body)
            _same(name, operands[whole:], body.inputs[whole:], body, trips=body.trips)
            _same(name, results[:carries], body.outputs[:carries], body)
            _same(name, results[carries:], body.outputs[carries:], body, trips=body.trips)
        case LoopKind.WHILE:
            _demand(len(operator.bodies) == 2, f"{name}: a while has a condition and a body")
            condition, body = operator.bodies
            split, consts = params["cond_nconsts"], params["body_nconsts"]
            tested, fixed, carry = operands[:split], operands[split : split + consts], operands[split + consts :]
            _same(name, [*tested, *carry], condition.inputs, condition)
            _same(name, [*fixed, *carry], body.inputs, body)
            _same(name, results, body.outputs, body)
            _demand(len(condition.outputs) == 1, f"{name}: its condition has {len(condition.outputs)} outputs")
        case LoopKind.COND:
            for body in operator.bodies:
                _same(name, operands[1:], body.inputs, body)
                _same(name, results, body.outputs, body)
        case _:
            raise InternalError(f"{name}: only loops and branches have bodies")


def _same(
    name: str, outside: Sequence[Value | None], inside: Sequence[int | None], body: Graph, *, trips: int | None = None
) -> None:
    """Arrays inside a body have the shapes of those outside (without the leading dimension, where there are trips)."""
    _demand(len(outside) == len(inside), f"{name}: {len(outside)} arrays meet {len(inside)} of its body")
    for outer, inner in zip(outside, inside, strict=True):
        if outer is None or inner is None:
            continue
        shape = body.values[inner].shape
        expected = shape if trips is None else (trips, *shape)
        _demand(outer.shape == expected, f"{name}: value {outer.id} of shape {outer.shape} meets one of {expected}")
        _demand(outer.dtype == body.values[inner].dtype, f"{name}: value {outer.id} changes its dtype at the border")


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise InternalError(f"the graph is broken: {what}; please report this")
