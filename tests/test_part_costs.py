"""Are numbers of devices left out only where stages that have so many are no use?"""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.inter_op.part_costs import FAR, Efficiency

DEVICES, LAYERS, COUNT = 16, 16, 64
SIZES = (1, 2, 4, 8)


def seconds_of_pipelines(seconds: dict[int, float], sizes: tuple[int, ...]) -> float:
    """Stages of these sizes with the shares that make them equally long: nothing is faster, bubbles left out."""
    return 1 / sum(1 / seconds[size] for size in sizes)


def pipelines_with(size: int) -> list[tuple[int, ...]]:
    """All sets of stages that take all devices, one of that size among them."""
    found = []
    for rest in range(DEVICES - size + 1):
        for others in itertools.combinations_with_replacement(SIZES, rest):
            if sum(others) == DEVICES - size:
                found.append((size, *others))
    return found


@given(st.lists(st.floats(1.0, 1.5), min_size=len(SIZES), max_size=len(SIZES)))
def test_no_pipeline_that_is_left_out_is_nearly_as_fast_as_the_best_of_even_stages(losses: list[float]) -> None:
    seconds = {}
    known = Efficiency(DEVICES, LAYERS, COUNT)
    loss = 1.0
    for size, more in zip(SIZES, losses, strict=True):
        loss *= more
        seconds[size] = 100 * loss / size
        if seconds[size] >= known.far_seconds(size):
            even = [one for one in SIZES if one < size and DEVICES // one <= LAYERS]
            bubble = {one: 1 + (DEVICES / one - 1) / COUNT for one in even}
            best = min(seconds_of_pipelines(seconds, (one,) * (DEVICES // one)) * bubble[one] for one in even)
            slow = [stages for stages in pipelines_with(size) if all(one in seconds for one in stages)]
            assert min(seconds_of_pipelines(seconds, stages) for stages in slow) >= FAR * best * (1 - 1e-9)
        known.add(size, seconds[size], fits=True)


def test_nothing_is_far_as_long_as_no_stages_fit() -> None:
    known = Efficiency(DEVICES, LAYERS, COUNT)
    known.add(1, 100.0, fits=False)
    assert known.far_seconds(8) == math.inf


def test_more_stages_than_layers_are_no_pipeline() -> None:
    known = Efficiency(DEVICES, LAYERS // 2, COUNT)
    known.add(1, 100.0, fits=True)
    assert known.far_seconds(8) == math.inf
    known.add(2, 50.0, fits=True)
    assert known.far_seconds(8) == pytest.approx(1 / (1 / (FAR * 50 / 8 * (1 + 7 / COUNT)) - 8 / 100))
