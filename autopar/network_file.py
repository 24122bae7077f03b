"""A measured network as a file.

    load(save(network)) = network

JSON, ``{"format": "autopar-network", "version": 1, "network": {…}}`` with the fields of ``Network``; a curve is its list of
``[wire bytes, seconds]``, as measured.  Unknown fields, wrong types, NaN, negative numbers and cut files are refused with the
file, the place in it, and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from autopar.errors import ClusterError
from autopar.files import Header, write_atomically
from autopar.network import Network, Span, SpanCurve, SpanWait
from autopar.profile import Curve, Samples
from autopar.profile_file import KINDS

FILE_FORMAT = "autopar-network"
FILE_VERSION = 1
_ADVICE = "correct it, or measure again with `autopar network`"

_Positive = Annotated[float, Meta(gt=0)]
_Samples = Annotated[tuple[tuple[_Positive, _Positive], ...], Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=1)]


class _Collective(Struct, forbid_unknown_fields=True):
    kind: str
    hosts: Annotated[int, Meta(ge=2)]
    per_host: _Count
    samples: _Samples


class _Wait(Struct, forbid_unknown_fields=True):
    hosts: Annotated[int, Meta(ge=2)]
    per_host: _Count
    samples: _Samples


class _Network(Struct, forbid_unknown_fields=True, kw_only=True):
    jax_version: str
    platform: str
    devices_per_host: _Count
    measured_at: str
    latency_seconds: Annotated[float, Meta(ge=0)]
    bytes_per_second: _Positive
    collectives: tuple[_Collective, ...]
    waits: tuple[_Wait, ...] = ()


class _File(Struct, forbid_unknown_fields=True):
    format: str
    version: int
    network: _Network


def save_network(network: Network, path: str | Path) -> None:
    """Write it, at once or not at all.  Raises ``ClusterError`` if that fails."""
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
    data = msgspec.json.encode(_File(FILE_FORMAT, FILE_VERSION, stored))
    try:
        write_atomically(path, msgspec.json.format(data, indent=1) + b"\n")
    except OSError as error:
        raise ClusterError(f"cannot write network {path}: {error.strerror or error}; check the path") from error


def load_network(path: str | Path) -> Network:
    """The network in a file; raises ``ClusterError`` naming the file, the place in it and what to do."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ClusterError(
            f"cannot read network {path}: {error.strerror or error}; check the path, or measure with `autopar network`"
        ) from error
    try:
        header = msgspec.json.decode(data, type=Header)
        if header.format != FILE_FORMAT:
            raise ClusterError(
                f"{path}: $.format is {header.format!r}, not {FILE_FORMAT!r}; this is no measured network"
            )
        if header.version != FILE_VERSION:
            raise ClusterError(
                f"{path}: $.version is {header.version}, this release reads {FILE_VERSION}; "
                "measure again with `autopar network`"
            )
        stored = msgspec.json.decode(data, type=_File).network
    except msgspec.ValidationError as error:
        raise ClusterError(f"{path}: {error}; {_ADVICE}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClusterError(
            f"{path} is not complete JSON ({error}); it holds no NaN or infinity, and may have been cut short: measure again "
            "with `autopar network`"
        ) from error
    return _network(path, stored)


def _network(path: str | Path, stored: _Network) -> Network:
    try:
        return Network(
            jax_version=stored.jax_version,
            platform=stored.platform,
            devices_per_host=stored.devices_per_host,
            measured_at=stored.measured_at,
            latency_seconds=stored.latency_seconds,
            bytes_per_second=stored.bytes_per_second,
            collectives=tuple(_span_curve(number, one) for number, one in enumerate(stored.collectives)),
            waits=tuple(
                SpanWait(Span(one.hosts, one.per_host), _curve(f"waits[{number}]", one.samples))
                for number, one in enumerate(stored.waits)
            ),
        )
    except ClusterError as error:
        raise ClusterError(f"{path}: $.network.{error}; {_ADVICE}") from error


def _span_curve(number: int, stored: _Collective) -> SpanCurve:
    if stored.kind not in KINDS:
        raise ClusterError(f"collectives[{number}].kind is {stored.kind!r}, not one of {', '.join(KINDS)}")
    place = f"collectives[{number}]"
    return SpanCurve(stored.kind, Span(stored.hosts, stored.per_host), _curve(place, stored.samples))


def _curve(place: str, samples: Samples) -> Curve:
    try:
        return Curve(samples)
    except ClusterError as error:
        raise ClusterError(f"{place}.samples: {error}") from error
