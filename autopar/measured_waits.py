"""How much longer does a small collective take when more work lies before it?

Devices that share cores, and hosts with a ration of processor time, do not end their work together
(:mod:`autopar.cost_model.waits`).  A chain of L links, in each of which two products of matrices of side n come before a
collective of a few elements, takes

    one(n)  = median of (chain with L collectives − chain with 1, just before) / (L − 1)
    wait(n) = one(n) − one(the least n)

What is looked for is a few percent of the work, less than products gain or lose by where their arrays happen to lie.  So
both chains are one executable, which is told how many collectives to carry out, on the same arrays.

A device that waits for more others waits no less.  Among g₁ < g₂ < … devices the waits after as much work are made to rise
with g by the nearest rising figures in the sense of least squares (isotonic regression; Barlow et al., 1972); that they rise
with the work, curves see to.  (Eight devices on two cores, four times from the start: after 5 ms of work 0.3 ms among two
each time, 0.3 to 0.6 among four, 0.7 to 1.0 among eight; by two executables among two 0.7 to 2.0, among eight 0.6 to 0.7.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.optimize import isotonic_regression

from autopar.bench import SPEC, Bench
from autopar.cost_model.collectives import Collective
from autopar.measured_collectives import LINKS, WORKED_CHAIN, Worked, check_count, group_sizes
from autopar.timing import LEAST_SECONDS, Timer

PATIENCE = 10
"""So many times as long as for another figure is looked for what collectives wait."""
WAITING_ELEMENTS = 1024
"""Of float32 on each device, in the collectives of which waits are measured."""

Waits = Mapping[float, float]
"""Seconds of work → seconds that a collective after it takes longer than after the least."""
_State = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Link:
    """Two products of matrices of ``work_side``, then a collective to which each device brings so many float32."""

    kind: Collective
    group_size: int
    elements: int
    work_side: int


def waiting_seconds(bench: Bench, work_sides: Sequence[int], say: Callable[[str], None]) -> dict[int, Waits]:
    """Waits of small all-reduces in groups of every size, of devices that share cores."""
    timer = replace(bench.timer, seconds=PATIENCE * bench.timer.seconds)
    found = {}
    for group_size in group_sizes(bench):
        say(f"collectives among {group_size} after work")
        links = (Link(Collective.ALL_REDUCE, group_size, WAITING_ELEMENTS, side) for side in work_sides)
        found[group_size] = waits_of([worked(bench.mesh(group_size), link, WORKED_CHAIN, timer) for link in links])
    return rising(found)


def waits_of(found: Sequence[Worked]) -> Waits:
    """What each collective takes longer than the first, which comes after the least work."""
    least = found[0].collective_seconds
    return {one.work_seconds: max(one.collective_seconds - least, LEAST_SECONDS) for one in found}


def rising(found: Mapping[int, Waits]) -> dict[int, Waits]:
    """The same by size of group, after the least work, the next more and so on no less in larger groups."""
    sizes = sorted(found)
    ordered = [sorted(found[size].items()) for size in sizes]
    columns = [isotonic_regression([seconds for _, seconds in column]).x for column in zip(*ordered, strict=True)]
    return {
        size: {work: float(column[row]) for (work, _), column in zip(ordered[row], columns, strict=True)}
        for row, size in enumerate(sizes)
    }


def worked(mesh: Mesh, link: Link, length: int, timer: Timer) -> Worked:
    """What a chain of so many links takes, on all devices of a mesh at once, which may be those of several processes."""
    send, size = LINKS[link.kind], link.group_size

    def program(sends: jax.Array, value: jax.Array, weights: jax.Array) -> _State:
        def work(state: _State) -> _State:
            value, activations = state
            activations = (activations + value[0]) @ weights @ weights
            return value.at[0].set(activations[0, 0]), activations

        def work_and_send(state: _State) -> _State:
            value, activations = work(state)
            return send(value, size), activations

        state = lax.fori_loop(0, sends, lambda _, state: work_and_send(state), (value, weights))
        return lax.fori_loop(sends, length, lambda _, state: work(state), state)

    local = jax.shard_map(
        program, mesh=mesh, in_specs=(PartitionSpec(), SPEC, SPEC), out_specs=(SPEC, SPEC), check_vma=False
    )
    value, weights = _zeros(mesh, link.elements), _zeros(mesh, link.work_side, link.work_side)
    counts = [_placed(mesh, np.int32(count), PartitionSpec()) for count in (1, length)]
    compiled: Any = jax.jit(local).lower(counts[0], value, weights).compile()
    check_count(link.kind, 1, compiled.as_text())  # in the body of the first loop
    one, many = (lambda count=count: compiled(count, value, weights) for count in counts)
    least, more = timer.waiting(one, many)
    return Worked(least / length, max(more / (length - 1), LEAST_SECONDS))


def _zeros(mesh: Mesh, *shape: int) -> jax.Array:
    """So many on each device."""
    return _placed(mesh, np.zeros((mesh.size * shape[0], *shape[1:]), np.float32), SPEC)


def _placed(mesh: Mesh, whole: Any, spec: PartitionSpec) -> jax.Array:
    return jax.make_array_from_callback(np.shape(whole), NamedSharding(mesh, spec), lambda index: whole[index])
