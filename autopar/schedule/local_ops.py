"""How one operator runs on one device's pieces so that what it leaves are pieces of the true results.

Let y = g(x) and let the strategy cut x into pieces x_d.  This file computes y_d = g_d(x_d) with

    y = concatenation of the y_d   over PARALLEL and SCATTER factors,
    y = Σ_d y_d                    over SUM and LOOKUP factors (left to the caller),
    y = max_d y_d or min_d y_d     over MAX and MIN factors (reduced here, at once).

Mostly g_d is g with local shapes in its parameters.  The exceptions have a function of their own: what counts positions
(iota, random bits) starts at the piece's position, what takes positions (gather, scatter) has them shifted; sums of few rows take
two steps on GPUs (:mod:`autopar.schedule.column_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.random import threefry2x32_p
from jax.sharding import NamedSharding, PartitionSpec

from autopar.cluster import Mesh
from autopar.graph.ir import FactorKind, Operator
from autopar.plan import Axes
from autopar.schedule.column_sums import parts_of, sum_in_two_steps
from autopar.schedule.host_calls import HOST_CALLS, call_once
from autopar.schedule.local_params import (
    SCATTERS,
    Index,
    LocalError,
    Piece,
    Site,
    local_params,
    scatter_windows,
    site_of,
)
from autopar.schedule.wire import ordered_dtype

_MODE = lax.GatherScatterMode


def run_local(
    operator: Operator,
    equation: Any,
    operands: list[jax.Array],
    strategy: tuple[Axes, ...],
    mesh: Mesh,
    index: Index = lax.axis_index,
) -> list[jax.Array]:
    """Local shards of the results of ``equation``, given local ``operands`` (a literal is a scalar array).

    Called while tracing inside a ``jax.shard_map`` that is manual over all axes of ``mesh``, or with another ``index``
    where the pieces are not those of devices (then nothing may be reduced by max or min).  ``strategy`` has one
    tuple of axes per factor of ``operator.rule``; results are partial sums over the axes of SUM and LOOKUP factors.
    ``equation`` is the operator's own or one with equal shapes; it must hold no inner program but a reducer's.

    Raises :class:`LocalError` if the strategy cannot be executed (:func:`check_local` says so without running), or if
    the shards do not have the shapes that the strategy implies.
    """
    site = replace(site_of(equation, operator.rule, strategy, mesh), index=index)
    _check_shapes("operand", site, operands, site.operands)
    run = _RUN.get(site.primitive, _bind)
    results = [_reduce_extrema(result, site) for result in run(equation, site, operands)]
    _check_shapes("result", site, results, site.results)
    return results


def check_local(operator: Operator, strategy: tuple[Axes, ...], mesh: Mesh) -> str | None:
    """Why ``operator`` cannot be run on local shards under ``strategy``; ``None`` if it can."""
    try:
        site_of(operator.equation, operator.rule, strategy, mesh)
    except LocalError as error:
        return str(error)
    return None


def run_on_rows(operator: Operator, operands: list[jax.Array], factor: int, rows: range) -> list[jax.Array]:
    """Results of an operator for some rows of one of its factors: the operands that carry it are those rows of the whole.

    As :func:`run_local` on pieces that need not be equal; results are summands or candidates over a factor that is reduced.
    Raises :class:`LocalError` if the factor cannot be cut.
    """
    size = operator.rule.factors[factor].size
    strategy = tuple((_ROWS,) if number == factor else () for number in range(len(operator.rule.factors)))
    site = site_of(operator.equation, operator.rule, strategy, Mesh((_ROWS,), (size,)))
    operand_pieces, result_pieces = (
        tuple(_widened(piece, len(rows)) for piece in pieces) for pieces in (site.operands, site.results)
    )
    index = partial(_number_of_row, rows.start)
    site = _Rows(site.primitive, site.params, site.mesh, operand_pieces, result_pieces, site.reduced, index, len(rows))
    _check_shapes("operand", site, operands, site.operands)
    results = _RUN.get(site.primitive, _bind)(operator.equation, site, operands)
    _check_shapes("result", site, results, site.results)
    return results


_ROWS = "rows"


@dataclass(frozen=True)
class _Rows(Site):
    """Several pieces in a row, of which there are as many as rows."""

    width: int = 1

    def start(self, piece: Piece, dim: int) -> Any:
        """Where the rows begin in a cut dimension (int32)."""
        return self.index(piece.layout.dims[dim]) * (piece.local_shape[dim] // self.width)


def _number_of_row(number: int, axes: Axes) -> Any:
    return jnp.int32(number)


def _widened(piece: Piece, width: int) -> Piece:
    shape = tuple(n * width if piece.is_cut(dim) else n for dim, n in enumerate(piece.local_shape))
    return replace(piece, local_shape=shape)


def _check_shapes(role: str, site: Site, arrays: list[jax.Array], pieces: tuple[Piece, ...]) -> None:
    shapes = [tuple(jnp.shape(array)) for array in arrays]
    expected = [piece.local_shape for piece in pieces]
    if shapes != expected:
        raise LocalError(
            f"internal error: {site.primitive} has local {role} shapes {shapes}, the strategy implies {expected} "
            f"(of {[piece.shape for piece in pieces]} on {site.mesh}); please report this"
        )


def _bind(equation: Any, site: Site, operands: list[jax.Array], **changed: Any) -> list[jax.Array]:
    """Run the primitive with local parameters, ``changed`` ones replaced."""
    params = equation.primitive.get_bind_params(local_params(site) | changed)
    results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _reduce_extrema(result: jax.Array, site: Site) -> jax.Array:
    for kind, reduce in ((FactorKind.MAX, lax.pmax), (FactorKind.MIN, lax.pmin)):
        axes = site.reduced[kind]
        if not axes:
            continue
        if jnp.issubdtype(result.dtype, jnp.floating):
            last = kind is FactorKind.MAX
            result = _of_order(reduce(_order(result, nan_is_last=last), axes), result.dtype)
        elif result.dtype == jnp.bool_:
            result = reduce(result.astype(ordered_dtype("bool")), axes).astype(jnp.bool_)
        else:
            result = reduce(result, axes)
    return result


def _order(x: jax.Array, *, nan_is_last: bool) -> jax.Array:
    """Signed integers in the order of the floats ``x``, every NaN at one end of them.

    An all-reduce of floats may drop a NaN that the operator on one device would keep (XLA:CPU does), and with it a
    program's own check for overflow; integers have one order everywhere.
    """
    limits = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
    order = _flip_negatives(lax.bitcast_convert_type(x, limits.dtype))
    order = jnp.where(jnp.isnan(x), limits.dtype.type(limits.max if nan_is_last else limits.min), order)
    return order.astype(ordered_dtype(x.dtype.name))


def _of_order(order: jax.Array, dtype: Any) -> jax.Array:
    """The floats that :func:`_order` made these integers of."""
    return lax.bitcast_convert_type(_flip_negatives(order.astype(f"int{8 * dtype.itemsize}")), dtype)


def _flip_negatives(bits: jax.Array) -> jax.Array:
    """Between sign and magnitude, as floats have it, and two's complement; its own inverse."""
    limits = jnp.iinfo(bits.dtype)
    return bits ^ (bits >> (limits.bits - 1) & limits.dtype.type(limits.max))


