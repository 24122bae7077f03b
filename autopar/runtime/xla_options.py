"""With which of XLA's options is a program compiled?

XLA:GPU first orders the work so that it needs little memory: of the kernels that could run next, the one that frees most.  A
second scheduler then moves kernels beside collectives and copies to the host, by its estimate of what those take.  The
gradients of weights, which nothing waits for but their all-reduce, end up behind the whole backward pass, and all that they
read is kept until then.  In a program that does work again to keep less, or keeps arrays on the host, that undoes what was
done for the sake of memory; there the first order stands.

Measured by the compiler for H100s: docs/explanation/rematerialisation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

GPU_PLATFORMS = frozenset(("gpu", "cuda", "rocm"))

IN_ORDER_OF_MEMORY: Mapping[str, Any] = {"xla_gpu_enable_analytical_sol_latency_estimator": False}
"""Without its estimate of what collectives take XLA:GPU leaves the order that needs little memory."""


def compiled(
    lowered: Any, mesh: jax.sharding.Mesh, *, saves_memory: bool, options: Mapping[str, Any] | None = None
) -> Any:
    """The executable of a ``jax.stages.Lowered`` for the devices of ``mesh``; ``options`` go before ours."""
    on_gpu = mesh.devices.flat[0].platform in GPU_PLATFORMS
    chosen = {**(IN_ORDER_OF_MEMORY if on_gpu and saves_memory else {}), **(options or {})}
    return lowered.compile(compiler_options=chosen or None)
