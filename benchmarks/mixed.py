"""How much of the speed of two kinds of devices together does a plan reach?

    python -m benchmarks.mixed [350M/256 …]

A step takes a seconds on the devices of one kind alone and b on those of the other, each with the best plan that was found.
However its examples are dealt to the two, the slower part takes at least

    1 / (1/a + 1/b)

which data parallelism with microbatches dealt in proportion (``method="shares"``) would reach if gradients were exchanged in no
time.  It exchanges them once a step, over the network between the kinds; the table says what an all-reduce of them takes.  Stages
of a pipeline lie on one kind each, and send activations.  ``auto`` chooses between all of these.

GPT in half precision as in the suites, on the 8 V100s of a p3.16xlarge and the 8 A100s of a p4d.24xlarge, joined by the network
of the first.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import rich.progress
from rich.console import Console
from rich.table import Table

from autopar.cluster import Cluster
from autopar.cost_model.collectives import Collective, group_seconds
from autopar.graph.roles import Role
from autopar.inter_op.terms import AccumulatorDtype
from autopar.plan import Plan
from autopar.planning import make_plan
from autopar.subjects import Demands, Subjected
from benchmarks.suites import half_precision
from benchmarks.suites.rows import said_of
from benchmarks.suites.steps import gpt_config, subject_of_model

EACH = 8
"""Devices of each kind."""

CASES = (("350M", 256), ("350M", 1024), ("1.3B", 1024))
"""Sizes and batches."""


@dataclass(frozen=True)
class Reached:
    """Seconds of a step on either kind alone; of an exchange of gradients; the plans of shares and of auto on both."""

    alone_seconds: tuple[float, float]
    exchange_seconds: float
    shares: Plan
    plan: Plan
    planning_seconds: float

    @property
    def least_seconds(self) -> float:
        """With the examples dealt in proportion, and nothing exchanged."""
        return 1 / sum(1 / seconds for seconds in self.alone_seconds)


def both_kinds() -> Cluster:
    """A host of each kind."""
    slow, fast = (Cluster.preset(name, hosts=1) for name in ("p3.16xlarge", "p4d.24xlarge"))
    return slow.replace(hosts=2, host_devices={1: fast.device})


def best_plan(subject: Subjected, cluster: Cluster, method: str = "auto") -> Plan:
    """Chosen by the planner."""
    return make_plan(subject, cluster, Demands(method=method, accumulator_dtype=AccumulatorDtype.SAME))[1]


def reached(size: str, batch: int) -> Reached:
    """For one model."""
    subject, cluster = subject_of_model(half_precision.gpt(gpt_config(size), batch)), both_kinds()
    slow, fast = tuple(range(EACH)), tuple(range(EACH, 2 * EACH))
    alone = [best_plan(subject, cluster.part(devices)).step_seconds for devices in (slow, fast)]
    started = time.process_time()
    plan = best_plan(subject, cluster)
    seconds = time.process_time() - started
    gradient_bytes = sum(
        subject.graph.values[subject.graph.inputs[position]].size_bytes
        for position in subject.roles.leaves(Role.STATE)
        if subject.program.in_paths[position].startswith("state.params")
    )
    pairs = tuple(zip(slow, fast, strict=True))
    exchange = group_seconds(Collective.ALL_REDUCE, gradient_bytes / EACH, pairs, cluster)
    return Reached((alone[0], alone[1]), exchange, best_plan(subject, cluster, "shares"), plan, seconds)


def main() -> None:
    """Plan all cases, or those that are named, and print one table."""
    named = sys.argv[1:]
    table = Table(title=f"GPT on {EACH} V100s and {EACH} A100s: predicted seconds of a step")
    for name in (
        "model",
        "batch",
        "V100s alone",
        "A100s alone",
        "least",
        "gradients",
        "shares",
        "step",
        "auto",
        "step",
        "of least",
        "core s",
    ):
        table.add_column(name)
    cases = [(size, batch) for size, batch in CASES if not named or f"{size}/{batch}" in named]
    for size, batch in rich.progress.track(cases, transient=True):
        found = reached(size, batch)
        table.add_row(
            size,
            str(batch),
            *(f"{seconds:.3f}" for seconds in found.alone_seconds),
            f"{found.least_seconds:.3f}",
            f"{found.exchange_seconds:.3f}",
            " + ".join(map(str, found.shares.shares)),
            f"{found.shares.step_seconds:.3f}",
            said_of(found.plan),
            f"{found.plan.step_seconds:.3f}",
            f"{found.plan.step_seconds / found.least_seconds:.2f}",
            f"{found.planning_seconds:.0f}",
        )
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
