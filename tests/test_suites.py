"""The paper's figures as data: are FLOPs counted as the steps do them, do its plans make stages, and can they be priced?"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import msgspec
import pytest

from benchmarks.models import wide_resnet
from benchmarks.suites import half_precision, steps
from benchmarks.suites.machine import calibrated, cluster_of
from benchmarks.suites.picture import picture
from benchmarks.suites.pricing import grids, outcome, state_bytes
from benchmarks.suites.published import CALIBRATION, CELLS, Asked, Cell, Figure, Missing, PlanFound, StageFound, Suite
from benchmarks.suites.ranking import pairs
from benchmarks.suites.report import calibration_text, line_of
from benchmarks.suites.rows import Row, keep, kept, row_of


def test_flops_of_gpt_are_those_of_the_products() -> None:
    """All but the recomputation of the last product of each layer, which its gradient does not need."""
    config = dataclasses.replace(steps.gpt_config("350M"), hidden=64, layers=3, heads=4, sequence=32, vocab_size=96)
    batch = 4
    counted = steps.product_flops(steps.subject_of_model(half_precision.gpt(config, batch)))
    needless = 8 * batch * config.sequence * config.hidden**2 * config.layers
    assert counted == steps.gpt_flops(config, batch) - needless


def test_flops_of_moe_are_those_of_the_products() -> None:
    """Not needed again are the second matrix of a dense layer and the combination of the others; dispatch has no gradient."""
    config = steps.moe_config("380M")
    base = dataclasses.replace(config.base, hidden=64, layers=4, heads=4, sequence=32, vocab_size=96)
    config = dataclasses.replace(config, base=base, group_size=64)
    batch, tokens = 4, 4 * base.sequence
    counted = steps.product_flops(steps.subject_of_model(half_precision.moe(config, batch)))
    dense = 2 * base.mlp_ratio * base.hidden**2
    combination = dispatch = 4 * base.hidden * config.group_size
    assert counted == steps.moe_flops(config, batch) - tokens * (dense + combination + dispatch) * base.layers / 2


def test_resnet_with_rematerialisation_runs_its_blocks_twice() -> None:
    """Of a block all but the last convolutions of its branches; their gradients need what went in."""
    plain = wide_resnet.CONFIGS["toy"]
    counted = [
        steps.product_flops(
            steps.subject_of_model(wide_resnet.model_of("toy", dataclasses.replace(plain, remat=remat)))
        )
        for remat in (False, True)
    ]
    assert 1.15 < counted[1] / counted[0] < 4 / 3


@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: f"{cell.suite}-{cell.num_devices}")
def test_published_plans_use_every_device_once(cell: Cell) -> None:
    assert [device for stage in cell.found.devices for device in stage] == list(range(cell.num_devices))
    assert cluster_of(cell.num_devices).num_devices == cell.num_devices
    assert cell.batch_size % cell.found.num_microbatches == 0


def test_a_faster_device_is_faster_at_all_its_work() -> None:
    slow, fast = cluster_of(16, 0.5).device, cluster_of(16).device
    assert slow.dense_flops_per_second("float16") == fast.dense_flops_per_second("float16") / 2
    assert slow.memory_bytes_per_second == fast.memory_bytes_per_second / 2
    assert slow.memory_bytes == fast.memory_bytes


def test_grids_of_megatron_use_all_devices_and_tensors_stay_in_a_host() -> None:
    found = list(grids(16, 8))
    assert all(math.prod(grid) == 16 for grid in found)
    assert max(tensor for _, tensor, _ in found) == 8
    assert len(set(found)) == len(found) == 14


SPARSE = Cell(Suite.MOE, 4, "toy", 16, PlanFound((StageFound((4, 1), 2),), 1), CELLS[Suite.MOE, 4].measured)


@pytest.mark.verify
def test_deepspeed_keeps_each_expert_on_one_device_and_trains_with_adam() -> None:
    found = outcome(SPARSE, Asked.DEEPSPEED, cluster_of(4))
    assert found.plan is not None and row_of(found).published == 0.12
    layouts = dict(zip(found.plan.in_paths, found.plan.in_layouts, strict=True))
    experts = {path: layout for path, layout in layouts.items() if "'moe'" in path and "router" not in path}
    moments = [path for path in experts if ".mu" in path]
    assert moments and all(str(layout.dims[0]) == "('data',)" for layout in experts.values())
    assert outcome(TOY, Asked.DEEPSPEED, cluster_of(4)).refusal.startswith("experts are asked for")


TOY = Cell(
    Suite.WIDE_RESNET,
    4,
    "toy",
    16,
    PlanFound((StageFound((2, 1), 1), StageFound((1, 2), 1)), 4),
    CELLS[Suite.GPT, 4].measured,
)


def test_a_published_plan_is_priced_with_its_stages_meshes_and_microbatches() -> None:
    found = outcome(TOY, Asked.PUBLISHED, cluster_of(4))
    assert found.plan is not None and found.petaflops is not None
    assert [stage.devices for stage in found.plan.stages] == [(0, 1), (2, 3)]
    assert found.plan.num_microbatches == 4
    row = row_of(found)
    assert row.ratio == found.petaflops / 0.21
    model, devices, asked, plan, *_ = line_of(row)
    assert (model, devices, asked) == ("Wide-ResNet toy", "4", "published")
    assert plan == "2 stages on 2, 4 microbatches, 1f1b"
    drawn = picture([row])
    assert "Wide-ResNet" in drawn and drawn.count("<rect") == 3


@pytest.mark.parametrize("kind", list(Asked))
def test_every_kind_of_plan_is_drawn(kind: Asked) -> None:
    assert picture([measured(kind, 0.2, 0.2)]).count("<rect") >= 3


def measured(asked: Asked, petaflops: float | None, published: Figure) -> Row:
    """A row of a cell."""
    return Row(Suite.GPT, "toy", 4, asked, "one mesh", petaflops, 1 << 30, 1.0, published)


def test_rows_are_kept_and_put_together(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert kept(path) == []
    rows = [measured(Asked.INTRA_OP, 0.1, Missing.NOT_SHOWN), measured(Asked.AUTO, None, 0.2)]
    for row in (*rows, better := msgspec.structs.replace(rows[0], petaflops=0.3)):
        keep(row, path)
    assert kept(path) == [rows[1], better]
    path.write_text('{"suite": "gpt"}')
    with pytest.raises(msgspec.ValidationError):
        kept(path)


def test_only_what_was_measured_apart_has_an_order() -> None:
    alpa, rival = measured(Asked.PUBLISHED, 0.30, 0.21), measured(Asked.MEGATRON, 0.20, 0.17)
    alone, close = measured(Asked.INTER_OP, None, Missing.OUT_OF_MEMORY), measured(Asked.INTRA_OP, 0.31, 0.20)
    unknown, own = measured(Asked.PP_DP, 0.4, Missing.NOT_SHOWN), measured(Asked.AUTO, 0.5, 0.21)
    found = pairs([alpa, rival, alone, close, unknown, own])
    in_order = [(pair.faster.asked, pair.slower.asked) for pair in found]
    assert in_order == [
        (Asked.PUBLISHED, Asked.MEGATRON),
        (Asked.PUBLISHED, Asked.INTER_OP),
        (Asked.MEGATRON, Asked.INTER_OP),
        (Asked.INTRA_OP, Asked.MEGATRON),
        (Asked.INTRA_OP, Asked.INTER_OP),
    ]
    assert all(pair.is_kept for pair in found)
    turned = pairs([msgspec.structs.replace(alpa, petaflops=0.1), rival])
    assert [pair.is_kept for pair in turned] == [False]


@pytest.mark.verify
def test_what_does_not_fit_is_told_with_what_it_needs() -> None:
    cluster = cluster_of(4)
    small = cluster.replace(device=dataclasses.replace(cluster.device, memory_bytes=1 << 14))
    found = outcome(TOY, Asked.PUBLISHED, small)
    assert found.plan is None and found.refusal == "OOM" and found.needed_bytes > 1 << 14
    row = row_of(found)
    assert row.ratio is None and "OOM" in picture([row])


@pytest.mark.verify
def test_one_measured_step_takes_as_long_as_it_took() -> None:
    found = calibrated()
    assert math.isclose(found.seconds, CALIBRATION.seconds, rel_tol=2e-3)
    assert 0.5 < found.speed < 1 and found.preset_seconds < found.seconds
    assert f"{found.speed:.3f}" in calibration_text(found)


@pytest.mark.verify
def test_grids_whose_state_has_no_room_are_not_planned() -> None:
    """The state is whole along data: on one stage without tensor parallelism every device holds all of it."""
    cluster = cluster_of(4)
    step = steps.step_of(TOY)
    held = state_bytes(step)
    small = cluster.replace(device=dataclasses.replace(cluster.device, memory_bytes=held // 5))
    asked: list[str] = []
    found = outcome(TOY, Asked.PP_DP, small, asked.append)
    assert found.plan is None and found.refusal == "OOM" and found.needed_bytes == held / 4  # on four stages
    assert asked == []
    assert outcome(TOY, Asked.PP_DP, cluster).plan is not None
