"""Along which dimensions may an equation be cut, and what do the pieces leave behind?

The answer is the equation's :class:`~autopar.graph.ir.Rule`. Its structure comes from Shardy (see
:mod:`autopar.graph.shardy`), asked once for each *distinct* equation: primitive, parameters, operand types. What Shardy
does not say is said by us:

* the *kind* of a reduction, for Shardy marks sum, maximum, argmax and a gather's looked-up dimension alike;
* the rules of primitives for which Shardy has none, or one too generous for an operator that runs on its piece alone.

Both are tables by primitive (:mod:`autopar.graph.rule_tables`).

An equation whose ranked operands and results all have one shape is asked about with a stand-in shape of the same rank,
so thousands of pointwise equations cost a few dozen questions.  What was answered once is known to the whole process: the
next form of the step, and the next model, ask about what is new in them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autopar import _compat
from autopar._compat import JaxprEqn
from autopar.graph.factoring import Dims
from autopar.graph.ir import Factor, FactorKind, Rule
from autopar.graph.rule_tables import Shape, blocked_rule, dtype_of, kind_of, rule_of_table, shape_of
from autopar.graph.shardy import Answer, Question, ask

_STAND_IN_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)  # primes, so that no dimension is a product of others
_PLACEMENT_PARAMETERS = frozenset({"sharding", "out_sharding"})


def rules_for(equations: Sequence[JaxprEqn], platform: str) -> list[Rule]:
    """The rule of each equation, when lowered for ``platform`` (``cpu``, ``cuda`` or ``tpu``); see :meth:`Rulebook.of`."""
    return Rulebook(platform).of(equations)


@dataclass(frozen=True)
class _Answered:
    """What this process knows of equations whose parameters are plain values; those of others may be equal by chance only."""

    rules: dict[Hashable, Rule] = field(default_factory=dict)
    patterns: dict[Hashable, Rule | None] = field(default_factory=dict)


@functools.lru_cache(maxsize=16)
def answered(platform: str, context: Hashable) -> _Answered:
    """The answers for one platform and one configuration of JAX, on which both lowering and a few rules depend."""
    return _Answered()


_MOST_ANSWERS = 1 << 16


class Rulebook:
    """Owns the rules found so far for one platform: the many graphs of one step ask about their equations once."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self._known: dict[Hashable, Rule] = {}
        self._patterns: dict[Hashable, Rule | None] = {}
        self._alive: list[JaxprEqn] = []
        """Equations whose identities may stand in keys."""

    def of(self, equations: Sequence[JaxprEqn]) -> list[Rule]:
        """The rule of each equation.

        Equations with bodies (loops, branches, calls) are for the caller to take apart; asked about here, they are blocked
        where their bodies cannot be read. Never raises: an equation that nothing is known of is blocked throughout, with
        ``known=False``.
        """
        keys = _Keys()
        places = [keys.of(equation) for equation in equations]
        new: dict[Hashable, JaxprEqn] = {}
        for key, equation in zip(places, equations, strict=True):
            if key not in self._known:
                new.setdefault(key, equation)
        shared = {key: (equation.primitive, key) for key, equation in new.items() if _is_plain(equation)}
        memory = answered(self.platform, _compat.lowering_context())
        for key, name in shared.items():
            if (rule := memory.rules.get(name)) is not None:
                self._known[key] = rule
                del new[key]
        self._alive += new.values()
        found = dict(zip(new, self._rules_of_distinct(list(new.values()), keys), strict=True))
        self._known |= found
        if len(memory.rules) > _MOST_ANSWERS:
            memory.rules.clear()
        memory.rules.update({shared[key]: rule for key, rule in found.items() if key in shared})
        return [self._known[key] for key in places]

    def _rules_of_distinct(self, equations: Sequence[JaxprEqn], keys: _Keys) -> list[Rule]:
        rules: dict[int, Rule] = {}
        for number, equation in enumerate(equations):
            rule = rule_of_table(equation)
            if rule is not None:
                rules[number] = rule
        rules |= self._by_stand_in(equations, [n for n in range(len(equations)) if n not in rules], keys)
        rest = [number for number in range(len(equations)) if number not in rules]
        answers = ask([_question(equations[number]) for number in rest], self.platform)
        for number, answer in zip(rest, answers, strict=True):
            rules[number] = _rule_of_answer(equations[number], answer)
        return [rules[number] for number in range(len(equations))]

    def _by_stand_in(self, equations: Sequence[JaxprEqn], numbers: Iterable[int], keys: _Keys) -> dict[int, Rule]:
        """Rules of the equations of one shape, each asked about at the stand-in shape; the others are left out."""
        groups: dict[Hashable, list[int]] = {}
        for number in numbers:
            if _one_shape(equations[number]) is not None:
                groups.setdefault(keys.of(equations[number], stand_in=True), []).append(number)
        new = {key: equations[members[0]] for key, members in groups.items() if key not in self._patterns}
        shared = {key: (equation.primitive, key) for key, equation in new.items() if _is_plain(equation)}
        memory = answered(self.platform, _compat.lowering_context())
        for key, name in shared.items():
            if name in memory.patterns:
                self._patterns[key] = memory.patterns[name]
                del new[key]
        answers = ask([_question(equation, stand_in=True) for equation in new.values()], self.platform)
        for (key, equation), answer in zip(new.items(), answers, strict=True):
            self._patterns[key] = _pattern(equation, answer)
            if key in shared:
                memory.patterns[shared[key]] = self._patterns[key]
        return {
            number: _resized(pattern, _one_shape(equations[number]) or ())
            for key, members in groups.items()
            if (pattern := self._patterns[key]) is not None
            for number in members
        }


