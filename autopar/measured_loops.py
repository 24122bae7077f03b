"""How long do kernels other than products take on processors?

Elementwise kernels would be fused into one, so theirs is a loop; a trip runs four kernels, three of them (the counter's) on
single numbers, and those are taken off again as three quarters of a trip of the same loop over one element on each device.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.bench import CHAIN, Bench, spread
from autopar.curves import Curve
from autopar.efforts import Effort
from autopar.measured_convolutions import Convolution
from autopar.measured_operations import LONG_ROWS, OF_COLUMNS, SHORT_ROW, SHORT_ROWS, Operation
from autopar.profile import Reductions
from autopar.timing import LEAST_SECONDS

KERNELS_OF_A_TRIP = 4
LEAST_TRIPS, MOST_TRIPS, MOST_LOOPED_BYTES = 32, 512, 1 << 28
"""Of a loop: enough for its trips to outweigh the call, which allocates the result anew; few enough to end soon."""
MOST_PIECES, NEAR_BYTES = 16, 1 << 25
"""Elementwise kernels take turns on so many arrays, of at most so many bytes in all on each device: a pass comes back to a
small array soon, to a large one when it has left the caches."""


class LoopedKernels:
    """See :class:`autopar.measure.KernelTimes`."""

    def __init__(self, bench: Bench, effort: Effort, say: Callable[[str], None]) -> None:
        self._bench, self._effort, self._say = bench, effort, say

    def elementwise(self) -> Curve:
        """Each trip comes to an array that others touched soon before."""
        return self._elementwise(lambda array_bytes: min(max(NEAR_BYTES // array_bytes, 1), MOST_PIECES))

    def streamed(self) -> Curve:
        """Each trip comes to memory left alone for so many bytes."""
        return self._elementwise(lambda array_bytes: max(self._effort.streamed_bytes // array_bytes, 2))

    def _elementwise(self, pieces_of: Callable[[int], int]) -> Curve:
        single = self._trip_seconds(1, MOST_TRIPS, 1)
        samples = {8.0: single / KERNELS_OF_A_TRIP}
        counter = single * (KERNELS_OF_A_TRIP - 1) / KERNELS_OF_A_TRIP
        for array_bytes in self._effort.array_bytes:
            pieces = pieces_of(array_bytes)
            self._say(f"elementwise kernels over {pieces} × {array_bytes >> 10} KiB")
            trips = min(max(MOST_LOOPED_BYTES // array_bytes, LEAST_TRIPS), max(MOST_TRIPS, 2 * pieces))
            trip = self._trip_seconds(array_bytes // 4, trips, pieces)
            samples[2.0 * array_bytes] = max(trip - counter, single / KERNELS_OF_A_TRIP)
        return Curve.through(samples)

    def _trip_seconds(self, elements: int, trips: int, pieces: int) -> float:
        """Seconds of one trip of a loop around one elementwise kernel on so many float32 on each device.

        Each trip works on the next piece of an array.
        """
        x = self._bench.spread((pieces * elements,), self._bench.mesh(1))

        def trip(number: jax.Array, carried: jax.Array) -> jax.Array:
            start = number % pieces * elements
            piece = lax.dynamic_slice_in_dim(carried, start, elements)
            return lax.dynamic_update_slice_in_dim(carried, piece * 0.999 + 1.0, start, 0)

        return self._bench.loop_seconds(trip, x, trips)

    def seconds_per_flop(self, operation: Operation) -> float:
        """Over an array that stays in the caches."""
        mesh = self._bench.mesh(1)
        x = spread(np.linspace(0.1, 0.9, operation.elements * len(self._bench.devices), dtype=np.float32), mesh)
        seconds = self._bench.loop_seconds(lambda number, value: operation.apply(value), x, operation.trips)
        return seconds / operation.flops(operation.elements)

    def reductions(self) -> Reductions:
        """Of elements that lie in short rows and in columns, beyond what they take in long rows."""
        self._say("sums of short rows and of columns")
        long, short, column = (self.seconds_per_flop(one) for one in (LONG_ROWS, SHORT_ROWS, OF_COLUMNS))
        return Reductions(max(SHORT_ROW * (short - long), LEAST_SECONDS), column)

    def convolution_seconds(self, convolution: Convolution, side: int) -> float:
        """Of one convolution of float32 on each device; each waits for a number of the one before."""
        mesh = self._bench.mesh(1)
        image, other = (self._bench.spread(shape, mesh) for shape in convolution.shapes(side))

        def link(value: jax.Array, window: jax.Array) -> jax.Array:
            result = lax.optimization_barrier(convolution.apply(value, window))
            return value + result[(0,) * result.ndim]

        return self._bench.chain_seconds(link, mesh, image, [other])

    def turned_bytes_per_second(self) -> float:
        """Of copies of matrices that lie in memory by columns into some that lie by rows."""
        self._say("copies into another order")
        return self._copied_bytes_per_second(lambda matrix: matrix.T)

    def cut_bytes_per_second(self) -> float:
        """Of copies of matrices by rows, cut into as many pieces along their columns as there are devices."""
        self._say("copies that cut columns")
        count = len(self._bench.devices)
        return self._copied_bytes_per_second(lambda matrix: jnp.stack(jnp.split(matrix, count, axis=1)))

    def _copied_bytes_per_second(self, copy: Callable[[jax.Array], jax.Array]) -> float:
        """Read and written by copies of several matrices, each a kernel of its own.

        No loop: what a trip takes out of an array would be one kernel with the copy, which then goes element by element where a
        copy alone goes by tiles.
        """
        rows, columns = self._effort.copied_shape
        mesh = self._bench.mesh(1)
        matrices = [self._bench.spread((rows, columns), mesh) for _ in range(CHAIN)]
        one, many = (
            self._bench.compiled(lambda *given: tuple(map(copy, given)), mesh, matrices[:count]) for count in (1, CHAIN)
        )
        seconds = self._bench.timer.difference(lambda: one(matrices[0]), lambda: many(*matrices), extra=CHAIN - 1)
        return 2 * 4 * rows * columns / seconds

    def host_copies(self) -> Curve | None:
        """None: devices and host are one memory."""
        return None
