"""The explanation of a pipeline as tables and a timeline, for a terminal or a notebook.

In the timeline a column is a piece of the step, the same for all meshes, and shows what fills most of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from autopar.explain.data import MethodTotals
from autopar.explain.pipeline import PassageRow, PipelineExplanation, Span, TimelineRow, Work
from autopar.explain.render import MOST_PARAMETERS, new_table, parameter_cell, remark, search_text, share, totals_table
from autopar.explain.words import axes_text, seconds_text
from autopar.wording import bytes_text, slashed

TIMELINE_WIDTH = 80
MOST_SENT = 3
IDLE = "·"
ONCE = "■"
MOVE = "»"
FORWARD_DIGITS = "0123456789"
BACKWARD_DIGITS = "₀₁₂₃₄₅₆₇₈₉"
WEIGHT_DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_DIGITS = {Work.FORWARD: FORWARD_DIGITS, Work.BACKWARD: BACKWARD_DIGITS, Work.WEIGHT: WEIGHT_DIGITS}
_STYLES = {Work.FORWARD: "cyan", Work.BACKWARD: "magenta", Work.WEIGHT: "blue", Work.ONCE: "yellow", Work.MOVE: "green"}


def pipeline_view(e: PipelineExplanation) -> Iterator[RenderableType]:
    """The parts of an explanation, top to bottom."""
    count = "1 microbatch" if e.num_microbatches == 1 else f"{e.num_microbatches} microbatches"
    dealt = "" if len(e.timeline) == len(e.stages) else f" on {len(e.timeline)} meshes"
    stages = f"{len(e.stages)} stages{dealt}, {e.schedule} over {count}"
    if e.has_shares:
        stages = (
            f"the whole model on {len(e.stages)} meshes, {' + '.join(str(row.share) for row in e.stages)} of {count}"
        )
    title = Text.assemble((e.function, "bold"), f" · {e.method} · {stages} · {e.cluster}")
    yield Panel(Text(e.verdict), title=title, title_align="left", box=box.ROUNDED, padding=(0, 1))
    yield _what_table(e)
    yield _share_table(e) if e.has_shares else _cost_table(e)
    yield _timeline(e)
    yield _passage_table(e)
    yield _layout_table(e)
    if e.methods:
        yield _method_table(e)
    yield Group(*_remarks(e))


def _what_table(e: PipelineExplanation) -> RenderableType:
    what = new_table("Stages", "", "forward pass from … to", "devices", "mesh", "axes in use", left=5)
    for row in e.stages:
        span = row.first if row.first == row.last else f"{row.first} …\n{row.last}"
        operators = "1 operator" if row.num_operators == 1 else f"{row.num_operators} operators"
        devices = ", ".join(map(str, row.devices)) + (f" ({row.kind})" if row.kind else "")
        axes = axes_text(row.axes_in_use) or "none"
        what.add_row(str(row.number), f"{span}, {operators}", devices, str(row.mesh), axes)
    return what


def _share_table(e: PipelineExplanation) -> RenderableType:
    cost = new_table(
        "Time and memory of a mesh", "", "microbatches", "each, both passes", "before", "update", "busy",
        "state", "peak of a device", "of budget",
    )  # fmt: skip
    for row in e.stages:
        cost.add_row(
            str(row.number),
            str(row.share),
            *map(seconds_text, (row.forward_seconds, row.before_seconds, row.update_seconds)),
            f"{row.busy_fraction:.0%}",
            bytes_text(row.state_bytes),
            bytes_text(row.peak_bytes),
            share(row.peak_bytes, row.budget_bytes),
        )
    return cost


def _cost_table(e: PipelineExplanation) -> RenderableType:
    cost = new_table(
        "Time and memory of a stage; forward and backward of one microbatch, the rest of a step", "", "forward", "backward",
        "before", "update", "busy", "in flight", "state", "peak of a device", "of budget",
    )  # fmt: skip
    for row in e.stages:
        cost.add_row(
            str(row.number),
            seconds_text(row.forward_seconds),
            seconds_text(row.backward_seconds)
            + (f" + {seconds_text(row.weight_seconds)}" if row.weight_seconds else ""),
            *map(seconds_text, (row.before_seconds, row.update_seconds)),
            f"{row.busy_fraction:.0%}",
            str(row.in_flight),
            bytes_text(row.state_bytes),
            bytes_text(row.peak_bytes),
            share(row.peak_bytes, row.budget_bytes),
        )
    cost.add_row("budget", *[""] * 7, bytes_text(e.budget_bytes), "", style="dim")
    return cost


# -------------------------------------------------------------------------------------------------------------- timeline


def _timeline(e: PipelineExplanation) -> RenderableType:
    names = [f"stage {', '.join(map(str, row.stages))}" for row in e.timeline]
    width = max(map(len, names))
    lines = [Text("A step, from left to right", style="bold")]
    for name, row in zip(names, e.timeline, strict=True):
        line = Text(f"{name:>{width}} │")
        for character, work in timeline_cells(row, e.step_seconds):
            line.append(character, style="dim" if work is None else _STYLES[work])
        lines.append(line.append("│"))
    end = f"{seconds_text(e.step_seconds)} predicted"
    if e.measured_seconds is not None:
        ratio = e.measured_seconds / e.step_seconds
        end += f"; measured {seconds_text(e.measured_seconds)} (median of {e.measured_steps}), ×{ratio:.2f}"
    lines.append(Text(f"{'':>{width}}  0 … {end}"))
    passes = f"{FORWARD_DIGITS[1]} forward, {BACKWARD_DIGITS[1]} backward (last digit of the microbatch)"
    legend = f"{'1 its microbatches, both passes' if e.has_shares else passes}, {ONCE} once in a step"
    kinds = {span.work for row in e.timeline for span in row.spans}
    legend += f", {WEIGHT_DIGITS[1]} weights" if Work.WEIGHT in kinds else ""
    legend += f", {MOVE} handed on" if Work.MOVE in kinds else ""
    lines.append(Text(f"{'':>{width}}  {legend}, {IDLE} idle", style="dim"))
    busy = {row.devices: row.busy_fraction for row in e.stages}
    idle = sum(1 - fraction for fraction in busy.values()) / len(busy)
    bubble = f"idle {idle:.0%} of the time"
    if not e.has_shares:
        bubble += f"; equal stages with messages that cost nothing: {e.bubble_fraction:.0%}"
    return Group(*lines, Text(f"{'':>{width}}  {bubble}"), Text())


def _character(span: Span) -> str:
    if span.work is Work.ONCE:
        return ONCE
    if span.work is Work.MOVE:
        return MOVE
    return _DIGITS[span.work][span.microbatch % 10]


def timeline_cells(row: TimelineRow, step_seconds: float, width: int = TIMELINE_WIDTH) -> list[tuple[str, Work | None]]:
    """For each column of the timeline its character, and the kind of work (None: idle) that fills most of it."""
    column_seconds = step_seconds / width
    filled: list[dict[tuple[str, Work | None], float]] = [{(IDLE, None): column_seconds} for _ in range(width)]
    for span in row.spans:
        cell = (_character(span), span.work)
        first = min(width - 1, int(span.start_seconds / column_seconds))
        last = min(width - 1, int(span.end_seconds / column_seconds))
        for column in range(first, last + 1):
            start, end = column * column_seconds, (column + 1) * column_seconds
            seconds = min(span.end_seconds, end) - max(span.start_seconds, start)
            filled[column][cell] = filled[column].get(cell, 0.0) + seconds
            filled[column][IDLE, None] -= seconds
    return [max(column, key=column.__getitem__) for column in filled]


# ---------------------------------------------------------------------------------------------------------------- tables


def _passage_table(e: PipelineExplanation) -> RenderableType:
    rows = new_table(
        "What crosses between stages", "from → to", "over", "the largest arrays",
        "a microbatch", "takes", "a step", "on links", left=3,
    )  # fmt: skip
    for row in e.passages:
        rows.add_row(
            f"{row.source} → {row.target}",
            row.link,
            _sent_text(row),
            bytes_text(row.bytes_per_microbatch),
            seconds_text(row.seconds_per_microbatch),
            bytes_text(row.bytes_per_step),
            bytes_text(row.link_bytes),
        )
    return rows


def _sent_text(row: PassageRow) -> str:
    lines = []
    for one in row.sent[:MOST_SENT]:
        often = "a microbatch" if one.per_microbatch else "once"
        place = f" at {one.source}" if one.source else ""
        lines.append(f"{slashed_leaf(one.what)}{place}, {bytes_text(one.size_bytes)} {often}")
    if rest := row.sent[MOST_SENT:]:
        lines.append(f"{len(rest)} more, {bytes_text(sum(one.size_bytes for one in rest))}")
    return "\n".join(lines)


def slashed_leaf(what: str) -> str:
    """A leaf's path, if there is one before the type, in the way of constraints."""
    path, _, kind = what.rpartition(" ")
    return f"{slashed(path)} {kind}" if path and " of " not in what else what


