"""Does a planned step compute what the undecorated function computes under ``jax.jit``?

Ten steps in float64: every leaf of the state (parameters and optimizer state) and every metric to 1e-9 of the leaf's
largest magnitude.  In float32: losses to 1e-5, and the gradients of the first step to 1e-5 in norm per leaf.

The derivative of a ReLU jumps at zero, and rounding may decide on which side an element falls: a Wide-ResNet's losses take one of
two courses in float32, 3e-4 apart after ten steps, under ``jax.jit`` alone, from states that differ by half a rounding.  Its
losses are compared to 1e-5 step by step, each from the state that ``jax.jit`` has reached, on which they depend continuously.

The default run takes a sample; ``data_parallel``, ``zero2`` and ``zero3`` are in that of :mod:`tests.test_optimizers`.
``verify`` takes the whole product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.cluster import Cluster
from autopar.plan import Plan
from autopar.schedule.spmd import Run
from benchmarks.models import FAMILIES, build
from tests.toy_runs import METHODS, batches, eight_slow_devices, leaves_by_path, parallel, precision, reference

STEPS = 10
FORKED = ("wide_resnet",)
"""Models of which rounding decides the course of losses in float32."""
RELATIVE = 1e-9
# What is truly zero holds only rounding noise, and noise has no relative error. Softmax does not see what is added to
# all scores of a row, so attention's key biases have a zero gradient: about 1e-18 in float64. Adam divides it by its
# epsilon, 1e-8, and moves the bias by the rate, 1e-2, times that in each of ten steps: 1e-11. No other leaf is given
# this grace.
NOISE_PATH, NOISE = "['key']['bias']", 1e-11

SAMPLE = (
    ("gpt", "auto"),
    pytest.param("mlp_nnx", "data_parallel", marks=pytest.mark.verify),
    ("mlp_nnx", "tensor_parallel"),
    pytest.param("llama_nnx", "zero3", marks=pytest.mark.verify),
    pytest.param("two_tower", "zero2", marks=pytest.mark.verify),
    pytest.param("moe", "expert_parallel", marks=pytest.mark.verify),
)
PRODUCT = tuple((name, method) for name in FAMILIES for method in METHODS)


def wrong_leaves(reference_leaves: dict[str, np.ndarray], leaves: dict[str, np.ndarray]) -> dict[str, str]:
    """The leaves that differ by more than is allowed."""
    assert leaves.keys() == reference_leaves.keys()
    found: dict[str, str] = {}
    for path, expected in reference_leaves.items():
        got = leaves[path]
        assert got.shape == expected.shape and got.dtype == expected.dtype, path
        if expected.dtype.kind != "f":
            np.testing.assert_array_equal(got, expected, err_msg=path)
            continue
        allowed = RELATIVE * np.abs(expected).max(initial=0.0) + (NOISE if NOISE_PATH in path else 0.0)
        error = np.abs(got - expected).max(initial=0.0)
        if not error <= allowed:
            found[path] = f"differs by {error:.1e}, allowed are {allowed:.1e}"
    return found


def is_cut(plan: Plan) -> bool:
    """Whether any input or operator is shared among devices."""
    stage = plan.stages[0]
    return any(layout.axes for layout in plan.in_layouts) or any(
        axes for strategy in stage.strategies.values() for axes in strategy.factors
    )


def check_float64(name: str, method: str, cluster: Cluster) -> Plan:
    expected = reference(name, jnp.float64, STEPS)
    got, plan = parallel(name, jnp.float64, method, cluster, STEPS)
    assert any(array.dtype == np.float64 for array in expected.state.values())
    assert wrong_leaves(expected.state, got.state) == {}
    assert len(got.metrics) == STEPS
    for ours, theirs in zip(got.metrics, expected.metrics, strict=True):
        assert wrong_leaves(theirs, ours) == {}
    return plan


@pytest.mark.parametrize(("name", "method"), SAMPLE)
def test_float64_state_and_metrics_over_ten_steps(name: str, method: str) -> None:
    assert is_cut(check_float64(name, method, eight_slow_devices()))


@pytest.mark.verify
def test_float64_on_this_machines_own_figures() -> None:
    check_float64("mlp_nnx", "auto", Cluster.local())


@pytest.mark.verify
@pytest.mark.parametrize("cluster", ["slow", "local"])
@pytest.mark.parametrize(("name", "method"), PRODUCT)
def test_float64_of_every_model_and_method(name: str, method: str, cluster: str) -> None:
    check_float64(name, method, eight_slow_devices() if cluster == "slow" else Cluster.local())


def layers_that_no_model_has(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Depthwise and grouped convolutions, average pooling, two ways of resizing, running sums, sorting."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(
        images, params["depthwise"], (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=8
    )
    x = jax.nn.relu(x)
    x = lax.conv_general_dilated(x, params["grouped"], (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8)
    x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    x = jax.image.resize(x, (*x.shape[:1], 8, 8, x.shape[3]), "bilinear")
    x = jax.image.resize(x, (*x.shape[:1], 4, 4, x.shape[3]), "nearest")
    x = jnp.cumsum(x, axis=1)
    return (lax.top_k(x, 4)[0] + jnp.sort(x, axis=-1)[..., :4]).sum((1, 2, 3))


@pytest.mark.parametrize("method", [pytest.param("auto", marks=pytest.mark.verify), "tensor_parallel"])
def test_layers_that_no_model_has(method: str) -> None:
    def step(params: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        def loss_fn(params: Any) -> jax.Array:
            return ((layers_that_no_model_has(params, batch["images"]) - batch["targets"]) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 1e-4 * g, params, gradients), {"loss": loss}

    random = np.random.default_rng(0)
    params = {"depthwise": random.normal(size=(3, 3, 1, 16)), "grouped": random.normal(size=(3, 3, 2, 32))}
    batch = {"images": random.normal(size=(16, 8, 8, 8)), "targets": random.normal(size=16)}
    with jax.enable_x64(True):
        planned = autopar.parallelize(method=method, cluster=eight_slow_devices())(step)
        got, metrics = planned(params, batch)
        expected, expected_metrics = jax.jit(step)(params, batch)
    assert is_cut(planned.last.plan)
    runs = [step for step, _ in planned.last.program.all_steps() if isinstance(step, Run)]
    assert all(run.operator.rule.known for run in runs)
    assert wrong_leaves(leaves_by_path(expected), leaves_by_path(got)) == {}
    assert wrong_leaves(leaves_by_path(expected_metrics), leaves_by_path(metrics)) == {}


# ------------------------------------------------------------------------------------------------------------- float32


def gradients_of(name: str, method: str | None) -> tuple[dict[str, np.ndarray], float]:
    """First-step gradients and loss, through a step that is plain gradient descent with rate 1 on the loss.

    A model's own step hides its gradients behind Adam, so they are taken from the parameters' derivative of the loss
    that the step reports.
    """
    model = build(name, dtype=jnp.float32)

    def gradient_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        moving, still, rebuild = split_floats(state)

        def loss(floats: Any) -> jax.Array:
            return model.train_step(rebuild(floats, still), batch)[1]["loss"]

        value, gradients = jax.value_and_grad(loss)(moving)
        return rebuild(gradients, still), {"loss": value}

    batch = next(batches(model, 1))
    state = jax.jit(model.make_state)()
    step = (
        jax.jit(gradient_step)
        if method is None
        else autopar.parallelize(method=method, cluster=eight_slow_devices())(gradient_step)
    )
    out, metrics = step(state, batch)
    return leaves_by_path(out), float(metrics["loss"])


def split_floats(state: Any) -> tuple[list[Any], list[Any], Any]:
    """Floating leaves, the others, and how to put them together again."""
    leaves, tree = jax.tree.flatten(state)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def rebuild(floats: list[Any], others: list[Any]) -> Any:
        first, second = iter(floats), iter(others)
        return jax.tree.unflatten(tree, [next(first) if yes else next(second) for yes in is_float])

    floats = [leaf for leaf, yes in zip(leaves, is_float, strict=True) if yes]
    return floats, [leaf for leaf, yes in zip(leaves, is_float, strict=True) if not yes], rebuild


def check_float32_gradients(name: str, method: str) -> None:
    with precision(jnp.float32):
        expected, expected_loss = gradients_of(name, None)
        got, loss = gradients_of(name, method)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    total = np.sqrt(sum(np.linalg.norm(array) ** 2 for array in expected.values() if array.dtype.kind == "f"))
    assert total > 0.1
    for path, array in expected.items():
        if array.dtype.kind != "f":
            continue
        # 1e-7 of the whole gradient is the floor for leaves whose true gradient is zero (see NOISE).
        allowed = 1e-5 * np.linalg.norm(array) + 1e-7 * total
        assert np.linalg.norm(got[path] - array) <= allowed, path


def losses_of(metrics: Sequence[dict[str, np.ndarray]]) -> list[float]:
    return [float(said["['loss']"]) for said in metrics]


def losses_step_by_step(name: str, method: str) -> tuple[list[float], list[float]]:
    """Of the planned step and of ``jax.jit``, both from each state that ``jax.jit`` reaches."""
    model = build(name, dtype=jnp.float32)
    step = jax.jit(model.train_step)
    planned = autopar.parallelize(method=method, cluster=eight_slow_devices())(model.train_step)
    state, losses, expected = jax.jit(model.make_state)(), [], []
    for batch in batches(model, STEPS):
        losses.append(float(planned(state, batch)[1]["loss"]))
        state, metrics = step(state, batch)
        expected.append(float(metrics["loss"]))
    return losses, expected


def check_float32_losses(name: str, method: str) -> None:
    if name in FORKED:
        losses, expected_losses = losses_step_by_step(name, method)
    else:
        expected = reference(name, jnp.float32, STEPS)
        got, _ = parallel(name, jnp.float32, method, eight_slow_devices(), STEPS)
        losses, expected_losses = losses_of(got.metrics), losses_of(expected.metrics)
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


@pytest.mark.parametrize(("name", "method"), [("mlp_nnx", "auto")])
def test_float32_gradients_of_the_first_step(name: str, method: str) -> None:
    check_float32_gradients(name, method)


@pytest.mark.parametrize(("name", "method"), [("mlp_nnx", "zero3")])
def test_float32_losses(name: str, method: str) -> None:
    check_float32_losses(name, method)


@pytest.mark.verify
@pytest.mark.parametrize(("name", "method"), PRODUCT)
def test_float32_gradients_of_every_model_and_method(name: str, method: str) -> None:
    check_float32_gradients(name, method)


@pytest.mark.verify
@pytest.mark.parametrize(("name", "method"), PRODUCT)
def test_float32_losses_of_every_model_and_method(name: str, method: str) -> None:
    check_float32_losses(name, method)
