"""How many stages, where they begin, on which devices, in how many microbatches: what is demanded, or even where that is free.

With P positions at which layers may begin and w(i, j) the work between two of them, S stages are made as even as that allows,

    minimise  max_s w(cut_s, cut_{s+1})        over the cuts

by a dynamic program over the ends of stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.graph.build import LoopKind
from autopar.inter_op.crossings import boundaries
from autopar.inter_op.dealing import check_homes, stages_per_mesh_of
from autopar.inter_op.examples import CoupledBatchError
from autopar.inter_op.layers import layers
from autopar.inter_op.looped import Looped
from autopar.inter_op.sites import split_evenly
from autopar.methods import InterOp, method_of
from autopar.plan import UNOPENED, Opening, Schedule
from autopar.schedule.orders import OrderFunction
from autopar.stage_tasks import loop_of
from autopar.subjects import Demands, Subjected, as_loop, cut_between_trips, layer_loops_of

MOST_MICROBATCHES = 64
"""The planner itself cuts a batch into so many microbatches at most on one mesh."""

MICROBATCHES_PER_MESH = 4
"""Unless told otherwise a pipeline runs up to so many microbatches for each mesh: the bubble is then below a fifth."""

FINER = (1, 2, 4)
"""Layers are looked for so many times as fine as stages, until there are enough."""


def counts_of(batch_size: int | None, most: int = MOST_MICROBATCHES) -> list[int]:
    """Numbers of microbatches that the planner itself tries: each is the one before by the least factor of what is left."""
    counts = [1]
    left = batch_size or 1
    while left > 1 and counts[-1] * (factor := _least_factor(left, most)) <= most:
        counts.append(counts[-1] * factor)
        left //= factor
    return counts


def _least_factor(number: int, most: int) -> int:
    """The least that divides a number of two or more."""
    return next(factor for factor in range(2, number + 1) if number % factor == 0 or factor > most)


def opening_for(subject: Subjected, num_stages: int) -> Opening:
    """How loops over layers are cut for so many stages: into a piece for each, for more pieces take longer to plan."""
    trips = max((loop.bodies[0].trips for loop in layer_loops_of(subject)), default=1)
    return Opening(min(trips, num_stages))


def kept_loop_advice(subject: Subjected) -> str:
    """Advice where a loop over layers could not be cut."""
    is_kept = any(one.primitive == LoopKind.SCAN for one in loop_of(subject).body.operators) and subject.opened is None
    if not is_kept:
        return ""
    return ", or give the layers of a loop (scan) as arguments that are stacked along the loop: other loops stay on one stage"


def cuts_for(loop: Looped, state_pairs: Sequence[tuple[int, int]], num_stages: int) -> tuple[int, ...]:
    """Where so many stages of about the same work begin; fewer than that many cuts where the model has fewer layers."""
    found: tuple[int, ...] = ()
    for finer in FINER:
        found = layers(loop, state_pairs, at_most=finer * num_stages, at_least=num_stages)
        if len(found) >= num_stages - 1:
            return _evenly(found, boundaries(loop, state_pairs).flops.tolist(), num_stages)
    return found


def _evenly(positions: Sequence[int], flops: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """So many of the positions less one that the heaviest run of operators between them is lightest."""
    ends = [0, *positions, len(flops)]
    done = [sum(flops[:end]) for end in ends]
    best: list[tuple[float, tuple[int, ...]]] = [
        (work, ()) for work in done
    ]  # by end: heaviest of the runs up to it, cuts
    for runs in range(2, num_stages + 1):
        best = [
            min((max(best[cut][0], done[end] - done[cut]), (*best[cut][1], ends[cut])) for cut in range(runs - 1, end))
            if end >= runs
            else (math.inf, ())
            for end in range(len(ends))
        ]
    return best[-1][1]


def schedule_asked(demands: Demands) -> Schedule | OrderFunction:
    """The schedule that is demanded; several stages on a mesh ask for the one that deals them round."""
    if demands.schedule is not None:
        return demands.schedule
    is_dealt = (demands.stages_per_mesh or 1) > 1
    if isinstance(demands.stages, tuple):
        is_dealt = len(set(demands.stages)) < len(demands.stages)
    return Schedule.INTERLEAVED_ONE_F_ONE_B if is_dealt else Schedule.ONE_F_ONE_B


def stages_asked(demands: Demands, cluster: Cluster) -> Iterator[int]:
    """How many stages; of the method that has a stage on every device also fewer."""
    if demands.stages is not None:
        yield demands.stages if isinstance(demands.stages, int) else len(demands.stages)
        return
    count = cluster.num_devices
    yield count
    lower = 1 << (count - 1).bit_length() - 1 if count > 1 else 0
    while lower > 1:
        yield lower
        lower //= 2


def num_meshes_asked(num_stages: int, schedule: Schedule | OrderFunction, cluster: Cluster, demands: Demands) -> int:
    """On how many meshes the stages lie; of a user's own schedule at most."""
    if isinstance(demands.stages, tuple):
        return len(set(demands.stages))
    if schedule is Schedule.INTERLEAVED_ONE_F_ONE_B:
        return num_stages // (demands.stages_per_mesh or stages_per_mesh_of(num_stages, cluster))
    return num_stages


