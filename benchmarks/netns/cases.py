"""Models of :mod:`benchmarks.cluster`: those of :mod:`benchmarks.models`, in sizes where links of a gigabit matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax

from benchmarks.models import Model, build
from benchmarks.models.base import token_batch
from examples.gpt.model import GPTConfig, OptimizerConfig, create_state, train_step


def _rows(name: str, rows: int) -> Model:
    return dataclasses.replace(build(name, "bench"), batch_size=rows)


def _wide_gpt() -> Model:
    config = GPTConfig(vocab_size=2048, hidden=512, layers=4, heads=8, sequence=64)
    return Model(
        name="gpt 14M",
        make_state=lambda: create_state(jax.random.key(0), config, OptimizerConfig(warmup_steps=5, total_steps=100)),
        train_step=train_step,
        make_batch=lambda rows: token_batch(rows, config.sequence, config.vocab_size),
        batch_size=8,
    )


CASES: Mapping[str, Callable[[], Model]] = MappingProxyType(
    {
        "gpt": lambda: _rows("gpt", 16),
        "gpt 14M": _wide_gpt,
        "moe": lambda: _rows("moe", 16),
        "unet": lambda: _rows("unet", 16),
    }
)
LARGER = ("gpt 14M", "moe")


def model_of(name: str) -> Model:
    """The model of a case."""
    return CASES[name]()
