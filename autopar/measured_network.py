"""How long do collectives take between the hosts of a cluster?

The processes of all hosts form a world, and measure together: each runs the same programs as often as the others, for none ends
without them.  As in :mod:`autopar.measured_collectives` a collective stands between matrix products, since hosts do not come to
it together; a program is two loops,

    s times   products, a collective          then L − s times   products

whose trips s are an argument, so it is compiled once, and

    seconds of one = (seconds at s = L  −  seconds at s = 1) / (L − 1)

Curves are of collectives after little work, and what a small one takes longer after more of it is measured as *waits*.

All devices take part, in groups of every shape that they can be cut into (:func:`autopar.network.spans_of`).  β of a link is told
by all-gathers of two sizes among one device of each host, when nobody else uses the cards; α by the smallest all-gather of all.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autopar.cluster import Cluster
from autopar.cores import quota_cores
from autopar.cost_model.collectives import Collective
from autopar.curves import Curve, Samples
from autopar.errors import ClusterError
from autopar.measured_collectives import Worked, sizes_of
from autopar.measured_waits import WAITING_ELEMENTS, Link, waits_of, worked
from autopar.network import Network, Span, SpanCurve, SpanWait, spans_of
from autopar.on_ray import fleet_of
from autopar.timing import LEAST_SECONDS, timer_of

KINDS = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
LONGEST_SECONDS = 600.0
"""So long hosts may take to measure one kind in groups of one shape."""
_LINK_BYTES = (1 << 20, 1 << 22)
"""That one device of each host gives to the all-gathers by which β is found."""


@dataclass(frozen=True)
class NetworkEffort:
    """The sizes of collectives (full bytes, see :mod:`autopar.cost_model.collectives`), links of a chain, and its runs.

    ``work_sides`` are those of the products between collectives: after the first of them curves are measured, after all of them
    what a small all-reduce takes longer.
    """

    full_bytes: tuple[int, ...]
    chain: int
    runs: int
    work_sides: tuple[int, ...] = (64, 192, 320, 512)


FULL = NetworkEffort(tuple(1 << power for power in (10, 14, 16, 18, 20, 22)), 6, 5)
QUICK = NetworkEffort(tuple(1 << power for power in (10, 16, 20)), 4, 3, (64, 384))


@dataclass(frozen=True)
class Asked:
    """What all processes measure together: one kind in groups of one shape, of so many devices of each host."""

    kind: Collective
    span: Span
    devices_per_host: int
    effort: NetworkEffort


Measure = Callable[[Sequence[Any], Asked], Samples]
"""What each process does: all devices of the world, host by host, and what is asked."""
Together = Callable[[Measure, Asked], Samples]
"""Has all processes do it, and returns what the first one found."""


def measure_network(effort: NetworkEffort = FULL, say: Callable[[str], None] = lambda message: None) -> Network:
    """Measure between the hosts of this program, of whose processes each calls this function.

    ``say`` is told what is being measured.  Raises ``ClusterError`` in a program of a single process.
    """
    devices = sorted(jax.devices(), key=lambda one: (one.process_index, one.id))
    cluster = Cluster.local(profile=None)
    _check_hosts(cluster)
    return _measured(cluster, effort, say, lambda measure, asked: measure(devices, asked))


def measure_ray_network(
    cluster: Cluster, effort: NetworkEffort = FULL, say: Callable[[str], None] = lambda message: None
) -> Network:
    """The same between the hosts of a Ray cluster; processes are started on them, which ``cluster.close()`` ends.

    Raises ``ClusterError`` for a cluster that does not run on Ray or has one host, ``WorkerError`` if a process fails.
    """
    if cluster.runs_on is None:
        raise ClusterError(
            f"cluster {cluster.name!r} does not run on Ray; take Cluster.ray(...), or description.on_ray()"
        )
    _check_hosts(cluster)
    fleet = fleet_of(cluster)
    (world,) = fleet.worlds([tuple(range(cluster.num_devices))], cluster.device.platform)

    def together(measure: Measure, asked: Asked) -> Samples:
        what = f"{asked.kind.value} between hosts to be measured"
        found: Samples = world.collected(world.call("compute", measure, asked), LONGEST_SECONDS, what)[0]
        return found

    return _measured(cluster, effort, say, together)


def network_rows(network: Network) -> Iterable[tuple[str, str, str]]:
    """(what, seconds of the smallest, rate of the largest) for a table."""
    yield "a link", f"{network.latency_seconds * 1e6:.0f} µs", f"{network.bytes_per_second / 1e6:.1f} MB/s"
    for wait in network.waits:
        work, seconds = wait.curve.samples[-1]
        what = f"waiting among {wait.span.per_host} on each of {wait.span.hosts} hosts"
        yield what, f"{seconds * 1e6:.0f} µs after {work * 1e3:.0f} ms", ""
    for one in network.collectives:
        sent, seconds = one.curve.samples[-1]
        what = f"{one.kind} among {one.span.per_host} on each of {one.span.hosts} hosts"
        yield what, f"{one.curve.at(0.0) * 1e6:.0f} µs", f"{sent / seconds / 1e6:.1f} MB/s"


def _check_hosts(cluster: Cluster) -> None:
    if cluster.hosts < 2:
        raise ClusterError(
            "there is one host; measure between several: on Ray, or in each process under jax.distributed"
        )


def _measured(cluster: Cluster, effort: NetworkEffort, say: Callable[[str], None], together: Together) -> Network:
    hosts, devices_per_host = cluster.hosts, cluster.devices_per_host
    say("links between hosts")
    bytes_per_second = _bytes_per_second(hosts, effort, together)
    curves, waits = [], []
    for span in spans_of(hosts, devices_per_host):
        say(f"waits among {span.per_host} devices on each of {span.hosts} hosts")
        asked = Asked(Collective.ALL_REDUCE, span, devices_per_host, effort)
        waits.append(SpanWait(span, Curve(together(waiting_samples, asked))))
        for kind in KINDS:
            say(f"{kind.value} among {span.per_host} devices on each of {span.hosts} hosts")
            curve = Curve(together(samples, Asked(kind, span, devices_per_host, effort)))
            curves.append(SpanCurve(kind.value, span, curve))
    network = Network(
        jax_version=jax.__version__,
        platform=cluster.device.platform.value,
        devices_per_host=devices_per_host,
        measured_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        latency_seconds=0.0,
        bytes_per_second=bytes_per_second,
        collectives=tuple(curves),
        waits=tuple(waits),
    )
    return _with_latency(network, Span(hosts, 1))


def _bytes_per_second(hosts: int, effort: NetworkEffort, together: Together) -> float:
    sizes = NetworkEffort(tuple(hosts * given for given in _LINK_BYTES), effort.chain, effort.runs)
    (small, soon), (large, late) = together(samples, Asked(Collective.ALL_GATHER, Span(hosts, 1), 1, sizes))
    return (large - small) / max(late - soon, LEAST_SECONDS)


def _with_latency(network: Network, span: Span) -> Network:
    """α of a link: what the smallest all-gather takes for each of the times that it passes something on."""
    curve = network.collective(Collective.ALL_GATHER.value, span)
    assert curve is not None
    sent, seconds = curve.samples[0]
    left = seconds - network.devices_per_host * sent / network.bytes_per_second
    return dataclasses.replace(network, latency_seconds=max(left / (span.hosts - 1), LEAST_SECONDS))


# -------------------------------------------------------------------------------------------------- on all hosts at once


def samples(devices: Sequence[Any], asked: Asked) -> Samples:
    """(wire bytes, seconds) by ascending sizes; ``devices`` are all of the world, host by host."""
    mesh = _mesh(devices, asked)
    found = {}
    for size_bytes in asked.effort.full_bytes:
        elements, sent = sizes_of(asked.kind, size_bytes, asked.span.group_size)
        found[sent] = _worked(mesh, asked, elements, asked.effort.work_sides[0]).collective_seconds
    return tuple(sorted(found.items()))


def waiting_samples(devices: Sequence[Any], asked: Asked) -> Samples:
    """(seconds of work, seconds that a small collective takes longer after it than after the least)."""
    mesh = _mesh(devices, asked)
    waits = waits_of([_worked(mesh, asked, WAITING_ELEMENTS, side) for side in asked.effort.work_sides])
    return tuple(sorted(waits.items()))


def _mesh(devices: Sequence[Any], asked: Asked) -> Mesh:
    """The first so many devices of each host, in groups of the shape that is asked for."""
    hosts = devices[-1].process_index + 1
    by_host = np.array(devices).reshape(hosts, -1)[:, : asked.devices_per_host]
    span = asked.span
    grouped = by_host.reshape(hosts // span.hosts, span.hosts, -1, span.per_host).transpose(0, 2, 1, 3)
    return Mesh(grouped.reshape(-1, span.group_size), ("other", "group"), axis_types=(AxisType.Auto,) * 2)


def _worked(mesh: Mesh, asked: Asked, elements: int, work_side: int) -> Worked:
    link = Link(asked.kind, asked.span.group_size, elements, work_side)
    return worked(mesh, link, asked.effort.chain, timer_of(0.0, asked.effort.runs, quota_cores()))
