"""Quotas of control groups, of both versions of Linux's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cores import SPARE_THREADS, quota_cores, threads_of_xla, usable_cores
from benchmarks.netns.cores import why_no_quota
from benchmarks.netns.hosts import Hosts, Network, why_not

CORES = 0.3
SPIN = """
import json, time
from autopar.cores import usable_cores
started, computed = time.perf_counter(), time.process_time()
while time.perf_counter() - started < 1.0:
    pass
print(json.dumps([usable_cores(), (time.process_time() - computed) / (time.perf_counter() - started)]))
"""

START = """
import os, pathlib
{before}
from autopar.cluster import Cluster
assert Cluster.local(profile=None).num_devices == 8
names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
print(sum("XLAEigen" in name for name in names), os.environ.get("NPROC"))
"""
"""Says how many threads XLA:CPU has for its work, and what the environment says of them."""
WITH_SPARE = max(8 + SPARE_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)
FLAG = "--xla_force_host_platform_device_count=8"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "wanted"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/pod/container\n", {"pod/cpu.max": "50000 100000\n", "pod/container/cpu.max": "max 100000\n"}, 0.5),
        ("0::/pod\n", {"pod/cpu.max": "400000 100000\n", "cpu.max": "200000 100000\n"}, 2.0),
        ("0::/far/away\n", {"cpu.max": "250000 100000\n"}, 2.5),  # a container that sees its own group as the root
        (
            "4:cpu,cpuacct:/docker/1\n0::/\n",
            {"cpu/docker/1/cpu.cfs_quota_us": "40000\n", "cpu/docker/1/cpu.cfs_period_us": "100000\n"},
            0.4,
        ),
        (
            "2:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("3:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "10\n", "cpuset/cpu.cfs_period_us": "100\n"}, None),
        ("0::/\n", {"cpu.max": "garbage\n"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_the_smallest_quota_around_a_process_holds(
    tmp_path: Path, own: str, files: dict[str, str], wanted: float | None
) -> None:
    write(tmp_path, files)
    (tmp_path / "own").write_text(own)
    assert quota_cores(tmp_path, tmp_path / "own") == wanted


def test_a_system_without_control_groups_rations_nothing(tmp_path: Path) -> None:
    assert quota_cores(tmp_path, tmp_path / "none") is None
    assert usable_cores() > 0


@pytest.mark.verify
@pytest.mark.skipif(bool(why_not() or why_no_quota()), reason=why_not() or why_no_quota())
def test_an_emulated_host_computes_on_its_cores_and_knows_them(tmp_path: Path) -> None:
    """What it starts is held to them; a driver on it is not."""
    with Hosts(Network(1, 0, cores_per_host=CORES)) as hosts:
        path = {"PYTHONPATH": str(Path(__file__).parents[1])}
        assert hosts.start(0, [sys.executable, "-c", SPIN], path, tmp_path / "log").wait() == 0
        known, computed = json.loads((tmp_path / "log").read_text().splitlines()[-1])
        assert known == pytest.approx(CORES)
        assert computed == pytest.approx(CORES, rel=0.25)
        assert (
            hosts.run(0, [sys.executable, "-c", "from autopar.cores import *; assert quota_cores() is None"], path) == 0
        )
        groups = [quota.folder for quota in hosts.groups()]
        assert all(group.exists() for group in groups)
    assert not any(group.exists() for group in groups)


def test_xla_has_threads_for_collectives_on_all_devices_and_for_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, wanted in ((0.4, [4, 4, 16]), (6.5, [7, 7, 16])):
        monkeypatch.setattr("autopar.cores.usable_cores", lambda cores=cores: cores)
        assert [threads_of_xla(devices) for devices in (1, 2, 8)] == wanted


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
@pytest.mark.parametrize(
    ("before", "environment", "said"),
    [
        ("", {"XLA_FLAGS": FLAG}, f"{WITH_SPARE} None"),
        pytest.param(
            "import jax; jax.config.update('jax_num_cpu_devices', 8)",
            {},
            f"{WITH_SPARE} None",
            marks=pytest.mark.verify,
        ),
        pytest.param("", {"XLA_FLAGS": FLAG, "NPROC": "9"}, "9 9", marks=pytest.mark.verify),
    ],
    ids=["devices by the environment", "devices by JAX", "threads by the environment"],
)
def test_xla_starts_spare_threads_for_who_asks_for_the_local_cluster(
    before: str, environment: dict[str, str], said: str
) -> None:
    bare = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    found = subprocess.run(
        [sys.executable, "-c", START.format(before=before)],
        env={**bare, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert found.stdout.strip() == said
