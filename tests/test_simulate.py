"""The simulator of instruction lists: small cases counted by hand, and what must hold of all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, DeviceKind, Link, Platform
from autopar.cost_model.fair import FairClock, fair_rates
from autopar.cost_model.machine import (
    Load,
    Machine,
    Processor,
    Resource,
    ResourceKind,
    make_machine,
    message_load,
    shared_resources,
)
from autopar.cost_model.simulate import Simulation, Transport, Work, simulate
from autopar.errors import ClusterError, InternalError, ScheduleError
from autopar.plan import Schedule
from autopar.schedule.instructions import (
    Free,
    Instruction,
    InstructionList,
    Part,
    Receive,
    Run,
    Send,
    Slot,
    Task,
    verify_lists,
    verify_meetings,
)
from autopar.schedule.lists import build_lists
from autopar.schedule.orders import make_order
from tests.pipelines import (
    ACTIVATION,
    GRADIENT_IN,
    GRADIENT_OUT,
    INPUT,
    RESIDUAL,
    chain,
    promised_in_flight,
    split_chain,
)

LINK = Resource(ResourceKind.NETWORK_OUT, 0, 0)
OTHER_LINK = Resource(ResourceKind.NETWORK_OUT, 1, 0)
CORES = Resource(ResourceKind.COMPUTE, 0, 0)
PIPELINES = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.EAGER_ONE_F_ONE_B)
counts = st.integers(1, 6)


def task(stage: int, microbatch: int = 0, part: Part = Part.FORWARD) -> Task:
    return Task(part, stage, microbatch)


def apart(meshes: int) -> Machine:
    return Machine((Processor(),) * meshes, {LINK: 100.0, OTHER_LINK: 50.0})


def seconds_of(done: Simulation) -> dict[str, tuple[float, float]]:
    tasks = {f"{event.task.stage}.{event.task.microbatch}": event for event in done.tasks}
    messages = {f"m{event.transfer}": event for event in done.messages}
    return {name: (event.start_seconds, event.end_seconds) for name, event in {**tasks, **messages}.items()}


# ------------------------------------------------------------------------------------------------------ by hand: time


def one_message() -> list[list[Instruction]]:
    x, y = Slot(0, 0, 0), Slot(1, 0, 0)
    return [
        [Run(task(0), (), (x,)), Send(0, 0, x), Free((x,)), Run(task(0, 1), (), ())],
        [Receive(0, 0, y), Run(task(1), (y,), ()), Free((y,))],
    ]


def test_a_message_takes_latency_and_bytes_and_overlaps_compute() -> None:
    work = Work(lambda task: 2.0, lambda transfer: Load(0.5, ((LINK, 50.0), (OTHER_LINK, 50.0))))
    done = simulate(one_message(), work, apart(2))
    # The slower of the two links decides: 50 bytes at 50 bytes per second.
    assert seconds_of(done) == {"0.0": (0.0, 2.0), "m0": (2.0, 3.5), "0.1": (2.0, 4.0), "1.0": (3.5, 5.5)}
    assert done.step_seconds == 5.5
    assert done.busy_seconds == (4.0, 2.0)
    assert done.busy_fractions == (4 / 5.5, 2 / 5.5)
    assert done.idle_fractions == pytest.approx((1.5 / 5.5, 3.5 / 5.5))


def test_a_blocking_send_holds_its_mesh_up() -> None:
    work = Work(lambda task: 2.0, lambda transfer: Load(0.5))
    done = simulate(one_message(), work, apart(2), Transport.BLOCKING)
    assert seconds_of(done) == {"0.0": (0.0, 2.0), "m0": (2.0, 2.5), "0.1": (2.5, 4.5), "1.0": (2.5, 4.5)}


def test_a_message_does_not_wait_for_its_target_to_ask_unless_it_blocks() -> None:
    x, y = Slot(0, 0, 0), Slot(1, 0, 0)
    lists: list[list[Instruction]] = [
        [Run(task(0), (), (x,)), Send(0, 0, x)],
        [Run(task(1), (), ()), Run(task(1, 1), (), ()), Receive(0, 0, y), Run(task(1, 2), (y,), ())],
    ]
    work = Work(lambda task: 1.0 if task.stage == 0 else 3.0, lambda transfer: Load(1.0), lambda slot: 8.0)
    done = simulate(lists, work, apart(2))
    assert seconds_of(done)["m0"] == (1.0, 2.0)
    assert seconds_of(done)["1.2"] == (6.0, 9.0)
    assert done.memory[1] == ((0.0, 0.0), (1.0, 8.0))  # from when the message leaves
    blocking = simulate(lists, work, apart(2), Transport.BLOCKING)
    assert seconds_of(blocking)["m0"] == (3.0, 4.0)  # mesh 1 stands at the Receive while its second task runs
    assert blocking.memory[1] == ((0.0, 0.0), (3.0, 8.0))


def test_messages_share_a_link_fairly() -> None:
    """100 bytes from 0 s on and 50 from 0.5 s on, over 100 bytes per second: 50 alone, 50 and 50 at half speed."""
    x, y = Slot(0, 0), Slot(0, 1)
    lists: list[list[Instruction]] = [
        [Send(0, 0, x), Send(1, 0, y)],
        [Receive(0, 0, Slot(1, 0)), Receive(1, 0, Slot(1, 1))],
    ]
    loads = [Load(0.0, ((LINK, 100.0),)), Load(0.5, ((LINK, 50.0),))]
    done = simulate(lists, Work(lambda task: 0.0, loads.__getitem__), apart(2))
    assert seconds_of(done) == {"m0": (0.0, 1.5), "m1": (0.0, 1.5)}


def test_what_is_received_can_be_sent_on() -> None:
    lists: list[list[Instruction]] = [
        [Send(0, 0, Slot(0, 0))],
        [Receive(0, 0, Slot(1, 0)), Send(1, 0, Slot(1, 0)), Free((Slot(1, 0),))],
        [Receive(1, 0, Slot(2, 0)), Run(task(2), (Slot(2, 0),), ())],
    ]
    for transport in Transport:
        done = simulate(lists, Work(lambda task: 1.0, lambda transfer: Load(2.0)), apart(3), transport)
        assert seconds_of(done) == {"m0": (0.0, 2.0), "m1": (2.0, 4.0), "2.0": (4.0, 5.0)}


def test_meshes_that_share_cores_slow_each_other_down() -> None:
    """Each of two meshes takes half of the cores at speed 1: alone it runs at 2, both at 1."""
    half = Processor(2.0, ((CORES, 0.5),))
    lists: list[list[Instruction]] = [[Run(task(0), (), ())], [Run(task(1), (), ())]]
    alone = simulate(lists[:1], Work(lambda task: 3.0), Machine((half,), {CORES: 1.0}))
    assert alone.step_seconds == 1.5
    both = simulate(lists, Work(lambda task: 3.0 if task.stage else 1.0), Machine((half, half), {CORES: 1.0}))
    # To 1 s both at 1; then the 2 s of work left of mesh 1 at 2.
    assert seconds_of(both) == {"0.0": (0.0, 1.0), "1.0": (0.0, 2.0)}
    slow = Processor(1.5, ((CORES, 0.5),))
    bounded = simulate(lists, Work(lambda task: 3.0 if task.stage else 1.0), Machine((slow, slow), {CORES: 1.0}))
    assert seconds_of(bounded)["1.0"] == (0.0, pytest.approx(1 + 2 / 1.5))


# ---------------------------------------------------------------------------------------------------- by hand: memory


def test_memory_over_time() -> None:
    state, x, y, z = Slot(0, 0), Slot(0, 1), Slot(0, 2), Slot(1, 0)
    lists: list[list[Instruction]] = [
        [
            Run(task(0), (state,), (x,)),
            Send(0, 0, x),
            Free((x,)),
            Run(task(0, 1), (state,), (y,), (0,)),
            Free((y,)),
        ],
        [Receive(0, 0, z), Run(task(1), (z,), ()), Free((z,))],
    ]
    sizes = {state: 10.0, x: 3.0, y: 10.0, z: 4.0}
    work = Work(
        lambda task: 1.0, lambda transfer: Load(0.5), sizes.__getitem__, lambda task: 100.0 if task.stage else 1.0
    )
    done = simulate(lists, work, apart(2))
    # x outlives its Free until the message has left; y takes over the state's memory.
    assert done.memory[0] == ((0.0, 10.0), (0.0, 14.0), (1.0, 13.0), (1.0, 14.0), (1.5, 11.0), (2.0, 0.0))
    assert done.memory[1] == ((0.0, 0.0), (0.0, 4.0), (1.5, 104.0), (2.5, 0.0))
    assert done.peak_bytes == (14.0, 104.0)
    assert simulate(lists, Work(lambda task: 1.0), apart(2)).peak_bytes == ()


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_deadlock_names_what_each_mesh_waits_for() -> None:
    first: list[Instruction] = [
        Receive(1, 0, Slot(0, 1)),
        Run(task(0), (Slot(0, 1),), (Slot(0, 0),)),
        Send(0, 0, Slot(0, 0)),
    ]
    second: list[Instruction] = [
        Receive(0, 0, Slot(1, 1)),
        Run(task(1), (Slot(1, 1),), (Slot(1, 0),)),
        Send(1, 0, Slot(1, 0)),
    ]
    with pytest.raises(
        ScheduleError,
        match="mesh 0 waits to run forward of stage 0, microbatch 0, which needs slot 1 of stage 0; "
        "mesh 1 waits to run forward of stage 1, microbatch 0, which needs slot 1 of stage 1",
    ):
        simulate([first, second], Work(lambda task: 1.0), apart(2))
    with pytest.raises(ScheduleError, match=r"mesh 0 waits to receive transfer 1.*mesh 1 waits to receive transfer 0"):
        simulate([first, second], Work(lambda task: 1.0), apart(2), Transport.BLOCKING)
    with pytest.raises(ScheduleError, match="mesh 0 waits to send transfer 0"):
        simulate([[Send(0, 0, Slot(0, 0))], []], Work(lambda task: 1.0), apart(2))


def test_a_machine_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ClusterError, match="2 lists of instructions for 1 meshes"):
        simulate(one_message(), Work(lambda task: 1.0), apart(1))
    work = Work(lambda task: 1.0, lambda transfer: Load(0.0, ((LINK, 1.0),)))
    with pytest.raises(ClusterError, match="network out 0 of host 0 is in use"):
        simulate(one_message(), work, Machine((Processor(), Processor())))


# ---------------------------------------------------------------------------------------------------------- properties


def pipeline(schedule: Schedule, stages: int, microbatches: int) -> tuple[InstructionList, ...]:
    return build_lists(make_order(schedule, stages, microbatches), *chain(stages)).lists


def part_seconds(forward: float, backward: float) -> Work:
    return Work(lambda task: {Part.FORWARD: forward, Part.BACKWARD: backward}.get(task.part, 0.0))


@given(st.sampled_from(PIPELINES), counts, counts, st.integers(1, 5), st.integers(1, 5))
def test_equal_stages_take_what_the_formula_says(
    schedule: Schedule, stages: int, microbatches: int, forward: int, backward: int
) -> None:
    lists = pipeline(schedule, stages, microbatches)
    done = simulate(lists, part_seconds(forward, backward), Machine((Processor(),) * stages))
    assert done.step_seconds == (microbatches + stages - 1) * (forward + backward)
    assert done.busy_seconds == (microbatches * (forward + backward),) * stages


@given(st.sampled_from(PIPELINES), counts, counts, st.integers(1, 5))
def test_blocking_costs_nothing_where_times_are_nominal(
    schedule: Schedule, stages: int, microbatches: int, forward: int
) -> None:
    """Lists have the meetings of tasks that take 1 and 2; where they take that, no mesh waits at one."""
    lists = pipeline(schedule, stages, microbatches)
    machine = Machine((Processor(),) * stages)
    done = simulate(lists, part_seconds(forward, 2 * forward), machine, Transport.BLOCKING)
    assert done.step_seconds == (microbatches + stages - 1) * 3 * forward


def test_what_a_mesh_is_given_and_nobody_names_is_in_its_memory() -> None:
    work = Work(lambda task: 1.0, slot_bytes=lambda slot: 8.0, given={1: [Slot(1, 7)]})
    plain = simulate(one_message(), replace(work, given={}), apart(2)).peak_bytes
    assert simulate(one_message(), work, apart(2)).peak_bytes == (plain[0], plain[1] + 8.0)


@given(st.sampled_from(PIPELINES), counts, counts)
def test_residuals_in_memory_are_those_in_flight(schedule: Schedule, stages: int, microbatches: int) -> None:
    lists = pipeline(schedule, stages, microbatches)
    residual_bytes = 7.0
    work = Work(
        lambda task: 1.0 if task.part.per_microbatch else 0.0,
        slot_bytes=lambda slot: residual_bytes if slot.name == RESIDUAL else 0.0,
    )
    done = simulate(lists, work, Machine((Processor(),) * stages))
    promised = [promised_in_flight(schedule, stages, microbatches, stage) for stage in range(stages)]
    assert done.peak_bytes == tuple(residual_bytes * count for count in promised)
    assert all(curve[-1][1] == 0 for curve in done.memory)


@given(st.integers(2, 4), st.integers(2, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))
def test_dealt_stages_take_and_hold_what_the_formulas_say(
    meshes: int, each: int, groups: int, forward: int, backward: int
) -> None:
    """A task of a dealt stage takes 1/v of what it takes where a mesh has one stage; all of a mesh's residuals count."""
    stages, microbatches = meshes * each, meshes * groups
    order = make_order(Schedule.INTERLEAVED_ONE_F_ONE_B, stages, microbatches, meshes)
    timed = part_seconds(forward, backward)
    work = Work(timed.task_seconds, slot_bytes=lambda slot: 7.0 if slot.name == RESIDUAL else 0.0)
    done = simulate(build_lists(order, *chain(stages)).lists, work, Machine((Processor(),) * meshes))
    assert done.step_seconds == (microbatches * each + meshes - 1) * (forward + backward)
    chunks = microbatches * each
    held = [min(chunks, 2 * (meshes - mesh - 1) + (each - 1) * meshes + 1) for mesh in range(meshes)]
    assert done.peak_bytes == tuple(7.0 * count for count in held)


