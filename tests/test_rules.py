"""Is a rule true? Cut what it says may be cut, run the pieces, put them together, compare with the whole."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax import numpy as jnp
from jax.extend import core as jex

from autopar import _compat
from autopar.graph import rules as rules_module
from autopar.graph.ir import Factor, FactorKind, Rule
from autopar.graph.rule_tables import KINDS, TABLE
from autopar.graph.rules import Rulebook, rules_for
from autopar.graph.shardy import ask
from tests.rule_cases import CASES, KEY, Case, X, integers, matrices, normal, shaped

SIGNS = {
    FactorKind.PARALLEL: "",
    FactorKind.SUM: "+",
    FactorKind.MAX: "^",
    FactorKind.MIN: "v",
    FactorKind.LOOKUP: "?",
    FactorKind.SCATTER: "!",
    FactorKind.BLOCKED: "#",
}
PLATFORMS = ("cpu", "cuda", "tpu")
IN_PIECES = {FactorKind.PARALLEL, FactorKind.SUM, FactorKind.MAX, FactorKind.MIN}


def text(rule: Rule) -> str:
    """``a b+, b+ c -> a c`` for a matrix product; ``#`` is a blocked factor, ``1`` a dimension of size 1."""
    letters = itertools.count()
    names = {
        number: "#" if factor.kind is FactorKind.BLOCKED else "abcdefghij"[next(letters)] + SIGNS[factor.kind]
        for number, factor in enumerate(rule.factors)
    }

    def side(arrays: tuple[tuple[tuple[int, ...], ...], ...]) -> str:
        return ", ".join(" ".join("".join(names[f] for f in dim) or "1" for dim in dims) or "." for dims in arrays)

    return f"{side(rule.operands)} -> {side(rule.results)}".strip()


CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "checkpoint"}


# ------------------------------------------------------------------------------------------------------- the machinery


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """All equations without bodies, calls opened."""
    for equation in _compat.jaxpr_of(jaxpr).eqns:
        if equation.primitive.name in CALLS:
            yield from equations_of(_compat.inner_jaxprs(equation)[0])
        elif not _compat.inner_jaxprs(equation) or equation.primitive.name.startswith(("scatter", "reduce")):
            yield equation


def equation_of(case: Case) -> Any:
    jaxpr = jax.make_jaxpr(functools.partial(case.run, case.result_shape))(*case.arguments)
    found = [equation for equation in equations_of(jaxpr) if equation.primitive.name == case.primitive]
    assert found, jaxpr
    shapes = [var.aval.shape for var in found[-1].invars if not isinstance(var, jex.Literal)]
    assert shapes == [np.shape(argument) for argument in case.arguments], "the arguments are not the operands"
    return found[-1]


def the_rule(function: Callable[..., Any], *arguments: Any, platform: str = "cpu") -> Rule:
    """The rule of a whole function as one equation: the composition of its operators' rules."""
    (equation,) = jax.make_jaxpr(jax.jit(function))(*arguments).jaxpr.eqns
    return rules_for([equation], platform)[0]


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """As in a process that has asked nothing yet; what a test has made it believe is forgotten."""
    rules_module.answered.cache_clear()
    yield
    rules_module.answered.cache_clear()


@functools.cache
def rules_of_cases(platform: str) -> dict[int, Rule]:
    with jax.threefry_partitionable(True):
        return dict(zip(map(id, CASES), rules_for([equation_of(case) for case in CASES], platform), strict=True))


def results_of(case: Case, shape: tuple[int, ...], arguments: list[Any]) -> list[np.ndarray]:
    """The results of the case's equation (a wrapper may reorder them); of the whole function if it names none."""
    jaxpr = jax.make_jaxpr(functools.partial(case.run, shape))(*arguments)
    of_equation, of_program = evaluate(jaxpr, arguments, case.primitive)
    return [np.asarray(result) for result in (of_equation if case.primitive else of_program)]


def evaluate(closed: Any, arguments: list[Any], primitive: str) -> tuple[list[Any], list[Any]]:
    """The results of the last equation of a primitive, and of the whole program."""
    jaxpr = _compat.jaxpr_of(closed)
    values = dict(zip(jaxpr.constvars, _compat.consts_of(closed), strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))
    read = lambda atom: atom.val if isinstance(atom, jex.Literal) else values[atom]  # noqa: E731
    watched: list[Any] = []
    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name in CALLS:
            inner, results = evaluate(_compat.inner_jaxprs(equation)[0], operands, primitive)
            watched = inner or watched
        else:
            bound = equation.primitive.bind(*operands, **equation.params)
            results = list(bound) if equation.primitive.multiple_results else [bound]
            watched = results if equation.primitive.name == primitive else watched
        values |= dict(zip(equation.outvars, results, strict=True))
    return watched, [read(atom) for atom in jaxpr.outvars]


