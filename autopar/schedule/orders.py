"""In which order does each mesh run the forwards and backwards of the microbatches?

Let S stages lie on P meshes and let N microbatches pass through them.  Task F(s, m) needs F(s-1, m); task B(s, m) needs
F(s, m) and B(s+1, m).  An *order* says, for each mesh, one after the other, which tasks it runs.  Microbatch m is *in flight*
on stage s from F(s, m) to B(s, m): that long its residuals are in memory.

    schedule          first, mesh r runs                    then              in flight on mesh r       source
    single            nothing (S = 1)                       F, B in turn      1
    gpipe             all N forwards                        all N backwards   N                         Huang et al., 2019
    1f1b              min(N, P-r-1) forwards                F, B in turn      min(N, P-r)               Narayanan et al., 2021
    eager_1f1b        min(N, 2(P-r-1)) forwards             F, B in turn      min(N, 2(P-r)-1)          Zhuang et al., 2022
    interleaved_1f1b  min(Nv, 2(P-r-1) + (v-1)P) forwards   F, B in turn      min(Nv, that and one)     Narayanan et al., 2021
    zb_h1             min(N, P-r-1) forwards                F, B, W in turn   min(N, P)                 Qi et al., 2023
    zb_h2             min(N, 2(P-r-1)) forwards             F, B, W in turn   min(N, 2P-1)              Qi et al., 2023
    shares            one forward (N = 1)                   one backward      1

(1F1B is PipeDream-flush; of each the last backwards follow when no forward is left.)  Eager 1F1B holds up to twice the
residuals, and each message between neighbours may take as long as a task before it delays anything.

With equal stages (f seconds forward, b backward) and messages that cost nothing the first three of these take (N+P-1)(f+b), of
which each mesh works N(f+b): the *bubble*, what it idles, is the fraction (P-1)/(N+P-1).  They put a stage on each mesh, S = P.

Interleaved 1F1B (section 2.2 there) deals S = vP stages round: stage s lies on mesh s mod P, which runs v stages, its
*chunks*.  Microbatches go in groups of P: a group's forwards run on chunk 0, then on chunk 1, …, its backwards on chunk v-1
first.  A mesh waits for chunks, 1/v of what it would else wait for: if P divides N the bubble is the fraction (P-1)/(vN+P-1).
The price is v times the messages, and more residuals.

Zero bubble, ZB-H1 (section 2.3 there), splits the backward pass: B(s, m) makes what stage s-1 waits for, and W(s, m), any time
after it, the rest, the gradients of weights.  The residuals of W stay until then: a microbatch is in flight from F to W.  On
mesh r the W of a microbatch follows the B of the r-th after it, so that every mesh has as many in flight as the first under
1F1B, and what is left of W fills the waiting at the end: of the bubble of (P-1)(f+b+w) seconds (P-1)·max(f, f+b-w) are left, if
N ≥ P.  ZB-H2 begins as eager 1F1B does, and puts W off twice as far: (P-1)·max(f, f+b-2w) are left if N ≥ 2P-1, for nearly twice
the residuals.  (Its bubble is zero only where a mesh begins its next step before others have ended theirs.)

Shares are the order of stages that need nothing of each other in F: each is the whole model (:mod:`autopar.inter_op.shares`).

Microbatches go backward through a stage in the order 0, 1, …, so gradients are added in the order of the step that was not
cut.  An order made by anybody else is as good if :func:`check_order` lets it pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autopar.errors import ScheduleError
from autopar.plan import OrderEntry, Pass, Schedule
from autopar.schedule.instructions import Part, Task, deadlock


@dataclass(frozen=True, slots=True)
class Order:
    """The tasks of each mesh, in its order; together the forwards and backwards of all stages and microbatches.

    Stages and microbatches count from 0.  A mesh may run several stages, a stage is on one mesh.
    """

    num_stages: int
    num_microbatches: int
    meshes: tuple[tuple[Task, ...], ...]

    def mesh_of(self, stage: int) -> int:
        """The mesh that runs the stage; raises ``ScheduleError`` if none does."""
        for mesh, tasks in enumerate(self.meshes):
            if any(task.stage == stage for task in tasks):
                return mesh
        raise ScheduleError(f"no mesh runs stage {stage} of {self.num_stages}; add its tasks to one")

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are tasks of their own."""
        return any(task.part is Part.WEIGHT for tasks in self.meshes for task in tasks)

    @property
    def nominal_seconds(self) -> Callable[[Task], float]:
        """How long tasks take if a backward pass takes twice as long as a forward pass, and half of it is for weights."""
        backward = 1.0 if self.splits_backward else 2.0
        return lambda task: backward if task.part is Part.BACKWARD else 1.0

    @property
    def homes(self) -> tuple[int, ...]:
        """The mesh of every stage."""
        found = {task.stage: mesh for mesh, tasks in enumerate(self.meshes) for task in tasks}
        return tuple(found[stage] for stage in range(self.num_stages))


