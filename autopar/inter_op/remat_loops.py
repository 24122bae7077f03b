"""A loop of the forward pass whose backward loop computes again, trip by trip, what the trips would otherwise leave to it.

A differentiated loop over L layers is a pair of loops.  With constants w, rows x_t of stacked arrays and carry c,

    F    for each t:    c_{t+1}, r_t, y_t = f(w, c_t, x_t)
    B    for each t:    c̄_t, x̄_t         = b(w, c̄_{t+1}, r_t, …)

where B reads rows of the residuals r that F has left: all L of them lie there when B begins, and running F again as a whole would
bring all of them back at once.  So it is the body that is divided, as :mod:`autopar.inter_op.remat` divides a program without
loops.  Let S be what the residuals of one trip can be made of: c_t, w, x_t and, under ``dots``, what convolutions and matrix
products without batch dimensions make; g leads from S to r.  Then

    F′   for each t:    c_{t+1}, c_t, dots_t, y_t = f(w, c_t, x_t)
    B′   for each t:    r′_t = g(optimization_barrier(c_t, dots_t, x_t, c̄_{t+1}), w),   c̄_t, x̄_t = b(w, c̄_{t+1}, r′_t, …)

which keeps L·|S| bytes in place of L·|r|, and one trip's residuals at a time: what ``jax.checkpoint`` (``nn.remat``) in the body
does.  Constants that are made of literals alone, such as masks, are made in the trips of both (:mod:`autopar.inter_op.sinking`).
Rows go by the number of their trip whichever way a loop runs, so it is no matter that B runs from the last to the first.

Only residuals that B alone reads, as rows, go; another reader, and a reshape between the loops is one, keeps them.  Results of
operators with effects belong to S.  A loop inside the body is an operator of it, and runs again as a whole.  Where the user's
own code rematerialises a body, the pair is left as it is.

A loop need not run over layers; one over time, an LSTM, is the same pair, but there each layer has a loop of its own, and to run
one loop again as a whole needs the residuals of that one only.  With K = L·|S| and R = L·|r|, bodies are divided where
Σ K < max R over the loops with K < R: where this keeps less than the largest loop at once would.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from autopar import _compat
from autopar._compat import DropVar, Literal, Var
from autopar.graph.build import BARRIER, LoopKind, build_graph
from autopar.graph.ir import Graph, Operator, Phase
from autopar.inter_op.copies import Again, CopyWriter, leading_to, made_of, variables_of
from autopar.inter_op.sinking import made_of_literals, with_sunk

Reader = tuple[int, int]
"""(position of an operator, position among its operands)."""


@dataclass(frozen=True)
class LoopPair:
    """Two loops by their positions among the operators: the second reads rows of what trips of the first leave."""

    forward: int
    backward: int
    is_rematted: bool
    """Whether the user's own code computes residuals again in the second one's body."""


@dataclass(frozen=True)
class Inside:
    """What the backward loop of a pair computes again in each trip; values are those of the forward loop's body.

    ``rows`` says for each value at which copies begin and that trips leave which result of the forward loop has it, or None where
    it is none yet.
    """

    pair: LoopPair
    trips: int
    needed: frozenset[int]
    operators: tuple[Operator, ...]
    starts: tuple[int, ...]
    rows: Mapping[int, int | None]
    kept_bytes: int
    """Of all trips, what is kept in place of the residuals."""
    freed_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Written and read by copies at their ends."""
        return self.kept_bytes + self.freed_bytes


def loop_pairs(graph: Graph) -> tuple[LoopPair, ...]:
    """The pairs of loops in a differentiated program; of several backward loops that read one loop, the one that reads most."""
    readers = _readers(graph)
    found = []
    for number, operator in enumerate(graph.operators):
        if operator.primitive != LoopKind.SCAN or operator.phase is not Phase.FORWARD or _is_transposed(operator):
            continue
        _, carries = _compat.scan_arity(operator.equation.params)
        read: dict[int, int] = {}
        for value in operator.results[carries:]:
            for reader, position in readers.get(value, ()):
                if _reads_rows(graph.operators[reader], position, operator.bodies[0].trips):
                    read[reader] = read.get(reader, 0) + graph.values[value].size_bytes
        if read:
            backward = max(read, key=lambda one: read[one])
            found.append(LoopPair(number, backward, _is_rematted(graph.operators[backward])))
    return tuple(found)


