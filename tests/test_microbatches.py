"""Is a step that runs microbatch by microbatch the same step, and is what cannot be one refused by name?"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar import _compat
from autopar.errors import BudgetError, PlanError
from autopar.graph.build import build_graph
from autopar.graph.ir import Graph
from autopar.graph.roles import Role, infer_roles
from autopar.graph.tracing import trace
from autopar.inter_op.accumulate import accumulated, folded_shape
from autopar.inter_op.examples import CoupledBatchError, cut_dim, examples_of
from autopar.inter_op.terms import MicrobatchRng
from autopar.plan import Layout, Schedule
from benchmarks.models import FAMILIES, build
from tests.test_pipeline_models import Row, refusal_of
from tests.toy_runs import eight_slow_devices, precision, run, sample

BATCH, WIDTH = 8, 6


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    shapes = {"w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "b": (WIDTH,)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def examples(rng: np.random.Generator, size: int = BATCH) -> dict[str, Any]:
    return {
        "x": rng.normal(size=(size, WIDTH)),
        "mask": (rng.random(size) < 0.7).astype(float) + 0.1,
        "label": rng.integers(0, WIDTH, size),
    }


def hidden(state: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ state["w"] + state["b"]) @ state["v"]


def mean_loss(state: Any, batch: Any) -> jax.Array:
    return jnp.mean((hidden(state, batch["x"]) - 1) ** 2)


def sum_loss(state: Any, batch: Any) -> jax.Array:
    return jnp.sum(hidden(state, batch["x"]) ** 2)


def masked_mean(state: Any, batch: Any) -> jax.Array:
    """The weight total is non-linear in a sum over the batch, but follows from the batch alone."""
    per_example = jnp.sum(hidden(state, batch["x"]) ** 2, axis=-1)
    return jnp.sum(per_example * batch["mask"]) / jnp.sum(batch["mask"])


def cross_entropy(state: Any, batch: Any) -> jax.Array:
    logits = hidden(state, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def with_positions(state: Any, batch: Any) -> jax.Array:
    """Constants along the batch are cut with it."""
    weight = jnp.arange(batch["x"].shape[0]) + 1.0
    fixed = jnp.asarray(np.linspace(0, 1, batch["x"].shape[0]))
    return jnp.sum(hidden(state, batch["x"]).sum(axis=-1) * weight * fixed)


def with_dropout(state: Any, batch: Any) -> jax.Array:
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, batch["x"].shape)
    return jnp.mean(jnp.where(kept, hidden(state, batch["x"]), 0.0) ** 2)


def with_tied_weights(state: Any, batch: Any) -> jax.Array:
    embedded = state["w"][batch["label"]]
    return optax.softmax_cross_entropy_with_integer_labels(embedded @ state["w"].T, batch["label"]).mean()


def scanned(state: Any, batch: Any) -> jax.Array:
    layers = jnp.stack([state["w"], state["v"]])
    out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), jnp.mean(x**2)), batch["x"], layers)
    return jnp.mean(out**2)


def recurrent(state: Any, batch: Any) -> jax.Array:
    """A loop whose backward pass adds up the weights' gradients from zeros."""

    def trip(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ state["w"] + x[:, None] * state["b"])
        return h, h @ state["v"]

    _, out = jax.lax.scan(trip, jnp.zeros_like(batch["x"]), batch["x"].T)
    return jnp.mean(out**2)


def iterated(state: Any, batch: Any) -> jax.Array:
    """How often a loop runs may depend on the parameters, if not on the examples."""
    trips = 2 + (jnp.sum(state["w"]) > 0)
    weight = jax.lax.stop_gradient(state["w"])
    _, out = jax.lax.while_loop(
        lambda carry: carry[0] < trips,
        lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ weight)),
        (0, jax.lax.stop_gradient(batch["x"])),
    )
    return jnp.mean((hidden(state, batch["x"]) - out) ** 2)


def rematerialised(state: Any, batch: Any) -> jax.Array:
    return jnp.mean(jax.checkpoint(hidden)(state, batch["x"]) ** 2)


