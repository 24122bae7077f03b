"""Should layers compute again what their backward passes read, and which of them?

Where memory does not limit the plan, nothing is computed again.  Where nothing fits, or a pipeline nearly fills the memory, or
pipelines that might be faster than the plan do not fit, the step is also planned with every layer computed again
(``full``), which needs the least memory.  Then that plan is kept (its mesh, or its stages, devices and microbatches), and layers
are relieved of work as far as the memory allows; so are those of slower pipelines that were planned on the way, for the best
stages of layers that all compute again need not be the best of those of which some do.  Let layer ℓ keep b(ℓ, k) bytes and
repeat s(ℓ, k) seconds of work under choice k (:class:`~autopar.inter_op.remat.RematCost`), and

    minimise    Σ s(ℓ, k(ℓ))          over the layers of a mesh
    subject to  Σ b(ℓ, k(ℓ)) ≤ B

a knapsack with a choice for each item.  The backward pass of a mesh's last layer follows its forward pass at once, so what it
keeps may be no burden; both are tried, b as it is and b = 0 there.  These are estimates for whole arrays, and good for an order,
not for a budget: the largest B that fits is found by bisection between what ``full`` and what ``none`` keep, for all meshes at
the same time, each answer judged by planning and, of pipelines, simulating it.  The fastest of all that was planned is taken.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar import _compat
from autopar.cluster import Cluster, Platform
from autopar.errors import BudgetError
from autopar.graph.ir import Phase
from autopar.inter_op.candidates import SCHEDULES
from autopar.inter_op.remat import RematCost, Rematerialising
from autopar.inter_op.searched import Searched
from autopar.intra_op.ilp import solve
from autopar.intra_op.model import MemoryRow, Model
from autopar.intra_op.search import LARGE_OPERATORS
from autopar.intra_op.task import Found
from autopar.methods import IntraOp, method_of
from autopar.plan import LayerRemat, Plan, Remat, Schedule
from autopar.subjects import Demands, Subjected, rematerialised, rematerialising

Planned = tuple[Subjected, Plan, Found | None]

BOUND_SHARE = 0.7
"""A pipeline that needs less than this share of the budget is not limited by memory."""

REPEATED = 4 / 3
"""With every layer computed again a step takes so many times what it takes otherwise at most: a forward pass is a third of it."""

MOST_TRIED = 6
"""So many mixtures of choices are planned at most: enough to find what is kept to 3 % of what can be."""

HOPEFUL = 1.1
"""A mixture is planned if it is estimated to take so many times what the best plan takes at most."""

TIE = 1e-6
"""Of layers that are alike the first compute again: the others' seconds count so much more."""
KNAPSACK_SECONDS = 2.0


@dataclass(frozen=True)
class Alike:
    """A plan made like another one, if one fits; for each of its meshes whether the fastest, with nothing on the hosts and under
    the same schedule, exceeds the budget there.
    """

    planned: Planned | None
    is_squeezed: tuple[bool, ...]


@dataclass(frozen=True)
class Planners:
    """What is planned with: the best plan of a step, one that is like a known plan but for what layers compute again, and
    pipelines that are faster than so many seconds, if there are any.

    The second is given the forward operators before which the known plan's stages begin in the new step.
    """

    best: Callable[[Subjected], Searched[Planned]]
    alike: Callable[[Subjected, Plan, tuple[int, ...]], Alike]
    pipelines: Callable[[Subjected, float], Searched[Planned]]


def with_remat(
    subject: Subjected, cluster: Cluster, demands: Demands, planners: Planners, report: Callable[[str], None]
) -> Planned:
    """The plan of a step as it was written, with what layers compute again: as demanded, or as is fastest.

    Raises :class:`~autopar.errors.BudgetError` where nothing fits, and whatever planning raises.
    """
    platform = cluster.device.platform.value
    if demands.remat is not None:
        return best_of(planners.best(as_demanded(subject, demands, platform)))
    refusal: BudgetError | None = None
    try:
        plain = planners.best(subject)
    except BudgetError as error:
        plain, refusal = Searched[Planned](None), error
    kept = plain.best
    if not _may_pay(subject, cluster, demands, plain):
        return or_raise(kept, refusal)
    forms = rematerialising(subject)
    if forms.says_remat:
        return or_raise(kept, refusal)
    report("planning with layers that compute again")
    everything = rematerialised(subject, forms.all(Remat.FULL), platform)
    try:
        if _must_be_pipeline(cluster, demands, kept):
            lean = planners.pipelines(everything, REPEATED * (math.inf if kept is None else _step_seconds(kept)))
        else:
            lean = planners.best(everything)
    except BudgetError as error:
        if refusal is None:
            return or_raise(kept, refusal)
        also = "With every layer computed again (remat='full') it does not fit either."
        raise BudgetError(f"{refusal} {also}", needed_bytes=error.needed_bytes) from None
    choices = _Choices(subject, cluster, planners.alike, forms)
    return or_raise(_relieved(choices, lean, kept, demands, report), refusal)


