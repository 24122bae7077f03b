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

A loop in the forward pass is one operator.  Where its backward loop can compute again trip by trip what its trips leave
(:mod:`autopar.inter_op.remat_loops`), both are rewritten so first, as the layer of the loop chooses, and what it then leaves is
kept; any other loop is run again as a whole, and one that the user's own code rematerialises not at all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from autopar import _compat
from autopar._compat import Literal
from autopar.graph.build import BARRIER, build_graph
from autopar.graph.fusion import COSTLY, FREE, FUSIBLE, INPUT_FUSIBLE
from autopar.graph.inline import inline
from autopar.graph.ir import Graph, Operator, Phase, Value
from autopar.graph.tracing import TracedProgram
from autopar.inter_op.copies import Again, CopyWriter, leading_to, made_of
from autopar.inter_op.crossings import boundaries
from autopar.inter_op.layers import SLACK, layers
from autopar.inter_op.looped import as_one_trip, looped
from autopar.inter_op.placing import SMALL_BYTES, anchored_among
from autopar.inter_op.remat_loops import Inside, divided, loop_pairs, with_divided
from autopar.plan import LayerRemat, Remat

MOST_LAYERS = 64
"""The forward pass is divided into so many layers at most, each of which has a choice of its own."""


@dataclass(frozen=True)
class RematCost:
    """What a choice for one layer means, for whole arrays: bytes kept for the backward pass, and the work that is repeated."""

    kept_bytes: int
    """Of arrays in memory: what readers make of another one on the way is none."""
    flops: Mapping[str, float]
    """By the type of numbers."""
    bytes_moved: float


