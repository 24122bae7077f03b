"""Which convolutions does a profile hold curves of, and how is one of each family made?

With ``n`` images of ``s × s`` positions and ``c`` features, of which as many are made, and windows of ``w × w``, the families
of :class:`autopar.convolution_shapes.ConvolutionFamily` are those that a layer and its gradients run:

    a convolution                  2·n·s²·w²·c² FLOPs, a window as small as it is written
    its gradient of the weights    as many, with an image of all positions as the window

and the same of a transposed convolution, whose image is dilated: window and stride 2, n·s²·2²·c² multiplications.  The
gradient of the input is a convolution of the first kind.  The gradient of the weights of a layer with w = 1 is a family of its
own; so is a dilated image of fewer positions than the window, of 2 × 2 under w = 3, of which there are n·s²/4.  On processors
those are loops (:mod:`autopar.looped_convolutions`) and measured by c, of images and of results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
from jax import lax

from autopar.convolution_shapes import FEW_FEATURES, ConvolutionFamily

SMALL_SIDE = 2
"""Of an image that has fewer positions than a window."""
IMAGES, MANY_IMAGES, MANY_FEATURES, FEATURES_ON_ACCELERATORS = 2, 16, 64, 256
"""Matrix units of accelerators are not filled by fewer features; sums over few images are slow, and batches seldom so small."""
_DIMENSIONS = ("NHWC", "HWIO", "NHWC")


@dataclass(frozen=True)
class Convolution:
    """A family, and what was chosen of its members: ``features`` in and out; whether it is of a transposed convolution."""

    family: ConvolutionFamily
    features: int
    window: int = 3
    """Positions along a side of the layer's window."""
    transposed: bool = False
    of_weights: bool = False
    """The gradient of the weights, whose operands are image and result."""
    own_side: int | None = None
    """Positions along a side of images that do not grow: there are as many more instead."""
    images: int = IMAGES
    """Of the smallest; the gradient of the weights sums over them."""
    made_features: int | None = None
    """Of the result; None: as many as the image has."""

    def shapes(self, side: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the operands, for as many positions in all as images with so many along a side have."""
        own_side = self.own_side or side
        images = self.images * side**2 // own_side**2
        image = (images, own_side, own_side, self.features)
        if not self.of_weights:
            return image, (self.window, self.window, *self._both_features)
        result_side = 2 * own_side if self.transposed else own_side
        return image, (images, result_side, result_side, self._both_features[1])

    def flops(self, side: int) -> float:
        """FLOPs of one, a multiply-add counted as two; holes are not multiplied."""
        return 2.0 * self.images * side**2 * self.window**2 * math.prod(self._both_features)

    def apply(self, image: jax.Array, other: jax.Array) -> jax.Array:
        """The layer of ``other`` as its weights, or the weights' gradient where ``other`` is that of the result."""
        if not self.of_weights:
            return self._layer(image, other)
        weights = jax.ShapeDtypeStruct((self.window, self.window, *self._both_features), image.dtype)
        (gradient,) = jax.linear_transpose(lambda kernel: self._layer(image, kernel), weights)(other)
        return gradient

    @property
    def _both_features(self) -> tuple[int, int]:
        return self.features, self.made_features or self.features

    def _layer(self, image: jax.Array, weights: jax.Array) -> jax.Array:
        if self.transposed:
            return lax.conv_transpose(image, weights, (2, 2), "SAME", dimension_numbers=_DIMENSIONS)
        return lax.conv_general_dilated(image, weights, (1, 1), "SAME", dimension_numbers=_DIMENSIONS)


CONVOLUTIONS = (
    Convolution(ConvolutionFamily.FEW_FEATURES, FEW_FEATURES),
    Convolution(ConvolutionFamily.MANY_FEATURES, MANY_FEATURES),
    Convolution(ConvolutionFamily.DILATED, MANY_FEATURES, window=2, transposed=True),
    Convolution(ConvolutionFamily.LARGE_FEW_FEATURES, FEW_FEATURES, of_weights=True, images=MANY_IMAGES),
    Convolution(ConvolutionFamily.LARGE_MANY_FEATURES, MANY_FEATURES, of_weights=True, images=MANY_IMAGES),
    Convolution(ConvolutionFamily.LARGE_DILATED, MANY_FEATURES, window=2, transposed=True, of_weights=True),
    Convolution(ConvolutionFamily.LARGE_POINT, MANY_FEATURES, window=1, of_weights=True, images=MANY_IMAGES),
)

_SMALL = Convolution(ConvolutionFamily.SMALL_DILATED, MANY_FEATURES, transposed=True, own_side=SMALL_SIDE)
_LOOPED_SUMS = 1 << 17
"""Images times features of both kinds, of those that are loops."""

ON_ACCELERATORS = tuple(
    one if one.features <= FEW_FEATURES else replace(one, features=FEATURES_ON_ACCELERATORS)
    for one in (*CONVOLUTIONS, _SMALL)
)


def looped_convolution(image_features: int, result_features: int) -> Convolution:
    """One that processors run as loops."""
    images = max(_LOOPED_SUMS // (image_features * result_features), 1)
    return replace(_SMALL, features=image_features, made_features=result_features, images=images)
