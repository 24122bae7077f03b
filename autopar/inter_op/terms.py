"""What may be asked of a batch that is cut into microbatches: of coupled examples, of random numbers and of the sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import jax

from autopar.graph.ir import Operator


class BatchCoupling(Enum):
    """What is done where examples of a batch depend on each other through the parameters."""

    REFUSE = "refuse"
    PER_MICROBATCH = "per_microbatch"


class MicrobatchRng(Enum):
    """Which random numbers a microbatch takes: its rows of the whole batch's draw, or a draw with a key of its own."""

    EXACT = "exact"
    PER_MICROBATCH = "per_microbatch"


class AccumulatorDtype(Enum):
    """In what sums over microbatches are kept whose own type is a narrower float: the gradients of half precision."""

    FLOAT32 = "float32"
    SAME = "same"


@dataclass(frozen=True)
class Terms:
    """Into how many microbatches, and on which terms."""

    count: int
    coupling: BatchCoupling = BatchCoupling.REFUSE
    rng: MicrobatchRng = MicrobatchRng.EXACT
    accumulator: AccumulatorDtype = AccumulatorDtype.FLOAT32
    shares: tuple[int, ...] = ()
    """How many of them each of several meshes works off that hold the whole model; none: there are no such meshes."""

    @property
    def text(self) -> str:
        """What counts for the identity of a program that is cut so; nothing where its numbers stay those of the whole."""
        if self.count == 1 or replace(self, shares=()) == Terms(self.count):
            return ""
        sums = "" if self.accumulator is AccumulatorDtype.FLOAT32 else f", sums {self.accumulator.value}"
        return f"coupling {self.coupling.value}, rng {self.rng.value}{sums}"


DRAW = "random_bits"


def own_draw(operator: Operator, keys: Any, number: Any, shape: tuple[int, ...]) -> list[Any]:
    """Random bits of a microbatch's own: ``shape`` of them, by the draw's keys with the microbatch's number folded in."""
    fold = jax.random.fold_in
    for _ in keys.shape:
        fold = jax.vmap(fold, in_axes=(0, None))
    params = operator.equation.primitive.get_bind_params(operator.equation.params)
    return [operator.equation.primitive.bind(fold(keys, number), **{**params, "shape": shape})]
