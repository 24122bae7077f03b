"""Lists made from orders: one by hand, and for random stages that all promises are kept and nothing waits for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.machine import Load, Machine, Processor, Resource, ResourceKind
from autopar.cost_model.simulate import Transport, Work, simulate
from autopar.errors import InternalError, ScheduleError
from autopar.plan import Schedule
from autopar.schedule.instructions import (
    ONCE,
    Free,
    Instruction,
    Part,
    Receive,
    Run,
    Send,
    Slot,
    Task,
    verify_lists,
    verify_meetings,
)
from autopar.schedule.lists import Executable, Kind, Passage, StageInterface, StepLists, build_lists
from autopar.schedule.orders import Order, make_order
from tests.pipelines import chain, random_pipeline

PIPELINES = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.EAGER_ONE_F_ONE_B)


def brief(instruction: Instruction) -> str:
    def slot(slot: Slot) -> str:
        return f"{slot.name}" + ("" if slot.microbatch == ONCE else f".{slot.microbatch}")

    match instruction:
        case Run(task, inputs, outputs, donated):
            reads = " ".join(slot(s) + "!" * (place in donated) for place, s in enumerate(inputs))
            number = "" if task.microbatch == ONCE else str(task.microbatch)
            return f"{task.part.value}{number}({reads}) → {' '.join(map(slot, outputs))}"
        case Send(transfer, _, source):
            return f"{slot(source)} ⇒ t{transfer}"
        case Receive(transfer, _, target):
            return f"t{transfer} ⇒ {slot(target)}"
        case Free(slots):
            return f"free {' '.join(map(slot, slots))}"


def test_a_pipeline_by_hand() -> None:
    """Names: 0 state, 1 input, 2 activation, 3 residual, 4 gradient in, 5 gradient out, 6 sum, 7 new state."""
    made = build_lists(make_order(Schedule.ONE_F_ONE_B, 2, 2), *chain(2))
    assert [brief(row) for row in made.lists[0]] == [
        "before() → 6",
        "forward0(0 1.0) → 3.0 2.0",
        "free 1.0",
        "2.0 ⇒ t0",
        "free 2.0",
        "forward1(0 1.1) → 3.1 2.1",
        "free 1.1",
        "2.1 ⇒ t0",
        "free 2.1",
        "t1 ⇒ 4.0",
        "backward0(0 3.0 6! 4.0) → 6.0",
        "free 3.0 4.0",
        "t1 ⇒ 4.1",
        "backward1(0 3.1 6.0! 4.1) → 6.1",
        "free 3.1 4.1",
        "after(0! 6.1!) → 7",
    ]
    assert [brief(row) for row in made.lists[1]] == [
        "before() → 6",
        "t0 ⇒ 1.0",
        "forward0(0 1.0) → 3.0",
        "free 1.0",
        "t0 ⇒ 1.1",
        "backward0(0 3.0 6!) → 6.0 5.0",
        "free 3.0",
        "5.0 ⇒ t1",
        "free 5.0",
        "forward1(0 1.1) → 3.1",
        "free 1.1",
        "backward1(0 3.1 6.0!) → 6.1 5.1",
        "free 3.1",
        "5.1 ⇒ t1",
        "free 5.1",
        "after(0! 6.1!) → 7",
    ]
    assert made.given == {Slot(0, 0), Slot(1, 0), Slot(0, 1, 0), Slot(0, 1, 1)}
    assert made.kept == {(0, 7): (Slot(0, 7),), (1, 7): (Slot(1, 7),)}


def naive(lists: Sequence[Sequence[Instruction]]) -> list[list[Instruction]]:
    """Each Receive moved to just before the task that reads it."""
    moved = []
    for rows in lists:
        reads = {slot: row for row in reversed(rows) if isinstance(row, Run) for slot in row.inputs}
        receives: dict[Run, list[Instruction]] = {}
        for row in rows:
            if isinstance(row, Receive):
                receives.setdefault(reads[row.target], []).append(row)
        moved.append(
            [
                new
                for row in rows
                if not isinstance(row, Receive)
                for new in (*(receives.get(row, ()) if isinstance(row, Run) else ()), row)
            ]
        )
    return moved


def test_receives_before_their_readers_would_wait_for_ever() -> None:
    """Why the lists are cut out of one sequence: the obvious lists fail on a blocking transport."""
    made = build_lists(make_order(Schedule.ONE_F_ONE_B, 2, 4), *chain(2))
    lists = naive(made.lists)
    verify_lists(lists, made.given, made.kept_slots)
    work = Work(lambda task: 1.0)
    simulate(lists, work, Machine((Processor(),) * 2))
    with pytest.raises(ScheduleError, match="wait for each other for ever"):
        verify_meetings(lists)
    with pytest.raises(ScheduleError, match="wait for each other for ever"):
        simulate(lists, work, Machine((Processor(),) * 2), Transport.BLOCKING)


def one_after_the_other(num_stages: int, num_microbatches: int) -> Order:
    """No pipeline: each microbatch goes all the way before the next."""
    meshes = [
        tuple(Task(part, stage, m) for m in range(num_microbatches) for part in (Part.FORWARD, Part.BACKWARD))
        for stage in range(num_stages)
    ]
    return Order(num_stages, num_microbatches, tuple(meshes))


def carry_out(made: StepLists) -> Mapping[tuple[int, int], tuple[object, ...]]:
    """What the kept slots hold, in formulas."""
    memories: list[dict[Slot, object]] = [
        {slot: slot for slot in made.given if any(slot.stage == stage_of(row) for row in rows)} for rows in made.lists
    ]
    at = [0] * len(made.lists)
    sent: dict[tuple[int, int], object] = {}
    while any(position < len(rows) for position, rows in zip(at, made.lists, strict=True)):
        before = list(at)
        for mesh, rows in enumerate(made.lists):
            memory = memories[mesh]
            while at[mesh] < len(rows):
                match rows[at[mesh]]:
                    case Run(task, (source,), (target,)) if task.part is Part.MOVE:
                        memory[target] = memory[source]
                    case Run(task, inputs, outputs):
                        values = hash((task, tuple(memory[slot] for slot in inputs)))
                        memory.update({slot: (task, place, values) for place, slot in enumerate(outputs)})
                    case Send(transfer, microbatch, source):
                        sent[transfer, microbatch] = memory[source]
                    case Receive(transfer, microbatch, target):
                        if (transfer, microbatch) not in sent:
                            break
                        memory[target] = sent[transfer, microbatch]
                    case Free(slots):
                        for slot in slots:
                            del memory[slot]
                at[mesh] += 1
        assert at != before
    everything = {slot: value for memory in memories for slot, value in memory.items()}
    return {name: tuple(everything[slot] for slot in slots) for name, slots in made.kept.items()}


def stage_of(row: Instruction) -> int:
    match row:
        case Run(task):
            return task.stage
        case Send(_, _, slot) | Receive(_, _, slot):
            return slot.stage
        case Free(slots):
            return slots[0].stage


pipelines = st.tuples(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 6))


@given(pipelines, st.sampled_from(PIPELINES))
def test_lists_of_random_stages_keep_all_promises(case: tuple[int, int, int], schedule: Schedule) -> None:
    seed, stages, microbatches = case
    order = make_order(schedule, stages, microbatches)
    interfaces, passages = random_pipeline(Random(seed), stages)
    made = build_lists(order, interfaces, passages)
    verify_lists(made.lists, made.given, made.kept_slots)
    for mesh, rows in enumerate(made.lists):
        tasks = [row.task for row in rows if isinstance(row, Run)]
        assert [task for task in tasks if task.part.per_microbatch] == list(order.meshes[mesh])
        assert {(task.part, task.segment) for task in tasks} == {
            (face.part, face.segment) for face in interfaces[mesh].executables
        }
    assert build_lists(order, interfaces, passages) == made


@given(pipelines, st.sampled_from(PIPELINES))
def test_no_transport_waits_for_ever(case: tuple[int, int, int], schedule: Schedule) -> None:
    """Neither by the walk over meetings nor in simulated time, whatever tasks and messages take."""
    seed, stages, microbatches = case
    random = Random(seed)
    made = build_lists(make_order(schedule, stages, microbatches), *random_pipeline(random, stages))
    verify_meetings(made.lists)
    link = Resource(ResourceKind.NETWORK_OUT, 0, 0)
    loads = [Load(random.random(), ((link, random.random()),)) for _ in range(200)]
    seconds = {(part, stage): random.choice([0.0, random.random()]) for part in Part for stage in range(stages)}
    work = Work(lambda task: seconds[task.part, task.stage], loads.__getitem__, lambda slot: 1.0)
    runs = sum(isinstance(row, Run) for rows in made.lists for row in rows)
    sends = sum(isinstance(row, Send) for rows in made.lists for row in rows)
    for transport in Transport:
        done = simulate(made.lists, work, Machine((Processor(),) * stages, {link: 1.0}), transport)
        assert (len(done.tasks), len(done.messages)) == (runs, sends)
        left = [sum(home == mesh for home, *_ in left_slots(made)) for mesh in range(stages)]
        assert [curve[-1][1] for curve in done.memory] == left


def left_slots(made: StepLists) -> list[tuple[int, Slot]]:
    """(mesh, slot) of all that is in memory at the end and is spoken of in the lists."""
    spoken = {
        slot for rows in made.lists for row in rows if isinstance(row, Run) for slot in (*row.inputs, *row.outputs)
    }
    spoken |= {row.target for rows in made.lists for row in rows if isinstance(row, Receive)}
    spoken |= {row.source for rows in made.lists for row in rows if isinstance(row, Send)}
    return [(slot.stage, slot) for slot in made.kept_slots & spoken]


def dealt_order(seed: int, stages: int, microbatches: int) -> Order:
    """A schedule whose meshes run several stages: dealt round, or neighbours together and one microbatch after the other."""
    divisors = [number for number in range(1, stages) if stages % number == 0]
    if divisors and seed % 2:
        meshes = divisors[seed // 2 % len(divisors)]
        return make_order(Schedule.INTERLEAVED_ONE_F_ONE_B, stages, microbatches, meshes)

    def together(stages: int, microbatches: int) -> Order:
        rows = []
        for low in range(0, stages, 2):
            own = range(low, min(low + 2, stages))
            rows.append(
                tuple(
                    task
                    for number in range(microbatches)
                    for task in (
                        *(Task.forward(stage, number) for stage in own),
                        *(Task.backward(stage, number) for stage in reversed(own)),
                    )
                )
            )
        return Order(stages, microbatches, tuple(rows))

    return make_order(together, stages, microbatches)


@given(pipelines)
def test_lists_of_stages_that_share_meshes(case: tuple[int, int, int]) -> None:
    """All promises are kept, nothing waits for ever, and what is computed does not depend on where stages lie."""
    seed, stages, microbatches = case
    order = dealt_order(seed, stages, microbatches)
    interfaces, passages = random_pipeline(Random(seed), stages)
    made = build_lists(order, interfaces, passages)
    verify_lists(made.lists, made.given, made.kept_slots)
    verify_meetings(made.lists)
    for mesh, rows in enumerate(made.lists):
        tasks = [row.task for row in rows if isinstance(row, Run)]
        assert [task for task in tasks if task.part.per_microbatch] == list(order.meshes[mesh])
    moved = {
        row.task.segment for rows in made.lists for row in rows if isinstance(row, Run) and row.task.part is Part.MOVE
    }
    homes = order.homes
    assert moved == {one.transfer for one in passages if homes[one.source_stage] == homes[one.target_stage]}
    work = Work(lambda task: 1.0, lambda transfer: Load(0.5), lambda slot: 1.0)
    for transport in Transport:
        simulate(made.lists, work, Machine((Processor(),) * len(order.meshes)), transport)
    plain = carry_out(build_lists(one_after_the_other(stages, microbatches), interfaces, passages))
    assert carry_out(made) == plain


@given(pipelines, st.sampled_from(PIPELINES))
def test_every_schedule_computes_the_same(case: tuple[int, int, int], schedule: Schedule) -> None:
    """Also sums: they are added in the order of the microbatches."""
    seed, stages, microbatches = case
    interfaces, passages = random_pipeline(Random(seed), stages)
    plain = carry_out(build_lists(one_after_the_other(stages, microbatches), interfaces, passages))
    assert carry_out(build_lists(make_order(schedule, stages, microbatches), interfaces, passages)) == plain


def test_interfaces_without_meaning_are_refused() -> None:
    order = make_order(Schedule.GPIPE, 2, 1)
    interfaces, passages = chain(2)
    with pytest.raises(InternalError, match="1 interfaces for 2 stages"):
        build_lists(order, interfaces[:1], passages)
    with pytest.raises(InternalError, match="joins names of different kinds"):
        build_lists(order, interfaces, [Passage(0, 0, 2, 1, 0)])
    with pytest.raises(InternalError, match="name 9, but does not say of which kind"):
        build_lists(order, interfaces, [Passage(0, 0, 9, 1, 0)])
    wrong = StageInterface((Executable(Part.FORWARD, (), (0,)),), {0: Kind.ONCE})
    with pytest.raises(InternalError, match="forward of stage 0, microbatch 0 writes name 0, which is there once"):
        build_lists(make_order(Schedule.SINGLE, 1, 1), [wrong], [])
    with pytest.raises(InternalError, match="is its own source"):
        build_lists(order, interfaces, [*passages, Passage(9, 0, 4, 1, 5), Passage(8, 1, 5, 0, 4)][2:])


def test_passages_against_the_order_are_refused() -> None:
    """A forward that needs a later stage's forward waits for ever."""
    interfaces, passages = chain(2)
    back = Passage(2, 1, 3, 0, 1)
    with pytest.raises(ScheduleError, match="forward of stage 0, microbatch 0, which needs forward of stage 1"):
        build_lists(make_order(Schedule.GPIPE, 2, 1), interfaces, [*passages, back])
