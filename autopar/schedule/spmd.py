"""From graph and plan to one list of steps that every device of a mesh takes alike.

A buffer is (value, layout).  Each value has a *home* layout; an operator that wants another one gets it by a reshard
from the buffer at hand that is cheapest to start from; buffers made that way are kept for later consumers, so a
parameter is gathered once, however many operators use it.  A sum in two parts that nobody reads in between is made in
one: its value would be all-reduced over some axes on its way home, and over the others where it is wanted.  So are two sums
that are only added to each other, Σx + Σy = Σ(x + y), as XLA:GPU would see to it anyway.  Values with a
*copy* layout (see :mod:`autopar.intra_op.problem`) go through it.  An operator leaves its result in the layout that its
strategy implies; a reshard to the value's home follows where the two differ: that is where partial sums end.

Some inputs may lie in the memory of the host between steps, and the outputs that are their next values: ``hosted``.  They are
copied to the device before they are read, and back when they are made; which of them says who calls :func:`lower`.

The list is all that the price, the memory and the execution of a stage depend on, so all three speak of the same thing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar import _compat
from autopar.cluster import Mesh
from autopar.graph.build import BARRIER, LoopKind
from autopar.graph.ir import FactorKind, Graph, Operator, Phase, Value
from autopar.plan import Axes, Layout, Stage, Strategy
from autopar.schedule.reshard import (
    SCATTERS,
    Move,
    MoveKind,
    after_move,
    local_shape,
    moves_between,
    replicated,
    scattered,
    shares,
)

FREE_MOVES = (MoveKind.SLICE, MoveKind.MASK)

SUMS = SCATTERS | {MoveKind.ALL_REDUCE}
"""Moves that add up summands."""

ADDITIONS = frozenset(("add", "add_any"))


@dataclass(frozen=True, slots=True)
class Buffer:
    """One value in one layout."""

    value: int
    layout: Layout


@dataclass(frozen=True)
class Reshard:
    """Make ``target`` out of ``source``; ``cause`` is the operator that wants or made it (None: the program's end)."""

    source: Buffer
    target: Buffer
    moves: tuple[Move, ...]
    cause: Operator | None


@dataclass(frozen=True)
class Run:
    """Run an operator on local shards; an operand that is ``None`` is a literal."""

    operator: Operator
    strategy: Strategy
    operands: tuple[Buffer | None, ...]
    results: tuple[Buffer, ...]
    bodies: tuple[SpmdProgram, ...] = ()

    def extreme_axes(self, mesh: Mesh) -> Axes:
        """Axes over which the operator itself all-reduces its results by max or min."""
        used = {
            axis
            for axes, factor in zip(self.strategy.factors, self.operator.rule.factors, strict=True)
            if factor.kind in (FactorKind.MAX, FactorKind.MIN)
            for axis in axes
        }
        return tuple(name for name in mesh.axis_names if name in used)


Step = Reshard | Run


@dataclass(frozen=True)
class Hosted:
    """Positions of the inputs and outputs of a program that lie in the memory of the host when it does not run."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    @property
    def is_any(self) -> bool:
        """Whether there are such."""
        return bool(self.inputs or self.outputs)


NOTHING_HOSTED = Hosted()


def hosted_ends(inputs: Collection[int], state_pairs: tuple[tuple[int, int], ...]) -> Hosted:
    """These inputs, and their next values."""
    return Hosted(frozenset(inputs), frozenset(output for source, output in state_pairs if source in inputs))


@dataclass(frozen=True)
class SpmdProgram:
    """The steps of one graph on one mesh; ``outputs`` are ``None`` where the graph's output is a literal."""

    graph: Graph
    mesh: Mesh
    steps: tuple[Step, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer | None, ...]
    values: Mapping[int, Value] = field(repr=False)
    """Every value of the whole tree."""
    hosted: Hosted = NOTHING_HOSTED

    def all_steps(self) -> Iterator[tuple[Step, int]]:
        """Every step of the tree with the number of times it is taken."""
        for step in self.steps:
            yield step, self.graph.trips
            if isinstance(step, Run):
                for body in step.bodies:
                    for inner, trips in body.all_steps():
                        yield inner, trips * self.graph.trips


def local_bytes(program: SpmdProgram, buffer: Buffer) -> int:
    """Bytes of a buffer on one device."""
    value = program.values[buffer.value]
    return value.itemsize_bytes * math.prod(local_shape(value.shape, buffer.layout, program.mesh))


def rematerialises(steps: Iterable[Step]) -> bool:
    """Whether work is done again behind a barrier, the planner's (:mod:`autopar.inter_op.remat`) or ``jax.checkpoint``'s."""
    return any(
        isinstance(step, Run)
        and (step.operator.primitive == BARRIER or any(rematerialises(one.steps) for one in step.bodies))
        for step in steps
    )


def lower(graph: Graph, stage: Stage, out_layouts: Sequence[Layout], hosted: Hosted = NOTHING_HOSTED) -> SpmdProgram:
    """The steps of a whole program under a stage's plan, leaving its outputs in the given layouts."""
    values = {value.id: value for value in graph.all_values()}
    wanted = [None if value is None else layout for value, layout in zip(graph.outputs, out_layouts, strict=True)]
    return replace(_Lowering(values, stage).level(graph, wanted), hosted=hosted)


def output_layouts(graph: Graph, stage: Stage, state_pairs: tuple[tuple[int, int], ...]) -> tuple[Layout, ...]:
    """Where a step leaves its outputs: state returns to the layouts of its inputs, the rest stays at home."""
    values = {value.id: value for value in graph.all_values()}

    def home(value: int | None) -> Layout:
        return Layout(()) if value is None else stage.home(value, len(values[value].shape))

    layouts = [home(value) for value in graph.outputs]
    for source, output in state_pairs:
        layouts[output] = home(graph.inputs[source])
    return tuple(layouts)


class _Lowering:
    """Owns what does not change from level to level."""

    def __init__(self, values: Mapping[int, Value], stage: Stage) -> None:
        self._values = values
        self._stage = stage

    def home(self, value: int) -> Layout:
        return self._stage.home(value, len(self._values[value].shape))

    def level(self, graph: Graph, wanted: Sequence[Layout | None]) -> SpmdProgram:
        level = _Level(self._values, self._stage, graph)
        for operator in graph.operators:
            if operator.bodies:
                self._loop(level, operator)
            else:
                level.run(operator, self._stage.strategy(operator))
        outputs = tuple(
            None if value is None or layout is None else level.obtain(value, layout, None)
            for value, layout in zip(graph.outputs, wanted, strict=True)
        )
        inputs = tuple(Buffer(value, self.home(value)) for value in graph.inputs)
        steps = _added_first(_read_by_some(level.steps, outputs), outputs, self._stage.mesh)
        steps = _sums_at_once(steps, outputs, self._stage.mesh)
        return SpmdProgram(graph, self._stage.mesh, tuple(steps), inputs, outputs, self._values)

    def _loop(self, level: _Level, operator: Operator) -> None:
        """A loop or branch: operands in the layouts of the bodies' inputs, results as the bodies leave them."""
        operand_layouts, result_layouts, body_outputs = self._border(operator)
        operands = tuple(
            None if value is None else level.obtain(value, layout, operator)
            for value, layout in zip(operator.operands, operand_layouts, strict=True)
        )
        bodies = tuple(self.level(body, wanted) for body, wanted in zip(operator.bodies, body_outputs, strict=True))
        results = tuple(Buffer(v, layout) for v, layout in zip(operator.results, result_layouts, strict=True))
        level.record(Run(operator, Strategy(()), operands, results, bodies))

    def _border(self, operator: Operator) -> tuple[list[Layout], list[Layout], list[list[Layout | None]]]:
        """Layouts of a loop's operands and results outside, and of its bodies' outputs inside."""
        params = operator.equation.params

        def homes(values: tuple[int | None, ...]) -> list[Layout]:
            return [Layout(()) if value is None else self.home(value) for value in values]

        match operator.primitive:
            case LoopKind.SCAN:
                (body,) = operator.bodies
                consts, carries = _compat.scan_arity(params)
                inside, leaving = homes(body.inputs), homes(body.outputs)
                kept = inside[: consts + carries]
                carry = inside[consts : consts + carries]
                sliced = [_stacked(layout) for layout in inside[consts + carries :]]
                pieces = [
                    layout if value is not None else replicated(len(self._values[result].shape) - 1)
                    for value, layout, result in zip(
                        body.outputs[carries:], leaving[carries:], operator.results[carries:], strict=True
                    )
                ]
                return kept + sliced, carry + [_stacked(layout) for layout in pieces], [[*carry, *pieces]]
            case LoopKind.WHILE:
                condition, body = operator.bodies
                split, consts = params["cond_nconsts"], params["body_nconsts"]
                carry = homes(body.inputs[consts:])
                outside = homes(condition.inputs[:split]) + homes(body.inputs[:consts]) + carry
                return outside, carry, [[Layout(())], list(carry)]
            case _:
                inside = homes(operator.bodies[0].inputs)
                results = [self.home(result) for result in operator.results]
                return [Layout(()), *inside], results, [list(results) for _ in operator.bodies]


def _read_by_some(steps: Sequence[Step], outputs: Sequence[Buffer | None]) -> list[Step]:
    """The steps without the copies from which, in the end, nobody started."""
    needed = set(outputs)
    found: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Run):
            needed.update(step.operands)
        elif step.target in needed:
            needed.add(step.source)
        else:
            continue
        found.append(step)
    return found[::-1]