def _keep(equation: Any, site: Site, operands: list[jax.Array]) -> list[jax.Array]:
    """A placement asked for by the user is the plan's affair, which has it as a constraint; the value stays.

    Where the pieces are not those of devices, the plan is yet to be made, and the constraint is put on the piece, without
    the dimensions that no longer divide.
    """
    sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
    if site.index is lax.axis_index or not isinstance(sharding, NamedSharding):
        return operands
    shape, sizes = jnp.shape(operands[0]), dict(sharding.mesh.shape)
    entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    free = equation.params.get("unconstrained_dims", frozenset())
    for dim, entry in enumerate(entries):
        axes = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
        if dim in free or shape[dim] % math.prod(sizes[axis] for axis in axes):
            entries[dim] = PartitionSpec.UNCONSTRAINED
    placed = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return [lax.with_sharding_constraint(operands[0], placed)]


# --- what takes another way on some platforms -----------------------------------------------------------------------


def _sum(equation: Any, site: Site, operands: list[jax.Array]) -> list[jax.Array]:
    """On GPUs few rows are added up in two steps.  A program that is yet to be planned is written for no platform."""
    (x,), axes = operands, tuple(site.params["axes"])
    parts = parts_of(x.shape, axes) if jnp.issubdtype(x.dtype, jnp.floating) else None
    if parts is None or site.index is not lax.axis_index:
        return _bind(equation, site, operands)
    return [
        lax.platform_dependent(
            x,
            cuda=partial(sum_in_two_steps, dims=len(axes), parts=parts),
            default=lambda x: _bind(equation, site, [x])[0],
        )
    ]


# --- what counts positions ------------------------------------------------------------------------------------------


def _iota(equation: Any, site: Site, operands: list[jax.Array]) -> list[jax.Array]:
    result, dim = site.results[0], site.params["dimension"]
    if not result.is_cut(dim):
        return _bind(equation, site, operands, shape=result.local_shape)
    # Counted in integers and converted at the end: in bfloat16, start + position would be rounded twice.
    count = lax.broadcasted_iota(jnp.int32, result.local_shape, dim)
    count = count + site.start(result, dim)
    return [lax.convert_element_type(count, site.params["dtype"])]


