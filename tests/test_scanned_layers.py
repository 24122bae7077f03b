"""Loops over layers cut between trips: the numbers of the step as it was written, in pieces and in stages.

Of those in stages the default run has one whose layers compute again, in :mod:`tests.test_remat_loops`.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import _compat
from autopar.errors import PlanError, TraceError
from autopar.graph.build import build_graph
from autopar.graph.roles import Role, Roles, infer_roles
from autopar.graph.tracing import TracedProgram, trace
from autopar.inter_op.looped import with_open_branches
from autopar.inter_op.opened import Opened, ends_of, opened, opened_roles
from autopar.inter_op.stacks import layer_loops, stacks_of
from autopar.plan import Plan
from autopar.runtime.pieced_array import PiecedArray
from autopar.runtime.replicas import Replicas
from benchmarks.models import build
from tests.ray_cases import value
from tests.scanned_cases import OPTIMIZERS, Scanned, batch_of
from tests.test_correctness import wrong_leaves
from tests.toy_runs import eight_slow_devices, precision
from tests.toy_runs import run as run_model


def assert_same(left: Any, right: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(value(ours), value(theirs), rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------------------------ the rewriting


def rewritten(model: Scanned, pieces: int) -> tuple[TracedProgram, Roles, TracedProgram, Opened]:
    program = trace(model.train_step, (jax.eval_shape(model.make_state), batch_of(0)), {})
    roles = infer_roles(program)
    program = with_open_branches(program)
    graph = build_graph(program.jaxpr, platform="cpu")
    loops = layer_loops(graph, roles.leaves(Role.BATCH), roles.leaves(Role.KEY))
    stacks = stacks_of(graph, roles.state_pairs, [loop.id for loop in loops])
    return program, roles, *opened(program, graph, stacks, pieces, roles)


def scans_of(program: TracedProgram) -> list[int]:
    return [one.params["length"] for one in _compat.jaxpr_of(program.jaxpr).eqns if one.primitive.name == "scan"]


ROWS = list(product([Scanned(*row) for row in product((2, 5), OPTIMIZERS, (False, True))], (2, 3)))
DEFAULT = ((Scanned(5, "adamw", is_remat=True), 2), (Scanned(5, "adafactor"), 3))


@pytest.mark.parametrize(
    ("model", "pieces"),
    [pytest.param(*one, marks=() if one in DEFAULT else pytest.mark.verify) for one in ROWS],
    ids=str,
)
def test_the_rewritten_step_computes_the_same(model: Scanned, pieces: int) -> None:
    with jax.enable_x64(True):
        program, roles, made, leaves = rewritten(model, pieces)
        ends = ends_of(model.layers, pieces)
        lengths = [end - begin for begin, end in pairwise((0, *ends))]
        assert scans_of(made) == [*lengths, *lengths[::-1]]
        assert "concatenate" not in {one.primitive.name for one in _compat.jaxpr_of(made.jaxpr).eqns}
        for path, aval, pieces_of in zip(program.in_paths, program.in_avals, leaves.inputs, strict=True):
            assert (pieces_of is not None) == ("layers" in path and model.layers in aval.shape), path
        state = jax.jit(model.make_state)()
        run = jax.jit(partial(jax.core.eval_jaxpr, _compat.jaxpr_of(made.jaxpr), _compat.consts_of(made.jaxpr)))
        given: list[Any] = []
        for leaf, pieces_of in zip(jax.tree.leaves((state, batch_of(0))), leaves.inputs, strict=True):
            spans = [] if pieces_of is None else pieces_of.ranges
            given += [jax.lax.slice_in_dim(leaf, *span, axis=pieces_of.dim) for span in spans] or [leaf]
        assert [one.shape for one in given] == [aval.shape for aval in made.in_avals]
        assert opened_roles(roles, leaves).batch_size == roles.batch_size
        found = run(*given)
        together = [
            found[places[0]] if pieces_of is None else jnp.concatenate([found[k] for k in places], pieces_of.dim)
            for pieces_of, places in zip(leaves.outputs, leaves.output_positions(), strict=True)
        ]
        assert_same(together, jax.jit(model.train_step)(state, batch_of(0)))


def test_a_loop_over_time_is_left_alone() -> None:
    """Its rows are those of the batch, though a leaf of the parameters has as many."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            rows = jnp.swapaxes(batch["x"], 0, 1) + params["position"][:, None]
            last, _ = jax.lax.scan(lambda x, row: (jnp.tanh(x @ params["w"] + row), None), rows[0], rows)
            return jnp.mean(last**2)

        return jax.tree.map(lambda one, gradient: one - gradient, params, jax.grad(loss)(params))

    params = {"position": jnp.ones((5, 4)), "w": jnp.ones((4, 4))}
    program = trace(step, (params, {"x": np.ones((3, 5, 4), np.float32)}), {})
    roles = infer_roles(program)
    graph = build_graph(program.jaxpr, platform="cpu")
    assert "scan" in {operator.primitive for operator in graph.operators}
    assert layer_loops(graph, roles.leaves(Role.BATCH), roles.leaves(Role.KEY)) == ()


