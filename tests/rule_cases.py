"""Equations and the rules that they must have, in the notation of :mod:`tests.test_rules`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.random import threefry2x32_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Case:
    """One equation, and the rule it must have. ``run(shape, *arguments)`` makes it.

    ``arguments`` are the equation's operands, literals left out; ``shape`` is that of its first result, of a piece's if
    the arguments are pieces (``result_shape`` says it for the whole where ``run`` cares).
    ``counts_positions``: a piece must be told where it lies, which is the executor's affair; only the structure is
    tested here. ``once``: the operand that a sum takes once, not once for each piece.
    """

    primitive: str
    rule: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    result_shape: tuple[int, ...] = ()
    counts_positions: bool = False
    once: int | None = None

    def __str__(self) -> str:
        return f"{self.primitive}: {self.rule}"


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(math.prod(shape)).normal(size=shape).astype(np.float32)


def integers(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(math.prod(shape)).integers(0, high, size=shape).astype(np.int32)


def positive(*shape: int) -> np.ndarray:
    return np.abs(normal(*shape)) + 0.5


def matrices(*batch: int, size: int = 4) -> np.ndarray:
    """Well-conditioned symmetric positive matrices."""
    square = normal(*batch, size, size)
    return square @ np.swapaxes(square, -1, -2) + size * np.eye(size, dtype=np.float32)


def shaped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A ``run`` that needs no shape."""
    return lambda _shape, *arguments: function(*arguments)


def pointwise(primitive: str, function: Callable[..., Any], *arguments: Any) -> Case:
    return Case(primitive, ", ".join(["a b"] * len(arguments)) + " -> a b", shaped(function), arguments)


X = normal(4, 6, 8)
KEY = jax.random.key(3)
GATHER = lax.GatherDimensionNumbers
SCATTER = lax.ScatterDimensionNumbers
MESH = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
EXPLICIT_MESH = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
CONV = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "padding": "SAME"}
POOL = {"window_dimensions": (1, 3, 1), "window_strides": (1, 3, 1), "padding": "VALID"}


def convolution(shape: tuple[int, ...], image: Any, kernel: Any) -> Any:
    """As many feature groups as kernels fit the image's features, as many batch groups as results fit its batch."""
    groups, batch_groups = image.shape[3] // kernel.shape[2], image.shape[0] // (shape or image.shape)[0]
    return lax.conv_general_dilated(
        image, kernel, (1, 1), feature_group_count=groups, batch_group_count=batch_groups, **CONV
    )


def reshape(shape: tuple[int, ...], x: Any) -> Any:
    return lax.reshape(x, shape)


def max_pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, **POOL)


