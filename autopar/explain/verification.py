"""Is the compiled program what the plan said?  The two accounts side by side, and where they part.

    plan.prediction                                 what was said before anything was compiled
    the optimized HLO and ``memory_analysis()``     what the compiler made of it

Collectives are compared by kind and mesh axes: the replica groups in the HLO are those of a set of mesh axes, or they
belong to no axes and are shown so.  Where bytes differ, collectives are paired by the size of their arrays; what finds no
partner is named: predicted ones by operator and source line, compiled ones by instruction.  FLOPs and seconds are shown and
not judged: the compiler simplifies arithmetic, and both seconds are prices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from autopar.cost_model.collectives import Collective, wire_bytes
from autopar.cost_model.groups import mesh_axes_of, permute_axes_of
from autopar.cost_model.hlo import CompiledProgram, HloCollective
from autopar.plan import Axes, CollectiveUse, Plan

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from autopar.cluster import Mesh

NO_AXES = ("?",)
"""Stands for groups of devices that are not those of any mesh axes."""

_Bucket = tuple[str, Axes]


@dataclass(frozen=True)
class Tolerances:
    """How far a prediction may be off, as a share of what is compiled; below ``small_bytes`` nothing is a difference.

    Arguments, outputs and what they share must be exact.
    """

    wire_bytes: float = 0.10
    total_bytes: float = 0.15
    small_bytes: int = 256


DEFAULT_TOLERANCES = Tolerances()


class Unit(Enum):
    """What a figure counts."""

    BYTES = "bytes"
    FLOPS = "FLOPs"
    SECONDS = "seconds"


@dataclass(frozen=True)
class Figure:
    """One figure of a step on one device; ``tolerance`` is a share of ``compiled``, None where it is not judged."""

    what: str
    unit: Unit
    predicted: float
    compiled: float
    tolerance: float | None

    @property
    def agrees(self) -> bool:
        """Whether the prediction is within the tolerance (True where none is set)."""
        return self.tolerance is None or abs(self.predicted - self.compiled) <= self.tolerance * abs(self.compiled)


@dataclass(frozen=True)
class CollectiveFigure:
    """Collectives of one kind over the same mesh axes in one step.

    ``count`` is of arrays sent: the backend may send several by one collective; ``compiled_launches`` counts those.
    ``wire_bytes`` is what one device sends (ring accounting).
    """

    kind: str
    axes: Axes
    predicted_count: int
    compiled_count: int
    compiled_launches: int
    predicted_wire_bytes: float
    compiled_wire_bytes: float
    agrees: bool


@dataclass(frozen=True)
class Parting:
    """Arrays of one size that only one account has, or not as often; largest first in a :class:`Verification`.

    ``wire_bytes`` is predicted less compiled.  ``origins`` say for which operators (and lines) arrays of this size are
    predicted, ``instructions`` which of the compiled program send them.
    """

    kind: str
    axes: Axes
    array_bytes: float
    predicted_count: int
    compiled_count: int
    wire_bytes: float
    origins: tuple[str, ...]
    instructions: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Verification:
    """A plan's prediction held against the compiled program.  Made by :func:`autopar.verify_plan`; prints as a table.

    ``agrees`` is the answer; ``largest`` names what the plan holds in memory at its peak (name, bytes).
    """

    function: str
    method: str
    mesh: Mesh
    cluster: str
    tolerances: Tolerances
    collectives: tuple[CollectiveFigure, ...]
    figures: tuple[Figure, ...]
    partings: tuple[Parting, ...]
    largest: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether everything that is judged is within its tolerance."""
        return all(row.agrees for row in self.collectives) and all(row.agrees for row in self.figures)

    def figure(self, what: str) -> Figure:
        """The figure of that name; raises KeyError for a name that is not among ``figures``."""
        return {figure.what: figure for figure in self.figures}[what]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from autopar.explain.verification_view import verification_view

        yield from verification_view(self)

    def __str__(self) -> str:
        from autopar.explain.render import as_text

        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from autopar.explain.render import as_html

        return as_html(self)


def held_against(
    plan: Plan,
    compiled: CompiledProgram,
    function: str,
    tolerances: Tolerances = DEFAULT_TOLERANCES,
    notes: tuple[str, ...] = (),
) -> Verification:
    """Compare a plan with the program that was compiled for it, priced on the plan's cluster."""
    predicted = _predicted(plan.prediction.collectives)
    actual = _compiled(compiled.cost.collectives, plan.mesh)
    buckets = sorted(
        predicted.keys() | actual.keys(),
        key=lambda key: (-_sent(predicted.get(key, [])) - _sent(actual.get(key, [])), key),
    )
    rows = tuple(_row(key, predicted.get(key, []), actual.get(key, []), tolerances) for key in buckets)
    partings = [
        parting
        for row, key in zip(rows, buckets, strict=True)
        if not row.agrees
        for parting in _partings(key, predicted.get(key, []), actual.get(key, []))
    ]
    return Verification(
        function=function,
        method=plan.method,
        mesh=plan.mesh,
        cluster=plan.cluster,
        tolerances=tolerances,
        collectives=rows,
        figures=_figures(plan, compiled, tolerances),
        partings=tuple(sorted(partings, key=lambda parting: -abs(parting.wire_bytes))),
        largest=plan.prediction.memory.largest,
        notes=(*notes, *compiled.cost.notes),
    )


