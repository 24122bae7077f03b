"""The cluster that benchmarks of plans run on: four emulated hosts with two virtual devices each, and what they can do.

Each host has a fifth of this machine's cores (:mod:`benchmarks.netns.cores`); what is left is for the driver, and for the kernel,
which carries the frames.  Two things are measured before anything is planned: a host, by ``autopar profile`` while the others
measure as well, and the network, by ``autopar network``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster, DeviceKind
from benchmarks.netns.cores import why_no_quota
from benchmarks.netns.hosts import Hosts, Network
from benchmarks.netns.nodes import RayNodes

HOSTS, DEVICES = 4, 2
_SHARE_OF_MACHINE = 0.2
_PORT = 7700
ROOT = str(Path(__file__).parents[2])
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "NPROC": str(max(4, 2 * DEVICES)),  # threads of XLA, as the processes of a mesh have them
    "PYTHONPATH": ROOT,
    "XLA_FLAGS": "",
}


def testbed(mbit: int) -> RayNodes:
    """The hosts, with links of that rate; to be entered."""
    if reason := why_no_quota():
        print(
            f"{reason}: all hosts share all cores, so one that waits makes the others faster, which the planner does not know"
        )
        return RayNodes(Network(HOSTS, mbit))
    return RayNodes(Network(HOSTS, mbit, cores_per_host=_SHARE_OF_MACHINE * len(os.sched_getaffinity(0))))


class Plain:
    """Owns nothing: runs :mod:`benchmarks.netns.plain` on all hosts, one world after the other."""

    def __init__(self, nodes: RayNodes) -> None:
        self._nodes = nodes
        self._port = _PORT

    def run(self, *what: str) -> Any:
        """What the first process says."""
        hosts, said = self._nodes.hosts, self._nodes.hosts.folder / "plain.json"
        said.unlink(missing_ok=True)
        self._port += 1
        command = [sys.executable, "-m", "benchmarks.netns.plain", what[0], str(said), *what[1:]]
        command += ["--coordinator", f"{hosts.address(0)}:{self._port}"]
        command += ["--hosts", str(HOSTS), "--devices", str(DEVICES)]
        logs = [hosts.folder / f"plain{host}.log" for host in range(HOSTS)]
        started = [
            hosts.start(host, [*command, "--rank", str(host)], _ENVIRONMENT, log) for host, log in enumerate(logs)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit("\n".join(log.read_text(errors="replace")[-1500:] for log in logs))
        return json.loads(said.read_text())


@dataclass(frozen=True)
class Figures:
    """A folder of what was measured, and is not measured again: a host's profile, and the network at each rate in Mbit/s."""

    folder: Path
    rates: tuple[int, ...]

    @property
    def profile(self) -> Path | None:
        """Of a host; None where hosts have no cores of their own."""
        return None if why_no_quota() else self.folder / "profile.json"

    def network(self, mbit: int) -> Path:
        """At a rate."""
        return self.folder / f"network_{mbit}.json"

    def measure(self, nodes: RayNodes, *options: str) -> None:
        """Measure what is missing; ``options`` are those of ``autopar network``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.profile is not None and not self.profile.exists():
            _measure_profile(nodes, self.profile)
        for mbit in self.rates:
            if not self.network(mbit).exists():
                set_rates(nodes.hosts, mbit)
                command = [sys.executable, "-m", "autopar", "network", "--devices", str(DEVICES), *options]
                if nodes.run([*command, "--out", str(self.network(mbit))], {"PYTHONPATH": ROOT}):
                    raise SystemExit(1)


def described(found: Cluster, figures: Figures, mbit: int) -> Cluster:
    """The cluster as it was measured, or where hosts have no cores of their own, as eight devices that share the machine's."""
    cluster = found.with_network(figures.network(mbit))
    if figures.profile is None:
        return cluster.replace(compute_shared_by=HOSTS * DEVICES)
    return cluster.replace(device=_share_of(cluster.device)).with_profile(figures.profile)


def _share_of(kind: DeviceKind) -> DeviceKind:
    """What is left of the whole machine's cores and memory."""
    rates = {dtype: rate * _SHARE_OF_MACHINE for dtype, rate in kind.flops_per_second.items()}
    bandwidth = kind.memory_bytes_per_second * _SHARE_OF_MACHINE
    memory = kind.memory_bytes // HOSTS
    return dataclasses.replace(kind, flops_per_second=rates, memory_bytes_per_second=bandwidth, memory_bytes=memory)


def set_rates(hosts: Hosts, mbit: int) -> None:
    """Every link."""
    for host in range(HOSTS):
        hosts.set_rate(host, mbit)


def _measure_profile(nodes: RayNodes, out: Path) -> None:
    """Measure a host while all others do the same work, and keep what the first one saw."""
    started_at = time.monotonic()
    hosts = nodes.hosts
    command = [sys.executable, "-m", "autopar", "profile", "--devices", str(DEVICES), "--out"]
    files = [out, *(hosts.folder / f"profile{host}.json" for host in range(1, HOSTS))]
    logs = [hosts.folder / f"profile{host}.log" for host in range(HOSTS)]
    started = [
        hosts.start(host, [*command, str(file)], _ENVIRONMENT, log)
        for host, (file, log) in enumerate(zip(files, logs, strict=True))
    ]
    if started[0].wait() != 0:
        raise SystemExit(logs[0].read_text(errors="replace")[-1500:])
    for process in started[1:]:  # they have measured beside the first, which is all they were for
        process.terminate()
        process.wait()
    print(f"a host's profile, measured in {time.monotonic() - started_at:.0f} s: {out}", flush=True)
