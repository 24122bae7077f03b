"""The integer program states the right problem: its optimum is that of trying all plans; depth costs nothing."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from autopar.cluster import Cluster, Link, Mesh
from autopar.graph.build import build_graph
from autopar.graph.ir import Graph
from autopar.graph.roles import infer_roles
from autopar.graph.tracing import trace
from autopar.intra_op.alike import Quotient, merge_alike
from autopar.intra_op.choices import Choices, choices_on
from autopar.intra_op.extract import stage_of
from autopar.intra_op.ilp import RELATIVE_GAP, solve
from autopar.intra_op.linear_sums import gathering_carries
from autopar.intra_op.model import Model
from autopar.intra_op.nodes import Edge, Problem, ValueNode
from autopar.intra_op.problem import state_problem
from autopar.intra_op.wide import Gaps
from autopar.plan import Layout, Strategy
from autopar.schedule.spmd import Reshard, lower, output_layouts
from examples.gpt.model import GPTConfig, OptimizerConfig, create_state, train_step
from tests.enumerator import TooManyPlansError, cheapest_plan_seconds
from tests.test_network import exchanging

PAIR = Mesh(("data",), (2,))
SQUARE = Mesh(("data", "model"), (2, 2))


def cluster_of(speed: float, latency_seconds: float) -> Cluster:
    """Eight GPUs of ``speed`` times 1 GFLOP/s and 100 MB/s, on links of 10 GB/s."""
    cluster = Cluster.preset("p3.16xlarge")
    device = dataclasses.replace(
        cluster.device, flops_per_second={"float32": speed * 1e9}, memory_bytes_per_second=speed * 1e8
    )
    return cluster.replace(device=device, local_link=Link(latency_seconds, 1e10))


EXACT = Gaps(1e-9, 1e-9)
"""Closer than what is compared; of wide programs the planner is content with less."""


def optimum(choices: Choices) -> float:
    solution = solve(Model(choices.node_seconds, choices.edge_seconds), gaps=EXACT)
    assert solution is not None
    return solution.cost


def each_alone(problem: Problem) -> Quotient:
    """Nothing merged, by :func:`merge_alike` itself with a demand of its own for every node."""
    return merge_alike(problem, {number: number for number in range(len(problem.nodes))})


def check(graph: Graph, pairs: tuple[tuple[int, int], ...], mesh: Mesh, cluster: Cluster) -> bool:
    """Whether the program was tiny enough to tell; the optimum must be that of trying all plans."""
    try:
        expected = cheapest_plan_seconds(graph, pairs, mesh, cluster)
    except TooManyPlansError:
        return False
    problem = state_problem(graph, pairs)
    found = optimum(choices_on(problem, each_alone(problem), mesh, cluster, {}))
    # Never less than the least; more by no more than the solver's promise, within which lie ties that memory should break.
    assert expected * (1 - 1e-9) <= found <= expected * (1 + RELATIVE_GAP)
    return True


# ---------------------------------------------------------------------------------------------------- random programs

SIZES = (2, 4, 8, 32, 64)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One to four operators on one to three arrays; the result is the last array, or a gradient step on it."""
    shapes = draw(st.lists(st.lists(st.sampled_from(SIZES), min_size=1, max_size=2).map(tuple), min_size=1, max_size=2))
    recipe = [
        (draw(st.sampled_from(OPERATORS)), draw(st.integers(0, 3)), draw(st.integers(0, 3)))
        for _ in range(draw(st.integers(1, 4)))
    ]
    steps = draw(st.booleans())

    def forward(*arrays: Any) -> Any:
        made = list(arrays)
        for operator, first, second in recipe:
            made.append(operator(made[-1 - first % len(made)], made[-1 - second % len(made)]))
        return made[-1]

    def step(*arrays: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda first: jnp.sum(forward(first, *arrays[1:]) ** 2))(arrays[0])
        return arrays[0] - 0.1 * gradient, loss

    return (step if steps else forward), tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)


def _product(a: Any, b: Any) -> Any:
    if a.ndim == 2 and b.ndim and a.shape[1] == b.shape[0]:
        return a @ b
    return a @ a.T if a.ndim == 2 else jnp.outer(a, a) if a.ndim == 1 and a.size <= 8 else a * 2.0


def _sum_with(a: Any, b: Any) -> Any:
    return a + b if a.shape == b.shape or (a.ndim == 2 and b.shape == a.shape[1:]) else a + 1.0


