"""Every toy model as planned on one GPU equals ``jax.jit`` on the same GPU, in float64.

A program of its own, for tests see no GPU: ``JAX_PLATFORMS=cuda,cpu python -m tests.models_on_gpu [MODEL …]``.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.cluster import Cluster, Platform
from autopar.errors import PlanError
from benchmarks.models import FAMILIES, Model, build
from tests.toy_runs import Run, precision, run

STEPS, RELATIVE = 5, 1e-9
OPTIONS = (
    {},
    {"num_microbatches": 2},
    {"remat": "full", "num_microbatches": 4},
    {"offload": "optimizer_state", "remat": "dots"},
)


def worst_leaf(ours: Run, theirs: Run) -> tuple[float, str]:
    """The largest error of a leaf of the state or of a metric, relative to the leaf's largest number."""
    worst = 0.0, ""
    for left, right in zip((ours.state, *ours.metrics), (theirs.state, *theirs.metrics), strict=True):
        assert left.keys() == right.keys()
        for path, wanted in right.items():
            if wanted.dtype.kind != "f":
                np.testing.assert_array_equal(left[path], wanted, err_msg=path)
            elif "['key']['bias']" not in path:  # truly zero: what is left is the rounding of zero over Adam's epsilon
                error = np.abs(left[path] - wanted).max(initial=0.0) / max(np.abs(wanted).max(initial=0.0), 1e-300)
                worst = max(worst, (float(error), path))
    return worst


def check(model: Model, cluster: Cluster, wanted: Run) -> None:
    """A model with every set of options."""
    for options in OPTIONS:
        step = autopar.parallelize(model.train_step, cluster=cluster, **options)
        try:
            state = step.init(model.make_state, model.abstract_batch())
        except PlanError as error:
            if "num_microbatches" not in options:
                raise
            print(f"{model.name} {options}: refused, {error}", flush=True)
            continue
        got = run(model, step, state, STEPS)
        error, path = worst_leaf(got, wanted)
        print(f"{model.name} {options}: {error:.1e} {path}", flush=True)
        assert error <= RELATIVE, (model.name, options, path, error)


def main() -> None:
    """Those that were named, or all."""
    cluster = Cluster.local(jax.devices()[:1])
    assert cluster.device.platform is Platform.CUDA, "a GPU is needed"
    for name in sys.argv[1:] or FAMILIES:
        with precision(jnp.float64):
            model = build(name, dtype=jnp.float64)
            check(model, cluster, run(model, jax.jit(model.train_step), jax.jit(model.make_state)(), STEPS))
    print("models on a GPU are right")


if __name__ == "__main__":
    main()