# ----------------------------------------------------------------------------------------------------------- in stages


def pipeline(model: Scanned, stages: Any = 2, **options: Any) -> Any:
    fixed = {"mesh_shape": (8 // stages,)} if isinstance(stages, int) and 8 % stages == 0 else {}
    asked = {"num_microbatches": 2, **fixed, **options}
    return autopar.parallelize(model.train_step, stages=stages, cluster=eight_slow_devices(), **asked)


SHARED = Scanned(5)
THREE = [[0, 1], [2, 3], [4, 5]]
INTERLEAVED = {"stages": 4, "stages_per_mesh": 2, "mesh_shape": (4,)}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(SHARED, {"stages": THREE, "schedule": "gpipe"}, id="three", marks=pytest.mark.verify),
        pytest.param(Scanned(5, is_remat=True), INTERLEAVED, id="interleaved", marks=pytest.mark.verify),
        pytest.param(Scanned(4, "lamb"), {"schedule": "1f1b"}, id="lamb", marks=pytest.mark.verify),
        pytest.param(Scanned(4, "adafactor"), {"schedule": "zb_h1"}, id="adafactor", marks=pytest.mark.verify),
        pytest.param(Scanned(4, "multi_steps"), {"stages": 4}, id="branches", marks=pytest.mark.verify),
        pytest.param(SHARED, {"mesh_shape": None}, id="free", marks=pytest.mark.verify),
        pytest.param(SHARED, {"method": "zero3"}, id="zero3", marks=pytest.mark.verify),
        pytest.param(SHARED, {"rng": "per_microbatch", "num_microbatches": 1}, id="whole", marks=pytest.mark.verify),
    ],
)
def test_stages_share_a_loop(model: Scanned, options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        step = pipeline(model, **options)
        state, expected = step.init(model.make_state, batch_of(0)), jax.jit(model.make_state)()
        assert_same(state, expected)
        for number in range(3):
            state, said = step(state, batch_of(number))
            expected, wanted = jax.jit(model.train_step)(expected, batch_of(number))
            assert_same((state, said), (expected, wanted))
    down = state["params"]["layers"]["down"]
    assert isinstance(down, PiecedArray)
    meshes = {tuple(sorted(device.id for device in piece.devices())) for piece in down.pieces}
    assert meshes == {tuple(sorted(stage.devices)) for stage in step.last.plan.stages}


@pytest.mark.verify
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_scanned_gpt(schedule: str) -> None:
    with precision(jnp.float64):
        model = build("gpt_scan", dtype=jnp.float64)
        asked = {"stages": 2, "mesh_shape": (4,), "schedule": schedule, "num_microbatches": 4}
        step = autopar.parallelize(model.train_step, cluster=eight_slow_devices(), **asked)
        ours = run_model(model, step, step.init(model.make_state, model.abstract_batch()), 5)
        theirs = run_model(model, jax.jit(model.train_step), jax.jit(model.make_state)(), 5)
    assert wrong_leaves(theirs.state, ours.state) == {}
    assert [wrong_leaves(a, b) for a, b in zip(theirs.metrics, ours.metrics, strict=True)] == [{}] * 5


def test_a_stack_on_several_meshes_is_one_leaf(tmp_path: Path) -> None:
    """Its looks, donation, and checkpoints, which plain orbax reads too."""
    model = SHARED
    with jax.enable_x64(True):
        step = pipeline(model, method="zero3")
        state = step.init(model.make_state, batch_of(0))
        down = state["params"]["layers"]["down"]
        assert isinstance(down, autopar.DistributedArray)
        assert (down.shape, down.dtype, down.ndim, len(down)) == ((5, 32, 16), np.float64, 3, 5)
        assert {tuple(one.spec) for one in down.shardings} == {(None, "data")}
        places = "[0:2] on devices 0, 1, 2, 3; [2:5] on devices 4, 5, 6, 7"
        assert repr(down) == f"DistributedArray(float64[5,32,16], {places})"
        after, _ = step(state, batch_of(0))
        assert down.is_deleted()
        with pytest.raises(TraceError, match="Pass on the state"):
            np.asarray(down)
        with pytest.raises(TraceError, match="was deleted"):
            step(state, batch_of(0))

        at_one = jax.tree.map(value, after)
        checkpoints = autopar.Checkpoints(tmp_path / "ours")
        checkpoints.save(1, after)
        expected = jax.tree.map(value, step(after, batch_of(1))[0])  # takes the memory of what is being saved over
        checkpoints.close()
        shapes = jax.eval_shape(model.make_state)
        kept = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        plain = ocp.CheckpointManager(tmp_path / "ours").restore(1, args=kept)["state"]
        assert jax.tree.all(jax.tree.map(np.array_equal, jax.tree.map(value, plain), at_one))
        found = autopar.Checkpoints(tmp_path / "ours").restore(step, model.make_state, batch_of(0))
        assert found is not None
        assert repr(found.state["params"]["layers"]["down"]) == repr(after["params"]["layers"]["down"]).replace(
            ", deleted", ""
        )
        assert jax.tree.all(jax.tree.map(np.array_equal, jax.tree.map(value, found.state), at_one))
        assert_same(step(found.state, batch_of(1))[0], expected)


@pytest.mark.verify
def test_a_stack_comes_and_goes(tmp_path: Path) -> None:
    """By checkpoints from and onto other plans, by the plan's file, and from step to step."""
    model = SHARED
    with jax.enable_x64(True):
        step = pipeline(model, method="zero3")
        state, _ = step(step.init(model.make_state, batch_of(0)), batch_of(0))
        step.last.plan.save(tmp_path / "plan.json")
        at_one = jax.tree.map(value, state)
        expected, _ = jax.jit(model.train_step)(jax.tree.map(jnp.asarray, state), batch_of(1))
        with ocp.CheckpointManager(tmp_path / "theirs") as theirs:
            kept, run = jax.tree.map(jnp.asarray, state), ocp.args.JsonSave({"step": 1, "data": {}})
            theirs.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave(kept), run=run))
        checkpoints = autopar.Checkpoints(tmp_path / "ours")
        checkpoints.save(1, state)
        checkpoints.close()
        other = autopar.parallelize(model.train_step, method="zero3", cluster=eight_slow_devices())
        for directory, onto in (("ours", other), ("theirs", step)):
            found = autopar.Checkpoints(tmp_path / directory).restore(onto, model.make_state, batch_of(0))
            assert found is not None
            assert jax.tree.all(jax.tree.map(np.array_equal, jax.tree.map(value, found.state), at_one))
            assert_same(onto(found.state, batch_of(1))[0], expected)
        again = autopar.parallelize(model.train_step, cluster=eight_slow_devices())
        again.use(Plan.load(tmp_path / "plan.json"))
        state, _ = again(again.init(model.make_state, batch_of(0)), batch_of(0))
        assert_same(state, at_one)
        assert_same(other(state, batch_of(1))[0], expected)  # a stack in pieces onto one mesh


