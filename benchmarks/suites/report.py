"""Rows as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from autopar.wording import bytes_text
from benchmarks.suites.machine import Calibration
from benchmarks.suites.published import Suite
from benchmarks.suites.rows import Row, figure_text

COLUMNS = ("model", "GPUs", "asked", "plan", "PFLOP/s", "memory", "planning, core s", "published", "ratio")
DIGITS = {Suite.GPT: 2, Suite.MOE: 2, Suite.WIDE_RESNET: 3}
NAMES = {Suite.GPT: "GPT", Suite.MOE: "MoE", Suite.WIDE_RESNET: "Wide-ResNet"}


def line_of(row: Row) -> tuple[str, ...]:
    """One line of the table."""
    digits = DIGITS[row.suite]
    return (
        f"{NAMES[row.suite]} {row.size}",
        str(row.num_devices),
        row.asked.value,
        row.said,
        "" if row.petaflops is None else f"{row.petaflops:.{digits + 1}f}",
        "" if row.needed_bytes is None else bytes_text(row.needed_bytes),
        f"{row.core_seconds:.0f}",
        figure_text(row.published, digits),
        "" if row.ratio is None else f"{row.ratio:.2f}",
    )


def calibration_text(found: Calibration) -> str:
    """How the speed of the devices was found."""
    step = found.measured
    return (
        f"V100s do their work at {found.speed:.3f} of what the preset says. Found from one measured step alone: GPT {step.size}, "
        f"batch {step.batch_size}, {step.num_microbatches} microbatches, data {step.data} · tensor {step.tensor} · pipeline "
        f"{step.pipeline}, {step.seconds:.3f} s; simulated {found.preset_seconds:.3f} s by the preset, {found.seconds:.3f} s so."
    )


def print_table(rows: Sequence[Row], console: Console, title: str) -> None:
    """All rows."""
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column)
    for row in rows:
        table.add_row(*line_of(row))
    console.print(table)
