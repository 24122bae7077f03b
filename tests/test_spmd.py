"""Whatever legal layouts a stage says, the program on eight devices computes what `jax.jit` computes on one.

The cluster of these tests computes slowly and talks quickly, so the best stage cuts everything; random stages take any
option for any node, so they hold reshards, partial sums and border crossings that no sane plan would have.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from autopar.cluster import Cluster, Mesh
from autopar.errors import InternalError
from autopar.graph.build import build_graph
from autopar.graph.ir import Factor, FactorKind, Graph, Rule
from autopar.graph.roles import infer_roles
from autopar.graph.tracing import TracedProgram, trace
from autopar.graph.verify import verify_graph
from autopar.intra_op.alike import Quotient, merge_alike
from autopar.intra_op.choices import choices_on, strategies_of
from autopar.intra_op.extract import stage_of
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import Model
from autopar.intra_op.nodes import OperatorNode, Problem
from autopar.intra_op.problem import state_problem
from autopar.plan import Layout, Stage, Strategy
from autopar.runtime.executor import device_mesh, partition_spec
from autopar.runtime.interpret import interpret
from autopar.schedule.local_ops import check_local
from autopar.schedule.reshard import Move, MoveKind, moves_between
from autopar.schedule.spmd import Buffer, Reshard, Run, SpmdProgram, lower, output_layouts
from autopar.schedule.verify import verify_program
from examples.gpt.model import GPTConfig, OptimizerConfig, create_state, train_step

CUBE = Mesh(("data", "model", "extra"), (2, 2, 2))
MESHES = (CUBE, Mesh(("data", "model"), (2, 4)), Mesh(("data",), (8,)), Mesh(("data", "model"), (4, 2)))
TOLERANCE = 1e-12
"""Of float64, relative to the largest entry of each array."""


def slow_cluster() -> Cluster:
    cluster = Cluster.preset("p3.16xlarge")
    device = dataclasses.replace(cluster.device, flops_per_second={"float32": 1e9}, memory_bytes_per_second=1e8)
    return cluster.replace(device=device)


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@dataclass(frozen=True)
class Planned:
    """A traced program with everything but a stage."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    program: TracedProgram
    state_pairs: tuple[tuple[int, int], ...]
    graph: Graph
    problem: Problem
    quotient: Quotient

    def stage(self, mesh: Mesh, rng: random.Random | None) -> Stage:
        """The best stage, or (with ``rng``) any."""
        choices = choices_on(self.problem, self.quotient, mesh, slow_cluster(), {})
        if rng is None:
            solution = solve(Model(choices.node_seconds, choices.edge_seconds))
            assert solution is not None
            options = solution.options
        else:
            options = tuple(rng.randrange(len(own)) for own in choices.options)
        return stage_of(self.graph, self.problem, self.quotient, choices, options)

    def lowered(self, mesh: Mesh, rng: random.Random | None) -> SpmdProgram:
        stage = self.stage(mesh, rng)
        return lower(self.graph, stage, output_layouts(self.graph, stage, self.state_pairs))


def plan_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Planned:
    program = trace(function, arguments, {})
    pairs = infer_roles(program, batch_argnums=()).state_pairs
    graph = build_graph(program.jaxpr, platform="cpu")
    problem = state_problem(graph, pairs)
    return Planned(function, arguments, program, pairs, graph, problem, merge_alike(problem, {}))


def run(program: SpmdProgram, leaves: list[Any]) -> list[jax.Array]:
    local = jax.shard_map(
        lambda *pieces: tuple(interpret(program, pieces)),
        mesh=device_mesh(program.mesh, jax.devices()),
        in_specs=tuple(partition_spec(buffer.layout) for buffer in program.inputs),
        out_specs=tuple(PartitionSpec() if b is None else partition_spec(b.layout) for b in program.outputs),
        check_vma=False,
    )
    return list(jax.jit(local)(*leaves))


