"""Collective prices: closed forms worked by hand, contention, and properties on random meshes and clusters."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster, DeviceKind, Link, Mesh, Platform
from autopar.cost_model.collectives import (
    Collective,
    GroupCost,
    collective_seconds,
    group_cost,
    group_seconds,
    permute_seconds,
    wire_bytes,
)
from autopar.cost_model.groups import axes_groups
from autopar.errors import ClusterError

DEVICE = DeviceKind("toy", Platform.CUDA, {"float32": 1e12}, 1 << 30, 1e11)
ALPHA_LOCAL, BETA_LOCAL = 1e-6, 1e11
ALPHA_NETWORK, BETA_NETWORK = 1e-5, 1e9
RING_KINDS = [Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER]
KINDS = list(Collective)
MEGABYTE = 1e6


def toy(hosts: int = 2, devices_per_host: int = 4, *, cards: int = 1, local_links: int | None = None) -> Cluster:
    """``cards`` network cards a host; ``local_links`` local links a host (one for each device by default)."""
    return Cluster(
        "toy",
        hosts,
        devices_per_host,
        DEVICE,
        Link(ALPHA_LOCAL, BETA_LOCAL, devices_per_host // (local_links or devices_per_host)),
        Link(ALPHA_NETWORK, BETA_NETWORK, devices_per_host // cards),
    )


MESH = Mesh(("data", "model"), (2, 4))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Collective.ALL_REDUCE, 1.5),
        (Collective.ALL_GATHER, 0.75),
        (Collective.REDUCE_SCATTER, 0.75),
        (Collective.ALL_TO_ALL, 0.75),
        (Collective.PERMUTE, 1.0),
    ],
)
def test_wire_bytes_of_four(kind: Collective, expected: float) -> None:
    assert wire_bytes(kind, 1000.0, 4) == pytest.approx(1000 * expected)
    assert wire_bytes(kind, 1000.0, 1) == 0


@pytest.mark.parametrize(("full_bytes", "size"), [(-1.0, 2), (math.nan, 2), (1.0, 0)])
def test_wire_bytes_refuses_nonsense(full_bytes: float, size: int) -> None:
    with pytest.raises(ClusterError, match="give 0 or more bytes"):
        wire_bytes(Collective.ALL_REDUCE, full_bytes, size)


def test_groups_of_axes() -> None:
    mesh = Mesh(("a", "b", "c"), (2, 3, 2))
    assert axes_groups(mesh, ("b",)) == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert (
        axes_groups(mesh, ("c", "a")) == axes_groups(mesh, ("a", "c")) == ((0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11))
    )
    assert axes_groups(mesh, ()) == tuple((device,) for device in range(12))
    assert axes_groups(mesh, ("a", "b", "c")) == (tuple(range(12)),)
    with pytest.raises(ClusterError, match="no axis 'd'"):
        axes_groups(mesh, ("d",))
    with pytest.raises(ClusterError, match="repeat"):
        axes_groups(mesh, ("a", "a"))


@pytest.mark.parametrize(
    ("kind", "passes"), [(Collective.ALL_REDUCE, 2), (Collective.ALL_GATHER, 1), (Collective.REDUCE_SCATTER, 1)]
)
def test_ring_inside_a_host(kind: Collective, passes: int) -> None:
    """Four devices with links of their own: passes · (3 α + 3/4 B/β)."""
    seconds = collective_seconds(kind, MEGABYTE, ("model",), MESH, toy())
    assert seconds == pytest.approx(passes * (3 * ALPHA_LOCAL + 0.75 * MEGABYTE / BETA_LOCAL))


def test_four_groups_share_the_card() -> None:
    """The data axis of 2 × 4 crosses hosts in four groups of two: each host's one card carries four streams."""
    seconds = collective_seconds(Collective.ALL_REDUCE, MEGABYTE, ("data",), MESH, toy())
    assert seconds == pytest.approx(2 * (ALPHA_NETWORK + 0.5 * MEGABYTE * 4 / BETA_NETWORK))


