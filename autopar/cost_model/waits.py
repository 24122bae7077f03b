"""How long does a collective wait for devices that still work?

Devices that share cores, and hosts with a ration of processor time, do not end their work together, and the longer it was, the
further apart.  What was measured of that is in profiles (within a host) and networks (across hosts), by the seconds of work since
the collective before.

A collective only brings those together that take part.  Pairs that met along one axis of a mesh are as far from each other as
they were, and a collective along another axis that follows at once waits for that.  So what counts is the work since the
members of a group last met, directly or by others in between.  On a mesh a collective over axes A waits for

    W − min over a ∈ A of (W when a collective last went over a)

where W is the work so far.  For groups of any shape each device keeps how much every other had done when it last heard of it
(vector clocks; Fidge, 1988; Mattern, 1989), which on a mesh says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np

from autopar.cluster import Cluster, Mesh
from autopar.cost_model.groups import axes_groups, measured_span

Waiting = Callable[[float], float]
"""Seconds of work → seconds of waiting."""


def waiting(groups: Sequence[tuple[int, ...]], cluster: Cluster) -> Waiting:
    """What a collective in such groups (of one size) takes longer after work since the one before it than soon after that.

    By the cluster's network where that knows, else by its profile; nothing without either.
    """
    across = None
    if cluster.network is not None and (span := measured_span(groups, cluster)) is not None:
        across = cluster.network.waiting(span)
    if across is not None:
        return across
    if cluster.profile is None or not groups:
        return lambda work_seconds: 0.0
    return partial(cluster.profile.waiting_seconds, len(groups[0]))


@cache
def axes_waiting(axes: tuple[str, ...], mesh: Mesh, cluster: Cluster) -> Waiting:
    """The same of a collective over mesh axes."""
    return waiting(axes_groups(mesh, axes), cluster)


class WorkSinceAxes:
    """How much all devices of a mesh have worked since they last met along its axes, on the way through a program."""

    def __init__(self) -> None:
        self._worked_seconds = 0.0
        self._met: dict[str, float] = {}

    def work(self, seconds: float) -> None:
        """All devices do so much."""
        self._worked_seconds += seconds

    def meet(self, axes: tuple[str, ...]) -> float:
        """Seconds of work since all devices that differ along these axes only last met; they meet now."""
        since = min(self._met.get(axis, 0.0) for axis in axes) if axes else self._worked_seconds
        self._met.update(dict.fromkeys(axes, self._worked_seconds))
        return self._worked_seconds - since


class WorkSinceGroups:
    """The same of groups of devices, numbered from 0, whatever their shape."""

    def __init__(self, num_devices: int) -> None:
        self._worked_seconds = 0.0
        self._heard = np.zeros((num_devices, num_devices))
        """By device: how much each other had worked when it last heard of it."""

    def work(self, seconds: float) -> None:
        """All devices do so much."""
        self._worked_seconds += seconds

    def meet(self, groups: Sequence[tuple[int, ...]]) -> float:
        """Seconds of work since the members of some group last met; those of every group meet now."""
        longest = 0.0
        for group in groups:
            members = list(group)
            heard = self._heard[members].max(axis=0)
            heard[members] = self._worked_seconds
            longest = max(longest, self._worked_seconds - float(self._heard[np.ix_(members, members)].min()))
            self._heard[members] = heard
        return longest
