"""How long do collectives, matrix products and elementwise kernels take on the devices of this process?

Each is timed inside an executable over all devices at once, as a train step runs it (:mod:`autopar.bench`), collectives as
:mod:`autopar.measured_collectives` says.

Elementwise kernels would be fused into one, so theirs is a loop; a trip runs four kernels, three of them (the counter's) on
single numbers, and those are taken off again as three quarters of a trip of the same loop over one element on each device.

Memory that is new to a call has to be mapped and cleared by the operating system.  It is timed as what calls that return
new arrays take longer than calls that take over the memory of their arguments.  Allocators keep some of what they are given
back, so calls differ in earnest, and the median counts.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.bench import CHAIN, SPEC, Bench, spread
from autopar.cluster import Cluster, Platform
from autopar.cores import quota_cores
from autopar.errors import ClusterError
from autopar.host_memory import keep_freed_memory
from autopar.measured_collectives import collective_curves, group_sizes, share_cores, waiting_seconds
from autopar.measured_convolutions import CONVOLUTIONS, Convolution
from autopar.measured_exchanges import SelfExchange
from autopar.measured_operations import LONG_ROWS, OF_COLUMNS, OPERATIONS, SHORT_ROW, SHORT_ROWS, Operation
from autopar.measured_worlds import Asked, world_curves
from autopar.profile import (
    SKINNINESS,
    CollectiveCurve,
    ConvolutionCurve,
    Curve,
    Dispatch,
    Fresh,
    OperationRate,
    ProductCurve,
    ProductShape,
    Profile,
    Reductions,
    WaitCurve,
)
from autopar.profile_file import machine_name
from autopar.timing import LEAST_SECONDS, Timer, timer_of

CALL_ARGUMENTS = 64
"""About as many arrays as an executable of a pipeline is given."""
ALONE_SIDE = 512
KERNELS_OF_A_TRIP = 4
LEAST_TRIPS, MOST_TRIPS, MOST_LOOPED_BYTES = 32, 512, 1 << 28
"""Of a loop: enough for its trips to outweigh the call, which allocates the result anew; few enough to end soon."""
MOST_PIECES, NEAR_BYTES = 16, 1 << 25
"""Elementwise kernels take turns on so many arrays, of at most so many bytes in all on each device: a pass comes back to a
small array soon, to a large one when it has left the caches."""
FRESH_ARRAYS, FRESH_BYTES = 8, 1 << 25
"""New arrays are returned so many at a time, of at most so many bytes in all on each device (but one at least)."""


@dataclass(frozen=True)
class Effort:
    """What is measured, and how long.

    ``full_bytes`` are the sizes of collectives (as in :mod:`autopar.cost_model.collectives`), ``sides`` the side lengths of
    square products, ``array_bytes`` the sizes of elementwise kernels' arrays on one device, ``fresh_bytes`` those of new
    arrays (the C library of Linux gives blocks of more than 32 MiB back at once, so prices jump there).  ``seconds`` is what one
    point may take once it is compiled, but each chain runs ``least_runs`` times; sizes whose product takes more than
    ``longest_seconds`` end their row.
    """

    full_bytes: tuple[int, ...]
    sides: tuple[int, ...]
    dtypes: tuple[str, ...]
    array_bytes: tuple[int, ...]
    fresh_bytes: tuple[int, ...]
    seconds: float
    least_runs: int = 5
    longest_seconds: float = 0.05
    streamed_bytes: int = 1 << 26
    """A device comes back to streamed arrays after so many bytes, which no cache holds for it."""
    operations: tuple[Operation, ...] = OPERATIONS
    convolutions: tuple[Convolution, ...] = CONVOLUTIONS
    image_sides: tuple[int, ...] = (4, 8, 16, 32)
    """Of convolutions' square images."""
    work_sides: tuple[int, ...] = (64, 128, 192, 512)
    """Of two square products between collectives of devices that share cores: by the first the curves are measured, by all
    of them the waits."""
    turned_shape: tuple[int, int] = (512, 2048)
    """Of a float32 matrix that is copied into another order."""
    message_bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
    """Of messages between processes."""
    world_bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
    """Of collectives in a world of processes; larger ones take long, and go on at the same rate."""


