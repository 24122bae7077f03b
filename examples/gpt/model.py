r"""A GPT-style language model and its train step, in plain Flax Linen and Optax.

For tokens t_1 … t_S the model gives p(t_{s+1} | t_1 … t_s): embeddings, then `layers` pre-norm blocks

    x ← x + Attention(LayerNorm(x)),    x ← x + W₂ gelu(W₁ LayerNorm(x)),

then a last LayerNorm and a projection onto the vocabulary (Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019, section 2.3). The step minimises the mean cross entropy with AdamW, clipped by global norm, under a
warm-up and cosine schedule. Nothing here knows of devices, meshes or shardings.
"""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

Batch = dict[str, jax.Array]  # "tokens" and "targets", each int32[batch, sequence]
Metrics = dict[str, jax.Array]  # scalars

EMBEDDING_STDDEV = 0.02  # at the start (GPT-2)


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The architecture. `dtype` is what the blocks compute in, `param_dtype` what the parameters are kept in."""

    vocab_size: int = 51200
    hidden: int = 1024
    layers: int = 24
    heads: int = 16
    sequence: int = 1024
    mlp_ratio: int = 4
    dropout: float = 0.0
    tie_embeddings: bool = True
    scan_layers: bool = False
    remat: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden size {self.hidden} is not a multiple of the number of heads {self.heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


# The sizes from 350M on are those on which Zheng et al. 2022 (Alpa, OSDI) measured GPT.
PRESETS: MappingProxyType[str, GPTConfig] = MappingProxyType(
    {
        "1M": GPTConfig(vocab_size=2048, hidden=128, layers=4, heads=4, sequence=128),
        "demo": GPTConfig(vocab_size=2048, hidden=128, layers=2, heads=8, sequence=64, tie_embeddings=False),
        "10M": GPTConfig(vocab_size=8192, hidden=320, layers=6, heads=8, sequence=256),
        "125M": GPTConfig(hidden=768, layers=12, heads=12),
        "350M": GPTConfig(hidden=1024, layers=24, heads=16),
        "1.3B": GPTConfig(hidden=2048, layers=24, heads=32),
        "2.6B": GPTConfig(hidden=2560, layers=32, heads=32),
        "6.7B": GPTConfig(hidden=4096, layers=32, heads=32),
        "15B": GPTConfig(hidden=5120, layers=48, heads=40),
        "39B": GPTConfig(hidden=8192, layers=48, heads=64),
        "1T": GPTConfig(hidden=25600, layers=128, heads=160, sequence=2048),
    }
)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW under a linear warm-up and a cosine decay to a tenth of the peak; gradients clipped by global norm."""

    peak_learning_rate: float = 3e-4
    warmup_steps: int = 100
    total_steps: int = 10_000
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0
    b1: float = 0.9
    b2: float = 0.98


class TrainState(train_state.TrainState):
    """Flax's train state and the key of the dropout masks (None where nothing is dropped)."""

    dropout_key: jax.Array | None = None


class CausalSelfAttention(nn.Module):
    """float[batch, sequence, hidden] → the same; each position attends to itself and to those before it."""

    config: GPTConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        types = {"dtype": cfg.dtype, "param_dtype": cfg.param_dtype}
        heads = (cfg.heads, cfg.head_dim)
        query = nn.DenseGeneral(heads, name="query", **types)(x)
        key = nn.DenseGeneral(heads, name="key", **types)(x)
        value = nn.DenseGeneral(heads, name="value", **types)(x)

        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(cfg.head_dim)
        scores = at_least_float32(scores)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), dtype=bool))
        scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
        weights = nn.softmax(scores, axis=-1).astype(cfg.dtype)
        weights = nn.Dropout(cfg.dropout, deterministic=self.deterministic)(weights)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(cfg.hidden, axis=(-2, -1), kernel_init=residual_init(cfg), name="out", **types)(mixed)


