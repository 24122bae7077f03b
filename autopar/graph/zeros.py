"""Which values are zeros, whatever the inputs: a sum of nothing, from which a loop may add up."""

from __future__ import annotations

import numpy as np

from autopar import _compat
from autopar.graph.ir import Graph

KEEP_ZEROS = frozenset(("broadcast_in_dim", "convert_element_type", "reshape", "copy"))


def zero_values(graph: Graph, known: frozenset[int] = frozenset()) -> frozenset[int]:
    """Values of this level that are zero everywhere; ``known`` are inputs that are."""
    zeros = set(known)
    for operator in graph.operators:
        if operator.primitive in KEEP_ZEROS:
            operand, atom = operator.operands[0], operator.equation.invars[0]
            if operand in zeros or (operand is None and is_zero_literal(atom)):
                zeros.update(operator.results)
    return frozenset(zeros)


def is_zero_literal(atom: object) -> bool:
    """Whether an operand of an equation is a literal zero."""
    return isinstance(atom, _compat.Literal) and not np.any(atom.val)
