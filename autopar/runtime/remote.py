"""Run a step on the meshes of a Ray cluster: the driver sends each mesh one short message per step and does not wait.

The state stays where it is; of it only identifiers travel.  What the caller gives as values (a batch) is cut in the driver, so
that every process gets the pieces of its own devices.  The driver may run :data:`RUN_AHEAD` steps ahead of the slowest mesh.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.cluster import Platform
from autopar.errors import AutoparError, WorkerError
from autopar.runtime.distributed_array import RemoteArray
from autopar.runtime.exchange import Peers
from autopar.runtime.fleet import Fleet, MeshWorld
from autopar.runtime.host_data import HostLeaf
from autopar.runtime.interpreter import Key
from autopar.runtime.introductions import introduced
from autopar.runtime.messages import HostPieces, HostRows, ProgramMemory, StepOrder, StepReport, Where
from autopar.runtime.on_devices import as_numpy
from autopar.runtime.pace import HANGING_SECONDS, Pace
from autopar.runtime.shipment import Entry, Output, Shipments
from autopar.runtime.stage_executable import titled
from autopar.runtime.waiting import COMPILING_SECONDS, collected

RUN_AHEAD = 3
"""So many steps may be called whose dispatch no process has reported yet."""

_Given = int | list[HostPieces] | list[HostRows]


@dataclass(frozen=True)
class _Pending:
    """A step that was sent and not yet reported."""

    step: int
    refs: tuple[Any, ...]


class RemoteExecutor:
    """Owns what was sent to the meshes of one compiled step, and the steps that are under way."""

    def __init__(
        self,
        shipments: Shipments,
        in_avals: Sequence[Any],
        fleet: Fleet,
        backend: Platform,
        report_progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        started = time.monotonic()
        self._shipments = shipments
        self._in_avals = tuple(in_avals)
        self._is_pipeline = len(shipments.meshes) > 1
        self._fleet = fleet
        self._backend = backend
        self._digests = [mesh.digest() for mesh in shipments.meshes]
        self._pending: deque[_Pending] = deque()
        self._pace = Pace()
        self._rests = 0  # of the fleet, when the processes were last connected
        self._has_failed = False  # a step, since then
        self._peers: Peers | None = None
        self.worlds: list[MeshWorld] = []
        self._rows: list[list[Where]] = [
            [Where(*mesh.stages[entry.slot.stage], entry.layout) for entry in mesh.entries] for mesh in shipments.meshes
        ]
        self.connect(report_progress)
        self.compile_seconds = time.monotonic() - started

    def connect(self, report_progress: Callable[[str], None] = lambda message: None) -> None:
        """Start what is missing of the meshes' processes, and let them compile; nothing is done twice."""
        meshes = self._shipments.meshes
        report_progress(f"starting the processes of {len(meshes)} meshes")
        self.worlds = self._fleet.worlds([mesh.devices for mesh in meshes], self._backend)
        exchanges = len(meshes) > 1
        peers = self._peers = introduced(self._fleet, self.worlds, meshes, self._backend) if exchanges else None
        for world, mesh in zip(self.worlds, meshes, strict=True):
            collected(
                world.warm([logical for logical, _ in mesh.stages.values()]),
                COMPILING_SECONDS,
                f"{world.name} to connect",
            )
        report_progress("compiling on the hosts")
        refs = [
            ref
            for world, mesh, digest in zip(self.worlds, meshes, self._digests, strict=True)
            for ref in world.call("load", mesh, peers, digest)
        ]
        try:
            collected(refs, COMPILING_SECONDS, "the meshes to compile")
        except AutoparError:
            self._fleet.hurt()  # others may wait for the one that failed, to connect
            raise
        self._pending.clear()
        self._rests, self._has_failed = self._fleet.rests, False
        self._pace.start_over()
        self._expect()

    def _expect(self) -> None:
        for world, digest in zip(self.worlds, self._digests, strict=True):
            world.expect(digest, self._pace.limit_seconds)

    @property
    def _must_connect(self) -> bool:
        """Whether a step has failed, or all arrays were given up after a failure elsewhere, or what it runs on was closed."""
        is_over = self._has_failed or self._rests != self._fleet.rests
        return is_over or any(world.is_lost for world in self.worlds)

    @property
    def fleet(self) -> Fleet:
        """Where it runs."""
        return self._fleet

    # ------------------------------------------------------------------------------------------------------- running

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Send one step; the results are there when they are asked for.

        Raises ``WorkerError`` if a process died or hangs: in this step, or in one before it.
        """
        if self._must_connect:
            self.connect()  # what lay there is gone, and other arrays may come in its place
        while len(self._pending) >= RUN_AHEAD:
            self._collect_oldest()
        step = next(self._fleet.numbers)
        orders: list[tuple[MeshWorld, int, list[tuple[Any, ...]]]] = []
        for world, mesh, rows in zip(self.worlds, self._shipments.meshes, self._rows, strict=True):
            world.check()
            given = [self._given(leaves, entry, where, world) for entry, where in zip(mesh.entries, rows, strict=True)]
            by_rank = [
                tuple(one if isinstance(one, int) else one[rank] for one in given) for rank in range(len(world.actors))
            ]
            first = next(self._fleet.numbers)
            for _ in range(len(mesh.results) - 1):
                next(self._fleet.numbers)
            orders.append((world, first, by_rank))
        refs = []
        for (world, first, by_rank), digest in zip(orders, self._digests, strict=True):
            released = world.released()
            for actor, given_there in zip(world.actors, by_rank, strict=True):
                refs.append(actor.step.remote(StepOrder(digest, step, given_there, first, released)))
        self._pending.append(_Pending(step, tuple(refs)))
        self._fleet.watch(refs)
        self._mark_donated(leaves)
        return [self._result(output, orders) for output in self._shipments.outputs]

    def wait(self, results: Sequence[Any]) -> None:
        """Wait until the results of the last step are there, and all that was called before: one question to each process."""
        while self._pending:
            self._collect_oldest()
        refs = [ref for world in self.worlds for ref in world.call("finish")]
        self._collected(refs, "the last steps")

    def _collect_oldest(self) -> None:
        pending = self._pending[0]
        reports: list[StepReport]
        try:
            reports = self._collected(pending.refs, f"step {pending.step}")
        except WorkerError as error:
            raise type(error)(f"{error}{self._suspects()}") from error
        self._pending.popleft()
        for report in reports:
            for step, seconds in report.finished.items():
                self._pace.took(step, seconds)
        self._expect()

    def _collected(self, refs: Sequence[Any], what: str) -> list[Any]:
        """What steps return; after one that failed, what they left on the processes is not gone on with."""
        try:
            return self._fleet.collected(refs, self._pace.limit_seconds, what)
        except AutoparError:
            self._has_failed = True
            raise

    def _suspects(self) -> str:
        """Which processes do not answer, or sit in a step."""
        said = []
        for world in self.worlds:
            answered = {status.name: status for status in world.status()}
            for name in world.host_names:
                if name not in answered:
                    said.append(f"{name} does not answer")
                elif answered[name].busy_seconds > HANGING_SECONDS / 2:
                    said.append(f"{name} is in step {answered[name].step} for {answered[name].busy_seconds:.0f} s")
        return f" ({'; '.join(said)})" if said else ""

    # ---------------------------------------------------------------------------------------- what goes in and comes out

    def _given(self, leaves: Sequence[Any], entry: Entry, where: Where, world: MeshWorld) -> _Given:
        leaf = leaves[entry.position]
        if isinstance(leaf, HostLeaf):
            return world.rows(leaf, entry.row, where)
        if isinstance(leaf, RemoteArray) and entry.row < 0:
            leaf.holder.check()
            same_devices = sorted(leaf.where.devices) == sorted(where.devices)
            if leaf.holder is world and same_devices and not leaf.where.layout.partial:
                return leaf.number
        value, key_impl = as_numpy(leaf, entry.row, self._in_avals[entry.position].dtype)
        return world.pieces(value, where, key_impl)

    def _mark_donated(self, leaves: Sequence[Any]) -> None:
        for world, mesh in zip(self.worlds, self._shipments.meshes, strict=True):
            for entry in mesh.entries:
                leaf = leaves[entry.position]
                if entry.is_donated and isinstance(leaf, RemoteArray) and leaf.holder is world:
                    leaf.forget("a later step took its memory over for its result")

    def _result(self, output: Output, orders: Sequence[tuple[MeshWorld, int, Any]]) -> Any:
        if output.result < 0:
            return jax.numpy.asarray(output.literal, output.aval.dtype)
        world, first, _ = orders[output.mesh]
        mesh, devices = self._shipments.meshes[output.mesh].stages[output.stage]
        return world.new_array(output.aval, Where(mesh, devices, output.layout), first + output.result)

    # -------------------------------------------------------------------------------------------------- inspecting

    def as_text(self) -> str:
        """The optimized HLO of all executables, one after the other, each under a line that names it."""
        found: list[tuple[Key, str]] = []
        for world, digest in zip(self.worlds, self._digests, strict=True):
            (texts,) = collected(
                [world.actors[0].texts.remote(digest)], COMPILING_SECONDS, f"the programs of {world.name}"
            )
            found += texts
        return titled(found)

    def memory_analysis(self) -> Any:
        """XLA's own account of bytes on one device; of a pipeline that of each executable, by its key."""
        found: dict[Key, ProgramMemory] = {}
        for world, digest in zip(self.worlds, self._digests, strict=True):
            asked = world.actors[0].memory.remote(digest)
            (pairs,) = collected([asked], COMPILING_SECONDS, f"the programs of {world.name}")
            found.update(pairs)
        return found if self._is_pipeline else next(iter(found.values()))