def test_a_card_each_is_not_shared() -> None:
    seconds = collective_seconds(Collective.ALL_REDUCE, MEGABYTE, ("data",), MESH, toy(cards=4))
    assert seconds == pytest.approx(2 * (ALPHA_NETWORK + 0.5 * MEGABYTE / BETA_NETWORK))


def test_two_cards_of_two_devices_each() -> None:
    seconds = collective_seconds(Collective.ALL_GATHER, MEGABYTE, ("data",), MESH, toy(cards=2))
    assert seconds == pytest.approx(ALPHA_NETWORK + 0.5 * MEGABYTE * 2 / BETA_NETWORK)


@pytest.mark.parametrize("cards", [1, 2, 4])
def test_hierarchical_ring_uses_every_card_of_its_members(cards: int) -> None:
    """One group of all eight: six local edges and two crossings, less the cheapest edge; W over all cards of a host."""
    seconds = collective_seconds(Collective.ALL_GATHER, MEGABYTE, ("data", "model"), MESH, toy(cards=cards))
    latency = 5 * ALPHA_LOCAL + 2 * ALPHA_NETWORK
    assert seconds == pytest.approx(latency + 7 / 8 * MEGABYTE / (cards * BETA_NETWORK))


def test_local_link_bounds_a_hierarchical_ring_with_fast_cards() -> None:
    cluster = toy(cards=4).replace(network_link=Link(ALPHA_NETWORK, 10 * BETA_LOCAL))
    cost = group_cost((tuple(range(8)),), cluster, Collective.ALL_GATHER)
    assert cost.seconds_per_wire_byte == pytest.approx(1 / BETA_LOCAL)


def test_shared_local_link_carries_all_rings() -> None:
    """Virtual devices that share one memory: every wire byte of every device goes through it."""
    cluster = toy(1, 8, local_links=1)
    for mesh in (Mesh(("data", "model"), (2, 4)), Mesh(("data", "model"), (4, 2))):
        for kind in (Collective.ALL_GATHER, Collective.ALL_TO_ALL, Collective.PERMUTE):
            cost = group_cost(axes_groups(mesh, ("model",)), cluster, kind)
            assert cost.seconds_per_wire_byte == pytest.approx(8 / BETA_LOCAL)


def test_shared_local_link_of_a_ring_that_crosses_hosts() -> None:
    """Four members a host: three local edges, all through the one local link."""
    cluster = toy(local_links=1).replace(network_link=Link(ALPHA_NETWORK, 1e15))
    assert group_cost((tuple(range(8)),), cluster).seconds_per_wire_byte == pytest.approx(3 / BETA_LOCAL)


def test_all_to_all_over_hosts() -> None:
    """Each of eight devices sends 4/8 of its tensor to the other host, through one card for four devices."""
    seconds = collective_seconds(Collective.ALL_TO_ALL, MEGABYTE, ("data", "model"), MESH, toy())
    assert seconds == pytest.approx(3 * ALPHA_LOCAL + 4 * ALPHA_NETWORK + 4 * 0.5 * MEGABYTE / BETA_NETWORK)


def test_all_to_all_inside_a_host() -> None:
    seconds = collective_seconds(Collective.ALL_TO_ALL, MEGABYTE, ("model",), MESH, toy())
    assert seconds == pytest.approx(3 * ALPHA_LOCAL + 0.75 * MEGABYTE / BETA_LOCAL)


def test_permute_along_each_axis() -> None:
    local = collective_seconds(Collective.PERMUTE, MEGABYTE, ("model",), MESH, toy())
    assert local == pytest.approx(ALPHA_LOCAL + MEGABYTE / BETA_LOCAL)
    crossing = collective_seconds(Collective.PERMUTE, MEGABYTE, ("data",), MESH, toy())
    assert crossing == pytest.approx(ALPHA_NETWORK + 4 * MEGABYTE / BETA_NETWORK)


