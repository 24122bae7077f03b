"""Steps on emulated hosts, each with an address and a link of its own: the numbers of ``jax.jit`` and of the runtime in process.

What a single machine hides shows here: to which address a process binds, what a hostname leads to, who can reach whom.
Needs root and iproute2; see :mod:`benchmarks.netns`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.netns import Hosts, Network, RayNodes, why_not
from benchmarks.netns.hosts import knows_cubic

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be emulated: {why_not()}"),
    pytest.mark.timeout(1200),  # a row is up to five plans, each run on the hosts and in this process
]

MBIT = 1000
ROOT = Path(__file__).parents[1]

PLACES: dict[str, list[list[int]]] = {
    "2 stages on 1 host each": [[0, 1], [2, 3]],
    "2 stages on 2 hosts each": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "3 stages on 1 host each": [[0, 1], [2, 3], [4, 5]],
    "3 stages on 1 and 2 hosts": [[0, 1], [2, 3, 4, 5], [6, 7]],
    "4 stages on 1 host each": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "4 stages on 2 hosts each": [[0, 2], [1, 3], [4, 6], [5, 7]],
}
"""Devices of the stages; host k has the devices 2k and 2k + 1."""
MODELS = ("gpt", "moe", "unet")
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2")
"""Those of a mesh for each stage."""

DEALT: dict[str, list[list[int]]] = {
    "4 stages on 2 meshes of 1 host": [[0, 1], [2, 3]] * 2,
    "4 stages on 2 meshes of 2 hosts": [[0, 1, 2, 3], [4, 5, 6, 7]] * 2,
    "4 stages on 2 meshes across 4 hosts": [[0, 2, 4, 6], [1, 3, 5, 7]] * 2,
}
"""Of interleaved 1F1B: stages with the same devices share a mesh."""


def run_cases(nodes: RayNodes, cases: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the driver says of every case."""
    told, said = folder / "cases.json", folder / "said.json"
    told.write_text(json.dumps(cases))
    environment = {"PYTHONPATH": str(ROOT)}
    code = nodes.run([sys.executable, "-m", "tests.on_hosts", str(told), str(said)], environment)
    found: dict[str, Any] = json.loads(said.read_text()) if said.exists() else {}
    assert code == 0, f"the driver ended with {code} after {list(found)}"
    return found


@pytest.mark.verify
def test_meshes_of_two_hosts(tmp_path: Path) -> None:
    options = {"stages": [[0, 2], [1, 3]], "num_microbatches": 2, "schedule": "1f1b"}
    with RayNodes(Network(2, MBIT)) as nodes:
        found = run_cases(nodes, {"mlp": {"model": "mlp_nnx", "options": options}}, tmp_path)
        before = [nodes.hosts.traffic(host).sent_bytes for host in (0, 1)]
    assert found == {"mlp": {}}
    assert all(sent > 100_000 for sent in before)


def namespaces() -> list[str]:
    lines = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def test_nothing_is_left_behind() -> None:
    hosts = Hosts(Network(2, MBIT))
    with hosts:
        sleeper = hosts.start(1, ["sleep", "600"])
        folder, name = hosts.folder, hosts.name(1)
        assert sleeper.poll() is None
    assert sleeper.wait(timeout=5) != 0
    assert not folder.exists()
    assert name not in namespaces()


_CALLED = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    called, _ = server.accept()
    print(called.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""
_CALLER = """
import socket, sys, time
for wait in [0.1] * 100:
    time.sleep(wait)
    try:
        with socket.create_connection((sys.argv[1], 7000), timeout=5) as calling:
            print(calling.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
        break
    except ConnectionRefusedError:
        pass
"""


@pytest.mark.skipif(not knows_cubic(), reason="this kernel does not know cubic")
def test_hosts_share_a_link_by_linuxs_own_rules(tmp_path: Path) -> None:
    """Whatever the machine has been told to do, and without telling it otherwise."""
    before = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text()
    with Hosts(Network(2, MBIT)) as hosts:
        address = hosts.address(0)
        called = hosts.start(0, [sys.executable, "-c", _CALLED, address], log=tmp_path / "called")
        caller = hosts.start(1, [sys.executable, "-c", _CALLER, address], log=tmp_path / "caller")
        assert [process.wait(timeout=30) for process in (caller, called)] == [0, 0]
    assert (tmp_path / "called").read_text() == (tmp_path / "caller").read_text() == "cubic\n"
    assert Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text() == before


def test_what_a_killed_process_left_is_removed() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    lost = Hosts(Network(1, MBIT, prefix=f"autopar{ended.pid}"))
    lost.__enter__()
    folder = lost.folder
    assert not Path(f"/proc/{ended.pid}").exists()
    with Hosts(Network(1, MBIT)) as hosts:
        listed = namespaces()
    assert lost.name(0) not in listed
    assert hosts.name(0) in listed
    assert not folder.exists()


def test_one_process_makes_hosts_beside_others() -> None:
    with Hosts(Network(1, MBIT)) as first:
        sleeper = first.start(0, ["sleep", "600"])
        with Hosts(Network(1, MBIT)) as second:
            assert second.name(0) != first.name(0)
        assert sleeper.poll() is None
        assert first.name(0) in namespaces()
    assert sleeper.wait(timeout=5) != 0


@pytest.fixture(scope="module")
def four_hosts() -> Iterator[RayNodes]:
    with RayNodes(Network(4, MBIT)) as nodes:
        yield nodes


@pytest.mark.verify
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_one_mesh(four_hosts: RayNodes, hosts: int, name: str, tmp_path: Path) -> None:
    cases = {
        method: {"model": name, "hosts": hosts, "options": {"stages": 1, "method": method}}
        for method in ("auto", "data_parallel", "zero3")
    }
    assert run_cases(four_hosts, cases, tmp_path) == {case: {} for case in cases}


@pytest.mark.verify
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("places", PLACES)
def test_pipelines(four_hosts: RayNodes, places: str, name: str, tmp_path: Path) -> None:
    cases = {
        schedule: {
            "model": name,
            "options": {"stages": PLACES[places], "num_microbatches": 4, "schedule": schedule},
        }
        for schedule in SCHEDULES
    }
    assert run_cases(four_hosts, cases, tmp_path) == {case: {} for case in cases}


@pytest.mark.verify
@pytest.mark.parametrize("name", MODELS)
def test_stages_dealt_round(four_hosts: RayNodes, name: str, tmp_path: Path) -> None:
    cases = {
        places: {
            "model": name,
            "options": {"stages": devices, "num_microbatches": 4, "schedule": "interleaved_1f1b"},
        }
        for places, devices in DEALT.items()
    }
    assert run_cases(four_hosts, cases, tmp_path) == {case: {} for case in cases}
