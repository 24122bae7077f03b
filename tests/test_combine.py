"""Which all-reduces does XLA:CPU make one?  What is predicted is held against compiled programs.

Small programs show one rule each; whole steps are compared by the bytes of every all-reduce by addition.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cluster import Cluster, Mesh, Platform
from autopar.cost_model.arrays import arrays_of
from autopar.cost_model.collectives import Collective, collective_seconds
from autopar.cost_model.combine import MOST_COMBINED, combined, joined, led_by
from autopar.cost_model.hlo import collectives, parse_module, step_seconds
from autopar.cost_model.nodes import Arrays, Form, Node, Tenant
from autopar.cost_model.predict import collectives_of, run_costs
from autopar.cost_model.reshard import COMBINED_RESULT_BYTES, reshard_table
from autopar.curves import Curve
from autopar.graph.build import build_graph
from autopar.graph.fusion import fuse
from autopar.graph.merging import Merged
from autopar.graph.tracing import trace
from autopar.plan import Layout, Stage, Strategy
from autopar.profile import WaitCurve
from autopar.runtime.executor import Executor
from autopar.schedule.spmd import lower, output_layouts
from benchmarks.models import FAMILIES, build
from tests.test_profile import profile_of
from tests.toy_runs import eight_slow_devices

pytestmark = pytest.mark.usefixtures("users_fusions")

ADDITION = (Collective.ALL_REDUCE, ("data",), "float32")


def total(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "data")


def node(form: Form, *inputs: int, combines: Any = None) -> Node:
    return Node(form, inputs, 4, Tenant.GRADIENT, -1, None, combines=combines)


def reduced(*inputs: int) -> Node:
    return node(Form.KERNEL, *inputs, combines=ADDITION)


A, B, C = (node(Form.INPUT) for _ in range(3))


def chain_and_one(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
    return total(total(a) @ b), total(c)


def one_and_chain(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
    return total(c), total(total(a) @ b)


def two_chains(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
    return total(total(a) @ b), total(total(c) @ b)


def into_one_kernel(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
    """The kernel takes in its last operand first, so that what the first one needs comes last."""
    first, second = total(b), total(c)
    return total(a) * 2 + first * second * total(first @ second), a


def two_types(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
    return total(a), total(b.astype(jnp.int32)), total(c)


CHAIN = [A, B, C, reduced(0), node(Form.KERNEL, 3, 1), reduced(4), reduced(2)]
SMALL = {
    chain_and_one: (CHAIN, (5, 6)),
    one_and_chain: (CHAIN, (6, 5)),
    two_chains: ([*CHAIN, node(Form.KERNEL, 6, 1), reduced(7)], (5, 8)),
    into_one_kernel: (
        [
            *(A, B, C, reduced(0), reduced(1), reduced(2), node(Form.KERNEL, 4, 5), reduced(6)),
            *(node(Form.CHEAP, 3), node(Form.CHEAP, 4, 5), node(Form.CHEAP, 9, 7), node(Form.CHEAP, 8, 10)),
        ],
        (11, 0),
    ),
    two_types: (
        [
            *(A, B, C, reduced(0)),
            node(Form.KERNEL, 1, combines=(Collective.ALL_REDUCE, ("data",), "int32")),
            reduced(2),
        ],
        (3, 4, 5),
    ),
}


def widths(module: Any) -> list[int]:
    """How many arrays each all-reduce of a compiled program takes."""
    return [
        len(instruction.operands)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "all-reduce"
    ]


def compiled_widths(function: Callable[..., Any], count: int) -> list[int]:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    arguments = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * count
    return widths(parse_module(cut.lower(*arguments).compile().as_text()))


@pytest.mark.parametrize("function", SMALL, ids=lambda function: function.__name__)
def test_a_set_ends_at_the_first_that_depends_on_it(function: Any) -> None:
    nodes, outputs = SMALL[function]
    predicted = combined(Arrays(nodes, [0, 1, 2], list(outputs)))
    assert Counter(map(len, predicted)) == Counter(compiled_widths(function, 3))


def test_a_set_has_a_most() -> None:
    many = MOST_COMBINED + 3
    nodes = [node(Form.INPUT) for _ in range(many)] + [reduced(number) for number in range(many)]
    predicted = combined(Arrays(nodes, list(range(many)), list(range(many, 2 * many))))
    assert list(map(len, predicted)) == [MOST_COMBINED, 3]
    assert compiled_widths(lambda *xs: [total(x) for x in xs], many) == [MOST_COMBINED, 3]


def test_a_set_has_a_most_in_bytes() -> None:
    sizes = (3, 4, 20, 3, 5, 2)
    nodes = [*(node(Form.INPUT) for _ in sizes), *(reduced(number) for number in range(len(sizes)))]
    for made, size in zip(nodes[len(sizes) :], sizes, strict=True):
        made.size_bytes = size
    arrays = Arrays(nodes, list(range(len(sizes))), list(range(len(sizes), 2 * len(sizes))))
    found = [[nodes[number].size_bytes for number in group] for group in combined(arrays, most_bytes=10)]
    assert found == [[3, 4, 3], [20], [5, 2]]


def test_sets_do_not_wait_for_each_other_in_a_circle() -> None:
    """With a₁ after b₁, b₂ after c₂ and c₁ after a₂, {a₁ a₂}, {b₁ b₂} and {c₁ c₂} cannot all be sets."""
    kinds = {name: (Collective.ALL_REDUCE, ("data",), name) for name in "abc"}

    def of(kind: str, operand: int) -> Node:
        return node(Form.KERNEL, operand, combines=kinds[kind])

    nodes = [A, of("b", 0), of("a", 1), of("a", 0), of("c", 0), of("b", 4), of("c", 3)]
    for outputs in itertools.permutations((2, 3, 5, 6)):
        arrays = Arrays(nodes, [0], list(outputs), moves={})
        assert sorted(itertools.chain(*combined(arrays))) == [1, 2, 3, 4, 5, 6]
        assert len(joined(arrays).nodes) == len(nodes)


def test_all_of_a_set_wait_for_the_operands_of_all() -> None:
    nodes, outputs = SMALL[one_and_chain]
    arrays = joined(Arrays(nodes, [0, 1, 2], list(outputs), moves={}))
    assert all(i < number for number, made in enumerate(arrays.nodes) for i in made.inputs)
    (wide,) = {made.inputs for made in arrays.nodes if len(made.inputs) == 2 and made.combines}
    assert {arrays.nodes[i].form for i in wide} == {Form.INPUT}
    first, last = arrays.outputs
    assert first is not None and arrays.nodes[first].inputs == wide
    assert last is not None and arrays.nodes[last].inputs != wide


def levels(arrays: Arrays) -> Iterator[Arrays]:
    yield arrays
    for made in arrays.nodes:
        if made.inner is not None:
            yield from levels(made.inner)


METHODS = ("data_parallel", "zero2", "tensor_parallel")
PRODUCT = tuple((name, method) for name in FAMILIES for method in METHODS)
"""The default run holds a sample of it, which is compiled anyway, in :mod:`tests.test_predictions`."""


@pytest.mark.verify
@pytest.mark.parametrize(("name", "method"), PRODUCT)
def test_the_all_reduces_of_every_step_are_those_of_its_compiled_program(name: str, method: str) -> None:
    model = build(name, "toy")
    step = autopar.parallelize(cluster=eight_slow_devices(), method=method)(model.train_step)
    check_all_reduces(step.compile(model.abstract_state(), model.abstract_batch()))


def check_all_reduces(compiled: Any) -> None:
    """The sets of all-reduces that the compiled program sends together are those predicted."""
    predicted = Counter(
        sum(level.nodes[number].size_bytes for number in group)
        for level in levels(arrays_of(compiled.program, (), eight_slow_devices().device))
        for group in combined(level)
        if level.nodes[group[0]].size_bytes
    )
    ran = [one for one in collectives(parse_module(compiled.as_text())) if one.kind is Collective.ALL_REDUCE]
    assert predicted == Counter(one.full_bytes for one in ran if one.reduction == "add")


@pytest.mark.parametrize("method", [pytest.param("zero2", marks=pytest.mark.verify), "zero3"])
def test_gathers_of_parameters_pay_their_latency_together_on_gpus(method: str) -> None:
    """XLA:GPU gathers all that fits into 30 MiB at once; alone each of these small ones would cost its latency."""
    model = build("gpt", "toy")
    step = autopar.parallelize(model.train_step, method=method)
    plan = step.plan(model.abstract_state(), model.abstract_batch(), cluster=Cluster.preset("p5.48xlarge", hosts=2))
    gathers = [use for use in plan.prediction.collectives if use.kind == "all-gather"]
    cluster = Cluster.preset("p5.48xlarge", hosts=2)
    latency = collective_seconds(Collective.ALL_GATHER, 0.0, plan.mesh.axis_names, plan.mesh, cluster)
    total_bytes = sum(use.full_bytes for use in gathers)
    sets = math.ceil(total_bytes / COMBINED_RESULT_BYTES[Platform.CUDA])
    assert len(gathers) > 20 > 5 * sets
    assert sum(use.seconds >= latency for use in gathers) <= 2 * sets + 1


def test_what_joins_pays_its_share_of_a_full_set() -> None:
    cluster, mesh = Cluster.preset("p5.48xlarge", hosts=2), Mesh(("data",), (16,))
    cut, whole = Layout((("data",), ())), Layout(((), ()))
    full = COMBINED_RESULT_BYTES[Platform.CUDA]
    alone = collective_seconds(Collective.ALL_GATHER, full, ("data",), mesh, cluster)
    for merged in Merged:
        found = reshard_table((1024, 16), mesh, cluster, merged).between([cut], [whole], full)[0, 0]
        assert found == pytest.approx(alone, rel=1e-9)
    table = reshard_table((1024, 16), mesh, cluster, Merged.GATHERS)
    large = collective_seconds(Collective.ALL_GATHER, 3 * full, ("data",), mesh, cluster)
    assert table.between([cut], [whole], 3 * full)[0, 0] == pytest.approx(large, rel=1e-9)  # a set by itself
    small = table.between([cut], [whole], 1024.0)[0, 0]
    assert small == pytest.approx(alone * 1024.0 / full, rel=1e-9)


WAITS = tuple(WaitCurve(size, Curve(((1e-6, 0.25), (1e3, 0.25)))) for size in (2, 4, 8))


@pytest.mark.parametrize(
    "waits",
    [pytest.param(None, marks=pytest.mark.verify), (), WAITS],
    ids=["not measured", "without waits", "with waits"],
)
def test_sums_that_xla_cpu_makes_one_pay_one_after_the_other(waits: tuple[WaitCurve, ...] | None) -> None:
    """Only the first of a set waits for devices that still work."""
    model = build("mlp_nnx", "toy")
    profile = None if waits is None else profile_of(waits=waits)
    cluster = eight_slow_devices().with_profile(profile)
    step = autopar.parallelize(cluster=cluster, method="data_parallel")(model.train_step)
    compiled = step.compile(model.abstract_state(), model.abstract_batch())
    leaders = led_by(arrays_of(compiled.program, (), cluster.device), Platform.CPU)
    reduces = [use for use in compiled.plan.prediction.collectives if use.kind == "all-reduce"]
    assert len(leaders) == len(reduces) > 1
    module = parse_module(compiled.as_text())
    alone = len(set(leaders.values()))
    assert len(reduces) > alone == len(widths(module))
    mesh = compiled.plan.mesh
    each = sum(
        collective_seconds(Collective.ALL_REDUCE, use.full_bytes, mesh.axis_names, mesh, cluster) for use in reduces
    )
    waited = 0.25 * alone if waits else 0.0
    assert sum(use.seconds for use in reduces) == pytest.approx(each + waited)
    if not waits:
        predicted = compiled.plan.prediction.communication_seconds
        assert step_seconds(module, cluster).communication_seconds == pytest.approx(predicted)


def gathers_of(step: Callable[..., Any], primitive: str, count: int) -> tuple[list[str], list[str]]:
    """Kinds of collectives, predicted and compiled, where so many operators leave rows and all others want all of them."""
    mesh = Mesh(("data",), (8,))
    traced = trace(step, (jax.ShapeDtypeStruct((16, 16), jnp.float32),), {})
    graph = build_graph(traced.jaxpr, platform="cpu")
    spread = [operator for operator in graph.operators if operator.primitive == primitive]
    assert len(spread) == count
    rows = Layout((("data",), ()))
    strategies = {operator.id: Strategy((("data",), ())) for operator in spread}
    homes = {value: rows for operator in spread for value in operator.results}
    stage = Stage(mesh, homes, {}, strategies)
    program = lower(graph, stage, output_layouts(graph, stage, ()))
    cluster = eight_slow_devices()
    predicted = [use.kind for use in collectives_of(program, cluster, run_costs(program, fuse(graph), cluster))]
    compiled = Executor(program, traced.in_avals, frozenset(), jax.devices())
    return predicted, [one.kind.value for one in collectives(parse_module(compiled.as_text()))]


def test_equal_arrays_are_sent_once() -> None:
    """XLA computes once what stands twice in a program under other names, and gathers it once."""

    def step(x: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.sin(x) @ x, x @ jnp.sin(x.reshape(256).reshape(16, 16))

    predicted, compiled = gathers_of(step, "sin", 2)
    assert predicted == compiled == ["all-gather"]


@pytest.mark.parametrize("number", [0.0, 2.5])
def test_one_number_everywhere_is_not_sent(number: float) -> None:
    """It is written where it is wanted, as the zeros onto which gradients are scattered."""

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(jnp.full((16, 16), number), x[:8], (0, 0))

    predicted, compiled = gathers_of(step, "broadcast_in_dim", 1)
    assert predicted == compiled == []
