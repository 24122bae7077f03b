"""What is hidden behind work: by the clocks of two streams, in a compiled text, and as it is foretold of a plan.

That no more is foretold than XLA's compiler for H100s hides is held in ``tests/test_gpu_compiler.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.cluster import Cluster, DeviceKind, Link, Platform
from autopar.cost_model.collectives import Collective, group_seconds
from autopar.cost_model.hlo import parse_module, step_seconds
from autopar.cost_model.overlap import SURE_SHARE, WORK_SHARE
from autopar.cost_model.streams import Deed, Tasks, TwoStreams, backwards, hidden_in, surely_hidden, tastes
from autopar.intra_op.task import WORTH_SHARE
from autopar.plan import Plan, Prediction
from benchmarks.models import build

Order = Sequence[tuple[Deed, int]]

# --- two streams -----------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn, most: int = 7) -> Tasks:
    """Tasks of whole seconds that wait for some of those before them."""
    count = draw(st.integers(1, most))
    reads = {task: draw(st.sets(st.integers(0, task - 1))) if task else set() for task in range(count)}
    seconds = {task: float(draw(st.integers(0, 4))) for task in range(count)}
    return Tasks(seconds, reads, draw(st.frozensets(st.integers(0, count - 1))))


def ticks_of_both(order: Order, seconds: Mapping[int, float]) -> int:
    """In how many seconds both streams are busy, second by second."""
    todo, queue, ended = list(order), list[list[float]](), set[int]()
    both, kernel = 0, 0.0
    while todo or kernel or queue:
        while not kernel and todo:
            deed, task = todo[0]
            if deed is Deed.END and task not in ended:
                break
            todo.pop(0)
            if deed is Deed.WORK:
                kernel = seconds[task]
            elif deed is Deed.START:
                queue.append([task, seconds[task]])
                while queue and not queue[0][1]:
                    ended.add(int(queue.pop(0)[0]))
        both += bool(kernel and queue)
        kernel = max(0.0, kernel - 1)
        if queue:
            queue[0][1] -= 1
        while queue and queue[0][1] <= 0:
            ended.add(int(queue.pop(0)[0]))
    return both


@settings(derandomize=True, deadline=None, max_examples=200)
@given(programs(), st.data())
def test_hidden_are_the_seconds_in_which_both_streams_are_busy(tasks: Tasks, data: st.DataObject) -> None:
    taste = data.draw(st.sampled_from([*tastes(tasks)]))
    order = backwards(tasks, taste, data.draw(st.sampled_from([0.5, 1.0, 4.0])))
    hidden = hidden_in(order, tasks.seconds)
    assert hidden == ticks_of_both(order, tasks.seconds)
    sent = sum(tasks.seconds[task] for task in tasks.sent)
    assert 0 <= hidden <= min(sent, sum(tasks.seconds.values()) - sent)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(programs(), st.data())
def test_more_seconds_of_anything_never_hide_less_in_the_same_order(tasks: Tasks, data: st.DataObject) -> None:
    order = backwards(tasks, next(tastes(tasks)), 1.0)
    longer = data.draw(st.sampled_from([*tasks.seconds]))
    more = {task: seconds + (task == longer) for task, seconds in tasks.seconds.items()}
    assert hidden_in(order, tasks.seconds) <= hidden_in(order, more)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(programs(), st.data())
def test_an_order_keeps_what_waits_for_what_with_one_collective_under_way(tasks: Tasks, data: st.DataObject) -> None:
    order = backwards(tasks, data.draw(st.sampled_from([*tastes(tasks)])), 4.0)
    assert len(order) == len(tasks.reads) + len(tasks.sent)
    ready, under_way = set[int](), set[int]()
    for deed, task in order:
        if deed is Deed.END:
            under_way.remove(task)
            ready.add(task)
            continue
        assert ready.issuperset(tasks.reads[task])
        assert (deed is Deed.START) == (task in tasks.sent)
        if deed is Deed.START:
            assert not under_way
            under_way.add(task)
        else:
            ready.add(task)
    assert ready == set(tasks.reads)


def all_orders(tasks: Tasks) -> Iterator[Order]:
    """Every order of works, starts and ends in which nothing is read before it is there."""
    deeds = [(Deed.START if task in tasks.sent else Deed.WORK, task) for task in tasks.reads]
    for order in itertools.permutations([*deeds, *((Deed.END, task) for task in tasks.sent)]):
        place = {deed: number for number, deed in enumerate(order)}
        done = {task: place[Deed.END if task in tasks.sent else Deed.WORK, task] for task in tasks.reads}
        if all(done[read] < place[deed] for deed in deeds for read in tasks.reads[deed[1]]) and all(
            place[Deed.START, task] < done[task] for task in tasks.sent
        ):
            yield order


@settings(derandomize=True, deadline=None, max_examples=100)
@given(programs(most=3))
def test_no_more_is_hidden_than_in_the_best_of_all_orders(tasks: Tasks) -> None:
    best = max(hidden_in(order, tasks.seconds) for order in all_orders(tasks))
    found = [hidden_in(backwards(tasks, taste, 1.0), tasks.seconds) for taste in tastes(tasks)]
    assert surely_hidden(tasks, 1.0) == min(found)
    assert max(found) <= best


def test_what_a_collective_neither_makes_nor_is_read_by_hides_it() -> None:
    """Work 0 makes what 1 sends, 3 reads it, 2 does neither."""
    tasks = Tasks({0: 5.0, 1: 3.0, 2: 2.0, 3: 5.0}, {0: (), 1: (0,), 2: (0,), 3: (1, 2)}, {1})
    assert surely_hidden(tasks, 1.0) == 2.0
    chained = replace(tasks, reads={**tasks.reads, 2: (1,)})
    assert surely_hidden(chained, 1.0) == 0.0


def test_work_beside_one_collective_is_missed_by_the_next() -> None:
    """Both read work 0, one after the other is under way; who is believed to take longer gets all of the work between."""
    tasks = Tasks({0: 1.0, 1: 2.0, 2: 2.0, 3: 4.0, 4: 1.0}, {0: (), 1: (0,), 2: (0,), 3: (0,), 4: (1, 2, 3)}, {1, 2})
    assert (surely_hidden(tasks, 1.0), surely_hidden(tasks, 4.0)) == (2.0, 2.0)
    pieces = Tasks({**tasks.seconds, 3: 2.0, 5: 2.0}, {**tasks.reads, 5: (0,), 4: (1, 2, 3, 5)}, {1, 2})
    assert (surely_hidden(pieces, 1.0), surely_hidden(pieces, 4.0)) == (4.0, 2.0)


def test_collectives_follow_one_another() -> None:
    streams = TwoStreams()
    streams.start("first", 3.0)
    streams.start("second", 3.0)
    streams.work(4.0)
    streams.end("second")
    assert (streams.seconds, streams.hidden_seconds) == (6.0, 4.0)


# --- compiled texts --------------------------------------------------------------------------------------------------

HLO = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (q: f32[2048]) -> f32[256] {
  %q = f32[2048]{0} parameter(0)
  ROOT %rs = f32[256]{0} reduce-scatter(%q), channel_id=6, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%add
}

%body (s: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %s = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[1024]{0} get-tuple-element(%s), index=1
  %inner = f32[1024]{0} all-reduce-start(%v), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":INNER}}
  %beside = f32[1024]{0} copy(%v)
  %inner_done = f32[1024]{0} all-reduce-done(%inner)
  ROOT %t = (s32[], f32[1024]{0}) tuple(%i, %inner_done)
}

%cond (s.1: (s32[], f32[1024])) -> pred[] {
  %s.1 = (s32[], f32[1024]{0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (x: f32[1024], y: f32[1000000], z: f32[2048]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %y = f32[1000000]{0} parameter(1)
  %z = f32[2048]{0} parameter(2)
  %outer = f32[1024]{0} all-reduce-start(%x), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":false}}
  %large = f32[1000000]{0} copy(%y)
  %outer_done = f32[1024]{0} all-reduce-done(%outer)
  %begin = ((f32[2048]{0}), f32[256]{0}, s32[]) async-start(%z), calls=%wrapped, backend_config={"collective_backend_config":{"is_sync":WRAPPED}}
  %small = f32[1024]{0} copy(%x)
  %going = ((f32[2048]{0}), f32[256]{0}, s32[]) async-update(%begin)
  %end = f32[256]{0} async-done(%going)
  %alone = f32[1024]{0} all-reduce(%x), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add
  %zero = s32[] constant(0)
  %t0 = (s32[], f32[1024]{0}) tuple(%zero, %outer_done)
  %w = (s32[], f32[1024]{0}) while(%t0), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  ROOT %out = f32[1024]{0} get-tuple-element(%w), index=1
}
"""  # noqa: E501 - as XLA prints it

