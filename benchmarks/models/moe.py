"""The mixture of experts of the example: Flax Linen, GShard's gating, AdamW with clipping and a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.models.base import Family, Model, Size, token_batch
from examples.gpt.model import GPTConfig, OptimizerConfig
from examples.moe.model import PRESETS, MoEConfig, create_state, train_step

PUBLISHED = ("380M", "690M", "1.3B", "2.4B", "10B", "27B", "70B")
CONFIGS: Mapping[str, MoEConfig] = MappingProxyType(
    {
        Size.TOY: MoEConfig(GPTConfig(vocab_size=128, hidden=64, layers=2, heads=8, sequence=16, mlp_ratio=2)),
        Size.BENCH: MoEConfig(GPTConfig(vocab_size=4096, hidden=256, layers=4, heads=8, sequence=64)),
        **{name: PRESETS[name] for name in PUBLISHED},
    }
)
BATCH_SIZES: Mapping[str, int] = MappingProxyType({Size.TOY: 8, Size.BENCH: 16})
PUBLISHED_BATCH_SIZE = 64


def model_of(name: str, config: MoEConfig, batch_size: int, learning_rate: float = 1e-3) -> Model:
    """The model of a configuration."""
    optimizer = OptimizerConfig(peak_learning_rate=learning_rate, warmup_steps=5, total_steps=100)
    return Model(
        name=name,
        make_state=lambda: create_state(jax.random.key(0), config, optimizer),
        train_step=train_step,
        make_batch=lambda batch_size: token_batch(batch_size, config.base.sequence, config.base.vocab_size),
        batch_size=batch_size,
    )


def _build(size: str, dtype: DTypeLike) -> Model:
    config = CONFIGS[size]
    base = dataclasses.replace(config.base, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    batch_size = BATCH_SIZES.get(size, PUBLISHED_BATCH_SIZE)
    rate = 1e-2 if size == Size.TOY else 1e-3
    return model_of(f"moe-{size}", dataclasses.replace(config, base=base), batch_size, rate)


FAMILY = Family("moe", tuple(CONFIGS), _build)
