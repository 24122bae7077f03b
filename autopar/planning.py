"""One door to all planners: from a traced program and the user's demands to a Plan.

This is where the demands of the API (method, cluster, memory, mesh, constraints) become a task for a planner, and the
planner's answer becomes a Plan with paths and predictions.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autopar.cluster import AXIS_NAMES, Cluster, Mesh
from autopar.errors import BudgetError, PlanError
from autopar.graph.build import build_graph
from autopar.graph.fingerprint import fingerprint
from autopar.graph.ir import Graph
from autopar.graph.roles import Role, Roles
from autopar.graph.tracing import TracedProgram
from autopar.graph.wishes import LeafWishes, Origin, Wishes, wishes_of
from autopar.inter_op.accumulate import accumulated
from autopar.inter_op.alone import each_alone, twin_of
from autopar.inter_op.terms import BatchCoupling, Cut, MicrobatchRng
from autopar.inter_op.examples import CoupledBatchError, examples_of
from autopar.intra_op.restrict import Restriction
from autopar.intra_op.search import Found, Task, search
from autopar.methods import IntraOp, Method, Subject, mesh_of, method_of
from autopar.plan import Layout, Plan
from autopar.schedule.spmd import output_layouts
from autopar.user_shardings import HOW_TO_IGNORE, UserDemands, UserShardings, user_demands, with_wishes
from autopar.wording import slashed

MOST_DOUBLINGS = 6
"""The planner itself cuts a batch into 2⁶ microbatches at most."""


@dataclass(frozen=True)
class Demands:
    """What the user asks of a plan (see :func:`autopar.parallelize`)."""

    method: str | Method = "auto"
    memory_per_device: float | None = None
    mesh_shape: tuple[int, ...] | None = None
    constraints: Mapping[str, PartitionSpec] = field(default_factory=dict)
    solver_seconds: float = 60.0
    donate_state: bool = True
    num_microbatches: int | None = None
    user_shardings: UserShardings = UserShardings.RESPECT
    batch_coupling: BatchCoupling = BatchCoupling.REFUSE
    rng: MicrobatchRng = MicrobatchRng.EXACT

    def cut(self, count: int) -> Cut:
        """The batch cut into ``count`` microbatches on these terms."""
        return Cut(count, self.batch_coupling, self.rng)


@dataclass(frozen=True)
class Subjected:
    """A traced program with its roles and its graph for one platform: what all planners of it share."""

    program: TracedProgram
    roles: Roles
    graph: Graph
    fingerprint: str
    wishes: Wishes = field(default_factory=Wishes)
    """Shardings in the user's code, unless they are to be ignored."""
    leaves: LeafWishes | None = None
    """Shardings that the arguments carry; None: all shardings in the user's code are ignored."""
    num_microbatches: int = 1
    undivided: Subjected | None = None
    """Where the batch is cut: the step as it was; ``program`` and ``graph`` then run microbatch by microbatch."""
    alone: str = ""
    """Why each microbatch is treated as a batch of its own, where it is."""
    retrace: Callable[[int], TracedProgram] | None = None
    """The same function on a batch of another size; None: it is not at hand."""
    coupling: str = ""
    """Why the batch was not cut into microbatches, where memory would have asked for it."""

    @property
    def donated(self) -> frozenset[int]:
        """Positions of the state leaves."""
        return frozenset(self.roles.leaves(Role.STATE))

    @property
    def names(self) -> dict[int, str]:
        """Paths of the input values."""
        return dict(zip(self.graph.inputs, self.program.in_paths, strict=True))


def subject_of(
    program: TracedProgram,
    roles: Roles,
    platform: str,
    leaves: LeafWishes | None = None,
    retrace: Callable[[int], TracedProgram] | None = None,
) -> Subjected:
    """Build the graph and the fingerprint of a traced program.

    ``leaves`` are the shardings that the arguments carry; None: those and the ones in the program are ignored.
    """
    graph = build_graph(program.jaxpr, platform=platform)
    if leaves is None:
        return Subjected(program, roles, graph, fingerprint(program), retrace=retrace)
    wishes = wishes_of(graph, program.in_paths, roles.leaves(Role.STATE), leaves)
    return Subjected(program, roles, graph, fingerprint(program, wishes.texts), wishes, leaves, retrace=retrace)


