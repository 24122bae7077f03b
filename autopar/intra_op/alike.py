"""Nodes that look alike get one variable: depth costs nothing.

Colour refinement (Weisfeiler and Leman, 1968): a node starts with a colour that says what it is (shapes, operator,
work, what the user demands of it), then ``ROUNDS`` times takes the hash of its own colour and of the multiset of
(edge, colour of the neighbour).  Nodes of one colour form a *class*, which is solved as one node whose cost counts as
often as it has members; parallel edges between two classes become one edge with a weight.  The solution gives every
member of a class the same choice.  With identical layers only the layers near the ends differ within ``ROUNDS``
steps, so the number of classes does not grow with depth.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from autopar.graph.ir import Phase
from autopar.graph.merging import Merged
from autopar.intra_op.nodes import End, OperatorNode, Port, Problem, ValueNode

ROUNDS = 6


@dataclass(frozen=True)
class ClassEdge:
    """Edges between members of two classes that look alike; ``weight`` is how often they count in all."""

    source: End
    target: End
    shape: tuple[int, ...]
    itemsize_bytes: int
    dtype: str
    merged: Merged


@dataclass(frozen=True)
class Quotient:
    """The problem with like nodes merged: for each class its members, its first member stands for all."""

    members: tuple[tuple[int, ...], ...]
    class_of: tuple[int, ...]
    edges: dict[ClassEdge, int]


def merge_alike(problem: Problem, demands: Mapping[int, Hashable]) -> Quotient:
    """Classes of like nodes; ``demands`` gives for a node what is demanded of it, which keeps unlike nodes apart."""
    colours = [hash(_first_colour(node, demands.get(index))) for index, node in enumerate(problem.nodes)]
    touching: list[list[tuple[int, int]]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        look = (
            edge.merged.value,
            edge.source.port,
            edge.source.position,
            edge.target.port,
            edge.target.position,
            edge.shape,
            edge.dtype,
            edge.weight,
        )
        code = hash(tuple(part.value if isinstance(part, Port) else part for part in look))
        touching[edge.source.node].append((code, edge.target.node))
        touching[edge.target.node].append((~code, edge.source.node))
    classes = len(set(colours))
    for _ in range(ROUNDS):
        colours = [
            hash((colour, tuple(sorted([hash((code, colours[other])) for code, other in around]))))
            for colour, around in zip(colours, touching, strict=True)
        ]
        if (refined := len(set(colours))) == classes:
            break
        classes = refined
    return _quotient(problem, colours)


def _quotient(problem: Problem, colours: list[int]) -> Quotient:
    groups: dict[int, list[int]] = defaultdict(list)
    for index, colour in enumerate(colours):
        groups[colour].append(index)
    members = tuple(tuple(group) for group in groups.values())
    class_of = [0] * len(colours)
    for number, group in enumerate(members):
        for index in group:
            class_of[index] = number
    edges: Counter[ClassEdge] = Counter()
    for edge in problem.edges:
        source = End(class_of[edge.source.node], edge.source.port, edge.source.position)
        target = End(class_of[edge.target.node], edge.target.port, edge.target.position)
        look = edge.shape, edge.itemsize_bytes, edge.dtype, edge.merged
        edges[ClassEdge(source, target, *look)] += edge.weight
    return Quotient(members, tuple(class_of), dict(edges))


def _first_colour(node: ValueNode | OperatorNode, demand: Hashable) -> Hashable:
    if isinstance(node, ValueNode):
        work = tuple(sorted(node.work.items()))
        kind = (node.may_be_partial, node.is_input, node.is_constant)
        return ("value", node.shape, node.itemsize_bytes, kind, work, demand)
    operator = node.operator
    factors = tuple((factor.size, factor.kind.value) for factor in operator.rule.factors)
    kernel = node.kernel
    shapes = tuple(None if v is None else (v.shape, v.dtype) for v in (*kernel.operands, *kernel.results))
    memory = (kernel.reads, kernel.writes, operator.flops, operator.bytes_moved, node.trips, node.may_pass_partial)
    name = operator.primitive, operator.phase is Phase.UPDATE
    return (name, factors, operator.rule.operands, operator.rule.results, shapes, memory, demand)
