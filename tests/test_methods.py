"""The hand-made methods are honest opponents: plain JAX programs of the same idea communicate as much.

The model ties no parameters. Where an embedding also is the output's matrix, this library adds the two gradients while
they still are partial sums and reduces once, XLA's partitioner reduces each: the plain program then sends more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cluster import Cluster
from autopar.cost_model.collectives import Collective
from autopar.cost_model.hlo import form_reduce_scatters, parse_module, step_seconds
from autopar.errors import PlanError
from autopar.methods import TensorParallel
from benchmarks.models import build
from benchmarks.suites import half_precision
from benchmarks.suites.steps import gpt_config

pytestmark = pytest.mark.usefixtures("users_fusions")

WIDTH, HIDDEN, BATCH, LAYERS = 128, 512, 2048, 2
OPTIMIZER = optax.adam(1e-3)


def make_state() -> dict[str, Any]:
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {f"layer{i}": {name: jnp.zeros(shape) for name, shape in shapes.items()} for i in range(LAYERS)}
    return {"params": params, "opt": OPTIMIZER.init(params)}


def train_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        x = batch["x"]
        for layer in params.values():
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    loss, gradients = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = OPTIMIZER.update(gradients, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def plain(cluster: Cluster, method: str) -> tuple[Any, Any]:
    """The same step as an expert writes it with NamedSharding, compiled."""
    axis = "model" if method == "tensor_parallel" else "data"
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), (axis,), axis_types=(AxisType.Auto,))
    state, batch = jax.eval_shape(make_state), {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}

    def spec(path: Any, leaf: Any) -> P:
        name = jax.tree_util.keystr(path)
        if leaf.ndim < 2 or method == "data_parallel" or (method == "zero2" and "params" in name):
            return P()
        if method == "tensor_parallel":
            return P(None, "model") if "up" in name else P("model", None)
        return P(None, "data") if "up" in name else P("data", None)

    placed = jax.tree_util.tree_map_with_path(lambda path, leaf: NamedSharding(mesh, spec(path, leaf)), state)
    rows = NamedSharding(mesh, P() if method == "tensor_parallel" else P("data"))
    jitted = jax.jit(train_step, in_shardings=(placed, {"x": rows}), out_shardings=(placed, None), donate_argnums=0)
    return jitted.lower(state, batch).compile(), (state, batch)


def traffic(compiled: Any) -> dict[Collective, float]:
    """Full bytes by kind of the larger collectives, all-reduces that are sliced at once counted as reduce-scatters."""
    found: dict[Collective, float] = {}
    for collective in form_reduce_scatters(parse_module(compiled.as_text())):
        if collective.full_bytes > 1024:
            found[collective.kind] = found.get(collective.kind, 0.0) + collective.full_bytes * collective.count
    return found


@pytest.mark.parametrize("method", ["data_parallel", "zero2", "zero3", "tensor_parallel"])
def test_a_method_communicates_like_plain_jax(method: str) -> None:
    cluster = Cluster.local()
    reference, (state, batch) = plain(cluster, method)
    chosen = TensorParallel(model_size=8) if method == "tensor_parallel" else method
    ours = autopar.parallelize(train_step).compile(state, batch, method=chosen, cluster=cluster)
    theirs, mine = traffic(reference), traffic(ours)
    assert set(mine) == set(theirs), (mine, theirs)
    for kind, moved in theirs.items():
        assert mine[kind] == pytest.approx(moved, rel=0.05), (kind, mine, theirs)
    seconds = step_seconds(parse_module(ours.as_text()), cluster).seconds
    assert seconds <= step_seconds(parse_module(reference.as_text()), cluster).seconds * 1.02


EXPERTS, PLACES = 8, 4


def make_mixture() -> dict[str, Any]:
    shapes = {"router": (WIDTH, EXPERTS * PLACES), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    return {"params": params, "opt": OPTIMIZER.init(params)}


def mixture_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
    """Every expert sees sums of the examples of each group, and gives back to them, by their gates."""

    def loss_fn(params: Any) -> jax.Array:
        x = batch["x"]  # float[groups, places, width]
        gates = jax.nn.softmax(x @ params["router"]).reshape(*x.shape[:2], EXPERTS, PLACES)
        slots = jnp.einsum("gsec,gsi->egci", gates, x)
        inner = jax.nn.relu(jnp.einsum("egci,eio->egco", slots, params["up"]))
        done = jnp.einsum("egco,eoi->egci", inner, params["down"])
        return jnp.mean((jnp.einsum("gsec,egci->gsi", gates, done) + x) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = OPTIMIZER.update(gradients, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def test_expert_parallelism_sends_no_more_than_plain_jax_told_so() -> None:
    """An expert says where experts lie, and that examples are exchanged before and after them."""
    cluster = Cluster.local()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("data",), axis_types=(AxisType.Auto,))
    state, batch = jax.eval_shape(make_mixture), {"x": jax.ShapeDtypeStruct((16, 64, WIDTH), jnp.float32)}

    def spec(path: Any, leaf: Any) -> P:
        name = jax.tree_util.keystr(path)
        if "up" in name or "down" in name:
            return P("data")
        return P("data") if "router" in name and "opt" in name else P()

    placed = jax.tree_util.tree_map_with_path(lambda path, leaf: NamedSharding(mesh, spec(path, leaf)), state)
    rows = NamedSharding(mesh, P("data"))
    jitted = jax.jit(mixture_step, in_shardings=(placed, {"x": rows}), out_shardings=(placed, None), donate_argnums=0)
    theirs = jitted.lower(state, batch).compile()
    ours = autopar.parallelize(mixture_step).compile(state, batch, method="expert_parallel", cluster=cluster)
    assert Collective.ALL_TO_ALL in traffic(ours)
    sending = [step_seconds(parse_module(one.as_text()), cluster).communication_seconds for one in (ours, theirs)]
    assert sending[0] <= sending[1] * 1.02, (traffic(ours), traffic(theirs))


def test_expert_parallelism_needs_experts() -> None:
    state, batch = jax.eval_shape(make_state), {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}
    with pytest.raises(PlanError, match="finds no parameters of as many experts as divide over 8 devices"):
        autopar.parallelize(train_step).plan(state, batch, method="expert_parallel", cluster=Cluster.local())
    mixture, rows = jax.eval_shape(make_mixture), {"x": jax.ShapeDtypeStruct((18, 64, WIDTH), jnp.float32)}
    cluster = Cluster.local().replace(devices_per_host=3)
    with pytest.raises(PlanError, match="divide over 3 devices"):
        autopar.parallelize(mixture_step).plan(mixture, rows, method="expert_parallel", cluster=cluster)


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.verify), jnp.bfloat16])
def test_the_sums_behind_a_norm_are_added_and_reduced_once(dtype: Any) -> None:
    """No gradient is gathered for them, in no type, and no latency is paid for every array."""
    model = build("gpt", "toy", dtype)
    step = autopar.parallelize(method="zero3", cluster=Cluster.preset("p5.48xlarge"))(model.train_step)
    uses = step.plan(model.abstract_state(), model.abstract_batch()).prediction.collectives
    (of_norm,) = (use for use in uses if use.phase == "update")
    assert (of_norm.kind, of_norm.count) == (Collective.ALL_REDUCE.value, 1)
    assert of_norm.full_bytes == jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(("narrow", "item_bytes"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
def test_parameters_in_pieces_are_gathered_in_the_type_in_which_they_are_used(narrow: Any, item_bytes: int) -> None:
    """Each twice, for the forward and for the backward pass, in a step that gathers nothing else but sums of scalars."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        x = x.astype(narrow)
        for layer in params.values():
            x = jnp.tanh(x @ layer["up"].astype(narrow)) @ layer["down"].astype(narrow)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda w, slope: w - 0.1 * slope, params, jax.grad(loss_fn)(params, batch["x"]))

    params = jax.eval_shape(make_state)["params"]
    batch = {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}
    found = autopar.parallelize(step, method="zero3", cluster=Cluster.preset("p5.48xlarge")).plan(params, batch)
    elements = 2 * LAYERS * WIDTH * HIDDEN
    gathered = sum(use.full_bytes * use.count for use in found.prediction.collectives if use.kind == "all-gather")
    assert gathered == item_bytes * elements
    assert all(layout.dims != ((), ()) for layout in found.in_layouts[: 2 * LAYERS])


def test_masters_are_cut_as_the_parameters_that_are_cast_from_them() -> None:
    """An embedding apart from the output's matrix: its gradient is written by rows, and no operator reads both."""
    config = dataclasses.replace(gpt_config("350M"), hidden=64, layers=1, heads=4, sequence=32, vocab_size=96)
    model = half_precision.gpt(config, 8)
    step = autopar.parallelize(
        model.train_step, cluster=Cluster.preset("p3.16xlarge").part((0, 1)), method=TensorParallel(2)
    )
    plan = step.plan(model.abstract_state(), model.abstract_batch())
    layouts = {path: str(layout) for path, layout in zip(plan.in_paths, plan.in_layouts, strict=True)}
    tables = {path: said for path, said in layouts.items() if "['embed']['embedding']" in path}
    heads = {path: said for path, said in layouts.items() if "['head']['kernel']" in path}
    assert len(tables) == len(heads) == 4  # parameters, masters, both moments
    assert set(tables.values()) == {"[model, ·]"} and set(heads.values()) == {"[·, model]"}
