"""What does a convolution take that no library runs, but loops one inside the other?

Where a dilated image has fewer positions than the window (:attr:`ConvolutionFamily.SMALL_DILATED`), XLA:CPU lets the two change
places, finds no library that takes the outcome, and compiles loops over results, positions and features of the image:

    seconds = FLOPs · r(image features, result features)

Each sum goes over image features whose weights lie as far apart as there are result features.  Over few of them it is hardly
begun when the next position is looked at; far apart and many of them do not stay in the cache.  So r, which several sizes of
images share, is measured on a grid of features; between its points it is straight over the logarithms of both, beyond them flat.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.errors import ClusterError

LoopedSamples = tuple[tuple[float, float, float], ...]
"""(features of the image, features of the result, seconds by the FLOP): each with each, in ascending order."""


@dataclass(frozen=True)
class LoopedConvolutions:
    """Of one dtype (NumPy's name).

    Raises ``ClusterError`` for no samples, numbers that are not finite and above zero, or samples that are no grid.
    """

    dtype: str
    samples: LoopedSamples

    def __post_init__(self) -> None:
        if not all(math.isfinite(number) and number > 0 for sample in self.samples for number in sample):
            raise ClusterError("not every number is finite and above zero; measure again")
        pairs = [(image, result) for image, result, _ in self.samples]
        grid = list(itertools.product(*map(_ascending, zip(*pairs, strict=True))))
        if not pairs or pairs != grid:
            raise ClusterError(
                "features of images and of results are not each with each, in ascending order; measure again"
            )

    def seconds_per_flop(self, image_features: int, result_features: int) -> float:
        """Of a convolution with so many features on one device."""
        images, results, rates = self._grid
        image, result = (
            math.log2(max(features, 1)) for features in (image_features, result_features)
        )  # none in empty arrays
        return float(np.interp(image, images, [np.interp(result, results, row) for row in rates]))

    @cached_property
    def _grid(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logarithms of the features, and rates by both."""
        images, results = (_ascending(sample[side] for sample in self.samples) for side in (0, 1))
        rates = np.array([rate for _, _, rate in self.samples]).reshape(len(images), len(results))
        return np.log2(images), np.log2(results), rates


def _ascending(features: Iterable[float]) -> list[float]:
    return sorted(set(features))
