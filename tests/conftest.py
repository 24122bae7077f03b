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
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's name; by its own, 15, workers starve beside other tests
os.environ["AUTOPAR_PROFILE"] = "none"  # what was measured on this machine is no part of a test

from importlib.metadata import version

_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # LLVM's optimisations take half of all compilation and change no HLO: tests compile many programs and race none.
    "--xla_backend_optimization_level": "0",
}
# Half of the rest goes to MLIR, which writes each fused loop, and to 32 pieces of machine code that are compiled apart.
# Without it the arithmetic is the same, but single operators are not wrapped as fusions: see `users_fusions`.  A jaxlib
# ends the process where it does not know a flag, and later ones have no other way of writing loops: with them all is
# compiled as a user's programs are.
IS_QUICK = version("jaxlib").startswith("0.10.")
_FUSION_EMITTERS = "xla_cpu_use_fusion_emitters"
if IS_QUICK:
    _FLAGS |= {f"--{_FUSION_EMITTERS}": "false", "--xla_cpu_parallel_codegen_split_count": "1"}
os.environ["XLA_FLAGS"] = " ".join(
    [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.partition("=")[0] not in _FLAGS]
    + [f"{name}={value}" for name, value in _FLAGS.items()]
)

import gc  # noqa: E402 - after the environment, like all that may import JAX
import itertools  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

if TYPE_CHECKING:
    import autopar

TESTS_BETWEEN_LOOKS = 10
MANY_MAPPINGS = 20_000

# A compilation in a property test takes as long as it takes: only the count of examples is bounded.
_COMMON = {"derandomize": True, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=25, **_COMMON)
settings.register_profile("verify", max_examples=300, **_COMMON)
settings.load_profile("verify" if os.environ.get("AUTOPAR_VERIFY") == "1" else "default")


def pytest_collection_finish() -> None:
    """Python looks for cycles less often, and not among what has been imported: a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session")
def _tests_so_far() -> Iterator[int]:
    return itertools.count(1)


@pytest.fixture(autouse=True)
def _few_mappings(_tests_so_far: Iterator[int]) -> Iterator[None]:
    """Compiled programs go before the system's limit of mappings of one process (65,530) is reached: each holds some hundred."""
    yield
    maps = Path("/proc/self/maps")
    if (
        next(_tests_so_far) % TESTS_BETWEEN_LOOKS == 0
        and maps.exists()
        and maps.read_bytes().count(b"\n") > MANY_MAPPINGS
    ):
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def users_fusions() -> Iterator[None]:
    """Programs are compiled to the HLO that a user's are: for tests that read it, or XLA's account of its memory."""
    import jax

    plain = jax.stages.Lowered.compile

    def compile_as_shipped(lowered: Any, compiler_options: Any = None, **rest: Any) -> Any:
        return plain(lowered, {_FUSION_EMITTERS: True, **(compiler_options or {})}, **rest)

    with pytest.MonkeyPatch.context() as patched:
        if IS_QUICK:
            patched.setattr(jax.stages.Lowered, "compile", compile_as_shipped)
        yield


@pytest.fixture(scope="module")
def programs_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each program is compiled once: for tests whose rows differ in the order in which the same programs run."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}

    def use(chosen: dict[str, Any]) -> None:
        for name, value in chosen.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX asks only once whether there is a directory

    use(options)
    yield
    use(before)


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