def plain(array: Any) -> np.ndarray:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def assert_equal(found: Any, expected: Any, where: str) -> None:
    assert found.dtype == expected.dtype, where
    a, b = plain(found), plain(expected)
    assert a.shape == b.shape, where
    if a.dtype.kind == "f":
        # A key's bias cancels in attention's softmax: its true gradient is zero, the computed one is rounding.
        least = 1e-2 if "['key']['bias']" in where else 0.0
        largest = float(np.max(np.abs(b), initial=least, where=np.isfinite(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * largest, err_msg=where)
    else:
        np.testing.assert_array_equal(a, b, err_msg=where)


def check(planned: Planned, mesh: Mesh, rng: random.Random | None = None) -> SpmdProgram:
    program = planned.lowered(mesh, rng)
    verify_program(program)
    expected = jax.tree.leaves(jax.jit(planned.function)(*planned.arguments))
    found = run(program, [*jax.tree.leaves(planned.arguments), *planned.program.hidden])
    for path, own, true in zip(planned.program.out_paths, found, expected, strict=True):
        assert_equal(own, true, f"{path} on {mesh}")
    return program


# ---------------------------------------------------------------------------------------------------------- programs


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def integers(high: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.int32)


def mlp_step(params: Any, moments: Any, x: Any, y: Any) -> Any:
    def loss(p: Any) -> Any:
        h = jnp.tanh(x @ p[0] + p[1])
        h = h + jax.nn.gelu(h @ p[2])
        return jnp.mean((h @ p[3] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = optax.adamw(1e-2).update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments, value


def mlp_arguments() -> tuple[Any, ...]:
    params = [normal(8, 16), normal(16, seed=1), normal(16, 16, seed=2) / 4, normal(16, 8, seed=3)]
    return params, optax.adamw(1e-2).init(params), normal(16, 8), normal(16, 8, seed=4)


def recurrent(w: Any, u: Any, xs: Any, start: Any) -> Any:
    def loss(w: Any, u: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh(h @ w + x @ u)
            return h, (h, jnp.sum(h))

        h, (hs, sums) = jax.lax.scan(cell, start, xs)
        return jnp.sum(hs[-1] ** 2) + sums.sum() + h.mean(), hs

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(w, u)


def backwards(xs: Any, w: Any) -> Any:
    def cell(carry: Any, x: Any) -> Any:
        return (carry[0] * 0.5 + x @ w, carry[1] + 1), x * carry[1]

    return jax.lax.scan(cell, (jnp.zeros((8, 8)), jnp.int32(0)), xs, reverse=True)


def swapping_while(x: Any, w: Any) -> Any:
    def goes_on(carry: Any) -> Any:
        return (carry[0] < 5) & (jnp.max(carry[1]) < 100.0)

    return jax.lax.while_loop(goes_on, lambda c: (c[0] + 1, (c[1] @ w) * 1.1 + c[2], c[1]), (0, x, x * 0.5))


def while_with_closures(a: Any, b: Any) -> Any:
    """The condition reads a matrix that the body carries."""
    return jax.lax.while_loop(lambda c: jnp.linalg.norm(c[0] * a) < 1e4, lambda c: (c[0] @ b + a, c[1] + 1), (a, 0))


def branches(p: Any, x: Any, w: Any) -> Any:
    both = jax.lax.cond(p.sum() > 0, lambda x, w: (x @ w, x.sum()), lambda x, w: (jnp.sin(x) * 2.0, x.max()), x, w)
    three = [lambda x: x + 1.0, lambda x: x.T, lambda x: x * x]
    return both, jax.lax.switch(jnp.argmax(p) % 3, three, x)


def extremes(x: Any) -> Any:
    values, places = jax.lax.top_k(x, 4)
    tops = jnp.argmax(x, -1), jnp.argmin(x, 0), values, places, jnp.argmax(x)
    return tops, jnp.max(x, 0), jnp.min(x), jnp.any(x > 1, 0), jnp.all(x > -9)


def running(x: Any, t: Any) -> Any:
    sums = jnp.cumsum(x, 0), jnp.cumprod(x * 0.1, 1), jnp.cumsum(x @ t, 1)
    return sums, jnp.sort(x, 0), jnp.argsort(x, 1), jnp.sort(x @ t, 1), jnp.flip(x, 0), jnp.pad(x, ((1, 2), (0, 0)))


def convolutions(x: Any, k: Any, k2: Any) -> Any:
    def loss(k: Any, k2: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        h = jax.nn.relu(jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers))
        return jnp.mean(jax.lax.conv_general_dilated(h, k2, (2, 2), "SAME", dimension_numbers=numbers) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))(k, k2)


def untied(table: Any, head: Any, tokens: Any, targets: Any) -> Any:
    def loss(table: Any, head: Any) -> Any:
        log_p = jax.nn.log_softmax(jnp.tanh(table[tokens]) @ head)
        return -jnp.mean(jnp.take_along_axis(log_p, targets[..., None], -1))

    return jax.value_and_grad(loss, argnums=(0, 1))(table, head)


def tied(table: Any, w: Any, tokens: Any, targets: Any) -> Any:
    """The table's gradient is a sum of two sums, and so is the input gradient of the three projections."""

    def loss(table: Any, w: Any) -> Any:
        x = table[tokens]
        q, k, v = x @ w[0], x @ w[1], x @ w[2]
        x = x + jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(jnp.einsum("bqh,bkh->bqk", q, k)), v)
        log_p = jax.nn.log_softmax(x @ table.T)
        return -jnp.mean(jnp.take_along_axis(log_p, targets[..., None], -1))

    return jax.value_and_grad(loss, argnums=(0, 1))(table, w)


def shapes_and_places(x: Any, i: Any) -> Any:
    written = x.at[i].set(1.0), x.at[:, i].add(x[:, :4]), x.at[i].multiply(2.0), jnp.take(x, i, axis=1)
    joined = jnp.concatenate([x, x * 2], 0), jnp.stack([x, x], 1), jnp.repeat(x, 2, 0), jnp.tile(x, (2, 1))
    shaped = x.reshape(4, 2, 8), x.reshape(2, 32), jnp.transpose(x)[::2], x[None].repeat(8, 0).sum(1), jnp.tril(x)
    starts = (i[0] % 3, jnp.int32(0))
    moved = jax.lax.dynamic_slice(x, starts, (4, 8)), jax.lax.dynamic_update_slice(x, x[:2] * 3, starts)
    return written, joined, shaped, moved, jnp.linalg.cholesky(x @ x.T + 10 * jnp.eye(8)), jnp.arange(16)[::-1]


def random_numbers(key: Any, x: Any) -> Any:
    first, second = jax.random.split(key)
    keys = jax.random.split(first, 8)
    drawn = jax.random.normal(first, (8, 16)), jax.random.bernoulli(second, 0.5, x.shape) * x
    each = jax.vmap(lambda key: jax.random.uniform(key, (4,)))(keys)
    return drawn, each, jax.random.permutation(second, x), jax.random.categorical(first, x), keys


TOKENS = integers(32, 8, 8), integers(32, 8, 8, seed=1)
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "mlp": (mlp_step, mlp_arguments),
    "recurrent": (recurrent, lambda: (normal(8, 8) / 3, normal(8, 8, seed=1) / 3, normal(4, 8, 8), normal(8, 8))),
    "backwards": (backwards, lambda: (normal(8, 8, 8), normal(8, 8, seed=1))),
    "swapping_while": (swapping_while, lambda: (normal(8, 8), normal(8, 8, seed=1) / 3)),
    "while_with_closures": (while_with_closures, lambda: (normal(8, 8), normal(8, 8, seed=1))),
    "branches": (branches, lambda: (normal(8), normal(8, 8), normal(8, 8, seed=1))),
    "extremes": (extremes, lambda: (normal(8, 16),)),
    "running": (running, lambda: (normal(8, 16), normal(16, 16, seed=1))),
    "convolutions": (convolutions, lambda: (normal(8, 4, 4, 8), normal(3, 3, 8, 16), normal(3, 3, 16, 8))),
    "untied": (untied, lambda: (normal(32, 16), normal(16, 32, seed=1), *TOKENS)),
    "tied": (tied, lambda: (normal(32, 16), normal(3, 16, 16, seed=1) / 3, *TOKENS)),
    "shapes_and_places": (shapes_and_places, lambda: (normal(8, 8), integers(8, 4))),
    "random_numbers": (random_numbers, lambda: (jax.random.key(3), normal(16, 8))),
}


@functools.cache
def planned_program(name: str) -> Planned:
    function, make = PROGRAMS[name]
    with jax.enable_x64(True):
        return plan_of(function, make())


def mesh_of(name: str, number: int) -> Mesh:
    """The ``number``-th mesh; arrays of four dimensions have too many layouts on three axes to price them in a test."""
    meshes = MESHES[1:] if name == "convolutions" else MESHES
    return meshes[number % len(meshes)]


ALSO_ON_THE_CUBE = ("mlp", "recurrent", "branches", "extremes")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_best_stage_of_a_slow_cluster_computes_the_same(name: str) -> None:
    check(planned_program(name), CUBE if name in ALSO_ON_THE_CUBE else MESHES[1])


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("tied", "shapes_and_places")])
def test_any_stage_computes_the_same(name: str) -> None:
    """One random stage each, on another mesh for each program."""
    number = list(PROGRAMS).index(name)
    check(planned_program(name), mesh_of(name, number), random.Random(number))


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_more_stages_compute_the_same(name: str, seed: int) -> None:
    check(planned_program(name), mesh_of(name, seed), random.Random(1000 + seed))


