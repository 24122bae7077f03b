"""A small model whose layers are one loop, and its batches, for the tests of loops that stages share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, BATCH = 16, 8

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "multi_steps": lambda: optax.MultiSteps(
        optax.adamw(1e-2), every_k_schedule=2, accumulator_dtype=jnp.float64
    ).gradient_transformation(),
}


@dataclass(frozen=True)
class Scanned:
    """Residual layers with dropout in one loop; ``up`` has its layers along dimension 1."""

    layers: int
    optimizer: str = "adamw"
    is_remat: bool = False

    def make_state(self) -> Any:
        keys = jax.random.split(jax.random.key(0), 5)
        count, width = self.layers, WIDTH
        params = {
            "first": jax.random.normal(keys[0], (width, width)) / 2,
            "layers": {
                "down": jax.random.normal(keys[1], (count, 2 * width, width)) / 4,
                "up": jax.random.normal(keys[2], (width, count, 2 * width)) / 4,
                "bias": jax.random.normal(keys[3], (count, width)) / 4,
            },
        }
        return {"params": params, "moments": OPTIMIZERS[self.optimizer]().init(params), "key": keys[4]}

    def loss(self, params: Any, batch: Any, key: jax.Array) -> jax.Array:
        layers = {**params["layers"], "up": jnp.moveaxis(params["layers"]["up"], 1, 0)}

        def layer(x: jax.Array, given: Any) -> tuple[jax.Array, jax.Array]:
            one, own = given
            x = x + jnp.tanh(x @ one["up"]) @ one["down"] + one["bias"]
            return x * jax.random.bernoulli(own, 0.9, x.shape), jnp.mean(x**2)

        body = jax.checkpoint(layer) if self.is_remat else layer
        x, said = jax.lax.scan(body, batch["x"] @ params["first"], (layers, jax.random.split(key, self.layers)))
        return jnp.mean((x - batch["y"]) ** 2) + 0.01 * jnp.sum(said)

    def train_step(self, state: Any, batch: Any) -> Any:
        key, own = jax.random.split(state["key"])
        loss, gradients = jax.value_and_grad(self.loss)(state["params"], batch, own)
        updates, moments = OPTIMIZERS[self.optimizer]().update(gradients, state["moments"], state["params"])
        largest = jax.tree.map(lambda leaf: jnp.max(jnp.abs(leaf)), gradients["layers"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments, "key": key}, {"loss": loss, "largest": largest}


def batch_of(step: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(step)
    return {"x": drawn.normal(size=(BATCH, WIDTH)), "y": drawn.normal(size=(BATCH, WIDTH))}
