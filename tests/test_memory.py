"""Is the memory predicted for a step what XLA:CPU's own account of the compiled step says?

The referee is ``compiled.memory_analysis()``: arguments, results and aliased bytes must agree to the byte, the total
within 15%, and it may hardly be too low.  Where a rule of the prediction is about one effect, a small program shows it.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.typing import DTypeLike

import autopar
from autopar.cluster import Cluster, Mesh
from autopar.cost_model.arrays import arrays_of
from autopar.cost_model.buffers import kernels_of
from autopar.cost_model.hlo import memory_bytes
from autopar.cost_model.library import FEWEST_ELEMENTS
from autopar.cost_model.memory import predict_memory
from autopar.cost_model.nodes import Arrays
from autopar.cost_model.places import WHOLE_REDUCTION
from autopar.cost_model.tenants import trees
from autopar.devices import DeviceKind, Platform
from autopar.graph.build import build_graph
from autopar.graph.fusion import fuse
from autopar.graph.tracing import trace
from autopar.plan import Layout, Memory, Stage
from autopar.runtime.executor import Executor
from autopar.schedule.spmd import lower, output_layouts
from benchmarks.models import FAMILIES, build
from tests.toy_runs import eight_slow_devices

pytestmark = pytest.mark.usefixtures("users_fusions")

CPU = DeviceKind("a core", Platform.CPU, {"float32": 1e11}, 1 << 30, 2.5e10)
V100, A100, H100, H200 = (
    Cluster.preset(name).device for name in ("p3.16xlarge", "p4de.24xlarge", "p5.48xlarge", "h200")
)
TOTAL_TOLERANCE = 0.15
TOO_LOW = 0.05
PLANS: dict[str, dict[str, Any]] = {
    "auto-8": {"mesh_shape": (8,)},
    "auto-2x4": {"mesh_shape": (2, 4)},
    "auto-4x2": {"mesh_shape": (4, 2)},
    "data parallel": {"method": "data_parallel"},
    "zero3": {"method": "zero3"},
    "tensor parallel": {"method": "tensor_parallel"},
}
PRODUCT = tuple((name, plan) for name in FAMILIES for plan in PLANS)
ALWAYS = (
    ("gpt_scan", "zero3"),
    ("mlp_nnx", "auto-2x4"),
    ("two_tower", "data parallel"),
    ("mlp_nnx", "tensor parallel"),
)


QUICK = (("mlp_nnx", "auto-2x4"), ("two_tower", "data parallel"))


def predicted_and_actual(step: Any, *args: Any) -> tuple[Memory, Any]:
    compiled = step.compile(*args)
    return compiled.plan.prediction.memory, memory_bytes(compiled)


def check(memory: Memory, actual: Any) -> None:
    assert memory.argument_bytes == actual.argument
    assert memory.output_bytes == actual.output
    assert memory.alias_bytes == actual.alias
    assert (1 - TOO_LOW) * actual.total <= memory.total_bytes <= (1 + TOTAL_TOLERANCE) * actual.total


def check_family(name: str, plan: str) -> None:
    model = build(name, "bench")
    step = autopar.parallelize(model.train_step, cluster=eight_slow_devices(), **PLANS[plan])
    memory, actual = predicted_and_actual(step, model.abstract_state(), model.abstract_batch())
    check(memory, actual)
    assert sum(memory.by_kind.values()) == memory.temp_bytes
    assert memory.largest
    assert all(size > 0 for _, size in memory.largest)
    assert any(re.search(r" at \w+\.py:\d+", name) for name, _ in memory.largest)
    assert not any(".py" in name and "/" in name for name, _ in memory.largest)


@pytest.mark.parametrize(
    ("name", "plan"), [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.verify) for pair in ALWAYS]
)
def test_total_is_that_of_the_compiled_step(name: str, plan: str) -> None:
    check_family(name, plan)


@pytest.mark.verify
@pytest.mark.parametrize(("name", "plan"), [pair for pair in PRODUCT if pair not in ALWAYS])
def test_total_is_that_of_the_compiled_step_under_more_plans(name: str, plan: str) -> None:
    check_family(name, plan)


# --- one effect at a time: programs that every device runs whole ------------------------------------------------------


def whole_on_each_device(function: Any, *shapes: tuple[int, ...]) -> tuple[Memory, Any]:
    """Prediction and account of a function of float32 arrays that is not cut at all."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    traced = trace(function, tuple(arguments), {})
    graph = build_graph(traced.jaxpr, platform="cpu")
    stage = Stage(Mesh(("data",), (8,)), {}, {}, {})
    program = lower(graph, stage, output_layouts(graph, stage, ()))
    memory = predict_memory(program, fusion=fuse(graph), state_pairs=(), donated=frozenset(), device=CPU)
    return memory, memory_bytes(Executor(program, traced.in_avals, frozenset(), jax.devices()))


