"""In which order does each mesh run the forwards and backwards of the microbatches?

Let S stages lie on S meshes and let N microbatches pass through them.  Task F(s, m) needs F(s-1, m); task B(s, m) needs
F(s, m) and B(s+1, m).  An *order* says, for each mesh, one after the other, which tasks it runs.  Microbatch m is *in flight*
on stage s from F(s, m) to B(s, m): that long its residuals are in memory.

    schedule      first, stage s runs              then                in flight on stage s    source
    single        nothing (S = 1)                  F, B in turn        1
    gpipe         all N forwards                   all N backwards     N                       Huang et al., 2019
    1f1b          min(N, S-s-1) forwards           F, B in turn        min(N, S-s)             Narayanan et al., 2021
    eager_1f1b    min(N, 2(S-s-1)) forwards        F, B in turn        min(N, 2(S-s)-1)        Zhuang et al., 2022

(1F1B is PipeDream-flush; of each the last backwards follow when no forward is left.)  Eager 1F1B holds up to twice the
residuals, and each message between neighbours may take as long as a task before it delays anything.

With equal stages (f seconds forward, b backward) and messages that cost nothing each of them takes (N+S-1)(f+b), of which
each mesh works N(f+b): the *bubble*, what it idles, is the fraction (S-1)/(N+S-1).

Microbatches go backward in the order 0, 1, …, so gradients are added in the order of the step that was not cut.  An
order made by anybody else is as good if :func:`check_order` lets it pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.errors import ScheduleError
from autopar.plan import Schedule
from autopar.schedule.instructions import Part, Task, deadlock


@dataclass(frozen=True, slots=True)
class Order:
    """The tasks of each mesh, in its order; together the forwards and backwards of all stages and microbatches."""

    num_stages: int
    num_microbatches: int
    meshes: tuple[tuple[Task, ...], ...]

    def mesh_of(self, stage: int) -> int:
        """The mesh that runs the stage; raises ``ScheduleError`` if none does."""
        for mesh, tasks in enumerate(self.meshes):
            if any(task.stage == stage for task in tasks):
                return mesh
        raise ScheduleError(f"no mesh runs stage {stage} of {self.num_stages}; add its tasks to one")


OrderFunction = Callable[[int, int], Order]


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """One schedule: the order for (stages, microbatches), and how many microbatches it promises in flight on a stage."""

    order: OrderFunction
    in_flight: Callable[[int, int, int], int]


@dataclass(frozen=True, slots=True)
class Times:
    """When a task starts and ends."""

    start_seconds: float
    end_seconds: float


def make_order(schedule: Schedule | OrderFunction, num_stages: int, num_microbatches: int) -> Order:
    """The checked order of a known schedule, or of a pure function of (stages, microbatches).

    Raises ``ScheduleError`` for counts below 1, several stages under ``Schedule.SINGLE``, or what :func:`check_order` finds.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(f"{num_stages} stages and {num_microbatches} microbatches; give 1 or more of each")
    if schedule is Schedule.SINGLE and num_stages > 1:
        raise ScheduleError(f"schedule {schedule.value!r} is for one stage, not {num_stages}; choose another one")
    function = RULES[schedule].order if isinstance(schedule, Schedule) else schedule
    order = function(num_stages, num_microbatches)
    if (order.num_stages, order.num_microbatches) != (num_stages, num_microbatches):
        raise ScheduleError(
            f"asked for {num_stages} stages and {num_microbatches} microbatches, the schedule gave an order of "
            f"{order.num_stages} and {order.num_microbatches}; return one for the counts that it is given"
        )
    check_order(order)
    return order


def check_order(order: Order) -> None:
    """Check that an order can be carried out, however long its tasks take and messages travel.

    Every forward and backward is there once, a stage is on one mesh, and no mesh waits for ever.

    Raises ``ScheduleError`` naming the task or the meshes, and what to do.
    """
    seen: set[Task] = set()
    home: dict[int, int] = {}
    for mesh, tasks in enumerate(order.meshes):
        for task in tasks:
            if task in seen:
                raise ScheduleError(f"{task} is in the order twice; name each task once")
            seen.add(task)
            if home.setdefault(task.stage, mesh) != mesh:
                raise ScheduleError(
                    f"{task} is on mesh {mesh}, others of its stage on mesh {home[task.stage]}; choose one"
                )
    wanted = {
        Task(part, stage, microbatch)
        for part in (Part.FORWARD, Part.BACKWARD)
        for stage in range(order.num_stages)
        for microbatch in range(order.num_microbatches)
    }
    if seen != wanted:
        odd = min(seen ^ wanted, key=lambda task: (task.microbatch, task.stage, task.part.value, task.segment))
        raise ScheduleError(
            f"the order of {order.num_stages} stages and {order.num_microbatches} microbatches "
            + (f"lacks {odd}; add it" if odd in wanted else f"has {odd}, which does not exist; leave it out")
        )
    nominal_times(order.meshes, lambda task: chain_needs(task, order.num_stages))


