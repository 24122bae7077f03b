"""What did a search for plans see: the fastest of them, others, and whether memory kept it from looking further?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


@dataclass(frozen=True)
class Searched(Generic[T_co]):
    """The best plan; None: there is none.

    ``others`` are plans on other stages, or on one mesh, that were planned exactly and are slower: with other choices in their
    layers they may be faster.  ``lacks_memory`` says whether pipelines that might be faster than the best were left for want of
    memory.
    """

    best: T_co | None
    others: tuple[T_co, ...] = ()
    lacks_memory: bool = False

    def mapped(self, change: Callable[[T_co], U]) -> Searched[U]:
        """The same of something else."""
        best = None if self.best is None else change(self.best)
        return Searched(best, tuple(map(change, self.others)), self.lacks_memory)
