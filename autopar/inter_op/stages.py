"""The plan of a pipeline whose stages, meshes and schedule are given: one integer program per stage, then the simulator.

Every stage is laid out on its own devices by the intra-operator planner, for the least seconds of its looped program: N
forward and backward passes and one update.  Stages of the same structure on like devices share one solution.

What a device holds is known only when the schedule is: a stage with k microbatches in flight keeps k sets of residuals.  So a
stage is laid out without regard to memory first; where the simulated peak exceeds the budget, memory gets a price on that
stage (:mod:`autopar.intra_op.priced`), which rises until the peak keeps the budget, and is lowered again in between.  Where
residuals may lie in the memory of the hosts, the other way to keep it is to have as many there as memory needs
(:mod:`autopar.inter_op.hosting`); the faster is taken.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

from autopar.cost_model.forecast import Rehearsal, forecast, lean_count, rehearsed_counts
from autopar.cost_model.hosted import beside_others
from autopar.cost_model.pipeline import StageCost, host_bytes, row_bytes, simulate_pipeline, stage_cost, transfers_of
from autopar.errors import BudgetError, PlanError
from autopar.graph.build import build_graph_by
from autopar.graph.fingerprint import structure
from autopar.graph.ir import Graph
from autopar.graph.rules import Rulebook
from autopar.inter_op.agreed_meshes import agreeing, on_common_meshes, priced_seconds
from autopar.inter_op.arranged import Arrangement, PipelineFound, PipelineTask
from autopar.inter_op.cut import cut
from autopar.inter_op.hosting import TIMES, HostedByStage, Hosting, are_too_few, by_stage, candidates, cheapest_for
from autopar.inter_op.looped import constants_of
from autopar.inter_op.near_meshes import bytes_between_meshes, near_meshes
from autopar.intra_op.priced import PricedStage, Prices
from autopar.intra_op.task import Task
from autopar.plan import Schedule
from autopar.schedule.orders import OrderFunction, make_order, schedule_name
from autopar.schedule.pipeline import lower_stage, pipeline_of
from autopar.schedule.stage_program import Cut, StageProgram
from autopar.wording import bytes_text

FIRST_PRICE_SHARE = 1 / 64
"""The first price of the whole budget, as a share of a stage's seconds."""

PRICE_STEP = 8.0
FAR_OVER = 1.25
"""Stages that hold so many budgets do not come to one at the first price, which is tried first for others only."""

RISES = 4
"""Beyond a price of a few steps' seconds for the budget, memory is all that counts."""

FEASIBLE_RISE, FEASIBLE_OVER = 1, 1.2
"""Where stages of a large step hold more than so many budgets after so many rises, the last price is asked whether any have
room."""

