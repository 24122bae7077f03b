"""From the one list of steps of a stage to its executables: which steps each runs, what it reads and what it leaves.

The list that :func:`autopar.schedule.spmd.lower` makes of a stage's program is cut where its parts meet:

    steps before the loop │ steps of the loop's body: forward │ backward │ steps after it: segment 0 │ 1 │ …

Where a schedule splits the backward pass, its steps that lead to what other stages are sent stay BACKWARD, and the others, which
end in accumulators, are WEIGHT.  A step is not taken apart: a loop over layers makes the gradients of its input and of its
weights together.  A stage of which nothing that costs much would be left for WEIGHT is not split.

Large parameters that the forward pass gathers for a microbatch are gathered again by its backward pass, and not kept till then.

An array that one executable leaves for another has a *place*: made once in a step, once per microbatch, or an accumulator,
which one executable takes and gives back increased, microbatch after microbatch.  A partial sum may cross from executable to
executable of its stage as it is, each device keeping its summand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from autopar import _compat
from autopar.graph.build import LoopKind
from autopar.graph.fusion import PRODUCTS
from autopar.graph.ir import Operator
from autopar.schedule.instructions import Part
from autopar.schedule.spmd import NOTHING_HOSTED, Buffer, Hosted, Reshard, Run, SpmdProgram, Step, local_bytes
from autopar.schedule.stage_program import Passing, StageProgram

MADE_AGAIN_BYTES = 1 << 20
"""From so many bytes on a device on, what a parameter is moved to for the forward pass is not kept for the backward pass."""


class Scope(Enum):
    """How often an array of a place is there in a step."""

    ONCE = "once"
    MICROBATCH = "microbatch"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies between executables of one stage; ``number`` is that of the accumulator, for SUM."""

    scope: Scope
    buffer: Buffer
    number: int = -1


@dataclass(frozen=True, slots=True)
class Argument:
    """An array that an executable reads as ``buffer``; with ``is_stacked`` from the places of all microbatches at once."""

    buffer: Buffer
    place: Place
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """An array that an executable leaves in a place: a buffer that its steps make, or a literal of the program."""

    place: Place
    buffer: Buffer | None
    literal: Any = None


