"""The explanation of a pipeline: its rows against the plan, the simulated step and the step's own shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.cluster import Cluster, Link
from autopar.explain.pipeline import PipelineExplanation, Span, TimelineRow, Work
from autopar.explain.pipeline_view import timeline_cells
from autopar.explain.stages import module_path
from tests.test_pipeline import BATCH, LAYERS, WIDTH, after_two, examples, make_state, train_step
from tests.toy_runs import eight_slow_devices

COUNT = 4


def two_hosts() -> Cluster:
    return eight_slow_devices().replace(
        name="two hosts", hosts=2, devices_per_host=4, network_link=Link(1e-3, 1e6, shared_by=4)
    )


@pytest.fixture(scope="module")
def step() -> Any:
    return autopar.parallelize(train_step, cluster=two_hosts(), stages=2, schedule="1f1b", num_microbatches=COUNT)


@pytest.fixture(scope="module")
def explained(step: Any) -> PipelineExplanation:
    found = autopar.explain(step, jax.eval_shape(make_state), examples())
    assert isinstance(found, PipelineExplanation)
    return found


def test_totals_are_those_of_the_plan(explained: PipelineExplanation, step: Any) -> None:
    plan = step.plan(jax.eval_shape(make_state), examples())
    assert explained.step_seconds == plan.step_seconds
    assert explained.bytes_per_device == plan.peak_bytes
    assert [row.devices for row in explained.stages] == [stage.devices for stage in plan.stages]
    assert (explained.schedule, explained.num_microbatches) == ("1f1b", COUNT)
    assert explained.microbatch_size == BATCH // COUNT
    assert explained.bubble_fraction == 1 / (COUNT + 1)


def test_seconds_of_a_stage_sum_to_its_busy_time(explained: PipelineExplanation) -> None:
    for row in explained.stages:
        passes = COUNT * (row.forward_seconds + row.backward_seconds)
        total = passes + row.before_seconds + row.update_seconds
        assert row.forward_seconds > 0 and row.backward_seconds > 0 and row.update_seconds > 0
        assert total == pytest.approx(row.busy_fraction * explained.step_seconds)


def test_stages_share_the_forward_pass(explained: PipelineExplanation, step: Any) -> None:
    plan = step.plan(jax.eval_shape(make_state), examples())
    assert explained.stages[0].num_operators == plan.cuts[0]
    for row in explained.stages:
        assert row.first.startswith("test_pipeline.py:") and row.last.startswith("test_pipeline.py:")


def test_timeline_holds_every_pass_once_and_never_two_at_a_time(explained: PipelineExplanation) -> None:
    for row in explained.timeline:
        for work in (Work.FORWARD, Work.BACKWARD):
            assert [span.microbatch for span in row.spans if span.work is work] == list(range(1, COUNT + 1))
        for before, after in zip(row.spans, row.spans[1:], strict=False):
            assert before.end_seconds <= after.start_seconds * (1 + 1e-12)
        assert row.spans[-1].end_seconds <= explained.step_seconds * (1 + 1e-12)


def test_what_crosses_is_an_activation_and_its_cotangent(explained: PipelineExplanation) -> None:
    each = BATCH // COUNT * WIDTH * 4
    there, back = explained.passages
    assert [(row.source, row.target) for row in (there, back)] == [(1, 2), (2, 1)]
    for row in (there, back):
        assert row.link == "network between hosts"
        largest = row.sent[0]
        assert largest.per_microbatch and largest.size_bytes == each
        assert largest.source.startswith("test_pipeline.py:")
        micro = sum(one.size_bytes for one in row.sent if one.per_microbatch)
        once = sum(one.size_bytes for one in row.sent if not one.per_microbatch)
        assert row.bytes_per_microbatch == micro and row.bytes_per_step == COUNT * micro + once
        assert row.link_bytes >= COUNT * each
        assert row.seconds_per_microbatch >= 1e-3 + each / 4e6  # α, and β through the four ports of a host


def test_leaves_know_their_stage(explained: PipelineExplanation) -> None:
    owners = {leaf.path: leaf.stages for leaf in explained.leaves}
    for kind in ("kernel", "bias"):
        assert owners[f"state['params']['layer0']['{kind}']"] == (1,)
        assert owners[f"state['params']['layer{LAYERS - 1}']['{kind}']"] == (2,)
    assert owners["batch['x']"] == (1,) and owners["batch['y']"] == (2,)
    assert owners["batch['mask']"] == ()  # nothing reads it
    of_state = {row.paths: row.stages for row in explained.parameters}
    assert set(of_state.values()) == {(1,), (2,)}


def test_the_best_plan_of_one_stage_is_the_alternative(explained: PipelineExplanation, step: Any) -> None:
    free = autopar.parallelize(train_step, cluster=two_hosts())
    plan = free.plan(jax.eval_shape(make_state), examples(), method="intra_op")
    ((what, seconds),) = explained.alternatives
    assert seconds == plan.step_seconds and what.startswith("the best plan without a pipeline")
    assert {row.name for row in explained.methods} == {"data_parallel", "zero2", "zero3", "tensor_parallel"}
    assert all(" | " not in row.mesh for row in explained.methods)


def test_it_is_compared_with_plans_of_one_mesh(explained: PipelineExplanation) -> None:
    assert explained.diff(explained).is_empty
    zero3 = autopar.parallelize(train_step, cluster=two_hosts(), method="zero3")
    single = autopar.explain(zero3, jax.eval_shape(make_state), examples())
    there, back = explained.diff(single), single.diff(explained)
    assert [(row.what, row.first, row.second) for row in there.seconds] == [
        ("step", explained.step_seconds, single.time.step_seconds)
    ]
    assert [row.difference for row in back.bytes] == [-row.difference for row in there.bytes]
    assert any(row.first_use.endswith("on stage 2") and "stage" not in row.second_use for row in there.layouts)
    assert " | " in str(there)


def test_text_and_html(explained: PipelineExplanation) -> None:
    text = str(explained)
    assert "2 stages, 1f1b over 4 microbatches" in text
    rows = [line for line in text.splitlines() if line.startswith("stage ")]
    assert len(rows) == 2 and all(len(line.split("│")[1]) == 80 for line in rows)
    for digit in "1234":
        assert all(digit in line.split("│")[1] for line in rows)
    assert "₁" in rows[0] and "₄" in rows[1] and "·" in rows[0]
    assert "state/params/layer0/kernel" in text or "state/params/layer0..1/kernel" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "₁" in explained._repr_html_()


def test_a_column_shows_what_fills_most_of_it() -> None:
    spans = (
        Span(Work.ONCE, 1, 0, 0.0, 1.0),
        Span(Work.FORWARD, 1, 1, 1.0, 2.4),
        Span(Work.FORWARD, 1, 12, 2.4, 4.0),
        Span(Work.BACKWARD, 1, 12, 4.3, 6.0),
    )
    cells = timeline_cells(TimelineRow((1,), spans), 8.0, width=8)
    assert "".join(character for character, _ in cells) == "■122₂₂··"
    assert cells[4][1] is Work.BACKWARD and cells[6][1] is None


@pytest.mark.parametrize(
    ("names", "path"),
    [
        ("transpose(jvp(GPT))/layer0/norm1", "GPT/layer0/norm1"),
        ("jvp()", ""),
        ("vmap(jvp(Net))/checkpoint/dense", "Net/checkpoint/dense"),
        ("", ""),
    ],
)
def test_module_paths_leave_transformations_out(names: str, path: str) -> None:
    assert module_path(names) == path


@pytest.mark.verify
def test_a_plan_from_a_file_is_explained_after_a_run(explained: PipelineExplanation, step: Any, tmp_path: Path) -> None:
    step.plan(jax.eval_shape(make_state), examples()).save(tmp_path / "plan.json")
    other = autopar.parallelize(train_step, cluster=two_hosts())
    other.use(autopar.Plan.load(tmp_path / "plan.json"))
    after_two(other, make_state())
    ran = autopar.explain(other)
    assert isinstance(ran, PipelineExplanation)
    assert ran.measured_steps == 2 and ran.measured_seconds == np.median(other.last.step_seconds)
    assert "measured" in str(ran) and explained.measured_seconds is None
    assert (ran.stages, ran.passages, ran.timeline) == (explained.stages, explained.passages, explained.timeline)
    assert (ran.leaves, ran.alternatives) == (explained.leaves, explained.alternatives)
