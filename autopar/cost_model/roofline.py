"""How long does an operator take on one device?

The roofline (Williams, Waterman and Patterson, 2009): it computes and moves bytes at the same time, so

    seconds = max(FLOPs / F, bytes / M)

with ``F`` the matrix-product throughput for the dtype and ``M`` the memory bandwidth of *one* device of the cluster,
both as they are when all devices work at once.  Where the cluster carries a profile, ``FLOPs / F`` of a matrix product
and ``bytes / M`` of any kernel that touches memory are measured seconds instead, the cost of starting a kernel included.
"""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.errors import ClusterError


def operator_seconds(flops: float, bytes_moved: float, dtype: str, cluster: Cluster, *, product: bool = False) -> float:
    """Seconds of ``flops`` floating-point operations on ``dtype`` and ``bytes_moved`` to and from memory, per device.

    Both are what one device has to do (the operator's share, not the whole); ``product`` says that they are those of a
    matrix product or convolution.  Raises ``ClusterError`` for negative or
    undefined amounts.
    """
    if not (flops >= 0 and bytes_moved >= 0):
        raise ClusterError(f"an operator of {flops} FLOPs and {bytes_moved} bytes; give amounts of 0 or more")
    compute_seconds = flops / cluster.per_device_flops_per_second(dtype)
    if (profile := cluster.profile) is None:
        return max(compute_seconds, bytes_moved / cluster.per_device_memory_bytes_per_second)
    if product and (measured := profile.product_seconds(flops, bytes_moved, dtype)) is not None:
        compute_seconds = measured
    return max(compute_seconds, profile.elementwise.at(bytes_moved) if bytes_moved else 0.0)