ALL = (tuple(range(8)),)
EIGHT = Cluster(
    "eight",
    1,
    8,
    DeviceKind("toy", Platform.CUDA, {"float32": 1e12}, 1 << 30, 1e11),
    Link(1e-6, 1e10),
    Link(1e-5, 1e9),
)


@pytest.mark.parametrize(("inner", "wrapped"), [*itertools.product([False, True], repeat=2)])
def test_kernels_between_start_and_done_hide_a_collective(inner: bool, wrapped: bool) -> None:
    """The large copy hides all of the first, small ones hide their own seconds of the scatter and, twelve times, in the loop."""
    text = HLO.replace("INNER", str(inner).lower()).replace("WRAPPED", str(wrapped).lower())
    cost = step_seconds(parse_module(text), EIGHT)
    reduced = group_seconds(Collective.ALL_REDUCE, 4096, ALL, EIGHT)
    scattered = group_seconds(Collective.REDUCE_SCATTER, 8192, ALL, EIGHT)
    small = 2 * 4096 / 1e11
    assert small < scattered < reduced < 2 * 4e6 / 1e11
    assert cost.communication_seconds == pytest.approx(14 * reduced + scattered)
    hidden = reduced + (0 if wrapped else small) + (0 if inner else 12 * small)
    assert cost.hidden_seconds == pytest.approx(hidden)
    assert cost.seconds == pytest.approx(cost.compute_seconds + cost.communication_seconds - hidden)
    assert step_seconds(parse_module(text), EIGHT, cost.collectives).hidden_seconds == 0