def _readers(graph: Graph) -> dict[int, list[Reader]]:
    found: dict[int, list[Reader]] = {}
    for number, operator in enumerate(graph.operators):
        for position, value in enumerate(operator.operands):
            if value is not None:
                found.setdefault(value, []).append((number, position))
    return found


def _is_transposed(operator: Operator) -> bool:
    return "transpose(" in operator.source.path


def _reads_rows(operator: Operator, position: int, trips: int) -> bool:
    """Whether an operator is a backward loop of so many trips that takes the rows of an operand."""
    if operator.primitive != LoopKind.SCAN or operator.phase is not Phase.BACKWARD or not _is_transposed(operator):
        return False
    return operator.bodies[0].trips == trips and position >= sum(_compat.scan_arity(operator.equation.params))


def _is_rematted(operator: Operator) -> bool:
    inner = (one for body in operator.bodies for one, _ in body.all_operators())
    return any(one.primitive == BARRIER or "rematted_computation" in one.source.path for one in inner)


def divided(
    graph: Graph, pairs: Iterable[LoopPair], keeps: Callable[[Operator], bool], at_hand: Set[int]
) -> tuple[Inside, ...]:
    """What each of these pairs computes again inside its body; none where that keeps too much (see the module docstring).

    ``keeps`` says of operators of a body whether their results are kept; ``at_hand`` are values of the program that are so in the
    backward pass anyway.
    """
    for_nothing = at_hand | made_of_literals(graph).keys()
    readers = _readers(graph)
    analysed = [_Body(graph, pair, keeps, readers).inside(for_nothing) for pair in pairs if not pair.is_rematted]
    found = tuple(one for one in analysed if one.kept_bytes < one.freed_bytes)
    if sum(one.kept_bytes for one in found) >= max((one.freed_bytes for one in found), default=0):
        return ()
    return found


class _Body:
    """Owns what is known of the body of a pair's forward loop."""

    def __init__(
        self, graph: Graph, pair: LoopPair, keeps: Callable[[Operator], bool], readers: Mapping[int, Sequence[Reader]]
    ) -> None:
        """``readers`` are those of the program's values."""
        self._graph, self._pair, self._keeps, self._readers = graph, pair, keeps, readers
        self._loop = graph.operators[pair.forward]
        self._body = self._loop.bodies[0]
        self._consts, self._carries = _compat.scan_arity(self._loop.equation.params)
        self._maker = {v: o for o in self._body.operators for v in o.results}
        self._outer = dict(zip(self._body.inputs, self._loop.operands, strict=True))

    def inside(self, at_hand: Set[int]) -> Inside:
        """What is computed again."""
        needed = {value for value in self._residuals if not self._is_kept(value)}
        operators, starts = leading_to(self._body.operators, needed, self._is_kept)
        carried = self._body.inputs[self._consts : self._consts + self._carries]
        rows = {value: self._rows.get(value) for value in starts if value in self._maker or value in carried}
        outer = {self._outer[value] for value in starts if value not in rows} - at_hand
        kept = sum(self._graph.values[value].size_bytes for value in outer if value is not None)
        kept += sum(self._body.values[value].size_bytes for value in rows) * self._body.trips
        return Inside(
            self._pair,
            self._body.trips,
            frozenset(needed),
            operators,
            starts,
            rows,
            kept,
            sum(self._body.values[value].size_bytes for value in needed) * self._body.trips,
        )

    @cached_property
    def _rows(self) -> dict[int, int]:
        """By value: the result of the loop with its rows, of those that the backward loop reads as rows."""
        found = {}
        for value, result in zip(self._body.outputs[self._carries :], self._loop.results[self._carries :], strict=True):
            those = self._readers.get(result, ())
            if value is not None and any(self._reads_rows(one) for one in those):
                found[value] = result
        return found

    @cached_property
    def _residuals(self) -> frozenset[int]:
        """What only the backward loop reads, as rows."""
        both = zip(self._body.outputs[self._carries :], self._loop.results[self._carries :], strict=True)
        shared = {
            value
            for value, result in both
            if result in self._graph.outputs or not all(map(self._reads_rows, self._readers.get(result, ())))
        }
        return frozenset(self._rows.keys() - shared)

    def _reads_rows(self, reader: Reader) -> bool:
        number, position = reader
        return number == self._pair.backward and _reads_rows(self._graph.operators[number], position, self._body.trips)

    def _is_kept(self, value: int) -> bool:
        """Whether a value is at hand in a trip of the backward loop whatever is computed again."""
        maker = self._maker.get(value)
        if maker is None or maker.equation.effects or self._keeps(maker):
            return True
        return value in self._rows and value not in self._residuals


