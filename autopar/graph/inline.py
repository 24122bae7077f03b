"""One flat program: the equations that XLA would see, in one list.

A jaxpr is a tree of calls.  For planning, ``f(x) = g(h(x))`` must be the same program whether or not ``h`` stands in
a ``jit``, so every call is replaced by its equations,

    y = call[jaxpr=(a → b)](x)     ⇒     equations of jaxpr with a := x, y := b

for ``jit``, plain calls and custom derivatives (whose derivative has been taken when we see them).  Three things are
kept:

* ``scan``, ``while`` and ``cond`` stay one equation each, with flat bodies.  A closed-over array inside a body becomes
  an operand of the loop, so that every array of the program is a value of the top level.
* A differentiated ``remat`` region must be computed twice.  JAX lowers it to an ``optimization_barrier`` on its inputs,
  else common subexpression elimination would undo it; we write that barrier and then the region's equations, whose
  names stack gets ``checkpoint`` as in JAX's own lowering.
* Shardings that a user gave to an inner ``jit`` become ``sharding_constraint`` equations.

Costly work that stands twice on the same arrays (transposition writes an LSTM's concatenated gates once for each matrix
that they meet) is kept once, as XLA would see to if both copies were laid out alike.  Cheap work stays: each consumer
may want its own copy of it laid out otherwise.

Products that are only turned afterwards are written as the product that is wanted (:mod:`autopar.graph.products`).

Names stacks are prefixed with those of the enclosing equations, inside loop bodies too.  The source line of an
equation is its own; where that does not reach the user's code (the inside of ``jnp.where``), it is that of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autopar import _compat
from autopar._compat import DropVar, Literal, Var
from autopar.errors import TraceError
from autopar.graph.fusion import COSTLY, FREE, FUSIBLE
from autopar.graph.products import in_the_order_wanted

_CALLS = frozenset(
    {
        "jit",
        "pjit",
        "call",
        "core_call",
        "closed_call",
        "core_closed_call",
        "eval_jaxpr",
        "custom_jvp_call",
        "custom_vjp_call",
        "remat2",
        "checkpoint",
    }
)
_REMAT = frozenset({"remat2", "checkpoint"})

_MANUAL = frozenset({"shard_map", "xla_pmap", "pmap"})

SAY_ONLY_WHERE = frozenset({"sharding_constraint", "reshard"})
"""Primitives that compute nothing and say where their operand shall lie."""

_TRACER_HELP = (
    "The function closes over a value of an outer transformation (jit, grad, vmap, scan, …), which has no value of its "
    "own. Pass it as an argument, or call the function outside of that transformation."
)


@dataclass(frozen=True)
class _Place:
    """Where the equations being inlined stand: names stack so far, and the traceback of the call around them.

    That traceback counts where an equation's own, which JAX cuts off at the enclosing ``jit``, holds none of the user's
    frames.
    """

    names: Any = None
    traceback: Any = None

    def source_info(self, info: Any) -> Any:
        """Source information of an equation here."""
        if self.names is None and self.traceback is None:
            return info
        names = info.name_stack if self.names is None else self.names + info.name_stack
        outer = self.traceback
        if outer is not None and _compat.has_user_frame(info.traceback):
            outer = None
        return info.replace(name_stack=names, traceback=outer)

    def inside(self, equation: Any, scope: str | None = None) -> _Place:
        """The place of the equations of a body of ``equation``."""
        info = self.source_info(equation.source_info)
        names = info.name_stack if scope is None else info.name_stack.extend(scope)
        return _Place(names if len(names) else None, info.traceback)


@dataclass
class _Scope:
    """One flat jaxpr in the making, and the arrays that it closes over (by identity)."""

    equations: list[Any] = field(default_factory=list)
    hoisted: dict[int, tuple[Var, Any]] = field(default_factory=dict)
    done: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict)

    def same_work(self, equation: Any) -> Any | None:
        """An equation of this scope that does the same costly work; if there is none, this one is remembered."""
        name = equation.primitive.name
        if equation.effects or not equation.invars or name in FREE or (name in FUSIBLE and name not in COSTLY):
            return None
        if any(isinstance(var, DropVar) for var in equation.outvars):
            return None
        atoms = ((str(atom.val), str(atom.aval)) if isinstance(atom, Literal) else id(atom) for atom in equation.invars)
        alike = self.done.setdefault((name, *atoms), [])
        for other in alike:
            if str(other.params) == str(equation.params):
                return other
        alike.append(equation)
        return None

    def constant(self, value: Any, aval: Any) -> Any:
        """A literal for a scalar, else the variable of a closed-over array (one per array)."""
        if isinstance(value, _compat.Tracer):
            raise TraceError(_TRACER_HELP)
        if not aval.shape and not _compat.is_key_dtype(aval.dtype):
            return Literal(np.asarray(value), aval)
        if id(value) not in self.hoisted:
            self.hoisted[id(value)] = (Var(aval), value)
        return self.hoisted[id(value)][0]


def inline(closed: Any) -> Any:
    """The flat form of a closed jaxpr (see the module docstring), without dead code.

    Inputs and outputs keep number and order. Scalars closed over become literals, arrays the ``constvars``. Linear in
    the number of equations. Raises TraceError where a constant is a tracer of an outer transformation.
    """
    jaxpr = _compat.jaxpr_of(closed)
    scope = _Scope()
    env: dict[Any, Any] = {var: var for var in jaxpr.invars}
    outs = _inline_jaxpr(scope, closed, env, _Place())
    hoisted = list(scope.hoisted.values())
    constvars = [var for var, _ in hoisted]
    flat = _compat.make_closed_jaxpr([*constvars, *jaxpr.invars], outs, scope.equations, closed)
    keep = [False] * len(constvars) + [True] * len(jaxpr.invars)
    clean, used = _compat.eliminate_dead_code(_compat.jaxpr_of(flat), keep)
    used_consts = [pair for pair, is_used in zip(hoisted, used, strict=False) if is_used]
    return _compat.make_closed_jaxpr(
        jaxpr.invars,
        clean.outvars,
        in_the_order_wanted(clean.eqns, clean.outvars),
        closed,
        constvars=[var for var, _ in used_consts],
        consts=[value for _, value in used_consts],
    )


def _inline_jaxpr(scope: _Scope, closed: Any, env: dict[Any, Any], place: _Place) -> list[Any]:
    """Append the equations of ``closed`` to ``scope``; ``env`` maps its inputs to atoms. Returns its outputs' atoms."""
    jaxpr = _compat.jaxpr_of(closed)
    consts = _compat.consts_of(closed)
    for var, value in zip(jaxpr.constvars, consts, strict=True):
        env[var] = scope.constant(value, var.aval)
    append = scope.equations.append
    for equation in jaxpr.eqns:
        invars = [atom if isinstance(atom, Literal) else env[atom] for atom in equation.invars]
        name = equation.primitive.name
        if name in _CALLS:
            outs = _inline_call(scope, equation, invars, place)
            env.update(zip(equation.outvars, outs, strict=True))
            continue
        if name in _MANUAL:
            file, line = _compat.user_source(equation.replace(source_info=place.source_info(equation.source_info)))
            raise TraceError(
                f"{name} at {file}:{line}: a program for single devices cannot be planned inside another. Write the step "
                "for whole arrays, without jax.shard_map and jax.pmap; the plan cuts them."
            )
        rewrite = _CONTROL_FLOW.get(name)
        params = equation.params
        if rewrite is not None:
            invars, params = rewrite(scope, equation, invars, place)
        outvars = [DropVar(v.aval) if isinstance(v, DropVar) else Var(v.aval) for v in equation.outvars]
        env.update(zip(equation.outvars, outvars, strict=True))
        moved = equation.replace(
            invars=invars,
            outvars=outvars,
            params=params,
            effects=_compat.renamed_effects(equation.effects, env),
            source_info=place.source_info(equation.source_info),
        )
        if rewrite is None and (known := scope.same_work(moved)) is not None:
            env.update(zip(equation.outvars, known.outvars, strict=True))
            continue
        append(moved)
    return [atom if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]


