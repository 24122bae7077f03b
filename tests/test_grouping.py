"""Are groupings what they are said to take?"""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.inter_op.grouping import Estimates, TooLarge, best_groupings, given_grouping
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.sites import host_order, stage_sizes
from tests.pipeline_enumerator import cluster_of

NUM_LAYERS, HOSTS, DEVICES = 5, 2, 2


def estimates_of(seed: int, network: float = 1e6) -> Estimates:
    """Layers of unlike costs, on parts that are a little slower than in proportion; bytes per second between hosts."""
    rng = np.random.default_rng(seed)
    cluster = cluster_of(HOSTS, DEVICES, network=network)
    order = host_order(cluster, range(HOSTS), stage_sizes(cluster))
    work = rng.uniform(1.0, 3.0, NUM_LAYERS)
    costs = {}
    for part in order.firsts:
        size = part.num_devices
        seconds = work / size * rng.uniform(1.0, 1.2)
        once, fixed = rng.uniform(0.0, 0.5, NUM_LAYERS) / size, rng.uniform(0.0, 0.1, NUM_LAYERS)
        costs[part] = LayerCosts(8, seconds, fixed, once, np.ones(NUM_LAYERS), np.ones(NUM_LAYERS))
    crossing = np.concatenate([[0.0], rng.uniform(0.0, 1e4, NUM_LAYERS - 1), [0.0]])
    budgets = dict.fromkeys(order.firsts, 1e9)
    return Estimates(order, budgets, costs, crossing, min(NUM_LAYERS, cluster.num_devices))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 8, 64]))
def test_the_bound_of_a_grouping_is_that_of_its_own_stages(seed: int, count: int) -> None:
    estimates = estimates_of(seed)
    found = best_groupings(estimates, count)
    assert found
    for one in found:
        same = given_grouping(estimates, count, one.ends, one.devices)
        assert same is not None and one.bound_seconds == pytest.approx(same.bound_seconds)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 64]), st.sampled_from([1e6, 1e4, 3e2]))
def test_no_other_ends_on_the_same_devices_are_much_better(seed: int, count: int, network: float) -> None:
    estimates = estimates_of(seed, network)
    best = best_groupings(estimates, count)[0]
    stages = len(best.ends)
    others = [
        given_grouping(estimates, count, (*ends, NUM_LAYERS), best.devices)
        for ends in itertools.combinations(range(1, NUM_LAYERS), stages - 1)
    ]
    assert best.bound_seconds <= 1.02 * min(one.bound_seconds for one in others if one is not None)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 8, 64]), st.sampled_from([1e6, 1e4, 3e2]))
