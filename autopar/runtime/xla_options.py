"""With which of XLA's options is a program compiled, and what must hold in a process that shall run it?

XLA:GPU first orders the work so that it needs little memory: of the kernels that could run next, the one that frees most.  A
second scheduler then moves kernels beside collectives and copies to the host, by its estimate of what those take.  The
gradients of weights, which nothing waits for but their all-reduce, end up behind the whole backward pass, and all that they
read is kept until then.  In a program that does work again to keep less, or keeps arrays on the host, that undoes what was
done for the sake of memory; there the first order stands.

The second scheduler may break the plan's word.  A program that needs T bytes by XLA's account where its plan foretold P is, with
T > 1.05 · P, compiled again within bounds: of arrays that are not given or returned (B bytes are) the second scheduler may keep

    p = ⌊100 · (P − B) / (M − B)⌋ %     of M − B, M being the device's memory

alive, and XLA, which has a pass for that too, may not compute them again to get there.  Where that does not do, the first
order stands.  A Wide-ResNet with tensor parallelism on 64 H100s needs 9.6 % more than foretold by itself; within bounds of 15
% it needs 1.1 % more and half of what was hidden still is, in the first order next to nothing.  A GPT in mixed precision,
with tensor parallelism inside a loop over microbatches, needs 12 % more: the logit of the right word, which only the reported
loss reads, is looked up beside the last collective of the backward pass, and all logits are kept until then; none in the
first order.

Measured by the compiler for H100s: docs/explanation/rematerialisation.md.

A process that runs programs on CPU keeps the memory it frees (:mod:`autopar.host_memory`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autopar.host_memory import keep_freed_memory

GPU_PLATFORMS = frozenset(("gpu", "cuda", "rocm"))

IN_ORDER_OF_MEMORY: Mapping[str, Any] = {"xla_gpu_enable_analytical_sol_latency_estimator": False}
"""Without its estimate of what collectives take XLA:GPU leaves the order that needs little memory."""

MOST_ABOVE = 0.05
"""So much more than foretold, as a share, may be needed for work beside collectives."""


@dataclass(frozen=True)
class Foretold:
    """Bytes that a plan says a program needs on a device, and bytes that the device has."""

    needed_bytes: int
    device_bytes: int


def compiled(
    lowered: Any,
    mesh: jax.sharding.Mesh,
    *,
    saves_memory: bool,
    options: Mapping[str, Any] | None = None,
    foretold: Foretold | None = None,
) -> Any:
    """The executable of a ``jax.stages.Lowered`` for the devices of ``mesh``; ``options`` go before ours."""
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        keep_freed_memory()
    on_gpu = platform in GPU_PLATFORMS
    chosen = {**(IN_ORDER_OF_MEMORY if on_gpu and saves_memory else {}), **(options or {})}
    executable = lowered.compile(compiler_options=chosen or None)
    if foretold is None or not on_gpu or saves_memory:
        return executable
    for tighter in (within_bounds(executable, foretold), IN_ORDER_OF_MEMORY):
        if needed_bytes(executable) <= (1 + MOST_ABOVE) * foretold.needed_bytes:
            break
        again = lowered.compile(compiler_options={**tighter, **chosen})
        executable = min(executable, again, key=needed_bytes)
    return executable


def within_bounds(executable: Any, foretold: Foretold) -> Mapping[str, Any]:
    """Options by which XLA:GPU keeps to what was foretold of a program that was compiled before."""
    given_bytes = _given_bytes(executable)
    share = (foretold.needed_bytes - given_bytes) / max(1, foretold.device_bytes - given_bytes)
    return {
        "xla_gpu_memory_limit_slop_factor": min(100, max(1, math.floor(100 * share))),
        "xla_disable_hlo_passes": "rematerialization",
    }


def needed_bytes(executable: Any) -> int:
    """What XLA says that an executable needs on one device."""
    return _given_bytes(executable) + int(executable.memory_analysis().temp_size_in_bytes)


def _given_bytes(executable: Any) -> int:
    """Of that arguments and results, which share bytes where one is written over the other."""
    said = executable.memory_analysis()
    return int(said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes)
