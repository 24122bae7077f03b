"""Predictions are made without compiling anything, and then held against what XLA compiled."""

from __future__ import annotations

import jax
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.cost_model.hlo import memory_bytes, parse_module, step_seconds
from benchmarks.models import FAMILIES, build

BYTES_TOLERANCE = 0.10
TOTAL_TOLERANCE = 0.15


@pytest.mark.parametrize("method", ["auto", "data_parallel", "tensor_parallel"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_collectives_and_memory_are_those_of_the_compiled_program(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name, "toy")
    state, batch = model.abstract_state(), model.abstract_batch()
    cluster = Cluster.local()
    step = autopar.parallelize(model.train_step)
    with monkeypatch.context() as patched:
        patched.setattr(jax.stages.Lowered, "compile", _refuse)
        plan = step.plan(state, batch, method=method, cluster=cluster)
    compiled = step.compile(state, batch, method=method, cluster=cluster)
    assert compiled.plan is plan
    cost = step_seconds(parse_module(compiled.as_text()), cluster)
    predicted_wire = sum(use.wire_bytes for use in plan.prediction.collectives)
    assert predicted_wire == pytest.approx(cost.wire_bytes, rel=BYTES_TOLERANCE, abs=256)
    memory, actual = plan.prediction.memory, memory_bytes(compiled)
    assert (memory.argument_bytes, memory.output_bytes) == (actual.argument, actual.output)


def _refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("planning compiled something")
