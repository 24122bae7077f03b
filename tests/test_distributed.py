"""Several processes that run the same script: one plan, the numbers of jax.jit, rows read where they are needed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.measured_network import KINDS
from autopar.network import spans_of
from autopar.runtime.attendance import missing_from
from tests.ray_cases import batch_of, create, train_step, value
from tests.scanned_cases import Scanned
from tests.test_like import evaluate, predict

START = """
import json, os, sys, time
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_enable_x64", True)
import autopar
import numpy as np
from functools import partial
from tests.ray_cases import batch_of, create, train_step
from tests.scanned_cases import Scanned
from tests.test_distributed import pieces_here
from tests.test_like import evaluate, predict

rank, address, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
cluster = autopar.Cluster.distributed(coordinator_address=address, num_processes=2, process_id=rank)
assert (cluster.hosts, cluster.devices_per_host) == (2, 2)

def tell(**said):
    print(json.dumps(said), flush=True)
"""

TRAINING = """
read = []

def rows_of(step, rows):
    read.append((rows.start, rows.stop))
    return {name: leaf[rows] for name, leaf in batch_of(step).items()}

data = autopar.HostData(rows_of, batch_of(0))
step = autopar.parallelize(train_step, cluster=cluster, **options)
try:
    state = step.init(partial(create, 0), batch_of(0))
except autopar.PlanError as error:
    tell(error=str(error))
    time.sleep(5 if rank == 0 else 0)  # the first process serves the coordinator, without which the other is aborted
    os._exit(0)
losses = []
for number in range(3):
    state, metrics = step(state, data[number] if number else batch_of(number))
    losses.append(float(metrics["loss"]))
tell(losses=losses, plan=step.last.plan.summary(), rows=read, state=pieces_here(state))
"""

MEASURING = """
from autopar.measured_network import NetworkEffort, measure_network
network = measure_network(NetworkEffort((1 << 10, 1 << 12), 2, 1, (8, 16)))
tell(spans=[[one.kind, one.span.hosts, one.span.per_host] for one in network.collectives], waits=len(network.waits))
"""

EVALUATING = """
step = autopar.parallelize(train_step, cluster=cluster, stages=2, num_microbatches=2)
state, metrics = step(step.init(partial(create, 0), batch_of(0)), batch_of(0))
found = autopar.parallelize(evaluate, like=step)(state, batch_of(7))
rows = autopar.parallelize(predict, like=step)(state["params"], batch_of(7)["x"])
state, metrics = step(state, batch_of(1))
tell(loss=float(found["loss"]), rows=np.asarray(rows).tolist(), after=float(metrics["loss"]))
"""

SAVING = """
step = autopar.parallelize(train_step, cluster=cluster, **options["plan"])
checkpoints = autopar.Checkpoints(options["directory"])
init = partial(create, 0)
found = checkpoints.restore(step, init, batch_of(0))
state, first = (step.init(init, batch_of(0)), 0) if found is None else (found.state, found.step)
assert found is None or found.data == {"epoch": found.step}
losses = []
for number in range(first, first + 2):
    state, metrics = step(state, batch_of(number))
    losses.append(float(metrics["loss"]))
checkpoints.save(first + 2, state, {"epoch": first + 2})
state, _ = step(state, batch_of(first + 2))  # which takes the memory of what is being written
checkpoints.close()
tell(losses=losses, plan=step.last.plan.summary())
"""

SCANNED = """
case = Scanned(4)
directory = options.pop("directory")
step = autopar.parallelize(case.train_step, cluster=cluster, **options)
checkpoints = autopar.Checkpoints(directory)
state, losses = step.init(case.make_state, batch_of(0)), []
for number in range(3):
    if number == 2:
        checkpoints.save(number, state)
        checkpoints.wait()
        state = checkpoints.restore(step, case.make_state, batch_of(0)).state
    state, metrics = step(state, batch_of(number))
    losses.append(float(metrics["loss"]))
