"""Is the number of microbatches found that trying all of them finds, and are plans that cannot fit left alone rightly?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import BudgetError
from autopar.intra_op import search as intra_op
from autopar.intra_op.held import least_bytes, memory_rows
from autopar.intra_op.on_mesh import Ground
from autopar.intra_op.task import TooSlow
from autopar.microbatch_search import FEW, MANY, MicrobatchSearch, OneMesh
from autopar.step_planner import StepPlanner
from autopar.subjects import Demands
from tests.test_rescaled import subject
from tests.toy_runs import eight_slow_devices

COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Seconds:
    """In place of a step, its plan and the planner's records."""

    num_microbatches: int
    step_seconds: float
    is_squeezed: bool
    coupling: str = ""


@dataclass
class Listed:
    """Plans as a list says, by number of microbatches and whether meshes have many axes: more microbatches need less memory."""

    free_seconds: Mapping[tuple[int, bool], float]
    needed_bytes: Mapping[int, float]
    budget_bytes: float
    is_wide: bool
    asked: list[tuple[int, bool]] = field(default_factory=list)

    def may_fit(self, count: int) -> bool:
        return self.needed_bytes[count] <= 4 * self.budget_bytes

    def seconds(self, count: int, *, many: bool) -> float:
        """Of the fastest plan; what lacks room up to half as much again is found at a price."""
        lack = self.needed_bytes[count] / self.budget_bytes
        return self.free_seconds[count, many] * (1.0 if lack <= 1 else lack if lack <= 1.5 else math.inf)

    def plan_below(self, count: int, seconds: float, axes: range) -> OneMesh | TooSlow:
        kinds = [many for many in (False, True) if set(axes) & set(MANY if many else FEW)]
        self.asked += [(count, many) for many in kinds]
        if min(self.free_seconds[count, many] for many in kinds) >= seconds:
            return TooSlow.REGARDLESS
        found = min(self.seconds(count, many=many) for many in kinds)
        if math.isinf(found) and math.isinf(seconds):
            raise BudgetError("no room", needed_bytes=self.needed_bytes[count])
        if found >= seconds:
            return TooSlow.WITHIN_BUDGET
        one = Seconds(count, found, self.needed_bytes[count] > self.budget_bytes)
        return cast(OneMesh, (one, one, one))

    def bound_seconds(self, count: int, known: OneMesh, enough: float) -> float:
        return min(self.free_seconds[count, many] for many in (False, True))


@st.composite
def lists(draw: st.DrawFn, *, is_wide: bool) -> Listed:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rising = 1 + np.cumsum(0.1 * rng.random(len(COUNTS)))
    falling = np.exp2(-np.cumsum(rng.random(len(COUNTS)))) * 2 ** draw(st.floats(0, 4))
    gain = draw(st.sampled_from([0.9, 1.0, 1.1]))
    free = {(count, False): float(one) for count, one in zip(COUNTS, rising, strict=True)}
    free |= {(count, True): float(one * gain) for count, one in zip(COUNTS, rising, strict=True)}
    return Listed(free, dict(zip(COUNTS, map(float, falling), strict=True)), 1.0, is_wide)


@given(lists(is_wide=False))
def test_no_other_number_is_faster(planner: Listed) -> None:
    best = min(planner.seconds(count, many=many) for count, many in itertools.product(COUNTS, (False, True)))
    search = MicrobatchSearch(planner)
    search.upwards(COUNTS)
    if math.isinf(best):
        with pytest.raises(BudgetError, match="no room"):
            search.result()
        return
    found = search.result()[1].step_seconds
    # What fits as it is ends the search, for more microbatches then cost more.
    fitting = next((count for count in COUNTS if planner.needed_bytes[count] <= 1), COUNTS[-1])
    asked = [count for count in COUNTS if count <= fitting]
    assert found == min(planner.seconds(count, many=many) for count, many in itertools.product(asked, (False, True)))


@given(lists(is_wide=True))
def test_meshes_of_many_axes_are_asked_for_in_one_number_where_others_fit(planner: Listed) -> None:
    few = [planner.seconds(count, many=False) for count in COUNTS]
    search = MicrobatchSearch(planner)
    search.upwards(COUNTS)
    many = {count for count, is_many in planner.asked if is_many}
    if not math.isinf(min(few)):
        at = COUNTS[few.index(min(few))]
        assert many == {at}
        assert search.result()[1].step_seconds == min(*few, planner.seconds(at, many=True))


@given(lists(is_wide=False), st.floats(0.9, 1.6))
def test_below_what_is_wanted_nothing_is_missed(planner: Listed, below: float) -> None:
    best = min(planner.seconds(count, many=False) for count in COUNTS)
    search = MicrobatchSearch(planner, below)
    search.upwards(COUNTS)
    assert (search.best is not None) or best >= below
    if search.best is not None:
        assert search.best[1].step_seconds < below


def test_where_nothing_fits_by_far_a_plan_says_what_is_short() -> None:
    free = {(count, many): 1.0 for count in COUNTS for many in (False, True)}
    planner = Listed(free, dict.fromkeys(COUNTS, 100.0), 1.0, is_wide=False)
    search = MicrobatchSearch(planner)
    search.upwards(COUNTS)
    assert not planner.asked
    with pytest.raises(BudgetError, match="no room"):
        search.result()
    assert {count for count, _ in planner.asked} == {COUNTS[-1]}


def test_no_plan_holds_less_than_the_least() -> None:
    """By the rows, whatever is chosen; and some choice of homes holds no more."""
    planner = StepPlanner(subject(), eight_slow_devices(), Demands(), lambda message: None)
    task = planner._task(planner.subject)
    ground = Ground(task.graph, task.state_pairs)
    rng = np.random.default_rng(0)
    for mesh in task.meshes:
        one, moments = ground.on(task, mesh), ground.moments(task.donated)
        least = least_bytes(ground.problem, mesh, {}, moments)
        rows = memory_rows(ground.problem, one.quotient, one.choices, moments, task.budget_bytes)
        for _ in range(50):
            options = [int(rng.integers(len(costs))) for costs in one.model.nodes]
            assert max(row.used(options) for row in rows) >= least - 1e-6
        homes = [sum(float(held.min()) for held in row.nodes.values()) for row in rows]
        np.testing.assert_allclose(max(homes), least)


def test_what_may_fit_is_solved_and_what_cannot_is_not() -> None:
    planner = StepPlanner(subject(), eight_slow_devices(), Demands(), lambda message: None)
    task = planner._task(planner.subject)
    ground = Ground(task.graph, task.state_pairs)
    least = min(least_bytes(ground.problem, mesh, {}, ground.moments(task.donated)) for mesh in task.meshes)
    for share, may in ((1.01, True), (0.99, False), (math.inf, True)):
        limited: Any = replace(task, budget_bytes=share * least / intra_op.FAR_OVER)
        assert intra_op.may_fit(limited, ground) is may
