"""Which programs are compiled in the order that needs little memory, and where?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.runtime.xla_options import IN_ORDER_OF_MEMORY, compiled
from autopar.schedule.spmd import SpmdProgram, rematerialises

WIDTH, BATCH = 16, 8


@dataclass
class Lowered:
    """Stands for ``jax.stages.Lowered``, and remembers what it was compiled with."""

    told: list[Mapping[str, Any] | None] = field(default_factory=list)

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> str:
        self.told.append(compiler_options)
        return "executable"


def mesh_on(platform: str) -> Any:
    return SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)], dtype=object))


@pytest.mark.parametrize(
    ("platform", "again", "options", "wanted"),
    [
        ("cpu", True, None, None),
        ("tpu", True, None, None),
        ("gpu", False, None, None),
        ("gpu", True, None, dict(IN_ORDER_OF_MEMORY)),
        ("cuda", True, {"xla_gpu_autotune_level": 0}, {**IN_ORDER_OF_MEMORY, "xla_gpu_autotune_level": 0}),
        ("gpu", True, dict.fromkeys(IN_ORDER_OF_MEMORY, True), dict.fromkeys(IN_ORDER_OF_MEMORY, True)),
        ("gpu", False, {"xla_gpu_autotune_level": 0}, {"xla_gpu_autotune_level": 0}),
    ],
)
def test_programs_that_work_again_keep_the_order_of_memory_on_gpus(
    platform: str, again: bool, options: Mapping[str, Any] | None, wanted: Mapping[str, Any] | None
) -> None:
    lowered = Lowered()
    assert compiled(lowered, mesh_on(platform), saves_memory=again, options=options) == "executable"
    assert lowered.told == [wanted]


@dataclass
class Account:
    """Stands for an executable with XLA's account of its memory."""

    temp_size_in_bytes: int
    argument_size_in_bytes: int = 100
    output_size_in_bytes: int = 50
    alias_size_in_bytes: int = 50

    def memory_analysis(self) -> Account:
        return self


@dataclass
class Ordered:
    """Stands for ``jax.stages.Lowered``: scratch bytes beside collectives, and in the order of memory."""

    beside: int
    in_order: int
    count: int = 0

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Account:
        self.count += 1
        first_order = bool(compiler_options) and IN_ORDER_OF_MEMORY.items() <= compiler_options.items()
        return Account(self.in_order if first_order else self.beside)


@pytest.mark.parametrize(
    ("platform", "beside", "in_order", "foretold", "scratch", "count"),
    [
        ("gpu", 110, 80, 200, 110, 1),  # the plan's word is kept
        ("gpu", 111, 80, 200, 80, 2),
        ("gpu", 111, 120, 200, 111, 2),
        ("gpu", 111, 80, None, 111, 1),
        ("cpu", 111, 80, 200, 111, 1),
    ],
)
def test_where_a_plans_word_would_be_broken_memory_goes_first(
    platform: str, beside: int, in_order: int, foretold: int | None, scratch: int, count: int
) -> None:
    lowered = Ordered(beside, in_order)
    made = compiled(lowered, mesh_on(platform), saves_memory=False, foretold_bytes=foretold)
    assert (made.temp_size_in_bytes, lowered.count) == (scratch, count)


def test_xla_knows_the_option() -> None:
    executable = jax.jit(jnp.sin).lower(1.0).compile(compiler_options=dict(IN_ORDER_OF_MEMORY))
    assert executable(0.0) == 0.0


def layer(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.sin(x @ weights))


def loss_of(one_layer: Any, looped: bool) -> Any:
    def step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(weights: jax.Array) -> jax.Array:
            if looped:
                last, _ = jax.lax.scan(lambda x, w: (one_layer(w, x), None), batch, weights)
            else:
                last = one_layer(weights[1], one_layer(weights[0], batch))
            return jnp.mean(last**2)

        value, gradient = jax.value_and_grad(loss)(state)
        return state - 0.1 * gradient, value

    return step


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_barriers_are_found_in_loops_too(again: bool, looped: bool) -> None:
    step = autopar.parallelize(
        loss_of(jax.checkpoint(layer) if again else layer, looped), cluster=Cluster.local(jax.devices()[:2])
    )
    program = step.compile(jnp.ones((2, WIDTH, WIDTH)), jnp.ones((BATCH, WIDTH))).program
    assert isinstance(program, SpmdProgram)
    assert rematerialises(program.steps) == again
