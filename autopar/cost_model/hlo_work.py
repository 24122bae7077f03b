"""How much does one HLO instruction compute and move?

* FLOPs: a dot does 2·M·N·K per batch element; a convolution 2 per pair of output position and kernel position that
  meets a real input element (padding and the holes of dilation are free), per input feature of the group; an
  elementwise operator 1 per result element; a reduction 1 per element that it folds in. Conversions and data movement
  compute nothing.
* Bytes: operands read plus results written, once each, between memory and the chip. What is only sliced or gathered
  counts for the slice; what is updated in place counts for the update; what a fusion keeps inside counts nothing.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.convolution_shapes import ConvolutionShape
from autopar.cost_model.hlo_parser import HloComputation, HloInstruction, HloModule, HloShape

_ARITHMETIC_OPCODES = """
    abs add and atan2 cbrt ceil clamp compare complex cosine count-leading-zeros divide erf exponential
    exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply negate not or
    popcnt power real reduce-precision remainder rng round-nearest-afz round-nearest-even rsqrt select shift-left
    shift-right-arithmetic shift-right-logical sign sine sqrt stochastic-convert subtract tan tanh xor
"""
ELEMENTWISE = frozenset(_ARITHMETIC_OPCODES.split())
"""Opcodes that compute each result element from the operand elements at the same place."""
MOVEMENT = frozenset(("bitcast", "convert", "copy", "reshape", "transpose"))
"""Operators that only rename, widen or reorder elements."""

_FREE_OPCODES = """
    add-dependency after-all async-done async-start async-update bitcast call conditional constant domain
    get-tuple-element opt-barrier parameter partition-id replica-id tuple while
"""
_FREE = frozenset(_FREE_OPCODES.split())
_ALIASING = frozenset(("bitcast", "reshape"))
_SLICING = frozenset(("dynamic-slice", "gather", "slice"))
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""Operators that overwrite part of operand 0, and the position of the operand that holds the new elements."""

_CUBLAS_GEMM = re.compile(r"__cublas\$(lt\$)?(gemm|matmul)")
_CUDNN_CONVOLUTION = {
    "__cudnn$convForward": ("operand 0", "operand 1", "result"),
    "__cudnn$convBiasActivationForward": ("operand 0", "operand 1", "result"),
    "__cudnn$convBackwardInput": ("result", "operand 1", "operand 0"),
    "__cudnn$convBackwardFilter": ("operand 0", "result", "operand 1"),
}
"""Where cuDNN's calls keep the input, the kernel and the output of the forward convolution."""


class FlopCounter:
    """Counts FLOPs of instructions of one module, by dtype, remembering what each called computation costs."""

    def __init__(self, module: HloModule) -> None:
        self._module = module
        self._computations: dict[str, Counter[str]] = {}
        self.unknown_calls: set[str] = set()
        """Targets of custom calls met so far that were counted as 0 FLOPs for want of a formula."""

    def computation(self, computation: HloComputation) -> Counter[str]:
        """FLOPs of one run of a computation without loops (a fused one, a reducer), by XLA dtype."""
        if computation.name not in self._computations:
            total: Counter[str] = Counter()
            for instruction in computation.instructions:
                if instruction.opcode in ELEMENTWISE:  # most are; the rest of this line is what instruction() says
                    total[_first_leaf(instruction.shape).dtype] += instruction.shape.elements
                elif instruction.opcode not in _FREE:
                    total.update(self.instruction(instruction, computation))
            self._computations[computation.name] = total
        return self._computations[computation.name]

    def instruction(self, instruction: HloInstruction, computation: HloComputation) -> Counter[str]:
        """FLOPs of one run of an instruction, by XLA dtype; loops, calls and collectives count 0 themselves."""
        opcode = instruction.opcode
        if opcode in ELEMENTWISE:
            return Counter({_first_leaf(instruction.shape).dtype: instruction.shape.elements})
        if opcode in ("fusion", "fusion-start"):
            total: Counter[str] = Counter()
            for called in self._module.called(instruction, "calls"):
                total.update(self.computation(called))
            return total
        if opcode in ("dot", "ragged-dot", "convolution", "custom-call"):
            return self._product(instruction, computation)
        if opcode == "select-and-scatter":
            picked = computation.operand(instruction, 1).shape
            return Counter({picked.dtype: picked.elements * math.prod(_window(instruction).get("size", (1,)))})
        applications = _reducer_applications(instruction, computation)
        if applications and "to_apply" in instruction.attributes:
            reducer = self.computation(self._module.called(instruction, "to_apply")[0])
            return Counter({dtype: count * applications for dtype, count in reducer.items()})
        return Counter()

    def _product(self, instruction: HloInstruction, computation: HloComputation) -> Counter[str]:
        target = _target(instruction)
        if target and not _is_product(target):
            self.unknown_calls.add(target)
            return Counter()
        shapes = computation.operand_shapes(instruction)
        if (arrays := _convolved(instruction, shapes)) is not None:
            flops = _convolution_flops(instruction, *arrays)
        else:
            contracted = summed_dims(instruction, shapes[0], 0)
            depth = math.prod(shapes[0].dims[dim] for dim in contracted)
            flops = 2 * _first_leaf(instruction.shape).elements * depth
        return Counter({shapes[0].dtype: flops})


