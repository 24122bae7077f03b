"""Clusters as they are: 3, 5 and 6 devices, odd numbers of hosts, links of different speed, two kinds of device."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cluster import Cluster, Link, Mesh
from autopar.cost_model.collectives import Collective, group_seconds, permute_seconds
from autopar.cost_model.machine import make_machine, message_load
from autopar.cost_model.transfers import cheapest_transfer, transfer_seconds
from autopar.errors import ClusterError
from autopar.homes import devices_here
from autopar.inter_op.sites import fewer_devices, host_orders, shares_of, split_evenly, stage_sizes
from autopar.pipeline_shape import counts_of
from autopar.plan import Layout
from autopar.schedule.cross_mesh import Placement
from benchmarks.models import build
from tests.pipeline_enumerator import cluster_of, mlp
from tests.toy_runs import eight_slow_devices, precision, reference, run

EQUAL = 1e-9


def slow_devices(count: int, hosts: int = 1) -> Cluster:
    """The first of this process's devices, so slow that a toy is worth cutting up."""
    cluster = Cluster.local(jax.devices()[:count])
    return cluster.replace(
        device=eight_slow_devices().device, hosts=hosts, devices_per_host=count // hosts, compute_shared_by=1
    )


def check(name: str, cluster: Cluster, **options: object) -> autopar.Plan:
    """Two steps in float64 have the numbers of ``jax.jit``; returns the plan."""
    with precision(jnp.float64):
        model = build(name, dtype=jnp.float64)
        step = autopar.parallelize(cluster=cluster, **options)(model.train_step)
        state = step.init(model.make_state, model.abstract_batch())
        found, wanted = run(model, step, state, 2), reference(name, jnp.float64, 2)
        for path, value in wanted.state.items():
            np.testing.assert_allclose(found.state[path], value, rtol=EQUAL, atol=EQUAL, err_msg=path)
        for one, other in zip(found.metrics, wanted.metrics, strict=True):
            for path, value in other.items():
                np.testing.assert_allclose(one[path], value, rtol=EQUAL, atol=EQUAL, err_msg=path)
        return step.last.plan


@pytest.mark.parametrize(
    "count", [pytest.param(3, marks=pytest.mark.verify), 5, pytest.param(6, marks=pytest.mark.verify)]
)
def test_a_step_on_so_many_devices_has_the_numbers_of_one(count: int) -> None:
    check("mlp_nnx", slow_devices(count), method="intra_op")


@pytest.mark.parametrize(
    ("count", "hosts", "stages", "sizes"),
    [
        pytest.param(3, 1, 2, {1, 2}, marks=pytest.mark.verify),
        pytest.param(5, 1, 2, None, marks=pytest.mark.verify),
        pytest.param(6, 2, 3, None, marks=pytest.mark.verify),
        pytest.param(3, 3, 3, {1}, marks=pytest.mark.verify),
    ],
)
def test_pipelines_on_so_many_devices_have_the_numbers_of_one(
    count: int, hosts: int, stages: int, sizes: set[int] | None
) -> None:
    plan = check("mlp_nnx", slow_devices(count, hosts), stages=stages)
    assert len(plan.stages) == stages
    assert sizes is None or {len(stage.devices) for stage in plan.stages} <= sizes


@pytest.mark.parametrize(
    ("method", "count"),
    [
        pytest.param("data_parallel", 3, marks=pytest.mark.verify),
        ("zero3", 6),
        ("tensor_parallel", 3),
        *(
            pytest.param(method, count, marks=pytest.mark.verify)
            for method, count in (("data_parallel", 6), ("zero3", 3), ("tensor_parallel", 6), ("inter_op", 3))
        ),
    ],
)
def test_no_method_refuses_so_many_devices(method: str, count: int) -> None:
    check("mlp_nnx", slow_devices(count), method=method)


@pytest.mark.verify
def test_hand_made_stages_are_spread_as_evenly_as_hosts_allow() -> None:
    plan = check("mlp_nnx", slow_devices(5), stages=2, method="zero2")
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2), (3, 4)]


