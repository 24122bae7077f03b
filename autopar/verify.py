"""Does a step compile to what its plan predicts?  Plan, compile, read the compiled program, compare.

The plan is made before anything is compiled.  What compiles is the executable that a call of the step would run, on the
devices of this process or, by a compiler that needs no devices, on those of the cluster; both accounts are priced on the
same cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from autopar.api import parallelize
from autopar.cluster import Cluster
from autopar.compilers import Compiler, target_of
from autopar.cost_model.hlo import CompiledProgram, read_compiled, step_seconds, undo_widening
from autopar.errors import PlanError
from autopar.explain.verification import DEFAULT_TOLERANCES, Tolerances, Verification, held_against
from autopar.methods import Method
from autopar.parallelized import Parallelized
from autopar.plan import Plan


def verify_plan(  # noqa: PLR0913 - the options of a user, each by its name
    step: Parallelized | Callable[..., Any],
    *args: Any,
    cluster: Cluster | None = None,
    method: str | Method | None = None,
    mesh_shape: tuple[int, ...] | None = None,
    plan: Plan | None = None,
    compiler: str | Compiler | None = None,
    tolerances: Tolerances = DEFAULT_TOLERANCES,
    **kwargs: Any,
) -> Verification:
    """Hold what is predicted for a step against what it compiles to; ``print`` the result or look at its fields.

    ``step`` is a train step, decorated by :func:`autopar.parallelize` or not, ``args`` and ``kwargs`` its arguments
    (``jax.ShapeDtypeStruct`` leaves suffice; nothing is run).  ``cluster``, ``method`` and ``mesh_shape`` are as there and
    go before what the decorator says; a given ``plan`` is verified instead of a new one.  ``compiler`` compiles for a
    cluster of GPUs that are not here, with the extra ``gpu-compiler``: ``"h100"``, or another one of
    :class:`~autopar.compilers.Compiler`.

    Raises :class:`~autopar.errors.PlanError` if there is no plan or the given one does not fit,
    :class:`~autopar.errors.ClusterError` if this process has too few devices to compile for, or not that compiler.
    """
    compiler = None if compiler is None else Compiler.of(compiler)
    parallel = step if isinstance(step, Parallelized) else parallelize(step)
    said = {"method": method, "mesh_shape": mesh_shape}
    parallel = parallel.with_options(**{name: value for name, value in said.items() if value is not None})
    cluster = cluster or parallel.cluster
    if compiler is not None:
        target_of(compiler, cluster)  # refused before a plan is made
    if plan is None:
        plan = parallel.plan(*args, cluster=cluster, **kwargs)
    else:
        parallel.use(plan)
    if plan.is_pipeline:
        raise PlanError(
            f"the plan has {len(plan.stages)} stages, and what is verified is a step of one executable; verify a plan without "
            "stages="
        )
    compiled = parallel.compile(*args, cluster=cluster, compiler=compiler, **kwargs)
    read, notes = _read(compiled, cluster.part(plan.devices_of(0)), compiler)
    name = getattr(step, "__name__", type(step).__name__)
    return held_against(plan, read, name, tolerances, notes)


def _read(compiled: Any, cluster: Cluster, compiler: Compiler | None) -> tuple[CompiledProgram, tuple[str, ...]]:
    """The compiled program; compiled for another platform than planned for, without what that platform widens."""
    read = read_compiled(compiled, cluster)
    if compiler is not None:
        note = (
            f"compiled for {compiler.name} without the device: its matrix kernels are XLA's defaults, not the fastest"
        )
        return read, (note,)
    here, wanted = jax.devices()[0].platform, cluster.device.platform.value
    if here == wanted or (here, wanted) == ("gpu", "cuda"):
        return read, ()
    cost = step_seconds(read.module, cluster, undo_widening(read.cost.collectives), read.memory)
    note = f"planned for {wanted} and compiled for {here}: fusion, and with it memory, is that of {here}"
    return replace(read, cost=cost), (note,)
