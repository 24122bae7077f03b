"""What goes wrong, and is it said?

Each row of the table is one misuse: what is done with a fresh step, the exception that must come, and what its message
must say (what was wrong, where, what to do).  Exceptions that are the user's own, or JAX's about the user's own line, pass
unchanged.  After each the same step, called rightly with the same state, must give the right numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import autopar
from autopar import AutoparError, Cluster, ClusterError, Plan, PlanError, TraceError
from autopar.errors import BudgetError
from autopar.methods import TensorParallel
from autopar.parallelized import Parallelized
from autopar.profile_file import load_profile

Tree = dict[str, Any]


def make_state() -> Tree:
    return {"w": jnp.arange(16.0).reshape(16, 1) / 16, "n": jnp.int32(0)}


def make_batch(size: int = 16) -> Tree:
    return {"x": np.ones((size, 16), np.float32), "y": np.ones((size, 1), np.float32)}


def train_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * gradient, "n": state["n"] + 1}, {"loss": loss}


def with_mode(state: Tree, batch: Tree, mode: Any = "plain") -> tuple[Tree, Tree]:
    return train_step(state, batch)


def parallel(function: Callable[..., Any] = train_step, **options: Any) -> Parallelized:
    return autopar.parallelize(**{"method": "data_parallel", **options})(function)


def planned(**options: Any) -> Callable[[Parallelized, Tree], Any]:
    """Make a step with these options and plan it."""
    return lambda run, state: parallel(**options).plan(state, make_batch())


def free(**options: Any) -> Callable[[Parallelized, Tree], Any]:
    """The same for the integer program, on a mesh of 2 × 4."""
    return planned(method="auto", mesh_shape=(2, 4), **options)


def called(batch: Any) -> Callable[[Parallelized, Tree], Any]:
    return lambda run, state: run(state, batch)


def stepping(function: Callable[[Tree, Tree], Any]) -> Callable[[Parallelized, Tree], Any]:
    """Make a step of this function and call it."""
    return lambda run, state: parallel(function)(state, make_batch())


def used(change: Callable[[Plan], Any]) -> Callable[[Parallelized, Tree], Any]:
    """Change the step's plan, let another step use it, and call that."""

    def act(run: Parallelized, state: Tree) -> Any:
        other = parallel()
        other.use(change(run.plan(state, make_batch())))
        return other(state, make_batch())

    return act


class UserError(Exception):
    """Raised by a user's own code."""


def raising(*_: Any) -> Any:
    raise UserError("mine")


def leaking(run: Parallelized, state: Tree) -> None:
    leaked: list[Any] = []
    parallel(lambda s, b: (leaked.append(s["w"]), train_step(s, b))[1])(state, make_batch())
    parallel(lambda s, b: (s, {"sum": leaked[0].sum() + b["x"].sum()}))(state, make_batch())


def reused(run: Parallelized, _: Tree) -> None:
    state = run.init(make_state, make_batch())
    run(state, make_batch())
    run(state, make_batch())


def half_reused(run: Parallelized, _: Tree) -> None:
    old = run.init(make_state, make_batch())
    new, _ = run(old, make_batch())
    run({**new, "n": old["n"]}, make_batch())


def in_place(run: Parallelized, _: Tree) -> None:
    def step(model: nnx.Linear, batch: Tree) -> jax.Array:
        model.kernel[...] = model.kernel[...] * 2
        return jnp.sum(model(batch["x"]))

    parallel(step)(nnx.Linear(16, 1, rngs=nnx.Rngs(0)), make_batch())


def lost_leaf(run: Parallelized, state: Tree) -> None:
    new, _ = run(dict(state), make_batch())
    run({"w": new["w"]}, make_batch())


def strange_leaf(run: Parallelized, state: Tree) -> None:
    new, _ = run(dict(state), make_batch())
    run({**new, "z": jnp.ones(3)}, make_batch())


