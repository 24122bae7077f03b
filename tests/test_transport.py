"""Arrays arrive on another mesh with their values, dtypes and shardings, whatever then happens to the source."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import numpy as jnp
from jax.sharding import NamedSharding

from autopar.cluster import Cluster, Mesh
from autopar.cost_model.transfers import cheapest_transfer
from autopar.errors import ClusterError, InternalError, TransportError
from autopar.plan import Layout
from autopar.runtime.collectives import apply_moves
from autopar.runtime.cross_mesh import Mover
from autopar.runtime.executor import partition_spec
from autopar.runtime.transport import InProcessTransport, Message
from autopar.schedule.cross_mesh import (
    CrossMeshTransfer,
    Placement,
    Strategy,
    cross_mesh_transfer,
    landing_layouts,
)
from autopar.schedule.reshard import layouts_of, replicated

NAMES = ("data", "model", "extra")
SIZES = ((1,), (2,), (4,), (2, 2), (2, 1, 2), (8,), (2, 4), (2, 2, 2), (3,))
MESHES = [Mesh(NAMES[: len(sizes)], sizes) for sizes in SIZES]
CLUSTERS = [Cluster.preset("p4d.24xlarge").replace(hosts=hosts, devices_per_host=8 // hosts) for hosts in (1, 2, 4)]
ONE = Mesh(("data",), (1,))
FOUR = Mesh(("data",), (4,))
CUT, WHOLE = Layout((("data",),)), replicated(1)
DTYPES = ("float32", "bfloat16", "bool", "int8", "uint32", "complex64", "float16", "float8_e4m3fn")
OVERLAP = ((0, 1, 2, 3), (2, 3, 0, 1))
DISJOINT = ((0, 1, 2, 3), (4, 5, 6, 7))


@st.composite
def transfers(draw: st.DrawFn) -> CrossMeshTransfer:
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 4, 6, 12, 8, 24, 0)), max_size=3)))
    ends = []
    disjoint = draw(st.booleans())
    for ids in ((0, 1, 2, 3), (4, 5, 6, 7)) if disjoint else (range(8), range(8)):
        mesh = draw(st.sampled_from([mesh for mesh in MESHES if mesh.size <= len(ids)]))
        devices = tuple(draw(st.permutations(ids)))[: mesh.size]
        ends.append(Placement(draw(st.sampled_from(layouts_of(shape, mesh))), mesh, devices))
    landing = draw(st.sampled_from(landing_layouts(shape, ends[1])))
    return cross_mesh_transfer(shape, 4, ends[0], ends[1], draw(st.sampled_from(CLUSTERS)), landing)


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    numbers = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, shape)
    return np.asarray(numbers).astype(jnp.dtype(dtype))


def moved(transfer: CrossMeshTransfer, x: Any) -> tuple[Mover, jax.Array]:
    mover = Mover(transfer, jax.devices())
    return mover, mover(jax.device_put(x, mover.source_sharding))


def same(array: jax.Array, expected: np.ndarray, sharding: NamedSharding) -> None:
    """Every shard, not just one of each piece."""
    assert array.shape == expected.shape
    assert array.dtype == expected.dtype
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


def between(
    ids: tuple[tuple[int, ...], tuple[int, ...]], source: Layout, target: Layout, size: int = 1 << 14
) -> CrossMeshTransfer:
    """One-dimensional, from four devices to four, by the target layout itself."""
    ends = Placement(source, FOUR, ids[0]), Placement(target, FOUR, ids[1])
    return cross_mesh_transfer((size,), 4, *ends, CLUSTERS[0])


# -------------------------------------------------------------------------------------------------------------- values


@given(transfers(), st.sampled_from(DTYPES))
def test_what_lands_and_is_finished_is_the_array(transfer: CrossMeshTransfer, dtype: str) -> None:
    x = values(transfer.shape, dtype)
    mover, landed = moved(transfer, x)
    same(landed, x, mover.landing_sharding)
    if not x.size:
        return  # what jit makes of arrays without elements is its own affair: shards of 0.10.2 belie their sharding
    mesh = mover.landing_sharding.mesh
    target = partition_spec(transfer.target.layout)
    finish = jax.shard_map(
        lambda shard: apply_moves(shard, transfer.moves, transfer.target.mesh),
        mesh=mesh,
        in_specs=mover.landing_sharding.spec,
        out_specs=target,
        check_vma=False,
    )
    sharding = NamedSharding(mesh, target)
    same(jax.jit(finish, out_shardings=sharding)(landed), x, sharding)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (8,), (0,)])
def test_keys_travel_typed(impl: str, shape: tuple[int, ...]) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), shape)
    layout = Layout((("data",),) if shape else ())
    source, target = Placement(layout, FOUR, DISJOINT[0]), Placement(replicated(len(shape)), FOUR, DISJOINT[1])
    mover, landed = moved(cross_mesh_transfer(shape, 8, source, target, CLUSTERS[0]), keys)
    assert landed.dtype == keys.dtype
    assert landed.shape == keys.shape
    assert landed.sharding.is_equivalent_to(mover.landing_sharding, landed.ndim)
    np.testing.assert_array_equal(jax.random.key_data(landed), jax.random.key_data(keys))


def test_one_mover_serves_several_dtypes() -> None:
    mover = Mover(between(DISJOINT, CUT, WHOLE, 8), jax.devices())
    for dtype in (*DTYPES, *DTYPES):
        x = values((8,), dtype)
        same(mover(jax.device_put(x, mover.source_sharding)), x, mover.landing_sharding)


def test_neither_the_users_mesh_nor_disabled_jit_matters() -> None:
    x = values((8,), "float32")
    with jax.set_mesh(jax.make_mesh((8,), ("other",), axis_types=(jax.sharding.AxisType.Explicit,))), jax.disable_jit():
        mover, landed = moved(between(DISJOINT, CUT, WHOLE, 8), x)
    same(landed, x, mover.landing_sharding)


def test_what_does_not_match_is_refused() -> None:
    mover = Mover(between(DISJOINT, CUT, WHOLE, 8), jax.devices())
    with pytest.raises(InternalError, match=r"shape \(16,\).* begins with shape \(8,\)"):
        mover(jax.device_put(np.zeros(16, np.float32), mover.source_sharding))
    with pytest.raises(InternalError, match=r"lies as .* its transfer begins"):
        mover(jax.device_put(np.zeros(8, np.float32), mover.landing_sharding))
    with pytest.raises(ClusterError, match="names device 7, but this process has 4"):
        Mover(between(DISJOINT, CUT, WHOLE, 8), jax.devices()[:4])


# ------------------------------------------------------------------------------------------- life after the source's end

ROUTES = [
    pytest.param(
        *(ids, source, target),
        id=f"{name}: {source} to {target}",
        marks=() if (source == target) is (name != "overlap") else pytest.mark.verify,
    )
    for name, ids in (("disjoint", DISJOINT), ("overlap", OVERLAP), ("same", (DISJOINT[0], DISJOINT[0])))
    for source, target in ((CUT, CUT), (CUT, WHOLE), (WHOLE, CUT), (WHOLE, WHOLE))
]
"""The default run takes half of them, in which every two of devices, source and target meet."""


@pytest.mark.parametrize(("ids", "source", "target"), ROUTES)
def test_the_source_may_be_donated_at_once(
    ids: tuple[tuple[int, ...], tuple[int, ...]], source: Layout, target: Layout
) -> None:
    """The next step writes over the source's memory while tiles are under way; what lands stays what was sent."""
    mover = Mover(between(ids, source, target), jax.devices())
    overwrite = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    for number in range(30):
        x = values((1 << 14,), "float32", number)
        sent = jax.device_put(x, mover.source_sharding) + 0
        landed = mover(sent)
        after = overwrite(sent)
        assert sent.is_deleted()
        same(landed, x, mover.landing_sharding)
        np.testing.assert_array_equal(after, np.full_like(x, -7))


