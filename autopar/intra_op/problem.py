"""What there is to choose, before any mesh is known: nodes, edges, and which of them are alike.

A node is either a set of values that must share one layout, or one operator whose strategy is to be chosen
(:mod:`autopar.intra_op.nodes`).

*Values.*  Two values share a node when an operator maps both identically, dimension by dimension (elementwise work).
Inputs of the program or of a loop body, and values that may stay partial (:mod:`autopar.intra_op.linear_sums`), keep nodes of
their own, so a parameter can lie otherwise than its gradient and its optimizer state: that is where ZeRO comes from.  A value
with several consumers that are not elementwise gets a *copy* node between itself and them: one gather serves them all.

*Edges* join a node that produces an array with one that needs it; the edge's price is the reshard between the layout
that the one yields and the layout that the other wants.  At the borders of loops they are :mod:`autopar.intra_op.loop_links`.
State that a step returns has an edge to the input that it will be in the next step, so it goes back to the layout that it came
in, and the reshard at the end of the step has its price.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar import _compat
from autopar.cost_model.kernels import Kernel
from autopar.graph.build import BARRIER, LoopKind
from autopar.graph.fusion import fuse
from autopar.graph.ir import FactorKind, Graph, Operator, Phase, Value
from autopar.graph.merging import Merged, merged_values
from autopar.intra_op.linear_sums import gathering_carries, linear_values
from autopar.intra_op.loop_links import loop_links
from autopar.intra_op.nodes import Edge, End, OperatorNode, Port, Problem, ValueNode, Work

COPY_WORTH_BYTES = 1 << 12
"""Below this size a second gather is cheaper than a node."""


def is_elementwise(operator: Operator, values: dict[int, Value]) -> bool:
    """Whether every ranked operand and result is mapped identically, dimension by dimension, with nothing blocked."""
    rule = operator.rule
    if operator.bodies or not rule.known or any(f.kind is not FactorKind.PARALLEL for f in rule.factors):
        return False
    shape = values[operator.results[0]].shape if operator.results else ()
    pattern = rule.results[0] if rule.results else ()
    if any(extent > 1 and len(factors) != 1 for extent, factors in zip(shape, pattern, strict=True)):
        return False
    if any(values[r].shape != shape for r in operator.results) or any(p != pattern for p in rule.results):
        return False
    for operand, mapping in zip(operator.operands, rule.operands, strict=True):
        if operand is None or not values[operand].shape:
            continue
        if values[operand].shape != shape or mapping != pattern:
            return False
    return bool(operator.results)


def state_problem(
    graph: Graph, state_pairs: tuple[tuple[int, int], ...], separate: frozenset[int] = frozenset()
) -> Problem:
    """Nodes and edges of a program; ``state_pairs`` are (input position, output position): what goes
    out lies as what came in.

    ``separate`` are values that share no node with another: something is demanded of them alone.
    """
    builder = _ProblemBuilder(graph, separate)
    builder.add_level(graph, trips=1)
    builder.add_outputs(graph, {output: source for source, output in state_pairs})
    return builder.finish()


class _ProblemBuilder:
    """Owns the growing lists; values are merged by union–find, so nodes are numbered at the end."""

    def __init__(self, graph: Graph, separate: frozenset[int]) -> None:
        self._separate = separate
        self._fusion = fuse(graph)
        self._merged = merged_values(graph)
        self._values = {value.id: value for value in graph.all_values()}
        self._parent: dict[int, int] = {}
        self._partial: set[int] = set()
        self._inputs: set[int] = set(graph.inputs)
        self._constants: set[int] = set()
        self._followers: list[tuple[Operator, int]] = []
        self._operators: list[tuple[Operator, int]] = []
        # (value, target value or operator position, phase, trips): needs of arrays, resolved in finish().
        self._needs: dict[int, list[_Need]] = defaultdict(list)
        self._extra: list[tuple[int, Port, int, Port, int, int]] = []

    def find(self, value: int) -> int:
        root = value
        while (parent := self._parent.get(root, root)) != root:
            root = parent
        while self._parent.get(value, value) != root:
            self._parent[value], value = root, self._parent[value]
        return root

    def union(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[max(a, b)] = min(a, b)

    def add_level(self, graph: Graph, *, trips: int, gathering: frozenset[int] = frozenset()) -> None:
        linear = linear_values(graph, gathering)
        self._partial |= linear
        alone = {*graph.inputs, *graph.constants, *linear, *self._separate}
        self._constants.update(graph.constants)
        for operator in graph.operators:
            if operator.bodies:
                self._add_loop(operator, trips)
            elif operator.primitive == BARRIER:
                self._guard(operator, alone, trips)
            elif is_elementwise(operator, self._values) and not (operator.linear and operator.results[0] in linear):
                self._follow(operator, alone, trips)
            else:
                self._operators.append((operator, trips))
                for position, operand in enumerate(operator.operands):
                    if operand is not None:
                        self._needs[operand].append(
                            _Need(operator.phase, trips, operator=operator.id, position=position)
                        )

    def _follow(self, operator: Operator, alone: set[int], trips: int) -> None:
        """An elementwise operator: its results share one node, and so do the operands that are free to."""
        first = operator.results[0]
        for result in operator.results[1:]:
            self.union(first, result)
        for operand in dict.fromkeys(operator.operands):
            if operand is None or not self._values[operand].shape:
                continue
            if operand in alone or first in self._separate:
                self._needs[operand].append(_Need(operator.phase, trips, value=first))
            else:
                self.union(first, operand)
        self._followers.append((operator, trips))

    def _guard(self, operator: Operator, alone: set[int], trips: int) -> None:
        """A barrier: every result lies as its own operand, whatever the others do."""
        for operand, result in zip(operator.operands, operator.results, strict=True):
            if operand is None or not self._values[operand].shape:
                continue
            if operand in alone or result in self._separate:
                self._needs[operand].append(_Need(operator.phase, trips, value=result))
            else:
                self.union(operand, result)

    def _add_loop(self, operator: Operator, trips: int) -> None:
        for body in operator.bodies:
            self._inputs.update(body.inputs)
            self.add_level(body, trips=trips * body.trips, gathering=gathering_carries(operator))
        for link in loop_links(operator):
            inner_trips = trips * operator.bodies[link.body].trips if link.inside else trips
            self._extra.append(
                (link.source, link.source_port, link.target, link.target_port, inner_trips, link.shape_of)
            )
        if operator.primitive == LoopKind.COND:
            for inputs in zip(*(body.inputs for body in operator.bodies), strict=True):
                for other in inputs[1:]:
                    self.union(inputs[0], other)
        if operator.primitive == LoopKind.WHILE:
            # The condition reads the very buffers that the body carries.
            condition, body = operator.bodies
            split, consts = (operator.equation.params[name] for name in ("cond_nconsts", "body_nconsts"))
            for tested, carried in zip(condition.inputs[split:], body.inputs[consts:], strict=True):
                self.union(tested, carried)

    def add_outputs(self, graph: Graph, source_of_output: dict[int, int]) -> None:
        """State returns to the layout it came in, by an edge that prices that; other outputs must not stay partial.

        Nor must what a scan stacks for an output: in a pipeline it leaves the stage trip by trip.
        """
        stacked: dict[int, int | None] = {}
        for operator in graph.operators:
            if operator.primitive == LoopKind.SCAN:
                _, carries = _compat.scan_arity(operator.equation.params)
                stacked.update(zip(operator.results[carries:], operator.bodies[0].outputs[carries:], strict=True))
        for position, value in enumerate(graph.outputs):
            if value is None:
                continue
            if position in source_of_output:
                home = graph.inputs[source_of_output[position]]
                if home != value:
                    self._extra.append((value, Port.VALUE, home, Port.VALUE, 1, value))
            else:
                self._partial -= {value, stacked.get(value, value)}

    def finish(self) -> Problem:
        nodes: list[ValueNode | OperatorNode] = []
        of_root: dict[int, int] = {}
        node_of_value: dict[int, int] = {}
        for value in self._values.values():
            if (not value.shape and value.id not in self._partial) or 0 in value.shape:
                continue
            root = self.find(value.id)
            if root not in of_root:
                of_root[root] = len(nodes)
                nodes.append(ValueNode(value.shape, value.itemsize_bytes))
            node = nodes[of_root[root]]
            assert isinstance(node, ValueNode)
            node.members.append(value.id)
            node.may_be_partial |= value.id in self._partial
            node.is_input |= value.id in self._inputs
            node.is_constant |= value.id in self._constants
            node_of_value[value.id] = of_root[root]
        followers = self._count_work(nodes, node_of_value)
        node_of_operator = {}
        for operator, trips in self._operators:
            node_of_operator[operator.id] = len(nodes)
            nodes.append(self._operator_node(operator, trips))
        edges, copies = self._edges(nodes, node_of_value, node_of_operator)
        return Problem(nodes, edges, node_of_value, node_of_operator, copies, followers, self._fusion)

    def _count_work(self, nodes: list[ValueNode | OperatorNode], node_of_value: dict[int, int]) -> dict[int, int]:
        followers = {}
        for operator, trips in self._followers:
            if (index := node_of_value.get(operator.results[0])) is None:
                continue
            followers[operator.id] = index
            node = nodes[index]
            assert isinstance(node, ValueNode)
            touched = [operator.operands[k] for k in self._fusion.reads[operator.id]]
            touched += [operator.results[k] for k in self._fusion.writes(operator)]
            traffic = float(sum(self._values[value].size_bytes for value in touched if value is not None))
            dtype, streamed = self._values[operator.results[0]].dtype, operator.phase is Phase.UPDATE
            node.work[Work(operator.flops, traffic, dtype, operator.primitive, streamed)] += trips
        return followers

    def _operator_node(self, operator: Operator, trips: int) -> OperatorNode:
        results = tuple(self._values[result] for result in operator.results)
        ranked = [operand for operand in operator.operands if operand is not None]
        kernel = Kernel(
            operator,
            tuple(None if operand is None else self._values[operand] for operand in operator.operands),
            results,
            self._fusion.reads[operator.id],
            self._fusion.writes(operator),
        )
        return OperatorNode(
            kernel=kernel,
            trips=trips,
            may_pass_partial=operator.linear
            and all(operand in self._partial for operand in ranked)
            and operator.results[0] in self._partial,
            free_results=tuple(k for k, v in enumerate(results) if not v.shape and v.id not in self._partial),
            joining_results=frozenset(k for k, v in enumerate(results) if self._merged.get(v.id) is Merged.ALL),
        )

    def _edges(
        self,
        nodes: list[ValueNode | OperatorNode],
        node_of_value: dict[int, int],
        node_of_operator: dict[int, int],
    ) -> tuple[list[Edge], dict[int, int]]:
        edges: list[Edge] = []
        copies: dict[int, int] = {}

        def connect(source: End, target: End, value: int, weight: int) -> None:
            if source.node != target.node:
                array = self._values[value]
                merged = self._merged.get(value, Merged.NONE)
                edges.append(Edge(source, target, array.shape, array.itemsize_bytes, array.dtype, weight, merged))

        for value, needs in self._needs.items():
            if value not in node_of_value:
                continue
            home = node_of_value[value]
            targets: dict[End, tuple[int, bool]] = {}
            for need in needs:
                through_copy = not (need.phase is Phase.UPDATE and value in self._inputs)
                end = need.end(node_of_value, node_of_operator)
                if end is not None and end.node != home:
                    targets.setdefault(end, (need.trips, through_copy and not self._passes_partial(value, end, nodes)))
            shared = [end for end, (_, through_copy) in targets.items() if through_copy]
            array = self._values[value]
            middle = home
            if len(shared) > 1 and array.size_bytes >= COPY_WORTH_BYTES:
                middle = copies[value] = len(nodes)
                nodes.append(ValueNode(array.shape, array.itemsize_bytes))
                connect(End(home), End(middle), value, targets[shared[0]][0])
            for end, (trips, through_copy) in targets.items():
                connect(End(middle if through_copy else home), end, value, trips)
        for operator, trips in self._operators:
            for position, result in enumerate(operator.results):
                if result in node_of_value:
                    source = End(node_of_operator[operator.id], Port.RESULT, position)
                    connect(source, End(node_of_value[result]), result, trips)
        for source_value, source_port, target_value, target_port, trips, shape_of in self._extra:
            if source_value in node_of_value and target_value in node_of_value:
                source = End(node_of_value[source_value], source_port)
                connect(source, End(node_of_value[target_value], target_port), shape_of, trips)
        return edges, copies

    def _passes_partial(self, value: int, end: End, nodes: list[ValueNode | OperatorNode]) -> bool:
        """Whether the consumer could take summands, which a copy could not give it."""
        node = nodes[end.node]
        if value not in self._partial:
            return False
        return node.may_be_partial if isinstance(node, ValueNode) else node.may_pass_partial


@dataclass(frozen=True)
class _Need:
    """Somebody needs a value: an operator at a position, or the elementwise node of another value."""

    phase: Phase
    trips: int
    operator: int = -1
    position: int = 0
    value: int = -1

    def end(self, node_of_value: dict[int, int], node_of_operator: dict[int, int]) -> End | None:
        if self.operator >= 0:
            return End(node_of_operator[self.operator], Port.OPERAND, self.position)
        index = node_of_value.get(self.value)
        return None if index is None else End(index)