NO_ARRAY = r"which is no array that JAX knows\. If it is an option rather than data, say static_argnames='batch'"
NO_NUMBER = r"is no number of bytes; give a number greater than 0"
NO_SECONDS = r"is no number of seconds; give a number greater than 0"
NO_CLUSTER = r"is no cluster; pass a Cluster, for example autopar\.Cluster\.local\(\)"
NO_METHOD = r"is no method; give one of the names auto, data_parallel, .*, or an object of autopar\.methods"
NO_COUNT = r"is no number of microbatches; give an integer of 1 or more"
NO_SHAPE = r"does not fit local cpu: give one to three sizes whose product is 8, the number of its devices"
NOT_CALLED = r"train_step cannot be called with these arguments: "
INSIDE = r"train_step is a whole program over a cluster and cannot run inside jit, grad or vmap \(.* is a tracer\)"

Row = tuple[Callable[[Parallelized, Tree], Any], type[Exception], str]

MISUSES: dict[str, Row] = {
    # --- what is passed
    "two batch leaves disagree": (
        called({**make_batch(), "y": np.ones((8, 1))}),
        TypeError,
        r"incompatible shapes.*\(8, 1\)",
    ),
    "rows of the wrong width": (called({**make_batch(), "x": np.ones((16, 8))}), TypeError, r"contracting dimensions"),
    "a batch leaf that the step does not use": (
        lambda run, state: parallel(lambda s, b: train_step(s, b))(state, {**make_batch(), "z": np.ones((3, 5))}),
        TraceError,
        r"Which inputs hold the batch\? .*b\['z'\]: float32\[3,5\].*Say batch_argnums=",
    ),
    "a string leaf": (
        called({**make_batch(), "name": "a"}),
        TraceError,
        rf"batch\['name'\] is of type str, {NO_ARRAY}",
    ),
    "an object leaf": (
        called({**make_batch(), "o": object()}),
        TraceError,
        rf"batch\['o'\] is of type object, {NO_ARRAY}",
    ),
    "an array of objects": (
        called({**make_batch(), "o": np.array([None])}),
        TraceError,
        rf"batch\['o'\] is of type ndarray of object, {NO_ARRAY}",
    ),
    "an array of strings": (called({**make_batch(), "o": np.array(["a"])}), TraceError, rf"ndarray of <U1, {NO_ARRAY}"),
    "a string as the batch": (called("batch"), TraceError, rf"batch is of type str, {NO_ARRAY}"),
    "a function as the batch": (called(train_step), TraceError, rf"batch is of type function, {NO_ARRAY}"),
    "None as the batch": (called(None), TypeError, "'NoneType' object is not subscriptable"),
    "shapes in a call": (
        called(jax.eval_shape(make_batch)),
        TraceError,
        r"batch\['x'\] is a shape without values; a call wants arrays\. The methods plan and compile",
    ),
    "too few arguments": (
        lambda run, state: run(state),
        TraceError,
        rf"{NOT_CALLED}missing a required argument: 'batch'",
    ),
    "too many arguments": (
        lambda run, state: run(state, make_batch(), 1),
        TraceError,
        f"{NOT_CALLED}too many positional",
    ),
    "an unknown keyword": (
        lambda run, state: run(state, make_batch(), z=1),
        TraceError,
        f"{NOT_CALLED}.*unexpected.*'z'",
    ),
    "an argument twice": (
        lambda run, state: run(state, make_batch(), batch=1),
        TraceError,
        f"{NOT_CALLED}.*multiple.*'batch'",
    ),
    "state that was donated": (
        reused,
        TraceError,
        r"state\['n'\] was deleted: an earlier call took .*donate_argnums=\(\)",
    ),
    "half the state was donated": (
        half_reused,
        TraceError,
        r"state\['n'\] was deleted: .*Pass on the state that the step",
    ),
    "a leaf of state is missing": (lost_leaf, KeyError, "'n'"),
    "a leaf of state too many": (
        strange_leaf,
        TraceError,
        r"Which inputs hold the batch\? .*state\['z'\]: float32\[3\]",
    ),
    # --- static arguments
    "an unhashable static": (
        lambda run, state: parallel(with_mode, static_argnames="mode")(state, make_batch(), ["a"]),
        TraceError,
        r"static argument 'mode' is of type list, which cannot be hashed.*Pass something hashable",
    ),
    "an array as static": (
        lambda run, state: parallel(with_mode, static_argnames="mode")(state, make_batch(), mode=jnp.ones(3)),
        TraceError,
        r"static argument 'mode' .* cannot be hashed",
    ),
    "an unknown static name": (
        planned(static_argnames="mode"),
        TraceError,
        r"static_argnames='mode' names no argument of train_step, which has state, batch",
    ),
    "a static number too high": (
        planned(static_argnums=2),
        TraceError,
        r"static_argnums=2 names no argument of train_step",
    ),
    "a static number that is none": (
        planned(static_argnums=1.5),
        TraceError,
        r"1\.5 names no argument; give positions",
    ),
    "a static name that is none": (
        planned(static_argnames=[3]),
        TraceError,
        r"3 names no argument; give names \(strings\)",
    ),
    "an unknown batch number": (
        planned(batch_argnums=9),
        TraceError,
        r"batch_argnums names 9, but the arguments are state, batch",
    ),
    "an unknown state name": (
        planned(state_argnums="stat"),
        TraceError,
        r"state_argnums names 'stat', but the arguments are",
    ),
    "a batch number that is none": (
        planned(batch_argnums=1.5),
        TraceError,
        r"1\.5 names no argument; give positions or names",
    ),
    "state that does not come back": (
        planned(state_argnums=1),
        TraceError,
        r"do not come back with the same shapes: batch",
    ),
    # --- options
    "an unknown option": (planned(metod="auto"), TypeError, r"unknown options \['metod'\]; known are"),
    "a mesh larger than the devices": (planned(mesh_shape=(4, 4)), PlanError, rf"mesh_shape=\(4, 4\) {NO_SHAPE}"),
    "a mesh that does not multiply out": (planned(mesh_shape=(3, 2)), PlanError, rf"mesh_shape=\(3, 2\) {NO_SHAPE}"),
    "a mesh of text": (planned(mesh_shape="24"), PlanError, r"mesh_shape='24' is no tuple of integers"),
    "a mesh that the method cannot use": (
        planned(mesh_shape=(2, 4)),
        PlanError,
        r"'data_parallel' cannot use mesh_shape",
    ),
    "microbatches that do not divide": (planned(num_microbatches=3), PlanError, r"=3 does not divide the batch of 16"),
    "more microbatches than rows": (planned(num_microbatches=32), PlanError, r"=32 does not divide the batch of 16"),
    "no microbatches": (planned(num_microbatches=0), PlanError, f"num_microbatches=0 {NO_COUNT}"),
    "half a microbatch": (planned(num_microbatches=1.5), PlanError, rf"num_microbatches=1\.5 {NO_COUNT}"),
    "negative memory": (planned(memory_per_device=-1.0), PlanError, rf"memory_per_device=-1\.0 {NO_NUMBER}"),
    "no memory": (planned(memory_per_device=0), PlanError, f"memory_per_device=0 {NO_NUMBER}"),
    "memory that is no number": (planned(memory_per_device=math.nan), PlanError, f"memory_per_device=nan {NO_NUMBER}"),
    "memory in words": (planned(memory_per_device="1 GB"), PlanError, f"memory_per_device='1 GB' {NO_NUMBER}"),
    "tiny memory": (
        planned(memory_per_device=100),
        BudgetError,
        r"no plan keeps 100 B .*three largest tenants are .*Use more",
    ),
    "an unknown method": (
        planned(method="zero9"),
        PlanError,
        r"method='zero9' is unknown; the names are auto, data_parallel",
    ),
    "a number as method": (planned(method=3), PlanError, f"method=3 {NO_METHOD}"),
    "a class as method": (planned(method=TensorParallel), PlanError, f"method=<class .*TensorParallel'> {NO_METHOD}"),
    "a list as method": (planned(method=["auto"]), PlanError, rf"method=\['auto'\] {NO_METHOD}"),
    "a wrong method in plan()": (
        lambda run, state: run.plan(state, make_batch(), method=3),
        PlanError,
        f"method=3 {NO_METHOD}",
    ),
    "no time for the solver": (planned(solver_seconds=0), PlanError, f"solver_seconds=0 {NO_SECONDS}"),
    "negative time for the solver": (planned(solver_seconds=-1.0), PlanError, rf"solver_seconds=-1\.0 {NO_SECONDS}"),
    "time that is no number": (planned(solver_seconds=math.nan), PlanError, f"solver_seconds=nan {NO_SECONDS}"),
    "a name as cluster": (planned(cluster="local"), ClusterError, f"cluster='local' {NO_CLUSTER}"),
    "devices as cluster": (planned(cluster=jax.devices()), ClusterError, NO_CLUSTER),
    "a number as cluster in plan()": (
        lambda run, state: run.plan(state, make_batch(), cluster=8),  # type: ignore[arg-type]
        ClusterError,
        f"cluster=8 {NO_CLUSTER}",
    ),
    "a cluster with more devices than here": (
        lambda run, state: parallel(cluster=Cluster.preset("p4d.24xlarge", hosts=2))(state, make_batch()),
        ClusterError,
        r"for 16 devices \(data=16\) but this process has 8; plan for this cluster, or on CPU set jax_num_cpu_devices=16",
    ),
    "donating by number": (planned(donate_argnums=(0,)), PlanError, r'donate_argnums is "auto" .* or \(\)'),
    "unknown user_shardings": (
        planned(user_shardings="maybe"),
        PlanError,
        r"'maybe' is unknown; say \"respect\" or \"ignore\"",
    ),
    "no function": (
        lambda run, state: autopar.parallelize(3),
        TraceError,
        r"takes a function, not 3; options go by name",
    ),
    # --- constraints
    "a path that is not there": (
        free(constraints={"**/v": P("data")}),
        PlanError,
        r"'\*\*/v' matches no argument leaf; .*state/",
    ),
    "an unknown axis": (
        free(constraints={"**/w": P("rows")}),
        PlanError,
        r"name the mesh axes \['rows'\], but .*'data', 'model'",
    ),
    "an axis twice": (free(constraints={"**/w": P("data", "data")}), PlanError, r"names the mesh axis 'data' twice"),
    "more entries than dimensions": (
        free(constraints={"**/n": P("data")}),
        PlanError,
        r"has more entries than state\['n'\] has dimensions \(0\)",
    ),
    "an axis that does not divide": (
        free(constraints={"**/w": P(None, "model")}),
        PlanError,
        r"state\['w'\] cannot be met: shape \(16, 1\) does not divide over mesh",
    ),
    "a layout in words": (
        free(constraints={"**/w": "model"}),
        PlanError,
        r"'\*\*/w': 'model' is no layout; write a jax\.",
    ),
    "None as layout": (free(constraints={"**/w": None}), PlanError, r"None is no layout"),
    "a pattern that is no text": (
        free(constraints={3: P()}),
        PlanError,
        r"constraint 3 is no path pattern; write a string",
    ),
    "an axis by number": (
        free(constraints={"**/w": P(1)}),
        PlanError,
        r"1 in .* names no mesh axis; an entry is None, a name",
    ),
    "an unconstrained dimension": (free(constraints={"**/w": P(P.UNCONSTRAINED)}), PlanError, r"names no mesh axis"),
    "a partial sum as layout": (free(constraints={"**/w": P(unreduced={"data"})}), PlanError, r"demands a partial sum"),
    "constraints as a list": (
        free(constraints=[("**/w", P())]),
        PlanError,
        r"is no mapping; write path patterns and layouts",
    ),
    # --- clusters
    "an unknown preset": (lambda run, state: Cluster.preset("p9"), ClusterError, r"no preset 'p9'.*p4d\.24xlarge"),
    "a preset of no hosts": (
        lambda run, state: Cluster.preset("p4d.24xlarge", hosts=0),
        ClusterError,
        r"hosts .* is 0; give an integer",
    ),
    "half a host": (
        lambda run, state: Cluster.preset("p4d.24xlarge", hosts=1.5),
        ClusterError,
        r"hosts .* is 1\.5; give",
    ),  # type: ignore[arg-type]
    # --- plans
    "a path as plan": (
        lambda run, state: run.use("plan.json"),
        PlanError,
        r"takes a Plan, not 'plan\.json'; read .*Plan\.load",
    ),  # type: ignore[arg-type]
    "None as plan": (lambda run, state: run.use(None), PlanError, r"takes a Plan, not None"),  # type: ignore[arg-type]
    "a plan of another model": (
        lambda run, state: used(lambda plan: parallel(lambda s, b: (s, b["x"].sum())).plan(state, make_batch()))(
            run, state
        ),
        PlanError,
        r"made for another program .*; plan again for this one",
    ),
    "a plan of another jax": (
        used(lambda plan: dataclasses.replace(plan, jax_version="0.0.1")),
        PlanError,
        r"made with jax 0\.0\.1 and this is jax",
    ),
    "a plan for other devices": (
        lambda run, state: used(
            lambda plan: run.plan(state, make_batch(), cluster=Cluster.preset("p4d.24xlarge", hosts=2))
        )(run, state),
        PlanError,
        r"for 16 devices of p4d\.24xlarge, local cpu has 8; plan again",
    ),
    "explaining before a call": (
        lambda run, state: autopar.explain(run),
        AutoparError,
        r"has not been called yet; call it first",
    ),
    "explaining a plain function": (
        lambda run, state: autopar.explain(train_step),
        AutoparError,
        r"wants a function made by",
    ),
    # --- init
    "an initialiser with arguments": (
        lambda run, state: run.init(lambda key: make_state(), make_batch()),  # type: ignore[arg-type,misc]
        TraceError,
        r"called without arguments, and missing a required argument: 'key'; bind them first: functools\.partial",
    ),
    "an initialiser that makes everything": (
        lambda run, state: run.init(lambda: (make_state(), make_batch())),
        TraceError,
        f"{NOT_CALLED}missing a required argument: 'batch'",
    ),
    "an initialiser that raises": (lambda run, state: run.init(raising, make_batch()), UserError, "^mine"),
    "an initialiser of another state": (
        lambda run, state: run.init(lambda: {"v": jnp.ones(3)}, make_batch()),
        KeyError,
        "'w'",
    ),
    "an initialiser of text": (
        lambda run, state: run.init(lambda: "w", make_batch()),
        TraceError,
        r"returns str at result, which",
    ),
    "a state as initialiser": (
        lambda run, state: run.init(state, make_batch()),
        TraceError,
        r"takes a function .*not dict",
    ),  # type: ignore[arg-type]
    # --- what the step does
    "a step that raises": (stepping(raising), UserError, "^mine"),
    "a step that returns text": (
        stepping(lambda s, b: (s, "x")),
        TraceError,
        r"returns str at result\[1\], which is no array",
    ),
    "a step that returns a function": (
        stepping(lambda s, b: (s, {"f": raising})),
        TraceError,
        r"function at result\[1\]\['f'\]",
    ),
    "a tracer that leaked": (
        leaking,
        TraceError,
        r"closes over a value of an outer transformation.*Pass it as an argument",
    ),
    "an NNX module changed in place": (
        in_place,
        TraceError,
        r"changes an NNX object in place.*\n.*nnx\.split.*\n.*nnx\.merge",
    ),
    "a pmap axis": (
        stepping(lambda s, b: (s, jax.lax.pmean(b["x"].sum(), "devices"))),
        TraceError,
        r"uses the axis name 'devices', as for pmap.*\n-  grads = .*\n\+  \(drop this line",
    ),
    "a branch on a value": (
        stepping(lambda s, b: (s, 1 if b["x"].sum() > 0 else 2)),
        jax.errors.TracerBoolConversionError,
        "boolean",
    ),
    "NumPy on a value": (stepping(lambda s, b: (s, np.sin(b["x"]))), jax.errors.TracerArrayConversionError, "numpy"),
    "a name that is not there": (stepping(lambda s, b: nowhere), NameError, "'nowhere' is not defined"),  # type: ignore[name-defined]  # noqa: F821
    "inside jit": (lambda run, state: jax.jit(run)(state, make_batch()), TraceError, INSIDE),
    "inside grad": (
        lambda run, state: jax.grad(lambda w: run({**state, "w": w}, make_batch())[1]["loss"])(state["w"]),
        TraceError,
        INSIDE,
    ),
}


