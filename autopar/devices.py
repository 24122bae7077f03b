"""What is a kind of device, and what is a link?

A link is described by the α-β model (Hockney, 1994): a message of ``n`` bytes takes

    α + n / β        α = ``latency_seconds``, β = ``bytes_per_second`` (one direction; both run at once)

and ``shared_by`` says how many devices of one host compete for that β when all of them send at once (a network
card shared by the eight devices of a host has ``shared_by=8``; NVLink ports of one's own have 1).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from autopar.errors import ClusterError


class Platform(Enum):
    """The XLA backend that will run the program; factors and prices depend on it."""

    CPU = "cpu"
    CUDA = "cuda"
    TPU = "tpu"


_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Frozen(Mapping[_Key, _Value]):
    """A read-only, hashable mapping (clusters are keys of caches); equal to a ``dict`` of the same items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[_Key, _Value]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: _Key) -> _Value:
        return self._items[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def _check_number(where: str, value: object, *, zero_allowed: bool = False) -> None:
    """Refuse all but finite numbers above zero (or from zero on)."""
    wanted = "a finite number, zero or more" if zero_allowed else "a finite number above zero"
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero_allowed):  # type: ignore[operator]
        raise ClusterError(f"{where} is {value!r}; give {wanted}")


def check_count(where: str, value: object) -> None:
    """Refuse all but integers of one or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ClusterError(f"{where} is {value!r}; give an integer of 1 or more")


@dataclass(frozen=True)
class DeviceKind:
    """One kind of accelerator.

    ``flops_per_second`` maps a dtype name (``"float32"``, ``"bfloat16"``, …) to dense matrix-product throughput
    that is really reached; ``memory_bytes`` is what a program may use; ``memory_bytes_per_second`` the bandwidth of it.
    ``source`` says where the figures come from.  Any mapping is accepted; it is kept as a read-only, hashable one.
    ``hides_collectives`` says that XLA runs kernels beside collectives on such devices (:mod:`autopar.cost_model.overlap`); where
    that was not seen it is False.  ``vector_flops_per_second`` is what it computes in float32 beside its matrix units, by its
    data sheet: compilers weigh it against the bandwidth of memory (:mod:`autopar.cost_model.made_again`).  None: not known.

    Raises ``ClusterError`` for figures that are not finite and positive.
    """

    name: str
    platform: Platform
    flops_per_second: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_second: float
    source: str = ""
    hides_collectives: bool = False
    vector_flops_per_second: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.platform, Platform):
            known = ", ".join(str(platform) for platform in Platform)
            raise ClusterError(f"platform of device {self.name!r} is {self.platform!r}; give one of {known}")
        if not self.flops_per_second:
            raise ClusterError(f"flops_per_second of device {self.name!r} is empty; give at least one dtype")
        for dtype, rate in self.flops_per_second.items():
            _check_number(f"flops_per_second[{dtype!r}] of device {self.name!r}", rate)
        check_count(f"memory_bytes of device {self.name!r}", self.memory_bytes)
        _check_number(f"memory_bytes_per_second of device {self.name!r}", self.memory_bytes_per_second)
        if self.vector_flops_per_second is not None:
            _check_number(f"vector_flops_per_second of device {self.name!r}", self.vector_flops_per_second)
        if not isinstance(self.flops_per_second, Frozen):
            object.__setattr__(self, "flops_per_second", Frozen(self.flops_per_second))

    def dense_flops_per_second(self, dtype: str) -> float:
        """Throughput for ``dtype``; a dtype not listed runs at the slowest listed speed."""
        rate = self.flops_per_second.get(dtype)
        return min(self.flops_per_second.values()) if rate is None else rate


@dataclass(frozen=True)
class Link:
    """One level of the interconnect (see the module docstring for α, β and ``shared_by``).

    Raises ``ClusterError`` for a negative α, a β that is not positive and finite, or ``shared_by`` below 1.
    """

    latency_seconds: float
    bytes_per_second: float
    shared_by: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        _check_number("latency_seconds of a link", self.latency_seconds, zero_allowed=True)
        _check_number("bytes_per_second of a link", self.bytes_per_second)
        check_count("shared_by of a link", self.shared_by)
