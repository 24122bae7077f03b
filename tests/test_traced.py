"""Does the benchmark that holds kernels against their prices find each kernel in a trace, once?"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.cluster import Cluster
from autopar.cost_model.hlo import parse_module, priced_steps, step_seconds
from autopar.cost_model.hlo_steps import is_collective
from benchmarks.traced import rows_of, traced


def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    def loss(weights: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ weights) ** 2)

    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.1 * gradient, value


def test_every_kernel_of_a_trace_has_a_row() -> None:
    cluster = Cluster.local(profile=None)
    arguments = np.ones((64, 32), np.float32), np.ones((2048, 64), np.float32)
    compiled = autopar.parallelize(step, cluster=cluster, method="data_parallel").compile(*arguments)
    module = parse_module(compiled.as_text())
    priced, _ = priced_steps(module, cluster)
    kernels = {one.step.instruction.name for one in priced if not is_collective(one.step.instruction)}
    assert kernels and len(kernels) < len(priced)  # some are collectives

    made_up = {name: float(number) for number, name in enumerate(sorted(kernels), start=1)}
    rows = rows_of(priced, made_up)
    assert sum(row.count for row in rows) == len(kernels)
    assert sum(row.traced_seconds for row in rows) == sum(made_up.values())
    assert np.isclose(sum(row.priced_seconds for row in rows), step_seconds(module, cluster).compute_seconds)
    apart = [abs(row.apart_seconds) for row in rows]
    assert apart == sorted(apart, reverse=True)

    _, seconds, by_name = traced(compiled, [arguments[0]], arguments[1], 2)
    assert kernels & by_name.keys()
    assert all(by_name[name] > 0 for name in kernels & by_name.keys())
    assert sum(by_name[name] for name in kernels) < 8 * seconds
