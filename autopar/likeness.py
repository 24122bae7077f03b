"""Where does the state lie by another step's plan, and what does that leave to this one?

An evaluation step takes the state, or a part of it, as training left it: it shall stay where it lies.  Let the leaves of the
two calls be paths, an argument's name and then one key per step down.  A leaf of this call *is* a leaf ℓ of the other one if
both have the same shape and dtype and

    the same path,   or   all of its path but the argument's name is the end of ℓ's path        (``predict(state.params, x)``)

and of several such ℓ the one with the shortest path, for the moments of an optimizer bear the names of its parameters.

    one mesh     the mesh is the other plan's, and leaves have its layouts; everything else is planned
    a pipeline   so are the devices and the mesh of each stage, and cuts are such that as few bytes as possible of the
                 leaves are wanted on another stage than where they lie
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cluster import AXIS_NAMES, Cluster, Mesh
from autopar.graph.ir import Graph
from autopar.graph.roles import Role, Roles
from autopar.graph.tracing import Keys, TracedProgram
from autopar.inter_op.arranged import StageDemands
from autopar.inter_op.crossings import boundaries
from autopar.inter_op.looped import Looped
from autopar.inter_op.placing import first_readers
from autopar.inter_op.stages import leaves_of
from autopar.intra_op.restrict import Restriction
from autopar.plan import Layout, Opening, Plan
from autopar.schedule.reshard import divides
from autopar.schedule.stage_program import StageProgram


@dataclass(frozen=True, eq=False)
class Likeness:
    """A step that has a plan: the leaves of its arguments with their roles, and ``stage_of`` those of a pipeline (else 0)."""

    plan: Plan
    keys: tuple[Keys, ...] = field(repr=False)
    types: tuple[tuple[tuple[int, ...], str], ...] = field(repr=False)
    roles: Roles = field(repr=False)
    stage_of: Mapping[int, int] = field(repr=False)
    written: Likeness | None = field(default=None, repr=False)
    """Where loops over layers are cut: the step with its leaves whole, of which nothing is known but which they are."""

    def opening_of(self, program: TracedProgram) -> Opening:
        """How the loops of another step as it was written, and those leaves that are cut here, are to be cut as here."""
        opening = self.plan.opening
        if self.written is None:
            return opening
        cut = {position: (dim, count) for position, dim, count in opening.leaves}
        found = self.written.matches(program.in_keys, types_of(program))
        here = [(position, *cut[known]) for position, known in sorted(found.items()) if known in cut]
        return replace(opening, leaves=tuple(here))

    @cached_property
    def _by_tail(self) -> dict[tuple[Keys, tuple[int, ...], str], int]:
        """The leaf of the shortest path, the first of several, for every end of a path."""
        found: dict[tuple[Keys, tuple[int, ...], str], int] = {}
        for position in sorted(range(len(self.keys)), key=lambda k: len(self.keys[k])):
            if self.roles.roles[position] is not Role.BATCH:
                keys = self.keys[position]
                for start in range(1, len(keys)):
                    found.setdefault((keys[start:], *self.types[position]), position)
        return found

    @cached_property
    def key(self) -> Hashable:
        """Equal for steps that say the same of the same leaves."""
        meshes = tuple((str(stage.mesh), stage.devices) for stage in self.plan.stages)
        layouts = tuple(map(str, self.plan.in_layouts))
        return self.keys, self.types, meshes, layouts, tuple(sorted(self.stage_of.items())), self.plan.hosted

    def matches(self, keys: Sequence[Keys], types: Sequence[tuple[tuple[int, ...], str]]) -> dict[int, int]:
        """Position of this call's leaf → position of the other step's leaf that it is."""
        same = {key: position for position, key in enumerate(self.keys)}
        found = {}
        for position, (key, (shape, dtype)) in enumerate(zip(keys, types, strict=True)):
            known = same.get(key)
            if known is None or self.types[known] != (shape, dtype) or self.roles.roles[known] is Role.BATCH:
                known = self._by_tail.get((key[1:], shape, dtype)) if len(key) > 1 else None
            if known is not None:
                found[position] = known
        return found

    def batch_arguments(self, keys: Sequence[Keys], types: Sequence[tuple[tuple[int, ...], str]]) -> tuple[str, ...]:
        """Names of the arguments of which no leaf is one of the other step's state: they hold the batch, or keys."""
        known = {keys[position][0] for position in (self.written or self).matches(keys, types)}
        return tuple(dict.fromkeys(key[0] for key in keys if key[0] not in known))


