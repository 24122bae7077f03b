"""Along which dimensions may an equation be cut, and what do the pieces leave behind?

The answer is the equation's :class:`~autopar.graph.ir.Rule`. Its structure comes from Shardy (see
:mod:`autopar.graph.shardy`), asked once for each *distinct* equation: primitive, parameters, operand types. What Shardy
does not say is said here:

* the *kind* of a reduction: Shardy marks sum, maximum, argmax and a gather's looked-up dimension alike
  (:data:`KINDS`); an equation that is not named there combines its elements in a way that no collective repeats;
* a table of the primitives that Shardy has no rule for, or one too generous for an operator that runs on its piece
  alone (:data:`TABLE`).

An equation whose ranked operands and results all have one shape is asked about with a stand-in shape of the same rank,
so thousands of pointwise equations cost a few dozen questions.  What was answered once is known to the whole process: the
next form of the step, and the next model, ask about what is new in them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autopar import _compat
from autopar._compat import JaxprEqn
from autopar.graph.factoring import Dims, Factoring, Mark, Place
from autopar.graph.ir import Factor, FactorKind, Rule
from autopar.graph.shardy import Answer, Question, ask

Shape = tuple[int, ...]

_STAND_IN_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)  # primes, so that no dimension is a product of others
_PLACEMENT_PARAMETERS = frozenset({"sharding", "out_sharding"})


def rules_for(equations: Sequence[JaxprEqn], platform: str) -> list[Rule]:
    """The rule of each equation, when lowered for ``platform`` (``cpu``, ``cuda`` or ``tpu``); see :meth:`Rulebook.of`."""
    return Rulebook(platform).of(equations)


@dataclass(frozen=True)
class _Answered:
    """What this process knows of equations whose parameters are plain values; those of others may be equal by chance only."""

    rules: dict[Hashable, Rule] = field(default_factory=dict)
    patterns: dict[Hashable, Rule | None] = field(default_factory=dict)


@functools.lru_cache(maxsize=16)
def answered(platform: str, context: Hashable) -> _Answered:
    """The answers for one platform and one configuration of JAX, on which both lowering and a few rules depend."""
    return _Answered()


_MOST_ANSWERS = 1 << 16


class Rulebook:
    """Owns the rules found so far for one platform: the many graphs of one step ask about their equations once."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self._known: dict[Hashable, Rule] = {}
        self._patterns: dict[Hashable, Rule | None] = {}
        self._alive: list[JaxprEqn] = []
        """Equations whose identities may stand in keys."""

    def of(self, equations: Sequence[JaxprEqn]) -> list[Rule]:
        """The rule of each equation.

        Equations with bodies (loops, branches, calls) are for the caller to take apart; asked about here, they are blocked
        where their bodies cannot be read. Never raises: an equation that nothing is known of is blocked throughout, with
        ``known=False``.
        """
        keys = _Keys()
        places = [keys.of(equation) for equation in equations]
        new: dict[Hashable, JaxprEqn] = {}
        for key, equation in zip(places, equations, strict=True):
            if key not in self._known:
                new.setdefault(key, equation)
        shared = {key: (equation.primitive, key) for key, equation in new.items() if _is_plain(equation)}
        memory = answered(self.platform, _compat.lowering_context())
        for key, name in shared.items():
            if (rule := memory.rules.get(name)) is not None:
                self._known[key] = rule
                del new[key]
        self._alive += new.values()
        found = dict(zip(new, self._rules_of_distinct(list(new.values()), keys), strict=True))
        self._known |= found
        if len(memory.rules) > _MOST_ANSWERS:
            memory.rules.clear()
        memory.rules.update({shared[key]: rule for key, rule in found.items() if key in shared})
        return [self._known[key] for key in places]

    def _rules_of_distinct(self, equations: Sequence[JaxprEqn], keys: _Keys) -> list[Rule]:
        rules: dict[int, Rule] = {}
        for number, equation in enumerate(equations):
            rule = _from_table(equation)
            if rule is not None:
                rules[number] = rule
        rules |= self._by_stand_in(equations, [n for n in range(len(equations)) if n not in rules], keys)
        rest = [number for number in range(len(equations)) if number not in rules]
        answers = ask([_question(equations[number]) for number in rest], self.platform)
        for number, answer in zip(rest, answers, strict=True):
            rules[number] = _rule_of_answer(equations[number], answer)
        return [rules[number] for number in range(len(equations))]

    def _by_stand_in(self, equations: Sequence[JaxprEqn], numbers: Iterable[int], keys: _Keys) -> dict[int, Rule]:
        """Rules of the equations of one shape, each asked about at the stand-in shape; the others are left out."""
        groups: dict[Hashable, list[int]] = {}
        for number in numbers:
            if _one_shape(equations[number]) is not None:
                groups.setdefault(keys.of(equations[number], stand_in=True), []).append(number)
        new = {key: equations[members[0]] for key, members in groups.items() if key not in self._patterns}
        shared = {key: (equation.primitive, key) for key, equation in new.items() if _is_plain(equation)}
        memory = answered(self.platform, _compat.lowering_context())
        for key, name in shared.items():
            if name in memory.patterns:
                self._patterns[key] = memory.patterns[name]
                del new[key]
        answers = ask([_question(equation, stand_in=True) for equation in new.values()], self.platform)
        for (key, equation), answer in zip(new.items(), answers, strict=True):
            self._patterns[key] = _pattern(equation, answer)
            if key in shared:
                memory.patterns[shared[key]] = self._patterns[key]
        return {
            number: _resized(pattern, _one_shape(equations[number]) or ())
            for key, members in groups.items()
            if (pattern := self._patterns[key]) is not None
            for number in members
        }


