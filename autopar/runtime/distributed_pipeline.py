"""Run a pipeline in the processes of one ``jax.distributed`` world, each of which runs the same script.

Every process knows the whole plan, and carries out the lists of the meshes that have devices in it, each in a thread of its own.
Arrays pass between meshes by pulls.  The state is made of arrays over the devices of its stages, in processes that hold none of
them too; what else a step returns is reported to all (:mod:`autopar.runtime.reports`).

A step returns when it is dispatched; so that not too much is under way, it waits first until the one :data:`AHEAD` before it
is done.  Whatever fails in a process ends its part for good: what it owes is not sent, and those who pull it are told so.  A
process that dies is the coordinator's to notice, which ends the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from autopar.cluster import Cluster, Mesh
from autopar.errors import WorkerError
from autopar.graph.build import avals_of
from autopar.runtime.awaited import Awaited
from autopar.runtime.collectives import unwrapped
from autopar.runtime.deliveries import Deliverer, deliveries_of
from autopar.runtime.executor import device_mesh
from autopar.runtime.interpreter import Key
from autopar.runtime.loaded import Loaded
from autopar.runtime.on_devices import given_twice, lies_so
from autopar.runtime.one_world import Neighbours, elsewhere, is_here, told_by_all
from autopar.runtime.own_leaves import OwnLeaves
from autopar.runtime.promises import Promises
from autopar.runtime.pulled import PullTransport
from autopar.runtime.reports import ReportedArray, Reporter, reports_of, shared_with_state
from autopar.runtime.run_ahead import run_ahead
from autopar.runtime.shipment import Output, shipped_without_programs
from autopar.runtime.stage_executable import PartExecutable, compiled_stage, stored_sharding, titled
from autopar.runtime.transport import Message
from autopar.runtime.wire_ends import warm
from autopar.schedule.cross_mesh import CrossMeshTransfer
from autopar.schedule.instructions import Send, Slot
from autopar.schedule.pipeline import Pipeline

AHEAD = 2
"""So many steps may be dispatched and not yet done."""

POLL_SECONDS = 2e-4
"""Between two looks at a program that is waited for; others stand behind it, so that no device idles meanwhile."""

WAITING_SECONDS = 600.0
"""So long a step, or who reads what it returns, waits for other processes, which may be late: they save, or evaluate."""


@dataclass(frozen=True)
class _Part:
    """One mesh at work in this process, as far as its devices are here."""

    loaded: Loaded
    transport: PullTransport


class DistributedPipelineExecutor:
    """Owns this process's part of a pipeline, and the steps of it that are under way."""

    def __init__(
        self,
        pipeline: Pipeline,
        transfers: Mapping[int, CrossMeshTransfer],
        cluster: Cluster,
        devices: Sequence[Any],
        carried: Collection[int],
        report_progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        """``devices[i]`` is the JAX device with global id ``i``; ``carried`` are the outputs that are state.

        All processes make theirs together.  Raises ``WorkerError`` where another one could not.
        """
        started = time.monotonic()
        self._devices = tuple(devices)
        self._shipments = shipped_without_programs(pipeline, transfers)
        self._dtypes = _dtypes(pipeline)
        self._leaves = OwnLeaves()
        self._carried = frozenset(carried)
        self._promises = Promises(AHEAD)
        self._running: deque[tuple[int, Awaited]] = deque()
        self._failure: BaseException | None = None
        here = [
            number
            for number, mesh in enumerate(self._shipments.meshes)
            if any(is_here(self._devices[device]) for device in mesh.devices)
        ]
        self._threads = ThreadPoolExecutor(max(1, len(here)), thread_name_prefix="autopar-mesh")
        world = Neighbours(self._devices)
        loaded = _together(lambda: self._loaded(pipeline, transfers, here, report_progress))
        for mesh in (self._mesh_of(*placed) for one in loaded.values() for placed in one.shipment.stages.values()):
            if not all(map(is_here, mesh.devices.flat)):
                warm(mesh)
        self._parts = {number: self._part(one, world) for number, one in loaded.items()}
        number = 1 + max((wire.number for mesh in self._shipments.meshes for wire in mesh.outgoing), default=-1)
        deliveries = deliveries_of(self._shipments, self._dtypes, cluster, number)
        self._shared = shared_with_state(self._shipments, carried)
        process_of = [device.process_index for device in self._devices]
        reports = reports_of(self._shipments, carried, cluster, process_of, number + len(deliveries))
        self._deliver = Deliverer(deliveries, here, world, self._promises)
        self._report = Reporter(reports, here, world, self._promises)
        self._attendance = world.attendance
        self._promises.break_all_without(self)
        self.compile_seconds = time.monotonic() - started

    # ------------------------------------------------------------------------------------------------------ starting

    def _loaded(
        self,
        pipeline: Pipeline,
        transfers: Mapping[int, CrossMeshTransfer],
        here: Sequence[int],
        report_progress: Callable[[str], None],
    ) -> dict[int, Loaded]:
        found = {}
        for number in here:
            shipment = self._shipments.meshes[number]
            programs: dict[Key, PartExecutable] = {}
            meshes = {stage: self._mesh_of(*placed) for stage, placed in shipment.stages.items()}
            for stage, mesh in meshes.items():
                programs.update(compiled_stage(pipeline, stage, mesh, transfers, report_progress))
            started = run_ahead(next(iter(meshes.values())), self._until_done)  # all are of the same devices
            found[number] = Loaded(shipment, self._mesh_of, programs, started)
        return found

    def _part(self, loaded: Loaded, world: Neighbours) -> _Part:
        told = loaded.shipment
        transport = world.pulls(told.outgoing, told.incoming)
        loaded.use(transport)
        sends = [one for one in told.instructions if isinstance(one, Send)]
        self._promises.make(transport, [Message(one.transfer, one.microbatch) for one in sends])
        return _Part(loaded, transport)

    def _mesh_of(self, mesh: Mesh, numbers: tuple[int, ...]) -> jax.sharding.Mesh:
        return device_mesh(mesh, [self._devices[number] for number in numbers])

    # ------------------------------------------------------------------------------------------------------- running

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Dispatch this process's part of one step on flat leaves; batch leaves are (N, B/N, …).

        Raises what fails here, and ``WorkerError`` when a step before it has failed here or elsewhere.
        """
        self.refuse_if_failed()
        self._promises.step += 1
        self._attendance.come_to(self._promises.step)
        with self._for_good(), jax.disable_jit(False):  # which would ask for functions, to run them in Python
            return self._dispatched(leaves)

    def refuse_if_failed(self) -> None:
        """Raises ``WorkerError`` when a step has failed here or elsewhere."""
        if self._failure is not None:
            raise WorkerError(
                "an earlier step has failed, here or in another process, and its state is lost; start all processes again"
            ) from self._failure

    def wait(self, results: Sequence[Any]) -> None:
        """Wait until this process's part of all steps is done, and what they report is here.  Raises ``WorkerError``."""
        with self._for_good():
            while self._running:
                self._finish_oldest()

    @contextmanager
    def _for_good(self) -> Iterator[None]:
        """Whatever fails inside is the end of this process's part."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._promises.break_all()
            raise

    def _dispatched(self, leaves: Sequence[Any]) -> list[Any]:
        while len(self._running) >= AHEAD:
            self._finish_oldest()
        step = self._promises.step
        delivered = self._deliver(step, leaves)
        given = {number: self._given(leaves, part.loaded, delivered) for number, part in self._parts.items()}
        del delivered  # the lists free what is in their slots
        wide = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        futures = {
            number: self._threads.submit(self._walk, part, given.pop(number), wide)
            for number, part in self._parts.items()
        }
        _, late = wait(futures.values(), WAITING_SECONDS)
        if late:
            raise self._attendance.too_late(step, WAITING_SECONDS)
        failures = [error for future in futures.values() if (error := future.exception()) is not None]
        if failures:
            raise failures[0]
        self._forget_donated(leaves)
        walked = {number: future.result() for number, future in futures.items()}
        outputs = {
            position: walked[output.mesh][0][output.result]
            for position, output in enumerate(self._shipments.outputs)
            if output.result >= 0 and output.mesh in walked
        }
        outputs |= {position: outputs[position].copy() for position in self._shared & outputs.keys()}
        reported = self._report(step, outputs)
        self._leaves.steps_are_over(leaves)
        marks = [mark for _, own in walked.values() for mark in own]
        self._running.append((step, Awaited([*marks, *reported.values()])))
        return self._returned(step, outputs | reported)

    def _returned(self, step: int, known: Mapping[int, jax.Array]) -> list[Any]:
        """What the caller gets: state as it lies, all else so that it is waited for with a limit."""
        found: list[Any] = []
        for position, output in enumerate(self._shipments.outputs):
            if (array := known.get(position)) is None:
                found.append(self._not_here(output))
            elif position in self._carried:
                found.append(array)
            else:
                found.append(ReportedArray(array, partial(self._until_there, step)))
        return found

    def _until_there(self, step: int, array: jax.Array) -> None:
        """Wait for what a step returns."""
        if not array.is_deleted():
            with self._for_good():
                self._wait_for(step, Awaited(array))

    def _walk(self, part: _Part, arrays: list[jax.Array], wide: bool) -> tuple[list[jax.Array], list[jax.Array]]:
        """The results of one mesh, and arrays that are there when the step is done."""
        try:
            with jax.enable_x64(wide), jax.disable_jit(False):  # what the caller's thread says holds there alone
                results = part.loaded.run(self._promises.step, arrays)
                return results, part.loaded.marks(results)
        except BaseException:
            self._promises.break_those_of(part.transport)  # another mesh of this process may wait for it
            raise

    def _until_done(self, result: jax.Array) -> None:
        """Wait for a program of a step that is being dispatched; with a limit, and only while this process's part goes on.

        It may wait for what another process sends, and a thread that waits inside of JAX keeps Python from ending.
        Raises ``RuntimeError`` where another program has taken the result over, ``TransportError`` at the limit.
        """
        until = time.monotonic() + WAITING_SECONDS
        words = unwrapped(result)
        while not words.is_ready():
            if self._failure is not None or time.monotonic() > until:
                raise self._attendance.too_late(self._promises.step, WAITING_SECONDS)
            time.sleep(POLL_SECONDS)

    def _finish_oldest(self) -> None:
        step, done = self._running.popleft()
        self._wait_for(step, done)

    def _wait_for(self, step: int, awaited: Awaited) -> None:
        """Raises ``TransportError`` naming who is missing if it takes too long, ``WorkerError`` if the step has failed."""
        try:
            is_there = awaited.within(WAITING_SECONDS)
        except Exception as error:
            raise WorkerError(
                f"step {step} failed: {error}. If that is of no program of this process, see what the others have raised"
            ) from error
        if not is_there:
            raise self._attendance.too_late(step, WAITING_SECONDS)

    # ------------------------------------------------------------------------------------ what goes in and comes out

    def _given(self, leaves: Sequence[Any], loaded: Loaded, delivered: Mapping[Slot, jax.Array]) -> list[jax.Array]:
        twice = given_twice(leaves)
        found = []
        for entry, sharding in zip(loaded.shipment.entries, loaded.entry_shardings, strict=True):
            leaf = leaves[entry.position]
            if entry.row < 0 and entry.slot in delivered:
                leaf = delivered[entry.slot]
            elif entry.row >= 0 or not isinstance(leaf, jax.Array) or not lies_so(leaf, sharding):
                leaf = self._leaves.put(leaf, entry.row, sharding, self._dtypes[entry.position])
            elif entry.is_donated and id(leaf) in twice:
                leaf = leaf.copy()
            found.append(leaf)
        return found

    def _forget_donated(self, leaves: Sequence[Any]) -> None:
        """What other processes have donated is deleted here too, so that it is refused everywhere or nowhere."""
        for mesh in self._shipments.meshes:
            for entry in mesh.entries:
                leaf = leaves[entry.position]
                if entry.is_donated and isinstance(leaf, jax.Array) and not leaf.sharding.addressable_devices:
                    leaf.delete()

    def _not_here(self, output: Output) -> jax.Array:
        if output.result < 0:
            return jax.numpy.asarray(output.literal, output.aval.dtype)
        placed = self._shipments.meshes[output.mesh].stages[output.stage]
        return elsewhere(output.aval, stored_sharding(output.layout, self._mesh_of(*placed)))

    # -------------------------------------------------------------------------------------------------- inspecting

    def as_text(self) -> str:
        """The optimized HLO of the executables of this process's meshes, each under a line that names it."""
        return titled((key, one.as_text()) for key, one in self._programs.items())

    def memory_analysis(self) -> dict[Key, Any]:
        """XLA's own account of bytes on one device, for each executable of this process's meshes."""
        return {key: one.memory_analysis() for key, one in self._programs.items()}

    @property
    def _programs(self) -> dict[Key, PartExecutable]:
        return {key: one for part in self._parts.values() for key, one in part.loaded.programs.items()}


def _dtypes(pipeline: Pipeline) -> dict[int, Any]:
    """The dtypes of the step's inputs, by position."""
    found = {}
    for lowering in pipeline.stages:
        avals = avals_of(lowering.graph)
        for end, value in zip(lowering.program.inputs, lowering.graph.inputs, strict=True):
            if end.crossing is None:
                found[end.position] = avals[value].dtype
    return found


def _together(make: Callable[[], dict[int, Loaded]]) -> dict[int, Loaded]:
    """What ``make`` gives, when all processes have made theirs; raises in all of them if it raises in one."""
    made: dict[int, Loaded] = {}
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - raised again below, when the others know
        failure = error
    said = told_by_all(b"" if failure is None else (str(failure) or type(failure).__name__).encode())
    if failure is not None:
        raise failure
    for process, complaint in enumerate(said):
        if complaint:
            raise WorkerError(f"process {process} cannot run its stages: {complaint.decode()}")
    return made
