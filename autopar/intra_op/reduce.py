"""Exact reductions: a smaller model with the same optimum, and the way back.

* *Dead ends* (Goldstein, 1994): option a of node i goes when another option b satisfies
  cᵢ(a) − cᵢ(b) + Σⱼ minₓ (cᵢⱼ(a, x) − cᵢⱼ(b, x)) ≥ 0: whatever the neighbours do, b is no worse.
* *Elimination* (Bertelè and Brioschi, 1972): a node with one neighbour is folded into it, one with two into the edge
  between them, by minimising over its options; a node with no neighbour is decided on the spot.

A node that some memory row weighs is touched by neither, for its cost is not all that matters about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.intra_op.model import MemoryRow, Model, Pair, Solution


@dataclass(frozen=True)
class Eliminated:
    """How to decide a node once its neighbours are decided: table[a…] = its best option given the neighbours' options.

    ``left`` are the original indices of the neighbours' options that the table's axes stood for at that time; the
    table's entries are original indices as well.
    """

    node: int
    neighbours: tuple[int, ...]
    left: tuple[np.ndarray, ...]
    table: np.ndarray

    def decide(self, chosen: list[int]) -> int:
        """The best option, given ``chosen`` for the neighbours."""
        pairs = zip(self.neighbours, self.left, strict=True)
        return int(self.table[tuple(int(np.searchsorted(left, chosen[other])) for other, left in pairs)])


@dataclass(frozen=True)
class Reduced:
    """The core model over ``core`` (indices into the original nodes), with what leads back to a full solution."""

    core: tuple[int, ...]
    options: tuple[np.ndarray, ...]
    """For each node of the core the original indices of the options that are left."""
    model: Model
    eliminated: tuple[Eliminated, ...]

    def lift(self, core_options: tuple[int, ...]) -> tuple[int, ...]:
        """The solution of the original model that a solution of the core stands for."""
        chosen = [-1] * (len(self.core) + len(self.eliminated))
        for node, left, option in zip(self.core, self.options, core_options, strict=True):
            chosen[node] = int(left[option])
        for step in reversed(self.eliminated):
            chosen[step.node] = step.decide(chosen)
        return tuple(chosen)


def reduce_model(model: Model) -> Reduced:
    """Apply both reductions until nothing changes."""
    return _Reducer(model).run()


class _Reducer:
    """Owns the shrinking copy of a model."""

    def __init__(self, model: Model) -> None:
        self._original = model
        self._costs = [costs.astype(float) for costs in model.nodes]
        self._left = [np.arange(len(costs)) for costs in model.nodes]
        self._around: list[dict[int, np.ndarray]] = [{} for _ in model.nodes]
        for (i, j), matrix in model.edges.items():
            self._around[i][j] = matrix
            self._around[j][i] = matrix.T
        self._weighed = {i for row in model.memory for i in (*row.nodes, *(k for pair in row.edges for k in pair))}
        self._gone: list[Eliminated] = []
        self._dead: set[int] = set()

    def run(self) -> Reduced:
        pending = set(range(len(self._costs)))
        while pending:
            self._eliminate(pending)
            changed: set[int] = set()
            for node in sorted(pending):
                if node not in self._dead and node not in self._weighed and self._drop_dead_ends(node):
                    changed.update((node, *self._around[node]))
            pending = changed - self._dead
        core = tuple(i for i in range(len(self._costs)) if i not in self._dead)
        position = {node: number for number, node in enumerate(core)}
        edges = {(position[i], position[j]): matrix for i in core for j, matrix in self._around[i].items() if i < j}
        rows = [self._row(row, position) for row in self._original.memory]
        return Reduced(
            core,
            tuple(self._left[i] for i in core),
            Model([self._costs[i] for i in core], edges, rows),
            tuple(self._gone),
        )

    def _row(self, row: MemoryRow, position: dict[int, int]) -> MemoryRow:
        nodes = {position[i]: held for i, held in row.nodes.items()}
        edges: dict[Pair, np.ndarray] = {(position[i], position[j]): held for (i, j), held in row.edges.items()}
        return MemoryRow(nodes, edges, row.budget)

    def _drop_dead_ends(self, node: int) -> bool:
        costs, around = self._costs[node], self._around[node]
        count = len(costs)
        if count < 2:
            return False
        with np.errstate(invalid="ignore"):
            worse = costs[:, None] - costs[None, :]
            for matrix in around.values():
                worse += _least_difference(matrix)
        worse[np.isnan(worse)] = -np.inf
        is_dead = worse >= 0
        np.fill_diagonal(is_dead, False)
        if not is_dead.any():
            return False
        keep = np.ones(count, dtype=bool)
        for a in np.argsort(-costs, kind="stable"):
            rivals = keep.copy()
            rivals[a] = False
            if is_dead[a, rivals].any():
                keep[a] = False
        self._costs[node] = costs[keep]
        self._left[node] = self._left[node][keep]
        for other in around:
            matrix = around[other][keep]
            around[other] = matrix
            self._around[other][node] = matrix.T
        return True

    def _eliminate(self, pending: set[int]) -> None:
        queue = sorted(pending)
        while queue:
            node = queue.pop()
            if node in self._dead or node in self._weighed or len(self._around[node]) > 2:
                continue
            neighbours = tuple(self._around[node])
            self._fold(node, neighbours)
            queue.extend(neighbours)
            pending.update(neighbours)

    def _fold(self, node: int, neighbours: tuple[int, ...]) -> None:
        table = self._costs[node]
        if len(neighbours) == 1:
            table = self._around[node][neighbours[0]].T + table[None, :]
        elif len(neighbours) == 2:
            first, second = (self._around[node][other] for other in neighbours)
            table = first.T[:, None, :] + second.T[None, :, :] + table[None, None, :]
        best = table.argmin(axis=-1)
        value = table.min(axis=-1)
        left = tuple(self._left[other] for other in neighbours)
        self._gone.append(Eliminated(node, neighbours, left, self._left[node][best]))
        self._dead.add(node)
        for other in neighbours:
            del self._around[other][node]
        if len(neighbours) == 1:
            self._costs[neighbours[0]] = self._costs[neighbours[0]] + value
        elif len(neighbours) == 2:
            a, b = neighbours
            value = value + self._around[a].get(b, 0.0)
            self._around[a][b] = value
            self._around[b][a] = value.T
        self._around[node] = {}


def _least_difference(matrix: np.ndarray) -> np.ndarray:
    """[a, b]: the minimum over x of c(a, x) − c(b, x); ∞ − ∞ (both forbidden) tells nothing."""
    columns = matrix.T
    difference = columns[:, :, None] - columns[:, None, :]
    least: np.ndarray = difference.min(axis=0)
    if np.isnan(least).any():
        least = np.fmin.reduce(difference)
        least[np.isnan(least)] = np.inf
    return least


def by_reduction(model: Model, solve_core: Callable[[Model], Solution | None]) -> Solution | None:
    """The best solution, from one of what the exact reductions leave."""
    reduced = reduce_model(model)
    if not reduced.core:
        options = reduced.lift(())
        cost = model.cost(options)
        return Solution(options, cost, cost) if np.isfinite(cost) and model.fits(options) else None
    core = solve_core(reduced.model)
    if core is None:
        return None
    options = reduced.lift(core.options)
    cost = model.cost(options)
    return Solution(options, cost, cost - (core.cost - core.bound), reduced.model.num_variables)
