"""What a plan of several stages says: a row for each stage, and what is predicted of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.explain.words import seconds_text
from autopar.wording import bytes_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from autopar.cluster import Mesh
    from autopar.plan import Plan


@dataclass(frozen=True)
class StageRow:
    """One stage: its devices, the mesh that they form, and the axes that cut anything there."""

    devices: tuple[int, ...]
    mesh: Mesh
    axes_in_use: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class PipelineExplanation:
    """How a step runs as a pipeline.  Made by :func:`autopar.explain`; ``print`` shows it.

    ``measured_seconds`` is the median of the steps that ran, if any did; ``bytes_per_device`` is of the fullest device;
    ``notes`` say what else is to be known.
    """

    function: str
    cluster: str
    method: str
    schedule: str
    num_microbatches: int
    stages: tuple[StageRow, ...]
    step_seconds: float
    measured_seconds: float | None
    bytes_per_device: int
    notes: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        count = f"{self.num_microbatches} microbatch" + ("es" if self.num_microbatches > 1 else "")
        yield f"{self.function} · {self.method} · {len(self.stages)} stages, {self.schedule} over {count} · {self.cluster}"
        measured = "" if self.measured_seconds is None else f", measured {seconds_text(self.measured_seconds)}"
        yield (
            f"A step takes {seconds_text(self.step_seconds)} (predicted{measured}), the fullest device holds "
            f"{bytes_text(self.bytes_per_device)}."
        )
        table = Table("stage", "devices", "mesh", "axes in use")
        for number, row in enumerate(self.stages):
            devices = ", ".join(map(str, row.devices))
            table.add_row(str(number + 1), devices, str(row.mesh), ", ".join(row.axes_in_use) or "none")
        yield table
        yield from self.notes

    def __str__(self) -> str:
        from autopar.explain.render import as_text

        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from autopar.explain.render import as_html

        return as_html(self)


def pipeline_explanation(
    plan: Plan, function: str, measured_seconds: float | None, coupling: str = ""
) -> PipelineExplanation:
    """The explanation of a plan of several stages; ``coupling`` says why the batch was not cut."""
    rows = []
    for stage in plan.stages:
        used = {axis for layout in stage.homes.values() for axis in layout.axes}
        used |= {axis for strategy in stage.strategies.values() for axes in strategy.factors for axis in axes}
        rows.append(StageRow(stage.devices, stage.mesh, tuple(n for n in stage.mesh.axis_names if n in used)))
    notes = (f"There is one microbatch, because {coupling}.",) if coupling else ()
    return PipelineExplanation(
        function=function,
        cluster=plan.cluster,
        method=plan.method,
        schedule=plan.schedule.value,
        num_microbatches=plan.num_microbatches,
        stages=tuple(rows),
        step_seconds=plan.step_seconds,
        measured_seconds=measured_seconds,
        bytes_per_device=plan.peak_bytes,
        notes=notes,
    )
