"""What a user may rely on: when a step is traced, planned and compiled, what it takes, and what it refuses.

The step is a small MLP under plain gradient descent, written so that its Python body counts how often it runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
import autopar.parallelized
from autopar import Cluster, Plan, PlanError, TraceError
from autopar.cost_model.hlo import memory_bytes
from autopar.methods import TensorParallel
from autopar.parallelized import Parallelized
from benchmarks.models import build
from tests.toy_runs import eight_slow_devices

State = dict[str, Any]


def make_state() -> State:
    first, second = jax.random.split(jax.random.key(0))
    return {
        "enter": {"kernel": jax.random.normal(first, (32, 64)) / 6, "bias": jnp.zeros(64)},
        "leave": {"kernel": jax.random.normal(second, (64, 16)) / 8},
    }


def loss_of(state: State, batch: State, scale: float = 1.0) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ state["enter"]["kernel"] + state["enter"]["bias"])
    return scale * jnp.mean((hidden @ state["leave"]["kernel"] - batch["y"]) ** 2)


def train_step(state: State, batch: State) -> tuple[State, State]:
    loss, gradients = jax.value_and_grad(loss_of)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), {"loss": loss}


def make_batch(size: int = 16) -> State:
    random = np.random.default_rng(size)
    return {
        "x": random.standard_normal((size, 32), dtype=np.float32),
        "y": random.standard_normal((size, 16), dtype=np.float32),
    }


@dataclasses.dataclass
class Counts:
    """How often the user's function ran in Python, plans were made, and programs compiled."""

    traced: int = 0
    planned: int = 0
    compiled: int = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counted = Counts()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            setattr(counted, name, getattr(counted, name) + 1)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(autopar.parallelized, "make_plan", counting("planned", autopar.parallelized.make_plan))
    monkeypatch.setattr(autopar.parallelized, "Executor", counting("compiled", autopar.parallelized.Executor))
    return counted


def parallel(function: Callable[..., Any] = train_step, **options: Any) -> Parallelized:
    return autopar.parallelize(**{"cluster": eight_slow_devices(), "method": "data_parallel", **options})(function)