def take(x: Any, indices: Any, mode: str | None = None) -> Any:
    numbers = GATHER(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(x, indices, numbers, (1, x.shape[1]), mode=mode)


def put(method: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    def run(x: Any, indices: Any, updates: Any) -> Any:
        numbers = SCATTER(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
        return method(x, indices, updates, numbers, mode=mode)

    return shaped(run)


LOOKUP_ARGUMENTS = (normal(10, 8), integers(10, 6, 1))
PUT_ARGUMENTS = (*LOOKUP_ARGUMENTS, normal(6, 8))

SHARDY_CASES = [
    Case(
        "dot_general", "a b c+, d c+ -> a b d", shaped(lambda x, y: jnp.einsum("bsd,fd->bsf", x, y)), (X, normal(10, 8))
    ),
    Case("dot_general", "a b c+, a c+ d -> a b d", shaped(jnp.matmul), (X, normal(4, 8, 2))),
    Case("reduce_sum", "a b+ c -> a c", shaped(lambda x: x.sum(1)), (X,)),
    Case("reduce_max", "a b c^ -> a b", shaped(lambda x: x.max(2)), (X,)),
    Case("reduce_min", "av bv c -> c", shaped(lambda x: x.min((0, 1))), (X,)),
    Case("reduce_or", "a b^ c -> a c", shaped(lambda x: jnp.any(x, 1)), (X > 1,)),
    Case("reduce_and", "a bv c -> a c", shaped(lambda x: jnp.all(x, 1)), (X > -1,)),
    Case("reduce_or", "# a -> a", shaped(lambda x: lax.reduce_or(x, axes=(0,))), (integers(9, 4, 6),)),
    Case("reduce_and", "# a -> a", shaped(lambda x: lax.reduce_and(x, axes=(0,))), (integers(9, 4, 6),)),
    Case("reduce_prod", "a # b -> a b", shaped(lambda x: x.prod(1)), (X,)),
    Case("reduce_xor", "# a -> a", shaped(lambda x: lax.reduce_xor(x, axes=(0,))), (integers(9, 4, 6),)),
    Case("argmax", "a # b -> a b", shaped(lambda x: lax.argmax(x, 1, jnp.int32)), (X,)),
    Case("argmin", "a b # -> a b", shaped(lambda x: lax.argmin(x, 2, jnp.int32)), (X,)),
    Case("transpose", "a b c -> c a b", shaped(lambda x: x.transpose(2, 0, 1)), (X,)),
    Case("broadcast_in_dim", "a -> b a", lambda shape, x: lax.broadcast_in_dim(x, shape, (1,)), (normal(6),), (4, 6)),
    Case(
        "broadcast_in_dim",
        "a 1 -> a b",
        lambda shape, x: lax.broadcast_in_dim(x, shape, (0, 1)),
        (normal(6, 1),),
        (6, 4),
    ),
    Case("broadcast_in_dim", ". -> a b", lambda shape, x: lax.broadcast_in_dim(x, shape, ()), (np.float32(2),), (4, 6)),
    Case("squeeze", "a 1 b -> a b", shaped(lambda x: lax.squeeze(x, (1,))), (normal(4, 1, 6),)),
    Case("slice", "a # b -> a # b", shaped(lambda x: lax.slice_in_dim(x, 1, 5, axis=1)), (X,)),
    Case("slice", "# a b -> # a b", shaped(lambda x: lax.slice_in_dim(x, 0, 4, stride=2, axis=0)), (X,)),
    Case("concatenate", "a # b, a # b -> a # b", shaped(lambda x, y: lax.concatenate([x, y], 1)), (X, X)),
    Case("pad", "# a #, . -> # a #", shaped(lambda x: lax.pad(x, 0.0, ((1, 0, 0), (0, 0, 0), (0, 0, 1)))), (X,)),
    Case("pad", "# a b, . -> # a b", shaped(lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0), (0, 0, 0)))), (X,)),
    Case("rev", "a # b -> a # b", shaped(lambda x: lax.rev(x, (1,))), (X,)),
    Case("split", "a # b -> a # b, a # b", shaped(lambda x: lax.split(x, (2, 4), 1)), (X,)),
    Case("sort", "a # b -> a # b", shaped(lambda x: lax.sort(x, dimension=1)), (X,)),
    Case(
        "sort", "a #, a # -> a #, a #", shaped(lambda x, y: lax.sort((x, y), num_keys=1)), (normal(4, 6), normal(4, 6))
    ),
    Case("select_n", "., a b, a b -> a b", shaped(lax.select_n), (np.True_, normal(4, 6), normal(4, 6))),
    Case("select_n", "a b, a b, a b -> a b", shaped(lax.select_n), (normal(4, 6) > 0, normal(4, 6), normal(4, 6))),
    Case("clamp", "., a b, . -> a b", shaped(lax.clamp), (np.float32(-0.5), normal(4, 6), np.float32(0.5))),
    Case(
        "dynamic_slice",
        "a # b, ., ., . -> a # b",
        shaped(lambda x, i: lax.dynamic_slice_in_dim(x, i, 3, 1)),
        (X, np.int32(2)),
    ),
    Case(
        "dynamic_update_slice",
        "a # b, a # b, ., ., . -> a # b",
        shaped(lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i, 1)),
        (X, normal(4, 3, 8), np.int32(2)),
    ),
    Case("fft", "a b # -> a b #", shaped(jnp.fft.fft), (X.astype(np.complex64),)),
    Case("fft", "a # # -> a # #", shaped(jnp.fft.rfft2), (X,)),
    Case("convert_element_type", "a b c -> a b c", shaped(lambda x: x.astype(jnp.bfloat16)), (X,)),
    Case(
        "bitcast_convert_type", "a b -> a b #", shaped(lambda x: lax.bitcast_convert_type(x, jnp.int8)), (normal(4, 6),)
    ),
    Case("copy", "a b c -> a b c", shaped(jnp.copy), (X,)),
    Case("reduce_precision", "a b c -> a b c", shaped(lambda x: lax.reduce_precision(x, 8, 7)), (X,)),
    Case(
        "conv_general_dilated", "a # # b+, # # b+ c -> a # # c", convolution, (normal(4, 5, 5, 6), normal(3, 3, 6, 8))
    ),
    Case(
        "conv_general_dilated", "a # # b#, # # # b# -> a # # b#", convolution, (normal(4, 5, 5, 6), normal(3, 3, 3, 8))
    ),
    Case(
        "conv_general_dilated", "a # # b, # # 1 b# -> a # # b#", convolution, (normal(4, 5, 5, 6), normal(3, 3, 1, 12))
    ),
    Case(
        "conv_general_dilated",
        "a# # # b+, # # b+ a# -> # # # a#",
        convolution,
        (normal(4, 5, 5, 6), normal(3, 3, 6, 8)),
        (2, 5, 5, 8),
    ),
    Case("gather", "a? b, c 1 -> c b", shaped(take), LOOKUP_ARGUMENTS),
    Case("gather", "a? b, c 1 -> c b", shaped(functools.partial(take, mode="clip")), LOOKUP_ARGUMENTS),
    Case("gather", "a? b, c 1 -> c b", shaped(functools.partial(take, mode="fill")), LOOKUP_ARGUMENTS),
    Case(
        "gather",
        "a b?, a c 1 -> a c",
        shaped(lambda x, i: lax.gather(x, i, GATHER((), (1,), (1,), (0,), (0,)), (1, 1), mode="fill")),
        (normal(4, 10), integers(10, 4, 6, 1)),
    ),
    Case(
        "gather",
        "# # a, b # -> b a",
        shaped(lambda x, i: lax.gather(x, i, GATHER((1,), (0, 1), (0, 1)), (1, 1, x.shape[2]))),
        (normal(4, 6, 8), integers(4, 10, 2)),
    ),
    Case(
        "gather",
        "# a, b 1 -> b # a",
        shaped(lambda x, i: lax.gather(x, i, GATHER((1, 2), (), (0,)), (3, x.shape[1]), mode="clip")),
        (normal(10, 8), integers(7, 6, 1)),
    ),
    Case(
        "gather",
        "# #, a # -> a #",
        shaped(lambda x, i: lax.gather(x, i, GATHER((1,), (0,), (0, 1)), (1, 3), mode="clip")),
        (normal(10, 8), integers(5, 6, 2)),
    ),
    Case("scatter-add", "a! b, c+ 1, c+ b -> a! b", put(lax.scatter_add), PUT_ARGUMENTS, once=0),
    Case("scatter-add", "a! b, c+ 1, c+ b -> a! b", put(lax.scatter_add, "clip"), PUT_ARGUMENTS, once=0),
    Case("scatter-sub", "a! b, # 1, # b -> a! b", put(lax.scatter_sub), PUT_ARGUMENTS),
    Case("scatter-mul", "a! b, # 1, # b -> a! b", put(lax.scatter_mul), PUT_ARGUMENTS),
    Case("scatter-max", "a! b, # 1, # b -> a! b", put(lax.scatter_max), PUT_ARGUMENTS),
    Case("scatter-min", "a! b, # 1, # b -> a! b", put(lax.scatter_min), PUT_ARGUMENTS),
    Case("scatter", "a! b, # 1, # b -> a! b", put(lax.scatter), PUT_ARGUMENTS),
    Case(
        "scatter-add",
        "# # a, b+ #, b+ a -> # # a",
        shaped(lambda x, i, u: lax.scatter_add(x, i, u, SCATTER((1,), (0, 1), (0, 1)))),
        (normal(4, 6, 8), integers(4, 10, 2), normal(10, 8)),
        once=0,
    ),
    Case(
        "scatter-add",
        "# a, b+ 1, b+ # a -> # a",
        shaped(lambda x, i, u: lax.scatter_add(x, i, u, SCATTER((1, 2), (), (0,)))),
        (normal(10, 8), integers(7, 6, 1), normal(6, 3, 8)),
        once=0,
    ),
    Case(
        "scatter",
        "# #, # #, # # -> # #",
        shaped(lambda x, i, u: lax.scatter(x, i, u, SCATTER((1,), (0,), (0, 1)))),
        (normal(10, 8), integers(5, 6, 2), normal(6, 3)),
    ),
    Case(
        "scatter-add",
        "a b!, a c+ 1, a c+ -> a b!",
        shaped(lambda x, i, u: lax.scatter_add(x, i, u, SCATTER((), (1,), (1,), (0,), (0,)))),
        (normal(4, 10), integers(10, 4, 6, 1), normal(4, 6)),
        once=0,
    ),
    pointwise("mul", jnp.multiply, normal(4, 6), normal(4, 6)),
    pointwise("tanh", jnp.tanh, normal(4, 6)),
    pointwise("erf_inv", lax.erf_inv, normal(4, 6) / 9),
    pointwise("digamma", lax.digamma, positive(4, 6)),
    pointwise("lgamma", lax.lgamma, positive(4, 6)),
    pointwise("integer_pow", lambda x: x**3, normal(4, 6)),
]

