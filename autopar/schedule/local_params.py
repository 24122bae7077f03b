"""What becomes of an equation's parameters, and which strategies it can follow, when its arrays are cut.

A strategy gives each factor *f* of an operator mesh axes A(f).  Where *f* is the major factor of a dimension of
extent n, that dimension is cut into ∏|A(f)| equal pieces, so an operand of shape (n₀, n₁, …) becomes a local one of
shape (n₀/p₀, n₁/p₁, …).  A parameter that repeats a shape has to follow; a parameter that names a position must lie in
a dimension that is whole.  Both are said here in tables primitive → function of a :class:`Site`; a primitive in neither
table runs with its own parameters.  Nothing in this file traces or computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from jax import lax

from autopar.cluster import Mesh
from autopar.errors import PlanError
from autopar.graph.build import BARRIER
from autopar.graph.ir import FactorKind, Rule
from autopar.plan import Axes, Layout


class LocalError(PlanError):
    """A strategy under which an operator cannot be run on local shards."""


@dataclass(frozen=True)
class Piece:
    """One operand or result: its whole shape and how it lies on the mesh.

    ``kinds`` has the kind of the factor that cuts each dimension, or ``None`` where the dimension is whole.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    layout: Layout
    kinds: tuple[FactorKind | None, ...]

    def is_cut(self, dim: int) -> bool:
        """Whether mesh axes cut dimension ``dim``."""
        return self.kinds[dim] is not None


Index = Callable[[Axes], Any]
"""Which piece this is along axes that act as one of the product size: a scalar int32."""


@dataclass(frozen=True)
class Site:
    """One equation and everything its strategy says about it.

    ``reduced`` are the axes of each kind that is reduced, ``index`` tells which piece is computed.
    """

    primitive: str
    params: dict[str, Any]
    mesh: Mesh
    operands: tuple[Piece, ...]
    results: tuple[Piece, ...]
    reduced: dict[FactorKind, Axes]
    index: Index = lax.axis_index

    def start(self, piece: Piece, dim: int) -> Any:
        """Where the piece begins in a cut dimension (int32)."""
        return self.index(piece.layout.dims[dim]) * piece.local_shape[dim]

    def is_first(self, axes: Axes) -> Any:
        """Whether this is the first piece along ``axes`` (a scalar Boolean)."""
        return self.index(axes) == 0


Place = tuple[Piece, int]

SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")

# A factor of these kinds asks something of the primitive itself, so only these are known to grant it.
_REDUCERS: dict[FactorKind, frozenset[str]] = {
    FactorKind.SUM: frozenset(
        {
            "reduce_sum",
            "dot_general",
            "conv_general_dilated",
            "ragged_dot_general",
            "scatter-add",
            "scatter-sub",
        }
    ),
    FactorKind.MAX: frozenset({"reduce_max", "reduce_or", "scatter-max"}),
    FactorKind.MIN: frozenset({"reduce_min", "reduce_and", "scatter-min"}),
    FactorKind.LOOKUP: frozenset({"gather"}),
    FactorKind.SCATTER: frozenset(SCATTERS),
}


def site_of(equation: Any, rule: Rule, strategy: tuple[Axes, ...], mesh: Mesh) -> Site:
    """Follow ``strategy`` through ``rule`` and check that the equation can be run that way.

    Raises :class:`LocalError` naming the first thing that stands in the way.
    """
    name = equation.primitive.name
    try:
        _check_factors(rule, strategy, mesh, each_its_own=name == BARRIER)
        _check_reducers(equation, rule, strategy)
        axes_of = {kind: _axes_of_kind(rule, strategy, mesh, kind) for kind in FactorKind}
        partial = _in_mesh_order((axis for kind in FactorKind if kind.leaves_sum for axis in axes_of[kind]), mesh)
        operands = tuple(
            _piece(tuple(variable.aval.shape), dims, rule, strategy, mesh)
            for variable, dims in zip(equation.invars, rule.operands, strict=True)
        )
        results = tuple(
            _piece(tuple(variable.aval.shape), dims, rule, strategy, mesh, partial)
            for variable, dims in zip(equation.outvars, rule.results, strict=True)
        )
        site = Site(name, equation.params, mesh, operands, results, axes_of)
        for piece, dim in _WHOLE.get(name, _nothing)(site):
            if piece.is_cut(dim):
                raise LocalError(f"dimension {dim} of {piece.shape} has to be whole, but is cut: {piece.layout}")
        local_params(site)
    except LocalError as error:
        raise LocalError(f"{name} cannot run on local shards: {error}; choose another strategy") from None
    return site


