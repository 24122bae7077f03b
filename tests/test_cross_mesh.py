"""Tiles bring every piece once, over as few slow links as can be, and what lands is the array."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster, Link, Mesh
from autopar.cost_model.collectives import Collective, group_seconds
from autopar.cost_model.transfers import (
    Direction,
    Level,
    Port,
    cheapest_transfer,
    finishing_seconds,
    latency_seconds,
    link_loads,
    link_of,
    transfer_seconds,
)
from autopar.errors import PlanError
from autopar.plan import Layout
from autopar.schedule.cross_mesh import (
    CrossMeshTransfer,
    Placement,
    Strategy,
    cross_mesh_transfer,
    landing_layouts,
    piece_box,
)
from autopar.schedule.reshard import after_move, layouts_of, local_shape, replicated, shares

NAMES = ("data", "model", "extra")
SIZES = ((1,), (2,), (4,), (8,), (1, 2), (2, 2), (2, 4), (4, 2), (1, 8), (2, 2, 2), (2, 1, 4), (3,), (2, 3))
MESHES = [Mesh(NAMES[: len(sizes)], sizes) for sizes in SIZES]
EXTENTS = (1, 2, 3, 4, 6, 8, 12, 24, 0)
DEVICES = 16


def cluster_of(hosts: int, shared_by: int = 1, **links: Link) -> Cluster:
    """16 devices on so many hosts; a network card for ``shared_by`` devices."""
    made = Cluster.preset("p4d.24xlarge").replace(hosts=hosts, name=f"{hosts}x{DEVICES // hosts}")
    network = Link(1e-5, 1e9, shared_by)
    return dataclasses.replace(
        made, devices_per_host=DEVICES // hosts, **{"local_link": Link(1e-6, 1e11), "network_link": network, **links}
    )


CLUSTERS = [cluster_of(hosts, shared) for hosts, shared in ((1, 1), (2, 8), (4, 1), (4, 2), (8, 2), (16, 1))]


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...], ids: tuple[int, ...]) -> Placement:
    mesh = draw(st.sampled_from([mesh for mesh in MESHES if mesh.size <= len(ids)]))
    layout = draw(st.sampled_from(layouts_of(shape, mesh)))
    if draw(st.booleans()):  # a row of devices, as stages have
        start = draw(st.integers(0, len(ids) - mesh.size))
        return Placement(layout, mesh, ids[start : start + mesh.size])
    return Placement(layout, mesh, tuple(draw(st.permutations(ids)))[: mesh.size])


@st.composite
def journeys(draw: st.DrawFn) -> tuple[tuple[int, ...], Placement, Placement]:
    """Shape and two placements among 16 devices; half of them disjoint."""
    shape = tuple(draw(st.lists(st.sampled_from(EXTENTS), max_size=3)))
    ids = tuple(range(DEVICES))
    if draw(st.booleans()):
        first, second = ids[:8], ids[8:]
    else:
        first = second = ids
    return shape, draw(placements(shape, first)), draw(placements(shape, second))


@st.composite
def transfers(draw: st.DrawFn) -> tuple[CrossMeshTransfer, Cluster]:
    """By any landing, not just the cheapest."""
    shape, source, target = draw(journeys())
    cluster = draw(st.sampled_from(CLUSTERS))
    landing = draw(st.sampled_from(landing_layouts(shape, target)))
    return cross_mesh_transfer(shape, 4, source, target, cluster, landing), cluster


def slices(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def shards_of(x: np.ndarray, placement: Placement) -> dict[int, np.ndarray]:
    return {
        device: x[slices(piece_box(x.shape, placement, position))] for position, device in enumerate(placement.devices)
    }


def host(device: int, cluster: Cluster) -> int:
    return device // cluster.devices_per_host


# ------------------------------------------------------------------------------------------------------- what arrives


@settings(max_examples=400)
@given(transfers())
def test_tiles_cover_every_landed_piece_once_with_values_that_their_senders_have(
    case: tuple[CrossMeshTransfer, Cluster],
) -> None:
    """A simulation in NumPy: senders own nothing but their shards, relays nothing but what they were sent."""
    transfer, _ = case
    x = np.arange(math.prod(transfer.shape), dtype=np.int64).reshape(transfer.shape)
    held = {device: np.full(x.shape, -1) for device in transfer.source.devices}
    for position, device in enumerate(transfer.source.devices):
        box = slices(piece_box(x.shape, transfer.source, position))
        held[device][box] = x[box]
    came = {device: np.full(x.shape, -1) for device in transfer.target.devices}
    times = {device: np.zeros(x.shape, dtype=int) for device in transfer.target.devices}
    for tile in transfer.tiles:
        box = slices(tile.box)
        assert x[box].shape == transfer.tile_shape
        came[tile.receiver][box] = (came if tile.relayed else held)[tile.sender][box]
        times[tile.receiver][box] += 1
    for position, device in enumerate(transfer.target.devices):
        box = slices(piece_box(x.shape, transfer.landed, position))
        assert (times[device][box] == 1).all()
        assert times[device].sum() == x[box].size
        np.testing.assert_array_equal(came[device][box], x[box])


@settings(max_examples=200)
@given(transfers())
def test_the_moves_lead_from_the_landing_to_the_target(case: tuple[CrossMeshTransfer, Cluster]) -> None:
    transfer, _ = case
    layout = transfer.landing
    for move in transfer.moves:
        layout = after_move(layout, move, transfer.target.mesh)
    assert layout == transfer.target.layout
    assert bool(transfer.moves) == (transfer.strategy is Strategy.SPREAD)


@settings(max_examples=200)
@given(journeys())
def test_pieces_are_those_of_jax(journey: tuple[tuple[int, ...], Placement, Placement]) -> None:
    import jax

    from autopar.runtime.executor import device_mesh, partition_spec

    shape, placement, _ = journey
    mesh = device_mesh(placement.mesh, jax.devices())
    sharding = jax.sharding.NamedSharding(mesh, partition_spec(placement.layout))
    indices = sharding.devices_indices_map(shape)
    for position, device in enumerate(mesh.devices.flat):
        ours = piece_box(shape, placement, position)
        theirs = tuple(index.indices(extent)[:2] for index, extent in zip(indices[device], shape, strict=True))
        assert ours == theirs or 0 in shape


# --------------------------------------------------------------------------------------------------- what the links see


def crossings(transfer: CrossMeshTransfer, cluster: Cluster) -> dict[int, Counter[tuple[tuple[int, int], ...]]]:
    """For every host, how often each box came in from other hosts."""
    found: dict[int, Counter[tuple[tuple[int, int], ...]]] = defaultdict(Counter)
    for tile in transfer.tiles:
        if host(tile.sender, cluster) != host(tile.receiver, cluster):
            found[host(tile.receiver, cluster)][tile.box] += 1
    return found


@settings(max_examples=400)
@given(transfers())
def test_a_byte_enters_a_host_at_most_once_and_only_if_nobody_there_has_it(
    case: tuple[CrossMeshTransfer, Cluster],
) -> None:
    transfer, cluster = case
    there = defaultdict(list)
    for position, device in enumerate(transfer.source.devices):
        there[host(device, cluster)].append(piece_box(transfer.shape, transfer.source, position))
    for number, boxes in crossings(transfer, cluster).items():
        assert set(boxes.values()) == {1}
        for box in boxes:
            assert not any(
                all(a <= c and d <= b for (a, b), (c, d) in zip(piece, box, strict=True)) for piece in there[number]
            )
    own = {
        device: piece_box(transfer.shape, transfer.source, position)
        for position, device in enumerate(transfer.source.devices)
    }
    for tile in transfer.tiles:
        mine = own.get(tile.receiver)
        if mine and all(a <= c and d <= b for (a, b), (c, d) in zip(mine, tile.box, strict=True)):
            assert tile.sender == tile.receiver, "what a device has stays there"
        if tile.relayed:
            assert host(tile.sender, cluster) == host(tile.receiver, cluster)
            assert tile.sender != tile.receiver


@settings(max_examples=200)
@given(transfers())
def test_a_full_spread_sends_every_byte_once_in_all(case: tuple[CrossMeshTransfer, Cluster]) -> None:
    transfer, cluster = case
    sent = sum(transfer.tile_bytes for _ in transfer.tiles)
    assert sent == transfer.array_bytes * (transfer.target.mesh.size // shares(transfer.landing, transfer.target.mesh))
    if shares(transfer.landing, transfer.target.mesh) == transfer.target.mesh.size:
        total = sum((boxes for boxes in crossings(transfer, cluster).values()), Counter())
        assert not total or set(total.values()) == {1}


def least_peak(demands: list[list[int]], most: int) -> int:
    """The least possible peak when each demand goes to one of its devices: trial of all peaks by augmenting paths."""
    for peak in range(1, most + 1):
        taken: dict[int, list[int]] = defaultdict(list)

        def serve(demand: int, seen: set[int], peak: int = peak, taken: dict[int, list[int]] = taken) -> bool:
            for device in demands[demand]:
                if device in seen:
                    continue
                seen.add(device)
                if len(taken[device]) < peak or any(
                    serve(other, seen, peak, taken) and (taken[device].remove(other) or True)  # type: ignore[func-returns-value]
                    for other in list(taken[device])
                ):
                    taken[device].append(demand)
                    return True
            return False

        if all(serve(demand, set()) for demand in range(len(demands))):
            return peak
    return most


@settings(max_examples=300)
@given(transfers())
def test_senders_are_balanced(case: tuple[CrossMeshTransfer, Cluster]) -> None:
    """What crosses hosts leaves by cards, the fullest of which has at most twice what the best assignment gives it."""
    transfer, cluster = case
    crossing = [tile for tile in transfer.tiles if host(tile.sender, cluster) != host(tile.receiver, cluster)]
    if not crossing:
        return
    shared_by = cluster.network_link.shared_by

    def card(device: int) -> int:
        return device // shared_by

    holders = [
        sorted(
            {
                card(device)
                for position, device in enumerate(transfer.source.devices)
                if all(
                    a <= c and d <= b
                    for (a, b), (c, d) in zip(
                        piece_box(transfer.shape, transfer.source, position), tile.box, strict=True
                    )
                )
            }
        )
        for tile in crossing
    ]
    peak = max(Counter(card(tile.sender) for tile in crossing).values())
    assert peak <= 2 * least_peak(holders, len(crossing))
    loads = link_loads(transfer, cluster)
    outgoing = [
        bytes_ for port, bytes_ in loads.items() if (port.level, port.direction) == (Level.NETWORK, Direction.OUT)
    ]
    assert max(outgoing) == peak * transfer.tile_bytes


def test_replicas_share_the_sending() -> None:
    """Four copies on four hosts serve four receivers, one each; of two holders the one on the receiver's host sends."""
    cluster = cluster_of(8)
    source = Placement(replicated(1), Mesh(("data",), (4,)), (0, 2, 4, 6))
    target = Placement(Layout((("data",),)), Mesh(("data",), (4,)), (8, 10, 12, 14))
    transfer = cross_mesh_transfer((8,), 4, source, target, cluster)
    assert sorted(tile.sender for tile in transfer.tiles) == [0, 2, 4, 6]
    near = Placement(replicated(1), Mesh(("data",), (2,)), (0, 9))
    one = Placement(replicated(1), Mesh(("data",), (1,)), (8,))
    (tile,) = cross_mesh_transfer((8,), 4, near, one, cluster).tiles
    assert (tile.sender, tile.receiver) == (9, 8)