@pytest.mark.verify
def test_a_step_like_it_moves_nothing() -> None:
    with jax.enable_x64(True):
        step = pipeline(SHARED)
        state, _ = step(step.init(SHARED.make_state, batch_of(0)), batch_of(0))
        here = jax.tree.map(jnp.asarray, state)

        def evaluate(state: Any, batch: Any) -> Any:
            return {"loss": SHARED.loss(state["params"], batch, state["key"])}

        like = autopar.parallelize(evaluate, like=step, cluster=eight_slow_devices())
        assert_same(like(state, batch_of(1)), jax.jit(evaluate)(here, batch_of(1)))
        assert like.last.plan.opening == step.last.plan.opening
        there = dict(zip(step.last.plan.in_paths, step.last.plan.in_layouts, strict=True))
        here = dict(zip(like.last.plan.in_paths, like.last.plan.in_layouts, strict=True))
        assert here.keys() - there.keys() == set()
        read = [path for path in here if path.startswith("state['params']")]  # others lie nowhere in its plan
        assert len(read) == 7 and [here[path] for path in read] == [there[path] for path in read]


def test_constraints_speak_of_whole_leaves_and_plans_of_their_pieces() -> None:
    step = pipeline(SHARED, constraints={"**/layers/down": P(None, "data")})
    plan = step.plan(jax.eval_shape(SHARED.make_state), batch_of(0))
    said = dict(zip(plan.in_paths, plan.in_layouts, strict=True))
    pieces = {
        path: str(layout) for path, layout in said.items() if path.startswith("state['params']['layers']['down']")
    }
    assert pieces == {f"state['params']['layers']['down'][{rows}]": "[·, data, ·]" for rows in ("0:2", "2:5")}
    assert "state['params']['layers']['up'][:, 0:2]" in said
    assert plan.opening.pieces == 2 and len(plan.opening.leaves) == 9


