"""The part of each stage in one microbatch: which equations, what it receives, what it sends.

A stage runs the anchored operators that are placed on it and clones whatever else these read.  A value that another
stage made is received from there: each value travels once to each stage that reads it, however many operators do.

A sum over microbatches to which several stages contribute (the gradient of a tied embedding) is not brought together
microbatch by microbatch: where

    A ← A + (g₁ + g₂),   g₁ made on stage r, g₂ on stage s

each stage keeps an accumulator of its own, and A = A⁽ʳ⁾ + A⁽ˢ⁾ is added once, after the loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar import _compat
from autopar.graph.build import BARRIER
from autopar.graph.ir import Operator
from autopar.inter_op.looped import Looped
from autopar.inter_op.placing import Placing
from autopar.schedule.instructions import Part
from autopar.schedule.spmd import ADDITIONS


@dataclass
class Body:
    """What one stage does of a microbatch; values are those of the whole body's graph, by id.

    ``equations`` are in the order of the program, those of the forward pass first; ``parts`` says in which pass each
    runs.  ``inputs`` are the inputs of the whole body that are read.  ``received`` and ``sent`` are values by (value, other
    stage).  ``sums`` are the accumulators by their number: (variable of the old, of the new value).
    """

    equations: list[Any] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)
    received: dict[tuple[int, int], set[Part]] = field(default_factory=dict)
    sent: dict[tuple[int, int], Part] = field(default_factory=dict)
    sums: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    stacked: dict[int, Any] = field(default_factory=dict)


def stage_bodies(loop: Looped, placing: Placing) -> tuple[Body, ...]:
    """One body for every stage."""
    return _Bodies(loop, placing).make()


class _Bodies:
    """Owns the bodies while they grow from what is wanted of them."""

    def __init__(self, loop: Looped, placing: Placing) -> None:
        body = loop.body
        self._loop, self._graph, self._placing = loop, body, placing
        self._consts, self._carries = _compat.scan_arity(loop.loop.equation.params)
        self._makers = {result: o for o in body.operators for result in o.results}
        self._order = {operator.id: number for number, operator in enumerate(body.operators)}
        self._variables = _variables(loop)
        self._bodies = tuple(Body() for _ in range(placing.num_stages))
        self._parts: list[dict[int, Part]] = [{} for _ in self._bodies]
        """By stage: the pass in which a cloned or placed operator runs, by its id."""
        self._guarded: list[dict[int, set[int]]] = [defaultdict(set) for _ in self._bodies]
        """By stage: which results of a barrier are read, by its id."""
        self._extra: list[list[tuple[float, Any, Part]]] = [[] for _ in self._bodies]
        self._wanted: set[tuple[int, int, Part]] = set()
        self._seconds: dict[tuple[int, int], Part] = {}

    def make(self) -> tuple[Body, ...]:
        dropped = self._make_sums()
        for operator in self._graph.operators:
            stage = self._placing.stage.get(operator.id)
            if stage is None and operator.equation.effects:
                stage = 0
            if stage is None or operator.id in dropped:
                continue
            self._emit(operator, stage, self._part_of(operator))
        for number, value in enumerate(self._graph.outputs[self._carries :], self._carries):
            stage = 0 if value is None else self._placing.anchors.get(value, 0)
            self._bodies[stage].stacked[number] = _compat.jaxpr_of(self._graph.jaxpr).outvars[number]
            if value is not None:
                self._want(value, stage, Part.FORWARD if value not in self._placing.anchors else self._made_in(value))
        for stage, one in enumerate(self._bodies):
            self._finish(stage, one)
        return self._bodies

    def _part_of(self, operator: Operator) -> Part:
        return Part.BACKWARD if operator.id in self._placing.backward else Part.FORWARD

    def _made_in(self, value: int) -> Part:
        maker = self._makers[value]
        return Part.BACKWARD if maker.primitive == BARRIER else self._part_of(maker)

    def _emit(self, operator: Operator, stage: int, part: Part) -> None:
        """Run an operator on a stage; again in the forward pass, if that wants it too, then there alone."""
        known = self._parts[stage].get(operator.id)
        if known is part or known is Part.FORWARD:
            return
        self._parts[stage][operator.id] = part
        for operand in operator.operands:
            if operand is not None:
                self._want(operand, stage, part)

    def _want(self, value: int, stage: int, part: Part) -> None:
        """See to it that a stage has a value in a pass."""
        if (value, stage, part) in self._wanted:
            return
        self._wanted.add((value, stage, part))
        maker = self._makers.get(value)
        if maker is None:
            if value not in self._graph.constants:
                self._bodies[stage].inputs.add(value)
        elif maker.primitive == BARRIER:
            number = maker.results.index(value)
            self._guarded[stage][maker.id].add(number)
            operand = maker.operands[number]
            if operand is not None:
                self._want(operand, stage, part)
        elif (at := self._placing.stage.get(maker.id)) is None:
            self._emit(maker, stage, part)
        elif at != stage:
            self._bodies[stage].received.setdefault((value, at), set()).add(part)
            self._bodies[at].sent[value, stage] = self._part_of(maker)

    # --- sums ---

    def _make_sums(self) -> set[int]:
        """Give every accumulator to the stages that contribute to it; operators that this replaces are returned."""
        dropped: set[int] = set()
        sums = summands(self._loop, self._placing.stage)
        outvars = _compat.jaxpr_of(self._graph.jaxpr).outvars
        for number in range(self._carries):
            old = self._graph.inputs[self._consts + number]
            add, chain, parts = sums[number]
            anchors = self._placing.anchors
            home = min((anchors[value] for value in parts if value in anchors), default=0)
            at = {value: anchors.get(value, home) for value in parts}  # what any stage has is added where others are
            if len(set(at.values())) <= 1:
                stage = self._placing.stage.get(add.id, 0)
                self._bodies[stage].sums[number] = (self._variables[old], outvars[number])
                self._emit(add, stage, self._part_of(add))
                continue
            dropped |= {add.id} | chain
            for stage in sorted(set(at.values())):
                self._sum_on(number, stage, [v for v in parts if at[v] == stage], add)
        return dropped

    def _sum_on(self, number: int, stage: int, values: list[int], add: Operator) -> None:
        """Add a stage's own summands to its own accumulator."""
        body = self._bodies[stage]
        old = self._variables[self._graph.inputs[self._consts + number]]
        body.inputs.add(self._graph.inputs[self._consts + number])
        total = old
        made = [value for value in values if value in self._makers]
        part, order = Part.BACKWARD, 0.0
        for value in made + [value for value in values if value not in self._makers]:
            if value in self._makers:  # else it is known all along, and added after the last
                part = self._made_in(value) if value in self._placing.anchors else Part.BACKWARD
                order = self._order[self._makers[value].id] + 0.5
            self._want(value, stage, part)
            addend = self._variables[value]
            if addend.aval.dtype != old.aval.dtype:
                wide = _compat.Var(old.aval)
                self._extra[stage].append((order, _compat.conversion_equation(addend, wide, add.equation), part))
                addend = wide
            fresh = _compat.Var(old.aval)
            self._extra[stage].append(
                (order, add.equation.replace(invars=[total, addend], outvars=[fresh]), part),
            )
            total = fresh
        body.sums[number] = (old, total)

    # --- order ---

    def _finish(self, stage: int, body: Body) -> None:
        """Put the equations in the order of the program, the forward pass first (it reads nothing of the backward pass)."""
        operators = {operator.id: operator for operator in self._graph.operators}
        keyed = [
            (float(self._order[identity]), operators[identity].equation, part)
            for identity, part in self._parts[stage].items()
        ]
        for identity, numbers in self._guarded[stage].items():
            equation, kept = operators[identity].equation, sorted(numbers)
            guard = equation.replace(
                invars=[equation.invars[k] for k in kept], outvars=[equation.outvars[k] for k in kept]
            )
            keyed.append((float(self._order[identity]), guard, Part.BACKWARD))
        keyed += self._extra[stage]
        keyed.sort(key=lambda entry: (entry[2] is Part.BACKWARD, entry[0]))
        body.equations = [equation for _, equation, _ in keyed]
        body.parts = [part for _, _, part in keyed]


