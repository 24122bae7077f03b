"""The problem of one program on one mesh, and a solution of it as a list of steps.

Of a program, whatever the mesh, there are the nodes that are to be laid out, the classes of those that are alike and the moments
at which most bytes live (:class:`Ground`).  A mesh gives every class its options, and so the integer program
(:class:`OnMesh`), and every critical moment a row of it:

    Σ over classes  bytes(option) ≤ budget

A solution names one option for each class.  It is lowered to the steps of an SPMD program, whose bytes and seconds are predicted
(:class:`LaidOut`, :class:`~autopar.intra_op.task.Found`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.cluster import Mesh
from autopar.cost_model.arrays import arrays_of
from autopar.cost_model.hosted import seconds_per_hosted_byte
from autopar.cost_model.memory import memory_of
from autopar.cost_model.nodes import Arrays
from autopar.cost_model.predict import predict
from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.graph.moments import critical_moments
from autopar.intra_op.alike import Quotient, merge_alike
from autopar.intra_op.choices import Choices, choices_on
from autopar.intra_op.extract import stage_of
from autopar.intra_op.held import memory_rows
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import MemoryRow, Model, Solution
from autopar.intra_op.nodes import Problem
from autopar.intra_op.problem import state_problem
from autopar.intra_op.restrict import demand_keys
from autopar.intra_op.task import Found, Task
from autopar.intra_op.wide import ENOUGH, Gaps
from autopar.plan import Memory, SolverReport, Stage
from autopar.schedule.spmd import SpmdProgram, lower, output_layouts


class Ground:
    """Owns what plans of one program share, whatever their meshes and devices: the problem, its classes, its moments."""

    def __init__(
        self, graph: Graph, state_pairs: tuple[tuple[int, int], ...], separate: frozenset[int] = frozenset()
    ) -> None:
        self.graph = graph
        self.problem = state_problem(graph, state_pairs, separate)
        self._state_pairs = state_pairs
        self._quotients: dict[frozenset[tuple[int, Hashable]], Quotient] = {}
        self._moments: dict[frozenset[int], list[dict[int, float]]] = {}

    def on(self, task: Task, mesh: Mesh) -> OnMesh:
        """The problem on a mesh; raises :class:`~autopar.errors.PlanError` when the restriction there leaves no plan."""
        allowed = task.restriction(mesh).of_nodes(self.problem, mesh)
        demands = demand_keys(allowed)
        hosted = self._hosted_bytes(task)
        demands |= {node: (demands.get(node), size) for node, size in hosted.items()}
        quotient = self._quotient(demands)
        choices = choices_on(self.problem, quotient, mesh, task.cluster, allowed)
        if hosted:
            choices = choices.with_copies(quotient, hosted, seconds_per_hosted_byte(task.cluster))
        return OnMesh(task, self, quotient, choices, Model(choices.node_seconds, choices.edge_seconds))

    @property
    def num_classes(self) -> int:
        """Of like nodes, if nothing is demanded."""
        return len(self._quotient({}).members)

    def _quotient(self, demands: Mapping[int, Hashable]) -> Quotient:
        """Classes of like nodes; demands are mostly the same on every mesh."""
        key = frozenset(demands.items())
        if key not in self._quotients:
            self._quotients[key] = merge_alike(self.problem, demands)
        return self._quotients[key]

    def _hosted_bytes(self, task: Task) -> dict[int, float]:
        """Bytes of whole arrays that a step copies between devices and hosts, by node."""
        found: dict[int, float] = defaultdict(float)
        for value, times in task.hosted_values.items():
            if times and (node := self.problem.node_of_value.get(value)) is not None:
                found[node] += times * self.graph.values[value].size_bytes
        return dict(found)

    def moments(self, donated: frozenset[int]) -> list[dict[int, float]]:
        """The critical moments of the program (:mod:`autopar.graph.moments`)."""
        if donated not in self._moments:
            self._moments[donated] = critical_moments(self.graph, self.problem.fusion, self._state_pairs, donated)
        return self._moments[donated]

    def moments_on_devices(self, task: Task) -> list[dict[int, float]]:
        """The same without what lies in the memory of the host."""
        moments = self.moments(task.donated)
        if elsewhere := task.hosted_values:
            return [{value: size for value, size in row.items() if value not in elsewhere} for row in moments]
        return moments


@dataclass(frozen=True)
class LaidOut:
    """A solution as a list of steps, and the bytes that it needs; ``choices`` name the axes as the stage does."""

    solution: Solution
    stage: Stage
    program: SpmdProgram
    arrays: Arrays
    memory: Memory
    choices: Choices


@dataclass(frozen=True)
class OnMesh:
    """The problem on one mesh; ``floor`` is a bound of its own on what any plan there costs, where options are missing."""

    task: Task
    ground: Ground
    quotient: Quotient
    choices: Choices
    model: Model
    floor: float = float("inf")

    def solve(self) -> Solution:
        """The optimum regardless of the budget."""
        solution = self.solve_below(math.inf)
        if solution is None:
            raise PlanError(f"the demands leave no plan on the mesh {self.choices.mesh}")
        return solution

    def solve_below(self, cost: float) -> Solution | None:
        """The optimum regardless of the budget, unless it is known that it costs as much."""
        task = self.task
        gaps = Gaps(ENOUGH, task.worth_share)
        return solve(self.model, time_limit_seconds=task.solver_seconds, below=cost, gaps=gaps)

    def narrowed(self, kept: Sequence[np.ndarray], floor: float) -> OnMesh:
        """The same with only some options of every class."""
        choices = self.choices.narrowed(kept)
        return replace(self, choices=choices, model=Model(choices.node_seconds, choices.edge_seconds), floor=floor)

    def gap_of(self, solution: Solution) -> float:
        """Relative distance of a solution from the optimum of the mesh, as far as it is known."""
        return replace(solution, bound=min(solution.bound, self.floor)).gap

    @property
    def problem(self) -> Problem:
        """What there is to choose, whatever the mesh."""
        return self.ground.problem

    @cached_property
    def rows(self) -> list[MemoryRow]:
        """One row per critical moment: bytes of the live values of each class, by layout; copies only where they differ."""
        return self.rows_of(self.ground.moments_on_devices(self.task))

    def rows_of(self, moments: Sequence[Mapping[int, float]]) -> list[MemoryRow]:
        """The same for moments of which the whole bytes of every live value are given."""
        task = self.task
        return memory_rows(self.problem, self.quotient, self.choices, moments, task.budget_bytes, task.made_again)

    def lay_out(self, solution: Solution) -> LaidOut:
        """Lower a solution and predict its memory."""
        task, problem, graph = self.task, self.problem, self.task.graph
        stage = stage_of(graph, problem, self.quotient, self.choices, solution.options)
        choices = called_after_batch(self, stage)
        if choices is not self.choices:
            stage = stage_of(graph, problem, self.quotient, choices, solution.options)
        program = lower(graph, stage, output_layouts(graph, stage, task.state_pairs), task.hosted_ends)
        device = task.cluster.device
        arrays = arrays_of(program, tuple(pair for pair in task.state_pairs if pair[0] in task.donated), device)
        memory = memory_of(
            arrays,
            program,
            fusion=problem.fusion,
            state_pairs=task.state_pairs,
            platform=device.platform,
            names=task.names or {},
        )
        return LaidOut(solution, stage, program, arrays, memory, choices)

    def complete(self, laid: LaidOut) -> Found:
        """Predict all of what was laid out."""
        prediction = predict(laid.program, self.problem.fusion, self.task.cluster, laid.memory, laid.arrays)
        solution = laid.solution
        report = SolverReport(self.model.num_variables, solution.core_variables, 0.0, self.gap_of(solution))
        return Found(
            laid.stage,
            laid.program,
            prediction,
            report,
            self.problem,
            self.quotient,
            laid.choices,
            solution.options,
            self.model,
            is_narrowed=math.isfinite(self.floor),
        )


def called_after_batch(on_mesh: OnMesh, stage: Stage) -> Choices:
    """The choices with the axis that cuts the batch in a stage called "data"; themselves, if it is so already."""
    graph, dim = on_mesh.task.graph, on_mesh.task.examples_dim
    leaves = [graph.values[graph.inputs[position]] for position in on_mesh.task.batch]
    cutting = [axis for leaf in leaves for axis in stage.home(leaf.id, len(leaf.shape)).dims[dim]]
    if not cutting or "data" in cutting:
        return on_mesh.choices
    return on_mesh.choices.renamed({"data": cutting[0], cutting[0]: "data"})
