"""How much work is one equation?

Two numbers per equation, both of the whole (uncut) operator: floating-point operations and bytes that pass between
memory and the compute units if nothing is fused. The roofline takes the larger of the two times, so a rough constant
for a pointwise function does no harm where memory binds; what must be right are the orders:

    matrix product       2·(result elements)·(contracted elements)
    convolution          2·(result elements)·(kernel elements per output feature)/(holes in a dilated image)
    pointwise            w·(result elements), w from :data:`WEIGHTS`, otherwise 1
    reduction, scan      1·(operand elements)
    sort                 n·log₂n per line,   FFT  5·n·log₂n per complex line, half of it for a real one
    linear algebra       the cubic terms of Golub and Van Loan, "Matrix Computations", 4th edition, chapters 3 to 8
    movement             0

An unknown primitive counts as pointwise. Loops and branches are counted by their bodies, elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autopar import _compat
from autopar._compat import JaxprEqn

Count = Callable[[JaxprEqn], float]


def flops_of(equation: JaxprEqn) -> float:
    """Floating-point (or integer) operations of one run of the equation, a multiply-add counted as two."""
    name = equation.primitive.name
    if name in MOVEMENT:
        return 0.0
    if (count := COUNTS.get(name)) is not None:
        return float(count(equation))
    return float(WEIGHTS.get(name, 1) * _results(equation))


def bytes_of(equation: JaxprEqn) -> float:
    """Bytes that one run reads and writes: every distinct operand once, every result once.

    What only looks at a part of an array (slices, gathers, updates in place) touches that part; what only renames
    (reshape, barriers) touches nothing.
    """
    name = equation.primitive.name
    if name in RENAMING:
        return 0.0
    result_bytes = float(sum(_bytes(var) for var in equation.outvars))
    if name in PARTIAL_READS:
        return 2 * result_bytes + sum(_bytes(var) for var in equation.invars[1:])
    if name in PARTIAL_WRITES:
        update, passes = PARTIAL_WRITES[name]
        others = equation.invars[1:update] + equation.invars[update + 1 :]
        return passes * _bytes(equation.invars[update]) + sum(_bytes(var) for var in others)
    distinct = {id(var): var for var in equation.invars}
    return result_bytes + sum(_bytes(var) for var in distinct.values())


# --------------------------------------------------------------------------------------------------------------- sizes


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))


def _elements(var: Any) -> int:
    return math.prod(_shape(var))


def _dtype(var: Any) -> Any:
    return getattr(var.aval, "dtype", None)


def _bytes(var: Any) -> int:
    dtype = _dtype(var)
    return 0 if dtype is None else _elements(var) * _compat.item_bytes(dtype)


def _results(equation: JaxprEqn) -> int:
    """Elements of the largest result: a primitive of several results makes them in one sweep."""
    return max((_elements(var) for var in equation.outvars), default=0)


def _operand(equation: JaxprEqn) -> int:
    return _elements(equation.invars[0])


# ----------------------------------------------------------------------------------------------------- the primitives


def _dot_general(equation: JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = _shape(equation.invars[0])
    return 2 * _results(equation) * math.prod(shape[dim] for dim in contracted)


def _convolution(equation: JaxprEqn) -> float:
    """A dilated image (the gradient of a strided convolution) is mostly holes, which nobody multiplies."""
    p = equation.params
    kernel = _shape(equation.invars[1])
    taps = math.prod(kernel) / max(kernel[p["dimension_numbers"].rhs_spec[0]], 1)
    return 2 * _results(equation) * taps / math.prod(p["lhs_dilation"] or (1,))


def _sort(equation: JaxprEqn) -> float:
    length = _shape(equation.invars[0])[equation.params["dimension"]]
    return _operand(equation) * math.log2(max(length, 2))


def _top_k(equation: JaxprEqn) -> float:
    """One pass that keeps the best k in a heap."""
    return _operand(equation) * math.log2(equation.params["k"] + 1)


def _fft(equation: JaxprEqn) -> float:
    lengths = equation.params["fft_lengths"]
    real = any(_dtype(var).kind == "f" for var in (*equation.invars, *equation.outvars))
    points = max(_operand(equation), _results(equation))
    return (2.5 if real else 5.0) * points * math.log2(max(math.prod(lengths), 2))


def _window(equation: JaxprEqn) -> float:
    return _results(equation) * math.prod(equation.params["window_dimensions"])


def _window_of_source(equation: JaxprEqn) -> float:
    return _operand(equation) * math.prod(equation.params["window_dimensions"])


def _updates(equation: JaxprEqn) -> float:
    return _elements(equation.invars[2])


def _per_matrix(coefficients: tuple[float, float, float]) -> Count:
    """a·l²·s + b·l·s² + c·s³ for each matrix in the first operand; l and s are its longer and shorter side."""
    a, b, c = coefficients

    def count(equation: JaxprEqn) -> float:
        *batch, rows, columns = _shape(equation.invars[0])
        long, short = max(rows, columns), min(rows, columns)
        return math.prod(batch) * short * (a * long * long + b * long * short + c * short * short)

    return count


def _triangular_solve(equation: JaxprEqn) -> float:
    """As many operations as the matrix has rows, for each of the right-hand sides' elements."""
    return _elements(equation.invars[1]) * _shape(equation.invars[0])[-1]


