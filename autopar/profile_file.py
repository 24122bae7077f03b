"""A profile as a file, and where it lies.

    load(save(profile)) = profile

JSON, ``{"format": "autopar-profile", "version": 12, "profile": {…}}`` with the fields of ``Profile``; a curve is its list of
``[amount, seconds]``, as measured.  Files of version 1 lack ``streamed``, ``fresh`` and ``operations``,
those of version 2 ``turned_bytes_per_second``, those of version 3 ``convolutions`` and ``waits``, those of version 4
``exchanges``, those of version 5 ``world_collectives``, those of version 6 ``reductions``, those of version 8
``host_copies``, those of version 9 ``cut_bytes_per_second``, those of version 11 ``looped_convolutions``, and are read without.
Files up to version 10 hold products of one order, square ones and ``skinny`` ones, [s/16, s] × [s, s], which are read as what few
uses of the right operand cost.  What files say of ``fresh``, up to version 7, was measured in a process that gave memory back
after every call, as ours do no longer (:mod:`autopar.host_memory`), and is left out.
Unknown fields, wrong types, NaN, negative numbers and cut files are refused with the file, the place in it, and what to do.

The default place is the user's cache directory, one file for each machine, backend, kind and number of devices.  The
environment variable ``AUTOPAR_PROFILE`` names another file, or ``none`` for no profile at all.  Some kinds of devices were
measured once and come with the release (``device_profiles/``), for whoever plans for them without having them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform as host
import re
from collections.abc import Sequence
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from autopar.convolution_shapes import ConvolutionFamily
from autopar.errors import ClusterError
from autopar.looped_convolutions import LoopedConvolutions
from autopar.measured_file import Count, MeasuredFile, Positive, StoredSamples, curve_of, placed
from autopar.products import DeepCurve, ProductArray, ProductCurve, ProductOrder, UseCurve
from autopar.profile import (
    CollectiveCurve,
    ConvolutionCurve,
    Dispatch,
    Fresh,
    OperationRate,
    Profile,
    Reductions,
    WaitCurve,
)

PLACE_VARIABLE = "AUTOPAR_PROFILE"
NO_PROFILE = "none"


class _Collective(Struct, forbid_unknown_fields=True):
    kind: str
    group_size: Annotated[int, Meta(ge=2)]
    samples: StoredSamples


class _Wait(Struct, forbid_unknown_fields=True):
    group_size: Annotated[int, Meta(ge=2)]
    samples: StoredSamples


class _Shape(Enum):
    """Of products in files up to version 10."""

    SQUARE = "square"
    SKINNY = "skinny"


_SKINNINESS = 16


class _Product(Struct, forbid_unknown_fields=True):
    dtype: str
    itemsize_bytes: Count
    samples: StoredSamples
    order: ProductOrder = ProductOrder.PLAIN
    shape: _Shape | UnsetType = UNSET


_Triples = Annotated[tuple[tuple[Positive, Positive, Positive], ...], Meta(min_length=1)]


class _Uses(Struct, forbid_unknown_fields=True):
    dtype: str
    order: ProductOrder
    array: ProductArray
    samples: _Triples


class _Deep(Struct, forbid_unknown_fields=True):
    dtype: str
    order: ProductOrder
    samples: _Triples


class _Convolution(Struct, forbid_unknown_fields=True):
    dtype: str
    family: ConvolutionFamily
    samples: StoredSamples


class _Looped(Struct, forbid_unknown_fields=True):
    dtype: str
    samples: _Triples


class _Dispatch(Struct, forbid_unknown_fields=True):
    call_seconds: Positive
    message_seconds: Positive
    alone_speed: Annotated[float, Meta(ge=1)]


class _Fresh(Struct, forbid_unknown_fields=True):
    outputs: StoredSamples
    scratch: StoredSamples


class _Operation(Struct, forbid_unknown_fields=True):
    primitive: str
    seconds_per_flop: Positive


class _Reductions(Struct, forbid_unknown_fields=True):
    short_row_seconds: Positive
    column_seconds_per_flop: Positive


class _Profile(Struct, forbid_unknown_fields=True, kw_only=True):
    jax_version: str
    platform: str
    device_kind: str
    num_devices: Count
    machine: str
    measured_at: str
    collectives: tuple[_Collective, ...]
    products: tuple[_Product, ...]
    elementwise: StoredSamples
    dispatch: _Dispatch | None = None
    streamed: StoredSamples | None = None
    fresh: _Fresh | None = None
    operations: tuple[_Operation, ...] = ()
    convolutions: tuple[_Convolution, ...] = ()
    waits: tuple[_Wait, ...] = ()
    turned_bytes_per_second: Positive | None = None
    exchanges: StoredSamples | None = None
    world_collectives: tuple[_Collective, ...] = ()
    reductions: _Reductions | None = None
    host_copies: StoredSamples | None = None
    cut_bytes_per_second: Positive | None = None
    uses: tuple[_Uses, ...] = ()
    deep_products: tuple[_Deep, ...] = ()
    looped_convolutions: tuple[_Looped, ...] = ()


_KEEPING_VERSION = 8
"""Of files since processes keep the memory they free."""

FILE = MeasuredFile("profile", "autopar profile", _Profile, versions=(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12))


# ------------------------------------------------------------------------------------------------------ where it lies


def machine_cores() -> int:
    """The cores that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_name() -> str:
    """This machine and the cores that the process may use, which decide what is measured."""
    return f"{host.node() or 'unknown'} {host.machine()} {machine_cores()} cores"


