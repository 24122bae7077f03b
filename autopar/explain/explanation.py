"""The explanation of one plan: an object that prints, and whose fields are the data behind what it prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.explain.data import (
    CollectiveGroup,
    Leaf,
    Measured,
    MemoryUse,
    MethodTotals,
    OperatorUse,
    Parameter,
    Time,
    Undivided,
)
from autopar.plan import SolverReport

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from autopar.cluster import Mesh
    from autopar.explain.compare import Comparison
    from autopar.explain.pipeline import PipelineExplanation


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why a step is spread as it is, and what that costs.  Made by :func:`autopar.explain`.

    ``print(explanation)`` or a notebook shows it; everything shown stands in the fields: rows are sorted, costliest
    first, and complete, where the text shows the first few.  ``verdict`` is the whole in a sentence; ``notes`` say what
    the explanation itself had to leave out.
    """

    function: str
    cluster: str
    hardware: str
    num_devices: int
    mesh: Mesh
    method: str
    verdict: str
    time: Time
    memory: MemoryUse
    leaves: tuple[Leaf, ...]
    parameters: tuple[Parameter, ...]
    operators: tuple[OperatorUse, ...]
    collectives: tuple[CollectiveGroup, ...]
    methods: tuple[MethodTotals, ...]
    uncovered: tuple[OperatorUse, ...]
    """Operators that no rule covers: every device does all of them."""
    repeated: tuple[OperatorUse, ...]
    """Costly operators that several devices do alike although they could be cut."""
    undivided: tuple[Undivided, ...]
    solver: SolverReport
    measured: Measured | None
    notes: tuple[str, ...]

    def diff(self, other: Explanation | PipelineExplanation) -> Comparison:
        """What another plan for the same step does otherwise, and what that changes in seconds and bytes."""
        from autopar.explain.compare import compare

        return compare(self, other)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from autopar.explain.render import explanation_view

        yield from explanation_view(self)

    def __str__(self) -> str:
        from autopar.explain.render import as_text

        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from autopar.explain.render import as_html

        return as_html(self)
