"""The paper's figures as data: are FLOPs counted as the step does them, and do its plans make stages?"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from autopar.graph.roles import infer_roles
from autopar.graph.tracing import trace
from autopar.subjects import subject_of
from benchmarks import suites
from examples.gpt import model


def test_flops_of_the_paper_are_those_of_the_products() -> None:
    """All but the recomputation of the last product of each layer, which its gradient does not need."""
    config = dataclasses.replace(suites.config_of("350M"), hidden=64, layers=3, heads=4, sequence=32, vocab_size=96)
    batch = 4
    state = jax.eval_shape(partial(model.create_state, jax.random.key(0), config, model.OptimizerConfig()))
    tokens = jax.ShapeDtypeStruct((batch, config.sequence), jnp.int32)
    program = trace(model.train_step, (state, {"tokens": tokens, "targets": tokens}))
    graph = subject_of(program, infer_roles(program), "cuda").graph
    products = sum(
        operator.flops * trips for operator, trips in graph.all_operators() if operator.primitive == "dot_general"
    )
    needless = 8 * batch * config.sequence * config.hidden**2 * config.layers
    assert products == suites.step_flops(config, batch) - needless


@pytest.mark.parametrize("num_devices", suites.GPT)
def test_published_plans_use_every_device_once(num_devices: int) -> None:
    published = suites.GPT[num_devices].published
    assert sum(published.stage_sizes) == suites.cluster_of(num_devices).num_devices == num_devices
    assert [data * other for data, other in published.mesh_shapes] == list(published.stage_sizes)
    assert suites.BATCH % published.num_microbatches == 0
    if (demands := published.demands()) is not None and isinstance(demands.stages, tuple):
        assert [device for stage in demands.stages for device in stage] == list(range(num_devices))