@dataclass(frozen=True)
class Executable:
    """Some steps of a stage: one call reads ``arguments`` and leaves ``results``."""

    part: Part
    segment: int
    program: SpmdProgram
    steps: tuple[Step, ...]
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    donations: tuple[tuple[int, int], ...] = ()
    """(argument, result) positions: the result takes the memory of the argument, an accumulator or a leaf of the state."""
    hosted: Hosted = NOTHING_HOSTED
    """Arguments and results that lie in the memory of the host (:mod:`autopar.schedule.residuals`)."""

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions of arguments whose memory results take over."""
        return tuple(argument for argument, _ in self.donations)


@dataclass(frozen=True)
class Slices:
    """The executables of a stage, and where what comes from outside and goes outside lies.

    ``inputs`` and ``outputs`` run parallel to those of the stage's program; an output is None where it is a literal. A row of
    a batch leaf, or the number of the microbatch, is an input of its own: ``rows`` are (input, or None for the number; place).
    """

    program: SpmdProgram
    executables: tuple[Executable, ...]
    inputs: tuple[Place, ...]
    outputs: tuple[Place | None, ...]
    rows: tuple[tuple[int | None, Place], ...]

    def executable(self, part: Part, segment: int = 0) -> Executable | None:
        """The executable of a part, if the stage has one."""
        return next((one for one in self.executables if one.part is part and one.segment == segment), None)


def slices_of(
    stage: StageProgram, program: SpmdProgram, *, donates_state: bool = True, splits_backward: bool = False
) -> Slices:
    """Cut the steps of a lowered stage into executables; with ``splits_backward`` those of weights apart, where possible."""
    return _Slicing(stage, program, donates_state, splits_backward).make()


class _Slicing:
    """Owns the places of the arrays of one stage."""

    def __init__(self, stage: StageProgram, program: SpmdProgram, donates_state: bool, splits_backward: bool) -> None:
        self._stage, self._program, self._splits_backward = stage, program, splits_backward
        self._donated_pairs = stage.state_pairs if donates_state else ()
        loop = program.graph.operators[stage.loop]
        assert loop.primitive == LoopKind.SCAN
        self._at = next(k for k, s in enumerate(program.steps) if isinstance(s, Run) and s.operator is loop)
        run = program.steps[self._at]
        assert isinstance(run, Run)
        self._run = run
        self._body = run.bodies[0]
        self._consts, self._carries = _compat.scan_arity(loop.equation.params)
        self._inside: dict[Buffer, Place] = {}
        self._outside: dict[Buffer, Argument] = {}
        self._starts: list[Result] = []
        """What the loop begins with: first values of accumulators, and literals that it reads."""

    def make(self) -> Slices:
        program = self._program
        for buffer in program.inputs:
            self._outside[buffer] = Argument(buffer, Place(Scope.ONCE, buffer))
        rows, micro_inputs = self._place_loop()
        micro_outputs = self._place_results()
        forward, backward = self._passes()
        before = program.steps[: self._at]
        late = self._late_steps()
        wanted: set[Buffer] = {b for buffers in late.values() for b in _reads(buffers)}
        wanted |= {buffer for buffer in program.outputs if buffer is not None}
        wanted |= {buffer for buffer in self._run.operands[: self._consts] if buffer is not None}
        executables = [self._before(before, wanted)]
        leaving = {buffer for buffer in self._body.outputs if buffer is not None}
        executables.append(self._executable(Part.FORWARD, 0, forward, leaving | (_reads(backward) - _made(backward))))
        sent = {place.buffer for place in micro_outputs.values()}
        backward, weight = self._split(backward, sent) if self._splits_backward else (backward, ())
        executables.append(self._executable(Part.BACKWARD, 0, backward, leaving | _reads(weight)))
        executables.append(self._executable(Part.WEIGHT, 0, weight, leaving))
        later: set[Buffer] = {buffer for buffer in program.outputs if buffer is not None}
        late_made = []
        for segment in sorted(late, reverse=True):
            late_made.append(self._executable(Part.AFTER, segment, late[segment], later))
            later = later | _reads(late[segment])
        executables += late_made[::-1]
        outputs = tuple(
            micro_outputs.get(number, None if buffer is None else self._outside[buffer].place)
            for number, buffer in enumerate(program.outputs)
        )
        inputs = tuple(
            micro_inputs.get(number, self._outside[buffer].place) for number, buffer in enumerate(program.inputs)
        )
        handed_out = frozenset(outputs)
        donated = [
            self._with_donations(one, inputs, outputs, handed_out) for one in executables if one.steps or one.results
        ]
        return Slices(program, tuple(donated), inputs, outputs, rows)

    # --- places ---

    def _place_loop(self) -> tuple[tuple[tuple[int | None, Place], ...], dict[int, Place]]:
        """Say where the inputs of the loop's body lie; returns rows of batch leaves, and places of what is received."""
        stage, program = self._stage, self._program
        position_of = {buffer.value: number for number, buffer in enumerate(program.inputs)}
        rows: list[tuple[int | None, Place]] = []
        received: dict[int, Place] = {}
        atoms = self._run.operator.equation.invars
        for number, (inner, outer) in enumerate(zip(self._body.inputs, self._run.operands, strict=True)):
            if number < self._consts:
                self._inside[inner] = Place(Scope.ONCE, outer or inner)
            elif number < self._consts + self._carries:
                self._inside[inner] = Place(Scope.SUM, inner, number - self._consts)
                if outer is not None:
                    self._starts.append(Result(self._inside[inner], outer))
            if outer is None:
                self._starts.append(Result(self._inside[inner], None, atoms[number]))
            elif number >= self._consts + self._carries:
                self._inside[inner] = place = Place(Scope.MICROBATCH, inner)
                source = position_of.get(outer.value)
                if source is not None and stage.inputs[source].crossing is not None:
                    received[source] = place
                else:
                    rows.append((source, place))
        return tuple(rows), received

    def _place_results(self) -> dict[int, Place]:
        """Say where the loop's results lie; returns the places of what is sent microbatch by microbatch, by output."""
        program, body = self._program, self._body
        sent = {
            atom: number
            for number, (atom, end) in enumerate(zip(program.graph.outputs, self._stage.outputs, strict=True))
            if end.crossing is not None and end.crossing.passing is Passing.MICRO
        }
        found: dict[int, Place] = {}
        for number, (inner, outer) in enumerate(zip(body.outputs, self._run.results, strict=True)):
            assert inner is not None
            if number < self._carries:
                place = Place(Scope.SUM, body.inputs[self._consts + number], number)
                self._outside[outer] = Argument(outer, place)
                continue
            place = self._inside.setdefault(inner, Place(Scope.MICROBATCH, inner))
            self._outside[outer] = Argument(outer, place, is_stacked=True)
            if outer.value in sent:
                found[sent[outer.value]] = place
        return found

    # --- steps ---

    def _passes(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        parts = dict(zip((o.id for o in self._body.graph.operators), self._stage.parts, strict=True))
        steps = _once(self._body.steps, self._body.inputs)
        split = _first(steps, lambda cause: parts[cause.id] is Part.BACKWARD)
        forward, rest = list(steps[:split]), steps[split:]
        known = _made(forward) | set(self._body.inputs)
        backward: list[Step] = []
        for step in rest:  # what brings a result of the forward pass to its end
            is_forward = isinstance(step, Reshard) and step.cause is None and step.source in known
            (forward if is_forward else backward).append(step)
        return tuple(forward), tuple(self._with_moves_again(forward, backward))

    def _with_moves_again(self, forward: Sequence[Step], backward: Sequence[Step]) -> Iterator[Step]:
        """The backward pass with the moves of large parameters that the forward pass made as well, each where it is needed.

        Kept from one pass to the other, a parameter that was gathered would lie there once for every microbatch in flight.
        """
        there, again = set(self._body.inputs[: self._consts]), dict[Buffer, Reshard]()
        for step in forward:
            if isinstance(step, Reshard) and step.source in there:
                there.add(step.target)
                if local_bytes(self._body, step.target) >= MADE_AGAIN_BYTES:
                    again[step.target] = step
        for step in backward:
            moves: list[Step] = []
            for buffer in _in_order(step):
                while (move := again.pop(buffer, None)) is not None:
                    moves.append(move)
                    buffer = move.source
            yield from moves[::-1]
            yield step

    def _split(self, backward: tuple[Step, ...], sent: set[Buffer]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """The steps of a backward pass that lead to what is sent (or call the host), and the others, if these cost anything."""
        needed, critical = set(sent), set()
        for number in range(len(backward) - 1, -1, -1):
            step = backward[number]
            has_effects = isinstance(step, Run) and bool(step.operator.equation.effects)
            if has_effects or not needed.isdisjoint(_written(step)):
                critical.add(number)
                needed |= _read(step)
        rest = tuple(step for number, step in enumerate(backward) if number not in critical)
        if not any(isinstance(step, Run) and _is_heavy(step.operator) for step in rest):
            return backward, ()
        return tuple(step for number, step in enumerate(backward) if number in critical), rest

    def _late_steps(self) -> dict[int, tuple[Step, ...]]:
        graph = self._program.graph
        after = graph.operators[self._stage.loop + 1 :]
        segment_of = dict(zip((o.id for o in after), self._stage.segments, strict=True))
        there: dict[Buffer, int] = {}
        found: dict[int, list[Step]] = {}
        for end, buffer in zip(self._stage.inputs, self._program.inputs, strict=True):
            if end.crossing is not None and end.crossing.passing is Passing.LATE:
                there[buffer] = end.crossing.segment + 1
        for step in _once(self._program.steps[self._at + 1 :], self._run.results):
            cause = step.operator if isinstance(step, Run) else step.cause
            segment = 0 if cause is None else segment_of.get(cause.id, 0)
            segment = max([segment, *(there.get(buffer, 0) for buffer in _read(step))])
            there.update(dict.fromkeys(_written(step), segment))
            found.setdefault(segment, []).append(step)
        return {segment: tuple(steps) for segment, steps in found.items()}

    def _before(self, steps: tuple[Step, ...], wanted: set[Buffer]) -> Executable:
        """What runs before the loop: accumulators get their first values, each an array of its own."""
        starts = {start.buffer for start in self._starts if start.buffer is not None}
        one = self._executable(Part.BEFORE, 0, steps, wanted | starts)
        made = [result for result in one.results if result.buffer in wanted]
        there = {argument.buffer for argument in one.arguments} | _made(one.steps)
        given = [buffer for buffer in starts if buffer not in there]
        arguments = (*one.arguments, *(self._argument(buffer, inner=False) for buffer in given))
        return replace(one, arguments=arguments, results=(*made, *self._starts))

    def _executable(self, part: Part, segment: int, steps: tuple[Step, ...], wanted: set[Buffer]) -> Executable:
        """The steps that what is wanted needs, with what they read and what they leave."""
        kept: list[Step] = []
        needed = set(wanted)
        for step in reversed(steps):
            has_effects = isinstance(step, Run) and bool(step.operator.equation.effects)
            if has_effects or not needed.isdisjoint(_written(step)):
                kept.append(step)
                needed |= _read(step)
        kept.reverse()
        made = _made(kept)
        reads = list(dict.fromkeys(buffer for step in kept for buffer in _in_order(step) if buffer not in made))
        inner = part.per_microbatch
        arguments = tuple(self._argument(buffer, inner) for buffer in reads)
        leaves = [b for b in dict.fromkeys(b for step in kept for b in _written(step)) if b in wanted]
        results = [Result(self._result(buffer, inner), buffer) for buffer in leaves]
        if inner:
            results = self._with_sums(results)
        return Executable(part, segment, self._body if inner else self._program, tuple(kept), arguments, tuple(results))

    def _argument(self, buffer: Buffer, inner: bool) -> Argument:
        if inner:
            return Argument(buffer, self._inside.setdefault(buffer, Place(Scope.MICROBATCH, buffer)))
        return self._outside.setdefault(buffer, Argument(buffer, Place(Scope.ONCE, buffer)))

    def _result(self, buffer: Buffer, inner: bool) -> Place:
        if inner:
            return self._inside.setdefault(buffer, Place(Scope.MICROBATCH, buffer))
        return self._outside.setdefault(buffer, Argument(buffer, Place(Scope.ONCE, buffer))).place

    def _with_sums(self, results: list[Result]) -> list[Result]:
        """The new value of an accumulator lies where the old one lay."""
        numbers: dict[Buffer | None, list[int]] = {}
        for number, new in enumerate(self._body.outputs[: self._carries]):
            numbers.setdefault(new, []).append(number)
        placed = []
        for result in results:
            own = numbers.get(result.buffer, ())
            placed += [replace(result, place=Place(Scope.SUM, self._body.inputs[self._consts + k], k)) for k in own]
            if not own or result.buffer in self._body.outputs[self._carries :]:
                placed.append(result)
        return placed

    def _with_donations(
        self, one: Executable, inputs: Sequence[Place], outputs: Sequence[Place | None], handed_out: Set[Place | None]
    ) -> Executable:
        """Accumulators are increased in place; a leaf's next value takes the leaf's memory where it is made.

        A leaf that the step hands out as it came keeps its memory.
        """
        argument_of = {argument.place: k for k, argument in enumerate(one.arguments) if not argument.is_stacked}
        result_of = {result.place: k for k, result in enumerate(one.results)}
        taken = {argument_of[p]: k for p, k in result_of.items() if p.scope is Scope.SUM and p in argument_of}
        for source, output in self._donated_pairs:
            leaf, new = inputs[source], outputs[output]
            if leaf in handed_out:
                continue
            if new in result_of and leaf in argument_of and leaf.buffer.layout == new.buffer.layout:
                taken.setdefault(argument_of[leaf], result_of[new])
        return replace(one, donations=tuple(sorted(taken.items())))


def _is_heavy(operator: Operator) -> bool:
    """Whether an operator is a product or a loop."""
    return operator.primitive in PRODUCTS or bool(operator.bodies)


def _once(steps: Sequence[Step], known: Iterable[Buffer]) -> tuple[Step, ...]:
    """The steps without those that make again what was there: one array would lie in one place twice."""
    there, kept = set(known), []
    for step in steps:
        if not (isinstance(step, Reshard) and step.target in there):
            kept.append(step)
            there.update(_written(step))
    return tuple(kept)


def _first(steps: Sequence[Step], is_meant: Any) -> int:
    """Number of the first step whose operator is meant, or how many there are."""
    for number, step in enumerate(steps):
        cause: Operator | None = step.operator if isinstance(step, Run) else step.cause
        if cause is None or is_meant(cause):
            return number
    return len(steps)


def _in_order(step: Step) -> list[Buffer]:
    if isinstance(step, Reshard):
        return [step.source]
    return [buffer for buffer in step.operands if buffer is not None]


def _read(step: Step) -> set[Buffer]:
    return set(_in_order(step))


def _written(step: Step) -> tuple[Buffer, ...]:
    return (step.target,) if isinstance(step, Reshard) else step.results


def _reads(steps: Iterable[Step]) -> set[Buffer]:
    return {buffer for step in steps for buffer in _in_order(step)}


def _made(steps: Iterable[Step]) -> set[Buffer]:
    return {buffer for step in steps for buffer in _written(step)}
