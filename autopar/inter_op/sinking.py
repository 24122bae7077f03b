"""Which constants of a loop are made inside its trips for nothing?

What a loop reads whole in every trip lies in memory as long as it runs.  A mask or a broadcast zero that is the same in all trips
JAX puts before the loop, in the shape in which the body uses it, that of the scores of a whole batch.  Let

    C₀ = ∅      C_{k+1} = C_k ∪ { results of cheap operators whose operands are literals or in C_k }

where cheap is what a compiler computes inside the kernels that read it (:mod:`autopar.graph.fusion`), however often they do.
A constant v ∈ ⋃ C_k is made in each trip instead, by copies of the operators that lead to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar import _compat
from autopar._compat import DropVar, Literal, Var
from autopar.graph.fusion import COSTLY, FUSIBLE
from autopar.graph.ir import Graph, Operator


def made_of_literals(graph: Graph) -> dict[int, Operator]:
    """The values of the top level that are made, cheaply, of literals alone, with their makers, in the program's order."""
    found: dict[int, Operator] = {}
    for operator in graph.operators:
        is_cheap = operator.primitive in FUSIBLE - COSTLY and not operator.equation.effects
        if is_cheap and all(value is None or value in found for value in operator.operands):
            found.update(dict.fromkeys(operator.results, operator))
    return found


def with_sunk(equation: Any, makers: Mapping[int, Operator]) -> Any:
    """A ``scan`` whose trips make those of its constants that are results of ``makers``."""
    consts, carries = _compat.scan_arity(equation.params)
    body = _compat.jaxpr_of(equation.params["jaxpr"])
    both = list(zip(equation.invars, body.invars, strict=True))
    inside: dict[Any, Any] = {}  # by variable of the program: what stands for it in the body
    sunk, wanted = {}, set()
    operators = {one.id: one for one in makers.values()}
    made = {variable for one in operators.values() for variable in one.equation.outvars}
    for outer, inner in both[:consts]:
        if not isinstance(outer, Literal) and outer in made:
            sunk[inner] = outer
            wanted.add(outer)
    chain = []
    for operator in reversed(operators.values()):
        if not wanted.isdisjoint(operator.equation.outvars):
            chain.append(operator.equation)
            wanted.update(atom for atom in operator.equation.invars if not isinstance(atom, Literal))
    copies = []
    for one in reversed(chain):
        inside.update((v, v if isinstance(v, DropVar) else Var(v.aval)) for v in one.outvars)
        copies.append(_on(one, inside).replace(outvars=[inside[v] for v in one.outvars]))
    instead = {inner: inside[outer] for inner, outer in sunk.items()}
    left = [(outer, inner) for outer, inner in both if inner not in sunk]
    closed = _compat.make_closed_jaxpr(
        [inner for _, inner in left],
        [atom if isinstance(atom, Literal) else instead.get(atom, atom) for atom in body.outvars],
        [*copies, *(_on(one, instead) for one in body.eqns)],
        equation.params["jaxpr"],
    )
    outers = [outer for outer, _ in left]
    return _compat.scan_equation(equation, outers, equation.outvars, closed, (consts - len(sunk), carries))


def _on(equation: Any, instead: Mapping[Any, Any]) -> Any:
    """An equation on other operands."""
    atoms = [atom if isinstance(atom, Literal) else instead.get(atom, atom) for atom in equation.invars]
    return equation.replace(invars=atoms)
