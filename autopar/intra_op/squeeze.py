"""The cheapest solution that keeps a memory budget, found by paying for memory.

With rows Σ u(x) ≤ U and weights wₘ ≥ 0, Σ wₘ = 1, every price λ ≥ 0 gives a bound on what any solution within the rows costs

    L(λ) = minₓ { c(x) + λ Σₘ wₘ (uₘ(x) / Uₘ − 1) } ≤ min { c(x) : uₘ(x) ≤ Uₘ }

(Everett, 1963), and its minimiser is a program without rows: it reduces and solves as fast as the free one, where the
program with rows would have to branch.  What keeps the budget is said by a judge, for the rows are only a model of what a plan
needs.  With v(x) = Σₘ wₘ uₘ(x) / Uₘ every solution is a line c(x) + λ v(x) over the prices, and L follows the lowest of them.

A price at which memory is all that counts comes first: if not even its minimiser keeps the budget, none does.  Then, between a
minimiser x that needs too much and a minimiser y that does not, the price is tried at which both cost the same,

    λ = (c(y) − c(x)) / (v(x) − v(y)),

which finds another one between them or says that there is none.  Returned is the cheapest minimiser that the judge accepts, with
the best L as its bound; solutions between two minimisers are missed, and the gap says by how much that can matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.intra_op.held import with_prices
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import Model, Solution
from autopar.intra_op.wide import Gaps

LAST_PRICE_SHARE = 4.0
"""A price of the whole budget, as a share of what the free optimum costs, beyond which memory is all that counts."""

MOST_BETWEEN = 6
"""Prices that are tried between the free optimum and the last price."""

GOOD_GAP = 5e-3

GAPS = Gaps(1e-3, 1e-3)
"""Of solutions at a price: which price is the best is not known better."""


def solve_squeezed(
    model: Model,
    free: Solution,
    keeps_budget: Callable[[Solution], bool],
    *,
    time_limit_seconds: float,
    below: float = np.inf,
) -> Solution | None:
    """The best solution found that keeps the budget, or None; ``free`` is the optimum without the rows of ``model``, which is
    known not to keep it.

    None as well as soon as it is known that none within the rows costs less than ``below``.
    """
    search = _Search(model, keeps_budget, time.monotonic() + time_limit_seconds, below, free.bound)
    fast = _Priced(free, _share_used(model, free), False)
    lean = search.at_price(LAST_PRICE_SHARE * max(abs(free.cost), 1e-12))
    for _ in range(MOST_BETWEEN):
        if lean is None or not lean.keeps_budget or search.gap <= GOOD_GAP or search.is_late:
            break
        between = search.between(fast, lean)
        if between is None:
            break
        if between.keeps_budget:
            lean = between
        else:
            fast = between
    if search.best is None:
        return None
    return Solution(search.best.options, search.best.cost, min(search.best.cost, search.bound), model.num_variables)


@dataclass(frozen=True)
class _Priced:
    """A minimiser at some price, the share of the budget that it uses by the mean of the rows, and what the judge says."""

    solution: Solution
    share_used: float
    keeps_budget: bool


def _share_used(model: Model, solution: Solution) -> float:
    return float(np.mean([row.used(solution.options) / row.budget for row in model.memory]))


class _Search:
    """Owns the best solution and the best bound so far."""

    def __init__(
        self, model: Model, keeps_budget: Callable[[Solution], bool], deadline: float, below: float, bound: float
    ) -> None:
        self._model = model
        self._keeps_budget = keeps_budget
        self._deadline = deadline
        self._weight = 1 / len(model.memory)
        self._below = below
        self.best: Solution | None = None
        self.bound = bound

    @property
    def gap(self) -> float:
        """Relative distance of the best solution from the bound."""
        return float("inf") if self.best is None else (self.best.cost - self.bound) / max(abs(self.best.cost), 1e-30)

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._deadline

    def between(self, fast: _Priced, lean: _Priced) -> _Priced | None:
        """The minimiser at the price at which both cost the same; None where neither costs more than it, or it is hopeless."""
        saved = fast.share_used - lean.share_used
        price = (lean.solution.cost - fast.solution.cost) / saved if saved > 0 else 0.0
        if price <= 0:
            return None
        found = self.at_price(price)
        if found is None:
            return None
        paid = found.solution.cost + price * found.share_used
        is_new = paid < (lean.solution.cost + price * lean.share_used) * (1 - GAPS.enough)
        return found if is_new else None

    def at_price(self, price: float) -> _Priced | None:
        """The minimiser at a price; None where no solution within the rows can cost less than is wanted."""
        left = max(1.0, self._deadline - time.monotonic())
        found = solve(self._with_price(price), time_limit_seconds=left, below=self._below + price, gaps=GAPS)
        if found is None:
            return None
        self.bound = max(self.bound, found.bound - price)
        if self.bound >= self._below:
            return None
        cost = self._model.cost(found.options)
        solution = Solution(found.options, cost, cost)
        keeps = bool(np.isfinite(cost)) and self._keeps_budget(solution)
        if keeps and (self.best is None or cost < self.best.cost):
            self.best = solution
        return _Priced(solution, _share_used(self._model, solution), keeps)

    def _with_price(self, price: float) -> Model:
        return with_prices(self._model, [(row, price * self._weight / row.budget) for row in self._model.memory])
