"""Does XLA:GPU read an elementwise array again, or make it again?

Its fusion weighs the two.  To keep b bytes of an element they are written once, at the memory's B bytes per second; to do without
the array takes the f operations of making an element once more, at V operations per second beside the matrix units:

    made again  ⇔  b / B  >  f / V

Only what is made of one array that is there anyway is made again.  B and V are the device's; f are figures of XLA's own, what it
counts for the instructions that a primitive becomes.  They were read off its compilers for V100s, A100s and H100s by
``benchmarks/made_again.py``: of a layer x·W + b, its activation and their gradients, the least bandwidth at which another array
is kept.  A GELU by ``tanh`` is kept at f = 55 to 79, by ``erfc`` at 50 to 114; a SiLU at 4 to 24.  The figures below lie where
these and H200s come out right with the B of their presets, nine tenths of the data sheets': in float32 a GELU is made again on
V100s and H100s and kept on A100s and H200s, in bfloat16 it is kept on all of them.

Shortcomings: XLA counts all of a chain that it would repeat, and each reader; here one figure stands for that.  For H100s its
compiler chooses as it does by three in a hundred of bandwidth.  Those for V100s and A100s compute bfloat16 in float32, and keep
that.  What a product reads is in memory anyway and need not be made again, which is not seen: of layers ``tanh(x @ w)`` memory is
foretold 27 % too high on H100s.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.devices import DeviceKind

OPERATIONS: Mapping[str, float] = MappingProxyType({"tanh": 70.0, "erf": 100.0, "erfc": 100.0})
"""Per element, by primitive."""

OTHER_OPERATIONS = 15.0

H100_OPERATIONS_PER_SECOND = 67e12
"""NVIDIA H100 data sheet, Technical Specifications, FP32, SXM; taken where a device does not say its own."""


def is_made_again(primitive: str, itemsize_bytes: int, device: DeviceKind) -> bool:
    """Whether an array of elements of ``itemsize_bytes`` that ``primitive`` makes is made again by those who read it."""
    operations_per_second = device.vector_flops_per_second or H100_OPERATIONS_PER_SECOND
    making_seconds = OPERATIONS.get(primitive, OTHER_OPERATIONS) / operations_per_second
    return itemsize_bytes / device.memory_bytes_per_second > making_seconds
