"""One door to all planners: from a traced program and the user's demands to a Plan.

Several forms of a step are planned (with layers that compute again, with state in the memory of the hosts), each by
:mod:`autopar.step_planner`, and the fastest plan is taken.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

from autopar import offload_search
from autopar.cluster import Cluster
from autopar.errors import BudgetError
from autopar.inter_op.searched import Searched
from autopar.intra_op.task import Found
from autopar.likeness import as_there
from autopar.methods import IntraOp, Shares, method_of
from autopar.pipelines import come_first, pipeline_alike, plan_pipeline, plan_pipeline_like, wants_pipeline
from autopar.plan import Plan
from autopar.remat_relief import Alike, Planned
from autopar.remat_search import Planners, as_demanded, with_remat
from autopar.share_search import plan_in_shares
from autopar.step_planner import StepPlanner, on_devices
from autopar.subjects import Demands, Subjected


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

    Layers compute again in the backward pass what ``demands.remat`` says, or what :mod:`autopar.remat_search` finds to pay; the
    state that only the update reads lies where ``demands.offload`` says, or where :mod:`autopar.offload_search` finds it to pay.

    Raises :class:`~autopar.errors.PlanError` when a demand cannot be met.
    """
    subject = replace(subject.as_written, hosted=(), hosting="")
    if demands.like is not None:
        if demands.like.plan.is_pipeline:
            return plan_pipeline_like(demands.like, subject, cluster, demands, report_progress)
        devices = demands.like.plan.stages[0].devices
        there = as_there(demands.like, subject.program)
        demands, subject = replace(demands, mesh_shape=there.mesh_shape), replace(subject, hosted=there.hosted)
        if devices:
            alone = StepPlanner(subject, cluster.part(devices), demands, report_progress).on_one_mesh()
            return on_devices(alone, devices, cluster)
    planners = Planners(
        lambda one: _best_plan(one, cluster, demands, report_progress),
        lambda one, plan, cuts: _plan_alike(one, cluster, demands, plan, cuts, report_progress),
        lambda one, seconds: StepPlanner(one, cluster, demands, report_progress).pipelines_below(seconds),
    )

    def best(one: Subjected) -> Planned:
        return with_remat(one, cluster, demands, planners, report_progress)

    platform = cluster.device.platform.value

    def faster(one: Subjected, seconds: float) -> Planned | None:
        asked = as_demanded(one, demands, platform)
        return StepPlanner(asked, cluster, demands, report_progress).on_any_mesh_below(seconds)

    def regardless() -> float:
        asked = as_demanded(subject, demands, platform)
        free = StepPlanner(asked, cluster, replace(demands, memory_per_device=math.inf), report_progress)
        whole = free.or_on_fewer(free.plan_in(demands.num_microbatches or 1))
        assert whole is not None
        return whole[1].step_seconds

    if demands.like is not None:
        return best(subject)
    return offload_search.with_offload(
        subject, cluster, demands, offload_search.Planners(best, faster, regardless), report_progress
    )


def _plan_alike(
    subject: Subjected,
    cluster: Cluster,
    demands: Demands,
    plan: Plan,
    cuts: tuple[int, ...],
    report_progress: Callable[[str], None],
) -> Alike:
    """A plan of the same shape as another one, for a step whose layers compute something else again."""
    if plan.is_pipeline:
        return pipeline_alike(subject, cluster, demands, plan, cuts, report_progress)
    devices = plan.stages[0].devices
    part = cluster.part(devices) if devices else cluster
    budget_bytes = float(demands.memory_per_device or part.per_device_memory_bytes)
    # Without a budget the integer program is quick, and a plan that would have to be squeezed is no improvement.
    free = replace(demands, memory_per_device=math.inf)
    found = StepPlanner(subject, part, free, report_progress).plan_in(plan.num_microbatches)
    if found[1].peak_bytes > budget_bytes:
        return Alike(None, (True,))
    return Alike(on_devices(found, devices, cluster) if devices else found, (False,))


def _best_plan(
    subject: Subjected, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
) -> Searched[Planned]:
    """The fastest plan of a step in this form; raises :class:`~autopar.errors.BudgetError` where there is none."""
    if isinstance(method_of(demands.method), Shares):
        return Searched(plan_in_shares(subject, cluster, demands, report_progress))
    if wants_pipeline(demands):
        return Searched(plan_pipeline(subject, cluster, demands, report_progress))
    planner = StepPlanner(subject, cluster, demands, report_progress)
    if not isinstance(method_of(demands.method), IntraOp):
        return Searched(planner.plan_in(demands.num_microbatches or 1))
    pipelines_first = demands.num_microbatches is None and come_first(subject, cluster)
    if pipelines_first and (pipeline := planner.or_pipeline(None).best) is not None:
        # All plans on one mesh take long, and over several hosts hardly any is faster.
        if planner.one_mesh_may_beat(pipeline[1].step_seconds):
            with contextlib.suppress(BudgetError):
                return Searched(planner.or_on_one_mesh(pipeline))
        return Searched(pipeline)
    refusal: BudgetError | None = None
    try:
        whole: tuple[Subjected, Plan, Found] | None = planner.as_asked()
    except BudgetError as error:
        whole, refusal = None, error
    whole = planner.or_on_fewer(whole)
    found = Searched[Planned](whole) if pipelines_first else planner.or_pipeline(whole)
    if found.best is None:
        assert refusal is not None
        raise refusal
    return found
