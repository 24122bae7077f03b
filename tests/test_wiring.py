"""Wires between the devices of a host: what a group of them can send, held against rings laid one by one."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from autopar.cluster import Cluster, Link, Mesh
from autopar.cost_model.collectives import Collective, collective_seconds, group_seconds, permute_seconds
from autopar.cost_model.groups import axes_groups
from autopar.errors import ClusterError
from autopar.wiring import Wiring

HOST = Cluster.preset("p3.16xlarge")
CUBE = HOST.local_wiring
assert CUBE is not None
WIRE_BYTES_PER_SECOND = HOST.local_link.bytes_per_second / 6


def groups_of_meshes() -> list[tuple[int, ...]]:
    """The groups of all axes of all meshes on two to eight devices."""
    found = set()
    for count in (2, 4, 8):
        for mesh in HOST.replace(devices_per_host=count).logical_mesh_shapes():
            for number in range(1, len(mesh.axis_names) + 1):
                for axes in itertools.combinations(mesh.axis_names, number):
                    found.update(axes_groups(mesh, axes))
    return sorted(found)


def rings_side_by_side(wiring: Wiring, members: tuple[int, ...]) -> int:
    """How many rings of all members can run at once, each wire taken once in each direction: an integer program."""
    first, *others = members
    rings = [
        tuple(zip((first, *order), (*order, first), strict=True))
        for order in itertools.permutations(others)
        if all(wiring.wires[a][b] for a, b in zip((first, *order), (*order, first), strict=True))
    ]
    if not rings:
        return 0
    arcs = list(itertools.permutations(members, 2))
    sets = list(map(frozenset, rings))
    uses = [[arc in ring for ring in sets] for arc in arcs]
    laid = milp(
        c=-np.ones(len(rings)),
        integrality=np.ones(len(rings)),
        constraints=LinearConstraint(np.array(uses, float), ub=[wiring.wires[a][b] for a, b in arcs]),
    )
    return round(-laid.fun)


@pytest.mark.parametrize("members", groups_of_meshes(), ids=str)
def test_rings_of_the_groups_of_meshes_are_those_that_can_be_laid(members: tuple[int, ...]) -> None:
    assert CUBE.ring_share(members) * 6 == max(1, rings_side_by_side(CUBE, members))


def test_the_cube_mesh_has_all_wires_in_a_ring_of_eight_and_one_or_two_in_a_pair() -> None:
    assert CUBE.ring_share(range(8)) == 1.0
    pairs = [CUBE.wires[a][b] for a, b in itertools.combinations(range(8), 2)]
    assert pairs.count(2) == 8 and pairs.count(1) == 8 and pairs.count(0) == 12
    assert all(sum(row) == 6 for row in CUBE.wires)


@pytest.mark.parametrize(
    ("kind", "full_bytes", "members", "wire_bytes", "wires"),
    [
        (Collective.ALL_REDUCE, 6e8, (0, 1), 6e8, 1),
        (Collective.ALL_REDUCE, 6e8, (0, 3), 6e8, 2),
        (Collective.ALL_GATHER, 4e8, (0, 1, 2, 3), 3e8, 4),
        (Collective.REDUCE_SCATTER, 8e8, tuple(range(8)), 7e8, 6),
        (Collective.ALL_TO_ALL, 4e8, (0, 1, 2, 3), 3e8, 3),  # a third of it to each other, some over a single wire
        (
            Collective.ALL_TO_ALL,
            8e8,
            tuple(range(8)),
            7e8,
            4.2,
        ),  # four direct and three over two wires: ten hops, six wires
        (Collective.ALL_TO_ALL, 2e8, (0, 5), 1e8, 1),
    ],
)
def test_seconds_are_those_of_the_wires_between_the_members(
    kind: Collective, full_bytes: float, members: tuple[int, ...], wire_bytes: float, wires: float
) -> None:
    cluster = HOST.replace(local_link=Link(0.0, HOST.local_link.bytes_per_second))
    expected = wire_bytes / (wires * WIRE_BYTES_PER_SECOND)
    assert group_seconds(kind, full_bytes, (members,), cluster) == pytest.approx(expected, rel=1e-12)


def test_a_message_goes_over_the_wires_of_its_pair() -> None:
    cluster = HOST.replace(local_link=Link(0.0, HOST.local_link.bytes_per_second))
    seconds = [permute_seconds(1e9, ((0, other),), cluster) * WIRE_BYTES_PER_SECOND / 1e9 for other in (1, 3, 5)]
    assert seconds == pytest.approx([1.0, 0.5, 1.0])


def test_across_hosts_the_wires_of_each_host_count() -> None:
    """Four devices on each of two hosts whose cards are no hindrance: four of the six wires."""
    wide = HOST.replace(hosts=2, local_link=Link(0.0, 120e9), network_link=Link(0.0, 1e15))
    both = (tuple(range(4)) + tuple(range(8, 12)),)
    assert group_seconds(Collective.ALL_GATHER, 8e8, both, wide) == pytest.approx(7e8 / (4 / 6 * 120e9))
    switched = wide.replace(local_wiring=None)
    assert group_seconds(Collective.ALL_GATHER, 8e8, both, switched) == pytest.approx(7e8 / 120e9)


def test_fewer_devices_have_the_wires_between_them() -> None:
    four = HOST.replace(devices_per_host=4)
    assert four.local_wiring is not None and len(four.local_wiring.wires) == 4
    assert HOST.part((4, 5, 6, 7)).local_wiring == four.local_wiring
    mesh = Mesh(("data",), (4,))
    whole = collective_seconds(Collective.ALL_REDUCE, 1e9, ("data",), mesh, HOST)
    assert collective_seconds(Collective.ALL_REDUCE, 1e9, ("data",), mesh, four) == whole


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    size = draw(st.integers(2, 6))
    counts = {pair: draw(st.integers(0, 2)) for pair in itertools.combinations(range(size), 2)}
    rows = tuple(tuple(counts.get((min(a, b), max(a, b)), 0) for b in range(size)) for a in range(size))
    return Wiring(rows, max(1, *map(sum, rows)))


@given(wirings(), st.data())
def test_no_group_sends_more_than_its_devices_do_or_less_than_over_one_wire(
    wiring: Wiring, data: st.DataObject
) -> None:
    members = data.draw(st.lists(st.integers(0, len(wiring.wires) - 1), min_size=2, unique=True))
    for share in (wiring.ring_share(members), wiring.message_share(*members[:2])):
        assert 1 / wiring.per_device <= share <= 1.0
    assert 0 < wiring.exchange_share(members) <= 1.0
    # Rings that can be laid are never more than the smallest cut has wires.
    assert rings_side_by_side(wiring, tuple(members)) <= wiring.ring_share(members) * wiring.per_device


@given(wirings())
def test_one_more_wire_slows_nothing_down(wiring: Wiring) -> None:
    rows = [list(row) for row in wiring.wires]
    rows[0][1] += 1
    rows[1][0] += 1
    more = Wiring(tuple(map(tuple, rows)), wiring.per_device + 1)
    everyone = range(len(rows))
    per_device = wiring.per_device
    assert more.ring_share(everyone) * (per_device + 1) >= wiring.ring_share(everyone) * per_device
    assert more.message_share(0, 1) * (per_device + 1) >= wiring.message_share(0, 1) * per_device


def test_equal_wires_between_all_are_a_switch_to_rings() -> None:
    full = Wiring(tuple(tuple(int(a != b) for b in range(4)) for a in range(4)), 3)
    assert full.ring_share(range(4)) == full.exchange_share(range(4)) == 1.0


def test_files_keep_wires(tmp_path: Path) -> None:
    HOST.to_file(tmp_path / "c.json")
    assert Cluster.from_file(tmp_path / "c.json") == HOST
    text = (tmp_path / "c.json").read_text().replace('"per_device": 6', '"per_device": 5')
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(ClusterError, match=r"d\.json: \$\.cluster\.local_wiring: wires\[0\] has 6 wires"):
        Cluster.from_file(tmp_path / "d.json")


@pytest.mark.parametrize(
    ("wires", "per_device", "says"),
    [
        (((0, 1),), 1, "a row for each device"),
        (((0, 1), (2, 0)), 2, "a wire goes both ways"),
        (((1, 0), (0, 0)), 2, "0 of a device to itself"),
        (((0, -1), (-1, 0)), 2, "give a count"),
        (((0, 2), (2, 0)), 1, "correct one of them"),
        (((0, 1), (1, 0)), 0, "per_device"),
    ],
)
def test_wirings_that_cannot_be_are_refused(wires: tuple[tuple[int, ...], ...], per_device: int, says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        Wiring(wires, per_device)


def test_clusters_refuse_wirings_that_are_not_theirs() -> None:
    with pytest.raises(ClusterError, match="a host has 16 devices, and its wiring is of 8"):
        HOST.replace(devices_per_host=16)
    with pytest.raises(ClusterError, match="give a Wiring, or None"):
        HOST.replace(local_wiring=((0, 1), (1, 0)))
    with pytest.raises(ClusterError, match="wires are a device's own"):
        HOST.replace(local_link=Link(1e-6, 1e11, shared_by=2))
