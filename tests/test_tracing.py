"""The traced program computes what the function computes, is flat, and errors say what to do."""

from __future__ import annotations

import inspect
import time
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import _compat
from autopar.errors import TraceError
from autopar.graph.inline import inline
from autopar.graph.tracing import flatten_call, trace

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"}


def all_equations(jaxpr):
    for equation in _compat.jaxpr_of(jaxpr).eqns:
        yield equation
        if equation.primitive.name not in CONTROL_FLOW:
            continue  # what other primitives (custom_linear_solve) hold is theirs
        for inner in _compat.inner_jaxprs(equation):
            yield from all_equations(inner)


def names(jaxpr):
    return [equation.primitive.name for equation in all_equations(jaxpr)]


CONTROL_FLOW = {"scan", "while", "cond"}


def assert_same_program(function, *args):
    """The original and the flat program agree on the arguments; nothing call-like is left."""
    leaves = jax.tree.leaves(args)
    program = trace(function, args)
    assert not CALLS & set(names(program.jaxpr))
    assert not _compat.consts_of(program.jaxpr)
    expected = jax.tree.leaves(jax.jit(function, compiler_options=QUICK)(*args))
    found = jax.jit(jex.jaxpr_as_fun(program.jaxpr), compiler_options=QUICK)(*leaves, *program.hidden)
    for a, b in zip(expected, found, strict=True):
        assert jax.typeof(a) == jax.typeof(b)  # shape, dtype, weak type
        if not _compat.is_key_dtype(a.dtype):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    return program


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(jnp.cos(x) * ct, -0.1, 0.1),))

TABLE = np.linspace(0, 1, 32 * 32, dtype=np.float32).reshape(32, 32)


@jax.jit
def closes_over_table(x):
    return jnp.tanh(x @ TABLE + 0.5)


def writes_through_a_reference(x):
    ref = jax.new_ref(x)
    ref[0] += 1.0

    def body(i, _):
        ref[i] = jax.jit(jnp.sin)(ref[i]) * TABLE[0]

    jax.lax.fori_loop(0, 3, body, None)
    return ref[...]


FUNCTIONS = {
    "reference": writes_through_a_reference,
    "nested_jit": jax.jit(lambda y: jax.jit(jnp.sin)(y) * 2 + jax.jit(jnp.sin)(y + 1)),
    "custom_jvp": lambda x: jax.nn.relu(x) + jax.nn.logsumexp(x, axis=-1, keepdims=True),
    "custom_vjp": jax.grad(lambda x: clipped(jax.jit(clipped)(x)).sum()),
    "remat": jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.cos(closes_over_table(y))))(x).sum()),
    "scan": lambda x: jax.lax.scan(lambda c, r: (closes_over_table(c) * r, c.sum()), x, jnp.arange(3.0)),
    "scan_grad": jax.grad(
        lambda x: jax.lax.scan(lambda c, r: (closes_over_table(c) * r, None), x, jnp.arange(3.0))[0].sum()
    ),
    "scan_remat": jax.grad(
        lambda x: jax.lax.scan(jax.checkpoint(lambda c, r: (closes_over_table(c) * r, None)), x, jnp.ones(3))[0].sum()
    ),
    "while": lambda x: jax.lax.while_loop(
        lambda s: (closes_over_table(s[1]).sum() < 1e6) & (s[0] < 4),
        lambda s: (s[0] + 1, closes_over_table(s[1])),
        (0, x),
    ),
    "fori": lambda x: jax.lax.fori_loop(0, 4, lambda i, y: closes_over_table(y) + i, x),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, closes_over_table, lambda y: y * TABLE[0], x),
    "switch": lambda x: jax.lax.switch(1, [jnp.sin, closes_over_table, lambda y: y + 1], x),
    "vmap": jax.vmap(lambda row: jax.lax.cond(row.sum() > 0, jnp.sin, jnp.cos, closes_over_table(row))),
    "vmap_scan": jax.vmap(lambda row: jax.lax.scan(lambda c, r: (jax.nn.gelu(c) + r, c), row, jnp.arange(3.0))),
    "outputs_repeat": lambda x: (x, x, 3.0, jax.jit(lambda y: (y, y))(x)),
    "indexing": lambda x: (jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1), x.at[0].add(1.0), jnp.cumsum(x)),
    "solve": lambda x: jnp.linalg.solve(x.T @ x + jnp.eye(32), jnp.ones(32)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inlining_keeps_values(name):
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    assert_same_program(FUNCTIONS[name], x)


def test_costly_work_that_stands_twice_is_done_once():
    def function(x, y):
        first, second = (jnp.concatenate([x, y]) for _ in range(2))
        other = jnp.concatenate([x, y], axis=1)
        return first @ first.T, second @ x.T, jnp.sin(x) + jnp.sin(x), jnp.sin(y), x + y, x + y, other

    x, y = np.ones((4, 8), np.float32), np.full((4, 8), 2, np.float32)
    found = names(assert_same_program(function, x, y).jaxpr)
    assert [found.count(name) for name in ("concatenate", "sin", "dot_general", "add")] == [2, 2, 2, 3]


def test_what_is_drawn_through_a_reference_is_not_done_once():
    def function(x):
        ref = jax.new_ref(x)
        first = ref[...]
        ref[...] = first + 1.0
        return first, ref[...]

    assert_same_program(function, np.ones(4, np.float32))


def test_dropout_and_keys_keep_values():
    def step(key, raw, x):
        key, sub = jax.random.split(key)
        kept = jax.random.bernoulli(sub, 0.5, x.shape)
        return key, jnp.where(kept, x, 0) + jax.random.normal(raw, x.shape)

    assert_same_program(step, jax.random.key(1), jax.random.PRNGKey(2), np.ones((4, 8), np.float32))


UNARY = [jnp.sin, jax.nn.relu, jax.jit(jnp.cos), clipped, jax.checkpoint(jnp.tanh), lambda x: x * TABLE[0, :8]]


def combined(x, plan):
    for kind, choice in plan:
        function = UNARY[choice]
        if kind == "call":
            x = function(x)
        elif kind == "scan":
            x = jax.lax.scan(lambda c, _, f=function: (f(c), None), x, None, length=2)[0]
        elif kind == "cond":
            x = jax.lax.cond(x.sum() > 0, function, lambda y: y, x)
        elif kind == "jit":
            x = jax.jit(lambda y, f=function: f(y) + f(y * 2))(x)
        else:
            x = jax.grad(lambda y, f=function: f(y).sum())(x)
    return x


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(["call", "scan", "cond", "jit", "grad"]), st.integers(0, 5)), max_size=5))
def test_any_nesting_keeps_values(plan):
    assert_same_program(partial(combined, plan=plan), np.linspace(-1, 1, 8, dtype=np.float32))