def _pattern(equation: JaxprEqn, answer: Answer | None) -> Rule | None:
    """The rule at the stand-in shape; None where it says nothing of other shapes."""
    shapes = [_stand_in(shape_of(var)) for var in equation.outvars]
    if answer is None or not answer.complete or list(answer.result_shapes) != shapes:
        return None
    return _rule_of_answer(equation, answer)


def _rule_of_answer(equation: JaxprEqn, answer: Answer | None) -> Rule:
    if answer is None or len(answer.results) != len(equation.outvars):
        return blocked_rule(equation, known=False)
    # A typed key is lowered with its words as trailing dimensions; the equation does not see them.
    operands = [dims[: len(shape_of(var))] for dims, var in zip(answer.operands, equation.invars, strict=True)]
    results = [dims[: len(shape_of(var))] for dims, var in zip(answer.results, equation.outvars, strict=True)]
    rule = answer.factoring.rule(operands, results, functools.partial(kind_of, equation))
    known = answer.complete or any(factor.kind is not FactorKind.BLOCKED for factor in rule.factors)
    return Rule(rule.factors, rule.operands, rule.results, known)


# ------------------------------------------------------------------------------------------- questions and their keys


def _one_shape(equation: JaxprEqn) -> Shape | None:
    """The shape that all results and all ranked operands share, if the parameters speak of no sizes either."""
    shapes = {shape_of(var) for var in equation.outvars} | {shape_of(var) for var in equation.invars if shape_of(var)}
    speaks_of_sizes = any(isinstance(value, tuple | list | dict) and value for value in equation.params.values())
    if len(shapes) != 1 or speaks_of_sizes or _compat.inner_jaxprs(equation):
        return None
    shape = shapes.pop()
    return shape if 0 < len(shape) <= len(_STAND_IN_SIZES) else None


def _stand_in(shape: Shape) -> Shape:
    return _STAND_IN_SIZES[: len(shape)]