LINALG = lax.linalg
TABLE_CASES = [
    Case("cumsum", "a # b -> a # b", shaped(lambda x: lax.cumsum(x, axis=1)), (X,)),
    Case("cumsum", "# a b -> # a b", shaped(lambda x: lax.cumsum(x, axis=0, reverse=True)), (X,)),
    Case("cumprod", "a # b -> a # b", shaped(lambda x: lax.cumprod(x, axis=1)), (X,)),
    Case("cummax", "a # b -> a # b", shaped(lambda x: lax.cummax(x, axis=1)), (X,)),
    Case("cummin", "a # b -> a # b", shaped(lambda x: lax.cummin(x, axis=1)), (X,)),
    Case("cumlogsumexp", "a # b -> a # b", shaped(lambda x: lax.cumlogsumexp(x, axis=1)), (X,)),
    Case("cholesky", "a # # -> a # #", shaped(lambda x: LINALG.cholesky(x, symmetrize_input=False)), (matrices(6),)),
    Case(
        "triangular_solve",
        "a # #, a # # -> a # #",
        shaped(lambda x, y: LINALG.triangular_solve(x, y, left_side=True, lower=True)),
        (matrices(6), normal(6, 4, 2)),
    ),
    Case("lu", "a # # -> a # #, a #, a #", shaped(LINALG.lu), (matrices(6),)),
    Case(
        "qr", "a b # # -> a b # #, a b # #", shaped(lambda x: LINALG.qr(x, full_matrices=False)), (normal(2, 6, 5, 3),)
    ),
    Case("householder_product", "a # #, a # -> a # #", shaped(LINALG.householder_product), (matrices(6), normal(6, 4))),
    Case("eigh", "a # # -> a # #, a #", shaped(lambda x: LINALG.eigh(x, symmetrize_input=False)), (matrices(6),)),
    Case("eig", "a # # -> a #, a # #, a # #", shaped(LINALG.eig), (matrices(6),)),
    Case("svd", "a # # -> a #, a # #, a # #", shaped(LINALG.svd), (normal(6, 5, 3),)),
    Case("schur", "a # # -> a # #, a # #", shaped(LINALG.schur), (matrices(6),)),
    Case("hessenberg", "a # # -> a # #, a #", shaped(LINALG.hessenberg), (matrices(6),)),
    Case("tridiagonal", "a # # -> a # #, a #, a #, a #", shaped(LINALG.tridiagonal), (matrices(6),)),
    Case(
        "tridiagonal_solve",
        "a #, a #, a #, a # # -> a # #",
        shaped(LINALG.tridiagonal_solve),
        (normal(6, 4) / 9, positive(6, 4), normal(6, 4) / 9, normal(6, 4, 2)),
    ),
    Case(
        "lu_pivots_to_permutation",
        "a # -> a #",
        shaped(lambda x: LINALG.lu_pivots_to_permutation(x, 4)),
        (np.stack([np.arange(4)] * 6).astype(np.int32),),
    ),
    Case(
        "optimization_barrier",
        "a b c, d -> a b c, d",
        shaped(lambda x, y: lax.optimization_barrier((x, y))),
        (X, normal(10)),
    ),
    Case(
        "sharding_constraint",
        "a b c -> a b c",
        shaped(lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec("x")))),
        (X,),
    ),
    Case(
        "reshard",
        "a b c -> a b c",
        shaped(lambda x: jax.sharding.reshard(x, NamedSharding(EXPLICIT_MESH, PartitionSpec("x")))),
        (X,),
    ),
    Case("device_put", "a b c -> a b c", shaped(jax.device_put), (X,)),
    Case("top_k", "a b # -> a b #, a b #", shaped(lambda x: lax.top_k(x, 3)), (X,)),
    Case("approx_top_k", "a b # -> a b #, a b #", shaped(lambda x: lax.approx_max_k(x, 3)), (X,)),
    Case("iota", "-> a b", lambda shape: lax.broadcasted_iota(jnp.int32, shape, 1), (), (4, 6), counts_positions=True),
    Case("random_bits", ". -> a b", shaped(lambda k: jax.random.bits(k, (4, 6))), (KEY,), counts_positions=True),
    Case(
        "random_bits",
        "a -> a b c",
        shaped(jax.vmap(lambda k: jax.random.bits(k, (4, 6)))),
        (jax.random.split(KEY, 8),),
        counts_positions=True,
    ),
    Case("random_bits", ". -> # #", shaped(lambda k: jax.random.bits(k, (4, 6))), (jax.random.key(0, impl="rbg"),)),
    Case("random_split", ". -> #", shaped(lambda k: jax.random.split(k, 4)), (KEY,)),
    Case("random_fold_in", "., . -> .", shaped(jax.random.fold_in), (KEY, np.uint32(1))),
    Case("random_seed", ". -> .", shaped(jax.random.key), (np.uint32(1),)),
    Case("random_unwrap", ". -> #", shaped(jax.random.key_data), (KEY,)),
    Case("random_wrap", "# -> .", shaped(jax.random.wrap_key_data), (np.zeros(2, np.uint32),)),
    Case("random_clone", ". -> .", shaped(jax.random.clone), (KEY,)),
    Case(
        "rng_bit_generator",
        "# -> #, # #",
        shaped(lambda k: lax.rng_bit_generator(k, (4, 6))),
        (np.zeros(4, np.uint32),),
    ),
    Case(
        "rng_uniform", "., . -> # #", shaped(lambda a, b: lax.rng_uniform(a, b, (4, 6))), (np.float32(0), np.float32(1))
    ),
    pointwise("bessel_i0e", lax.bessel_i0e, normal(4, 6)),
    pointwise("bessel_i1e", lax.bessel_i1e, normal(4, 6)),
    pointwise("igamma", lax.igamma, positive(4, 6), positive(4, 6)),
    pointwise("igammac", lax.igammac, positive(4, 6), positive(4, 6)),
    pointwise("igamma_grad_a", lax.igamma_grad_a, positive(4, 6), positive(4, 6)),
    pointwise("regularized_incomplete_beta", lax.betainc, *[positive(4, 6)] * 2, positive(4, 6) / 9),
    Case("reduce_window_max", "a # b -> a # b", shaped(max_pool), (X,)),
    Case("reduce_window_min", "a # b -> a # b", shaped(lambda x: lax.reduce_window(x, jnp.inf, lax.min, **POOL)), (X,)),
    Case("reduce_window_sum", "a # b -> a # b", shaped(lambda x: lax.reduce_window(x, 0.0, lax.add, **POOL)), (X,)),
    Case(
        "reduce_window_sum",
        "# a # -> # a #",
        shaped(
            lambda x: lax.reduce_window(
                x, 0.0, lax.add, (1, 1, 1), (1, 1, 1), ((1, -1), (0, 0), (0, 0)), base_dilation=(1, 1, 2)
            )
        ),
        (X,),
    ),
    Case(
        "reduce_window",
        "a # b, . -> a # b",
        shaped(lambda x: lax.reduce_window(x, np.float32(1), lambda a, b: a * b + a, **POOL)),
        (X,),
    ),
    Case(
        "select_and_scatter_add",
        "a # b, a # b -> a # b",
        shaped(lambda g, x: jax.vjp(max_pool, x)[1](g)[0]),
        (normal(4, 2, 8), X),
    ),
    Case(
        "select_and_gather_add",
        "a # b, a # b -> a # b",
        shaped(lambda t, x: jax.jvp(max_pool, (x,), (t,))[1]),
        (normal(4, 6, 8), X),
    ),
    Case(
        "threefry2x32",
        "., ., a b, a b -> a b, a b",
        shaped(threefry2x32_p.bind),
        (*[np.uint32(7)] * 2, *[integers(99, 4, 6).astype(np.uint32)] * 2),
    ),
    Case("reshape", "a b c -> ab c", reshape, (X,), (24, 8)),
    Case("reshape", "ab c -> a 1 b c", reshape, (normal(24, 8),), (4, 1, 6, 8)),
    Case("reshape", "a bc 1 -> ab c", reshape, (normal(4, 8, 1),), (8, 4)),
    Case("reshape", "a b c -> ba c", lambda shape, x: lax.reshape(x, shape, (1, 0, 2)), (X,), (24, 8)),
    Case("reshape", "a# # -> a# #", reshape, (normal(6, 4),), (4, 6)),
]

CASES = SHARDY_CASES + TABLE_CASES