def test_permute_of_pairs_counts_the_busier_direction() -> None:
    """Devices 0 and 1 of host 0 send to hosts 1 and 2: two streams out of one card, one into each of the others."""
    cluster = toy(hosts=3)
    assert permute_seconds(MEGABYTE, ((0, 4), (1, 8)), cluster) == pytest.approx(
        ALPHA_NETWORK + 2 * MEGABYTE / BETA_NETWORK
    )
    assert permute_seconds(MEGABYTE, ((4, 0), (8, 1)), cluster) == permute_seconds(MEGABYTE, ((0, 4), (1, 8)), cluster)
    # One out, one in: cards are full duplex.
    assert permute_seconds(MEGABYTE, ((0, 4), (8, 1)), cluster) == pytest.approx(
        ALPHA_NETWORK + MEGABYTE / BETA_NETWORK
    )
    assert permute_seconds(MEGABYTE, ((2, 2),), cluster) == 0
    assert permute_seconds(MEGABYTE, (), cluster) == 0


def test_mesh_and_group_versions_agree() -> None:
    cluster = toy()
    for kind in KINDS:
        for axes in (("data",), ("model",), ("data", "model")):
            assert collective_seconds(kind, MEGABYTE, axes, MESH, cluster) == group_seconds(
                kind, MEGABYTE, axes_groups(MESH, axes), cluster
            )


def test_axis_order_decides_what_crosses_hosts() -> None:
    cluster = toy()
    outer = collective_seconds(Collective.ALL_REDUCE, MEGABYTE, ("model",), Mesh(("data", "model"), (2, 4)), cluster)
    inner = collective_seconds(Collective.ALL_REDUCE, MEGABYTE, ("model",), Mesh(("model", "data"), (4, 2)), cluster)
    assert inner > 10 * outer


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_one_are_free(kind: Collective) -> None:
    assert collective_seconds(kind, MEGABYTE, (), MESH, toy()) == 0
    assert collective_seconds(kind, MEGABYTE, ("one",), Mesh(("one", "all"), (1, 8)), toy()) == 0
    assert group_cost(((3,), (5,)), toy(), kind) == GroupCost(0.0, 0.0)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((), "without groups"),
        (((),), "without groups"),
        (((0, 1), (2,)), "same size"),
        (((0, 1), (1, 2)), "overlap"),
        (((0, 8),), "device 8 is not in cluster"),
        (((-1, 0),), "device -1 is not in cluster"),
    ],
)
def test_bad_groups_are_refused(groups: tuple[tuple[int, ...], ...], message: str) -> None:
    for kind in KINDS:
        with pytest.raises(ClusterError, match=message):
            group_seconds(kind, 1.0, groups, toy())


def test_mesh_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ClusterError, match="not in cluster"):
        collective_seconds(Collective.ALL_REDUCE, 1.0, ("data",), Mesh(("data",), (16,)), toy())
    with pytest.raises(ClusterError, match="give bytes of 0 or more"):
        permute_seconds(-1.0, (), toy())


def test_prices_are_cached_by_value() -> None:
    """An equal cluster made anew must hit the cache: the search makes such copies."""
    collective_seconds(Collective.ALL_REDUCE, 1.0, ("data",), MESH, toy())
    before = group_cost.cache_info().misses
    for size in range(100):
        collective_seconds(Collective.ALL_REDUCE, float(size), ("data",), MESH, toy())
    assert group_cost.cache_info().misses == before


# ------------------------------------------------------------------------------------------------------- properties


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    devices_per_host = draw(st.sampled_from([1, 2, 4, 8]))
    shares = st.sampled_from([share for share in (1, 2, 4, 8) if share <= devices_per_host])
    link = st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e12), shares)
    return Cluster("random", draw(st.sampled_from([1, 2, 3, 4])), devices_per_host, DEVICE, draw(link), draw(link))


@st.composite
def questions(draw: st.DrawFn) -> tuple[Collective, Mesh, tuple[str, ...], Cluster]:
    cluster = draw(clusters())
    mesh = draw(st.sampled_from(cluster.logical_mesh_shapes()))
    axes = draw(st.lists(st.sampled_from(mesh.axis_names), unique=True))
    return draw(st.sampled_from(KINDS)), mesh, tuple(axes), cluster


amounts = st.floats(0, 1e12)
properties = settings(derandomize=True, deadline=None, max_examples=150)


