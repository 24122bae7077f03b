"""A measured network as a file.

    load(save(network)) = network

JSON, ``{"format": "autopar-network", "version": 1, "network": {…}}`` with the fields of ``Network``; a curve is its list of
``[wire bytes, seconds]``, as measured.  Unknown fields, wrong types, NaN, negative numbers and cut files are refused with the
file, the place in it, and what to do.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from autopar.errors import ClusterError
from autopar.measured_file import Count, MeasuredFile, Positive, StoredSamples, curve_of
from autopar.network import Network, Span, SpanCurve, SpanWait


class _Collective(Struct, forbid_unknown_fields=True):
    kind: str
    hosts: Annotated[int, Meta(ge=2)]
    per_host: Count
    samples: StoredSamples


class _Wait(Struct, forbid_unknown_fields=True):
    hosts: Annotated[int, Meta(ge=2)]
    per_host: Count
    samples: StoredSamples


class _Network(Struct, forbid_unknown_fields=True, kw_only=True):
    jax_version: str
    platform: str
    devices_per_host: Count
    measured_at: str
    latency_seconds: Annotated[float, Meta(ge=0)]
    bytes_per_second: Positive
    collectives: tuple[_Collective, ...]
    waits: tuple[_Wait, ...] = ()


FILE = MeasuredFile("network", "autopar network", _Network, versions=(1,))


def save_network(network: Network, path: str | Path) -> None:
    """Write it, at once or not at all; makes the directory.  Raises ``ClusterError`` if that fails."""
    stored = _Network(
        jax_version=network.jax_version,
        platform=network.platform,
        devices_per_host=network.devices_per_host,
        measured_at=network.measured_at,
        latency_seconds=network.latency_seconds,
        bytes_per_second=network.bytes_per_second,
        collectives=tuple(
            _Collective(one.kind, one.span.hosts, one.span.per_host, one.curve.samples) for one in network.collectives
        ),
        waits=tuple(_Wait(one.span.hosts, one.span.per_host, one.curve.samples) for one in network.waits),
    )
    FILE.write(stored, path)


def load_network(path: str | Path) -> Network:
    """The network in a file; raises ``ClusterError`` naming the file, the place in it and what to do."""
    return _decode(str(path), FILE.read(path))


# As with profiles: clusters key the caches of the cost model.
@functools.lru_cache(maxsize=8)
def _decode(path: str, data: bytes) -> Network:
    stored = FILE.decoded(path, data)
    FILE.check_kinds(path, {"collectives": tuple(one.kind for one in stored.collectives)})
    try:
        return _network(stored)
    except ClusterError as error:
        raise ClusterError(f"{path}: $.network.{error}; {FILE.advice}") from error


def _network(stored: _Network) -> Network:
    return Network(
        jax_version=stored.jax_version,
        platform=stored.platform,
        devices_per_host=stored.devices_per_host,
        measured_at=stored.measured_at,
        latency_seconds=stored.latency_seconds,
        bytes_per_second=stored.bytes_per_second,
        collectives=tuple(
            SpanCurve(one.kind, Span(one.hosts, one.per_host), curve_of(f"collectives[{number}].samples", one.samples))
            for number, one in enumerate(stored.collectives)
        ),
        waits=tuple(
            SpanWait(Span(one.hosts, one.per_host), curve_of(f"waits[{number}].samples", one.samples))
            for number, one in enumerate(stored.waits)
        ),
    )
