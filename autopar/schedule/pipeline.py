"""A pipeline as it is run: the stages' executables, what passes between them, and one list of instructions per mesh.

All of it follows from the plan and the step's program; nothing is decided here.  An array's name in the lists is the number of
its place in the stage (:class:`autopar.schedule.slices.Place`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.plan import Stage
from autopar.schedule.instructions import Slot, verify_lists, verify_meetings
from autopar.schedule.lists import Executable, Kind, Passage, StageInterface, StepLists, build_lists
from autopar.schedule.orders import Order
from autopar.schedule.residuals import with_hosted
from autopar.schedule.slices import Place, Scope, Slices, slices_of
from autopar.schedule.spmd import Buffer, lower, output_layouts
from autopar.schedule.stage_program import Crossing, Passing, StageProgram

_KINDS = {Scope.ONCE: Kind.ONCE, Scope.MICROBATCH: Kind.EACH, Scope.SUM: Kind.CARRIED}


@dataclass(frozen=True)
class StageLowering:
    """One stage: its program, the graph of that, its plan, and the executables that follow.

    With ``donates_state`` the leaves of the state give their memory to their next values.
    """

    program: StageProgram
    graph: Graph
    stage: Stage
    slices: Slices
    donates_state: bool = True

    @cached_property
    def names(self) -> dict[Place, int]:
        """A number for every place of the stage."""
        places: dict[Place, None] = dict.fromkeys(self.slices.inputs)
        places.update(dict.fromkeys(place for place in self.slices.outputs if place is not None))
        places.update(dict.fromkeys(place for _, place in self.slices.rows))
        for one in self.slices.executables:
            places.update(dict.fromkeys(argument.place for argument in one.arguments))
            places.update(dict.fromkeys(result.place for result in one.results))
        return {place: number for number, place in enumerate(places)}

    @cached_property
    def interface(self) -> StageInterface:
        """What the stage reads and writes, by names."""
        names, slices = self.names, self.slices
        executables = tuple(
            Executable(
                one.part,
                tuple(names[argument.place] for argument in one.arguments),
                tuple(names[result.place] for result in one.results),
                tuple(names[one.arguments[position].place] for position in one.donated),
                one.segment,
            )
            for one in slices.executables
        )
        leaves = [
            names[place] for end, place in zip(self.program.inputs, slices.inputs, strict=True) if end.crossing is None
        ]
        results = [
            names[place]
            for end, place in zip(self.program.outputs, slices.outputs, strict=True)
            if end.crossing is None and place is not None
        ]
        donated = {name for one in executables for name in one.donates}
        rows = [names[place] for _, place in slices.rows]
        return StageInterface(
            executables,
            {number: _KINDS[place.scope] for place, number in names.items()},
            given=tuple(dict.fromkeys((*leaves, *rows))),
            kept=tuple(dict.fromkeys((*results, *(name for name in leaves if name not in donated)))),
        )

    def input_place(self, crossing: Crossing) -> Place:
        """Where what crosses to this stage lies."""
        return next(
            place
            for end, place in zip(self.program.inputs, self.slices.inputs, strict=True)
            if end.crossing is not None and end.crossing.number == crossing.number
        )

    def output_place(self, crossing: Crossing) -> Place:
        """Where what crosses from this stage lies."""
        if crossing.passing is Passing.START:
            return next(
                place
                for end, place in zip(self.program.inputs, self.slices.inputs, strict=True)
                if end.crossing is None and end.position == crossing.leaf
            )
        return next(
            place
            for end, place in zip(self.program.outputs, self.slices.outputs, strict=True)
            if place is not None and end.crossing is not None and end.crossing.number == crossing.number
        )


@dataclass(frozen=True)
class Pipeline:
    """All stages with what passes between them, in one order."""

    stages: tuple[StageLowering, ...]
    crossings: tuple[Crossing, ...]
    order: Order
    lists: StepLists

    def slot(self, stage: int, place: Place) -> Slot:
        """The slot of a place that is there once."""
        return Slot(stage, self.stages[stage].names[place])

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The mesh of every stage."""
        return self.order.homes

    def stays(self, crossing: Crossing) -> bool:
        """Whether a value passes between stages on one mesh: then it is moved, not sent."""
        return self.homes[crossing.source] == self.homes[crossing.target]


def lower_stage(
    program: StageProgram, graph: Graph, stage: Stage, *, donates_state: bool = True, splits_backward: bool = False
) -> StageLowering:
    """The executables of a stage by its plan; ``graph`` is that of the stage's program.

    Raises ``PlanError`` where the plan has a value in the memory of the host that is not kept for the backward pass alone.
    """
    spmd = lower(graph, stage, output_layouts(graph, stage, program.state_pairs))
    slices = slices_of(program, spmd, donates_state=donates_state, splits_backward=splits_backward)
    return StageLowering(program, graph, stage, with_hosted(slices, stage.hosted), donates_state)


def pipeline_of(stages: Sequence[StageLowering], crossings: Sequence[Crossing], order: Order) -> Pipeline:
    """The lists of instructions of lowered stages: over any transport they come to an end.

    Of what is only to be simulated nothing else is checked; what is to run, :func:`verified` looks at.

    Raises ``PlanError`` where stages do not lie as the order has it: those of one mesh, and no others, on the same devices, of
    which they make the same mesh.
    """
    _check_meshes(stages, order)
    passages = [
        Passage(
            crossing.number,
            crossing.source,
            stages[crossing.source].names[stages[crossing.source].output_place(crossing)],
            crossing.target,
            stages[crossing.target].names[stages[crossing.target].input_place(crossing)],
        )
        for crossing in crossings
    ]
    lists = build_lists(order, [lowering.interface for lowering in stages], passages)
    verify_meetings(lists.lists)
    return Pipeline(tuple(stages), tuple(crossings), order, lists)


def verified(pipeline: Pipeline) -> Pipeline:
    """The pipeline, if its lists keep what every interpreter of them relies on; raises ``InternalError`` where they do not."""
    lists = pipeline.lists
    verify_lists(lists.lists, lists.given, lists.kept_slots)
    return pipeline


def _check_meshes(stages: Sequence[StageLowering], order: Order) -> None:
    placed: dict[int, Stage] = {}
    for number, (lowering, home) in enumerate(zip(stages, order.homes, strict=True)):
        first = placed.setdefault(home, lowering.stage)
        if (first.devices, first.mesh) != (lowering.stage.devices, lowering.stage.mesh):
            raise PlanError(
                f"stage {number} is on {lowering.stage.mesh} of devices {lowering.stage.devices}, and another stage that the "
                f"schedule puts on the same mesh is on {first.mesh} of devices {first.devices}; give both the same"
            )
    devices = [device for stage in placed.values() for device in stage.devices]
    if len(set(devices)) < len(devices):
        raise PlanError(
            f"two of {len(placed)} meshes share a device; give each its own, or fewer meshes to the schedule"
        )


def layouts_of_crossing(pipeline: Pipeline, crossing: Crossing) -> tuple[Buffer, Buffer]:
    """The buffers that a crossing joins."""
    source, target = pipeline.stages[crossing.source], pipeline.stages[crossing.target]
    return source.output_place(crossing).buffer, target.input_place(crossing).buffer
