"""Do random programs compute on eight devices what they compute on one?

Programs of a few operators each (:mod:`tests.fuzz_programs`), over sizes that axes divide and sizes that none does, are
planned for a random mesh of a machine of random speed, so slow that cutting pays, and run twice.  Float64 results agree
with ``jax.jit`` to 1e-9 of the leaf's largest magnitude (of 1, if that is less), all others exactly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cluster import Cluster
from tests.fuzz_programs import Example, examples
from tests.toy_runs import leaves_by_path

RELATIVE = 1e-9
MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
SPEEDS = (1e3, 1e5, 1e7)
SAMPLE = 15
MANY = 1000

meshes = st.sampled_from(MESHES)
speeds = st.sampled_from(SPEEDS)


def machine(speed: float) -> Cluster:
    """This process's devices, said to do so many operations and move so many bytes per second."""
    local = Cluster.local()
    device = dataclasses.replace(
        local.device,
        flops_per_second=dict.fromkeys(local.device.flops_per_second, speed),
        memory_bytes_per_second=speed,
    )
    return local.replace(name="slow devices", device=device)


def differences(ours: Any, theirs: Any) -> list[str]:
    """Paths of the leaves that differ, and by how much."""
    found = []
    ours, theirs = leaves_by_path(ours), leaves_by_path(theirs)
    assert ours.keys() == theirs.keys()
    for path, expected in theirs.items():
        got = ours[path]
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), path
        if expected.dtype != np.float64:
            if not np.array_equal(got, expected):
                found.append(f"{path} ({expected.dtype}) differs")
            continue
        assert np.isfinite(expected).all(), f"{path}: the generator made a program without finite values"
        allowed = RELATIVE * max(1.0, np.abs(expected).max(initial=0.0))
        error = np.abs(got - expected).max(initial=0.0)
        if not error <= allowed:
            found.append(f"{path} differs by {error:.1e}")
    return found


def check(example: Example, mesh: tuple[int, ...], speed: float) -> None:
    """A step by a plan, and one under ``jax.jit``; another by the plan must take what the first returned.

    Its numbers prove nothing: what the first returned is not exact (see :mod:`tests.fuzz_programs`).
    """
    note(f"mesh_shape={mesh}, {speed:.0e} operations per second\n{example.source}")
    note(f"state {jax.tree.map(np.shape, example.state)}, batch {jax.tree.map(np.shape, example.batch)}")
    step = example.step()
    with jax.enable_x64(True):
        planned = autopar.parallelize(cluster=machine(speed), mesh_shape=mesh, solver_seconds=10.0)(step)
        got = planned(example.state, example.batch)
        wrong = differences(got, jax.jit(step)(example.state, example.batch))
        assert not wrong, wrong
        jax.block_until_ready(planned(got[0], example.batch))


@settings(max_examples=SAMPLE, phases=(Phase.generate,), database=None)
@given(examples(), meshes, speeds)
def test_random_programs(example: Example, mesh: tuple[int, ...], speed: float) -> None:
    check(example, mesh, speed)


@pytest.mark.verify
@pytest.mark.timeout(7200)
@settings(max_examples=MANY, phases=(Phase.generate,), database=None)
@given(examples(), meshes, speeds)
def test_many_random_programs(example: Example, mesh: tuple[int, ...], speed: float) -> None:
    check(example, mesh, speed)


def test_a_slice_of_a_slice_that_begins_out_of_bounds() -> None:
    """Found by these tests: XLA:CPU of jaxlib 0.10.2 adds the starts of two slices and clamps only their sum.

    The outer slice is ours, where the result of the user's own is wanted in pieces.
    """

    def step(state: dict[str, Any], batch: dict[str, Any]) -> Any:
        rows = lax.dynamic_slice_in_dim(batch["x"], batch["start"], 8, 0)
        return {"w": state["w"] + jnp.sum(rows, 1)}, {"rows": rows}

    random = np.random.default_rng(0)
    state, x = {"w": np.zeros(8, np.float32)}, random.standard_normal((12, 4)).astype(np.float32)
    for start in (25, -25, 2):
        planned = autopar.parallelize(
            cluster=machine(1e3), mesh_shape=(8,), constraints={"state/w": P("data")}, batch_argnums=()
        )(step)
        got = planned(state, {"x": x, "start": np.int32(start)})
        expected = jax.jit(step)(state, {"x": x, "start": np.int32(start)})
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
