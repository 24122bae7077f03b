"""The integer linear program, in the tight form whose relaxation is usually integral already.

Variables xᵢₐ ∈ {0, 1} (node i takes option a) and 0 ≤ eᵢⱼₐᵦ ≤ 1 (i takes a and j takes b; forbidden pairs have none):

    minimise    Σ cᵢ(a) xᵢₐ + Σ cᵢⱼ(a, b) eᵢⱼₐᵦ
    subject to  Σₐ xᵢₐ = 1                                       every node takes one option
                Σᵦ eᵢⱼₐᵦ = xᵢₐ   and   Σₐ eᵢⱼₐᵦ = xⱼᵦ            a pair is what its two ends are
                Σ uᵢᵐ(a) xᵢₐ + Σ uᵢⱼᵐ(a, b) eᵢⱼₐᵦ ≤ Uᵐ            memory at moment m

These row and column sums are the local polytope (Wainwright and Jordan, 2008, §4.1); given integral x, e follows.
The relaxation is solved first; if some x comes out fractional, nodes are eliminated one by one if their tables are small
(:mod:`autopar.intra_op.eliminate`), and only else are the x declared integral.

The program is stated once as a sparse matrix (:class:`Program`) and handed to HiGHS directly, or through pulp (HiGHS or
CBC) where the solver's own binding is missing; a test holds both ways to one optimum.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.errors import PlanError
from autopar.intra_op.eliminate import optimum_by_elimination
from autopar.intra_op.model import Model, Solution
from autopar.intra_op.reduce import by_reduction
from autopar.intra_op.wide import CLOSEST, Gaps, is_wide, solve_wide

INTEGRALITY_TOLERANCE = 1e-5
RELATIVE_GAP = 1e-6
INTERIOR_COLUMNS = 20_000
"""Larger relaxations go to the interior-point method, then to a vertex: their costs differ by less than the simplex method
perturbs them by, and taking the perturbation back has taken it more than a minute where this takes nine seconds."""


@dataclass(frozen=True)
class Program:
    """min cost·v subject to row_lower ≤ A v ≤ row_upper, 0 ≤ v ≤ 1; A in compressed rows.

    The first ``num_choices`` variables are the xᵢₐ, node after node; the others the pairs.
    """

    cost: np.ndarray
    row_start: np.ndarray
    columns: np.ndarray
    coefficients: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray
    num_choices: int


@dataclass(frozen=True)
class Answer:
    """What a solver returns: values of the variables, objective, proven bound; ``values`` is None if there are none."""

    values: np.ndarray | None
    objective: float
    bound: float
    infeasible: bool


Backend = Callable[[Program, bool, float], Answer]
"""(program, whether x must be integral, time limit in seconds) → answer."""


def solve(
    model: Model,
    *,
    time_limit_seconds: float = 60.0,
    backend: Backend | None = None,
    below: float = np.inf,
    gaps: Gaps = CLOSEST,
) -> Solution | None:
    """The best solution of the model, or None when no solution keeps the memory rows.

    None is returned as well as soon as it is known that none costs less than ``below``, where that is known before the rest.
    Of a wide program any solution will do that is proven to be the best up to ``gaps``.

    When the time is up the best solution found is returned with its proven bound; if none was found, raises
    :class:`~autopar.errors.PlanError`.
    """
    deadline = time.monotonic() + time_limit_seconds

    def narrow(core: Model) -> Solution | None:
        return _solve_core(core, time_limit_seconds, backend or default_backend())

    def narrow_at_last(core: Model) -> Solution | None:
        return _solve_core(core, max(1.0, deadline - time.monotonic()), backend or default_backend())

    def any_core(core: Model) -> Solution | None:
        if not is_wide(core):
            return narrow(core)
        return solve_wide(
            core,
            lambda part: by_reduction(part, narrow_at_last),
            below=below,
            gaps=gaps,
            until_seconds=deadline,
        )

    return by_reduction(model, any_core)


def _solve_core(model: Model, time_limit_seconds: float, backend: Backend) -> Solution | None:
    scale = _cost_scale(model)
    program, starts = build_program(model, scale)
    if program is None:
        return None
    deadline = time.monotonic() + time_limit_seconds
    answer = backend(program, False, time_limit_seconds)
    if answer.infeasible:
        return None
    if answer.values is not None and _is_integral(answer.values[: program.num_choices]):
        return _solution(model, answer, starts, scale)
    is_free = answer.values is not None and not model.memory
    if is_free and (found := optimum_by_elimination(model)) is not None:
        return found
    bound = answer.bound
    answer = backend(program, True, max(1.0, deadline - time.monotonic()))
    if answer.infeasible:
        return None
    if answer.values is None:
        raise PlanError(
            f"the solver found no plan within {time_limit_seconds:.0f} s; allow more time (solver_seconds=…), or "
            "restrict the search with mesh_shape=… or constraints=…"
        )
    solution = _solution(model, answer, starts, scale)
    return Solution(solution.options, solution.cost, max(solution.bound, bound * scale))


def _cost_scale(model: Model) -> float:
    """Seconds per unit of the program's objective: solvers' absolute tolerances want numbers around one."""
    finite = [float(costs[np.isfinite(costs)].min()) for costs in model.nodes if np.isfinite(costs).any()]
    largest = [float(matrix[np.isfinite(matrix)].max()) for matrix in model.edges.values() if np.isfinite(matrix).any()]
    total = sum(finite) + (float(np.median(largest)) if largest else 0.0)
    return total if total > 0 else 1.0


def _is_integral(values: np.ndarray) -> bool:
    return bool((np.minimum(values, 1 - values) < INTEGRALITY_TOLERANCE).all())


def _solution(model: Model, answer: Answer, starts: list[int], scale: float) -> Solution:
    assert answer.values is not None
    options = tuple(
        int(np.argmax(answer.values[start : start + len(costs)]))
        for start, costs in zip(starts, model.nodes, strict=True)
    )
    cost = model.cost(options)
    return Solution(options, cost, min(cost, answer.bound * scale))


def build_program(model: Model, scale: float = 1.0) -> tuple[Program | None, list[int]]:
    """The program of a model with costs over ``scale``, and where each node's x begin; None if a node is stuck."""
    starts = np.concatenate(([0], np.cumsum([len(costs) for costs in model.nodes]))).astype(int)
    if any(not np.isfinite(costs).any() for costs in model.nodes):
        return None, []
    cost_parts = [np.where(np.isfinite(costs), costs, 0.0) for costs in model.nodes]
    rows = _Rows()
    for i, costs in enumerate(model.nodes):
        allowed = np.flatnonzero(np.isfinite(costs))
        rows.add(starts[i] + allowed, np.ones(len(allowed)), 1.0, 1.0)
        for banned in np.flatnonzero(~np.isfinite(costs)):
            rows.add(np.array([starts[i] + banned]), np.ones(1), 0.0, 0.0)
    pair_variables: dict[tuple[int, int], np.ndarray] = {}
    next_variable = int(starts[-1])
    for (i, j), matrix in model.edges.items():
        finite = np.isfinite(matrix)
        variables = np.full(matrix.shape, -1)
        variables[finite] = next_variable + np.arange(int(finite.sum()))
        next_variable += int(finite.sum())
        cost_parts.append(matrix[finite])
        pair_variables[i, j] = variables
        for lines, start in ((variables, starts[i]), (variables.T, starts[j])):
            for option, line in enumerate(lines):
                chosen = line[line >= 0]
                coefficients = np.concatenate((np.ones(len(chosen)), [-1.0]))
                rows.add(np.concatenate((chosen, [start + option])), coefficients, 0.0, 0.0)
    for memory in model.memory:
        columns = [starts[i] + np.arange(len(held)) for i, held in memory.nodes.items()]
        values = list(memory.nodes.values())
        for pair, held in memory.edges.items():
            variables = pair_variables[pair]
            columns.append(variables[variables >= 0])
            values.append(held[variables >= 0])
        rows.add(np.concatenate(columns), np.concatenate(values) / memory.budget, -np.inf, 1.0)
    return rows.program(np.concatenate(cost_parts) / scale, int(starts[-1])), [int(s) for s in starts[:-1]]


