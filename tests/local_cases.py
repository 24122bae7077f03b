"""Equations with rules written by hand, and the comparison of their pieces with the whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from autopar.cluster import Mesh
from autopar.graph.ir import Factor, FactorKind, Operator, Phase, Rule, Source
from autopar.plan import Axes
from autopar.schedule.local_ops import check_local, run_local
from autopar.schedule.local_params import site_of
from tests.shards import to_shard

SUM, MAX, MIN = FactorKind.SUM, FactorKind.MAX, FactorKind.MIN
LOOKUP, SCATTER, BLOCKED = FactorKind.LOOKUP, FactorKind.SCATTER, FactorKind.BLOCKED
MESHES = {
    "2x4": Mesh(("a", "b"), (2, 4)),
    "8": Mesh(("a",), (8,)),
    "2x2x2": Mesh(("a", "b", "c"), (2, 2, 2)),
}
COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,  # compile fast
    "xla_llvm_disable_expensive_passes": True,
    "xla_allow_excess_precision": False,  # a value rounded to bfloat16 shall stay so
}


@dataclass(frozen=True)
class Case:
    """One equation with whole operands and results, and its rule."""

    label: str
    operator: Operator
    operands: tuple[Any, ...]
    results: tuple[Any, ...]


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def integers(low: int, high: int, *shape: int, dtype: str = "int32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), dtype)


Call = tuple[Callable[..., Any], tuple[Any, ...]]


def equations_of(calls: list[Call]) -> list[list[tuple[Any, list[Any], list[Any]]]]:
    """For each call of a function, its equations, inner calls opened, with the values of their operands and results."""
    jaxprs = [jax.make_jaxpr(function)(*arguments) for function, arguments in calls]
    equations: list[list[Any]] = [[] for _ in calls]

    def interpret(inner: Any, inputs: list[Any], number: int, values: list[Any]) -> list[Any]:
        environment = dict(zip(inner.jaxpr.invars, inputs, strict=True))
        environment |= dict(zip(inner.jaxpr.constvars, inner.consts, strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, jax.extend.core.Literal):
                return jnp.asarray(atom.val, atom.aval.dtype)
            return environment[atom]

        for equation in inner.jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            body = equation.params.get("jaxpr" if equation.primitive.name == "jit" else "call_jaxpr")
            if body is not None:
                results = interpret(body, operands, number, values)
            else:
                results = equation.primitive.bind(*operands, **equation.params)
                results = results if equation.primitive.multiple_results else [results]
                equations[number].append(equation)
                values.append((operands, list(results)))
            environment |= dict(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in inner.jaxpr.outvars]

    def program(inputs: list[list[Any]]) -> list[list[Any]]:
        values: list[list[Any]] = [[] for _ in calls]
        for number, (jaxpr, leaves) in enumerate(zip(jaxprs, inputs, strict=True)):
            interpret(jaxpr, leaves, number, values[number])
        return values

    leaves = [jax.tree.leaves(arguments) for _, arguments in calls]
    values = jax.jit(program, compiler_options=COMPILER_OPTIONS)(leaves)
    return [
        [(equation, *both) for equation, both in zip(equations[number], values[number], strict=True)]
        for number in range(len(calls))
    ]


def parse_rule(text: str, equation: Any, kinds: dict[str, FactorKind], sizes: dict[str, int]) -> Rule:
    """``"i(jk),k->ij"``: a letter is a factor, parentheses are a dimension of several, a dot one of none."""

    def dims_of(term: str) -> list[str]:
        dims, inside = [], None
        for char in term:
            if char == "(":
                inside = ""
            elif char == ")":
                dims.append(inside)
                inside = None
            elif inside is not None:
                inside += char
            else:
                dims.append("" if char == "." else char)
        return dims

    left, right = text.split("->")
    operands = [dims_of(term) for term in left.split(",")] if equation.invars else []
    results = [dims_of(term) for term in right.split(",")]
    sizes = dict(sizes)
    for variable, dims in zip((*equation.invars, *equation.outvars), (*operands, *results), strict=True):
        assert len(dims) == len(variable.aval.shape), (text, variable.aval)
        for dim, extent in zip(dims, variable.aval.shape, strict=True):
            if len(dim) == 1:
                assert sizes.setdefault(dim, extent) == extent, (text, dim)
    names = sorted(sizes)
    number = {name: index for index, name in enumerate(names)}
    as_numbers = lambda terms: tuple(tuple(tuple(number[f] for f in dim) for dim in dims) for dims in terms)  # noqa: E731
    factors = tuple(Factor(sizes[name], kinds.get(name, FactorKind.PARALLEL)) for name in names)
    return Rule(factors, as_numbers(operands), as_numbers(results))


@dataclass(frozen=True)
class Spec:
    """The first equation of primitive ``name`` in ``call``, with a rule for :func:`parse_rule`."""

    name: str
    rule: str
    call: Call
    kinds: dict[str, FactorKind]
    sizes: dict[str, int]


Sizes = dict[str, int]


def spec(
    name: str, rule: str, function: Callable[..., Any], *arguments: Any, sizes: Sizes | None = None, **kinds: Any
) -> Spec:
    return Spec(name, rule, (function, arguments), kinds, sizes or {})


def cases_of(specs: list[Spec]) -> list[Case]:
    cases = []
    for one, equations in zip(specs, equations_of([one.call for one in specs]), strict=True):
        equation, operands, results = next(found for found in equations if found[0].primitive.name == one.name)
        operator = operator_of(equation, parse_rule(one.rule, equation, one.kinds, one.sizes))
        cases.append(Case(f"{one.name} {one.rule}", operator, tuple(operands), tuple(results)))
    return cases


def operator_of(equation: Any, rule: Rule) -> Operator:
    count = len(equation.invars)
    operands, results = tuple(range(count)), tuple(range(count, count + len(equation.outvars)))
    source = Source("test", 0)
    return Operator(0, equation.primitive.name, equation, operands, results, rule, 0.0, 0.0, Phase.FORWARD, source)


def strategies_of(case: Case, mesh: Mesh, most: int) -> list[tuple[Axes, ...]]:
    """Executable strategies that cut something; the sample is fixed by the case's label."""
    count = len(case.operator.rule.factors)
    found = []
    for choice in itertools.product(range(-1, count), repeat=len(mesh.axis_names)):
        strategy = tuple(
            tuple(axis for axis, factor in zip(mesh.axis_names, choice, strict=True) if factor == index)
            for index in range(count)
        )
        if any(strategy) and check_local(case.operator, strategy, mesh) is None:
            found.append(strategy)
    return random.Random(case.label).sample(found, min(most, len(found)))