# --------------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    width: int
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x, deterministic):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=2)(y, mask=nn.make_causal_mask(x[..., 0]))
        x = x + nn.Dropout(self.dropout)(y, deterministic=deterministic)
        y = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
        return x + nn.Dense(self.width)(nn.gelu(y))


class GPT(nn.Module):
    vocabulary: int = 64
    width: int = 16
    layers: int = 1
    remat: bool = False

    @nn.compact
    def __call__(self, tokens, deterministic=False):
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        block = nn.remat(Block, static_argnums=(2,)) if self.remat else Block
        for _ in range(self.layers):
            x = block(self.width)(x, deterministic)
        return nn.Dense(self.vocabulary, use_bias=False)(nn.LayerNorm()(x))


def gpt_step(state, batch, key):
    def loss_of(params):
        logits = state.apply_fn({"params": params}, batch["inputs"], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def gpt_arguments(**options):
    model = GPT(**options)
    tokens = np.random.default_rng(0).integers(0, 64, (4, 8)).astype(np.int32)
    shapes = jax.eval_shape(model.init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, tokens)["params"]
    params = jax.tree.map(lambda leaf: np.random.default_rng(1).normal(0, 0.1, leaf.shape).astype(leaf.dtype), shapes)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return state, {"inputs": tokens, "labels": np.roll(tokens, -1, 1)}, jax.random.key(3)


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.verify), True])
def test_flax_train_step(remat):
    arguments = gpt_arguments(remat=remat)
    program = assert_same_program(gpt_step, *arguments)
    assert ("optimization_barrier" in names(program.jaxpr)) == remat
    assert "state.params['Dense_0']['kernel']" in program.in_paths
    assert "result[0].params['Dense_0']['kernel']" in program.out_paths
    assert "batch['inputs']" in program.in_paths
    assert "key" in program.in_paths
    stacks = {_compat.name_stack_text(e) for e in _compat.jaxpr_of(program.jaxpr).eqns}
    assert any("transpose(jvp(GPT))" in s for s in stacks)
    assert any(s.startswith("jvp(GPT)") for s in stacks)
    if remat:
        assert any("checkpoint" in s and "rematted_computation" in s for s in stacks)


