"""How long is a step on CPU where threads share one heap, or have several?  Each in processes of its own, in turn.

    python -m benchmarks.heaps [--models wide_resnet …] [--method data_parallel] [--heaps 1 2] [--turns 3] [--steps 40]

Every process plans, compiles and runs the same step on 8 devices of this machine in one go, told by its environment to keep what
it frees (:mod:`autopar.host_memory`) in so many heaps.  The median step of each process stands in the table, so that what differs
from process to process is seen beside what the heaps do.  Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster
from autopar.host_memory import variables
from benchmarks.models import FAMILIES, build
from benchmarks.turns import run_in_turn

MOST_SECONDS = 900
"""That a process may take."""


def median_seconds(name: str, method: str, steps: int) -> float:
    """Of a step in this process."""
    model = build(name, "bench")
    step = autopar.parallelize(model.train_step, cluster=Cluster.local(profile=None), method=method)
    compiled = step.compile(model.abstract_state(), model.abstract_batch())
    return statistics.median(run_in_turn(model, {name: compiled}, steps)[name])


def median_apart(name: str, heaps: int, arguments: argparse.Namespace) -> float:
    """The same in a process with so many heaps."""
    asked = ["--models", name, "--method", arguments.method, "--steps", str(arguments.steps), "--here"]
    environment = {**os.environ, **variables({}), "MALLOC_ARENA_MAX": str(heaps)}
    command = [sys.executable, "-m", "benchmarks.heaps", *asked]
    done = subprocess.run(command, check=True, timeout=MOST_SECONDS, env=environment, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a row per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["wide_resnet", "unet", "mlp_nnx"], choices=list(FAMILIES))
    parser.add_argument("--method", default="data_parallel")
    parser.add_argument("--heaps", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # of a process that measures for another
    arguments = parser.parse_args()
    if arguments.here:
        print(median_seconds(arguments.models[0], arguments.method, arguments.steps))
        return
    table = Table(title=f"milliseconds of a step, {arguments.method}, by heaps")
    for column in ("model", *(str(heaps) for heaps in arguments.heaps)):
        table.add_column(column)
    for name in arguments.models:
        found: dict[int, list[float]] = {heaps: [] for heaps in arguments.heaps}
        for _ in range(arguments.turns):
            for heaps, seconds in found.items():
                seconds.append(median_apart(name, heaps, arguments))
        table.add_row(name, *(", ".join(f"{one * 1e3:.1f}" for one in seconds) for seconds in found.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
