"""What does each schedule save, and does the planner know when it does not?

    python -m benchmarks.schedules [--clock]

One model of eight equal blocks, four hosts of one device each (described, not at hand), four microbatches.  For each link
between hosts, and each schedule alone: the fastest pipeline under it, its simulated step, what meshes idle in the mean, and
the bytes of the fullest device.  The row ``auto`` is what the planner chooses with all of them at hand: its seconds are the
least of these, and the schedule it names says which one was worth its price.

With ``--clock`` each schedule also runs on two virtual devices of this machine, in turn with the others: medians of steps beside
the simulated ones.  Stages share the machine's cores there, so a shorter bubble saves less than on devices of their own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pipeline import ROWS, residual_blocks  # sets the environment: before jax is used

# isort: split
import jax

import autopar
from autopar.cluster import Cluster, DeviceKind, Link, Platform
from autopar.inter_op.arranged import PipelineFound, PipelineTask
from autopar.inter_op.pipeline_search import search_pipelines
from autopar.inter_op.wanted import Wanted
from autopar.plan import Schedule
from autopar.schedule.orders import schedule_name
from autopar.stage_tasks import loop_of, pipeline_task

COUNT = 4
ROUNDS = 9
SCHEDULES = (
    Schedule.GPIPE,
    Schedule.ONE_F_ONE_B,
    Schedule.EAGER_ONE_F_ONE_B,
    Schedule.INTERLEAVED_ONE_F_ONE_B,
    Schedule.ZERO_BUBBLE_H1,
    Schedule.ZERO_BUBBLE_H2,
)
LINKS = {
    "fast: 10 µs, 10 GB/s": Link(1e-5, 1e10),
    "far: 2 ms, 1 GB/s": Link(2e-3, 1e9),
    "slow: 10 µs, 20 MB/s": Link(1e-5, 2e7),
}


def four_hosts(link: Link) -> Cluster:
    """Devices of 50 GFLOP/s."""
    device = DeviceKind("50 GFLOP/s", Platform.CPU, {"float32": 5e10}, 2**34, 2e10)
    return Cluster("four hosts", 4, 1, device, Link(1e-6, 1e10), link)


def task_on(cluster: Cluster) -> Callable[[int], PipelineTask]:
    """The step in so many microbatches, to be planned for a cluster."""
    model = residual_blocks()

    def task(count: int) -> PipelineTask:
        step = autopar.parallelize(stages=[[0], [1], [2], [3]], num_microbatches=count, cluster=cluster)(
            model.train_step
        )
        subject, _, _ = step.records(model.abstract_state(), model.abstract_batch())
        return pipeline_task(subject, loop_of(subject), cluster, step.demands, lambda message: None)

    known: dict[int, PipelineTask] = {}
    return lambda count: known.setdefault(count, known.get(count) or task(count))


def row_of(name: str, found: PipelineFound | None) -> list[str]:
    """A line of the table."""
    if found is None:
        return [name, "", "", "", ""]
    idle = statistics.mean(found.simulation.idle_fractions)
    stages, meshes = len(found.arrangement.devices), len(set(found.arrangement.devices))
    plan = f"{schedule_name(found.arrangement.schedule)}, {stages} stages on {meshes}"
    peak = max(found.simulation.peak_bytes) / 2**20
    return [name, plan, f"{found.step_seconds * 1e3:.1f}", f"{idle:.0%}", f"{peak:.1f}"]


def simulated(console: Console) -> None:
    """A table for each link."""
    for name, link in LINKS.items():
        table = Table(
            "schedule", "plan", "ms a step", "idle", "MiB", title=f"{name}, {COUNT} microbatches of {ROWS // COUNT}"
        )
        task = task_on(four_hosts(link))
        for schedule in SCHEDULES:
            table.add_row(*row_of(schedule.value, search_pipelines(task, [COUNT], Wanted(schedule=schedule)).best))
        table.add_row(*row_of("auto", search_pipelines(task, [COUNT], Wanted()).best))
        console.print(table)


def by_the_clock(console: Console) -> None:
    """Steps of all schedules in turn on two devices of this machine."""
    model, steps = residual_blocks(), {}
    for schedule in SCHEDULES:
        stages: Any = 4 if schedule is Schedule.INTERLEAVED_ONE_F_ONE_B else 2
        step = autopar.parallelize(model.train_step, stages=stages, schedule=schedule, num_microbatches=COUNT)
        state = step.init(model.make_state, model.abstract_batch())
        steps[schedule] = step, state
    batch, seconds = model.make_batch(model.batch_size), {schedule: list[float]() for schedule in SCHEDULES}
    for _ in range(ROUNDS):
        for schedule, (step, state) in steps.items():
            started = time.perf_counter()
            steps[schedule] = step, jax.block_until_ready(step(state, batch))[0]
            seconds[schedule].append(time.perf_counter() - started)
    table = Table("schedule", "simulated ms", "measured ms", title=f"two devices of this machine, {COUNT} microbatches")
    for schedule, (step, _) in steps.items():
        measured = statistics.median(seconds[schedule][1:])
        table.add_row(schedule.value, f"{step.last.plan.step_seconds * 1e3:.1f}", f"{measured * 1e3:.1f}")
    console.print(table)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--clock", action="store_true", help="run the schedules on this machine as well")
    console = Console(width=120)
    if parser.parse_args().clock:
        by_the_clock(console)
    simulated(console)


if __name__ == "__main__":
    main()
