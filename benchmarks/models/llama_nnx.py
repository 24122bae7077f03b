r"""A Llama-style language model in NNX (Touvron et al. 2023; grouped queries: Ainslie et al. 2023).

Each layer: x ← x + Attention(RMSNorm(x)) with rotary positions and G query heads per key-value head, then
x ← x + W_d (silu(W_g h) ⊙ W_u h) with h = RMSNorm(x). No biases; the vocabulary's projection is a matrix of its own.

The step merges model and optimizer from one state, updates both in place, and splits them again: the functional form
that NNX's own guides give to a step under `jax.jit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from benchmarks.models.base import Batch, Family, Model, Size, token_batch


@dataclass(frozen=True)
class LlamaConfig:
    """The architecture; `kv_heads` divides `heads`."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    sequence: int
    batch_size: int
    rope_base: float = 500_000.0
    learning_rate: float = 3e-4

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


# 1B, 8B and 70B: the model cards of Llama 3.2 and 3.1 (the released 1B ties its two vocabulary matrices).
CONFIGS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        Size.TOY: LlamaConfig(128, 64, 2, heads=16, kv_heads=8, ffn=128, sequence=16, batch_size=8, learning_rate=1e-2),
        Size.BENCH: LlamaConfig(4096, 256, 4, heads=16, kv_heads=8, ffn=768, sequence=64, batch_size=16),
        "1B": LlamaConfig(128_256, 2048, 16, heads=32, kv_heads=8, ffn=8192, sequence=4096, batch_size=16),
        "8B": LlamaConfig(128_256, 4096, 32, heads=32, kv_heads=8, ffn=14_336, sequence=4096, batch_size=16),
        "70B": LlamaConfig(128_256, 8192, 80, heads=64, kv_heads=8, ffn=28_672, sequence=4096, batch_size=16),
    }
)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary positions (Su et al. 2021) for x[batch, sequence, heads, head_dim]: halves of a head turn as pairs."""
    half = x.shape[-1] // 2
    compute = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = base ** (-jnp.arange(half, dtype=compute) / half)
    angles = jnp.arange(x.shape[1], dtype=compute)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(compute), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def linear_options(dtype: DTypeLike, rngs: nnx.Rngs) -> dict[str, Any]:
    """No linear map of this model has a bias."""
    return {"use_bias": False, "dtype": dtype, "param_dtype": dtype, "rngs": rngs}


class Attention(nnx.Module):
    """float[batch, sequence, hidden] → the same; causal, with grouped queries."""

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        key_value = config.kv_heads * config.head_dim
        options = linear_options(dtype, rngs)
        self.query = nnx.Linear(config.hidden, config.hidden, **options)
        self.key = nnx.Linear(config.hidden, key_value, **options)
        self.value = nnx.Linear(config.hidden, key_value, **options)
        self.out = nnx.Linear(config.hidden, config.hidden, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        batch, sequence, _ = x.shape
        query = rotate(self.query(x).reshape(batch, sequence, cfg.heads, cfg.head_dim), cfg.rope_base)
        key = rotate(self.key(x).reshape(batch, sequence, cfg.kv_heads, cfg.head_dim), cfg.rope_base)
        value = self.value(x).reshape(batch, sequence, cfg.kv_heads, cfg.head_dim)
        grouped = query.reshape(batch, sequence, cfg.kv_heads, cfg.heads // cfg.kv_heads, cfg.head_dim)

        scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key) / math.sqrt(cfg.head_dim)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        causal = jnp.tril(jnp.ones((sequence, sequence), dtype=bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bkgqs,bskd->bqkgd", weights, value)
        return self.out(mixed.reshape(batch, sequence, cfg.hidden))


class SwiGLU(nnx.Module):
    """float[batch, sequence, hidden] → the same (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        options = linear_options(dtype, rngs)
        self.gate = nnx.Linear(config.hidden, config.ffn, **options)
        self.up = nnx.Linear(config.hidden, config.ffn, **options)
        self.down = nnx.Linear(config.ffn, config.hidden, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """One transformer layer: float[batch, sequence, hidden] → the same."""

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(config.hidden, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.attention = Attention(config, dtype, rngs)
        self.ffn_norm = nnx.RMSNorm(config.hidden, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.ffn = SwiGLU(config, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Llama(nnx.Module):
    """int[batch, sequence] → logits float[batch, sequence, vocabulary]."""

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(config.vocab_size, config.hidden, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.hidden, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(config.hidden, config.vocab_size, **linear_options(dtype, rngs))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _build(size: str, dtype: DTypeLike) -> Model:
    config = CONFIGS[size]

    def make_model() -> tuple[Llama, nnx.Optimizer[Llama]]:
        model = Llama(config, dtype, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(config.learning_rate, weight_decay=0.1), wrt=nnx.Param)

    definition = nnx.graphdef(nnx.eval_shape(make_model))

    def train_step(state: nnx.State[Any, Any], batch: Batch) -> tuple[nnx.State[Any, Any], dict[str, jax.Array]]:
        model, optimizer = nnx.merge(definition, state)

        def loss_fn(model: Llama) -> jax.Array:
            logits = model(batch["tokens"])
            logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), {"loss": loss}

    return Model(
        name=f"llama_nnx-{size}",
        make_state=lambda: nnx.state(make_model()),
        train_step=train_step,
        make_batch=lambda batch_size: token_batch(batch_size, config.sequence, config.vocab_size),
        batch_size=config.batch_size,
    )


FAMILY = Family("llama_nnx", tuple(CONFIGS), _build)
