"""How many bytes does every choice hold, at the moments when a step holds most?

At a moment m the values that live hold, in the layouts that are chosen, on one device

    Σ bytes of a value · share of it in its layout  +  Σ bytes of a copy · share of it, where it lies otherwise than its value

which is one row of a model (:class:`autopar.intra_op.model.MemoryRow`): shares are the same for all options of a class, so a row
holds a vector for each class of homes and a matrix for each pair of homes and copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cluster import Mesh
from autopar.intra_op.alike import Quotient
from autopar.intra_op.choices import Choices, value_options
from autopar.intra_op.model import MemoryRow, Model, Pair
from autopar.intra_op.nodes import Problem, ValueNode
from autopar.plan import Layout
from autopar.schedule.reshard import shares


def byte_model(model: Model, rows: Sequence[MemoryRow]) -> Model:
    """The same choices priced by bytes (the sum over the critical moments) instead of seconds."""
    nodes = [np.where(np.isfinite(costs), 0.0, np.inf) for costs in model.nodes]
    edges = {pair: np.where(np.isfinite(costs), 0.0, np.inf) for pair, costs in model.edges.items()}
    for row in rows:
        for node, held in row.nodes.items():
            nodes[node] = nodes[node] + held
        for pair, held in row.edges.items():
            edges[pair] = edges[pair] + held
    return Model(nodes, edges)


def with_price(model: Model, rows: Sequence[MemoryRow], seconds_per_byte: float) -> Model:
    """The same choices, each of which also pays for the bytes that it holds, by the mean of the rows."""
    return with_prices(model, [(row, seconds_per_byte / len(rows)) for row in rows])


def with_prices(model: Model, prices: Sequence[tuple[MemoryRow, float]]) -> Model:
    """The same choices, each of which also pays for the bytes that it holds, by the seconds of a byte of each row."""
    nodes, edges = list(model.nodes), dict(model.edges)
    for row, each in prices:
        for node, held in row.nodes.items():
            nodes[node] = nodes[node] + each * held
        for pair, held in row.edges.items():
            edges[pair] = edges[pair] + each * held
    return Model(nodes, edges)


def memory_rows(
    problem: Problem,
    quotient: Quotient,
    choices: Choices,
    moments: Sequence[Mapping[int, float]],
    budget_bytes: float,
    made_again: frozenset[int] = frozenset(),
) -> list[MemoryRow]:
    """A row for each moment, of which the whole bytes of every live value are given; copies only where they differ.

    Those of ``made_again`` are not counted: they last no longer than what reads them.
    """
    fractions = [shares_held(problem, quotient, choices, number) for number in range(len(quotient.members))]
    copied = {pair: _copy_bytes(choices, *pair) for pair in _copy_pairs(problem, quotient)}
    rows = []
    for moment in moments:
        homes: defaultdict[int, float] = defaultdict(float)
        copies: defaultdict[Pair, float] = defaultdict(float)
        for value, whole_bytes in moment.items():
            if (index := problem.node_of_value.get(value)) is None:
                continue
            home = quotient.class_of[index]
            homes[home] += whole_bytes
            if (copy_index := problem.copy_of_value.get(value)) is not None and value not in made_again:
                copies[home, quotient.class_of[copy_index]] += whole_bytes
        nodes = {home: whole_bytes * fractions[home] for home, whole_bytes in homes.items()}
        edges: dict[Pair, np.ndarray] = {}
        for (home, copy), whole_bytes in copies.items():
            pair = (min(home, copy), max(home, copy))
            if pair in choices.edge_seconds:
                held = copied[home, copy] * whole_bytes
                edges[pair] = edges.get(pair, 0.0) + (held if home < copy else held.T)
        rows.append(MemoryRow(nodes, edges, budget_bytes))
    return rows


def least_bytes(
    problem: Problem,
    mesh: Mesh,
    allowed: Mapping[int, frozenset[Layout]],
    moments: Sequence[Mapping[int, float]],
) -> float:
    """What every plan holds at the fullest moment at least, by its row: each value cut as finely as may be, no copies.

    Raises :class:`~autopar.errors.PlanError` where there is no plan on the mesh at all.
    """
    shares_of: dict[int, float] = {}

    def held(value: int, whole_bytes: float) -> float:
        if (index := problem.node_of_value.get(value)) is None:
            return 0.0
        if index not in shares_of:
            node = problem.nodes[index]
            assert isinstance(node, ValueNode)
            shares_of[index] = 1 / max(shares(one, mesh) for one in value_options(node, mesh, allowed.get(index)))
        return whole_bytes * shares_of[index]

    return max((sum(held(value, size) for value, size in moment.items()) for moment in moments), default=0.0)


def _copy_pairs(problem: Problem, quotient: Quotient) -> set[Pair]:
    """Classes of values and of their copies."""
    return {
        (quotient.class_of[problem.node_of_value[value]], quotient.class_of[copy])
        for value, copy in problem.copy_of_value.items()
    }


def shares_held(problem: Problem, quotient: Quotient, choices: Choices, number: int) -> np.ndarray:
    """Of an array, by the option of its class; none of what is no array."""
    if not isinstance(problem.nodes[quotient.members[number][0]], ValueNode):
        return np.zeros(len(choices.options[number]))
    return np.array([1 / shares(o, choices.mesh) for o in choices.options[number] if isinstance(o, Layout)])


def _copy_bytes(choices: Choices, home: int, copy: int) -> np.ndarray:
    """Share of the array that a copy adds, by (home's option, copy's option): nothing where both agree."""
    held = [1 / shares(one, choices.mesh) if isinstance(one, Layout) else 0.0 for one in choices.options[copy]]
    table = np.tile(np.array(held), (len(choices.options[home]), 1))
    place = {one: number for number, one in enumerate(choices.options[home])}
    for number, one in enumerate(choices.options[copy]):
        if one in place:
            table[place[one], number] = 0.0
    return table
