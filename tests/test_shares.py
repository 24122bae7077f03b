"""The whole model on several meshes with unlike numbers of microbatches."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.cluster import Cluster, Link
from autopar.errors import PlanError
from autopar.graph.roles import Role, infer_roles
from autopar.graph.tracing import trace
from autopar.inter_op.examples import examples_of
from autopar.inter_op.shares import in_shares
from autopar.methods import Shares
from autopar.plan import Schedule
from autopar.schedule.stage_program import Passing
from autopar.share_search import dealt_by, kinds_of
from autopar.subjects import subject_of
from benchmarks.models import Model, build
from tests.pipeline_enumerator import FAST, cluster_of, mlp, with_faster
from tests.ray_cases import assert_equal, batch_of, create
from tests.ray_cases import train_step as ray_step
from tests.test_uneven import check, slow_devices
from tests.toy_runs import precision

HALF = jnp.float16


def two_kinds(network: float = FAST) -> Cluster:
    """Two hosts of one device; the second does three times as much."""
    return with_faster(cluster_of(2, 1, network=network), (1,))


def running(hosts: int, fast: tuple[int, ...]) -> Cluster:
    """So many of this process's devices, on a host each; some do four times as much as the others."""
    cluster = slow_devices(hosts, hosts=hosts)
    kind = replace(cluster.device, flops_per_second={"float32": 4e8, "float64": 4e8}, memory_bytes_per_second=4e8)
    return cluster.replace(network_link=Link(1e-3, 1e6), host_devices=dict.fromkeys(fast, kind))


def planned(model: Model, cluster: Cluster, **options: Any) -> autopar.Plan:
    """From descriptions only."""
    step = autopar.parallelize(model.train_step, cluster=cluster, **options)
    return step.plan(model.abstract_state(), model.abstract_batch())


# ------------------------------------------------------------------------------------------------------------ dealing


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=3), st.integers(0, 6))
def test_no_other_dealing_is_done_sooner(seconds: list[float], more: int) -> None:
    count = len(seconds) + more
    found = dealt_by(seconds, count)
    all_ways = itertools.product(range(1, count + 1), repeat=len(seconds))
    best = min(max(map(float.__mul__, seconds, map(float, way))) for way in all_ways if sum(way) == count)
    assert sum(found) == count and min(found) >= 1
    assert max(one * share for one, share in zip(seconds, found, strict=True)) == pytest.approx(best)


