"""Wide-ResNet (He et al. 2016; Zagoruyko and Komodakis 2016) with BatchNorm, SGD with momentum.

A bottleneck block is x ← relu(S(x) + W₃ relu(W₂ ∗ relu(W₁ x))), each convolution followed by BatchNorm, with C, w·C and
4·C output features, and S a strided projection where the shape changes. Only the middle convolution is widened, as in
the Wide-ResNets of Zheng et al. 2022 (Alpa, OSDI), table 5, whose sizes these are.
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
class ResNetConfig:
    """Blocks per stage, features of the first stage, widening, classes, side of the square images.

    `remat`: the backward pass computes each block once more instead of keeping what is inside of it.
    """

    stages: tuple[int, ...]
    channels: int
    width: int
    image: int
    classes: int
    batch_size: int
    learning_rate: float = 0.1
    remat: bool = False


RESNET50, RESNET101 = (3, 4, 6, 3), (3, 4, 23, 3)


def _published(stages: tuple[int, ...], channels: int, width: int, batch_size: int = 1536) -> ResNetConfig:
    return ResNetConfig(stages, channels, width, image=224, classes=1024, batch_size=batch_size)


CONFIGS: Mapping[str, ResNetConfig] = MappingProxyType(
    {
        Size.TOY: ResNetConfig((1, 1), channels=8, width=2, image=16, classes=16, batch_size=8),
        Size.BENCH: ResNetConfig((1, 1, 1), channels=16, width=2, image=32, classes=64, batch_size=128),
        "250M": _published(RESNET50, 160, 2),
        "500M": _published(RESNET50, 224, 2),
        "1B": _published(RESNET50, 320, 2),
        "2B": _published(RESNET50, 448, 2),
        "4B": _published(RESNET50, 640, 2),
        "6.8B": _published(RESNET50, 320, 16),
        "13B": _published(RESNET101, 320, 16, batch_size=1520),
    }
)


class Bottleneck(nn.Module):
    """float[batch, height, width, features] → float[batch, height/stride, width/stride, 4·channels]."""

    channels: int
    width: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype, param_dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not train, dtype=self.dtype, param_dtype=self.dtype)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.channels, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.channels * self.width, (3, 3), strides)(y)))
        y = norm()(conv(4 * self.channels, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="projection_norm")(conv(4 * self.channels, (1, 1), strides, name="projection")(x))
        return nn.relu(x + y)


class WideResNet(nn.Module):
    """float[batch, height, width, 3] → logits float[batch, classes]."""

    config: ResNetConfig
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        cfg = self.config
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = nn.Conv(cfg.channels, (7, 7), (2, 2), use_bias=False, name="stem", **types)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, name="stem_norm", **types)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        bottleneck = nn.remat(Bottleneck, static_argnums=(2,)) if cfg.remat else Bottleneck
        for stage, blocks in enumerate(cfg.stages):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = bottleneck(cfg.channels * 2**stage, cfg.width, stride, self.dtype)(x, train)
        return nn.Dense(cfg.classes, name="head", **types)(jnp.mean(x, (1, 2)))


def model_of(name: str, config: ResNetConfig, dtype: DTypeLike = jnp.float32) -> Model:
    """The model of a configuration."""
    task = Task(
        module=WideResNet(config, jnp.dtype(dtype)),
        inputs=("images",),
        loss=mean_cross_entropy("labels"),
        optimizer=optax.sgd(config.learning_rate, momentum=0.9),
    )
    make_batch = partial(image_batch, side=config.image, classes=config.classes, dtype=dtype)
    return supervised(name, task, make_batch, config.batch_size)


def _build(size: str, dtype: DTypeLike) -> Model:
    return model_of(f"wide_resnet-{size}", CONFIGS[size], dtype)


FAMILY = Family("wide_resnet", tuple(CONFIGS), _build)
