"""What a device does in a step: its operators and collectives, alike ones together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autopar.cost_model.predict import RunCost, run_costs
from autopar.explain.data import CollectiveGroup, Communication, OperatorUse
from autopar.explain.words import equation_text, shapes_text, strategy_text
from autopar.graph.fusion import Fusion
from autopar.graph.ir import FactorKind
from autopar.plan import Axes, CollectiveUse, Prediction
from autopar.schedule.spmd import Run, SpmdProgram
from autopar.wording import array_text, family_name, slashed

if TYPE_CHECKING:
    from autopar.cluster import Cluster, Mesh


def operator_uses(program: SpmdProgram, fusion: Fusion, cluster: Cluster) -> tuple[OperatorUse, ...]:
    """Every operator of the program, alike ones together, costliest first; their seconds sum to the compute seconds."""
    runs = [(s, trips) for s, trips in program.all_steps() if isinstance(s, Run) and not s.bodies]
    alike: dict[tuple[object, ...], list[tuple[Run, int, RunCost]]] = defaultdict(list)
    for (run, trips), cost in zip(runs, run_costs(program, fusion, cluster), strict=True):
        operator = run.operator
        shapes = shapes_text(
            [None if value is None else program.values[value] for value in operator.operands],
            [program.values[value] for value in operator.results],
        )
        strategy = strategy_text(operator, run.strategy)
        look = (operator.primitive, shapes, strategy, operator.phase, str(operator.source), operator.rule.known)
        alike[look].append((run, trips, cost))
    uses = [_use(members, str(look[1]), str(look[2]), program.mesh) for look, members in alike.items()]
    return tuple(sorted(uses, key=lambda use: (-use.seconds, use.source, use.primitive)))


def _use(members: list[tuple[Run, int, RunCost]], shapes: str, strategy: str, mesh: Mesh) -> OperatorUse:
    run = members[0][0]
    operator = run.operator
    idle = _idle_axes(run, mesh)
    rule = operator.rule
    uncut = {
        factor.size
        for factor, axes in zip(rule.factors, run.strategy.factors, strict=True)
        if not axes and factor.kind is not FactorKind.BLOCKED
    }
    return OperatorUse(
        primitive=operator.primitive,
        shapes=shapes,
        equation=equation_text(operator),
        strategy=strategy,
        repeated_over=idle,
        uncut_sizes=tuple(sorted(uncut)),
        phase=operator.phase.value,
        source=str(operator.source),
        covered=rule.known or all(factor.size == 1 for factor in rule.factors),
        count=sum(trips for _, trips, _ in members),
        flops=sum(cost.flops for _, _, cost in members),
        seconds=sum(cost.seconds for _, _, cost in members),
    )


def _idle_axes(run: Run, mesh: Mesh) -> Axes:
    """Axes that cut no factor; summands that merely pass through are work that is done on each device."""
    busy = {axis for axes in run.strategy.factors for axis in axes}
    return tuple(n for n, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if n not in busy and size > 1)


def wasted_seconds(use: OperatorUse, mesh: Mesh) -> float:
    """What repeated work costs more than if the idle axes shared it."""
    return use.seconds * (1 - 1 / mesh.axis_size(*use.repeated_over))


# ---------------------------------------------------------------------------------------------------------- collectives


def communication_of(prediction: Prediction) -> tuple[Communication, ...]:
    """All collectives by kind and axes, costliest first; their seconds sum to the communication seconds."""
    alike: dict[tuple[str, Axes], list[CollectiveUse]] = defaultdict(list)
    for use in prediction.collectives:
        alike[use.kind, use.axes].append(use)
    rows = [
        Communication(
            kind, axes, sum(u.count for u in uses), sum(u.wire_bytes for u in uses), sum(u.seconds for u in uses)
        )
        for (kind, axes), uses in alike.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.kind, row.axes)))


def collective_groups(
    prediction: Prediction, program: SpmdProgram, names: Mapping[int, str]
) -> tuple[CollectiveGroup, ...]:
    """All collectives by kind, axes, phase and the line that they come from, costliest first."""
    alike: dict[tuple[str, Axes, str, str], list[CollectiveUse]] = defaultdict(list)
    for use in prediction.collectives:
        alike[use.kind, use.axes, use.phase, use.origin].append(use)
    rows = [
        CollectiveGroup(
            kind=kind,
            axes=axes,
            phase=phase,
            origin=origin,
            arrays=_arrays_text(uses, program, names),
            count=sum(use.count for use in uses),
            full_bytes=sum(use.full_bytes * use.count for use in uses),
            wire_bytes=sum(use.wire_bytes for use in uses),
            seconds=sum(use.seconds for use in uses),
        )
        for (kind, axes, phase, origin), uses in alike.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.kind, row.axes, row.origin)))


def _arrays_text(uses: list[CollectiveUse], program: SpmdProgram, names: Mapping[int, str]) -> str:
    """Names of inputs among the arrays, or the shapes of the others."""
    inputs = list(dict.fromkeys(names[use.value] for use in uses if use.value in names))
    values = [program.values[use.value] for use in uses if use.value not in names]
    shapes = list(dict.fromkeys(array_text(value.shape, value.dtype) for value in values))
    parts = ([slashed(family_name(inputs, most=2))] if inputs else []) + shapes[:2]
    return ", ".join(parts) + (f" and {len(shapes) - 2} more shapes" if len(shapes) > 2 else "")
