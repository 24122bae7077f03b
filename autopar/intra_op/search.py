"""The best plan for one program on one set of devices: every logical mesh shape, one integer program each.

A mesh of three axes has so many layouts that its integer program is too large to be solved as it is (options enter
squared).  Such a *wide* program is bounded from below first (:mod:`autopar.intra_op.bound`): where the bound says that it
cannot beat the best plan so far by more than ``WORTH_SHARE``, it is left alone; otherwise every class keeps the options
of least regret, the program over those is solved exactly, and the bound says how far from the optimum that can be.

The memory budget enters as rows of the program at a few critical moments.  They are a model of a model (whole-array
liveness, scaled by the chosen layouts), so the stage that comes out is lowered and its memory predicted exactly; where
that exceeds the budget, the rows are tightened by the difference and the program is solved again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster import Cluster, Mesh
from autopar.cost_model.memory import predict_memory
from autopar.cost_model.predict import predict
from autopar.errors import BudgetError, PlanError
from autopar.graph.ir import Graph
from autopar.graph.moments import critical_moments
from autopar.intra_op.alike import Quotient, merge_alike
from autopar.intra_op.bound import Bound, lower_bound
from autopar.intra_op.choices import Choices, choices_on
from autopar.intra_op.extract import stage_of
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import MemoryRow, Model, Solution
from autopar.intra_op.problem import Problem, ValueNode, state_problem
from autopar.intra_op.restrict import Restriction, demand_keys
from autopar.intra_op.squeeze import solve_squeezed
from autopar.plan import Layout, Memory, Prediction, SolverReport, Stage
from autopar.schedule.reshard import shares
from autopar.schedule.spmd import SpmdProgram, lower, output_layouts
from autopar.wording import bytes_text

TIGHTENINGS = 6
"""How often the memory rows are tightened before a budget is called impossible."""

EXACT_VARIABLES = 500_000
"""A program of at most so many variables is solved as it is."""

EXACT_SQUEEZED_VARIABLES = 20_000
"""The same with memory rows, which leave nothing to reduce and much to branch on."""

KEPT_OPTIONS = 16
"""Options of least regret that a class of a wide program keeps."""

LEAN_OPTIONS = 6
"""Options that hold the fewest bytes, kept as well as long as no plan keeps the budget."""

HOPELESS = 1.5
"""A solution that holds so many budgets by the rows, which are a rough account, is over it by the exact one as well."""

WORTH_SHARE = 2e-3
"""A wide program that cannot beat the best plan by more than this share is not solved."""


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
    examples_dim: int = 0
    """The dimension of batch leaves along which the examples lie."""
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

    @property
    def is_squeezed(self) -> bool:
        """Whether the memory budget kept the planner from the fastest plan."""
        return self.model is None or bool(self.model.memory)


def search(task: Task) -> Found:
    """The fastest stage over all meshes that keeps the budget.

    The meshes are solved without the budget first; in the order of those optima, which bound what a mesh can give,
    stages are completed and brought within the budget until the next bound cannot win any more.

    Raises :class:`~autopar.errors.BudgetError` when none keeps it, naming the largest tenants of the leanest plan.
    """
    started = time.monotonic()
    problem = state_problem(task.graph, task.state_pairs, task.separate)
    known: dict[frozenset[tuple[int, Hashable]], Quotient] = {}
    best = _Best(task)
    wide: list[OnMesh] = []
    solved: list[tuple[OnMesh, Solution]] = []
    for mesh in task.meshes:
        task.report_progress(f"solving for mesh {mesh}")
        try:
            on_mesh = problem_on(task, problem, mesh, known)
            if on_mesh.model.num_variables > EXACT_VARIABLES:
                wide.append(on_mesh)
            else:
                solved.append((on_mesh, on_mesh.solve()))
        except PlanError as error:
            best.refusals.append(error)
    for on_mesh, solution in sorted(solved, key=lambda found: found[1].cost):
        if solution.cost < best.cost:
            best.offer(on_mesh, solution)
    for on_mesh in wide:
        task.report_progress(f"bounding the plans on mesh {on_mesh.choices.mesh}")
        enough = best.cost * (1 - WORTH_SHARE)
        bound = lower_bound(on_mesh.model, enough=enough)
        if bound.cost < enough:
            task.report_progress(f"solving for mesh {on_mesh.choices.mesh}")
            _offer_narrowed(best, on_mesh, bound)
    return best.found(seconds=time.monotonic() - started)


class _Best:
    """Owns the best plan so far and what spoke against the others."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._found: Found | None = None
        self._leanest: Memory | None = None
        self.cost = float("inf")
        self.refusals: list[PlanError] = []

    def offer(self, on_mesh: OnMesh, solution: Solution) -> None:
        """Complete a solution, bring it within the budget, and keep it if it is the best."""
        self._task.report_progress(f"laying out on mesh {on_mesh.choices.mesh}")
        try:
            found, cost = _within_budget(on_mesh, solution)
        except _OverBudgetError as error:
            if self._leanest is None or error.memory.total_bytes < self._leanest.total_bytes:
                self._leanest = error.memory
            return
        if cost < self.cost:
            self._found, self.cost = _called_after_batch(on_mesh, found), cost

    def found(self, *, seconds: float) -> Found:
        """The best plan; raises :class:`~autopar.errors.PlanError` when there is none."""
        if self._found is None:
            if self._leanest is None:
                raise self.refusals[0]
            raise BudgetError(_over_budget_message(self._task, self._leanest))
        tried = tuple(str(mesh) for mesh in self._task.meshes)
        return replace(self._found, solver=replace(self._found.solver, seconds=seconds, meshes_tried=tried))


