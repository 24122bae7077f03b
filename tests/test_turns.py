"""Clocks of steps that take turns: what drifts hits all alike."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable

import pytest

from benchmarks.turns import clocks


def test_drift_from_round_to_round_does_not_part_equal_steps() -> None:
    """Seconds are a plan's own times what the machine takes for all in that round."""
    own = {"fast": 1.0, "equal": 1.0, "slow": 1.06}
    drift = [1.0, 1.3, 0.8, 1.1, 2.0, 0.9]
    found = clocks({name: [one * of_all for of_all in drift] for name, one in own.items()})
    assert found["equal"] == found["fast"]
    assert found["slow"] / found["fast"] == pytest.approx(1.06)


def test_the_level_is_that_of_the_usual_round() -> None:
    found = clocks({"one": [2.0, 2.0, 9.0], "other": [2.0, 2.0, 9.0]})
    assert found == {"one": 2.0, "other": 2.0}


def test_clocks_are_nearer_to_the_truth_than_medians_of_each_plans_own_seconds() -> None:
    """Nine equal plans, seconds that vary by 7% about their round's and rounds by 8%, as measured; two hundred draws."""
    draw, names = random.Random(0), [str(number) for number in range(9)]
    apart: dict[str, list[float]] = {"clocks": [], "medians": []}
    for _ in range(200):
        rounds = [draw.lognormvariate(0, 0.08) for _ in range(27)]
        seconds = {name: [one * draw.lognormvariate(0, 0.07) for one in rounds] for name in names}
        apart["clocks"].append(_spread(clocks(seconds).values()))
        apart["medians"].append(_spread(statistics.median(times) for times in seconds.values()))
    assert statistics.mean(apart["clocks"]) < 0.8 * statistics.mean(apart["medians"])


def _spread(clocks: Iterable[float]) -> float:
    return statistics.stdev(math.log(one) for one in clocks)


def test_plans_run_as_many_rounds() -> None:
    with pytest.raises(ValueError, match="zip"):
        clocks({"one": [1.0], "other": [1.0, 2.0]})