def _relieved(
    choices: _Choices, lean: Searched[Planned], kept: Planned | None, demands: Demands, report: Callable[[str], None]
) -> Planned | None:
    """The fastest of the plan without layers that compute again, of lean plans, and of plans like these with fewer of them."""
    best = kept
    first = () if lean.best is None else (lean.best,)
    for one in (*first, *sorted(lean.others, key=_step_seconds)):
        fastest = one if best is None else min(best, one, key=_step_seconds)
        best = _or_relieved(fastest, choices, one[1], report)
    is_small = len(choices.subject.graph.operators) <= LARGE_OPERATORS
    if best is not None and best is not kept and demands.schedule is None and is_small:
        for schedule in _other_schedules(best[1]):
            best = _or_relieved(best, choices, replace(best[1], schedule=schedule), report)
    return best


def _or_relieved(best: Planned, choices: _Choices, lean: Plan, report: Callable[[str], None]) -> Planned:
    """The best plan so far, or one that is like another plan with fewer layers computed again, if that is faster."""
    return min((best, *_Relief(choices, lean, _step_seconds(best)).better_ones(report)), key=_step_seconds)


def _other_schedules(plan: Plan) -> tuple[Schedule, ...]:
    """Under what else stages may run: in their memory there is room for other layers then."""
    if not plan.is_pipeline or plan.shares or plan.num_meshes < len(plan.stages):
        return ()
    return tuple(schedule for schedule in SCHEDULES if schedule is not plan.schedule)


def _step_seconds(planned: Planned) -> float:
    return planned[1].step_seconds


def as_demanded(subject: Subjected, demands: Demands, platform: str) -> Subjected:
    """The step as it was written with what every layer is to compute again; as it is where that is left open."""
    if demands.remat in (None, Remat.NONE):
        return subject
    return rematerialised(subject, rematerialising(subject).all(demands.remat), platform)


def best_of(searched: Searched[Planned]) -> Planned:
    """The best plan of a search that finds one or raises."""
    assert searched.best is not None
    return searched.best


def or_raise(kept: Planned | None, refusal: BudgetError | None) -> Planned:
    """What was planned, or the refusal where nothing was."""
    if kept is None:
        assert refusal is not None
        raise refusal
    return kept


def _may_pay(subject: Subjected, cluster: Cluster, demands: Demands, plain: Searched[Planned]) -> bool:
    """Whether computing again may help: memory limits the plan, and the method leaves open what is computed again.

    On one mesh it must be that nothing fits, for microbatches make what is kept less at a lower price, or that pipelines which
    might be faster do not.
    """
    if not isinstance(method_of(demands.method), IntraOp):
        return False
    operators = subject.graph.operators
    if not any(operator.phase is Phase.BACKWARD for operator in operators):
        return False
    if (kept := plain.best) is None:
        return True
    if len(operators) > LARGE_OPERATORS:  # every plan of a large step takes long
        return False
    if not kept[1].is_pipeline:
        return plain.lacks_memory
    budget_bytes = float(demands.memory_per_device or cluster.per_device_memory_bytes)
    return plain.lacks_memory or kept[1].peak_bytes > BOUND_SHARE * budget_bytes


def _must_be_pipeline(cluster: Cluster, demands: Demands, kept: Planned | None) -> bool:
    """Whether nothing but a pipeline with layers that compute again can be of use.

    Older XLA:CPUs drop barriers, and then find that a program does the same work twice.  In a pipeline passes are programs of
    their own, so there it keeps less wherever it runs.
    """
    if demands.stages not in (None, 1):
        return False
    finds_equal_work = cluster.device.platform is Platform.CPU and not _compat.cpu_keeps_barriers()
    return finds_equal_work or (kept is not None and not kept[1].is_pipeline)


@dataclass(frozen=True)
class _Choices:
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


class _Relief:
    """Owns the search for the layers that a lean plan can relieve of work."""

    def __init__(self, choices: _Choices, lean: Plan, enough_seconds: float) -> None:
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
            seconds = [
                math.inf if one is None or one.planned is None else _step_seconds(one.planned) for one in answers
            ]
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


_NONE, _FULL = (tuple(Remat).index(kind) for kind in (Remat.NONE, Remat.FULL))
