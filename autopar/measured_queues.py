"""How long do kernels other than products take on accelerators, and copies between them and their host?

An accelerator works off a queue, and of a loop whose number of trips is no constant it asks the host before every trip,
which takes as long as many kernels.  So kernels stand one after the other in one executable, kept apart by barriers that no
fusion crosses, and the cost of a call drops out of the difference between a long row of them and a short one.

    elementwise   x ← x · a + b, again and again in one array: what fits into the caches stays there
    streamed      the same over several arrays in turn, of more bytes than any cache holds
    operations    (a kernel that applies one LONG times − one that applies it SHORT times) / (LONG − SHORT): reading and
                  writing drop out, so what is left may be nothing; of operations that end a kernel, kernels in a row

Sums, maxima and minima take what their bytes take, in rows as in columns; no rate is measured of them.  Convolutions in a row
differ in one number of their image, which is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from autopar.bench import CHAIN, Bench, spread
from autopar.curves import Curve
from autopar.efforts import Effort
from autopar.graph.fusion import FUSIBLE
from autopar.measured_convolutions import Convolution
from autopar.measured_operations import Operation
from autopar.profile import Reductions
from autopar.timing import LEAST_SECONDS

SHORT, LONG = 4, 16
"""Times that an operation is applied in one kernel."""
ROW = 16
"""Kernels of a link."""
FEW_PASSES, MORE_PASSES = 1, 3
LEAST_STREAMED_BYTES, MOST_PIECES = 1 << 22, 64
"""Smaller arrays would be many: they are priced by what starting a kernel takes."""
_ENDS_A_KERNEL = frozenset(("random_bits",))
"""Fusible, but so long that nobody repeats it in a kernel."""
_BY_THEIR_BYTES = frozenset(("reduce_sum", "reduce_max"))


class QueuedKernels:
    """See :class:`autopar.measure.KernelTimes`."""

    def __init__(self, bench: Bench, effort: Effort, say: Callable[[str], None]) -> None:
        self._bench, self._effort, self._say = bench, effort, say

    def elementwise(self) -> Curve:
        """A row of kernels in one array."""
        mesh = self._bench.mesh(1)
        samples = {}
        for array_bytes in (4, *self._effort.array_bytes):
            self._say(f"elementwise kernels over {array_bytes / 1024:g} KiB")
            x = self._bench.spread((array_bytes // 4,), mesh)
            samples[2.0 * array_bytes] = self._row_seconds(mesh, x)
        return Curve.through(samples)

    def streamed(self) -> Curve:
        """Rows of kernels over several arrays in turn."""
        samples = {8.0: self._row_seconds(mesh := self._bench.mesh(1), self._bench.spread((1,), mesh))}
        for array_bytes in self._effort.array_bytes:
            if array_bytes >= LEAST_STREAMED_BYTES:
                samples[2.0 * array_bytes] = self._streamed_seconds(array_bytes)
        return Curve.through(samples)

    def _row_seconds(self, mesh: jax.sharding.Mesh, x: jax.Array) -> float:
        """Of a link that is many kernels: what a call takes varies by as much as a few small ones."""
        return self._bench.chain_seconds(_row, mesh, x) / ROW

    def _streamed_seconds(self, array_bytes: int) -> float:
        pieces = min(max(self._effort.streamed_bytes // array_bytes, 2), MOST_PIECES)
        self._say(f"elementwise kernels over {pieces} × {array_bytes >> 10} KiB")
        mesh = self._bench.mesh(1)
        arrays = [self._bench.spread((array_bytes // 4,), mesh) for _ in range(pieces)]

        def passes(count: int) -> Callable[..., tuple[jax.Array, ...]]:
            def several(*given: jax.Array) -> tuple[jax.Array, ...]:
                values = list(given)
                for number in range(count * pieces):
                    here, after = number % pieces, (number + 1) % pieces
                    # The next one waits, so that nobody makes one kernel of both.
                    values[here], values[after] = lax.optimization_barrier((_scaled(values[here]), values[after]))
                return tuple(values)

            return several

        few, more = (self._bench.compiled(passes(count), mesh, arrays) for count in (FEW_PASSES, MORE_PASSES))
        extra = (MORE_PASSES - FEW_PASSES) * pieces
        return self._bench.timer.difference(lambda: few(*arrays), lambda: more(*arrays), extra=extra)

    def seconds_per_flop(self, operation: Operation) -> float | None:
        """Of what computing takes longer than reading and writing; None of operations that take what their bytes take."""
        if operation.primitive in _BY_THEIR_BYTES:
            return None
        mesh = self._bench.mesh(1)
        elements = self._effort.operated_elements
        x = spread(np.linspace(0.1, 0.9, elements * len(self._bench.devices), dtype=np.float32), mesh)
        flops = operation.flops(elements)
        if operation.primitive not in FUSIBLE or operation.primitive in _ENDS_A_KERNEL:
            return self._bench.chain_seconds(_kept_apart(operation.apply), mesh, x) / flops
        short, long = (
            self._bench.chain_seconds(_kept_apart(_repeated(operation.apply, times)), mesh, x)
            for times in (SHORT, LONG)
        )
        return max(long - short, LEAST_SECONDS) / ((LONG - SHORT) * flops)

    def reductions(self) -> Reductions | None:
        """None: rows and columns of any length take what their bytes take."""
        return None

    def convolution_seconds(self, convolution: Convolution, side: int) -> float:
        """Of one convolution of float32 on each device; each waits for a number of the one before."""
        mesh = self._bench.mesh(1)
        image, other = (self._bench.spread(shape, mesh) for shape in convolution.shapes(side))

        def link(value: jax.Array, window: jax.Array) -> jax.Array:
            result = lax.optimization_barrier(convolution.apply(value, window))
            return value.at[(0,) * value.ndim].add(result[(0,) * result.ndim])

        return self._bench.chain_seconds(link, mesh, image, [other])

    def turned_bytes_per_second(self) -> float | None:
        """None: what is copied into another order passes through memory on the chip."""
        return None

    def cut_bytes_per_second(self) -> float | None:
        """None: cut or not, a copy goes as fast."""
        return None

    def host_copies(self) -> Curve:
        """Of arrays between every device and its host, all at once: the mean of there and back, of what several take longer than
        one.
        """
        samples = {}
        for array_bytes in self._effort.copied_bytes:
            self._say(f"copies of {array_bytes >> 10} KiB to and from the host")
            arrays = [self._bench.spread((array_bytes // 4,), self._bench.mesh(1)) for _ in range(CHAIN)]
            here = arrays[0].sharding
            there = here.with_memory_kind("pinned_host")
            leave, come = (
                jax.jit(lambda *values: values, in_shardings=source, out_shardings=target)
                for source, target in ((here, there), (there, here))
            )
            seconds = self._copy_seconds(leave, arrays) + self._copy_seconds(come, leave(*arrays))
            samples[float(array_bytes)] = seconds / 2
        return Curve.through(samples)

    def _copy_seconds(self, copy: Callable[..., Any], arrays: Sequence[jax.Array]) -> float:
        return self._bench.timer.difference(lambda: copy(arrays[0]), lambda: copy(*arrays), extra=len(arrays) - 1)


def _scaled(value: jax.Array) -> jax.Array:
    return value * 0.999 + 1.0


def _row(value: jax.Array) -> jax.Array:
    for _ in range(ROW):
        value = lax.optimization_barrier(_scaled(value))
    return value


def _kept_apart(apply: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda value: lax.optimization_barrier(apply(value))


def _repeated(apply: Callable[[jax.Array], jax.Array], times: int) -> Callable[[jax.Array], jax.Array]:
    def several(value: jax.Array) -> jax.Array:
        for _ in range(times):
            value = apply(value)
        return value

    return several