def test_meshes_are_the_kinds_of_devices() -> None:
    assert kinds_of(with_faster(cluster_of(3, 2, network=1e9), (1,))) == ((0, 1, 4, 5), (2, 3))


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("shares", [(1, 3), (2, 1, 1)], ids=str)
def test_the_rewritten_step_computes_the_same(shares: tuple[int, ...]) -> None:
    """Sums, what is made for each example, and what the examples share, as the step that was not cut makes them."""

    def step(state: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            each = jnp.tanh(batch["x"] @ weights) @ weights.T
            return jnp.mean(each**2) + jnp.sum(weights**2), each

        (value, each), gradient = jax.value_and_grad(loss, has_aux=True)(state["w"])
        return {"w": state["w"] - 0.1 * gradient}, {"loss": value, "each": each, "most": jnp.max(batch["x"])}

    with precision(jnp.float64):
        drawn = np.random.default_rng(0)
        state, batch = {"w": drawn.normal(size=(6, 4))}, {"x": drawn.normal(size=(8, 6))}
        program = trace(step, (state, batch), {})
        roles = infer_roles(program)
        graph = subject_of(program, roles, "cpu").graph
        rows = roles.leaves(Role.BATCH)
        dealt = in_shares(program, examples_of(graph, rows, roles.leaves(Role.STATE), 4), rows, shares)
        leaves = [state["w"], batch["x"].reshape(4, 2, 6)]
        found = jax.core.eval_jaxpr(dealt.jaxpr.jaxpr, dealt.jaxpr.consts, *leaves)
        for one, other in zip(found, jax.tree.leaves(step(state, batch)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13)


@pytest.mark.parametrize(
    ("name", "hosts", "fast", "method"),
    [
        ("mlp_nnx", 3, (0, 2), "shares"),
        pytest.param("gpt", 3, (0, 2), Shares((3, 1)), marks=pytest.mark.verify),
        pytest.param("moe", 2, (1,), Shares((1, 3)), marks=pytest.mark.verify),
        pytest.param("unet", 3, (1,), "shares", marks=pytest.mark.verify),
        pytest.param("gpt_scan", 4, (0, 1), Shares((6, 2)), marks=pytest.mark.verify),
        pytest.param("lstm", 2, (0,), Shares((3, 1)), marks=pytest.mark.verify),
        pytest.param("vit", 2, (0,), Shares((3, 1)), marks=pytest.mark.verify),
        pytest.param("llama_nnx", 2, (0,), Shares((3, 1)), marks=pytest.mark.verify),
    ],
)
def test_steps_have_the_numbers_of_one_device(name: str, hosts: int, fast: tuple[int, ...], method: Any) -> None:
    plan = check(name, running(hosts, fast), method=method)
    assert plan.schedule is Schedule.SHARES and sum(plan.shares) == plan.num_microbatches
    if isinstance(method, Shares):
        assert plan.shares == method.microbatches
    else:
        assert plan.shares[0] > plan.shares[1] if 0 in fast else plan.shares[0] < plan.shares[1]


@pytest.mark.verify
def test_meshes_of_the_users_on_three_meshes() -> None:
    """Like devices in a number that does not divide the batch: three of eight examples on each but one."""
    plan = check("mlp_nnx", slow_devices(3), method=Shares((3, 3, 2)), stages=[[2], [0], [1]])
    assert [stage.devices for stage in plan.stages] == [(2,), (0,), (1,)] and plan.num_meshes == 3


@pytest.mark.verify
def test_on_ray(cluster: autopar.Cluster) -> None:
    """Two hosts of two devices, each with the whole model; gradients cross between their worlds."""
    step = autopar.parallelize(cluster=cluster, method=Shares((3, 1)), stages=2)(ray_step)
    state, plain = step.init(lambda: create(0), batch_of(0)), create(0)
    for number in range(2):
        state, metrics = step(state, batch_of(number))
        plain, wanted = jax.jit(ray_step)(plain, batch_of(number))
        assert_equal(metrics, wanted)
    assert_equal(state, plain)
    assert step.last.plan.shares == (3, 1) and len(step.last.executor.worlds) == 2


# ------------------------------------------------------------------------------------------------------- what crosses


def crossings_of(step: Any, plan_of: tuple[Any, ...]) -> list[Any]:
    subject, plan, _ = step.records(*plan_of)
    return list(step.account(subject, plan, step.cluster).whole.pipeline.crossings)


def test_every_leaf_crosses_once_each_way_and_they_are_dealt_evenly() -> None:
    model = mlp((64,) * 9, 32)
    step = autopar.parallelize(model.train_step, cluster=two_kinds(), method=Shares((1, 3)))
    found = crossings_of(step, (model.abstract_state(), model.abstract_batch()))
    params = 8 * 64 * 64 * 4
    for passing in (Passing.START, Passing.LATE):
        bytes_to = [
            sum(one.size_bytes for one in found if one.passing is passing and one.target == stage) for stage in (0, 1)
        ]
        scalars = 4 if passing is Passing.LATE else 0  # the loss
        assert bytes_to[0] - bytes_to[1] in (0, scalars) and sum(bytes_to) == params + scalars
    assert not [one for one in found if one.passing is Passing.MICRO]


def test_sums_cross_in_the_type_in_which_they_were_added() -> None:
    """Gradients in half precision that the update reads in single precision cross in half."""

    def step(state: Any, batch: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(batch["x"] @ w).astype(jnp.float32)))(state["w"].astype(HALF))
        momentum = 0.9 * state["m"] + gradient.astype(jnp.float32)
        return {"w": state["w"] - 0.1 * momentum, "m": momentum}, {}

    state = dict.fromkeys(("w", "m"), jax.ShapeDtypeStruct((64, 64), jnp.float32))
    batch = {"x": jax.ShapeDtypeStruct((8, 64), HALF)}
    for dtype, size in (("same", 2), ("float32", 4)):
        one = autopar.parallelize(step, cluster=two_kinds(), method=Shares((1, 3)), accumulator_dtype=dtype)
        late = [crossing for crossing in crossings_of(one, (state, batch)) if crossing.passing is Passing.LATE]
        assert [crossing.size_bytes for crossing in late] == [64 * 64 * size]


# ------------------------------------------------------------------------------------------------------------- choice


def test_one_layer_cannot_be_cut_but_its_batch_can_be_dealt() -> None:
    model = mlp((64, 64), 256)
    both = planned(model, two_kinds())
    assert both.method == "auto" and both.shares and both.shares[1] == 3 * both.shares[0]
    alone = planned(model, two_kinds().part((1,)))
    assert both.step_seconds < 0.8 * alone.step_seconds


def test_a_slow_network_is_left_to_pipelines() -> None:
    """Activations of few examples are fewer bytes than all gradients."""
    model = mlp((64,) * 9, 32)
    cluster = two_kinds(network=3e5)
    free, dealt = planned(model, cluster), planned(model, cluster, method="shares")
    assert free.is_pipeline and not free.shares
    assert free.step_seconds < dealt.step_seconds


def test_no_other_shares_are_faster() -> None:
    """All of them, in all numbers of microbatches, planned on their own."""
    model, cluster = mlp((64, 64, 32), 64), two_kinds(network=3e6)
    found = planned(model, cluster, method="shares")
    counts = [2, 4, 8, 16]
    every = [
        planned(model, cluster, method=Shares((first, count - first))).step_seconds
        for count in counts
        for first in range(1, count // 2 + 1)
    ]
    assert found.step_seconds <= 1.01 * min(every)


# ----------------------------------------------------------------------------------------------- files, explanations


def test_plans_are_files_and_say_what_they_are(tmp_path: Path) -> None:
    model = mlp((64, 64), 256)
    step = autopar.parallelize(model.train_step, cluster=two_kinds(), method="shares")
    plan = step.plan(model.abstract_state(), model.abstract_batch())
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    assert "with the whole model on 2 meshes, 1 + 3 microbatches" in plan.summary()
    text = str(autopar.explain(step, model.abstract_state(), model.abstract_batch()))
    for said in (
        "the whole model on 2 meshes, 1 + 3 of 4 microbatches",
        "The whole model on every mesh: 1 microbatch on 1 device (data=1); 3 microbatches on 1 device (data=1).",
        "1 its microbatches, both passes",
        "0 (slow)",
        "1 (fast)",
    ):
        assert said in " ".join(text.replace("│", " ").split()), said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shares": [1, 2]}, "[1, 2] do not add up to the 4 microbatches"),
        ({"shares": [4]}, "1 shares for 2 stages"),
        ({"shares": []}, "no shares stand there for the schedule 'shares'"),
        ({"schedule": "1f1b"}, "shares stand there for the schedule '1f1b'"),
        ({"cuts": [3]}, "1 cuts for 2 stages"),
        ({"shares": [0, 4]}, "Expected `int` >= 1"),
    ],
)
def test_files_that_make_no_sense(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned(mlp((64, 64), 32), two_kinds(), method=Shares((1, 3))).save(path)
    content = json.loads(path.read_text())
    content["plan"] |= changes
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError) as error:
        autopar.Plan.load(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": Shares((1, 3)), "num_microbatches": 8}, "num_microbatches=8 is not the sum of the shares [1, 3]"),
        ({"method": Shares((1, 2))}, "num_microbatches=3 does not divide the batch of 32 examples"),
        ({"method": Shares((1, 3)), "stages": 3}, "deals to 2 meshes, and stages=3 asks for others"),
        ({"method": "shares", "num_microbatches": 1}, "cannot be cut into 2 or more"),
        ({"method": "shares", "memory_per_device": 1000}, "no plan keeps 1000 B per device"),
        ({"schedule": "shares", "stages": 2}, "is no schedule of a pipeline"),
    ],
)
def test_misuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        planned(mlp((64, 64), 32), two_kinds(), **options)
    assert message in str(error.value)


