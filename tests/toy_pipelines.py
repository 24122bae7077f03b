"""Steps as loops over microbatches, and pipelines of them: what the tests of planned pipelines share."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from autopar.cluster import Cluster
from autopar.graph.build import build_graph
from autopar.graph.roles import Role, infer_roles
from autopar.graph.tracing import trace
from autopar.inter_op.accumulate import accumulated
from autopar.inter_op.arranged import Arrangement, PipelineFound, PipelineTask
from autopar.inter_op.examples import examples_of
from autopar.inter_op.looped import Looped, as_one_trip, looped
from autopar.inter_op.placing import forward_operators
from autopar.inter_op.stages import StagePlanner
from autopar.plan import Schedule
from benchmarks.models import Model, build
from tests.toy_runs import eight_slow_devices


@dataclass(frozen=True)
class Step:
    """A model's step as a loop over ``count`` microbatches, with the paths of its inputs; batch leaves by position."""

    model: Model
    loop: Looped
    state_pairs: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    batch: tuple[int, ...]
    hidden: tuple[Any, ...]

    def task(self, cluster: Cluster, budget_bytes: float = float("inf"), **rest: Any) -> PipelineTask:
        """The step on a cluster."""
        return PipelineTask(self.loop, self.state_pairs, cluster, budget_bytes, self.names, **rest)


def step_of(model: Model, count: int) -> Step:
    """The train step of a model with its batch cut into ``count`` microbatches."""
    program = trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {})
    roles = infer_roles(program)
    batch, state = roles.leaves(Role.BATCH), roles.leaves(Role.STATE)
    graph = build_graph(program.jaxpr, platform="cpu")
    if count == 1:
        cut = as_one_trip(program, graph, batch)
    else:
        cut = accumulated(program, examples_of(graph, batch, state, count), batch)
    loop = looped(build_graph(cut.jaxpr, platform="cpu"), batch, count)
    return Step(model, loop, tuple(roles.state_pairs), tuple(cut.in_paths), tuple(batch), cut.hidden)


@functools.cache
def toy_step(name: str, count: int, size: str = "toy", dtype: DTypeLike = jax.numpy.float32) -> Step:
    """The step of a family of models."""
    return step_of(build(name, size, dtype), count)


def even_cuts(step: Step, num_stages: int) -> tuple[int, ...]:
    """Stages of as many forward operators."""
    number = len(forward_operators(step.loop))
    return tuple(number * stage // num_stages for stage in range(1, num_stages))


def even_devices(cluster: Cluster, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """The devices of a cluster in as many runs of one length."""
    each = cluster.num_devices // num_stages
    return tuple(tuple(range(stage * each, (stage + 1) * each)) for stage in range(num_stages))


def two_stages(step: Step, schedule: Schedule = Schedule.ONE_F_ONE_B, cluster: Cluster | None = None) -> PipelineFound:
    """The step cut in the middle, each half on half of the devices."""
    cluster = cluster or eight_slow_devices()
    arrangement = Arrangement(even_cuts(step, 2), even_devices(cluster, 2), schedule)
    return StagePlanner(step.task(cluster)).plan(arrangement)
