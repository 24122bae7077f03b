"""In what are sums over microbatches kept: one accumulator for each gradient, in the type that was asked for?"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import _compat
from autopar.graph.build import build_graph
from autopar.graph.roles import Role, infer_roles
from autopar.graph.tracing import trace
from autopar.inter_op.accumulate import accumulated
from autopar.inter_op.examples import examples_of
from autopar.inter_op.terms import AccumulatorDtype
from tests.toy_runs import precision

WIDTH, BATCH, COUNT = 32, 64, 4


def half_step(optimizer: optax.GradientTransformation, narrow: Any) -> Any:
    """A step that keeps parameters in a narrow type, and masters in float32 that the optimizer moves."""

    def step(state: Any, batch: Any) -> Any:
        params, masters, kept = state

        def loss(params: Any) -> jax.Array:
            x = batch.astype(narrow)
            for weight in params:
                x = jnp.tanh(x @ weight)
            return jnp.mean(x.astype(jnp.float32) ** 2)

        updates, kept = optimizer.update(jax.grad(loss)(params), kept, masters)
        masters = optax.apply_updates(masters, updates)
        return [weight.astype(narrow) for weight in masters], masters, kept

    return step


def half_state(optimizer: optax.GradientTransformation, narrow: Any) -> Any:
    rng = np.random.default_rng(0)
    masters = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32) for _ in range(2)]
    return [weight.astype(narrow) for weight in masters], masters, optimizer.init(masters)


def a_batch() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, WIDTH)), jnp.float32)


def carried(step: Any, state: Any, accumulator: AccumulatorDtype) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and types of what the loop over microbatches adds up."""
    program = trace(step, (state, a_batch()))
    roles = infer_roles(program)
    graph = build_graph(program.jaxpr, platform="cpu")
    batch = roles.leaves(Role.BATCH)
    found = examples_of(graph, batch, roles.leaves(Role.STATE), COUNT)
    jaxpr = _compat.jaxpr_of(accumulated(program, found, batch, accumulator).jaxpr)
    loop = next(one for one in jaxpr.eqns if one.primitive.name == "scan" and one.params["length"] == COUNT)
    _, carries = _compat.scan_arity(loop.params)
    return [(one.aval.shape, str(one.aval.dtype)) for one in loop.outvars[:carries]]


@pytest.mark.parametrize("narrow", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("optimizer", [optax.adafactor(1e-2), optax.adamw(1e-2), optax.sgd(0.1)])
@pytest.mark.parametrize("accumulator", AccumulatorDtype)
def test_a_gradient_has_one_accumulator_in_the_type_that_was_asked_for(
    optimizer: optax.GradientTransformation, narrow: Any, accumulator: AccumulatorDtype
) -> None:
    """Also where the update reads it in its own type and in a wider one, as Adafactor does."""
    found = carried(half_step(optimizer, narrow), half_state(optimizer, narrow), accumulator)
    wanted = "float32" if accumulator is AccumulatorDtype.FLOAT32 else jnp.dtype(narrow).name
    assert [one for one in found if one[0]] == [((WIDTH, WIDTH), wanted)] * 2


def test_a_total_in_double_precision_is_not_kept_in_single() -> None:
    """Casts of single terms are exact, of a total they are not: what is read in float64 is added up in float64."""

    def step(weight: Any, batch: Any) -> Any:
        gradient = jax.grad(lambda weight: jnp.mean((batch @ weight) ** 2))(weight)
        return (weight.astype(jnp.float64) - gradient.astype(jnp.float64)).astype(jnp.float32)

    with precision(jnp.float64):
        weight = jnp.ones((WIDTH, WIDTH), jnp.float32)
        assert carried(step, weight, AccumulatorDtype.FLOAT32) == [((WIDTH, WIDTH), "float64")]
        assert carried(step, weight, AccumulatorDtype.SAME) == [((WIDTH, WIDTH), "float32")]


@pytest.mark.parametrize("accumulator", ["float32", "same"])
@pytest.mark.parametrize("stages", [None, 2])
def test_a_step_with_narrow_sums_is_the_step_of_jit_but_for_their_rounding(
    accumulator: str, stages: int | None
) -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    step, state = half_step(optimizer, jnp.bfloat16), half_state(optimizer, jnp.bfloat16)
    expected = jax.jit(step)(state, a_batch())
    parallel = autopar.parallelize(
        step, num_microbatches=COUNT, accumulator_dtype=accumulator, stages=stages, donate_argnums=()
    )
    found = parallel(state, a_batch())
    moved = np.abs(np.asarray(expected[1][0]) - np.asarray(state[1][0])).max()
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() <= 8 * float(jnp.finfo(jnp.bfloat16).eps) * moved


def test_what_is_no_type_of_accumulators_is_refused() -> None:
    with pytest.raises(autopar.AutoparError, match="accumulator_dtype"):
        autopar.parallelize(lambda x: x, accumulator_dtype="float8")