def _layout_table(e: PipelineExplanation) -> RenderableType:
    rows = new_table("Parameters and optimizer state", "array", "stage", "at rest", "for use", "a device", left=4)
    for row in e.parameters[:MOST_PARAMETERS]:
        use = "" if row.use == row.sharding else row.use
        stages = ", ".join(map(str, row.stages)) or "none"
        rows.add_row(parameter_cell(row), stages, row.sharding, use, bytes_text(row.bytes_per_device))
    rest = e.parameters[MOST_PARAMETERS:]
    for number in range(1, len(e.stages) + 1):
        here = [row for row in rest if row.stages[:1] == (number,)]
        if here:
            held = bytes_text(sum(row.bytes_per_device for row in here))
            rows.add_row(Text(f"{sum(row.count for row in here)} smaller arrays", "dim"), str(number), "", "", held)
    for number in range(1, len(e.stages) + 1):
        held_bytes = sum(row.bytes_per_device for row in e.parameters if row.stages[:1] == (number,))
        rows.add_row("in all", str(number), "", "", bytes_text(held_bytes), style="bold")
    return rows


def _method_table(e: PipelineExplanation) -> RenderableType:
    meshes = " | ".join(dict.fromkeys(str(row.mesh) for row in e.stages))
    fits = all(row.peak_bytes <= row.budget_bytes for row in e.stages)
    plan = MethodTotals(f"▸ {e.method}", meshes, e.step_seconds, None, None, e.bytes_per_device, fits)
    return totals_table(plan, e.step_seconds, e.methods)


def _remarks(e: PipelineExplanation) -> Iterator[RenderableType]:
    yield remark("hardware", e.hardware)
    for what, seconds in e.alternatives:
        yield remark("against", f"{what}: {seconds_text(seconds)}, {seconds / e.step_seconds:.2f}× the time")
    if e.num_microbatches > 1 and e.microbatch_size:
        size = e.microbatch_size
        yield remark("batch", f"{size * e.num_microbatches} examples in {e.num_microbatches} microbatches of {size}")
    yield remark("search", search_text(e.solver))
    for note in e.notes:
        yield remark("note", note)
