"""Is a microbatch that is treated as a batch of its own treated exactly so?

The reference is plain JAX: the passes are run on each microbatch alone, in a Python loop, and what they give is averaged
before the update, in float64.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import PlanError
from autopar.inter_op.examples import CoupledBatchError
from benchmarks.models import build
from tests.test_microbatches import (
    BATCH,
    batch_normalised,
    capacity_routed,
    contrastive,
    examples,
    hidden,
    parameters,
    reversed_neighbours,
)
from tests.toy_runs import eight_slow_devices, precision

Tree = Any


def parallel(function: Any, count: int, **options: Any) -> Any:
    given = {"batch_coupling": "per_microbatch", "cluster": eight_slow_devices(), **options}
    return autopar.parallelize(function, num_microbatches=count, **given)


def split(batch: Tree, count: int) -> list[Tree]:
    return [jax.tree.map(lambda leaf, k=k: np.split(leaf, count)[k], batch) for k in range(count)]


def mean(trees: list[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def same(ours: Tree, theirs: Tree) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=jax.tree_util.keystr(path))


def clipped(params: Tree, gradients: Tree) -> Tree:
    """An update that is not linear in the gradients."""
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
    return jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 0.01), params, gradients)


def self_normed(state: Tree, batch: Tree) -> jax.Array:
    """The mean of a norm over the batch, of which there is no unit in examples."""
    y = hidden(state, batch["x"])
    return jnp.mean((y / jnp.sqrt(jnp.sum(y**2))) ** 4)


def traced(state: Tree, batch: Tree) -> jax.Array:
    """Of all pairs only the diagonal is added up."""
    y = hidden(state, batch["x"])
    return -jnp.sum(jax.nn.log_softmax(y @ y.T) * jnp.eye(len(y))) / len(y)


def against_the_largest(state: Tree, batch: Tree) -> jax.Array:
    y = hidden(state, batch["x"])
    return jnp.mean((y - jax.lax.stop_gradient(y.max(axis=0))) ** 2)


def diagonal_contrast(state: Tree, batch: Tree) -> jax.Array:
    """Labels counted in the batch are those of the microbatch."""
    y = hidden(state, batch["x"])
    logits = jax.nn.log_softmax(y @ y.T)
    return -jnp.mean(jnp.take_along_axis(logits, jnp.arange(len(y))[:, None], axis=1))


def routed_with_capacity(state: Tree, batch: Tree) -> jax.Array:
    """Seats follow the size of the batch in Python, so a microbatch has fewer."""
    y = hidden(state, batch["x"])
    capacity = max(1, len(y) // 3)
    chosen = jax.nn.one_hot(y.argmax(axis=-1), 6, dtype=y.dtype)
    place = ((jnp.cumsum(chosen, axis=0) - 1) * chosen).sum(axis=-1).astype(int)
    seat = chosen[:, :, None] * jax.nn.one_hot(place, capacity, dtype=y.dtype)[:, None, :]
    seated = jnp.tanh(jnp.einsum("bec,bd->ecd", seat, y))
    return jnp.mean((jnp.einsum("bec,ecd->bd", seat, seated) + y) ** 2)


def normalised_sum(state: Tree, batch: Tree) -> jax.Array:
    """A sum over examples stays one: microbatches' are added up, not averaged."""
    y = hidden(state, batch["x"])
    return jnp.sum(((y - y.mean(axis=0)) * state["b"]) ** 4)


ALONE = (
    batch_normalised,
    contrastive,
    capacity_routed,
    reversed_neighbours,
    self_normed,
    traced,
    against_the_largest,
    diagonal_contrast,
    routed_with_capacity,
    normalised_sum,
)
DEFAULT = (contrastive, capacity_routed, routed_with_capacity)


