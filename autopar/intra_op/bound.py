"""How cheap can any solution of a model be, and which options are worth a look?  Told without an integer program.

The local polytope's dual is approached by sequential tree-reweighted message passing (Kolmogorov, 2006, §4).  Nodes
stand in a fixed order, which makes every edge point forward and covers the graph with monotonic chains; node s lies on
as many of them as it has neighbours on its busier side, and γₛ is one over that number.  With messages Mₜₛ from t to s

    θ̂ₛ(a) = cₛ(a) + Σₜ Mₜₛ(a)                           what option a costs, as far as s has heard
    Mₛₜ(b) ← minₐ { γₛ θ̂ₛ(a) − Mₜₛ(a) + cₛₜ(a, b) }      told to the neighbours ahead; then the same backwards

each less its minimum.  What the minima add up to in a pass, with (1 − γₛ·neighbours ahead)·min θ̂ₛ for the chains that
end in s, bounds every solution from below and never falls from pass to pass.  The *regret* θ̂ₛ(a) − min θ̂ₛ is what
option a costs more than the best, by the chains through s.  A pass costs one addition per variable of the integer
program and no memory.  The bound may stay below the relaxation's optimum; memory rows are left out, which only lowers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.intra_op.model import Model, Pair

MOST_PASSES = 200
STALLED_PASSES = 10
STALLED_SHARE = 2e-5
"""When so many passes raise the bound by less than this share of it, it is left where it is."""

FORBIDDEN_FACTOR = 100.0
"""What is forbidden costs so many times all finite costs together: infinities cannot be told apart once added up."""


@dataclass(frozen=True)
class Bound:
    """No solution costs less than ``cost``; ``regrets[i][a]`` ranks the options of node i, 0 being the best."""

    cost: float
    regrets: list[np.ndarray]


@dataclass(frozen=True)
class Residuals:
    """Costs rewritten: every solution x costs ``bound`` + Σ nodes[i][xᵢ] + Σ edges[i, j][xᵢ, xⱼ], all of which are ≥ 0."""

    bound: float
    nodes: list[np.ndarray]
    edges: dict[Pair, np.ndarray]


def lower_bound(model: Model, *, enough: float = np.inf) -> Bound:
    """A bound on the cost of every solution; passes go on until it reaches ``enough`` or hardly rises any more."""
    messages = Messages(model)
    reached = [-np.inf]
    for _ in range(MOST_PASSES // 2):
        messages.sweep(forward=True)
        reached.append(max(reached[-1], messages.sweep(forward=False)))
        earlier = reached[max(0, len(reached) - 1 - STALLED_PASSES // 2)]
        if reached[-1] >= enough or reached[-1] - earlier < STALLED_SHARE * abs(reached[-1]):
            break
    return Bound(reached[-1], messages.regrets)


def likeliest(regrets: np.ndarray, count: int) -> np.ndarray:
    """The options of least regret of a node, ascending."""
    return np.sort(np.argsort(regrets, kind="stable")[:count])


class _Way(NamedTuple):
    """From a node to a neighbour: costs by the options of both, and in which row each of the two hears of the other."""

    other: int
    costs: np.ndarray
    row: int
    row_there: int


class Messages:
    """Owns the messages of a model, whose infinities are made large numbers."""

    def __init__(self, model: Model) -> None:
        most = [*model.nodes, *model.edges.values()]
        forbidden = FORBIDDEN_FACTOR * (1.0 + sum(float(np.abs(c[np.isfinite(c)]).max(initial=0.0)) for c in most))
        self._costs = [np.where(np.isfinite(costs), costs, forbidden) for costs in model.nodes]
        self._ahead: list[list[_Way]] = [[] for _ in model.nodes]
        self._behind: list[list[_Way]] = [[] for _ in model.nodes]
        heard = [0] * len(model.nodes)
        for (i, j), matrix in model.edges.items():
            finite = np.where(np.isfinite(matrix), matrix, forbidden)
            self._ahead[i].append(_Way(j, np.ascontiguousarray(finite), heard[i], heard[j]))
            self._behind[j].append(_Way(i, np.ascontiguousarray(finite.T), heard[j], heard[i]))
            heard[i] += 1
            heard[j] += 1
        self._told = [np.zeros((count, len(costs))) for count, costs in zip(heard, self._costs, strict=True)]
        self.regrets = [costs - costs.min() for costs in self._costs]

    def sweep(self, *, forward: bool) -> float:
        """One pass over all nodes; returns its bound."""
        bound = 0.0
        least_of = np.minimum.reduce  # of every column; the method of an array asks for it by way of Python
        nodes = range(len(self._costs))
        for s in nodes if forward else reversed(nodes):
            ahead, behind = (self._ahead[s], self._behind[s]) if forward else (self._behind[s], self._ahead[s])
            chains = max(len(ahead), len(behind), 1)
            told = self._told[s]
            known = self._costs[s] + np.add.reduce(told)
            least = float(least_of(known))
            self.regrets[s] = known - least
            bound += (1 - len(ahead) / chains) * least
            share = known / chains
            for t, matrix, row, row_there in ahead:
                message = least_of(matrix + (share - told[row])[:, None])
                lowest = float(least_of(message))
                np.subtract(message, lowest, out=self._told[t][row_there])
                bound += lowest
        return bound

    def residuals(self) -> Residuals:
        """The costs less the messages; after a pass forward, ``bound`` is that of the pass.

        Seen from a node that is decided, every node behind it has an option whose edge costs nothing.
        """
        bound, nodes = 0.0, []
        edges: dict[Pair, np.ndarray] = {}
        for s, costs in enumerate(self._costs):
            chains = max(len(self._ahead[s]), len(self._behind[s]), 1)
            known = costs + self._told[s].sum(axis=0)
            share, least = 1 - len(self._ahead[s]) / chains, float(known.min())
            nodes.append(share * (known - least))
            bound += share * least
            for t, matrix, row, row_there in self._ahead[s]:
                mine = known / chains - self._told[s][row]
                left = matrix + (mine[:, None] - self._told[t][row_there])
                lowest = float(left.min())
                edges[s, t] = left - lowest
                bound += lowest
        return Residuals(bound, nodes, edges)
