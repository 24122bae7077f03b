r"""What can another number of microbatches give at best?  Told from the integer program of one number.

If a step of N₀ microbatches is run in N, and r = N / N₀, then

    work on rows of the batch, and collectives of them      c        a microbatch has 1/r of the rows, there are r as many
    their bytes                                             u / r
    the same of other arrays inside the loop                c · r    gathered parameters, sums of gradients

(latencies of the others are left out).  With U bytes for the fullest moment, every price λ ≥ 0 bounds what a plan in N costs:

    L(λ) = minₓ { c(x) + λ · (u(x) / U − 1) }                     (Everett, 1963; see :mod:`autopar.intra_op.squeeze`)

U is the budget and what the rows of the program counted too much of the plan that was found for N₀.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from autopar.graph.ir import Graph, Operator
from autopar.inter_op.looped import Looped
from autopar.intra_op.bound import lower_bound
from autopar.intra_op.choices import edge_seconds
from autopar.intra_op.loop_links import LoopLink, loop_links
from autopar.intra_op.model import MemoryRow, Model
from autopar.intra_op.nodes import OperatorNode, Port, Problem, ValueNode
from autopar.intra_op.on_mesh import Ground, OnMesh
from autopar.intra_op.task import Found, Task

PRICES = (1 / 4, 1 / 16, 1.0, 0.0)
"""Prices λ, in shares of what the plan found costs, at which a smaller number of microbatches is bounded."""


@dataclass(frozen=True)
class Rescaling:
    """A plan of a looped step, and all that is needed to ask about other numbers of microbatches."""

    task: Task
    ground: Ground
    loop: Looped
    found: Found

    def bound_seconds(self, count: int, enough: float) -> float:
        """Seconds that no plan in ``count`` microbatches beats, by the model above; no more is proven than ``enough``."""
        found, ratio = self.found, count / self.loop.count
        one = OnMesh(self.task, self.ground, found.quotient, found.choices, _free(found))
        rows = values_with_rows(self.loop)
        model = self._model(one, rows, ratio)
        moments = self.ground.moments(self.task.donated)
        used = [row.used(found.options) for row in one.rows_of(moments)]
        fullest = max(range(len(used)), key=used.__getitem__)
        held = {value: size / ratio if value in rows else size for value, size in moments[fullest].items()}
        (row,) = one.rows_of([held])
        over = max(0.0, used[fullest] - found.prediction.memory.total_bytes)
        limit = self.task.budget_bytes + over
        bound = -float("inf")
        for share in (0.0,) if ratio >= 1 else PRICES:
            price = share * one.model.cost(found.options)
            bound = max(bound, lower_bound(_priced(model, row, price / limit), enough=enough + price).cost - price)
            if bound >= enough:
                break
        return bound

    def _model(self, one: OnMesh, rows: frozenset[int], ratio: float) -> Model:
        """The model with what is paid once per microbatch in proportion to their number."""
        problem, quotient, choices = self.ground.problem, one.quotient, one.choices
        inside = {value.id for value in self.loop.body.all_values()}
        repeated = _nodes_of(problem, inside - rows) - _nodes_of(problem, rows)
        repeated |= {
            number
            for number, node in enumerate(problem.nodes)
            if isinstance(node, OperatorNode)
            and not touched_values(node.operator) & rows
            and touched_values(node.operator) & inside
        }
        nodes = [
            seconds * ratio if members[0] in repeated else seconds
            for members, seconds in zip(quotient.members, choices.node_seconds, strict=True)
        ]
        edges = dict(choices.edge_seconds)
        for edge, weight in quotient.edges.items():
            ends = [quotient.members[end.node][0] for end in (edge.source, edge.target)]
            values = [node for node in ends if isinstance(problem.nodes[node], ValueNode)]
            a, b = edge.source.node, edge.target.node
            if a != b and values and repeated.issuperset(values):
                matrix = edge_seconds(problem, quotient, choices, edge, self.task.cluster)
                key = (min(a, b), max(a, b))
                edges[key] = edges[key] + (ratio - 1) * weight * (matrix if a < b else matrix.T)
        return Model(nodes, edges)


def _free(found: Found) -> Model:
    return Model(found.choices.node_seconds, found.choices.edge_seconds)


def _priced(model: Model, row: MemoryRow, seconds_per_byte: float) -> Model:
    if not seconds_per_byte:
        return model
    nodes, edges = list(model.nodes), dict(model.edges)
    for node, held in row.nodes.items():
        nodes[node] = nodes[node] + seconds_per_byte * held
    for pair, held in row.edges.items():
        edges[pair] = edges[pair] + seconds_per_byte * held
    return Model(nodes, edges)


def touched_values(operator: Operator) -> set[int]:
    """What an operator reads and makes."""
    return {value for value in (*operator.operands, *operator.results) if value is not None}


def _nodes_of(problem: Problem, values: Set[int]) -> set[int]:
    """Nodes of these values and of their copies."""
    pairs = (*problem.node_of_value.items(), *problem.copy_of_value.items())
    return {node for value, node in pairs if value in values}


# ----------------------------------------------------------------------------------------------------- rows of the batch


def values_with_rows(loop: Looped) -> frozenset[int]:
    """Values inside the loop over microbatches one dimension of which is the examples of a microbatch."""
    dims: dict[int, set[int]] = {loop.graph.inputs[position]: {1} for position in loop.batch}
    _enter(loop.loop, dims)
    return frozenset(value.id for value in loop.body.all_values() if dims.get(value.id))


def _enter(operator: Operator, dims: dict[int, set[int]]) -> None:
    """Follow the dimensions through the bodies of a loop or branch, and out of it."""
    links = loop_links(operator)
    inputs = {value for body in operator.bodies for value in body.inputs}
    _pass([link for link in links if link.target in inputs and not link.inside], dims)
    for body in operator.bodies:
        _follow(body, dims)
    _pass([link for link in links if link.target not in inputs], dims)


def _pass(links: Sequence[LoopLink], dims: dict[int, set[int]]) -> None:
    for link in links:
        shift = (link.source_port is Port.STACKED) - (link.target_port is Port.STACKED)
        found = {dim + shift for dim in dims.get(link.source, ()) if dim + shift >= 0}
        dims.setdefault(link.target, set()).update(found)


def _follow(graph: Graph, dims: dict[int, set[int]]) -> None:
    """A factor that is major in such a dimension of an operand makes such dimensions of results."""
    for operator in graph.operators:
        if operator.bodies:
            _enter(operator, dims)
            continue
        carried = {
            operator.rule.operands[position][dim][0]
            for position, operand in enumerate(operator.operands)
            if operand is not None
            for dim in dims.get(operand, ())
            if operator.rule.operands[position][dim]
        }
        for result, mapping in zip(operator.results, operator.rule.results, strict=True):
            found = {dim for dim, factors in enumerate(mapping) if factors and factors[0] in carried}
            if found:
                dims[result] = found
