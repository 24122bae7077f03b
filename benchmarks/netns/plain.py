"""One process of a plain JAX program on several hosts, without anything of autopar: what is to be beaten, and how fast links are.

Started once per host, as JAX's own guide to several processes says.  The process of rank 0 writes what it measured.

    data      parameters and optimizer state on every device, the batch cut
    full      every leaf of the state cut along its longest dimension that the devices divide, the batch cut
    links     no model: α and β of all-gathers between hosts, and between the devices of a host

Between hosts α is what a small one of each device takes longer than nothing in a chain of matrix products, as they stand in a
step: hosts with a ration of processor time are stopped now and then, not all at once, and who communicates waits for the one
that is.  (Within a host ``autopar profile`` measures collectives so.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SMALL, LARGE = 2**10, 2**22
"""Bytes that one device gives to an all-gather."""
CHAIN, WORK_SIDE = 17, 384
"""Links of a chain of products and collectives, and the side of the products' matrices."""
_EACH = PartitionSpec(("ring", "other"))
"""A piece on every device; groups that talk to each other lie along the first axis."""


def main() -> None:
    """Join the world, measure, say so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "full", "links"])
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
    found = links() if told.what == "links" else steps(told.what == "full", told.model, told.steps)
    if told.rank == 0:
        told.said.write_text(json.dumps(found))


def links() -> dict[str, tuple[float, float]]:
    """Seconds of latency and bytes per second, by level."""
    devices = np.array(sorted(jax.devices(), key=lambda one: (one.process_index, one.id)))
    by_host = devices.reshape(jax.process_count(), -1)
    inside = Mesh(by_host[jax.process_index()].reshape(-1, 1), ("ring", "other"))
    local_rate = _bytes_per_second(inside)
    network_rate = _bytes_per_second(Mesh(by_host[:, :1], ("ring", "other")))
    return {
        "network": (
            _latency_seconds(_seconds_after_work, Mesh(by_host, ("ring", "other")), network_rate),
            network_rate,
        ),
        "local": (_latency_seconds(partial(_gather_seconds, size=SMALL), inside, local_rate), local_rate),
    }


def _bytes_per_second(mesh: Mesh) -> float:
    """By the time of a ring of n: (n − 1) (α + bytes of one / β)."""
    little, much = (_gather_seconds(mesh, size) for size in (LARGE // 4, LARGE))
    return (mesh.shape["ring"] - 1) * (LARGE - LARGE // 4) / (much - little)


def _latency_seconds(seconds_of_small: Callable[[Mesh], float], mesh: Mesh, bytes_per_second: float) -> float:
    return max(seconds_of_small(mesh) / (mesh.shape["ring"] - 1) - SMALL / bytes_per_second, 1e-6)


def _gather_seconds(mesh: Mesh, size: int) -> float:
    """Of an all-gather to which each device gives so many bytes."""
    gather, given = _on_ring(mesh, _gathered), _zeros(mesh, size // 4)
    return _typical(partial(_waited_for, gather, given), rounds=7 if size > SMALL else 61)


def _seconds_after_work(mesh: Mesh) -> float:
    """Of one small all-gather between products of matrices of :data:`WORK_SIDE`."""

    def chain(gathers: int, value: jax.Array, work: jax.Array) -> jax.Array:
        weights, found = work, value
        for number in range(CHAIN):
            work = (work + found[0]) @ weights
            found = value + work[0, 0]
            found = _gathered(found) if number < gathers else found
        return found[: value.size] + work[0, 0]

    given, work = _zeros(mesh, SMALL // 4), _zeros(mesh, WORK_SIDE, WORK_SIDE)
    one, all_of_them = (
        _typical(partial(_waited_for, _on_ring(mesh, partial(chain, gathers)), given, work), rounds=9)
        for gathers in (1, CHAIN)
    )
    return max((all_of_them - one) / (CHAIN - 1), 1e-6)


def _waited_for(function: Callable[..., jax.Array], *arguments: jax.Array) -> None:
    jax.block_until_ready(function(*arguments))


def _gathered(value: jax.Array) -> jax.Array:
    return jax.lax.all_gather(value, "ring", tiled=True)


def _zeros(mesh: Mesh, *shape: int) -> jax.Array:
    """So many on each device."""
    whole = (mesh.size * shape[0], *shape[1:])
    return jax.make_array_from_callback(
        whole, NamedSharding(mesh, _EACH), lambda index: np.zeros(whole, np.float32)[index]
    )


def _on_ring(mesh: Mesh, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """On the pieces of its arguments; what one device returns."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=_EACH, out_specs=_EACH, check_vma=False))


def _typical(call: Callable[[], Any], rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


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
