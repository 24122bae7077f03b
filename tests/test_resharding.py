"""The cases of :mod:`benchmarks.resharding`: every byte crosses a slow link once; what lands is right."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from autopar.cluster import Cluster, Link, Mesh
from autopar.cost_model.transfers import cheapest_transfer
from autopar.plan import Layout
from autopar.runtime.cross_mesh import Mover, placed_mesh
from autopar.runtime.interpreter import finisher
from autopar.schedule.cross_mesh import Placement
from benchmarks.resharding import CASES, ITEM_BYTES, Case, cluster_of, counted_bytes, fewest_bytes, naive_parts

SHAPE = (1024, 1024, 12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_byte_enters_a_host_once(case: Case) -> None:
    source, target = case.ends()
    transfer = cheapest_transfer(SHAPE, ITEM_BYTES, source, target, cluster_of(200))
    assert counted_bytes(transfer) == fewest_bytes(SHAPE, target)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_naive_pulls_make_whole_pieces(case: Case) -> None:
    source, target = case.ends()
    pulled = dict.fromkeys(target.devices, 0)
    for device, _, box, _ in naive_parts(SHAPE, source, target):
        pulled[device] += math.prod(stop - start for start, stop in box)
    assert set(pulled.values()) == {math.prod(SHAPE) // math.prod(target.pieces())}


def test_far_hosts_are_gathered_first_and_rightly() -> None:
    slow = Link(1e-4, 25e6, 2)
    cluster = Cluster.local().replace(hosts=4, devices_per_host=2, network_link=slow, profile=None)
    source = Placement(Layout((("d",), (), ())), Mesh(("h", "d"), (1, 2)), (0, 1))
    target = Placement(Layout(((), (), ())), Mesh(("h", "d"), (3, 2)), (2, 3, 4, 5, 6, 7))
    shape = (64, 64, 12)
    transfer = cheapest_transfer(shape, 4, source, target, cluster)
    assert [move.axes for move in transfer.moves] == [("h",), ("d",)]
    mover = Mover(transfer, jax.devices())
    value = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    landed = mover(jax.device_put(value, mover.source_sharding))
    whole = finisher(transfer, placed_mesh(target, jax.devices()))(landed)
    for shard in whole.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value)
