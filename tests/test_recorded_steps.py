"""Are steps on a real H100 or H200 what is foretold of them, by what was measured of the device and comes with the release?

``h100_steps.json`` and ``h200_steps.json`` hold what ``python -m benchmarks.one_device`` found on one, with date, driver and JAX:
seconds of a step by the clock, and the bytes of the compiled program.  Here the same plans are made again, without a GPU.
"""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.cost_model.collectives import Collective, collective_seconds
from autopar.cost_model.roofline import product_seconds
from autopar.errors import ClusterError
from autopar.plan import Plan
from autopar.products import square_product
from autopar.profile_file import profile_of_device
from benchmarks.models import build
from benchmarks.one_device import CASES, CHOICES, JIT
from benchmarks.ranking import REGRET_WANTED, TAU_WANTED, verdict

CLOSE = 0.25
PRESETS = {"h100": "p5.48xlarge", "h200": "h200"}
RECORDED = {
    device: json.loads((Path(__file__).parent / f"{device}_steps.json").read_text(encoding="utf-8"))
    for device in PRESETS
}
MOST_TOO_LOW = 0.05
"""Of memory.  XLA's compiler for H200s keeps the waves of a GELU, 12 arrays of a GPT, where that for H100s takes them again."""


def rows_of(device: str, case: str) -> list[dict[str, Any]]:
    return [row for row in RECORDED[device]["rows"] if row["case"] == case and row["name"] != JIT]


@functools.cache
def planned(device: str, case: str, choice: str) -> Plan:
    told = CASES[case]
    model = build(told.model, told.size, jnp.dtype(told.dtype))
    cluster = Cluster.preset(PRESETS[device]).with_measured_device().part((0,))
    step = autopar.parallelize(model.train_step, cluster=cluster, **CHOICES[choice])
    return step.plan(model.abstract_state(), model.abstract_batch(told.examples))


def foretold_and_clock(device: str, rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Seconds of the steps of some plans."""
    foretold = [planned(device, row["case"], row["name"]).step_seconds for row in rows]
    return foretold, [row["clock_seconds"] for row in rows]


@pytest.mark.verify
@pytest.mark.parametrize("device", PRESETS)
@pytest.mark.parametrize("case", ["gpt", "wide_resnet"])
def test_plans_took_the_time_and_the_memory_that_are_foretold(case: str, device: str) -> None:
    rows = rows_of(device, case)
    assert len(rows) >= 4
    foretold, clock = foretold_and_clock(device, rows)
    found = verdict(foretold, clock)
    assert found.tau is not None and found.pairs >= 5
    assert found.tau >= TAU_WANTED and found.regret <= REGRET_WANTED
    ratios = [said / seconds for said, seconds in zip(foretold, clock, strict=True)]
    assert all(1 - CLOSE <= ratio <= 1 + CLOSE for ratio in ratios), ratios
    assert abs(statistics.median(ratios) - 1) <= 0.15, ratios
    errors = [planned(device, case, row["name"]).peak_bytes / row["compiled_bytes"] - 1 for row in rows]
    assert all(-MOST_TOO_LOW <= error <= CLOSE for error in errors), errors


@pytest.mark.verify
@pytest.mark.parametrize("device", PRESETS)
def test_plans_of_an_lstm_come_in_the_order_of_the_clock(device: str) -> None:
    """Its weights, 1500 wide, XLA pads in every step of time, which nobody foretells: all take longer alike."""
    foretold, clock = foretold_and_clock(device, rows_of(device, "lstm"))
    found = verdict(foretold, clock)
    assert found.pairs >= 5
    assert (found.tau, found.regret) == (1.0, 1.0)
    assert all(0.6 <= said / seconds <= 1.0 for said, seconds in zip(foretold, clock, strict=True))


@pytest.mark.verify
def test_plans_of_a_vit_come_in_the_order_of_the_clock() -> None:
    """Microbatches too, whose sums of few rows are taken in two steps."""
    rows = rows_of("h100", "vit")
    assert len(rows) >= 4
    foretold, clock = foretold_and_clock("h100", rows)
    assert verdict(foretold, clock).tau == 1.0
    assert all(0.85 <= said / seconds <= 1.15 for said, seconds in zip(foretold, clock, strict=True))


@pytest.mark.verify
def test_a_mixture_of_experts_took_the_time_and_the_memory_that_are_foretold() -> None:
    rows = rows_of("h200", "moe")
    foretold, clock = foretold_and_clock("h200", rows)
    assert all(0.9 <= said / seconds <= 1.1 for said, seconds in zip(foretold, clock, strict=True))
    errors = [planned("h200", "moe", row["name"]).peak_bytes / row["compiled_bytes"] - 1 for row in rows]
    assert all(-MOST_TOO_LOW <= error <= CLOSE for error in errors), errors


@pytest.mark.verify
def test_the_memory_of_dropouts_is_that_of_their_masks() -> None:
    for row in rows_of("h100", "vit"):
        if row["name"].startswith("none"):
            assert planned("h100", "vit", row["name"]).peak_bytes == pytest.approx(row["compiled_bytes"], rel=0.03)


@pytest.mark.parametrize(("device", "name"), [("h100", "H100-SXM5-80GB"), ("h200", "H200-SXM-141GB")])
def test_what_comes_with_the_release_says_of_what_and_when(device: str, name: str) -> None:
    profile, recorded = profile_of_device(name), RECORDED[device]
    assert (profile.platform, profile.device_kind, profile.num_devices) == ("cuda", recorded["device"], 1)
    assert profile.measured_at.startswith(recorded["profile_date"]) and profile.jax_version == recorded["jax"]
    assert profile.host_copies is not None and profile.reductions is None


def test_one_accelerator_stands_for_all_of_a_host() -> None:
    cluster = Cluster.preset("p5.48xlarge")
    measured = cluster.with_measured_device()
    assert measured.devices_per_host == 8 and measured.profile is not None and measured.profile.num_devices == 1
    (mesh,) = measured.logical_mesh_shapes(1)
    prices = [collective_seconds(Collective.ALL_REDUCE, 1e8, ("data",), mesh, one) for one in (cluster, measured)]
    assert prices[0] == prices[1] > 0
    assert product_seconds(square_product(1e12), 1e9, "bfloat16", measured) == pytest.approx(1e12 / 9e14, rel=0.2)


@pytest.mark.verify
def test_a_step_is_planned_for_a_host_of_which_one_accelerator_was_measured() -> None:
    cluster, model = Cluster.preset("p5.48xlarge").with_measured_device(), build("mlp_nnx")
    plan = autopar.parallelize(model.train_step, cluster=cluster).plan(model.abstract_state(), model.abstract_batch())
    assert plan.num_devices == 8


def test_devices_that_nobody_measured_are_refused_by_name() -> None:
    with pytest.raises(
        ClusterError,
        match=r"nothing was measured of V100-SXM2-16GB, only of h100-sxm5-80gb, h200-sxm-141gb; measure on",
    ):
        Cluster.preset("p3.16xlarge").with_measured_device()
