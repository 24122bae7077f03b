"""How many bytes pass between two stages, for every position at which the forward pass may be cut once?

With a single cut before forward operator p there are two stages, and :mod:`autopar.inter_op.placing` puts everything on
the second one up to some p and on the first one from there on.  So an operator, or the making of a value, is described by
one number, its *turn* t, and where a value is at hand or wanted by an interval (a, b):

    it stands on stage 1            ⇔  p ≤ t                 forward operator i: t = i
    it is at hand on stage 1 (0)    ⇔  p ≤ b  (p > a)        b, a: the largest and smallest turn among its maker and readers

The rule for a backward operator, the last common stage that its bound allows, is then a formula in turns,

    t = min(bound, max(min b, min(max a, b of its largest operand)))         over its operands from the forward pass

and a value made at turn m and wanted at (a, b) crosses forwards for m < p ≤ b and backwards for a < p ≤ m.  One pass over
the program finds the turns, one pass back over it the wants, and differences along p sum up the bytes: O(program).

With several cuts the bytes at one of them are an estimate: a value that skips a stage is counted at each cut that it jumps,
though it travels once, and backward operators may find another common stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar import _compat
from autopar.graph.build import BARRIER
from autopar.graph.ir import Graph, Operator, Phase
from autopar.inter_op.looped import Looped
from autopar.inter_op.placing import SMALL_BYTES, anchored
from autopar.inter_op.stage_body import summands
from autopar.inter_op.stage_update import COMBINES
from autopar.schedule.spmd import ADDITIONS

Span = tuple[int, int]

NEVER = -1
"""The turn of what stands on stage 0 wherever the cut is."""


@dataclass(frozen=True)
class Boundaries:
    """What a cut before each forward operator p = 0 … F means for one microbatch.

    ``crossing_bytes[p]``, float64 (F+1,): bytes that cross in both directions; what crosses once per step counts by its
    share in a microbatch. ``flops[i]``, float64 (F,): of forward operator i and all backward operators that a cut puts on
    stage 1 exactly when it puts i there. ``shared_bytes[p]``, float64 (F+1,): of batch leaves that both stages read.
    """

    crossing_bytes: NDArray[np.float64]
    flops: NDArray[np.float64]
    shared_bytes: NDArray[np.float64]


def boundaries(loop: Looped, state_pairs: Sequence[tuple[int, int]]) -> Boundaries:
    """Bytes and work along the forward pass; ``state_pairs`` as for :func:`autopar.inter_op.cut.cut`."""
    turns = _Turns(loop)
    total = _Total(turns.count)
    wants = _microbatch(loop, turns, total)
    _Step(loop, turns, total, wants).count(dict(state_pairs))
    flops = np.zeros(turns.count)
    for operator in loop.body.operators:
        if (turn := turns.turn.get(operator.id)) is not None:
            flops[min(max(turn, 0), turns.count - 1)] += _flops(operator)
    shared = _Total(turns.count)
    rows = {loop.graph.inputs[position] for position in loop.batch}
    for value, operand in zip(loop.body.inputs, loop.loop.operands, strict=True):
        if operand in rows and value in wants.spans:
            shared.add(*wants.spans[value], loop.body.values[value].size_bytes)
    return Boundaries(total.bytes(), flops, shared.bytes())


def _flops(operator: Operator) -> float:
    inner = (one.flops * trips for body in operator.bodies for one, trips in body.all_operators())
    return operator.flops + sum(inner)


class _Total:
    """Owns the bytes by position, as differences."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._change = np.zeros(count + 2)

    def add(self, after: int, last: int, size: float) -> None:
        """Bytes that cross at positions after < p ≤ last; nothing if there are none."""
        if after < last:
            self._change[after + 1] += size
            self._change[last + 1] -= size

    def cross(self, made: int, wanted: Span, size: float) -> None:
        """A value made at a turn, and wanted from the second turn to the first."""
        self.add(made, wanted[1], size)
        self.add(wanted[0], made, size)

    def bytes(self) -> NDArray[np.float64]:
        """By position, 0 … F."""
        return np.maximum(np.cumsum(self._change)[: self._count + 1], 0.0)


