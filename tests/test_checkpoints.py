"""Checkpoints: the state comes back bit by bit, in this process and on Ray, onto other plans, and by plain orbax."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import autopar
from tests.ray_cases import assert_equal, batch_of, create, train_step, value

make = partial(create, 0)


def trained(step: Any, steps: int) -> Any:
    state = step.init(make, batch_of(0))
    for number in range(steps):
        state, _ = step(state, batch_of(number))
    return state


def test_here_and_onto_another_plan(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        step = autopar.parallelize(train_step, method="zero3")
        state = trained(step, 2)
        checkpoints = autopar.Checkpoints(tmp_path)
        checkpoints.save(2, state, {"position": 2})
        checkpoints.close()
        other = autopar.parallelize(train_step, stages=2, num_microbatches=2)
        found = autopar.Checkpoints(tmp_path).restore(other, make, batch_of(0))
        assert found is not None
        assert (found.step, found.data) == (2, {"position": 2})
        assert_equal(found.state, state)
        ours, _ = other(found.state, batch_of(2))
        theirs, _ = step(state, batch_of(2))
        assert_equal(ours, theirs)


@pytest.mark.verify
@pytest.mark.parametrize("options", [{"method": "zero3"}, {"stages": 2, "num_microbatches": 2}], ids=["mesh", "stages"])
def test_on_ray_while_training_goes_on(cluster: autopar.Cluster, tmp_path: Path, options: dict[str, Any]) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, **options)
    state = trained(step, 2)
    at_two = jax.tree.map(value, state)
    checkpoints = autopar.Checkpoints(tmp_path)
    checkpoints.save(2, state)
    after, _ = step(state, batch_of(2))  # takes the memory of what is being saved over
    checkpoints.close()

    plain = ocp.CheckpointManager(tmp_path).restore(
        2, args=ocp.args.Composite(state=ocp.args.StandardRestore(jax.eval_shape(make)))
    )["state"]
    assert_equal(plain, jax.tree.map(jnp.asarray, trained(autopar.parallelize(train_step, stages=1), 2)))

    again = autopar.Checkpoints(tmp_path).restore(step, make, batch_of(0))
    assert again is not None
    for ours, theirs in zip(jax.tree.leaves(again.state), jax.tree.leaves(at_two), strict=True):
        np.testing.assert_array_equal(value(ours), theirs)
    repeated, _ = step(again.state, batch_of(2))
    for ours, theirs in zip(jax.tree.leaves(repeated), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(value(ours), value(theirs))

    here = autopar.Checkpoints(tmp_path).restore(autopar.parallelize(train_step, stages=1), make, batch_of(0))
    assert here is not None
    for ours, theirs in zip(jax.tree.leaves(here.state), jax.tree.leaves(at_two), strict=True):
        np.testing.assert_array_equal(value(ours), theirs)


def test_only_the_last_are_kept_and_dues(tmp_path: Path) -> None:
    checkpoints = autopar.Checkpoints(tmp_path, every_steps=2, keep=2)
    assert [checkpoints.due(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    for step in (2, 4, 6):
        checkpoints.save(step, {"x": jnp.ones(3) * step})
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "6"]
    assert autopar.Checkpoints(tmp_path).latest == 6
    assert autopar.Checkpoints(tmp_path / "none").latest is None


def test_another_model_is_refused(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        step = autopar.parallelize(train_step, stages=1)
        checkpoints = autopar.Checkpoints(tmp_path)
        checkpoints.save(1, {"params": jnp.ones(3)})
        checkpoints.close()
        with pytest.raises(autopar.CheckpointError, match="does not fit"):
            autopar.Checkpoints(tmp_path).restore(step, make, batch_of(0))


@pytest.mark.parametrize("options", [{"every_steps": 0}, {"every_seconds": -1.0}, {"keep": 0}])
def test_numbers_that_are_none(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(autopar.CheckpointError, match="above 0"):
        autopar.Checkpoints(tmp_path, **options)
