"""An independent referee of the whole planner: the quickest plan of a small step by trying all of them.

Nothing of any search is imported but the integer program's, of one mesh or stage.  With the layers 1 … L of a case, of which each
computes again none, dots or full of what its backward pass reads (3^L forms of the step; a loop over layers has one choice, and
is cut into 2 … L pieces), every form is tried for every number of microbatches N of the case as

    one mesh       on all devices (or on those that :func:`tests.pipeline_enumerator.device_runs` takes for one stage), in all
                   logical shapes, with the state that only the update reads on the devices or on the hosts
    a pipeline     groupings × devices × mesh shapes × schedules of :mod:`tests.pipeline_enumerator`, and of these that exceed
                   the budget with every subset of the large residuals of the stages of meshes that exceed it on the hosts

The layouts on one mesh are those of the integer program within the budget; those of stages the fastest ones, and, where a
stage has several devices, also those of several prices of memory.  All that is left out is what is dominated: copies to the
hosts make tasks longer and nothing shorter, so they are not tried for pipelines that are too slow without, nor on meshes that
keep the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.cluster import Cluster, Link, Mesh, Platform
from autopar.cost_model.hosted import beside_others
from autopar.cost_model.pipeline import StageCost, simulate_pipeline, stage_cost, transfers_of
from autopar.cost_model.simulate import Simulation
from autopar.errors import BudgetError
from autopar.graph.build import build_graph_by
from autopar.graph.fingerprint import structure
from autopar.graph.idle_state import idle_until_update
from autopar.graph.ir import Graph
from autopar.graph.roles import Role, infer_roles
from autopar.graph.rules import Rulebook
from autopar.graph.tracing import trace
from autopar.inter_op.cut import cut
from autopar.inter_op.looped import Looped, looped
from autopar.inter_op.terms import Terms
from autopar.intra_op.on_mesh import Ground
from autopar.intra_op.priced import PricedStage, Prices
from autopar.intra_op.restrict import Restriction
from autopar.intra_op.search import search_below
from autopar.intra_op.task import Found, Task
from autopar.plan import LayerRemat, Opening, Remat
from autopar.schedule.orders import Order, make_order
from autopar.schedule.pipeline import StageLowering, lower_stage, pipeline_of
from autopar.schedule.residuals import large_residuals
from autopar.schedule.stage_program import Cut, StageProgram
from autopar.subjects import Subjected, as_loop, microbatched, rematerialised, subject_of
from benchmarks.models import Model
from tests.pipeline_enumerator import (
    SPLIT,
    Candidate,
    Case,
    blocks,
    candidates,
    cluster_of,
    device_runs,
    part_of,
    scanned_blocks,
    with_faster,
)

Hosted = tuple[tuple[int, ...], ...]
"""For each stage the values on the hosts; of one mesh the positions of its inputs there."""
NOTHING: Hosted = ()

PRICES = tuple(2.0**k for k in range(-8, 5))
"""Stages of several devices are laid out at these prices of memory, too, in a stage's seconds for the whole budget."""


@dataclass(frozen=True)
class Whole:
    """A plan on one mesh."""

    num_microbatches: int
    devices: tuple[int, ...]
    mesh: Mesh


@dataclass(frozen=True)
class Referred:
    """The quickest plan within the budget, out of ``tried``.

    ``free_seconds`` are those of the quickest in which nothing is computed again and nothing lies on the hosts.
    """

    step_seconds: float
    plan: Candidate | Whole
    remat: LayerRemat
    hosted: Hosted
    tried: int
    free_seconds: float

    def __str__(self) -> str:
        return f"{self.plan}, remat {self.remat}, on hosts {self.hosted or 'nothing'}: {self.step_seconds} s of {self.tried}"


@dataclass(frozen=True)
class _Laid:
    """A pipeline, cut, with the number of the layouts of each stage."""

    candidate: Candidate
    programs: Cut
    layouts: tuple[int, ...]

    @property
    def order(self) -> Order:
        """The tasks of each mesh."""
        candidate = self.candidate
        meshes = len(set(candidate.devices))
        return make_order(candidate.schedule, len(candidate.devices), candidate.num_microbatches, meshes)


def best_plan(case: Case) -> Referred:
    """Try all plans of a case; raises ValueError where none keeps the budget."""
    return _PlanReferee(case).best()