def _target(instruction: HloInstruction) -> str:
    """What a custom call calls; empty for other instructions."""
    return instruction.attributes.get("custom_call_target", "").strip('"')


def _convolved(instruction: HloInstruction, shapes: Sequence[HloShape]) -> tuple[HloShape, HloShape, HloShape] | None:
    """Input, kernel and output of a convolution, for a call of cuDNN the forward ones; None for anything else."""
    roles = _CUDNN_CONVOLUTION.get(_target(instruction))
    if instruction.opcode == "convolution":
        roles = ("operand 0", "operand 1", "result")
    if roles is None:
        return None
    places = {"operand 0": shapes[0], "operand 1": shapes[1], "result": _first_leaf(instruction.shape)}
    image, kernel, out = (places[role] for role in roles)
    return image, kernel, out


def _first_leaf(shape: HloShape) -> HloShape:
    leaves = shape.leaves
    return leaves[0] if leaves else shape


def _is_product(target: str) -> bool:
    return target == "__onednn$matmul" or target in _CUDNN_CONVOLUTION or bool(_CUBLAS_GEMM.match(target))


def summed_dims(instruction: HloInstruction, operand: HloShape, side: int) -> tuple[int, ...]:
    """Dimensions of the left (0) or right (1) operand that a dot or a library's matrix product sums over."""
    name = ("lhs", "rhs")[side]
    if not _target(instruction):
        return instruction.dims(f"{name}_contracting_dims")
    config, rank = _backend_config(instruction), len(operand.dims)
    usual, transposed = (rank - 1, rank - 2) if side == 0 else (rank - 2, rank - 1)
    for holder in (config, config.get("gemm_backend_config", {}), config.get("onednn_matmul_config", {})):
        numbers = holder.get("dot_dimension_numbers", {}).get(f"{name}_contracting_dimensions")
        if numbers:
            return tuple(int(number) for number in numbers)
        if holder.get(("transpose_a", "transpose_b")[side]):
            return (transposed,)
    return (usual,)


def _backend_config(instruction: HloInstruction) -> Mapping[str, Any]:
    """The JSON that a backend leaves on an instruction, printed plain or as a string; empty where it is no JSON."""
    text = instruction.attributes.get("backend_config", "{}")
    try:
        parsed = json.loads(text)
        parsed = json.loads(parsed) if isinstance(parsed, str) else parsed
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _reducer_applications(instruction: HloInstruction, computation: HloComputation) -> int:
    """How often an instruction with ``to_apply`` runs the scalar computation; 0 for opcodes that run none."""
    opcode = instruction.opcode
    result = _first_leaf(instruction.shape).elements
    if opcode == "reduce":
        return max(computation.operand(instruction, 0).shape.elements - result, 0)
    if opcode == "reduce-window":
        window = _window(instruction)
        return result * max(math.prod(window.get("size", (1,))) - 1, 0)
    if opcode == "map":
        return result
    if opcode == "scatter":
        return computation.operand(instruction, len(instruction.operands) - 1).shape.elements
    if opcode == "sort":
        operand = computation.operand(instruction, 0).shape
        length = operand.dims[instruction.dims("dimensions")[0]] if operand.dims else 1
        return operand.elements * max(math.ceil(math.log2(max(length, 1))), 1)
    return 0


