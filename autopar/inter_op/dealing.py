"""Which stages share a mesh, and on which devices does each lie?

A schedule says the *home* of every stage, the number of its mesh: stage s is at home on mesh s where each stage has one, on
mesh s mod P where stages are dealt round, and wherever a user's own order puts it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.plan import Plan, Schedule
from autopar.schedule.orders import OrderFunction, forwards_first, from_entries, make_order


def homes_of(
    schedule: Schedule | OrderFunction, num_stages: int, num_microbatches: int, num_meshes: int
) -> tuple[int, ...]:
    """The mesh of every stage; a user's function decides on the number of meshes itself.

    Raises :class:`~autopar.errors.ScheduleError` where the schedule is none of so many stages on so many meshes.
    """
    return make_order(schedule, num_stages, num_microbatches, num_meshes).homes


def dealt_homes(num_meshes: int, stages_per_mesh: int) -> tuple[int, ...]:
    """The mesh of every stage, if stages are dealt round."""
    return tuple(range(num_meshes)) * stages_per_mesh


def schedule_of(plan: Plan, num_microbatches: int) -> Schedule | OrderFunction:
    """The schedule of a plan, for so many microbatches.

    An order of the user's own is for the plan's number alone; for another one its meshes run all forwards before all backwards.
    """
    if plan.schedule is not Schedule.OWN:
        return plan.schedule
    if num_microbatches == plan.trips:
        return functools.partial(from_entries, plan.order)
    order = from_entries(plan.order, len(plan.stages), plan.trips)
    return functools.partial(forwards_first, order.homes)


def stages_per_mesh_of(num_stages: int, cluster: Cluster) -> int:
    """The fewest stages, but two, that may be dealt to each of several meshes: of one size, if that is possible.

    Raises :class:`~autopar.errors.PlanError` where there is no such number.
    """
    numbers = [number for number in range(2, num_stages // 2 + 1) if num_stages % number == 0]
    even = (number for number in numbers if cluster.num_devices % (num_stages // number) == 0)
    uneven = (number for number in numbers if num_stages // number <= cluster.num_devices)
    if (found := next(even, None) or next(uneven, None)) is not None:
        return found
    raise PlanError(
        f"stages={num_stages} cannot be dealt round: as many stages, two or more, must come to each of two meshes or more, "
        f"and {cluster.name} has {cluster.num_devices} devices; stages=4 is the least"
    )


def check_homes(devices: Sequence[tuple[int, ...]], homes: Sequence[int]) -> None:
    """Check that stages share devices as they share meshes; raises :class:`~autopar.errors.PlanError` naming two."""
    for stage in range(len(devices)):
        for other in range(stage):
            if (homes[stage] == homes[other]) is not (devices[stage] == devices[other]):
                how = "on one mesh" if homes[stage] == homes[other] else "on a mesh each"
                what = "the same devices" if homes[stage] == homes[other] else "devices of its own"
                raise PlanError(
                    f"stages: the schedule runs the stages {other + 1} and {stage + 1} {how}, and they have the devices "
                    f"{list(devices[other])} and {list(devices[stage])}; give each {what}, or choose another schedule"
                )
