"""How many cores may this process use: those that it may run on, or fewer where its processor time is rationed.

A control group of Linux (a container with a limit, a pod of Kubernetes) may compute for q seconds in every period of p seconds:
its quota is q / p cores.  All its threads stop when the q seconds are spent, so that short work runs at the speed of whole cores
and long work at that of the quota.  The smallest quota of a process's group and of those around it holds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_cores() -> float:
    """Cores that this process may run on, or the quota of its control groups if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = quota_cores()
    return float(cores) if quota is None else min(float(cores), quota)


def threads_of_xla(devices: int) -> int:
    """For so many devices of XLA:CPU in one process (its variable ``NPROC``).

    One for each device may wait until fewer programs stand before it (:mod:`autopar.runtime.run_ahead`); with fewer than
    twice the devices, the others are too few for a collective.
    """
    return max(4, 2 * devices, math.ceil(usable_cores()))


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