class _Rows:
    """Collects constraint rows."""

    def __init__(self) -> None:
        self._columns: list[np.ndarray] = []
        self._coefficients: list[np.ndarray] = []
        self._bounds: list[tuple[float, float]] = []

    def add(self, columns: np.ndarray, coefficients: np.ndarray, lower: float, upper: float) -> None:
        self._columns.append(columns)
        self._coefficients.append(coefficients)
        self._bounds.append((lower, upper))

    def program(self, cost: np.ndarray, num_choices: int) -> Program:
        lengths = [len(columns) for columns in self._columns]
        bounds = np.array(self._bounds)
        return Program(
            cost=cost,
            row_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            columns=np.concatenate(self._columns).astype(np.int32),
            coefficients=np.concatenate(self._coefficients).astype(float),
            row_lower=bounds[:, 0],
            row_upper=bounds[:, 1],
            num_choices=num_choices,
        )


def default_backend() -> Backend:
    """HiGHS's own binding where it is installed, else pulp."""
    try:
        import highspy  # noqa: F401
    except ImportError:
        return solve_with_pulp
    return solve_with_highs


def relaxation_for_highs(program: Program) -> Any:
    """The sparse matrix as a ``highspy.HighsLp``, no variable of which need be integral."""
    import highspy

    count = len(program.cost)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = count, len(program.row_lower)
    lp.col_cost_ = program.cost
    lp.col_lower_, lp.col_upper_ = np.zeros(count), np.ones(count)
    lp.row_lower_, lp.row_upper_ = program.row_lower, program.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = program.row_start
    lp.a_matrix_.index_ = program.columns
    lp.a_matrix_.value_ = program.coefficients
    return lp


