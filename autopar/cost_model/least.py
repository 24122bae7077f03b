"""How soon can a step of given stages be done at all, whatever the order of their tasks?

The first microbatch comes to stage s at a_s or later.  If s is the first stage of mesh r, that mesh works through all its tasks
one after the other from then on, but for what it does once before them (e seconds, as for parameters that are gathered).  With
f the seconds of a stage's forward pass, F, B and U those of a mesh's own passes and of its update, each at the speed at which
the mesh works while the others idle,

    a_0 = 0    a_{s+1} = max(a_s, e_s) + f_s        T ≥ max_r ( max(a_s, e_s) + N (F_r + B_r) + U_r )

Messages that take time, and tasks that wait for others, come on top.  Backward passes of which the gradients of weights are
apart do the same work in more calls, so the bound holds for these too if it is made of the costs of whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_model.machine import Machine
from autopar.cost_model.pipeline import StageCost
from autopar.schedule.instructions import Part


def least_seconds(costs: Sequence[StageCost], homes: Sequence[int], count: int, machine: Machine) -> float:
    """Seconds of a step of ``count`` microbatches at least; ``homes`` are the meshes of the stages."""
    done: dict[int, float] = {}
    here_seconds = 0.0
    for cost, home in zip(costs, homes, strict=True):
        speed = machine.meshes[home].fastest
        before_seconds = cost.seconds(Part.BEFORE) / speed
        here_seconds = max(here_seconds, before_seconds)
        done[home] = done.get(home, here_seconds) + cost.step_seconds(count) / speed - before_seconds
        here_seconds += cost.seconds(Part.FORWARD) / speed
    return max(done.values())
