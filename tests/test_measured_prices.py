"""Prices that only a profile knows: convolutions by family, and how devices that share cores wait for one another."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import autopar
from autopar.bench import Bench
from autopar.cluster import Cluster
from autopar.convolution_shapes import ConvolutionFamily, ConvolutionShape
from autopar.cost_model.hlo import step_seconds
from autopar.cost_model.hlo_parser import parse_module
from autopar.cost_model.hlo_work import shape_of_convolution
from autopar.cost_model.predict import run_costs
from autopar.cost_model.waits import WorkSinceAxes, WorkSinceGroups
from autopar.curves import Curve
from autopar.efforts import FULL
from autopar.graph.flops import flops_of
from autopar.graph.fusion import fuse
from autopar.graph.ir import Phase
from autopar.looped_convolutions import LoopedConvolutions
from autopar.measured_collectives import Worked, collective_seconds
from autopar.measured_convolutions import CONVOLUTIONS, Convolution, looped_convolution
from autopar.measured_waits import rising, waiting_seconds, waits_of
from autopar.profile import ConvolutionCurve, Profile, WaitCurve
from autopar.profile_file import load_profile, save_profile
from autopar.timing import LEAST_SECONDS, Timer
from tests.test_profile import profile_of

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
CONVOLUTION_CURVES = tuple(
    ConvolutionCurve("float32", family, Curve(((1e3, 1e-3 * (number + 1)), (1e6, 1.0 * (number + 1)))))
    for number, family in enumerate(
        reversed(ConvolutionFamily)
    )  # few features are dear, so nobody cuts features for them
)
ALWAYS = 0.25
"""Seconds that every collective of :data:`EVEN` waits."""
EVEN = tuple(WaitCurve(size, Curve(((1e-6, ALWAYS), (1e3, ALWAYS)))) for size in (2, 4, 8))
GROWING = tuple(WaitCurve(size, Curve(((1e-6, 1e-6), (1.0, 1.0)))) for size in (2, 4, 8))


LOOPED = ((16.0, 32.0, 4e-9), (16.0, 128.0, 8e-9), (64.0, 32.0, 2e-9), (64.0, 128.0, 6e-9))
"""Features of images and of results, seconds by the FLOP."""
EVERY_KIND = (*CONVOLUTIONS, looped_convolution(16, 64))


def test_a_profile_with_all_of_it_survives_its_file(tmp_path: Any) -> None:
    looped = LoopedConvolutions("float32", LOOPED)
    full = profile_of(convolutions=CONVOLUTION_CURVES, waits=GROWING, looped_convolutions=(looped,))
    save_profile(full, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == full


# -------------------------------------------------------------------------------------------------------- convolutions


def shape_of_equation(equation: Any) -> ConvolutionShape:
    numbers = equation.params["dimension_numbers"]
    image, window = (var.aval.shape for var in equation.invars)
    result = equation.outvars[0].aval.shape
    return ConvolutionShape(
        window_positions=math.prod(window[dim] for dim in numbers.rhs_spec[2:]),
        image_positions=math.prod(image[dim] for dim in numbers.lhs_spec[2:]),
        result_positions=math.prod(result[dim] for dim in numbers.out_spec[2:]),
        image_features=image[numbers.lhs_spec[1]],
        result_features=result[numbers.out_spec[1]],
        is_dilated=math.prod(equation.params["lhs_dilation"]) > 1,
    )


def test_every_family_is_measured_once() -> None:
    assert sorted(one.family.value for one in EVERY_KIND) == sorted(family.value for family in ConvolutionFamily)


@pytest.mark.parametrize("convolution", EVERY_KIND, ids=lambda one: one.family.value)
def test_measured_convolutions_are_of_their_family_and_of_so_many_flops(convolution: Convolution) -> None:
    for side in FULL.image_sides:
        arguments = (jax.ShapeDtypeStruct(shape, "float32") for shape in convolution.shapes(side))
        equations = [
            equation
            for equation in jax.make_jaxpr(convolution.apply)(*arguments).eqns
            if equation.primitive.name == "conv_general_dilated"
        ]
        assert len(equations) == 1
        assert shape_of_equation(equations[0]).family is convolution.family
        assert flops_of(equations[0]) == convolution.flops(side)


def convolutional_step(weights: tuple[jax.Array, ...], images: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """A narrow layer, a wide one, and a transposed one, with the gradients of all their weights."""

    def loss_of(weights: tuple[jax.Array, ...]) -> jax.Array:
        narrow, wide, up = weights
        layer = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=DIMENSIONS)
        x = layer(layer(images, narrow), wide)
        return jnp.mean(lax.conv_transpose(x, up, (2, 2), "SAME", dimension_numbers=DIMENSIONS) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return tuple(w - 0.1 * g for w, g in zip(weights, gradients, strict=True)), loss


WEIGHTS = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 3, 8, 16), (3, 3, 16, 32), (2, 2, 32, 32)))
IMAGES = jax.ShapeDtypeStruct((16, 16, 16, 8), "float32")
FAMILIES = {
    ConvolutionFamily.FEW_FEATURES: 1,  # the narrow layer, 8 where vectors hold 16; no gradient of the images
    ConvolutionFamily.MANY_FEATURES: 3,  # the wide layer, the gradient of its input, that of the transposed layer's
    ConvolutionFamily.DILATED: 1,
    ConvolutionFamily.LARGE_FEW_FEATURES: 1,
    ConvolutionFamily.LARGE_MANY_FEATURES: 1,
    ConvolutionFamily.LARGE_DILATED: 1,
}


def test_layers_and_their_gradients_are_priced_by_their_families() -> None:
    cluster = Cluster.local(profile=profile_of(convolutions=CONVOLUTION_CURVES))
    compiled = autopar.parallelize(convolutional_step, cluster=cluster, method="data_parallel").compile(WEIGHTS, IMAGES)
    curves = {one.family: one.curve for one in CONVOLUTION_CURVES}
    runs = run_costs(compiled.program, fuse(compiled.subject.graph), cluster)
    found = []
    for run in runs:
        if run.operator.primitive == "conv_general_dilated":
            found += [
                family
                for family, curve in curves.items()
                if run.seconds == curve.at(run.flops * (1.5 if family is ConvolutionFamily.FEW_FEATURES else 1))
            ]
    assert Counter(found) == FAMILIES


def test_pieces_of_a_wide_layer_may_be_narrow() -> None:
    """Cut eightfold, 32 features are four on each device."""
    few, many = ConvolutionFamily.FEW_FEATURES, ConvolutionFamily.MANY_FEATURES
    curves = {few: Curve(((1e6, 1e-3),)), many: Curve(((1e6, 2e-3),))}
    profile = profile_of(convolutions=tuple(ConvolutionCurve("float32", *one) for one in curves.items()))
    layer = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=DIMENSIONS)
    cut = PartitionSpec(None, None, None, "data")
    cluster = Cluster.local(profile=profile)
    made = autopar.parallelize(
        lambda weights, image: layer(image, weights),
        cluster=cluster,
        mesh_shape=(8,),
        constraints={"weights": cut},
        batch_argnums=(),
    ).compile(jax.ShapeDtypeStruct((3, 3, 8, 32), "float32"), jax.ShapeDtypeStruct((1, 16, 16, 8), "float32"))
    (run,) = run_costs(made.program, fuse(made.subject.graph), cluster)
    assert run.seconds == curves[few].at(6 * run.flops)  # 8 of 16 features of the image, 4 of 16 of the result
    assert shape_of_equation(run.operator.equation).family is many


def test_pieces_of_few_features_are_priced_as_if_they_filled_vectors() -> None:
    """Two of 64 features gather all that they are sums of, as sixteen would; so do results that are sums of four numbers."""
    wide = ConvolutionShape(9, 64, 64, image_features=64, result_features=64, is_dilated=False)
    assert wide.filling == 1
    assert replace(wide, result_features=2).filling == 8
    assert replace(wide, image_features=2, window_positions=2).filling == 4
    assert replace(wide, image_features=2).filling == 1  # 18 numbers
    few = replace(wide, image_features=4, result_features=16)
    assert few.family is ConvolutionFamily.FEW_FEATURES
    assert few.filling == 2.5  # those of each position by themselves
    assert replace(few, window_positions=100).filling == 1  # not of a large window
    curve = Curve(((1e6, 1e-3), (1e9, 1.0)))
    profile = profile_of(convolutions=(ConvolutionCurve("float32", ConvolutionFamily.MANY_FEATURES, curve),))
    assert profile.convolution_seconds(1e7, replace(wide, result_features=2), "float32") == curve.at(8e7)


def test_gradients_of_weights_over_few_images_take_processors_as_long_as_over_many() -> None:
    """Those of few features; accelerators add the images up like all else."""
    curve = Curve(((1e6, 1e-3), (1e9, 1.0)))
    family = ConvolutionFamily.LARGE_FEW_FEATURES
    on_cpu = profile_of(convolutions=(ConvolutionCurve("float32", family, curve),))
    shape = ConvolutionShape(1024, 1024, 9, image_features=16, result_features=16, is_dilated=False)
    for images, filling in ((16, 1), (8, 1.5), (4, 2.5), (1, 8.5)):
        few = replace(shape, image_features=images)
        assert few.family is family
        assert on_cpu.convolution_seconds(1e7, few, "float32") == curve.at(filling * 1e7)
        on_gpu = replace(on_cpu, platform="gpu")
        assert on_gpu.convolution_seconds(1e7, few, "float32") == curve.at(1e7)
    wide = replace(shape, image_features=2, result_features=64)
    assert wide.filling_on_processors == wide.filling == 1


def test_families_that_an_older_profile_lacks_take_the_curves_of_their_likes() -> None:
    likes = {
        ConvolutionFamily.LARGE_POINT: ConvolutionFamily.LARGE_MANY_FEATURES,
        ConvolutionFamily.SMALL_DILATED: ConvolutionFamily.DILATED,
    }
    shapes = {
        ConvolutionFamily.LARGE_POINT: ConvolutionShape(64, 64, 1, 32, 32, is_dilated=False),
        ConvolutionFamily.SMALL_DILATED: ConvolutionShape(9, 4, 16, 32, 32, is_dilated=True),
    }
    held = {one.family: one for one in CONVOLUTION_CURVES}
    for family, shape in shapes.items():
        assert shape.family is family
        older = profile_of(convolutions=tuple(one for one in CONVOLUTION_CURVES if one.family is not family))
        assert older.convolution_seconds(1e5, shape, "float32") == held[likes[family]].curve.at(1e5)
        newer = profile_of(convolutions=CONVOLUTION_CURVES)
        assert newer.convolution_seconds(1e5, shape, "float32") == held[family].curve.at(1e5)


def test_a_convolution_that_is_loops_is_priced_by_its_features() -> None:
    """Straight over both logarithms between what was measured, flat beyond, whatever the size; else by its family's curve."""
    shape = ConvolutionShape(9, 4, 16, 16, 32, is_dilated=True)
    profile = profile_of(convolutions=CONVOLUTION_CURVES, looped_convolutions=(LoopedConvolutions("float32", LOOPED),))
    expected = {
        (16, 32): 4e-9, (16, 128): 8e-9, (64, 32): 2e-9, (64, 128): 6e-9, (16, 64): 6e-9, (32, 32): 3e-9,
        (32, 64): 5e-9, (4, 8): 4e-9, (256, 512): 6e-9, (4, 64): 6e-9, (0, 64): 6e-9,
    }  # fmt: skip
    for (image, result), seconds_per_flop in expected.items():
        piece = replace(shape, image_features=image, result_features=result)
        for flops in (1e5, 1e8):
            assert profile.convolution_seconds(flops, piece, "float32") == pytest.approx(flops * seconds_per_flop)
    large = replace(shape, image_positions=64, result_positions=256)
    without = profile_of(convolutions=CONVOLUTION_CURVES)
    assert profile.convolution_seconds(1e5, large, "float32") == without.convolution_seconds(1e5, large, "float32")
    assert profile.convolution_seconds(1e5, shape, "bfloat16") is None  # of which nothing was measured


