"""One accelerator: is what is foretold of its steps and its memory what the clock and the compiled programs say?

    python -m benchmarks.one_device [--cases gpt …] [--calls 3] [--steps 10] [--profile auto|none|FILE] [--out FILE]

Models of published sizes on one device of this machine.  With one device nothing is sharded: plans differ in what layers compute
again (``remat``), in the number of microbatches, and in where the optimizer's state lies between steps.  Each is planned,
compiled and run, and so is the train step under plain ``jax.jit`` that donates its state.  Steps are given out one after the
other as a training loop does, and the last is waited for; of several such calls the median counts.

Per case the plans with

    clock        seconds of a step
    by profile   predicted with what ``autopar profile`` measured here; by figures: with those of the data sheet
    memory       predicted, and argument + output − alias + temp of the compiled program
    loss         after the first steps, beside that of ``jax.jit``: relative difference

then Kendall's tau and the regret as in :mod:`benchmarks.ranking`, of the plans of each case.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster
from autopar.cost_model.hlo import memory_bytes
from autopar.errors import PlanError
from benchmarks.models import build
from benchmarks.ranking import Ranked, verdict_table

GIB = 2**30
JIT = "jax.jit"


@dataclass(frozen=True)
class Case:
    """A model, the size under which it was published, how many examples a step has, and the dtype that it computes in."""

    model: str
    size: str
    examples: int
    dtype: str = "float32"


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "gpt": Case("gpt", "125M", 16),
        "gpt_bf16": Case("gpt", "125M", 16, "bfloat16"),
        "gpt_scan": Case("gpt_scan", "350M", 16),
        "llama": Case("llama_nnx", "1B", 2, "bfloat16"),
        "moe": Case("moe", "380M", 8),
        "vit": Case("vit", "86M", 64),
        "t5": Case("t5", "220M", 16),
        "wide_resnet": Case("wide_resnet", "250M", 32),
        "unet": Case("unet", "31M", 4),
        "lstm": Case("lstm", "66M", 32),
        "long_context": Case("long_context", "1B-8k", 1, "bfloat16"),
    }
)
CHOICES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "auto": {},
        "none": {"remat": "none", "num_microbatches": 1, "offload": "none"},
        "none, 2 microbatches": {"remat": "none", "num_microbatches": 2, "offload": "none"},
        "none, 4 microbatches": {"remat": "none", "num_microbatches": 4, "offload": "none"},
        "dots": {"remat": "dots", "num_microbatches": 1, "offload": "none"},
        "full": {"remat": "full", "num_microbatches": 1, "offload": "none"},
        "full, 4 microbatches": {"remat": "full", "num_microbatches": 4, "offload": "none"},
        "state on the host": {"remat": "none", "num_microbatches": 1, "offload": "optimizer_state"},
    }
)


@dataclass(frozen=True)
class Row:
    """One plan as foretold and as it was; what was not foretold of ``jax.jit`` is None."""

    name: str
    clock_seconds: float
    loss: float
    compiled_bytes: int
    profile_seconds: float | None = None
    figures_seconds: float | None = None
    predicted_bytes: float | None = None
    made_in_seconds: float = 0.0


class Bench:
    """Owns a case's model and how it is run."""

    def __init__(self, case: Case, calls: int, steps: int) -> None:
        self.model = build(case.model, case.size, jnp.dtype(case.dtype))
        self._examples, self._calls, self._steps = case.examples, calls, steps

    @property
    def shapes(self) -> tuple[Any, Any]:
        """Of state and batch."""
        return self.model.abstract_state(), self.model.abstract_batch(self._examples)

    def plain(self) -> Row:
        """The step under ``jax.jit``."""
        started = time.perf_counter()
        compiled = jax.jit(self.model.train_step, donate_argnums=0).lower(*self.shapes).compile()
        seconds, loss = self._run(compiled)
        return Row(JIT, seconds, loss, memory_bytes(compiled).total, made_in_seconds=time.perf_counter() - started)

    def planned(self, name: str, cluster: Cluster) -> Row:
        """The step as planned with a choice's options.  Raises ``PlanError`` if there is no such plan."""
        started = time.perf_counter()
        step = autopar.parallelize(self.model.train_step, cluster=cluster, **CHOICES[name])
        plan = step.plan(*self.shapes)
        figures = step.plan(*self.shapes, cluster=cluster.with_profile(None))
        compiled = step.compile(*self.shapes)
        seconds, loss = self._run(step)
        return Row(
            f"{name}: {plan.remat}, {plan.num_microbatches}" if name == "auto" else name,
            seconds,
            loss,
            memory_bytes(compiled).total,
            plan.step_seconds,
            figures.step_seconds,
            plan.peak_bytes,
            time.perf_counter() - started,
        )

    def _run(self, step: Any) -> tuple[float, float]:
        """Median seconds of a step, and the loss after the first few."""
        batch = jax.device_put(self.model.make_batch(self._examples))
        state = jax.jit(self.model.make_state)()
        for _ in range(3):
            state, metrics = step(state, batch)
        loss = float(metrics["loss"])
        seconds = []
        for _ in range(self._calls):
            jax.block_until_ready(state)
            started = time.perf_counter()
            for _ in range(self._steps):
                state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            seconds.append((time.perf_counter() - started) / self._steps)
        return statistics.median(seconds), loss


