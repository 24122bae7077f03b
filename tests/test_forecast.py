"""Is a step of many microbatches what two short ones say?"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.forecast import REPEATING, SIMULATED_AT_LEAST, Rehearsal, forecast, lean_count, rehearsed_counts
from autopar.cost_model.machine import Load, Machine, Processor, Resource, ResourceKind
from autopar.cost_model.simulate import Work, simulate
from autopar.plan import Schedule
from autopar.schedule.instructions import Part, Task
from autopar.schedule.lists import build_lists
from autopar.schedule.orders import make_order
from tests.pipelines import INPUT, chain, split_chain

ROW_BYTES = 5.0
SHARE = 0.01
"""What the planner may be off by: layouts are chosen by differences of this size."""


def rehearsal(schedule: Schedule, stages: int, meshes: int, count: int, work: Work, machine: Machine) -> Rehearsal:
    order = make_order(schedule, stages, count, meshes)
    interfaces, passages = (split_chain if order.splits_backward else chain)(stages)
    lists = build_lists(order, interfaces, passages).lists
    rows = tuple(ROW_BYTES if mesh == 0 else 0.0 for mesh in range(meshes))
    return Rehearsal(count, simulate(lists, work, machine), rows)


def random_work(seed: int, stages: int) -> Work:
    """Stages of unlike speed and messages that take up to as long as they; INPUT of the first stage are rows."""
    rng = random.Random(seed)
    seconds = {(part, stage): rng.uniform(0.5, 2.0) for part in Part for stage in range(stages)}
    sizes = {stage: rng.uniform(1.0, 30.0) for stage in range(stages)}
    loads = [rng.uniform(0.0, 60.0) for _ in range(2 * stages)]
    return Work(
        lambda task: seconds[task.part, task.stage],
        lambda transfer: Load(0.1, ((Resource(ResourceKind.NETWORK_OUT, transfer % 2, 0), loads[transfer]),)),
        lambda slot: ROW_BYTES if (slot.stage, slot.name) == (0, INPUT) else sizes[slot.stage],
    )


@settings(max_examples=25)
@given(
    schedule=st.sampled_from(sorted(REPEATING, key=lambda schedule: schedule.value)),
    meshes=st.integers(2, 4),
    count=st.integers(SIMULATED_AT_LEAST + 4, 80),
    seed=st.integers(0, 2**32 - 1),
)
def test_two_short_steps_tell_of_a_long_one(schedule: Schedule, meshes: int, count: int, seed: int) -> None:
    stages = 2 * meshes if schedule is Schedule.INTERLEAVED_ONE_F_ONE_B else meshes
    links = {Resource(ResourceKind.NETWORK_OUT, number, 0): 100.0 for number in range(2)}
    machine, work = Machine((Processor(),) * meshes, links), random_work(seed, stages)
    numbers = rehearsed_counts(schedule, count, meshes)
    assert len(numbers) == 2 and all((count - number) % meshes == 0 for number in numbers)
    said = forecast([rehearsal(schedule, stages, meshes, number, work, machine) for number in numbers], count)
    true = rehearsal(schedule, stages, meshes, count, work, machine).simulation
    assert said.step_seconds == pytest.approx(true.step_seconds, rel=SHARE)
    for foretold, peak in zip(said.peak_bytes, true.peak_bytes, strict=True):
        assert peak * (1 - SHARE) <= foretold <= peak * (1 + 5 * SHARE)


def test_few_microbatches_are_simulated_as_they_are() -> None:
    assert rehearsed_counts(Schedule.ONE_F_ONE_B, SIMULATED_AT_LEAST, 2) == (SIMULATED_AT_LEAST,)
    assert rehearsed_counts(Schedule.ONE_F_ONE_B, 130, 16) == (130,)  # a step that is no longer than its rehearsals
    assert rehearsed_counts(Schedule.GPIPE, 1000, 2) == rehearsed_counts(make_order, 1000, 2) == (1000,)
    work = Work(lambda task: 1.0 + (task.part is Part.BACKWARD))
    own = rehearsal(Schedule.ONE_F_ONE_B, 3, 3, 7, work, Machine((Processor(),) * 3))
    said = forecast([own], 7)
    assert said.step_seconds == own.simulation.step_seconds == (7 + 2) * 3 + _once(own)


@settings(max_examples=10)
@given(meshes=st.integers(2, 4), count=st.integers(SIMULATED_AT_LEAST + 1, 60), seed=st.integers(0, 2**32 - 1))
def test_fewer_microbatches_hold_no_more(meshes: int, count: int, seed: int) -> None:
    """What exceeds a budget with few microbatches need not be simulated with many."""
    links = {Resource(ResourceKind.NETWORK_OUT, number, 0): 100.0 for number in range(2)}
    machine, work = Machine((Processor(),) * meshes, links), random_work(seed, meshes)
    few = lean_count(Schedule.GPIPE, count, meshes)
    assert few is not None and few < count
    lean, whole = (rehearsal(Schedule.GPIPE, meshes, meshes, number, work, machine) for number in (few, count))
    for less, peak in zip(lean.simulation.peak_bytes, whole.simulation.peak_bytes, strict=True):
        assert less <= peak


def test_of_other_schedules_nothing_is_known() -> None:
    assert lean_count(Schedule.ONE_F_ONE_B, 1000, 2) is lean_count(make_order, 1000, 2) is None
    assert lean_count(Schedule.GPIPE, SIMULATED_AT_LEAST, 2) is None


def _once(own: Rehearsal) -> float:
    """Seconds before the first and after the last microbatch, of a step whose such tasks take 1."""
    first = min(e.start_seconds for e in own.simulation.tasks if e.task == Task.forward(0, 0))
    last = max(e.end_seconds for e in own.simulation.tasks if e.task == Task.backward(0, own.count - 1))
    return first + own.simulation.step_seconds - last
