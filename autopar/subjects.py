"""What is planned, and what is asked of its plan: a traced program with its graph, and the user's demands.

A step may stand for itself, or be rewritten as a loop over its microbatches (:mod:`autopar.inter_op.accumulate`,
:mod:`autopar.inter_op.looped`); plans of either bear the fingerprint of the step as it was written.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace

from jax.sharding import PartitionSpec

from autopar.errors import PlanError
from autopar.graph.build import LoopKind, build_graph
from autopar.graph.fingerprint import fingerprint
from autopar.graph.idle_state import idle_until_update
from autopar.graph.ir import Graph, Operator, Phase
from autopar.graph.roles import Role, Roles
from autopar.graph.tracing import TracedProgram
from autopar.graph.wishes import LeafWish, LeafWishes, Wishes, wishes_of
from autopar.inter_op.accumulate import accumulated
from autopar.inter_op.alone import each_alone, twin_of
from autopar.inter_op.examples import CoupledBatchError, Examples, examples_of
from autopar.inter_op.looped import as_one_trip, with_open_branches
from autopar.inter_op.opened import MAY_BE_CUT, Opened, opened, opened_roles
from autopar.inter_op.remat import Rematerialising
from autopar.inter_op.shares import in_shares
from autopar.inter_op.stacks import Rows, layer_loops, stacks_of
from autopar.inter_op.terms import AccumulatorDtype, BatchCoupling, MicrobatchRng, Terms
from autopar.intra_op.on_mesh import Ground
from autopar.likeness import Likeness
from autopar.methods import Method
from autopar.plan import NO_REMAT, UNOPENED, LayerRemat, Offload, Opening, Plan, Remat, Schedule
from autopar.schedule.orders import OrderFunction
from autopar.schedule.spmd import Hosted, hosted_ends
from autopar.user_shardings import UserShardings


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
    stages: int | tuple[tuple[int, ...], ...] | None = None
    """Of a pipeline: how many stages, or the devices of each; None: the method's own."""
    schedule: Schedule | OrderFunction | None = None
    stages_per_mesh: int | None = None
    """Of stages that are dealt round: how many come to each mesh; None: the planner's choice."""
    batch_coupling: BatchCoupling = BatchCoupling.REFUSE
    rng: MicrobatchRng = MicrobatchRng.EXACT
    accumulator_dtype: AccumulatorDtype = AccumulatorDtype.FLOAT32
    like: Likeness | None = None
    """The step whose plan says where the state lies."""
    remat: Remat | None = None
    """What every layer computes again; None: the planner's choice."""
    offload: Offload | None = None
    """What lies in the memory of the hosts between steps; None: the planner's choice."""

    @property
    def key(self) -> Hashable:
        """Equal for equal demands."""
        constraints = tuple((pattern, str(spec)) for pattern, spec in self.constraints.items())
        like = None if self.like is None else self.like.key
        rest = (getattr(self, one.name) for one in fields(self) if one.name not in ("constraints", "like"))
        return constraints, like, tuple(rest)

    def terms(self, count: int) -> Terms:
        """A batch cut into ``count`` microbatches, on the terms that are demanded."""
        return Terms(count, self.batch_coupling, self.rng, self.accumulator_dtype)


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
    shares: tuple[int, ...] = ()
    """Where they are dealt out to several meshes that hold the whole model: the numbers of microbatches of each."""
    undivided: Subjected | None = None
    """Where the step is a loop over microbatches: the step as it was; batch leaves are (N, B/N, …) in the loop's."""
    alone: str = ""
    """Why each microbatch is treated as a batch of its own, where it is."""
    retrace: Callable[[int], TracedProgram] | None = None
    """The same function on a batch of another size; None: it is not at hand."""
    coupling: str = ""
    """Why the batch was not cut into microbatches, where memory would have asked for it."""
    written: Subjected | None = None
    """Where loops over layers are cut, or layers compute again: the step as it was written."""
    opened: Opened | None = None
    """Where loops over layers are cut: how the leaves of the step as it was written are leaves of this program."""
    opening: Opening = UNOPENED
    """How loops over layers are cut."""
    remat: LayerRemat = NO_REMAT
    """What layers compute again in the backward pass."""
    hosted: tuple[int, ...] = ()
    """Positions of the inputs that lie in the memory of the host between steps."""
    hosting: str = ""
    """Why the planner put them there."""

    @property
    def as_written(self) -> Subjected:
        """The step as it was written."""
        whole = self.undivided or self
        return whole.written or whole

    @property
    def folded(self) -> tuple[int, ...]:
        """Positions of leaves of which the program wants (N, B/N, …) for (B, …)."""
        return () if self.undivided is None else self.roles.leaves(Role.BATCH)

    @property
    def donated(self) -> frozenset[int]:
        """Positions of the state leaves."""
        return frozenset(self.roles.leaves(Role.STATE))

    @property
    def hosted_ends(self) -> Hosted:
        """Inputs that lie in the memory of the host, and their next values."""
        return hosted_ends(self.hosted, self.roles.state_pairs)

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