# --------------------------------------------------------------------------------- what a rule allows can be executed


def refusals(planned: Planned) -> list[str]:
    """Why any strategy that the planner may choose cannot be run, on any of the meshes."""
    found = []
    for node in planned.problem.nodes:
        if isinstance(node, OperatorNode):
            for mesh in MESHES[1:]:
                reasons = (check_local(node.operator, s.factors, mesh) for s in strategies_of(node, mesh))
                found += [reason for reason in reasons if reason is not None]
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_rule_allows_can_be_run(name: str) -> None:
    assert not refusals(planned_program(name))


def rows_of_booleans(flags: Any, places: Any) -> Any:
    return flags[places]


def rows_of_keys(keys: Any, places: Any) -> Any:
    return keys[places]


def rolled(x: Any) -> Any:
    """The axis of the concatenation inside is an integer of NumPy's."""
    return jnp.roll(x, 3, 1)


def grouped_convolution(x: Any, k: Any) -> Any:
    """The kernel's gradient reshapes with a permutation."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(k: Any) -> Any:
        h = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2)
        return jnp.sum(h**2)

    return jax.grad(loss)(k)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (rows_of_booleans, (integers(2, 8, 8).astype(bool), integers(8, 4))),
        (rows_of_keys, (jax.random.split(jax.random.key(0), 8), integers(8, 4))),
        (rolled, (normal(8, 16),)),
        (grouped_convolution, (normal(8, 4, 4, 16), normal(3, 3, 8, 8))),
    ],
)
def test_what_a_rule_allows_can_be_run_of_rarer_operators(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    assert not refusals(plan_of(function, arguments))


# --------------------------------------------------------------------------------------------------------------- GPT

GPT_MESHES = MESHES[1:]  # three axes have so many strategies that pricing them alone takes half a minute
GPT_VARIANTS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.1, "layers": 1},
    "scanned": {"scan_layers": True, "remat": True, "dropout": 0.1},
    "untied": {"tie_embeddings": False},
    "remat": {"remat": True, "dropout": 0.1},
}


def planned_gpt(**changes: Any) -> Planned:
    config = GPTConfig(
        **{
            "layers": 2,
            "hidden": 16,
            "heads": 4,
            "sequence": 8,
            "vocab_size": 32,
            "dtype": jnp.float64,
            "param_dtype": jnp.float64,
        }
        | changes
    )
    state = create_state(jax.random.key(0), config, OptimizerConfig())
    return plan_of(train_step, (state, {"tokens": TOKENS[0], "targets": TOKENS[1]}))


@pytest.mark.verify
@pytest.mark.parametrize("variant", ["scanned", "dropout"])
def test_the_best_stage_of_a_gpt_step_computes_the_same(variant: str) -> None:
    program = check(planned_gpt(**GPT_VARIANTS[variant]), GPT_MESHES[0])
    used = {move.kind for step, _ in program.all_steps() if isinstance(step, Reshard) for move in step.moves}
    assert {MoveKind.ALL_REDUCE, MoveKind.ALL_GATHER, MoveKind.SLICE} <= used


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("variant", GPT_VARIANTS)
def test_any_stage_of_a_gpt_step_computes_the_same(variant: str, seed: int) -> None:
    check(
        planned_gpt(**GPT_VARIANTS[variant]), GPT_MESHES[seed % len(GPT_MESHES)], random.Random(seed) if seed else None
    )


@pytest.mark.parametrize(
    "variant",
    [pytest.param(one, marks=() if one == "scanned" else pytest.mark.verify) for one in GPT_VARIANTS],
)
def test_any_stage_of_a_gpt_step_is_sound(variant: str) -> None:
    """Without running: many random stages keep every promise of the list of steps."""
    planned = planned_gpt(**GPT_VARIANTS[variant])
    verify_graph(planned.graph)
    for seed in range(3):
        verify_program(planned.lowered(GPT_MESHES[seed % len(GPT_MESHES)], random.Random(seed)))


# --------------------------------------------------------------------------- the verifiers notice what is broken


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_stage_is_sound(name: str) -> None:
    planned = planned_program(name)
    verify_graph(planned.graph)
    for seed in range(4):
        verify_program(planned.lowered(mesh_of(name, seed), random.Random(seed)))


def changed(program: SpmdProgram, number: int, **fields: Any) -> SpmdProgram:
    steps = list(program.steps)
    steps[number] = dataclasses.replace(steps[number], **fields)  # type: ignore[type-var]
    return dataclasses.replace(program, steps=tuple(steps))


def first(program: SpmdProgram, wanted: Callable[[Any], bool]) -> int:
    return next(number for number, step in enumerate(program.steps) if wanted(step))


@pytest.fixture(scope="module")
def sound() -> SpmdProgram:
    with jax.enable_x64(True):
        return planned_program("mlp").lowered(MESHES[1], random.Random(3))


def refuse(program: SpmdProgram, said: str) -> None:
    with pytest.raises(InternalError, match=said):
        verify_program(program)


def test_a_missing_step_is_noticed(sound: SpmdProgram) -> None:
    for number in range(len(sound.steps)):
        step = sound.steps[number]
        read_later = any(
            target in ((later.source,) if isinstance(later, Reshard) else later.operands)
            for target in ((step.target,) if isinstance(step, Reshard) else ())
            for later in sound.steps[number + 1 :]
        )
        if isinstance(step, Run) or read_later:
            refuse(dataclasses.replace(sound, steps=sound.steps[:number] + sound.steps[number + 1 :]), "broken")


def test_steps_out_of_order_are_noticed(sound: SpmdProgram) -> None:
    refuse(dataclasses.replace(sound, steps=sound.steps[::-1]), "read before it is made")


def test_a_missing_move_is_noticed(sound: SpmdProgram) -> None:
    seen = 0
    for number, step in enumerate(sound.steps):
        if isinstance(step, Reshard):
            for k in range(len(step.moves)):
                refuse(
                    changed(sound, number, moves=step.moves[:k] + step.moves[k + 1 :]),
                    "cannot be done|is no layout|the moves from",
                )
                seen += 1
    assert seen > 20


def test_another_source_is_noticed(sound: SpmdProgram) -> None:
    number = first(sound, lambda step: isinstance(step, Reshard) and step.source.layout.axes)
    step = sound.steps[number]
    assert isinstance(step, Reshard)
    other = next(b for b in sound.inputs if b.value != step.source.value)
    refuse(changed(sound, number, source=other), "broken")


def test_another_strategy_is_noticed(sound: SpmdProgram) -> None:
    seen = 0
    for number, step in enumerate(sound.steps):
        if isinstance(step, Run) and any(step.strategy.factors):
            uncut = Strategy(((),) * len(step.strategy.factors))
            refuse(changed(sound, number, strategy=uncut), "its strategy")
            seen += 1
    assert seen > 20


def test_partial_sums_may_not_leave(sound: SpmdProgram) -> None:
    buffer = sound.outputs[0]
    assert buffer is not None
    idle = next(name for name in sound.mesh.axis_names if name not in buffer.layout.axes)
    partial = Buffer(buffer.value, Layout(buffer.layout.dims, (idle,)))
    masked = Reshard(buffer, partial, (Move(MoveKind.MASK, (idle,)),), None)
    program = dataclasses.replace(sound, steps=(*sound.steps, masked), outputs=(partial, *sound.outputs[1:]))
    refuse(program, "partial sum")


def test_uneven_cuts_are_noticed(sound: SpmdProgram) -> None:
    refuse(dataclasses.replace(sound, mesh=Mesh(sound.mesh.axis_names, (3, 5))), "no layout on|divide|layout of")


def test_a_border_that_does_not_fit_is_noticed() -> None:
    program = planned_program("backwards").lowered(MESHES[1], None)
    number = first(program, lambda step: isinstance(step, Run) and step.bodies)
    step = program.steps[number]
    assert isinstance(step, Run)
    (body,) = step.bodies
    cut = first(program, lambda one: isinstance(one, Run) and one.bodies)
    inner = next(k for k, b in enumerate(body.outputs) if b is not None and len(b.layout.dims) == 2)
    output = body.outputs[inner]
    assert output is not None
    turned = Buffer(output.value, Layout(output.layout.dims[::-1]))
    assert turned != output
    way = Reshard(output, turned, _moves(output, turned, body), None)
    outputs = tuple(turned if k == inner else b for k, b in enumerate(body.outputs))
    broken = dataclasses.replace(body, steps=(*body.steps, way), outputs=outputs)
    refuse(changed(program, cut, bodies=(broken,)), "at its border")


def _moves(source: Buffer, target: Buffer, program: SpmdProgram) -> Any:
    return moves_between(program.values[source.value].shape, source.layout, target.layout, program.mesh)


def _matrix_graph() -> Graph:
    return build_graph(trace(lambda a, b: jnp.tanh(a @ b), (normal(4, 8), normal(8, 2)), {}).jaxpr, platform="cpu")


def _with_operator(graph: Graph, number: int, **fields: Any) -> Graph:
    operators = list(graph.operators)
    operators[number] = dataclasses.replace(operators[number], **fields)
    return dataclasses.replace(graph, operators=tuple(operators))


def _broken_graphs() -> Iterator[tuple[str, Graph]]:
    graph = _matrix_graph()
    dot = graph.operators[0]
    rule = dot.rule
    yield "used before", dataclasses.replace(graph, operators=graph.operators[::-1])
    yield "never made", dataclasses.replace(graph, operators=graph.operators[:1])
    yield "stands twice", _with_operator(graph, 1, id=dot.id)
    yield "made twice", _with_operator(graph, 1, results=dot.results)
    yield (
        "2 operands|has 1 operands",
        _with_operator(graph, 0, rule=Rule(rule.factors, rule.operands[:1], rule.results)),
    )
    yield (
        "dimensions for shape",
        _with_operator(graph, 0, rule=Rule(rule.factors, rule.operands, (rule.results[0][:1],))),
    )
    wider = tuple(dataclasses.replace(factor, size=factor.size + 1) for factor in rule.factors)
    yield "of a dimension of", _with_operator(graph, 0, rule=Rule(wider, rule.operands, rule.results))
    summed = tuple(Factor(factor.size, FactorKind.SUM) for factor in rule.factors)
    yield "reaches a result", _with_operator(graph, 0, rule=Rule(summed, rule.operands, rule.results))
    kept = tuple(Factor(factor.size, FactorKind.PARALLEL) for factor in rule.factors)
    yield "reaches no result", _with_operator(graph, 0, rule=Rule(kept, rule.operands, rule.results))
    yield "FLOPs", _with_operator(graph, 0, flops=float("nan"))


def test_broken_graphs_are_noticed() -> None:
    verify_graph(_matrix_graph())
    for said, graph in _broken_graphs():
        with pytest.raises(InternalError, match=said):
            verify_graph(graph)


def test_a_body_of_other_shapes_is_noticed() -> None:
    graph = planned_program("backwards").graph
    loop = next(operator for operator in graph.operators if operator.bodies)
    (body,) = loop.bodies
    matrix = next(value for value in body.inputs if len(body.values[value].shape) == 2)
    values = body.values | {matrix: dataclasses.replace(body.values[matrix], shape=(8, 9))}
    number = graph.operators.index(loop)
    with pytest.raises(InternalError, match="meets one of"):
        verify_graph(_with_operator(graph, number, bodies=(dataclasses.replace(body, values=values),)))
    with pytest.raises(InternalError, match="trips"):
        verify_graph(_with_operator(graph, number, bodies=(dataclasses.replace(body, trips=3),)))


@pytest.mark.parametrize("read_between", [False, True])
def test_a_sum_in_two_parts_is_made_in_one_unless_somebody_reads_in_between(read_between: bool) -> None:
    """The value's home is partial over one axis still; its reader wants all of it, another one takes the summands."""

    def step(x: jax.Array) -> Any:
        total = jnp.sum(x, 0)
        return (jnp.sin(total), -total) if read_between else jnp.sin(total)

    planned = plan_of(step, (np.arange(48.0).reshape(16, 3),))
    mesh = Mesh(("data", "model"), (2, 4))
    reduce = next(operator for operator in planned.graph.operators if operator.primitive == "reduce_sum")
    negate = [operator for operator in planned.graph.operators if operator.primitive == "neg"]
    (value,) = reduce.results
    rows = [number for number, factor in enumerate(reduce.rule.factors) if factor.size == 16]
    cut = tuple(("data", "model") if number in rows else () for number in range(len(reduce.rule.factors)))
    strategies = {reduce.id: Strategy(cut)}
    homes = {planned.graph.inputs[0]: Layout((("data", "model"), ())), value: Layout(((),), ("model",))}
    for operator in negate:
        strategies[operator.id] = Strategy(((),), ("model",))
    stage = Stage(mesh, homes, {}, strategies)
    program = lower(planned.graph, stage, [Layout(((),))] * len(planned.graph.outputs))
    verify_program(program)
    sums = [step.moves for step in program.steps if isinstance(step, Reshard) and step.source.value == value]
    each = [tuple(move.axes for move in moves) for moves in sums]
    assert each == ([(("data",),), (("model",),)] if read_between else [(("data", "model"),)])
    results = run(program, [planned.arguments[0]])
    for result, right in zip(results, jax.tree.leaves(step(*planned.arguments)), strict=True):
        np.testing.assert_allclose(plain(result), plain(right), rtol=TOLERANCE)