def assert_local_equals_whole(cases: list[Case], mesh: Mesh, most: int) -> int:
    """Run all (case, strategy) pairs in one compiled program and compare with the whole equations; returns how many."""
    devices = np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
    jobs = [(case, strategy) for case in cases for strategy in strategies_of(case, mesh, most)]
    sites = [site_of(case.operator.equation, case.operator.rule, strategy, mesh) for case, strategy in jobs]

    def visible(x: jax.Array) -> jax.Array:
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    def program(whole: list[tuple[jax.Array, ...]]) -> list[list[jax.Array]]:
        outputs = []
        for (case, strategy), site, operands in zip(jobs, sites, whole, strict=True):
            shards = [to_shard(x, piece.layout, mesh) for x, piece in zip(operands, site.operands, strict=True)]
            results = run_local(case.operator, case.operator.equation, shards, strategy, mesh)
            partial_axes = site.results[0].layout.partial
            outputs.append([visible(lax.psum(y, partial_axes) if partial_axes else y) for y in results])
        return outputs

    out_specs = [[P(*piece.layout.dims) for piece in site.results] for site in sites]
    sharded = jax.shard_map(
        program, mesh=jax.sharding.Mesh(devices, mesh.axis_names), in_specs=P(), out_specs=out_specs, check_vma=False
    )
    got = jax.jit(sharded, compiler_options=COMPILER_OPTIONS)([case.operands for case, _ in jobs])
    for (case, strategy), outputs in zip(jobs, got, strict=True):
        for output, wanted in zip(outputs, case.results, strict=True):
            exact = case.operator.primitive in EXACT
            assert_close(output, visible(wanted), f"{case.label} with {strategy} on {mesh}", exact=exact)
    return len(jobs)


EXACT = ("iota", "gather", "reduce_max", "reduce_min", "sort", "reshape", "transpose", "concatenate", "pad")


