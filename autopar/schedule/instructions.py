"""What does each mesh do in one step, and in which order?  The instructions, and what must hold of them.

Every mesh has one static list of instructions; a list says nothing of time.  Arrays lie in *slots*, one array (spread over
the devices of the mesh) each.  A slot is written once in a step, by a ``Run`` or a ``Receive``, unless it is *given*: in
memory when the step starts.  Between lists pass only messages, named by (transfer, microbatch), each once in a step:

    mesh A   …  Run(produces x)  Send(7, 3, x)          …
    mesh B   …  Receive(7, 3, y)                Run(reads y)  Free(y)  …

``Run`` and ``Send`` do not wait for what they start; ``Receive`` posts the receive, and the first reader of its slot waits.
A transport may block instead: then a ``Send`` and its ``Receive`` are one meeting of two meshes, at which both wait for each
other.  :func:`verify_meetings` says whether lists come to an end even so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from autopar.errors import InternalError, ScheduleError

ONCE = -1  # the microbatch number of what happens once in a step


class Part(Enum):
    """The parts of a stage's program.

    ``BEFORE`` runs once, before the microbatches; ``FORWARD`` and ``BACKWARD`` for each microbatch; ``AFTER`` once, in
    segments, each of which may wait for values from the segment before it on other stages.  Where the backward pass is
    split, ``BACKWARD`` is what the stage before waits for, and ``WEIGHT`` the rest, the gradients of weights.

    ``MOVE`` is no part of the program: it hands a value on to another stage on the same mesh, in the layout that is wanted
    there.
    """

    BEFORE = "before"
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    AFTER = "after"
    MOVE = "move"

    # There is one object of each; the hash of Enum itself is computed from the name, in Python, at every look into a table.
    __hash__ = object.__hash__

    @property
    def per_microbatch(self) -> bool:
        """Whether it runs once for each microbatch."""
        return self in (Part.FORWARD, Part.BACKWARD, Part.WEIGHT)


class Task(NamedTuple):
    """One call of one executable: a part of a stage (a segment of it), for a microbatch or once.

    Of a ``MOVE`` the stage is that of the value, and the segment is the number of the transfer.
    """

    part: Part
    stage: int
    microbatch: int = ONCE
    segment: int = 0

    @classmethod
    def forward(cls, stage: int, microbatch: int) -> Task:
        """The forward pass of a microbatch through a stage, both counted from 0."""
        return cls(Part.FORWARD, stage, microbatch)

    @classmethod
    def backward(cls, stage: int, microbatch: int) -> Task:
        """The backward pass of a microbatch through a stage, both counted from 0; the whole, unless ``weight`` is apart."""
        return cls(Part.BACKWARD, stage, microbatch)

    @classmethod
    def weight(cls, stage: int, microbatch: int) -> Task:
        """What of the backward pass no other stage waits for, the gradients of weights."""
        return cls(Part.WEIGHT, stage, microbatch)

    def __str__(self) -> str:
        segment = f" {self.segment}" if self.segment or self.part in (Part.AFTER, Part.MOVE) else ""
        return f"{self.part.value}{segment} of stage {self.stage}{_of_microbatch(self.microbatch)}"


class Slot(NamedTuple):
    """One array in the memory of one mesh; ``name`` is unique in the stage, the three together in the step."""

    stage: int
    name: int
    microbatch: int = ONCE

    def __str__(self) -> str:
        return f"slot {self.name} of stage {self.stage}{_of_microbatch(self.microbatch)}"


@dataclass(frozen=True, slots=True)
class Run:
    """Call an executable; ``donated`` are the positions of inputs whose memory it takes over."""

    task: Task
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    donated: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"run {self.task}"


@dataclass(frozen=True, slots=True)
class Send:
    """Let a message leave; the slot may be freed by the next instruction, what is under way is kept by the transport."""

    transfer: int
    microbatch: int
    source: Slot

    def __str__(self) -> str:
        return f"send transfer {self.transfer}{_of_microbatch(self.microbatch)} from {self.source}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Let a message arrive in a new slot."""

    transfer: int
    microbatch: int
    target: Slot

    def __str__(self) -> str:
        return f"receive transfer {self.transfer}{_of_microbatch(self.microbatch)} into {self.target}"


