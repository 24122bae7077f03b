"""The Ray runtime on GPUs: worlds of several processes, and pipelines over both transports, equal ``jax.jit`` in float64.

A program of its own, for tests see no GPU: ``python -m tests.ray_on_gpu [--hosts 4] [--own-gpus]``.  It starts a Ray cluster of
so many nodes with one GPU each on this machine.  They all have the first one, unless ``--own-gpus`` gives each its own: NCCL
refuses two ranks on one GPU only where it takes them for processes of one host, so each process is told to be a host of its own,
and its messages go through sockets.  What XLA and NCCL do there is what they do between hosts, only slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PORT = 6412
_EVERY_PROCESS_A_HOST = 'import os\nos.environ["NCCL_HOSTID"] = str(os.getpid())\n'
"""Read by every Python process that finds it as ``sitecustomize``."""


@contextmanager
def ray_nodes(count: int, own_gpus: bool) -> Iterator[None]:
    """So many nodes of a Ray cluster on this machine, stopped at the end."""
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_EVERY_PROCESS_A_HOST)
        os.environ |= {
            "PYTHONPATH": os.pathsep.join([folder, os.getcwd(), os.environ.get("PYTHONPATH", "")]),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "CUDA_MODULE_LOADING": "EAGER",
            "AUTOPAR_CACHE": "none",
            "AUTOPAR_PROFILE": "none",
        }
        try:
            for node in range(count):
                place = (
                    ["--head", f"--port={PORT}", "--include-dashboard=false"]
                    if not node
                    else [f"--address=127.0.0.1:{PORT}"]
                )
                environment = os.environ | {
                    "CUDA_VISIBLE_DEVICES": str(node if own_gpus else 0),
                    "JAX_PLATFORMS": "cuda,cpu",
                }
                command = [*ray, "start", *place, "--node-ip-address=127.0.0.1", "--num-gpus=1", "--num-cpus=4"]
                subprocess.run(command, check=True, env=environment, timeout=120, stdout=subprocess.DEVNULL)
            yield
        finally:
            subprocess.run([*ray, "stop", "--force"], check=False, timeout=60, stdout=subprocess.DEVNULL)


def slow(cluster: Any) -> Any:
    """The same hosts, said to compute so slowly that even a toy is worth cutting up."""
    device = dataclasses.replace(
        cluster.device,
        flops_per_second=dict.fromkeys(cluster.device.flops_per_second, 1e8),
        memory_bytes_per_second=1e8,
    )
    return cluster.replace(device=device, host_devices={})


def main() -> None:
    """One mesh of several processes, pipelines of meshes of one, and of two, by both transports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--own-gpus", action="store_true")
    parser.add_argument("--transports", nargs="+", default=["nccl", "pull"])
    arguments = parser.parse_args()
    with ray_nodes(arguments.hosts, arguments.own_gpus):
        os.environ["JAX_PLATFORMS"] = "cpu"  # of this process, which only drives
        from autopar import Cluster
        from tests.mesh_threads import equal_to_jit

        def checked(stages: Any, count: int, transport: str, hosts: int, **options: Any) -> None:
            started = time.monotonic()
            cluster = slow(Cluster.ray(f"127.0.0.1:{PORT}", hosts=hosts, devices_per_host=1, transport=transport))
            try:
                step = equal_to_jit(cluster, stages, count, **options)
                plan, seconds = step.last.plan, time.monotonic() - started
                names = [status.name for world in step.last.executor.worlds for status in world.status()]
                print(
                    f"{transport}, {len(plan.stages)} stages, {plan.schedule}, {names}: equal to jax.jit, {seconds:.0f} s",
                    flush=True,
                )
            finally:
                cluster.close()

        checked(1, 1, arguments.transports[0], 2)
        for transport in arguments.transports:
            for schedule in ("gpipe", "1f1b"):
                checked(2, 4, transport, 2, schedule=schedule)
        if arguments.hosts >= 4:
            checked(2, 4, arguments.transports[0], 4, schedule="1f1b")
    print("pipelines on Ray with GPUs are right")


if __name__ == "__main__":
    main()
