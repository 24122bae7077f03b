"""The best solution of a model, node after node: what is decided but still matters is all that is remembered.

Nodes are decided in a fixed order.  A decided node is *open* as long as a neighbour is undecided; of all partial solutions
that agree on the open nodes only the cheapest can be part of an optimum, so one state per combination of their options is
kept (the frontier method; dynamic programming along a path decomposition, as in Bodlaender, 1998, §2).

What a state has cost so far says little, unless costs are rewritten so that what is to come costs nothing at best: with the
messages of :mod:`autopar.intra_op.bound` every solution x costs L + Σ rᵢ(xᵢ) + Σ rᵢⱼ(xᵢ, xⱼ) with bound L and *residuals* r ≥ 0.
States whose residuals exceed what a solution may cost go, and so do, beyond a number of them, the dearest.  The cheapest that
went bounds every solution that was missed, so the answer comes with a proof of how good it is: of an optimum, if nothing went.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from autopar.intra_op.bound import Residuals
from autopar.intra_op.model import Model, Pair

STARTS = 8
"""Nodes from which an order is tried."""

SPARE = 8
"""Of so many times the states that are kept it is looked up which of them agree."""

MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, about 2⁶⁴ over the golden ratio (Knuth, 1998, §6.4): its powers mix options into keys that seldom agree by chance."""


