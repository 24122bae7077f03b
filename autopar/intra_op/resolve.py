"""One integer program asked again and again with other options forbidden.

The relaxation is solved once; forbidding options afterwards only lowers some upper bounds to zero, so the old basis
stays dual feasible and the dual simplex method goes on from there in a few pivots (Lemke, 1954).  An answer that is
integral is the optimum; any other question goes to the full solver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.intra_op.ilp import INTEGRALITY_TOLERANCE, build_program, relaxation_for_highs, solve
from autopar.intra_op.model import MemoryRow, Model, Solution
from autopar.intra_op.reduce import Reduced, reduce_model

Banned = Mapping[int, Sequence[int]]
"""Node → options that it may not take."""


def forbid(model: Model, banned: Banned) -> Model:
    """The model without the given options of the given nodes."""
    nodes = list(model.nodes)
    for node, options in banned.items():
        nodes[node] = nodes[node].copy()
        nodes[node][list(options)] = np.inf
    return replace(model, nodes=nodes)


class Resolver:
    """Owns the loaded relaxation of a model; ``asked`` are the nodes whose options may be forbidden.

    ``scale`` are seconds per unit of the objective, about the cost of a solution.
    """

    def __init__(self, model: Model, asked: Iterable[int], scale: float) -> None:
        self._model = model
        self._reduced = _reduced_but_for(model, asked)
        self._place = {node: place for place, node in enumerate(self._reduced.core)}
        self._scale = scale
        self._relaxation = _load(self._reduced, scale)

    def solve(self, banned: Banned, *, time_limit_seconds: float) -> Solution | None:
        """The best solution without the banned options, or None if there is none.

        Raises :class:`~autopar.errors.PlanError` when no solution was found in time.
        """
        if self._relaxation is not None:
            solution = self._from_relaxation(*self._relaxation, banned, time_limit_seconds)
            if solution is not None:
                return solution
        return solve(forbid(self._model, banned), time_limit_seconds=time_limit_seconds)

    def _from_relaxation(
        self, solver: Any, starts: list[int], banned: Banned, time_limit_seconds: float
    ) -> Solution | None:
        import highspy

        columns = [column for node, options in banned.items() for column in self._columns(node, options, starts)]
        solver.setOptionValue("time_limit", solver.getRunTime() + time_limit_seconds)
        for column in columns:
            solver.changeColBounds(column, 0.0, 0.0)
        solver.run()
        optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        values = np.array(solver.getSolution().col_value)
        bound = float(solver.getInfo().objective_function_value) * self._scale
        for column in columns:
            solver.changeColBounds(column, 0.0, 1.0)
        counts = [len(left) for left in self._reduced.options]
        choices = values[: sum(counts)]
        if not optimal or not (np.minimum(choices, 1 - choices) < INTEGRALITY_TOLERANCE).all():
            return None
        core = tuple(int(np.argmax(values[s : s + count])) for s, count in zip(starts, counts, strict=True))
        options = self._reduced.lift(core)
        cost = self._model.cost(options)
        return Solution(options, cost, cost - max(0.0, self._reduced.model.cost(core) - bound))

    def _columns(self, node: int, options: Sequence[int], starts: list[int]) -> list[int]:
        place = self._place[node]
        forbidden = set(options)
        return [starts[place] + k for k, option in enumerate(self._reduced.options[place]) if int(option) in forbidden]


def _reduced_but_for(model: Model, asked: Iterable[int]) -> Reduced:
    """The reduced model with every option of the asked nodes still in it.

    The reductions leave alone what a memory row weighs, so a row that weighs the asked nodes nothing protects them.
    """
    row = MemoryRow({node: np.zeros(len(model.nodes[node])) for node in asked}, {}, 1.0)
    reduced = reduce_model(replace(model, memory=[*model.memory, row]))
    return replace(reduced, model=replace(reduced.model, memory=reduced.model.memory[:-1]))


def _load(reduced: Reduced, scale: float) -> tuple[Any, list[int]] | None:
    """The relaxation in HiGHS, and where the options of each core node begin; None without HiGHS's own binding."""
    try:
        import highspy
    except ImportError:
        return None
    program, starts = build_program(reduced.model, scale) if reduced.core else (None, [])
    if program is None:
        return None
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.passModel(relaxation_for_highs(program))
    return solver, starts