# ------------------------------------------------------------------------------------------------------------- prices


def test_prices_by_hand() -> None:
    """One device sends 8 MB to a mesh of 4 copies on another host of 8 devices behind one card."""
    cluster = cluster_of(2, shared_by=8)
    mib = 1_000_000
    source = Placement(replicated(1), Mesh(("data",), (1,)), (0,))
    target = Placement(replicated(1), Mesh(("data",), (4,)), (8, 9, 10, 11))
    direct = cross_mesh_transfer((2 * mib,), 4, source, target, cluster)
    assert direct.strategy is Strategy.BROADCAST
    assert link_loads(direct, cluster) == {
        Port(Level.NETWORK, Direction.OUT, 0, 0): 8 * mib,
        Port(Level.NETWORK, Direction.IN, 1, 0): 8 * mib,
        Port(Level.LOCAL, Direction.OUT, 1, 0): 24 * mib,
        **{Port(Level.LOCAL, Direction.IN, 1, number): 8 * mib for number in (1, 2, 3)},
    }
    assert latency_seconds(direct, cluster) == pytest.approx(1e-5 + 3e-6)
    assert transfer_seconds(direct, cluster) == pytest.approx(1e-5 + 3e-6 + 8e-3 + 24e6 / 1e11)
    assert finishing_seconds(direct, cluster) == 0
    spread = cross_mesh_transfer((2 * mib,), 4, source, target, cluster, Layout((("data",),)))
    assert spread.strategy is Strategy.SPREAD
    assert transfer_seconds(spread, cluster) == pytest.approx(4e-5 + 8e-3)
    gather = group_seconds(Collective.ALL_GATHER, 8e6, ((8, 9, 10, 11),), cluster)
    assert finishing_seconds(spread, cluster) == pytest.approx(gather)
    assert cheapest_transfer((2 * mib,), 4, source, target, cluster) == spread
    small = cheapest_transfer((4,), 4, source, target, cluster)
    assert small.strategy is Strategy.BROADCAST