def _reads(steps: Sequence[Step], outputs: Sequence[Buffer | None]) -> Counter[Buffer | None]:
    """How often each buffer is read, the program's end included."""
    reads: Counter[Buffer | None] = Counter(outputs)
    for step in steps:
        reads.update((step.source,) if isinstance(step, Reshard) else step.operands)
    return reads


def _added_first(steps: Sequence[Step], outputs: Sequence[Buffer | None], mesh: Mesh) -> list[Step]:
    """The steps with summands added before they are summed up, where two sums are only added to each other."""
    reads = _reads(steps, outputs)
    found: list[Step | None] = []
    sums: dict[Buffer | None, int] = {}
    for step in steps:
        if isinstance(step, Run) and step.operator.primitive in ADDITIONS and all(one in sums for one in step.operands):
            places = [sums[operand] for operand in step.operands]
            first, second = (found[place] for place in places)
            assert isinstance(first, Reshard) and isinstance(second, Reshard)
            if first.moves == second.moves and first.source.layout == second.source.layout:
                for place in places:
                    found[place] = None
                added = _on_summands(step, (first.source, second.source), mesh)
                found.append(added)
                step = Reshard(added.results[0], step.results[0], first.moves, step.operator)
        if isinstance(step, Reshard) and _sums_up(step) and reads[step.target] == 1:
            sums[step.target] = len(found)
        found.append(step)
    return [step for step in found if step is not None]


