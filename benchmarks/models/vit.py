"""Vision transformer (Dosovitskiy et al. 2021): patches by a strided convolution, pre-norm blocks, dropout, AdamW.

The classifier reads the mean over all patches (Beyer et al. 2022, "Better plain ViT baselines") instead of one more
token.
"""

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

from benchmarks.models.base import Family, Model, Size, image_batch
from benchmarks.models.linen import Task, mean_cross_entropy, supervised


@dataclass(frozen=True)
class ViTConfig:
    """The architecture; the side of a patch divides the side of the square images."""

    hidden: int
    layers: int
    heads: int
    patch: int
    image: int
    classes: int
    batch_size: int
    dropout: float = 0.1
    learning_rate: float = 1e-3


# 86M, 307M, 632M: table 1 of the paper, with the patches of B/16, L/16 and H/14.
CONFIGS: Mapping[str, ViTConfig] = MappingProxyType(
    {
        Size.TOY: ViTConfig(64, 2, heads=8, patch=4, image=16, classes=16, batch_size=8),
        Size.BENCH: ViTConfig(256, 4, heads=8, patch=4, image=32, classes=64, batch_size=16),
        "86M": ViTConfig(768, 12, heads=12, patch=16, image=224, classes=1000, batch_size=1024),
        "307M": ViTConfig(1024, 24, heads=16, patch=16, image=224, classes=1000, batch_size=1024),
        "632M": ViTConfig(1280, 32, heads=16, patch=14, image=224, classes=1000, batch_size=1024),
    }
)


class Block(nn.Module):
    """One layer: float[batch, patches, hidden] → the same."""

    config: ViTConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        cfg = self.config
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        dropout = nn.Dropout(cfg.dropout, deterministic=not train)
        attention = nn.MultiHeadDotProductAttention(
            cfg.heads, dropout_rate=cfg.dropout, deterministic=not train, name="attention", **types
        )
        y = nn.LayerNorm(name="norm1", **types)(x)
        x = x + dropout(attention(y, y))
        y = nn.gelu(nn.Dense(4 * cfg.hidden, name="up", **types)(nn.LayerNorm(name="norm2", **types)(x)))
        return x + dropout(nn.Dense(cfg.hidden, name="down", **types)(dropout(y)))


class ViT(nn.Module):
    """float[batch, height, width, 3] → logits float[batch, classes]."""

    config: ViTConfig
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        cfg = self.config
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        side = (cfg.patch, cfg.patch)
        x = nn.Conv(cfg.hidden, side, side, padding="VALID", name="patches", **types)(images)
        x = x.reshape(x.shape[0], -1, cfg.hidden)
        x = x + self.param("position", nn.initializers.normal(0.02), x.shape[1:], self.dtype)
        x = nn.Dropout(cfg.dropout, deterministic=not train)(x)
        for layer in range(cfg.layers):
            x = Block(cfg, self.dtype, name=f"layer{layer}")(x, train)
        x = nn.LayerNorm(name="final_norm", **types)(x).mean(axis=1)
        return nn.Dense(cfg.classes, name="head", **types)(x)


def _build(size: str, dtype: DTypeLike) -> Model:
    config = CONFIGS[size]
    task = Task(
        module=ViT(config, jnp.dtype(dtype)),
        inputs=("images",),
        loss=mean_cross_entropy("labels"),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(config.learning_rate, weight_decay=0.1)),
        uses_dropout=True,
    )
    make_batch = partial(image_batch, side=config.image, classes=config.classes, dtype=dtype)
    return supervised(f"vit-{size}", task, make_batch, config.batch_size)


FAMILY = Family("vit", tuple(CONFIGS), _build)
