"""What is to be planned as a pipeline, how it is arranged, and what was found: data for those who search and those who plan.

A task is a looped step on a cluster; an arrangement says of S stages where they begin, on which devices they run, and under which
schedule; a pipeline that was found has for each stage its executables and their price, and the forecast of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cluster import Cluster, Mesh
from autopar.cost_model.forecast import Forecast
from autopar.cost_model.least import least_seconds
from autopar.cost_model.machine import make_machine
from autopar.cost_model.pipeline import StageCost, simulate_pipeline
from autopar.cost_model.simulate import Simulation
from autopar.graph.ir import Graph
from autopar.inter_op.assemble import Assembled, assemble
from autopar.inter_op.hosting import Hosting
from autopar.inter_op.looped import Looped
from autopar.intra_op.on_mesh import Ground
from autopar.intra_op.priced import PricedStage
from autopar.intra_op.restrict import Restriction
from autopar.intra_op.search import LARGE_CLASSES, LARGE_OPERATORS
from autopar.intra_op.task import WORTH_SHARE
from autopar.plan import Schedule
from autopar.schedule.cross_mesh import CrossMeshTransfer
from autopar.schedule.orders import Order, OrderFunction, make_order
from autopar.schedule.pipeline import Pipeline
from autopar.schedule.stage_program import Cut, StageProgram

LARGE_WORTH_SHARE = 0.01
"""Of large steps other meshes are left alone that could make a stage faster by this share at best."""

MAX_AXES = 2
"""Meshes of stages have so many axes at most, of large steps always, unless no others are asked for."""


@dataclass(frozen=True)
class StageDemands:
    """What is asked of the plan of one stage (see :class:`autopar.intra_op.task.Task`)."""

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
    hosting: Hosting = Hosting.NONE
    budget_by_host: tuple[float, ...] = ()
    """What one device of each host may hold, where hosts differ in that; ``budget_bytes`` is then the least."""

    def budget_of(self, devices: Sequence[int]) -> float:
        """What one of these devices may hold."""
        if not self.budget_by_host:
            return self.budget_bytes
        return min(self.budget_by_host[device // self.cluster.devices_per_host] for device in devices)

    @cached_property
    def is_large(self) -> bool:
        """Whether every integer program counts: there are many operators, or so many that are not alike."""
        if len(self.loop.graph.operators) > LARGE_OPERATORS:
            return True
        return self.ground is not None and self.ground().num_classes > LARGE_CLASSES

    @property
    def worth_share(self) -> float:
        """Where another mesh of a stage saves no more than this share of its seconds, it is left alone."""
        return LARGE_WORTH_SHARE if self.is_large else WORTH_SHARE

    def meshes_of(self, asked: Sequence[Mesh]) -> tuple[Mesh, ...]:
        """Those of the meshes that are asked for which a stage is planned on."""
        few = tuple(mesh for mesh in asked if len(mesh.axis_sizes) <= MAX_AXES)
        return few if self.is_large and few else tuple(asked)


@dataclass(frozen=True)
class Arrangement:
    """What a pipeline is made of: before which forward operators stages begin, the devices of each, and the schedule.

    Stages on the same devices share a mesh.
    """

    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    schedule: Schedule | OrderFunction

    @property
    def sharing(self) -> tuple[tuple[int, ...], ...]:
        """The stages on each mesh, by number."""
        found: dict[tuple[int, ...], list[int]] = {}
        for stage, devices in enumerate(self.devices):
            found.setdefault(devices, []).append(stage)
        return tuple(map(tuple, found.values()))


@dataclass(frozen=True)
class PipelineFound:
    """A pipeline, planned; ``found`` are the intra-operator planner's own records of each stage.

    ``count`` is the number of microbatches, ``homes`` the mesh of every stage; ``forecast`` says what a step takes.
    """

    arrangement: Arrangement
    cluster: Cluster
    cut: Cut
    count: int
    homes: tuple[int, ...]
    costs: tuple[StageCost, ...] = field(repr=False)
    forecast: Forecast
    found: tuple[PricedStage, ...] = field(repr=False)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.forecast.step_seconds

    @property
    def is_alone(self) -> bool:
        """Whether every stage has a mesh of its own."""
        return len(self.arrangement.sharing) == len(self.arrangement.devices)

    def has_stages_of(self, other: PipelineFound) -> bool:
        """Whether both are the same but for the schedule."""
        mine, theirs = self.arrangement, other.arrangement
        return (self.count, mine.cuts, mine.devices) == (other.count, theirs.cuts, theirs.devices)

    @property
    def least_seconds(self) -> float:
        """What a step takes at least, under whatever schedule."""
        meshes = [self.arrangement.devices[stages[0]] for stages in self.arrangement.sharing]
        return least_seconds(self.costs, self.homes, self.count, make_machine(self.cluster, meshes))

    @property
    def order(self) -> Order:
        """The tasks of each mesh, in its order."""
        return make_order(self.arrangement.schedule, len(self.homes), self.count, len(self.arrangement.sharing))

    @cached_property
    def whole(self) -> Assembled:
        """The pipeline as it runs."""
        return assemble(self.cut, [cost.lowering for cost in self.costs], self.order, self.cluster)

    @property
    def pipeline(self) -> Pipeline:
        """Its executables and its lists."""
        return self.whole.pipeline

    @property
    def transfers(self) -> Mapping[int, CrossMeshTransfer]:
        """How arrays get from mesh to mesh, by the number of the crossing."""
        return self.whole.transfers

    @cached_property
    def simulation(self) -> Simulation:
        """One whole step."""
        return simulate_pipeline(self.pipeline, self.costs, self.transfers, self.cluster)
