"""What may an expert's cut reach?  What is tied to it, operator by operator, to a fixed point.

An expert says where parameters and batch lie, by mesh axis.  That axis may then cut a value in dimension d if a chain of
operators' parallel factors leads from a dimension that the expert cut to d.  Which dimensions experts cut is read off the
program: the largest of a state that is to lie in pieces, columns and rows of Megatron-LM's layers, the number of an expert.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cluster import Mesh
from autopar.graph.ir import FactorKind, Graph, Operator, Phase, Value
from autopar.intra_op.choices import cuttable_factors
from autopar.intra_op.loop_links import loop_links
from autopar.intra_op.nodes import Port
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
    state_pairs: tuple[tuple[int, int], ...] = ()
    """(input, output) positions of state leaves before and after the step."""

    def with_next(self, seeds: Reach) -> dict[int, frozenset[int]]:
        """The seeds, and the next values of the state among them in the same pieces.

        Nothing else may tie these to what makes them: parameters in half precision are cast from masters, and not read for it.
        """
        ends = ((self.graph.inputs[before], self.graph.outputs[after]) for before, after in self.state_pairs)
        return {**seeds, **{after: seeds[before] for before, after in ends if before in seeds and after is not None}}


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
    reach = propagate(graph, seeds, size, any_operator)
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


def narrowing_casts(subject: Subject, parameters: Collection[int]) -> dict[int, list[int]]:
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


def in_pieces(
    subject: Subject,
    mesh: Mesh,
    sharded: list[int],
    pinned: dict[int, Layout],
    copies: dict[int, Layout],
    casts: Mapping[int, Sequence[int]],
) -> Restriction:
    """Data parallel over all axes, with the ``sharded`` states pinned in pieces along their largest dimension that divides.

    What a state is cast to (``casts``) may lie in the same pieces.
    """
    axes = mesh.axis_names
    seeds = {}
    pinned = dict(pinned)
    for identity in sharded:
        value = subject.graph.values[identity]
        dims = [dim for dim, extent in enumerate(value.shape) if extent % mesh.size == 0]
        if dims:
            dim = max(dims, key=lambda d: value.shape[d])
            seeds[identity] = frozenset((dim,))
            pinned[identity] = Layout(tuple(axes if d == dim else () for d in range(len(value.shape))))
    updates = propagate(subject.graph, seeds, mesh.size, is_update_or_gradient)
    narrow = {value: seeds[state] for state, values in casts.items() if state in seeds for value in values}
    reach = {axis: either(batch_reach(subject, mesh, axis), updates, narrow) for axis in axes}
    return Restriction(pinned=pinned, pinned_copies=copies, reach=reach)


def either(*reaches: Reach) -> Reach:
    """What one or another of them reaches."""
    merged: dict[int, frozenset[int]] = defaultdict(frozenset)
    for reach in reaches:
        for reached, tied in reach.items():
            merged[reached] |= tied
    return merged


GRADIENT_ROUTES = frozenset({"transpose", "reshape", "convert_element_type", "add_any", "neg", "squeeze", "copy"})
"""Backward operators that lead from the product that makes a gradient to the update."""


def any_operator(operator: Operator) -> bool:
    """Every operator passes on what reaches it."""
    return True


def is_update_or_gradient(operator: Operator) -> bool:
    """Whether it belongs to the update, or brings a gradient there."""
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
    """Which dimension of each parameter Megatron-LM would cut over ``size`` devices (:mod:`autopar.methods`)."""
    cuts: dict[int, frozenset[int]] = {}
    active: dict[int, frozenset[int]] = {}
    for operator, origin in _forward_operators(subject):
        _cut_weights(operator, origin, cuts, active, size)
        _spread(operator, active, size)
    return cuts


def expert_cuts(subject: Subject, size: int) -> dict[int, frozenset[int]]:
    """Which dimension of each parameter counts experts, where their number divides over ``size`` devices.

    One product of many: a dimension of the weight that the activation has as well and that is not summed over.
    """
    cuts: dict[int, frozenset[int]] = {}
    for operator, origin in _forward_operators(subject):
        if operator.primitive != "dot_general":
            continue
        rule = operator.rule
        usable = {
            factor
            for factor in cuttable_factors(rule)
            if rule.factors[factor].kind is FactorKind.PARALLEL and rule.factors[factor].size % size == 0
        }
        for position, operand in enumerate(operator.operands):
            if operand is None or operand not in origin:
                continue
            parameter, dims = origin[operand]
            shared = {factors[0] for factors in rule.operands[1 - position] if factors} & usable
            for dim, factors in zip(dims, rule.operands[position], strict=True):
                if factors and factors[0] in shared:
                    cuts.setdefault(parameter, frozenset((dim,)))
    return cuts


_Origin = tuple[int, tuple[int, ...]]
"""A parameter, and which of its dimensions those of a value are."""


def _forward_operators(subject: Subject) -> Iterator[tuple[Operator, Mapping[int, _Origin]]]:
    """The operators of the forward pass, each with the values that are parameters, or parts or casts of them."""
    graph = subject.graph
    parameters, _ = split_state(subject)
    origin: dict[int, _Origin] = {value: (value, tuple(range(len(graph.values[value].shape)))) for value in parameters}
    for operator, _ in graph.all_operators():
        if operator.bodies:  # of any phase: a loop over microbatches holds the forward pass and more
            _enter_bodies(operator, origin)
        elif operator.phase is Phase.FORWARD:
            _track_origin(operator, origin)
            yield operator, origin


def _enter_bodies(operator: Operator, origin: dict[int, _Origin]) -> None:
    for link in loop_links(operator):
        if link.source in origin and not link.inside:
            parameter, dims = origin[link.source]
            origin[link.target] = (parameter, dims[1:] if link.target_port is Port.STACKED else dims)


def _track_origin(operator: Operator, origin: dict[int, _Origin]) -> None:
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
    origin: Mapping[int, _Origin],
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


def whole_layout(value: Value) -> Layout:
    """The layout of a value that every device has whole."""
    return Layout(((),) * len(value.shape))
