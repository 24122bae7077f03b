"""Plans that take longer but need no memory that is new to each call."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.curves import Curve
from autopar.intra_op.scratch import seconds_per_byte
from autopar.profile import Fresh
from tests.test_by_hand import train_step
from tests.test_profile import profile_of

NOTHING = Curve(((1.0, 1e-9), (1e9, 1e-9)))


def stepped(at_bytes: float, seconds: float) -> Fresh:
    """Scratch memory that costs nothing up to some bytes, and seconds beyond."""
    return Fresh(NOTHING, Curve(((1.0, 1e-9), (at_bytes, 1e-9), (at_bytes * 1.01, seconds), (1e9, seconds))))


def test_the_price_is_the_slope_down_the_step() -> None:
    fresh = Fresh(NOTHING, Curve(((10.0, 1.0), (20.0, 2.0), (21.0, 30.0), (40.0, 50.0))))
    assert seconds_per_byte(fresh, 40.0) == pytest.approx((50 - 2) / (40 - 20))
    assert seconds_per_byte(fresh, 21.0) == pytest.approx(28.0)
    assert seconds_per_byte(fresh, 15.0) is None


ROWS, WIDE, LAYERS = 64, 256, 4
PARAMS = [jax.ShapeDtypeStruct((WIDE, WIDE), "float32")] * LAYERS
BATCH = jax.ShapeDtypeStruct((ROWS, WIDE), "float32")


def step_with(fresh: Fresh | None, **options: Any) -> Any:
    cluster = Cluster.local(profile=profile_of(fresh=fresh))
    return autopar.parallelize(train_step, cluster=cluster, mesh_shape=(8,), batch_argnums=(1,), **options)


def test_a_slower_plan_is_taken_where_its_scratch_memory_costs_nothing() -> None:
    free = step_with(None).plan(PARAMS, BATCH).prediction
    limit, paid = 0.9 * free.memory.temp_bytes, 10 * free.step_seconds
    step = step_with(stepped(limit, paid))
    chosen = step.plan(PARAMS, BATCH).prediction
    assert chosen.memory.temp_bytes <= limit
    assert chosen.allocation_seconds < 1e-6
    assert free.step_seconds < chosen.step_seconds < free.step_seconds + paid / 2
    by_hand = step.with_options(method="data_parallel").plan(PARAMS, BATCH).prediction
    assert chosen.step_seconds < by_hand.step_seconds
    assert "memory budget" not in str(autopar.explain(step, PARAMS, BATCH))


@pytest.mark.parametrize("share", [0.01, 1.1])
def test_the_fastest_plan_stays_where_no_other_helps(share: float) -> None:
    """Above what it needs it costs nothing; far below it no plan is small enough."""
    free = step_with(None).plan(PARAMS, BATCH)
    limit = share * free.prediction.memory.temp_bytes
    chosen = step_with(stepped(limit, 10 * free.prediction.step_seconds)).plan(PARAMS, BATCH)
    assert chosen.stages == free.stages


def test_a_memory_budget_is_kept_as_well() -> None:
    """No byte more than the free plan holds: the lean one keeps it, or the free one stays."""
    free = step_with(None).plan(PARAMS, BATCH).prediction
    fresh = stepped(0.9 * free.memory.temp_bytes, 10 * free.step_seconds)
    chosen = step_with(fresh, memory_per_device=free.memory.total_bytes).plan(PARAMS, BATCH).prediction
    assert chosen.memory.total_bytes <= free.memory.total_bytes
