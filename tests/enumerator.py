"""An independent referee of the integer program: the cheapest plan of a tiny program by trying all of them.

Nothing of `autopar.intra_op` is imported: what may be chosen, what is tied to what, and what it costs is written here
once more, from the words of the module docstrings, straight on the graph.  With x_n the layout of node n (a set of
values that share one layout, or a copy), and operators deciding for themselves once the layouts around them are known,

    optimum = min over (x_1 … x_k) of  Σ work(x_n) + Σ reshard(x_m, x_n) + Σ_operators min_s price(s | layouts around)

is one dense tensor with an axis per node, so that no plan is left out.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from autopar.cluster import Cluster, Mesh, Platform
from autopar.cost_model.collectives import Collective, collective_seconds
from autopar.graph.fusion import fuse
from autopar.graph.ir import FactorKind, Graph, Operator, Phase, Rule, Value
from autopar.plan import Layout
from autopar.schedule.reshard import MoveKind, after_move, moves_between

COPY_FROM_BYTES = 4096
TIE_BREAK = 1e-16
FULL_SET_BYTES = 30 * 1024 * 1024
MERGED_ON_GPU = (MoveKind.ALL_REDUCE, MoveKind.REDUCE_SCATTER, MoveKind.ALL_GATHER)
COPIED = (MoveKind.ALL_GATHER, MoveKind.REDUCE_SCATTER)
KINDS = {
    MoveKind.ALL_GATHER: Collective.ALL_GATHER,
    MoveKind.ALL_REDUCE: Collective.ALL_REDUCE,
    MoveKind.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    MoveKind.ALL_TO_ALL: Collective.ALL_TO_ALL,
}


class TooManyPlansError(Exception):
    """The program is not tiny enough."""


@dataclass
class Node:
    """Values that share a layout, or the copy of one."""

    value: Value
    options: list[Layout]
    seconds: float = 0.0
    """Elementwise work on the whole array."""


@dataclass
class Terms:
    """Summands of the objective, each a tensor over some nodes."""

    nodes: list[Node] = field(default_factory=list)
    tensors: list[tuple[tuple[int, ...], np.ndarray]] = field(default_factory=list)

    def add(self, axes: tuple[int, ...], price: Callable[..., float]) -> None:
        shape = [len(self.nodes[axis].options) for axis in axes]
        tensor = np.empty(shape)
        for index in itertools.product(*map(range, shape)):
            tensor[index] = price(*(self.nodes[axis].options[i] for axis, i in zip(axes, index, strict=True)))
        self.tensors.append((axes, tensor))

    def optimum(self, limit: int) -> float:
        shape = [len(node.options) for node in self.nodes]
        if math.prod(shape) > limit:
            raise TooManyPlansError(f"{math.prod(shape)} plans")
        total = np.zeros(shape)
        for axes, tensor in self.tensors:
            order = np.argsort(axes)
            spread = [1] * len(shape)
            for axis in axes:
                spread[axis] = shape[axis]
            total += np.transpose(tensor, order).reshape(spread)
        return float(total.min())


def cheapest_plan_seconds(
    graph: Graph, state_pairs: tuple[tuple[int, int], ...], mesh: Mesh, cluster: Cluster, limit: int = 4_000_000
) -> float:
    """The least price of any plan of a program without loops; beyond ``limit`` plans raises TooManyPlansError."""
    return _Enumerator(graph, state_pairs, mesh, cluster).terms().optimum(limit)


class _Enumerator:
    """Owns what is derived from the graph."""

    def __init__(self, graph: Graph, state_pairs: tuple[tuple[int, int], ...], mesh: Mesh, cluster: Cluster) -> None:
        assert not any(operator.bodies for operator in graph.operators)
        self.graph, self.mesh, self.cluster = graph, mesh, cluster
        self.known: dict[tuple[int, Layout, Layout], float] = {}  # seconds of resharding
        self.returned = {output: graph.inputs[source] for source, output in state_pairs}
        self.fusion = fuse(graph)
        self.readers: dict[int, list[Operator]] = defaultdict(list)
        for operator in graph.operators:
            for operand in set(operator.operands) - {None}:
                self.readers[operand].append(operator)  # type: ignore[index]
        self.producer = {result: operator for operator in graph.operators for result in operator.results}
        in_sums = self._between_sums()
        leaving = {v for k, v in enumerate(graph.outputs) if v is not None and k not in self.returned}
        self.own_node = in_sums | set(graph.inputs) | set(graph.constants)
        self.may_wait = in_sums - leaving
        self.followers = [
            o for o in graph.operators if self._maps_alike(o) and not (o.linear and o.results[0] in in_sums)
        ]
        self.deciders = [o for o in graph.operators if o not in self.followers]

    # ---------------------------------------------------------------------------------- what may be partial, and tied

    def _between_sums(self) -> set[int]:
        """Values on a linear way from a sum to an addition of two sums, the addition's result included."""
        is_sum = cache(self._is_sum)
        found: set[int] = set()

        def upstream(value: int) -> None:
            if value in found or not is_sum(value):
                return
            found.add(value)
            if self.producer[value].linear:
                for operand in self.producer[value].operands:
                    if operand is not None:
                        upstream(operand)

        for operator in self.graph.operators:
            arrays = [operand for operand in operator.operands if operand is not None]
            if operator.linear and len(arrays) >= 2 and is_sum(operator.results[0]):
                for value in (*arrays, *operator.results):
                    upstream(value)
        return found

    def _is_sum(self, value: int) -> bool:
        operator = self.producer.get(value)
        if operator is None:
            return False
        if any(factor.kind in (FactorKind.SUM, FactorKind.LOOKUP) for factor in operator.rule.factors):
            return True
        return operator.linear and all(self._is_sum(operand) for operand in operator.operands if operand is not None)

    def _maps_alike(self, operator: Operator) -> bool:
        """Elementwise: one shape, one mapping, one parallel factor in every dimension that is longer than one."""
        rule = operator.rule
        arrays = [
            (self.graph.values[value].shape, mapping)
            for value, mapping in zip(
                (*operator.operands, *operator.results), (*rule.operands, *rule.results), strict=True
            )
            if value is not None and (self.graph.values[value].shape or value in operator.results)
        ]
        return (
            rule.known
            and len(set(arrays)) == 1
            and all(factor.kind is FactorKind.PARALLEL for factor in rule.factors)
            and all(extent == 1 or len(factors) == 1 for extent, factors in zip(*arrays[0], strict=True))
        )

    def _groups(self) -> dict[int, int]:
        """Value → a name of its group."""
        group = {value: value for value in self.graph.values}

        def merge(a: int, b: int) -> None:
            old, new = group[a], group[b]
            for value, name in group.items():
                if name == old:
                    group[value] = new

        for operator in self.followers:
            for other in operator.results[1:]:
                merge(other, operator.results[0])
            for operand in operator.operands:
                if operand is not None and self.graph.values[operand].shape and operand not in self.own_node:
                    merge(operand, operator.results[0])
        return group

    # ------------------------------------------------------------------------------------------------------ the terms

    def terms(self) -> Terms:
        terms = Terms()
        group = self._groups()
        node_of_group: dict[int, int] = {}
        node_of: dict[int, int] = {}
        for value in self.graph.values.values():
            if 0 in value.shape or not (value.shape or value.id in self.may_wait):
                continue
            name = group[value.id]
            if name not in node_of_group:
                node_of_group[name] = len(terms.nodes)
                members = [v for v, own in group.items() if own == name]
                terms.nodes.append(Node(value, self._layouts(value, members)))
            node_of[value.id] = node_of_group[name]
        self._add_followers(terms, node_of)
        seen_at = self._add_needs(terms, node_of)
        for operator in self.deciders:
            self._add_decider(terms, operator, node_of, seen_at)
        for position, value in enumerate(self.graph.outputs):
            home = self.returned.get(position)
            if value in node_of and home in node_of and node_of[value] != node_of[home]:  # type: ignore[index]
                self._add_way(terms, node_of[value], node_of[home], value)  # type: ignore[index, arg-type]
        return terms

    def _layouts(self, value: Value, members: list[int]) -> list[Layout]:
        if set(members) & set(self.graph.constants):
            return [Layout(((),) * len(value.shape))]
        return self._all_layouts(value.shape, partial=bool(set(members) & self.may_wait))

    def _all_layouts(self, shape: tuple[int, ...], *, partial: bool) -> list[Layout]:
        found = []
        names, sizes = self.mesh.axis_names, dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        places: list[int | str | None] = [None, *range(len(shape)), *(["sum"] if partial else [])]
        for choice in itertools.product(places, repeat=len(names)):
            at = dict(zip(names, choice, strict=True))
            dims = tuple(tuple(name for name in names if at[name] == dim) for dim in range(len(shape)))
            if all(n % math.prod(sizes[a] for a in axes) == 0 for n, axes in zip(shape, dims, strict=True)):
                found.append(Layout(dims, tuple(name for name in names if at[name] == "sum")))
        return found

    def _add_followers(self, terms: Terms, node_of: dict[int, int]) -> None:
        for operator in self.followers:
            if operator.results[0] not in node_of:
                continue
            reads = [operator.operands[k] for k in self.fusion.reads[operator.id]]
            writes = [operator.results[k] for k in self.fusion.writes(operator)]
            traffic = sum(self.graph.values[v].size_bytes for v in (*reads, *writes) if v is not None)
            node = terms.nodes[node_of[operator.results[0]]]
            node.seconds += self._roofline(operator.flops, traffic, self.graph.values[operator.results[0]].dtype)
        for number, node in enumerate(terms.nodes):
            whole = node.seconds + TIE_BREAK * node.value.size_bytes
            terms.add((number,), lambda layout, whole=whole: whole / self._pieces(layout))

    def _add_needs(self, terms: Terms, node_of: dict[int, int]) -> dict[tuple[int, int], int]:
        """Ways from values to elementwise nodes, and copies; returns at which node each operator sees its operand."""
        seen_at: dict[tuple[int, int], int] = {}
        for value, home in list(node_of.items()):
            direct: list[tuple[Operator, int] | int] = []
            by_copy: list[tuple[Operator, int] | int] = []
            for reader in self.readers[value]:
                ends: list[tuple[Operator, int] | int]
                if reader in self.followers:
                    ends = [] if reader.results[0] not in node_of else [node_of[reader.results[0]]]
                else:
                    ends = [(reader, k) for k, operand in enumerate(reader.operands) if operand == value]
                for end in ends:
                    if end == home or end in direct or end in by_copy:
                        continue
                    updates = reader.phase is Phase.UPDATE and value in self.graph.inputs
                    waits = value in self.may_wait and self._takes_summands(end, terms)
                    (direct if updates or waits else by_copy).append(end)
            middle = home
            array = self.graph.values[value]
            if len(by_copy) > 1 and array.size_bytes >= COPY_FROM_BYTES:
                middle = len(terms.nodes)
                terms.nodes.append(Node(array, self._all_layouts(array.shape, partial=False)))
                self._add_way(terms, home, middle, value)
            for node, ends in ((home, direct), (middle, by_copy)):
                for end in ends:
                    if isinstance(end, int):
                        self._add_way(terms, node, end, value)
                    else:
                        seen_at[end[0].id, end[1]] = node
        return seen_at

    def _takes_summands(self, end: tuple[Operator, int] | int, terms: Terms) -> bool:
        if isinstance(end, int):
            return any(layout.partial for layout in terms.nodes[end].options)
        return self._may_pass(end[0])

    def _may_pass(self, operator: Operator) -> bool:
        arrays = [operand for operand in operator.operands if operand is not None]
        return operator.linear and self.may_wait.issuperset((*arrays, operator.results[0]))

    def _add_way(self, terms: Terms, source: int, target: int, value: int) -> None:
        terms.add((source, target), lambda a, b: self._reshard(value, a, b))

    def _add_decider(
        self, terms: Terms, operator: Operator, node_of: dict[int, int], seen_at: dict[tuple[int, int], int]
    ) -> None:
        reads = [(k, seen_at[operator.id, k]) for k in range(len(operator.operands)) if (operator.id, k) in seen_at]
        writes = [(k, node_of[result]) for k, result in enumerate(operator.results) if result in node_of]
        around = tuple(sorted({node for _, node in (*reads, *writes)}))
        strategies = list(self._strategies(operator))

        def price(*layouts: Layout) -> float:
            at = dict(zip(around, layouts, strict=True))
            best = math.inf
            for own, wanted, left in strategies:
                total = own
                for k, node in reads:
                    total += self._reshard(operator.operands[k], at[node], wanted[k])  # type: ignore[arg-type]
                for k, node in writes:
                    total += self._reshard(operator.results[k], left[k], at[node])
                best = min(best, total)
            return best

        terms.add(around, price)

    def _strategies(self, operator: Operator) -> list[tuple[float, list[Layout], list[Layout]]]:
        """(own seconds, layouts of operands, layouts of results) of each legal strategy."""
        rule, names = operator.rule, self.mesh.axis_names
        places: list[int | str | None] = [None, *self._cuttable(rule), *(["pass"] if self._may_pass(operator) else [])]
        found = []
        for choice in itertools.product(places, repeat=len(names)):
            at = dict(zip(names, choice, strict=True))
            cut = {f: tuple(n for n in names if at[n] == f) for f in range(len(rule.factors))}
            if any(rule.factors[f].size % self.mesh.axis_size(*axes) for f, axes in cut.items()):
                continue
            passed = {n for n in names if at[n] == "pass"}
            kinds = {n: rule.factors[f].kind for n, f in at.items() if isinstance(f, int)}
            summed = passed | {n for n, kind in kinds.items() if kind in (FactorKind.SUM, FactorKind.LOOKUP)}
            compared = {n for n, kind in kinds.items() if kind in (FactorKind.MAX, FactorKind.MIN)}

            def layout(
                mapping: tuple[tuple[int, ...], ...], sums: set[str], cut: dict[int, tuple[str, ...]] = cut
            ) -> Layout:
                return Layout(tuple(cut[f[0]] if f else () for f in mapping), tuple(n for n in names if n in sums))

            wanted = [layout(mapping, passed) for mapping in rule.operands]
            left = [layout(mapping, summed) for mapping in rule.results]
            own = self._run_seconds(operator, self.mesh.axis_size(*kinds), wanted, left)
            found.append((own + self._at_once(operator, left, compared), wanted, left))
        return found

    @staticmethod
    def _cuttable(rule: Rule) -> list[int]:
        everywhere = [factors for mapping in (*rule.operands, *rule.results) for factors in mapping]
        return [
            number
            for number, factor in enumerate(rule.factors)
            if factor.size > 1
            and factor.kind is not FactorKind.BLOCKED
            and all(factors.index(number) == 0 for factors in everywhere if number in factors)
        ]

    # ---------------------------------------------------------------------------------------------------- the prices

    def _run_seconds(self, operator: Operator, pieces: int, wanted: list[Layout], left: list[Layout]) -> float:
        traffic = 0.0
        for k in self.fusion.reads[operator.id]:
            traffic += self.graph.values[operator.operands[k]].size_bytes / self._pieces(wanted[k])  # type: ignore[index]
        for k in self.fusion.writes(operator):
            traffic += self.graph.values[operator.results[k]].size_bytes / self._pieces(left[k])
        dtype = self.graph.values[operator.results[0]].dtype
        if operator.primitive not in ("dot_general", "conv_general_dilated"):  # which read all of what they are given
            repeats = max(map(self.fusion.reads[operator.id].count, self.fusion.reads[operator.id]), default=1)
            traffic = min(traffic, repeats * operator.bytes_moved / pieces)
        return self._roofline(operator.flops / pieces, traffic, dtype)

    def _at_once(self, operator: Operator, left: list[Layout], compared: set[str]) -> float:
        """All-reduces that cannot wait: of maxima and minima, and of the sums in scalars that are no nodes."""
        total = 0.0
        for layout, result in zip(left, operator.results, strict=True):
            value = self.graph.values[result]
            at_once = compared | (set() if value.shape or result in self.may_wait else set(layout.partial))
            axes = tuple(name for name in self.mesh.axis_names if name in at_once)
            if axes:
                held = value.size_bytes / self._pieces(layout)
                total += collective_seconds(Collective.ALL_REDUCE, held, axes, self.mesh, self.cluster)
                if not compared and self._is_merged(result):
                    total -= collective_seconds(Collective.ALL_REDUCE, 0.0, axes, self.mesh, self.cluster)
        return total

    def _roofline(self, flops: float, traffic: float, dtype: str) -> float:
        speed = self.cluster.per_device_flops_per_second(dtype)
        return max(flops / speed, traffic / self.cluster.per_device_memory_bytes_per_second)

    def _pieces(self, layout: Layout) -> int:
        return self.mesh.axis_size(*(axis for axes in layout.dims for axis in axes))

    def _merges(self, value: int, kind: MoveKind) -> bool:
        """Whether a collective becomes one with others: of a gradient, or a gather on GPUs of what is given or leaves."""
        if self._is_merged(value):
            return kind in MERGED_ON_GPU
        on_gpu = self.cluster.device.platform is Platform.CUDA
        return on_gpu and kind is MoveKind.ALL_GATHER and (self._is_given(value) or self._leaves_new(value))

    def _is_given(self, value: int) -> bool:
        """Given to the step, or made of one such array by linear operators."""
        if value not in self.producer:
            return value in self.graph.inputs
        made = self.producer[value]
        operands = [operand for operand in made.operands if operand is not None]
        return made.linear and len(operands) == 1 and self._is_given(operands[0])

    def _leaves_new(self, value: int) -> bool:
        return value in self.graph.outputs and self.producer[value].phase is Phase.UPDATE

    def _is_merged(self, value: int) -> bool:
        """A gradient, or a sum that the update takes before any other and rounds, or the like, before it adds it up."""
        if value not in self.producer or self._is_gradient(value):
            return value in self.producer
        made = self.producer[value]
        is_sum = made.phase is Phase.UPDATE and made.primitive == "reduce_sum"
        return (
            is_sum
            and not all(reader.linear for reader in self.readers[value])
            and not any(self._follows_sum(operand) for operand in made.operands if operand is not None)
        )

    def _follows_sum(self, value: int) -> bool:
        made = self.producer.get(value)
        if made is None or made.phase is not Phase.UPDATE:
            return False
        operands = [operand for operand in made.operands if operand is not None]
        return made.primitive == "reduce_sum" or any(self._follows_sum(operand) for operand in operands)

    def _is_gradient(self, value: int) -> bool:
        """Made by the backward pass, and the update reads it, or it leads nowhere but there by linear operators."""
        if value not in self.producer or self.producer[value].phase is not Phase.BACKWARD:
            return False
        readers = self.readers[value]
        if any(reader.phase is Phase.UPDATE for reader in readers):
            return True
        return bool(readers) and all(
            reader.phase is Phase.BACKWARD and reader.linear and self._is_gradient(reader.results[0])
            for reader in readers
        )

    def _exchanges(self) -> bool:
        """Whether sums are scattered by an all-to-all and added up, for of whole messages these are faster among all devices."""
        if self.cluster.network is None:
            return False
        kinds = Collective.ALL_TO_ALL, Collective.REDUCE_SCATTER
        exchanged, scattered = (
            collective_seconds(kind, 1e5, self.mesh.axis_names, self.mesh, self.cluster) for kind in kinds
        )
        return exchanged < scattered

    def _reshard(self, value: int, source: Layout, target: Layout) -> float:
        key = value, source, target
        if key not in self.known:
            self.known[key] = self._reshard_seconds(value, source, target)
        return self.known[key]

    def _reshard_seconds(self, value: int, source: Layout, target: Layout) -> float:
        array = self.graph.values[value]
        total, layout = 0.0, source
        for move in moves_between(array.shape, source, target, self.mesh):
            if move.kind is MoveKind.REDUCE_SCATTER and self._exchanges():
                held = array.size_bytes / self._pieces(layout)
                total += collective_seconds(Collective.ALL_TO_ALL, held, move.axes, self.mesh, self.cluster)
                total += self._roofline(0.0, held * (1 + 1 / self.mesh.axis_size(*move.axes)), "float32")
            elif move.kind in KINDS:
                held = array.size_bytes / self._pieces(layout)
                full = held * self.mesh.axis_size(*move.axes) if move.kind is MoveKind.ALL_GATHER else held
                total += collective_seconds(KINDS[move.kind], full, move.axes, self.mesh, self.cluster)
                on_cpu = self.cluster.device.platform is Platform.CPU
                if self._merges(value, move.kind):
                    result = held / self.mesh.axis_size(*move.axes) if move.kind is MoveKind.REDUCE_SCATTER else full
                    share = min(1.0, result / FULL_SET_BYTES) if self.cluster.device.platform is Platform.CUDA else 0.0
                    latency = collective_seconds(KINDS[move.kind], 0.0, move.axes, self.mesh, self.cluster)
                    total -= latency * (1.0 - share)
                lies_apart = any(extent > 1 for extent in array.shape[: move.dim])
                if on_cpu and move.kind in COPIED and lies_apart:
                    piece = full / self.mesh.axis_size(*move.axes)
                    total += self._roofline(0.0, 2 * (full + piece), "float32")
            layout = after_move(layout, move, self.mesh)
        return total
