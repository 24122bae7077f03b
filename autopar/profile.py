"""What was measured on a machine, as data that the cost model reads between the measured points.

A profile holds *curves*: seconds as a function of an amount, all devices of one host working at once,

    collectives     by kind and group size   of the bytes that one device sends (wire bytes, ring accounting)
    waits           by group size            of the seconds of work since the collective before, beyond those of the above
    products        by dtype and order       of the FLOPs of one square matrix product on one device
    uses            by dtype, order, array   of how often each element of a product's one large array is used
    deep products   by dtype and order       of how many results a product has that sums over much
    convolutions    by family                of the FLOPs of one convolution on one device
    looped convolutions                      of features of image and result, by the FLOP (:mod:`autopar.looped_convolutions`)
    elementwise                              of the bytes that one kernel on one device reads and writes, soon after others did
    streamed                                 of the same bytes, which nobody has touched since they left the caches
    fresh outputs, scratch                   of the bytes of an array, or of a block, that is allocated for one call
    exchanges                                of the bytes of a message between processes, which either end copies
    world collectives   as collectives       in a world of several processes, whose devices pass nothing through memory
    host copies                              of the bytes of an array that goes from a device to its host or back

(a convolution's FLOPs as :mod:`autopar.graph.flops` counts them), the rates at which copies turn arrays and cut them, rates of
single operations (:class:`OperationRate`), of reductions by how their elements lie (:class:`Reductions`), and what only several
executables show that take turns and run side by side (:class:`Dispatch`).  What a profile does not hold is priced without: waits
as none, streamed and turned bytes as others, cut bytes as turned ones, fresh memory and exchanges as free, host copies by the
cluster's link, collectives of a world as those of one process, reductions as those of long rows, operations and convolutions at
the rate of matrix products.

*Group sizes that were not measured* take the curve of the measured size whose ring factor (p-1)/p is nearest.

Between and beyond their points curves are what :mod:`autopar.curves` says, but what uses and depth say of products, which is
in :mod:`autopar.products`.  This file imports nothing of ours but these, the families of convolutions
(:mod:`autopar.convolution_shapes`), those that are loops, and the error type.  The file format is in
:mod:`autopar.profile_file`, the measuring in :mod:`autopar.measure`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.convolution_shapes import ConvolutionFamily, ConvolutionShape
from autopar.curves import Curve
from autopar.errors import ClusterError
from autopar.looped_convolutions import LoopedConvolutions
from autopar.products import DeepCurve, Product, ProductCurve, ProductPrices, UseCurve

_PROCESSORS = "cpu"
"""JAX's name of the platform whose libraries are XLA:CPU's."""

_STAND_INS = {
    ConvolutionFamily.LARGE_POINT: ConvolutionFamily.LARGE_MANY_FEATURES,
    ConvolutionFamily.SMALL_DILATED: ConvolutionFamily.DILATED,
}
"""Which families stand for those that a profile does not hold."""


@dataclass(frozen=True)
class CollectiveCurve:
    """One kind of collective (a value of :class:`autopar.cost_model.collectives.Collective`) in groups of one size."""

    kind: str
    group_size: int
    curve: Curve


@dataclass(frozen=True)
class WaitCurve:
    """What collectives in groups of one size take longer after so many seconds of work (amounts) than soon after another.

    Devices that share cores do not end their work together, and the longer it was, the further apart.
    """

    group_size: int
    curve: Curve


@dataclass(frozen=True)
class ConvolutionCurve:
    """Convolutions of one dtype (NumPy's name) and family; amounts are FLOPs."""

    dtype: str
    family: ConvolutionFamily
    curve: Curve


@dataclass(frozen=True)
class Dispatch:
    """Seconds of a call of an executable beyond its work, and of a small array from device to device; how many times faster
    one device computes while the others of its host idle (1: it does not).

    Raises ``ClusterError`` for seconds that are not finite and above zero, or a speed below 1.
    """

    call_seconds: float
    message_seconds: float
    alone_speed: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("call_seconds", 0.0), ("message_seconds", 0.0), ("alone_speed", 1.0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0 and value >= least):
                raise ClusterError(
                    f"{name} is {value!r}; give a finite number {'above zero' if not least else 'of 1 or more'}"
                )


@dataclass(frozen=True)
class Fresh:
    """Seconds that memory costs beyond its use, because it is new to every call: pages are mapped and cleared one by one.

    ``outputs`` are of one of several arrays that a call returns without taking over an argument's memory, ``scratch`` of the
    one block in which it keeps its intermediate arrays; amounts are bytes on one device.  Allocators keep small blocks, so
    these cost almost nothing.
    """

    outputs: Curve
    scratch: Curve

    def seconds(self, output_bytes: Iterable[float], scratch_bytes: float) -> float:
        """Seconds of a call that returns arrays of so many bytes and needs so much scratch memory."""
        arrays = sum(self.outputs.at(size) for size in output_bytes if size)
        return arrays + (self.scratch.at(scratch_bytes) if scratch_bytes else 0.0)


@dataclass(frozen=True)
class OperationRate:
    """Seconds per FLOP, as :mod:`autopar.graph.flops` counts them, of one primitive inside a kernel on one device.

    Raises ``ClusterError`` for seconds that are not finite and above zero.
    """

    primitive: str
    seconds_per_flop: float

    def __post_init__(self) -> None:
        _refuse_unless_positive(f"seconds_per_flop of {self.primitive!r}", self.seconds_per_flop)


LONG_ROW = 64
"""Elements that lie one after the other and belong to one sum are a long row from so many on."""


@dataclass(frozen=True)
class Reductions:
    """What sums (maxima, minima) take longer whose elements do not lie in long rows; the rate of those is an operation's.

    Where r elements of one result lie one after the other, n elements take n/r · ``short_row_seconds`` more than in long rows if
    r is below ``LONG_ROW``; where neighbours belong to other results they take n · ``column_seconds_per_flop``.
    On XLA:CPU that is within a tenth of what rows of 2, 4, 8 and 16 elements were measured to take.
    Raises ``ClusterError`` for seconds that are not finite and above zero.
    """

    short_row_seconds: float
    """Of each row in which elements of one sum lie together, beyond what they take in a long one."""
    column_seconds_per_flop: float
    """Of elements whose neighbours belong to other sums."""

    def __post_init__(self) -> None:
        for name in ("short_row_seconds", "column_seconds_per_flop"):
            _refuse_unless_positive(name, getattr(self, name))


@dataclass(frozen=True)
class Profile:
    """Everything measured on the devices of one host; where and when (ISO 8601) it was.

    Raises ``ClusterError`` if a curve is given twice.
    """

    jax_version: str
    platform: str
    device_kind: str
    num_devices: int
    machine: str
    measured_at: str
    collectives: tuple[CollectiveCurve, ...]
    products: tuple[ProductCurve, ...]
    elementwise: Curve
    dispatch: Dispatch | None = None
    streamed: Curve | None = None
    fresh: Fresh | None = None
    operations: tuple[OperationRate, ...] = ()
    convolutions: tuple[ConvolutionCurve, ...] = ()
    waits: tuple[WaitCurve, ...] = ()
    turned_bytes_per_second: float | None = None
    """Read and written, of a copy whose dimensions lie in another order."""
    cut_bytes_per_second: float | None = None
    """Read and written, of a copy in which the pieces of an inner dimension lie one after the other."""
    exchanges: Curve | None = None
    """Of the processors of a host while all its devices compute, at each end."""
    world_collectives: tuple[CollectiveCurve, ...] = ()
    """Between devices of one host whose process is one of several; only where these are carried otherwise."""
    reductions: Reductions | None = None
    uses: tuple[UseCurve, ...] = ()
    """Of products that have one large array."""
    deep_products: tuple[DeepCurve, ...] = ()
    looped_convolutions: tuple[LoopedConvolutions, ...] = ()
    """Where few results keep few units busy."""
    host_copies: Curve | None = None
    """Of the bytes of an array on each device that is copied to or from its host, one way, by all devices at once."""
    work_between_seconds: float = 0.0
    """Between the collectives that are priced; not measured, and in no file."""

    def __post_init__(self) -> None:
        for name in ("turned_bytes_per_second", "cut_bytes_per_second"):
            if (rate := getattr(self, name)) is not None:
                _refuse_unless_positive(name, rate)
        refuse_twice("operations", (one.primitive for one in self.operations))
        refuse_twice("collectives", ((one.kind, one.group_size) for one in self.collectives))
        refuse_twice("world_collectives", ((one.kind, one.group_size) for one in self.world_collectives))
        refuse_twice("waits", (one.group_size for one in self.waits))
        refuse_twice("products", ((one.dtype, one.order.value) for one in self.products))
        refuse_twice("uses", ((one.dtype, one.order.value, one.array.value) for one in self.uses))
        refuse_twice("deep_products", ((one.dtype, one.order.value) for one in self.deep_products))
        refuse_twice("convolutions", ((one.dtype, one.family.value) for one in self.convolutions))
        refuse_twice("looped_convolutions", ((one.dtype,) for one in self.looped_convolutions))

    def __hash__(self) -> int:
        return hash((self.machine, self.measured_at, self.platform, self.num_devices))

    def of_part(self, num_devices: int) -> Profile:
        """What of it holds for so many devices of the host while the others work as well: all but larger groups."""
        if num_devices == self.num_devices:
            return self
        collectives, in_world = (
            tuple(one for one in curves if one.group_size <= num_devices)
            for curves in (self.collectives, self.world_collectives)
        )
        waits = tuple(one for one in self.waits if one.group_size <= num_devices)
        return replace(self, num_devices=num_devices, collectives=collectives, world_collectives=in_world, waits=waits)

    def waiting_seconds(self, group_size: int, work_seconds: float) -> float:
        """What a collective after so much work takes longer; group sizes as for :meth:`collective`.

        After more work than was measured it is as after the most: how far apart devices end is up to the scheduler.
        """
        sizes = {one.group_size: one.curve for one in self.waits}
        if not sizes:
            return 0.0
        curve = sizes[_nearest(sizes, group_size)]
        return curve.up_to_last(work_seconds)

    def after(self, work_seconds: float) -> Profile:
        """The same for collectives that all stand so much work apart, the waiting in their curves (and in those of a network)."""
        return replace(self, work_between_seconds=work_seconds)

    @cached_property
    def in_world(self) -> Profile:
        """The same for processes of a world; itself where their collectives are those of devices of one process."""
        return replace(self, collectives=self.world_collectives) if self.world_collectives else self

    def collective(self, kind: str, group_size: int) -> Curve | None:
        """The curve over wire bytes for groups of that size, or of the measured size nearest by ring factor."""
        curve = self.soon_collective(kind, group_size)
        return None if curve is None else self.after_work(curve, group_size)

    def after_work(self, curve: Curve, group_size: int) -> Curve:
        """The curve of a collective with the waiting for devices that work, where the profile is told how much they do."""
        between = self.work_between_seconds
        return curve.raised(self.waiting_seconds(group_size, between)) if between else curve

    def soon_collective(self, kind: str, group_size: int) -> Curve | None:
        """The same of a collective that follows another at once."""
        sizes = {one.group_size: one.curve for one in self.collectives if one.kind == kind}
        if not sizes:
            return None
        return sizes[_nearest(sizes, group_size)]

    def memory_seconds(self, bytes_moved: float, *, streamed: bool) -> float:
        """Seconds of a kernel that reads and writes so many bytes; ``streamed``: they were last touched long ago."""
        if not bytes_moved:
            return 0.0
        near = self.elementwise.at(bytes_moved)
        return max(near, self.streamed.at(bytes_moved)) if streamed and self.streamed is not None else near

    def operation_seconds(self, flops: float, primitive: str) -> float | None:
        """Seconds of so many FLOPs of one primitive; None for one that was not measured."""
        rate = self._rates.get(primitive)
        return None if rate is None else flops * rate

    def reduction_seconds(self, flops: float, primitive: str, row: int | None) -> float | None:
        """Seconds of a reduction of so many elements, of which ``row`` of one result lie one after the other; None: those of
        other results do.  None for a primitive that was not measured.
        """
        long = self.operation_seconds(flops, primitive)
        if long is None or self.reductions is None:
            return long
        if row is None:
            return max(long, flops * self.reductions.column_seconds_per_flop)
        return long if row >= LONG_ROW else long + flops / row * self.reductions.short_row_seconds

    @cached_property
    def _rates(self) -> dict[str, float]:
        return {one.primitive: one.seconds_per_flop for one in self.operations}

    def convolution_seconds(self, flops: float, shape: ConvolutionShape, dtype: str) -> float | None:
        """Seconds of one convolution on one device; None for a dtype or family that was not measured."""
        family = shape.family
        if family is ConvolutionFamily.SMALL_DILATED and (looped := self._looped.get(dtype)) is not None:
            return flops * looped.seconds_per_flop(shape.image_features, shape.result_features)
        curve = self._convolutions.get((dtype, family)) or self._convolutions.get(
            (dtype, _STAND_INS.get(family, family))
        )
        if curve is None:
            return None
        return curve.at(flops * (shape.filling_on_processors if self.platform == _PROCESSORS else shape.filling))

    @cached_property
    def _convolutions(self) -> dict[tuple[str, ConvolutionFamily], Curve]:
        return {(one.dtype, one.family): one.curve for one in self.convolutions}

    @cached_property
    def _looped(self) -> dict[str, LoopedConvolutions]:
        return {one.dtype: one for one in self.looped_convolutions}

    def product_seconds(self, product: Product, dtype: str) -> float | None:
        """Seconds of one matrix product on one device; None for a dtype that was not measured."""
        return self._products.seconds(product, dtype)

    @cached_property
    def _products(self) -> ProductPrices:
        return ProductPrices(self.products, self.uses, self.deep_products)


def _nearest(measured: Iterable[int], group_size: int) -> int:
    """The measured group size whose ring factor is nearest."""
    return min(measured, key=lambda size: abs(1 / size - 1 / group_size))


def _refuse_unless_positive(what: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ClusterError(f"{what} is {value!r}; give a finite number above zero")


def refuse_twice(what: str, keys: Iterable[object]) -> None:
    """Raises ``ClusterError`` naming the first of the keys that was there before."""
    seen = set()
    for number, key in enumerate(keys):
        if key in seen:
            raise ClusterError(f"{what}[{number}]: {key} is there twice; keep one of them")
        seen.add(key)
