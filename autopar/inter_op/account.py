"""What does a planned pipeline cost, part by part?  The same figures as the planner's own, also of a plan from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autopar.cluster import Cluster
from autopar.cost_model.hosted import beside_others
from autopar.cost_model.pipeline import StageCost, simulate_pipeline, stage_cost
from autopar.cost_model.simulate import Simulation
from autopar.graph.fusion import fuse
from autopar.graph.ir import Operator
from autopar.inter_op.assemble import Assembled
from autopar.inter_op.looped import Looped
from autopar.inter_op.placing import forward_operators
from autopar.inter_op.shares import forward_of_share, loops_of_shares


@dataclass(frozen=True)
class PipelineAccount:
    """A pipeline with the price of every stage and one simulated step.

    ``forward`` are, for each stage, the operators of one microbatch's forward pass between its cuts, of shares all.
    """

    whole: Assembled
    costs: tuple[StageCost, ...] = field(repr=False)
    simulation: Simulation = field(repr=False)
    forward: tuple[tuple[Operator, ...], ...] = field(repr=False)


def account_of(whole: Assembled, loop: Looped, cuts: Sequence[int], cluster: Cluster) -> PipelineAccount:
    """Price and simulate an assembled pipeline, of which ``cuts`` are those of its plan."""
    pipeline = whole.pipeline
    costs = tuple(
        stage_cost(lowering, fuse(lowering.graph), beside_others(cluster, lowering.stage.devices))
        for lowering in pipeline.stages
    )
    if loop.shares:
        forward = tuple(forward_of_share(share) for share in loops_of_shares(loop))
    else:
        operators = forward_operators(loop)
        forward = tuple(operators[start:end] for start, end in pairwise((0, *cuts, len(operators))))
    return PipelineAccount(whole, costs, simulate_pipeline(pipeline, costs, whole.transfers, cluster), forward)
