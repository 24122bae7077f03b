"""A verification as tables of a terminal or a notebook: predicted beside compiled, then what differs and where from."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autopar.explain.verification import NO_AXES, CollectiveFigure, Figure, Parting, Unit, Verification
from autopar.explain.words import axes_text, seconds_text, signed
from autopar.wording import bytes_text, source_text, three_digits

MOST_PARTINGS = 12
MOST_NAMES = 3
_YES, _NO = Text("yes", style="green"), Text("NO", style="bold red")


def verification_view(v: Verification) -> Iterator[RenderableType]:
    """The parts, top to bottom."""
    title = Text.assemble((v.function, "bold"), f" · {v.method} · mesh {v.mesh} · {v.cluster}")
    style = "green" if v.agrees else "red"
    yield Panel(Text(verdict(v)), title=title, title_align="left", box=box.ROUNDED, padding=(0, 1), border_style=style)
    yield _collective_table(v)
    yield _figure_table(v)
    if v.partings:
        yield _parting_table(v)
    if not v.figure("memory in all").agrees and v.largest:
        held = ", ".join(f"{name} {bytes_text(size)}" for name, size in v.largest[:MOST_NAMES])
        yield Text(f"largest in memory at the predicted peak: {held}")
    for note in v.notes:
        yield Text(f"note: {note}")


def verdict(v: Verification) -> str:
    """The whole in a sentence."""
    wrong = [f"{row.kind} over {_over(row)}" for row in v.collectives if not row.agrees]
    wrong += [row.what for row in v.figures if not row.agrees]
    limits = (
        f"bytes on the wire within {v.tolerances.wire_bytes:.0%}, arguments, outputs and alias exact, "
        f"memory in all within {v.tolerances.total_bytes:.0%}"
    )
    if not wrong:
        return f"The compiled program is what the plan predicted: {limits}."
    return f"The compiled program is not what the plan predicted ({limits}): {', '.join(wrong)}."


def _over(row: CollectiveFigure | Parting) -> str:
    return "groups of no mesh axis" if row.axes == NO_AXES else axes_text(row.axes)


def _off(predicted: float, compiled: float) -> str:
    if predicted == compiled:
        return "exact"
    return signed(f"{(predicted - compiled) / compiled:.1%}") if compiled else "only predicted"


def _table(title: str, text_columns: tuple[str, ...], figure_columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in text_columns:
        table.add_column(column, overflow="fold")
    for column in figure_columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _collective_table(v: Verification) -> Table:
    counts = ("arrays", "compiled", "in calls")
    table = _table(
        "Collectives of a step, on one device: arrays and bytes sent, predicted and compiled",
        ("collective", "over"),
        (*counts, "sent", "compiled", "off by", f"within {v.tolerances.wire_bytes:.0%}"),
    )
    for row in v.collectives:
        table.add_row(
            row.kind,
            _over(row),
            str(row.predicted_count),
            str(row.compiled_count),
            str(row.compiled_launches),
            bytes_text(row.predicted_wire_bytes),
            bytes_text(row.compiled_wire_bytes),
            _off(row.predicted_wire_bytes, row.compiled_wire_bytes),
            _YES if row.agrees else _NO,
        )
    if not v.collectives:
        table.add_row("none", "", "0", "0", "0", "0 B", "0 B", "exact", _YES)
    return table


def _figure_table(v: Verification) -> Table:
    table = _table(
        "Memory and work of a step, on one device", ("",), ("predicted", "compiled", "off by", "allowed", "within")
    )
    for row in v.figures:
        judged = row.tolerance is not None
        table.add_row(
            row.what if row.unit is not Unit.SECONDS else f"seconds: {row.what}",
            _amount(row, row.predicted),
            _amount(row, row.compiled),
            _off(row.predicted, row.compiled),
            "" if row.tolerance is None else f"{row.tolerance:.0%}" if row.tolerance else "exact",
            (_YES if row.agrees else _NO) if judged else "",
        )
    return table


def _amount(row: Figure, amount: float) -> str:
    if row.unit is Unit.BYTES:
        return bytes_text(amount)
    if row.unit is Unit.SECONDS:
        return seconds_text(amount)
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if amount >= scale:
            return f"{three_digits(amount / scale)} {unit}FLOP"
    return f"{amount:.0f} FLOP"


def _parting_table(v: Verification) -> Table:
    table = _table(
        "Where they part: arrays that are not sent equally often",
        ("collective", "predicted for", "compiled as"),
        ("array", "predicted", "compiled", "bytes"),
    )
    for row in v.partings[:MOST_PARTINGS]:
        table.add_row(
            f"{row.kind} over {_over(row)}",
            _names(tuple(source_text(origin) if " at " not in origin else _origin(origin) for origin in row.origins)),
            _names(row.instructions),
            bytes_text(row.array_bytes),
            str(row.predicted_count),
            str(row.compiled_count),
            signed(bytes_text(row.wire_bytes)),
        )
    if rest := v.partings[MOST_PARTINGS:]:
        table.add_row(f"{len(rest)} more", "", "", "", "", "", signed(bytes_text(sum(row.wire_bytes for row in rest))))
    return table


def _origin(origin: str) -> str:
    operator, _, place = origin.partition(" at ")
    return f"{operator} at {source_text(place)}"


def _names(names: tuple[str, ...]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
