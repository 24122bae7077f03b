"""What an explanation says, as plain data: frozen dataclasses of numbers, strings and tuples.

Seconds are of one step, bytes of one device, unless a name says otherwise.  Rows that describe many alike arrays or
operators (the layers of a network) carry a ``count``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from autopar.plan import Axes, Layout


class LeafKind(Enum):
    """What an input of the step is for; parameters are the state that the forward or backward pass reads."""

    PARAMETER = "parameters"
    OPTIMIZER = "optimizer state"
    BATCH = "batch"
    KEY = "random keys"
    CLOSURE = "closed-over arrays"
    OTHER = "other arguments"


@dataclass(frozen=True)
class Communication:
    """All collectives of one kind over the same mesh axes; ``wire_bytes`` is what one device sends."""

    kind: str
    axes: Axes
    count: int
    wire_bytes: float
    seconds: float


@dataclass(frozen=True)
class Time:
    """Predicted seconds of one step.

    ``step_seconds = compute_seconds + communication_seconds + allocation_seconds + host_seconds − hidden_seconds``;
    ``update_seconds`` (the optimizer) is part of ``compute_seconds``; ``communication`` sums to ``communication_seconds``,
    of which ``hidden_seconds`` are hidden behind work; ``allocation_seconds`` are those of memory that is new to the call,
    where they were measured, ``host_seconds`` those of copies from and to host memory.
    """

    step_seconds: float
    compute_seconds: float
    update_seconds: float
    communication_seconds: float
    communication: tuple[Communication, ...]
    allocation_seconds: float = 0.0
    host_seconds: float = 0.0
    hidden_seconds: float = 0.0


@dataclass(frozen=True)
class MemoryUse:
    """Predicted bytes on one device against the budget; ``total_bytes = argument + output − alias + temp``.

    ``host_bytes`` are those of its part of arrays that lie in the memory of its host between steps.
    """

    budget_bytes: float
    total_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    by_kind: tuple[tuple[str, int], ...]
    largest: tuple[tuple[str, int], ...]
    host_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether the budget is kept."""
        return self.total_bytes <= self.budget_bytes


@dataclass(frozen=True)
class Leaf:
    """One array that goes into the step; ``use_layout`` is the layout of its copy for use, where that is another.

    Of a pipeline, ``stages`` are the numbers (from 1) of those that hold it; layouts are then on the mesh of the first.
    ``in_host`` says that it lies in the memory of the host between steps.
    """

    path: str
    kind: LeafKind
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    use_layout: Layout | None
    whole_bytes: int
    bytes_per_device: int
    stages: tuple[int, ...] = ()
    in_host: bool = False

    def on_stages(self, stages: Iterable[int]) -> Leaf:
        """The same on some stages of a pipeline."""
        return replace(self, stages=tuple(stages))

    @property
    def sharding(self) -> str:
        """The layout at rest, written like a PartitionSpec."""
        return spec_text(self.layout)

    @property
    def use(self) -> str:
        """The layout for use, written like a PartitionSpec."""
        return spec_text(self.use_layout or self.layout)


@dataclass(frozen=True)
class Change:
    """Where another plan spends more (or, negative, fewer) seconds: a collective over ``axes``, or an operator."""

    what: str
    axes: Axes
    phase: str
    seconds: float


@dataclass(frozen=True)
class RunnerUp:
    """The best plan in which a parameter lies otherwise.

    ``extra_seconds`` is what it costs more by the planner's objective; ``changes`` say where, by prediction, largest
    first; ``moved`` are the other arrays whose layouts change with it, ``moved_parameters`` the parameters among them.
    """

    sharding: str
    use: str
    extra_seconds: float
    changes: tuple[Change, ...]
    extra_state_bytes: int
    moved: tuple[str, ...]
    moved_parameters: tuple[str, ...]


@dataclass(frozen=True)
class Parameter:
    """Alike parameters, or alike arrays of optimizer state.  Bytes are of all ``count`` of them together.

    ``path`` names them all, numbers as ranges; ``paths`` one by one.
    """

    path: str
    paths: tuple[str, ...]
    kind: LeafKind
    shape: tuple[int, ...]
    dtype: str
    sharding: str
    use: str
    whole_bytes: int
    bytes_per_device: int
    why: str
    runner_ups: tuple[RunnerUp, ...]
    stages: tuple[int, ...] = ()
    in_host: bool = False

    @property
    def count(self) -> int:
        """How many arrays."""
        return len(self.paths)


@dataclass(frozen=True)
class OperatorUse:
    """Alike operators: ``count`` runs a step, ``flops`` and ``seconds`` on one device, all runs together.

    ``equation`` names the dimensions by letters; ``strategy`` says how they are cut; ``repeated_over`` are the mesh
    axes along which the devices do the same work over again, ``uncut_sizes`` those of dimensions that could be cut yet.
    ``covered`` is False where no rule says how to cut it, although it handles more than single elements.
    """

    primitive: str
    shapes: str
    equation: str
    strategy: str
    repeated_over: Axes
    uncut_sizes: tuple[int, ...]
    phase: str
    source: str
    covered: bool
    count: int
    flops: float
    seconds: float


@dataclass(frozen=True)
class CollectiveGroup:
    """Alike collectives: ``full_bytes`` of the full tensors and ``wire_bytes`` that a device sends, all together."""

    kind: str
    axes: Axes
    phase: str
    origin: str
    arrays: str
    count: int
    full_bytes: float
    wire_bytes: float
    seconds: float


@dataclass(frozen=True)
class MethodTotals:
    """What a hand-made method comes to.  ``reason`` is why there is no plan, or why it does not fit."""

    name: str
    mesh: str
    step_seconds: float | None
    compute_seconds: float | None
    communication_seconds: float | None
    memory_bytes: int | None
    fits: bool
    reason: str = ""


@dataclass(frozen=True)
class Undivided:
    """A dimension of a parameter that the devices do not divide.

    Padded from ``extent`` to ``padded`` it could be cut into ``pieces``.  ``saved_bytes`` is what a device would then
    hold less, at rest; ``saved_seconds`` bounds what it could compute less, with everything else as it is.
    """

    path: str
    dimension: int
    extent: int
    padded: int
    pieces: int
    saved_bytes: int
    saved_seconds: float


@dataclass(frozen=True)
class Measured:
    """What was measured: the median of the first ``steps`` steps, and XLA's own account of bytes on one device."""

    steps: int
    step_seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """argument + output − alias + temp."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def spec_text(layout: Layout) -> str:
    """A layout like a PartitionSpec: ``P('data', None)``, ``P()`` for whole, with ``+ Σ`` where it is partial."""
    entries = [
        f"({', '.join(map(repr, axes))})" if len(axes) > 1 else repr(axes[0]) if axes else "None"
        for axes in layout.dims
    ]
    while entries and entries[-1] == "None":
        entries.pop()
    text = f"P({', '.join(entries)})"
    return f"{text} + Σ over {', '.join(layout.partial)}" if layout.partial else text
