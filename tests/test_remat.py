"""Is a step whose layers compute again the same step, does it keep what is said, and is the choice of layers the best one?"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import _compat
from autopar.cluster import Cluster
from autopar.cost_model.hlo import memory_bytes
from autopar.errors import BudgetError, PlanError
from autopar.graph.build import build_graph
from autopar.graph.ir import Graph, Operator, Phase
from autopar.graph.roles import Role, Roles, infer_roles
from autopar.graph.tracing import TracedProgram, trace
from autopar.inter_op.remat import Rematerialising
from autopar.plan import LayerRemat, Remat
from autopar.schedule.instructions import Part
from autopar.subjects import rematerialised, rematerialising
from benchmarks.models import FAMILIES, Model, build
from benchmarks.remat import gpt
from examples.gpt.model import GPTConfig
from tests.test_correctness import STEPS, wrong_leaves
from tests.toy_runs import eight_slow_devices, precision, reference, refuses_edited_plan, run

SOME = ("mlp_nnx", "unet", "gpt", "gpt_scan")


# ----------------------------------------------------------------------------------------------------- the rewriting


@dataclass(frozen=True)
class Traced:
    """A step, and what its layers may compute again."""

    graph: Graph
    roles: Roles
    forms: Rematerialising

    @classmethod
    def of(cls, program: TracedProgram, roles: Roles) -> Traced:
        graph = build_graph(program.jaxpr, platform="cuda")
        return cls(graph, roles, Rematerialising(program, graph, roles.leaves(Role.BATCH), roles.state_pairs))


@functools.cache
def forms_of(name: str) -> tuple[Traced, Rematerialising]:
    model = build(name)
    program = trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {})
    traced = Traced.of(program, infer_roles(program))
    return traced, traced.forms


def choices(forms: Rematerialising, seed: int) -> list[LayerRemat]:
    """Every layer alike, and a mixture."""
    mixed = random.Random(seed).choices(tuple(Remat), k=len(forms.starts))
    return [*map(forms.all, (Remat.DOTS, Remat.FULL)), forms.all(Remat.NONE).with_kinds(mixed)]


def read_backward(graph: Graph) -> list[int]:
    """Sizes of the values that operators of the forward pass make and those of the backward pass read."""
    forward = {v for o in graph.operators if o.phase is Phase.FORWARD for v in o.results}
    read = {v for o in graph.operators if o.phase is Phase.BACKWARD for v in o.operands if v in forward}
    return sorted(graph.values[value].size_bytes for value in read if value is not None)


def products_flops(operator: Operator) -> float:
    """FLOPs of the matrix products in an operator or its bodies."""
    if operator.primitive == "dot_general":
        return operator.flops
    return sum(products_flops(inner) * body.trips for body in operator.bodies for inner in body.operators)


@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(n, marks=pytest.mark.verify) for n in FAMILIES if n not in SOME)]
)
def test_what_is_kept_and_repeated_is_what_was_said(name: str) -> None:
    """Kept values and repeated matrix products are told before the program is written; here they are read off it."""
    traced, forms = forms_of(name)
    for chosen in choices(forms, seed=len(name)):
        layers = range(len(chosen.kinds))
        kept = [value for layer in layers for value in forms.kept(chosen, layer)]
        written = Traced.of(forms.program(chosen), traced.roles)
        assert sorted(value.size_bytes for value in set(kept)) == read_backward(written.graph)
        assert written.forms.num_positions == len(forms.surviving(chosen))
        said = sum(products_flops(one) * times for layer in layers for one, times in forms.repeated(chosen, layer))
        assert (
            sum(map(products_flops, written.graph.operators)) == sum(map(products_flops, traced.graph.operators)) + said
        )


def test_a_loss_alone_has_nothing_to_compute_again() -> None:
    """Without a backward pass there is one layer, and demanding copies changes nothing."""
    model = build("mlp_nnx")
    batch = model.abstract_batch()
    step = autopar.parallelize(
        lambda state, batch: (state, model.train_step(state, batch)[1]["loss"]),
        remat="full",
        cluster=eight_slow_devices(),
    )
    plan = step.plan(model.abstract_state(), batch)
    assert plan.num_microbatches == 1


# ------------------------------------------------------------------------------------------------------ whole steps


@dataclass(frozen=True)
class Row:
    """One model with one choice for every layer; one stage has no schedule."""

    model: str
    remat: Remat
    stages: int
    count: int
    schedule: str | None

    def __str__(self) -> str:
        return f"{self.model}-{self.remat.value}-{self.stages}-{self.count}-{self.schedule}"


ROWS = (
    Row("mlp_nnx", Remat.FULL, 2, 4, "zb_h1"),
    Row("unet", Remat.DOTS, 2, 2, "1f1b"),
    Row("mlp_nnx", Remat.FULL, 1, 1, None),
)
MESH_SHAPES = {1: (2, 4), 2: (2, 2), 4: (2, 1)}
MICROBATCHES = dict.fromkeys(FAMILIES, 4) | {"long_context": 2}  # as many as its toy has examples
PRODUCT = (
    Row("llama_nnx", Remat.FULL, 1, 1, None),
    *(
        Row(model, remat, stages, MICROBATCHES[model], schedule)
        for model in FAMILIES
        if model not in ("wide_resnet", "two_tower")  # whose batches stay whole
        for remat in (Remat.DOTS, Remat.FULL)
        for stages, schedule in ((1, None), (2, "1f1b"), (2, "zb_h1"), (4, "gpipe"))
        if Row(model, remat, stages, MICROBATCHES[model], schedule) not in ROWS
    ),
)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row.stages == 1 and row in ROWS else pytest.mark.verify)
        for row in (*ROWS, *PRODUCT)
    ],
    ids=str,
)
def test_the_same_numbers(row: Row) -> None:
    """Ten steps in float64; in stages the default run has a loop over layers, in :mod:`tests.test_remat_loops`."""
    expected = reference(row.model, jnp.float64, STEPS)
    with precision(jnp.float64):
        model = build(row.model, dtype=jnp.float64)
        step = autopar.parallelize(
            model.train_step,
            remat=row.remat,
            stages=row.stages,
            schedule=row.schedule,
            num_microbatches=row.count,
            mesh_shape=MESH_SHAPES[row.stages],
            cluster=eight_slow_devices(),
        )
        got = run(model, step, step.init(model.make_state, model.abstract_batch()), STEPS)
    assert step.last.plan.remat.is_any and set(step.last.plan.remat.kinds) == {row.remat}
    assert wrong_leaves(expected.state, got.state) == {}
    for ours, theirs in zip(got.metrics, expected.metrics, strict=True):
        assert wrong_leaves(theirs, ours) == {}


@pytest.mark.verify
def test_passes_of_stages_as_compiled() -> None:
    """The forward pass of a stage hands less to its backward pass, which has the matrix products of both."""
    model = build("mlp_nnx")
    made = {}
    for kind in (Remat.NONE, Remat.FULL):
        step = autopar.parallelize(
            model.train_step, remat=kind, stages=[[0], [1]], num_microbatches=4, cluster=eight_slow_devices()
        )
        step(model.make_state(), model.make_batch(model.batch_size))
        executor = step.last.executor
        sizes, texts = executor.memory_analysis(), {key: one.as_text() for key, one in executor.executables.items()}
        made[kind] = (
            sum(
                one.output_size_in_bytes
                for (stage, part, _), one in sizes.items()
                if (stage, part) == (0, Part.FORWARD)
            ),
            *(
                sum(text.count(" dot(") for (stage, of, _), text in texts.items() if (stage, of) == (0, part))
                for part in (Part.FORWARD, Part.BACKWARD)
            ),
        )
    kept, forward, backward = made[Remat.NONE]
    kept_lean, forward_lean, backward_lean = made[Remat.FULL]
    assert kept_lean < kept / 5
    assert forward_lean == forward
    assert backward < backward_lean <= backward + forward


# -------------------------------------------------------------------------------------------------------- the choice


def deep_gpt(layers: int) -> Model:
    """Residuals weigh more than the state."""
    config = GPTConfig(512, 256, layers, heads=4, sequence=64, dtype=jnp.float32, param_dtype=jnp.float32)
    return gpt(config, examples=64)


def deep_perceptron(layers: int) -> Model:
    """The same of blocks with a tenth of the operators, so that it is planned in a fraction of the time."""
    width = 64

    def make_state() -> Any:
        keys = jax.random.split(jax.random.key(0), layers)
        return [{"up": jax.random.normal(k, (width, 4 * width)), "down": jnp.zeros((4 * width, width))} for k in keys]

    def train_step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> jax.Array:
            x = batch["x"]
            for block in state:
                x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
            return jnp.mean((x - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, state, gradients), {"loss": value}

    def make_batch(rows: int) -> Any:
        return {"x": np.ones((rows, width), np.float32), "y": np.zeros((rows, width), np.float32)}

    return Model("perceptron", make_state, train_step, make_batch, 1 << 16)


DEEP = [
    pytest.param(deep_perceptron, id="perceptron"),
    pytest.param(deep_gpt, id="gpt", marks=pytest.mark.verify),
]


def gpus(number: int) -> Cluster:
    return Cluster.preset("p3.16xlarge", hosts=1).part(tuple(range(number)))


Deep = Callable[[int], Model]


def planned(model: Model, cluster: Cluster, **options: Any) -> autopar.Plan:
    step = autopar.parallelize(model.train_step, cluster=cluster, **options)
    return step.plan(model.abstract_state(), model.abstract_batch())


WHOLE = {"method": "intra_op", "num_microbatches": 1}
"""One mesh, the batch at once, so that memory leaves nothing else to choose."""


@pytest.mark.parametrize("deep", DEEP)
@pytest.mark.parametrize(
    ("layers", "share"), [(2, 0.4), *(pytest.param(4, share, marks=pytest.mark.verify) for share in (0.25, 0.5, 0.75))]
)
def test_the_best_of_all_mixtures(deep: Deep, layers: int, share: float) -> None:
    """Every choice for every layer is planned on one device; the search's is within one per cent of the best."""
    model, cluster = deep(layers), gpus(1)
    most, least = (planned(model, cluster, remat=kind, memory_per_device=1e15, **WHOLE) for kind in ("none", "full"))
    budget_bytes = least.peak_bytes + share * (most.peak_bytes - least.peak_bytes)
    found = planned(model, cluster, memory_per_device=budget_bytes, **WHOLE)
    assert found.remat.is_any and found.peak_bytes <= budget_bytes

    step = autopar.parallelize(model.train_step, cluster=cluster, memory_per_device=budget_bytes, **WHOLE)
    written = step.with_options(remat="none", memory_per_device=1e15).records(
        model.abstract_state(), model.abstract_batch()
    )[0]
    every = rematerialising(written).all(Remat.NONE)
    seconds = []
    for kinds in itertools.product(Remat, repeat=len(every.starts)):
        one = rematerialised(written, every.with_kinds(kinds), "cuda")
        fixed = step.with_options(remat="none")
        try:
            seconds.append(plan_as_it_is(fixed, one, cluster).step_seconds)
        except BudgetError:
            continue
    assert min(seconds) * (1 - 1e-9) <= found.step_seconds <= 1.01 * min(seconds)