def with_transposed_batch(state: Any, batch: Any) -> jax.Array:
    return jnp.mean((hidden(state, batch["x"]).T.reshape(WIDTH, -1) * batch["mask"]) ** 2)


LOSSES = (
    mean_loss,
    sum_loss,
    masked_mean,
    cross_entropy,
    with_positions,
    with_dropout,
    with_tied_weights,
    scanned,
    recurrent,
    iterated,
    rematerialised,
    with_transposed_batch,
)


def batch_normalised(state: Any, batch: Any) -> jax.Array:
    y = hidden(state, batch["x"])
    return jnp.mean(((y - y.mean(axis=0)) / jnp.sqrt(y.var(axis=0) + 1e-3) * state["b"]) ** 4)


def contrastive(state: Any, batch: Any) -> jax.Array:
    y = hidden(state, batch["x"])
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(y @ y.T)))


def capacity_routed(state: Any, batch: Any) -> jax.Array:
    """Who comes first in the batch gets the seat."""
    y = hidden(state, batch["x"])
    place = jnp.cumsum(jax.nn.one_hot(y.argmax(axis=-1), WIDTH), axis=0)
    return jnp.mean(jnp.where(place.max(axis=-1, keepdims=True) <= 3, y, 0.0) ** 2)


def reversed_neighbours(state: Any, batch: Any) -> jax.Array:
    y = hidden(state, batch["x"])
    return jnp.mean((y @ state["v"] - y[::-1]) ** 2)


def carried_along(state: Any, batch: Any) -> jax.Array:
    """A carry that begins as zeros and does not stay so is no summand, though it is added to one."""

    def trip(carry: Any, x: jax.Array) -> Any:
        count, total = carry
        return (count + 1.0, total + (jnp.sum(jnp.tanh(x * state["b"][0])) + count)), None

    (_, total), _ = jax.lax.scan(trip, (jnp.zeros(()), jnp.zeros(())), batch["x"].T)
    return total


COUPLED = (batch_normalised, contrastive, capacity_routed, reversed_neighbours, carried_along)


def step_of(loss: Any) -> Any:
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, {
            "loss": value,
            "norm": optax.tree.norm(gradients),
        }

    step.__name__ = loss.__name__
    return step


def first_state() -> Any:
    params = jax.tree.map(jnp.asarray, parameters(np.random.default_rng(0)))
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    return {"params": params, "moments": optimizer.init(params)}


def same(ours: Any, theirs: Any) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=jax.tree_util.keystr(path))


# --- the program, on one device ---------------------------------------------------------------------------------------


def in_microbatches(step: Any, state: Any, batch: Any, count: int, rng: MicrobatchRng = MicrobatchRng.EXACT) -> Any:
    """The rewritten program's results."""
    program = trace(step, (state, batch))
    roles = infer_roles(program)
    batch_leaves = roles.leaves(Role.BATCH)
    assert batch_leaves
    graph = build_graph(program.jaxpr, platform="cpu")
    found = examples_of(graph, batch_leaves, roles.leaves(Role.STATE), count, rng)
    rewritten = accumulated(program, found, batch_leaves)
    leaves = [*jax.tree.leaves((state, batch)), *program.hidden]
    for position in batch_leaves:
        leaves[position] = np.reshape(leaves[position], folded_shape(np.shape(leaves[position]), count))
    return jax.tree.unflatten(program.out_tree, jax.jit(jax.extend.core.jaxpr_as_fun(rewritten.jaxpr))(*leaves))


BY_NAME = {loss.__name__: loss for loss in LOSSES}
COUNTS = {"2": 2, "4": 4, "8": 8}
DRAWN = sample(tuple(BY_NAME), tuple(COUNTS), seed=0)


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        pytest.param(
            BY_NAME[name],
            COUNTS[count],
            id=f"{name}-{count}",
            marks=() if (name, count) in DRAWN else pytest.mark.verify,
        )
        for name in BY_NAME
        for count in COUNTS
    ],
)
def test_microbatches_give_the_numbers_of_the_whole_batch(loss: Any, count: int) -> None:
    with precision(jnp.float64):
        step, state, batch = step_of(loss), first_state(), examples(np.random.default_rng(1))
        same(in_microbatches(step, state, batch, count), jax.jit(step)(state, batch))