def _offer_narrowed(best: _Best, on_mesh: OnMesh, bound: Bound) -> None:
    """Solve a wide program over the options that are worth a look."""
    narrow = on_mesh.narrowed(_worth_a_look(on_mesh, bound, lean=not np.isfinite(best.cost)), bound.cost)
    try:
        solution = narrow.solve()
    except PlanError as error:
        best.refusals.append(error)
        return
    if solution.cost < best.cost:
        best.offer(narrow, solution)


def _worth_a_look(on_mesh: OnMesh, bound: Bound, *, lean: bool) -> list[np.ndarray]:
    """For each class the options of least regret; with ``lean`` also the best of those that hold the fewest bytes."""
    kept = [np.sort(np.argsort(regrets, kind="stable")[:KEPT_OPTIONS]) for regrets in bound.regrets]
    if lean:
        for number, regrets in enumerate(bound.regrets):
            held = _fractions(on_mesh.problem, on_mesh.quotient, on_mesh.choices, number)
            if held.any():
                kept[number] = np.union1d(kept[number], np.lexsort((regrets, held))[:LEAN_OPTIONS])
    return kept


class _OverBudgetError(PlanError):
    """No stage on this mesh keeps the budget; ``memory`` is that of the leanest."""

    def __init__(self, memory: Memory) -> None:
        super().__init__("over budget")
        self.memory = memory


def _over_budget_message(task: Task, leanest: Memory) -> str:
    tenants = "; ".join(f"{name}: {bytes_text(size)}" for name, size in leanest.largest[:3])
    return (
        f"no plan keeps {bytes_text(task.budget_bytes)} per device on {task.cluster.name}: the leanest that was "
        f"found needs {bytes_text(leanest.total_bytes)}. Its three largest tenants are {tenants}. "
        "Use more devices, a smaller batch, rematerialisation (jax.checkpoint), or raise memory_per_device=."
    )


@dataclass(frozen=True)
class OnMesh:
    """The problem on one mesh; ``floor`` is a bound of its own on what any plan there costs, where options are missing."""

    task: Task
    problem: Problem
    quotient: Quotient
    choices: Choices
    model: Model
    floor: float = float("inf")

    def solve(self) -> Solution:
        """The optimum regardless of the budget."""
        solution = solve(self.model, time_limit_seconds=self.task.solver_seconds)
        if solution is None:
            raise PlanError(f"the demands leave no plan on the mesh {self.choices.mesh}")
        return solution

    def narrowed(self, kept: Sequence[np.ndarray], floor: float) -> OnMesh:
        """The same with only some options of every class."""
        choices = self.choices.narrowed(kept)
        return replace(self, choices=choices, model=Model(choices.node_seconds, choices.edge_seconds), floor=floor)

    def gap_of(self, solution: Solution) -> float:
        """Relative distance of a solution from the optimum of the mesh, as far as it is known."""
        return replace(solution, bound=min(solution.bound, self.floor)).gap

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
            names=task.names or {},
        )
        prediction = predict(program, problem.fusion, task.cluster, memory)
        report = SolverReport(self.model.num_variables, solution.core_variables, 0.0, self.gap_of(solution))
        return Found(
            stage, program, prediction, report, problem, self.quotient, self.choices, solution.options, self.model
        )


def problem_on(
    task: Task, problem: Problem, mesh: Mesh, known: dict[frozenset[tuple[int, Hashable]], Quotient]
) -> OnMesh:
    """``known`` are the quotients so far by what was demanded of the nodes, which is mostly the same on every mesh."""
    allowed = task.restriction(mesh).of_nodes(problem, mesh)
    demands = demand_keys(allowed)
    key = frozenset(demands.items())
    if (quotient := known.get(key)) is None:
        quotient = known[key] = merge_alike(problem, demands)
    choices = choices_on(problem, quotient, mesh, task.cluster, allowed)
    return OnMesh(task, problem, quotient, choices, Model(choices.node_seconds, choices.edge_seconds))