def default_path(platform: str, device_kind: str, num_devices: int) -> Path:
    """Where the profile of these devices of this machine lies unless another place is named."""
    import platformdirs

    name = " ".join(("profile", machine_name(), platform, device_kind, str(num_devices)))
    return platformdirs.user_cache_path("autopar") / (re.sub(r"[^a-z0-9.]+", "-", name.lower()) + ".json")


def find_profile(platform: str, device_kind: str, num_devices: int) -> Profile | None:
    """The profile of these devices, if one was measured; raises ``ClusterError`` for a file that cannot be used."""
    named = os.environ.get(PLACE_VARIABLE, "")
    if named == NO_PROFILE:
        return None
    if named:
        found = load_profile(named)
        fits = (found.platform, found.device_kind, found.num_devices) == (platform, device_kind, num_devices)
        return found if fits else None
    path = default_path(platform, device_kind, num_devices)
    return load_profile(path) if path.exists() else None


def profile_of_device(name: str) -> Profile:
    """What was measured of one device of a kind and comes with this release; date, JAX and machine stand in it.

    ``name`` is that of a :class:`~autopar.cluster.DeviceKind`.  Raises ``ClusterError`` for a kind that was not at hand.
    """
    folder = files("autopar").joinpath("device_profiles")
    known = sorted(one.name.removesuffix(".json") for one in folder.iterdir() if one.name.endswith(".json"))
    if name.lower() not in known:
        raise ClusterError(
            f"nothing was measured of {name}, only of {', '.join(known)}; measure on such a device with `{FILE.command}`"
        )
    file = folder.joinpath(f"{name.lower()}.json")
    return _decode(str(file), file.read_bytes())


