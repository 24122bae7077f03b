"""What does a step cost that computes nothing: how long is the driver busy, and does anything grow?

    python -m benchmarks.driver [--steps 1000] [--meshes 1 2 4]

A local Ray cluster whose node counts as so many hosts, a device each; a model so small that its stages are next to empty, one
microbatch.  ``driver``: processor time of the thread that calls the step, a call, in milliseconds and by mesh; ``step``: wall
time of a step when many are called in a row, messages between stages and their programs included.  Memory is what
the processes hold at a tenth of the steps and at their end.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster of this machine alone, gone with this process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # by Ray's own, 15, the workers wait for whatever else runs here

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

import autopar

LAYERS, WIDTH, ROWS = 8, 32, 8
WANTED_MILLISECONDS = 2.0


def make_state() -> Any:
    """A small dense layer, so many times."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [{"w": jax.random.normal(key, (WIDTH, WIDTH)) * WIDTH**-0.5, "b": jnp.zeros(WIDTH)} for key in keys]


def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    """One step of gradient descent on a squared error."""

    def loss_of(params: Any) -> jax.Array:
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), {"loss": loss}


def memory(executor: Any) -> tuple[float, float, int]:
    """MiB of this process, of all workers, and bytes of arrays on the workers."""
    gc.collect()
    statuses = executor.fleet.status()
    workers = sum(one.resident_bytes for one in statuses) / 2**20
    return psutil.Process().memory_info().rss / 2**20, workers, sum(one.array_bytes for one in statuses)


def measure(meshes: int, steps: int) -> list[str]:
    """One row of the table."""
    cluster = autopar.Cluster.ray(None, hosts=meshes, devices_per_host=1)
    options: dict[str, Any] = {"stages": meshes, "num_microbatches": 1} if meshes > 1 else {"stages": 1}
    step = autopar.parallelize(train_step, cluster=cluster, **options)
    drawn = np.random.default_rng(0)
    batch = {name: drawn.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in ("x", "y")}
    state = step.init(make_state, batch)
    for _ in range(20):
        state, metrics = step(state, batch)
    float(metrics["loss"])
    before = None
    worked, began = time.thread_time(), time.perf_counter()
    calls = []
    for number in range(steps):
        called = time.perf_counter()
        state, metrics = step(state, batch)
        calls.append(time.perf_counter() - called)
        if number == steps // 10:
            before = memory(step.last.executor)
    float(metrics["loss"])
    wall, worked = (time.perf_counter() - began) / steps, (time.thread_time() - worked) / steps
    after = memory(step.last.executor)
    cluster.close()
    assert before is not None
    cells = [f"{worked * 1e3:.2f}", f"{worked * 1e3 / meshes:.2f}", f"{wall * 1e3:.2f}", f"{wall * 1e3 / meshes:.2f}"]
    cells += [f"{old:.0f} → {new:.0f}" for old, new in zip(before, after, strict=True)]
    return [str(meshes), *cells]


def main() -> None:
    """Print the table."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--meshes", type=int, nargs="+", default=[1, 2, 4])
    told = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    table = Table(
        title=f"{told.steps} steps; wanted: less than {WANTED_MILLISECONDS:g} ms a mesh, and nothing that grows"
    )
    for column in ("meshes", "driver ms", "a mesh", "step ms", "a mesh", "driver MiB", "workers MiB", "array bytes"):
        table.add_column(column, justify="right")
    for meshes in told.meshes:
        table.add_row(*measure(meshes, told.steps))
    ray.shutdown()
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
