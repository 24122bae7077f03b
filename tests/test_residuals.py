"""Do residuals in the memory of the host give the same step, cost what was said, and lie there where that pays?"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import autopar
from autopar import _compat
from autopar.cluster import Cluster, Link
from autopar.compilers import Compiler, target_of
from autopar.errors import PlanError
from autopar.inter_op.account import PipelineAccount
from autopar.inter_op.hosting import Candidate, are_too_few, candidates, cheapest_for
from autopar.plan import Offload, Plan
from autopar.runtime.executor import device_mesh
from autopar.runtime.stage_executable import compiled_stage
from autopar.schedule.instructions import Part
from autopar.schedule.residuals import residuals_of
from benchmarks.models import Model, build
from benchmarks.offload import blocks, mlp
from tests.test_correctness import STEPS, wrong_leaves
from tests.toy_runs import eight_slow_devices, precision, reference, run

HOST = "pinned_host"
LATENCY_SECONDS, BYTES_PER_SECOND = 1e-6, 1e10
STAGES = {"stages": ((0,), (1,)), "num_microbatches": 8}


def gpus(bytes_per_second: float = BYTES_PER_SECOND, shared_by: int = 1) -> Cluster:
    """Two described A100s on one host."""
    link = Link(LATENCY_SECONDS, bytes_per_second, shared_by)
    return Cluster.preset("p4d.24xlarge").part((0, 1)).replace(host_memory_link=link)


def planned(model: Model, cluster: Cluster, **options: Any) -> Plan:
    step = autopar.parallelize(model.train_step, cluster=cluster, **options)
    return step.plan(model.abstract_state(), model.abstract_batch())


@functools.cache
def accounted(offload: str, schedule: str = "1f1b", shared_by: int = 1) -> tuple[Plan, PipelineAccount]:
    """A deep perceptron in two stages on described GPUs, with the price of its parts."""
    model = mlp(width=256, layers=8, examples=8 * 512)
    step = autopar.parallelize(
        model.train_step, cluster=gpus(shared_by=shared_by), offload=offload, schedule=schedule, remat="none", **STAGES
    )
    subject, plan, _ = step.records(model.abstract_state(), model.abstract_batch())
    return plan, step.account(subject, plan, gpus(shared_by=shared_by))


# --------------------------------------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("mlp_nnx", "1f1b"),
        *(pytest.param("gpt", one, marks=pytest.mark.verify) for one in ("1f1b", "zb_h1", "gpipe")),
    ],
)
def test_the_same_numbers(name: str, schedule: str, tmp_path: Any) -> None:
    """Ten steps in float64, by a plan that was a file; what lies on the host is handed on as JAX's arrays there."""
    expected = reference(name, jnp.float64, STEPS)
    with precision(jnp.float64):
        model = build(name, dtype=jnp.float64)
        step = autopar.parallelize(
            model.train_step,
            offload="activations",
            stages=2,
            num_microbatches=4,
            schedule=schedule,
            cluster=eight_slow_devices(),
        )
        plan = step.plan(model.abstract_state(), model.abstract_batch())
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan and plan.offload is Offload.ACTIVATIONS
        assert plan.stages[0].hosted
        step.use(Plan.load(tmp_path / "plan.json"))
        got = run(model, step, step.init(model.make_state, model.abstract_batch()), STEPS)
        handed_on = 0
        for (number, _, _), one in step.last.executor.executables.items():
            kinds = [argument.sharding.memory_kind for argument in one.arguments]
            handed_on += kinds.count(HOST) * (number == 0)
        assert handed_on >= len(plan.stages[0].hosted)
        notes = " ".join(autopar.explain(step).notes)
        assert "lie in the memory of the hosts: of stage 1" in notes and "so it saves nothing" in notes
    assert wrong_leaves(expected.state, got.state) == {}
    for ours, theirs in zip(got.metrics, expected.metrics, strict=True):
        assert wrong_leaves(theirs, ours) == {}


