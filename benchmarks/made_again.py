"""From which bandwidth on would XLA's compiler for a GPU rather read an activation's array than make it again?

    python -m benchmarks.made_again [--devices h100 a100 v100] [--activations gelu exact_gelu silu]

Needs the extra gpu-compiler and no GPU: the compiler reads a description of the device, in which the bandwidth of memory is
varied between a sixteenth and sixteen times what the device has, by halving, to 3 %.  Compiled is a layer of 8192 rows,
``activation(x @ up + bias) @ down``, with all its gradients; scratch memory says whether another array is kept.  Printed are the
bandwidth, and what it takes at that bandwidth to write an element: the two sides of :mod:`autopar.cost_model.made_again` are
equal there.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from autopar import _compat
from autopar.compilers import INSTALLATION, WITHOUT_DEVICE, Compiler, description_of

ROWS, NARROW, WIDE = 8192, 1024, 4096
RANGE, CLOSE = 16.0, 1.03
TERA = 1e12

Activation = Callable[[jax.Array], jax.Array]

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"gelu": jax.nn.gelu, "exact_gelu": partial(jax.nn.gelu, approximate=False), "silu": jax.nn.silu}
)

_BANDWIDTH = re.compile(r"memory_bandwidth: (\d+)")


def scratch_bytes(description: str, activation: Activation, dtype: str) -> int:
    """Bytes of scratch memory of the layer and its gradients, compiled for a described device."""

    def loss(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        up, bias, down = weights
        return jnp.sum(jnp.square(activation(x @ up + bias) @ down).astype(jnp.float32))

    place = SingleDeviceSharding(_compat.gpu_topology(description, "1x1x1")[0])
    x, *weights = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for shape in ((ROWS, NARROW), (NARROW, WIDE), (WIDE,), (WIDE, NARROW))
    )
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(tuple(weights), x)
    return int(lowered.compile(dict(WITHOUT_DEVICE)).memory_analysis().temp_size_in_bytes)


def kept_from(compiler: Compiler, activation: Activation, dtype: str) -> tuple[float, float | None]:
    """The device's bandwidth, and the one from which on more than with the least is kept (None: with none), in bytes a second."""
    text = description_of(compiler)
    found = _BANDWIDTH.search(text)
    assert found is not None
    own = float(found[1])

    @cache
    def scratch(bandwidth: float) -> int:
        return scratch_bytes(_BANDWIDTH.sub(f"memory_bandwidth: {int(bandwidth)}", text), activation, dtype)

    low, high = own / RANGE, own * RANGE
    if scratch(low) == scratch(high):
        return own, None
    while high / low > CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if scratch(middle) == scratch(own / RANGE) else (low, middle)
    return own, math.sqrt(low * high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", type=Compiler.of, default=[Compiler.H100, Compiler.A100, Compiler.V100])
    parser.add_argument("--activations", nargs="+", choices=ACTIVATIONS, default=list(ACTIVATIONS))
    given = parser.parse_args()
    console = Console()
    if not _compat.has_gpu_compiler():
        console.print(f"XLA's compiler for GPUs is not installed: {INSTALLATION}")
        return
    table = Table("device, TB/s", "activation", "dtype", "kept from, TB/s", "ps an element")
    for compiler in given.devices:
        for name in given.activations:
            for dtype in ("float32", "bfloat16"):
                own, limit = kept_from(compiler, ACTIVATIONS[name], dtype)
                cells = ("never", "") if limit is None else (
                    f"{limit / TERA:.2f}", f"{jnp.dtype(dtype).itemsize / limit * TERA:.2f}"
                )  # fmt: skip
                table.add_row(f"{compiler.value}, {own / TERA:.2f}", name, dtype, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
