"""On which stage does each operator of a microbatch run, and in which pass?

Stages are consecutive runs of the forward pass.  Let the *anchored* operators be those that depend on both a large array
of the state and the batch; the others are cheap or feed one consumer and are computed wherever they are needed (cloned).
The anchored forward operators, in the program's order, are cut at S − 1 positions,

    stage(f) = number of cuts at or before f                     f anchored, forward

so that values flow from earlier to later stages only.  For the backward pass let

    at(v)    = where a value of the forward pass is at hand: its maker's stage and those of its forward consumers
    label(b) = max { s ∈ ⋂ at(v) : s ≤ bound }, bound = min label of the operands that the backward pass made

over the operands v of operator b from the forward pass (all stages that allow it, if the intersection is empty, give way
to the largest operand's); with no such operand, label(b) = bound.  Then cotangents flow from later to earlier stages only,
so that the stages cannot wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.graph.build import BARRIER
from autopar.graph.ir import Graph, Operator, Phase
from autopar.inter_op.looped import Looped

SMALL_BYTES = 1024
"""Arrays up to this size count as scalars: they go anywhere, and what is made of them is computed where it is needed."""


@dataclass(frozen=True)
class Placing:
    """Where the operators of one microbatch run.

    ``stage`` holds anchored operators only, by id; ``backward`` are those of them that run in the backward pass.
    ``anchors`` says for values made by anchored operators where they are made.
    """

    num_stages: int
    stage: dict[int, int]
    backward: frozenset[int]
    anchors: dict[int, int] = field(repr=False)


def forward_operators(loop: Looped) -> tuple[Operator, ...]:
    """The anchored operators of the forward pass of one microbatch, in order: what is cut into stages."""
    found, _ = anchored(loop)
    return tuple(o for o in loop.body.operators if o.id in found and o.phase is Phase.FORWARD)


def place(loop: Looped, cuts: Sequence[int]) -> Placing:
    """Stages of all anchored operators of one microbatch, for cuts in :func:`forward_operators`."""
    return _Placer(loop, tuple(cuts)).place()


def first_readers(loop: Looped) -> dict[int, int]:
    """Position of an input → number of the first of :func:`forward_operators` that reads it, or what is made of it alone."""
    of_value: dict[int, frozenset[int]] = {v: frozenset((k,)) for k, v in enumerate(loop.graph.inputs)}

    def follow(operator: Operator, known: dict[int, frozenset[int]]) -> frozenset[int]:
        own = frozenset[int]().union(*(known[v] for v in operator.operands if v in known))
        known.update(dict.fromkeys(operator.results, own))
        return own

    for operator in loop.graph.operators[: loop.position]:
        follow(operator, of_value)
    outer = zip(loop.body.inputs, loop.loop.operands, strict=True)
    inside = {inner: of_value[value] for inner, value in outer if value in of_value}
    found: dict[int, int] = {}
    is_cut, _ = anchored(loop)
    number = 0
    for operator in loop.body.operators:
        if operator.id not in is_cut:
            follow(operator, inside)
        elif operator.phase is Phase.FORWARD:
            for position in frozenset[int]().union(
                *(inside.get(v, frozenset()) for v in operator.operands if v is not None)
            ):
                found.setdefault(position, number)
            number += 1
    return found


def anchored(loop: Looped) -> tuple[frozenset[int], frozenset[int]]:
    """Operators of the body that depend on a large array from outside and on the batch; values that depend on the former."""
    heavy, rows = _heavy_values(loop), _row_values(loop)
    return anchored_among(loop.body.operators, heavy, rows), frozenset(heavy)


def anchored_among(operators: Iterable[Operator], heavy: set[int], rows: set[int]) -> frozenset[int]:
    """Operators that depend on both kinds of values; what is made of either is added to it."""
    found = set()
    for operator in operators:
        operands = [value for value in operator.operands if value is not None]
        is_heavy, is_row = not heavy.isdisjoint(operands), not rows.isdisjoint(operands)
        if is_heavy:
            heavy.update(operator.results)
        if is_row:
            rows.update(operator.results)
        if is_heavy and is_row:
            found.add(operator.id)
    return frozenset(found)


def _heavy_values(loop: Looped) -> set[int]:
    """Inputs of the body that are made of large arrays other than the batch; grown by the caller."""
    graph, body = loop.graph, loop.body
    batch = {graph.inputs[position] for position in loop.batch}
    heavy = {v for v in graph.inputs if v not in batch and graph.values[v].size_bytes > SMALL_BYTES}
    for operator in graph.operators[: loop.position]:
        if not heavy.isdisjoint(operator.operands):
            heavy.update(operator.results)
    outer = zip(body.inputs, loop.loop.operands, strict=True)
    return {inner for inner, value in outer if value in heavy}


def _row_values(loop: Looped) -> set[int]:
    graph, body = loop.graph, loop.body
    batch = {graph.inputs[position] for position in loop.batch}
    outer = zip(body.inputs, loop.loop.operands, strict=True)
    return {inner for inner, value in outer if value in batch}


class _Placer:
    """Owns what is known of the values while the operators are placed in order."""

    def __init__(self, loop: Looped, cuts: tuple[int, ...]) -> None:
        self._body: Graph = loop.body
        self._anchored, self._heavy = anchored(loop)
        self._cuts = cuts
        self._stage: dict[int, int] = {}
        self._backward: set[int] = set()
        self._made_at: dict[int, int] = {}
        self._at: dict[int, set[int]] = {}
        self._is_backward: set[int] = set()

    def place(self) -> Placing:
        self._place_forward()
        for operator in self._body.operators:
            if operator.id in self._stage:
                continue
            if operator.id not in self._anchored:
                self._follow_operands(operator)
            elif operator.primitive == BARRIER:
                self._place_barrier(operator)
            else:
                self._record(operator, *self._label(operator))
        return Placing(len(self._cuts) + 1, self._stage, frozenset(self._backward), self._made_at)

    def _place_forward(self) -> None:
        """Number the stages along the forward pass, and note where its values and parameters are at hand."""
        position = 0
        floating: dict[int, Operator] = {}
        for operator in self._body.operators:
            if operator.id not in self._anchored:
                floating.update(dict.fromkeys(operator.results, operator))
            elif operator.phase is Phase.FORWARD:
                stage = sum(cut <= position for cut in self._cuts)
                position += 1
                self._record(operator, stage, is_backward=False)
                self._at_hand(operator.operands, stage, floating)

    def _at_hand(self, values: Iterable[int | None], stage: int, floating: dict[int, Operator]) -> None:
        """A stage that reads a value has it, and all that it is cloned from."""
        stack = [value for value in values if value is not None]
        while stack:
            value = stack.pop()
            if value not in self._heavy:
                continue
            places = self._at.setdefault(value, set())
            if stage in places:
                continue
            places.add(stage)
            if (maker := floating.get(value)) is not None:
                stack.extend(operand for operand in maker.operands if operand is not None)

    def _follow_operands(self, operator: Operator) -> None:
        """What is made of parameters alone, a transpose, is at hand where they are."""
        places = [self._at[v] for v in operator.operands if v in self._heavy and v in self._at]
        for result in operator.results if places else ():
            self._at.setdefault(result, set.intersection(*places) or set(places[0]))

    def _record(self, operator: Operator, stage: int, is_backward: bool) -> None:
        self._stage[operator.id] = stage
        if is_backward:
            self._backward.add(operator.id)
            self._is_backward.update(operator.results)
        for result in operator.results:
            self._made_at[result] = stage
            self._at.setdefault(result, set()).add(stage)

    def _label(self, operator: Operator) -> tuple[int, bool]:
        """Stage of an operator that is not of the forward pass, and whether it runs in the backward pass."""
        operands = [v for v in operator.operands if v is not None]
        bounds = [self._made_at[v] for v in operands if v in self._is_backward]
        from_forward = [v for v in operands if v not in self._is_backward and v in self._at]
        if operator.phase is not Phase.BACKWARD and not bounds:  # a metric: after all that it is made of
            made = [self._made_at[v] for v in from_forward if v in self._made_at]
            return max(made, default=0), False
        bound = min(bounds, default=len(self._cuts))
        if not from_forward:
            return bound, True
        common = set.intersection(*(self._at[v] for v in from_forward))
        allowed = [stage for stage in common if stage <= bound]
        if not allowed:
            largest = max(from_forward, key=lambda v: self._body.values[v].size_bytes)
            allowed = [stage for stage in self._at[largest] if stage <= bound]
        return max(allowed, default=bound), True

    def _place_barrier(self, operator: Operator) -> None:
        """Result k of a barrier is operand k, and is at hand where that is; the operator itself stands nowhere."""
        for operand, result in zip(operator.operands, operator.results, strict=True):
            if operand is None:
                continue
            if operand in self._is_backward:
                self._is_backward.add(result)
            self._at[result] = set(self._at.get(operand, ()))
            if operand in self._made_at:
                self._made_at[result] = self._made_at[operand]
            if not self._at[result]:
                del self._at[result]