@dataclass(frozen=True, slots=True)
class Free:
    """Give memory back."""

    slots: tuple[Slot, ...]

    def __str__(self) -> str:
        return "free " + ", ".join(map(str, self.slots))


Instruction: TypeAlias = Run | Send | Receive | Free
InstructionList: TypeAlias = Sequence[Instruction]


def _of_microbatch(microbatch: int) -> str:
    return "" if microbatch == ONCE else f", microbatch {microbatch}"


# ------------------------------------------------------------------------------------------------------------- checks


class _Memory:
    """The slots of one mesh while its list is read from top to bottom."""

    def __init__(self, mesh: int, given: Iterable[Slot]) -> None:
        self.mesh = mesh
        self.live = set(given)
        self.gone: set[Slot] = set()

    def write(self, slot: Slot, instruction: Instruction) -> None:
        if slot in self.live or slot in self.gone:
            _fail(self.mesh, instruction, f"writes {slot} a second time; a slot is written once in a step")
        self.live.add(slot)

    def read(self, slot: Slot, instruction: Instruction) -> None:
        if slot in self.gone:
            _fail(self.mesh, instruction, f"uses {slot}, which was freed or donated before")
        if slot not in self.live:
            _fail(self.mesh, instruction, f"uses {slot}, which nothing has written on this mesh")

    def drop(self, slot: Slot, instruction: Instruction) -> None:
        self.read(slot, instruction)
        self.live.remove(slot)
        self.gone.add(slot)


def verify_lists(
    lists: Sequence[InstructionList], given: AbstractSet[Slot], kept: AbstractSet[Slot] | None = None
) -> None:
    """Check what every interpreter of the lists (one for each mesh) relies on.

    ``given`` are the slots in memory at the start (state, batch); ``kept``, if told, exactly those that must be left at the
    end.  In each list every slot is written once before it is used, and neither freed nor donated before its last use; every
    task runs once; the stages of a list are in no other; every message is sent once and received once, by different
    meshes, and a transfer always joins the same two.

    Raises ``InternalError`` naming the mesh and the instruction at the first promise that is broken.
    """
    home = _stage_homes(lists)
    starts: list[set[Slot]] = [set() for _ in lists]
    for slot in given:
        if slot.stage not in home:
            raise InternalError(f"{slot} is given, but no instruction speaks of its stage")
        starts[home[slot.stage]].add(slot)
    tasks: set[Task] = set()
    left: set[Slot] = set()
    for mesh, instructions in enumerate(lists):
        memory = _Memory(mesh, starts[mesh])
        for instruction in instructions:
            _step(memory, instruction)
            if isinstance(instruction, Run):
                if instruction.task in tasks:
                    _fail(mesh, instruction, "runs a second time")
                tasks.add(instruction.task)
        left |= memory.live
    if kept is not None and left != kept:
        odd = min(left ^ kept, key=lambda slot: (slot.stage, slot.name, slot.microbatch))
        raise InternalError(f"{odd} is {'left in memory' if odd in left else 'gone'} at the end of the step")
    _verify_messages(lists)


def _step(memory: _Memory, instruction: Instruction) -> None:
    """Carry out one instruction on the memory."""
    match instruction:
        case Run(_, inputs, outputs, donated):
            for slot in inputs:
                memory.read(slot, instruction)
            if any(not 0 <= position < len(inputs) for position in donated):
                _fail(memory.mesh, instruction, f"donates inputs {donated} of {len(inputs)}")
            times = Counter(inputs) if donated else Counter[Slot]()
            for position in donated:
                if times[inputs[position]] > 1:
                    _fail(memory.mesh, instruction, f"donates {inputs[position]}, which it reads at two positions")
                memory.drop(inputs[position], instruction)
            for slot in outputs:
                memory.write(slot, instruction)
        case Send(_, _, source):
            memory.read(source, instruction)
        case Receive(_, _, target):
            memory.write(target, instruction)
        case Free(slots):
            for slot in slots:
                memory.drop(slot, instruction)


