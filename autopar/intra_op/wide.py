"""Wide programs: solved by messages and by walking along the nodes; seldom is an integer program left to be written down.

A model whose edges have very many pairs makes a relaxation that the simplex method crawls through, and one that is fractional
a search that takes minutes, though its optimum is found easily.  With the bound L and the regrets r of
:mod:`autopar.intra_op.bound`, in turn:

1. Some passes raise L.
2. A walk along the nodes that remembers few states (:mod:`autopar.intra_op.frontier`) finds a solution of cost U, and says below
   which cost it has missed none.  The best among few options of every node (:mod:`autopar.intra_op.eliminate`) may be better.
3. If U exceeds what is known to be missed by at most ``Gaps.enough``·U, the solution is as good as the optimum.
4. Otherwise no solution better than U takes an option with L + rᵢ(a) > U, for rᵢ(a) is what the chains through i pay for it
   (reduced-cost fixing, as in Savchynskyy, 2019, §8).  After the last walk such options go, and what is left is solved exactly.

Memory rows are not looked at: a model that has any is none for here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.intra_op.bound import Messages, likeliest
from autopar.intra_op.eliminate import optimum_by_elimination
from autopar.intra_op.frontier import best_along, in_order, narrow_order
from autopar.intra_op.model import Model, Solution, narrowed_costs
from autopar.intra_op.reduce import by_reduction

WIDE_VARIABLES = 10_000
"""From here on the relaxation takes seconds, up to minutes; messages take tenths of a second."""

ENOUGH = 1e-4
"""Relative gap at which an incumbent is left alone: costs themselves are not known better than to percents."""

ROUNDS = (10, 15, 15, 20, 30, 50)
"""Of passes, one backward and one forward, before every attempt to settle it."""

STATES_TIMES_NODES = 75_000
"""A walk among all options remembers so many states over the number of nodes: what it costs is about the same then."""

FEW_STATES, PASSES_OF_FEW = 30, 5
"""After so many passes such a walk follows: what it finds hangs more on the messages than on how much it remembers."""

FEW_OPTIONS = (3, 4)
"""Of every node, among which solutions are looked for exactly."""

FIRST_EXACT = 3
"""Attempts without that: as long as the bound is far off, walks find as good solutions in less time."""

CLOSE, CLOSE_STATES = 2.5, 20_000
"""Where the gap is less than so many times what is enough, few partial solutions are left to be remembered."""

FIRST_CLOSE = 4
"""Attempts without that: of a thousand nodes such a walk takes as long as hundreds of passes, which raise the bound as well."""

MUCH_SENT = 40_000
"""Messages, one along every edge in a pass, after which what would do at last will do: of a thousand nodes a pass takes long."""

MOST_SENT = 80_000
"""Messages after which any solution will do: what is left of a program of hundreds of nodes is not solved exactly in minutes."""

LAST_STATES = 200_000
"""Before an integer program is tried."""

ROUNDING = 1e-9
"""Share of a cost that sums of it may be off by."""


@dataclass(frozen=True)
class Gaps:
    """Relative gaps at which a solution of a wide program will do: at any time, and where more would take an enumeration."""

    enough: float = ENOUGH
    at_last: float = ENOUGH


CLOSEST = Gaps()
"""No nearer than costs are known; zeros would ask for the optimum itself."""

Solver = Callable[[Model], Solution | None]


def is_wide(model: Model) -> bool:
    """Whether :func:`solve_wide` is the quicker way."""
    return not model.memory and model.num_variables > WIDE_VARIABLES


def solve_wide(
    model: Model,
    solve: Solver,
    *,
    below: float = np.inf,
    gaps: Gaps = CLOSEST,
    until_seconds: float = np.inf,
) -> Solution | None:
    """The best solution up to ``gaps``; ``solve`` answers for narrower models.

    None if there is none, or as soon as it is known that none costs less than ``below``. Any that was found will do once
    :func:`time.monotonic` says ``until_seconds``.
    """
    order = narrow_order(model)
    passing = _Passing(in_order(model, order), below, gaps.enough)
    is_settled = _settle(passing, gaps.at_last, until_seconds)
    if passing.is_hopeless:
        return None
    found = passing.incumbent
    if not is_settled:
        found = _better(found, _solve_part(passing.model, passing.possible(), solve))
    return None if found is None else _of(model, found, order)


def _settle(passing: _Passing, gap_at_last: float, until_seconds: float) -> bool:
    """Whether passes and walks find a solution that is good enough, or any before the time is up."""
    for attempt, rounds in enumerate(ROUNDS):
        for _ in range(rounds // PASSES_OF_FEW):
            passing.run(PASSES_OF_FEW)
            if passing.is_hopeless:
                return True
            passing.walk(FEW_STATES)
            if passing.is_settled or (passing.num_sent >= MUCH_SENT and passing.gap <= gap_at_last):
                return True
            if passing.num_sent >= MOST_SENT and passing.incumbent is not None:
                return True
        passing.walk(max(FEW_STATES, STATES_TIMES_NODES // len(passing.model.nodes)))
        for count in FEW_OPTIONS if attempt >= FIRST_EXACT else ():
            if not passing.is_settled:
                passing.look_among_likeliest(count)
        if attempt >= FIRST_CLOSE and passing.gap <= gap_at_last:
            return True
        if attempt >= FIRST_CLOSE and passing.is_close:
            passing.walk(CLOSE_STATES, until_seconds)
        if passing.is_settled or passing.is_late(until_seconds):
            return True
    if passing.num_sent >= MUCH_SENT and passing.incumbent is not None:
        return True
    passing.walk(LAST_STATES, until_seconds)
    return passing.is_settled or passing.is_late(until_seconds)


def _of(model: Model, found: Solution, order: Sequence[int]) -> Solution:
    """What was found with the nodes in that order, as a solution of the model: it adds up its costs in its own."""
    options = [0] * len(order)
    for node, option in zip(order, found.options, strict=True):
        options[node] = option
    cost = model.cost(options)
    return replace(found, options=tuple(options), cost=cost, bound=min(cost, found.bound))


def _better(incumbent: Solution | None, of_possible: Solution | None) -> Solution | None:
    """What is not possible any more costs more than the incumbent."""
    if incumbent is None or of_possible is None:
        return incumbent or of_possible
    best = min(incumbent, of_possible, key=lambda one: one.cost)
    return replace(best, bound=min(best.cost, of_possible.bound))


class _Passing:
    """Owns the bound, the best solution so far, and which options a better one may still take."""

    def __init__(self, model: Model, below: float, enough: float) -> None:
        self.model = model
        self._below = below
        self._enough = enough
        self._messages = Messages(model)
        self._bound = -np.inf
        self._best: Solution | None = None
        self._possible = [np.ones(len(costs), dtype=bool) for costs in model.nodes]
        self.num_sent = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether no solution costs as little as is wanted."""
        return self._bound >= self._below

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            if self.is_hopeless:
                return
            self.num_sent += len(self.model.edges)
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

    def walk(self, most_states: int, until_seconds: float = np.inf) -> None:
        """Look for a solution that is better by a share that is worth it; says what none falls below."""
        residuals = self._messages.residuals()
        least = self._cost - (self._enough - ROUNDING) * abs(self._cost) if self._best else np.inf
        found = best_along(
            residuals, room=least - residuals.bound, most_states=most_states, until_seconds=until_seconds
        )
        self._bound = max(self._bound, residuals.bound + found.floor)
        self._offer(found.options)

    def look_among_likeliest(self, count: int) -> None:
        """Look for a better solution among so many options of least regret of every node, and its best so far."""
        kept = [likeliest(regrets, count) for regrets in self._messages.regrets]
        if self._best is not None:
            kept = [np.union1d(few, [option]) for few, option in zip(kept, self._best.options, strict=True)]
        found = _solve_part(self.model, kept, optimum_of_narrow)
        self._offer(None if found is None else found.options)

    def _offer(self, options: tuple[int, ...] | None) -> None:
        """Keep a solution if it is the best."""
        if options is None:
            return
        cost = self.model.cost(options)
        if cost < self._cost:
            self._best = Solution(options, cost, cost)

    @property
    def _cost(self) -> float:
        return np.inf if self._best is None else self._best.cost

    @property
    def gap(self) -> float:
        """Of the best solution so far; infinite where there is none."""
        return np.inf if self.incumbent is None else self.incumbent.gap

    @property
    def is_close(self) -> bool:
        """Whether the best solution so far is nearly good enough."""
        return self.gap <= CLOSE * self._enough

    @property
    def is_settled(self) -> bool:
        """Whether the best solution so far is good enough."""
        return self.gap <= self._enough

    def is_late(self, until_seconds: float) -> bool:
        """Whether the time is up and there is a solution."""
        return self._best is not None and time.monotonic() > until_seconds

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


def optimum_of_narrow(model: Model) -> Solution | None:
    """The optimum of a model of few options; None where there is none or it is not narrow enough."""
    return by_reduction(model, optimum_by_elimination)
