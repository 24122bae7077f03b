"""How long planning takes: trace to plan for GPT 1.3 B, and the size of the integer program against depth.

    python benchmarks/planning.py [--layers 12 24 48]

Prints per depth: equations, seconds in JAX's own tracing, seconds after it, variables of the integer program over all
meshes' best.  Nothing is compiled; shapes suffice, the hardware is a description of 8 V100s.
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
from autopar.graph.roles import infer_roles
from autopar.graph.tracing import trace
from autopar.planning import make_plan
from autopar.subjects import Demands, subject_of
from examples.gpt import model


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--batch", type=int, default=8)
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
    Console(width=140).print(table)


def measure(layers: int, batch_size: int) -> list[str]:
    """One row: plan a GPT of this depth from nothing."""
    config = dataclasses.replace(model.PRESETS["1.3B"], layers=layers)
    state = jax.eval_shape(partial(model.create_state, jax.random.key(0), config, model.OptimizerConfig()))
    tokens = jax.ShapeDtypeStruct((batch_size, config.sequence), jnp.int32)
    started = time.perf_counter()
    program = trace(model.train_step, (state, {"tokens": tokens, "targets": tokens}))
    traced = time.perf_counter()
    subject = subject_of(program, infer_roles(program), "cuda")
    built = time.perf_counter()
    demands = Demands(method="intra_op", memory_per_device=1e15)
    _, plan, _ = make_plan(subject, Cluster.preset("p3.16xlarge"), demands)
    planned = time.perf_counter()
    seconds = [traced - started, built - traced, planned - built, planned - started]
    return [
        str(layers),
        str(sum(1 for _ in subject.graph.all_operators())),
        *(f"{value:.2f}" for value in seconds),
        str(plan.solver.variables),
        str(plan.solver.variables_after_reduction),
        str(plan.mesh),
        f"{plan.step_seconds * 1e3:.1f}",
    ]


if __name__ == "__main__":
    main()
