"""How long do collectives, matrix products and elementwise kernels take on the devices of this process?

Each is timed inside an executable over all devices at once, as a train step runs it:

    seconds of one = (chain of L − chain of 1) / (L − 1)        so the cost of a call drops out (:mod:`autopar.timing`)

where every link of a chain waits for the one before.  A chain of collectives or of products is unrolled.

Devices that share processor cores do not come to a collective together: the last one works while the first ones wait, each
arrival wakes those that wait, and cores stand still.  A chain of collectives alone shows nothing of it (among eight devices on
two cores one takes 0.14 ms in a chain of its own and 0.56 ms between products).  So there each collective stands between
matrix products, and

    seconds of one = (median of L collectives after work − median of 1 collective and as much work) / (L − 1)

with products of a size that parts collectives by about as much as train steps do; the one collective in either chain is that
which waits for devices that were started later.

Elementwise kernels would be fused into one, so theirs is a loop whose number of trips is an argument; a trip runs four
kernels, three of them (the counter's) on single numbers, and those are taken off again as three quarters of a trip of the same
loop over one element on each device.

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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar.cluster import Cluster, Platform
from autopar.cost_model.collectives import Collective, wire_bytes
from autopar.errors import ClusterError
from autopar.measured_operations import OPERATIONS, Operation
from autopar.profile import (
    SKINNINESS,
    CollectiveCurve,
    Curve,
    Dispatch,
    Fresh,
    OperationRate,
    ProductCurve,
    ProductShape,
    Profile,
)
from autopar.profile_file import machine_name
from autopar.timing import LEAST_SECONDS, Timer

CHAIN = 9
CALL_ARGUMENTS = 64
"""About as many arrays as an executable of a pipeline is given."""
ALONE_SIDE = 512
WORK_SIDE, WORKED_CHAIN = 192, 17
"""Between collectives of devices that share cores: two square products of this side, in a chain of so many links."""
KERNELS_OF_A_TRIP = 4
LEAST_TRIPS, MOST_TRIPS, MOST_LOOPED_BYTES = 32, 512, 1 << 28
"""Of a loop: enough for its trips to outweigh the call, which allocates the result anew; few enough to end soon."""
MOST_PIECES, NEAR_BYTES = 16, 1 << 25
"""Elementwise kernels take turns on so many arrays, of at most so many bytes in all on each device: a pass comes back to a
small array soon, to a large one when it has left the caches."""
FRESH_ARRAYS, FRESH_BYTES = 8, 1 << 25
"""New arrays are returned so many at a time, of at most so many bytes in all on each device (but one at least)."""
_SPEC = PartitionSpec(("other", "group"))


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
    turned_shape: tuple[int, int] = (512, 2048)
    """Of a float32 matrix that is copied into another order."""


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
)


def measure(effort: Effort = FULL, say: Callable[[str], None] = lambda message: None) -> Profile:
    """Measure all devices of this process; ``say`` is told what is being measured.

    Raises ``ClusterError`` in a program of several processes, whose devices cannot be told apart in one clock.
    """
    if jax.process_count() > 1:
        raise ClusterError("a profile is of the devices of one host; measure in a program of one process")
    devices = jax.devices()
    cluster = Cluster.local(devices, profile=None)
    bench = _Bench(devices, effort, say)
    # First of all: what is freed later leaves gaps that serve as memory which a step would not find.
    on_cpu = cluster.device.platform is Platform.CPU  # elsewhere nothing asks for the figures that are left out
    fresh = bench.fresh() if on_cpu else None
    return Profile(
        jax_version=jax.__version__,
        platform=cluster.device.platform.value,
        device_kind=str(devices[0].device_kind),
        num_devices=len(devices),
        machine=machine_name(),
        measured_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        collectives=tuple(bench.collectives()),
        products=tuple(bench.products()),
        elementwise=bench.elementwise(),
        dispatch=bench.dispatch(),
        streamed=bench.elementwise(effort.streamed_bytes),
        fresh=fresh,
        operations=tuple(bench.operations()),
        turned_bytes_per_second=bench.turned_bytes_per_second() if on_cpu else None,
    )


class _Bench:
    """The devices, and how carefully they are timed."""

    def __init__(self, devices: Sequence[Any], effort: Effort, say: Callable[[str], None]) -> None:
        self._devices = list(devices)
        self._share_cores = devices[0].platform == Platform.CPU.value and len(devices) > 1
        self._effort = effort
        self._timer = Timer(effort.seconds, effort.least_runs)
        self._say = say

    # ------------------------------------------------------------------------------------------------------ what to time

    def collectives(self) -> Iterator[CollectiveCurve]:
        """Every kind in groups of every divisor of the number of devices."""
        count = len(self._devices)
        for group_size in (size for size in range(2, count + 1) if count % size == 0):
            for kind in Collective:
                samples = {}
                for full_bytes in self._effort.full_bytes:
                    self._say(f"{kind.value} of {full_bytes >> 10} KiB among {group_size}")
                    held = full_bytes // (group_size if kind is Collective.ALL_GATHER else 1)
                    elements = max(held // 4 // group_size, 1) * group_size
                    sent = wire_bytes(
                        kind, 4 * elements * (group_size if kind is Collective.ALL_GATHER else 1), group_size
                    )
                    samples[sent] = self._collective_seconds(kind, group_size, elements)
                yield CollectiveCurve(kind.value, group_size, _curve(samples))

    def products(self) -> Iterator[ProductCurve]:
        """Square and skinny products of every dtype, until one takes too long."""
        for dtype in self._effort.dtypes:
            for shape in ProductShape:
                samples = {}
                for side in self._effort.sides:
                    if shape is ProductShape.SKINNY and side < SKINNINESS:
                        continue
                    self._say(f"{shape.value} products of {dtype} [{side}, {side}]")
                    inner = side if shape is ProductShape.SQUARE else side // SKINNINESS
                    seconds = self._product_seconds(dtype, side, inner)
                    samples[2.0 * side * side * inner] = seconds
                    if seconds > self._effort.longest_seconds:
                        break
                yield ProductCurve(dtype, jnp.dtype(dtype).itemsize, shape, _curve(samples))

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
        return _curve(samples)

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
        return Fresh(_curve(outputs), _curve(scratch))

    def operations(self) -> Iterator[OperationRate]:
        """Seconds per FLOP of primitives that are no products, over an array that stays in the caches."""
        for operation in self._effort.operations:
            self._say(operation.primitive)
            mesh = self._mesh(1)
            x = _spread(np.linspace(0.1, 0.9, operation.elements * len(self._devices), dtype=np.float32), mesh)
            seconds = self._loop_seconds(_repeated(operation), x, operation.trips)
            for name in (operation.primitive, *operation.like_it):
                yield OperationRate(name, seconds / (operation.elements * operation.flops_of_element()))

    def turned_bytes_per_second(self) -> float:
        """Of a copy of a matrix that lies in memory by columns into one that lies by rows.

        It takes the place of one of the two kernels that go straight over the matrix in a trip of the other loop.
        """
        self._say("copies into another order")
        rows, columns = self._effort.turned_shape
        pieces = max(self._effort.streamed_bytes // (4 * rows * columns), 2)
        x = _spread(np.zeros((pieces * len(self._devices), rows, columns), np.float32), self._mesh(1))

        def copied(turns: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
            def trip(number: jax.Array, carried: jax.Array) -> jax.Array:
                piece = lax.dynamic_index_in_dim(carried, number % pieces, keepdims=False)
                changed = piece.T.reshape(piece.shape) if turns else piece * 0.999 + 1.0
                # Kept apart, the update in place is one more kernel of either kind.
                return lax.dynamic_update_index_in_dim(carried, lax.optimization_barrier(changed), number % pieces, 0)

            return trip

        turned, straight = (self._loop_seconds(copied(turns), x, LEAST_TRIPS) for turns in (True, False))
        return 2 * 4 * rows * columns / max(turned - straight / 2, LEAST_SECONDS)

    def dispatch(self) -> Dispatch:
        """A call that does almost nothing, an array of one page from device to device, and products on one device alone."""
        self._say("calls of executables")
        devices = self._devices
        small = [jax.device_put(np.float32(number), devices[0]) for number in range(CALL_ARGUMENTS)]
        tiny = jax.jit(lambda *numbers: numbers[0] + 1.0, keep_unused=True).lower(*small).compile()
        page = jax.device_put(np.zeros(1024, np.float32), devices[0])
        side = ALONE_SIDE if ALONE_SIDE in self._effort.sides else self._effort.sides[-1]
        together = self._product_seconds("float32", side, side)
        one = _Bench(devices[:1], self._effort, self._say)
        return Dispatch(
            call_seconds=self._timer.least(lambda: tiny(*small)),
            message_seconds=self._timer.least(lambda: jax.device_put(page, devices[-1], may_alias=False)),
            alone_speed=max(1.0, together / one._product_seconds("float32", side, side)),
        )

    # -------------------------------------------------------------------------------------------------------- how to time

    def _mesh(self, group_size: int) -> jax.sharding.Mesh:
        grid = np.array(self._devices).reshape(-1, group_size)
        return jax.sharding.Mesh(grid, ("other", "group"), axis_types=(AxisType.Auto,) * 2)

    def _collective_seconds(self, kind: Collective, group_size: int, elements: int) -> float:
        """Seconds of one collective to which each device brings so many float32 (zeros, so that sums stay finite)."""
        mesh = self._mesh(group_size)
        x = _spread(np.zeros(elements * len(self._devices), np.float32), mesh)
        link = _LINKS[kind]
        if self._share_cores:
            return self._seconds_between_work(kind, lambda value: link(value, group_size), mesh, x)
        chains = [_unrolled(lambda value: link(value, group_size), length, mesh, (x,)) for length in (1, CHAIN)]
        for length, chain in zip((1, CHAIN), chains, strict=True):
            _check_count(kind, length, chain.as_text())
        return self._timer.difference(*(lambda chain=chain: chain(x) for chain in chains), extra=CHAIN - 1)

    def _seconds_between_work(
        self, kind: Collective, link: Callable[[jax.Array], jax.Array], mesh: jax.sharding.Mesh, x: jax.Array
    ) -> float:
        """What a chain of work takes longer with a collective after each link; each waits for the other."""
        work = _spread(np.zeros((WORK_SIDE * len(self._devices), WORK_SIDE), np.float32), mesh)

        def chain(sends: int) -> Any:
            def worked(value: jax.Array, activations: jax.Array) -> tuple[jax.Array, jax.Array]:
                weights = activations
                for number in range(WORKED_CHAIN):
                    activations = (activations + value[0]) @ weights @ weights
                    value = value.at[0].set(activations[0, 0])
                    value = link(value) if number < sends else value
                return value, activations

            both = (_SPEC, _SPEC)
            local = jax.shard_map(worked, mesh=mesh, in_specs=both, out_specs=both, check_vma=False)
            compiled: Any = jax.jit(local).lower(x, work).compile()
            _check_count(kind, sends, compiled.as_text())
            return compiled

        one, all_links = chain(1), chain(WORKED_CHAIN)
        least, most = self._timer.typical(lambda: one(x, work), lambda: all_links(x, work))
        return max((most - least) / (WORKED_CHAIN - 1), LEAST_SECONDS)

    def _product_seconds(self, dtype: str, side: int, inner: int) -> float:
        """Seconds of one product of 2 · side · side · inner FLOPs on each device."""
        with jax.enable_x64(jnp.dtype(dtype).itemsize > 4):
            mesh = self._mesh(1)
            count = len(self._devices)
            x = _spread(jnp.zeros((count * side, inner), dtype), mesh)
            w = _spread(jnp.zeros((count * inner, side), dtype), mesh)

            def link(value: jax.Array, right: jax.Array) -> jax.Array:
                product = value @ right
                return product if inner == side else product @ value

            lengths = (1, CHAIN if inner == side else (CHAIN + 1) // 2)
            chains = [_unrolled(link, length, mesh, (x, w)) for length in lengths]
            of_a_link = 1 if inner == side else 2
            extra = (lengths[1] - lengths[0]) * of_a_link
            return self._timer.difference(*(lambda chain=chain: chain(x, w) for chain in chains), extra=extra)

    def _trip_seconds(self, elements: int, trips: int, pieces: int) -> float:
        """Seconds of one trip of a loop around one elementwise kernel on so many float32 on each device.

        Each trip works on the next piece of an array.
        """
        x = _spread(np.zeros(pieces * elements * len(self._devices), np.float32), self._mesh(1))

        def trip(number: jax.Array, carried: jax.Array) -> jax.Array:
            start = number % pieces * elements
            piece = lax.dynamic_slice_in_dim(carried, start, elements)
            return lax.dynamic_update_slice_in_dim(carried, piece * 0.999 + 1.0, start, 0)

        return self._loop_seconds(trip, x, trips)

    def _fresh_seconds(self, elements: int, count: int) -> float:
        """Seconds that each of so many new arrays of float32 costs beyond one whose memory is there."""
        mesh = self._mesh(1)
        arrays = [_spread(np.zeros(elements * len(self._devices), np.float32), mesh) for _ in range(count)]

        def scaled(*values: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(value * 0.999 for value in values)

        specs = (_SPEC,) * count
        local = jax.shard_map(scaled, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
        new = jax.jit(local).lower(*arrays).compile()
        taking_over = jax.jit(local, donate_argnums=tuple(range(count))).lower(*arrays).compile()
        held = [[jnp.copy(array) for array in arrays]]

        def in_place() -> list[jax.Array]:
            held[0] = list(taking_over(*held[0]))
            return held[0]

        there, beyond = self._timer.typical(in_place, lambda: new(*arrays))
        return max((beyond - there) / count, LEAST_SECONDS)

    def _scratch_seconds(self, elements: int) -> float:
        """Seconds that a loop's carry of so many float32 costs beyond one in the memory of an argument.

        A trip goes over the carry once; the one that is scratch is filled first, in place of a trip.
        """
        mesh = self._mesh(1)
        x = _spread(np.zeros(elements * len(self._devices), np.float32), mesh)
        start = _spread(np.zeros(len(self._devices), np.float32), mesh)

        def over(count: jax.Array, carry: jax.Array) -> jax.Array:
            return lax.fori_loop(0, count, lambda _, carried: carried * 0.999 + 1.0, carry)

        def within(count: jax.Array, value: jax.Array) -> jax.Array:
            return over(count, jnp.broadcast_to(value, (elements,)))[:1]

        def compiled(function: Callable[..., jax.Array], *arguments: jax.Array, donated: tuple[int, ...] = ()) -> Any:
            specs = PartitionSpec(), _SPEC
            local = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=_SPEC, check_vma=False)
            return jax.jit(local, donate_argnums=donated).lower(*arguments).compile()

        two, three = (jax.device_put(np.int32(count), NamedSharding(mesh, PartitionSpec())) for count in (2, 3))
        inside, taking_over = compiled(within, two, start), compiled(over, three, x, donated=(1,))
        held = [x]

        def in_place() -> jax.Array:
            held[0] = taking_over(three, held[0])
            return held[0]

        there, beyond = self._timer.typical(in_place, lambda: inside(two, start))
        return max(beyond - there, LEAST_SECONDS)

    def _loop_seconds(self, trip: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, trips: int) -> float:
        """Seconds of one trip on each device: ``trip`` makes, of its number and an array, the next array."""
        mesh = self._mesh(1)

        def loop(count: jax.Array, value: jax.Array) -> jax.Array:
            return lax.fori_loop(0, count, trip, value)

        local = jax.shard_map(loop, mesh=mesh, in_specs=(PartitionSpec(), _SPEC), out_specs=_SPEC, check_vma=False)
        counts = [jax.device_put(np.int32(count), NamedSharding(mesh, PartitionSpec())) for count in (1, trips + 1)]
        compiled = jax.jit(local).lower(counts[0], x).compile()
        return self._timer.difference(*(lambda count=count: compiled(count, x) for count in counts), extra=trips)


def _curve(samples: dict[float, float]) -> Curve:
    return Curve(tuple(sorted((float(amount), float(seconds)) for amount, seconds in samples.items())))


def _spread(array: Any, mesh: jax.sharding.Mesh) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, _SPEC))


def _repeated(operation: Operation) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda number, value: operation.apply(value)


def _unrolled(
    link: Callable[..., jax.Array], length: int, mesh: jax.sharding.Mesh, arguments: tuple[jax.Array, ...]
) -> Any:
    """A compiled chain: ``link`` of its own result, the other arguments the same each time."""

    def chain(value: jax.Array, *others: jax.Array) -> jax.Array:
        for _ in range(length):
            value = link(value, *others)
        return value

    local = jax.shard_map(chain, mesh=mesh, in_specs=(_SPEC,) * len(arguments), out_specs=_SPEC, check_vma=False)
    return jax.jit(local).lower(*arguments).compile()


def _check_count(kind: Collective, length: int, text: str) -> None:
    """The executable holds the whole chain, or what was timed would mean nothing."""
    opcode = "collective-permute" if kind is Collective.PERMUTE else kind.value
    found = text.count(f" {opcode}(") + text.count(f" {opcode}-start(")
    if found != length:
        raise ClusterError(
            f"a chain of {length} {kind.value} compiled to {found}, so it cannot be timed on this backend; report this"
        )


# ----------------------------------------------------------------------------------------- one collective, made to chain


def _all_reduce(value: jax.Array, group_size: int) -> jax.Array:
    # Shifting by the device's number keeps the operand from being provably replicated.
    return lax.psum(value, "group") + lax.axis_index("group").astype(value.dtype)


def _all_gather(value: jax.Array, group_size: int) -> jax.Array:
    full = lax.all_gather(value, "group", tiled=True)
    return lax.dynamic_slice_in_dim(full, lax.axis_index("group") * value.size, value.size)


def _reduce_scatter(value: jax.Array, group_size: int) -> jax.Array:
    piece = lax.psum_scatter(value, "group", tiled=True)
    return lax.dynamic_update_slice(value, piece, (0,))


def _all_to_all(value: jax.Array, group_size: int) -> jax.Array:
    return lax.all_to_all(lax.optimization_barrier(value), "group", 0, 0, tiled=True)


def _permute(value: jax.Array, group_size: int) -> jax.Array:
    return lax.ppermute(value, "group", [(place, (place + 1) % group_size) for place in range(group_size)])


_LINKS: dict[Collective, Callable[[jax.Array, int], jax.Array]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.PERMUTE: _permute,
}


def profile_rows(profile: Profile) -> Iterable[tuple[str, str, str]]:
    """(what, seconds of the smallest, rate of the largest) for a table of a profile's curves."""
    for one in profile.collectives:
        yield f"{one.kind} among {one.group_size}", *_ends(one.curve, "B/s")
    for product in profile.products:
        yield f"{product.shape.value} products, {product.dtype}", *_ends(product.curve, "FLOP/s")
    yield "elementwise kernels", *_ends(profile.elementwise, "B/s")
    if profile.streamed is not None:
        yield "elementwise kernels, streamed", *_ends(profile.streamed, "B/s")
    if (fresh := profile.fresh) is not None:
        yield "new arrays", *_ends(fresh.outputs, "B/s")
        yield "new scratch memory", *_ends(fresh.scratch, "B/s")
    for operation in profile.operations:
        yield operation.primitive, "", f"{1e-9 / operation.seconds_per_flop:.2f} GFLOP/s"
    if (dispatch := profile.dispatch) is not None:
        yield "a call", f"{dispatch.call_seconds * 1e6:.1f} µs", ""
        yield "a message", f"{dispatch.message_seconds * 1e6:.1f} µs", ""
        yield "a device alone", "", f"{dispatch.alone_speed:.2f} × as fast"


def _ends(curve: Curve, unit: str) -> tuple[str, str]:
    (amount, seconds) = curve.samples[-1]
    return f"{curve.at(0.0) * 1e6:.1f} µs", f"{amount / seconds / 1e9:.2f} G{unit}"