def _pattern(equation: JaxprEqn, answer: Answer | None) -> Rule | None:
    """The rule at the stand-in shape; None where it says nothing of other shapes."""
    shapes = [_stand_in(_shape(var)) for var in equation.outvars]
    if answer is None or not answer.complete or list(answer.result_shapes) != shapes:
        return None
    return _rule_of_answer(equation, answer)


def _rule_of_answer(equation: JaxprEqn, answer: Answer | None) -> Rule:
    if answer is None or len(answer.results) != len(equation.outvars):
        return blocked_rule(equation, known=False)
    # A typed key is lowered with its words as trailing dimensions; the equation does not see them.
    operands = [dims[: len(_shape(var))] for dims, var in zip(answer.operands, equation.invars, strict=True)]
    results = [dims[: len(_shape(var))] for dims, var in zip(answer.results, equation.outvars, strict=True)]
    rule = answer.factoring.rule(operands, results, functools.partial(_kind, equation))
    known = answer.complete or any(factor.kind is not FactorKind.BLOCKED for factor in rule.factors)
    return Rule(rule.factors, rule.operands, rule.results, known)


def blocked_rule(equation: JaxprEqn, *, known: bool) -> Rule:
    """Every dimension of every operand and result blocked, each for itself."""
    factoring = Factoring()
    operands, results = (
        [factoring.dims(_shape(var), Mark.BLOCKED) for var in variables]
        for variables in (equation.invars, equation.outvars)
    )
    rule = factoring.rule(operands, results)
    return Rule(rule.factors, rule.operands, rule.results, known)


# ------------------------------------------------------------------------------------------- questions and their keys


def _shape(var: Any) -> Shape:
    return tuple(getattr(var.aval, "shape", ()))


def _dtype(var: Any) -> Any:
    """The dtype, None for a token."""
    return getattr(var.aval, "dtype", None)


def _one_shape(equation: JaxprEqn) -> Shape | None:
    """The shape that all results and all ranked operands share, if the parameters speak of no sizes either."""
    shapes = {_shape(var) for var in equation.outvars} | {_shape(var) for var in equation.invars if _shape(var)}
    speaks_of_sizes = any(isinstance(value, tuple | list | dict) and value for value in equation.params.values())
    if len(shapes) != 1 or speaks_of_sizes or _compat.inner_jaxprs(equation):
        return None
    shape = shapes.pop()
    return shape if 0 < len(shape) <= len(_STAND_IN_SIZES) else None


def _stand_in(shape: Shape) -> Shape:
    return _STAND_IN_SIZES[: len(shape)]


