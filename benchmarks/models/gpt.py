"""The GPT of the example: Flax Linen, AdamW with clipping and a schedule; layers unrolled, scanned or rematerialised.

GPT-2 (Radford et al. 2019, table 2) is the same network with dropout and a vocabulary that no power of two divides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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


GPT2_VOCABULARY = 50_257
GPT2_CONFIGS: Mapping[str, GPTConfig] = MappingProxyType(
    {
        Size.TOY: dataclasses.replace(CONFIGS[Size.TOY], vocab_size=125, dropout=0.1),
        Size.BENCH: dataclasses.replace(CONFIGS[Size.BENCH], vocab_size=4097, dropout=0.1),
        "124M": GPTConfig(GPT2_VOCABULARY, 768, 12, heads=12, dropout=0.1),
        "355M": GPTConfig(GPT2_VOCABULARY, 1024, 24, heads=16, dropout=0.1),
        "774M": GPTConfig(GPT2_VOCABULARY, 1280, 36, heads=20, dropout=0.1),
        "1.5B": GPTConfig(GPT2_VOCABULARY, 1600, 48, heads=25, dropout=0.1),
    }
)


def model_of(name: str, config: GPTConfig, batch_size: int, learning_rate: float = 1e-3) -> Model:
    """The model of a configuration."""
    optimizer = OptimizerConfig(peak_learning_rate=learning_rate, warmup_steps=5, total_steps=100)
    return Model(
        name=name,
        make_state=lambda: create_state(jax.random.key(0), config, optimizer),
        train_step=train_step,
        make_batch=lambda batch_size: token_batch(batch_size, config.sequence, config.vocab_size),
        batch_size=batch_size,
    )


def _build(name: str, config: GPTConfig, size: str, dtype: DTypeLike) -> Model:
    config = dataclasses.replace(config, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    batch_size = BATCH_SIZES.get(size, PUBLISHED_BATCH_SIZE)
    return model_of(f"{name}-{size}", config, batch_size, 1e-2 if size == Size.TOY else 1e-3)


def _family(name: str, configs: Mapping[str, GPTConfig], **changed: bool) -> Family:
    def build(size: str, dtype: DTypeLike) -> Model:
        return _build(name, dataclasses.replace(configs[size], **changed), size, dtype)

    return Family(name, tuple(configs), build)


UNROLLED = _family("gpt", CONFIGS)
SCANNED = _family("gpt_scan", CONFIGS, scan_layers=True)
REMATERIALISED = _family("gpt_remat", CONFIGS, remat=True)
GPT2 = _family("gpt2", GPT2_CONFIGS)
