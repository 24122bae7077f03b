"""What the README says of Ray clusters is done as it stands there, on emulated hosts."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from benchmarks.netns import Hosts, Network, why_not

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be emulated: {why_not()}"),
    pytest.mark.verify,
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[1]

BEFORE = """
import tests.conftest
import autopar, itertools
from functools import partial
from tests.ray_cases import batch_of, create, train_step
create_state = partial(create, 0)
def batches(step):
    return map(batch_of, itertools.count(step))
"""
"""What a reader has already."""


def test_launching_on_a_ray_cluster(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    shell, script = re.findall(r"## On a cluster\n\n```sh\n(.*?)```\n\n```python\n(.*?)```", text, re.S)[0]
    commands = [line.partition("#")[0].split() for line in shell.splitlines()]
    for said, ours in (("/shared/run", str(tmp_path / "run")), ("10_000", "12"), ("every_steps=500", "every_steps=5")):
        assert said in script
        script = script.replace(said, ours)
    (tmp_path / "script.py").write_text(BEFORE + script)
    with Hosts(Network(2, 1000)) as hosts:
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(hosts.own_folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "AUTOPAR_CACHE": "none",
        }
        for host, command in enumerate(commands):
            assert hosts.run(host, command, environment) == 0
        said = tmp_path / "said.txt"
        driver = hosts.start(0, [sys.executable, str(tmp_path / "script.py")], environment, said)
        assert driver.wait(300) == 0, said.read_text()[-3000:]
        assert re.search(r"^12 [0-9.]+", said.read_text(), re.M)
        assert hosts.traffic(1).received_bytes > 100_000
    assert (tmp_path / "run" / "12").exists()
