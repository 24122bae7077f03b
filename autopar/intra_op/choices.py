"""What each node may choose on one mesh, and what every choice costs.

* A value node chooses a layout (every axis cuts one dimension that divides, or none, or – where the problem allows
  it – stays partial).
* An operator node chooses a strategy: each axis cuts one factor that divides and is major in every dimension that
  carries it, or none; an operator that is linear in partial operands may also take the axis as *passing*.

Costs in seconds a step.  Compute by roofline on one device's share (an axis that cuts nothing saves nothing:
replicated work is paid in full), reductions by max and min and those of scalars at once, reshards on the edges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from autopar.cluster import Cluster, Mesh
from autopar.cost_model.collectives import Collective, axes_cost, sum_scatter_of, wire_bytes
from autopar.cost_model.kernels import kernel_cost
from autopar.cost_model.reshard import reshard_table
from autopar.cost_model.roofline import operator_seconds
from autopar.errors import PlanError
from autopar.graph.fusion import PRODUCTS
from autopar.graph.ir import FactorKind, Rule
from autopar.intra_op.alike import ClassEdge, Quotient
from autopar.intra_op.model import narrowed_costs
from autopar.intra_op.nodes import End, OperatorNode, Port, Problem, ValueNode
from autopar.plan import Axes, Layout, Strategy, SumScatter
from autopar.schedule.reshard import dividing, layouts_of, local_shape, replicated, shares
from autopar.schedule.wire import wire_itemsize_bytes

TIE_BREAK_SECONDS_PER_BYTE = 1e-16
"""Of two choices of equal price the one that holds fewer bytes on a device wins.

