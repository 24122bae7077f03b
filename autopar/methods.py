"""Which planner makes the plan: the integer program over everything, or what an expert would write by hand.

A hand-made method says what an expert says – where parameters, optimizer state and batch lie, by mesh axis – and lets
that reach through the program as a compiler would: an axis may cut a value only in dimensions that are tied to a
dimension that the expert cut.  The rest (which operator reduces where) is completed by the same integer program, so the
opponents are as strong as their idea allows.

* data parallel: batch over all devices, the rest whole (gradients are all-reduced);
* ZeRO-2: the same, optimizer state and update in pieces (Rajbhandari et al., 2020, §5);
* ZeRO-3: parameters rest in pieces as well and are gathered for use;
* tensor parallel: Megatron-LM's columns and rows (Shoeybi et al., 2019, §3): the first matrix after a whole activation
  is cut by its outputs, the next by its inputs; vocabulary tables by rows; data parallel over the other axis.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autopar.cluster import AXIS_NAMES, Cluster, Mesh
from autopar.errors import PlanError
from autopar.graph.ir import FactorKind, Graph, Operator, Phase, Value
from autopar.intra_op.choices import cuttable_factors
from autopar.intra_op.problem import Port, loop_links
from autopar.intra_op.restrict import Reach, Restriction
from autopar.plan import Layout


@dataclass(frozen=True)
class Subject:
    """The program as a method sees it: its graph, which input positions are state, and which are batch."""

    graph: Graph
    state: tuple[int, ...]
    batch: tuple[int, ...]
    examples_dim: int = 0
    """The dimension of batch leaves along which the examples lie."""
    received: Reach = field(default_factory=dict)
    """Of a stage of a pipeline: dimensions tied to the examples, of input values that other stages send."""


class Method(Protocol):
    """A way of planning: a name, the meshes it looks at, and what it forbids on each."""

    @property
    def name(self) -> str:
        """How reports call it."""

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """Logical meshes to try."""

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """What may not be chosen on a mesh."""


@dataclass(frozen=True)
class IntraOp:
    """The integer program over every layout, on every mesh of up to ``max_axes`` axes (or on one ``mesh_shape``)."""

    max_axes: int = 3
    mesh_shape: tuple[int, ...] | None = None
    name: str = "intra_op"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """All ordered factorisations of the number of devices."""
        if self.mesh_shape is not None:
            return (mesh_of(self.mesh_shape, cluster),)
        return tuple(cluster.logical_mesh_shapes(self.max_axes))

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """Nothing is forbidden."""
        return Restriction()


@dataclass(frozen=True)
class DataParallel:
    """Batch over all devices, everything else whole."""

    name: str = "data_parallel"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """One axis over all devices."""
        return (mesh_of((cluster.num_devices,), cluster),)

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """Only what is tied to the batch dimension is cut; state stays whole."""
        return Restriction(reach={"data": batch_reach(subject, mesh, "data")})


@dataclass(frozen=True)
class Zero2:
    """Data parallel with optimizer state and update in pieces."""

    name: str = "zero2"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """One axis over all devices."""
        return DataParallel().meshes(cluster)

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """Batch dimensions are cut, and in the update one dimension of every optimizer state."""
        parameters, optimizer = split_state(subject)
        whole = {value: _whole(subject.graph.values[value]) for value in parameters}
        return _pieces(subject, mesh, optimizer, whole, {}, {})


@dataclass(frozen=True)
class Zero3:
    """ZeRO-2 with parameters at rest in pieces too, gathered whole for use, in the narrower type where they are used in one."""

    name: str = "zero3"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """One axis over all devices."""
        return DataParallel().meshes(cluster)

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """Batch dimensions are cut, and one dimension of every state; the copies for use are whole."""
        parameters, optimizer = split_state(subject)
        casts = _narrowing_casts(subject, parameters)
        used = [*(value for value in parameters if value not in casts), *itertools.chain(*casts.values())]
        copies = {value: _whole(subject.graph.values[value]) for value in used}
        return _pieces(subject, mesh, [*parameters, *optimizer], {}, copies, casts)


@dataclass(frozen=True)
class TensorParallel:
    """Megatron-LM's layout over ``model_size`` devices (None: the best of all sizes), data parallel over the others."""

    model_size: int | None = None
    name: str = "tensor_parallel"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """data × model with the model axis innermost; the model axis alone where it takes all devices."""
        count = cluster.num_devices
        sizes = [size for size in range(2, count + 1) if count % size == 0] or [1]
        if self.model_size is not None:
            if self.model_size < 1 or count % self.model_size:
                raise PlanError(f"model_size={self.model_size} does not divide the {count} devices of {cluster.name}")
            sizes = [self.model_size]
        return tuple(mesh_of((count // size, size), cluster) for size in sizes)

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """Columns and rows over the model axis, the batch over the data axis."""
        if "model" not in mesh.axis_names:
            return DataParallel().restriction(subject, mesh)
        seeds = megatron_cuts(subject, mesh.axis_size("model"))
        reach = propagate(subject.graph, seeds, mesh.axis_size("model"), _is_any)
        data = {"data": batch_reach(subject, mesh, "data")} if "data" in mesh.axis_names else {}
        pinned = {}
        for position in subject.state:
            value = subject.graph.values[subject.graph.inputs[position]]
            dims = reach.get(value.id, frozenset())
            if len(dims) > 1:  # reached from two sides (an expert's gradient: by its features and by its number)
                continue
            cut = tuple(("model",) if dim in dims else () for dim in range(len(value.shape)))
            pinned[value.id] = Layout(cut)
        return Restriction(pinned=pinned, pinned_copies=pinned, reach={**data, "model": reach})


@dataclass(frozen=True)
class InterOp:
    """A pipeline and nothing else: a stage on every device.

    Where the model has fewer layers than there are devices, the stages are the next lower power of two, and the other
    devices are idle.
    """

    name: str = "inter_op"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """The mesh of a stage's one device."""
        return (mesh_of((1,), cluster),)

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """On one device there is nothing to choose."""
        return Restriction()


HAND_MADE: tuple[Method, ...] = (DataParallel(), Zero2(), Zero3(), TensorParallel())
"""The opponents of every benchmark and explanation."""

BY_NAME: dict[str, Method] = {
    method.name: method for method in (*HAND_MADE, InterOp(), IntraOp(), IntraOp(name="auto"))
}


def method_of(said: str | Method) -> Method:
    """The method of a name; a method is returned as it is.  Raises PlanError for an unknown name and for anything else."""
    known = ", ".join(sorted(BY_NAME))
    if not isinstance(said, str):
        parts = ("name", "meshes", "restriction")
        if isinstance(said, type) or not isinstance(said, Hashable) or not all(hasattr(said, part) for part in parts):
            raise PlanError(
                f"method={said!r} is no method; give one of the names {known}, or an object of autopar.methods, for "
                "example TensorParallel(model_size=2)"
            )
        return said
    if said not in BY_NAME:
        raise PlanError(f"method={said!r} is unknown; the names are {known}, or pass an object of autopar.methods")
    return BY_NAME[said]


def mesh_of(shape: tuple[int, ...], cluster: Cluster) -> Mesh:
    """The mesh of a shape; raises PlanError unless it uses all devices of the cluster with at most three axes.

    Axes of size 1 are left out: collectives along them are free, so a plan would be strewn with moves that do nothing.
    """
    if not 1 <= len(shape) <= 3 or min(shape) < 1 or math.prod(shape) != cluster.num_devices:
        raise PlanError(
            f"mesh_shape={tuple(shape)} does not fit {cluster.name}: give one to three sizes whose product is "
            f"{cluster.num_devices}, the number of its devices"
        )
    named = [(name, size) for name, size in zip(AXIS_NAMES, shape, strict=False) if size != 1]
    names, sizes = zip(*(named or [("data", 1)]), strict=True)
    return Mesh(names, sizes)


# ------------------------------------------------------------------------------------------------ what reaches what


def batch_reach(subject: Subject, mesh: Mesh, axis: str) -> Reach:
    """Dimensions tied to the examples of the batch."""
    size = mesh.axis_size(axis)
    graph, dim = subject.graph, subject.examples_dim
    seeds = {
        graph.inputs[position]: frozenset((dim,))
        for position in subject.batch
        if graph.values[graph.inputs[position]].shape[dim] % size == 0
    }
    seeds.update(subject.received)
    reach = propagate(graph, seeds, size, _is_any)
    state = {graph.inputs[position] for position in subject.state}
    return {value: dims for value, dims in reach.items() if value not in state}


def split_state(subject: Subject) -> tuple[list[int], list[int]]:
    """Ranked state values: those that the forward or backward pass reads (parameters), and the others (optimizer)."""
    read_early = {
        operand
        for operator, _ in subject.graph.all_operators()
        if operator.phase is not Phase.UPDATE
        for operand in operator.operands
    }
    state = [subject.graph.inputs[position] for position in subject.state]
    ranked = [value for value in state if subject.graph.values[value].shape]
    return [v for v in ranked if v in read_early], [v for v in ranked if v not in read_early]


def _narrowing_casts(subject: Subject, parameters: Collection[int]) -> dict[int, list[int]]:
    """Of the parameters that the passes read in narrower types only: what they are cast to."""
    casts: dict[int, list[int]] = defaultdict(list)
    others: set[int] = set()
    values, known = subject.graph.values, frozenset(parameters)
    for operator in subject.graph.operators:
        for operand in known.intersection(operator.operands) if operator.phase is not Phase.UPDATE else ():
            is_cast = operator.primitive == "convert_element_type"
            if is_cast and values[operator.results[0]].size_bytes < values[operand].size_bytes:
                casts[operand].append(operator.results[0])
            else:
                others.add(operand)
    return {value: narrow for value, narrow in casts.items() if value not in others}


def _pieces(
    subject: Subject,
    mesh: Mesh,
    sharded: list[int],
    pinned: dict[int, Layout],
    copies: dict[int, Layout],
    casts: Mapping[int, Sequence[int]],
) -> Restriction:
    """Data parallel, with the ``sharded`` states pinned in pieces along their largest dimension that divides.

    What a state is cast to (``casts``) may lie in the same pieces.
    """
    size = mesh.axis_size("data")
    seeds = {}
    pinned = dict(pinned)
    for identity in sharded:
        value = subject.graph.values[identity]
        dims = [dim for dim, extent in enumerate(value.shape) if extent % size == 0]
        if dims:
            dim = max(dims, key=lambda d: value.shape[d])
            seeds[identity] = frozenset((dim,))
            pinned[identity] = Layout(tuple(("data",) if d == dim else () for d in range(len(value.shape))))
    updates = propagate(subject.graph, seeds, size, _is_update_or_gradient)
    batch = batch_reach(subject, mesh, "data")
    merged: dict[int, frozenset[int]] = defaultdict(frozenset)
    narrow = {value: seeds[state] for state, values in casts.items() if state in seeds for value in values}
    for reach in (batch, updates, narrow):
        for reached, tied in reach.items():
            merged[reached] |= tied
    return Restriction(pinned=pinned, pinned_copies=copies, reach={"data": merged})


GRADIENT_ROUTES = frozenset({"transpose", "reshape", "convert_element_type", "add_any", "neg", "squeeze", "copy"})
"""Backward operators that lead from the product that makes a gradient to the update."""


def _is_any(operator: Operator) -> bool:
    return True


def _is_update_or_gradient(operator: Operator) -> bool:
    on_the_way = operator.phase is Phase.BACKWARD and operator.primitive in GRADIENT_ROUTES
    return operator.phase is Phase.UPDATE or on_the_way


def propagate(graph: Graph, seeds: Reach, size: int, through: Callable[[Operator], bool]) -> Reach:
    """Dimensions tied to the seeds' by parallel factors of the operators of one choice, to a fixed point."""
    reached: dict[int, frozenset[int]] = dict(seeds)
    operators = [operator for operator, _ in graph.all_operators() if through(operator)]
    changed = True
    while changed:
        changed = False
        for operator in (*operators, *reversed(operators)):
            changed |= _spread_links(operator, reached) if operator.bodies else _spread(operator, reached, size)
    return reached


def _arrays(operator: Operator) -> Iterable[tuple[int, tuple[tuple[int, ...], ...]]]:
    for operand, mapping in zip(operator.operands, operator.rule.operands, strict=True):
        if operand is not None:
            yield operand, mapping
    yield from zip(operator.results, operator.rule.results, strict=True)


def _spread(operator: Operator, reached: dict[int, frozenset[int]], size: int) -> bool:
    rule = operator.rule
    usable = {
        number
        for number in cuttable_factors(rule)
        if rule.factors[number].kind is FactorKind.PARALLEL and rule.factors[number].size % size == 0
    }
    hit = {
        mapping[dim][0]
        for value, mapping in _arrays(operator)
        for dim in reached.get(value, ())
        if mapping[dim] and mapping[dim][0] in usable
    }
    changed = False
    for value, mapping in _arrays(operator):
        dims = frozenset(dim for dim, factors in enumerate(mapping) if factors and factors[0] in hit)
        if dims and value not in reached:
            reached[value] = dims
            changed = True
    return changed


def _spread_links(operator: Operator, reached: dict[int, frozenset[int]]) -> bool:
    """Across the borders of loops, both ways; a sliced array loses its leading dimension."""
    changed = False
    for link in loop_links(operator):
        shift = (link.target_port is Port.STACKED) - (link.source_port is Port.STACKED)
        for here, there, by in ((link.source, link.target, -shift), (link.target, link.source, shift)):
            dims = frozenset(dim + by for dim in reached.get(here, ()) if dim + by >= 0)
            if dims and there not in reached:
                reached[there] = dims
                changed = True
    return changed


def megatron_cuts(subject: Subject, size: int) -> Reach:
    """Which dimension of each parameter Megatron-LM would cut over ``size`` devices (see the module docstring)."""
    graph = subject.graph
    parameters, _ = split_state(subject)
    origin: dict[int, tuple[int, tuple[int, ...]]] = {
        value: (value, tuple(range(len(graph.values[value].shape)))) for value in parameters
    }
    cuts: dict[int, frozenset[int]] = {}
    active: dict[int, frozenset[int]] = {}
    for operator, _ in graph.all_operators():
        if operator.bodies:  # of any phase: a loop over microbatches holds the forward pass and more
            _enter_bodies(operator, origin)
            continue
        if operator.phase is not Phase.FORWARD:
            continue
        _track_origin(operator, origin)
        _cut_weights(operator, origin, cuts, active, size)
        _spread(operator, active, size)
    return cuts


def _enter_bodies(operator: Operator, origin: dict[int, tuple[int, tuple[int, ...]]]) -> None:
    for link in loop_links(operator):
        if link.source in origin and not link.inside:
            parameter, dims = origin[link.source]
            origin[link.target] = (parameter, dims[1:] if link.target_port is Port.STACKED else dims)


def _track_origin(operator: Operator, origin: dict[int, tuple[int, tuple[int, ...]]]) -> None:
    """A cast, transposition or the like of a parameter is still that parameter."""
    ranked = [k for k, operand in enumerate(operator.operands) if operand is not None]
    if len(ranked) != 1 or len(operator.results) != 1 or operator.operands[ranked[0]] not in origin:
        return
    source, target = operator.rule.operands[ranked[0]], operator.rule.results[0]
    operand = operator.operands[ranked[0]]
    assert operand is not None
    parameter, dims = origin[operand]
    place = {factors[0]: dim for dim, factors in zip(dims, source, strict=True) if len(factors) == 1}
    if all(len(factors) == 1 and factors[0] in place for factors in target):
        origin[operator.results[0]] = (parameter, tuple(place[factors[0]] for factors in target))


def _cut_weights(
    operator: Operator,
    origin: dict[int, tuple[int, tuple[int, ...]]],
    cuts: dict[int, frozenset[int]],
    active: dict[int, frozenset[int]],
    size: int,
) -> None:
    rule = operator.rule
    if operator.primitive not in ("dot_general", "gather"):
        return
    usable = [f for f in cuttable_factors(rule) if rule.factors[f].size % size == 0]
    for position, operand in enumerate(operator.operands):
        if operand is None or operand not in origin or len(operator.operands) != 2:
            continue
        other = 1 - position
        rows = _rows_are_cut(operator, other, active)
        kinds = (FactorKind.SUM,) if rows else (FactorKind.PARALLEL, FactorKind.LOOKUP)
        if operator.primitive == "gather":
            kinds = (FactorKind.LOOKUP,)
        carried_by_other = {factors[0] for factors in rule.operands[other] if factors}
        mapping = rule.operands[position]
        parameter, dims = origin[operand]
        for dim, factors in zip(dims, mapping, strict=True):
            if not factors or factors[0] not in usable or rule.factors[factors[0]].kind not in kinds:
                continue
            if not rows and factors[0] in carried_by_other:
                continue
            cuts.setdefault(parameter, frozenset((dim,)))
            if cuts[parameter] == frozenset((dim,)) and not rows:
                mark = frozenset(d for d, carried in enumerate(rule.results[0]) if carried and carried[0] == factors[0])
                if mark:
                    active[operator.results[0]] = mark
            break


def _rows_are_cut(operator: Operator, activation: int, active: dict[int, frozenset[int]]) -> bool:
    operand = operator.operands[activation]
    if operand is None:
        return False
    mapping = operator.rule.operands[activation]
    return any(
        mapping[dim] and operator.rule.factors[mapping[dim][0]].kind is FactorKind.SUM
        for dim in active.get(operand, frozenset())
    )


def _whole(value: Value) -> Layout:
    return Layout(((),) * len(value.shape))
