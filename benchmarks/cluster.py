"""Is the plan that is chosen the quickest on a real network: quicker than experts' plans, and than plain JAX?

    python -m benchmarks.cluster [--models gpt moe …] [--mbit 1000 200] [--steps 10]        (as root, on Linux with iproute2)

Four emulated hosts (:mod:`benchmarks.netns`) with two virtual devices and a fifth of this machine's cores each (what is left
is for the driver).  ``autopar profile`` measures such a host first, while the others measure too, and ``autopar network`` the
links, which have the rate that is asked for, and collectives that span hosts.

    auto, …            :func:`autopar.parallelize` by every method, on Ray
    plain jit, data    ``jax.jit`` with ``NamedSharding`` in one ``jax.distributed`` world, nothing of ours: data parallel
    plain jit, full    the same with every leaf of the state cut over all devices

A step's seconds are those from loss to loss; the median counts.  Autopar's plans take turns, so that a machine that drifts does
so under all of them.  Of methods that find the same plan one is run.  tau and regret as in :mod:`benchmarks.ranking`, over
autopar's plans.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console
from rich.table import Table

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.plan import Plan
from benchmarks.netns import Hosts, why_not
from benchmarks.netns.cases import CASES, LARGER, model_of
from benchmarks.netns.inside import add_arguments, rows_from_inside, say_rows
from benchmarks.netns.testbed import DEVICES, HOSTS, Figures, Plain, described, set_rates, testbed
from benchmarks.ranking import tau_text, verdict

METHODS = ("auto", "data_parallel", "zero2", "zero3", "tensor_parallel", "inter_op")
PLAIN = {"data": "plain jit, data", "full": "plain jit, full"}
WARM_STEPS = 3
TURNS = 2
WORST_WANTED, PLAIN_WANTED = 1.05, 2.0


@dataclass(frozen=True)
class Row:
    """One way to run a model; ``predicted_seconds`` is nan for plain JAX."""

    model: str
    mbit: int
    name: str
    what: str
    predicted_seconds: float
    clock_seconds: float
    last_loss: float


# ------------------------------------------------------------------------------------------------------ on a host


def drive(hosts: Hosts, model_name: str, figures: Figures, steps: int) -> list[Row]:
    """Every method at every rate, from a process on the first host."""
    import autopar

    model = model_of(model_name)
    found = Cluster.ray("auto", devices_per_host=DEVICES)
    rows: list[Row] = []
    state = model.abstract_state()
    known: list[list[tuple[int, str, Plan]]] = []
    step = autopar.parallelize(model.train_step)
    for mbit in figures.rates:
        cluster = described(found, figures, mbit)
        for method in METHODS:
            started = time.monotonic()
            try:
                plan = step.plan(state, model.abstract_batch(), cluster=cluster, method=method)
            except AutoparError as error:
                print(f"{method} at {mbit} Mbit/s: {error}", flush=True)
                continue
            print(f"{mbit} Mbit/s, {time.monotonic() - started:.0f} s: {plan.summary()}", flush=True)
            alike = [same for same in known if _is_same(same[0][2], plan)]
            if not alike:
                alike.append([])
                known += alike
            alike[0].append((mbit, method, plan))
    running: list[tuple[Running, list[tuple[int, str, Plan]]]] = []
    set_rates(hosts, max(figures.rates))
    for same in known:
        mbit, _, plan = same[0]
        try:
            running.append((Running(model, described(found, figures, mbit), plan), same))
        except AutoparError as error:
            print(f"{plan.summary()}: {error}", flush=True)
    clocks = timed(running, hosts, figures.rates, steps)
    for one, same in running:
        for mbit, method, own in same:
            seconds = statistics.median(clocks[one, mbit])
            row = Row(model_name, mbit, method, _short(own), own.step_seconds, seconds, one.last_loss)
            print(row, flush=True)
            rows.append(row)
    found.close()
    return rows


def _is_same(one: Plan, other: Plan) -> bool:
    return all(
        getattr(one, field) == getattr(other, field) for field in ("stages", "num_microbatches", "schedule", "cuts")
    )


def _short(plan: Plan) -> str:
    meshes = " | ".join("×".join(map(str, stage.mesh.axis_sizes)) for stage in plan.stages)
    if not plan.is_pipeline:
        return meshes
    return f"{meshes}, N={plan.num_microbatches}, {plan.schedule.value}"


class Running:
    """Owns a state that is trained by one plan."""

    def __init__(self, model: Any, cluster: Cluster, plan: Plan) -> None:
        """Compiled, and warm."""
        import autopar

        started = time.monotonic()
        self._step = autopar.parallelize(model.train_step, cluster=cluster)
        self._step.use(plan)
        self._batch = model.make_batch(model.batch_size)
        self._state = self._step.init(model.make_state, model.abstract_batch())
        self.last_loss = 0.0
        self.seconds(WARM_STEPS)
        print(f"warm after {time.monotonic() - started:.0f} s: {_short(plan)}", flush=True)

    def seconds(self, steps: int) -> list[float]:
        """Of so many steps, from loss to loss."""
        found = []
        for _ in range(steps):
            began = time.perf_counter()
            self._state, metrics = self._step(self._state, self._batch)
            self.last_loss = float(metrics["loss"])
            found.append(time.perf_counter() - began)
        return found


def timed(
    running: Sequence[tuple[Running, Sequence[tuple[int, str, Plan]]]], hosts: Hosts, rates: Sequence[int], steps: int
) -> dict[tuple[Running, int], list[float]]:
    """Seconds of steps of each plan at each rate that it is for, :data:`TURNS` turns after each other."""
    found: dict[tuple[Running, int], list[float]] = {}
    for mbit in [rate for _ in range(TURNS) for rate in rates]:
        set_rates(hosts, mbit)
        for one, same in running:
            if any(rate == mbit for rate, _, _ in same):
                one.seconds(1)  # caches and connections are the other plans'
                times = one.seconds(-(-steps // TURNS))
                found.setdefault((one, mbit), []).extend(times)
                print(f"{mbit} Mbit/s, {_short(same[0][2])}: " + " ".join(f"{s * 1e3:.0f}" for s in times), flush=True)
    return found


# ---------------------------------------------------------------------------------------------------------- report


def table(title: str, rows: Sequence[Row]) -> Table:
    """One model at one rate, the quickest first."""
    made = Table(title=title)
    for column in ("", "meshes of the stages"):
        made.add_column(column)
    for column in ("predicted ms", "clock ms", "off by", "to the quickest"):
        made.add_column(column, justify="right")
    best = min(row.clock_seconds for row in rows)
    for row in sorted(rows, key=lambda row: row.clock_seconds):
        said = row.predicted_seconds
        cells = [f"{said * 1e3:.0f}", f"{row.clock_seconds * 1e3:.0f}", f"×{said / row.clock_seconds:.2f}"]
        if said != said:
            cells[0] = cells[2] = ""
        made.add_row(
            row.name, row.what, *cells, f"×{row.clock_seconds / best:.2f}", style="bold" if row.name == "auto" else ""
        )
    return made


def judged(rows: Sequence[Row]) -> str:
    """One line: auto against the others, and how well predictions rank."""
    if all(row.name != "auto" for row in rows):
        return f"{rows[0].model} at {rows[0].mbit} Mbit/s: auto did not run"
    clocks = {row.name: row.clock_seconds for row in rows}
    auto = clocks.pop("auto")
    best = min(clocks, key=lambda name: clocks[name])
    ours = [row for row in rows if row.name not in PLAIN.values()]
    ranks = verdict([row.predicted_seconds for row in ours], [row.clock_seconds for row in ours])
    beats = ", ".join(f"{clocks[name] / auto:.2f}× as fast as {name}" for name in PLAIN.values() if name in clocks)
    return (
        f"{rows[0].model} at {rows[0].mbit} Mbit/s: auto / best other ({best}) {auto / clocks[best]:.3f}; {beats}; "
        f"tau {tau_text(ranks.tau)}, regret {ranks.regret:.3f}"
    )


def main() -> None:
    """Bring hosts up, measure links, run everything, print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 200])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-plain", action="store_true", help="leave plain JAX out")
    parser.add_argument("--rows", type=Path, help="write all figures to this file")
    add_arguments(parser)
    told = parser.parse_args()
    if told.inside is not None:
        figures = Figures(told.figures, tuple(told.mbit))
        say_rows(told.inside, lambda hosts: drive(hosts, told.models[0], figures, told.steps))
        return
    if reason := why_not():
        print(f"no hosts can be emulated here: {reason}")
        return
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as folder:
        figures = Figures((told.figures or Path(folder)).resolve(), tuple(told.mbit))
        rows = measured(told.models, figures, told.steps, {} if told.no_plain else PLAIN)
    if told.rows is not None:
        told.rows.write_text(json.dumps([asdict(row) for row in rows]))
    groups = [
        [row for row in rows if (row.model, row.mbit) == pair]
        for pair in dict.fromkeys((r.model, r.mbit) for r in rows)
    ]
    for group in groups:
        console.print(table(f"{group[0].model}, {group[0].mbit} Mbit/s", group))
    for group in groups:
        console.print(judged(group))
    console.print(
        f"wanted: auto / best other ≤ {WORST_WANTED}; at least {PLAIN_WANTED:g}× as fast as plain jit on {', '.join(LARGER)}"
    )


def measured(models: Sequence[str], figures: Figures, steps: int, plain_ways: Mapping[str, str]) -> list[Row]:
    """All models, one after the other, on one cluster."""
    rows: list[Row] = []
    with testbed(max(figures.rates)) as nodes:
        plain = Plain(nodes)
        figures.measure(nodes)
        for name in models:
            for mbit in figures.rates:
                set_rates(nodes.hosts, mbit)
                for what, label in plain_ways.items():
                    one = plain.run(what, "--model", name, "--steps", str(WARM_STEPS + steps))
                    clock = statistics.median(one["seconds"][WARM_STEPS:])
                    rows.append(Row(name, mbit, label, f"{HOSTS * DEVICES}", float("nan"), clock, one["losses"][-1]))
                    print(rows[-1], flush=True)
            options = ["--models", name, "--steps", str(steps), "--mbit", *map(str, figures.rates)]
            rows += [Row(**row) for row in rows_from_inside(nodes, figures, "benchmarks.cluster", options)]
    return rows


if __name__ == "__main__":
    main()
