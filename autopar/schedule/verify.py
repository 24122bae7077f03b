"""Does this list of steps do what it says?  The promises of :mod:`autopar.schedule.spmd`, checked without running it.

With L(b) the layout of a buffer b, every step must satisfy

    reshard   L(target) = m_k(… m_1(L(source))), every layout on the way cuts evenly
    run       L(operand) and L(result) are what the strategy and the rule imply, and the strategy is legal
    loop      what crosses a body's border lies the same on both sides

and every buffer is made before it is read.  The reading of moves and strategies is written here once more, apart from
the passes that make them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar import _compat
from autopar.cluster import Mesh
from autopar.errors import InternalError
from autopar.graph.build import BARRIER, LoopKind
from autopar.graph.ir import FactorKind, Operator, Value
from autopar.graph.zeros import is_zero_literal
from autopar.plan import Axes, Layout, Strategy
from autopar.schedule.reshard import SCATTERS, Move, MoveKind, after_move, divides
from autopar.schedule.spmd import Buffer, Reshard, Run, SpmdProgram


def verify_program(program: SpmdProgram) -> None:
    """Raise :class:`~autopar.errors.InternalError` at the first broken promise."""
    _verify_level(program)
    for buffer in (*program.inputs, *program.outputs):
        if buffer is not None:
            _demand(not buffer.layout.partial, f"{buffer} crosses the border of the program as a partial sum")


def _verify_level(program: SpmdProgram) -> None:
    graph = program.graph
    _demand(tuple(b.value for b in program.inputs) == graph.inputs, "the inputs are not those of the graph")
    made: set[Buffer] = set(program.inputs)
    made.update(Buffer(value, Layout(((),) * len(program.values[value].shape))) for value in graph.constants)
    for buffer in made:
        _verify_layout(buffer, program)
    for step in program.steps:
        read = (step.source,) if isinstance(step, Reshard) else step.operands
        for needed in read:
            _demand(needed is None or needed in made, f"{needed} is read before it is made")
        written = (step.target,) if isinstance(step, Reshard) else step.results
        for buffer in written:
            _verify_layout(buffer, program)
        if isinstance(step, Reshard):
            _verify_reshard(step, program)
        else:
            _verify_run(step, program)
        made.update(written)
    run = tuple(step.operator.id for step in program.steps if isinstance(step, Run))
    _demand(run == tuple(o.id for o in graph.operators), "the operators that run are not those of the graph, in order")
    _demand(len(program.outputs) == len(graph.outputs), f"{len(program.outputs)} outputs of {len(graph.outputs)}")
    for output, value in zip(program.outputs, graph.outputs, strict=True):
        _demand((None if output is None else output.value) == value, f"{output} stands for output value {value}")
        _demand(output is None or output in made, f"output {output} is never made")


def _verify_layout(buffer: Buffer, program: SpmdProgram) -> None:
    """Each axis serves once and in mesh order, every cut is even, and only what can be summed is partial."""
    mesh, layout = program.mesh, buffer.layout
    _demand(buffer.value in program.values, f"{buffer} is of no value")
    value = program.values[buffer.value]
    _demand(len(layout.dims) == len(value.shape), f"{buffer} does not have the rank of shape {value.shape}")
    _demand(_fits(value.shape, layout, mesh), f"{buffer} of shape {value.shape} is no layout on {mesh}")
    summable = value.dtype != "bool" and not value.dtype.startswith("key<")
    _demand(summable or not layout.partial, f"{buffer} is a partial sum of {value.dtype}")


def _fits(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    used = [axis for axes in (*layout.dims, layout.partial) for axis in axes]
    known = len(set(used)) == len(used) and set(used) <= set(mesh.axis_names)
    return (
        known and all(_ordered(axes, mesh) for axes in (*layout.dims, layout.partial)) and divides(shape, layout, mesh)
    )


def _ordered(axes: Axes, mesh: Mesh) -> bool:
    return list(axes) == sorted(axes, key=mesh.axis_names.index)


def _verify_reshard(step: Reshard, program: SpmdProgram) -> None:
    _demand(step.source.value == step.target.value, f"{step.source} becomes {step.target}, another value")
    shape = program.values[step.source.value].shape
    layout = step.source.layout
    for move in step.moves:
        _demand(_may_move(layout, move), f"{move} cannot be done to {layout}")
        layout = after_move(layout, move, program.mesh)
        _demand(_fits(shape, layout, program.mesh), f"{move} leaves {layout}, which is no layout of shape {shape}")
    _demand(layout == step.target.layout, f"the moves from {step.source} lead to {layout}, not to {step.target}")


def _may_move(layout: Layout, move: Move) -> bool:
    """Whether the axes of a move are where its kind wants them."""
    axes = move.axes
    rank = len(layout.dims)
    dims_exist = all(0 <= dim < rank for dim in _named_dims(move))
    if not axes or not dims_exist:
        return False
    if move.kind in (MoveKind.SLICE, MoveKind.MASK):
        return layout.axes.isdisjoint(axes)
    if move.kind is MoveKind.ALL_REDUCE or move.kind in SCATTERS:
        return set(axes) <= set(layout.partial)
    return layout.dims[move.dim][-len(axes) :] == axes and move.dim != move.to_dim


def _named_dims(move: Move) -> tuple[int, ...]:
    match move.kind:
        case MoveKind.ALL_REDUCE | MoveKind.MASK:
            return ()
        case MoveKind.ALL_TO_ALL:
            return move.dim, move.to_dim
        case _:
            return (move.dim,)


def _verify_run(step: Run, program: SpmdProgram) -> None:
    operator = step.operator
    name = f"operator {operator.id} ({operator.primitive})"
    _demand(tuple(b and b.value for b in step.operands) == operator.operands, f"{name}: its operands are others")
    _demand(tuple(b.value for b in step.results) == operator.results, f"{name}: its results are others")
    _demand(len(step.bodies) == len(operator.bodies), f"{name}: {len(step.bodies)} of {len(operator.bodies)} bodies")
    if step.bodies:
        for body, graph in zip(step.bodies, operator.bodies, strict=True):
            _demand(body.graph is graph and body.mesh == program.mesh, f"{name}: a body is another program's")
            _verify_level(body)
        _verify_border(name, step, program)
        return
    rule, strategy = operator.rule, step.strategy
    _verify_strategy(name, operator, strategy, program.mesh)
    _demand(not strategy.passing or operator.linear, f"{name}: passes partial sums, but is not linear")
    summed = {
        axis for axes, f in zip(strategy.factors, rule.factors, strict=True) if f.kind.leaves_sum for axis in axes
    }
    left = _in_order(summed | set(strategy.passing), program.mesh)
    for k, buffer in enumerate(step.operands):
        if buffer is not None:
            wanted = Layout(_implied(rule.operands[k], strategy), strategy.passing)
            _demand(buffer.layout == wanted, f"{name}: operand {k} is {buffer}, its strategy wants {wanted}")
    for k, buffer in enumerate(step.results):
        implied = Layout(_implied(rule.results[k], strategy), left)
        _demand(buffer.layout == implied, f"{name}: result {k} is {buffer}, its strategy leaves {implied}")


def _verify_strategy(name: str, operator: Operator, strategy: Strategy, mesh: Mesh) -> None:
    rule = operator.rule
    _demand(len(strategy.factors) == len(rule.factors), f"{name}: {strategy} is not for {len(rule.factors)} factors")
    used = [axis for axes in (*strategy.factors, strategy.passing) for axis in axes]
    is_once = len(set(used)) == len(used) or operator.primitive == BARRIER
    _demand(is_once and set(used) <= set(mesh.axis_names), f"{name}: {strategy} is not for {mesh}")
    mappings = [factors for mapping in (*rule.operands, *rule.results) for factors in mapping]
    for number, (factor, axes) in enumerate(zip(rule.factors, strategy.factors, strict=True)):
        if not axes:
            continue
        where = f"{name}: factor {number} of size {factor.size}, cut by {axes},"
        _demand(factor.kind is not FactorKind.BLOCKED, f"{where} is blocked")
        _demand(factor.size % mesh.axis_size(*axes) == 0, f"{where} does not divide")
        _demand(_ordered(axes, mesh), f"{where} is cut out of mesh order")
        _demand(all(number not in factors[1:] for factors in mappings), f"{where} is minor in a dimension")


def _implied(mapping: tuple[tuple[int, ...], ...], strategy: Strategy) -> tuple[Axes, ...]:
    return tuple(strategy.factors[factors[0]] if factors else () for factors in mapping)


def _in_order(axes: set[str], mesh: Mesh) -> Axes:
    return tuple(name for name in mesh.axis_names if name in axes)


def _verify_border(name: str, step: Run, program: SpmdProgram) -> None:
    """Both sides of a loop's or branch's border have one layout; what goes round a loop comes back as it went in."""
    params = step.operator.equation.params
    values = program.values
    match step.operator.primitive:
        case LoopKind.SCAN:
            (body,) = step.bodies
            consts, carries = _compat.scan_arity(params)
            whole = consts + carries
            zeros = tuple(map(is_zero_literal, step.operator.equation.invars))
            _meet(name, step.operands[:whole], body.inputs[:whole], values, zeros=zeros)
            _meet(name, step.operands[whole:], body.inputs[whole:], values, stacked=True)
            _meet(name, body.inputs[consts:whole], body.outputs[:carries], values)
            _meet(name, step.results[:carries], body.inputs[consts:whole], values)
            _meet(name, step.results[carries:], body.outputs[carries:], values, stacked=True)
        case LoopKind.WHILE:
            condition, body = step.bodies
            split, consts = params["cond_nconsts"], params["body_nconsts"]
            _meet(name, step.operands[:split], condition.inputs[:split], values)
            _meet(name, step.operands[split:], body.inputs, values)
            _meet(name, body.inputs[consts:], condition.inputs[split:], values)
            _meet(name, body.inputs[consts:], body.outputs, values)
            _meet(name, step.results, body.inputs[consts:], values)
            _whole_scalar(name, condition.outputs[0])
        case _:
            _whole_scalar(name, step.operands[0])
            for body in step.bodies:
                _meet(name, step.operands[1:], body.inputs, values)
                _meet(name, step.results, body.outputs, values)


def _meet(
    name: str,
    outside: Sequence[Buffer | None],
    inside: Sequence[Buffer | None],
    values: Mapping[int, Value],
    *,
    stacked: bool = False,
    zeros: Sequence[bool] = (),
) -> None:
    """Layouts agree (``stacked``: the outer one has one more dimension in front, whole).

    A literal must meet no cut, nor a partial sum unless it is zero (``zeros``, by position).
    """
    _demand(len(outside) == len(inside), f"{name}: {len(outside)} arrays meet {len(inside)}")
    for position, (outer, inner) in enumerate(zip(outside, inside, strict=True)):
        if inner is None and outer is None:
            continue
        rank = len(values[outer.value].shape) - stacked if outer is not None else 0
        layout = Layout(((),) * rank) if inner is None else inner.layout
        expected = Layout(((), *layout.dims), layout.partial) if stacked else layout
        is_zero = position < len(zeros) and zeros[position]
        literal = Layout(((),) * len(expected.dims), expected.partial if is_zero else ())
        seen = literal if outer is None else outer.layout
        _demand(seen == expected, f"{name}: {outer} meets {inner} at its border")


def _whole_scalar(name: str, buffer: Buffer | None) -> None:
    whole = buffer is None or buffer.layout == Layout(())
    _demand(whole, f"{name}: what decides its course is {buffer}, not the same on all devices")


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise InternalError(f"the steps are broken: {what}; please report this")
