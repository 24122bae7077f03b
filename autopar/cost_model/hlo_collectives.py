"""Which collectives does a compiled program run: what, how many bytes, among whom, how often?

Two habits of XLA:CPU can be undone before judging a plan that is meant for other hardware:
:func:`form_reduce_scatters` (XLA:CPU forms none by itself) and :func:`undo_widening` (it sends bfloat16 as float32).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopar.cost_model.collectives import Collective
from autopar.cost_model.collectives import wire_bytes as collective_wire_bytes
from autopar.cost_model.hlo_parser import (
    Groups,
    HloComputation,
    HloInstruction,
    HloModule,
    device_groups,
    numpy_dtype_name,
)
from autopar.cost_model.hlo_steps import Step, base_opcode, executed_steps, is_collective, operand_bytes
from autopar.cost_model.hlo_work import MOVEMENT

_KINDS = {
    "all-reduce": Collective.ALL_REDUCE,
    "all-gather": Collective.ALL_GATHER,
    "reduce-scatter": Collective.REDUCE_SCATTER,
    "all-to-all": Collective.ALL_TO_ALL,
    "ragged-all-to-all": Collective.ALL_TO_ALL,
    "collective-permute": Collective.PERMUTE,
    "collective-broadcast": Collective.PERMUTE,
}


@dataclass(frozen=True)
class HloCollective:
    """One collective of a compiled program.

    ``full_bytes`` is what :mod:`autopar.cost_model.collectives` calls so: the gathered output of an all-gather, the
    input of a reduce-scatter, the tensor of an all-reduce, the local tensor of an all-to-all, the message of a permute;
    of a collective on several arrays the sum.  ``groups`` are positions in the program's device assignment
    (``mesh.devices.flat``); those of a permute are its (source, target) pairs.  ``count`` is how often it runs in one
    step.  ``dtype`` is numpy's name, ``reduction`` the opcode of the reducer (``add``, ``maximum``, …; empty where
    nothing is reduced).  ``widened_from`` names the narrower dtype that the backend widened for this collective only.
    ``array_bytes`` is ``full_bytes`` array by array, for the backend makes one collective of several.
    """

    kind: Collective
    full_bytes: int
    groups: Groups
    count: int
    name: str
    op_name: str
    dtype: str
    reduction: str = ""
    widened_from: str = ""
    reduce_scatter_formed: bool = False
    array_bytes: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Devices in the largest group (2 for a permute; 1 where nobody talks to anybody else)."""
        return max((len(group) for group in self.groups), default=1)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one step for this collective."""
        return self.count * collective_wire_bytes(self.kind, self.full_bytes, self.group_size)


def collectives(module: HloModule) -> tuple[HloCollective, ...]:
    """All collectives in the order of the program, each pair of start and done once."""
    steps, _ = executed_steps(module)
    return collectives_of(steps, module)


def collectives_of(steps: Iterable[Step], module: HloModule) -> tuple[HloCollective, ...]:
    """The collectives among steps of a module."""
    return tuple(_read_collective(step, module) for step in steps if is_collective(step.instruction))


def form_reduce_scatters(module: HloModule) -> tuple[HloCollective, ...]:
    """The collectives as GPU and TPU would run them: an all-reduce of which each device only cuts its own piece
    (by ``dynamic-slice`` at an offset that follows from its partition id) becomes a reduce-scatter.

    An all-reduce of several arrays is split into the part that changes and the part that stays.
    """
    steps, _ = executed_steps(module)
    found: list[HloCollective] = []
    for step in steps:
        if not is_collective(step.instruction):
            continue
        collective = _read_collective(step, module)
        if collective.kind is not Collective.ALL_REDUCE or collective.group_size < 2:
            found.append(collective)
            continue
        scattered: list[int] = []
        kept: list[int] = []
        for position, size in enumerate(collective.array_bytes):
            own = _only_own_piece_used(step, position, collective.group_size, module)
            (scattered if own else kept).append(size)
        if scattered:
            formed = dataclasses.replace(collective, kind=Collective.REDUCE_SCATTER, reduce_scatter_formed=True)
            found.append(dataclasses.replace(formed, full_bytes=sum(scattered), array_bytes=tuple(scattered)))
        if kept:
            found.append(dataclasses.replace(collective, full_bytes=sum(kept), array_bytes=tuple(kept)))
    return tuple(found)


def undo_widening(found: Iterable[HloCollective]) -> tuple[HloCollective, ...]:
    """The collectives in the dtype that the program asked for, where the backend widened it for the transfer."""
    return tuple(
        dataclasses.replace(
            collective,
            full_bytes=_narrowed(collective.full_bytes, collective),
            array_bytes=tuple(_narrowed(size, collective) for size in collective.array_bytes),
            dtype=collective.widened_from,
            widened_from="",
        )
        if collective.widened_from
        else collective
        for collective in found
    )


def _narrowed(size_bytes: int, collective: HloCollective) -> int:
    return size_bytes * _itemsize(collective.widened_from) // _itemsize(collective.dtype)


def _itemsize(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}.get(dtype, 1)


def _read_collective(step: Step, module: HloModule) -> HloCollective:
    instruction, computation = step.instruction, step.computation
    groups = device_groups(instruction, module)
    kind = _KINDS[base_opcode(instruction)]
    size = operand_bytes(step)
    arrays = tuple(shape.size_bytes for shape in computation.operand_shapes(instruction))
    if kind is Collective.ALL_GATHER:
        pieces = max(len(group) for group in groups)
        size *= pieces
        arrays = tuple(array * pieces for array in arrays)
    elif kind is Collective.ALL_TO_ALL or sum(arrays) != size:
        arrays = (size,)  # several operands of an all-to-all are the pieces of one array
    if base_opcode(instruction) == "collective-broadcast":
        groups = tuple(pair for group in groups for pair in itertools.pairwise(group))
    reducers = module.called(instruction, "to_apply") if "to_apply" in instruction.attributes else ()
    dtype = computation.operand(instruction, 0).shape.leaves[0].dtype
    return HloCollective(
        kind,
        size,
        groups,
        step.times,
        instruction.name,
        instruction.op_name,
        numpy_dtype_name(dtype),
        reducers[0].root.opcode if reducers else "",
        numpy_dtype_name(_widened_from(step, module)),
        array_bytes=arrays,
    )


# --- where a value comes from and goes to ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    """A computation, and for a fused one the fusion that calls it."""

    computation: HloComputation
    fusion: HloInstruction | None = None
    caller: _Frame | None = None


def _every_use(
    name: str, frame: _Frame, module: HloModule, accept: Callable[[HloInstruction, int, _Frame], bool]
) -> bool:
    """Whether each use of a value, followed through fusions and movement of data, is one that ``accept`` takes."""
    computation = frame.computation
    if computation.root.name == name:
        if frame.caller is None or frame.fusion is None:
            return False
        if not _every_use(frame.fusion.name, frame.caller, module, accept):
            return False
    elif name not in computation.users:
        return False
    for user, position in computation.users.get(name, ()):
        if accept(user, position, frame):
            continue
        if user.opcode == "fusion":
            fused = module.called(user, "calls")[0]
            if not _every_use(fused.parameters[position].name, _Frame(fused, user, frame), module, accept):
                return False
        elif user.opcode in MOVEMENT or user.opcode == "concatenate":
            if not _every_use(user.name, frame, module, accept):
                return False
        else:
            return False
    return True


def _results_of(step: Step, position: int) -> list[str]:
    """Names of the values that hold result ``position`` of a collective, behind its ``-done`` and out of its tuple."""
    computation, instruction = step.computation, step.instruction
    names = [instruction.name]
    if instruction.opcode.endswith("-start"):
        names = [user.name for user, _ in computation.users.get(instruction.name, ())]
    if len(instruction.operands) == 1:
        return names
    return [
        user.name
        for name in names
        for user, _ in computation.users.get(name, ())
        if user.opcode == "get-tuple-element" and int(user.attributes["index"]) == position
    ]


def _only_own_piece_used(step: Step, position: int, group_size: int, module: HloModule) -> bool:
    elements = step.computation.operand(step.instruction, position).shape.elements

    def cuts_own_piece(user: HloInstruction, at: int, frame: _Frame) -> bool:
        if user.opcode != "dynamic-slice" or at != 0 or user.shape.elements * group_size != elements:
            return False
        return any(_follows_from_partition(offset, frame) for offset in user.operands[1:])

    names = _results_of(step, position)
    frame = _Frame(step.computation)
    return bool(names) and all(_every_use(name, frame, module, cuts_own_piece) for name in names)


def _follows_from_partition(name: str, frame: _Frame) -> bool:
    instruction = frame.computation.by_name[name]
    if instruction.opcode in ("partition-id", "replica-id"):
        return True
    if instruction.opcode == "parameter":
        if frame.fusion is None or frame.caller is None:
            return False
        return _follows_from_partition(frame.fusion.operands[int(instruction.literal)], frame.caller)
    return any(_follows_from_partition(operand, frame) for operand in instruction.operands)


def _widened_from(step: Step, module: HloModule) -> str:
    """The 16-bit dtype that every operand was converted from for this collective, or an empty string.

    Reductions that XLA widened are known by the name that it gives the reducer; of others every result must go back to
    the narrow dtype at once, since a program may also convert on purpose.
    """
    instruction = step.instruction
    frame = _Frame(step.computation)
    sources = {_converted_from(name, frame, module) for name in instruction.operands}
    if len(sources) != 1 or "" in sources:
        return ""
    (narrow,) = sources
    if "to_apply" in instruction.attributes:
        return narrow if "_promoted" in instruction.attributes["to_apply"] else ""

    def narrows(user: HloInstruction, _position: int, _frame: _Frame) -> bool:
        return user.opcode == "convert" and user.shape.dtype == narrow

    names = [name for position in range(len(instruction.operands)) for name in _results_of(step, position)]
    return narrow if names and all(_every_use(name, frame, module, narrows) for name in names) else ""


def _converted_from(name: str, frame: _Frame, module: HloModule) -> str:
    instruction = frame.computation.by_name[name]
    if instruction.opcode == "convert":
        source = frame.computation.operand(instruction, 0).shape.dtype
        return source if source in ("bf16", "f16") else ""
    if instruction.opcode == "fusion":
        fused = module.called(instruction, "calls")[0]
        return _converted_from(fused.root.name, _Frame(fused, instruction, frame), module)
    if instruction.opcode == "parameter" and frame.fusion is not None and frame.caller is not None:
        return _converted_from(frame.fusion.operands[int(instruction.literal)], frame.caller, module)
    if instruction.opcode in MOVEMENT or instruction.opcode in ("slice", "dynamic-slice"):
        return _converted_from(instruction.operands[0], frame, module)
    return ""