def test_an_image_that_changed_places_with_its_window_is_recognised() -> None:
    """XLA:CPU takes a dilated image of 2 × 2 for the window of one of 3 × 3."""
    layer = partial(lax.conv_transpose, strides=(2, 2), padding="SAME", dimension_numbers=DIMENSIONS)
    image, window = jnp.zeros((16, 2, 2, 32)), jnp.zeros((3, 3, 32, 48))
    (equation,) = jax.make_jaxpr(layer)(image, window).eqns
    module = parse_module(jax.jit(layer).lower(image, window).compile().as_text())
    (shape,) = (
        shape
        for computation in module.computations.values()
        for instruction in computation.instructions
        if (shape := shape_of_convolution(instruction, computation)) is not None
    )
    assert shape == shape_of_equation(equation)
    assert shape.family is ConvolutionFamily.SMALL_DILATED


def test_families_of_compiled_convolutions_are_those_of_the_program() -> None:
    text = jax.jit(convolutional_step).lower(WEIGHTS, IMAGES).compile().as_text()
    found = Counter(
        shape.family
        for computation in parse_module(text).computations.values()
        for instruction in computation.instructions
        if (shape := shape_of_convolution(instruction, computation)) is not None
    )
    assert found == FAMILIES


# --------------------------------------------------------------------------------------------------------------- waits