def test_a_link_is_a_stage_as_well(seed: int, count: int, network: float) -> None:
    """Every microbatch passes it in both directions, and no other does so meanwhile: worked out from the layers themselves."""
    estimates = estimates_of(seed, network)
    for one in best_groupings(estimates, count):
        runs = list(zip(pairwise((0, *one.ends)), one.devices, strict=True))
        parts = [estimates.costs[estimates.order.parts[devices[0], len(devices)]] for _, devices in runs]
        stages = [
            float((costs.microbatch_seconds(count) + costs.once_seconds / count)[start:end].sum())
            for ((start, end), _), costs in zip(runs, parts, strict=True)
        ]
        links = []
        for (_, source), ((start, _), target) in pairwise(runs):
            is_far = source[-1] // DEVICES != target[0] // DEVICES
            link = estimates.order.cluster.network_link if is_far else estimates.order.cluster.local_link
            ways = max(1, len(source) // DEVICES) if is_far else len(source)
            crossing = float(estimates.crossing_bytes[start]) * 8 / count
            links.append(2 * link.latency_seconds + crossing / (link.bytes_per_second * ways))
        slowest = max(*stages, *(seconds / 2 for seconds in links))
        assert one.bound_seconds == pytest.approx(sum(stages) + sum(links) + (count - 1) * slowest)


def test_what_would_hold_a_link_up_crosses_inside_a_host() -> None:
    """The cut before the middle layer is the dear one; between hosts it would be slower than any stage, so it lies inside one."""
    cluster = cluster_of(HOSTS, DEVICES, network=1e3)
    order = host_order(cluster, range(HOSTS), stage_sizes(cluster))
    work, none = np.array([1.0, 1.0, 1.0, 1.0]), np.zeros(4)
    costs = {part: LayerCosts(8, work / part.num_devices, none, none, none, none) for part in order.firsts}
    crossing = np.array([0.0, 10.0, 1e4, 10.0, 0.0])
    estimates = Estimates(order, dict.fromkeys(order.firsts, 1e9), costs, crossing, 4)
    for one in best_groupings(estimates, 64):
        between_hosts = [
            end
            for (end, source), (_, target) in pairwise(zip(one.ends, one.devices, strict=True))
            if source[-1] // DEVICES != target[0] // DEVICES
        ]
        if len(one.ends) < 4:  # four stages of a device each have to be cut there
            assert 2 not in between_hosts


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 8, 64]))
def test_even_stages_on_equally_many_devices_are_not_missed(seed: int, count: int) -> None:
    estimates = estimates_of(seed)
    found = {len(one.ends): one.bound_seconds for one in best_groupings(estimates, count)}
    for size in (1, 2):
        stages = HOSTS * DEVICES // size
        places = [tuple(range(stage * size, (stage + 1) * size)) for stage in range(stages)]
        each = next(costs for part, costs in estimates.costs.items() if part.num_devices == size)
        seconds = each.microbatch_seconds(count) + each.once_seconds / count
        splits = [(*ends, NUM_LAYERS) for ends in itertools.combinations(range(1, NUM_LAYERS), stages - 1)]
        slowest = {ends: max(seconds[a:b].sum() for a, b in pairwise((0, *ends))) for ends in splits}
        even = given_grouping(estimates, count, min(slowest, key=slowest.__getitem__), places)
        assert even is not None and found[stages] <= even.bound_seconds * (1 + 1e-9)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 64]), st.integers(0, HOSTS * DEVICES - 1))
def test_a_stage_that_is_too_large_is_in_no_grouping_again(seed: int, count: int, pick: int) -> None:
    """Nor is one of more layers, or with more microbatches in flight, on devices of that kind and number."""
    estimates = estimates_of(seed)
    best = best_groupings(estimates, count)[0]
    runs = list(zip(pairwise((0, *best.ends)), best.devices, strict=True))
    number = pick % len(runs)
    (start, end), devices = runs[number]
    part = estimates.order.parts[devices[0], len(devices)]
    known = TooLarge(count, part, len(runs) - number, start, end)
    others = best_groupings(replace(estimates, too_large=(known,)), count)
    assert best not in others
    for one in others:
        for behind, (run, places) in enumerate(
            zip(reversed(list(pairwise((0, *one.ends)))), reversed(one.devices), strict=True), start=1
        ):
            holds_it = run[0] <= start and run[1] >= end and behind >= known.from_end
            assert not (holds_it and len(places) == part.num_devices)
    elsewhere = replace(estimates, too_large=(replace(known, count=2 * count),))
    assert best_groupings(elsewhere, count) == best_groupings(estimates, count)


def test_few_examples_leave_devices_the_same_work() -> None:
    """A plan of 16 microbatches of 8 examples that cuts these into four: of one example all four devices do all the work."""
    one, none = np.ones(1), np.zeros(1)
    costs = LayerCosts(16, one, none, none, none, none, examples=8, pieces=4)
    assert [costs.repeats(count) for count in (8, 16, 32, 64, 128)] == [1.0, 1.0, 1.0, 2.0, 4.0]
    assert costs.microbatch_seconds(128)[0] == pytest.approx(costs.microbatch_seconds(32)[0])
    unknown = LayerCosts(16, one, none, none, none, none)
    assert unknown.repeats(128) == 1.0


def test_what_is_fixed_is_paid_for_every_microbatch() -> None:
    one, none = np.ones(1), np.zeros(1)
    costs = LayerCosts(16, 3 * one, 2 * one, none, none, none)
    assert [float(costs.microbatch_seconds(count)[0]) for count in (8, 16, 32)] == [8.0, 5.0, 3.5]
