"""May what stands in the file of a plan be believed, and which plan is it?

A file comes from anywhere: after its types every number is held against the others.  A place in a table must exist, a
layout must make sense on the mesh that it is for, stages must share devices as their schedule has it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autopar.cluster import Mesh
from autopar.errors import ClusterError, PlanError
from autopar.plan import (
    Axes,
    CollectiveUse,
    LayerRemat,
    Layout,
    Memory,
    Opening,
    Plan,
    Prediction,
    Schedule,
    SolverReport,
    Stage,
    Strategy,
)
from autopar.plan_records import Pairs, PlanEntry, PredictionEntry, SolverEntry, StageEntry

ADVICE = "correct it, or plan again and save anew"
_Entry = TypeVar("_Entry", bound=Hashable)


def believed(path: str | Path, stored: PlanEntry) -> Plan:
    """The plan of such a file; raises ``PlanError`` naming the field of whatever has no sense beside the others."""
    return _Reader(path, stored).plan()


class _Reader:
    """Turns the entries of one file into a plan, checking what the types cannot say."""

    def __init__(self, path: str | Path, stored: PlanEntry) -> None:
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

    def _stage(self, number: int, entry: StageEntry) -> Stage:
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

    def _mapping(self, place: str, pairs: Pairs, table: tuple[_Entry, ...], mesh: Mesh) -> dict[int, _Entry]:
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
        return PlanError(f"{self._path}: {place}: {what}; {ADVICE}")


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


def _to_prediction(entry: PredictionEntry) -> Prediction:
    fields = msgspec.structs.asdict(entry)
    fields["collectives"] = tuple(CollectiveUse(**msgspec.structs.asdict(use)) for use in entry.collectives)
    fields["memory"] = Memory(**msgspec.structs.asdict(entry.memory))
    return Prediction(**fields)


def _to_solver(entry: SolverEntry) -> SolverReport:
    gap = math.inf if entry.gap is None else entry.gap
    return SolverReport(**(msgspec.structs.asdict(entry) | {"gap": gap}))