def two_products(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    """Linear in the second, so that partial sums of it wait until they are one number."""
    return (jnp.tanh(x @ weights[0]) @ weights[1]).sum()


TWO = jax.ShapeDtypeStruct((64, 512), "float32"), jax.ShapeDtypeStruct((512, 64), "float32")
ROWS = jax.ShapeDtypeStruct((32, 64), "float32")


def megatron(profile: Profile) -> Any:
    """Two products, cut over their inner dimension: one all-reduce."""
    cut = {"weights/0": PartitionSpec(None, "data"), "weights/1": PartitionSpec("data", None)}
    step = autopar.parallelize(
        two_products,
        cluster=Cluster.local(profile=profile),
        mesh_shape=(8,),
        constraints=cut,
        batch_argnums=(),
    )
    return step.compile(TWO, ROWS)


def test_a_collective_waits_by_the_work_before_it() -> None:
    plain, even, growing = (megatron(profile_of(waits=waits)).plan.prediction for waits in ((), EVEN, GROWING))
    assert [use.kind for use in plain.collectives] == ["all-reduce"]
    assert even.communication_seconds - plain.communication_seconds == pytest.approx(ALWAYS)
    waited = growing.communication_seconds - plain.communication_seconds
    assert waited == pytest.approx(plain.compute_seconds, rel=0.03)  # almost all of the step's work lies before it
    assert even.compute_seconds == plain.compute_seconds


def test_waits_of_the_compiled_program_are_those_of_the_plan() -> None:
    compiled = megatron(profile_of(waits=EVEN))
    module = parse_module(compiled.as_text())
    plain, even = (
        step_seconds(module, Cluster.local(profile=profile_of(waits=waits))).communication_seconds
        for waits in ((), EVEN)
    )
    assert even - plain == pytest.approx(ALWAYS)


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2), (3, 2)])
def test_work_since_axes_met_is_that_since_their_groups_met(shape: tuple[int, ...]) -> None:
    axes = "abc"[: len(shape)]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    drawn = random.Random(math.prod(shape))
    by_axes, by_groups = WorkSinceAxes(), WorkSinceGroups(numbers.size)
    for _ in range(200):
        seconds = drawn.choice((0.0, 1.0, 2.5))
        by_axes.work(seconds)
        by_groups.work(seconds)
        over = sorted(drawn.sample(range(len(shape)), drawn.randint(1, len(shape))))
        rest = [dim for dim in range(len(shape)) if dim not in over]
        groups = numbers.transpose(*rest, *over).reshape(-1, math.prod(shape[dim] for dim in over))
        expected = by_axes.meet(tuple(axes[dim] for dim in over))
        assert by_groups.meet([tuple(map(int, group)) for group in groups]) == expected


