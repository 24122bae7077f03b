"""Does an array get from mesh to mesh as quickly as the slow links allow, and how much quicker than by naive pulls?

    python -m benchmarks.resharding [--mbit 200] [--mib 48] [--rounds 3]        (as root, on Linux with iproute2)

Four emulated hosts (:mod:`benchmarks.netns`) with four virtual devices each; nine pairs of placements of an array of
1024 × 1024 × ``depth``, whose depth makes it as large as asked for.  The array is resharded twice:

    ours     by the runtime of :mod:`autopar.runtime`: a list with one ``Send``, a list with one ``Receive``
    naive    every receiving device pulls each piece that it needs from the first device that holds it, one after the other;
             all devices at once, by the same transfer library

Bytes over slow links are those that enter the hosts of the target.  The *lower bound*: every host must get each byte that one of
its devices needs, once.  *Counted* are those of tiles between hosts and of collectives on the target mesh; *measured* is what
the network cards of the hosts say, headers and acknowledgements included.  Quickest possible: the most loaded card, were it
busy all the time.  Seconds are medians.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from rich.console import Console
from rich.table import Table

from autopar.cluster import Cluster, Link, Mesh
from autopar.cost_model.reshard import collective_bytes
from autopar.cost_model.transfers import cheapest_transfer
from autopar.plan import Layout
from autopar.schedule.cross_mesh import Box, CrossMeshTransfer, Placement, piece_box
from autopar.schedule.reshard import MoveKind, after_move
from benchmarks.netns import Network, RayNodes, why_not
from benchmarks.netns.hosts import traffic_of

HOSTS, DEVICES = 4, 4
SIDE = 1024
ITEM_BYTES = 4
BYTES_WANTED, SPEEDUP_WANTED, CASES_WANTED = 1.03, 2.0, 4
_DEPTHS = 12  # what 3 hosts, or 4 devices, can cut
_NAMES = "AUTOPAR_NAMESPACES"


@dataclass(frozen=True)
class Case:
    """An array on one mesh, wanted on another; layouts name axes ``h`` (hosts) and ``d`` (devices of a host)."""

    name: str
    source_hosts: tuple[int, ...]
    source: str
    target_hosts: tuple[int, ...]
    target: str
    target_devices: int = DEVICES

    def ends(self) -> tuple[Placement, Placement]:
        """Both placements."""
        return (
            _placed(self.source_hosts, self.source, DEVICES),
            _placed(self.target_hosts, self.target, self.target_devices),
        )

    def __str__(self) -> str:
        shapes = (len(self.source_hosts), DEVICES), (len(self.target_hosts), self.target_devices)
        return f"{shapes[0]} {self.source} → {shapes[1]} {self.target}"


def _placed(hosts: Sequence[int], layout: str, devices: int) -> Placement:
    ids = tuple(host * DEVICES + device for host in hosts for device in range(devices))
    dims = tuple(tuple("" if part == "·" else part) for part in layout.split())
    return Placement(Layout(dims), Mesh(("h", "d"), (len(hosts), devices)), ids)


LEFT, RIGHT = (0, 1), (2, 3)
CASES = (
    Case("same cut, copies on devices", LEFT, "h · ·", RIGHT, "h · ·"),
    Case("gather", LEFT, "h · ·", RIGHT, "· · ·"),
    Case("all to all copies", LEFT, "· · ·", RIGHT, "· · ·"),
    Case("from copies", LEFT, "· · ·", RIGHT, "h · ·"),
    Case("another dimension", LEFT, "h · ·", RIGHT, "· d ·"),
    Case("finest cuts, transposed", LEFT, "hd · ·", RIGHT, "· hd ·"),
    Case("cut by devices, wanted by hosts", LEFT, "d · ·", RIGHT, "h · ·"),
    Case("one host to three", (0,), "· d ·", (1, 2, 3), "· · ·"),
    Case("to fewer devices", LEFT, "hd · ·", RIGHT, "· · d", 2),
)


def cluster_of(mbit: int) -> Cluster:
    """The emulated hosts as the planner sees them."""
    local = Cluster.local()
    network = Link(1e-4, mbit * 1e6 / 8, DEVICES, "the rate that was asked for")
    return local.replace(hosts=HOSTS, devices_per_host=DEVICES, network_link=network, profile=None)


# ------------------------------------------------------------------------------------------------------ bytes


def host_of(device: int) -> int:
    """The host of a device."""
    return device // DEVICES


def fewest_bytes(shape: tuple[int, ...], target: Placement) -> int:
    """What the hosts of the target must get: of every host the pieces that differ, once."""
    pieces: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for position, device in enumerate(target.devices):
        pieces[host_of(device)].add(target.piece(position))
    piece_bytes = math.prod(shape) * ITEM_BYTES // math.prod(target.pieces())
    return sum(map(len, pieces.values())) * piece_bytes


def counted_bytes(transfer: CrossMeshTransfer) -> int:
    """What enters hosts: tiles that cross, and what collectives on the target mesh fetch from other hosts."""
    crossing = sum(host_of(tile.sender) != host_of(tile.receiver) for tile in transfer.tiles) * transfer.tile_bytes
    layout, mesh = transfer.landing, transfer.target.mesh
    for move in transfer.moves:
        if move.kind is MoveKind.ALL_GATHER and "h" in move.axes:
            # Rings: a share from every other member passes every link.
            whole = collective_bytes(move, layout, transfer.array_bytes, mesh)
            members = mesh.axis_size(*move.axes)
            rings = mesh.size // members
            hosts = mesh.axis_size("h")
            crossing += rings * hosts * whole * (members - 1) // members
        layout = after_move(layout, move, mesh)
    return crossing


def quickest_seconds(transfer: CrossMeshTransfer, link: Link) -> float:
    """The most loaded card at full rate, by tiles and the target's own bytes alone."""
    loads: dict[tuple[str, int], int] = defaultdict(int)
    for tile in transfer.tiles:
        if host_of(tile.sender) != host_of(tile.receiver):
            loads["out", host_of(tile.sender)] += transfer.tile_bytes
            loads["in", host_of(tile.receiver)] += transfer.tile_bytes
    fewest = fewest_bytes(transfer.shape, transfer.target) / len({host_of(one) for one in transfer.target.devices})
    return max(*loads.values(), fewest) / link.bytes_per_second


