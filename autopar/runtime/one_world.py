"""What do processes of one ``jax.distributed`` world tell each other, and where does each find the others?

All of them call these functions, in the same order, as they run the same script.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from autopar import _compat
from autopar.runtime.attendance import Attendance
from autopar.runtime.cross_mesh import placed_mesh
from autopar.runtime.exchange import Exchange
from autopar.runtime.pulled import PullPeers, PullTransport
from autopar.runtime.shipment import Wire
from autopar.schedule.cross_mesh import Placement

_SECRET_BYTES = 16


def told_by_all(said: bytes) -> list[bytes]:
    """What each process says, in the order of their numbers."""
    lengths = multihost_utils.process_allgather(np.int32(len(said))).reshape(-1)
    row = np.zeros(max(1, int(lengths.max())), np.uint8)
    row[: len(said)] = np.frombuffer(said, np.uint8)
    rows = multihost_utils.process_allgather(row).reshape(len(lengths), -1)
    return [np.asarray(one, np.uint8)[:length].tobytes() for one, length in zip(rows, lengths, strict=True)]


def own_address() -> str:
    """The address at which other processes reach this host: the one from which it reaches the coordinator.

    A host whose name is that of its loopback, where the coordinator is its own, takes the one from which it reaches another host.
    """
    coordinator = _compat.coordinator_address()
    host, _, port = (coordinator or "127.0.0.1:1").rpartition(":")
    own = _address_towards(host.strip("[]"), int(port))
    others = [one.decode() for one in told_by_all(own.encode())]
    if _is_loopback(own):
        outside = next((one for one in others if not _is_loopback(one)), None)
        own = own if outside is None else _address_towards(outside, 1)
    return f"[{own}]" if ":" in own else own


class Neighbours:
    """Owns the server from which the other processes pull arrays of one program, and knows theirs."""

    def __init__(self, devices: Sequence[Any]) -> None:
        """``devices[i]`` is the JAX device with global id ``i``."""
        self._devices = tuple(devices)
        self._exchange = Exchange(jax.local_devices(), own_address())
        said = told_by_all(secrets.token_bytes(_SECRET_BYTES) + self._exchange.serve().encode())
        addresses = [one[_SECRET_BYTES:].decode() for one in said]
        by_device = {number: addresses[device.process_index] for number, device in enumerate(devices)}
        secret = said[0][:_SECRET_BYTES]
        self._peers = PullPeers(by_device, secret, 0)
        name = hashlib.blake2b(
            b"attendance", key=secret, digest_size=8
        ).hexdigest()  # others may read it, the secret not
        self.attendance = Attendance(_compat.coordinator_client(), name, jax.process_index(), len(said))
        """Who has come to which step of the program."""

    def mesh_of(self, placement: Placement) -> jax.sharding.Mesh:
        """The JAX mesh of a placement."""
        return placed_mesh(placement, self._devices)

    def pulls(self, outgoing: Sequence[Wire], incoming: Sequence[Wire]) -> PullTransport:
        """A transport for these wires, whose numbers no other transport of the program has."""
        return self._exchange.pulls(self._peers, outgoing, incoming, self.mesh_of)


def is_here(device: Any) -> bool:
    """Whether a device belongs to this process."""
    return bool(device.process_index == jax.process_index())


def elsewhere(aval: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
    """An array of which nothing lies in this process."""
    return jax.make_array_from_single_device_arrays(tuple(aval.shape), sharding, [], dtype=aval.dtype)


def _address_towards(host: str, port: int) -> str:
    """The own address from which a host is reached; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
