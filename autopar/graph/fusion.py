"""Which values reach memory, and who reads them: a model of XLA's loop fusion.

XLA fuses elementwise work, broadcasts, reshapes and the like into the kernel that consumes them, duplicating cheap
producers for several consumers.  A value is *materialised* (has a buffer) when

* it enters or leaves the program (or a loop body),
* its operator cannot be fused into a consumer (matrix products, reductions, gathers, sorts, loops, …),
* a consumer needs a real buffer (matrix products, scatters, sorts, loops, …), or
* it is costly to compute (``exp``, ``tanh``, ``div``, …) and has more than one consumer.

All others live in registers.  A materialised value is written once and read once by every kernel that needs it; a
kernel is named by the operator whose result is materialised at its end (its *root*).  The same sets drive the price of
memory traffic and the liveness of buffers, so both speak of the same kernels.

Shortcoming: multi-output fusion and fusion limits are not modelled; the referee for both is the compiled HLO.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.graph.ir import Graph, Operator

FUSIBLE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim cbrt ceil clamp
    conj convert_element_type copy copy_p cos cosh div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt imag
    integer_pow iota is_finite le log log1p logistic lt max min mul ne neg nextafter not or pad pow population_count
    real reduce_precision rem reshape rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
    sign sin sinh slice sqrt square squeeze stop_gradient sub tan tanh transpose xor random_bits random_wrap
    random_unwrap threefry2x32 concatenate dynamic_slice gather one_minus_square split""".split()
)
"""Primitives that XLA may compute inside a consumer's kernel."""

COSTLY = frozenset(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh div erf erf_inv erfc exp exp2 expm1 log log1p logistic pow
    rem rsqrt sin sinh sqrt tan tanh random_bits threefry2x32 gather concatenate""".split()
)
"""Fusible primitives that XLA does not compute twice."""

INPUT_FUSIBLE = frozenset(
    "reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin dynamic_update_slice".split()
)
"""Not fusible into a consumer, but able to swallow their own producers."""

PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
"""Matrix products and convolutions: what matrix units run."""

FREE = frozenset("reshape squeeze expand_dims copy stop_gradient optimization_barrier bitcast_convert_type".split())
"""Mostly a change of name for the same bytes: the result shares the operand's buffer when both are materialised."""


KERNELS_FOLLOWED = 4
"""Of a cheap value with more consumers than this, only the last ones are followed."""


@dataclass(frozen=True)
class Fusion:
    """The outcome: ids of materialised values, and for each operator id the operand positions that are real reads.

    A position stands once for each kernel that reads there, so repeatedly where cheap work is repeated in several.
    ``aliases`` maps a materialised value to the one whose buffer it shares; ``roots`` an operator to the operators at
    whose kernels' ends it is computed (itself, when its own result is materialised).
    """

    materialised: frozenset[int]
    reads: dict[int, tuple[int, ...]]
    aliases: dict[int, int]
    roots: dict[int, frozenset[int]]

    def writes(self, operator: Operator) -> tuple[int, ...]:
        """Positions of the operator's results that are written to memory."""
        if operator.primitive in FREE:
            return ()
        return tuple(k for k, value in enumerate(operator.results) if value in self.materialised)


def fuse(graph: Graph) -> Fusion:
    """The fusion model of a whole tree of graphs."""
    materialised: set[int] = set()
    reads: dict[int, tuple[int, ...]] = {}
    aliases: dict[int, int] = {}
    roots: dict[int, frozenset[int]] = {}
    for level in _levels(graph):
        consumers, own = _materialised(level)
        for operator in level.operators:
            if operator.primitive in FREE:
                for operand, result in zip(operator.operands, operator.results, strict=False):
                    if operand is not None and operand in own and result in own:
                        aliases[result] = operand
        roots.update(_roots(level, own, consumers))
        reads.update(_reads(level, own, roots))
        materialised |= own
    return Fusion(frozenset(materialised), reads, aliases, roots)


def _levels(graph: Graph) -> Iterator[Graph]:
    yield graph
    for operator in graph.operators:
        for body in operator.bodies:
            yield from _levels(body)


def _materialised(graph: Graph) -> tuple[dict[int, list[Operator]], set[int]]:
    consumers: dict[int, list[Operator]] = defaultdict(list)
    for operator in graph.operators:
        for operand in dict.fromkeys(operator.operands):
            if operand is not None:
                consumers[operand].append(operator)
    own: set[int] = {*graph.inputs, *graph.constants, *(value for value in graph.outputs if value is not None)}
    for operator in graph.operators:
        fusible = operator.primitive in FUSIBLE and not operator.bodies
        takes_registers = fusible or operator.primitive in INPUT_FUSIBLE
        if not fusible:
            own.update(operator.results)
        elif operator.primitive in COSTLY:
            own.update(value for value in operator.results if len(consumers[value]) > 1)
        if not takes_registers:
            own.update(value for value in operator.operands if value is not None)
    return consumers, own


def _roots(graph: Graph, own: set[int], consumers: dict[int, list[Operator]]) -> dict[int, frozenset[int]]:
    roots: dict[int, frozenset[int]] = {}
    for operator in reversed(graph.operators):
        if any(value in own for value in operator.results) or not operator.results:
            roots[operator.id] = frozenset((operator.id,))
        else:
            reached = [roots[consumer.id] for value in operator.results for consumer in consumers[value]]
            # Cheap work is computed again in every kernel that needs it; a handful is enough to price it.
            merged = frozenset().union(*reached) if reached else frozenset((operator.id,))
            roots[operator.id] = (
                merged if len(merged) <= KERNELS_FOLLOWED else frozenset(sorted(merged)[-KERNELS_FOLLOWED:])
            )
    return roots


def _reads(graph: Graph, own: set[int], roots: dict[int, frozenset[int]]) -> dict[int, tuple[int, ...]]:
    """Each kernel reads a materialised value once: the first operator of the kernel that names it is charged."""
    charged: set[tuple[int, int]] = set()
    reads = {}
    for operator in graph.operators:
        positions = []
        for position, operand in enumerate(operator.operands):
            if operand is None or operand not in own or operator.primitive in FREE:
                continue
            fresh = [(root, operand) for root in roots[operator.id] if (root, operand) not in charged]
            charged.update(fresh)
            # Each kernel reads the part that it needs of what is split; together they read it once.
            positions.extend([position] * (min(len(fresh), 1) if operator.primitive == "split" else len(fresh)))
        reads[operator.id] = tuple(positions)
    return reads
