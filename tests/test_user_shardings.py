"""Scripts that already carry parallelism: what they say is kept, refused, noted, or ignored on demand.

Every step is held against ``jax.jit`` of the same function, and the layouts in the plan against what was asked.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.lax import with_sharding_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import autopar
import autopar.parallelized
from autopar import Cluster, Plan, PlanError, TraceError
from autopar.parallelized import Parallelized
from autopar.plan import Layout
from autopar.schedule.verify import verify_program
from autopar.user_shardings import UserShardings
from tests.toy_runs import eight_slow_devices

P = PartitionSpec
State = dict[str, Any]
HERE = Path(__file__).name


def mesh_of(*axes: tuple[str, int]) -> Mesh:
    names, sizes = zip(*axes, strict=True)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def two_by_four() -> Mesh:
    return mesh_of(("rows", 2), ("columns", 4))


def on(*spec: Any, mesh: Mesh | AbstractMesh | None = None) -> NamedSharding:
    return NamedSharding(mesh if mesh is not None else two_by_four(), P(*spec))


def make_state() -> State:
    first, second = jax.random.split(jax.random.key(0))
    return {"enter": jax.random.normal(first, (32, 64)) / 6, "leave": jax.random.normal(second, (64, 16)) / 8}


def make_batch(size: int = 16) -> State:
    random = np.random.default_rng(size)
    x, y = (random.standard_normal((size, width), dtype=np.float32) for width in (32, 16))
    return {"x": x, "y": y}


def step_with(constrain: Callable[[jax.Array], jax.Array], remat: bool = False) -> Callable[..., Any]:
    """A train step whose hidden activation (16×64) goes through ``constrain``."""

    def hidden(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return constrain(jnp.tanh(x @ kernel))

    def loss_of(state: State, batch: State) -> jax.Array:
        inner = jax.checkpoint(hidden) if remat else hidden
        return jnp.mean((inner(batch["x"], state["enter"]) @ state["leave"] - batch["y"]) ** 2)

    def step(state: State, batch: State) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss

    return step


def parallel(function: Callable[..., Any], **options: Any) -> Parallelized:
    return autopar.parallelize(**{"cluster": eight_slow_devices(), **options})(function)


def same(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), ours, theirs)


def asked_layouts(step: Parallelized, *args: Any) -> list[Layout]:
    """Where the plan puts the results of all constraints in the program, at any depth."""
    subject, plan, _ = step.records(*args)
    operators = [op for op, _ in subject.graph.all_operators() if op.primitive == "sharding_constraint"]
    shapes = {value.id: value.shape for value in subject.graph.all_values()}
    return [plan.stages[0].home(op.results[0], len(shapes[op.results[0]])) for op in operators]


def runs_as_jit(function: Callable[..., Any], step: Parallelized, *args: Any) -> None:
    expected = jax.jit(function)(*args)
    same(step(*args), expected)
    assert step.last is not None
    verify_program(step.last.program)


# -------------------------------------------------------------------------------- constraints in the code


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (("rows", "columns"), (("rows",), ("columns",))),
        (("columns",), (("columns",), ())),
        ((None, ("rows", "columns")), ((), ("rows", "columns"))),
        ((), ((), ())),
    ],
    ids=str,
)
def test_a_constraint_is_kept_forward_and_backward(spec: Any, layout: Any) -> None:
    function = step_with(lambda h: with_sharding_constraint(h, on(*spec)))
    step = parallel(function)
    found = asked_layouts(step, make_state(), make_batch())
    assert found == [Layout(layout)] * 2  # the constraint and its transpose
    assert str(step.plan(make_state(), make_batch()).mesh) == "rows=2 × columns=4"
    runs_as_jit(function, step, make_state(), make_batch())


def test_the_compiled_step_lays_out_as_asked() -> None:
    def function(state: State, batch: State) -> tuple[State, dict[str, jax.Array]]:
        hidden = with_sharding_constraint(jnp.tanh(batch["x"] @ state["enter"]), on(None, "columns"))
        return jax.tree.map(lambda p: 0.9 * p, state), {"hidden": hidden, "sum": hidden.sum()}

    step = parallel(function)
    _, out = step(make_state(), make_batch())
    assert out["hidden"].sharding.is_equivalent_to(on(None, "columns"), 2)
    assert {shard.data.shape for shard in out["hidden"].addressable_shards} == {(16, 16)}
    same(out["hidden"], jax.jit(function)(make_state(), make_batch())[1]["hidden"])
    free = parallel(function, user_shardings="ignore")
    _, out = free(make_state(), make_batch())
    assert not out["hidden"].sharding.is_equivalent_to(on(None, "columns"), 2)


def test_an_unconstrained_dimension_is_free_and_the_others_are_not() -> None:
    function = step_with(lambda h: with_sharding_constraint(h, on("columns", P.UNCONSTRAINED)))
    step = parallel(function)
    for layout in asked_layouts(step, make_state(), make_batch()):
        assert layout.dims[0] == ("columns",)
    both = parallel(step_with(lambda h: with_sharding_constraint(h, on(P.UNCONSTRAINED, "rows"))))
    dims = {layout.dims for layout in asked_layouts(both, make_state(), make_batch())}
    assert {dim[1] for dim in dims} == {("rows",)}
    assert ("columns",) in {dim[0] for dim in dims}, "cutting the batch too is cheaper, and allowed"
    runs_as_jit(function, step, make_state(), make_batch())


def scopes() -> dict[str, Callable[[], Any]]:
    abstract = AbstractMesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    return {
        "set_mesh": lambda: jax.set_mesh(two_by_four()),
        "abstract": lambda: jax.sharding.use_abstract_mesh(abstract),
        "with mesh": two_by_four,
    }


@pytest.mark.filterwarnings("ignore:.with mesh.. context manager has been deprecated:DeprecationWarning")
@pytest.mark.parametrize("scope", scopes(), ids=str)
def test_a_bare_spec_under_a_mesh_in_scope(scope: str) -> None:
    function = step_with(lambda h: with_sharding_constraint(h, P("rows", "columns")))
    step = parallel(function)
    with scopes()[scope]():
        assert asked_layouts(step, make_state(), make_batch()) == [Layout((("rows",), ("columns",)))] * 2
        ours = step(make_state(), make_batch())
    same(ours, jax.jit(step_with(lambda h: h))(make_state(), make_batch()))


def test_an_abstract_mesh_in_the_constraint() -> None:
    mesh = AbstractMesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    step = parallel(step_with(lambda h: with_sharding_constraint(h, on("rows", mesh=mesh))))
    assert asked_layouts(step, make_state(), make_batch()) == [Layout((("rows",), ()))] * 2
    same(step(make_state(), make_batch()), jax.jit(step_with(lambda h: h))(make_state(), make_batch()))


def test_a_constraint_in_a_scan_body_and_in_a_checkpointed_region() -> None:
    def constrain(h: jax.Array) -> jax.Array:
        def body(carry: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            carry = with_sharding_constraint(jnp.sin(carry) * scale, on(None, "columns"))
            return carry, carry.sum()

        return jax.lax.scan(body, h, jnp.linspace(0.5, 1.5, 3))[0]

    for remat in (False, True):
        function = step_with(constrain, remat)
        step = parallel(function)
        found = asked_layouts(step, make_state(), make_batch())
        assert len(found) >= 2 and set(found) == {Layout(((), ("columns",)))}
        runs_as_jit(function, step, make_state(), make_batch())


ODD_PLACES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "a state leaf returned as it is": lambda w, x: with_sharding_constraint(w, on("rows")),
    "a result": lambda w, x: with_sharding_constraint(w - 0.01 * x.T @ (x @ w), on("rows")),
    "twice": lambda w, x: w - with_sharding_constraint(with_sharding_constraint(w, on("rows")), on("rows")),
    "a constant": lambda w, x: w - with_sharding_constraint(jnp.ones(w.shape), on("rows")),
    "booleans": lambda w, x: w * with_sharding_constraint(w > 0, on("rows")),
    "a while loop": lambda w, x: (
        w - jax.lax.while_loop(lambda c: c.sum() < 1e3, lambda c: with_sharding_constraint(c + 1, on("rows")), w)
    ),
    "a branch": lambda w, x: (
        w - jax.lax.cond(x.sum() > 0, lambda c: with_sharding_constraint(c, on("rows")), jnp.sin, w)
    ),
}


@pytest.mark.parametrize("place", ODD_PLACES)
def test_a_constraint_holds_wherever_it_stands(place: str) -> None:
    def function(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ODD_PLACES[place](w, x), jnp.sum(x @ w)

    arguments = jnp.asarray(make_batch()["x"].T), make_batch()["x"]
    step = parallel(function)
    assert set(asked_layouts(step, *arguments)) == {Layout((("rows",), ()))}
    runs_as_jit(function, step, *arguments)


def test_reshards_on_explicit_axes_are_constraints() -> None:
    mesh = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Explicit,) * 2)
    function = step_with(lambda h: h)

    def explicit(state: State, batch: State) -> tuple[State, jax.Array]:
        return function(state, {**batch, "x": jax.sharding.reshard(batch["x"], P("columns"))})

    step = parallel(explicit)
    with jax.set_mesh(mesh):
        subject, plan, _ = step.records(make_state(), make_batch())
        ours = step(make_state(), make_batch())
    asked = [op.results[0] for op in subject.graph.operators if op.primitive == "reshard" and op.rule.factors]
    assert plan.stages[0].homes[asked[0]] == Layout((("columns",), ()))
    same(ours, jax.jit(function)(make_state(), make_batch()))


def test_a_mesh_in_scope_of_which_nothing_is_said_does_not_matter() -> None:
    function = step_with(lambda h: h)
    step = parallel(function)
    with jax.set_mesh(mesh_of(("z", 8))):
        ours = step(make_state(), make_batch())
    assert step.last is not None
    assert "z" not in step.last.plan.mesh.axis_names
    same(ours, jax.jit(function)(make_state(), make_batch()))


def test_shardings_of_an_inner_jit_are_constraints() -> None:
    inner = jax.jit(lambda h: h * 2, in_shardings=on("rows"), out_shardings=on(None, "columns"))
    step = parallel(step_with(inner))
    found = asked_layouts(step, make_state(), make_batch())
    assert found[:2] == [Layout((("rows",), ())), Layout(((), ("columns",)))]
    same(step(make_state(), make_batch()), jax.jit(step_with(lambda h: h * 2))(make_state(), make_batch()))


def test_neighbours_of_a_constrained_value_choose_for_themselves() -> None:
    """``tanh(h)`` would lie as ``h``, and ``h`` as ``tanh(h)``, if the value in between were not on its own."""
    function = step_with(lambda h: jnp.tanh(with_sharding_constraint(h * 2, on(None, "columns"))))
    step = parallel(function, constraints={"batch/x": P(("rows", "columns")), "batch/y": P(("rows", "columns"))})
    subject, plan, _ = step.records(make_state(), make_batch())
    constrained = [op for op in subject.graph.operators if op.primitive == "sharding_constraint"]
    layouts = {plan.stages[0].home(value, 2) for op in constrained for value in op.operands if value is not None}
    assert layouts != {Layout(((), ("columns",)))}
    runs_as_jit(function, step, make_state(), make_batch())


def test_the_users_mesh_keeps_three_axes_and_drops_those_of_one() -> None:
    cube = mesh_of(("a", 2), ("one", 1), ("b", 2), ("c", 2))
    function = step_with(lambda h: with_sharding_constraint(h, on(("a", "one"), ("b", "c"), mesh=cube)))
    step = parallel(function)
    assert str(step.plan(make_state(), make_batch()).mesh) == "a=2 × b=2 × c=2"
    assert asked_layouts(step, make_state(), make_batch()) == [Layout((("a",), ("b", "c")))] * 2
    runs_as_jit(function, step, make_state(), make_batch())
    line = mesh_of(("one", 1), ("all", 8))
    step = parallel(step_with(lambda h: with_sharding_constraint(h, on("one", "all", mesh=line))))
    assert str(step.plan(make_state(), make_batch()).mesh) == "all=8"


def test_ignoring_frees_layouts_and_mesh() -> None:
    function = step_with(lambda h: with_sharding_constraint(h, on()))
    held, free = parallel(function), parallel(function, user_shardings="ignore")
    assert free.plan(make_state(), make_batch()).mesh.axis_names != ("rows", "columns")
    assert free.plan(make_state(), make_batch()).step_seconds < held.plan(make_state(), make_batch()).step_seconds
    assert any(layout.axes for layout in asked_layouts(free, make_state(), make_batch()))
    runs_as_jit(function, free, make_state(), make_batch())
    assert parallel(function, user_shardings=UserShardings.IGNORE).demands.user_shardings is UserShardings.IGNORE
    with pytest.raises(PlanError, match=r"user_shardings='never' is unknown; say \"respect\" or \"ignore\""):
        parallel(function, user_shardings="never")


# -------------------------------------------------------------------------------- what cannot be kept


SIXTEEN = Cluster.preset("p4d.24xlarge", hosts=2)


def four_axes() -> AbstractMesh:
    return AbstractMesh((2, 2, 2, 2), ("a", "b", "c", "d"), axis_types=(AxisType.Auto,) * 4)


def both_places(h: jax.Array) -> jax.Array:
    h = with_sharding_constraint(h, on("rows"))
    return with_sharding_constraint(h, on("x", mesh=mesh_of(("x", 8))))


@pytest.mark.parametrize(
    ("constrain", "options", "said"),
    [
        (
            lambda h: with_sharding_constraint(h[:6], on("columns")),
            {},
            r":\d+: P\('columns', None\) cannot .* \(6, 64\)",
        ),
        (lambda h: with_sharding_constraint(h, on(("columns", "rows"))), {}, r":\d+: .* write \('rows', 'columns'\)"),
        (both_places, {}, rf"two meshes, rows=2 × columns=4 at .*{HERE}:\d+ and x=8 at .*{HERE}:\d+"),
        (lambda h: with_sharding_constraint(h, on("rows")), {"mesh_shape": (4, 2)}, r"mesh_shape=\(4, 2\) contradicts"),
        (lambda h: with_sharding_constraint(h, on("a", mesh=four_axes())), {"cluster": SIXTEEN}, r"more than 3 axes"),
        (lambda h: with_sharding_constraint(h, on("rows")), {"method": "zero3"}, r"'zero3' cannot use the mesh rows=2"),
        (
            lambda h: with_sharding_constraint(h, on("rows")),
            {"cluster": SIXTEEN},
            rf"rows=2 × columns=4 at .*{HERE}:\d+ has 8 devices, and .* has 16; make the mesh of all of them",
        ),
    ],
    ids=["does not divide", "order", "two meshes", "mesh_shape", "axes", "method", "devices"],
)
def test_what_can_never_be_met_is_refused_with_place_and_remedy(
    constrain: Callable[[jax.Array], jax.Array], options: dict[str, Any], said: str
) -> None:
    function = step_with(lambda h: h + jnp.pad(constrain(h), ((0, 16 - constrain(h).shape[0]), (0, 0))))
    with pytest.raises(PlanError, match=rf"{said}[\s\S]*user_shardings=\"ignore\""):
        parallel(function, **options).plan(make_state(), make_batch())
    parallel(function, **{**options, "user_shardings": "ignore"}).plan(make_state(), make_batch())


def test_a_mesh_shape_that_agrees_is_no_contradiction() -> None:
    function = step_with(lambda h: with_sharding_constraint(h, on("rows")))
    assert str(parallel(function, mesh_shape=(2, 4)).plan(make_state(), make_batch()).mesh) == "rows=2 × columns=4"


def test_a_sharding_without_axes_is_noted() -> None:
    device = SingleDeviceSharding(jax.devices()[0])
    step = parallel(step_with(lambda h: with_sharding_constraint(h, device)))
    notes = autopar.explain(step, make_state(), make_batch()).notes
    assert any(f"{HERE}:" in note and "SingleDeviceSharding" in note for note in notes)


# -------------------------------------------------------------------------------- plans, again


def test_another_batch_size_keeps_plan_and_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = autopar.parallelized.make_plan
    monkeypatch.setattr(autopar.parallelized, "make_plan", lambda *args: made.append(args) or original(*args))
    function = step_with(lambda h: with_sharding_constraint(h, on("columns")))
    step = parallel(function, constraints={"batch/x": P("columns"), "batch/y": P("columns"), "state/*": P()})
    for size in (16, 32):
        assert asked_layouts(step, make_state(), make_batch(size)) == [Layout((("columns",), ()))] * 2
        runs_as_jit(function, step, make_state(), make_batch(size))
    assert len(made) == 1


def test_a_plan_that_ignores_is_refused_where_shardings_are_respected() -> None:
    function = step_with(lambda h: with_sharding_constraint(h, on("rows")))
    held, free = parallel(function), parallel(function, user_shardings="ignore")
    arguments = make_state(), make_batch()
    held.use(free.plan(*arguments))
    with pytest.raises(PlanError, match="another computation or other shardings in it"):
        held(*arguments)
    plain = step_with(lambda h: h)
    prints = {parallel(plain, user_shardings=how).plan(*arguments).fingerprint for how in ("respect", "ignore")}
    assert len(prints) == 1, "without shardings there is nothing to respect"


FINGERPRINT = """
from tests import conftest
from tests.test_user_shardings import *
function = step_with(lambda h: with_sharding_constraint(h, on("rows")))
print(parallel(function).plan(make_state(), make_batch()).fingerprint)
"""


@pytest.mark.verify
def test_the_fingerprint_is_the_same_in_another_process_and_for_an_abstract_mesh() -> None:
    arguments = make_state(), make_batch()
    abstract = two_by_four().abstract_mesh
    here = [
        parallel(step_with(lambda h, m=m: with_sharding_constraint(h, on("rows", mesh=m)))).plan(*arguments).fingerprint
        for m in (two_by_four(), abstract)
    ]
    assert here[0] == here[1]
    root = Path(__file__).parent.parent
    ran = subprocess.run([sys.executable, "-c", FINGERPRINT], cwd=root, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == here[0], ran.stderr


# -------------------------------------------------------------------------------- names on the arguments


class Boxed(nn.Module):
    """Two layers whose kernels carry the names of mesh axes, or logical ones."""

    names: tuple[str | None, ...]
    wrap: Any = nn.with_partitioning

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = self.wrap(nn.initializers.lecun_normal(), self.names)
        x = nn.relu(nn.Dense(64, kernel_init=init)(x))
        return nn.Dense(16)(x)


def boxed_step(state: TrainState, batch: State) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def boxed_state(model: nn.Module) -> TrainState:
    variables = model.init(jax.random.key(0), jnp.ones((1, 32)))
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2))


def layouts_by_path(plan: Plan) -> dict[str, Layout]:
    return dict(zip(plan.in_paths, plan.in_layouts, strict=True))


def kernels_of(plan: Plan) -> list[Layout]:
    """Layouts of the boxed kernel and of its two moments."""
    found = [layout for path, layout in layouts_by_path(plan).items() if path.endswith("['Dense_0']['kernel'].value")]
    assert len(found) == 3
    return found


@pytest.mark.parametrize(
    "names", [("model", None), (None, ("data", "model")), ("data", "model"), (None, None)], ids=str
)
def test_boxes_of_linen_bind_parameters_and_moments(names: Any) -> None:
    state = boxed_state(Boxed(names))
    expected = jax.jit(boxed_step)(state, make_batch())
    step = parallel(boxed_step)
    plan = step.plan(state, make_batch())
    dims = tuple((entry,) if isinstance(entry, str) else entry or () for entry in names)
    assert kernels_of(plan) == [Layout(dims)] * 3
    same(step(state, make_batch()), expected)


def test_names_of_ones_own_name_the_axes_of_the_mesh() -> None:
    plan = parallel(boxed_step).plan(boxed_state(Boxed(("fsdp", "tp"))), make_batch())
    assert plan.mesh.axis_names == ("fsdp", "tp")
    assert kernels_of(plan) == [Layout((("fsdp",), ("tp",)))] * 3


@pytest.mark.parametrize(
    ("count", "names", "meshes"),
    [
        (1, ("data", "model"), ["data=1"]),
        (2, ("data", "model"), ["data=2", "model=2"]),
        (2, ("fsdp", "tp"), ["fsdp=2", "tp=2"]),
        (8, ("tp", None), ["tp=8"]),
        (8, ("model", None), ["data=2 × model=4", "data=4 × model=2"]),
        (16, ("data", "model"), ["data=2 × model=8", "data=4 × model=4", "data=8 × model=2"]),
    ],
    ids=str,  # sets would be printed in another order by every process
)
def test_names_alone_on_any_number_of_devices(count: int, names: Any, meshes: list[str]) -> None:
    cluster = eight_slow_devices().replace(devices_per_host=count)
    plan = parallel(boxed_step, cluster=cluster).plan(boxed_state(Boxed(names)), make_batch())
    assert str(plan.mesh) in meshes
    cut = {axis for axis in names if axis in plan.mesh.dividing_names}
    assert {layout.axes for layout in kernels_of(plan)} == {frozenset(cut)}


def test_names_under_a_mesh_in_scope_mean_its_axes() -> None:
    state = boxed_state(Boxed((None, "columns")))
    expected = jax.jit(boxed_step)(state, make_batch())
    step = parallel(boxed_step)
    with jax.set_mesh(two_by_four()):
        plan = step.plan(state, make_batch())
        ours = step(state, make_batch())
    assert str(plan.mesh) == "rows=2 × columns=4"
    assert kernels_of(plan) == [Layout(((), ("columns",)))] * 3
    same(ours, expected)


@pytest.mark.parametrize(("names", "first"), [(("columns", "embed"), ("columns",)), (("embed", None), None)], ids=str)
def test_names_that_are_no_axes_of_the_mesh_ask_for_nothing(names: Any, first: Any) -> None:
    def with_mesh(state: TrainState, batch: State) -> tuple[TrainState, jax.Array]:
        return boxed_step(state, {**batch, "x": with_sharding_constraint(batch["x"], on("rows"))})

    explanation = autopar.explain(parallel(with_mesh), boxed_state(Boxed(names)), make_batch())
    assert any("embed" in note and "no axes of the mesh (columns, rows)" in note for note in explanation.notes)
    kernel = next(p for p in explanation.parameters if p.path.endswith("['Dense_0']['kernel'].value"))
    assert ("you asked" in kernel.why) == (first is not None)
    layouts = kernels_of(parallel(with_mesh).plan(boxed_state(Boxed(names)), make_batch()))
    if first is not None:
        assert {layout.dims[0] for layout in layouts} == {first}


def test_logical_names_go_by_the_rules_in_scope() -> None:
    state = boxed_state(Boxed(("embed", "mlp"), nn.with_logical_partitioning))
    with nn.logical_axis_rules((("mlp", "model"), ("embed", None))):
        assert kernels_of(parallel(boxed_step).plan(state, make_batch())) == [Layout(((), ("model",)))] * 3
    explanation = autopar.explain(parallel(boxed_step), state, make_batch())
    assert any("have no rules in scope" in note for note in explanation.notes)


def test_boxes_can_be_ignored() -> None:
    state = boxed_state(Boxed((None, None)))
    held, free = (parallel(boxed_step, user_shardings=how).plan(state, make_batch()) for how in ("respect", "ignore"))
    assert not any(layout.axes for layout in kernels_of(held))
    assert any(layout.axes for layout in kernels_of(free))
    assert held.fingerprint != free.fingerprint


def test_other_names_on_the_same_arrays_are_another_plan() -> None:
    step = parallel(boxed_step)
    for names in (("model", None), (None, "model")):
        step(boxed_state(Boxed(names)), make_batch())
        assert step.last is not None
        assert kernels_of(step.last.plan)[0].dims == tuple((name,) if name else () for name in names)


def test_boxes_are_born_as_they_ask() -> None:
    model = Boxed((None, ("data", "model")))
    step = parallel(boxed_step)
    state = step.init(lambda: boxed_state(model), make_batch())
    adam = state.opt_state[0]
    for tree in (state.params, adam.mu, adam.nu):
        kernel = tree["Dense_0"]["kernel"].value
        assert {shard.data.shape for shard in kernel.addressable_shards} == {(32, 8)}
    compiled = []
    for _ in range(2):
        state, _ = step(state, make_batch())
        compiled.append(step.last)
    assert compiled[0] is compiled[1]
    kernel = state.params["Dense_0"]["kernel"].value
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(32, 8)}


@pytest.mark.parametrize("is_eager", [True, False])
def test_metadata_of_nnx_variables(is_eager: bool) -> None:
    names = ("rows", "columns")

    def make() -> Any:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names, eager_sharding=is_eager)
        return nnx.Linear(32, 16, kernel_init=init, rngs=nnx.Rngs(0))

    with jax.set_mesh(two_by_four()):
        model = make()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))

    def function(state: Any, batch: State) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graphdef, state)
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    expected = jax.jit(function)(state, make_batch())
    step = parallel(function)
    layouts = layouts_by_path(step.plan(state, make_batch()))
    kernels = [layout for path, layout in layouts.items() if "kernel" in path]
    assert kernels == [Layout((("rows",), ("columns",)))] * 3
    same(step(state, make_batch()), expected)


# -------------------------------------------------------------------------------- arrays that lie somewhere


def placed_state(*spec: Any) -> State:
    return jax.device_put(make_state(), on(*spec))


def test_state_stays_where_it_was_put() -> None:
    function = step_with(lambda h: h)
    step = parallel(function)
    plan = step.plan(placed_state("columns"), make_batch())
    assert str(plan.mesh) == "rows=2 × columns=4"
    assert plan.in_layouts[:2] == (Layout((("columns",), ())),) * 2
    same(step(placed_state("columns"), make_batch()), jax.jit(function)(make_state(), make_batch()))
    free = parallel(function, user_shardings="ignore").plan(placed_state("columns"), make_batch())
    assert free.mesh.axis_names != ("rows", "columns")


def test_state_that_a_step_returned_demands_nothing() -> None:
    step = parallel(step_with(lambda h: h), constraints={"state/*": P("data")})
    state = step.init(make_state, make_batch())
    compiled = []
    for _ in range(3):
        state, _ = step(state, make_batch(16))
        compiled.append(step.last)
    assert len(set(map(id, compiled))) == 1
    step(state, make_batch(12))  # planned anew: were its layouts demands, they would be notes or constraints now
    subject, _, _ = step.last_records() or pytest.fail("it ran")
    assert not subject.wishes.wishes


def test_a_batch_that_lies_somewhere_demands_nothing() -> None:
    step = parallel(step_with(lambda h: h))
    batch = jax.device_put(make_batch(), on())
    subject, plan, _ = step.records(make_state(), batch)
    assert not subject.wishes.wishes
    assert "rows" not in plan.mesh.axis_names


def test_state_that_is_whole_everywhere_demands_nothing_and_a_note_says_how_to_keep_it() -> None:
    """Under ``jax.set_mesh`` every new array is put on the whole mesh, wanted or not."""
    step = parallel(step_with(lambda h: h))
    explanation = autopar.explain(step, placed_state(), make_batch())
    assert any("asks for nothing" in note and 'constraints={"**": P()}' in note for note in explanation.notes)
    assert "rows" not in explanation.mesh.axis_names
    both = {"enter": placed_state("rows")["enter"], "leave": placed_state()["leave"]}
    plan = parallel(step_with(lambda h: h)).plan(both, make_batch())
    assert plan.in_layouts[:2] == (Layout((("rows",), ())), Layout(((), ())))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh_shape": (8,)}, "their mesh rows=2 × columns=4 is not one to plan on here"),
        ({"method": "zero3"}, "the method has its own layouts"),
    ],
    ids=["mesh_shape", "method"],
)
def test_arrays_are_moved_where_they_cannot_stay_and_a_note_says_so(options: dict[str, Any], said: str) -> None:
    step = parallel(step_with(lambda h: h), **options)
    explanation = autopar.explain(step, placed_state("rows"), make_batch())
    assert any(said in note for note in explanation.notes)
    same(step(placed_state("rows"), make_batch()), jax.jit(step_with(lambda h: h))(make_state(), make_batch()))


def test_an_array_cut_against_the_order_of_the_mesh_is_moved() -> None:
    state = {**placed_state("rows"), "enter": placed_state(("columns", "rows"))["enter"]}
    explanation = autopar.explain(parallel(step_with(lambda h: h)), state, make_batch())
    assert any("is moved: state['enter']" in note for note in explanation.notes)
    whys = {parameter.path: parameter.why for parameter in explanation.parameters}
    assert "you asked" not in whys["state['enter']"] and "you asked" in whys["state['leave']"]


@pytest.mark.parametrize(
    ("names", "said"),
    [(("a", "b", "c"), "has 2 dimensions, fewer than its names"), (("a", ("b", "c", "d")), "are more than 3")],
    ids=["more than dimensions", "more than axes"],
)
def test_names_that_mean_no_mesh_are_noted(names: Any, said: str) -> None:
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        return jax.tree.map(lambda w: w - 0.1, state), (x @ state.value).sum()

    state = nn.Partitioned(jnp.ones((32, 16)), names=names)
    explanation = autopar.explain(parallel(step), state, make_batch()["x"])
    assert any(said in note for note in explanation.notes)


def test_constraints_win_over_where_arrays_lie_and_collide_with_names() -> None:
    step = parallel(step_with(lambda h: h), constraints={"state/enter": P(None, "rows")})
    plan = step.plan(placed_state("columns"), make_batch())
    assert plan.in_layouts[:2] == (Layout(((), ("rows",))), Layout((("columns",), ())))
    step = parallel(boxed_step, constraints={"state/params/Dense_0/kernel/value": P("data")})
    with pytest.raises(PlanError, match=r"collide .*Dense_0'\]\['kernel'\].value as \[model, ·\], and as \[data, ·\]"):
        step.plan(boxed_state(Boxed(("model", None))), make_batch())


# -------------------------------------------------------------------------------- what is said of it


def test_the_explanation_says_who_asked() -> None:
    explanation = autopar.explain(parallel(boxed_step), boxed_state(Boxed((None, "model"))), make_batch())
    whys = {parameter.path: parameter.why for parameter in explanation.parameters}
    assert whys["state.params['Dense_0']['kernel'].value"].startswith("you asked for it: names P(None, 'model')")
    assert "you asked for it" in str(explanation)
    assert any("bind the plan" in note for note in explanation.notes)

    def uses(state: State, batch: State) -> tuple[State, jax.Array]:
        enter = with_sharding_constraint(state["enter"], on(None, "columns"))
        return step_with(lambda h: h)({**state, "enter": enter}, batch)

    line = uses.__code__.co_firstlineno + 1
    whys = {p.path: p.why for p in autopar.explain(parallel(uses), make_state(), make_batch()).parameters}
    assert whys["state['enter']"].startswith(f"used as you asked: {HERE}:{line}")

    step = parallel(step_with(lambda h: h), constraints={"state/enter": P(None, "model")})
    whys = {p.path: p.why for p in autopar.explain(step, make_state(), make_batch()).parameters}
    assert whys["state['enter']"].startswith("you asked for it: constraints['state/enter']")
    whys = {p.path: p.why for p in autopar.explain(parallel(uses), placed_state("rows"), make_batch()).parameters}
    assert whys["state['leave']"] == "you asked for it: it was passed so"


# -------------------------------------------------------------------------------- pmap's names, steps in place


def test_an_axis_name_of_pmap_gets_the_fix() -> None:
    def step(state: State, batch: State) -> tuple[State, jax.Array]:
        state, loss = step_with(lambda h: h)(state, batch)
        return state, jax.lax.pmean(loss, "batch")

    with pytest.raises(TraceError, match=r"axis name 'batch'[\s\S]*\n-  .*pmean[\s\S]*\n\+  \(drop this line"):
        parallel(step)(make_state(), make_batch())


@pytest.mark.parametrize("how", ["argument", "closure", "jit of a closure"])
def test_a_step_that_changes_an_nnx_module_in_place_gets_the_fix(how: str) -> None:
    model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def update(model: Any, optimizer: Any, batch: State) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    steps = {
        "argument": (update, (model, optimizer, make_batch())),
        "closure": (lambda batch: update(model, optimizer, batch), (make_batch(),)),
        "jit of a closure": (lambda model, batch: nnx.jit(update)(model, optimizer, batch), (model, make_batch())),
    }
    function, arguments = steps[how]
    with pytest.raises(TraceError, match=r"in place[\s\S]*\n\+  graphdef, state = nnx\.split[\s\S]*\n\+  model = nnx"):
        parallel(function)(*arguments)


# -------------------------------------------------------------------------------- microbatches


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (("rows", "columns"), (("rows",), ("columns",))),
        ((None, "columns"), ((), ("columns",))),
        ((PartitionSpec.UNCONSTRAINED, "rows"), (None, ("rows",))),
        ((("rows", "columns"), None), (None, ())),  # microbatches of four examples are not cut by eight
    ],
    ids=str,
)
def test_constraints_are_kept_microbatch_by_microbatch(spec: Any, layout: Any) -> None:
    function = step_with(lambda h: with_sharding_constraint(h, on(*spec)))
    step = parallel(function, num_microbatches=4)
    found = asked_layouts(step, make_state(), make_batch())
    assert len(found) == 2  # the constraint and its transpose, in the loop
    for one in found:
        assert all(asked in (None, axes) for asked, axes in zip(layout, one.dims, strict=True))
    assert str(step.plan(make_state(), make_batch()).mesh) == "rows=2 × columns=4"
    same(step(make_state(), make_batch()), jax.jit(function)(make_state(), make_batch()))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("constrain", "said"),
    [
        (lambda h: with_sharding_constraint(h, on(("columns", "rows"))), r"write \('rows', 'columns'\)"),
        (lambda h: with_sharding_constraint(h[:, :6], on(None, "columns")) @ jnp.ones((6, 64)), r"\(16, 6\) does not"),
    ],
    ids=["order", "does not divide"],
)
def test_what_can_never_be_met_is_refused_in_any_number_of_microbatches(
    constrain: Callable[[jax.Array], jax.Array], said: str, count: int
) -> None:
    with pytest.raises(PlanError, match=rf"{HERE}:\d+: P\(.*{said}[\s\S]*user_shardings=\"ignore\""):
        parallel(step_with(constrain), num_microbatches=count).plan(make_state(), make_batch())
