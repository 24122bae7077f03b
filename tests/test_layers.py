"""Are the bytes at a cut those that really cross, and are layers what the dataflow says they are?"""

from __future__ import annotations

import re
from functools import cache, partial
from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.errors import PlanError
from autopar.graph.build import build_graph
from autopar.graph.roles import Role, infer_roles
from autopar.graph.tracing import trace
from autopar.inter_op.accumulate import accumulated
from autopar.inter_op.crossings import boundaries
from autopar.inter_op.cut import cut
from autopar.inter_op.examples import examples_of
from autopar.inter_op.layers import SLACK, candidate_positions, crossing_bytes, divide, layers
from autopar.inter_op.looped import Looped, as_one_trip, looped
from autopar.inter_op.placing import forward_operators
from autopar.schedule.stage_program import Passing
from benchmarks.models import Size, build
from examples.gpt import model as gpt
from tests.pipeline_enumerator import blocks
from tests.toy_pipelines import step_of as toy_step_of

Step = tuple[Looped, tuple[tuple[int, int], ...]]


@cache
def step_of(name: str, count: int = 2, size: Size = Size.TOY) -> Step:
    """The looped step of a benchmark model, and the pairs of its state."""
    model = build(name, size, dtype=jnp.float32)
    subject = autopar.parallelize(model.train_step)._subject(
        (jax.eval_shape(model.make_state), model.abstract_batch()), {}, "cpu"
    )
    batch = subject.roles.leaves(Role.BATCH)
    if count == 1:
        program = as_one_trip(subject.program, subject.graph, batch)
    else:
        examples = examples_of(subject.graph, batch, subject.roles.leaves(Role.STATE), count)
        program = accumulated(subject.program, examples, batch)
    graph = build_graph(program.jaxpr, platform="cpu")
    return looped(graph, batch, count), tuple(subject.roles.state_pairs)


def really_crossing(step: Step, position: int) -> float:
    loop, pairs = step
    crossings = cut(loop, pairs, (position,)).crossings
    each = sum(one.size_bytes for one in crossings if one.passing is Passing.MICRO)
    once = sum(one.size_bytes for one in crossings if one.passing is not Passing.MICRO)
    return each + once / loop.count