def not_less(left: float, right: float) -> bool:
    return left >= right * (1 - 1e-9)


@properties
@given(questions(), amounts, amounts)
def test_more_bytes_never_cost_less(
    question: tuple[Collective, Mesh, tuple[str, ...], Cluster], a: float, b: float
) -> None:
    kind, mesh, axes, cluster = question
    few, many = sorted((a, b))
    low = collective_seconds(kind, few, axes, mesh, cluster)
    assert not_less(collective_seconds(kind, many, axes, mesh, cluster), low)
    assert low >= 0
    assert math.isfinite(low)


@properties
@given(questions(), amounts, st.sampled_from(["local_link", "network_link"]), st.floats(1, 100), st.floats(0, 1e-3))
def test_a_slower_link_never_costs_less(
    question: tuple[Collective, Mesh, tuple[str, ...], Cluster], size: float, level: str, factor: float, delay: float
) -> None:
    kind, mesh, axes, cluster = question
    link: Link = getattr(cluster, level)
    slow = dataclasses.replace(
        link, bytes_per_second=link.bytes_per_second / factor, latency_seconds=link.latency_seconds + delay
    )
    before = collective_seconds(kind, size, axes, mesh, cluster)
    assert not_less(collective_seconds(kind, size, axes, mesh, cluster.replace(**{level: slow})), before)


@properties
@given(questions(), amounts, st.sampled_from(["local_link", "network_link"]))
def test_sharing_a_link_never_costs_less(
    question: tuple[Collective, Mesh, tuple[str, ...], Cluster], size: float, level: str
) -> None:
    kind, mesh, axes, cluster = question
    link: Link = getattr(cluster, level)
    shared = dataclasses.replace(link, shared_by=link.shared_by * 2)
    before = collective_seconds(kind, size, axes, mesh, cluster)
    assert not_less(collective_seconds(kind, size, axes, mesh, cluster.replace(**{level: shared})), before)


@properties
@given(questions(), amounts)
def test_fewer_groups_at_once_never_cost_more(
    question: tuple[Collective, Mesh, tuple[str, ...], Cluster], size: float
) -> None:
    """Contention: a group alone is at most as slow as among all groups of its axes."""
    kind, mesh, axes, cluster = question
    groups = axes_groups(mesh, axes)
    together = group_seconds(kind, size, groups, cluster)
    for group in groups[:4]:
        assert not_less(together, group_seconds(kind, size, (group,), cluster))


@properties
@given(questions(), amounts)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    question: tuple[Collective, Mesh, tuple[str, ...], Cluster], size: float
) -> None:
    _, mesh, axes, cluster = question
    parts = [collective_seconds(kind, size, axes, mesh, cluster) for kind in RING_KINDS]
    assert parts[0] == pytest.approx(parts[1] + parts[2])


@properties
@given(questions(), amounts, st.integers(0, 3))
def test_where_whole_hosts_lie_does_not_matter(
    question: tuple[Collective, Mesh, tuple[str, ...], Cluster], size: float, shift: int
) -> None:
    """Renaming hosts (a shift of all ids by whole hosts) changes no price."""
    kind, mesh, axes, cluster = question
    larger = cluster.replace(hosts=cluster.hosts + shift)
    offset = shift * cluster.devices_per_host
    groups = axes_groups(mesh, axes)
    moved = tuple(tuple(device + offset for device in group) for group in groups)
    assert group_seconds(kind, size, moved, larger) == pytest.approx(group_seconds(kind, size, groups, cluster))


@properties
@given(questions(), amounts)
def test_network_is_free_inside_a_host(
    question: tuple[Collective, Mesh, tuple[str, ...], Cluster], size: float
) -> None:
    kind, mesh, axes, cluster = question
    groups = axes_groups(mesh, axes)
    assume(all(len({device // cluster.devices_per_host for device in group}) == 1 for group in groups))
    slow = cluster.replace(network_link=Link(10.0, 1.0))
    assert collective_seconds(kind, size, axes, mesh, slow) == collective_seconds(kind, size, axes, mesh, cluster)