def microbatched(subject: Subjected, terms: Terms, platform: str) -> Subjected:
    """The same step run as microbatches, one after the other; plans of both bear the same fingerprint unless numbers differ.

    Raises :class:`~autopar.errors.PlanError` where the batch cannot be cut so.
    """
    if terms.count == 1:
        return subject
    program, alone = _in_microbatches(subject, terms, platform)
    return replace(_rewritten(subject, program, terms, platform), alone=alone)


def as_loop(
    subject: Subjected, terms: Terms, platform: str, known: Subjected | None = None, opening: Opening = UNOPENED
) -> Subjected:
    """The step as a pipeline cuts it into stages: a loop over its microbatches, were it one only; branches are opened.

    ``known`` is the step run as these microbatches, if it was rewritten before.  Loops over layers are cut between trips as
    ``opening`` says.  Raises :class:`~autopar.errors.PlanError` where the batch cannot be cut so.
    """
    if opening.pieces > 1:
        subject, known = cut_between_trips(subject, opening, platform), None
    if terms.shares:
        program, alone = _in_shares(subject, terms), ""
    elif known is not None:
        program, alone = known.program, known.alone
    elif terms.count > 1:
        program, alone = _in_microbatches(subject, terms, platform)
    else:
        program, alone = as_one_trip(subject.program, subject.graph, subject.roles.leaves(Role.BATCH)), ""
    flat = with_open_branches(program)
    if known is not None and flat is program:
        return known
    return replace(_rewritten(subject, flat, terms, platform), alone=alone)


def layer_loops_of(subject: Subjected) -> tuple[Operator, ...]:
    """The loops over layers in a step as it was written."""
    return layer_loops(subject.graph, subject.roles.leaves(Role.BATCH), subject.roles.leaves(Role.KEY))


def cut_between_trips(subject: Subjected, opening: Opening, platform: str) -> Subjected:
    """The step with its loops over layers in several pieces each, and its stacked leaves likewise.

    Leaves that ``opening`` names are cut with them where they can be; the caller checks whether they were.
    """
    program, graph = subject.program, subject.graph
    if any(one.primitive == LoopKind.COND and one.phase is Phase.UPDATE for one in graph.operators):
        program = with_open_branches(program)  # a branch of an update reads and makes whole stacks
        graph = build_graph(program.jaxpr, platform=platform)
    whole = replace(subject, program=program, graph=graph)
    may_be_cut = {k: value for k, value in enumerate(graph.inputs) if subject.roles.roles[k] in MAY_BE_CUT}
    known = {may_be_cut[k]: Rows(dim, count) for k, dim, count in opening.leaves if k in may_be_cut}
    stacks = stacks_of(graph, subject.roles.state_pairs, [loop.id for loop in layer_loops_of(whole)], known)
    cut, leaves = opened(program, graph, stacks, opening.pieces, subject.roles)
    roles = opened_roles(subject.roles, leaves)
    opened_graph = build_graph(cut.jaxpr, platform=platform)
    said, wishes = subject.leaves, subject.wishes
    if said is not None:
        said = _wishes_of_pieces(said, program, leaves)
        wishes = wishes_of(opened_graph, cut.in_paths, roles.leaves(Role.STATE), said)
    at = [(position, stacks.values[value]) for position, value in enumerate(graph.inputs) if leaves.inputs[position]]
    return replace(
        subject,
        program=cut,
        roles=roles,
        graph=opened_graph,
        wishes=wishes,
        leaves=said,
        retrace=_retrace_of(subject, lambda one: cut_between_trips(one, opening, platform), platform),
        written=subject.written or subject,
        opened=leaves,
        opening=replace(opening, leaves=tuple((position, rows.dim, rows.count) for position, rows in at)),
    )


