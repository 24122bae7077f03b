"""What was decided, as data: the only thing that passes from planning to running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cluster import Mesh

if TYPE_CHECKING:
    from autopar.graph.ir import Operator, Rule

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How one array lies on a mesh.

    ``dims[d]`` lists the mesh axes that cut dimension ``d``, major to minor, always in mesh order; ``partial`` lists
    the axes over which the devices hold summands instead of the value (their sum is the value).  An axis appears at
    most once in all.  An axis that appears nowhere holds copies.
    """

    dims: tuple[Axes, ...]
    partial: Axes = ()

    @property
    def axes(self) -> frozenset[str]:
        """Every axis in use."""
        return frozenset(axis for dim in self.dims for axis in dim) | frozenset(self.partial)

    def __str__(self) -> str:
        text = "[" + ", ".join("+".join(axes) or "·" for axes in self.dims) + "]"
        return text + (f" Σ{'+'.join(self.partial)}" if self.partial else "")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one operator is spread: ``factors[f]`` are the mesh axes that cut factor ``f`` of its rule, in mesh order.

    ``passing`` are axes over which all operands come as summands and the results leave as summands (only for
    operators that are linear in all of them).
    """

    factors: tuple[Axes, ...]
    passing: Axes = ()

    def operand(self, rule: Rule, position: int, mesh: Mesh) -> Layout:
        """The layout in which the operator wants an operand."""
        return Layout(self._dims(rule.operands[position]), self.passing)

    def result(self, rule: Rule, position: int, mesh: Mesh) -> Layout:
        """The layout in which the operator leaves a result (partial over the axes that cut a sum)."""
        summed = {
            axis
            for axes, factor in zip(self.factors, rule.factors, strict=True)
            if factor.kind.leaves_sum
            for axis in axes
        }
        summed.update(self.passing)
        return Layout(self._dims(rule.results[position]), tuple(n for n in mesh.axis_names if n in summed))

    def _dims(self, mapping: tuple[tuple[int, ...], ...]) -> tuple[Axes, ...]:
        # A factor that is not major in its dimension is never cut, so the major one speaks for the dimension.
        return tuple(self.factors[factors[0]] if factors else () for factors in mapping)


class SumScatter(Enum):
    """How a partial sum becomes one of which each device keeps a piece, on a mesh."""

    COLLECTIVE = "reduce-scatter"
    EXCHANGE = "all-to-all"
    """Pieces go to who keeps them, who adds them up: where the backend's reduce-scatter is slower than its all-to-all."""


@dataclass(frozen=True)
class Stage:
    """One part of the program on one mesh: a home layout for values, a copy layout for some, strategies of operators.

    What is not listed is replicated (values) or uncut (operators).
    """

    mesh: Mesh
    homes: Mapping[int, Layout] = field(repr=False)
    copies: Mapping[int, Layout] = field(repr=False)
    strategies: Mapping[int, Strategy] = field(repr=False)
    devices: tuple[int, ...] = ()
    """Of a pipeline, or where not all are in use: the cluster's devices, row-major on the mesh; empty: all, from 0 on.

    Stages on the same devices are on one mesh, which runs the parts of all of them.
    """
    sum_scatter: SumScatter = SumScatter.COLLECTIVE
    hosted: tuple[int, ...] = ()
    """Of a pipeline: values of a microbatch, ascending, that lie in the memory of the host from their forward pass to their
    backward pass (:mod:`autopar.schedule.residuals`)."""

    def home(self, value: int, rank: int) -> Layout:
        """Where a value of this rank lies."""
        return self.homes.get(value) or Layout(((),) * rank)

    def strategy(self, operator: Operator) -> Strategy:
        """How an operator is spread."""
        return self.strategies.get(operator.id) or Strategy(((),) * len(operator.rule.factors))


