"""Which kernels of a step take longer than their price?  Every instruction of a compiled step, priced and as it ran.

    python -m benchmarks.traced --model vit [--method auto] [--mesh 4 2] [--size bench] [--profile auto|none|FILE] [--steps 8]
                                [--rows 25]

JAX's profiler writes down when each device was in which instruction of the compiled program.  Of an instruction i that ran on
all n devices in s steps

    traced_i = Σ durations / (n · s)        priced_i = trips · seconds of its kernel, by the referee (autopar.cost_model.hlo)

and alike instructions are one row: the same opcode (or name, of a fusion, without its number) and result.  Rows are sorted by
how far both are apart.  Durations are by the clock, so they hold what a device waits for a core that another one has, as
prices do, which were measured on all devices at once.  Of collectives only the sum is printed: a device that comes first waits
in them for the last one.  What a trace itself costs stands in the two clocks.  XLA:CPU gives some products to its threads and
goes on; of those only the giving is in the trace, unless the environment says
``XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"``.  Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster
from autopar.cost_model.hlo import PricedStep, memory_bytes, parse_module, priced_steps, step_seconds
from autopar.cost_model.hlo_steps import is_collective
from autopar.host_memory import keep_freed_memory
from benchmarks.models import FAMILIES, Model, build
from benchmarks.turns import advance

SETTLING = 4
"""Steps before those that are timed."""


@dataclass(frozen=True)
class Row:
    """Instructions that are alike; seconds of one step on one device, all of them together."""

    name: str
    result: str
    count: int
    traced_seconds: float
    priced_seconds: float

    @property
    def apart_seconds(self) -> float:
        """By which they take longer than priced."""
        return self.traced_seconds - self.priced_seconds


def rows_of(priced: Iterable[PricedStep], traced_seconds: Mapping[str, float]) -> list[Row]:
    """The kernels of a program, what is furthest from its price first; ``traced_seconds`` are by the instruction's name."""
    alike: dict[tuple[str, str], list[PricedStep]] = {}
    for one in priced:
        instruction = one.step.instruction
        if not is_collective(instruction):
            name = re.sub(r"[.\d]+$", "", instruction.name) if instruction.opcode == "fusion" else instruction.opcode
            shape = instruction.shape
            result = "(…)" if shape.parts is not None else f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
            alike.setdefault((name, result), []).append(one)
    rows = [
        Row(
            *kind,
            len(them),
            sum(traced_seconds.get(name, 0.0) for name in dict.fromkeys(one.step.instruction.name for one in them)),
            sum(one.seconds for one in them),
        )
        for kind, them in alike.items()
    ]
    return sorted(rows, key=lambda row: -abs(row.apart_seconds))


def traced(step: Any, state: list[Any], batch: Any, steps: int) -> tuple[list[Any], float, Counter[str]]:
    """The state after so many steps under a trace, seconds of a step, and seconds by instruction on each device."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state, seconds = timed(step, state, batch, steps)
        (written,) = Path(folder).rglob("*.xplane.pb")
        found = jax.profiler.ProfileData.from_file(str(written))
        by_name: Counter[str] = Counter()
        with warnings.catch_warnings():
            # Of the class of JAX's own that comes with the first event; where warnings are errors it ends the process.
            warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
            for event in (event for plane in found.planes for line in plane.lines for event in line.events):
                name = dict(event.stats).get("hlo_op")
                if name is not None:
                    by_name[str(name)] += event.duration_ns * 1e-9 / (steps * step.plan.mesh.size)
    return state, seconds, by_name


def timed(step: Any, state: list[Any], batch: Any, steps: int) -> tuple[list[Any], float]:
    """The state after so many steps, and seconds of a step."""
    started = time.perf_counter()
    for _ in range(steps):
        state = advance(step, state, batch)
    return state, (time.perf_counter() - started) / steps


def main() -> None:
    """Print what the step takes, and the table."""
    arguments = parsed_arguments()
    keep_freed_memory()  # as where steps run, and before JAX starts
    cluster = Cluster.local(profile=None if arguments.profile == "none" else arguments.profile)
    model = build(arguments.model, arguments.size)
    step = compiled(model, cluster, arguments)
    module = parse_module(step.as_text())
    cost = step_seconds(module, cluster, memory=memory_bytes(step))
    priced, _ = priced_steps(module, cluster)

    batch, state = model.make_batch(model.batch_size), jax.tree.leaves(jax.jit(model.make_state)())
    state, _ = timed(step, state, batch, SETTLING)
    state, plain_seconds = timed(step, state, batch, arguments.steps)
    _, seconds, by_name = traced(step, state, batch, arguments.steps)
    rows = rows_of(priced, by_name)
    collectives = sum(
        by_name[name] for name in {one.step.instruction.name for one in priced if is_collective(one.step.instruction)}
    )

    console = Console()
    console.print(
        f"{model.name}, {arguments.method} on {step.plan.mesh}: foretold {milliseconds(step.plan.step_seconds)}"
    )
    console.print(f"by the clock {milliseconds(plain_seconds)}, under the trace {milliseconds(seconds)}")
    console.print(
        f"kernels: traced {milliseconds(sum(row.traced_seconds for row in rows))}, priced {milliseconds(cost.compute_seconds)}; "
        f"collectives, waits included: traced {milliseconds(collectives)}, priced {milliseconds(cost.communication_seconds)}; "
        f"new memory: priced {milliseconds(cost.allocation_seconds)}"
    )
    console.print(table(rows[: arguments.rows]))


def parsed_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=list(FAMILIES))
    parser.add_argument("--size", default="bench")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--mesh", type=int, nargs="+", help="a shape; by default the planner's choice")
    parser.add_argument("--profile", default="auto", help="auto (this machine's, if there is one), none, or a file")
    parser.add_argument("--steps", type=int, default=8, help="under the trace")
    parser.add_argument("--rows", type=int, default=25)
    return parser.parse_args()


def compiled(model: Model, cluster: Cluster, arguments: argparse.Namespace) -> Any:
    """The step that was asked for, to be run."""
    mesh_shape = None if arguments.mesh is None else tuple(arguments.mesh)
    step = autopar.parallelize(model.train_step, cluster=cluster, method=arguments.method, mesh_shape=mesh_shape)
    return step.compile(model.abstract_state(), model.abstract_batch())


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def table(rows: Iterable[Row]) -> Table:
    """The rows, in milliseconds."""
    made = Table(title="kernels of one step on each device")
    for column in ("kernel", "result"):
        made.add_column(column)
    for column in ("count", "traced ms", "priced ms", "apart ms"):
        made.add_column(column, justify="right")
    for row in rows:
        figures = [f"{seconds * 1e3:.2f}" for seconds in (row.traced_seconds, row.priced_seconds, row.apart_seconds)]
        made.add_row(row.name, row.result, str(row.count), *figures)
    return made


if __name__ == "__main__":
    main()
