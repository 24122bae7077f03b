"""Is a mesh that is left alone no cheaper than is said?"""

from __future__ import annotations

import itertools

import pytest

from autopar.cluster import Mesh
from autopar.inter_op.part_costs import whole_on
from autopar.intra_op.task import WORTH_SHARE
from autopar.intra_op.wide import is_wide
from tests.toy_pipelines import toy_step
from tests.toy_runs import eight_slow_devices


@pytest.mark.verify
def test_the_cheapest_mesh_is_found_without_solving_all() -> None:
    task = toy_step("gpt", 2).task(eight_slow_devices())
    every = whole_on(task, task.cluster)
    answers = every.by_mesh(0.0)
    assert any(is_wide(one.model) for one in every._meshes), "nothing is left alone here"
    price = answers[0].seconds / 1e9
    for at in (0.0, price):
        best = every.by_mesh(at)[0].priced_seconds
        assert best <= whole_on(task, task.cluster).cheapest(at).priced_seconds <= best / (1 - WORTH_SHARE)


def test_one_mesh_is_asked_for_alone() -> None:
    task = toy_step("mlp_nnx", 2).task(eight_slow_devices())
    every, alone = whole_on(task, task.cluster), whole_on(task, task.cluster)
    price = every.by_mesh(0.0)[0].seconds / 1e9
    for at, answer in itertools.product((0.0, price), every.by_mesh(0.0)):
        mesh = answer.stage.mesh
        known = next(one for one in every.by_mesh(at) if one.stage.mesh == mesh)
        one = alone.on(mesh, at)
        assert one is not None and one.stage == known.stage and alone.on(mesh, at) is one
        others = {other.stage.mesh for other in alone.others_of(one)}  # of stages that share a mesh they are asked for
        assert others == {other.stage.mesh for other in every.by_mesh(at)} - {mesh}
    assert alone.on(Mesh(("data",), (3,)), 0.0) is None


@pytest.mark.verify
def test_what_costs_more_on_every_mesh_is_told_before_it_is_solved() -> None:
    task = toy_step("gpt", 2).task(eight_slow_devices())
    best = whole_on(task, task.cluster).by_mesh(0.0)[0].seconds
    prices = whole_on(task, task.cluster)
    assert not prices.may_cost_less(best * (1 - 2 * WORTH_SHARE))
    assert prices.may_cost_less(best * (1 + 2 * WORTH_SHARE))
    assert best <= prices.cheapest(0.0).seconds <= best * (1 + 2 * WORTH_SHARE)
