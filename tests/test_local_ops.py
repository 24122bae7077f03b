"""Every operator, cut in every way that its rule allows, leaves pieces (or summands) of the true result."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from autopar.graph.ir import Factor, Rule
from autopar.graph.rules import rules_for
from autopar.plan import Axes
from autopar.schedule.local_ops import check_local, positions, run_local
from autopar.schedule.local_params import LocalError
from tests.local_cases import (
    BLOCKED,
    LOOKUP,
    MESHES,
    MIN,
    SCATTER,
    SUM,
    Case,
    Spec,
    assert_local_equals_whole,
    cases_of,
    elementwise_specs,
    equations_of,
    indexing_specs,
    integers,
    normal,
    operator_of,
    random_specs,
    reduction_specs,
    shape_specs,
    spec,
    strategies_of,
    wide_specs,
)

MOST_OF_ONE_PRIMITIVE = 5
STRUCTURED = (shape_specs, reduction_specs, indexing_specs, random_specs)


@pytest.fixture(scope="module")
def pointwise() -> list[Case]:
    return cases_of(elementwise_specs())


@pytest.fixture(scope="module")
def structured() -> list[Case]:
    return cases_of([one for specs in STRUCTURED for one in specs()])


def test_pieces_of_pointwise_operators(pointwise: list[Case]) -> None:
    assert assert_local_equals_whole(pointwise, MESHES["2x4"], 2) == 2 * len(pointwise)


@pytest.mark.parametrize(
    ("name", "most"),
    [pytest.param("2x4", 5, marks=pytest.mark.verify), ("8", 1), pytest.param("2x2x2", 2, marks=pytest.mark.verify)],
)
def test_pieces_of_structured_operators(name: str, most: int, structured: list[Case]) -> None:
    mesh = MESHES[name]
    assert all(strategies_of(case, mesh, 1) for case in structured)
    assert_local_equals_whole(structured, mesh, most)


def test_pieces_with_64_bits() -> None:
    with jax.enable_x64(True):
        assert assert_local_equals_whole(cases_of(wide_specs()), MESHES["2x4"], 12) > 30


def attention_step(params: dict[str, jax.Array], tokens: jax.Array, key: jax.Array) -> Any:
    """A decoder in miniature: embedding, causal attention with dropout, a tied head, cross entropy, all gradients."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        x = params["table"][tokens]
        x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * params["scale"]
        q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], 8, 2).swapaxes(1, 2) for y in (q, k, v))
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        causal = lax.broadcasted_iota(jnp.int32, (8, 8), 0) >= lax.broadcasted_iota(jnp.int32, (8, 8), 1)
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), -1)
        weights = jnp.where(jax.random.bernoulli(key, 0.9, weights.shape), weights / 0.9, 0.0)
        x += jnp.einsum("bhqk,bhkd->bhqd", weights, v).swapaxes(1, 2).reshape(x.shape)
        x += jax.nn.gelu(x @ params["up"]) @ params["up"].T
        logits = (x @ params["table"].T).astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        smooth = (jax.nn.one_hot(tokens, 32) * logits).sum(-1)
        return -chosen.mean() + smooth.mean() * 0.1

    return jax.value_and_grad(loss)(params)