class _Wants:
    """Owns where values are wanted."""

    def __init__(self) -> None:
        self.spans: dict[int, Span] = {}

    def want(self, value: int | None, span: Span) -> None:
        """A value is wanted at all turns of a span."""
        if value is not None:
            known = self.spans.get(value)
            self.spans[value] = span if known is None else (min(known[0], span[0]), max(known[1], span[1]))

    def of(self, values: Iterable[int]) -> Span | None:
        """Where any of some values is wanted."""
        return _hull([self.spans[v] for v in values if v in self.spans])


def _hull(spans: Sequence[Span]) -> Span | None:
    return (min(a for a, _ in spans), max(b for _, b in spans)) if spans else None


# --------------------------------------------------------------------------------------------------- where things stand


class _Turns:
    """The turns of a body's anchored operators and of their results: ``placing`` for every single cut at once."""

    def __init__(self, loop: Looped) -> None:
        self._body: Graph = loop.body
        self._anchored, self._heavy = anchored(loop)
        self.turn: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.made_by_operator: set[int] = set()
        """Values that an operator with a turn makes: all that are made, but not results of barriers."""
        self._at: dict[int, Span] = {}
        self._is_backward: set[int] = set()
        for operator in self._body.operators:
            if operator.id in self._anchored and operator.phase is Phase.FORWARD:
                self.turn[operator.id] = len(self.turn)
        self.count = len(self.turn)
        self._place_forward()
        for operator in self._body.operators:
            if operator.id in self.turn:
                continue
            if operator.id not in self._anchored:
                self._follow_operands(operator)
            elif operator.primitive == BARRIER:
                self._place_barrier(operator)
            else:
                self._place(operator)

    def _place_forward(self) -> None:
        """Where the forward pass has its values and parameters, and what these are cloned from."""
        at = _Wants()
        for operator in reversed(self._body.operators):
            turn = self.turn.get(operator.id)
            if turn is not None:
                span: Span | None = (turn, turn)
                self.made_by_operator.update(operator.results)
                for result in operator.results:
                    self.made[result] = turn
                    at.want(result, (turn, turn))
            elif operator.id in self._anchored:
                continue
            else:
                span = at.of(operator.results)
            if span is not None:
                for operand in operator.operands:
                    if operand in self._heavy:
                        at.want(operand, span)
        self._at = at.spans

    def _follow_operands(self, operator: Operator) -> None:
        spans = [self._at[v] for v in operator.operands if v in self._heavy and v in self._at]
        if spans:
            common = _common(spans, spans[0])
            for result in operator.results:
                self._at.setdefault(result, common)

    def _place_barrier(self, operator: Operator) -> None:
        for operand, result in zip(operator.operands, operator.results, strict=True):
            if operand in self._is_backward:
                self._is_backward.add(result)
            if operand in self._at:
                self._at[result] = self._at[operand]
            if operand in self.made:
                self.made[result] = self.made[operand]

    def _place(self, operator: Operator) -> None:
        operands = [v for v in operator.operands if v is not None]
        bounds = [self.made[v] for v in operands if v in self._is_backward]
        from_forward = [v for v in operands if v not in self._is_backward and v in self._at]
        if operator.phase is not Phase.BACKWARD and not bounds:
            turn = max((self.made[v] for v in from_forward if v in self.made), default=NEVER)
        else:
            turn = min(bounds, default=self.count)
            if from_forward:
                largest = max(from_forward, key=lambda v: self._body.values[v].size_bytes)
                turn = min(turn, _common([self._at[v] for v in from_forward], self._at[largest])[1])
            self._is_backward.update(operator.results)
        self.turn[operator.id] = turn
        self.made_by_operator.update(operator.results)
        for result in operator.results:
            self.made[result] = turn
            low, high = self._at.get(result, (turn, turn))
            self._at[result] = (min(low, turn), max(high, turn))


def _common(spans: Sequence[Span], fallback: Span) -> Span:
    """Where all are at hand; for cuts at which that is nowhere, where ``fallback``, one of them, is."""
    first, last = max(a for a, _ in spans), min(b for _, b in spans)
    return min(first, max(last, fallback[0])), max(last, min(first, fallback[1]))


