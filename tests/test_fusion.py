"""What the fusion model says is read and written: a kernel reads a materialised value once, the rest is registers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from autopar.graph.build import build_graph
from autopar.graph.fusion import KERNELS_FOLLOWED, Fusion, fuse
from autopar.graph.ir import Graph, Operator
from autopar.graph.tracing import trace
from examples.gpt.model import GPTConfig, OptimizerConfig, create_state, train_step

BYTES = 4 * 8 * 8


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


SQUARE = array(8, 8)


def fused(function: Callable[..., Any], *arguments: Any) -> tuple[Graph, Fusion]:
    graph = build_graph(trace(function, arguments, {}).jaxpr, platform="cpu")
    return graph, fuse(graph)


def traffic(graph: Graph, fusion: Fusion) -> int:
    """Bytes read and written by all kernels."""
    total = 0
    for operator in graph.operators:
        touched = [operator.operands[k] for k in fusion.reads[operator.id]]
        touched += [operator.results[k] for k in fusion.writes(operator)]
        total += sum(graph.values[value].size_bytes for value in touched if value is not None)
    return total


def only(graph: Graph, primitive: str) -> Operator:
    (found,) = (operator for operator in graph.operators if operator.primitive == primitive)
    return found


def test_an_elementwise_chain_is_one_kernel() -> None:
    graph, fusion = fused(lambda x: jnp.tanh((x + 1.0) * 2.0) - 3.0, SQUARE)
    assert traffic(graph, fusion) == 2 * BYTES
    assert fusion.materialised == {*graph.inputs, *graph.outputs}
    last = graph.operators[-1].id
    assert all(roots == {last} for roots in fusion.roots.values())


def test_an_array_that_is_named_twice_in_a_kernel_is_read_once() -> None:
    graph, fusion = fused(lambda x: (x + 1.0) * x * x, SQUARE)
    assert traffic(graph, fusion) == 2 * BYTES


def test_two_kernels_read_their_common_input_each() -> None:
    graph, fusion = fused(lambda x: (x + 1.0, x * 2.0), SQUARE)
    assert traffic(graph, fusion) == 4 * BYTES


def test_a_product_needs_buffers_on_all_sides() -> None:
    graph, fusion = fused(lambda x, w: jnp.tanh((x + 1.0) @ w), SQUARE, SQUARE)
    product = only(graph, "dot_general")
    assert {*product.operands, *product.results} <= fusion.materialised
    assert traffic(graph, fusion) == (2 + 3 + 2) * BYTES


def test_a_reduction_swallows_what_it_reads() -> None:
    graph, fusion = fused(lambda x: jnp.sum(x * 2.0, axis=0), SQUARE)
    assert traffic(graph, fusion) == BYTES + BYTES // 8
    assert only(graph, "mul").results[0] not in fusion.materialised


def two_sums(y: Any) -> Any:
    return jnp.sum(y, 0), jnp.sum(y, 1)


def test_cheap_work_is_repeated_and_costly_work_is_kept() -> None:
    graph, fusion = fused(lambda x: two_sums(x + 1.0), SQUARE)
    assert only(graph, "add").results[0] not in fusion.materialised
    graph, fusion = fused(lambda x: two_sums(jnp.tanh(x)), SQUARE)
    assert only(graph, "tanh").results[0] in fusion.materialised
    assert traffic(graph, fusion) == 4 * BYTES + 2 * BYTES // 8


def test_what_repeated_work_reads_is_read_by_every_kernel() -> None:
    graph, fusion = fused(lambda x: two_sums(x + 1.0), SQUARE)
    assert traffic(graph, fusion) == 2 * BYTES + 2 * BYTES // 8


def test_pieces_of_a_split_are_read_once_in_all() -> None:
    """Four kernels add a quarter each to something else."""

    def step(x: jax.Array, others: list[jax.Array]) -> list[jax.Array]:
        return [other + part for other, part in zip(others, jnp.split(x, 4, axis=1), strict=True)]

    graph, fusion = fused(step, array(8, 32), [SQUARE] * 4)
    split = only(graph, "split")
    assert len(fusion.roots[split.id]) == 4
    assert traffic(graph, fusion) == 4 * 3 * BYTES


def test_a_change_of_shape_is_no_copy() -> None:
    graph, fusion = fused(lambda x: jnp.reshape(x, (64,)), SQUARE)
    assert fusion.aliases == {graph.outputs[0]: graph.inputs[0]}
    assert traffic(graph, fusion) == 0


def test_of_many_kernels_only_some_are_followed() -> None:
    def many(x: Any) -> Any:
        shared = x + 1.0
        return [jnp.sum(shared * factor) for factor in range(2, 12)]

    graph, fusion = fused(many, SQUARE)
    assert len(fusion.roots[only(graph, "add").id]) == KERNELS_FOLLOWED


def test_bodies_are_programs_of_their_own() -> None:
    def loop(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w) + 1.0, None), x, None, length=3)[0]

    graph, fusion = fused(loop, SQUARE, SQUARE)
    (operator,) = (one for one in graph.operators if one.bodies)
    (body,) = operator.bodies
    assert {*operator.operands, *operator.results} - {None} <= fusion.materialised
    assert {*body.inputs, *body.outputs} - {None} <= fusion.materialised
    assert only(body, "tanh").results[0] not in fusion.materialised
    assert traffic(body, fusion) == (3 + 2) * BYTES


@pytest.mark.parametrize("scanned", [False, True])
def test_every_kernel_of_a_step_reads_what_it_needs_once(scanned: bool) -> None:
    """A kernel by kernel recount over the whole tree."""
    config = GPTConfig(layers=2, hidden=16, heads=4, sequence=8, vocab_size=32, scan_layers=scanned)
    state = jax.eval_shape(lambda: create_state(jax.random.key(0), config, OptimizerConfig()))
    tokens = jax.ShapeDtypeStruct((8, 8), np.int32)
    graph, fusion = fused(train_step, state, {"tokens": tokens, "targets": tokens})
    for level in levels(graph):
        charged: Counter[int] = Counter()
        needed: set[tuple[int, int]] = set()
        for operator in level.operators:
            assert fusion.roots[operator.id], operator
            named = {value for value in operator.operands if value in fusion.materialised}
            reads = [operator.operands[k] for k in fusion.reads[operator.id]]
            assert named.issuperset(reads)
            assert all(count <= len(fusion.roots[operator.id]) for count in Counter(reads).values())
            charged.update(value for value in reads if value is not None)
            for root in fusion.roots[operator.id]:
                if operator.primitive not in ("reshape", "squeeze", "copy", "stop_gradient", "optimization_barrier"):
                    needed.update((root, value) for value in named)
        expected = Counter(value for _, value in needed if not _renamed(value, level))
        assert {value: count for value, count in charged.items() if not _renamed(value, level)} == expected


def _renamed(value: int, level: Graph) -> bool:
    """Bit casts are free as well, and need no read."""
    readers = [operator.primitive for operator in level.operators if value in operator.operands]
    return set(readers) <= {"bitcast_convert_type", "expand_dims"}


def levels(graph: Graph) -> Iterator[Graph]:
    yield graph
    for operator in graph.operators:
        for body in operator.bodies:
            yield from levels(body)
