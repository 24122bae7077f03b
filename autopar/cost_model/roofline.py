"""How long does an operator take on one device?

The roofline (Williams, Waterman and Patterson, 2009): it computes and moves bytes at the same time, so

    seconds = max(FLOPs / F, bytes / M)

with ``F`` the matrix-product throughput for the dtype and ``M`` the memory bandwidth of *one* device of the cluster,
both as they are when all devices work at once.  Where the cluster carries a profile, measured seconds stand instead:

    FLOPs / F     of a matrix product: as of a square one, and more by the bytes that are used few times; of a convolution:
                  as of its family; of a reduction: as its elements lie; of
                  another primitive: its own rate, if it was measured
    bytes / M     as of a kernel that reads what others have just left, or, ``streamed``, what left the caches long ago;
                  the cost of starting a kernel included

What an operator reads is streamed in the update: parameters, optimizer state and gradients were last touched a pass ago.
The passes themselves read what the kernel before has written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.convolution_shapes import ConvolutionShape
from autopar.errors import ClusterError
from autopar.products import Product, square_product


@dataclass(frozen=True)
class Reduction:
    """A primitive that makes one of many elements, and how many of one result lie one after the other on a device.

    ``row`` is None where neighbours belong to other results.
    """

    primitive: str
    row: int | None


def row_of(shape: Sequence[int], lying: Iterable[int], reduced: Container[int]) -> int | None:
    """How many elements of one result of a reduction lie one after the other; None where neighbours belong to others.

    ``lying`` are the dimensions in the order in which they lie in memory, the slowest first.
    """
    inner_first = [dim for dim in lying if shape[dim] > 1][::-1]
    if inner_first and inner_first[0] not in reduced:
        return None
    return math.prod(shape[dim] for dim in itertools.takewhile(reduced.__contains__, inner_first))


def operator_seconds(
    flops: float, bytes_moved: float, dtype: str, cluster: Cluster, primitive: str = "", *, streamed: bool = False
) -> float:
    """Seconds of ``flops`` floating-point operations on ``dtype`` and ``bytes_moved`` to and from memory, per device.

    Both are what one device has to do (the operator's share, not the whole); ``primitive`` says which operations they are.
    Raises ``ClusterError`` for negative or undefined amounts.
    """
    if not (flops >= 0 and bytes_moved >= 0):
        raise ClusterError(f"an operator of {flops} FLOPs and {bytes_moved} bytes; give amounts of 0 or more")
    compute_seconds = flops / cluster.per_device_flops_per_second(dtype)
    if (profile := cluster.profile) is None:
        return max(compute_seconds, bytes_moved / cluster.per_device_memory_bytes_per_second)
    measured = profile.operation_seconds(flops, primitive)
    return max(
        compute_seconds if measured is None else measured, profile.memory_seconds(bytes_moved, streamed=streamed)
    )


def product_seconds(
    product: Product, bytes_moved: float, dtype: str, cluster: Cluster, *, streamed: bool = False
) -> float:
    """Seconds of a matrix product per device, as :func:`operator_seconds`; by what was measured of its dtype, if it was."""
    profile = cluster.profile
    measured = None if profile is None else profile.product_seconds(product, dtype)
    if profile is None or measured is None:
        return operator_seconds(product.flops, bytes_moved, dtype, cluster, streamed=streamed)
    return max(measured, profile.memory_seconds(bytes_moved, streamed=streamed))


def convolution_seconds(
    flops: float, bytes_moved: float, dtype: str, shape: ConvolutionShape, cluster: Cluster
) -> float:
    """Seconds of a convolution per device, as :func:`operator_seconds`; by the curve of its
    family, or as a square product.
    """
    profile = cluster.profile
    measured = None if profile is None else profile.convolution_seconds(flops, shape, dtype)
    if profile is None or measured is None:
        return product_seconds(square_product(flops), bytes_moved, dtype, cluster)
    return max(measured, profile.memory_seconds(bytes_moved, streamed=False))


def reduction_seconds(
    flops: float, bytes_moved: float, dtype: str, reduction: Reduction, cluster: Cluster, *, streamed: bool = False
) -> float:
    """Seconds of a sum, maximum or minimum per device, as :func:`operator_seconds`; by how its elements lie, if measured."""
    plain = operator_seconds(flops, bytes_moved, dtype, cluster, reduction.primitive, streamed=streamed)
    if cluster.profile is None:
        return plain
    measured = cluster.profile.reduction_seconds(flops, reduction.primitive, reduction.row)
    return plain if measured is None else max(plain, measured)
