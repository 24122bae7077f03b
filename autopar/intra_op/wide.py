"""Wide programs: solved by messages and by walking along the nodes; seldom is an integer program left to be written down.

A model whose edges have very many pairs makes a relaxation that the simplex method crawls through, and one that is fractional
a search that takes minutes, though its optimum is found easily.  With the bound L and the regrets r of
:mod:`autopar.intra_op.bound`, in turn:

1. Some passes raise L.
2. A walk along the nodes that remembers few states (:mod:`autopar.intra_op.frontier`) finds a solution of cost U, and says below
   which cost it has missed none.
   The walk is repeated along a part of the nodes, the others left as they are or at their least regret,
   as long as that finds a better one.
3. If U exceeds what is known to be missed by at most ``ENOUGH``·U, the solution is as good as the optimum.
4. Otherwise no solution better than U takes an option with L + rᵢ(a) > U, for rᵢ(a) is what the chains through i pay for it
   (reduced-cost fixing, as in Savchynskyy, 2019, §8).  After the last walk such options go, and what is left is solved exactly.

Memory rows are not looked at: a model that has any is none for here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.intra_op.bound import Messages, Residuals
from autopar.intra_op.frontier import best_along, in_order, narrow_order
from autopar.intra_op.model import Model, Solution, narrowed_costs

WIDE_VARIABLES = 10_000
"""From here on the relaxation takes seconds, up to minutes; messages take tenths of a second."""

ENOUGH = 1e-4
"""Relative gap at which an incumbent is left alone: costs themselves are not known better than to percents."""

WALKS = ((10, 300), (15, 300), (15, 300), (20, 300), (30, 1000), (50, 10_000), (50, 100_000))
"""Rounds of passes (one backward and one forward), and the states that the walk behind them remembers."""

WINDOWS, WINDOW_STATES = 4, 300
"""A solution is improved by choosing again for a run of that part of the nodes, the others left as they are."""

ROUNDING = 1e-9
"""Share of a cost that sums of it may be off by."""

Solver = Callable[[Model], Solution | None]


def is_wide(model: Model) -> bool:
    """Whether :func:`solve_wide` is the quicker way."""
    return not model.memory and model.num_variables > WIDE_VARIABLES


def solve_wide(model: Model, solve: Solver) -> Solution | None:
    """The best solution up to a share of ``ENOUGH``, None if there is none; ``solve`` answers for narrower models."""
    order = narrow_order(model)
    passing = _Passing(in_order(model, order))
    for rounds, most_states in WALKS:
        passing.run(rounds)
        passing.walk(most_states)
        if (found := passing.incumbent) is not None and found.gap <= ENOUGH:
            return _renumbered(found, order)
    found = _better(passing.incumbent, _solve_part(passing.model, passing.possible(), solve))
    return None if found is None else _renumbered(found, order)


def _renumbered(found: Solution, order: Sequence[int]) -> Solution:
    options = [0] * len(order)
    for node, option in zip(order, found.options, strict=True):
        options[node] = option
    return replace(found, options=tuple(options))


def _better(incumbent: Solution | None, of_possible: Solution | None) -> Solution | None:
    """What is not possible any more costs more than the incumbent."""
    if incumbent is None or of_possible is None:
        return incumbent or of_possible
    best = min(incumbent, of_possible, key=lambda one: one.cost)
    return replace(best, bound=min(best.cost, of_possible.bound))


class _Passing:
    """Owns the bound, the best solution so far, and which options a better one may still take."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._messages = Messages(model)
        self._bound = -np.inf
        self._best: Solution | None = None
        self._possible = [np.ones(len(costs), dtype=bool) for costs in model.nodes]

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for forward in (False, True):
                known = self._bound
                self._bound = max(known, self._messages.sweep(forward=forward))
                self._rule_out(known)

    def _rule_out(self, known: float) -> None:
        """Drop what costs more than the incumbent, by the bound from before the pass: regrets are from within it."""
        if self._best is None:
            return
        room = self._best.cost + ROUNDING * abs(self._best.cost) - known
        for possible, regrets in zip(self._possible, self._messages.regrets, strict=True):
            possible &= regrets <= room

    def walk(self, most_states: int) -> None:
        """Look for a solution that is better by a share of ``ENOUGH``."""
        residuals = self._messages.residuals()
        least = np.inf if self._best is None else self._best.cost - (ENOUGH - ROUNDING) * abs(self._best.cost)
        found = best_along(residuals, room=least - residuals.bound, most_states=most_states)
        self._bound = max(self._bound, residuals.bound + found.floor)
        self._offer(found.options)
        while self._best is not None and self._improve(residuals):
            pass

    def _improve(self, residuals: Residuals) -> bool:
        """Whether other options for a run of nodes made the best solution better; all runs are tried."""
        before = self._best
        count = len(self.model.nodes)
        length = max(1, count // WINDOWS)
        for start in range(0, count, max(1, length // 2)):
            assert self._best is not None
            others = zip(self._best.options, self._messages.regrets, strict=True)
            kept = [np.unique([option, int(regrets.argmin())]) for option, regrets in others]
            kept[start : start + length] = self.possible()[start : start + length]
            room = self._best.cost - ROUNDING * abs(self._best.cost) - residuals.bound
            found = best_along(residuals.narrowed(kept), room=room, most_states=WINDOW_STATES)
            if found.options is not None:
                self._offer(tuple(int(left[option]) for left, option in zip(kept, found.options, strict=True)))
        return self._best is not before

    def _offer(self, options: tuple[int, ...] | None) -> None:
        """Keep a solution if it is the best."""
        if options is None:
            return
        cost = self.model.cost(options)
        if cost < (np.inf if self._best is None else self._best.cost):
            self._best = Solution(options, cost, cost)

    @property
    def incumbent(self) -> Solution | None:
        """The best solution so far, with the bound of the whole model."""
        return None if self._best is None else replace(self._best, bound=min(self._bound, self._best.cost))

    def possible(self) -> list[np.ndarray]:
        return [np.flatnonzero(possible) for possible in self._possible]


def _solve_part(model: Model, kept: Sequence[np.ndarray], solve: Solver) -> Solution | None:
    """The best solution that takes none but the kept options, in the numbering of the whole model."""
    part = solve(Model(*narrowed_costs(model.nodes, model.edges, kept)))
    if part is None or not np.isfinite(part.cost):
        return None
    options = tuple(int(left[option]) for left, option in zip(kept, part.options, strict=True))
    return Solution(options, part.cost, part.bound)