def _random_bits(equation: Any, site: Site, operands: list[jax.Array]) -> list[jax.Array]:
    """The piece of ``jax.random.bits`` without computing the rest, where the generator numbers its elements.

    Partitionable Threefry 2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) hashes the
    64-bit row-major position of each element; results of up to 32 bits are the exclusive or of the two words.
    """
    (keys,) = operands
    piece, bit_width, shape = site.results[0], site.params["bit_width"], site.params["shape"]
    batch = len(piece.shape) - len(shape)
    cut = any(piece.is_cut(dim) for dim in range(batch, len(piece.shape)))
    numbered = jax.random.key_impl(keys) == "threefry2x32" and jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if not cut or not numbered:
        return _slice_whole(equation, site, operands)
    starts = [_start(site, piece, dim) for dim in range(batch, len(piece.shape))]
    high, low = positions(shape, piece.local_shape[batch:], starts)
    words = jax.random.key_data(keys)
    key_shape = (*keys.shape, *(1,) * len(shape)) if keys.shape else ()
    key_words = [jnp.broadcast_to(words[..., i].reshape(key_shape), piece.local_shape if batch else ()) for i in (0, 1)]
    counts = [jnp.broadcast_to(count, piece.local_shape) for count in (high, low)]
    first, second = threefry2x32_p.bind(*key_words, *counts)
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        return [(first.astype(dtype) << np.uint64(32)) | second.astype(dtype)]
    return [(first ^ second).astype(dtype)]


def positions(
    shape: tuple[int, ...], local_shape: tuple[int, ...], starts: list[jax.Array | int]
) -> tuple[jax.Array, jax.Array]:
    """High and low 32 bits of the row-major position in ``shape`` of each element of the piece beginning at ``starts``.

    Both are uint32 arrays that broadcast to ``local_shape``; 64-bit integers are not needed, as JAX may forbid them.
    """
    high = low = jnp.zeros((), jnp.uint32)
    for dim, start in enumerate(starts):
        axis_shape = tuple(extent if d == dim else 1 for d, extent in enumerate(local_shape))
        index = lax.broadcasted_iota(jnp.uint32, axis_shape, dim) + jnp.asarray(start).astype(jnp.uint32)
        stride = math.prod(shape[dim + 1 :])
        summand = index * np.uint32(stride % 2**32)
        if math.prod(shape) > 2**32:
            carry = (low + summand < summand).astype(jnp.uint32)
            high = high + _high_word(index, stride) + carry
        low = low + summand
    return high, low


def _high_word(index: jax.Array, stride: int) -> jax.Array:
    """Bits 32 to 63 of ``index · stride`` from products of 16-bit halves."""
    low, high = index & np.uint32(0xFFFF), index >> np.uint32(16)
    stride_low, stride_high = np.uint32(stride & 0xFFFF), np.uint32(stride >> 16 & 0xFFFF)
    middle = (low * stride_low >> np.uint32(16)) + (low * stride_high & np.uint32(0xFFFF))
    middle = middle + (high * stride_low & np.uint32(0xFFFF))
    carried = (low * stride_high >> np.uint32(16)) + (high * stride_low >> np.uint32(16)) + (middle >> np.uint32(16))
    return high * stride_high + carried + index * np.uint32(stride >> 32 & 0xFFFFFFFF)


def _start(site: Site, piece: Piece, dim: int) -> jax.Array | int:
    return site.start(piece, dim) if piece.is_cut(dim) else 0


def _slice_whole(equation: Any, site: Site, operands: list[jax.Array]) -> list[jax.Array]:
    """Run on whole parameters and keep the piece: for generators whose elements cannot be computed apart."""
    pieces = []
    for whole, piece in zip(_bind(equation, site, operands), site.results, strict=True):
        part = whole
        for dim, extent in enumerate(piece.local_shape):
            if part.shape[dim] != extent:
                part = lax.dynamic_slice_in_dim(part, _start(site, piece, dim), extent, dim)
        pieces.append(part)
    return pieces


# --- what takes positions -------------------------------------------------------------------------------------------


def _signed(index: jax.Array) -> jax.Array:
    """As int32, or int64 if it has 64 bits, so that a shift can make it negative.

    Huge unsigned ones become negative too, which is out of bounds just as well.
    """
    return index.astype(jnp.int64 if index.dtype.itemsize == 8 else jnp.int32)


def _clamp_index(index: jax.Array, last: int) -> jax.Array:
    """Into [0, last]; ``last`` itself may be more than the index type can say."""
    highest = min(last, int(jnp.iinfo(index.dtype).max))
    return jnp.clip(index, jnp.asarray(0, index.dtype), jnp.asarray(highest, index.dtype))


def _column(indices: jax.Array, number: int) -> jax.Array:
    return lax.slice_in_dim(indices, number, number + 1, axis=indices.ndim - 1)


