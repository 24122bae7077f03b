"""What does Shardy say an equation's dimensions are?

Let an equation lower to StableHLO operators o₁ … oₙ. Shardy's pass ``sdy-populate-op-sharding-rules`` gives each oᵢ an
einsum-like rule over factors of its own. The equation's factors are the classes of the finest equivalence that

* ties a value's dimension, where oᵢ makes it, to the same dimension, where oⱼ reads it, and
* ties factors of one oᵢ as its rule does,

with dimensions refined where one side is a product of the other's. This file lowers many equations in one module (no
XLA compilation: that is what makes a question cost a fraction of a millisecond), runs the pass, and walks the dataflow,
calls included, between each equation's own arguments and results.

Shardy speaks about what a *partitioner*, which may still insert communication, can do with a factor. An operator that
runs on its piece alone asks for more, so the walk is stricter in these places:

* factors that are permuted or need replication are blocked, and so is one that an operator's operand has but its
  results lack without reducing it, or that a result has without any operand (a broadcast excepted);
* a factor whose size is not that of the dimension that carries it is blocked (slices, strided windows);
* a value that knows its position (``iota``, a constant that is not one number) is blocked where it varies;
* a scattered-into dimension that the updates lack passes through in Shardy's eyes; here it is marked ``WRITTEN``, and
  blocked where the write is a ``dynamic_update_slice``;
* a padded dimension is blocked even where cropping keeps its size (jax 0.10's Shardy takes it for untouched);
* an operator without a rule blocks what it touches, and everything if it has regions, because these may capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy

from autopar.graph.factoring import Dims, Factoring, Mark

_PASSES = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
_RULE = "sdy.sharding_rule"
_CHLO_NOT_POINTWISE = frozenset({"chlo.top_k", "chlo.scan"})

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """One equation: what binds it to arguments, and the types of these."""

    bind: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class Answer:
    """The factors of one equation's operands and results (shapes as lowered: a typed key has trailing words).

    ``complete`` is False where an operator without a rule stood in the lowering.
    """

    factoring: Factoring
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    result_shapes: tuple[Shape, ...]
    complete: bool


def ask(questions: Sequence[Question], platform: str) -> list[Answer | None]:
    """Shardy's answer to each question when lowered for ``platform`` (``cpu``, ``cuda`` or ``tpu``).

    All questions share one lowering; if that fails, halves are tried, so that one bad equation costs a logarithmic
    number of lowerings. ``None`` stands for an equation that cannot be bound or lowered.
    """
    if not questions:
        return []
    try:
        return _ask_together(questions, platform)
    except Exception:  # noqa: BLE001 — a lowering rule is foreign code and may raise anything
        if len(questions) == 1:
            return [None]
        middle = len(questions) // 2
        return ask(questions[:middle], platform) + ask(questions[middle:], platform)


def _ask_together(questions: Sequence[Question], platform: str) -> list[Answer | None]:
    widths: list[int | None] = []

    def program(arguments: Sequence[Sequence[Any]]) -> list[Any]:
        results: list[Any] = []
        widths.clear()
        for question, operands in zip(questions, arguments, strict=True):
            try:
                bound = jax.tree.leaves(question.bind(*operands))
            except Exception:  # noqa: BLE001 — as above: this equation is unknown, the others are not
                widths.append(None)
                continue
            widths.append(len(bound))
            results += bound
        return results

    arguments = [question.operands for question in questions]
    traced = jax.jit(program, keep_unused=True).trace(arguments)
    module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse(_PASSES).run(module.operation)
        return _read(module, questions, widths)


def _read(module: Any, questions: Sequence[Question], widths: Sequence[int | None]) -> list[Answer | None]:
    functions = {
        ir.StringAttr(operation.attributes["sym_name"]).value: _Block(operation.regions[0].blocks[0])
        for operation in module.body.operations
        if operation.operation.name == "func.func"
    }
    main = functions["main"]
    rules: dict[Any, _OpRule] = {}
    answers: list[Answer | None] = []
    first_argument = first_result = 0
    if len(main.arguments) != sum(len(question.operands) for question in questions):
        raise ValueError("the lowered function does not have one argument for each operand")
    for question, width in zip(questions, widths, strict=True):
        arguments = main.arguments[first_argument : first_argument + len(question.operands)]
        first_argument += len(question.operands)
        if width is None:
            answers.append(None)
            continue
        results = main.returned[first_result : first_result + width]
        first_result += width
        answers.append(_Walk(functions, rules).answer(main, arguments, results))
    return answers


class _Block:
    """A function's only block, indexed by what defines each value."""

    def __init__(self, block: Any) -> None:
        self.arguments = list(block.arguments)
        self.operations = [operation.operation for operation in block.operations]
        self.returned = list(self.operations[-1].operands)
        self._makers = {
            result: number for number, operation in enumerate(self.operations) for result in operation.results
        }

    def behind(self, values: Iterable[Any]) -> list[Any]:
        """The operations that these values depend on, in program order."""
        stack = list(values)
        needed: set[int] = set()
        while stack:
            number = self._makers.get(stack.pop())
            if number is not None and number not in needed:
                needed.add(number)
                stack += self.operations[number].operands
        return [self.operations[number] for number in sorted(needed)]