def test_like_devices_are_not_dealt_to_unasked() -> None:
    with pytest.raises(PlanError, match="has 1 kind of devices; say how many meshes, for example stages=2"):
        planned(mlp((64, 64), 32), cluster_of(2, 1, network=1e9), method="shares")


def test_examples_that_are_coupled_are_not_dealt() -> None:
    model = build("wide_resnet")
    with pytest.raises(PlanError, match="the batch cannot be cut into microbatches"):
        planned(model, two_kinds(), method=Shares((1, 3)))


def test_a_step_like_it_is_refused() -> None:
    model = mlp((64, 64), 32)
    step = autopar.parallelize(model.train_step, cluster=running(2, (1,)), method=Shares((1, 3)))
    step.init(model.make_state, model.abstract_batch())
    like = autopar.parallelize(lambda state, batch: {"norm": jnp.sum(state["params"][0] ** 2)}, like=step)
    with pytest.raises(PlanError, match="deals its microbatches to meshes"):
        like.plan(model.abstract_state(), model.abstract_batch())


def test_shares_are_whole_numbers_of_microbatches() -> None:
    for said in ((1, -1), (4,), (1.5, 2)):
        with pytest.raises(PlanError, match="give each mesh one microbatch or more"):
            Shares(said)  # type: ignore[arg-type]
