"""A line on the terminal while something long runs: what is being done, and for how long."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """A rich status line on a terminal, silence elsewhere; Ctrl-C passes through it untouched."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._status: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar
            from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._status = Bar(*columns, console=Console(stderr=True), transient=True)
            self._status.start()
            self._task = self._status.add_task(self._title)
        return self

    def say(self, message: str) -> None:
        """What is being done now."""
        if self._status is not None:
            self._status.update(self._task, description=f"{self._title}: {message}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
