"""The critical moments of a program: when, in its own order, do the most bytes live, and whose are they?

Each moment becomes a memory row of the integer program: bytes of whole arrays here, scaled there by the share that
a layout leaves on a device.  Inputs live throughout (a donated state's output takes over its memory); any other value
that the fusion model gives a buffer lives from its operator to the end of the last kernel that reads it.  A loop counts
what lives inside its body at the body's own critical moments.
"""

from __future__ import annotations

from collections import defaultdict

from autopar.graph.fusion import Fusion
from autopar.graph.ir import Graph

MOMENTS = 8
"""So many moments are kept, the fullest ones."""

NEAR_THE_PEAK = 0.9
"""A moment counts as critical from this share of the fullest so far."""


def critical_moments(
    graph: Graph, fusion: Fusion, state_pairs: tuple[tuple[int, int], ...] = (), donated: frozenset[int] = frozenset()
) -> list[dict[int, float]]:
    """For each critical moment the whole bytes of every value that lives then."""
    values = graph.values
    position = {operator.id: number for number, operator in enumerate(graph.operators)}
    taken_over = {graph.outputs[output] for source, output in state_pairs if source in donated}
    last_read = _last_reads(graph, fusion, position)
    live = {value: float(values[value].size_bytes) for value in graph.inputs}
    moments = [dict(live)]
    total = fullest = sum(live.values())
    gone: dict[int, list[int]] = defaultdict(list)
    for number, operator in enumerate(graph.operators):
        for result in operator.results:
            if result in fusion.materialised and result not in taken_over:
                live[result] = float(values[result].size_bytes)
                total += live[result]
                gone[max(last_read.get(result, number), number)].append(result)
        inside = [row for body in operator.bodies for row in critical_moments(body, fusion)[:2]]
        if inside or (gone[number] and total > NEAR_THE_PEAK * fullest):
            fullest = max(fullest, total)
            moments.extend({**live, **row} for row in inside or [{}])
        for result in gone[number]:
            total -= live.pop(result)
    return sorted(moments, key=lambda row: -sum(row.values()))[:MOMENTS]


def _last_reads(graph: Graph, fusion: Fusion, position: dict[int, int]) -> dict[int, int]:
    last: dict[int, int] = {}
    end = len(graph.operators) - 1
    for number, operator in enumerate(graph.operators):
        roots = fusion.roots.get(operator.id, frozenset())
        read_at = max((position.get(root, number) for root in roots), default=number)
        for operand in operator.operands:
            if operand is not None:
                last[operand] = max(last.get(operand, 0), read_at, number)
    last.update(dict.fromkeys((value for value in graph.outputs if value is not None), end))
    return last