def devices_asked(homes: tuple[int, ...], cluster: Cluster, demands: Demands) -> tuple[tuple[int, ...], ...]:
    """The devices of each stage, of which the meshes are told; raises :class:`~autopar.errors.PlanError` where there are none."""
    stages, num_meshes = demands.stages, max(homes) + 1
    if isinstance(stages, tuple):
        check_devices(stages, cluster)
        check_homes(stages, homes)
        return stages
    meshes = split_evenly(num_meshes, cluster)
    if meshes is None:
        dealt = "" if num_meshes == len(homes) else f", which share {num_meshes} meshes,"
        raise PlanError(
            f"stages={stages}{dealt} are more than the {cluster.num_devices} devices of {cluster.name}; ask for fewer, or "
            "give the ids of each stage's devices, for example stages=[[0, 1], [2, 3]]"
        )
    if isinstance(method_of(demands.method), InterOp):
        return tuple((home,) for home in homes)
    return tuple(meshes[home] for home in homes)


def check_devices(stages: tuple[tuple[int, ...], ...], cluster: Cluster) -> None:
    """Check that the cluster has these devices, as many on each host of a stage; raises PlanError naming the stage."""
    for number, devices in enumerate(stages):
        if beyond := [device for device in devices if not 0 <= device < cluster.num_devices]:
            raise PlanError(
                f"stages: stage {number + 1} has the device {beyond[0]}, and the devices of {cluster.name} are 0 to "
                f"{cluster.num_devices - 1}"
            )
        on_host: dict[int, int] = {}
        for device in devices:
            on_host[device // cluster.devices_per_host] = on_host.get(device // cluster.devices_per_host, 0) + 1
        if len(set(on_host.values())) > 1:
            raise PlanError(
                f"stages: stage {number + 1} has {' and '.join(map(str, on_host.values()))} devices on its hosts; give it "
                "as many devices on each host that it uses"
            )


def as_microbatches(
    subject: Subjected, num_meshes: int, cluster: Cluster, demands: Demands, opening: Opening = UNOPENED
) -> Subjected:
    """The step as a loop over the microbatches that are demanded, or over as many as are of use."""
    platform = cluster.device.platform.value
    if opening.pieces > 1:
        subject = cut_between_trips(subject, opening, platform)
    if demands.num_microbatches is not None:
        return as_loop(subject, demands.terms(demands.num_microbatches), platform)
    count = max(n for n in counts_of(subject.roles.batch_size) if n <= MICROBATCHES_PER_MESH * num_meshes)
    try:
        return as_loop(subject, demands.terms(count), platform)
    except CoupledBatchError as error:
        return replace(as_loop(subject, demands.terms(1), platform), coupling=str(error))