OrderFunction = Callable[[int, int], Order]
"""A schedule: the order for so many stages and microbatches."""


@dataclass(frozen=True, slots=True)
class Times:
    """When a task starts and ends."""

    start_seconds: float
    end_seconds: float


def make_order(
    schedule: Schedule | OrderFunction, num_stages: int, num_microbatches: int, num_meshes: int | None = None
) -> Order:
    """The checked order of a known schedule, or of a pure function of (stages, microbatches).

    ``num_meshes`` (None: one for each stage) must be a divisor of the stages for the interleaved schedule, less than the
    stages, and the number of stages for all other known ones; a function decides for itself.

    Raises ``ScheduleError`` for counts that are none, or what :func:`check_order` finds.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(f"{num_stages} stages and {num_microbatches} microbatches; give 1 or more of each")
    if not isinstance(schedule, Schedule):
        return _order_of_function(schedule, num_stages, num_microbatches)
    meshes = num_stages if num_meshes is None else num_meshes
    if schedule is Schedule.SINGLE and num_stages > 1:
        raise ScheduleError(f"schedule {schedule.value!r} is for one stage, not {num_stages}; choose another one")
    if schedule is Schedule.INTERLEAVED_ONE_F_ONE_B and (num_stages % meshes or num_stages == meshes):
        raise ScheduleError(
            f"schedule {schedule.value!r} deals two stages or more to each mesh, and {num_stages} stages on {meshes} "
            "meshes are not that; give a multiple"
        )
    if schedule is not Schedule.INTERLEAVED_ONE_F_ONE_B and num_stages != meshes:
        raise ScheduleError(
            f"schedule {schedule.value!r} has a mesh for each stage, not {meshes} for {num_stages}; the schedule of "
            f"several stages on a mesh is {Schedule.INTERLEAVED_ONE_F_ONE_B.value!r}, or one of your own"
        )
    order = RULES[schedule](num_stages, num_microbatches, meshes)
    check_order(order)
    return order


def _order_of_function(function: OrderFunction, num_stages: int, num_microbatches: int) -> Order:
    """What a user's function returns, if it is an order for these counts that can be carried out."""
    name = schedule_name(function)
    said: Any = function(num_stages, num_microbatches)
    if not isinstance(said, Order):
        raise ScheduleError(
            f"{name}({num_stages}, {num_microbatches}) returned an object of type {type(said).__name__}; return an "
            "autopar.Order of the tasks of each mesh"
        )
    if (said.num_stages, said.num_microbatches) != (num_stages, num_microbatches):
        raise ScheduleError(
            f"asked for {num_stages} stages and {num_microbatches} microbatches, {name} gave an order of "
            f"{said.num_stages} and {said.num_microbatches}; return one for the counts that it is given"
        )
    order = Order(num_stages, num_microbatches, tuple(map(tuple, said.meshes)))
    check_order(order)
    return order


def schedule_name(schedule: Schedule | OrderFunction) -> str:
    """The name of a known schedule, or of the function that makes it."""
    if isinstance(schedule, Schedule):
        return schedule.value
    return getattr(schedule, "__name__", type(schedule).__name__)


