"""Evaluation beside training: the state stays where the training step's plan puts it, and nothing of it is moved."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.inter_op.placing import SMALL_BYTES
from autopar.runtime.distributed_array import RemoteArray
from tests.ray_cases import batch_of, create, loss_of, train_step, value

make = partial(create, 0)
OPTIONS = [
    pytest.param({"method": "zero3"}, id="mesh"),
    pytest.param({"stages": 2, "num_microbatches": 2}, id="stages"),
]


def evaluate(state: Any, batch: Any) -> Any:
    return {"loss": loss_of(state["params"], batch, state["key"])}


def predict(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


@functools.cache
def step_here(**options: Any) -> autopar.Parallelized:
    """Traced, planned and compiled once."""
    return autopar.parallelize(train_step, **options)


def trained(step: autopar.Parallelized) -> Any:
    state = step.init(make, batch_of(0))
    return step(state, batch_of(0))[0]


def here(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(jnp.asarray(leaf), jax.devices()[0]), tree)


@pytest.mark.parametrize(
    "options", [OPTIONS[0], pytest.param(*OPTIONS[1].values, id="stages", marks=pytest.mark.verify)]
)
def test_results_and_layouts(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        step = step_here(**options)
        state = trained(step)
        for function, tree, rows in (
            (evaluate, state, batch_of(1)),
            (predict, state["params"], batch_of(1)["x"]),
        ):
            like = autopar.parallelize(function, like=step)
            found = like(tree, rows)
            for ours, theirs in zip(
                jax.tree.leaves(found), jax.tree.leaves(jax.jit(function)(here(tree), rows)), strict=True
            ):
                np.testing.assert_allclose(value(ours), value(theirs), rtol=1e-11, atol=1e-12)
            assert like.last is not None and step.last is not None
            ours, theirs = like.last.plan, step.last.plan
            assert [stage.devices for stage in ours.stages] == [stage.devices for stage in theirs.stages]
            assert [stage.mesh for stage in ours.stages] == [stage.mesh for stage in theirs.stages]
            trained_layouts = dict(zip(theirs.in_paths, theirs.in_layouts, strict=True))
            for path, layout in zip(ours.in_paths, ours.in_layouts, strict=True):
                name = path.replace("layers", "state['params']") if function is predict else path
                if "params" in name:
                    assert layout == trained_layouts[name], name


@pytest.mark.parametrize("options", [pytest.param(*OPTIONS[0].values, id="mesh", marks=pytest.mark.verify), OPTIONS[1]])
def test_on_ray_nothing_of_the_state_is_fetched(
    cluster: autopar.Cluster, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, **options)
    state = trained(step)
    wanted = jax.jit(evaluate)(here(state), batch_of(1))["loss"]
    like = autopar.parallelize(evaluate, like=step)
    fetched: list[RemoteArray] = []
    fetch = RemoteArray.words
    monkeypatch.setattr(RemoteArray, "words", lambda self: (fetched.append(self), fetch(self))[1])
    found = like(state, batch_of(1))
    assert all(array.nbytes <= SMALL_BYTES for array in fetched), "but what every stage wants, as the key"
    del fetched[:]
    state, _ = step(state, batch_of(1))  # and training goes on with the same state
    assert fetched == []
    np.testing.assert_allclose(float(found["loss"]), float(wanted), rtol=1e-6)


def test_another_batch_size_and_a_step_that_is_planned_anew() -> None:
    step = autopar.parallelize(train_step, method="data_parallel")
    like = autopar.parallelize(predict, like=step)
    state = trained(step)
    for rows in (8, 16, 3):
        x = np.ones((rows, 16))
        np.testing.assert_allclose(
            np.asarray(like(state["params"], x)), np.asarray(predict(here(state["params"]), x)), rtol=1e-5, atol=1e-6
        )
    plan = step.plan(jax.eval_shape(make), batch_of(0), method="tensor_parallel")
    step.use(plan)
    state = trained(step)
    like(state["params"], np.ones((8, 16)))
    assert like.last is not None
    assert like.last.plan.mesh == plan.mesh


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"like": lambda x: x}, "is no parallelized step"),
        ({"method": "zero3"}, r"method= asks for others"),
        ({"mesh_shape": (8,), "stages": 1}, r"mesh_shape=, stages= asks for others"),
    ],
)
def test_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(autopar.PlanError, match=says):
        autopar.parallelize(evaluate, **{"like": autopar.parallelize(train_step), **options})


def test_a_step_without_a_plan_is_named() -> None:
    like = autopar.parallelize(evaluate, like=autopar.parallelize(train_step))
    with pytest.raises(autopar.PlanError, match="train_step, which like= names, has no plan yet; call its init"):
        like(make(), batch_of(0))


def test_a_function_that_has_no_such_stages() -> None:
    with jax.enable_x64(True):
        step = step_here(stages=2, num_microbatches=2)
        state = trained(step)
        like = autopar.parallelize(lambda params, x: x @ params[0]["w"], like=step)
        with pytest.raises(autopar.PlanError, match="runs in 2 stages, and this one has too few operators"):
            like(state["params"], np.ones((8, 16)))
