"""The models on which autopar is measured, each written as its framework's own guides write it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.models import gpt, llama_nnx, long_context, lstm, mlp_nnx, moe, t5, two_tower, unet, vit, wide_resnet
from benchmarks.models.base import Batch, Family, Model, Size

__all__ = ["FAMILIES", "Batch", "Family", "Model", "Size", "build"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt": gpt.UNROLLED,
        "gpt_scan": gpt.SCANNED,
        "mlp_nnx": mlp_nnx.FAMILY,
        "llama_nnx": llama_nnx.FAMILY,
        "moe": moe.FAMILY,
        "long_context": long_context.FAMILY,
        "two_tower": two_tower.FAMILY,
        "gpt_remat": gpt.REMATERIALISED,
        "gpt2": gpt.GPT2,
        "wide_resnet": wide_resnet.FAMILY,
        "unet": unet.FAMILY,
        "vit": vit.FAMILY,
        "t5": t5.FAMILY,
        "lstm": lstm.FAMILY,
    }
)


def build(name: str, size: str = Size.TOY, dtype: DTypeLike = jnp.float32) -> Model:
    """The model `name` of FAMILIES at `size`; raises KeyError, naming what there is, for another name or size.

    Float64 needs `jax_enable_x64`.
    """
    if name not in FAMILIES:
        raise KeyError(f"no model {name!r}; there are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if size not in family.sizes:
        raise KeyError(f"{name} has no size {size!r}; there are {', '.join(family.sizes)}")
    return family.build(size, dtype)
