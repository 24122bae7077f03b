"""How long does a collective take, soon after another and after work?

Devices with processors of their own: a chain of collectives, each of which waits for the one before.

Devices that share cores do not come to a collective together: the last one works while the first ones wait, each arrival
wakes those that wait, and cores stand still.  A chain of collectives alone shows nothing of it.  So there each collective
stands between matrix products, and

    seconds of one = (median of L collectives after work − median of 1 collective and as much work) / (L − 1)

where the one collective in either chain is that which waits for devices that were started later.  Curves are of collectives
after little work; what small ones take longer after more of it is measured as *waits*.  (All-reduces among eight devices on two
cores took 0.18 ms soon after another, 0.2 ms after 0.3 ms of work, 0.5 ms after 1 to 2 ms, and 1.2 ms after 14 ms.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from autopar.bench import SPEC, Bench
from autopar.cluster import Platform
from autopar.cost_model.collectives import Collective, wire_bytes
from autopar.curves import Curve
from autopar.errors import ClusterError
from autopar.profile import CollectiveCurve
from autopar.timing import LEAST_SECONDS

WORKED_CHAIN = 17
"""Links of a chain of collectives between products."""
WAITING_ELEMENTS = 1024
"""Of float32 on each device, in the collectives of which waits are measured."""


def share_cores(bench: Bench) -> bool:
    """Whether its devices are several on the cores of one processor."""
    return bench.devices[0].platform == Platform.CPU.value and len(bench.devices) > 1


def group_sizes(bench: Bench) -> list[int]:
    """Sizes of equal groups of its devices, more than one in each."""
    count = len(bench.devices)
    return [size for size in range(2, count + 1) if count % size == 0]


def collective_curves(
    bench: Bench, full_bytes: Sequence[int], work_side: int, say: Callable[[str], None]
) -> Iterator[CollectiveCurve]:
    """Every kind in groups of every divisor of the number of devices; ``full_bytes`` as the cost model counts them.

    Devices that share cores compute products of matrices of ``work_side`` in between.
    """
    for group_size in group_sizes(bench):
        for kind in Collective:
            samples = {}
            for size_bytes in full_bytes:
                say(f"{kind.value} of {size_bytes >> 10} KiB among {group_size}")
                elements, sent = sizes_of(kind, size_bytes, group_size)
                samples[sent] = collective_seconds(bench, kind, group_size, elements, work_side)
            yield CollectiveCurve(kind.value, group_size, Curve.through(samples))


def collective_seconds(bench: Bench, kind: Collective, group_size: int, elements: int, work_side: int) -> float:
    """Seconds of one collective to which each device brings so many float32.

    Devices that share cores compute two products of matrices of ``work_side`` before it.
    """
    if share_cores(bench):
        return _worked(bench, kind, group_size, elements, work_side).collective_seconds
    mesh = bench.mesh(group_size)
    x = bench.spread((elements,), mesh)
    link = LINKS[kind]
    return bench.chain_seconds(
        lambda value: link(value, group_size), mesh, x, check=lambda length, text: check_count(kind, length, text)
    )


def waiting_seconds(bench: Bench, group_size: int, work_sides: tuple[int, ...]) -> dict[float, float]:
    """Seconds of work → seconds that a small all-reduce takes longer after it than after the least; of shared cores."""
    return waits_of([_worked(bench, Collective.ALL_REDUCE, group_size, WAITING_ELEMENTS, side) for side in work_sides])


@dataclass(frozen=True)
class Worked:
    """Of one link of a chain, as long as all devices need for it."""

    work_seconds: float
    collective_seconds: float


def waits_of(found: Sequence[Worked]) -> dict[float, float]:
    """Seconds of work → seconds that the collective after it takes longer than that of the first."""
    least = found[0].collective_seconds
    return {one.work_seconds: max(one.collective_seconds - least, LEAST_SECONDS) for one in found}


def sizes_of(kind: Collective, full_bytes: int, group_size: int) -> tuple[int, float]:
    """The float32 that each device brings to a collective of about that size, as many for each member; and wire bytes."""
    brought = group_size if kind is Collective.ALL_GATHER else 1
    elements = max(full_bytes // brought // 4 // group_size, 1) * group_size
    return elements, wire_bytes(kind, 4.0 * elements * brought, group_size)


def _worked(bench: Bench, kind: Collective, group_size: int, elements: int, side: int) -> Worked:
    """Two products of that side, and what a chain of them takes longer with a collective after each link."""
    mesh = bench.mesh(group_size)
    x, work = bench.spread((elements,), mesh), bench.spread((side, side), mesh)
    link = LINKS[kind]

    def chain(sends: int) -> Any:
        def worked(value: jax.Array, activations: jax.Array) -> tuple[jax.Array, jax.Array]:
            weights = activations
            for number in range(WORKED_CHAIN):
                activations = (activations + value[0]) @ weights @ weights
                value = value.at[0].set(activations[0, 0])
                value = link(value, group_size) if number < sends else value
            return value, activations

        both = (SPEC, SPEC)
        local = jax.shard_map(worked, mesh=mesh, in_specs=both, out_specs=both, check_vma=False)
        compiled: Any = jax.jit(local).lower(x, work).compile()
        check_count(kind, sends, compiled.as_text())
        return compiled

    one, all_links = chain(1), chain(WORKED_CHAIN)
    least, most = bench.timer.waiting(lambda: one(x, work), lambda: all_links(x, work))
    return Worked(least / WORKED_CHAIN, max((most - least) / (WORKED_CHAIN - 1), LEAST_SECONDS))


def check_count(kind: Collective, length: int, text: str) -> None:
    """Raises ``ClusterError`` unless the executable holds so many of the kind, without which what was timed means nothing."""
    opcode = "collective-permute" if kind is Collective.PERMUTE else kind.value
    found = text.count(f" {opcode}(") + text.count(f" {opcode}-start(")
    if found != length:
        raise ClusterError(
            f"a chain of {length} {kind.value} compiled to {found}, so it cannot be timed on this backend; report this"
        )


# ----------------------------------------------------------------------------------------- one collective, made to chain


def _all_reduce(value: jax.Array, group_size: int) -> jax.Array:
    # The device's number in one place keeps the operand from being provably replicated.
    return lax.psum(value, "group").at[0].add(lax.axis_index("group").astype(value.dtype))


def _all_gather(value: jax.Array, group_size: int) -> jax.Array:
    return value.at[0].set(lax.all_gather(value, "group", tiled=True)[-1])


def _reduce_scatter(value: jax.Array, group_size: int) -> jax.Array:
    return value.at[0].set(lax.psum_scatter(value, "group", tiled=True)[-1])


def _all_to_all(value: jax.Array, group_size: int) -> jax.Array:
    return lax.all_to_all(lax.optimization_barrier(value), "group", 0, 0, tiled=True)


def _permute(value: jax.Array, group_size: int) -> jax.Array:
    return lax.ppermute(value, "group", [(place, (place + 1) % group_size) for place in range(group_size)])


LINKS: dict[Collective, Callable[[jax.Array, int], jax.Array]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.PERMUTE: _permute,
}
