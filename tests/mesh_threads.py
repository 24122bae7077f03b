"""A pipeline as the processes of a Ray cluster run it, messages by NCCL, but with each mesh a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import jax
import numpy as np

import autopar
from autopar.runtime.exchange import Exchange
from autopar.runtime.executor import device_mesh
from autopar.runtime.introductions import neighbours
from autopar.runtime.loaded import Loaded
from autopar.runtime.nccl import Library, NcclPeers, Pair
from autopar.runtime.shipment import MeshShipment, Shipments
from tests.ray_cases import assert_equal, batch_of, create, train_step


def pairs_of(meshes: Sequence[MeshShipment], library: Library) -> tuple[Pair, ...]:
    """What the driver tells all processes."""
    return tuple(
        Pair(tuple(sorted({*meshes[a].devices, *meshes[b].devices})), library.unique_id())
        for a, b in neighbours(meshes)
    )


class MeshThreads:
    """Runs shipments on the devices of this process; called as an executor is."""

    def __init__(self, shipments: Shipments, make_library: Callable[[], Library]) -> None:
        self._shipments = shipments
        self._threads = ThreadPoolExecutor(len(shipments.meshes))
        self._step = 0
        library = make_library()
        self.exchanges = [
            Exchange([jax.devices()[number] for number in told.devices], "", lambda: library)
            for told in shipments.meshes
        ]
        self.loaded = [
            Loaded(told, lambda mesh, ids: device_mesh(mesh, [jax.devices()[number] for number in ids]))
            for told in shipments.meshes
        ]
        self._library = library
        self._epoch = 0
        self.connect()

    def connect(self) -> None:
        """Introduce all meshes to each other, again if they were before."""
        self._epoch += 1
        peers = NcclPeers(pairs_of(self._shipments.meshes, self._library), self._epoch)
        self._together(lambda mesh: self.loaded[mesh].connect(self.exchanges[mesh], peers))

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        given = [
            [
                self._put(leaves, entry, sharding)
                for entry, sharding in zip(told.entries, one.entry_shardings, strict=True)
            ]
            for told, one in zip(self._shipments.meshes, self.loaded, strict=True)
        ]
        self._step += 1
        left = self._together(lambda mesh: self.loaded[mesh].run(self._step, given[mesh]))
        return [
            jax.numpy.asarray(one.literal, one.aval.dtype) if one.result < 0 else left[one.mesh][one.result]
            for one in self._shipments.outputs
        ]

    def wait(self, results: Sequence[Any]) -> None:
        """Wait until the results of a step are there."""
        jax.block_until_ready(results)

    def _put(self, leaves: Sequence[Any], entry: Any, sharding: Any) -> jax.Array:
        leaf = leaves[entry.position]
        value = leaf if entry.row < 0 else leaf[entry.row]
        if not isinstance(value, jax.Array):
            value = np.asarray(value)
        return jax.device_put(value, sharding, may_alias=False)

    def _together(self, work: Callable[[int], Any]) -> list[Any]:
        """One thread per mesh; when one fails, all hang up."""
        wide = bool(jax.config.jax_enable_x64)
        failures: list[BaseException] = []

        def inside(mesh: int) -> Any:
            try:
                with jax.enable_x64(wide):
                    return work(mesh)
            except BaseException as error:
                failures.append(error)
                for exchange in self.exchanges:
                    exchange.hang_up()
                raise

        futures = [self._threads.submit(inside, mesh) for mesh in range(len(self._shipments.meshes))]
        wait(futures)
        if failures:
            raise failures[0]  # others follow from it
        return [future.result() for future in futures]


def equal_to_jit(cluster: autopar.Cluster, stages: Any, count: int, **options: Any) -> Any:
    """Some steps with keys and dropout as a pipeline, in float64; returns the step."""
    with jax.enable_x64(True):
        step = autopar.parallelize(train_step, cluster=cluster, stages=stages, num_microbatches=count, **options)
        state, expected = step.init(partial(create, 0), batch_of(0)), create(0)
        reference = jax.jit(train_step)
        for number in range(3):
            state, metrics = step(state, batch_of(number))
            expected, wanted = reference(expected, batch_of(number))
            np.testing.assert_allclose(float(metrics["loss"]), float(wanted["loss"]), rtol=1e-12)
        assert_equal(state, expected)
        return step
