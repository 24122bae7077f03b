"""What does it save that stages which send each other much share a host?

    python -m benchmarks.shared_hosts [--model moe] [--mbit 200] [--steps 10] [--turns 2]        (as root, on Linux with iproute2)

The pipeline that ``method="auto"`` takes for a model on four emulated hosts (:mod:`benchmarks.netns`), and the same stages in
order along the hosts, run alternately.  Prints for each turn the median seconds of a step, those that are foretold, and the
MiB that leave all hosts in a step, frames and acknowledgements included.  Where ``auto`` has its stages in order there is
nothing to compare.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster
from autopar.plan import Plan
from benchmarks.cluster import WARM_STEPS
from benchmarks.models import Model
from benchmarks.netns import Hosts, why_not
from benchmarks.netns.cases import CASES, model_of
from benchmarks.netns.inside import add_arguments, rows_from_inside, say_rows
from benchmarks.netns.testbed import DEVICES, HOSTS, Figures, described, set_rates, testbed


@dataclass(frozen=True)
class Row:
    """Steps of one plan in one turn; ``devices`` are those of its stages."""

    devices: str
    clock_seconds: float
    foretold_seconds: float
    sent_bytes: float
    last_loss: float


def in_order(plan: Plan) -> Plan:
    """The same stages, each on the devices behind those of the one before it."""
    ends = accumulate((len(stage.devices) for stage in plan.stages), initial=0)
    runs = (tuple(range(*run)) for run in pairwise(ends))
    return replace(
        plan, stages=tuple(replace(stage, devices=run) for stage, run in zip(plan.stages, runs, strict=True))
    )


def drive(hosts: Hosts, name: str, figures: Figures, steps: int, turns: int) -> Iterator[Row]:
    """From a process on the first host."""
    model, (mbit,) = model_of(name), figures.rates
    found = Cluster.ray("auto", devices_per_host=DEVICES)
    cluster = described(found, figures, mbit)
    set_rates(hosts, mbit)
    plan = autopar.parallelize(model.train_step, cluster=cluster).plan(model.abstract_state(), model.abstract_batch())
    if not plan.is_pipeline or in_order(plan) == plan:
        raise SystemExit(f"auto has {plan}: no stages, or all in order")
    for one in (plan, in_order(plan)) * turns:
        yield timed(hosts, model, cluster, one, steps)
    found.close()


def timed(hosts: Hosts, model: Model, cluster: Cluster, plan: Plan, steps: int) -> Row:
    """Some steps by a plan, from the first state."""
    step = autopar.parallelize(model.train_step, cluster=cluster)
    step.use(plan)
    state, batch = step.init(model.make_state, model.abstract_batch()), model.make_batch(model.batch_size)
    seconds, loss, before = [], 0.0, 0
    for number in range(WARM_STEPS + steps):
        if number == WARM_STEPS:
            before = hosts.sent_bytes()
        began = time.perf_counter()
        state, metrics = step(state, batch)
        loss = float(metrics["loss"])
        seconds.append(time.perf_counter() - began)
    sent_bytes = (hosts.sent_bytes() - before) / steps
    subject, _, _ = step.last_records() or (None, None, None)
    assert subject is not None
    foretold_seconds = step.account(subject, plan, cluster).simulation.step_seconds
    devices = " ".join(",".join(map(str, stage.devices)) for stage in plan.stages)
    return Row(devices, statistics.median(seconds[WARM_STEPS:]), foretold_seconds, sent_bytes, loss)


def table(title: str, rows: Sequence[Row]) -> Table:
    """A row for every plan and turn."""
    made = Table(title=title)
    made.add_column("devices of the stages")
    for column in ("clock ms", "foretold ms", "MiB sent", "last loss"):
        made.add_column(column, justify="right")
    for row in rows:
        seconds = (f"{one * 1e3:.0f}" for one in (row.clock_seconds, row.foretold_seconds))
        made.add_row(row.devices, *seconds, f"{row.sent_bytes / 2**20:.1f}", f"{row.last_loss:.6f}")
    return made


def main() -> None:
    """Bring hosts up, measure them and their links, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="moe", choices=list(CASES))
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2)
    add_arguments(parser)
    told = parser.parse_args()
    if told.inside is not None:
        figures = Figures(told.figures, (told.mbit,))
        say_rows(told.inside, lambda hosts: drive(hosts, told.model, figures, told.steps, told.turns))
        return
    if reason := why_not():
        raise SystemExit(f"no hosts can be emulated here: {reason}")
    with testbed(told.mbit) as nodes, tempfile.TemporaryDirectory() as folder:
        figures = Figures((told.figures or Path(folder)).resolve(), (told.mbit,))
        figures.measure(nodes)
        options = [
            "--model",
            told.model,
            "--mbit",
            str(told.mbit),
            "--steps",
            str(told.steps),
            "--turns",
            str(told.turns),
        ]
        rows = [Row(**row) for row in rows_from_inside(nodes, figures, "benchmarks.shared_hosts", options)]
    Console(width=130).print(table(f"{told.model}, {told.mbit} Mbit/s, {HOSTS} hosts of {DEVICES} devices", rows))


if __name__ == "__main__":
    main()
