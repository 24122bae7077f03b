"""Which instructions carry out an order of tasks?  From an order and what each stage reads and writes to the lists.

All lists are cut out of one sequence of events for all meshes, so no transport can make them wait for each other for ever:

1. Tasks get nominal times (a forward 1, a backward 2, or 1 and 1 if it is split, others 1; messages nothing), each mesh in
   its order.
2. The sequence: each task at its start; each message once, when its producer ends, before the tasks that start then.
3. A mesh's list is the part of the sequence that concerns it: its tasks as ``Run``, its side of each message as ``Send`` or
   ``Receive``.  So a ``Send`` stands before the next ``Run``, and a ``Receive`` where the message can come at the earliest.
   Between stages on one mesh nothing is sent: a ``Run`` of a ``MOVE`` stands in the place of both.
4. ``Free`` follows the last use of what is neither donated nor kept.

Why no list waits for ever, even if each ``Send`` meets its ``Receive``: of what is not yet done, take what stands first in
the sequence.  All that stands before it in any list is done, so it can be done now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from autopar.errors import InternalError
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
)
from autopar.schedule.orders import Order, nominal_times


class Kind(Enum):
    """How often a name of a stage stands for an array.

    ``ONCE``: one slot in the step.  ``EACH``: one slot for each microbatch; a part that runs once reads all of them, in the
    order of the microbatches.  ``CARRIED``: one array that is handed on: written once at first (or given), then read
    (donated) and written anew by one part for each microbatch; everybody else reads the last one.
    """

    ONCE = "once"
    EACH = "each"
    CARRIED = "carried"


@dataclass(frozen=True, slots=True)
class Executable:
    """One part (or segment) of a stage: the names that it reads and writes, in the order of its arguments and results.

    ``donates`` are read names whose memory it takes over; carried names that it both reads and writes need not be told.
    """

    part: Part
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    donates: tuple[int, ...] = ()
    segment: int = 0


@dataclass(frozen=True)
class StageInterface:
    """What one stage reads and writes: its executables, the kind of each name, names in memory at the start and the end.

    A name that is given and not kept is freed after its last use: keep what belongs to the caller.
    """

    executables: tuple[Executable, ...]
    kinds: Mapping[int, Kind]
    given: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Passage:
    """One transfer: a name of one stage becomes a name of another, message by message; of a carried one, the last array.

    The target is of kind ``EACH`` if the source is, otherwise ``ONCE``.  Its source may be what another passage brought.
    """

    transfer: int
    source_stage: int
    source_name: int
    target_stage: int
    target_name: int


@dataclass(frozen=True)
class StepLists:
    """A list of instructions for each mesh; the slots in memory at the start; the slots of each kept (stage, name)."""

    lists: tuple[tuple[Instruction, ...], ...]
    given: frozenset[Slot]
    kept: Mapping[tuple[int, int], tuple[Slot, ...]]

    @property
    def kept_slots(self) -> frozenset[Slot]:
        """All slots in memory at the end."""
        return frozenset(slot for slots in self.kept.values() for slot in slots)


@dataclass(frozen=True, slots=True)
class _Message:
    transfer: int
    microbatch: int
    source: Slot
    target: Slot


def build_lists(order: Order, stages: Sequence[StageInterface], passages: Sequence[Passage]) -> StepLists:
    """The lists of an order for stages that exchange values as the passages say.

    A task for which its stage has no executable is left out.  Which promises the lists keep, if the interfaces fit each
    other, says :func:`autopar.schedule.instructions.verify_lists`.

    Raises ``ScheduleError`` if the order contradicts the passages, ``InternalError`` for interfaces without meaning.
    """
    if len(stages) != order.num_stages:
        raise InternalError(f"{len(stages)} interfaces for {order.num_stages} stages")
    home = order.homes
    names = _Names(stages, order.num_microbatches)
    meshes = _all_tasks(order, stages)
    runs = {task: names.run(task) for tasks in meshes for task in tasks}
    messages = names.messages(passages)
    lists: list[list[Instruction]] = [[] for _ in order.meshes]
    for event in _sequence(meshes, runs, messages, order.nominal_seconds):
        if isinstance(event, Task):
            lists[home[event.stage]].append(runs[event])
            continue
        source, target = home[event.source.stage], home[event.target.stage]
        if source == target:
            lists[source].append(_move(event))
        else:
            lists[source].append(Send(event.transfer, event.microbatch, event.source))
            lists[target].append(Receive(event.transfer, event.microbatch, event.target))
    given = frozenset(
        slot for stage, interface in enumerate(stages) for slot in names.all(stage, interface.given, first=True)
    )
    kept = {(stage, name): names.all(stage, (name,)) for stage, face in enumerate(stages) for name in face.kept}
    left = {slot for slots in kept.values() for slot in slots}
    starts = [sorted((s for s in given if home[s.stage] == mesh), key=_position) for mesh in range(len(lists))]
    freed = tuple(tuple(_with_frees(rows, start, left)) for rows, start in zip(lists, starts, strict=True))
    return StepLists(freed, given, kept)


def _move(message: _Message) -> Run:
    task = Task(Part.MOVE, message.source.stage, message.microbatch, message.transfer)
    return Run(task, (message.source,), (message.target,))


def _position(slot: Slot) -> tuple[int, int, int]:
    return slot.stage, slot.name, slot.microbatch


def _all_tasks(order: Order, stages: Sequence[StageInterface]) -> list[list[Task]]:
    """The tasks of each mesh that have an executable: what comes before, the order, what comes after."""
    known = [{(face.part, face.segment) for face in interface.executables} for interface in stages]
    meshes = []
    for ordered in order.meshes:
        on_mesh = sorted({task.stage for task in ordered})
        once = {
            part: sorted((segment, stage) for stage in on_mesh for kind, segment in known[stage] if kind is part)
            for part in (Part.BEFORE, Part.AFTER)
        }
        tasks = [Task(Part.BEFORE, stage, ONCE, segment) for segment, stage in once[Part.BEFORE]]
        tasks += [task for task in ordered if (task.part, task.segment) in known[task.stage]]
        tasks += [Task(Part.AFTER, stage, ONCE, segment) for segment, stage in once[Part.AFTER]]
        meshes.append(tasks)
    return meshes


class _Reading(NamedTuple):
    """A name that an executable reads: ``always`` the slots if they are the same ones for every task, else those of the
    task's microbatch, or the last of what is handed on; and whether their memory is taken over.
    """

    name: int
    kind: Kind
    always: tuple[Slot, ...]
    is_donated: bool


class _Form(NamedTuple):
    """What an executable reads, and the names that it writes with whether each is handed on."""

    readings: tuple[_Reading, ...]
    writes: tuple[tuple[int, bool], ...]


class _Names:
    """From names to slots, while the tasks of each stage are met in their order."""

    def __init__(self, stages: Sequence[StageInterface], num_microbatches: int) -> None:
        self._stages = stages
        self._microbatches = range(num_microbatches)
        self._version: dict[tuple[int, int], int] = {}  # of a carried name: the microbatch that wrote it last
        self._forms: dict[tuple[int, Part, int], _Form] = {}
        self._executables = {
            (stage, face.part, face.segment): face
            for stage, interface in enumerate(stages)
            for face in interface.executables
        }

    def _kind(self, stage: int, name: int) -> Kind:
        kind = self._stages[stage].kinds.get(name)
        if kind is None:
            raise InternalError(f"stage {stage} uses name {name}, but does not say of which kind it is")
        return kind

    def all(self, stage: int, names: Iterable[int], *, first: bool = False) -> tuple[Slot, ...]:
        """All slots of names as they are after the last task met, or, for carried ones, at the start."""
        slots: list[Slot] = []
        for name in names:
            kind = self._kind(stage, name)
            if kind is Kind.EACH:
                slots.extend(Slot(stage, name, microbatch) for microbatch in self._microbatches)
            else:
                version = ONCE if first or kind is Kind.ONCE else self._version.get((stage, name), ONCE)
                slots.append(Slot(stage, name, version))
        return tuple(slots)

    def run(self, task: Task) -> Run:
        """The instruction of the next task of its stage."""
        stage, microbatch, versions = task.stage, task.microbatch, self._version
        key = stage, task.part, task.segment
        if (form := self._forms.get(key)) is None:
            form = self._forms[key] = self._form(self._executables[key], task)
        inputs: list[Slot] = []
        donated: list[int] = []
        for name, kind, always, is_donated in form.readings:
            before = len(inputs)
            if always:
                inputs.extend(always)
            else:
                inputs.append(Slot(stage, name, microbatch if kind is Kind.EACH else versions.get((stage, name), ONCE)))
            if is_donated:
                donated.extend(range(before, len(inputs)))
        for name, is_carried in form.writes:
            if is_carried:
                versions[stage, name] = microbatch
        outputs = tuple([Slot(stage, name, microbatch) for name, _ in form.writes])
        return Run(task, tuple(inputs), outputs, tuple(donated))

    def _form(self, face: Executable, task: Task) -> _Form:
        """What does not change from task to task of an executable."""
        readings = []
        for name in face.reads:
            kind = self._kind(task.stage, name)
            varies = kind is Kind.CARRIED or (kind is Kind.EACH and task.part.per_microbatch)
            is_donated = (kind is Kind.CARRIED and name in face.writes) or name in face.donates
            readings.append(_Reading(name, kind, () if varies else self.all(task.stage, (name,)), is_donated))
        return _Form(tuple(readings), tuple((name, self._is_carried(task, name)) for name in face.writes))

    def _is_carried(self, task: Task, name: int) -> bool:
        """Whether what a task writes is handed on; refuses names that are there less or more often than the task runs."""
        kind = self._kind(task.stage, name)
        if kind is not Kind.CARRIED and task.part.per_microbatch is not (kind is Kind.EACH):
            raise InternalError(f"{task} writes name {name}, which is there {kind.value}")
        return kind is Kind.CARRIED

    def messages(self, passages: Sequence[Passage]) -> list[_Message]:
        """The messages of all passages; to be asked when all tasks were met."""
        messages = []
        for passage in passages:
            each = self._kind(passage.source_stage, passage.source_name) is Kind.EACH
            if self._kind(passage.target_stage, passage.target_name) is not (Kind.EACH if each else Kind.ONCE):
                raise InternalError(f"{passage} joins names of different kinds")
            for source in self.all(passage.source_stage, (passage.source_name,)):
                microbatch = source.microbatch if each else ONCE
                target = Slot(passage.target_stage, passage.target_name, microbatch)
                messages.append(_Message(passage.transfer, microbatch, source, target))
        return messages


def _sequence(
    meshes: Sequence[Sequence[Task]],
    runs: Mapping[Task, Run],
    messages: Sequence[_Message],
    seconds: Callable[[Task], float],
) -> list[Task | _Message]:
    """All tasks and messages in one order, in which each stands after what it needs."""
    maker = {slot: task for task, run in runs.items() for slot in run.outputs}
    brought = {message.target: message for message in messages}
    roots: dict[Slot, tuple[Task | None, int]] = {}

    def root(slot: Slot) -> tuple[Task | None, int]:
        """The task that made what lies in a slot (None: given), and how many messages brought it."""
        chain = []
        while slot not in roots and slot in brought:
            if slot in chain:
                raise InternalError(f"what {slot} receives is its own source")
            chain.append(slot)
            slot = brought[slot].source
        task, hops = roots.get(slot, (maker.get(slot), 0))
        for hop, target in enumerate(reversed(chain)):
            roots[target] = task, hops + hop + 1
        return task, hops + len(chain)

    def needs(task: Task) -> list[Task]:
        made = (root(slot)[0] for slot in runs[task].inputs if slot in brought)
        return [other for other in made if other is not None]

    times = nominal_times(meshes, needs, seconds)
    events: list[tuple[float, int, Task | _Message]] = []
    for message in messages:
        task, hops = root(message.source)
        events.append((0.0 if task is None else times[task].end_seconds, hops, message))
    last = max((hops for _, hops, _ in events), default=0) + 1
    events.extend((time.start_seconds, last, task) for task, time in times.items())
    return [event for _, _, event in sorted(events, key=lambda row: row[:2])]


def _with_frees(rows: Sequence[Instruction], given: Iterable[Slot], kept: set[Slot]) -> list[Instruction]:
    """The list with what is of no more use freed after each instruction."""
    last: dict[Slot, int] = dict.fromkeys(given, -1)
    donated: set[Slot] = set()
    for position, row in enumerate(rows):
        match row:
            case Run(_, inputs, outputs, positions):
                last.update(dict.fromkeys((*inputs, *outputs), position))
                donated.update(inputs[place] for place in positions)
            case Send(_, _, slot) | Receive(_, _, slot):
                last[slot] = position
            case Free():
                raise InternalError("a list has a Free before they are put in")
    after: dict[int, list[Slot]] = {}
    for slot, position in last.items():
        if slot not in donated and slot not in kept:
            after.setdefault(position, []).append(slot)
    result: list[Instruction] = [Free(tuple(after[-1]))] if -1 in after else []
    for position, row in enumerate(rows):
        result.append(row)
        if position in after:
            result.append(Free(tuple(after[position])))
    return result
