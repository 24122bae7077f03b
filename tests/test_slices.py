"""The steps of a stage as executables: is what they hand to each other there, and is no gathered parameter kept for long?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from autopar.inter_op.looped import constants_of
from autopar.plan import Layout
from autopar.schedule.instructions import Part
from autopar.schedule.pipeline import lower_stage
from autopar.schedule.slices import MADE_AGAIN_BYTES, Executable, Scope, Slices
from autopar.schedule.spmd import Buffer, Reshard, Step
from tests.toy_pipelines import toy_step, two_stages


@cache
def gathering_stage(*, splits_backward: bool = False) -> tuple[Slices, frozenset[int]]:
    """The first stage of a GPT whose large matrices rest in pieces and are gathered by each microbatch; with their values."""
    lowering = two_stages(toy_step("gpt", 4, "bench")).costs[0].lowering
    graph, stage = lowering.graph, lowering.stage
    loop = graph.operators[lowering.program.loop]
    body, axis = loop.bodies[0], stage.mesh.axis_names[0]
    homes, copies, large = dict(stage.homes), dict(stage.copies), set()
    for outside, inside in zip(loop.operands, body.inputs, strict=True):
        array = body.values[inside]
        is_matrix = len(array.shape) == 2 and array.size_bytes >= MADE_AGAIN_BYTES
        if outside is None or inside not in constants_of(loop) or not is_matrix:
            continue
        homes[outside] = homes[inside] = Layout(((axis,), ()))
        copies[inside] = Layout(((), ()))
        copies.pop(outside, None)
        large.add(inside)
    assert large
    gathering = replace(stage, homes=homes, copies=copies)
    lowered = lower_stage(lowering.program, graph, gathering, splits_backward=splits_backward)
    return lowered.slices, frozenset(large)


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