def _within_budget(on_mesh: OnMesh, optimum: Solution) -> tuple[Found, float]:
    """The stage and its cost: the optimum if it keeps the budget, else the fastest found whose prediction does."""
    task = on_mesh.task
    first = on_mesh.complete(optimum)
    if first.prediction.memory.total_bytes <= task.budget_bytes:
        return first, optimum.cost
    rows = memory_rows(task, on_mesh.problem, on_mesh.quotient, on_mesh.choices)
    tried = [first]
    squeeze = _priced if on_mesh.model.num_variables > EXACT_SQUEEZED_VARIABLES else _tightened
    if (squeezed := squeeze(on_mesh, optimum, rows, tried)) is not None:
        return squeezed
    if (leanest := _leanest(on_mesh, rows)) is not None:
        if leanest.prediction.memory.total_bytes <= task.budget_bytes:
            return leanest, on_mesh.model.cost(leanest.options)
        tried.append(leanest)
    raise _OverBudgetError(min((one.prediction.memory for one in tried), key=lambda memory: memory.total_bytes))


def _leanest(on_mesh: OnMesh, rows: Sequence[MemoryRow]) -> Found | None:
    """The plan of the fewest bytes, whatever it costs."""
    lean = solve(_byte_model(on_mesh.model, rows), time_limit_seconds=on_mesh.task.solver_seconds)
    return None if lean is None else replace(on_mesh.complete(lean), model=None)


def _tightened(
    on_mesh: OnMesh, optimum: Solution, rows: Sequence[MemoryRow], tried: list[Found]
) -> tuple[Found, float] | None:
    """Solve with the rows, and tighten them until the prediction keeps the budget; ``tried`` gathers what does not."""
    task = on_mesh.task
    limit = task.budget_bytes
    for _ in range(TIGHTENINGS):
        demand = replace(on_mesh.model, memory=[replace(row, budget=limit) for row in rows])
        solution = solve(demand, time_limit_seconds=task.solver_seconds) if limit > 0 else None
        if solution is None:
            return None
        found = replace(on_mesh.complete(solution), model=demand)
        total_bytes = found.prediction.memory.total_bytes
        if total_bytes <= task.budget_bytes:
            return found, solution.cost
        tried.append(found)
        limit -= max(total_bytes - task.budget_bytes, 0.01 * task.budget_bytes)
    return None


def _priced(
    on_mesh: OnMesh, optimum: Solution, rows: Sequence[MemoryRow], tried: list[Found]
) -> tuple[Found, float] | None:
    """Pay for memory until the prediction keeps the budget; ``tried`` gathers what does not."""
    task = on_mesh.task
    demand = replace(on_mesh.model, memory=list(rows))

    def keeps_budget(solution: Solution) -> bool:
        if max(row.used(solution.options) for row in rows) > HOPELESS * task.budget_bytes:
            return False  # not worth completing
        tried.append(on_mesh.complete(solution))
        return tried[-1].prediction.memory.total_bytes <= task.budget_bytes

    solution = solve_squeezed(demand, optimum, keeps_budget, time_limit_seconds=task.solver_seconds)
    if solution is None:
        return None
    found = next(one for one in tried if one.options == solution.options)
    solver = replace(found.solver, variables_after_reduction=solution.core_variables, gap=on_mesh.gap_of(solution))
    return replace(found, model=demand, solver=solver), solution.cost


def _called_after_batch(on_mesh: OnMesh, found: Found) -> Found:
    """The same stage with the axis that cuts the batch called "data", as people expect; axes' names decide nothing."""
    choices = called_after_batch(on_mesh, found.stage)
    if choices is on_mesh.choices:
        return found
    renamed = replace(on_mesh, choices=choices).complete(Solution(found.options, 0.0, 0.0))
    return replace(renamed, solver=found.solver, model=found.model)


def called_after_batch(on_mesh: OnMesh, stage: Stage) -> Choices:
    """The choices with the axis that cuts the batch in a stage called "data"; themselves, if it is so already."""
    graph, dim = on_mesh.task.graph, on_mesh.task.examples_dim
    leaves = [graph.values[graph.inputs[position]] for position in on_mesh.task.batch]
    cutting = [axis for leaf in leaves for axis in stage.home(leaf.id, len(leaf.shape)).dims[dim]]
    if not cutting or "data" in cutting:
        return on_mesh.choices
    return on_mesh.choices.renamed({"data": cutting[0], cutting[0]: "data"})


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


def memory_rows(task: Task, problem: Problem, quotient: Quotient, choices: Choices) -> list[MemoryRow]:
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
