"""Does the benchmark of predictions count what it says?"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ranking import ModelRanked, Ranked, Results, Timed, over_hand_made, together, verdict


def rows(*told: tuple[str, float, float]) -> list[Ranked]:
    return [Ranked(name, foretold, foretold, clock) for name, foretold, clock in told]


def test_the_planners_choice_is_the_one_that_it_foretells_to_be_fastest() -> None:
    found = rows(("auto 8", 1.0, 3.0), ("auto 2×4", 2.0, 1.0), ("zero2 8", 4.0, 2.0), ("zero3 8", 0.5, 2.5))
    assert over_hand_made(found) == 1.5


@pytest.mark.parametrize("names", [("auto 8",), ("zero2 8", "zero3 8"), ()])
def test_without_plans_of_both_kinds_there_is_no_ratio(names: tuple[str, ...]) -> None:
    assert over_hand_made(rows(*((name, 1.0, 1.0) for name in names))) is None


def test_pairs_that_the_clock_does_not_part_are_left_out_and_ties_count_for_nothing() -> None:
    clock = [1.0, 1.04, 2.0, 3.0]
    found = verdict([2.0, 1.0, 3.0, 3.0], clock)
    assert (found.pairs, found.regret) == (5, 1.04)
    assert found.tau == pytest.approx(4 / 5)


def test_of_plans_that_are_foretold_to_be_as_fast_the_slowest_is_taken() -> None:
    foretold, clock = [1.0, 1.0, 2.0], [1.0, 1.5, 1.25]
    assert verdict(foretold, clock).regret == 1.5
    assert over_hand_made(rows(("auto 8", 1.0, 1.0), ("auto 2×4", 1.0, 1.5), ("zero2 8", 2.0, 1.25))) == 1.2


def test_rounds_of_all_processes_count_alike() -> None:
    first = [Timed("slow", 1.0, 2.0, (3.0, 3.0)), Timed("fast", 3.0, 4.0, (1.0, 1.0))]
    second = [Timed("slow", 1.0, 2.0, (6.0,)), Timed("fast", 3.0, 4.0, (2.0,))]
    assert together([first, second]) == [Ranked("fast", 3.0, 4.0, 1.0), Ranked("slow", 1.0, 2.0, 3.0)]


def test_models_that_a_file_remembers_are_known(tmp_path: Path) -> None:
    path = tmp_path / "ranking.jsonl"
    one, other = (ModelRanked(name, "bench", rows(("auto 8", 1.0, 3.0))) for name in ("gpt", "moe"))
    Results(path).add(one)
    Results(path).add(other)
    assert Results(path).known == {("gpt", "bench"): one.plans, ("moe", "bench"): other.plans}
    assert not Results(None).known