def same(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


# -------------------------------------------------------------------------------- once, and not again


def test_second_call_neither_traces_nor_plans_nor_compiles(counts: Counts) -> None:
    def counted(state: State, batch: State) -> tuple[State, State]:
        counts.traced += 1
        return train_step(state, batch)

    step = parallel(counted)
    state, _ = step(make_state(), make_batch())
    assert counts == Counts(traced=1, planned=1, compiled=1)
    expected = jax.jit(train_step)(jax.jit(train_step)(make_state(), make_batch())[0], make_batch())
    same(step(state, make_batch()), expected)
    assert counts == Counts(traced=1, planned=1, compiled=1)


@flax.struct.dataclass
class TrainState:
    params: Any
    tx: Any = flax.struct.field(pytree_node=False)


def test_rebuilt_state_with_another_optimizer_object_is_the_same_state(counts: Counts) -> None:
    def step(state: TrainState, batch: State) -> tuple[TrainState, State]:
        counts.traced += 1
        params, metrics = train_step(state.params, batch)
        return state.replace(params=params), metrics

    run = parallel(step)
    for _ in range(2):
        state = TrainState(make_state(), tx=object())  # compares by identity: the two treedefs differ
        run(state, make_batch())
    assert counts == Counts(traced=1, planned=1, compiled=1)


def test_new_batch_size_keeps_the_plan_that_divides_and_plans_anew_otherwise(counts: Counts) -> None:
    step = parallel(method="auto", mesh_shape=(8,), constraints={"batch/x": P("data"), "batch/y": P("data")})
    state = make_state()
    step.plan(state, make_batch(16))
    bigger = step.plan(state, make_batch(24))
    assert counts.planned == 1
    assert bigger.prediction.flops > step.plan(state, make_batch(16)).prediction.flops
    same(step(state, make_batch(24)), jax.jit(train_step)(make_state(), make_batch(24)))
    assert counts.planned == 1

    free = parallel(method="data_parallel")
    assert free.plan(make_state(), make_batch(16)).in_layouts[-1].dims[0] == ("data",)
    uneven = free.plan(make_state(), make_batch(12))
    assert counts.planned == 3
    assert uneven.in_layouts[-1].dims[0] == ()
    same(free(make_state(), make_batch(12)), jax.jit(train_step)(make_state(), make_batch(12)))


# -------------------------------------------------------------------------------- the first state


def test_a_plan_made_from_shapes_is_one_of_the_state_that_init_makes(tmp_path: Path) -> None:
    def make() -> Any:
        return {"w": jnp.ones((8, 8)), "step": 0}  # as Flax counts steps: an integer of Python's

    def step(state: Any, x: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * gradient, "step": state["step"] + 1}, loss

    x = np.ones((8, 8), np.float32)
    autopar.parallelize(step).plan(jax.eval_shape(make), x).save(tmp_path / "plan.json")
    parallel = autopar.parallelize(step)
    parallel.use(autopar.Plan.load(tmp_path / "plan.json"))
    state = parallel.init(make, x)
    for _ in range(2):
        state, _ = parallel(state, x)
    expected, _ = step(step(make(), x)[0], x)
    np.testing.assert_allclose(np.asarray(state["w"]), np.asarray(expected["w"]), rtol=1e-5)
    assert int(state["step"]) == 2


def test_init_gives_the_initialisers_numbers_in_pieces_and_traces_it_once(counts: Counts) -> None:
    def init() -> State:
        counts.traced += 1
        return make_state()

    step = parallel(method="zero3")
    state = step.init(init, jax.eval_shape(make_batch))
    assert counts.traced == 1
    jax.tree.map(np.testing.assert_array_equal, state, jax.jit(make_state)())
    for leaf in jax.tree.leaves(state):
        assert len(leaf.addressable_shards) == 8
        assert {shard.data.size for shard in leaf.addressable_shards} == {leaf.size // 8}, leaf.shape
    planned = counts.planned
    step(state, make_batch())
    assert counts.planned == planned  # init planned the step already


# -------------------------------------------------------------------------------- donation


def test_state_is_donated_and_the_batch_is_not() -> None:
    step = parallel()
    state = step.init(make_state, make_batch())
    batch = jax.tree.map(jnp.asarray, make_batch())
    step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(batch))
    assert step.last is not None
    assert step.last.memory_analysis().alias_size_in_bytes > 0


def test_nothing_is_donated_on_demand() -> None:
    step = parallel(donate_argnums=())
    state = step.init(make_state, make_batch())
    first, _ = step(state, make_batch())
    again, _ = step(state, make_batch())
    same(first, again)
    with pytest.raises(PlanError, match="donate_argnums"):
        parallel(donate_argnums=(1,))


# -------------------------------------------------------------------------------- what a step may take


def test_keyword_and_static_arguments() -> None:
    def step(state: State, batch: State, *, rate: jax.Array, mode: str) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state, batch, 2.0 if mode == "double" else 1.0)
        return jax.tree.map(lambda p, g: p - rate * g, state, gradients), loss

    run = parallel(step, static_argnames="mode")
    reference = jax.jit(step, static_argnames="mode")
    losses = {}
    for mode in ("single", "double"):
        got = run(make_state(), batch=make_batch(), rate=jnp.float32(0.1), mode=mode)
        same(got, reference(make_state(), batch=make_batch(), rate=jnp.float32(0.1), mode=mode))
        losses[mode] = float(got[1])
    assert losses["double"] == pytest.approx(2 * losses["single"], rel=1e-5)


def test_python_scalars_are_arguments_too() -> None:
    def step(state: State, batch: State, rate: float) -> tuple[State, State]:
        loss, gradients = jax.value_and_grad(loss_of)(state, batch)
        return jax.tree.map(lambda p, g: p - rate * g, state, gradients), {"loss": loss}

    run = parallel(step)
    for rate in (0.1, 0.3):  # the value is no part of the program
        same(run(make_state(), make_batch(), rate), jax.jit(step)(make_state(), make_batch(), rate))


def test_closed_over_arrays_become_hidden_inputs() -> None:
    table = jnp.asarray(np.random.default_rng(1).standard_normal((32, 32), dtype=np.float32))

    def step(state: State, batch: State) -> tuple[State, State]:
        return train_step(state, {**batch, "x": batch["x"] @ table})

    run = parallel(step)
    same(run(make_state(), make_batch()), jax.jit(step)(make_state(), make_batch()))
    assert run.last is not None
    assert [path for path in run.last.plan.in_paths if path.startswith("<closure>")] == ["<closure>[0]"]


def test_a_tuple_as_state() -> None:
    def step(state: tuple[Any, Any], batch: State) -> tuple[tuple[Any, Any], jax.Array]:
        params, count = state
        params, metrics = train_step(params, batch)
        return (params, count + 1), metrics["loss"]

    run = parallel(step)
    state: Any = (make_state(), jnp.int32(0))
    expected = jax.jit(step)((make_state(), jnp.int32(0)), make_batch())
    state, loss = run(state, make_batch())
    same((state, loss), expected)
    state, _ = run(state, make_batch())
    assert int(state[1]) == 2


