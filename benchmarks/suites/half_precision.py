r"""How did the paper train in half precision? The state and the update of the authors' artifact, on the networks of our examples.

Parameters p are kept in float16 and again in float32 as masters w; microbatches add up gradients g in float16, and one update is

    w, m ← optimizer(w, m, float32(g)),        p ← float16(w),

without loss scaling or clipping.  So a parameter takes 2 + 4 bytes, 2 for its gradient, and what its optimizer keeps: AdamW
(GPT) two moments of 4 bytes each, 16 in all; Adafactor (MoE; Shazeer and Stern 2018, section 5) a row and a column for each
matrix, 8 in all.  That is why a mixture of 70 · 10⁹ parameters fits on 64 devices of 16 GB.

Input and output embeddings are apart, and routing draws no random numbers and has no loss of its own, as there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct

from benchmarks.models.base import Batch, Model, token_batch
from examples.gpt.model import GPT, GPTConfig, cross_entropy
from examples.moe.model import MoEConfig, MoETransformer

LEARNING_RATE = 1e-2


@struct.dataclass
class HalfState:
    """Parameters in float16, their masters in float32, and what the optimizer keeps of these."""

    params: Any
    masters: Any
    optimizer_state: Any


def gpt(config: GPTConfig, batch_size: int) -> Model:
    """GPT with AdamW; weight decay pulls at matrices only."""
    decayed = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
    return _model("gpt", GPT(config), config, optax.adamw(LEARNING_RATE, mask=decayed), batch_size)


def moe(config: MoEConfig, batch_size: int) -> Model:
    """The mixture of experts with Adafactor."""
    return _model("moe", MoETransformer(config), config.base, optax.adafactor(LEARNING_RATE), batch_size)


def moe_with_adam(config: MoEConfig, batch_size: int) -> Model:
    """The mixture of experts with AdamW, as the artifact trains it with DeepSpeed."""
    return _model("moe", MoETransformer(config), config.base, optax.adamw(LEARNING_RATE), batch_size)


def _model(
    name: str, network: nn.Module, shape: GPTConfig, optimizer: optax.GradientTransformation, batch_size: int
) -> Model:
    def make_state() -> HalfState:
        tokens = jnp.zeros((1, shape.sequence), jnp.int32)
        params = network.init(jax.random.key(0), tokens)["params"]
        masters = optax.tree.cast(params, jnp.float32)
        return HalfState(optax.tree.cast(params, jnp.float16), masters, optimizer.init(masters))

    def train_step(state: HalfState, batch: Batch) -> tuple[HalfState, dict[str, jax.Array]]:
        def loss_fn(params: Any) -> jax.Array:
            return cross_entropy(network.apply({"params": params}, batch["tokens"]), batch["targets"])

        loss, gradients = jax.value_and_grad(loss_fn)(state.params)
        updates, kept = optimizer.update(optax.tree.cast(gradients, jnp.float32), state.optimizer_state, state.masters)
        masters = optax.apply_updates(state.masters, updates)
        return HalfState(optax.tree.cast(masters, jnp.float16), masters, kept), {"loss": loss}

    return Model(
        name,
        make_state,
        train_step,
        partial(token_batch, sequence=shape.sequence, vocab_size=shape.vocab_size),
        batch_size,
    )
