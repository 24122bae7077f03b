"""The whole planner against a referee that tries every plan of small steps: stages, layers that compute again, hosts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import autopar
from autopar.errors import BudgetError
from autopar.plan import Offload
from tests.pipeline_enumerator import Case
from tests.plan_enumerator import Referred, best_plan, plan_cases

WORST = 1.01
ALIKE = 1e-6

CASES = {case.name: case for case in plan_cases()}
AGAIN, THERE = "computed again", "on hosts"
DEFAULT = (AGAIN,)


def planned(case: Case) -> autopar.Plan:
    """What the planner finds, offered the microbatches and the memory of the case."""
    model, counts = case.model(), case.microbatches
    step = autopar.parallelize(
        model.train_step,
        cluster=case.cluster,
        num_microbatches=counts[0] if len(counts) == 1 else None,
        memory_per_device=None if case.budget_bytes == float("inf") else case.budget_bytes,
    )
    return step.plan(model.abstract_state(), model.abstract_batch())


@cache
def referee(name: str) -> Referred:
    return best_plan(CASES[name])


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in DEFAULT else [pytest.mark.verify]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in CASES])
def test_the_planner_finds_what_the_referee_finds(name: str) -> None:
    """All that the planner may choose is tried by the referee, so it is not beaten."""
    case, best = CASES[name], referee(name)
    plan = planned(case)
    assert plan.peak_bytes <= case.budget_bytes
    assert plan.step_seconds <= WORST * best.step_seconds, f"{plan.step_seconds} s instead of {best}"
    assert plan.step_seconds >= (1 - ALIKE) * best.step_seconds, str(best)


@pytest.mark.verify
def test_each_remedy_is_taken_where_it_pays_and_only_there() -> None:
    ample, again, there = (planned(CASES[name]) for name in ("ample", AGAIN, THERE))
    assert all(plan.is_pipeline for plan in (ample, again, there))
    assert not ample.remat.is_any and ample.offload is Offload.NONE
    assert again.remat.is_any and again.offload is Offload.NONE
    assert not there.remat.is_any and there.offload is Offload.ACTIVATIONS
    assert planned(replace(CASES[AGAIN], budget_bytes=float("inf"))).step_seconds == ample.step_seconds


@pytest.mark.verify
def test_where_no_plan_keeps_the_budget_none_is_found() -> None:
    case = replace(CASES[AGAIN], budget_bytes=150_000)
    with pytest.raises(ValueError, match="none of 54 plans"):
        best_plan(case)
    with pytest.raises(BudgetError):
        planned(case)
