"""One step compiled for one plan, as it is called with the leaves of its arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import tree_util

from autopar.cluster import Cluster
from autopar.errors import PlanError, TraceError
from autopar.homes import devices_here
from autopar.inter_op.assemble import Assembled
from autopar.plan import Plan
from autopar.runtime.distributed_array import DistributedArray
from autopar.runtime.distributed_pipeline import DistributedPipelineExecutor
from autopar.runtime.executor import Executor
from autopar.runtime.pieced_array import PiecedArray, cut, whole
from autopar.runtime.pipeline import PipelineExecutor
from autopar.runtime.remote import RemoteExecutor
from autopar.schedule.pipeline import Pipeline
from autopar.schedule.spmd import SpmdProgram
from autopar.subjects import Subjected

MEASURED_STEPS = 8
"""So many first steps of an executable are waited for and timed."""


class Compiled:
    """One step compiled for one plan (what ``train_step.compile(...)`` returns); :meth:`run` takes its leaves."""

    def __init__(
        self,
        subject: Subjected,
        plan: Plan,
        runs: SpmdProgram | Pipeline,
        executor: Executor | PipelineExecutor | DistributedPipelineExecutor | RemoteExecutor,
    ) -> None:
        self.plan = plan
        self.runs = runs
        self.subject = subject
        self.executor = executor
        self.step_seconds: list[float] = []

    @property
    def program(self) -> SpmdProgram:
        """The one list of steps; raises :class:`~autopar.errors.PlanError` for a pipeline."""
        if isinstance(self.runs, Pipeline):
            raise PlanError("a pipeline has no one list of steps; each of its stages has its own, see .runs.stages")
        return self.runs

    def as_text(self) -> str:
        """The optimized HLO of the executable; of a pipeline that of all, each under a line that names it."""
        return self.executor.as_text()

    def memory_analysis(self) -> Any:
        """XLA's account of the bytes on one device (``argument + output − alias + temp`` is what a step needs).

        Of a pipeline: a mapping from (stage, part, segment) to the account of that executable.
        """
        return self.executor.memory_analysis()

    def run(self, leaves: list[Any]) -> Any:
        """Run on flat leaves; returns the function's result."""
        started = time.perf_counter()
        if isinstance(self.executor, DistributedPipelineExecutor):
            self.executor.refuse_if_failed()  # which is why the state was deleted, if it was
        self._refuse_without_value(leaves)
        leaves = self._apart(leaves)
        for position in self.subject.folded:
            shape = self.subject.program.in_avals[position].shape
            leaf = leaves[position]
            leaves[position] = leaf.reshape(shape) if isinstance(leaf, jax.Array) else np.reshape(leaf, shape)
        out = self.executor([*leaves, *self.subject.program.hidden])
        if len(self.step_seconds) < MEASURED_STEPS:
            # The first steps are timed to hold the prediction against; after that nothing waits for the devices.
            self.executor.wait(out)
            self.step_seconds.append(time.perf_counter() - started)
        return tree_util.tree_unflatten(self.subject.program.out_tree, self._together(out))

    def _apart(self, leaves: list[Any]) -> list[Any]:
        """The leaves as the program takes them: stacks of layers that stages share in their pieces, all others whole."""
        if self.subject.opened is None:
            return [whole(leaf) if isinstance(leaf, PiecedArray) else leaf for leaf in leaves]
        found: list[Any] = []
        for leaf, pieces in zip(leaves, self.subject.opened.inputs, strict=False):  # hidden inputs stand behind
            if pieces is not None:
                found += cut(leaf, pieces.dim, pieces.ends)
            else:
                found.append(whole(leaf) if isinstance(leaf, PiecedArray) else leaf)
        return found

    def _together(self, results: list[Any]) -> list[Any]:
        """The results of the step as it was written."""
        opened = self.subject.opened
        if opened is None:
            return results
        return [
            results[places[0]] if pieces is None else PiecedArray([results[place] for place in places], pieces.dim)
            for pieces, places in zip(opened.outputs, opened.output_positions(), strict=True)
        ]

    def _refuse_without_value(self, leaves: list[Any]) -> None:
        """Shapes, and arrays whose buffers an earlier step took over; those handed to XLA:CPU would end the process."""
        for path, leaf in zip(
            self.subject.as_written.program.in_paths, leaves, strict=False
        ):  # hidden inputs stand behind
            if isinstance(leaf, jax.Array | DistributedArray) and leaf.is_deleted():
                raise TraceError(
                    f"{path} was deleted: an earlier call took its memory over for the result (donation). Pass on the "
                    "state that the step returns, or keep the old one with parallelize(..., donate_argnums=())."
                )
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TraceError(
                    f"{path} is a shape without values; a call wants arrays. The methods plan and compile of the step "
                    "take shapes, and so does autopar.explain."
                )


def stages_here(
    whole: Assembled, subject: Subjected, cluster: Cluster, report_progress: Callable[[str], None]
) -> PipelineExecutor | DistributedPipelineExecutor:
    """What runs a pipeline in this process, or this process's part of it."""
    pipeline, transfers, devices = whole.pipeline, whole.transfers, devices_here(cluster)
    if not cluster.is_distributed:
        return PipelineExecutor(pipeline, transfers, devices, report_progress)
    carried = {output for _, output in subject.roles.state_pairs}
    return DistributedPipelineExecutor(pipeline, transfers, cluster, devices, carried, report_progress)
