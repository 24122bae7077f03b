"""The same step with its loops over layers cut between trips, so that stages of a pipeline can share them.

A loop over L layers becomes a chain of S loops over L/S layers each (or one more), and every stack of layers
(:mod:`autopar.inter_op.stacks`) S arrays,

    c₀ → scan(W[0:a]) → c₁ → scan(W[a:b]) → … → c_S            W = W[0:a] ⧺ W[a:b] ⧺ …

a reversed loop the same chain from its end.  Operators on stacks run on each piece alone; of a reduction over the layers
the results of the pieces are combined.  Where an operator wants the layers whole, their pieces are concatenated; where
a piece of a whole array is wanted, it is sliced out.  The numbers are those of the step up to the order of additions.

A leaf of the arguments or results that is a stack becomes S leaves: what a caller gives for one is split, what comes back is
one array again (:class:`Opened` says how).
"""

from __future__ import annotations

import itertools
import operator as operators
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar import _compat
from autopar.graph.build import BARRIER
from autopar.graph.inline import inline
from autopar.graph.ir import FactorKind, Graph, Operator
from autopar.graph.roles import Role, Roles
from autopar.graph.tracing import Keys, TracedProgram
from autopar.inter_op.placing import SMALL_BYTES
from autopar.inter_op.stacks import Rows, Stacks, dim_of, stacks_of
from autopar.schedule.local_ops import run_on_rows

MAY_BE_CUT = (Role.STATE, Role.OTHER)
"""Leaves that may be cut: of a step that only reads its parameters they are no state."""


@dataclass(frozen=True)
class LeafPieces:
    """A leaf that is several arrays: dimension ``dim`` is cut at ``ends``, the last of which is its extent."""

    dim: int
    ends: tuple[int, ...]

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Begin and end of each piece."""
        return tuple(itertools.pairwise((0, *self.ends)))

    def shape(self, whole: Sequence[int], number: int) -> tuple[int, ...]:
        """The shape of a piece of an array of shape ``whole``."""
        begin, end = self.ranges[number]
        return (*whole[: self.dim], end - begin, *whole[self.dim + 1 :])

    def keys(self, whole: Keys) -> tuple[Keys, ...]:
        """Paths of the pieces: that of the leaf, indexed."""
        return tuple((*whole, f"[{':, ' * self.dim}{begin}:{end}]") for begin, end in self.ranges)


@dataclass(frozen=True)
class Opened:
    """How the leaves of a step are those of its opened program: for each, its pieces, or None where it is one array in both."""

    inputs: tuple[LeafPieces | None, ...]
    outputs: tuple[LeafPieces | None, ...]

    def input_positions(self) -> tuple[tuple[int, ...], ...]:
        """For each leaf its positions among the opened program's inputs."""
        return _positions(self.inputs)

    def output_positions(self) -> tuple[tuple[int, ...], ...]:
        """For each result its positions among the opened program's outputs."""
        return _positions(self.outputs)


def _positions(leaves: Sequence[LeafPieces | None]) -> tuple[tuple[int, ...], ...]:
    numbers = itertools.count()
    return tuple(tuple(itertools.islice(numbers, 1 if pieces is None else len(pieces.ends))) for pieces in leaves)


