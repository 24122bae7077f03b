"""A step whose microbatches are each a batch of their own.

Where examples depend on each other through the parameters (see :mod:`autopar.inter_op.examples`), a batch of B examples
cannot be cut exactly.  Told to, we then take the function as it is *on B/N examples* – it is traced again at that size –
and compute, with u the passes up to the gradients and w the update,

    y = w(ū),    ū = (1/N) Σⱼ uⱼ,    uⱼ = u(microbatch j alone)

or Σⱼ uⱼ where u grows with the batch as a sum over examples does (degree 1 of :mod:`autopar.inter_op.growth`), and what has
a row for each example is concatenated.  So losses, gradients and statistics that are means are averaged.
Statistics of the batch, its order, its capacity are those of the microbatch, exactly as in a call on it alone.  The
update runs once, as in the program of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar import _compat
from autopar.cluster import Mesh
from autopar.errors import PlanError
from autopar.graph.build import build_graph
from autopar.graph.inline import inline
from autopar.graph.ir import Graph, Operator, Phase
from autopar.graph.tracing import TracedProgram
from autopar.inter_op.accumulate import Microbatch, Rewriting, folded, operands_of, unstacked, zeros_like
from autopar.inter_op.examples import AXIS, CoupledBatchError, Examples, Level
from autopar.inter_op.growth import Degree, degrees
from autopar.inter_op.terms import DRAW, Terms
from autopar.schedule.reshard import replicated


@dataclass(frozen=True)
class Twin:
    """One program on the whole batch and on a microbatch; equal but for sizes, so ids mean the same in both graphs."""

    whole: TracedProgram
    small: TracedProgram
    graph: Graph
    small_graph: Graph


def twin_of(whole: TracedProgram, graph: Graph, retrace: Callable[[], TracedProgram], platform: str) -> Twin:
    """The program on a microbatch beside that on the whole batch; raises PlanError where they are not one program."""
    advice = 'it cannot be told what batch_coupling="per_microbatch" would mean; leave num_microbatches=1'
    try:
        small = retrace()
    except Exception as error:
        raise PlanError(f"{whole.name} fails on a microbatch alone, so {advice}: {error}") from error
    small_graph = build_graph(small.jaxpr, platform=platform)
    for (one, _), (other, _) in zip(graph.all_operators(), small_graph.all_operators(), strict=False):
        if _shape_of_program(one) != _shape_of_program(other):
            raise PlanError(f"{whole.name} computes otherwise on a microbatch, from {one.source} on, so {advice}")
    if graph.outputs != small_graph.outputs or graph.inputs != small_graph.inputs:
        raise PlanError(f"{whole.name} computes otherwise on a microbatch, so {advice}")
    return Twin(whole, small, graph, small_graph)


def _shape_of_program(operator: Operator) -> Any:
    return operator.id, operator.primitive, operator.operands, operator.results


def each_alone(twin: Twin, batch: Sequence[int], terms: Terms) -> TracedProgram:
    """The program that treats each microbatch as a batch of its own; ``batch`` are the input positions of batch leaves.

    Its batch inputs have shape (N, B/N, …), all else is as in the whole batch's program.  Raises
    :class:`~autopar.inter_op.examples.CoupledBatchError` where results of microbatches cannot be made one.
    """
    avals = [
        folded(aval, terms.count) if position in set(batch) else aval
        for position, aval in enumerate(twin.whole.in_avals)
    ]
    places = range(twin.whole.num_visible, len(avals))
    odd = [place for place in places if avals[place].shape != twin.small.in_avals[place].shape]
    if odd:
        raise PlanError(
            f"{twin.whole.name} closes over an array whose size follows the batch; make it inside the function"
        )
    shapes = [_compat.shape_of(aval) for aval in avals]
    flat = inline(jax.make_jaxpr(_Rewriting(twin, batch, terms).step)(*shapes))
    assert not _compat.consts_of(flat)  # constants of the first trace are inputs, and the rewriting makes none
    return replace(twin.whole, jaxpr=flat, in_avals=tuple(avals))


class _Rewriting:
    """Owns what does not change while the step is traced anew."""

    def __init__(self, twin: Twin, batch: Sequence[int], terms: Terms) -> None:
        self._twin = twin
        self._terms = terms
        self._rows = [twin.graph.inputs[position] for position in batch]
        self._degrees = degrees(twin.graph, twin.small_graph, terms.count)
        level = _level_of(twin.graph, twin.small_graph, terms)
        self._level = level
        self._parts = _Parts(twin, self._rows, frozenset((*level.draws, *level.bodies)))
        self._runner = Rewriting(
            Examples(level, frozenset(), Mesh((AXIS,), (terms.count,))), frozenset(batch), terms.accumulator
        )
        self._parts.check(twin, self._degrees)

    def step(self, *arguments: Any) -> list[Any]:
        graph, small, parts = self._twin.graph, self._twin.small_graph, self._parts
        given: dict[int, Any] = dict(zip(graph.inputs, arguments, strict=True))
        rows = {value: given[value] for value in self._rows}
        whole = {**given, **{value: row.reshape(-1, *row.shape[2:]) for value, row in rows.items()}}
        whole.update(zip(graph.constants, _compat.consts_of(graph.jaxpr), strict=True))
        alone = {**given, **dict(zip(small.constants, _compat.consts_of(small.jaxpr), strict=True))}
        self._runner.run_whole(parts.before, alone)
        whole.update(self._loop(alone, rows))
        self._runner.run_whole(parts.after, whole)
        return operands_of(graph.outputs, _compat.jaxpr_of(graph.jaxpr).outvars, whole.__getitem__)

    def _loop(self, known: dict[int, Any], rows: dict[int, Any]) -> dict[int, Any]:
        values, parts, count = self._twin.graph.values, self._parts, self._terms.count

        def one(sums: dict[int, Any], given: tuple[Any, dict[int, Any]]) -> tuple[dict[int, Any], dict[int, Any]]:
            number, row = given
            found = self._runner.pieces(Microbatch(number, self._level), parts.inside, {**known, **row})
            added = {value: sums[value] + found[value].astype(sums[value].dtype) for value in parts.summed}
            return added, {value: found[value] for value in parts.stacked}

        start = {v: zeros_like(values[v], self._terms.accumulator) for v in parts.summed}
        sums, stacked = lax.scan(one, start, (jnp.arange(count, dtype=jnp.int32), dict(rows)))
        means = {v: total if self._degrees[v] == 1 else total / count for v, total in sums.items()}
        done = {v: mean.astype(values[v].dtype) for v, mean in means.items()}
        return done | {v: unstacked(stacked[v], dim) for v, dim in parts.stacked.items()}


class _Parts:
    """Which operators run before the microbatches, for each, and after; which of their values are added or stacked."""

    def __init__(self, twin: Twin, rows: Sequence[int], draws: frozenset[int]) -> None:
        graph, small = twin.graph, twin.small_graph
        sized = {v for v in graph.values if graph.values[v].shape != small.values[v].shape}
        # What depends on the batch; of this what is known microbatch by microbatch; what depends on gradients.
        follows, made, graded = set(rows), set(rows), set[int]()
        inside: set[int] = set()
        for operator in graph.operators:
            operands = {value for value in operator.operands if value is not None}
            if operands.isdisjoint(follows) and operator.id not in draws:
                continue
            follows.update(operator.results)
            if operator.phase is Phase.BACKWARD or not operands.isdisjoint(graded):
                graded.update(operator.results)
            is_update = operator.phase is Phase.UPDATE and not graded.isdisjoint(operator.results)
            if is_update and operands.isdisjoint(sized) and operator.id not in draws:
                continue
            inside.add(operator.id)
            made.update(operator.results)
            late = (operands & follows) - made
            if late:
                raise CoupledBatchError(operator, "uses, for each example, what is known after all microbatches only")
        self.inside = [operator for operator in small.operators if operator.id in inside]
        self.before = _needed([o for o in small.operators if not follows & set(o.results)], self.inside, ())
        self.after = [operator for operator in graph.operators if operator.id not in inside]
        self.after = _needed(self.after, (), [v for v in graph.outputs if v is not None])
        read = {v for o in self.after for v in o.operands} | set(graph.outputs)
        crossing = [(o, v) for o in self.inside for v in o.results if v in read]
        self._makers = {v: o for o, v in crossing}
        self.stacked = {
            v: _grown_dim(o, graph.values[v].shape, small.values[v].shape) for o, v in crossing if v in sized
        }
        self.summed = [v for _, v in crossing if v not in sized]

    def check(self, twin: Twin, known: dict[int, Degree]) -> None:
        """Refuse whole numbers of microbatches that are no sums over examples."""
        for value in self.summed:
            dtype = twin.graph.values[value].dtype
            if dtype.startswith("key<") or not (
                jnp.issubdtype(dtype, jnp.inexact) or (known[value] == 1 and dtype != "bool")
            ):
                raise CoupledBatchError(
                    self._makers[value], f"gives each microbatch a value of its own of type {dtype}, which has no mean"
                )


def _needed(operators: Sequence[Operator], by: Sequence[Operator], outputs: Sequence[int]) -> list[Operator]:
    """Those of the operators whose results are read, directly or not."""
    wanted = {*outputs, *(v for operator in by for v in operator.operands if v is not None)}
    kept = []
    for operator in reversed(operators):
        if operator.equation.effects or not wanted.isdisjoint(operator.results):
            kept.append(operator)
            wanted.update(v for v in operator.operands if v is not None)
    return kept[::-1]


def _grown_dim(operator: Operator, whole: tuple[int, ...], small: tuple[int, ...]) -> int:
    dims = [dim for dim, (a, b) in enumerate(zip(whole, small, strict=True)) if a != b]
    if len(dims) != 1:
        raise CoupledBatchError(operator, f"has pairs of examples for results ({whole} of the whole batch)")
    return dims[0]


def _level_of(whole: Graph, small: Graph, terms: Terms) -> Level:
    """The small program as a level on which nothing is cut, but random draws are known with their whole shapes."""
    level = Level(small, terms.rng)
    for one, other in zip(whole.operators, small.operators, strict=True):
        bodies = tuple(_level_of(a, b, terms) for a, b in zip(one.bodies, other.bodies, strict=True))
        if any(body.draws or body.bodies for body in bodies):
            level.bodies[one.id] = bodies
        if one.primitive == DRAW and one.equation.params["shape"] != other.equation.params["shape"]:
            level.draws[one.id] = one
    for value, array in small.values.items():
        level.forms[value] = replicated(len(array.shape))
    return level
