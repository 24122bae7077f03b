"""What does a process owe others in steps that it will not take part in?  Nothing that it could send: it lets their pulls fail.

So nobody waits for a process that has failed, or has come to the end of its script early; it is said before JAX's own end of
the process, which waits for the others.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from typing import Any

from autopar.runtime.pulled import PullTransport
from autopar.runtime.transport import Message


class Owed:
    """Owns the list of all that one process sends in a step of a program, and the number of the step that it is in."""

    def __init__(self, ahead: int) -> None:
        """``ahead``: so many steps others may be in advance."""
        self.step = 0
        self._ahead = ahead
        self._sent_by: list[tuple[PullTransport, Sequence[Message]]] = []
        self._is_over = False

    def add(self, transport: PullTransport, messages: Sequence[Message]) -> None:
        """These leave by that transport in every step."""
        self._sent_by.append((transport, messages))

    def break_off(self, transport: PullTransport) -> None:
        """By one transport, whose thread calls this, nothing more will come in the present step and later ones."""
        for own, messages in self._sent_by:
            if own is transport:
                own.break_off(range(self.step, self.step + self._ahead + 1), messages)

    def break_all_off(self) -> None:
        """The same by all transports; nobody may be using them."""
        if not self._is_over:
            self._is_over = True
            for transport, _ in self._sent_by:
                self.break_off(transport)

    def break_off_without(self, owner: Any) -> None:
        """Break all off when ``owner`` is gone, or this process ends."""
        atexit.register(self.break_all_off)  # before those of JAX, which were registered before
        weakref.finalize(owner, self._retire)

    def _retire(self) -> None:
        atexit.unregister(self.break_all_off)
        self.break_all_off()
