"""What the file of a plan holds, field by field, and a plan written so.

Layouts and strategies are few and their users many (24 equal layers), so each distinct one stands once in a table,
``layouts`` or ``strategies``, and is referred to by its place there: ``homes``, ``copies`` and ``strategies`` of a stage
are pairs ``[id, place]``, ``in_layouts`` and ``out_layouts`` are places.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from operator import index
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from autopar.plan import (
    NO_REMAT,
    Axes,
    Layout,
    Pass,
    Plan,
    Prediction,
    Remat,
    Schedule,
    SolverReport,
    Strategy,
    SumScatter,
)

FILE_FORMAT = "autopar.plan"
FILE_VERSION = 10
OLDEST_VERSION = 3
"""Files of which nothing but what was added since is missing."""

_Whole = Annotated[int, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]
_Number = Annotated[float, Meta(ge=0)]
Pairs = tuple[tuple[_Whole, _Whole], ...]
_Entry = TypeVar("_Entry", bound=Hashable)


class _LayoutEntry(Struct, forbid_unknown_fields=True):
    dims: tuple[Axes, ...]
    partial: Axes = ()


class _StrategyEntry(Struct, forbid_unknown_fields=True):
    factors: tuple[Axes, ...]
    passing: Axes = ()


class _MeshEntry(Struct, forbid_unknown_fields=True):
    axis_names: Axes
    axis_sizes: tuple[_Count, ...]


class StageEntry(Struct, forbid_unknown_fields=True):
    """A stage: its mesh, and by ids of values and operators where they stand in the tables."""

    mesh: _MeshEntry
    homes: Pairs
    copies: Pairs
    strategies: Pairs
    devices: tuple[_Whole, ...] = ()
    sum_scatter: SumScatter = SumScatter.COLLECTIVE
    hosted: tuple[_Whole, ...] = ()


class _CollectiveEntry(Struct, forbid_unknown_fields=True):
    kind: str
    axes: Axes
    full_bytes: _Number
    count: _Whole
    wire_bytes: _Number
    seconds: _Number
    phase: str
    value: _Whole
    origin: str


class _MemoryEntry(Struct, forbid_unknown_fields=True):
    argument_bytes: _Whole
    output_bytes: _Whole
    alias_bytes: _Whole
    temp_bytes: _Whole
    by_kind: dict[str, _Whole]
    largest: tuple[tuple[str, _Whole], ...] = ()
    host_bytes: _Whole = 0


class PredictionEntry(Struct, forbid_unknown_fields=True):
    """The figures of a prediction."""

    compute_seconds: _Number
    communication_seconds: _Number
    update_seconds: _Number
    flops: _Number
    bytes_moved: _Number
    collectives: tuple[_CollectiveEntry, ...]
    memory: _MemoryEntry
    simulated_seconds: _Number | None = None
    allocation_seconds: _Number = 0.0
    host_seconds: _Number = 0.0
    hidden_seconds: _Number = 0.0


class SolverEntry(Struct, forbid_unknown_fields=True):
    """What the solver had to say."""

    variables: _Whole
    variables_after_reduction: _Whole
    seconds: _Number
    gap: _Number | None  # null is infinity, which JSON has not: the solver ran out of time without any bound
    meshes_tried: tuple[str, ...] = ()


class _OpeningEntry(Struct, forbid_unknown_fields=True):
    pieces: _Count = 1
    leaves: tuple[tuple[_Whole, _Whole, _Count], ...] = ()


class _RematEntry(Struct, forbid_unknown_fields=True):
    starts: Annotated[tuple[_Whole, ...], Meta(min_length=1)] = NO_REMAT.starts
    kinds: Annotated[tuple[Remat, ...], Meta(min_length=1)] = NO_REMAT.kinds


class PlanEntry(Struct, forbid_unknown_fields=True, kw_only=True):
    """A plan; what was added since the oldest version has defaults."""

    fingerprint: str
    jax_version: str
    method: str
    cluster: str
    num_devices: _Count
    num_microbatches: _Count = 1
    schedule: Schedule = Schedule.SINGLE
    cuts: tuple[_Count, ...] = ()
    order: tuple[tuple[tuple[Pass, _Whole, _Whole], ...], ...] = ()
    opening: _OpeningEntry = msgspec.field(default_factory=_OpeningEntry)
    remat: _RematEntry = msgspec.field(default_factory=_RematEntry)
    hosted: tuple[_Whole, ...] = ()
    shares: tuple[_Count, ...] = ()
    layouts: tuple[_LayoutEntry, ...]
    strategies: tuple[_StrategyEntry, ...]
    stages: Annotated[tuple[StageEntry, ...], Meta(min_length=1)]
    in_paths: tuple[str, ...]
    in_layouts: tuple[_Whole, ...]
    out_paths: tuple[str, ...]
    out_layouts: tuple[_Whole, ...]
    prediction: PredictionEntry
    solver: SolverEntry


class File(Struct, forbid_unknown_fields=True):
    """The whole file."""

    format: str
    version: int
    plan: PlanEntry


class _Table(Generic[_Entry]):
    """Distinct entries in the order of their first use, and the place of each."""

    def __init__(self) -> None:
        self._places: dict[_Entry, int] = {}

    def place(self, entry: _Entry) -> int:
        return self._places.setdefault(entry, len(self._places))

    def pairs(self, mapping: Mapping[int, _Entry]) -> Pairs:
        return tuple((index(key), self.place(entry)) for key, entry in mapping.items())

    def entries(self) -> Iterable[_Entry]:
        return self._places


def written(plan: Plan) -> PlanEntry:
    """The plan as it stands in a file."""
    layouts: _Table[Layout] = _Table()
    strategies: _Table[Strategy] = _Table()
    stages = tuple(
        StageEntry(
            _MeshEntry(stage.mesh.axis_names, stage.mesh.axis_sizes),
            layouts.pairs(stage.homes),
            layouts.pairs(stage.copies),
            strategies.pairs(stage.strategies),
            tuple(index(device) for device in stage.devices),
            stage.sum_scatter,
            tuple(map(index, stage.hosted)),
        )
        for stage in plan.stages
    )
    in_layouts = tuple(layouts.place(layout) for layout in plan.in_layouts)
    out_layouts = tuple(layouts.place(layout) for layout in plan.out_layouts)
    return PlanEntry(
        fingerprint=plan.fingerprint,
        jax_version=plan.jax_version,
        method=plan.method,
        cluster=plan.cluster,
        num_devices=index(plan.num_devices),
        num_microbatches=index(plan.num_microbatches),
        schedule=plan.schedule,
        cuts=tuple(index(position) for position in plan.cuts),
        order=tuple(tuple((one, index(stage), index(number)) for one, stage, number in row) for row in plan.order),
        opening=_OpeningEntry(
            index(plan.opening.pieces), tuple((index(a), index(b), index(c)) for a, b, c in plan.opening.leaves)
        ),
        remat=_RematEntry(tuple(map(index, plan.remat.starts)), plan.remat.kinds),
        hosted=tuple(map(index, plan.hosted)),
        shares=tuple(map(index, plan.shares)),
        layouts=tuple(_LayoutEntry(layout.dims, layout.partial) for layout in layouts.entries()),
        strategies=tuple(_StrategyEntry(one.factors, one.passing) for one in strategies.entries()),
        stages=stages,
        in_paths=plan.in_paths,
        in_layouts=in_layouts,
        out_paths=plan.out_paths,
        out_layouts=out_layouts,
        prediction=_from_prediction(plan.prediction),
        solver=_from_solver(plan.solver),
    )


def _from_prediction(prediction: Prediction) -> PredictionEntry:
    # float() and index() turn the scalars of NumPy, which planners compute with, into plain numbers.
    memory = prediction.memory
    return PredictionEntry(
        compute_seconds=float(prediction.compute_seconds),
        communication_seconds=float(prediction.communication_seconds),
        update_seconds=float(prediction.update_seconds),
        flops=float(prediction.flops),
        bytes_moved=float(prediction.bytes_moved),
        collectives=tuple(
            _CollectiveEntry(
                kind=use.kind,
                axes=use.axes,
                full_bytes=float(use.full_bytes),
                count=index(use.count),
                wire_bytes=float(use.wire_bytes),
                seconds=float(use.seconds),
                phase=use.phase,
                value=index(use.value),
                origin=use.origin,
            )
            for use in prediction.collectives
        ),
        memory=_MemoryEntry(
            argument_bytes=index(memory.argument_bytes),
            output_bytes=index(memory.output_bytes),
            alias_bytes=index(memory.alias_bytes),
            temp_bytes=index(memory.temp_bytes),
            by_kind={kind: index(size) for kind, size in memory.by_kind.items()},
            largest=tuple((name, index(size)) for name, size in memory.largest),
            host_bytes=index(memory.host_bytes),
        ),
        simulated_seconds=None if prediction.simulated_seconds is None else float(prediction.simulated_seconds),
        allocation_seconds=float(prediction.allocation_seconds),
        host_seconds=float(prediction.host_seconds),
        hidden_seconds=float(prediction.hidden_seconds),
    )


def _from_solver(solver: SolverReport) -> SolverEntry:
    return SolverEntry(
        variables=index(solver.variables),
        variables_after_reduction=index(solver.variables_after_reduction),
        seconds=float(solver.seconds),
        gap=None if solver.gap == math.inf else float(solver.gap),
        meshes_tried=solver.meshes_tried,
    )
