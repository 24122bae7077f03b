"""Models as pipelines, over schedules, numbers of stages and numbers of microbatches: the numbers of the undecorated step.

Ten steps in float64, every leaf and metric held as :mod:`tests.test_correctness` does.  The default run takes rows in which
every two of schedule, stages and microbatches meet, mostly of a small model; ``verify`` takes those in which they meet a U-Net
too, and the whole product, of all families.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import PlanError
from autopar.plan import Schedule
from benchmarks.models import FAMILIES, Model, build
from examples.gpt.model import GPT, GPTConfig
from tests.test_correctness import STEPS, wrong_leaves
from tests.toy_runs import Run, eight_slow_devices, precision, run

pytestmark = pytest.mark.usefixtures("programs_kept")

COUPLED = ("wide_resnet", "two_tower")
"""Models whose examples depend on each other, so that their batch stays whole."""
EXAMPLES = {"long_context": 2}
"""In the batch of models that have fewer than there may be microbatches."""
MOST_STAGES = {"gpt_scan": 3}
"""Models most of which is one loop."""

SEQUENCE, VOCABULARY = 16, 128


# ------------------------------------------------------------------------------------------------ models of this file


def small_gpt(optimizer: optax.GradientTransformation, name: str) -> Model:
    """A GPT whose loss is the mean over the positions that a mask names, as padded text is trained."""
    config = GPTConfig(VOCABULARY, 64, 2, heads=8, sequence=SEQUENCE, dtype=jnp.float64, param_dtype=jnp.float64)

    def make_state() -> Any:
        params = GPT(config).init(jax.random.key(0), jnp.zeros((1, SEQUENCE), jnp.int32))["params"]
        return {"params": params, "moments": optimizer.init(params)}

    def train_step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = GPT(config).apply({"params": params}, batch["tokens"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, {"loss": value}

    def make_batch(rows: int) -> Any:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, VOCABULARY, (rows, SEQUENCE + 1), dtype=np.int32)
        lengths = rng.integers(1, SEQUENCE + 1, (rows, 1))
        mask = (np.arange(SEQUENCE) < lengths).astype(np.int32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}

    return Model(name, make_state, train_step, make_batch, batch_size=8)


def masked_gpt() -> Model:
    return small_gpt(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3)), "masked GPT")


def gpt_with_multi_steps() -> Model:
    # Left alone it accumulates in float32 and rounds twice, differently wherever XLA contracts products and sums.
    steps = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=3, accumulator_dtype=jnp.float64)
    return small_gpt(steps.gradient_transformation(), "MultiSteps")


def skipping() -> Model:
    """A small model that has what is hard to cut: each layer of its second half reads one of the first, as in a U-Net,
    the first kernel is the last one too, and gradients are clipped by the norm of all."""
    width, layers = 32, 4
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))

    def make_state() -> Any:
        keys = jax.random.split(jax.random.key(0), layers)
        params = {
            f"layer{k}": {"kernel": jax.random.normal(key, (width, width)) / 6, "bias": jnp.zeros(width)}
            for k, key in enumerate(keys)
        }
        return {"params": params, "moments": optimizer.init(params)}

    def loss_of(params: Any, batch: Any) -> jax.Array:
        x, kept = batch["x"], []
        for k in range(layers):
            x = x if k < layers // 2 else x + kept[layers - 1 - k]
            x = jnp.tanh(x @ params[f"layer{k}"]["kernel"] + params[f"layer{k}"]["bias"])
            kept.append(x)
        return jnp.mean((x @ params["layer0"]["kernel"].T - batch["y"]) ** 2)

    def train_step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, {"loss": value}

    def make_batch(rows: int) -> Any:
        rng = np.random.default_rng(0)
        return {name: rng.normal(size=(rows, width)) for name in ("x", "y")}

    return Model("skipping", make_state, train_step, make_batch, batch_size=16)


MODELS: Mapping[str, Callable[[], Model]] = {
    **{name: functools.partial(build, name, dtype=jnp.float64) for name in FAMILIES},
    "gpt_masked": masked_gpt,
    "gpt_multi_steps": gpt_with_multi_steps,
    "skipping": skipping,
}
SECONDS = {"skipping": 1, "unet": 4}
"""Met by the sample, with about what a row takes; values skip from stage to stage in both.

