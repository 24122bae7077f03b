"""A language model of stacked LSTMs (Zaremba et al. 2014): a scan over time, dropout between layers, SGD with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from benchmarks.models.base import Family, Model, Size, token_batch
from benchmarks.models.linen import Task, mean_cross_entropy, supervised


@dataclass(frozen=True)
class LSTMConfig:
    """Width of embeddings and of every layer's state, number of layers, steps in time."""

    vocab_size: int
    hidden: int
    layers: int
    sequence: int
    batch_size: int
    dropout: float
    learning_rate: float = 0.5


# 66M: the paper's large network (section 4.1), 20 sequences for each of 8 devices.
CONFIGS: Mapping[str, LSTMConfig] = MappingProxyType(
    {
        Size.TOY: LSTMConfig(128, 32, 2, sequence=8, batch_size=8, dropout=0.1, learning_rate=8.0),
        Size.BENCH: LSTMConfig(4096, 256, 2, sequence=32, batch_size=160, dropout=0.2),
        "66M": LSTMConfig(10_000, 1500, 2, sequence=35, batch_size=160, dropout=0.65),
    }
)


class LanguageModel(nn.Module):
    """int[batch, sequence] → logits float[batch, sequence, vocabulary]."""

    config: LSTMConfig
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        cfg = self.config
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        dropout = nn.Dropout(cfg.dropout, deterministic=not train)
        x = dropout(nn.Embed(cfg.vocab_size, cfg.hidden, name="embed", **types)(tokens))
        for layer in range(cfg.layers):
            x = dropout(nn.RNN(nn.OptimizedLSTMCell(cfg.hidden, **types), name=f"layer{layer}")(x))
        return nn.Dense(cfg.vocab_size, name="head", **types)(x)


def _build(size: str, dtype: DTypeLike) -> Model:
    config = CONFIGS[size]
    task = Task(
        module=LanguageModel(config, jnp.dtype(dtype)),
        inputs=("tokens",),
        loss=mean_cross_entropy("targets"),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(config.learning_rate, momentum=0.9)),
        uses_dropout=True,
    )
    make_batch = partial(token_batch, sequence=config.sequence, vocab_size=config.vocab_size)
    return supervised(f"lstm-{size}", task, make_batch, config.batch_size)


FAMILY = Family("lstm", tuple(CONFIGS), _build)