def step_of(loss: Any) -> Any:
    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return clipped(state, gradients), {"loss": value}

    return step


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.verify)])
@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, id=loss.__name__, marks=[pytest.mark.verify] * (loss not in DEFAULT)) for loss in ALONE],
)
def test_each_microbatch_is_its_own_batch(loss: Any, count: int) -> None:
    with precision(jnp.float64):
        state, batch = parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))
        with pytest.raises(CoupledBatchError):
            parallel(step_of(loss), count, batch_coupling="refuse").plan(state, batch)
        found = [jax.jit(jax.value_and_grad(loss))(state, one) for one in split(batch, count)]
        times = count if loss is normalised_sum else 1
        value, gradients = jax.tree.map(lambda leaf: times * leaf, mean(found))
        same(parallel(step_of(loss), count)(state, batch), (clipped(state, gradients), {"loss": value}))


def test_what_is_not_coupled_stays_exact() -> None:
    def masked(state: Tree, batch: Tree) -> jax.Array:
        per_example = jnp.sum(hidden(state, batch["x"]) ** 2, axis=-1)
        return jnp.sum(per_example * batch["mask"]) / jnp.sum(batch["mask"])

    with precision(jnp.float64):
        state, batch = parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))
        same(parallel(step_of(masked), 4)(state, batch), jax.jit(step_of(masked))(state, batch))


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, masks: list[jax.Array]) -> jax.Array:
        for kept in masks:
            x = nn.Dense(6, param_dtype=float)(x)
            x = nn.tanh(nn.BatchNorm(use_running_average=False, param_dtype=float, momentum=0.8)(x))
            x = jnp.where(kept, x / 0.7, 0.0)
        return nn.Dense(6, param_dtype=float)(x)


@pytest.mark.verify
@pytest.mark.parametrize("rng", ["per_microbatch", "exact"])
def test_batch_norm_with_dropout_and_running_statistics(rng: str) -> None:
    """Running statistics are the means of those that the microbatches alone would leave; metrics of all kinds."""
    count, model, keys = 2, Normalised(), [jax.random.key(8), jax.random.key(9)]

    def passes(params: Tree, stats: Tree, batch: Tree, masks: list[jax.Array]) -> Any:
        def loss(params: Tree) -> Any:
            variables = {"params": params, "batch_stats": stats}
            out, changed = model.apply(variables, batch["x"], masks, mutable=["batch_stats"])
            each = jnp.mean((out - 1) ** 2, axis=-1)
            return each.mean(), (changed["batch_stats"], each, jnp.sum(out.argmax(axis=-1) == batch["label"]))

        return jax.value_and_grad(loss, has_aux=True)(params)

    def step(state: Tree, batch: Tree) -> Any:
        masks = [jax.random.bernoulli(key, 0.7, batch["x"].shape) for key in keys]
        (value, (stats, each, right)), gradients = passes(state["params"], state["stats"], batch, masks)
        return {"params": clipped(state["params"], gradients), "stats": stats}, {
            "loss": value,
            "each": each,
            "right": right,
            "share": right / len(each),
        }

    def masks_of(number: int) -> list[jax.Array]:
        if rng == "exact":
            return [jnp.split(jax.random.bernoulli(key, 0.7, (BATCH, 6)), count)[number] for key in keys]
        return [jax.random.bernoulli(jax.random.fold_in(key, number), 0.7, (BATCH // count, 6)) for key in keys]

    with precision(jnp.float64):
        batch = examples(np.random.default_rng(1))
        variables = model.init(jax.random.key(0), jnp.asarray(batch["x"]), [jnp.ones((BATCH, 6), bool)] * 2)
        state = {"params": variables["params"], "stats": jax.tree.map(jnp.float64, variables["batch_stats"])}
        found = [
            jax.jit(passes)(state["params"], state["stats"], one, masks_of(number))
            for number, one in enumerate(split(batch, count))
        ]
        value, gradients = mean([(value, gradients) for (value, _), gradients in found])
        aux = [aux for (_, aux), _ in found]
        right = sum(right for _, _, right in aux)
        metrics = {
            "loss": value,
            "each": jnp.concatenate([each for _, each, _ in aux]),
            "right": right,
            "share": right / BATCH,
        }
        stats = mean([stats for stats, _, _ in aux])
        expected = {"params": clipped(state["params"], gradients), "stats": stats}, metrics
        same(parallel(step, count, rng=rng)(jax.tree.map(jnp.array, state), batch), expected)


@pytest.mark.verify
@pytest.mark.parametrize("name", ["two_tower", "wide_resnet"])
def test_models_are_means_of_their_microbatches(name: str) -> None:
    """One step of momentum or Adagrad is compared by what it makes of the mean gradient; the loss is the mean loss."""
    count = 2
    with precision(jnp.float64):
        model = build(name, dtype=jnp.float64)
        state, batch = jax.jit(model.make_state)(), model.make_batch(model.batch_size)
        found = [jax.jit(model.train_step)(state, one) for one in split(batch, count)]
        step = parallel(model.train_step, count)
        new, metrics = step(jax.tree.map(jnp.array, state), batch)
        same(metrics, mean([metrics for _, metrics in found]))
        if name == "wide_resnet":  # SGD's first step is linear in the gradient
            same(new.params, mean([one.params for one, _ in found]))
            same(new.batch_stats, mean([one.batch_stats for one, _ in found]))
        assert "batch of its own" in str(autopar.explain(step, state, batch))


def test_what_has_no_mean_is_refused() -> None:
    def step(state: Tree, batch: Tree) -> Any:
        y = hidden(state, batch["x"])
        y = y - y.mean(axis=0)
        return jax.tree.map(lambda p, g: p - g, state, jax.grad(batch_normalised)(state, batch)), {
            "first": jnp.argmax(y[:, 0] ** 2)
        }

    state, batch = parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))
    with pytest.raises(CoupledBatchError, match="which has no mean"):
        parallel(step, 2).plan(state, batch)


def test_a_function_that_knows_its_batch_size_is_refused() -> None:
    def step(state: Tree, batch: Tree) -> Any:
        def loss(params: Tree) -> jax.Array:
            return batch_normalised(params, {"x": batch["x"].reshape(BATCH, -1)}) * (1.0 if len(batch["x"]) > 4 else 2)

        return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state)), {}

    state, batch = parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))
    with pytest.raises(PlanError, match=r"otherwise on a microbatch|fails on a microbatch"):
        parallel(step, 2).plan(state, batch)