def ends_of(count: int, pieces: int) -> tuple[int, ...]:
    """Where the pieces of ``count`` layers end: as even as can be, no more of them than layers."""
    many = min(count, pieces)
    return tuple(count * (number + 1) // many for number in range(many))


def opened(
    program: TracedProgram, graph: Graph, stacks: Stacks, pieces: int, roles: Roles
) -> tuple[TracedProgram, Opened]:
    """The program with its loops over layers in ``pieces`` each, and what became of its leaves.

    ``graph`` is that of the program; batch, keys, hidden inputs, and small results that are no state, stay whole.
    """
    leaves = _leaves(graph, stacks, pieces, roles)
    return _opened(program, graph, stacks, pieces, leaves), leaves


def opened_initialiser(
    program: TracedProgram, graph: Graph, results: Sequence[LeafPieces | None], layers: Mapping[int, Rows], pieces: int
) -> TracedProgram:
    """A program that makes the leaves of another one which is opened: of result k the pieces ``results[k]``.

    ``layers`` says of those results (by position) which of their dimensions are layers.
    """
    known = {value: rows for position, rows in layers.items() if (value := graph.outputs[position]) is not None}
    leaves = Opened((None,) * len(program.in_keys), tuple(results))
    return _opened(program, graph, stacks_of(graph, (), (), known), pieces, leaves)


def _opened(program: TracedProgram, graph: Graph, stacks: Stacks, pieces: int, leaves: Opened) -> TracedProgram:
    avals, keys = _cut_ends(program.in_avals, program.in_keys, leaves.inputs)
    shapes = [_compat.shape_of(aval) for aval in avals]
    flat = inline(jax.make_jaxpr(_Opening(graph, stacks, pieces, leaves).step)(*shapes))
    assert not _compat.consts_of(flat)  # constants of the first trace are inputs, and the rewriting makes none
    out_avals = tuple(atom.aval for atom in _compat.jaxpr_of(flat).outvars)
    _, out_keys = _cut_ends(program.out_avals, program.out_keys, leaves.outputs)
    return replace(program, jaxpr=flat, in_avals=avals, in_keys=keys, out_avals=out_avals, out_keys=out_keys)


def _leaves(graph: Graph, stacks: Stacks, pieces: int, roles: Roles) -> Opened:
    """The pieces of a program's leaves."""

    def cut_of(value: int) -> LeafPieces | None:
        rows = stacks.values.get(value)
        return None if rows is None else pieces_of(rows, graph.values[value].shape, pieces)

    before_of = {after: before for before, after in roles.state_pairs}
    inputs = [
        cut_of(value) if role in MAY_BE_CUT else None for value, role in zip(graph.inputs, roles.roles, strict=True)
    ]
    outputs: list[LeafPieces | None] = []
    for position, result in enumerate(graph.outputs):
        if position in before_of:
            outputs.append(inputs[before_of[position]])
        elif result is None or graph.values[result].size_bytes <= SMALL_BYTES:
            outputs.append(None)
        else:
            outputs.append(cut_of(result))
    return Opened(tuple(inputs), tuple(outputs))


def pieces_of(rows: Rows, shape: Sequence[int], pieces: int) -> LeafPieces:
    """The pieces of an array of which a dimension is layers."""
    size = shape[rows.dim] // rows.count
    return LeafPieces(rows.dim, tuple(end * size for end in ends_of(rows.count, pieces)))


def opened_roles(roles: Roles, leaves: Opened) -> Roles:
    """The roles of the opened program's inputs."""
    inputs, outputs = leaves.input_positions(), leaves.output_positions()
    pairs = [pair for before, after in roles.state_pairs for pair in zip(inputs[before], outputs[after], strict=True)]
    many = zip(roles.roles, inputs, strict=True)
    return replace(roles, roles=tuple(role for role, those in many for _ in those), state_pairs=tuple(sorted(pairs)))


def _cut_ends(
    avals: Sequence[Any], keys: Sequence[Keys], leaves: Sequence[LeafPieces | None]
) -> tuple[tuple[Any, ...], tuple[Keys, ...]]:
    found: list[Any] = []
    names: list[Keys] = []
    for aval, key, pieces in zip(avals, keys, leaves, strict=True):
        if pieces is None:
            found.append(aval)
            names.append(key)
            continue
        names += pieces.keys(key)
        shapes = [pieces.shape(aval.shape, number) for number in range(len(pieces.ends))]
        found += [
            _compat.aval_of(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=_compat.is_weak(aval)))
            for shape in shapes
        ]
    return tuple(found), tuple(names)


# ---------------------------------------------------------------------------------------------------- the rewriting


@dataclass
class _Stack:
    """An array that is known by its pieces; put together at most once."""

    pieces: LeafPieces
    arrays: list[Any]
    _whole: Any = field(default=None, repr=False)

    def whole(self) -> Any:
        if self._whole is None:
            self._whole = lax.concatenate(self.arrays, self.pieces.dim)
        return self._whole


