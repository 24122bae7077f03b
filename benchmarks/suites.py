"""GPT at the sizes and on the clusters of the Alpa paper, planned from descriptions alone and priced in one simulator.

    python -m benchmarks.suites [--gpus 4 8] [--plans auto published intra_op]

Models, batches, Alpa's own plans and the throughput that was published are those of Zheng et al., "Alpa: Automating Inter- and
Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022, section 8.1 (throughput read off figure 7, ± 0.02
PFLOP/s).  Half precision with master weights, AdamW and recomputation of every layer, as there; without loss scaling.

FLOPs of a step are counted with recomputation, as the paper does: 96·B·S·H²·L·(1 + S/6H) + 6·B·S·H·V.  Figures of V100s are
those of the preset, which nothing is calibrated on: data sheets times what is commonly reached.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from autopar.cluster import Cluster
from autopar.collector import paused_collector
from autopar.errors import PlanError
from autopar.graph.roles import infer_roles
from autopar.graph.tracing import trace
from autopar.plan import Plan
from autopar.planning import make_plan
from autopar.subjects import Demands, subject_of
from autopar.wording import bytes_text
from examples.gpt import model

BATCH = 1024
HOST = "p3.16xlarge"
DEVICES_PER_HOST = 8


@dataclass(frozen=True)
class Published:
    """What Alpa found for a number of devices: devices of each stage, the mesh of each, microbatches; and what was measured.

    PFLOP/s of Alpa, of Megatron-LM, and of Alpa with one kind of parallelism only.
    """

    stage_sizes: tuple[int, ...]
    mesh_shapes: tuple[tuple[int, int], ...]
    num_microbatches: int
    alpa: float
    megatron: float
    inter_only: float
    intra_only: float

    def demands(self) -> Demands | None:
        """Stages, mesh and microbatches as they were; None where stages have meshes of several shapes."""
        if len(set(self.mesh_shapes)) > 1:
            return None
        stages, start = [], 0
        for size in self.stage_sizes:
            stages.append(tuple(range(start, start + size)))
            start += size
        return Demands(stages=tuple(stages), mesh_shape=self.mesh_shapes[0], num_microbatches=self.num_microbatches)


@dataclass(frozen=True)
class Row:
    """A model on so many devices."""

    preset: str
    published: Published


def _even(stages: int, mesh: tuple[int, int], count: int, measured: tuple[float, float, float, float]) -> Published:
    return Published((mesh[0] * mesh[1],) * stages, (mesh,) * stages, count, *measured)


GPT: Mapping[int, Row] = MappingProxyType(
    {
        4: Row("1.3B", _even(2, (2, 1), 128, (0.21, 0.17, 0.16, 0.21))),
        8: Row("2.6B", Published((2, 2, 4), ((2, 1), (2, 1), (4, 1)), 128, 0.47, 0.36, 0.42, 0.36)),
        16: Row("6.7B", _even(2, (2, 4), 64, (0.94, 0.89, 0.93, 0.74))),
        32: Row("15B", _even(4, (2, 4), 128, (1.89, 1.84, 1.57, 1.10))),
        64: Row("39B", _even(16, (1, 4), 1024, (3.63, 3.68, 3.21, 0.11))),
    }
)
"""By the number of devices."""


def config_of(preset: str) -> model.GPTConfig:
    """The model as it was measured: half precision, recomputation."""
    return dataclasses.replace(model.PRESETS[preset], dtype=jnp.float16, remat=True)


def step_flops(config: model.GPTConfig, batch: int) -> float:
    """FLOPs of a step by the paper's formula."""
    hidden, sequence = config.hidden, config.sequence
    layers = 96 * batch * sequence * hidden**2 * config.layers * (1 + sequence / (6 * hidden))
    return layers + 6 * batch * sequence * hidden * config.vocab_size


def cluster_of(num_devices: int) -> Cluster:
    """So many V100s, eight to a host."""
    hosts = max(1, num_devices // DEVICES_PER_HOST)
    return Cluster.preset(HOST, hosts=hosts).replace(devices_per_host=min(num_devices, DEVICES_PER_HOST))


def planned(config: model.GPTConfig, cluster: Cluster, demands: Demands) -> tuple[Plan, float]:
    """A plan from nothing, and the seconds that it took a core, tracing included."""
    state = jax.eval_shape(partial(model.create_state, jax.random.key(0), config, model.OptimizerConfig()))
    tokens = jax.ShapeDtypeStruct((BATCH, config.sequence), jnp.int32)
    started = time.process_time()
    with paused_collector():
        program = trace(model.train_step, (state, {"tokens": tokens, "targets": tokens}))
        subject = subject_of(program, infer_roles(program), cluster.device.platform.value)
        _, plan, _ = make_plan(subject, cluster, demands)
    return plan, time.process_time() - started


def demands_of(name: str, published: Published) -> Demands | None:
    """What is asked of a plan by its name; None: it cannot be asked for."""
    match name:
        case "auto":
            return Demands()
        case "published":
            return published.demands()
        case _:
            return Demands(method=name)


def figure(name: str, published: Published) -> str:
    """PFLOP/s as published."""
    figures = {"auto": published.alpa, "published": published.alpa, "intra_op": published.intra_only}
    return f"{figures.get(name, published.inter_only):.2f}"


def cells(num_devices: int, name: str) -> list[str]:
    """One row of the table."""
    row = GPT[num_devices]
    config = config_of(row.preset)
    head = [f"GPT {row.preset}", str(num_devices), name]
    demands = demands_of(name, row.published)
    if demands is None:
        return [*head, "stages of unlike meshes", "", "", "", figure(name, row.published)]
    try:
        plan, seconds = planned(config, cluster_of(num_devices), demands)
    except PlanError as error:
        return [*head, str(error).split(";")[0][:80], "", "", "", figure(name, row.published)]
    meshes = " + ".join(dict.fromkeys(str(stage.mesh) for stage in plan.stages))
    said = f"{len(plan.stages)} stages, {meshes}, {plan.num_microbatches} microbatches, {plan.schedule.value}"
    rate = step_flops(config, BATCH) / plan.step_seconds / 1e15
    return [*head, said, f"{rate:.3f}", bytes_text(plan.peak_bytes), f"{seconds:.1f}", figure(name, row.published)]


def main() -> None:
    """Print the table, each row as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", choices=sorted(GPT), default=sorted(GPT))
    parser.add_argument("--plans", nargs="+", choices=["auto", "published", "intra_op", "inter_op"], default=["auto"])
    arguments = parser.parse_args()
    console = Console(width=150)
    table = Table(title=f"GPT, batch {BATCH}, on {HOST}")
    for column in ("model", "GPUs", "asked", "plan", "PFLOP/s", "memory", "planning, core s", "published PFLOP/s"):
        table.add_column(column)
    for num_devices in arguments.gpus:
        for name in arguments.plans:
            row = cells(num_devices, name)
            console.print(" | ".join(row))
            table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
