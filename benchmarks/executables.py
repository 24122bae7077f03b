"""Is every executable of a pipeline predicted as the machine works?  Predicted seconds against processor time, part by part.

    python -m benchmarks.executables [--profile auto|measure|none|FILE] [--calls 9]

A prediction holds while all devices of the machine work: they share its cores.  So an executable on d of D devices that keeps
the processor busy for c seconds, all threads together, is measured as

    seconds = c / d · D / cores

which other programs on the machine disturb less than they do the clock.  What it leaves out is waiting: executables of several
devices wait at collectives.  The median of several calls counts, whose results are dropped as a step drops them.

Then the plans of :mod:`benchmarks.pipeline`: seconds of a step as predicted, and as simulated from these measured executables
on the same machine.  Tau and regret are as in :mod:`benchmarks.ranking`, the simulated seconds taken for the clock.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.pipeline import (  # sets the devices, before JAX is there
    APART,
    Builder,
    Built,
    Subject,
    points,
    residual_blocks,
    typical,
)

# isort: split
from rich.console import Console
from rich.table import Table

from autopar.cluster import Cluster
from autopar.cost_model.pipeline import ExecutableCost, machine_of, transfer_load
from autopar.cost_model.simulate import Work, simulate
from autopar.profile_file import machine_cores
from autopar.runtime.pipeline import Key
from benchmarks.ranking import priced, tau_text, verdict

WANTED = 0.25


@dataclass(frozen=True)
class Row:
    """One executable: its price, and the seconds measured."""

    key: Key
    cost: ExecutableCost
    measured_seconds: float

    def __str__(self) -> str:
        stage, part, segment = self.key
        return f"{stage} {part.value} {segment}"

    @property
    def ratio(self) -> float:
        """Predicted / measured."""
        return self.cost.seconds / self.measured_seconds


def rows(built: Built, cluster: Cluster, calls: int) -> Iterator[Row]:
    """The executables of a plan."""
    for (stage, part, segment), executable in built.executor.executables.items():
        call = typical(Subject(executable).timed, calls)
        share = cluster.num_devices / len(APART[stage]) / machine_cores()
        cost = built.found.costs[stage].executables[part, segment]
        yield Row((stage, part, segment), cost, call.processor_seconds * share)


def table(title: str, found: Sequence[Row]) -> Table:
    """The executables of one plan."""
    made = Table(title=title)
    made.add_column("stage, executable")
    for column in (
        "measured ms",
        "predicted ms",
        "compute",
        "collectives",
        "new memory",
        "call",
        "predicted / measured",
    ):
        made.add_column(column, justify="right")
    for row in found:
        cost = row.cost
        parts = (cost.compute_seconds, cost.communication_seconds, cost.allocation_seconds, cost.call_seconds)
        figures = [f"{seconds * 1e3:.2f}" for seconds in (row.measured_seconds, cost.seconds, *parts)]
        made.add_row(str(row), *figures, f"{row.ratio:.2f}")
    return made


def simulated_seconds(built: Built, found: Sequence[Row], cluster: Cluster) -> float:
    """A step of a plan whose executables take what was measured."""
    seconds = {row.key: row.measured_seconds for row in found}
    pipeline, transfers = built.found.pipeline, built.found.transfers
    work = Work(
        lambda task: seconds[task.stage, task.part, task.segment],
        lambda number: transfer_load(transfers[number], cluster),
    )
    return simulate(pipeline.lists.lists, work, machine_of(pipeline, cluster)).step_seconds


def steps_table(steps: Mapping[str, tuple[float, float]]) -> Table:
    """Seconds of steps, predicted and simulated, quickest first."""
    made = Table(title="steps")
    for column in ("plan", "simulated ms", "predicted ms", "predicted / simulated"):
        made.add_column(column, justify="left" if column == "plan" else "right")
    for name, (predicted, simulated) in sorted(steps.items(), key=lambda one: one[1][1]):
        made.add_row(name, f"{simulated * 1e3:.2f}", f"{predicted * 1e3:.2f}", f"{predicted / simulated:.2f}")
    return made


def main() -> None:
    """Print a table per plan, how far off executables are, and how well plans are ranked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="auto", help="auto (measure if there is none), measure, none, or a file")
    parser.add_argument("--calls", type=int, default=9)
    arguments = parser.parse_args()
    console = Console(width=130)
    cluster = priced(arguments.profile, True)
    builder = Builder(residual_blocks(), cluster)
    by_part: dict[str, list[float]] = {}
    steps: dict[str, tuple[float, float]] = {}
    known: dict[Hashable, list[Row]] = {}
    for point in points():
        built = builder.build(point)
        same = (point.blocks, point.count)  # schedules share executables
        if same not in known:
            known[same] = list(rows(built, cluster, arguments.calls))
            console.print(table(str(point), known[same]))
            for row in known[same]:
                by_part.setdefault(row.key[1].value, []).append(abs(math.log(row.ratio)))
        steps[str(point)] = built.found.step_seconds, simulated_seconds(built, known[same], cluster)
    console.print(steps_table(steps))
    for part, errors in by_part.items():
        console.print(f"{part}: {_errors(errors)}")
    console.print(f"steps: {_errors([abs(math.log(said / clock)) for said, clock in steps.values()])}")
    ranked = verdict(*zip(*steps.values(), strict=True))
    console.print(f"{ranked.pairs} pairs of steps: tau {tau_text(ranked.tau)}, regret {ranked.regret:.3f}")
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    console.print(f"{machine_cores()} cores, load {load}")


def _errors(logarithms: Sequence[float]) -> str:
    within = sum(error <= math.log1p(WANTED) for error in logarithms)
    off = math.expm1(statistics.median(logarithms))
    return f"median off by {off:.0%}, {within} of {len(logarithms)} within {WANTED:.0%}"


if __name__ == "__main__":
    main()
