"""What does it cost to keep the optimizer's state in the memory of the host, where does that pay, and is it declined elsewhere?

    python -m benchmarks.offload

A GPT of ten wide blocks (width 4096, 1024 tokens, float32, Adam, 2.2 billion parameters), 16 examples a step, on described GPUs.
Each case is planned with everything on the devices, with the moments on the hosts, and as the planner chooses; microbatches,
layouts and layers that compute again are free in all of them.  Seconds are the planner's prediction, in which nothing hides the
copies.

* *one A100 of 40 GiB*: parameters, gradients and moments do not fit; without the moments they do, and a step waits for PCIe.
* *two A100s*: cut over the devices the moments fit, and nothing is copied.
* *one H100 of 80 GiB, of which some is taken*: everything fits in small microbatches, which cost less than PCIe …
* *one Grace Hopper, of which as much is taken*: … and more than NVLink-C2C, the link between its processor and its GPU.

First come pipelines: residual blocks (x + tanh(x·A)·B, A four times as wide, float32) in two stages, whose residuals are kept,
made again, or on the hosts; fixed choices regardless of memory, free ones within a budget that fixed ``dots`` exceeds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster, Link
from autopar.errors import BudgetError
from autopar.plan import Plan
from benchmarks.models import Model
from benchmarks.remat import gpt
from examples.gpt.model import GPTConfig

GIB = 2**30
EXAMPLES = 16
CONFIG = GPTConfig(layers=10, hidden=4096, heads=32, sequence=1024, dtype=jnp.float32, param_dtype=jnp.float32)


def mlp(width: int, layers: int, examples: int, optimizer: optax.GradientTransformation | None = None) -> Model:
    """Layers of tanh between square matrices of float32, with Adam unless told otherwise; quickly planned."""
    chosen = optax.adam(1e-3) if optimizer is None else optimizer

    def make_state() -> Any:
        weights = [
            jax.random.normal(key, (width, width)) / width**0.5 for key in jax.random.split(jax.random.key(0), layers)
        ]
        return {"weights": weights, "moments": chosen.init(weights)}

    def train_step(state: Any, batch: Any) -> Any:
        def loss(weights: Any) -> jax.Array:
            x = batch["x"]
            for matrix in weights:
                x = jnp.tanh(x @ matrix)
            return jnp.mean((x - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state["weights"])
        updates, moments = chosen.update(gradients, state["moments"], state["weights"])
        return {"weights": optax.apply_updates(state["weights"], updates), "moments": moments}, {"loss": value}

    def make_batch(rows: int) -> Any:
        return {"x": np.ones((rows, width), np.float32), "y": np.zeros((rows, width), np.float32)}

    return Model("mlp", make_state, train_step, make_batch, examples)


def blocks(width: int) -> Model:
    """Residual blocks that widen four times, with plain descent: of a number in the middle 2 · width FLOPs make another one."""

    def make_state() -> Any:
        keys = jax.random.split(jax.random.key(0), 8)
        shapes = [(width, 4 * width), (4 * width, width)] * 4
        return [jax.random.normal(key, shape) / width for key, shape in zip(keys, shapes, strict=True)]

    def loss(weights: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for wide, narrow in zip(weights[::2], weights[1::2], strict=True):
            x = x + jnp.tanh(x @ wide) @ narrow
        return jnp.mean(x**2)

    def train_step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value

    return Model("blocks", make_state, train_step, lambda rows: {"x": np.ones((rows, width), np.float32)}, 8 * 4096)


@dataclass(frozen=True)
class Case:
    """A model on a cluster."""

    name: str
    cluster: Cluster
    memory_per_device: float | None = None


C2C = Link(1e-6, 0.8 * 450e9, source="NVIDIA GH200 data sheet, NVLink-C2C 900 GB/s, both directions; latency assumed")


def first(preset: str, count: int) -> Cluster:
    """Some devices of one host."""
    return Cluster.preset(preset).part(tuple(range(count)))


CASES = (
    Case("one A100, 40 GiB", first("p4d.24xlarge", 1)),
    Case("two A100s, 40 GiB each", first("p4d.24xlarge", 2)),
    Case("one H100, 45 GiB", first("p5.48xlarge", 1), 45 * GIB),
    Case("one Grace Hopper, 45 GiB", first("p5.48xlarge", 1).replace(host_memory_link=C2C), 45 * GIB),
)


def planned(case: Case, model: Model, offload: str | None) -> Plan:
    """The plan of a case."""
    step = autopar.parallelize(
        model.train_step,
        cluster=case.cluster,
        method="intra_op",
        offload=offload,
        memory_per_device=case.memory_per_device,
    )
    return step.plan(model.abstract_state(), model.abstract_batch())


ABLATION: tuple[tuple[str, dict[str, Any]], ...] = (
    ("kept", {"remat": "none", "offload": "none"}),
    ("dots", {"remat": "dots", "offload": "none"}),
    ("full", {"remat": "full", "offload": "none"}),
    ("activations", {"remat": "none", "offload": "activations"}),
    ("dots, activations", {"remat": "dots", "offload": "activations"}),
    ("auto without hosts", {"offload": "none"}),
    ("[bold]auto[/bold]", {}),
)
PIPELINES = (
    ("Grace Hopper links, width 8192", first("p4d.24xlarge", 2).replace(host_memory_link=C2C), 8192),
    ("PCIe, width 8192", first("p4d.24xlarge", 2), 8192),
    ("PCIe, width 512", first("p4d.24xlarge", 2), 512),
)


def piped(model: Model, cluster: Cluster, memory_per_device: float, options: dict[str, Any]) -> Plan:
    """The plan of a pipeline of two stages, 8 microbatches under 1F1B."""
    step = autopar.parallelize(
        model.train_step,
        cluster=cluster,
        stages=((0,), (1,)),
        num_microbatches=8,
        schedule="1f1b",
        memory_per_device=memory_per_device,
        **options,
    )
    return step.plan(model.abstract_state(), model.abstract_batch())


def pipelines() -> Table:
    """Pipelines, with a budget between what ``dots`` needs with everything on the devices and with all residuals on the hosts."""
    table = Table(title="What stages keep for their backward passes: predicted step")
    for name in ("case", "budget", "choice", "step", "of it copies", "a device", "a host, for each", "computed again"):
        table.add_column(name)
    for name, cluster, width in PIPELINES:
        model = blocks(width)
        dots, there = (piped(model, cluster, 1e15, dict(ABLATION)[one]) for one in ("dots", "dots, activations"))
        budget_bytes = (dots.peak_bytes + there.peak_bytes) / 2
        for choice, options in ABLATION:
            is_free = "auto" in choice
            shown = [name, f"{budget_bytes / GIB:.2f} GiB", choice]
            try:
                plan = piped(model, cluster, budget_bytes if is_free else 1e15, options)
            except BudgetError:
                table.add_row(*shown, "does not fit")
                continue
            table.add_row(
                *shown,
                f"{plan.step_seconds:.4f} s",
                f"{plan.prediction.host_seconds:.4f} s",
                f"{plan.peak_bytes / GIB:.2f} GiB" + ("" if plan.peak_bytes <= budget_bytes else ", too much"),
                f"{plan.prediction.memory.host_bytes / GIB:.2f} GiB",
                str(plan.remat),
                end_section=choice == ABLATION[-1][0],
            )
    return table


def main() -> None:
    """Plan all cases, and print two tables."""
    Console(width=170).print(pipelines())
    table = Table(title="Where the optimizer's state lies: predicted step")
    for name in (
        "case",
        "choice",
        "step",
        "of it copies",
        "a device",
        "a host, for each",
        "microbatches",
        "computed again",
        "planned in",
    ):
        table.add_column(name)
    model = gpt(CONFIG, EXAMPLES)
    for case in CASES:
        for choice in ("none", "optimizer_state", None):
            started = time.monotonic()
            shown = [case.name, choice or "[bold]auto[/bold]"]
            try:
                plan = planned(case, model, choice)
            except BudgetError:
                table.add_row(*shown, "does not fit", "", "", "", "", "", f"{time.monotonic() - started:.0f} s")
                continue
            table.add_row(
                *shown,
                f"{plan.step_seconds:.3f} s",
                f"{plan.prediction.host_seconds:.3f} s",
                f"{plan.peak_bytes / GIB:.1f} GiB",
                f"{plan.prediction.memory.host_bytes / GIB:.1f} GiB",
                str(plan.num_microbatches),
                str(plan.remat),
                f"{time.monotonic() - started:.0f} s",
                end_section=choice is None,
            )
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