def test_spread_goes_once_to_a_receiving_mesh_of_several_hosts() -> None:
    """With a fast network inside the receiving mesh no better, each byte leaves the source host once; then a ring."""
    cluster = cluster_of(4, shared_by=4)
    source = Placement(replicated(2), Mesh(("data",), (4,)), (0, 1, 2, 3))
    target = Placement(replicated(2), Mesh(("data", "model"), (2, 4)), tuple(range(4, 12)))
    chosen = cheapest_transfer((4096, 4096), 4, source, target, cluster)
    assert chosen.strategy is Strategy.SPREAD
    out = link_loads(chosen, cluster)[Port(Level.NETWORK, Direction.OUT, 0, 0)]
    assert out <= 2 * chosen.array_bytes
    direct = cross_mesh_transfer((4096, 4096), 4, source, target, cluster)
    assert link_loads(direct, cluster)[Port(Level.NETWORK, Direction.OUT, 0, 0)] == 2 * chosen.array_bytes


@settings(max_examples=100)
@given(journeys(), st.sampled_from(CLUSTERS), st.sampled_from([1, 4, 1 << 20]))
def test_no_landing_is_quicker_than_the_chosen_one(
    journey: tuple[tuple[int, ...], Placement, Placement], cluster: Cluster, itemsize: int
) -> None:
    shape, source, target = journey
    chosen = cheapest_transfer(shape, itemsize, source, target, cluster)
    assert chosen == cross_mesh_transfer(shape, itemsize, source, target, cluster, chosen.landing)
    ours = transfer_seconds(chosen, cluster) + finishing_seconds(chosen, cluster)
    for landing in landing_layouts(shape, target):
        other = cross_mesh_transfer(shape, itemsize, source, target, cluster, landing)
        assert ours <= transfer_seconds(other, cluster) + finishing_seconds(other, cluster)


