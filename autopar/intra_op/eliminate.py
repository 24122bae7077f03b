"""The optimum of a narrow model, node after node, with tables over all neighbours (Bertelè and Brioschi, 1972).

Of a node, given the options of its neighbours, only the cheapest option matters; so the costs that it takes part in are added
up, minimised over its options, and left to its neighbours as one table.  Nodes of the smallest tables go first.  Where nodes have
few options each this is quicker than an integer program whose relaxation is fractional; where tables become large it is hopeless.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from autopar.intra_op.model import Model, Solution

MOST_ENTRIES = 1 << 21
"""Of a table, that of the node itself included."""

DECIDED = 0
"""In place of the entries of a node's table when it has gone: no table has so few."""

Table = tuple[tuple[int, ...], np.ndarray]
"""Costs by the options of some nodes, which are named in ascending order."""


def optimum_by_elimination(model: Model) -> Solution | None:
    """The optimum; None where there is none or tables become too large.  Memory rows are not looked at."""
    sizes = [len(costs) for costs in model.nodes]
    tables: list[list[Table]] = [[((node,), costs)] for node, costs in enumerate(model.nodes)]
    around: list[set[int]] = [set() for _ in sizes]
    for (i, j), matrix in model.edges.items():
        tables[i].append(((i, j), matrix))
        around[i].add(j)
        around[j].add(i)
    entries = [_entries(node, around, sizes) for node in range(len(sizes))]
    waiting = [
        (count, node) for node, count in enumerate(entries)
    ]  # with entries of before a neighbour went among them
    heapq.heapify(waiting)
    decided: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    while waiting:
        count, node = heapq.heappop(waiting)
        if count != entries[node]:
            continue
        if count > MOST_ENTRIES:
            return None
        entries[node] = DECIDED
        scope = tuple(sorted(around[node]))
        parts = [part for one in (node, *scope) for part in tables[one] if node in part[0]]
        total = _added(parts, (*scope, node), sizes)
        decided.append((node, scope, total.argmin(axis=-1)))
        for other in scope:
            tables[other] = [part for part in tables[other] if node not in part[0]]
            around[other] |= around[node] - {other}
            around[other].discard(node)
            entries[other] = _entries(other, around, sizes)
            heapq.heappush(waiting, (entries[other], other))
        tables[node] = []
        if scope:
            tables[scope[0]].append((scope, total.min(axis=-1)))
    options = [0] * len(sizes)
    for node, scope, best in reversed(decided):
        options[node] = int(best[tuple(options[other] for other in scope)])
    cost = model.cost(options)
    return Solution(tuple(options), cost, cost) if math.isfinite(cost) else None


def _entries(node: int, around: list[set[int]], sizes: list[int]) -> int:
    return math.prod(sizes[other] for other in around[node]) * sizes[node]


def _added(parts: list[Table], scope: tuple[int, ...], sizes: list[int]) -> np.ndarray:
    """The sum of tables as one over ``scope``."""
    place = {node: axis for axis, node in enumerate(scope)}
    total = np.zeros([sizes[node] for node in scope])
    for nodes, costs in parts:
        axes = [place[node] for node in nodes]
        ranked = np.transpose(costs, np.argsort(axes))
        shape = [1] * len(scope)
        for axis in axes:
            shape[axis] = total.shape[axis]
        total += ranked.reshape(shape)
    return total