def test_what_a_layer_is_thought_to_keep_is_what_it_costs_memory() -> None:
    """Of a GELU the backward pass reads a dozen arrays, which are made again of the product before it; the knapsack must know."""
    model, cluster = deep_perceptron(4), gpus(1)
    step = autopar.parallelize(model.train_step, cluster=cluster, memory_per_device=1e15, remat="none", **WHOLE)
    written = step.records(model.abstract_state(), model.abstract_batch())[0]
    forms = rematerialising(written)
    nothing, layer = forms.all(Remat.NONE), 1
    for kind in (Remat.DOTS, Remat.FULL):
        chosen = nothing.with_kinds(
            [kind if position == layer else Remat.NONE for position in range(len(nothing.kinds))]
        )
        plans = [
            plan_as_it_is(step.with_options(), rematerialised(written, one, "cuda"), cluster)
            for one in (nothing, chosen)
        ]
        spared_bytes = plans[0].peak_bytes - plans[1].peak_bytes
        foretold = forms.cost(nothing, layer).kept_bytes - forms.cost(chosen, layer).kept_bytes
        assert foretold == pytest.approx(spared_bytes, rel=0.15)


def plan_as_it_is(step: Any, one: Any, cluster: Cluster) -> autopar.Plan:
    """The plan of a step that was rewritten already."""
    return step.records_of(dataclasses.replace(one, written=None), cluster=cluster)[1]