def test_a_debug_callback_in_the_step() -> None:
    said: list[float] = []

    def step(state: State, batch: State) -> tuple[State, State]:
        state, metrics = train_step(state, batch)
        jax.debug.callback(lambda loss: said.append(float(loss)), metrics["loss"])
        return state, metrics

    got = parallel(step)(make_state(), make_batch())
    jax.effects_barrier()
    same(got, jax.jit(train_step)(make_state(), make_batch()))
    assert said
    np.testing.assert_allclose(said, float(got[1]["loss"]), rtol=1e-5)


def test_a_sharding_constraint_in_the_step_does_not_change_its_numbers() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, P("data"))

    def step(state: State, batch: State) -> tuple[State, State]:
        return train_step(state, {**batch, "x": jax.lax.with_sharding_constraint(batch["x"], rows)})

    same(parallel(step)(make_state(), make_batch()), jax.jit(train_step)(make_state(), make_batch()))


# -------------------------------------------------------------------------------- plans from files


def test_a_saved_plan_is_used_again(tmp_path: Any, counts: Counts) -> None:
    arguments = make_state(), make_batch()
    parallel(method="zero3").plan(*arguments).save(tmp_path / "plan.json")
    counts.planned = 0
    step = parallel()
    step.use(Plan.load(tmp_path / "plan.json"))
    same(step(*arguments), jax.jit(train_step)(make_state(), make_batch()))
    assert counts.planned == 0
    assert step.last is not None
    assert step.last.plan.method == "zero3"


def test_a_plan_that_does_not_fit_is_refused() -> None:
    plan = parallel().plan(make_state(), make_batch())

    def other(state: State, batch: State) -> tuple[State, State]:
        state, metrics = train_step(state, batch)
        return state, {"loss": jnp.sqrt(metrics["loss"])}

    step = parallel(other)
    step.use(plan)
    with pytest.raises(PlanError, match=r"made for another program .*same arguments, but another computation"):
        step(make_state(), make_batch())

    step = parallel()
    step.use(plan)
    with pytest.raises(PlanError, match=r"another program .*batch\['z'\]"):
        step(make_state(), {**make_batch(), "z": np.zeros(16, np.float32)})

    step = parallel(cluster=Cluster.preset("p4d.24xlarge", hosts=2))
    step.use(plan)
    with pytest.raises(PlanError, match=r"plan is for 8 devices of slow devices, .*p4d\.24xlarge.* has 16; plan again"):
        step(make_state(), make_batch())

    with pytest.raises(PlanError, match=r"made with jax 0\.0\.1 and this is jax"):
        step.use(dataclasses.replace(plan, jax_version="0.0.1"))


# -------------------------------------------------------------------------------- users' constraints