def _tridiagonal_solve(equation: JaxprEqn) -> float:
    return 8 * _elements(equation.invars[-1])


CUBIC: Mapping[str, tuple[float, float, float]] = {
    "cholesky": (0, 0, 1 / 3),
    "lu": (0, 1, -1 / 3),
    "householder_product": (0, 2, -2 / 3),
    "qr": (0, 4, -4 / 3),  # reflectors, then their product
    "eigh": (0, 0, 9),
    **dict.fromkeys(("eig", "schur"), (0, 0, 25)),
    "svd": (4, 8, 9),
    "hessenberg": (0, 0, 10 / 3),
    "tridiagonal": (0, 0, 4 / 3),
}
"""Coefficients of l²·s, l·s², s³ for a matrix with sides l ≥ s, vectors included."""

COUNTS: Mapping[str, Count] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"), _operand),
    **dict.fromkeys(("reduce_xor", "reduce", "argmax", "argmin"), _operand),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _operand),
    "cumlogsumexp": lambda equation: 2 * WEIGHTS["exp"] * _operand(equation),
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    "select_and_gather_add": _window,
    "select_and_scatter_add": _window_of_source,
    **dict.fromkeys(("scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _updates),
    "sort": _sort,
    **dict.fromkeys(("top_k", "approx_top_k"), _top_k),
    "fft": _fft,
    **{name: _per_matrix(coefficients) for name, coefficients in CUBIC.items()},
    "triangular_solve": _triangular_solve,
    "tridiagonal_solve": _tridiagonal_solve,
}
"""Operations of the primitives that are more than a constant per result element."""

_ELEMENTARY = (
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin", "acos"),
    *("atan", "atan2", "asinh", "acosh", "atanh", "logistic", "pow", "cbrt", "erf", "erfc"),
)
_SPECIAL = (
    *("erf_inv", "lgamma", "digamma", "bessel_i0e", "bessel_i1e", "igamma", "igammac", "igamma_grad_a", "polygamma"),
    *("zeta", "regularized_incomplete_beta", "random_gamma"),
)
WEIGHTS: Mapping[str, int] = {
    **dict.fromkeys(_ELEMENTARY, 10),  # a polynomial of degree 5 to 7 and the reduction of its argument
    **dict.fromkeys(_SPECIAL, 50),  # several of these, or a series
    **dict.fromkeys(("div", "sqrt", "rsqrt", "rem"), 4),  # a Newton step or two on an approximate reciprocal
    **dict.fromkeys(("random_bits", "threefry2x32"), 110),  # 20 rounds of add, rotate (3), xor; 5 key injections
    "integer_pow": 2,
}
"""Operations per result element where it is not one."""

RENAMING = frozenset(
    {
        *("reshape", "squeeze", "expand_dims", "optimization_barrier", "sharding_constraint", "reshard"),
        *("stop_gradient", "name", "random_wrap", "random_unwrap", "random_clone"),
    }
)
"""Results are operands under another shape or name: no bytes move."""

MOVEMENT = RENAMING | frozenset(
    {
        *("broadcast_in_dim", "transpose", "slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad"),
        *("rev", "split", "unstack", "gather", "scatter", "copy", "copy_p", "iota", "bitcast_convert_type"),
        *("device_put", "lu_pivots_to_permutation"),
    }
)
"""No operations."""

PARTIAL_READS = frozenset({"slice", "dynamic_slice", "gather"})
"""As much is read as the result holds, besides the indices."""

PARTIAL_WRITES: Mapping[str, tuple[int, int]] = {
    "dynamic_update_slice": (1, 2),
    "scatter": (2, 2),
    **dict.fromkeys(("scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), (2, 3)),
}
"""Written in place: the operand that holds the updates, and how often that many bytes pass (read, write; combining
reads the destination too)."""
