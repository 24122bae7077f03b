"""A plan of each kind for a cell, and what the simulator says of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from autopar.cluster import Cluster
from autopar.collector import paused_collector
from autopar.errors import BudgetError, PlanError
from autopar.graph.ir import Graph
from autopar.graph.roles import Role
from autopar.inter_op.arranged import Arrangement, StageDemands
from autopar.inter_op.examples import CoupledBatchError
from autopar.inter_op.stages import StagePlanner
from autopar.methods import DataParallel, ExpertParallel, TensorParallel, mesh_of
from autopar.pipeline_shape import cuts_for
from autopar.pipelines import plan_of_pipeline
from autopar.plan import Plan, Schedule
from autopar.planning import make_plan
from autopar.schedule.stage_program import StageProgram
from autopar.stage_tasks import loop_of, pipeline_task
from autopar.subjects import Demands, as_loop
from benchmarks.suites.published import Asked, Cell, PlanFound, Suite
from benchmarks.suites.steps import Step, moe_config, step_of, step_with_adam

MOST_TENSOR = 8
"""Megatron-LM cuts layers over the devices of one host at most."""

ROWS = (1, 2, 4, 8, 16, 32)
"""Examples of a microbatch on one device, of which the best is looked for where a kind of plan leaves them open."""


@dataclass(frozen=True)
class Outcome:
    """A plan, or why there is none; ``core_seconds`` of planning, tracing included.

    ``needed_bytes`` is what a device holds: of the plan, or where that is too much, of the leanest that was found.
    """

    cell: Cell
    asked: Asked
    plan: Plan | None
    flops: float
    needed_bytes: float
    core_seconds: float
    refusal: str = ""

    @property
    def petaflops(self) -> float | None:
        """FLOP/s of all devices together, in 10¹⁵."""
        return None if self.plan is None else self.flops / self.plan.step_seconds / 1e15


def outcome(cell: Cell, asked: Asked, cluster: Cluster, report: Callable[[str], None] = lambda text: None) -> Outcome:
    """The plan of a kind for a cell."""
    started = time.process_time()
    plan, needed, refusal = None, float("nan"), ""
    with paused_collector():
        step = step_of(cell)
        try:
            plan = _PLANNERS[asked](cell, step, cluster, report)
            needed = plan.peak_bytes
        except BudgetError as error:
            needed, refusal = error.needed_bytes, "OOM"
        except PlanError as error:
            refusal = str(error).split(";")[0]
    return Outcome(cell, asked, plan, step.flops, needed, time.process_time() - started, refusal)


def _auto(cell: Cell, step: Step, cluster: Cluster, report: Callable[[str], None]) -> Plan:
    return make_plan(step.subject, cluster, step.free, report)[1]


def _intra_op(cell: Cell, step: Step, cluster: Cluster, report: Callable[[str], None]) -> Plan:
    return make_plan(step.subject, cluster, replace(step.free, method="intra_op"), report)[1]


def _published(cell: Cell, step: Step, cluster: Cluster, report: Callable[[str], None]) -> Plan:
    """Alpa's stages on their meshes, cut where its numbers of groups of layers say; one forward and one backward pass in turn."""
    found, demands = cell.found, replace(step.free, num_microbatches=cell.found.num_microbatches)
    if len(found.stages) == 1:
        alone = replace(demands, method="intra_op", mesh_shape=found.stages[0].mesh)
        return make_plan(step.subject, cluster, alone, report)[1]
    one = as_loop(step.subject, demands.terms(found.num_microbatches), cluster.device.platform.value)
    loop = loop_of(one)
    groups = cuts_for(loop, one.roles.state_pairs, found.num_groups)
    if len(groups) != found.num_groups - 1:
        raise PlanError(
            f"the forward pass has {len(groups) + 1} groups of layers and not {found.num_groups}; it cannot be cut so"
        )
    ends = [sum(stage.groups for stage in found.stages[: number + 1]) for number in range(len(found.stages) - 1)]
    cuts = tuple(groups[end - 1] for end in ends)
    task = pipeline_task(one, loop, cluster, demands, report)
    planner = StagePlanner(replace(task, demands=_on_meshes(found, task.demands)))
    pipeline = planner.plan(Arrangement(cuts, found.devices, Schedule.ONE_F_ONE_B))
    return plan_of_pipeline(one, cluster, demands, pipeline)


StageDemandsOf = Callable[[StageProgram, Graph, Cluster], StageDemands]


def _on_meshes(found: PlanFound, free: StageDemandsOf) -> StageDemandsOf:
    """Each stage on a mesh of the shape that it had; where as many devices had several, they differed in names of axes only."""
    shapes = {stage.num_devices: stage.mesh for stage in found.stages}

    def demands(program: StageProgram, graph: Graph, cluster: Cluster) -> StageDemands:
        return replace(free(program, graph, cluster), meshes=(mesh_of(shapes[cluster.num_devices], cluster),))

    return demands