def test_pairs_that_met_along_one_axis_still_wait_for_those_along_another() -> None:
    since = WorkSinceAxes()
    since.work(3.0)
    assert since.meet(("a",)) == 3.0
    assert since.meet(("b",)) == 3.0  # nobody has heard of these yet
    assert since.meet(("a", "b")) == since.meet(("b",)) == 0.0
    since.work(1.0)
    assert since.meet(("a", "b")) == 1.0
    alone = WorkSinceGroups(4)
    alone.work(2.0)
    assert alone.meet([(0, 1)]) == 2.0
    alone.work(1.0)
    assert alone.meet([(1, 2)]) == 3.0
    assert alone.meet([(0, 2)]) == 3.0  # the third heard of the first from the second, the first nothing of the third
    assert alone.meet([(0, 1, 2)]) == 1.0


def test_combined_collectives_wait_for_the_work_before_the_last_of_them() -> None:
    """Two gradients are summed as one, when the second is there: the wait is for all the work, and stands with the second."""

    def step(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda weights: (jnp.tanh(x @ weights[0]) @ weights[1] ** 2).sum())(weights)

    weights = tuple(jax.ShapeDtypeStruct((256, 256), "float32") for _ in range(2))
    plain, growing = (
        autopar.parallelize(
            step, cluster=Cluster.local(profile=profile_of(waits=waits)), method="data_parallel", batch_argnums=(1,)
        ).compile(weights, jax.ShapeDtypeStruct((1 << 16, 256), "float32"))
        for waits in ((), GROWING)
    )
    waited = [
        after.seconds - before.seconds
        for before, after in zip(plain.plan.prediction.collectives, growing.plan.prediction.collectives, strict=True)
    ]
    assert len(waited) == 2 and plain.as_text().count(" all-reduce(") == 1
    assert waited[0] == pytest.approx(0.0, abs=1e-12)
    assert waited[1] == pytest.approx(plain.plan.prediction.compute_seconds, rel=0.05)


