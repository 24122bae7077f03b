"""The plan of a pipeline whose stages, meshes and schedule are given: one integer program per stage, then the simulator.

Every stage is laid out on its own devices by the intra-operator planner, for the least seconds of its looped program: N
forward and backward passes and one update.  Stages of the same structure on like devices share one solution.

What a device holds is known only when the schedule is: a stage with k microbatches in flight keeps k sets of residuals.  So a
stage is laid out without regard to memory first; where the simulated peak exceeds the budget, memory gets a price on that
stage (:mod:`autopar.intra_op.priced`), which rises until the peak keeps the budget, and is lowered again in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import Cluster, Mesh
from autopar.cost_model.pipeline import StageCost, simulate_pipeline, stage_cost
from autopar.cost_model.simulate import Simulation
from autopar.errors import BudgetError
from autopar.graph.build import build_graph_by
from autopar.graph.fingerprint import structure
from autopar.graph.ir import Graph
from autopar.graph.rules import Rulebook
from autopar.inter_op.assemble import Running, assemble
from autopar.inter_op.cut import cut
from autopar.inter_op.looped import Looped
from autopar.intra_op.priced import PricedStage, Prices
from autopar.intra_op.restrict import Restriction
from autopar.intra_op.search import Ground, Task
from autopar.plan import Schedule
from autopar.schedule.cross_mesh import CrossMeshTransfer
from autopar.schedule.pipeline import Pipeline, lower_stage
from autopar.schedule.stage_program import Cut, Passing, StageProgram
from autopar.wording import bytes_text

FIRST_PRICE_SHARE = 1 / 64
"""The first price of the whole budget, as a share of a stage's seconds."""

PRICE_STEP = 8.0
RISES = 4
"""Beyond a price of a few steps' seconds for the budget, memory is all that counts."""

HALVINGS = 1
"""How often the prices are lowered again, half-way in their logarithms to the last that were too low."""


MAX_AXES = 2
"""Meshes of stages have so many axes at most, unless more are asked for."""


@dataclass(frozen=True)
class StageDemands:
    """What is asked of the plan of one stage (see :class:`autopar.intra_op.search.Task`)."""

    meshes: tuple[Mesh, ...]
    restriction: Callable[[Mesh], Restriction] = lambda mesh: Restriction()
    separate: frozenset[int] = frozenset()
    may_rename_axes: bool = True


def any_plan(program: StageProgram, graph: Graph, cluster: Cluster) -> StageDemands:
    """Nothing is asked of a stage."""
    return StageDemands(tuple(cluster.logical_mesh_shapes(MAX_AXES)))


@dataclass(frozen=True)
class PipelineTask:
    """What is to be planned: a looped step on a cluster.

    ``names`` are paths of the step's inputs, ``budget_bytes`` is what one device may hold; ``demands`` is asked for each
    stage, its graph and the cluster of its devices alone.
    """

    loop: Looped
    state_pairs: tuple[tuple[int, int], ...]
    cluster: Cluster
    budget_bytes: float
    names: Sequence[str]
    donates_state: bool = True
    solver_seconds: float = 60.0
    report_progress: Callable[[str], None] = lambda message: None
    demands: Callable[[StageProgram, Graph, Cluster], StageDemands] = any_plan
    ground: Callable[[], Ground] | None = None
    """What plans of the whole looped step share, if it is known already."""


@dataclass(frozen=True)
class Arrangement:
    """What a pipeline is made of: before which forward operators stages begin, the devices of each, and the schedule."""

    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    schedule: Schedule


@dataclass(frozen=True)
class PipelineFound:
    """A pipeline, planned and simulated; ``found`` are the intra-operator planner's own records of each stage."""

    arrangement: Arrangement
    cut: Cut
    pipeline: Pipeline
    costs: tuple[StageCost, ...]
    transfers: Mapping[int, CrossMeshTransfer] = field(repr=False)
    simulation: Simulation = field(repr=False)
    found: tuple[PricedStage, ...] = field(repr=False)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.simulation.step_seconds


