"""Plans that were made before for the same program, cluster and demands: the second start of a job plans nothing."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import jax

from autopar.cluster import Cluster
from autopar.disk_cache import cache_directory
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.subjects import Subjected
from autopar.version import VERSION


@dataclass(frozen=True)
class KeptPlan:
    """The place of one plan on disk."""

    path: Path

    def read(self) -> Plan | None:
        """The plan, if it is there and can be read."""
        if not self.path.exists():
            return None
        with contextlib.suppress(PlanError):  # of another release, or damaged: it is made anew
            return Plan.load(self.path)
        return None

    def write(self, plan: Plan) -> None:
        """Keep the plan; where that is impossible, go without."""
        with contextlib.suppress(OSError, PlanError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            plan.save(self.path)


def kept_plan(subject: Subjected, cluster: Cluster, asked: Hashable) -> KeptPlan | None:
    """Where the plan of a program for a cluster and demands is kept; None if nothing is to be kept."""
    if (directory := cache_directory("plans")) is None:
        return None
    said = repr((VERSION, jax.__version__, subject.fingerprint, cluster, asked))
    return KeptPlan(directory / f"{hashlib.blake2b(said.encode(), digest_size=16).hexdigest()}.json")
