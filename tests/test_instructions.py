"""The verifier of instruction lists accepts a right list and names every kind of broken one."""

from __future__ import annotations

import pytest

from autopar.errors import InternalError, ScheduleError
from autopar.schedule.instructions import (
    Free,
    Instruction,
    Part,
    Receive,
    Run,
    Send,
    Slot,
    Task,
    verify_lists,
    verify_meetings,
)

PARAMETERS = Slot(0, 0)
ACTIVATION, RESULT, LOSS = Slot(0, 1, 0), Slot(1, 0, 0), Slot(1, 1, 0)
FORWARD_0, FORWARD_1 = Task(Part.FORWARD, 0, 0), Task(Part.FORWARD, 1, 0)
GIVEN = {PARAMETERS}

FIRST: list[Instruction] = [
    Run(FORWARD_0, (PARAMETERS,), (ACTIVATION,)),
    Send(0, 0, ACTIVATION),
    Free((ACTIVATION,)),
]
SECOND: list[Instruction] = [Receive(0, 0, RESULT), Run(FORWARD_1, (RESULT,), (LOSS,), (0,))]


def test_right_lists_pass() -> None:
    verify_lists([FIRST, SECOND], GIVEN, {PARAMETERS, LOSS})
    verify_meetings([FIRST, SECOND])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (FIRST[1:], SECOND, "nothing has written on this mesh"),
        ([FIRST[0], FIRST[2], FIRST[1]], SECOND, "freed or donated before"),
        (FIRST, [*SECOND, Free((RESULT,))], "freed or donated before"),
        (FIRST, [*SECOND, Run(Task(Part.AFTER, 1), (), (LOSS,))], "a second time; a slot is written once"),
        ([*FIRST, Run(Task(Part.BACKWARD, 0, 0), (), (PARAMETERS,))], SECOND, "a second time; a slot is written once"),
        ([*FIRST, Run(FORWARD_0, (PARAMETERS,), ())], SECOND, "runs a second time"),
        (FIRST, [*SECOND, Run(Task(Part.AFTER, 1), (LOSS,), (), (1,))], r"donates inputs \(1,\) of 1"),
        (FIRST, [*SECOND, Run(Task(Part.AFTER, 1), (LOSS, LOSS), (), (0,))], "at two positions"),
        (FIRST, [*SECOND, Run(Task(Part.AFTER, 0), (LOSS,), ())], "stage 0, which is on mesh 0"),
        ([*FIRST[:2], FIRST[1], FIRST[2]], SECOND, "there a second time"),
        (FIRST, [*SECOND, Receive(1, 0, Slot(1, 9, 0))], "transfer 1, microbatch 0 is received but never sent"),
        ([FIRST[0], FIRST[2]], SECOND, "transfer 0, microbatch 0 is received but never sent"),
        (FIRST, [], "transfer 0, microbatch 0 is sent but never received"),
        ([*FIRST[:2], Receive(0, 0, Slot(0, 7, 0))], [], "leaves from and arrives on mesh 0"),
        (
            [*FIRST, Receive(0, 1, Slot(0, 9, 1))],
            [*SECOND, Send(0, 1, LOSS)],
            r"joins meshes \(1, 0\), other messages of it \(0, 1\)",
        ),
    ],
)
def test_a_broken_list_is_named(first: list[Instruction], second: list[Instruction], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        verify_lists([first, second], GIVEN)


def test_what_is_left_is_checked() -> None:
    with pytest.raises(InternalError, match="slot 1 of stage 1, microbatch 0 is left in memory"):
        verify_lists([FIRST, SECOND], GIVEN, {PARAMETERS})
    with pytest.raises(InternalError, match="slot 1 of stage 0, microbatch 0 is gone"):
        verify_lists([FIRST, SECOND], GIVEN, {PARAMETERS, LOSS, ACTIVATION})
    with pytest.raises(InternalError, match="no instruction speaks of its stage"):
        verify_lists([FIRST, SECOND], {*GIVEN, Slot(5, 0)})


def test_two_sends_that_face_each_other_never_meet() -> None:
    there, back = Slot(0, 0), Slot(1, 0)
    first: list[Instruction] = [Send(0, -1, there), Receive(1, -1, Slot(0, 1))]
    second: list[Instruction] = [Send(1, -1, back), Receive(0, -1, Slot(1, 1))]
    verify_lists([first, second], {there, back})
    with pytest.raises(ScheduleError, match=r"mesh 0 waits to send transfer 0 .*; mesh 1 waits to send transfer 1"):
        verify_meetings([first, second])
    verify_meetings([first, second[::-1]])
