"""What does the model write, and how well does it predict text that it has not seen?

Both run the model's own apply function under plain `jax.jit` on the parameters as training leaves them. Where these lie
in pieces on several devices, XLA partitions the function after them, so no device has to hold the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.gpt.data import NumpyBatch
from examples.gpt.model import cross_entropy

Apply = Callable[..., jax.Array]  # the apply function of a Flax module


@partial(jax.jit, static_argnums=0)
def _loss(apply_fn: Apply, params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    return cross_entropy(apply_fn({"params": params}, tokens), targets)


@partial(jax.jit, static_argnums=0)
def _next_logits(apply_fn: Apply, params: Any, window: jax.Array, last: jax.Array) -> jax.Array:
    return apply_fn({"params": params}, window)[0, last].astype(jnp.float32)


def mean_loss(apply_fn: Apply, params: Any, batches: Iterable[NumpyBatch]) -> float:
    """The mean loss in nats per token over `batches`, which are of one size."""
    return float(np.mean([_loss(apply_fn, params, batch["tokens"], batch["targets"]) for batch in batches]))


def sample(
    apply_fn: Apply, params: Any, prompt: list[int], sequence: int, length: int, temperature: float = 0.7
) -> list[int]:
    """`prompt` followed by `length` more tokens, each drawn from what the model predicts after the last `sequence`.

    The draws are the same in every call. A window of fixed shape is computed anew for each token: one compilation, no
    cache of keys and values, which is enough for a look at the model.
    """
    random = np.random.default_rng(0)
    tokens = list(prompt)
    for _ in range(length):
        recent = tokens[-sequence:]
        window = np.zeros((1, sequence), np.int32)
        window[0, : len(recent)] = recent  # what comes after the last token is masked, so zeros do no harm
        logits = np.asarray(_next_logits(apply_fn, params, window, np.int32(len(recent) - 1)), np.float64)
        weights = np.exp((logits - logits.max()) / temperature)
        tokens.append(int(random.choice(len(weights), p=weights / weights.sum())))
    return tokens