def _retraced(subject: Subjected, rewrite: Callable[[Subjected], Subjected], platform: str, size: int) -> TracedProgram:
    """The program on a batch of another size, rewritten alike."""
    assert subject.retrace is not None
    program = subject.retrace(size)
    one = replace(
        subject, program=program, graph=build_graph(program.jaxpr, platform=platform), leaves=None, retrace=None
    )
    return rewrite(one).program


def _retrace_of(
    subject: Subjected, rewrite: Callable[[Subjected], Subjected], platform: str
) -> Callable[[int], TracedProgram] | None:
    """How a rewritten step is traced on a batch of another size, if the step itself can be."""
    return None if subject.retrace is None else functools.partial(_retraced, subject, rewrite, platform)


def rematerialising(subject: Subjected) -> Rematerialising:
    """The layers of a step as it was written, and what they may compute again."""
    return Rematerialising(subject.program, subject.graph, subject.roles.leaves(Role.BATCH), subject.roles.state_pairs)


def rematerialised(subject: Subjected, chosen: LayerRemat, platform: str) -> Subjected:
    """The step as it was written with layers that compute again what their backward passes read.

    Raises :class:`~autopar.errors.PlanError` where the step has no such layers.
    """
    if not chosen.is_any:
        return subject
    forms = rematerialising(subject)
    if chosen.starts[-1] >= forms.num_positions:
        raise PlanError(
            f"the plan has a layer computed again that begins before operator {chosen.starts[-1]} of the forward pass, which "
            f"has {forms.num_positions}; plan again for this step"
        )
    return replace(
        _with_program(subject, forms.program(chosen), platform),
        retrace=_retrace_of(subject, lambda one: rematerialised(one, chosen, platform), platform),
        written=subject.written or subject,
        remat=chosen,
    )


def offloaded(subject: Subjected, why: str = "") -> Subjected:
    """The step with the state that only its update reads in the memory of the host between steps."""
    return replace(subject, hosted=idle_until_update(subject.graph, subject.roles.state_pairs), hosting=why)


def as_planned(subject: Subjected, plan: Plan, terms: Terms, platform: str) -> Subjected:
    """The step as it was written in the form that a plan speaks of; raises PlanError where it has none."""
    subject = replace(rematerialised(subject, plan.remat, platform), hosted=plan.hosted)
    if not plan.is_pipeline:
        return microbatched(subject, terms, platform)
    return as_loop(subject, terms, platform, opening=plan.opening)


def _wishes_of_pieces(said: LeafWishes, program: TracedProgram, leaves: Opened) -> LeafWishes:
    """What the arguments of a call say of their leaves, said of the pieces of those; a piece has its layers whole."""

    def of_pieces(wishes: Mapping[str, LeafWish]) -> dict[str, LeafWish]:
        found = dict(wishes)
        for keys, path, pieces in zip(program.in_keys, program.in_paths, leaves.inputs, strict=True):
            if pieces is not None and (wish := found.pop(path, None)) is not None:
                entries = tuple(None if dim == pieces.dim else one for dim, one in enumerate(wish.entries))
                found.update({"".join(key): replace(wish, entries=entries) for key in pieces.keys(keys)})
        return found

    return replace(said, names=of_pieces(said.names), placed=of_pieces(said.placed))


