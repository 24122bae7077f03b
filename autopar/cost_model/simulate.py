"""How long does a step take, and what lies in memory when, if each mesh works through its list of instructions?

Each mesh walks down its list.  A ``Run`` starts when the ``Run`` before it has ended and its inputs are there; the walk
then goes on at once to the next ``Run``, at which it waits.  What it passes:

    Send      the message leaves as soon as its source is made
    Receive   the memory of the message is taken, if it was not when the message left
    Free      the memory is given back when the ``Run`` that was started last, and messages from the slot, have ended

First comes a message's latency, then flow its bytes, over what other messages leave it of the links
(:mod:`autopar.cost_model.machine`).  So messages and tasks overlap, and nobody waits for the target to ask: a transport in one
process copies as soon as there is something to copy.  A blocking transport differs in two things: a message leaves when its
target stands at the ``Receive``, and the walk waits at a ``Send`` and at a ``Receive`` until the message has arrived.

Memory at a time is the bytes of the slots that live then; a ``Run`` takes that of its outputs when it starts, and gives
that of its donated inputs back at the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from autopar.cost_model.fair import FairClock, Usage
from autopar.cost_model.machine import Load, Machine, SharedResources, shared_resources
from autopar.errors import ClusterError
from autopar.schedule.instructions import Instruction, InstructionList, Receive, Run, Send, Slot, Task, deadlock


class Transport(Enum):
    """Whether ``Send`` and ``Receive`` wait for each other and for the message."""

    ASYNCHRONOUS = "asynchronous"
    BLOCKING = "blocking"


@dataclass(frozen=True)
class Work:
    """What the instructions stand for: seconds of a task on its mesh at speed 1, the load of a transfer's messages, bytes
    of a slot and of a task's temporaries on one device.

    Without ``slot_bytes`` no memory is counted.  ``given`` are slots that a mesh holds from the start, by its number, also those
    that no instruction names.
    """

    task_seconds: Callable[[Task], float]
    load: Callable[[int], Load] = field(default=lambda transfer: Load())
    slot_bytes: Callable[[Slot], float] | None = None
    temporary_bytes: Callable[[Task], float] = field(default=lambda task: 0.0)
    given: Mapping[int, Sequence[Slot]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """A task ran."""

    task: Task
    mesh: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class MessageEvent:
    """A message travelled, its latency included."""

    transfer: int
    microbatch: int
    source_mesh: int
    target_mesh: int
    start_seconds: float
    end_seconds: float


Curve: TypeAlias = tuple[tuple[float, float], ...]  # (seconds, bytes from then on); those at one time in their order


@dataclass(frozen=True)
class Simulation:
    """One step: its seconds, what ran when (by end), and for each mesh the seconds it computed and its memory."""

    step_seconds: float
    tasks: tuple[TaskEvent, ...]
    messages: tuple[MessageEvent, ...]
    busy_seconds: tuple[float, ...]
    memory: tuple[Curve, ...]

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes on a device of each mesh."""
        return tuple(max((size for _, size in curve), default=0.0) for curve in self.memory)

    @property
    def busy_fractions(self) -> tuple[float, ...]:
        """The fraction of the step in which each mesh computes (1 for a step of no seconds)."""
        return tuple(busy / self.step_seconds if self.step_seconds else 1.0 for busy in self.busy_seconds)

    @property
    def idle_fractions(self) -> tuple[float, ...]:
        """1 less :attr:`busy_fractions`."""
        return tuple(1.0 - busy for busy in self.busy_fractions)


def simulate(
    lists: Sequence[InstructionList], work: Work, machine: Machine, transport: Transport = Transport.ASYNCHRONOUS
) -> Simulation:
    """Carry out one list for each mesh of the machine (lists that :func:`verify_lists` lets pass).

    Raises ``ScheduleError`` naming what each mesh waits for if they wait for each other for ever, ``ClusterError`` if the
    machine has another number of meshes or lacks a resource of a load.
    """
    if len(lists) != len(machine.meshes):
        raise ClusterError(f"{len(lists)} lists of instructions for {len(machine.meshes)} meshes; give one for each")
    return _Simulator(lists, work, machine, transport).run()


