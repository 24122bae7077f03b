"""Collectives in a world of several CPU processes: measured in another process, and priced where a mesh lies on several hosts."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.cluster import Cluster, Link
from autopar.cost_model.collectives import Collective, group_seconds, permute_seconds, wire_bytes
from autopar.curves import Curve
from autopar.measured_worlds import Asked, world_curves
from autopar.profile import CollectiveCurve
from tests.test_profile import profile_of

SLOWER = 20.0
"""So many times as long as among the devices of one process."""
WORLD = tuple(
    CollectiveCurve(one.kind, one.group_size, Curve(tuple((sent, SLOWER * took) for sent, took in one.curve.samples)))
    for one in profile_of(4).collectives
)
PLAIN, IN_WORLD = (profile_of(4, world_collectives=curves) for curves in ((), WORLD))
INSIDE, ACROSS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))


def hosts(count: int, bytes_per_second: float = 1e9) -> Cluster:
    link = Link(1e-4, bytes_per_second, 4)
    return dataclasses.replace(
        Cluster.local(), name="hosts", hosts=count, devices_per_host=4, network_link=link, profile=IN_WORLD
    )


@pytest.mark.parametrize("kind", Collective)
def test_collectives_within_a_host_are_those_of_a_world_if_there_are_several_hosts(kind: Collective) -> None:
    two, one = hosts(2), hosts(1)
    alone = group_seconds(kind, 1e5, INSIDE[:1], one)
    assert alone == group_seconds(kind, 1e5, INSIDE[:1], one.with_profile(PLAIN))
    assert group_seconds(kind, 1e5, INSIDE, two) == pytest.approx(SLOWER * alone)
    assert group_seconds(kind, 1e5, INSIDE, two.with_profile(PLAIN)) == pytest.approx(alone)
    assert group_seconds(kind, 1e5, INSIDE[:1], two.part((0, 1, 2, 3))) == alone


@pytest.mark.parametrize("full_bytes", [0.0, 1e3, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("kind", Collective)
def test_across_hosts_they_take_what_links_or_processors_take_whichever_is_more(
    kind: Collective, full_bytes: float
) -> None:
    sent = wire_bytes(kind, full_bytes, 2)
    for rate in (1e6, 1e12):  # the links decide, and the processors
        cluster = hosts(2, rate)
        linked = group_seconds(kind, full_bytes, ACROSS, cluster.with_profile(PLAIN))
        curve = IN_WORLD.in_world.collective(kind.value, 2)
        assert curve is not None
        carried = curve.at(sent)
        assert group_seconds(kind, full_bytes, ACROSS, cluster) == pytest.approx(max(linked, carried), rel=0.02)


def test_messages_in_a_world_cost_what_a_permute_there_does() -> None:
    cluster = hosts(2)
    inside = ((0, 1), (1, 2), (2, 3), (3, 0))
    assert permute_seconds(1e5, inside, cluster) == pytest.approx(
        SLOWER * permute_seconds(1e5, inside, cluster.with_profile(PLAIN))
    )


@pytest.mark.verify
def test_a_world_is_measured_in_another_process() -> None:
    said: list[str] = []
    curves = world_curves(Asked(2, (1 << 12, 1 << 16), 8, 0.0, 2), said.append)
    assert [(one.kind, one.group_size) for one in curves] == [(kind.value, 2) for kind in Collective]
    for one in curves:
        assert [sent for sent, _ in one.curve.samples] == [
            wire_bytes(Collective(one.kind), size, 2) for size in (1 << 12, 1 << 16)
        ]
    assert said[0] == "between processes, all-reduce of 4 KiB among 2"


def test_where_a_world_cannot_be_measured_the_profile_goes_without() -> None:
    said: list[str] = []
    assert world_curves(Asked(2, (), 8, 0.0, 2), said.append) == ()
    assert said == ["collectives between processes could not be measured"]
    assert world_curves(Asked(1, (1 << 12,), 8, 0.0, 2), said.append) == ()