@dataclass(frozen=True)
class _Sending:
    """Arrays of one size sent ``count`` times in a step; ``name`` is an origin or an instruction."""

    array_bytes: float
    count: int
    wire_bytes: float
    launches: float
    name: str


def _predicted(uses: Iterable[CollectiveUse]) -> Mapping[_Bucket, list[_Sending]]:
    found: dict[_Bucket, list[_Sending]] = defaultdict(list)
    for use in uses:
        found[use.kind, use.axes].append(_Sending(use.full_bytes, use.count, use.wire_bytes, 0, use.origin))
    return found


def _compiled(collectives: Iterable[HloCollective], mesh: Mesh) -> Mapping[_Bucket, list[_Sending]]:
    found: dict[_Bucket, list[_Sending]] = defaultdict(list)
    for one in collectives:
        if one.group_size < 2:
            continue
        over = permute_axes_of if one.kind is Collective.PERMUTE else mesh_axes_of
        axes = over(one.groups, mesh)
        name = f"%{one.name} ({one.op_name})" if one.op_name else f"%{one.name}"
        for size in one.array_bytes:
            sent = one.count * wire_bytes(one.kind, size, one.group_size)
            launches = one.count / len(one.array_bytes)
            found[one.kind.value, NO_AXES if axes is None else axes].append(
                _Sending(size, one.count, sent, launches, name)
            )
    return found


def _sent(sendings: Iterable[_Sending]) -> float:
    return math.fsum(sending.wire_bytes for sending in sendings)


def _row(key: _Bucket, predicted: list[_Sending], compiled: list[_Sending], tolerances: Tolerances) -> CollectiveFigure:
    said, found = _sent(predicted), _sent(compiled)
    return CollectiveFigure(
        *key,
        predicted_count=sum(sending.count for sending in predicted),
        compiled_count=sum(sending.count for sending in compiled),
        compiled_launches=round(math.fsum(sending.launches for sending in compiled)),
        predicted_wire_bytes=said,
        compiled_wire_bytes=found,
        agrees=abs(said - found) <= max(tolerances.wire_bytes * found, tolerances.small_bytes),
    )


def _partings(key: _Bucket, predicted: list[_Sending], compiled: list[_Sending]) -> Iterable[Parting]:
    """Sizes of arrays that the two accounts do not send equally often."""
    for size in sorted({sending.array_bytes for sending in (*predicted, *compiled)}):
        ours = [sending for sending in predicted if sending.array_bytes == size]
        theirs = [sending for sending in compiled if sending.array_bytes == size]
        ours_count, theirs_count = (sum(sending.count for sending in sendings) for sendings in (ours, theirs))
        if ours_count != theirs_count:
            yield Parting(
                *key,
                array_bytes=size,
                predicted_count=ours_count,
                compiled_count=theirs_count,
                wire_bytes=_sent(ours) - _sent(theirs),
                origins=tuple(dict.fromkeys(sending.name for sending in ours)),
                instructions=tuple(dict.fromkeys(sending.name for sending in theirs)),
            )


def _figures(plan: Plan, compiled: CompiledProgram, tolerances: Tolerances) -> tuple[Figure, ...]:
    said, memory, found = plan.prediction, plan.prediction.memory, compiled.memory
    in_host = Figure("arguments in host memory", Unit.BYTES, memory.host_bytes, found.host, 0.0)
    hidden = Figure("hidden of it", Unit.SECONDS, said.hidden_seconds, compiled.cost.hidden_seconds, None)
    new = Figure("new memory", Unit.SECONDS, said.allocation_seconds, compiled.cost.allocation_seconds, None)
    return (
        Figure("arguments", Unit.BYTES, memory.argument_bytes, found.argument, 0.0),
        *((in_host,) if memory.host_bytes or found.host else ()),
        Figure("outputs", Unit.BYTES, memory.output_bytes, found.output, 0.0),
        Figure("alias", Unit.BYTES, memory.alias_bytes, found.alias, 0.0),
        Figure("temporaries", Unit.BYTES, memory.temp_bytes, found.temp, None),
        Figure("memory in all", Unit.BYTES, memory.total_bytes, found.total, tolerances.total_bytes),
        Figure("FLOPs", Unit.FLOPS, said.flops, compiled.cost.flops, None),
        Figure("compute", Unit.SECONDS, said.compute_seconds, compiled.cost.compute_seconds, None),
        Figure("communication", Unit.SECONDS, said.communication_seconds, compiled.cost.communication_seconds, None),
        *((new,) if said.allocation_seconds or compiled.cost.allocation_seconds else ()),
        *((hidden,) if said.hidden_seconds or compiled.cost.hidden_seconds else ()),
        Figure("step", Unit.SECONDS, said.step_seconds, compiled.cost.seconds, None),
    )
