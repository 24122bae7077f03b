"""Does a loop over layers keep, repeat and compute with ``remat=`` what ``nn.remat`` in its body would?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.experimental import io_callback

import autopar
from autopar import _compat
from autopar.cluster import Cluster
from autopar.errors import BudgetError
from autopar.graph.build import BARRIER, build_graph
from autopar.graph.ir import Graph, Operator
from autopar.graph.roles import Role, infer_roles
from autopar.graph.tracing import TracedProgram, trace
from autopar.inter_op.remat import Rematerialising
from autopar.plan import LayerRemat, Remat
from benchmarks.models import Model, build
from benchmarks.remat import gpt
from examples.gpt.model import GPTConfig
from tests.scanned_cases import Scanned, batch_of
from tests.test_correctness import wrong_leaves
from tests.test_remat import products_flops
from tests.toy_runs import eight_slow_devices, precision, reference, run

AGAIN = (Remat.DOTS, Remat.FULL)
TRIPS = 5


def forms_of(step: Callable[..., Any], *arguments: Any) -> tuple[TracedProgram, Rematerialising]:
    """A step, and what it may compute again; its last argument is the batch."""
    program = trace(step, arguments, {})
    graph, roles = build_graph(program.jaxpr, platform="cpu"), infer_roles(program)
    return program, Rematerialising(program, graph, roles.leaves(Role.BATCH), roles.state_pairs)


def forms_of_model(model: Model) -> tuple[TracedProgram, Rematerialising]:
    return forms_of(model.train_step, model.abstract_state(), model.abstract_batch())


def graph_of(program: TracedProgram) -> Graph:
    return build_graph(program.jaxpr, platform="cpu")


def loops_of(program: TracedProgram) -> list[Operator]:
    return [one for one in graph_of(program).operators if one.primitive == "scan"]


def repeats(loop: Operator) -> bool:
    """Whether the trips of a loop compute something again behind a barrier."""
    return any(one.primitive == BARRIER for one, _ in loop.bodies[0].all_operators())


def compiled(program: TracedProgram) -> Any:
    jaxpr = program.jaxpr
    step = jax.jit(lambda *leaves: jax.core.eval_jaxpr(_compat.jaxpr_of(jaxpr), _compat.consts_of(jaxpr), *leaves))
    return step.lower(*map(_compat.shape_of, program.in_avals)).compile()


def flops_of_products(program: TracedProgram) -> float:
    return sum(map(products_flops, graph_of(program).operators))


def deep_gpt(layers: int = 8, *, examples: int = 16, is_remat: bool = False) -> Model:
    """Blocks in one loop; what they leave for the backward pass weighs more than the state."""
    numbers = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    config = GPTConfig(128, 64, layers, heads=4, sequence=64, scan_layers=True, remat=is_remat, **numbers)
    return gpt(config, examples)


# -------------------------------------------------------------------------------------------------- kept and repeated


@pytest.mark.verify
def test_it_keeps_and_repeats_what_remat_in_the_body_would() -> None:
    """Bytes as XLA:CPU compiles them: where it drops barriers, it finds no equal work in two loops all the same."""
    plain, forms = forms_of_model(deep_gpt())
    by_hand, _ = forms_of_model(deep_gpt(is_remat=True))
    full = forms.program(forms.all(Remat.FULL))
    sizes = [compiled(one).memory_analysis().temp_size_in_bytes for one in (plain, full, by_hand)]
    assert sizes[1] < sizes[0] / 4
    assert sizes[1] < 1.05 * sizes[2]
    forward, _ = loops_of(plain)
    added = flops_of_products(full) - flops_of_products(plain)
    assert added == pytest.approx(products_flops(forward), rel=0.35)  # the last product of a block has no reader
    ours, theirs = (sum(map(products_flops, loops_of(one))) for one in (full, by_hand))
    assert ours == theirs


def test_dots_repeats_no_product_without_batch_dimensions() -> None:
    plain, forms = forms_of_model(deep_gpt())
    kept = {kind: sum(forms.cost(forms.all(kind), k).kept_bytes for k in range(len(forms.starts))) for kind in Remat}
    assert kept[Remat.FULL] < kept[Remat.DOTS] / 3 < kept[Remat.NONE] / 6

    def plain_products(program: TracedProgram) -> int:
        bodies = (loop.bodies[0].operators for loop in loops_of(program))
        products = [one.equation for body in bodies for one in body if one.primitive == "dot_general"]
        return sum(not one.params["dimension_numbers"][1][0] for one in products)

    assert plain_products(forms.program(forms.all(Remat.DOTS))) == plain_products(plain)
    assert plain_products(forms.program(forms.all(Remat.FULL))) > plain_products(plain)


@pytest.mark.verify
def test_predicted_memory_is_that_of_remat_in_the_body() -> None:
    """One mesh, and two stages that share the loop."""
    cluster = Cluster.preset("p3.16xlarge", hosts=1)
    for devices, options in (
        (1, {"method": "intra_op", "num_microbatches": 1}),
        (2, {"stages": [[0], [1]], "num_microbatches": 4, "schedule": "1f1b"}),
    ):

        def peak(model: Model, remat: str, devices: int = devices, options: Any = options) -> float:
            part = cluster.part(tuple(range(devices)))
            step = autopar.parallelize(model.train_step, remat=remat, cluster=part, memory_per_device=1e15, **options)
            return step.plan(model.abstract_state(), model.abstract_batch()).peak_bytes

        none, full, by_hand = peak(deep_gpt(), "none"), peak(deep_gpt(), "full"), peak(deep_gpt(is_remat=True), "none")
        assert full < none / 2
        assert full < 1.05 * by_hand


def test_a_trip_waits_for_its_cotangent() -> None:
    """The barrier guards what is carried into the block, one row of it, and a cotangent; weights need no guard."""
    _, forms = forms_of_model(deep_gpt())
    _, backward = loops_of(forms.program(forms.all(Remat.FULL)))
    body = backward.bodies[0]
    (barrier,) = (one for one in body.operators if one.primitive == BARRIER)
    shapes = [body.values[value].shape for value in barrier.operands if value is not None]
    assert shapes == [(16, 64, 64)] * 2
    first = body.operators.index(barrier)
    assert not any(one.primitive == "dot_general" for one in body.operators[:first])
    consts, carries = _compat.scan_arity(backward.equation.params)
    assert set(barrier.operands) & set(body.inputs[consts : consts + carries])


def test_masks_are_made_in_the_trips() -> None:
    """They are made of nothing, and as large as the scores of the whole batch."""
    plain, forms = forms_of_model(deep_gpt())
    for program, found in ((plain, True), (forms.program(forms.all(Remat.FULL)), False)):
        constants = [
            loop.equation.invars[k].aval.shape
            for loop in loops_of(program)
            for k in range(_compat.scan_arity(loop.equation.params)[0])
        ]
        assert ((16, 4, 64, 64) in constants) is found


# ------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.verify
@pytest.mark.parametrize("kind", AGAIN)
def test_the_scanned_gpt_on_one_mesh(kind: Remat) -> None:
    """Five steps in float64."""
    expected = reference("gpt_scan", jnp.float64, 5)
    with precision(jnp.float64):
        model = build("gpt_scan", dtype=jnp.float64)
        step = autopar.parallelize(model.train_step, remat=kind, cluster=eight_slow_devices())
        got = run(model, step, step.init(model.make_state, model.abstract_batch()), 5)
    assert set(step.last.plan.remat.kinds) == {kind}
    assert wrong_leaves(expected.state, got.state) == {}
    assert [wrong_leaves(a, b) for a, b in zip(expected.metrics, got.metrics, strict=True)] == [{}] * 5


@pytest.mark.verify
def test_a_small_loop_on_one_mesh() -> None:
    check_scanned(Remat.FULL, method="intra_op", mesh_shape=(8,))


STAGED = (
    ("zb_h1", Remat.DOTS, 2),
    *(
        pytest.param(schedule, kind, 4, marks=pytest.mark.verify)
        for schedule, kind in (("1f1b", Remat.FULL), ("zb_h1", Remat.FULL), ("gpipe", Remat.DOTS))
    ),
)


@pytest.mark.parametrize(("schedule", "kind", "count"), STAGED)
def test_stages_share_a_loop_that_computes_again(schedule: str, kind: Remat, count: int) -> None:
    """Dropout is drawn again from the same keys; the loop is cut between trips, and so is the one of the backward pass."""
    step, state = check_scanned(kind, stages=2, schedule=schedule, num_microbatches=count)
    plan = step.last.plan
    assert plan.opening.pieces == 2
    down = state["params"]["layers"]["down"]
    meshes = {tuple(sorted(device.id for device in piece.devices())) for piece in down.pieces}
    assert meshes == {tuple(sorted(stage.devices)) for stage in plan.stages}


def check_scanned(kind: Remat, **options: Any) -> tuple[autopar.Parallelized, Any]:
    """Three steps in float64; returns the step and its state."""
    model = Scanned(TRIPS)
    with jax.enable_x64(True):
        step = autopar.parallelize(model.train_step, remat=kind, cluster=eight_slow_devices(), **options)
        state, expected = step.init(model.make_state, batch_of(0)), jax.jit(model.make_state)()
        for number in range(3):
            state, said = step(state, batch_of(number))
            expected, wanted = jax.jit(model.train_step)(expected, batch_of(number))
            same((state, said), (expected, wanted))
    assert set(step.last.plan.remat.kinds) == {kind}
    return step, state


def same(ours: Any, theirs: Any) -> None:
    def arrays(tree: Any) -> list[np.ndarray]:
        leaves = jax.tree.leaves(tree)
        is_key = [jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key) for one in leaves]
        return [
            np.asarray(jax.random.key_data(jnp.asarray(one)) if key else one)
            for one, key in zip(leaves, is_key, strict=True)
        ]

    for one, other in zip(arrays(ours), arrays(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


WIDTH = 3
OPERATIONS: tuple[Callable[..., jax.Array], ...] = (
    lambda a, b, w: jnp.tanh(a) * b,
    lambda a, b, w: jnp.sin(a + b),
    lambda a, b, w: jnp.exp(-(a**2)) + b,
    lambda a, b, w: jax.nn.relu(a - b),
    lambda a, b, w: a @ w + b,
    lambda a, b, w: jax.nn.softmax(a) * (b @ w),
    lambda a, b, w: jax.lax.cond(a.sum() > 0, jnp.sin, jnp.cos, b) * a,
    lambda a, b, w: jax.lax.scan(lambda c, one: (jnp.tanh(c * one), c * c), a, jnp.stack([b, a]))[0],
    lambda a, b, w: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, a.shape), a, b),
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[int, tuple[tuple[int, int, int], ...], tuple[int, ...], tuple[int, ...], bool]:
    """How many are carried; operations on arrays by their numbers; which become the carries, and which rows of results."""
    carries = draw(st.integers(1, 3))
    steps = []
    for number in range(draw(st.integers(4, 8))):
        known = st.integers(0, carries + 2 + number - 1)  # carries, a row, a constant, what was made before
        steps.append((draw(st.integers(0, len(OPERATIONS) - 1)), draw(known), draw(known)))
    last = carries + 2 + len(steps) - 1
    carried = tuple(draw(st.integers(0, last)) for _ in range(carries - 1))
    rows = tuple(draw(st.lists(st.integers(0, last), max_size=2)))
    return carries, tuple(steps), (*carried, last), rows, draw(st.booleans())


@pytest.mark.verify
@given(bodies(), st.sampled_from(AGAIN))
def test_any_body(drawn: Any, kind: Remat) -> None:
    """Gradients of what it reads whole, row by row, and at first; some loops keep too much to be divided, and are left."""
    carries, steps, carried, rows, is_reversed = drawn

    def loss(state: Any, batch: Any) -> jax.Array:
        def body(carry: Any, given: Any) -> Any:
            known = [*carry, *(one + jnp.zeros_like(carry[0]) for one in (given["bias"], state["constant"]))]
            for which, a, b in steps:
                known.append(OPERATIONS[which](known[a], known[b], given["w"]))
            return tuple(known[k] for k in carried), tuple(known[k] for k in rows)

        first = tuple(batch["x"] * (k + 1) + state["shift"] for k in range(carries))
        last, stacks = jax.lax.scan(body, first, state["layers"], reverse=is_reversed)
        return sum(one.mean() for one in (*last, *stacks)) + sum((one**2).mean() for one in last)

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda a, b: a - 0.1 * b, state, gradients), value

    with jax.enable_x64(True):
        draw = np.random.default_rng(0).normal
        layers = {"w": jnp.asarray(draw(size=(TRIPS, WIDTH, WIDTH))), "bias": jnp.asarray(draw(size=(TRIPS, WIDTH)))}
        state = {"layers": layers, "constant": jnp.asarray(draw(size=WIDTH)), "shift": jnp.asarray(draw(size=WIDTH))}
        batch = {"x": jnp.asarray(draw(size=(4, WIDTH)))}
        _, forms = forms_of(step, state, batch)
        program = forms.program(forms.all(kind))
        assume(any(map(repeats, loops_of(program))))
        got = compiled(program)(*jax.tree.leaves((state, batch)))
        expected = jax.tree.leaves(jax.jit(step)(state, batch))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


# ------------------------------------------------------------------------------------------- what is left as it is


@pytest.mark.parametrize("model", [deep_gpt(2, is_remat=True), Scanned(TRIPS, is_remat=True)])
def test_a_body_that_says_remat_is_left_alone(model: Any) -> None:
    """With and without a barrier of its own; it is not run again as a whole either."""
    state = jax.eval_shape(model.make_state)
    batch = batch_of(0) if isinstance(model, Scanned) else model.abstract_batch()
    program, forms = forms_of(model.train_step, state, batch)
    assert forms.says_remat
    again = forms.program(forms.all(Remat.FULL))
    assert [str(loop.equation.params["jaxpr"]) for loop in loops_of(again)] == [
        str(loop.equation.params["jaxpr"]) for loop in loops_of(program)
    ]


def step_of(layer: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose loss runs ``layer`` on (TRIPS, WIDTH, WIDTH) weights."""

    def step(state: jax.Array, batch: jax.Array) -> Any:
        def loss(state: jax.Array) -> jax.Array:
            return (jax.lax.scan(layer, batch, (state, jnp.arange(TRIPS)))[0] ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(state)
        return state - 0.1 * gradient, value

    return step


def test_operators_with_effects_run_once() -> None:
    """What they return is kept."""
    seen: list[int] = []

    def noise(number: Any) -> np.ndarray:
        seen.append(int(number))
        return np.float32(number) + 1

    def layer(x: jax.Array, given: Any) -> Any:
        weights, number = given
        scale = io_callback(noise, jax.ShapeDtypeStruct((), jnp.float32), number)
        return jnp.tanh(jnp.sin(x @ weights) * scale) * jnp.cos(x), None

    state, batch = jnp.ones((TRIPS, WIDTH, WIDTH)) / 2, jnp.ones((8, WIDTH))
    _, forms = forms_of(step_of(layer), state, batch)
    program = forms.program(forms.all(Remat.FULL))
    _, backward = loops_of(program)
    assert repeats(backward)
    got = compiled(program)(state, batch)
    jax.block_until_ready(got)
    assert sorted(seen) == list(range(TRIPS))
    for one, other in zip(got, jax.tree.leaves(step_of(layer)(state, batch)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_carry_larger_than_the_residuals_is_not_kept() -> None:
    """A loop that writes layer by layer into one array would keep that once for each layer."""

    def layer(x: jax.Array, given: Any) -> Any:
        weights, number = given
        row = jnp.tanh(x[0] @ weights)
        return x.at[number].set(row), None

    _, forms = forms_of(step_of(layer), jnp.ones((TRIPS, WIDTH, WIDTH)), jnp.ones((64, WIDTH)))
    assert not any(map(repeats, loops_of(forms.program(forms.all(Remat.FULL)))))


def test_loops_over_time() -> None:
    """Two layers, each a loop over time: to keep their carries needs less than to run one of them again as a whole.

    Many such layers are run again one by one.
    """

    def step_with(layers: int) -> Callable[..., Any]:
        def step(state: jax.Array, batch: jax.Array) -> Any:
            def loss(state: jax.Array) -> jax.Array:
                x = batch
                for own in state:
                    _, x = jax.lax.scan(lambda h, one, own=own: (cell(h, one, own),) * 2, jnp.zeros((8, WIDTH)), x)
                return (x**2).mean()

            def cell(h: jax.Array, one: jax.Array, own: jax.Array) -> jax.Array:
                return jnp.tanh(one @ own) * jnp.sin(h @ own) + jnp.cos(h)

            value, gradient = jax.value_and_grad(loss)(state)
            return state - 0.1 * gradient, value

        state = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32)
        _, forms = forms_of(step, state, jax.ShapeDtypeStruct((16, 8, WIDTH), jnp.float32))
        return forms.program(forms.all(Remat.FULL))

    assert sum(map(repeats, loops_of(step_with(2)))) == 2
    assert sum(map(repeats, loops_of(step_with(12)))) == 0


# --------------------------------------------------------------------------------------------------- the planner


@pytest.mark.verify
def test_the_planner_finds_it_where_nothing_fits() -> None:
    model, cluster = deep_gpt(), Cluster.preset("p3.16xlarge", hosts=1).part((0,))

    def planned(**options: Any) -> autopar.Plan:
        step = autopar.parallelize(
            model.train_step, cluster=cluster, method="intra_op", num_microbatches=1, offload="none", **options
        )
        return step.plan(model.abstract_state(), model.abstract_batch())

    most = planned(remat="none", memory_per_device=1e15).peak_bytes
    with pytest.raises(BudgetError):
        planned(remat="none", memory_per_device=most / 2)
    found = planned(memory_per_device=most / 2)
    assert found.remat.is_any and found.peak_bytes <= most / 2


@pytest.mark.verify
def test_what_is_demanded_is_not_lost_to_the_memory_of_the_hosts() -> None:
    """State on the hosts is no cheaper way to keep what every layer was told not to keep."""
    model, cluster = deep_gpt(), Cluster.preset("p3.16xlarge", hosts=1).part(tuple(range(4)))
    assert cluster.host_memory_link is not None
    for kind in AGAIN:
        step = autopar.parallelize(
            model.train_step, remat=kind, cluster=cluster, method="intra_op", num_microbatches=1, memory_per_device=1e15
        )
        plan = step.plan(model.abstract_state(), model.abstract_batch())
        assert plan.remat == LayerRemat(plan.remat.starts, (kind,) * len(plan.remat.starts))