def axes_of(dims: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The factors of an array, one after the other."""
    return tuple(factor for dim in dims for factor in dim)


def piece_of(array: Any, rule: Rule, dims: tuple[tuple[int, ...], ...], factor: int, half: int) -> Any:
    """One half of an array along a factor; the array itself if it lacks the factor."""
    axes = axes_of(dims)
    if factor not in axes:
        return array
    split = array.reshape([rule.factors[axis].size for axis in axes])
    size = rule.factors[factor].size // 2
    taken = split[(slice(None),) * axes.index(factor) + (slice(half * size, (half + 1) * size),)]
    return taken.reshape(piece_shape(rule, dims, factor))


def piece_shape(rule: Rule, dims: tuple[tuple[int, ...], ...], factor: int) -> tuple[int, ...]:
    sizes = [f.size // (2 if number == factor else 1) for number, f in enumerate(rule.factors)]
    return tuple(math.prod(sizes[axis] for axis in dim) for dim in dims)


def joined(halves: list[np.ndarray], rule: Rule, dims: tuple[tuple[int, ...], ...], factor: int) -> np.ndarray:
    axes = axes_of(dims)
    local = [rule.factors[axis].size // (2 if axis == factor else 1) for axis in axes]
    rest = halves[0].shape[len(dims) :]
    whole = np.concatenate([half.reshape([*local, *rest]) for half in halves], axes.index(factor))
    return whole.reshape([math.prod(rule.factors[axis].size for axis in dim) for dim in dims] + list(rest))


def combined(halves: list[np.ndarray], rule: Rule, dims: tuple[tuple[int, ...], ...], factor: int) -> np.ndarray:
    """What the two pieces' results say about the whole result."""
    match rule.factors[factor].kind:
        case FactorKind.PARALLEL if factor in axes_of(dims):
            return joined(halves, rule, dims, factor)
        case FactorKind.PARALLEL:
            np.testing.assert_array_equal(*halves)
            return halves[0]
        case FactorKind.SUM:
            return halves[0] + halves[1]
        case FactorKind.MAX:
            return np.maximum(*halves)
        case FactorKind.MIN:
            return np.minimum(*halves)
    raise AssertionError(rule.factors[factor])


def check_by_cutting(case: Case, equation: Any, rule: Rule) -> int:
    """Cut each factor that may be cut into halves and compare; returns how many factors were tried."""
    if not any(factor.kind in IN_PIECES for factor in rule.factors):
        return 0
    taken = [dims for dims, var in zip(rule.operands, equation.invars, strict=True) if not isinstance(var, jex.Literal)]
    whole = results_of(case, case.result_shape, list(case.arguments))
    tried = 0
    for factor, about in enumerate(rule.factors):
        if about.kind not in IN_PIECES:
            continue
        assert about.size % 2 == 0, "choose even sizes, or nothing is tested"
        halves = []
        for half in range(2):
            pieces = [piece_of(a, rule, dims, factor, half) for a, dims in zip(case.arguments, taken, strict=True)]
            if case.once is not None and half and about.kind is FactorKind.SUM:
                pieces[case.once] = np.zeros_like(pieces[case.once])
            halves.append(results_of(case, piece_shape(rule, rule.results[0], factor), pieces))
        for expected, dims, *parts in zip(whole, rule.results, *halves, strict=True):
            np.testing.assert_allclose(combined(parts, rule, dims, factor), expected, rtol=2e-5, atol=2e-5)
        tried += 1
    return tried


# ----------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("platform", PLATFORMS)
def test_rules_are_the_same_on_every_platform(platform: str) -> None:
    rules = rules_of_cases(platform)
    assert [f"{case.primitive}: {text(rules[id(case)])}" for case in CASES] == [str(case) for case in CASES]
    assert all(rule.known for rule in rules.values())


@pytest.mark.parametrize("case", [case for case in CASES if not case.counts_positions], ids=str)
def test_pieces_make_the_whole(case: Case) -> None:
    rule = rules_of_cases("cpu")[id(case)]
    tried = check_by_cutting(case, equation_of(case), rule)
    assert tried == sum(factor.kind in IN_PIECES for factor in rule.factors)


def test_every_row_has_a_case() -> None:
    names = {case.primitive for case in CASES}
    assert set(TABLE) <= names
    assert set(KINDS) <= names


# ------------------------------------------------------------------------------------- composition, kinds, and the rest


def softmax(x: Any) -> Any:
    return jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True)


