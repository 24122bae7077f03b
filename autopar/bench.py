"""How is something repeated on all devices of this process at once, and timed?

Two programs, in both of which each repetition waits for the one before:

    unrolled    a chain of L links; the cost of a call drops out of (chain of L − chain of 1) / (L − 1)
    looped      a loop whose number of trips is an argument, for kernels that would be fused into one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar.timing import Timer

CHAIN = 9
"""Links of a chain."""
SPEC = PartitionSpec(("other", "group"))
"""The first dimension over all devices of a mesh of :class:`Bench`."""


class Bench:
    """Devices, and how carefully they are timed."""

    def __init__(self, devices: Sequence[Any], timer: Timer) -> None:
        self.devices = list(devices)
        self.timer = timer

    def mesh(self, group_size: int) -> jax.sharding.Mesh:
        """All devices in groups of so many neighbours."""
        grid = np.array(self.devices).reshape(-1, group_size)
        return jax.sharding.Mesh(grid, ("other", "group"), axis_types=(AxisType.Auto,) * 2)

    def spread(self, shape: tuple[int, ...], mesh: jax.sharding.Mesh, dtype: Any = np.float32) -> jax.Array:
        """Zeros (of which sums stay finite), so many on each device."""
        return spread(np.zeros((shape[0] * len(self.devices), *shape[1:]), dtype), mesh)

    def chain_seconds(
        self,
        link: Callable[..., jax.Array],
        mesh: jax.sharding.Mesh,
        x: jax.Array,
        others: Sequence[jax.Array] = (),
        *,
        check: Callable[[int, str], None] | None = None,
    ) -> float:
        """Seconds of one link: of what the link before made of ``x``, and, if there are any, of the next of the others in turn.

        ``check`` is told the length of each chain and its compiled text.
        """
        chains = [self.compiled(_unrolled(link, length), mesh, (x, *others)) for length in (1, CHAIN)]
        if check is not None:
            for length, chain in zip((1, CHAIN), chains, strict=True):
                check(length, chain.as_text())
        calls = (lambda chain=chain: chain(x, *others) for chain in chains)
        return self.timer.difference(*calls, extra=CHAIN - 1)

    def compiled(self, function: Callable[..., Any], mesh: jax.sharding.Mesh, arguments: Sequence[jax.Array]) -> Any:
        """An executable that does the same on every device, with its part of each argument."""
        specs = (SPEC,) * len(arguments)
        local = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=SPEC, check_vma=False)
        return jax.jit(local).lower(*arguments).compile()

    def loop_seconds(self, trip: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, trips: int) -> float:
        """Seconds of one trip on each device: ``trip`` makes, of its number and an array, the next array."""
        mesh = self.mesh(1)

        def loop(count: jax.Array, value: jax.Array) -> jax.Array:
            return lax.fori_loop(0, count, trip, value)

        local = jax.shard_map(loop, mesh=mesh, in_specs=(PartitionSpec(), SPEC), out_specs=SPEC, check_vma=False)
        counts = [jax.device_put(np.int32(count), NamedSharding(mesh, PartitionSpec())) for count in (1, trips + 1)]
        compiled = jax.jit(local).lower(counts[0], x).compile()
        return self.timer.difference(*(lambda count=count: compiled(count, x) for count in counts), extra=trips)


def spread(array: Any, mesh: jax.sharding.Mesh) -> jax.Array:
    """An array, its first dimension over all devices."""
    return jax.device_put(array, NamedSharding(mesh, SPEC))


def _unrolled(link: Callable[..., jax.Array], length: int) -> Callable[..., jax.Array]:
    """A chain: ``link`` of its own result and of the other arguments in turn."""

    def chain(value: jax.Array, *others: jax.Array) -> jax.Array:
        for number in range(length):
            value = link(value, others[number % len(others)]) if others else link(value)
        return value

    return chain