checkpoints.close()
tell(losses=losses, layers=repr(state["params"]["layers"]["bias"]))
"""

MANY_STARTED = """
many = {name: np.tile(leaf, (8, 1)) for name, leaf in batch_of(0).items()}
step = autopar.parallelize(train_step, cluster=cluster, **options)
state = step.init(partial(create, 0), many)
for number in range(4):
    state, metrics = step(state, many)
tell(loss=float(metrics["loss"]))
"""

FAILING = """
def rows_of(step, rows):
    if rank == options["fails"] and step == 12:
        raise ValueError("no such file")
    return {name: leaf[rows] for name, leaf in batch_of(step).items()}

data = autopar.HostData(rows_of, batch_of(0))
step = autopar.parallelize(train_step, cluster=cluster, stages=2, num_microbatches=4)
state, said = step.init(partial(create, 0), batch_of(0)), []
try:
    for number in range(30):
        state, metrics = step(state, data[number])
except Exception as error:
    said.append((number, f"{type(error).__name__}: {error}"))
try:
    step(state, batch_of(0))
except autopar.WorkerError as error:
    said.append((number, str(error)))
tell(said=said)
"""

LATE = """
from autopar.runtime import distributed_pipeline
distributed_pipeline.WAITING_SECONDS = 4.0
step = autopar.parallelize(train_step, cluster=cluster, stages=2, num_microbatches=4)
state, said = step.init(partial(create, 0), batch_of(0)), []
for number in range(options["at"] + 2):
    if rank == options["late"] and number == options["at"]:
        time.sleep(12)
    before = time.monotonic()
    try:
        state, metrics = step(state, batch_of(number))
        float(metrics["loss"])
    except autopar.AutoparError as error:
        said.append((number, f"{type(error).__name__}: {error}", time.monotonic() - before))
tell(said=said)
"""


def pieces_here(state: Any) -> dict[str, list[Any]]:
    """Of each leaf, by its number, what this process holds: pairs of a box and its values."""
    found = {}
    for number, leaf in enumerate(jax.tree.leaves(state)):
        words = jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        found[str(number)] = [
            (
                [list(one.indices(size)[:2]) for one, size in zip(shard.index, words.shape, strict=True)],
                np.asarray(shard.data).tolist(),
            )
            for shard in words.addressable_shards
        ]
    return found


def run(options: dict[str, Any], script: str = TRAINING, threads: int = 4) -> list[dict[str, Any]]:
    """What two processes say, each with two devices and so many ``threads`` of XLA, but no fewer than devices."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "XLA_FLAGS": flags, "NPROC": str(threads)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START + script, str(rank), address, json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    said = []
    try:  # both are read at once: one that cannot write on does not come to its end, and the other waits there
        with ThreadPoolExecutor(2) as readers:
            told = list(readers.map(lambda process: process.communicate(timeout=150), processes))
    finally:
        for process in processes:
            process.kill()
    for out, complaint in told:
        lines = [line for line in out.splitlines() if line.startswith("{")]
        assert lines, complaint
        said.append(json.loads(lines[-1]))
    return said


PLANS = {
    "auto": {},
    "zero3": {"method": "zero3"},
    "1f1b": {"stages": 2, "schedule": "1f1b", "num_microbatches": 4},
    "gpipe": {"stages": 2, "schedule": "gpipe", "num_microbatches": 2},
    "two meshes in each process": {"method": "inter_op", "num_microbatches": 4},
    "meshes across processes": {"stages": [[0, 2], [1, 3]], "num_microbatches": 2},
    "first and last stage in one process": {"stages": [[0], [2], [3], [1]], "num_microbatches": 4, "schedule": "zb_h1"},
    "stages dealt round": {"stages": 4, "stages_per_mesh": 2, "num_microbatches": 4},
    "residuals on the hosts": {
        "stages": [[0, 2], [1, 3]],
        "num_microbatches": 4,
        "schedule": "1f1b",
        "offload": "activations",
    },
    "split backward passes": {"stages": 2, "schedule": "zb_h1", "num_microbatches": 4},
}