COMPOSED = [
    ("reduced and kept", softmax, (normal(4, 6),), "a # -> a #"),
    ("mixed with its transpose", lambda x: x + x.T, (normal(4, 4),), "# # -> # #"),
    ("twice in one array", lambda x: jnp.outer(x, x), (normal(4),), "# -> # #"),
    ("branch", lambda p, x: x + lax.cond(p, jnp.sum, jnp.max, x), (np.True_, normal(4, 6)), "., # # -> # #"),
    (
        "library call",
        lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True),
        (matrices(6), normal(6, 4, 2)),
        "a # #, a # # -> a # #",
    ),
    ("two results", lambda x, y: (x + 1, y.T * 2), (normal(4, 6), normal(2, 8)), "a b, c d -> a b, d c"),
    ("counted", lambda x: x + jnp.arange(6), (normal(4, 6),), "a # -> a #"),
    ("one hot", lambda i: jax.nn.one_hot(i, 6), (integers(6, 4),), "a -> a #"),
    ("table of constants", lambda x: x * np.arange(6.0, dtype=np.float32), (normal(4, 6),), "a # -> a #"),
    ("one number", lambda x: x * jnp.full(x.shape, 2.0), (normal(4, 6),), "a b -> a b"),
    ("flattened and back", lambda x: jnp.tanh(x.reshape(-1)).reshape(x.shape), (normal(4, 6),), "a b -> a b"),
    ("heads", lambda x: x.reshape(4, 2, 8).transpose(1, 0, 2), (normal(4, 16),), "a bc -> b a c"),
    ("shifted", lambda x: x - jnp.roll(x, 1, 0), (normal(4, 6),), "# a -> # a"),
    ("custom derivative", jax.nn.relu, (normal(4, 6),), "a b -> a b"),
    ("loop", lambda x: lax.fori_loop(0, 3, lambda _, y: y * x, x), (normal(4, 6),), "# # -> # #"),
    ("attention", lambda q, k: jax.nn.softmax(q @ k.mT), (normal(2, 4, 8), normal(2, 6, 8)), "a b #, a # # -> a b #"),
]


@pytest.mark.parametrize(("name", "function", "arguments", "expected"), COMPOSED, ids=[case[0] for case in COMPOSED])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_composition(name: str, function: Callable[..., Any], arguments: Any, expected: str, platform: str) -> None:
    rule = the_rule(function, *arguments, platform=platform)
    assert text(rule) == expected
    assert rule.known == (name not in ("loop", "branch"))


@pytest.mark.parametrize("composed", [c for c in COMPOSED if c[0] != "heads"], ids=lambda composed: composed[0])
def test_a_composed_rule_holds_when_cut(composed: Any) -> None:
    """Of the functions that make sense at any size ("heads" has a constant of its shape in it)."""
    _, function, arguments, expected = composed
    (equation,) = jax.make_jaxpr(jax.jit(function))(*arguments).jaxpr.eqns
    rule = the_rule(function, *arguments)
    tried = check_by_cutting(Case("", expected, shaped(function), arguments), equation, rule)
    assert tried == sum(factor.kind in IN_PIECES for factor in rule.factors)


def test_a_wrong_rule_is_found_out() -> None:
    """The machinery itself: rules that are false must fail when cut."""
    for case, lie in [
        (Case("cumsum", "a b -> a b", shaped(lambda x: lax.cumsum(x, axis=1)), (normal(4, 6),)), FactorKind.PARALLEL),
        (Case("reduce_max", "a+ -> .", shaped(lambda x: x.max()), (normal(6),)), FactorKind.SUM),
        (Case("reduce_sum", "a^ -> .", shaped(lambda x: x.sum()), (normal(6),)), FactorKind.MAX),
        (Case("argmax", "a^ -> .", shaped(lambda x: lax.argmax(x, 0, jnp.int32)), (normal(6),)), FactorKind.MAX),
    ]:
        equation = equation_of(case)
        (rule,) = rules_for([equation], "cpu")
        factors = tuple(Factor(factor.size, lie) for factor in rule.factors)
        aligned = rule.operands if rule.results[0] else rule.results
        with pytest.raises(AssertionError):
            check_by_cutting(case, equation, Rule(factors, rule.operands, aligned))


