"""JAX inside a step and around it: what works as under ``jax.jit``, and what is refused in words.

Each step below is planned for eight devices so slow that cutting pays, on one axis and on two, and must give the numbers
of ``jax.jit``; what calls the host must call it as often.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import autopar
from autopar import TraceError
from autopar.parallelized import Parallelized
from tests.toy_runs import eight_slow_devices, sample

Tree = dict[str, Any]
Extra = Callable[[Tree, Tree], Any]

MESHES = {"one axis": (8,), "two axes": (2, 4)}


def on_meshes(names: Collection[str]) -> pytest.MarkDecorator:
    """Each name on one of the meshes, drawn by a fixed seed; on the other under the ``verify`` mark."""
    drawn = sample(tuple(names), tuple(MESHES), seed=0)
    return pytest.mark.parametrize(
        ("name", "mesh"),
        [
            pytest.param(name, MESHES[mesh], id=f"{name}-{mesh}", marks=() if pair in drawn else pytest.mark.verify)
            for pair in itertools.product(names, MESHES)
            for name, mesh in [pair]
        ],
    )


def make_state() -> Tree:
    return {"w": jnp.linspace(-1.0, 1.0, 256).reshape(16, 16), "n": jnp.int32(0)}


def make_batch() -> Tree:
    random = np.random.default_rng(0)
    return {"x": random.standard_normal((16, 16), dtype=np.float32), "y": np.ones((16, 16), np.float32)}


def with_extra(extra: Extra) -> Callable[..., Any]:
    """A step of gradient descent that does something besides."""

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(state["w"])
        said = {"loss": loss, "extra": extra(state, batch)}
        return {"w": state["w"] - 0.1 * gradient, "n": state["n"] + 1}, said

    return step


def parallel(step: Callable[..., Any], mesh: tuple[int, ...] = (8,), **options: Any) -> Parallelized:
    return autopar.parallelize(cluster=eight_slow_devices(), mesh_shape=mesh, **options)(step)


def check(extra: Extra, mesh: tuple[int, ...], **options: Any) -> Parallelized:
    """Two steps as under ``jax.jit``; all calls of the host have happened."""
    step = with_extra(extra)
    run, reference = parallel(step, mesh, **options), jax.jit(step)
    ours, theirs = make_state(), make_state()
    for _ in range(2):
        ours, got = run(ours, make_batch())
        theirs, expected = reference(theirs, make_batch())
        same((ours, got), (theirs, expected))
    jax.effects_barrier()
    return run


def same(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


# ------------------------------------------------------------------------------------------------- inside: derivatives


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, gradient: (gradient * jnp.clip(jnp.cos(x), -0.5, 0.5),))


@jax.custom_jvp
def steep(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


steep.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 3 * tangents[0]))


@functools.partial(jax.jit, static_argnames="power", donate_argnums=0)
def to_the(x: jax.Array, power: int) -> jax.Array:
    return x**power


def scoped(state: Tree, batch: Tree) -> jax.Array:
    with jax.named_scope("outer"), jax.named_scope("inner"):
        return jnp.sum(batch["x"] @ state["w"], 0)


def checked(state: Tree, batch: Tree) -> jax.Array:
    def divide(x: jax.Array) -> jax.Array:
        checkify.check(jnp.sum(x**2) > 0, "all is zero")
        return x / jnp.sum(x**2)

    error, out = checkify.checkify(divide)(batch["x"])
    return jnp.where(error.get() is None, out, 0.0) if isinstance(error, str) else out


def through_a_ref(_: Tree, batch: Tree) -> jax.Array:
    ref = jax.new_ref(jnp.zeros(16))
    ref[...] += batch["x"].sum(0)
    return ref[...]


INSIDE: dict[str, Extra] = {
    "custom_vjp": lambda s, b: jax.grad(lambda w: clipped(b["x"] @ w).sum())(s["w"]),
    "custom_jvp": lambda s, b: jax.grad(lambda w: steep(b["x"] @ w).sum())(s["w"]),
    "checkpoint": lambda s, b: jax.grad(jax.checkpoint(lambda w: jnp.sin(jnp.sin(b["x"] @ w)).sum()))(s["w"]),
    "checkpoint policy": lambda s, b: jax.grad(
        jax.checkpoint(
            lambda w: jnp.sin(jnp.sin(b["x"] @ w)).sum(),
            policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        )
    )(s["w"]),
    "vmap of grad": lambda s, b: jax.vmap(lambda x: jax.grad(lambda w: jnp.sin(x @ w).sum())(s["w"]))(b["x"]),
    "vmap with a name": lambda _, b: jax.vmap(lambda x: x - lax.pmean(x, "rows"), axis_name="rows")(b["x"]),
    "jvp": lambda s, b: jax.jvp(lambda w: jnp.sin(b["x"] @ w).sum(), (s["w"],), (s["w"],))[1],
    "hessian": lambda s, b: jax.hessian(lambda v: jnp.sin(b["x"] @ v).sum())(s["w"][:, 0]),
    "jacrev": lambda s, b: jax.jacrev(lambda v: jnp.tanh(b["x"] @ v))(s["w"][0]),
    "linearize": lambda s, b: jax.linearize(lambda w: jnp.sin(b["x"] @ w), s["w"])[1](s["w"]),
    "jit with static and donated arguments": lambda s, b: (to_the(b["x"], power=3), to_the(s["w"], power=2), s["w"]),
    "named_scope": scoped,
    "while_loop on data": lambda s, b: lax.while_loop(
        lambda c: c[0] < jnp.sum(b["x"] ** 2), lambda c: (c[0] * 2, c[1] @ s["w"] * 0.1), (jnp.float32(1), b["x"])
    )[1],
    "while_loop on what it carries": lambda _, b: lax.while_loop(
        lambda c: jnp.linalg.norm(c) > 1, lambda c: c * 0.5, b["x"]
    ),
    "fori_loop of data-dependent length": lambda _, b: lax.fori_loop(
        0, jnp.sum(b["x"] > 0) % 5, lambda i, c: c * 0.5 + i, b["x"]
    ),
    "cond on the batch": lambda s, b: lax.cond(
        b["x"][0, 0] > 0, lambda x: x * 2, lambda x: jnp.cumsum(x, 0) @ s["w"], b["x"]
    ),
    "cond both ways": lambda s, b: [
        lax.cond(jnp.sum(b["y"]) > limit, lambda x: x + x.sum(0), lambda x: x @ s["w"], b["x"]) for limit in (0, 1e9)
    ],
    "a linear solver": lambda s, b: jax.scipy.sparse.linalg.cg(
        lambda v: 2 * v + b["x"].T @ (b["x"] @ v), s["w"][0], maxiter=5
    )[0],
    "checkify": checked,
    "a mutable reference": through_a_ref,
    "random numbers": lambda _, b: b["x"] + jax.random.normal(jax.random.key(3), (16, 16)),
}


@on_meshes(INSIDE)
def test_inside_a_step(name: str, mesh: tuple[int, ...]) -> None:
    check(INSIDE[name], mesh)


# ------------------------------------------------------------------------------------------------- inside: host calls


class Host:
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[np.ndarray] = []

    def listen(self, array: Any) -> None:
        self.calls.append(np.asarray(array))

    def double(self, array: Any) -> np.ndarray:
        self.listen(array)
        return np.asarray(array) * 2


TABLE = jax.ShapeDtypeStruct((16, 16), np.float32)


def in_a_scan(host: Host, batch: Tree) -> jax.Array:
    def body(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        jax.debug.callback(host.listen, row.sum())
        return total + row.sum(), None

    return lax.scan(body, jnp.float32(0), batch["x"][:3])[0]


def in_a_branch(host: Host, batch: Tree) -> jax.Array:
    def positive(x: jax.Array) -> jax.Array:
        jax.debug.callback(host.listen, x)
        return x.sum()

    return lax.cond(jnp.sum(batch["y"]) > 0, positive, lambda x: x.sum() * 2, batch["x"])


def in_a_gradient(host: Host, state: Tree, batch: Tree) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        out = batch["x"] @ w
        jax.debug.callback(host.listen, out)
        return jnp.sum(out**2)

    return jax.grad(loss)(state["w"])


CALLS: dict[str, tuple[Callable[[Host, Tree, Tree], Any], int]] = {
    "debug.callback": (lambda host, s, b: jax.debug.callback(host.listen, b["x"] * 2), 1),
    "debug.callback of a scalar": (lambda host, s, b: jax.debug.callback(host.listen, jnp.sum(b["x"])), 1),
    "debug.callback in a scan": (lambda host, s, b: in_a_scan(host, b), 3),
    "debug.callback in a branch": (lambda host, s, b: in_a_branch(host, b), 1),
    "debug.callback in a gradient": (in_a_gradient, 1),
    "io_callback": (lambda host, s, b: io_callback(host.double, TABLE, b["x"] @ s["w"]), 1),
    "io_callback in order": (lambda host, s, b: io_callback(host.double, TABLE, b["x"], ordered=True), 1),
    "io_callback without results": (lambda host, s, b: io_callback(host.listen, None, b["x"]), 1),
    "pure_callback": (lambda host, s, b: jax.pure_callback(host.double, TABLE, b["x"] @ s["w"]) + 1, 1),
    "pure_callback of integers": (
        lambda host, s, b: jax.pure_callback(host.double, jax.ShapeDtypeStruct((16,), np.int32), jnp.arange(16)),
        1,
    ),
}


@on_meshes(CALLS)
def test_the_host_is_called_once_a_step(name: str, mesh: tuple[int, ...]) -> None:
    function, calls_per_step = CALLS[name]
    host, reference = Host(), Host()
    step, plain = (with_extra(functools.partial(function, who)) for who in (host, reference))
    run, ours, theirs = parallel(step, mesh), make_state(), make_state()
    for _ in range(2):
        ours, got = run(ours, make_batch())
        theirs, expected = jax.jit(plain)(theirs, make_batch())
        same((ours, got), (theirs, expected))
        jax.effects_barrier()
    assert len(host.calls) == 2 * calls_per_step

    def sizes(calls: list[np.ndarray]) -> list[float]:
        return sorted(float(np.sum(call)) for call in calls)

    np.testing.assert_allclose(sizes(host.calls), sizes(reference.calls), rtol=1e-4, atol=1e-4)


def test_what_the_host_returns_keeps_its_bits() -> None:
    said = np.array([-0.0, np.inf, -np.inf, 1e-40, 3.5, np.nan, -2.0, 0.0], np.float32)
    flags = np.array([True, False] * 4)

    def answer(_: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return said, flags, np.arange(8, dtype=np.uint8) + 248

    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), answer(None))
    run = parallel(with_extra(lambda s, b: io_callback(answer, shapes, b["x"])))
    floats, booleans, integers = run(make_state(), make_batch())[1]["extra"]
    np.testing.assert_array_equal(np.asarray(floats).view(np.uint32), said.view(np.uint32))
    np.testing.assert_array_equal(booleans, flags)
    np.testing.assert_array_equal(integers, answer(None)[2])


def test_printing_says_it_once(capfd: pytest.CaptureFixture[str]) -> None:
    check(lambda s, b: jax.debug.print("the sum is {}", jnp.sum(b["y"])), (2, 4))
    assert capfd.readouterr().out.count("the sum is 256.0") == 4  # two steps, planned and under jax.jit


def test_printing_in_order_is_refused_and_says_where() -> None:
    run = parallel(with_extra(lambda s, b: jax.debug.print("{}", b["x"][0, 0], ordered=True)))
    with pytest.raises(
        TraceError, match=r"debug_print with ordered=True at .*test_transformations\.py:\d+: .*io_callback"
    ):
        run(make_state(), make_batch())


def test_an_exception_of_the_host_is_raised_and_the_step_lives_on(capfd: pytest.CaptureFixture[str]) -> None:
    fails = [True]

    def answer(array: Any) -> np.ndarray:
        if fails[0]:
            raise RuntimeError("the disk is full")
        return np.asarray(array)

    step = with_extra(lambda s, b: jax.pure_callback(answer, TABLE, b["x"]))
    run = parallel(step)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the disk is full"):
        run(make_state(), make_batch())
    fails[0] = False
    same(run(make_state(), make_batch()), jax.jit(step)(make_state(), make_batch()))
    capfd.readouterr()


# ------------------------------------------------------------------------------------------------- inside: refused


def test_programs_for_single_devices_are_refused() -> None:
    run = parallel(with_extra(lambda s, b: jax.pmap(lambda row: row * 2)(b["x"][:8])))
    said = r"(shard_map|pmap) at .*test_transformations\.py:\d+: .*without jax\.shard_map and jax\.pmap"
    with pytest.raises(TraceError, match=said):
        run(make_state(), make_batch())
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("rows")
    mapped = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=rows, out_specs=rows)
    with pytest.raises(TraceError, match=said):
        parallel(with_extra(lambda s, b: mapped(b["x"])))(make_state(), make_batch())


# ------------------------------------------------------------------------------------------------- around a step


def plain(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    return with_extra(lambda s, b: jnp.sum(b["x"]))(state, batch)  # type: ignore[no-any-return]


AROUND: dict[str, Callable[[Parallelized], Any]] = {
    "jit": lambda run: jax.jit(run)(make_state(), make_batch()),
    "jit of no arguments": lambda run: jax.jit(lambda: run(make_state(), make_batch()))(),
    "grad": lambda run: jax.grad(lambda s: run(s, make_batch())[1]["loss"], allow_int=True)(make_state()),
    "vmap": lambda run: jax.vmap(run, in_axes=(None, 0))(
        make_state(), jax.tree.map(lambda leaf: np.stack([leaf, leaf]), make_batch())
    ),
    "jvp": lambda run: jax.jvp(lambda x: run(make_state(), {**make_batch(), "x": x})[1]["loss"], (1.0,), (1.0,)),
    "checkpoint": lambda run: jax.checkpoint(run)(make_state(), make_batch()),
    "eval_shape": lambda run: jax.eval_shape(run, make_state(), make_batch()),
    "make_jaxpr": lambda run: jax.make_jaxpr(run)(make_state(), make_batch()),
    "scan": lambda run: lax.scan(lambda s, b: run(s, b), make_state(), jax.tree.map(lambda a: a[None], make_batch())),
    "another parallelized step": lambda run: parallel(lambda s, b: run(s, b))(make_state(), make_batch()),
}


@pytest.mark.parametrize("called_before", [False, True], ids=["fresh", "compiled"])
@pytest.mark.parametrize("name", AROUND)
def test_around_a_step_is_refused(name: str, called_before: bool) -> None:
    run = parallel(plain, method="data_parallel")
    if called_before:
        run(make_state(), make_batch())
    said = (
        r"plain is a whole program over a cluster and cannot run inside jit, grad or vmap \(.* is a tracer\)\. Apply "
    )
    with pytest.raises(TraceError, match=re.compile(said)):
        AROUND[name](run)
    same(run(make_state(), make_batch()), jax.jit(plain)(make_state(), make_batch()))


def test_without_jit_the_function_itself_runs() -> None:
    shapes: list[type] = []

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        shapes.append(type(batch["x"]))
        return plain(state, batch)

    run = parallel(step)
    with jax.disable_jit():
        same(run(make_state(), make_batch()), plain(make_state(), make_batch()))
        assert shapes == [np.ndarray]  # the very argument, no tracer
        looped = with_extra(lambda s, b: lax.fori_loop(0, jnp.sum(b["x"] > 0) % 5, lambda i, c: c * 0.5, b["x"]))
        planner = parallel(looped)
        plan = planner.plan(make_state(), make_batch())  # planning still sees the loop
        assert planner.init(make_state, make_batch())["w"].shape == (16, 16)
    assert plan.fingerprint == parallel(looped).plan(make_state(), make_batch()).fingerprint
    same(run(make_state(), make_batch()), jax.jit(plain)(make_state(), make_batch()))
