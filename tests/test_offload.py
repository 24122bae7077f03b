"""Is a state in the memory of the host the same state, is its price what was said, and does it lie there where that pays?"""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import _compat
from autopar.cluster import Cluster, Link
from autopar.errors import BudgetError, PlanError
from autopar.graph.build import build_graph
from autopar.graph.idle_state import idle_until_update
from autopar.graph.roles import infer_roles
from autopar.graph.tracing import trace
from autopar.likeness import Likeness, types_of
from autopar.plan import Offload, Remat
from benchmarks.models import FAMILIES, Model, build
from benchmarks.offload import mlp
from tests.test_correctness import STEPS, wrong_leaves
from tests.toy_runs import eight_slow_devices, precision, reference, refuses_edited_plan, run

HOST = "pinned_host"
OF_OPTIMIZERS = re.compile(r"\b(mu|nu|trace|sum_of_squares|v|v_row|v_col)\b")


# ------------------------------------------------------------------------------------------------- which leaves are idle


def idle_leaves(step: Any, state: Any, batch: Any) -> set[str]:
    program = trace(step, (state, batch), {})
    graph = build_graph(program.jaxpr, platform="cuda")
    return {program.in_paths[position] for position in idle_until_update(graph, infer_roles(program).state_pairs)}


@pytest.mark.parametrize("name", ["gpt", "mlp_nnx", *(pytest.param(n, marks=pytest.mark.verify) for n in FAMILIES)])
def test_moments_are_idle_and_parameters_are_not(name: str) -> None:
    """The names of leaves, which the planner does not look at, say what they are."""
    model = build(name)
    state = model.abstract_state()
    found = idle_leaves(model.train_step, state, model.abstract_batch())
    paths = {f"state{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    moments = {path for path, leaf in paths.items() if leaf.shape and OF_OPTIMIZERS.search(path)}
    assert moments and found <= moments
    held, all_of_them = (sum(math.prod(paths[path].shape) for path in those) for those in (found, moments))
    assert held > 0.95 * all_of_them  # what is left is small


def averaging(of_master: bool) -> Any:
    """Plain descent with a narrow copy of the weights, an average, and a buffer that never changes."""

    def step(state: Any, batch: Any) -> Any:
        narrow = state["master"].astype(jnp.bfloat16) if of_master else state["narrow"]
        loss, gradient = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(batch["x"] @ w)))(narrow)
        master = state["master"] - 0.1 * gradient.astype(jnp.float32)
        average = 0.9 * state["average"] + 0.1 * master
        kept = 0 * state["narrow"] + master.astype(jnp.bfloat16)
        return {"master": master, "average": average, "narrow": kept, "fixed": state["fixed"]}, loss

    return step