@pytest.mark.parametrize(
    "options", [{"method": "zero3"}, pytest.param({"stages": 2, "num_microbatches": 2}, marks=pytest.mark.verify)]
)
def test_the_devices_are_the_users(options: dict[str, Any]) -> None:
    chosen = jax.devices()[6:2:-1][:3]
    cluster = Cluster.local(chosen).replace(device=eight_slow_devices().device)
    model = build("mlp_nnx")
    step = autopar.parallelize(cluster=cluster, **options)(model.train_step)
    state, _ = step(step.init(model.make_state, model.abstract_batch()), model.make_batch(model.batch_size))
    used = {device for leaf in jax.tree.leaves(state) for device in leaf.devices()}
    assert used == set(chosen) and cluster.device_ids == (6, 5, 4)
    with pytest.raises(ClusterError, match=r"has the JAX device 9, and this process has \[0, 1, 2, 3, 4, 5, 6, 7\]"):
        devices_here(cluster.replace(device_ids=(6, 5, 9)))
    with pytest.raises(ClusterError, match=r"device_ids of cluster .* for 3 devices; give one for each"):
        cluster.replace(device_ids=(6, 5, 5))


@pytest.mark.verify
def test_four_of_five_devices_where_nothing_is_cut_by_five(tmp_path: Path) -> None:
    plan = check("mlp_nnx", slow_devices(5))
    assert not plan.is_pipeline and plan.num_devices == 5
    assert plan.stages[0].devices == (0, 1, 2, 3) and plan.mesh.size == 4
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    model = build("mlp_nnx")
    step = autopar.parallelize(model.train_step, cluster=slow_devices(5))
    free, asked = (
        step.plan(model.abstract_state(), model.abstract_batch(), method=method) for method in ("auto", "zero2")
    )
    assert free.step_seconds < asked.step_seconds
    assert "4 of 5 in use" in str(autopar.explain(step, model.abstract_state(), model.abstract_batch()))