@given(st.integers(1, 5), st.integers(0, 8), st.integers(1, 5), st.integers(0, 4))
def test_split_backward_passes_take_and_hold_what_the_formulas_say(
    stages: int, more: int, weight: int, longer: int
) -> None:
    """Forward and input gradient take as long as each other, and no less than the weights'; N is S or more."""
    microbatches, each = stages + more, weight + longer
    order = make_order(Schedule.ZERO_BUBBLE_H1, stages, microbatches)
    seconds = {Part.FORWARD: each, Part.BACKWARD: each, Part.WEIGHT: weight}
    work = Work(
        lambda task: float(seconds.get(task.part, 0)), slot_bytes=lambda slot: 7.0 if slot.name == RESIDUAL else 0.0
    )
    made = build_lists(order, *split_chain(stages))
    verify_lists(made.lists, made.given, made.kept_slots)
    verify_meetings(made.lists)
    done = simulate(made.lists, work, Machine((Processor(),) * stages))
    assert done.step_seconds == microbatches * (2 * each + weight) + (stages - 1) * (2 * each - weight)
    assert done.peak_bytes == (7.0 * stages,) * stages


@given(st.integers(2, 5), st.integers(8, 20), st.sampled_from([0.25, 0.5, 1.0]))
def test_eager_hides_messages_as_long_as_a_task(stages: int, microbatches: int, latency: float) -> None:
    """A message as long as a task costs 1F1B its time again and again, eager 1F1B only while the pipeline fills and drains."""
    seconds = {}
    for schedule in (Schedule.ONE_F_ONE_B, Schedule.EAGER_ONE_F_ONE_B):
        work = Work(lambda task: 1.0 if task.part.per_microbatch else 0.0, lambda transfer: Load(latency))
        lists = pipeline(schedule, stages, microbatches)
        seconds[schedule] = simulate(lists, work, Machine((Processor(),) * stages)).step_seconds
    least = 2 * (microbatches + stages - 1) + 2 * latency * (stages - 1)
    assert seconds[Schedule.EAGER_ONE_F_ONE_B] == least
    assert seconds[Schedule.ONE_F_ONE_B] > least


