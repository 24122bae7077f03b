"""Outcomes as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from autopar.plan import Plan
from autopar.wording import bytes_text
from benchmarks.suites.machine import Calibration
from benchmarks.suites.pricing import Outcome
from benchmarks.suites.published import Figure, Missing, Suite

COLUMNS = ("model", "GPUs", "asked", "plan", "PFLOP/s", "memory", "planning, core s", "published", "ratio")
DIGITS = {Suite.GPT: 2, Suite.MOE: 2, Suite.WIDE_RESNET: 3}
NAMES = {Suite.GPT: "GPT", Suite.MOE: "MoE", Suite.WIDE_RESNET: "Wide-ResNet"}


def said_of(plan: Plan) -> str:
    """Stages, meshes, microbatches and schedule."""
    count = f"{plan.num_microbatches} microbatch" + "es" * (plan.num_microbatches > 1)
    if not plan.is_pipeline:
        return f"{plan.mesh}, {count}"
    meshes: list[str] = []
    for stage in plan.stages:
        meshes.append("×".join(map(str, stage.mesh.axis_sizes)))
    runs = [f"{meshes.count(mesh)} stages on {mesh}" for mesh in dict.fromkeys(meshes)]
    return f"{' + '.join(runs)}, {count}, {plan.schedule.value}"


def row_of(outcome: Outcome) -> tuple[str, ...]:
    """One line of the table."""
    cell, digits = outcome.cell, DIGITS[outcome.cell.suite]
    plan = outcome.refusal if outcome.plan is None else said_of(outcome.plan)
    known = outcome.needed_bytes == outcome.needed_bytes  # a number
    return (
        f"{NAMES[cell.suite]} {cell.size}",
        str(cell.num_devices),
        outcome.asked.value,
        plan,
        "" if outcome.petaflops is None else f"{outcome.petaflops:.{digits + 1}f}",
        bytes_text(int(outcome.needed_bytes)) if known else "",
        f"{outcome.core_seconds:.0f}",
        figure_text(outcome.published, digits),
        "" if outcome.ratio is None else f"{outcome.ratio:.2f}",
    )


def figure_text(figure: Figure, digits: int) -> str:
    """A published throughput."""
    return figure.value if isinstance(figure, Missing) else f"{figure:.{digits}f}"


def calibration_text(found: Calibration) -> str:
    """How the speed of the devices was found."""
    step = found.measured
    return (
        f"V100s do their work at {found.speed:.3f} of what the preset says. Found from one measured step alone: GPT {step.size}, "
        f"batch {step.batch_size}, {step.num_microbatches} microbatches, data {step.data} · tensor {step.tensor} · pipeline "
        f"{step.pipeline}, {step.seconds:.3f} s; simulated {found.preset_seconds:.3f} s by the preset, {found.seconds:.3f} s so."
    )


def print_table(outcomes: Sequence[Outcome], console: Console, title: str) -> None:
    """All outcomes."""
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column)
    for one in outcomes:
        table.add_row(*row_of(one))
    console.print(table)