class StagePlanner:
    """Owns the solutions of stages so far, so that no stage is solved twice."""

    def __init__(self, task: PipelineTask, rulebook: Rulebook | None = None) -> None:
        """``rulebook`` holds what is known already of the step's operators, for the platform of the task's cluster."""
        self._task = task
        self._rulebook = rulebook or Rulebook(task.cluster.device.platform.value)
        self._cuts: dict[tuple[int, ...], Cut] = {}
        self._graphs: dict[int, tuple[Graph, str]] = {}
        self._prices: dict[Hashable, Prices] = {}
        self._costs: dict[Hashable, StageCost] = {}

    def bound_seconds(self, arrangement: Arrangement) -> float:
        """Seconds of a step of which nothing but computing and the collectives of stages takes time, without a budget.

        With S_s the seconds of all N microbatches and the update on stage s: max S + Σ of the others' S / N.
        """
        made = self.cut(arrangement.cuts)
        pairs = zip(made.stages, arrangement.devices, strict=True)
        seconds = [self._stage(program, devices).cheapest(0.0).seconds for program, devices in pairs]
        return max(seconds) + (sum(seconds) - max(seconds)) / self._task.loop.count

    def plan(self, arrangement: Arrangement, give_up_seconds: float = float("inf")) -> PipelineFound:
        """The pipeline of an arrangement; raises :class:`~autopar.errors.BudgetError` where no stage plan keeps the budget.

        One that takes ``give_up_seconds`` before it keeps the budget is returned as it is.
        """
        made = self.cut(arrangement.cuts)
        prices = [0.0] * len(made.stages)
        result = self._at(arrangement, made, prices)
        too_low = list(prices)
        for _ in range(RISES):
            if result.step_seconds >= give_up_seconds:
                return result
            over = self._over(result)
            if not any(over):
                break
            for stage, is_over in enumerate(over):
                if is_over:
                    too_low[stage] = prices[stage]
                    first = FIRST_PRICE_SHARE * result.found[stage].seconds / self._task.budget_bytes
                    prices[stage] = PRICE_STEP * prices[stage] or first
            result = self._at(arrangement, made, prices)
        else:
            if any(self._over(result)):
                raise self._over_budget(result)
        return self._relaxed(arrangement, made, result, prices, too_low)

    def _relaxed(
        self,
        arrangement: Arrangement,
        made: Cut,
        result: PipelineFound,
        prices: Sequence[float],
        too_low: Sequence[float],
    ) -> PipelineFound:
        """The pipeline at lower prices, where these keep the budget as well and make it faster."""
        if not any(prices):
            return result
        for _ in range(HALVINGS):
            lower = [
                price and math.sqrt(price * (low or price / PRICE_STEP))
                for price, low in zip(prices, too_low, strict=True)
            ]
            other = self._at(arrangement, made, lower)
            if any(self._over(other)):
                too_low = lower
            else:
                prices = lower
                if other.step_seconds < result.step_seconds:
                    result = other
        return result

    def _at(self, arrangement: Arrangement, made: Cut, prices: Sequence[float]) -> PipelineFound:
        """The pipeline at a price of memory for every stage, in seconds per byte."""
        found = [
            self._stage(program, devices).cheapest(price)
            for program, devices, price in zip(made.stages, arrangement.devices, prices, strict=True)
        ]
        return self._simulated(arrangement, made, found)

    def _over(self, result: PipelineFound) -> list[bool]:
        return [peak > self._task.budget_bytes for peak in result.simulation.peak_bytes]

    def cut(self, cuts: tuple[int, ...]) -> Cut:
        """The step cut before these forward operators."""
        if cuts not in self._cuts:
            self._cuts[cuts] = cut(self._task.loop, self._task.state_pairs, cuts)
        return self._cuts[cuts]

    def _graph(self, program: StageProgram) -> tuple[Graph, str]:
        if id(program) not in self._graphs:
            self._graphs[id(program)] = build_graph_by(self._rulebook, program.jaxpr), structure(program.jaxpr)
        return self._graphs[id(program)]

    def _stage(self, program: StageProgram, devices: tuple[int, ...]) -> Prices:
        task = self._task
        graph, text = self._graph(program)
        cluster = subcluster(task.cluster, devices)
        asked = task.demands(program, graph, cluster)
        restrictions = {mesh: asked.restriction(mesh) for mesh in asked.meshes}
        said = tuple((mesh, restriction.key) for mesh, restriction in restrictions.items())
        key = (text, program.state_pairs, cluster, said, asked.separate)
        if key in self._prices:
            return self._prices[key]
        leaves = leaves_of(program, graph)
        batch = tuple(k for k, end in enumerate(program.inputs) if end.position in set(task.loop.batch))
        self._prices[key] = Prices(
            Task(
                graph=graph,
                state_pairs=program.state_pairs,
                donated=frozenset(source for source, _ in program.state_pairs) if task.donates_state else frozenset(),
                cluster=cluster,
                meshes=asked.meshes,
                budget_bytes=task.budget_bytes,
                restriction=restrictions.__getitem__,
                batch=batch if asked.may_rename_axes else (),
                examples_dim=1,
                solver_seconds=task.solver_seconds,
                names={value: task.names[position] for value, position in leaves.items()},
                report_progress=task.report_progress,
                separate=asked.separate,
            )
        )
        return self._prices[key]

    def refined(self, found: PipelineFound) -> PipelineFound:
        """The pipeline with other meshes of single stages, where these make the whole step faster.

        A stage's mesh is chosen for its own seconds; what crosses to its neighbours may be quicker on another.
        """
        for stage, (program, devices) in enumerate(zip(found.cut.stages, found.arrangement.devices, strict=True)):
            own = found.found[stage]
            for other in self._stage(program, devices).others_of(own):
                stages = [other if number == stage else one for number, one in enumerate(found.found)]
                tried = self._simulated(found.arrangement, found.cut, stages)
                if tried.step_seconds < found.step_seconds and not any(self._over(tried)):
                    found = tried
        return found

    def under(self, found: PipelineFound, schedule: Schedule) -> PipelineFound | None:
        """The same stages under another schedule; None where that exceeds the budget."""
        other = self._simulated(replace(found.arrangement, schedule=schedule), found.cut, found.found)
        return None if any(self._over(other)) else other

    def _simulated(self, arrangement: Arrangement, made: Cut, found: Sequence[PricedStage]) -> PipelineFound:
        costs = tuple(
            self._cost(program, one, devices)
            for program, one, devices in zip(made.stages, found, arrangement.devices, strict=True)
        )
        cluster = self._task.cluster
        lowered = [cost.lowering for cost in costs]
        whole = assemble(made, lowered, Running(arrangement.schedule, self._task.loop.count), cluster)
        simulation = simulate_pipeline(whole.pipeline, costs, whole.transfers, cluster)
        return PipelineFound(arrangement, made, whole.pipeline, costs, whole.transfers, simulation, tuple(found))

    def _cost(self, program: StageProgram, found: PricedStage, devices: tuple[int, ...]) -> StageCost:
        """The lowered stage and its price; stages of one structure and plan are lowered and priced once."""
        graph, text = self._graph(program)
        stage = replace(found.stage, devices=devices)
        key = (text, program.state_pairs, id(found))
        if key not in self._costs:
            lowering = lower_stage(program, graph, stage, donates_state=self._task.donates_state)
            self._costs[key] = stage_cost(lowering, found.problem.fusion, subcluster(self._task.cluster, devices))
        known = self._costs[key]
        return replace(known, lowering=replace(known.lowering, program=program, graph=graph, stage=stage))

    def _over_budget(self, result: PipelineFound) -> BudgetError:
        peaks = result.simulation.peak_bytes
        stage = max(range(len(peaks)), key=peaks.__getitem__)
        lowering, cost = result.pipeline.stages[stage], result.costs[stage]
        held = {
            self._task.names[end.position]: cost.slot_bytes[lowering.names[place]]
            for end, place in zip(lowering.program.inputs, lowering.slices.inputs, strict=True)
            if end.position >= 0
        }
        tenants = "; ".join(f"{name}: {bytes_text(held[name])}" for name in sorted(held, key=held.__getitem__)[:-4:-1])
        return BudgetError(
            f"no plan keeps {bytes_text(self._task.budget_bytes)} per device: stage {stage + 1} of {len(result.found)} needs "
            f"{bytes_text(int(peaks[stage]))} under schedule {result.arrangement.schedule.value!r}, of which "
            f"{bytes_text(cost.state_bytes)} are state and batch. The largest leaves there are {tenants}. Use more stages "
            "or devices, more microbatches, another schedule, or raise memory_per_device=."
        )


