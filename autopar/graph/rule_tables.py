"""What of an equation's rule is said by us and not by Shardy?

* :data:`KINDS`: what a reduction leaves behind.  An equation that is not named there combines its elements in a way that no
  collective repeats.
* :data:`TABLE`: whole rules.

:mod:`autopar.graph.rules` asks both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from autopar._compat import JaxprEqn
from autopar.graph.factoring import Dims, Factoring, Mark, Place
from autopar.graph.ir import Factor, FactorKind, Rule

Shape = tuple[int, ...]


def shape_of(var: Any) -> Shape:
    """The shape, ``()`` for a token."""
    return tuple(getattr(var.aval, "shape", ()))


def dtype_of(var: Any) -> Any:
    """The dtype, None for a token."""
    return getattr(var.aval, "dtype", None)


def blocked_rule(equation: JaxprEqn, *, known: bool) -> Rule:
    """Every dimension of every operand and result blocked, each for itself."""
    factoring = Factoring()
    operands, results = (
        [factoring.dims(shape_of(var), Mark.BLOCKED) for var in variables]
        for variables in (equation.invars, equation.outvars)
    )
    rule = factoring.rule(operands, results)
    return Rule(rule.factors, rule.operands, rule.results, known)


# ------------------------------------------------------------------------------------------------ kinds of reductions

KindRow = Callable[[JaxprEqn, Mark, tuple[Place, ...]], FactorKind]


def kind_of(equation: JaxprEqn, mark: Mark, places: tuple[Place, ...]) -> FactorKind:
    """What a factor that Shardy marks leaves behind where it is cut; ``places`` are the operands' dimensions that have it."""
    row = KINDS.get(equation.primitive.name)
    return row(equation, mark, places) if row else FactorKind.BLOCKED


def _reduces_by(kind: FactorKind, *, only_bool: bool = False) -> KindRow:
    """The row of a primitive whose reductions are all of one kind.

    A "sum" of booleans is a disjunction, which is no sum; bitwise reductions are a maximum or minimum of booleans only.
    """

    def row(equation: JaxprEqn, mark: Mark, _places: tuple[Place, ...]) -> FactorKind:
        is_bool = dtype_of(equation.outvars[0]) == np.dtype(bool)
        fits = is_bool if only_bool else not (is_bool and kind is FactorKind.SUM)
        return kind if fits and mark == Mark.REDUCED else FactorKind.BLOCKED

    return row


def _gather(equation: JaxprEqn, mark: Mark, places: tuple[Place, ...]) -> FactorKind:
    """A dimension of which one row is looked up by the only component of the index.

    A lookup leaves a sum over the devices, so rows of Booleans or keys, which cannot be added, are not looked up so.
    """
    dtype = dtype_of(equation.outvars[0])
    if dtype == np.dtype(bool) or jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return FactorKind.BLOCKED
    numbers = equation.params["dimension_numbers"]
    operand_dims = [(0, dim) for dim in numbers.start_index_map if dim in numbers.collapsed_slice_dims]
    single = len(numbers.start_index_map) == 1 and list(places) == operand_dims
    plain = equation.params["mode"] in _PLAIN_MODES
    return FactorKind.LOOKUP if single and plain and mark == Mark.REDUCED else FactorKind.BLOCKED


def _scatter(equation: JaxprEqn, mark: Mark, places: tuple[Place, ...]) -> FactorKind:
    """A dimension of which one row is written by the only component of the index; for sums also the rows that write.

    A sum over pieces of the updates takes the operand once, not once for each piece.
    """
    if mark == Mark.REDUCED and equation.primitive.name == "scatter-add":
        summed = dtype_of(equation.outvars[0]) != np.dtype(bool) and all(operand > 0 for operand, _ in places)
        return FactorKind.SUM if summed else FactorKind.BLOCKED
    numbers = equation.params["dimension_numbers"]
    written = [(0, dim) for dim in numbers.scatter_dims_to_operand_dims if dim in numbers.inserted_window_dims]
    single = len(numbers.scatter_dims_to_operand_dims) == 1 and list(places) == written
    plain = equation.params["mode"] in _PLAIN_MODES
    return FactorKind.SCATTER if single and plain and mark == Mark.WRITTEN else FactorKind.BLOCKED


_PLAIN_MODES = (
    jax.lax.GatherScatterMode.CLIP,
    jax.lax.GatherScatterMode.FILL_OR_DROP,
    jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)

