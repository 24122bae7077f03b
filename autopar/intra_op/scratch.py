"""Is there a plan that takes longer, but needs so little scratch memory that it is faster on the whole?

The C library of a host keeps blocks of up to some MiB for the next call and gives larger ones back, so that their pages are
mapped and cleared anew in every call (:class:`autopar.profile.Fresh`).  With c the objective, s the scratch bytes of the plan
laid out and f the measured seconds of them the fastest plan is

    argminₓ { c(x) + f(s(x)) },

and f is nearly a step, at some size S.  Where the optimum x* of c pays for it, memory gets a price,

    minₓ { c(x) + λ v(x) },        λ ≈ (f(s(x*)) − f(S)) / (s(x*) − S) seconds per byte,

with v the mean, over the fullest moments, of what lives besides arguments: a rough account of s, so some prices around λ are
tried, each minimiser is laid out, and the plan that takes least with its scratch memory is taken.  A minimiser is the best plan
of all that hold no more at any of those moments (Everett, 1963): such is the program that its alternatives are asked of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.intra_op.held import with_price
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import MemoryRow, Solution
from autopar.intra_op.on_mesh import LaidOut, OnMesh
from autopar.intra_op.task import Found
from autopar.profile import Fresh

WORTH_A_LOOK = 0.02
"""Share of a step that the scratch memory of the optimum must take before others are looked for."""

BELOW_THE_STEP = 0.25
"""A size is below the step where scratch memory takes no more than this share of what the optimum's takes."""

PRICES = (0.5, 1.0, 2.0)
"""That are tried, as multiples of λ."""


def with_less_scratch(on_mesh: OnMesh, optimum: LaidOut) -> tuple[Found, float] | None:
    """A plan with so little scratch memory that, with it, a step is faster than with the optimum of the mesh; and
    its cost without that memory.

    None where no such plan is found, or none is worth a look.
    """
    task, profile = on_mesh.task, on_mesh.task.cluster.profile
    if profile is None or (fresh := profile.fresh) is None:
        return None
    paid = fresh.seconds((), optimum.memory.temp_bytes)
    price = seconds_per_byte(fresh, optimum.memory.temp_bytes)
    if price is None or paid < WORTH_A_LOOK * (optimum.solution.cost + paid):
        return None
    task.report_progress(f"looking for less scratch memory on mesh {on_mesh.choices.mesh}")
    rows = _besides_arguments(on_mesh)
    best, least = optimum, optimum.solution.cost + paid
    tried = {optimum.solution.options}
    for times in PRICES:
        solution = _at_price(on_mesh, rows, times * price, below=least)
        if solution is None or solution.options in tried:
            continue
        tried.add(solution.options)
        laid = on_mesh.lay_out(solution)
        seconds = solution.cost + fresh.seconds((), laid.memory.temp_bytes)
        if seconds < least and laid.memory.total_bytes <= task.budget_bytes:
            best, least = laid, seconds
    if best is optimum:
        return None
    within = [replace(row, budget=row.used(best.solution.options)) for row in rows]
    found = replace(on_mesh.complete(best), model=replace(on_mesh.model, memory=within), has_less_scratch=True)
    return found, best.solution.cost


def seconds_per_byte(fresh: Fresh, scratch_bytes: float) -> float | None:
    """What a byte less is worth on the way down the step on which ``scratch_bytes`` stand; None where they stand on none."""
    paid = fresh.seconds((), scratch_bytes)
    for size, seconds in sorted(fresh.scratch.samples, reverse=True):
        if size < scratch_bytes and seconds <= BELOW_THE_STEP * paid:
            return (paid - seconds) / (scratch_bytes - size)
    return None


def _besides_arguments(on_mesh: OnMesh) -> list[MemoryRow]:
    """Of the fullest moments, what lives there besides arguments; copies of arguments do."""
    home, class_of = on_mesh.problem.node_of_value, on_mesh.quotient.class_of
    arguments = {class_of[home[value]] for value in on_mesh.task.graph.inputs if value in home}
    return [
        replace(row, nodes={number: held for number, held in row.nodes.items() if number not in arguments})
        for row in on_mesh.rows
    ]


def _at_price(on_mesh: OnMesh, rows: Sequence[MemoryRow], price: float, *, below: float) -> Solution | None:
    """The minimiser at a price of a byte, with what it costs without it; None where that is as much as ``below``."""
    priced = solve(with_price(on_mesh.model, rows, price), time_limit_seconds=on_mesh.task.solver_seconds)
    if priced is None or (cost := on_mesh.model.cost(priced.options)) >= below:
        return None
    return replace(priced, cost=cost, bound=cost - (priced.cost - priced.bound))
