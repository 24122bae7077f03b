"""How many cores an emulated host has: a quota of processor time, by control groups of Linux (version 1 or 2).

A group may compute for ``cores · 10 ms`` in every 10 ms, on whatever cores are free, and goes before everything outside of such
groups.  So a host is as fast while the others work as while they wait, as real ones are; without it a host that waits for a
message makes its neighbours faster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

_FIRST_VERSION = Path("/sys/fs/cgroup/cpu")
_SECOND_VERSION = Path("/sys/fs/cgroup")
_PERIOD_SECONDS = 0.01  # shorter ones cost the kernel several per cent, longer ones make messages wait
_LARGEST_SHARES, _LARGEST_WEIGHT = 262144, 10000
_DYING_SECONDS = 5.0

# Written before a network namespace is entered: that mounts another /sys.
_JOIN = 'echo $$ > "$1" && shift && exec "$@"'


_SEE_FIRST = (
    "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/cpu && mount -t cgroup -o cpu none /sys/fs/cgroup/cpu"
)
_SEE_SECOND = "mount -t cgroup2 none /sys/fs/cgroup"


def seeing_groups() -> str:
    """What a shell in another network namespace runs so that its programs can read their quota."""
    return _SEE_FIRST if _FIRST_VERSION.exists() else _SEE_SECOND


def why_no_quota() -> str:
    """Why this machine cannot hold processes to a quota; empty if it can."""
    if (_FIRST_VERSION / "cpu.cfs_quota_us").exists() or (_FIRST_VERSION / "cpu.cfs_period_us").exists():
        return ""
    controllers = _SECOND_VERSION / "cgroup.controllers"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        return ""
    return "there is no `cpu` controller of control groups under /sys/fs/cgroup"


class Quota:
    """Owns a control group whose processes together use so many cores at most (None: as many as are free)."""

    def __init__(self, name: str, cores: float | None) -> None:
        is_first = _FIRST_VERSION.exists()
        self.folder = (_FIRST_VERSION if is_first else _SECOND_VERSION) / name
        if not is_first:
            (_SECOND_VERSION / "cgroup.subtree_control").write_text("+cpu")
        self.folder.mkdir(exist_ok=True)
        for file, text in (_first_settings if is_first else _second_settings)(cores).items():
            (self.folder / file).write_text(text)

    def command(self, command: Sequence[str]) -> list[str]:
        """What to run so that the command, and all that it starts, is held to the quota."""
        return ["sh", "-c", _JOIN, "sh", str(self.folder / "cgroup.procs"), *command]

    def close(self) -> None:
        """Remove the group; its processes must have been ended."""
        remove_group(self.folder)


def _first_settings(cores: float | None) -> dict[str, str]:
    limit = {} if cores is None else {"cpu.cfs_period_us": _microseconds(1), "cpu.cfs_quota_us": _microseconds(cores)}
    return {**limit, "cpu.shares": str(_LARGEST_SHARES)}


def _second_settings(cores: float | None) -> dict[str, str]:
    limit = {} if cores is None else {"cpu.max": f"{_microseconds(cores)} {_microseconds(1)}"}
    return {**limit, "cpu.weight": str(_LARGEST_WEIGHT)}


def _microseconds(cores: float) -> str:
    """Of processor time in a period."""
    return str(round(cores * _PERIOD_SECONDS * 1e6))


def remove_groups(prefix: str) -> None:
    """Remove the groups of hosts whose owner is no more."""
    for root in (_FIRST_VERSION, _SECOND_VERSION):
        for folder in root.glob(f"{prefix}[!0-9]*"):  # not those of an owner whose number only begins so
            remove_group(folder)


def remove_group(folder: Path) -> None:
    """Remove a group once the kernel has forgotten its processes, which takes it a moment after they ended."""
    until = time.monotonic() + _DYING_SECONDS
    while folder.exists():
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        if time.monotonic() > until:
            return
        time.sleep(0.02)
