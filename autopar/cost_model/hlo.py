"""What does a compiled program really do, and how long would that take on a given cluster?

This is the referee of the planner: it reads nothing but the optimized HLO text of an executable and answers which
collectives it runs, how often and over whom, how many FLOPs and bytes it takes, and from these the seconds of one step

    Σ over kernels  trips · seconds of computing and moving   +   Σ over collectives  trips · α-β time of their groups

and what memory costs that is new to every call, where a profile says so and the compiler how much it is;
less what XLA:GPU hides of the collectives, on each device (all devices run the same program). XLA:CPU hides nothing; of TPUs it
is not read, and there the sum is an upper bound that both sides of a comparison share.

The other files of the family: ``hlo_parser`` (text to data), ``hlo_work`` (FLOPs and bytes of one instruction),
``hlo_steps`` (what runs how often), ``hlo_kernels`` (how long one kernel takes), ``hlo_collectives`` (who talks to whom),
``hlo_overlap`` (what is hidden).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cluster import Cluster
from autopar.cost_model.collectives import Collective, merged_seconds, permute_seconds
from autopar.cost_model.hlo_collectives import (
    HloCollective,
    collectives,
    collectives_of,
    form_reduce_scatters,
    undo_widening,
)
from autopar.cost_model.hlo_kernels import Kernels
from autopar.cost_model.hlo_overlap import hidden_seconds
from autopar.cost_model.hlo_parser import HloModule, parse_module
from autopar.cost_model.hlo_steps import Step, bytes_of, executed_steps, flops_of, is_collective
from autopar.cost_model.hlo_work import FlopCounter, instruction_bytes
from autopar.cost_model.new_memory import new_memory_seconds
from autopar.cost_model.waits import Waiting, WorkSinceGroups, waiting
from autopar.errors import ClusterError

__all__ = [
    "CompiledProgram",
    "HloCollective",
    "HloCost",
    "HloModule",
    "MemoryBytes",
    "PricedStep",
    "bytes_moved",
    "collectives",
    "flops",
    "form_reduce_scatters",
    "memory_bytes",
    "parse_module",
    "priced_steps",
    "read_compiled",
    "step_seconds",
    "undo_widening",
]

_UNPRICED = frozenset(("send", "recv", "infeed", "outfeed"))


@dataclass(frozen=True)
class MemoryBytes:
    """What the executable needs on one device, as the compiler says (``compiled.memory_analysis()``), in bytes."""

    argument: int
    output: int
    alias: int
    temp: int
    host: int = 0
    """Of arguments in the memory of the host, which are in none of the others."""

    @property
    def total(self) -> int:
        """Arguments and outputs, those that share memory counted once, and scratch memory."""
        return self.argument + self.output - self.alias + self.temp


@dataclass(frozen=True)
class HloCost:
    """What one step of a compiled program takes on one device of a cluster; ``notes`` say what could not be told."""

    compute_seconds: float
    communication_seconds: float
    seconds_by_kind: Mapping[Collective, float]
    wire_bytes_by_kind: Mapping[Collective, float]
    flops: float
    bytes_moved: float
    collectives: tuple[HloCollective, ...]
    notes: tuple[str, ...] = ()
    hidden_seconds: float = 0.0
    """Of communication, between starts and ends of collectives."""
    allocation_seconds: float = 0.0
    """Of memory that is new to the call; 0 where no profile says, or the memory of the program is not known."""

    @property
    def seconds(self) -> float:
        """Computing and communicating one after the other, but for what is hidden."""
        return self.compute_seconds + self.communication_seconds + self.allocation_seconds - self.hidden_seconds

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one step."""
        return sum(self.wire_bytes_by_kind.values())


