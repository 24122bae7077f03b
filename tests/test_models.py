"""Does the planner find by itself what an expert knows about a model?

Experts on different devices for a mixture of experts, pieces of the sequence where there are no examples to share out,
rows of embedding tables that no device can hold.  Nothing in the models says any of this.  Published widths on hardware
that the figures of a preset describe; depth is cut down, because layers are alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.graph.build import build_graph
from autopar.graph.tracing import trace
from autopar.plan import Axes, Layout, Plan
from benchmarks.models import Model, build, long_context, moe, two_tower
from examples.moe.model import PRESETS, MoEConfig, MoETransformer, parameter_count, route

EIGHT_A100 = Cluster.preset("p4d.24xlarge")
GIGA = 1e9


def plan_of(model: Model, **options: Any) -> Plan:
    step = autopar.parallelize(model.train_step, **{"cluster": EIGHT_A100, **options})
    return step.plan(model.abstract_state(), model.abstract_batch())


def layouts(plan: Plan, *words: str) -> dict[str, Layout]:
    """Inputs whose path has all the words."""
    every = zip(plan.in_paths, plan.in_layouts, strict=True)
    found = {path: layout for path, layout in every if all(word in path for word in words)}
    assert found
    return found


def ways(plan: Plan, axes: Axes) -> int:
    """Into how many pieces these axes cut."""
    return plan.mesh.axis_size(*axes)


# ---------------------------------------------------------------------------------------------------- mixture of experts


def mixture(layers: int, batch_size: int) -> Model:
    """The published 2.4B (16 experts in every second layer), fewer layers of it."""
    config = PRESETS["2.4B"]
    config = dataclasses.replace(config, base=dataclasses.replace(config.base, layers=layers))
    return moe.model_of("moe", config, batch_size)


def check_experts(model: Model, **options: Any) -> None:
    """Expert weights and their moments lie on different devices by experts; tokens travel to them and back."""
    plan = plan_of(model, **options)
    for path, layout in (layouts(plan, "'moe'", "'up'") | layouts(plan, "'moe'", "'down'")).items():
        assert ways(plan, layout.dims[0]) == plan.num_devices, path
    experts = {use.kind for use in plan.prediction.collectives if "moe/model.py" in use.origin}
    assert "all-to-all" in experts
    enough = 64 * GIGA  # for plans that keep every parameter on every device
    for method in ("data_parallel", "zero3"):
        opponent = plan_of(model, cluster=options.get("cluster", EIGHT_A100), method=method, memory_per_device=enough)
        assert plan.step_seconds < 0.9 * opponent.step_seconds, method


def test_experts_are_put_on_different_devices() -> None:
    check_experts(mixture(layers=2, batch_size=32), mesh_shape=(8,))


@pytest.mark.verify
def test_experts_are_put_on_different_devices_of_two_hosts_whatever_the_mesh() -> None:
    """Without stages: two of them, each with its experts on one host, are foretold to be a quarter faster still."""
    check_experts(mixture(layers=4, batch_size=64), cluster=Cluster.preset("p4d.24xlarge", hosts=2), stages=1)


def routed(capacity: int, draws: jax.Array | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Gates of 64 random tokens for 8 experts, in three groups, and their combination weights."""
    gates = jax.nn.softmax(jax.random.normal(jax.random.key(1), (3, 64, 8)))
    combine, _ = jax.jit(route, static_argnums=1)(gates, capacity, draws)
    return np.asarray(gates), np.asarray(combine)


