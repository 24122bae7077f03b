r"""The train step of a cell, and the FLOPs that its throughput is counted in.

FLOPs are those of products and convolutions with every layer computed twice forward (rematerialisation), as the paper and the
authors' artifact count them.  With B sequences of S tokens, hidden size H, L layers, vocabulary V, ratio r of the feed-forward
networks, E experts and groups of G tokens, a step of

    GPT   96·B·S·H²·L·(1 + S/6H) + 6·B·S·H·V
    MoE   4·B·S·(L/2)·[(8 + 4r)·H² + 4·S·H  +  (8 + 8r)·H² + 4·S·H + 2·H·E + 8·H·G] + 6·B·S·H·V

(half of the layers dense; in the others two experts for each token, the router, and dispatch and combination as products over the
2·G places of a group).  Of Wide-ResNet, whose throughput the artifact computes by XLA's count, they are taken from the step.

Precisions are the paper's: GPT and MoE in float16 (:mod:`~benchmarks.suites.half_precision`), Wide-ResNet in float32 with SGD.
Microbatches of Wide-ResNet are normalised each for itself, as there.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from autopar.cluster import Platform
from autopar.graph.roles import Role, infer_roles
from autopar.graph.tracing import flatten_call, retracer, trace
from autopar.inter_op.terms import AccumulatorDtype, BatchCoupling
from autopar.subjects import Demands, Subjected, subject_of
from benchmarks.models import moe, wide_resnet
from benchmarks.models.base import Model
from benchmarks.suites import half_precision
from benchmarks.suites.published import Cell, Suite
from examples.gpt import model as gpt
from examples.moe.model import MoEConfig

MOE_GROUP = 2048
"""Tokens that share the experts' places."""

PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step from descriptions alone, and the FLOPs that its throughput is counted in."""

    subject: Subjected
    flops: float
    coupling: BatchCoupling = BatchCoupling.REFUSE

    @property
    def free(self) -> Demands:
        """Nothing is asked of a plan but the terms of the suite."""
        return Demands(batch_coupling=self.coupling, accumulator_dtype=AccumulatorDtype.SAME)


def _as_measured(config: gpt.GPTConfig) -> gpt.GPTConfig:
    """Half precision, rematerialisation, embeddings apart."""
    half = jnp.float16
    return dataclasses.replace(config, dtype=half, param_dtype=half, remat=True, tie_embeddings=False)


def gpt_config(size: str) -> gpt.GPTConfig:
    """The model as it was measured."""
    return _as_measured(gpt.PRESETS[size])


def moe_config(size: str) -> MoEConfig:
    """The model as it was measured."""
    config = moe.CONFIGS[size]
    return dataclasses.replace(config, base=_as_measured(config.base), group_size=MOE_GROUP, random_routing=False)


def resnet_config(size: str) -> wide_resnet.ResNetConfig:
    """The model as it was measured."""
    return dataclasses.replace(wide_resnet.CONFIGS[size], remat=True)


def gpt_flops(config: gpt.GPTConfig, batch: int) -> float:
    """Of a step (see above)."""
    hidden, sequence = config.hidden, config.sequence
    layers = 96 * batch * sequence * hidden**2 * config.layers * (1 + sequence / (6 * hidden))
    return layers + 6 * batch * sequence * hidden * config.vocab_size


def moe_flops(config: MoEConfig, batch: int) -> float:
    """Of a step (see above)."""
    base = config.base
    hidden, sequence, group = base.hidden, base.sequence, config.group_size or base.sequence
    attention = 8 * hidden**2 + 4 * sequence * hidden
    dense = attention + 4 * base.mlp_ratio * hidden**2
    sparse = attention + 8 * base.mlp_ratio * hidden**2 + 2 * hidden * config.experts + 8 * hidden * group
    layers = 4 * (dense + sparse) * base.layers / 2
    return batch * sequence * (layers + 6 * hidden * base.vocab_size)


def product_flops(subject: Subjected) -> float:
    """Of the products and convolutions of a traced step."""
    operators = subject.graph.all_operators()
    return sum(operator.flops * trips for operator, trips in operators if operator.primitive in PRODUCTS)


def subject_of_model(model: Model) -> Subjected:
    """The model's step, traced on shapes, for GPUs."""
    arguments = model.abstract_state(), model.abstract_batch()
    program = trace(model.train_step, arguments)
    roles = infer_roles(program)
    retrace = retracer(
        model.train_step, flatten_call(model.train_step, arguments, {}), program, roles.leaves(Role.BATCH)
    )
    return subject_of(program, roles, Platform.CUDA.value, retrace=retrace)


def step_of(cell: Cell) -> Step:
    """The step of a cell."""
    match cell.suite:
        case Suite.GPT:
            config = gpt_config(cell.size)
            model = half_precision.gpt(config, cell.batch_size)
            return Step(subject_of_model(model), gpt_flops(config, cell.batch_size))
        case Suite.MOE:
            sparse = moe_config(cell.size)
            model = half_precision.moe(sparse, cell.batch_size)
            return Step(subject_of_model(model), moe_flops(sparse, cell.batch_size))
        case Suite.WIDE_RESNET:
            resnet = dataclasses.replace(resnet_config(cell.size), batch_size=cell.batch_size)
            subject = subject_of_model(wide_resnet.model_of(f"wide_resnet-{cell.size}", resnet))
            return Step(subject, product_flops(subject), BatchCoupling.PER_MICROBATCH)


def step_with_adam(cell: Cell) -> Step:
    """The step of a mixture of experts with AdamW."""
    config = moe_config(cell.size)
    return Step(
        subject_of_model(half_precision.moe_with_adam(config, cell.batch_size)), moe_flops(config, cell.batch_size)
    )