ALWAYS = ("1f1b",)  # checkpoints go over one mesh of both processes, below


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.verify) for name in PLANS]
)
def test_two_processes_train_like_one(name: str) -> None:
    first, second = run(PLANS[name])
    with jax.enable_x64(True):
        state, wanted, step = create(0), [], jax.jit(train_step)
        for number in range(3):
            state, metrics = step(state, batch_of(number))
            wanted.append(float(metrics["loss"]))
        leaves = [value(leaf) for leaf in jax.tree.leaves(state)]
    assert first["losses"] == pytest.approx(wanted, rel=1e-11)
    assert first["losses"] == second["losses"]
    assert first["plan"] == second["plan"]
    for number, leaf in enumerate(leaves):
        pieces = [piece for said in (first, second) for piece in said["state"][str(number)]]
        assert pieces
        for box, piece in pieces:
            np.testing.assert_allclose(piece, leaf[tuple(slice(*ends) for ends in box)], rtol=1e-11, atol=1e-12)


@pytest.mark.verify
def test_what_process_0_refuses_is_refused_everywhere() -> None:
    first, second = run({"memory_per_device": 1.0})
    assert "process 0 found no plan" in second["error"]
    assert first["error"] in second["error"]


@pytest.mark.verify
def test_what_lies_between_the_hosts_is_measured_by_all_of_them() -> None:
    first, second = run({}, MEASURING)
    assert first == second
    assert first["spans"] == [[kind.value, span.hosts, span.per_host] for span in spans_of(2, 2) for kind in KINDS]
    assert first["waits"] == 2


@pytest.mark.verify
def test_evaluation_beside_training() -> None:
    """The key of the state is read by both stages, and only handed on by the first."""
    with jax.enable_x64(True):
        state, _ = train_step(create(0), batch_of(0))
        loss = float(evaluate(state, batch_of(7))["loss"])
        rows = np.asarray(predict(state["params"], batch_of(7)["x"]))
        after = float(train_step(state, batch_of(1))[1]["loss"])
    for said in run({}, EVALUATING):
        assert said["loss"] == pytest.approx(loss, rel=1e-11)
        assert said["after"] == pytest.approx(after, rel=1e-11)
        np.testing.assert_allclose(said["rows"], rows, rtol=1e-11)


@pytest.mark.verify
def test_checkpoints_go_from_plan_to_plan(tmp_path: Path) -> None:
    """Saved of two stages; read by two processes as one mesh, and saved; read by this process alone; and back into two stages."""
    with jax.enable_x64(True):
        state, wanted, step = create(0), [], jax.jit(train_step)
        for number in range(8):
            state, metrics = step(state, batch_of(number))
            wanted.append(float(metrics["loss"]))
    stages = {"stages": 2, "num_microbatches": 2}
    told = {"directory": str(tmp_path)}
    losses = [run(told | {"plan": plan}, SAVING) for plan in (stages, {"method": "zero3"})]
    with jax.enable_x64(True):
        checkpoints = autopar.Checkpoints(tmp_path)
        alone = autopar.parallelize(train_step, method="data_parallel")
        found = checkpoints.restore(alone, partial(create, 0), batch_of(0))
        assert found is not None
        state, own = found.state, []
        for number in (4, 5):
            state, metrics = alone(state, batch_of(number))
            own.append(float(metrics["loss"]))
        checkpoints.save(6, state, {"epoch": 6})
        checkpoints.close()
    losses.append([{"losses": own}] * 2)
    losses.append(run(told | {"plan": stages}, SAVING))
    for said in zip(*losses, strict=True):
        assert [loss for one in said for loss in one["losses"]] == pytest.approx(wanted, rel=1e-11)


