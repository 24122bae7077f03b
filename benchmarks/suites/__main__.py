"""Print the table of the suites, each row as it is known, and draw it (see :mod:`benchmarks.suites`)."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

from benchmarks.suites.machine import HOST, calibrated, cluster_of
from benchmarks.suites.picture import picture
from benchmarks.suites.pricing import outcome
from benchmarks.suites.published import CELLS, Asked, Suite
from benchmarks.suites.report import calibration_text, line_of, print_table
from benchmarks.suites.rows import keep, kept, row_of


def main() -> None:
    """Plan what was asked for, in the order of the suites."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites", description=__doc__)
    sizes = sorted({num_devices for _, num_devices in CELLS})
    parser.add_argument("--suites", nargs="+", type=Suite, choices=list(Suite), default=list(Suite), metavar="SUITE")
    parser.add_argument("--gpus", nargs="+", type=int, choices=sizes, default=sizes)
    parser.add_argument("--plans", nargs="+", type=Asked, choices=list(Asked), default=[Asked.AUTO])
    parser.add_argument(
        "--speed", type=float, help="of V100s as a share of the preset's; else found from the measured step"
    )
    parser.add_argument("--rows", type=Path, help="a file of JSON lines to add the rows to; the table is of all in it")
    parser.add_argument("--picture", type=Path, help="an SVG file to draw the rows into")
    parser.add_argument("--progress", action="store_true", help="say what the planner does")
    arguments = parser.parse_args()
    console = Console(width=170)
    speed, said = arguments.speed, f"V100s do their work at {arguments.speed} of what the preset says, as was asked."
    if speed is None:
        found = calibrated()
        speed, said = found.speed, calibration_text(found)
    console.print(said)

    def report(text: str) -> None:
        if arguments.progress:
            console.print(f"  {time.process_time():.0f} s: {text}")

    rows = []
    for suite in arguments.suites:
        for num_devices in arguments.gpus:
            for asked in arguments.plans:
                row = row_of(outcome(CELLS[suite, num_devices], asked, cluster_of(num_devices, speed), report))
                rows.append(row)
                console.print(" | ".join(line_of(row)))
                if arguments.rows is not None:
                    keep(row, arguments.rows)
    shown = rows if arguments.rows is None else kept(arguments.rows)
    print_table(shown, console, f"The suites of the Alpa paper on {HOST}")
    if arguments.picture is not None:
        arguments.picture.write_text(picture(shown), encoding="utf-8")


if __name__ == "__main__":
    main()