def _inline_call(scope: _Scope, equation: Any, invars: list[Any], place: _Place) -> list[Any]:
    """The equations of a call, a custom derivative, or a ``remat`` region; returns the atoms of its outputs."""
    params = equation.params
    body = params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]
    is_remat = equation.primitive.name in _REMAT
    inner = place.inside(equation, "checkpoint" if is_remat else None)
    if is_remat:
        invars = _barrier(scope, equation, invars, inner)
    invars = _constrain(scope, equation, invars, params.get("in_shardings", ()), place)
    env = dict(zip(_compat.jaxpr_of(body).invars, invars, strict=True))
    outs = _inline_jaxpr(scope, body, env, inner)
    return _constrain(scope, equation, outs, params.get("out_shardings", ()), place)


def _barrier(scope: _Scope, equation: Any, invars: list[Any], place: _Place) -> list[Any]:
    """Guard the inputs of a region against common subexpression elimination, exactly where JAX's lowering does."""
    wanted = equation.params["prevent_cse"]
    guarded = wanted if isinstance(wanted, tuple) else (wanted,) * len(invars)
    variables = [atom for atom, guard in zip(invars, guarded, strict=True) if guard and not isinstance(atom, Literal)]
    if not equation.params["differentiated"] or not variables:
        return invars
    distinct = list(dict.fromkeys(variables))
    fresh = {var: Var(var.aval) for var in distinct}
    scope.equations.append(
        equation.replace(
            invars=distinct,
            outvars=list(fresh.values()),
            primitive=_compat.optimization_barrier_primitive(),
            params={},
            effects=frozenset(),
            source_info=equation.source_info.replace(name_stack=place.names, traceback=place.traceback),
        )
    )
    return [
        fresh[atom] if guard and not isinstance(atom, Literal) else atom
        for atom, guard in zip(invars, guarded, strict=True)
    ]


