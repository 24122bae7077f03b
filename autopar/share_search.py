"""How are the microbatches of a step dealt to meshes that hold the whole model?

Mesh k takes tₖ seconds for a microbatch, so of N microbatches dealt in shares nₖ, Σ nₖ = N, a step takes about

    maxₖ nₖ tₖ + what crosses and the update

The least of the first term is found by dealing one microbatch after the other to the mesh that would have done it first (which
is optimal: no mesh that got one more than in another dealing could be done later than one of that).  What a microbatch takes on a
mesh follows from how the mesh is laid out, and that hardly from the share; so shares are dealt by FLOP/s, the meshes planned, and
dealt again by the seconds that were found, until they stay.  More, smaller microbatches are dealt more evenly: N is doubled until
a step would hardly be faster were they dealt in any parts.

The meshes are those of the kinds of devices, each with all its hosts, unless the user names others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.cluster import Cluster
from autopar.errors import BudgetError, PlanError
from autopar.graph.ir import Graph
from autopar.inter_op.arranged import Arrangement, PipelineFound
from autopar.inter_op.sites import split_evenly
from autopar.inter_op.stages import StagePlanner
from autopar.methods import Shares, method_of
from autopar.pipeline_shape import check_devices, counts_of
from autopar.pipelines import plan_of_pipeline
from autopar.plan import Plan, Schedule
from autopar.schedule.instructions import Part
from autopar.stage_tasks import loop_of, pipeline_task
from autopar.subjects import Demands, Subjected, as_loop

MOST_MICROBATCHES = 64
"""So many microbatches are dealt at most unless the user says how many."""

WORTH_SHARE = 0.02
"""Where dealing more evenly can make a step faster by this share at best, the batch is not cut into more microbatches."""

DEALS = 3
"""So often shares are dealt anew by what microbatches were found to take."""

Devices = tuple[tuple[int, ...], ...]


def plan_in_shares(
    subject: Subjected, cluster: Cluster, demands: Demands, report: Callable[[str], None]
) -> tuple[Subjected, Plan, None]:
    """The plan of shares that is demanded, with the program that it is a plan of.

    Raises :class:`~autopar.errors.PlanError` where a demand cannot be met.
    """
    method = method_of(demands.method)
    assert isinstance(method, Shares)
    meshes = _meshes(cluster, demands, method)
    search = _ShareSearch(subject, cluster, demands, meshes, report)
    if method.microbatches is not None:
        asked = demands.num_microbatches
        if asked is not None and asked != sum(method.microbatches):
            raise PlanError(
                f"num_microbatches={asked} is not the sum of the shares {list(method.microbatches)}; leave one of them out"
            )
        return search.plan_of(search.dealt(method.microbatches))
    counts = _counts(subject, demands, len(meshes))
    if not counts:
        raise PlanError(
            f"method='shares' deals microbatches to {len(meshes)} meshes, and the batch of {subject.roles.batch_size} examples "
            f"cannot be cut into {len(meshes)} or more; give a larger batch, or fewer meshes (stages=)"
        )
    return search.best(counts)


def shares_below(
    subject: Subjected, cluster: Cluster, demands: Demands, seconds: float, report: Callable[[str], None]
) -> tuple[Subjected, Plan, None] | None:
    """The fastest plan of shares of the kinds of devices, if it takes less than ``seconds``; else None."""
    meshes = kinds_of(cluster)
    counts = _counts(subject, demands, len(meshes))
    if len(meshes) < 2 or not counts or _least_seconds(subject.graph, cluster) >= seconds:
        return None
    report("dealing microbatches to the kinds of devices")
    try:
        found = _ShareSearch(subject, cluster, demands, meshes, report).best(counts, seconds)
    except PlanError:  # none fits, or the examples of the batch are coupled
        return None
    return found if found[1].step_seconds < seconds else None


def kinds_of(cluster: Cluster) -> Devices:
    """The devices of each kind, in the order of the hosts."""
    per_host = cluster.devices_per_host
    return tuple(
        tuple(device for device in range(cluster.num_devices) if cluster.kind_of(device // per_host) == kind)
        for kind in cluster.kinds
    )


def dealt_by(seconds: Sequence[float], count: int) -> tuple[int, ...]:
    """So many microbatches dealt to meshes that take these seconds for one, so that all are done the soonest.

    Each mesh gets one at least; ``count`` is not below their number.
    """
    shares = [1] * len(seconds)
    for _ in range(count - len(seconds)):
        soonest = min(range(len(seconds)), key=lambda mesh: ((shares[mesh] + 1) * seconds[mesh], mesh))
        shares[soonest] += 1
    return tuple(shares)


def _counts(subject: Subjected, demands: Demands, meshes: int) -> list[int]:
    """Numbers of microbatches, the one that is asked for or those that are free, that give each mesh one at least."""
    asked = demands.num_microbatches
    counts = counts_of(subject.roles.batch_size, MOST_MICROBATCHES) if asked is None else [asked]
    return [count for count in counts if count >= meshes]


def _meshes(cluster: Cluster, demands: Demands, method: Shares) -> Devices:
    """The devices of each mesh, as demanded or of each kind."""
    meshes: Devices | None = kinds_of(cluster)
    if isinstance(demands.stages, tuple):
        check_devices(demands.stages, cluster)
        meshes = demands.stages
    elif (number := demands.stages or len(method.microbatches or ())) not in (0, len(kinds_of(cluster))):
        meshes = split_evenly(number, cluster)
    if method.microbatches is not None and (meshes is None or len(method.microbatches) != len(meshes)):
        raise PlanError(
            f"Shares({list(method.microbatches)}) deals to {len(method.microbatches)} meshes, and "
            + (f"stages={demands.stages} asks for others" if demands.stages else f"{cluster.name} has fewer devices")
            + "; give a share for each mesh"
        )
    if meshes is None or len(set(meshes)) < 2:
        raise PlanError(
            f"method='shares' deals microbatches to two meshes or more, and {cluster.name} has "
            f"{len(cluster.kinds)} kind{'s' if len(cluster.kinds) > 1 else ''} of devices; say how many meshes, for example "
            "stages=2, or list the devices of each, stages=[[0, 1], [2, 3]]"
        )
    return meshes


def _least_seconds(graph: Graph, cluster: Cluster) -> float:
    """What the FLOPs of a step take if all devices do nothing else, each at its own rate."""
    dtype = _main_dtype(graph)
    flops = sum(operator.flops * trips for operator, trips in graph.all_operators())
    return flops / sum(_rate(cluster.part(devices), dtype) for devices in kinds_of(cluster))


def _rate(part: Cluster, dtype: str) -> float:
    return part.num_devices * part.per_device_flops_per_second(dtype)


def _main_dtype(graph: Graph) -> str:
    """The type of what the operator with the most FLOPs makes."""
    operator = max((one for one, _ in graph.all_operators() if one.results), key=lambda one: one.flops)
    values = {value.id: value for value in graph.all_values()}
    return values[operator.results[0]].dtype


class _ShareSearch:
    """Owns the plans of shares so far."""

    def __init__(
        self, subject: Subjected, cluster: Cluster, demands: Demands, meshes: Devices, report: Callable[[str], None]
    ) -> None:
        self._subject, self._cluster, self._demands = subject, cluster, demands
        self._meshes, self._report = meshes, report
        self._seconds: tuple[float, ...] | None = None
        """Of one microbatch on each mesh, by the last plan."""
        self._dealt: dict[tuple[int, ...], tuple[Subjected, PipelineFound]] = {}

    def best(self, counts: Sequence[int], below_seconds: float = math.inf) -> tuple[Subjected, Plan, None]:
        """The fastest plan in so many microbatches; in more of them as long as dealing more evenly may make it faster.

        Raises :class:`~autopar.errors.BudgetError` where none fits, ``PlanError`` where the batch cannot be cut.
        """
        best: tuple[Subjected, PipelineFound] | None = None
        refusal: PlanError | None = None
        for count in counts:
            try:
                found = self._in(count)
            except BudgetError as error:
                refusal = refusal or error
                continue
            if best is None or found[1].step_seconds < best[1].step_seconds:
                best = found
            if found[1].step_seconds - self._uneven_seconds(found) >= (1 - WORTH_SHARE) * min(
                best[1].step_seconds, below_seconds
            ):
                break
        if best is None:
            assert refusal is not None
            raise refusal
        return self.plan_of(best)

    def _in(self, count: int) -> tuple[Subjected, PipelineFound]:
        """The fastest of the shares that are dealt one after the other, each by what the last ones took."""
        tried = [self.dealt(dealt_by(self._seconds or self._by_rates(), count))]
        for _ in range(DEALS - 1):
            assert self._seconds is not None
            shares = dealt_by(self._seconds, count)
            if shares in self._dealt:
                break
            tried.append(self.dealt(shares))
        return min(tried, key=lambda one: one[1].step_seconds)

    def _uneven_seconds(self, found: tuple[Subjected, PipelineFound]) -> float:
        """How much sooner a step would be done if microbatches could be dealt in any parts."""
        taken = [cost.seconds(Part.FORWARD) for cost in found[1].costs]
        rates = (share / seconds for share, seconds in zip(found[0].shares, taken, strict=True))
        return max(taken) - sum(found[0].shares) / sum(rates)

    def _by_rates(self) -> tuple[float, ...]:
        dtype = _main_dtype(self._subject.graph)
        return tuple(1 / _rate(self._cluster.part(devices), dtype) for devices in self._meshes)

    def dealt(self, shares: tuple[int, ...]) -> tuple[Subjected, PipelineFound]:
        """The plan of these shares; what a microbatch takes on each mesh is noted."""
        if shares not in self._dealt:
            self._report(f"planning {' + '.join(map(str, shares))} microbatches with the whole model on every mesh")
            demands = self._demands
            terms = replace(demands.terms(sum(shares)), shares=shares)
            one = as_loop(self._subject, terms, self._cluster.device.platform.value)
            task = pipeline_task(one, loop_of(one), self._cluster, demands, self._report)
            found = StagePlanner(task).plan(Arrangement((), self._meshes, Schedule.SHARES))
            self._dealt[shares] = one, found
        found = self._dealt[shares][1]
        seconds = (cost.seconds(Part.FORWARD) for cost in found.costs)
        self._seconds = tuple(taken / share for taken, share in zip(seconds, shares, strict=True))
        return self._dealt[shares]

    def plan_of(self, found: tuple[Subjected, PipelineFound]) -> tuple[Subjected, Plan, None]:
        """As plain data, with its program."""
        return found[0], plan_of_pipeline(found[0], self._cluster, self._demands, found[1]), None
