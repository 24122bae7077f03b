"""A small model and its batches for the tests on Ray, and how states are compared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, BATCH = 16, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def loss_of(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    x = batch["x"]
    for number, layer in enumerate(params):
        x = jnp.tanh(x @ layer["w"] + layer["b"])
        x = x * jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, x.shape)
    return jnp.mean((x - batch["y"]) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    key, own = jax.random.split(state["key"])
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch, own)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer, "key": key, "step": state["step"] + 1}, {"loss": loss}


def create(seed: int) -> Any:
    keys = jax.random.split(jax.random.key(seed), 4)
    params = [{"w": jax.random.normal(key, (WIDTH, WIDTH)) / 4, "b": jnp.zeros(WIDTH)} for key in keys]
    return {"params": params, "optimizer": OPTIMIZER.init(params), "key": keys[0], "step": jnp.zeros((), jnp.int32)}


def batch_of(step: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(step)
    return {"x": drawn.normal(size=(BATCH, WIDTH)), "y": drawn.normal(size=(BATCH, WIDTH))}


def value(leaf: Any) -> np.ndarray:
    leaf = jnp.asarray(leaf)
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def assert_equal(left: Any, right: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(value(ours), value(theirs), rtol=1e-11, atol=1e-12)


def workers_of(step: Any) -> list[int]:
    """The processes that the last step ran in; those of other tests' meshes are left out."""
    return [status.pid for world in step.last.executor.worlds for status in world.status()]
