"""Do the loss curves of all methods coincide?  Every method of a model trains from one state on the same batches.

    python -m benchmarks.losses [--models gpt …] [--size toy] [--steps 30]

In float64, on 8 virtual devices that are said to be so slow that even a toy is worth cutting up.  Per model: the loss of the
undecorated step under ``jax.jit`` at the beginning and at the end, and for each method by how much its loss departs from that
of the same step, relative, at the worst of all steps.

Sums in another order differ in the last digit, and some trainings are chaotic: they multiply any difference at every step.
So the undecorated step also trains from a state that is 1 + 1e-15 times as large, and the same departure is printed of that
(``nudged``).  Ends with status 1 if a method departs by more than 1e-9 and by more than ten times as much as the nudge does.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster
from benchmarks.intra_op import METHODS
from benchmarks.models import FAMILIES, Model, build

SLOW = 1e8
"""FLOPs and bytes per second of the devices that are planned for."""
ALLOWED, NUDGE, MORE_THAN_NUDGED = 1e-9, 1e-15, 10.0

Curve = np.ndarray
"""float64[steps], the loss of each."""


def main() -> int:
    """Print a row per model as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--size", default="toy")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    curves = {}
    with jax.enable_x64(True):
        for name in arguments.models:
            curves[name] = curves_of(build(name, arguments.size, dtype="float64"), arguments.steps)
            print(f"{name}: trained", flush=True)
    Console(width=130).print(table(curves))
    apart = [
        f"{name}, {method}"
        for name, of_model in curves.items()
        for method in METHODS
        if not departure(of_model[method], of_model["jit"]) <= allowed(of_model)
    ]
    print(f"departs by more than is allowed: {'; '.join(apart) or 'none'}")
    return int(bool(apart))


def slow_devices() -> Cluster:
    """The devices of this process, at figures that make work dear and collectives cheap."""
    local = Cluster.local(profile=None)
    device = dataclasses.replace(
        local.device,
        flops_per_second=dict.fromkeys(local.device.flops_per_second, SLOW),
        memory_bytes_per_second=SLOW,
    )
    return local.replace(name="slow devices", device=device)


def curves_of(model: Model, steps: int) -> dict[str, Curve]:
    """By method; ``jit`` is the undecorated step, ``nudged`` too, from another state."""
    cluster = slow_devices()
    plain = jax.jit(model.train_step)
    found = {
        "jit": losses(plain, jax.jit(model.make_state)(), model, steps),
        "nudged": losses(plain, jax.tree.map(nudged, jax.jit(model.make_state)()), model, steps),
    }
    for method in METHODS:
        step = autopar.parallelize(method=method, cluster=cluster)(model.train_step)
        state = step.init(model.make_state, model.abstract_batch())
        found[method] = losses(step, state, model, steps)
    return found


def nudged(leaf: jax.Array) -> jax.Array:
    """What is a float, almost as it was."""
    return leaf * (1 + NUDGE) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def losses(step: Callable[..., Any], state: Any, model: Model, steps: int) -> Curve:
    """Of a training whose batches are the model's, the rows moved on by one each time, floats a little larger."""
    batch = model.make_batch(model.batch_size)
    found = []
    for number in range(steps):
        moved = {
            name: np.roll(array, number, axis=0) * (1 + number / steps if array.dtype.kind == "f" else 1)
            for name, array in batch.items()
        }
        state, metrics = step(state, moved)
        found.append(float(metrics["loss"]))
    return np.array(found)


def departure(curve: Curve, expected: Curve) -> float:
    """The largest relative difference of any step."""
    return float(np.max(np.abs(curve - expected) / np.abs(expected)))


def allowed(of_model: dict[str, Curve]) -> float:
    """The departure that rounding explains."""
    return max(ALLOWED, MORE_THAN_NUDGED * departure(of_model["nudged"], of_model["jit"]))


def table(curves: dict[str, dict[str, Curve]]) -> Table:
    """A row per model."""
    made = Table(title="largest departure from the loss of the same step under jax.jit, relative, float64")
    columns = ("nudged", *METHODS)
    for column in ("model", "loss, first step", "last step", *columns):
        made.add_column(column, justify="left" if column == "model" else "right")
    for name, of_model in curves.items():
        expected = of_model["jit"]
        ends = (f"{expected[0]:.4f}", f"{expected[-1]:.4f}")
        made.add_row(name, *ends, *(f"{departure(of_model[method], expected):.1e}" for method in columns))
    return made


if __name__ == "__main__":
    sys.exit(main())
