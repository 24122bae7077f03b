"""Is what is predicted of a pipeline without compiling what XLA compiles, and what is then in memory?

Every executable of two stages is compiled by itself: collectives by kind and bytes, arguments, results and aliased bytes
exact, the total within the tolerances of whole steps.  Then a step runs, list by list, and the bytes of all arrays that
are alive after each instruction are held against the places of the lists and against the simulator's peak.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from autopar.cost_model.hlo import HloCollective, collectives, parse_module
from autopar.cost_model.pipeline import ExecutableCost, StageCost
from autopar.inter_op.arranged import PipelineFound
from autopar.plan import Schedule
from autopar.runtime.pipeline import Interpreter, PipelineExecutor
from autopar.runtime.stage_executable import StageExecutable
from autopar.schedule.instructions import Instruction, Part, Run, Slot
from autopar.schedule.slices import Executable
from tests.toy_pipelines import Step, toy_step, two_stages

pytestmark = pytest.mark.usefixtures("users_fusions")

TOTAL_TOLERANCE = 0.15
TOO_LOW = 0.05
BYTES_TOLERANCE = 0.01  # XLA gathers a bias whole that a sum would bring as well
SMALL_BYTES = 1024  # scalars and norms, which XLA finds to be the same in several places
TABLE_BYTES_PER_RESULT = 8

ALWAYS = (("mlp_nnx", "toy", 1), ("mlp_nnx", "bench", 4))
DEFAULT = ("mlp_nnx", "toy", 4)
"""Its executables are compiled once in the default run, for the predictions and for the step that runs."""
VERIFY = tuple(
    (name, size, count)
    for name, size in (
        ("mlp_nnx", "toy"),
        ("mlp_nnx", "bench"),
        ("gpt", "toy"),
        ("gpt", "bench"),
        ("llama_nnx", "toy"),
        ("t5", "toy"),
        ("unet", "toy"),
        ("unet", "bench"),
    )
    for count in (1, 4)
    if (name, size, count) not in ALWAYS
)
GAPS: dict[tuple[str, str, int], set[tuple[int, str, int]]] = {}
"""Executables (stage, part, segment) of which scratch bytes are predicted beyond the tolerance: at present none."""


@functools.cache
def compiled(name: str, size: str, count: int, schedule: Schedule) -> tuple[PipelineFound, PipelineExecutor]:
    """A pipeline and its executables."""
    found = two_stages(toy_step(name, count, size), schedule)
    return found, PipelineExecutor(found.pipeline, found.transfers, jax.devices())


def executables(
    found: PipelineFound, executor: PipelineExecutor
) -> list[tuple[tuple[int, Part, int], Executable, StageCost, StageExecutable]]:
    """Every executable with its stage's price and what it is compiled to."""
    return [
        (
            (stage, one.part, one.segment),
            one,
            cost,
            executor.executables[stage, one.part, one.segment],
        )
        for stage, cost in enumerate(found.costs)
        for one in cost.lowering.slices.executables
    ]


def bytes_by_kind(found: Sequence[Any], full_bytes: Callable[[Any], float]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for one in found:
        totals[getattr(one.kind, "value", one.kind)] += int(full_bytes(one))
    return totals


def check_collectives(cost: ExecutableCost, ran: Sequence[HloCollective]) -> None:
    predicted = bytes_by_kind(cost.collectives, lambda use: use.full_bytes * use.count)
    actual = bytes_by_kind(ran, lambda one: one.full_bytes * one.count)
    for kind in predicted.keys() | actual.keys():
        assert predicted[kind] == pytest.approx(actual[kind], rel=BYTES_TOLERANCE, abs=SMALL_BYTES), kind


def given_bytes(one: Executable, cost: StageCost, count: int) -> tuple[int, int, int]:
    """Argument, output and alias bytes of an executable, by the bytes of its places."""
    names = cost.lowering.names
    arguments = [cost.slot_bytes[names[a.place]] * (count if a.is_stacked else 1) for a in one.arguments]
    results = [cost.slot_bytes[names[r.place]] for r in one.results]
    table = TABLE_BYTES_PER_RESULT * len(results) if len(results) > 1 else 0
    return sum(arguments), sum(results) + table, sum(arguments[k] for k in one.donated)


def check(name: str, size: str, count: int) -> None:
    beyond = set()
    for (stage, part, segment), one, cost, made in executables(*compiled(name, size, count, Schedule.ONE_F_ONE_B)):
        price = cost.executables[part, segment]
        check_collectives(price, collectives(parse_module(made.as_text())))
        actual = made.memory_analysis()
        argument, output, alias = given_bytes(one, cost, count)
        assert argument == actual.argument_size_in_bytes
        assert output == actual.output_size_in_bytes
        assert alias == actual.alias_size_in_bytes
        outside = argument + output - alias
        total = outside + actual.temp_size_in_bytes
        if not (1 - TOO_LOW) * total <= outside + price.temp_bytes <= (1 + TOTAL_TOLERANCE) * total:
            beyond.add((stage, part.value, segment))
    assert beyond == GAPS.get((name, size, count), set())


@pytest.mark.verify
@pytest.mark.parametrize(("name", "size", "count"), ALWAYS)
def test_executables_are_what_is_predicted(name: str, size: str, count: int) -> None:
    check(name, size, count)


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [pytest.param(*one, marks=() if one == DEFAULT else pytest.mark.verify) for one in VERIFY],
)
def test_executables_of_more_families_are_what_is_predicted(name: str, size: str, count: int) -> None:
    check(name, size, count)


