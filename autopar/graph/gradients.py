"""Which values are gradients on their way into the update: made by the backward pass, read by the update.

Their reductions do not wait for each other, so XLA combines those of one kind and one set of axes into a single
collective: the latency is paid once, not once per parameter.  The same is true of the sums that the update takes of each
of them, for a norm, where such a sum cannot stay unreduced until all are added (narrow floats are rounded first).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.graph.ir import Graph, Operator, Phase


def gradient_values(graph: Graph) -> frozenset[int]:
    """Backward values that are read by the update, or lead there and nowhere else by linear operators."""
    consumers: dict[int, list[Operator]] = defaultdict(list)
    for operator in graph.operators:
        for operand in operator.operands:
            if operand is not None:
                consumers[operand].append(operator)
    found: set[int] = set()
    for operator in reversed(graph.operators):
        if operator.phase is not Phase.BACKWARD:
            continue
        for result in operator.results:
            readers = consumers[result]
            on_the_way = [
                reader.phase is Phase.BACKWARD and reader.linear and found.issuperset(reader.results)
                for reader in readers
            ]
            updates = [reader.phase is Phase.UPDATE for reader in readers]
            if any(updates) or (readers and all(on_the_way)):
                found.add(result)
    return frozenset(found | _first_sums(graph, consumers))


def _first_sums(graph: Graph, consumers: Mapping[int, Sequence[Operator]]) -> set[int]:
    """Sums that the update takes of what it has summed nothing for, read by what wants them whole."""
    summed: set[int] = set()
    found: set[int] = set()
    for operator in graph.operators:
        if operator.phase is not Phase.UPDATE:
            continue
        if not summed.isdisjoint(operator.operands):
            summed.update(operator.results)
        elif operator.primitive == "reduce_sum":
            summed.update(operator.results)
            found.update(value for value in operator.results if any(not one.linear for one in consumers[value]))
    return found
