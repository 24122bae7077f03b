"""What does a measurement need of a model? A way to make its state, its train step, and batches of any size."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

Batch = dict[str, Any]  # arrays, each with the batch as its first axis
TrainStep = Callable[[Any, Batch], tuple[Any, dict[str, jax.Array]]]


class Size(enum.StrEnum):
    """The two sizes that every family has; others bear the names under which they were published."""

    TOY = "toy"  # a few milliseconds a step; every dimension divides by 8 devices; for comparing numbers in float64
    BENCH = "bench"  # hundreds of milliseconds a step on two CPU cores; for comparing times


@dataclass(frozen=True)
class Model:
    """One model at one size.

    `make_state` takes no arguments and can be traced; `train_step(state, batch)` returns the new state and metrics,
    "loss" among them; `make_batch(n)` returns the same NumPy arrays for the same n each time.
    """

    name: str
    make_state: Callable[[], Any]
    train_step: TrainStep
    make_batch: Callable[[int], Batch]
    batch_size: int

    def abstract_state(self) -> Any:
        """Shapes and dtypes of the state; nothing is allocated."""
        return jax.eval_shape(self.make_state)

    def abstract_batch(self, batch_size: int | None = None) -> Batch:
        """Shapes and dtypes of a batch of `batch_size`, by default the model's own."""
        rows = batch_size or self.batch_size
        return {
            field: jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)
            for field, array in self.make_batch(1).items()
        }


@dataclass(frozen=True)
class Family:
    """One architecture in several sizes; `build(size, dtype)` keeps parameters in `dtype` and computes in it."""

    name: str
    sizes: tuple[str, ...]
    build: Callable[[str, DTypeLike], Model]


def token_batch(batch_size: int, sequence: int, vocab_size: int) -> Batch:
    """Random tokens int32[batch_size, sequence], and as targets the token that follows each."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocab_size, (batch_size, sequence + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def image_batch(batch_size: int, side: int, classes: int, dtype: DTypeLike) -> Batch:
    """Random images float[batch_size, side, side, 3] and labels int32[batch_size]."""
    random = np.random.default_rng(0)
    images = random.standard_normal((batch_size, side, side, 3)).astype(dtype)
    return {"images": images, "labels": random.integers(0, classes, batch_size, dtype=np.int32)}