def test_the_planner_counts_on_waits() -> None:
    """Where each collective waits a quarter of a second, it is cheaper to do all the work everywhere."""
    large = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((2048, 2048), (2048, 64)))

    def uses(profile: Profile) -> tuple[Any, ...]:
        step = autopar.parallelize(
            two_products, cluster=Cluster.local(profile=profile), mesh_shape=(8,), batch_argnums=()
        )
        return step.plan(large, jax.ShapeDtypeStruct((64, 2048), "float32")).prediction.collectives

    assert uses(profile_of())
    assert not uses(profile_of(waits=EVEN))


def test_a_profile_after_work_has_the_waiting_in_its_curves() -> None:
    profile = profile_of(waits=GROWING)
    after = profile.after(0.5)
    for one in profile.collectives:
        raised, soon = (find(one.kind, one.group_size) for find in (after.collective, after.soon_collective))
        assert raised is not None and soon is not None
        waited = profile.waiting_seconds(one.group_size, 0.5)
        assert raised.at(5e3) == pytest.approx(one.curve.at(5e3) + waited)
        assert soon == one.curve
    without = profile_of().after(0.5)
    assert all(without.collective(one.kind, one.group_size) == one.curve for one in without.collectives)
    assert {one.group_size for one in profile.of_part(4).waits} == {2, 4}


def test_devices_wait_no_longer_than_after_the_most_work_that_was_measured() -> None:
    """The last segment that rises is steep where what was measured after more work is noise."""
    curve = Curve(((1e-4, 1e-9), (1e-3, 5e-4), (2e-2, 1e-9)))
    profile = profile_of(waits=(WaitCurve(8, curve),))
    assert profile.waiting_seconds(8, 1.0) == profile.waiting_seconds(8, 2e-2) < 5e-4


# ------------------------------------------------------------------------------------------------------------ measuring


def test_waits_are_what_a_collective_takes_longer_than_after_the_least_work() -> None:
    found = waits_of([Worked(1e-4, 2e-4), Worked(1e-3, 5e-4), Worked(1e-2, 1e-4)])
    assert found == {1e-4: LEAST_SECONDS, 1e-3: pytest.approx(3e-4), 1e-2: LEAST_SECONDS}


