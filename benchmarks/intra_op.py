"""The integer program against experts: models × every method on 8 devices, judged by the compiled HLO.

    python benchmarks/intra_op.py [--models gpt …] [--size bench] [--clock]

Two clusters: this machine (1 × 8), and the same devices as 2 hosts × 4 with a network ten times slower than the local
link.  Step seconds "by HLO" are what the reader of compiled programs says (roofline of every instruction and α-β of
every collective that XLA really emitted), not the planner's own prediction, which stands beside it.  ``--clock`` also runs
the steps on this machine, all methods of a model in turn, and prints the median.  The last lines give, per model and
cluster, ``auto`` over the best hand-made method that fits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster, Link
from autopar.cost_model.hlo import memory_bytes, parse_module, step_seconds
from autopar.errors import PlanError
from autopar.methods import HAND_MADE
from benchmarks.models import FAMILIES, Model, build

MODELS = ("gpt", "gpt_scan", "mlp_nnx", "llama_nnx")
METHODS = ("auto", *(method.name for method in HAND_MADE))


@dataclass(frozen=True)
class Row:
    """One method of one model on one cluster; ``clock_seconds`` is None where it was not run."""

    method: str
    mesh: str
    predicted_seconds: float
    hlo_compute_seconds: float
    hlo_communication_seconds: float
    predicted_bytes: int
    compiled_bytes: int
    clock_seconds: float | None

    @property
    def hlo_seconds(self) -> float:
        """Step seconds of the compiled program."""
        return self.hlo_compute_seconds + self.hlo_communication_seconds


def clusters() -> dict[str, Cluster]:
    """This machine, and the same devices over two hosts with a link ten times slower."""
    local = Cluster.local()
    near = local.local_link
    slow = Link(near.latency_seconds * 2, near.bytes_per_second / 10, shared_by=4, source="a tenth of the local link")
    return {"1×8": local, "2×4": replace(local, name="two hosts", hosts=2, devices_per_host=4, network_link=slow)}


def main() -> None:
    """Print a table per model and cluster, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=list(FAMILIES))
    parser.add_argument("--size", default="bench")
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    console = Console(width=150)
    ratios = []
    for name in arguments.models:
        model = build(name, arguments.size)
        for label, cluster in clusters().items():
            clock_rounds = arguments.rounds if arguments.clock and label == "1×8" else 0
            rows = measure(model, cluster, clock_rounds)
            console.print(table(f"{name} ({arguments.size}), batch {model.batch_size}, {label}", rows))
            ratios.append((name, label, rows))
    for name, label, rows in ratios:
        console.print(verdict(name, label, rows))


def measure(model: Model, cluster: Cluster, clock_rounds: int) -> list[Row]:
    """Plan, compile and read every method; run them in turn if asked."""
    state, batch = model.abstract_state(), model.abstract_batch()
    compiled: dict[str, Any] = {}
    for method in METHODS:
        try:
            compiled[method] = autopar.parallelize(model.train_step).compile(
                state, batch, cluster=cluster, method=method
            )
        except PlanError as error:
            print(f"{method}: {error}")
    clocks = run_in_turn(model, compiled, clock_rounds) if clock_rounds else {}
    rows = []
    for method, step in compiled.items():
        cost = step_seconds(parse_module(step.as_text()), cluster)
        plan = step.plan
        rows.append(
            Row(
                method,
                str(plan.mesh),
                plan.step_seconds,
                cost.compute_seconds,
                cost.communication_seconds,
                plan.peak_bytes,
                memory_bytes(step).total,
                clocks.get(method),
            )
        )
    return rows


def run_in_turn(model: Model, compiled: dict[str, Any], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each method; the methods take turns, so a drift of the machine hits all alike."""
    batch = model.make_batch(model.batch_size)
    states = {}
    for method, step in compiled.items():
        states[method] = jax.tree.leaves(jax.jit(model.make_state)())
        for _ in range(2):
            states[method] = advance(step, states[method], batch)
    seconds: dict[str, list[float]] = {method: [] for method in compiled}
    for _ in range(rounds):
        for method, step in compiled.items():
            started = time.perf_counter()
            states[method] = advance(step, states[method], batch)
            seconds[method].append(time.perf_counter() - started)
    return {method: statistics.median(times) for method, times in seconds.items()}


def advance(step: Any, state_leaves: list[Any], batch: Any) -> list[Any]:
    """One finished step on flat state leaves."""
    state, _ = step.run([*state_leaves, *jax.tree.leaves(batch)])
    return jax.block_until_ready(jax.tree.leaves(state))


def table(title: str, rows: list[Row]) -> Table:
    """The figures of one model on one cluster."""
    made = Table(title=title)
    columns = (
        "method",
        "mesh",
        "predicted ms",
        "HLO ms",
        "compute",
        "collectives",
        "predicted MiB",
        "XLA MiB",
        "clock ms",
    )
    for column in columns:
        made.add_column(column, justify="left" if column in ("method", "mesh") else "right")
    for row in sorted(rows, key=lambda row: row.hlo_seconds):
        milliseconds = [row.predicted_seconds, row.hlo_seconds, row.hlo_compute_seconds, row.hlo_communication_seconds]
        made.add_row(
            row.method,
            row.mesh,
            *(f"{value * 1e3:.2f}" for value in milliseconds),
            f"{row.predicted_bytes / 2**20:.1f}",
            f"{row.compiled_bytes / 2**20:.1f}",
            "" if row.clock_seconds is None else f"{row.clock_seconds * 1e3:.1f}",
        )
    return made


def verdict(name: str, label: str, rows: list[Row]) -> str:
    """``auto`` against the best hand-made method."""
    auto = next(row for row in rows if row.method == "auto")
    others = [row for row in rows if row.method != "auto"]
    best = min(others, key=lambda row: row.hlo_seconds)
    text = f"{name} {label}: auto / best hand-made ({best.method}) by HLO {auto.hlo_seconds / best.hlo_seconds:.3f}"
    if auto.clock_seconds is not None:
        timed = min(others, key=lambda row: row.clock_seconds or float("inf"))
        assert timed.clock_seconds is not None
        text += f", by the clock ({timed.method}) {auto.clock_seconds / timed.clock_seconds:.3f}"
    return text


if __name__ == "__main__":
    main()
