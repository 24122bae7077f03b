"""What was measured between the hosts of a cluster, as data that the cost model reads between the measured points.

A network holds the α and β of a link between two hosts (:mod:`autopar.cluster`), and for collectives that span hosts curves

    seconds   by kind, hosts of a group, and its members on each of them   of the bytes that one device sends (wire bytes)
    waits     by the same of a group                                       of the seconds of work since the collective before

(what a collective takes longer after more work: hosts do not end it together, least of all those with a ration of processor time,
which are stopped now and then, each at another moment).

Each was measured in a world of processes, one on each host, while all devices of the hosts were at it: a group with one member on
a host shares the host's card with those of the host's other devices.  So a curve holds everything that α and β do not
know: how a library goes about it, what processors take to copy and to add up, and that they do so while no byte is under way.
(Sums of the gradients of a model of 14 million parameters among eight devices on four hosts took 1.45 s; at the rate of the
links their bytes take 0.82 s.)

Groups of other shapes than those that were measured are priced by α and β.  The file format is in
:mod:`autopar.network_file`, the measuring in :mod:`autopar.measured_network`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from autopar.curves import Curve
from autopar.errors import ClusterError
from autopar.profile import refuse_twice


@dataclass(frozen=True)
class Span:
    """The shape of a group of devices: so many hosts, and so many members on each.

    Raises ``ClusterError`` for less than two hosts, or no members.
    """

    hosts: int
    per_host: int

    def __post_init__(self) -> None:
        if self.hosts < 2 or self.per_host < 1:
            raise ClusterError(
                f"a group of {self.per_host} devices on each of {self.hosts} hosts; give 1 or more, and 2 hosts or more"
            )

    @property
    def group_size(self) -> int:
        """All members."""
        return self.hosts * self.per_host


@dataclass(frozen=True)
class SpanCurve:
    """One kind of collective (a value of :class:`autopar.cost_model.collectives.Collective`) in groups of one shape."""

    kind: str
    span: Span
    curve: Curve


@dataclass(frozen=True)
class SpanWait:
    """What collectives in groups of one shape take longer after so many seconds of work (amounts) than after little of it."""

    span: Span
    curve: Curve


@dataclass(frozen=True)
class Network:
    """Everything measured between hosts with ``devices_per_host`` devices each; ``measured_at`` is ISO 8601.

    Raises ``ClusterError`` for an α below zero, a β that is not above it, or a curve that is given twice.
    """

    jax_version: str
    platform: str
    devices_per_host: int
    measured_at: str
    latency_seconds: float
    bytes_per_second: float
    collectives: tuple[SpanCurve, ...]
    waits: tuple[SpanWait, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ClusterError(f"latency_seconds is {self.latency_seconds!r}; give a finite number of zero or more")
        if not (math.isfinite(self.bytes_per_second) and self.bytes_per_second > 0):
            raise ClusterError(f"bytes_per_second is {self.bytes_per_second!r}; give a finite number above zero")
        refuse_twice("collectives", ((one.kind, one.span) for one in self.collectives))
        refuse_twice("waits", (one.span for one in self.waits))

    def __hash__(self) -> int:
        return hash((self.measured_at, self.platform, self.devices_per_host, self.bytes_per_second))

    def collective(self, kind: str, span: Span) -> Curve | None:
        """The curve over wire bytes of groups of that shape; None if these were not measured."""
        return self._curves.get((kind, span))

    def waiting(self, span: Span) -> Callable[[float], float] | None:
        """Seconds of work → seconds that a collective after it takes longer; None if that was not measured of such groups.

        After more work than was measured it is as after the most.
        """
        return None if (curve := self._waits.get(span)) is None else curve.up_to_last

    @cached_property
    def exchange_ratio(self) -> float:
        """Seconds of all-to-alls over those of as large reduce-scatters, in the geometric mean; 1 where either is missing."""
        both = [(self.collective("all-to-all", span), self.collective("reduce-scatter", span)) for span in self.spans]
        logarithms = [
            math.log(exchange.at(sent) / scatter.at(sent))
            for exchange, scatter in both
            if exchange is not None and scatter is not None
            for sent, _ in scatter.samples
        ]
        return math.exp(statistics.fmean(logarithms)) if logarithms else 1.0

    @property
    def spans(self) -> list[Span]:
        """The shapes of groups that were measured."""
        return list(dict.fromkeys(one.span for one in self.collectives))

    @cached_property
    def _curves(self) -> dict[tuple[str, Span], Curve]:
        return {(one.kind, one.span): one.curve for one in self.collectives}

    @cached_property
    def _waits(self) -> dict[Span, Curve]:
        return {one.span: one.curve for one in self.waits}


def spans_of(hosts: int, devices_per_host: int) -> list[Span]:
    """The shapes of equal groups that a cluster's devices can be cut into, each on two hosts or more."""
    return [Span(count, members) for count in _divisors(hosts) if count > 1 for members in _divisors(devices_per_host)]


def _divisors(number: int) -> Iterable[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
