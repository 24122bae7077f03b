"""On which stage is each operator after the microbatches run, and what passes between stages there?

Only what depends on the loop is *held* by a stage; the rest (casts of parameters, bias corrections, what an update makes of a
moment alone) is computed wherever it is read.  So an update follows its gradient without a rule of its own: the decay of a
moment, say, belongs where the gradient that is added to it lies, and a leaf of the state lives where its next value is made.

    stage(o) = stage of the largest held operand of operator o; the others are sent there

Sums over values of several stages (the squares behind a global norm, the gradient of a tied embedding) are kept as summands,
x = x⁽ʳ⁾ + x⁽ˢ⁾, through operators that are linear in them and make them smaller, and brought together once, where they are
needed whole; so are chains of ``and``, ``or``, ``max``, ``min`` and ``mul`` of small values.  Summands of the first stage and of
others come together on the first; where every stage has some of every sum (:mod:`autopar.inter_op.shares`), where the fewest
bytes have so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar import _compat
from autopar.graph.ir import Operator
from autopar.inter_op.looped import Looped
from autopar.inter_op.placing import SMALL_BYTES
from autopar.inter_op.stage_body import Body
from autopar.schedule.spmd import ADDITIONS

COMBINES = frozenset((*ADDITIONS, "and", "or", "max", "min", "mul"))


@dataclass
class Late:
    """What one stage does after the microbatches, in the order of the program.

    ``received`` are variables by (variable, source stage), ``sent`` by (variable, target stage).
    """

    equations: list[tuple[float, Any]] = field(default_factory=list)
    received: dict[Any, int] = field(default_factory=dict)
    sent: list[tuple[Any, int]] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    """Of the loop's results, by number: the variable of the stage's own."""

    def add(self, order: float, equation: Any) -> None:
        """Append an equation at its place in the program."""
        self.equations.append((order, equation))


@dataclass
class _Held:
    """A value on the stages that have it, whole; or, with ``combine``, in pieces that this operator brings together."""

    at: dict[int, Any]
    made: int
    combine: Operator | None = None


class Updates:
    """Owns who holds what while the operators after the loop are placed in order."""

    def __init__(self, loop: Looped, bodies: Sequence[Body]) -> None:
        self._graph, self._loop = loop.graph, loop
        self.stages = tuple(Late() for _ in bodies)
        self.floating: dict[Any, tuple[int, Any]] = {}
        """The equation, with its number, of every variable that no stage holds."""
        self._held: dict[int, _Held] = {}
        self._variables = dict(zip(loop.graph.inputs, _compat.jaxpr_of(loop.graph.jaxpr).invars, strict=True))
        self._hold_results(bodies)
        for number, operator in enumerate(loop.graph.operators):
            self._variables.update(zip(operator.results, operator.equation.outvars, strict=True))
            if number != loop.position:
                self._place(number, operator)

    def _hold_results(self, bodies: Sequence[Body]) -> None:
        """The loop's results lie on the stages that make them; several stages may hold summands of one."""
        loop = self._loop.loop
        body = self._loop.body
        dealt_bytes = [0] * len(bodies)
        for number, result in enumerate(loop.results):
            variable = loop.equation.outvars[number]
            makers = [s for s, one in enumerate(bodies) if number in one.sums or number in one.stacked]
            made = makers[0]
            if self._loop.shares and len(makers) > 1:
                made = min(makers, key=dealt_bytes.__getitem__)
                dealt_bytes[made] += self._graph.values[result].size_bytes
            own = {s: variable if len(makers) == 1 else _compat.Var(variable.aval) for s in makers}
            add = None
            if len(makers) > 1:
                add = next(o for o in body.operators if body.outputs[number] in o.results)
            for stage, one in own.items():
                self.stages[stage].results[number] = one
            self._held[result] = _Held(own, made, add)

    def _place(self, number: int, operator: Operator) -> None:
        held = [v for v in operator.operands if v is not None and v in self._held]
        if not held:
            if operator.equation.effects:
                self.stages[0].add(number, operator.equation)
                return
            self.floating.update((variable, (number, operator.equation)) for variable in operator.equation.outvars)
            return
        if self._combines(operator, held) or self._passes(operator, held):
            self._in_pieces(number, operator, held)
            return
        stage = self._stage_of(held)
        for value in held:
            self._bring(value, stage, number)
        self._emit(number, operator, stage)

    def _emit(self, number: int, operator: Operator, stage: int) -> None:
        atoms = [
            atom if value not in self._held else self._held[value].at[stage]
            for value, atom in zip(operator.operands, operator.equation.invars, strict=True)
        ]
        self.stages[stage].add(number, operator.equation.replace(invars=atoms))
        for value, variable in zip(operator.results, operator.equation.outvars, strict=True):
            self._held[value] = _Held({stage: variable}, stage)

    def _stage_of(self, held: Sequence[int]) -> int:
        sizes = [(self._graph.values[v].size_bytes, -self._held[v].made) for v in held]
        return -max(sizes)[1]

    # --- values of several stages ---

    def _combines(self, operator: Operator, held: Sequence[int]) -> bool:
        """Whether an operator only brings values of several stages together, in the way that its operands are to be."""
        if operator.primitive not in COMBINES or len(operator.operands) != 2:
            return False
        result = self._graph.values[operator.results[0]]
        pieces = self._pieces_among(held)
        stages = {stage for v in held for stage in self._own(v)}
        return (
            len(stages) > 1
            and all(_kind(one) == _kind(operator) for one in pieces)
            and (result.size_bytes <= SMALL_BYTES or len(pieces) == len(operator.operands))
            and all(self._graph.values[v].shape == result.shape for v in operator.operands if v is not None)
        )

    def _passes(self, operator: Operator, held: Sequence[int]) -> bool:
        """Whether an operator may be applied to each summand of its operand, of a large one if fewer bytes then cross.

        Otherwise the operand is brought together once, for all who read it.
        """
        pieces = self._pieces_among(held)
        read = [v for v in operator.operands if v is not None]
        is_linear = operator.linear and len(read) == 1 and all(_kind(one) == "add" for one in pieces)
        if not pieces or not is_linear:
            return False
        before, after = (self._graph.values[v].size_bytes for v in (read[0], operator.results[0]))
        return after <= SMALL_BYTES or after < before

    def _pieces_among(self, held: Sequence[int]) -> list[Operator]:
        return [one for v in held if (one := self._held[v].combine) is not None]

    def _own(self, value: int) -> dict[int, Any]:
        """The pieces of a value by stage; of one that is whole, where it is made."""
        held = self._held[value]
        return held.at if held.combine is not None else {held.made: held.at[held.made]}

    def _in_pieces(self, number: int, operator: Operator, held: Sequence[int]) -> None:
        """Run an operator on the pieces of each stage; what no stage holds counts on one of them."""
        at: dict[int, Any] = {}
        made = next((self._held[v].made for v in held if self._held[v].combine is not None), 0)
        if self._combines(operator, held):
            combine = operator
            first = min(self._held[v].made for v in held)
            for value, atom in zip(operator.operands, operator.equation.invars, strict=True):
                own = self._own(value) if value is not None and value in self._held else {first: atom}
                for stage, variable in own.items():
                    at[stage] = self._combined(number, operator, stage, at.get(stage), variable)
        else:
            (combine,) = self._pieces_among(held)
            at = {s: self._applied(number, operator, s, variable) for s, variable in self._own(held[0]).items()}
        self._held[operator.results[0]] = _Held(at, made if self._loop.shares and made in at else min(at), combine)

    def _combined(self, number: int, operator: Operator, stage: int, first: Any, second: Any) -> Any:
        if first is None:
            return second
        fresh = _compat.Var(operator.equation.outvars[0].aval)
        self.stages[stage].add(number, operator.equation.replace(invars=[first, second], outvars=[fresh]))
        return fresh

    def _applied(self, number: int, operator: Operator, stage: int, variable: Any) -> Any:
        fresh = _compat.Var(operator.equation.outvars[0].aval)
        atoms = [a if v is None else variable for v, a in zip(operator.operands, operator.equation.invars, strict=True)]
        self.stages[stage].add(number, operator.equation.replace(invars=atoms, outvars=[fresh]))
        return fresh

    # --- what passes between stages ---

    def _bring(self, value: int, stage: int, number: float) -> None:
        """See to it that a stage has a held value whole."""
        held = self._held[value]
        if held.combine is not None:
            self._put_together(value, number - 0.5)
            held = self._held[value]
        if stage not in held.at:
            self._send(held.at[held.made], held.made, stage)
            held.at[stage] = held.at[held.made]

    def _put_together(self, value: int, order: float) -> None:
        held = self._held[value]
        assert held.combine is not None
        total = held.at[held.made]
        for stage, variable in sorted(held.at.items()):
            if stage != held.made:
                self._send(variable, stage, held.made)
                fresh = _compat.Var(variable.aval)
                combine = held.combine.equation.replace(invars=[total, variable], outvars=[fresh])
                self.stages[held.made].add(order, combine)
                total = fresh
        self._held[value] = _Held({held.made: total}, held.made)

    def _send(self, variable: Any, source: int, target: int) -> None:
        if variable not in self.stages[target].received:  # two values may share a piece
            self.stages[source].sent.append((variable, target))
            self.stages[target].received[variable] = source

    # --- outputs ---

    def give_outputs(self, owners: dict[int, int]) -> None:
        """Give every output of the step to a stage; ``owners`` says where those that no stage holds are made."""
        end = float(len(self._graph.operators))
        atoms = _compat.jaxpr_of(self._graph.jaxpr).outvars
        for position, (value, atom) in enumerate(zip(self._graph.outputs, atoms, strict=True)):
            if value is None or value not in self._held:
                self.stages[owners.get(position, 0)].outputs[position] = atom
                continue
            self._bring(value, self._held[value].made, end)
            held = self._held[value]
            self.stages[held.made].outputs[position] = held.at[held.made]

    def is_held(self, position: int) -> bool:
        """Whether an output depends on the loop."""
        return self._graph.outputs[position] in self._held


def _kind(operator: Operator) -> str:
    return "add" if operator.primitive in ADDITIONS else operator.primitive


def sources_of(atoms: Iterable[Any], floating: dict[Any, tuple[int, Any]]) -> tuple[dict[int, Any], set[Any]]:
    """What is computed for some atoms where they are read: equations by number, and the variables that these start from."""
    equations: dict[int, Any] = {}
    found: set[Any] = set()
    stack = [atom for atom in atoms if not isinstance(atom, _compat.Literal)]
    while stack:
        variable = stack.pop()
        if variable not in floating:
            found.add(variable)
            continue
        number, equation = floating[variable]
        if number not in equations:
            equations[number] = equation
            stack += [atom for atom in equation.invars if not isinstance(atom, _compat.Literal)]
    return equations, found
