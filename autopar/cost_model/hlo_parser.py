"""What does the text of a compiled XLA module say?

XLA prints an executable (``compiled.as_text()``) as a list of computations, each a list of instructions in SSA form

    %name = shape opcode(%operand, ...), key=value, key=value

This file turns that text into plain data and answers nothing more than what is written: names, shapes, operands, called
computations, attributes, replica groups.  What it all costs is the question of :mod:`autopar.cost_model.hlo`.

Read are the dialects of XLA:CPU, GPU and TPU that differ in the printed form: layouts with tiles, tuple shapes with
index comments, operands with or without their shapes, names with or without ``%``, and the four ways of writing replica
groups: lists ``{{0,1},{2,3}}``, iota ``[4,2]<=[2,4]T(1,0)``, mesh axes ``mesh['x'=2,'y'=4] {'y'}`` with parts of axes
``{'y':(2)2}`` and with ``device_ids``, and the empty list ``{}``, which means everybody.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.errors import AutoparError

Groups = tuple[tuple[int, ...], ...]

_COMMENT = re.compile(r"/\*index=\d+\*/")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"(ROOT )?%?([\w.\-]+) = ")
_ARRAY_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{([\d,]*)[^}]*\})?")
_OPERAND_NAME = re.compile(r"%([\w.\-]+)")
_PARENTHESIS = re.compile(r"[()]")
_ATTRIBUTE_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}()\[\]]|, ')
_MESH_GROUPS = re.compile(r"mesh\[(.*?)\](?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))? \{(.*)\}$")
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_CALLING_ATTRIBUTES = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
)

_NUMPY_NAMES = {
    "pred": "bool",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
}


class HloSyntaxError(AutoparError):
    """The text is not an HLO module as XLA prints it."""


@dataclass(frozen=True)
class HloShape:
    """An array (``dtype``, ``dims``) or, where ``parts`` is not None, a tuple of shapes.

    ``dtype`` is XLA's name (``f32``, ``s8``, ``pred``); tokens and opaque handles are arrays of no bytes.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    parts: tuple[HloShape, ...] | None = None
    packed: bool = False
    """True where the layout says that elements of less than a byte are packed."""
    minor_to_major: tuple[int, ...] = ()
    """Dimensions as the layout names them, the one whose neighbours lie side by side first; empty where none is printed."""

    @cached_property
    def elements(self) -> int:
        """Number of elements (of all parts of a tuple)."""
        if self.parts is not None:
            return sum(part.elements for part in self.parts)
        return math.prod(self.dims)

    @property
    def major_to_minor(self) -> tuple[int, ...]:
        """Dimensions from the one whose elements lie furthest apart to the one whose lie side by side."""
        return self.minor_to_major[::-1] or tuple(range(len(self.dims)))

    @cached_property
    def itemsize_bits(self) -> int:
        """Bits per element in memory; 0 for tokens and opaque values."""
        if self.dtype == "pred":
            return 8
        digits = re.search(r"\d+", self.dtype)
        if digits is None:
            return 0
        bits = int(digits.group())
        return bits if self.packed or bits >= 8 else 8

    @cached_property
    def size_bytes(self) -> int:
        """Bytes in memory, padding of tiled layouts not counted."""
        if self.parts is not None:
            return sum(part.size_bytes for part in self.parts)
        return -(-self.elements * self.itemsize_bits // 8)

    @cached_property
    def leaves(self) -> tuple[HloShape, ...]:
        """The arrays of a tuple, in order, nested ones flattened; an array is its own only leaf."""
        if self.parts is None:
            return (self,)
        return tuple(leaf for part in self.parts for leaf in part.leaves)


@dataclass(frozen=True)
class HloInstruction:
    """One line. ``operands`` are names in the same computation; ``literal`` is what a constant or parameter holds."""

    name: str
    opcode: str
    shape: HloShape
    operands: tuple[str, ...]
    literal: str = ""
    attribute_text: str = field(default="", repr=False)
    is_root: bool = False

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """Every ``key=value`` behind the operands, values as printed."""
        return _split_attributes(self.attribute_text)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction calls, in the order of its attributes."""
        names: list[str] = []
        for key, value in self.attributes.items():
            if key in _CALLING_ATTRIBUTES:
                names.extend(part.strip(" %") for part in value.strip("{}").split(",") if part.strip(" %"))
        return tuple(names)

    @property
    def op_name(self) -> str:
        """The JAX name stack from the metadata, or an empty string."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attribute_text)
        return found.group(1) if found else ""

    def dims(self, key: str) -> tuple[int, ...]:
        """The attribute ``key={1,2}`` as numbers; empty where it is missing."""
        return tuple(int(number) for number in re.findall(r"\d+", self.attributes.get(key, "")))


@dataclass(frozen=True)
class HloComputation:
    """A function: instructions in the printed order (the schedule, where the module is scheduled)."""

    name: str
    instructions: tuple[HloInstruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, HloInstruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> HloInstruction:
        """The instruction whose value is returned."""
        for instruction in reversed(self.instructions):
            if instruction.is_root:
                return instruction
        return self.instructions[-1]

    @cached_property
    def parameters(self) -> tuple[HloInstruction, ...]:
        """Parameter instructions by parameter number."""
        found = [instruction for instruction in self.instructions if instruction.opcode == "parameter"]
        return tuple(sorted(found, key=lambda instruction: int(instruction.literal)))

    @cached_property
    def users(self) -> Mapping[str, tuple[tuple[HloInstruction, int], ...]]:
        """For each name, who reads it: (instruction, position among its operands)."""
        users: dict[str, list[tuple[HloInstruction, int]]] = {}
        for instruction in self.instructions:
            for position, operand in enumerate(instruction.operands):
                users.setdefault(operand, []).append((instruction, position))
        return {name: tuple(readers) for name, readers in users.items()}

    def operand(self, instruction: HloInstruction, position: int) -> HloInstruction:
        """The instruction that makes the operand at ``position``.

        Raises:
            HloSyntaxError: the operand is defined nowhere in this computation.

        """
        try:
            return self.by_name[instruction.operands[position]]
        except (KeyError, IndexError):
            raise HloSyntaxError(
                f"{instruction.opcode} %{instruction.name} in %{self.name} lacks operand {position}: "
                "the HLO text is cut or edited; pass the whole of compiled.as_text()"
            ) from None

    def operand_shapes(self, instruction: HloInstruction) -> tuple[HloShape, ...]:
        """Shapes of all operands."""
        return tuple(self.operand(instruction, position).shape for position in range(len(instruction.operands)))


@dataclass(frozen=True)
class HloModule:
    """A compiled program of one device; ``num_partitions`` × ``num_replicas`` devices run it together."""

    name: str
    computations: Mapping[str, HloComputation]
    entry_name: str
    num_partitions: int = 1
    num_replicas: int = 1

    @property
    def entry(self) -> HloComputation:
        """Where the program starts."""
        return self.computations[self.entry_name]

    @property
    def num_devices(self) -> int:
        """Devices that run this program together."""
        return self.num_partitions * self.num_replicas

    def called(self, instruction: HloInstruction, key: str | None = None) -> tuple[HloComputation, ...]:
        """Computations that the instruction calls, or only the one named by the attribute ``key``."""
        names = instruction.called if key is None else (instruction.attributes[key].strip("%"),)
        return tuple(self.computations[name] for name in names)


def numpy_dtype_name(dtype: str) -> str:
    """XLA's ``f32``, ``s8``, ``f8e4m3fn`` as numpy and ml_dtypes call them: ``float32``, ``int8``, ``float8_…``."""
    if dtype in _NUMPY_NAMES:
        return _NUMPY_NAMES[dtype]
    if small := re.fullmatch(r"f(\d)(e\w+)", dtype):
        return f"float{small[1]}_{small[2]}"
    if integer := re.fullmatch(r"([su])(\d+)", dtype):
        return ("int" if integer[1] == "s" else "uint") + integer[2]
    return dtype


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> HloShape:
    """``f32[8,16]{1,0:T(8,128)}`` or ``(s32[], (f32[2], pred[]))``.

    Raises:
        HloSyntaxError: the text is no shape.

    """
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        parts = tuple(parse_shape(part) for part in _split_top_level(text[1:-1]) if part.strip())
        return HloShape("tuple", (), parts)
    found = _ARRAY_SHAPE.match(text)
    if found is None:
        if re.fullmatch(r"\w+", text):
            return HloShape(text)
        raise HloSyntaxError(f"cannot read the HLO shape {text[:80]!r}")
    extents = tuple(int(extent.strip("<= ")) for extent in found[2].split(",") if extent.strip("<= ?"))
    return HloShape(found[1], extents, None, "E(" in (found[3] or ""), _numbers(found[4] or ""))


def parse_module(text: str) -> HloModule:
    """The module that ``compiled.as_text()`` prints, for any backend.

    Raises:
        HloSyntaxError: no module header, no entry, or a line that is not HLO; the message shows the line.

    """
    header = re.search(r"^HloModule ([\w.\-]+).*$", text, re.MULTILINE)
    if header is None:
        raise HloSyntaxError("no 'HloModule' line: pass the text of compiled.as_text(), not of lowered.as_text()")
    computations: dict[str, HloComputation] = {}
    entry_name: str | None = None
    current: list[HloInstruction] | None = None
    current_name = ""
    for line in text[header.end() :].splitlines():
        stripped = line.strip()
        if not stripped:
            continue
        if current is None:
            if stripped.endswith("{") and (start := _COMPUTATION.match(stripped)):
                current, current_name = [], start[2]
                if start[1]:
                    entry_name = current_name
        elif stripped.startswith("}"):
            computations[current_name] = HloComputation(current_name, tuple(current))
            current = None
        else:
            current.append(_parse_instruction(stripped))
    if entry_name is None or entry_name not in computations:
        raise HloSyntaxError(f"the HLO module {header[1]} has no complete ENTRY computation: the text is cut")

    def count(key: str) -> int:
        found = re.search(rf"\b{key}=(\d+)", header[0])
        return int(found[1]) if found else 1

    return HloModule(header[1], computations, entry_name, count("num_partitions"), count("replica_count"))


def _parse_instruction(line: str) -> HloInstruction:
    if "/*" in line:
        line = _COMMENT.sub("", line)
    start = _INSTRUCTION.match(line)
    if start is None:
        raise HloSyntaxError(f"cannot read the HLO line {line[:160]!r}")
    position = start.end()
    shape_end = _closing(line, position) + 1 if line[position] == "(" else line.index(" ", position)
    open_at = line.index("(", shape_end)
    close_at = _closing(line, open_at)
    opcode = line[shape_end:open_at].strip()
    inner = line[open_at + 1 : close_at]
    literal, operands = "", ()
    if opcode in ("constant", "parameter"):
        literal = inner
    elif inner:
        operands = tuple(_OPERAND_NAME.findall(inner)) or tuple(
            part.split()[-1] for part in _split_top_level(inner) if part.strip()
        )
    attributes = line[close_at + 1 :].removeprefix(", ")
    return HloInstruction(
        start[2], opcode, parse_shape(line[position:shape_end]), operands, literal, attributes, start[1] is not None
    )


def _closing(line: str, open_at: int) -> int:
    """Position of the parenthesis that closes the one at ``open_at``."""
    first = line.find(")", open_at)
    if first >= 0 and line.find("(", open_at + 1, first) < 0:
        return first
    depth = 0
    for found in _PARENTHESIS.finditer(line, open_at):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise HloSyntaxError(f"parentheses do not match in the HLO line {line[:160]!r}")


def _split_top_level(text: str) -> list[str]:
    """Split at commas outside of all brackets."""
    parts, depth, begin = [], 0, 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[begin:position])
            begin = position + 1
    parts.append(text[begin:])
    return parts


def _split_attributes(text: str) -> dict[str, str]:
    pieces, depth, begin = [], 0, 0
    for found in _ATTRIBUTE_TOKEN.finditer(text):
        token = found[0]
        if token in "{[(":
            depth += 1
        elif token in "}])":
            depth -= 1
        elif token == ", " and depth == 0:
            pieces.append(text[begin : found.start()])
            begin = found.end()
    pieces.append(text[begin:])
    pairs = (piece.partition("=") for piece in pieces if piece)
    return {key.strip(): value for key, _, value in pairs}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _iota(text: str) -> np.ndarray:
    """``[2,4]T(1,0)``: the numbers from 0 in an array of that shape, then transposed, then in a row."""
    found = _IOTA.match(text)
    if found is None:
        return np.array(_numbers(text))
    extents = _numbers(found[1])
    array = np.arange(math.prod(extents)).reshape(extents)
    return (array.transpose(_numbers(found[2])) if found[2] else array).reshape(-1)


@functools.lru_cache(maxsize=4096)
def expand_replica_groups(text: str, num_devices: int) -> Groups:
    """Replica groups in any of XLA's notations as tuples of ids; the order inside a group is XLA's.

    Raises:
        HloSyntaxError: an unknown notation.

    """
    text = text.strip()
    if text.startswith("{"):
        groups = tuple(_numbers(group) for group in re.findall(r"\{([\d,\s]+)\}", text))
        return groups or (tuple(range(num_devices)),)
    if text.startswith("[") and "<=" in text:
        shape, _, order = text.partition("<=")
        array = _iota(order).reshape(_numbers(shape.strip("[]")))
    elif mesh := _MESH_GROUPS.match(text):
        array = _mesh_groups(mesh[1], mesh[2], mesh[3])
    else:
        raise HloSyntaxError(f"cannot read the replica groups {text[:80]!r}")
    return tuple(tuple(int(member) for member in group) for group in array)


def _mesh_groups(mesh_text: str, device_text: str | None, axes_text: str) -> np.ndarray:
    """Groups along some axes of a mesh; ``'y':(p)s`` is the part of size ``s`` of axis y that has ``p`` above it."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh_text)}
    wanted = [
        (name, int(above or 1), int(size or sizes[name]))
        for name, above, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes_text)
    ]
    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, total in sizes.items():
        cuts = {1, total}
        for axis, above, size in wanted:
            if axis == name:
                cuts |= {above, above * size}
        ordered = sorted(cuts)
        for low, high in itertools.pairwise(ordered):
            place[name, low] = len(dims)
            dims.append(high // low)
    order = np.arange(math.prod(dims)) if device_text is None else _iota(device_text)
    grouped: list[int] = []
    for axis, above, size in wanted:
        reached = above
        while reached < above * size:
            grouped.append(place[axis, reached])
            reached *= dims[grouped[-1]]
    rest = [position for position in range(len(dims)) if position not in grouped]
    group_size = math.prod(dims[position] for position in grouped)
    return order.reshape(dims).transpose(rest + grouped).reshape(-1, group_size)


def device_groups(instruction: HloInstruction, module: HloModule) -> Groups:
    """The devices that talk to each other in a collective, as positions in the program's device assignment.

    For JAX that is the position in ``mesh.devices.flat``, which need not be the hardware id.  Which of XLA's four ways
    of reading replica ids holds depends on ``channel_id`` and ``use_global_device_ids`` (XLA's operation semantics,
    section AllReduce). A permute yields its (source, target) pairs, pairs with oneself left out.
    """
    attributes = instruction.attributes
    if "source_target_pairs" in attributes:
        pairs = re.findall(r"\{(\d+),\s*(\d+)\}", attributes["source_target_pairs"])
        return tuple((int(source), int(target)) for source, target in pairs if source != target)
    text = attributes.get("replica_groups", "{}")
    if "device_ids" in attributes:
        text += ", device_ids=" + attributes["device_ids"]
    partitions, replicas = module.num_partitions, module.num_replicas
    if attributes.get("use_global_device_ids") == "true":
        return expand_replica_groups(text, module.num_devices)
    if "channel_id" not in attributes:
        ids = expand_replica_groups(text, replicas)
        return tuple(tuple(r * partitions + p for r in group) for p in range(partitions) for group in ids)
    if "to_apply" in attributes or instruction.opcode.startswith("all-gather"):
        ids = expand_replica_groups(text, replicas)
        return tuple(tuple(r * partitions + p for r in group for p in range(partitions)) for group in ids)
    ids = expand_replica_groups(text, partitions)
    return tuple(tuple(r * partitions + p for p in group) for r in range(replicas) for group in ids)
