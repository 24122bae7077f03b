"""How long do collectives, matrix products and elementwise kernels take on the devices of this process?

Each is timed inside an executable over all devices at once, as a train step runs it (:mod:`autopar.bench`), collectives as
:mod:`autopar.measured_collectives` says.

How kernels other than products are repeated differs between processors (:mod:`autopar.measured_loops`) and accelerators
(:mod:`autopar.measured_queues`).

Memory that is new to a call has to be mapped and cleared by the operating system.  It is timed as what calls that return
new arrays take longer than calls that take over the memory of their arguments.  Allocators keep some of what they are given
back, so calls differ in earnest, and the median counts.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.bench import CHAIN, SPEC, Bench
from autopar.cluster import Cluster, Platform
from autopar.cores import quota_cores, spare_threads
from autopar.curves import Curve
from autopar.efforts import FULL, Effort
from autopar.errors import ClusterError
from autopar.host_memory import keep_freed_memory
from autopar.looped_convolutions import LoopedConvolutions
from autopar.measured_collectives import collective_curves, share_cores
from autopar.measured_convolutions import SMALL_SIDE, Convolution, looped_convolution
from autopar.measured_exchanges import SelfExchange
from autopar.measured_loops import LoopedKernels
from autopar.measured_operations import Operation
from autopar.measured_products import multiplied, operand_shapes
from autopar.measured_queues import QueuedKernels
from autopar.measured_waits import waiting_seconds
from autopar.measured_worlds import Asked, world_curves
from autopar.products import DeepCurve, ProductArray, ProductCurve, ProductOrder, UseCurve
from autopar.profile import (
    CollectiveCurve,
    ConvolutionCurve,
    Dispatch,
    Fresh,
    OperationRate,
    Profile,
    Reductions,
    WaitCurve,
)
from autopar.profile_file import machine_name
from autopar.timing import LEAST_SECONDS, Timer, timer_of

CALL_ARGUMENTS = 64
"""About as many arrays as an executable of a pipeline is given."""
ALONE_SIDE = 512
FRESH_ARRAYS, FRESH_BYTES = 8, 1 << 25
"""New arrays are returned so many at a time, of at most so many bytes in all on each device (but one at least)."""


def measure(effort: Effort = FULL, say: Callable[[str], None] = lambda message: None) -> Profile:
    """Measure all devices of this process; ``say`` is told what is being measured.

    Raises ``ClusterError`` in a program of several processes, whose devices cannot be told apart in one clock.
    """
    keep_freed_memory()  # as where steps run; before JAX starts threads that share no memory
    with spare_threads():
        processes = jax.process_count()
    if processes > 1:
        raise ClusterError("a profile is of the devices of one host; measure in a program of one process")
    devices = jax.devices()
    cluster = Cluster.local(devices, profile=None)
    on_cpu = cluster.device.platform is Platform.CPU  # elsewhere nothing asks for the figures that are left out
    measuring = Measuring(devices, effort if on_cpu else effort.on_accelerators or effort, say)
    # First of all: what is freed later leaves gaps that serve as memory which a step would not find.
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
        uses=tuple(measuring.uses()),
        deep_products=tuple(measuring.deep_products()),
        elementwise=measuring.kernels.elementwise(),
        dispatch=measuring.dispatch(),
        streamed=measuring.kernels.streamed(),
        fresh=fresh,
        operations=tuple(measuring.operations()),
        reductions=measuring.kernels.reductions(),
        convolutions=tuple(measuring.convolutions()),
        looped_convolutions=tuple(measuring.looped_convolutions()),
        waits=tuple(measuring.waits()),
        turned_bytes_per_second=measuring.kernels.turned_bytes_per_second(),
        cut_bytes_per_second=measuring.kernels.cut_bytes_per_second(),
        exchanges=measuring.exchanges() if on_cpu else None,
        world_collectives=measuring.world_collectives() if on_cpu else (),
        host_copies=measuring.kernels.host_copies(),
    )


class KernelTimes(Protocol):
    """Seconds of kernels other than products on each device, all devices at once."""

    def elementwise(self) -> Curve:
        """By the bytes that one reads and writes, which the kernel before touched."""

    def streamed(self) -> Curve:
        """By the same bytes, left alone while others filled the caches."""

    def seconds_per_flop(self, operation: Operation) -> float | None:
        """Of a primitive inside a kernel; None of one that takes what its bytes take."""

    def reductions(self) -> Reductions | None:
        """Of elements in short rows and in columns; None where these are as others."""

    def convolution_seconds(self, convolution: Convolution, side: int) -> float:
        """Of one convolution of float32, of images with so many positions along a side."""

    def turned_bytes_per_second(self) -> float | None:
        """Read and written, of a copy into another order of dimensions; None where it goes as fast as a straight one."""

    def cut_bytes_per_second(self) -> float | None:
        """The same of a copy that cuts an inner dimension."""

    def host_copies(self) -> Curve | None:
        """By the bytes of an array that is copied between a device and its host, one way; None where both are one memory."""


class Measuring:
    """The figures of a profile, one kind after the other."""

    def __init__(self, devices: Sequence[Any], effort: Effort, say: Callable[[str], None]) -> None:
        self._bench = Bench(devices, _timer(devices, effort))
        self._effort = effort
        self._say = say
        on_cpu = devices[0].platform == Platform.CPU.value
        self.kernels: KernelTimes = (LoopedKernels if on_cpu else QueuedKernels)(self._bench, effort, say)

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
        if share_cores(self._bench):
            for group_size, waits in waiting_seconds(self._bench, self._effort.work_sides, self._say).items():
                yield WaitCurve(group_size, Curve.through(waits))

    def products(self) -> Iterator[ProductCurve]:
        """Square products of every dtype and order, until one takes too long."""
        for dtype, order in itertools.product(self._effort.dtypes, self._effort.orders):
            samples = {}
            for side in self._effort.sides:
                self._say(f"products of {dtype} [{side}, {side}], {order.value}")
                samples[2.0 * side**3] = seconds = self._square_seconds(dtype, order, side)
                if seconds > self._effort.longest_seconds:
                    break
            yield ProductCurve(dtype, jnp.dtype(dtype).itemsize, order, Curve.through(samples))

    def uses(self) -> Iterator[UseCurve]:
        """Products with one large array, which caches lost, of every dtype and order."""
        side = self._effort.large_side
        for dtype, order, array in itertools.product(self._effort.dtypes, self._effort.use_orders, ProductArray):
            samples = []
            for uses in self._effort.uses:
                self._say(
                    f"products of {dtype} whose {array.value} array [{side}, {side}] is used {uses} times, {order.value}"
                )
                samples.append((float(uses), float(side), self._use_seconds(dtype, order, array, side, uses)))
            yield UseCurve(dtype, order, array, tuple(samples))

    def deep_products(self) -> Iterator[DeepCurve]:
        """Products of every dtype that sum over much for few results."""
        depth = self._effort.depth
        if not self._effort.deep_sides:
            return
        for dtype, order in itertools.product(self._effort.dtypes, self._effort.orders):
            samples = []
            for side in self._effort.deep_sides:
                self._say(f"products of {dtype} [{side}, {depth}] × [{depth}, {side}], {order.value}")
                seconds = self._linked_seconds(dtype, order, operand_shapes(order, side, depth, side), other=1)
                samples.append((float(side), float(depth), seconds))
            yield DeepCurve(dtype, order, tuple(samples))

    def convolutions(self) -> Iterator[ConvolutionCurve]:
        """Every family, over images of growing sides, until one takes too long."""
        for convolution in self._effort.convolutions:
            samples = {}
            for side in self._effort.image_sides:
                self._say(f"convolutions ({convolution.family.value}) of images [{side}, {side}]")
                samples[convolution.flops(side)] = self.kernels.convolution_seconds(convolution, side)
                if samples[convolution.flops(side)] > self._effort.longest_seconds:
                    break
            yield ConvolutionCurve("float32", convolution.family, Curve.through(samples))

    def looped_convolutions(self) -> Iterator[LoopedConvolutions]:
        """Of each number of features with each, as many images as make about the same work."""
        samples = []
        for image, result in itertools.product(self._effort.looped_features, repeat=2):
            self._say(f"convolutions that are loops, of {image} features to {result}")
            convolution = looped_convolution(image, result)
            seconds = self.kernels.convolution_seconds(convolution, SMALL_SIDE)
            samples.append((float(image), float(result), seconds / convolution.flops(SMALL_SIDE)))
        if samples:
            yield LoopedConvolutions("float32", tuple(samples))

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
        """Seconds per FLOP of primitives that are no products."""
        for operation in self._effort.operations:
            self._say(operation.primitive)
            seconds_per_flop = self.kernels.seconds_per_flop(operation)
            if seconds_per_flop is not None:
                for name in (operation.primitive, *operation.like_it):
                    yield OperationRate(name, seconds_per_flop)

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
        together = self._square_seconds("float32", ProductOrder.PLAIN, side)
        one = Measuring(devices[:1], self._effort, self._say)
        return Dispatch(
            call_seconds=self._bench.timer.least(lambda: tiny(*small)),
            message_seconds=self._bench.timer.least(lambda: jax.device_put(page, devices[-1], may_alias=False)),
            alone_speed=max(1.0, together / one._square_seconds("float32", ProductOrder.PLAIN, side)),
        )

    # -------------------------------------------------------------------------------------------------------- how to time

    def _square_seconds(self, dtype: str, order: ProductOrder, side: int) -> float:
        """Seconds of one product [side, side] × [side, side] on each device."""
        with jax.enable_x64(jnp.dtype(dtype).itemsize > 4):
            mesh = self._bench.mesh(1)
            x, other = (self._bench.spread((side, side), mesh, jnp.dtype(dtype)) for _ in range(2))
            return self._bench.chain_seconds(partial(multiplied, order=order), mesh, x, [other])

    def _use_seconds(self, dtype: str, order: ProductOrder, array: ProductArray, side: int, uses: int) -> float:
        """Seconds of one product on each device, whose large array is another one each time."""
        rows, summed, columns = (
            uses if without is array else side
            for without in (ProductArray.RIGHT, ProductArray.RESULT, ProductArray.LEFT)
        )
        shapes = operand_shapes(order, rows, summed, columns)
        if array is ProductArray.RESULT:
            return self._linked_seconds(dtype, order, shapes, other=1)
        large = 0 if array is ProductArray.LEFT else 1
        held_bytes = math.prod(shapes[large]) * jnp.dtype(dtype).itemsize
        count = min(-(-self._effort.streamed_bytes // held_bytes), CHAIN)
        return self._linked_seconds(dtype, order, shapes, other=large, count=count)

    def _linked_seconds(
        self, dtype: str, order: ProductOrder, shapes: Sequence[tuple[int, int]], *, other: int, count: int = 1
    ) -> float:
        """Seconds of one product of arrays of such shapes on each device, of which the one of position ``other`` is one of
        ``count`` in turn.

        The other operand is the chain's value, of which one element depends on the product before.
        """

        def link(value: jax.Array, one: jax.Array) -> jax.Array:
            operands = (value, one) if other else (one, value)
            made = lax.optimization_barrier(multiplied(*operands, order=order))  # nobody asks for one element only
            return value.at[0, 0].add(made[0, 0])

        with jax.enable_x64(jnp.dtype(dtype).itemsize > 4):
            mesh = self._bench.mesh(1)
            x = self._bench.spread(shapes[1 - other], mesh, jnp.dtype(dtype))
            others = [self._bench.spread(shapes[other], mesh, jnp.dtype(dtype)) for _ in range(count)]
            return self._bench.chain_seconds(link, mesh, x, others)

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


def profile_rows(profile: Profile) -> Iterable[tuple[str, str, str]]:
    """(what, seconds of the smallest, rate of the largest) for a table of a profile's curves."""
    for one in profile.collectives:
        yield f"{one.kind} among {one.group_size}", *_ends(one.curve, "B/s")
    for one in profile.world_collectives:
        yield f"{one.kind} among {one.group_size}, between processes", *_ends(one.curve, "B/s")
    for product in profile.products:
        order = "" if product.order is ProductOrder.PLAIN else f", {product.order.value}"
        yield f"products, {product.dtype}{order}", *_ends(product.curve, "FLOP/s")
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
    if profile.host_copies is not None:
        yield "copies to and from the host", *_ends(profile.host_copies, "B/s")
    if (dispatch := profile.dispatch) is not None:
        yield "a call", f"{dispatch.call_seconds * 1e6:.1f} µs", ""
        yield "a message", f"{dispatch.message_seconds * 1e6:.1f} µs", ""
        yield "a device alone", "", f"{dispatch.alone_speed:.2f} × as fast"


def _ends(curve: Curve, unit: str) -> tuple[str, str]:
    (amount, seconds) = curve.samples[-1]
    rate = f"{amount / seconds / 1e9:.2f} G{unit}" if seconds > LEAST_SECONDS else "free"
    return f"{curve.at(0.0) * 1e6:.1f} µs", rate