def test_sums_of_booleans_are_no_sums() -> None:
    equation = jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))))(X[0] > 0, X[0].T > 0).eqns[
        0
    ]
    assert text(rules_for([equation], "cpu")[0]) == "a #, # b -> a b"


def test_size_one_and_empty_dimensions() -> None:
    equation = jax.make_jaxpr(lambda x, y: x + y)(normal(1, 4), np.zeros((1, 4), np.float32)).eqns[0]
    assert text(rules_for([equation], "cpu")[0]) == "1 a, 1 a -> 1 a"
    for function in (lambda x: x + x, lambda x: x.reshape(4, 0), lambda x: x.sum(0)):
        equation = jax.make_jaxpr(function)(np.zeros((0, 4), np.float32)).eqns[0]
        assert all(factor.size for factor in rules_for([equation], "cpu")[0].factors if factor.kind in IN_PIECES)


def test_a_size_of_stand_in_pieces_is_not_taken_for_real() -> None:
    """Shapes that happen to equal the stand-in's, and ones that cannot stand in, are right as well."""
    functions = [lambda x: x * 2, lambda x: x.T, lambda x: x @ x.T, lambda x: lax.rev(x, (1,)), jnp.square]
    expected = ["a b, . -> a b", "a b -> b a", "a b -> b a", "a # -> a #", "a b -> a b"]
    for shape in [(2, 3), (3, 3), (4, 4)]:
        equations = [jax.make_jaxpr(function)(normal(*shape)).eqns[0] for function in functions]
        assert [text(rule) for rule in rules_for(equations, "cpu")] == expected


@pytest.mark.usefixtures("nothing_known")
def test_an_answer_for_other_shapes_than_the_stand_in_is_not_used() -> None:
    def fixed_shape(questions: Any, platform: str) -> Any:
        answers = ask(questions, platform)
        stands_in = questions and questions[0].operands[0].shape == (2, 3)
        return [dataclasses.replace(answer, result_shapes=((4, 6),)) for answer in answers] if stands_in else answers

    equation = jax.make_jaxpr(jnp.tanh)(normal(4, 6)).eqns[0]
    with mock.patch.object(rules_module, "ask", side_effect=fixed_shape) as asked:
        assert text(rules_for([equation], "cpu")[0]) == "a b -> a b"
    assert [[question.operands[0].shape for question in call.args[0]] for call in asked.call_args_list] == [
        [(2, 3)],
        [(4, 6)],
    ]


# --------------------------------------------------------------------------------------------------------- the unknown


def no_lowering() -> jex.Primitive:
    primitive = jex.Primitive("autopar_test_unlowered")
    primitive.def_abstract_eval(lambda aval: aval)
    return primitive


def test_the_unknown_is_blocked_and_harms_nobody_else() -> None:
    unlowered = no_lowering()

    def program(x: Any) -> Any:
        y = jnp.tanh(x)
        z = jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((4, 6), np.float32), y)
        jax.debug.callback(print, z)
        return unlowered.bind(jnp.sin(z).sum(1)) + y.max(1)

    equations = list(equations_of(jax.make_jaxpr(program)(normal(4, 6))))
    by_name = {e.primitive.name: rule for e, rule in zip(equations, rules_for(equations, "cuda"), strict=True)}
    unknown = {name for name, rule in by_name.items() if not rule.known}
    assert unknown == {"pure_callback", "debug_callback", "autopar_test_unlowered"}
    for name in unknown:
        assert {factor.kind for factor in by_name[name].factors} == {FactorKind.BLOCKED}
    assert text(by_name["pure_callback"]) == "# # -> # #"
    assert text(by_name["sin"]) == "a b -> a b"
    assert text(by_name["reduce_sum"]) == "a b+ -> a"


def test_no_equations() -> None:
    assert rules_for([], "cpu") == []


def test_random_bits_need_partitionable_threefry() -> None:
    (equation,) = [e for e in equations_of(jax.make_jaxpr(lambda k: jax.random.bits(k, (4, 6)))(KEY)) if e.outvars]
    with jax.threefry_partitionable(False):
        assert text(rules_for([equation], "cpu")[0]) == ". -> # #"
    with jax.threefry_partitionable(True):
        assert text(rules_for([equation], "cpu")[0]) == ". -> a b"


