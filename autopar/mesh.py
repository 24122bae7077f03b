"""What is a logical mesh, and which are there of a number of devices?

    id of the device at (i_1, …, i_k) = Σ i_j · stride_j        stride_j = n_(j+1) · … · n_k,  row-major

so every *ordered* factorization n_1 · … · n_k of the number of devices is a mesh of its own: the order of the axes decides
which of them crosses hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.devices import check_count
from autopar.errors import ClusterError

AXIS_NAMES = ("data", "model", "extra")  # of the axes of a logical mesh, as many as it has


@dataclass(frozen=True)
class Mesh:
    """A logical mesh: names and sizes of axes over the device ids ``0 … size-1`` in row-major order.

    The first axis has the largest stride, so with 2 hosts × 4 devices the axis of size 2 in ``(2, 4)`` crosses hosts.

    Raises ``ClusterError`` if names repeat, or names and sizes do not pair up, or a size is below 1.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axis_names) != len(self.axis_sizes) or len(set(self.axis_names)) != len(self.axis_names):
            raise ClusterError(
                f"mesh axes {self.axis_names} of sizes {self.axis_sizes}; give one size for each name, no name twice"
            )
        for name, size in zip(self.axis_names, self.axis_sizes, strict=True):
            check_count(f"size of mesh axis {name!r}", size)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.axis_sizes)

    @property
    def dividing_names(self) -> tuple[str, ...]:
        """Names of the axes of more than one device: a cut by another is none."""
        return tuple(name for name, size in zip(self.axis_names, self.axis_sizes, strict=True) if size > 1)

    def position(self, name: str) -> int:
        """Index of the axis; raises ``ClusterError`` for a name that the mesh does not have."""
        try:
            return self.axis_names.index(name)
        except ValueError:
            raise ClusterError(f"no axis {name!r} in mesh {self}; its axes are {list(self.axis_names)}") from None

    def axis_size(self, *names: str) -> int:
        """Product of the sizes of the named axes (1 for none)."""
        size = 1
        for name in names:  # planners ask millions of times, mostly for one axis
            size *= self.axis_sizes[self.position(name)]
        return size

    def stride(self, name: str) -> int:
        """Distance in device ids between neighbours along the axis."""
        return math.prod(self.axis_sizes[self.position(name) + 1 :])

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.axis_sizes, strict=True))


def meshes_of(num_devices: int, max_axes: int) -> list[Mesh]:
    """Every way to lay devices out as a mesh of 1 to ``max_axes`` axes of size 2 or more; one device gives an axis of size 1.

    Raises ``ClusterError`` for fewer axes than one, or more than have names.
    """
    if not 1 <= max_axes <= len(AXIS_NAMES):
        raise ClusterError(f"max_axes is {max_axes}; give 1 to {len(AXIS_NAMES)}")
    if num_devices == 1:
        return [Mesh(AXIS_NAMES[:1], (1,))]
    shapes = sorted(_ordered_factorizations(num_devices, max_axes), key=lambda shape: (len(shape), shape))
    return [Mesh(AXIS_NAMES[: len(shape)], shape) for shape in shapes]


def _ordered_factorizations(number: int, max_factors: int) -> Iterator[tuple[int, ...]]:
    """All tuples of at most ``max_factors`` integers of 2 or more with product ``number`` (at least 2)."""
    yield (number,)
    if max_factors > 1:
        for first in range(2, number // 2 + 1):
            if number % first == 0:
                for rest in _ordered_factorizations(number // first, max_factors - 1):
                    yield (first, *rest)
