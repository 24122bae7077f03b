"""Which leaves of the state lie idle until the update?  Moments of an optimizer, averages of parameters, master copies.

A leaf of the state is idle if no operator of the forward or backward pass reads it and operators of the update make its next
value: it is needed for an instant of the step, and may lie elsewhere for the rest.  Nothing is told by names.
"""

from __future__ import annotations

from autopar.graph.ir import Graph, Phase

SMALL_SHARE = 1e-3
"""Leaves below this share of the largest idle one stay where they are: they are many, and weigh nothing."""


def idle_until_update(graph: Graph, state_pairs: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Positions of the inputs that lie idle until the update; ``state_pairs`` are (input, output) positions of the state."""
    early = {
        operand for operator in graph.operators if operator.phase is not Phase.UPDATE for operand in operator.operands
    }
    made = {result for operator in graph.operators if operator.phase is Phase.UPDATE for result in operator.results}
    idle = [
        source for source, output in state_pairs if graph.inputs[source] not in early and graph.outputs[output] in made
    ]
    sizes = {source: graph.values[graph.inputs[source]].size_bytes for source in idle}
    least = SMALL_SHARE * max(sizes.values(), default=0)
    return tuple(source for source in idle if sizes[source] >= least)
