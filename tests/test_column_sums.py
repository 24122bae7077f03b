"""Sums of few rows: the same numbers in two steps, on GPUs only, and only where they are worth it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import export
from jax import numpy as jnp

import autopar
from autopar.runtime.executor import jitted_step
from autopar.schedule.column_sums import MOST_COLUMNS, PARTS, ROWS, parts_of, sum_in_two_steps


@given(rows=st.integers(1, 6000), columns=st.integers(1, 10_000))
def test_parts_divide_the_rows(rows: int, columns: int) -> None:
    """They are the fewest in range that do."""
    parts = parts_of((rows, columns), (0,))
    dividing = [count for count in PARTS if rows % count == 0]
    if rows in ROWS and 1 < columns <= MOST_COLUMNS and dividing:
        assert parts == dividing[0]
    else:
        assert parts is None


@pytest.mark.parametrize(
    ("shape", "axes", "parts"),
    [
        ((3136, 768), (0,), 16),
        ((16, 196, 768), (0, 1), 16),
        ((3136, 12, 64), (0,), 16),
        ((2023, 768), (0,), 17),  # 7 · 17 · 17
        ((4096, 768), (0,), 16),
        ((4097, 768), (0,), None),  # XLA itself adds these up in two steps
        ((511, 768), (0,), None),
        ((2053, 768), (0,), None),  # prime
        ((768, 3136), (1,), None),  # along rows
        ((16, 768, 196), (0, 2), None),  # across both
        ((3136,), (0,), None),  # of one column
        ((), (), None),
    ],
)
def test_what_is_added_up_in_parts(shape: tuple[int, ...], axes: tuple[int, ...], parts: int | None) -> None:
    """Few rows of some columns, whatever dimensions they are made of."""
    assert parts_of(shape, axes) == parts


@given(data=st.data(), dims=st.integers(1, 3), seed=st.integers(0, 100))
def test_two_steps_are_one(data: st.DataObject, dims: int, seed: int) -> None:
    """In float64, to rounding."""
    shape = tuple(data.draw(st.integers(1, 12)) for _ in range(dims + data.draw(st.integers(1, 2))))
    rows = int(np.prod(shape[:dims]))
    parts = data.draw(st.sampled_from([count for count in range(1, rows + 1) if rows % count == 0]))
    x = np.random.default_rng(seed).standard_normal(shape)
    with jax.enable_x64(True):
        found = sum_in_two_steps(jnp.asarray(x), dims=dims, parts=parts)
    np.testing.assert_allclose(found, x.sum(axis=tuple(range(dims))), rtol=1e-12, atol=1e-12)


def test_narrow_floats_are_rounded_once() -> None:
    """Parts come to 257 or 273, which bfloat16 has not; all of them to 4,128, which it has."""
    x = np.ones((4096, 3), np.float32)
    x[::256] = 2.0
    x[0] = 18.0
    found = sum_in_two_steps(jnp.asarray(x, jnp.bfloat16), dims=1, parts=16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.full(3, 4128.0, np.float32))


def _lowered(platform: str, rows: int) -> str:
    """What a step that adds up columns becomes for a platform."""

    def step(total: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return total + jnp.sum(batch, axis=0), jnp.sum(total)

    shapes = jax.ShapeDtypeStruct((768,), "float32"), jax.ShapeDtypeStruct((rows, 768), "float32")
    compiled = autopar.parallelize(step, cluster=autopar.Cluster.local(jax.devices()[:1])).compile(*shapes)
    mesh = jax.sharding.AbstractMesh((1,), compiled.program.mesh.axis_names)
    jitted = jitted_step(compiled.program, mesh, frozenset())
    return str(export.export(jitted.function, platforms=[platform])(*shapes).mlir_module())


@pytest.mark.parametrize(("platform", "rows", "steps"), [("cuda", 3136, 2), ("cpu", 3136, 1), ("cuda", 8192, 1)])
def test_only_gpus_take_two_steps(platform: str, rows: int, steps: int) -> None:
    """And only where the rows are few; everything else of the step is as before."""
    text = _lowered(platform, rows)
    assert text.count("stablehlo.reduce") == steps + 1
    assert text.count("stablehlo.optimization_barrier") == steps - 1
