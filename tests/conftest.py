"""Every test sees eight CPU devices, whatever the machine has; compilation is quick; property tests are the same in each run.

The variables must stand in the environment before JAX is first imported, hence at the top of the first file that pytest
loads.  They also reach every process that a test starts.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["AUTOPAR_CACHE"] = "none"  # nor what an earlier run has left
os.environ["RAY_AUTH_MODE"] = "disabled"  # the same in every process of Ray's
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["AUTOPAR_PROFILE"] = "none"  # what was measured on this machine is no part of a test

_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # LLVM's optimisations take half of all compilation and change no HLO: tests compile many programs and race none.
    "--xla_backend_optimization_level": "0",
}
os.environ["XLA_FLAGS"] = " ".join(
    [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.partition("=")[0] not in _FLAGS]
    + [f"{name}={value}" for name, value in _FLAGS.items()]
)

from collections.abc import Iterator  # noqa: E402 - after the environment, like all that may import JAX
from typing import TYPE_CHECKING  # noqa: E402

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

if TYPE_CHECKING:
    import autopar

# A compilation in a property test takes as long as it takes: only the count of examples is bounded.
_COMMON = {"derandomize": True, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=25, **_COMMON)
settings.register_profile("verify", max_examples=300, **_COMMON)
settings.load_profile("verify" if os.environ.get("AUTOPAR_VERIFY") == "1" else "default")


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray cluster of one node."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def ray_hosts(local_ray: None) -> Iterator[autopar.Cluster]:
    """Two hosts of two devices on that node; their processes serve all tests."""
    import jax

    import autopar

    with jax.enable_x64(True):
        made = autopar.Cluster.ray(None, hosts=2, devices_per_host=2)
    yield made
    made.close()


@pytest.fixture
def cluster(ray_hosts: autopar.Cluster) -> Iterator[autopar.Cluster]:
    """Those hosts, in float64."""
    import jax

    with jax.enable_x64(True):
        yield ray_hosts
