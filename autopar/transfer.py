"""An old plan for new sizes: the same program with another batch, if every layout still divides."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.cluster import Cluster
from autopar.cost_model.memory import predict_memory
from autopar.cost_model.predict import predict
from autopar.graph.fusion import fuse
from autopar.graph.ir import Graph
from autopar.graph.roles import Role
from autopar.likeness import types_of
from autopar.plan import Layout, Plan, Stage, Strategy
from autopar.schedule.reshard import divides
from autopar.schedule.spmd import lower, output_layouts
from autopar.subjects import Demands, Subjected


def adapt_stage(
    plan: Plan, planned_for: Subjected, subject: Subjected, cluster: Cluster, demands: Demands
) -> Plan | None:
    """The plan, made for ``planned_for``, with the predictions of the new sizes; None where it no longer serves.

    That is when the program differs, or arrays other than the batch (a state of other sizes is another model, and has
    no place yet that it should keep), something no longer divides, or the memory budget is exceeded.
    """
    if plan.num_microbatches > 1 or plan.is_pipeline or plan.remat.is_any or plan.hosted:
        return None
    if _lasting(planned_for) != _lasting(subject):
        return None
    stage = plan.stages[0]
    graph = subject.graph
    if plan.in_paths != subject.program.in_paths or not _still_divides(stage, graph):
        return None
    fusion = fuse(graph)
    layouts = output_layouts(graph, stage, subject.roles.state_pairs)
    program = lower(graph, stage, layouts)
    donated = subject.donated if demands.donate_state else frozenset()
    memory = predict_memory(
        program,
        fusion=fusion,
        state_pairs=subject.roles.state_pairs,
        donated=donated,
        device=cluster.device,
        names=subject.names,
    )
    if memory.total_bytes > float(demands.memory_per_device or cluster.per_device_memory_bytes):
        return None
    return replace(
        plan,
        fingerprint=subject.fingerprint,
        out_layouts=layouts,
        prediction=predict(program, fusion, cluster.part(plan.devices_of(0)), memory),
    )


def _lasting(subject: Subjected) -> list[tuple[tuple[int, ...], str] | None]:
    """Shape and dtype of every input that is no batch."""
    types = types_of(subject.program)
    return [None if role is Role.BATCH else one for role, one in zip(subject.roles.roles, types, strict=True)]


def _still_divides(stage: Stage, graph: Graph) -> bool:
    """Whether every id of the stage names something of the same rank in the graph whose sizes divide."""
    mesh = stage.mesh
    values = {value.id: value for value in graph.all_values()}
    operators = {operator.id: operator for operator, _ in graph.all_operators()}

    def value_fits(identity: int, layout: Layout) -> bool:
        value = values.get(identity)
        return value is not None and len(value.shape) == len(layout.dims) and divides(value.shape, layout, mesh)

    def operator_fits(identity: int, strategy: Strategy) -> bool:
        operator = operators.get(identity)
        return (
            operator is not None
            and len(operator.rule.factors) == len(strategy.factors)
            and all(
                factor.size % math.prod(mesh.axis_size(axis) for axis in axes) == 0
                for factor, axes in zip(operator.rule.factors, strategy.factors, strict=True)
            )
        )

    described = {**stage.homes, **stage.copies}
    return all(value_fits(v, layout) for v, layout in described.items()) and all(
        operator_fits(o, strategy) for o, strategy in stage.strategies.items()
    )