def summands(loop: Looped, placed: Container[int]) -> tuple[tuple[Operator, frozenset[int], tuple[int, ...]], ...]:
    """For each accumulator: the operator that adds to it, the operators that add up what is added, and what they add up.

    ``placed`` are the operators that stand on a stage; the others are cloned and not looked into.
    """
    graph = loop.body
    consts, carries = _compat.scan_arity(loop.loop.equation.params)
    makers = {result: o for o in graph.operators for result in o.results}
    readers = Counter(operand for o in graph.operators for operand in o.operands if operand is not None)
    found = []
    for old, new in zip(graph.inputs[consts : consts + carries], graph.outputs[:carries], strict=True):
        assert new is not None
        add = makers[new]
        (addend,) = (v for v in add.operands if v != old)
        assert addend is not None
        chain: set[int] = set()
        found.append((add, chain, tuple(_added_up(addend, makers, readers, placed, chain))))
    return tuple((add, frozenset(chain), parts) for add, chain, parts in found)


def _added_up(
    value: int, makers: Mapping[int, Operator], readers: Mapping[int, int], placed: Container[int], chain: set[int]
) -> list[int]:
    """Values whose sum a value is; the operators that add them up join ``chain``."""
    maker = makers.get(value)
    if maker is None or readers[value] > 1 or maker.id not in placed:
        return [value]
    is_sum = maker.primitive in ADDITIONS and all(v is not None for v in maker.operands)
    if not is_sum and maker.primitive != "convert_element_type":
        return [value]
    inner, found = {maker.id}, []
    for operand in maker.operands:
        assert operand is not None
        found += _added_up(operand, makers, readers, placed, inner)
    if not is_sum and len(found) == 1:
        return [value]
    chain |= inner
    return found


def _variables(loop: Looped) -> dict[int, Any]:
    """The variable of every value of the body."""
    jaxpr = _compat.jaxpr_of(loop.body.jaxpr)
    found = dict(zip(loop.body.inputs, jaxpr.invars, strict=True))
    found.update(zip(loop.body.constants, jaxpr.constvars, strict=True))
    for operator in loop.body.operators:
        found.update(zip(operator.results, operator.equation.outvars, strict=True))
    return found