def drops(state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
    """A gradient under dropout with normal noise, and what was kept of each example."""

    def loss(params: Any) -> Any:
        first, second = jax.random.split(key)
        kept = jax.random.bernoulli(first, 0.5, batch["x"].shape)
        noise = jax.random.normal(second, batch["x"].shape)
        return jnp.mean(jnp.where(kept, hidden(params, batch["x"] + noise), 0.0) ** 2), jnp.where(
            kept, batch["x"], 0.0
        ).T

    gradients, kept = jax.grad(loss, has_aux=True)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), kept


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg", "unpartitionable"])
def test_random_numbers_of_every_generator_are_those_of_the_whole_batch(impl: str) -> None:
    known = impl if impl != "unpartitionable" else "threefry2x32"
    with precision(jnp.float64), jax.threefry_partitionable(impl != "unpartitionable"):
        state, batch = parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))
        key = jax.random.key(5, impl=known)
        ours = in_microbatches(lambda s, b: drops(s, b, key), state, batch, 4)
        same(ours, jax.jit(drops)(state, batch, key))


@pytest.mark.parametrize("impl", ["rbg", "unpartitionable"])
def test_a_draw_that_has_no_parts_is_made_whole(impl: str) -> None:
    """And so the planner, which plans the rewritten program, prices the whole draw."""
    with jax.threefry_partitionable(impl != "unpartitionable"):
        key = jax.random.key(5, impl="rbg" if impl == "rbg" else "threefry2x32")
        state, batch = parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))
        step = autopar.parallelize(lambda s, b: drops(s, b, key), num_microbatches=4, cluster=eight_slow_devices())
        graph = step.records(state, batch)[0].graph
        drawn = [op for op in graph.operators if op.primitive == "random_bits"]
        assert [graph.values[op.results[0]].shape for op in drawn] == [(BATCH, WIDTH)] * 2


@pytest.mark.parametrize("impl", ["threefry2x32", pytest.param("rbg", marks=pytest.mark.verify)])
def test_microbatches_draw_for_themselves_if_told_to(impl: str) -> None:
    count = 4

    def folding_in(state: Any, batch: Any, key: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array, number: int) -> Any:
            first, second = (jax.random.fold_in(one, number) for one in jax.random.split(key))
            kept = jax.random.bernoulli(first, 0.5, x.shape)
            noise = jax.random.normal(second, x.shape)
            return jnp.mean(jnp.where(kept, hidden(params, x + noise), 0.0) ** 2), jnp.where(kept, x, 0.0).T

        found = [
            jax.grad(loss, has_aux=True)(state, x, number)
            for number, x in enumerate(jnp.split(jnp.asarray(batch["x"]), count))
        ]
        mean = jax.tree.map(lambda *g: sum(g) / count, *(gradients for gradients, _ in found))
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, mean), jnp.concatenate([kept for _, kept in found], axis=1)

    with precision(jnp.float64):
        state, batch = parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))
        key = jax.random.key(5, impl=impl)
        ours = in_microbatches(lambda s, b: drops(s, b, key), state, batch, count, MicrobatchRng.PER_MICROBATCH)
        same(ours, jax.jit(folding_in)(state, batch, key))
        masks = np.split(np.asarray(ours[1]) != 0, count, axis=1)
        assert all((one != two).any() for one, two in itertools.combinations(masks, 2))
        step = autopar.parallelize(
            lambda s, b: drops(s, b, key), num_microbatches=count, rng="per_microbatch", cluster=eight_slow_devices()
        )
        same(step(jax.tree.map(jnp.array, state), batch), ours)
        same(step(jax.tree.map(jnp.array, state), batch), ours)


