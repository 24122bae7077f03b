"""What is asked of the plan of one program on one set of devices, and what is answered.

A :class:`Task` names the program, the meshes that may be chosen among, what one device may hold and what is demanded of layouts.
:mod:`autopar.intra_op.search` answers with the fastest stage (:class:`Found`), or that there is none that is fast enough.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.cluster import Cluster, Mesh
from autopar.cost_model.hosted import has_host_memory
from autopar.graph.ir import Graph
from autopar.intra_op.alike import Quotient
from autopar.intra_op.choices import Choices
from autopar.intra_op.model import Model
from autopar.intra_op.nodes import Problem
from autopar.intra_op.restrict import Restriction
from autopar.plan import Prediction, SolverReport, Stage
from autopar.schedule.spmd import Hosted, SpmdProgram, hosted_ends

WORTH_SHARE = 2e-3
"""A wide program that cannot beat the best plan by more than this share is not solved."""


@dataclass(frozen=True)
class Task:
    """What is to be planned.

    ``restriction`` is asked once per mesh; ``budget_bytes`` is what one device may hold; ``donated`` are the input
    positions whose memory the outputs may take over; ``names`` are paths of values, for messages.
    """

    graph: Graph
    state_pairs: tuple[tuple[int, int], ...]
    donated: frozenset[int]
    cluster: Cluster
    meshes: tuple[Mesh, ...]
    budget_bytes: float
    restriction: Callable[[Mesh], Restriction]
    batch: tuple[int, ...] = ()
    """Input positions of batch leaves, after which the axis that cuts them is called; empty: names stay as they are."""
    examples_dim: int = 0
    """The dimension of batch leaves along which the examples lie."""
    solver_seconds: float = 60.0
    names: Mapping[int, str] | None = None
    report_progress: Callable[[str], None] = lambda message: None
    worth_share: float = WORTH_SHARE
    """Another mesh is left alone that can save no more than this share of the seconds."""
    separate: frozenset[int] = frozenset()
    """Values that lie for themselves (see :func:`autopar.intra_op.problem.state_problem`)."""
    hosted: tuple[int, ...] = ()
    """Positions of inputs that lie in the memory of the host between steps."""
    made_again: frozenset[int] = frozenset()
    """Values whose copies are made wherever they are needed, so that they take no room in between."""

    @property
    def hosted_ends(self) -> Hosted:
        """Those inputs, and their next values."""
        return hosted_ends(self.hosted, self.state_pairs)

    @property
    def hosted_values(self) -> dict[int, int]:
        """Inputs and outputs that lie there, with how often a step copies them; none where host and device share one memory."""
        if not self.hosted or not has_host_memory(self.cluster.device.platform):
            return {}
        graph, ends = self.graph, self.hosted_ends
        read = {operand for operator in graph.operators for operand in operator.operands}
        copied = {graph.inputs[position]: int(graph.inputs[position] in read) for position in ends.inputs}
        return copied | {value: 1 for output in ends.outputs if (value := graph.outputs[output]) is not None}


@dataclass(frozen=True)
class Found:
    """A stage, the steps it lowers to, what is predicted of it, and how it was found.

    ``model`` is the integer program whose solution ``options`` is; None when only the leanest plan keeps the budget, so
    that seconds did not decide.  With ``is_narrowed`` it held the likeliest options of every class only; where a plan
    ``has_less_scratch``, its memory rows are about scratch memory (:mod:`autopar.intra_op.scratch`), else about the budget.
    """

    stage: Stage
    program: SpmdProgram
    prediction: Prediction
    solver: SolverReport
    problem: Problem
    quotient: Quotient
    choices: Choices
    options: tuple[int, ...]
    model: Model | None
    is_narrowed: bool = False
    has_less_scratch: bool = False

    @property
    def is_squeezed(self) -> bool:
        """Whether the memory budget kept the planner from the fastest plan."""
        return self.model is None or (bool(self.model.memory) and not self.has_less_scratch)


class TooSlow(enum.Enum):
    """There may be plans, but none that costs as little as is wanted."""

    REGARDLESS = enum.auto()  # not even without the budget
    WITHIN_BUDGET = enum.auto()
