"""Where the first state is made: an initialiser as a program whose outputs must lie as the step wants its inputs.

The same integer program chooses the layouts inside, so random numbers are drawn piece by piece, each device its own.
"""

from __future__ import annotations

from autopar.cluster import Cluster, Mesh
from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.intra_op.alike import merge_alike
from autopar.intra_op.choices import choices_on
from autopar.intra_op.extract import stage_of
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import Model
from autopar.intra_op.problem import state_problem
from autopar.intra_op.restrict import Restriction, demand_keys
from autopar.plan import Layout
from autopar.schedule.spmd import SpmdProgram, lower


def plan_initialiser(graph: Graph, mesh: Mesh, cluster: Cluster, out_layouts: tuple[Layout, ...]) -> SpmdProgram:
    """The steps of an initialiser on ``mesh`` that leave its outputs in ``out_layouts``.

    Raises :class:`~autopar.errors.PlanError` if the solver finds nothing (it always can: replicating is legal).
    """
    problem = state_problem(graph, ())
    pinned: dict[int, Layout] = {}
    taken: set[int] = set()
    for value, layout in zip(graph.outputs, out_layouts, strict=True):
        node = problem.node_of_value.get(-1 if value is None else value)
        # One array may leave in two layouts, or share a node with another output: the first decides where it is made.
        if value is not None and node is not None and node not in taken and value not in graph.constants:
            taken.add(node)
            pinned[value] = layout
    allowed = Restriction(pinned=pinned).of_nodes(problem, mesh)
    quotient = merge_alike(problem, demand_keys(allowed))
    choices = choices_on(problem, quotient, mesh, cluster, allowed)
    solution = solve(Model(choices.node_seconds, choices.edge_seconds))
    if solution is None:
        raise PlanError("the initialiser cannot be laid out as the plan wants its result")
    stage = stage_of(graph, problem, quotient, choices, solution.options)
    return lower(graph, stage, out_layouts)
