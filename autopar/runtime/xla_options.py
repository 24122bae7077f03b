"""With which of XLA's options is a program compiled, and what must hold in a process that shall run it?

XLA:GPU first orders the work so that it needs little memory: of the kernels that could run next, the one that frees most.  A
second scheduler then moves kernels beside collectives and copies to the host, by its estimate of what those take.  The
gradients of weights, which nothing waits for but their all-reduce, end up behind the whole backward pass, and all that they
read is kept until then.  In a program that does work again to keep less, or keeps arrays on the host, that undoes what was
done for the sake of memory; there the first order stands.

It also stands where the second breaks the plan's word: with T bytes that a step needs by XLA's account and P that its plan
foretold, a program with T > 1.05 · P is compiled again.  A GPT in mixed precision, with tensor parallelism inside a loop over
microbatches, is one: the logit of the right word, which only the reported loss reads, is looked up beside the last collective
of the backward pass, and all logits are kept until then (12 % more; none in the first order).

Measured by the compiler for H100s: docs/explanation/rematerialisation.md.

A process that runs programs on CPU keeps the memory it frees (:mod:`autopar.host_memory`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from autopar.host_memory import keep_freed_memory

GPU_PLATFORMS = frozenset(("gpu", "cuda", "rocm"))

IN_ORDER_OF_MEMORY: Mapping[str, Any] = {"xla_gpu_enable_analytical_sol_latency_estimator": False}
"""Without its estimate of what collectives take XLA:GPU leaves the order that needs little memory."""

MOST_ABOVE = 0.05
"""So much more than foretold, as a share, may be needed for work beside collectives."""


def compiled(
    lowered: Any,
    mesh: jax.sharding.Mesh,
    *,
    saves_memory: bool,
    options: Mapping[str, Any] | None = None,
    foretold_bytes: int | None = None,
) -> Any:
    """The executable of a ``jax.stages.Lowered`` for the devices of ``mesh``; ``options`` go before ours.

    ``foretold_bytes`` are those that the plan says the program needs on a device, if it says so.
    """
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        keep_freed_memory()
    on_gpu = platform in GPU_PLATFORMS
    chosen = {**(IN_ORDER_OF_MEMORY if on_gpu and saves_memory else {}), **(options or {})}
    executable = lowered.compile(compiler_options=chosen or None)
    if foretold_bytes is None or not on_gpu or saves_memory:
        return executable
    if needed_bytes(executable) <= (1 + MOST_ABOVE) * foretold_bytes:
        return executable
    again = lowered.compile(compiler_options={**IN_ORDER_OF_MEMORY, **chosen})
    return min(executable, again, key=needed_bytes)


def needed_bytes(executable: Any) -> int:
    """What XLA says that an executable needs on one device."""
    said = executable.memory_analysis()
    given = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes
    return int(given + said.temp_size_in_bytes)