# ----------------------------------------------------------------------------------------------------------- its price


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("shared_by", [1, 2])
def test_the_tasks_take_the_copies_and_nothing_else(schedule: str, shared_by: int) -> None:
    """Each task of the simulation: α and n/β of what it leaves or reads there, by hand; two stages on a link share it."""
    there, here = (accounted(offload, schedule, shared_by) for offload in ("activations", "none"))
    assert there[0].stages[0].hosted and not here[0].stages[0].hosted
    for stage, plain in zip(there[1].costs, here[1].costs, strict=True):
        for one in stage.lowering.slices.executables:
            copied = [one.arguments[k].place for k in one.hosted.inputs]
            copied += [one.results[k].place for k in one.hosted.outputs]
            values = stage.lowering.slices.program.values
            sizes = [values[place.buffer.value].size_bytes for place in copied]  # a stage is one device
            seconds = len(sizes) * LATENCY_SECONDS + sum(sizes) * shared_by / BYTES_PER_SECOND
            assert (seconds > 0) is bool(stage.lowering.stage.hosted and one.part.per_microbatch and sizes)
            more = stage.seconds(one.part, one.segment) - plain.seconds(one.part, one.segment)
            assert more == pytest.approx(seconds, rel=1e-6, abs=1e-15)
            events = [e for e in there[1].simulation.tasks if e.task.part is one.part and e.task.stage == 0]
            if stage is there[1].costs[0] and one.part is Part.FORWARD:
                assert all(
                    e.end_seconds - e.start_seconds == pytest.approx(plain.seconds(Part.FORWARD) + seconds)
                    for e in events
                )
    busiest = there[0].prediction.host_seconds
    assert busiest in [
        pytest.approx(8 * sum(one.host_seconds for one in cost.executables.values())) for cost in there[1].costs
    ]


def test_the_first_stage_holds_the_residuals_of_one_microbatch() -> None:
    """Two are in flight there: one set leaves the device, and two are on the host; the last stage holds one, and keeps it."""
    (plan, there), (_, here) = accounted("activations"), accounted("none")
    assert plan.stages[0].hosted and not plan.stages[1].hosted
    residuals = residuals_of(here.costs[0].lowering.slices)
    kept_bytes = sum(one.size_bytes for one in residuals if one.value in plan.stages[0].hosted)
    assert kept_bytes > 0.9 * sum(one.size_bytes for one in residuals)
    saved_bytes = here.simulation.peak_bytes[0] - there.simulation.peak_bytes[0]
    arriving_bytes = max(one.size_bytes for one in here.whole.pipeline.crossings)  # while copies take their time
    assert kept_bytes - arriving_bytes <= saved_bytes <= kept_bytes
    for one in there.costs[0].lowering.slices.executables:  # what the device has of them, it has while they run
        more = there.costs[0].executables[one.part, one.segment].temp_bytes
        more -= here.costs[0].executables[one.part, one.segment].temp_bytes
        assert more == (kept_bytes if one.part.per_microbatch else 0)
    assert sum(here.costs[0].slot_bytes) - sum(there.costs[0].slot_bytes) == kept_bytes
    assert here.simulation.peak_bytes[1] == there.simulation.peak_bytes[1]
    assert plan.prediction.memory.host_bytes == 2 * kept_bytes


def test_as_much_as_memory_needs_and_no_more() -> None:
    """Against budgets between both: everything fits, nothing lies there that need not, and what does is the fewest bytes."""
    model = mlp(width=256, layers=8, examples=8 * 512)
    # Nothing of the last stage can lie there, so no budget is below its peak.
    peaks = [max(accounted(offload)[1].simulation.peak_bytes) for offload in ("activations", "none")]
    budgets = [peaks[0] + share * (peaks[1] - peaks[0]) for share in (0.01, 0.5, 0.99)]
    found = [planned(model, gpus(), schedule="1f1b", remat="none", memory_per_device=one, **STAGES) for one in budgets]
    hosted = [one.prediction.memory.host_bytes for one in found]
    assert all(one.peak_bytes <= budget for one, budget in zip(found, budgets, strict=True))
    assert hosted[0] > hosted[1] > hosted[2] > 0
    assert found[0].step_seconds > found[1].step_seconds > found[2].step_seconds
    enough = planned(model, gpus(), schedule="1f1b", remat="none", memory_per_device=1.01 * peaks[1], **STAGES)
    assert enough.offload is Offload.NONE


