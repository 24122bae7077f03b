"""autopar: parallelize an ordinary JAX train step over a cluster, by a plan that is found and explained."""

from autopar.api import parallelize
from autopar.checkpoints import Checkpoints, Restored
from autopar.cluster import Cluster
from autopar.compiled import Compiled
from autopar.errors import (
    AutoparError,
    CheckpointError,
    ClusterError,
    DataError,
    OutOfMemoryError,
    PlanError,
    TraceError,
    WorkerError,
)
from autopar.explain import Explanation, explain
from autopar.explain.verification import Verification
from autopar.parallelized import Parallelized
from autopar.plan import Plan
from autopar.runtime.distributed_array import DistributedArray
from autopar.runtime.host_data import HostData
from autopar.schedule.instructions import Task
from autopar.schedule.orders import Order
from autopar.training import Recovery, Run
from autopar.verify import verify_plan
from autopar.version import VERSION

__version__ = VERSION

__all__ = [
    "AutoparError",
    "CheckpointError",
    "Checkpoints",
    "Cluster",
    "ClusterError",
    "Compiled",
    "DataError",
    "DistributedArray",
    "Explanation",
    "HostData",
    "Order",
    "OutOfMemoryError",
    "Parallelized",
    "Plan",
    "PlanError",
    "Recovery",
    "Restored",
    "Run",
    "Task",
    "TraceError",
    "Verification",
    "WorkerError",
    "explain",
    "parallelize",
    "verify_plan",
]
