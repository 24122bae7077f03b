"""Which pipelines are near one, on devices that halves do not fill?

The dynamic program gives one grouping for each number of stages, the one of least bound.  Where stages may have any number of
devices there are many of nearly that bound, and the simulator may like another better.  From one grouping lead

    swap     neighbouring stages exchange their numbers of devices, with or without their numbers of layers
    shift    a stage gives devices to its neighbour, or leaves them idle, or takes idle ones
    merge    neighbouring stages become one
    split    a stage becomes two
    slide    a stage that begins inside a host begins with the next one, so that a network card has less to send

and every stage then lies as near to the first device, or behind a slide to the beginning of its host, as it fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from autopar.cluster import Cluster
from autopar.inter_op.sites import placed, stage_sizes

Runs = tuple[tuple[int, int], ...]
"""For each stage its numbers of layers and of devices."""


def near(
    ends: Sequence[int], places: Sequence[tuple[int, ...]], cluster: Cluster
) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """Ends of layers and places of stages of all pipelines of two stages or more that are one move away."""
    runs = tuple((end - start, len(own)) for (start, end), own in zip(pairwise((0, *ends)), places, strict=True))
    allowed = set(stage_sizes(cluster))
    for other in dict.fromkeys((*_swaps(runs), *_shifts(runs), *_merges(runs), *_splits(runs))):
        sizes = [size for _, size in other]
        if len(other) > 1 and allowed.issuperset(sizes) and (where := placed(sizes, cluster)):
            yield tuple(sum(layers for layers, _ in other[: k + 1]) for k in range(len(other))), where
    yield from ((tuple(ends), where) for where in _slides(places, cluster))


def _swaps(runs: Runs) -> Iterator[Runs]:
    for k, ((layers, size), (next_layers, next_size)) in enumerate(pairwise(runs)):
        if size != next_size:
            yield (*runs[:k], (layers, next_size), (next_layers, size), *runs[k + 2 :])
            yield (*runs[:k], runs[k + 1], runs[k], *runs[k + 2 :])


def _shifts(runs: Runs) -> Iterator[Runs]:
    for k, (layers, size) in enumerate(runs):
        for by in (-1, 1):
            changed = (*runs[:k], (layers, size + by), *runs[k + 1 :])
            yield changed
            for j in (k - 1, k + 1):
                if 0 <= j < len(runs):
                    yield (*changed[:j], (runs[j][0], runs[j][1] - by), *changed[j + 1 :])


def _merges(runs: Runs) -> Iterator[Runs]:
    for k, ((layers, size), (next_layers, next_size)) in enumerate(pairwise(runs)):
        yield (*runs[:k], (layers + next_layers, size + next_size), *runs[k + 2 :])


def _splits(runs: Runs) -> Iterator[Runs]:
    for k, (layers, size) in enumerate(runs):
        for first in {layers // 2, -(-layers // 2)}:
            for own in {size // 2, -(-size // 2)}:
                if 0 < first < layers and 0 < own < size:
                    yield (*runs[:k], (first, own), (layers - first, size - own), *runs[k + 1 :])


def _slides(places: Sequence[tuple[int, ...]], cluster: Cluster) -> Iterator[tuple[tuple[int, ...], ...]]:
    for k, own in enumerate(places):
        if own[0] % cluster.devices_per_host:
            start = (own[0] // cluster.devices_per_host + 1) * cluster.devices_per_host
            if behind := placed([len(one) for one in places[k:]], cluster, start):
                yield (*places[:k], *behind)
