"""A pipeline as it is run: the stages' executables, the table of transfers, and one list of instructions per mesh.

All of it follows from the plan and the step's program; nothing is decided here.  A slot's name is the number of its place in
the stage (:class:`autopar.schedule.slices.Place`); an accumulator is a new slot after every microbatch, for a slot is written
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.graph.ir import Graph
from autopar.plan import Stage
from autopar.schedule.slices import Place, Slices, slices_of
from autopar.schedule.spmd import lower, output_layouts
from autopar.schedule.stage_program import StageProgram


@dataclass(frozen=True)
class StageLowering:
    """One stage: its program, the graph of that, its plan, and the executables that follow."""

    program: StageProgram
    graph: Graph
    stage: Stage
    slices: Slices

    @cached_property
    def names(self) -> dict[Place, int]:
        """A number for every place of the stage."""
        places: dict[Place, None] = dict.fromkeys(self.slices.inputs)
        places.update(dict.fromkeys(place for _, place in self.slices.rows))
        for one in self.slices.executables:
            places.update(dict.fromkeys(argument.place for argument in one.arguments))
            places.update(dict.fromkeys(result.place for result in one.results))
        return {place: number for number, place in enumerate(places)}


def lower_stage(program: StageProgram, graph: Graph, stage: Stage) -> StageLowering:
    """The executables of a stage by its plan; ``graph`` is that of the stage's program."""
    spmd = lower(graph, stage, output_layouts(graph, stage, program.state_pairs))
    return StageLowering(program, graph, stage, slices_of(program, spmd))