def local_params(site: Site) -> dict[str, Any]:
    """The equation's parameters with global shapes replaced by local ones and shardings of the user's removed."""
    params = {name: None if name in ("sharding", "out_sharding") else value for name, value in site.params.items()}
    if site.primitive in _PARAMS:
        params |= _PARAMS[site.primitive](site)
    return params


def _in_mesh_order(axes: Iterable[str], mesh: Mesh) -> Axes:
    chosen = set(axes)
    return tuple(axis for axis in mesh.axis_names if axis in chosen)


def _axes_of_kind(rule: Rule, strategy: tuple[Axes, ...], mesh: Mesh, kind: FactorKind) -> Axes:
    cuts = zip(rule.factors, strategy, strict=True)
    return _in_mesh_order((axis for factor, axes in cuts if factor.kind is kind for axis in axes), mesh)


def _check_factors(rule: Rule, strategy: tuple[Axes, ...], mesh: Mesh, *, each_its_own: bool) -> None:
    """Axes exist, stand in mesh order, serve one factor each (unless factors never meet) and divide it."""
    if len(strategy) != len(rule.factors):
        raise LocalError(f"the strategy has {len(strategy)} entries for {len(rule.factors)} factors")
    used: set[str] = set()
    for index, (factor, axes) in enumerate(zip(rule.factors, strategy, strict=True)):
        if not axes:
            continue
        if _in_mesh_order(axes, mesh) != axes or (used & set(axes) and not each_its_own):
            raise LocalError(f"factor {index} has axes {axes}, but each axis of {mesh} may be used once, in mesh order")
        used |= set(axes)
        if factor.kind is FactorKind.BLOCKED:
            raise LocalError(f"factor {index} is blocked, but cut by {axes}")
        if factor.size % mesh.axis_size(*axes):
            pieces = mesh.axis_size(*axes)
            raise LocalError(f"factor {index} of size {factor.size} is not a multiple of {pieces}, the size of {axes}")
        _check_appearance(index, rule)


def _check_appearance(index: int, rule: Rule) -> None:
    """A cut factor is major wherever it appears; one that is kept reaches a result, one that is reduced none."""
    kind = rule.factors[index].kind
    for factors in (factors for dims in (*rule.operands, *rule.results) for factors in dims):
        if index in factors and index != _major(factors, rule):
            raise LocalError(f"factor {index} is cut, but not the major factor of a dimension with factors {factors}")
    carried = any(index in factors for dims in rule.results for factors in dims)
    kept = kind in (FactorKind.PARALLEL, FactorKind.SCATTER)
    if kept != carried:
        raise LocalError(f"factor {index} ({kind.value}) is cut, but {'a' if carried else 'no'} result carries it")


def _check_reducers(equation: Any, rule: Rule, strategy: tuple[Axes, ...]) -> None:
    """The primitive is known to do what the kind of each cut factor asks for."""
    name = equation.primitive.name
    for factor, axes in zip(rule.factors, strategy, strict=True):
        if not axes or factor.kind not in _REDUCERS:
            continue
        if name not in _REDUCERS[factor.kind]:
            raise LocalError(f"it is not known to allow a cut factor of kind {factor.kind.value}")
        dtype = str(equation.outvars[0].aval.dtype)
        if name in ("reduce_and", "reduce_or") and dtype != "bool":
            raise LocalError(f"a bitwise {name} of {dtype} is no minimum or maximum")
        if factor.kind.leaves_sum and (dtype == "bool" or dtype.startswith("key<")):
            raise LocalError(f"{dtype} values cannot be left as partial sums")


def _major(factors: tuple[int, ...], rule: Rule) -> int | None:
    """The factor that a cut of this dimension would cut: the first that is larger than 1."""
    return next((factor for factor in factors if rule.factors[factor].size > 1), None)