class _PlanReferee:
    """Owns the best plan so far, and the stages that were solved and lowered."""

    def __init__(self, case: Case) -> None:
        self._case, self._cluster = case, case.cluster
        self._platform = case.cluster.device.platform.value
        model = case.model()
        program = trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {})
        self._subject = subject_of(program, infer_roles(program), self._platform)
        starts = case.boundaries(_loop_of(as_loop(self._subject, Terms(1), self._platform)))
        self._layers = LayerRemat((0, *starts), (Remat.NONE,) * (len(starts) + 1))
        self._stages: dict[tuple[Any, ...], tuple[Graph, list[PricedStage]]] = {}
        self._lowered: dict[tuple[Any, ...], tuple[StageLowering, StageCost]] = {}
        self._rulebook = Rulebook(self._platform)
        self._texts: dict[int, tuple[StageProgram, str]] = {}
        self._best: tuple[float, Candidate | Whole, LayerRemat, Hosted] | None = None
        self._free_seconds = float("inf")
        self._tried = 0

    def best(self) -> Referred:
        for kinds in itertools.product(Remat, repeat=len(self._layers.kinds)):
            chosen = self._layers.with_kinds(kinds)
            form = rematerialised(self._subject, chosen, self._platform)
            for count in self._case.microbatches:
                self._try_pipelines(form, chosen, count)
                self._try_one_mesh(form, chosen, count)
        if self._best is None:
            raise ValueError(f"none of {self._tried} plans of {self._case.name} keeps the budget")
        return Referred(*self._best, self._tried, self._free_seconds)

    def _keep(self, seconds: float, plan: Candidate | Whole, chosen: LayerRemat, hosted: Hosted) -> None:
        if not chosen.is_any and not any(hosted):
            self._free_seconds = min(self._free_seconds, seconds)
        if seconds < self._enough:
            self._best = seconds, plan, chosen, hosted

    @property
    def _enough(self) -> float:
        return float("inf") if self._best is None else self._best[0]

    # ------------------------------------------------------------------------------------------------------ one mesh

    def _try_one_mesh(self, form: Subjected, chosen: LayerRemat, count: int) -> None:
        one = microbatched(form, Terms(count), self._platform)
        idle = idle_until_update(one.graph, one.roles.state_pairs) if self._cluster.host_memory_link else ()
        everywhere = tuple(range(self._cluster.num_devices))
        runs = dict.fromkeys((everywhere, *(run for (run,) in device_runs(self._cluster, 1))))
        ground = Ground(one.graph, one.roles.state_pairs)
        for run, hosted in itertools.product(runs, dict.fromkeys(((), idle))):
            part = self._cluster.part(run)
            for mesh in part.logical_mesh_shapes():
                self._tried += 1
                try:
                    found = search_below(self._task_of(one, part, mesh, hosted), ground, self._enough)
                except BudgetError:
                    continue
                if isinstance(found, Found):
                    seconds, there = found.prediction.step_seconds, (hosted,) if hosted else ()
                    self._keep(seconds, Whole(count, run, mesh), chosen, there)

    def _task_of(self, one: Subjected, part: Cluster, mesh: Mesh, hosted: tuple[int, ...]) -> Task:
        return Task(
            graph=one.graph,
            state_pairs=one.roles.state_pairs,
            donated=one.donated,
            cluster=part,
            meshes=(mesh,),
            budget_bytes=self._case.budget_bytes,
            restriction=lambda mesh: Restriction(),
            hosted=hosted,
        )

    # ----------------------------------------------------------------------------------------------------- pipelines

    def _try_pipelines(self, form: Subjected, chosen: LayerRemat, count: int) -> None:
        pieces = range(2, len(self._case.layers) + 1) if self._case.is_scanned else (1,)
        for number in pieces:
            one = as_loop(form, Terms(count), self._platform, opening=Opening(number))
            self._try_cuts(_loop_of(one), one.roles.state_pairs, chosen, count)

    def _try_cuts(self, loop: Looped, pairs: tuple[tuple[int, int], ...], chosen: LayerRemat, count: int) -> None:
        cuts: dict[tuple[int, ...], Cut] = {}
        boundaries = self._case.boundaries(loop)
        case = replace(self._case, layers=tuple(range(len(boundaries) + 1)))
        for candidate in candidates(case, count, boundaries):
            if len(candidate.devices) == 1:
                continue  # see _try_one_mesh
            if candidate.cuts not in cuts:
                cuts[candidate.cuts] = cut(loop, pairs, candidate.cuts)
            programs = cuts[candidate.cuts]
            options = [
                range(len(self._solved(program, part_of(self._cluster, run), mesh)[1]))
                for program, run, mesh in zip(programs.stages, candidate.devices, candidate.meshes, strict=True)
            ]
            for layouts in itertools.product(*options):
                self._try_pipeline(_Laid(candidate, programs, layouts), chosen)

    def _try_pipeline(self, laid: _Laid, chosen: LayerRemat) -> None:
        self._tried += 1
        stages = self._stages_of(laid, NOTHING)
        simulation = self._simulated(laid, stages)
        over = self._meshes_over(laid.candidate, simulation)
        if not over:
            self._keep(simulation.step_seconds, laid.candidate, chosen, NOTHING)
            return
        for hosted in self._hostings(laid, stages, over):
            if simulation.step_seconds >= self._enough:
                return
            self._tried += 1
            there = self._simulated(laid, self._stages_of(laid, hosted))
            if not self._meshes_over(laid.candidate, there):
                self._keep(there.step_seconds, laid.candidate, chosen, hosted)

    def _hostings(
        self, laid: _Laid, stages: list[tuple[StageLowering, StageCost]], over: set[tuple[int, ...]]
    ) -> Iterator[Hosted]:
        """All subsets of the large residuals on the meshes that exceed the budget, but none at all."""
        if self._cluster.host_memory_link is None:
            return
        subsets = []
        for run, (lowering, _) in zip(laid.candidate.devices, stages, strict=True):
            values = [one.value for one in large_residuals(lowering.slices)]
            subsets.append(list(_subsets(sorted(values))) if run in over else [()])
        for hosted in itertools.product(*subsets):
            if any(hosted):
                yield hosted

    def _meshes_over(self, candidate: Candidate, simulation: Simulation) -> set[tuple[int, ...]]:
        meshes = dict.fromkeys(candidate.devices)
        return {run for run, peak in zip(meshes, simulation.peak_bytes, strict=True) if peak > self._case.budget_bytes}

    def _simulated(self, laid: _Laid, stages: list[tuple[StageLowering, StageCost]]) -> Simulation:
        pipeline = pipeline_of([lowering for lowering, _ in stages], laid.programs.crossings, laid.order)
        transfers = transfers_of(pipeline, self._cluster)
        return simulate_pipeline(pipeline, [cost for _, cost in stages], transfers, self._cluster)

    def _stages_of(self, laid: _Laid, hosted: Hosted) -> list[tuple[StageLowering, StageCost]]:
        candidate, found = laid.candidate, []
        splits_backward = candidate.schedule in SPLIT
        for number, program in enumerate(laid.programs.stages):
            run, mesh = candidate.devices[number], candidate.meshes[number]
            graph, answers = self._solved(program, part_of(self._cluster, run), mesh)
            answer, there = answers[laid.layouts[number]], hosted[number] if hosted else ()
            stage = replace(answer.stage, devices=run, hosted=there)
            key = (self._text(program), program.state_pairs, run, id(answer), there, splits_backward)
            if key not in self._lowered:
                lowering = lower_stage(program, graph, stage, splits_backward=splits_backward)
                cost = stage_cost(lowering, answer.problem.fusion, beside_others(self._cluster, run))
                self._lowered[key] = lowering, cost
            lowering, cost = self._lowered[key]
            lowering = replace(lowering, program=program, graph=graph, stage=stage)
            found.append((lowering, replace(cost, lowering=lowering)))
        return found

    def _solved(self, program: StageProgram, part: Cluster, mesh: Mesh) -> tuple[Graph, list[PricedStage]]:
        """The graph of a stage, and its layouts: the fastest, and those at prices of memory, that differ.

        Stages of the same structure have one answer, in which values have the same numbers.
        """
        key = self._text(program), program.state_pairs, part, mesh
        if key not in self._stages:
            graph = build_graph_by(self._rulebook, program.jaxpr)
            budget_bytes = self._case.budget_bytes
            prices = Prices(_stage_task(program, graph, part, mesh))
            fastest = prices.cheapest(0.0)
            answers = {fastest.options: fastest}
            for price in PRICES if part.num_devices > 1 and budget_bytes < float("inf") else ():
                found = prices.cheapest(price * fastest.seconds / budget_bytes)
                answers.setdefault(found.options, found)
            self._stages[key] = graph, list(answers.values())
        return self._stages[key]

    def _text(self, program: StageProgram) -> str:
        if id(program) not in self._texts:
            self._texts[id(program)] = program, structure(program.jaxpr)
        return self._texts[id(program)][1]


