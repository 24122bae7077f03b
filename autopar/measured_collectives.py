"""How long does a collective take, soon after another and after work?

Devices with processors of their own: a chain of collectives, each of which waits for the one before.

Devices that share cores do not come to a collective together: the last one works while the first ones wait, each arrival
wakes those that wait, and cores stand still.  A chain of collectives alone shows nothing of it.  So there each collective
stands between matrix products, and

    seconds of one = median of (L collectives after work − 1 collective and as much work, just before) / (L − 1)

where the one collective in either chain is that which waits for devices that were started later.  Curves are of collectives
after little work; what more of it adds is measured elsewhere (:mod:`autopar.measured_waits`).  (All-reduces among eight on two
cores took 0.18 ms soon after another, 0.2 ms after 0.3 ms of work, 0.5 ms after 1 to 2 ms, and 1.2 ms after 14 ms.)

Devices that share cores share caches as well, and among all that a step does neither what a collective sends nor where it puts
what comes is in them.  So collectives of a chain take turns on arrays that no cache holds together.  (All-gathers of 512 KiB
among eight devices took 0.33 ms where each came back to the arrays of the one before, 0.62 where none did; reduce-scatters 0.27
and 0.46.  By the first, a Llama under ZeRO was foretold at 0.83 to 0.87 of the clock, by the second at 0.88 to 0.92.)
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
TURN_BYTES = 1 << 26
"""A device comes back to an array after so many bytes, if the chain is that long; after another one at least."""


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


@dataclass(frozen=True)
class Worked:
    """Of one link of a chain, as long as all devices need for it."""

    work_seconds: float
    collective_seconds: float


def sizes_of(kind: Collective, full_bytes: int, group_size: int) -> tuple[int, float]:
    """The float32 that each device brings to a collective of about that size, as many for each member; and wire bytes."""
    brought = group_size if kind is Collective.ALL_GATHER else 1
    elements = max(full_bytes // brought // 4 // group_size, 1) * group_size
    return elements, wire_bytes(kind, 4.0 * elements * brought, group_size)


def _worked(bench: Bench, kind: Collective, group_size: int, elements: int, side: int) -> Worked:
    """Two products of that side, and what a chain of them takes longer with a collective after each link."""
    one, all_links = (_WorkedChain(bench, kind, group_size, elements, side, sends) for sends in (1, WORKED_CHAIN))
    least, more = bench.timer.waiting(one, all_links)
    return Worked(least / WORKED_CHAIN, max(more / (WORKED_CHAIN - 1), LEAST_SECONDS))


class _WorkedChain:
    """Products, and after so many of them a collective, each of the next array in turn; a call runs it once more.

    Arrays that are sent and those that are received take the memory of those of the call before: memory that is new to a call
    would cost more.
    """

    def __init__(self, bench: Bench, kind: Collective, group_size: int, elements: int, side: int, sends: int) -> None:
        mesh, send = bench.mesh(group_size), SENDS[kind]
        received = _received_elements(kind, elements, group_size)
        turns = min(max(TURN_BYTES // (4 * (elements + received)), 2), WORKED_CHAIN)

        def worked(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            (weights, *sent), got = arrays[: turns + 1], list(arrays[turns + 1 :])
            activations = weights
            for number in range(WORKED_CHAIN):
                activations = (activations + got[number % turns - 1][0]) @ weights @ weights
                turn = number % turns
                if kind is Collective.ALL_TO_ALL:  # which takes it apart first: one kernel with the sum
                    brought = sent[turn] + activations[0, 0]
                else:
                    brought = sent[turn] = sent[turn].at[0].set(activations[0, 0])
                if number < sends:
                    got[turn] = send(brought, group_size)
            return weights, *sent, *got, activations  # all but the last take the memory of what was handed in

        shapes = [(side, side), *[(elements,)] * turns, *[(received,)] * turns]
        self._arrays = [bench.spread(shape, mesh) for shape in shapes]
        local = jax.shard_map(worked, mesh=mesh, in_specs=(SPEC,) * len(shapes), out_specs=SPEC, check_vma=False)
        kept = jax.jit(local, donate_argnums=tuple(range(len(shapes))), keep_unused=True)
        compiled: Any = kept.lower(*self._arrays).compile()
        check_count(kind, sends, compiled.as_text())
        self._compiled = compiled

    def __call__(self) -> jax.Array:
        *self._arrays, activations = self._compiled(*self._arrays)
        return activations


def _received_elements(kind: Collective, elements: int, group_size: int) -> int:
    """What a device has of a collective to which it brings so many."""
    if kind is Collective.ALL_GATHER:
        return elements * group_size
    return elements // group_size if kind is Collective.REDUCE_SCATTER else elements


def check_count(kind: Collective, length: int, text: str) -> None:
    """Raises ``ClusterError`` unless the executable holds so many of the kind, without which what was timed means nothing."""
    opcode = "collective-permute" if kind is Collective.PERMUTE else kind.value
    found = text.count(f" {opcode}(") + text.count(f" {opcode}-start(")
    if found != length:
        raise ClusterError(
            f"a chain of {length} {kind.value} compiled to {found}, so it cannot be timed on this backend; report this"
        )


# ------------------------------------------------------------------------------------------ one collective, and made to chain

Send = Callable[[jax.Array, int], jax.Array]
"""What a device brings, and the size of its group → what it has afterwards."""

SENDS: dict[Collective, Send] = {
    Collective.ALL_REDUCE: lambda value, group_size: lax.psum(value, "group"),
    Collective.ALL_GATHER: lambda value, group_size: lax.all_gather(value, "group", tiled=True),
    Collective.REDUCE_SCATTER: lambda value, group_size: lax.psum_scatter(value, "group", tiled=True),
    Collective.ALL_TO_ALL: lambda value, group_size: lax.all_to_all(value, "group", 0, 0, tiled=True),
    Collective.PERMUTE: lambda value, group_size: lax.ppermute(
        value, "group", [(place, (place + 1) % group_size) for place in range(group_size)]
    ),
}


def _sum_of_several(value: jax.Array, group_size: int) -> jax.Array:
    # The device's number in one place keeps the operand from being provably replicated.
    return SENDS[Collective.ALL_REDUCE](value, group_size).at[0].add(lax.axis_index("group").astype(value.dtype))


def _all_to_all(value: jax.Array, group_size: int) -> jax.Array:
    return SENDS[Collective.ALL_TO_ALL](lax.optimization_barrier(value), group_size)


def _all_gather(value: jax.Array, group_size: int) -> jax.Array:
    return value.at[0].set(SENDS[Collective.ALL_GATHER](value, group_size)[-1])


def _reduce_scatter(value: jax.Array, group_size: int) -> jax.Array:
    return value.at[0].set(SENDS[Collective.REDUCE_SCATTER](value, group_size)[-1])


LINKS: dict[Collective, Send] = {
    **SENDS,
    Collective.ALL_REDUCE: _sum_of_several,
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_TO_ALL: _all_to_all,
}
"""The same, of what the one before made."""
