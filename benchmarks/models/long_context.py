r"""A language model for one long sequence: causal attention that never holds a sequence × sequence matrix.

With a batch of one or two there are no examples to share out, so what can be cut is the sequence. Attention takes its
queries in turns, turn t those at positions t, t + T, t + 2T, …, each against all keys:

    o_q = Σ_{k ≤ q} softmax_k(q · k / √d) v_k,    scores float[batch, S / T, heads, S] at a time,

and computes each turn again in the backward pass (Rabe & Staats, "Self-attention does not need O(n²) memory", 2021; the
strides are those of Brandon et al., "Striped attention", 2023: every piece of the sequence has equal work in every turn).
All heads share one key and one value (Shazeer, "Fast transformer decoding", 2019), which makes these small beside the
queries. Positions are rotary; the feed-forward part is SwiGLU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax
from jax.typing import DTypeLike

from benchmarks.models.base import Batch, Family, Model, Size, token_batch
from benchmarks.models.llama_nnx import rotate


@dataclass(frozen=True)
class LongContextConfig:
    """The architecture; `turns`, in which attention takes its queries, divides `sequence`."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    sequence: int
    turns: int
    batch_size: int
    rope_base: float = 1e6
    learning_rate: float = 3e-4

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


CONFIGS: Mapping[str, LongContextConfig] = MappingProxyType(
    {
        Size.TOY: LongContextConfig(128, 64, 2, 8, 128, sequence=64, turns=2, batch_size=2, learning_rate=1e-2),
        Size.BENCH: LongContextConfig(4096, 256, 4, 4, 768, sequence=1024, turns=4, batch_size=1),
        **{
            f"1B-{kilo}k": LongContextConfig(32_000, 2048, 20, 16, 5632, kilo * 1024, turns=kilo, batch_size=size)
            for kilo, size in ((8, 2), (32, 1), (64, 1))
        },
    }
)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, turns: int) -> jax.Array:
    """Causal attention of query[batch, sequence, heads, d] to key and value[batch, sequence, d]; shaped like the query.

    Softmax is taken in at least 32 bits.
    """
    batch, sequence, heads, width = query.shape
    taken = jnp.moveaxis(query.reshape(batch, sequence // turns, turns, heads, width), 2, 0)

    @jax.checkpoint
    def turn(_: None, of_turn: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        first, query = of_turn
        scores = jnp.einsum("bqhd,bkd->bqhk", query, key) / math.sqrt(width)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        places = first + turns * jnp.arange(sequence // turns)
        seen = places[:, None] >= jnp.arange(sequence)
        weights = jax.nn.softmax(jnp.where(seen[:, None, :], scores, jnp.finfo(scores.dtype).min), axis=-1)
        return None, jnp.einsum("bqhk,bkd->bqhd", weights.astype(value.dtype), value)

    _, mixed = lax.scan(turn, None, (jnp.arange(turns), taken))
    return jnp.moveaxis(mixed, 0, 2).reshape(query.shape)


class Layer(nn.Module):
    """One transformer layer: float[batch, sequence, hidden] → the same."""

    config: LongContextConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        linear = partial(nn.DenseGeneral, use_bias=False, **types)
        h = nn.RMSNorm(name="attention_norm", **types)(x)
        query = rotate(linear((cfg.heads, cfg.head_dim), name="query")(h), cfg.rope_base)
        key = rotate(linear((1, cfg.head_dim), name="key")(h), cfg.rope_base)[:, :, 0]
        value = linear(cfg.head_dim, name="value")(h)
        mixed = attend(query, key, value, cfg.turns)
        x = x + linear(cfg.hidden, axis=(-2, -1), name="out")(mixed)
        h = nn.RMSNorm(name="ffn_norm", **types)(x)
        gated = nn.silu(linear(cfg.ffn, name="gate")(h)) * linear(cfg.ffn, name="up")(h)
        return x + linear(cfg.hidden, name="down")(gated)


class LongContext(nn.Module):
    """int[batch, sequence] → logits float[batch, sequence, vocabulary]."""

    config: LongContextConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        cfg = self.config
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = nn.Embed(cfg.vocab_size, cfg.hidden, name="embed", **types)(tokens)
        for index in range(cfg.layers):
            x = Layer(cfg, self.dtype, name=f"layer{index}")(x)
        x = nn.RMSNorm(name="final_norm", **types)(x)
        return nn.Dense(cfg.vocab_size, use_bias=False, name="head", **types)(x)


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update by AdamW; the loss is the mean cross entropy in nats per token."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["tokens"])
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradients), {"loss": loss}


def model_of(name: str, config: LongContextConfig, dtype: DTypeLike) -> Model:
    """The model of a configuration."""
    module = LongContext(config, dtype)

    def make_state() -> TrainState:
        params = module.init(jax.random.key(0), jnp.zeros((1, config.sequence), jnp.int32))["params"]
        return TrainState.create(apply_fn=module.apply, params=params, tx=optax.adamw(config.learning_rate))

    return Model(
        name=name,
        make_state=make_state,
        train_step=train_step,
        make_batch=lambda batch_size: token_batch(batch_size, config.sequence, config.vocab_size),
        batch_size=config.batch_size,
    )


FAMILY = Family(
    "long_context", tuple(CONFIGS), lambda size, dtype: model_of(f"long_context-{size}", CONFIGS[size], dtype)
)
