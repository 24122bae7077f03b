"""Are the arrays that a change of layout makes on more than eight devices those of XLA:CPU?

The tests' own process has eight devices, so a process of its own compiles for more and says what it finds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

DEVICES = 64
COMPILE = """
import json
import jax
import autopar
from autopar.cost_model.hlo import memory_bytes
from benchmarks.intra_op import Setting
from benchmarks.models import build

model = build("mlp_nnx", "bench")
step = autopar.parallelize(model.train_step)
shapes = model.abstract_state(), model.abstract_batch(32 * jax.device_count())
cluster = Setting("hosts", jax.device_count() // 8, 8, 10).cluster()
asked = {"cluster": cluster, "method": "zero2"}
plan, compiled = step.plan(*shapes, **asked), step.compile(*shapes, **asked)
print(json.dumps([jax.device_count(), plan.peak_bytes, memory_bytes(compiled).total]))
"""


@pytest.mark.verify
def test_many_pieces_have_buffers_of_their_own_until_all_are_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count, foretold, compiled = json.loads(done.stdout.splitlines()[-1])
    assert count == DEVICES
    assert foretold == pytest.approx(compiled, rel=0.02)
