"""The cheapest solution that keeps a memory budget, found by paying for memory.

With rows Σ u(x) ≤ U and weights wₘ ≥ 0, Σ wₘ = 1, every price λ ≥ 0 gives a bound on what any solution within the rows costs

    L(λ) = minₓ { c(x) + λ Σₘ wₘ (uₘ(x) / Uₘ − 1) } ≤ min { c(x) : uₘ(x) ≤ Uₘ }

(Everett, 1963), and its minimiser is a program without rows: it reduces and solves as fast as the free one, where the
program with rows would have to branch.  The price is raised until the minimiser keeps the budget, then lowered again in
between.  What keeps the budget is said by a judge, for the rows are only a model of what a plan needs.  Returned is the
cheapest minimiser that the judge accepts, with the best L as its bound; solutions between two minimisers are missed, and
the gap says by how much that can matter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from autopar.intra_op.ilp import solve
from autopar.intra_op.model import Model, Pair, Solution

FIRST_PRICE_SHARE = 1 / 64
"""The first price of the whole budget, as a share of what the free optimum costs."""

STEP = 4.0
STEPS = 5
"""Beyond a price of a few steps' seconds for the budget, memory is all that counts."""
HALVINGS = 4

GOOD_GAP = 5e-3


def solve_squeezed(
    model: Model, free: Solution, keeps_budget: Callable[[Solution], bool], *, time_limit_seconds: float
) -> Solution | None:
    """The best solution found that keeps the budget, or None; ``free`` is the optimum without the rows of ``model``."""
    search = _Search(model, free, keeps_budget, time.monotonic() + time_limit_seconds)
    price = FIRST_PRICE_SHARE * max(abs(free.cost), 1e-12)
    low = price / STEP
    for _ in range(STEPS):
        if search.try_price(price) or search.is_late:
            break
        low, price = price, STEP * price
    for _ in range(HALVINGS):
        if search.best is None or search.gap <= GOOD_GAP or search.is_late:
            break
        middle = math.sqrt(low * price)
        if search.try_price(middle):
            price = middle
        else:
            low = middle
    if search.best is None:
        return None
    return Solution(search.best.options, search.best.cost, min(search.best.cost, search.bound), model.num_variables)


class _Search:
    """Owns the best solution and the best bound so far."""

    def __init__(self, model: Model, free: Solution, keeps_budget: Callable[[Solution], bool], deadline: float) -> None:
        self._model = model
        self._keeps_budget = keeps_budget
        self._deadline = deadline
        self._weight = 1 / len(model.memory)
        self.best: Solution | None = None
        self.bound = free.bound

    @property
    def gap(self) -> float:
        """Relative distance of the best solution from the bound."""
        return float("inf") if self.best is None else (self.best.cost - self.bound) / max(abs(self.best.cost), 1e-30)

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._deadline

    def try_price(self, price: float) -> bool:
        """Solve at a price; whether its solution keeps the budget."""
        left = max(1.0, self._deadline - time.monotonic())
        found = solve(self._priced(price), time_limit_seconds=left)
        if found is None:
            return False
        self.bound = max(self.bound, found.bound - price)
        cost = self._model.cost(found.options)
        solution = Solution(found.options, cost, cost)
        if not np.isfinite(cost) or not self._keeps_budget(solution):
            return False
        if self.best is None or cost < self.best.cost:
            self.best = solution
        return True

    def _priced(self, price: float) -> Model:
        nodes = list(self._model.nodes)
        edges: dict[Pair, np.ndarray] = dict(self._model.edges)
        for row in self._model.memory:
            per_byte = price * self._weight / row.budget
            for node, held in row.nodes.items():
                nodes[node] = nodes[node] + per_byte * held
            for pair, held in row.edges.items():
                edges[pair] = edges[pair] + per_byte * held
        return Model(nodes, edges)
