"""Sends and receives of NCCL between meshes, over a stand-in that keeps NCCL's rules and says where everybody stands."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.cluster import Mesh, Platform
from autopar.errors import ClusterError, InternalError, TransportError, WorkerError
from autopar.plan import Layout, Schedule
from autopar.ray_hosts import MeshTransport
from autopar.runtime.cross_mesh import placed_mesh
from autopar.runtime.cupy_nccl import CupyNccl, nccl_lack
from autopar.runtime.exchange import chosen
from autopar.runtime.executor import partition_spec
from autopar.runtime.interpreter import Interpreter
from autopar.runtime.introductions import introduced
from autopar.runtime.mesh_host import MeshHost
from autopar.runtime.messages import Where
from autopar.runtime.nccl import NcclPeers, NcclTransport, Pair, Station
from autopar.runtime.pulled import PullPeers
from autopar.runtime.shipment import MeshShipment, Wire, ship_pipeline
from autopar.runtime.transport import Message
from autopar.schedule.cross_mesh import CrossMeshTransfer, Placement, cross_mesh_transfer
from autopar.schedule.instructions import ONCE, Free, Part, Receive, Run, Send, Slot, Task
from autopar.schedule.reshard import replicated
from tests.fake_nccl import FakeNccl
from tests.mesh_threads import MeshThreads, equal_to_jit
from tests.ray_cases import assert_equal, batch_of, create, train_step
from tests.test_pipeline_models import PIPELINED, Row, check_or_refusal
from tests.test_pulled import placed, transfers
from tests.test_transport import CLUSTERS, CUT, DISJOINT, DTYPES, FOUR, ONE, WHOLE, between, same, values
from tests.toy_runs import eight_slow_devices


class Ends:
    """Both meshes of some wires, and a thread for each."""

    def __init__(self, wires: Sequence[Wire], limit_seconds: float = 120.0, limit_bytes: int = 1 << 30) -> None:
        self.library = FakeNccl(limit_seconds)
        self.stations, self.transports = [], []
        pairs = (Pair(tuple(range(8)), self.library.unique_id()),)
        self.threads = ThreadPoolExecutor(2)
        joining = []
        for own in DISJOINT:
            station = Station(self.library, {number: jax.devices()[number] for number in own}, limit_bytes)
            self.stations.append(station)
            leaving = [wire for wire in wires if set(wire.transfer.source.devices) <= set(own)]
            coming = [wire for wire in wires if set(wire.transfer.target.devices) <= set(own)]
            mesh_of = partial(placed_mesh, devices=jax.devices())
            joining.append(self.threads.submit(NcclTransport, station, NcclPeers(pairs, 0), leaving, coming, mesh_of))
        self.transports = [one.result() for one in joining]

    def both(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        """What the thread of each mesh does."""
        futures = [self.threads.submit(first), self.threads.submit(second)]
        return futures[0].result(), futures[1].result()


def landing_sharding(transfer: CrossMeshTransfer) -> jax.sharding.NamedSharding:
    mesh = placed_mesh(transfer.landed, jax.devices())
    return jax.sharding.NamedSharding(mesh, partition_spec(transfer.landing))


# ------------------------------------------------------------------------------------------------------------- arrays


@given(transfers(), st.sampled_from(DTYPES), st.booleans())
def test_what_arrives_is_the_array(transfer: CrossMeshTransfer, dtype: str, is_donated: bool) -> None:
    ends = Ends([Wire(7, transfer, dtype, is_donated)])
    sender, receiver = ends.transports
    arrays = [values(transfer.shape, dtype, seed) for seed in range(2)]
    for x in arrays:
        array = placed(transfer, x)
        sender.send(Message(7, 0), array)
        if is_donated:
            array.delete()  # as a program does that takes its memory over
        del array
    for x in arrays:
        landed = receiver.receive(Message(7, 0))()
        same(landed, x, landing_sharding(transfer))
        jax.jit(lambda y: y, donate_argnums=0)(landed)  # what came may be donated
    for station in ends.stations:
        station.settle()
        assert all(station.lent_bytes(number) == 0 for number in range(8) if station.owns(number))
    assert ends.library.meetings == 2 * sum(not tile.relayed for tile in transfer.tiles)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (8,), (0,)])
def test_keys_travel_as_words(impl: str, shape: tuple[int, ...]) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), shape)
    layout = Layout((("data",),) if shape else ())
    source, target = Placement(layout, FOUR, DISJOINT[0]), Placement(replicated(len(shape)), FOUR, DISJOINT[1])
    transfer = cross_mesh_transfer(shape, 8, source, target, CLUSTERS[0])
    sender, receiver = (ends := Ends([Wire(7, transfer, str(keys.dtype))])).transports
    ends.both(sender.rehearse, receiver.rehearse)
    sender.send(Message(7, 0), placed(transfer, keys))
    landed = receiver.receive(Message(7, 0))()
    assert landed.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(landed), jax.random.key_data(keys))


def test_the_cells_of_a_message_are_one_kernel_of_each_device() -> None:
    transfer = between(DISJOINT, CUT, WHOLE, 8)
    ends = Ends([Wire(7, transfer, "float32")])
    ends.transports[0].send(Message(7, 0), placed(transfer, values((8,), "float32")))
    assert len(transfer.tiles) > 4
    assert ends.library.kernels == 4
    ends.transports[1].receive(Message(7, 0))()
    assert ends.library.kernels == 8


@pytest.mark.verify
def test_what_is_lent_is_held_and_bounded() -> None:
    """The sender waits for the oldest message when it has lent too much; what it has lent nobody else writes to."""
    transfer = between(DISJOINT, CUT, CUT, 1 << 12)
    own = (1 << 12) // 4 * 4
    ends = Ends([Wire(7, transfer, "float32")], limit_bytes=2 * own)
    sender, receiver = ends.transports
    arrays = [values((1 << 12,), "float32", seed) for seed in range(5)]
    sent = threading.Semaphore(0)

    def send() -> None:
        for x in arrays:
            sender.send(Message(7, 0), placed(transfer, x) + 0)
            gc.collect()
            sent.release()

    sending = ends.threads.submit(send)
    assert sent.acquire(timeout=60) and sent.acquire(timeout=60)
    until = time.monotonic() + 60
    while ends.stations[0].lent_bytes(0) < 3 * own and time.monotonic() < until:
        time.sleep(0.01)
    assert ends.stations[0].lent_bytes(0) == 3 * own, "the third is posted, and the first is waited for"
    assert not sent.acquire(timeout=0.3), "it is more than the limit"
    for x in arrays:
        same(receiver.receive(Message(7, 0))(), x, landing_sharding(transfer))
    sending.result(60)
    ends.stations[0].settle()
    assert ends.stations[0].lent_bytes(0) == 0


def test_messages_of_nobody_are_refused() -> None:
    transfer = between(DISJOINT, CUT, WHOLE, 8)
    sender, receiver = Ends([Wire(7, transfer, "float32")]).transports
    with pytest.raises(InternalError, match="does not leave this mesh"):
        receiver.send(Message(7, 0), placed(transfer, values((8,), "float32")))
    with pytest.raises(InternalError, match="does not come to this mesh"):
        sender.receive(Message(7, 0))


# -------------------------------------------------------------------------------------------------------------- order

THERE, BACK = between(DISJOINT, CUT, CUT, 8), between(DISJOINT[::-1], CUT, CUT, 8)
LONG = between(DISJOINT, CUT, CUT, 16)


def test_swapped_messages_of_different_sizes_break_nccls_rules() -> None:
    sender, receiver = Ends([Wire(0, THERE, "float32"), Wire(1, LONG, "float32")]).transports
    sender.send(Message(0, 0), placed(THERE, values((8,), "float32")))
    sender.send(Message(1, 0), placed(LONG, values((16,), "float32")))
    with pytest.raises(TransportError, match=r"rules are broken: rank 0 sends to 4: 2 of 4 bytes, but rank 4 receives"):
        receiver.receive(Message(1, 0))()


def test_swapped_messages_of_different_types_break_nccls_rules() -> None:
    sender, receiver = Ends([Wire(0, THERE, "float32"), Wire(1, THERE, "int8")]).transports
    sender.send(Message(0, 0), placed(THERE, values((8,), "float32")))
    with pytest.raises(TransportError, match=r"rules are broken: .* 2 of 4 bytes, but .* 2 of 1 bytes"):
        receiver.receive(Message(1, 0))()


def test_swapped_messages_of_one_size_are_taken_for_each_other() -> None:
    """As by NCCL: nothing but the order says which is which."""
    sender, receiver = Ends([Wire(0, THERE, "float32"), Wire(1, THERE, "float32")]).transports
    first, second = (values((8,), "float32", seed) for seed in (0, 1))
    sender.send(Message(0, 0), placed(THERE, first))
    sender.send(Message(1, 0), placed(THERE, second))
    np.testing.assert_array_equal(receiver.receive(Message(1, 0))(), first)
    np.testing.assert_array_equal(receiver.receive(Message(0, 0))(), second)


def test_messages_that_wait_for_each_other_are_found() -> None:
    """Both meshes send first, and each stream stands at its send."""
    ends = Ends([Wire(0, THERE, "float32"), Wire(1, BACK, "float32")], limit_seconds=2.0)
    first, second = ends.transports

    def one() -> None:
        first.send(Message(0, 0), placed(THERE, values((8,), "float32")))
        first.receive(Message(1, 0))()

    def other() -> None:
        second.send(Message(1, 0), placed(BACK, values((8,), "float32")))
        second.receive(Message(0, 0))()

    with pytest.raises(TransportError, match=r"does not go on, .* rank 0 sends to 4: .* rank 4 sends to 0"):
        ends.both(one, other)


def test_hanging_up_ends_what_waits() -> None:
    ends = Ends([Wire(0, THERE, "float32")])
    receiving = ends.threads.submit(lambda: ends.transports[1].receive(Message(0, 0))())
    ends.stations[1].hang_up()
    receiving.exception(60)  # it may have been refused; it has not waited for the limit
    with pytest.raises(TransportError, match="given up after a failure"):
        ends.transports[1].begin(1)


def test_values_that_waited_for_what_was_given_up_are_not_told() -> None:
    """A stream that is let go leaves memory as it was: neither the driver nor a checkpoint may get that."""
    host, said = MeshHost("mesh 1"), list[bool]()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    host._arrays[3] = jax.device_put(np.ones(2), spec)
    host._exchange = SimpleNamespace(may_wait=True, hang_up=lambda: said.append(host._means_nothing))
    np.testing.assert_array_equal(host.fetch(3, [0])[0], np.ones(2))
    host.keep(5, [(0, 3, Where(ONE, (0,), WHOLE))], 0)
    host.hang_up()
    assert said == [True], "it is known before anything goes on"
    with pytest.raises(WorkerError, match="mesh 1 has given its arrays up"):
        host.fetch(3, [0])
    with pytest.raises(WorkerError, match="mesh 1 has given its arrays up"):
        host.snapshot(0, [(3, Where(ONE, (0,), WHOLE))])
    with pytest.raises(WorkerError, match="mesh 1 has given its arrays up"):
        host.keep(6, [(0, 3, Where(ONE, (0,), WHOLE))], 0)
    assert host.kept_steps() == (5,)
    host._exchange = SimpleNamespace(may_wait=False)
    host.rest()
    host._arrays[4] = jax.device_put(np.zeros(2), spec)
    np.testing.assert_array_equal(host.fetch(4, [0])[0], np.zeros(2))


def test_what_is_posted_lands_when_it_is_first_read() -> None:
    """Messages are posted in the order of the list, and land once: at a reader, at the end, or never."""
    said: list[str] = []

    class Posting:
        def send(self, message: Message, array: jax.Array) -> None:
            said.append(f"send {float(array):g}")

        def receive(self, message: Message) -> Any:
            said.append(f"post {message.transfer}")

            def land() -> jax.Array:
                said.append(f"land {message.transfer}")
                return jax.numpy.float32(message.transfer)

            return land

    def add(inputs: Sequence[jax.Array]) -> list[jax.Array]:
        said.append("run")
        return [sum(inputs[1:], start=inputs[0])]

    slots = [Slot(0, number) for number in range(6)]
    task = Task(Part.FORWARD, 0)
    rows = [
        *(Receive(number, ONCE, slots[number]) for number in range(4)),
        Run(task, (slots[1], slots[1]), (slots[4],), ()),
        Send(9, ONCE, slots[0]),
        Free((slots[1], slots[2])),
        Send(9, ONCE, slots[0]),
    ]
    finish = {1: lambda array: array * 10}
    left = Interpreter({(0, Part.FORWARD, 0): add}, Posting(), finish).run(rows, {})
    assert said == ["post 0", "post 1", "post 2", "post 3", "land 1", "run", "land 0", "send 0", "send 0", "land 3"]
    assert {slot.name: float(array) for slot, array in left.items()} == {0: 0.0, 3: 3.0, 4: 20.0}


# ---------------------------------------------------------------------------------------------------------- pipelines


@pytest.fixture
def over_nccl(monkeypatch: pytest.MonkeyPatch) -> list[MeshThreads]:
    """Pipelines of this process run as on a Ray cluster of GPUs; the list gains who runs them."""
    made: list[MeshThreads] = []

    def executor(pipeline: Any, transfers: Any, devices: Any, say: Any) -> MeshThreads:
        made.append(MeshThreads(ship_pipeline(pipeline, transfers, Platform.CPU, say), FakeNccl))
        return made[-1]

    monkeypatch.setattr("autopar.compiled.PipelineExecutor", executor)
    return made


def test_three_meshes_equal_jit_and_outlive_a_failure(
    over_nccl: list[MeshThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mesh fails while others wait for it; when all have hung up and met again, steps are right as before."""
    step = equal_to_jit(
        eight_slow_devices(), [[0, 1], [2, 3], [4, 5]], 4, schedule=Schedule.ONE_F_ONE_B, mesh_shape=(2,)
    )
    (threads,) = over_nccl
    assert step.last.executor is threads
    assert len(threads.loaded) == 3

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with jax.enable_x64(True):
        fresh = partial(step.init, partial(create, 0), batch_of(0))
        with monkeypatch.context() as patched:
            patched.setattr(threads.loaded[0], "run", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                step(fresh(), batch_of(0))
        with pytest.raises(TransportError, match="given up after a failure; connect anew"):
            step(fresh(), batch_of(0))
        threads.connect()
        state, _ = step(fresh(), batch_of(0))
        assert_equal(state, jax.jit(train_step)(create(0), batch_of(0))[0])


@pytest.mark.verify
@pytest.mark.parametrize("schedule", PIPELINED)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_every_schedule_equals_jit(over_nccl: list[MeshThreads], stages: int, count: int, schedule: Schedule) -> None:
    equal_to_jit(eight_slow_devices(), stages, count, schedule=schedule)
    assert over_nccl


@pytest.mark.verify
@pytest.mark.parametrize(
    "schedule", [one for one in Schedule if one not in (Schedule.SINGLE, Schedule.SHARES, Schedule.OWN, *PIPELINED)]
)
def test_schedules_of_other_kinds_equal_jit(over_nccl: list[MeshThreads], schedule: Schedule) -> None:
    """Stages that are dealt round two meshes, backwards in two parts: messages in either direction between each two meshes."""
    equal_to_jit(eight_slow_devices(), 4, 4, schedule=schedule)
    assert len(over_nccl[0].loaded) in (2, 4)


@pytest.mark.verify
@pytest.mark.parametrize("schedule", PIPELINED)
@pytest.mark.parametrize("model", ["gpt", "gpt2", "unet", "moe"])
def test_models_equal_jit(over_nccl: list[MeshThreads], model: str, schedule: Schedule) -> None:
    check_or_refusal(Row(model, 2, 4, schedule))


@pytest.mark.verify
def test_a_receive_that_stands_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above can fail: the first mesh waits for a gradient before it has sent what that is made of."""

    def too_early(told: MeshShipment) -> MeshShipment:
        rows = list(told.instructions)
        send = next(place for place, row in enumerate(rows) if isinstance(row, Send))
        receive = next(place for place, row in enumerate(rows) if isinstance(row, Receive) and row.microbatch >= 0)
        assert told.mesh > 0 or send < receive
        rows.insert(send, rows.pop(receive))
        return dataclasses.replace(told, instructions=tuple(rows))

    def executor(pipeline: Any, transfers: Any, devices: Any, say: Any) -> MeshThreads:
        shipments = ship_pipeline(pipeline, transfers, Platform.CPU, say)
        first, *others = shipments.meshes
        library = FakeNccl()
        made = MeshThreads(dataclasses.replace(shipments, meshes=(too_early(first), *others)), lambda: library)
        library.limit_seconds = 3.0
        return made

    monkeypatch.setattr("autopar.compiled.PipelineExecutor", executor)
    with pytest.raises(TransportError, match="a stream does not go on, though it had 3 s: rank"):
        equal_to_jit(eight_slow_devices(), 2, 2, schedule="1f1b", mesh_shape=(4,))


# ------------------------------------------------------------------------------------------------------------- choice


def test_the_platform_chooses() -> None:
    def has() -> list[str]:
        return []

    def lacks() -> list[str]:
        return ["on mesh 2, host 1 (10.0.0.2) cupy finds no NCCL"]

    auto, pull, nccl = MeshTransport.AUTO, MeshTransport.PULL, MeshTransport.NCCL
    dtypes = ["float32", "key<fry>", "bool", "bfloat16", "float8_e4m3fn"]
    assert chosen(auto, Platform.CUDA, dtypes, has) is nccl
    assert chosen(auto, Platform.CUDA, dtypes, lacks) is pull
    assert chosen(auto, Platform.CUDA, [*dtypes, "int4"], has) is pull
    assert chosen(auto, Platform.CPU, dtypes, has) is pull
    assert chosen(auto, Platform.TPU, dtypes, has) is pull
    assert chosen(pull, Platform.CUDA, dtypes, has) is pull
    assert chosen(nccl, Platform.CUDA, dtypes, has) is nccl
    with pytest.raises(ClusterError, match=r'on mesh 2, host 1 .*\(pip install "autopar\[nccl\]"'):
        chosen(nccl, Platform.CUDA, dtypes, lacks)
    with pytest.raises(ClusterError, match="arrays of int4 pass between meshes"):
        chosen(nccl, Platform.CUDA, ["int4"], has)
    with pytest.raises(ClusterError, match="platform is cpu; leave transport out"):
        chosen(nccl, Platform.CPU, dtypes, has)


def test_unknown_transports_are_refused() -> None:
    with pytest.raises(ClusterError, match="transport='gloo'; known are auto, pull, nccl"):
        autopar.Cluster.ray(transport="gloo")


@pytest.mark.skipif(nccl_lack() is None, reason="cupy and NCCL are here")
def test_without_cupy_the_extra_is_named() -> None:
    with pytest.raises(ClusterError, match=r'pip install "autopar\[nccl\]"'):
        CupyNccl()


# --------------------------------------------------------------------------------------------------------- the driver


class Actor:
    """A process of a mesh, asked as by Ray."""

    def __init__(self, names: Iterator[int], lack: str | None) -> None:
        self.unique_ids = SimpleNamespace(remote=lambda count: [(next(names),) for _ in range(count)])
        self.lack = lack


class World:
    """A mesh of two processes."""

    def __init__(self, number: int, names: Iterator[int], lack: str | None = None) -> None:
        self.name = f"mesh {number + 1}"
        self.host_names = [f"{self.name}, host {k + 1}" for k in range(2)]
        self.actors = [Actor(names, None), Actor(names, lack)]

    def call(self, method: str) -> list[Any]:
        assert method == "nccl_lack"
        return [actor.lack for actor in self.actors]


def told(number: int, outgoing: Sequence[int], incoming: Sequence[int]) -> MeshShipment:
    wires = [tuple(Wire(wire, THERE, "float32") for wire in numbers) for numbers in (outgoing, incoming)]
    devices = (2 * number + 1, 2 * number)
    stages = {number: (Mesh(("data",), (2,)), devices)}
    return MeshShipment(number, stages, (), (), (), (), wires[0], wires[1], ())


MESHES = [told(0, (0,), (3,)), told(1, (1, 3), (0, 2)), told(2, (2,), (1,))]


def driver(transport: MeshTransport) -> Any:
    return SimpleNamespace(
        hosts=SimpleNamespace(transport=transport), meetings={}, epoch=5, peers=lambda worlds: PullPeers({}, b"", 5)
    )


def test_neighbours_are_introduced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.introductions.collected", lambda refs, limit, what: refs)
    names = itertools.count()
    worlds: Any = [World(number, names) for number in range(3)]
    fleet = driver(MeshTransport.AUTO)
    peers = introduced(fleet, worlds, MESHES, Platform.CUDA)
    assert peers == NcclPeers((Pair((0, 1, 2, 3), (0,)), Pair((2, 3, 4, 5), (1,))), 5)
    fleet.epoch = 6  # a world of another program was started
    two = [told(0, (0,), ()), told(1, (), (0,))]
    assert introduced(fleet, worlds[:2], two, Platform.CUDA) == NcclPeers((peers.pairs[0],), 6)
    fleet.meetings.clear()  # something failed
    again = introduced(fleet, worlds, MESHES, Platform.CUDA)
    assert [pair.name for pair in again.pairs] == [(2,), (3,)]


def test_a_host_without_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.introductions.collected", lambda refs, limit, what: refs)
    names = itertools.count()
    worlds: Any = [World(0, names), World(1, names, "cupy finds no NCCL"), World(2, names)]
    pulls = introduced(driver(MeshTransport.AUTO), worlds, MESHES, Platform.CUDA)
    assert isinstance(pulls, PullPeers)
    with pytest.raises(ClusterError, match="on mesh 2, host 2 cupy finds no NCCL"):
        introduced(driver(MeshTransport.NCCL), worlds, MESHES, Platform.CUDA)