# ------------------------------------------------------------------------------------------------------- ours


class Ours:
    """Owns one case on the hosts, as the runtime does it."""

    def __init__(self, cluster: Cluster, transfer: CrossMeshTransfer) -> None:
        import jax

        from autopar.on_ray import fleet_of
        from autopar.runtime.fleet import STARTING_SECONDS, collected
        from autopar.runtime.messages import Where
        from autopar.runtime.remote import RemoteExecutor
        from autopar.runtime.shipment import Entry, MeshShipment, Output, Shipments, Wire
        from autopar.schedule.instructions import ONCE, Receive, Send, Slot

        source, target, shape = transfer.source, transfer.target, transfer.shape
        aval = jax.core.ShapedArray(shape, np.dtype(np.float32))
        wire, given, wanted = Wire(0, transfer, "float32"), Slot(0, 0), Slot(1, 0)
        sender = MeshShipment(
            mesh=0,
            stages={0: (source.mesh, source.devices)},
            programs=(),
            instructions=(Send(0, ONCE, given),),
            entries=(Entry(given, 0, shape, source.layout),),
            counted=(),
            outgoing=(wire,),
            incoming=(),
            results=(),
        )
        receiver = MeshShipment(
            mesh=1,
            stages={1: (target.mesh, target.devices)},
            programs=(),
            instructions=(Receive(0, ONCE, wanted),),
            entries=(),
            counted=(),
            outgoing=(),
            incoming=(wire,),
            results=(wanted,),
        )
        output = Output(aval, target.layout, mesh=1, stage=1, result=0)
        fleet = fleet_of(cluster)
        self._executor = RemoteExecutor(
            Shipments((sender, receiver), (output,)), [aval], fleet, cluster.device.platform
        )
        world = self._executor.worlds[0]
        self.value = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        where, number = Where(source.mesh, source.devices, source.layout), next(fleet.numbers)
        pieces = world.pieces(self.value, where)
        refs = [actor.put.remote(number, own, where) for actor, own in zip(world.actors, pieces, strict=True)]
        collected(refs, STARTING_SECONDS, "the array to be put")
        self._array = world.new_array(aval, where, number)

    def once(self) -> float:
        """Seconds until the array is where it is wanted."""
        started = time.perf_counter()
        (self.result,) = self._executor([self._array])
        self.result.block_until_ready()
        return time.perf_counter() - started


# ------------------------------------------------------------------------------------------------------ naive


