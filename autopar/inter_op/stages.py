"""The plan of a pipeline whose stages, meshes and schedule are given: one integer program per stage, then the simulator.

Every stage is laid out on its own devices by the intra-operator planner, for the least seconds of its looped program: N
forward and backward passes and one update.  Stages of the same structure on like devices share one solution.

What a device holds is known only when the schedule is: a stage with k microbatches in flight keeps k sets of residuals.  So a
stage is laid out without regard to memory first; where the simulated peak P exceeds the budget M, the stage is laid out
again with P − M bytes less than its own program was predicted to need, until P ≤ M or nothing is left to give up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import Cluster, Mesh
from autopar.cost_model.pipeline import StageCost, simulate_pipeline, stage_cost, transfers_of
from autopar.cost_model.simulate import Simulation
from autopar.errors import BudgetError
from autopar.graph.build import build_graph
from autopar.graph.fingerprint import structure
from autopar.graph.ir import Graph
from autopar.inter_op.cut import cut
from autopar.inter_op.looped import Looped
from autopar.intra_op.restrict import Restriction
from autopar.intra_op.search import Found, Task, search
from autopar.plan import Schedule
from autopar.schedule.cross_mesh import CrossMeshTransfer
from autopar.schedule.orders import make_order
from autopar.schedule.pipeline import Pipeline, StageLowering, lower_stage, pipeline_of
from autopar.schedule.stage_program import Cut, StageProgram
from autopar.wording import bytes_text

SQUEEZES = 4
"""How often a stage over the budget is laid out anew with less."""


@dataclass(frozen=True)
class PipelineTask:
    """What is to be planned: a looped step on a cluster.

    ``names`` are paths of the step's inputs, ``budget_bytes`` is what one device may hold; ``restriction`` is asked for each
    stage and mesh, with the inputs' positions in the step by value.
    """

    loop: Looped
    state_pairs: tuple[tuple[int, int], ...]
    cluster: Cluster
    budget_bytes: float
    names: Sequence[str]
    donates_state: bool = True
    max_axes: int = 2
    solver_seconds: float = 60.0
    report_progress: Callable[[str], None] = lambda message: None
    restriction: Callable[[Graph, Mapping[int, int], Mesh], Restriction] = lambda graph, leaves, mesh: Restriction()


@dataclass(frozen=True)
class Layout:
    """What a pipeline is made of: before which forward operators stages begin, the devices of each, and the schedule."""

    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    schedule: Schedule


@dataclass(frozen=True)
class PipelineFound:
    """A pipeline, planned and simulated; ``found`` are the intra-operator planner's own records of each stage."""

    layout: Layout
    cut: Cut
    pipeline: Pipeline
    costs: tuple[StageCost, ...]
    transfers: Mapping[int, CrossMeshTransfer] = field(repr=False)
    simulation: Simulation = field(repr=False)
    found: tuple[Found, ...] = field(repr=False)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.simulation.step_seconds