@pytest.mark.parametrize(("ids", "source", "target"), ROUTES)
def test_the_landed_array_may_be_donated_while_the_source_lives(
    ids: tuple[tuple[int, ...], tuple[int, ...]], source: Layout, target: Layout
) -> None:
    mover = Mover(between(ids, source, target), jax.devices())
    overwrite = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    for number in range(10):
        x = values((1 << 14,), "float32", number)
        sent = jax.device_put(x, mover.source_sharding) + 0
        overwrite(mover(sent)).block_until_ready()
        same(sent, x, mover.source_sharding)


@pytest.mark.parametrize(("ids", "source", "target"), ROUTES)
def test_the_source_may_be_deleted_at_once(
    ids: tuple[tuple[int, ...], tuple[int, ...]], source: Layout, target: Layout
) -> None:
    mover = Mover(between(ids, source, target), jax.devices())
    for number in range(10):
        x = values((1 << 14,), "float32", number)
        sent = jax.device_put(x, mover.source_sharding) + 0
        landed = mover(sent)
        sent.delete()
        same(landed, x, mover.landing_sharding)


@pytest.mark.parametrize(("ids", "source", "target"), ROUTES)
def test_sending_does_not_wait_for_the_source(
    ids: tuple[tuple[int, ...], tuple[int, ...]], source: Layout, target: Layout
) -> None:
    """A slow program makes the source; it is still at work when the array has been sent."""
    mover = Mover(between(ids, source, target), jax.devices())
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 3_000, lambda _, y: jnp.sin(y) + x, x))
    x = jax.device_put(np.ones(1 << 14, np.float32), mover.source_sharding)
    jax.block_until_ready(mover(slow(x)))
    landed = mover(made := slow(x))
    assert not made.is_ready()
    np.testing.assert_array_equal(landed, made)


