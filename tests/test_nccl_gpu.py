"""The real NCCL, where two GPUs and the extras ``cuda12`` and ``nccl`` are: ``pytest -m gpu``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest


def number_of_gpus() -> int:
    if (tool := shutil.which("nvidia-smi")) is None:
        return 0
    listed = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_arrays_and_pipelines_over_nccl() -> None:
    if (count := number_of_gpus()) < 2:
        pytest.skip(f"{count} GPUs are here, and two are needed")
    pytest.importorskip("cupy", reason="the extra nccl is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {
        "JAX_PLATFORMS": "cuda,cpu",
        "CUDA_MODULE_LOADING": "EAGER",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.nccl_on_gpus"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert "are right" in done.stdout
