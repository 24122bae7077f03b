"""Plans of large steps: other numbers of microbatches bounded by one plan, and meshes that a finer one stands for."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import step_planner
from autopar.cluster import Cluster, Mesh
from autopar.collector import paused_collector
from autopar.errors import BudgetError
from autopar.graph.roles import Role, infer_roles
from autopar.graph.tracing import trace
from autopar.inter_op.looped import looped
from autopar.inter_op.rescaled import Rescaling, values_with_rows
from autopar.intra_op import search as intra_op
from autopar.intra_op.on_mesh import Ground
from autopar.intra_op.task import Task
from autopar.planning import make_plan
from autopar.step_planner import StepPlanner
from autopar.subjects import Demands, Rewritings, Subjected, microbatched, subject_of
from tests.toy_runs import eight_slow_devices

LAYERS, WIDTH, BATCH = 2, 64, 64

DEMANDS = Demands(method="intra_op", mesh_shape=(2, 4))


def loss(params: Any, x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean(jnp.square(x))


def scanned_loss(params: Any, x: jax.Array) -> jax.Array:
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *params["layers"])

    def layer(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ one["up"]) @ one["down"], None

    return jnp.mean(jnp.square(jax.lax.scan(layer, x, stacked)[0]))


def subject(function: Any = loss) -> Subjected:
    def step(state: Any, batch: Any) -> Any:
        gradients = jax.grad(function)(state, batch["x"])
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients)

    matrix = {
        "up": jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), np.float32),
        "down": jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), np.float32),
    }
    program = trace(step, ({"layers": [matrix] * LAYERS}, {"x": jax.ShapeDtypeStruct((BATCH, 16, WIDTH), np.float32)}))
    return subject_of(program, infer_roles(program), "cpu")


def in_loop(one: Subjected) -> Any:
    return looped(one.graph, one.roles.leaves(Role.BATCH), one.num_microbatches)


@pytest.mark.parametrize("function", [loss, scanned_loss])
def test_rows_of_the_batch_are_what_shrinks_with_more_microbatches(function: Any) -> None:
    ours = subject(function)
    loops = [in_loop(microbatched(ours, Demands().terms(count), "cpu")) for count in (4, 8)]
    few, many = ([*loop.body.all_values()] for loop in loops)
    shrinking = {one.id for one, other in zip(few, many, strict=True) if one.size_bytes != other.size_bytes}
    rows = values_with_rows(loops[0])
    # What a constant is broadcast to has the examples' extent, and no operand from which it could have come.
    filled = {o.results[0] for o, _ in loops[0].body.all_operators() if o.primitive == "broadcast_in_dim"}
    assert rows and rows <= shrinking and shrinking - rows <= filled


@pytest.fixture(scope="module")
def planned() -> dict[int, Any]:
    planner = StepPlanner(subject(), eight_slow_devices(), DEMANDS, lambda message: None)
    return {"planner": planner, **{count: planner.plan_in(count) for count in (2, 4, 8)}}


@pytest.mark.parametrize(("known", "count"), list(itertools.permutations((2, 4, 8), 2)))
def test_no_plan_in_another_number_beats_the_bound(planned: dict[Any, Any], known: int, count: int) -> None:
    bound = planned["planner"].bound_seconds(count, planned[known], float("inf"))
    assert bound <= planned[count][1].step_seconds * 1.001


def test_the_bound_of_the_same_number_is_the_optimum(planned: dict[Any, Any]) -> None:
    found = planned[4][2]
    bound = planned["planner"].bound_seconds(4, planned[4], float("inf"))
    assert found.model is not None
    assert bound == pytest.approx(found.model.cost(found.options), rel=1e-3)


@pytest.mark.verify
def test_a_large_step_is_planned_in_as_good_a_number_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, cluster = subject(), eight_slow_devices()
    whole = make_plan(ours, cluster, replace(DEMANDS, memory_per_device=1e12))[1]
    budget = 0.7 * whole.prediction.memory.total_bytes
    demands = replace(DEMANDS, memory_per_device=budget)
    known = make_plan(ours, cluster, demands)[1]
    monkeypatch.setattr(step_planner, "LARGE_OPERATORS", 0)
    monkeypatch.setattr(step_planner, "_hopeful", lambda counts, *rest: counts[1:])
    ours_large = make_plan(ours, cluster, demands)[1]
    assert ours_large.prediction.memory.total_bytes <= budget
    assert ours_large.step_seconds <= known.step_seconds * 1.01


def test_a_large_step_that_fits_in_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_planner, "LARGE_OPERATORS", 0)
    monkeypatch.setattr(step_planner, "_hopeful", lambda counts, *rest: counts[1:])
    with pytest.raises(BudgetError, match="no plan keeps"):
        make_plan(subject(), eight_slow_devices(), replace(DEMANDS, memory_per_device=1e3))


@pytest.mark.parametrize(
    ("sizes", "finer", "expected"),
    [
        ((8,), (2, 2, 2), True),
        ((4, 2), (2, 4), True),
        ((2, 4), (2, 2, 2), True),
        ((2, 2, 2), (2, 4), False),
        ((3, 4), (2, 6), False),
        ((4, 4), (2, 2, 4), True),
        ((2, 8), (4, 4), False),
    ],
)
def test_coarser_meshes(sizes: tuple[int, ...], finer: tuple[int, ...], *, expected: bool) -> None:
    assert intra_op._is_coarser(sizes, finer) is expected


def task_on(cluster: Cluster) -> Task:
    planner = StepPlanner(subject(), cluster, Demands(), lambda message: None)
    return planner._task(planner.subject)


def test_meshes_that_a_finer_one_stands_for_are_left_out_of_large_steps_on_one_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = eight_slow_devices()
    one, two = task_on(cluster), task_on(cluster.replace(hosts=2, devices_per_host=4))
    assert intra_op.worth_trying(one) == one.meshes
    monkeypatch.setattr(intra_op, "LARGE_OPERATORS", 0)
    assert intra_op.worth_trying(one) == (Mesh(("data", "model", "extra"), (2, 2, 2)),)
    assert intra_op.worth_trying(two) == two.meshes


def test_meshes_of_three_axes_are_looked_at_where_one_of_two_comes_near(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    task = replace(task_on(eight_slow_devices().replace(hosts=2, devices_per_host=4)), report_progress=said.append)
    best = min(Ground(task.graph, task.state_pairs).on(task, mesh).solve().cost for mesh in task.meshes)
    three = [mesh for mesh in task.meshes if len(mesh.axis_sizes) == 3]
    assert three
    monkeypatch.setattr(intra_op, "MANY_OPERATORS", 0)
    for share, may, looks_at_all in ((1.01, True, False), (0.99, False, True), (0.5, False, False)):
        said.clear()
        assert intra_op.may_cost_less(task, share * best) is may
        if not may:
            assert any(str(mesh) in text for mesh in three for text in said) is looks_at_all


def test_forms_of_a_step_are_made_once() -> None:
    forms, terms = Rewritings(subject(), "cpu"), Demands().terms(4)
    one = forms.microbatched(terms)
    assert forms.as_loop(terms) is one and forms.microbatched(terms) is one
    assert forms.ground(one) is forms.ground(one)


def test_the_collector_is_paused_while_planning() -> None:
    seen = []

    def step(state: Any, batch: Any) -> Any:
        seen.append(gc.isenabled())
        return jax.tree.map(lambda p: p - 0.1 * jnp.mean(batch["x"]), state)

    leaves = {"w": jax.ShapeDtypeStruct((8,), np.float32)}, {"x": jax.ShapeDtypeStruct((8, 8), np.float32)}
    autopar.parallelize(step, cluster=eight_slow_devices()).plan(*leaves)
    assert seen and not any(seen) and gc.isenabled()
    with pytest.raises(ValueError, match="left"), paused_collector():
        raise ValueError("left")
    assert gc.isenabled()


def test_rescaling_speaks_of_one_found_plan(planned: dict[Any, Any]) -> None:
    one, _, found = planned[4]
    task = planned["planner"]._task(one)
    rescaling = Rescaling(task, Ground(one.graph, one.roles.state_pairs), in_loop(one), found)
    assert rescaling.bound_seconds(8, 0.0) <= rescaling.bound_seconds(8, float("inf"))
