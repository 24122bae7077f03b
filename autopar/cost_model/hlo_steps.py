"""Which instructions run, and how often, in one step of a compiled program?

Calls, loops and branches are opened into one flat list.  The trips of a ``while`` are XLA's own ``known_trip_count``
where it is printed; else the counter is run for three rounds with numbers and continued as a straight line, so a loop
whose counter is not an affine one counts once, with a note.  Of a conditional the heaviest branch counts, with a note.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost_model.hlo_parser import HloComputation, HloInstruction, HloModule
from autopar.cost_model.hlo_work import FlopCounter, instruction_bytes

COLLECTIVE_OPCODES = frozenset(
    (
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    )
)
_COLLECTIVES_AND_STARTS = COLLECTIVE_OPCODES | {f"{opcode}-start" for opcode in COLLECTIVE_OPCODES}
_TRITON_COLLECTIVE = "__triton_collective"


@dataclass(frozen=True)
class Step:
    """An instruction that costs something, where it stands, and how often it runs in one step of the program."""

    instruction: HloInstruction
    computation: HloComputation
    times: int
    fused: bool = False
    """True for a collective inside a fusion that may stand in others too."""
    started_as: str = ""
    """Of work in an ``async-start``: the name of that, which an ``async-done`` waits for."""


class _Walk:
    """Flattens loops, calls and branches into steps; of a conditional the heaviest branch is taken."""

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.notes: dict[str, None] = {}
        self.counter = FlopCounter(module)
        self._collectives = {
            computation.name: found
            for computation in module.computations.values()
            if (found := [instruction for instruction in computation.instructions if is_collective(instruction)])
        }

    def steps(self, evaluator: Evaluator, times: int) -> list[Step]:
        """Everything that one run of the evaluator's computation does, ``times`` over."""
        found: list[Step] = []
        for instruction in evaluator.computation.instructions:
            opcode = instruction.opcode
            if opcode == "while":
                found += self._loop(instruction, evaluator, times)
            elif opcode == "call":
                found += self.steps(evaluator.enter(instruction, "to_apply"), times)
            elif opcode in ("async-start", "call-start"):
                key = "calls" if "calls" in instruction.attributes else "to_apply"
                inside = self.steps(evaluator.enter(instruction, key), times)
                name = "" if is_synchronous(instruction) else instruction.name
                found += (replace(step, started_as=name) for step in inside)
            elif opcode == "conditional":
                found += self._heaviest_branch(instruction, times)
            else:
                found.append(Step(instruction, evaluator.computation, times))
                if opcode in ("fusion", "fusion-start"):
                    found += self._fused_collectives(instruction, times)
        return found

    def _loop(self, loop: HloInstruction, evaluator: Evaluator, times: int) -> list[Step]:
        trips = trip_count(loop, evaluator)
        if trips is None:
            self.notes[f"while %{loop.name}: the number of trips is not in the text, counted once"] = None
        rounds = 1 if trips is None else trips
        tests = 1 if trips is None else trips + 1
        # Inside a loop the state changes from round to round, so nothing is known of the arguments there.
        body = self.steps(Evaluator(self.module, self.module.called(loop, "body")[0]), times * rounds)
        return body + self.steps(Evaluator(self.module, self.module.called(loop, "condition")[0]), times * tests)

    def _heaviest_branch(self, instruction: HloInstruction, times: int) -> list[Step]:
        branches = [self.steps(Evaluator(self.module, branch), times) for branch in self.module.called(instruction)]

        def weight(steps: list[Step]) -> tuple[float, float, float]:
            sent = sum(step.times * operand_bytes(step) for step in steps if is_collective(step.instruction))
            computed = [step for step in steps if not is_collective(step.instruction)]
            return sent, flops_of(computed, self.counter).total(), bytes_of(computed, self.module)

        self.notes[f"conditional %{instruction.name}: the heaviest branch is counted"] = None
        return max(branches, key=weight, default=[])

    def _fused_collectives(self, instruction: HloInstruction, times: int) -> Iterator[Step]:
        """Collectives that XLA:TPU puts into fusions; the same channel shows up in several, and is one collective.

        XLA:GPU has kernels of its own for small ones, each one collective.
        """
        repeated = _TRITON_COLLECTIVE not in instruction.attributes.get("backend_config", "")
        for computation in self.module.called(instruction, "calls"):
            for inner in self._collectives.get(computation.name, ()):
                yield Step(inner, computation, times, fused=repeated)


def executed_steps(module: HloModule) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """All instructions that run, loops, calls and branches opened, and notes on what could not be told.

    Of a collective that XLA:TPU repeats inside several fusions (same channel, source and bytes) the first is kept.
    """
    walk = _Walk(module)
    steps = walk.steps(Evaluator(module, module.entry), 1)
    seen: set[tuple[str, str, int]] = set()
    kept: list[Step] = []
    for step in steps:
        if step.fused:
            # JAX gives all collectives of a shard_map the same channel, so the channel alone does not tell them apart.
            channel = step.instruction.attributes.get("channel_id", "")
            key = (channel, step.instruction.op_name, operand_bytes(step))
            if key in seen:
                continue
            seen.add(key)
        kept.append(step)
    return tuple(kept), tuple(walk.notes)


def base_opcode(instruction: HloInstruction) -> str:
    """``all-gather`` of an ``all-gather-start``."""
    return instruction.opcode.removesuffix("-start")


def is_collective(instruction: HloInstruction) -> bool:
    """Whether devices talk to each other; the ``-done`` half of a pair does not count."""
    return instruction.opcode in _COLLECTIVES_AND_STARTS


