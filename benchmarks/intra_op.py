"""The integer program against experts: every model × every method × clusters, judged by the compiled HLO.

    python -m benchmarks.intra_op [--models gpt …] [--meshes 1x8 2x4 …] [--size bench] [--resume FILE] [--clock]
                                  [--profile FILE]

Clusters are hosts × devices: this machine (1x8), the same devices as two hosts with a network ten times slower than the
local link (2x4) or as four with one a hundred times slower (4x2), and eight hosts like this one (8x8, ten times slower, a
batch eight times as big), for which steps are compiled only.  ``auto`` plans on one mesh here; pipelines are
:mod:`benchmarks.pipeline`'s.  Step seconds "by HLO" are what the reader of compiled programs says (roofline of every
instruction, α-β of every collective that XLA really emitted and, with a profile, the new pages of its memory), not the
planner's own prediction, which stands beside it.

A table per model and cluster, ``auto`` over the best hand-made method that fits, and at the end of all what the ratios and
the errors of predicted memory come to.  What cannot be planned or compiled is a row that says why.  With ``--resume`` each
cell is appended to a file of JSON lines as soon as it is known, and figures that the file has are not made again.
``--clock`` also runs the steps of 1x8 on this machine, all methods of a model in turn (:mod:`benchmarks.turns`).  With
``--profile`` 1x8 is planned and priced by what was measured (``autopar profile``) in place of plain figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster, Link
from autopar.cost_model.hlo import HloModule, MemoryBytes, memory_bytes, parse_module, step_seconds
from autopar.host_memory import keep_freed_memory
from autopar.methods import HAND_MADE, IntraOp, Method
from benchmarks.models import FAMILIES, Model, build
from benchmarks.turns import clocks, run_in_turn

METHODS = ("auto", *(method.name for method in HAND_MADE))
PLANNERS: dict[str, Method] = {"auto": IntraOp(), **{method.name: method for method in HAND_MADE}}
LOCAL_DEVICES = 8
"""Devices that this machine is said to have."""
TOO_HIGH, TOO_LOW = 0.25, 0.05
"""Errors of predicted memory that are listed."""


@dataclass(frozen=True)
class Setting:
    """Hosts like this machine, or this machine divided into hosts; between hosts bytes take ``slowdown`` times as long."""

    label: str
    hosts: int
    devices_per_host: int
    slowdown: int
    batches: int = 1
    """How many times the model's own batch is taken."""
    profile: Path | None = None
    """What was measured on this machine, if it is the cluster."""

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def can_run(self) -> bool:
        """Whether this machine is the cluster."""
        return self.hosts == 1

    def cluster(self) -> Cluster:
        """The cluster, by plain figures where nothing was measured."""
        local = Cluster.local(jax.devices()[:LOCAL_DEVICES], profile=self.profile)
        if self.can_run:
            return local
        near = local.local_link
        slow = Link(
            near.latency_seconds * 2,
            near.bytes_per_second / self.slowdown,
            shared_by=self.devices_per_host,
            source=f"1/{self.slowdown} of the local link",
        )
        return replace(
            local,
            name=self.label,
            hosts=self.hosts,
            devices_per_host=self.devices_per_host,
            network_link=slow,
        )


SETTINGS = {
    setting.label: setting
    for setting in (
        Setting("1x8", 1, 8, 1),
        Setting("2x4", 2, 4, 10),
        Setting("4x2", 4, 2, 100),
        Setting("8x8", 8, 8, 10, batches=8),
    )
}


@dataclass(frozen=True)
class Cell:
    """What identifies a measurement."""

    model: str
    size: str
    setting: str
    method: str


@dataclass(frozen=True)
class Row:
    """Figures of a cell: seconds of a step, bytes on one device; ``clock_seconds`` is None where it was not run."""

    mesh: str
    predicted_seconds: float
    hlo_compute_seconds: float
    hlo_communication_seconds: float
    predicted_bytes: int
    compiled_bytes: int
    fits: bool
    made_in_seconds: float
    clock_seconds: float | None = None
    hlo_allocation_seconds: float = 0.0
    """Of memory that is new to every call, where a profile says so."""

    @property
    def hlo_seconds(self) -> float:
        """Step seconds of the compiled program."""
        return self.hlo_compute_seconds + self.hlo_communication_seconds + self.hlo_allocation_seconds

    @property
    def memory_error(self) -> float:
        """Relative error of the predicted bytes; below zero where too few were predicted."""
        return self.predicted_bytes / self.compiled_bytes - 1


@dataclass(frozen=True)
class Failure:
    """Why a cell has no figures."""

    why: str


