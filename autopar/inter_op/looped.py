"""A step seen as one loop over microbatches, with what comes before and after it.

    before    what the microbatches share: casts of parameters, sums over the whole batch that follow from it alone
    loop      j = 0 … N−1: forward and backward pass of microbatch j, adding to the accumulators
    after     the update, and outputs that were waited for

For N > 1 that is what :mod:`autopar.inter_op.accumulate` writes.  For N = 1 the passes become a loop of one trip, so that
a pipeline of one microbatch is no case of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar import _compat
from autopar.errors import PlanError
from autopar.graph.build import LoopKind
from autopar.graph.inline import inline
from autopar.graph.ir import Graph, Operator, Phase
from autopar.graph.tracing import TracedProgram
from autopar.inter_op.accumulate import folded_shape


@dataclass(frozen=True)
class Looped:
    """A step whose operator number ``position`` is the loop over its microbatches; batch leaves are (N, B/N, …)."""

    graph: Graph
    position: int
    batch: tuple[int, ...]
    """Input positions of batch leaves."""
    shares: tuple[int, ...] = ()
    """Where the loop is one trip that holds a loop over microbatches for each of several meshes: their numbers of microbatches
    (:mod:`autopar.inter_op.shares`)."""

    @property
    def loop(self) -> Operator:
        """The loop over microbatches."""
        return self.graph.operators[self.position]

    @property
    def body(self) -> Graph:
        """One microbatch."""
        return self.loop.bodies[0]

    @property
    def count(self) -> int:
        """The number of microbatches."""
        return self.body.trips


def constants_of(loop: Operator) -> frozenset[int]:
    """What a loop over microbatches reads whole in every trip, parameters above all, as values of its body."""
    consts, _ = _compat.scan_arity(loop.equation.params)
    return frozenset(loop.bodies[0].inputs[:consts])


def looped(graph: Graph, batch: Sequence[int], count: int) -> Looped:
    """The loop over ``count`` microbatches in the graph of a step; ``batch`` are the input positions of batch leaves.

    Raises :class:`~autopar.errors.PlanError` where no such loop reads the batch.
    """
    rows = {graph.inputs[position] for position in batch}
    for position, operator in enumerate(graph.operators):
        if operator.primitive == LoopKind.SCAN and operator.bodies[0].trips == count:
            consts, carries = _compat.scan_arity(operator.equation.params)
            if not rows.isdisjoint(operator.operands[consts + carries :]):
                return Looped(graph, position, tuple(batch))
    raise PlanError(
        "the step computes nothing from its batch, so it has no forward pass to cut into stages; if another argument is "
        "the batch, name it with batch_argnums="
    )


def as_one_trip(program: TracedProgram, graph: Graph, batch: Sequence[int]) -> TracedProgram:
    """The program with its forward and backward pass as a loop of one trip; batch leaves become (1, B, …)."""
    avals = list(program.in_avals)
    for position in batch:
        aval = avals[position]
        avals[position] = _compat.aval_of(jax.ShapeDtypeStruct(folded_shape(aval.shape, 1), aval.dtype))
    shapes = [_compat.shape_of(aval) for aval in avals]
    flat = inline(jax.make_jaxpr(_OneTrip(graph, frozenset(batch)).step)(*shapes))
    assert not _compat.consts_of(flat)  # constants of the first trace are inputs
    return replace(program, jaxpr=flat, in_avals=tuple(avals))


class _OneTrip:
    """Owns what does not change while the step is traced anew."""

    def __init__(self, graph: Graph, batch: frozenset[int]) -> None:
        self._graph = graph
        self._rows = {graph.inputs[position] for position in batch}
        self._inside = [operator for operator in graph.operators if operator.phase is not Phase.UPDATE]
        self._after = [operator for operator in graph.operators if operator.phase is Phase.UPDATE]
        read = {v for o in self._after for v in o.operands} | set(graph.outputs)
        self._kept = [result for operator in self._inside for result in operator.results if result in read]

    def step(self, *arguments: Any) -> list[Any]:
        graph = self._graph
        known = dict(zip(graph.inputs, arguments, strict=True))
        rows = {value: known.pop(value) for value in self._rows}

        def one(carry: None, given: tuple[Any, dict[int, Any]]) -> tuple[None, list[Any]]:
            inside = {**known, **given[1]}
            _run(self._inside, inside)
            return carry, [inside[value] for value in self._kept]

        _, stacked = lax.scan(one, None, (jnp.arange(1, dtype=jnp.int32), rows))
        known.update({value: row.reshape(row.shape[1:]) for value, row in rows.items()})
        for value, array in zip(self._kept, stacked, strict=True):
            known[value] = array.reshape(array.shape[1:]) if hasattr(array, "reshape") else array[0]
        _run(self._after, known)
        outputs = _compat.jaxpr_of(graph.jaxpr).outvars
        return [_operand(value, atom, known) for value, atom in zip(graph.outputs, outputs, strict=True)]


def _run(operators: Sequence[Operator], known: dict[int, Any]) -> None:
    for operator in operators:
        atoms = operator.equation.invars
        with _compat.as_written(operator.equation):
            operands = [_operand(value, atom, known) for value, atom in zip(operator.operands, atoms, strict=True)]
            known.update(zip(operator.results, _compat.evaluate(operator.equation, operands), strict=True))


def _operand(value: int | None, atom: Any, known: dict[int, Any]) -> Any:
    return _literal(atom) if value is None else known[value]


def _literal(atom: Any) -> Any:
    return jnp.asarray(atom.val, atom.aval.dtype)


def with_open_branches(program: TracedProgram) -> TracedProgram:
    """The program with its outermost branches, where they have no effects, replaced by all their work and a selection.

    A branch of an update (``MultiSteps``, ``apply_if_finite``) reads and makes arrays of every stage.  Opened, each of its
    operators goes to the stage of its operands, and only the predicate travels.  What is selected is what the branch taken
    would have made; the other's work is done in vain.
    """
    jaxpr = _compat.jaxpr_of(program.jaxpr)
    if not any(_can_open(equation) for equation in jaxpr.eqns):
        return program

    def step(*arguments: Any) -> list[Any]:
        return _evaluate_opened(jaxpr, arguments)

    shapes = [_compat.shape_of(aval) for aval in program.in_avals]
    flat = inline(jax.make_jaxpr(step)(*shapes))
    assert not _compat.consts_of(flat)
    return replace(program, jaxpr=flat)


def _can_open(equation: Any) -> bool:
    return bool(equation.primitive.name == LoopKind.COND and not equation.effects)


def _evaluate_opened(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    known = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return _literal(atom) if isinstance(atom, _compat.Literal) else known[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        with _compat.as_written(equation):
            if _can_open(equation):
                branches = map(_compat.jaxpr_of, equation.params["branches"])
                cases = [_evaluate_opened(branch, operands[1:]) for branch in branches]
                results = [lax.select_n(operands[0], *values) for values in zip(*cases, strict=True)]
            else:
                results = _compat.evaluate(equation, operands)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
