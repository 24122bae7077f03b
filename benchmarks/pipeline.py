"""What does a pipeline cost beyond the work of its executables, and is it predicted as the clock says?

    python -m benchmarks.pipeline [--rounds 9] [--profile auto|measure|none|FILE]

Two virtual devices, one thread for each product as far as XLA can be told so; yet it runs kernels that do not depend on
each other on all cores (and jax 0.12 products as well), so an executable is timed twice: ``alone``, and ``beside`` the
other stage at work.  In simulations from measured executables two stages share the machine: each works at speed 1 beside
the other, and alone at Σ beside / Σ alone.  Two tables:

    overhead    step / critical path − 1, for two stages on a device each and executables of 20 ms or more.  The critical
                path is simulated from measured executables, with messages and instructions that cost nothing.  Processor
                time is what all threads together work: of a step beyond that of its executables it is spent on
                instructions, whatever else runs on the machine
    plans       two stages of a device each: cuts × microbatches × schedules.  ``predicted`` is the planner's cost model with
                the profile of this machine, ``simulated`` the same with measured executables

A plan is judged by the median step of rounds in which all plans and their executables take turns; tau and regret as in
:mod:`benchmarks.ranking`.  Run it alone on the machine: the line with the load says whether it was.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster
from autopar.compiled import Compiled
from autopar.cost_model.machine import Machine, Processor, Resource, ResourceKind
from autopar.cost_model.pipeline import machine_of, transfer_load
from autopar.cost_model.simulate import Work, simulate
from autopar.inter_op.arranged import Arrangement, PipelineFound, PipelineTask
from autopar.inter_op.layers import layers
from autopar.inter_op.stages import StagePlanner
from autopar.pipelines import plan_of_pipeline
from autopar.plan import Schedule
from autopar.runtime.cross_mesh import Mover
from autopar.runtime.pipeline import Key, PipelineExecutor
from autopar.runtime.stage_executable import StageExecutable
from autopar.schedule.instructions import Part
from autopar.stage_tasks import loop_of, pipeline_task
from autopar.subjects import Demands, Subjected
from benchmarks.models.base import Batch, Model
from benchmarks.ranking import priced, tau_text, verdict

BLOCKS, HIDDEN, WIDE, ROWS = 8, 512, 2048, 512
CALLS = 5
WARM_STEPS = 2
OVERHEAD_ROUNDS = 3
"""A share of five percent takes so many times the rounds that a share of fifteen takes."""
OVERHEAD_WANTED, ERROR_WANTED, TAU_WANTED, REGRET_WANTED = 0.05, 0.15, 0.8, 1.05
APART = ((0,), (1,))


def residual_blocks() -> Model:
    """x ← x + W₂ relu(W₁ x) in ``BLOCKS`` blocks, squared error, SGD with momentum: little to compile, products for the most
    part.
    """

    def make_state() -> Any:
        keys = jax.random.split(jax.random.key(0), 2 * BLOCKS)
        params = {
            f"block{k}": {
                "up": jax.random.normal(keys[2 * k], (HIDDEN, WIDE)) * HIDDEN**-0.5,
                "down": jax.random.normal(keys[2 * k + 1], (WIDE, HIDDEN)) * 0.1 * WIDE**-0.5,
            }
            for k in range(BLOCKS)
        }
        return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}

    def loss_of(params: Any, batch: Batch) -> jax.Array:
        x = batch["x"]
        for k in range(BLOCKS):
            block = params[f"block{k}"]
            x = x + jax.nn.relu(x @ block["up"]) @ block["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    def train_step(state: Any, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, {"loss": loss}

    def make_batch(count: int) -> Batch:
        random = np.random.default_rng(0)
        return {name: random.standard_normal((count, HIDDEN), dtype=np.float32) for name in ("x", "y")}

    return Model("residual blocks", make_state, train_step, make_batch, ROWS)


# ------------------------------------------------------------------------------------------------------ plans to measure


@dataclass(frozen=True)
class Point:
    """One plan: so many eighths of the model on the first stage, so many microbatches, a schedule."""

    blocks: int
    count: int
    schedule: Schedule = Schedule.ONE_F_ONE_B

    def __str__(self) -> str:
        return f"{self.blocks}+{BLOCKS - self.blocks} blocks, N={self.count}, {self.schedule.value}"


def points() -> list[Point]:
    """Every cut, 2 to 8 microbatches, every schedule; a device a stage.

    Sixteen microbatches make executables of a few milliseconds (simulated 6% to 19% high).  Stages of two devices each would
    be four threads on two cores: their collectives wait for the operating system's scheduler, which no simulation of stages
    sees (steps were 11% to 18% slower than simulated).
    """
    found = [Point(blocks, count) for blocks in range(1, BLOCKS) for count in (2, 4, 8)]
    for schedule in (Schedule.GPIPE, Schedule.EAGER_ONE_F_ONE_B):
        found += [Point(4, count, schedule) for count in (2, 4, 8)]
    return found


@dataclass(frozen=True)
class Built:
    """A plan, as the planner found it and as it runs."""

    found: PipelineFound
    executor: PipelineExecutor
    compiled: Compiled


class Builder:
    """Owns what plans of one number of microbatches share."""

    def __init__(self, model: Model, cluster: Cluster) -> None:
        self._model, self._cluster = model, cluster
        self._known: dict[int, tuple[Subjected, Demands, PipelineTask, StagePlanner, tuple[int, ...]]] = {}

    def build(self, point: Point) -> Built:
        """Plan and compile."""
        subject, demands, task, planner, starts = self._of_count(point.count)
        found = planner.plan(Arrangement((starts[point.blocks - 1],), APART, point.schedule))
        executor = PipelineExecutor(found.pipeline, found.transfers, jax.devices())
        plan = plan_of_pipeline(subject, task.cluster, demands, found)
        return Built(found, executor, Compiled(subject, plan, found.pipeline, executor))

    def _of_count(self, count: int) -> tuple[Subjected, Demands, PipelineTask, StagePlanner, tuple[int, ...]]:
        if count not in self._known:
            model, cluster = self._model, self._cluster
            step = autopar.parallelize(stages=APART, num_microbatches=count, cluster=cluster)(model.train_step)
            subject, _, _ = step.records(model.abstract_state(), model.abstract_batch())
            loop = loop_of(subject)
            task = pipeline_task(subject, loop, cluster, step.demands, lambda message: None)
            starts = layers(loop, task.state_pairs, at_most=BLOCKS)
            if len(starts) != BLOCKS - 1:
                raise SystemExit(f"{BLOCKS} blocks gave {len(starts) + 1} layers")
            self._known[count] = subject, step.demands, task, StagePlanner(task), starts
        return self._known[count]


# ------------------------------------------------------------------------------------------------- seconds of executables


@dataclass(frozen=True)
class Call:
    """Seconds until results are there, until the call returns, and of processor time; medians of several calls."""

    seconds: float
    dispatch_seconds: float
    processor_seconds: float


class Subject:
    """An executable with zeros to run on; what a call takes over is made anew."""

    def __init__(self, executable: StageExecutable) -> None:
        self._executable = executable
        taken = set(executable.donated)
        self._kept = {k: _zeros(shape) for k, shape in enumerate(executable.arguments) if k not in taken}

    def arrays(self) -> list[jax.Array]:
        """Arguments of one call."""
        shapes = enumerate(self._executable.arguments)
        return jax.block_until_ready([self._kept[k] if k in self._kept else _zeros(shape) for k, shape in shapes])

    def timed(self) -> Call:
        """One blocking call."""
        return _once(self._executable, self.arrays())

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The executable runs all the while."""
        done = threading.Event()

        def work() -> None:
            while not done.is_set():
                jax.block_until_ready(self._executable(self.arrays()))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _once(call: Callable[[Any], Any], given: Any) -> Call:
    worked, started = time.process_time(), time.perf_counter()
    results = call(given)
    returned = time.perf_counter()
    jax.block_until_ready(results)
    return Call(time.perf_counter() - started, returned - started, time.process_time() - worked)


