"""What needs a GPU: ``pytest -m gpu``, with the extras ``cuda12`` and ``nccl`` (or ``cuda13``, and cupy for it).

Each test is a program of its own, for tests see no GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

LIMIT_SECONDS = 800.0
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(LIMIT_SECONDS + 100)]


def number_of_gpus() -> int:
    if (tool := shutil.which("nvidia-smi")) is None:
        return 0
    listed = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


def ran(*command: str, gpus: int) -> str:
    """What a program printed on GPUs, so many at least."""
    if (count := number_of_gpus()) < gpus:
        pytest.skip(f"{count} GPUs are here, and {gpus} are needed")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {
        "JAX_PLATFORMS": "cuda,cpu",
        "CUDA_MODULE_LOADING": "EAGER",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_model_on_one_gpu_equals_jit() -> None:
    assert "models on a GPU are right" in ran("tests.models_on_gpu", gpus=1)


def test_worlds_and_pipelines_on_ray_equal_jit() -> None:
    pytest.importorskip("cupy", reason="the extra nccl is not installed")
    own = ["--own-gpus"] if number_of_gpus() >= 4 else []
    assert "pipelines on Ray with GPUs are right" in ran("tests.ray_on_gpu", *own, gpus=1)


def test_arrays_and_pipelines_over_nccl() -> None:
    pytest.importorskip("cupy", reason="the extra nccl is not installed")
    assert "are right" in ran("tests.nccl_on_gpus", gpus=2)