class Puller:
    """One host of the naive way: its devices, what lies on them, and a server from which others pull."""

    def __init__(self, host: int, address: str) -> None:
        import jax
        from jax.experimental import transfer

        self._host = host
        self._devices = jax.devices()
        self._server = transfer.start_transfer_server(self._devices[0].client, f"{address}:0", [f"{address}:0"] * 2)
        self._held: dict[int, Any] = {}
        self._links: dict[str, Any] = {}

    def address(self) -> str:
        """Where others pull from."""
        return str(self._server.address())

    def put(self, pieces: Mapping[int, np.ndarray[Any, Any]]) -> None:
        """Take pieces, by local device."""
        import jax

        self._held = {device: jax.device_put(piece, self._devices[device]) for device, piece in pieces.items()}
        jax.block_until_ready(list(self._held.values()))

    def offer(self, offers: Sequence[tuple[int, int, Box]]) -> None:
        """Offer parts of what it holds; each is (name, local device, where in the piece)."""
        for name, device, box in offers:
            part = self._held[device][tuple(slice(*ends) for ends in box)]
            self._server.await_pull(name, [part])

    def pull(self, wanted: Mapping[int, Sequence[tuple[int, str, tuple[int, ...]]]]) -> None:
        """Every device its pieces, one after the other; each is (name, where from, shape)."""
        import jax
        from jax.sharding import SingleDeviceSharding

        def one(device: int) -> None:
            sharding = SingleDeviceSharding(self._devices[device])
            for name, address, shape in wanted[device]:
                form = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
                jax.block_until_ready(self._links[address].pull(name, [form]))

        for address in {address for pieces in wanted.values() for _, address, _ in pieces}:
            if address not in self._links:
                self._links[address] = self._server.connect(address)
        threads = [threading.Thread(target=one, args=(device,)) for device in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Naive:
    """Owns the hosts of the naive way."""

    def __init__(self, addresses: Sequence[str]) -> None:
        import ray

        environment = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
            "NPROC": str(2 * DEVICES),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        made: Any = ray.remote(Puller)
        self._hosts = [
            made.options(num_cpus=0, resources={f"node:{address}": 1e-3}, runtime_env={"env_vars": environment}).remote(
                host, address
            )
            for host, address in enumerate(addresses)
        ]
        self._addresses = ray.get([host.address.remote() for host in self._hosts])
        self._names = iter(range(1, 1 << 40))

    def put(self, value: np.ndarray[Any, Any], source: Placement) -> None:
        """Lay the array out as the source has it."""
        import ray

        of_host: dict[int, dict[int, Any]] = defaultdict(dict)
        for position, device in enumerate(source.devices):
            box = piece_box(value.shape, source, position)
            of_host[host_of(device)][device % DEVICES] = value[tuple(slice(*ends) for ends in box)]
        ray.get([self._hosts[host].put.remote(pieces) for host, pieces in of_host.items()])

    def once(self, shape: tuple[int, ...], source: Placement, target: Placement) -> float:
        """Seconds until every device has its piece."""
        import ray

        offers: dict[int, list[Any]] = defaultdict(list)
        wanted: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for device, holder, box, piece in naive_parts(shape, source, target):
            name = next(self._names)
            inside = tuple((a - start, b - start) for (a, b), (start, _) in zip(box, piece, strict=True))
            offers[host_of(holder)].append((name, holder % DEVICES, inside))
            extent = tuple(b - a for a, b in box)
            wanted[host_of(device)][device % DEVICES].append((name, self._addresses[host_of(holder)], extent))
        ray.get([self._hosts[host].offer.remote(told) for host, told in offers.items()])
        told = {host: {device: list(parts) for device, parts in own.items()} for host, own in wanted.items()}
        started = time.perf_counter()
        ray.get([self._hosts[host].pull.remote(own) for host, own in told.items()])
        return time.perf_counter() - started

    def close(self) -> None:
        """Stop the hosts."""
        import ray

        for host in self._hosts:
            ray.kill(host)


def naive_parts(shape: tuple[int, ...], source: Placement, target: Placement) -> Iterator[tuple[int, int, Box, Box]]:
    """What each device of the target pulls: itself, the first holder, which part of the array, and the holder's piece."""
    holders: dict[Box, int] = {}
    for position, device in enumerate(source.devices):
        holders.setdefault(piece_box(shape, source, position), device)
    for position, device in enumerate(target.devices):
        needed = piece_box(shape, target, position)
        for piece, holder in holders.items():
            box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(needed, piece, strict=True))
            if all(start < stop for start, stop in box):
                yield device, holder, box, piece


# ---------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Measured:
    """One case; bytes are those that enter the hosts of the target in one transfer."""

    case: str
    strategy: str
    fewest_bytes: int
    counted_bytes: int
    measured_bytes: float
    quickest_seconds: float
    seconds: float
    naive_bytes: float
    naive_seconds: float


def entered(hosts: Sequence[int]) -> int:
    """Bytes that the cards of some hosts have received since they were made."""
    names = os.environ[_NAMES].split()
    return sum(traffic_of(names[host]).received_bytes for host in hosts)