# --- a step that runs -------------------------------------------------------------------------------------------------


class Watched:
    """An interpreter's calls, one instruction at a time: what lies in its slots after each, and at its fullest moment."""

    def __init__(self, inner: Interpreter, scratch_bytes: Mapping[tuple[int, Part, int], int]) -> None:
        self._inner = inner
        self._scratch_bytes = scratch_bytes
        self.after: dict[int, list[tuple[Instruction, dict[Slot, int]]]] = {}
        self.peak_bytes: dict[int, int] = {}
        """By the stage of the list's tasks: arrays alive on one device, and XLA's own scratch bytes while a task runs."""

    def run(self, instructions: Sequence[Instruction], arrays: dict[Slot, jax.Array]) -> dict[Slot, jax.Array]:
        stage = next(one.task.stage for one in instructions if isinstance(one, Run))
        seen = self.after[stage] = []
        for instruction in instructions:
            self._inner.run([instruction], arrays)
            held = {slot: bytes_on_a_device(array) for slot, array in arrays.items()}
            seen.append((instruction, held))
            scratch = 0
            if isinstance(instruction, Run):
                task = instruction.task
                scratch = self._scratch_bytes[task.stage, task.part, task.segment]
            self.peak_bytes[stage] = max(self.peak_bytes.get(stage, 0), sum(held.values()) + scratch)
        return arrays


def bytes_on_a_device(array: jax.Array) -> int:
    """Bytes of an array on each device that has a part of it: all alike."""
    by_device: Counter[int] = Counter()
    for shard in array.addressable_shards:
        by_device[shard.device.id] += shard.data.nbytes
    (size,) = set(by_device.values())
    return size


def leaves_of(step: Step) -> list[Any]:
    """What the executor is called with: batch leaves by microbatches, what the step closes over at the end."""
    state = jax.jit(step.model.make_state)()
    leaves = [*jax.tree.leaves((state, step.model.make_batch(step.model.batch_size))), *step.hidden]
    count = step.loop.count
    for position in step.batch:
        rows = np.asarray(leaves[position])
        leaves[position] = rows.reshape(count, rows.shape[0] // count, *rows.shape[1:])
    return leaves


def check_memory(name: str, size: str, count: int, schedule: Schedule) -> None:
    step = toy_step(name, count, size)
    found, executor = compiled(name, size, count, schedule)
    scratch = {key: made.memory_analysis().temp_size_in_bytes for key, made in executor.executables.items()}
    watched = Watched(executor._interpreter, scratch)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(executor, "_interpreter", watched)
        jax.block_until_ready(executor(leaves_of(step)))
    for stage, cost in enumerate(found.costs):
        held_bytes = 0
        for instruction, held in watched.after[stage]:
            assert held == {slot: cost.slot_bytes[slot.name] for slot in held}, instruction
            held_bytes = max(held_bytes, sum(held.values()))
        predicted = found.simulation.peak_bytes[stage]
        assert (1 - TOO_LOW) * held_bytes <= predicted
        assert (1 - TOO_LOW) * watched.peak_bytes[stage] <= predicted
        assert predicted <= (1 + TOTAL_TOLERANCE) * watched.peak_bytes[stage]


MEMORY_ALWAYS = (("mlp_nnx", "bench", 4, Schedule.ONE_F_ONE_B),)
MEMORY_VERIFY = tuple(
    (name, "toy", count, schedule)
    for name in ("mlp_nnx", "gpt", "llama_nnx", "t5", "unet")
    for count, schedule in (
        (1, Schedule.ONE_F_ONE_B),
        (4, Schedule.ONE_F_ONE_B),
        (4, Schedule.GPIPE),
        (4, Schedule.ZERO_BUBBLE_H1),
    )
    if (name, "toy", count, schedule) not in MEMORY_ALWAYS
)


@pytest.mark.verify
@pytest.mark.parametrize(("name", "size", "count", "schedule"), MEMORY_ALWAYS)
def test_arrays_in_memory_are_those_predicted(name: str, size: str, count: int, schedule: Schedule) -> None:
    check_memory(name, size, count, schedule)


@pytest.mark.parametrize(
    ("name", "size", "count", "schedule"),
    [
        pytest.param(*one, marks=() if one == (*DEFAULT, Schedule.ONE_F_ONE_B) else pytest.mark.verify)
        for one in MEMORY_VERIFY
    ],
)
def test_arrays_in_memory_of_more_families_are_those_predicted(
    name: str, size: str, count: int, schedule: Schedule
) -> None:
    check_memory(name, size, count, schedule)