def test_constraints_are_kept() -> None:
    step = parallel(method="auto", mesh_shape=(2, 4), constraints={"**/kernel": P(None, "model")})
    state = step.init(make_state, make_batch())
    for layer in ("enter", "leave"):
        kernel = state[layer]["kernel"]
        assert {shard.data.shape for shard in kernel.addressable_shards} == {(kernel.shape[0], kernel.shape[1] // 4)}
    same(step(state, make_batch()), jax.jit(train_step)(make_state(), make_batch()))


@pytest.mark.parametrize(
    ("constraints", "said"),
    [
        (
            {"**/kernel": P(None, "model"), "state/enter/kernel": P("model")},
            r"'state/enter/kernel' wants state\['enter'\]\['kernel'\] as .* collides with .*model",
        ),
        ({"**/kernal": P("model")}, r"'\*\*/kernal' matches no argument leaf; leaves are named like .*kernel"),
        ({"**/bias": P(None, "model")}, r"more entries than state\['enter'\]\['bias'\] has dimensions \(1\)"),
        ({"**/kernel": P("rows")}, r"name the mesh axes \['rows'\], but the meshes of this method have"),
        ({"batch/odd": P("model")}, r"batch\['odd'\] cannot be met: shape \(6,\) does not divide over mesh"),
        ({"**/kernel": P("model", "model")}, r"'\*\*/kernel': .* names the mesh axis 'model' twice"),
        (
            {"**/enter/kernel": P(("model", "data"), None)},
            r"'\*\*/enter/kernel': .* major to minor: write \('data', 'model'\)",
        ),
    ],
    ids=["collide", "no such path", "rank", "no such axis", "does not divide", "axis twice", "axes out of order"],
)
def test_impossible_constraints_are_refused(constraints: dict[str, P], said: str) -> None:
    def step(state: State, batch: State) -> tuple[State, State]:
        state, metrics = train_step(state, batch)
        return state, {**metrics, "odd": batch["odd"].sum()}

    run = parallel(step, method="auto", mesh_shape=(2, 4), constraints=constraints, batch_argnums=())
    with pytest.raises(PlanError, match=said):
        run.plan(make_state(), {**make_batch(), "odd": np.zeros(6, np.float32)})


# -------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("name", "size"),
    [("mlp_nnx", "toy"), *(pytest.param("gpt", size, marks=pytest.mark.verify) for size in ("toy", "bench"))],
)
def test_half_of_data_parallels_memory_is_enough_and_kept(name: str, size: str) -> None:
    """… by the prediction and by the compiled program's own account."""
    model = build(name, size)
    arguments = model.abstract_state(), model.abstract_batch()
    step = autopar.parallelize(cluster=eight_slow_devices())(model.train_step)
    budget = step.plan(*arguments, method="data_parallel").peak_bytes / 2
    lean = autopar.parallelize(cluster=eight_slow_devices(), memory_per_device=budget)(model.train_step)
    compiled = lean.compile(*arguments)
    assert compiled.plan.peak_bytes <= budget
    assert memory_bytes(compiled).total <= budget
    with pytest.raises(PlanError, match="no plan keeps"):
        lean.plan(*arguments, method="data_parallel")


def tenants_of(refusal: str) -> list[str]:
    """The three largest tenants that a refused budget names, without their sizes."""
    assert "no plan keeps" in refusal and "memory_per_device=" in refusal
    listed = refusal.partition("three largest tenants are ")[2].partition(". Use more devices")[0]
    return [re.fullmatch(r"(.+): [\d.]+ (B|KiB|MiB|GiB)", tenant)[1] for tenant in listed.split("; ")]  # type: ignore[index]


def test_an_impossible_budget_is_refused_naming_three_tenants() -> None:
    with pytest.raises(PlanError, match=r"no plan keeps 1000 B .* needs [\d.]+ KiB") as refused:
        parallel(method="auto", memory_per_device=1000.0).plan(make_state(), make_batch())
    tenants = tenants_of(str(refused.value))
    assert len(set(tenants)) == 3
    assert any("state" in tenant or tenant == "batch/x" for tenant in tenants)


def test_scratch_space_is_told_by_the_users_own_line() -> None:
    with pytest.raises(PlanError) as refused:
        parallel(method="auto", memory_per_device=1000.0, num_microbatches=1).plan(make_state(), make_batch())
    tenants = tenants_of(str(refused.value))
    assert any(f" at {Path(__file__).name}:" in tenant for tenant in tenants)


def test_like_arguments_are_named_together() -> None:
    model = build("gpt")
    step = autopar.parallelize(cluster=eight_slow_devices(), method="data_parallel", memory_per_device=1e5)
    with pytest.raises(PlanError) as refused:
        step(model.train_step).plan(model.abstract_state(), model.abstract_batch())
    count = len(jax.tree.leaves(model.abstract_state().params))
    assert set(tenants_of(str(refused.value))) == {
        f"parameters in state/params ({count} arrays)",
        f"optimizer state in state/opt_state/1/0/mu ({count} arrays)",
        f"optimizer state in state/opt_state/1/0/nu ({count} arrays)",
    }


# -------------------------------------------------------------------------------- refusals


def test_unknown_names() -> None:
    with pytest.raises(TypeError, match=r"unknown options \['metod'\]; known are .*'method'"):
        autopar.parallelize(metod="auto")(train_step)  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="method='zero9' is unknown; the names are auto, data_parallel"):
        parallel(method="zero9").plan(make_state(), make_batch())


@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 2, 2, 1), (), (-2, -4), (0,), (0, 8), (8, 0)])
def test_a_mesh_that_is_not_all_devices(shape: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"mesh_shape=.* does not fit .* product is 8"):
        parallel(method="auto", mesh_shape=shape).plan(make_state(), make_batch())


def test_a_mesh_that_the_method_cannot_use() -> None:
    with pytest.raises(PlanError, match=r"method='data_parallel' cannot use mesh_shape=\(2, 4\)"):
        parallel(mesh_shape=(2, 4)).plan(make_state(), make_batch())


