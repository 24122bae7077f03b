"""The best plan for one program on one set of devices: every logical mesh shape, one integer program each.

A mesh of three axes has so many layouts that its integer program is too large to be solved as it is (options enter
squared).  Such a *wide* program is bounded from below first (:mod:`autopar.intra_op.bound`): where the bound says that it
cannot beat the best plan so far by more than ``WORTH_SHARE``, it is left alone; otherwise every class keeps the options
of least regret, the program over those is solved exactly, and the bound says how far from the optimum that can be.

The memory budget enters as rows of the program at a few critical moments.  They are a model of a model (whole-array
liveness, scaled by the chosen layouts), so the stage that comes out is lowered and its memory predicted exactly; where
that exceeds the budget, the rows are tightened by the difference and the program is solved again.

The integer programs are linear: no collective is hidden behind work in them.  Meshes are compared by their finished plans, less
what is hidden (:mod:`autopar.cost_model.overlap`), and on devices that hide a mesh is looked at if it would win with a share
``HIDEABLE`` of its ways between layouts hidden.  Bounds of wide programs hide nothing.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from dataclasses import replace

import numpy as np

from autopar.cluster import Mesh
from autopar.errors import BudgetError, PlanError
from autopar.intra_op.bound import Bound, likeliest, lower_bound
from autopar.intra_op.held import least_bytes, shares_held
from autopar.intra_op.model import Solution
from autopar.intra_op.on_mesh import Ground, OnMesh
from autopar.intra_op.task import Found, Task, TooSlow
from autopar.intra_op.within_budget import OverBudgetError, within_budget
from autopar.plan import Memory
from autopar.wording import bytes_text

EXACT_VARIABLES = 1_000_000
"""A program of at most so many variables is solved as it is."""

KEPT_OPTIONS = 16
"""Options of least regret that a class of a wide program keeps."""

LEAN_OPTIONS = 6
"""Options that hold the fewest bytes, kept as well as long as no plan keeps the budget."""

HIDEABLE = 0.5
"""Of the plans for H100s that were read (docs/explanation/overlap.md) few are foretold to hide more of what they send."""

LARGE_OPERATORS = 8_000
"""Of a program of more operators, meshes are left out that a finer one stands for."""

LARGE_CLASSES = 2_000
"""Of a step of more classes of like nodes integer programs take as long as of one of that many operators: those of Wide-ResNet,
whose blocks differ in shape, have 2,800, those of GPT 800 whatever its depth."""

MANY_OPERATORS = 2_000
"""Of a program of more operators meshes of more than ``FEW_AXES`` axes take longer than all others together."""

FEW_AXES = 2
ONE_MORE_AXIS = 1.1
"""Where no plan of such a program on meshes of few axes costs less than so many times what is to be beaten, others are not
looked at: a third axis made GPT 39B on 64 devices cheaper by 0.2 %, and a mesh of three takes three times as long to price."""

FAR_OVER = 2.25
"""A program whose leanest layouts hold so many budgets by the rows is not solved: the exact account was no less than 0.45 of
them (Wide-ResNet, most of whose arrays are never written, for they are fused into what reads them)."""


def search(task: Task, ground: Ground | None = None) -> Found:
    """The fastest stage over all meshes that keeps the budget; ``ground`` is the task's, if it is known already.

    The meshes are solved without the budget first; in the order of those optima, which bound what a mesh can give,
    stages are completed and brought within the budget until the next bound cannot win any more.

    Raises :class:`~autopar.errors.BudgetError` when none keeps it, naming the largest tenants of the leanest plan.
    """
    found = search_below(task, ground or Ground(task.graph, task.state_pairs, task.separate), math.inf)
    assert isinstance(found, Found)
    return found


def search_below(task: Task, ground: Ground, seconds: float) -> Found | TooSlow:
    """The same among the plans that cost less than ``seconds``."""
    started = time.monotonic()
    best = _Best(task, seconds)
    wide: list[OnMesh] = []
    solved: list[tuple[OnMesh, Solution]] = []
    for mesh in worth_trying(task):
        task.report_progress(f"solving for mesh {mesh}")
        try:
            on_mesh = ground.on(task, mesh)
            if on_mesh.model.num_variables > EXACT_VARIABLES:
                wide.append(on_mesh)
            else:
                optimum = _optimum(on_mesh, seconds)
                if optimum is None:
                    best.refuse()
                else:
                    solved.append((on_mesh, optimum))
        except PlanError as error:
            best.refusals.append(error)
    for on_mesh, solution in sorted(solved, key=lambda found: found[1].cost):
        if solution.cost - _hideable_seconds(on_mesh, solution) < best.cost:
            best.offer(on_mesh, solution)
        else:
            best.refuse()
    for on_mesh in wide:
        task.report_progress(f"bounding the plans on mesh {on_mesh.choices.mesh}")
        enough = best.cost * (1 - task.worth_share)
        bound = lower_bound(on_mesh.model, enough=enough)
        if bound.cost < enough:
            task.report_progress(f"solving for mesh {on_mesh.choices.mesh}")
            _offer_narrowed(best, on_mesh, bound)
        else:
            best.refuse()
    return best.found(seconds=time.monotonic() - started)


def may_fit(task: Task, ground: Ground) -> bool:
    """Whether a plan on any mesh might keep the budget, by the rough account of the rows."""
    limit = FAR_OVER * task.budget_bytes
    if math.isinf(limit):
        return True
    moments = ground.moments_on_devices(task)
    is_refused = True
    for mesh in task.meshes:
        try:
            allowed = task.restriction(mesh).of_nodes(ground.problem, mesh)
            if least_bytes(ground.problem, mesh, allowed, moments) <= limit:
                return True
        except PlanError:
            continue
        is_refused = False
    return is_refused  # planning says why there is no plan on any mesh


def may_cost_less(task: Task, seconds: float, ground: Ground | None = None) -> bool:
    """Whether any mesh might have a plan, regardless of the budget, that costs less."""
    ground = ground or Ground(task.graph, task.state_pairs, task.separate)
    meshes = worth_trying(task)
    if len(task.graph.operators) <= MANY_OPERATORS:
        return any(_cost_below(task, mesh, seconds, ground) < seconds for mesh in meshes)
    few = [mesh for mesh in meshes if len(mesh.axis_sizes) <= FEW_AXES]
    is_far = bool(few)
    for mesh in few:
        if (cost := _cost_below(task, mesh, seconds * ONE_MORE_AXIS, ground)) < seconds:
            return True
        is_far &= cost >= seconds * ONE_MORE_AXIS
    others = () if is_far else [mesh for mesh in meshes if mesh not in few]
    return any(_cost_below(task, mesh, seconds, ground) < seconds for mesh in others)


def _cost_below(task: Task, mesh: Mesh, seconds: float, ground: Ground) -> float:
    """What plans on a mesh cost at least; no more is proven than ``seconds``."""
    task.report_progress(f"bounding the plans on mesh {mesh}")
    try:
        on_mesh = ground.on(task, mesh)
        if on_mesh.model.num_variables > EXACT_VARIABLES:
            return lower_bound(on_mesh.model, enough=seconds).cost
        found = on_mesh.solve_below(seconds)
    except PlanError:
        return math.inf
    return math.inf if found is None else found.bound


def worth_trying(task: Task) -> tuple[Mesh, ...]:
    """The meshes of a task, of a large program without those whose every layout is one on another mesh as well.

    On one host a mesh whose axes are products of the axes of another says nothing that the other does not say, and the
    order of axes is all one.
    """
    is_free = bool(task.batch) and task.cluster.hosts == 1
    if not is_free or len(task.graph.operators) <= LARGE_OPERATORS:
        return task.meshes
    kept: list[Mesh] = []
    for mesh in sorted(task.meshes, key=lambda mesh: -len(mesh.axis_sizes)):
        if not any(_is_coarser(mesh.axis_sizes, other.axis_sizes) for other in kept):
            kept.append(mesh)
    return tuple(kept)


def _is_coarser(sizes: tuple[int, ...], finer: tuple[int, ...]) -> bool:
    """Whether ``sizes`` are products of groups of ``finer``, each in one group."""
    if not sizes:
        return not finer
    return any(
        math.prod(group) == sizes[0] and _is_coarser(sizes[1:], tuple((Counter(finer) - Counter(group)).elements()))
        for count in range(1, len(finer) + 1)
        for group in itertools.combinations(finer, count)
    )


class _Best:
    """Owns the best plan so far and what spoke against the others."""

    def __init__(self, task: Task, below: float) -> None:
        """Plans that take ``below`` or more are none."""
        self._task = task
        self._found: Found | None = None
        self._leanest: Memory | None = None
        self.cost = below
        self.refusals: list[PlanError] = []
        self._too_slow: TooSlow | None = None

    def offer(self, on_mesh: OnMesh, solution: Solution) -> None:
        """Complete a solution, bring it within the budget, and keep it if it is the best."""
        self._task.report_progress(f"laying out on mesh {on_mesh.choices.mesh}")
        try:
            within = within_budget(on_mesh, solution, self.cost + _hideable_seconds(on_mesh, solution))
        except OverBudgetError as error:
            if self._leanest is None or error.memory.total_bytes < self._leanest.total_bytes:
                self._leanest = error.memory
            return
        cost = math.inf
        if within is not None:
            prediction = within[0].prediction
            cost = within[1] + prediction.allocation_seconds - prediction.hidden_seconds
        if within is not None and cost < self.cost:
            self._found, self.cost = within[0], cost
        else:
            self._too_slow = TooSlow.WITHIN_BUDGET

    def refuse(self) -> None:
        """Note that a mesh has no plan that is fast enough, not even regardless of the budget."""
        self._too_slow = self._too_slow or TooSlow.REGARDLESS

    def found(self, *, seconds: float) -> Found | TooSlow:
        """The best plan, or that all are too slow; raises :class:`~autopar.errors.PlanError` when there is none."""
        if self._found is None:
            if self._too_slow is not None:
                return self._too_slow
            if self._leanest is None:
                raise self.refusals[0]
            raise BudgetError(_over_budget_message(self._task, self._leanest), needed_bytes=self._leanest.total_bytes)
        tried = tuple(str(mesh) for mesh in self._task.meshes)
        return replace(self._found, solver=replace(self._found.solver, seconds=seconds, meshes_tried=tried))


def _hideable_seconds(on_mesh: OnMesh, solution: Solution) -> float:
    """What of a solution's cost may be hidden, as far as it is worth a look: of large programs every plan takes long."""
    task = on_mesh.task
    if not task.cluster.hides_collectives or len(task.graph.operators) > LARGE_OPERATORS:
        return 0.0
    return HIDEABLE * on_mesh.model.cost_of_edges(solution.options)