def test_nnx_step():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(8, 16, rngs=rngs)
            self.second = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.first(x)))

    model = Model(nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    def step(state, x, y):
        def loss_of(state):
            return ((nnx.merge(graphdef, state)(x) - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    x, y = np.ones((4, 8), np.float32), np.ones((4, 4), np.float32)
    assert_same_program(step, state, x, y)

    def in_place(model, x, y):
        def loss_of(model):
            return ((model(x) - y) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        optimizer.update(model, grads)
        return loss

    with pytest.raises(TraceError, match=r"nnx\.split[\s\S]*nnx\.merge"):
        trace(in_place, (model, x, y))
    trace(lambda model, x: model(x), (model, x))  # reading is fine


# ---------------------------------------------------------------------------------------------- regions, sources


def test_remat_barrier_only_where_jax_lowers_one():
    def loss(x, prevent):
        return jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)), prevent_cse=prevent)(x).sum()

    x = np.ones(4, np.float32)
    for function, wanted in (
        (lambda x: loss(x, True), 0),
        (jax.grad(lambda x: loss(x, True)), 1),
        (jax.grad(lambda x: loss(x, False)), 0),
    ):
        found = names(trace(function, (x,)).jaxpr).count("optimization_barrier")
        assert found == wanted == jax.jit(function).lower(x).as_text().count("optimization_barrier")


def test_remat_survives_compilation():
    def loss(x):
        return jax.checkpoint(lambda y: jnp.sin(jnp.sin(jnp.sin(y))))(x).sum()

    x = np.ones(4, np.float32)
    program = trace(jax.grad(loss), (x,))
    regenerated = jax.jit(jex.jaxpr_as_fun(program.jaxpr)).lower(x).as_text()
    assert regenerated.count("stablehlo.sine") == jax.jit(jax.grad(loss)).lower(x).as_text().count("stablehlo.sine")


def test_dead_code_goes_and_effects_stay():
    def function(x):
        jnp.exp(x) @ jnp.ones((4, 4))
        jax.debug.print("{}", x[0])
        return jax.lax.scan(lambda c, _: (c + 1, jnp.tan(c)), x, None, length=2)[0]

    found = names(trace(function, (np.ones(4, np.float32),)).jaxpr)
    assert not {"exp", "dot_general", "tan"} & set(found)
    assert any("print" in name or "callback" in name for name in found)


def test_user_shardings_of_an_inner_jit_become_constraints():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    inner = jax.jit(jnp.sin, in_shardings=sharding, out_shardings=sharding)
    flat = inline(jax.make_jaxpr(lambda x: inner(x) + 1)(np.ones(4, np.float32)))
    assert names(flat) == ["sharding_constraint", "sin", "sharding_constraint", "add"]
    assert flat.eqns[0].params["sharding"] == sharding


def test_source_lines_are_the_users_own():
    def first(x):
        return jnp.where(x > 0, x, 0.0)  # traced and cached here

    def second(x):
        return jnp.where(x > 0, x, 0.0)  # must not point at the line above

    def inner(x):
        return jnp.tanh(x)

    def function(x):
        y = first(x) + second(x)
        return jax.lax.fori_loop(0, 3, lambda _, c: jax.jit(inner)(c), y)

    program = trace(function, (np.ones(7, np.float32),))
    start = {f: inspect.getsourcelines(f)[1] for f in (first, second, inner)}
    found = [(e.primitive.name, _compat.user_source(e)) for e in all_equations(program.jaxpr)]
    assert all(Path(file).samefile(__file__) for _, (file, _) in found)
    lines = [line for name, (_, line) in found if name == "select_n"]
    assert lines == [start[first] + 1, start[second] + 1]
    assert [line for name, (_, line) in found if name == "tanh"] == [start[inner] + 1]


def test_library_frames_are_skipped():
    program = trace(gpt_step, gpt_arguments())
    files = {_compat.user_source(e)[0] for e in _compat.jaxpr_of(program.jaxpr).eqns}
    others = {f for f in files if not Path(f).samefile(__file__)}
    assert not any(_compat.is_jax_file(f) or "flax" in f for f in others)
    assert len(others) <= 1  # jax 0.12 does not record who called optax.bias_correction, which is inlined by JAX itself


def test_names_stacks_nest():
    def function(x):
        with jax.named_scope("outer"):

            def body(c, _):
                with jax.named_scope("body"):
                    return jax.jit(jnp.sin)(c), None

            return jax.lax.scan(body, x, None, length=2)[0]

    stacks = {e.primitive.name: _compat.name_stack_text(e) for e in all_equations(trace(function, (1.0,)).jaxpr)}
    assert stacks["scan"] == "outer"
    assert stacks["sin"] == "outer/body"


# ------------------------------------------------------------------------------------------------ arguments, leaves


def test_traces_once_with_paths_weak_types_and_statics():
    calls = []

    def function(a, *more, flag=True, **extra):
        calls.append(flag)
        return {"sum": a["w"] + extra["b"][0], "rest": more}

    arguments = ({"w": np.ones((2, 3), np.float64)}, 2, jax.ShapeDtypeStruct((4,), jnp.bfloat16))
    program = trace(function, arguments, {"flag": False, "b": (jax.random.normal(jax.random.key(0), ()),)},
                    static_argnames="flag")  # fmt: skip
    assert calls == [False]
    assert program.in_paths == ("a['w']", "more[0]", "more[1]", "b[0]")
    assert program.out_paths == ("result['rest'][0]", "result['rest'][1]", "result['sum']")
    assert program.static == (("flag", False),)
    assert [a.str_short() for a in program.out_avals][1:] == ["bfloat16[4]", "float32[2,3]"]
    assert program.in_avals[1].weak_type
    assert not program.in_avals[0].weak_type
    assert jax.tree.unflatten(program.out_tree, range(3)) == {"sum": 2, "rest": (0, 1)}


@pytest.mark.parametrize("how", [{"static_argnums": 1}, {"static_argnums": -1}, {"static_argnames": ("n",)}])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_static_by_number_or_name(how, by_keyword):
    def function(x, n):
        return x * n if isinstance(n, int) else None

    args, kwargs = ((1.0,), {"n": 3}) if by_keyword else ((1.0, 3), {})
    program = trace(function, args, kwargs, **how)
    assert program.static == (("n", 3),)
    assert program.in_paths == ("x",)
    assert jex.jaxpr_as_fun(program.jaxpr)(2.0)[0] == 6.0


def test_flatten_call_rebuilds_the_call():
    def function(a, n, b):
        return a, n, b

    call = flatten_call(function, ([1, 2], "mode"), {"b": {"k": 3}}, static_argnums=1)
    assert call.leaves == (1, 2, 3)
    assert call.paths == ("a[0]", "a[1]", "b['k']")
    assert call.rebuild([10, 20, 30]) == (([10, 20], "mode"), {"b": {"k": 30}})


def test_closed_over_arrays_become_hidden_inputs():
    large = jnp.arange(1000.0)
    key = jax.random.key(5)
    scalar = jnp.float32(2.0)

    def function(x):
        inner = jax.jit(lambda y: y + large)
        return (
            inner(x) * scalar
            + jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]
            + (jax.random.normal(key, ()))
        )

    program = trace(function, (jnp.zeros(1000),))
    assert program.in_paths == ("x", *(f"<closure>[{i}]" for i in range(len(program.hidden))))
    assert sorted(str(h.dtype) for h in program.hidden) == ["float32", "key<fry>"]
    assert sum(h is large for h in program.hidden) == 1
    assert len(program.in_avals) == len(_compat.jaxpr_of(program.jaxpr).invars) == 3
    found = jex.jaxpr_as_fun(program.jaxpr)(jnp.ones(1000), *program.hidden)[0]
    np.testing.assert_allclose(found, function(jnp.ones(1000)), rtol=1e-6)