Far below what any memory takes for a byte, but enough for the solver, which sees no differences below 1e-7 of a step.
"""


@dataclass(frozen=True)
class Choices:
    """Options and prices of every class of a quotient on one mesh."""

    mesh: Mesh
    options: list[list[Layout] | list[Strategy]]
    node_seconds: list[np.ndarray]
    edge_seconds: dict[tuple[int, int], np.ndarray]
    """(class, class) with the first smaller → matrix of seconds; edges inside a class are in ``node_seconds``."""
    sum_scatter: SumScatter
    """On which the prices of reshards are based."""

    def renamed(self, names: Mapping[str, str]) -> Choices:
        """The same choices on the same devices with other names for the axes."""

        def told(axes: Axes) -> Axes:
            return tuple(names.get(axis, axis) for axis in axes)

        def other(option: Layout | Strategy) -> Layout | Strategy:
            if isinstance(option, Layout):
                return Layout(tuple(map(told, option.dims)), told(option.partial))
            return Strategy(tuple(map(told, option.factors)), told(option.passing))

        mesh = Mesh(told(self.mesh.axis_names), self.mesh.axis_sizes)
        options: list[Any] = [[other(option) for option in options] for options in self.options]
        return replace(self, mesh=mesh, options=options)

    def with_copies(self, quotient: Quotient, copied_bytes: Mapping[int, float], seconds_per_byte: float) -> Choices:
        """The same choices with a price for bytes (of whole arrays, by node) of which each device copies its part elsewhere."""
        node_seconds = list(self.node_seconds)
        for node, size in copied_bytes.items():
            number = quotient.class_of[node]
            pieces = [shares(one, self.mesh) for one in self.options[number] if isinstance(one, Layout)]
            node_seconds[number] = node_seconds[number] + size * seconds_per_byte / np.array(pieces)
        return replace(self, node_seconds=node_seconds)

    def narrowed(self, kept: Sequence[np.ndarray]) -> Choices:
        """The same choices with only some options (positions, ascending) of every class."""
        options: list[Any] = [[one[k] for k in left] for one, left in zip(self.options, kept, strict=True)]
        nodes, edges = narrowed_costs(self.node_seconds, self.edge_seconds, kept)
        return replace(self, options=options, node_seconds=nodes, edge_seconds=edges)


def choices_on(
    problem: Problem, quotient: Quotient, mesh: Mesh, cluster: Cluster, allowed: Mapping[int, frozenset[Layout]]
) -> Choices:
    """All options and prices; ``allowed`` restricts the layouts of value nodes (by node index).

    Raises :class:`~autopar.errors.PlanError` when a restriction leaves a node nothing.
    """
    options: list[list[Layout] | list[Strategy]] = []
    seconds: list[np.ndarray] = []
    for members in quotient.members:
        node = problem.nodes[members[0]]
        if isinstance(node, ValueNode):
            layouts = value_options(node, mesh, allowed.get(members[0]))
            options.append(layouts)
            seconds.append(_value_seconds(node, layouts, mesh, cluster) * len(members))
        else:
            strategies = strategies_of(node, mesh)
            options.append(strategies)
            work = [kernel_cost(node.kernel, strategy, mesh, cluster).seconds for strategy in strategies]
            seconds.append(np.array(work) * (node.trips * len(members)))
    choices = Choices(mesh, options, seconds, {}, sum_scatter_of(cluster))
    waiting = _after_work(cluster, _work_between_products(problem, quotient, seconds))
    for number, members in enumerate(quotient.members):
        node = problem.nodes[members[0]]
        if isinstance(node, OperatorNode):
            sent = [_immediate_seconds(node, strategy, mesh, waiting) for strategy in strategies_of(node, mesh)]
            seconds[number] = seconds[number] + np.array(sent) * (node.trips * len(members))
    for edge, weight in quotient.edges.items():
        _add_edge(problem, quotient, choices, edge, weight, waiting)
    return choices


def _work_between_products(problem: Problem, quotient: Quotient, seconds: Sequence[np.ndarray]) -> float:
    """Seconds between one product and the next if all is cut as finely as it can be: about where collectives will stand."""
    products = 0
    for members in quotient.members:
        node = problem.nodes[members[0]]
        if isinstance(node, OperatorNode) and node.operator.primitive in PRODUCTS:
            products += node.trips * len(members)
    return sum(float(of_class.min()) for of_class in seconds) / max(products, 1)


def _after_work(cluster: Cluster, seconds: float) -> Cluster:
    """The cluster with prices of collectives that stand so much work apart.

    To a power of two: prices of a collective are kept by cluster.
    """
    network_waits = cluster.network is not None and cluster.network.waits
    if cluster.profile is None or not (cluster.profile.waits or network_waits) or seconds <= 0:
        return cluster
    return _waiting(cluster, round(math.log2(seconds)))


@cache
def _waiting(cluster: Cluster, power: int) -> Cluster:
    assert cluster.profile is not None
    return cluster.with_profile(cluster.profile.after(2.0**power))


def value_options(node: ValueNode, mesh: Mesh, allowed: frozenset[Layout] | None) -> list[Layout]:
    """The layouts of an array on a mesh, of those that are ``allowed``; raises PlanError where there is none."""
    if node.is_constant:
        return [replicated(len(node.shape))]
    layouts = [one for one in layouts_of(node.shape, mesh, partial=node.may_be_partial) if one == dividing(one, mesh)]
    if allowed is None:
        return layouts
    meant = {dividing(layout, mesh) for layout in allowed}
    kept = [layout for layout in layouts if layout in meant]
    if not kept:
        raise PlanError(f"no layout of an array of shape {node.shape} on the mesh {mesh} meets what is demanded of it")
    return kept


def _value_seconds(node: ValueNode, layouts: list[Layout], mesh: Mesh, cluster: Cluster) -> np.ndarray:
    held = TIE_BREAK_SECONDS_PER_BYTE * node.itemsize_bytes * float(np.prod(node.shape))
    pieces = [shares(layout, mesh) for layout in layouts]
    seconds = {
        count: held / count
        + sum(
            times
            * operator_seconds(
                work.flops / count,
                work.bytes_moved / count,
                work.dtype,
                cluster,
                work.primitive,
                streamed=work.streamed,
            )
            for work, times in node.work.items()
        )
        for count in set(pieces)
    }
    return np.array([seconds[count] for count in pieces])


def strategies_of(node: OperatorNode, mesh: Mesh) -> list[Strategy]:
    """Every legal strategy of an operator; the one that cuts nothing comes first."""
    rule = node.operator.rule
    return list(_strategies(rule, mesh, node.may_pass_partial))


@cache
def _strategies(rule: Rule, mesh: Mesh, may_pass: bool) -> tuple[Strategy, ...]:
    usable = cuttable_factors(rule)
    places = [-1, *usable] + ([-2] if may_pass else [])
    names = mesh.dividing_names
    found = []
    for choice in itertools.product(places, repeat=len(names)):
        factors = tuple(
            tuple(name for name, place in zip(names, choice, strict=True) if place == factor)
            for factor in range(len(rule.factors))
        )
        if all(rule.factors[number].size % mesh.axis_size(*axes) == 0 for number, axes in enumerate(factors) if axes):
            passing = tuple(name for name, place in zip(names, choice, strict=True) if place == -2)
            found.append(Strategy(factors, passing))
    return tuple(found)


def cuttable_factors(rule: Rule) -> list[int]:
    """Factors that may be cut: not blocked, and major in every dimension that carries them."""
    minor = {factor for mapping in (*rule.operands, *rule.results) for factors in mapping for factor in factors[1:]}
    return [
        number
        for number, factor in enumerate(rule.factors)
        if factor.kind is not FactorKind.BLOCKED and factor.size > 1 and number not in minor
    ]


def _immediate_seconds(node: OperatorNode, strategy: Strategy, mesh: Mesh, cluster: Cluster) -> float:
    """Reductions that cannot wait: by max and min, and the sums behind scalars that no node stands for."""
    rule = node.operator.rule
    extreme = tuple(
        axis
        for number, factor in enumerate(rule.factors)
        if factor.kind in (FactorKind.MAX, FactorKind.MIN)
        for axis in strategy.factors[number]
    )
    extreme = tuple(name for name in mesh.axis_names if name in extreme)
    total = 0.0
    for k, value in enumerate(node.kernel.results):
        layout = strategy.result(rule, k, mesh)
        elements = math.prod(local_shape(value.shape, layout, mesh))
        summed = layout.partial if k in node.free_results else ()
        for axes, is_extreme in ((extreme, True), (summed, False)):
            if axes:
                full_bytes = elements * wire_itemsize_bytes(value, cluster.device.platform, extreme=is_extreme)
                group_size, cost = axes_cost(Collective.ALL_REDUCE, axes, mesh, cluster)
                sent = wire_bytes(Collective.ALL_REDUCE, full_bytes, group_size)
                joins = k in node.joining_results and not is_extreme
                total += (cost.joined if joins else cost).seconds(sent)
    return total


def _add_edge(
    problem: Problem, quotient: Quotient, choices: Choices, edge: ClassEdge, weight: int, cluster: Cluster
) -> None:
    matrix = edge_seconds(problem, quotient, choices, edge, cluster) * weight
    a, b = edge.source.node, edge.target.node
    if a == b:
        choices.node_seconds[a] = choices.node_seconds[a] + np.diagonal(matrix)
        return
    key = (min(a, b), max(a, b))
    matrix = matrix if a < b else matrix.T
    choices.edge_seconds[key] = choices.edge_seconds.get(key, 0.0) + matrix


def edge_seconds(
    problem: Problem, quotient: Quotient, choices: Choices, edge: ClassEdge, cluster: Cluster
) -> np.ndarray:
    """Seconds of one reshard along an edge, by option of its source and of its target."""
    sources = _layouts_at(problem, quotient, choices, edge.source)
    targets = _layouts_at(problem, quotient, choices, edge.target)
    table = reshard_table(edge.shape, choices.mesh, cluster, edge.merged)
    sent_bytes = math.prod(edge.shape) * wire_itemsize_bytes(edge, cluster.device.platform)
    return table.between(sources, targets, sent_bytes)


def _layouts_at(problem: Problem, quotient: Quotient, choices: Choices, end: End) -> list[Layout]:
    """The layout that each option of a class yields or wants at an end of an edge."""
    node = problem.nodes[quotient.members[end.node][0]]
    options = choices.options[end.node]
    layouts: list[Layout] = []
    for option in options:
        if isinstance(option, Layout):
            layouts.append(Layout(((), *option.dims), option.partial) if end.port is Port.STACKED else option)
        else:
            assert isinstance(node, OperatorNode)
            rule = node.operator.rule
            read = option.operand if end.port is Port.OPERAND else option.result
            layouts.append(read(rule, end.position, choices.mesh))
    return layouts
