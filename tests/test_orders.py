"""Schedules keep what their formulas promise, and only right orders of anybody else pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.plan import Schedule
from autopar.schedule.instructions import Part, Task
from autopar.schedule.orders import (
    Order,
    as_entries,
    bubble_fraction,
    chain_needs,
    check_order,
    from_entries,
    in_flight,
    make_order,
    nominal_times,
)
from tests.pipelines import promised_in_flight

PIPELINES = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.EAGER_ONE_F_ONE_B)
counts = st.integers(1, 8)
schedules = st.sampled_from(PIPELINES)


def letters(order: Order, stage: int) -> str:
    return " ".join(f"{task.part.value[0].upper()}{task.microbatch}" for task in order.meshes[stage])


def seconds_of(order: Order, seconds: Callable[[Task], float]) -> float:
    times = nominal_times(order.meshes, lambda task: chain_needs(task, order.num_stages), seconds)
    return max(time.end_seconds for time in times.values())


def test_the_orders_by_hand() -> None:
    order = make_order(Schedule.GPIPE, 2, 3)
    assert [letters(order, stage) for stage in range(2)] == ["F0 F1 F2 B0 B1 B2"] * 2
    order = make_order(Schedule.ONE_F_ONE_B, 3, 4)
    assert letters(order, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert letters(order, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert letters(order, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    order = make_order(Schedule.EAGER_ONE_F_ONE_B, 3, 6)
    assert letters(order, 0) == "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5"
    assert letters(order, 1) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"
    assert letters(order, 2) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"
    assert letters(make_order(Schedule.SINGLE, 1, 2), 0) == "F0 B0 F1 B1"


@given(schedules, counts, counts)
def test_every_task_once_and_dependencies_kept(schedule: Schedule, stages: int, microbatches: int) -> None:
    order = make_order(schedule, stages, microbatches)
    tasks = [task for mesh in order.meshes for task in mesh]
    assert len(tasks) == len(set(tasks)) == 2 * stages * microbatches
    times = nominal_times(order.meshes, lambda task: chain_needs(task, stages))
    assert set(times) == set(tasks)
    for task, time in times.items():
        for needed in chain_needs(task, stages):
            assert times[needed].end_seconds <= time.start_seconds


@given(schedules, counts, counts)
def test_in_flight_as_promised(schedule: Schedule, stages: int, microbatches: int) -> None:
    order = make_order(schedule, stages, microbatches)
    for stage in range(stages):
        assert in_flight(order, stage) == promised_in_flight(schedule, stages, microbatches, stage)


@given(schedules, counts, counts, st.integers(1, 9), st.integers(1, 9))
def test_bubble_as_promised(schedule: Schedule, stages: int, microbatches: int, forward: int, backward: int) -> None:
    order = make_order(schedule, stages, microbatches)
    seconds = seconds_of(order, lambda task: forward if task.part is Part.FORWARD else backward)
    assert seconds == (microbatches + stages - 1) * (forward + backward)
    share = (stages - 1) / (microbatches + stages - 1)
    assert 1 - microbatches * (forward + backward) / seconds == pytest.approx(share)
    assert bubble_fraction(order) == pytest.approx(share)


# ---------------------------------------------------------------------------------------------- several stages on a mesh


def dealt(stages_per_mesh: int, meshes: int, microbatches: int) -> Order:
    return make_order(Schedule.INTERLEAVED_ONE_F_ONE_B, stages_per_mesh * meshes, microbatches, meshes)


def words(order: Order, mesh: int) -> str:
    return " ".join(f"{task.part.value[0].upper()}{task.stage}.{task.microbatch}" for task in order.meshes[mesh])


def test_the_interleaved_order_by_hand() -> None:
    order = dealt(2, 2, 4)
    assert words(order, 0) == ("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3")
    assert words(order, 1) == ("F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3")
    assert order.homes == (0, 1, 0, 1)


@given(st.integers(2, 4), st.integers(1, 5), counts, st.integers(1, 9), st.integers(1, 9))
def test_the_interleaved_order_keeps_its_promises(
    each: int, meshes: int, microbatches: int, forward: int, backward: int
) -> None:
    """Where the meshes divide the microbatches the bubble is 1/v of that of 1F1B, else no longer than that."""
    order = dealt(each, meshes, microbatches)
    check_order(order)
    assert order.homes == tuple(stage % meshes for stage in range(each * meshes))
    seconds = seconds_of(order, lambda task: forward if task.part is Part.FORWARD else backward)
    work = each * microbatches * (forward + backward)
    least = work + (meshes - 1) * (forward + backward)
    if microbatches % meshes == 0:
        assert seconds == least
        assert bubble_fraction(order) == pytest.approx((meshes - 1) / (each * microbatches + meshes - 1))
    else:
        assert least <= seconds <= work + (meshes - 1) * each * (forward + backward)
    for mesh, tasks in enumerate(order.meshes):
        chunks, most = 0, 0
        for task in tasks:
            chunks += 1 if task.part is Part.FORWARD else -1
            most = max(most, chunks)
        assert most <= min(each * microbatches, 2 * (meshes - mesh - 1) + (each - 1) * meshes + 1)
        for stage in {task.stage for task in tasks}:
            passes = [task for task in tasks if task.stage == stage and task.part is Part.BACKWARD]
            assert [task.microbatch for task in passes] == list(range(microbatches))


def test_the_order_with_weights_apart_by_hand() -> None:
    order = make_order(Schedule.ZERO_BUBBLE_H1, 3, 4)
    assert letters(order, 0) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert letters(order, 1) == "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3"
    assert letters(order, 2) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


def test_the_order_with_weights_further_apart_by_hand() -> None:
    order = make_order(Schedule.ZERO_BUBBLE_H2, 3, 5)
    assert letters(order, 0) == "F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4"
    assert letters(order, 1) == "F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4"
    assert letters(order, 2) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4"


@given(counts, st.integers(0, 6), st.integers(1, 5), st.integers(0, 4), st.integers(0, 4))
def test_weights_further_apart_fill_more_of_it(
    stages: int, more: int, weight: int, forward: int, backward: int
) -> None:
    """Where W takes no longer than F and B, and there are microbatches enough."""
    microbatches = 2 * stages - 1 + more
    order = make_order(Schedule.ZERO_BUBBLE_H2, stages, microbatches)
    check_order(order)
    each = {Part.FORWARD: weight + forward, Part.BACKWARD: weight + backward, Part.WEIGHT: weight}
    left = max(each[Part.FORWARD], each[Part.FORWARD] + each[Part.BACKWARD] - 2 * weight)
    assert seconds_of(order, lambda task: each[task.part]) == microbatches * sum(each.values()) + (stages - 1) * left
    for stage in range(stages):
        assert in_flight(order, stage) == 2 * stages - 1
    assert from_entries(as_entries(order), stages, microbatches) == order


@given(counts, counts, st.integers(1, 5), st.integers(0, 4), st.integers(0, 4))
def test_weights_apart_fill_the_bubble(
    stages: int, microbatches: int, weight: int, forward: int, backward: int
) -> None:
    """Where W takes no longer than F and B; no more microbatches are in flight anywhere than 1F1B has on the first stage."""
    order = make_order(Schedule.ZERO_BUBBLE_H1, stages, microbatches)
    check_order(order)
    each = {Part.FORWARD: weight + forward, Part.BACKWARD: weight + backward, Part.WEIGHT: weight}
    total = sum(each.values())
    seconds = seconds_of(order, lambda task: each[task.part])
    if microbatches >= stages:
        assert seconds == microbatches * total + (stages - 1) * (total - 2 * weight)
    assert seconds <= (microbatches + stages - 1) * total
    for stage in range(stages):
        assert in_flight(order, stage) == min(microbatches, stages)
    assert from_entries(as_entries(order), stages, microbatches) == order


def test_weights_are_apart_for_all_or_for_none() -> None:
    order = make_order(Schedule.ZERO_BUBBLE_H1, 1, 2)
    with pytest.raises(ScheduleError, match="lacks weight of stage 0, microbatch 1; add it"):
        check_order(Order(1, 2, (order.meshes[0][:-1],)))
    with pytest.raises(ScheduleError, match="weight of stage 0, microbatch 0, which needs backward of stage 0"):
        check_order(Order(1, 1, ((Task.forward(0, 0), Task.weight(0, 0), Task.backward(0, 0)),)))


def test_an_order_survives_as_data() -> None:
    order = dealt(2, 3, 5)
    assert from_entries(as_entries(order), 6, 5) == order
    with pytest.raises(ScheduleError, match="lacks backward of stage 0, microbatch 4"):
        from_entries([row[:-1] for row in as_entries(order)], 6, 5)


def own(*meshes: str) -> Order:
    """An order of 2 stages from letters such as "F0 B0"."""
    parts = {"F": Part.FORWARD, "B": Part.BACKWARD}
    tasks = tuple(
        tuple(Task(parts[word[0]], stage, int(word[1])) for word in mesh.split()) for stage, mesh in enumerate(meshes)
    )
    return Order(2, 2, tasks)


def test_an_order_of_ones_own_passes_if_it_is_right() -> None:
    backwards_first_in_last_out = own("F0 F1 B1 B0", "F0 F1 B1 B0")
    assert make_order(lambda stages, microbatches: backwards_first_in_last_out, 2, 2) == backwards_first_in_last_out
    both_on_one_mesh = Order(
        2, 1, ((*(Task(Part.FORWARD, s, 0) for s in (0, 1)), *(Task(Part.BACKWARD, s, 0) for s in (1, 0))),)
    )
    check_order(both_on_one_mesh)
    assert both_on_one_mesh.mesh_of(1) == 0


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (own("F0 F1 B0 B1", "F0 F1 B0"), "lacks backward of stage 1, microbatch 1; add it"),
        (own("F0 F1 B0 B1 B1", "F0 F1 B0 B1"), "backward of stage 0, microbatch 1 is in the order twice"),
        (own("F0 F1 B0 B1 F2", "F0 F1 B0 B1"), "has forward of stage 0, microbatch 2, which does not exist"),
        (
            own("F0 B0 F1 B1", "F0 F1 B0 B1"),
            "mesh 0 waits to run backward of stage 0, microbatch 0, which needs backward of stage 1, microbatch 0; mesh 1 waits",
        ),
        (
            Order(1, 1, ((Task(Part.FORWARD, 0, 0),), (Task(Part.BACKWARD, 0, 0),))),
            "on mesh 1, others of its stage on mesh 0",
        ),
        (Order(1, 1, ((Task.forward(0, 0), Task.backward(0, 0)), ())), "mesh 1 of 2 has nothing to do; leave it out"),
        (Order(1, 1, (("F0", "B0"),)), r"mesh 0 of the order has 'F0', which is no task; write autopar\.Task\.forward"),
    ],
)
def test_a_wrong_order_is_named(order: Order, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_order(order)


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(ScheduleError, match="0 stages"):
        make_order(Schedule.GPIPE, 0, 2)
    with pytest.raises(ScheduleError, match="is for one stage, not 2"):
        make_order(Schedule.SINGLE, 2, 2)
    with pytest.raises(ScheduleError, match="has a mesh for each stage, not 2 for 4; the schedule of several"):
        make_order(Schedule.GPIPE, 4, 2, 2)
    for meshes in (3, 4):
        with pytest.raises(ScheduleError, match=f"two stages or more to each mesh, and 4 stages on {meshes} meshes"):
            make_order(Schedule.INTERLEAVED_ONE_F_ONE_B, 4, 2, meshes)

    def always_two(stages: int, microbatches: int) -> Order:
        return own("F0 F1 B0 B1", "F0 F1 B0 B1")

    with pytest.raises(
        ScheduleError, match="asked for 3 stages and 2 microbatches, always_two gave an order of 2 and 2"
    ):
        make_order(always_two, 3, 2)

    def a_list(stages: int, microbatches: int) -> Any:
        return [["F0"]]

    with pytest.raises(
        ScheduleError, match=r"a_list\(2, 3\) returned an object of type list; return an autopar\.Order"
    ):
        make_order(a_list, 2, 3)
    with pytest.raises(ScheduleError, match="no mesh runs stage 7"):
        in_flight(make_order(Schedule.GPIPE, 2, 2), 7)