def leaves_of(program: StageProgram, graph: Graph) -> dict[int, int]:
    """Positions in the step of the leaves that a stage reads, those it receives from another stage included, by value."""
    return {value: end.position for value, end in zip(graph.inputs, program.inputs, strict=True) if end.position >= 0}


def subcluster(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """The devices of one stage as a cluster of their own: a slice of a host, or whole hosts."""
    hosts = {device // cluster.devices_per_host for device in devices}
    if len(devices) == cluster.num_devices:
        return cluster
    per_host = len(devices) // len(hosts)
    profile = None if cluster.profile is None else cluster.profile.of_part(per_host)
    return cluster.replace(hosts=len(hosts), devices_per_host=per_host, profile=profile)


def whole_on(task: PipelineTask, size: int) -> Prices:
    """The whole looped step on the first ``size`` devices alone, for prices of memory."""
    cluster = subcluster(task.cluster, range(size))
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
        ),
        None if task.ground is None else task.ground(),
    )


def even_devices(cluster: Cluster, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """The devices of a cluster in as many runs of one length."""
    each = cluster.num_devices // num_stages
    return tuple(tuple(range(stage * each, (stage + 1) * each)) for stage in range(num_stages))


def bytes_between_stages(found: PipelineFound) -> int:
    """Bytes of all whole arrays that cross between stages in one step."""
    count = found.pipeline.order.num_microbatches
    return sum(
        crossing.size_bytes * (count if crossing.passing is Passing.MICRO else 1) for crossing in found.cut.crossings
    )