def types_of(program: TracedProgram) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shape and dtype of each input."""
    return tuple((tuple(aval.shape), str(aval.dtype)) for aval in program.in_avals)


@dataclass(frozen=True, eq=False)
class AsThere:
    """What another step's plan says of this program's leaves, by position: their layouts, and on which stage they lie.

    ``hosted`` are positions of those that lie in the memory of the host.
    """

    plan: Plan
    layouts: Mapping[int, Layout]
    stages: Mapping[int, int]
    hosted: tuple[int, ...] = ()

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the axes of the one mesh, in the order of :data:`~autopar.cluster.AXIS_NAMES`."""
        mesh = self.plan.stages[0].mesh
        return tuple(mesh.axis_size(name) if name in mesh.axis_names else 1 for name in AXIS_NAMES)

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Of the stages."""
        return tuple(stage.devices for stage in self.plan.stages)

    def kept(self, base: Restriction, graph: Graph, positions: Mapping[int, int], mesh: Mesh) -> Restriction:
        """The restriction with the layouts of those values (by position in the step) that can lie so on a mesh."""
        layouts = {
            value: layout
            for value, position in positions.items()
            if (layout := self.layouts.get(position)) is not None
            and layout.axes <= set(mesh.axis_names)
            and divides(graph.values[value].shape, layout, mesh)
        }
        return replace(base, pinned={**base.pinned, **layouts})


def as_there(like: Likeness, program: TracedProgram) -> AsThere:
    """What the plan of another step says of this program."""
    found = like.matches(program.in_keys, types_of(program))
    return AsThere(
        like.plan,
        {position: like.plan.in_layouts[known] for position, known in found.items()},
        {position: like.stage_of.get(known, 0) for position, known in found.items()},
        tuple(sorted(position for position, known in found.items() if known in like.plan.hosted)),
    )


# -------------------------------------------------------------------------------------------------------- pipelines


class StageAsThere:
    """What is asked of a stage: the mesh of the other plan's stage, and its layouts of the leaves that lie there."""

    def __init__(self, there: AsThere, names: Sequence[str]) -> None:
        self._there, self._names = there, names

    def __call__(self, program: StageProgram, graph: Graph, cluster: Cluster) -> StageDemands:
        """A stage is that one of the other plan of which most bytes lie here."""
        there = self._there
        positions = leaves_of(program, graph)
        weight: dict[int, int] = {}
        for value, position in positions.items():
            if position in there.stages:
                stage = there.stages[position]
                weight[stage] = weight.get(stage, 0) + graph.values[value].size_bytes
        fitting = [n for n, stage in enumerate(there.plan.stages) if stage.mesh.size == cluster.num_devices]
        own = max((n for n in weight if n in fitting), key=lambda n: weight[n], default=fitting[0])
        mesh = there.plan.stages[own].mesh
        here = {value: position for value, position in positions.items() if there.stages.get(position) == own}
        names = {value: self._names[position] for value, position in positions.items()}

        def restriction(of: Mesh) -> Restriction:
            return there.kept(Restriction(names=names), graph, here, of)

        return StageDemands((mesh,), restriction, may_rename_axes=False)


def cuts_as_there(loop: Looped, state_pairs: Sequence[tuple[int, int]], there: AsThere) -> tuple[int, ...]:
    """Cuts into as many stages as the other plan has, such that leaves are first read where they lie.

    With c(i, s) the bytes of the leaves first read by forward operator i that lie elsewhere than on stage s, and x(p) the
    bytes that cross before operator p, the least (Σ c(i, stage of i), Σ x(cut)) over all ascending cuts, stage by stage.
    """
    count, graph = len(there.plan.stages), loop.graph
    found = boundaries(loop, state_pairs)
    length = len(found.flops)
    elsewhere = [[0] * count for _ in range(length)]
    for position, reader in first_readers(loop).items():
        if position in there.stages:
            for stage in range(count):
                if stage != there.stages[position]:
                    elsewhere[reader][stage] += graph.values[graph.inputs[position]].size_bytes
    nothing = math.inf, math.inf, ()
    best: list[tuple[float, float, tuple[int, ...]]] = [(0, 0.0, ())] + [nothing] * (count - 1)
    for operator in range(length):
        crossing = float(found.crossing_bytes[operator])
        entered = [nothing] + [(one[0], one[1] + crossing, (*one[2], operator)) for one in best[:-1]]
        if operator == 0:
            entered = [nothing] * count  # no stage is empty
        best = [
            (least[0] + elsewhere[operator][stage], *least[1:]) for stage, least in enumerate(map(min, best, entered))
        ]
    return best[-1][2]
