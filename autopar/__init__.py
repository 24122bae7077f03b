"""autopar: parallelize an ordinary JAX train step over a cluster, by a plan that is found and explained."""

from autopar.api import Parallelized, parallelize
from autopar.cluster import Cluster
from autopar.compiled import Compiled
from autopar.errors import AutoparError, ClusterError, PlanError, TraceError
from autopar.explain import Explanation, explain
from autopar.explain.verification import Verification
from autopar.plan import Plan
from autopar.verify import verify_plan

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "Cluster",
    "ClusterError",
    "Compiled",
    "Explanation",
    "Parallelized",
    "Plan",
    "PlanError",
    "TraceError",
    "Verification",
    "explain",
    "parallelize",
    "verify_plan",
]
