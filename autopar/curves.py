"""Seconds as a function of an amount, between and beyond the points that were measured.

It is made to rise (more work never takes less time) by the nearest rising figures in the sense of least squares
(isotonic regression; Barlow et al., 1972), so that a point that was measured too high does not raise all beyond it.  It is
piecewise linear between its points, flat below the first – the latency, or the cost of starting a kernel – and goes on beyond
the last at the rate of its last rising segment (where it ends flat, no faster than in proportion).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.optimize import isotonic_regression

from autopar.errors import ClusterError

Samples = tuple[tuple[float, float], ...]
"""(amount, seconds) in ascending amounts, as measured."""


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of an amount (see the module docstring).

    Raises ``ClusterError`` for no samples, amounts that do not ascend from above zero, or seconds that are not finite and
    above zero.
    """

    samples: Samples
    _amounts: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _seconds: tuple[float, ...] = field(init=False, repr=False, compare=False)
    slope: float = field(init=False, repr=False, compare=False)
    """Seconds of one more unit beyond the last point."""

    def __post_init__(self) -> None:
        if not self.samples:
            raise ClusterError("no samples; measure again with `autopar profile`")
        for number, (amount, seconds) in enumerate(self.samples):
            for name, value in (("amount", amount), ("seconds", seconds)):
                if not (math.isfinite(value) and value > 0):
                    raise ClusterError(f"sample {number} has {name} {value!r}; give a finite number above zero")
            if number and amount <= self.samples[number - 1][0]:
                raise ClusterError(
                    f"sample {number} has amount {amount!r}, not above that of the one before; sort them"
                )
        amounts = [float(amount) for amount, _ in self.samples]
        seconds_rising = isotonic_regression([seconds for _, seconds in self.samples]).x.tolist()
        object.__setattr__(self, "_amounts", tuple(amounts))
        object.__setattr__(self, "_seconds", tuple(seconds_rising))
        object.__setattr__(self, "slope", _last_slope(amounts, seconds_rising))

    @classmethod
    def through(cls, samples: Mapping[float, float]) -> Curve:
        """Amounts → seconds, in any order."""
        return cls(tuple(sorted((float(amount), float(seconds)) for amount, seconds in samples.items())))

    def at(self, amount: float) -> float:
        """Seconds for an amount of zero or more."""
        amounts, seconds = self._amounts, self._seconds
        if amount <= amounts[0]:
            return seconds[0]
        if amount >= amounts[-1]:
            return seconds[-1] + (amount - amounts[-1]) * self.slope
        right = bisect.bisect_right(amounts, amount)
        share = (amount - amounts[right - 1]) / (amounts[right] - amounts[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])

    def up_to_last(self, amount: float) -> float:
        """Seconds of an amount; of more than was measured those of the last point."""
        return self.at(min(amount, self.samples[-1][0]))

    def raised(self, seconds: float) -> Curve:
        """So many seconds more everywhere."""
        return Curve(tuple((amount, measured + seconds) for amount, measured in self.samples)) if seconds else self

    def at_least(self, seconds: float, seconds_per_unit: float) -> Curve:
        """No less anywhere than a straight line, from one unit on."""
        last = self.samples[-1][0]
        ends = (amount for amount in (1.0, 2 * last, 64 * last) if not self.samples[0][0] <= amount <= last)
        amounts = sorted((*ends, *(amount for amount, _ in self.samples)))
        above = [self.at(amount) - seconds - amount * seconds_per_unit for amount in amounts]
        for number, (here, there) in enumerate(pairwise(above)):
            if here * there < 0:  # where they cross
                amounts.append(amounts[number] + (amounts[number + 1] - amounts[number]) * here / (here - there))
        return Curve.through({amount: max(self.at(amount), seconds + amount * seconds_per_unit) for amount in amounts})

    def at_all(self, amounts: np.ndarray) -> np.ndarray:
        """Seconds for many amounts at once."""
        beyond = np.maximum(amounts - self._amounts[-1], 0.0) * self.slope
        return np.interp(amounts, self._amounts, self._seconds) + beyond


def _last_slope(amounts: Sequence[float], seconds: Sequence[float]) -> float:
    """Rate of the last segment that rises; of one point, or a curve that never rises, its own seconds per unit.

    A curve that ends flat goes on no faster than in proportion: what rose before may have been a jump.
    """
    proportional = seconds[-1] / amounts[-1]
    for right in range(len(amounts) - 1, 0, -1):
        if seconds[right] > seconds[right - 1]:
            slope = (seconds[right] - seconds[right - 1]) / (amounts[right] - amounts[right - 1])
            return slope if right == len(amounts) - 1 else min(slope, proportional)
    return proportional