def test_who_waits_for_more_others_waits_no_less() -> None:
    """After the same work, which takes each size of group its own seconds; figures that rise stay."""
    found = rising({8: {1e-4: 1.0, 2e-2: 4.0}, 2: {2e-4: 1.0, 1e-2: 9.0}, 4: {1e-4: 2.0, 1e-2: 5.0}})
    assert found == {
        2: {2e-4: 1.0, 1e-2: pytest.approx(6.0)},
        4: {1e-4: pytest.approx(1.5), 1e-2: pytest.approx(6.0)},
        8: {1e-4: pytest.approx(1.5), 2e-2: pytest.approx(6.0)},
    }


@pytest.mark.verify
def test_devices_that_share_cores_wait_longer_after_more_work() -> None:
    """An order that no noise turns round: 1.2 ms against 0.2 when it was looked up."""
    bench = Bench(jax.devices(), Timer(0.6, 5))
    found = waiting_seconds(bench, (16, 256), lambda line: None)
    assert sorted(found) == [2, 4, 8]
    after = found[8]
    little, much = sorted(after)
    assert much > 20 * little
    soon = collective_seconds(bench, autopar.cost_model.collectives.Collective.ALL_REDUCE, 8, 1024, 16)
    assert after[much] > soon


# ------------------------------------------------------------------------------------------------- copies into an order


SEQUENCES, SIDE = (32, 16), 32


def two_layers_of_the_same(weights: tuple[jax.Array, jax.Array], rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of two matrices by which the same array of three dimensions is multiplied, as of queries and keys."""

    def loss(weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        x = jnp.tanh(rows)
        return jnp.mean((x @ weights[0]) ** 2 + (x @ weights[1]) ** 3)

    return jax.grad(loss)(weights)


def test_an_operand_in_another_order_is_copied_once() -> None:
    """For the gradients XLA:CPU lays the features before the 32 times 16 rows: once, both products read it."""
    rate = 1e6
    made = autopar.parallelize(
        two_layers_of_the_same,
        cluster=Cluster.local(profile=None),
        mesh_shape=(8,),
        constraints={"rows": PartitionSpec()},
        batch_argnums=(1,),
    ).compile((jax.ShapeDtypeStruct((SIDE, SIDE), "float32"),) * 2, jax.ShapeDtypeStruct((*SEQUENCES, SIDE), "float32"))
    fusion = fuse(made.subject.graph)
    plain, priced = (
        run_costs(made.program, fusion, Cluster.local(profile=profile_of(turned_bytes_per_second=turned)))
        for turned in (None, rate)
    )
    added = [after.seconds - before.seconds for before, after in zip(plain, priced, strict=True)]
    copied = [(run.operator, seconds) for run, seconds in zip(priced, added, strict=True) if seconds]
    assert [(operator.primitive, operator.phase) for operator, _ in copied] == [("dot_general", Phase.BACKWARD)]
    assert copied[0][1] == pytest.approx(2 * 4 * math.prod(SEQUENCES) * SIDE / rate)
    reads = re.findall(r"f32\[32,512\]\S* (?:fusion|copy|transpose)\(", made.as_text())
    assert len(reads) == 1


# ------------------------------------------------------------------------------------------------------------ products


def test_a_product_reads_all_of_both_pieces() -> None:
    """Cut into rows over eight devices, each reads its own of the one and the whole of the other: as the compiled one."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w, x @ w

    w, x = jax.ShapeDtypeStruct((256, 512), "float32"), jax.ShapeDtypeStruct((64, 256), "float32")
    cluster = Cluster.local()
    compiled = autopar.parallelize(step, cluster=cluster, method="data_parallel").compile(w, x)
    (product,) = (
        run
        for run in run_costs(compiled.program, fuse(compiled.subject.graph), cluster)
        if run.operator.primitive == "dot_general"
    )
    assert product.bytes_moved == 4 * (256 * 512 + (64 * 256 + 64 * 512) / 8)
    module = parse_module(compiled.as_text())
    read = [
        computation.operand_shapes(instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "dot"
    ]
    assert [sum(shape.size_bytes for shape in shapes) for shapes in read] == [4 * (256 * 512 + 64 * 256 / 8)]
