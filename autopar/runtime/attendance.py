"""Which processes of a world have not come to a step?  Asked by one that has waited for them for too long.

Every process writes the number of the step that it has come to on a board which JAX's coordinator keeps.  A thread does so: no
step waits for the board, and of steps in quick succession only the last is written.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from autopar.errors import TransportError


class Board(Protocol):
    """What is used of the client of JAX's coordinator."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Write."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All that stands under a key, with the whole keys."""


class Attendance:
    """Owns what this process says of itself; knows what the others say."""

    def __init__(self, board: Board, program: str, process: int, processes: int) -> None:
        """``program`` is the name that all processes have for what they run together."""
        self._board, self._folder = board, f"autopar/{program}"
        self._process, self._processes = process, processes
        self._step = 0
        self._is_new = threading.Event()
        # It must not keep the process, or the program, from ending: the one that it serves ends with the process.
        threading.Thread(target=self._write, daemon=True, name="autopar-attendance").start()

    def come_to(self, step: int) -> None:
        """This process takes part in that step."""
        self._step = step
        self._is_new.set()

    def missing(self, step: int) -> str:
        """Who has not come to a step, in words."""
        try:
            said = self._board.key_value_dir_get(self._folder)
        except RuntimeError as error:
            return f"the coordinator does not say who is missing ({str(error).splitlines()[0]})"
        last = {int(key.rpartition("/")[2]): int(value) for key, value in said} | {self._process: self._step}
        return missing_from(step, {process: last.get(process, 0) for process in range(self._processes)})

    def too_late(self, step: int, limit_seconds: float) -> TransportError:
        """The error of one who has waited so long."""
        return TransportError(
            f"step {step} did not end within {limit_seconds:g} s: {self.missing(step)}. Every process must call the same "
            "steps; see what those do, and start all processes again"
        )

    def _write(self) -> None:
        while self._is_new.wait():
            self._is_new.clear()
            try:
                self._board.key_value_set(f"{self._folder}/{self._process}", str(self._step), True)
            except RuntimeError:  # the coordinator is gone, or this process is about to end
                return


def missing_from(step: int, last: Mapping[int, int]) -> str:
    """The same, of the last step of each process (0: none yet)."""
    named = [
        f"process {process} has called {f'step {own} last' if own else 'none yet'}"
        for process, own in sorted(last.items())
        if own < step
    ]
    return ", ".join(named) or f"all {len(last)} processes have called it, so one of them is stuck in it"