@dataclass(frozen=True)
class CollectiveUse:
    """Predicted collectives of one kind over the same axes for the same reason.

    ``full_bytes`` is the size of the full tensor of one of them (see :mod:`autopar.cost_model.collectives`),
    ``wire_bytes`` what one device sends in all ``count`` of them in a step (ring accounting), ``seconds`` their time in
    a step.
    """

    kind: str
    axes: Axes
    full_bytes: float
    count: int
    wire_bytes: float
    seconds: float
    phase: str
    value: int
    origin: str


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on one device, in the words of ``compiled.memory_analysis()``, and the peak by kind of tenant."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    by_kind: Mapping[str, int]
    largest: tuple[tuple[str, int], ...] = ()
    host_bytes: int = 0
    """Of the device's part of arrays that lie in the memory of its host, between steps or, of a pipeline, between passes; in none
    of the figures above."""

    @property
    def total_bytes(self) -> int:
        """argument + output − alias + temp."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


@dataclass(frozen=True)
class Prediction:
    """What the cost model says of a plan: seconds of one step, collectives, memory of one device."""

    compute_seconds: float
    communication_seconds: float
    update_seconds: float
    flops: float
    bytes_moved: float
    collectives: tuple[CollectiveUse, ...]
    memory: Memory
    simulated_seconds: float | None = None
    """Of a pipeline: seconds of a step; the other figures are then those of the busiest stage and the fullest device."""
    allocation_seconds: float = 0.0
    """Seconds that memory costs because it is new to the call, as far as that was measured."""
    host_seconds: float = 0.0
    """Seconds of copies from the memory of the host, and back; of a pipeline on the mesh that copies most."""
    hidden_seconds: float = 0.0
    """Seconds of communication that the compiler hides behind work; part of ``communication_seconds``."""

    @property
    def step_seconds(self) -> float:
        """Compute (the update included), communication, new memory and copies from and to the host, one after the other, less
        what is hidden; of a pipeline as simulated.
        """
        if self.simulated_seconds is not None:
            return self.simulated_seconds
        return self.unhidden_seconds - self.hidden_seconds

    @property
    def exposed_seconds(self) -> float:
        """Seconds of communication in which nothing else is done."""
        return self.communication_seconds - self.hidden_seconds

    @property
    def unhidden_seconds(self) -> float:
        """The same if nothing were hidden, as the planner's integer program counts; of a pipeline as simulated."""
        if self.simulated_seconds is not None:
            return self.simulated_seconds
        return self.compute_seconds + self.communication_seconds + self.allocation_seconds + self.host_seconds


@dataclass(frozen=True)
class SolverReport:
    """How the plan was found: size of the program, seconds, proven relative gap (0: optimal)."""

    variables: int
    variables_after_reduction: int
    seconds: float
    gap: float
    meshes_tried: tuple[str, ...] = ()


class Schedule(Enum):
    """The order of microbatches over stages (see :mod:`autopar.schedule.orders`); ``OWN`` is one that the user made."""

    SINGLE = "single"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    EAGER_ONE_F_ONE_B = "eager_1f1b"
    INTERLEAVED_ONE_F_ONE_B = "interleaved_1f1b"
    ZERO_BUBBLE_H1 = "zb_h1"
    ZERO_BUBBLE_H2 = "zb_h2"
    SHARES = "shares"
    """Of meshes that hold the whole model: each works off its own microbatches (:mod:`autopar.inter_op.shares`)."""
    OWN = "own"