class StagePlanner:
    """Owns the solutions of stages so far, so that no stage is solved twice."""

    def __init__(self, task: PipelineTask) -> None:
        self._task = task
        self._cuts: dict[tuple[int, ...], Cut] = {}
        self._graphs: dict[int, tuple[Graph, str]] = {}
        self._solved: dict[Hashable, Found] = {}

    def plan(self, layout: Layout) -> PipelineFound:
        """The pipeline of a layout; raises :class:`~autopar.errors.BudgetError` where no stage plan keeps the budget."""
        made = self.cut(layout.cuts)
        budgets = [float("inf")] * len(made.stages)
        for _ in range(SQUEEZES):
            found = self._stages(layout, made, budgets)
            result = self._simulated(layout, made, found)
            over = [peak - self._task.budget_bytes for peak in result.simulation.peak_bytes]
            if max(over) <= 0:
                return result
            for stage, excess in enumerate(over):
                if excess > 0:
                    budgets[stage] = found[stage].prediction.memory.total_bytes - 1.02 * excess
        raise self._over_budget(result)

    def _stages(self, layout: Layout, made: Cut, budgets: Sequence[float]) -> list[Found]:
        return [
            self._stage(program, devices, budget)
            for program, devices, budget in zip(made.stages, layout.devices, budgets, strict=True)
        ]

    def cut(self, cuts: tuple[int, ...]) -> Cut:
        """The step cut before these forward operators."""
        if cuts not in self._cuts:
            self._cuts[cuts] = cut(self._task.loop, self._task.state_pairs, cuts)
        return self._cuts[cuts]

    def _graph(self, program: StageProgram) -> tuple[Graph, str]:
        if id(program) not in self._graphs:
            platform = self._task.cluster.device.platform.value
            self._graphs[id(program)] = build_graph(program.jaxpr, platform=platform), structure(program.jaxpr)
        return self._graphs[id(program)]

    def _stage(self, program: StageProgram, devices: tuple[int, ...], budget_bytes: float) -> Found:
        task = self._task
        graph, text = self._graph(program)
        cluster = subcluster(task.cluster, devices)
        key = (text, program.state_pairs, cluster, budget_bytes)
        if key in self._solved:
            return self._solved[key]
        leaves = {
            value: end.position for value, end in zip(graph.inputs, program.inputs, strict=True) if end.position >= 0
        }
        donated = frozenset(source for source, _ in program.state_pairs) if task.donates_state else frozenset()
        meshes = tuple(cluster.logical_mesh_shapes(task.max_axes))
        self._solved[key] = search(
            Task(
                graph=graph,
                state_pairs=program.state_pairs,
                donated=donated,
                cluster=cluster,
                meshes=meshes,
                budget_bytes=budget_bytes,
                restriction=lambda mesh: task.restriction(graph, leaves, mesh),
                batch=tuple(
                    number for number, end in enumerate(program.inputs) if end.position in set(task.loop.batch)
                ),
                examples_dim=1,
                solver_seconds=task.solver_seconds,
                names={value: task.names[position] for value, position in leaves.items()},
                report_progress=task.report_progress,
            )
        )
        return self._solved[key]

    def _simulated(self, layout: Layout, made: Cut, found: Sequence[Found]) -> PipelineFound:
        task = self._task
        lowered: list[StageLowering] = []
        costs: list[StageCost] = []
        for program, one, devices in zip(made.stages, found, layout.devices, strict=True):
            graph, _ = self._graph(program)
            stage = replace(one.stage, devices=devices)
            lowered.append(lower_stage(program, graph, stage, donates_state=task.donates_state))
            costs.append(stage_cost(lowered[-1], one.problem.fusion, subcluster(task.cluster, devices)))
        order = make_order(layout.schedule, len(lowered), task.loop.count)
        pipeline = pipeline_of(lowered, made.crossings, order)
        transfers = transfers_of(pipeline, task.cluster)
        simulation = simulate_pipeline(pipeline, costs, transfers, task.cluster)
        return PipelineFound(layout, made, pipeline, tuple(costs), transfers, simulation, tuple(found))

    def _over_budget(self, result: PipelineFound) -> BudgetError:
        peaks = result.simulation.peak_bytes
        stage = max(range(len(peaks)), key=peaks.__getitem__)
        largest = result.found[stage].prediction.memory.largest
        tenants = "; ".join(f"{name}: {bytes_text(size)}" for name, size in largest[:3])
        return BudgetError(
            f"stage {stage + 1} of {len(result.found)} needs {bytes_text(int(result.simulation.peak_bytes[stage]))} per "
            f"device under schedule {result.layout.schedule.value!r}, the budget is "
            f"{bytes_text(self._task.budget_bytes)}. Its largest tenants are {tenants}. Use more stages or devices, more "
            "microbatches, another schedule, or raise memory_per_device=."
        )


def subcluster(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """The devices of one stage as a cluster of their own: a slice of a host, or whole hosts."""
    hosts = {device // cluster.devices_per_host for device in devices}
    if len(devices) == cluster.num_devices:
        return cluster
    per_host = len(devices) // len(hosts)
    profile = cluster.profile if per_host == cluster.devices_per_host else None
    return cluster.replace(hosts=len(hosts), devices_per_host=per_host, profile=profile)


def whole_on(task: PipelineTask, size: int, *, budget_bytes: float) -> tuple[Found, Cluster]:
    """The whole looped step laid out on the first ``size`` devices, and these as a cluster.

    Raises :class:`~autopar.errors.BudgetError` where no plan keeps the budget.
    """
    cluster = subcluster(task.cluster, range(size))
    graph = task.loop.graph
    leaves = {value: position for position, value in enumerate(graph.inputs)}
    found = search(
        Task(
            graph=graph,
            state_pairs=task.state_pairs,
            donated=frozenset(source for source, _ in task.state_pairs) if task.donates_state else frozenset(),
            cluster=cluster,
            meshes=tuple(cluster.logical_mesh_shapes(task.max_axes)),
            budget_bytes=budget_bytes,
            restriction=lambda mesh: task.restriction(graph, leaves, mesh),
            solver_seconds=task.solver_seconds,
            names={value: task.names[position] for value, position in leaves.items()},
            report_progress=task.report_progress,
        )
    )
    return found, cluster


def even_devices(cluster: Cluster, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """The devices of a cluster in as many runs of one length."""
    each = cluster.num_devices // num_stages
    return tuple(tuple(range(stage * each, (stage + 1) * each)) for stage in range(num_stages))