def _window(instruction: HloInstruction) -> Mapping[str, tuple[int, ...]]:
    """``window={size=3x3 stride=2x2 pad=0_1x0_1}`` as numbers; of a padding the low side."""
    found = re.findall(r"(\w+)=([\d_x\-]+)", instruction.attributes.get("window", ""))
    return {key: tuple(int(part.split("_")[0]) for part in value.split("x")) for key, value in found}


def shape_of_convolution(instruction: HloInstruction, computation: HloComputation) -> ConvolutionShape | None:
    """What the price of a convolution or of a call of cuDNN depends on; None for anything else."""
    arrays = _convolved(instruction, computation.operand_shapes(instruction))
    if arrays is None or (labels := _dim_labels(instruction)) is None:
        return None
    (image, window, out), marks = arrays, labels.groups()

    def positions(shape: HloShape, places_of: str) -> int:
        return math.prod(extent for extent, mark in zip(shape.dims, places_of, strict=True) if mark.isdigit())

    image_positions, window_positions, result_positions = (
        positions(shape, mark) for shape, mark in zip((image, window, out), marks, strict=True)
    )
    image_features = image.dims[marks[0].index("f")]
    if _target(instruction).endswith("BackwardFilter"):  # the gradient is the window, and images are what it sums over
        window_positions, result_positions = result_positions, window_positions
        image_features = image.dims[marks[0].index("b")]
    numbers = _window(instruction)
    dilation, features = "lhs_dilate", "f"
    # XLA may have let image and window change places, which turns the one that is now the window round: its images are features.
    if math.prod(numbers.get("rhs_reversal", (0,))):
        dilation, features = "rhs_dilate", "b"
        image_positions, window_positions = window_positions, image_positions
    return ConvolutionShape(
        window_positions=window_positions,
        image_positions=image_positions,
        result_positions=result_positions,
        image_features=image_features,
        result_features=out.dims[marks[2].index(features)],
        is_dilated=math.prod(numbers.get(dilation, (1,))) > 1,
    )


def _dim_labels(instruction: HloInstruction) -> re.Match[str] | None:
    """What the dimensions of a convolution's input, kernel and output are, a letter or digit each."""
    return re.match(r"(\w+)_(\w+)->(\w+)", instruction.attributes["dim_labels"])


def _convolution_flops(instruction: HloInstruction, left: HloShape, kernel: HloShape, out: HloShape) -> int:
    if (labels := _dim_labels(instruction)) is None:
        return 0
    window = _window(instruction)
    spatial = sum(label.isdigit() for label in labels[1])

    def option(key: str, axis: int, default: int) -> int:
        return window[key][axis] if key in window else default

    meetings = 1
    for axis in range(spatial):
        extents = (
            left.dims[labels[1].index(str(axis))],
            kernel.dims[labels[2].index(str(axis))],
            out.dims[labels[3].index(str(axis))],
        )
        options = (
            option("stride", axis, 1),
            option("pad", axis, 0),
            option("lhs_dilate", axis, 1),
            option("rhs_dilate", axis, 1),
        )
        meetings *= _meetings(extents, options)
    features = kernel.dims[labels[2].index("i")] * out.dims[labels[3].index("f")]
    return 2 * features * out.dims[labels[3].index("b")] * meetings


