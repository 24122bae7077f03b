"""Which figures per core should ``Cluster.local()`` assume for virtual CPU devices?

Fits them to a profile of this machine (``autopar profile``, or measured now):

* collectives: ``seconds = α · steps + wire_bytes · devices / β``, because all devices share the machine's memory (one
  link shared by all of them); α and β are fitted to log errors, because a microsecond matters at 4 KB and not at 16 MB;
* matrix products: FLOP/s over all cores, the best of each dtype;
* memory: bytes per second of the largest elementwise kernel.

Run it alone on the machine::

    python -m benchmarks.measure_local [--profile FILE] [--quick]
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from scipy.optimize import least_squares

from autopar.cores import usable_cores
from autopar.cost_model.collectives import Collective
from autopar.efforts import FULL, QUICK
from autopar.measure import measure
from autopar.profile import Profile
from autopar.profile_file import load_profile


@dataclass(frozen=True)
class Sample:
    """One measured collective; ``wire_bytes`` is what each device sends."""

    kind: str
    group_size: int
    num_devices: int
    wire_bytes: float
    seconds: float

    @property
    def steps(self) -> int:
        """Ring steps: how often α is paid."""
        return (2 if self.kind == Collective.ALL_REDUCE.value else 1) * (self.group_size - 1)

    @property
    def machine_wire_bytes(self) -> float:
        """Bytes that all devices together send: what β has to carry."""
        return self.wire_bytes * self.num_devices


def collective_samples(profile: Profile) -> list[Sample]:
    """All collectives but permutes, which pass no ring."""
    return [
        Sample(one.kind, one.group_size, profile.num_devices, amount, seconds)
        for one in profile.collectives
        if one.kind != Collective.PERMUTE.value
        for amount, seconds in one.curve.samples
    ]


def fit(samples: list[Sample]) -> tuple[float, float]:
    """(α seconds, β bytes per second of the whole machine) with the least sum of squared log errors.

    The logarithm weighs a prediction of half and of twice the measured time alike.
    """
    work = np.array([[sample.steps, sample.machine_wire_bytes] for sample in samples])
    log_seconds = np.log([sample.seconds for sample in samples])
    guess = np.log([1e-5, 1e-10])
    found = least_squares(lambda logs: np.log(work @ np.exp(logs)) - log_seconds, guess).x
    return float(np.exp(found[0])), float(np.exp(-found[1]))


def main() -> None:
    """Print every collective, the fit, its errors, and the figures per core."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="a profile of this machine (default: measure now)")
    parser.add_argument("--quick", action="store_true", help="measure fewer sizes")
    arguments = parser.parse_args()
    profile = load_profile(arguments.profile) if arguments.profile else measure(QUICK if arguments.quick else FULL)
    cores = usable_cores()
    print(f"jax {profile.jax_version}, {profile.machine}, {profile.num_devices} devices")
    for product in profile.products:
        rate = profile.num_devices * max(flops / seconds for flops, seconds in product.curve.samples)
        name = f"{product.shape.value} products of {product.dtype}"
        print(f"{name:30} {rate / 1e9:8.1f} GFLOP/s, per core {rate / cores / 1e9:.1f}")
    amount, seconds = profile.elementwise.samples[-1]
    stream = profile.num_devices * amount / seconds
    print(f"memory {stream / 1e9:.1f} GB/s, per core {stream / cores / 1e9:.1f}")
    samples = collective_samples(profile)
    alpha, beta = fit(samples)
    print(f"{'kind':16} {'n':>2} {'wire bytes':>11} {'measured us':>12} {'fitted us':>12}")
    for sample in samples:
        fitted = alpha * sample.steps + sample.machine_wire_bytes / beta
        print(
            f"{sample.kind:16} {sample.group_size:2} {sample.wire_bytes:11.0f} {sample.seconds * 1e6:12.1f} "
            f"{fitted * 1e6:12.1f}"
        )
    print(f"alpha {alpha * 1e6:.1f} us, beta {beta / 1e9:.2f} GB/s, per core {beta / cores / 1e9:.2f}")


if __name__ == "__main__":
    main()