@st.composite
def shared_runs(draw: st.DrawFn) -> tuple[list[list[Instruction]], dict[Task, float]]:
    """Meshes with a few tasks each, none of which waits for another mesh."""
    seconds = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=5))
    lists: list[list[Instruction]] = []
    table: dict[Task, float] = {}
    for mesh, row in enumerate(seconds):
        lists.append([Run(task(mesh, number), (), ()) for number in range(len(row))])
        table.update({task(mesh, number): float(value) for number, value in enumerate(row)})
    return lists, table


@given(shared_runs())
def test_cores_do_all_work_and_never_more_than_they_can(
    case: tuple[list[list[Instruction]], dict[Task, float]],
) -> None:
    """While anybody works the cores are full, so the step takes exactly the work there is."""
    lists, seconds = case
    share = 1 / len(lists)
    machine = Machine((Processor(float(len(lists)), ((CORES, share),)),) * len(lists), {CORES: 1.0})
    done = simulate(lists, Work(seconds.__getitem__), machine)
    assert done.step_seconds == pytest.approx(sum(seconds.values()) * share)
    alone = [sum(seconds[run.task] for run in rows if isinstance(run, Run)) for rows in lists]
    for busy, work in zip(done.busy_seconds, alone, strict=True):
        assert work * share - 1e-9 <= busy <= work + 1e-9


