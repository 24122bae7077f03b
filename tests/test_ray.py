"""Steps on a local Ray cluster: the same numbers as jax.jit and as in this process, whatever the plan; errors that help."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.runtime.mesh_host import MeshHost

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

ray = pytest.importorskip("ray")

WIDTH, BATCH = 16, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def shared(local_ray: None) -> Iterator[autopar.Cluster]:
    with jax.enable_x64(True):
        made = autopar.Cluster.ray(None, hosts=2, devices_per_host=2)
        yield made
        made.close()


@pytest.fixture
def cluster(shared: autopar.Cluster) -> Iterator[autopar.Cluster]:
    with jax.enable_x64(True):
        yield shared


def loss_of(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    x = batch["x"]
    for number, layer in enumerate(params):
        x = jnp.tanh(x @ layer["w"] + layer["b"])
        x = x * jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, x.shape)
    return jnp.mean((x - batch["y"]) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    key, own = jax.random.split(state["key"])
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch, own)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer, "key": key, "step": state["step"] + 1}, {"loss": loss}


def create(seed: int) -> Any:
    keys = jax.random.split(jax.random.key(seed), 4)
    params = [{"w": jax.random.normal(key, (WIDTH, WIDTH)) / 4, "b": jnp.zeros(WIDTH)} for key in keys]
    return {"params": params, "optimizer": OPTIMIZER.init(params), "key": keys[0], "step": jnp.zeros((), jnp.int32)}


def batch_of(step: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(step)
    return {"x": drawn.normal(size=(BATCH, WIDTH)), "y": drawn.normal(size=(BATCH, WIDTH))}


def value(leaf: Any) -> np.ndarray:
    leaf = jnp.asarray(leaf)
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def assert_equal(left: Any, right: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(value(ours), value(theirs), rtol=1e-11, atol=1e-12)


PLANS = {
    "one mesh over two hosts": {"stages": 1},
    "fully sharded": {"method": "zero3"},
    "two stages": {"stages": 2, "num_microbatches": 4, "schedule": "1f1b"},
    "stages across hosts": {"stages": [[0, 2], [1, 3]], "num_microbatches": 2, "schedule": "gpipe"},
    "four stages": {"stages": 4, "num_microbatches": 4, "schedule": "eager_1f1b"},
}


@pytest.mark.parametrize("name", PLANS)
def test_steps_equal_jit(cluster: autopar.Cluster, name: str) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, **PLANS[name])
    state = step.init(partial(create, 0), batch_of(0))
    expected, reference = create(0), jax.jit(train_step)
    assert_equal(state, expected)
    for number in range(4):
        state, metrics = step(state, batch_of(number))
        expected, wanted = reference(expected, batch_of(number))
        assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-12)
    assert_equal(state, expected)


def test_state_from_the_driver_and_back(cluster: autopar.Cluster) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, stages=2, num_microbatches=2)
    state, _ = step(create(1), batch_of(0))
    fetched = jax.tree.map(jnp.asarray, state)
    ours, _ = step(fetched, batch_of(1))
    again, _ = step(state, batch_of(1))
    assert_equal(ours, again)


def test_arrays_behave_like_arrays(cluster: autopar.Cluster) -> None:
    step = autopar.parallelize(train_step, cluster=cluster)
    state, metrics = step(create(0), batch_of(0))
    weights, loss = state["params"][0]["w"], metrics["loss"]
    assert isinstance(weights, autopar.DistributedArray)
    assert weights.shape == (WIDTH, WIDTH)
    assert weights.nbytes == WIDTH * WIDTH * 8
    assert "float64[16,16]" in repr(weights)
    assert not np.isnan(float(loss))
    assert f"{loss:.3f}" == f"{float(loss):.3f}"
    assert jax.block_until_ready(metrics) is not None
    assert np.asarray(weights).shape == jax.device_get(weights).shape == (WIDTH, WIDTH)
    assert int(state["step"]) == 1
    assert isinstance(loss * 2, jax.Array)
    assert float(jnp.sum(jnp.asarray(weights))) == pytest.approx(np.asarray(weights).sum())
    assert jax.tree.structure(state) == jax.tree.structure(create(0))


def test_donated_state_is_refused_and_the_next_one_works(cluster: autopar.Cluster) -> None:
    step = autopar.parallelize(train_step, cluster=cluster)
    first = step.init(partial(create, 0), batch_of(0))
    second, _ = step(first, batch_of(0))
    with pytest.raises(autopar.TraceError, match="donation"):
        step(first, batch_of(0))
    step(second, batch_of(1))


def test_memory_of_workers_stays_flat(cluster: autopar.Cluster) -> None:
    step = autopar.parallelize(train_step, cluster=cluster)
    state = step.init(partial(create, 0), batch_of(0))
    held = []
    for number in range(40):
        state, metrics = step(state, batch_of(number))
        if number % 10 == 9:
            float(metrics["loss"])
            gc.collect()
            held.append(sum(one.array_bytes for one in step.last.executor.fleet.status()))
    assert len(set(held[1:])) == 1


def test_host_callbacks_are_refused_by_line(cluster: autopar.Cluster) -> None:
    def printing(state: Any, batch: Any) -> Any:
        jax.debug.print("loss {}", batch["x"].sum())
        return train_step(state, batch)

    with pytest.raises(autopar.TraceError, match=r"test_ray\.py:\d+ calls Python on the host"):
        autopar.parallelize(printing, cluster=cluster)(create(0), batch_of(0))


def test_a_killed_worker_is_named(cluster: autopar.Cluster) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, stages=2, num_microbatches=2)
    state = step.init(partial(create, 0), batch_of(0))
    state, metrics = step(state, batch_of(0))
    float(metrics["loss"])
    os.kill(step.last.executor.fleet.status()[0].pid, 9)
    with pytest.raises(autopar.WorkerError, match=r"a process is gone"):
        for number in range(20):
            state, metrics = step(state, batch_of(number))
            float(metrics["loss"])


def test_too_small_a_cluster_is_refused(local_ray: None) -> None:
    with pytest.raises(autopar.ClusterError, match="devices_per_host"):
        autopar.Cluster.ray(None, devices_per_host=0)


def test_a_worker_needs_no_jax_to_start() -> None:
    assert repr(MeshHost("mesh 1, host 2 (10.0.0.1)")) == "mesh 1, host 2 (10.0.0.1)"
