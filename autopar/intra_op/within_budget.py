"""What is the fastest plan on a mesh that keeps the memory budget, if the fastest of all does not?

The rows of the integer program count the bytes of a plan roughly; the exact account is that of the plan laid out.  So

    small programs   are solved with the rows, which are tightened by what the exact account exceeds the budget by
    large ones       pay a price for memory in place of the rows (:mod:`autopar.intra_op.squeeze`), each solution laid out

and where neither finds a plan, but comes near, the one that holds the fewest bytes is looked at, whatever it costs.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.errors import PlanError
from autopar.intra_op.held import byte_model
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import Solution
from autopar.intra_op.on_mesh import LaidOut, OnMesh
from autopar.intra_op.scratch import with_less_scratch
from autopar.intra_op.squeeze import solve_squeezed
from autopar.intra_op.task import Found
from autopar.plan import Memory

TIGHTENINGS = 6
"""How often the memory rows are tightened before a budget is called impossible."""

EXACT_SQUEEZED_VARIABLES = 20_000
"""A program of at most so many variables is solved with its memory rows, which leave nothing to reduce and much to branch on."""

HOPELESS = 1.5
"""A solution that holds so many budgets by the rows, which are a rough account, is over it by the exact one as well."""

NEAR = 1.25
"""Where not even prices find a large program a plan of so many budgets, the one of fewest bytes is not looked for: it cares for
nothing else, so it sends whole arrays, and was found to hold more by the exact account."""


class OverBudgetError(PlanError):
    """No stage on this mesh keeps the budget; ``memory`` is that of the leanest."""

    def __init__(self, memory: Memory) -> None:
        super().__init__("over budget")
        self.memory = memory


def within_budget(on_mesh: OnMesh, optimum: Solution, below: float) -> tuple[Found, float] | None:
    """The stage and its cost: the optimum if it keeps the budget, else the fastest found whose prediction does.

    None where it is known of none that costs less than ``below``.
    """
    task = on_mesh.task
    first = on_mesh.lay_out(optimum)
    if first.memory.total_bytes <= task.budget_bytes:
        return with_less_scratch(on_mesh, first) or (on_mesh.complete(first), optimum.cost)
    tried = [first]
    if on_mesh.model.num_variables > EXACT_SQUEEZED_VARIABLES:
        squeezed = _priced(on_mesh, optimum, tried, below)
    else:
        squeezed = _tightened(on_mesh, tried)
    if squeezed is not None:
        return squeezed
    if math.isfinite(below):
        return None  # the leanest plan of all is wanted only where there is no other
    least_bytes = min(one.memory.total_bytes for one in tried)
    is_far = on_mesh.model.num_variables > EXACT_SQUEEZED_VARIABLES and least_bytes > NEAR * task.budget_bytes
    if not is_far and (leanest := _leanest(on_mesh)) is not None:
        if leanest.memory.total_bytes <= task.budget_bytes:
            return replace(on_mesh.complete(leanest), model=None), on_mesh.model.cost(leanest.solution.options)
        tried.append(leanest)
    raise OverBudgetError(min((one.memory for one in tried), key=lambda memory: memory.total_bytes))


def _leanest(on_mesh: OnMesh) -> LaidOut | None:
    """The plan of the fewest bytes, whatever it costs."""
    lean = solve(byte_model(on_mesh.model, on_mesh.rows), time_limit_seconds=on_mesh.task.solver_seconds)
    return None if lean is None else on_mesh.lay_out(lean)


def _tightened(on_mesh: OnMesh, tried: list[LaidOut]) -> tuple[Found, float] | None:
    """Solve with the rows, and tighten them until the prediction keeps the budget; ``tried`` gathers what does not."""
    task = on_mesh.task
    limit = task.budget_bytes
    for _ in range(TIGHTENINGS):
        demand = replace(on_mesh.model, memory=[replace(row, budget=limit) for row in on_mesh.rows])
        solution = solve(demand, time_limit_seconds=task.solver_seconds) if limit > 0 else None
        if solution is None:
            return None
        laid = on_mesh.lay_out(solution)
        total_bytes = laid.memory.total_bytes
        if total_bytes <= task.budget_bytes:
            return replace(on_mesh.complete(laid), model=demand), solution.cost
        tried.append(laid)
        limit -= max(total_bytes - task.budget_bytes, 0.01 * task.budget_bytes)
    return None


def _priced(on_mesh: OnMesh, optimum: Solution, tried: list[LaidOut], below: float) -> tuple[Found, float] | None:
    """Pay for memory until the prediction keeps the budget; ``tried`` gathers what does not, the optimum first.

    What the rows count too much of the optimum they are granted: else they would rule out what keeps the budget.
    """
    task, rows = on_mesh.task, on_mesh.rows
    over = max(row.used(optimum.options) for row in rows) - tried[0].memory.total_bytes
    limit = task.budget_bytes + max(0.0, over)
    demand = replace(on_mesh.model, memory=[replace(row, budget=limit) for row in rows])

    def keeps_budget(solution: Solution) -> bool:
        if max(row.used(solution.options) for row in rows) > max(HOPELESS * task.budget_bytes, limit):
            return False  # not worth laying out
        known = next((one for one in tried if one.solution.options == solution.options), None)
        if known is None:
            tried.append(on_mesh.lay_out(solution))
        return (known or tried[-1]).memory.total_bytes <= task.budget_bytes

    seconds = task.solver_seconds
    solution = solve_squeezed(demand, optimum, keeps_budget, time_limit_seconds=seconds, below=below)
    if solution is None:
        return None
    found = on_mesh.complete(next(one for one in tried if one.solution.options == solution.options))
    solver = replace(found.solver, variables_after_reduction=solution.core_variables, gap=on_mesh.gap_of(solution))
    return replace(found, model=demand, solver=solver), solution.cost
