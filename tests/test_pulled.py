"""Pulls between meshes of different processes, over a server that keeps the rules of JAX's and loses what breaks them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InternalError, TransportError
from autopar.plan import Layout
from autopar.runtime.cross_mesh import placed_mesh
from autopar.runtime.executor import partition_spec
from autopar.runtime.pulled import PullPeers, PullTransport
from autopar.runtime.shipment import Wire
from autopar.runtime.transport import Message
from autopar.schedule.cross_mesh import CrossMeshTransfer, Placement, cross_mesh_transfer, landing_layouts
from autopar.schedule.reshard import layouts_of, replicated
from tests.test_transport import CLUSTERS, CUT, DISJOINT, DTYPES, FOUR, MESHES, WHOLE, between, same, values

SENDER, RECEIVER = "10.0.0.1:1", "10.0.0.2:1"
SECRET = b"0123456789abcdef"


class Server:
    """One offer serves one pull; arrays are whole, of this process, each on one device; a number is offered once."""

    def __init__(self, address: str, offers: dict[int, list[jax.Array]]) -> None:
        self._address = address
        self._offers = offers

    def address(self) -> str:
        return self._address

    def connect(self, address: str) -> Server:
        return self

    def await_pull(self, uuid: int, arrays: list[jax.Array]) -> None:
        assert 0 <= uuid < 1 << 63
        assert uuid not in self._offers, "two offers of one name"
        assert all(len(array.sharding.device_set) == 1 for array in arrays)
        assert arrays, "an empty offer is never pulled"
        self._offers[uuid] = list(arrays)

    def pull(self, uuid: int, wanted: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        if uuid not in self._offers:
            raise RuntimeError("nothing is offered under that name")
        arrays = self._offers.pop(uuid)
        assert [(one.shape, one.dtype) for one in arrays] == [(one.shape, one.dtype) for one in wanted]
        return [jax.device_put(one, like.sharding) for one, like in zip(arrays, wanted, strict=True)]


def ends(transfer: CrossMeshTransfer, dtype: str, *, epochs: tuple[int, int] = (0, 0), is_donated: bool = False) -> Any:
    """The transports of both meshes, and what is offered between them."""
    offers: dict[int, list[jax.Array]] = {}
    addresses = dict.fromkeys(transfer.target.devices, RECEIVER) | dict.fromkeys(transfer.source.devices, SENDER)
    wire = Wire(7, transfer, dtype, is_donated)
    made = [
        PullTransport(
            Server(own, offers),
            PullPeers(addresses, SECRET, epoch),
            [wire] if own == SENDER else [],
            [wire] if own == RECEIVER else [],
            lambda placement: placed_mesh(placement, jax.devices()),
        )
        for own, epoch in zip((SENDER, RECEIVER), epochs, strict=True)
    ]
    return *made, offers


def placed(transfer: CrossMeshTransfer, array: Any) -> jax.Array:
    mesh = placed_mesh(transfer.source, jax.devices())
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, partition_spec(transfer.source.layout)))


@st.composite
def transfers(draw: st.DrawFn) -> CrossMeshTransfer:
    """Between meshes that share no device, as meshes in different processes do."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 4, 6, 12, 8, 0)), max_size=3)))
    places = []
    for ids in DISJOINT:
        mesh = draw(st.sampled_from([mesh for mesh in MESHES if mesh.size <= len(ids)]))
        devices = tuple(draw(st.permutations(ids)))[: mesh.size]
        places.append(Placement(draw(st.sampled_from(layouts_of(shape, mesh))), mesh, devices))
    landing = draw(st.sampled_from(landing_layouts(shape, places[1])))
    return cross_mesh_transfer(shape, 4, *places, draw(st.sampled_from(CLUSTERS)), landing)


@given(transfers(), st.sampled_from(DTYPES), st.booleans())
def test_what_is_pulled_is_the_array(transfer: CrossMeshTransfer, dtype: str, is_donated: bool) -> None:
    sender, receiver, offers = ends(transfer, dtype, is_donated=is_donated)
    x = values(transfer.shape, dtype)
    array = placed(transfer, x)
    sender.send(Message(7, 0), array)
    if is_donated:
        array.delete()  # as a program does that takes its memory over
    landed = receiver.receive(Message(7, 0))
    mesh = placed_mesh(transfer.landed, jax.devices())
    same(landed, x, jax.sharding.NamedSharding(mesh, partition_spec(transfer.landing)))
    assert not offers, "every offer was pulled"


@pytest.mark.parametrize("shape", [(), (8,), (0,)])
def test_keys_travel_as_words(shape: tuple[int, ...]) -> None:
    keys = jax.random.split(jax.random.key(3), shape)
    layout = Layout((("data",),) if shape else ())
    source, target = Placement(layout, FOUR, DISJOINT[0]), Placement(replicated(len(shape)), FOUR, DISJOINT[1])
    transfer = cross_mesh_transfer(shape, 8, source, target, CLUSTERS[0])
    sender, receiver, _ = ends(transfer, "key<fry>")
    sender.send(Message(7, 0), placed(transfer, keys))
    landed = receiver.receive(Message(7, 0))
    assert landed.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(landed), jax.random.key_data(keys))


def test_names_tell_steps_microbatches_and_epochs_apart() -> None:
    transfer = between(DISJOINT, CUT, WHOLE, 8)
    sender, receiver, offers = ends(transfer, "float32")
    array = placed(transfer, values((8,), "float32"))
    for step in (0, 1):
        sender.begin(step)
        for microbatch in (0, 1):
            sender.send(Message(7, microbatch), array)
    assert len(offers) == 4
    receiver.begin(2)
    with pytest.raises(TransportError, match="transfer 7 of microbatch 0 cannot be pulled"):
        receiver.receive(Message(7, 0))
    old, new, _ = ends(transfer, "float32", epochs=(0, 1))
    old.send(Message(7, 0), array)
    with pytest.raises(TransportError, match="cannot be pulled"):
        new.receive(Message(7, 0))


def test_messages_of_nobody_are_refused() -> None:
    transfer = between(DISJOINT, CUT, WHOLE, 8)
    sender, receiver, _ = ends(transfer, "float32")
    with pytest.raises(InternalError, match="does not leave this mesh"):
        receiver.send(Message(7, 0), placed(transfer, values((8,), "float32")))
    with pytest.raises(InternalError, match="does not come to this mesh"):
        sender.receive(Message(7, 0))