def test_the_cheapest_that_are_enough() -> None:
    dear, small, large = (
        Candidate(0, value, saved_bytes, seconds, 2 * saved_bytes)
        for value, saved_bytes, seconds in ((1, 8.0, 8.0), (2, 1.0, 0.5), (3, 8.0, 2.0))
    )
    assert cheapest_for((dear, small, large), 7.0) == (large,)
    assert cheapest_for((dear, small, large), 9.0) == (large, small)
    assert set(cheapest_for((dear, small, large), 99.0)) == {dear, small, large}
    assert not are_too_few((dear, small, large), (0,), {0: 34.0}) and are_too_few((dear, small, large), (0,), {0: 34.5})
    assert are_too_few((dear,), (1, 0), {0: 1.0})  # they lie on another mesh


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_no_mesh_saves_more_than_what_is_refused_without_a_simulation(schedule: str) -> None:
    """With everything on the hosts each mesh's peak is lower by what its residuals are said to save, at most."""
    (_, there), (_, here) = accounted("activations", schedule), accounted("none", schedule)
    whole = here.whole.pipeline
    known = candidates(whole.stages, whole.order, gpus())
    peaks = zip(here.simulation.peak_bytes, there.simulation.peak_bytes, strict=True)
    saved_bytes = {mesh: before - after for mesh, (before, after) in enumerate(peaks)}
    assert saved_bytes[0] > 0
    assert not are_too_few(known, whole.homes, saved_bytes)


@pytest.mark.gpu_compiler
@pytest.mark.timeout(600)
@pytest.mark.skipif(not _compat.has_gpu_compiler(), reason="the extra gpu-compiler is not installed; make verify-gpu")
def test_the_compiler_of_h100s_hands_them_on_in_host_memory() -> None:
    """Bytes in host memory that the forward pass leaves are those that were said, in memory space 5, and no executable has more
    on the device than was said.

    A described GPU knows no kinds of memory, so arguments there, which only their sharding tells of, are taken for arrays on the
    device: of the backward pass nothing but that can be read here.
    """
    model = mlp(width=1024, layers=8, examples=8 * 1024)
    cluster = Cluster.preset("p5.48xlarge").part((0, 1))
    step = autopar.parallelize(model.train_step, cluster=cluster, offload="activations", schedule="1f1b", **STAGES)
    subject, plan, _ = step.records(model.abstract_state(), model.abstract_batch())
    account = step.account(subject, plan, cluster)
    whole, cost = account.whole, account.costs[0]
    mesh = device_mesh(plan.stages[0].mesh, target_of(Compiler.H100, cluster).devices)
    compiled = compiled_stage(whole.pipeline, 0, mesh, whole.transfers)
    for one in cost.lowering.slices.executables:
        found = compiled[0, one.part, one.segment]
        memory, text = found.memory_analysis(), found.as_text()
        left = sum(cost.host_bytes[cost.lowering.names[one.results[k].place]] for k in one.hosted.outputs)
        assert (left > 0) is (one.part is Part.FORWARD)
        assert memory.host_output_size_in_bytes == left
        assert text[: text.index("\n")].count("S(5)") == len(one.hosted.outputs)
        assert memory.temp_size_in_bytes <= 1.05 * cost.executables[one.part, one.segment].temp_bytes + 2**20


# ---------------------------------------------------------------------------------------------------------- the choice


def choices(bytes_per_second: float, width: int) -> dict[str, Plan]:
    """Memory is short where all that is no product is made again already: by each means, and as the planner chooses."""
    model, cluster = blocks(width), gpus(bytes_per_second)
    free, least = (
        planned(model, cluster, schedule="1f1b", remat="dots", offload=offload, memory_per_device=1e15, **STAGES)
        for offload in ("none", "activations")
    )
    budget_bytes = (free.peak_bytes + least.peak_bytes) / 2
    options = {"schedule": "1f1b", "memory_per_device": budget_bytes, **STAGES}
    said: dict[str, dict[str, Any]] = {"again": {"offload": "none"}, "there": {"remat": "dots"}, "auto": {}}
    return {name: planned(model, cluster, **options, **more) for name, more in said.items()}