def test_a_token_goes_to_its_two_best_experts_in_proportion() -> None:
    gates, combine = routed(capacity=128)
    weights = combine.sum(-1)  # no expert is full
    best = np.argsort(gates, axis=-1)[..., -2:]
    assert (np.argsort(weights, axis=-1)[..., -2:] == best).all()
    top = np.take_along_axis(gates, best, -1)
    np.testing.assert_allclose(np.take_along_axis(weights, best, -1), top / top.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_a_place_is_given_once_and_first_choices_have_priority() -> None:
    """A plain loop over tokens, as GShard's algorithm 1 is written, fills the same places."""
    capacity = 12
    gates, combine = routed(capacity=capacity)
    assert ((combine > 0).sum(axis=1) <= 1).all()
    for group, chosen in zip(gates, combine, strict=True):
        expected = np.zeros_like(chosen)
        order = np.argsort(-group, axis=-1, kind="stable")
        taken = Counter[int]()
        for choice in (0, 1):
            for token, experts in enumerate(order):
                expert = int(experts[choice])
                if taken[expert] < capacity:
                    share = group[token, expert] / group[token, experts[:2]].sum()
                    expected[token, expert, taken[expert]] = share
                taken[expert] += 1
        np.testing.assert_allclose(chosen, expected, rtol=1e-5)


def test_a_weak_second_choice_is_asked_by_chance() -> None:
    gates, certain = routed(capacity=128, draws=jnp.zeros((3, 64)))
    _, never = routed(capacity=128, draws=jnp.ones((3, 64)))
    assert ((certain > 0).sum((-1, -2)) == 2).all()
    assert ((never > 0).sum((-1, -2)) == 1).all()
    np.testing.assert_allclose(never.max((-1, -2)), gates.max(-1) / np.sort(gates, -1)[..., -2:].sum(-1), rtol=1e-5)


def test_the_balance_loss_is_one_where_experts_share_equally_and_more_where_they_do_not() -> None:
    near = jnp.eye(8)[jnp.arange(64) % 8][None] * 1e-3 + 1 / 8
    assert float(route(near, 16, None)[1]) == pytest.approx(1, rel=1e-2)
    crowded = jnp.broadcast_to(jax.nn.softmax(jnp.arange(8.0)), (1, 64, 8))
    assert float(route(crowded, 16, None)[1]) == pytest.approx(8 * float(crowded[0, 0, 7]), rel=1e-5)


@pytest.mark.verify
def test_published_mixtures_have_the_parameters_of_their_names() -> None:
    unit = {"M": 1e6, "B": 1e9}
    for name in moe.PUBLISHED:
        assert parameter_count(PRESETS[name]) == pytest.approx(float(name[:-1]) * unit[name[-1]], rel=0.08), name


def test_a_mixture_of_equal_experts_is_the_expert() -> None:
    """Where all experts hold the same weights and none is full, routing changes nothing."""
    config = MoEConfig(dataclasses.replace(PRESETS["demo"].base, vocab_size=64, hidden=16, heads=2, sequence=8), 4, 4.0)
    tokens = jnp.arange(16).reshape(2, 8)
    model = MoETransformer(config)
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    apply = jax.jit(model.apply)
    for kernel in ("up", "down"):
        experts = params["layer1"]["moe"][kernel]["kernel"]
        params["layer1"]["moe"][kernel]["kernel"] = jnp.broadcast_to(experts[:1], experts.shape)
    before = apply({"params": params}, tokens)
    params["layer1"]["moe"]["router"]["kernel"] = -params["layer1"]["moe"]["router"]["kernel"]
    after = apply({"params": params}, tokens)
    np.testing.assert_allclose(before, after, rtol=2e-4, atol=2e-5)


# --------------------------------------------------------------------------------------------------------- long context


def check_sequence(model: Model, config: long_context.LongContextConfig, **options: Any) -> Plan:
    """Most of the activations are cut along the sequence; returns the plan."""
    plan = plan_of(model, **options)
    graph = build_graph(
        trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {}).jaxpr, platform="cuda"
    )
    shape = (config.batch_size, config.sequence, config.hidden)
    homes = [plan.stages[0].home(value.id, 3) for value in graph.values.values() if value.shape == shape]
    assert len(homes) > 20
    cut = [home for home in homes if ways(plan, home.dims[1]) > 1]
    assert len(cut) > 0.8 * len(homes)
    for method in ("data_parallel", "zero3"):
        opponent = plan_of(model, method=method, memory_per_device=64 * GIGA)
        assert plan.step_seconds < 0.5 * opponent.step_seconds, method
    return plan


@pytest.mark.parametrize("size", ["1B-32k"])
def test_a_long_sequence_is_cut(size: str) -> None:
    config = dataclasses.replace(long_context.CONFIGS[size], layers=1)
    plan = check_sequence(long_context.model_of("long", config, jnp.bfloat16), config, mesh_shape=(8,))
    (targets,) = layouts(plan, "batch", "targets").values()
    assert ways(plan, targets.dims[1]) > 1


@pytest.mark.verify
@pytest.mark.parametrize("size", ["1B-8k", "1B-32k", "1B-64k"])
def test_a_long_sequence_is_cut_whatever_the_mesh(size: str) -> None:
    """Of 8k the logits are cut by examples and vocabulary, and of the tokens each device takes what it needs."""
    config = dataclasses.replace(long_context.CONFIGS[size], layers=2)
    check_sequence(long_context.model_of("long", config, jnp.bfloat16), config)


@pytest.mark.parametrize("turns", [1, 4])
def test_attention_in_turns_is_attention(turns: int) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 16, 3, 8))
    key, value = (jax.random.normal(one, (2, 16, 8)) for one in keys[1:])
    scores = jnp.einsum("bqhd,bkd->bhqk", query, key) / math.sqrt(8)
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((16, 16), bool)), scores, -jnp.inf), axis=-1)
    expected = jnp.einsum("bhqk,bkd->bqhd", weights, value)
    attended = jax.jit(long_context.attend, static_argnums=3)(query, key, value, turns)
    np.testing.assert_allclose(attended, expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ two towers


@pytest.mark.verify
def test_rows_of_tables_that_no_device_holds_are_cut() -> None:
    """A hundred columns cannot be shared out to eight devices, so under this budget some of the cutting is by rows."""
    model = build("two_tower", "2.7B")
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.abstract_state()))
    plan = plan_of(model, memory_per_device=held / 5)
    assert plan.peak_bytes < held / 5
    for path, layout in layouts(plan, "'table0'").items():
        assert ways(plan, layout.dims[0]) > 1, path
        assert ways(plan, layout.dims[0]) * ways(plan, layout.dims[1]) == 8, path
    with pytest.raises(PlanError, match="leanest"):
        plan_of(model, method="data_parallel", memory_per_device=held / 5)


def test_an_items_own_user_is_what_the_loss_wants() -> None:
    scores = jnp.array([[2.0, 0.0], [1.0, 3.0]])
    frequency = jnp.log(jnp.array([0.25, 0.75]))
    corrected = np.exp(np.asarray(scores - frequency))
    expected = -np.log([corrected[0, 0] / corrected[0].sum(), corrected[1, 1] / corrected[1].sum()]).mean()
    assert float(two_tower.in_batch_loss(scores, frequency)) == pytest.approx(expected, rel=1e-6)
