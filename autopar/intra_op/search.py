"""The best plan for one program on one set of devices: every logical mesh shape, one integer program each.

The memory budget enters as rows of the program at a few critical moments.  They are a model of a model (whole-array
liveness, scaled by the chosen layouts), so the stage that comes out is lowered and its memory predicted exactly; where
that exceeds the budget, the rows are tightened by the difference and the program is solved again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster import Cluster, Mesh
from autopar.cost_model.memory import predict_memory
from autopar.cost_model.predict import predict
from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.graph.moments import critical_moments
from autopar.intra_op.alike import Quotient, merge_alike
from autopar.intra_op.choices import Choices, choices_on
from autopar.intra_op.extract import stage_of
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import MemoryRow, Model, Solution
from autopar.intra_op.problem import Problem, ValueNode, state_problem
from autopar.intra_op.restrict import Restriction, demand_keys
from autopar.plan import Layout, Memory, Prediction, SolverReport, Stage
from autopar.schedule.reshard import shares
from autopar.schedule.spmd import SpmdProgram, lower, output_layouts

TIGHTENINGS = 6
"""How often the memory rows are tightened before a budget is called impossible."""


@dataclass(frozen=True)
class Task:
    """What is to be planned.

    ``restriction`` is asked once per mesh; ``budget_bytes`` is what one device may hold; ``donated`` are the input
    positions whose memory the outputs may take over; ``names`` are paths of values, for messages.
    """

    graph: Graph
    state_pairs: tuple[tuple[int, int], ...]
    donated: frozenset[int]
    cluster: Cluster
    meshes: tuple[Mesh, ...]
    budget_bytes: float
    restriction: Callable[[Mesh], Restriction]
    batch: tuple[int, ...] = ()
    """Input positions of batch leaves, after which the axis that cuts them is called; empty: names stay as they are."""
    solver_seconds: float = 60.0
    names: Mapping[int, str] | None = None
    report_progress: Callable[[str], None] = lambda message: None
    separate: frozenset[int] = frozenset()
    """Values that lie for themselves (see :func:`autopar.intra_op.problem.state_problem`)."""


@dataclass(frozen=True)
class Found:
    """A stage, the steps it lowers to, what is predicted of it, and how it was found.

    ``model`` is the integer program whose solution ``options`` is; None when only the leanest plan keeps the budget, so
    that seconds did not decide.
    """

    stage: Stage
    program: SpmdProgram
    prediction: Prediction
    solver: SolverReport
    problem: Problem
    quotient: Quotient
    choices: Choices
    options: tuple[int, ...]
    model: Model | None


def search(task: Task) -> Found:
    """The fastest stage over all meshes that keeps the budget.

    The meshes are solved without the budget first; in the order of those optima, which bound what a mesh can give,
    stages are completed and brought within the budget until the next bound cannot win any more.

    Raises :class:`~autopar.errors.PlanError` when none keeps it, naming the largest tenants of the leanest plan.
    """
    started = time.monotonic()
    problem = state_problem(task.graph, task.state_pairs, task.separate)
    solved: list[_OnMesh] = []
    refusals: list[PlanError] = []
    for mesh in task.meshes:
        task.report_progress(f"solving for mesh {mesh}")
        try:
            solved.append(_solve_on(task, problem, mesh))
        except PlanError as error:
            refusals.append(error)
    best: Found | None = None
    best_cost = float("inf")
    leanest: Memory | None = None
    for candidate in sorted(solved, key=lambda on_mesh: on_mesh.solution.cost):
        if candidate.solution.cost >= best_cost:
            break
        task.report_progress(f"laying out on mesh {candidate.choices.mesh}")
        try:
            found, cost = _within_budget(candidate)
            found = _called_after_batch(candidate, found)
        except _OverBudgetError as error:
            if leanest is None or error.memory.total_bytes < leanest.total_bytes:
                leanest = error.memory
            continue
        if cost < best_cost:
            best, best_cost = found, cost
    if best is None:
        raise PlanError(_over_budget_message(task, leanest)) if leanest is not None else refusals[0]
    tried = tuple(str(mesh) for mesh in task.meshes)
    report = replace(best.solver, seconds=time.monotonic() - started, meshes_tried=tried)
    return replace(best, solver=report)


class _OverBudgetError(PlanError):
    """No stage on this mesh keeps the budget; ``memory`` is that of the leanest."""

    def __init__(self, memory: Memory) -> None:
        super().__init__("over budget")
        self.memory = memory


def _over_budget_message(task: Task, leanest: Memory) -> str:
    tenants = "; ".join(f"{name}: {size / 2**20:.1f} MiB" for name, size in leanest.largest[:3])
    return (
        f"no plan keeps {task.budget_bytes / 2**20:.1f} MiB per device on {task.cluster.name}: the leanest that was "
        f"found needs {leanest.total_bytes / 2**20:.1f} MiB. Its three largest tenants are {tenants}. "
        "Use more devices, a smaller batch, rematerialisation (jax.checkpoint), or raise memory_per_device=."
    )


@dataclass(frozen=True)
class _OnMesh:
    """The problem on one mesh, with its optimum regardless of the budget."""

    task: Task
    problem: Problem
    quotient: Quotient
    choices: Choices
    model: Model
    solution: Solution

    def complete(self, solution: Solution) -> Found:
        """Lower a solution and predict all of it."""
        task, problem = self.task, self.problem
        stage = stage_of(task.graph, problem, self.quotient, self.choices, solution.options)
        program = lower(task.graph, stage, output_layouts(task.graph, stage, task.state_pairs))
        memory = predict_memory(
            program,
            fusion=problem.fusion,
            state_pairs=task.state_pairs,
            donated=task.donated,
            platform=task.cluster.device.platform.value,
        )
        prediction = predict(program, problem.fusion, task.cluster, memory)
        report = SolverReport(self.model.num_variables, solution.core_variables, 0.0, solution.gap)
        return Found(
            stage, program, prediction, report, problem, self.quotient, self.choices, solution.options, self.model
        )


def _solve_on(task: Task, problem: Problem, mesh: Mesh) -> _OnMesh:
    allowed = task.restriction(mesh).of_nodes(problem, mesh)
    quotient = merge_alike(problem, demand_keys(allowed))
    choices = choices_on(problem, quotient, mesh, task.cluster, allowed)
    model = Model(choices.node_seconds, choices.edge_seconds)
    solution = solve(model, time_limit_seconds=task.solver_seconds)
    if solution is None:
        raise PlanError(f"the demands leave no plan on the mesh {mesh}")
    return _OnMesh(task, problem, quotient, choices, model, solution)


def _within_budget(on_mesh: _OnMesh) -> tuple[Found, float]:
    """The stage and its cost; solved with memory rows, tightened until the exact prediction keeps the budget."""
    task = on_mesh.task
    first = on_mesh.complete(on_mesh.solution)
    if first.prediction.memory.total_bytes <= task.budget_bytes:
        return first, on_mesh.solution.cost
    rows = _memory_rows(task, on_mesh.problem, on_mesh.quotient, on_mesh.choices)
    limit = task.budget_bytes
    leanest = first.prediction.memory
    for _ in range(TIGHTENINGS):
        scaled = [replace(row, budget=limit) for row in rows]
        demand = replace(on_mesh.model, memory=scaled)
        solution = solve(demand, time_limit_seconds=task.solver_seconds) if limit > 0 else None
        if solution is None:
            break
        found = replace(on_mesh.complete(solution), model=demand)
        memory = found.prediction.memory
        if memory.total_bytes <= task.budget_bytes:
            return found, solution.cost
        if memory.total_bytes < leanest.total_bytes:
            leanest = memory
        limit -= max(memory.total_bytes - task.budget_bytes, 0.01 * task.budget_bytes)
    lean = solve(_byte_model(on_mesh.model, rows), time_limit_seconds=task.solver_seconds)
    if lean is not None:
        found = on_mesh.complete(lean)
        if found.prediction.memory.total_bytes <= task.budget_bytes:
            return replace(found, model=None), on_mesh.model.cost(lean.options)
        if found.prediction.memory.total_bytes < leanest.total_bytes:
            leanest = found.prediction.memory
    raise _OverBudgetError(leanest)


def _called_after_batch(on_mesh: _OnMesh, found: Found) -> Found:
    """The same stage with the axis that cuts the batch called "data", as people expect; axes' names decide nothing."""
    graph = on_mesh.task.graph
    leaves = [graph.values[graph.inputs[position]] for position in on_mesh.task.batch]
    cutting = [axis for leaf in leaves for axis in found.stage.home(leaf.id, len(leaf.shape)).dims[0]]
    if not cutting or "data" in cutting:
        return found
    exchanged = {"data": cutting[0], cutting[0]: "data"}
    choices = on_mesh.choices.renamed(exchanged)
    renamed = replace(on_mesh, choices=choices).complete(replace(on_mesh.solution, options=found.options))
    return replace(renamed, solver=found.solver, model=found.model)