# --------------------------------------------------------------------------------------------------------- errors


def refuses(pattern, function, *args, **options):
    with pytest.raises(TraceError, match=pattern):
        trace(function, args, **options)


def test_errors_name_the_leaf_and_the_fix():
    refuses(r"config\['mode'\] is of type str.*static_argnames='config'", lambda config: config, {"mode": "fast"})
    refuses("'n' is of type list, which cannot be hashed", lambda x, n: x + n, 1.0, [1], static_argnums=1)
    refuses(r"returns str at result\['a'\]", lambda _: {"a": "text"}, 1.0)
    refuses("missing a required argument", lambda x, y: x + y, 1.0)
    refuses(r"axis name 'batch'[\s\S]*drop", lambda x: jax.lax.pmean(x, "batch"), 1.0)
    refuses(r"axis name 'i'", lambda x: jax.lax.all_gather(x, "i"), 1.0)


def test_tracers_of_outer_transformations_are_refused():
    def as_argument(x):
        refuses("x is a value of an outer transformation", lambda x: x, x)
        return x

    def as_closure(x):
        refuses("closes over a value of an outer transformation", lambda y: y + x, 1.0)
        refuses("closes over", jax.jit(lambda z: z + x), 1.0)
        return x

    jax.jit(as_argument)(1.0)
    jax.grad(as_closure)(1.0)


def test_errors_of_the_function_pass_through():
    def wrong(x):
        return undefined_name + x  # noqa: F821

    with pytest.raises(NameError, match="undefined_name"):
        trace(wrong, (1.0,))
    with pytest.raises(jax.errors.ConcretizationTypeError):
        trace(lambda x: 1.0 if x > 0 else 2.0, (1.0,))


# ---------------------------------------------------------------------------------------------------------- speed


def test_inlining_is_linear_and_fast():
    function = jax.jit(lambda x: jax.nn.gelu(x) + jnp.where(x > 0, x, 0.0))

    def deep(x):
        for _ in range(1200):
            x = function(x)
        return x

    closed = jax.make_jaxpr(deep)(jnp.ones(4))
    inline(closed)
    start = time.process_time()
    flat = inline(closed)
    seconds = time.process_time() - start
    assert len(flat.eqns) > 12_000
    assert seconds < 3.0  # about 0.3 s on an idle machine