def narrow_order(model: Model) -> tuple[int, ...]:
    """An order of the nodes in which few combinations of options are open at a time; greedy, from several first nodes."""
    count = len(model.nodes)
    around: list[list[int]] = [[] for _ in range(count)]
    for i, j in model.edges:
        around[i].append(j)
        around[j].append(i)
    widths = [math.log(max(2, len(costs))) for costs in model.nodes]
    starts = sorted({number * count // STARTS for number in range(STARTS)})
    least, best = math.inf, tuple(range(count))
    for start in starts:
        total, order = _greedy_order(start, around, widths, least)
        if total < least:
            least, best = total, order
    return best


def _greedy_order(
    start: int, around: Sequence[Sequence[int]], widths: Sequence[float], most: float
) -> tuple[float, tuple[int, ...]]:
    """(logarithm of the states of all frontiers together, order): always the node that widens the frontier least.

    An order is left unfinished as soon as its states are known to be as many as ``most``.
    """
    undecided = [len(others) for others in around]
    decided = [False] * len(around)
    closes = [0.0] * len(around)
    """Width of the open nodes whose last undecided neighbour a node is."""
    near: set[int] = set()
    order: list[int] = []
    width, total = 0.0, -math.inf

    def widens(node: int) -> tuple[float, int]:
        return (widths[node] if undecided[node] else 0.0) - closes[node], node

    node, rest = start, iter(range(len(around)))
    while True:
        width += widens(node)[0]
        total = float(np.logaddexp(total, width))
        decided[node] = True
        order.append(node)
        near.discard(node)
        for other in around[node]:
            undecided[other] -= 1
            if not decided[other]:
                near.add(other)
        for one in (node, *around[node]):
            if decided[one] and undecided[one] == 1:
                closes[next(other for other in around[one] if not decided[other])] += widths[one]
        if len(order) == len(around) or total >= most:
            return total, tuple(order)
        node = min(near, key=widens) if near else next(other for other in rest if not decided[other])


@dataclass(frozen=True)
class Along:
    """The solution that was found, if any, and its residuals; no solution has residuals below ``floor``."""

    options: tuple[int, ...] | None
    cost: float
    floor: float


def best_along(residuals: Residuals, *, room: float, most_states: int, until_seconds: float = math.inf) -> Along:
    """The solution of least residuals below ``room``, from the last node to the first, with so many states at a time.

    A walk that has not arrived when :func:`time.monotonic` says ``until_seconds`` has found nothing.
    """
    return _Walk(residuals, room, most_states).run(until_seconds)


class _Walk:
    """Owns the states: options of the open nodes (columns), residuals so far, and the way back to how they came about."""

    def __init__(self, residuals: Residuals, room: float, most_states: int) -> None:
        self._nodes, self._edges, self._most = residuals.nodes, residuals.edges, most_states
        self._room = self._floor = room
        count = len(self._nodes)
        self._after: list[list[int]] = [[] for _ in range(count)]
        self._first = list(range(count))
        """Of every node the first neighbour, or itself: it closes when that is decided."""
        for i, j in self._edges:
            self._after[i].append(j)
            self._first[j] = min(self._first[j], i)
        self._open: list[int] = []
        self._states = np.zeros((1, 0), np.int16)
        self._costs = np.zeros(1)
        self._back: list[tuple[np.ndarray, np.ndarray]] = []

    def run(self, until_seconds: float) -> Along:
        for node in reversed(range(len(self._nodes))):
            if time.monotonic() > until_seconds:
                return Along(None, math.inf, -math.inf)
            if not self._decide(node):
                return Along(None, math.inf, self._floor)
        at = int(self._costs.argmin())
        cost = float(self._costs[at])
        options = []
        for before, option in reversed(self._back):
            options.append(int(option[at]))
            at = int(before[at])
        return Along(tuple(options), cost, min(self._floor, cost))

    def _decide(self, node: int) -> bool:
        """Every state with every option of a node; whether any is left."""
        costs = self._costs[:, None] + self._nodes[node][None, :]
        for other in self._after[node]:
            costs += self._edges[node, other].T[self._states[:, self._open.index(other)]]
        before, option = np.nonzero(costs < self._room)
        reached = costs[before, option]
        if len(reached) > SPARE * self._most:
            left = self._cheapest(reached, SPARE * self._most)
            before, option, reached = before[left], option[left], reached[left]
        if not len(reached):
            return False
        stay = [place for place, other in enumerate(self._open) if self._first[other] < node]
        is_open = self._first[node] < node
        states = self._states[before] if len(stay) == len(self._open) else self._states[:, stay][before]
        if is_open:
            states = np.concatenate((states, option[:, None].astype(np.int16)), axis=1)
        if len(stay) < len(self._open) or not is_open:  # else no two states agree
            left = _cheapest_alike(states, reached)
            before, option, reached, states = before[left], option[left], reached[left], states[left]
        if len(reached) > self._most:
            left = self._cheapest(reached, self._most)
            before, option, reached, states = before[left], option[left], reached[left], states[left]
        self._open = [*(self._open[place] for place in stay), *([node] if is_open else [])]
        self._back.append((before, option))
        self._states, self._costs = states, reached
        return True

    def _cheapest(self, costs: np.ndarray, count: int) -> np.ndarray:
        """Places of so many of the cheapest states; the cheapest of the others lowers the floor."""
        ranked = np.argpartition(costs, count)
        self._floor = min(self._floor, float(costs[ranked[count:]].min()))
        return np.sort(ranked[:count])


def _cheapest_alike(states: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Places of the cheapest of all states that agree; states are told apart themselves, keys only bring equals together."""
    if not states.shape[1]:
        return np.array([costs.argmin()])
    ranked = np.lexsort((costs, states @ mixers(states.shape[1])))
    told = states[ranked]
    is_first = np.ones(len(ranked), dtype=bool)
    np.any(told[1:] != told[:-1], axis=1, out=is_first[1:])
    return ranked[is_first]


@cache
def mixers(count: int) -> np.ndarray:
    """So many powers of the multiplier, modulo 2⁶⁴."""
    powers = [pow(MULTIPLIER, power, 1 << 64) for power in range(1, count + 1)]
    return np.array(powers, np.uint64).view(np.int64)


def in_order(model: Model, order: Sequence[int]) -> Model:
    """The model with its nodes renumbered: node ``order[k]`` becomes node k.  Memory rows are left out."""
    place = {node: number for number, node in enumerate(order)}
    edges: dict[Pair, np.ndarray] = {}
    for (i, j), matrix in model.edges.items():
        a, b = place[i], place[j]
        edges[min(a, b), max(a, b)] = matrix if a < b else matrix.T
    return Model([model.nodes[node] for node in order], edges)
