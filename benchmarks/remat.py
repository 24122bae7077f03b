"""What does it cost to compute layers again, where does that pay, and does the planner know where it does not?

    python -m benchmarks.remat

A GPT of eight blocks (width 1024, 1024 tokens, float32, Adam) on described V100s.  Each case is planned under a budget of memory
with nothing computed again, with ``dots`` and ``full`` in every layer, and as the planner chooses, layer by layer: microbatches
and layouts are free in all of them.  Seconds are the planner's prediction.

* *one example a device*, *many examples a device*: microbatches, and products cut along the model, make what is kept less too.
* *four stages*: 1f1b keeps residuals of as many microbatches as stages follow, most of all in the first stage.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster
from autopar.errors import BudgetError
from autopar.plan import Plan
from benchmarks.models import Model
from examples.gpt.model import GPT, GPTConfig

BLOCKS, WIDTH, SEQUENCE, VOCABULARY = 8, 1024, 1024, 512
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One batch on one cluster; of the memory that is used without a budget this share is given."""

    name: str
    devices: int
    examples: int
    share: float
    options: Mapping[str, Any] = field(default_factory=dict)


STAGES = {"stages": [[0], [1], [2], [3]], "num_microbatches": 8, "schedule": "1f1b"}
CASES = (
    Case("one example a device", 4, 4, 0.9, {"method": "intra_op"}),
    Case("one example a device", 4, 4, 0.7, {"method": "intra_op"}),
    Case("one example a device", 4, 4, 0.5, {"method": "intra_op"}),
    Case("many examples a device", 4, 32, 0.5, {"method": "intra_op"}),
    Case("four stages", 4, 16, 0.9, STAGES),
    Case("four stages", 4, 16, 0.6, STAGES),
)


CONFIG = GPTConfig(VOCABULARY, WIDTH, BLOCKS, heads=16, sequence=SEQUENCE, dtype=jnp.float32, param_dtype=jnp.float32)


def gpt(config: GPTConfig, examples: int) -> Model:
    """The model with Adam and a batch of so many examples; nothing is allocated before it is asked for."""
    optimizer = optax.adamw(1e-3)

    def make_state() -> Any:
        params = GPT(config).init(jax.random.key(0), jnp.zeros((1, config.sequence), jnp.int32))["params"]
        return {"params": params, "moments": optimizer.init(params)}

    def train_step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = GPT(config).apply({"params": params}, batch["tokens"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, {"loss": value}

    def make_batch(rows: int) -> Any:
        tokens = np.zeros((rows, config.sequence), np.int32)
        return {"tokens": tokens, "targets": tokens}

    return Model("gpt", make_state, train_step, make_batch, examples)


def planned(case: Case, model: Model, cluster: Cluster, **options: Any) -> Plan:
    """The plan of a case with further options."""
    step = autopar.parallelize(model.train_step, cluster=cluster, **{**case.options, **options})
    return step.plan(model.abstract_state(), model.abstract_batch())


def main() -> None:
    """Plan all cases, and print one table."""
    table = Table(title="What layers compute again: predicted step")
    for name in ("case", "budget", "choice", "step", "device", "microbatches", "layers computed again", "planned in"):
        table.add_column(name)
    hosts = Cluster.preset("p3.16xlarge", hosts=1)
    for case in CASES:
        model, cluster = gpt(CONFIG, case.examples), hosts.part(tuple(range(case.devices)))
        free = planned(case, model, cluster, remat="none", memory_per_device=1e15, **_whole(case))
        budget_bytes = case.share * free.peak_bytes
        for choice in ("none", "dots", "full", None):
            started = time.monotonic()
            shown = [case.name, f"{budget_bytes / GIB:.1f} GiB", choice or "[bold]auto[/bold]"]
            try:
                plan = planned(case, model, cluster, remat=choice, memory_per_device=budget_bytes)
            except BudgetError:
                table.add_row(*shown, "does not fit", "", "", "", f"{time.monotonic() - started:.0f} s")
                continue
            table.add_row(
                *shown,
                f"{plan.step_seconds * 1e3:.1f} ms",
                f"{plan.peak_bytes / GIB:.1f} GiB",
                str(plan.num_microbatches),
                str(plan.remat),
                f"{time.monotonic() - started:.0f} s",
                end_section=choice is None,
            )
    Console(width=150).print(table)


def _whole(case: Case) -> dict[str, Any]:
    """Without stages the budget is a share of what the whole batch at once needs."""
    return {} if "stages" in case.options else {"num_microbatches": 1}


if __name__ == "__main__":
    main()