def chained(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each product needs its operand and its result, and no more."""
    for _ in range(4):
        x = x @ w
    return x


def elementwise(x: jax.Array, w: jax.Array) -> jax.Array:
    """Cheap work is in no buffer, and tanh, needed twice, is in one."""
    y = jnp.tanh(x + 1) * 2
    return (y + y * y) @ w


def kept_for_gradients(x: jax.Array, w: jax.Array) -> Any:
    """What a gelu keeps is its argument and its tanh."""

    def loss(w: jax.Array) -> jax.Array:
        y = x
        for _ in range(4):
            y = jax.nn.gelu(y @ w)
        return (y * y).sum()

    return jax.grad(loss)(w)


def rematerialised(x: jax.Array, w: jax.Array) -> Any:
    """Older XLA:CPUs drop the barriers of ``jax.checkpoint``, find equal work, and keep what was to be computed again."""
    block = jax.checkpoint(lambda y: jnp.sin(jnp.tanh(y @ w)))
    return jax.grad(lambda y: block(block(block(y))).sum())(x)


def gradients_of_matrices(x: jax.Array, w: jax.Array) -> Any:
    """The gradient of a matrix waits until that of what it multiplies is on its way, so both operands stay longer."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        y = x[:, :64]
        for matrix in weights:
            y = y + jax.nn.gelu(y @ matrix[:64]) @ matrix[:, :64]
        return (y * y).mean()

    return jax.grad(loss)([w, 2 * w, 3 * w])


def turned(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product that is written with a transpose, as of tied embeddings, reads the matrix as it lies."""
    return (x.reshape(2, 512, 512) @ w.T)[:, :2] + (x[:64].reshape(1, 64, 512) @ w.T).sum()


def stacked(x: jax.Array, w: jax.Array) -> Any:
    """A scan's stacked results exist before its first trip."""
    carry, kept = lax.scan(lambda y, _: (jnp.tanh(y @ w), y @ w), x, None, length=6)
    return (kept * carry).sum()


def scattered(x: jax.Array, w: jax.Array) -> Any:
    """The gradient of a cross entropy is scattered onto that of the softmax, not added to it."""

    def loss(w: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(x @ w)
        return -logits[jnp.arange(x.shape[0]), jnp.arange(x.shape[0]) % 7].mean()

    return jax.grad(loss)(w)


def scattered_twice(x: jax.Array, w: jax.Array) -> Any:
    """Gradients of two lookups: the zeros that both are scattered onto are made once, and copied at the start."""

    def loss(tables: list[jax.Array]) -> jax.Array:
        y = tables[0][jnp.arange(1024) % 7] + jnp.tanh(tables[1][jnp.arange(1024) % 5])
        for _ in range(4):
            y = jnp.tanh(y @ w + x)
        return (y * y).sum()

    return [(gradient * w).sum() for gradient in jax.grad(loss)([w, w + 1])]


def dropped(x: jax.Array, w: jax.Array) -> Any:
    """Random bits stay in memory as two arrays of words, from which the mask is mixed wherever it is needed."""

    def loss(w: jax.Array) -> jax.Array:
        y = x @ w
        return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, y.shape), y * y, 0).sum()

    return jax.grad(loss)(w)


def dropped_later(x: jax.Array, w: jax.Array) -> Any:
    """The mask leaves as soon as it is there, and is mixed once more from the words, which stay until then."""
    mask = jax.random.bernoulli(jax.random.key(0), w[0, 0], x.shape)
    waves = [x @ w]
    for _ in range(7):
        waves.append(waves[-1] @ w)
    return jnp.where(mask, math.prod(waves), 0), mask


def summed_along_few(x: jax.Array, w: jax.Array) -> Any:
    """What is summed is computed in passing; whole numbers, which no library adds up."""
    bits = lax.bitcast_convert_type(x, jnp.int32).reshape(-1, WHOLE_REDUCTION)
    return (bits ^ (bits >> 3)).sum(1), w


def summed_along_many(x: jax.Array, w: jax.Array) -> Any:
    """What is summed is kept for sums in parts."""
    bits = lax.bitcast_convert_type(x, jnp.int32).reshape(-1, 2 * WHOLE_REDUCTION)
    return (bits ^ (bits >> 3)).sum(1), w


def clipped(x: jax.Array, w: jax.Array) -> Any:
    """The quotient is kept for both kernels that need it, though each of them computes again what it is chosen for."""
    y = x @ w
    norm = jnp.sqrt((y * y).sum())
    z = jnp.where(norm < 1, y, y / norm)
    return jnp.einsum("ij,ik->jk", x, z * 2 + x), jnp.einsum("ij,ik->jk", x, z * z - x)


def masked(x: jax.Array, w: jax.Array) -> Any:
    """What a library sums is kept for that and computed again for all others, of a mask and of rows as many as it takes."""

    def normalised(y: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        centred = y - y.mean((0, 1))
        return centred * lax.rsqrt((centred**2).mean((0, 1)) + 1e-5) * scale + shift

    def loss(w: jax.Array) -> jax.Array:
        images = x.reshape(256, 4, 512)
        z = jax.nn.relu(normalised(images @ w, w[0], w[1]) + normalised(images @ (w * w), w[2], w[3]))
        return (z.mean(1) @ w[:, :8]).sum()

    return jax.grad(loss)(w)[:, :8]


@pytest.mark.parametrize(
    "function",
    [
        chained,
        elementwise,
        kept_for_gradients,
        rematerialised,
        gradients_of_matrices,
        turned,
        stacked,
        scattered,
        scattered_twice,
        dropped,
        dropped_later,
        summed_along_few,
        summed_along_many,
        clipped,
        masked,
    ],
    ids=lambda function: function.__name__,
)
def test_one_effect(function: Any) -> None:
    memory, actual = whole_on_each_device(function, (1024, 512), (512, 512))
    check(memory, actual)


def over_a_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """What is written over lives where the result will."""
    return jnp.tanh(x @ w)


def over_another_shape(x: jax.Array, w: jax.Array) -> jax.Array:
    """The product is of matrices, and what reads it as stacks of them cannot write over it."""
    return jnp.tanh(x.reshape(4, 256, 512) @ w)


def over_another_type(x: jax.Array, w: jax.Array) -> jax.Array:
    """Of as many bytes, but other numbers: nothing is written over."""
    return (x @ w > 0).astype(jnp.int32)


def written_into_an_input(x: jax.Array, w: jax.Array) -> jax.Array:
    """The input is copied before anything else is done, so the result's bytes serve nobody else."""
    y = x
    for _ in range(3):
        y = jnp.tanh(y @ w)
    return x.at[jnp.arange(8)].add(y[:8])


def pooled(x: jax.Array, w: jax.Array) -> Any:
    """Where the greatest of a window was is found once more, by four numbers beside every element."""

    def loss(x: jax.Array) -> jax.Array:
        y = jnp.tanh(x.reshape(8, 16, 16, 256))
        return (lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2).sum()

    return jax.grad(loss)(x)


def hashed(x: jax.Array, w: jax.Array) -> jax.Array:
    """With keys that are arrays: those and the words are carried through a loop that has all of them twice."""
    words = lax.bitcast_convert_type(x, jnp.uint32)
    first, second = threefry2x32_p.bind(words, words + 1, words + 2, words + 3)
    return jnp.where(first < second, x @ w, 0).sum()


def needed_in_two_shapes(x: jax.Array, w: jax.Array) -> Any:
    """A product reads matrices, the program's end what they are matrices of: cheap work is done in both shapes."""
    y = 2.5 * x.reshape(4, 256, 512)
    return y @ w, y


def of_two_needed_in_two_shapes(x: jax.Array, w: jax.Array) -> Any:
    """What reads two large arrays is done once, and has two names."""
    y = (x + w[:1]).reshape(4, 256, 512) * x.reshape(4, 256, 512)
    return y @ w, y


def costly_needed_in_two_shapes(x: jax.Array, w: jax.Array) -> Any:
    """Costly work is kept for the kernels that make two shapes of it."""
    y = 2.5 * jnp.tanh(x.reshape(4, 256, 512))
    return y @ w, y


def costly_under_what_is_kept(x: jax.Array, w: jax.Array) -> Any:
    """The sum is made again of the costly work, which stays for that, though a product has in memory what it adds to."""
    y = 2.5 * jnp.tanh(x)
    return (y + 1.5) * (y @ w)


@pytest.mark.parametrize(
    "function",
    [
        over_a_product,
        over_another_shape,
        over_another_type,
        written_into_an_input,
        pooled,
        hashed,
        needed_in_two_shapes,
        of_two_needed_in_two_shapes,
        costly_needed_in_two_shapes,
        costly_under_what_is_kept,
    ],
    ids=lambda function: function.__name__,
)
def test_scratch_bytes_are_those_of_xla(function: Any) -> None:
    memory, actual = whole_on_each_device(function, (1024, 512), (512, 512))
    assert memory.temp_bytes == pytest.approx(actual.temp, rel=1e-3, abs=64)


def normalised(x: jax.Array, w: jax.Array) -> Any:
    """What a norm multiplies with is cheap, and kept for the backward pass where a library's kernel reads it."""

    def loss(x: jax.Array, scales: jax.Array) -> jax.Array:
        y = x
        for k in range(6):
            scale = lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6) * scales[k]
            y = y + jnp.tanh((y * scale) @ w)
        return (y * y).sum()

    return jax.grad(loss, (0, 1))(x, w[:8])


@pytest.mark.parametrize("rows", [1024, FEWEST_ELEMENTS, 8192])
def test_a_library_is_handed_all_that_it_reads(rows: int) -> None:
    memory, actual = whole_on_each_device(normalised, (rows, 128), (128, 128))
    check(memory, actual)


@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("shape", [(512, 512), (2, 256, 512)])
def test_matrices_are_read_in_either_orientation_unless_one_alone_is_made_of_more(
    stack: int, shape: tuple[int, ...]
) -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("b...j,bkj->b...k", jnp.einsum("b...j,bjk->b...k", x, w), w)

    memory, actual = whole_on_each_device(product, (stack, *shape), (stack, 512, 512))
    check(memory, actual)


def kept_by(function: Any, arguments: tuple[jax.ShapeDtypeStruct, ...], device: DeviceKind) -> set[str]:
    """The primitives whose results a device's compiler keeps in memory."""
    graph = build_graph(trace(function, arguments, {}).jaxpr, platform=device.platform.value)
    stage = Stage(Mesh(("data",), (8,)), {}, {}, {})
    program = lower(graph, stage, output_layouts(graph, stage, ()))
    kernels = kernels_of(arrays_of(program, (), device), device.platform)
    sources = (kernels.nodes[number].source for number in kernels.reads)
    return {source.primitive for source in sources if source is not None}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("device", "widths"), [(CPU, {2, 4}), (V100, {2}), (A100, {2, 4}), (H100, {2}), (H200, {2, 4})]
)
def test_gpus_compute_again_from_what_is_no_larger(dtype: DTypeLike, device: DeviceKind, widths: set[int]) -> None:
    """As XLA's compilers for GPUs do: their softmax is one kernel, and tanh stands in two where it is not kept.

    ``widths`` are the bytes of such elements as the device keeps: its memory is fast for what it computes.
    """

    def softmax_product(x: jax.Array, w: jax.Array) -> jax.Array:
        powers = jnp.exp((x @ w).astype(jnp.float32))
        return (powers / jnp.sum(powers, 1, keepdims=True)).astype(dtype) @ w

    def gradient_of_gelu(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda weights: jnp.sum((jax.nn.gelu(x @ weights) @ w) ** 2))(w)

    arguments = tuple(jax.ShapeDtypeStruct((256, 256), dtype) for _ in range(2))
    for function, costly in ((softmax_product, "exp"), (gradient_of_gelu, "tanh")):
        made = kept_by(function, arguments, device)
        assert "dot_general" in made
        assert (costly in made) is (device == CPU or (costly == "tanh" and jnp.dtype(dtype).itemsize in widths))


