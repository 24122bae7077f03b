"""Pipelines whose stages the user fixes: what they compute, where their state lives, what they say and refuse.

Whole models meet every schedule and size in :mod:`tests.test_pipeline_models`.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import Order
from autopar.errors import PlanError, TraceError
from autopar.plan import Plan, Schedule
from autopar.schedule.instructions import Part
from autopar.schedule.spmd import Run as RunStep
from autopar.schedule.verify import verify_program
from tests.pipelines import folded
from tests.test_correctness import wrong_leaves
from tests.test_optimizers import BATCH as OPTIMIZER_BATCH
from tests.test_optimizers import RECIPES, make_batch
from tests.test_optimizers import reference as optimizer_reference
from tests.test_optimizers import run as optimizer_run
from tests.toy_runs import eight_slow_devices, precision


def pipeline(function: Any, stages: Any, count: int | None = None, **options: Any) -> Any:
    # Of one shape of meshes: the search for stages has tests of its own, and takes longest.
    is_free = isinstance(stages, int) and 8 % stages == 0 and "method" not in options
    fixed = {"mesh_shape": (8 // stages,)} if is_free else {}
    asked = {**fixed, **options}
    return autopar.parallelize(function, stages=stages, num_microbatches=count, cluster=eight_slow_devices(), **asked)


# ---------------------------------------------------------------------------------------------------- a small model

WIDTH, BATCH, LAYERS = 32, 16, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def make_state() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {
        f"layer{k}": {"kernel": jax.random.normal(key, (WIDTH, WIDTH)) / 4, "bias": jnp.zeros(WIDTH)}
        for k, key in enumerate(keys)
    }
    return {"params": params, "moments": OPTIMIZER.init(params)}


def examples(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(BATCH, WIDTH)).astype(np.float32),
        "y": rng.normal(size=(BATCH, WIDTH)).astype(np.float32),
        "mask": (rng.random(BATCH) < 0.7).astype(np.float32) + np.float32(0.1),
    }


def hidden(params: Any, x: jax.Array) -> jax.Array:
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def mean_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((hidden(params, batch["x"]) - batch["y"]) ** 2)


def masked_mean(params: Any, batch: Any) -> jax.Array:
    per_example = jnp.sum((hidden(params, batch["x"]) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(per_example * batch["mask"]) / jnp.sum(batch["mask"])


def with_dropout(params: Any, batch: Any) -> jax.Array:
    kept = jax.random.bernoulli(jax.random.key(3), 0.8, batch["x"].shape)
    return mean_loss(params, {**batch, "x": jnp.where(kept, batch["x"], 0.0)})


def step_of(loss: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], Any]:
    def train_step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = OPTIMIZER.update(gradients, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments}, {"loss": value, "norm": optax.tree.norm(gradients)}

    return train_step


train_step = step_of(mean_loss)


def same(ours: Any, theirs: Any) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6, err_msg=jax.tree_util.keystr(path))


def after_two(step: Any, state: Any) -> Any:
    metrics = []
    for number in range(2):
        state, said = step(state, examples(number))
        metrics.append(said)
    return state, metrics


def devices_of(leaf: jax.Array) -> tuple[int, ...]:
    return tuple(sorted(device.id for device in leaf.sharding.device_set))


@functools.cache
def in_two_stages() -> Any:
    """The step on two meshes in two microbatches: compiled once for all tests that want no other."""
    return pipeline(train_step, 2, 2)


@pytest.mark.parametrize(
    "loss", [masked_mean, pytest.param(with_dropout, marks=pytest.mark.verify)], ids=lambda loss: loss.__name__
)
def test_losses_with_whole_batch_parts(loss: Any) -> None:
    step = pipeline(step_of(loss), 2, 4)
    same(after_two(step, step.init(make_state, examples())), after_two(jax.jit(step_of(loss)), make_state()))


@pytest.mark.parametrize("name", ["multi_steps", pytest.param("apply_if_finite", marks=pytest.mark.verify)])
def test_optimizers_that_choose_after_the_microbatches(name: str) -> None:
    expected = optimizer_reference(name)
    with precision(jnp.float64):
        first, function = RECIPES[name]()
        step = pipeline(function, 2, 4)
        got = optimizer_run(name, step, step.init(first, make_batch(OPTIMIZER_BATCH)))
    assert wrong_leaves(expected.state, got.state) == {}


def test_leaves_that_are_handed_out_as_they_came_keep_their_memory() -> None:
    """One that both stages read, one that a single stage has; the step changes both."""

    def decaying(state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(state["params"], batch)
        params = jax.tree.map(lambda p, g: p - state["rate"] * g, state["params"], gradients)
        used = {"rate": state["rate"], "kernel": state["params"]["layer3"]["kernel"]}
        return {"params": params, "rate": state["rate"] * 0.9}, {"loss": loss, **used}

    def fresh() -> Any:
        return {"params": make_state()["params"], "rate": jnp.float32(0.5)}

    same(after_two(pipeline(decaying, 2, 2), fresh()), after_two(jax.jit(decaying), fresh()))


@pytest.mark.verify
def test_what_is_not_fixed_is_searched() -> None:
    arguments = jax.eval_shape(make_state), examples()
    plan = pipeline(train_step, 2, mesh_shape=None).plan(*arguments)
    counts = (1, 2, 4, 8, 16)
    fixed = [pipeline(train_step, 2, count, mesh_shape=None).plan(*arguments).step_seconds for count in counts]
    assert plan.step_seconds == pytest.approx(min(fixed), rel=1e-6)


@pytest.mark.verify
def test_three_stages_share_eight_devices() -> None:
    step = pipeline(train_step, 3, 4)
    same(after_two(step, step.init(make_state, examples())), after_two(jax.jit(train_step), make_state()))
    sizes = [len(stage.devices) for stage in step.last.plan.stages]
    assert len(sizes) == 3 and sum(sizes) <= 8


def test_default_schedule_and_microbatches() -> None:
    plan = pipeline(train_step, 2, mesh_shape=(4,)).plan(jax.eval_shape(make_state), examples())
    assert (plan.schedule, plan.num_microbatches) == (Schedule.ONE_F_ONE_B, 8)
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert plan.step_seconds == plan.prediction.simulated_seconds > 0
    assert "in 2 stages, 1f1b over 8 microbatches, on " in plan.summary()


def test_a_demand_for_stages_can_be_taken_back() -> None:
    step = pipeline(train_step, 2, 4, schedule="gpipe", mesh_shape=None)
    whole = step.with_options(stages=None, schedule=None, num_microbatches=None, mesh_shape=(8,))
    assert not whole.plan(jax.eval_shape(make_state), examples()).is_pipeline
    assert (
        len(
            step.with_options(num_microbatches=None, mesh_shape=(4,))
            .plan(jax.eval_shape(make_state), examples())
            .stages
        )
        == 2
    )


def test_devices_of_stages_are_the_users() -> None:
    step = pipeline(train_step, [[6, 7], [0, 1, 2, 3]], 2, schedule=Schedule.GPIPE)
    state = step.init(make_state, examples())
    assert devices_of(state["params"]["layer0"]["kernel"]) == (6, 7)
    assert devices_of(state["params"]["layer3"]["kernel"]) == (0, 1, 2, 3)
    same(after_two(step, state), after_two(jax.jit(train_step), make_state()))


def test_a_stage_on_every_device() -> None:
    """Four layers have room for eight stages of operators; every one has a device."""
    step = autopar.parallelize(train_step, method="inter_op", num_microbatches=2, cluster=eight_slow_devices())
    state = step.init(make_state, examples())
    same(after_two(step, state), after_two(jax.jit(train_step), make_state()))
    plan = step.last.plan
    assert plan.method == "inter_op" and all(stage.mesh.size == 1 for stage in plan.stages)
    assert [stage.devices for stage in plan.stages] == [(k,) for k in range(len(plan.stages))]


def test_like_layers_of_which_one_reads_the_batch_and_another_what_is_sent() -> None:
    """A block's second half adds what the block got: the first of them the batch, those after it what two stages before made."""
    blocks = ("block0", "block1", "block2")

    def make_blocks() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0), len(blocks))
        return {
            name: {half: jax.random.normal(key, (WIDTH, WIDTH)) / 8 for half in ("up", "down")}
            for name, key in zip(blocks, keys, strict=True)
        }

    def loss_of(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for name in blocks:
            x = x + jnp.tanh(x @ params[name]["up"]) @ params[name]["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    def residual_step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda old, change: old - 0.1 * change, params, gradients), value

    step = pipeline(residual_step, [[k] for k in range(2 * len(blocks))], 2)
    state = step.init(make_blocks, examples())
    for k, name in enumerate(blocks):
        assert [devices_of(state[name][half]) for half in ("up", "down")] == [(2 * k,), (2 * k + 1,)]
    same(after_two(step, state), after_two(jax.jit(residual_step), make_blocks()))


@pytest.mark.parametrize(
    "method",
    [
        "zero3",
        pytest.param("tensor_parallel", marks=pytest.mark.verify),
        pytest.param("data_parallel", marks=pytest.mark.verify),
        pytest.param("zero2", marks=pytest.mark.verify),
    ],
)
def test_methods_inside_stages(method: str) -> None:
    step = pipeline(train_step, 2, 2, method=method)
    same(after_two(step, step.init(make_state, examples())), after_two(jax.jit(train_step), make_state()))
    kernel = step.last.plan.in_layouts[step.last.plan.in_paths.index("state['params']['layer3']['kernel']")]
    assert bool(kernel.axes) is (method in ("zero3", "tensor_parallel"))


def test_constraints_hold_on_the_stage_of_the_leaf() -> None:
    step = pipeline(train_step, 2, 2, mesh_shape=(2, 2), constraints={"**/params/*/kernel": P(None, "model")})
    state = step.init(make_state, examples())
    for layer in state["params"].values():
        assert {shard.data.shape for shard in layer["kernel"].addressable_shards} == {(WIDTH, WIDTH // 2)}
    same(after_two(step, state), after_two(jax.jit(train_step), make_state()))


# ------------------------------------------------------------------------------------- several stages on a mesh


@pytest.mark.parametrize(
    ("stages", "options", "homes"),
    [
        (4, {"schedule": "interleaved_1f1b", "mesh_shape": (2, 2)}, (0, 1, 0, 1)),
        pytest.param([[4, 5], [0, 1], [4, 5], [0, 1]], {}, (0, 1, 0, 1), marks=pytest.mark.verify),
        pytest.param(4, {"schedule": folded, "mesh_shape": (4,)}, (0, 1, 1, 0), marks=pytest.mark.verify),
        pytest.param([[0, 1], [2], [2], [0, 1]], {"schedule": folded}, (0, 1, 1, 0), marks=pytest.mark.verify),
    ],
    ids=["interleaved", "devices", "own", "own, devices"],
)
def test_stages_share_meshes(stages: Any, options: Any, homes: tuple[int, ...], tmp_path: Path) -> None:
    """As they are, and by way of a file."""
    expected = after_two(jax.jit(train_step), make_state())
    step = pipeline(train_step, stages, 4, **options)
    same(after_two(step, step.init(make_state, examples())), expected)
    plan = step.last.plan
    assert plan.meshes_of_stages == homes and len(step.last.runs.lists.lists) == 2
    plan.save(tmp_path / "plan.json")
    again = autopar.parallelize(train_step, cluster=eight_slow_devices())
    again.use(Plan.load(tmp_path / "plan.json"))
    same(after_two(again, again.init(make_state, examples())), expected)


def test_the_schedule_of_the_how_to() -> None:
    page = (Path(__file__).parent.parent / "docs" / "how-to" / "pipelines.md").read_text()
    (code,) = re.findall(r"```python\n(from autopar import Order.*?)```", page, flags=re.DOTALL)
    said = {"train_step": train_step, "autopar": autopar}
    exec(code, said)  # as a reader would
    step = said["train_step"].with_options(cluster=eight_slow_devices(), mesh_shape=(4,))
    same(after_two(step, step.init(make_state, examples())), after_two(jax.jit(train_step), make_state()))
    assert step.last.plan.schedule is Schedule.OWN and step.last.plan.meshes_of_stages == (0, 1, 1, 0)


@pytest.mark.verify
def test_values_stay_on_a_mesh_in_another_layout() -> None:
    """A skip connection from stage 1 to stage 3 on the same mesh, which the first wants cut and the other whole."""

    def skipping(params: Any, batch: Any) -> jax.Array:
        first, *layers = params.values()
        seen = x = jnp.tanh(batch["x"] @ first["kernel"] + first["bias"])
        for layer in layers:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean((x + seen @ seen.T @ x - batch["y"]) ** 2)

    options = {"mesh_shape": (2, 2), "schedule": "interleaved_1f1b", "batch_coupling": "per_microbatch"}
    step = pipeline(step_of(skipping), 4, 1, **options)
    same(after_two(step, step.init(make_state, examples())), after_two(jax.jit(step_of(skipping)), make_state()))
    moves = [key for key in step.last.executor.executables if key[1] is Part.MOVE]
    assert moves
    for move in moves:  # a new array, even where the layout is the same: the old one may be donated
        assert step.last.executor.executables[move].memory_analysis().alias_size_in_bytes == 0


def test_gradients_of_weights_are_apart_where_nobody_waits_for_them(tmp_path: Path) -> None:
    step = pipeline(train_step, 2, 4, schedule="zb_h1", mesh_shape=(2, 2))
    expected = after_two(jax.jit(train_step), make_state())
    same(after_two(step, step.init(make_state, examples())), expected)
    first, second = ({key[1] for key in step.last.executor.executables if key[0] == stage} for stage in (0, 1))
    assert Part.BACKWARD not in first, "no stage waits for the first one"
    assert {Part.BACKWARD, Part.WEIGHT} <= second
    products = {
        part: sum(
            one.operator.primitive == "dot_general"
            for one in step.last.runs.stages[1].slices.executable(part).steps
            if isinstance(one, RunStep)
        )
        for part in (Part.BACKWARD, Part.WEIGHT)
    }
    assert products == {Part.BACKWARD: LAYERS // 2, Part.WEIGHT: LAYERS // 2}
    step.last.plan.save(tmp_path / "plan.json")
    again = autopar.parallelize(train_step, cluster=eight_slow_devices())
    again.use(Plan.load(tmp_path / "plan.json"))
    same(after_two(again, again.init(make_state, examples())), expected)


@pytest.mark.verify
def test_a_loop_over_layers_is_not_taken_apart() -> None:
    """Its backward pass makes the gradients of input and weights together, so all of it is what the stage before waits for."""

    def scanned(params: Any, batch: Any) -> jax.Array:
        (first, *rest), x = params.values(), batch["x"]
        x = jnp.tanh(x @ first["kernel"] + first["bias"])
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rest)
        x, _ = jax.lax.scan(lambda x, one: (jnp.tanh(x @ one["kernel"] + one["bias"]), None), x, stacked)
        return jnp.mean((x - batch["y"]) ** 2)

    step = pipeline(step_of(scanned), 2, 4, schedule="zb_h1", mesh_shape=(4,))
    same(after_two(step, step.init(make_state, examples())), after_two(jax.jit(step_of(scanned)), make_state()))
    parts = {key[1] for key in step.last.executor.executables if key[0] == 1}
    assert Part.BACKWARD in parts and Part.WEIGHT not in parts


def test_more_stages_on_a_mesh_are_searched() -> None:
    plan = pipeline(train_step, 4, 4, stages_per_mesh=2, mesh_shape=None).plan(jax.eval_shape(make_state), examples())
    assert plan.schedule is Schedule.INTERLEAVED_ONE_F_ONE_B and plan.meshes_of_stages == (0, 1, 0, 1)


# ------------------------------------------------------------------------------------------------------- the state


def test_state_is_born_on_its_stage_and_stays_there() -> None:
    step = pipeline(train_step, 4, 2, method="zero3")
    state = step.init(make_state, examples())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(jax.jit(make_state)()))
    kernels = [state["params"][f"layer{k}"]["kernel"] for k in range(LAYERS)]
    assert [devices_of(kernel) for kernel in kernels] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert all({shard.data.size for shard in kernel.addressable_shards} == {kernel.size // 2} for kernel in kernels)
    assert "Array(" in repr(state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    for _ in range(2):
        old, (state, _) = state, step(state, examples())
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old["params"]))


def test_a_state_at_home_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    step = in_two_stages()
    state, _ = step(step.init(make_state, examples()), examples())
    whole = {leaf.shape for leaf in jax.tree.leaves(state)} - {()}
    moved: list[tuple[int, ...]] = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *rest, **kw: (moved.append(np.shape(x)), put(x, *rest, **kw))[1])
    step(state, examples())
    rows = BATCH // 2
    assert moved and {shape for shape in moved if shape[:1] != (rows,)}.isdisjoint(whole)


def test_an_old_state_is_refused_by_name() -> None:
    step = in_two_stages()
    state = step.init(make_state, examples())
    step(state, examples())
    with pytest.raises(TraceError, match=r"state\[.*\].* was deleted: an earlier call"):
        step(state, examples())


def test_nothing_is_donated_on_demand() -> None:
    step = pipeline(train_step, 2, 2, donate_argnums=())
    state = step.init(make_state, examples())
    first, _ = step(state, examples())
    again, _ = step(state, examples())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(first), jax.device_get(again))


def test_one_array_may_stand_in_two_places_of_the_state() -> None:
    step = in_two_stages()
    state = step.init(make_state, examples())
    copy = jax.tree.map(np.asarray, state)
    shared = state["params"]["layer1"]["bias"]
    state["params"]["layer0"]["bias"] = shared
    copy["params"]["layer0"]["bias"] = np.asarray(shared)
    same(after_two(step, state), after_two(jax.jit(train_step), copy))


def test_checkpoint(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    step = in_two_stages()
    state, _ = step(step.init(make_state, examples()), examples())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", state)
    assert jax.tree.map(lambda a, b: a.sharding == b.sharding, back, state) == jax.tree.map(lambda _: True, state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), jax.device_get(state))
    same(step(back, examples(1)), jax.jit(train_step)(jax.device_get(state), examples(1)))


# ------------------------------------------------------------------------------------------------- plans and reports


def test_a_saved_plan_is_used(tmp_path: Path) -> None:
    made = pipeline(train_step, 2, 4, schedule="eager_1f1b")
    plan = made.plan(jax.eval_shape(make_state), examples())
    plan.save(tmp_path / "plan.json")
    back = Plan.load(tmp_path / "plan.json")
    assert back == plan
    step = autopar.parallelize(train_step, cluster=eight_slow_devices())
    step.use(back)
    state = step.init(make_state, examples())
    assert devices_of(state["params"]["layer3"]["kernel"]) == (4, 5, 6, 7)
    same(after_two(step, state), after_two(jax.jit(train_step), make_state()))
    assert step.last.plan is back


def test_explanation_and_verification() -> None:
    # On half of the devices: the plan without stages that it is compared with is found in a fraction of the time.
    half = eight_slow_devices().part((0, 1, 2, 3))
    step = autopar.parallelize(train_step, stages=2, num_microbatches=2, mesh_shape=(2,), cluster=half)
    after_two(step, step.init(make_state, examples()))
    text = str(autopar.explain(step))
    assert "2 stages, 1f1b over 2 microbatches" in text and "2, 3" in text and "measured" in text
    with pytest.raises(PlanError, match=r"a pipeline has no one list of steps"):
        _ = step.last.program
    accounts = step.last.memory_analysis()
    assert {(stage, part) for stage, part, _ in accounts} >= {(0, Part.FORWARD), (1, Part.BACKWARD)}
    assert "// stage 1, forward" in step.last.as_text()


def test_gradients_are_reduced_once_per_step() -> None:
    """Data parallel with several microbatches: no pass of a microbatch reduces a gradient, the part after them does.

    On this machine's own figures: where memory is slow, adding pieces and gathering them may be quicker than adding wholes.
    """
    step = autopar.parallelize(train_step, stages=2, num_microbatches=4, method="data_parallel")
    compiled = step.compile(jax.eval_shape(make_state), examples())
    reducing = {
        (stage, part)
        for (stage, part, _), one in compiled.executor.executables.items()
        if re.search(r"= \S.* (all-reduce|reduce-scatter)(-start)?\(", one.as_text())
    }
    assert reducing == {(0, Part.AFTER), (1, Part.AFTER)}


def test_the_steps_of_a_loop_over_microbatches_are_sound() -> None:
    step = autopar.parallelize(train_step, num_microbatches=4, method="data_parallel", cluster=eight_slow_devices())
    verify_program(step.compile(jax.eval_shape(make_state), examples()).program)


# ------------------------------------------------------------------------------------------------------------ misuse


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stages": 9, "method": "zero2"},
            r"stages=9 are more than the 8 devices of slow devices; ask for fewer",
        ),
        ({"stages": 0}, r"stages=0 is no number of stages"),
        ({"stages": "two"}, r"stages='two' is no number of stages and no list of device ids"),
        ({"stages": [[0, 1], [1, 2]]}, r"the device 1 stands there twice"),
        ({"stages": [[0, 1]]}, r"must name two stages or more"),
        ({"stages": [[0, 1], [8]]}, r"stage 2 has the device 8, and the devices of slow devices are 0 to 7"),
        (
            {"stages": 2, "schedule": "2f2b"},
            r"schedule='2f2b' is no schedule .*gpipe, 1f1b, eager_1f1b, interleaved_1f1b",
        ),
        ({"stages": 2, "schedule": "own"}, r"schedule='own' is no schedule .* returns an autopar.Order"),
        ({"stages": 2, "schedule": "interleaved_1f1b"}, r"stages=2 cannot be dealt round: .* stages=4 is the least"),
        ({"stages": 4, "stages_per_mesh": 0}, r"stages_per_mesh=0 is no number of stages"),
        ({"stages": 4, "stages_per_mesh": 3}, r"stages_per_mesh=3 does not deal stages=4 to two meshes or more"),
        ({"stages": 4, "stages_per_mesh": 4}, r"stages_per_mesh=4 does not deal stages=4 to two meshes or more"),
        (
            {"stages_per_mesh": 2},
            r"stages_per_mesh=2 deals a number of stages; say how many in all, for example stages=4",
        ),
        (
            {"stages": 4, "stages_per_mesh": 2, "schedule": "gpipe"},
            r"schedule='gpipe' and stages_per_mesh=2 do not go together: 'interleaved_1f1b' has two stages or more",
        ),
        (
            {"stages": [[0], [1], [0], [1]], "schedule": "gpipe"},
            r"schedule 'gpipe' has a mesh for each stage, not 2 for 4; the schedule of several stages on a mesh is",
        ),
        (
            {"stages": [[0], [1], [1], [0]]},
            r"runs the stages 1 and 3 on one mesh, and they have the devices \[0\] and \[1\]; give each the same devices",
        ),
        (
            {"stages": 4, "schedule": lambda stages, microbatches: Order(stages, microbatches, ())},
            r"the order of 4 stages and \d+ microbatches lacks backward of stage 0, microbatch 0; add it",
        ),
        ({"stages": 2, "schedule": "single"}, r"schedule='single' is no schedule"),
        ({"schedule": "gpipe"}, r"schedule='gpipe' orders the microbatches of a pipeline, and no stages are asked for"),
        ({"stages": 2, "num_microbatches": 3}, r"num_microbatches=3 does not divide the batch of 16"),
        ({"stages": 2, "mesh_shape": (8,)}, r"mesh_shape=\(8,\) does not fit"),
        ({"stages": 2, "constraints": {"**/kernal": P("data")}}, r"'\*\*/kernal' matches no argument leaf"),
        pytest.param(
            {"stages": 2, "memory_per_device": 1000}, r"no plan keeps .* per device", marks=pytest.mark.verify
        ),
    ],
)
def test_misuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        autopar.parallelize(train_step, cluster=eight_slow_devices(), **options).plan(
            jax.eval_shape(make_state), examples()
        )