def _byte_model(model: Model, rows: Sequence[MemoryRow]) -> Model:
    """The same choices priced by bytes (the sum over the critical moments) instead of seconds."""
    nodes = [np.where(np.isfinite(costs), 0.0, np.inf) for costs in model.nodes]
    edges = {pair: np.where(np.isfinite(costs), 0.0, np.inf) for pair, costs in model.edges.items()}
    for row in rows:
        for node, held in row.nodes.items():
            nodes[node] = nodes[node] + held
        for pair, held in row.edges.items():
            edges[pair] = edges[pair] + held
    return Model(nodes, edges)


def _memory_rows(task: Task, problem: Problem, quotient: Quotient, choices: Choices) -> list[MemoryRow]:
    """One row per critical moment: bytes of the live values of each class, by layout; copies only where they differ."""
    moments = critical_moments(task.graph, problem.fusion, task.state_pairs, task.donated)
    fractions = [_fractions(problem, quotient, choices, number) for number in range(len(quotient.members))]
    rows = []
    for moment in moments:
        nodes: dict[int, np.ndarray] = {}
        edges: dict[tuple[int, int], np.ndarray] = {}
        for value, whole_bytes in moment.items():
            if (index := problem.node_of_value.get(value)) is None:
                continue
            home = quotient.class_of[index]
            nodes[home] = nodes.get(home, 0.0) + whole_bytes * fractions[home]
            if (copy_index := problem.copy_of_value.get(value)) is not None:
                copy = quotient.class_of[copy_index]
                pair = (min(home, copy), max(home, copy))
                if pair not in choices.edge_seconds:
                    continue
                held = _copy_bytes(choices, home, copy) * whole_bytes
                edges[pair] = edges.get(pair, 0.0) + (held if home < copy else held.T)
        rows.append(MemoryRow(nodes, edges, task.budget_bytes))
    return rows


def _fractions(problem: Problem, quotient: Quotient, choices: Choices, number: int) -> np.ndarray:
    if not isinstance(problem.nodes[quotient.members[number][0]], ValueNode):
        return np.zeros(len(choices.options[number]))
    return np.array([1 / shares(o, choices.mesh) for o in choices.options[number] if isinstance(o, Layout)])


def _copy_bytes(choices: Choices, home: int, copy: int) -> np.ndarray:
    """Share of the array that a copy adds, by (home's option, copy's option): nothing where both agree."""
    return np.array(
        [
            [0.0 if a == b or not isinstance(b, Layout) else 1 / shares(b, choices.mesh) for b in choices.options[copy]]
            for a in choices.options[home]
        ]
    )