# ------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("gpt", 1, marks=pytest.mark.verify),
        pytest.param("gpt", 2, marks=pytest.mark.verify),
        pytest.param("gpt_remat", 2, marks=pytest.mark.verify),
        pytest.param("t5", 2, marks=pytest.mark.verify),
        ("unet", 1),
        pytest.param("unet", 2, marks=pytest.mark.verify),
        pytest.param("llama_nnx", 2, marks=pytest.mark.verify),
        pytest.param("mlp_nnx", 2, marks=pytest.mark.verify),
        pytest.param("moe", 2, marks=pytest.mark.verify),
        pytest.param("vit", 2, marks=pytest.mark.verify),
        ("gpt_scan", 2),
    ],
)
def test_bytes_of_a_cut_are_those_that_cross(name: str, count: int) -> None:
    step = step_of(name, count)
    found = crossing_bytes(*step)
    assert len(found) == len(forward_operators(step[0])) + 1
    for position in sorted({*range(0, len(found), max(1, len(found) // 30)), len(found) - 1}):
        assert found[position] == pytest.approx(really_crossing(step, position), rel=1e-9), position


def test_no_layer_begins_where_the_batch_would_be_read_on_both_sides() -> None:
    """The first block adds up the batch itself, so before and after its sum as much crosses."""
    step = toy_step_of(blocks((64, 64), 32, 4, 32), 2)
    (cut,) = layers(step.loop, step.state_pairs, at_most=2, at_least=2)
    found = boundaries(step.loop, step.state_pairs)
    assert found.crossing_bytes[cut - 1] <= found.crossing_bytes[cut]
    assert found.shared_bytes[cut - 1] > 0 == found.shared_bytes[cut]


def test_work_is_that_of_all_placed_operators() -> None:
    loop, pairs = step_of("gpt")
    total = sum(o.flops for o in loop.body.operators)
    assert 0.98 * total < boundaries(loop, pairs).flops.sum() <= total


def test_cut_inside_a_rematerialised_block_is_dearer_than_between_blocks() -> None:
    loop, pairs = step_of("gpt_remat")
    found = crossing_bytes(loop, pairs)
    blocks = blocks_of(loop)
    between = blocks.index(1)
    inside = range(between + 1, len(blocks) - blocks[::-1].index(1))
    assert layers(loop, pairs, at_most=2) == (between,)
    assert min(found[p] for p in inside) >= found[between]
    assert np.median([found[p] for p in inside]) > 1.5 * found[between]


# ------------------------------------------------------------------------------------------------------------- layers


def blocks_of(loop: Looped) -> list[int | None]:
    """Of every forward operator: the number of the block in whose name it stands."""
    found = [re.search(r"(?:layer|block)s?_?/?(\d+)", operator.source.path) for operator in forward_operators(loop)]
    return [int(one.group(1)) if one else None for one in found]


@pytest.mark.parametrize(("name", "size"), [("gpt", Size.TOY), ("gpt_remat", Size.TOY), ("gpt", Size.BENCH)])
@pytest.mark.parametrize("more", [1, 2, 12])
def test_layers_of_a_gpt_are_its_blocks(name: str, size: Size, more: int) -> None:
    loop, pairs = step_of(name, 2, size)
    blocks = blocks_of(loop)
    count = 1 + max(number for number in blocks if number is not None)
    cuts = layers(loop, pairs, at_most=count + more)
    firsts = [blocks.index(number) for number in range(1, count)]
    last = len(blocks) - blocks[::-1].index(count - 1)
    # The head of the larger one does more than a block and is a layer of its own; the other belongs to the last block.
    assert cuts == tuple([*firsts, last] if size is Size.BENCH else firsts)


def test_blocks_become_identical_layers() -> None:
    loop, pairs = step_of("gpt", 2, Size.BENCH)
    cuts = layers(loop, pairs, at_most=8)
    kinds = [tuple(o.primitive for o in forward_operators(loop)[a:b]) for a, b in pairwise(cuts)]
    assert len(kinds) == 3
    assert len(set(kinds)) == 1


def test_layers_on_demand_are_cut_from_blocks() -> None:
    loop, pairs = step_of("gpt")
    assert len(layers(loop, pairs, at_most=8)) == 1
    assert len(layers(loop, pairs, at_most=8, at_least=4)) >= 3


def test_no_cut_inside_a_scan() -> None:
    assert layers(*step_of("gpt_scan"), at_most=4) == ()


@pytest.mark.parametrize(
    "name",
    ["unet", "llama_nnx", *(pytest.param(name, marks=pytest.mark.verify) for name in ("t5", "mlp_nnx", "moe"))],
)
def test_layers_can_be_cut(name: str) -> None:
    loop, pairs = step_of(name)
    cuts = layers(loop, pairs, at_most=4)
    assert 1 <= len(cuts) <= 3
    assert len(cut(loop, pairs, cuts).stages) == len(cuts) + 1


def test_number_of_layers_must_be_possible() -> None:
    with pytest.raises(PlanError, match="at most 0"):
        layers(*step_of("gpt"), at_most=0)


# ------------------------------------------------------------------------------------------------------ dynamic program


@st.composite
def profiles(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    cuts = draw(st.integers(0, 7))
    work = draw(st.lists(st.integers(1, 40), min_size=cuts + 1, max_size=cuts + 1))
    crossing = draw(st.lists(st.integers(0, 9), min_size=cuts, max_size=cuts))
    return np.array(work, float), np.array(crossing, float), draw(st.integers(1, 9))


def heaviest(work: np.ndarray, cuts: tuple[int, ...]) -> float:
    return max(layer_works(work, cuts))


def layer_works(work: np.ndarray, cuts: tuple[int, ...]) -> list[float]:
    return [float(work[a:b].sum()) for a, b in pairwise([0, *(one + 1 for one in cuts), len(work)])]


@given(profiles())
@settings(max_examples=300, deadline=None)
def test_division_is_the_best_of_all(profile: tuple[np.ndarray, np.ndarray, int]) -> None:
    work, crossing, at_most = profile
    every = list(combinations(range(len(crossing)), min(at_most, len(work)) - 1))
    limit = (1 + SLACK) * min(heaviest(work, cuts) for cuts in every) + 1e-6
    within = [cuts for cuts in every if heaviest(work, cuts) <= limit]
    least = min(max((crossing[one] for one in cuts), default=0.0) for cuts in within)
    within = [cuts for cuts in within if all(crossing[one] <= (1 + SLACK) * least + 1e-9 for one in cuts)]
    best = min(sum(one**2 for one in layer_works(work, cuts)) for cuts in within)
    found = divide(work, crossing, at_most)
    assert found in within
    assert sum(one**2 for one in layer_works(work, found)) == pytest.approx(best)


def test_repeated_units_are_cut_once_and_in_the_same_place() -> None:
    unit, flops = ["norm", "attend", "add", "mix"], [0.0, 8.0, 0.0, 8.0]
    looks = ["embed", *unit * 6, "head"]
    crossing = np.array([0.0, 2.0, *[5.0, 5.0, 2.0, 2.0] * 6, 0.0])
    found = candidate_positions(crossing, np.array([0.0, *flops * 6, 1.0]), looks, 12)
    assert len({position % 4 for position in found}) == 1
    assert found == tuple(range(found[0], found[-1] + 1, 4))
    assert len(found) >= 5


def test_plateaus_give_their_first_position() -> None:
    crossing = np.array([0.0, 9.0, 4.0, 4.0, 4.0, 9.0, 0.0])
    flops = np.array([0.0, 10.0, 0.0, 0.0, 0.0, 12.0])
    assert candidate_positions(crossing, flops, range(6), 2) == (2,)


def test_recomputed_casts_of_weights_do_not_cross() -> None:
    """Half precision and rematerialisation: between blocks the activations cross, there and back, and little else."""
    config = gpt.GPTConfig(
        vocab_size=64, sequence=16, hidden=32, layers=3, heads=4, dtype=jnp.float16, remat=True, tie_embeddings=False
    )
    state = jax.eval_shape(partial(gpt.create_state, jax.random.key(0), config, gpt.OptimizerConfig()))
    tokens = jax.ShapeDtypeStruct((8, config.sequence), jnp.int32)
    program = trace(gpt.train_step, (state, {"tokens": tokens, "targets": tokens}))
    roles, graph = infer_roles(program), build_graph(program.jaxpr, platform="cpu")
    batch, count = roles.leaves(Role.BATCH), 4
    cut_program = accumulated(program, examples_of(graph, batch, roles.leaves(Role.STATE), count), batch)
    loop, pairs = looped(build_graph(cut_program.jaxpr, platform="cpu"), batch, count), tuple(roles.state_pairs)
    found, crossing = layers(loop, pairs, at_most=3), crossing_bytes(loop, pairs)
    activation_bytes = 2 * (8 // count) * config.sequence * config.hidden
    assert len(found) == 2
    assert all(crossing[position] <= 1.2 * 2 * activation_bytes for position in found)
    flops = boundaries(loop, pairs).flops
    work = [flops[start:end].sum() for start, end in pairwise((0, *found, len(flops)))]
    assert max(work) <= 1.2 * flops.sum() / 3