def test_some_hosts_further_on_a_transfer_is_the_same() -> None:
    """With devices of the first host among its ends, of later ones only, and of none that the cluster has."""
    cluster = cluster_of(8, shared_by=2)
    pair, row = Mesh(("data",), (2,)), Mesh(("data", "model"), (2, 2))
    source, target = Placement(Layout((("data",),)), pair, (1, 2)), Placement(Layout((("model",),)), row, (4, 5, 7, 6))
    first = cheapest_transfer((16,), 4, source, target, cluster)
    for hosts in range(1, 5):
        ends = source.moved(2 * hosts), target.moved(2 * hosts)
        further = cheapest_transfer((16,), 4, *ends, cluster)
        assert further == first.moved(2 * hosts)
        assert further == cross_mesh_transfer((16,), 4, *ends, cluster, further.landing)
    with pytest.raises(PlanError, match=r"devices \[16, 17, 19, 18\], but cluster '8x2' has 16"):
        cheapest_transfer((16,), 4, source.moved(12), target.moved(12), cluster)


@settings(max_examples=200)
@given(transfers())
def test_loads_are_what_tiles_put_on_links(case: tuple[CrossMeshTransfer, Cluster]) -> None:
    """In and out agree on each level, nothing that stays is counted, and no time is below the fullest link's."""
    transfer, cluster = case
    loads = link_loads(transfer, cluster)
    for level in Level:
        ends = {
            direction: sum(n for port, n in loads.items() if (port.level, port.direction) == (level, direction))
            for direction in Direction
        }
        moved = [tile for tile in transfer.tiles if tile.sender != tile.receiver]
        on_level = [
            tile
            for tile in moved
            if (host(tile.sender, cluster) == host(tile.receiver, cluster)) == (level is Level.LOCAL)
        ]
        assert ends[Direction.OUT] == ends[Direction.IN] == len(on_level) * transfer.tile_bytes
    floor = max((n / link_of(port.level, cluster).bytes_per_second for port, n in loads.items()), default=0.0)
    assert transfer_seconds(transfer, cluster) >= floor


