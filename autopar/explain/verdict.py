"""The whole plan in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.explain.data import Leaf, LeafKind, MethodTotals
from autopar.explain.pipeline import StageRow
from autopar.explain.words import SAME_SHARE, axes_text, seconds_text
from autopar.plan import Axes, Layout, Plan
from autopar.wording import bytes_text

MOSTLY = 0.98
"""A share of the bytes from which on the rest goes unmentioned."""


MOST_STAGES = 4
"""So many stages are described in a sentence."""


def verdict_text(plan: Plan, leaves: Sequence[Leaf], methods: Sequence[MethodTotals], budget_bytes: float) -> str:
    """What is cut over what, what a step costs, and how the best hand-made methods compare."""
    prediction = plan.prediction
    parts = [
        _batch_text(leaves, plan),
        _kind_text("parameters", [leaf for leaf in leaves if leaf.kind is LeafKind.PARAMETER], plan),
        _kind_text("optimizer state", [leaf for leaf in leaves if leaf.kind is LeafKind.OPTIMIZER], plan),
    ]
    layout = "; ".join(part for part in parts if part)
    time = (
        f"{seconds_text(prediction.step_seconds)} a step predicted: {seconds_text(prediction.compute_seconds)} compute "
        f"+ {seconds_text(prediction.communication_seconds)} communication"
    )
    if prediction.allocation_seconds:
        time += f" + {seconds_text(prediction.allocation_seconds)} for new memory"
    if prediction.host_seconds:
        time += f" + {seconds_text(prediction.host_seconds)} for copies from and to host memory"
    if prediction.hidden_seconds:
        time += f" − {seconds_text(prediction.hidden_seconds)} hidden behind work"
    used = prediction.memory.total_bytes
    memory = f"{bytes_text(used)} of {bytes_text(budget_bytes)} a device ({_percent(used / budget_bytes)})"
    if prediction.memory.host_bytes:
        memory += f", and {bytes_text(prediction.memory.host_bytes)} for each in host memory"
    sentence = f"{layout}. {time}; {memory}. {_rivals_text(plan, methods)}"
    return sentence[0].upper() + sentence[1:].rstrip()


def pipeline_verdict(plan: Plan, stages: Sequence[StageRow], step_seconds: float, single: MethodTotals) -> str:
    """How the devices share the model, what a step costs, and what the best plan without a pipeline would cost."""
    who = "meshes" if plan.shares else "stages"
    said = [(f"{row.first} … {row.last}" if not row.share else _share_text(row), _devices_text(row)) for row in stages]
    parts = [f"{what} on {where}" for what, where in said[:MOST_STAGES]]
    if len(stages) > MOST_STAGES:
        parts.append(f"{len(stages) - MOST_STAGES} more {who}")
    if plan.shares:
        parts[0] = f"The whole model on every mesh: {parts[0]}"
    busy = [row.busy_fraction for row in stages]
    fullest = max(stages, key=lambda row: row.peak_bytes / row.budget_bytes)
    held, budget_bytes = fullest.peak_bytes, fullest.budget_bytes
    sentence = (
        f"{'; '.join(parts)}. {seconds_text(step_seconds)} a step predicted, in which {who} work {min(busy):.0%} to "
        f"{max(busy):.0%} of the time; {bytes_text(held)} of {bytes_text(budget_bytes)} a device "
        f"({_percent(held / budget_bytes)})."
    )
    without = "On one mesh" if plan.shares else "Without a pipeline"
    if single.step_seconds is not None and single.fits:
        sentence += f" {without}: {_ratio_text(single.step_seconds / plan.step_seconds)}."
    elif single.step_seconds is not None:
        sentence += f" {without} no plan keeps the memory budget."
    return sentence


def _share_text(row: StageRow) -> str:
    return "1 microbatch" if row.share == 1 else f"{row.share} microbatches"


def _devices_text(row: StageRow) -> str:
    return f"{len(row.devices)} {'device' if len(row.devices) == 1 else 'devices'} ({row.mesh})"


def _percent(share: float) -> str:
    return "under 1%" if share < 0.01 else f"{share:.0%}"


def _batch_text(leaves: Sequence[Leaf], plan: Plan) -> str:
    batch = [leaf for leaf in leaves if leaf.kind is LeafKind.BATCH and leaf.shape]
    if not batch:
        return ""
    ((layout, _),) = Counter(leaf.use_layout or leaf.layout for leaf in batch).most_common(1)
    if not layout.axes:
        return "batch whole on every device"
    places = [
        f"{'batch' if d == 0 else f'batch arrays’ dimension {d}'} over {_sized(a, plan)}"
        for d, a in enumerate(layout.dims)
        if a
    ]
    return " and ".join(places)


def _kind_text(noun: str, leaves: Sequence[Leaf], plan: Plan) -> str:
    """How most of the bytes of some leaves lie."""
    weights: Counter[Axes] = Counter()
    for leaf in leaves:
        weights[_axes_of(leaf.layout, plan)] += leaf.whole_bytes
    total = sum(weights.values())
    if not total:
        return ""
    said = []
    covered = 0
    for axes, weight in weights.most_common(3):
        share = "" if weight >= MOSTLY * total else f"{weight / total:.0%} "
        said.append(f"{share}{_cut_text(axes, plan)}")
        covered += weight
        if covered >= MOSTLY * total:
            break
    gathered = sum(leaf.whole_bytes for leaf in leaves if _is_gathered(leaf))
    cut = total - weights[()]
    use = " (gathered for use)" if cut and gathered > cut / 2 else ""
    return f"{noun} {', '.join(said)}{use}"


def _cut_text(axes: Axes, plan: Plan) -> str:
    return f"cut over {_sized(axes, plan)}" if axes else "whole"


def _sized(axes: Axes, plan: Plan) -> str:
    return f"{axes_text(axes)} ({plan.mesh.axis_size(*axes)})"


def _axes_of(layout: Layout, plan: Plan) -> Axes:
    return tuple(name for name in plan.mesh.axis_names if name in layout.axes)


def _is_gathered(leaf: Leaf) -> bool:
    return leaf.use_layout is not None and len(leaf.use_layout.axes) < len(leaf.layout.axes)


def _rivals_text(plan: Plan, methods: Sequence[MethodTotals]) -> str:
    """The best hand-made method that fits, and the others by how much slower they are."""
    fitting = [(row.step_seconds, row.name) for row in methods if row.fits and row.step_seconds is not None]
    rivals = sorted(rival for rival in fitting if rival[1] != plan.method)
    if not rivals:
        return "No hand-made method fits." if methods and not fitting else ""
    first, *others = (f"{name} {_ratio_text(seconds / plan.step_seconds)}" for seconds, name in rivals)
    return f"Best hand-made method: {first}" + (f"; then {', '.join(others)}." if others else ".")


def _ratio_text(ratio: float) -> str:
    if abs(ratio - 1) < SAME_SHARE:
        return "as fast"
    return f"{ratio:.2f}× the time" if ratio < 9.95 else f"{ratio:.0f}× the time"
