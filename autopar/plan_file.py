"""A plan as a file: what is written, and what may be read back.

    load(save(plan)) = plan     exactly: floats are written by their shortest text that reads back to the same bits

The file is JSON, ``{"format": "autopar.plan", "version": 10, "plan": {…}}`` with the fields of ``Plan``.  Layouts and
strategies are few and their users many (24 equal layers), so each distinct one stands once in a table, ``layouts`` or
``strategies``, and is referred to by its place there: ``homes``, ``copies`` and ``strategies`` of a stage are pairs
``[id, place]``, ``in_layouts`` and ``out_layouts`` are places.

A file comes from anywhere and is believed in nothing: the types are checked field by field, unknown fields are refused,
and a layout must make sense on the mesh that it is for.  Nothing in it is ever executed or unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from autopar.cluster import Mesh
from autopar.errors import ClusterError, PlanError
from autopar.files import Header, write_atomically
from autopar.plan import (
    NO_REMAT,
    Axes,
    CollectiveUse,
    LayerRemat,
    Layout,
    Memory,
    Opening,
    Pass,
    Plan,
    Prediction,
    Remat,
    Schedule,
    SolverReport,
    Stage,
    Strategy,
    SumScatter,
)

FILE_FORMAT = "autopar.plan"
FILE_VERSION = 10
OLDEST_VERSION = 3
"""Files of which nothing but what was added since is missing."""
_ADVICE = "correct it, or plan again and save anew"
_CLUSTER_FORMAT = "autopar-cluster"

_Whole = Annotated[int, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]
_Number = Annotated[float, Meta(ge=0)]
_Pairs = tuple[tuple[_Whole, _Whole], ...]
_Entry = TypeVar("_Entry", bound=Hashable)


# ------------------------------------------------------------------------------------------------- what the file holds


class _LayoutEntry(Struct, forbid_unknown_fields=True):
    dims: tuple[Axes, ...]
    partial: Axes = ()


class _StrategyEntry(Struct, forbid_unknown_fields=True):
    factors: tuple[Axes, ...]
    passing: Axes = ()


class _MeshEntry(Struct, forbid_unknown_fields=True):
    axis_names: Axes
    axis_sizes: tuple[_Count, ...]


class _StageEntry(Struct, forbid_unknown_fields=True):
    mesh: _MeshEntry
    homes: _Pairs
    copies: _Pairs
    strategies: _Pairs
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


class _PredictionEntry(Struct, forbid_unknown_fields=True):
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


class _SolverEntry(Struct, forbid_unknown_fields=True):
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


class _PlanEntry(Struct, forbid_unknown_fields=True, kw_only=True):
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
    stages: Annotated[tuple[_StageEntry, ...], Meta(min_length=1)]
    in_paths: tuple[str, ...]
    in_layouts: tuple[_Whole, ...]
    out_paths: tuple[str, ...]
    out_layouts: tuple[_Whole, ...]
    prediction: _PredictionEntry
    solver: _SolverEntry


class _File(Struct, forbid_unknown_fields=True):
    format: str
    version: int
    plan: _PlanEntry


# ------------------------------------------------------------------------------------------------------------- writing


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan as versioned JSON; who reads the path meanwhile sees the old file or the new one, never a part.

    Raises ``PlanError`` if the file cannot be written, or if :func:`load_plan` would refuse it (a figure that is not
    finite, an axis that the mesh does not have); then an existing file stays as it was.
    """
    try:
        data = encode_plan(plan)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"{path}: this plan cannot be written as JSON ({error}); nothing was written") from error
    try:
        readable = decode_plan(path, data) == plan
    except PlanError as error:
        raise PlanError(f"this plan is not sound and was not written: {error}") from error
    if not readable:
        raise PlanError(f"{path}: this plan does not survive being written (a field of an unknown kind?); not written")
    try:
        write_atomically(path, data)
    except OSError as error:
        raise PlanError(f"cannot write plan file {path}: {error.strerror or error}; check the path") from error


class _Table(Generic[_Entry]):
    """Distinct entries in the order of their first use, and the place of each."""

    def __init__(self) -> None:
        self._places: dict[_Entry, int] = {}

    def place(self, entry: _Entry) -> int:
        return self._places.setdefault(entry, len(self._places))

    def pairs(self, mapping: Mapping[int, _Entry]) -> _Pairs:
        return tuple((index(key), self.place(entry)) for key, entry in mapping.items())

    def entries(self) -> Iterable[_Entry]:
        return self._places