@dataclass(frozen=True)
class PricedStep:
    """An instruction with what it takes on one device each time that it runs; of a collective nothing is said."""

    step: Step
    once_seconds: float = 0.0
    once_flops: float = 0.0
    once_bytes_moved: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all its times."""
        return self.step.times * self.once_seconds


@dataclass(frozen=True)
class CompiledProgram:
    """Everything that the referee knows of one executable."""

    module: HloModule
    cost: HloCost
    memory: MemoryBytes


def flops(module: HloModule) -> int:
    """FLOPs of one step on one device."""
    steps, _ = executed_steps(module)
    return flops_of((step for step in steps if not is_collective(step.instruction)), FlopCounter(module)).total()


def bytes_moved(module: HloModule) -> int:
    """Bytes that one step reads and writes in the memory of one device, collectives left out."""
    steps, _ = executed_steps(module)
    return bytes_of((step for step in steps if not is_collective(step.instruction)), module)


def step_seconds(
    module: HloModule,
    cluster: Cluster,
    found: Iterable[HloCollective] | None = None,
    memory: MemoryBytes | None = None,
) -> HloCost:
    """What one step takes on each device of ``cluster``, whose device d is position d of the device assignment.

    ``found`` replaces the collectives of the module by those that another backend would run, for example
    ``undo_widening(form_reduce_scatters(module))``; of these nothing is known to be hidden.
    With ``memory``, what the compiler says of the executable, memory that is new to every call is priced too.

    Raises:
        ClusterError: the program runs on more devices than the cluster has.

    """
    if module.num_devices > cluster.num_devices:
        raise ClusterError(
            f"the program {module.name} is compiled for {module.num_devices} devices, the cluster {cluster.name} has "
            f"{cluster.num_devices}; compile for a smaller mesh or give a larger cluster"
        )
    steps, notes = priced_steps(module, cluster)
    own = collectives_of([one.step for one in steps], module)
    meeting, since = iter(own), WorkSinceGroups(module.num_devices)
    worked_seconds: dict[str, float] = {}
    for one in steps:
        if is_collective(one.step.instruction):
            worked_seconds[one.step.instruction.name] = since.meet(next(meeting).groups)
        else:
            since.work(one.once_seconds)
    ran = own if found is None else tuple(found)
    sent = [
        one.count * (_seconds_once(one, cluster) + _waiting(one, cluster)(worked_seconds.get(one.name, 0.0)))
        for one in ran
    ]
    by_kind: dict[Collective, float] = {}
    wire: dict[Collective, float] = {}
    for collective, seconds in zip(ran, sent, strict=True):
        by_kind[collective.kind] = by_kind.get(collective.kind, 0.0) + seconds
        wire[collective.kind] = wire.get(collective.kind, 0.0) + collective.wire_bytes
    unpriced = {one.step.instruction.opcode for one in steps} & _UNPRICED
    notes += tuple(f"{opcode}: the time that it waits for others is not counted" for opcode in sorted(unpriced))
    return HloCost(
        sum(one.seconds for one in steps),
        sum(by_kind.values()),
        by_kind,
        wire,
        sum(one.step.times * one.once_flops for one in steps),
        sum(one.step.times * one.once_bytes_moved for one in steps),
        ran,
        notes,
        _hidden_seconds(steps, sent) if found is None else 0.0,
        0.0 if memory is None else _allocation_seconds(module, memory, cluster),
    )


def priced_steps(module: HloModule, cluster: Cluster) -> tuple[list[PricedStep], tuple[str, ...]]:
    """Everything that one step of the program runs, in its order, with its price, and what could not be told of it."""
    steps, notes = executed_steps(module)
    counter = FlopCounter(module)
    kernels = Kernels(module, cluster, counter)
    priced = []
    for step in steps:
        if is_collective(step.instruction):
            priced.append(PricedStep(step))
            continue
        flops_by_dtype = counter.instruction(step.instruction, step.computation)
        moved = instruction_bytes(step.instruction, step.computation, module)
        seconds = kernels.seconds(step, flops_by_dtype, moved)
        priced.append(PricedStep(step, seconds, flops_by_dtype.total(), moved))
    unknown = tuple(f"custom call {target}: counted with 0 FLOPs" for target in sorted(counter.unknown_calls))
    return priced, notes + unknown


def _allocation_seconds(module: HloModule, memory: MemoryBytes, cluster: Cluster) -> float:
    outputs = (leaf.size_bytes for leaf in module.entry.root.shape.leaves)
    return new_memory_seconds(outputs, memory.alias, memory.temp, cluster)


def _hidden_seconds(steps: Sequence[PricedStep], sent: Sequence[float]) -> float:
    """What the others hide of the collectives among steps, which take ``sent`` seconds."""
    of_collectives = iter(sent)
    return hidden_seconds(
        [one.step for one in steps],
        [next(of_collectives) if is_collective(one.step.instruction) else one.seconds for one in steps],
    )


def _waiting(collective: HloCollective, cluster: Cluster) -> Waiting:
    """Of its largest groups; the pairs of a permute are groups of two."""
    return waiting([group for group in collective.groups if len(group) == collective.group_size], cluster)


def _seconds_once(collective: HloCollective, cluster: Cluster) -> float:
    if collective.kind is Collective.PERMUTE:
        pairs = tuple((source, target) for source, target in collective.groups)
        return permute_seconds(collective.full_bytes, pairs, cluster)
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in collective.groups:
        by_size.setdefault(len(group), []).append(group)
    arrays = collective.array_bytes or (collective.full_bytes,)
    return max(merged_seconds(collective.kind, arrays, tuple(groups), cluster) for groups in by_size.values())


def memory_bytes(compiled: Any) -> MemoryBytes:
    """What ``compiled.memory_analysis()`` says of a ``jax.stages.Compiled``, per device."""
    analysis = compiled.memory_analysis()
    return MemoryBytes(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
        analysis.host_argument_size_in_bytes,
    )


def read_compiled(compiled: Any, cluster: Cluster) -> CompiledProgram:
    """Everything about a ``jax.stages.Compiled`` on a cluster: module, cost and memory."""
    module, memory = parse_module(compiled.as_text()), memory_bytes(compiled)
    return CompiledProgram(module, step_seconds(module, cluster, memory=memory), memory)
