"""How long does a collective wait for devices that still work?

Devices that share cores, and hosts with a ration of processor time, do not end their work together, and the longer it was, the
further apart.  What was measured of that is in profiles (within a host) and networks (across hosts), by the seconds of work since
the collective before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

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
