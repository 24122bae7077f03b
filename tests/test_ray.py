"""Steps on a local Ray cluster: the same numbers as jax.jit and as in this process, whatever the plan; errors that help."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.cli import main
from autopar.runtime.gauges import Gauges
from autopar.runtime.mesh_host import MeshHost
from autopar.runtime.messages import HostStatus
from tests.pipelines import folded
from tests.ray_cases import BATCH, WIDTH, assert_equal, batch_of, create, train_step, workers_of

PLANS = {
    "one mesh over two hosts": {"stages": 1},
    "fully sharded": {"method": "zero3"},
    "two stages": {"stages": 2, "num_microbatches": 4, "schedule": "1f1b"},
    "stages across hosts": {"stages": [[0, 2], [1, 3]], "num_microbatches": 2, "schedule": "gpipe"},
    "four stages": {"stages": 4, "num_microbatches": 4, "schedule": "eager_1f1b"},
    "stages dealt round": {"stages": 4, "num_microbatches": 4, "stages_per_mesh": 2},
    "residuals on the hosts": {
        "stages": [[0, 2], [1, 3]],
        "num_microbatches": 4,
        "schedule": "1f1b",
        "offload": "activations",
    },
    "own order across hosts": {"stages": [[0, 2], [1, 3], [1, 3], [0, 2]], "num_microbatches": 2, "schedule": folded},
}


WHOLE = PLANS["one mesh over two hosts"]
"""For tests to which the plan does not matter: the search for pipelines has tests of its own, and takes longest."""

VERIFIED = (
    "one mesh over two hosts",
    "fully sharded",
    "stages across hosts",
    "four stages",
    "stages dealt round",
    "residuals on the hosts",
    "own order across hosts",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.verify if name in VERIFIED else ()) for name in PLANS]
)
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


@pytest.mark.verify
def test_state_from_the_driver_and_back(cluster: autopar.Cluster) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, stages=2, num_microbatches=2)
    state, _ = step(create(1), batch_of(0))
    fetched = jax.tree.map(jnp.asarray, state)
    ours, _ = step(fetched, batch_of(1))
    again, _ = step(state, batch_of(1))
    assert_equal(ours, again)


@pytest.mark.verify
def test_waiting_for_a_state_asks_for_few_of_its_arrays(
    cluster: autopar.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question to each process costs a millisecond, and states have hundreds of leaves."""
    step = autopar.parallelize(train_step, cluster=cluster, **WHOLE)
    state, metrics = step(create(0), batch_of(0))
    float(metrics["loss"])
    asked = []
    (world,) = step.last.executor.worlds
    call = world.call
    monkeypatch.setattr(world, "call", lambda name, *given: asked.append(name) or call(name, *given))
    jax.block_until_ready(state)
    jax.block_until_ready(state)
    assert asked.count("wait") <= 2 < len(jax.tree.leaves(state))
    state, _ = step(state, batch_of(1))  # which is not there because the state before it was
    before = len(asked)
    jax.block_until_ready(state)
    assert "wait" in asked[before:]


def test_arrays_behave_like_arrays(cluster: autopar.Cluster) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, **WHOLE)
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


@pytest.mark.verify
def test_donated_state_is_refused_and_the_next_one_works(cluster: autopar.Cluster) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, **WHOLE)
    first = step.init(partial(create, 0), batch_of(0))
    second, _ = step(first, batch_of(0))
    with pytest.raises(autopar.TraceError, match="donation"):
        step(first, batch_of(0))
    step(second, batch_of(1))


def open_to_all(pid: int) -> int:
    """How many sockets of a process listen on every interface of its host."""
    sockets = [one for one in psutil.Process(pid).net_connections("inet") if one.status == psutil.CONN_LISTEN]
    return sum(one.laddr.ip in ("0.0.0.0", "::") for one in sockets)


def test_nothing_of_ours_listens_on_all_interfaces(cluster: autopar.Cluster) -> None:
    """A process of ours has as many such sockets as any of Ray's, for Ray opens some; the driver serves coordinators."""
    import ray

    step = autopar.parallelize(train_step, cluster=cluster, **PLANS["stages across hosts"])
    float(step(create(0), batch_of(0))[1]["loss"])

    class Bare:
        """An actor of nobody's."""

        def pid(self) -> int:
            return os.getpid()

    bare = ray.remote(Bare).remote()
    of_ray = open_to_all(ray.get(bare.pid.remote()))
    ray.kill(bare)
    assert {open_to_all(pid) for pid in [os.getpid(), *workers_of(step)]} <= set(range(of_ray + 1))
    own = [one.laddr.ip for one in psutil.Process(workers_of(step)[0]).net_connections("inet")]
    assert cluster.runs_on.nodes[0].address in own, "the server of transfers"


