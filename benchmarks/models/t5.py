"""T5 (Raffel et al. 2020): encoder and decoder with relative position biases, cross attention, dropout, Adafactor.

Attention's scores get b[bucket(k − q)], one row of biases per bucket of distances, shared by all layers of a stack:
half of the buckets for single distances, half for logarithmic ranges up to 128 (section 2.1). Norms scale only, nothing
else has a bias, and the scores are not divided by √d.
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
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from benchmarks.models.base import Batch, Family, Model, Size, token_batch
from benchmarks.models.linen import Task, mean_cross_entropy, supervised

BUCKETS, FARTHEST = 32, 128


@dataclass(frozen=True)
class T5Config:
    """`layers` in the encoder and as many in the decoder; heads · head_dim need not be `hidden`."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    head_dim: int
    vocab_size: int = 32_128
    sequence: int = 512
    target_sequence: int = 128
    batch_size: int = 128
    dropout: float = 0.1
    learning_rate: float = 1e-2


# 60M to 11B: section 3.7 of the paper, the vocabulary padded as in the released models.
CONFIGS: Mapping[str, T5Config] = MappingProxyType(
    {
        Size.TOY: T5Config(
            64, 128, 1, heads=8, head_dim=8, vocab_size=128, sequence=16, target_sequence=8, batch_size=8
        ),
        Size.BENCH: T5Config(
            256, 1024, 2, heads=8, head_dim=32, vocab_size=4096, sequence=64, target_sequence=32, batch_size=16
        ),
        "60M": T5Config(512, 2048, 6, heads=8, head_dim=64),
        "220M": T5Config(768, 3072, 12, heads=12, head_dim=64),
        "770M": T5Config(1024, 4096, 24, heads=16, head_dim=64),
        "3B": T5Config(1024, 16_384, 24, heads=32, head_dim=128),
        "11B": T5Config(1024, 65_536, 24, heads=128, head_dim=128),
    }
)


def bucket_of(distance: jax.Array, both_ways: bool) -> jax.Array:
    """Key position minus query position → bucket; int32 of the same shape. A decoder looks back only."""
    buckets, bucket = BUCKETS, jnp.zeros_like(distance)
    if both_ways:
        buckets //= 2
        bucket = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    single = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1).astype(float) / single) / math.log(FARTHEST / single)
    ranged = single + (ratio * (buckets - single)).astype(jnp.int32)
    return bucket + jnp.where(distance < single, distance, jnp.minimum(ranged, buckets - 1))


class PositionBias(nn.Module):
    """Biases float[heads, queries, keys] for as many queries as keys."""

    heads: int
    both_ways: bool
    dtype: Any

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        position = jnp.arange(length, dtype=jnp.int32)
        buckets = bucket_of(position[None, :] - position[:, None], self.both_ways)
        table = nn.Embed(BUCKETS, self.heads, dtype=self.dtype, param_dtype=self.dtype, name="table")
        return table(buckets).transpose(2, 0, 1)


class Attention(nn.Module):
    """Queries of float[batch, q, hidden] over float[batch, k, hidden]; `bias` float[heads, q, k] holds the mask too."""

    config: T5Config
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: jax.Array | None, train: bool) -> jax.Array:
        cfg = self.config
        types = {"use_bias": False, "dtype": self.dtype, "param_dtype": self.dtype}
        heads = (cfg.heads, cfg.head_dim)
        small = nn.initializers.normal((cfg.hidden * cfg.head_dim) ** -0.5)  # in place of the division by √d
        query = nn.DenseGeneral(heads, kernel_init=small, name="query", **types)(x)
        key = nn.DenseGeneral(heads, name="key", **types)(memory)
        value = nn.DenseGeneral(heads, name="value", **types)(memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        weights = nn.softmax(scores if bias is None else scores + bias, axis=-1).astype(self.dtype)
        weights = nn.Dropout(cfg.dropout, deterministic=not train)(weights)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(cfg.hidden, axis=(-2, -1), name="out", **types)(mixed)


class Stack(nn.Module):
    """float[batch, sequence, hidden] → the same; a decoder's layers also attend to `memory`, the encoder's result."""

    config: T5Config
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None, train: bool) -> jax.Array:
        cfg = self.config
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        dropout = nn.Dropout(cfg.dropout, deterministic=not train)
        bias = PositionBias(cfg.heads, memory is None, self.dtype, name="position")(x.shape[1])
        if memory is not None:
            causal = jnp.tril(jnp.ones(bias.shape[1:], dtype=bool))
            bias = jnp.where(causal, bias, jnp.finfo(bias.dtype).min)
        x = dropout(x)
        for layer in range(cfg.layers):
            y = nn.RMSNorm(name=f"norm_self{layer}", **types)(x)
            x = x + dropout(Attention(cfg, self.dtype, name=f"self{layer}")(y, y, bias, train))
            if memory is not None:
                y = nn.RMSNorm(name=f"norm_cross{layer}", **types)(x)
                x = x + dropout(Attention(cfg, self.dtype, name=f"cross{layer}")(y, memory, None, train))
            y = nn.RMSNorm(name=f"norm_ffn{layer}", **types)(x)
            y = nn.relu(nn.Dense(cfg.ffn, use_bias=False, name=f"up{layer}", **types)(y))
            x = x + dropout(nn.Dense(cfg.hidden, use_bias=False, name=f"down{layer}", **types)(dropout(y)))
        return dropout(nn.RMSNorm(name="final_norm", **types)(x))


class T5(nn.Module):
    """int[batch, sequence], int[batch, target_sequence] → logits float[batch, target_sequence, vocabulary]."""

    config: T5Config
    dtype: Any

    @nn.compact
    def __call__(self, source: jax.Array, tokens: jax.Array, train: bool) -> jax.Array:
        cfg = self.config
        init = nn.initializers.normal(1.0)
        embed = nn.Embed(cfg.vocab_size, cfg.hidden, self.dtype, self.dtype, embedding_init=init, name="embed")
        memory = Stack(cfg, self.dtype, name="encoder")(embed(source), None, train)
        decoded = Stack(cfg, self.dtype, name="decoder")(embed(tokens), memory, train)
        return embed.attend(decoded / math.sqrt(cfg.hidden))


def _make_batch(config: T5Config, batch_size: int) -> Batch:
    source = np.random.default_rng(1).integers(0, config.vocab_size, (batch_size, config.sequence), dtype=np.int32)
    return {"source": source, **token_batch(batch_size, config.target_sequence, config.vocab_size)}


def _build(size: str, dtype: DTypeLike) -> Model:
    config = CONFIGS[size]
    task = Task(
        module=T5(config, jnp.dtype(dtype)),
        inputs=("source", "tokens"),
        loss=mean_cross_entropy("targets"),
        optimizer=optax.adafactor(config.learning_rate, min_dim_size_to_factor=64 if size == Size.TOY else 128),
        uses_dropout=True,
    )
    return supervised(f"t5-{size}", task, partial(_make_batch, config), config.batch_size)


FAMILY = Family("t5", tuple(CONFIGS), _build)
