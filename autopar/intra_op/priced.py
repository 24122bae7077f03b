"""The cheapest layout of a program if memory has a price.

For a price λ in seconds per byte and held bytes u(x), the mean over the critical moments of the step,

    minimise  c(x) + λ · u(x)      over all meshes

(Everett, 1963; :mod:`autopar.intra_op.squeeze` does the same against a budget).  Raising λ trades seconds for bytes; who asks
judges by other means whether it was enough.  Nothing is lowered or predicted here, so an answer costs one integer program per
mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.cluster import Mesh
from autopar.errors import PlanError
from autopar.intra_op.alike import Quotient
from autopar.intra_op.bound import lower_bound
from autopar.intra_op.choices import Choices
from autopar.intra_op.extract import stage_of
from autopar.intra_op.held import with_price
from autopar.intra_op.model import Solution
from autopar.intra_op.nodes import Problem
from autopar.intra_op.on_mesh import Ground, OnMesh, called_after_batch
from autopar.intra_op.search import EXACT_VARIABLES, narrowed, worth_trying
from autopar.intra_op.task import Task
from autopar.intra_op.wide import is_wide
from autopar.plan import Layout, SolverReport, Stage, Strategy


@dataclass(frozen=True)
class PricedStage:
    """The stage at one price: its seconds by the integer program, and how these are made up.

    ``priced_seconds`` add what its memory costs at the price.
    """

    stage: Stage
    seconds: float
    priced_seconds: float
    problem: Problem
    quotient: Quotient
    choices: Choices
    options: tuple[int, ...]
    solver: SolverReport

    def chosen(self, node: int) -> Layout | Strategy:
        """What a node of the problem chose."""
        number = self.quotient.class_of[node]
        return self.choices.options[number][self.options[number]]

    @cached_property
    def node_seconds(self) -> np.ndarray:
        """Seconds of every node of the problem; those of a resharding count for its target."""
        classes = np.zeros(len(self.quotient.members))
        for number, option in enumerate(self.options):
            classes[number] += self.choices.node_seconds[number][option]
        for (first, second), costs in self.choices.edge_seconds.items():
            classes[second] += costs[self.options[first], self.options[second]]
        sizes = np.array([len(members) for members in self.quotient.members])
        return (classes / sizes)[np.array(self.quotient.class_of)]


class Prices:
    """Owns the integer programs of a task, and what they answered."""

    def __init__(self, task: Task, ground: Ground | None = None) -> None:
        self._task = task
        ground = ground or Ground(task.graph, task.state_pairs, task.separate)
        refusal: PlanError | None = None
        self._meshes: list[OnMesh] = []
        for mesh in worth_trying(task):
            try:
                self._meshes.append(_solvable(ground.on(task, mesh)))
            except PlanError as error:
                refusal = refusal or error
        if not self._meshes and refusal is not None:
            raise refusal
        self._answers: dict[float, tuple[PricedStage, ...]] = {}
        self._cheapest: dict[float, PricedStage] = {}
        self._alone: dict[tuple[float, Mesh], PricedStage | None] = {}
        self._last_best: Mesh | None = None

    @property
    def is_quick(self) -> bool:
        """Whether all meshes are solved as soon as one."""
        return not any(is_wide(one.model) for one in self._meshes)

    def cheapest(self, seconds_per_byte: float) -> PricedStage:
        """The stage at a price, up to the task's ``worth_share``, by which another mesh might be cheaper.

        Raises :class:`~autopar.errors.PlanError` when the demands leave none.
        """
        price = seconds_per_byte
        if price not in self._cheapest:
            is_quick = price in self._answers or self.is_quick
            self._cheapest[price] = self.by_mesh(price)[0] if is_quick else self._best(price)
        return self._cheapest[price]

    def may_cost_less(self, seconds: float) -> bool:
        """Whether the cheapest stage costs less where memory costs nothing; if so it is known from now on."""
        if math.isinf(seconds) or 0.0 in self._cheapest or self.is_quick:
            return self.cheapest(0.0).seconds < seconds
        best = self._solve_best(0.0, seconds)
        if best is not None:
            self._cheapest[0.0] = self._stage(*best)
        return best is not None

    def by_mesh(self, seconds_per_byte: float) -> tuple[PricedStage, ...]:
        """The best stage of every mesh at a price, the cheapest first; raises as :meth:`cheapest`."""
        if seconds_per_byte not in self._answers:
            self._answers[seconds_per_byte] = self._solve(seconds_per_byte)
        return self._answers[seconds_per_byte]

    def on(self, mesh: Mesh, seconds_per_byte: float) -> PricedStage | None:
        """The best stage of one mesh at a price; None where the demands leave none there."""
        key = seconds_per_byte, mesh
        if key not in self._alone:
            one = next((one for one in self._meshes if one.choices.mesh == mesh), None)
            try:
                self._alone[key] = None if one is None else self._stage(one, self._at(one, seconds_per_byte).solve())
            except PlanError:
                self._alone[key] = None
        return self._alone[key]

    def others_of(self, stage: PricedStage) -> tuple[PricedStage, ...]:
        """What is best on the other meshes at the price at which a stage was found."""
        found = [
            *self._cheapest.items(),
            *((price, one) for (price, _), one in self._alone.items()),
            *((price, one) for price, answer in self._answers.items() for one in answer),
        ]
        price = next(price for price, one in found if one is stage)
        return tuple(one for one in self.by_mesh(price) if one.stage.mesh != stage.stage.mesh)

    def _solve(self, price: float) -> tuple[PricedStage, ...]:
        solved: list[tuple[float, int, OnMesh, Solution]] = []
        refusal: PlanError | None = None
        for number, one in enumerate(self._meshes):
            try:
                solution = self._at(one, price).solve()
            except PlanError as error:  # nothing is allowed there, or the time was too short
                refusal = refusal or error
                continue
            solved.append((solution.cost, number, one, solution))
        if not solved and refusal is not None:
            raise refusal
        return tuple(self._stage(one, solution) for _, _, one, solution in sorted(solved, key=lambda row: row[:2]))

    def _best(self, price: float) -> PricedStage:
        """The stage on the best mesh."""
        best = self._solve_best(price)
        if best is None:
            raise PlanError(f"the demands leave no plan on the mesh {self._meshes[0].choices.mesh}")
        return self._stage(*best)

    def _solve_best(self, price: float, below: float = math.inf) -> tuple[OnMesh, Solution] | None:
        """The best mesh with its solution: first the mesh that was the best at the last price, then the smallest programs.

        What they cost lets others be given up early.

        None where no mesh has a solution that costs less than ``below``; raises where not one could be found for want of time.
        """
        hopeful_first = sorted(
            self._meshes, key=lambda one: (one.choices.mesh != self._last_best, one.model.num_variables)
        )
        refusal: PlanError | None = None
        best: tuple[OnMesh, Solution] | None = None
        for one in hopeful_first:
            enough = below if best is None else best[1].cost * (1 - self._task.worth_share)
            try:
                solution = self._at(one, price).solve_below(enough)
            except PlanError as error:
                refusal = refusal or error
                continue
            if solution is not None and solution.cost < (below if best is None else best[1].cost):
                best = one, solution
        if best is None and refusal is not None and math.isinf(below):
            raise refusal
        if best is not None:
            self._last_best = best[0].choices.mesh
        return best

    def _at(self, one: OnMesh, price: float) -> OnMesh:
        self._task.report_progress(f"solving for mesh {one.choices.mesh}")
        return one if price == 0 else replace(one, model=with_price(one.model, one.rows, price))

    def _stage(self, one: OnMesh, solution: Solution) -> PricedStage:
        tried = tuple(str(mesh.choices.mesh) for mesh in self._meshes)
        graph, options = self._task.graph, solution.options
        stage = stage_of(graph, one.problem, one.quotient, one.choices, options)
        choices = called_after_batch(one, stage)
        if choices is not one.choices:
            stage = stage_of(graph, one.problem, one.quotient, choices, options)
        return PricedStage(
            stage,
            one.model.cost(solution.options),
            solution.cost,
            one.problem,
            one.quotient,
            choices,
            solution.options,
            SolverReport(one.model.num_variables, solution.core_variables, 0.0, solution.gap, tried),
        )


def _solvable(one: OnMesh) -> OnMesh:
    """A program that is too wide to be solved at every price with the options of least regret, and those of fewest bytes."""
    if one.model.num_variables <= EXACT_VARIABLES:
        return one
    return narrowed(one, lower_bound(one.model), lean=True)
