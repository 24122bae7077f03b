"""Does a step compile to what its plan predicts?  Plan, compile, read the compiled program, compare.

The plan is made before anything is compiled.  What compiles is the executable that a call of the step would run, on the
devices of this process; both accounts are priced on the same cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from autopar.api import Parallelized, parallelize
from autopar.cluster import Cluster
from autopar.cost_model.hlo import CompiledProgram, memory_bytes, parse_module, step_seconds, undo_widening
from autopar.errors import PlanError
from autopar.explain.verification import DEFAULT_TOLERANCES, Tolerances, Verification, held_against
from autopar.methods import Method
from autopar.plan import Plan


def verify_plan(
    step: Parallelized | Callable[..., Any],
    *args: Any,
    cluster: Cluster | None = None,
    method: str | Method | None = None,
    mesh_shape: tuple[int, ...] | None = None,
    plan: Plan | None = None,
    tolerances: Tolerances = DEFAULT_TOLERANCES,
    **kwargs: Any,
) -> Verification:
    """Hold what is predicted for a step against what it compiles to; ``print`` the result or look at its fields.

    ``step`` is a train step, decorated by :func:`autopar.parallelize` or not, ``args`` and ``kwargs`` its arguments
    (``jax.ShapeDtypeStruct`` leaves suffice; nothing is run).  ``cluster``, ``method`` and ``mesh_shape`` are as there and
    go before what the decorator says; a given ``plan`` is verified instead of a new one.

    Raises :class:`~autopar.errors.PlanError` if there is no plan or the given one does not fit,
    :class:`~autopar.errors.ClusterError` if this process has too few devices to compile for.
    """
    parallel = step if isinstance(step, Parallelized) else parallelize(step)
    said = {"method": method, "mesh_shape": mesh_shape}
    parallel = parallel.with_options(**{name: value for name, value in said.items() if value is not None})
    cluster = cluster or parallel.cluster
    if plan is None:
        plan = parallel.plan(*args, cluster=cluster, **kwargs)
    else:
        parallel.use(plan)
    if plan.is_pipeline:
        raise PlanError(
            f"the plan has {len(plan.stages)} stages, and what is verified is a step of one executable; verify a plan without "
            "stages="
        )
    compiled = parallel.compile(*args, cluster=cluster, **kwargs)
    read, notes = _read(compiled, cluster)
    name = getattr(step, "__name__", type(step).__name__)
    return held_against(plan, read, name, tolerances, notes)


def _read(compiled: Any, cluster: Cluster) -> tuple[CompiledProgram, tuple[str, ...]]:
    """The compiled program; compiled for another platform than planned for, without what that platform widens."""
    module = parse_module(compiled.as_text())
    cost = step_seconds(module, cluster)
    here, wanted = jax.devices()[0].platform, cluster.device.platform.value
    if here == wanted or (here, wanted) == ("gpu", "cuda"):
        return CompiledProgram(module, cost, memory_bytes(compiled)), ()
    cost = step_seconds(module, cluster, undo_widening(cost.collectives))
    note = f"planned for {wanted} and compiled for {here}: fusion, and with it memory, is that of {here}"
    return CompiledProgram(module, cost, memory_bytes(compiled)), (note,)
