"""The GPT of the example: Flax Linen, AdamW with clipping and a schedule; layers unrolled or scanned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.models.base import Family, Model, Size, token_batch
from examples.gpt.model import PRESETS, GPTConfig, OptimizerConfig, create_state, train_step

PUBLISHED = ("125M", "350M", "1.3B", "2.6B", "6.7B", "15B", "39B")
CONFIGS: Mapping[str, GPTConfig] = MappingProxyType(
    {
        Size.TOY: GPTConfig(vocab_size=128, hidden=64, layers=2, heads=8, sequence=16),
        Size.BENCH: GPTConfig(vocab_size=4096, hidden=256, layers=4, heads=8, sequence=64),
        **{name: PRESETS[name] for name in PUBLISHED},
    }
)
BATCH_SIZES: Mapping[str, int] = MappingProxyType({Size.TOY: 8, Size.BENCH: 16})
PUBLISHED_BATCH_SIZE = 64


def _build(name: str, scan_layers: bool, size: str, dtype: DTypeLike) -> Model:
    config = dataclasses.replace(
        CONFIGS[size], scan_layers=scan_layers, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype)
    )
    optimizer = OptimizerConfig(peak_learning_rate=1e-2 if size == Size.TOY else 1e-3, warmup_steps=5, total_steps=100)
    return Model(
        name=f"{name}-{size}",
        make_state=lambda: create_state(jax.random.key(0), config, optimizer),
        train_step=train_step,
        make_batch=lambda batch_size: token_batch(batch_size, config.sequence, config.vocab_size),
        batch_size=BATCH_SIZES.get(size, PUBLISHED_BATCH_SIZE),
    )


UNROLLED = Family("gpt", tuple(CONFIGS), partial(_build, "gpt", False))
SCANNED = Family("gpt_scan", tuple(CONFIGS), partial(_build, "gpt_scan", True))