def _sums_up(step: Reshard) -> bool:
    """Whether a reshard is one sum over devices and nothing else."""
    return len(step.moves) == 1 and step.moves[0].kind in SUMS


def _on_summands(step: Run, operands: tuple[Buffer, Buffer], mesh: Mesh) -> Run:
    """An addition of two arrays, of their summands instead."""
    layout = operands[0].layout
    factors = tuple(tuple(axis for axis in axes if axis not in layout.partial) for axes in step.strategy.factors)
    return Run(step.operator, Strategy(factors, layout.partial), operands, (Buffer(step.results[0].value, layout),))


def _sums_at_once(steps: Sequence[Step], outputs: Sequence[Buffer | None], mesh: Mesh) -> list[Step]:
    """The steps with every all-reduce that only another one reads made one with it, where the first stood."""
    reads = _reads(steps, outputs)
    found: list[Step] = []
    place: dict[Buffer, int] = {}
    for step in steps:
        if isinstance(step, Reshard):
            if reads[step.source] == 1 and (number := place.pop(step.source, None)) is not None:
                before = found[number]
                assert isinstance(before, Reshard)
                if before.moves[-1].kind is step.moves[0].kind is MoveKind.ALL_REDUCE:
                    axes = {*before.moves[-1].axes, *step.moves[0].axes}
                    whole = Move(MoveKind.ALL_REDUCE, tuple(name for name in mesh.axis_names if name in axes))
                    moves = (*before.moves[:-1], whole, *step.moves[1:])
                    found[number] = Reshard(before.source, step.target, moves, before.cause)
                    place[step.target] = number
                    continue
            place[step.target] = len(found)
        found.append(step)
    return found


