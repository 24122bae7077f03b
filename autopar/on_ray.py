"""From a compiled-to-be step to the processes of a Ray cluster: what is shipped, and who runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.cluster import Cluster
from autopar.errors import InternalError
from autopar.graph.tracing import TracedProgram
from autopar.inter_op.assemble import Assembled
from autopar.runtime.fleet import Fleet, started_fleet
from autopar.runtime.remote import RemoteExecutor
from autopar.runtime.shipment import ship_pipeline, ship_step
from autopar.schedule.spmd import SpmdProgram
from autopar.subjects import Subjected

Report = Callable[[str], None]


def fleet_of(cluster: Cluster) -> Fleet:
    """The processes on the hosts of a cluster that runs on Ray."""
    if cluster.runs_on is None:
        raise InternalError(f"cluster {cluster.name!r} does not run on Ray; report this")
    return started_fleet(cluster.runs_on)


def pipeline_on_ray(whole: Assembled, subject: Subjected, cluster: Cluster, report_progress: Report) -> RemoteExecutor:
    """A pipeline, each of its meshes a world of processes of its own."""
    platform = cluster.device.platform
    shipments = ship_pipeline(whole.pipeline, whole.transfers, platform, report_progress)
    return RemoteExecutor(shipments, subject.program.in_avals, fleet_of(cluster), platform, report_progress)


def step_on_ray(
    program: SpmdProgram,
    traced: TracedProgram,
    donated: frozenset[int],
    cluster: Cluster,
    report_progress: Report = lambda message: None,
    devices: Sequence[int] | None = None,
) -> RemoteExecutor:
    """A step, or any program, on the mesh of some of the cluster's devices, by default of all."""
    platform = cluster.device.platform
    placed = tuple(range(program.mesh.size)) if devices is None else tuple(devices)
    shipments = ship_step(program, traced, donated, platform, placed)
    return RemoteExecutor(shipments, traced.in_avals, fleet_of(cluster), platform, report_progress)