@pytest.mark.parametrize("option", ["batch_coupling", "rng"])
def test_unknown_terms_are_refused(option: str) -> None:
    with pytest.raises(PlanError, match=f"{option}='sometimes' is unknown; say"):
        autopar.parallelize(step_of(contrastive), **{option: "sometimes"})


def test_a_plan_made_on_other_terms_is_refused() -> None:
    state, batch = parameters(np.random.default_rng(0)), examples(np.random.default_rng(1))
    plan = parallel(step_of(contrastive), 2).plan(state, batch)
    other = parallel(step_of(contrastive), 2, rng="per_microbatch")
    other.use(plan)
    with pytest.raises(PlanError, match="other terms of microbatches"):
        other(state, batch)
    again = parallel(step_of(contrastive), 2)
    again.use(plan)
    again(state, batch)


def test_running_statistics_of_a_later_stage_are_added_where_they_are_made() -> None:
    """Of s ← 0.9·s + 0.1·mean, summed over microbatches, one summand is known to every stage and made on none."""
    random = np.random.default_rng(0)
    state = {name: random.normal(size=(16, 16)) / 4 for name in ("first", "second")} | {"seen": random.normal(size=16)}
    batch = {"x": random.normal(size=(BATCH, 16))}

    def step(state: Tree, batch: Tree) -> Any:
        def loss(params: Tree) -> tuple[jax.Array, jax.Array]:
            y = jnp.tanh(batch["x"] @ params["first"]) @ params["second"]
            y = y / jnp.sqrt(jnp.mean(y**2, axis=0))
            return jnp.mean(jnp.tanh(y) ** 3), 0.9 * state["seen"] + 0.1 * jnp.mean(y, axis=0)

        params = {name: state[name] for name in ("first", "second")}
        gradients, seen = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients) | {"seen": seen}, {}

    with precision(jnp.float64):
        expected = mean([jax.jit(step)(state, one)[0] for one in split(batch, 4)])
        parallelized = parallel(step, 4, stages=2)
        new, _ = parallelized(jax.tree.map(jnp.array, state), batch)
        same(new, expected)
        assert parallelized.plan(state, batch).is_pipeline