def chain_needs(task: Task, num_stages: int) -> tuple[Task, ...]:
    """The tasks before a forward or backward in a chain of stages.

    What skips stages on its way waits for no more: between its producer and its reader lie tasks of this chain.
    """
    stage, microbatch = task.stage, task.microbatch
    if task.part is Part.FORWARD:
        return (Task(Part.FORWARD, stage - 1, microbatch),) if stage else ()
    own = Task(Part.FORWARD, stage, microbatch)
    return (own, Task(Part.BACKWARD, stage + 1, microbatch)) if stage + 1 < num_stages else (own,)


def nominal_times(
    meshes: Sequence[Sequence[Task]],
    needs: Callable[[Task], Iterable[Task]],
    seconds: Callable[[Task], float] = lambda task: 1.0,
) -> dict[Task, Times]:
    """When each task runs if messages cost nothing: each mesh runs its tasks one after the other, each after its needs.

    The result lists tasks so that each stands after its needs.  Raises ``ScheduleError`` if meshes wait for each other for
    ever, or for a task that is not there.
    """
    times: dict[Task, Times] = {}
    next_task = [0] * len(meshes)
    free_seconds = [0.0] * len(meshes)
    waiting: dict[Task, list[int]] = {}
    ready = list(range(len(meshes)))[::-1]
    while ready:
        mesh = ready.pop()
        while next_task[mesh] < len(meshes[mesh]):
            task = meshes[mesh][next_task[mesh]]
            needed = tuple(needs(task))
            if missing := next((other for other in needed if other not in times), None):
                waiting.setdefault(missing, []).append(mesh)
                break
            start = max((free_seconds[mesh], *(times[other].end_seconds for other in needed)))
            free_seconds[mesh] = start + seconds(task)
            times[task] = Times(start, free_seconds[mesh])
            next_task[mesh] += 1
            ready.extend(waiting.pop(task, ()))
    if waiting:
        raise deadlock(
            {
                mesh: f"run {meshes[mesh][next_task[mesh]]}, which needs {missing}"
                for missing, stuck in waiting.items()
                for mesh in stuck
            }
        )
    return times


def in_flight(order: Order, stage: int) -> int:
    """The largest number of microbatches whose forward ran on the stage and whose backward has not."""
    count = most = 0
    for task in order.meshes[order.mesh_of(stage)]:
        if task.stage == stage:
            count += 1 if task.part is Part.FORWARD else -1
            most = max(most, count)
    return most


def promised_in_flight(schedule: Schedule, num_stages: int, num_microbatches: int, stage: int) -> int:
    """What :func:`in_flight` gives for the order of a known schedule, by its formula."""
    return RULES[schedule].in_flight(num_stages, num_microbatches, stage)


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """The fraction of a step that a mesh idles, for equal stages and messages that cost nothing, in every known schedule."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def _from_warm_up(num_stages: int, num_microbatches: int, warm_up: Callable[[int], int]) -> Order:
    """One stage per mesh: so many forwards, then forward and backward in turn, then the backwards that are left."""
    meshes = []
    for stage in range(num_stages):
        first = min(num_microbatches, warm_up(stage))
        tasks = [Task(Part.FORWARD, stage, microbatch) for microbatch in range(first)]
        for microbatch in range(num_microbatches):
            if first + microbatch < num_microbatches:
                tasks.append(Task(Part.FORWARD, stage, first + microbatch))
            tasks.append(Task(Part.BACKWARD, stage, microbatch))
        meshes.append(tuple(tasks))
    return Order(num_stages, num_microbatches, tuple(meshes))


def _gpipe(num_stages: int, num_microbatches: int) -> Order:
    return _from_warm_up(num_stages, num_microbatches, lambda stage: num_microbatches)


def _one_f_one_b(num_stages: int, num_microbatches: int) -> Order:
    return _from_warm_up(num_stages, num_microbatches, lambda stage: num_stages - stage - 1)


def _eager_one_f_one_b(num_stages: int, num_microbatches: int) -> Order:
    return _from_warm_up(num_stages, num_microbatches, lambda stage: 2 * (num_stages - stage - 1))


RULES: Mapping[Schedule, ScheduleRule] = MappingProxyType(
    {
        Schedule.SINGLE: ScheduleRule(_one_f_one_b, lambda stages, microbatches, stage: 1),
        Schedule.GPIPE: ScheduleRule(_gpipe, lambda stages, microbatches, stage: microbatches),
        Schedule.ONE_F_ONE_B: ScheduleRule(
            _one_f_one_b, lambda stages, microbatches, stage: min(microbatches, stages - stage)
        ),
        Schedule.EAGER_ONE_F_ONE_B: ScheduleRule(
            _eager_one_f_one_b, lambda stages, microbatches, stage: min(microbatches, 2 * (stages - stage) - 1)
        ),
    }
)
