"""Of which values can collectives become one with those of other values?

XLA combines collectives of one kind over the same devices that do not wait for each other; on GPUs these pay one latency.
A step has three families of values whose collectives do not wait for each other, however many there are:

* gradients on their way into the update (:mod:`autopar.graph.gradients`): their sums;
* what the step is given, and what follows from one such array alone (a cast, a transpose): parameters, when they are gathered;
* new parameters and optimizer state that leave the step, when they are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from autopar.graph.gradients import gradient_values
from autopar.graph.ir import Graph, Phase


class Merged(Enum):
    """Which collectives of a value may become one with others."""

    NONE = "none"
    GATHERS = "gathers"
    ALL = "all"


def merged_values(graph: Graph) -> Mapping[int, Merged]:
    """For values of this level of a program, which collectives merge; of those that are not named none do."""
    ready = set(graph.inputs)
    for operator in graph.operators:
        arrays = [operand for operand in operator.operands if operand is not None]
        if operator.linear and len(arrays) == 1 and arrays[0] in ready:
            ready.update(operator.results)
    leaving = {value for value in graph.outputs if value is not None}
    updated = {
        value
        for operator in graph.operators
        if operator.phase is Phase.UPDATE
        for value in operator.results
        if value in leaving
    }
    return dict.fromkeys(ready | updated, Merged.GATHERS) | dict.fromkeys(gradient_values(graph), Merged.ALL)
