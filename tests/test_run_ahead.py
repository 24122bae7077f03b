"""A host that is far ahead of its devices waits for them, and no program waits for a thread that another's waiting holds.

Of whole steps the default run has two processes with few threads, in :mod:`tests.test_distributed`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.runtime.run_ahead import Bounded, freely, run_ahead, telling

STEPS = 60
"""More than XLA:CPU lets wait on a device (32)."""

SCRIPT = """
import sys
import jax
import jax.numpy as jnp
import autopar

jax.config.update("jax_enable_x64", True)
stages, microbatches, steps = map(int, sys.argv[1:])

def train_step(state, batch):
    def loss(w):
        x = batch["x"]
        for w_k in w:
            x = jnp.tanh(x @ w_k)
        return jnp.mean((x - batch["x"]) ** 2)
    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), {"loss": value}

batch = {"x": jnp.ones((256, 256)) / 16}
state = [jnp.eye(256) * (1 + 0.1 * k) for k in range(8)]
local = autopar.Cluster.local()
if stages == 1:
    step = autopar.parallelize(method="tensor_parallel", cluster=local)(train_step)
else:
    step = autopar.parallelize(
        stages=stages, num_microbatches=microbatches, schedule="gpipe", mesh_shape=(2, 2), cluster=local
    )(train_step)
wanted, plain = state, jax.jit(train_step)
for _ in range(steps):
    wanted, said = plain(wanted, batch)
    jax.block_until_ready(said)
losses = []
for _ in range(steps):
    state, metrics = step(state, batch)
    losses.append(metrics["loss"])
print(float(losses[-1]), float(said["loss"]))
"""


@pytest.mark.parametrize(
    ("stages", "microbatches", "steps"),
    [pytest.param(1, 1, 2 * STEPS, marks=pytest.mark.verify), pytest.param(2, 16, 12, marks=pytest.mark.verify)],
)
def test_steps_that_nobody_waits_for(stages: int, microbatches: int, steps: int) -> None:
    # The pool of XLA:CPU has one thread for each device, as on a machine with few cores.
    environment = os.environ | {"NPROC": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(stages), str(microbatches), str(steps)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "may be stuck" not in ended.stderr
    found, wanted = map(float, ended.stdout.split())
    assert found == pytest.approx(wanted, rel=1e-10)


def test_the_oldest_is_waited_for() -> None:
    waited: list[float] = []
    started = Bounded(3, lambda array: waited.append(float(array))).started
    for number in range(5):
        started(jnp.float32(number))
    assert waited == [0, 1, 2]


def test_what_was_taken_over_is_passed_by() -> None:
    started = Bounded(3).started
    arrays = [jnp.float32(number) for number in range(4)]
    for array in arrays:
        started(array)
        array.delete()


def test_steps_that_take_their_state_over() -> None:
    """The result of each step is gone when it would be waited for."""
    step = jax.jit(lambda state: {"count": state["count"] + 1, "sum": state["sum"] * 0.5}, donate_argnums=0)
    state = {"count": jnp.zeros((), jnp.int32), "sum": jnp.ones(512)}
    started = Bounded(3).started
    for _ in range(20):
        state = step(state)
        started(state["count"])
    assert int(state["count"]) == 20


def test_only_cpus_are_waited_for() -> None:
    class Gpu:
        platform = "gpu"

    class Gpus:
        devices = np.array([Gpu()])

    assert run_ahead(cast(Any, Gpus())) is freely
    assert run_ahead(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])) is not freely


def test_who_starts_a_program_tells_of_the_last_small_result() -> None:
    told: list[jax.Array] = []
    one, two, three = jnp.ones(2), jnp.ones(1), jnp.zeros(1)
    assert telling(lambda: one, told.append)() is one
    several = telling(lambda: [two, one, three], told.append)
    assert several() == several()
    assert telling(lambda: (), told.append)() == ()
    assert [id(array) for array in told] == [id(one), id(three), id(three)]
