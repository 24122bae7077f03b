"""What was published of the suites: models, batches, Alpa's own plans, and the throughput that was measured with them.

Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022, section 8.1.
Throughput is read off figure 7: ± 0.02 PFLOP/s, of Wide-ResNet ± 0.003.  Plans are those of the authors' artifact.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Suite(enum.StrEnum):
    """A family of models."""

    GPT = "gpt"
    MOE = "moe"
    WIDE_RESNET = "wide_resnet"


class Asked(enum.StrEnum):
    """A kind of plan."""

    AUTO = "auto"
    PUBLISHED = "published"  # Alpa's stages, meshes and microbatches; layouts by the integer program
    INTRA_OP = "intra_op"  # one mesh
    INTER_OP = "inter_op"  # a stage on every device
    MEGATRON = "megatron"  # the best of all grids of data, tensor and pipeline parallelism
    DEEPSPEED = "deepspeed"  # ZeRO-2 with experts on different devices, trained with Adam
    PP_DP = "pp_dp"  # the best of all grids of data and pipeline parallelism


class Missing(enum.Enum):
    """In place of a throughput."""

    OUT_OF_MEMORY = "OOM"
    NOT_SHOWN = "–"


Figure = float | Missing
"""PFLOP/s of all devices together, or why there are none."""

OOM, NOT_SHOWN = Missing.OUT_OF_MEMORY, Missing.NOT_SHOWN


@dataclass(frozen=True)
class StageFound:
    """A stage of a plan: its logical mesh (data, model), and how many of the model's groups of layers it has."""

    mesh: tuple[int, int]
    groups: int

    @property
    def num_devices(self) -> int:
        """Of its submesh."""
        return self.mesh[0] * self.mesh[1]