def _resized(pattern: Rule, shape: Shape) -> Rule:
    """A rule found at the stand-in shape, at ``shape``. Stand-in sizes differ: a factor's size names its dimension."""
    sizes = [shape[_STAND_IN_SIZES.index(factor.size)] for factor in pattern.factors]
    kept = [number for number, size in enumerate(sizes) if size != 1]
    renumbered = {number: position for position, number in enumerate(kept)}

    def moved(arrays: tuple[Dims, ...]) -> tuple[Dims, ...]:
        return tuple(tuple(tuple(renumbered[f] for f in dim if f in renumbered) for dim in dims) for dims in arrays)

    kinds = [pattern.factors[number].kind if sizes[number] else FactorKind.BLOCKED for number in kept]
    factors = tuple(Factor(sizes[number], kind) for number, kind in zip(kept, kinds, strict=True))
    return Rule(factors, moved(pattern.operands), moved(pattern.results), pattern.known)


def _question(equation: JaxprEqn, *, stand_in: bool = False) -> Question:
    """How to ask about an equation. Where its results shall lie is a wish, not a meaning, and is left out."""
    parameters = {k: None if k in _PLACEMENT_PARAMETERS else v for k, v in equation.params.items()}

    def bind(*operands: Any) -> Any:
        if equation.effects:
            raise ValueError("an equation with effects may not be repeated for a question")
        return equation.primitive.bind(*operands, **equation.primitive.get_bind_params(parameters))

    return Question(bind, tuple(_type_of(var, stand_in=stand_in) for var in equation.invars))


def _type_of(var: Any, *, stand_in: bool) -> jax.ShapeDtypeStruct:
    shape = _shape(var)
    return jax.ShapeDtypeStruct(_stand_in(shape) if stand_in else shape, _dtype(var) or np.dtype(bool))


def _is_plain(equation: JaxprEqn) -> bool:
    """Whether nothing in the parameters is known by its identity, or holds what the text of it does not say."""
    return not equation.effects and all(
        map(_is_plain_value, (value for name, value in equation.params.items() if name not in _PLACEMENT_PARAMETERS))
    )


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain_value, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_plain_value, value))
    if _compat.is_jaxpr(value):
        return not _compat.consts_of(value) and all(map(_is_plain_inside, _compat.jaxpr_of(value).eqns))
    return value is None or isinstance(value, _PLAIN)


def _is_plain_inside(equation: JaxprEqn) -> bool:
    """Of an equation in a parameter: the text of a literal says all of it where it is one number."""
    return _is_plain(equation) and not any(isinstance(v, _compat.Literal) and _shape(v) for v in equation.invars)


_PLAIN = (str, bool, int, float, complex, enum.Enum, np.dtype, np.generic, _compat.Primitive)


