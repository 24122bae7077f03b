"""A Ray node on each of some emulated hosts; the first one is the head.

Programs on a host find the cluster by ``RAY_ADDRESS``, so that ``autopar.Cluster.ray("auto")`` is all they need to say.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.netns.hosts import Hosts, Network

_PORT = 6379
_STORE_BYTES = 300_000_000
_STARTING_SECONDS = 120


class RayNodes:
    """Owns hosts and a Ray node on each; a context manager.  ``cpus`` is what each node says that it has."""

    def __init__(self, network: Network, cpus: int | None = None) -> None:
        self.hosts = Hosts(network)
        self._cpus = len(os.sched_getaffinity(0)) if cpus is None else cpus

    def __enter__(self) -> RayNodes:
        self.hosts.__enter__()
        try:
            # One after the other: started together on few cores, they time out.
            for host in range(self.hosts.network.hosts):
                self._start(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down."""
        self.hosts.close()

    @property
    def address(self) -> str:
        """Of the cluster."""
        return f"{self.hosts.address(0)}:{_PORT}"

    def environment(self) -> dict[str, str]:
        """What every process of the cluster must find in its environment."""
        return {
            "RAY_AUTH_MODE": "disabled",  # the hosts are reachable from nowhere else
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # as opponents run, who need no Ray; its own is 15
            "RAY_raylet_start_wait_time_s": str(_STARTING_SECONDS),
            "RAY_ADDRESS": self.address,
        }

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None, host: int = 0) -> int:
        """Run a driver on a host; its exit code."""
        return self.hosts.run(host, command, {**self.environment(), **(environment or {})})

    def start_node(self, host: int) -> None:
        """Start the node of a host again after all its processes were killed."""
        self._start(host)

    def _start(self, host: int) -> None:
        here = [f"--node-ip-address={self.hosts.address(host)}", f"--num-cpus={self._cpus}"]
        rest = [f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats"]
        if host == 0:
            role = ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={self.hosts.own_folder}"]
        else:
            role = [f"--address={self.address}"]
        log = self.hosts.folder / f"host{host}.log"
        environment = self.environment()
        del environment["RAY_ADDRESS"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, *here, *rest]
        if self.hosts.start(host, command, environment, log).wait() != 0:
            raise RuntimeError(f"no Ray node on host {host}:\n{_last_lines(log)}")


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