The others are in the verify product only: the default run has minutes.
"""


# ----------------------------------------------------------------------------------------------------------- the product


@dataclasses.dataclass(frozen=True)
class Row:
    """One model in so many stages and microbatches; one stage has no schedule."""

    model: str
    stages: int
    count: int
    schedule: Schedule

    @property
    def pairs(self) -> frozenset[tuple[Any, ...]]:
        """Every two choices that meet here, by name: two stages are not two microbatches."""
        return frozenset(itertools.combinations(vars(self).items(), 2))

    def __str__(self) -> str:
        return f"{self.model}-{self.stages}-{self.count}-{self.schedule.value}"


PIPELINED = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.EAGER_ONE_F_ONE_B)
DEALT = (Schedule.INTERLEAVED_ONE_F_ONE_B,)
SPLIT = (Schedule.ZERO_BUBBLE_H1, Schedule.ZERO_BUBBLE_H2)


def product(models: Iterable[str], schedules: Mapping[int, Sequence[Schedule]]) -> list[Row]:
    """Every row, in an order that keeps a model's rows together; ``schedules`` are by the number of stages."""
    return [
        Row(model, stages, count, schedule)
        for model in models
        for stages in schedules
        for count in (1, 2, 4, 8)
        for schedule in schedules[stages]
    ]


def covering(rows: Sequence[Row], seed: int) -> list[Row]:
    """Few rows in which every pair of the product meets: always the row that has most of what is missing in a second."""
    shuffled = random.Random(seed).sample(rows, len(rows))
    missing = frozenset[tuple[Any, ...]]().union(*(row.pairs for row in rows))
    chosen = []
    while missing:
        best = max(shuffled, key=lambda row: len(row.pairs & missing) / SECONDS.get(row.model, 1))
        chosen.append(best)
        missing -= best.pairs
    return sorted(chosen, key=str)


@functools.cache
def reference(name: str) -> Run:
    """The undecorated step under ``jax.jit``."""
    with precision(jnp.float64):
        model = MODELS[name]()
        return run(model, jax.jit(model.train_step), jax.jit(model.make_state)(), STEPS)


MESH_SHAPES = {1: (2, 4), 2: (2, 2), 4: (2, 1)}
"""By the number of stages; what is met most often has one axis, which takes half as long to plan."""
DEALT_MESH_SHAPE = (2, 2)
"""Of four stages on two meshes."""


def fixed_mesh(model: Model, row: Row) -> Any:
    """On meshes of one shape: what cuts and meshes are found decides on seconds, not on numbers, and takes most of the time."""
    shape = DEALT_MESH_SHAPE if row.schedule in DEALT else MESH_SHAPES[row.stages]
    return pipeline(model, row).with_options(mesh_shape=(math.prod(shape),) if row.model == "skipping" else shape)


ALONE: Mapping[int, Sequence[Schedule]] = {1: (Schedule.SINGLE,), 2: PIPELINED, 4: PIPELINED}
"""Every stage on a mesh of its own."""


def pipeline(model: Model, row: Row) -> Any:
    """What a user writes who leaves cuts and meshes to the planner."""
    schedule = None if row.stages == 1 else row.schedule
    return autopar.parallelize(
        model.train_step,
        stages=row.stages,
        num_microbatches=row.count,
        schedule=schedule,
        cluster=eight_slow_devices(),
    )


def check(row: Row, step_of: Callable[[Model, Row], Any] = pipeline) -> None:
    expected = reference(row.model)
    with precision(jnp.float64):
        model = MODELS[row.model]()
        step = step_of(model, row)
        got = run(model, step, step.init(model.make_state, model.abstract_batch()), STEPS)
    plan = step.last.plan
    assert (len(plan.stages), plan.num_microbatches, plan.schedule) == (row.stages, row.count, row.schedule)
    assert wrong_leaves(expected.state, got.state) == {}
    for ours, theirs in zip(got.metrics, expected.metrics, strict=True):
        assert wrong_leaves(theirs, ours) == {}


