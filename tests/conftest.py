"""Every test sees eight CPU devices, whatever the machine has; compilation is quick; property tests are the same in each run.

The variables must stand in the environment before JAX is first imported, hence at the top of the first file that pytest
loads.  They also reach every process that a test starts.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
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

from hypothesis import HealthCheck, settings  # noqa: E402 - after the environment, like all that may import JAX

# A compilation in a property test takes as long as it takes: only the count of examples is bounded.
_COMMON = {"derandomize": True, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=25, **_COMMON)
settings.register_profile("verify", max_examples=300, **_COMMON)
settings.load_profile("verify" if os.environ.get("AUTOPAR_VERIFY") == "1" else "default")