@dataclass(frozen=True)
class _OpRule:
    """An ``sdy.sharding_rule`` as plain tuples."""

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduced: frozenset[int]
    blocked: frozenset[int]


def _parse(attribute: Any) -> _OpRule:
    rule = sdy.OpShardingRuleAttr(attribute)

    def dims(mappings: Any) -> tuple[Dims, ...]:
        return tuple(
            tuple(tuple(sdy.DimMappingAttr(dim).factor_indices) for dim in sdy.TensorMappingAttr(array).dim_mappings)
            for array in mappings
        )

    operands, results = dims(rule.operand_mappings), dims(rule.result_mappings)
    return _OpRule(
        sizes=tuple(rule.factor_sizes),
        operands=operands,
        results=results,
        reduced=frozenset(rule.reduction_factors),
        blocked=frozenset(rule.need_replication_factors) | frozenset(rule.permutation_factors),
    )


def _factors(dims: Dims) -> frozenset[int]:
    return frozenset(factor for atoms in dims for factor in atoms)


def _marks(rule: _OpRule, name: str) -> list[Mark]:
    """What the operator ``name`` does to each factor of its rule (the stricter reading of the module docstring)."""
    read = frozenset().union(*map(_factors, rule.operands))
    made = [_factors(dims) for dims in rule.results]
    in_all = frozenset.intersection(*made)
    in_any = frozenset().union(*made)
    blocked = rule.blocked | (in_any - in_all) | (read - in_any - rule.reduced)
    if name != "stablehlo.broadcast_in_dim":
        blocked |= in_any - read
    written: frozenset[int] = frozenset()
    if name == "stablehlo.scatter":
        arrays = len(rule.results)  # operands are: arrays, indices, updates
        updates = frozenset().union(*map(_factors, rule.operands[arrays + 1 :]))
        written = in_all - updates
    if name == "stablehlo.dynamic_update_slice":
        blocked |= in_all - _factors(rule.operands[1])
    return [
        (Mark.BLOCKED if factor in blocked else Mark.NONE)
        | (Mark.REDUCED if factor in rule.reduced else Mark.NONE)
        | (Mark.WRITTEN if factor in written else Mark.NONE)
        for factor in range(len(rule.sizes))
    ]


