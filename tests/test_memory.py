"""Is the memory predicted for a step what XLA:CPU's own account of the compiled step says?

The referee is ``compiled.memory_analysis()``: arguments, results and aliased bytes must agree to the byte, the total
within 15%, and it may hardly be too low.  Where a rule of the prediction is about one effect, a small program shows it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import autopar
from autopar.cost_model.hlo import memory_bytes
from autopar.cost_model.memory import PACKED_BUFFERS, Span, packed_bytes
from autopar.plan import Memory
from benchmarks.models import FAMILIES, build
from tests.toy_runs import eight_slow_devices

TOTAL_TOLERANCE = 0.15
TOO_LOW = 0.07
PLANS: dict[str, dict[str, Any]] = {
    "auto-8": {"mesh_shape": (8,)},
    "auto-2x4": {"mesh_shape": (2, 4)},
    "auto-4x2": {"mesh_shape": (4, 2)},
    "data parallel": {"method": "data_parallel"},
    "zero3": {"method": "zero3"},
    "tensor parallel": {"method": "tensor_parallel"},
}
ALWAYS = ("auto-2x4", "data parallel", "zero3")

_compile = jax.stages.Lowered.compile


def quickly(lowered: Any) -> Any:
    """Compile without optimizing machine code: that comes after all buffers are assigned."""
    return _compile(lowered, compiler_options={"xla_backend_optimization_level": 0})


def predicted_and_actual(step: Any, *args: Any) -> tuple[Memory, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax.stages.Lowered, "compile", quickly)
        compiled = step.compile(*args)
    return compiled.plan.prediction.memory, memory_bytes(compiled)


def check(memory: Memory, actual: Any, tolerance: float, too_low: float) -> None:
    assert memory.argument_bytes == actual.argument
    assert memory.output_bytes == actual.output
    assert memory.alias_bytes == actual.alias
    assert memory.total_bytes <= (1 + tolerance) * actual.total
    assert memory.total_bytes >= (1 - too_low) * actual.total


def check_family(name: str, plan: str) -> None:
    model = build(name, "bench")
    step = autopar.parallelize(model.train_step, cluster=eight_slow_devices(), **PLANS[plan])
    memory, actual = predicted_and_actual(step, model.abstract_state(), model.abstract_batch())
    check(memory, actual, TOTAL_TOLERANCE, TOO_LOW)
    assert sum(memory.by_kind.values()) == memory.temp_bytes
    assert memory.largest
    assert all(size > 0 for _, size in memory.largest)


@pytest.mark.parametrize("plan", ALWAYS)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_total_is_that_of_the_compiled_step(name: str, plan: str) -> None:
    check_family(name, plan)


@pytest.mark.verify
@pytest.mark.parametrize("plan", sorted(set(PLANS) - set(ALWAYS)))
@pytest.mark.parametrize("name", list(FAMILIES))
def test_total_is_that_of_the_compiled_step_under_more_plans(name: str, plan: str) -> None:
    check_family(name, plan)