def typical(once: Callable[[], Call], calls: int) -> Call:
    """The median of so many calls, after one that warms up."""
    once()
    return _median([once() for _ in range(calls)])


def _median(calls: Sequence[Call]) -> Call:
    return Call(*map(statistics.median, zip(*map(astuple, calls), strict=True)))


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(np.zeros(shape.shape, shape.dtype), shape.sharding, may_alias=False)


def moved(built: Built) -> Iterator[tuple[int, Call]]:
    """Every transfer between the stages, by number."""
    for number, transfer in built.found.transfers.items():
        mover = Mover(transfer, jax.devices())
        array = jax.ShapeDtypeStruct(transfer.shape, jnp.float32, sharding=mover.source_sharding)
        yield number, typical(lambda mover=mover, array=array: _once(mover, _zeros(array)), CALLS)


# ------------------------------------------------------------------------------------------------------------ overhead


@dataclass(frozen=True)
class Measured:
    """The executables of a plan of two stages, timed alone and beside the other stage at work."""

    alone: Mapping[Key, Call]
    beside: Mapping[Key, Call]
    count: int
    """The number of microbatches."""

    def times(self, key: Key) -> int:
        """Calls in a step."""
        return self.count if key[1].per_microbatch else 1

    def speed_alone(self, stage: int) -> float:
        """How many times faster the stage works while the other idles."""
        own = [key for key in self.alone if key[0] == stage]
        beside, alone = (sum(self.times(k) * calls[k].seconds for k in own) for calls in (self.beside, self.alone))
        return max(1.0, beside / alone)

    def path_seconds(self, built: Built, cluster: Cluster, *, free_messages: bool = False) -> float:
        """A step by simulation; with ``free_messages`` its critical path."""
        pipeline = built.found.pipeline
        machine = machine_of(pipeline, cluster)
        processors = (Processor(self.speed_alone(stage), ((_CORES, 0.5),)) for stage in (0, 1))
        work = Work(lambda task: self.beside[task.stage, task.part, task.segment].seconds)
        if not free_messages:
            work = replace(work, load=lambda number: transfer_load(built.found.transfers[number], cluster))
        machine = Machine(tuple(processors), {**machine.units_per_second, _CORES: 1.0})
        return simulate(pipeline.lists.lists, work, machine).step_seconds


