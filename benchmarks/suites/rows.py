"""A line of the table, kept in a file of JSON lines: runs take hours, and what was found is put together from several."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from autopar.plan import Plan
from benchmarks.suites.pricing import Outcome
from benchmarks.suites.published import Asked, Figure, Missing, Suite


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the simulator says of a kind of plan for a cell, and what was measured with that kind.

    ``said`` is the plan in words, or why there is none; ``petaflops`` is FLOP/s of all devices together, in 10¹⁵.
    """

    suite: Suite
    size: str
    num_devices: int
    asked: Asked
    said: str
    petaflops: float | None
    needed_bytes: int | None
    core_seconds: float
    published: Figure

    @property
    def ratio(self) -> float | None:
        """To what was published; None where one of both is missing."""
        rate, published = self.petaflops, self.published
        return rate / published if rate is not None and isinstance(published, float) and published else None


def row_of(outcome: Outcome) -> Row:
    """What is kept of an outcome."""
    cell = outcome.cell
    known = outcome.needed_bytes == outcome.needed_bytes  # a number
    return Row(
        cell.suite,
        cell.size,
        cell.num_devices,
        outcome.asked,
        outcome.refusal if outcome.plan is None else said_of(outcome.plan),
        outcome.petaflops,
        int(outcome.needed_bytes) if known else None,
        outcome.core_seconds,
        cell.measured.of(outcome.asked),
    )


def said_of(plan: Plan) -> str:
    """Stages, meshes, microbatches and schedule."""
    count = f"{plan.num_microbatches} microbatch" + "es" * (plan.num_microbatches > 1)
    if not plan.is_pipeline:
        return f"{plan.mesh}, {count}"
    meshes: list[str] = []
    for stage in plan.stages:
        meshes.append("×".join(map(str, stage.mesh.axis_sizes)))
    runs = [_stages(meshes.count(mesh), mesh) for mesh in dict.fromkeys(meshes)]
    return f"{' + '.join(runs)}, {count}, {plan.schedule.value}"


def _stages(count: int, mesh: str) -> str:
    return f"{count} stage{'s' * (count > 1)} on {mesh}"


def kept(path: Path) -> list[Row]:
    """The rows of a file, the last of each kind of plan for a cell, in the order of the suites; none if there is no file.

    Raises ``msgspec.ValidationError`` where a line is no row.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = (msgspec.json.decode(line, type=Row) for line in lines)
    return in_order({(row.suite, row.num_devices, row.asked): row for row in rows}.values())


def keep(row: Row, path: Path) -> None:
    """Add a line to a file."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def in_order(rows: Iterable[Row]) -> list[Row]:
    """By suite, number of devices, and kind of plan."""
    suites, kinds = list(Suite), list(Asked)
    return sorted(rows, key=lambda row: (suites.index(row.suite), row.num_devices, kinds.index(row.asked)))


def figure_text(figure: Figure, digits: int) -> str:
    """A published throughput."""
    return figure.value if isinstance(figure, Missing) else f"{figure:.{digits}f}"
