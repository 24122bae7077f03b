"""One door to all planners: from a traced program and the user's demands to a Plan.

This is where the demands of the API (method, cluster, memory, mesh, constraints) become a task for a planner, and the
planner's answer becomes a Plan with paths and predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax

from autopar.cluster import Cluster
from autopar.constraints import (
    Leaves,
    check_patterns,
    meshes_of_user,
    meshes_with_names,
    path_matches,
    with_constraints,
    without_axes_of_one,
)
from autopar.errors import BudgetError, PlanError
from autopar.graph.fusion import fuse
from autopar.graph.moments import critical_moments
from autopar.graph.roles import Role
from autopar.graph.wishes import Origin
from autopar.inter_op.examples import CoupledBatchError
from autopar.intra_op.search import HOPELESS, Found, Task, search
from autopar.methods import IntraOp, Subject, mesh_of, method_of
from autopar.pipelines import best_pipeline, counts_of, may_be_pipeline, plan_pipeline, wants_pipeline
from autopar.plan import Plan
from autopar.schedule.spmd import output_layouts
from autopar.subjects import Demands, Subjected, microbatched
from autopar.user_shardings import UserDemands, UserShardings, user_demands, with_wishes


def demands_of_user(subject: Subjected, cluster: Cluster, demands: Demands) -> UserDemands:
    """What shardings in the user's code leave of meshes and layouts (see :mod:`autopar.user_shardings`)."""
    if demands.user_shardings is UserShardings.IGNORE:
        return UserDemands()
    method = method_of(demands.method)
    is_free = isinstance(method, IntraOp)
    shape = demands.mesh_shape or (method.mesh_shape if isinstance(method, IntraOp) else None)
    return user_demands(subject.wishes, subject.graph, cluster, mesh_shape=shape, is_free=is_free)


def said_of_inputs(subject: Subjected, user: UserDemands, demands: Demands) -> dict[int, str]:
    """What explanations say of inputs (by position) of which the user has demanded a layout, and where."""
    position_of = {value: position for position, value in enumerate(subject.graph.inputs)}
    said = {}
    for wish in sorted(user.wishes, key=lambda wish: wish.origin is not Origin.CODE):
        if wish.origin is Origin.CODE and wish.source in position_of:
            said[position_of[wish.source]] = f"used as you asked: {wish.place.rsplit('/', 1)[-1]}"
        elif wish.origin is Origin.NAMES:
            said[position_of[wish.value]] = f"you asked for it: names {wish.said}"
        elif wish.origin is Origin.PLACED:
            said.setdefault(position_of[wish.value], "you asked for it: it was passed so")
    for pattern in demands.constraints:
        for position, path in enumerate(subject.program.in_paths):
            if path_matches(pattern, path):
                said[position] = f"you asked for it: constraints[{pattern!r}]"
    return said


def make_plan(
    subject: Subjected,
    cluster: Cluster,
    demands: Demands,
    report_progress: Callable[[str], None] = lambda message: None,
) -> tuple[Subjected, Plan, Found | None]:
    """The plan of a program on a cluster, with the program that it is a plan of and the planner's own records (of
    a pipeline none).

    Unless the number of microbatches is demanded, the batch stays whole if the fastest plan then keeps the memory
    budget; else cuts into 2, 4, 8, … are planned as well, until one is no longer squeezed, and the fastest is taken.

    Raises :class:`~autopar.errors.PlanError` when a demand cannot be met.
    """
    subject = subject.undivided or subject
    if wants_pipeline(demands):
        return plan_pipeline(subject, cluster, demands, report_progress)
    asked = demands.num_microbatches
    if asked is not None or not isinstance(method_of(demands.method), IntraOp):
        alone = _plan_in(asked or 1, subject, cluster, demands, report_progress)
        return _or_pipeline(alone, subject, cluster, demands, report_progress) or alone
    refusal: BudgetError | None = None
    try:
        whole: tuple[Subjected, Plan, Found] | None = _plan_on_one_mesh(subject, cluster, demands, report_progress)
    except BudgetError as error:
        whole, refusal = None, error
    found = _or_pipeline(whole, subject, cluster, demands, report_progress)
    if found is None:
        assert refusal is not None
        raise refusal
    return found


def _or_pipeline(
    whole: tuple[Subjected, Plan, Found] | None,
    subject: Subjected,
    cluster: Cluster,
    demands: Demands,
    report_progress: Callable[[str], None],
) -> tuple[Subjected, Plan, Found | None] | None:
    """The plan on one mesh, or a pipeline if that is free to choose and faster."""
    known = None if whole is None else whole[1]
    pipeline = None
    if may_be_pipeline(subject, cluster, demands, known):
        seconds = float("inf") if known is None else known.step_seconds
        pipeline = best_pipeline(subject, cluster, demands, seconds, report_progress)
    return whole if pipeline is None else pipeline


def _plan_on_one_mesh(
    subject: Subjected, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
) -> tuple[Subjected, Plan, Found]:
    """The fastest plan without stages, in as few microbatches as the memory allows and as is fastest."""
    report_progress("planning the whole batch at once")
    search = _MicrobatchSearch(subject, cluster, demands, report_progress)
    counts = _hopeful(counts_of(subject.roles.batch_size), subject, cluster, demands)
    search.try_count(counts[0])
    if search.best is None and len(counts) > 1:
        search.try_count(counts[-1])  # if the smallest microbatches do not fit, nothing does
    if search.best is not None and search.needs_more:
        for count in counts[1:]:
            if search.is_coupled or not search.try_count(count):
                break
    return search.result()