def test_a_draw_that_is_also_wanted_whole_stays_one_draw() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            kept = jax.random.bernoulli(jax.random.key(3), 0.5, (BATCH,)).astype(float)
            return jnp.sum(hidden(params, batch["x"]).sum(axis=-1) ** 2 * kept) / jnp.sum(kept)

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state)), {}

    with precision(jnp.float64):
        state, batch = parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))
        ours = in_microbatches(step, state, batch, 4, MicrobatchRng.PER_MICROBATCH)
        same(ours, jax.jit(step)(state, batch))


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: loss.__name__)
def test_coupled_examples_are_refused_with_the_line(loss: Any) -> None:
    with precision(jnp.float64):
        step = autopar.parallelize(num_microbatches=2, cluster=eight_slow_devices())(step_of(loss))
        with pytest.raises(
            CoupledBatchError, match=r"cannot be cut into microbatches: \w+ at .*test_microbatches.py:\d+"
        ):
            step.plan(first_state(), examples(np.random.default_rng(1)))


def test_batch_norm_of_flax_is_refused() -> None:
    model = nn.Sequential([nn.Dense(WIDTH), nn.BatchNorm(use_running_average=False), nn.Dense(WIDTH)])
    variables = model.init(jax.random.key(0), jnp.zeros((BATCH, WIDTH)))

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            out, changed = model.apply({**state, "params": params}, batch["x"], mutable=["batch_stats"])
            return jnp.mean(out**2), changed

        gradients, changed = jax.grad(loss, has_aux=True)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients), **changed}, {}

    batch = {"x": np.ones((BATCH, WIDTH), np.float32)}
    with pytest.raises(CoupledBatchError, match="depends on all examples"):
        autopar.parallelize(step, num_microbatches=2, cluster=eight_slow_devices()).plan(variables, batch)


def test_what_each_example_yields_comes_back_in_order() -> None:
    def step(state: Any, batch: Any) -> Any:
        y = hidden(state, batch["x"])
        return jax.tree.map(lambda p: p * 0.9, state), {
            "each": y.sum(axis=-1),
            "flipped": y.T,
            "sorted": jnp.sort(y[:, 0]),
        }

    with precision(jnp.float64):
        state, batch = parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))
        same(in_microbatches(step, state, batch, 4), jax.jit(step)(state, batch))


def metrics_of(state: Any, batch: Any) -> dict[str, Any]:
    """Means, sums, counts, rows, and what is made of them."""
    y = hidden(state, batch["x"])
    each = optax.softmax_cross_entropy_with_integer_labels(y, batch["label"])
    right = y.argmax(axis=-1) == batch["label"]
    return {
        "mean": each.mean(),
        "sum": each.sum(),
        "weighted": jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"]),
        "accuracy": jnp.mean(right),
        "count": jnp.sum(right),
        "per_label": jnp.zeros(WIDTH).at[batch["label"]].add(each),
        "perplexity": jnp.exp(each.mean()),
        "each": each,
        "right": right,
        "best": y.argmax(axis=-1),
        "largest": each.max(),
        "all": jnp.all(each > 0),
        "worst": jnp.argmax(each),
        "median": jnp.median(each),
        "sorted": jnp.sort(each),
        "deviation": each.std(),
    }


@pytest.mark.parametrize(
    "name", list(jax.eval_shape(metrics_of, parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))))
)
def test_metrics_are_those_of_the_whole_batch(name: str) -> None:
    """Sums are added up, rows put in order, and what needs all examples is made of them after the microbatches."""

    def step(state: Any, batch: Any) -> Any:
        gradients = jax.grad(mean_loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), {name: metrics_of(state, batch)[name]}

    with precision(jnp.float64):
        state, batch = parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))
        same(in_microbatches(step, state, batch, 4), jax.jit(step)(state, batch))


# --- independence -----------------------------------------------------------------------------------------------------


def broken_claims(
    graph: Any, forms: Mapping[int, Layout], runs: tuple[list[Any], list[Any]], example: int
) -> list[tuple[int, str]]:
    """Values whose form is belied by two runs in which one example differs: (value, what is wrong)."""
    values = [every_value(graph, leaves) for leaves in runs]
    wrong = []
    for value, form in forms.items():
        if value not in values[0] or jax.dtypes.issubdtype(values[0][value].dtype, jax.dtypes.prng_key):
            continue
        before, after = (np.asarray(one[value]) for one in values)
        dim = cut_dim(form)
        if dim is None and not form.partial and not np.array_equal(before, after):
            wrong.append((value, "is said to be whole and depends on an example"))
        elif dim is not None:
            pieces = zip(np.split(before, BATCH, axis=dim), np.split(after, BATCH, axis=dim), strict=True)
            if any(k != example and not np.array_equal(a, b) for k, (a, b) in enumerate(pieces)):
                wrong.append((value, "is said to be cut and mixes examples"))
    return wrong


