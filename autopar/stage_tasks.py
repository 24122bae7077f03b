"""What is asked of the plan of a stage: the demands of the API as a task for the planner of stages.

A task is the step as a loop over its microbatches, the cluster, the memory of its devices and whether residuals may leave it; and
for each stage its meshes, what a hand-made method or the user allows there, and how leaves are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.cluster import Cluster, Mesh
from autopar.constraints import Leaves, meshes_of_user, meshes_with_names, with_constraints, without_axes_of_one
from autopar.cost_model.hosted import has_host_memory
from autopar.graph.ir import Graph
from autopar.graph.roles import Role
from autopar.graph.wishes import Origin, wishes_of
from autopar.inter_op.arranged import PipelineTask, StageDemands
from autopar.inter_op.hosting import Hosting
from autopar.inter_op.looped import Looped, looped
from autopar.inter_op.shares import looped_in_shares
from autopar.inter_op.stages import leaves_of
from autopar.intra_op.restrict import Reach, Restriction
from autopar.methods import InterOp, IntraOp, meshes_asked, method_of
from autopar.plan import Offload
from autopar.reach import Subject, batch_reach
from autopar.schedule.stage_program import Passing, StageProgram
from autopar.subjects import Demands, Subjected
from autopar.user_shardings import UserDemands, UserShardings, user_demands, with_wishes


def loop_of(subject: Subjected) -> Looped:
    """The loop over microbatches in a step that was rewritten as one, or the trip that holds those of its shares."""
    if subject.shares:
        return looped_in_shares(subject.graph, subject.roles.leaves(Role.BATCH), subject.shares)
    return looped(subject.graph, subject.roles.leaves(Role.BATCH), subject.num_microbatches)


def pipeline_task(
    subject: Subjected, loop: Looped, cluster: Cluster, demands: Demands, report_progress: Callable[[str], None]
) -> PipelineTask:
    """The task of planning stages of a looped step, whichever they are."""
    return PipelineTask(
        loop,
        subject.roles.state_pairs,
        cluster,
        float(demands.memory_per_device or cluster.per_device_memory_bytes),
        subject.program.in_paths,
        donates_state=demands.donate_state,
        solver_seconds=demands.solver_seconds,
        report_progress=report_progress,
        demands=_StageDemands(subject, demands),
        hosting=_hosting(cluster, demands),
        budget_by_host=_budget_by_host(cluster, demands),
    )


def _hosting(cluster: Cluster, demands: Demands) -> Hosting:
    """Which residuals may lie in the memory of the hosts; whether a demand can be met was asked before."""
    if demands.offload is Offload.ACTIVATIONS:
        return Hosting.ALL
    is_free = demands.offload is None and demands.like is None and isinstance(method_of(demands.method), IntraOp)
    return Hosting.NEEDED if is_free and may_offload(cluster) else Hosting.NONE


def may_offload(cluster: Cluster) -> bool:
    """Whether the memory of the hosts is another one than that of the devices, and its link known."""
    return cluster.host_memory_link is not None and has_host_memory(cluster.device.platform)


def _budget_by_host(cluster: Cluster, demands: Demands) -> tuple[float, ...]:
    """Bytes of a device of each host, where these are of several kinds and the user names no budget."""
    if demands.memory_per_device is not None or not cluster.host_devices:
        return ()
    return tuple(
        float(cluster.kind_of(host).memory_bytes // cluster.compute_shared_by) for host in range(cluster.hosts)
    )


class _StageDemands:
    """What the method and the user ask of a stage; called for each."""

    def __init__(self, subject: Subjected, demands: Demands) -> None:
        self._subject, self._demands = subject, demands
        self._method = method_of(demands.method)
        self._state = frozenset(subject.roles.leaves(Role.STATE))
        self._batch = frozenset(subject.roles.leaves(Role.BATCH))
        self._tied: dict[Mesh, Reach] = {}

    def __call__(self, program: StageProgram, graph: Graph, cluster: Cluster) -> StageDemands:
        demands, method = self._demands, self._method
        leaves = leaves_of(program, graph)
        names = {value: self._subject.program.in_paths[position] for value, position in leaves.items()}
        own = [k for k, value in enumerate(graph.inputs) if leaves.get(value) in self._state]
        rows = [k for k, value in enumerate(graph.inputs) if leaves.get(value) in self._batch]
        meshes = meshes_asked(method, demands.mesh_shape, cluster)
        user = self._of_user(graph, names, own, cluster)
        meshes = meshes_of_user(meshes, user, method)
        constraints = without_axes_of_one(demands)
        meshes = meshes_with_names(meshes, constraints)
        named = Leaves(graph, names, frozenset(graph.inputs[k] for k in rows))

        def restriction(mesh: Mesh) -> Restriction:
            received = self._received(program, graph, mesh)
            view = Subject(graph, tuple(own), tuple(rows), 1, received, program.state_pairs)
            allowed = with_constraints(method.restriction(view, mesh), named, constraints, mesh)
            return with_wishes(allowed, user, graph, mesh)

        separate = frozenset(wish.value for wish in user.wishes if wish.origin is Origin.CODE)
        return StageDemands(meshes, restriction, separate, not demands.constraints and user.meshes is None)

    def _of_user(self, graph: Graph, names: Mapping[int, str], state: list[int], cluster: Cluster) -> UserDemands:
        """What shardings in the user's code ask of a stage: meshes there are those of its devices alone."""
        subject, demands = self._subject, self._demands
        if demands.user_shardings is UserShardings.IGNORE or subject.leaves is None:
            return UserDemands()
        paths = [names.get(value, f"<received {number}>") for number, value in enumerate(graph.inputs)]
        wishes = wishes_of(graph, paths, state, subject.leaves)
        shape = demands.mesh_shape
        return user_demands(wishes, graph, cluster, mesh_shape=shape, is_free=isinstance(self._method, IntraOp))

    def _received(self, program: StageProgram, graph: Graph, mesh: Mesh) -> Reach:
        """Dimensions of what a stage receives along which a hand-made method would cut the examples."""
        if isinstance(self._method, IntraOp | InterOp) or "data" not in mesh.axis_names:
            return {}
        if mesh not in self._tied:
            whole = Subject(self._subject.graph, tuple(self._state), tuple(self._batch), 1)
            self._tied[mesh] = batch_reach(whole, mesh, "data")
        tied = self._tied[mesh]
        return {
            value: frozenset(dim + 1 for dim in tied[end.crossing.value])  # received is a stack over the microbatches
            for value, end in zip(graph.inputs, program.inputs, strict=True)
            if end.crossing is not None and end.crossing.passing is Passing.MICRO and end.crossing.value in tied
        }