def test_axes_of_size_one_are_left_out() -> None:
    tensor_parallel = parallel(method="tensor_parallel", mesh_shape=(1, 8)).plan(make_state(), make_batch())
    assert str(tensor_parallel.mesh) == "model=8"
    free = parallel(method="auto", mesh_shape=(1, 8)).plan(make_state(), make_batch())
    assert free.mesh.axis_sizes == (8,)  # named by what it cuts
    assert str(parallel(mesh_shape=(8, 1)).plan(make_state(), make_batch()).mesh) == "data=8"


@pytest.mark.parametrize(
    ("shape", "spec", "same"),
    [
        ((1, 8), P("data", "model"), P(None, "model")),
        ((8, 1), P("data", "model"), P("data")),
        ((2, 1, 4), P(None, ("data", "model", "extra")), P(None, ("data", "extra"))),
    ],
)
def test_a_constraint_may_name_an_axis_of_size_one(shape: tuple[int, ...], spec: P, same: P) -> None:
    """To cut into one piece is not to cut: the plan is that of a constraint without the axis."""
    first, second = (
        parallel(method="auto", mesh_shape=shape, constraints={"**/kernel": one}).plan(make_state(), make_batch())
        for one in (spec, same)
    )
    assert (first.mesh, first.in_layouts) == (second.mesh, second.in_layouts)
    assert 1 not in first.mesh.axis_sizes


@pytest.mark.parametrize("shape", [[2, 4], np.array([2, 4]), (np.int64(2), 4)], ids=["list", "array", "mixed"])
def test_a_mesh_shape_is_any_sequence_of_integers(shape: Any) -> None:
    assert parallel(method="auto", mesh_shape=shape).plan(make_state(), make_batch()).mesh.axis_sizes == (2, 4)


@pytest.mark.parametrize("shape", [8, (2.0, 4), "24"])
def test_a_mesh_shape_that_is_none(shape: Any) -> None:
    with pytest.raises(PlanError, match=r"mesh_shape=.* is no tuple of integers"):
        parallel(method="auto", mesh_shape=shape)


@pytest.mark.parametrize("size", [3, 0, -2, 16])
def test_a_model_axis_that_does_not_divide_the_devices(size: int) -> None:
    with pytest.raises(PlanError, match=rf"model_size={size} does not divide the 8 devices"):
        parallel(method=TensorParallel(model_size=size)).plan(make_state(), make_batch())


@pytest.mark.parametrize("transform", [jax.jit, lambda f: jax.vmap(f, in_axes=(None, 0))], ids=["jit", "vmap"])
def test_a_step_inside_a_transformation(transform: Callable[..., Any]) -> None:
    batch = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), make_batch())
    with pytest.raises(TraceError, match="cannot run inside jit, grad or vmap"):
        transform(parallel())(make_state(), batch)


def test_a_step_inside_grad() -> None:
    step = parallel()
    with pytest.raises(TraceError, match="is a tracer"):
        jax.grad(lambda state: step(state, make_batch())[1]["loss"])(make_state())


def test_init_needs_the_other_arguments() -> None:
    with pytest.raises((TraceError, TypeError), match="batch"):
        parallel().init(make_state)


def test_decorating_twice_is_decorating_once() -> None:
    step = autopar.parallelize(train_step)
    assert autopar.parallelize(step) is step
    assert step.__name__ == "train_step"


def test_a_plan_is_carried_over_to_another_batch_but_not_to_another_model(counts: Counts) -> None:
    """The state of training lies where the first plan put it; that of a larger model has no place yet."""

    def sized(width: int, batch: int) -> tuple[Any, Any]:
        kernel = jax.ShapeDtypeStruct((width, width), jnp.float32)
        return {"kernel": kernel}, {"x": jax.ShapeDtypeStruct((batch, width), jnp.float32)}

    def loss(state: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.sin(batch["x"] @ state["kernel"]) ** 2)

    def step(state: Any, batch: Any) -> Any:
        return jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, state, jax.grad(loss)(state, batch))

    run = parallel(step, method="auto")
    first = run.plan(*sized(1024, 64))
    again = run.plan(*sized(1024, 128))
    assert counts.planned == 1
    assert again.stages == first.stages
    larger = run.plan(*sized(4096, 64))
    assert counts.planned == 2
    assert (
        larger.prediction.step_seconds == parallel(step, method="auto").plan(*sized(4096, 64)).prediction.step_seconds
    )
