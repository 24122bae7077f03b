"""What would a run of layers cost as a stage?  Estimated for every run and every number of devices at once.

For each number n of devices that a stage may have, the whole looped step is laid out on n devices by the integer program, if
need be at a price for memory.  The seconds of every node of the program go to the layer where it stands.  With prefix sums over
the layers, a stage of the layers i … j−1
on n devices takes about

    per microbatch   t = Σ_l (compute_l + transfer_l) · N₀/N · a + fixed_l        once   u = Σ_l update_l
    bytes            Σ_l state_l + (microbatches in flight) · Σ_l residuals_l · N₀/N

where N₀ is the number of microbatches that was laid out: work and bytes are in proportion to the size of a microbatch.  What is
fixed are latencies of collectives, and what is done to arrays that hold no rows of the batch: gradients are added up, and
parameters gathered, once for every microbatch however small it is.  Where the plan cuts the examples of a microbatch into more
pieces than there are examples, devices do the same work, a of them each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar import _compat
from autopar.cluster import Cluster
from autopar.graph.ir import Graph
from autopar.inter_op.looped import Looped, constants_of
from autopar.inter_op.rescaled import touched_values, values_with_rows
from autopar.intra_op.nodes import OperatorNode, Problem
from autopar.intra_op.priced import PricedStage
from autopar.plan import Layout, Stage
from autopar.schedule.instructions import Part
from autopar.schedule.reshard import shares
from autopar.schedule.stage_program import Cut, Passing


@dataclass(frozen=True)
class LayerCosts:
    """Estimates of every layer on stages of one number of devices; arrays of one number per layer.

    ``work_seconds`` and ``fixed_seconds`` are of one microbatch of N₀ = ``count``, ``once_seconds`` of a step; ``state_bytes``
    and ``residual_bytes`` are of one device, the latter of one microbatch.
    """

    count: int
    work_seconds: np.ndarray
    fixed_seconds: np.ndarray
    once_seconds: np.ndarray
    state_bytes: np.ndarray
    residual_bytes: np.ndarray
    examples: int = 0
    """Of a microbatch of the N₀; 0: not known."""
    pieces: int = 1
    """Into so many the plan cuts the examples of a microbatch."""

    def microbatch_seconds(self, count: int) -> np.ndarray:
        """Seconds of one microbatch of each layer if there are ``count``."""
        return self.work_seconds * (self.count / count) * self.repeats(count) + self.fixed_seconds

    def repeats(self, count: int) -> float:
        """How many devices do the same work where the microbatches of ``count`` have too few examples for the plan's pieces."""
        examples = self.examples * self.count // count
        return self.pieces / math.gcd(self.pieces, examples) if examples else 1.0

    def residual_bytes_of(self, count: int) -> np.ndarray:
        """Bytes that one microbatch leaves for the backward pass in each layer, if there are ``count``."""
        return self.residual_bytes * (self.count / count)


@dataclass(frozen=True)
class LayerMap:
    """Which layer every operator and value of a looped step belongs to, and what crosses between layers.

    ``crossing_bytes[p]`` are the bytes of one microbatch (of N₀) that a cut before layer p makes cross, there and back.
    """

    num_layers: int
    layer_of_value: Mapping[int, int]
    layer_of_operator: Mapping[int, int]
    residuals: Mapping[int, int]
    owners: Mapping[int, int]
    crossing_bytes: np.ndarray


def layer_map(loop: Looped, layers: Cut) -> LayerMap:
    """The layers of a step, from the cut that makes every layer a stage."""
    layer_of_variable: dict[Any, int] = {}
    backward: set[Any] = set()
    for layer, program in reversed(list(enumerate(layers.stages))):
        jaxpr = _compat.jaxpr_of(program.jaxpr)
        body = _compat.jaxpr_of(jaxpr.eqns[program.loop].params["jaxpr"])
        for equation in (*jaxpr.eqns, *body.eqns):
            layer_of_variable.update(dict.fromkeys(equation.outvars, layer))
        for equation, part in zip(body.eqns, program.parts, strict=True):
            if part is Part.BACKWARD:
                backward.update(equation.outvars)
    num_layers = len(layers.stages)
    layer_of_value: dict[int, int] = {}
    layer_of_operator: dict[int, int] = {}
    for graph in (loop.graph, loop.body):
        for operator in graph.operators:
            layer = layer_of_variable.get(operator.equation.outvars[0], 0) if operator.equation.outvars else 0
            layer_of_operator[operator.id] = layer
            layer_of_value.update(dict.fromkeys(operator.results, layer))
            if operator is loop.loop:
                continue  # it spans all layers
            for operand in operator.operands:  # an input belongs to the first layer that reads it
                if operand is not None:
                    layer_of_value.setdefault(operand, layer)
            for inner in _inner(operator.bodies):
                layer_of_operator[inner.id] = layer
                layer_of_value.update(dict.fromkeys(inner.results, layer))
    for outside, value in zip(loop.loop.operands, loop.body.inputs, strict=True):
        if outside is not None and value in layer_of_value:
            layer_of_value.setdefault(outside, layer_of_value[value])
    crossing = np.zeros(num_layers + 1)
    for one in layers.crossings:
        low, high = sorted((one.source, one.target))
        crossing[low + 1 : high + 1] += one.size_bytes * (1.0 if one.passing is Passing.MICRO else 1.0 / loop.count)
    return LayerMap(
        num_layers,
        layer_of_value,
        layer_of_operator,
        _residuals(loop, layer_of_value, backward),
        layers.owners,
        crossing,
    )


