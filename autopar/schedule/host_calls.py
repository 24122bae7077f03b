"""How does a program on many devices call the host as often as a program on one?

A callback has no pieces: every device would make it, with the same operands.  So the first device calls, and the others
learn the results r by a sum of bits, for all other devices hold zeros:

    bits(r) = Σ_d bits(r_d),   r_d = 0 for d > 0

An exception of the user's must not leave the others waiting for that sum (XLA:CPU ends the process then).  It is caught,
told to all devices with the results, and then raised on every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.experimental import io_callback

from autopar import _compat
from autopar.errors import TraceError
from autopar.plan import Axes

PRINTING = "debug_print"
HOST_CALLS = (PRINTING, "debug_callback", "io_callback", "pure_callback")
"""The primitives of ``jax.debug.print``, ``jax.debug.callback``, ``io_callback`` and ``jax.pure_callback``."""


def call_once(equation: Any, bind: Callable[..., Any], operands: Sequence[jax.Array], axes: Axes) -> list[jax.Array]:
    """Results of a host call inside a ``jax.shard_map`` manual over all ``axes``; ``bind(*operands)`` is the plain call.

    Their all-reduces stand in no plan; they take little time beside the call itself.  Raises TraceError for
    ``jax.debug`` calls with ``ordered=True``.
    """
    if _compat.is_ordered_debugging(equation):
        file, line = _compat.user_source(equation)
        raise TraceError(
            f"{equation.primitive.name} with ordered=True at {file}:{line}: JAX keeps this order on one device only; "
            "leave ordered=True out, or use jax.experimental.io_callback(..., ordered=True)"
        )
    is_first = lax.axis_index(axes) == 0
    if equation.primitive.name == PRINTING:
        lax.cond(is_first, lambda *arrays: tuple(bind(*arrays)), lambda *_: (), *operands)
        return []
    shapes = [jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in equation.outvars]
    call = _GuardedCall(equation.params["callback"], shapes)
    ordered = bool(equation.params.get("ordered", False))
    failed, *results = lax.cond(
        is_first,
        lambda *arrays: io_callback(call, call.shapes, *arrays, ordered=ordered),
        lambda *_: tuple(jnp.zeros(shape.shape, shape.dtype) for shape in call.shapes),
        *operands,
    )
    lax.cond(_of_first(failed, axes), lambda: io_callback(call.raise_caught, None), lambda: None)
    return [_of_first(result, axes) for result in results]


class _GuardedCall:
    """Owns the user's function and the exception that it raised last."""

    def __init__(self, function: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
        self._function = function
        self._caught: Exception | None = None
        self.shapes = (jax.ShapeDtypeStruct((), np.dtype(bool)), *shapes)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Whether it failed, and its results."""
        try:
            results = [np.asarray(result) for result in self._function(*arrays) or ()]
        except Exception as error:  # noqa: BLE001 - raised again on every device, in raise_caught
            self._caught = error
            return (np.True_, *(np.zeros(shape.shape, shape.dtype) for shape in self.shapes[1:]))
        return (np.False_, *results)

    def raise_caught(self) -> None:
        """The exception as the user raised it."""
        if self._caught is not None:
            raise self._caught


def _of_first(result: jax.Array, axes: Axes) -> jax.Array:
    """The value of the one device whose value is not all zeros."""
    dtype = result.dtype
    if dtype == jnp.bool_:
        return lax.psum(result.astype(jnp.int32), axes).astype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return lax.psum(result, axes)
    bits = lax.bitcast_convert_type(result, f"uint{8 * dtype.itemsize}")
    return lax.bitcast_convert_type(lax.psum(bits, axes), dtype)