# ------------------------------------------------------------------------------------------------------- one microbatch


def _microbatch(loop: Looped, turns: _Turns, total: _Total) -> _Wants:
    """Count what crosses in a microbatch; where its values and inputs are wanted is returned."""
    wants = _Wants()
    dropped = _want_results(loop, turns, wants)
    for operator in reversed(loop.body.operators):
        if operator.id in dropped:
            continue
        if operator.primitive == BARRIER:
            for operand, result in zip(operator.operands, operator.results, strict=True):
                if result in wants.spans:
                    wants.want(operand, wants.spans[result])
        elif (span := _runs_at(operator, turns, wants)) is not None:
            for operand in operator.operands:
                wants.want(operand, span)
    for value, span in wants.spans.items():
        if value in turns.made_by_operator:
            total.cross(turns.made[value], span, loop.body.values[value].size_bytes)
    return wants


def _want_results(loop: Looped, turns: _Turns, wants: _Wants) -> set[int]:
    """Want what the loop returns; operators that only add up what several stages contribute are returned."""
    dropped: set[int] = set()
    for add, chain, parts in summands(loop, turns.turn):
        if chain:
            dropped |= {add.id} | chain
            home = min((turns.made[part] for part in parts if part in turns.made), default=NEVER)
            for part in parts:
                own = turns.made.get(part, home)
                wants.want(part, (own, own))
        elif add.id not in turns.turn:
            wants.want(add.results[0], (NEVER, NEVER))
    for value in loop.body.outputs[_compat.scan_arity(loop.loop.equation.params)[1] :]:
        own = NEVER if value is None else turns.made.get(value, NEVER)
        wants.want(value, (own, own))
    return dropped


def _runs_at(operator: Operator, turns: _Turns, wants: _Wants) -> Span | None:
    """Where an operator runs: on its stage, or, if it has none, where its results are wanted; effects on the first."""
    turn = turns.turn.get(operator.id)
    if turn is not None:
        return turn, turn
    span = wants.of(operator.results)
    if operator.equation.effects:
        return NEVER, NEVER if span is None else span[1]
    return span


# ------------------------------------------------------------------------------------------------------------ once a step


@dataclass
class _Held:
    """A value after the loop: made at the first turn; where the two differ, in pieces that ``kind`` brings together."""

    span: Span
    kind: str = ""
    wanted: Span | None = field(default=None)


