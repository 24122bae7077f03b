"""Does a planned step with any of the usual optimizers compute what it computes under ``jax.jit``?

One small network under each optimizer and each wrapper that Optax and Flax programs put around one: factored moments,
norms per layer, gradients collected over several steps, updates refused where they are not finite, different optimizers
for different leaves, an average of the parameters, a loss scaled up and down.  Float64: every leaf of the state and every
metric to 1e-9 of its largest magnitude (see :mod:`tests.test_correctness`).

The default run meets every optimizer once under ``auto`` and, under ``zero3``, some whose state is not shaped like the
parameters, or that branch; ``verify`` takes the product with all methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import autopar
from benchmarks.models import Model
from tests.test_correctness import is_cut, wrong_leaves
from tests.toy_runs import METHODS, Run, eight_slow_devices, leaves_by_path, precision, sample

STEPS = 6
BAD_STEP = 3  # at which the batch of the tests of finiteness overflows
BATCH, WIDTHS = 16, (16, 32, 8)
RATE = 1e-2

Params = dict[str, Any]
State = dict[str, Any]
Step = Callable[[State, Any], tuple[State, dict[str, jax.Array]]]


def make_params() -> Params:
    """A matrix, a bias and a scale for each layer."""
    keys = jax.random.split(jax.random.key(0), len(WIDTHS) - 1)
    return {
        f"layer{number}": {
            "kernel": jax.random.normal(key, (narrow, wide), jnp.float64) / np.sqrt(narrow),
            "bias": jnp.full(wide, 0.1, jnp.float64),
            "scale": jnp.ones(wide, jnp.float64),
        }
        for number, (key, narrow, wide) in enumerate(zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True))
    }


def loss_of(params: Params, batch: Any) -> jax.Array:
    """Mean squared error of a tanh network."""
    x = batch["inputs"]
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"]) * layer["scale"]
    return ((x - batch["targets"]) ** 2).mean()


def make_batch(batch_size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "inputs": random.standard_normal((batch_size, WIDTHS[0])),
        "targets": random.standard_normal((batch_size, WIDTHS[-1])),
    }


def plain(optimizer: optax.GradientTransformation) -> tuple[Callable[[], State], Step]:
    """State and step as Optax's guides write them."""

    def make_state() -> State:
        params = make_params()
        return {"params": params, "optimizer": optimizer.init(params)}

    def train_step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, {"loss": loss}

    return make_state, train_step


def multi_steps() -> tuple[Callable[[], State], Step]:
    """Every second step moves the parameters, by the mean of two gradients."""
    return plain(optax.MultiSteps(optax.adamw(RATE), every_k_schedule=2).gradient_transformation())


def multi_transform() -> tuple[Callable[[], State], Step]:
    """Matrices by Adam, biases by momentum, scales not at all."""
    transforms = {"kernel": optax.adam(RATE), "bias": optax.sgd(RATE, momentum=0.9), "scale": optax.set_to_zero()}
    labels = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, jax.eval_shape(make_params))
    return plain(optax.multi_transform(transforms, labels))


def parameter_average() -> tuple[Callable[[], State], Step]:
    """An exponential moving average of the parameters beside them."""
    make_inner, inner_step = plain(optax.adamw(RATE))

    def make_state() -> State:
        inner = make_inner()
        return {"inner": inner, "average": jax.tree.map(jnp.copy, inner["params"])}

    def train_step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        inner, metrics = inner_step(state["inner"], batch)
        average = optax.incremental_update(inner["params"], state["average"], step_size=0.1)
        return {"inner": inner, "average": average}, metrics

    return make_state, train_step


def dynamic_loss_scale() -> tuple[Callable[[], State], Step]:
    """A scaled loss; a step whose gradients are not finite halves the scale and changes nothing else."""
    optimizer = optax.adam(RATE)

    def make_state() -> State:
        params = make_params()
        scale = DynamicScale(growth_interval=2, scale=jnp.float32(64))
        return {"params": params, "optimizer": optimizer.init(params), "scale": scale}

    def train_step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        scale, finite, loss, gradients = state["scale"].value_and_grad(loss_of)(state["params"], batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        moved = {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}
        kept = {name: state[name] for name in moved}
        chosen = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, kept)
        return {**chosen, "scale": scale}, {"loss": loss, "finite": finite}

    return make_state, train_step


RECIPES: Mapping[str, Callable[[], tuple[Callable[[], State], Step]]] = {
    "adamw": lambda: plain(optax.adamw(RATE, weight_decay=0.1)),
    "lamb": lambda: plain(optax.lamb(RATE)),
    "adafactor": lambda: plain(optax.adafactor(RATE, min_dim_size_to_factor=8)),
    "sgd": lambda: plain(optax.sgd(RATE, momentum=0.9, nesterov=True)),
    "multi_steps": multi_steps,
    "apply_if_finite": lambda: plain(optax.apply_if_finite(optax.adam(RATE), max_consecutive_errors=3)),
    "multi_transform": multi_transform,
    "parameter_average": parameter_average,
    "dynamic_loss_scale": dynamic_loss_scale,
}
OVERFLOWING = ("apply_if_finite", "dynamic_loss_scale")
SAMPLE = sample(tuple(RECIPES), METHODS, seed=0)


def run(name: str, step: Any, state: State) -> Run:
    """Some steps on batches that differ."""
    metrics = []
    for number in range(STEPS):
        batch = {leaf: np.roll(array, number, axis=0) for leaf, array in make_batch(BATCH).items()}
        if name in OVERFLOWING and number == BAD_STEP:
            batch["targets"][0, 0] = np.inf
        state, said = step(state, batch)
        metrics.append(leaves_by_path(said))
    return Run(leaves_by_path(state), tuple(metrics))


@functools.cache
def reference(name: str) -> Run:
    """The undecorated step under ``jax.jit``."""
    with precision(jnp.float64):
        make_state, train_step = RECIPES[name]()
        return run(name, jax.jit(train_step), jax.jit(make_state)())


def check(name: str, method: str) -> None:
    expected = reference(name)
    with precision(jnp.float64):
        make_state, train_step = RECIPES[name]()
        model = Model(name, make_state, train_step, make_batch, BATCH)
        step = autopar.parallelize(method=method, cluster=eight_slow_devices())(train_step)
        got = run(name, step, step.init(make_state, model.abstract_batch()))
    assert is_cut(step.last.plan)
    assert wrong_leaves(expected.state, got.state) == {}
    for number, (ours, theirs) in enumerate(zip(got.metrics, expected.metrics, strict=True)):
        if name in OVERFLOWING and number == BAD_STEP:
            assert ours["['loss']"] == theirs["['loss']"] == np.inf
        else:
            assert wrong_leaves(theirs, ours) == {}


@pytest.mark.parametrize(("name", "method"), SAMPLE)
def test_float64_state_and_metrics(name: str, method: str) -> None:
    check(name, method)


@pytest.mark.verify
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", RECIPES)
def test_float64_of_every_optimizer_and_method(name: str, method: str) -> None:
    check(name, method)


@pytest.mark.parametrize("name", OVERFLOWING)
def test_the_bad_step_is_really_refused(name: str) -> None:
    """What the comparison above rests on: there is an overflow, and the state stays finite."""
    said = reference(name)
    losses = [float(metrics["['loss']"]) for metrics in said.metrics]
    assert [number for number, loss in enumerate(losses) if not np.isfinite(loss)] == [BAD_STEP]
    assert losses[-1] < losses[0]
    assert all(np.isfinite(array).all() for array in said.state.values() if array.dtype.kind == "f")
