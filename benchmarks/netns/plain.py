"""One process of a plain JAX program on several hosts, without anything of autopar: what is to be beaten.

Started once per host, as JAX's own guide to several processes says.  The process of rank 0 writes what it measured.

    data      parameters and optimizer state on every device, the batch cut
    full      every leaf of the state cut along its longest dimension that the devices divide, the batch cut
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main() -> None:
    """Join the world, measure, say so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "full"])
    parser.add_argument("said", type=Path)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--steps", type=int, default=10)
    told = parser.parse_args()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", told.devices)
    jax.distributed.initialize(told.coordinator, told.hosts, told.rank)
    found = steps(told.what == "full", told.model, told.steps)
    if told.rank == 0:
        told.said.write_text(json.dumps(found))


def steps(is_cut: bool, name: str, count: int) -> dict[str, Any]:
    """Seconds of steps, from loss to loss."""
    from benchmarks.netns.cases import model_of

    model = model_of(name)
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def leaf_sharding(leaf: Any) -> NamedSharding:
        spec: list[str | None] = [None] * leaf.ndim
        if is_cut:
            divisible = [dim for dim, extent in enumerate(leaf.shape) if extent % mesh.size == 0 and extent]
            if divisible:
                spec[max(divisible, key=lambda dim: leaf.shape[dim])] = "data"
        return NamedSharding(mesh, PartitionSpec(*spec))

    state_shardings = jax.tree.map(leaf_sharding, jax.eval_shape(model.make_state))
    state = jax.jit(model.make_state, out_shardings=state_shardings)()
    rows = NamedSharding(mesh, PartitionSpec("data"))
    host_batch = model.make_batch(model.batch_size)
    step = jax.jit(
        model.train_step,
        in_shardings=(state_shardings, jax.tree.map(lambda _: rows, host_batch)),
        out_shardings=(state_shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )

    def one(state: Any) -> tuple[Any, float]:
        batch = jax.tree.map(
            lambda array: jax.make_array_from_callback(array.shape, rows, lambda index: array[index]), host_batch
        )
        state, metrics = step(state, batch)
        return state, float(metrics["loss"])

    losses = []
    for _ in range(2):
        state, loss = one(state)
        losses.append(loss)
    times: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        state, loss = one(state)
        times.append(time.perf_counter() - started)
        losses.append(loss)
    return {"seconds": times, "losses": losses}


if __name__ == "__main__":
    main()