class _Keys:
    """Equal keys for equations of equal rules. Valid while the equations live, because of identities in the keys."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def of(self, equation: JaxprEqn, *, stand_in: bool = False) -> Hashable:
        def types(variables: Sequence[Any]) -> Hashable:
            return tuple(
                (
                    len(_shape(var)) if stand_in else _shape(var),
                    _dtype(var),
                    isinstance(var, _compat.Literal),
                )
                for var in variables
            )

        parameters = tuple(
            (name, self._value(value))
            for name, value in equation.params.items()
            if value is not None and name not in _PLACEMENT_PARAMETERS
        )
        name = equation.primitive.name
        return name, parameters, types(equation.invars), types(equation.outvars), bool(equation.effects)

    def _value(self, value: Any) -> Hashable:
        if value is None or isinstance(value, str | bool | int | enum.Enum | np.dtype):
            return value
        if isinstance(value, float | complex):
            return repr(value)  # nan is not equal to itself
        if isinstance(value, tuple | list):
            return type(value).__name__, *(self._value(item) for item in value)
        if isinstance(value, Mapping):
            return tuple((name, self._value(item)) for name, item in value.items())
        if _compat.is_jaxpr(value):
            if _compat.consts_of(value):  # their values are not in its text
                return "by identity", id(value)
            if id(value) not in self._texts:
                self._texts[id(value)] = str(value)
            return self._texts[id(value)]
        try:
            hash(value)
        except TypeError:
            return "by identity", id(value)
        return value


# ------------------------------------------------------------------------------------------------ kinds of reductions

KindRow = Callable[[JaxprEqn, Mark, tuple[Place, ...]], FactorKind]


def _kind(equation: JaxprEqn, mark: Mark, places: tuple[Place, ...]) -> FactorKind:
    row = KINDS.get(equation.primitive.name)
    return row(equation, mark, places) if row else FactorKind.BLOCKED


def _reduces_by(kind: FactorKind, *, only_bool: bool = False) -> KindRow:
    """The row of a primitive whose reductions are all of one kind.

    A "sum" of booleans is a disjunction, which is no sum; bitwise reductions are a maximum or minimum of booleans only.
    """

    def row(equation: JaxprEqn, mark: Mark, _places: tuple[Place, ...]) -> FactorKind:
        is_bool = _dtype(equation.outvars[0]) == np.dtype(bool)
        fits = is_bool if only_bool else not (is_bool and kind is FactorKind.SUM)
        return kind if fits and mark == Mark.REDUCED else FactorKind.BLOCKED

    return row


def _gather(equation: JaxprEqn, mark: Mark, places: tuple[Place, ...]) -> FactorKind:
    """A dimension of which one row is looked up by the only component of the index.

    A lookup leaves a sum over the devices, so rows of Booleans or keys, which cannot be added, are not looked up so.
    """
    dtype = _dtype(equation.outvars[0])
    if dtype == np.dtype(bool) or jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return FactorKind.BLOCKED
    numbers = equation.params["dimension_numbers"]
    operand_dims = [(0, dim) for dim in numbers.start_index_map if dim in numbers.collapsed_slice_dims]
    single = len(numbers.start_index_map) == 1 and list(places) == operand_dims
    plain = equation.params["mode"] in _PLAIN_MODES
    return FactorKind.LOOKUP if single and plain and mark == Mark.REDUCED else FactorKind.BLOCKED


def _scatter(equation: JaxprEqn, mark: Mark, places: tuple[Place, ...]) -> FactorKind:
    """A dimension of which one row is written by the only component of the index; for sums also the rows that write.

    A sum over pieces of the updates takes the operand once, not once for each piece.
    """
    if mark == Mark.REDUCED and equation.primitive.name == "scatter-add":
        summed = _dtype(equation.outvars[0]) != np.dtype(bool) and all(operand > 0 for operand, _ in places)
        return FactorKind.SUM if summed else FactorKind.BLOCKED
    numbers = equation.params["dimension_numbers"]
    written = [(0, dim) for dim in numbers.scatter_dims_to_operand_dims if dim in numbers.inserted_window_dims]
    single = len(numbers.scatter_dims_to_operand_dims) == 1 and list(places) == written
    plain = equation.params["mode"] in _PLAIN_MODES
    return FactorKind.SCATTER if single and plain and mark == Mark.WRITTEN else FactorKind.BLOCKED


_PLAIN_MODES = (
    jax.lax.GatherScatterMode.CLIP,
    jax.lax.GatherScatterMode.FILL_OR_DROP,
    jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)

KINDS: Mapping[str, KindRow] = {
    "conv_general_dilated": _reduces_by(FactorKind.SUM),
    "dot_general": _reduces_by(FactorKind.SUM),
    "gather": _gather,
    "reduce_and": _reduces_by(FactorKind.MIN, only_bool=True),
    "reduce_max": _reduces_by(FactorKind.MAX),
    "reduce_min": _reduces_by(FactorKind.MIN),
    "reduce_or": _reduces_by(FactorKind.MAX, only_bool=True),
    "reduce_sum": _reduces_by(FactorKind.SUM),
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-max": _scatter,
    "scatter-min": _scatter,
    "scatter-mul": _scatter,
    "scatter-sub": _scatter,
}
"""What a primitive's marked factors leave behind; a primitive that is not here may not be cut along them."""


# ---------------------------------------------------------------------------------------------------------- the table

Row = Callable[[JaxprEqn], Rule | None]


