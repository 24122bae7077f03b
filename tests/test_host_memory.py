"""Processes that compute keep the memory they free: told by page faults, which no noise hides, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from autopar.cluster import Platform
from autopar.host_memory import keep_freed_memory, variables
from autopar.runtime.processes import environment_of

SAID = {"MALLOC_TRIM_THRESHOLD_": "131072"}
MIB = (20, 48, 100)
"""Of results: one that the C library would keep, one that it would give back, and one larger than the heap of a thread."""

FAULTS = """
import json, os, resource, sys
kept = None
if sys.argv[1] == "first":
    from autopar.host_memory import keep_freed_memory
    kept = keep_freed_memory()
import jax, jax.numpy as jnp
WARM, CALLS = 60, 40  # a heap grows until it has found places for everything
def faults_of_a_call(mib):
    x, f = jnp.zeros(mib << 18), jax.jit(lambda x: x + 1)
    for _ in range(WARM):
        f(x).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        f(x).block_until_ready()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / CALLS
jax.devices()
if sys.argv[1] == "step":
    import autopar
    jax.block_until_ready(autopar.parallelize(lambda x: x + 1)(jnp.zeros(8)))
print(json.dumps([kept, [faults_of_a_call(mib) for mib in json.loads(sys.argv[2])]]))
"""


def shares_new(how: str, environment: dict[str, str]) -> tuple[bool | None, list[float]]:
    """Of the pages of results of ``MIB`` the shares that are new in every call."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS, how, json.dumps(MIB)],
        env={**clean, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "AUTOPAR_PROFILE": "none", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    kept, faults = json.loads(ran.stdout)
    return kept, [count * os.sysconf("SC_PAGE_SIZE") / (mib << 20) for count, mib in zip(faults, MIB, strict=True)]


@pytest.fixture(scope="module")
def left_alone() -> list[float]:
    shares = shares_new("never", {})[1]
    if shares[1] < 0.9:
        pytest.skip(f"the C library here keeps {MIB[1]} MiB by itself")
    return shares


@pytest.mark.verify
@pytest.mark.usefixtures("left_alone")
@pytest.mark.parametrize(
    ("how", "environment", "sizes"),
    [("first", {}, 2), ("never", variables({}), 2), ("never", {**variables({}), "MALLOC_ARENA_MAX": "1"}, 3)],
    ids=["called before JAX starts", "by the environment", "with one heap"],
)
def test_no_page_is_new_in_a_process_that_keeps_them(how: str, environment: dict[str, str], sizes: int) -> None:
    """Of two heaps only the first keeps the largest blocks, so which thread asks for them decides."""
    kept, shares = shares_new(how, environment)
    assert kept is (True if how == "first" else None)
    assert max(shares[:sizes]) < 0.5


@pytest.mark.verify
def test_a_step_of_ours_makes_its_process_keep_memory(left_alone: list[float]) -> None:
    _, shares = shares_new("step", {})
    assert max(shares[:2]) < 0.5
    assert left_alone[1] > 0.9


@pytest.mark.verify
@pytest.mark.usefixtures("left_alone")
def test_what_the_environment_says_of_memory_stands() -> None:
    kept, shares = shares_new("first", SAID)
    assert kept is False
    assert min(shares) > 0.9  # SAID gives everything back


@pytest.mark.parametrize("said", [SAID, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, {"MALLOC_ARENA_MAX": "4"}])
def test_processes_are_told_what_the_user_said_or_ours(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"HOME": "/", "GLIBC_TUNABLES": "glibc.elision.enable=0"}
    ours = variables(other)
    assert set(ours) == {"MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX"}
    assert variables({**other, **said}) == said
    for name in [*ours, "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name, raising=False)
    assert told(Platform.CPU) == ours
    assert told(Platform.CUDA) == {}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert told(Platform.CPU) == said
    assert not keep_freed_memory()


def told(platform: Platform) -> dict[str, Any]:
    return {name: value for name, value in environment_of(platform).items() if name.startswith(("MALLOC_", "GLIBC_"))}


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables(os.environ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("autopar.host_memory.ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()
