"""A differentiated step in which layers compute again what their backward passes need, instead of keeping it.

The forward pass is divided into layers ℓ (:mod:`autopar.inter_op.layers`).  Of the values that ℓ makes, these are *kept* in any
case: what other layers read (its boundary), results of the step, what is made of weights without the batch, and under ``dots``
what convolutions, and matrix products without batch dimensions, make.  Let I(ℓ) be the others that the backward pass reads.  It
reads copies of them,

    guarded = optimization_barrier(kept values, rows of the batch and keys that the copies are made of, a cotangent)
    I′(ℓ)   = the operators of ℓ that lead to I(ℓ), on what is guarded
    backward operators:  v ∈ I(ℓ)  ⟶  v′ ∈ I′(ℓ)

so that nothing of I(ℓ) lives from the forward pass to the backward pass; what of the forward pass only the backward pass read is
gone from it.  The barrier keeps a compiler from finding that both do
the same work; the cotangent, which the first reader then takes from behind the barrier, keeps it from doing the work early.  This
is what ``jax.checkpoint`` lowers to (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost"), written into a program
that is differentiated already, and so a choice of whoever plans it.  Copies stand where they are first read, in the phase of the
backward pass.

A loop in the forward pass is one operator: it is run again as a whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from autopar import _compat
from autopar._compat import DropVar, Literal, Var
from autopar.graph.build import BARRIER, build_graph
from autopar.graph.fusion import FREE, FUSIBLE, INPUT_FUSIBLE
from autopar.graph.inline import inline
from autopar.graph.ir import Graph, Operator, Phase
from autopar.graph.tracing import TracedProgram
from autopar.inter_op.layers import layers
from autopar.inter_op.looped import as_one_trip, looped
from autopar.inter_op.placing import SMALL_BYTES, anchored_among
from autopar.plan import LayerRemat, Remat

MOST_LAYERS = 64
"""The forward pass is divided into so many layers at most, each of which has a choice of its own."""


@dataclass(frozen=True)
class RematCost:
    """What a choice for one layer means, for whole arrays: bytes kept for the backward pass, and the work that is repeated."""

    kept_bytes: int
    flops: Mapping[str, float]
    """By the type of numbers."""
    bytes_moved: float


@dataclass(frozen=True)
class _Again:
    """What one layer computes again: values that its backward pass reads, operators that make them, and what those read."""

    needed: frozenset[int]
    operators: tuple[Operator, ...]
    guarded: tuple[int, ...]


class Rematerialising:
    """Owns what is known of a step whose layers may compute values again."""

    def __init__(
        self, program: TracedProgram, graph: Graph, batch: Sequence[int], state_pairs: Sequence[tuple[int, int]]
    ) -> None:
        """``batch`` are the input positions of batch leaves."""
        self._program, self._graph, self._batch = program, graph, tuple(batch)
        self._state_pairs = tuple(state_pairs)
        rows = {graph.inputs[position] for position in batch}
        heavy = {v for v in graph.inputs if v not in rows and graph.values[v].size_bytes > SMALL_BYTES}
        anchored = anchored_among(graph.operators, heavy, rows)
        self._of_weights = _made_of(graph, {v for v in graph.inputs if v not in rows and _is_inexact(graph, v)}) - rows
        self._changing = rows | _made_of(graph, {v for v in graph.inputs if _may_be_key(graph, v)})
        self._dtypes = {value.id: value.dtype for value in graph.all_values()}
        self._number: dict[int, int] = {}  # of a forward operator: how many of those that are counted precede it
        forward = [operator for operator in graph.operators if operator.phase is Phase.FORWARD]
        self._counted = [operator for operator in forward if operator.id in anchored]
        position = -1
        for operator in forward:
            position += operator.id in anchored
            self._number[operator.id] = max(position, 0)
        self._maker = {result: operator for operator in graph.operators for result in operator.results}
        self._readers: dict[int, list[Operator]] = {}
        for operator in graph.operators:
            for value in operator.operands:
                if value is not None:
                    self._readers.setdefault(value, []).append(operator)
        self._results = frozenset(v for v in graph.outputs if v is not None)

    @property
    def num_positions(self) -> int:
        """How many operators the forward pass counts."""
        return len(self._counted)

    @property
    def says_remat(self) -> bool:
        """Whether the user's own code rematerialises (``jax.checkpoint``, ``nn.remat``)."""
        return any(operator.primitive == BARRIER for operator, _ in self._graph.all_operators())

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Before which operators of the forward pass layers begin, 0 among them; no more than it where nothing is trained."""
        if not any(operator.phase is Phase.BACKWARD for operator in self._graph.operators) or not self._batch:
            return (0,)
        flat = as_one_trip(self._program, self._graph, self._batch)
        loop = looped(build_graph(flat.jaxpr, platform="cpu"), self._batch, 1)
        return (0, *layers(loop, self._state_pairs, at_most=MOST_LAYERS, at_least=2))

    def all(self, kind: Remat) -> LayerRemat:
        """The same choice for every layer."""
        return LayerRemat(self.starts, (kind,) * len(self.starts))

    def kept(self, chosen: LayerRemat, layer: int) -> frozenset[int]:
        """Values of the forward pass that the backward pass of a layer reads, of the step as it was written."""
        again = self._again(chosen, layer)
        own = {v for o in self._forward() if self._layer(chosen, o) == layer for v in o.results}
        read = {v for v in own if self._is_read_backward(v)} - again.needed
        made_again = {v for o in again.operators for v in o.results} - set(again.guarded)
        read |= {v for o in again.operators for v in o.operands if v is not None} - made_again
        return frozenset(v for v in read if v in self._maker and self._maker[v].id in self._number)

    def repeated(self, chosen: LayerRemat, layer: int) -> tuple[Operator, ...]:
        """The operators of the forward pass that a layer computes again."""
        return self._again(chosen, layer).operators

    def cost(self, chosen: LayerRemat, layer: int) -> RematCost:
        """What the choice for a layer means."""
        values, again = self._graph.values, self._again(chosen, layer)
        flops: dict[str, float] = {}
        moved = float(sum(values[value].size_bytes for value in {*again.guarded, *again.needed}))
        for operator, trips in _all_of(again.operators):
            if operator.primitive not in _PART_OF_OTHERS:
                dtype = self._dtypes[operator.results[0]]
                flops[dtype] = flops.get(dtype, 0.0) + operator.flops * trips
                moved += operator.bytes_moved * trips
        return RematCost(sum(values[value].size_bytes for value in self.kept(chosen, layer)), flops, moved)

    def program(self, chosen: LayerRemat) -> TracedProgram:
        """The step with copies (see the module docstring); results and inputs are the same."""
        jaxpr = _compat.jaxpr_of(self._program.jaxpr)
        whole = _compat.make_closed_jaxpr(
            jaxpr.invars,
            jaxpr.outvars,
            self._equations(chosen),
            self._program.jaxpr,
            constvars=jaxpr.constvars,
            consts=_compat.consts_of(self._program.jaxpr),
        )
        return replace(self._program, jaxpr=inline(whole))

    def surviving(self, chosen: LayerRemat) -> tuple[int, ...]:
        """Which operators of the forward pass, counted from 0, are left of it in :meth:`program`; ascending."""
        jaxpr = _compat.jaxpr_of(self._program.jaxpr)
        read = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
        live = set()
        for equation in reversed(self._equations(chosen)):
            if equation.effects or not read.isdisjoint(equation.outvars):
                live.add(id(equation))
                read.update(atom for atom in equation.invars if not isinstance(atom, Literal))
        return tuple(self._number[o.id] for o in self._counted if id(o.equation) in live)

    def _equations(self, chosen: LayerRemat) -> list[Any]:
        """The equations of the step and of the copies, those without use among them."""
        layers = [self._again(chosen, layer) for layer, kind in enumerate(chosen.kinds) if kind is not Remat.NONE]
        return list(_Writer(self._graph, [layer for layer in layers if layer.needed], self._changing).equations())

    def _forward(self) -> Iterator[Operator]:
        return (operator for operator in self._graph.operators if operator.id in self._number)

    def _layer(self, chosen: LayerRemat, operator: Operator) -> int:
        return bisect_right(chosen.starts, self._number[operator.id]) - 1

    def _is_read_backward(self, value: int) -> bool:
        return any(reader.phase is Phase.BACKWARD for reader in self._readers.get(value, ()))

    def _is_kept(self, value: int, chosen: LayerRemat, layer: int) -> bool:
        """Whether a value is at hand in the backward pass whatever the layer computes again."""
        maker = self._maker.get(value)
        if maker is None or maker.id not in self._number or self._layer(chosen, maker) != layer:
            return True
        if value in self._of_weights or value in self._results or maker.equation.effects:
            return True
        if chosen.kinds[layer] is Remat.DOTS and _is_plain_product(maker):
            return True
        readers = self._readers.get(value, ())
        return any(o.id in self._number and self._layer(chosen, o) != layer for o in readers)

    def _again(self, chosen: LayerRemat, layer: int) -> _Again:
        if chosen.kinds[layer] is Remat.NONE:
            return _Again(frozenset(), (), ())
        own = [o for o in self._forward() if self._layer(chosen, o) == layer]
        needed = {
            value
            for operator in own
            for value in operator.results
            if self._is_read_backward(value) and not self._is_kept(value, chosen, layer)
        }
        made: set[int] = set()
        guarded: dict[int, None] = {}
        wanted = set(needed)
        for operator in reversed(own):
            if wanted.isdisjoint(operator.results):
                continue
            made.add(operator.id)
            for value in operator.operands:
                if value is None:
                    continue
                if not self._is_kept(value, chosen, layer):
                    wanted.add(value)
                elif value in self._changing:
                    guarded[value] = None
        return _Again(frozenset(needed), tuple(o for o in own if o.id in made), tuple(guarded))


def _made_of(graph: Graph, values: set[int]) -> set[int]:
    """The values and all that is made of any of them."""
    found = set(values)
    for operator in graph.operators:
        if not found.isdisjoint(operator.operands):
            found.update(operator.results)
    return found


def _is_inexact(graph: Graph, value: int) -> bool:
    """Whether it is a weight or a setting: keys and counters are whole numbers."""
    dtype = graph.values[value].dtype
    return not dtype.startswith("key<") and jnp.issubdtype(dtype, jnp.inexact)


def _may_be_key(graph: Graph, value: int) -> bool:
    dtype = graph.values[value].dtype
    return dtype.startswith("key<") or dtype == "uint32"


def _is_plain_product(operator: Operator) -> bool:
    """Whether it is a convolution, or a matrix product of one batch: those of attention's scores have many."""
    if operator.primitive == "conv_general_dilated":
        return True
    return operator.primitive == "dot_general" and not operator.equation.params["dimension_numbers"][1][0]