# ------------------------------------------------------------------------------------------------- writing and reading


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write the profile, at once or not at all; makes the directory.  Raises ``ClusterError`` if that fails."""
    stored = _Profile(
        jax_version=profile.jax_version,
        platform=profile.platform,
        device_kind=profile.device_kind,
        num_devices=profile.num_devices,
        machine=profile.machine,
        measured_at=profile.measured_at,
        collectives=_stored(profile.collectives),
        products=tuple(
            _Product(one.dtype, one.itemsize_bytes, one.curve.samples, one.order) for one in profile.products
        ),
        uses=tuple(_Uses(one.dtype, one.order, one.array, one.samples) for one in profile.uses),
        deep_products=tuple(_Deep(one.dtype, one.order, one.samples) for one in profile.deep_products),
        elementwise=profile.elementwise.samples,
        dispatch=None if profile.dispatch is None else _Dispatch(**dataclasses.asdict(profile.dispatch)),
        streamed=None if profile.streamed is None else profile.streamed.samples,
        fresh=None if (fresh := profile.fresh) is None else _Fresh(fresh.outputs.samples, fresh.scratch.samples),
        operations=tuple(_Operation(one.primitive, one.seconds_per_flop) for one in profile.operations),
        convolutions=tuple(_Convolution(one.dtype, one.family, one.curve.samples) for one in profile.convolutions),
        looped_convolutions=tuple(_Looped(one.dtype, one.samples) for one in profile.looped_convolutions),
        waits=tuple(_Wait(one.group_size, one.curve.samples) for one in profile.waits),
        turned_bytes_per_second=profile.turned_bytes_per_second,
        cut_bytes_per_second=profile.cut_bytes_per_second,
        exchanges=None if profile.exchanges is None else profile.exchanges.samples,
        world_collectives=_stored(profile.world_collectives),
        reductions=None if profile.reductions is None else _Reductions(**dataclasses.asdict(profile.reductions)),
        host_copies=None if profile.host_copies is None else profile.host_copies.samples,
    )
    FILE.write(stored, path)


def _stored(curves: Sequence[CollectiveCurve]) -> tuple[_Collective, ...]:
    return tuple(_Collective(one.kind, one.group_size, one.curve.samples) for one in curves)


def load_profile(path: str | Path) -> Profile:
    """The profile in a file; raises ``ClusterError`` naming the file, the place in it and what to do."""
    return _decode(str(path), FILE.read(path))


# Clusters key the caches of the cost model, where one profile is told apart from another at once only if it is itself.
@functools.lru_cache(maxsize=8)
def _decode(path: str, data: bytes) -> Profile:
    stored = FILE.decoded(path, data)
    FILE.check_kinds(
        path,
        {
            "collectives": tuple(one.kind for one in stored.collectives),
            "world_collectives": tuple(one.kind for one in stored.world_collectives),
        },
    )
    try:
        profile = _profile(stored)
    except ClusterError as error:
        raise ClusterError(f"{path}: $.profile.{error}") from error
    return profile if FILE.version(data) >= _KEEPING_VERSION else dataclasses.replace(profile, fresh=None)


def _profile(stored: _Profile) -> Profile:
    return Profile(
        jax_version=stored.jax_version,
        platform=stored.platform,
        device_kind=stored.device_kind,
        num_devices=stored.num_devices,
        machine=stored.machine,
        measured_at=stored.measured_at,
        collectives=_collectives("collectives", stored.collectives),
        products=tuple(
            ProductCurve(one.dtype, one.itemsize_bytes, one.order, curve_of(f"products[{number}].samples", one.samples))
            for number, one in enumerate(stored.products)
            if one.shape is not _Shape.SKINNY
        ),
        uses=tuple(_uses(number, one) for number, one in enumerate(stored.uses))
        + tuple(_uses_of_skinny(one) for one in stored.products if one.shape is _Shape.SKINNY),
        deep_products=tuple(_deep(number, one) for number, one in enumerate(stored.deep_products)),
        elementwise=curve_of("elementwise", stored.elementwise),
        dispatch=None if stored.dispatch is None else Dispatch(**msgspec.structs.asdict(stored.dispatch)),
        streamed=None if stored.streamed is None else curve_of("streamed", stored.streamed),
        fresh=None if stored.fresh is None else _fresh(stored.fresh),
        operations=tuple(OperationRate(one.primitive, one.seconds_per_flop) for one in stored.operations),
        convolutions=tuple(
            ConvolutionCurve(one.dtype, one.family, curve_of(f"convolutions[{number}].samples", one.samples))
            for number, one in enumerate(stored.convolutions)
        ),
        looped_convolutions=tuple(_looped(number, one) for number, one in enumerate(stored.looped_convolutions)),
        waits=tuple(
            WaitCurve(one.group_size, curve_of(f"waits[{number}].samples", one.samples))
            for number, one in enumerate(stored.waits)
        ),
        turned_bytes_per_second=stored.turned_bytes_per_second,
        cut_bytes_per_second=stored.cut_bytes_per_second,
        exchanges=None if stored.exchanges is None else curve_of("exchanges", stored.exchanges),
        world_collectives=_collectives("world_collectives", stored.world_collectives),
        reductions=None if stored.reductions is None else Reductions(**msgspec.structs.asdict(stored.reductions)),
        host_copies=None if stored.host_copies is None else curve_of("host_copies", stored.host_copies),
    )


def _collectives(place: str, stored: Sequence[_Collective]) -> tuple[CollectiveCurve, ...]:
    return tuple(
        CollectiveCurve(one.kind, one.group_size, curve_of(f"{place}[{number}].samples", one.samples))
        for number, one in enumerate(stored)
    )


def _uses(number: int, stored: _Uses) -> UseCurve:
    with placed(f"uses[{number}].samples"):
        return UseCurve(stored.dtype, stored.order, stored.array, stored.samples)


def _deep(number: int, stored: _Deep) -> DeepCurve:
    with placed(f"deep_products[{number}].samples"):
        return DeepCurve(stored.dtype, stored.order, stored.samples)


def _looped(number: int, stored: _Looped) -> LoopedConvolutions:
    with placed(f"looped_convolutions[{number}].samples"):
        return LoopedConvolutions(stored.dtype, stored.samples)


def _uses_of_skinny(stored: _Product) -> UseCurve:
    """[s/16, s] × [s, s], whose FLOPs say what s was."""
    sides = [(_SKINNINESS * flops / 2) ** (1 / 3) for flops, _ in stored.samples]
    samples = tuple(
        (side / _SKINNINESS, side, seconds) for side, (_, seconds) in zip(sides, stored.samples, strict=True)
    )
    return UseCurve(stored.dtype, ProductOrder.PLAIN, ProductArray.RIGHT, samples)


def _fresh(stored: _Fresh) -> Fresh:
    return Fresh(curve_of("fresh.outputs", stored.outputs), curve_of("fresh.scratch", stored.scratch))
