"""In which order does one mesh dispatch what its list says?"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from autopar.runtime.interpreter import Interpreter
from autopar.runtime.transport import Message
from autopar.schedule.instructions import ONCE, Free, Part, Receive, Run, Slot, Task


class AtOnce:
    """A transport whose messages are arrays from the start, as those of the pulls between processes are."""

    def send(self, message: Message, array: jax.Array) -> None:
        raise AssertionError("nothing is sent here")

    def receive(self, message: Message) -> jax.Array:
        return jnp.float32(message.transfer)


def test_what_comes_is_finished_no_sooner_than_it_is_read() -> None:
    """A program that waits for a message would hold up those that are dispatched after it and need none."""
    said: list[str] = []

    def ready(inputs: Sequence[jax.Array]) -> list[jax.Array]:
        said.append("run what needs no message")
        return list(inputs)

    def waiting(inputs: Sequence[jax.Array]) -> list[jax.Array]:
        said.append("run what needs one")
        return [inputs[0] + inputs[1]]

    def finish(array: jax.Array) -> jax.Array:
        said.append(f"finish {array:g}")
        return array * 10

    here, first, second, unread, sum_of_both = (Slot(0, number) for number in range(5))
    rows = [
        Receive(1, ONCE, first),
        Receive(2, ONCE, second),
        Receive(3, ONCE, unread),
        Run(Task(Part.FORWARD, 0), (here,), (here,), (0,)),
        Run(Task(Part.BACKWARD, 0), (first, here), (sum_of_both,)),
        Free((unread,)),
    ]
    executables = {(0, Part.FORWARD, 0): ready, (0, Part.BACKWARD, 0): waiting}
    interpreter = Interpreter(executables, AtOnce(), dict.fromkeys((1, 2, 3), finish))
    left = interpreter.run(rows, {here: jnp.float32(0.5)})
    assert said == ["run what needs no message", "finish 1", "run what needs one", "finish 2"]
    assert {slot: float(array) for slot, array in left.items()} == {
        here: 0.5,
        first: 10.0,
        second: 20.0,
        sum_of_both: 10.5,
    }
