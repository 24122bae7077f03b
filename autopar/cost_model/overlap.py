"""How much of its communication will a compiler hide behind work?

XLA:GPU cuts a collective in two, a start and an end, and moves kernels between them that neither make what is sent nor read what
comes.  The kernels that it has to move are those of :mod:`autopar.cost_model.buffers`, the collectives those that
:mod:`autopar.cost_model.combine` leaves; :mod:`autopar.cost_model.streams` orders both as XLA would, and says

    hidden seconds = SURE_SHARE · Σ levels  min over orders  (kernels + collectives − both streams together)

A level is the program or the body of a loop, whose seconds are those of all its trips; nothing is moved across its ends, and no
collective is hidden behind a loop.  What is said must hold, so wherever XLA is not known it is taken to hide less:

* work counts with ``WORK_SHARE`` of its price, for programs compile to fewer passes over memory than is foretold;
* collectives are believed to take ``BELIEF`` times as long, so that one uses up work that would do for several;
* of eight orders that differ in which of two tasks goes first, the one that hides least counts, and three quarters of that;
* every collective is taken to be combined with others wherever it can be, not only those that are known to be
  (:mod:`autopar.graph.merging`), and no more than one latency of each set can be hidden;
* in a program that was made to save memory, which is compiled in an order of its own, nothing is hidden
  (:mod:`autopar.runtime.xla_options`).

All five were read off programs that XLA's compiler for H100s made: docs/explanation/overlap.md.  Where nothing was read off
(:attr:`~autopar.cluster.DeviceKind.hides_collectives`), nothing is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.cost_model.buffers import Kernels, kernels_of
from autopar.cost_model.collectives import Collective, axes_cost
from autopar.cost_model.combine import combined, levels
from autopar.cost_model.nodes import Arrays, Form
from autopar.cost_model.reshard import COMBINED, COMBINED_RESULT_BYTES
from autopar.cost_model.streams import Tasks, surely_hidden
from autopar.plan import CollectiveUse
from autopar.schedule.spmd import Buffer, SpmdProgram, rematerialises

WORK_SHARE = 0.7
"""Compiled, unrolled programs took 72 to 75 % of the seconds of work that were foretold, by the same prices."""

BELIEF = 4.0

SURE_SHARE = 0.75
"""So much of what the orders hide is foretold."""

Move = tuple[Buffer, int]
"""A move of a reshard: the reshard's target, and the number of the move in it."""


def hides_collectives(program: SpmdProgram, cluster: Cluster) -> bool:
    """Whether anything of a program is hidden."""
    saves_memory = program.hosted.is_any or rematerialises(program.steps)
    return cluster.hides_collectives and not saves_memory


def hidden_seconds(
    program: SpmdProgram,
    arrays: Arrays,
    work_seconds: Mapping[int, float],
    sent: Mapping[Move, CollectiveUse],
    cluster: Cluster,
) -> float:
    """Seconds of a step's collectives during which the device works.

    ``work_seconds`` are those of operators by id and ``sent`` the collectives of moves, all trips of each.
    """
    if not sent or not hides_collectives(program, cluster):
        return 0.0
    found = 0.0
    for level in levels(arrays):
        own = {level.moves[move]: use for move, use in sent.items() if move in level.moves}
        if own:
            level = _all_combining(level, own, program, cluster)
            prices = {node: _price(use, program, cluster) for node, use in own.items()}
            found += SURE_SHARE * surely_hidden(_tasks(level, work_seconds, prices, cluster), BELIEF)
    return found


@dataclass(frozen=True)
class _Price:
    """Seconds of a collective: those of its bytes, which it takes in any company, and the others."""

    of_bytes: float
    latency: float


def _price(use: CollectiveUse, program: SpmdProgram, cluster: Cluster) -> _Price:
    _, cost = axes_cost(Collective(use.kind), use.axes, program.mesh, cluster)
    of_bytes = min(use.seconds, use.count * cost.joined.seconds(use.wire_bytes / use.count))
    return _Price(of_bytes, use.seconds - of_bytes)


def _all_combining(level: Arrays, sent: Mapping[int, CollectiveUse], program: SpmdProgram, cluster: Cluster) -> Arrays:
    """The same arrays with every collective that XLA knows to combine looking for others."""
    nodes = list(level.nodes)
    for number, use in sent.items():
        kind = Collective(use.kind)
        if kind in COMBINED[cluster.device.platform]:
            nodes[number] = replace(nodes[number], combines=(kind, use.axes, program.values[use.value].dtype))
    return replace(level, nodes=nodes)


def _tasks(level: Arrays, work_seconds: Mapping[int, float], prices: Mapping[int, _Price], cluster: Cluster) -> Tasks:
    """The kernels and collectives of a level; a set of combined collectives is one, of the number of its first."""
    platform = cluster.device.platform
    kernels = kernels_of(level, platform)
    seconds = {task: WORK_SHARE * worked for task, worked in _seconds_of_kernels(level, kernels, work_seconds).items()}
    first = {
        node: min(group) for group in combined(level, COMBINED_RESULT_BYTES.get(platform, math.inf)) for node in group
    }
    sets: dict[int, list[_Price]] = {}
    for node, price in prices.items():
        if node in kernels.reads:
            sets.setdefault(first.get(node, node), []).append(price)
    sent = {
        task: sum(price.of_bytes for price in members) + max(price.latency for price in members)
        for task, members in sets.items()
    }
    reads: dict[int, set[int]] = {}
    for kernel, needed in kernels.reads.items():
        own = reads.setdefault(first.get(kernel, kernel), set())
        own.update(first.get(one, one) for one in needed if one in kernels.reads)
    return Tasks({**seconds, **sent}, reads, frozenset(sent))


def _seconds_of_kernels(level: Arrays, kernels: Kernels, work_seconds: Mapping[int, float]) -> dict[int, float]:
    """What each kernel works, what it computes on the way included; loops, which hide nothing, take no time."""
    own = dict(_own_seconds(level, work_seconds))
    found = {}
    for kernel in sorted(kernels.reads):
        total, inside = own.pop(kernel, 0.0), [kernel]
        while inside and level.nodes[kernel].form is not Form.LOOP:
            for read in level.nodes[inside.pop()].inputs:
                if read in own and read not in kernels.reads:
                    total += own.pop(read)
                    inside.append(read)
        found[kernel] = total
    return found


def _own_seconds(level: Arrays, work_seconds: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    """For every array the seconds of its operator, if it is the first that the operator makes; else none."""
    moved = frozenset(level.moves.values())
    counted: set[int] = set()
    for number, node in enumerate(level.nodes):
        operator, seconds = node.source, 0.0
        is_made = operator is not None and number not in moved and node.value in operator.results
        if is_made and operator is not None and operator.id not in counted:
            counted.add(operator.id)
            seconds = work_seconds.get(operator.id, 0.0)
        yield number, seconds
