"""Matrix products that come out the way round in which they are wanted.

JAX differentiates ``y = x @ w`` into a gradient that stands on its side, and turns it:

    t = dot_general(ȳ, x)        over the batch, of shape [out, in]
    w̄ = transpose(t)             of shape [in, out]

A product of the same operands in the other order is ``w̄`` itself,

    w̄ = dot_general(x, ȳ)        transpose over (batch dimensions, free dimensions of b, free dimensions of a)

XLA knows that too, but not across a collective: where a plan gathers or scatters ``t``, the turning is left to whatever reads
``w̄`` next, an update of the optimizer that strides through memory (on CPU it took ten times as long).  So products that
nobody reads but one such ``transpose`` change the order of their operands before anything is planned.

Linear in the number of equations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from autopar._compat import DropVar, Literal


def in_the_order_wanted(equations: Sequence[Any], outvars: Iterable[Any]) -> list[Any]:
    """The equations of a flat jaxpr with these outputs, with such pairs as one product each, in the place of the first."""
    readers = Counter(id(atom) for equation in equations for atom in equation.invars if not isinstance(atom, Literal))
    readers.update(id(atom) for atom in outvars if not isinstance(atom, Literal))
    products = {
        id(equation.outvars[0]): number
        for number, equation in enumerate(equations)
        if equation.primitive.name == "dot_general" and readers[id(equation.outvars[0])] == 1
    }
    kept: list[Any] = list(equations)
    for number, equation in enumerate(equations):
        if equation.primitive.name != "transpose" or isinstance(equation.outvars[0], DropVar):
            continue
        source = products.get(id(equation.invars[0]))
        if source is None or not _turns(equation.params["permutation"], equations[source]):
            continue
        kept[source], kept[number] = _other_way_round(equations[source], equation.outvars), None
    return [equation for equation in kept if equation is not None]


def _turns(permutation: Sequence[int], product: Any) -> bool:
    """Whether a permutation exchanges the free dimensions of the two operands of ``product``, and does nothing else."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    left, whole = product.invars[0].aval.ndim - len(contracted), len(permutation)
    wanted = (*range(len(batch)), *range(left, whole), *range(len(batch), left))
    return tuple(permutation) == wanted and product.params.get("out_sharding") is None


def _other_way_round(product: Any, outvars: Sequence[Any]) -> Any:
    (of_left, of_right), (batch_left, batch_right) = product.params["dimension_numbers"]
    params = dict(product.params, dimension_numbers=((of_right, of_left), (batch_right, batch_left)))
    precision = params.get("precision")
    if isinstance(precision, tuple):
        params["precision"] = precision[::-1]
    return product.replace(invars=product.invars[::-1], outvars=list(outvars), params=params)