def _gather(equation: Any, site: Site, operands: list[jax.Array]) -> list[jax.Array]:
    """Rows that this device holds, zeros for the others'; a filled row comes from the first device alone.

    An index that is out of bounds in a whole dimension is filled by whoever holds the row; in a cut dimension nobody
    does.  ``PROMISE_IN_BOUNDS`` is clamped, as XLA does on one device.
    """
    lookup_axes = site.reduced[FactorKind.LOOKUP]
    if not lookup_axes:
        return _bind(equation, site, operands)
    operand, indices = operands
    piece, params = site.operands[0], site.params
    numbers, slice_sizes = params["dimension_numbers"], params["slice_sizes"]
    held = jnp.ones((*indices.shape[:-1], 1), jnp.bool_)
    outside = ~held
    columns = []
    for number, dim in enumerate(numbers.start_index_map):
        index, last = _column(indices, number), piece.shape[dim] - slice_sizes[dim]
        if params["mode"] != _MODE.FILL_OR_DROP:
            index = _clamp_index(index, last)
        index = index.astype(jnp.int32 if max(piece.shape) < 2**31 else jnp.int64)  # as JAX does before it fills
        if piece.kinds[dim] is FactorKind.LOOKUP:
            outside |= (index < 0) | (index > last)
            index = index - site.start(piece, dim).astype(index.dtype)
            held &= (index >= 0) & (index < piece.local_shape[dim])
            index = _clamp_index(index, piece.local_shape[dim] - 1)
        columns.append(index)
    local_indices = lax.concatenate(columns, indices.ndim - 1)
    (rows,) = _bind(equation, site, [operand, local_indices], indices_are_sorted=False)
    batch_dims = [dim for dim in range(rows.ndim) if dim not in numbers.offset_dims]

    def over_rows(flags: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(lax.squeeze(flags, (flags.ndim - 1,)), rows.shape, batch_dims)

    absent = jnp.zeros_like(rows)
    if params["mode"] == _MODE.FILL_OR_DROP:
        fill = jnp.full_like(rows, params["fill_value"])
        absent = jnp.where(over_rows(outside & site.is_first(lookup_axes)), fill, absent)
    return [jnp.where(over_rows(held), rows, absent)]


def _dynamic_slice(equation: Any, site: Site, operands: list[jax.Array]) -> list[jax.Array]:
    """Starts are clamped here: XLA:CPU of jaxlib 0.10.2 makes one slice of a slice of a slice and clamps their sum."""
    operand, *starts = operands
    spans = zip(starts, site.operands[0].shape, site.params["slice_sizes"], strict=True)
    return _bind(equation, site, [operand, *(_clamp_index(start, extent - size) for start, extent, size in spans)])


def _scatter(equation: Any, site: Site, operands: list[jax.Array]) -> list[jax.Array]:
    """Updates that fall into this piece; where updates are shared out (SUM), the first device alone has the operand."""
    operand, indices, updates = operands
    piece, params = site.operands[0], site.params
    if site.results[0].layout.partial:
        operand = jnp.where(site.is_first(site.results[0].layout.partial), operand, jnp.zeros_like(operand))
    if not site.reduced[FactorKind.SCATTER]:
        return _bind(equation, site, [operand, indices, updates])
    windows = scatter_windows(site)
    columns = []
    for number, dim in enumerate(params["dimension_numbers"].scatter_dims_to_operand_dims):
        index = _column(indices, number)
        if params["mode"] == _MODE.CLIP:
            index = _clamp_index(index, piece.shape[dim] - windows[dim])
        index = _signed(index)
        if piece.kinds[dim] is FactorKind.SCATTER:
            index = index - site.start(piece, dim).astype(index.dtype)
        columns.append(index)
    local_indices = lax.concatenate(columns, indices.ndim - 1)
    changed = {"mode": _MODE.FILL_OR_DROP, "indices_are_sorted": False}
    return _bind(equation, site, [operand, local_indices, updates], **changed)


# --- what calls the host --------------------------------------------------------------------------------------------


def _host_call(equation: Any, site: Site, operands: list[jax.Array]) -> list[jax.Array]:
    if site.mesh.size == 1 or site.index is not lax.axis_index:
        return _bind(equation, site, operands)
    return call_once(equation, lambda *arrays: _bind(equation, site, list(arrays)), operands, site.mesh.axis_names)


_RUN: dict[str, Callable[[Any, Site, list[jax.Array]], list[jax.Array]]] = {
    **dict.fromkeys(SCATTERS, _scatter),
    **dict.fromkeys(("random_split", "rng_bit_generator", "rng_uniform"), _slice_whole),
    **dict.fromkeys(("sharding_constraint", "reshard", "device_put"), _keep),
    "reduce_sum": _sum,
    "iota": _iota,
    "random_bits": _random_bits,
    **dict.fromkeys(HOST_CALLS, _host_call),
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
}