def _resized(pattern: Rule, shape: Shape) -> Rule:
    """A rule found at the stand-in shape, at ``shape``. Stand-in sizes differ: a factor's size names its dimension."""
    sizes = [shape[_STAND_IN_SIZES.index(factor.size)] for factor in pattern.factors]
    kept = [number for number, size in enumerate(sizes) if size != 1]
    renumbered = {number: position for position, number in enumerate(kept)}

    def moved(arrays: tuple[Dims, ...]) -> tuple[Dims, ...]:
        return tuple(tuple(tuple(renumbered[f] for f in dim if f in renumbered) for dim in dims) for dims in arrays)

    kinds = [pattern.factors[number].kind if sizes[number] else FactorKind.BLOCKED for number in kept]
    factors = tuple(Factor(sizes[number], kind) for number, kind in zip(kept, kinds, strict=True))
    return Rule(factors, moved(pattern.operands), moved(pattern.results), pattern.known)


def _question(equation: JaxprEqn, *, stand_in: bool = False) -> Question:
    """How to ask about an equation. Where its results shall lie is a wish, not a meaning, and is left out."""
    parameters = {k: None if k in _PLACEMENT_PARAMETERS else v for k, v in equation.params.items()}

    def bind(*operands: Any) -> Any:
        if equation.effects:
            raise ValueError("an equation with effects may not be repeated for a question")
        return equation.primitive.bind(*operands, **equation.primitive.get_bind_params(parameters))

    return Question(bind, tuple(_type_of(var, stand_in=stand_in) for var in equation.invars))


def _type_of(var: Any, *, stand_in: bool) -> jax.ShapeDtypeStruct:
    shape = shape_of(var)
    return jax.ShapeDtypeStruct(_stand_in(shape) if stand_in else shape, dtype_of(var) or np.dtype(bool))


def _is_plain(equation: JaxprEqn) -> bool:
    """Whether nothing in the parameters is known by its identity, or holds what the text of it does not say."""
    return not equation.effects and all(
        map(_is_plain_value, (value for name, value in equation.params.items() if name not in _PLACEMENT_PARAMETERS))
    )


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain_value, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_plain_value, value))
    if _compat.is_jaxpr(value):
        return not _compat.consts_of(value) and all(map(_is_plain_inside, _compat.jaxpr_of(value).eqns))
    return value is None or isinstance(value, _PLAIN)


def _is_plain_inside(equation: JaxprEqn) -> bool:
    """Of an equation in a parameter: the text of a literal says all of it where it is one number."""
    return _is_plain(equation) and not any(isinstance(v, _compat.Literal) and shape_of(v) for v in equation.invars)


_PLAIN = (str, bool, int, float, complex, enum.Enum, np.dtype, np.generic, _compat.Primitive)


class _Keys:
    """Equal keys for equations of equal rules. Valid while the equations live, because of identities in the keys."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def of(self, equation: JaxprEqn, *, stand_in: bool = False) -> Hashable:
        def types(variables: Sequence[Any]) -> Hashable:
            return tuple(
                (
                    len(shape_of(var)) if stand_in else shape_of(var),
                    dtype_of(var),
                    isinstance(var, _compat.Literal),
                )
                for var in variables
            )

        parameters = tuple(
            (name, self._value(value))
            for name, value in equation.params.items()
            if value is not None and name not in _PLACEMENT_PARAMETERS
        )
        name = equation.primitive.name
        return name, parameters, types(equation.invars), types(equation.outvars), bool(equation.effects)

    def _value(self, value: Any) -> Hashable:
        if value is None or isinstance(value, str | bool | int | enum.Enum | np.dtype):
            return value
        if isinstance(value, float | complex):
            return repr(value)  # nan is not equal to itself
        if isinstance(value, tuple | list):
            return type(value).__name__, *(self._value(item) for item in value)
        if isinstance(value, Mapping):
            return tuple((name, self._value(item)) for name, item in value.items())
        if _compat.is_jaxpr(value):
            if _compat.consts_of(value):  # their values are not in its text
                return "by identity", id(value)
            if id(value) not in self._texts:
                self._texts[id(value)] = str(value)
            return self._texts[id(value)]
        try:
            hash(value)
        except TypeError:
            return "by identity", id(value)
        return value
