"""The steps of a stage as executables: is what they hand to each other there, and is no gathered parameter kept for long?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from autopar.cluster import Cluster
from autopar.graph.ir import Graph
from autopar.inter_op.arranged import Arrangement, StageDemands
from autopar.inter_op.looped import constants_of
from autopar.inter_op.stages import StagePlanner
from autopar.intra_op.restrict import Restriction
from autopar.methods import mesh_of
from autopar.plan import Layout, Schedule
from autopar.schedule.instructions import Part
from autopar.schedule.pipeline import lower_stage
from autopar.schedule.slices import MADE_AGAIN_BYTES, Executable, Scope, Slices
from autopar.schedule.spmd import Buffer, Reshard, Step
from autopar.schedule.stage_program import StageProgram
from tests.toy_pipelines import even_cuts, even_devices, toy_step
from tests.toy_runs import eight_slow_devices


def matrices_of(program: StageProgram, graph: Graph) -> dict[int, int | None]:
    """The large matrices that the loop of a stage reads, as values of its body, and the values outside that they are."""
    loop = graph.operators[program.loop]
    body = loop.bodies[0]
    return {
        inside: outside
        for outside, inside in zip(loop.operands, body.inputs, strict=True)
        if inside in constants_of(loop)
        and len(body.values[inside].shape) == 2
        and body.values[inside].size_bytes >= MADE_AGAIN_BYTES
    }


def resting_in_pieces(program: StageProgram, graph: Graph, cluster: Cluster) -> StageDemands:
    """Large matrices rest in pieces, and each microbatch gathers them; all else is whole on every device."""
    pieces, whole = Layout((("data",), ())), Layout(((), ()))
    matrices = matrices_of(program, graph)
    there = {value: pieces for pair in matrices.items() for value in pair if value is not None}
    reach = {"data": dict.fromkeys(there, frozenset({0}))}
    restriction = Restriction(pinned=there, pinned_copies=dict.fromkeys(matrices, whole), reach=reach)
    return StageDemands((mesh_of((cluster.num_devices,), cluster),), lambda mesh: restriction, may_rename_axes=False)


@cache
def gathering_stage(*, splits_backward: bool = False) -> tuple[Slices, frozenset[int]]:
    """The first stage of a GPT whose large matrices are gathered by each microbatch, with their values in the loop."""
    step, cluster = toy_step("gpt", 4, "bench"), eight_slow_devices()
    arrangement = Arrangement(even_cuts(step, 2), even_devices(cluster, 2), Schedule.ONE_F_ONE_B)
    found = StagePlanner(step.task(cluster, demands=resting_in_pieces)).plan(arrangement)
    planned = found.costs[0].lowering
    lowered = lower_stage(planned.program, planned.graph, planned.stage, splits_backward=splits_backward)
    matrices = frozenset(matrices_of(planned.program, planned.graph))
    assert matrices
    return lowered.slices, matrices


def written(step: Step) -> Sequence[Buffer]:
    return (step.target,) if isinstance(step, Reshard) else step.results


def read(step: Step) -> list[Buffer]:
    if isinstance(step, Reshard):
        return [step.source]
    return [buffer for buffer in step.operands if buffer is not None]


def gathers(one: Executable, large: frozenset[int]) -> list[Reshard]:
    moves = (step for step in one.steps if isinstance(step, Reshard))
    return [step for step in moves if step.target.value in large and not any(step.target.layout.dims)]


@pytest.mark.parametrize("splits_backward", [False, True])
def test_every_array_is_there_when_it_is_read(splits_backward: bool) -> None:
    slices, _ = gathering_stage(splits_backward=splits_backward)
    for one in slices.executables:
        there = {argument.buffer for argument in one.arguments}
        for step in one.steps:
            assert there.issuperset(read(step))
            assert there.isdisjoint(written(step))
            there.update(written(step))
        assert there.issuperset(result.buffer for result in one.results if result.buffer is not None)


def test_gathered_parameters_are_gathered_again_and_not_kept() -> None:
    slices, large = gathering_stage()
    forward, backward = slices.executable(Part.FORWARD), slices.executable(Part.BACKWARD)
    assert forward is not None and backward is not None
    gathered = {move.target for move in gathers(forward, large)}
    assert gathered & {move.target for move in gathers(backward, large)}
    for one in slices.executables:
        kept = {result.place.buffer for result in one.results if result.place.scope is Scope.MICROBATCH}
        assert kept.isdisjoint(gathered)


def test_a_parameter_is_gathered_again_where_it_is_needed() -> None:
    """All at once, at the start of the backward pass, they would lie there together."""
    slices, large = gathering_stage()
    backward = slices.executable(Part.BACKWARD)
    assert backward is not None
    for move in gathers(backward, large):
        after = backward.steps[backward.steps.index(move) + 1 :]
        waiting = next(number for number, step in enumerate(after) if move.target in read(step))
        assert all(isinstance(step, Reshard) for step in after[:waiting])