class Rewritings:
    """Owns the forms of one step that were made so far: run as microbatches, and as a loop that can be cut into stages."""

    def __init__(self, subject: Subjected, platform: str) -> None:
        self.subject, self._platform = subject, platform
        self._microbatched: dict[Terms, Subjected] = {}
        self._loops: dict[Terms, Subjected] = {}
        self._grounds: dict[tuple[int, frozenset[int]], Ground] = {}

    def microbatched(self, terms: Terms) -> Subjected:
        """See :func:`microbatched`."""
        if terms not in self._microbatched:
            self._microbatched[terms] = microbatched(self.subject, terms, self._platform)
        return self._microbatched[terms]

    def as_loop(self, terms: Terms) -> Subjected:
        """See :func:`as_loop`."""
        if terms not in self._loops:
            known = self._microbatched.get(terms) if terms.count > 1 else None
            self._loops[terms] = as_loop(self.subject, terms, self._platform, known)
        return self._loops[terms]

    def ground(self, one: Subjected, separate: frozenset[int] = frozenset()) -> Ground:
        """What plans of one of these forms share; ``separate`` are values that lie for themselves."""
        key = id(one.graph), separate
        if key not in self._grounds:
            self._grounds[key] = Ground(one.graph, one.roles.state_pairs, separate)
        return self._grounds[key]


def _in_microbatches(subject: Subjected, terms: Terms, platform: str) -> tuple[TracedProgram, str]:
    """The program that runs microbatch by microbatch, and why each is a batch of its own, if it is."""
    size, batch = _batch_size(subject, terms.count), subject.roles.leaves(Role.BATCH)
    try:
        return accumulated(subject.program, _examples(subject, terms), batch, terms.accumulator), ""
    except CoupledBatchError as error:
        if terms.coupling is BatchCoupling.REFUSE or subject.retrace is None:
            raise
        retrace = functools.partial(subject.retrace, size // terms.count)
        twin = twin_of(subject.program, subject.graph, retrace, platform)
        return each_alone(twin, batch, terms), error.reason


def _in_shares(subject: Subjected, terms: Terms) -> TracedProgram:
    """The program whose microbatches are dealt out; raises PlanError where the batch cannot be cut so."""
    _batch_size(subject, terms.count)
    batch = subject.roles.leaves(Role.BATCH)
    return in_shares(subject.program, _examples(subject, terms), batch, terms.shares, terms.accumulator)


def _examples(subject: Subjected, terms: Terms) -> Examples:
    roles = subject.roles
    return examples_of(subject.graph, roles.leaves(Role.BATCH), roles.leaves(Role.STATE), terms.count, terms.rng)


def _batch_size(subject: Subjected, count: int) -> int:
    """The number of examples, if it can be cut into so many microbatches."""
    size = subject.roles.batch_size
    if size is None:
        raise PlanError(
            f"num_microbatches={count}, but no argument was found to be the batch; name it with batch_argnums="
        )
    if size % count:
        raise PlanError(f"num_microbatches={count} does not divide the batch of {size} examples")
    return size


def _with_program(subject: Subjected, program: TracedProgram, platform: str) -> Subjected:
    """The subject with another program of the same leaves: its graph, and what the user's code wishes of that."""
    graph = build_graph(program.jaxpr, platform=platform)
    wishes = subject.wishes
    if subject.leaves is not None:
        wishes = wishes_of(graph, program.in_paths, subject.roles.leaves(Role.STATE), subject.leaves)
    return replace(subject, program=program, graph=graph, wishes=wishes)


def _rewritten(subject: Subjected, program: TracedProgram, terms: Terms, platform: str) -> Subjected:
    return replace(
        _with_program(subject, program, platform),
        fingerprint=fingerprint_on(subject, terms),
        num_microbatches=terms.count,
        shares=terms.shares,
        undivided=subject,
    )


def fingerprint_on(subject: Subjected, terms: Terms) -> str:
    """The fingerprint of the step whose batch is cut on these terms: that of the whole one where the numbers are."""
    text = terms.text
    return subject.fingerprint if not text else hashlib.sha256(f"{subject.fingerprint} {text}".encode()).hexdigest()
