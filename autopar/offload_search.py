"""Should the state that only the update reads lie in the memory of the hosts between steps?

It then takes no memory of a device but for an instant, and costs its bytes over the link to the host, twice a step.  Let p be the
best plan with everything on the devices, and o the best one without.

    no p fits the memory                     o, if that fits
    memory limits p, o takes less time       o
    otherwise                                p

Memory limits p if it runs in several microbatches, computes layers again, or lays arrays out so that it fits.  At most o saves
what p takes longer than the best plan on one mesh regardless of memory; if the copies alone, with the state cut over all devices,
take as long, o is not looked for, nor is it for programs of many operators.  Seconds of copies count in full
(:mod:`autopar.cost_model.hosted`).

What stages of a pipeline keep for their backward passes may lie there as well.  Whether it pays is asked where stages are planned
(:mod:`autopar.inter_op.hosting`); here only, whether it can be done where it is demanded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cost_model.hosted import has_host_memory, seconds_per_hosted_byte
from autopar.errors import BudgetError, PlanError
from autopar.intra_op.search import LARGE_OPERATORS
from autopar.methods import IntraOp, method_of
from autopar.pipelines import come_first, wants_pipeline
from autopar.plan import Offload
from autopar.remat_relief import Planned
from autopar.remat_search import or_raise
from autopar.stage_tasks import may_offload
from autopar.subjects import Demands, Subjected, offloaded
from autopar.wording import bytes_text

COPIES = 2
"""Of each array in a step: to the device, and of its next value back."""


@dataclass(frozen=True)
class Planners:
    """What is planned with.

    The best plan of a step whose state lies as it says; one on one mesh that is faster than so many seconds, if there is any;
    seconds of one regardless of memory.
    """

    best: Callable[[Subjected], Planned]
    faster: Callable[[Subjected, float], Planned | None]
    regardless: Callable[[], float]


def with_offload(
    subject: Subjected,
    cluster: Cluster,
    demands: Demands,
    planners: Planners,
    report: Callable[[str], None],
) -> Planned:
    """The plan of a step with its state where it is demanded or pays.

    Raises :class:`~autopar.errors.PlanError` where a demand cannot be met, and whatever planning raises.
    """
    if demands.offload is Offload.NONE:
        return planners.best(subject)
    if demands.offload is Offload.OPTIMIZER_STATE:
        return planners.best(_as_demanded(subject, cluster))
    if demands.offload is Offload.ACTIVATIONS:
        return _with_activations(subject, cluster, planners)
    if not _may_pay(subject, cluster, demands):
        return planners.best(subject)
    refusal: BudgetError | None = None
    try:
        kept: Planned | None = planners.best(subject)
    except BudgetError as error:
        kept, refusal = None, error
    elsewhere = offloaded(subject, _reason(cluster, demands, kept))
    if not elsewhere.hosted or (kept is not None and not _may_be_faster(elsewhere, cluster, demands, kept, planners)):
        return or_raise(kept, refusal)
    report("planning with the optimizer's state in the memory of the hosts")
    if kept is not None:
        return planners.faster(elsewhere, kept[1].step_seconds) or kept
    try:
        return planners.best(elsewhere)
    except BudgetError as error:
        also = "With the optimizer's state on the hosts (offload='optimizer_state') it does not fit either."
        raise BudgetError(f"{refusal} {also}", needed_bytes=error.needed_bytes) from None


def _with_activations(subject: Subjected, cluster: Cluster, planners: Planners) -> Planned:
    """The best pipeline with its residuals on the hosts; raises PlanError where they cannot lie there, or there are none."""
    asked = f"offload={Offload.ACTIVATIONS.value!r}"
    _check_hosts(asked, cluster)
    found = planners.best(subject)
    if found[1].offload is not Offload.ACTIVATIONS:
        raise PlanError(
            f"{asked} finds nothing: no stage keeps anything for the backward passes of several microbatches at a time; ask for "
            "more microbatches, or leave it out"
        )
    return found


def _as_demanded(subject: Subjected, cluster: Cluster) -> Subjected:
    """The step as the user wants its state to lie; raises PlanError where it cannot."""
    asked = f"offload={Offload.OPTIMIZER_STATE.value!r}"
    if not _is_of_one_process(cluster):
        raise PlanError(f"{asked} is for the devices of one process, and {cluster.name} has several; leave it out")
    _check_hosts(asked, cluster)
    found = offloaded(subject, "you asked for it")
    if not found.hosted:
        raise PlanError(
            f"{asked} finds nothing: the step returns no state that its update alone reads and makes anew, as the moments of "
            "Adam are; leave it out"
        )
    return found


def _is_of_one_process(cluster: Cluster) -> bool:
    return cluster.runs_on is None and not cluster.is_distributed


def _check_hosts(asked: str, cluster: Cluster) -> None:
    """Refuse a cluster whose copies have no price; raises PlanError."""
    if has_host_memory(cluster.device.platform) and cluster.host_memory_link is None:
        raise PlanError(
            f"{asked} has no price: {cluster.name} does not say how fast its devices reach the memory of their host; say so, "
            "for example cluster.replace(host_memory_link=autopar.cluster.Link(1e-5, 2.5e10))"
        )


def _may_pay(subject: Subjected, cluster: Cluster, demands: Demands) -> bool:
    """Whether the memory of the hosts is another one, its link known, and a plan on one mesh of one process open."""
    if wants_pipeline(demands) or not isinstance(method_of(demands.method), IntraOp):
        return False
    return may_offload(cluster) and _is_of_one_process(cluster)


def _may_be_faster(subject: Subjected, cluster: Cluster, demands: Demands, kept: Planned, planners: Planners) -> bool:
    """Whether memory limits a plan, and copies of the state, cut over all devices, take less than what that may cost."""
    _, plan, found = kept
    is_limited = plan.is_pipeline or plan.num_microbatches > 1 or (plan.remat.is_any and demands.remat is None)
    if not is_limited and (found is None or not found.is_squeezed):
        return False
    if len(subject.graph.operators) > LARGE_OPERATORS:  # every plan of a large step takes long
        return False
    if plan.is_pipeline and come_first(subject, cluster):  # it was preferred to all plans on one mesh
        return False
    values = (subject.graph.values[subject.graph.inputs[position]] for position in subject.hosted)
    part_bytes = sum(value.size_bytes for value in values) / cluster.num_devices
    saved_seconds = plan.step_seconds - COPIES * part_bytes * seconds_per_hosted_byte(cluster)
    return saved_seconds > 0 and planners.regardless() < saved_seconds


def _reason(cluster: Cluster, demands: Demands, kept: Planned | None) -> str:
    budget = bytes_text(float(demands.memory_per_device or cluster.per_device_memory_bytes))
    if kept is None:
        return f"no plan with them on the devices keeps {budget} per device"
    seconds = kept[1].step_seconds
    return (
        f"the fastest plan with them on the devices that keeps {budget} per device takes {seconds * 1e3:.1f} ms a step"
    )