class _Opening:
    """Owns what does not change while the step is traced anew."""

    def __init__(self, graph: Graph, stacks: Stacks, pieces: int, leaves: Opened) -> None:
        self._graph, self._stacks, self._pieces, self._leaves = graph, stacks, pieces, leaves

    def step(self, *arguments: Any) -> list[Any]:
        """The flat results of the opened program."""
        graph = self._graph
        known: dict[int, Any] = dict(zip(graph.constants, _compat.consts_of(graph.jaxpr), strict=True))
        for value, pieces, places in zip(
            graph.inputs, self._leaves.inputs, self._leaves.input_positions(), strict=True
        ):
            arrays = [arguments[place] for place in places]
            known[value] = arrays[0] if pieces is None else _Stack(pieces, arrays)
        for operator in graph.operators:
            with _compat.as_written(operator.equation):
                known.update(zip(operator.results, self._run(operator, known), strict=True))
        found: list[Any] = []
        atoms = _compat.jaxpr_of(graph.jaxpr).outvars
        for result, atom, out in zip(graph.outputs, atoms, self._leaves.outputs, strict=True):
            whole = jnp.asarray(atom.val, atom.aval.dtype) if result is None else known[result]
            found += [_joined(whole)] if out is None else _pieces(whole, out)
        return found

    def _run(self, operator: Operator, known: Mapping[int, Any]) -> list[Any]:
        operands = [
            jnp.asarray(atom.val, atom.aval.dtype) if value is None else known[value]
            for value, atom in zip(operator.operands, operator.equation.invars, strict=True)
        ]
        if operator.id in self._stacks.loops:
            return self._run_loop(operator, operands)
        if operator.primitive == BARRIER:
            return _guarded(operator, operands)
        if operator.id in self._stacks.factors:
            factor, count = self._stacks.factors[operator.id]
            carriers = [
                one
                for one, dims in zip(operands, operator.rule.operands, strict=True)
                if factor in itertools.chain(*dims)
            ]
            if not carriers or any(isinstance(one, _Stack) for one in carriers):
                return self._run_in_pieces(operator, operands, factor, count)
        return _compat.evaluate(operator.equation, [_joined(operand) for operand in operands])

    def _run_loop(self, operator: Operator, operands: Sequence[Any]) -> list[Any]:
        """The chain of shorter loops that a loop over layers becomes."""
        equation = operator.equation
        consts, carries = _compat.scan_arity(equation.params)
        fixed = [_joined(operand) for operand in operands[:consts]]
        carry = [_joined(operand) for operand in operands[consts : consts + carries]]
        ends = LeafPieces(0, ends_of(equation.params["length"], self._pieces))
        rows = [_pieces(operand, ends) for operand in operands[consts + carries :]]
        made: list[list[Any]] = [[] for _ in ends.ends]
        numbers = range(len(ends.ends))
        for number in reversed(numbers) if equation.params["reverse"] else numbers:
            begin, end = ends.ranges[number]
            unroll = min(int(equation.params["unroll"]), end - begin)
            shorter = equation.replace(params={**equation.params, "length": end - begin, "unroll": unroll})
            results = _compat.evaluate(shorter, [*fixed, *carry, *(row[number] for row in rows)])
            carry, made[number] = results[:carries], results[carries:]
        return [*carry, *(_Stack(ends, list(arrays)) for arrays in zip(*made, strict=True))]

    def _run_in_pieces(self, operator: Operator, operands: Sequence[Any], factor: int, count: int) -> list[Any]:
        """An operator on each piece of its factor ``factor``, which counts layers."""
        rule = operator.rule
        step = rule.factors[factor].size // count
        spans = LeafPieces(0, tuple(end * step for end in ends_of(count, self._pieces))).ranges
        parts = []
        for operand, dims in zip(operands, rule.operands, strict=True):
            dim = dim_of(operator, dims, factor)
            if dim is None:
                parts.append([_joined(operand)] * len(spans))
            else:
                parts.append(_pieces(operand, pieces_of(Rows(dim, count), _shape(operand), self._pieces)))
        made = [
            run_on_rows(operator, [part[number] for part in parts], factor, range(begin, end))
            for number, (begin, end) in enumerate(spans)
        ]
        kind = rule.factors[factor].kind
        results: list[Any] = []
        for position, arrays in enumerate(zip(*made, strict=True)):
            if kind is not FactorKind.PARALLEL:
                results.append(reduce(_combining(kind, arrays[0].dtype), arrays))
                continue
            dim = dim_of(operator, rule.results[position], factor)
            assert dim is not None
            shape = operator.equation.outvars[position].aval.shape
            results.append(_Stack(pieces_of(Rows(dim, count), shape, self._pieces), list(arrays)))
        return results


def _shape(operand: Any) -> tuple[int, ...]:
    if not isinstance(operand, _Stack):
        return tuple(jnp.shape(operand))
    shape = list(operand.arrays[0].shape)
    shape[operand.pieces.dim] = operand.pieces.ends[-1]
    return tuple(shape)


def _joined(operand: Any) -> Any:
    return operand.whole() if isinstance(operand, _Stack) else operand


def _pieces(operand: Any, pieces: LeafPieces) -> list[Any]:
    """The pieces of an array: at hand, or sliced out of the whole."""
    if isinstance(operand, _Stack) and operand.pieces == pieces:
        return operand.arrays
    return [lax.slice_in_dim(_joined(operand), begin, end, axis=pieces.dim) for begin, end in pieces.ranges]


def _guarded(operator: Operator, operands: Sequence[Any]) -> list[Any]:
    """A barrier guards each piece of its operands."""
    flat = [array for one in operands for array in (one.arrays if isinstance(one, _Stack) else [one])]
    results = iter(_compat.evaluate(operator.equation, flat))
    return [
        _Stack(one.pieces, [next(results) for _ in one.arrays]) if isinstance(one, _Stack) else next(results)
        for one in operands
    ]


def _combining(kind: FactorKind, dtype: Any) -> Callable[[Any, Any], Any]:
    """What makes one result of those of two pieces."""
    if kind is FactorKind.SUM:
        return operators.add
    if dtype == jnp.bool_:
        return operators.or_ if kind is FactorKind.MAX else operators.and_
    return lax.max if kind is FactorKind.MAX else lax.min
