"""Atoms, ties and marks: is a reshape's factoring the coarsest common refinement, and is every factor a true one?"""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.graph.factoring import Dims, Factoring, Mark
from autopar.graph.ir import FactorKind


def axes_of(dims: Dims) -> tuple[int, ...]:
    return tuple(factor for dim in dims for factor in dim)


@st.composite
def shapes_of_equal_size(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Two shapes of the same primes, differently ordered and grouped, with some dimensions of size 1."""
    primes = draw(st.lists(st.sampled_from([2, 3]), max_size=6))

    def shape() -> tuple[int, ...]:
        dims = [1]
        for prime in draw(st.permutations(primes)):
            if draw(st.booleans()):
                dims.append(1)
            dims[-1] *= prime
        return tuple(dims)

    return shape(), shape()


def cuts(shape: tuple[int, ...]) -> set[int]:
    """Into how many equal contiguous pieces can one cut an array by whole indices of leading dimensions?"""
    return set(itertools.accumulate(shape, lambda a, b: a * b, initial=1))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(shapes_of_equal_size())
def test_reshape_is_the_coarsest_common_refinement(shapes: tuple[tuple[int, ...], ...]) -> None:
    source, target = shapes
    array = np.arange(math.prod(source)).reshape(source)
    factoring = Factoring()
    operand, result = factoring.dims(source), factoring.dims(target)
    factoring.tie(sum(operand, ()), sum(result, ()))
    rule = factoring.rule([operand], [result])
    for factor, about in enumerate(rule.factors):
        if about.kind is FactorKind.PARALLEL:
            split = array.reshape([rule.factors[f].size for f in axes_of(rule.operands[0])])
            again = array.reshape(target).reshape([rule.factors[f].size for f in axes_of(rule.results[0])])
            axis, after = (axes_of(dims).index(factor) for dims in (rule.operands[0], rule.results[0]))
            for index in range(about.size):
                np.testing.assert_array_equal(split.take(index, axis).ravel(), again.take(index, after).ravel())
    if cuts(source) >= cuts(target) or cuts(source) <= cuts(target):  # one refines the other: nothing is lost
        finer = max(shapes, key=lambda shape: len(cuts(shape)))
        assert [factor.size for factor in rule.factors] == [size for size in finer if size != 1]
        assert {factor.kind for factor in rule.factors} <= {FactorKind.PARALLEL}


def test_ties_reach_parts_that_were_split_before() -> None:
    factoring = Factoring()
    x, y, z = factoring.dims((24,)), factoring.dims((4, 6)), factoring.dims((2, 12))
    factoring.tie(x[0], sum(y, ()))
    factoring.tie(x[0], sum(z, ()))
    factoring.mark(z[0], Mark.BLOCKED)
    rule = factoring.rule([x, y, z], [x])
    assert rule.operands == (((0, 1, 2),), ((0, 1), (2,)), ((0,), (1, 2)))
    assert [factor.size for factor in rule.factors] == [2, 2, 6]
    assert [factor.kind is FactorKind.BLOCKED for factor in rule.factors] == [True, False, False]


def test_unequal_products_are_blocked() -> None:
    factoring = Factoring()
    x, y = factoring.dims((8,)), factoring.dims((6,))
    factoring.tie(x[0], y[0])
    assert {factor.kind for factor in factoring.rule([x], [y]).factors} == {FactorKind.BLOCKED}


def test_what_reductions_leave() -> None:
    """A reduced factor has the kind that is asked for; one that is kept all the same, or lost without, is blocked."""
    factoring = Factoring()
    reduced, kept, lost, carried = (factoring.atom(4) for _ in range(4))
    factoring.mark((reduced, kept), Mark.REDUCED)
    operand, result = ((reduced,), (kept,), (lost,), (carried,)), ((kept,), (carried,))
    asked: list[tuple[Mark, object]] = []

    def kind_of(mark: Mark, places: tuple[tuple[int, int], ...]) -> FactorKind:
        asked.append((mark, places))
        return FactorKind.SUM

    kinds = [factor.kind for factor in factoring.rule([operand], [result], kind_of).factors]
    assert kinds == [FactorKind.SUM, FactorKind.BLOCKED, FactorKind.BLOCKED, FactorKind.PARALLEL]
    assert asked == [(Mark.REDUCED, ((0, 0),))]
    assert factoring.rule([operand], [result]).factors[0].kind is FactorKind.BLOCKED
