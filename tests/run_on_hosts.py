"""The driver of :mod:`tests.test_lost_hosts`, run on the first of its hosts: ``python -m tests.run_on_hosts TOLD.json``.

Trains the model of :mod:`tests.ray_cases` and writes one line for every step: its number, its loss in hexadecimal (bit for bit),
on how many hosts the run is, and which steps the state came back from.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401 - sets the environment, before JAX is imported


def main() -> None:
    """Run all steps."""
    import jax
    import ray

    import autopar
    from tests.ray_cases import batch_of, create, train_step

    told = json.loads(Path(sys.argv[1]).read_text())
    jax.config.update("jax_enable_x64", True)
    ray.init(address="auto", log_to_driver=False)
    cluster = autopar.Cluster.ray("auto", devices_per_host=2)
    step = autopar.parallelize(train_step, cluster=cluster, **told["options"])
    begun: list[int] = []

    def batches(first: int) -> Iterator[Any]:
        begun.append(first)
        while True:
            time.sleep(told.get("pause_seconds", 0.0))
            yield batch_of(first)
            first += 1

    checkpoints = autopar.Checkpoints(told["checkpoints"], every_steps=told["every_steps"])
    recovery = autopar.Recovery(**told["recovery"])
    run = autopar.Run(
        step, partial(create, 0), batches, steps=told["steps"], checkpoints=checkpoints, recovery=recovery
    )
    with Path(told["said"]).open("a") as said:
        for number, metrics in run:
            line = {"step": number, "loss": float(metrics["loss"]).hex(), "hosts": step.cluster.hosts, "begun": begun}
            print(json.dumps(line), file=said, flush=True)
    Path(told["said"]).with_suffix(".restarts").write_text(json.dumps(run.restarts))
    step.cluster.close()


if __name__ == "__main__":
    main()