KINDS: Mapping[str, KindRow] = {
    "conv_general_dilated": _reduces_by(FactorKind.SUM),
    "dot_general": _reduces_by(FactorKind.SUM),
    "gather": _gather,
    "reduce_and": _reduces_by(FactorKind.MIN, only_bool=True),
    "reduce_max": _reduces_by(FactorKind.MAX),
    "reduce_min": _reduces_by(FactorKind.MIN),
    "reduce_or": _reduces_by(FactorKind.MAX, only_bool=True),
    "reduce_sum": _reduces_by(FactorKind.SUM),
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-max": _scatter,
    "scatter-min": _scatter,
    "scatter-mul": _scatter,
    "scatter-sub": _scatter,
}
"""What a primitive's marked factors leave behind; a primitive that is not here may not be cut along them."""


# ---------------------------------------------------------------------------------------------------------- the table

Row = Callable[[JaxprEqn], Rule | None]


def rule_of_table(equation: JaxprEqn) -> Rule | None:
    """The rule stated here; None where Shardy is to be asked."""
    row = TABLE.get(equation.primitive.name)
    if row is None:
        return None
    try:
        return row(equation)
    except (KeyError, AttributeError, TypeError):  # the parameters are not those of the JAX versions known here
        return None


def _aligned(equation: JaxprEqn, whole: Iterable[int] = (), *, depth: int | None = None) -> Rule:
    """Dimension *d* of every ranked operand and result is one factor; those in ``whole``, or from ``depth`` on, are
    blocked, as is one whose size differs between arrays.
    """
    whole = frozenset(whole)
    variables = [*equation.invars, *equation.outvars]
    ranked = [shape_of(var) for var in variables if shape_of(var)]
    deepest = max(map(len, ranked), default=0)
    factoring = Factoring()
    shared: list[tuple[int, ...] | None] = []
    for dim in range(deepest):
        sizes = {shape[dim] for shape in ranked if len(shape) > dim}
        free = dim not in whole and (depth is None or dim < depth) and len(sizes) == 1
        free &= all(len(shape) > dim for shape in ranked)
        shared.append(factoring.dims((sizes.pop(),))[0] if free else None)

    def dims(var: Any) -> Dims:
        own = factoring.dims(shape_of(var), Mark.BLOCKED)
        return tuple(atoms if (tied := shared[dim]) is None else tied for dim, atoms in enumerate(own))

    return factoring.rule([dims(var) for var in equation.invars], [dims(var) for var in equation.outvars])


def _all_but(parameter: str) -> Row:
    """Every dimension may be cut but the one that the parameter names."""

    def row(equation: JaxprEqn) -> Rule:
        axis = equation.params[parameter]
        return _aligned(equation, {axis % len(shape_of(equation.invars[0]))})

    return row


def _batched(core_rank: int) -> Row:
    """The last ``core_rank`` dimensions of the first operand are one problem, those before them enumerate problems."""

    def row(equation: JaxprEqn) -> Rule:
        return _aligned(equation, depth=len(shape_of(equation.invars[0])) - core_rank)

    return row


def _each_its_own(equation: JaxprEqn) -> Rule:
    """Result *k* is operand *k*."""
    factoring = Factoring()
    arrays = [factoring.dims(shape_of(var)) for var in equation.invars]
    return factoring.rule(arrays, arrays)


def _whole(equation: JaxprEqn) -> Rule:
    """Known, and known to be of one piece (key derivation: a few words; generators that carry a state)."""
    return blocked_rule(equation, known=True)


def _reshape(equation: JaxprEqn) -> Rule | None:
    if len(equation.invars) != 1:
        return None
    factoring = Factoring()
    operand, result = factoring.dims(shape_of(equation.invars[0])), factoring.dims(shape_of(equation.outvars[0]))
    order = equation.params["dimensions"]  # read in this order, as after a transposition
    factoring.tie(sum(operand if order is None else (operand[dim] for dim in order), ()), sum(result, ()))
    return factoring.rule([operand], [result])


def _iota(equation: JaxprEqn) -> Rule | None:
    """Any dimension: a piece of the counting one starts at its offset, which the local program adds."""
    factoring = Factoring()
    return None if equation.invars else factoring.rule([], [factoring.dims(shape_of(equation.outvars[0]))])


def _random_bits(equation: JaxprEqn) -> Rule:
    """Partitionable Threefry hashes each element's global position: a piece can be made alone, given its offset.

    Other generators run a state through the whole array. A batch of keys makes leading dimensions of results.
    """
    keys, bits = equation.invars[0], equation.outvars[0]
    if str(dtype_of(keys)) != "key<fry>" or not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        return blocked_rule(equation, known=True)
    factoring = Factoring()
    operand = factoring.dims(shape_of(keys))
    return factoring.rule([operand], [operand + factoring.dims(shape_of(bits)[len(operand) :])])


