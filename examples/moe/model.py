r"""A GShard-style mixture-of-experts language model and its train step, in plain Flax Linen and Optax.

Every other block of a GPT has E feed-forward networks, its experts, in place of one, and each token goes to two of them.
With G groups of S tokens (a sequence, or several that follow each other in the batch) and gates g = softmax(W x) over
experts,

    y_s = Σ_{e in top2(g_s)}  g_se / (g_se + g_se') · FFN_e(x_s),

where an expert takes at most C = ⌈2 S · capacity_factor / E⌉ tokens of a group: those that find it full skip it (Lepikhin
et al., "GShard", 2020, section 2.2 and algorithm 1). Dispatch and combination are products with one-hot arrays over
(group, token, expert, slot), section 3.1, so the program is a few einsums. Nothing here knows of devices, meshes or
shardings; where an expert lies is for the planner to find.

A token's second choice queues behind the first choices of its whole group, later tokens included: as in the paper, a
model trained so sees a trace of the future where experts are full.
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

from examples.gpt import model as gpt
from examples.gpt.model import Batch, GPTConfig, Metrics, OptimizerConfig, TrainState


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A GPT whose every second block has `experts` experts; `balance_weight` is that of each one's balance loss.

    `group_size` tokens share the experts' places, whole sequences of them (None: those of one).
    """

    base: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    experts: int = 8
    capacity_factor: float = 1.0
    balance_weight: float = 1e-2
    random_routing: bool = True  # the second expert is asked with probability 2 g₂ (GShard, algorithm 1)
    group_size: int | None = None

    @property
    def capacity(self) -> int:
        """Tokens of one group that one expert takes."""
        return math.ceil(2 * (self.group_size or self.base.sequence) * self.capacity_factor / self.experts)


def _preset(hidden: int, layers: int, experts: int) -> MoEConfig:
    return MoEConfig(GPTConfig(32_000, hidden, layers, heads=16, sequence=1024, mlp_ratio=8), experts)


# From 380M on: the sizes on which Zheng et al. 2022 (Alpa, OSDI) measured GShard's architecture.
PRESETS: MappingProxyType[str, MoEConfig] = MappingProxyType(
    {
        "demo": MoEConfig(
            GPTConfig(vocab_size=2048, hidden=128, layers=2, heads=8, sequence=64, tie_embeddings=False), experts=8
        ),
        "380M": _preset(768, 8, 8),
        "690M": _preset(768, 8, 16),
        "1.3B": _preset(768, 16, 16),
        "2.4B": _preset(1024, 16, 16),
        "10B": _preset(1536, 16, 32),
        "27B": _preset(2048, 16, 48),
        "70B": _preset(2048, 32, 64),
    }
)


