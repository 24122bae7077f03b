"""Rows as a picture: the throughput of every kind of plan, and what was published of it, by suite and number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.suites.published import Asked, Suite
from benchmarks.suites.report import NAMES
from benchmarks.suites.rows import Row, figure_text

COLOURS = {
    Asked.AUTO: "#1b6ca8",
    Asked.PUBLISHED: "#7fb3d5",
    Asked.INTRA_OP: "#c98b2b",
    Asked.INTER_OP: "#8a8a8a",
    Asked.MEGATRON: "#6a9a4a",
    Asked.DEEPSPEED: "#a0527a",
    Asked.PP_DP: "#6a9a4a",
}
HEIGHT, TOP, BOTTOM, BAR, GAP, LEFT, LABEL = 220, 60, 60, 18, 26, 56, 88  # pixels


def picture(rows: Sequence[Row]) -> str:
    """An SVG; in every group of bars throughput is relative to the highest figure there."""
    drawn, at = [], LEFT
    for suite in Suite:
        for num_devices in sorted({one.num_devices for one in rows if one.suite is suite}):
            group = [one for one in rows if one.suite is suite and one.num_devices == num_devices]
            drawn.append(_group(group, at))
            at += max(BAR * len(group) + GAP, LABEL)
    kinds = [kind for kind in Asked if any(one.asked is kind for one in rows)]
    width, height = max(at, 720), TOP + HEIGHT + BOTTOM
    legend = "".join(
        f'<rect x="{LEFT + 130 * k}" y="10" width="12" height="12" fill="{COLOURS[kind]}"/>'
        f'<text x="{LEFT + 130 * k + 17}" y="20">{kind.value}</text>'
        for k, kind in enumerate(kinds)
    )
    said = "PFLOP/s simulated; black line: published for that kind of plan; OOM: does not fit in the simulator"
    note = f'<text x="{LEFT}" y="40">{said}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        f'<rect width="{width}" height="{height}" fill="white"/>{legend}{note}{"".join(drawn)}</svg>\n'
    )


def _group(group: Sequence[Row], left: int) -> str:
    """The bars of one model on so many devices."""
    floor = TOP + HEIGHT
    figures = [one.petaflops for one in group] + [one.published for one in group]
    most = max((figure for figure in figures if isinstance(figure, float)), default=1.0) or 1.0
    drawn = []
    for number, one in enumerate(group):
        x, rate = left + BAR * number, one.petaflops
        title = f"<title>{escape(one.asked.value)}: {'OOM' if rate is None else f'{rate:.3f}'} PFLOP/s</title>"
        if rate is None:
            text = escape(one.said[:12])
            drawn.append(f'<text transform="translate({x + 13},{floor - 4}) rotate(-90)">{title}{text}</text>')
        else:
            size = HEIGHT * rate / most
            drawn.append(
                f'<rect x="{x}" y="{floor - size:.1f}" width="{BAR - 3}" height="{size:.1f}" fill="{COLOURS[one.asked]}">'
                f"{title}</rect>"
            )
        if isinstance(one.published, float):
            y = floor - HEIGHT * one.published / most
            drawn.append(f'<path d="M{x - 1} {y:.1f}h{BAR - 1}" stroke="black" stroke-width="2"/>')
    drawn.append(f'<text x="{left}" y="{floor + 16}">{NAMES[group[0].suite]}</text>')
    drawn.append(f'<text x="{left}" y="{floor + 30}">{group[0].size}, {group[0].num_devices} GPUs</text>')
    drawn.append(f'<text x="{left}" y="{floor + 44}">top: {figure_text(most, 3)}</text>')
    return "".join(drawn)