def encode_plan(plan: Plan) -> bytes:
    """The text of the file, one line for each field of the plan."""
    layouts: _Table[Layout] = _Table()
    strategies: _Table[Strategy] = _Table()
    stages = tuple(
        _StageEntry(
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
    stored = _PlanEntry(
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
    encode = msgspec.json.encode
    lines = b",\n".join(encode(name) + b": " + encode(value) for name, value in msgspec.structs.asdict(stored).items())
    return b'{"format": %s, "version": %d, "plan": {\n%s\n}}\n' % (encode(FILE_FORMAT), FILE_VERSION, lines)


def _from_prediction(prediction: Prediction) -> _PredictionEntry:
    # float() and index() turn the scalars of NumPy, which planners compute with, into plain numbers.
    memory = prediction.memory
    return _PredictionEntry(
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


def _from_solver(solver: SolverReport) -> _SolverEntry:
    return _SolverEntry(
        variables=index(solver.variables),
        variables_after_reduction=index(solver.variables_after_reduction),
        seconds=float(solver.seconds),
        gap=None if solver.gap == math.inf else float(solver.gap),
        meshes_tried=solver.meshes_tried,
    )


# ------------------------------------------------------------------------------------------------------------- reading


def load_plan(path: str | Path) -> Plan:
    """The plan in a file that :func:`save_plan` wrote.

    Raises ``PlanError`` naming the file, the field and what to do for anything missing, unknown, ill-typed, out of
    range, or without sense on the plan's mesh.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read plan file {path}: {error.strerror or error}; check the path") from error
    return decode_plan(path, data)


def decode_plan(path: str | Path, data: bytes) -> Plan:
    """The plan of such a text; ``path`` is what errors call it.  Raises ``PlanError`` as :func:`load_plan` does."""
    try:
        _check_header(path, msgspec.json.decode(data, type=Header))
        stored = msgspec.json.decode(data, type=_File).plan
    except msgspec.ValidationError as error:
        raise PlanError(f"{path}: {error}; {_ADVICE}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(
            f"{path} is not complete JSON ({error}), so it is no plan file, or one that was cut short; give a file "
            "that Plan.save wrote, or plan again and save anew"
        ) from error
    return _Reader(path, stored).plan()


def _check_header(path: str | Path, header: Header) -> None:
    if header.format == _CLUSTER_FORMAT:
        raise PlanError(f"{path} describes a cluster, not a plan; read it with Cluster.from_file, and give a plan here")
    if header.format != FILE_FORMAT:
        raise PlanError(
            f"{path}: $.format is {header.format!r}, not {FILE_FORMAT!r}; this is not a plan file, give one that "
            "Plan.save wrote"
        )
    if header.version > FILE_VERSION:
        raise PlanError(
            f"{path}: $.version is {header.version}, written by a newer release, and this one reads {FILE_VERSION}; "
            "upgrade autopar, or plan again with this release"
        )
    if 0 < header.version < OLDEST_VERSION:
        raise PlanError(
            f"{path}: $.version is {header.version}, written by an older release, and this one reads {FILE_VERSION}; plan "
            "again with this release and save anew"
        )
    if not OLDEST_VERSION <= header.version <= FILE_VERSION:
        raise PlanError(
            f"{path}: $.version is {header.version}, and there is no such version (this release reads {FILE_VERSION}); "
            f"{_ADVICE}"
        )


class _Reader:
    """Turns the entries of one file into a plan, checking what the types cannot say."""

    def __init__(self, path: str | Path, stored: _PlanEntry) -> None:
        self._path = path
        self._stored = stored
        self._layouts = tuple(Layout(entry.dims, entry.partial) for entry in stored.layouts)
        self._strategies = tuple(Strategy(entry.factors, entry.passing) for entry in stored.strategies)

    def plan(self) -> Plan:
        stored = self._stored
        stages = tuple(self._stage(number, entry) for number, entry in enumerate(stored.stages))
        self._check_stages(stages)
        meshes = tuple(dict.fromkeys(stage.mesh for stage in stages))
        for number, use in enumerate(stored.prediction.collectives):
            self._check_axes(f"$.plan.prediction.collectives[{number}]", {"axes": use.axes}, meshes)
        return Plan(
            fingerprint=stored.fingerprint,
            jax_version=stored.jax_version,
            method=stored.method,
            cluster=stored.cluster,
            num_devices=stored.num_devices,
            stages=stages,
            in_paths=stored.in_paths,
            out_paths=stored.out_paths,
            in_layouts=self._ends("in", stored.in_paths, stored.in_layouts, meshes),
            out_layouts=self._ends("out", stored.out_paths, stored.out_layouts, meshes),
            prediction=_to_prediction(stored.prediction),
            solver=_to_solver(stored.solver),
            num_microbatches=stored.num_microbatches,
            schedule=stored.schedule,
            cuts=stored.cuts,
            order=stored.order,
            opening=Opening(stored.opening.pieces, stored.opening.leaves),
            remat=self._remat(),
            hosted=self._hosted(),
            shares=stored.shares,
        )

    def _check_stages(self, stages: tuple[Stage, ...]) -> None:
        """Stages, cuts and schedule go together, and stages share all their devices or none."""
        stored = self._stored
        self._check_shares(len(stages))
        if len(stored.cuts) != (0 if stored.shares else len(stages) - 1):
            raise self._error("$.plan.cuts", f"{len(stored.cuts)} cuts for {len(stages)} stages")
        if list(stored.cuts) != sorted(set(stored.cuts)):
            raise self._error("$.plan.cuts", f"{list(stored.cuts)} do not ascend")
        if (stored.schedule is Schedule.SINGLE) is (len(stages) > 1):
            raise self._error("$.plan.schedule", f"{stored.schedule.value!r} is no schedule of {len(stages)} stages")
        self._check_opening(len(stages))
        if (stored.schedule is Schedule.OWN) is not bool(stored.order):
            what = "no order" if not stored.order else "an order"
            raise self._error("$.plan.order", f"{what} stands there for the schedule {stored.schedule.value!r}")
        seen: dict[int, int] = {}
        for number, stage in enumerate(stages):
            place = f"$.plan.stages[{number}].devices"
            if len(stage.devices) != stage.mesh.size and (stage.devices or len(stages) > 1):
                raise self._error(
                    place, f"{len(stage.devices)} devices for mesh {stage.mesh} of one of {len(stages)} stages"
                )
            for device in stage.devices:
                if device >= stored.num_devices:
                    raise self._error(place, f"there is no device {device}, $.plan.num_devices is {stored.num_devices}")
                other = seen.setdefault(device, number)
                if stages[other].devices != stage.devices:
                    raise self._error(place, f"the device {device} stands in $.plan.stages[{other}] already")
                if stages[other].mesh != stage.mesh:
                    raise self._error(
                        f"$.plan.stages[{number}].mesh",
                        f"{stage.mesh} on the devices that are {stages[other].mesh} in $.plan.stages[{other}]",
                    )
            if len(set(stage.devices)) < len(stage.devices):
                raise self._error(place, f"a device stands there twice in {list(stage.devices)}")
        if len(stages) > 1:
            self._check_dealing([seen[stage.devices[0]] for stage in stages])

    def _check_shares(self, num_stages: int) -> None:
        """Shares, one for each stage, add up to the microbatches, and are dealt under their own schedule alone."""
        stored = self._stored
        if (stored.schedule is Schedule.SHARES) is not bool(stored.shares):
            what = "shares stand" if stored.shares else "no shares stand"
            raise self._error("$.plan.shares", f"{what} there for the schedule {stored.schedule.value!r}")
        if stored.shares and len(stored.shares) != num_stages:
            raise self._error("$.plan.shares", f"{len(stored.shares)} shares for {num_stages} stages")
        if stored.shares and sum(stored.shares) != stored.num_microbatches:
            raise self._error(
                "$.plan.shares", f"{list(stored.shares)} do not add up to the {stored.num_microbatches} microbatches"
            )

    def _check_opening(self, num_stages: int) -> None:
        """Only stages share loops, and only of loops that are shared are leaves cut, each once."""
        opening = self._stored.opening
        if opening.pieces > 1 and num_stages == 1:
            raise self._error("$.plan.opening.pieces", f"{opening.pieces} pieces of loops for a single stage")
        positions = [position for position, _, _ in opening.leaves]
        if positions and opening.pieces == 1:
            raise self._error("$.plan.opening.leaves", "leaves are cut, and no loop is")
        if positions != sorted(set(positions)):
            raise self._error("$.plan.opening.leaves", "the positions do not ascend")

    def _remat(self) -> LayerRemat:
        """Layers ascend from the first operator, and each has its choice."""
        stored = self._stored.remat
        if len(stored.starts) != len(stored.kinds):
            raise self._error(
                "$.plan.remat.kinds", f"{len(stored.kinds)} choices for the {len(stored.starts)} layers of starts"
            )
        if stored.starts[0] != 0 or list(stored.starts) != sorted(set(stored.starts)):
            raise self._error("$.plan.remat.starts", f"{list(stored.starts)} do not ascend from 0")
        return LayerRemat(stored.starts, stored.kinds)

    def _hosted(self) -> tuple[int, ...]:
        """Positions of inputs, ascending, of a plan on one mesh."""
        hosted = self._stored.hosted
        if hosted and len(self._stored.stages) > 1:
            raise self._error("$.plan.hosted", "of a plan of several stages no state lies in the memory of the hosts")
        if list(hosted) != sorted(set(hosted)):
            raise self._error("$.plan.hosted", f"{list(hosted)} do not ascend")
        if hosted and hosted[-1] >= len(self._stored.in_paths):
            raise self._error("$.plan.hosted", f"there is no input {hosted[-1]} in $.plan.in_paths")
        return hosted

    def _check_dealing(self, homes: list[int]) -> None:
        """Stages share meshes as their schedule has it; ``homes`` is, for each, the first stage on its mesh."""
        schedule, meshes = self._stored.schedule, len(set(homes))
        wanted = list(range(len(homes)))
        if schedule is Schedule.OWN:
            wanted = self._homes_of_order(len(homes))
        elif schedule is Schedule.INTERLEAVED_ONE_F_ONE_B and meshes < len(homes):
            wanted = [number % meshes for number in wanted]
        elif schedule is Schedule.INTERLEAVED_ONE_F_ONE_B:
            wanted = []  # it has several stages on a mesh
        if homes != wanted:
            raise self._error(
                "$.plan.stages",
                f"{len(homes)} stages on {meshes} meshes are not spread as the schedule {schedule.value!r} has it",
            )

    def _homes_of_order(self, num_stages: int) -> list[int]:
        """For each stage the first that shares its row of the order, which every stage is in, and in one alone."""
        row_of: dict[int, int] = {}
        for row, entries in enumerate(self._stored.order):
            for position, (_, stage, number) in enumerate(entries):
                place = f"$.plan.order[{row}][{position}]"
                if stage >= num_stages or number >= self._stored.num_microbatches:
                    raise self._error(place, f"there is no microbatch {number} of a stage {stage}")
                if row_of.setdefault(stage, row) != row:
                    raise self._error(place, f"the stage {stage} stands in $.plan.order[{row_of[stage]}] already")
        if missing := [stage for stage in range(num_stages) if stage not in row_of]:
            raise self._error("$.plan.order", f"the stage {missing[0]} stands nowhere")
        first: dict[int, int] = {}
        return [first.setdefault(row_of[stage], stage) for stage in range(num_stages)]

    def _stage(self, number: int, entry: _StageEntry) -> Stage:
        place = f"$.plan.stages[{number}]"
        try:
            mesh = Mesh(entry.mesh.axis_names, entry.mesh.axis_sizes)
        except ClusterError as error:
            raise self._error(f"{place}.mesh", str(error)) from error
        devices = self._stored.num_devices
        if mesh.size > devices or (mesh.size != devices and len(self._stored.stages) == 1 and not entry.devices):
            raise self._error(f"{place}.mesh", f"{mesh} has {mesh.size} devices, and $.plan.num_devices is {devices}")
        return Stage(
            mesh,
            self._mapping(f"{place}.homes", entry.homes, self._layouts, mesh),
            self._mapping(f"{place}.copies", entry.copies, self._layouts, mesh),
            self._mapping(f"{place}.strategies", entry.strategies, self._strategies, mesh),
            entry.devices,
            entry.sum_scatter,
            self._residuals(f"{place}.hosted", entry.hosted),
        )

    def _residuals(self, place: str, hosted: tuple[int, ...]) -> tuple[int, ...]:
        """Values of a stage, ascending; whether they are kept for its backward pass the step says."""
        if hosted and len(self._stored.stages) == 1:
            raise self._error(place, "a plan of one stage keeps nothing of a microbatch from one program to another")
        if list(hosted) != sorted(set(hosted)):
            raise self._error(place, f"{list(hosted)} do not ascend")
        return hosted

    def _mapping(self, place: str, pairs: _Pairs, table: tuple[_Entry, ...], mesh: Mesh) -> dict[int, _Entry]:
        """The pairs [id, place in the table] as a mapping; no id twice."""
        # Each distinct entry is checked once, where it is first used: tens of thousands of values share a few.
        first_use = {}
        for position in range(len(pairs) - 1, -1, -1):
            first_use[pairs[position][1]] = position
        for entry, position in first_use.items():
            self._check_entry(f"{place}[{position}][1]", entry, table, (mesh,))
        mapping = {key: table[entry] for key, entry in pairs}
        if len(mapping) < len(pairs):
            seen: set[int] = set()
            for position, (key, _) in enumerate(pairs):
                if key in seen:
                    raise self._error(f"{place}[{position}][0]", f"the id {key} stands there twice")
                seen.add(key)
        return mapping

    def _ends(
        self, side: str, paths: tuple[str, ...], entries: tuple[int, ...], meshes: tuple[Mesh, ...]
    ) -> tuple[Layout, ...]:
        """Layouts of the inputs or of the outputs, one for each path."""
        if len(paths) != len(entries):
            raise self._error(
                f"$.plan.{side}_layouts", f"{len(entries)} layouts for {len(paths)} paths in $.plan.{side}_paths"
            )
        for entry in dict.fromkeys(entries):
            self._check_entry(f"$.plan.{side}_layouts[{entries.index(entry)}]", entry, self._layouts, meshes)
        return tuple(self._layouts[entry] for entry in entries)

    def _check_entry(self, place: str, entry: int, table: Sequence[Any], meshes: tuple[Mesh, ...]) -> None:
        """The place in the table exists, and what stands there has sense on one of the meshes."""
        name = "layouts" if table is self._layouts else "strategies"
        if entry >= len(table):
            raise self._error(place, f"{entry} is no place in $.plan.{name}, which has {len(table)} entries")
        found, here, used_at = table[entry], f"$.plan.{name}[{entry}]", f", used at {place}"
        if isinstance(found, Layout):
            groups = {f"dims[{dim}]": axes for dim, axes in enumerate(found.dims)} | {"partial": found.partial}
            self._check_axes(here, groups, meshes, used_at)
            return
        # A barrier cuts each of its operands for itself; that nothing else does is checked where operators are known.
        for number, axes in enumerate(found.factors):
            self._check_axes(here, {f"factors[{number}]": axes, "passing": found.passing}, meshes, used_at)

    def _check_axes(self, place: str, groups: Mapping[str, Axes], meshes: tuple[Mesh, ...], used_at: str = "") -> None:
        """Every axis is one of a mesh and is used once, and each group stands in mesh order."""
        complaints = [_complaint(groups, mesh) for mesh in meshes]
        if all(complaints):
            field, what = next(complaint for complaint in complaints if complaint)
            raise self._error(f"{place}.{field}", f"{what}{used_at}")

    def _error(self, place: str, what: str) -> PlanError:
        return PlanError(f"{self._path}: {place}: {what}; {_ADVICE}")


def _complaint(groups: Mapping[str, Axes], mesh: Mesh) -> tuple[str, str] | None:
    """(field, what is wrong with its axes on this mesh), if anything is."""
    used: set[str] = set()
    for field, axes in groups.items():
        for axis in axes:
            if axis not in mesh.axis_names:
                return field, f"there is no axis {axis!r} in mesh {mesh}"
            if axis in used:
                return field, f"the axis {axis!r} is used twice"
            used.add(axis)
        if list(axes) != sorted(axes, key=mesh.axis_names.index):
            return field, f"the axes {list(axes)} are not in the order of mesh {mesh}"
    return None


def _to_prediction(entry: _PredictionEntry) -> Prediction:
    fields = msgspec.structs.asdict(entry)
    fields["collectives"] = tuple(CollectiveUse(**msgspec.structs.asdict(use)) for use in entry.collectives)
    fields["memory"] = Memory(**msgspec.structs.asdict(entry.memory))
    return Prediction(**fields)


def _to_solver(entry: _SolverEntry) -> SolverReport:
    gap = math.inf if entry.gap is None else entry.gap
    return SolverReport(**(msgspec.structs.asdict(entry) | {"gap": gap}))
