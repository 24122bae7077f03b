"""Where does the plan want the leaves of a state?  As orbax is told when it restores one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from autopar.cluster import Cluster
from autopar.errors import ClusterError
from autopar.inter_op.opened import LeafPieces
from autopar.on_ray import fleet_of
from autopar.plan import Plan
from autopar.runtime.array_saver import Home, PiecedHome
from autopar.runtime.cross_mesh import placed_mesh
from autopar.runtime.executor import HOST_MEMORY, partition_spec
from autopar.runtime.messages import Where


def homes_of(avals: Sequence[Any], plan: Plan, cluster: Cluster, stage_of: Mapping[int, int]) -> list[Any]:
    """Restore arguments of orbax for the first leaves of a step; ``stage_of`` names the stages of a pipeline."""
    wheres = []
    for position in range(len(avals)):
        stage = plan.stages[stage_of.get(position, 0)]
        wheres.append(Where(stage.mesh, plan.devices_of(stage_of.get(position, 0)), plan.in_layouts[position]))
    if cluster.runs_on is None:
        return [
            ocp.ArrayRestoreArgs(
                sharding=NamedSharding(
                    placed_mesh(where.placement(len(where.layout.dims)), devices_here(cluster)),
                    partition_spec(where.layout),
                    memory_kind=HOST_MEMORY if position in plan.hosted else None,
                ),
                global_shape=tuple(aval.shape),
                dtype=aval.dtype,
            )
            for position, (aval, where) in enumerate(zip(avals, wheres, strict=True))
        ]
    fleet = fleet_of(cluster)
    wanted = [plan.devices_of(number) for number in range(len(plan.stages))]
    worlds = dict(zip(wanted, fleet.worlds(wanted, cluster.device.platform), strict=True))
    return [
        Home(aval=aval, where=where, world=worlds[where.devices], numbers=fleet.numbers)
        for aval, where in zip(avals, wheres, strict=True)
    ]


def pieced_home(homes: list[Any], pieces: LeafPieces, aval: Any) -> PiecedHome:
    """Where the pieces of one leaf shall lie."""
    return PiecedHome(aval=aval, dim=pieces.dim, homes=tuple(homes))


def devices_here(cluster: Cluster, numbers: Sequence[int] | None = None) -> tuple[Any, ...]:
    """This process's JAX devices as the cluster numbers them: those of the numbers, or all; all where there are too few.

    Raises ``ClusterError`` for a cluster made of devices that this process does not have.
    """
    devices = tuple(jax.devices())
    if cluster.device_ids:
        by_id = {one.id: one for one in devices}
        if missing := [one for one in cluster.device_ids if one not in by_id]:
            raise ClusterError(
                f"cluster {cluster.name!r} has the JAX device {missing[0]}, and this process has {sorted(by_id)}; make it anew "
                "with Cluster.local(devices)"
            )
        devices = tuple(by_id[one] for one in cluster.device_ids)
    if numbers is None or max(numbers) >= len(devices):
        return devices
    return tuple(devices[number] for number in numbers)