def assert_close(got: jax.Array, wanted: jax.Array, where: str, *, exact: bool = False) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), where
    tolerance = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 3e-2, "float16": 1e-3, "complex64": 1e-5}.get(
        str(wanted.dtype)
    )
    got, wanted = np.asarray(got), np.asarray(wanted)
    if tolerance is None:
        np.testing.assert_array_equal(got, wanted, err_msg=where)
        return
    wide = "complex128" if wanted.dtype.kind == "c" else "float64"
    got, wanted = got.astype(wide), wanted.astype(wide)
    if exact:
        np.testing.assert_array_equal(got, wanted, err_msg=where)
        return
    # Where large bfloat16 summands cancel, rounding each partial sum costs a last digit of the summands.
    scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0) if tolerance > 1e-2 else 1.0
    np.testing.assert_allclose(got, wanted, tolerance, scale * min(tolerance, 2**-8), err_msg=where)


def elementwise_specs() -> list[Spec]:
    x, y, positive = normal(8, 16), normal(8, 16, seed=1), jnp.abs(normal(8, 16)) + 0.5
    n, m = integers(0, 100, 8, 16), integers(1, 20, 8, 16)
    unary = [
        ("exp", x), ("log", positive), ("tanh", x), ("logistic", x), ("rsqrt", positive), ("sqrt", positive),
        ("sin", x), ("cos", x), ("erf", x), ("neg", x), ("sign", x), ("floor", x), ("is_finite", x), ("abs", x),
        ("square", x), ("log1p", positive), ("expm1", x), ("population_count", n),
    ]  # fmt: skip
    binary = [
        ("add", x, y), ("sub", x, y), ("mul", x, y), ("div", x, positive), ("max", x, y), ("min", x, y),
        ("pow", positive, y), ("eq", n, m), ("lt", x, y), ("and", n, m), ("or", n, m), ("xor", n, m), ("rem", n, m),
        ("shift_left", n, m), ("nextafter", x, y), ("atan2", x, y),
    ]  # fmt: skip
    names = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
    specs = [spec(name, "ij->ij", getattr(lax, name), arg) for name, arg in unary]
    specs += [spec(name, "ij,ij->ij", getattr(lax, names.get(name, name)), p, q) for name, p, q in binary]
    return [
        *specs,
        spec("integer_pow", "ij->ij", lambda x: lax.integer_pow(x, 3), x),
        spec("mul", "ij,->ij", lambda x: x * 2.0, x),
        spec("convert_element_type", "ij->ij", lambda x: x.astype(jnp.bfloat16), x),
        spec("reduce_precision", "ij->ij", lambda x: lax.reduce_precision(x, 8, 3), x),
        spec("bitcast_convert_type", "ij->ij", lambda x: lax.bitcast_convert_type(x, jnp.int32), x),
        spec("select_n", "ij,ij,ij->ij", lambda x, y: lax.select(x > y, x, y), x, y),
        spec("select_n", ",ij,ij->ij", lax.select_n, jnp.asarray(True), x, y),
        spec("clamp", ",ij,->ij", lambda x: lax.clamp(-0.5, x, 0.5), x),
        spec("exp2", "ij->ij", lax.exp2, x),
        spec("optimization_barrier", "ij,kl->ij,kl", lambda x, y: lax.optimization_barrier((x, y)), x, y),
    ]