def image_step(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> Any:
    """A convolutional classifier in miniature, with all gradients and a step of momentum."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        x = lax.conv_general_dilated(images, params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
        x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = x.reshape(x.shape[0], -1) @ params["dense"]
        return jax.nn.logsumexp(logits, -1).sum() - logits[jnp.arange(8), labels].sum()

    value, gradients = jax.value_and_grad(loss)(params)
    hits = (jnp.argmax(params["dense"], -1) == 0).sum()
    return value, hits, jax.tree.map(lambda p, g: p - 0.1 * jnp.clip(g, -1, 1), params, gradients)


@pytest.fixture(scope="module")
def program_cases() -> list[Case]:
    """Distinct equations of whole training steps, some of each primitive, with the rules that planning uses."""
    params = {"table": normal(32, 16), "qkv": normal(16, 48) * 0.1, "up": normal(16, 32), "scale": jnp.ones(16)}
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens, images = integers(0, 32, 8, 8), normal(8, 4, 4, 8)
    weights = {"conv": normal(3, 3, 8, 8), "dense": normal(32, 16)}
    found: dict[str, tuple[Any, list[Any], list[Any]]] = {}
    for equations in equations_of([
        (attention_step, (params, tokens, jax.random.key(1))),
        (attention_step, (half, tokens, jax.random.key(1))),
        (image_step, (weights, images, integers(0, 16, 8))),
    ]):  # fmt: skip
        for equation, operands, results in equations:
            name = equation.primitive.name
            label = f"{name} {[str(v.aval) for v in (*equation.invars, *equation.outvars)]} {equation.params}"
            if sum(other.startswith(f"{name} ") for other in found) < MOST_OF_ONE_PRIMITIVE:
                found.setdefault(label, (equation, operands, results))
    rules = rules_for([equation for equation, _, _ in found.values()], "cpu")
    return [
        Case(label, operator_of(equation, rule), tuple(operands), tuple(results))
        for (label, (equation, operands, results)), rule in zip(found.items(), rules, strict=True)
    ]


@pytest.mark.verify
def test_pieces_of_training_steps(program_cases: list[Case]) -> None:
    names = {case.operator.primitive for case in program_cases}
    assert names >= {"gather", "scatter-add", "random_bits", "iota", "dot_general", "reduce_max", "reduce_window_max"}
    assert assert_local_equals_whole(program_cases, MESHES["2x4"], 2) > len(program_cases)


def test_rules_of_planning_can_be_executed(program_cases: list[Case]) -> None:
    """Whatever a rule lets the planner cut, where the factor is major in every dimension that has it, runs."""
    mesh = MESHES["2x4"]
    for case in program_cases:
        rule = case.operator.rule
        for index, factor in enumerate(rule.factors):
            leading = all(
                index not in factors or all(rule.factors[f].size == 1 for f in factors[: factors.index(index)])
                for dims in (*rule.operands, *rule.results)
                for factors in dims
            )
            if factor.kind is not BLOCKED and factor.size % 4 == 0 and leading:
                strategy = tuple(("b",) if index == other else () for other in range(len(rule.factors)))
                assert check_local(case.operator, strategy, mesh) is None, case.label


def refusal(one: Spec, **axes_of_factor: str) -> str | None:
    """Why the strategy that cuts the named factors by the axes in the given string is refused."""
    (case,) = cases_of([one])
    names = sorted({*one.sizes, *(char for char in one.rule if char.isalpha())})
    strategy = tuple(tuple(axes_of_factor.get(name, "")) for name in names)
    return check_local(case.operator, strategy, MESHES["2x4"])


MATRIX = jax.ShapeDtypeStruct((8, 16), "float32")


@pytest.mark.parametrize(
    ("one", "cut", "sentence"),
    [
        (spec("exp", "ij->ij", lax.exp, normal(8, 16)), {"i": "ba"}, "in mesh order"),
        (spec("exp", "ij->ij", lax.exp, normal(8, 16)), {"i": "a", "j": "a"}, "may be used once"),
        (spec("exp", "ij->ij", lax.exp, normal(8, 16)), {"i": "z"}, "each axis of"),
        (spec("exp", "ij->ij", lax.exp, normal(6, 16)), {"i": "b"}, "not a multiple of 4"),
        (spec("sort", "ij->ij", lax.sort, normal(8, 16)), {"j": "a"}, "dimension 1 of .* has to be whole"),
        (spec("sort", "ij->ij", lax.sort, normal(8, 16), j=BLOCKED), {"j": "a"}, "is blocked"),
        (spec("cumsum", "ij->ij", lax.cumsum, normal(8, 16)), {"i": "b"}, "dimension 0 of .* has to be whole"),
        (spec("rev", "ij->ij", lambda x: lax.rev(x, (0,)), normal(8, 16)), {"i": "b"}, "has to be whole"),
        (spec("reshape", "ij->(ij)", lambda x: x.reshape(-1), normal(8, 16)), {"j": "b"}, "not the major factor"),
        (spec("reduce_sum", "ij->i", lambda x: lax.reduce_sum(x, (1,)), normal(8, 16)), {"j": "b"}, "no result"),
        (spec("reduce_prod", "ij->i", lambda x: lax.reduce_prod(x, (1,)), normal(8, 16), j=SUM), {"j": "b"}, "sum"),
        (spec("exp", "ij->ij", lax.exp, normal(8, 16), j=SUM), {"j": "b"}, "but a result carries it"),
        (spec("reduce_and", "ij->i", lambda x: lax.reduce_and(x, (1,)), integers(0, 9, 8, 16), j=MIN), {"j": "b"},
         "bitwise reduce_and of int32"),
        (spec("gather", "v,s.->s", lambda t, i: t[i], normal(16) > 0, integers(0, 9, 8), v=LOOKUP), {"v": "b"},
         "bool values cannot be left as partial sums"),
        (spec("gather", "v,s.->s", lambda t, i: t[i], normal(16), integers(0, 9, 8)), {"v": "b"}, "no result carries"),
        (spec("gather", "v.,s.->s", lambda t, i: lax.gather(
            t, i, lax.GatherDimensionNumbers((), (0, 1), (1,)), (1, 1)), normal(16, 4), integers(0, 4, 8, 1), v=LOOKUP),
         {"v": "b"}, "dimension 0 of .* has to be whole"),
        (spec("slice", "ij->ik", lambda x: x[:, 2:10], normal(8, 16)), {"k": "b"}, "whole"),
        (spec("dynamic_slice", "ij,,->ik", lambda x, s: lax.dynamic_slice(x, (s, s), (8, 4)), normal(8, 16),
              np.int32(1)), {"k": "b"}, "whole"),
        (spec("dynamic_update_slice", "ij,ik,,->ij", lambda x, u, s: lax.dynamic_update_slice(x, u, (s, s)),
              normal(8, 16), normal(8, 8), np.int32(1)), {"j": "b"}, "whole"),
        (spec("concatenate", "ij,ij->ik", lambda x: lax.concatenate([x, x], 1), normal(8, 16)), {"k": "b"}, "whole"),
        (spec("split", "ij->ik,ik", lambda x: lax.split(x, (8, 8), 1), normal(8, 16)), {"k": "b"}, "whole"),
        (spec("top_k", "ij->ik,ik", lambda x: lax.top_k(x, 4), normal(8, 16)), {"k": "b"}, "whole"),
        (spec("approx_top_k", "ij->ik,ik", lambda x: lax.approx_max_k(x, 4), normal(8, 16)), {"k": "b"}, "whole"),
        (spec("stack", "ij,ij,ij,ij->irj", lambda x: lax.stack([x] * 4, 1), normal(8, 16)), {"r": "b"}, "whole"),
        (spec("fft", "ij->ij", lambda x: lax.fft(x, "FFT", (16,)), normal(8, 16, dtype="complex64")), {"j": "b"},
         "whole"),
        (spec("reduce_window_sum", "ij->ij",
              lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"), normal(8, 16)), {"j": "b"},
         "whole"),
        (spec("bitcast_convert_type", "ij->ijw", lambda x: lax.bitcast_convert_type(x, np.uint8), normal(8, 16)),
         {"w": "b"}, "whole"),
        (spec("random_gamma", ",i->i", jax.random.gamma, jax.random.key(0), normal(8)), {"i": "b"}, "whole"),
        (spec("scatter-add", "v,s.,s->v", lambda t, i, u: t.at[i].add(u), normal(16), integers(0, 9, 8), normal(8)),
         {"v": "b"}, "whole"),
        (spec("scatter-add", "....,sw,s->....", lambda t, i, u: t.at[i[:, 0], i[:, 1], i[:, 2], i[:, 3]].add(u),
              normal(2, 2, 2, 2), integers(0, 2, 8, 4), normal(8), w=SUM), {"w": "b"}, "whole"),
        (spec("ragged_dot_general", "mk,gkn,g->mn", lax.ragged_dot, normal(8, 4), normal(2, 4, 4), np.int32([3, 5]),
              k=SUM), {"m": "b"}, "whole"),
        (spec("scatter-add", "v,v.,v->v", lambda t, i, u: t.at[i].add(u), normal(8), integers(0, 9, 8), normal(8),
              v=SCATTER), {"v": "b"}, "whole"),
        (spec("exp", "i(jk)->i(jk)", lax.exp, normal(8, 16), sizes={"j": 8, "k": 1}), {"j": "b"}, "do not make up"),
        (spec("slice", "ij->i.", lambda x: x[:, 2:], normal(8, 16)), {"j": "b"}, "no result carries"),
        (spec("pad", "ij,->ij", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0))), normal(8, 16)), {"j": "b"},
         "has to be whole"),
        (spec("conv_general_dilated", "nchw,oc..->nohw",
              lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME"), normal(1, 2, 8, 8), normal(4, 2, 3, 3)),
         {"h": "b"}, "has to be whole"),
        (spec("conv_general_dilated", "n(gi)..,(go).hw->n(go)..",
              lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=2),
              normal(1, 4, 8, 8), normal(4, 2, 3, 3), sizes={"g": 4, "i": 1, "o": 1}), {"g": "b"}, "2 groups"),
        (spec("cholesky", "bij->bij", lax.linalg.cholesky, normal(2, 4, 4) * 0 + jnp.eye(4)), {"i": "b"}, "whole"),
    ],
)  # fmt: skip
def test_strategies_that_cannot_run_are_refused(one: Spec, cut: dict[str, str], sentence: str) -> None:
    why = refusal(one, **cut)
    assert why is not None
    assert re.search(sentence, why), why
    assert one.name in why
    assert refusal(one) is None


def local_program(case: Case, strategy: tuple[Axes, ...], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    mesh = MESHES["2x4"]

    def program(*shards: jax.Array) -> list[jax.Array]:
        return run_local(case.operator, case.operator.equation, list(shards), strategy, mesh)

    devices = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), mesh.axis_names)
    return jax.shard_map(program, mesh=devices, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def test_shards_of_the_wrong_shape_are_an_internal_error() -> None:
    (case,) = cases_of([spec("exp", "ij->ij", lax.exp, normal(8, 16))])
    with pytest.raises(LocalError, match=r"internal error: exp has local operand shapes \[\(8, 16\)\].*\[\(4, 16\)\]"):
        jax.eval_shape(local_program(case, (("a",), ()), P(), [P("a")]), MATRIX)


def test_a_wrong_rule_is_found_when_the_result_has_the_wrong_shape() -> None:
    (case,) = cases_of([spec("transpose", "ij->ji", lambda x: x.T, normal(8, 16))])
    rule = Rule(case.operator.rule.factors, ((((0,), (1,))),), (((1,), ()),))
    wrong = Case(case.label, operator_of(case.operator.equation, rule), case.operands, case.results)
    sharded = local_program(wrong, ((), ("b",)), P(None, "b"), [P("b")])
    assert jax.eval_shape(sharded, MATRIX)[0].shape == (16, 8)
    rule = Rule((*case.operator.rule.factors, Factor(8)), ((((0,), (1,))),), (((1,), (2,)),))
    wrong = Case(case.label, operator_of(case.operator.equation, rule), case.operands, case.results)
    with pytest.raises(LocalError, match="internal error: transpose has local result shapes"):
        jax.eval_shape(local_program(wrong, ((), ("b",), ("a",)), P(None, "b"), [P("b", "a")]), MATRIX)


def test_user_placements_are_dropped() -> None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    specs = [
        spec("sharding_constraint", "ij->ij", lambda x: lax.with_sharding_constraint(x, here), normal(8, 16)),
        spec("device_put", "ij->ij", lambda x: jax.device_put(x, here), normal(8, 16)),
    ]
    x = np.asarray(normal(8, 16))
    for case in cases_of(specs):
        sharded = local_program(case, (("a",), ("b",)), P("a", "b"), [P("a", "b")])
        np.testing.assert_array_equal(jax.jit(sharded)(x)[0], x)


def test_shardings_in_parameters_are_dropped() -> None:
    """A program traced under a mesh of explicit axes names them in its equations."""
    (case,) = cases_of([spec("broadcast_in_dim", "j->ij", lambda x: lax.broadcast(x, (8,)), normal(16))])
    other = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("users",))
    sharding = jax.sharding.NamedSharding(other, P("users"))
    equation = case.operator.equation
    equation = equation.replace(params=equation.params | {"sharding": sharding})
    named = Case(case.label, operator_of(equation, case.operator.rule), case.operands, case.results)
    assert assert_local_equals_whole([named], MESHES["2x4"], 4) == 4


def test_generators_that_cannot_be_cut_are_run_whole() -> None:
    with jax.threefry_partitionable(False):
        cases = cases_of([spec("random_bits", "->ij", lambda k: jax.random.bits(k, (8, 16)), jax.random.key(7))])
        assert assert_local_equals_whole(cases, MESHES["2x4"], 4) == 4


def test_effects_are_kept() -> None:
    seen = []

    def show(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda part: seen.append(part.shape), x)
        return x * 2

    (equation,) = [e for e in jax.make_jaxpr(show)(MATRIX).jaxpr.eqns if e.primitive.name == "debug_callback"]
    operator = operator_of(equation, Rule((Factor(8), Factor(16)), (((0,), (1,)),), ()))
    sharded = local_program(Case("", operator, (), ()), ((), ()), P(), [])
    jax.jit(sharded)(normal(8, 16))
    jax.effects_barrier()
    assert set(seen) == {(8, 16)}


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.data())
def test_positions_are_64_bit_row_major_numbers(data: st.DataObject) -> None:
    """Also in arrays that are far too large to make: only a small piece of them is numbered."""
    shape = tuple(data.draw(st.lists(st.integers(1, 2**22), min_size=1, max_size=3)))
    extents = tuple(min(extent, 2) for extent in shape)
    starts = [data.draw(st.integers(0, whole - extent)) for whole, extent in zip(shape, extents, strict=True)]
    assume(math.prod(shape) <= 2**64)
    high, low = positions(shape, extents, list(starts))
    high, low = (np.broadcast_to(np.asarray(word), extents) for word in (high, low))
    for index in np.ndindex(*extents):
        position = 0
        for extent, start, offset in zip(shape, starts, index, strict=True):
            position = position * extent + start + offset
        assert (int(high[index]) << 32) + int(low[index]) == position