class _Walk:
    """Composes the rules of one question's operators."""

    def __init__(self, functions: dict[str, _Block], rules: dict[Any, _OpRule]) -> None:
        self._functions = functions
        self._rules = rules
        self._factoring = Factoring()
        self._complete = True
        self._opaque = False

    def answer(self, main: _Block, arguments: Sequence[Any], results: Sequence[Any]) -> Answer:
        operands = [self._factoring.dims(_shape(value)) for value in arguments]
        outputs = self._run(main, dict(zip(arguments, operands, strict=True)), results)
        if self._opaque:
            for dims in (*operands, *outputs):
                self._block(dims)
        shapes = tuple(_shape(value) for value in results)
        return Answer(self._factoring, tuple(operands), tuple(outputs), shapes, self._complete)

    def _run(self, block: _Block, known: dict[Any, Dims], wanted: Sequence[Any]) -> list[Dims]:
        for operation in block.behind(wanted):
            outputs = self._step(operation, [known[value] for value in operation.operands])
            known.update(zip(operation.results, outputs, strict=True))
        return [known[value] for value in wanted]

    def _step(self, operation: Any, operands: list[Dims]) -> Sequence[Dims]:
        name = operation.name
        shapes = [_shape(value) for value in operation.results]
        if name == "func.call":
            callee = self._functions[ir.FlatSymbolRefAttr(operation.attributes["callee"]).value]
            return self._run(callee, dict(zip(callee.arguments, operands, strict=True)), callee.returned)
        if name == "stablehlo.constant":
            uniform = ir.DenseElementsAttr(operation.attributes["value"]).is_splat
            return [self._factoring.dims(shapes[0], Mark.NONE if uniform else Mark.BLOCKED)]
        if name == "stablehlo.iota":
            varying = ir.IntegerAttr(operation.attributes["iota_dimension"]).value
            outputs = self._factoring.dims(shapes[0])
            self._factoring.mark(outputs[varying], Mark.BLOCKED)
            return [outputs]
        if name == "stablehlo.reshape":
            outputs = self._factoring.dims(shapes[0])
            self._factoring.tie(sum(operands[0], ()), sum(outputs, ()))
            return [outputs]
        if _RULE in operation.attributes:
            return self._apply(operation, operands, shapes)
        if name.startswith("chlo.") and self._is_pointwise(operation, shapes):
            for dims in operands[1:]:
                for left, right in zip(operands[0], dims, strict=True):
                    self._factoring.tie(left, right)
            return [operands[0]] * len(shapes)
        return self._unknown(operation, operands, shapes)

    def _is_pointwise(self, operation: Any, shapes: Sequence[Shape]) -> bool:
        """CHLO's functions (``erf_inv`` …) have no rules; those of equal shapes are pointwise, but for a few."""
        known = {_shape(value) for value in operation.operands} | set(shapes)
        return len(known) == 1 and len(operation.regions) == 0 and operation.name not in _CHLO_NOT_POINTWISE

    def _apply(self, operation: Any, operands: list[Dims], shapes: Sequence[Shape]) -> list[Dims]:
        attribute = operation.attributes[_RULE]
        rule = self._rules.get(attribute)
        if rule is None:
            rule = self._rules.setdefault(attribute, _parse(attribute))
        marks = _marks(rule, operation.name)
        atoms = [
            () if size == 1 else (self._factoring.atom(size, mark),)
            for size, mark in zip(rule.sizes, marks, strict=True)
        ]

        def placed(dim: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(atom for factor in dim for atom in atoms[factor])

        for dims, mapping in zip(operands, rule.operands, strict=True):
            for own, factors in zip(dims, mapping, strict=True):
                self._factoring.tie(own, placed(factors))
        outputs: list[Dims] = []
        for shape, mapping in zip(shapes, rule.results, strict=True):
            made = self._factoring.dims(shape)
            for own, factors in zip(made, mapping, strict=True):
                self._factoring.tie(own, placed(factors))
            outputs.append(made)
        if operation.name == "stablehlo.pad":
            for dim in _padded_dims(operation):
                self._factoring.mark(outputs[0][dim], Mark.BLOCKED)
        return outputs

    def _unknown(self, operation: Any, operands: list[Dims], shapes: Sequence[Shape]) -> list[Dims]:
        self._complete = False
        self._opaque |= len(operation.regions) > 0
        for dims in operands:
            self._block(dims)
        return [self._factoring.dims(shape, Mark.BLOCKED) for shape in shapes]

    def _block(self, dims: Dims) -> None:
        self._factoring.mark((atom for atoms in dims for atom in atoms), Mark.BLOCKED)


def _padded_dims(operation: Any) -> list[int]:
    edges = ("edge_padding_low", "edge_padding_high", "interior_padding")
    amounts = zip(*(ir.DenseI64ArrayAttr(operation.attributes[edge]) for edge in edges), strict=True)
    return [dim for dim, amount in enumerate(amounts) if any(amount)]


def _shape(value: Any) -> Shape:
    try:
        return tuple(ir.RankedTensorType(value.type).shape)
    except ValueError:  # a token
        return ()