def every_tenth_step(cluster: autopar.Cluster, count: Callable[[Any], int]) -> list[int]:
    """What is counted after ten, twenty, thirty and forty steps, given what executes them."""
    step = autopar.parallelize(train_step, cluster=cluster, **WHOLE)
    state = step.init(partial(create, 0), batch_of(0))
    counted = []
    for number in range(40):
        state, metrics = step(state, batch_of(number))
        if number % 10 == 9:
            float(metrics["loss"])
            step.last.executor.wait(state)
            gc.collect()
            counted.append(count(step.last.executor))
    return counted


@pytest.mark.verify
def test_memory_of_workers_stays_flat(cluster: autopar.Cluster) -> None:
    held = every_tenth_step(cluster, lambda executor: sum(one.array_bytes for one in executor.fleet.status()))
    assert len(set(held[1:])) == 1


def test_ray_keeps_nothing_of_steps_that_are_done(cluster: autopar.Cluster) -> None:
    import ray

    ours = ray._private.worker.global_worker.core_worker
    kept = every_tenth_step(cluster, lambda executor: len(ours.get_all_reference_counts()))
    assert kept[-1] <= kept[0], f"{kept} references"


def test_host_callbacks_are_refused_by_line(cluster: autopar.Cluster) -> None:
    def printing(state: Any, batch: Any) -> Any:
        jax.debug.print("loss {}", batch["x"].sum())
        return train_step(state, batch)

    with pytest.raises(autopar.TraceError, match=r"test_ray\.py:\d+ calls Python on the host"):
        autopar.parallelize(printing, cluster=cluster, **WHOLE)(create(0), batch_of(0))


def test_a_killed_worker_is_named(cluster: autopar.Cluster) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, stages=2, num_microbatches=2)
    state = step.init(partial(create, 0), batch_of(0))
    state, metrics = step(state, batch_of(0))
    float(metrics["loss"])
    os.kill(workers_of(step)[0], 9)

    def go_on() -> None:
        carried = state
        for number in range(20):
            carried, metrics = step(carried, batch_of(number))
            float(metrics["loss"])

    with pytest.raises(autopar.WorkerError, match=r"process is gone"):
        go_on()


def test_too_small_a_cluster_is_refused(local_ray: None) -> None:
    with pytest.raises(autopar.ClusterError, match="devices_per_host"):
        autopar.Cluster.ray(None, devices_per_host=0)


def test_a_worker_needs_no_jax_to_start() -> None:
    assert repr(MeshHost("mesh 1, host 2 (10.0.0.1)")) == "mesh 1, host 2 (10.0.0.1)"


def test_status_is_told_to_other_programs(cluster: autopar.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, **WHOLE)
    state = step.init(partial(create, 0), batch_of(0))
    for number in range(4):
        state, metrics = step(state, batch_of(number))
    float(metrics["loss"])
    assert main(["status", "--address", "auto"]) == 0
    said = capsys.readouterr().out
    assert "host 2 (" in said
    assert str(step.last.executor.fleet.status()[0].pid) in said


def test_kernels_that_the_hosts_may_not_have_are_refused_with_their_line(cluster: autopar.Cluster) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("my_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x * 2)

    with pytest.raises(
        autopar.TraceError, match=r"custom call 'my_kernel' at .*test_ray\.py:\d+ is none that the hosts"
    ):
        autopar.parallelize(step, cluster=cluster)(np.ones((8, 8)))


@pytest.mark.verify
def test_arguments_that_cannot_be_sent_are_refused_and_the_step_works_on(cluster: autopar.Cluster) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, **WHOLE)
    state = step.init(partial(create, 0), batch_of(0))
    with pytest.raises(autopar.TraceError, match="batch"):
        step(state, {"x": object(), "y": batch_of(0)["y"]})
    step(state, batch_of(0))


def driver(tmp_path: Path, more: str) -> Any:
    """A driver in a process of its own, which says which processes its workers are and then does ``more``."""
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            """
            import signal, time, autopar
            from functools import partial
            from tests.ray_cases import batch_of, create, train_step
            # As in a terminal: a shell has what it starts in the background ignore it, and what that starts.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            cluster = autopar.Cluster.ray("auto", hosts=2, devices_per_host=1)
            step = autopar.parallelize(train_step, cluster=cluster)
            state = step.init(partial(create, 0), batch_of(0))
            print("workers", *(one.pid for one in step.last_fleet().status()), flush=True)
            """
        ).replace("step.last_fleet()", "cluster.runs_on.running")
        + more
    )
    import ray

    # Of several clusters on a machine "auto" finds the newest, which may be another test's.
    here = ray.get_runtime_context().gcs_address
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "RAY_ADDRESS": here}
    return subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.parametrize(
    "sign",
    [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.verify)],
    ids=["killed", "interrupted"],
)
def test_workers_end_with_their_driver(local_ray: None, tmp_path: Path, sign: signal.Signals) -> None:
    process = driver(tmp_path, "while True: state, _ = step(state, batch_of(0))")
    try:
        said = next((line for line in process.stdout if line.startswith("workers")), "")
        time.sleep(0.5)
    finally:
        process.send_signal(sign)
        _, complaint = process.communicate(timeout=60)
    workers = [int(pid) for pid in said.split()[1:]]
    assert len(workers) == 2, complaint
    until = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.2)
    assert not any(psutil.pid_exists(pid) for pid in workers)


