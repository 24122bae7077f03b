"""From a solution back to layouts and strategies: a :class:`~autopar.plan.Stage`."""

from __future__ import annotations

from autopar.graph.build import BARRIER
from autopar.graph.ir import Graph, Operator
from autopar.intra_op.alike import Quotient
from autopar.intra_op.choices import Choices
from autopar.intra_op.nodes import Problem
from autopar.plan import Axes, Layout, Stage, Strategy


def stage_of(graph: Graph, problem: Problem, quotient: Quotient, choices: Choices, options: tuple[int, ...]) -> Stage:
    """The stage that a choice of one option per class stands for."""

    def chosen(node: int) -> Layout | Strategy:
        number = quotient.class_of[node]
        return choices.options[number][options[number]]

    homes = _layouts({value: chosen(node) for value, node in problem.node_of_value.items()})
    copies = _layouts({value: chosen(node) for value, node in problem.copy_of_value.items()})
    strategies: dict[int, Strategy] = {}
    for operator, _ in graph.all_operators():
        if operator.id in problem.node_of_operator:
            strategy = chosen(problem.node_of_operator[operator.id])
            assert isinstance(strategy, Strategy)
            strategies[operator.id] = strategy
        elif operator.primitive == BARRIER:
            strategies[operator.id] = _guarding(operator, homes)
        elif operator.id in problem.followers:
            layout = chosen(problem.followers[operator.id])
            assert isinstance(layout, Layout)
            factors: list[tuple[str, ...]] = [()] * len(operator.rule.factors)
            for axes, carried in zip(layout.dims, operator.rule.results[0], strict=True):
                if carried:
                    factors[carried[0]] = axes
            strategies[operator.id] = Strategy(tuple(factors))
    return Stage(choices.mesh, homes, copies, strategies, sum_scatter=choices.sum_scatter)


def _guarding(operator: Operator, homes: dict[int, Layout]) -> Strategy:
    """Every result of a barrier in its own layout."""
    factors: list[Axes] = [()] * len(operator.rule.factors)
    for result, dims in zip(operator.results, operator.rule.results, strict=True):
        if result in homes:
            for axes, carried in zip(homes[result].dims, dims, strict=True):
                if carried:
                    factors[carried[0]] = axes
    return Strategy(tuple(factors))


def _layouts(found: dict[int, Layout | Strategy]) -> dict[int, Layout]:
    return {value: layout for value, layout in found.items() if isinstance(layout, Layout)}
