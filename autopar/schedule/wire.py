"""In which type does an array travel, and so how many bytes is an element on the wire?

In its own, but for two cases:

* A maximum or minimum of floats or Booleans is taken of integers of at least 32 bits that have the same order, on every
  backend: an all-reduce of floats may drop a NaN (XLA:CPU does), and not every backend reduces narrow integers.
* XLA:CPU widens narrow floats in every collective (:data:`WIDENED`; read off compiled HLO, the same on both ends of
  the supported JAX versions).  Other backends send them as they are.

The runtime reduces extremes in :func:`ordered_dtype`, and the cost model prices :func:`wire_itemsize_bytes`, so the
bytes of a prediction are those that are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from jax import numpy as jnp

from autopar.cluster import Platform

WIDENED: Mapping[Platform, Mapping[str, str]] = {
    Platform.CPU: {
        "bfloat16": "float32",
        "float8_e8m0fnu": "float32",
        **dict.fromkeys(("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"), "float16"),
        **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), "float16"),
    },
    Platform.CUDA: {},
    Platform.TPU: {},
}
"""Dtypes that a backend's collectives send as another one."""


class Typed(Protocol):
    """What says of which type its elements are, as :class:`~autopar.graph.ir.Value` does."""

    @property
    def dtype(self) -> str:
        """Name of the NumPy dtype, or of the type of keys."""

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element in memory."""


def ordered_dtype(dtype: str) -> str:
    """The type in which a maximum or minimum of values of ``dtype`` (a NumPy name) is all-reduced: of integers its own."""
    if dtype == "bool":
        return "int32"
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return dtype
    return f"int{max(32, 8 * jnp.dtype(dtype).itemsize)}"


def wire_itemsize_bytes(array: Typed, platform: Platform, *, extreme: bool = False) -> int:
    """Bytes of one element in a collective, an all-reduce by maximum or minimum if ``extreme``; keys go as words."""
    if extreme:
        return jnp.dtype(ordered_dtype(array.dtype)).itemsize
    sent_as = WIDENED[platform].get(array.dtype)
    return array.itemsize_bytes if sent_as is None else jnp.dtype(sent_as).itemsize