@given(st.sampled_from(PIPELINES), counts, counts, st.integers(0, 1000))
def test_the_same_each_time(schedule: Schedule, stages: int, microbatches: int, seed: int) -> None:
    lists = pipeline(schedule, stages, microbatches)
    numbers = random.Random(seed)
    seconds = {(part, stage): numbers.random() for part in Part for stage in range(stages)}
    work = Work(
        lambda task: seconds[task.part, task.stage],
        lambda transfer: Load(0.1, ((LINK, 10.0 + transfer), (OTHER_LINK, 3.0))),
        lambda slot: float(slot.name in (INPUT, ACTIVATION, GRADIENT_IN, GRADIENT_OUT)),
    )
    cores = Processor(2.0, ((CORES, 1 / stages),))
    machine = Machine((cores,) * stages, {CORES: 1.0, LINK: 100.0, OTHER_LINK: 50.0})
    done = simulate(lists, work, machine)
    assert simulate(lists, work, machine) == done
    moved = sum(event.end_seconds - event.start_seconds for event in done.messages)
    assert done.step_seconds * 100 >= sum(10.0 + event.transfer for event in done.messages)
    assert moved >= 0.1 * len(done.messages)


@given(st.sampled_from(PIPELINES), counts, counts, st.integers(2, 5), st.integers(0, 1000))
def test_cards_that_carry_the_same_delay_like_one(
    schedule: Schedule, stages: int, microbatches: int, cards: int, seed: int
) -> None:
    lists = pipeline(schedule, stages, microbatches)
    numbers = random.Random(seed)
    amounts = [{LINK: numbers.randint(1, 9), OTHER_LINK: numbers.randint(0, 9)} for _ in range(2 * stages)]

    def done(copies: int) -> Simulation:
        def card(link: Resource, number: int) -> Resource:
            return Resource(ResourceKind.NETWORK_IN, 2 * number + link.host, 0)

        def load(transfer: int) -> Load:
            taken = amounts[transfer].items()
            return Load(0.1, tuple((card(link, n), float(size)) for link, size in taken for n in range(copies)))

        units = {card(link, n): rate for link, rate in ((LINK, 5.0), (OTHER_LINK, 7.0)) for n in range(copies)}
        return simulate(lists, Work(lambda task: 1.0, load), Machine((Processor(),) * stages, units))

    assert done(cards) == done(1)