def route(gates: jax.Array, capacity: int, draws: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Who goes where: the combination weights float[group, token, expert, slot], and the balance loss, a scalar.

    `gates` are float[group, token, expert]; `draws`, uniform in [0, 1) for each token, decide whether a weak second
    choice is asked at all (None: always). The loss is E Σ_e f_e p_e for the share f_e of tokens whose first choice is e
    and the mean gate p_e, averaged over groups: 1 where the experts share equally. (GShard's own is 1/E² of it.)
    """
    experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts, dtype=gates.dtype)
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), axis=-1), experts, dtype=gates.dtype)
    first_gate, second_gate = (gates * first).sum(-1), (gates * second).sum(-1)
    balance = experts * (first.mean(axis=1) * gates.mean(axis=1)).sum(-1).mean()
    total = first_gate + second_gate
    first_gate, second_gate = first_gate / total, second_gate / total
    if draws is not None:
        second = second * (2 * second_gate > draws)[..., None]

    first_slot = jnp.cumsum(first, axis=1) - first
    second_slot = jnp.cumsum(second, axis=1) - second + first.sum(axis=1, keepdims=True)

    def weights(gate: jax.Array, choice: jax.Array, slots: jax.Array) -> jax.Array:
        slot = (slots * choice).sum(-1).astype(jnp.int32)
        taken = jax.nn.one_hot(slot, capacity, dtype=gates.dtype)  # a row of zeros where the expert is full
        return (gate[..., None] * choice)[..., None] * taken[:, :, None, :]

    return weights(first_gate, first, first_slot) + weights(second_gate, second, second_slot), balance


class ExpertDense(nn.Module):
    """One matrix for each expert: float[expert, group, slot, in] → float[expert, group, slot, features]."""

    features: int
    config: GPTConfig
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[0], x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.config.param_dtype)
        return jnp.einsum("egci,eio->egco", x, kernel.astype(self.config.dtype))


class MoE(nn.Module):
    """float[batch, sequence, hidden] → the same, each token through two experts; sows its balance loss."""

    config: MoEConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg, base = self.config, self.config.base
        shape = x.shape
        if cfg.group_size is not None:  # as far as there are as many: parameters are made from one sequence
            x = x.reshape(-1, min(cfg.group_size, shape[0] * shape[1]), shape[-1])
        router = nn.Dense(cfg.experts, use_bias=False, param_dtype=base.param_dtype, name="router")
        gates = nn.softmax(router(gpt.at_least_float32(x)), axis=-1)
        random = cfg.random_routing and not self.deterministic
        draws = jax.random.uniform(self.make_rng("routing"), x.shape[:2], gates.dtype) if random else None
        combine, balance = route(gates, cfg.capacity, draws)
        self.sow("losses", "balance", cfg.balance_weight * balance)

        combine = combine.astype(base.dtype)
        dispatch = (combine > 0).astype(base.dtype)
        slots = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        enter = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)
        leave = nn.initializers.variance_scaling(1 / (2 * base.layers), "fan_in", "normal", batch_axis=0)
        hidden = nn.gelu(ExpertDense(base.mlp_ratio * base.hidden, base, enter, name="up")(slots))
        done = ExpertDense(base.hidden, base, leave, name="down")(hidden)
        return jnp.einsum("gsec,egcm->gsm", combine, done).reshape(shape)


class MoEBlock(nn.Module):
    """A transformer layer with experts: float[batch, sequence, hidden] → the same."""

    config: MoEConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        base = self.config.base
        norm = {"epsilon": 1e-5, "dtype": base.dtype, "param_dtype": base.param_dtype}
        dropout = nn.Dropout(base.dropout, deterministic=self.deterministic)
        attention = gpt.CausalSelfAttention(base, self.deterministic, name="attention")
        x = x + dropout(attention(nn.LayerNorm(name="norm1", **norm)(x)))
        return x + dropout(MoE(self.config, self.deterministic, name="moe")(nn.LayerNorm(name="norm2", **norm)(x)))


class MoETransformer(nn.Module):
    """int[batch, sequence] → logits float[batch, sequence, vocabulary]; the second of every two blocks has experts."""

    config: MoEConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        cfg, base = self.config, self.config.base
        types = {"dtype": base.dtype, "param_dtype": base.param_dtype}
        init = nn.initializers.normal(gpt.EMBEDDING_STDDEV)
        embed = nn.Embed(base.vocab_size, base.hidden, embedding_init=init, name="embed", **types)
        position = self.param("position", init, (base.sequence, base.hidden), base.param_dtype)
        x = embed(tokens) + position[: tokens.shape[1]].astype(base.dtype)
        x = nn.Dropout(base.dropout, deterministic=deterministic)(x)
        dense, sparse = (nn.remat(gpt.Block), nn.remat(MoEBlock)) if base.remat else (gpt.Block, MoEBlock)
        for index in range(base.layers):
            if index % 2:
                x = sparse(cfg, deterministic, name=f"layer{index}")(x)
            else:
                x = dense(base, deterministic, name=f"layer{index}")(x)
        x = nn.LayerNorm(epsilon=1e-5, name="final_norm", **types)(x)
        if base.tie_embeddings:
            return embed.attend(x)
        return nn.Dense(base.vocab_size, use_bias=False, name="head", **types)(x)


def create_state(key: jax.Array, config: MoEConfig, optimizer: OptimizerConfig) -> TrainState:
    """A fresh state; `key` is split between the parameters and the random numbers of routing and dropout."""
    params_key, random_key = jax.random.split(key)
    model = MoETransformer(config)
    tokens = jnp.zeros((1, config.base.sequence), jnp.int32)
    return TrainState.create(
        apply_fn=model.apply,
        params=model.init(params_key, tokens)["params"],
        tx=gpt.make_optimizer(optimizer),
        dropout_key=random_key if config.base.dropout > 0 or config.random_routing else None,
    )


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One update; metrics are the loss (cross entropy in nats per token), the balance losses and the gradient's norm."""

    def loss_fn(params: Any) -> tuple[jax.Array, Metrics]:
        rngs = None
        if state.dropout_key is not None:
            dropout, routing = jax.random.split(jax.random.fold_in(state.dropout_key, state.step))
            rngs = {"dropout": dropout, "routing": routing}
        logits, sown = state.apply_fn(
            {"params": params}, batch["tokens"], deterministic=rngs is None, rngs=rngs, mutable=["losses"]
        )
        loss, balance = gpt.cross_entropy(logits, batch["targets"]), optax.tree.sum(sown["losses"])
        return loss + balance, {"loss": loss, "balance": balance}

    gradients, metrics = jax.grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients), {**metrics, "gradient_norm": optax.tree.norm(gradients)}


def parameter_count(config: MoEConfig) -> int:
    """Number of parameters, from shapes alone: nothing is allocated."""
    tokens = jnp.zeros((1, config.base.sequence), jnp.int32)
    variables = jax.eval_shape(MoETransformer(config).init, jax.random.key(0), tokens)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))
