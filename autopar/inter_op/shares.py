"""The whole model on several meshes, each of which works off its own share of the microbatches.

Where devices are of several kinds, or stand in numbers that no array is cut by, no one mesh serves all of them well, and not
every model has layers to part between them.  Data parallelism with unlike shares does: mesh k holds the whole model and runs nₖ
of the N microbatches, Σ nₖ = N, in about the same time as the others run theirs,

    before    on every mesh what it reads: parameters come from where they live
    once      on mesh k:   A⁽ᵏ⁾ = Σ v(j)   over its microbatches j, for every sum v that is needed later
    after     A = Σₖ A⁽ᵏ⁾ where the leaf lives that is made of it, and its update there

so what crosses in a step are the parameters and the sums of those leaves that live elsewhere.  Leaves are dealt to the meshes by
bytes, as pieces of optimizer state are to devices by ZeRO (Rajbhandari et al., 2020, section 5): parameters and sums then cross
in both directions alike, and no mesh updates what another one does.

To all that follows this is a pipeline: a loop of one trip whose body holds a loop over microbatches for each share, cut into
stages that send each other nothing in the trip.  Shares do not overlap with what they send: gradients leave when all are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.errors import InternalError
from autopar.graph.build import LoopKind
from autopar.graph.ir import Graph, Operator, Phase
from autopar.graph.tracing import TracedProgram
from autopar.inter_op.accumulate import Parts, Rewriting, traced_anew
from autopar.inter_op.examples import Examples
from autopar.inter_op.looped import Looped
from autopar.inter_op.placing import Placing
from autopar.inter_op.terms import AccumulatorDtype


def in_shares(
    program: TracedProgram,
    examples: Examples,
    batch: Sequence[int],
    shares: Sequence[int],
    accumulator: AccumulatorDtype = AccumulatorDtype.FLOAT32,
) -> TracedProgram:
    """The program whose microbatches are dealt out in shares; ``batch`` are the input positions of batch leaves, (N, B/N, …)."""
    return traced_anew(program, _InShares(examples, frozenset(batch), accumulator, tuple(shares)), batch)


class _InShares(Rewriting):
    """Owns what does not change while the step is traced anew."""

    def __init__(
        self, examples: Examples, batch: frozenset[int], accumulator: AccumulatorDtype, shares: tuple[int, ...]
    ) -> None:
        super().__init__(examples, batch, accumulator)
        assert sum(shares) == self.count
        self._shares = shares

    def run_microbatches(self, parts: Parts, whole: Mapping[int, Any], rows: Mapping[int, Any]) -> tuple[Any, Any]:
        """A loop of one trip, in which every share is a loop of its own."""

        def once(totals: dict[int, Any], _: None) -> tuple[dict[int, Any], dict[int, Any]]:
            of_shares = []
            first = 0
            for share in self._shares:
                numbers = range(first, first + share)
                own = {value: lax.slice_in_dim(row, numbers.start, numbers.stop) for value, row in rows.items()}
                of_shares.append(self.trips(parts, whole, own, numbers))
                first += share
            sums = {value: total + _added([sums[value] for sums, _ in of_shares]) for value, total in totals.items()}
            stacked = {value: jnp.concatenate([stacked[value] for _, stacked in of_shares]) for value in parts.stacked}
            return sums, stacked

        sums, stacked = lax.scan(once, self.nothing_yet(parts), None, length=1)
        return sums, {value: array.reshape(array.shape[1:]) for value, array in stacked.items()}


def _added(arrays: Sequence[Any]) -> Any:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def looped_in_shares(graph: Graph, batch: Sequence[int], shares: Sequence[int]) -> Looped:
    """The loop of one trip that holds the shares; ``batch`` are the input positions of batch leaves."""
    for position, operator in enumerate(graph.operators):
        if operator.primitive == LoopKind.SCAN and len(_loops(operator.bodies[0], shares)) == len(shares):
            return Looped(graph, position, tuple(batch), tuple(shares))
    raise InternalError(f"no loop of the step holds loops of {list(shares)} trips")


def _loops(body: Graph, shares: Sequence[int]) -> list[Operator]:
    """The loops of the shares in the body of the trip that holds them; fewer where it holds none."""
    loops = [one for one in body.operators if one.primitive == LoopKind.SCAN]
    counts = [one.bodies[0].trips for one in loops]
    return loops if body.trips == 1 and counts == list(shares) else []


def loops_of_shares(loop: Looped) -> list[Operator]:
    """The loop over its microbatches of each share."""
    return _loops(loop.body, loop.shares)


def forward_of_share(share: Operator) -> tuple[Operator, ...]:
    """The operators of the forward pass of one microbatch."""
    return tuple(operator for operator in share.bodies[0].operators if operator.phase is Phase.FORWARD)


def place_shares(loop: Looped) -> Placing:
    """Share k, and what is made of it alone, on stage k; what is made of several on the first of these, once they are done."""
    stage_of = {operator.id: stage for stage, operator in enumerate(loops_of_shares(loop))}
    made_of: dict[int, frozenset[int]] = {}
    stages: dict[int, int] = {}
    anchors: dict[int, int] = {}
    late = set()
    for operator in loop.body.operators:
        own = frozenset[int]().union(
            *(made_of.get(value, frozenset()) for value in operator.operands if value is not None)
        )
        if operator.id in stage_of:
            own |= {stage_of[operator.id]}
        if own:
            stages[operator.id] = min(own)
            made_of.update(dict.fromkeys(operator.results, own))
            anchors.update(dict.fromkeys(operator.results, min(own)))
        if len(own) > 1:
            late.add(
                operator.id
            )  # in the backward pass, or the first mesh would begin its share when the others are done
    return Placing(len(loop.shares), stages, frozenset(late), anchors)
