"""Explanations: their fields agree with the plan and with each other, and what they say is there to be read."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import AutoparError, PlanError
from autopar.explain import Explanation
from autopar.explain.data import LeafKind, spec_text
from autopar.explain.words import seconds_text
from autopar.intra_op import ilp
from autopar.intra_op.model import Model
from autopar.intra_op.resolve import Resolver, forbid
from autopar.intra_op.why import Answer
from autopar.plan import Layout
from autopar.schedule.reshard import shares
from autopar.wording import bytes_text, families, family_name, slashed
from tests.test_profile import profile_of

OPTIMIZER = optax.adam(1e-3)
WIDTH, HIDDEN, LAYERS, BATCH = 512, 2048, 4, 4096
SMALL = {"width": 64, "hidden": 128}


def mlp_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        x = batch["x"]
        for layer in range(LAYERS):
            x = x + jnp.tanh(x @ params[f"layer{layer}"]["up"]) @ params[f"layer{layer}"]["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(state["params"])
    updates, moments = OPTIMIZER.update(gradients, state["moments"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, {"loss": loss}


def mlp_state(width: int = WIDTH, hidden: int = HIDDEN) -> Any:
    key = jax.random.key(0)
    params = {
        f"layer{layer}": {
            "up": 0.1 * jax.random.normal(key, (width, hidden)),
            "down": 0.1 * jax.random.normal(key, (hidden, width)),
        }
        for layer in range(LAYERS)
    }
    return {"params": params, "moments": OPTIMIZER.init(params)}


def mlp_batch(width: int = WIDTH, size: int = BATCH) -> Any:
    return {"x": jnp.ones((size, width)), "y": jnp.zeros((size, width))}


# Behind a switch: over the wires of the preset the best plan is one that experts would write by hand.
V100S = autopar.Cluster.preset("p3.16xlarge").replace(local_wiring=None)


@pytest.fixture(scope="module")
def planned() -> autopar.Parallelized:
    # On one mesh: the search for pipelines has tests of its own, and takes longest.
    return autopar.parallelize(cluster=V100S, stages=1)(mlp_step)


@pytest.fixture(scope="module")
def arguments() -> tuple[Any, Any]:
    return jax.eval_shape(lambda: (mlp_state(), mlp_batch()))


@pytest.fixture(scope="module")
def explained(planned: autopar.Parallelized, arguments: tuple[Any, Any]) -> Explanation:
    return autopar.explain(planned, *arguments)


@pytest.fixture(scope="module")
def zero3(planned: autopar.Parallelized, arguments: tuple[Any, Any]) -> Explanation:
    return autopar.explain(planned, *arguments, method="zero3")


# ------------------------------------------------------------------------------------------------ figures that agree


@pytest.mark.parametrize("which", ["explained", "zero3"])
def test_totals_are_those_of_the_prediction(
    which: str, planned: Any, arguments: Any, request: pytest.FixtureRequest
) -> None:
    e: Explanation = request.getfixturevalue(which)
    plan = planned.plan(*arguments, method=None if which == "explained" else which)
    assert e.time.step_seconds == plan.prediction.step_seconds
    assert e.time.step_seconds == pytest.approx(e.time.compute_seconds + e.time.communication_seconds)
    assert 0 < e.time.update_seconds < e.time.compute_seconds
    assert sum(row.seconds for row in e.operators) == pytest.approx(e.time.compute_seconds)
    updates = [row.seconds for row in e.operators if row.phase == "update"]
    assert sum(updates) == pytest.approx(e.time.update_seconds)
    assert sum(row.flops for row in e.operators) == pytest.approx(plan.prediction.flops)
    for rows in (e.collectives, e.time.communication):
        assert sum(row.seconds for row in rows) == pytest.approx(e.time.communication_seconds)
        assert sum(row.count for row in rows) == sum(use.count for use in plan.prediction.collectives)
        assert sum(row.wire_bytes for row in rows) == pytest.approx(
            sum(use.wire_bytes for use in plan.prediction.collectives)
        )
    assert e.memory.total_bytes == plan.prediction.memory.total_bytes
    assert e.memory.budget_bytes == V100S.per_device_memory_bytes
    assert e.memory.fits


def test_memory_by_kind_starts_from_the_arguments(zero3: Explanation) -> None:
    kinds = dict(zero3.memory.by_kind)
    for kind in (LeafKind.PARAMETER, LeafKind.OPTIMIZER, LeafKind.BATCH):
        assert kinds[kind.value] == sum(leaf.bytes_per_device for leaf in zero3.leaves if leaf.kind is kind)
    assert sum(leaf.bytes_per_device for leaf in zero3.leaves) == pytest.approx(zero3.memory.argument_bytes, rel=1e-3)
    assert len(zero3.memory.largest) >= 3


def test_every_hand_made_method_is_listed_with_the_totals_of_its_plan(
    explained: Explanation, planned: Any, arguments: Any
) -> None:
    assert {row.name for row in explained.methods} == {"data_parallel", "zero2", "zero3", "tensor_parallel"}
    for row in explained.methods:
        plan = planned.plan(*arguments, method=row.name)
        assert row.step_seconds == plan.prediction.step_seconds
        assert row.compute_seconds == plan.prediction.compute_seconds
        assert row.communication_seconds == plan.prediction.communication_seconds
        assert row.memory_bytes == plan.prediction.memory.total_bytes
        assert (row.mesh, row.fits, row.reason) == (str(plan.mesh), True, "")


def test_parameters_hold_what_their_layouts_say(zero3: Explanation, planned: Any, arguments: Any) -> None:
    plan = planned.plan(*arguments, method="zero3")
    assert tuple(leaf.path for leaf in zero3.leaves) == plan.in_paths
    assert tuple(leaf.layout for leaf in zero3.leaves) == plan.in_layouts
    for leaf in zero3.leaves:
        assert leaf.whole_bytes == int(np.prod(leaf.shape)) * 4
        assert leaf.bytes_per_device == leaf.whole_bytes // shares(leaf.layout, plan.mesh)
    by_path = {leaf.path: leaf for leaf in zero3.leaves}
    listed = [path for row in zero3.parameters for path in row.paths]
    state = [leaf.path for leaf in zero3.leaves if leaf.kind in (LeafKind.PARAMETER, LeafKind.OPTIMIZER)]
    assert sorted(listed) == sorted(state)
    for row in zero3.parameters:
        assert row.bytes_per_device == sum(by_path[path].bytes_per_device for path in row.paths)
        assert {by_path[path].sharding for path in row.paths} == {row.sharding}


def test_alike_layers_share_a_row_and_roles_are_told_apart(zero3: Explanation) -> None:
    rows = {row.path: row for row in zero3.parameters}
    up = rows["state['params']['layer0..3']['up']"]
    assert (up.count, up.kind, up.sharding, up.use) == (4, LeafKind.PARAMETER, "P(None, 'data')", "P()")
    assert up.whole_bytes == 4 * WIDTH * HIDDEN * 4 == 8 * up.bytes_per_device
    moment = rows["state['moments'][0].mu['layer0..3']['up']"]
    assert (moment.count, moment.kind) == (4, LeafKind.OPTIMIZER)
    batch = [leaf for leaf in zero3.leaves if leaf.kind is LeafKind.BATCH]
    assert [leaf.sharding for leaf in batch] == ["P('data')", "P('data')"]


# ------------------------------------------------------------------------------------------------------------- whys


def test_runner_up_costs_what_an_independent_solution_costs(planned: Any) -> None:
    # Of arrays that fill a collective each: small ones pay by their bytes in the objective, their set's latency in the price.
    arguments = jax.eval_shape(lambda: (mlp_state(hidden=8 * HIDDEN), mlp_batch()))
    subject, plan, found = planned.records(*arguments)
    positions = [k for k, path in enumerate(plan.in_paths) if "['params']" in path and path.endswith("['up']")]
    (answer,) = planned.runner_ups(subject, found, V100S, [positions])
    assert answer.answer is Answer.COMPARED
    classes = {found.quotient.class_of[found.problem.node_of_value[value]] for value in answer.values}
    other = ilp.solve(forbid(found.model, {number: [found.options[number]] for number in classes}))
    assert other is not None
    chosen = found.model.cost(found.options)
    first = answer.alternatives[0]
    assert first.extra_seconds == pytest.approx(other.cost - chosen, rel=1e-6, abs=1e-6 * chosen)
    assert all(alternative.extra_seconds >= -1e-6 * chosen for alternative in answer.alternatives)
    assert first.layout != plan.in_layouts[positions[0]]
    last = answer.alternatives[-1]
    if last.extra_seconds > 1e-3 * plan.step_seconds:
        # The objective and the price of the lowered program are two models of one plan: near, not equal.
        assert sum(change.seconds for change in last.changes) == pytest.approx(last.extra_seconds, rel=0.2)


def test_what_was_left_out_of_a_large_program_is_not_called_impossible(planned: Any, arguments: Any) -> None:
    subject, plan, found = planned.records(*arguments)
    choices = found.choices.narrowed([np.array([option]) for option in found.options])
    model = Model(choices.node_seconds, choices.edge_seconds)
    alone = dataclasses.replace(found, choices=choices, model=model, options=(0,) * len(found.options))
    kernel = next(k for k, path in enumerate(plan.in_paths) if path.endswith("['up']"))
    for is_narrowed, wanted in ((True, Answer.LEFT_OUT), (False, Answer.ONLY_CHOICE)):
        asked = dataclasses.replace(alone, is_narrowed=is_narrowed)
        (answer,) = planned.runner_ups(subject, asked, V100S, [[kernel]])
        assert answer.answer is wanted


def test_resolver_agrees_with_the_solver_for_every_single_ban(arguments: Any) -> None:
    _, _, found = autopar.parallelize(cluster=V100S, mesh_shape=(2, 4))(mlp_step).records(*arguments)
    asked = [number for number, options in enumerate(found.choices.options) if len(options) > 2][:8]
    resolver = Resolver(found.model, asked, found.model.cost(found.options))
    for number in asked:
        for option in range(2):
            ours = resolver.solve({number: [option]}, time_limit_seconds=30)
            theirs = ilp.solve(forbid(found.model, {number: [option]}))
            assert ours is not None and theirs is not None
            assert ours.options[number] != option
            assert ours.cost == pytest.approx(theirs.cost, rel=1e-5)
            assert found.model.cost(ours.options) == ours.cost


def test_whys_are_sentences_about_the_runner_up(explained: Explanation) -> None:
    heavy = explained.parameters[0]
    assert heavy.runner_ups
    last = heavy.runner_ups[-1]
    assert last.sharding in heavy.why
    if last.extra_seconds > 1e-3 * explained.time.step_seconds:
        assert f"+{seconds_text(last.extra_seconds)} a step" in heavy.why
        assert last.changes[0].what in heavy.why
    else:
        assert heavy.why.startswith("as good: ")


def test_a_pinned_layout_says_that_there_was_no_choice(zero3: Explanation) -> None:
    assert zero3.parameters[0].why == "the only layout that zero3, the constraints and the shape leave"


@pytest.mark.verify
def test_a_plan_that_was_squeezed_says_what_it_would_do_without_a_budget() -> None:
    arguments = jax.eval_shape(lambda: (mlp_state(256, 1024), mlp_batch(256, 32)))
    free = autopar.parallelize(cluster=V100S)(mlp_step).plan(*arguments)
    whole = autopar.parallelize(cluster=V100S)(mlp_step).plan(*arguments, method="data_parallel")
    budget = 0.6 * free.peak_bytes
    squeezed = autopar.parallelize(cluster=V100S, memory_per_device=budget, mesh_shape=(8,))(mlp_step)
    e = autopar.explain(squeezed, *arguments)
    assert e.memory.budget_bytes == budget
    assert e.memory.fits
    assert any("memory budget" in row.why for row in e.parameters)
    row = next(row for row in e.methods if row.name == "data_parallel")
    assert not row.fits and row.reason and row.step_seconds == whole.step_seconds


# ----------------------------------------------------------------------------------------------- what it looks like


def test_text_says_what_an_expert_wants_to_know(explained: Explanation) -> None:
    text = str(explained)
    time = explained.time
    for fact in (
        "mlp_step",
        str(explained.mesh),
        "p3.16xlarge",
        f"{seconds_text(time.step_seconds)} a step predicted",
        bytes_text(explained.memory.budget_bytes),
        "state/params/layer0..3/up",
        "f32[512,2048] ×4",
        "tensor_parallel",
        "dot_general",
        "test_explain.py",
        "proven",  # optimal, or to be within so much of it
    ):
        assert fact in text, fact
    assert "  no rule" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_verdict_names_the_best_rival(explained: Explanation) -> None:
    best = min(explained.methods, key=lambda row: row.step_seconds or np.inf)
    assert f"Best hand-made method: {best.name}" in explained.verdict


def test_notebook_gets_html(explained: Explanation) -> None:
    html = explained._repr_html_()
    assert html.startswith("<pre") and html.endswith("</pre>")
    assert "state/params/layer0..3/up" in html
    assert "\x1b" not in html


def test_colours_stay_out_of_plain_text(explained: Explanation) -> None:
    assert "\x1b" not in str(explained)


# ----------------------------------------------------------------------------------------------------- comparisons


def test_a_plan_does_not_differ_from_itself(explained: Explanation, planned: Any, arguments: Any) -> None:
    again = autopar.explain(planned, *arguments)
    difference = explained.diff(again)
    assert difference.is_empty
    assert "the same layouts" in " ".join(str(difference).split())


def test_two_plans_differ_where_their_layouts_do(explained: Explanation, zero3: Explanation) -> None:
    difference = explained.diff(zero3)
    assert not difference.is_empty
    ours, theirs = ({leaf.path: leaf for leaf in e.leaves} for e in (explained, zero3))
    differing = {
        path
        for path in ours
        if (ours[path].sharding, ours[path].use, ours[path].bytes_per_device)
        != (theirs[path].sharding, theirs[path].use, theirs[path].bytes_per_device)
    }
    assert {path for row in difference.layouts for path in row.paths} == differing
    step = next(row for row in difference.seconds if row.what == "step")
    assert step.difference == pytest.approx(zero3.time.step_seconds - explained.time.step_seconds)
    for row in difference.layouts:
        assert row.second_bytes == sum(theirs[path].bytes_per_device for path in row.paths)
    text = str(difference)
    assert "zero3" in text and "Seconds of a step" in text
    assert difference._repr_html_().startswith("<pre")


# ------------------------------------------------------------------------------------------------- gaps and oddities


def test_operators_without_a_rule_are_named(arguments: Any) -> None:
    def watched(state: Any, batch: Any) -> Any:
        hidden = jnp.fft.rfft(batch["x"], axis=1).real
        ranked = jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(hidden.shape, hidden.dtype), hidden)

        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((batch["x"] @ params["w"] - ranked.sum()) ** 2)

        gradients = jax.grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - g, state, gradients)

    state = {"w": jnp.ones((WIDTH, HIDDEN))}
    e = autopar.explain(autopar.parallelize(cluster=V100S)(watched), state, mlp_batch(size=64))
    named = {row.primitive for row in e.uncovered}
    assert "pure_callback" in named
    row = next(row for row in e.uncovered if row.primitive == "pure_callback")
    assert row.strategy == "whole on every device" and row.repeated_over == e.mesh.axis_names
    assert "no rule" in str(e) and "pure_callback" in str(e)


def test_a_dimension_that_does_not_divide_is_named_with_what_padding_saves() -> None:
    vocabulary = 1021

    def step(state: Any, tokens: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean(params["table"][tokens] ** 2)

        return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss_fn)(state))

    tokens = jnp.zeros((16,), jnp.int32)
    state = {"table": jnp.ones((vocabulary, 3))}
    e = autopar.explain(autopar.parallelize(cluster=V100S)(step), state, tokens)
    (row,) = (row for row in e.undivided if row.dimension == 0)
    assert (row.path, row.extent, row.padded, row.pieces) == ("state['table']", 1021, 1024, 8)
    assert row.saved_bytes == vocabulary * 3 * 4 - 1024 * 3 * 4 // 8
    assert row.saved_seconds >= 0
    assert "padding it to 1024 would save up to" in " ".join(str(e).split())


def test_after_a_run_the_prediction_is_held_against_the_measurement() -> None:
    step = autopar.parallelize(mlp_step, stages=1, mesh_shape=(8,))
    with pytest.raises(AutoparError, match="has not been called yet"):
        autopar.explain(step)
    state, batch = mlp_state(**SMALL), mlp_batch(SMALL["width"], 32)
    for _ in range(3):
        state, _ = step(state, batch)
    e = autopar.explain(step)
    assert step.last is not None
    assert e.measured is not None and e.measured.steps == len(step.last.step_seconds)
    assert e.measured.step_seconds == pytest.approx(float(np.median(step.last.step_seconds)))
    account = step.last.memory_analysis()
    assert e.measured.argument_bytes == account.argument_size_in_bytes
    assert e.measured.temp_bytes == account.temp_size_in_bytes
    text = str(e)
    assert "measured" in text and "XLA's account" in text
    other = autopar.explain(step, method="data_parallel")
    assert other.method == "data_parallel" and other.measured is None
    assert autopar.explain(step, state, batch).measured is None


@functools.cache
def small_step_that_ran() -> autopar.Parallelized:
    step = autopar.parallelize(mlp_step, stages=1, mesh_shape=(8,), cluster=autopar.Cluster.local(profile=None))
    step(mlp_state(**SMALL), mlp_batch(SMALL["width"], 32))
    return step


@pytest.mark.parametrize(
    ("times", "is_told"), [((1.0,), False), ((1.4, 1.4, 9.0), False), ((3.0, 3.2), True), ((0.2,), True)]
)
def test_a_prediction_far_from_the_clock_says_what_would_mend_it(times: tuple[float, ...], is_told: bool) -> None:
    step = small_step_that_ran()
    assert step.last is not None
    step.last.step_seconds[:] = [one * step.last.plan.step_seconds for one in times]
    told = [note for note in autopar.explain(step).notes if "`autopar profile`" in note]
    assert len(told) == is_told
    if is_told:
        assert f"took {np.median(times):.1f} times" in told[0]


def test_where_devices_were_measured_nothing_is_said_of_measuring_them() -> None:
    measured = autopar.Cluster.local(profile=None).with_profile(profile_of(len(jax.devices())))
    step = autopar.parallelize(mlp_step, stages=1, cluster=measured)
    step(mlp_state(**SMALL), mlp_batch(SMALL["width"], 32))
    assert step.last is not None
    step.last.step_seconds[:] = [9 * step.last.plan.step_seconds]
    assert not [note for note in autopar.explain(step).notes if "`autopar profile`" in note]


def test_a_loaded_plan_is_explained_without_runner_ups() -> None:
    small = (mlp_state(**SMALL), mlp_batch(SMALL["width"], 32))
    plan = autopar.parallelize(mlp_step).plan(*small)
    other = autopar.parallelize(mlp_step)
    other.use(plan)
    other(*small)
    e = autopar.explain(other)
    assert all(row.why == "" and not row.runner_ups for row in e.parameters)
    assert any("loaded" in note for note in e.notes)
    assert e.time.step_seconds == plan.step_seconds


def test_a_method_without_a_plan_gives_its_reason(
    planned: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = planned.records_of

    def records_of(subject: Any, *, method: Any = None, **rest: Any) -> Any:
        if method == "zero2":
            raise PlanError("there is no such plan. Nothing helps.")
        return original(subject, method=method, **rest)

    monkeypatch.setattr(planned, "records_of", records_of)
    e = autopar.explain(planned, *arguments)
    row = next(row for row in e.methods if row.name == "zero2")
    assert (row.fits, row.step_seconds, row.reason) == (False, None, "there is no such plan. Nothing helps.")
    assert "no plan: there is no such plan" in str(e)
    assert "zero2" not in e.verdict


def test_an_undecorated_function_is_refused_with_the_remedy() -> None:
    with pytest.raises(AutoparError, match=r"autopar\.parallelize"):
        autopar.explain(mlp_step)  # type: ignore[arg-type]


def test_data_is_frozen(explained: Explanation) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        explained.method = "other"  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------------ names


def test_families_of_names() -> None:
    names = [f"p['layer{k}']['norm{n}']" for k in range(12) for n in (1, 2)]
    assert family_name(names) == "p['layer0..11']['norm1..2']"
    assert family_name(["a0", "a1", "a3", "b"]) == "a0..1,3, b"
    ragged = ["x0.y0", "x0.y1", "x1.y0"]
    assert [name for name, _ in families(ragged)] == ["x0.y0..1", "x1.y0"]
    assert sorted(path for _, members in families(ragged) for path in members) == ragged
    assert family_name([f"name{'x' * k}" for k in range(5)], most=2) == "name, namex and 3 more"


def test_slashed_names_are_those_of_constraints() -> None:
    assert slashed("state.params['layer0..3']['up']") == "state/params/layer0..3/up"
    assert slashed("state.opt_state[1][0].mu['a']") == "state/opt_state/1/0/mu/a"


def test_layouts_read_like_partition_specs() -> None:
    assert spec_text(Layout(((), ()))) == "P()"
    assert spec_text(Layout(((), ("data",), ()))) == "P(None, 'data')"
    assert spec_text(Layout((("data", "model"), ()))) == "P(('data', 'model'))"
    assert spec_text(Layout(((),), ("data",))) == "P() + Σ over data"


def test_figures_have_three_digits() -> None:
    assert [seconds_text(s) for s in (12.34, 0.0342, 3.2e-3, 854e-6, 0.0)] == [
        "12.3 s",
        "34.2 ms",
        "3.20 ms",
        "854 µs",
        "0",
    ]
    assert [bytes_text(b) for b in (17, 2048, 5.5 * 2**30)] == ["17 B", "2.00 KiB", "5.50 GiB"]
