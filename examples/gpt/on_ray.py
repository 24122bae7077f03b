"""The GPT of this folder, trained on the hosts of a Ray cluster in a run that outlives its workers.

    ray start --head                                  # here, and `ray start --address=...` on the other hosts
    python -m examples.gpt.on_ray --run-dir /shared/gpt

Without a cluster, ``--address local --hosts 2 --devices-per-host 2`` makes one of this machine.  Kill a worker while it
trains: the run says so, goes back to its last checkpoint, and the losses that follow are those that would have followed.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import autopar
from examples.gpt import data, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--address", default="auto", help='of the Ray cluster: "auto", ip:port, or "local" for a new one'
    )
    parser.add_argument("--hosts", type=int, help="take so many hosts; more than there are nodes: several on each")
    parser.add_argument("--devices-per-host", type=int, help="default: its GPUs, or one CPU device")
    parser.add_argument("--preset", default="1M", choices=sorted(model.PRESETS))
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stages", type=int, help="of a pipeline; default: the planner's choice")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/gpt_ray"), help="a directory that all hosts see")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    console = Console()
    config = model.PRESETS[given.preset]
    dataset = data.prepare(given.run_dir / "data", config.vocab_size, 2_000_000)
    optimizer = model.OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=10, total_steps=given.steps)
    create = partial(model.create_state, jax.random.key(0), config, optimizer)

    def batches(step: int) -> Iterator[Any]:
        return data.BatchIterator(dataset.train, given.batch_size, config.sequence, position=step * given.batch_size)

    cluster = autopar.Cluster.ray(given.address, hosts=given.hosts, devices_per_host=given.devices_per_host)
    train_step = autopar.parallelize(model.train_step, cluster=cluster, stages=given.stages)
    checkpoints = autopar.Checkpoints(given.run_dir / "checkpoints", every_steps=20)
    run = autopar.Run(train_step, create, batches, steps=given.steps, checkpoints=checkpoints)
    for step, metrics in run:
        if step % 10 == 0 or step == 1:
            console.print(f"step {step:5d}   loss {float(metrics['loss']):.3f}", highlight=False)
    console.print(train_step.last.plan.summary() if train_step.last else "nothing was left to do", highlight=False)
    console.print(f"{len(run.restarts)} failures survived", highlight=False)
    cluster.close()


if __name__ == "__main__":
    main()