class _Step:
    """Counts what crosses once per step: leaves of the state that both stages read, and what updates exchange."""

    def __init__(self, loop: Looped, turns: _Turns, total: _Total, inside: _Wants) -> None:
        self._graph, self._loop, self._total = loop.graph, loop, total
        self._wants = _Wants()
        self._held: dict[int, _Held] = {}
        for value, operand in zip(loop.body.inputs, loop.loop.operands, strict=True):
            if value in inside.spans:
                self._wants.want(operand, inside.spans[value])
        self._hold_results(turns)

    def _hold_results(self, turns: _Turns) -> None:
        loop = self._loop
        carries = _compat.scan_arity(loop.loop.equation.params)[1]
        for result, (add, chain, parts) in zip(loop.loop.results, summands(loop, turns.turn), strict=False):
            made = [turns.made[v] for v in parts if v in turns.made] if chain else [turns.turn.get(add.id, NEVER)]
            self._held[result] = _Held((min(made, default=NEVER), max(made, default=NEVER)), "add")
        for result, value in zip(loop.loop.results[carries:], loop.body.outputs[carries:], strict=True):
            own = NEVER if value is None else turns.made.get(value, NEVER)
            self._held[result] = _Held((own, own))

    def count(self, pairs: Mapping[int, int]) -> None:
        """Add all of it to the total; ``pairs`` are the output positions of state leaves by their input positions."""
        graph, share = self._graph, 1 / self._loop.count
        for operator in graph.operators:
            if operator.id != self._loop.loop.id:
                self._place(operator)
        for value in graph.outputs:
            if value in self._held:
                self._bring(value, self._held[value].span[0])
        for value, held in self._held.items():
            if held.wanted is not None:
                self._total.cross(held.span[0], held.wanted, graph.values[value].size_bytes * share)
        self._sweep()
        owners = self._owners(pairs)
        self._sweep()
        for leaf, owner in owners.items():
            value = graph.inputs[leaf]
            if value in self._wants.spans:
                self._total.cross(owner, self._wants.spans[value], graph.values[value].size_bytes * share)

    def _owners(self, pairs: Mapping[int, int]) -> dict[int, int]:
        """The turns of the state's leaves; outputs that no stage holds are made where their leaf is read first."""
        graph, owners, elsewhere = self._graph, {}, dict.fromkeys(range(len(self._graph.outputs)), NEVER)
        for leaf, output in pairs.items():
            value = graph.outputs[output]
            if value is not None and value in self._held:
                owners[leaf] = self._held[value].span[0]
            else:
                owners[leaf] = self._wants.spans.get(graph.inputs[leaf], (NEVER, NEVER))[0]
                elsewhere[output] = owners[leaf]
        for output, turn in elsewhere.items():
            if graph.outputs[output] not in self._held:
                self._wants.want(graph.outputs[output], (turn, turn))
        return owners

    def _sweep(self) -> None:
        """What is made of leaves alone is made wherever it is wanted."""
        for operator in reversed(self._graph.operators):
            if operator.id == self._loop.loop.id or not self._held.keys().isdisjoint(operator.results):
                continue
            if (span := self._wants.of(operator.results)) is not None:
                for operand in operator.operands:
                    self._wants.want(operand, span)

    def _place(self, operator: Operator) -> None:
        held = [v for v in operator.operands if v is not None and v in self._held]
        if not held:
            if operator.equation.effects:
                for operand in operator.operands:
                    self._wants.want(operand, (NEVER, NEVER))
            return
        first = min(self._held[v].span[0] for v in held)
        kind = "add" if operator.primitive in ADDITIONS else operator.primitive
        if self._combines(operator, held, kind):
            span = (first, max(self._held[v].span[1] for v in held))
            self._held[operator.results[0]] = _Held(span, kind)
        elif self._passes(operator, held):
            first = self._held[held[0]].span[0]
            self._held[operator.results[0]] = _Held(self._held[held[0]].span, "add")
        else:
            sizes = [self._graph.values[v].size_bytes for v in held]
            first = min(self._held[v].span[0] for v, size in zip(held, sizes, strict=True) if size == max(sizes))
            for value in held:
                self._bring(value, first)
            for result in operator.results:
                self._held[result] = _Held((first, first))
        for operand in operator.operands:
            if operand not in self._held:
                self._wants.want(operand, (first, first))

    def _in_pieces(self, held: Sequence[int]) -> list[_Held]:
        found = [self._held[v] for v in held]
        return [one for one in found if one.span[0] < one.span[1]]

    def _combines(self, operator: Operator, held: Sequence[int], kind: str) -> bool:
        if operator.primitive not in COMBINES or len(operator.operands) != 2:
            return False
        result = self._graph.values[operator.results[0]]
        pieces = self._in_pieces(held)
        return (
            all(one.kind == kind for one in pieces)
            and (result.size_bytes <= SMALL_BYTES or bool(pieces))
            and all(self._graph.values[v].shape == result.shape for v in operator.operands if v is not None)
        )

    def _passes(self, operator: Operator, held: Sequence[int]) -> bool:
        pieces = self._in_pieces(held)
        read = [v for v in operator.operands if v is not None]
        return bool(pieces) and operator.linear and len(read) == 1 and all(one.kind == "add" for one in pieces)

    def _bring(self, value: int, turn: int) -> None:
        """A value is wanted whole at a turn: its pieces are sent to the first stage that has one."""
        held = self._held[value]
        first, last = held.span
        self._total.add(first, last, self._graph.values[value].size_bytes / self._loop.count)
        held.span = (first, first)
        known = held.wanted or (turn, turn)
        held.wanted = (min(known[0], turn), max(known[1], turn))