def claims_and_runs(function: Any, state: Any, batch: Any, other: Any) -> tuple[Any, Any, tuple[list[Any], list[Any]]]:
    """The graph of a function, the forms of its values, and its leaves for two batches."""
    program = trace(function, (state, batch))
    graph = build_graph(program.jaxpr, platform="cpu")
    inputs = [path.startswith("batch") for path in program.in_paths]
    batch_leaves = [position for position, is_batch in enumerate(inputs) if is_batch]
    found = examples_of(graph, batch_leaves, [p for p, is_batch in enumerate(inputs) if not is_batch], BATCH)
    first, second = ([*jax.tree.leaves((state, one)), *program.hidden] for one in (batch, other))
    return graph, found.level.forms, (first, second)


def changed_in(example: int, rng: np.random.Generator, batch: Any) -> Any:
    """The batch with one example drawn anew; not its weight, for the weights' total is computed before."""
    other = jax.tree.map(np.copy, batch)
    for name, fresh in examples(rng).items():
        if name != "mask":
            other[name][example] = fresh[example]
    return other


@pytest.mark.verify
@given(st.sampled_from(LOSSES), st.integers(0, BATCH - 1), st.integers(0, 2**31))
def test_pieces_change_only_with_their_own_examples(loss: Any, example: int, seed: int) -> None:
    """Perturb one example: of a value that is said to be cut, only that example's part may change."""
    with precision(jnp.float64):
        rng = np.random.default_rng(seed)
        state, batch = parameters(rng), examples(rng)
        graph, forms, runs = claims_and_runs(jax.grad(loss), state, batch, changed_in(example, rng, batch))
        assert not broken_claims(graph, forms, runs, example)


ROWS = (
    "jnp.tanh({x})",
    "{x} @ state['w']",
    "{x} + state['b']",
    "{x} * batch['mask'][:, None]",
    "jnp.cumsum({x}, axis=1)",
    "jnp.sort({x}, axis=1)",
    "{x}[:, ::-1]",
    "state['v'][batch['label']] * {x}",
    "jax.nn.softmax({x}, axis=1)",
    "jnp.einsum('bi,bj->bij', {x}, {x}).sum(axis=1)",
    "lax.scan(lambda c, w: (jnp.tanh(c + w), None), {x}, state['w'])[0]",
    "jax.vmap(lambda r: jnp.outer(r, r)[0])({x})",
)
MIXING = (
    "jnp.cumsum({x}, axis=0)",
    "{x}[::-1]",
    "jnp.sort({x}, axis=0)",
    "{x} - {x}.mean(axis=0)",
    "{x} / (1 + jnp.abs({x}).max(axis=0))",
    "jnp.roll({x}, 1, axis=0)",
    "jnp.tanh({x}.T @ {x}) + state['w'] @ {x}[:6]",
)
SUMS = ("{x}.sum()", "{x}.T @ {x}", "{x}.mean(axis=0)", "jnp.zeros((6, 6)).at[batch['label']].add({x})")


