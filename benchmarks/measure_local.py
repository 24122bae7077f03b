"""What do in-process XLA:CPU collectives and matrix products cost on this machine?

Fits the figures that ``Cluster.local()`` assumes for virtual CPU devices:

* collectives: ``seconds = α · steps + wire_bytes · devices / β``, because all devices share the machine's memory (one
  link shared by all of them); groups of 2, 4 and 8 of the eight devices, several sizes;
* matrix products: FLOP/s over all cores, per dtype;
* memory: bytes per second of ``x + 1`` (one read, one write) over an array larger than the caches.

A collective is timed as (chain of 9 − chain of 1) / 8 inside one executable, so the cost of a call drops out; the
minimum over many runs stands for the machine at rest.  α and β are fitted to log errors, because a microsecond matters
at 4 KB and not at 16 MB.  Run it alone on the machine::

    python benchmarks/measure_local.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

DEVICES = 8
LONG_CHAIN = 9
GROUP_SIZES = (2, 4, 8)
LOCAL_BYTES = (4 << 10, 64 << 10, 512 << 10, 4 << 20)
RUNS = 25
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter + all-gather": 2, "all-to-all": 1}


@dataclass(frozen=True)
class Sample:
    """One measured collective (or pair of them); ``full_bytes`` as in ``autopar.cost_model.collectives``."""

    kind: str
    group_size: int
    full_bytes: int
    seconds: float

    @property
    def steps(self) -> int:
        """Ring steps: how often α is paid."""
        return PASSES[self.kind] * (self.group_size - 1)

    @property
    def machine_wire_bytes(self) -> float:
        """Bytes that all devices together send: what β has to carry."""
        return self.steps / self.group_size * self.full_bytes * DEVICES


def best_seconds(run: Callable[[], object], runs: int) -> float:
    """Minimum wall time of ``run`` (which must block) after one warming call."""
    run()
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def chain_seconds(kind: str, group_size: int, local_bytes: int) -> float:
    """Seconds of one collective of ``kind``, every device holding ``local_bytes`` (zeros, so that sums stay finite)."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((DEVICES // group_size, group_size), ("other", "group"))
    spec = PartitionSpec(("other", "group"))
    count = local_bytes // 4
    x = jax.device_put(jnp.zeros(count * DEVICES, jnp.float32), NamedSharding(mesh, spec))

    def own_piece(full: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(full, jax.lax.axis_index("group") * count, count)

    def step(value: jax.Array) -> jax.Array:
        if kind == "all-reduce":
            # Shifting by the device's number keeps the operand from being provably replicated.
            return jax.lax.psum(value, "group") + jax.lax.axis_index("group").astype(jnp.float32)
        if kind == "all-gather":
            return own_piece(jax.lax.all_gather(value, "group", tiled=True))
        if kind == "reduce-scatter + all-gather":
            full = jax.lax.all_gather(value, "group", tiled=True)
            return jax.lax.psum_scatter(full, "group", tiled=True)
        return jax.lax.all_to_all(value, "group", 0, 0, tiled=True)

    def timed(length: int) -> float:
        def chain(value: jax.Array) -> jax.Array:
            for _ in range(length):
                value = step(value)
            return value

        compiled = (
            jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)).lower(x).compile()
        )
        for collective in kind.split(" + "):
            found = compiled.as_text().count(f" {collective}(")
            if found != length:
                raise SystemExit(f"{found} {collective} in the executable, not {length}: the measurement means nothing")
        return best_seconds(lambda: jax.block_until_ready(compiled(x)), RUNS)

    seconds = (timed(LONG_CHAIN) - timed(1)) / (LONG_CHAIN - 1)
    if seconds <= 0:
        raise SystemExit(f"{kind} of {local_bytes} bytes: a longer chain took less time; the machine is too busy")
    return seconds


def measure_collectives() -> list[Sample]:
    """All kinds, group sizes and message sizes; a reduce-scatter needs an all-gather behind it to be chained."""
    samples = []
    for group_size in GROUP_SIZES:
        for local_bytes in LOCAL_BYTES:
            for kind in PASSES:
                full = local_bytes * (group_size if "gather" in kind else 1)
                samples.append(Sample(kind, group_size, full, chain_seconds(kind, group_size, local_bytes)))
    return samples


def fit(samples: list[Sample]) -> tuple[float, float]:
    """(α seconds, β bytes per second of the whole machine) with the least sum of squared log errors.

    The logarithm weighs a prediction of half and of twice the measured time alike.
    """
    import numpy as np
    from scipy.optimize import least_squares

    work = np.array([[sample.steps, sample.machine_wire_bytes] for sample in samples])
    log_seconds = np.log([sample.seconds for sample in samples])
    guess = np.log([1e-5, 1e-10])
    found = least_squares(lambda logs: np.log(work @ np.exp(logs)) - log_seconds, guess).x
    return float(np.exp(found[0])), float(np.exp(-found[1]))


def matmul_flops_per_second(dtype: str, size: int, runs: int = 12) -> float:
    """FLOP/s of a square product of ``size`` on one device that may use every core."""
    import jax
    import jax.numpy as jnp

    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda left, right: left @ right)
    return 2.0 * size**3 / best_seconds(lambda: product(a, a).block_until_ready(), runs)


def memory_bytes_per_second(megabytes: int = 256) -> float:
    """Bytes read and written per second by an elementwise operator on an array far larger than the caches."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(megabytes << 18, jnp.float32)
    add = jax.jit(lambda value: value + 1, donate_argnums=0)
    holder = [x]

    def run() -> None:
        holder[0] = add(holder[0])
        holder[0].block_until_ready()

    return 2 * (megabytes << 20) / best_seconds(run, 12)


def main() -> None:
    """Print every sample, the fit, its errors, and the figures per core."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES} " + os.environ.get("XLA_FLAGS", "")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    import jax

    jax.config.update("jax_enable_x64", True)
    print(f"jax {jax.__version__}, {cores} cores")
    for dtype, sizes in (("float32", (512, 1024, 2048)), ("float64", (512, 1024, 2048)), ("bfloat16", (512, 1024))):
        rates = [matmul_flops_per_second(dtype, size) for size in sizes]
        shown = ", ".join(f"{size}: {rate / 1e9:.1f}" for size, rate in zip(sizes, rates, strict=True))
        print(f"matrix product {dtype:9} GFLOP/s  {shown}   per core {max(rates) / cores / 1e9:.1f}")
    stream = memory_bytes_per_second()
    print(f"memory {stream / 1e9:.1f} GB/s, per core {stream / cores / 1e9:.1f}")
    samples = measure_collectives()
    alpha, beta = fit(samples)
    print(f"{'kind':28} {'n':>2} {'full bytes':>11} {'measured us':>12} {'predicted us':>12}")
    for sample in samples:
        predicted = alpha * sample.steps + sample.machine_wire_bytes / beta
        print(
            f"{sample.kind:28} {sample.group_size:2} {sample.full_bytes:11} {sample.seconds * 1e6:12.1f} "
            f"{predicted * 1e6:12.1f}"
        )
    print(f"alpha {alpha * 1e6:.1f} us, beta {beta / 1e9:.2f} GB/s, per core {beta / cores / 1e9:.2f}")


if __name__ == "__main__":
    main()
