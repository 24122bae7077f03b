"""How long does each of several steps take, where they take turns on a machine that is not alone with them?

Round r runs every step p once, in t(p, r) seconds, and each round in another order: where one step always followed the same
other, four plans of two towers that compute alike took 14.2, 14.6, 15.2 and 16.9 ms, and an hour later, in such rounds, 17.6 to
18.0.  What else the machine has to do drifts from round to round, so steps are held against each other within rounds, and only
what a round takes is held against other rounds: with m(r) the median over steps,

    clock(p) = median over r of t(p, r) / m(r)  ·  median over r of m(r)

Rounds of several processes count alike.  (Nine plans of a Llama, three processes of thirty rounds each on two cores: a step's
seconds vary by 7% about its round's and rounds by another 8%; from process to process clocks differ by 0.9% so, and by 1.5% as
medians of each plan's own seconds: no more than chance makes of thirty.)
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from benchmarks.models import Model

SETTLING = 6
"""Rounds before those that are timed.  Plans that take turns leave holes in each other's memory, and until every block has found
one, steps wait for new pages: 70 ms for 40 MiB, in up to four rounds of nine plans."""


def run_in_turn(model: Model, compiled: Mapping[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each plan, by name, in so many rounds."""
    batch = model.make_batch(model.batch_size)
    states = {name: jax.tree.leaves(jax.jit(model.make_state)()) for name in compiled}
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    order, orders = list(compiled), random.Random(0)
    for number in range(SETTLING + rounds):
        orders.shuffle(order)
        for name in order:
            started = time.perf_counter()
            states[name] = advance(compiled[name], states[name], batch)
            if number >= SETTLING:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def advance(step: Any, state_leaves: list[Any], batch: Any) -> list[Any]:
    """One finished step on flat state leaves."""
    state, _ = step.run([*state_leaves, *jax.tree.leaves(batch)])
    return jax.block_until_ready(jax.tree.leaves(state))


def clocks(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Seconds of a step by name, of its seconds in every round (see the module docstring)."""
    rounds = [statistics.median(one) for one in zip(*seconds.values(), strict=True)]
    usual_seconds = statistics.median(rounds)
    return {
        name: usual_seconds * statistics.median(own / of_all for own, of_all in zip(times, rounds, strict=True))
        for name, times in seconds.items()
    }