def _piece(
    shape: tuple[int, ...],
    dims: tuple[tuple[int, ...], ...],
    rule: Rule,
    strategy: tuple[Axes, ...],
    mesh: Mesh,
    partial: Axes = (),
) -> Piece:
    axes_of_dims: list[Axes] = []
    kinds: list[FactorKind | None] = []
    for extent, factors in zip(shape, dims, strict=True):
        major = _major(factors, rule)
        axes = strategy[major] if major is not None else ()
        if axes and math.prod(rule.factors[factor].size for factor in factors) != extent:
            raise LocalError(f"factors {factors} do not make up the cut dimension of extent {extent} of {shape}")
        axes_of_dims.append(axes)
        kinds.append(rule.factors[major].kind if axes and major is not None else None)
    local_shape = tuple(extent // mesh.axis_size(*axes) for extent, axes in zip(shape, axes_of_dims, strict=True))
    return Piece(shape, local_shape, Layout(tuple(axes_of_dims), partial), tuple(kinds))


# --- parameters that repeat a shape ---------------------------------------------------------------------------------


def _slice_limits(site: Site) -> dict[str, Any]:
    piece = site.operands[0]
    limits = site.params["limit_indices"]
    return {
        "limit_indices": tuple(
            extent if piece.is_cut(dim) else limit
            for dim, (extent, limit) in enumerate(zip(piece.local_shape, limits, strict=True))
        )
    }


def _gather_slices(site: Site) -> dict[str, Any]:
    piece = site.operands[0]
    return {
        "slice_sizes": tuple(
            local if size == extent else size
            for size, extent, local in zip(site.params["slice_sizes"], piece.shape, piece.local_shape, strict=True)
        )
    }


def _repeats(site: Site) -> dict[str, Any]:
    """The number of repeats is the major factor of a dimension of the result: it is the repeats that are shared out."""
    extents = zip(site.operands[0].local_shape, site.results[0].local_shape, strict=True)
    return {"reps": tuple(after // before for before, after in extents)}


def _conv_groups(site: Site) -> dict[str, Any]:
    """Groups are cut where their two inputs and the result are cut alike; otherwise a grouped dimension stays whole.

    With g feature groups the input features are (g, i) and the output features (g, o); with b batch groups the input
    batch is (b, n) and the output features (b, o).
    """
    numbers = site.params["dimension_numbers"]
    lhs, rhs = site.operands[:2]

    def pieces_of(piece: Piece, dim: int) -> int:
        return piece.shape[dim] // piece.local_shape[dim]

    out = pieces_of(rhs, numbers.rhs_spec[0])
    changed: dict[str, Any] = {}
    for name, dim in (("feature_group_count", numbers.lhs_spec[1]), ("batch_group_count", numbers.lhs_spec[0])):
        groups = site.params[name]
        if groups == 1:
            continue
        if pieces_of(lhs, dim) != out or groups % out:
            raise LocalError(f"{groups} groups ({name}) with {pieces_of(lhs, dim)} pieces of input and {out} of kernel")
        changed[name] = groups // out
    return changed


_PARAMS: dict[str, Callable[[Site], dict[str, Any]]] = {
    "broadcast_in_dim": lambda site: {"shape": site.results[0].local_shape},
    "reshape": lambda site: {"new_sizes": site.results[0].local_shape},
    "slice": _slice_limits,
    "dynamic_slice": lambda site: {"slice_sizes": site.results[0].local_shape},
    "tile": _repeats,
    "gather": _gather_slices,
    "conv_general_dilated": _conv_groups,
}


# --- dimensions that have to be whole -------------------------------------------------------------------------------


def _nothing(_site: Site) -> Iterator[Place]:
    return iter(())


def _everything(site: Site) -> Iterator[Place]:
    for piece in (*site.operands, *site.results):
        for dim in range(len(piece.shape)):
            yield piece, dim


def _alike(dims_of: Callable[[Site], Iterable[int]]) -> Callable[[Site], Iterator[Place]]:
    """The named dimensions in the first operand and in everything of its rank (negative ones count from the end)."""

    def places(site: Site) -> Iterator[Place]:
        rank = len(site.operands[0].shape)
        dims = [dim % rank for dim in dims_of(site)]
        for piece in (*site.operands, *site.results):
            if len(piece.shape) == rank:
                for dim in dims:
                    yield piece, dim

    return places


def _param(name: str) -> Callable[[Site], Iterator[Place]]:
    """The dimension, or dimensions, that the parameter ``name`` holds, as integers of Python or NumPy."""

    def dims_of(site: Site) -> Iterable[int]:
        value = site.params[name]
        return (int(value),) if isinstance(value, Integral) else value

    return _alike(dims_of)


def _last(count: int) -> Callable[[Site], Iterator[Place]]:
    return _alike(lambda site: range(-min(count, len(site.operands[0].shape)), 0))


def _sliced(site: Site) -> list[int]:
    params, shape = site.params, site.operands[0].shape
    strides = params["strides"] or (1,) * len(shape)
    spans = zip(params["start_indices"], params["limit_indices"], strides, shape, strict=True)
    return [dim for dim, (start, limit, stride, extent) in enumerate(spans) if (start, limit, stride) != (0, extent, 1)]


def _differing(sizes: Iterable[int], extents: Iterable[int]) -> list[int]:
    return [dim for dim, (size, extent) in enumerate(zip(sizes, extents, strict=True)) if size != extent]


def _windowed(site: Site) -> list[int]:
    """Dimensions in which a window is wider than one element, or moves by more than one, or is padded or dilated."""
    params, rank = site.params, len(site.operands[0].shape)
    plain = (1,) * rank
    columns = zip(
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params.get("base_dilation", plain),
        params.get("window_dilation", plain),
        strict=True,
    )
    return [dim for dim, column in enumerate(columns) if column != (1, 1, (0, 0), 1, 1)]


def _conv_space(site: Site) -> Iterator[Place]:
    numbers = site.params["dimension_numbers"]
    lhs, rhs = site.operands[:2]
    for piece, spec in ((lhs, numbers.lhs_spec), (rhs, numbers.rhs_spec), (site.results[0], numbers.out_spec)):
        for dim in spec[2:]:
            yield piece, dim


def _gathered(site: Site) -> Iterator[Place]:
    params, (operand, indices) = site.params, site.operands[:2]
    numbers = params["dimension_numbers"]
    yield indices, len(indices.shape) - 1
    for dim, (size, extent) in enumerate(zip(params["slice_sizes"], operand.shape, strict=True)):
        looked_up = operand.kinds[dim] is FactorKind.LOOKUP and size == 1 and dim in numbers.start_index_map
        follows = operand.kinds[dim] is FactorKind.PARALLEL and (
            dim in numbers.operand_batching_dims or (size == extent and extent > 1)
        )
        if not looked_up and not follows:
            yield operand, dim


def _scattered(site: Site) -> Iterator[Place]:
    params, (operand, indices, updates) = site.params, site.operands[:3]
    numbers = params["dimension_numbers"]
    yield indices, len(indices.shape) - 1
    for dim, window in enumerate(scatter_windows(site)):
        kind = operand.kinds[dim]
        inserted = dim in numbers.inserted_window_dims
        written = kind is FactorKind.SCATTER and inserted and dim in numbers.scatter_dims_to_operand_dims
        follows = kind is FactorKind.PARALLEL and (
            dim in numbers.operand_batching_dims or (not inserted and window == operand.shape[dim])
        )
        if not written and not follows:
            yield operand, dim
    for dim, kind in enumerate(updates.kinds):
        if kind is FactorKind.SCATTER:
            yield updates, dim


def scatter_windows(site: Site) -> tuple[int, ...]:
    """Extents of one update's window in the operand's dimensions, as in the unsharded program."""
    numbers = site.params["dimension_numbers"]
    windows = iter([site.operands[2].shape[dim] for dim in numbers.update_window_dims])
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    return tuple(1 if dim in single else next(windows) for dim in range(len(site.operands[0].shape)))


def _recast(site: Site) -> Iterator[Place]:
    """The extra last dimension when a cast changes the element's width, or wraps words into a key."""
    operand, result = site.operands[0], site.results[0]
    for piece, other in ((operand, result), (result, operand)):
        if len(piece.shape) > len(other.shape):
            yield piece, len(piece.shape) - 1


def _stacked(site: Site) -> Iterator[Place]:
    yield site.results[0], site.params["axis"]


def _ragged(site: Site) -> Iterator[Place]:
    numbers = site.params["ragged_dot_dimension_numbers"]
    for piece, dims in (
        (site.operands[0], numbers.lhs_ragged_dimensions),
        (site.operands[1], numbers.rhs_group_dimensions),
    ):
        for dim in dims:
            yield piece, dim


_WHOLE: dict[str, Callable[[Site], Iterator[Place]]] = {
    **dict.fromkeys(SCATTERS, _scattered),
    **dict.fromkeys(("cholesky", "eig", "eigh", "hessenberg", "householder_product", "lu"), _last(2)),
    **dict.fromkeys(("qr", "schur", "svd", "triangular_solve"), _last(2)),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _param("axis")),
    **dict.fromkeys(("split", "top_k"), _param("axis")),
    "rev": _param("dimensions"),
    **dict.fromkeys(("sort", "concatenate"), _param("dimension")),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"),
        _alike(_windowed),
    ),
    **dict.fromkeys(("select_and_scatter_add", "select_and_gather_add"), _alike(_windowed)),
    **dict.fromkeys(("bitcast_convert_type", "random_wrap", "random_unwrap"), _recast),
    **dict.fromkeys(("random_gamma", "select_and_scatter", "linear_solve"), _everything),
    "approx_top_k": _param("reduction_dimension"),
    "fft": _alike(lambda site: range(-len(site.params["fft_lengths"]), 0)),
    "slice": _alike(_sliced),
    "dynamic_slice": _alike(lambda site: _differing(site.params["slice_sizes"], site.operands[0].shape)),
    "dynamic_update_slice": _alike(lambda site: _differing(site.operands[1].shape, site.operands[0].shape)),
    "pad": _alike(
        lambda site: [dim for dim, widths in enumerate(site.params["padding_config"]) if tuple(widths) != (0, 0, 0)]
    ),
    "stack": _stacked,
    "conv_general_dilated": _conv_space,
    "ragged_dot_general": _ragged,
    "gather": _gathered,
}
