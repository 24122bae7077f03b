"""How do the others learn that a process will not send what they wait for?

The messages that a process sends are the same in every step; each is a *promise* to those who pull it, by a name that says the
step (:mod:`autopar.runtime.pulled`).  Nobody is more than ``ahead`` steps before this process.

    kept        in step k the message was sent
      │         a mesh of this process fails: the promises of its transport alone;
      │         the process fails, its executor is gone, or its script has ended: all
      ▼
    broken      the pulls of the steps k … k + ahead fail, as far as they were not served; for good

So nobody waits for what will not come.  At the end of a script this is said before JAX's own end of the process, which waits for
the others.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from typing import Any

from autopar.runtime.pulled import PullTransport
from autopar.runtime.transport import Message


class Promises:
    """Owns the promises of one process for one program, and the number of the step that it is in."""

    def __init__(self, ahead: int) -> None:
        self.step = 0
        self._ahead = ahead
        self._made: list[tuple[PullTransport, Sequence[Message]]] = []
        self._all_broken = False

    def make(self, transport: PullTransport, messages: Sequence[Message]) -> None:
        """These are sent by that transport in every step."""
        self._made.append((transport, messages))

    def break_those_of(self, transport: PullTransport) -> None:
        """For the thread that uses the transport, or when none does."""
        for own, messages in self._made:
            if own is transport:
                own.break_off(range(self.step, self.step + self._ahead + 1), messages)

    def break_all(self) -> None:
        """Once no thread uses any transport; again it does nothing."""
        if not self._all_broken:
            self._all_broken = True
            for transport, _ in self._made:
                self.break_those_of(transport)

    def break_all_without(self, owner: Any) -> None:
        """Break all when ``owner`` is gone, or this process ends."""
        atexit.register(self.break_all)  # before those of JAX, which were registered before
        weakref.finalize(owner, self._retire)

    def _retire(self) -> None:
        atexit.unregister(self.break_all)
        self.break_all()
