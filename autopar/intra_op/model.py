"""The optimisation problem in its bare form, without a word about arrays.

Nodes i ∈ V each take one option from Oᵢ.  With node costs cᵢ(a), edge costs cᵢⱼ(a, b), and memory rows m (each a moment
of the step, with bytes uᵢᵐ(a) that a node holds at that moment and a budget Uᵐ):

    minimise    Σᵢ cᵢ(xᵢ) + Σᵢⱼ cᵢⱼ(xᵢ, xⱼ)
    subject to  Σᵢ uᵢᵐ(xᵢ) + Σᵢⱼ uᵢⱼᵐ(xᵢ, xⱼ) ≤ Uᵐ    for every m

Forbidden pairs cost ∞.  Without memory rows this is MAP inference in a pairwise graphical model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Pair = tuple[int, int]


@dataclass(frozen=True)
class MemoryRow:
    """Bytes held at one moment: ``nodes[i][a]`` by option, ``edges[i, j][a, b]`` by pair, at most ``budget`` bytes."""

    nodes: dict[int, np.ndarray]
    edges: dict[Pair, np.ndarray]
    budget: float

    def used(self, solution: Sequence[int]) -> float:
        """Bytes that a solution holds at this moment."""
        total = sum(float(bytes_of[solution[i]]) for i, bytes_of in self.nodes.items())
        return total + sum(float(matrix[solution[i], solution[j]]) for (i, j), matrix in self.edges.items())


@dataclass(frozen=True)
class Model:
    """``nodes[i]`` is the vector cᵢ, ``edges[i, j]`` (i < j) the matrix cᵢⱼ."""

    nodes: list[np.ndarray]
    edges: dict[Pair, np.ndarray]
    memory: list[MemoryRow] = field(default_factory=list)

    def cost(self, solution: Sequence[int]) -> float:
        """The objective of a complete solution."""
        return sum(float(costs[solution[i]]) for i, costs in enumerate(self.nodes)) + self.cost_of_edges(solution)

    def cost_of_edges(self, solution: Sequence[int]) -> float:
        """What of it stands on edges: ways between layouts."""
        return sum(float(matrix[solution[i], solution[j]]) for (i, j), matrix in self.edges.items())

    def fits(self, solution: Sequence[int]) -> bool:
        """Whether every memory row is kept."""
        return all(row.used(solution) <= row.budget * (1 + 1e-9) for row in self.memory)

    @property
    def num_variables(self) -> int:
        """Variables of the integer program: one per option and one per allowed pair."""
        pairs = sum(int(np.isfinite(matrix).sum()) for matrix in self.edges.values())
        return sum(len(costs) for costs in self.nodes) + pairs


def narrowed_costs(
    nodes: Sequence[np.ndarray], edges: Mapping[Pair, np.ndarray], kept: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], dict[Pair, np.ndarray]]:
    """The costs of a model with only some options (positions, ascending) of every node."""
    return (
        [costs[left] for costs, left in zip(nodes, kept, strict=True)],
        {(i, j): matrix[np.ix_(kept[i], kept[j])] for (i, j), matrix in edges.items()},
    )


@dataclass(frozen=True)
class Solution:
    """One option per node, its cost, and a proven lower bound on any solution's cost.

    ``core_variables`` is the size of the integer program that was left after the exact reductions.
    """

    options: tuple[int, ...]
    cost: float
    bound: float
    core_variables: int = 0

    @property
    def gap(self) -> float:
        """Relative distance between cost and bound; 0 for a proven optimum."""
        return max(0.0, (self.cost - self.bound) / max(abs(self.cost), 1e-30))