@pytest.mark.parametrize("deep", DEEP)
def test_it_is_declined_where_memory_is_no_limit_and_where_the_user_says(deep: Deep) -> None:
    model, cluster = deep(2), gpus(1)
    assert planned(model, cluster, **WHOLE).remat == LayerRemat()
    squeezed = 0.7 * planned(model, cluster, **WHOLE).peak_bytes
    assert planned(model, cluster, memory_per_device=squeezed, **WHOLE).remat.is_any
    with pytest.raises(BudgetError):
        planned(model, cluster, memory_per_device=squeezed, remat="none", **WHOLE)
    with pytest.raises(BudgetError, match="With every layer computed again") as caught:
        planned(model, cluster, memory_per_device=squeezed / 4, **WHOLE)
    assert caught.value.needed_bytes > squeezed / 4
    # Microbatches cost next to nothing here.
    assert not planned(model, cluster, memory_per_device=squeezed, method="intra_op").remat.is_any


def test_on_one_mesh_of_cpus_it_is_chosen_where_barriers_are_kept() -> None:
    """And there it saves memory; where XLA:CPU drops them, all work would be done once whatever the plan says."""
    model, cluster = deep_perceptron(4), eight_slow_devices()
    step = autopar.parallelize(model.train_step, cluster=cluster, **WHOLE)
    state, batch = model.abstract_state(), model.abstract_batch()
    kept = step.compile(state, batch)
    squeezed = step.with_options(memory_per_device=0.7 * kept.plan.peak_bytes)
    if not _compat.cpu_keeps_barriers():
        with pytest.raises(BudgetError):
            squeezed.plan(state, batch)
        return
    lean = squeezed.compile(state, batch)
    assert lean.plan.remat.is_any
    assert memory_bytes(lean).total < 0.7 * memory_bytes(kept).total


