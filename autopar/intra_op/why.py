"""Why does a parameter lie as it does?  What would the best plan cost in which it lies otherwise?

With x* the solution and a* the option that the nodes of a group of parameters take in it, the *runner-up* is

    x′ = argmin { c(x) : xᵢ ≠ a*  for every i of the group },        extra = c(x′) − c(x*) ≥ 0,

the same integer program with one option forbidden; everything else may change with it.  Where the runner-up costs the
same (a cut along another dimension, say) more is asked: what if the group were cut into another number of pieces, and
into none of those that cost the same?  Both plans are lowered and priced step by step, so the difference can be said by
collective and operator.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from autopar.cluster import Cluster
from autopar.cost_model.arrays import arrays_of
from autopar.cost_model.predict import collectives_of, run_costs
from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.intra_op.extract import stage_of
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import Solution
from autopar.intra_op.resolve import Banned, Resolver
from autopar.intra_op.task import Found
from autopar.plan import Axes, Layout, Stage
from autopar.schedule.reshard import shares
from autopar.schedule.spmd import SpmdProgram, lower, output_layouts

MAX_QUESTIONS = 12
"""So many groups are asked about, the heaviest first."""

SAME_SHARE = 1e-3
"""Two plans within this share of the step's seconds cost the same; an answer must be proven as closely."""

MOST_ALTERNATIVES = 4
"""Plans that are compared with, if all but the last cost the same as the chosen one."""

MOST_TIME_SHARE = 1 / 4
"""No question may take more than this share of the time."""


class Answer(Enum):
    """What came of the question."""

    COMPARED = "compared"
    ONLY_CHOICE = "only_choice"
    LEFT_OUT = "left_out"
    LEANEST = "leanest"
    NO_TIME = "no_time"


@dataclass(frozen=True)
class CostChange:
    """What a part of a step takes longer in the other plan.

    ``what`` is the kind of a collective over ``axes``, or the primitive of an operator (``axes`` empty).
    """

    what: str
    axes: Axes
    phase: str
    seconds: float


@dataclass(frozen=True)
class Alternative:
    """The best plan in which the group lies otherwise.

    ``extra_seconds`` is the difference of the objectives; ``changes`` are where the predictions differ, largest first,
    or empty where the plan costs the same; ``extra_state_bytes`` is what a device holds more at rest, ``moved`` the
    other inputs of the program that lie otherwise with it.
    """

    layout: Layout
    copy: Layout | None
    extra_seconds: float
    changes: tuple[CostChange, ...]
    extra_state_bytes: int
    moved: tuple[int, ...]


@dataclass(frozen=True)
class Why:
    """The answer for one group of values: the runner-up, and where that costs the same, the best of other cuts.

    ``unlimited`` is the layout in the best plan without a memory budget, where that is another one; that plan is faster
    by ``unlimited_gain_seconds``.
    """

    values: tuple[int, ...]
    answer: Answer
    alternatives: tuple[Alternative, ...] = ()
    unlimited: Layout | None = None
    unlimited_gain_seconds: float = 0.0


@dataclass(frozen=True)
class Question:
    """The plan that is asked about; ``state_pairs`` as in :class:`autopar.intra_op.task.Task`."""

    found: Found
    state_pairs: tuple[tuple[int, int], ...]
    cluster: Cluster

    @property
    def graph(self) -> Graph:
        """The program that the plan was found for."""
        return self.found.program.graph


def why(question: Question, groups: Sequence[Sequence[int]], *, time_limit_seconds: float) -> tuple[Why, ...]:
    """One answer per group of input values, in the order given, which should be the heaviest first.

    Groups beyond ``MAX_QUESTIONS`` or the time limit are answered with ``NO_TIME``; groups that stand for the same
    variables are solved once.
    """
    asked = _Asked(question, [tuple(group) for group in groups], time_limit_seconds)
    return tuple(asked.answer(tuple(group)) for group in groups)


