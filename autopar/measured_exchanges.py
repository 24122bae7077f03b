"""How long do the processors of a host work on a message between processes?

This process sends itself messages as meshes in processes of their own do (:mod:`autopar.runtime.pulled`), so it is both ends, and
does half of the work as each.  All devices of a host have c cores between them, so that while d of them compute, the work of
one device's message takes as long as on a device with c / d cores (one core at most: a message is copied by one thread).

    seconds at an end = (processor seconds of a message / 2) · max(d / c, 1)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.bench import Bench
from autopar.cluster import Cluster, Mesh
from autopar.cores import usable_cores
from autopar.plan import Layout
from autopar.runtime.cross_mesh import placed_mesh
from autopar.runtime.exchange import Exchange
from autopar.runtime.pulled import PullPeers
from autopar.runtime.shipment import Wire
from autopar.runtime.transport import Message
from autopar.schedule.cross_mesh import Placement, cross_mesh_transfer

_ADDRESS, _SECRET = "127.0.0.1", bytes(16)
_TOGETHER = 4
"""Messages are under way so many at a time, as between stages."""


class SelfExchange:
    """Sends arrays from the first device to the last."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._exchange = Exchange(bench.devices, _ADDRESS)
        self._numbers = itertools.count()
        self._peers = PullPeers(dict.fromkeys(range(len(bench.devices)), self._exchange.serve()), _SECRET, 0)

    def seconds(self, size_bytes: int) -> float:
        """What a message of so many bytes costs each of its ends."""
        call = self._call(size_bytes)
        devices = len(self._bench.devices)
        return self._bench.timer.processor_seconds(call) / _TOGETHER / 2 * max(devices / usable_cores(), 1.0)

    def _call(self, size_bytes: int) -> Callable[[], Any]:
        devices, elements = self._bench.devices, size_bytes // 4
        mesh = Mesh(("data",), (1,))
        source, target = (Placement(Layout(((),)), mesh, (device,)) for device in (0, len(devices) - 1))
        cluster = Cluster.local(devices, profile=None)
        number = next(self._numbers)
        wire = Wire(number, cross_mesh_transfer((elements,), 4, source, target, cluster), "float32", False)
        transport = self._exchange.pulls(self._peers, [wire], [wire], lambda place: placed_mesh(place, devices))
        sharding = NamedSharding(placed_mesh(source, devices), jax.sharding.PartitionSpec())
        array = jax.device_put(np.zeros(elements, np.float32), sharding)
        steps = itertools.count()

        def call() -> list[jax.Array]:
            transport.begin(next(steps))
            messages = [Message(number, microbatch) for microbatch in range(_TOGETHER)]
            for message in messages:
                transport.send(message, array)
            return [transport.receive(message) for message in messages]

        return call