@pytest.mark.parametrize("deep", DEEP)
@pytest.mark.parametrize("layers", [2, pytest.param(6, marks=pytest.mark.verify)])
def test_stages_are_relieved_one_by_one(deep: Deep, layers: int) -> None:
    """The first stage of 1f1b has most in flight, so it computes most again."""
    model, cluster = deep(layers), gpus(2)
    options = {"stages": [[0], [1]], "num_microbatches": 4, "schedule": "1f1b"}
    most, least = (planned(model, cluster, remat=kind, memory_per_device=1e15, **options) for kind in ("none", "full"))
    budget_bytes = (most.peak_bytes + least.peak_bytes) / 2
    found = planned(model, cluster, memory_per_device=budget_bytes, **options)
    assert found.peak_bytes <= budget_bytes
    assert most.step_seconds < found.step_seconds < least.step_seconds
    kinds = [kind is not Remat.NONE for kind in found.remat.kinds]
    assert kinds[0] and not kinds[-1]


@pytest.mark.verify
def test_plans_are_files_and_run_again(tmp_path: Any) -> None:
    model = build("mlp_nnx")
    step = autopar.parallelize(model.train_step, remat="dots", cluster=eight_slow_devices())
    state, batch = model.make_state(), model.make_batch(model.batch_size)
    plan = step.plan(state, batch)
    plan.save(tmp_path / "plan.json")
    again = autopar.parallelize(model.train_step, cluster=eight_slow_devices())
    again.use(autopar.Plan.load(tmp_path / "plan.json"))
    _, metrics = again(state, batch)
    assert again.last.plan == plan
    assert np.isfinite(float(metrics["loss"]))
    assert "computed again in the backward pass" in str(autopar.explain(again))


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        ({"starts": [0, 3], "kinds": ["full"]}, "1 choices for the 2 layers of starts"),
        ({"starts": [1], "kinds": ["full"]}, "do not ascend from 0"),
        ({"starts": [0, 5, 5], "kinds": ["full", "none", "dots"]}, "do not ascend from 0"),
        ({"starts": [0], "kinds": ["half"]}, "Invalid enum value 'half'"),
        ({"starts": [0, 10_000], "kinds": ["none", "full"]}, "begins before operator 10000 of the forward pass"),
    ],
)
def test_files_that_make_no_sense(remat: dict[str, Any], message: str, tmp_path: Any) -> None:
    refuses_edited_plan(lambda plan: plan.update(remat=remat), message, tmp_path)


def test_what_no_step_has_is_refused() -> None:
    with pytest.raises(PlanError, match='remat=\'half\' is unknown; say "none" or "dots" or "full"'):
        autopar.parallelize(lambda state, batch: state, remat="half")


@pytest.mark.parametrize("deep", DEEP)
def test_weights_that_wait_longer_pay_most_where_layers_compute_again(deep: Deep) -> None:
    """A backward pass that computes again takes longer than the gradients of weights, so putting these off further saves more."""
    model, cluster = deep(2), gpus(2)
    options = {"stages": 2, "num_microbatches": 8}
    saved = {}
    for kind in ("none", "full"):
        h1, h2 = (planned(model, cluster, remat=kind, schedule=name, **options) for name in ("zb_h1", "zb_h2"))
        assert h2.peak_bytes > h1.peak_bytes
        saved[kind] = h1.step_seconds - h2.step_seconds
    assert 0 < 2 * saved["none"] < saved["full"]