def shape_specs() -> list[Spec]:
    x, y = normal(8, 16), normal(8, 16, seed=1)
    return [
        spec("broadcast_in_dim", "j->ij", lambda b: jnp.broadcast_to(b, (8, 16)), normal(16)),
        spec("broadcast_in_dim", "->ij", lambda: lax.broadcast_in_dim(jnp.float32(2), (8, 16), ())),
        spec("broadcast_in_dim", "i.->ij", lambda x: lax.broadcast_in_dim(x, (8, 16), (0, 1)), normal(8, 1)),
        spec("reshape", "i(jk)->ijk", lambda x: x.reshape(8, 8, 2), x, sizes={"j": 8, "k": 2}),
        spec("reshape", "ijk->i(jk)", lambda x: x.reshape(8, 32), normal(8, 8, 4)),
        spec("reshape", "ij->(ij)", lambda x: x.reshape(-1), x),
        spec("reshape", "ij->(ji)", lambda x: lax.reshape(x, (128,), (1, 0)), x),
        spec("reshape", "i->i.", lambda x: x.reshape(8, 1), normal(8)),
        spec("transpose", "ijk->kij", lambda x: x.transpose(2, 0, 1), normal(4, 8, 16)),
        spec("squeeze", "i.j->ij", lambda x: lax.squeeze(x, (1,)), normal(8, 1, 8)),
        spec("slice", "i.->i.", lambda x: x[:, 2:10:2], x),
        spec("dynamic_slice", "i.,,->i.", lambda x, s: lax.dynamic_slice(x, (s, s), (8, 4)), x, jnp.int32(3)),
        spec(
            "dynamic_update_slice", "i.,i.,,->i.",
            lambda x, u, s: lax.dynamic_update_slice(x, u, (s, s)), x, normal(8, 4, seed=3), jnp.int32(5),
        ),
        spec("pad", "i.,->i.", lambda x: lax.pad(x, 1.5, ((0, 0, 0), (2, 1, 1))), x),
        spec("concatenate", "i.,i.->i.", lambda x, y: lax.concatenate([x, y], 1), x, y),
        spec("split", "i.->i.,i.", lambda x: lax.split(x, (4, 12), 1), x),
        spec("rev", "i.->i.", lambda x: lax.rev(x, (1,)), x),
        spec("tile", "ij->i(rj)", lambda x: lax.tile(x, (1, 8)), x, sizes={"r": 8}),
        spec("stack", "ij,ij->i.j", lambda x, y: lax.stack([x, y], 1), x, y),
        spec("copy", "ij->ij", jnp.copy, x),
        spec("iota", "->ij", lambda: lax.broadcasted_iota(jnp.int32, (8, 16), 1)),
        spec("iota", "->ij", lambda: lax.broadcasted_iota(jnp.float32, (16, 8), 0)),
        spec("iota", "->i", lambda: lax.iota(jnp.bfloat16, 4096)),
        spec("iota", "->i", lambda: lax.iota(jnp.uint8, 256)),
    ]  # fmt: skip


def reduction_specs() -> list[Spec]:
    x = normal(8, 16)
    strange = x.at[0, 3].set(jnp.nan).at[1].set(-jnp.inf).at[2, 15].set(jnp.inf).at[3, 9].set(-jnp.nan)
    mask, n = x > 0.3, integers(0, 9, 8, 16)
    lhs, rhs = normal(4, 8, 16), normal(4, 16, 8, seed=1)
    image, kernel = normal(8, 8, 5, 5), normal(16, 8, 3, 3, seed=1)
    conv = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    return [
        spec("reduce_sum", "ij->i", lambda x: lax.reduce_sum(x, (1,)), x, j=SUM),
        spec("reduce_sum", "ij->", lambda x: lax.reduce_sum(x, (0, 1)), n, i=SUM, j=SUM),
        spec("reduce_max", "ij->i", lambda x: lax.reduce_max(x, (1,)), x, j=MAX),
        spec("reduce_max", "ij->i", lambda x: lax.reduce_max(x, (1,)), strange, j=MAX),
        spec("reduce_max", "ij->j", lambda x: lax.reduce_max(x, (0,)), strange.astype(jnp.bfloat16), i=MAX),
        spec("reduce_min", "ij->i", lambda x: lax.reduce_min(x, (1,)), -strange, j=MIN),
        spec("reduce_min", "ij->j", lambda x: lax.reduce_min(x, (0,)), strange.astype(jnp.float16), i=MIN),
        spec("reduce_min", "ij->j", lambda x: lax.reduce_min(x, (0,)), n, i=MIN),
        spec("reduce_and", "ij->i", lambda x: lax.reduce_and(x, (1,)), mask, j=MIN),
        spec("reduce_or", "ij->i", lambda x: lax.reduce_or(x, (1,)), mask, j=MAX),
        spec("reduce_prod", "ij->i", lambda x: lax.reduce_prod(x, (1,)), x, j=BLOCKED),
        spec("argmax", "ij->i", lambda x: lax.argmax(x, 1, jnp.int32), x, j=BLOCKED),
        spec("argmin", "ij->j", lambda x: lax.argmin(x, 0, jnp.int32), x, i=BLOCKED),
        spec("cumsum", "ij->ij", lambda x: lax.cumsum(x, 1), x, j=BLOCKED),
        spec("cummax", "ij->ij", lambda x: lax.cummax(x, 0, reverse=True), x, i=BLOCKED),
        spec("cumprod", "ij->ij", lambda x: lax.cumprod(x, 1), x, j=BLOCKED),
        spec("cumlogsumexp", "ij->ij", lambda x: lax.cumlogsumexp(x, 1), x, j=BLOCKED),
        spec("sort", "ij,ij->ij,ij", lambda x, n: lax.sort((x, n), dimension=1), x, n, j=BLOCKED),
        spec("top_k", "i.->i.,i.", lambda x: lax.top_k(x, 3), x),
        spec("dot_general", "ij,jk->ik", jnp.matmul, x, normal(16, 8, seed=2), j=SUM),
        spec("dot_general", "bij,bjk->bik", jnp.matmul, lhs, rhs, j=SUM),
        spec(
            "dot_general", "ij,kj->ik", lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))),
            x.astype(jnp.bfloat16), normal(8, 16, dtype="bfloat16"), j=SUM,
        ),
        spec("conv_general_dilated", "nc..,oc..->no..", conv, image, kernel, c=SUM),
        spec(
            "conv_general_dilated", "n(gi)..,(go).hw->n(go)..", partial(conv, feature_group_count=8),
            image, normal(16, 1, 3, 3), sizes={"g": 8, "i": 1, "o": 2},
        ),
        spec(
            "conv_general_dilated", "(bn)c..,(bo)chw->n(bo)..", partial(conv, batch_group_count=4),
            normal(16, 8, 5, 5), kernel, sizes={"b": 4, "n": 4, "o": 4}, c=SUM, h=BLOCKED, w=BLOCKED,
        ),
        spec(
            "reduce_window_sum", "nc..->nc..",
            lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"), image,
        ),
        spec(
            "reduce_window_max", "nc..->nc..",
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"), image,
        ),
        spec("fft", "i.->i.", lambda x: lax.fft(x, "FFT", (16,)), x.astype(jnp.complex64)),
        spec("cholesky", "b..->b..", lambda x: lax.linalg.cholesky(x, symmetrize_input=False),
                  jnp.broadcast_to(jnp.eye(3) * 4 + 1, (8, 3, 3))),
    ]  # fmt: skip


