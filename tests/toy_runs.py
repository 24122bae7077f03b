"""Toy models on eight devices: what the tests of whole steps share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.typing import DTypeLike

import autopar
from autopar.cluster import Cluster
from autopar.errors import PlanError
from benchmarks.models import Model, build

METHODS = ("auto", "data_parallel", "zero2", "zero3", "tensor_parallel")


def sample(names: Sequence[str], options: Sequence[str], seed: int) -> tuple[tuple[str, str], ...]:
    """Every name with one of the options, every option as often as the others; the same for the same seed."""
    deck = [options[number % len(options)] for number in range(len(names))]
    random.Random(seed).shuffle(deck)
    return tuple(zip(names, deck, strict=True))


@functools.cache
def eight_slow_devices() -> Cluster:
    """This process's devices, said to compute so slowly that even a toy is worth cutting up.

    On the true figures the best plan of a toy is not to share its work, which would prove little.
    """
    local = Cluster.local()
    device = dataclasses.replace(
        local.device,
        flops_per_second=dict.fromkeys(local.device.flops_per_second, 1e8),
        memory_bytes_per_second=1e8,
    )
    return local.replace(name="slow devices", device=device)


@dataclass(frozen=True)
class Run:
    """What some steps gave: the last state's and every step's metrics' leaves by path, as NumPy arrays."""

    state: dict[str, np.ndarray]
    metrics: tuple[dict[str, np.ndarray], ...]


def leaves_by_path(tree: Any) -> dict[str, np.ndarray]:
    """Leaves as NumPy arrays; typed keys by their data."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(jax.numpy.asarray(leaf))  # of a DistributedArray JAX knows no other way
        found[jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


def batches(model: Model, count: int) -> Iterator[Any]:
    """Batches that differ: the model's own, its rows moved on by one each time."""
    first = model.make_batch(model.batch_size)
    for step in range(count):
        yield {
            name: np.roll(array, step, axis=0) * (1 + step if array.dtype.kind == "f" else 1)
            for name, array in first.items()
        }


def run(model: Model, step: Any, state: Any, count: int) -> Run:
    """Some steps from a state."""
    metrics = []
    for batch in batches(model, count):
        state, said = step(state, batch)
        metrics.append(leaves_by_path(said))
    return Run(leaves_by_path(state), tuple(metrics))


@functools.cache
def reference(name: str, dtype: DTypeLike, count: int) -> Run:
    """The undecorated step under ``jax.jit``; float64 under ``precision``."""
    with precision(dtype):
        model = build(name, dtype=dtype)
        return run(model, jax.jit(model.train_step), jax.jit(model.make_state)(), count)


def parallel(name: str, dtype: DTypeLike, method: str, cluster: Cluster, count: int) -> tuple[Run, autopar.Plan]:
    """The decorated step by a method, its state born by ``init``."""
    with precision(dtype):
        model = build(name, dtype=dtype)
        step = autopar.parallelize(method=method, cluster=cluster)(model.train_step)
        state = step.init(model.make_state, model.abstract_batch())
        return run(model, step, state, count), step.last.plan


@contextlib.contextmanager
def precision(dtype: DTypeLike) -> Iterator[None]:
    """Float64 is on inside if the dtype needs it, and as before outside."""
    with jax.enable_x64(np.dtype(dtype).itemsize > 4):
        yield


@functools.cache
def _planned_toy() -> tuple[autopar.Parallelized, tuple[Any, Any]]:
    """A step that is traced and planned once, and its arguments."""
    model = build("mlp_nnx")
    step = autopar.parallelize(model.train_step, method="data_parallel", cluster=eight_slow_devices())
    return step, (model.abstract_state(), model.abstract_batch())


def refuses_edited_plan(edit: Callable[[dict[str, Any]], None], message: str, folder: Path) -> None:
    """A plan's file whose ``plan`` was edited by hand is refused with that message, when it is read or when it is used."""
    step, arguments = _planned_toy()
    step.plan(*arguments).save(folder / "plan.json")
    content = json.loads((folder / "plan.json").read_text())
    edit(content["plan"])
    (folder / "odd.json").write_text(json.dumps(content))

    def use() -> None:
        asked = step.with_options()
        asked.use(autopar.Plan.load(folder / "odd.json"))
        asked.compile(*arguments)

    with pytest.raises(PlanError, match=message):
        use()