def test_one_resource_stands_for_those_that_are_used_alike() -> None:
    """Of five links the second is as the first; the others are slower, carry more, or carry it for somebody else."""
    links = [Resource(ResourceKind.NETWORK_OUT, host, 0) for host in range(5)]
    machine = Machine((Processor(),), dict(zip(links, [9.0, 9.0, 8.0, 9.0, 9.0], strict=True)))
    loads = [tuple((link, 1.0 + (link is links[3])) for link in links[:4]), ((links[4], 1.0),)]
    shared = shared_resources(machine, loads)
    assert [shared.number_of[link] for link in links] == [0, 0, 1, 2, 3]
    assert shared.capacities == (9.0, 8.0, 9.0, 9.0)
    assert shared.usage(loads[0], 2.0) == ((0, 0.5), (1, 0.5), (2, 1.0))


# --------------------------------------------------------------------------------------------------- rates and machines


@given(
    st.lists(st.floats(0.5, 5), min_size=2, max_size=4),
    st.lists(
        st.tuples(st.floats(0.1, 10), st.dictionaries(st.integers(0, 1), st.floats(0.1, 1), min_size=1)),
        min_size=1,
        max_size=6,
    ),
)
def test_rates_are_max_min_fair(capacities: list[float], rows: list[tuple[float, dict[int, float]]]) -> None:
    """Nobody can have more without taking it from one who has no more: each is at its limit or largest on a full resource."""
    activities = [(limit, tuple(usage.items())) for limit, usage in rows]
    rates = fair_rates(activities, capacities)
    taken = [
        sum(rate * dict(usage).get(resource, 0.0) for rate, (_, usage) in zip(rates, activities, strict=True))
        for resource in range(len(capacities))
    ]
    assert all(used <= capacity * (1 + 1e-9) for used, capacity in zip(taken, capacities, strict=True))
    for rate, (limit, usage) in zip(rates, activities, strict=True):
        bottlenecks = [
            resource
            for resource, _ in usage
            if taken[resource] >= capacities[resource] * (1 - 1e-9)
            and all(
                other <= rate * (1 + 1e-9)
                for other, (_, used) in zip(rates, activities, strict=True)
                if resource in dict(used)
            )
        ]
        assert rate == pytest.approx(limit) or bottlenecks