def expect_right_numbers(run: Parallelized, state: Tree) -> None:
    got, said = run(state, make_batch())
    expected, expected_said = jax.jit(train_step)(make_state(), make_batch())
    np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-6)
    assert int(got["n"]) == 1
    np.testing.assert_allclose(said["loss"], expected_said["loss"], rtol=1e-6)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str) -> None:
    act, error, said = MISUSES[name]
    run, state = parallel(), make_state()
    with pytest.raises(error, match=said) as raised:
        act(run, state)
    assert type(raised.value).__module__.startswith("autopar") == issubclass(error, AutoparError)
    expect_right_numbers(run, state)


def test_a_misuse_after_steps_leaves_the_state_alone() -> None:
    run = parallel()
    state, _ = run(make_state(), make_batch())
    for batch in ({**make_batch(), "x": "rows"}, {**make_batch(), "y": np.ones((8, 1))}, None):
        with pytest.raises((TraceError, TypeError)):
            run(state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert int(run(state, make_batch())[0]["n"]) == 2


# ------------------------------------------------------------------------------------------------- files


def changed(**figures: Any) -> Callable[[dict[str, Any]], str]:
    """The file's text with figures of the prediction changed."""

    def change(document: dict[str, Any]) -> str:
        document["plan"]["prediction"].update(figures)
        return json.dumps(document)

    return change


FILES: dict[str, tuple[Callable[[dict[str, Any]], str | bytes], str]] = {
    "truncated": (lambda document: json.dumps(document)[:400], r"is not complete JSON .*plan again and save anew"),
    "empty": (lambda document: "", r"is not complete JSON"),
    "a list": (lambda document: "[]", r"Expected `object`, got `array`"),
    "another format": (
        lambda document: json.dumps({**document, "format": "else"}),
        r"\$\.format is 'else', not 'autopar\.plan'",
    ),
    "a newer version": (
        lambda document: json.dumps({**document, "version": 99}),
        r"\$\.version is 99, .*upgrade autopar",
    ),
    "not a number": (changed(compute_seconds=math.nan), r"JSON is malformed"),
    "infinity": (changed(compute_seconds=math.inf), r"JSON is malformed"),
    "negative seconds": (changed(compute_seconds=-1.0), r">= 0.0 - at `\$\.plan\.prediction\.compute_seconds`"),
    "text for a number": (changed(flops="many"), r"Expected `float`, got `str` - at `\$\.plan\.prediction\.flops`"),
    "an unknown field": (changed(colour="red"), r"unknown field `colour`"),
    "a pickle": (lambda document: pickle.dumps(document), r"is not complete JSON .*so it is no plan file"),
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a plan's file."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    parallel().plan(make_state(), make_batch()).save(path)
    return path.read_text()


@pytest.mark.parametrize("name", FILES)
def test_a_plan_file_that_is_none(name: str, document: str, tmp_path: Path) -> None:
    change, said = FILES[name]
    text = change(json.loads(document))
    path = tmp_path / "plan.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError, match=said) as refused:
        Plan.load(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("load", [Plan.load, Cluster.from_file], ids=["plan", "cluster"])
def test_a_directory_or_nothing_in_place_of_a_file(load: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(
        (PlanError, ClusterError), match=rf"cannot read .*{tmp_path.name}: Is a directory; check the path"
    ):
        load(tmp_path)
    with pytest.raises((PlanError, ClusterError), match=r"nothing\.json: No such file or directory; check the path"):
        load(tmp_path / "nothing.json")


@pytest.mark.parametrize("load", [Cluster.from_file, load_profile], ids=["cluster", "profile"])
def test_a_plan_is_no_cluster_and_no_profile(load: Callable[[Path], Any], document: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(document)
    with pytest.raises(ClusterError, match=r"autopar\.plan|not a (cluster|profile)"):
        load(path)


# ------------------------------------------------------------------------------------------------- what simply works


def doubling(state: Tree, batch: Any) -> tuple[Tree, Any]:
    return jax.tree.map(lambda leaf: leaf * 2, state), jax.tree.map(jnp.sum, batch)


def of_one_leaf(leaf: Any, path: str = "w") -> Callable[[], tuple[Tree, Any]]:
    return lambda: ({path: leaf}, make_batch())


def shared_leaf() -> tuple[Tree, Any]:
    leaf = jnp.arange(16.0)
    return {"a": leaf, "b": leaf, "c": [leaf]}, {"x": leaf}


WORKS: dict[str, Callable[[], tuple[Tree, Any]]] = {
    "an odd batch": lambda: (make_state(), make_batch(7)),
    "a batch of one": lambda: (make_state(), make_batch(1)),
    "a batch of none": lambda: (make_state(), make_batch(0)),
    "a scalar batch": lambda: (make_state(), np.float32(3)),
    "a Python number as batch": lambda: (make_state(), 3.0),
    "None within the batch": lambda: (make_state(), {**make_batch(), "mask": None}),
    "an empty state": lambda: ({}, make_batch()),
    "complex parameters": of_one_leaf(np.full((16, 2), 1 + 2j, np.complex64)),
    "integer parameters": of_one_leaf(np.arange(32, dtype=np.int8).reshape(16, 2)),
    "Boolean batch": lambda: (make_state(), {"mask": np.ones((16, 3), bool)}),
    "half precision": of_one_leaf(jnp.ones((16, 2), jnp.bfloat16)),
    "a key with dots": of_one_leaf(np.ones((16, 2), np.float32), "layer.0.w"),
    "a key with quotes": of_one_leaf(np.ones((16, 2), np.float32), "a']['b\"c"),
    "a key that is no text": lambda: ({0: jnp.ones(8), 1: jnp.ones(8)}, make_batch()),
    "one array for several leaves": shared_leaf,
    "NumPy for state": lambda: (jax.tree.map(np.asarray, make_state()), make_batch()),
}


@pytest.mark.parametrize("mesh", [None, (2, 4)], ids=["data_parallel", "auto"])
@pytest.mark.parametrize("name", WORKS)
def test_works(name: str, mesh: tuple[int, ...] | None) -> None:
    run = parallel(doubling) if mesh is None else parallel(doubling, method="auto", mesh_shape=mesh)
    state, batch = WORKS[name]()
    expected = jax.jit(doubling)(*WORKS[name]())
    for _ in range(2):  # what was passed is still there: nothing of the caller's was donated
        got = run(state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.dtype, b.dtype), got, expected)
    again, _ = run(got[0], batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b * 2, rtol=1e-6), again, expected[0])


def test_the_batch_may_be_the_state() -> None:
    run = parallel(doubling)
    state, _ = run({"w": jnp.ones((16, 2))}, {"x": jnp.ones((16, 2))})
    new, total = run(state, {"x": state["w"]})
    np.testing.assert_array_equal(new["w"], np.full((16, 2), 4.0))
    assert float(total["x"]) == 64


def test_a_dotted_key_is_named_as_it_is_written() -> None:
    state = {"layer.0.w": jnp.ones((16, 2))}
    run = parallel(doubling, method="auto", mesh_shape=(2, 4), constraints={"state/layer.0.w": P("data")})
    assert run.plan(state, make_batch()).in_layouts[0].dims[0] == ("data",)


def test_structure_and_dtype_may_change_between_calls() -> None:
    run = parallel(doubling)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.float32):
        state = {"w": jnp.ones((16, 2), dtype)}
        assert run(state, make_batch())[0]["w"].dtype == dtype
    assert set(run({"w": jnp.ones(4), "v": jnp.ones(3)}, make_batch())[0]) == {"v", "w"}


def test_results_may_be_none() -> None:
    assert parallel(lambda s, b: None)(make_state(), make_batch()) is None
    state, said = parallel(lambda s, b: (train_step(s, b)[0], None))(make_state(), make_batch())
    assert said is None and int(state["n"]) == 1


def test_figures_may_be_of_any_numeric_type() -> None:
    for memory in (10**9, np.float32(1e9), jnp.float32(1e9), math.inf):
        assert (
            parallel(memory_per_device=memory, solver_seconds=math.inf).plan(make_state(), make_batch()).peak_bytes > 0
        )