def _loop_of(one: Subjected) -> Looped:
    return looped(one.graph, one.roles.leaves(Role.BATCH), one.num_microbatches)


def _stage_task(program: StageProgram, graph: Graph, part: Cluster, mesh: Mesh) -> Task:
    return Task(
        graph=graph,
        state_pairs=program.state_pairs,
        donated=frozenset(source for source, _ in program.state_pairs),
        cluster=part,
        meshes=(mesh,),
        budget_bytes=float("inf"),
        restriction=lambda mesh: Restriction(),
    )


def _subsets(values: list[int]) -> Iterator[tuple[int, ...]]:
    for number in range(len(values) + 1):
        yield from itertools.combinations(values, number)


# --- cases ------------------------------------------------------------------------------------------------------------


def gpus(
    hosts: int, devices_per_host: int, *, network: float, local: float = 1e9, to_host: float | None = None
) -> Cluster:
    """Devices of 10⁷ FLOP/s as in :func:`tests.pipeline_enumerator.cluster_of`, whose hosts have a memory of their own.

    ``to_host`` are the bytes per second between a device and the memory of its host, if that is known.
    """
    plain = cluster_of(hosts, devices_per_host, network=network, local=local)
    device = replace(plain.device, platform=Platform.CUDA)
    link = None if to_host is None else Link(1e-6, to_host)
    return replace(plain, device=device, host_memory_link=link)