# ------------------------------------------------------------------------------------------------------ a whole program


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False)(
            nn.LayerNorm()(x), mask=nn.make_causal_mask(jnp.ones(x.shape[:2]))
        )
        x = x + nn.Dropout(0.1, deterministic=False)(h)
        return x + nn.Dense(16)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(50, 16)
        x = embed(tokens) + nn.Embed(12, 16)(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            x = Block()(x)
        return embed.attend(nn.LayerNorm()(x))


@functools.cache
def train_step_equations(layers: int) -> tuple[Any, ...]:
    model = Transformer(layers)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def step(params: Any, state: Any, tokens: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = model.apply(params, tokens, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    tokens = jax.ShapeDtypeStruct((4, 12), jnp.int32)
    params = jax.eval_shape(lambda t: model.init({"params": KEY, "dropout": KEY}, t), tokens)
    state = jax.eval_shape(optimizer.init, params)
    return tuple(equations_of(jax.make_jaxpr(step)(params, state, tokens, KEY)))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_train_step_is_known_throughout(platform: str) -> None:
    equations = train_step_equations(2)
    rules = rules_for(equations, platform)
    assert all(rule.known for rule in rules)
    kinds = {
        kind: {
            e.primitive.name for e, rule in zip(equations, rules, strict=True) for f in rule.factors if f.kind is kind
        }
        for kind in FactorKind
    }
    assert kinds[FactorKind.SUM] == {"dot_general", "reduce_sum", "scatter-add"}
    assert kinds[FactorKind.MAX] >= {"reduce_max"}
    assert kinds[FactorKind.LOOKUP] == {"gather"}
    assert kinds[FactorKind.SCATTER] == {"scatter-add"}
    for equation, rule in zip(equations, rules, strict=True):
        assert [len(dims) for dims in rule.operands] == [var.aval.ndim for var in equation.invars]
        shapes = [
            tuple(math.prod(rule.factors[f].size for f in dim) for dim in dims) for dims in rule.operands + rule.results
        ]
        assert shapes == [var.aval.shape for var in (*equation.invars, *equation.outvars)]


@pytest.mark.usefixtures("nothing_known")
def test_questions_do_not_grow_with_depth_or_shapes() -> None:
    def questions(equations: tuple[Any, ...]) -> int:
        rules_module.answered.cache_clear()
        with mock.patch.object(rules_module, "ask", wraps=rules_module.ask) as asked:
            rules_for(equations, "cpu")
        return sum(len(call.args[0]) for call in asked.call_args_list)

    assert questions(train_step_equations(3)) == questions(train_step_equations(2)) < 300
    shapes = [(n, m) for n in range(1, 20) for m in range(1, 20)]
    many = tuple(jax.make_jaxpr(lambda x: x * x)(jax.ShapeDtypeStruct(shape, np.float32)).eqns[0] for shape in shapes)
    assert questions(many) == 1


@pytest.mark.usefixtures("nothing_known")
def test_a_rulebook_asks_of_each_equation_once() -> None:
    equations = train_step_equations(2)
    book = Rulebook("cpu")
    first = book.of(equations[: len(equations) // 2])
    whole = book.of(equations)
    rules_module.answered.cache_clear()
    assert whole == rules_for(equations, "cpu")
    assert whole[: len(first)] == first
    rules_module.answered.cache_clear()
    with mock.patch.object(rules_module, "ask", return_value=[]) as asked:
        assert book.of(equations) == whole
    assert not any(call.args[0] for call in asked.call_args_list)


@pytest.mark.usefixtures("nothing_known")
def test_what_was_answered_for_one_step_is_known_of_the_next() -> None:
    rules_for(train_step_equations(2), "cpu")
    train_step_equations.cache_clear()
    anew = train_step_equations(2)
    with mock.patch.object(rules_module, "ask", return_value=[]) as asked:
        found = rules_for(anew, "cpu")
    assert not any(call.args[0] for call in asked.call_args_list)
    rules_module.answered.cache_clear()
    assert found == rules_for(anew, "cpu")


@pytest.mark.usefixtures("nothing_known")
def test_bodies_of_one_text_that_hold_other_constants_have_rules_of_their_own() -> None:
    counted, zeros = np.arange(24.0).reshape(4, 6), np.zeros((4, 6))
    book = Rulebook("cpu")
    for values, expected in ((zeros, "a b -> a b"), (counted, "# # -> # #"), (zeros, "a b -> a b")):
        (equation,) = jax.make_jaxpr(jax.jit(lambda x, values=values: x + values))(counted).eqns
        assert text(book.of([equation])[0]) == text(rules_for([equation], "cpu")[0]) == expected
