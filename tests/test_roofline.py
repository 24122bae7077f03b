"""The roofline: both roofs, sharing, and monotonicity."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster, DeviceKind, Link, Platform
from autopar.cost_model.roofline import operator_seconds
from autopar.errors import ClusterError

DEVICE = DeviceKind("toy", Platform.CPU, {"float32": 1e12, "float64": 5e11}, 1 << 30, 1e11)
CLUSTER = Cluster("toy", 1, 8, DEVICE, Link(0, 1e9), Link(0, 1e9))
amounts = st.floats(0, 1e18)


def test_both_roofs() -> None:
    assert operator_seconds(2e12, 1e10, "float32", CLUSTER) == 2.0
    assert operator_seconds(1e11, 3e11, "float32", CLUSTER) == 3.0
    assert operator_seconds(2e12, 0, "float64", CLUSTER) == 4.0
    assert operator_seconds(0, 0, "float32", CLUSTER) == 0.0


def test_unlisted_dtype_runs_at_the_slowest_listed_speed() -> None:
    assert operator_seconds(1e12, 0, "int32", CLUSTER) == operator_seconds(1e12, 0, "float64", CLUSTER)


@pytest.mark.parametrize(("flops", "size"), [(1e12, 0.0), (0.0, 1e12)])
def test_devices_that_share_a_machine_are_slower(flops: float, size: float) -> None:
    shared = CLUSTER.replace(compute_shared_by=8)
    assert operator_seconds(flops, size, "float32", shared) == 8 * operator_seconds(flops, size, "float32", CLUSTER)


@pytest.mark.parametrize(("flops", "size"), [(-1.0, 0.0), (0.0, -1.0), (math.nan, 0.0), (0.0, math.nan)])
def test_nonsense_is_refused(flops: float, size: float) -> None:
    with pytest.raises(ClusterError, match="0 or more"):
        operator_seconds(flops, size, "float32", CLUSTER)


@settings(derandomize=True, deadline=None)
@given(amounts, amounts, amounts, amounts)
def test_more_work_never_takes_less(flops: float, size: float, more_flops: float, more_bytes: float) -> None:
    least = operator_seconds(flops, size, "float32", CLUSTER)
    assert operator_seconds(flops + more_flops, size + more_bytes, "float32", CLUSTER) >= least
