"""What does `autopar profile` measure, at which sizes, and for how long?

A point is a kind of work at one size.  Processors show their caches and the rates beyond at sizes of up to some ten MiB; an
accelerator starts a kernel in the time in which it adds up a MiB, so there the sizes go on to where that no longer counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.measured_convolutions import CONVOLUTIONS, ON_ACCELERATORS, Convolution
from autopar.measured_operations import OPERATIONS, Operation
from autopar.products import ProductOrder


@dataclass(frozen=True)
class Effort:
    """What is measured, and how long.

    ``full_bytes`` are the sizes of collectives (as in :mod:`autopar.cost_model.collectives`), ``sides`` the side lengths of
    square products, ``array_bytes`` the sizes of elementwise kernels' arrays on one device, ``fresh_bytes`` those of new
    arrays (the C library of Linux gives blocks of more than 32 MiB back at once, and those of 64 MiB whatever it is told, so
    prices jump there, and what lies between is cheap: there are sizes on both sides, and one beyond, or larger arrays would be
    priced as if the jump went on).  ``seconds`` is what one point may take once it is compiled, but each chain runs
    ``least_runs`` times; sizes whose product takes more than ``longest_seconds`` end their row.
    """

    full_bytes: tuple[int, ...]
    sides: tuple[int, ...]
    dtypes: tuple[str, ...]
    array_bytes: tuple[int, ...]
    fresh_bytes: tuple[int, ...]
    seconds: float
    least_runs: int = 5
    longest_seconds: float = 0.05
    streamed_bytes: int = 1 << 26
    """A device comes back to streamed arrays after so many bytes, which no cache holds for it."""
    orders: tuple[ProductOrder, ...] = tuple(ProductOrder)
    """Of the operands of square and of deep products."""
    use_orders: tuple[ProductOrder, ...] = tuple(ProductOrder)
    """Of products with one large array; accelerators take of it what its bytes take, whatever its order."""
    large_side: int = 1024
    """Of the one large array of products that are not square."""
    uses: tuple[int, ...] = (8, 32, 64, 128, 256)
    """How often each element of it is used."""
    deep_sides: tuple[int, ...] = ()
    """Of the results of products that sum over ``depth``; few keep few units of an accelerator busy."""
    depth: int = 1 << 15
    operations: tuple[Operation, ...] = OPERATIONS
    convolutions: tuple[Convolution, ...] = CONVOLUTIONS
    image_sides: tuple[int, ...] = (4, 8, 16, 32)
    """Of convolutions' square images."""
    looped_features: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Of images and results of convolutions that are loops; none are on accelerators."""
    work_sides: tuple[int, ...] = (64, 128, 192, 256, 384)
    """Of two square products between collectives of devices that share cores: by the first the curves are measured, by all
    of them the waits."""
    copied_shape: tuple[int, int] = (256, 768)
    """Of float32 matrices that are copied into another order, or cut; of all together, more than caches hold."""
    message_bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
    """Of messages between processes."""
    world_bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
    """Of collectives in a world of processes; larger ones take long, and go on at the same rate."""
    copied_bytes: tuple[int, ...] = (1 << 12, 1 << 18, 1 << 22, 1 << 26)
    """Of arrays copied between an accelerator and its host."""
    operated_elements: int = 1 << 22
    """Of an array that operations are applied to on accelerators: enough that starting a kernel takes little of its time."""
    on_accelerators: Effort | None = None
    """What stands instead where devices are no processors: their work is larger; None: the same."""

    def of_dtypes(self, dtypes: tuple[str, ...]) -> Effort:
        """The same with products of other dtypes, wherever it is spent."""
        there = self.on_accelerators
        return replace(self, dtypes=dtypes, on_accelerators=None if there is None else there.of_dtypes(dtypes))


_FULL_ON_ACCELERATORS = Effort(
    full_bytes=tuple(1 << power for power in (10, 13, 16, 18, 20, 22, 24, 26, 28)),
    sides=(512, 2048, 4096, 8192),
    dtypes=("float32", "bfloat16"),
    array_bytes=tuple(1 << power for power in (10, 14, 16, 18, 20, 22, 24, 26, 28)),
    fresh_bytes=(),
    seconds=0.2,
    streamed_bytes=1 << 28,
    use_orders=(ProductOrder.PLAIN,),
    large_side=8192,
    uses=(16, 64, 256, 1024),
    deep_sides=(256, 512, 1024, 2048, 4096),
    convolutions=ON_ACCELERATORS,
    looped_features=(),
    image_sides=(8, 32, 128),
)
"""Few sizes of products and convolutions: for each the compiler tries dozens of kernels, which takes seconds.  Products of
smaller sides take what it takes to start them, and how long that is the noise of the host hides.
"""
_QUICK_ON_ACCELERATORS = replace(
    _FULL_ON_ACCELERATORS,
    full_bytes=tuple(1 << power for power in (13, 18, 22, 26)),
    sides=(512, 4096),
    array_bytes=tuple(1 << power for power in (10, 18, 22, 26)),
    seconds=0.1,
)
FULL = Effort(
    full_bytes=tuple(1 << power for power in (10, 12, 14, 16, 18, 20, 22, 24, 25)),
    sides=(8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    dtypes=("float32", "bfloat16", "float64"),
    array_bytes=tuple(1 << power for power in (10, 12, 14, 16, 18, 20, 22, 24)),
    fresh_bytes=(*(1 << power for power in (16, 18, 20, 22, 24)), *(size << 20 for size in (31, 33, 62, 64, 128))),
    seconds=0.6,
    on_accelerators=_FULL_ON_ACCELERATORS,
)
QUICK = Effort(
    full_bytes=tuple(1 << power for power in (12, 16, 20, 23)),
    sides=(8, 64, 256, 512),
    dtypes=("float32",),
    array_bytes=tuple(1 << power for power in (12, 16, 20, 23)),
    fresh_bytes=(1 << 16, *(size << 20 for size in (1, 4, 31, 33, 62, 64, 128))),
    seconds=0.1,
    world_bytes=(1 << 12, 1 << 16, 1 << 20),
    looped_features=(16, 64),
    on_accelerators=_QUICK_ON_ACCELERATORS,
)