def solve_with_highs(program: Program, integral: bool, time_limit_seconds: float) -> Answer:
    """Hand the sparse matrix to HiGHS."""
    import highspy

    lp = relaxation_for_highs(program)
    if integral:
        kinds = np.full(len(program.cost), highspy.HighsVarType.kContinuous)
        kinds[: program.num_choices] = highspy.HighsVarType.kInteger
        lp.integrality_ = list(kinds)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", float(time_limit_seconds))
    solver.setOptionValue("mip_rel_gap", RELATIVE_GAP)
    if not integral and len(program.cost) > INTERIOR_COLUMNS:
        solver.setOptionValue("solver", "ipm")
    solver.passModel(lp)
    solver.run()
    status = solver.getModelStatus()
    info = solver.getInfo()
    infeasible = status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
    values = np.array(solver.getSolution().col_value)
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    optimal = status == highspy.HighsModelStatus.kOptimal
    if not integral and not optimal:
        # A relaxation that was cut short proves nothing and rounds to nothing.
        return Answer(None, np.inf, -np.inf, infeasible)
    bound = float(info.mip_dual_bound) if integral else float(info.objective_function_value)
    return Answer(values if found else None, float(info.objective_function_value), bound, infeasible)


def solve_with_pulp(program: Program, integral: bool, time_limit_seconds: float) -> Answer:
    """State the program in pulp and let HiGHS or, failing that, CBC solve it."""
    import pulp

    problem: Any = pulp.LpProblem("layouts", pulp.LpMinimize)
    make = getattr(problem, "add_variable", pulp.LpVariable)
    variables = []
    for number in range(len(program.cost)):
        category = pulp.LpInteger if integral and number < program.num_choices else pulp.LpContinuous
        variables.append(make(f"v{number}", 0, 1, category))
    problem += pulp.lpSum(c * v for c, v in zip(program.cost, variables, strict=True))
    for row, (lower, upper) in enumerate(zip(program.row_lower, program.row_upper, strict=True)):
        span = slice(program.row_start[row], program.row_start[row + 1])
        pairs = zip(program.columns[span], program.coefficients[span], strict=True)
        line = pulp.lpSum(float(value) * variables[column] for column, value in pairs)
        problem += (line == lower) if lower == upper else (line <= upper)
    result = problem.solve(_pulp_solver(pulp, time_limit_seconds))
    # pulp 3 returns the status code, pulp 4 an object that holds it; both count 1 for optimal, −1 for infeasible.
    status = int(getattr(result, "status", result))
    if status != 1:
        return Answer(None, np.inf, -np.inf, status == -1)
    values = np.array([variable.value() or 0.0 for variable in variables])
    objective = float(program.cost @ values)
    return Answer(values, objective, objective, False)


def _pulp_solver(pulp: Any, time_limit_seconds: float) -> Any:
    options = {"msg": False, "timeLimit": time_limit_seconds}
    # pulp 3 brings CBC as PULP_CBC_CMD, pulp 4 only finds one on the path (COIN_CMD).
    for name in ("HiGHS", "PULP_CBC_CMD", "COIN_CMD"):
        if hasattr(pulp, name) and (solver := getattr(pulp, name)(**options)).available():
            return solver
    raise PlanError("no solver for integer programs is installed; install highspy")