def take(mode: str, table: jax.Array, rows: jax.Array) -> jax.Array:
    """``lax.gather`` of rows itself: ``jnp`` would change the type of the indices first."""
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lax.gather(table, rows[:, None], numbers, (1, table.shape[1]), mode=mode)


def add(mode: str, table: jax.Array, rows: jax.Array, updates: jax.Array) -> jax.Array:
    """``lax.scatter_add`` to rows itself."""
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lax.scatter_add(table, rows[:, None], updates, numbers, mode=mode)


def indexing_specs() -> list[Spec]:
    table, rows = normal(16, 8), integers(-3, 20, 8)
    wild = rows.at[0].set(-(2**31)).at[1].set(2**31 - 1)
    embed = "vd,s.->sd"
    small = jnp.asarray([0, 1, 17, 56, 100, 101, 126, 127], jnp.int8)
    scores = normal(8, 16)
    labels = integers(0, 18, 8)
    pick = lambda t, i: jnp.take_along_axis(t, i[:, None], 1)  # noqa: E731
    pair = lambda t, i, j: t.at[i, j].get(mode="fill", fill_value=7.0, wrap_negative_indices=False)  # noqa: E731
    updates = normal(8, 8, seed=5)
    spread = "vd,s.,sd->vd"
    write = lambda t, i, u: t.at[i].set(u, mode="drop", wrap_negative_indices=False)  # noqa: E731
    distinct = jnp.asarray([3, 15, 0, 22, 7, -2, 8, 11])
    return [
        *(spec("gather", embed, partial(take, mode), table, wild, v=LOOKUP) for mode in ("clip", "fill")),
        spec("gather", embed, partial(take, "promise_in_bounds"), table, integers(0, 16, 8), v=LOOKUP),
        spec("gather", embed, partial(take, "fill"), integers(0, 9, 16, 8), wild, v=LOOKUP),
        spec("gather", embed, partial(take, "fill"), integers(0, 9, 16, 8, dtype="uint8"), wild, v=LOOKUP),
        spec("gather", embed, partial(take, "clip"), table, integers(0, 256, 8, dtype="uint8"), v=LOOKUP),
        spec("gather", embed, partial(take, "fill"), table, wild.astype(jnp.uint32), v=LOOKUP),
        spec("gather", embed, partial(take, "clip"), table, wild.astype(jnp.uint32), v=LOOKUP),
        spec("gather", embed, partial(take, "clip"), normal(512, 4), small, v=LOOKUP),
        spec("gather", embed, partial(take, "fill"), normal(400, 4), small.astype(jnp.uint8), v=LOOKUP),
        spec("gather", embed, partial(take, "fill"), normal(512, 4), small, v=LOOKUP),
        spec("gather", "vw,s.->s", pair, table, rows, integers(-1, 10, 8, seed=1), v=LOOKUP, w=LOOKUP),
        spec("gather", "bv,b..->b.", pick, scores, labels, v=LOOKUP),
        *(spec("scatter-add", spread, partial(add, mode), table, wild, updates, v=SCATTER, s=SUM)
          for mode in ("clip", "drop", "promise_in_bounds")),
        spec("scatter-add", spread, partial(add, "drop"), normal(400, 8), small.astype(jnp.uint8),
                  updates, v=SCATTER, s=SUM),
        spec("scatter-sub", spread, lambda t, i, u: t.at[i].subtract(u), table, rows, updates, v=SCATTER, s=SUM),
        spec("scatter-mul", spread, lambda t, i, u: t.at[i].multiply(u), table, rows, updates,
                  v=SCATTER, s=BLOCKED),
        spec("scatter-max", spread, lambda t, i, u: t.at[i].max(u), table, rows, updates, v=SCATTER, s=MAX),
        spec("scatter-min", spread, lambda t, i, u: t.at[i].min(u), table, rows, updates, v=SCATTER, s=MIN),
        spec("scatter", spread, write, table, distinct, updates, v=SCATTER, s=BLOCKED),
        spec("scatter", spread, write, integers(0, 99, 16, 8), distinct, integers(0, 99, 8, 8, seed=7),
                  v=SCATTER, s=BLOCKED),
        spec("scatter-add", "bv,b..,b.->bv", jax.grad(lambda t, i: pick(t, i).sum()), scores, labels, v=SCATTER),
    ]  # fmt: skip