@pytest.mark.parametrize("is_split", [False, True], ids=["bits", "words"])
def test_of_a_dropout_gpus_keep_the_mask(is_split: bool) -> None:
    def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
        if is_split:
            count = jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape)
            first, second = threefry2x32_p.bind(key[0], key[1], count, count)
            drawn = first ^ second
        else:
            drawn = jax.random.bits(jax.random.wrap_key_data(key, impl="threefry2x32"), x.shape)
        mask = (drawn >> 9) < 1000
        return jax.grad(lambda x: jnp.sum(jnp.where(mask, x @ x, 0.0) ** 2))(x)

    arguments = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.uint32)
    on_gpus, on_cpus = (kept_by(dropped, arguments, device) for device in (H100, CPU))
    bits = {"random_bits", "threefry2x32"}
    assert "lt" in on_gpus and not on_gpus & bits
    assert "lt" not in on_cpus and on_cpus & bits


def arrays_on_each_device(function: Any) -> Arrays:
    """The arrays of a function of one float32[16, 64] that is not cut at all."""
    graph = build_graph(trace(function, (jax.ShapeDtypeStruct((16, 64), jnp.float32),), {}).jaxpr, platform="cpu")
    stage = Stage(Mesh(("data",), (8,)), {}, {}, {})
    return arrays_of(lower(graph, stage, output_layouts(graph, stage, ())), (), CPU)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (jnp.exp(x / 3), jnp.sin(x / 3)),  # to divide by a constant is to multiply, again in each kernel
        lambda x: (jnp.exp(x[None].sum(0)), jnp.sin(x[None].sum(0))),  # to sum one element is to reshape
    ],
    ids=["divided by a constant", "of one element"],
)
def test_what_xla_makes_cheap_work_has_no_buffer(function: Any) -> None:
    arrays = arrays_on_each_device(function)
    reads = kernels_of(arrays, Platform.CPU).reads
    assert [reads[output] for output in arrays.outputs if output is not None] == [set(arrays.inputs)] * 2


