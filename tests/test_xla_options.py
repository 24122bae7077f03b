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
from autopar.runtime.xla_options import IN_ORDER_OF_MEMORY, Foretold, compiled, within_bounds
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
    """Stands for ``jax.stages.Lowered``: scratch bytes beside collectives, within bounds, and in the order of memory."""

    beside: int
    within: int
    in_order: int
    told: list[Mapping[str, Any]] = field(default_factory=list)

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Account:
        options = compiler_options or {}
        self.told.append(options)
        if IN_ORDER_OF_MEMORY.items() <= options.items():
            return Account(self.in_order)
        return Account(self.within if "xla_gpu_memory_limit_slop_factor" in options else self.beside)


@pytest.mark.parametrize(
    ("platform", "made", "foretold", "scratch", "count"),
    [
        ("gpu", (110, 100, 80), 200, 110, 1),  # the plan's word is kept
        ("gpu", (111, 110, 80), 200, 110, 2),
        ("gpu", (111, 111, 80), 200, 80, 3),
        ("gpu", (130, 111, 120), 200, 111, 3),
        ("gpu", (111, 130, 120), 200, 111, 3),
        ("gpu", (111, 100, 80), None, 111, 1),
        ("cpu", (111, 100, 80), 200, 111, 1),
    ],
)
def test_where_a_plans_word_would_be_broken_memory_goes_first(
    platform: str, made: tuple[int, int, int], foretold: int | None, scratch: int, count: int
) -> None:
    lowered = Ordered(*made)
    word = None if foretold is None else Foretold(foretold, device_bytes=1_000)
    executable = compiled(lowered, mesh_on(platform), saves_memory=False, foretold=word)
    assert (executable.temp_size_in_bytes, len(lowered.told)) == (scratch, count)


@pytest.mark.parametrize(
    ("foretold", "device", "percent"), [(200, 1_000, 11), (300, 1_000, 22), (300, 250, 100), (90, 1_000, 1)]
)
def test_bounds_are_a_share_of_what_is_neither_given_nor_returned(foretold: int, device: int, percent: int) -> None:
    options = within_bounds(Account(111), Foretold(foretold, device))
    assert options["xla_gpu_memory_limit_slop_factor"] == percent


def test_xla_knows_the_options() -> None:
    for options in (IN_ORDER_OF_MEMORY, within_bounds(Account(111), Foretold(200, 1_000))):
        executable = jax.jit(jnp.sin).lower(1.0).compile(compiler_options=dict(options))
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
