"""Numbers and decisions in words."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.explain.data import Change, RunnerUp
from autopar.graph.ir import Factor, FactorKind, Operator, Value
from autopar.plan import Axes, Strategy
from autopar.wording import array_text, families, slashed, three_digits

SAME_SHARE = 1e-3
"""Differences within this share of the step are called none."""


def seconds_text(seconds: float) -> str:
    """``34.2 ms`` to three digits."""
    size = abs(seconds)
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if size >= 0.9995 * scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return "0" if size < 5e-10 else f"{three_digits(seconds * 1e9)} ns"


def signed(text: str) -> str:
    """The text of a number with its sign in front."""
    return text.replace("-", "−") if text.startswith("-") else f"+{text}"


def axes_text(axes: Axes) -> str:
    """``data × model``."""
    return " × ".join(axes)


# ----------------------------------------------------------------------------------------------------------- operators


def equation_text(operator: Operator) -> str:
    """The rule with a letter for each factor, ``abc,cd→abd``; dimensions of one element are 1."""
    letters = _letters(operator.rule.factors)

    def array(mapping: tuple[tuple[int, ...], ...]) -> str:
        dims = ["".join(letters[factor] for factor in factors) for factors in mapping]
        return "".join(text if len(text) == 1 else f"({text})" if text else "1" for text in dims)

    operands = [array(mapping) for mapping in operator.rule.operands if mapping]
    return f"{','.join(operands)}→{','.join(array(mapping) for mapping in operator.rule.results)}"


def _letters(factors: tuple[Factor, ...]) -> list[str]:
    alphabet = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return ["" if factor.size == 1 else next(alphabet, "?") for factor in factors]


def strategy_text(operator: Operator, strategy: Strategy) -> str:
    """How an operator is spread, in words."""
    letters = _letters(operator.rule.factors)
    parts = []
    for factor, letter, axes in zip(operator.rule.factors, letters, strategy.factors, strict=True):
        if axes:
            parts.append(f"{letter}={factor.size} over {axes_text(axes)}{_LEFT_BEHIND.get(factor.kind, '')}")
    if strategy.passing:
        parts.append(f"on partial sums over {axes_text(strategy.passing)}")
    return "; ".join(parts) or "whole on every device"


_LEFT_BEHIND = {
    FactorKind.SUM: " → partial sums",
    FactorKind.LOOKUP: " (rows of the table) → partial sums",
    FactorKind.MAX: " → all-reduce by max",
    FactorKind.MIN: " → all-reduce by min",
    FactorKind.SCATTER: " (written rows)",
}


def shapes_text(operands: Sequence[Value | None], results: Sequence[Value]) -> str:
    """``f32[64,320] f32[320,1280] → f32[64,1280]``."""
    inputs = " ".join(array_text(value.shape, value.dtype) for value in operands if value is not None)
    return f"{inputs} → {' '.join(array_text(value.shape, value.dtype) for value in results)}"


# ----------------------------------------------------------------------------------------------------------- runner-ups

MOST_CHANGES = 3


def runner_ups_text(others: Sequence[RunnerUp], step_seconds: float) -> str:
    """``as good: P(); next best P('data') at rest, gathered for use: +1.20 ms a step (all-gather over data …)``."""
    as_good = [other for other in others if abs(other.extra_seconds) < SAME_SHARE * step_seconds]
    parts = []
    if as_good:
        parts.append(f"as good: {', '.join(dict.fromkeys(map(_layout_text, as_good)))}")
    for other in others[len(as_good) :]:
        changes = ", ".join(map(change_text, main_changes(other.changes)))
        where = f" ({changes})" if changes else ""
        moved = f", with {_moved_text(other)}" if other.moved_parameters else ""
        parts.append(
            f"next best {_layout_text(other)}{moved}: {signed(seconds_text(other.extra_seconds))} a step{where}"
        )
    return "; ".join(parts)


def _layout_text(other: RunnerUp) -> str:
    if other.use == other.sharding:
        return other.sharding
    return f"{other.sharding} at rest, {'gathered' if other.use == 'P()' else other.use} for use"


def _moved_text(other: RunnerUp) -> str:
    kinds = families(other.moved_parameters)
    return slashed(kinds[0][0]) if len(kinds) == 1 else f"{len(other.moved_parameters)} other parameters otherwise too"


def main_changes(changes: Sequence[Change]) -> list[Change]:
    """The largest changes, at most ``MOST_CHANGES``, none below a tenth of the largest."""
    largest = max((abs(change.seconds) for change in changes), default=0.0)
    return [change for change in changes[:MOST_CHANGES] if abs(change.seconds) >= 0.1 * largest]


def change_text(change: Change) -> str:
    """``all-gather over data in the forward pass +1.50 ms``."""
    over = f" over {axes_text(change.axes)}" if change.axes else ""
    place = "the update" if change.phase == "update" else f"the {change.phase} pass"
    return f"{change.what}{over} in {place} {signed(seconds_text(change.seconds))}"
