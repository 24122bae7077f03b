"""What passes between the driver and the processes of a mesh, once and in every step.

Plain data: identifiers of arrays that stay on the devices, and NumPy arrays where values are given or asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.cluster import Mesh
from autopar.plan import Layout
from autopar.schedule.cross_mesh import Placement


@dataclass(frozen=True)
class World:
    """The processes of one mesh: where they meet (``coordinator``: address and port), how many, which is this one."""

    mesh: int
    coordinator: str
    processes: int
    rank: int
    devices_per_process: int
    platform: str
    address: str
    """The host's own address, to which everything binds."""
    settings: Mapping[str, Any]
    """JAX's configuration, as far as results depend on it."""


@dataclass(frozen=True)
class Versions:
    """What must be the same in the driver and in all processes."""

    autopar: str
    jax: str
    python: str


@dataclass(frozen=True)
class HostPieces:
    """An array as one process gets it: the piece of each of its devices; of typed keys the words, and ``key_impl``."""

    shape: tuple[int, ...]
    pieces: tuple[Any, ...] = field(repr=False)
    key_impl: str | None = None


@dataclass(frozen=True)
class RowsPart:
    """What one device gets of a leaf: ranges of rows, of each row a box of the other dimensions, in a shape of its own."""

    ranges: tuple[tuple[int, int], ...]
    rest: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HostRows:
    """An array that one process reads for itself: for each of its devices the part of leaf ``leaf`` of a batch.

    ``shape`` and ``dtype`` are those of the array of the step.
    """

    token: int
    step: int
    leaf: int
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[RowsPart, ...] = field(repr=False)


@dataclass(frozen=True)
class Where:
    """How an array is stored on a mesh: devices are the cluster's ids, row-major."""

    mesh: Mesh
    devices: tuple[int, ...]
    layout: Layout

    def placement(self, rank: int) -> Placement:
        """The same for an array of so many dimensions, the words of typed keys among them."""
        more: tuple[tuple[str, ...], ...] = ((),) * (rank - len(self.layout.dims))
        return Placement(Layout((*self.layout.dims, *more)), self.mesh, self.devices)


@dataclass(frozen=True)
class StepOrder:
    """One step of a loaded shipment: what stands in each entry (an array's identifier, or its pieces).

    Result k gets the identifier ``first_result + k``.
    """

    digest: str
    step: int
    given: tuple[int | HostPieces | HostRows, ...]
    first_result: int
    released: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepReport:
    """What one process says of a step: seconds from its call to its last dispatch, and of an earlier step until done."""

    step: int
    dispatch_seconds: float
    finished: Mapping[int, float]


@dataclass(frozen=True)
class ProgramMemory:
    """XLA's account of the bytes on one device of one program, by the names of ``compiled.memory_analysis()``."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int


@dataclass(frozen=True)
class HostStatus:
    """How one process is: bytes in its memory and on its devices, the step it is in, and for how long."""

    name: str
    pid: int
    resident_bytes: int
    array_bytes: int
    step: int
    busy_seconds: float
    """How long it has been dispatching the step; 0: it is not."""
    step_seconds: float
    """How long the last finished step took, from its call or the end of the one before it; 0: none has."""
