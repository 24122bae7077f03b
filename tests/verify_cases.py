"""Cases for the command line, as a user would write them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autopar
from benchmarks.models import build


def gpt() -> tuple[Any, tuple[Any, ...]]:
    model = build("gpt")
    return model.train_step, (model.abstract_state(), model.abstract_batch())


def step(weights: dict[str, jax.Array], batch: jax.Array, *, rate: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(batch @ weights["up"])
        return jnp.mean((hidden @ weights["down"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda weight, slope: weight - rate * slope, weights, gradient), value


def decorated() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    args = {"up": array(256, 512), "down": array(512, 256)}, array(256, 256)
    return autopar.parallelize(method="data_parallel")(step), args, {"rate": array()}


def wrong() -> int:
    return 3


def not_a_tuple() -> tuple[Any, Any]:
    return step, jnp.ones(3)


def failing() -> None:
    raise ValueError("no such data set")


number = 3