def is_synchronous(instruction: HloInstruction) -> bool:
    """Whether XLA:GPU says of the start of a collective that kernels behind it wait for its end."""
    return '"is_sync":true' in instruction.attributes.get("backend_config", "")


def operand_bytes(step: Step) -> int:
    """Bytes of what a collective sends off, all arrays together."""
    shapes = step.computation.operand_shapes(step.instruction)
    if step.instruction.opcode.startswith("collective-permute") and "slice_sizes" in step.instruction.attributes:
        shapes = shapes[:1]  # the in-place form also lists the target and the offsets
    if step.instruction.opcode.startswith("ragged-all-to-all"):
        shapes = shapes[:1]
    return sum(shape.size_bytes for shape in shapes)


def flops_of(steps: Iterable[Step], counter: FlopCounter) -> Counter[str]:
    """FLOPs of the steps by XLA dtype."""
    total: Counter[str] = Counter()
    for step in steps:
        for dtype, flops in counter.instruction(step.instruction, step.computation).items():
            total[dtype] += step.times * flops
    return total


def bytes_of(steps: Iterable[Step], module: HloModule) -> int:
    """Bytes that the steps read and write in memory."""
    return sum(step.times * instruction_bytes(step.instruction, step.computation, module) for step in steps)


_Value = int | tuple[Any, ...] | None
_ARITHMETIC: Mapping[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "negate": operator.neg,
}


class Evaluator:
    """Numbers that can be told from the text: integer scalars and tuples of them in one call of a computation."""

    def __init__(self, module: HloModule, computation: HloComputation, arguments: Sequence[_Value] = ()) -> None:
        self.module = module
        self.computation = computation
        self._arguments = tuple(arguments)
        self._known: dict[str, _Value] = {}

    def value(self, name: str) -> _Value:
        """The integer, the tuple of what is known of each part, or None."""
        if name not in self._known:
            self._known[name] = self._evaluate(self.computation.by_name[name])
        return self._known[name]

    def enter(self, instruction: HloInstruction, key: str) -> Evaluator:
        """The evaluator of the computation that the instruction calls, with the arguments that it is given."""
        arguments = [self.value(name) for name in instruction.operands]
        return Evaluator(self.module, self.module.called(instruction, key)[0], arguments)

    def _evaluate(self, instruction: HloInstruction) -> _Value:
        opcode = instruction.opcode
        if opcode == "tuple":
            return tuple(self.value(name) for name in instruction.operands)
        if opcode == "parameter":
            number = int(instruction.literal)
            return self._arguments[number] if number < len(self._arguments) else None
        if opcode == "get-tuple-element":
            parts = self.value(instruction.operands[0])
            return parts[int(instruction.attributes["index"])] if isinstance(parts, tuple) else None
        if instruction.shape.parts is not None or instruction.shape.elements != 1:
            return None
        if opcode == "constant":
            text = instruction.literal.strip("{} ")
            return int(text) if re.fullmatch(r"-?\d+", text) else None
        if opcode in ("bitcast", "convert", "copy", "reshape") and instruction.shape.dtype[0] in "su":
            return self.value(instruction.operands[0])
        if opcode in ("call", "fusion"):
            inner = self.enter(instruction, "to_apply" if opcode == "call" else "calls")
            return inner.value(inner.computation.root.name)
        if opcode in _ARITHMETIC:
            values = [self.value(name) for name in instruction.operands]
            if all(isinstance(value, int) for value in values):
                return _ARITHMETIC[opcode](*values)
        return None


def trip_count(loop: HloInstruction, evaluator: Evaluator) -> int | None:
    """How often the body of a ``while`` runs; None if the text does not tell.

    ``evaluator`` is that of the computation that holds the loop.
    """
    known = re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.attributes.get("backend_config", ""))
    if known:
        return int(known[1])
    module = evaluator.module
    condition, body = module.called(loop, "condition")[0], module.called(loop, "body")[0]
    state = evaluator.value(loop.operands[0])
    gaps: list[int] = []
    direction = ""
    for _ in range(3):
        compared = _comparison(Evaluator(module, condition, (state,)))
        if compared is None:
            return None
        direction, gap = compared
        gaps.append(gap)
        state = Evaluator(module, body, (state,)).value(body.root.name)
    if gaps[1] - gaps[0] != gaps[2] - gaps[1]:
        return None
    return _rounds(direction, gaps[0], gaps[1] - gaps[0])


def _comparison(condition: Evaluator) -> tuple[str, int] | None:
    """Direction of the comparison at the root of a condition, and left minus right."""
    root = condition.computation.root
    while root.opcode in ("call", "fusion", "copy", "bitcast"):
        if root.opcode in ("copy", "bitcast"):
            root = condition.computation.operand(root, 0)
            continue
        condition = condition.enter(root, "to_apply" if root.opcode == "call" else "calls")
        root = condition.computation.root
    if root.opcode != "compare":
        return None
    left, right = (condition.value(name) for name in root.operands)
    if not isinstance(left, int) or not isinstance(right, int):
        return None
    return root.attributes["direction"], left - right


def _rounds(direction: str, gap: int, step: int) -> int | None:
    """Smallest k ≥ 0 for which the comparison of gap + k·step with 0 fails; None if it never does."""
    if direction in ("GT", "GE"):
        return _rounds("LT" if direction == "GT" else "LE", -gap, -step)
    if direction == "EQ":
        return None if gap == 0 and step == 0 else int(gap == 0)
    if direction == "NE":
        if gap == 0:
            return 0
        return -gap // step if step and gap % step == 0 and -gap // step > 0 else None
    last = gap if direction == "LT" else gap - 1
    if last >= 0:
        return 0
    return -(last // step) if step > 0 else None