class Pass(Enum):
    """One way of a microbatch through a stage; ``WEIGHT`` is what of the backward pass no other stage waits for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"


@dataclass(frozen=True)
class Opening:
    """Into how many pieces loops over layers are cut between trips, and which leaves are cut with them.

    ``leaves`` are (position among the inputs of the step as it was written, dimension, layers).
    """

    pieces: int = 1
    leaves: tuple[tuple[int, int, int], ...] = ()


UNOPENED = Opening()


class Remat(Enum):
    """What of a layer's forward pass is computed again in its backward pass instead of being kept.

    ``DOTS`` keeps what matrix products without batch dimensions and convolutions make, and what the layer reads; ``FULL`` keeps
    only what it reads.
    """

    NONE = "none"
    DOTS = "dots"
    FULL = "full"


class Offload(Enum):
    """What lies in the memory of the host: nothing, the state that only the update reads (between steps), or what the stages of a
    pipeline keep of microbatches for their backward passes.
    """

    NONE = "none"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"


@dataclass(frozen=True)
class LayerRemat:
    """What each layer computes again: ``kinds[k]`` for the layer that begins before forward operator ``starts[k]``.

    Operators are counted in the forward pass of the step as it was written (:mod:`autopar.inter_op.remat`); the first layer
    begins before operator 0.
    """

    starts: tuple[int, ...] = (0,)
    kinds: tuple[Remat, ...] = (Remat.NONE,)

    @property
    def is_any(self) -> bool:
        """Whether a layer computes anything again."""
        return any(kind is not Remat.NONE for kind in self.kinds)

    def with_kinds(self, kinds: Sequence[Remat]) -> LayerRemat:
        """The same layers with other choices."""
        return LayerRemat(self.starts, tuple(kinds))

    def __str__(self) -> str:
        """Runs of layers with the same choice: ``1-3 full, 4-6 dots``; those that compute nothing again are left out."""
        runs: list[list[int]] = []
        for number, kind in enumerate(self.kinds):
            if runs and self.kinds[runs[-1][-1]] is kind:
                runs[-1].append(number)
            else:
                runs.append([number])
        texts = []
        for run in runs:
            numbers = f"{run[0] + 1}" if len(run) == 1 else f"{run[0] + 1}-{run[-1] + 1}"
            if (kind := self.kinds[run[0]]) is not Remat.NONE:
                texts.append(f"{numbers} {kind.value}")
        return ", ".join(texts) or "none"


NO_REMAT = LayerRemat()

OrderEntry = tuple[Pass, int, int]
"""One task of an order: which pass, on which stage, of which microbatch."""


@dataclass(frozen=True)
class Plan:
    """The whole decision for one program on one cluster."""

    fingerprint: str
    jax_version: str
    method: str
    cluster: str
    num_devices: int
    stages: tuple[Stage, ...]
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    in_layouts: tuple[Layout, ...]
    out_layouts: tuple[Layout, ...]
    prediction: Prediction
    solver: SolverReport
    num_microbatches: int = 1
    schedule: Schedule = Schedule.SINGLE
    cuts: tuple[int, ...] = ()
    """Of a pipeline: before which operators of a microbatch's forward pass stages begin (:mod:`autopar.inter_op.placing`)."""
    order: tuple[tuple[OrderEntry, ...], ...] = field(default=(), repr=False)
    """Of a schedule that the user made: the passes of each mesh, in its order.  The names of others say their order."""
    opening: Opening = UNOPENED
    """Of a pipeline: how its loops over layers are cut.  A leaf that is cut has a path and a layout for each of its pieces."""
    remat: LayerRemat = NO_REMAT
    """What the planner has layers compute again in the backward pass, beyond what the user's own code says."""
    hosted: tuple[int, ...] = ()
    """Positions of the inputs that lie in the memory of the host between steps, with their next values; of a pipeline none."""
    shares: tuple[int, ...] = ()
    """Where each stage is the whole model on a mesh of its own: how many of the microbatches it works off."""

    @property
    def trips(self) -> int:
        """How often the stages run in a step: once for each microbatch, or once for all of their shares."""
        return 1 if self.shares else self.num_microbatches

    @property
    def offload(self) -> Offload:
        """What lies in the memory of the host."""
        if any(stage.hosted for stage in self.stages):
            return Offload.ACTIVATIONS
        return Offload.OPTIMIZER_STATE if self.hosted else Offload.NONE

    @property
    def is_pipeline(self) -> bool:
        """Whether there are several stages: parts of the model, or the whole of it several times."""
        return len(self.stages) > 1

    @property
    def meshes_of_stages(self) -> tuple[int, ...]:
        """For each stage the number of its mesh; stages on the same devices share one."""
        numbers: dict[tuple[int, ...], int] = {}
        return tuple(numbers.setdefault(stage.devices, len(numbers)) for stage in self.stages)

    @property
    def num_meshes(self) -> int:
        """How many meshes the stages lie on."""
        return len(set(self.meshes_of_stages))

    def devices_of(self, number: int) -> tuple[int, ...]:
        """The cluster's devices of a stage."""
        return self.stages[number].devices or tuple(range(self.num_devices))

    @property
    def mesh(self) -> Mesh:
        """The mesh of the first stage."""
        return self.stages[0].mesh

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one step."""
        return self.prediction.step_seconds

    @property
    def peak_bytes(self) -> int:
        """Predicted bytes on the fullest device."""
        return self.prediction.memory.total_bytes

    def summary(self) -> str:
        """One line: method, stages, meshes, predicted milliseconds of a step, MiB on one device, proven gap."""
        meshes = " | ".join(str(mesh) for mesh in {stage.devices: stage.mesh for stage in self.stages}.values())
        stages = ""
        if self.shares:
            stages = (
                f" with the whole model on {self.num_meshes} meshes, {' + '.join(map(str, self.shares))} microbatches,"
            )
        elif self.is_pipeline:
            count = "1 microbatch" if self.num_microbatches == 1 else f"{self.num_microbatches} microbatches"
            dealt = "" if self.num_meshes == len(self.stages) else f" on {self.num_meshes} meshes"
            stages = f" in {len(self.stages)} stages{dealt}, {self.schedule.value} over {count},"
        return (
            f"{self.method}{stages} on {meshes}: {self.step_seconds * 1e3:.3f} ms per step, "
            f"{self.peak_bytes / 2**20:.1f} MiB per device, gap {self.solver.gap:.2%}"
        )

    def save(self, path: str | Path) -> None:
        """Write this plan as versioned JSON, at once or not at all (see :mod:`autopar.plan_file`).

        Raises :class:`~autopar.errors.PlanError` if the file cannot be written.
        """
        from autopar.plan_file import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that :meth:`save` wrote; the result is equal to it.

        Raises :class:`~autopar.errors.PlanError` naming the file, the field and what to do.
        """
        from autopar.plan_file import load_plan

        return load_plan(path)
