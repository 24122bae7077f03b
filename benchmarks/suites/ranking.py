"""Does the simulator put the systems of the paper in the order in which they were measured?

    python -m benchmarks.suites.ranking rows.jsonl

For each cell the kinds of plan whose throughput was published: Alpa's own plan, its rival, and Alpa with one kind of parallelism
only.  Of two of them whose published figures differ by more than what can be read off the plot, the simulator must say that the
same one is faster.  What ran out of memory is slower than what ran, and of two that did neither is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.suites.published import Asked, Missing, Suite
from benchmarks.suites.report import DIGITS, NAMES
from benchmarks.suites.rows import Row, figure_text, kept

READ_OFF = {Suite.GPT: 0.02, Suite.MOE: 0.02, Suite.WIDE_RESNET: 0.003}
"""PFLOP/s by which a figure of the plot may be off."""


@dataclass(frozen=True)
class Pair:
    """Two kinds of plan for a cell; ``faster`` was measured to be faster."""

    faster: Row
    slower: Row

    @property
    def is_kept(self) -> bool:
        """Whether the simulator says so too."""
        return (self.faster.petaflops or 0.0) > (self.slower.petaflops or 0.0)


def pairs(rows: Sequence[Row]) -> list[Pair]:
    """All pairs of one cell that the measurements tell apart."""
    known = [row for row in rows if row.asked is not Asked.AUTO and row.published is not Missing.NOT_SHOWN]
    found = []
    for one, other in combinations(known, 2):
        slow, fast = sorted((one, other), key=_measured)
        if _measured(fast) - _measured(slow) > READ_OFF[fast.suite]:
            found.append(Pair(fast, slow))
    return found


def _said(row: Row) -> str:
    return f"{row.asked.value} ({figure_text(row.published, DIGITS[row.suite])})"


def _measured(row: Row) -> float:
    return row.published if isinstance(row.published, float) else 0.0


def main() -> None:
    """Print a line for each cell, and what is the other way round in it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites.ranking", description=main.__doc__)
    parser.add_argument("rows", type=Path, help="what `python -m benchmarks.suites --rows` wrote")
    table = Table(title="Pairs of systems that were measured apart, in the order of the simulator")
    for column in (
        "model",
        "GPUs",
        "in order",
        "the other way round: faster when measured / in the simulator, PFLOP/s",
    ):
        table.add_column(column)
    everything: list[Pair] = []
    for (suite, num_devices), cell in groupby(kept(parser.parse_args().rows), lambda row: (row.suite, row.num_devices)):
        found = pairs(list(cell))
        turned = [f"{_said(pair.faster)} / {_said(pair.slower)}" for pair in found if not pair.is_kept]
        table.add_row(NAMES[suite], str(num_devices), f"{len(found) - len(turned)} of {len(found)}", "; ".join(turned))
        everything += found
    console = Console(width=170)
    console.print(table)
    console.print(f"{sum(pair.is_kept for pair in everything)} of {len(everything)} pairs in order.")


if __name__ == "__main__":
    main()