@pytest.mark.parametrize(
    "options",
    [
        {"constraints": {"batch**": PartitionSpec("data")}},
        pytest.param({"stages": 2, "num_microbatches": 2}, marks=pytest.mark.verify),
    ],
    ids=["mesh", "stages"],
)
def test_hosts_read_their_own_rows(cluster: autopar.Cluster, tmp_path: Path, options: dict[str, Any]) -> None:
    def read(step: int, rows: slice) -> dict[str, np.ndarray]:
        (tmp_path / f"{step}.{rows.start}.{rows.stop}.{os.getpid()}").touch()
        return {name: leaf[rows] for name, leaf in _batch(step).items()}

    data = autopar.HostData(read, batch_of(0))
    step = autopar.parallelize(train_step, cluster=cluster, **options)
    ours, theirs = (step.init(partial(create, 0), batch_of(0)) for _ in range(2))
    for number in range(3):
        ours, metrics = step(ours, data[number])
        theirs, wanted = step(theirs, batch_of(number))
        assert float(metrics["loss"]) == float(wanted["loss"])
    said = [path.name.split(".") for path in tmp_path.iterdir()]
    assert str(os.getpid()) not in {pid for *_, pid in said}, "the driver reads nothing"
    assert all(int(stop) - int(start) < BATCH for _, start, stop, _ in said), "no host reads a whole batch"
    assert {int(step) for step, *_ in said} == {0, 1, 2, 3}, "the next step's rows are read beforehand"


_batch = batch_of  # sent to the hosts with the reader above


def test_host_data_in_this_process() -> None:
    with jax.enable_x64(True):
        data = autopar.HostData(
            lambda step, rows: {name: leaf[rows] for name, leaf in batch_of(step).items()}, batch_of(0)
        )
        step = autopar.parallelize(train_step, num_microbatches=2)
        ours, _ = step(create(0), data[0])
        theirs, _ = step(create(0), batch_of(0))
        assert_equal(ours, theirs)


def test_rows_of_another_number_are_refused() -> None:
    data = autopar.HostData(lambda step, rows: batch_of(step), {name: leaf[:4] for name, leaf in batch_of(0).items()})
    with pytest.raises(autopar.TraceError, match=r"give 2 leaves with 4 rows"):
        data.leaves_of(0, slice(0, 4))
    with pytest.raises(autopar.TraceError, match="same first dimension"):
        autopar.HostData(lambda step, rows: None, {"a": np.ones(3), "b": np.ones(4)})


@pytest.mark.verify
def test_a_second_start_plans_and_compiles_nothing(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    kept = []
    with jax.enable_x64(True):
        for _ in range(2):
            hosts = autopar.Cluster.ray(None, hosts=2, devices_per_host=1)
            step = autopar.parallelize(train_step, cluster=hosts, stages=2, num_microbatches=2)
            float(step(create(0), batch_of(0))[1]["loss"])
            hosts.close()
            kept.append(
                {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if not path.name.endswith("-atime")}
            )
    assert kept[0] == kept[1]
    assert {path.parts[0] for path in kept[0]} == {"plans", "executables"}
    assert step.last_records()[2] is None, "the plan came from the disk"


def test_gauges_show_how_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.util.metrics

    shown: dict[tuple[str, str], float] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert description
            assert tag_keys == ("host",)
            self.name, self.tags = name, {"host": ""}

        def set_default_tags(self, tags: dict[str, str]) -> None:
            self.tags = tags

        def set(self, value: float) -> None:
            shown[self.name, self.tags["host"]] = value

    monkeypatch.setattr(ray.util.metrics, "Gauge", Gauge)
    name = "mesh 1, host 2"
    Gauges(name).set(
        HostStatus(name, 7, resident_bytes=100, array_bytes=50, step=3, busy_seconds=0.0, step_seconds=0.25)
    )
    assert shown == {
        ("autopar_step_seconds", name): 0.25,
        ("autopar_array_bytes", name): 50,
        ("autopar_resident_bytes", name): 100,
    }
