"""Which layers of a plan in which all compute again can be relieved of it within the memory?

Let layer ℓ keep b(ℓ, k) bytes and repeat s(ℓ, k) seconds of work under choice k (:class:`~autopar.inter_op.remat.RematCost`), and

    minimise    Σ s(ℓ, k(ℓ))          over the layers of a mesh
    subject to  Σ b(ℓ, k(ℓ)) ≤ B

a knapsack with a choice for each item.  The backward pass of a mesh's last layer follows its forward pass at once, so what it
keeps may be no burden; both are tried, b as it is and b = 0 there.  These are estimates for whole arrays, and good for an order,
not for a budget: the largest B that fits is found by bisection between what ``full`` and what ``none`` keep, for all meshes at
the same time, each answer judged by planning and, of pipelines, simulating it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.cluster import Cluster
from autopar.inter_op.remat import RematCost, Rematerialising
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import MemoryRow, Model
from autopar.intra_op.task import Found
from autopar.plan import LayerRemat, Plan, Remat
from autopar.subjects import Subjected, rematerialised

Planned = tuple[Subjected, Plan, Found | None]

MOST_TRIED = 6
"""So many mixtures of choices are planned at most: enough to find what is kept to 3 % of what can be."""

HOPEFUL = 1.1
"""A mixture is planned if it is estimated to take so many times what the best plan takes at most."""

TIE = 1e-6
"""Of layers that are alike the first compute again: the others' seconds count so much more."""
KNAPSACK_SECONDS = 2.0

_NONE, _FULL = (tuple(Remat).index(kind) for kind in (Remat.NONE, Remat.FULL))


@dataclass(frozen=True)
class Alike:
    """A plan made like another one, if one fits; for each of its meshes whether the fastest, with nothing on the hosts and under
    the same schedule, exceeds the budget there.
    """

    planned: Planned | None
    is_squeezed: tuple[bool, ...]


def step_seconds(planned: Planned) -> float:
    """Foretold of a plan."""
    return planned[1].step_seconds


@dataclass(frozen=True)
class Choices:
    """What layers of a step may compute again, and what is planned with what they do."""

    subject: Subjected
    cluster: Cluster
    alike: Callable[[Subjected, Plan, tuple[int, ...]], Alike]
    forms: Rematerialising

    @cached_property
    def all(self) -> LayerRemat:
        """Every layer computes everything again."""
        return self.forms.all(Remat.FULL)

    @cached_property
    def costs(self) -> Mapping[Remat, Sequence[RematCost]]:
        """Of every kind, what it means for each layer."""
        layers = range(len(self.all.starts))
        return {kind: [self.forms.cost(self.forms.all(kind), layer) for layer in layers] for kind in Remat}

    def seconds(self, kind: Remat, layer: int) -> float:
        """Of all devices on the whole arrays: only the order of these counts."""
        cluster, cost = self.cluster, self.costs[kind][layer]
        computing = sum(flops / cluster.per_device_flops_per_second(dtype) for dtype, flops in cost.flops.items())
        return computing + cost.bytes_moved / cluster.per_device_memory_bytes_per_second