@pytest.mark.verify
@pytest.mark.parametrize("options", [{}, {"stages": 2, "num_microbatches": 2}])
def test_three_hosts_on_ray(local_ray: None, options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        cluster = Cluster.ray(None, hosts=3, devices_per_host=1)
    try:
        plan = check("mlp_nnx", cluster.replace(device=eight_slow_devices().device, compute_shared_by=1), **options)
    finally:
        cluster.close()
    assert plan.num_devices == 3 and (plan.is_pipeline or len(plan.devices_of(0)) == 2)


# ------------------------------------------------------------------------------------------------------------ links

NEAR, FAR = Link(1e-5, 1e9), Link(1e-3, 1e5)
RACKS = {(0, 2): NEAR, (1, 3): NEAR}


def racks(hosts: int = 4) -> Cluster:
    """Hosts of one device; even ones are near each other, and odd ones."""
    return cluster_of(hosts, 1, network=1.0).replace(network_link=FAR, host_links=RACKS)


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    cluster, megabyte = racks(), 1e6
    near, across, all_round = (
        group_seconds(Collective.ALL_GATHER, megabyte, (group,), cluster) for group in ((0, 2), (0, 1), (0, 1, 2, 3))
    )
    assert near == pytest.approx(NEAR.latency_seconds + megabyte / 2 / NEAR.bytes_per_second)
    assert across == pytest.approx(FAR.latency_seconds + megabyte / 2 / FAR.bytes_per_second)
    assert all_round == pytest.approx(3 * FAR.latency_seconds + megabyte * 3 / 4 / FAR.bytes_per_second)
    both = group_seconds(Collective.ALL_GATHER, megabyte, ((0, 2), (1, 3)), cluster)
    assert both == pytest.approx(near)


def test_an_exchange_loads_every_pair_of_hosts() -> None:
    """Each of four devices sends a third of three quarters to each other one: to the far ones at their links' speed."""
    seconds = group_seconds(Collective.ALL_TO_ALL, 4e6, ((0, 1, 2, 3),), racks())
    assert seconds == pytest.approx(2 * FAR.latency_seconds + NEAR.latency_seconds + 1e6 / FAR.bytes_per_second)
    permuted = permute_seconds(1e6, ((0, 2), (1, 3), (2, 0)), racks())
    assert permuted == pytest.approx(NEAR.latency_seconds + 1e6 / NEAR.bytes_per_second)


def test_messages_use_the_link_of_their_hosts() -> None:
    cluster = racks()
    mesh = Mesh(("data",), (1,))
    whole = Layout(((),))

    def seconds(source: int, target: int) -> float:
        ends = (Placement(whole, mesh, (device,)) for device in (source, target))
        return transfer_seconds(cheapest_transfer((1000,), 1000, *ends, cluster), cluster)

    assert seconds(0, 2) == pytest.approx(NEAR.latency_seconds + 1e6 / NEAR.bytes_per_second)
    assert seconds(0, 1) == pytest.approx(FAR.latency_seconds + 1e6 / FAR.bytes_per_second)
    machine = make_machine(cluster, [(device,) for device in range(4)])
    load = message_load([(0, 1, 1e6), (0, 2, 1e6)], cluster)
    assert load.latency_seconds == FAR.latency_seconds
    slowest = max(size / machine.units_per_second[resource] for resource, size in load.bytes_on)
    assert slowest == pytest.approx(1e6 / FAR.bytes_per_second)
    cards = {str(resource): size for resource, size in load.bytes_on if resource.peer < 0}
    assert cards == {"network out 0 of host 0": 2e6, "network in 0 of host 1": 1e6, "network in 0 of host 2": 1e6}


def test_orders_of_hosts() -> None:
    assert host_orders(cluster_of(8, 2, network=1e9), 1e3) == [tuple(range(8))]
    found = host_orders(racks(), 1e3)
    assert found[0] == (0, 2, 1, 3) and len(found) == 3  # of 24, each is like eight: hosts, and pairs, may be exchanged
    many = host_orders(racks(8), 1e3)
    assert len(many) <= 24 and all(sorted(order) == list(range(8)) for order in many)
    assert {abs(many[0].index(0) - many[0].index(2)), abs(many[0].index(1) - many[0].index(3))} == {1}


def test_the_order_of_hosts_is_in_the_plan(tmp_path: Path) -> None:
    cluster = slow_devices(4, hosts=4).replace(network_link=Link(1e-3, 1e5), host_links=RACKS)
    plan = check("mlp_nnx", cluster, stages=[[0, 2], [1, 3]], num_microbatches=2)
    assert [stage.devices for stage in plan.stages] == [(0, 2), (1, 3)]
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    model = build("mlp_nnx", dtype=jnp.float32)
    free = autopar.parallelize(model.train_step, cluster=cluster, num_microbatches=2)
    step_seconds = [
        free.with_options(stages=stages).plan(model.abstract_state(), model.abstract_batch()).step_seconds
        for stages in (2, [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]])
    ]
    assert step_seconds[0] <= min(step_seconds) * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------------------ kinds


def two_kinds(*, memory_bytes: int = 2**30) -> Cluster:
    """Two hosts of one device; the second does three times as much, and has so much memory."""
    cluster = cluster_of(2, 1, network=3e5)
    fast = replace(
        cluster.device,
        name="fast",
        flops_per_second={"float32": 3e7},
        memory_bytes_per_second=3e9,
        memory_bytes=memory_bytes,
    )
    return cluster.replace(host_devices={1: fast})


@functools.cache
def planned(cluster: Cluster, **options: object) -> autopar.PipelineExplanation:
    """The explanation of eight equal layers, from descriptions only."""
    model = mlp((64,) * 9, 32)
    step = autopar.parallelize(model.train_step, cluster=cluster, **options)
    return autopar.explain(step, model.abstract_state(), model.abstract_batch())


def test_the_faster_kind_gets_more_layers() -> None:
    found = planned(two_kinds())
    by_kind = {row.kind: row for row in found.stages}
    assert set(by_kind) == {"slow", "fast"} and [len(row.devices) for row in found.stages] == [1, 1]
    assert by_kind["fast"].num_operators > 2 * by_kind["slow"].num_operators
    assert min(row.busy_fraction for row in found.stages) > 0.5
    assert "1 (fast)" in str(found) and "(1 of slow, 1 of fast)" in str(found)


