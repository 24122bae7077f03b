"""U-Net (Ronneberger et al. 2015) with GroupNorm (Wu and He 2018): images to a class for each pixel, Adam.

Two convolutions on every level (one in the toy); down by max-pooling, up by transposed convolutions; what a level had on
the way down is concatenated to what comes up. Convolutions are padded, so that the output has the size of the input.
"""

from __future__ import annotations

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

from benchmarks.models.base import Batch, Family, Model, Size, image_batch
from benchmarks.models.linen import Task, mean_cross_entropy, supervised


@dataclass(frozen=True)
class UNetConfig:
    """Features of the top level (doubled on each level below), levels below it, convolutions per level, groups."""

    channels: int
    depth: int
    image: int
    batch_size: int
    convolutions: int = 2
    groups: int = 8
    classes: int = 8
    learning_rate: float = 1e-3


CONFIGS: Mapping[str, UNetConfig] = MappingProxyType(
    {
        Size.TOY: UNetConfig(channels=16, depth=1, image=8, batch_size=8, convolutions=1, learning_rate=3e-2),
        Size.BENCH: UNetConfig(channels=16, depth=2, image=32, batch_size=16),
        "31M": UNetConfig(channels=64, depth=4, image=512, batch_size=64),
    }
)


class UNet(nn.Module):
    """float[batch, height, width, 3] → logits float[batch, height, width, classes]."""

    config: UNetConfig
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        cfg = self.config
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        conv = partial(nn.Conv, kernel_size=(3, 3), use_bias=False, **types)

        def level_of(x: jax.Array, features: int) -> jax.Array:
            for _ in range(cfg.convolutions):
                x = nn.relu(nn.GroupNorm(cfg.groups, **types)(conv(features)(x)))
            return x

        widths = [cfg.channels * 2**level for level in range(cfg.depth)]
        x, skips = images, []
        for features in widths:
            x = level_of(x, features)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = level_of(x, cfg.channels * 2**cfg.depth)
        for features, skip in zip(reversed(widths), reversed(skips), strict=True):
            x = nn.ConvTranspose(features, (2, 2), (2, 2), **types)(x)
            x = level_of(jnp.concatenate([skip, x], axis=-1), features)
        return nn.Conv(cfg.classes, (1, 1), name="head", **types)(x)


def _make_batch(config: UNetConfig, dtype: DTypeLike, batch_size: int) -> Batch:
    """Images, and for each pixel how bright its first channel is."""
    images = image_batch(batch_size, config.image, config.classes, dtype)["images"]
    brightness = np.clip((images[..., 0] + 2) * (config.classes / 4), 0, config.classes - 1)
    return {"images": images, "labels": brightness.astype(np.int32)}


def _build(size: str, dtype: DTypeLike) -> Model:
    config = CONFIGS[size]
    task = Task(
        module=UNet(config, jnp.dtype(dtype)),
        inputs=("images",),
        loss=mean_cross_entropy("labels"),
        optimizer=optax.adam(config.learning_rate),
    )
    return supervised(f"unet-{size}", task, partial(_make_batch, config, dtype), config.batch_size)


FAMILY = Family("unet", tuple(CONFIGS), _build)