HALVINGS = 1
"""How often the prices are lowered again, half-way in their logarithms to the last that were too low."""


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
        self._simulations: dict[Hashable, PipelineFound] = {}

    def bound_seconds(self, arrangement: Arrangement) -> float:
        """Seconds of a step of which nothing but computing and the collectives of stages takes time, without a budget.

        With S_s the seconds of all N microbatches and the update on stage s, or on v stages of one mesh:
        max S + Σ of the others' S / (vN).
        """
        found = self._chosen(arrangement, self.cut(arrangement.cuts), [0.0] * len(arrangement.devices))
        seconds = [sum(found[stage].seconds for stage in stages) for stages in arrangement.sharing]
        chunks = max(map(len, arrangement.sharing))
        return max(seconds) + (sum(seconds) - max(seconds)) / (chunks * self._task.loop.count)

    @property
    def is_large(self) -> bool:
        """Whether every integer program counts."""
        return self._task.is_large

    def fastest_first(
        self, arrangement: Arrangement, schedules: Sequence[Schedule | OrderFunction]
    ) -> list[Schedule | OrderFunction]:
        """The schedules by the seconds of a step under each, without a budget; GPipe, which keeps everything, last."""
        lean = [schedule for schedule in schedules if schedule is not Schedule.GPIPE]
        if len(lean) > 1:
            lean.sort(key=lambda one: self.free_seconds(replace(arrangement, schedule=one)))
        return [*lean, *(schedule for schedule in schedules if schedule is Schedule.GPIPE)]

    def may_be_faster(self, found: PipelineFound, schedule: Schedule | OrderFunction) -> bool:
        """Whether the stages of a large program might be faster under another schedule: not if they are not without a budget."""
        if not self.is_large or schedule is Schedule.GPIPE:
            return True
        return self.free_seconds(replace(found.arrangement, schedule=schedule)) < found.step_seconds

    def free_seconds(self, arrangement: Arrangement) -> float:
        """Seconds of a step without a budget."""
        return self._at(arrangement, self.cut(arrangement.cuts), [0.0] * len(arrangement.devices)).step_seconds

    def squeezed(self, arrangement: Arrangement) -> tuple[bool, ...]:
        """For each mesh, in the order of their first stages, whether the fastest plans of its stages exceed the budget."""
        result = self._at(arrangement, self.cut(arrangement.cuts), [0.0] * len(arrangement.devices))
        over = self._over(result)
        return tuple(any(over[stage] for stage in stages) for stages in arrangement.sharing)

    def plan(self, arrangement: Arrangement, give_up_seconds: float = float("inf")) -> PipelineFound:
        """The pipeline of an arrangement; raises :class:`~autopar.errors.BudgetError` where no stage plan keeps the budget.

        One that takes ``give_up_seconds`` before it keeps the budget is returned as it is.
        """
        there = self.with_hosts(arrangement, give_up_seconds)
        if there is None:
            return self._priced(arrangement, give_up_seconds)
        try:
            here = self._priced(arrangement, min(give_up_seconds, there.step_seconds))
        except BudgetError:
            return there
        return here if here.step_seconds < there.step_seconds else there

    def with_hosts(self, arrangement: Arrangement, give_up_seconds: float = float("inf")) -> PipelineFound | None:
        """The fastest plans of the stages with what memory needs on the hosts; None where it needs nothing there, may not, or
        that is too little, or takes ``give_up_seconds``.
        """
        if self._task.hosting is not Hosting.NEEDED:
            return None
        free = self._at(arrangement, self.cut(arrangement.cuts), [0.0] * len(arrangement.devices))
        if free.step_seconds >= give_up_seconds or not any(self._over(free)):
            return None
        return self._relieved(free)

    def _relieved(self, result: PipelineFound) -> PipelineFound | None:
        """A pipeline that exceeds the budget, with residuals on the hosts so that it keeps it; None where they are too few."""
        if self._task.hosting is not Hosting.NEEDED:
            return None

        def with_these(hosted: HostedByStage) -> PipelineFound:
            return self._simulated(result.arrangement, result.cut, result.found, result.count, hosted)

        known = candidates([cost.lowering for cost in result.costs], result.order, self._task.cluster)
        stages, excess_bytes = len(result.found), self._excess_bytes(result)
        if are_too_few(known, result.homes, excess_bytes):
            return None
        everything = with_these(by_stage(known, stages))
        if any(self._over(everything)):
            return None
        for _ in range(TIMES):
            chosen = [
                one
                for mesh, excess in excess_bytes.items()
                for one in cheapest_for([one for one in known if result.homes[one.stage] == mesh], excess)
            ]
            tried = with_these(by_stage(chosen, stages))
            over = self._excess_bytes(tried)
            if not over:
                return tried
            saved_bytes = dict.fromkeys(over, 0.0)
            for one in chosen:
                if (mesh := result.homes[one.stage]) in over:
                    saved_bytes[mesh] += one.saved_bytes
            excess_bytes |= {mesh: saved_bytes[mesh] + excess for mesh, excess in over.items()}
        return everything

    def _excess_bytes(self, result: PipelineFound) -> dict[int, float]:
        """By how much meshes exceed their budgets, of those that do."""
        budgets = dict(zip(result.homes, map(self._task.budget_of, result.arrangement.devices), strict=True))
        peaks = enumerate(result.forecast.peak_bytes)
        return {mesh: peak - budgets[mesh] for mesh, peak in peaks if peak > budgets[mesh]}

    def _priced(self, arrangement: Arrangement, give_up_seconds: float) -> PipelineFound:
        """The pipeline of an arrangement by prices of memory alone (see :meth:`plan`)."""
        made = self.cut(arrangement.cuts)
        prices = [0.0] * len(made.stages)
        result = self._at(arrangement, made, prices)
        too_low = list(prices)
        for rise in range(RISES):
            if result.step_seconds >= give_up_seconds:
                return result
            over = self._over(result)
            if not any(over):
                break
            if rise == FEASIBLE_RISE and self.is_large and any(self._over(result, FEASIBLE_OVER)):
                last = [price * PRICE_STEP ** (RISES - rise) for price in prices]
                if any(self._over(leanest := self._at(arrangement, made, last))):
                    raise self._over_budget(leanest)
            for stage, is_over in enumerate(over):
                if is_over:
                    too_low[stage] = prices[stage]
                    prices[stage] = PRICE_STEP * prices[stage] or self._first_price(result, stage)
            result = self._at(arrangement, made, prices)
        else:
            if any(self._over(result)):
                raise self._over_budget(result)
        return self._relaxed(arrangement, made, result, prices, too_low)

    def _first_price(self, result: PipelineFound, stage: int) -> float:
        """Seconds per byte of a stage whose fastest plan exceeds the budget; of a large step more where it does by far."""
        budget_bytes = self._task.budget_of(result.arrangement.devices[stage])
        price = FIRST_PRICE_SHARE * result.found[stage].seconds / budget_bytes
        is_far = self.is_large and result.forecast.peak_bytes[result.homes[stage]] > FAR_OVER * budget_bytes
        return price * PRICE_STEP if is_far else price

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
            over = self._over(other)
            if any(over):  # some of the stages, for which prices stay as they are
                too_low = lower
                lower = [price if is_over else low for price, low, is_over in zip(prices, lower, over, strict=True)]
                other = self._at(arrangement, made, lower)
            if not any(self._over(other)):
                prices = lower
                if other.step_seconds < result.step_seconds:
                    result = other
        return result

    def _at(self, arrangement: Arrangement, made: Cut, prices: Sequence[float]) -> PipelineFound:
        """The pipeline at a price of memory for every stage, in seconds per byte."""
        return self._simulated(arrangement, made, self._chosen(arrangement, made, prices))

    def _chosen(self, arrangement: Arrangement, made: Cut, prices: Sequence[float]) -> list[PricedStage]:
        """The best stage of every program at its price; stages that share a mesh agree on the one that is best for all."""
        found: dict[int, PricedStage] = {}
        for stages in arrangement.sharing:
            if len(stages) == 1:
                found[stages[0]] = self._stage(made.stages[stages[0]], arrangement, stages[0]).cheapest(
                    prices[stages[0]]
                )
                continue
            owners = {stage: self._stage(made.stages[stage], arrangement, stage) for stage in stages}
            together = agreeing(owners, prices)
            if not together:
                raise PlanError(
                    f"stages {' and '.join(str(stage + 1) for stage in stages)} are to share the devices "
                    f"{arrangement.devices[stages[0]]}, and what is demanded leaves them no common mesh; ask for fewer "
                    "stages on a mesh, or leave the demand out"
                )
            best = min(together, key=priced_seconds)
            found.update(best)
        return [found[stage] for stage in range(len(made.stages))]

    def _over(self, result: PipelineFound, times: float = 1.0) -> list[bool]:
        """For each stage whether the devices of its mesh hold more than so many budgets."""
        peaks = result.forecast.peak_bytes
        budgets = map(self._task.budget_of, result.arrangement.devices)
        return [peaks[home] > times * budget for home, budget in zip(result.homes, budgets, strict=True)]

    def cut(self, cuts: tuple[int, ...]) -> Cut:
        """The step cut before these forward operators."""
        if cuts not in self._cuts:
            self._cuts[cuts] = cut(self._task.loop, self._task.state_pairs, cuts)
        return self._cuts[cuts]

    def _graph(self, program: StageProgram) -> tuple[Graph, str]:
        if id(program) not in self._graphs:
            self._graphs[id(program)] = build_graph_by(self._rulebook, program.jaxpr), structure(program.jaxpr)
        return self._graphs[id(program)]

    def _stage(self, program: StageProgram, arrangement: Arrangement, stage: int) -> Prices:
        task, devices = self._task, arrangement.devices[stage]
        graph, text = self._graph(program)
        cluster = task.cluster.part(devices)
        asked = task.demands(program, graph, cluster)
        meshes = task.meshes_of(asked.meshes)
        restrictions = {mesh: asked.restriction(mesh) for mesh in meshes}
        said = tuple((mesh, restriction.key) for mesh, restriction in restrictions.items())
        # Axes are called after what they cut; stages that share a mesh would call them differently.
        may_rename = asked.may_rename_axes and arrangement.devices.count(devices) == 1
        key = (text, program.state_pairs, cluster, said, asked.separate, may_rename)
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
                meshes=meshes,
                budget_bytes=task.budget_of(devices),
                restriction=restrictions.__getitem__,
                batch=batch if may_rename else (),
                examples_dim=1,
                solver_seconds=task.solver_seconds,
                names={value: task.names[position] for value, position in leaves.items()},
                report_progress=task.report_progress,
                worth_share=task.worth_share,
                separate=asked.separate,
                made_again=constants_of(graph.operators[program.loop]),
            )
        )
        return self._prices[key]

    def refined(self, found: PipelineFound) -> PipelineFound:
        """The pipeline with other meshes of single stages, where these make the whole step faster.

        A mesh is chosen for the seconds of its own stages; what crosses to others may be quicker on another.
        """
        arrangement, made = found.arrangement, found.cut
        for stages in arrangement.sharing:
            others = {
                stage: self._stage(made.stages[stage], arrangement, stage).others_of(found.found[stage])
                for stage in stages
            }
            for together in on_common_meshes(others):
                tried = self._simulated(
                    arrangement, made, [together.get(number, one) for number, one in enumerate(found.found)]
                )
                if tried.step_seconds < found.step_seconds:
                    kept = self._relieved(tried) if any(self._over(tried)) else tried
                    if kept is not None and kept.step_seconds < found.step_seconds:
                        found = kept
        return found

    def under(self, found: PipelineFound, schedule: Schedule | OrderFunction) -> PipelineFound | None:
        """The same stages under another schedule; None where that exceeds the budget."""
        return self._rearranged(found, replace(found.arrangement, schedule=schedule))

    def nearer(self, found: PipelineFound) -> PipelineFound:
        """The pipeline with other meshes beside each other, where much is sent to a stage that is not the next one and the step
        is faster so.
        """
        sharing, devices = found.arrangement.sharing, found.arrangement.devices
        meshes = [devices[stages[0]] for stages in sharing]
        homes = [meshes.index(own) for own in devices]
        sent_bytes = bytes_between_meshes(found.cut.crossings, homes, found.count)
        if (near := near_meshes(meshes, sent_bytes, self._task.cluster)) is None:
            return found
        arrangement = replace(found.arrangement, devices=tuple(near[home] for home in homes))
        other = self._rearranged(found, arrangement)
        return found if other is None or other.step_seconds >= found.step_seconds else other

    def _rearranged(self, found: PipelineFound, arrangement: Arrangement) -> PipelineFound | None:
        """The same stages under another schedule, or on other devices of like hosts; None where that exceeds the budget."""
        schedule = arrangement.schedule
        few = lean_count(schedule, found.count, len(arrangement.sharing))
        if few is not None:
            lean = self._simulated(arrangement, found.cut, found.found, few)
            if any(self._over(lean)) and self._relieved(lean) is None:
                return None
        other = self._simulated(arrangement, found.cut, found.found)
        return self._relieved(other) if any(self._over(other)) else other

    def leanest_under(
        self, found: PipelineFound, schedule: Schedule | OrderFunction, give_up_seconds: float
    ) -> PipelineFound | None:
        """Stages of a small program under another schedule, made leaner where that exceeds the budget (see :meth:`under`).

        None where that is too little, or takes ``give_up_seconds``.
        """
        if (same := self.under(found, schedule)) is not None or self.is_large:
            return same
        arrangement = replace(found.arrangement, schedule=schedule)
        if self.free_seconds(arrangement) >= give_up_seconds:
            return None
        try:
            leaner = self.plan(arrangement, give_up_seconds)
        except BudgetError:
            return None
        return leaner if leaner.step_seconds < give_up_seconds else None

    def _simulated(
        self,
        arrangement: Arrangement,
        made: Cut,
        found: Sequence[PricedStage],
        few: int | None = None,
        hosted: HostedByStage = (),
    ) -> PipelineFound:
        """The pipeline of stages that are planned, as it runs; of many microbatches some are simulated.

        With ``few`` the same of only so many of the microbatches.  ``hosted`` are the residuals on the hosts, unless all are to
        lie there.
        """
        count = self._task.loop.count if few is None else few
        key = arrangement, tuple(map(id, found)), count, hosted
        if key not in self._simulations:
            self._simulations[key] = self._simulated_anew(arrangement, made, found, count, hosted)
        return self._simulations[key]

    def _simulated_anew(
        self, arrangement: Arrangement, made: Cut, found: Sequence[PricedStage], count: int, hosted: HostedByStage
    ) -> PipelineFound:
        cluster, meshes = self._task.cluster, len(arrangement.sharing)
        counts = rehearsed_counts(arrangement.schedule, count, meshes)
        orders = [make_order(arrangement.schedule, len(found), number, meshes) for number in counts]
        splits_backward = orders[0].splits_backward

        def costs_with(hosted: HostedByStage) -> tuple[StageCost, ...]:
            stages = zip(made.stages, found, arrangement.devices, hosted or ((),) * len(found), strict=True)
            return tuple(self._cost(*stage, splits_backward=splits_backward) for stage in stages)

        costs = costs_with(hosted)
        if self._task.hosting is Hosting.ALL:
            known = candidates([cost.lowering for cost in costs], orders[-1], cluster)
            costs = costs_with(by_stage(known, len(found)))
        lowered = [cost.lowering for cost in costs]
        pipelines = [pipeline_of(lowered, made.crossings, order) for order in orders]
        transfers = transfers_of(pipelines[0], cluster)  # the same however many microbatches there are
        rehearsals = [
            Rehearsal(
                number, simulate_pipeline(one, costs, transfers, cluster), row_bytes(one, costs), host_bytes(one, costs)
            )
            for number, one in zip(counts, pipelines, strict=True)
        ]
        said = forecast(rehearsals, count)
        return PipelineFound(arrangement, cluster, made, count, orders[0].homes, costs, said, tuple(found))

    def _cost(
        self,
        program: StageProgram,
        found: PricedStage,
        devices: tuple[int, ...],
        hosted: tuple[int, ...],
        *,
        splits_backward: bool,
    ) -> StageCost:
        """The lowered stage and its price; stages of one structure, outline and plan are lowered and priced once."""
        graph, text = self._graph(program)
        stage = replace(found.stage, devices=devices, hosted=hosted)
        key = (text, program.outline, id(found), hosted, splits_backward)
        if key not in self._costs:
            donates_state = self._task.donates_state
            lowering = lower_stage(program, graph, stage, donates_state=donates_state, splits_backward=splits_backward)
            self._costs[key] = stage_cost(lowering, found.problem.fusion, beside_others(self._task.cluster, devices))
        known = self._costs[key]
        return replace(known, lowering=replace(known.lowering, program=program, graph=graph, stage=stage))

    def _over_budget(self, result: PipelineFound) -> BudgetError:
        peaks = result.forecast.peak_bytes
        budgets = dict(zip(result.homes, map(self._task.budget_of, result.arrangement.devices), strict=True))
        mesh = max(range(len(peaks)), key=lambda one: peaks[one] / budgets[one])
        stages = [stage for stage, home in enumerate(result.homes) if home == mesh]
        held = {}
        for lowering, cost in ((result.costs[stage].lowering, result.costs[stage]) for stage in stages):
            for end, place in zip(lowering.program.inputs, lowering.slices.inputs, strict=True):
                if end.position >= 0:
                    held[self._task.names[end.position]] = cost.slot_bytes[lowering.names[place]]
        which = f"stage {stages[0] + 1} of {len(result.found)} needs"
        if len(stages) > 1:
            numbers = ", ".join(str(stage + 1) for stage in stages)
            which = f"stages {numbers} of {len(result.found)}, which share devices, need"
        state_bytes = sum(result.costs[stage].state_bytes for stage in stages)
        tenants = "; ".join(f"{name}: {bytes_text(held[name])}" for name in sorted(held, key=held.__getitem__)[:-4:-1])
        return BudgetError(
            f"no plan keeps {bytes_text(budgets[mesh])} per device: {which} "
            f"{bytes_text(int(peaks[mesh]))} under schedule {schedule_name(result.arrangement.schedule)!r}, of which "
            f"{bytes_text(state_bytes)} are state and batch. The largest leaves there are {tenants}. Use more stages "
            "or devices, more microbatches, another schedule, or raise memory_per_device=.",
            needed_bytes=peaks[mesh],
            stages=tuple(stage for stage, is_over in enumerate(self._over(result)) if is_over),
        )


def leaves_of(program: StageProgram, graph: Graph) -> dict[int, int]:
    """Positions in the step of the leaves that a stage reads, those it receives from another stage included, by value."""
    return {value: end.position for value, end in zip(graph.inputs, program.inputs, strict=True) if end.position >= 0}