def near(cluster: Cluster, pairs: tuple[tuple[int, int], ...], bytes_per_second: float) -> Cluster:
    """The cluster with another link between these pairs of hosts."""
    link = Link(1e-5, bytes_per_second, cluster.devices_per_host)
    return replace(cluster, host_links=dict.fromkeys(pairs, link))


FAST, SLOW = 1e9, 1e6
"""Bytes per second to the memory of a host."""


def _case(
    name: str, inner: tuple[int, ...], cluster: Cluster, budget_bytes: float, counts: tuple[int, ...] = (4,)
) -> Case:
    layers = tuple(range(0, 2 * len(inner), 2))
    return Case(name, lambda: blocks(inner, 32, 4, 32), layers, cluster, counts, budget_bytes)


def plan_cases() -> tuple[Case, ...]:
    """Blocks on two to four devices, with memory that is ample, and that is not."""
    two, three, four = (128, 128), (128, 64, 128), (64, 64, 64, 64)
    pair, hosts = gpus(2, 1, network=1e5), gpus(2, 1, network=1e5, to_host=FAST)
    line = gpus(1, 3, network=1e5, local=1e5)
    return (
        _case("ample", two, hosts, float("inf")),
        _case("computed again", two, pair, 225_000),
        _case("computed again a little", two, pair, 235_000, (1, 2, 4)),
        _case("on hosts", two, hosts, 240_000),
        _case("on hosts under another schedule", two, hosts, 210_000),
        _case("on hosts, any number", two, hosts, 225_000, (1, 2, 4)),
        _case("unlike, hosts far", (192, 64), replace(hosts, host_memory_link=Link(1e-6, SLOW)), 300_000),
        _case("on one CPU each", two, cluster_of(2, 1, network=1e5), 210_000),
        _case("two kinds", two, with_faster(pair, (1,)), 210_000),
        _case("two kinds, the fast one first", (192, 64), with_faster(pair, (0,)), 250_000),
        _case("two kinds, state on a host", two, with_faster(hosts, (1,)), 300_000),
        _case("two kinds, both", two, with_faster(hosts, (1,)), 210_000),
        _case("state on hosts", two, gpus(1, 2, network=1e5, to_host=FAST), 225_000),
        _case("state on a host", two, gpus(1, 1, network=1e5, to_host=FAST), 400_000, (1, 2, 4)),
        _case("state on no host", two, gpus(1, 1, network=1e5, to_host=SLOW), 400_000, (1, 2, 4)),
        _case("three hosts", (128,) * 3, gpus(3, 1, network=1e5), 260_000),
        _case("three devices, on hosts", three, replace(line, host_memory_link=Link(1e-6, FAST)), 260_000),
        _case("a near pair", two, near(gpus(3, 1, network=5e4), ((0, 2),), 3e6), 260_000),
        _case("a pair that is near", three, near(gpus(3, 1, network=5e4), ((0, 2),), 3e5), 270_000),
        _case("two hosts of two", two, gpus(2, 2, network=1e5, local=1e7), 150_000),
        _case("dealt round", four, gpus(2, 1, network=3e5), 220_000),
        _case("three devices", three, line, 205_000),
        _scanned("a loop", 2, pair, float("inf")),
        _scanned("a loop, computed again", 2, pair, 280_000),
        _scanned("a loop, on hosts", 2, hosts, 280_000),
        _scanned("a loop of four", 4, gpus(2, 1, network=3e5), 450_000),
        _scanned("a loop on two hosts of two", 2, gpus(2, 2, network=1e5, local=1e7), float("inf")),
    )


def _scanned(name: str, layers: int, cluster: Cluster, budget_bytes: float) -> Case:
    def model() -> Model:
        return scanned_blocks(layers, 128, 32, 4, 32)

    return Case(name, model, tuple(range(layers)), cluster, (4,), budget_bytes, is_scanned=True)