def measure(case: Case, cluster: Cluster, naive: Naive, shape: tuple[int, ...], rounds: int) -> Measured:
    """Both ways, each once to warm up and then ``rounds`` times."""
    source, target = case.ends()
    transfer = cheapest_transfer(shape, ITEM_BYTES, source, target, cluster)
    ours = Ours(cluster, transfer)
    ours.once()
    before, seconds = entered(case.target_hosts), []
    for _ in range(rounds):
        seconds.append(ours.once())
    measured = (entered(case.target_hosts) - before) / rounds
    np.testing.assert_array_equal(np.asarray(ours.result), ours.value)
    naive.put(ours.value, source)
    naive.once(shape, source, target)
    before, slow = entered(case.target_hosts), []
    for _ in range(rounds):
        slow.append(naive.once(shape, source, target))
    pulled = (entered(case.target_hosts) - before) / rounds
    return Measured(
        f"{case}",
        transfer.strategy.value,
        fewest_bytes(shape, target),
        counted_bytes(transfer),
        measured,
        quickest_seconds(transfer, cluster.network_link),
        statistics.median(seconds),
        pulled,
        statistics.median(slow),
    )


def drive(mbit: int, mib: float, rounds: int, only: Sequence[int]) -> list[Measured]:
    """All cases, from a process on the first host."""
    found = Cluster.ray("auto", devices_per_host=DEVICES)
    assert found.runs_on is not None
    cluster = cluster_of(mbit).replace(runs_on=found.runs_on)
    depth = _DEPTHS * max(1, round(mib * 2**20 / (SIDE * SIDE * ITEM_BYTES * _DEPTHS)))
    naive = Naive([node.address for node in found.runs_on.nodes])
    rows = []
    for number in only:
        rows.append(measure(CASES[number], cluster, naive, (SIDE, SIDE, depth), rounds))
        print(rows[-1], flush=True)
    naive.close()
    cluster.close()
    return rows


def table(rows: Sequence[Measured], title: str) -> Table:
    """The figures, and whether they are what is wanted."""
    made = Table(title=title)
    made.add_column("(hosts, devices) layout")
    made.add_column("strategy")
    columns = ("MiB: bound", "counted", "measured", "naive", "s: quickest", "ours", "naive", "speedup")
    for column in columns:
        made.add_column(column, justify="right")
    for row in rows:
        sizes = (row.fewest_bytes, row.counted_bytes, row.measured_bytes, row.naive_bytes)
        times = (row.quickest_seconds, row.seconds, row.naive_seconds)
        cells = [f"{size / 2**20:.1f}" for size in sizes] + [f"{seconds:.2f}" for seconds in times]
        made.add_row(row.case, row.strategy, *cells, f"{row.naive_seconds / row.seconds:.2f}×")
    return made


def verdict(rows: Sequence[Measured]) -> str:
    """One line."""
    exact = sum(row.counted_bytes == row.fewest_bytes for row in rows)
    close = sum(row.measured_bytes <= BYTES_WANTED * row.fewest_bytes for row in rows)
    fast = sum(row.naive_seconds >= SPEEDUP_WANTED * row.seconds for row in rows)
    return (
        f"{len(rows)} cases; counted bytes equal to the bound: {exact}; measured within {BYTES_WANTED - 1:.0%}: {close}; at "
        f"least {SPEEDUP_WANTED:g} times as fast as naive: {fast} (wanted: {CASES_WANTED})"
    )


@cache
def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--mib", type=float, default=48.0, help="size of the array, in steps of 48")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="numbers, from 0")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Bring hosts up, drive from the first of them, print the table."""
    told = _arguments()
    if told.inside is not None:
        rows = drive(told.mbit, told.mib, told.rounds, told.cases)
        told.inside.write_text(json.dumps([vars(row) for row in rows]))
        return
    if reason := why_not():
        print(f"no hosts can be emulated here: {reason}")
        return
    with RayNodes(Network(HOSTS, told.mbit)) as nodes, tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said.json"
        names = " ".join(nodes.hosts.name(host) for host in range(HOSTS))
        environment = {"PYTHONPATH": str(Path(__file__).parents[1]), _NAMES: names}
        command = [sys.executable, "-m", "benchmarks.resharding", *sys.argv[1:], "--inside", str(said)]
        if nodes.run(command, environment):
            raise SystemExit(1)
        rows = [Measured(**row) for row in json.loads(said.read_text())]
    title = f"{told.mib:g} MiB, links of {told.mbit} Mbit/s, {told.rounds} rounds"
    console = Console(width=150)
    console.print(table(rows, title))
    console.print(verdict(rows))


if __name__ == "__main__":
    main()