class Results:
    """Owns what is known of cells, and the file that remembers it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.cells: dict[Cell, Row | Failure] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                known = json.loads(line)
                if "why" not in known["result"]:  # what failed is tried again
                    self.cells[Cell(**known["cell"])] = Row(**known["result"])

    def add(self, cell: Cell, result: Row | Failure) -> None:
        """Remember a cell."""
        self.cells[cell] = result
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"cell": asdict(cell), "result": asdict(result)}) + "\n")

    def rows(self, model: str, size: str, setting: str) -> dict[str, Row | Failure]:
        """The results of a table by method."""
        cells = {method: Cell(model, size, setting, method) for method in METHODS}
        return {method: self.cells[cell] for method, cell in cells.items() if cell in self.cells}


class Bench:
    """Owns one model's step with its plans, and its compiled programs, for plans of several clusters can be the same."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._step = autopar.parallelize(model.train_step)
        self._read: dict[Any, tuple[HloModule, MemoryBytes]] = {}

    def row(self, setting: Setting, method: str) -> Row:
        """Plan, compile and read one cell."""
        started = time.perf_counter()
        cluster = setting.cluster()
        module, memory = self._compiled(setting, method, cluster)
        plan = self._plan(setting, method, cluster)
        cost = step_seconds(module, cluster, memory=memory)
        return Row(
            str(plan.mesh),
            plan.step_seconds,
            cost.compute_seconds,
            cost.communication_seconds,
            plan.peak_bytes,
            memory.total,
            memory.total <= cluster.per_device_memory_bytes,
            time.perf_counter() - started,
            hlo_allocation_seconds=cost.allocation_seconds,
        )

    def executable(self, setting: Setting, method: str) -> Any:
        """The compiled step, to be run."""
        return self._step.compile(*self._shapes(setting), cluster=setting.cluster(), method=PLANNERS[method])

    def _plan(self, setting: Setting, method: str, cluster: Cluster) -> autopar.Plan:
        return self._step.plan(*self._shapes(setting), cluster=cluster, method=PLANNERS[method])

    def _compiled(self, setting: Setting, method: str, cluster: Cluster) -> tuple[HloModule, MemoryBytes]:
        plan = self._plan(setting, method, cluster)
        known = repr((plan.fingerprint, plan.num_microbatches, [vars(stage) for stage in plan.stages]))
        if known not in self._read:
            compiled = self._step.compile(*self._shapes(setting), cluster=cluster, method=PLANNERS[method])
            self._read[known] = parse_module(compiled.as_text()), memory_bytes(compiled)
        return self._read[known]

    def _shapes(self, setting: Setting) -> tuple[Any, Any]:
        return self.model.abstract_state(), self.model.abstract_batch(self.model.batch_size * setting.batches)


def main() -> None:
    """Print a table per model and cluster, the ratios, and the summary."""
    arguments = parsed_arguments()
    keep_freed_memory()  # as where steps run, and before JAX starts
    settings = [SETTINGS[label] for label in arguments.meshes]
    settings = [replace(one, profile=arguments.profile) if one.can_run else one for one in settings]
    devices = max(LOCAL_DEVICES, *(setting.num_devices for setting in settings))
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")
    console = Console(width=165)
    results = Results(arguments.resume)
    tables: dict[tuple[str, str], dict[str, Row | Failure]] = {}
    for name in arguments.models:
        started = time.perf_counter()
        bench = Bench(build(name, arguments.size))
        for setting in settings:
            fill(results, bench, Cell(name, arguments.size, setting.label, ""), setting)
            rows = results.rows(name, arguments.size, setting.label)
            if arguments.clock and setting.can_run:
                rows = with_clock(rows, bench, setting, arguments.rounds)
            tables[name, setting.label] = rows
            batch = bench.model.batch_size * setting.batches
            console.print(table(f"{name} ({arguments.size}), batch {batch}, {setting.label}", rows))
            console.print(verdict(name, setting.label, rows))
        console.print(f"{name}: {time.perf_counter() - started:.0f} s\n")
    for line in summary(tables):
        console.print(line)


def parsed_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--meshes", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--size", default="bench")
    parser.add_argument("--resume", type=Path, help="a file of JSON lines that is read first and appended to")
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", type=Path, help="what `autopar profile` measured on this machine")
    return parser.parse_args()


def fill(results: Results, bench: Bench, of: Cell, setting: Setting) -> None:
    """Make the cells of a table that are not known yet."""
    for method in METHODS:
        cell = replace(of, method=method)
        if cell in results.cells:
            continue
        try:
            result: Row | Failure = bench.row(setting, method)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the other cells are wanted all the same
            result = Failure(f"{type(error).__name__}: {error}")
        results.add(cell, result)


def with_clock(rows: dict[str, Row | Failure], bench: Bench, setting: Setting, rounds: int) -> dict[str, Row | Failure]:
    """The rows with the seconds of a step on this machine."""
    compiled = {method: bench.executable(setting, method) for method, row in rows.items() if isinstance(row, Row)}
    found = clocks(run_in_turn(bench.model, compiled, rounds))
    return {
        method: replace(row, clock_seconds=found[method]) if isinstance(row, Row) else row
        for method, row in rows.items()
    }