def random_specs() -> list[Spec]:
    key, keys = jax.random.key(7), jax.random.split(jax.random.key(8), 8)
    bits = lambda dtype, shape, key: jax.random.bits(key, shape, dtype)  # noqa: E731
    return [
        *(spec("random_bits", "->ij", partial(bits, dtype, (8, 16)), key) for dtype in ("uint8", "uint16", "uint32")),
        spec("random_bits", "->ijk", partial(bits, "uint32", (8, 3, 8)), key),
        spec("random_bits", "b->bij", jax.vmap(partial(bits, "uint32", (4, 8))), keys),
        spec("random_bits", "->ij", partial(bits, "uint32", (8, 16)), jax.random.key(3, impl="rbg")),
        spec("random_split", "->i", lambda k: jax.random.split(k, 16), key),
        spec("random_split", "b->bi", jax.vmap(lambda k: jax.random.split(k, 4)), keys),
        spec("random_fold_in", "b,->b", jax.vmap(lambda k: jax.random.fold_in(k, 5)), keys),
        spec("random_wrap", "b.->b", jax.random.wrap_key_data, jax.random.key_data(keys)),
        spec("random_unwrap", "b->b.", jax.random.key_data, keys),
    ]


def wide_specs() -> list[Spec]:
    """What differs when 64-bit types are on."""
    x, table = normal(8, 16, dtype="float64"), normal(16, 8, dtype="float64")
    index = integers(-3, 20, 8, dtype="int64")
    updates = normal(8, 8, dtype="float64", seed=1)
    return [
        spec("random_bits", "->ij", lambda k: jax.random.bits(k, (8, 16), "uint64"), jax.random.key(1)),
        spec("iota", "->i", lambda: lax.iota(jnp.int64, 64)),
        spec("iota", "->i", lambda: lax.iota(jnp.float64, 64)),
        spec("dot_general", "ij,jk->ik", jnp.matmul, x, table, j=SUM),
        spec("reduce_max", "ij->i", lambda x: lax.reduce_max(x, (1,)), x, j=MAX),
        spec("reduce_min", "ij->i", lambda x: lax.reduce_min(x, (1,)), x.at[0, 9].set(jnp.nan), j=MIN),
        spec("gather", "vd,s.->sd", partial(take, "fill"), table, index.at[0].set(2**40), v=LOOKUP),
        spec("gather", "vd,s.->sd", partial(take, "clip"), table, index.at[0].set(2**32 + 1), v=LOOKUP),
        spec(
            "scatter-add",
            "vd,s.,sd->vd",
            partial(add, "drop"),
            table,
            index.at[0].set(2**32 + 1),
            updates,
            v=SCATTER,
            s=SUM,
        ),
    ]
