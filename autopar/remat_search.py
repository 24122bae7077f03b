"""Should layers compute again what their backward passes read, and which of them?

Where memory does not limit the plan, nothing is computed again.  Where nothing fits, or a pipeline nearly fills the memory, or
pipelines that might be faster than the plan do not fit, the step is also planned with every layer computed again
(``full``), which needs the least memory.  Then that plan is kept (its mesh, or its stages, devices and microbatches), and layers
are relieved of work as far as the memory allows (:mod:`autopar.remat_relief`); so are those of slower pipelines that were planned
on the way, for the best stages of layers that all compute again need not be the best of those of which some do.  The fastest of
all that was planned is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar import _compat
from autopar.cluster import Cluster, Platform
from autopar.errors import BudgetError
from autopar.graph.ir import Phase
from autopar.inter_op.candidates import SCHEDULES
from autopar.inter_op.searched import Searched
from autopar.intra_op.search import LARGE_OPERATORS
from autopar.methods import IntraOp, method_of
from autopar.plan import Plan, Remat, Schedule
from autopar.remat_relief import Alike, Choices, Planned, Relief, step_seconds
from autopar.subjects import Demands, Subjected, rematerialised, rematerialising

BOUND_SHARE = 0.7
"""A pipeline that needs less than this share of the budget is not limited by memory."""

REPEATED = 4 / 3
"""With every layer computed again a step takes so many times what it takes otherwise at most: a forward pass is a third of it."""


@dataclass(frozen=True)
class Planners:
    """What is planned with: the best plan of a step, one that is like a known plan but for what layers compute again, and
    pipelines that are faster than so many seconds, if there are any.

    The second is given the forward operators before which the known plan's stages begin in the new step.
    """

    best: Callable[[Subjected], Searched[Planned]]
    alike: Callable[[Subjected, Plan, tuple[int, ...]], Alike]
    pipelines: Callable[[Subjected, float], Searched[Planned]]


def with_remat(
    subject: Subjected, cluster: Cluster, demands: Demands, planners: Planners, report: Callable[[str], None]
) -> Planned:
    """The plan of a step as it was written, with what layers compute again: as demanded, or as is fastest.

    Raises :class:`~autopar.errors.BudgetError` where nothing fits, and whatever planning raises.
    """
    platform = cluster.device.platform.value
    if demands.remat is not None:
        return best_of(planners.best(as_demanded(subject, demands, platform)))
    refusal: BudgetError | None = None
    try:
        plain = planners.best(subject)
    except BudgetError as error:
        plain, refusal = Searched[Planned](None), error
    kept = plain.best
    if not _may_pay(subject, cluster, demands, plain):
        return or_raise(kept, refusal)
    forms = rematerialising(subject)
    if forms.says_remat:
        return or_raise(kept, refusal)
    report("planning with layers that compute again")
    everything = rematerialised(subject, forms.all(Remat.FULL), platform)
    try:
        if _must_be_pipeline(cluster, demands, kept):
            lean = planners.pipelines(everything, REPEATED * (math.inf if kept is None else step_seconds(kept)))
        else:
            lean = planners.best(everything)
    except BudgetError as error:
        if refusal is None:
            return or_raise(kept, refusal)
        also = "With every layer computed again (remat='full') it does not fit either."
        raise BudgetError(f"{refusal} {also}", needed_bytes=error.needed_bytes) from None
    choices = Choices(subject, cluster, planners.alike, forms)
    return or_raise(_relieved(choices, lean, kept, demands, report), refusal)


def _relieved(
    choices: Choices, lean: Searched[Planned], kept: Planned | None, demands: Demands, report: Callable[[str], None]
) -> Planned | None:
    """The fastest of the plan without layers that compute again, of lean plans, and of plans like these with fewer of them."""
    best = kept
    first = () if lean.best is None else (lean.best,)
    for one in (*first, *sorted(lean.others, key=step_seconds)):
        fastest = one if best is None else min(best, one, key=step_seconds)
        best = _or_relieved(fastest, choices, one[1], report)
    is_small = len(choices.subject.graph.operators) <= LARGE_OPERATORS
    if best is not None and best is not kept and demands.schedule is None and is_small:
        for schedule in _other_schedules(best[1]):
            best = _or_relieved(best, choices, replace(best[1], schedule=schedule), report)
    return best


def _or_relieved(best: Planned, choices: Choices, lean: Plan, report: Callable[[str], None]) -> Planned:
    """The best plan so far, or one that is like another plan with fewer layers computed again, if that is faster."""
    return min((best, *Relief(choices, lean, step_seconds(best)).better_ones(report)), key=step_seconds)


def _other_schedules(plan: Plan) -> tuple[Schedule, ...]:
    """Under what else stages may run: in their memory there is room for other layers then."""
    if not plan.is_pipeline or plan.shares or plan.num_meshes < len(plan.stages):
        return ()
    return tuple(schedule for schedule in SCHEDULES if schedule is not plan.schedule)


def as_demanded(subject: Subjected, demands: Demands, platform: str) -> Subjected:
    """The step as it was written with what every layer is to compute again; as it is where that is left open."""
    if demands.remat in (None, Remat.NONE):
        return subject
    return rematerialised(subject, rematerialising(subject).all(demands.remat), platform)


def best_of(searched: Searched[Planned]) -> Planned:
    """The best plan of a search that finds one or raises."""
    assert searched.best is not None
    return searched.best


def or_raise(kept: Planned | None, refusal: BudgetError | None) -> Planned:
    """What was planned, or the refusal where nothing was."""
    if kept is None:
        assert refusal is not None
        raise refusal
    return kept


def _may_pay(subject: Subjected, cluster: Cluster, demands: Demands, plain: Searched[Planned]) -> bool:
    """Whether computing again may help: memory limits the plan, and the method leaves open what is computed again.

    On one mesh it must be that nothing fits, for microbatches make what is kept less at a lower price, or that pipelines which
    might be faster do not.
    """
    if not isinstance(method_of(demands.method), IntraOp):
        return False
    operators = subject.graph.operators
    if not any(operator.phase is Phase.BACKWARD for operator in operators):
        return False
    if (kept := plain.best) is None:
        return True
    if len(operators) > LARGE_OPERATORS:  # every plan of a large step takes long
        return False
    if not kept[1].is_pipeline:
        return plain.lacks_memory
    budget_bytes = float(demands.memory_per_device or cluster.per_device_memory_bytes)
    return plain.lacks_memory or kept[1].peak_bytes > BOUND_SHARE * budget_bytes


def _must_be_pipeline(cluster: Cluster, demands: Demands, kept: Planned | None) -> bool:
    """Whether nothing but a pipeline with layers that compute again can be of use.

    Older XLA:CPUs drop barriers, and then find that a program does the same work twice.  In a pipeline passes are programs of
    their own, so there it keeps less wherever it runs.
    """
    if demands.stages not in (None, 1):
        return False
    finds_equal_work = cluster.device.platform is Platform.CPU and not _compat.cpu_keeps_barriers()
    return finds_equal_work or (kept is not None and not kept[1].is_pipeline)
