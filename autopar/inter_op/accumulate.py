"""The same step with its batch cut into microbatches that run one after the other.

With the forms of :mod:`autopar.inter_op.examples`, a step is rewritten into

    before    what couples the examples but follows from the batch alone, on the whole batch
    loop      j = 0 … N−1:   pieces and summands of microbatch j;   Aᵥ ← Aᵥ + vⱼ for every sum v that is needed later
    after     the rest, on the accumulated sums: Aᵥ = v

which computes the same numbers (up to the order of the additions): shapes that hold the batch size are those of a
microbatch, constants (the 1/N of a mean) stay what they are, random numbers are those of the whole batch's draw.  The loop is
an ordinary ``scan``, so the planner prices and shards it like any other; accumulators may stay partial on devices.

A sum that is only scaled further is added up as it is and scaled once, Σ c·vⱼ = c·Σ vⱼ: what plain gradient descent does with
the gradients.  So they stay sums of what a pipeline's stages give to a tied weight, which stages add up each for itself.

What a barrier of rematerialisation guards is recomputed in the loop as far as it belongs to a microbatch.  The rest, weights in
a narrow type say, is made once before the loop and kept, for the forward passes read it all along.

Batch leaves enter as (N, B/N, …): microbatch j is row j, and a device holds its share of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar import _compat
from autopar.graph.build import BARRIER, LINEAR_WITH_A_LITERAL, LoopKind
from autopar.graph.fingerprint import work
from autopar.graph.inline import inline
from autopar.graph.ir import Operator, Value
from autopar.graph.tracing import TracedProgram
from autopar.inter_op.examples import Examples, Level, cut_dim, part_of
from autopar.inter_op.terms import AccumulatorDtype, MicrobatchRng, own_draw
from autopar.plan import Axes
from autopar.schedule.local_ops import run_local

CAST = "convert_element_type"
SCALES = LINEAR_WITH_A_LITERAL | {"neg"}
"""Of a sum, these give the same sum in other units: what else they take is no sum, and so a literal."""


def accumulated(
    program: TracedProgram,
    examples: Examples,
    batch: Sequence[int],
    accumulator: AccumulatorDtype = AccumulatorDtype.FLOAT32,
) -> TracedProgram:
    """The program that runs microbatch by microbatch; ``batch`` are the input positions of batch leaves.

    Its batch inputs have shape (N, B/N, …), all else is as in ``program``.
    """
    return traced_anew(program, Rewriting(examples, frozenset(batch), accumulator), batch)


def traced_anew(program: TracedProgram, rewriting: Rewriting, batch: Sequence[int]) -> TracedProgram:
    """The program as a rewriting runs it, with batch inputs (N, B/N, …)."""
    avals = list(program.in_avals)
    for position in batch:
        avals[position] = folded(avals[position], rewriting.count)
    shapes = [_compat.shape_of(aval) for aval in avals]
    flat = inline(jax.make_jaxpr(rewriting.step)(*shapes))
    assert not _compat.consts_of(flat)  # constants of the first trace are inputs, and the rewriting makes none
    return replace(program, jaxpr=flat, in_avals=tuple(avals))


def folded_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """(B, …) as (N, B/N, …)."""
    return (count, shape[0] // count, *shape[1:])


def folded(aval: Any, count: int) -> Any:
    """The abstract value of a batch leaf as the rewritten program takes it."""
    return _compat.aval_of(jax.ShapeDtypeStruct(folded_shape(aval.shape, count), aval.dtype))


@dataclass(frozen=True)
class Microbatch:
    """One microbatch (``number`` is a traced scalar) at one level of the program."""

    number: Any
    level: Level


_Operand = Callable[[int, int | None], Any]
"""(value, dimension along which its part is wanted, if it is a whole value) → array."""


class Rewriting:
    """Owns what does not change while the step is traced anew."""

    def __init__(self, examples: Examples, batch: frozenset[int], accumulator: AccumulatorDtype) -> None:
        self._examples = examples
        self._batch = batch
        self._accumulator = accumulator

    @property
    def count(self) -> int:
        """The number of microbatches."""
        return self._examples.mesh.size

    def step(self, *arguments: Any) -> list[Any]:
        """The flat results of the step; batch arguments have shape (N, B/N, …)."""
        level = self._examples.level
        graph = level.graph
        whole: dict[int, Any] = dict(zip(graph.inputs, arguments, strict=True))
        rows = {value: whole[value] for value in (graph.inputs[position] for position in self._batch)}
        whole.update({value: row.reshape(-1, *row.shape[2:]) for value, row in rows.items()})
        whole.update(zip(graph.constants, _compat.consts_of(graph.jaxpr), strict=True))
        parts = Parts(level, self._examples.before, self._accumulator)
        self.run_whole(parts.before, whole, parts.behind)
        whole.update({value: whole[known] for value in parts.same if (known := parts.behind(value)) in whole})
        sums, stacked = self.run_microbatches(parts, whole, rows)
        for value, added in parts.sums.items():
            whole[value] = sums[added].astype(graph.values[value].dtype)
        for value in parts.stacked:
            whole[value] = unstacked(stacked[value], cut_dim(level.forms[value]) or 0)
        self.run_whole(parts.after, whole, parts.behind)
        outputs = _compat.jaxpr_of(graph.jaxpr).outvars
        return operands_of(graph.outputs, outputs, lambda value: whole[parts.behind(value)])

    def run_whole(
        self, operators: Sequence[Operator], known: dict[int, Any], behind: Callable[[int], int] = lambda value: value
    ) -> None:
        """Run operators as they are; their results join ``known``, where a value is found as the one ``behind`` it."""
        for operator in operators:
            with _compat.as_written(operator.equation):
                operands = _operands(operator, lambda value: known[behind(value)])
                results = _compat.evaluate(operator.equation, operands)
            known.update(zip(operator.results, results, strict=True))

    def run_microbatches(self, parts: Parts, whole: Mapping[int, Any], rows: Mapping[int, Any]) -> tuple[Any, Any]:
        """The sums over all microbatches by what is added, and stacks of what is made for each; ``rows`` are (N, B/N, …)."""
        return self.trips(parts, whole, rows, range(self.count))

    def trips(
        self, parts: Parts, whole: Mapping[int, Any], rows: Mapping[int, Any], numbers: range
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """The microbatches with these numbers, whose ``rows`` are given, one after the other: what they add up to, and stacks."""
        level = self._examples.level

        def one(
            accumulators: dict[int, Any], given: tuple[Any, dict[int, Any]]
        ) -> tuple[dict[int, Any], dict[int, Any]]:
            number, row = given
            found = self.pieces(Microbatch(number, level), parts.inside, {**whole, **row})
            added = {value: total + found[value].astype(total.dtype) for value, total in accumulators.items()}
            return added, {value: found[value] for value in parts.stacked}

        count = jnp.arange(len(numbers), dtype=jnp.int32)
        given = count + numbers.start if numbers.start else count, dict(rows)
        sums, stacked = lax.scan(one, self.nothing_yet(parts), given)
        return sums, stacked

    def nothing_yet(self, parts: Parts) -> dict[int, Any]:
        """What the microbatches are added to, by the value that is added."""
        values = self._examples.level.graph.values
        return {value: zeros_like(values[value], self._accumulator) for value in parts.sums.values()}

    def pieces(
        self, one: Microbatch, operators: Sequence[Operator | tuple[int, int]], known: dict[int, Any]
    ) -> dict[int, Any]:
        """What a microbatch makes of a level: ``known`` holds values in their forms, grows, and is returned."""
        mesh, level = self._examples.mesh, one.level
        part: dict[tuple[int, int], Any] = {}

        def operand(value: int, dim: int | None) -> Any:
            if dim is None or not level.is_whole(value):
                return known[value]
            if (value, dim) not in part:
                extent = known[value].shape[dim] // mesh.size
                part[value, dim] = lax.dynamic_slice_in_dim(known[value], one.number * extent, extent, dim)
            return part[value, dim]

        for todo in operators:
            if isinstance(todo, tuple):
                operator, strategy = level.regrown[todo]
                if operator.primitive == BARRIER:  # its part is that of its operand
                    guarded = operator.operands[operator.results.index(todo[0])]
                    assert guarded is not None
                    part[todo] = operand(guarded, todo[1])
                    continue
                with _compat.as_written(operator.equation):
                    if strategy:
                        made = self._run(one, operator, strategy, operand)
                    else:
                        shape = list(operator.equation.params["shape"])
                        shape[todo[1] - len(operator.rule.operands[0])] //= mesh.size
                        made = own_draw(operator, _operands(operator, known.__getitem__)[0], one.number, tuple(shape))
                    part[todo] = made[operator.results.index(todo[0])]
                continue
            with _compat.as_written(todo.equation):
                if todo.id in level.draws:
                    results = self._draw(one, todo, operand)
                elif todo.bodies:
                    results = self._run_loop(one, todo, operand)
                elif todo.primitive == BARRIER and todo.id in level.strategies:
                    results = self._guard(one, todo, operand)
                elif level.strategies.get(todo.id):
                    results = self._run(one, todo, level.strategies[todo.id], operand)
                else:
                    results = _compat.evaluate(todo.equation, _operands(todo, known.__getitem__))
            known.update(zip(todo.results, results, strict=True))
        return known

    def _run(self, one: Microbatch, operator: Operator, strategy: tuple[Axes, ...], operand: _Operand) -> list[Any]:
        arrays = self._cut_operands(operator, strategy, operand)
        return run_local(
            operator, operator.equation, arrays, strategy, self._examples.mesh, index=lambda axes: one.number
        )

    def _cut_operands(self, operator: Operator, strategy: tuple[Axes, ...], operand: _Operand) -> list[Any]:
        carried = {number for number, axes in enumerate(strategy) if axes}
        arrays = []
        for value, dims, atom in zip(operator.operands, operator.rule.operands, operator.equation.invars, strict=True):
            if value is None:
                arrays.append(jnp.asarray(atom.val, atom.aval.dtype))
                continue
            dim = next((d for d, factors in enumerate(dims) if carried.intersection(factors)), None)
            arrays.append(operand(value, dim))
        return arrays

    def _guard(self, one: Microbatch, operator: Operator, operand: _Operand) -> list[Any]:
        """What belongs to the microbatch goes through the barrier, the rest stands beside it."""
        results = self._cut_operands(operator, one.level.strategies[operator.id], operand)
        own = [number for number, value in enumerate(operator.results) if not one.level.is_whole(value)]
        for number, array in zip(own, lax.optimization_barrier([results[number] for number in own]), strict=True):
            results[number] = array
        return results

    def _draw(self, one: Microbatch, operator: Operator, operand: _Operand) -> list[Any]:
        """The random bits of a microbatch that is traced alone: its own, or its rows of the whole batch's."""
        whole = one.level.draws[operator.id]
        (keys,) = _operands(operator, lambda value: operand(value, None))
        shapes = [tuple(one.equation.outvars[0].aval.shape) for one in (whole, operator)]
        if one.level.rng is MicrobatchRng.PER_MICROBATCH:
            return own_draw(operator, keys, one.number, operator.equation.params["shape"])
        dim = next(dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b)
        if (major := part_of(whole, 0, dim, self._examples.mesh)) is not None:
            return run_local(whole, whole.equation, [keys], major, self._examples.mesh, index=lambda axes: one.number)
        (bits,) = _compat.evaluate(whole.equation, [keys])
        return [lax.dynamic_slice_in_dim(bits, one.number * shapes[1][dim], shapes[1][dim], dim)]

    # --- loops ---

    def _run_loop(self, one: Microbatch, operator: Operator, operand: _Operand) -> list[Any]:
        inner = one.level.bodies.get(operator.id)
        if inner is None:
            return _compat.evaluate(operator.equation, _operands(operator, lambda value: operand(value, None)))
        if operator.primitive == LoopKind.COND:
            arrays = _operands(operator, lambda value: operand(value, None))
            branches = [self._callable(Microbatch(one.number, body)) for body in inner]
            return list(lax.switch(arrays[0], branches, *arrays[1:]))
        if operator.primitive == LoopKind.WHILE:
            return self._run_while(one, operator, inner, operand)
        return self._run_scan(one, operator, inner[0], operand)

    def _run_scan(self, one: Microbatch, operator: Operator, body: Level, operand: _Operand) -> list[Any]:
        params = operator.equation.params
        consts, carries = _compat.scan_arity(params)
        whole = consts + carries
        arrays = _in_forms(operator, body, operand, range(whole), 0)
        arrays += _in_forms(operator, body, operand, range(whole, len(operator.operands)), 1)
        run = self._callable(Microbatch(one.number, body))

        def trip(carry: list[Any], pieces: list[Any]) -> tuple[list[Any], list[Any]]:
            out = run(*arrays[:consts], *carry, *pieces)
            return out[:carries], out[carries:]

        carry, made = lax.scan(
            trip,
            arrays[consts:whole],
            arrays[whole:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *made]

    def _run_while(self, one: Microbatch, operator: Operator, inner: tuple[Level, ...], operand: _Operand) -> list[Any]:
        conditions, consts = _compat.while_arity(operator.equation.params)
        test, body = (self._callable(Microbatch(one.number, level)) for level in inner)
        fixed = _operands(operator, lambda value: operand(value, None))[:conditions]
        arrays = _in_forms(operator, inner[1], operand, range(len(operator.operands) - conditions), 0, conditions)
        return list(
            lax.while_loop(
                lambda carry: test(*fixed, *carry)[0],
                lambda carry: body(*arrays[:consts], *carry),
                arrays[consts:],
            )
        )

    def _callable(self, one: Microbatch) -> Callable[..., list[Any]]:
        level, graph = one.level, one.level.graph
        constants = dict(zip(graph.constants, _compat.consts_of(graph.jaxpr), strict=True))
        todo = _with_regrown(level, graph.operators)

        def run(*arguments: Any) -> list[Any]:
            found = self.pieces(one, todo, {**constants, **dict(zip(graph.inputs, arguments, strict=True))})
            return operands_of(graph.outputs, _compat.jaxpr_of(graph.jaxpr).outvars, found.__getitem__)

        return run


class Parts:
    """Which operators of the top level run before the loop, in it, and after it, and what passes between them."""

    def __init__(self, level: Level, early: frozenset[int], accumulator: AccumulatorDtype) -> None:
        graph = level.graph
        inside = _without_scaling([o for o in graph.operators if o.id not in early and o.id in level.strategies], level)
        self.inside = _with_regrown(level, inside)
        running = {operator.id for operator in inside}
        self.same = {
            result: value
            for operator in inside
            if operator.primitive == BARRIER
            for value, result in zip(operator.operands, operator.results, strict=True)
            if value is not None and level.is_whole(result)
        }
        whole = [o for o in graph.operators if o.id not in running and all(r in level.forms for r in o.results)]
        read_inside = {v for o in inside for v in o.operands if v is not None and level.is_whole(v)}
        read_inside |= {v for o, _ in level.regrown.values() for v in o.operands if v is not None}
        needed = set(map(self.behind, read_inside))
        before = []
        for operator in reversed(whole):
            if operator.id in early or not needed.isdisjoint(operator.results):
                before.append(operator)
                needed.update(self.behind(v) for v in operator.operands if v is not None)
        self.before = self._without_repetitions(before[::-1])
        done = {operator.id for operator in before} | running
        self.after = [operator for operator in graph.operators if operator.id not in done]
        read_after = {v for o in self.after for v in o.operands if v is not None}
        read_after |= {v for v in graph.outputs if v is not None}
        made_inside = [r for o in inside for r in o.results if r in read_after]
        makers = {result: operator for operator in inside for result in operator.results}
        self.sums = {
            value: _added_for(value, makers, graph.values, accumulator)
            for value in made_inside
            if level.forms[value].partial
        }
        """What is added up for each sum that is read after the loop."""
        self.stacked = [v for v in made_inside if cut_dim(level.forms[v]) is not None]

    def behind(self, value: int) -> int:
        """The value that a barrier in the loop guards, or that was computed before, if it is known outside of the loop."""
        while value in self.same:
            value = self.same[value]
        return value

    def _without_repetitions(self, operators: Sequence[Operator]) -> list[Operator]:
        """Without what was to be computed again behind a barrier, and is now what was computed in the first place."""
        first: dict[Hashable, Operator] = {}
        again: set[int] = set()
        left = []
        for operator in operators:
            is_again = not again.isdisjoint(operator.operands) or not self.same.keys().isdisjoint(operator.operands)
            operands = tuple(None if v is None else self.behind(v) for v in operator.operands)
            known = first.setdefault((work(operator.equation), operands), operator)
            if known is operator or not is_again or operator.equation.effects:
                left.append(operator)
            else:
                self.same.update(zip(operator.results, known.results, strict=True))
            if is_again:
                again.update(operator.results)
        return left


def _without_scaling(inside: Sequence[Operator], level: Level) -> list[Operator]:
    """Without what scales sums, unless a microbatch goes on with them."""
    left, read = [], set[int]()
    for operator in reversed(inside):
        is_sum = any(level.forms[result].partial for result in operator.results)
        if is_sum and operator.primitive in SCALES and read.isdisjoint(operator.results):
            continue
        left.append(operator)
        read.update(value for value in operator.operands if value is not None)
    return left[::-1]


def _added_for(
    value: int, makers: Mapping[int, Operator], values: Mapping[int, Value], accumulator: AccumulatorDtype
) -> int:
    """The value that a sum is a cast of, if its total is as good: one total then serves all who read it, in any type."""
    wanted = added_dtype(values[value].dtype, accumulator)
    while (maker := makers.get(value)) is not None and maker.primitive == CAST and maker.operands[0] is not None:
        before, after = values[maker.operands[0]].dtype, values[value].dtype
        widens = jnp.promote_types(before, after) == after and jnp.issubdtype(before, jnp.floating)
        if not widens or (accumulator is AccumulatorDtype.FLOAT32 and added_dtype(before, accumulator) != wanted):
            break
        value = maker.operands[0]
    return value


def _with_regrown(level: Level, operators: Sequence[Operator]) -> list[Operator | tuple[int, int]]:
    """Operators with, where they stand in the program, the parts of whole values that are computed in part."""
    order = {operator.id: number for number, operator in enumerate(level.graph.operators)}
    keyed: list[tuple[float, Operator | tuple[int, int]]] = [(float(order[o.id]), o) for o in operators]
    keyed += [(order[operator.id] - 0.5, key) for key, (operator, _) in level.regrown.items()]
    return [todo for _, todo in sorted(keyed, key=lambda pair: pair[0])]


def _in_forms(
    operator: Operator, body: Level, operand: _Operand, positions: range, stacked: int, shift: int = 0
) -> list[Any]:
    """Arrays for a body's inputs at ``positions``, each in the form that the body knows it in.

    Input k is operand k + ``shift``, which has ``stacked`` leading dimensions that the body does not see.
    """
    arrays = []
    for k in positions:
        value, atom = operator.operands[k + shift], operator.equation.invars[k + shift]
        dim = cut_dim(body.forms[body.graph.inputs[k]])
        if value is None:
            arrays.append(jnp.asarray(atom.val, atom.aval.dtype))
        else:
            arrays.append(operand(value, None if dim is None else dim + stacked))
    return arrays


def _operands(operator: Operator, known: Callable[[int], Any]) -> list[Any]:
    return operands_of(operator.operands, operator.equation.invars, known)


def operands_of(values: Sequence[int | None], atoms: Sequence[Any], known: Callable[[int], Any]) -> list[Any]:
    """Arrays for operands or outputs, literals among them."""
    return [
        jnp.asarray(atom.val, atom.aval.dtype) if value is None else known(value)
        for value, atom in zip(values, atoms, strict=True)
    ]


def zeros_like(value: Value, accumulator: AccumulatorDtype) -> jax.Array:
    """What a value is added to, microbatch by microbatch."""
    return jnp.zeros(value.shape, added_dtype(value.dtype, accumulator))


def added_dtype(dtype: str, accumulator: AccumulatorDtype) -> Any:
    """The type in which values of a type are added up: narrow floats in float32, as a product accumulates inside."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < jnp.dtype(jnp.float32).itemsize
    return jnp.dtype(jnp.float32 if narrow and accumulator is AccumulatorDtype.FLOAT32 else dtype)


def unstacked(stacked: Any, dim: int) -> Any:
    """(N, …, B/N, …) with the examples at ``dim`` + 1 as (…, B, …)."""
    moved = jnp.moveaxis(stacked, 0, dim)
    return moved.reshape(*moved.shape[:dim], -1, *moved.shape[dim + 2 :])
