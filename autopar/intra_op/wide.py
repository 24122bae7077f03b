"""Wide programs: most options are ruled out before an integer program is written down.

A model whose edges have very many pairs makes a relaxation that the simplex method crawls through, though its optimum is
found easily.  With the bound L and the regrets r of :mod:`autopar.intra_op.bound`:

1. The few options of least regret of every node make a small program.  Its optimum U is a solution of the whole.
2. If U − L ≤ ``ENOUGH``·U, that solution is as good as the optimum, and is returned with its bound.
3. Otherwise no solution better than U takes an option with L + rᵢ(a) > U, for rᵢ(a) is what the chains through i pay for it
   (reduced-cost fixing, as in Savchynskyy, 2019, §8).  Such options go, and what is left is solved exactly.

Memory rows are not looked at: a model that has any is none for here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.intra_op.bound import Messages, likeliest
from autopar.intra_op.model import Model, Solution, narrowed_costs

WIDE_VARIABLES = 10_000
"""From here on the relaxation takes seconds, up to minutes; messages take tenths of a second."""

ENOUGH = 1e-4
"""Relative gap at which an incumbent is left alone: costs themselves are not known better than to percents."""

FIRST_ROUNDS, MORE_ROUNDS = 40, 100
"""Of a pass forward and one backward."""

FEW_OPTIONS = (3, 5)
"""Of every node, for incumbents."""

ROUNDING = 1e-9
"""Share of a cost that sums of it may be off by."""

Solver = Callable[[Model], Solution | None]


def is_wide(model: Model) -> bool:
    """Whether :func:`solve_wide` is the quicker way."""
    return not model.memory and model.num_variables > WIDE_VARIABLES


def solve_wide(model: Model, solve: Solver) -> Solution | None:
    """The best solution up to a share of ``ENOUGH``, None if there is none; ``solve`` answers for narrower models."""
    passing = _Passing(model)
    passing.run(FIRST_ROUNDS)
    for count in FEW_OPTIONS:
        passing.offer(_solve_part(model, passing.least_regret(count), solve))
        if (incumbent := passing.incumbent) is not None and incumbent.gap <= ENOUGH:
            return incumbent
    passing.run(MORE_ROUNDS)
    if (incumbent := passing.incumbent) is not None and incumbent.gap <= ENOUGH:
        return incumbent
    return _solve_part(model, passing.possible(), solve)


class _Passing:
    """Owns the bound, the best solution so far, and which options a better one may still take."""

    def __init__(self, model: Model) -> None:
        self._messages = Messages(model)
        self._bound = -np.inf
        self._best: Solution | None = None
        self._possible = [np.ones(len(costs), dtype=bool) for costs in model.nodes]

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for forward in (True, False):
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

    def offer(self, solution: Solution | None) -> None:
        if solution is not None and (self._best is None or solution.cost < self._best.cost):
            self._best = solution

    @property
    def incumbent(self) -> Solution | None:
        """The best solution so far, with the bound of the whole model."""
        if self._best is None:
            return None
        return Solution(self._best.options, self._best.cost, min(self._bound, self._best.cost))

    def least_regret(self, count: int) -> list[np.ndarray]:
        return [likeliest(regrets, count) for regrets in self._messages.regrets]

    def possible(self) -> list[np.ndarray]:
        return [np.flatnonzero(possible) for possible in self._possible]


def _solve_part(model: Model, kept: Sequence[np.ndarray], solve: Solver) -> Solution | None:
    """The best solution that takes none but the kept options, in the numbering of the whole model."""
    part = solve(Model(*narrowed_costs(model.nodes, model.edges, kept)))
    if part is None or not np.isfinite(part.cost):
        return None
    options = tuple(int(left[option]) for left, option in zip(kept, part.options, strict=True))
    return Solution(options, part.cost, part.bound)
