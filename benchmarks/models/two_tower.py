r"""Two towers for retrieval: u = U(user features), v = V(item features), trained so that a user's own item scores best.

Every sparse feature is a bag of ids, looked up in a table of embeddings and averaged; a tower joins its bags and sends
them through an MLP onto the unit sphere. With items v_1 … v_B of the batch the loss of user i is in-batch softmax,

    −log softmax_j (u_i · v_j / τ − log q_j)[i],

where q_j, the frequency of item j, corrects for popular items being drawn often (Yi et al., "Sampling-bias-corrected
neural modeling for large corpus item recommendations", RecSys 2019, section 3). The tables hold nearly all parameters
and take hardly any arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.typing import DTypeLike

from benchmarks.models.base import Batch, Family, Model, Size


@dataclass(frozen=True)
class TowerConfig:
    """Rows of each feature's table, and ids in its bag."""

    rows: tuple[int, ...]
    bag: int


@dataclass(frozen=True)
class TwoTowerConfig:
    """Both towers; `embedding` is the width of every table, `widths` the layers of both MLPs."""

    user: TowerConfig
    item: TowerConfig
    embedding: int
    widths: tuple[int, ...]
    batch_size: int
    temperature: float = 0.05
    learning_rate: float = 1e-2


CONFIGS: Mapping[str, TwoTowerConfig] = MappingProxyType(
    {
        Size.TOY: TwoTowerConfig(TowerConfig((256, 64), 4), TowerConfig((512,), 2), 16, (32, 16), 16),
        Size.BENCH: TwoTowerConfig(TowerConfig((65_536, 4096), 8), TowerConfig((131_072,), 4), 32, (256, 64), 256),
        # Tables of the order of the corpora in Yi et al., section 5: tens of millions of items.
        "2.7B": TwoTowerConfig(
            TowerConfig((2**23, 2**20), 16), TowerConfig((2**24, 2**20), 8), 100, (1024, 512, 128), 8192
        ),
    }
)


class Tower(nn.Module):
    """Bags int[batch, bag] by feature → unit vectors float[batch, widths[-1]]."""

    rows: tuple[int, ...]
    embedding: int
    widths: tuple[int, ...]
    dtype: DTypeLike

    @nn.compact
    def __call__(self, bags: list[jax.Array]) -> jax.Array:
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        tables = [nn.Embed(rows, self.embedding, name=f"table{k}", **types) for k, rows in enumerate(self.rows)]
        x = jnp.concatenate([table(bag).mean(axis=1) for table, bag in zip(tables, bags, strict=True)], axis=-1)
        for number, width in enumerate(self.widths):
            x = nn.Dense(width, name=f"layer{number}", **types)(nn.relu(x) if number else x)
        return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-12)


class TwoTower(nn.Module):
    """A batch → scores float[user, item] of all its pairs, over the temperature."""

    config: TwoTowerConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, batch: Batch) -> jax.Array:
        cfg = self.config
        towers = [
            Tower(side.rows, cfg.embedding, cfg.widths, self.dtype, name=name)(
                [batch[f"{name}{k}"] for k in range(len(side.rows))]
            )
            for name, side in (("user", cfg.user), ("item", cfg.item))
        ]
        return jnp.einsum("ud,id->ui", *towers) / cfg.temperature


def in_batch_loss(scores: jax.Array, log_frequency: jax.Array) -> jax.Array:
    """The mean over users, in nats; `log_frequency` is float[item]."""
    log_probability = jax.nn.log_softmax(scores - log_frequency, axis=-1)
    own = jnp.eye(scores.shape[0], dtype=scores.dtype)
    return -(log_probability * own).sum() / scores.shape[0]


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update by Adagrad."""

    def loss_fn(params: Any) -> jax.Array:
        return in_batch_loss(state.apply_fn({"params": params}, batch), batch["log_frequency"])

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradients), {"loss": loss}


def _make_batch(config: TwoTowerConfig, dtype: DTypeLike, batch_size: int) -> Batch:
    """Ids by a power law, as in logs of what people look at; every item with the frequency of its first feature's id."""
    random = np.random.default_rng(0)
    batch: Batch = {}
    for name, side in (("user", config.user), ("item", config.item)):
        for k, rows in enumerate(side.rows):
            skewed = rows * random.power(0.5, (batch_size, side.bag))
            batch[f"{name}{k}"] = np.minimum(skewed, rows - 1).astype(np.int32)
    rows = config.item.rows[0]
    density = 0.5 * ((batch["item0"][:, 0] + 1) / rows) ** -0.5 / rows
    return {**batch, "log_frequency": np.log(density).astype(dtype)}


def _build(size: str, dtype: DTypeLike) -> Model:
    config = CONFIGS[size]
    module = TwoTower(config, dtype)

    def make_state() -> TrainState:
        batch = _make_batch(config, jnp.dtype(dtype), 1)
        params = module.init(jax.random.key(0), batch)["params"]
        return TrainState.create(apply_fn=module.apply, params=params, tx=optax.adagrad(config.learning_rate))

    return Model(
        name=f"two_tower-{size}",
        make_state=make_state,
        train_step=train_step,
        make_batch=lambda batch_size: _make_batch(config, jnp.dtype(dtype), batch_size),
        batch_size=config.batch_size,
    )


FAMILY = Family("two_tower", tuple(CONFIGS), _build)
