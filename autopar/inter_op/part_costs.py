"""What do layers cost on each number of devices that a stage may have, and may it have so many?

On every part of the cluster the whole looped step is laid out alone (:mod:`autopar.inter_op.layer_costs`), at a price of memory
where the fastest plan has no room.  If it takes C_m seconds on m devices, a stage on n of D devices that does a share f of it
takes f·C_n, and the other devices take (1 − f) / ((D − n)·r) at least, where r = max_m 1 / (m·C_m) is the best rate of one
device.  So pipelines with such a stage take

    T ≥ 1 / (1 / C_n + (D − n)·r)

and those of D/m stages of m devices, whose arrays fit, with their bubble in N microbatches about

    B = min_m  C_m · m/D · (1 + (D/m − 1) / N)

Of large programs numbers of devices with T > ``FAR``·B, that is from a certain C_n on, are left out: pipelines that are estimated
to be so much slower than the best are not planned.  Layers are taken to be alike in how well they run on many devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autopar.cluster import Cluster
from autopar.inter_op.arranged import MAX_AXES, PipelineTask
from autopar.inter_op.layer_costs import LayerCosts, LayerMap, layer_costs
from autopar.inter_op.looped import constants_of
from autopar.inter_op.stages import FIRST_PRICE_SHARE, PRICE_STEP, RISES
from autopar.intra_op.priced import Prices
from autopar.intra_op.restrict import Restriction
from autopar.intra_op.task import Task

FAR = 1.1

FILLED_SHARE = 0.8
"""So much of the budget is for what the layers hold; the rest for microbatches in flight, scratch, and uneven stages."""


def costs_of_parts(task: PipelineTask, layers: LayerMap, parts: Iterable[Cluster]) -> dict[Cluster, LayerCosts]:
    """Costs on every part of the cluster, of large programs without those on which all layers take far too long.

    Where the fastest plan would not fit in proportion, they are of a plan that does.
    """
    found: dict[Cluster, LayerCosts] = {}
    cluster = task.cluster
    efficiency = Efficiency(cluster.num_devices, layers.num_layers, task.loop.count)
    may_leave_out = task.is_large and cluster.has_like_hosts
    for part in parts:
        size, prices = part.num_devices, whole_on(task, part)
        task.report_progress(f"pricing layers on {size} devices")
        if may_leave_out and not prices.may_cost_less(efficiency.far_seconds(size)):
            continue
        seconds, found[part], fits = _costs_on(part, task, layers, prices)
        efficiency.add(size, seconds, fits=fits)
    return found


def _costs_on(part: Cluster, task: PipelineTask, layers: LayerMap, prices: Prices) -> tuple[float, LayerCosts, bool]:
    """Seconds of the whole step, its costs by layer, and whether it fits in proportion."""
    size = part.num_devices
    budget_bytes = FILLED_SHARE * task.budget_bytes * task.cluster.num_devices / size
    price, rises = 0.0, 0
    while True:
        priced = prices.cheapest(price)
        costs = layer_costs(task.loop, layers, priced, part)
        held = float(costs.state_bytes.sum() + costs.residual_bytes.sum())
        if held <= budget_bytes or size == 1 or rises == RISES - 1:
            return priced.seconds, costs, held <= budget_bytes
        price = PRICE_STEP * price or FIRST_PRICE_SHARE * priced.seconds / budget_bytes
        rises += 1


def whole_on(task: PipelineTask, cluster: Cluster) -> Prices:
    """The whole looped step on a part of the task's cluster alone, for prices of memory."""
    graph = task.loop.graph
    return Prices(
        Task(
            graph=graph,
            state_pairs=task.state_pairs,
            donated=frozenset(source for source, _ in task.state_pairs) if task.donates_state else frozenset(),
            cluster=cluster,
            meshes=tuple(cluster.logical_mesh_shapes(MAX_AXES)),
            budget_bytes=task.budget_bytes,
            restriction=lambda mesh: Restriction(),
            solver_seconds=task.solver_seconds,
            report_progress=task.report_progress,
            worth_share=task.worth_share,
            made_again=constants_of(task.loop.loop),
        ),
        None if task.ground is None else task.ground(),
    )


class Efficiency:
    """Owns what is known of the numbers of devices that stages may have."""

    def __init__(self, num_devices: int, most_stages: int, count: int) -> None:
        """``count`` is the number of microbatches."""
        self._num_devices, self._most_stages, self._count = num_devices, most_stages, count
        self._rate = 0.0
        self._best_seconds = math.inf

    def add(self, size: int, seconds: float, *, fits: bool) -> None:
        """The whole step takes so many seconds on ``size`` devices; ``fits``: its arrays have room on stages of that size."""
        self._rate = max(self._rate, 1 / (size * seconds))
        stages = self._num_devices / size
        if fits and stages <= self._most_stages:
            self._best_seconds = min(self._best_seconds, seconds / stages * (1 + (stages - 1) / self._count))

    def far_seconds(self, size: int) -> float:
        """What the whole step takes on ``size`` devices if no pipeline with such a stage is worth a look."""
        limit = FAR * self._best_seconds
        left = 1 - limit * (self._num_devices - size) * self._rate if math.isfinite(limit) else 0.0
        return limit / left if left > 0 else math.inf
