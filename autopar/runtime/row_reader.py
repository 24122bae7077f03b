"""In a process of a mesh: the rows of batches that its devices need, read once, and the next step's beforehand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from autopar.runtime.host_data import joined, rows_read
from autopar.runtime.messages import RowsPart

Range = tuple[int, int]


class RowReader:
    """Owns one of the user's readers, and what it gave for the present step and the next."""

    def __init__(self, read: Callable[[int, slice], Any], leaves: int) -> None:
        self._read = read
        self._leaves = leaves
        self._known: dict[tuple[int, Range], Future[list[np.ndarray[Any, Any]]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autopar-rows")

    def part(self, step: int, leaf: int, wanted: RowsPart, dtype: Any) -> np.ndarray[Any, Any]:
        """What one device gets of a leaf."""
        found = joined(wanted, lambda *ends: self._begun(step, ends).result()[leaf])
        return np.asarray(found, dtype=dtype, order="C")

    def step_is_over(self, step: int) -> None:
        """Read for the next step what was read for this one, and forget this one."""
        ranges = [wanted for known, wanted in self._known if known == step]
        self._known = {key: found for key, found in self._known.items() if key[0] > step}
        for wanted in ranges:
            self._begun(step + 1, wanted)

    def _begun(self, step: int, wanted: Range) -> Future[list[np.ndarray[Any, Any]]]:
        if (step, wanted) not in self._known:
            rows = slice(*wanted)
            self._known[step, wanted] = self._thread.submit(lambda: rows_read(self._read, self._leaves, step, rows))
        return self._known[step, wanted]