def _constrain(scope: _Scope, equation: Any, atoms: list[Any], shardings: Sequence[Any], place: _Place) -> list[Any]:
    """Say a user's shardings of an inner ``jit`` as constraints; those not given say nothing."""
    if not any(isinstance(sharding, jax.sharding.NamedSharding) for sharding in shardings):
        return atoms
    constrained = list(atoms)
    here = equation.replace(source_info=place.source_info(equation.source_info))
    for position, sharding in enumerate(shardings):
        atom = atoms[position]
        if isinstance(sharding, jax.sharding.NamedSharding) and not isinstance(atom, Literal):
            constrained[position] = Var(atom.aval)
            scope.equations.append(_compat.sharding_constraint_equation(atom, constrained[position], sharding, here))
    return constrained


# ------------------------------------------------------------------------------------------- loops and branches


@dataclass(frozen=True)
class _Body:
    """A flat loop or branch body whose closed-over arrays wait for their operands."""

    original: Any
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    equations: tuple[Any, ...]
    hoisted: dict[int, tuple[Var, Any]]

    def close(self, position: int, extra: Sequence[tuple[int, Any]]) -> Any:
        """The closed body with inputs for the arrays ``extra`` (identity, aval) put in at ``position``."""
        added = [self.hoisted[key][0] if key in self.hoisted else Var(aval) for key, aval in extra]
        invars = [*self.invars[:position], *added, *self.invars[position:]]
        flat = _compat.make_closed_jaxpr(invars, self.outvars, self.equations, self.original)
        clean, _ = _compat.eliminate_dead_code(_compat.jaxpr_of(flat), [True] * len(invars))
        equations = in_the_order_wanted(clean.eqns, clean.outvars)
        return _compat.make_closed_jaxpr(invars, clean.outvars, equations, self.original)


def _flatten_body(equation: Any, closed: Any, place: _Place) -> _Body:
    inner = place.inside(equation)
    jaxpr = _compat.jaxpr_of(closed)
    scope = _Scope()
    invars = tuple(Var(var.aval) for var in jaxpr.invars)
    outs = _inline_jaxpr(scope, closed, dict(zip(jaxpr.invars, invars, strict=True)), inner)
    return _Body(closed, invars, tuple(outs), tuple(scope.equations), scope.hoisted)


def _operands(scope: _Scope, *bodies: _Body) -> tuple[list[tuple[int, Any]], list[Any]]:
    """The arrays that the bodies close over (identity, aval), once each, and their atoms in the enclosing scope."""
    hoisted = {key: pair for body in bodies for key, pair in body.hoisted.items()}
    extra = [(key, var.aval) for key, (var, _) in hoisted.items()]
    return extra, [scope.constant(value, var.aval) for var, value in hoisted.values()]


def _scan(scope: _Scope, equation: Any, invars: list[Any], place: _Place) -> tuple[list[Any], dict[str, Any]]:
    num_consts, _ = _compat.scan_arity(equation.params)
    body = _flatten_body(equation, equation.params["jaxpr"], place)
    extra, atoms = _operands(scope, body)
    params = _compat.with_scan_body(equation.params, body.close(num_consts, extra), num_consts + len(extra))
    return [*invars[:num_consts], *atoms, *invars[num_consts:]], params


def _while(scope: _Scope, equation: Any, invars: list[Any], place: _Place) -> tuple[list[Any], dict[str, Any]]:
    params = equation.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond = _flatten_body(equation, params["cond_jaxpr"], place)
    body = _flatten_body(equation, params["body_jaxpr"], place)
    cond_extra, cond_atoms = _operands(scope, cond)
    body_extra, body_atoms = _operands(scope, body)
    middle = num_cond + num_body
    operands = [*invars[:num_cond], *cond_atoms, *invars[num_cond:middle], *body_atoms, *invars[middle:]]
    return operands, dict(
        params,
        cond_jaxpr=cond.close(num_cond, cond_extra),
        body_jaxpr=body.close(num_body, body_extra),
        cond_nconsts=num_cond + len(cond_extra),
        body_nconsts=num_body + len(body_extra),
    )


def _cond(scope: _Scope, equation: Any, invars: list[Any], place: _Place) -> tuple[list[Any], dict[str, Any]]:
    branches = [_flatten_body(equation, branch, place) for branch in equation.params["branches"]]
    extra, atoms = _operands(scope, *branches)
    closed = tuple(branch.close(len(branch.invars), extra) for branch in branches)
    return [*invars, *atoms], dict(equation.params, branches=closed)


_CONTROL_FLOW = {"scan": _scan, "while": _while, "cond": _cond}
