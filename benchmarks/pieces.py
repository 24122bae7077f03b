"""Gathers, scattered sums and all-to-alls of an inner dimension on virtual CPU devices: ours against XLA's own.

    python -m benchmarks.pieces [--rounds 25]

Pieces of a dimension that is not the outermost do not lie one after the other.  ``ours`` are the moves of
:mod:`autopar.runtime.collectives`, which copy each array once for it; ``XLA's`` the same collectives as ``jax.lax`` has them.
Both do several arrays in one executable whose results take the memory of those of the call before, and take turns; printed are
the medians of a call in milliseconds.  What both return is compared first.  Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from autopar.cluster import Mesh
from autopar.host_memory import keep_freed_memory
from autopar.runtime.collectives import apply_moves
from autopar.schedule.reshard import Move, MoveKind

DEVICES = 8
AXIS = "data"

Collective = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Case:
    """So many arrays, of that shape on each device; the move, and what ``jax.lax`` has for it."""

    count: int
    shape: tuple[int, ...]
    move: Move
    of_jax: Collective

    @property
    def name(self) -> str:
        """For a table."""
        move = self.move
        cut = f"{move.dim} → {move.to_dim}" if move.kind is MoveKind.ALL_TO_ALL else f"{move.dim}"
        return f"{self.count} × {move.kind.value} of {list(self.shape)}, dimension {cut}"


def cases() -> tuple[Case, ...]:
    """Weights and activations of a layer of width 256 and of one sixteen times as wide, and a matrix cut either way."""

    def gather(count: int, rows: int, columns: int) -> Case:
        move = Move(MoveKind.ALL_GATHER, (AXIS,), 1)
        return Case(
            count, (rows, columns // DEVICES), move, partial(lax.all_gather, axis_name=AXIS, axis=1, tiled=True)
        )

    def scatter(count: int, rows: int, columns: int) -> Case:
        move = Move(MoveKind.REDUCE_SCATTER, (AXIS,), 1)
        of_jax = partial(lax.psum_scatter, axis_name=AXIS, scatter_dimension=1, tiled=True)
        return Case(count, (rows, columns), move, of_jax)

    def deal(count: int, shape: tuple[int, ...], dim: int, to_dim: int) -> Case:
        move = Move(MoveKind.ALL_TO_ALL, (AXIS,), dim, to_dim)
        return Case(
            count, shape, move, lambda x: lax.all_to_all(x, AXIS, split_axis=to_dim, concat_axis=dim, tiled=True)
        )

    return (
        gather(8, 256, 768),
        gather(1, 256, 4096),
        scatter(8, 256, 768),
        scatter(1, 256, 4096),
        deal(8, (2, 64, 768), 0, 2),
        deal(8, (16, 64, 96), 2, 0),
        deal(1, (2, 64, 4096), 0, 2),
        deal(4, (128, 1024), 0, 1),
    )


class Repeated:
    """One executable that does a collective with several arrays, again and again."""

    def __init__(self, case: Case, do: Collective) -> None:
        mesh = jax.make_mesh((DEVICES,), (AXIS,))
        spec = PartitionSpec(AXIS)

        def all_of(given: tuple[jax.Array, ...], before: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return tuple(do(x[0])[None] for x in given)

        local: Any = jax.shard_map(all_of, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        numbers = np.random.default_rng(0).integers(0, 9, (case.count, DEVICES, *case.shape)).astype(np.float32)
        self._given = tuple(jax.device_put(one, NamedSharding(mesh, spec)) for one in numbers)
        self.results = jax.jit(local)(self._given, self._given)
        kept = jax.jit(local, donate_argnums=1, keep_unused=True)
        self._compiled = kept.lower(self._given, self.results).compile()

    def seconds(self) -> float:
        """Of one call."""
        started = time.perf_counter()
        self.results = jax.block_until_ready(self._compiled(self._given, self.results))
        return time.perf_counter() - started


def main() -> None:
    """Print what both take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    keep_freed_memory()
    table = Table(title=f"{DEVICES} devices, float32, medians of {rounds} calls")
    table.add_column("collective")
    for column in ("XLA's ms", "ours ms", "ours / XLA's"):
        table.add_column(column, justify="right")
    for case in cases():
        ours = Repeated(case, partial(apply_moves, moves=(case.move,), mesh=Mesh((AXIS,), (DEVICES,))))
        of_xla = Repeated(case, case.of_jax)
        for one, other in zip(ours.results, of_xla.results, strict=True):
            np.testing.assert_array_equal(one, other)  # whole numbers, of which every sum is exact
        taken = [(of_xla.seconds(), ours.seconds()) for _ in range(rounds)]
        theirs, own = (statistics.median(column) * 1e3 for column in zip(*taken, strict=True))
        table.add_row(case.name, f"{theirs:.1f}", f"{own:.1f}", f"{own / theirs:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
