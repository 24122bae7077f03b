"""Which residuals of the stages are to lie in the memory of the host, that every mesh keeps its memory budget?

Let a mesh be e bytes over its budget.  A residual r of n(r) bytes on a stage with k microbatches in flight is on the device k
times, and once if it lies on the host; there it costs, on the link to the host, its copies in all N microbatches:

    minimise    Σ N · (copies(r) · α + copied bytes(r) / β)      subject to      Σ (k(r) − 1) · n(r) ≥ e

over the large residuals of the mesh's stages.  They are taken by what they cost for each byte that they save, and then those that
are not needed are left, dearest first.  In-flight microbatches at the fullest moment may be fewer than k, so the simulator
judges: as long as it finds the budget exceeded, e rises by what it exceeds it by.  All residuals are tried first, for if these
are too few, nothing helps; where even Σ k(r) · n(r) < e, that needs no simulation.

Most cost the same for each byte; what α and a second reader (gradients of weights apart) add is told apart here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from autopar.cluster import Cluster
from autopar.cost_model.hosted import beside_others, copy_seconds, has_host_memory
from autopar.schedule.orders import Order, in_flight
from autopar.schedule.pipeline import StageLowering
from autopar.schedule.residuals import large_residuals

HostedByStage = tuple[tuple[int, ...], ...]
"""For each stage the values that lie in the memory of the host, ascending."""

TIMES = 4
"""So often what is chosen is simulated; then all residuals are taken."""


class Hosting(Enum):
    """Which residuals may lie in the memory of the host: none, those that memory needs there, or all large ones."""

    NONE = "none"
    NEEDED = "needed"
    ALL = "all"


@dataclass(frozen=True)
class Candidate:
    """A residual of a stage: bytes that a device saves while one set of it is there, and what its copies cost in a step.

    ``most_bytes`` it saves while none is: at most.
    """

    stage: int
    value: int
    saved_bytes: float
    seconds: float
    most_bytes: float


def candidates(stages: Sequence[StageLowering], order: Order, cluster: Cluster) -> tuple[Candidate, ...]:
    """The large residuals of stages that keep those of several microbatches; others would save nothing."""
    found = []
    for number, lowering in enumerate(stages):
        sets = in_flight(order, number)
        if sets < 2:
            continue
        part = beside_others(cluster, lowering.stage.devices)
        is_priced = part.host_memory_link is not None and has_host_memory(part.device.platform)
        for one in large_residuals(lowering.slices):
            seconds = copy_seconds(one.copies, one.copied_bytes, part) if is_priced else 0.0
            size_bytes = float(one.size_bytes)
            step_seconds = order.num_microbatches * seconds
            found.append(Candidate(number, one.value, (sets - 1) * size_bytes, step_seconds, sets * size_bytes))
    return tuple(found)


def cheapest_for(known: Iterable[Candidate], excess_bytes: float) -> tuple[Candidate, ...]:
    """Candidates that save so many bytes for few seconds; all of them where these are too few."""
    taken: list[Candidate] = []
    saved_bytes = 0.0
    for one in sorted(known, key=lambda one: (one.seconds / one.saved_bytes, -one.saved_bytes)):
        if saved_bytes >= excess_bytes:
            break
        taken.append(one)
        saved_bytes += one.saved_bytes
    for one in sorted(taken, key=lambda one: -one.seconds):
        if saved_bytes - one.saved_bytes >= excess_bytes:
            taken.remove(one)
            saved_bytes -= one.saved_bytes
    return tuple(taken)


def are_too_few(known: Iterable[Candidate], homes: Sequence[int], excess_bytes: Mapping[int, float]) -> bool:
    """Whether all of them together would leave a mesh above its budget; ``homes`` are the meshes of the stages.

    What they save is counted for as many microbatches as are ever in flight, so what is too little here is too little.
    """
    left_bytes = dict(excess_bytes)
    for one in known:
        if (mesh := homes[one.stage]) in left_bytes:
            left_bytes[mesh] -= one.most_bytes
    return any(size > 0 for size in left_bytes.values())


def by_stage(chosen: Iterable[Candidate], num_stages: int) -> HostedByStage:
    """The values of each stage."""
    found: list[list[int]] = [[] for _ in range(num_stages)]
    for one in chosen:
        found[one.stage].append(one.value)
    return tuple(tuple(sorted(values)) for values in found)