# ------------------------------------------------------------------------------------------------------------- edges


def test_landings_cut_finer_by_what_held_copies() -> None:
    mesh = Mesh(("data", "model"), (2, 2))
    target = Placement(Layout((("model",), ())), mesh, (4, 5, 6, 7))
    texts = [str(layout) for layout in landing_layouts((4, 4), target)]
    assert texts[0] == "[model, ·]"
    assert sorted(texts[1:]) == ["[data+model, ·]", "[model, data]"]
    assert len(landing_layouts((4, 4), Placement(Layout((("data",), ("model",))), mesh, (4, 5, 6, 7)))) == 1
    assert len(landing_layouts((), Placement(replicated(0), mesh, (4, 5, 6, 7)))) == 1


def test_scalars_and_arrays_without_elements() -> None:
    cluster = cluster_of(2)
    mesh = Mesh(("data",), (4,))
    scalar = cheapest_transfer(
        (), 4, Placement(replicated(0), mesh, (0, 1, 2, 3)), Placement(replicated(0), mesh, (8, 9, 10, 11)), cluster
    )
    assert [tile.box for tile in scalar.tiles] == [()] * 4
    empty = cheapest_transfer(
        (0, 4), 4, Placement(replicated(2), mesh, (0, 1, 2, 3)), Placement(replicated(2), mesh, (8, 9, 10, 11)), cluster
    )
    assert empty.tiles == ()
    assert transfer_seconds(empty, cluster) == 0
    assert link_loads(empty, cluster) == {}


def test_demands_that_cannot_be_met_are_refused() -> None:
    cluster = cluster_of(2)
    mesh = Mesh(("data",), (4,))
    good = Placement(replicated(1), mesh, (0, 1, 2, 3))

    def refused(source: Placement, target: Placement, match: str) -> None:
        with pytest.raises(PlanError, match=match):
            cross_mesh_transfer((6,), 4, source, target, cluster)

    refused(
        Placement(Layout(((),), ("data",)), mesh, (0, 1, 2, 3)), good, r"source layout .* partial sum over .*reduce it"
    )
    refused(good, Placement(Layout((("data",),)), mesh, (4, 5, 6, 7)), r"target layout .* does not cut .*\(6,\) evenly")
    refused(good, Placement(replicated(2), mesh, (4, 5, 6, 7)), "does not cut")
    refused(good, Placement(replicated(1), mesh, (14, 15, 16, 17)), r"devices \[16, 17\].* 0 to 15")
    with pytest.raises(PlanError, match="give 4 device ids"):
        Placement(replicated(1), mesh, (0, 1, 2))
    with pytest.raises(PlanError, match="none of them twice"):
        Placement(replicated(1), mesh, (0, 1, 2, 2))


@pytest.mark.parametrize(("p", "q"), list(itertools.product((1, 2, 4), (1, 2, 3, 4))))
def test_tiles_are_as_few_as_nested_cuts_allow(p: int, q: int) -> None:
    cluster = cluster_of(1)
    source = Placement(Layout((("data",),)), Mesh(("data",), (p,)), tuple(range(p)))
    target = Placement(Layout((("data",),)), Mesh(("data",), (q,)), tuple(range(8, 8 + q)))
    transfer = cross_mesh_transfer((24,), 4, source, target, cluster)
    assert len(transfer.tiles) == math.lcm(p, q)
    assert local_shape((24,), source.layout, source.mesh)[0] % transfer.tile_shape[0] == 0
