"""Which values may stay partial sums over devices?

A value may when a chain of linear operators leads from a sum to an addition of two such sums (gradients of a tied embedding;
the input gradients of the query, key and value projections): reducing after the addition halves the bytes.

The same holds for a loop's carry that only gathers summands (an LSTM's gradients over time): each device gathers its own,
and one reduction follows the loop.
"""

from __future__ import annotations

from collections import Counter

from autopar import _compat
from autopar.graph.build import LoopKind
from autopar.graph.ir import Graph, Operator


def linear_values(graph: Graph, gathering: frozenset[int] = frozenset()) -> set[int]:
    """Values that lie between a sum and an addition of two sums, by linear operators only (this level of the tree).

    ``gathering`` are inputs of the graph that may be sums too; what a loop gathers may leave it as a sum.
    """
    producer = {result: operator for operator in graph.operators for result in operator.results}
    gathered = {result for operator in graph.operators for result in gathered_results(operator)}
    sums = {*gathering, *gathered}
    for operator in graph.operators:
        if any(factor.kind.leaves_sum for factor in operator.rule.factors) or (
            operator.linear and all(operand in sums for operand in operator.operands if operand is not None)
        ):
            sums.update(operator.results)
    found = set(gathered)
    for operator in graph.operators:
        ranked = [operand for operand in operator.operands if operand is not None]
        if operator.linear and len(ranked) > 1 and operator.results[0] in sums:
            stack = [*ranked, *operator.results]
            while stack:
                value = stack.pop()
                if value in found or value not in sums:
                    continue
                found.add(value)
                if value in producer and producer[value].linear:
                    stack.extend(producer[value].results)
                    stack.extend(operand for operand in producer[value].operands if operand is not None)
    return found


def gathering_carries(operator: Operator) -> frozenset[int]:
    """Inputs of a scan's body that nobody reads but the linear operator that makes their next value, for the loop alone."""
    if operator.primitive != LoopKind.SCAN:
        return frozenset()
    (body,) = operator.bodies
    consts, carries = _compat.scan_arity(operator.equation.params)
    reads = Counter([*(operand for inner in body.operators for operand in inner.operands), *body.outputs])
    producer = {result: inner for inner in body.operators for result in inner.results}
    links = zip(body.inputs[consts : consts + carries], body.outputs[:carries], strict=True)
    return frozenset(
        carry
        for carry, out in links
        if reads[carry] == reads[out] == 1 and out in producer
        if producer[out].linear and carry in producer[out].operands
    )


def gathered_results(operator: Operator) -> frozenset[int]:
    """Results of a scan that are what such a carry has gathered."""
    carries = gathering_carries(operator)
    if not carries:
        return frozenset()
    consts, count = _compat.scan_arity(operator.equation.params)
    inputs = operator.bodies[0].inputs[consts : consts + count]
    return frozenset(result for carry, result in zip(inputs, operator.results, strict=False) if carry in carries)