def _optimum(on_mesh: OnMesh, below: float) -> Solution | None:
    """The optimum regardless of the budget, unless it is known that it costs as much; PlanError where there is no plan at all."""
    return on_mesh.solve() if math.isinf(below) else on_mesh.solve_below(below)


def _offer_narrowed(best: _Best, on_mesh: OnMesh, bound: Bound) -> None:
    """Solve a wide program over the options that are worth a look."""
    narrow = narrowed(on_mesh, bound, lean=not np.isfinite(best.cost))
    try:
        solution = _optimum(narrow, best.cost)
    except PlanError as error:
        best.refusals.append(error)
        return
    if solution is not None and solution.cost < best.cost:
        best.offer(narrow, solution)
    else:
        best.refuse()


def narrowed(on_mesh: OnMesh, bound: Bound, *, lean: bool) -> OnMesh:
    """A wide program with the options that are worth a look only."""
    return on_mesh.narrowed(_worth_a_look(on_mesh, bound, lean=lean), bound.cost)


def _worth_a_look(on_mesh: OnMesh, bound: Bound, *, lean: bool) -> list[np.ndarray]:
    """For each class the options of least regret; with ``lean`` also the best of those that hold the fewest bytes."""
    kept = [likeliest(regrets, KEPT_OPTIONS) for regrets in bound.regrets]
    if lean:
        for number, regrets in enumerate(bound.regrets):
            held = shares_held(on_mesh.problem, on_mesh.quotient, on_mesh.choices, number)
            if held.any():
                kept[number] = np.union1d(kept[number], np.lexsort((regrets, held))[:LEAN_OPTIONS])
    return kept


def _over_budget_message(task: Task, leanest: Memory) -> str:
    tenants = "; ".join(f"{name}: {bytes_text(size)}" for name, size in leanest.largest[:3])
    return (
        f"no plan keeps {bytes_text(task.budget_bytes)} per device on {task.cluster.name}: the leanest that was "
        f"found needs {bytes_text(leanest.total_bytes)}. Its three largest tenants are {tenants}. "
        "Use more devices, a smaller batch, rematerialisation (jax.checkpoint), or raise memory_per_device=."
    )