class Relief:
    """Owns the search for the layers that a lean plan can relieve of work."""

    def __init__(self, choices: Choices, lean: Plan, enough_seconds: float) -> None:
        """Plans that take ``enough_seconds`` are of no use."""
        self._choices, self._plan, self._enough = choices, lean, enough_seconds
        left = choices.forms.surviving(lean.remat)
        self._cuts = tuple(left[cut] for cut in self._plan.cuts)
        """Before which operators of the forward pass as it was written stages begin."""
        self._answers: dict[LayerRemat, Alike] = {}

    def better_ones(self, report: Callable[[str], None]) -> list[Planned]:
        """Plans like the lean one with fewer layers computed again."""
        fitting = [self._bisect(last_is_free, report) for last_is_free in (False, True)]
        if self._plan.is_pipeline:
            for shares, last_is_free in zip(fitting, (False, True), strict=True):
                self._raise_shares(shares, last_is_free, report)
        return [answer.planned for answer in self._answers.values() if answer.planned is not None]

    def _bisect(self, last_is_free: bool, report: Callable[[str], None]) -> list[float]:
        """The largest shares of what the meshes can keep that fit without the hosts, as far as they were looked for."""
        meshes = self._layers_of_meshes()
        low, high = [0.0] * len(meshes), [1.0] * len(meshes)  # shares of what can be kept: fits, may fit
        at = list(high)
        for _ in range(MOST_TRIED):
            answer = self._answer(self._chosen(meshes, at, last_is_free), report)
            if answer is None:
                break  # what keeps less takes longer still
            for mesh, is_squeezed in enumerate(answer.is_squeezed):
                (high if is_squeezed else low)[mesh] = at[mesh]
            if low == high:
                break  # nothing needs to be computed again
            at = [one if one == top else (one + top) / 2 for one, top in zip(low, high, strict=True)]
        return low

    def _raise_shares(self, shares: list[float], last_is_free: bool, report: Callable[[str], None]) -> None:
        """Let single meshes keep all, or more by half, where that fits by other means and is faster.

        These are leaner layouts, residuals on the hosts, another schedule.
        """
        meshes = self._layers_of_meshes()
        for mesh, share in enumerate(shares):
            options = [[*shares[:mesh], more, *shares[mesh + 1 :]] for more in (share, (1.0 + share) / 2, 1.0)]
            answers = [self._answer(self._chosen(meshes, at, last_is_free), report) for at in options]
            seconds = [math.inf if one is None or one.planned is None else step_seconds(one.planned) for one in answers]
            shares = options[seconds.index(min(seconds))]

    def _answer(self, chosen: LayerRemat, report: Callable[[str], None]) -> Alike | None:
        """The plan with these layers computed again; None where it is estimated to take too long."""
        if chosen not in self._answers:
            if self._estimate(chosen) > HOPEFUL * self._enough:
                return None
            report(f"planning with layers computed again: {chosen}")
            self._answers[chosen] = self._alike_with(chosen)
        return self._answers[chosen]

    def _alike_with(self, chosen: LayerRemat) -> Alike:
        choices = self._choices
        left = choices.forms.surviving(chosen)
        cuts = tuple(bisect_left(left, cut) for cut in self._cuts)
        platform = choices.cluster.device.platform.value
        return choices.alike(rematerialised(choices.subject, chosen, platform), self._plan, cuts)

    def _estimate(self, chosen: LayerRemat) -> float:
        """Seconds of a step, by those of the lean plan and what is not repeated any more.

        Of N microbatches all but one wait for the mesh that has most to do; one goes through all of them.
        """
        seconds, lean = self._choices.seconds, self._plan.remat
        kinds = zip(lean.kinds if lean.is_any else [Remat.NONE] * len(chosen.kinds), chosen.kinds, strict=True)
        spared = [seconds(before, layer) - seconds(after, layer) for layer, (before, after) in enumerate(kinds)]
        homes = self._plan.meshes_of_stages
        devices = [len(self._plan.devices_of(homes.index(mesh))) for mesh in range(self._plan.num_meshes)]
        by_mesh = [sum(spared[k] for k in own) / n for own, n in zip(self._layers_of_meshes(), devices, strict=True)]
        most, count = max(by_mesh), self._plan.trips
        return self._plan.step_seconds - most - (sum(by_mesh) - most) / count

    def _layers_of_meshes(self) -> list[list[int]]:
        """The layers on each mesh: a layer is on the stage where it begins."""
        homes = self._plan.meshes_of_stages
        found: list[list[int]] = [[] for _ in range(self._plan.num_meshes)]
        for layer, start in enumerate(self._choices.all.starts):
            found[homes[bisect_right(self._cuts, start)]].append(layer)
        return found

    def _chosen(self, meshes: Sequence[Sequence[int]], shares: Sequence[float], last_is_free: bool) -> LayerRemat:
        """The choices of least work for which layers keep these shares of what they can keep."""
        kinds = list(self._choices.all.kinds)
        for own, share in zip(meshes, shares, strict=True):
            for layer, kind in zip(own, self._least_work(own, share, last_is_free), strict=True):
                kinds[layer] = kind
        return self._choices.all.with_kinds(kinds)

    def _least_work(self, own: Sequence[int], share: float, last_is_free: bool) -> list[Remat]:
        """The choices of the layers of one mesh."""
        if not own or share == 1.0:
            return [Remat.NONE] * len(own)
        seconds = [np.array([self._choices.seconds(kind, layer) for kind in Remat]) for layer in own]
        kept = {
            item: np.array([float(self._choices.costs[kind][layer].kept_bytes) for kind in Remat])
            for item, layer in enumerate(own[:-1] if last_is_free else own)
        }
        least, most = (sum(options[choose] for options in kept.values()) for choose in (_FULL, _NONE))
        tied = [options * (1 + TIE * item) for item, options in enumerate(seconds)]
        row = MemoryRow(kept, {}, least + share * (most - least))
        solution = solve(Model(tied, {}, [row] if kept else []), time_limit_seconds=KNAPSACK_SECONDS)
        if solution is None:  # rounding at a share of 0
            return [Remat.FULL] * len(own)
        return [tuple(Remat)[option] for option in solution.options]