def test_rates_need_a_bound() -> None:
    with pytest.raises(InternalError, match="a rate of inf"):
        fair_rates([(float("inf"), ((0, 1.0),))], [float("inf")])
    with pytest.raises(InternalError, match=r"a rate of 0\.0"):
        fair_rates([(1.0, ((0, 1.0), (1, 1.0)))], [0.0, 1.0])


def test_only_what_is_joined_changes_its_rate() -> None:
    clock = FairClock([1.0, 1.0])
    clock.start(0, 1.0, 9.0, ((0, 1.0),))
    clock.start(1, 3.0, 9.0, ((1, 1.0),))
    clock.start(2, 1.0, 9.0, ((1, 1.0),))
    done = []
    while (key := clock.next_done()) is not None:
        done.append((key, clock.now_seconds))
    assert done == [(0, 1.0), (2, 2.0), (1, 4.0)]


def test_what_is_joined_through_others_changes_its_rate() -> None:
    """The end of activity 0 lets 1 have more, so 2 has less, so 3 has more."""
    clock = FairClock([0.5, 1.0, 1.5])
    clock.start(0, 0.25, 9.0, ((0, 1.0),))
    clock.start(1, 1.25, 9.0, ((0, 1.0), (1, 1.0)))
    clock.start(2, 2.25, 9.0, ((1, 1.0), (2, 1.0)))
    clock.start(3, 1.75, 9.0, ((2, 1.0),))
    done = []
    while (key := clock.next_done()) is not None:
        done.append((key, clock.now_seconds))
    # Rates 0.25 0.25 0.75 0.75 until 1 s, then 0.5 0.5 1; from 3 s on activity 2 is alone.
    assert done == [(0, 1.0), (3, 2.0), (1, 3.0), (2, 3.5)]


def cluster(sharing: int = 1) -> Cluster:
    kind = DeviceKind("d", Platform.CPU, {"float32": 1e9}, 2**30, 1e9)
    return Cluster("c", 2, 4, kind, Link(1e-6, 100.0), Link(1e-3, 10.0, shared_by=4), sharing)


def test_the_load_of_a_message() -> None:
    load = message_load([(0, 1, 8.0), (0, 4, 5.0), (1, 5, 5.0), (2, 2, 9.0)], cluster())
    assert load.latency_seconds == 1e-3
    assert dict(load.bytes_on) == {
        Resource(ResourceKind.LOCAL_OUT, 0, 0): 8.0,
        Resource(ResourceKind.LOCAL_IN, 0, 1): 8.0,
        Resource(ResourceKind.NETWORK_OUT, 0, 0): 10.0,
        Resource(ResourceKind.NETWORK_IN, 1, 0): 10.0,
    }
    assert message_load([(3, 3, 1.0)], cluster()) == Load()
    with pytest.raises(ClusterError, match="from device 0 to 8"):
        message_load([(0, 8, 1.0)], cluster())


def test_the_machine_of_a_cluster() -> None:
    plain = make_machine(cluster(), [range(4), range(4, 8)])
    assert plain.meshes == (Processor(), Processor())
    assert plain.units_per_second[Resource(ResourceKind.NETWORK_OUT, 1, 0)] == 10.0
    assert plain.units_per_second[Resource(ResourceKind.LOCAL_IN, 0, 3)] == 100.0
    assert len(plain.units_per_second) == 2 * (2 * 4 + 2)
    shared = make_machine(cluster(8), [range(6), range(6, 8)], 3.0)
    assert shared.meshes == (Processor(3.0, ((CORES, 0.75),)), Processor(3.0, ((CORES, 0.25),)))
    assert shared.units_per_second[CORES] == 1.0
    with pytest.raises(ClusterError, match="max_speed is 9"):
        make_machine(cluster(8), [range(8)], 9)
    with pytest.raises(ClusterError, match="to one mesh at most"):
        make_machine(cluster(), [range(4), range(3, 8)])