# ---------------------------------------------------------------------------------------------------------- messages


def relay_chain(timeout_seconds: float = 60.0) -> InProcessTransport:
    """Meshes of devices 0-3, 4-7 and 2-5 in a chain."""
    places = [((0, 1, 2, 3), CUT), ((4, 5, 6, 7), WHOLE), ((2, 3, 4, 5), CUT)]
    ends = [Placement(layout, FOUR, ids) for ids, layout in places]
    table = {number: cross_mesh_transfer((64,), 4, ends[number], ends[number + 1], CLUSTERS[1]) for number in range(2)}
    return InProcessTransport(table, jax.devices(), timeout_seconds)


def test_one_thread_to_a_mesh() -> None:
    """A pipeline of three meshes, each with its thread, many microbatches, donated sources."""
    transport, count = relay_chain(), 40
    results: dict[int, np.ndarray] = {}
    errors: list[Exception] = []
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    sharding = Mover(between(DISJOINT, CUT, WHOLE, 64), jax.devices()).source_sharding

    def first() -> None:
        for number in range(count):
            x = jax.device_put(np.full(64, number, np.float32), sharding) + 0
            transport.send(Message(0, number), x)
            bump(x)

    def second() -> None:
        for number in range(count):
            x = bump(transport.receive(Message(0, number)))
            transport.send(Message(1, number), x)
            bump(x)

    def third() -> None:
        for number in reversed(range(count)):  # receivers need not follow the order of sending
            results[number] = np.asarray(transport.receive(Message(1, number)))

    def guarded(work: Any) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other threads must not wait
            errors.append(error)
            transport.fail(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (third, second, first)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number in range(count):
        np.testing.assert_array_equal(results[number], np.full(64, number + 1, np.float32))


def test_messages_of_one_name_keep_their_order() -> None:
    transport = relay_chain()
    sharding = Mover(between(DISJOINT, CUT, WHOLE, 64), jax.devices()).source_sharding
    for number in (1.0, 2.0):
        transport.send(Message(0, 0), jax.device_put(np.full(64, number, np.float32), sharding))
    assert [float(transport.receive(Message(0, 0))[0]) for _ in range(2)] == [1.0, 2.0]


def test_a_message_that_does_not_come_is_named() -> None:
    transport = relay_chain(timeout_seconds=0.2)
    sharding = Mover(between(DISJOINT, CUT, WHOLE, 64), jax.devices()).source_sharding
    transport.send(Message(0, 1), jax.device_put(np.zeros(64, np.float32), sharding))
    with pytest.raises(TransportError, match=r"transfer 0 of microbatch 2 did not come within 0.2 s") as caught:
        transport.receive(Message(0, 2))
    assert "not yet received: transfer 0 of microbatch 1." in str(caught.value)
    with pytest.raises(TransportError, match=r"^transfer 1 did not come"):
        transport.receive(Message(1, -1))
    with pytest.raises(InternalError, match="transfer 9 is in no table"):
        transport.send(Message(9, -1), jnp.zeros(64))


def test_a_failure_wakes_those_who_wait_and_is_forgotten_when_cleared() -> None:
    transport = relay_chain()
    cause = ValueError("mesh 0 broke")
    timer = threading.Timer(0.1, transport.fail, [cause])
    started = time.monotonic()
    timer.start()
    with pytest.raises(TransportError, match="transfer 0 of microbatch 0 will not come") as caught:
        transport.receive(Message(0, 0))
    timer.join()
    assert caught.value.__cause__ is cause
    assert time.monotonic() - started < 30
    transport.clear()
    sharding = Mover(between(DISJOINT, CUT, WHOLE, 64), jax.devices()).source_sharding
    transport.send(Message(0, 0), jax.device_put(np.ones(64, np.float32), sharding))
    np.testing.assert_array_equal(transport.receive(Message(0, 0)), np.ones(64))


def test_a_broadcast_to_two_hosts_is_relayed() -> None:
    """One device sends to four on two other hosts; the cheapest transfer of few bytes relays on each."""
    cluster = CLUSTERS[2]
    source, target = Placement(WHOLE, ONE, (0,)), Placement(WHOLE, FOUR, (4, 5, 6, 7))
    transfer = cheapest_transfer((8,), 4, source, target, cluster)
    assert transfer.strategy is Strategy.BROADCAST
    x = values((8,), "float32")
    mover, landed = moved(transfer, x)
    same(landed, x, mover.landing_sharding)