@dataclass(frozen=True)
class PlanFound:
    """A plan that Alpa found."""

    stages: tuple[StageFound, ...]
    num_microbatches: int

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage, one after the other."""
        found, start = [], 0
        for stage in self.stages:
            found.append(tuple(range(start, start + stage.num_devices)))
            start += stage.num_devices
        return tuple(found)

    @property
    def num_groups(self) -> int:
        """Into how many groups of layers the model was cut."""
        return sum(stage.groups for stage in self.stages)


@dataclass(frozen=True)
class Measured:
    """Throughput of Alpa, of the best system beside it, and of Alpa with one kind of parallelism only."""

    alpa: Figure
    rival: Figure
    inter_only: Figure = NOT_SHOWN
    intra_only: Figure = NOT_SHOWN

    def of(self, asked: Asked) -> Figure:
        """With a plan of this kind."""
        by_kind = {
            Asked.INTRA_OP: self.intra_only,
            Asked.INTER_OP: self.inter_only,
            Asked.MEGATRON: self.rival,
            Asked.DEEPSPEED: self.rival,
            Asked.PP_DP: self.rival,
        }
        return by_kind.get(asked, self.alpa)


@dataclass(frozen=True)
class Cell:
    """A model on so many devices."""

    suite: Suite
    num_devices: int
    size: str
    batch_size: int
    found: PlanFound
    measured: Measured


RIVALS: Mapping[Suite, str] = MappingProxyType(
    {Suite.GPT: "Megatron-LM", Suite.MOE: "DeepSpeed", Suite.WIDE_RESNET: "pipeline of data-parallel stages"}
)


def _even(stages: int, mesh: tuple[int, int], count: int) -> PlanFound:
    """Stages of one mesh and as many groups."""
    return PlanFound((StageFound(mesh, 1),) * stages, count)


def _uneven(count: int, *stages: tuple[tuple[int, int], int]) -> PlanFound:
    return PlanFound(tuple(StageFound(mesh, groups) for mesh, groups in stages), count)


def _of_transformers(suite: Suite, num_devices: int, size: str, found: PlanFound, measured: Measured) -> Cell:
    return Cell(suite, num_devices, size, 1024, found, measured)


def _of_resnets(num_devices: int, size: str, found: PlanFound, measured: Measured, batch_size: int = 1536) -> Cell:
    return Cell(Suite.WIDE_RESNET, num_devices, size, batch_size, found, measured)


_GPT_8 = _uneven(128, ((2, 1), 2), ((2, 1), 2), ((4, 1), 4))
_RESNET_8 = _uneven(24, ((4, 1), 8), ((1, 4), 8))
_RESNET_16 = _uneven(32, ((4, 1), 5), ((4, 1), 4), ((8, 1), 7))
_RESNET_32 = _uneven(32, ((8, 1), 5), ((8, 1), 4), ((8, 1), 4), ((8, 1), 3))
_RESNET_64 = PlanFound(
    tuple(
        StageFound((8, 1) if along_data else (1, 8), groups)
        for along_data, groups in zip((1, 0, 1, 0, 1, 1, 0, 1), (4, 4, 4, 4, 4, 4, 5, 4), strict=True)
    ),
    38,
)

_CELLS = (
    _of_transformers(Suite.GPT, 4, "1.3B", _even(2, (2, 1), 128), Measured(0.21, 0.17, 0.16, 0.21)),
    _of_transformers(Suite.GPT, 8, "2.6B", _GPT_8, Measured(0.47, 0.36, 0.42, 0.36)),
    _of_transformers(Suite.GPT, 16, "6.7B", _even(2, (2, 4), 64), Measured(0.94, 0.89, 0.93, 0.74)),
    _of_transformers(Suite.GPT, 32, "15B", _even(4, (2, 4), 128), Measured(1.89, 1.84, 1.57, 1.10)),
    _of_transformers(Suite.GPT, 64, "39B", _even(16, (1, 4), 1024), Measured(3.63, 3.68, 3.21, 0.11)),
    _of_transformers(Suite.MOE, 4, "1.3B", _even(2, (2, 1), 32), Measured(0.15, 0.12, 0.14, 0.15)),
    _of_transformers(Suite.MOE, 8, "2.4B", _even(2, (4, 1), 32), Measured(0.35, 0.30, 0.30, 0.35)),
    _of_transformers(Suite.MOE, 16, "10B", _even(2, (8, 1), 16), Measured(0.71, 0.18, 0.48, 0.35)),
    _of_transformers(Suite.MOE, 32, "27B", _even(8, (4, 1), 128), Measured(1.22, 0.11, OOM, 0.03)),
    _of_transformers(Suite.MOE, 64, "70B", _even(8, (8, 1), 64), Measured(2.32, OOM, OOM)),
    _of_resnets(4, "1B", _even(1, (1, 4), 24), Measured(0.029, 0.029, intra_only=0.029)),
    _of_resnets(8, "2B", _RESNET_8, Measured(0.060, 0.057, intra_only=0.057)),
    _of_resnets(16, "4B", _RESNET_16, Measured(0.106, 0.0, intra_only=0.071)),
    _of_resnets(32, "6.8B", _RESNET_32, Measured(0.209, OOM, intra_only=0.059)),
    _of_resnets(64, "13B", _RESNET_64, Measured(0.336, OOM, intra_only=0.041), batch_size=1520),
)

CELLS: Mapping[tuple[Suite, int], Cell] = MappingProxyType({(cell.suite, cell.num_devices): cell for cell in _CELLS})
"""By suite and number of devices."""


@dataclass(frozen=True)
class MeasuredStep:
    """One step whose seconds were measured: GPT of a size, its batch, microbatches, and its grid."""

    size: str
    batch_size: int
    num_microbatches: int
    data: int
    tensor: int
    pipeline: int
    seconds: float

    @property
    def num_devices(self) -> int:
        """All of the grid's."""
        return self.data * self.tensor * self.pipeline


CALIBRATION = MeasuredStep("2.6B", batch_size=32, num_microbatches=4, data=2, tensor=2, pipeline=2, seconds=2.464)
"""Alpa's authors on one p3.16xlarge, with rematerialisation: 37.0 TFLOP/s a device by the formula for GPT."""