@pytest.mark.verify
def test_each_kind_keeps_its_own_memory() -> None:
    """With so little memory no schedule has room for the same layers."""
    free = {row.kind: row for row in planned(two_kinds()).stages}
    held = free["fast"].peak_bytes
    lean = planned(two_kinds(memory_bytes=held * 2 // 3))
    for row in lean.stages:
        assert row.peak_bytes <= row.budget_bytes == (held * 2 // 3 if row.kind == "fast" else 2**30)
    assert {row.kind: row.num_operators for row in lean.stages}["fast"] < free["fast"].num_operators


def test_one_mesh_is_as_slow_as_the_slower_kind() -> None:
    model = mlp((64,) * 5, 32)
    clusters = two_kinds(), two_kinds().replace(host_devices={})
    plans = [
        autopar.parallelize(model.train_step, cluster=cluster, method="data_parallel").plan(
            model.abstract_state(), model.abstract_batch()
        )
        for cluster in clusters
    ]
    assert plans[0].step_seconds == plans[1].step_seconds


def test_hosts_of_the_faster_kind_alone_where_messages_cost_too_much() -> None:
    model = mlp((64,) * 3, 32)
    far = two_kinds().replace(network_link=Link(1.0, 1e3))
    plan = autopar.parallelize(model.train_step, cluster=far).plan(model.abstract_state(), model.abstract_batch())
    assert [plan.devices_of(number) for number in range(len(plan.stages))] == [(1,)] and plan.num_devices == 2


def test_a_pipeline_on_two_kinds_has_the_numbers_of_one_device() -> None:
    cluster = slow_devices(3, hosts=3)
    fast = replace(cluster.device, flops_per_second={"float32": 4e8, "float64": 4e8}, memory_bytes_per_second=4e8)
    mixed = cluster.replace(network_link=Link(1e-3, 1e6), host_devices={0: fast, 2: fast})
    plan = check("mlp_nnx", mixed, stages=2, num_microbatches=2)
    kinds = [{device == 1 for device in stage.devices} for stage in plan.stages]
    assert all(len(own) == 1 for own in kinds)


# ------------------------------------------------------------------------------------------------------------ sizes


def test_shares() -> None:
    assert [shares_of(count) for count in (1, 2, 3, 4, 5, 6, 7, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 4, 8],
    ]
    assert shares_of(12) == [1, 2, 3, 4, 6, 8, 12]


@pytest.mark.parametrize(
    ("hosts", "per_host", "sizes"),
    [(1, 6, [1, 2, 3, 4, 5]), (3, 4, [1, 2, 4, 8]), (5, 2, [1, 2, 4, 6, 8]), (4, 8, [1, 2, 4, 8, 16])],
)
def test_sizes_of_stages(hosts: int, per_host: int, sizes: list[int]) -> None:
    assert stage_sizes(cluster_of(hosts, per_host, network=1e9)) == sizes


@pytest.mark.parametrize("hosts", range(1, 6))
@pytest.mark.parametrize("per_host", range(1, 7))
def test_every_cluster_is_split_into_any_number_of_meshes(hosts: int, per_host: int) -> None:
    cluster = cluster_of(hosts, per_host, network=1e9)
    for number in range(1, cluster.num_devices + 1):
        meshes = split_evenly(number, cluster)
        assert meshes is not None and len(meshes) == number
        assert [device for mesh in meshes for device in mesh] == list(range(cluster.num_devices))
        for mesh in meshes:
            by_host = [device // per_host for device in mesh]
            assert len({by_host.count(host) for host in by_host}) == 1
    assert split_evenly(cluster.num_devices + 1, cluster) is None


def test_fewer_devices_are_those_that_divide_the_batch_or_are_a_power_of_two() -> None:
    cluster = cluster_of(1, 7, network=1e9)
    assert [len(devices) for devices in fewer_devices(cluster, 9)] == [4, 3]
    assert [len(devices) for devices in fewer_devices(cluster, 30)] == [6, 4]
    assert fewer_devices(cluster_of(2, 4, network=1e9), 9) == []
    assert [len(devices) for devices in fewer_devices(cluster_of(3, 8, network=1e9), 64)] == [16]


@pytest.mark.parametrize(
    ("size", "counts"),
    [(64, [1, 2, 4, 8, 16, 32, 64]), (15, [1, 3, 15]), (12, [1, 2, 4, 12]), (97, [1]), (None, [1])],
)
def test_microbatches_divide_any_batch(size: int | None, counts: list[int]) -> None:
    assert counts_of(size) == counts
