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
from autopar.cost_model.pipeline import StageCost, simulate_pipeline, stage_cost
from autopar.cost_model.simulate import Simulation
from autopar.errors import BudgetError
from autopar.graph.build import build_graph
from autopar.graph.fingerprint import structure
from autopar.graph.ir import Graph
from autopar.inter_op.assemble import Running, assemble
from autopar.inter_op.cut import cut
from autopar.inter_op.looped import Looped
from autopar.intra_op.restrict import Restriction
from autopar.intra_op.search import Found, Task, search
from autopar.plan import Schedule
from autopar.schedule.cross_mesh import CrossMeshTransfer
from autopar.schedule.pipeline import Pipeline
from autopar.schedule.stage_program import Cut, Passing, StageProgram
from autopar.wording import bytes_text

SQUEEZES = 4
"""How often a stage over the budget is laid out anew with less."""


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
        squeezes = 0
        while True:
            found = [
                self._stage(program, devices, budget)
                for program, devices, budget in zip(made.stages, layout.devices, budgets, strict=True)
            ]
            result = self._simulated(layout, made, found)
            over = [peak - self._task.budget_bytes for peak in result.simulation.peak_bytes]
            if max(over) <= 0:
                return result
            if squeezes == SQUEEZES:
                raise self._over_budget(max(range(len(over)), key=over.__getitem__), result)
            squeezes += 1
            for stage, excess in enumerate(over):
                if excess > 0:
                    budgets[stage] = found[stage].prediction.memory.total_bytes - 1.02 * excess

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
        asked = task.demands(program, graph, cluster)
        restrictions = {mesh: asked.restriction(mesh) for mesh in asked.meshes}
        said = tuple((mesh, restriction.key) for mesh, restriction in restrictions.items())
        key = (text, program.state_pairs, cluster, budget_bytes, said, asked.separate)
        if key in self._solved:
            return self._solved[key]
        leaves = leaves_of(program, graph)
        batch = tuple(k for k, end in enumerate(program.inputs) if end.position in set(task.loop.batch))
        self._solved[key] = search(
            Task(
                graph=graph,
                state_pairs=program.state_pairs,
                donated=frozenset(source for source, _ in program.state_pairs) if task.donates_state else frozenset(),
                cluster=cluster,
                meshes=asked.meshes,
                budget_bytes=budget_bytes,
                restriction=restrictions.__getitem__,
                batch=batch if asked.may_rename_axes else (),
                examples_dim=1,
                solver_seconds=task.solver_seconds,
                names={value: task.names[position] for value, position in leaves.items()},
                report_progress=task.report_progress,
                separate=asked.separate,
            )
        )
        return self._solved[key]

    def _simulated(self, layout: Layout, made: Cut, found: Sequence[Found]) -> PipelineFound:
        task = self._task
        stages = [replace(one.stage, devices=devices) for one, devices in zip(found, layout.devices, strict=True)]
        graphs = [self._graph(program)[0] for program in made.stages]
        running = Running(layout.schedule, task.loop.count, task.donates_state)
        whole = assemble(made, graphs, stages, running, task.cluster)
        costs = tuple(
            stage_cost(lowering, one.problem.fusion, subcluster(task.cluster, lowering.stage.devices))
            for lowering, one in zip(whole.pipeline.stages, found, strict=True)
        )
        simulation = simulate_pipeline(whole.pipeline, costs, whole.transfers, task.cluster)
        return PipelineFound(layout, made, whole.pipeline, costs, whole.transfers, simulation, tuple(found))

    def _over_budget(self, stage: int, result: PipelineFound) -> BudgetError:
        largest = result.found[stage].prediction.memory.largest
        tenants = "; ".join(f"{name}: {bytes_text(size)}" for name, size in largest[:3])
        return BudgetError(
            f"stage {stage + 1} of {len(result.found)} needs {bytes_text(int(result.simulation.peak_bytes[stage]))} per "
            f"device under schedule {result.layout.schedule.value!r}, the budget is "
            f"{bytes_text(self._task.budget_bytes)}. Its largest tenants are {tenants}. Use more stages or devices, more "
            "microbatches, another schedule, or raise memory_per_device=."
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
    profile = cluster.profile if per_host == cluster.devices_per_host else None
    return cluster.replace(hosts=len(hosts), devices_per_host=per_host, profile=profile)


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