def as_entries(order: Order) -> tuple[tuple[OrderEntry, ...], ...]:
    """An order as a plan holds it."""
    return tuple(
        tuple((Pass(task.part.value), task.stage, task.microbatch) for task in tasks) for tasks in order.meshes
    )


def from_entries(entries: Sequence[Sequence[OrderEntry]], num_stages: int, num_microbatches: int) -> Order:
    """The checked order that a plan holds; raises ``ScheduleError`` as :func:`check_order`."""
    meshes = tuple(tuple(Task(Part(one.value), stage, number) for one, stage, number in row) for row in entries)
    order = Order(num_stages, num_microbatches, meshes)
    check_order(order)
    return order


def check_order(order: Order) -> None:
    """Check that an order can be carried out, however long its tasks take and messages travel.

    Every forward and backward is there once, and every weight pass if any is; a stage is on one mesh, each mesh has a task,
    and no mesh waits for ever.

    Raises ``ScheduleError`` naming the task or the meshes, and what to do.
    """
    seen: set[Task] = set()
    home: dict[int, int] = {}
    for mesh, tasks in enumerate(order.meshes):
        if not tasks:
            raise ScheduleError(f"mesh {mesh} of {len(order.meshes)} has nothing to do; leave it out")
        for task in tasks:
            if not isinstance(task, Task):
                raise ScheduleError(
                    f"mesh {mesh} of the order has {task!r}, which is no task; write autopar.Task.forward(stage, "
                    "microbatch) or autopar.Task.backward(stage, microbatch)"
                )
            if task in seen:
                raise ScheduleError(f"{task} is in the order twice; name each task once")
            seen.add(task)
            if home.setdefault(task.stage, mesh) != mesh:
                raise ScheduleError(
                    f"{task} is on mesh {mesh}, others of its stage on mesh {home[task.stage]}; choose one"
                )
    wanted = {
        Task(part, stage, microbatch)
        for part in (Part.FORWARD, Part.BACKWARD, *((Part.WEIGHT,) if order.splits_backward else ()))
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
    if task.part is Part.WEIGHT:
        return (Task(Part.BACKWARD, stage, microbatch),)
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
    """The largest number of microbatches whose forward ran on the stage and whose backward, or weight pass, has not."""
    count = most = 0
    last = Part.WEIGHT if order.splits_backward else Part.BACKWARD
    for task in order.meshes[order.mesh_of(stage)]:
        if task.stage == stage:
            count += (task.part is Part.FORWARD) - (task.part is last)
            most = max(most, count)
    return most


def bubble_fraction(order: Order) -> float:
    """The fraction of a step that its meshes idle in the mean, if stages were equal and messages cost nothing.

    Backward passes take twice as long as forward passes here, half of it for weights where these are apart; of the schedules that
    do not split them the fraction does not depend on that.
    """
    times = nominal_times(order.meshes, lambda task: chain_needs(task, order.num_stages), order.nominal_seconds)
    total = len(order.meshes) * max(time.end_seconds for time in times.values())
    return (total - sum(time.end_seconds - time.start_seconds for time in times.values())) / total


def _from_warm_up(num_stages: int, num_microbatches: int, warm_up: Callable[[int], int]) -> Order:
    """One stage per mesh: so many forwards, then forward and backward in turn, then the backwards that are left."""
    meshes = []
    for stage in range(num_stages):
        forwards = [Task.forward(stage, microbatch) for microbatch in range(num_microbatches)]
        backwards = [Task.backward(stage, microbatch) for microbatch in range(num_microbatches)]
        meshes.append(_in_turn(forwards, backwards, warm_up(stage)))
    return Order(num_stages, num_microbatches, tuple(meshes))


def forwards_first(homes: Sequence[int], num_stages: int, num_microbatches: int) -> Order:
    """All forwards, stage by stage, then all backwards, wherever stages lie; ``homes`` are their meshes."""
    numbers = range(num_microbatches)
    meshes = []
    for mesh in range(max(homes) + 1):
        own = [stage for stage, home in enumerate(homes) if home == mesh]
        forwards = [Task.forward(stage, number) for stage in own for number in numbers]
        backwards = [Task.backward(stage, number) for stage in reversed(own) for number in numbers]
        meshes.append((*forwards, *backwards))
    return Order(num_stages, num_microbatches, tuple(meshes))


def _in_turn(forwards: Sequence[Task], backwards: Sequence[Task], warm_up: int) -> tuple[Task, ...]:
    """So many forwards, then forward and backward in turn, then the backwards that are left."""
    first = min(len(forwards), warm_up)
    tasks = list(forwards[:first])
    for number, backward in enumerate(backwards):
        tasks += [*forwards[first + number : first + number + 1], backward]
    return tuple(tasks)


def _gpipe(num_stages: int, num_microbatches: int, num_meshes: int) -> Order:
    return _from_warm_up(num_stages, num_microbatches, lambda stage: num_microbatches)


def _one_f_one_b(num_stages: int, num_microbatches: int, num_meshes: int) -> Order:
    return _from_warm_up(num_stages, num_microbatches, lambda stage: num_stages - stage - 1)


def _eager_one_f_one_b(num_stages: int, num_microbatches: int, num_meshes: int) -> Order:
    return _from_warm_up(num_stages, num_microbatches, lambda stage: 2 * (num_stages - stage - 1))


def _interleaved(num_stages: int, num_microbatches: int, num_meshes: int) -> Order:
    """Narayanan et al., 2021, section 2.2; the last group may be short: its missing microbatches are left out of the order."""
    chunks, groups = num_stages // num_meshes, -(-num_microbatches // num_meshes)

    def in_groups(make: Callable[[int, int], Task], stages: Sequence[int]) -> list[Task]:
        members = range(num_meshes)
        return [make(stage, group * num_meshes + k) for group in range(groups) for stage in stages for k in members]

    meshes = []
    for mesh in range(num_meshes):
        stages = range(mesh, num_stages, num_meshes)
        warm_up = 2 * (num_meshes - mesh - 1) + (chunks - 1) * num_meshes
        tasks = _in_turn(in_groups(Task.forward, stages), in_groups(Task.backward, stages[::-1]), warm_up)
        meshes.append(tuple(task for task in tasks if task.microbatch < num_microbatches))
    return Order(num_stages, num_microbatches, tuple(meshes))


def _zero_bubble_h1(num_stages: int, num_microbatches: int, num_meshes: int) -> Order:
    return _weights_behind(_one_f_one_b(num_stages, num_microbatches, num_meshes), lambda stage: stage)


def _zero_bubble_h2(num_stages: int, num_microbatches: int, num_meshes: int) -> Order:
    return _weights_behind(_eager_one_f_one_b(num_stages, num_microbatches, num_meshes), lambda stage: 2 * stage)


def _weights_behind(order: Order, distance: Callable[[int], int]) -> Order:
    """The order with weight passes: on each stage that of a microbatch so many backward passes behind its own."""
    meshes = []
    for stage, tasks in enumerate(order.meshes):
        behind = distance(stage)
        weights = [Task.weight(stage, microbatch) for microbatch in range(order.num_microbatches)]
        split: list[Task] = []
        for task in tasks:
            split.append(task)
            if task.part is Part.BACKWARD and task.microbatch >= behind:
                split.append(weights[task.microbatch - behind])
        meshes.append((*split, *weights[max(0, order.num_microbatches - behind) :]))
    return Order(order.num_stages, order.num_microbatches, tuple(meshes))


RULES: Mapping[Schedule, Callable[[int, int, int], Order]] = MappingProxyType(
    {
        Schedule.SINGLE: _one_f_one_b,
        Schedule.GPIPE: _gpipe,
        Schedule.ONE_F_ONE_B: _one_f_one_b,
        Schedule.EAGER_ONE_F_ONE_B: _eager_one_f_one_b,
        Schedule.INTERLEAVED_ONE_F_ONE_B: _interleaved,
        Schedule.ZERO_BUBBLE_H1: _zero_bubble_h1,
        Schedule.ZERO_BUBBLE_H2: _zero_bubble_h2,
        Schedule.SHARES: _gpipe,
    }
)
"""The orders of the known schedules, for (stages, microbatches, meshes)."""