FULL = Effort(
    full_bytes=tuple(1 << power for power in (10, 12, 14, 16, 18, 20, 22, 24, 25)),
    sides=(8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    dtypes=("float32", "bfloat16", "float64"),
    array_bytes=tuple(1 << power for power in (10, 12, 14, 16, 18, 20, 22, 24)),
    fresh_bytes=(*(1 << power for power in (16, 18, 20, 22, 24)), *(size << 20 for size in (31, 33, 64))),
    seconds=0.6,
)
QUICK = Effort(
    full_bytes=tuple(1 << power for power in (12, 16, 20, 23)),
    sides=(8, 64, 256, 512),
    dtypes=("float32",),
    array_bytes=tuple(1 << power for power in (12, 16, 20, 23)),
    fresh_bytes=(1 << 16, *(size << 20 for size in (1, 4, 31, 33, 64))),
    seconds=0.1,
    world_bytes=(1 << 12, 1 << 16, 1 << 20),
)


def measure(effort: Effort = FULL, say: Callable[[str], None] = lambda message: None) -> Profile:
    """Measure all devices of this process; ``say`` is told what is being measured.

    Raises ``ClusterError`` in a program of several processes, whose devices cannot be told apart in one clock.
    """
    keep_freed_memory()  # as where steps run; before JAX starts threads that share no memory
    if jax.process_count() > 1:
        raise ClusterError("a profile is of the devices of one host; measure in a program of one process")
    devices = jax.devices()
    cluster = Cluster.local(devices, profile=None)
    measuring = Measuring(devices, effort, say)
    # First of all: what is freed later leaves gaps that serve as memory which a step would not find.
    on_cpu = cluster.device.platform is Platform.CPU  # elsewhere nothing asks for the figures that are left out
    fresh = measuring.fresh() if on_cpu else None
    return Profile(
        jax_version=jax.__version__,
        platform=cluster.device.platform.value,
        device_kind=str(devices[0].device_kind),
        num_devices=len(devices),
        machine=machine_name(),
        measured_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        collectives=tuple(measuring.collectives()),
        products=tuple(measuring.products()),
        elementwise=measuring.elementwise(),
        dispatch=measuring.dispatch(),
        streamed=measuring.elementwise(effort.streamed_bytes),
        fresh=fresh,
        operations=tuple(measuring.operations()),
        reductions=measuring.reductions(),
        convolutions=tuple(measuring.convolutions()),
        waits=tuple(measuring.waits()),
        turned_bytes_per_second=measuring.turned_bytes_per_second() if on_cpu else None,
        exchanges=measuring.exchanges() if on_cpu else None,
        world_collectives=measuring.world_collectives() if on_cpu else (),
    )


class Measuring:
    """The figures of a profile, one kind after the other."""

    def __init__(self, devices: Sequence[Any], effort: Effort, say: Callable[[str], None]) -> None:
        self._bench = Bench(devices, _timer(devices, effort))
        self._effort = effort
        self._say = say

    # ------------------------------------------------------------------------------------------------------ what to time

    def collectives(self) -> Iterator[CollectiveCurve]:
        """Every kind in groups of every divisor of the number of devices."""
        return collective_curves(self._bench, self._effort.full_bytes, self._effort.work_sides[0], self._say)

    def world_collectives(self) -> tuple[CollectiveCurve, ...]:
        """The same in a world of processes."""
        effort = self._effort
        asked = Asked(
            len(self._bench.devices), effort.world_bytes, effort.work_sides[0], effort.seconds, effort.least_runs
        )
        return world_curves(asked, self._say)

    def waits(self) -> Iterator[WaitCurve]:
        """What small all-reduces take longer the more work lies before them; of devices that share cores."""
        for group_size in group_sizes(self._bench) if share_cores(self._bench) else ():
            self._say(f"collectives among {group_size} after work")
            yield WaitCurve(
                group_size, Curve.through(waiting_seconds(self._bench, group_size, self._effort.work_sides))
            )

    def products(self) -> Iterator[ProductCurve]:
        """Square and skinny products of every dtype, until one takes too long."""
        for dtype in self._effort.dtypes:
            for shape in ProductShape:
                samples = {}
                for side in self._effort.sides:
                    if shape is ProductShape.SKINNY and side < SKINNINESS:
                        continue
                    self._say(f"{shape.value} products of {dtype} [{side}, {side}]")
                    rows = side if shape is ProductShape.SQUARE else side // SKINNINESS
                    seconds = self._product_seconds(dtype, side, rows)
                    samples[2.0 * side * side * rows] = seconds
                    if seconds > self._effort.longest_seconds:
                        break
                yield ProductCurve(dtype, jnp.dtype(dtype).itemsize, shape, Curve.through(samples))

    def convolutions(self) -> Iterator[ConvolutionCurve]:
        """Every family, over images of growing sides, until one takes too long."""
        for convolution in self._effort.convolutions:
            samples = {}
            for side in self._effort.image_sides:
                self._say(f"convolutions ({convolution.family.value}) of images [{side}, {side}]")
                samples[convolution.flops(side)] = self._convolution_seconds(convolution, side)
                if samples[convolution.flops(side)] > self._effort.longest_seconds:
                    break
            yield ConvolutionCurve("float32", convolution.family, Curve.through(samples))

    def elementwise(self, footprint_bytes: int | None = None) -> Curve:
        """``x · a + b``: one array read, one written; with a footprint each trip comes to memory left alone for so many bytes."""
        single = self._trip_seconds(1, MOST_TRIPS, 1)
        samples = {8.0: single / KERNELS_OF_A_TRIP}
        counter = single * (KERNELS_OF_A_TRIP - 1) / KERNELS_OF_A_TRIP
        for array_bytes in self._effort.array_bytes:
            if footprint_bytes is None:
                pieces = min(max(NEAR_BYTES // array_bytes, 1), MOST_PIECES)
            else:
                pieces = max(footprint_bytes // array_bytes, 2)
            self._say(f"elementwise kernels over {pieces} × {array_bytes >> 10} KiB")
            trips = min(max(MOST_LOOPED_BYTES // array_bytes, LEAST_TRIPS), max(MOST_TRIPS, 2 * pieces))
            trip = self._trip_seconds(array_bytes // 4, trips, pieces)
            samples[2.0 * array_bytes] = max(trip - counter, single / KERNELS_OF_A_TRIP)
        return Curve.through(samples)

    def fresh(self) -> Fresh:
        """What a call takes longer whose results or scratch are new memory than one that works in that of its arguments."""
        outputs, scratch = {}, {}
        for array_bytes in self._effort.fresh_bytes:
            self._say(f"scratch memory of {array_bytes >> 10} KiB")
            scratch[float(array_bytes)] = self._scratch_seconds(array_bytes // 4)
        for array_bytes in self._effort.fresh_bytes:
            self._say(f"new arrays of {array_bytes >> 10} KiB")
            several = min(max(FRESH_BYTES // array_bytes, 1), FRESH_ARRAYS)
            outputs[float(array_bytes)] = self._fresh_seconds(array_bytes // 4, several)
        return Fresh(Curve.through(outputs), Curve.through(scratch))

    def operations(self) -> Iterator[OperationRate]:
        """Seconds per FLOP of primitives that are no products, over an array that stays in the caches."""
        for operation in self._effort.operations:
            self._say(operation.primitive)
            seconds_per_flop = self._seconds_per_flop(operation)
            for name in (operation.primitive, *operation.like_it):
                yield OperationRate(name, seconds_per_flop)

    def reductions(self) -> Reductions:
        """Of elements that lie in short rows and in columns."""
        self._say("sums of short rows and of columns")
        long, short, column = (self._seconds_per_flop(one) for one in (LONG_ROWS, SHORT_ROWS, OF_COLUMNS))
        return Reductions(max(SHORT_ROW * (short - long), LEAST_SECONDS), column)

    def _seconds_per_flop(self, operation: Operation) -> float:
        mesh = self._bench.mesh(1)
        x = spread(np.linspace(0.1, 0.9, operation.elements * len(self._bench.devices), dtype=np.float32), mesh)
        seconds = self._bench.loop_seconds(_repeated(operation), x, operation.trips)
        return seconds / (operation.elements * operation.flops_of_element())

    def turned_bytes_per_second(self) -> float:
        """Of a copy of a matrix that lies in memory by columns into one that lies by rows.

        It takes the place of one of the two kernels that go straight over the matrix in a trip of the other loop.
        """
        self._say("copies into another order")
        rows, columns = self._effort.turned_shape
        pieces = max(self._effort.streamed_bytes // (4 * rows * columns), 2)
        x = self._bench.spread((pieces, rows, columns), self._bench.mesh(1))

        def copied(turns: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
            def trip(number: jax.Array, carried: jax.Array) -> jax.Array:
                piece = lax.dynamic_index_in_dim(carried, number % pieces, keepdims=False)
                changed = piece.T.reshape(piece.shape) if turns else piece * 0.999 + 1.0
                # Kept apart, the update in place is one more kernel of either kind.
                return lax.dynamic_update_index_in_dim(carried, lax.optimization_barrier(changed), number % pieces, 0)

            return trip

        turned, straight = (self._bench.loop_seconds(copied(turns), x, LEAST_TRIPS) for turns in (True, False))
        return 2 * 4 * rows * columns / max(turned - straight / 2, LEAST_SECONDS)

    def exchanges(self) -> Curve:
        """What messages between processes cost the processors at each end."""
        ends = SelfExchange(self._bench)
        samples = {}
        for size_bytes in self._effort.message_bytes:
            self._say(f"messages of {size_bytes >> 10} KiB between processes")
            samples[float(size_bytes)] = ends.seconds(size_bytes)
        return Curve.through(samples)

    def dispatch(self) -> Dispatch:
        """A call that does almost nothing, an array of one page from device to device, and products on one device alone."""
        self._say("calls of executables")
        devices = self._bench.devices
        small = [jax.device_put(np.float32(number), devices[0]) for number in range(CALL_ARGUMENTS)]
        tiny = jax.jit(lambda *numbers: numbers[0] + 1.0, keep_unused=True).lower(*small).compile()
        page = jax.device_put(np.zeros(1024, np.float32), devices[0])
        side = ALONE_SIDE if ALONE_SIDE in self._effort.sides else self._effort.sides[-1]
        together = self._product_seconds("float32", side, side)
        one = Measuring(devices[:1], self._effort, self._say)
        return Dispatch(
            call_seconds=self._bench.timer.least(lambda: tiny(*small)),
            message_seconds=self._bench.timer.least(lambda: jax.device_put(page, devices[-1], may_alias=False)),
            alone_speed=max(1.0, together / one._product_seconds("float32", side, side)),
        )

    # -------------------------------------------------------------------------------------------------------- how to time

    def _product_seconds(self, dtype: str, side: int, rows: int) -> float:
        """Seconds of one product [rows, side] × [side, side] on each device; few rows meet a right operand that caches lost."""
        with jax.enable_x64(jnp.dtype(dtype).itemsize > 4):
            mesh = self._bench.mesh(1)
            held_bytes = side * side * jnp.dtype(dtype).itemsize
            count = 1 if rows == side else min(-(-self._effort.streamed_bytes // held_bytes), CHAIN)
            x = self._bench.spread((rows, side), mesh, jnp.dtype(dtype))
            right = [self._bench.spread((side, side), mesh, jnp.dtype(dtype)) for _ in range(count)]
            return self._bench.chain_seconds(lambda value, other: value @ other, mesh, x, right)

    def _convolution_seconds(self, convolution: Convolution, side: int) -> float:
        """Seconds of one convolution of float32 on each device; each waits for a number of the one before."""
        mesh = self._bench.mesh(1)
        image, other = (self._bench.spread(shape, mesh) for shape in convolution.shapes(side))

        def link(value: jax.Array, window: jax.Array) -> jax.Array:
            result = lax.optimization_barrier(convolution.apply(value, window))
            return value + result[(0,) * result.ndim]

        return self._bench.chain_seconds(link, mesh, image, [other])

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

    def _fresh_seconds(self, elements: int, count: int) -> float:
        """Seconds that each of so many new arrays of float32 costs beyond one whose memory is there."""
        mesh = self._bench.mesh(1)
        arrays = [self._bench.spread((elements,), mesh) for _ in range(count)]

        def scaled(*values: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(value * 0.999 for value in values)

        specs = (SPEC,) * count
        local = jax.shard_map(scaled, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
        new = jax.jit(local).lower(*arrays).compile()
        taking_over = jax.jit(local, donate_argnums=tuple(range(count))).lower(*arrays).compile()
        held = [[jnp.copy(array) for array in arrays]]

        def in_place() -> list[jax.Array]:
            held[0] = list(taking_over(*held[0]))
            return held[0]

        there, beyond = self._bench.timer.typical(in_place, lambda: new(*arrays))
        return max((beyond - there) / count, LEAST_SECONDS)

    def _scratch_seconds(self, elements: int) -> float:
        """Seconds that a loop's carry of so many float32 costs beyond one in the memory of an argument.

        A trip goes over the carry once; the one that is scratch is filled first, in place of a trip.
        """
        mesh = self._bench.mesh(1)
        x = self._bench.spread((elements,), mesh)
        start = self._bench.spread((1,), mesh)

        def over(count: jax.Array, carry: jax.Array) -> jax.Array:
            return lax.fori_loop(0, count, lambda _, carried: carried * 0.999 + 1.0, carry)

        def within(count: jax.Array, value: jax.Array) -> jax.Array:
            return over(count, jnp.broadcast_to(value, (elements,)))[:1]

        def compiled(function: Callable[..., jax.Array], *arguments: jax.Array, donated: tuple[int, ...] = ()) -> Any:
            specs = PartitionSpec(), SPEC
            local = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=SPEC, check_vma=False)
            return jax.jit(local, donate_argnums=donated).lower(*arguments).compile()

        two, three = (jax.device_put(np.int32(count), NamedSharding(mesh, PartitionSpec())) for count in (2, 3))
        inside, taking_over = compiled(within, two, start), compiled(over, three, x, donated=(1,))
        held = [x]

        def in_place() -> jax.Array:
            held[0] = taking_over(three, held[0])
            return held[0]

        there, beyond = self._bench.timer.typical(in_place, lambda: inside(two, start))
        return max(beyond - there, LEAST_SECONDS)


def _timer(devices: Sequence[Any], effort: Effort) -> Timer:
    """A ration of processor time says nothing of accelerators, which compute on when the process has spent it."""
    cores = quota_cores() if devices[0].platform == Platform.CPU.value else None
    return timer_of(effort.seconds, effort.least_runs, cores)


def _repeated(operation: Operation) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda number, value: operation.apply(value)


def profile_rows(profile: Profile) -> Iterable[tuple[str, str, str]]:
    """(what, seconds of the smallest, rate of the largest) for a table of a profile's curves."""
    for one in profile.collectives:
        yield f"{one.kind} among {one.group_size}", *_ends(one.curve, "B/s")
    for one in profile.world_collectives:
        yield f"{one.kind} among {one.group_size}, between processes", *_ends(one.curve, "B/s")
    for product in profile.products:
        yield f"{product.shape.value} products, {product.dtype}", *_ends(product.curve, "FLOP/s")
    yield "elementwise kernels", *_ends(profile.elementwise, "B/s")
    if profile.streamed is not None:
        yield "elementwise kernels, streamed", *_ends(profile.streamed, "B/s")
    if (fresh := profile.fresh) is not None:
        yield "new arrays", *_ends(fresh.outputs, "B/s")
        yield "new scratch memory", *_ends(fresh.scratch, "B/s")
    for convolution in profile.convolutions:
        yield f"convolutions, {convolution.family.value}, {convolution.dtype}", *_ends(convolution.curve, "FLOP/s")
    for operation in profile.operations:
        yield operation.primitive, "", f"{1e-9 / operation.seconds_per_flop:.2f} GFLOP/s"
    if (reductions := profile.reductions) is not None:
        yield "a short row of a sum", f"{reductions.short_row_seconds * 1e6:.3f} µs", ""
        yield "sums of columns", "", f"{1e-9 / reductions.column_seconds_per_flop:.2f} GFLOP/s"
    if (dispatch := profile.dispatch) is not None:
        yield "a call", f"{dispatch.call_seconds * 1e6:.1f} µs", ""
        yield "a message", f"{dispatch.message_seconds * 1e6:.1f} µs", ""
        yield "a device alone", "", f"{dispatch.alone_speed:.2f} × as fast"


def _ends(curve: Curve, unit: str) -> tuple[str, str]:
    (amount, seconds) = curve.samples[-1]
    rate = f"{amount / seconds / 1e9:.2f} G{unit}" if seconds > LEAST_SECONDS else "free"
    return f"{curve.at(0.0) * 1e6:.1f} µs", rate