def _stage_homes(lists: Sequence[InstructionList]) -> dict[int, int]:
    """The mesh of each stage."""
    home: dict[int, int] = {}
    for mesh, instructions in enumerate(lists):
        for instruction in instructions:
            for stage in _stages(instruction):
                if home.setdefault(stage, mesh) != mesh:
                    _fail(mesh, instruction, f"speaks of stage {stage}, which is on mesh {home[stage]}")
    return home


def _stages(instruction: Instruction) -> list[int]:
    match instruction:
        case Run(task, inputs, outputs):
            return [task.stage, *(slot.stage for slot in inputs), *(slot.stage for slot in outputs)]
        case Send(_, _, source):
            return [source.stage]
        case Receive(_, _, target):
            return [target.stage]
        case Free(slots):
            return [slot.stage for slot in slots]


def _verify_messages(lists: Sequence[InstructionList]) -> None:
    """Each message leaves once, arrives once, elsewhere."""
    sent: dict[tuple[int, int], int] = {}
    received: dict[tuple[int, int], int] = {}
    for mesh, instructions in enumerate(lists):
        for instruction in instructions:
            if isinstance(instruction, Send | Receive):
                ends = sent if isinstance(instruction, Send) else received
                message = (instruction.transfer, instruction.microbatch)
                if message in ends:
                    _fail(mesh, instruction, f"is there a second time (first on mesh {ends[message]})")
                ends[message] = mesh
    joined: dict[int, tuple[int, int]] = {}
    for message in sorted(sent.keys() | received.keys()):
        name = f"transfer {message[0]}{_of_microbatch(message[1])}"
        if message not in received or message not in sent:
            there, missing = ("sent", "received") if message in sent else ("received", "sent")
            raise InternalError(f"{name} is {there} but never {missing}")
        ends_of = (sent[message], received[message])
        if ends_of[0] == ends_of[1]:
            raise InternalError(
                f"{name} leaves from and arrives on mesh {ends_of[0]}; let its reader use the slot itself"
            )
        if joined.setdefault(message[0], ends_of) != ends_of:
            raise InternalError(f"{name} joins meshes {ends_of}, other messages of it {joined[message[0]]}")


def verify_meetings(lists: Sequence[InstructionList]) -> None:
    """Check that lists come to an end even if each ``Send`` and its ``Receive`` wait for each other.

    What other instructions do takes time but waits for no other mesh, so it is left out.  Meetings are carried out as soon
    as both sides stand at them; in which order does not matter, since each list waits at one instruction only.

    Raises ``ScheduleError`` naming, for each mesh that is stuck, the instruction at which it waits.
    """
    waiting: list[list[Send | Receive]] = [
        [instruction for instruction in reversed(instructions) if isinstance(instruction, Send | Receive)]
        for instructions in lists
    ]
    at: dict[tuple[int, int], int] = {}
    arrived = [mesh for mesh in range(len(lists)) if waiting[mesh]]
    while arrived:
        mesh = arrived.pop()
        message = (waiting[mesh][-1].transfer, waiting[mesh][-1].microbatch)
        if (other := at.pop(message, None)) is None:
            at[message] = mesh
            continue
        for side in (mesh, other):
            waiting[side].pop()
            if waiting[side]:
                arrived.append(side)
    if any(waiting):
        raise deadlock({mesh: str(left[-1]) for mesh, left in enumerate(waiting) if left})


def deadlock(waits: dict[int, str]) -> ScheduleError:
    """The error for meshes that wait for each other for ever, from what each waits for."""
    where = "; ".join(f"mesh {mesh} waits to {what}" for mesh, what in sorted(waits.items()))
    return ScheduleError(f"the meshes wait for each other for ever: {where}; put these into another order")


def _fail(mesh: int, instruction: Instruction, what: str) -> None:
    raise InternalError(f"mesh {mesh}, {instruction}: {what}")
