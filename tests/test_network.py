"""What is measured between hosts: groups of every shape, their prices, the file, and the command on a Ray cluster."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh

import autopar
from autopar import measured_network
from autopar.cli import OK, main
from autopar.cluster import Cluster, Link, Mesh
from autopar.cost_model.collectives import Collective, group_seconds, sum_scatter_of, wire_bytes
from autopar.cost_model.groups import axes_groups
from autopar.cost_model.hlo import read_compiled
from autopar.cost_model.reshard import copy_seconds, move_seconds, outermost_of, reshard_table
from autopar.cost_model.waits import waiting
from autopar.curves import Curve
from autopar.errors import ClusterError
from autopar.measured_network import KINDS, Asked, NetworkEffort, measure_ray_network, samples
from autopar.network import Network, Span, SpanCurve, SpanWait, spans_of
from autopar.network_file import load_network, save_network
from autopar.plan import Layout, SumScatter
from autopar.schedule.reshard import Move, MoveKind, after_move, moves_between, scattered
from benchmarks.models import build
from tests.test_profile import profile_of
from tests.toy_runs import eight_slow_devices, parallel, reference

RATE, LATENCY = 2e8, 3e-4
HOSTS, DEVICES = 4, 2


def _curve(kind: Collective, span: Span) -> Curve:
    """Another one for every kind and shape."""
    slower = 1.0 + KINDS.index(kind) + span.group_size / 16 + span.hosts / 64
    return Curve(tuple((sent, slower * (1e-3 + sent / RATE)) for sent in (1e3, 1e5, 1e6)))


def network_of(**changes: Any) -> Network:
    curves = tuple(
        SpanCurve(kind.value, span, _curve(kind, span)) for span in spans_of(HOSTS, DEVICES) for kind in KINDS
    )
    made = Network("0.0", "cpu", DEVICES, "2026-01-31T12:00:00+00:00", LATENCY, RATE, curves)
    return dataclasses.replace(made, **changes)


def exchanging(cluster: Cluster, hosts: int, devices_per_host: int, slower: float) -> Cluster:
    """Hosts between which all-to-alls were measured to take so many times as long as all other collectives of as many bytes."""
    curves = tuple(
        SpanCurve(
            kind.value,
            span,
            Curve(
                tuple((sent, (slower if kind is Collective.ALL_TO_ALL else 1.0) * sent / 1e7) for sent in (1.0, 1e6))
            ),
        )
        for kind in KINDS
        for span in spans_of(hosts, devices_per_host)
    )
    network = Network("0.0", cluster.device.platform.value, devices_per_host, "2026-01-31", 1e-6, 1e7, curves)
    return cluster.replace(hosts=hosts, devices_per_host=devices_per_host).with_network(network)


def hosts_of(count: int = HOSTS, **changes: Any) -> Cluster:
    link = Link(1e-4, 1e9, DEVICES)
    plain = dataclasses.replace(Cluster.local(profile=None), name="hosts", hosts=count, devices_per_host=DEVICES)
    return plain.replace(network_link=link, **changes)


# --------------------------------------------------------------------------------------------------------------- prices


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(4, 2), (2, 2, 2), (8,), (2, 4)])
def test_groups_across_hosts_take_what_was_measured_of_their_shape(sizes: tuple[int, ...], kind: Collective) -> None:
    cluster = hosts_of().with_network(network_of())
    mesh = Mesh(("data", "model", "extra")[: len(sizes)], sizes)
    seen = set()
    for axis in mesh.axis_names:
        groups = axes_groups(mesh, (axis,))
        members = [len([device for device in groups[0] if device // DEVICES == host]) for host in range(HOSTS)]
        on = [count for count in members if count]
        sent = wire_bytes(kind, 1e5, len(groups[0]))
        took = group_seconds(kind, 1e5, groups, cluster)
        if len(on) > 1:
            seen.add(Span(len(on), on[0]))
            assert took == pytest.approx(_curve(kind, Span(len(on), on[0])).at(sent))
        else:
            assert took == pytest.approx(group_seconds(kind, 1e5, groups, hosts_of()))
    assert seen


@pytest.mark.parametrize("kind", KINDS)
def test_other_shapes_take_what_the_measured_link_says(kind: Collective) -> None:
    cluster = hosts_of().with_network(network_of())
    linked = cluster.replace(network=None)
    uneven = ((0, 1, 2),)
    three = ((0, 2, 4),)
    for groups in (uneven, three):
        assert group_seconds(kind, 1e5, groups, cluster) == group_seconds(kind, 1e5, groups, linked)
    one_each = cluster.part((0, 2))  # nobody else of these hosts talks, and so it was not measured
    assert group_seconds(kind, 1e5, ((0, 1),), one_each) == group_seconds(kind, 1e5, ((0, 1),), linked.part((0, 2)))
    other = Link(1e-4, 5e8, DEVICES)
    unlike = cluster.replace(host_links={(0, 1): other})
    assert group_seconds(kind, 1e5, ((0, 2),), unlike) == group_seconds(
        kind, 1e5, ((0, 2),), unlike.replace(network=None)
    )


def test_a_part_of_whole_hosts_keeps_what_was_measured() -> None:
    cluster = hosts_of().with_network(network_of())
    groups = ((0, 1, 2, 3),)
    expected = _curve(Collective.ALL_REDUCE, Span(2, 2)).at(wire_bytes(Collective.ALL_REDUCE, 1e6, 4))
    assert group_seconds(Collective.ALL_REDUCE, 1e6, groups, cluster.part((4, 5, 6, 7))) == pytest.approx(expected)


def test_the_link_is_the_measured_one() -> None:
    cluster = hosts_of().with_network(network_of())
    link = cluster.network_link
    assert (link.latency_seconds, link.bytes_per_second, link.shared_by) == (LATENCY, RATE, DEVICES)
    assert cluster.hosts == HOSTS and cluster.network == network_of()


WAIT = Curve(((1e-4, 1e-9), (1e-3, 2e-3), (1e-2, 5e-3)))
HALVES = ((0, 2), (1, 3))


def test_hosts_are_waited_for_as_was_measured_between_them() -> None:
    waits = (SpanWait(Span(2, 1), WAIT),)
    network = network_of(waits=waits)
    cluster = hosts_of().with_network(network)
    for work in (0.0, 1e-4, 5e-4, 1e-2, 1.0):
        assert waiting(HALVES, cluster)(work) == pytest.approx(WAIT.at(min(work, 1e-2)))
        assert waiting(((0, 1),), cluster)(work) == 0.0  # within a host, of which no profile is there
        assert waiting(((0, 2, 4, 6),), cluster)(work) == 0.0
    profile = profile_of(DEVICES)
    with_both = cluster.with_profile(profile)
    assert waiting(HALVES, with_both)(1e-2) == WAIT.at(1e-2)
    assert waiting(((0, 1),), with_both)(1e-2) == profile.waiting_seconds(2, 1e-2)
    assert waiting(((0, 2, 4, 6),), with_both)(1e-2) == profile.waiting_seconds(4, 1e-2)
    soon, late = (
        group_seconds(Collective.ALL_GATHER, 1e5, HALVES, cluster.with_profile(one))
        for one in (profile, profile.after(1e-3))
    )
    assert late - soon == pytest.approx(WAIT.at(1e-3))
    with pytest.raises(ClusterError, match=r"waits\[1\].* is there twice"):
        network_of(waits=waits * 2)


def test_a_plan_is_foretold_with_what_hosts_wait_for_each_other() -> None:
    """Of a compiled program as well: the two readers agree."""
    model = build("mlp_nnx")
    arguments = model.abstract_state(), model.abstract_batch()
    profile = profile_of(2, waits=())
    quiet = hosts_of(device=eight_slow_devices().device).with_network(network_of()).with_profile(profile)
    little = Curve(((1e-9, 1e-9), (1e-8, 3e-5), (1.0, 3e-5)))  # so little that the plan stays the same
    waits = tuple(SpanWait(span, little) for span in spans_of(HOSTS, DEVICES))
    restless = quiet.with_network(network_of(waits=waits))
    step = autopar.parallelize(model.train_step, method="data_parallel", mesh_shape=(8,))
    plans = [step.plan(*arguments, cluster=cluster) for cluster in (quiet, restless)]
    assert plans[0].stages == plans[1].stages
    calm, waited = (plan.prediction.communication_seconds for plan in plans)
    assert waited > calm + 1e-4
    read = [read_compiled(step.compile(*arguments, cluster=cluster), cluster) for cluster in (quiet, restless)]
    calm_read, waited_read = (one.cost.communication_seconds for one in read)
    assert waited_read - calm_read == pytest.approx(waited - calm, rel=0.25)


def test_waiting_for_devices_that_work_comes_on_top() -> None:
    profile = profile_of(DEVICES)
    cluster = hosts_of().with_network(network_of()).with_profile(profile)
    groups = HALVES
    soon = group_seconds(Collective.ALL_GATHER, 1e5, groups, cluster)
    assert soon == pytest.approx(
        _curve(Collective.ALL_GATHER, Span(2, 1)).at(wire_bytes(Collective.ALL_GATHER, 1e5, 2))
    )
    late = cluster.with_profile(profile.after(1e-2))
    waits = profile.waiting_seconds(2, 1e-2)
    assert group_seconds(Collective.ALL_GATHER, 1e5, groups, late) == pytest.approx(soon + waits)


@pytest.mark.parametrize("changes", [{"platform": "gpu"}, {"devices_per_host": 4}])
def test_the_network_of_other_hosts_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match=r"measure this cluster with `autopar network`"):
        hosts_of().with_network(network_of(**changes))


# ------------------------------------------------------------------------------------------------- sums that are exchanged


def test_sums_are_exchanged_where_that_was_measured_to_be_faster() -> None:
    local = Cluster.local(profile=None)
    slower, faster = (exchanging(local, 4, 2, times) for times in (2.0, 0.5))
    assert (faster.network.exchange_ratio, slower.network.exchange_ratio) == pytest.approx((0.5, 2.0))
    assert sum_scatter_of(faster) is SumScatter.EXCHANGE
    assert sum_scatter_of(slower) is SumScatter.COLLECTIVE
    assert sum_scatter_of(faster.part((0, 1))) is SumScatter.COLLECTIVE  # within a host
    assert sum_scatter_of(faster.replace(network=None)) is SumScatter.COLLECTIVE
    assert network_of(collectives=network_of().collectives[:1]).exchange_ratio == 1.0


@pytest.mark.parametrize("dim", [0, 1])
def test_a_sum_by_hand_costs_an_exchange_and_its_additions(dim: int) -> None:
    cluster = exchanging(Cluster.local(profile=None), 4, 2, 0.5)
    mesh, size = Mesh(("data",), (8,)), 1e6
    move = Move(MoveKind.EXCHANGE_SUM, ("data",), dim)
    layout = Layout(((), ()), ("data",))
    sent = wire_bytes(Collective.ALL_TO_ALL, size, 8)
    assert move_seconds(move, layout, size, mesh, cluster) == pytest.approx(0.5 * sent / 1e7)
    added = size * (1 + 1 / 8) / cluster.per_device_memory_bytes_per_second
    cut = 2 * size / cluster.per_device_cut_bytes_per_second if dim else 0.0
    outermost = outermost_of((512, 512))
    assert copy_seconds(move, layout, size, mesh, cluster, outermost) == pytest.approx(added + cut)
    for scatter, cluster_of_it in (
        (SumScatter.EXCHANGE, cluster),
        (SumScatter.COLLECTIVE, cluster.replace(network=None)),
    ):
        shape = (512, 512)
        (way,) = moves_between(shape, layout, after_move(layout, move, mesh), mesh)
        one = scattered(way, scatter)
        took = move_seconds(one, layout, size, mesh, cluster_of_it)
        took += copy_seconds(one, layout, size, mesh, cluster_of_it, outermost)
        table = reshard_table(shape, mesh, cluster_of_it)
        ((priced,),) = table.between([layout], [after_move(layout, move, mesh)], size)
        assert priced == pytest.approx(took)


def test_a_plan_with_exchanged_sums_equals_jit() -> None:
    cluster = exchanging(eight_slow_devices(), 4, 2, 0.1)
    found, plan = parallel("mlp_nnx", np.float64, "zero2", cluster, 3)
    wanted = reference("mlp_nnx", np.float64, 3)
    assert plan.stages[0].sum_scatter is SumScatter.EXCHANGE
    kinds = {use.kind for use in plan.prediction.collectives}
    assert "all-to-all" in kinds and "reduce-scatter" not in kinds
    for path, leaf in wanted.state.items():
        np.testing.assert_allclose(found.state[path], leaf, rtol=1e-12, atol=1e-12 * np.abs(leaf).max())


@pytest.mark.verify
def test_the_explanation_says_why_there_are_all_to_alls() -> None:
    model = build("mlp_nnx")
    arguments = model.abstract_state(), model.abstract_batch()
    fast, slow = (
        autopar.explain(
            autopar.parallelize(
                model.train_step, method="zero2", cluster=exchanging(eight_slow_devices(), 4, 2, times)
            ),
            *arguments,
        )
        for times in (0.25, 4.0)
    )
    said = "between these hosts that was measured to take 25% of a reduce-scatter"
    assert [said in note for note in fast.notes].count(True) == 1
    assert not any("all-to-all" in note for note in slow.notes)


@pytest.mark.usefixtures("users_fusions")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(*row, marks=pytest.mark.verify)
        for row in (("mlp_nnx", "zero2"), *itertools.product(("gpt", "llama_nnx"), ("zero2", "zero3")))
    ],
)
def test_it_compiles_to_what_it_says(name: str, method: str) -> None:
    model = build(name)
    arguments = model.abstract_state(), model.abstract_batch()
    cluster = exchanging(eight_slow_devices(), 4, 2, 0.1)
    found = autopar.verify_plan(model.train_step, *arguments, cluster=cluster, method=method)
    assert found.agrees, str(found)


# ----------------------------------------------------------------------------------------------------------------- data


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    restless = network_of(waits=(SpanWait(Span(2, 1), WAIT), SpanWait(Span(4, 2), WAIT)))
    for network in (restless, network_of()):
        save_network(network, tmp_path / "network.json")
        assert load_network(tmp_path / "network.json") == network
    assert hosts_of().with_network(tmp_path / "network.json") == hosts_of().with_network(network_of())


Bad = Callable[[dict[str, Any]], object]
BAD: dict[str, tuple[Bad, str]] = {
    "another format": (lambda file: file.update(format="autopar-plan"), "this is no network"),
    "another version": (lambda file: file.update(version=9), "this release reads 1"),
    "an unknown field": (lambda file: file["network"].update(bandwith=1.0), "unknown field `bandwith`"),
    "no rate": (lambda file: file["network"].update(bytes_per_second=0.0), "bytes_per_second"),
    "a negative latency": (lambda file: file["network"].update(latency_seconds=-1.0), "latency_seconds"),
    "one host": (lambda file: file["network"]["collectives"][0].update(hosts=1), "collectives"),
    "an unknown kind": (
        lambda file: file["network"]["collectives"][1].update(kind="gossip"),
        r"\[1\].kind is 'gossip'",
    ),
    "unsorted samples": (
        lambda file: file["network"]["collectives"][2]["samples"].reverse(),
        r"collectives\[2\].samples: sample 1 has amount",
    ),
    "a curve twice": (
        lambda file: file["network"]["collectives"].append(file["network"]["collectives"][0]),
        "is there twice",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_the_place_in_it(name: str, tmp_path: Path) -> None:
    spoil, said = BAD[name]
    path = tmp_path / "network.json"
    save_network(network_of(), path)
    file = json.loads(path.read_text())
    spoil(file)
    path.write_text(json.dumps(file))
    with pytest.raises(ClusterError, match=said) as caught:
        load_network(path)
    assert str(path) in str(caught.value)


def test_a_cut_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    with pytest.raises(ClusterError, match="measure with `autopar network`"):
        load_network(path)
    save_network(network_of(), path)
    path.write_text(path.read_text()[:-100])
    with pytest.raises(ClusterError, match="cut short"):
        load_network(path)
    with pytest.raises(ClusterError, match="cannot write network"):
        save_network(network_of(), path / "network.json")


@pytest.mark.parametrize("changes", [{"latency_seconds": math.nan}, {"bytes_per_second": math.inf}])
def test_figures_are_finite(changes: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match="give a finite number"):
        network_of(**changes)


# ------------------------------------------------------------------------------------------------------------ measuring


def test_groups_of_every_shape() -> None:
    assert spans_of(4, 2) == [Span(2, 1), Span(2, 2), Span(4, 1), Span(4, 2)]
    assert spans_of(3, 1) == [Span(3, 1)]
    assert spans_of(1, 8) == []


class _Device:
    def __init__(self, number: int) -> None:
        self.number, self.process_index = number, number // DEVICES


@pytest.mark.parametrize("span", spans_of(HOSTS, DEVICES))
def test_devices_are_grouped_as_was_asked(span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_network, "Mesh", lambda grid, names, axis_types: grid)
    devices = [_Device(number) for number in range(HOSTS * DEVICES)]
    grid: Any = measured_network._mesh(devices, Asked(KINDS[0], span, DEVICES, NetworkEffort((1,), 2, 1)))
    assert sorted(one.number for one in grid.flat) == list(range(HOSTS * DEVICES))
    for group in grid:
        hosts = [one.process_index for one in group]
        assert {hosts.count(host) for host in hosts} == {span.per_host}
        assert len(set(hosts)) == span.hosts
    alone: Any = measured_network._mesh(devices, Asked(KINDS[0], Span(HOSTS, 1), 1, NetworkEffort((1,), 2, 1)))
    assert [one.number for one in alone.flat] == [0, 2, 4, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_timed_is_so_many_collectives(kind: Collective, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, whose devices stand for hosts: the programs run, and bytes are counted as the cost model does."""
    grid = np.array(jax.devices()[:4]).reshape(1, 4)
    monkeypatch.setattr(measured_network, "_mesh", lambda devices, asked: JaxMesh(grid, ("other", "group")))
    found = samples(jax.devices()[:4], Asked(kind, Span(4, 1), 1, NetworkEffort((1 << 10, 1 << 14), 3, 2)))
    assert [sent for sent, _ in found] == [wire_bytes(kind, size, 4) for size in (1 << 10, 1 << 14)]
    assert all(seconds > 0 for _, seconds in found)


def test_alone_or_on_no_cluster_there_is_nothing_to_measure() -> None:
    with pytest.raises(ClusterError, match="there is one host"):
        measured_network.measure_network()
    with pytest.raises(ClusterError, match="does not run on Ray"):
        measure_ray_network(hosts_of())


@pytest.mark.verify
def test_the_command_measures_the_hosts_of_a_ray_cluster(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_network, "QUICK", NetworkEffort((1 << 10, 1 << 12), 2, 1, (8, 16)))
    path = tmp_path / "network.json"
    hosts, devices = cluster.hosts, cluster.devices_per_host
    options = ["--hosts", str(hosts), "--devices", str(devices), "--quick", "--out", str(path)]
    assert main(["network", *options]) == OK
    network = load_network(path)
    assert network.devices_per_host == devices
    assert [(one.span, one.kind) for one in network.collectives] == [
        (span, kind.value) for span in spans_of(hosts, devices) for kind in KINDS
    ]
    assert [one.span for one in network.waits] == spans_of(hosts, devices)
    assert all(len(one.curve.samples) == 2 for one in network.waits)
    assert "a link" in capsys.readouterr().out
    assert cluster.with_network(path).network == network
