"""Is what is predicted without compiling what XLA compiles?

While a step is planned nothing may be compiled: ``Lowered.compile`` raises, and JAX's own events, which every compilation
sends, are counted.  Then the step is compiled and its HLO read: bytes that a device sends within 10%, arguments and
outputs exact, ``argument + output − alias + temp`` within 15%.

A toy on this machine's true figures is best left almost uncut, so the planner is also told of slow devices.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.compiled import Compiled
from autopar.cost_model.hlo import memory_bytes, parse_module, step_seconds
from benchmarks.models import FAMILIES, build
from tests.test_combine import METHODS as REDUCING
from tests.test_combine import check_all_reduces
from tests.toy_runs import METHODS, eight_slow_devices, sample

pytestmark = pytest.mark.usefixtures("users_fusions")

BYTES_TOLERANCE = 0.10
TOTAL_TOLERANCE = 0.15
SMALL_BYTES = 256  # scalars, such as the loss and the norm of the gradients

PRODUCT = tuple((name, method) for name in FAMILIES for method in METHODS)
ALIKE = ("gpt_remat", "gpt2", "gpt_scan")
"""The default run takes the GPT in one form, not in four."""
DEFAULT = tuple(pair for pair in sample(tuple(FAMILIES), METHODS, seed=1) if pair[0] not in ALIKE)
ELSEWHERE = ("gpt", "moe", "unet", "lstm", "vit", "long_context")
"""Met by the default run in other files, so that here it takes the sample's others: every method once."""


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """The name of every compilation's event from now on."""
    seen: list[str] = []

    def listen(event: str, duration: float, **details: object) -> None:
        if event.endswith("/backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def _refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("planning compiled something")


def check(name: str, size: str, method: str, cluster: Cluster, compilations: list[str]) -> Compiled:
    """What is predicted of a step is what it is compiled to; returns that."""
    model = build(name, size)
    state, batch = model.abstract_state(), model.abstract_batch()
    step = autopar.parallelize(cluster=cluster, method=method)(model.train_step)
    compilations.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax.stages.Lowered, "compile", _refuse)
        plan = step.plan(state, batch)
    assert compilations == []
    compiled = step.compile(state, batch)
    assert len(compilations) > 0  # the listener hears compilations
    assert compiled.plan is plan

    wire_bytes = step_seconds(parse_module(compiled.as_text()), cluster).wire_bytes
    predicted = sum(use.wire_bytes for use in plan.prediction.collectives)
    assert predicted == pytest.approx(wire_bytes, rel=BYTES_TOLERANCE, abs=SMALL_BYTES)
    memory, actual = plan.prediction.memory, memory_bytes(compiled)
    assert (memory.argument_bytes, memory.output_bytes) == (actual.argument, actual.output)
    assert memory.alias_bytes == actual.alias
    assert memory.total_bytes == pytest.approx(actual.total, rel=TOTAL_TOLERANCE)
    return compiled


@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(*pair, marks=pytest.mark.verify if pair[0] in ELSEWHERE else ()) for pair in DEFAULT],
)
def test_a_toys_collectives_and_memory_are_the_compiled_programs(
    name: str, method: str, compilations: list[str]
) -> None:
    compiled = check(name, "toy", method, eight_slow_devices(), compilations)
    if method in REDUCING:
        check_all_reduces(compiled)


@pytest.mark.verify
def test_what_is_done_again_behind_remat_is_foretold(compilations: list[str]) -> None:
    """XLA:CPU finds no equal work beyond a layer norm, so it sends again what the layer computes again; newer ones find none."""
    check("gpt_remat", "toy", "auto", eight_slow_devices(), compilations)


@pytest.mark.verify
@pytest.mark.parametrize(("name", "method"), [pair for pair in PRODUCT if pair not in DEFAULT])
def test_every_toys_collectives_and_memory_are_the_compiled_programs(
    name: str, method: str, compilations: list[str]
) -> None:
    check(name, "toy", method, eight_slow_devices(), compilations)


@pytest.mark.verify
@pytest.mark.parametrize(("name", "method"), PRODUCT)
@pytest.mark.parametrize("size", ["toy", "bench"])
def test_on_this_machines_own_figures(name: str, method: str, size: str, compilations: list[str]) -> None:
    check(name, size, method, Cluster.local(), compilations)