# --- plans -----------------------------------------------------------------------------------------------------------

H100S, V100S = Cluster.preset("p5.48xlarge"), Cluster.preset("p3.16xlarge")


@functools.cache
def step_of_model(name: str, **demands: object) -> tuple[autopar.Parallelized, tuple[object, object]]:
    """A step that is traced once for all clusters and methods, and its arguments."""
    model = build(name, "bench")
    return autopar.parallelize(model.train_step, **demands), (model.abstract_state(), model.abstract_batch())


@functools.cache
def plan_of(cluster: Cluster, name: str = "gpt", method: str = "data_parallel", **demands: object) -> Plan:
    step, given = step_of_model(name, **demands)
    return step.plan(*given, cluster=cluster, method=method)


def without_hiding(cluster: Cluster) -> Cluster:
    return cluster.replace(device=replace(cluster.device, hides_collectives=False))


HIDING = (("moe", "data_parallel"), ("gpt_scan", "zero3"), ("gpt", "tensor_parallel"))
DEFAULT = ("gpt_scan", "zero3")
"""Others plan the GPT under data parallelism."""
ALL_HIDING = tuple(itertools.product(("gpt", "gpt_scan", "moe"), ("data_parallel", "zero3", "tensor_parallel")))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(*pair, marks=() if pair == DEFAULT else pytest.mark.verify)
        for pair in (*HIDING, *(pair for pair in ALL_HIDING if pair not in HIDING))
    ],
)
def test_some_of_the_communication_is_hidden_where_the_compiler_hides_it(name: str, method: str) -> None:
    said = plan_of(H100S, name, method=method).prediction
    bare = plan_of(without_hiding(H100S), name, method=method).prediction
    assert 0 < said.hidden_seconds <= SURE_SHARE * min(said.communication_seconds, WORK_SHARE * said.compute_seconds)
    assert said.step_seconds == said.unhidden_seconds - said.hidden_seconds
    assert bare == replace(said, hidden_seconds=0.0)


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(V100S, marks=pytest.mark.verify),
        Cluster.preset("p4d.24xlarge"),
        pytest.param(Cluster.preset("tpu-v5e", 2), marks=pytest.mark.verify),
        V100S.replace(device=EIGHT.device),
    ],
)
def test_nothing_is_hidden_where_that_was_not_seen(cluster: Cluster) -> None:
    said = plan_of(cluster).prediction
    assert said.hidden_seconds == 0
    assert said.step_seconds == said.compute_seconds + said.communication_seconds + said.allocation_seconds