@dataclass(slots=True)
class _Message:
    transfer: int
    microbatch: int
    load: Load
    usage: Usage
    size: float
    source: Slot | None = None
    target: Slot | None = None
    source_mesh: int = -1
    target_mesh: int = -1
    lacks: int = 2  # of: sent, source made; of a blocking one, received as well
    start_seconds: float = 0.0
    has_memory: bool = False  # on the target mesh
    flowing: bool = False
    arrived: bool = False


class _Memory:
    """Bytes of the slots of one mesh over time."""

    def __init__(self, slot_bytes: Callable[[Slot], float], given: Sequence[Slot]) -> None:
        self._size = {slot: slot_bytes(slot) for slot in given}
        self._slot_bytes = slot_bytes
        self._messages: dict[Slot, int] = {}
        self._doomed: set[Slot] = set()
        self._now_bytes = float(sum(self._size.values()))
        self.curve = [(0.0, self._now_bytes)]

    def change(self, seconds: float, taken: Sequence[Slot], freed: Sequence[Slot], other_bytes: float = 0.0) -> None:
        """Slots that begin and slots that are of no more use: those live on while a message needs them."""
        change_bytes = other_bytes
        for slot in taken:
            size = self._size[slot] = self._slot_bytes(slot)
            change_bytes += size
        for slot in freed:
            if self._messages.get(slot):
                self._doomed.add(slot)
            else:
                change_bytes -= self._size.pop(slot)
        if change_bytes:
            self._now_bytes += change_bytes
            self.curve.append((seconds, self._now_bytes))

    def hold(self, slot: Slot) -> None:
        """A message needs the slot."""
        self._messages[slot] = self._messages.get(slot, 0) + 1

    def release(self, slot: Slot, seconds: float) -> None:
        """A message does not need it any more."""
        self._messages[slot] -= 1
        if not self._messages[slot] and slot in self._doomed:
            self._doomed.remove(slot)
            self.change(seconds, (), (slot,))


class _Mesh:
    """Where one mesh stands."""

    def __init__(self, instructions: InstructionList) -> None:
        self.instructions = instructions
        self.at = 0
        self.posted = -1  # the position of the Send or Receive that was posted last
        self.temporary_bytes = 0.0  # of the running task
        self.running: Run | None = None
        self.start_seconds = 0.0
        self.busy_seconds = 0.0
        self.freed: list[Slot] = []  # when the running task ends
        self.needs: dict[int, tuple[Slot, ...]] = {}  # of the Run at a position: slots that a message brings
        self.given: list[Slot] = []


