"""How long planning takes: trace to plan for GPT 1.3 B, and the size of the integer program against depth.

    python benchmarks/planning.py [--layers 12 24 48] [--batch 8] [--whole-model 2.6B] [--whole-batch 32]

Prints per depth: equations, seconds in JAX's own tracing, seconds after it, variables of the integer program over all
meshes' best.  Then, for a whole model that does not fit without microbatches, the way from trace to plan with
``method="auto"``, the search for pipelines included, and the plan found.  Nothing is compiled; shapes suffice, the hardware is
a description of 8 V100s.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from autopar.cluster import Cluster
from autopar.collector import paused_collector
from autopar.graph.roles import infer_roles
from autopar.graph.tracing import trace
from autopar.plan import Plan
from autopar.planning import make_plan
from autopar.subjects import Demands, Subjected, subject_of
from examples.gpt import model

CLUSTER = "p3.16xlarge"
"""One host with 8 V100s."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--whole-model", choices=sorted(model.PRESETS), default="2.6B")
    parser.add_argument("--whole-batch", type=int, default=32)
    arguments = parser.parse_args()
    table = Table(title="GPT hidden 2048, 32 heads, sequence 1024, vocabulary 51200; 24 layers are 1.3 B; 8 × V100")
    for name in (
        "layers",
        "equations",
        "trace s",
        "graph s",
        "plan s",
        "total s",
        "variables",
        "reduced",
        "mesh",
        "step ms",
    ):
        table.add_column(name, justify="right")
    for layers in arguments.layers:
        table.add_row(*measure(layers, arguments.batch))
    console = Console(width=140)
    console.print(table)
    name = arguments.whole_model
    whole = Table(
        title=f"GPT {name}, {model.PRESETS[name].layers} layers, batch {arguments.whole_batch}; auto on {CLUSTER}"
    )
    for column in (
        "equations",
        "trace s",
        "graph s",
        "plan s",
        "total s",
        "stages",
        "microbatches",
        "schedule",
        "step ms",
    ):
        whole.add_column(column, justify="right")
    whole.add_row(*measure_whole(name, arguments.whole_batch))
    console.print(whole)


def timed_plan(config: model.GPTConfig, batch_size: int, demands: Demands) -> tuple[Subjected, Plan, list[str]]:
    """Plan a GPT from nothing: the step with its graph, the plan, and seconds of tracing, graph, planning, and in all.

    Cycles are not collected meanwhile, as in the calls of :func:`autopar.parallelize`.
    """
    state = jax.eval_shape(partial(model.create_state, jax.random.key(0), config, model.OptimizerConfig()))
    tokens = jax.ShapeDtypeStruct((batch_size, config.sequence), jnp.int32)
    with paused_collector():
        started = time.perf_counter()
        program = trace(model.train_step, (state, {"tokens": tokens, "targets": tokens}))
        traced = time.perf_counter()
        subject = subject_of(program, infer_roles(program), "cuda")
        built = time.perf_counter()
        _, plan, _ = make_plan(subject, Cluster.preset(CLUSTER), demands)
        planned = time.perf_counter()
    seconds = [traced - started, built - traced, planned - built, planned - started]
    return subject, plan, [f"{value:.2f}" for value in seconds]


def measure_whole(name: str, batch_size: int) -> list[str]:
    """One row: plan a whole model as a call without further wishes does."""
    subject, plan, seconds = timed_plan(model.PRESETS[name], batch_size, Demands())
    stages = " + ".join(str(stage.mesh) for stage in plan.stages)
    return [
        str(sum(1 for _ in subject.graph.all_operators())),
        *seconds,
        f"{len(plan.stages)}: {stages}",
        str(plan.num_microbatches),
        plan.schedule.value,
        f"{plan.step_seconds * 1e3:.1f}",
    ]


def measure(layers: int, batch_size: int) -> list[str]:
    """One row: plan a GPT of this depth from nothing."""
    config = dataclasses.replace(model.PRESETS["1.3B"], layers=layers)
    demands = Demands(method="intra_op", memory_per_device=1e15)
    subject, plan, seconds = timed_plan(config, batch_size, demands)
    return [
        str(layers),
        str(sum(1 for _ in subject.graph.all_operators())),
        *seconds,
        str(plan.solver.variables),
        str(plan.solver.variables_after_reduction),
        str(plan.mesh),
        f"{plan.step_seconds * 1e3:.1f}",
    ]


if __name__ == "__main__":
    main()