def test_more_stages_than_the_model_has_parts() -> None:
    def linear(state: Any, batch: Any) -> Any:
        return state - jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state)

    step = pipeline(linear, 8, 2)
    with pytest.raises(PlanError, match=r"the forward pass can be cut into \d layers?, too few for 8 stages"):
        step.plan(jnp.ones((WIDTH, WIDTH)), examples()["x"])


def test_an_error_on_one_stage_ends_the_step_once() -> None:
    fails = {"now": False}

    def seen(x: np.ndarray) -> np.ndarray:
        if fails["now"]:
            raise ValueError("the second stage has had enough")
        return x

    def loss(params: Any, batch: Any) -> jax.Array:
        out = hidden(params, batch["x"])
        total = jnp.mean((out - batch["y"]) ** 2)
        watched = jax.pure_callback(seen, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(total))
        return total + 0.0 * watched

    step = pipeline(step_of(loss), 2, 2, donate_argnums=())
    state = step.init(make_state, examples())
    expected, _ = step(state, examples())
    fails["now"] = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="the second stage has had enough"):
        step(state, examples())
    fails["now"] = False
    again, _ = step(state, examples())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(expected))


@pytest.mark.verify
def test_the_process_ends_when_it_is_done() -> None:
    program = textwrap.dedent("""
        import autopar
        from tests.test_pipeline import examples, make_state, pipeline, train_step
        step = pipeline(train_step, 2, 2)
        step(step.init(make_state, examples()), examples())
        print("done")
    """)
    ended = subprocess.run(
        [sys.executable, "-c", "import tests.conftest\n" + program],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0 and ended.stdout.strip() == "done", ended.stderr
