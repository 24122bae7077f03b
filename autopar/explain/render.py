"""Explanations as tables of a terminal or a notebook.

One view serves both: rich lays it out, and a notebook gets the terminal's characters as HTML.  Tables show the
costliest rows and say how many they leave out; the fields of the explanation hold all of them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autopar.explain.compare import AmountChange, Comparison
from autopar.explain.data import LeafKind, MethodTotals, Parameter, Undivided
from autopar.explain.explanation import Explanation
from autopar.explain.words import SAME_SHARE, axes_text, seconds_text, signed
from autopar.plan import SolverReport
from autopar.wording import array_text, bytes_text, slashed, source_text

WIDTH = 120
NOTEBOOK_FORMAT = "<pre style='white-space:pre;overflow-x:auto;line-height:1.25;font-family:monospace'>{code}</pre>"

MOST_PARAMETERS = 14
MOST_ROWS = 10
MOST_TENANTS = 3
SMALL_SHARE = 1e-3
"""Rows below this share of the step's seconds are left out, unless they are the first."""


def as_text(shown: Any, width: int = WIDTH) -> str:
    """What a terminal of that width would show, without colours."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().splitlines())


def as_html(shown: Any, width: int = WIDTH) -> str:
    """The same for a notebook."""
    console = Console(
        file=io.StringIO(), width=width, record=True, force_terminal=True, color_system="truecolor", force_jupyter=False
    )
    console.print(shown)
    return console.export_html(inline_styles=True, code_format=NOTEBOOK_FORMAT)


def explanation_view(e: Explanation) -> Iterator[RenderableType]:
    """The parts of an explanation, top to bottom."""
    title = Text.assemble((e.function, "bold"), f" · {e.method} · mesh {e.mesh} · {e.cluster} ({e.hardware})")
    yield Panel(Text(e.verdict), title=title, title_align="left", box=box.ROUNDED, padding=(0, 1))
    sides = Table.grid(padding=(0, 3))
    sides.add_row(_time_table(e), _memory_table(e))
    yield sides
    yield _parameter_table(e)
    if e.methods:
        yield _method_table(e)
    yield _operator_table(e)
    if e.collectives:
        yield _collective_table(e)
    yield Group(*_remarks(e))


# -------------------------------------------------------------------------------------------------------------- tables


def new_table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first ``left`` columns are text and the others figures."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        figures = number >= left
        table.add_column(column, justify="right" if figures else "left", no_wrap=figures, overflow="fold")
    return table


def share(part: float, whole: float) -> str:
    """``12.5%``."""
    return f"{part / whole:.1%}" if whole else ""


def _time_table(e: Explanation) -> Table:
    time = e.time
    table = new_table("Predicted time of a step", "", "seconds", "share", "count", "sent")

    def add(what: str, seconds: float, *more: str, style: str = "") -> None:
        table.add_row(what, seconds_text(seconds), share(seconds, time.step_seconds), *more, style=style)

    add("forward and backward", time.compute_seconds - time.update_seconds)
    add("update", time.update_seconds)
    for row in time.communication:
        add(f"{row.kind} over {axes_text(row.axes)}", row.seconds, str(row.count), bytes_text(row.wire_bytes))
    if time.host_seconds:
        add("copies from and to host memory", time.host_seconds)
    if time.hidden_seconds:
        add("of communication hidden behind work", -time.hidden_seconds)
    add("step", time.step_seconds, style="bold")
    if e.measured is not None:
        ratio = e.measured.step_seconds / time.step_seconds
        table.add_row(
            f"measured (median of {e.measured.steps})",
            seconds_text(e.measured.step_seconds),
            f"×{ratio:.2f}",
            style="cyan",
        )
    return table


def _memory_table(e: Explanation) -> Table:
    memory = e.memory
    table = new_table("Predicted memory of a device", "", "bytes", "of budget")
    for kind, size in memory.by_kind:
        if size:
            table.add_row(kind, bytes_text(size), share(size, memory.budget_bytes))
    over = "" if memory.fits else " (over budget)"
    table.add_row(
        f"in all{over}", bytes_text(memory.total_bytes), share(memory.total_bytes, memory.budget_bytes), style="bold"
    )
    table.add_row("budget", bytes_text(memory.budget_bytes), "")
    if memory.host_bytes:
        table.add_row("in host memory", bytes_text(memory.host_bytes), "")
    if e.measured is not None:
        table.add_row(
            "XLA's account",
            bytes_text(e.measured.total_bytes),
            share(e.measured.total_bytes, memory.budget_bytes),
            style="cyan",
        )
    return table


def _parameter_table(e: Explanation) -> Table:
    title = "Parameters and optimizer state"
    table = new_table(title, "array, and why it does not lie otherwise", "at rest", "for use", "a device", left=3)
    shown = e.parameters[:MOST_PARAMETERS]
    for row in shown:
        use = "" if row.use == row.sharding or row.kind is not LeafKind.PARAMETER else row.use
        at_rest = f"{row.sharding}, host memory" if row.in_host else row.sharding
        table.add_row(parameter_cell(row), at_rest, use, bytes_text(row.bytes_per_device))
    rest = e.parameters[MOST_PARAMETERS:]
    if rest:
        count = sum(row.count for row in rest)
        held = bytes_text(sum(row.bytes_per_device for row in rest))
        table.add_row(Text(f"{count} smaller arrays", style="dim"), "", "", held)
    on_device = [row for row in e.parameters if not (row.in_host and e.memory.host_bytes)]
    table.add_row("in all", "", "", bytes_text(sum(row.bytes_per_device for row in on_device)), style="bold")
    if e.memory.host_bytes:
        table.add_row("in host memory", "", "", bytes_text(e.memory.host_bytes))
    return table


def parameter_cell(row: Parameter) -> Text:
    """Path, type and number of alike arrays, and why they lie so."""
    count = f" ×{row.count}" if row.count > 1 else ""
    cell = Text.assemble(slashed(row.path), (f"  {array_text(row.shape, row.dtype)}{count}", "cyan"))
    if row.why:
        cell.append(f"\n  {row.why}", style="dim")
    return cell


def _method_table(e: Explanation) -> Table:
    plan = MethodTotals(
        f"▸ {e.method}", str(e.mesh), e.time.step_seconds, e.time.compute_seconds, e.time.communication_seconds,
        e.memory.total_bytes, fits=e.memory.fits,
    )  # fmt: skip
    return totals_table(plan, e.time.step_seconds, e.methods)


def totals_table(plan: MethodTotals, plan_seconds: float, methods: Sequence[MethodTotals]) -> Table:
    """The plan and hand-made methods, the fastest first; of a pipeline compute and communication go side by side."""
    table = new_table(
        "Against hand-made plans", "method", "mesh", "step", "compute", "communication", "memory", "time", left=2
    )
    for row in (plan, *sorted(methods, key=lambda row: (row.step_seconds is None, row.step_seconds))):
        if row.step_seconds is None:
            table.add_row(row.name, Text(f"no plan: {_first_sentence(row.reason)}", style="dim"))
            continue
        over = "" if row.fits else "  (too much)"
        table.add_row(
            row.name,
            row.mesh,
            seconds_text(row.step_seconds),
            "" if row.compute_seconds is None else seconds_text(row.compute_seconds),
            "" if row.communication_seconds is None else seconds_text(row.communication_seconds),
            f"{bytes_text(row.memory_bytes or 0)}{over}",
            f"{row.step_seconds / plan_seconds:.2f}×",
            style="bold" if row is plan else "" if row.fits else "dim",
        )
    return table


def _first_sentence(text: str) -> str:
    return text.split(". ", 1)[0]


def _costliest(rows: Sequence[Any], e: Explanation) -> Sequence[Any]:
    """The first rows, as long as they are worth a line."""
    worth = SMALL_SHARE * e.time.step_seconds
    return [row for number, row in enumerate(rows[:MOST_ROWS]) if number == 0 or row.seconds >= worth]


def _rest(table: Table, rows: Sequence[Any], shown: int, columns: int, noun: str) -> None:
    """A last row for those that are not shown."""
    rest = rows[shown:]
    if rest:
        count = sum(row.count for row in rest)
        blanks = [""] * (columns - 3)
        table.add_row(f"{count} other {noun}", *blanks, "", seconds_text(sum(row.seconds for row in rest)), style="dim")


def _operator_table(e: Explanation) -> Table:
    table = new_table("Costliest operators", "operator", "how it is cut", "line", "runs", "seconds", left=3)
    shown = _costliest(e.operators, e)
    for row in shown:
        what = Text.assemble((f"{row.primitive} ", "bold"), row.equation, f"\n  {row.shapes}")
        how = Text(row.strategy)
        if row.repeated_over:
            how.append(f"\nthe same work over {axes_text(row.repeated_over)}", style="yellow")
        line = f"{source_text(row.source)}\n{row.phase}"
        table.add_row(what, how, line, str(row.count), seconds_text(row.seconds))
    _rest(table, e.operators, len(shown), 5, "operators")
    return table


def _collective_table(e: Explanation) -> Table:
    table = new_table("Collectives", "collective", "of", "for", "count", "full size", "sent", "seconds", left=3)
    shown = _costliest(e.collectives, e)
    for row in shown:
        origin = f"{source_text(row.origin)}\n{row.phase}"
        table.add_row(
            f"{row.kind} over {axes_text(row.axes)}", row.arrays, origin, str(row.count), bytes_text(row.full_bytes),
            bytes_text(row.wire_bytes), seconds_text(row.seconds),
        )  # fmt: skip
    _rest(table, e.collectives, len(shown), 7, "collectives")
    return table


# ------------------------------------------------------------------------------------------------------------- remarks


def _remarks(e: Explanation) -> Iterator[RenderableType]:
    """What is worth a line: large arrays, gaps in the rules, repeated work, padding, how the plan was found."""
    largest = [f"{name} {bytes_text(size)}" for name, size in e.memory.largest[:MOST_TENANTS]]
    if largest:
        yield remark("largest", ", ".join(largest))
    for row in e.uncovered[:MOST_ROWS]:
        yield remark(
            "no rule",
            f"{row.primitive} at {source_text(row.source)} ({row.shapes}) runs whole on every device, "
            f"{row.count}× a step, {seconds_text(row.seconds)}",
        )
    yield from _repeated(e)
    for one in e.undivided[:5]:
        yield remark("padding", _padding_text(one, e))
    yield remark("search", search_text(e.solver))
    for note in e.notes:
        yield remark("note", note)


def _padding_text(one: Undivided, e: Explanation) -> str:
    saved = [seconds_text(one.saved_seconds)] if one.saved_seconds > SAME_SHARE * e.time.step_seconds else []
    saved += [f"{bytes_text(one.saved_bytes)} a device"] if one.saved_bytes else []
    gain = f"would save up to {' and '.join(saved)}" if saved else "would save nothing in this plan"
    return (
        f"{slashed(one.path)} dimension {one.dimension} is {one.extent}, not a multiple of {one.pieces}; "
        f"padding it to {one.padded} {gain}"
    )


def _repeated(e: Explanation) -> Iterator[RenderableType]:
    """Work that devices do alike, by the axes over which they do."""
    for axes in dict.fromkeys(row.repeated_over for row in e.repeated):
        rows = [row for row in e.repeated if row.repeated_over == axes]
        places = list(dict.fromkeys(f"{row.primitive} at {source_text(row.source)}" for row in rows))
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        seconds = seconds_text(sum(row.seconds for row in rows))
        yield remark("repeated", f"{seconds} are the same work over {axes_text(axes)}: {', '.join(places[:3])}{more}")


def remark(label: str, text: str) -> RenderableType:
    """A line with a word in front."""
    row = Table.grid(padding=(0, 2))
    row.add_column(width=8, style="bold")
    row.add_column()
    row.add_row(label, Text(text))
    return row


def search_text(solver: SolverReport) -> str:
    """How large the integer program was, and what is proven of its solution."""
    proof = "proven optimal" if solver.gap <= 1e-6 else f"proven to be within {solver.gap:.2%} of the optimum"
    seconds = f", {solver.seconds:.1f} s" if solver.seconds else ""
    meshes = f"; meshes tried: {', '.join(solver.meshes_tried)}" if solver.meshes_tried else ""
    return (
        f"{solver.variables:,} variables, {solver.variables_after_reduction:,} after reduction"
        f"{seconds}; {proof} for the integer program of this mesh{meshes}"
    )


# ---------------------------------------------------------------------------------------------------------- comparison


def comparison_view(c: Comparison) -> Iterator[RenderableType]:
    """The parts of a comparison, top to bottom."""
    if c.is_empty:
        yield Text(f"{c.first} and {c.second}: the same layouts and the same predictions.")
        return
    yield Text.assemble("From ", (c.first, "bold"), " to ", (c.second, "bold"))
    if c.seconds:
        yield _amounts("Seconds of a step", c.seconds, seconds_text)
    if c.bytes:
        yield _amounts("Bytes of a device", c.bytes, bytes_text)
    if c.layouts:
        yield _layout_changes(c)
    for name, paths in (("first", c.only_first), ("second", c.only_second)):
        if paths:
            more = " …" if len(paths) > MOST_ROWS else ""
            yield Text(f"Only the {name} has {', '.join(map(slashed, paths[:MOST_ROWS]))}{more}")


def _amounts(title: str, rows: Sequence[AmountChange], text: Any) -> Table:
    table = new_table(title, "", "first", "second", "difference")
    for row in rows:
        table.add_row(row.what, text(row.first), text(row.second), signed(text(row.difference)))
    return table


def _layout_changes(c: Comparison) -> Table:
    table = new_table("Layouts (at rest → for use)", "array", "first", "second", "difference", left=3)
    for row in c.layouts[:MOST_PARAMETERS]:
        count = f"  ×{len(row.paths)}" if len(row.paths) > 1 else ""
        first = row.first if row.first == row.first_use else f"{row.first} → {row.first_use}"
        second = row.second if row.second == row.second_use else f"{row.second} → {row.second_use}"
        table.add_row(
            f"{slashed(row.path)}{count}", first, second, signed(bytes_text(row.second_bytes - row.first_bytes))
        )
    rest = c.layouts[MOST_PARAMETERS:]
    if rest:
        size = sum(row.second_bytes - row.first_bytes for row in rest)
        table.add_row(
            f"{sum(len(row.paths) for row in rest)} more arrays", "", "", signed(bytes_text(size)), style="dim"
        )
    return table
