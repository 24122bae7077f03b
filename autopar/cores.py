"""How many cores may this process use: those that it may run on, or fewer where its processor time is rationed.

A control group of Linux (a container with a limit, a pod of Kubernetes) may compute for q seconds in every period of p seconds:
its quota is q / p cores.  All its threads stop when the q seconds are spent, so that short work runs at the speed of whole cores
and long work at that of the quota.  The smallest quota of a process's group and of those around it holds.

Threads of XLA:CPU wait for each other, so there must be more than cores, or even devices.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")

SPARE_THREADS = 2
"""Four or more make steps slower, a Wide-ResNet's on eight devices and two cores by a tenth."""
THREADS_VARIABLE = "NPROC"
"""The variable by which XLA:CPU is told how many threads to start."""
DEVICES_FLAG = "--xla_force_host_platform_device_count"
"""And by which of its flags how many devices there are."""


def usable_cores() -> float:
    """Cores that this process may run on, or the quota of its control groups if that is less."""
    cores, quota = _own_cores(), quota_cores()
    return float(cores) if quota is None else min(float(cores), quota)


def _own_cores() -> int:
    """Cores that this process may run on, whatever it may compute there."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of_xla(devices: int) -> int:
    """For so many devices of XLA:CPU in one process (its variable ``NPROC``).

    One for each device may wait until fewer programs stand before it (:mod:`autopar.runtime.run_ahead`); with fewer than
    twice the devices, the others are too few for a collective.
    """
    return max(4, 2 * devices, math.ceil(usable_cores()))


@contextmanager
def spare_threads() -> Iterator[None]:
    """While JAX looks for devices: if XLA:CPU starts now, it starts :data:`SPARE_THREADS` more than there are devices.

    By itself it starts one for each device where the cores are fewer.  A device that comes to two collectives, neither of which
    waits for the other, takes two; where the last device then finds none, nobody goes on, and after 40 seconds XLA ends the
    process.  What the environment says of ``NPROC`` stands, and is afterwards what it was.
    """
    devices = _asked_devices()
    if THREADS_VARIABLE in os.environ or devices < 2:
        yield
        return
    os.environ[THREADS_VARIABLE] = str(max(devices + SPARE_THREADS, _own_cores()))
    try:
        yield
    finally:
        del os.environ[THREADS_VARIABLE]


def _asked_devices() -> int:
    """How many devices JAX will find on CPU, if it has not looked yet."""
    import jax

    asked: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    flags = re.findall(rf"{DEVICES_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return asked if asked > 0 else int(flags[-1]) if flags else 1


def quota_cores(groups: Path = _GROUPS, own: Path = _OWN) -> float | None:
    """The processor time in a second that control groups leave this process, in cores; None: they do not ration it.

    ``groups`` is where they are mounted, ``own`` what says in which of them this process is.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None  # not Linux
    found: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            found += _quotas(groups, path, _second_version)
        elif "cpu" in controllers.split(","):
            found += _quotas(groups / "cpu", path, _first_version)
            found += _quotas(groups / controllers, path, _first_version)
    return min(found, default=None)


def _quotas(root: Path, path: str, read: Callable[[Path], float]) -> Iterator[float]:
    """Those of a group and of all around it; in a container the outermost is mounted as the root, whatever its path."""
    inner = PurePosixPath(path.lstrip("/"))
    for group in (inner, *inner.parents):
        try:
            quota = read(root / group)
        except (OSError, ValueError):
            continue  # no such group here, or one without a limit
        if quota > 0:
            yield quota


def _first_version(group: Path) -> float:
    quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return quota / period


def _second_version(group: Path) -> float:
    quota, period = (group / "cpu.max").read_text().split()
    return int(quota) / int(period)