def measured(case: Case, arguments: argparse.Namespace, cluster: Cluster, say: Console) -> Iterator[Row]:
    """``jax.jit``, then every choice that can be planned."""
    bench = Bench(case, arguments.calls, arguments.steps)
    yield bench.plain()
    for name in arguments.choices:
        try:
            yield bench.planned(name, cluster)
        except PlanError as error:
            say.print(f"{name}: {str(error).splitlines()[0]}")


def plan_table(title: str, rows: list[Row]) -> Table:
    """The plans of one case, fastest first."""
    table = Table(title=title)
    names = ("clock ms", "of jit", "by profile ms", "off by", "by figures ms", "off by")
    names += ("predicted GiB", "compiled GiB", "off by", "loss off by", "made in s")
    table.add_column("plan")
    for name in names:
        table.add_column(name, justify="right")
    (jit,) = (row for row in rows if row.name == JIT)
    for row in sorted(rows, key=lambda one: one.clock_seconds):
        said = [
            text
            for seconds in (row.profile_seconds, row.figures_seconds)
            for text in (
                ("", "") if seconds is None else (f"{seconds * 1e3:.1f}", f"×{seconds / row.clock_seconds:.2f}")
            )
        ]
        memory = ("", "")
        if row.predicted_bytes is not None:
            memory = f"{row.predicted_bytes / GIB:.2f}", f"{row.predicted_bytes / row.compiled_bytes - 1:+.1%}"
        table.add_row(
            row.name,
            f"{row.clock_seconds * 1e3:.1f}",
            f"×{row.clock_seconds / jit.clock_seconds:.2f}",
            *said,
            memory[0],
            f"{row.compiled_bytes / GIB:.2f}",
            memory[1],
            f"{row.loss / jit.loss - 1:.0e}",
            f"{row.made_in_seconds:.0f}",
        )
    return table


def ranked(rows: list[Row]) -> list[Ranked]:
    """Those that were foretold."""
    return [
        Ranked(row.name, row.profile_seconds, row.figures_seconds, row.clock_seconds)
        for row in rows
        if row.profile_seconds is not None and row.figures_seconds is not None
    ]


def main() -> None:
    """Print the plans of every case, and what their ranking is worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), choices=list(CHOICES))
    parser.add_argument("--calls", type=int, default=3, help="of which the median counts")
    parser.add_argument("--steps", type=int, default=10, help="of each call")
    parser.add_argument("--profile", default="auto", help="auto (as found), none, or a file")
    parser.add_argument("--out", type=Path, help="a file of JSON lines that rows are appended to")
    arguments = parser.parse_args()
    cluster = Cluster.local(jax.devices()[:1], profile=None if arguments.profile == "none" else arguments.profile)
    console = Console(width=190)
    console.print(
        f"{cluster.device.name}, jax {jax.__version__}, profile {'none' if cluster.profile is None else 'there'}"
    )
    found = {}
    for name in arguments.cases:
        rows = []
        for row in measured(CASES[name], arguments, cluster, console):
            rows.append(row)
            if arguments.out is not None:
                with arguments.out.open("ab") as file:
                    file.write(msgspec.json.encode({"case": name, **asdict(row)}) + b"\n")
        case = CASES[name]
        console.print(plan_table(f"{case.model} {case.size}, {case.examples} examples, {case.dtype}", rows))
        found[name] = ranked(rows)
    console.print(verdict_table({name: rows for name, rows in found.items() if rows}))


if __name__ == "__main__":
    main()
