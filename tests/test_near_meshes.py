"""Meshes that send each other much share a host: held against all ways to deal them out, and in a step that ties its ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.inter_op import arranged
from autopar.inter_op.near_meshes import WORTH_SHARE, Pair, near_meshes
from autopar.inter_op.sites import placed
from autopar.plan import Plan, Schedule
from benchmarks.models import Model
from tests.pipeline_enumerator import cluster_of, with_faster
from tests.toy_runs import run

ROWS, SEQUENCE, WIDTH, WORDS, BLOCKS = 8, 4, 64, 128, 6
SLOW = 3e5


@st.composite
def meshes_that_send(draw: st.DrawFn) -> tuple[int, int, list[int], dict[Pair, int]]:
    """Hosts, devices of each, the sizes of meshes that fit there in their order, and what they send each other."""
    hosts, per_host = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes: list[int] = []
    for _ in range(hosts):
        left = per_host
        while left and (size := draw(st.integers(0, left))):
            sizes.append(size)
            left -= size
    pairs = list(itertools.combinations(range(len(sizes)), 2))
    sent = draw(st.dictionaries(st.sampled_from(pairs), st.integers(1, 1000))) if pairs else {}
    return hosts, per_host, sizes, sent


def ways(sizes: list[int], hosts: int, per_host: int) -> Iterator[tuple[int, ...]]:
    """All ways to deal meshes out to hosts."""
    for where in itertools.product(range(hosts), repeat=len(sizes)):
        if all(sum(s for s, h in zip(sizes, where, strict=True) if h == host) <= per_host for host in range(hosts)):
            yield where


def between_hosts(where: tuple[int, ...], sent: Mapping[Pair, int]) -> int:
    return sum(size_bytes for (one, other), size_bytes in sent.items() if where[one] != where[other])


def sent_now(meshes: Sequence[tuple[int, ...]], sent: Mapping[Pair, int], per_host: int) -> int:
    return between_hosts(tuple(mesh[0] // per_host for mesh in meshes), sent)


@given(meshes_that_send())
def test_meshes_lie_on_hosts_and_no_two_of_them_should_change_places(
    case: tuple[int, int, list[int], dict[Pair, int]],
) -> None:
    hosts, per_host, sizes, sent = case
    cluster = cluster_of(hosts, per_host, network=SLOW)
    now = placed(sizes, cluster)
    assert now is not None
    found = near_meshes(now, sent, cluster) if sizes else None
    if found is None:
        return
    assert [len(mesh) for mesh in found] == sizes
    devices = [device for mesh in found for device in mesh]
    assert len(set(devices)) == len(devices) and max(devices) < hosts * per_host
    assert all(len({device // per_host for device in mesh}) == 1 for mesh in found)
    spared = sent_now(found, sent, per_host)
    assert spared <= (1 - WORTH_SHARE) * sent_now(now, sent, per_host)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        if sizes[one] == sizes[other]:
            changed = [found[{one: other, other: one}.get(mesh, mesh)] for mesh in range(len(sizes))]
            assert sent_now(changed, sent, per_host) >= spared


@given(
    st.sampled_from([(2, 2), (2, 3), (2, 4), (3, 2)]),
    st.lists(st.integers(1, 10), min_size=8, max_size=8),
    st.lists(st.integers(1, 60), min_size=3, max_size=3),
    st.booleans(),
)
def test_of_a_chain_that_is_tied_and_of_a_u_no_other_way_sends_less(
    shape: tuple[int, int], along: list[int], across: list[int], is_folded: bool
) -> None:
    hosts, per_host = shape
    number = hosts * per_host
    sent = {(mesh, mesh + 1): along[mesh] for mesh in range(number - 1)}
    arms = range(number // 2 - 1) if is_folded else range(1)
    sent |= {(mesh, number - 1 - mesh): across[mesh] for mesh in arms}
    now = [(mesh,) for mesh in range(number)]
    found = near_meshes(now, sent, cluster_of(hosts, per_host, network=SLOW)) or now
    least = min(between_hosts(where, sent) for where in ways([1] * number, hosts, per_host))
    assert least >= (1 - WORTH_SHARE) * sent_now(found, sent, per_host)


def test_the_ends_of_a_chain_that_are_tied_meet() -> None:
    chain = {(mesh, mesh + 1): 2 for mesh in range(7)}
    found = near_meshes([(mesh,) for mesh in range(8)], {**chain, (0, 7): 8}, cluster_of(4, 2, network=SLOW))
    assert found == ((0,), (2,), (3,), (4,), (5,), (6,), (7,), (1,))


def test_where_hosts_are_not_alike_or_meshes_larger_meshes_stay() -> None:
    alone, sent = [(mesh,) for mesh in range(4)], {(0, 3): 8}
    cluster = cluster_of(2, 2, network=SLOW)
    assert near_meshes(alone, sent, cluster) is not None
    assert near_meshes(alone, sent, with_faster(cluster, (1,))) is None
    assert near_meshes([(0, 1, 2, 3)], {}, cluster) is None
    assert near_meshes(alone, {(0, 1): 1, (1, 2): 8, (2, 3): 1}, cluster) is None  # neighbours only


# --- in a plan ----------------------------------------------------------------------------------------------------------


def tied(optimizer: optax.GradientTransformation | None = None) -> Model:
    """Words become rows of a table, go through blocks, and are held against the same table."""
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)

    def make_state() -> dict[str, Any]:
        random = np.random.default_rng(0)
        shapes = {"table": (WORDS, WIDTH), **{f"block{k}": (WIDTH, WIDTH) for k in range(BLOCKS)}}
        params = {name: jnp.asarray(random.standard_normal(shape) / WIDTH**0.5) for name, shape in shapes.items()}
        return {"params": params, "moments": optimizer.init(params)}

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        x = params["table"][batch["words"]]
        for k in range(BLOCKS):
            x = x + jnp.tanh(x @ params[f"block{k}"])
        said = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(said, batch["next"][..., None], axis=-1))

    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        value, gradient = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = optimizer.update(gradient, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, {"loss": value}

    def make_batch(rows: int) -> dict[str, np.ndarray]:
        words = np.random.default_rng(1).integers(0, WORDS, (rows, SEQUENCE + 1))
        return {"words": words[:, :-1], "next": words[:, 1:]}

    return Model("tied", make_state, train_step, make_batch, ROWS)


def planned(model: Model, stages: int | list[list[int]]) -> tuple[autopar.Parallelized, Plan]:
    cluster = cluster_of(2, 2, network=SLOW)
    step = autopar.parallelize(
        model.train_step, cluster=cluster, stages=stages, num_microbatches=4, schedule=Schedule.ONE_F_ONE_B
    )
    return step, step.plan(model.abstract_state(), model.abstract_batch())


@pytest.mark.parametrize("is_large", [False, True])
def test_first_and_last_stage_share_a_host_where_they_share_a_table(
    is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(arranged, "LARGE_OPERATORS", 0)
    _, plan = planned(tied(), 4)
    assert [stage.devices for stage in plan.stages] == [(0,), (2,), (3,), (1,)]
    _, as_usual = planned(tied(), [[0], [1], [2], [3]])
    assert plan.step_seconds < 0.8 * as_usual.step_seconds


@pytest.mark.verify
def test_an_explanation_says_why() -> None:
    model = tied()
    for stages, said in ((4, ["Stages 1 and 4 lie on one host: the 64.0 KiB"]), ([[0], [1], [2], [3]], [])):
        step, _ = planned(model, stages)
        notes = autopar.explain(step, model.abstract_state(), model.abstract_batch()).notes
        found = [note for note in notes if "lie on one host" in note]
        assert len(found) == len(said) and all(note.startswith(one) for note, one in zip(found, said, strict=True))


def test_without_momentum_the_tables_gradient_crosses_once_a_step_too() -> None:
    """What plain gradient descent adds up over the microbatches is no other than what is added to a momentum."""
    _, with_momentum = planned(tied(), [[0], [1], [2], [3]])
    _, plain = planned(tied(optax.sgd(0.1)), [[0], [1], [2], [3]])
    assert plain.step_seconds <= with_momentum.step_seconds


def test_it_computes_the_same() -> None:
    model = tied()
    with jax.enable_x64(True):
        step, plan = planned(model, 4)
        assert [stage.devices for stage in plan.stages] == [(0,), (2,), (3,), (1,)]
        ours = run(model, step, model.make_state(), 3)
        plain = run(model, jax.jit(model.train_step), model.make_state(), 3)
    assert ours.state.keys() == plain.state.keys()
    for path, wanted in plain.state.items():
        assert wanted.dtype == np.float64
        np.testing.assert_allclose(ours.state[path], wanted, rtol=1e-12, atol=1e-14)