def _from_table(equation: JaxprEqn) -> Rule | None:
    row = TABLE.get(equation.primitive.name)
    if row is None:
        return None
    try:
        return row(equation)
    except (KeyError, AttributeError, TypeError):  # the parameters are not those of the JAX versions known here
        return None


def _aligned(equation: JaxprEqn, whole: Iterable[int] = (), *, depth: int | None = None) -> Rule:
    """Dimension *d* of every ranked operand and result is one factor; those in ``whole``, or from ``depth`` on, are
    blocked, as is one whose size differs between arrays.
    """
    whole = frozenset(whole)
    variables = [*equation.invars, *equation.outvars]
    ranked = [_shape(var) for var in variables if _shape(var)]
    deepest = max(map(len, ranked), default=0)
    factoring = Factoring()
    shared: list[tuple[int, ...] | None] = []
    for dim in range(deepest):
        sizes = {shape[dim] for shape in ranked if len(shape) > dim}
        free = dim not in whole and (depth is None or dim < depth) and len(sizes) == 1
        free &= all(len(shape) > dim for shape in ranked)
        shared.append(factoring.dims((sizes.pop(),))[0] if free else None)

    def dims(var: Any) -> Dims:
        own = factoring.dims(_shape(var), Mark.BLOCKED)
        return tuple(atoms if (tied := shared[dim]) is None else tied for dim, atoms in enumerate(own))

    return factoring.rule([dims(var) for var in equation.invars], [dims(var) for var in equation.outvars])


def _all_but(parameter: str) -> Row:
    """Every dimension may be cut but the one that the parameter names."""

    def row(equation: JaxprEqn) -> Rule:
        axis = equation.params[parameter]
        return _aligned(equation, {axis % len(_shape(equation.invars[0]))})

    return row


def _batched(core_rank: int) -> Row:
    """The last ``core_rank`` dimensions of the first operand are one problem, those before them enumerate problems."""

    def row(equation: JaxprEqn) -> Rule:
        return _aligned(equation, depth=len(_shape(equation.invars[0])) - core_rank)

    return row


def _each_its_own(equation: JaxprEqn) -> Rule:
    """Result *k* is operand *k*."""
    factoring = Factoring()
    arrays = [factoring.dims(_shape(var)) for var in equation.invars]
    return factoring.rule(arrays, arrays)


def _whole(equation: JaxprEqn) -> Rule:
    """Known, and known to be of one piece (key derivation: a few words; generators that carry a state)."""
    return blocked_rule(equation, known=True)


def _reshape(equation: JaxprEqn) -> Rule | None:
    if len(equation.invars) != 1:
        return None
    factoring = Factoring()
    operand, result = factoring.dims(_shape(equation.invars[0])), factoring.dims(_shape(equation.outvars[0]))
    order = equation.params["dimensions"]  # read in this order, as after a transposition
    factoring.tie(sum(operand if order is None else (operand[dim] for dim in order), ()), sum(result, ()))
    return factoring.rule([operand], [result])


def _iota(equation: JaxprEqn) -> Rule | None:
    """Any dimension: a piece of the counting one starts at its offset, which the local program adds."""
    factoring = Factoring()
    return None if equation.invars else factoring.rule([], [factoring.dims(_shape(equation.outvars[0]))])


def _random_bits(equation: JaxprEqn) -> Rule:
    """Partitionable Threefry hashes each element's global position: a piece can be made alone, given its offset.

    Other generators run a state through the whole array. A batch of keys makes leading dimensions of results.
    """
    keys, bits = equation.invars[0], equation.outvars[0]
    if str(_dtype(keys)) != "key<fry>" or not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        return blocked_rule(equation, known=True)
    factoring = Factoring()
    operand = factoring.dims(_shape(keys))
    return factoring.rule([operand], [operand + factoring.dims(_shape(bits)[len(operand) :])])


def _windows(equation: JaxprEqn) -> Rule:
    """The dimensions along which the window is one element wide and does not skip, pad or dilate."""
    p = equation.params
    window = zip(p["window_dimensions"], p["window_strides"], p["padding"], strict=True)
    whole = {dim for dim, (size, stride, (low, high)) in enumerate(window) if (size, stride, low, high) != (1, 1, 0, 0)}
    for name in ("base_dilation", "window_dilation"):
        whole |= {dim for dim, dilation in enumerate(p.get(name) or ()) if dilation != 1}
    return _aligned(equation, whole)


