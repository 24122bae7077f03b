"""Two plans for one step: which arrays lie otherwise, and what that changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.explain.data import Leaf
from autopar.explain.pipeline import PipelineExplanation
from autopar.wording import families

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from autopar.explain.explanation import Explanation

from autopar.plan import Axes


@dataclass(frozen=True)
class LayoutChange:
    """Alike arrays that lie (or are used) otherwise; bytes on one device, all of them together."""

    path: str
    paths: tuple[str, ...]
    first: str
    first_use: str
    second: str
    second_use: str
    first_bytes: int
    second_bytes: int


@dataclass(frozen=True)
class AmountChange:
    """One figure in both plans, in seconds or in bytes."""

    what: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Second less first."""
        return self.second - self.first


@dataclass(frozen=True, repr=False)
class Comparison:
    """What differs between two explanations; nothing differs where every tuple is empty.  Prints like them.

    ``only_first`` and ``only_second`` are arguments that only one of the two steps has.
    """

    first: str
    second: str
    layouts: tuple[LayoutChange, ...]
    seconds: tuple[AmountChange, ...]
    bytes: tuple[AmountChange, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the plans agree in every layout and every figure."""
        return not (self.layouts or self.seconds or self.bytes or self.only_first or self.only_second)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from autopar.explain.render import comparison_view

        yield from comparison_view(self)

    def __str__(self) -> str:
        from autopar.explain.render import as_text

        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from autopar.explain.render import as_html

        return as_html(self)


def compare(first: Explanation | PipelineExplanation, second: Explanation | PipelineExplanation) -> Comparison:
    """The differences, largest first within layouts; of a pipeline seconds and bytes are compared as a whole."""
    ours = {leaf.path: leaf for leaf in first.leaves}
    theirs = {leaf.path: leaf for leaf in second.leaves}
    names = [f"{e.method} on {_mesh_text(e)}" for e in (first, second)]
    if names[0] == names[1]:
        names = [f"{name} of {e.cluster}" for name, e in zip(names, (first, second), strict=True)]
    return Comparison(
        first=names[0],
        second=names[1],
        layouts=_layout_changes((ours[path], theirs[path]) for path in ours if path in theirs),
        seconds=_changes(_seconds_of(first), _seconds_of(second)),
        bytes=_changes(_bytes_of(first), _bytes_of(second)),
        only_first=tuple(path for path in ours if path not in theirs),
        only_second=tuple(path for path in theirs if path not in ours),
    )


def _mesh_text(explanation: Explanation | PipelineExplanation) -> str:
    if isinstance(explanation, PipelineExplanation):
        return " | ".join(str(row.mesh) for row in explanation.stages)
    return str(explanation.mesh)


def _place(leaf: Leaf) -> tuple[str, str]:
    """The layouts at rest and for use; the stages of a pipeline stand behind the latter."""
    if not leaf.stages:
        return leaf.sharding, leaf.use
    stages = f" on stage {', '.join(map(str, leaf.stages))}"
    use = leaf.use + stages
    return (use if leaf.sharding == leaf.use else leaf.sharding), use


def _layout_changes(pairs: Iterable[tuple[Leaf, Leaf]]) -> tuple[LayoutChange, ...]:
    alike: dict[tuple[object, ...], dict[str, tuple[Leaf, Leaf]]] = defaultdict(dict)
    for a, b in pairs:
        if (_place(a), a.bytes_per_device) != (_place(b), b.bytes_per_device):
            alike[a.shape, a.dtype, a.kind, _place(a), _place(b)][a.path] = (a, b)
    found = []
    for members in alike.values():
        for name, paths in families(members):
            a, b = members[paths[0]]
            count = len(paths)
            sizes = (a.bytes_per_device * count, b.bytes_per_device * count)
            found.append(LayoutChange(name, paths, *_place(a), *_place(b), *sizes))
    return tuple(sorted(found, key=lambda row: (-max(row.first_bytes, row.second_bytes), row.path)))


def _seconds_of(explanation: Explanation | PipelineExplanation) -> dict[str, float]:
    if isinstance(explanation, PipelineExplanation):
        return {"step": explanation.step_seconds}
    time = explanation.time
    amounts = {
        "step": time.step_seconds,
        "compute": time.compute_seconds,
        "of it update": time.update_seconds,
        "communication": time.communication_seconds,
    }
    if time.allocation_seconds:
        amounts["new memory"] = time.allocation_seconds
    if time.host_seconds:
        amounts["copies from and to host memory"] = time.host_seconds
    if time.hidden_seconds:
        amounts["of communication hidden behind work"] = -time.hidden_seconds
    for row in time.communication:
        amounts[f"{row.kind} over {_over(row.axes)}"] = row.seconds
    return amounts


def _over(axes: Axes) -> str:
    return " × ".join(axes)


def _bytes_of(explanation: Explanation | PipelineExplanation) -> dict[str, float]:
    if isinstance(explanation, PipelineExplanation):
        return {"a device in all": float(explanation.bytes_per_device)}
    memory = explanation.memory
    amounts = {"a device in all": float(memory.total_bytes)}
    amounts.update((kind, float(size)) for kind, size in memory.by_kind)
    amounts["sent in a step"] = sum(row.wire_bytes for row in explanation.time.communication)
    return amounts


def _changes(first: dict[str, float], second: dict[str, float]) -> tuple[AmountChange, ...]:
    """Figures of both; of a pipeline there are only those of the whole."""
    is_whole = min(len(first), len(second)) == 1
    keys = dict.fromkeys(key for key in (*first, *second) if not is_whole or (key in first and key in second))
    rows = (AmountChange(key, first.get(key, 0.0), second.get(key, 0.0)) for key in keys)
    return tuple(row for row in rows if row.first != row.second)
