"""Several processes that run the same script: one plan, the numbers of jax.jit, rows read where they are needed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.ray_cases import batch_of, create, train_step

SCRIPT = """
import json, os, sys, time
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_enable_x64", True)
import autopar
from functools import partial
from tests.ray_cases import batch_of, create, train_step

rank, address, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
cluster = autopar.Cluster.distributed(coordinator_address=address, num_processes=2, process_id=rank)
assert (cluster.hosts, cluster.devices_per_host) == (2, 2)
read = []

def rows_of(step, rows):
    read.append((rows.start, rows.stop))
    return {name: leaf[rows] for name, leaf in batch_of(step).items()}

data = autopar.HostData(rows_of, batch_of(0))
step = autopar.parallelize(train_step, cluster=cluster, **options)
try:
    state = step.init(partial(create, 0), batch_of(0))
except autopar.PlanError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    time.sleep(5 if rank == 0 else 0)  # the first process serves the coordinator, without which the other is aborted
    os._exit(0)
losses = []
for number in range(3):
    state, metrics = step(state, data[number] if number else batch_of(number))
    losses.append(float(metrics["loss"]))
print(json.dumps({"losses": losses, "plan": step.last.plan.summary(), "rows": read}), flush=True)
"""


def run(options: dict[str, Any]) -> list[dict[str, Any]]:
    """What two processes say, each with two devices."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "XLA_FLAGS": flags, "NPROC": "4"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), address, json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    said = []
    for process in processes:
        out, complaint = process.communicate(timeout=150)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        assert lines, complaint
        said.append(json.loads(lines[-1]))
    return said


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"method": "zero3"}, marks=pytest.mark.verify)], ids=["auto", "zero3"]
)
def test_two_processes_train_like_one(options: dict[str, Any]) -> None:
    first, second = run(options)
    with jax.enable_x64(True):
        state, wanted, step = create(0), [], jax.jit(train_step)
        for number in range(3):
            state, metrics = step(state, batch_of(number))
            wanted.append(float(metrics["loss"]))
    assert first["losses"] == pytest.approx(wanted, rel=1e-11)
    assert first["losses"] == second["losses"]
    assert first["plan"] == second["plan"]


@pytest.mark.verify
def test_what_process_0_refuses_is_refused_everywhere() -> None:
    first, second = run({"memory_per_device": 1.0})
    assert "process 0 found no plan" in second["error"]
    assert first["error"] in second["error"]


@pytest.mark.verify
def test_pipelines_are_refused() -> None:
    for said in run({"stages": 2}):
        assert "Cluster.ray()" in said["error"]