def test_what_is_reshaped_there_and_back_is_what_it_was() -> None:
    arrays = arrays_on_each_device(lambda x: x.reshape(64, 16).reshape(16, 64))
    assert arrays.outputs == arrays.inputs


def test_without_donation_nothing_is_aliased() -> None:
    model = build("mlp_nnx", "toy")
    step = autopar.parallelize(model.train_step, cluster=eight_slow_devices(), donate_argnums=())
    memory, actual = predicted_and_actual(step, model.abstract_state(), model.abstract_batch())
    assert memory.alias_bytes == 0
    check(memory, actual)


def test_a_literal_result_is_counted() -> None:
    memory, actual = whole_on_each_device(lambda x: (x * 2, np.float32(3)), (64, 64))
    assert memory.output_bytes == actual.output


def test_what_is_gathered_along_an_inner_dimension_is_turned_even_where_no_element_moves() -> None:
    """So the kernel that reads it cannot write over it."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("bij,jk->bik", jnp.exp(x), w)

    traced = trace(step, tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in [(1, 1024, 512), (512, 8)]), {})
    graph = build_graph(traced.jaxpr, platform="cpu")
    stage = Stage(Mesh(("data",), (8,)), {graph.inputs[0]: Layout(((), ("data",), ()))}, {}, {})
    program = lower(graph, stage, output_layouts(graph, stage, ()))
    memory = predict_memory(program, fusion=fuse(graph), state_pairs=(), donated=frozenset(), device=CPU)
    check(memory, memory_bytes(Executor(program, traced.in_avals, frozenset(), jax.devices())))


def test_a_transpose_that_is_gathered_for_a_result_is_gathered_in_its_own_order() -> None:
    """A result lies in the order of its dimensions, so the transpose is made before; elsewhere it is sent as it lies."""
    traced = trace(lambda x: x.T, (jax.ShapeDtypeStruct((1024, 512), jnp.float32),), {})
    graph = build_graph(traced.jaxpr, platform="cpu")
    stage = Stage(Mesh(("data",), (8,)), {graph.inputs[0]: Layout(((), ("data",)))}, {}, {})
    program = lower(graph, stage, [Layout(((), ()))])
    memory = predict_memory(program, fusion=fuse(graph), state_pairs=(), donated=frozenset(), device=CPU)
    actual = memory_bytes(Executor(program, traced.in_avals, frozenset(), jax.devices()))
    assert memory.temp_bytes == pytest.approx(actual.temp, rel=1e-3)


# --- names ------------------------------------------------------------------------------------------------------------


def test_state_that_mirrors_the_parameters_is_told_by_what_stands_before() -> None:
    parameters = [("state", "params", "a", "kernel"), ("state", "params", "b", "kernel")]
    moments = [("state", "opt", "mu", *path[2:]) for path in parameters]
    found = trees([*parameters, *moments, ("state", "step")], parameters)
    assert found == dict.fromkeys(parameters, ("state", "params")) | dict.fromkeys(moments, ("state", "opt", "mu"))
    assert trees(parameters[:1], parameters[:1]) == {parameters[0]: parameters[0][:-1]}
    assert trees(parameters, []) == {}


def test_a_family_that_is_most_of_its_tree_is_named_itself() -> None:
    def step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def loss(state: dict[str, jax.Array]) -> jax.Array:
            return sum(((x * x).sum() for x in state.values()), jnp.zeros(()))

        return jax.tree.map(lambda x, g: x - g, state, jax.grad(loss)(state))

    state = {name: jax.ShapeDtypeStruct((size, 64), jnp.float32) for name, size in
             {"table": 512, "layer0": 64, "layer1": 64, "head": 128}.items()}  # fmt: skip
    plan = autopar.parallelize(step, cluster=eight_slow_devices(), method="data_parallel").plan(state)
    largest = dict(plan.prediction.memory.largest)
    assert largest["state/table"] == 512 * 64 * 4
    assert largest["the rest of parameters in state (3 arrays)"] == 256 * 64 * 4
