"""Is every executable of a pipeline predicted as the machine works?  Predicted seconds against processor time, part by part.

    python -m benchmarks.executables [--profile auto|measure|none|FILE] [--calls 9]

A prediction holds while all devices of the machine work: they share its cores.  So an executable on d of D devices that keeps
the processor busy for c seconds, all threads together, is measured as

    seconds = c / d · D / cores

which other programs on the machine hardly disturb, as they do the clock.  What it leaves out is waiting: executables of several
devices wait at collectives.  The median of several calls counts, whose results are dropped as a step drops them.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.pipeline import Builder, Point, Subject, residual_blocks  # sets the devices, before JAX is there

# isort: split
from rich.console import Console
from rich.table import Table

from autopar.cluster import Cluster
from autopar.cost_model.pipeline import ExecutableCost
from autopar.profile_file import machine_cores
from benchmarks.ranking import priced

WANTED = 0.25
POINTS = (
    Point(4, 4),
    Point(2, 2),
    Point(6, 8),
    Point(4, 8, devices=((0, 1), (2, 3))),
    Point(4, 4, devices=((0,), (1, 2))),
)


@dataclass(frozen=True)
class Row:
    """One executable: its price, and the seconds measured."""

    name: str
    cost: ExecutableCost
    measured_seconds: float

    @property
    def ratio(self) -> float:
        """Predicted / measured."""
        return self.cost.seconds / self.measured_seconds


def rows(builder: Builder, point: Point, cluster: Cluster, calls: int) -> Iterator[Row]:
    """The executables of a plan."""
    built = builder.build(point)
    for (stage, part, segment), executable in built.executor.executables.items():
        call = Subject(executable).timed(calls)
        share = cluster.num_devices / len(point.devices[stage]) / machine_cores()
        cost = built.found.costs[stage].executables[part, segment]
        yield Row(f"{stage} {part.value} {segment}", cost, call.processor_seconds * share)


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
        made.add_row(row.name, *figures, f"{row.ratio:.2f}")
    return made


def main() -> None:
    """Print a table per plan, and how far off executables are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="auto", help="auto (measure if there is none), measure, none, or a file")
    parser.add_argument("--calls", type=int, default=9)
    arguments = parser.parse_args()
    console = Console(width=130)
    cluster = priced(arguments.profile, True)
    builder = Builder(residual_blocks(), cluster)
    everything: dict[str, list[float]] = {}
    for point in POINTS:
        found = list(rows(builder, point, cluster, arguments.calls))
        console.print(table(str(point), found))
        for row in found:
            everything.setdefault(row.name.split()[1], []).append(abs(math.log(row.ratio)))
    for part, errors in everything.items():
        within = sum(error <= math.log1p(WANTED) for error in errors)
        off = math.expm1(statistics.median(errors))
        console.print(f"{part}: median off by {off:.0%}, {within} of {len(errors)} within {WANTED:.0%}")
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    console.print(f"{machine_cores()} cores, load {load}")


if __name__ == "__main__":
    main()
