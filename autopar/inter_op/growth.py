"""How does a value grow with the batch?

Trace a function on B examples and on B/N.  A value has *degree* k if, for examples that are all alike, the first program's
is Nᵏ times the second's: a mean has degree 0, a sum over examples 1, the gradient of a mean with respect to one example
−1.  Degrees are read off operator by operator, like units of measurement: products add them, sums ask for equal ones, a
sum over a dimension that is N times longer adds one, a literal N times larger has degree 1, and a mask that picks one
position of N times as many, as one-hot vectors do, has degree −1.

A result that is non-linear in something of degree other than 0 (the logarithm of a sum over the batch) has degree 0: it
is taken for a quantity of the batch that it was computed on.  Where terms of different degrees are added, as in a sum
over examples with a penalty on the parameters, there is none (``None``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from autopar import _compat
from autopar.graph.build import BARRIER, LoopKind
from autopar.graph.ir import FactorKind, Graph, Operator

Degree = Fraction | None
ZEROS = Fraction(10**9)
"""The degree of zeros, which are a sum of nothing and go with any other."""

_ALIKE = frozenset(
    """add sub add_any max min concatenate neg reshape broadcast_in_dim transpose convert_element_type slice
    squeeze expand_dims dynamic_slice dynamic_update_slice gather scatter copy reduce_max reduce_min rev pad sort
    stop_gradient reduce_precision real imag abs split reduce_sum reduce_window_sum sharding_constraint reshard
    device_put scatter-add clamp name""".split()
)
"""Results are of the degree of the operands, those of indices and literals aside."""

_KEEP_POSITIONS = frozenset("broadcast_in_dim reshape squeeze transpose convert_element_type add sub".split())
_POWERS = {"square": Fraction(2), "sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2)}
_INDICES_FROM = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2, "clamp": 3}


def degrees(whole: Graph, small: Graph, count: int) -> dict[int, Degree]:
    """Degrees of the values of the top level; both graphs are of one shape but for sizes, and inputs have degree 0."""
    return _Reader(count).level(whole, small, [Fraction(0)] * len(whole.inputs))


class _Reader:
    def __init__(self, count: int) -> None:
        self._count = count
        self._positions: set[int] = set()  # values that count along a dimension that grows

    def level(self, whole: Graph, small: Graph, inputs: Sequence[Degree]) -> dict[int, Degree]:
        found: dict[int, Degree] = dict.fromkeys(whole.constants, Fraction(0))
        found.update(zip(whole.inputs, inputs, strict=True))
        for one, other in zip(whole.operators, small.operators, strict=True):
            found.update(zip(one.results, self._results(one, other, found), strict=True))
        return found

    def _results(self, one: Operator, other: Operator, known: Mapping[int, Degree]) -> list[Degree]:
        atoms = zip(one.operands, one.equation.invars, other.equation.invars, strict=True)
        operands = [known[value] if value is not None else self._literal(a, b) for value, a, b in atoms]
        if one.primitive == BARRIER:
            return operands
        if one.bodies:
            return self._loop(one, other, operands)
        return [self._degree(one, other, operands)] * len(one.results)

    def _degree(self, one: Operator, other: Operator, operands: Sequence[Degree]) -> Degree:
        name, growth = one.primitive, self._growth(one, other)
        counts = not self._positions.isdisjoint(one.operands)
        if (name == "iota" and _is_longer(one, other)) or (name in _KEEP_POSITIONS and counts):
            self._positions.update(one.results)
        match name:
            case "eq" if counts:
                return Fraction(-1)  # one of N times as many
            case "mul" | "dot_general" | "conv_general_dilated":
                return _sum([*operands, growth])
            case "div":
                return None if operands[1] is None else _sum([operands[0], -operands[1]])
            case "integer_pow":
                return _times(operands[0], Fraction(one.equation.params["y"]))
            case "select_n":
                chosen = _common(operands[1:])
                return _sum([operands[0], chosen]) if ZEROS in operands[1:] else chosen
            case "select_and_scatter_add":
                operands = operands[:1]
            case "scatter-add":
                return _common([operands[0], _sum([operands[2], growth])])
        if name in _POWERS:
            return _times(operands[0], _POWERS[name])
        if name not in _ALIKE and name != "select_and_scatter_add":
            return Fraction(0)
        kept = operands[: _INDICES_FROM.get(name)]
        literal = [value is None for value in one.operands][-len(operands) :]
        arrays = [degree for degree, is_literal in zip(kept, literal, strict=False) if not is_literal]
        return _sum([_common(arrays or kept), growth])

    def _growth(self, one: Operator, other: Operator) -> Fraction:
        """The power of N by which more terms are added up."""
        pairs = zip(one.rule.factors, other.rule.factors, strict=False)
        ratio = math.prod(Fraction(a.size, b.size or 1) for a, b in pairs if a.kind is FactorKind.SUM)
        return self._power(float(ratio)) or Fraction(0)

    def _literal(self, one: object, other: object) -> Degree:
        a, b = (float(np.max(np.abs(np.asarray(atom.val, np.float64)))) for atom in (one, other))  # type: ignore[attr-defined]
        if a == 0 or b == 0:
            return ZEROS
        return self._power(a / b) if math.isfinite(a / b) else Fraction(0)

    def _power(self, ratio: float) -> Degree:
        power = round(math.log(ratio, self._count))
        return Fraction(power) if math.isclose(self._count**power, ratio, rel_tol=1e-3) else None

    def _loop(self, one: Operator, other: Operator, operands: list[Degree]) -> list[Degree]:
        params = one.equation.params
        if one.primitive == LoopKind.COND:
            branches = [self._body(one, other, k, operands[1:]) for k in range(len(one.bodies))]
            return [_common(results) for results in zip(*branches, strict=True)]
        if one.primitive == LoopKind.SCAN:
            (consts, carries), first, place = _compat.scan_arity(params), 0, 0
        else:
            first, consts = _compat.while_arity(params)
            carries, place = len(operands) - first - consts, 1
        inside, leaving = operands[first:], operands[first + consts :]
        for _ in range(carries + 1):
            leaving = self._body(one, other, place, inside)
            joined = [_common([inside[consts + k], leaving[k]]) for k in range(carries)]
            if joined == inside[consts : consts + carries]:
                break
            inside[consts : consts + carries] = joined
        return leaving

    def _body(self, one: Operator, other: Operator, place: int, inputs: Sequence[Degree]) -> list[Degree]:
        whole, small = one.bodies[place], other.bodies[place]
        found = self.level(whole, small, inputs)
        atoms = (_compat.jaxpr_of(body.jaxpr).outvars for body in (whole, small))
        return [
            found[value] if value is not None else self._literal(a, b)
            for value, a, b in zip(whole.outputs, *atoms, strict=True)
        ]


def _is_longer(one: Operator, other: Operator) -> bool:
    dim = one.equation.params["dimension"]
    return bool(one.equation.outvars[0].aval.shape[dim] != other.equation.outvars[0].aval.shape[dim])


def _sum(parts: Iterable[Degree]) -> Degree:
    """The degree of a product."""
    total = Fraction(0)
    for part in parts:
        if part is None or abs(part) == ZEROS:
            return part if part is None else ZEROS
        total += part
    return total


def _times(degree: Degree, power: Fraction) -> Degree:
    return degree if degree is None or degree == ZEROS else degree * power


def _common(parts: Sequence[Degree]) -> Degree:
    """The degree of a sum."""
    others = {part for part in parts if part != ZEROS}
    return others.pop() if len(others) == 1 else ZEROS if not others else None