@pytest.mark.verify
def test_it_is_taken_over_a_fast_link_and_declined_over_a_slow_one() -> None:
    """NVLink-C2C takes 22 ps for a number there and back, an A100 2 · width / 117 TFLOP/s to make it again, PCIe 320 ps."""
    fast = choices(0.8 * 450e9, 8192)
    assert fast["auto"].offload is Offload.ACTIVATIONS and fast["auto"].step_seconds < fast["again"].step_seconds
    assert fast["auto"].step_seconds <= fast["there"].step_seconds
    slow = choices(2.5e10, 512)
    assert slow["auto"].offload is Offload.NONE and slow["auto"].remat.is_any
    assert slow["auto"].step_seconds == slow["again"].step_seconds < slow["there"].step_seconds


# -------------------------------------------------------------------------------------------- demands, files and words


def test_demands_that_cannot_be_met() -> None:
    model = mlp(width=64, layers=4, examples=8)
    with pytest.raises(PlanError, match=r"no stages are asked for; say how many, for example stages=2"):
        autopar.parallelize(model.train_step, offload="activations")
    with pytest.raises(PlanError, match=r"does not say how fast .* cluster\.replace\(host_memory_link="):
        planned(model, gpus().replace(host_memory_link=None), offload="activations", **STAGES)
    with pytest.raises(PlanError, match="finds nothing: no stage keeps anything"):
        planned(model, gpus(), offload="activations", stages=2, num_microbatches=1)


@pytest.fixture(scope="module")
def two_stages() -> tuple[autopar.Parallelized, tuple[Any, ...]]:
    """A step that is planned once, and its arguments."""
    model = build("mlp_nnx")
    step = autopar.parallelize(model.train_step, stages=2, num_microbatches=2, cluster=eight_slow_devices())
    return step, (model.abstract_state(), model.abstract_batch())


@pytest.mark.parametrize(
    ("hosted", "message"),
    [
        ([9, 3], r"\$\.plan\.stages\[0\]\.hosted: \[9, 3\] do not ascend"),
        ([-1], r"Expected `int` >= 0 - at `\$\.plan\.stages\[\.\.\.\]\.hosted\[\.\.\.\]`|Expected `int` >= 0"),
        ([0], r"value 0 of a stage in the memory of the host, which that stage does not keep"),
    ],
)
def test_files_that_make_no_sense(
    hosted: list[int], message: str, two_stages: tuple[autopar.Parallelized, tuple[Any, ...]], tmp_path: Path
) -> None:
    step, arguments = two_stages
    step.plan(*arguments).save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    content["plan"]["stages"][0]["hosted"] = hosted
    (tmp_path / "odd.json").write_text(json.dumps(content))

    def use() -> None:
        step.use(Plan.load(tmp_path / "odd.json"))
        step.compile(*arguments)

    with pytest.raises(PlanError, match=message):
        use()


def test_a_plan_of_one_stage_has_no_residuals(tmp_path: Any) -> None:
    plan = planned(mlp(width=64, layers=2, examples=8), gpus(), method="data_parallel")
    stage = replace(plan.stages[0], hosted=(3,))
    with pytest.raises(PlanError, match="a plan of one stage keeps nothing"):
        replace(plan, stages=(stage,)).save(tmp_path / "plan.json")


def test_explanations_say_what_lies_there_and_what_it_costs() -> None:
    model = mlp(width=256, layers=8, examples=8 * 512)
    plan, account = accounted("activations")
    step = autopar.parallelize(
        model.train_step, cluster=gpus(), offload="activations", schedule="1f1b", remat="none", **STAGES
    )
    found = autopar.explain(step, model.abstract_state(), model.abstract_batch())
    first, last = found.stages
    assert (first.num_hosted, first.host_bytes) == (len(plan.stages[0].hosted), plan.prediction.memory.host_bytes)
    assert first.host_seconds == pytest.approx(
        sum(one.host_seconds for one in account.costs[0].executables.values()), rel=1e-9
    )
    assert (last.num_hosted, last.host_bytes, last.host_seconds) == (0, 0, 0.0)
    (note,) = (note for note in found.notes if "memory of the hosts" in note)
    assert re.search(r"\(you asked for it\): of stage 1 \d+ arrays, up to .* copied in .* a microbatch", note)