# ---------------------------------------------------------------------------------------------------- the rewriting


def with_divided(graph: Graph, loops: Sequence[Inside], changing: Set[int]) -> Any:
    """The closed jaxpr of a program with these loops rewritten: equations keep their places, what nobody reads stays.

    ``changing`` are values that depend on the batch or on keys.
    """
    jaxpr = _compat.jaxpr_of(graph.jaxpr)
    equations, makers = list(jaxpr.eqns), made_of_literals(graph)
    for one in loops:
        writer = _PairWriter(graph, one, changing, equations[one.pair.forward], equations[one.pair.backward])
        equations[one.pair.backward] = with_sunk(writer.backward(), makers)
        equations[one.pair.forward] = with_sunk(writer.forward(), makers)
    return _compat.make_closed_jaxpr(
        jaxpr.invars,
        jaxpr.outvars,
        equations,
        graph.jaxpr,
        constvars=jaxpr.constvars,
        consts=_compat.consts_of(graph.jaxpr),
    )


class _PairWriter:
    """Owns the variables of one pair that is rewritten."""

    def __init__(self, graph: Graph, one: Inside, changing: Set[int], forward: Any, backward: Any) -> None:
        """The equations are those of the pair as they stand by now: a backward loop may belong to two pairs."""
        self._one, self._forward, self._backward = one, forward, backward
        loop = graph.operators[one.pair.forward]
        body = loop.bodies[0]
        self._variable = variables_of(body)
        self._consts, self._carries = _compat.scan_arity(forward.params)
        self._operand = dict(zip(body.inputs, forward.invars, strict=True))
        results = zip(body.outputs[self._carries :], loop.equation.outvars[self._carries :], strict=True)
        self._dropped = {result: value for value, result in results if value in one.needed}
        known = dict(zip(loop.results, loop.equation.outvars, strict=True))
        self._rows = {
            value: _stack_of(self._variable[value].aval, one.trips) if result is None else known[result]
            for value, result in one.rows.items()
        }
        self._steady = {variable for value, variable in variables_of(graph).items() if value not in changing}

    def forward(self) -> Any:
        """The forward loop, with further rows that its trips leave."""
        body = self._forward.params["jaxpr"]
        jaxpr = _compat.jaxpr_of(body)
        new = [value for value, result in self._one.rows.items() if result is None]
        outvars = [*jaxpr.outvars, *(self._variable[value] for value in new)]
        closed = _compat.make_closed_jaxpr(jaxpr.invars, outvars, jaxpr.eqns, body)
        results = [*self._forward.outvars, *(self._rows[value] for value in new)]
        return _compat.scan_equation(
            self._forward, self._forward.invars, results, closed, (self._consts, self._carries)
        )

    def backward(self) -> Any:
        """The backward loop, which makes the residuals of a trip when they are first read."""
        body = _compat.jaxpr_of(self._backward.params["jaxpr"])
        consts, carries = _compat.scan_arity(self._backward.params)
        both = list(zip(self._backward.invars, body.invars, strict=True))
        fixed, carried, rows = both[:consts], both[consts : consts + carries], both[consts + carries :]
        fixed_inputs = tuple(self._operand)[: self._consts]
        known: dict[int, Any] = {}  # by value of the forward body: what stands for it in the new one
        for value in self._one.starts:
            outer = self._rows[value] if value in self._rows else self._operand[value]
            known[value] = _inner(fixed if value in fixed_inputs else rows, outer, self._variable[value].aval)
        copied = [_renamed(operator, known) for operator in self._one.operators]
        swapped = {inner: known[self._dropped[outer]] for outer, inner in rows if _is_in(outer, self._dropped)}
        operands = [*fixed, *carried, *(pair for pair in rows if pair[1] not in swapped)]
        joint = _compat.make_closed_jaxpr(
            [inner for _, inner in operands],
            [_instead(atom, swapped) for atom in body.outvars],
            [*copied, *(one.replace(invars=[_instead(atom, swapped) for atom in one.invars]) for one in body.eqns)],
            self._backward.params["jaxpr"],
        )
        steady = {inner for outer, inner in (*fixed, *rows) if isinstance(outer, Literal) or outer in self._steady}
        guarded = [known[value] for value in self._one.starts if known[value] not in steady]
        closed = _with_copies(joint, len(copied), guarded, [inner for _, inner in carried])
        outers = [outer for outer, _ in operands]
        return _compat.scan_equation(self._backward, outers, self._backward.outvars, closed, (len(fixed), carries))


