"""Which values of a step carry independent examples, which are sums over them, and what couples the batch.

Let the batch be cut into N *microbatches* of consecutive examples.  A value v of the step then has one of the forms

    whole      v does not depend on the microbatch
    cut at d   v is the concatenation along dimension d of pieces, piece j made of microbatch j and whole values only
    sum        v = Σⱼ vⱼ, with vⱼ made of microbatch j and whole values only

or none of them, and is then made *after* all microbatches.  This is the language of layouts on a mesh whose only axis is
time: cutting a factor of kind PARALLEL leaves pieces and one of kind SUM leaves summands, whether the pieces are
computed side by side or one after the other.  So forms follow from the operators' rules; a factor that the rule blocks
(a permutation, a window, a sort along the batch) ends them, as does a reduction that is no sum.

An operator that needs, for each piece, what is known after all microbatches only *couples* the examples.  If that value
follows from the batch alone (the weight total of a masked mean), it and what it is made of are computed once *before*, on
the whole batch.  Else the operator runs after all microbatches as well; where much of the step would, the batch cannot be
cut, and the operator is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from autopar import _compat
from autopar.cluster import Mesh
from autopar.errors import PlanError
from autopar.graph.build import BARRIER, LoopKind
from autopar.graph.ir import FactorKind, Graph, Operator, Phase, Value
from autopar.graph.zeros import is_zero_literal, zero_values
from autopar.inter_op.terms import DRAW, MicrobatchRng
from autopar.plan import Axes, Layout
from autopar.schedule.local_params import LocalError, site_of
from autopar.schedule.reshard import replicated

AXIS = "microbatch"

LEAVES_PIECES = frozenset((FactorKind.PARALLEL, FactorKind.SUM))

MOST_LATE_SHARE = 0.05
"""So much of the forward and backward pass, in FLOPs, may be left for after the microbatches."""


class CoupledBatchError(PlanError):
    """The examples of a batch depend on each other; ``operator`` is where."""

    def __init__(self, operator: Operator, why: str) -> None:
        self.operator = operator
        self.reason = f"{operator.primitive} at {operator.source} {why}"
        super().__init__(f"the batch cannot be cut into microbatches: {self.reason}")


@dataclass
class Level:
    """The forms of one level of a program.

    ``forms`` are layouts over the axis ``AXIS`` (a value of no form is missing); ``strategies`` are those of the
    operators that run per microbatch; ``bodies`` are the levels of their loops.  ``pieces`` are whole values, by (value,
    dimension), of which a microbatch wants its part only; those in ``regrown`` are computed in part (operator →
    strategy, none for a draw of the microbatch's own), the others are sliced.  ``draws`` are the whole batch's random
    draws, where the level is a program on a microbatch alone.
    """

    graph: Graph
    rng: MicrobatchRng = MicrobatchRng.EXACT
    forms: dict[int, Layout] = field(default_factory=dict)
    strategies: dict[int, tuple[Axes, ...]] = field(default_factory=dict)
    bodies: dict[int, tuple[Level, ...]] = field(default_factory=dict)
    pieces: set[tuple[int, int]] = field(default_factory=set)
    regrown: dict[tuple[int, int], tuple[Operator, tuple[Axes, ...]]] = field(default_factory=dict)
    draws: dict[int, Operator] = field(default_factory=dict)

    def is_whole(self, value: int) -> bool:
        """Whether a value does not depend on the microbatch."""
        form = self.forms.get(value)
        return form is not None and not form.axes


@dataclass(frozen=True)
class Examples:
    """The forms of a whole step: its top level, and the operators that run once before all microbatches."""

    level: Level
    before: frozenset[int]
    mesh: Mesh


def examples_of(
    graph: Graph,
    batch: Sequence[int],
    fixed: Iterable[int],
    count: int,
    rng: MicrobatchRng = MicrobatchRng.EXACT,
) -> Examples:
    """The forms of a step's values when its batch is cut into ``count`` microbatches.

    ``batch`` are the input positions of batch leaves (examples along dimension 0), ``fixed`` those of inputs on which
    nothing may depend that is computed before the microbatches (the state).  Raises :class:`CoupledBatchError`.
    """
    mesh = Mesh((AXIS,), (count,))
    makers = {result: operator for operator in graph.operators for result in operator.results}
    held = {graph.inputs[position] for position in fixed}
    before: set[int] = set()
    while True:
        level = Level(graph, rng)
        for position, value in enumerate(graph.inputs):
            rank = len(graph.values[value].shape)
            level.forms[value] = _cut(rank, 0) if position in set(batch) else replicated(rank)
        reader = _Reader(level, mesh, frozenset(before))
        couplings = reader.read()
        cones = [_cone(late, makers) for _, late in couplings]
        early = {
            operator
            for cone in cones
            if not any(value in held and graph.values[value].shape for value in cone.values)
            for operator in cone.operators
        }
        if early <= before:
            break
        before |= early
    _check_worth(level, couplings, makers)
    reader.grow_pieces()
    return Examples(level, frozenset(before), mesh)


def _check_worth(level: Level, couplings: Sequence[tuple[Operator, int]], makers: Mapping[int, Operator]) -> None:
    """Refuse a cut that leaves much of the forward and backward pass for after the microbatches."""
    graph = level.graph
    passes = [operator for operator in graph.operators if operator.phase is not Phase.UPDATE]
    late = [operator for operator in passes if any(result not in level.forms for result in operator.results)]
    if sum(map(_all_flops, late)) <= MOST_LATE_SHARE * sum(map(_all_flops, passes)):
        return
    if couplings:
        operator, value = couplings[0]
        raise CoupledBatchError(
            operator, f"needs, for each example, {_named(graph, value, makers)}, which depends on all examples"
        )
    raise CoupledBatchError(late[0], "mixes the examples")


def _all_flops(operator: Operator) -> float:
    inner = sum(one.flops * trips for body in operator.bodies for one, trips in body.all_operators())
    return operator.flops + inner


def _named(graph: Graph, value: int, makers: Mapping[int, Operator]) -> str:
    array = graph.values[value]
    maker = makers.get(value)
    place = "" if maker is None else f" of {maker.primitive} at {maker.source}"
    return f"the result {array.dtype}[{','.join(map(str, array.shape))}]{place}"


@dataclass(frozen=True)
class _Cone:
    operators: frozenset[int]
    values: frozenset[int]


def _cone(value: int, makers: Mapping[int, Operator]) -> _Cone:
    """All that a value is made of."""
    operators, values = set(), set()
    stack = [value]
    while stack:
        one = stack.pop()
        if one in values:
            continue
        values.add(one)
        if (maker := makers.get(one)) is not None:
            operators.add(maker.id)
            stack.extend(operand for operand in maker.operands if operand is not None)
    return _Cone(frozenset(operators), frozenset(values))


def _cut(rank: int, dim: int) -> Layout:
    return Layout(tuple((AXIS,) if d == dim else () for d in range(rank)))


def cut_dim(form: Layout) -> int | None:
    """The dimension along which the examples lie, if the form is cut."""
    return next((dim for dim, axes in enumerate(form.dims) if axes), None)


def _sum(rank: int) -> Layout:
    return Layout(((),) * rank, (AXIS,))


class _Reader:
    """Reads the forms of one level, operator by operator."""

    def __init__(self, level: Level, mesh: Mesh, before: frozenset[int], zeros: frozenset[int] = frozenset()) -> None:
        self._level = level
        self._values: Mapping[int, Value] = level.graph.values
        self._mesh = mesh
        self._before = before
        self._zeros = zero_values(level.graph, zeros)
        for value in level.graph.constants:
            level.forms[value] = replicated(len(self._values[value].shape))

    def read(self) -> list[tuple[Operator, int]]:
        """Give every value its form, if it has one.

        Returns the operators that need, piece by piece, a value that is known after all microbatches only, with it.
        """
        level = self._level
        couplings = []
        for operator in level.graph.operators:
            if operator.id in self._before:
                self._give(operator, [replicated(len(self._values[r].shape)) for r in operator.results])
                continue
            known = [None if value is None else level.forms.get(value) for value in operator.operands]
            late, sums, cut = [], [], False
            for value, form in zip(operator.operands, known, strict=True):
                if value is not None and form is None:
                    late.append(value)
                elif value is not None and form is not None:
                    cut |= cut_dim(form) is not None
                    sums += [value] if form.partial else []
            if cut and (late or sums) and not _is_each_its_own(operator):
                couplings.append((operator, (late or sums)[0]))
                continue
            if late:
                continue
            if operator.bodies:
                forms = self._loop(operator, known)
            elif not any(form is not None and form.axes for form in known):
                forms = [replicated(len(self._values[r].shape)) for r in operator.results]
            else:
                forms = self._plain(operator, known)
            if forms is not None:
                self._give(operator, forms)
        return couplings

    def _give(self, operator: Operator, forms: Sequence[Layout]) -> None:
        self._level.forms.update(zip(operator.results, forms, strict=True))

    # --- operators ---

    def _plain(self, operator: Operator, known: Sequence[Layout | None]) -> list[Layout] | None:
        if _is_each_its_own(operator):
            self._level.strategies[operator.id] = ()
            return [known[k] or replicated(len(self._values[r].shape)) for k, r in enumerate(operator.results)]
        sums = [form is not None and bool(form.partial) for form in known]
        if any(sums):
            others = [value for value, is_sum in zip(operator.operands, sums, strict=True) if not is_sum]
            # Zeros are as good a sum as any.
            if not operator.linear or any(value is not None and value not in self._zeros for value in others):
                return None
            self._level.strategies[operator.id] = ((),) * len(operator.rule.factors)
            return [_sum(len(self._values[r].shape)) for r in operator.results]
        factors = self._cut_factors(operator, known)
        return None if factors is None else self._follow(operator, factors)

    def _cut_factors(self, operator: Operator, known: Sequence[Layout | None]) -> set[int] | None:
        """Factors that carry the examples; None where some cut dimension is carried by no factor that may be cut."""
        rule = operator.rule
        found: set[int] = set()
        for form, dims in zip(known, rule.operands, strict=True):
            dim = None if form is None else cut_dim(form)
            if dim is None:
                continue
            major = next((f for f in dims[dim] if rule.factors[f].size > 1), None)
            if major is None or not rule.known or rule.factors[major].kind not in LEAVES_PIECES:
                return None
            found.add(major)
        return found

    def _follow(self, operator: Operator, factors: set[int]) -> list[Layout] | None:
        strategy = tuple((AXIS,) if f in factors else () for f in range(len(operator.rule.factors)))
        try:
            site = site_of(operator.equation, operator.rule, strategy, self._mesh)
        except LocalError:
            return None
        level = self._level
        for value, piece in zip(operator.operands, site.operands, strict=True):
            dim = cut_dim(piece.layout)
            if value is None:
                continue
            form = level.forms[value]
            if dim is None and form.axes:
                return None
            if dim is not None and not form.axes:
                level.pieces.add((value, dim))
        level.strategies[operator.id] = strategy
        return [piece.layout for piece in site.results]

    # --- loops ---

    def _loop(self, operator: Operator, known: Sequence[Layout | None]) -> list[Layout] | None:
        forms = [form if form is not None else Layout(()) for form in known]
        if not any(form.axes for form in forms):
            return [replicated(len(self._values[r].shape)) for r in operator.results]
        match operator.primitive:
            case LoopKind.SCAN:
                return self._scan(operator, forms)
            case LoopKind.WHILE:
                return self._while(operator, forms)
            case LoopKind.COND:
                return self._branches(operator, forms)
        return None

    def _scan(self, operator: Operator, forms: list[Layout]) -> list[Layout] | None:
        consts, carries = _compat.scan_arity(operator.equation.params)
        whole = consts + carries
        if any(cut_dim(form) == 0 for form in forms[whole:]):
            return None  # the loop runs over the examples
        inside = forms[:whole] + [Layout(form.dims[1:], form.partial) for form in forms[whole:]]
        settled = self._settle(operator, operator.bodies[0], inside, 0, range(consts, whole))
        if settled is None:
            return None
        inner, leaving = settled
        self._keep_body(operator, (inner,), dict(zip(range(whole), inside[:whole], strict=True)))
        return leaving[:carries] + [Layout(((), *form.dims), form.partial) for form in leaving[carries:]]

    def _while(self, operator: Operator, forms: list[Layout]) -> list[Layout] | None:
        """A loop whose number of trips is the same for all microbatches."""
        conditions, consts = _compat.while_arity(operator.equation.params)
        test, body = operator.bodies
        inside = forms[conditions:]
        settled = self._settle(operator, body, inside, conditions, range(consts, len(inside)))
        if settled is None:
            return None
        tested = self._body(test, forms[:conditions] + inside[consts:], ())
        if tested is None or self._outputs(test, tested)[0].axes:
            return None
        inner, leaving = settled
        self._keep_body(operator, (tested, inner), dict(enumerate(inside, conditions)))
        return leaving

    def _settle(
        self, operator: Operator, body: Graph, inside: list[Layout], shift: int, carried: range
    ) -> tuple[Level, list[Layout]] | None:
        """The level of a body that runs again and again, and the forms that leave it; None if there is none.

        ``inside`` are the forms of its inputs and become those in which the carries, at the places ``carried``, pass from
        trip to trip; input k is operand k + ``shift``.
        """
        zeros = {k for k in range(len(inside)) if self._is_zero(operator, k + shift)}
        for _ in range(3 * len(carried) + 2):
            inner = self._body(body, inside, zeros)
            if inner is None:
                return None
            leaving = self._outputs(body, inner)
            changed = [k for out, k in enumerate(carried) if leaving[out] != inside[k]]
            for k in changed:
                after = leaving[k - carried.start]
                if not self._becomes(operator, k + shift, inside[k], after):
                    return None
                inside[k] = after
            # What begins as zeros is taken for zeros in every trip until a trip leaves something else.
            still = _zero_outputs(body, zeros)
            filled = {k for out, k in enumerate(carried) if k in zeros and out not in still}
            zeros -= filled
            if not changed and not filled:
                return inner, leaving
        return None

    def _becomes(self, operator: Operator, position: int, before: Layout, after: Layout) -> bool:
        """Whether a carry may start in the form that it takes: whole values are cut, zeros are summands."""
        if before.axes or not after.axes:
            return False
        return self._is_zero(operator, position) if after.partial else operator.operands[position] is not None

    def _is_zero(self, operator: Operator, position: int) -> bool:
        value = operator.operands[position]
        return value in self._zeros if value is not None else is_zero_literal(operator.equation.invars[position])

    def _branches(self, operator: Operator, forms: list[Layout]) -> list[Layout] | None:
        if forms[0].axes:
            return None
        levels, leaving = [], []
        for body in operator.bodies:
            zeros = {k for k in range(len(body.inputs)) if self._is_zero(operator, k + 1)}
            inner = self._body(body, forms[1:], zeros)
            if inner is None:
                return None
            levels.append(inner)
            leaving.append(self._outputs(body, inner))
        if any(found != leaving[0] for found in leaving):
            return None
        self._keep_body(operator, tuple(levels), {})
        return leaving[0]

    def _body(self, body: Graph, inside: Sequence[Layout], zeros: Iterable[int]) -> Level | None:
        """The level of a loop's body; its inputs at the positions ``zeros`` are zeros. None if something has no form."""
        level = Level(body, self._level.rng)
        level.forms.update(zip(body.inputs, inside, strict=True))
        reader = _Reader(level, self._mesh, frozenset(), frozenset(body.inputs[position] for position in zeros))
        if reader.read() or any(r not in level.forms for o in body.operators for r in o.results):
            return None
        reader.grow_pieces()
        return level

    def _outputs(self, body: Graph, level: Level) -> list[Layout]:
        atoms = _compat.jaxpr_of(body.jaxpr).outvars
        return [
            Layout(((),) * len(atom.aval.shape)) if value is None else level.forms[value]
            for value, atom in zip(body.outputs, atoms, strict=True)
        ]

    def _keep_body(self, operator: Operator, levels: tuple[Level, ...], forms: Mapping[int, Layout]) -> None:
        """Levels of a loop, and in which form it wants operands (by position)."""
        self._level.bodies[operator.id] = levels
        self._level.strategies[operator.id] = ()
        for position, form in forms.items():
            value, dim = operator.operands[position], cut_dim(form)
            if value is not None and dim is not None and self._level.is_whole(value):
                self._level.pieces.add((value, dim))

    # --- parts of whole values ---

    def grow_pieces(self) -> None:
        """Whole values of which only a part is wanted are computed in part, where their operator can be cut so.

        Random bits of which nothing else is wanted either are drawn by the microbatch for itself, if that is asked for.
        """
        level = self._level
        wholly = set(level.graph.outputs)
        for operator in reversed(level.graph.operators):
            for position, result in enumerate(operator.results):
                for dim in range(len(self._values[result].shape)):
                    if (result, dim) in level.pieces:
                        self._regrow(operator, position, result, dim, apart=result not in wholly)
                        wholly.update(() if (result, dim) in level.regrown else (result,))
            wholly.update(self._wanted_whole(operator, wholly))

    def _wanted_whole(self, operator: Operator, wholly: Set[int | None]) -> list[int]:
        """Operands that an operator wants whole, if ``wholly`` are the results that are wanted so."""
        level = self._level
        operands = [(k, value) for k, value in enumerate(operator.operands) if value is not None]
        inside = operator.id in level.strategies
        if not inside and (
            not wholly.isdisjoint(operator.results) or any(r not in level.forms for r in operator.results)
        ):
            return [value for _, value in operands]
        if operator.bodies:
            return [value for _, value in operands if not any(value == part for part, _ in level.pieces)]
        runs = [strategy for one, strategy in level.regrown.values() if one is operator and strategy]
        runs += [level.strategies[operator.id]] if inside else []
        return [
            value
            for k, value in operands
            for strategy in runs
            if not any(strategy and strategy[f] for factors in operator.rule.operands[k] for f in factors)
        ]

    def _regrow(self, operator: Operator, position: int, result: int, dim: int, *, apart: bool) -> None:
        rule, level = operator.rule, self._level
        if operator.bodies or not rule.known or operator.id in self._before:
            return
        draws = operator.primitive == DRAW and apart and level.rng is MicrobatchRng.PER_MICROBATCH
        if draws and dim >= len(rule.operands[0]):
            level.regrown[result, dim] = (operator, ())
            return
        if _is_each_its_own(operator):
            if (value := operator.operands[position]) is not None:
                level.regrown[result, dim] = (operator, ())
                level.pieces.add((value, dim))
            return
        strategy = part_of(operator, position, dim, self._mesh)
        if strategy is None:
            return
        site = site_of(operator.equation, rule, strategy, self._mesh)
        wanted = [
            (value, found)
            for value, piece in zip(operator.operands, site.operands, strict=True)
            if value is not None and (found := cut_dim(piece.layout)) is not None
        ]
        level.regrown[result, dim] = (operator, strategy)
        level.pieces.update(wanted)


def part_of(operator: Operator, position: int, dim: int, mesh: Mesh) -> tuple[Axes, ...] | None:
    """The strategy by which a microbatch computes its part, along a dimension of a result, of what is whole."""
    rule = operator.rule
    major = next((f for f in rule.results[position][dim] if rule.factors[f].size > 1), None)
    if major is None or rule.factors[major].kind is not FactorKind.PARALLEL:
        return None
    strategy = tuple((AXIS,) if f == major else () for f in range(len(rule.factors)))
    try:
        site_of(operator.equation, rule, strategy, mesh)
    except LocalError:
        return None
    return strategy


def _zero_outputs(body: Graph, zeros: Iterable[int]) -> set[int]:
    """Positions of a body's outputs that are zeros if its inputs at the positions ``zeros`` are."""
    known = zero_values(body, frozenset(body.inputs[position] for position in zeros))
    atoms = _compat.jaxpr_of(body.jaxpr).outvars
    pairs = enumerate(zip(body.outputs, atoms, strict=True))
    return {k for k, (value, atom) in pairs if (is_zero_literal(atom) if value is None else value in known)}


def _is_each_its_own(operator: Operator) -> bool:
    """Whether result k is operand k, whatever the others are."""
    return operator.primitive == BARRIER