@functools.lru_cache(maxsize=1024)
def _meetings(extents: tuple[int, int, int], options: tuple[int, int, int, int]) -> int:
    """Pairs (output position, kernel position) along one dimension that meet an element of the input.

    ``extents``: input, kernel, output; ``options``: stride, low padding, dilation of the input, of the kernel.
    """
    length, kernel, out = extents
    stride, pad, input_dilation, kernel_dilation = options
    at = np.arange(out)[:, None] * stride - pad + np.arange(kernel)[None, :] * kernel_dilation
    inside = (at >= 0) & (at % input_dilation == 0) & (at // input_dilation < length)
    return int(inside.sum())


def instruction_bytes(instruction: HloInstruction, computation: HloComputation, module: HloModule) -> int:
    """Bytes that one run of a top-level instruction reads and writes in memory (see the module docstring).

    Collectives are not asked for here: their bytes travel on links.
    """
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return 0
    shapes = computation.operand_shapes(instruction)
    result = instruction.shape
    if opcode == "fusion":
        fused = module.called(instruction, "calls")[0]
        read = sum(_parameter_bytes(parameter, fused) for parameter in fused.parameters)
        return read + _written_bytes(fused)
    if opcode == "copy-start":
        return 2 * shapes[0].size_bytes
    if opcode.endswith("-start") and result.parts is not None and len(result.parts) > 1:
        return sum(shape.size_bytes for shape in shapes) + result.parts[1].size_bytes
    if opcode in _SLICING:
        return 2 * result.size_bytes + sum(shape.size_bytes for shape in shapes[1:])
    if opcode in _IN_PLACE:
        return _update_bytes(instruction, computation) + _overwritten_bytes(instruction, computation)
    if opcode == "custom-call" and _CUBLAS_GEMM.match(instruction.attributes["custom_call_target"].strip('"')):
        result = _first_leaf(result)  # the second result is cuBLAS's scratch space
    return sum(shape.size_bytes for shape in shapes) + result.size_bytes


def _update_bytes(instruction: HloInstruction, computation: HloComputation) -> int:
    """What an updating operator reads beside its target: new elements and where they go; a scatter the old ones too."""
    shapes = computation.operand_shapes(instruction)
    if instruction.opcode == "scatter":
        return sum(shape.size_bytes for shape in shapes[len(instruction.shape.leaves) :]) + _overwritten_bytes(
            instruction, computation
        )
    return sum(shape.size_bytes for shape in shapes[1:])


def _overwritten_bytes(instruction: HloInstruction, computation: HloComputation) -> int:
    """Bytes of the target that an updating operator writes."""
    targets = len(instruction.shape.leaves) if instruction.opcode == "scatter" else 1
    first = targets + 1 if instruction.opcode == "scatter" else _IN_PLACE[instruction.opcode]
    return sum(computation.operand(instruction, first + index).shape.size_bytes for index in range(targets))


def alias_source(instruction: HloInstruction, computation: HloComputation) -> HloInstruction:
    """What an instruction only gives another shape."""
    while instruction.opcode in _ALIASING:
        instruction = computation.operand(instruction, 0)
    return instruction


def _updates_in_place(instruction: HloInstruction, fused: HloComputation) -> bool:
    """Whether a result of a fusion is one of its parameters with a part overwritten."""
    return (
        instruction.opcode in _IN_PLACE
        and instruction.shape.parts is None
        and alias_source(fused.operand(instruction, 0), fused).opcode == "parameter"
    )


def _results(fused: HloComputation) -> list[HloInstruction]:
    root = fused.root
    roots = [root] if root.opcode != "tuple" else [fused.by_name[name] for name in root.operands]
    return [alias_source(result, fused) for result in roots]


def _written_bytes(fused: HloComputation) -> int:
    """Bytes that a fusion writes."""
    return sum(
        _overwritten_bytes(result, fused) if _updates_in_place(result, fused) else result.shape.size_bytes
        for result in _results(fused)
    )


def _parameter_bytes(parameter: HloInstruction, fused: HloComputation) -> int:
    """Bytes that a fusion reads of one of its operands."""
    whole = parameter.shape.size_bytes
    in_place = {result.name for result in _results(fused) if _updates_in_place(result, fused)}
    results = frozenset(fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,))

    def read(name: str) -> int:
        total = 0
        for user, position in fused.users.get(name, ()):
            if position == 0 and user.opcode in _SLICING:
                total += user.shape.elements * parameter.shape.itemsize_bits // 8
            elif position == 0 and user.name in in_place:
                total += _overwritten_bytes(user, fused) if user.opcode == "scatter" else 0
            elif user.opcode in MOVEMENT and user.name not in results:
                total += read(user.name)
            else:
                return whole
            if total >= whole:
                return whole
        return total

    return read(parameter.name)