OPERATORS: tuple[Callable[[Any, Any], Any], ...] = (
    _product,
    _product,
    _sum_with,
    lambda a, _: jnp.maximum(a, 0.0),
    lambda a, _: jnp.sum(a, axis=0) if a.ndim else a,
    lambda a, _: jnp.max(a, axis=-1) if a.ndim else a,
    lambda a, _: a.T * 3.0,
    lambda a, _: jnp.broadcast_to(a[None], (4, *a.shape)) if a.ndim < 2 else jnp.exp(a),
    lambda a, _: a - a.mean() if a.ndim else -a,
    lambda a, b: a[jnp.zeros((4,), jnp.int32)] if a.ndim == 2 else a * jnp.sum(b),
    lambda a, _: a.reshape(-1),
)


def _cost_of(drawn: tuple[float, float]) -> Cluster:
    return cluster_of(*drawn)


CLUSTERS = st.tuples(st.sampled_from([0.01, 1.0, 100.0]), st.sampled_from([0.0, 1e-6, 1e-4])).map(_cost_of)


Program = tuple[Callable[..., Any], tuple[Any, ...]]


@settings(max_examples=25)
@given(programs(), CLUSTERS, st.sampled_from([PAIR, PAIR, SQUARE]))
def test_the_optimum_is_that_of_trying_all_plans(program: Program, cluster: Cluster, mesh: Mesh) -> None:
    check_program(program, cluster, mesh)


@pytest.mark.verify
@settings(max_examples=400)
@given(programs(), CLUSTERS, st.sampled_from([PAIR, SQUARE]))
def test_the_optimum_is_that_of_trying_all_plans_of_many_more(program: Program, cluster: Cluster, mesh: Mesh) -> None:
    check_program(program, cluster, mesh)


def check_program(program: Program, cluster: Cluster, mesh: Mesh) -> None:
    """On ``mesh``, or on two devices where there are too many plans to try; a few are too large for that too."""
    function, arguments = program
    traced = trace(function, arguments, {})
    pairs = infer_roles(traced, batch_argnums=()).state_pairs
    graph = build_graph(traced.jaxpr, platform="cuda")
    if not check(graph, pairs, mesh, cluster):
        check(graph, pairs, PAIR, cluster)


EXCHANGING = st.sampled_from([0.1, 10.0]).map(lambda slower: exchanging(cluster_of(1.0, 1e-6), 2, 2, slower))


@settings(max_examples=25)
@given(programs(), EXCHANGING)
def test_so_it_is_where_sums_may_be_exchanged(program: Program, cluster: Cluster) -> None:
    check_program(program, cluster, SQUARE)


def mlp_step(w: Any, x: Any, y: Any) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: jnp.sum((jnp.maximum(x @ w, 0.0) - y) ** 2))(w)
    return w - 0.1 * gradient, loss


def sum_of_sums(w: Any, a: Any, b: Any) -> Any:
    """Two products may stay partial until they are added, and one copy of the matrix serves both."""
    return jnp.tanh(a @ w + b @ w)


def lookup_step(table: Any, places: Any) -> Any:
    return table - jax.grad(lambda table: jnp.sum(table[places] ** 2))(table)


def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


NAMED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mlp": (mlp_step, (array(32, 64), array(8, 32), array(8, 64))),
    "sum_of_sums": (sum_of_sums, (array(32, 64), array(8, 32), array(8, 32))),
    "lookup": (lookup_step, (array(64, 32), array(8, dtype=np.int32))),
    "softmax": (lambda x, w: jax.nn.softmax(x @ w), (array(8, 32), array(32, 64))),
}


