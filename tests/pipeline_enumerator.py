"""An independent referee of the stage search: the quickest pipeline of a small step by trying all of them.

Nothing of the search is imported.  For every number of microbatches N that a case allows, a pipeline is

    a grouping     of the layers 1 … L into S consecutive stages, all of them
    devices        the cluster's ids 0 … D−1 in as many consecutive runs: devices of one host (2ᵏ where it has a power of two),
                   or whole hosts; unless both are powers of two, the last devices of hosts, and the last hosts, may be idle;
                   the hosts in every order where they are not all alike, and a run on hosts of one kind, others idle or not
    mesh shapes    one for each stage, out of all logical shapes of its run
    a schedule     all of them for S > 1; the interleaved one for stages that are dealt round meshes of one size

and each is laid out (one integer program per stage and mesh shape), lowered and simulated on its own.  A stage that was
solved once is not solved again; no other result of one candidate serves another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.cluster import Cluster, DeviceKind, Link, Mesh, Platform
from autopar.cost_model.pipeline import StageCost, simulate_pipeline, stage_cost, transfers_of
from autopar.graph.build import LoopKind, build_graph
from autopar.graph.ir import Graph
from autopar.inter_op.cut import cut
from autopar.inter_op.looped import Looped
from autopar.inter_op.placing import forward_operators
from autopar.intra_op.restrict import Restriction
from autopar.intra_op.search import search
from autopar.intra_op.task import Found, Task
from autopar.plan import Schedule
from autopar.schedule.orders import make_order
from autopar.schedule.pipeline import StageLowering, lower_stage, pipeline_of
from autopar.schedule.stage_program import StageProgram
from benchmarks.models import Batch, Model
from tests.toy_pipelines import Step, step_of

SEVERAL = (
    Schedule.GPIPE,
    Schedule.ONE_F_ONE_B,
    Schedule.EAGER_ONE_F_ONE_B,
    Schedule.ZERO_BUBBLE_H1,
    Schedule.ZERO_BUBBLE_H2,
)
SPLIT = (Schedule.ZERO_BUBBLE_H1, Schedule.ZERO_BUBBLE_H2)
MAX_AXES = 2


@dataclass(frozen=True)
class Case:
    """A model whose layer k begins at matrix product ``layers[k]`` of its forward pass, a cluster, and what is allowed."""

    name: str
    model: Callable[[], Model]
    layers: tuple[int, ...]
    cluster: Cluster
    microbatches: tuple[int, ...]
    budget_bytes: float = float("inf")
    is_scanned: bool = False
    """Whether the layers are one loop, which is cut between trips; ``layers`` count its pieces."""

    def step(self, count: int) -> Step:
        """The step as a loop over so many microbatches."""
        return step_of(self.model(), count)

    def boundaries(self, loop: Looped) -> tuple[int, ...]:
        """Numbers of the forward operators of a step at which layers begin, but the first."""
        forward = forward_operators(loop)
        if self.is_scanned:
            return tuple(number for number, one in enumerate(forward) if one.primitive == LoopKind.SCAN)[1:]
        products = [number for number, one in enumerate(forward) if one.primitive == "dot_general"]
        return tuple(products[layer] for layer in self.layers[1:])


@dataclass(frozen=True)
class Candidate:
    """One pipeline: ``cuts`` are numbers of forward operators, ``meshes`` run parallel to ``devices``."""

    num_microbatches: int
    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    meshes: tuple[Mesh, ...]
    schedule: Schedule

    def __str__(self) -> str:
        stages = "; ".join(
            f"devices {list(run)} as {mesh}" for run, mesh in zip(self.devices, self.meshes, strict=True)
        )
        return f"N={self.num_microbatches}, {self.schedule.value}, cut before {self.cuts}: {stages}"


@dataclass(frozen=True)
class Best:
    """The quickest pipeline that keeps the budget, out of ``tried``; ``by_stages`` are the least seconds for each S."""

    step_seconds: float
    candidate: Candidate
    by_stages: dict[int, float]
    tried: int


def best_of(case: Case) -> Best:
    """Try all pipelines of a case; raises ValueError where none keeps the budget."""
    best: tuple[float, Candidate] | None = None
    by_stages: dict[int, float] = {}
    tried = 0
    for count in case.microbatches:
        referee = _Referee(case, count)
        for candidate in candidates(case, count, referee.boundaries):
            tried += 1
            seconds, peak_bytes = referee.measure(candidate)
            if peak_bytes > case.budget_bytes:
                continue
            number = len(candidate.devices)
            by_stages[number] = min(seconds, by_stages.get(number, seconds))
            if best is None or seconds < best[0]:
                best = seconds, candidate
    if best is None:
        raise ValueError(f"none of {tried} pipelines of {case.name} keeps the budget")
    return Best(best[0], best[1], by_stages, tried)


def candidates(case: Case, count: int, boundaries: tuple[int, ...]) -> Iterator[Candidate]:
    """All pipelines of so many microbatches whose stages begin at some of the boundaries."""
    for number in range(1, len(case.layers) + 1):
        for cuts in itertools.combinations(boundaries, number - 1):
            for devices in device_runs(case.cluster, number):
                shapes = [part_of(case.cluster, run).logical_mesh_shapes(MAX_AXES) for run in devices]
                for meshes in itertools.product(*shapes):
                    for schedule in SEVERAL if number > 1 else (Schedule.SINGLE,):
                        yield Candidate(count, cuts, devices, meshes, schedule)
            yield from _dealt(case, count, cuts)


def _dealt(case: Case, count: int, cuts: tuple[int, ...]) -> Iterator[Candidate]:
    """All ways to deal the stages round meshes of one size, each mesh in every shape."""
    stages = len(cuts) + 1
    for number, runs in ((n, runs) for n in range(2, stages) for runs in device_runs(case.cluster, n)):
        if stages % number or len(set(map(len, runs))) > 1:
            continue
        shapes = [part_of(case.cluster, run).logical_mesh_shapes(MAX_AXES) for run in runs]
        for meshes in itertools.product(*shapes):
            devices, dealt = runs * (stages // number), meshes * (stages // number)
            yield Candidate(count, cuts, devices, dealt, Schedule.INTERLEAVED_ONE_F_ONE_B)


def device_runs(cluster: Cluster, number: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to take a cluster apart into so many consecutive runs of devices (see the module docstring)."""
    per_host, total = cluster.devices_per_host, cluster.num_devices
    halves_only = per_host in (1, 2, 4, 8)
    may_idle = not (halves_only and cluster.hosts in (1, 2, 4, 8)) or bool(cluster.host_devices)

    is_uniform = not (cluster.host_links or cluster.host_devices)
    orders = [tuple(range(cluster.hosts))] if is_uniform else list(itertools.permutations(range(cluster.hosts)))
    seen = set()

    def runs_from(start: int, left: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if left == 0:
            if start == total or may_idle:
                yield ()
            return
        for stop in range(start + 1, total + 1):
            size = stop - start
            in_host = start // per_host == (stop - 1) // per_host and (size in (1, 2, 4, 8) or not halves_only)
            if in_host or (start % per_host == 0 and size % per_host == 0):
                next_host = -(-stop // per_host) * per_host
                for begin in {stop, next_host} if may_idle else {stop}:
                    for rest in runs_from(begin, left - 1):
                        if rest or begin == stop:
                            yield (tuple(range(start, stop)), *rest)

    for order, runs in itertools.product(orders, list(runs_from(0, number))):
        placed = tuple(tuple(sorted(order[one // per_host] * per_host + one % per_host for one in run)) for run in runs)
        kinds = ({cluster.kind_of(device // per_host) for device in run} for run in placed)
        if placed not in seen and all(len(own) == 1 for own in kinds):
            seen.add(placed)
            yield placed


def part_of(cluster: Cluster, run: tuple[int, ...]) -> Cluster:
    """The devices of a run as a cluster of their own."""
    hosts = sorted({device // cluster.devices_per_host for device in run})
    links = {
        (hosts.index(one), hosts.index(other)): link
        for (one, other), link in cluster.host_links.items()
        if one in hosts and other in hosts
    }
    kinds = {hosts.index(host): kind for host, kind in cluster.host_devices.items() if host in hosts}
    per_host = len(run) // len(hosts)
    return replace(cluster, hosts=len(hosts), devices_per_host=per_host, host_links=links, host_devices=kinds)


class _Referee:
    """Owns the stages of a case, with so many microbatches, that are solved so far."""

    def __init__(self, case: Case, count: int) -> None:
        self._case = case
        self._step = case.step(count)
        self.boundaries = case.boundaries(self._step.loop)
        self._solved: dict[tuple[tuple[int, ...], int, Cluster, Mesh], tuple[Graph, Found]] = {}
        self._lowered: dict[tuple[Any, ...], tuple[StageLowering, StageCost]] = {}

    def measure(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds of a step, and the most bytes on a device."""
        made = cut(self._step.loop, self._step.state_pairs, candidate.cuts)
        lowered, costs = [], []
        for number, (program, run, mesh) in enumerate(
            zip(made.stages, candidate.devices, candidate.meshes, strict=True)
        ):
            part = part_of(self._case.cluster, run)
            key = (candidate.cuts, number, part, mesh)
            splits_backward = candidate.schedule in SPLIT
            if (*key, splits_backward) not in self._lowered:
                if key not in self._solved:
                    self._solved[key] = self._solve(program, part, mesh)
                graph, found = self._solved[key]
                one = lower_stage(program, graph, found.stage, splits_backward=splits_backward)
                self._lowered[*key, splits_backward] = one, stage_cost(one, found.problem.fusion, part)
            stage, cost = self._lowered[*key, splits_backward]
            lowered.append(replace(stage, stage=replace(stage.stage, devices=run)))
            costs.append(cost)
        num_meshes = len(set(candidate.devices))
        order = make_order(candidate.schedule, len(lowered), candidate.num_microbatches, num_meshes)
        pipeline = pipeline_of(lowered, made.crossings, order)
        transfers = transfers_of(pipeline, self._case.cluster)
        simulation = simulate_pipeline(pipeline, costs, transfers, self._case.cluster)
        return simulation.step_seconds, max(simulation.peak_bytes)

    def _solve(self, program: StageProgram, part: Cluster, mesh: Mesh) -> tuple[Graph, Found]:
        graph = build_graph(program.jaxpr, platform=part.device.platform.value)
        found = search(
            Task(
                graph=graph,
                state_pairs=program.state_pairs,
                donated=frozenset(source for source, _ in program.state_pairs),
                cluster=part,
                meshes=(mesh,),
                budget_bytes=float("inf"),
                restriction=lambda mesh: Restriction(),
            )
        )
        return graph, found


# --- cases ------------------------------------------------------------------------------------------------------------


def _weights(random: np.random.Generator, *shape: int) -> np.ndarray:
    return (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def _model(
    name: str,
    weights: Callable[[], Any],
    loss: Callable[[Any, Batch], jax.Array],
    row: Callable[[int], Batch],
    rows: int,
) -> Model:
    """Gradient descent with momentum on a loss."""

    def make_state() -> dict[str, Any]:
        params = jax.tree.map(jnp.asarray, weights())
        return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}

    def train_step(state: dict[str, Any], batch: Batch) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        value, gradient = jax.value_and_grad(loss)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradient)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, {"loss": value}

    return Model(name, make_state, train_step, row, rows)


def mlp(widths: tuple[int, ...], rows: int) -> Model:
    """x ← tanh(x Wₖ), squared error; as many layers as matrices."""

    def weights() -> list[np.ndarray]:
        random = np.random.default_rng(0)
        return [_weights(random, *shape) for shape in itertools.pairwise(widths)]

    def loss(weights: list[jax.Array], batch: Batch) -> jax.Array:
        x = batch["x"]
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - batch["y"]) ** 2)

    def make_batch(number: int) -> Batch:
        random = np.random.default_rng(1)
        return {"x": _weights(random, number, widths[0]), "y": _weights(random, number, widths[-1])}

    return _model(f"mlp-{widths}-{rows}", weights, loss, make_batch, rows)


def blocks(inner: tuple[int, ...], width: int, rows: int, sequence: int) -> Model:
    """x ← x + tanh(x Aₖ) Bₖ, squared error; Aₖ is ``inner[k]`` wide, and what is there can be made again, or lie elsewhere."""

    def weights() -> list[dict[str, np.ndarray]]:
        random = np.random.default_rng(0)
        return [{"wide": _weights(random, width, one), "narrow": _weights(random, one, width)} for one in inner]

    def loss(weights: list[dict[str, jax.Array]], batch: Batch) -> jax.Array:
        x = batch["x"]
        for block in weights:
            x = x + jnp.tanh(x @ block["wide"]) @ block["narrow"]
        return jnp.mean((x - batch["y"]) ** 2)

    def make_batch(number: int) -> Batch:
        random = np.random.default_rng(1)
        x = random.standard_normal((2, number, sequence, width)).astype(np.float32)
        return {"x": x[0], "y": x[1]}

    return _model(f"blocks-{inner}-{width}-{rows}", weights, loss, make_batch, rows)


def scanned_blocks(count: int, inner: int, width: int, rows: int, sequence: int) -> Model:
    """So many like :func:`blocks` in one loop."""

    def weights() -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        wide, narrow = (_weights(random, *shape) for shape in ((count, width, inner), (count, inner, width)))
        return {"wide": wide, "narrow": narrow}

    def loss(weights: dict[str, jax.Array], batch: Batch) -> jax.Array:
        def layer(x: jax.Array, own: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ own["wide"]) @ own["narrow"], None

        return jnp.mean((jax.lax.scan(layer, batch["x"], weights)[0] - batch["y"]) ** 2)

    def make_batch(number: int) -> Batch:
        random = np.random.default_rng(1)
        x = random.standard_normal((2, number, sequence, width)).astype(np.float32)
        return {"x": x[0], "y": x[1]}

    return _model(f"scanned-{count}x{inner}-{width}-{rows}", weights, loss, make_batch, rows)


PRODUCTS_OF_A_BLOCK = 6


def transformer(blocks: int, width: int, rows: int, sequence: int = 8) -> Model:
    """Blocks of one-headed attention and an MLP, six matrix products each; squared error."""

    def weights() -> list[dict[str, np.ndarray]]:
        random = np.random.default_rng(0)
        shapes = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 2 * width),
            "down": (2 * width, width),
        }
        return [{name: _weights(random, *shape) for name, shape in shapes.items()} for _ in range(blocks)]

    def loss(weights: list[dict[str, jax.Array]], batch: Batch) -> jax.Array:
        x = batch["x"]
        for block in weights:
            q, k, v = jnp.split(x @ block["qkv"], 3, axis=-1)
            scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / width**0.5)
            x = x + jnp.einsum("bqk,bkd->bqd", scores, v) @ block["out"]
            x = x + jnp.tanh(x @ block["up"]) @ block["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    def make_batch(number: int) -> Batch:
        random = np.random.default_rng(1)
        x = random.standard_normal((2, number, sequence, width)).astype(np.float32)
        return {"x": x[0], "y": x[1]}

    return _model(f"transformer-{blocks}x{width}-{rows}", weights, loss, make_batch, rows)


def cluster_of(
    hosts: int, devices_per_host: int, *, network: float, local: float = 1e9, latency_seconds: float = 1e-5
) -> Cluster:
    """Devices of 10⁷ FLOP/s and 10⁹ bytes per second; links of so many bytes per second, one network card per host."""
    device = DeviceKind("slow", Platform.CPU, {"float32": 1e7}, 2**30, 1e9)
    return Cluster(
        f"{hosts}x{devices_per_host}",
        hosts,
        devices_per_host,
        device,
        Link(latency_seconds, local),
        Link(latency_seconds, network, shared_by=devices_per_host),
    )


def with_faster(cluster: Cluster, hosts: tuple[int, ...]) -> Cluster:
    """The cluster with devices on these hosts that do three times as much."""
    slow = cluster.device
    fast = replace(slow, name="fast", flops_per_second={"float32": 3e7}, memory_bytes_per_second=3e9)
    return replace(cluster, host_devices=dict.fromkeys(hosts, fast))


SLOW, MIDDLE, FAST = 3e5, 3e6, 1e9
"""Bytes per second between hosts."""


def cases() -> tuple[Case, ...]:
    """Small steps on small clusters: links slow and fast, layers alike and not, odd numbers of devices, a budget or none."""
    even, tapered = (64, 64, 64, 64, 64), (128, 64, 64, 32, 16)
    four = (0, 1, 2, 3)
    block = PRODUCTS_OF_A_BLOCK
    found = []
    for name, speed in (("slow", SLOW), ("middle", MIDDLE), ("fast", FAST)):
        cluster = cluster_of(2, 2, network=speed)
        found += [
            Case(f"mlp, {name}", lambda: mlp(even, 32), four, cluster, (1, 2, 4)),
            Case(f"tapered mlp, {name}", lambda: mlp(tapered, 32), four, cluster, (1, 4)),
            Case(f"few rows, {name}", lambda: mlp(even, 8), four, cluster, (1, 2, 4)),
            Case(f"many rows, {name}", lambda: mlp(even, 256), four, cluster, (1, 4, 8)),
            Case(f"transformer, {name}", lambda: transformer(3, 32, 8), (0, block, 2 * block), cluster, (1, 4)),
            Case(f"two hosts of one, {name}", lambda: mlp(even, 32), four, cluster_of(2, 1, network=speed), (1, 4)),
            Case(
                f"four hosts of one, {name}", lambda: mlp(even, 32), four, cluster_of(4, 1, network=speed), (1, 2, 4, 8)
            ),
            Case(
                f"six layers on eight, {name}",
                lambda: mlp((32,) * 7, 32),
                (0, 1, 2, 3, 4, 5),
                cluster_of(2, 4, network=speed),
                (4,),
            ),
        ]
    for name, (hosts, per_host), pairs in (("racks", (4, 1), ((0, 2), (1, 3))), ("a near pair", (3, 2), ((0, 2),))):
        near = Link(1e-5, MIDDLE, per_host)
        cluster = replace(cluster_of(hosts, per_host, network=SLOW), host_links=dict.fromkeys(pairs, near))
        found.append(Case(name, lambda: mlp(tapered, 32), four if hosts == 4 else (0, 1, 3), cluster, (4,)))
    for name, (hosts, per_host), fast_hosts, count in (
        ("two kinds", (2, 1), (1,), 8),
        ("two kinds of three", (3, 1), (0, 2), 4),
        ("two kinds on hosts of two", (2, 2), (1,), 8),
    ):
        mixed = with_faster(cluster_of(hosts, per_host, network=MIDDLE, local=SLOW), fast_hosts)
        found.append(Case(name, lambda: mlp(even, 256), four, mixed, (count,)))
    for number in (5, 6):
        cluster = cluster_of(1, number, network=SLOW, local=SLOW)
        found.append(Case(f"three layers on {number}", lambda: mlp((64, 64, 64, 32), 30), (0, 1, 2), cluster, (2,)))
    for hosts, per_host in ((1, 3), (3, 1), (1, 5), (5, 1), (1, 6), (2, 3), (3, 2)):
        cluster = cluster_of(hosts, per_host, network=SLOW, local=MIDDLE)
        found.append(Case(f"{hosts} × {per_host} devices", lambda: mlp(even, 32), four, cluster, (1, 4)))
    slow = cluster_of(2, 2, network=SLOW)
    for budget in (114_000, 120_000, 160_000):
        found.append(Case(f"budget {budget}", lambda: mlp(even, 64), four, slow, (1, 2, 4), budget))
    return tuple(found)