@pytest.mark.parametrize(
    ("of_master", "idle"),
    [(False, {"state['master']", "state['average']"}), (True, {"state['narrow']", "state['average']"})],
)
def test_idle_is_what_only_the_update_reads_and_makes(of_master: bool, idle: set[str]) -> None:
    wide, narrow = (jax.ShapeDtypeStruct((64, 64), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    state = {"master": wide, "average": wide, "fixed": wide, "narrow": narrow}
    assert idle_leaves(averaging(of_master), state, {"x": jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)}) == idle


# --------------------------------------------------------------------------------------------------------- whole steps


def kinds_of(tree: Any) -> dict[str, str]:
    """Memory kinds by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf.sharding.memory_kind for path, leaf in leaves}


PRODUCT = [
    (name, options)
    for name in FAMILIES
    for options in ({"method": "zero2"}, {"method": "tensor_parallel"}, {"mesh_shape": (2, 4), "remat": "full"})
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp_nnx", {"method": "zero3"}),
        pytest.param("mlp_nnx", {"mesh_shape": (2, 4), "num_microbatches": 2}, marks=pytest.mark.verify),
        pytest.param("gpt", {"mesh_shape": (2, 4), "num_microbatches": 2}, marks=pytest.mark.verify),
        *(pytest.param(*case, marks=pytest.mark.verify) for case in PRODUCT),
    ],
)
def test_the_same_numbers(name: str, options: dict[str, Any]) -> None:
    """Ten steps in float64; the state is born, stays, and is donated where it lies."""
    expected = reference(name, jnp.float64, STEPS)
    with precision(jnp.float64):
        model = build(name, dtype=jnp.float64)
        step = autopar.parallelize(model.train_step, offload="optimizer_state", cluster=eight_slow_devices(), **options)
        state = step.init(model.make_state, model.abstract_batch())
        before = kinds_of(state)
        got = run(model, step, state, STEPS)
        plan = step.last.plan
        assert plan.offload is Offload.OPTIMIZER_STATE
        hosted = {plan.in_paths[position].removeprefix("state") for position in plan.hosted}
        assert {path for path, kind in before.items() if kind == HOST} == hosted
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.sharding.memory_kind == HOST)
        after, _ = step(step.init(model.make_state, model.abstract_batch()), model.make_batch(model.batch_size))
        assert kinds_of(after) == before
    assert wrong_leaves(expected.state, got.state) == {}
    for ours, theirs in zip(got.metrics, expected.metrics, strict=True):
        assert wrong_leaves(theirs, ours) == {}


@pytest.mark.verify
def test_what_is_on_the_host_is_not_moved_between_steps() -> None:
    """Leaves that lie as the plan wants go in as they are; others are brought there."""
    model = build("mlp_nnx")
    step = autopar.parallelize(model.train_step, method="zero2", offload="optimizer_state")
    batch = model.make_batch(model.batch_size)
    state = step.init(model.make_state, batch)
    compiled = step.compile(state, batch)
    placed = compiled.executor.place([*jax.tree.leaves((state, batch)), *compiled.subject.program.hidden])
    leaves = jax.tree.leaves(state)
    assert all(given is taken for given, taken in zip(leaves, placed[: len(leaves)], strict=True))
    elsewhere = jax.tree.map(np.asarray, state)
    moved, _ = step(elsewhere, batch)
    assert kinds_of(moved) == kinds_of(state)


def test_checkpoints_come_back_where_they_lay(tmp_path: Any) -> None:
    model = mlp(width=64, layers=2, examples=16)
    batch = model.make_batch(16)
    step = autopar.parallelize(model.train_step, method="zero2", offload="optimizer_state")
    state, _ = step(step.init(model.make_state, batch), batch)
    checkpoints = autopar.Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.close()
    for other in (step, autopar.parallelize(model.train_step, method="data_parallel", offload="none")):
        found = autopar.Checkpoints(tmp_path).restore(other, model.make_state, batch).state
        hosted = HOST in kinds_of(found).values()
        assert hosted is (other is step)
        if hosted:
            assert kinds_of(found) == kinds_of(state)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        other(found, batch)


OPTIMIZER = optax.adam(1e-2)


def make_averaged() -> Any:
    weights = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)
    return {"weights": weights, "average": weights, "moments": OPTIMIZER.init(weights)}


def predict(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ weights))


def train(state: Any, x: jax.Array) -> Any:
    gradient = jax.grad(predict)(state["weights"], x)
    updates, moments = OPTIMIZER.update(gradient, state["moments"])
    weights = optax.apply_updates(state["weights"], updates)
    return {"weights": weights, "average": 0.9 * state["average"] + 0.1 * weights, "moments": moments}


def evaluate(state: Any, x: jax.Array) -> Any:
    return predict(state["weights"], x), predict(state["average"], x)


def test_evaluation_takes_the_state_as_it_lies() -> None:
    """It reads parameters, and an average that training keeps on the host; moments it does not touch."""
    step = autopar.parallelize(train, method="zero2", offload="optimizer_state")
    x = np.linspace(0, 1, 16 * 64, dtype=np.float32).reshape(16, 64)
    state = step(step.init(make_averaged, x), x)
    like = autopar.parallelize(evaluate, like=step)
    wanted = jax.jit(evaluate)(jax.tree.map(np.asarray, state), x)
    for ours, theirs in zip(like(state, x), wanted, strict=True):
        np.testing.assert_allclose(float(ours), float(theirs), rtol=1e-6)
    plans = step.last.plan, like.last.plan
    assert [len(plan.hosted) for plan in plans] == [3, 3]
    assert {plan.in_paths[k] for plan in plans for k in plan.hosted} == {plans[0].in_paths[k] for k in plans[0].hosted}
    leaves = jax.tree.leaves(state)
    placed = like.last.executor.place([*leaves, x])
    assert all(given is taken for given, taken in zip(leaves, placed[: len(leaves)], strict=True))
    step(state, x)


def test_evaluation_pays_for_what_it_reads() -> None:
    """On GPUs: the average is copied to the device, and is there with the parameters; three arrays stay on the host."""
    shapes, x = jax.eval_shape(make_averaged), jax.ShapeDtypeStruct((16, 64), jnp.float32)
    subject, plan, _ = autopar.parallelize(train, cluster=gpus(1), offload="optimizer_state").records(shapes, x)
    known = Likeness(plan, subject.program.in_keys, types_of(subject.program), subject.roles, {})
    other = SimpleNamespace(
        cluster=gpus(1), likeness=lambda: known
    )  # a step with that plan, which this process cannot run
    found = autopar.parallelize(evaluate, like=other).plan(shapes, x)
    square = 64 * 64 * 4
    memory = found.prediction.memory
    assert found.prediction.host_seconds == pytest.approx(square / 2e10)
    assert (len(found.hosted), memory.host_bytes) == (3, 3 * square)
    assert memory.by_kind["copies of arrays in host memory"] == square
    assert memory.argument_bytes == square + 16 * 64 * 4 + 4  # the parameters, the batch, a counter


# ----------------------------------------------------------------------------------------------------------- its price


def gpus(count: int, bytes_per_second: float = 2e10, shared_by: int = 1) -> Cluster:
    """Described A100s; the link to their hosts has no latency."""
    link = Link(0.0, bytes_per_second, shared_by)
    return Cluster.preset("p4d.24xlarge").part(tuple(range(count))).replace(host_memory_link=link)


def planned(model: Model, cluster: Cluster, **options: Any) -> autopar.Plan:
    step = autopar.parallelize(model.train_step, cluster=cluster, **options)
    return step.plan(model.abstract_state(), model.abstract_batch())


WHOLE = {"method": "intra_op", "num_microbatches": 1, "remat": "none"}
"""One mesh and nothing else to save memory by."""


def test_bytes_and_seconds() -> None:
    """By hand: two moments, to the device and back, of which each of four devices has a quarter, two at a time on a link."""
    model = mlp(width=512, layers=4, examples=16)
    moments = 2 * 4 * 512 * 512 * 4
    for method, pieces in (("data_parallel", 1), ("zero2", 4)):
        there, here = (
            planned(model, gpus(4, 1e9, shared_by=2), method=method, offload=choice, memory_per_device=1e15)
            for choice in ("optimizer_state", "none")
        )
        memory = there.prediction.memory
        assert memory.host_bytes == moments / pieces == here.prediction.memory.argument_bytes - memory.argument_bytes
        assert memory.host_bytes == here.prediction.memory.output_bytes - memory.output_bytes
        assert memory.host_bytes == here.prediction.memory.alias_bytes - memory.alias_bytes
        seconds = 2 * (moments / pieces) * 2 / 1e9
        assert there.prediction.host_seconds == pytest.approx(seconds, rel=1e-9)
        assert there.step_seconds - here.step_seconds == pytest.approx(seconds, rel=1e-3)
        # Two layers' moments are on the device while they are updated.
        in_flight = 2 * 2 * 512 * 512 * 4 / pieces
        assert memory.by_kind["copies of arrays in host memory"] == in_flight
        assert memory.temp_bytes == here.prediction.memory.temp_bytes + in_flight


def test_the_planner_cuts_what_it_copies() -> None:
    """Cut moments are copied in less time, so where the link is slow they are cut, and regardless of memory."""
    model = mlp(width=512, layers=4, examples=4096)
    slow = planned(model, gpus(4, 1e8), offload="optimizer_state", **WHOLE)
    assert slow.prediction.memory.host_bytes == 2 * 4 * 512 * 512 * 4 / 4


def test_on_cpu_there_is_one_memory() -> None:
    """What XLA:CPU says of arguments is what is predicted: nothing is saved, and nothing is copied."""
    model = build("mlp_nnx")
    step = autopar.parallelize(model.train_step, method="zero2", offload="optimizer_state")
    compiled = step.compile(model.abstract_state(), model.abstract_batch())
    memory, found = compiled.plan.prediction.memory, compiled.memory_analysis()
    assert memory.argument_bytes == found.argument_size_in_bytes
    assert (memory.host_bytes, compiled.plan.prediction.host_seconds) == (0, 0.0)
    assert found.host_argument_size_in_bytes == 0
    assert autopar.verify_plan(step, model.abstract_state(), model.abstract_batch()).agrees


@pytest.mark.gpu_compiler
@pytest.mark.timeout(600)
@pytest.mark.skipif(not _compat.has_gpu_compiler(), reason="the extra gpu-compiler is not installed; make verify-gpu")
@pytest.mark.parametrize(
    ("examples", "method"),
    [
        (64, "data_parallel"),
        (64, "zero2"),
        (16384, "data_parallel"),
        (16384, "zero2"),
    ],
)
def test_the_compiler_of_h100s_keeps_it_on_the_host(examples: int, method: str) -> None:
    """Arguments are exact on both sides, and what is on the device besides is no more than predicted, but for 5% of all."""
    model = mlp(width=2048, layers=8, examples=examples)
    cluster = Cluster.preset("p5.48xlarge").part((0, 1, 2, 3))
    arguments = model.abstract_state(), model.abstract_batch()
    step = autopar.parallelize(model.train_step, method=method, offload="optimizer_state", num_microbatches=1)
    there, here = (
        autopar.verify_plan(one, *arguments, cluster=cluster, compiler="h100")
        for one in (step, step.with_options(offload="none"))
    )
    pieces = 4 if method == "zero2" else 1
    assert there.figure("arguments in host memory").compiled == 2 * 8 * 2048 * 2048 * 4 / pieces
    assert all(there.figure(what).agrees for what in ("arguments", "arguments in host memory", "outputs", "alias"))
    # Copies back are started and awaited, and never more than those of two layers are under way.
    text = step.compile(*arguments, cluster=cluster, compiler="h100").as_text()
    under_way = most = 0
    for line in text[text.index("ENTRY") :].splitlines():
        under_way += " copy-start(" in line
        under_way -= " copy-done(" in line
        most = max(most, under_way)
    assert 1 <= most <= 4
    temporaries = there.figure("temporaries"), here.figure("temporaries")
    predicted = temporaries[0].predicted - temporaries[1].predicted
    assert (
        temporaries[0].compiled - temporaries[1].compiled <= predicted + 0.05 * there.figure("memory in all").compiled
    )


# ---------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize("bytes_per_second", [1e9, 2e11, 1e13])
@pytest.mark.parametrize(
    "share", [0.52, *(pytest.param(one, marks=pytest.mark.verify) for one in (0.48, 0.6, 0.7, 0.8))]
)
def test_the_faster_of_both(bytes_per_second: float, share: float) -> None:
    """Against both plans made on demand: where the state lies as it is fastest, and on the devices where it is all one."""
    model, cluster = mlp(width=1024, layers=4, examples=8192), gpus(1, bytes_per_second)
    free = planned(model, cluster, method="intra_op", num_microbatches=1, memory_per_device=1e15, offload="none")
    options = {"method": "intra_op", "memory_per_device": share * free.peak_bytes}
    here, there = (_seconds(model, cluster, offload=choice, **options) for choice in ("none", "optimizer_state"))
    found = planned(model, cluster, **options)
    assert found.step_seconds == min(here, there)
    assert found.peak_bytes <= options["memory_per_device"]
    assert found.offload is (Offload.OPTIMIZER_STATE if there < here else Offload.NONE)
    if share == 0.52:  # of the rates one is too low to be looked at, one too low to win, and one wins
        assert (there < here) is (bytes_per_second == 1e13)


def _seconds(model: Model, cluster: Cluster, **options: Any) -> float:
    try:
        return planned(model, cluster, **options).step_seconds
    except BudgetError:
        return math.inf


def test_it_is_taken_where_nothing_fits_and_declined_elsewhere() -> None:
    model = mlp(width=1024, layers=4, examples=64)
    cluster = gpus(1)
    free = planned(model, cluster, memory_per_device=1e15, offload="none", **WHOLE)
    lean = planned(model, cluster, memory_per_device=1e15, offload="optimizer_state", **WHOLE)
    between = (free.peak_bytes + lean.peak_bytes) / 2
    assert planned(model, cluster, **WHOLE).offload is Offload.NONE
    found = planned(model, cluster, memory_per_device=between, **WHOLE)
    assert found.offload is Offload.OPTIMIZER_STATE and found.peak_bytes <= between
    said = planned(model, cluster, memory_per_device=between, offload="auto", **WHOLE)
    assert dataclasses.replace(said, solver=found.solver) == found
    with pytest.raises(BudgetError):
        planned(model, cluster, memory_per_device=between, offload="none", **WHOLE)
    with pytest.raises(BudgetError, match=r"state on the hosts .* does not fit either") as caught:
        planned(model, cluster, memory_per_device=between / 10, **WHOLE)
    assert caught.value.needed_bytes > between / 10
    # Without a known link, and by a method that an expert wrote, it is not tried.
    for method in ("data_parallel", "zero2"):
        with pytest.raises(BudgetError):
            planned(model, cluster, memory_per_device=between, num_microbatches=1, method=method)
    with pytest.raises(BudgetError):
        planned(model, cluster.replace(host_memory_link=None), memory_per_device=between, **WHOLE)


@pytest.mark.verify
def test_more_devices_are_the_better_remedy() -> None:
    """Four devices cut the moments for nothing, so they stay there."""
    model = mlp(width=1024, layers=4, examples=64)
    alone = planned(model, gpus(1), memory_per_device=1e15, offload="none", **WHOLE)
    assert planned(model, gpus(4), memory_per_device=0.8 * alone.peak_bytes).offload is Offload.NONE


def test_it_goes_with_layers_that_compute_again() -> None:
    """Where neither alone is enough, both are taken."""
    model, cluster = mlp(width=512, layers=6, examples=4096), gpus(1)
    options = {"method": "intra_op", "num_microbatches": 1}
    peaks = {
        (remat, offload): planned(
            model, cluster, memory_per_device=1e15, remat=remat, offload=offload, **options
        ).peak_bytes
        for remat in ("none", "full")
        for offload in ("none", "optimizer_state")
    }
    both = peaks.pop(("full", "optimizer_state"))
    budget_bytes = (both + min(peaks.values())) / 2
    found = planned(model, cluster, memory_per_device=budget_bytes, **options)
    assert found.offload is Offload.OPTIMIZER_STATE and found.remat.is_any and Remat.FULL in found.remat.kinds


# -------------------------------------------------------------------------------------------- demands, files and words


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"offload": "disk"}, 'offload=\'disk\' is unknown; say "none" or "optimizer_state"'),
        ({"offload": "optimizer_state", "stages": 2}, "that of stages stays on their devices"),
        ({"offload": "optimizer_state", "method": "inter_op"}, "that of stages stays on their devices"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        autopar.parallelize(lambda state, batch: state, **options)


def test_demands_that_cannot_be_met() -> None:
    model = mlp(width=64, layers=2, examples=8)
    with pytest.raises(PlanError, match=r"does not say how fast .* cluster\.replace\(host_memory_link="):
        planned(model, gpus(1).replace(host_memory_link=None), offload="optimizer_state")
    with pytest.raises(PlanError, match="finds nothing: the step returns no state"):
        planned(mlp(width=64, layers=2, examples=8, optimizer=optax.sgd(0.1)), gpus(1), offload="optimizer_state")
    step = autopar.parallelize(model.train_step)
    with pytest.raises(PlanError, match="offload= asks for others"):
        autopar.parallelize(model.train_step, like=step, offload="optimizer_state")


def test_plans_are_files_and_run_again(tmp_path: Any) -> None:
    model = mlp(width=64, layers=2, examples=16)
    step = autopar.parallelize(model.train_step, offload="optimizer_state", cluster=eight_slow_devices())
    batch = model.make_batch(16)
    plan = step.plan(model.abstract_state(), batch)
    plan.save(tmp_path / "plan.json")
    again = autopar.parallelize(model.train_step, cluster=eight_slow_devices())
    again.use(autopar.Plan.load(tmp_path / "plan.json"))
    state, metrics = again(again.init(model.make_state, batch), batch)
    assert again.last.plan == plan and HOST in kinds_of(state).values()
    assert np.isfinite(float(metrics["loss"]))
    notes = " ".join(autopar.explain(again).notes)
    assert "lie in the memory of the hosts between steps. Here that is the memory of the devices" in notes


@pytest.mark.parametrize(
    ("hosted", "message"),
    [
        ([3, 2], r"\$\.plan\.hosted: \[3, 2\] do not ascend"),
        ([10_000], r"\$\.plan\.hosted: there is no input 10000"),
        ([-1], r"Expected `int` >= 0 - at `\$\.plan\.hosted\[0\]`"),
        ("batch", r"keeps batch.* in the memory of the hosts, which is no state of this step"),
    ],
)
def test_files_that_make_no_sense(hosted: Any, message: str, tmp_path: Any) -> None:
    def edit(plan: dict[str, Any]) -> None:
        first = next(k for k, path in enumerate(plan["in_paths"]) if path.startswith("batch"))
        plan["hosted"] = [first] if hosted == "batch" else hosted

    refuses_edited_plan(edit, message, tmp_path)


def test_explanations_say_what_lies_there_what_it_costs_and_why() -> None:
    model = mlp(width=1024, layers=4, examples=64)
    free = planned(model, gpus(1), memory_per_device=1e15, offload="none", **WHOLE)
    step = autopar.parallelize(model.train_step, cluster=gpus(1), memory_per_device=0.8 * free.peak_bytes, **WHOLE)
    found = autopar.explain(step, model.abstract_state(), model.abstract_batch())
    kinds = dict(found.memory.by_kind)
    assert kinds.get("optimizer state", 0) < 1024  # a counter
    assert found.memory.host_bytes == 2 * 4 * 1024 * 1024 * 4
    assert sum(size for kind, size in found.memory.by_kind) == found.memory.total_bytes
    assert found.time.host_seconds == pytest.approx(2 * 2 * 4 * 1024 * 1024 * 4 / 2e10)
    (note,) = (note for note in found.notes if "memory of the hosts" in note)
    assert (
        "no plan with them on the devices keeps" in note
        and "32.0 MiB off each device" in note
        and "of the step" in note
    )
    lines = [" ".join(line.split()) for line in str(found).splitlines()]
    assert "in all 16.0 MiB" in lines and "in host memory 32.0 MiB" in lines
    assert any(line.startswith("copies from and to host") for line in lines)
    asked = autopar.explain(
        step.with_options(offload="optimizer_state"), model.abstract_state(), model.abstract_batch()
    )
    assert any("you asked for it" in note for note in asked.notes)