class _Asked:
    """Owns the clock, what was answered, and the price list of the chosen plan."""

    def __init__(self, question: Question, groups: Sequence[tuple[int, ...]], time_limit_seconds: float) -> None:
        self._question = question
        self._deadline = time.monotonic() + time_limit_seconds
        self._slice_seconds = MOST_TIME_SHARE * time_limit_seconds
        self._same = SAME_SHARE * question.found.prediction.step_seconds
        self._known: dict[frozenset[int], Why] = {}
        self._prices = _prices(question.found.program, question)
        self._unlimited: tuple[Stage, float] | None = None
        model = question.found.model
        if model is None:
            return
        self._cost = model.cost(question.found.options)
        self._open = list(dict.fromkeys(filter(self._has_choice, map(self._classes, groups))))[:MAX_QUESTIONS]
        self._resolver = Resolver(model, frozenset().union(*self._open), self._cost)
        if question.found.is_squeezed:
            free = solve(replace(model, memory=[]), time_limit_seconds=self._slice_seconds)
            self._unlimited = None if free is None else (self._stage(free), self._cost - free.cost)

    def _classes(self, group: tuple[int, ...]) -> frozenset[int]:
        found = self._question.found
        nodes = [found.problem.node_of_value[value] for value in group if value in found.problem.node_of_value]
        return frozenset(found.quotient.class_of[node] for node in nodes)

    def _has_choice(self, classes: frozenset[int]) -> bool:
        return any(len(self._question.found.choices.options[number]) > 1 for number in classes)

    def answer(self, group: tuple[int, ...]) -> Why:
        classes = self._classes(group)
        if (known := self._known.get(classes)) is not None:
            return replace(known, values=group)
        if self._question.found.model is None:
            return Why(group, Answer.LEANEST)
        if not self._has_choice(classes):
            return Why(group, Answer.LEFT_OUT if self._question.found.is_narrowed else Answer.ONLY_CHOICE)
        if classes not in self._open or time.monotonic() > self._deadline:
            return self._limited(Why(group, Answer.NO_TIME))
        self._known[classes] = self._compare(group, classes)
        return self._known[classes]

    def _compare(self, group: tuple[int, ...], classes: frozenset[int]) -> Why:
        found = self._question.found
        solution = self._solve({number: [found.options[number]] for number in classes})
        if solution is None:
            return self._limited(Why(group, Answer.NO_TIME))
        alternatives = [self._alternative(group, solution)]
        pieces = {shares(found.stage.homes[group[0]], found.choices.mesh)}
        while alternatives[-1].extra_seconds < self._same and len(alternatives) < MOST_ALTERNATIVES:
            pieces.add(shares(alternatives[-1].layout, found.choices.mesh))
            solution = self._solve({number: self._cut_into(pieces, number) for number in classes})
            if solution is None:
                break
            alternatives.append(self._alternative(group, solution))
        return self._limited(Why(group, Answer.COMPARED, tuple(alternatives)))

    def _cut_into(self, pieces: set[int], number: int) -> list[int]:
        choices = self._question.found.choices
        options = enumerate(choices.options[number])
        return [k for k, o in options if isinstance(o, Layout) and shares(o, choices.mesh) in pieces]

    def _limited(self, answer: Why) -> Why:
        """Say how the values would lie if memory were no object."""
        if self._unlimited is None:
            return answer
        stage, gain = self._unlimited
        layout = stage.homes[answer.values[0]]
        if layout == self._question.found.stage.homes[answer.values[0]]:
            return answer
        return replace(answer, unlimited=layout, unlimited_gain_seconds=gain)

    def _solve(self, banned: Banned) -> Solution | None:
        """The optimum, or None: there is no solution, or none was proven best in time."""
        left = min(self._deadline - time.monotonic(), self._slice_seconds)
        if left <= 0:
            return None
        try:
            solution = self._resolver.solve(banned, time_limit_seconds=left)
        except PlanError:
            return None
        proven = solution is not None and np.isfinite(solution.cost) and solution.gap <= SAME_SHARE
        return solution if proven else None

    def _stage(self, solution: Solution) -> Stage:
        found = self._question.found
        return stage_of(self._question.graph, found.problem, found.quotient, found.choices, solution.options)

    def _alternative(self, group: tuple[int, ...], solution: Solution) -> Alternative:
        question = self._question
        stage = self._stage(solution)
        extra = solution.cost - self._cost
        # Lowering and pricing a plan takes longer than finding it, and where nothing differs there is nothing to say.
        changes = () if abs(extra) < self._same else self._changes(stage)
        before, mesh = question.found.stage, stage.mesh
        held = 0
        others = []
        for value in question.graph.inputs:
            array = question.graph.values[value]
            now, then = (plan.home(value, len(array.shape)) for plan in (stage, before))
            if now != then:
                held += array.size_bytes // shares(now, mesh) - array.size_bytes // shares(then, mesh)
                others.append(value)
        return Alternative(
            layout=stage.homes[group[0]],
            copy=stage.copies.get(group[0]),
            extra_seconds=extra,
            changes=changes,
            extra_state_bytes=held,
            moved=tuple(value for value in others if value not in group),
        )

    def _changes(self, stage: Stage) -> tuple[CostChange, ...]:
        """Where another plan is predicted to spend more or less, largest first."""
        question = self._question
        layouts = output_layouts(question.graph, stage, question.state_pairs)
        prices = _prices(lower(question.graph, stage, layouts), question)
        differences = {key: prices[key] - self._prices[key] for key in prices.keys() | self._prices.keys()}
        changes = [CostChange(*key, seconds) for key, seconds in differences.items() if seconds]
        return tuple(sorted(changes, key=lambda c: (-abs(c.seconds), c.what, c.axes, c.phase)))


def _prices(program: SpmdProgram, question: Question) -> defaultdict[tuple[str, Axes, str], float]:
    """Seconds of a step by (collective or primitive, axes, phase)."""
    prices: defaultdict[tuple[str, Axes, str], float] = defaultdict(float)
    for key, seconds in _priced(program, question):
        prices[key] += seconds
    return prices


def _priced(program: SpmdProgram, question: Question) -> Iterator[tuple[tuple[str, Axes, str], float]]:
    arrays = arrays_of(program, (), question.cluster.device)
    runs = run_costs(program, question.found.problem.fusion, question.cluster, arrays)
    for run in runs:
        yield (run.operator.primitive, (), run.operator.phase.value), run.seconds
    for use in collectives_of(program, question.cluster, runs, arrays):
        yield (use.kind, use.axes, use.phase), use.seconds