def _stack_of(aval: Any, trips: int) -> Any:
    """A variable for the rows of all trips."""
    return Var(_compat.aval_of(jax.ShapeDtypeStruct((trips, *aval.shape), aval.dtype)))


def _is_in(atom: Any, variables: Container[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _instead(atom: Any, known: Mapping[Any, Any]) -> Any:
    return known[atom] if _is_in(atom, known) else atom


def _inner(operands: list[tuple[Any, Any]], outer: Any, aval: Any) -> Any:
    """What an operand of a loop is called in the body; one that is none yet is added to (outside, inside) ``operands``."""
    for known, inner in operands:
        if known is outer:
            return inner
    operands.append((outer, Var(aval)))
    return operands[-1][1]


def _renamed(operator: Operator, known: dict[int, Any]) -> Any:
    """The equation of an operator on what stands for its operands; what stands for its results is noted."""
    equation = operator.equation
    invars = [
        atom if value is None else known[value] for value, atom in zip(operator.operands, equation.invars, strict=True)
    ]
    outvars = [v if isinstance(v, DropVar) else Var(v.aval) for v in equation.outvars]
    known.update(zip(operator.results, outvars, strict=True))
    return equation.replace(invars=invars, outvars=outvars)


def _with_copies(joint: Any, count: int, guarded: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    """The body of a backward loop that makes its residuals, with copies of the operators that do, which are its first ``count``.

    Of its inputs, barriers guard ``guarded``, and ``cotangents`` are what the loop carries.
    """
    graph = build_graph(joint, platform="cpu")
    first, rest = graph.operators[:count], graph.operators[count:]
    first = tuple(replace(one, phase=Phase.FORWARD) for one in first)
    rest = tuple(replace(one, phase=Phase.BACKWARD) for one in rest)
    graph = replace(graph, operators=(*first, *rest))
    jaxpr = _compat.jaxpr_of(joint)
    number = dict(zip(jaxpr.invars, graph.inputs, strict=True))
    read = {value for one in rest for value in one.operands}
    needed = frozenset(value for one in first for value in one.results if value in read)
    again = Again(needed, first, tuple(number[v] for v in guarded))
    equations = list(CopyWriter(graph, [again], made_of(graph, {number[v] for v in cotangents})).equations())
    flat = _compat.make_closed_jaxpr(jaxpr.invars, jaxpr.outvars, equations, joint)
    clean, _ = _compat.eliminate_dead_code(_compat.jaxpr_of(flat), [True] * len(jaxpr.invars))
    return _compat.make_closed_jaxpr(jaxpr.invars, clean.outvars, clean.eqns, joint)