@pytest.mark.verify
def test_nothing_is_hidden_on_cpu_and_where_one_kind_of_device_hides_nothing() -> None:
    assert plan_of(Cluster.local(profile=None)).prediction.hidden_seconds == 0
    mixed = Cluster.preset("p5.48xlarge", hosts=2).replace(host_devices={1: without_hiding(H100S).device})
    assert not mixed.hides_collectives
    assert plan_of(mixed).prediction.hidden_seconds == 0


@pytest.mark.verify
def test_nothing_is_hidden_in_a_program_that_saves_memory() -> None:
    """XLA:GPU leaves it in an order of its own (:mod:`autopar.runtime.xla_options`)."""
    assert plan_of(H100S, remat="none").prediction.hidden_seconds > 0
    assert plan_of(H100S, remat="full").prediction.hidden_seconds == 0


def test_a_chain_hides_nothing_and_what_lies_beside_it_does() -> None:
    """Summing up x·w over devices waits for the product, and the next product for the sum; another one need not wait."""

    def chain(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (x @ w) @ w, jnp.zeros((1, 1))

    def beside(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        summed = x @ w
        return summed @ w, v @ v

    square = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)

    def said(function: object) -> Prediction:
        cut = {"x": (None, "data"), "v": ("data", None)}
        step = autopar.parallelize(
            function,  # type: ignore[type-var]
            mesh_shape=(8,),
            constraints={key: jax.sharding.PartitionSpec(*spec) for key, spec in cut.items()},
            state_argnums=(),
            batch_argnums=(),
        )
        return step.plan(square, square, square, cluster=H100S).prediction

    assert said(chain).communication_seconds > 0
    assert said(chain).hidden_seconds == 0
    assert said(beside).hidden_seconds > 0


@pytest.mark.verify
def test_stages_of_a_pipeline_hide_too() -> None:
    model = build("gpt", "bench")
    step = autopar.parallelize(model.train_step, stages=2, num_microbatches=2, method="tensor_parallel")
    given = model.abstract_state(), model.abstract_batch()
    hiding, bare = (step.plan(*given, cluster=one).prediction for one in (H100S, without_hiding(H100S)))
    assert bare.hidden_seconds == 0 < hiding.hidden_seconds
    assert hiding.step_seconds < bare.step_seconds
    assert hiding.step_seconds == hiding.unhidden_seconds == hiding.simulated_seconds


@pytest.mark.verify
def test_an_explanation_says_what_is_hidden() -> None:
    step, given = step_of_model("gpt_scan")
    for cluster, said in ((H100S, True), (V100S, False)):
        found = autopar.explain(step, *given, cluster=cluster, method="zero3")
        assert ("hidden behind work" in str(found)) is said
        assert ("hidden behind work" in found.verdict) is said


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.verify) for name in ("mlp_nnx", "gpt")])
def test_a_mesh_is_chosen_for_what_is_left_unhidden(name: str) -> None:
    model = build(name, "toy")
    given = model.abstract_state(), model.abstract_batch()
    shapes: tuple[tuple[int, ...] | None, ...] = (None, (8,), (2, 4), (4, 2))
    free, *others = (
        autopar.parallelize(model.train_step, method="intra_op", mesh_shape=shape).plan(*given, cluster=H100S)
        for shape in shapes
    )
    assert free.step_seconds <= min(plan.step_seconds for plan in others) * (1 + WORTH_SHARE)