@given(
    st.lists(st.sampled_from(ROWS + MIXING), min_size=1, max_size=6), st.integers(0, BATCH - 1), st.integers(0, 2**31)
)
def test_claims_about_random_programs_hold(lines: list[str], example: int, seed: int) -> None:
    """Whatever follows a line that mixes examples has no form, or one that holds; sums are the sums of their pieces."""

    def program(state: Any, batch: Any) -> Any:
        scope = {"jnp": jnp, "jax": jax, "lax": jax.lax, "state": state, "batch": batch}
        x = hidden(state, batch["x"])  # what follows from the batch alone is computed before, and whole
        for line in lines:
            y = eval(line.format(x="x"), {**scope, "x": x})
            x = y if y.shape == x.shape else x + jnp.tanh(y).mean()
        return x, [eval(line.format(x="x"), {**scope, "x": x}) for line in SUMS]

    with precision(jnp.float64):
        rng = np.random.default_rng(seed)
        state, batch = parameters(rng), examples(rng)
        try:
            graph, forms, runs = claims_and_runs(program, state, batch, changed_in(example, rng, batch))
        except CoupledBatchError:
            assert set(lines) & set(MIXING)
            return
        assert not broken_claims(graph, forms, runs, example)
        count = 4

        def step(state: Any, batch: Any) -> Any:
            gradients = jax.grad(mean_loss)(state, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), program(state, batch)

        try:
            ours = in_microbatches(step, state, batch, count)
        except CoupledBatchError:
            assert set(lines) & set(MIXING)
            return
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.jit(step)(state, batch)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8 * (1 + np.abs(b).max()))


@pytest.mark.parametrize("line", MIXING)
def test_a_wrong_claim_is_found(line: str) -> None:
    """If a line that mixes examples were said to keep them apart, the check above would say so."""
    with precision(jnp.float64):
        rng = np.random.default_rng(3)
        state, batch = parameters(rng), examples(rng)

        def program(state: Any, batch: Any) -> Any:
            return eval(line.format(x="x"), {"jnp": jnp, "state": state, "x": jnp.tanh(batch["x"])})

        program = trace(program, (state, batch))
        graph = build_graph(program.jaxpr, platform="cpu")
        claim = (
            {graph.outputs[0]: Layout((("microbatch",), ()))}
            if line != MIXING[-1]
            else {graph.outputs[0]: Layout(((), ()))}
        )
        example = 3
        other = changed_in(example, rng, batch)
        other["x"][example] = 3.0  # also the largest
        runs = [[*jax.tree.leaves((state, one)), *program.hidden] for one in (batch, other)]
        assert [value for value, _ in broken_claims(graph, claim, (runs[0], runs[1]), example)] == [graph.outputs[0]]


def every_value(graph: Any, leaves: list[Any]) -> dict[int, Any]:
    """Every value of the top level, computed as it is written."""
    from autopar import _compat

    known = dict(zip(graph.inputs, map(jnp.asarray, leaves), strict=True))
    for operator in graph.operators:
        operands = [
            jnp.asarray(atom.val, atom.aval.dtype) if value is None else known[value]
            for value, atom in zip(operator.operands, operator.equation.invars, strict=True)
        ]
        known.update(zip(operator.results, _compat.evaluate(operator.equation, operands), strict=True))
    return known


# --- the plan, on eight devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method", "count"),
    [
        pytest.param("mlp_nnx", "tensor_parallel", 4, marks=pytest.mark.verify),
        pytest.param("lstm", "zero2", 2, marks=pytest.mark.verify),
        pytest.param("gpt", "zero3", 2, marks=pytest.mark.verify),
        pytest.param("gpt_scan", "zero3", 4, marks=pytest.mark.verify),
    ],
)
def test_models_keep_their_numbers(name: str, method: str, count: int) -> None:
    """The default run has a small model on one mesh in :mod:`tests.test_pipeline_models`."""
    check_model(name, method, count)