def _stacked(layout: Layout) -> Layout:
    return Layout(((), *layout.dims), layout.partial)


class _Level:
    """Owns the growing list of steps of one graph, and which buffers exist."""

    def __init__(self, values: Mapping[int, Value], stage: Stage, graph: Graph) -> None:
        self._values = values
        self._stage = stage
        self._inputs = frozenset(graph.inputs)
        self._at_hand: dict[int, list[Buffer]] = {}
        self.steps: list[Step] = []
        for value in graph.inputs:
            self._at_hand[value] = [Buffer(value, self._home(value))]
        for value in graph.constants:
            self._at_hand[value] = [Buffer(value, replicated(len(values[value].shape)))]

    def _home(self, value: int) -> Layout:
        return self._stage.home(value, len(self._values[value].shape))

    def run(self, operator: Operator, strategy: Strategy) -> None:
        mesh = self._stage.mesh
        operands = tuple(
            None if value is None else self.obtain(value, strategy.operand(operator.rule, position, mesh), operator)
            for position, value in enumerate(operator.operands)
        )
        results = tuple(
            Buffer(value, strategy.result(operator.rule, position, mesh))
            for position, value in enumerate(operator.results)
        )
        self.record(Run(operator, strategy, operands, results))

    def record(self, step: Run) -> None:
        """Append a step and bring its results home."""
        self.steps.append(step)
        for made in step.results:
            self._at_hand[made.value] = [made]
            home = Buffer(made.value, self._home(made.value))
            if home != made:
                self._reshard(made, home, step.operator)
                self._at_hand[made.value] = [home]

    def obtain(self, value: int, layout: Layout, cause: Operator | None) -> Buffer:
        """A buffer of the value in the layout: one at hand, or made from the cheapest to start from."""
        wanted = Buffer(value, layout)
        if wanted in self._at_hand[value]:
            return wanted
        copy = self._stage.copies.get(value)
        updates_state = cause is None or (cause.phase is Phase.UPDATE and value in self._inputs)
        if copy is not None and not updates_state and copy != layout:
            self._make(value, Buffer(value, copy), cause)
        self._make(value, wanted, cause)
        return wanted

    def _make(self, value: int, wanted: Buffer, cause: Operator | None) -> None:
        if wanted in self._at_hand[value]:
            return
        copy = self._stage.copies.get(value)
        source = min(
            self._at_hand[value],
            key=lambda buffer: (
                self._weight(buffer, wanted.layout),
                buffer.layout != copy,
            ),  # the plan's way, of equals
        )
        self._reshard(source, wanted, cause)
        self._at_hand[value].append(wanted)

    def _weight(self, source: Buffer, target: Layout) -> float:
        """Share of the array on the wire between two layouts (latency as a small constant per collective)."""
        mesh = self._stage.mesh
        total, layout = 0.0, source.layout
        for move in moves_between(self._values[source.value].shape, layout, target, mesh):
            if move.kind not in FREE_MOVES:
                pieces = mesh.axis_size(*move.axes)
                factor = {MoveKind.ALL_GATHER: pieces - 1.0, MoveKind.ALL_REDUCE: 2.0}.get(move.kind, 1.0)
                total += factor / shares(layout, mesh) + 1e-6
            layout = after_move(layout, move, mesh)
        return total

    def _reshard(self, source: Buffer, target: Buffer, cause: Operator | None) -> None:
        shape = self._values[source.value].shape
        moves = moves_between(shape, source.layout, target.layout, self._stage.mesh)
        made = tuple(scattered(move, self._stage.sum_scatter) for move in moves)
        self.steps.append(Reshard(source, target, made, cause))
