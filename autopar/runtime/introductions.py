"""How do meshes find each other?  The driver asks their processes where they are and tells all of them what all have said.

    pulls    the address of every process's transfer server
    NCCL     a communicator's name for every two meshes that exchange arrays

NCCL's names are made by the first process of the first of two meshes, which serves their meeting: so the driver needs neither
NCCL nor a GPU.  A name is used for as long as both meshes live and nothing has failed, by all programs that run on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster import Platform
from autopar.ray_hosts import MeshTransport
from autopar.runtime.exchange import Peers, chosen
from autopar.runtime.fleet import Fleet, MeshWorld
from autopar.runtime.nccl import NcclPeers, Pair
from autopar.runtime.shipment import MeshShipment
from autopar.runtime.waiting import STARTING_SECONDS, collected


def introduced(fleet: Fleet, worlds: Sequence[MeshWorld], meshes: Sequence[MeshShipment], backend: Platform) -> Peers:
    """Who takes part in a program; ``meshes`` say what each of the worlds exchanges.

    Raises ``ClusterError`` if NCCL is asked for and some process has none.
    """
    dtypes = [wire.dtype for mesh in meshes for wire in mesh.outgoing]
    if chosen(fleet.hosts.transport, backend, dtypes, lambda: _lacks(worlds)) is MeshTransport.PULL:
        return fleet.peers(worlds)
    pairs = []
    for first, second in neighbours(meshes):
        devices = tuple(sorted({*meshes[first].devices, *meshes[second].devices}))
        both = worlds[first], worlds[second]
        if both not in fleet.meetings:
            asked = [both[0].actors[0].unique_ids.remote(1)]
            ((fleet.meetings[both],),) = collected(asked, STARTING_SECONDS, f"{both[0].name} to name a communicator")
        pairs.append(Pair(devices, fleet.meetings[both]))
    return NcclPeers(tuple(pairs), fleet.epoch)


def neighbours(meshes: Sequence[MeshShipment]) -> list[tuple[int, int]]:
    """Every two meshes that exchange arrays, the lower number first, in order."""
    homes = {wire.number: number for number, mesh in enumerate(meshes) for wire in mesh.incoming}
    ends = [(number, homes[wire.number]) for number, mesh in enumerate(meshes) for wire in mesh.outgoing]
    return sorted({(min(pair), max(pair)) for pair in ends})


def _lacks(worlds: Sequence[MeshWorld]) -> list[str]:
    """Which processes have no NCCL, and why."""
    asked = [(world, world.call("nccl_lack")) for world in worlds]
    found = []
    for world, refs in asked:
        answers = collected(refs, STARTING_SECONDS, f"{world.name} to look for NCCL")
        found += [f"on {name} {lack}" for name, lack in zip(world.host_names, answers, strict=True) if lack]
    return found