class Rematerialising:
    """Owns what is known of a step whose layers may compute values again."""

    def __init__(
        self, program: TracedProgram, graph: Graph, batch: Sequence[int], state_pairs: Sequence[tuple[int, int]]
    ) -> None:
        """``batch`` are the input positions of batch leaves."""
        self._program, self._graph, self._batch = program, graph, tuple(batch)
        self._state_pairs = tuple(state_pairs)
        self._written = _Level(graph, self._batch, frozenset())
        self._pairs = loop_pairs(graph)
        self._inside: dict[Remat, tuple[Inside, ...]] = {Remat.NONE: ()}
        self._levels: dict[frozenset[tuple[Remat, int]], _Level] = {}

    @property
    def num_positions(self) -> int:
        """How many operators the forward pass counts."""
        return len(self._written.counted)

    @property
    def says_remat(self) -> bool:
        """Whether the user's own code rematerialises (``jax.checkpoint``, ``nn.remat``)."""
        if any(pair.is_rematted for pair in self._pairs):
            return True
        return any(operator.primitive == BARRIER for operator, _ in self._graph.all_operators())

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Before which operators of the forward pass layers begin, 0 among them; no more than it where nothing is trained."""
        if not any(operator.phase is Phase.BACKWARD for operator in self._graph.operators) or not self._batch:
            return (0,)
        flat = as_one_trip(self._program, self._graph, self._batch)
        loop = looped(build_graph(flat.jaxpr, platform="cpu"), self._batch, 1)
        found = (0, *layers(loop, self._state_pairs, at_most=MOST_LAYERS, at_least=2))
        coarser = narrow_starts(found, boundaries(loop, self._state_pairs).crossing_bytes.tolist())
        if self._held_bytes(coarser) < (1 - SLACK) * self._held_bytes(found):
            found = coarser
        several = (found[::times] for times in range(1, len(found)))
        return next((starts for starts in several if self._saves(starts)), found)

    def _saves(self, starts: tuple[int, ...]) -> bool:
        """Whether less is held if all these layers are computed again than if none is."""
        nothing = LayerRemat(starts, (Remat.NONE,) * len(starts))
        return self._held_bytes(starts) < (1 - SLACK) * sum(self._stored_bytes(nothing))

    def _held_bytes(self, starts: tuple[int, ...]) -> int:
        """What is held if all these layers are computed again: what is kept of all, and what the largest makes again."""
        chosen = LayerRemat(starts, (Remat.FULL,) * len(starts))
        kept, whole = map(self._stored_bytes, (chosen, chosen.with_kinds([Remat.NONE] * len(starts))))
        return sum(kept) + max(both - one for one, both in zip(kept, whole, strict=True))

    def _stored_bytes(self, chosen: LayerRemat) -> list[int]:
        """What the layers keep, without what kernels that read it make of the rest on the way."""
        level = self._level(chosen)
        found = []
        for layer in range(len(chosen.starts)):
            kept = level.kept(chosen, layer)
            found.append(sum(level.graph.values[v].size_bytes for v in kept if not level.is_on_the_way(v, kept)))
        return found

    def all(self, kind: Remat) -> LayerRemat:
        """The same choice for every layer."""
        return LayerRemat(self.starts, (kind,) * len(self.starts))

    def kept(self, chosen: LayerRemat, layer: int) -> frozenset[Value]:
        """Values of the forward pass that the backward pass of a layer reads; those of trips are stacks of all trips."""
        level = self._level(chosen)
        return frozenset(level.graph.values[value] for value in level.kept(chosen, layer))

    def repeated(self, chosen: LayerRemat, layer: int) -> tuple[tuple[Operator, int], ...]:
        """The operators of the forward pass that a layer computes again, and how often."""
        found = [(operator, 1) for operator in self._level(chosen).again(chosen, layer).operators]
        return (*found, *((o, one.trips) for one in self._divided(chosen, layer) for o in one.operators))

    def cost(self, chosen: LayerRemat, layer: int) -> RematCost:
        """What the choice for a layer means."""
        level = self._level(chosen)
        values, again = level.graph.values, level.again(chosen, layer)
        flops: dict[str, float] = {}
        moved = float(sum(values[value].size_bytes for value in {*again.guarded, *again.needed}))
        moved += sum(one.moved_bytes for one in self._divided(chosen, layer))
        for whole, times in self.repeated(chosen, layer):
            for operator, trips in _all_of(whole):
                if operator.primitive not in _PART_OF_OTHERS:
                    dtype = str(operator.equation.outvars[0].aval.dtype)
                    flops[dtype] = flops.get(dtype, 0.0) + operator.flops * trips * times
                    moved += operator.bytes_moved * trips * times
        return RematCost(sum(values[value].size_bytes for value in level.held(chosen, layer)), flops, moved)

    def program(self, chosen: LayerRemat) -> TracedProgram:
        """The step with copies (see the module docstring); results and inputs are the same."""
        jaxpr = _compat.jaxpr_of(self._program.jaxpr)
        whole = _compat.make_closed_jaxpr(
            jaxpr.invars,
            jaxpr.outvars,
            self._level(chosen).equations(chosen),
            self._program.jaxpr,
            constvars=jaxpr.constvars,
            consts=_compat.consts_of(self._program.jaxpr),
        )
        return replace(self._program, jaxpr=inline(whole))

    def surviving(self, chosen: LayerRemat) -> tuple[int, ...]:
        """Which operators of the forward pass, counted from 0, are left of it in :meth:`program`; ascending."""
        jaxpr = _compat.jaxpr_of(self._program.jaxpr)
        level = self._level(chosen)
        read = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
        live = set()
        for equation in reversed(level.equations(chosen)):
            if equation.effects or not read.isdisjoint(equation.outvars):
                live.add(id(equation))
                read.update(atom for atom in equation.invars if not isinstance(atom, Literal))
        return tuple(number for number, one in enumerate(level.counted) if id(one.equation) in live)

    def _divided(self, chosen: LayerRemat, layer: int) -> tuple[Inside, ...]:
        """The loops of a layer that compute again trip by trip."""
        kind, operators = chosen.kinds[layer], self._graph.operators
        if kind not in self._inside:
            self._inside[kind] = divided(self._graph, self._pairs, _KEEPS[kind], self._written.at_hand)
        return tuple(
            one for one in self._inside[kind] if self._written.layer(chosen, operators[one.pair.forward]) == layer
        )

    def _level(self, chosen: LayerRemat) -> _Level:
        """The step with its loops rewritten as chosen; layers know nothing of it yet."""
        layers = range(len(chosen.kinds))
        loops = [(chosen.kinds[layer], one) for layer in layers for one in self._divided(chosen, layer)]
        key = frozenset((kind, one.pair.forward) for kind, one in loops)
        if not loops and not any(pair.is_rematted for pair in self._pairs):
            return self._written
        if key not in self._levels:
            jaxpr = with_divided(self._graph, [one for _, one in loops], self._written.changing)
            settled = {pair.forward for pair in self._pairs if pair.is_rematted}
            graph = build_graph(jaxpr, platform="cpu") if loops else self._graph
            self._levels[key] = _Level(graph, self._batch, settled | {one.pair.forward for _, one in loops})
        return self._levels[key]


def narrow_starts(starts: Sequence[int], crossing_bytes: Sequence[float]) -> tuple[int, ...]:
    """The first of the starts of layers, and those before which less crosses than before the ones around them.

    What crosses is kept: a layer that begins inside a wide block, between two narrow places, keeps most of what it should not.
    Nothing crosses before the first and at the end.  Of several in a row before which as much crosses, all or none are narrow.
    """
    heights = [0.0, *(float(crossing_bytes[start]) for start in starts[1:]), 0.0]

    def next_height(k: int, way: int) -> float:
        other = k
        while max(heights[k], heights[other]) <= (1 + SLACK) * min(heights[k], heights[other]):
            other += way
        return heights[other]

    inside = range(1, len(starts))
    narrow = [k for k in inside if min(next_height(k, -1), next_height(k, 1)) > heights[k] > 0]
    return (starts[0], *(starts[k] for k in narrow))


class _Level:
    """Owns what is known of one flat program; nothing in its loops is looked at."""

    def __init__(self, graph: Graph, batch: Sequence[int], settled: Set[int]) -> None:
        """The loops at the positions ``settled`` say themselves what is computed again: their results are kept."""
        self.graph = graph
        rows = {graph.inputs[position] for position in batch}
        heavy = {v for v in graph.inputs if v not in rows and graph.values[v].size_bytes > SMALL_BYTES}
        anchored = anchored_among(graph.operators, heavy, rows)
        self._of_weights = made_of(graph, {v for v in graph.inputs if v not in rows and _is_inexact(graph, v)}) - rows
        self.changing = rows | made_of(graph, {v for v in graph.inputs if _may_be_key(graph, v)})
        self._settled = {graph.operators[position].id for position in settled}
        self._number: dict[int, int] = {}  # of a forward operator: how many of those that are counted precede it
        forward = [operator for operator in graph.operators if operator.phase is Phase.FORWARD]
        self.counted = tuple(operator for operator in forward if operator.id in anchored)
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
    def at_hand(self) -> frozenset[int]:
        """Values that are there in the backward pass of the step as it was written, or are made of weights alone."""
        ends = {*self.graph.inputs, *self.graph.constants, *self._of_weights}
        return frozenset(ends | {value for value in self._maker if self._is_read_backward(value)})

    def kept(self, chosen: LayerRemat, layer: int) -> frozenset[int]:
        """See :meth:`Rematerialising.kept`."""
        again = self.again(chosen, layer)
        own = {v for o in self._forward() if self.layer(chosen, o) == layer for v in o.results}
        read = {v for v in own if self._is_read_backward(v)} - again.needed
        made_again = {v for o in again.operators for v in o.results} - set(again.guarded)
        read |= {v for o in again.operators for v in o.operands if v is not None} - made_again
        return frozenset(v for v in read if v in self._maker and self._maker[v].id in self._number)

    def held(self, chosen: LayerRemat, layer: int) -> frozenset[int]:
        """The arrays in which what is kept lies in memory.

        Elementwise work on one other array is made again by kernels that read it, and that array is kept; products and sums are
        handed what they read.  What goes through the barrier of a layer that computes again is there as it is.
        """
        kept = self.kept(chosen, layer)
        if chosen.kinds[layer] is not Remat.NONE:
            return kept
        values = self.graph.values
        found = set()
        for value in kept:
            origin = self._origins.get(value, value)
            is_handed = any(
                o.phase is Phase.BACKWARD and o.primitive not in FUSIBLE for o in self._readers.get(value, ())
            )
            is_no_larger = origin in kept or values[origin].size_bytes <= values[value].size_bytes
            found.add(origin if is_no_larger and not is_handed else value)
        return frozenset(found)

    @cached_property
    def _origins(self) -> dict[int, int]:
        """The array of which alone an elementwise result of the forward pass is made, however often it is read on the way."""
        found: dict[int, int] = {}
        for operator in self._forward():
            if operator.primitive not in FUSIBLE:
                continue
            for result in operator.results:
                size = math.prod(self.graph.values[result].shape)
                whole = {
                    v for v in operator.operands if v is not None and math.prod(self.graph.values[v].shape) >= size
                }
                origins = {found.get(v, v) for v in whole}
                if len(origins) == 1 and origins <= self._maker.keys():
                    found[result] = origins.pop()
        return found

    def is_on_the_way(self, value: int, kept: Set[int]) -> bool:
        """Whether a value is cheap work on single elements of other values that are kept."""
        maker = self._maker[value]
        made_of = {v for v in maker.operands if v is not None and v in self._maker}
        return maker.primitive in FUSIBLE - COSTLY and made_of <= kept

    def equations(self, chosen: LayerRemat) -> list[Any]:
        """The equations of the step and of the copies, those without use among them."""
        layers = [self.again(chosen, layer) for layer, kind in enumerate(chosen.kinds) if kind is not Remat.NONE]
        made_backward = {v for o in self.graph.operators if o.phase is Phase.BACKWARD for v in o.results}
        cotangents = made_backward & self.changing  # zeros, with which sums begin, are to be seen as such
        return list(CopyWriter(self.graph, [layer for layer in layers if layer.needed], cotangents).equations())

    def layer(self, chosen: LayerRemat, operator: Operator) -> int:
        """The layer of an operator of the forward pass."""
        return bisect_right(chosen.starts, self._number[operator.id]) - 1

    def again(self, chosen: LayerRemat, layer: int) -> Again:
        """What a layer computes again."""
        if chosen.kinds[layer] is Remat.NONE:
            return Again(frozenset(), (), ())

        def is_kept(value: int) -> bool:
            return self._is_kept(value, chosen, layer)

        own = [o for o in self._forward() if self.layer(chosen, o) == layer]
        made = [value for operator in own for value in operator.results]
        needed = frozenset(value for value in made if self._is_read_backward(value) and not is_kept(value))
        operators, starts = leading_to(own, needed, is_kept)
        return Again(needed, operators, tuple(value for value in starts if value in self.changing))

    def _forward(self) -> Iterator[Operator]:
        return (operator for operator in self.graph.operators if operator.id in self._number)

    def _is_read_backward(self, value: int) -> bool:
        return any(reader.phase is Phase.BACKWARD for reader in self._readers.get(value, ()))

    def _is_kept(self, value: int, chosen: LayerRemat, layer: int) -> bool:
        """Whether a value is at hand in the backward pass whatever the layer computes again."""
        maker = self._maker.get(value)
        if maker is None or maker.id not in self._number or self.layer(chosen, maker) != layer:
            return True
        if value in self._of_weights or value in self._results or maker.equation.effects or maker.id in self._settled:
            return True
        if _KEEPS[chosen.kinds[layer]](maker):
            return True
        readers = self._readers.get(value, ())
        return any(o.id in self._number and self.layer(chosen, o) != layer for o in readers)


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


_KEEPS: Mapping[Remat, Callable[[Operator], bool]] = {Remat.FULL: lambda _: False, Remat.DOTS: _is_plain_product}
"""Of which operators the results are kept where a layer computes again."""

_PART_OF_OTHERS = FUSIBLE | INPUT_FUSIBLE | FREE
"""Work that runs inside other kernels: what it reads and makes in the end is counted, what is between is not."""


def _all_of(operator: Operator) -> Iterator[tuple[Operator, int]]:
    """An operator, or those of its bodies, each with the number of times it runs."""
    if not operator.bodies:
        yield operator, 1
    for body in operator.bodies:
        yield from body.all_operators()