_CORES = Resource(ResourceKind.COMPUTE, 0, 0)


class Turns:
    """Owns a plan's state, and the seconds of its steps and executables.

    Steps and executables are timed in the same rounds: a machine that is slower for a while is so for both.
    """

    def __init__(self, model: Model, built: Built, count: int) -> None:
        self._compiled, self._count = built.compiled, count
        self._batch = jax.tree.leaves(model.make_batch(model.batch_size))
        self._state = jax.tree.leaves(jax.jit(model.make_state)())
        self._subjects = {key: Subject(one) for key, one in built.executor.executables.items()}
        self._steps: list[Call] = []
        self._alone: dict[Key, list[Call]] = {key: [] for key in self._subjects}
        self._beside: dict[Key, list[Call]] = {key: [] for key in self._subjects}
        for _ in range(WARM_STEPS):
            _once(self._step, [*self._state, *self._batch])

    def _step(self, leaves: list[Any]) -> list[Any]:
        self._state = jax.tree.leaves(self._compiled.run(leaves)[0])
        return self._state

    def step(self) -> None:
        """Time a step."""
        self._steps.append(_once(self._step, [*self._state, *self._batch]))

    def executables(self) -> None:
        """Time every executable, alone and beside the other stage at work."""
        for key, subject in self._subjects.items():
            self._alone[key].append(subject.timed())
        for stage in (0, 1):
            with self._subjects[1 - stage, Part.BACKWARD, 0].at_work():
                for key, subject in self._subjects.items():
                    if key[0] == stage:
                        self._beside[key].append(subject.timed())

    @property
    def step_call(self) -> Call:
        return _median(self._steps)

    @property
    def measured(self) -> Measured:
        alone, beside = ({key: _median(calls) for key, calls in one.items()} for one in (self._alone, self._beside))
        return Measured(alone, beside, self._count)


def overhead(step_seconds: float, path_seconds: float) -> float:
    """What a step takes beyond its critical path, as a share of that."""
    return step_seconds / path_seconds - 1


def overhead_tables(model: Model, builder: Builder, cluster: Cluster, rounds: int) -> Iterator[Table]:
    """Table A, for even and uneven stages."""
    for point in (Point(4, 4), Point(4, 4, Schedule.GPIPE), Point(2, 4)):
        built = builder.build(point)
        turns = Turns(model, built, point.count)
        for _ in range(OVERHEAD_ROUNDS * rounds):
            turns.step()
            turns.executables()
        one, step = turns.measured, turns.step_call
        processor_seconds = sum(one.times(key) * call.processor_seconds for key, call in one.alone.items())
        path_seconds = one.path_seconds(built, cluster, free_messages=True)
        table = Table(title=f"{point}")
        table.add_column("stage, executable")
        for column in ("alone ms", "beside ms", "call returns after ms", "processor ms"):
            table.add_column(column, justify="right")
        for key, call in one.alone.items():
            name = f"{key[0]} {key[1].value} {key[2]}"
            times = (call.seconds, one.beside[key].seconds, call.dispatch_seconds, call.processor_seconds)
            table.add_row(f"{name} (× {one.times(key)})", *map(_ms, times))
        for number, call in moved(built):
            own = (call.dispatch_seconds, call.processor_seconds)
            table.add_row(f"transfer {number}", _ms(call.seconds), "", *map(_ms, own))
        table.add_row(
            "critical path, executables' sum", _ms(path_seconds), "", "", _ms(processor_seconds), style="bold"
        )
        table.add_row("step", _ms(step.seconds), "", "", _ms(step.processor_seconds), style="bold")
        pairs = ((step.seconds, path_seconds), (step.processor_seconds, processor_seconds))
        shares = [f"{overhead(whole, least):+.1%}" for whole, least in pairs]
        table.add_row(f"overhead (wanted: below {OVERHEAD_WANTED:.0%})", shares[0], "", "", shares[1], style="bold")
        yield table