@pytest.mark.parametrize("read_besides", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_two_sums_that_are_only_added_are_made_in_one(scattered: bool, read_besides: bool) -> None:
    def step(x: jax.Array, y: jax.Array) -> Any:
        first, second = jnp.sum(x, 0), jnp.sum(y, 0)
        return (first + second, -first) if read_besides else first + second

    planned = plan_of(step, (np.arange(64.0).reshape(16, 4), np.ones((16, 4))))
    mesh = Mesh(("data",), (4,))
    strategies: dict[int, Strategy] = {}
    homes = dict.fromkeys(planned.graph.inputs, Layout((("data",), ())))
    home = Layout((("data",),)) if scattered else Layout(((),))
    for operator in planned.graph.operators:
        homes[operator.results[0]] = home
        if operator.primitive == "reduce_sum":
            rows = [factor.size == 16 for factor in operator.rule.factors]
            strategies[operator.id] = Strategy(tuple(("data",) if cut else () for cut in rows))
        else:
            strategies[operator.id] = Strategy(home.dims)
    program = lower(planned.graph, Stage(mesh, homes, {}, strategies), [home] * len(planned.graph.outputs))
    verify_program(program)
    sums = [step for step in program.steps if isinstance(step, Reshard)]
    kind = MoveKind.REDUCE_SCATTER if scattered else MoveKind.ALL_REDUCE
    assert [move.kind for step in sums for move in step.moves] == [kind] * (2 if read_besides else 1)
    for result, right in zip(
        run(program, list(planned.arguments)), jax.tree.leaves(step(*planned.arguments)), strict=True
    ):
        np.testing.assert_allclose(plain(result), plain(right), rtol=TOLERANCE)


WHOLE, ROWS, COLUMNS = Layout(((), ())), Layout((("data",), ())), Layout(((), ("data",)))
BLOCKS = Layout((("data",), ("model",)))


@pytest.mark.parametrize(
    ("home", "wanted", "ways"),
    [
        (ROWS, WHOLE, [(WHOLE, ROWS), (ROWS, COLUMNS), (COLUMNS, WHOLE)]),  # as short from the copy
        (BLOCKS, ROWS, [(WHOLE, BLOCKS), (BLOCKS, ROWS)]),  # shorter from home
    ],
)
def test_a_copy_is_made_for_those_who_start_from_it(home: Layout, wanted: Layout, ways: list[Any]) -> None:
    """Of equally short ways the planned one is taken, by the copy; one from which nobody starts is not made."""
    planned = plan_of(lambda x, y: jnp.sin(x) @ y, (np.ones((16, 8)), np.ones((8, 8))))
    sine, product = planned.graph.operators
    (value,) = sine.results
    rows = product.rule.operands[0][0]
    cut = tuple(wanted.dims[0] if number in rows else () for number in range(len(product.rule.factors)))
    stage = Stage(CUBE, {value: home}, {value: COLUMNS}, {product.id: Strategy(cut)})
    program = lower(planned.graph, stage, [WHOLE])
    verify_program(program)
    moved = [step for step in program.steps if isinstance(step, Reshard) and step.source.value == value]
    assert [(step.source.layout, step.target.layout) for step in moved] == ways
    (result,) = run(program, list(planned.arguments))
    np.testing.assert_allclose(plain(result), np.full((16, 8), 8 * np.sin(1.0)), rtol=TOLERANCE)
