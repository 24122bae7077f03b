"""What does a matrix product take, by what was measured of others?

With f FLOPs (a multiply-add counted as two) and n elements in one of its three arrays, each element is *used* u = f / 2n
times: of [m, k] × [k, n] each of the left one's n times, of the right one's m times, of the result's k times.  A library
copies operands into an order of its own and writes results back by the byte, whatever the use.  Among many uses that is lost,
among few it is most of the time:

    seconds(f) = square(f) + Σ over arrays a of max(0, bytes_a − bytes of a square one's) · e_a(u_a)

A square product of f FLOPs has (f/2)^⅔ elements in each array.  e_a, seconds by the byte, is what products that have one large
array, [s, s], of which each element is used u times, took longer than square ones:

    right     [u, s] × [s, s]       left     [s, s] × [s, u]       result     [s, u] × [u, s]

straight lines over log u between the points that were measured, flat beyond them.  Square curve and e are of the order in
which the operands lie: libraries have kernels of their own for each.

Few results keep few of an accelerator's units busy, however much there is to sum up for each.  With r results a product takes

    at least f · w(r)

where w, seconds by the FLOP, is that of deep products, [s, d] × [d, s] with d ≫ s, again straight over log r.

What was measured in fewer orders is priced by the plain one, an array that was not measured by the right one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from autopar.curves import Curve
from autopar.errors import ClusterError


class ProductArray(Enum):
    """One of the three of a product."""

    LEFT = "left"
    RIGHT = "right"
    RESULT = "result"


class ProductOrder(Enum):
    """How the operands lie, as rows of matrices."""

    PLAIN = "plain"
    """[m, k] × [k, n]."""
    RIGHT_TURNED = "right turned"
    """[m, k] × [n, k]."""
    LEFT_TURNED = "left turned"
    """[k, m] × [k, n] or [n, k]: the gradient of a matrix."""


@dataclass(frozen=True)
class Product:
    """One on one device: its FLOPs, the elements of its arrays, and how its operands lie."""

    flops: float
    left: float
    right: float
    result: float
    order: ProductOrder = ProductOrder.PLAIN

    def elements(self, array: ProductArray) -> float:
        """Of one of the three."""
        return {ProductArray.LEFT: self.left, ProductArray.RIGHT: self.right, ProductArray.RESULT: self.result}[array]


def square_product(flops: float) -> Product:
    """The one of so many FLOPs."""
    held = _square_elements(flops)
    return Product(flops, held, held, held)


def order_of(*, left_turned: bool, right_turned: bool) -> ProductOrder:
    """By whether what is summed over lies across in the left operand, and along in the right one."""
    if left_turned:
        return ProductOrder.LEFT_TURNED
    return ProductOrder.RIGHT_TURNED if right_turned else ProductOrder.PLAIN


@dataclass(frozen=True)
class ProductCurve:
    """Square products of one dtype (NumPy's name) and order; amounts are FLOPs."""

    dtype: str
    itemsize_bytes: int
    order: ProductOrder
    curve: Curve


UseSamples = tuple[tuple[float, float, float], ...]
"""(uses, side of the large array, seconds) in ascending uses."""


@dataclass(frozen=True)
class UseCurve:
    """Products of one dtype (NumPy's name) and order with one large array, by how often its elements are used.

    Raises ``ClusterError`` for no samples, numbers that are not finite and above zero, or uses that do not ascend.
    """

    dtype: str
    order: ProductOrder
    array: ProductArray
    samples: UseSamples

    def __post_init__(self) -> None:
        _refuse_unless_ascending(self.samples)


DeepSamples = tuple[tuple[float, float, float], ...]
"""(side of the results, depth, seconds) in ascending sides."""


@dataclass(frozen=True)
class DeepCurve:
    """Deep products of one dtype (NumPy's name) and order, by how many results they have; raises as :class:`UseCurve`."""

    dtype: str
    order: ProductOrder
    samples: DeepSamples

    def __post_init__(self) -> None:
        _refuse_unless_ascending(self.samples)


def _refuse_unless_ascending(samples: Iterable[tuple[float, ...]]) -> None:
    rows = list(samples)
    if not rows:
        raise ClusterError("no samples; measure again with `autopar profile`")
    for number, sample in enumerate(rows):
        if not all(math.isfinite(one) and one > 0 for one in sample):
            raise ClusterError(f"sample {number} is {sample!r}; give finite numbers above zero")
        if number and sample[0] <= rows[number - 1][0]:
            raise ClusterError(f"sample {number} is of {sample[0]!r}, not above that of the one before; sort them")


@dataclass(frozen=True)
class _Rate:
    """Seconds by a unit, straight over the logarithm of an amount between points, flat beyond them."""

    log_amounts: tuple[float, ...]
    seconds_per_unit: tuple[float, ...]

    def at(self, amount: float) -> float:
        return float(np.interp(math.log2(amount), self.log_amounts, self.seconds_per_unit))


@dataclass(frozen=True)
class _Order:
    """What is known of one dtype and order."""

    itemsize_bytes: int
    square: Curve
    extra: dict[ProductArray, _Rate]
    """Seconds by the byte that an array has more than a square product's, by uses."""
    deep: _Rate | None
    """Seconds by the FLOP, by results."""

    def seconds(self, product: Product) -> float:
        """Of one product."""
        if product.flops <= 0:
            return self.square.at(0.0)
        whole = self._of_square_and_bytes(product)
        return whole if self.deep is None else max(whole, product.flops * self.deep.at(product.result))

    def _of_square_and_bytes(self, product: Product) -> float:
        total = self.square.at(product.flops)
        held = _square_elements(product.flops)
        for array in ProductArray:
            extra = self.extra.get(array) or self.extra.get(ProductArray.RIGHT)
            more = product.elements(array) - held
            if extra is not None and more > 0:
                uses = product.flops / 2 / product.elements(array)
                total += more * self.itemsize_bytes * extra.at(uses)
        return total


class ProductPrices:
    """Owns what was measured of products, for asking by product and dtype."""

    def __init__(
        self, squares: Iterable[ProductCurve], uses: Iterable[UseCurve], deep: Iterable[DeepCurve] = ()
    ) -> None:
        of_deep = {(one.dtype, one.order): _deep_rate(one) for one in deep}
        by_array: dict[tuple[str, ProductOrder], dict[ProductArray, UseCurve]] = {}
        for one in uses:
            by_array.setdefault((one.dtype, one.order), {})[one.array] = one
        plain = ProductOrder.PLAIN
        self._known: dict[tuple[str, ProductOrder], _Order] = {}
        for square in squares:
            key, instead = (square.dtype, square.order), (square.dtype, plain)
            curves = by_array.get(key) or by_array.get(instead, {})
            extra = {array: _extra(curve, square) for array, curve in curves.items()}
            self._known[key] = _Order(
                square.itemsize_bytes, square.curve, extra, of_deep.get(key) or of_deep.get(instead)
            )

    def seconds(self, product: Product, dtype: str) -> float | None:
        """Of one product on one device; None for a dtype that was not measured."""
        known = self._known.get((dtype, product.order)) or self._known.get((dtype, ProductOrder.PLAIN))
        return None if known is None else known.seconds(product)


def _deep_rate(curve: DeepCurve) -> _Rate:
    points = [(math.log2(side * side), seconds / (2 * side * side * depth)) for side, depth, seconds in curve.samples]
    log_results, seconds_per_flop = zip(*points, strict=True)
    return _Rate(log_results, seconds_per_flop)


def _extra(curve: UseCurve, square: ProductCurve) -> _Rate:
    """Of points whose array is no larger than a square product's nothing is learnt: they cost what such a one does."""
    points: list[tuple[float, float]] = []
    for uses, side, seconds in curve.samples:
        flops = 2 * side * side * uses
        more_bytes = (side * side - _square_elements(flops)) * square.itemsize_bytes
        beyond = max(seconds - square.curve.at(flops), 0.0)
        points.append((math.log2(uses), beyond / more_bytes if more_bytes > 0 else 0.0))
    log_uses, seconds_per_byte = zip(*points, strict=True)
    return _Rate(log_uses, seconds_per_byte)


def _square_elements(flops: float) -> float:
    """Of each of the three arrays."""
    return float((flops / 2) ** (2 / 3))