# --------------------------------------------------------------------------------------------------- predicted and clock


@dataclass(frozen=True)
class Judged:
    """One plan: seconds of a step by the cost model, by simulation of measured executables, by the clock."""

    point: Point
    predicted_seconds: float
    simulated_seconds: float
    clock_seconds: float


def judge(model: Model, builder: Builder, cluster: Cluster, rounds: int) -> list[Judged]:
    """Every plan, fastest first."""
    plans = {point: builder.build(point) for point in points()}
    turns = {point: Turns(model, built, point.count) for point, built in plans.items()}
    sharing = {point: (point.blocks, point.count) for point in plans}  # schedules share executables
    first = {key: point for point, key in reversed(sharing.items())}
    for _ in range(rounds):
        for point, one in turns.items():
            one.step()
            if first[sharing[point]] is point:
                one.executables()
    found = []
    for point, built in plans.items():
        simulated_seconds = turns[first[sharing[point]]].measured.path_seconds(built, cluster)
        found.append(Judged(point, built.found.step_seconds, simulated_seconds, turns[point].step_call.seconds))
    return sorted(found, key=lambda one: one.clock_seconds)


def plan_table(rows: Sequence[Judged]) -> Table:
    """Table B."""
    table = Table(title=f"{len(rows)} plans of {BLOCKS} residual blocks")
    table.add_column("plan")
    for column in ("clock ms", "predicted ms", "off by", "simulated ms", "off by"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = []
        for seconds in (row.predicted_seconds, row.simulated_seconds):
            cells += [_ms(seconds), f"{overhead(seconds, row.clock_seconds):+.1%}"]
        table.add_row(str(row.point), _ms(row.clock_seconds), *cells)
    return table


def verdict_table(rows: Sequence[Judged]) -> Table:
    """Errors, tau and regret of both columns."""
    table = Table(
        title=f"wanted: off by ≤ {ERROR_WANTED:.0%}, tau ≥ {TAU_WANTED}, regret ≤ {REGRET_WANTED}",
    )
    table.add_column("seconds of a step")
    for column in ("median off by", "most off by", "plans within", "pairs", "tau", "regret"):
        table.add_column(column, justify="right")
    clock = [row.clock_seconds for row in rows]
    columns: dict[str, Callable[[Judged], float]] = {
        "predicted": lambda row: row.predicted_seconds,
        "simulated": lambda row: row.simulated_seconds,
    }
    for name, seconds_of in columns.items():
        said = [seconds_of(row) for row in rows]
        errors = [abs(overhead(a, b)) for a, b in zip(said, clock, strict=True)]
        within = sum(error <= ERROR_WANTED for error in errors)
        ranked = verdict(said, clock)
        table.add_row(
            name,
            f"{statistics.median(errors):.1%}",
            f"{max(errors):.1%}",
            f"{within} of {len(rows)}",
            str(ranked.pairs),
            tau_text(ranked.tau),
            f"{ranked.regret:.3f}",
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", default="auto", help="auto (measure if there is none), measure, none, or a file")
    parser.add_argument("--only", choices=("overhead", "plans"), help="one of the tables")
    arguments = parser.parse_args()
    console = Console(width=130)
    cluster = priced(arguments.profile, True)
    model = residual_blocks()
    builder = Builder(model, cluster)
    if arguments.only != "plans":
        for table in overhead_tables(model, builder, cluster, arguments.rounds):
            console.print(table)
    if arguments.only != "overhead":
        rows = judge(model, builder, cluster, arguments.rounds)
        console.print(plan_table(rows))
        console.print(verdict_table(rows))
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    console.print(f"jax {jax.__version__}, {os.cpu_count()} cores, load {load}: 2 or less if nothing else ran")


if __name__ == "__main__":
    main()