def microbatched(subject: Subjected, cut: Cut, platform: str) -> Subjected:
    """The same step run as microbatches, one after the other; plans of both bear the same fingerprint unless numbers differ.

    Raises :class:`~autopar.errors.PlanError` where the batch cannot be cut so.
    """
    count = cut.count
    if count == 1:
        return subject
    size, batch = subject.roles.batch_size, subject.roles.leaves(Role.BATCH)
    if size is None:
        raise PlanError(
            f"num_microbatches={count}, but no argument was found to be the batch; name it with batch_argnums="
        )
    if size % count:
        raise PlanError(f"num_microbatches={count} does not divide the batch of {size} examples")
    alone = ""
    try:
        examples = examples_of(subject.graph, batch, subject.roles.leaves(Role.STATE), count, cut.rng)
        program = accumulated(subject.program, examples, batch)
    except CoupledBatchError as error:
        if cut.coupling is BatchCoupling.REFUSE or subject.retrace is None:
            raise
        alone = error.reason
        retrace = functools.partial(subject.retrace, size // count)
        program = each_alone(twin_of(subject.program, subject.graph, retrace, platform), batch, cut)
    graph = build_graph(program.jaxpr, platform=platform)
    wishes = subject.wishes
    if subject.leaves is not None:
        wishes = wishes_of(graph, program.in_paths, subject.roles.leaves(Role.STATE), subject.leaves)
    return replace(
        subject,
        program=program,
        graph=graph,
        fingerprint=fingerprint_of_cut(subject, cut),
        wishes=wishes,
        num_microbatches=count,
        undivided=subject,
        alone=alone,
    )


def fingerprint_of_cut(subject: Subjected, cut: Cut) -> str:
    """The fingerprint of the step whose batch is cut so: that of the whole one where the numbers are."""
    text = cut.text
    return subject.fingerprint if not text else hashlib.sha256(f"{subject.fingerprint} {text}".encode()).hexdigest()


def demands_of_user(subject: Subjected, cluster: Cluster, demands: Demands) -> UserDemands:
    """What shardings in the user's code leave of meshes and layouts (see :mod:`autopar.user_shardings`)."""
    if demands.user_shardings is UserShardings.IGNORE:
        return UserDemands()
    method = method_of(demands.method)
    is_free = isinstance(method, IntraOp)
    shape = demands.mesh_shape or (method.mesh_shape if isinstance(method, IntraOp) else None)
    return user_demands(subject.wishes, subject.graph, cluster, mesh_shape=shape, is_free=is_free)


def said_of_inputs(subject: Subjected, user: UserDemands, demands: Demands) -> dict[int, str]:
    """What explanations say of inputs (by position) of which the user has demanded a layout, and where."""
    position_of = {value: position for position, value in enumerate(subject.graph.inputs)}
    said = {}
    for wish in sorted(user.wishes, key=lambda wish: wish.origin is not Origin.CODE):
        if wish.origin is Origin.CODE and wish.source in position_of:
            said[position_of[wish.source]] = f"used as you asked: {wish.place.rsplit('/', 1)[-1]}"
        elif wish.origin is Origin.NAMES:
            said[position_of[wish.value]] = f"you asked for it: names {wish.said}"
        elif wish.origin is Origin.PLACED:
            said.setdefault(position_of[wish.value], "you asked for it: it was passed so")
    for pattern in demands.constraints:
        for position, path in enumerate(subject.program.in_paths):
            if path_matches(pattern, path):
                said[position] = f"you asked for it: constraints[{pattern!r}]"
    return said


def make_plan(
    subject: Subjected,
    cluster: Cluster,
    demands: Demands,
    report_progress: Callable[[str], None] = lambda message: None,
) -> tuple[Subjected, Plan, Found]:
    """The plan of a program on a cluster, with the program that it is a plan of and the planner's own records.

    Unless the number of microbatches is demanded, the batch stays whole if the fastest plan then keeps the memory
    budget; else cuts into 2, 4, 8, … are planned as well, until one is no longer squeezed, and the fastest is taken.

    Raises :class:`~autopar.errors.PlanError` when a demand cannot be met.
    """
    subject = subject.undivided or subject
    report_progress("planning the whole batch at once")
    asked = demands.num_microbatches
    if asked is not None or not isinstance(method_of(demands.method), IntraOp):
        return _plan_in(asked or 1, subject, cluster, demands, report_progress)
    search = _MicrobatchSearch(subject, cluster, demands, report_progress)
    search.try_count(1)
    counts = _counts(subject.roles.batch_size)
    if search.best is None and len(counts) > 1:
        search.try_count(counts[-1])  # if the smallest microbatches do not fit, nothing does
    if search.best is not None and search.needs_more:
        for count in counts[1:]:
            if search.is_coupled or not search.try_count(count):
                break
    return search.result()


class _MicrobatchSearch:
    """Owns the best plan over several numbers of microbatches, and what spoke against others."""

    def __init__(
        self, subject: Subjected, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
    ) -> None:
        self._subject = subject
        self._rest = (cluster, demands, report_progress)
        self._refusal: BudgetError | None = None
        self._coupling = ""
        self.best: tuple[Subjected, Plan, Found] | None = None

    @property
    def is_coupled(self) -> bool:
        """Whether the batch turned out not to be cuttable."""
        return bool(self._coupling)

    @property
    def needs_more(self) -> bool:
        """Whether memory kept the planner from the fastest plan of the whole batch."""
        return self._refusal is not None or (self.best is not None and self.best[2].is_squeezed)

    def try_count(self, count: int) -> bool:
        """Plan for this many microbatches; whether more of them might still be faster."""
        try:
            found = _plan_in(count, self._subject, *self._rest)
        except BudgetError as error:
            self._refusal = self._refusal or error
            return True
        except CoupledBatchError as error:
            self._coupling = str(error)
            return False
        if self.best is None or found[1].step_seconds < self.best[1].step_seconds:
            self.best = found
        return found[2].is_squeezed

    def result(self) -> tuple[Subjected, Plan, Found]:
        if self.best is not None:
            return replace(self.best[0], coupling=self._coupling), *self.best[1:]
        assert self._refusal is not None
        raise self._refusal if not self._coupling else BudgetError(f"{self._refusal} Besides, {self._coupling}.")


def _counts(batch_size: int | None) -> list[int]:
    """Numbers of microbatches that the planner itself tries."""
    counts = [1 << bit for bit in range(MOST_DOUBLINGS + 1)]
    return [count for count in counts if batch_size is not None and batch_size % count == 0] or [1]


def _plan_in(
    count: int, subject: Subjected, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
) -> tuple[Subjected, Plan, Found]:
    if count > 1:
        report_progress(f"planning {count} microbatches")
    one = microbatched(subject, demands.cut(count), cluster.device.platform.value)
    return one, *_plan_on(one, cluster, demands, report_progress)


def _plan_on(
    subject: Subjected, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
) -> tuple[Plan, Found]:
    method = method_of(demands.method)
    meshes = method.meshes(cluster)
    if demands.mesh_shape is not None:
        wanted = mesh_of(demands.mesh_shape, cluster)
        meshes = (wanted,) if isinstance(method, IntraOp) else tuple(mesh for mesh in meshes if mesh == wanted)
        if not meshes:
            raise PlanError(f"method={method.name!r} cannot use mesh_shape={demands.mesh_shape}; leave one of them out")
    user = demands_of_user(subject, cluster, demands)
    meshes = _meshes_of_user(meshes, user, method)
    state = subject.roles.leaves(Role.STATE)
    examples_dim = 0 if subject.num_microbatches == 1 else 1
    view = Subject(subject.graph, state, subject.roles.leaves(Role.BATCH), examples_dim)
    donated = subject.donated if demands.donate_state else frozenset()
    constraints = _without_axes_of_one(demands)
    meshes = _meshes_with_names(meshes, constraints)
    is_asked = bool(demands.constraints) or user.meshes is not None
    task = Task(
        graph=subject.graph,
        state_pairs=subject.roles.state_pairs,
        donated=donated,
        cluster=cluster,
        meshes=meshes,
        budget_bytes=float(demands.memory_per_device or cluster.per_device_memory_bytes),
        restriction=lambda mesh: with_wishes(
            _with_constraints(method.restriction(view, mesh), subject, constraints, mesh),
            user,
            subject.graph,
            mesh,
        ),
        batch=view.batch if isinstance(method, IntraOp) and not is_asked else (),
        examples_dim=examples_dim,
        solver_seconds=demands.solver_seconds,
        names=subject.names,
        report_progress=report_progress,
        separate=frozenset(wish.value for wish in user.wishes if wish.origin is Origin.CODE),
    )
    found = search(task)
    return plan_of(subject, cluster, method.name, found), found


def plan_of(subject: Subjected, cluster: Cluster, method_name: str, found: Found) -> Plan:
    """The planner's answer as plain data."""
    graph, stage = subject.graph, found.stage
    layouts = tuple(stage.home(value, len(graph.values[value].shape)) for value in graph.inputs)
    return Plan(
        fingerprint=subject.fingerprint,
        jax_version=jax.__version__,
        method=method_name,
        cluster=cluster.name,
        num_devices=cluster.num_devices,
        stages=(stage,),
        in_paths=subject.program.in_paths,
        out_paths=subject.program.out_paths,
        in_layouts=layouts,
        out_layouts=output_layouts(graph, stage, subject.roles.state_pairs),
        prediction=found.prediction,
        solver=found.solver,
        num_microbatches=subject.num_microbatches,
    )


# --------------------------------------------------------------------------------------------- the user's constraints


def _meshes_of_user(meshes: tuple[Mesh, ...], user: UserDemands, method: Method) -> tuple[Mesh, ...]:
    """Meshes that the user's shardings leave; the free method takes any, a hand-made one has its own."""
    if user.meshes is None:
        return meshes
    if isinstance(method, IntraOp):
        return user.meshes
    common = tuple(mesh for mesh in meshes if mesh in user.meshes)
    if not common:
        said = " or ".join(map(str, user.meshes))
        raise PlanError(
            f"method={method.name!r} cannot use the mesh {said} of the shardings in the code, its own are "
            f'{" or ".join(map(str, meshes))}; use method="auto", {HOW_TO_IGNORE}'
        )
    return common


def _meshes_with_names(meshes: tuple[Mesh, ...], constraints: Mapping[str, PartitionSpec]) -> tuple[Mesh, ...]:
    """Meshes that have every axis that the constraints name.

    The names of axes are ours to give, so a user's name may stand for either axis of a mesh; the ordered
    factorisations cover both, for in each the sizes are exchanged.
    """
    named = {axis for spec in constraints.values() for entry in spec for axis in _axes_of(entry)}
    fitting = tuple(mesh for mesh in meshes if named <= set(mesh.axis_names))
    if not fitting:
        raise PlanError(
            f"the constraints name the mesh axes {sorted(named)}, but the meshes of this method have "
            f"{sorted({name for mesh in meshes for name in mesh.axis_names})}"
        )
    return fitting


def _without_axes_of_one(demands: Demands) -> dict[str, PartitionSpec]:
    """The constraints without the axes that the demanded mesh shape gives size 1, which cut nothing and are left out."""
    shape = demands.mesh_shape or ()
    ones = {name for name, size in zip(AXIS_NAMES, shape, strict=False) if size == 1}

    def rest(entry: Any) -> Any:
        return tuple(axis for axis in _axes_of(entry) if axis not in ones) or None

    return {
        pattern: PartitionSpec(*map(rest, spec))
        if ones & {axis for entry in spec for axis in _axes_of(entry)}
        else spec
        for pattern, spec in demands.constraints.items()
    }


def _axes_of(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _with_constraints(
    restriction: Restriction, subject: Subjected, constraints: Mapping[str, PartitionSpec], mesh: Mesh
) -> Restriction:
    pinned = dict(restriction.pinned)
    names = subject.names
    for pattern, spec in constraints.items():
        matches = [value for value, path in names.items() if path_matches(pattern, path)]
        if not matches:
            raise PlanError(_no_match(pattern, names.values()))
        for value in matches:
            rank = len(subject.graph.values[value].shape)
            if len(spec) > rank:
                raise PlanError(
                    f"constraint {pattern!r}: {spec} has more entries than {names[value]} has dimensions ({rank})"
                )
            layout = _layout_of(pattern, spec, rank, mesh)
            if pinned.get(value, layout) != layout:
                raise PlanError(
                    f"constraint {pattern!r} wants {names[value]} as {layout}, which collides with {pinned[value]} "
                    "that another constraint or the method demands"
                )
            pinned[value] = layout
    return replace(restriction, pinned=pinned, names=names)


def _layout_of(pattern: str, spec: PartitionSpec, rank: int, mesh: Mesh) -> Layout:
    """The layout that a spec of at most ``rank`` entries says, refused where no layout can say the same."""
    entries = [_axes_of(entry) for entry in spec] + [()] * (rank - len(spec))
    said = [axis for axes in entries for axis in axes]
    twice = sorted({axis for axis in said if said.count(axis) > 1})
    if twice:
        raise PlanError(
            f"constraint {pattern!r}: {spec} names the mesh axis {twice[0]!r} twice; an axis cuts one dimension"
        )
    for axes in entries:
        in_order = tuple(name for name in mesh.axis_names if name in axes)
        if axes != in_order:
            raise PlanError(
                f"constraint {pattern!r}: {spec} cuts a dimension by {axes}; axes of one dimension stand in the "
                f"order of the mesh, major to minor: write {in_order}"
            )
    return Layout(tuple(entries))


def _no_match(pattern: str, paths: Any) -> str:
    import difflib

    leaves = [slashed(path) for path in paths]
    close = difflib.get_close_matches(pattern.replace("*", ""), leaves, n=3, cutoff=0.3) or leaves[:3]
    return f"constraint {pattern!r} matches no argument leaf; leaves are named like {', '.join(close)}"


def path_matches(pattern: str, path: str) -> bool:
    """Whether a leaf path matches a glob: ``*`` within a name, ``**`` over any number of names."""
    expression = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    return re.fullmatch(expression, slashed(path)) is not None
