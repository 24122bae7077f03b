"""How much of what a pipeline sends is hidden behind its work, and does the simulator know?

    python -m benchmarks.hidden [--model "gpt 14M"] [--mbit 200] [--steps 6]        (as root, on Linux with iproute2)

A plan in four stages, one on each of four emulated hosts (:mod:`benchmarks.netns`), runs on slow links and on links that are
fifty times as fast.  Let T be the measured seconds of a step, S the simulated ones, and W the seconds that the bytes that leave
all cards in a step take on a slow link, one after the other.  Links are slow and fast in turns.  On the slow links

    hidden share, measured  = 1 − (T_slow − T_fast) / W             simulated  = 1 − (S_slow − S_fast) / W

Prints a row for every schedule; wanted are shares that differ by 10 points at most.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.cluster import Cluster
from benchmarks.cluster import WARM_STEPS
from benchmarks.netns import Hosts, why_not
from benchmarks.netns.cases import CASES, model_of
from benchmarks.netns.inside import add_arguments, rows_from_inside, say_rows
from benchmarks.netns.testbed import DEVICES, HOSTS, Figures, described, set_rates, testbed

STAGES = [[DEVICES * host + device for device in range(DEVICES)] for host in range(HOSTS)]
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b")
MICROBATCHES = 4
FAST = 50
"""So many times as fast are the fast links."""
TURNS = 5
"""So often links are slow and then fast: a machine's speed drifts by more than what is looked for."""
WANTED_POINTS = 10.0


@dataclass(frozen=True)
class Row:
    """Seconds of a step on slow and on fast links, and of everything that is sent, one after the other, on slow ones."""

    schedule: str
    slow_seconds: float
    fast_seconds: float
    simulated_slow_seconds: float
    simulated_fast_seconds: float
    link_seconds: float

    @property
    def measured_share(self) -> float:
        """Of the links' seconds, what does not lengthen the step."""
        return 1 - (self.slow_seconds - self.fast_seconds) / self.link_seconds

    @property
    def simulated_share(self) -> float:
        """The same by the simulator."""
        return 1 - (self.simulated_slow_seconds - self.simulated_fast_seconds) / self.link_seconds


def drive(hosts: Hosts, name: str, mbit: int, figures: Figures, steps: int) -> list[Row]:
    """From a process on the first host."""
    import autopar

    model = model_of(name)
    found = Cluster.ray("auto", devices_per_host=DEVICES)
    slow, fast = (described(found, figures, rate) for rate in (mbit, FAST * mbit))
    rows = []
    for schedule in SCHEDULES:
        options: dict[str, Any] = {"stages": STAGES, "num_microbatches": MICROBATCHES, "schedule": schedule}
        step = autopar.parallelize(model.train_step, cluster=slow, **options)
        state, batch = step.init(model.make_state, model.abstract_batch()), model.make_batch(model.batch_size)
        times: dict[int, list[float]] = {mbit: [], FAST * mbit: []}
        link_bytes = 0
        for turn, rate in enumerate((mbit, FAST * mbit) * TURNS):
            set_rates(hosts, rate)
            for number in range(-WARM_STEPS, steps):
                if number == 0:
                    before = hosts.sent_bytes()
                began = time.perf_counter()
                state, metrics = step(state, batch)
                float(metrics["loss"])
                if number >= 0:
                    times[rate].append(time.perf_counter() - began)
            if turn == 0:
                link_bytes = hosts.sent_bytes() - before
        seconds = {rate: statistics.median(found) for rate, found in times.items()}
        subject, plan, _ = step.last_records()
        simulated = [step.account(subject, plan, on).simulation.step_seconds for on in (slow, fast)]
        link_seconds = 8 * link_bytes / steps / (mbit * 1e6)
        rows.append(Row(schedule, seconds[mbit], seconds[FAST * mbit], *simulated, link_seconds))
        print(rows[-1], flush=True)
    found.close()
    return rows


def table(title: str, rows: Sequence[Row]) -> Table:
    """A row for every schedule."""
    made = Table(title=title)
    made.add_column("schedule")
    for column in ("slow ms", "fast ms", "simulated", "simulated", "links ms", "hidden", "simulated", "points apart"):
        made.add_column(column, justify="right")
    for row in rows:
        times = (row.slow_seconds, row.fast_seconds, row.simulated_slow_seconds, row.simulated_fast_seconds)
        apart = 100 * (row.measured_share - row.simulated_share)
        made.add_row(
            row.schedule,
            *(f"{one * 1e3:.0f}" for one in (*times, row.link_seconds)),
            f"{row.measured_share:.0%}",
            f"{row.simulated_share:.0%}",
            f"{apart:+.0f}{'' if abs(apart) <= WANTED_POINTS else ' !'}",
        )
    return made


def main() -> None:
    """Bring hosts up, measure links, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt 14M", choices=list(CASES))
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--steps", type=int, default=6, help="of each turn")
    add_arguments(parser)
    told = parser.parse_args()
    rates = told.mbit, FAST * told.mbit
    if told.inside is not None:
        figures = Figures(told.figures, rates)
        say_rows(told.inside, lambda hosts: drive(hosts, told.model, told.mbit, figures, told.steps))
        return
    if reason := why_not():
        raise SystemExit(f"no hosts can be emulated here: {reason}")
    with testbed(told.mbit) as nodes, tempfile.TemporaryDirectory() as folder:
        figures = Figures((told.figures or Path(folder)).resolve(), rates)
        figures.measure(nodes, "--quick")  # no collective of these stages spans hosts
        options = ["--model", told.model, "--steps", str(told.steps), "--mbit", str(told.mbit)]
        rows = [Row(**row) for row in rows_from_inside(nodes, figures, "benchmarks.hidden", options)]
    title = f"{told.model}, 4 stages on 4 hosts, {MICROBATCHES} microbatches, {told.mbit} Mbit/s"
    Console(width=130).print(table(title, rows))


if __name__ == "__main__":
    main()
