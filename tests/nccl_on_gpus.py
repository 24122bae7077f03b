"""The real NCCL between two meshes of GPUs of this machine: arrays of every type, then a pipeline that must equal ``jax.jit``.

A program of its own, for tests see no GPU: ``JAX_PLATFORMS=cuda,cpu python -m tests.nccl_on_gpus``.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np

import autopar
from autopar.cluster import Mesh
from autopar.plan import Layout
from autopar.runtime.cross_mesh import placed_mesh
from autopar.runtime.cupy_nccl import CupyNccl
from autopar.runtime.executor import partition_spec
from autopar.runtime.nccl import NcclPeers, NcclTransport, Pair, Station
from autopar.runtime.shipment import Wire, ship_pipeline
from autopar.runtime.transport import Message
from autopar.schedule.cross_mesh import CrossMeshTransfer, Placement, cross_mesh_transfer
from tests.mesh_threads import MeshThreads, equal_to_jit

DTYPES = ("float32", "float64", "bfloat16", "bool", "int8", "uint32", "complex64", "complex128", "float8_e4m3fn")


def transfers_between(meshes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[CrossMeshTransfer]:
    """Cut or whole at either end."""
    size = len(meshes[0])
    mesh = Mesh(("data",), (size,))
    cluster = autopar.Cluster.preset("p4d.24xlarge").replace(hosts=1, devices_per_host=2 * size)
    ends = [[Placement(layout, mesh, ids) for layout in (Layout((("data",),)), Layout(((),)))] for ids in meshes]
    return [cross_mesh_transfer((1 << 12,), 4, source, target, cluster) for source in ends[0] for target in ends[1]]


def check_arrays() -> None:
    """What arrives is what was sent, while later programs overwrite the memory that it was sent from."""
    half = len(jax.devices()) // 2
    meshes = tuple(range(half)), tuple(range(half, 2 * half))
    wires = [
        Wire(number, transfer, dtype)
        for number, (transfer, dtype) in enumerate(
            (transfer, dtype) for transfer in transfers_between(meshes) for dtype in DTYPES
        )
    ]
    library = CupyNccl()
    peers = NcclPeers((Pair((*meshes[0], *meshes[1]), library.unique_id()),), 0)
    mesh_of = partial(placed_mesh, devices=jax.devices())

    def end(own: tuple[int, ...], leaving: list[Wire], coming: list[Wire]) -> tuple[Station, NcclTransport]:
        station = Station(library, {number: jax.devices()[number] for number in own}, limit_bytes=1 << 16)
        transport = NcclTransport(station, peers, leaving, coming, mesh_of)
        transport.rehearse()
        return station, transport

    def value(wire: Wire) -> np.ndarray:
        numbers = np.random.default_rng(wire.number).integers(0, 100, wire.transfer.shape)
        return np.asarray(numbers).astype(jax.numpy.dtype(wire.dtype))

    def send() -> None:
        with jax.enable_x64(True):
            station, transport = end(meshes[0], wires, [])
            for wire in wires:
                spec = partition_spec(wire.transfer.source.layout)
                sharding = jax.sharding.NamedSharding(mesh_of(wire.transfer.source), spec)
                transport.send(Message(wire.number, 0), jax.device_put(value(wire), sharding))
            station.settle()

    def receive() -> None:
        with jax.enable_x64(True):
            station, transport = end(meshes[1], [], wires)
            for wire in wires:
                landed = transport.receive(Message(wire.number, 0))()
                np.testing.assert_array_equal(np.asarray(landed), value(wire), err_msg=str(wire))
            station.settle()

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(send), threads.submit(receive)]:
            future.result()


def check_pipeline() -> None:
    """Two stages by every schedule."""

    def executor(pipeline: Any, transfers: Any, devices: Any, say: Any) -> MeshThreads:
        return MeshThreads(ship_pipeline(pipeline, transfers, cluster.device.platform, say), CupyNccl)

    local = autopar.Cluster.local()
    slow = dataclasses.replace(local.device, flops_per_second=dict.fromkeys(local.device.flops_per_second, 1e8))
    cluster = local.replace(name="slow GPUs", device=slow)
    with mock.patch("autopar.compiled.PipelineExecutor", executor):
        for schedule in ("gpipe", "1f1b", "eager_1f1b"):
            equal_to_jit(cluster, 2, 4, schedule=schedule)


if __name__ == "__main__":
    assert len(jax.devices("cuda")) >= 2, "two GPUs are needed"
    check_arrays()
    check_pipeline()
    print("arrays and pipelines over NCCL are right")
