"""State, batch and keys are recognised by structure and data flow, whatever the containers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import TraceError
from autopar.graph.roles import Role, infer_roles
from autopar.graph.tracing import trace

f32 = jnp.float32
PARAMS = {"w": np.ones((4, 3), np.float32), "b": np.zeros(3, np.float32)}
X, Y = np.ones((8, 4), np.float32), np.ones((8, 3), np.float32)


def loss_of(params, x, y):
    return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def sgd(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def roles_of(function, *args, options=None, **kwargs):
    """Roles by path and state pairs by paths."""
    program = trace(function, args, kwargs)
    roles = infer_roles(program, **(options or {}))
    by_path = dict(zip(program.in_paths, roles.roles, strict=True))
    pairs = {(program.in_paths[i], program.out_paths[o]) for i, o in roles.state_pairs}
    return by_path, pairs, roles


def paths(by_path, role):
    return {path for path, own in by_path.items() if own is role}


def adam_state(apply_fn=lambda p, x: x @ p["w"] + p["b"]):
    return TrainState.create(apply_fn=apply_fn, params=PARAMS, tx=optax.chain(optax.clip(1.0), optax.adam(1e-3)))


def test_train_state_whose_optimizer_object_differs():
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state.params, batch["x"], batch["y"])
        new = state.apply_gradients(grads=grads)
        return new.replace(tx=optax.adam(1e-3)), {"loss": loss}  # another treedef

    by_path, pairs, roles = roles_of(step, adam_state(), {"x": X, "y": Y})
    assert paths(by_path, Role.BATCH) == {"batch['x']", "batch['y']"}
    assert roles.batch_size == 8
    assert len(pairs) == 8
    assert {(i, i.replace("state", "result[0]", 1)) for i, _ in pairs} == pairs
    assert paths(by_path, Role.STATE) == {i for i, _ in pairs}


@pytest.mark.parametrize("swapped", [False, True])
def test_params_and_optimizer_state_apart(swapped):
    tx = optax.adam(1e-3)

    def step(params, opt_state, x, y, *, rate):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, jax.tree.map(lambda u: u * rate, updates))
        return (opt_state, params, loss) if swapped else (params, opt_state, loss)

    by_path, pairs, roles = roles_of(step, PARAMS, tx.init(PARAMS), X, Y, rate=0.5)
    first = "result[1]" if swapped else "result[0]"
    assert ("params['w']", f"{first}['w']") in pairs
    assert ("opt_state[0].mu['w']", f"result[{int(not swapped)}][0].mu['w']") in pairs
    assert len(pairs) == 7
    assert by_path["rate"] is Role.OTHER
    assert roles.leaves(Role.BATCH) == (7, 8)


def test_gradients_are_not_the_next_parameters():
    def grads_first(params, x, y):
        grads = jax.grad(lambda p: loss_of(p, x, y) + 0.1 * (p["w"] ** 2).sum())(params)
        return grads, sgd(params, grads)

    _, pairs, _ = roles_of(grads_first, PARAMS, X, Y)
    assert pairs == {("params['w']", "result[1]['w']"), ("params['b']", "result[1]['b']")}

    def only_grads(params, x, y):
        return jax.value_and_grad(loss_of)(params, x, y)

    by_path, pairs, roles = roles_of(only_grads, PARAMS, X, Y)
    assert not pairs
    assert roles.batch_size == 8
    assert by_path["params['w']"] is Role.OTHER


def test_average_and_parameters_are_told_apart():
    def step(ema, params, x, y):
        params = sgd(params, jax.grad(loss_of)(params, x, y))
        ema = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, ema, params)
        return {"params": params, "ema": ema}

    _, pairs, _ = roles_of(step, PARAMS, PARAMS, X, Y)
    assert ("params['w']", "result['params']['w']") in pairs
    assert ("ema['w']", "result['ema']['w']") in pairs


def test_lone_arrays():
    def step(m, w, x, y, rate):
        grads = jax.grad(lambda w: (((x @ w) - y) ** 2).mean())(w)
        m = 0.9 * m + grads
        w = w - rate * m
        return w, m, x @ w, {"loss": ((x @ w - y) ** 2).mean(), "rate": rate}

    by_path, pairs, _ = roles_of(step, np.ones((4, 3), np.float32), np.ones((4, 3), np.float32), X, Y, 0.1)
    assert pairs == {("m", "result[1]"), ("w", "result[0]")}  # predictions are shaped like y, yet y is no state
    assert by_path["y"] is Role.BATCH
    assert by_path["rate"] is Role.OTHER

    _, pairs, _ = roles_of(lambda count, x: (count + 1, x.sum()), 3, X)
    assert pairs == {("count", "result[0]")}


def test_state_carried_through_a_loop_and_a_reset():
    def steps(params, xs, ys):
        def body(params, batch):
            return sgd(params, jax.grad(loss_of)(params, *batch)), loss_of(params, *batch)

        return jax.lax.scan(body, params, (xs, ys))

    _, pairs, roles = roles_of(steps, PARAMS, X[None].repeat(5, 0), Y[None].repeat(5, 0))
    assert len(pairs) == 2
    assert roles.batch_size == 5

    _, pairs, _ = roles_of(lambda params: jax.tree.map(jnp.zeros_like, params), PARAMS)
    assert len(pairs) == 2


class Carry(NamedTuple):
    params: dict
    batch: dict
    count: int


def test_subtrees_of_one_argument():
    def step(carry):
        params = sgd(carry.params, jax.grad(loss_of)(carry.params, carry.batch["x"], carry.batch["y"]))
        return {"new": params, "count": carry.count + 1}

    by_path, pairs, roles = roles_of(step, Carry(PARAMS, {"x": X, "y": Y}, 0))
    assert ("carry.params['w']", "result['new']['w']") in pairs
    assert ("carry.count", "result['count']") in pairs
    assert paths(by_path, Role.BATCH) == {"carry.batch['x']", "carry.batch['y']"}
    assert roles.batch_size == 8


def test_nnx_split_state():
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, x):
        model = nnx.merge(graphdef, params, rest)
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        return sgd(params, grads), rest, loss

    by_path, pairs, _ = roles_of(step, params, rest, X)
    assert paths(by_path, Role.STATE) == {p for p in by_path if p != "x"}
    assert len(pairs) == len(by_path) - 1
    assert by_path["x"] is Role.BATCH


# ---------------------------------------------------------------------------------------------------------- keys


def test_keys_typed_raw_and_looped():
    def step(params, typed, raw, looped, codes, x):
        typed, sub = jax.random.split(typed)
        noise = jax.random.normal(sub, x.shape) + jax.random.uniform(jax.random.split(raw[1])[0], x.shape)
        many = jax.lax.scan(lambda c, k: (c + jax.random.normal(k, ()), None), 0.0, looped)[0]
        grads = jax.grad(lambda p: loss_of(p, x + noise, Y) * many * codes.sum())(params)
        return sgd(params, grads), typed

    raw = np.ones((3, 2), np.uint32)
    looped = np.ones((5, 2), np.uint32)
    by_path, _, roles = roles_of(step, PARAMS, jax.random.key(0), raw, looped, np.ones((8, 2), np.uint32), X)
    assert paths(by_path, Role.KEY) == {"typed", "raw", "looped"}
    assert paths(by_path, Role.BATCH) == {"codes", "x"}
    assert roles.batch_size == 8


def test_a_key_inside_the_state_is_state():
    def step(state, x):
        key, sub = jax.random.split(state["key"])
        noise = jax.random.normal(sub, x.shape)
        return {"p": state["p"] + (x * noise).sum(), "key": key}, noise.sum()

    by_path, pairs, _ = roles_of(step, {"p": np.ones(3, np.float32), "key": jax.random.key(0)}, X)
    assert paths(by_path, Role.STATE) == {"state['p']", "state['key']"}
    assert len(pairs) == 2


# --------------------------------------------------------------------------------------------------------- batch


def test_evaluation_hidden_and_broadcast_inputs():
    table = jnp.ones((3, 500))

    def evaluate(params, x, y, scale):
        return loss_of(params, x * scale, y) + table.sum()

    by_path, pairs, roles = roles_of(evaluate, PARAMS, X, Y, np.ones((1, 4), np.float32))
    assert not pairs
    assert roles.batch_size == 8
    assert by_path["scale"] is Role.OTHER
    assert by_path["params['w']"] is Role.OTHER
    assert by_path["<closure>[0]"] is Role.HIDDEN


def test_ambiguity_names_the_leaves():
    def step(params, x, table):
        return sgd(params, {"w": x.sum() * table.sum() * params["w"], "b": params["b"]})

    table = np.ones((100, 4), np.float32)
    with pytest.raises(TraceError, match=r"x: float32\[8,4\], table: float32\[100,4\].*batch_argnums"):
        roles_of(step, PARAMS, X, table)
    with pytest.raises(TraceError, match=r"d\['x'\].*d\['y'\]"):
        roles_of(lambda d: d["x"].sum() + d["y"].sum(), {"x": X, "y": table})
    for said in ((1,), "x", 1, [-2]):
        by_path, _, roles = roles_of(step, PARAMS, X, table, options={"batch_argnums": said})
        assert paths(by_path, Role.BATCH) == {"x"}
        assert by_path["table"] is Role.OTHER
        assert roles.batch_size == 8
    _, _, roles = roles_of(step, PARAMS, X, table, options={"batch_argnums": ()})
    assert roles.batch_size is None
    with pytest.raises(TraceError, match=r"differ in their leading size.*table"):
        roles_of(step, PARAMS, X, table, options={"batch_argnums": ("x", "table")})
    with pytest.raises(TraceError, match=r"batch_argnums names 'z', but the arguments are params, x, table"):
        roles_of(step, PARAMS, X, table, options={"batch_argnums": "z"})


def test_explicit_state_and_batch_overrule_structure():
    def denoise(x, noise):
        return x - noise  # shaped and computed like an update of x

    by_path, _, _ = roles_of(denoise, X, X)
    assert by_path["x"] is Role.STATE
    by_path, pairs, _ = roles_of(denoise, X, X, options={"batch_argnums": (0, 1)})
    assert paths(by_path, Role.BATCH) == {"x", "noise"}
    assert not pairs

    def power(a, v):
        return a @ v

    by_path, pairs, _ = roles_of(power, np.eye(4), np.ones(4), options={"state_argnums": "v"})
    assert pairs == {("v", "result")}
    with pytest.raises(TraceError, match=r"state_argnums.*x: float32\[8,4\]"):
        roles_of(lambda x: x.sum(), X, options={"state_argnums": 0})


def test_optimizer_step_alone_has_no_batch():
    by_path, pairs, roles = roles_of(sgd, PARAMS, PARAMS)
    assert len(pairs) == 2
    assert roles.batch_size is None
    assert by_path["grads['w']"] is Role.OTHER


tree = st.recursive(
    st.sampled_from([(), (3,), (2, 5), (4, 4)]),
    lambda child: st.dictionaries(st.sampled_from("abcd"), child, min_size=1, max_size=3)
    | st.tuples(child, child),
    max_leaves=6,
)  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(tree.filter(lambda t: isinstance(t, dict)), min_size=1, max_size=3), st.permutations(range(3)))
def test_any_updated_trees_are_paired_with_equal_paths(shapes, order):
    """However states are nested and wherever they return, each leaf is paired with its own update."""
    is_shape = lambda t: isinstance(t, tuple) and all(isinstance(n, int) for n in t)  # noqa: E731
    states = [jax.tree.map(lambda s: np.ones(s, np.float32), t, is_leaf=is_shape) for t in shapes]
    order = [i for i in order if i < len(states)]

    def step(*args):
        *states, x = args
        new = [jax.tree.map(lambda p, i=i: p * (i + 2.0) + x.sum(), s) for i, s in enumerate(states)]
        return [new[i] for i in order], x.sum() > 0

    program = trace(step, (*states, np.ones((6, 7), np.float32)))
    roles = infer_roles(program)
    assert len(roles.state_pairs) == len(program.in_keys) - 1
    for i, o in roles.state_pairs:
        argument = int(program.in_keys[i][0][len("args[") : -1])
        assert program.out_keys[o] == ("result", "[0]", f"[{order.index(argument)}]", *program.in_keys[i][1:])
    assert roles.roles[-1] is Role.BATCH
    assert roles.batch_size == 6
