"""The reduced model has the optimum of the original one, and lifting leads to a solution that reaches it."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.intra_op.model import MemoryRow, Model
from autopar.intra_op.reduce import reduce_model


@st.composite
def models(draw: st.DrawFn, *, memory: bool = False, forbid_nodes: bool = True) -> Model:
    """Pairwise models of 1 to 6 nodes with many ties, and with forbidden options and pairs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 6))
    sizes = rng.integers(1, 5, count)
    # Small integers make ties; the other half are of the sizes that seconds have.
    integral = draw(st.booleans())
    forbidden = draw(st.sampled_from([0.0, 0.1, 0.4]))
    density = draw(st.sampled_from([0.3, 0.6, 1.0]))

    def costs(*shape: int) -> np.ndarray:
        drawn = rng.integers(0, 4, shape).astype(float) if integral else rng.random(shape) * 1e-3
        drawn[rng.random(shape) < forbidden] = np.inf
        return drawn

    nodes = [costs(size) for size in sizes]
    if not forbid_nodes:
        nodes = [np.where(np.isfinite(vector), vector, 1.0) for vector in nodes]
    edges = {
        (i, j): costs(sizes[i], sizes[j]) for i, j in itertools.combinations(range(count), 2) if rng.random() < density
    }
    rows = [_memory_row(rng, sizes, list(edges)) for _ in range(int(rng.integers(1, 4)))] if memory else []
    return Model(nodes, edges, rows)


def _memory_row(rng: np.random.Generator, sizes: np.ndarray, pairs: list[tuple[int, int]]) -> MemoryRow:
    """Whole bytes: no sum is over the budget by so little that a solver's tolerance could let it pass."""
    some = [i for i in range(len(sizes)) if rng.random() < 0.6] or [0]
    nodes = {i: rng.integers(0, 10, sizes[i]).astype(float) for i in some}
    chosen = [pair for pair in pairs if rng.random() < 0.3]
    edges = {(i, j): rng.integers(0, 5, (sizes[i], sizes[j])).astype(float) for i, j in chosen}
    return MemoryRow(nodes, edges, float(rng.integers(1, 20)))


def solutions(model: Model) -> list[tuple[int, ...]]:
    """Every choice of one option per node."""
    return list(itertools.product(*(range(len(costs)) for costs in model.nodes)))


def cost_by_hand(model: Model, solution: tuple[int, ...]) -> float:
    total = 0.0
    for node, option in enumerate(solution):
        total += model.nodes[node][option]
    for (i, j), matrix in model.edges.items():
        total += matrix[solution[i]][solution[j]]
    return total


def fits_by_hand(model: Model, solution: tuple[int, ...]) -> bool:
    for row in model.memory:
        held = sum(of[solution[i]] for i, of in row.nodes.items())
        held += sum(of[solution[i]][solution[j]] for (i, j), of in row.edges.items())
        if held > row.budget * (1 + 1e-9):
            return False
    return True


def optimum_by_enumeration(model: Model) -> float:
    """The least cost of all solutions that keep the memory rows; ∞ if none does."""
    return min((cost_by_hand(model, s) for s in solutions(model) if fits_by_hand(model, s)), default=np.inf)


def close(a: float, b: float, relative: float = 1e-12) -> bool:
    return a == b or abs(a - b) <= relative * max(abs(a), abs(b))


@settings(max_examples=400)
@given(models())
def test_the_reduced_optimum_lifts_to_the_optimum(model: Model) -> None:
    expected = optimum_by_enumeration(model)
    reduced = reduce_model(model)
    found = [reduced.lift(core) for core in solutions(reduced.model)]
    assert all(0 <= option < len(costs) for s in found for option, costs in zip(s, model.nodes, strict=True))
    best_of_core = min(solutions(reduced.model), key=lambda core: cost_by_hand(reduced.model, core))
    assert close(cost_by_hand(model, reduced.lift(best_of_core)), expected)


@settings(max_examples=200)
@given(models(forbid_nodes=False))
def test_what_the_core_costs_is_what_the_solution_costs_up_to_what_was_decided_alone(model: Model) -> None:
    """A constant parts the two objectives: that of the nodes without a neighbour, which are decided on the spot."""
    reduced = reduce_model(model)
    cores = solutions(reduced.model)
    pairs = [(cost_by_hand(reduced.model, core), cost_by_hand(model, reduced.lift(core))) for core in cores]
    apart = [whole - core for core, whole in pairs if np.isfinite(core)]
    assert all(np.isinf(whole) for core, whole in pairs if np.isinf(core))
    assert not apart or np.isinf(apart).all() or max(apart) - min(apart) <= 1e-12


@settings(max_examples=200)
@given(models(memory=True))
def test_memory_rows_survive_the_reduction(model: Model) -> None:
    expected = optimum_by_enumeration(model)
    reduced = reduce_model(model)
    fitting = [core for core in solutions(reduced.model) if fits_by_hand(reduced.model, core)]
    for core in fitting:
        assert fits_by_hand(model, reduced.lift(core))
    best = min((cost_by_hand(model, reduced.lift(core)) for core in fitting), default=np.inf)
    assert close(best, expected)


def test_a_tree_is_solved_by_elimination_alone() -> None:
    rng = np.random.default_rng(0)
    nodes = [rng.random(5) for _ in range(40)]
    edges = {(int(rng.integers(0, child)), child): rng.random((5, 5)) for child in range(1, 40)}
    reduced = reduce_model(Model(nodes, edges))
    assert reduced.core == ()
    # The optimum of a tree by dynamic programming from the leaves, written apart.
    best = [vector.copy() for vector in nodes]
    for child in range(39, 0, -1):
        ((parent, _), matrix) = next((pair, m) for pair, m in edges.items() if pair[1] == child)
        best[parent] += (matrix + best[child][None, :]).min(axis=1)
    assert close(Model(nodes, edges).cost(reduced.lift(())), best[0].min())


def test_dead_ends_go_even_where_no_node_can_be_folded() -> None:
    """In a clique of five nodes an option that always costs more than another is dropped."""
    rng = np.random.default_rng(1)
    nodes = [np.array([0.0, 0.0, 50.0]) for _ in range(5)]
    edges = {pair: rng.random((3, 3)) for pair in itertools.combinations(range(5), 2)}
    reduced = reduce_model(Model(nodes, edges))
    assert all(2 not in left for left in reduced.options)
    lifted = reduced.lift(min(solutions(reduced.model), key=reduced.model.cost))
    assert close(Model(nodes, edges).cost(lifted), optimum_by_enumeration(Model(nodes, edges)))


def test_nodes_that_a_memory_row_weighs_are_left_alone() -> None:
    nodes = [np.array([0.0, 1.0]), np.array([0.0, 9.0])]
    row = MemoryRow({0: np.array([10.0, 1.0])}, {}, 5.0)
    reduced = reduce_model(Model(nodes, {(0, 1): np.zeros((2, 2))}, [row]))
    assert reduced.core == (0,)
    assert [list(left) for left in reduced.options] == [[0, 1]]
    assert reduced.lift((1,)) == (1, 0)