@pytest.mark.parametrize("latency", [0.0, 1e-5])
@pytest.mark.parametrize("speed", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("name", NAMED)
def test_the_optimum_of_small_steps_is_that_of_trying_all_plans(name: str, speed: float, latency: float) -> None:
    function, arguments = NAMED[name]
    traced = trace(function, arguments, {})
    pairs = infer_roles(traced, batch_argnums=()).state_pairs
    graph = build_graph(traced.jaxpr, platform="cuda")
    assert check(graph, pairs, PAIR, cluster_of(speed, latency))


def test_the_named_steps_hold_partial_sums_and_copies() -> None:
    """So the comparisons above are about these as well."""
    problems = {}
    for name, (function, arguments) in NAMED.items():
        graph = build_graph(trace(function, arguments, {}).jaxpr, platform="cuda")
        problems[name] = state_problem(graph, ())
    assert any(isinstance(node, ValueNode) and node.may_be_partial for node in problems["sum_of_sums"].nodes)
    assert problems["sum_of_sums"].copy_of_value


# ----------------------------------------------------------------------------------------------- a model with layers


@functools.cache
def gpt_problem(layers: int) -> tuple[Graph, Problem, tuple[tuple[int, int], ...]]:
    config = GPTConfig(layers=layers, hidden=16, heads=4, sequence=8, vocab_size=32)
    state = jax.eval_shape(lambda: create_state(jax.random.key(0), config, OptimizerConfig()))
    tokens = jax.ShapeDtypeStruct((8, 8), np.int32)
    program = trace(train_step, (state, {"tokens": tokens, "targets": tokens}), {})
    pairs = infer_roles(program).state_pairs
    graph = build_graph(program.jaxpr, platform="cuda")
    return graph, state_problem(graph, pairs), pairs


@pytest.mark.parametrize(
    ("speed", "mesh"), [(0.01, PAIR), (1.0, PAIR), pytest.param(1.0, SQUARE, marks=pytest.mark.verify)]
)
def test_merging_like_nodes_does_not_change_the_optimum(speed: float, mesh: Mesh) -> None:
    _, problem, _ = gpt_problem(3)
    cluster = cluster_of(speed, 1e-6)
    merged = choices_on(problem, merge_alike(problem, {}), mesh, cluster, {})
    alone = choices_on(problem, each_alone(problem), mesh, cluster, {})
    assert len(merged.options) < len(alone.options)
    assert optimum(merged) == pytest.approx(optimum(alone), rel=1e-6)


def test_depth_costs_nothing() -> None:
    """As many classes, edges between them and variables with four layers as with eight."""
    sizes = []
    for layers in (4, 8):
        _, problem, _ = gpt_problem(layers)
        quotient = merge_alike(problem, {})
        choices = choices_on(problem, quotient, PAIR, cluster_of(1.0, 1e-6), {})
        model = Model(choices.node_seconds, choices.edge_seconds)
        sizes.append((len(quotient.members), len(quotient.edges), model.num_variables))
    assert sizes[0] == sizes[1]


def test_a_quotient_prices_a_choice_as_its_members_do() -> None:
    """Any choice per class costs what it costs when each member is asked."""
    _, problem, _ = gpt_problem(2)
    cluster = cluster_of(1.0, 1e-6)
    quotient, alone = merge_alike(problem, {}), each_alone(problem)
    merged = choices_on(problem, quotient, SQUARE, cluster, {})
    single = choices_on(problem, alone, SQUARE, cluster, {})
    rng = random.Random(0)
    for _ in range(20):
        options = tuple(rng.randrange(len(own)) for own in merged.options)
        spread = tuple(options[quotient.class_of[members[0]]] for members in alone.members)
        cost = Model(merged.node_seconds, merged.edge_seconds).cost(options)
        assert cost == pytest.approx(Model(single.node_seconds, single.edge_seconds).cost(spread), rel=1e-9)


def test_demands_keep_like_nodes_apart() -> None:
    _, problem, _ = gpt_problem(2)
    members = max(merge_alike(problem, {}).members, key=len)
    quotient = merge_alike(problem, {members[0]: "something"})
    assert (members[0],) in quotient.members


def test_every_array_of_a_step_has_a_home_and_every_operator_a_strategy() -> None:
    graph, problem, _ = gpt_problem(2)
    quotient = merge_alike(problem, {})
    choices = choices_on(problem, quotient, SQUARE, cluster_of(1.0, 1e-6), {})
    rng = random.Random(1)
    stage = stage_of(graph, problem, quotient, choices, tuple(rng.randrange(len(own)) for own in choices.options))
    ranked = {value.id for value in graph.all_values() if value.shape and 0 not in value.shape}
    assert ranked <= set(stage.homes)
    for operator, _ in graph.all_operators():
        if any(value in ranked for value in operator.results):
            assert operator.id in stage.strategies, operator
    assert set(problem.node_of_operator).isdisjoint(problem.followers)


@pytest.mark.parametrize("sizes", [(1,), (2, 1), (1, 2)], ids=str)
def test_an_axis_of_one_device_cuts_nothing(sizes: tuple[int, ...]) -> None:
    """Collectives among one device move nothing, and XLA:CPU turns arrays around for them."""
    _, problem, _ = gpt_problem(1)
    mesh = Mesh(("data", "model")[: len(sizes)], sizes)
    quotient = merge_alike(problem, {})
    choices = choices_on(problem, quotient, mesh, cluster_of(1.0, 1e-6), {})
    options = {option for own in choices.options for option in own}
    named = {name for option in options for axes in _axes_of(option) for name in axes}
    assert named == set(mesh.dividing_names)


def _axes_of(option: Layout | Strategy) -> list[tuple[str, ...]]:
    if isinstance(option, Layout):
        return [*option.dims, option.partial]
    return [*option.factors, option.passing]


def test_a_demand_by_an_axis_of_one_device_is_met_by_no_cut() -> None:
    _, problem, _ = gpt_problem(1)
    quotient = merge_alike(problem, {})
    firsts = [members[0] for members in quotient.members]
    nodes = [problem.nodes[first] for first in firsts]
    number = next(k for k, node in enumerate(nodes) if isinstance(node, ValueNode) and len(node.shape) == 2)
    demanded = {firsts[number]: frozenset((Layout((("data",), ())),))}
    choices = choices_on(problem, quotient, Mesh(("data",), (1,)), cluster_of(1.0, 1e-6), demanded)
    assert choices.options[number] == [Layout(((), ()))]


def test_state_has_one_home_and_optimizer_state_may_have_another() -> None:
    """A parameter, its gradient and its momentum are three nodes, so an optimizer's state may be cut alone."""

    def step(w: Any, momentum: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        updates, momentum = optax.sgd(0.1, momentum=0.9).update({"w": gradient}, momentum, {"w": w})
        return w + updates["w"], momentum

    momentum = jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, {"w": array(32, 64)})
    traced = trace(step, (array(32, 64), momentum, array(8, 32)), {})
    pairs = infer_roles(traced, batch_argnums=()).state_pairs
    assert pairs == ((0, 0), (1, 1))
    graph = build_graph(traced.jaxpr, platform="cuda")
    problem = state_problem(graph, pairs)
    nodes = [problem.node_of_value[value] for value in graph.inputs]
    assert len(set(nodes)) == 3
    back = Counter((edge.source.node, edge.target.node) for edge in problem.edges)
    for source, output in pairs:
        new = graph.outputs[output]
        assert new is not None
        assert back[problem.node_of_value[new], problem.node_of_value[graph.inputs[source]]] >= 1


def test_what_a_loop_carries_costs_its_reshards_in_every_trip() -> None:
    def loop(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=7)[0]

    graph = build_graph(trace(loop, (array(8, 8), array(8, 8)), {}).jaxpr, platform="cuda")
    problem = state_problem(graph, ())
    (operator,) = (operator for operator in graph.operators if operator.bodies)
    (body,) = operator.bodies

    def edges_of(value: int) -> list[Edge]:
        node = problem.node_of_value[value]
        return [edge for edge in problem.edges if node in (edge.source.node, edge.target.node)]

    around = [edge for edge in edges_of(body.inputs[1]) if edge.source.node == problem.node_of_value[body.outputs[0]]]  # type: ignore[index]
    assert [edge.weight for edge in around] == [7]
    into = [edge for edge in edges_of(graph.inputs[0]) if edge.target.node == problem.node_of_value[body.inputs[0]]]
    assert [edge.weight for edge in into] == [1]


def test_a_loop_that_gathers_gradients_reduces_them_once_after_it() -> None:
    def loss(w: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), jnp.zeros(xs.shape[1:]), xs)[0].sum()

    graph = build_graph(trace(jax.grad(loss), (array(512, 512), array(16, 1024, 512)), {}).jaxpr, platform="cuda")
    backward = [operator for operator in graph.operators if operator.bodies][-1]
    (gathering,) = gathering_carries(backward)
    problem = state_problem(graph, ())
    quotient = merge_alike(problem, {})
    choices = choices_on(problem, quotient, PAIR, Cluster.preset("p3.16xlarge"), {})
    solution = solve(Model(choices.node_seconds, choices.edge_seconds))
    assert solution is not None
    stage = stage_of(graph, problem, quotient, choices, solution.options)
    assert stage.home(gathering, 2).partial == ("data",)
    steps = [*lower(graph, stage, output_layouts(graph, stage, ())).all_steps()]
    reduced = [trips for step, trips in steps if isinstance(step, Reshard) and step.source.layout.partial]
    assert reduced == [1]


def test_what_a_while_carries_lies_alike_in_condition_and_body() -> None:
    def loop(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 9.0, lambda c: c @ c, x)

    graph = build_graph(trace(loop, (array(8, 8),), {}).jaxpr, platform="cuda")
    problem = state_problem(graph, ())
    (operator,) = (operator for operator in graph.operators if operator.bodies)
    condition, body = operator.bodies
    assert problem.node_of_value[condition.inputs[-1]] == problem.node_of_value[body.inputs[-1]]
