"""Runs on emulated hosts that die, are cut off, and come back.  Needs root and iproute2; see :mod:`benchmarks.netns`."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.netns import Network, RayNodes, why_not

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be emulated: {why_not()}"),
    pytest.mark.verify,
    pytest.mark.timeout(3600),
]

MBIT = 1000
ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 1200.0


class Driver:
    """Owns a run on the first host, and reads what it says."""

    def __init__(self, nodes: RayNodes, folder: Path, **told: Any) -> None:
        self._said = folder / "said.jsonl"
        (folder / "told.json").write_text(
            json.dumps({"said": str(self._said), "checkpoints": str(folder / "checkpoints"), "recovery": {}, **told})
        )
        command = [sys.executable, "-m", "tests.run_on_hosts", str(folder / "told.json")]
        environment = {**nodes.environment(), "PYTHONPATH": str(ROOT), "AUTOPAR_CACHE": str(folder / "cache")}
        self._log = folder / "driver.log"
        self.process: subprocess.Popen[bytes] = nodes.hosts.start(0, command, environment, self._log)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What was said so far."""
        return [json.loads(line) for line in self._said.read_text().splitlines()] if self._said.exists() else []

    def until(self, what: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until it is so, or the run has ended."""
        limit = time.monotonic() + LIMIT_SECONDS
        while not what(self.lines) and self.process.poll() is None:
            assert time.monotonic() < limit, self._log.read_text()[-3000:]
            time.sleep(0.2)

    def losses(self) -> list[float]:
        """Of all steps, when the run has ended well."""
        assert self.process.wait(LIMIT_SECONDS) == 0, self._log.read_text()[-3000:]
        assert [line["step"] for line in self.lines] == list(range(1, len(self.lines) + 1))
        return [float.fromhex(line["loss"]) for line in self.lines]


class Supervisor:
    """Starts nodes again that have ended, as the one who runs a cluster does: Ray ends the node of a host that was cut off."""

    def __init__(self, nodes: RayNodes) -> None:
        self._nodes = nodes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        hosts = self._nodes.hosts
        while not self._over.wait(2.0):
            for host in range(1, hosts.network.hosts):
                programs = [command.split()[0] for command in hosts.commands(host).values() if command.strip()]
                if not any(program.endswith("/raylet") for program in programs):
                    hosts.kill(host)
                    with contextlib.suppress(RuntimeError):  # it is cut off once more: later
                        self._nodes.start_node(host)


def reached(step: int) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda lines: bool(lines) and lines[-1]["step"] >= step


@pytest.fixture
def three_hosts() -> Iterator[RayNodes]:
    with RayNodes(Network(3, MBIT)) as nodes:
        yield nodes


def undisturbed(nodes: RayNodes, folder: Path, **told: Any) -> list[float]:
    (folder / "calm").mkdir()
    return Driver(nodes, folder / "calm", **told).losses()


def test_fewer_hosts_and_all_again(three_hosts: RayNodes, tmp_path: Path) -> None:
    # By a plan on all hosts: so small a model is planned for two devices else.
    told = {"options": {"method": "data_parallel"}, "steps": 60, "every_steps": 4, "pause_seconds": 0.3}
    wanted = undisturbed(three_hosts, tmp_path, **(told | {"pause_seconds": 0.0}))
    driver = Driver(three_hosts, tmp_path, recovery={"patience_seconds": 3.0}, **told)
    driver.until(reached(6))
    three_hosts.hosts.kill(2)
    driver.until(lambda lines: lines[-1]["hosts"] == 2)
    three_hosts.start_node(2)
    np.testing.assert_allclose(driver.losses(), wanted, rtol=1e-9)
    hosts = [line["hosts"] for line in driver.lines]
    assert (hosts[0], hosts[-1]) == (3, 3)
    assert 2 in hosts


def test_a_host_that_is_cut_off(three_hosts: RayNodes, tmp_path: Path) -> None:
    told = {"options": {"stages": [[2, 3], [4, 5]], "num_microbatches": 2}, "steps": 30, "every_steps": 4}
    wanted = undisturbed(three_hosts, tmp_path, **told)
    driver = Driver(three_hosts, tmp_path, recovery={"patience_seconds": 120.0}, pause_seconds=0.1, **told)
    driver.until(reached(6))
    with Supervisor(three_hosts):
        three_hosts.hosts.set_link(2, up=False)
        time.sleep(30.0)
        three_hosts.hosts.set_link(2, up=True)
        np.testing.assert_array_equal(driver.losses(), wanted)
    restarts = json.loads((tmp_path / "said.restarts").read_text())
    assert any("has not answered" in one or "gone" in one for one in restarts), restarts


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_chaos(tmp_path: Path, seed: int) -> None:
    """Thirty blows at random instants: processes killed or stopped, hosts cut off for a while."""
    drawn, blows = random.Random(seed), 30
    told = {"options": {"stages": [[2, 3], [4, 5]], "num_microbatches": 2}, "steps": 400, "every_steps": 5}
    with RayNodes(Network(3, MBIT)) as nodes, Supervisor(nodes):
        wanted = undisturbed(nodes, tmp_path, **told)
        recovery = {"max_restarts": 10 * blows, "patience_seconds": 180.0, "replicate_every_steps": 1}
        driver = Driver(nodes, tmp_path, recovery=recovery, pause_seconds=0.2, **told)
        for blow in range(blows):
            driver.until(reached(10 * blow + 5))
            time.sleep(drawn.uniform(0.0, 1.0))
            host = drawn.choice((1, 2))
            if (kind := drawn.random()) < 0.2:
                nodes.hosts.set_link(host, up=False)
                time.sleep(drawn.uniform(1.0, 25.0))
                nodes.hosts.set_link(host, up=True)
            else:
                workers = [pid for pid, command in nodes.hosts.commands(host).items() if "MeshHost" in command]
                if workers:
                    nodes.hosts.strike(drawn.choice(workers), signal.SIGSTOP if kind < 0.4 else signal.SIGKILL)
        np.testing.assert_array_equal(driver.losses(), wanted)
        folder, names = nodes.hosts.folder, [nodes.hosts.name(host) for host in range(3)]
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    assert not set(names) & set(listed)
    assert not folder.exists()
