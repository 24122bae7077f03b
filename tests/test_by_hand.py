"""A plan by hand is taken where the exact account finds it faster than what the integer program found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import PlanError
from autopar.intra_op.task import TooSlow
from autopar.methods import HAND_MADE
from autopar.step_planner import StepPlanner


def train_step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        x = batch
        for weights in params:
            x = jnp.tanh(x @ weights)
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


ARGUMENTS = ([jax.ShapeDtypeStruct((64, 64), "float32")] * 3, jax.ShapeDtypeStruct((64, 64), "float32"))


def test_auto_is_never_predicted_slower_than_a_plan_by_hand() -> None:
    step = autopar.parallelize(train_step)
    auto = step.plan(*ARGUMENTS)
    for method in HAND_MADE:
        assert auto.step_seconds <= step.plan(*ARGUMENTS, method=method).step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("shape", [None, (8,), (2, 4)], ids=str)
def test_an_account_that_is_dearer_than_the_program_makes_experts_rivals(
    shape: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the integer program found is made to cost ten times what it believed; then some plan by hand wins."""
    plan_below = StepPlanner.plan_below

    def dearer(self: StepPlanner, count: int, *asked: Any) -> Any:
        planned = plan_below(self, count, *asked)
        assert not isinstance(planned, TooSlow)
        subject, plan, found = planned
        if self.demands.method == "auto":
            plan = replace(plan, prediction=replace(plan.prediction, communication_seconds=10 * plan.step_seconds))
        return subject, plan, found

    monkeypatch.setattr(StepPlanner, "plan_below", dearer)
    step = autopar.parallelize(train_step, mesh_shape=shape)
    chosen = step.plan(*ARGUMENTS)
    by_hand = list(plans_by_hand(step))
    assert chosen.method == "auto"
    assert shape is None or chosen.mesh.axis_sizes == shape
    assert chosen.step_seconds == pytest.approx(min(plan.step_seconds for plan in by_hand))
    assert any(chosen.in_layouts == plan.in_layouts for plan in by_hand)


def plans_by_hand(step: Any) -> Iterator[autopar.Plan]:
    """Of the methods that have a plan on the mesh asked for."""
    for method in HAND_MADE:
        with contextlib.suppress(PlanError):
            yield step.plan(*ARGUMENTS, method=method)