class _Simulator:
    """Keys of the clock: a mesh's task its number; message m its latency, then its flow, (number of meshes) + m."""

    def __init__(self, lists: Sequence[InstructionList], work: Work, machine: Machine, transport: Transport) -> None:
        self.work = work
        self.blocking = transport is Transport.BLOCKING
        loads = {transfer: work.load(transfer) for transfer in _transfers(lists)}
        resources = shared_resources(machine, (load.bytes_on for load in loads.values()))
        self.clock = FairClock(resources.capacities)
        self.processors = [(mesh.max_speed, resources.usage(mesh.share_of, 1.0)) for mesh in machine.meshes]
        self.meshes = [_Mesh(instructions) for instructions in lists]
        self.messages: dict[tuple[int, int], int] = {}
        self.table: list[_Message] = []
        self.unmade: set[Slot] = set()
        self.leaving: dict[Slot, list[int]] = {}  # messages that may leave when the slot is made
        self._scan({transfer: _used(load, resources) for transfer, load in loads.items()})
        slot_bytes = work.slot_bytes
        self.memory = [] if slot_bytes is None else [_Memory(slot_bytes, mesh.given) for mesh in self.meshes]
        self.task_events: list[TaskEvent] = []
        self.message_events: list[MessageEvent] = []

    def _scan(self, loads: Mapping[int, tuple[Load, Usage, float]]) -> None:
        """Find the messages, and the slots that are given, made by tasks, or brought."""
        for number, mesh in enumerate(self.meshes):
            written: set[Slot] = set()
            brought: set[Slot] = set()
            given: dict[Slot, None] = dict.fromkeys(self.work.given.get(number, ()))
            for position, instruction in enumerate(mesh.instructions):
                if isinstance(instruction, Run):
                    given.update((slot, None) for slot in instruction.inputs if slot not in written)
                    if needs := tuple(slot for slot in instruction.inputs if slot in brought):
                        mesh.needs[position] = needs
                    written.update(instruction.outputs)
                elif isinstance(instruction, Send):
                    if instruction.source not in written:
                        given[instruction.source] = None
                    message = self._message(instruction, loads)
                    message.source, message.source_mesh = instruction.source, number
                elif isinstance(instruction, Receive):
                    brought.add(instruction.target)
                    written.add(instruction.target)
                    message = self._message(instruction, loads)
                    message.target, message.target_mesh = instruction.target, number
                else:
                    given.update((slot, None) for slot in instruction.slots if slot not in written)
            mesh.given = list(given)
            self.unmade |= written

    def _message(self, end: Send | Receive, loads: Mapping[int, tuple[Load, Usage, float]]) -> _Message:
        name = (end.transfer, end.microbatch)
        if name not in self.messages:
            self.messages[name] = len(self.table)
            load, usage, size = loads[end.transfer]
            message = _Message(end.transfer, end.microbatch, load, usage, size)
            message.lacks += self.blocking
            self.table.append(message)
        return self.table[self.messages[name]]

    def run(self) -> Simulation:
        for number in range(len(self.meshes)):
            self._walk(number)
        while (key := self.clock.next_done()) is not None:
            if key < len(self.meshes):
                self._task_done(key)
            else:
                self._message_done(key - len(self.meshes))
        self._check_end()
        return Simulation(
            self.clock.now_seconds,
            tuple(self.task_events),
            tuple(self.message_events),
            tuple(mesh.busy_seconds for mesh in self.meshes),
            tuple(tuple(memory.curve) for memory in self.memory),
        )

    def _walk(self, number: int) -> None:
        """Go down the list until something has to be waited for."""
        mesh = self.meshes[number]
        while mesh.at < len(mesh.instructions):
            instruction = mesh.instructions[mesh.at]
            if isinstance(instruction, Run):
                if mesh.running is not None or self._missing(mesh) is not None:
                    return
                self._start_task(number, mesh, instruction)
            elif isinstance(instruction, Send | Receive):
                message = self.messages[instruction.transfer, instruction.microbatch]
                if mesh.posted != mesh.at:
                    mesh.posted = mesh.at
                    self._post(number, instruction, message)
                if self.blocking and not self.table[message].arrived:
                    return
            elif mesh.running is not None:
                mesh.freed.extend(instruction.slots)
            elif self.memory:
                self.memory[number].change(self.clock.now_seconds, (), instruction.slots)
            mesh.at += 1

    def _missing(self, mesh: _Mesh) -> Slot | None:
        """An input of the task at which a mesh stands that no message has brought yet."""
        return next((slot for slot in mesh.needs.get(mesh.at, ()) if slot in self.unmade), None)

    def _start_task(self, number: int, mesh: _Mesh, run: Run) -> None:
        mesh.running, mesh.start_seconds = run, self.clock.now_seconds
        if self.memory:
            mesh.temporary_bytes = self.work.temporary_bytes(run.task)
            donated = [run.inputs[position] for position in run.donated]
            self.memory[number].change(self.clock.now_seconds, run.outputs, donated, mesh.temporary_bytes)
        speed, usage = self.processors[number]
        self.clock.start(number, self.work.task_seconds(run.task), speed, usage)

    def _task_done(self, number: int) -> None:
        mesh, now = self.meshes[number], self.clock.now_seconds
        run = mesh.running
        assert run is not None
        self.task_events.append(TaskEvent(run.task, number, mesh.start_seconds, now))
        mesh.busy_seconds += now - mesh.start_seconds
        if self.memory:
            self.memory[number].change(now, (), mesh.freed, -mesh.temporary_bytes)
        mesh.running, mesh.freed = None, []
        for slot in run.outputs:
            self._made(slot)
        self._walk(number)

    def _made(self, slot: Slot) -> None:
        self.unmade.discard(slot)
        for message in self.leaving.pop(slot, ()):
            self._bring_nearer(message)

    def _post(self, number: int, end: Send | Receive, message: int) -> None:
        """A mesh stands ready for its end of a message."""
        if isinstance(end, Receive):
            self._take_memory(self.table[message])
            if self.blocking:
                self._bring_nearer(message)
            return
        if self.memory:
            self.memory[number].hold(end.source)
        if end.source in self.unmade:
            self.leaving.setdefault(end.source, []).append(message)
        else:
            self._bring_nearer(message)
        self._bring_nearer(message)

    def _take_memory(self, message: _Message) -> None:
        if self.memory and not message.has_memory and message.target is not None:
            self.memory[message.target_mesh].change(self.clock.now_seconds, (message.target,), ())
            self.memory[message.target_mesh].hold(message.target)
        message.has_memory = True

    def _bring_nearer(self, number: int) -> None:
        """One of the things that a message waits for has happened."""
        message = self.table[number]
        message.lacks -= 1
        if not message.lacks and message.target is not None:
            self._take_memory(message)
            message.start_seconds = self.clock.now_seconds
            self.clock.wait(len(self.meshes) + number, message.load.latency_seconds)

    def _message_done(self, number: int) -> None:
        """Its latency is over, or it has arrived."""
        message, now = self.table[number], self.clock.now_seconds
        if message.size and not message.flowing:
            message.flowing = True
            self.clock.start(len(self.meshes) + number, message.size, math.inf, message.usage)
            return
        message.arrived = True
        source, target = message.source, message.target
        assert source is not None and target is not None
        ends = (message.source_mesh, message.target_mesh)
        self.message_events.append(
            MessageEvent(message.transfer, message.microbatch, *ends, message.start_seconds, now)
        )
        if self.memory:
            self.memory[ends[0]].release(source, now)
            self.memory[ends[1]].release(target, now)
        self._made(target)
        self._walk(ends[1])
        if self.blocking:
            self._walk(ends[0])

    def _check_end(self) -> None:
        """Nothing runs any more: every mesh must be at the end of its list, every message must have arrived."""
        waits: dict[int, str] = {}
        for message in self.table:
            if message.arrived:
                continue
            if message.source is not None:
                waits[message.source_mesh] = str(Send(message.transfer, message.microbatch, message.source))
            if message.target is not None:
                waits[message.target_mesh] = str(Receive(message.transfer, message.microbatch, message.target))
        for number, mesh in enumerate(self.meshes):
            if mesh.at < len(mesh.instructions):
                missing = self._missing(mesh)
                what: Instruction = mesh.instructions[mesh.at]
                waits[number] = f"{what}" + (f", which needs {missing}" if missing is not None else "")
        if waits:
            raise deadlock(waits)


def _used(load: Load, resources: SharedResources) -> tuple[Load, Usage, float]:
    """A load, what it takes of each resource per unit of rate, and its most bytes on one."""
    size = max((amount for _, amount in load.bytes_on), default=0.0)
    return load, resources.usage(load.bytes_on, size), size


def _transfers(lists: Sequence[InstructionList]) -> list[int]:
    """The transfers whose messages the lists send or receive."""
    ends = (one for instructions in lists for one in instructions if isinstance(one, Send | Receive))
    return list(dict.fromkeys(one.transfer for one in ends))
