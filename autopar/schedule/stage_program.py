"""A stage's program as it stands in a step that is cut: what its inputs, outputs and equations are for.

Each stage has a program of its own – before, a loop over microbatches, after – that can be laid out and lowered like a whole
step.  Values that other stages make are inputs of it, values that they read are outputs; what is of one microbatch stands
there as a stack over the microbatches.  At run time no such stack exists: each value crosses when it is made,

    START   a leaf of the state, to another stage that reads it as well, before anything else
    MICRO   a value of one microbatch, after the pass that makes it
    LATE    a value made after the microbatches
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from autopar.schedule.instructions import Part


class Passing(Enum):
    """When a value crosses from stage to stage."""

    START = "start"
    MICRO = "micro"
    LATE = "late"


@dataclass(frozen=True)
class Crossing:
    """One value that passes from a stage to another; of a MICRO one, ``part`` is the pass that makes it.

    ``segment`` is that of the AFTER part that makes a LATE one; ``leaf`` the input position of a START one.
    """

    number: int
    passing: Passing
    source: int
    target: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    part: Part = Part.BEFORE
    segment: int = 0
    leaf: int = -1
    value: int = -1
    """Of a MICRO one: its id in the graph of a microbatch."""


@dataclass(frozen=True)
class End:
    """What an input or output of a stage's program is: a leaf of the step (``crossing`` is None) or a crossing."""

    position: int = -1
    crossing: Crossing | None = None


@dataclass(frozen=True)
class StageProgram:
    """One stage as a program: ``jaxpr`` is closed; its equation number ``loop`` is the loop over microbatches.

    ``parts`` are the passes of the loop body's equations, ``segments`` those of the equations after the loop.
    ``state_pairs`` are (input, output) positions of the state leaves that live here.
    """

    jaxpr: Any
    loop: int
    inputs: tuple[End, ...]
    outputs: tuple[End, ...]
    parts: tuple[Part, ...]
    segments: tuple[int, ...]
    state_pairs: tuple[tuple[int, int], ...]
    carries: int

    @property
    def outline(self) -> tuple[object, ...]:
        """What lowering asks of a program beside its equations: stages in which these and this are the same are lowered alike.

        Equal equations say nothing of where inputs come from: one layer reads the batch where the next reads what another stage
        sends.
        """
        crossings = [end.crossing for end in (*self.inputs, *self.outputs)]
        ends = tuple(None if crossing is None else (crossing.passing, crossing.segment) for crossing in crossings)
        return self.loop, ends, self.parts, self.segments, self.state_pairs, self.carries


@dataclass(frozen=True)
class Cut:
    """A step cut into stages; ``owners`` says for each leaf of the state (input position) on which stage it lives."""

    stages: tuple[StageProgram, ...]
    crossings: tuple[Crossing, ...]
    owners: dict[int, int]
