"""What an explanation of a pipeline says, as plain data: stages, what passes between them, and one simulated step.

Stages and microbatches are numbered from 1.  Seconds are those of the simulated step: meshes that share cores slow each
other down, so the same part may take longer for one microbatch than for another; figures per microbatch are means.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from autopar.explain.data import Leaf, MethodTotals, Parameter
from autopar.plan import SolverReport

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from autopar.cluster import Mesh
    from autopar.explain.compare import Comparison
    from autopar.explain.explanation import Explanation


class Work(Enum):
    """What a mesh does at a time."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The whole, unless the gradients of weights are made apart."""
    WEIGHT = "weight"
    ONCE = "once"
    """What runs once in a step, before the microbatches or after them."""
    MOVE = "move"
    """A value is handed on between stages on one mesh."""


@dataclass(frozen=True)
class StageRow:
    """One stage, its devices and the mesh that they form, which stages may share; ``axes_in_use`` cut anything there.

    ``weight_seconds`` are of gradients of weights that are made apart; 0: with the backward pass.
    ``first`` and ``last`` name the ends of its run of ``num_operators`` operators of the forward pass.  ``before_seconds`` and
    ``update_seconds`` are of what runs once in a step.  Bytes are of one device: ``state_bytes`` of what it is given once in a
    step (state and batch), ``peak_bytes`` at its fullest moment.  That and ``busy_fraction`` are of all stages of the mesh.
    ``in_flight`` microbatches keep residuals at once.  ``kind`` is that of its devices, on a cluster of several.
    Where every stage is the whole model, ``share`` is how many of the microbatches it works off, and ``forward_seconds`` both
    passes of one of them; else it is 0.
    ``num_hosted`` of the residuals lie in the memory of the host, at most ``host_bytes`` for each device of the mesh;
    ``host_seconds`` are of copies there and back, for one microbatch.
    """

    number: int
    devices: tuple[int, ...]
    mesh: Mesh
    axes_in_use: tuple[str, ...]
    first: str
    last: str
    num_operators: int
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float
    before_seconds: float
    update_seconds: float
    busy_fraction: float
    in_flight: int
    state_bytes: int
    peak_bytes: int
    budget_bytes: float
    kind: str = ""
    num_hosted: int = 0
    host_bytes: int = 0
    host_seconds: float = 0.0
    share: int = 0


@dataclass(frozen=True)
class Sent:
    """One array that crosses: a shape (of one microbatch, if ``per_microbatch``) or a leaf's path, and the user's line."""

    what: str
    source: str
    size_bytes: int
    per_microbatch: bool


@dataclass(frozen=True)
class PassageRow:
    """All that crosses from a stage to another; ``sent`` are the arrays, largest first.

    ``link`` is the slowest level that any of it passes.  ``bytes_per_microbatch`` and ``bytes_per_step`` (all microbatches and
    what crosses once) count whole arrays, ``link_bytes`` what a step puts on links: less where only pieces are needed, more
    where several devices need the same.  ``seconds_per_microbatch`` is how long the arrays of a microbatch are on their way if
    they go one after the other.
    """

    source: int
    target: int
    link: str
    bytes_per_microbatch: int
    bytes_per_step: int
    link_bytes: int
    seconds_per_microbatch: float
    sent: tuple[Sent, ...]


@dataclass(frozen=True)
class Span:
    """A mesh is at work for a microbatch, or (0) for the step."""

    work: Work
    stage: int
    microbatch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class TimelineRow:
    """What one mesh does in the simulated step, in order."""

    stages: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, repr=False)
class PipelineExplanation:
    """How a step runs as a pipeline.  Made by :func:`autopar.explain`; ``print`` or a notebook shows it.

    ``bubble_fraction`` is what equal stages would idle under the schedule if messages cost nothing. ``measured_seconds`` is the
    median of the first ``measured_steps`` steps, if any ran. ``leaves`` and ``parameters`` say on which stages arrays lie.
    ``alternatives`` are what the plan was held against (description, seconds); ``notes`` say what else is to be known.
    """

    function: str
    cluster: str
    hardware: str
    num_devices: int
    method: str
    verdict: str
    schedule: str
    num_microbatches: int
    microbatch_size: int
    bubble_fraction: float
    stages: tuple[StageRow, ...]
    passages: tuple[PassageRow, ...]
    timeline: tuple[TimelineRow, ...]
    step_seconds: float
    measured_seconds: float | None
    measured_steps: int
    budget_bytes: float
    leaves: tuple[Leaf, ...]
    parameters: tuple[Parameter, ...]
    methods: tuple[MethodTotals, ...]
    alternatives: tuple[tuple[str, float], ...]
    solver: SolverReport
    notes: tuple[str, ...]

    @property
    def has_shares(self) -> bool:
        """Whether every stage is the whole model on a mesh of its own, with a share of the microbatches."""
        return any(row.share for row in self.stages)

    @property
    def bytes_per_device(self) -> int:
        """Bytes on the fullest device at its fullest moment."""
        return max(row.peak_bytes for row in self.stages)

    def diff(self, other: Explanation | PipelineExplanation) -> Comparison:
        """What another plan for the same step does otherwise, and what that changes in seconds and bytes."""
        from autopar.explain.compare import compare

        return compare(self, other)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from autopar.explain.pipeline_view import pipeline_view

        yield from pipeline_view(self)

    def __str__(self) -> str:
        from autopar.explain.render import as_text

        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from autopar.explain.render import as_html

        return as_html(self)
