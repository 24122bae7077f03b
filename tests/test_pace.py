"""When does a step count as hanging?"""

from __future__ import annotations

from autopar.runtime.pace import FIRST_STEP_SECONDS, HANGING_SECONDS, HANGING_SHARE, RECENT_STEPS, Pace


def test_a_first_step_is_no_measure() -> None:
    pace = Pace()
    assert pace.limit_seconds == FIRST_STEP_SECONDS
    pace.took(7, 100.0)
    assert pace.limit_seconds == FIRST_STEP_SECONDS
    pace.took(8, 0.01)
    assert pace.limit_seconds == HANGING_SECONDS


def test_the_slowest_process_of_the_slowest_step_counts_until_it_is_long_ago() -> None:
    pace = Pace()
    for process in (0.1, 0.2):
        pace.took(0, process)
    for step, seconds in enumerate([2.0, 5.0, 4.0], 1):
        pace.took(step, seconds)
        pace.took(step, 0.5)
    assert pace.limit_seconds == HANGING_SHARE * 5.0
    for step in range(4, 2 + RECENT_STEPS):
        pace.took(step, 3.0)
    assert pace.limit_seconds == HANGING_SHARE * 5.0
    pace.took(2 + RECENT_STEPS, 3.0)
    assert pace.limit_seconds == HANGING_SHARE * 4.0


def test_what_is_connected_anew_has_a_first_step_again() -> None:
    pace = Pace()
    for step in range(3):
        pace.took(step, 9.0)
    pace.start_over()
    assert pace.limit_seconds == FIRST_STEP_SECONDS
