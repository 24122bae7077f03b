r"""A residual MLP in NNX: x ← x + W₂ gelu(W₁ LayerNorm(x)) per layer, then a linear classifier.

The state that the step takes and returns is `{"params", "optimizer"}`: the parameters as `nnx.split` gives them, and
Optax's own state beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike

from benchmarks.models.base import Batch, Family, Model, Size


@dataclass(frozen=True)
class MLPConfig:
    """Features of the input, width of the residual stream, expansion inside a layer, classes."""

    features: int
    hidden: int
    layers: int
    classes: int
    batch_size: int
    expansion: int = 4
    learning_rate: float = 1e-3


CONFIGS: Mapping[str, MLPConfig] = MappingProxyType(
    {
        Size.TOY: MLPConfig(features=32, hidden=64, layers=2, classes=16, batch_size=16, learning_rate=1e-2),
        Size.BENCH: MLPConfig(features=256, hidden=512, layers=4, classes=64, batch_size=256),
        "2B": MLPConfig(features=4096, hidden=4096, layers=16, classes=1024, batch_size=4096),
    }
)


class ResidualLayer(nnx.Module):
    """float[batch, hidden] → the same."""

    def __init__(self, config: MLPConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        wide = config.expansion * config.hidden
        self.norm = nnx.LayerNorm(config.hidden, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(config.hidden, wide, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(wide, config.hidden, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class ResidualMLP(nnx.Module):
    """float[batch, features] → logits float[batch, classes]."""

    def __init__(self, config: MLPConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.enter = nnx.Linear(config.features, config.hidden, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([ResidualLayer(config, dtype, rngs) for _ in range(config.layers)])
        self.leave = nnx.Linear(config.hidden, config.classes, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def _make_batch(config: MLPConfig, dtype: DTypeLike, batch_size: int) -> Batch:
    random = np.random.default_rng(0)
    inputs = random.standard_normal((batch_size, config.features)).astype(dtype)
    return {"inputs": inputs, "labels": random.integers(0, config.classes, batch_size, dtype=np.int32)}


def _build(size: str, dtype: DTypeLike) -> Model:
    config = CONFIGS[size]
    optimizer = optax.adamw(config.learning_rate)

    def make_model() -> ResidualMLP:
        return ResidualMLP(config, dtype, nnx.Rngs(0))

    def make_state() -> dict[str, Any]:
        params = nnx.state(make_model(), nnx.Param)
        return {"params": params, "optimizer": optimizer.init(params)}

    definition = nnx.graphdef(nnx.eval_shape(make_model))

    def train_step(state: dict[str, Any], batch: Batch) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        def loss_fn(params: nnx.State[Any, Any]) -> jax.Array:
            logits = nnx.merge(definition, params)(batch["inputs"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(state["params"])
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": moments}, {"loss": loss}

    return Model(
        name=f"mlp_nnx-{size}",
        make_state=make_state,
        train_step=train_step,
        make_batch=lambda batch_size: _make_batch(config, jnp.dtype(dtype), batch_size),
        batch_size=config.batch_size,
    )


FAMILY = Family("mlp_nnx", tuple(CONFIGS), _build)
