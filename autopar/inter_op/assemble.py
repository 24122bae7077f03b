"""From the plans of its stages to the pipeline as it runs: nothing is decided here, so a saved plan gives the same again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cluster import Cluster
from autopar.cost_model.pipeline import transfers_of
from autopar.errors import PlanError
from autopar.graph.build import build_graph_by
from autopar.graph.ir import Graph
from autopar.graph.rules import Rulebook
from autopar.inter_op.cut import cut
from autopar.inter_op.looped import Looped
from autopar.inter_op.placing import forward_operators
from autopar.plan import Layout, Plan, Schedule
from autopar.schedule.cross_mesh import CrossMeshTransfer
from autopar.schedule.orders import Order, from_entries, make_order
from autopar.schedule.pipeline import Pipeline, StageLowering, lower_stage, pipeline_of, verified
from autopar.schedule.spmd import output_layouts
from autopar.schedule.stage_program import Cut


@dataclass(frozen=True)
class Assembled:
    """A pipeline with its transfers between meshes, by the number of the crossing."""

    pipeline: Pipeline
    transfers: Mapping[int, CrossMeshTransfer] = field(repr=False)


def assemble(made: Cut, lowered: Sequence[StageLowering], order: Order, cluster: Cluster) -> Assembled:
    """The pipeline of a cut step from its lowered stages, which are split if the order has tasks for weights."""
    pipeline = verified(pipeline_of(lowered, made.crossings, order))
    return Assembled(pipeline, transfers_of(pipeline, cluster))


def assemble_plan(
    plan: Plan, loop: Looped, state_pairs: Sequence[tuple[int, int]], cluster: Cluster, *, donates_state: bool = True
) -> Assembled:
    """The pipeline of a plan of several stages, which may come from a file.

    Raises :class:`~autopar.errors.PlanError` where the plan's cuts are none of this step, or its order cannot be carried out.
    """
    count = len(forward_operators(loop)) if plan.cuts else 0
    if not all(0 < position < count for position in plan.cuts):
        raise PlanError(
            f"the plan cuts the forward pass before the operators {plan.cuts}, and it has {count}; plan again for this step"
        )
    order = _order_of(plan)
    made = cut(loop, state_pairs, plan.cuts)
    rulebook = Rulebook(cluster.device.platform.value)  # layers are alike, whichever stage they are in
    graphs = [build_graph_by(rulebook, program.jaxpr) for program in made.stages]
    lowered = [
        lower_stage(program, graph, stage, donates_state=donates_state, splits_backward=order.splits_backward)
        for program, graph, stage in zip(made.stages, graphs, plan.stages, strict=True)
    ]
    return assemble(made, lowered, order, cluster)


def _order_of(plan: Plan) -> Order:
    if plan.schedule is Schedule.OWN:
        return from_entries(plan.order, len(plan.stages), plan.trips)
    return make_order(plan.schedule, len(plan.stages), plan.trips, plan.num_meshes)


def layouts_of_leaves(stages: Sequence[StageLowering], step: Graph) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Layouts of a step's inputs and outputs, of each on the first stage that has it; what no stage reads is whole."""
    inputs: dict[int, Layout] = {}
    outputs: dict[int, Layout] = {}
    for lowering in stages:
        graph, stage, program = lowering.graph, lowering.stage, lowering.program
        for value, end in zip(graph.inputs, program.inputs, strict=True):
            if end.crossing is None:
                inputs.setdefault(end.position, stage.home(value, len(graph.values[value].shape)))
        left = output_layouts(graph, stage, program.state_pairs)
        for layout, end in zip(left, program.outputs, strict=True):
            if end.crossing is None:
                outputs.setdefault(end.position, layout)
    ranks = [len(step.values[value].shape) for value in step.inputs]
    return (
        tuple(inputs.get(position, Layout(((),) * rank)) for position, rank in enumerate(ranks)),
        tuple(outputs[position] for position in sorted(outputs)),
    )


def stages_of_leaves(stages: Sequence[StageLowering]) -> dict[int, int]:
    """The stage on which each input of the step lies, by position; of one that several read, the first."""
    found: dict[int, int] = {}
    for number, lowering in enumerate(stages):
        for end in lowering.program.inputs:
            if end.crossing is None:
                found.setdefault(end.position, number)
    return found
