"""How the inputs of a step lie: leaf by leaf, alike leaves together, and dimensions that the devices do not divide."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.explain.data import (
    Change,
    Leaf,
    LeafKind,
    OperatorUse,
    Parameter,
    RunnerUp,
    Undivided,
    spec_text,
)
from autopar.explain.words import runner_ups_text, seconds_text
from autopar.graph.ir import Graph, Phase
from autopar.graph.roles import Role
from autopar.plan import Layout, Plan, Stage
from autopar.schedule.reshard import layouts_of, shares
from autopar.schedule.spmd import Run, SpmdProgram
from autopar.wording import families, family_name

if TYPE_CHECKING:
    from autopar.cluster import Mesh
    from autopar.intra_op.why import Alternative, Why
    from autopar.subjects import Subjected

KIND_OF_ROLE = {
    Role.BATCH: LeafKind.BATCH,
    Role.KEY: LeafKind.KEY,
    Role.HIDDEN: LeafKind.CLOSURE,
    Role.OTHER: LeafKind.OTHER,
}

PADDING_WORTH = 1 / 8
"""Padding that adds more than this share to a dimension is no remedy."""


def leaves_of(subject: Subjected, program: SpmdProgram, stage: Stage) -> tuple[Leaf, ...]:
    """Every input of the step, in order."""
    paths, kinds, used = subject.program.in_paths, kinds_of_inputs(subject), layouts_in_use(program)
    values = zip(subject.graph.inputs, paths, kinds, strict=True)
    leaves = [leaf_at(value, path, kind, program, stage, used) for value, path, kind in values]
    return tuple(replace(leaf, in_host=place in program.hosted.inputs) for place, leaf in enumerate(leaves))


def leaf_at(
    value_id: int, path: str, kind: LeafKind, program: SpmdProgram, stage: Stage, used: Mapping[int, Layout]
) -> Leaf:
    """An input of a program by the plan of its stage; ``used`` are the :func:`layouts_in_use` of the program."""
    value = program.values[value_id]
    layout = stage.home(value_id, len(value.shape))
    use = stage.copies.get(value_id) or used.get(value_id, layout)
    held_bytes = value.size_bytes // shares(layout, program.mesh)
    use_layout = None if use == layout else use
    return Leaf(path, kind, value.shape, value.dtype, layout, use_layout, value.size_bytes, held_bytes)


def kinds_of_inputs(subject: Subjected) -> tuple[LeafKind, ...]:
    """What each input of the step is for, in order."""
    graph = subject.graph
    read_early = _read_before_update(graph)
    found = []
    for value_id, role in zip(graph.inputs, subject.roles.roles, strict=True):
        kind = KIND_OF_ROLE.get(role)
        if kind is None:
            is_parameter = value_id in read_early and graph.values[value_id].shape
            kind = LeafKind.PARAMETER if is_parameter else LeafKind.OPTIMIZER
        found.append(kind)
    return tuple(found)


def _read_before_update(graph: Graph) -> set[int]:
    early = [operator for operator, _ in graph.all_operators() if operator.phase is not Phase.UPDATE]
    return {operand for operator in early for operand in operator.operands if operand is not None}


def layouts_in_use(program: SpmdProgram) -> dict[int, Layout]:
    """For inputs that are used before the update in one layout only: that layout."""
    seen: dict[int, set[Layout]] = defaultdict(set)
    inputs = {buffer.value for buffer in program.inputs}
    for step in program.steps:
        if isinstance(step, Run) and step.operator.phase is not Phase.UPDATE:
            for buffer in step.operands:
                if buffer is not None and buffer.value in inputs:
                    seen[buffer.value].add(buffer.layout)
    return {value: layout for value, layouts in seen.items() if len(layouts) == 1 for layout in layouts}


def parameter_groups(leaves: Sequence[Leaf]) -> tuple[tuple[int, ...], ...]:
    """Positions of alike parameters and of alike optimizer state; heaviest first, parameters before the optimizer's."""
    alike: dict[tuple[object, ...], dict[str, int]] = defaultdict(dict)
    for position, leaf in enumerate(leaves):
        if leaf.kind in (LeafKind.PARAMETER, LeafKind.OPTIMIZER):
            look = (leaf.kind, leaf.shape, leaf.dtype, leaf.layout, leaf.use_layout, leaf.stages, leaf.in_host)
            alike[look][leaf.path] = position
    groups = [
        tuple(positions[path] for path in members) for positions in alike.values() for _, members in families(positions)
    ]

    def weight(group: tuple[int, ...]) -> tuple[int, bool, int]:
        first = leaves[group[0]]
        return -first.whole_bytes * len(group), first.kind is not LeafKind.PARAMETER, group[0]

    return tuple(sorted(groups, key=weight))