# ----------------------------------------------------------------------------------------------------------- printing

COLUMNS = (
    "method",
    "mesh",
    "predicted ms",
    "HLO ms",
    "compute",
    "collectives",
    "new memory",
    "predicted MiB",
    "XLA MiB",
    "error",
    "clock ms",
    "made in s",
)


def table(title: str, rows: dict[str, Row | Failure]) -> Table:
    """The figures of one model on one cluster, the fastest first."""
    made = Table(title=title)
    for column in COLUMNS:
        made.add_column(column, justify="left" if column in ("method", "mesh") else "right")
    for method, row in sorted(measured(rows).items(), key=lambda item: item[1].hlo_seconds):
        parts = [row.hlo_compute_seconds, row.hlo_communication_seconds, row.hlo_allocation_seconds]
        milliseconds = [row.predicted_seconds, row.hlo_seconds, *parts]
        made.add_row(
            method,
            row.mesh,
            *(f"{value * 1e3:.2f}" for value in milliseconds),
            f"{row.predicted_bytes / 2**20:.1f}",
            f"{row.compiled_bytes / 2**20:.1f}" + ("" if row.fits else " (too much)"),
            f"{row.memory_error:+.1%}",
            "" if row.clock_seconds is None else f"{row.clock_seconds * 1e3:.1f}",
            f"{row.made_in_seconds:.1f}",
        )
    for method, failure in rows.items():
        if isinstance(failure, Failure):
            made.add_row(method, failure.why)
    return made


def measured(rows: dict[str, Row | Failure]) -> dict[str, Row]:
    """The rows with figures."""
    return {method: row for method, row in rows.items() if isinstance(row, Row)}


def opponents(rows: dict[str, Row | Failure]) -> dict[str, Row]:
    """The hand-made methods that fit."""
    return {method: row for method, row in measured(rows).items() if method != "auto" and row.fits}


def ratio(rows: dict[str, Row | Failure]) -> float | None:
    """``auto`` over the best hand-made method that fits, by HLO; None where one of both is missing."""
    auto, others = measured(rows).get("auto"), opponents(rows)
    return auto.hlo_seconds / min(row.hlo_seconds for row in others.values()) if auto and others else None


def verdict(name: str, label: str, rows: dict[str, Row | Failure]) -> str:
    """``auto`` against the best hand-made method, in words."""
    found, others = ratio(rows), opponents(rows)
    if found is None:
        return f"{name} {label}: no ratio"
    best = min(others, key=lambda method: others[method].hlo_seconds)
    text = f"{name} {label}: auto / best hand-made ({best}) by HLO {found:.3f}"
    clocks = {method: row.clock_seconds for method, row in measured(rows).items() if row.clock_seconds is not None}
    if "auto" in clocks:
        timed = min(others, key=lambda method: clocks[method])
        text += f", by the clock ({timed}) {clocks['auto'] / clocks[timed]:.3f}"
    return text


def summary(tables: dict[tuple[str, str], dict[str, Row | Failure]]) -> Iterable[str]:
    """What all ratios and all errors of memory come to."""
    ratios = {key: found for key, rows in tables.items() if (found := ratio(rows)) is not None}
    if ratios:
        worst = max(ratios, key=lambda key: ratios[key])
        kept = sum(found <= 1.0 for found in ratios.values())
        yield (
            f"auto / best hand-made by HLO: worst {ratios[worst]:.3f} ({' '.join(worst)}), median "
            f"{statistics.median(ratios.values()):.3f}; {kept} of {len(ratios)} are at most 1.00"
        )
        yield from (f"  above 1.00: {' '.join(key)} {found:.4f}" for key, found in ratios.items() if found > 1.0)
    errors = {
        (*key, method): row.memory_error for key, rows in tables.items() for method, row in measured(rows).items()
    }
    if errors:
        yield memory_line(list(errors.values()))
        yield from (
            f"  {' '.join(key)} {error:+.1%}"
            for key, error in sorted(errors.items(), key=lambda item: item[1])
            if not -TOO_LOW <= error <= TOO_HIGH
        )
    failures = sum(isinstance(row, Failure) for rows in tables.values() for row in rows.values())
    yield f"cells: {len(errors)} measured, {failures} failed"


def memory_line(errors: Sequence[float]) -> str:
    """Median and extremes of the errors of predicted memory."""
    return (
        f"predicted memory against XLA's: median error {statistics.median(map(abs, errors)):.1%}, from {min(errors):+.1%} "
        f"to {max(errors):+.1%}; beyond −{TOO_LOW:.0%} … +{TOO_HIGH:.0%}:"
    )


if __name__ == "__main__":
    main()
