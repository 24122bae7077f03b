"""What a user, or a machine, can do wrong on a Ray cluster: one error says what and where, soon, and the hosts work on."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.ray_cases import batch_of, create, train_step

make = partial(create, 0)
SOON_SECONDS = 20.0


def works(step: autopar.Parallelized) -> None:
    """A state that is made anew is trained."""
    state, metrics = step(step.init(make, batch_of(0)), batch_of(0))
    expected, wanted = jax.jit(train_step)(create(0), batch_of(0))
    assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-12)
    assert int(state["step"]) == int(expected["step"])


def breaking_at(step: int) -> autopar.HostData:
    rows_of = batch_of

    def read(number: int, rows: slice) -> Any:
        if number == step:
            raise OSError("the disk is gone")
        return {name: leaf[rows] for name, leaf in rows_of(number).items()}

    return autopar.HostData(read, batch_of(0))


@pytest.mark.parametrize(
    "options",
    [
        {"method": "data_parallel"},
        pytest.param({"stages": 2, "num_microbatches": 2}, marks=pytest.mark.verify),
    ],
    ids=["mesh", "stages"],
)
def test_a_reader_that_raises_ends_the_run_with_its_line(cluster: autopar.Cluster, options: dict[str, Any]) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, **options)
    run = autopar.Run(step, make, breaking_at(3), steps=10)
    began, found = time.monotonic(), []
    with pytest.raises(
        autopar.DataError, match=r"read\(step=3, rows=\d:\d\).*OSError: the disk is gone.*faults\.py:\d+"
    ):
        found += [number for number, _ in run]
    assert run.restarts == []
    assert time.monotonic() - began < SOON_SECONDS
    works(step)


def test_a_reader_that_raises_in_this_process() -> None:
    with pytest.raises(autopar.DataError, match=r"read\(step=0, rows=0:4\).*the disk is gone \(.*faults\.py:\d+\)"):
        breaking_at(0).leaves_of(0, slice(0, 4))


def test_a_reader_that_cannot_be_sent(cluster: autopar.Cluster) -> None:
    lock = threading.Lock()

    def read(step: int, rows: slice) -> Any:
        with lock:
            return batch_of(step)

    step = autopar.parallelize(train_step, cluster=cluster, method="data_parallel")
    state = step.init(make, batch_of(0))
    with pytest.raises(autopar.DataError, match=r"cannot be sent to the hosts.*lock.*when it is called"):
        step(state, autopar.HostData(read, batch_of(0))[0])
    step(state, batch_of(0))


def test_a_reader_that_finds_nothing_on_the_hosts(
    cluster: autopar.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def read(step, rows):\n    return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    step = autopar.parallelize(train_step, cluster=cluster, method="data_parallel")
    state = step.init(make, batch_of(0))
    with pytest.raises(autopar.DataError, match=r"mesh 1, host [12] .*No module named 'only_here'; install it there"):
        step(state, autopar.HostData(only_here.read, batch_of(0))[0])
    works(step)


def test_too_little_memory_on_a_host_ends_the_run(cluster: autopar.Cluster) -> None:
    """A planner that was told of more memory than there is."""

    def greedy(state: Any, batch: Any) -> Any:
        return state + jnp.cumsum(jnp.ones((2**23, 2**23)) * batch["x"].sum(), axis=0)[-1, 0], {"loss": state}

    device = dataclasses.replace(cluster.device, memory_bytes=2**60)
    step = autopar.parallelize(greedy, cluster=cluster.replace(device=device), method="data_parallel")
    run = autopar.Run(step, lambda: jnp.zeros(()), lambda step: map(batch_of, itertools.count(step)), steps=3)
    with pytest.raises(autopar.OutOfMemoryError, match=r"Out of memory allocating \d+ bytes.*memory_per_device"):
        list(run)
    assert run.restarts == []
    works(autopar.parallelize(train_step, cluster=cluster, method="data_parallel"))


def test_hosts_that_run_another_version_are_refused(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime import fleet

    ours = fleet.our_versions()
    monkeypatch.setattr(fleet, "our_versions", lambda: dataclasses.replace(ours, jax="0.0.1"))
    cluster = autopar.Cluster.ray(None, hosts=1, devices_per_host=1)
    step = autopar.parallelize(train_step, cluster=cluster)
    with pytest.raises(
        autopar.ClusterError, match=r"mesh 1, host 1 .*runs .*the driver .*0\.0\.1.*same versions on every host"
    ):
        step(create(0), batch_of(0))
    assert cluster.runs_on.running is None or cluster.runs_on.running.status() == []
    cluster.close()


def test_a_plan_for_more_hosts_is_refused(cluster: autopar.Cluster, local_ray: None) -> None:
    plan = autopar.parallelize(train_step, cluster=cluster, method="data_parallel").plan(create(0), batch_of(0))
    smaller = autopar.Cluster.ray(None, hosts=1, devices_per_host=2)
    step = autopar.parallelize(train_step, cluster=smaller)
    step.use(plan)
    with pytest.raises(autopar.PlanError, match=r"the plan is for 4 devices of ray cpu, ray cpu has 2; "):
        step(create(0), batch_of(0))
    assert smaller.runs_on.running is None, "nothing was started"
    smaller.close()


_DRIVER = """
import sys, autopar, ray
from functools import partial
from tests.ray_cases import batch_of, create, train_step
import itertools, jax
jax.config.update("jax_enable_x64", True)
ray.init(address="auto", log_to_driver=False)
cluster = autopar.Cluster.ray("auto", hosts=2, devices_per_host=1)
step = autopar.parallelize(train_step, cluster=cluster, stages=2, num_microbatches=2)
run = autopar.Run(step, partial(create, 0), lambda first: map(batch_of, itertools.count(first)), steps=12,
                  checkpoints=autopar.Checkpoints(sys.argv[1], every_steps=2))
for number, metrics in run:
    print(number, float(metrics["loss"]).hex(), flush=True)
cluster.close()
"""


def losses_until(folder: Path, last: int, checkpoints: Path) -> dict[int, str]:
    """Of a driver that is killed when it has told of a step, if it has not ended by then."""
    import ray

    (folder / "driver.py").write_text(textwrap.dedent(_DRIVER))
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }
    command = [sys.executable, str(folder / "driver.py"), str(checkpoints)]
    found: dict[int, str] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            number, loss = line.split()
            found[int(number)] = loss
            if int(number) == last:
                process.kill()
    return found


@pytest.mark.verify
def test_a_driver_that_is_killed_goes_on_when_it_is_started_again(local_ray: None, tmp_path: Path) -> None:
    wanted = losses_until(tmp_path, 99, tmp_path / "calm")
    assert sorted(wanted) == list(range(1, 13))
    first = losses_until(tmp_path, 5, tmp_path / "run")
    second = losses_until(tmp_path, 9, tmp_path / "run")
    third = losses_until(tmp_path, 99, tmp_path / "run")
    assert 1 < min(second) <= 6
    assert min(second) < min(third) <= 10
    for found in (first, second, third):
        assert found == {number: wanted[number] for number in found}
    assert sorted({*first, *second, *third}) == sorted(wanted)