class MLP(nn.Module):
    """float[batch, sequence, hidden] → the same, through one hidden layer of `mlp_ratio * hidden`."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        types = {"dtype": cfg.dtype, "param_dtype": cfg.param_dtype}
        x = nn.Dense(cfg.mlp_ratio * cfg.hidden, name="up", **types)(x)
        return nn.Dense(cfg.hidden, kernel_init=residual_init(cfg), name="down", **types)(nn.gelu(x))


class Block(nn.Module):
    """One transformer layer: float[batch, sequence, hidden] → the same."""

    config: GPTConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        norm = {"epsilon": 1e-5, "dtype": cfg.dtype, "param_dtype": cfg.param_dtype}
        dropout = nn.Dropout(cfg.dropout, deterministic=self.deterministic)
        attended = CausalSelfAttention(cfg, self.deterministic, name="attention")(nn.LayerNorm(name="norm1", **norm)(x))
        x = x + dropout(attended)
        return x + dropout(MLP(cfg, name="mlp")(nn.LayerNorm(name="norm2", **norm)(x)))


class GPT(nn.Module):
    """int[batch, sequence] → logits float[batch, sequence, vocabulary]."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        cfg = self.config
        types = {"dtype": cfg.dtype, "param_dtype": cfg.param_dtype}
        init = nn.initializers.normal(EMBEDDING_STDDEV)
        embed = nn.Embed(cfg.vocab_size, cfg.hidden, embedding_init=init, name="embed", **types)
        position = self.param("position", init, (cfg.sequence, cfg.hidden), cfg.param_dtype)
        x = embed(tokens) + position[: tokens.shape[1]].astype(cfg.dtype)
        x = nn.Dropout(cfg.dropout, deterministic=deterministic)(x)

        # Inside a scan XLA cannot undo rematerialisation by common subexpressions, so nothing need prevent it.
        block = nn.remat(Block, prevent_cse=not cfg.scan_layers) if cfg.remat else Block
        if cfg.scan_layers:
            scanned = nn.scan(
                lambda layer, x, _: (layer(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=cfg.layers,
            )
            x, _ = scanned(block(cfg, deterministic, name="layers"), x, None)
        else:
            for index in range(cfg.layers):
                x = block(cfg, deterministic, name=f"layer{index}")(x)

        x = nn.LayerNorm(epsilon=1e-5, name="final_norm", **types)(x)
        if cfg.tie_embeddings:
            return embed.attend(x)
        return nn.Dense(cfg.vocab_size, use_bias=False, name="head", **types)(x)


def at_least_float32(x: jax.Array) -> jax.Array:
    """Softmax and cross entropy lose too much in sixteen bits."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def residual_init(config: GPTConfig) -> nn.initializers.Initializer:
    """The branches, two per layer, add up in x: scaled down so that its variance does not grow with depth (GPT-2)."""
    return nn.initializers.variance_scaling(1 / (2 * config.layers), "fan_in", "normal")


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Step → learning rate; not zero at the first step, so that no step is lost."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.peak_learning_rate / max(config.warmup_steps, 1),
        peak_value=config.peak_learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.total_steps, config.warmup_steps + 1),
        end_value=config.peak_learning_rate / 10,
    )


def decayed(params: Any) -> Any:
    """True for the matrices, which weight decay pulls to zero; False for biases, norms and positions."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW."""
    adamw = optax.adamw(
        learning_rate_schedule(config), b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=decayed
    )
    return optax.chain(optax.clip_by_global_norm(config.max_gradient_norm), adamw)


def create_state(key: jax.Array, config: GPTConfig, optimizer: OptimizerConfig) -> TrainState:
    """A fresh state; `key` is split between the parameters and the dropout masks."""
    params_key, dropout_key = jax.random.split(key)
    model = GPT(config)
    tokens = jnp.zeros((1, config.sequence), jnp.int32)
    return TrainState.create(
        apply_fn=model.apply,
        params=model.init(params_key, tokens)["params"],
        tx=make_optimizer(optimizer),
        dropout_key=dropout_key if config.dropout > 0 else None,
    )


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all positions, in nats per token."""
    return optax.softmax_cross_entropy_with_integer_labels(at_least_float32(logits), targets).mean()


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One update; metrics are the loss (nats per token) and the gradient's global norm before clipping."""

    def loss_fn(params: Any) -> jax.Array:
        variables = {"params": params}
        if state.dropout_key is None:
            logits = state.apply_fn(variables, batch["tokens"])
        else:
            rngs = {"dropout": jax.random.fold_in(state.dropout_key, state.step)}
            logits = state.apply_fn(variables, batch["tokens"], deterministic=False, rngs=rngs)
        return cross_entropy(logits, batch["targets"])

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
    return state.apply_gradients(grads=gradients), metrics


def parameter_count(config: GPTConfig) -> int:
    """Number of parameters, from shapes alone: nothing is allocated."""
    config = dataclasses.replace(config, scan_layers=True)  # the same number, traced in a time free of depth
    variables = jax.eval_shape(GPT(config).init, jax.random.key(0), jnp.zeros((1, config.sequence), jnp.int32))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables))