@pytest.mark.verify
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("method", ["auto", "data_parallel", "zero2", "zero3", "tensor_parallel"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_model_keeps_its_numbers_or_is_refused(name: str, method: str, count: int) -> None:
    refusal = refusal_of(Row(name, 1, count, Schedule.SINGLE))
    with nullcontext() if refusal is None else pytest.raises(PlanError, match=refusal):
        check_model(name, method, count)


def check_model(name: str, method: str, count: int) -> None:
    with precision(jnp.float64):
        model = build(name, dtype=jnp.float64)
        expected = run(model, jax.jit(model.train_step), jax.jit(model.make_state)(), 3)
        step = autopar.parallelize(
            model.train_step, method=method, num_microbatches=count, cluster=eight_slow_devices()
        )
        state = step.init(model.make_state, model.abstract_batch())
        found = run(model, step, state, 3)
        assert step.last.plan.num_microbatches == count
        for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
            for path, value in theirs.items():
                np.testing.assert_allclose(ours[path], value, rtol=1e-9, err_msg=path)
        for path, value in expected.state.items():
            if value.dtype.kind == "f":
                np.testing.assert_allclose(found.state[path], value, rtol=1e-9, atol=1e-12, err_msg=path)


@pytest.mark.verify
@pytest.mark.usefixtures("users_fusions")
def test_gradients_are_reduced_once_per_step() -> None:
    model = build("mlp_nnx", "bench")
    step = autopar.parallelize(model.train_step, method="data_parallel", num_microbatches=4)
    text = step.compile(model.abstract_state(), model.abstract_batch()).as_text()
    assert reduced_in_loops(text) == []
    assert "all-reduce" in text[text.index("\nENTRY") :]


def reduced_in_loops(text: str) -> list[str]:
    """Types of the arrays of more than a thousand numbers that a compiled step reduces outside of its entry."""
    assert re.findall(r"^%?(\S*(?:body|region)\S*) .*?^}", text, flags=re.M | re.S)
    inside = text[: text.index("\nENTRY")]
    found = re.findall(r"\b((?:bf|f)\d+\[[\d,]+\])[^=\n]*all-reduce(?:-start)?\(", inside)
    return [one for one in found if np.prod([int(n) for n in one[:-1].split("[")[1].split(",")]) > 1000]


@pytest.mark.usefixtures("users_fusions")
@pytest.mark.parametrize("narrow", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_so_are_those_of_mixed_precision(narrow: Any) -> None:
    """Weights in float32, layers in a narrower type: what its gradients go through to the accumulator is linear."""

    def train_step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> jax.Array:
            x = batch.astype(narrow)
            for weight in weights:
                x = jnp.tanh(x @ weight.astype(narrow))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, jax.grad(loss)(weights))

    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(64, 64)) / 8, jnp.float32) for _ in range(2)]
    batch = jnp.asarray(rng.normal(size=(2048, 64)), jnp.float32)
    step = autopar.parallelize(train_step, method="data_parallel", num_microbatches=4, donate_argnums=())
    assert reduced_in_loops(step.compile(weights, batch).as_text()) == []
    assert {use.count for use in step.plan(weights, batch).prediction.collectives} == {1}
    moved, expected = step(weights, batch), jax.jit(train_step)(weights, batch)
    for before, ours, theirs in zip(weights, moved, expected, strict=True):
        slopes = np.asarray(before) - np.asarray(theirs)
        off = np.abs(np.asarray(ours) - np.asarray(theirs)).max()
        assert off <= 4 * float(jnp.finfo(narrow).eps) * np.abs(slopes).max() + 1e-6


def deep(weights: Any, batch: Any) -> jax.Array:
    """A step most of whose memory is what the backward pass needs of every example."""

    def loss(weights: Any) -> jax.Array:
        x = batch
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, jax.grad(loss)(weights))