def _convolution(equation: JaxprEqn) -> Rule:
    """Batch, input features (summed), output features and groups; image dimensions would need their neighbours' rows.

    Of g feature groups the input features are (g, i) and the output features (g, o); of b batch groups the images are
    (b, n) and the output features (b, o).  Groups do not mix, so whole ones may be shared out.  Shardy is not asked: it
    lets a padded image dimension be summed in pieces.
    """
    p = equation.params
    numbers = p["dimension_numbers"]
    image, kernel, result = (_shape(var) for var in (*equation.invars, *equation.outvars))
    factors: list[Factor] = []

    def factor(size: int, kind: FactorKind) -> tuple[int, ...]:
        if size == 1:
            return ()
        factors.append(Factor(size, kind))
        return (len(factors) - 1,)

    def unless(grouped: bool, kind: FactorKind) -> FactorKind:
        return FactorKind.BLOCKED if grouped else kind

    feature_groups, batch_groups = p["feature_group_count"], p["batch_group_count"]
    by_batch, by_feature = batch_groups > 1, feature_groups > 1
    images = factor(batch_groups, FactorKind.PARALLEL)
    batch = factor(image[numbers.lhs_spec[0]] // batch_groups, unless(by_batch, FactorKind.PARALLEL))
    channels = factor(feature_groups, FactorKind.PARALLEL)
    inward = factor(image[numbers.lhs_spec[1]] // feature_groups, unless(by_feature, FactorKind.SUM))
    out_of_group = kernel[numbers.rhs_spec[0]] // (batch_groups * feature_groups)
    outward = images + channels + factor(out_of_group, unless(by_batch or by_feature, FactorKind.PARALLEL))

    def mapping(shape: Shape, named: Mapping[int, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        blocked = FactorKind.BLOCKED
        return tuple(named[dim] if dim in named else factor(extent, blocked) for dim, extent in enumerate(shape))

    image_map = mapping(image, {numbers.lhs_spec[0]: images + batch, numbers.lhs_spec[1]: channels + inward})
    kernel_map = mapping(kernel, {numbers.rhs_spec[0]: outward, numbers.rhs_spec[1]: inward})
    result_map = mapping(result, {numbers.out_spec[0]: batch, numbers.out_spec[1]: outward})
    return Rule(tuple(factors), (image_map, kernel_map), (result_map,))


TABLE: Mapping[str, Row] = {
    # Shardy has no rule for these, or none on some platform.
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _all_but("axis")),
    **dict.fromkeys(("cholesky", "triangular_solve", "lu", "qr", "householder_product"), _batched(2)),
    **dict.fromkeys(("eig", "eigh", "svd", "schur", "hessenberg", "tridiagonal"), _batched(2)),
    **dict.fromkeys(("lu_pivots_to_permutation", "tridiagonal_solve"), _batched(1)),
    **dict.fromkeys(("optimization_barrier", "sharding_constraint", "reshard", "device_put"), _each_its_own),
    **dict.fromkeys(("random_wrap", "random_unwrap", "random_seed", "random_fold_in", "random_split"), _whole),
    **dict.fromkeys(("random_clone", "rng_bit_generator", "rng_uniform"), _whole),
    "approx_top_k": _all_but("reduction_dimension"),
    "split": _all_but("axis"),
    "top_k": _all_but("axis"),
    "iota": _iota,
    "random_bits": _random_bits,
    # Pointwise by definition, but some are loops when lowered.
    **dict.fromkeys(("bessel_i0e", "bessel_i1e", "igamma", "igammac", "igamma_grad_a", "threefry2x32"), _aligned),
    "regularized_incomplete_beta": _aligned,
    # Shardy has rules for these, but for a partitioner's use, or not the same ones in all versions.
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"), _windows),
    **dict.fromkeys(("select_and_scatter_add", "select_and_gather_add"), _windows),
    "conv_general_dilated": _convolution,
    "reshape": _reshape,
}
"""Primitives whose rule is stated here. A row may return None: then Shardy is asked."""
