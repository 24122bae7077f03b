"""Are measured prices read as they were measured, everywhere alike, and are bad profiles refused?"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import numpy as jnp

import autopar
from autopar import profile_file, timing
from autopar.cluster import Cluster, Mesh
from autopar.cost_model.collectives import Collective, collective_seconds, group_seconds, permute_seconds, wire_bytes
from autopar.cost_model.hlo import read_compiled
from autopar.cost_model.kernels import Kernel, kernel_cost
from autopar.cost_model.machine import make_machine
from autopar.cost_model.reshard import (
    AffineTable,
    LegTable,
    copy_seconds,
    move_seconds,
    outermost_of,
    reshard_table,
)
from autopar.cost_model.roofline import operator_seconds
from autopar.curves import Curve
from autopar.efforts import Effort
from autopar.errors import ClusterError
from autopar.graph.build import build_graph
from autopar.graph.merging import Merged
from autopar.inter_op.arranged import Arrangement
from autopar.inter_op.layers import layers
from autopar.inter_op.stages import StagePlanner
from autopar.measure import Measuring, measure, profile_rows
from autopar.measured_convolutions import CONVOLUTIONS
from autopar.measured_operations import OPERATIONS, Operation
from autopar.plan import Layout, Prediction, Schedule, Strategy
from autopar.products import ProductArray, ProductCurve, ProductOrder, UseCurve
from autopar.profile import (
    LONG_ROW,
    CollectiveCurve,
    Dispatch,
    Fresh,
    OperationRate,
    Profile,
    Reductions,
    WaitCurve,
)
from autopar.profile_file import default_path, find_profile, load_profile, save_profile
from autopar.schedule.instructions import Part
from autopar.schedule.reshard import Move, MoveKind, after_move, layouts_of, moves_between
from autopar.stage_tasks import loop_of, pipeline_task
from autopar.timing import LEAST_SECONDS, RationedTimer, Timer
from benchmarks.models import build

CURVE = Curve(((1000.0, 2e-5), (9000.0, 1e-4), (17000.0, 5e-4)))


def curve(latency_seconds: float, bend: float, bytes_per_second: float) -> Curve:
    """Flat until ``bend`` bytes, then a line, as of a real collective."""
    amounts = [bend * factor for factor in (0.1, 1.0, 10.0, 100.0)]
    return Curve(tuple((x, latency_seconds + max(x - bend, 0.0) / bytes_per_second) for x in amounts))


def profile_of(num_devices: int = 8, **changes: Any) -> Profile:
    kinds = [kind.value for kind in Collective]
    collectives = tuple(
        CollectiveCurve(kind, size, curve(1e-5 * size * (1 + number), 2000.0 * (1 + number), 1e9 / (size + number)))
        for number, kind in enumerate(kinds)
        for size in (2, 4, 8)
        if num_devices % size == 0
    )
    made = Profile(
        jax_version="0.0",
        platform="cpu",
        device_kind="cpu",
        num_devices=num_devices,
        machine="test",
        measured_at="2026-01-01T00:00:00+00:00",
        collectives=collectives,
        products=(ProductCurve("float32", 4, ProductOrder.PLAIN, Curve(((1e3, 1e-6), (1e6, 1e-4), (1e9, 5e-2)))),),
        uses=(UseCurve("float32", ProductOrder.PLAIN, ProductArray.RIGHT, ((4.0, 100.0, 5e-5), (64.0, 1000.0, 2e-2))),),
        elementwise=Curve(((8.0, 2e-7), (1e4, 1e-6), (1e7, 2e-3))),
    )
    return dataclasses.replace(made, **changes)


def local() -> Cluster:
    return Cluster.local(profile=profile_of())


# -------------------------------------------------------------------------------------------------------------- curves


def test_a_curve_goes_through_its_samples_and_straight_between_them() -> None:
    assert [CURVE.at(amount) for amount, _ in CURVE.samples] == [seconds for _, seconds in CURVE.samples]
    assert CURVE.at(5000.0) == pytest.approx(6e-5)
    assert CURVE.at(0.0) == CURVE.at(500.0) == 2e-5


def test_a_curve_goes_on_at_the_rate_of_its_last_segment() -> None:
    assert CURVE.at(25000.0) == pytest.approx(9e-4)


def test_noise_cannot_make_more_work_cheaper() -> None:
    noisy = Curve(((1.0, 5.0), (2.0, 3.0), (4.0, 7.0), (8.0, 6.0)))
    assert [noisy.at(x) for x in (1, 2, 3, 4, 8)] == [4, 4, 5.25, 6.5, 6.5]


def test_a_curve_that_ends_flat_goes_on_at_its_last_rate_but_no_faster_than_in_proportion() -> None:
    slow = Curve(((1.0, 5.0), (3.0, 6.0), (4.0, 6.0)))
    assert slow.at(6.0) == 7.0  # 5 to 6 over 2
    jump = Curve(((1.0, 1.0), (2.0, 9.0), (4.0, 8.0)))
    assert jump.at(4.0) == 8.5
    assert jump.at(8.0) == 2 * 8.5


def test_one_point_that_is_too_high_does_not_raise_all_beyond_it() -> None:
    straight, noisy = (Curve(((1.0, 1.0), (2.0, second), (3.0, 1.1), (4.0, 1.2), (5.0, 4.0))) for second in (1.0, 1.6))
    assert noisy.at(4.0) < 1.31 and noisy.at(5.0) == straight.at(5.0)


def test_a_single_point_goes_on_at_its_own_rate() -> None:
    assert Curve(((10.0, 2.0),)).at(20.0) == 4.0


_samples = st.lists(
    st.tuples(st.floats(1, 1e9), st.floats(1e-7, 1.0)), min_size=1, max_size=8, unique_by=lambda pair: pair[0]
)


@given(_samples, st.floats(0, 1e10), st.floats(0, 1e10))
def test_curves_rise_and_are_read_alike_one_by_one_and_together(
    samples: list[tuple[float, float]], one: float, other: float
) -> None:
    made = Curve(tuple(sorted(samples)))
    low, high = sorted((one, other))
    assert made.at(low) <= made.at(high) * (1 + 1e-12)
    np.testing.assert_allclose(made.at_all(np.array([one, other])), [made.at(one), made.at(other)], rtol=1e-9)


@pytest.mark.parametrize(
    "samples",
    [(), ((1.0, math.nan),), ((1.0, -1.0),), ((0.0, 1.0),), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 1.0), (1.0, 2.0))],
)
def test_bad_samples_are_refused(samples: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ClusterError, match="sample"):
        Curve(samples)


# --------------------------------------------------------------------------------------------------------------- files


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    save_profile(profile_of(), path)
    assert load_profile(path) == profile_of()
    assert load_profile(path) is load_profile(path)
    assert [found.name for found in path.parent.iterdir()] == ["profile.json"]


def broken(tmp_path: Path, change: Any) -> Path:
    path = tmp_path / "profile.json"
    save_profile(profile_of(), path)
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    return path


def put(*place: Any) -> Any:
    *way, last, value = place

    def change(stored: Any) -> None:
        for key in way:
            stored = stored[key]
        stored[last] = value

    return change


BAD = {
    "format": (put("format", "autopar-cluster"), "format is 'autopar-cluster'"),
    "version": (put("version", 13), "version is 13, this release reads 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"),
    "negative": (put("profile", "collectives", 1, "samples", 0, 1, -1e-5), r"collectives\[.*samples"),
    "nan": (put("profile", "elementwise", 0, 1, math.nan), "not complete JSON"),
    "text": (put("profile", "products", 0, "samples", 1, 0, "many"), r"products\[.*samples"),
    "unsorted": (put("profile", "elementwise", 0, 0, 1e9), r"profile\.elementwise: sample 1 has amount"),
    "empty": (put("profile", "elementwise", []), "elementwise"),
    "kind": (put("profile", "collectives", 0, "kind", "gossip"), r"collectives\[0\].kind is 'gossip'"),
    "kind in a world": (
        put("profile", "world_collectives", [{"kind": "gossip", "group_size": 2, "samples": [[1.0, 1.0]]}]),
        r"world_collectives\[0\].kind is 'gossip'",
    ),
    "shape": (put("profile", "products", 0, "shape", "round"), "shape"),
    "group": (put("profile", "collectives", 0, "group_size", 1), "group_size"),
    "twice": (put("profile", "collectives", 0, "group_size", 4), r"collectives\[1\]: .* is there twice"),
    "unknown": (put("profile", "latency", 3), "latency"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_profiles_are_refused_with_the_place(name: str, tmp_path: Path) -> None:
    change, said = BAD[name]
    path = broken(tmp_path, change)
    with pytest.raises(ClusterError, match=said) as refused:
        load_profile(path)
    assert str(path) in str(refused.value)


def test_cut_and_missing_profiles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ClusterError, match="cannot read profile"):
        load_profile(path)
    save_profile(profile_of(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ClusterError, match="cut short"):
        load_profile(path)


# ------------------------------------------------------------------------------------------------------------ clusters


DISPATCH = Dispatch(call_seconds=2e-4, message_seconds=1e-4, alone_speed=4.0)


FRESH = Fresh(Curve(((1e3, 1e-6), (1e6, 1e-3))), Curve(((1e3, 1e-7), (1e6, 1e-5))))
STREAMED = Curve(((8.0, 1e-7), (1e4, 4e-6), (1e7, 4e-3)))
REDUCTIONS = Reductions(short_row_seconds=2e-8, column_seconds_per_flop=3e-9)
RATES = (OperationRate("tanh", 5e-11), OperationRate("sort", 2e-8))


USED = {"dtype": "float32", "order": "plain", "array": "left"}
LOOPED = {"dtype": "float32"}
OF_VERSION_3, OF_VERSION_4 = ("turned_bytes_per_second",), ("convolutions", "waits")
OF_LATER_VERSIONS = ("exchanges", "world_collectives", "reductions", "host_copies", "cut_bytes_per_second")


def test_what_later_versions_brought_survives_its_file(tmp_path: Path) -> None:
    full = profile_of(
        streamed=STREAMED,
        fresh=FRESH,
        operations=RATES,
        exchanges=Curve(((1e3, 1e-4), (1e6, 1e-3))),
        world_collectives=(CollectiveCurve("all-reduce", 2, CURVE),),
        reductions=REDUCTIONS,
        host_copies=CURVE,
        cut_bytes_per_second=2e9,
    )
    save_profile(full, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == full


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        (1, ("streamed", "fresh", "operations", *OF_VERSION_3, *OF_VERSION_4, *OF_LATER_VERSIONS)),
        (2, (*OF_VERSION_3, *OF_VERSION_4, *OF_LATER_VERSIONS)),
        (3, (*OF_VERSION_4, *OF_LATER_VERSIONS)),
        (4, OF_LATER_VERSIONS),
        (5, OF_LATER_VERSIONS[1:]),
        (6, OF_LATER_VERSIONS[2:]),
        (8, OF_LATER_VERSIONS[3:]),
        (9, OF_LATER_VERSIONS[4:]),
    ],
)
def test_files_of_older_versions_are_read_without_it(version: int, lacks: tuple[str, ...], tmp_path: Path) -> None:
    def older(stored: Any) -> None:
        stored["version"] = version
        for name in lacks:
            del stored["profile"][name]

    assert load_profile(broken(tmp_path, older)) == profile_of()


def test_copies_that_cut_an_array_cost_what_was_measured_of_them(tmp_path: Path) -> None:
    slow = profile_of(turned_bytes_per_second=1e8, cut_bytes_per_second=2e8)
    save_profile(slow, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == slow
    cluster, mesh = local(), local().logical_mesh_shapes(1)[0]
    whole, cut = Layout(((), ())), Layout(((), mesh.axis_names))

    def seconds(move: Move, layout: Layout, profile: Profile | None = slow, outermost: int = 0) -> float:
        return copy_seconds(move, layout, 4e6, mesh, Cluster.local(profile=profile), outermost)

    gather = Move(MoveKind.ALL_GATHER, mesh.axis_names, 1)
    assert seconds(gather, cut) == pytest.approx(2 * 4e6 / 2e8)
    assert seconds(gather, cut, outermost=1) == 0.0
    assert seconds(gather, cut, None) == 2 * 4e6 / cluster.per_device_memory_bytes_per_second
    assert seconds(gather, cut, profile_of(turned_bytes_per_second=1e8)) == pytest.approx(2 * 4e6 / 1e8)
    scatter = Move(MoveKind.REDUCE_SCATTER, mesh.axis_names, 1)
    assert seconds(scatter, Layout(((), ()), mesh.axis_names)) == pytest.approx(2 * 4e6 / 2e8)
    piece = 4e6 / cluster.num_devices
    deal = Move(MoveKind.ALL_TO_ALL, mesh.axis_names, 0, 1)
    assert seconds(deal, Layout((mesh.axis_names, ()))) == pytest.approx(2 * piece / 2e8)
    back = Move(MoveKind.ALL_TO_ALL, mesh.axis_names, 1, 0)
    assert seconds(back, cut) == pytest.approx(2 * piece / 1e8)
    assert seconds(Move(MoveKind.ALL_REDUCE, mesh.axis_names), whole) == 0.0


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("streamed", [[2.0, 1.0], [1.0, 1.0]], r"profile\.streamed: sample 1"),
        ("fresh", {"outputs": [[1.0, 1.0]], "scratch": [[2.0, 1.0], [1.0, 1.0]]}, r"profile\.fresh\.scratch: sample 1"),
        ("fresh", {"outputs": [[1.0, 1.0]]}, "scratch"),
        ("operations", [{"primitive": "exp", "seconds_per_flop": 0.0}], "seconds_per_flop"),
        ("operations", [{"primitive": "exp", "seconds_per_flop": 1.0}] * 2, r"operations\[1\].*twice"),
        ("turned_bytes_per_second", 0.0, "turned_bytes_per_second"),
        ("reductions", {"short_row_seconds": 1.0, "column_seconds_per_flop": 0.0}, "column_seconds_per_flop"),
        ("reductions", {"column_seconds_per_flop": 1.0}, "short_row_seconds"),
        ("exchanges", [[1.0, -1.0]], "exchanges"),
        ("waits", [{"group_size": 2, "samples": [[2.0, 1.0], [1.0, 1.0]]}], r"waits\[0\]\.samples: sample 1"),
        ("waits", [{"group_size": 2, "samples": [[1.0, 1.0]]}] * 2, r"waits\[1\].*twice"),
        ("waits", [{"group_size": 1, "samples": [[1.0, 1.0]]}], "group_size"),
        ("convolutions", [{"dtype": "float32", "family": "round", "samples": [[1.0, 1.0]]}], "family"),
        ("uses", [{**USED, "samples": [[8, 4, 1.0], [2, 4, 1.0]]}], r"uses\[0\]\.samples: sample 1"),
        ("uses", [{**USED, "samples": [[8, 4, -1.0]]}], "uses"),
        ("uses", [{**USED, "samples": [[8, 4, 1.0]]}] * 2, r"uses\[1\].*twice"),
        ("uses", [{**USED, "array": "middle", "samples": [[8, 4, 1.0]]}], "array"),
        (
            "deep_products",
            [{"dtype": "float32", "order": "plain", "samples": [[8, 64, 1.0], [8, 64, 1.0]]}],
            r"deep_products\[0\]\.samples: sample 1",
        ),
        (
            "deep_products",
            [{"dtype": "float32", "order": "plain", "samples": [[8, 64, 1.0]]}] * 2,
            r"deep_products\[1\].*twice",
        ),
        (
            "convolutions",
            [{"dtype": "float32", "family": "dilated image", "samples": [[2.0, 1.0], [1.0, 1.0]]}],
            r"convolutions\[0\]\.samples: sample 1",
        ),
        (
            "convolutions",
            [{"dtype": "float32", "family": "dilated image", "samples": [[1.0, 1.0]]}] * 2,
            r"convolutions\[1\].*twice",
        ),
        ("looped_convolutions", [{**LOOPED, "samples": [[16, 16, 1.0]]}] * 2, r"looped_convolutions\[1\].*twice"),
        ("looped_convolutions", [{**LOOPED, "samples": [[16, 16, 1.0], [32, 64, 1.0]]}], "each with each"),
        ("looped_convolutions", [{**LOOPED, "samples": [[32, 16, 1.0], [16, 16, 1.0]]}], "ascending"),
        ("looped_convolutions", [{**LOOPED, "samples": [[16, 16, 0.0]]}], "looped_convolutions"),
    ],
)
def test_bad_figures_of_version_2_are_refused(field: str, value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=said):
        load_profile(broken(tmp_path, put("profile", field, value)))


def test_dispatch_survives_its_file_and_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile_of(dispatch=DISPATCH), path)
    assert load_profile(path).dispatch == DISPATCH
    stored = json.loads(path.read_text())
    del stored["profile"]["dispatch"]
    path.write_text(json.dumps(stored))
    assert load_profile(path) == profile_of()
    stored["profile"]["dispatch"] = {"call_seconds": 1e-4, "message_seconds": 1e-4, "alone_speed": 0.5}
    path.write_text(json.dumps(stored))
    with pytest.raises(ClusterError, match="alone_speed"):
        load_profile(path)


@pytest.mark.parametrize("changes", [{"call_seconds": 0.0}, {"message_seconds": math.nan}, {"alone_speed": 0.9}])
def test_dispatch_out_of_range_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ClusterError, match=next(iter(changes))):
        dataclasses.replace(DISPATCH, **changes)


def test_a_stage_is_priced_by_what_was_measured_on_its_machine() -> None:
    cluster = Cluster.local(profile=profile_of(dispatch=DISPATCH))
    for size in (1, 2, 4):
        part = cluster.part(range(size))
        assert part.profile is not None and part.profile.num_devices == size
        assert {one.group_size for one in part.profile.collectives} == {n for n in (2, 4) if n <= size}
        seconds = operator_seconds(1e9, 1e6, "float32", part, "dot_general")
        assert seconds == operator_seconds(1e9, 1e6, "float32", cluster, "dot_general")
    assert cluster.part(range(8)).profile is cluster.profile


def test_idle_neighbours_make_a_mesh_as_much_faster_as_was_measured() -> None:
    plain, meshes = Cluster.local(), ((0, 1), (2,))
    measured = plain.with_profile(profile_of(dispatch=DISPATCH))
    assert [one.max_speed for one in make_machine(measured, meshes).meshes] == [4.0, 4.0]
    assert make_machine(plain.with_profile(profile_of()), meshes) == make_machine(plain, meshes)
    too_much = dataclasses.replace(DISPATCH, alone_speed=100.0)  # noise: a device has no more than the machine
    bounded = make_machine(plain.with_profile(profile_of(dispatch=too_much)), meshes)
    assert bounded == make_machine(plain, meshes)


def layered_step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss_of(w: dict[str, jax.Array]) -> jax.Array:
        x = batch
        for name in sorted(w):
            x = jnp.tanh(x @ w[name])
        return jnp.mean(x**2)

    loss, gradient = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - g, state, gradient), loss


LAYERED_SHAPES = (
    dict.fromkeys("abcd", jax.ShapeDtypeStruct((64, 64), "float32")),
    jax.ShapeDtypeStruct((64, 64), "float32"),
)


def test_a_pipeline_pays_for_its_calls_and_messages() -> None:
    seconds = []
    for dispatch in (Dispatch(1e-9, 1e-9, 8.0), Dispatch(1.0, 1e-9, 8.0), Dispatch(1e-9, 1.0, 8.0)):
        cluster = Cluster.local(profile=profile_of(dispatch=dispatch))
        wanted = autopar.parallelize(stages=[[0], [1]], num_microbatches=2, schedule="gpipe", cluster=cluster)
        seconds.append(wanted(layered_step).plan(*LAYERED_SHAPES).step_seconds)
    free, calls, messages = seconds
    # Of a second each: the path has 3 calls forward and 3 back; messages of both microbatches travel side by side.
    assert calls - free >= 6
    assert messages - free == pytest.approx(2, abs=0.01)


def test_a_cluster_with_a_profile_is_another_cluster() -> None:
    plain, measured = Cluster.local(), local()
    assert measured != plain
    assert measured == plain.with_profile(profile_of())
    assert hash(measured) == hash(plain.with_profile(profile_of()))
    assert measured.with_profile(None) == plain


def test_profiles_of_other_devices_are_refused() -> None:
    with pytest.raises(ClusterError, match="measured on 4 devices at once"):
        Cluster.local(profile=profile_of(4))
    with pytest.raises(ClusterError, match="measured on cpu"):
        Cluster.preset("p4d.24xlarge").with_profile(profile_of())


def test_local_takes_the_profile_of_its_own_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AUTOPAR_PROFILE")
    assert Cluster.local().profile is None
    save_profile(profile_of(), default_path("cpu", "cpu", 8))
    assert tmp_path in default_path("cpu", "cpu", 8).parents
    assert Cluster.local().profile == profile_of()
    assert Cluster.local(profile=None).profile is None
    assert find_profile("cpu", "cpu", 4) is None


def test_the_environment_names_a_profile_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    save_profile(profile_of(), path)
    monkeypatch.setenv(profile_file.PLACE_VARIABLE, str(path))
    assert Cluster.local().profile == profile_of()
    assert Cluster.local(profile=path).profile == profile_of()
    assert find_profile("cpu", "cpu", 2) is None
    monkeypatch.setenv(profile_file.PLACE_VARIABLE, "none")
    assert Cluster.local().profile is None


# -------------------------------------------------------------------------------------------------------------- prices

MESH = Mesh(("data", "model"), (2, 4))


@pytest.mark.parametrize("kind", list(Collective))
@pytest.mark.parametrize("axes", [("data",), ("model",), ("data", "model")])
def test_collectives_take_their_seconds_from_their_curve(kind: Collective, axes: tuple[str, ...]) -> None:
    size = MESH.axis_size(*axes)
    found = profile_of().collective(kind.value, size)
    assert found is not None
    for full_bytes in (0.0, 1e3, 1e5, 1e8):
        expected = found.at(wire_bytes(kind, full_bytes, size))
        assert collective_seconds(kind, full_bytes, axes, MESH, local()) == expected
    groups = (tuple(range(4)), tuple(range(4, 8)))
    if kind is not Collective.PERMUTE and axes == ("model",):
        assert group_seconds(kind, 1e5, groups, local()) == collective_seconds(kind, 1e5, axes, MESH, local())


def test_permutes_by_pairs_take_the_curve_too() -> None:
    found = profile_of().collective("permute", 2)
    assert found is not None
    assert permute_seconds(1e6, ((0, 1), (1, 0), (2, 2)), local()) == found.at(1e6)
    assert permute_seconds(1e6, ((2, 2),), local()) == 0.0


def test_group_sizes_that_were_not_measured_take_the_nearest_by_ring_factor() -> None:
    profile = profile_of()
    by_size = {one.group_size: one.curve for one in profile.collectives if one.kind == "all-reduce"}
    assert profile.collective("all-reduce", 3) is by_size[4]  # 2/3 is nearer to 3/4 than to 1/2
    assert profile.collective("all-reduce", 6) is by_size[8]
    assert profile.collective("all-reduce", 64) is by_size[8]
    assert profile_of(collectives=()).collective("all-reduce", 2) is None


def test_what_was_not_measured_keeps_its_analytic_price() -> None:
    plain = Cluster.local()
    bare = plain.with_profile(profile_of(collectives=()))
    axes = ("data", "model")
    for kind in Collective:
        assert collective_seconds(kind, 1e5, axes, MESH, bare) == collective_seconds(kind, 1e5, axes, MESH, plain)
    assert operator_seconds(1e9, 0, "float64", local(), "dot_general") == operator_seconds(1e9, 0, "float64", plain)
    two_hosts = plain.replace(hosts=2, devices_per_host=4)
    measured = two_hosts.with_profile(profile_of(4))
    crossing = collective_seconds(Collective.ALL_REDUCE, 1e5, ("data",), MESH, measured)
    assert crossing == collective_seconds(Collective.ALL_REDUCE, 1e5, ("data",), MESH, two_hosts)
    inside = collective_seconds(Collective.ALL_REDUCE, 1e5, ("model",), MESH, measured)
    assert inside != collective_seconds(Collective.ALL_REDUCE, 1e5, ("model",), MESH, two_hosts)


def test_elementwise_kernels_cost_their_bytes_and_fused_ones_nothing() -> None:
    assert operator_seconds(10, 1e6, "float32", local()) == profile_of().elementwise.at(1e6)
    assert operator_seconds(0, 0, "float32", local()) == 0.0


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.booleans())
def test_memory_never_costs_less_for_more_bytes_or_for_streaming(one: float, other: float, streamed: bool) -> None:
    profile = profile_of(streamed=STREAMED)
    low, high = sorted((one, other))
    assert profile.memory_seconds(low, streamed=streamed) <= profile.memory_seconds(high, streamed=streamed)
    assert profile.memory_seconds(one, streamed=True) >= profile.memory_seconds(one, streamed=False)


def test_streamed_bytes_cost_what_was_measured_of_them() -> None:
    measured = Cluster.local(profile=profile_of(streamed=STREAMED))
    assert operator_seconds(10, 1e6, "float32", measured, streamed=True) == STREAMED.at(1e6)
    assert operator_seconds(10, 1e6, "float32", measured) == profile_of().elementwise.at(1e6)
    assert operator_seconds(10, 1e6, "float32", local(), streamed=True) == profile_of().elementwise.at(1e6)


def test_operations_run_at_their_own_rate_and_others_at_that_of_products() -> None:
    measured = Cluster.local(profile=profile_of(operations=RATES))
    assert operator_seconds(1e9, 1e3, "float32", measured, "tanh") == pytest.approx(5e-2)
    assert operator_seconds(1e9, 1e3, "float32", measured, "add") == operator_seconds(
        1e9, 1e3, "float32", local(), "add"
    )
    assert operator_seconds(1.0, 1e6, "float32", measured, "tanh") == profile_of().elementwise.at(
        1e6
    )  # memory outweighs


@pytest.mark.parametrize(
    ("axes", "shape", "row"),
    [
        ((1,), (64, 256), 256),
        ((0,), (64, 256), None),
        ((0, 2), (8, 16, 2), 2),
        ((1, 2), (8, 16, 2), 32),
        ((0, 1, 2), (8, 16, 2), 256),
        ((0,), (64, 1), 64),
        ((0, 1), (8, 16, 4), None),
    ],
)
def test_a_sum_takes_longer_where_its_elements_do_not_lie_in_long_rows(
    axes: tuple[int, ...], shape: tuple[int, ...], row: int | None
) -> None:
    rate = 1e-6  # so slow that memory does not count
    reductions = Reductions(short_row_seconds=2e-5, column_seconds_per_flop=3e-6)
    profile = profile_of(operations=(OperationRate("reduce_sum", rate),), reductions=reductions)
    cluster = Cluster.local(profile=profile)
    graph = build_graph(jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, axes))(jnp.zeros(shape)), platform="cpu")
    (operator,) = graph.operators
    elements = math.prod(shape)
    expected = elements * rate
    if row is None:
        expected = elements * reductions.column_seconds_per_flop
    elif row < LONG_ROW:
        expected += elements / row * reductions.short_row_seconds
    whole = Strategy(((),) * len(operator.rule.factors))
    arrays = ([graph.values[value] for value in values] for values in (operator.operands, operator.results))
    kernel = Kernel(operator, *map(tuple, arrays), reads=(0,), writes=(0,))
    mesh = cluster.logical_mesh_shapes()[0]
    assert kernel_cost(kernel, whole, mesh, cluster).seconds == pytest.approx(expected)


def test_a_sum_of_nothing_takes_no_time() -> None:
    profile = profile_of(operations=(OperationRate("reduce_sum", 1e-6),), reductions=REDUCTIONS)
    assert profile.reduction_seconds(0.0, "reduce_sum", 1) == 0.0
    step = autopar.parallelize(
        lambda x, empty: x + jnp.sum(empty, (1, 2)).sum(), cluster=Cluster.local(profile=profile)
    )
    shapes = jax.ShapeDtypeStruct((8,), "float32"), jax.ShapeDtypeStruct((8, 16, 0), "float32")
    assert math.isfinite(step.plan(*shapes).step_seconds)


def momentum_step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(state["w"])
    momentum = 0.9 * state["m"] + gradient
    return {"w": state["w"] - 0.1 * momentum, "m": momentum}, loss


MATRIX = jax.ShapeDtypeStruct((256, 64), "float32")
MOMENTUM_SHAPES = {"w": MATRIX, "m": MATRIX}, jax.ShapeDtypeStruct((64, 256), "float32")


def predicted(profile: Profile, **options: Any) -> Prediction:
    step = autopar.parallelize(cluster=Cluster.local(profile=profile), method="data_parallel", **options)
    return step(momentum_step).plan(*MOMENTUM_SHAPES).prediction


def test_an_update_in_place_is_cheaper_than_one_into_new_arrays_by_what_these_cost() -> None:
    profile = profile_of(fresh=FRESH)
    in_place, anew = predicted(profile), predicted(profile, donate_argnums=())
    arrays = 2 * FRESH.outputs.at(256 * 64 * 4)
    scratch = FRESH.scratch.at(anew.memory.temp_bytes) - FRESH.scratch.at(in_place.memory.temp_bytes)
    assert anew.step_seconds - in_place.step_seconds == pytest.approx(arrays + scratch, rel=0.01)
    assert arrays > 0.1 * in_place.step_seconds
    assert predicted(profile_of()).allocation_seconds == 0.0


@pytest.mark.parametrize("options", [{}, {"donate_argnums": ()}], ids=["in place", "anew"])
def test_the_compiled_program_pays_for_new_memory_as_the_compiler_counts_it(options: dict[str, Any]) -> None:
    profile = profile_of(fresh=FRESH)
    step = autopar.parallelize(momentum_step, cluster=Cluster.local(profile=profile), method="data_parallel", **options)
    program = read_compiled(compiled := step.compile(*MOMENTUM_SHAPES), Cluster.local(profile=profile))
    arrays = 2 * FRESH.outputs.at(256 * 64 * 4) if options else 0.0
    assert program.cost.allocation_seconds == pytest.approx(arrays + FRESH.scratch.at(program.memory.temp), rel=0.01)
    assert program.cost.allocation_seconds == pytest.approx(compiled.plan.prediction.allocation_seconds, rel=0.02)
    nothing_measured = Cluster.local(profile=profile_of())
    assert read_compiled(compiled, nothing_measured).cost.allocation_seconds == 0.0


def test_explanations_say_what_new_memory_costs() -> None:
    step = autopar.parallelize(cluster=Cluster.local(profile=profile_of(fresh=FRESH)), method="data_parallel")(
        momentum_step
    )
    told = autopar.explain(step, *MOMENTUM_SHAPES)
    time = told.time
    assert time.allocation_seconds > 0
    assert time.step_seconds == pytest.approx(
        time.compute_seconds + time.communication_seconds + time.allocation_seconds
    )
    assert "for new memory" in told.verdict


def test_the_update_streams_and_the_passes_do_not() -> None:
    near, streamed = predicted(profile_of()), predicted(profile_of(streamed=STREAMED))
    assert streamed.update_seconds > 1.5 * near.update_seconds
    passes = [one.compute_seconds - one.update_seconds for one in (near, streamed)]
    assert passes[0] == pytest.approx(passes[1])


def test_executables_of_a_pipeline_pay_for_new_accumulators_and_not_for_the_state() -> None:
    def allocation_seconds(profile: Profile) -> dict[Part, float]:
        cluster = Cluster.local(profile=profile)
        wanted = autopar.parallelize(layered_step, stages=[[0], [1]], num_microbatches=2, cluster=cluster)
        subject, _, _ = wanted.records(*LAYERED_SHAPES)
        task = pipeline_task(subject, loop := loop_of(subject), cluster, wanted.demands, lambda message: None)
        cuts = layers(loop, task.state_pairs, at_most=4)
        found = StagePlanner(task).plan(Arrangement((cuts[1],), ((0,), (1,)), Schedule.ONE_F_ONE_B))
        return {part: cost.allocation_seconds for (part, _), cost in found.costs[0].executables.items()}

    seconds = allocation_seconds(profile_of(fresh=FRESH))
    assert seconds[Part.BEFORE] == 2 * FRESH.outputs.at(64 * 64 * 4)  # the accumulators of two matrices
    assert seconds[Part.AFTER] == 0.0  # which the update reads, and writes over the state
    assert not any(allocation_seconds(profile_of()).values())


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("sizes", [(8,), (2, 4), pytest.param((2, 2, 2), marks=pytest.mark.verify)])
def test_the_reshard_table_adds_up_the_moves_at_any_size(sizes: tuple[int, ...], combined: bool) -> None:
    mesh = Mesh(("data", "model", "extra")[: len(sizes)], sizes)
    shape = (16, 24)
    layouts = list(layouts_of(shape, mesh, partial=True))
    table = reshard_table(shape, mesh, local(), Merged.ALL if combined else Merged.NONE)
    assert isinstance(table, LegTable)
    assert isinstance(reshard_table(shape, mesh, Cluster.local()), AffineTable)
    for array_bytes in (64.0, 1e5, 3e7):
        found = table.between(layouts, layouts, array_bytes)
        for a in range(0, len(layouts), 5):
            for b in range(0, len(layouts), 3):
                expected = _way_seconds(shape, layouts[a], layouts[b], array_bytes, mesh, combined)
                assert found[a, b] == pytest.approx(expected, rel=1e-9, abs=1e-15)


def _way_seconds(
    shape: tuple[int, ...], source: Layout, target: Layout, array_bytes: float, mesh: Mesh, combined: bool
) -> float:
    total, layout = 0.0, source
    for move in moves_between(shape, source, target, mesh):
        joins = combined and move.kind.name == "ALL_REDUCE"  # all that XLA:CPU combines
        total += move_seconds(move, layout, array_bytes, mesh, local(), joins=joins)
        total += copy_seconds(move, layout, array_bytes, mesh, local(), outermost_of(shape))
        layout = after_move(layout, move, mesh)
    return total


@pytest.mark.parametrize(
    "waits",
    [pytest.param((), marks=pytest.mark.verify), (WaitCurve(8, Curve(((1e-6, 1e-5), (1e-2, 1e-3)))),)],
    ids=["", "waits"],
)
def test_a_plan_on_measured_prices_agrees_with_its_program(waits: tuple[WaitCurve, ...]) -> None:
    model = build("mlp_nnx")
    cluster = Cluster.local(profile=profile_of(waits=waits))
    found = autopar.verify_plan(model.train_step, model.abstract_state(), model.abstract_batch(), cluster=cluster)
    assert found.agrees, str(found)
    said = next(figure for figure in found.figures if figure.what == "communication")
    assert said.predicted == pytest.approx(said.compiled, rel=0.02)


# ----------------------------------------------------------------------------------------------------------- measuring


@pytest.mark.verify
def test_everything_is_measured_on_all_devices() -> None:
    effort = Effort(
        full_bytes=(1 << 12, 1 << 16), sides=(16, 32), dtypes=("float32",), array_bytes=(1 << 12, 1 << 20),
        fresh_bytes=(1 << 16, 1 << 20), seconds=0.0, least_runs=2, streamed_bytes=1 << 21, operations=OPERATIONS[:1],
        copied_shape=(32, 64), convolutions=CONVOLUTIONS[:2], image_sides=(4, 8), work_sides=(8, 32),
        world_bytes=(1 << 12,), large_side=32, uses=(2, 8), deep_sides=(4,), depth=64, looped_features=(2, 4),
    )  # fmt: skip
    said: list[str] = []
    profile = measure(effort, said.append)
    assert (profile.platform, profile.num_devices) == ("cpu", 8)
    kinds = {(one.kind, one.group_size) for one in profile.collectives}
    assert kinds == {(kind.value, size) for kind in Collective for size in (2, 4, 8)}
    for one in profile.collectives:
        expected = [wire_bytes(Collective(one.kind), size, one.group_size) for size in effort.full_bytes]
        assert [amount for amount, _ in one.curve.samples] == expected
    assert {(one.dtype, one.order) for one in profile.products} == {("float32", order) for order in ProductOrder}
    assert {(one.order, one.array) for one in profile.uses} == set(itertools.product(ProductOrder, ProductArray))
    assert all([uses for uses, _, _ in one.samples] == list(effort.uses) for one in profile.uses)
    assert {one.order for one in profile.deep_products} == set(ProductOrder)
    assert all([side for side, _, _ in one.samples] == list(effort.deep_sides) for one in profile.deep_products)
    assert [amount for amount, _ in profile.elementwise.samples] == [8.0, 2.0 * (1 << 12), 2.0 * (1 << 20)]
    assert profile.streamed is not None and profile.fresh is not None
    assert len(profile.streamed.samples) == len(profile.elementwise.samples)
    assert [amount for amount, _ in profile.fresh.outputs.samples] == list(effort.fresh_bytes)
    rates = {one.primitive: one.seconds_per_flop for one in profile.operations}
    assert set(rates) == {"exp", "exp2"}
    assert profile.reductions is not None
    assert [one.family for one in profile.convolutions] == [one.family for one in effort.convolutions]
    assert all(len(one.curve.samples) == len(effort.image_sides) for one in profile.convolutions)
    (looped,) = profile.looped_convolutions
    assert [sample[:2] for sample in looped.samples] == list(itertools.product((2, 4), repeat=2))
    assert [one.group_size for one in profile.waits] == [2, 4, 8]
    for rate in (profile.turned_bytes_per_second, profile.cut_bytes_per_second):
        assert rate is not None and rate > 0
    assert "all-reduce of 4 KiB among 2" in said
    assert {(one.kind, one.group_size) for one in profile.world_collectives} == kinds
    assert Cluster.local(profile=profile).profile is profile


def test_costly_operations_take_longer_than_cheap_ones() -> None:
    """Sorting an element takes some hundred times as long as a division: an order that no noise turns round."""
    chosen = tuple(one for one in OPERATIONS if one.primitive in ("div", "sort"))
    bench = Measuring(jax.devices()[:1], dataclasses.replace(LEAST, least_runs=3, operations=chosen), print)
    flops = {one.primitive: one.flops(one.elements) for one in chosen}
    rates = {one.primitive: one.seconds_per_flop for one in bench.operations() if one.primitive in flops}
    assert rates["sort"] * flops["sort"] > 5 * rates["div"] * flops["div"]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.primitive)
def test_operations_are_those_they_are_named_after_and_can_be_repeated(operation: Operation) -> None:
    x = jnp.linspace(0.1, 0.9, 1024, dtype=jnp.float32)
    traced = jax.make_jaxpr(operation.apply)(x)
    assert f" {operation.primitive}" in str(traced)
    for _ in range(operation.trips):
        x = operation.apply(x)
    assert x.shape == (1024,) and bool(jnp.all(jnp.isfinite(x)))
    assert float(jnp.max(jnp.abs(x))) > 1e-30  # no denormal numbers, which are slow


NEW_MEMORY = """
import dataclasses, jax
from autopar.measure import Measuring
from tests.test_profile import LEAST
effort = dataclasses.replace(LEAST, fresh_bytes=(1 << 26,), least_runs=5)
print(Measuring(jax.devices()[:1], effort, lambda what: None).fresh().outputs.at(1 << 26))
"""


@pytest.mark.verify
def test_new_memory_costs_more_than_memory_that_is_there() -> None:
    """64 MiB that are mapped and cleared page by page take longer than to write over them: a fact that no noise hides."""
    given_back = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    environment = {**os.environ, **given_back}
    command = [sys.executable, "-c", NEW_MEMORY]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert float(ran.stdout) > 1e-3  # new scratch would be hidden by loops that tests leave unoptimized


def test_what_costs_nothing_is_shown_as_free() -> None:
    free = Curve(((1e3, LEAST_SECONDS), (1e6, LEAST_SECONDS)))
    shown = {
        what: rate for what, _, rate in profile_rows(profile_of(fresh=Fresh(Curve(((1e3, 1e-6), (1e6, 1e-3))), free)))
    }
    assert shown["new arrays"] == "1.00 GB/s"
    assert shown["new scratch memory"] == "free"


def test_what_new_memory_cost_when_it_was_given_back_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile_of(fresh=FRESH), path)
    assert load_profile(path).fresh == FRESH
    stored = json.loads(path.read_bytes())
    stored["version"] = 7
    path.write_text(json.dumps(stored))
    assert load_profile(path) == profile_of()


LEAST = Effort((1 << 12,), (16,), ("float32",), (1 << 12,), (1 << 12,), seconds=0.0, least_runs=1)


@pytest.mark.parametrize(("runs", "seconds"), [(0, 1.0), (1, math.nan), (1, math.inf), (1, -1.0)])
def test_no_effort_at_all_is_refused(runs: int, seconds: float) -> None:
    with pytest.raises(ClusterError, match="one run or more"):
        Timer(seconds, runs)


def test_a_clock_that_stands_still_gives_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 1.0)
    timer = Timer(0.0, 1)
    figures = [timer.least(int), timer.difference(int, int, extra=1000), *timer.typical(int, int)]
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)


def test_figures_are_the_least_the_median_the_difference_or_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def taking(*seconds: float) -> Callable[[], None]:
        left = iter((0.0, *seconds))  # the first call warms up

        def call() -> None:
            now[0] += next(left)

        return call

    assert Timer(0.0, 3).least(taking(3.0, 1.0, 2.0)) == 1.0
    assert Timer(0.0, 3).typical(taking(3.0, 1.0, 2.0), taking(9.0, 9.0, 4.0)) == [2.0, 9.0]
    assert Timer(0.0, 3).difference(taking(3.0, 1.0, 2.0), taking(6.0, 5.0, 7.0), extra=2) == 2.0
    # Run by run: 3, 1 and 4 longer, though the medians, 2 and 6, differ by 4.
    assert Timer(0.0, 3).waiting(taking(1.0, 9.0, 2.0), taking(4.0, 10.0, 6.0)) == (2.0, 3.0)
    assert Timer(0.0, 1).difference(taking(3.0), taking(3.0), extra=2) == 1.0  # a bound where noise hides the rest


def test_rationed_work_takes_its_processor_time_and_unstopped_work_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a core: calls that are stopped now and then, or not at all."""
    clock, spent = [0.0], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing.time, "process_time", lambda: spent[0])

    def taking(*runs: tuple[float, float]) -> Callable[[], None]:
        left = iter(((0.0, 0.0), *runs))  # the first call warms up

        def call() -> None:
            seconds, processor_seconds = next(left)
            clock[0] += seconds
            spent[0] += processor_seconds

        return call

    rationed = RationedTimer(0.0, 3, 0.5)
    # The first two runs were not stopped, the last one was for both of them.
    stopped = (1.0, 1.0), (1.0, 1.0), (4.0, 1.0)
    assert rationed.least(taking(*stopped)) == pytest.approx(2.0)
    assert rationed.typical(taking(*stopped), taking(*stopped)) == pytest.approx([2.0, 2.0])
    longer = (9.0, 3.0), (3.0, 3.0), (6.0, 3.0)
    assert rationed.difference(taking(*stopped), taking(*longer), extra=2) == pytest.approx(2.0)
    # Of threads that wait for one that was stopped.
    assert rationed.waiting(taking(*stopped), taking(*longer)) == pytest.approx((2.0, 4.0))
    assert rationed.waiting(taking((1.0, 0.1), (5.0, 0.1), (3.0, 0.1)), taking(*stopped))[0] == pytest.approx(3.0)
    # Mostly waiting: nothing was stopped.
    waiting = (3.0, 0.1), (1.0, 0.1), (2.0, 0.1)
    assert rationed.least(taking(*waiting)) == pytest.approx(1.0)
    assert rationed.processor_seconds(taking(*waiting)) == pytest.approx(0.1)