def deep_arguments() -> Any:
    return [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jax.ShapeDtypeStruct((2048, 64), jnp.float32)


def gpt_arguments() -> Any:
    model = build("gpt", "bench")
    return model.abstract_state(), model.abstract_batch()


@pytest.mark.usefixtures("users_fusions")
@pytest.mark.parametrize(
    ("function", "make_arguments"),
    [
        pytest.param(deep, deep_arguments, id="deep", marks=pytest.mark.verify),
        pytest.param(build("gpt", "bench").train_step, gpt_arguments, id="gpt", marks=pytest.mark.verify),
    ],
)
def test_memory_asks_for_microbatches(function: Any, make_arguments: Any) -> None:
    arguments, cluster, mesh_shape = make_arguments(), eight_slow_devices(), (4, 2)
    fastest = autopar.parallelize(function, cluster=cluster, mesh_shape=mesh_shape).plan(*arguments)
    assert fastest.num_microbatches == 1
    budget = int(0.8 * fastest.peak_bytes)
    whole = autopar.parallelize(
        function, cluster=cluster, mesh_shape=mesh_shape, num_microbatches=1, memory_per_device=budget
    )
    with pytest.raises(BudgetError):
        whole.plan(*arguments)
    step = autopar.parallelize(function, cluster=cluster, mesh_shape=mesh_shape, memory_per_device=budget)
    compiled = step.compile(*arguments)
    assert compiled.plan.num_microbatches > 1
    analysis = compiled.memory_analysis()
    needed = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    assert needed <= budget
    assert "microbatches" in str(autopar.explain(step, *arguments))


@pytest.mark.parametrize(("count", "message"), [(3, "does not divide"), (0, "integer of 1"), (True, "integer of 1")])
def test_impossible_counts_are_refused(count: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        autopar.parallelize(step_of(mean_loss), num_microbatches=count).plan(
            first_state(), examples(np.random.default_rng(1))
        )


@pytest.mark.verify
def test_a_plan_with_microbatches_is_saved_and_used(tmp_path: Any) -> None:
    model = build("mlp_nnx", "toy")
    step = autopar.parallelize(model.train_step, stages=1, num_microbatches=2, cluster=eight_slow_devices())
    plan = step.plan(model.abstract_state(), model.abstract_batch())
    plan.save(tmp_path / "plan.json")
    other = autopar.parallelize(model.train_step, cluster=eight_slow_devices())
    other.use(autopar.Plan.load(tmp_path / "plan.json"))
    state, batch = jax.jit(model.make_state)(), model.make_batch(model.batch_size)
    _, metrics = other(state, batch)
    assert other.last.plan.num_microbatches == 2
    _, expected = jax.jit(model.train_step)(jax.jit(model.make_state)(), batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)


def in_four_microbatches(step: Any) -> Graph:
    """The graph of a step of this file's parameters and examples, cut into four microbatches."""
    rng = np.random.default_rng(0)
    program = trace(step, (parameters(rng), examples(rng)))
    roles, graph = infer_roles(program), build_graph(program.jaxpr, platform="cpu")
    rows = roles.leaves(Role.BATCH)
    cut = accumulated(program, examples_of(graph, rows, roles.leaves(Role.STATE), 4), rows)
    return build_graph(cut.jaxpr, platform="cpu")


def test_what_a_barrier_guards_of_weights_is_made_once() -> None:
    """Behind rematerialisation a weight in a narrow type is the one that the forward pass reads, made before the loop."""

    def loss(state: Any, batch: Any) -> jax.Array:
        @jax.checkpoint
        def block(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ state["w"].astype(x.dtype)) @ state["v"].astype(x.dtype)

        return jnp.mean(block(block(batch["x"].astype(jnp.float32))) ** 2)

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(state, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads)

    with jax.enable_x64(True):
        (loop,) = (o for o in in_four_microbatches(step).operators if o.primitive == "scan")
        casts = [o for o in loop.bodies[0].operators if o.primitive == "convert_element_type"]
        narrowed = [o for o in casts if o.equation.outvars[0].aval.shape == (WIDTH, WIDTH)]
        assert not [o for o in narrowed if o.equation.outvars[0].aval.dtype == jnp.float32]
        guards = [o for o in loop.bodies[0].operators if o.primitive == "optimization_barrier"]
        assert guards and all(v.aval.shape[:1] == (BATCH // 4,) for o in guards for v in o.equation.outvars)


def test_gradients_are_scaled_once() -> None:
    """Plain gradient descent, p − 0.1·g, adds up g over the microbatches, and so does a mean the losses."""

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(with_tied_weights)(state, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * (-g / 4.0), state, gradients), value * 8.0

    with jax.enable_x64(True):
        cut = in_four_microbatches(step)
        (loop,) = (o for o in cut.operators if o.primitive == "scan")
        scales = [o.primitive for o in cut.operators if o.primitive in ("mul", "neg")]
        leaves = len(parameters(np.random.default_rng(0)))
        assert sorted(scales) == ["mul"] * (leaves + 1) + ["neg"] * leaves
        inside = [atom for o in loop.bodies[0].operators for atom in o.equation.invars if o.primitive in ("mul", "div")]
        literals = {float(atom.val) for atom in inside if isinstance(atom, _compat.Literal)}
        assert literals.isdisjoint((0.1, 4.0, 8.0))
