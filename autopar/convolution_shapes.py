"""Which convolutions run alike, so that what was measured of one is the price of another?

    seconds = curve of the family (FLOPs · filling)

Libraries have kernels of their own for each family, of very different speed, and units of a width that narrow pieces do not fill.
In the gradient of weights images take the place of the image's features: it sums over them, and few do not fill a unit either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FEW_FEATURES = 16
"""At most so many in image and result: XLA:CPU leaves these to another library."""


class ConvolutionFamily(Enum):
    """Which convolutions run alike: libraries have kernels of their own for each, of very different speed.

    A window is large if it covers more positions than the result has: so it is in gradients of weights, where the other
    gradient is the window.  Of a layer whose own window is one position, that gradient's result has one position.  An image is
    dilated if holes are put between its positions, as by a transposed convolution; if it has fewer than the window, XLA lets
    the two change places.
    """

    FEW_FEATURES = "few features"
    MANY_FEATURES = "many features"
    DILATED = "dilated image"
    LARGE_FEW_FEATURES = "large window, few features"
    LARGE_MANY_FEATURES = "large window, many features"
    LARGE_DILATED = "large window, dilated image"
    LARGE_POINT = "large window, many features, one position"
    SMALL_DILATED = "dilated image smaller than the window"


@dataclass(frozen=True)
class ConvolutionShape:
    """What the price of a convolution on one device depends on, beside its FLOPs.

    Positions are those of the window, of the image without holes, and of the result; the image's features, times the window's
    positions, are what one of the result is a sum of.
    """

    window_positions: int
    image_positions: int
    result_positions: int
    image_features: int
    result_features: int
    is_dilated: bool

    @property
    def family(self) -> ConvolutionFamily:
        """Which it runs alike with."""
        large = self.window_positions > self.result_positions
        if self.is_dilated and large:
            return ConvolutionFamily.LARGE_DILATED
        if self.is_dilated:
            small = self.window_positions > self.image_positions
            return ConvolutionFamily.SMALL_DILATED if small else ConvolutionFamily.DILATED
        if max(self.image_features, self.result_features) <= FEW_FEATURES:
            return ConvolutionFamily.LARGE_FEW_FEATURES if large else ConvolutionFamily.FEW_FEATURES
        if large:
            return (
                ConvolutionFamily.LARGE_POINT if self.result_positions == 1 else ConvolutionFamily.LARGE_MANY_FEATURES
            )
        return ConvolutionFamily.MANY_FEATURES

    @property
    def filling(self) -> float:
        """How many times the FLOPs take that fill units as wide as :data:`FEW_FEATURES`, of which a narrow piece uses a part.

        A piece with two of many features gathers all that they are sums of, as it would for sixteen.  Where features are few
        and the window is small, those of each position are gathered by themselves: half of what sixteen take is for the position
        (3 features of 16: 3.2; 2.1 to 4.8 were measured on XLA:CPU, for windows of 3 × 3 and 7 × 7).
        """
        if self.family is ConvolutionFamily.FEW_FEATURES:
            return _by_position(self.image_features) * _share(self.result_features)
        return _share(self.image_features * self.window_positions) * _share(self.result_features)

    @property
    def filling_on_processors(self) -> float:
        """As :attr:`filling`; XLA:CPU gathers each position by itself under a large window of few features too.

        So the gradient of weights takes about as long for one image as for eight: one 0.36 to 0.64 of what sixteen take, two 0.5
        to 0.8, four 0.5 to 0.85, eight 0.5 to 0.7 (3 to 32 features, images of 32 × 32).
        """
        if self.family is not ConvolutionFamily.LARGE_FEW_FEATURES:
            return self.filling
        return _by_position(self.image_features) * _share(self.result_features)


def _by_position(features: int) -> float:
    return 0.5 + 0.5 * _share(features)


def _share(width: int) -> float:
    """How many times so many fit into a unit."""
    return max(FEW_FEATURES / max(width, 1), 1.0)