@pytest.mark.verify
def test_stages_share_a_loop_over_layers(tmp_path: Path) -> None:
    """Saved and restored on the way, the stacked leaves in the pieces of two stages."""
    case = Scanned(4)
    with jax.enable_x64(True):
        state, wanted, step = case.make_state(), [], jax.jit(case.train_step)
        for number in range(3):
            state, metrics = step(state, batch_of(number))
            wanted.append(float(metrics["loss"]))
    for said in run({"stages": 2, "num_microbatches": 4, "directory": str(tmp_path)}, SCANNED):
        assert said["losses"] == pytest.approx(wanted, rel=1e-11)
        assert "[0:2] on devices" in said["layers"]


@pytest.mark.verify
def test_many_programs_are_started_with_few_threads() -> None:
    """More than wait in XLA's queues; those that meet in a collective need the threads that would wait to put in one more."""
    with jax.enable_x64(True):
        many = {name: np.tile(leaf, (8, 1)) for name, leaf in batch_of(0).items()}
        state, step = create(0), jax.jit(train_step)
        for _ in range(4):
            state, metrics = step(state, many)
        wanted = float(metrics["loss"])
    plan = {"stages": 2, "schedule": "gpipe", "num_microbatches": 64, "method": "tensor_parallel"}
    for said in run(plan, MANY_STARTED, threads=1):
        assert said["loss"] == pytest.approx(wanted, rel=1e-11)


@pytest.mark.verify
@pytest.mark.parametrize("fails", [0, 1])
def test_nobody_waits_for_a_process_that_failed(fails: int) -> None:
    both = run({"fails": fails}, FAILING)
    number, complaint = both[fails]["said"][0]
    assert number == 12
    assert complaint.startswith("DataError: read(step=12, rows=") and "raised ValueError: no such file (" in complaint
    number, complaint = both[1 - fails]["said"][0]
    assert number in (12, 13, 14)
    assert "WorkerError: step" in complaint
    for said in both:
        assert "start all processes again" in said["said"][1][1]


@pytest.mark.verify
@pytest.mark.parametrize(("late", "at"), [(0, 10), (1, 10), (1, 2)], ids=["loss elsewhere", "loss here", "timed"])
def test_a_process_that_never_calls_the_step_is_not_waited_for(late: int, at: int) -> None:
    """It lives, so JAX's coordinator sees nothing wrong.  The first steps are timed, and wait themselves."""
    both = run({"late": late, "at": at}, LATE)
    number, complaint, seconds = both[1 - late]["said"][0]
    assert number == at
    assert (
        f"TransportError: step {at + 1} did not end within 4 s: process {late} has called step {at} last. Eve"
        in complaint
    )
    assert 3.0 < seconds < 10.0
    assert "start all processes again" in both[1 - late]["said"][1][1]
    number, complaint, seconds = both[late]["said"][0]  # what the other had sent before is still there; no more comes
    assert number in (at, at + 1)
    assert "WorkerError: step" in complaint
    assert seconds < 3.0


def test_who_is_missing_is_named() -> None:
    assert (
        missing_from(3, {0: 3, 1: 2, 2: 0, 3: 4}) == "process 1 has called step 2 last, process 2 has called none yet"
    )
    assert missing_from(3, {0: 3, 1: 5}) == "all 2 processes have called it, so one of them is stuck in it"


def test_rows_of_a_whole_batch_as_one_microbatch() -> None:
    data = autopar.HostData(lambda step, rows: batch_of(step)["x"][rows], batch_of(0)["x"])
    whole, leaf = batch_of(3)["x"], data[3].reshape((1, *batch_of(3)["x"].shape))
    np.testing.assert_array_equal(leaf.read((slice(None), slice(2, 4), slice(1, 3))), whole[None, 2:4, 1:3])
    np.testing.assert_array_equal(np.asarray(leaf), whole[None].astype(leaf.dtype))