def _hopeful(counts: list[int], subject: Subjected, cluster: Cluster, demands: Demands) -> list[int]:
    """Without the smallest numbers of microbatches, if the step would not fit were every array cut over all devices."""
    graph = subject.graph
    budget_bytes = float(demands.memory_per_device or cluster.per_device_memory_bytes) * cluster.num_devices
    state = sum(graph.values[value].size_bytes for value in graph.inputs)
    if sum(value.size_bytes for value in graph.all_values()) <= budget_bytes:
        return counts
    fullest = max(sum(row.values()) for row in critical_moments(graph, fuse(graph)))
    fitting = [count for count in counts if state + (fullest - state) / count <= HOPELESS * budget_bytes]
    return fitting or list(dict.fromkeys((counts[0], counts[-1])))


class _MicrobatchSearch:
    """Owns the best plan over several numbers of microbatches, and what spoke against others."""

    def __init__(
        self, subject: Subjected, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
    ) -> None:
        self._subject = subject
        self._rest = (cluster, demands, report_progress)
        self._refusal: BudgetError | None = None
        self._coupling = ""
        self.best: tuple[Subjected, Plan, Found] | None = None

    @property
    def is_coupled(self) -> bool:
        """Whether the batch turned out not to be cuttable."""
        return bool(self._coupling)

    @property
    def needs_more(self) -> bool:
        """Whether memory kept the planner from the fastest plan of the whole batch."""
        return self._refusal is not None or (self.best is not None and self.best[2].is_squeezed)

    def try_count(self, count: int) -> bool:
        """Plan for this many microbatches; whether more of them might still be faster."""
        try:
            found = _plan_in(count, self._subject, *self._rest)
        except BudgetError as error:
            self._refusal = self._refusal or error
            return True
        except CoupledBatchError as error:
            self._coupling = str(error)
            return False
        if self.best is None or found[1].step_seconds < self.best[1].step_seconds:
            self.best = found
        return found[2].is_squeezed

    def result(self) -> tuple[Subjected, Plan, Found]:
        if self.best is not None:
            return replace(self.best[0], coupling=self._coupling), *self.best[1:]
        assert self._refusal is not None
        raise self._refusal if not self._coupling else BudgetError(f"{self._refusal} Besides, {self._coupling}.")


def _plan_in(
    count: int, subject: Subjected, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
) -> tuple[Subjected, Plan, Found]:
    if count > 1:
        report_progress(f"planning {count} microbatches")
    one = microbatched(subject, demands.terms(count), cluster.device.platform.value)
    return one, *_plan_on(one, cluster, demands, report_progress)


def _plan_on(
    subject: Subjected, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
) -> tuple[Plan, Found]:
    method = method_of(demands.method)
    meshes = method.meshes(cluster)
    if demands.mesh_shape is not None:
        wanted = mesh_of(demands.mesh_shape, cluster)
        meshes = (wanted,) if isinstance(method, IntraOp) else tuple(mesh for mesh in meshes if mesh == wanted)
        if not meshes:
            raise PlanError(f"method={method.name!r} cannot use mesh_shape={demands.mesh_shape}; leave one of them out")
    user = demands_of_user(subject, cluster, demands)
    meshes = meshes_of_user(meshes, user, method)
    state = subject.roles.leaves(Role.STATE)
    examples_dim = 0 if subject.num_microbatches == 1 else 1
    view = Subject(subject.graph, state, subject.roles.leaves(Role.BATCH), examples_dim)
    donated = subject.donated if demands.donate_state else frozenset()
    check_patterns(demands.constraints, subject.program.in_paths)
    constraints = without_axes_of_one(demands)
    folded = frozenset(subject.graph.inputs[position] for position in subject.folded)
    named = Leaves(subject.graph, subject.names, folded)
    meshes = meshes_with_names(meshes, constraints)
    is_asked = bool(demands.constraints) or user.meshes is not None
    task = Task(
        graph=subject.graph,
        state_pairs=subject.roles.state_pairs,
        donated=donated,
        cluster=cluster,
        meshes=meshes,
        budget_bytes=float(demands.memory_per_device or cluster.per_device_memory_bytes),
        restriction=lambda mesh: with_wishes(
            with_constraints(method.restriction(view, mesh), named, constraints, mesh),
            user,
            subject.graph,
            mesh,
        ),
        batch=view.batch if isinstance(method, IntraOp) and not is_asked else (),
        examples_dim=examples_dim,
        solver_seconds=demands.solver_seconds,
        names=subject.names,
        report_progress=report_progress,
        separate=frozenset(wish.value for wish in user.wishes if wish.origin is Origin.CODE),
    )
    found = search(task)
    return plan_of(subject, cluster, method.name, found), found


def plan_of(subject: Subjected, cluster: Cluster, method_name: str, found: Found) -> Plan:
    """The planner's answer as plain data."""
    graph, stage = subject.graph, found.stage
    layouts = tuple(stage.home(value, len(graph.values[value].shape)) for value in graph.inputs)
    return Plan(
        fingerprint=subject.fingerprint,
        jax_version=jax.__version__,
        method=method_name,
        cluster=cluster.name,
        num_devices=cluster.num_devices,
        stages=(stage,),
        in_paths=subject.program.in_paths,
        out_paths=subject.program.out_paths,
        in_layouts=layouts,
        out_layouts=output_layouts(graph, stage, subject.roles.state_pairs),
        prediction=found.prediction,
        solver=found.solver,
        num_microbatches=subject.num_microbatches,
    )
