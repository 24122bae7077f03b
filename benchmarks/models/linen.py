"""A supervised train step for any Linen module, as Flax's guides write it: statistics and dropout keys in the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

from benchmarks.models.base import Batch, Model

Loss = Callable[[Any, Batch], jax.Array]  # the module's output and the batch → a scalar


class TrainState(train_state.TrainState):
    """Flax's train state, running statistics (empty where nothing is normalised by them) and the dropout masks' key."""

    batch_stats: Any
    dropout_key: jax.Array | None


@dataclass(frozen=True)
class Task:
    """A module is called with the batch's arrays `inputs` and with `train`; its output goes to `loss`."""

    module: nn.Module
    inputs: tuple[str, ...]
    loss: Loss
    optimizer: optax.GradientTransformation
    uses_dropout: bool = False


def supervised(name: str, task: Task, make_batch: Callable[[int], Batch], batch_size: int) -> Model:
    """The model of a task; its step takes and returns a :class:`TrainState`, its metric is the loss."""

    def make_state() -> TrainState:
        params_key, dropout_key = jax.random.split(jax.random.key(0))
        batch = make_batch(1)
        variables = task.module.init(params_key, *(jnp.asarray(batch[field]) for field in task.inputs), train=False)
        dtype = jax.tree.leaves(variables["params"])[0].dtype  # BatchNorm begins its statistics in float32 always
        return TrainState.create(
            apply_fn=task.module.apply,
            params=variables["params"],
            tx=task.optimizer,
            batch_stats=jax.tree.map(lambda leaf: leaf.astype(dtype), variables.get("batch_stats", {})),
            dropout_key=dropout_key if task.uses_dropout else None,
        )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        rngs = {}
        if state.dropout_key is not None:
            rngs["dropout"] = jax.random.fold_in(state.dropout_key, state.step)

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            inputs = (batch[field] for field in task.inputs)
            output, updated = state.apply_fn(variables, *inputs, train=True, rngs=rngs, mutable=["batch_stats"])
            return task.loss(output, batch), updated.get("batch_stats", {})

        (loss, batch_stats), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, batch_stats=batch_stats), {"loss": loss}

    return Model(name, make_state, train_step, make_batch, batch_size)


def mean_cross_entropy(field: str) -> Loss:
    """Of logits against the integers in `batch[field]`; in float32 at least."""

    def loss(logits: jax.Array, batch: Batch) -> jax.Array:
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[field]).mean()

    return loss