def refusal_of(row: Row) -> str | None:
    """What is said of a model that cannot be cut so."""
    if row.count > (examples := EXAMPLES.get(row.model, row.count)):
        return f"num_microbatches={row.count} does not divide the batch of {examples} examples"
    if row.count > 1 and row.model in COUPLED:
        return r"cannot be cut into microbatches: \w+ at .*\.py:\d+"
    if row.stages > MOST_STAGES.get(row.model, row.stages):
        return rf"can be cut into {MOST_STAGES[row.model]} layers, too few for {row.stages} stages"
    return None


def check_or_refusal(row: Row) -> None:
    """In some rows the planner chooses cuts and meshes itself; its search in the others would be much the same."""
    searched_count = 1 if row.model in COUPLED else 2
    is_free = row.schedule in (Schedule.SINGLE, Schedule.ONE_F_ONE_B) and row.count == searched_count
    step_of = pipeline if is_free else fixed_mesh
    refusal = refusal_of(row)
    if refusal is None:
        check(row, step_of)
        return
    with pytest.raises(PlanError, match=refusal):
        check(row, step_of)


SAMPLE = covering(product(SECONDS, ALONE), seed=0)


def by_default(row: Row) -> bool:
    """Whether the default run takes a row of the sample: the small model's, and where other choices meet in no row of that."""

    def choices(one: Row) -> set[tuple[Any, ...]]:
        return {pair for pair in one.pairs if pair[0][0] != "model"}

    small = [one for one in SAMPLE if one.model == "skipping"]
    return row in small or not choices(row) <= set().union(*map(choices, small))


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if by_default(row) else pytest.mark.verify) for row in SAMPLE], ids=str
)
def test_every_pair_of_choices(row: Row) -> None:
    check(row, fixed_mesh)


@pytest.mark.verify
@pytest.mark.parametrize(
    "row", product(MODELS, {**ALONE, 2: (*PIPELINED, *SPLIT), 4: (*PIPELINED, *DEALT, *SPLIT)}), ids=str
)
def test_every_model_schedule_and_size(row: Row) -> None:
    check_or_refusal(row)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.verify) for row in (Row("gpt", 4, 4, *DEALT), Row("unet", 4, 2, *DEALT))],
    ids=str,
)
def test_stages_that_are_dealt_round(row: Row) -> None:
    """A tied embedding and a clipped norm; skip connections from stage to stage on one mesh.

    The default run deals a smaller model round, in :mod:`tests.test_pipeline`.
    """
    check(row, fixed_mesh)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(Row("gpt", 4, 4, SPLIT[0]), marks=pytest.mark.verify),
        pytest.param(Row("unet", 2, 4, SPLIT[0]), marks=pytest.mark.verify),
        Row("unet", 2, 4, SPLIT[1]),
    ],
    ids=str,
)
def test_gradients_of_weights_apart(row: Row) -> None:
    """By ``zb_h1`` the default run has a smaller model, in :mod:`tests.test_pipeline`."""
    check(row, fixed_mesh)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(Row("gpt_scan", 4, 4, Schedule.ONE_F_ONE_B), marks=pytest.mark.verify),
        Row("wide_resnet", 2, 2, Schedule.ONE_F_ONE_B),
    ],
    ids=str,
)
def test_what_cannot_be_cut_is_refused(row: Row) -> None:
    refusal = refusal_of(row)
    assert refusal is not None
    model = build(row.model)
    with pytest.raises(PlanError, match=refusal):
        pipeline(model, row).plan(model.abstract_state(), model.abstract_batch())


def test_the_sample_covers_every_pair() -> None:
    rows = product(("gpt", "gpt2", "gpt_multi_steps", "unet"), ALONE)
    sample = covering(rows, seed=0)
    assert frozenset().union(*(row.pairs for row in sample)) == frozenset().union(*(row.pairs for row in rows))
    assert len(sample) < len(rows) / 5
