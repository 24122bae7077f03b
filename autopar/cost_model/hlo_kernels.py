"""How long does one kernel of a compiled program take?

Without a profile by the roofline of everything in it, max(FLOPs / F, bytes / M) as :mod:`autopar.cost_model.roofline` says.
With one, as measured, and from the text alone: a kernel (an instruction, or a fusion of many) takes

    max( Σ products p + Σ others FLOPs · rate,   (bytes − turned) / M + turned / T )

where *p* is the price of a product by its arrays and their order, or of a convolution by its family; *rate* that of the
primitive that an opcode comes from, of a reduction as its elements lie in memory; *T* the rate of copies after which elements
lie elsewhere one by one, not in runs of a cache line or more, and *turned* their bytes.  M is that of bytes which left the
caches long ago where a kernel of the entry reads an argument of the step and makes one of its results: parameters and state of
the optimizer, last touched a step ago.

An opcode says less than the primitive it came from.  Integer shifts, ands, ors and xors are taken for those of random bits, of
which they are the costly kind; a running sum is a window or a tree of additions, and priced as such.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from autopar.cluster import Cluster
from autopar.convolution_shapes import ConvolutionShape
from autopar.cost_model.hlo_parser import HloComputation, HloInstruction, HloModule, HloShape, numpy_dtype_name
from autopar.cost_model.hlo_steps import Step
from autopar.cost_model.hlo_work import FlopCounter, alias_source, shape_of_convolution, summed_dims
from autopar.cost_model.roofline import (
    Reduction,
    convolution_seconds,
    operator_seconds,
    product_seconds,
    reduction_seconds,
    row_of,
)
from autopar.graph.flops import WEIGHTS
from autopar.products import Product, order_of
from autopar.profile import Profile

_PRIMITIVES: Mapping[str, str] = MappingProxyType(
    {
        "cosine": "cos",
        "divide": "div",
        "erf": "erf",
        "exponential": "exp",
        "exponential-minus-one": "expm1",
        "log": "log",
        "log-plus-one": "log1p",
        "logistic": "logistic",
        "power": "pow",
        "remainder": "rem",
        "rsqrt": "rsqrt",
        "select-and-scatter": "select_and_scatter_add",
        "sine": "sin",
        "sort": "sort",
        "sqrt": "sqrt",
        "tan": "tan",
        "tanh": "tanh",
    }
)
"""Opcodes that are one primitive, whatever they are called with."""
_FOLDS: Mapping[str, str] = MappingProxyType({"add": "sum", "maximum": "max", "minimum": "min"})
"""Of reductions and windows, by the last opcode of what they fold with."""
_OF_RANDOM_BITS = frozenset(("and", "or", "shift-left", "shift-right-arithmetic", "shift-right-logical", "xor"))
_PRODUCTS = frozenset(("dot", "ragged-dot", "custom-call"))
_LINE_BITS = 512
"""Of a cache line: whatever is moved in runs as long goes as fast as what lies in one piece."""
_RENAMES = frozenset(("bitcast", "get-tuple-element", "reshape", "tuple"))


class Kernels:
    """Owns what is known of the kernels of one module on one cluster; fused computations are looked at once."""

    def __init__(self, module: HloModule, cluster: Cluster, counter: FlopCounter) -> None:
        self._module, self._cluster, self._counter = module, cluster, counter
        self._fused: dict[str, tuple[float, int]] = {}

    def seconds(self, step: Step, work: Counter[str], moved: int) -> float:
        """Of one run of a step that is no collective, on one device; its FLOPs by dtype and bytes are known already."""
        instruction, computation = step.instruction, step.computation
        if not (work or moved):
            return 0.0
        if (profile := self._cluster.profile) is None:
            dtype = work.most_common(1)[0][0] if work else instruction.shape.dtype
            return operator_seconds(work.total(), moved, numpy_dtype_name(dtype), self._cluster)
        compute_seconds, turned = self._work(instruction, computation)
        return max(compute_seconds, self._memory_seconds(moved, turned, profile, streamed=self._is_update(step)))

    def _memory_seconds(self, moved: int, turned: int, profile: Profile, *, streamed: bool) -> float:
        rate = profile.turned_bytes_per_second
        if rate is None:
            return profile.memory_seconds(moved, streamed=streamed)
        turned = min(turned, moved)
        return profile.memory_seconds(moved - turned, streamed=streamed) + turned / rate

    def _work(self, instruction: HloInstruction, computation: HloComputation) -> tuple[float, int]:
        """Seconds of computing, and bytes read and written that lie in another order afterwards."""
        if instruction.opcode not in ("fusion", "fusion-start"):
            return self._computing(instruction, computation), _turned_bytes(instruction, computation)
        seconds, turned = 0.0, 0
        for fused in self._module.called(instruction, "calls"):
            if fused.name not in self._fused:
                parts = [self._work(inner, fused) for inner in fused.instructions]
                self._fused[fused.name] = sum(one for one, _ in parts), sum(many for _, many in parts)
            seconds, turned = seconds + self._fused[fused.name][0], turned + self._fused[fused.name][1]
        return seconds, turned

    def _computing(self, instruction: HloInstruction, computation: HloComputation) -> float:
        """Seconds of the FLOPs of an instruction that is no fusion."""
        work = self._counter.instruction(instruction, computation)
        if not (flops := work.total()):
            return 0.0
        opcode, dtype = instruction.opcode, numpy_dtype_name(work.most_common(1)[0][0])
        if (shape := self._convolution(instruction, computation)) is not None:
            return convolution_seconds(flops, _bytes_of(instruction, computation), dtype, shape, self._cluster)
        if opcode in _PRODUCTS:
            product = _product(instruction, computation, flops)
            return product_seconds(product, _bytes_of(instruction, computation), dtype, self._cluster)
        if opcode == "reduce":
            return self._reducing(computation.operand(instruction, 0).shape, instruction, dtype)
        if opcode in _OF_RANDOM_BITS and dtype.startswith(("int", "uint")):
            return operator_seconds(flops, 0.0, dtype, self._cluster, "random_bits")
        primitive = (
            f"reduce_window_{self._fold(instruction)}" if opcode == "reduce-window" else _PRIMITIVES.get(opcode, "")
        )
        return operator_seconds(flops * WEIGHTS.get(primitive, 1), 0.0, dtype, self._cluster, primitive)

    def _reducing(self, operand: HloShape, instruction: HloInstruction, dtype: str) -> float:
        if (fold := self._fold(instruction)) == "tuple":  # the greatest and its place
            return operator_seconds(operand.elements, 0.0, dtype, self._cluster, "argmax")
        reduction = Reduction(
            f"reduce_{fold}", row_of(operand.dims, operand.major_to_minor, instruction.dims("dimensions"))
        )
        return reduction_seconds(operand.elements, 0.0, dtype, reduction, self._cluster)

    def _convolution(self, instruction: HloInstruction, computation: HloComputation) -> ConvolutionShape | None:
        if instruction.opcode not in ("convolution", "custom-call"):
            return None
        return shape_of_convolution(instruction, computation)

    def _fold(self, instruction: HloInstruction) -> str:
        """What a reduction or a window folds its elements with, as primitives are called."""
        last = self._module.called(instruction, "to_apply")[0].root.opcode
        return _FOLDS.get(last, last)

    def _is_update(self, step: Step) -> bool:
        """Whether a kernel of the entry reads an argument of the step and makes one of its results."""
        entry = self._module.entry
        if step.computation is not entry or step.instruction.name not in self._results:
            return False
        operands = (alias_source(entry.by_name[name], entry) for name in step.instruction.operands)
        return any(operand.opcode == "parameter" for operand in operands)

    @cached_property
    def _results(self) -> frozenset[str]:
        """Instructions of the entry that make results of the step."""
        entry, found = self._module.entry, set()
        waiting = [entry.root]
        while waiting:
            instruction = waiting.pop()
            if instruction.opcode in _RENAMES:
                waiting += (entry.by_name[name] for name in instruction.operands)
            else:
                found.add(instruction.name)
        return frozenset(found)


def _product(instruction: HloInstruction, computation: HloComputation, flops: float) -> Product:
    """Of operands as they lie."""
    left, right = (computation.operand(instruction, side).shape for side in range(2))
    summed_left, summed_right = summed_dims(instruction, left, 0), summed_dims(instruction, right, 1)
    order = order_of(
        left_turned=_is_turned(left, summed_left),
        right_turned=_is_turned(right, [dim for dim in range(len(right.dims)) if dim not in summed_right]),
    )
    return Product(flops, left.elements, right.elements, next(iter(instruction.shape.leaves)).elements, order)


def _is_turned(operand: HloShape, inside: Sequence[int]) -> bool:
    """Whether other dimensions lie inside those that a product wants there; of a single row or column none do."""
    lying = [*_lying(operand)]
    return any(dim in inside for dim in lying) and lying[-1] not in inside


def _bytes_of(instruction: HloInstruction, computation: HloComputation) -> int:
    """Of operands and the first result: a library's second one is scratch."""
    shapes = computation.operand_shapes(instruction)
    return sum(shape.size_bytes for shape in shapes) + next(iter(instruction.shape.leaves)).size_bytes


def _turned_bytes(instruction: HloInstruction, computation: HloComputation) -> int:
    """What a copy or a transposition reads and writes, if elements that lay side by side do so no more."""
    if instruction.opcode not in ("copy", "transpose"):
        return 0
    before, after = computation.operand(instruction, 0).shape, instruction.shape
    if before.parts is not None:
        return 0
    came_from: Sequence[int] = instruction.dims("dimensions") or range(len(after.dims))
    there, here = list(_lying(before)), [came_from[dim] for dim in _lying(after)]
    if there == here:
        return 0
    kept = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(reversed(there), reversed(here), strict=True))
    run_bits = before.itemsize_bits * math.prod(before.dims[dim] for dim, _ in kept)
    return 0 if run_bits >= _LINE_BITS else before.size_bytes + after.size_bytes


def _lying(shape: HloShape) -> Iterator[int]:
    """Dimensions of an array in the order in which they lie in memory, the slowest first; those of one element left out."""
    return (dim for dim in shape.major_to_minor if shape.dims[dim] > 1)