_PART_OF_OTHERS = FUSIBLE | INPUT_FUSIBLE | FREE
"""Work that runs inside other kernels: what it reads and makes in the end is counted, what is between is not."""


def _all_of(operators: Iterable[Operator]) -> Iterator[tuple[Operator, int]]:
    """Operators and those of their bodies, each with the number of times it runs."""
    for operator in operators:
        if not operator.bodies:
            yield operator, 1
        for body in operator.bodies:
            yield from body.all_operators()


class _Writer:
    """Owns the copies that are written so far."""

    def __init__(self, graph: Graph, layers: Iterable[_Again], changing: Set[int]) -> None:
        """``changing`` are values that depend on the batch or on keys."""
        self._graph = graph
        self._layers = tuple(layers)
        self._of_value = {value: layer for layer in self._layers for value in layer.needed}
        self._copies: dict[int, Any] = {}  # by value: its copy
        self._behind: dict[int, dict[int, Any]] = {}  # by layer (its identity), value: what stands behind the barrier
        self._variable: dict[int, Any] = {}
        jaxpr = _compat.jaxpr_of(graph.jaxpr)
        self._variable.update(zip(graph.inputs, jaxpr.invars, strict=True))
        self._variable.update(zip(graph.constants, jaxpr.constvars, strict=True))
        for operator in graph.operators:
            self._variable.update(zip(operator.results, operator.equation.outvars, strict=True))
        made_backward = {v for o in graph.operators if o.phase is Phase.BACKWARD for v in o.results}
        self._cotangents = made_backward & changing  # zeros, with which sums begin, are to be seen as such
        self._makers = {id(one): {v: o for o in one.operators for v in o.results} for one in self._layers}

    def equations(self) -> Iterator[Any]:
        """The equations of the whole program, copies among them."""
        for operator in self._graph.operators:
            reads = [v for v in operator.operands if v in self._of_value] if operator.phase is Phase.BACKWARD else []
            if not reads:
                yield operator.equation
                continue
            swapped: dict[int, Any] = {}
            for value in reads:
                assert value is not None
                layer = self._of_value[value]
                if id(layer) not in self._behind:
                    yield from self._barrier(layer, operator)
                    gates = [v for v in operator.operands if v is not None and v in self._behind[id(layer)]]
                    swapped.update({v: self._behind[id(layer)][v] for v in gates if v in self._cotangents})
                yield from self._copy(value, layer)
                swapped[value] = self._copies[value]
            yield self._reading(operator, swapped, operator.equation.source_info)

    def _barrier(self, layer: _Again, first_reader: Operator) -> Iterator[Any]:
        """The barrier of a layer, if there is anything to guard."""
        cotangents = [v for v in first_reader.operands if v is not None and v in self._cotangents]
        values = list(dict.fromkeys((*layer.guarded, *cotangents)))
        found = {value: Var(self._variable[value].aval) for value in values}
        self._behind[id(layer)] = dict(found)
        like = layer.operators[0].equation
        if not values:
            return
        yield like.replace(
            invars=[self._variable[value] for value in values],
            outvars=list(found.values()),
            primitive=_compat.optimization_barrier_primitive(),
            params={},
            effects=frozenset(),
            source_info=_compat.in_backward_pass(like),
        )

    def _copy(self, value: int, layer: _Again) -> Iterator[Any]:
        """The equations that make the copy of a value, those of what it is made of first; none if it is there."""
        makers = self._makers[id(layer)]
        stack = [value]
        while stack:
            if stack[-1] in self._copies:
                stack.pop()
                continue
            operator = makers[stack[-1]]
            missing = [v for v in operator.operands if v in makers and self._is_own(v, layer) and v not in self._copies]
            if missing:
                stack.extend(v for v in missing if v is not None)
                continue
            read = {v: self._copies[v] for v in operator.operands if v in self._copies and self._is_own(v, layer)}
            read |= {v: self._behind[id(layer)][v] for v in layer.guarded if v in operator.operands}
            equation = self._reading(operator, read, _compat.in_backward_pass(operator.equation))
            outvars = [v if isinstance(v, DropVar) else Var(v.aval) for v in operator.equation.outvars]
            self._copies.update(zip(operator.results, outvars, strict=True))
            yield equation.replace(outvars=outvars)

    def _is_own(self, value: int | None, layer: _Again) -> bool:
        """Whether copies read a copy of a value and not what was kept of it."""
        return value not in layer.guarded

    def _reading(self, operator: Operator, instead: dict[int, Any], source_info: Any) -> Any:
        atoms = [
            atom if value is None or isinstance(atom, Literal) else instead.get(value, atom)
            for value, atom in zip(operator.operands, operator.equation.invars, strict=True)
        ]
        return operator.equation.replace(invars=atoms, source_info=source_info)