def _inner(bodies: Sequence[Graph]) -> list[Any]:
    return [operator for body in bodies for operator, _ in body.all_operators()]


def _residuals(loop: Looped, layer_of_value: Mapping[int, int], backward: set[Any]) -> dict[int, int]:
    """Values of the forward pass that the backward pass reads, with their layers."""
    made = {
        result
        for operator in loop.body.operators
        for result, variable in zip(operator.results, operator.equation.outvars, strict=True)
        if variable not in backward
    }
    found = {}
    for operator in loop.body.operators:
        if operator.equation.outvars and operator.equation.outvars[0] in backward:
            found.update({v: layer_of_value[v] for v in operator.operands if v is not None and v in made})
    return found


def layer_costs(loop: Looped, layers: LayerMap, priced: PricedStage, cluster: Cluster) -> LayerCosts:
    """The price of every layer in a plan of the whole looped step on ``cluster``, the devices of one stage."""
    count, problem = loop.count, priced.problem
    inside = {value.id for value in loop.body.all_values()}
    rows = values_with_rows(loop)
    work, fixed, once = (np.zeros(layers.num_layers) for _ in range(3))
    collectives = np.zeros(layers.num_layers)
    values = _values_of_nodes(problem)
    for value, node, seconds in zip(values, problem.nodes, priced.node_seconds, strict=True):
        layer = layers.layer_of_value.get(value, 0)
        touched = touched_values(node.operator) if isinstance(node, OperatorNode) else {value}
        of_pass = once if value not in inside else work if touched & rows else fixed
        of_pass[layer] += seconds
    for edge in problem.edges:
        source, target = priced.chosen(edge.source.node), priced.chosen(edge.target.node)
        value = values[edge.target.node]
        if value in rows and source != target and isinstance(source, Layout) and isinstance(target, Layout):
            collectives[layers.layer_of_value.get(value, 0)] += 1
    link = cluster.network_link if cluster.hosts > 1 else cluster.local_link
    work, fixed = work / count, fixed / count
    latency = np.minimum(work, collectives * link.latency_seconds)
    held = _bytes_by_layer(loop, layers, priced.stage)
    pieces = _examples_and_pieces(loop, priced.stage)
    return LayerCosts(count, work - latency, fixed + latency, once, *held, *pieces)


def _examples_and_pieces(loop: Looped, stage: Stage) -> tuple[int, int]:
    """Examples of a microbatch, and into how many pieces they are cut where the batch lies."""
    leaves = [loop.graph.values[loop.graph.inputs[position]] for position in loop.batch]
    pieces = [stage.mesh.axis_size(*stage.home(leaf.id, len(leaf.shape)).dims[1]) for leaf in leaves]
    return min((leaf.shape[1] for leaf in leaves), default=0), max(pieces, default=1)


def _values_of_nodes(problem: Problem) -> list[int]:
    """A value for every node: one that lies so, or that the operator makes."""
    value_of = {node: value for value, node in (*problem.copy_of_value.items(), *problem.node_of_value.items())}
    return [
        next(iter(node.operator.results), -1) if isinstance(node, OperatorNode) else value_of.get(number, -1)
        for number, node in enumerate(problem.nodes)
    ]


def _bytes_by_layer(loop: Looped, layers: LayerMap, stage: Stage) -> tuple[np.ndarray, np.ndarray]:
    """State (accumulators included) and residuals of one microbatch, by layer, on one device."""
    state, residual = np.zeros(layers.num_layers), np.zeros(layers.num_layers)
    values = {value.id: value for value in loop.graph.all_values()}

    def device_bytes(value: int) -> float:
        layout = stage.home(value, len(values[value].shape))
        return values[value].size_bytes / shares(layout, stage.mesh)

    for position, value in enumerate(loop.graph.inputs):
        if position not in loop.batch:
            state[layers.owners.get(position, layers.layer_of_value.get(value, 0))] += device_bytes(value)
    _, carries = _compat.scan_arity(loop.loop.equation.params)
    for total in loop.body.outputs[:carries]:
        if total is not None:
            state[layers.layer_of_value[total]] += device_bytes(total)
    for value, layer in layers.residuals.items():
        residual[layer] += device_bytes(value)
    constants = constants_of(loop.loop)
    for outside, value in zip(loop.loop.operands, loop.body.inputs, strict=True):
        if outside is not None and value in constants and value in layers.layer_of_value:
            there, used = (stage.home(one, len(values[one].shape)) for one in (outside, value))
            if used != there:  # gathered before the loop, and kept throughout
                state[layers.layer_of_value[value]] += values[value].size_bytes / shares(used, stage.mesh)
    return state, residual