def _inter_op(cell: Cell, step: Step, cluster: Cluster, report: Callable[[str], None]) -> Plan:
    """A stage on every device, in the microbatches that are fastest."""
    return _best_of(cell, step, cluster, 1, replace(step.free, method="inter_op"), report)


def _deepspeed(cell: Cell, step: Step, cluster: Cluster, report: Callable[[str], None]) -> Plan:
    """Data parallelism over all devices, experts apart, in the microbatches that are fastest."""
    if cell.suite is not Suite.MOE:
        raise PlanError("experts are asked for of a model that has none; give --suites moe")
    devices = cluster.num_devices
    apart = math.gcd(
        moe_config(cell.size).experts, devices
    )  # where experts are no multiple, fewer devices have them apart
    asked = replace(step.free, method=ExpertParallel(apart))
    return _best_of(cell, step_with_adam(cell), cluster, cluster.num_devices, asked, report)


def _best_grid(most_tensor: int, cell: Cell, step: Step, cluster: Cluster, report: Callable[[str], None]) -> Plan:
    """The fastest of all grids that fit."""
    best: Plan | None = None
    refusal: PlanError | None = None
    for data, tensor, pipeline in grids(cluster.num_devices, most_tensor):
        held_bytes = state_bytes(step) / (tensor * pipeline)
        if held_bytes > cluster.per_device_memory_bytes:
            short = BudgetError("the state, which is whole along data, has no room", needed_bytes=held_bytes)
            refusal = _leaner(refusal, short)
            continue
        grid = replace(
            step.free,
            method=DataParallel() if tensor == 1 else TensorParallel(tensor),
            mesh_shape=(data, tensor),
            stages=pipeline,
        )
        try:
            plan = _best_of(cell, step, cluster, data, grid, report)
        except PlanError as error:
            refusal = _leaner(refusal, error)
            continue
        if best is None or plan.step_seconds < best.step_seconds:
            best = plan
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def _leaner(one: PlanError | None, other: PlanError) -> PlanError:
    """Of two grids that have no plan, why the one has none that needs less memory."""
    if not isinstance(one, BudgetError) or not isinstance(other, BudgetError):
        return other if one is None or isinstance(other, BudgetError) else one
    return min(one, other, key=lambda error: error.needed_bytes)


def state_bytes(step: Step) -> int:
    """Bytes of the whole state."""
    graph = step.subject.graph
    state = step.subject.roles.leaves(Role.STATE)
    return sum(graph.values[graph.inputs[position]].size_bytes for position in state)


def grids(num_devices: int, most_tensor: int) -> Iterator[tuple[int, int, int]]:
    """(data, tensor, pipeline) by powers of two."""
    tensor = 1
    while tensor <= min(num_devices, most_tensor):
        pipeline = 1
        while tensor * pipeline <= num_devices:
            yield num_devices // tensor // pipeline, tensor, pipeline
            pipeline *= 2
        tensor *= 2


def _best_of(
    cell: Cell, step: Step, cluster: Cluster, data: int, asked: Demands, report: Callable[[str], None]
) -> Plan:
    """The fastest number of microbatches, from few examples in each to more, until more are slower or need too much."""
    best: Plan | None = None
    refusal: PlanError | None = None
    for rows in ROWS:
        if cell.batch_size % (data * rows):
            continue
        count = cell.batch_size // data // rows
        report(f"{asked.method} {asked.mesh_shape} in {asked.stages} stages, {count} microbatches")
        demands = replace(asked, num_microbatches=count)
        try:
            plan = make_plan(step.subject, cluster, demands, lambda text: None)[1]
        except CoupledBatchError as error:  # experts are shared by more sequences than that
            refusal = error
            continue
        except BudgetError as error:
            refusal = error
            break
        if best is not None and plan.step_seconds >= best.step_seconds:
            break
        best = plan
    if best is None:
        raise refusal or PlanError(f"a batch of {cell.batch_size} is not cut for {data} devices; use others")
    return best


_PLANNERS: dict[Asked, Callable[[Cell, Step, Cluster, Callable[[str], None]], Plan]] = {
    Asked.AUTO: _auto,
    Asked.PUBLISHED: _published,
    Asked.INTRA_OP: _intra_op,
    Asked.INTER_OP: _inter_op,
    Asked.DEEPSPEED: _deepspeed,
    Asked.MEGATRON: partial(_best_grid, MOST_TENSOR),
    Asked.PP_DP: partial(_best_grid, 1),
}
