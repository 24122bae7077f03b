"""Where does the plan want the leaves of a state?  As orbax is told when it restores one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from autopar.cluster import Cluster
from autopar.inter_op.opened import LeafPieces
from autopar.on_ray import fleet_of
from autopar.plan import Plan
from autopar.runtime.array_saver import Home, PiecedHome
from autopar.runtime.cross_mesh import placed_mesh
from autopar.runtime.executor import partition_spec
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
                    placed_mesh(where.placement(len(where.layout.dims)), jax.devices()), partition_spec(where.layout)
                ),
                global_shape=tuple(aval.shape),
                dtype=aval.dtype,
            )
            for aval, where in zip(avals, wheres, strict=True)
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


def devices_here(numbers: Sequence[int]) -> tuple[Any, ...]:
    """This process's JAX devices of those numbers, or all of them where there are too few."""
    devices = jax.devices()
    return tuple(devices[k] for k in numbers) if max(numbers) < len(devices) else tuple(devices)
