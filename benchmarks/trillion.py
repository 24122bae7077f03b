"""How long does it take to plan a GPT of a trillion parameters on 4,096 H100s?  From trace to plan, from descriptions alone.

    python -m benchmarks.trillion [--hosts 512] [--layers 128] [--batch 4096] [--progress]

The model is the largest of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021, table 1 (128 layers, hidden 25,600, 160 heads, sequence 2,048, vocabulary 51,200; 1,008 · 10⁹ parameters), in bfloat16
with float32 weights and AdamW, every layer computed again in the backward pass.  The paper's batch is 3,072 on 3,072 GPUs; so
here it is one sequence for every device as well.  FLOPs are counted as that paper counts them, recomputation included.

Prints seconds of one core until the step is traced and until it is planned, the planner's peak memory, and the plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time

import jax.numpy as jnp
from rich.console import Console

from autopar.cluster import Cluster
from autopar.collector import paused_collector
from autopar.plan import Plan
from autopar.planning import make_plan
from autopar.subjects import Demands
from benchmarks.models.gpt import model_of
from benchmarks.suites.steps import gpt_flops, subject_of_model
from examples.gpt.model import PRESETS

HOST = "p5.48xlarge"
"""Eight H100s."""


def main() -> None:
    """Plan it once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=512, help="of eight H100s each")
    parser.add_argument("--layers", type=int, default=PRESETS["1T"].layers)
    parser.add_argument("--batch", type=int, help="sequences; else one for every device")
    parser.add_argument("--progress", action="store_true", help="say what the planner does")
    arguments = parser.parse_args()
    console = Console(width=140)
    cluster = Cluster.preset(HOST, hosts=arguments.hosts)
    batch = arguments.batch or cluster.num_devices
    config = dataclasses.replace(PRESETS["1T"], layers=arguments.layers, dtype=jnp.bfloat16, remat=True)
    started = time.process_time()

    def report(text: str) -> None:
        if arguments.progress:
            console.print(f"  {time.process_time() - started:.0f} s: {text}")

    with paused_collector():
        subject = subject_of_model(model_of("gpt-1T", config, batch))
        traced = time.process_time()
        plan = make_plan(subject, cluster, Demands(), report)[1]
    planned = time.process_time()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    console.print(f"{config.layers} layers, batch {batch}, {cluster.num_devices} devices of {HOST}")
    console.print(f"traced after {traced - started:.0f} s of a core, planned after {planned - started:.0f} s")
    console.print(f"peak memory {peak_bytes / 2**30:.2f} GiB")
    console.print(text_of(plan, gpt_flops(config, batch)))


def text_of(plan: Plan, flops: float) -> str:
    """The plan in a line, and what is foretold of it."""
    meshes = " + ".join(dict.fromkeys(str(stage.mesh) for stage in plan.stages))
    rate = flops / plan.step_seconds
    return (
        f"{len(plan.stages)} stages on {meshes}, {plan.num_microbatches} microbatches, {plan.schedule.value}: "
        f"{plan.step_seconds:.1f} s a step, {rate / 1e15:.0f} PFLOP/s ({rate / plan.num_devices / 1e12:.0f} TFLOP/s a device), "
        f"{plan.peak_bytes / 2**30:.1f} GiB a device, proven to {plan.solver.gap:.1%} within its stages"
    )


if __name__ == "__main__":
    main()