def _windows(equation: JaxprEqn) -> Rule:
    """The dimensions along which the window is one element wide and does not skip, pad or dilate."""
    p = equation.params
    window = zip(p["window_dimensions"], p["window_strides"], p["padding"], strict=True)
    whole = {dim for dim, (size, stride, (low, high)) in enumerate(window) if (size, stride, low, high) != (1, 1, 0, 0)}
    for name in ("base_dilation", "window_dilation"):
        whole |= {dim for dim, dilation in enumerate(p.get(name) or ()) if dilation != 1}
    return _aligned(equation, whole)


def _convolution(equation: JaxprEqn) -> Rule:
    """Batch, input features (summed), output features and groups; image dimensions would need their neighbours' rows.

    Of g feature groups the input features are (g, i) and the output features (g, o); of b batch groups the images are
    (b, n) and the output features (b, o).  Groups do not mix, so whole ones may be shared out.  Shardy is not asked: it
    lets a padded image dimension be summed in pieces.
    """
    p = equation.params
    numbers = p["dimension_numbers"]
    image, kernel, result = (shape_of(var) for var in (*equation.invars, *equation.outvars))
    factors: list[Factor] = []

    def factor(size: int, kind: FactorKind) -> tuple[int, ...]:
        if size == 1:
            return ()
        factors.append(Factor(size, kind))
        return (len(factors) - 1,)

    def unless(grouped: bool, kind: FactorKind) -> FactorKind:
        return FactorKind.BLOCKED if grouped else kind

    feature_groups, batch_groups = p["feature_group_count"], p["batch_group_count"]
    by_batch, by_feature = batch_groups > 1, feature_groups > 1
    images = factor(batch_groups, FactorKind.PARALLEL)
    batch = factor(image[numbers.lhs_spec[0]] // batch_groups, unless(by_batch, FactorKind.PARALLEL))
    channels = factor(feature_groups, FactorKind.PARALLEL)
    inward = factor(image[numbers.lhs_spec[1]] // feature_groups, unless(by_feature, FactorKind.SUM))
    out_of_group = kernel[numbers.rhs_spec[0]] // (batch_groups * feature_groups)
    outward = images + channels + factor(out_of_group, unless(by_batch or by_feature, FactorKind.PARALLEL))

    def mapping(shape: Shape, named: Mapping[int, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        blocked = FactorKind.BLOCKED
        return tuple(named[dim] if dim in named else factor(extent, blocked) for dim, extent in enumerate(shape))

    image_map = mapping(image, {numbers.lhs_spec[0]: images + batch, numbers.lhs_spec[1]: channels + inward})
    kernel_map = mapping(kernel, {numbers.rhs_spec[0]: outward, numbers.rhs_spec[1]: inward})
    result_map = mapping(result, {numbers.out_spec[0]: batch, numbers.out_spec[1]: outward})
    return Rule(tuple(factors), (image_map, kernel_map), (result_map,))


TABLE: Mapping[str, Row] = {
    # Shardy has no rule for these, or none on some platform.
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _all_but("axis")),
    **dict.fromkeys(("cholesky", "triangular_solve", "lu", "qr", "householder_product"), _batched(2)),
    **dict.fromkeys(("eig", "eigh", "svd", "schur", "hessenberg", "tridiagonal"), _batched(2)),
    **dict.fromkeys(("lu_pivots_to_permutation", "tridiagonal_solve"), _batched(1)),
    **dict.fromkeys(("optimization_barrier", "sharding_constraint", "reshard", "device_put"), _each_its_own),
    **dict.fromkeys(("random_wrap", "random_unwrap", "random_seed", "random_fold_in", "random_split"), _whole),
    **dict.fromkeys(("random_clone", "rng_bit_generator", "rng_uniform"), _whole),
    "approx_top_k": _all_but("reduction_dimension"),
    "split": _all_but("axis"),
    "top_k": _all_but("axis"),
    "iota": _iota,
    "random_bits": _random_bits,
    # Pointwise by definition, but some are loops when lowered.
    **dict.fromkeys(("bessel_i0e", "bessel_i1e", "igamma", "igammac", "igamma_grad_a", "threefry2x32"), _aligned),
    "regularized_incomplete_beta": _aligned,
    # Shardy has rules for these, but for a partitioner's use, or not the same ones in all versions.
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"), _windows),
    **dict.fromkeys(("select_and_scatter_add", "select_and_gather_add"), _windows),
    "conv_general_dilated": _convolution,
    "reshape": _reshape,
}
"""Primitives whose rule is stated here. A row may return None: then Shardy is asked."""