def test_too_many_stages_and_files_that_make_no_sense(tmp_path: Path) -> None:
    step = pipeline(SHARED)
    plan = step.plan(jax.eval_shape(SHARED.make_state), batch_of(0))
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    for opening, message in (
        ({"pieces": 1, "leaves": [[0, 0, 5]]}, "no loop is"),
        ({"pieces": 2, "leaves": [[1, 0, 5], [1, 0, 5]]}, "do not ascend"),
        ({"pieces": 0, "leaves": []}, "Expected `int` >= 1"),
    ):
        content["plan"]["opening"] = opening
        (tmp_path / "odd.json").write_text(json.dumps(content))
        with pytest.raises(PlanError, match=message):
            Plan.load(tmp_path / "odd.json")
    content["plan"]["opening"] = {"pieces": 3, "leaves": [list(one) for one in plan.opening.leaves]}
    (tmp_path / "other.json").write_text(json.dumps(content))
    step.use(Plan.load(tmp_path / "other.json"))
    with pytest.raises(PlanError, match="otherwise than they can be cut here"):
        step.init(SHARED.make_state, batch_of(0))
    with pytest.raises(PlanError, match="8 stages; ask for fewer stages"):
        pipeline(Scanned(2), 8, mesh_shape=(1,)).plan(jax.eval_shape(Scanned(2).make_state), batch_of(0))


@pytest.mark.verify
def test_on_ray(cluster: autopar.Cluster, tmp_path: Path) -> None:
    with jax.enable_x64(True):
        step = autopar.parallelize(SHARED.train_step, cluster=cluster, stages=2, num_microbatches=2)
        state, expected = step.init(SHARED.make_state, batch_of(0)), jax.jit(SHARED.make_state)()
        assert_same(state, expected)
        for number in range(2):
            state, _ = step(state, batch_of(number))
            expected, _ = jax.jit(SHARED.train_step)(expected, batch_of(number))
        down = state["params"]["layers"]["down"]
        assert isinstance(down, PiecedArray) and len({piece.where.devices for piece in down.pieces}) == 2
        assert "devices 0" in repr(down)
        assert_same(state, expected)
        replicas, remote = Replicas(), step.last.executor
        for step_number in (1, 2):  # which waits for the copies before it
            replicas.keep(step_number, state)
        rescued = replicas.rescue()
        assert rescued is not None
        assert_same(replicas.restore(rescued, remote.worlds, remote.fleet.numbers), expected)
        checkpoints = autopar.Checkpoints(tmp_path)
        checkpoints.save(2, state)
        after = jax.tree.map(value, step(state, batch_of(2))[0])
        assert down.is_deleted()
        checkpoints.close()
        plain = ocp.CheckpointManager(tmp_path).restore(
            2, args=ocp.args.Composite(state=ocp.args.StandardRestore(jax.eval_shape(SHARED.make_state)))
        )["state"]
        assert_same(plain, expected)
        for onto in (step, pipeline(SHARED)):
            found = autopar.Checkpoints(tmp_path).restore(onto, SHARED.make_state, batch_of(0))
            assert found is not None
            assert_same(onto(found.state, batch_of(2))[0], after)
