"""The driver of :mod:`tests.test_ray_hosts`, run on the first of its hosts: ``python -m tests.on_hosts CASES.json SAID.json``.

A case is a model, the options of :func:`autopar.parallelize`, and on how many hosts (all, if not said).  It is run on the
hosts, by the same plan in this process, and under ``jax.jit``; what is said of it are the leaves in which they differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401 - sets the environment, before JAX is imported
from autopar.cluster import Cluster
from autopar.plan import Plan

DEVICES_PER_HOST = 2
STEPS = 4


def main() -> None:
    """Run all cases; of one that raises the error is what is said."""
    import ray

    cases, said = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    ray.init(address="auto", log_to_driver=False)
    found = {}
    clusters: dict[int | None, Cluster] = {}
    try:
        for name, case in cases.items():
            hosts = case.get("hosts")
            if hosts not in clusters:
                clusters[hosts] = Cluster.ray("auto", hosts=hosts, devices_per_host=DEVICES_PER_HOST)
            found[name] = differences(clusters[hosts], case["model"], case["options"])
            said.write_text(json.dumps(found))
            print(name, found[name] or "as under jax.jit", flush=True)
    finally:
        for cluster in clusters.values():
            cluster.close()


def differences(cluster: Cluster, name: str, options: dict[str, Any]) -> dict[str, str]:
    """Leaves that are otherwise than they should be, with how much."""
    import jax.numpy as jnp

    from tests.test_correctness import wrong_leaves
    from tests.toy_runs import precision, reference

    expected = reference(name, jnp.float64, STEPS)
    with precision(jnp.float64):
        there, plan = outcome(cluster, name, options, None)
        here, _ = outcome(cluster.replace(runs_on=None), name, {}, plan)
    found: dict[str, str] = {}
    for other, label in ((expected, "jax.jit"), (here, "this process")):
        pairs = [(other.state, there.state), *zip(other.metrics, there.metrics, strict=True)]
        for theirs, ours in pairs:
            found.update({f"{path}, {label}": why for path, why in wrong_leaves(theirs, ours).items()})
    return found


def outcome(cluster: Cluster, name: str, options: dict[str, Any], plan: Plan | None) -> tuple[Any, Plan]:
    """Some steps of a model on a cluster, by a plan if one is given."""
    import jax.numpy as jnp

    import autopar
    from benchmarks.models import build
    from tests.toy_runs import run

    model = build(name, dtype=jnp.float64)
    step = autopar.parallelize(model.train_step, cluster=cluster, **options)
    if plan is not None:
        step.use(plan)
    state = step.init(model.make_state, model.abstract_batch())
    return run(model, step, state, STEPS), step.last.plan


if __name__ == "__main__":
    main()