def parameters_of(
    leaves: Sequence[Leaf],
    groups: Sequence[tuple[int, ...]],
    whys: Sequence[Why],
    inputs: Sequence[int],
    plan: Plan,
    said: Mapping[int, str],
) -> tuple[Parameter, ...]:
    """One row per group; ``whys`` answer for the groups in the same order, or are empty; ``inputs`` are value ids.

    ``said`` are the user's own demands, by position.
    """
    leaf_of = dict(zip(inputs, leaves, strict=True))
    found = []
    for number, group in enumerate(groups):
        first = leaves[group[0]]
        paths = tuple(leaves[position].path for position in group)
        why = whys[number] if whys else None
        others = () if why is None else tuple(_runner_up(other, leaf_of) for other in why.alternatives)
        asked = next((said[position] for position in group if position in said), "")
        found.append(
            Parameter(
                path=family_name(paths),
                paths=paths,
                kind=first.kind,
                shape=first.shape,
                dtype=first.dtype,
                sharding=first.sharding,
                use=first.use,
                whole_bytes=first.whole_bytes * len(group),
                bytes_per_device=first.bytes_per_device * len(group),
                why=asked if why is None else _why_text(why, others, first, plan, asked),
                runner_ups=others,
                stages=first.stages,
                in_host=first.in_host,
            )
        )
    return tuple(found)


def _runner_up(other: Alternative, leaf_of: Mapping[int, Leaf]) -> RunnerUp:
    moved = [leaf_of[value] for value in other.moved]
    return RunnerUp(
        sharding=spec_text(other.layout),
        use=spec_text(other.copy or other.layout),
        extra_seconds=other.extra_seconds,
        changes=tuple(Change(c.what, c.axes, c.phase, c.seconds) for c in other.changes),
        extra_state_bytes=other.extra_state_bytes,
        moved=tuple(leaf.path for leaf in moved),
        moved_parameters=tuple(leaf.path for leaf in moved if leaf.kind is LeafKind.PARAMETER),
    )


def _why_text(why: Why, others: Sequence[RunnerUp], leaf: Leaf, plan: Plan, asked: str) -> str:
    match why.answer.value:
        case "only_choice" | "left_out" if asked:
            text = ""
        case "compared":
            text = runner_ups_text(others, plan.step_seconds)
        case "leanest":
            text = "only the plan that holds the fewest bytes keeps the memory budget"
        case "only_choice" | "left_out" if not leaf.shape:
            text = "a scalar"
        case "only_choice":
            text = f"the only layout that {plan.method}, the constraints and the shape leave"
        case "left_out":
            text = "others, if there are any, were left out of so large a program, as their bounds are worse"
        case _:
            text = ""
    if why.unlimited is not None:
        gain = seconds_text(why.unlimited_gain_seconds)
        text += f"; without the memory budget {spec_text(why.unlimited)}, in a plan that is {gain} faster"
    return "; ".join(filter(None, (asked, text.removeprefix("; "))))


# ------------------------------------------------------------------------------------------- what does not divide


def undivided(
    leaves: Sequence[Leaf], groups: Sequence[tuple[int, ...]], operators: Sequence[OperatorUse], mesh: Mesh
) -> tuple[Undivided, ...]:
    """Dimensions of parameters that are not a multiple of the number of devices but nearly so; most saving first."""
    found = []
    for group in groups:
        first = leaves[group[0]]
        if first.kind is not LeafKind.PARAMETER:
            continue
        for dimension, extent in enumerate(first.shape):
            padded = math.ceil(extent / mesh.size) * mesh.size
            if padded == extent or padded - extent > PADDING_WORTH * extent:
                continue
            found.append(
                Undivided(
                    family_name(leaves[position].path for position in group),
                    dimension,
                    extent,
                    padded,
                    mesh.size,
                    _saved_bytes(first, extent, padded, mesh) * len(group),
                    _saved_seconds(operators, extent, padded, mesh),
                )
            )
    return tuple(sorted(found, key=lambda row: (-row.saved_seconds, -row.saved_bytes, row.path)))


def _saved_bytes(leaf: Leaf, extent: int, padded: int, mesh: Mesh) -> int:
    """What a device would hold less, unless the array can be cut into as many pieces elsewhere."""
    if any(shares(layout, mesh) == mesh.size for layout in layouts_of(leaf.shape, mesh)):
        return 0
    return max(0, leaf.bytes_per_device - leaf.whole_bytes // extent * padded // mesh.size)


def _saved_seconds(operators: Sequence[OperatorUse], extent: int, padded: int, mesh: Mesh) -> float:
    """Work along this dimension that devices do alike, less what they would do of the padded dimension."""
    total = 0.0
    for use in operators:
        if use.repeated_over and extent in use.uncut_sizes:
            total += max(0.0, use.seconds * (1 - padded / extent / mesh.axis_size(*use.repeated_over)))
    return total
