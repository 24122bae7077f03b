"""What is each input for: state, batch, key, or something else?

A training step is a function (state, batch) ↦ (state′, metrics) in disguise.  The disguise is taken off by structure:

* *State* is what comes back: a subtree A of the arguments and a subtree B of the result with

      { (path below A, shape, dtype) } = { (path below B, shape, dtype) }

  Largest subtrees are matched first. Paths are compared, not tree structures, so a train state matches although its
  optimizer object differs. Where several subtrees fit (parameters and their average, or their gradients), and always
  for a lone array, the arithmetic decides: new state is made from old state *elementwise*.
* *Keys* are typed PRNG keys, and raw ``uint32`` arrays that flow into random bits.
* *Batch* is the rest that agrees on one leading size greater than 1. An argument whose leaves disagree among
  themselves (the parameters of an evaluation step) is no batch; arguments that disagree with each other are an error.

The caller may say either explicitly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from autopar import _compat
from autopar._compat import Literal
from autopar.errors import TraceError
from autopar.graph.tracing import Keys, TracedProgram

ArgumentNames = int | str | Iterable[int | str] | None


class Role(Enum):
    """What an input leaf is for."""

    STATE = "state"
    BATCH = "batch"
    KEY = "key"
    OTHER = "other"
    HIDDEN = "hidden"


@dataclass(frozen=True)
class Roles:
    """The role of each input, hidden ones included, in the order of the program's inputs.

    ``state_pairs`` are (input, output) positions of state leaves that are one and the same array before and after a
    step. ``batch_size`` is the leading size of the batch leaves, ``None`` where there are none.
    """

    roles: tuple[Role, ...]
    state_pairs: tuple[tuple[int, int], ...]
    batch_size: int | None

    def leaves(self, role: Role) -> tuple[int, ...]:
        """Positions of the inputs with this role."""
        return tuple(i for i, own in enumerate(self.roles) if own is role)


def infer_roles(
    program: TracedProgram, *, batch_argnums: ArgumentNames = None, state_argnums: ArgumentNames = None
) -> Roles:
    """Roles of the inputs of a program (see the module docstring).

    ``batch_argnums`` and ``state_argnums`` name arguments by position among those that are not static, or by name.
    Raises TraceError, naming leaves and shapes, where the batch is ambiguous, where the arguments of ``batch_argnums``
    disagree, or where those of ``state_argnums`` do not come back.
    """
    said_batch = _argument_names(program, batch_argnums, "batch_argnums")
    said_state = _argument_names(program, state_argnums, "state_argnums")
    visible = range(program.num_visible)
    keys = _key_leaves(program)
    candidates = [i for i in visible if program.in_keys[i][0] not in said_batch]
    matched = _match_state(program, candidates, said_state, keys)
    pairs = [pair for before, after in matched for pair in zip(before.leaves, after.leaves, strict=True)]
    state = {i for i, _ in pairs}
    missing = [i for i in visible if program.in_keys[i][0] in said_state and i not in state]
    if missing:
        raise TraceError(
            f"state_argnums names arguments that do not come back with the same shapes: {_describe(program, missing)}. "
            "Return their new values, or leave them out of state_argnums."
        )
    rest = [i for i in visible if i not in state and i not in keys and program.in_avals[i].shape]
    if batch_argnums is not None:
        batch = _said_batch(program, [i for i in rest if program.in_keys[i][0] in said_batch])
    else:
        batch = _agreeing_batch(program, rest, {node.signature for node, _ in matched})
    sizes = {program.in_avals[i].shape[0] for i in batch}

    def role(position: int) -> Role:
        if position >= program.num_visible:
            return Role.HIDDEN
        if position in state:
            return Role.STATE
        if position in keys:
            return Role.KEY
        return Role.BATCH if position in batch else Role.OTHER

    roles = tuple(role(i) for i in range(len(program.in_keys)))
    return Roles(roles, tuple(sorted(pairs)), sizes.pop() if sizes else None)


def _argument_names(program: TracedProgram, said: ArgumentNames, option: str) -> set[str]:
    if said is None:
        return set()
    names = []
    for item in (said,) if isinstance(said, (int, str)) else said:
        known = program.argument_names
        if isinstance(item, str) and item in known:
            names.append(item)
        elif isinstance(item, int) and -len(known) <= item < len(known):
            names.append(known[item])
        else:
            raise TraceError(f"{option} names {item!r}, but the arguments are {', '.join(known) or 'none'}.")
    return set(names)


def _describe(program: TracedProgram, positions: Sequence[int], limit: int = 12) -> str:
    shown = [f"{program.in_paths[i]}: {program.in_avals[i].str_short()}" for i in positions[:limit]]
    more = len(positions) - limit
    return ", ".join(shown) + (f", and {more} more" if more > 0 else "")


# --------------------------------------------------------------------------------------------------------- state


@dataclass(frozen=True, eq=False)
class _Node:
    """A subtree: where it hangs, its leaves' positions, and (path below, shape, dtype) of each, in path order."""

    keys: Keys
    leaves: tuple[int, ...]
    signature: tuple[tuple[Keys, tuple[int, ...], str], ...]


def _nodes(keys: Sequence[Keys], avals: Sequence[Any], positions: Iterable[int]) -> list[_Node]:
    """Every subtree over the leaves ``positions``, all of them too, largest first, shallower first, then in order."""
    below: dict[Keys, list[int]] = defaultdict(list)
    kinds: dict[int, tuple[tuple[int, ...], str]] = {}
    for position in positions:
        path = keys[position]
        kinds[position] = (tuple(avals[position].shape), _compat.dtype_name(avals[position].dtype))
        for depth in range(len(path) + 1):
            below[path[:depth]].append(position)
    nodes = []
    for prefix, leaves in below.items():
        signed = sorted(((keys[i][len(prefix) :], *kinds[i]), i) for i in leaves)
        nodes.append(_Node(prefix, tuple(i for _, i in signed), tuple(text for text, _ in signed)))
    return sorted(nodes, key=lambda node: (-len(node.leaves), len(node.keys), min(node.leaves)))


def _match_state(
    program: TracedProgram, candidates: Sequence[int], said_state: set[str], keys: set[int]
) -> list[tuple[_Node, _Node]]:
    """Pairs of argument and result subtrees that are one state before and after the step."""
    evidence = _Evidence(program, said_state, keys)
    results: dict[Any, list[_Node]] = defaultdict(list)
    for node in _nodes(program.out_keys, program.out_avals, range(len(program.out_keys))):
        results[node.signature].append(node)
    groups: dict[Any, list[_Node]] = defaultdict(list)
    for node in _nodes(program.in_keys, program.in_avals, candidates):
        if node.keys and node.signature in results:  # all arguments together are none
            groups[node.signature].append(node)

    matched: list[tuple[_Node, _Node]] = []
    taken_in: set[int] = set()
    taken_out: set[int] = set()
    for signature, group in groups.items():  # a subtree of a matched subtree comes later, and finds itself taken
        open_nodes = [node for node in group if node.leaves[0] not in taken_in]
        viable = {node: [out for out in results[signature] if evidence.allows(node, out)] for node in open_nodes}
        for node in sorted(open_nodes, key=lambda node: len(viable[node])):  # those without a choice choose first
            free = [out for out in viable[node] if out.leaves[0] not in taken_out]
            if free:
                best = max(free, key=lambda out: evidence.strength(node, out))
                matched.append((node, best))
                taken_in.update(node.leaves)
                taken_out.update(best.leaves)
    return matched


class _Evidence:
    """What the arithmetic says about a pair of equal subtrees: is one the other's next value?"""

    def __init__(self, program: TracedProgram, said_state: set[str], keys: set[int]) -> None:
        jaxpr = _compat.jaxpr_of(program.jaxpr)
        self._program = program
        self._jaxpr = jaxpr
        self._said = said_state
        self._keys = keys
        sources = [1 << i for i in range(len(jaxpr.invars))]
        self._same_shape = _flow(jaxpr, sources, _Through.SAME_SHAPE)
        self._no_contraction = _flow(jaxpr, sources, _Through.NO_CONTRACTION)
        self._any = _flow(jaxpr, sources, _Through.ANY)

    def allows(self, before: _Node, after: _Node) -> bool:
        """Whether ``after`` may be the next value of ``before``.

        A lone array must lead to its next value through operations that keep its shape; a scalar that is only passed
        through is a setting, and a lone key is a key. To most of a larger result some leaf must lead without a contraction
        (a gradient is made of contractions), unless the result owes the subtree nothing at all, as in a reset.
        """
        if before.keys[0] in self._said:
            return True
        pairs = list(zip(before.leaves, after.leaves, strict=True))
        if len(pairs) == 1:
            ((i, o),) = pairs
            passed = not self._program.in_avals[i].shape and self._jaxpr.outvars[o] is self._jaxpr.invars[i]
            return i not in self._keys and not passed and bool(self._same_shape[o] >> i & 1)
        own = sum(1 << i for i in before.leaves)
        # Some leaf, not each its own: parameters in half precision are made of their masters, which lie beside them.
        linked = sum(bool(self._no_contraction[o] & own) for _, o in pairs)
        if 2 * linked > len(pairs):
            return True
        return not any(self._any[o] & own for o in after.leaves)

    def strength(self, before: _Node, after: _Node) -> tuple[bool, int, int]:
        """Order of preference among several: the same last name, more leaves updated in place, the earlier."""
        same_name = bool(after.keys) and before.keys[-1].strip("[]'.\"") == after.keys[-1].strip("[]'.\"")
        in_place = sum(self._same_shape[o] >> i & 1 for i, o in zip(before.leaves, after.leaves, strict=True))
        return same_name, in_place, -min(after.leaves)


# ---------------------------------------------------------------------------------------------------- data flow


class _Through(Enum):
    """Which operations carry an influence on."""

    SAME_SHAPE = "those with a result of the operand's shape, contractions excepted"
    NO_CONTRACTION = "all but contractions"
    ANY = "all"


_CONTRACTIONS = frozenset(
    {
        "dot_general",
        "conv_general_dilated",
        "ragged_dot",
        "ragged_dot_general",
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "argmax",
        "argmin",
        "triangular_solve",
    }
)


def _flow(jaxpr: Any, sources: Sequence[int], through: _Through) -> list[int]:
    """For each output the set, as a bit mask, of sources that reach it; ``sources`` are masks of the inputs."""
    masks: dict[Any, int] = dict(zip((*jaxpr.constvars, *jaxpr.invars), sources, strict=True))
    for equation in jaxpr.eqns:
        operands = [0 if isinstance(atom, Literal) else masks.get(atom, 0) for atom in equation.invars]
        if not any(operands):
            continue
        masks.update(zip(equation.outvars, _flow_equation(equation, operands, through), strict=True))
    return [0 if isinstance(atom, Literal) else masks.get(atom, 0) for atom in jaxpr.outvars]


def _flow_equation(equation: Any, operands: list[int], through: _Through) -> list[int]:
    name = equation.primitive.name
    if name in ("scan", "while"):
        return _flow_loop(equation, operands, through)
    if name == "cond":
        branches = [_flow(_compat.jaxpr_of(b), operands[1:], through) for b in equation.params["branches"]]
        return [_union(masks) for masks in zip(*branches, strict=True)]
    if name == "optimization_barrier":
        return operands
    if through is not _Through.ANY and name in _CONTRACTIONS:
        return [0] * len(equation.outvars)
    if through is not _Through.SAME_SHAPE:
        return [_union(operands)] * len(equation.outvars)
    shapes = [atom.aval.shape if hasattr(atom.aval, "shape") else None for atom in equation.invars]
    return [
        _union(m for m, shape in zip(operands, shapes, strict=True) if shape == getattr(var.aval, "shape", ()))
        for var in equation.outvars
    ]


def _flow_loop(equation: Any, operands: list[int], through: _Through) -> list[int]:
    """Two passes through the body: what is carried out of the first enters the second."""
    if equation.primitive.name == "scan":
        body = _compat.jaxpr_of(equation.params["jaxpr"])
        num_consts, num_carry = _compat.scan_arity(equation.params)
        inputs = list(operands)
    else:
        body = _compat.jaxpr_of(equation.params["body_jaxpr"])
        num_consts = equation.params["body_nconsts"]
        inputs = operands[equation.params["cond_nconsts"] :]
        num_carry = len(inputs) - num_consts
    carried = slice(num_consts, num_consts + num_carry)
    once = _flow(body, inputs, through)
    inputs[carried] = [a | b for a, b in zip(inputs[carried], once, strict=False)]
    twice = _flow(body, inputs, through)
    return [*(a | b for a, b in zip(inputs[carried], twice, strict=False)), *twice[num_carry:]]


def _union(masks: Iterable[int]) -> int:
    total = 0
    for mask in masks:
        total |= mask
    return total


# ---------------------------------------------------------------------------------------------------------- keys

_RANDOM = frozenset({"random_wrap", "random_bits", "threefry2x32", "rng_bit_generator"})
_MOVES = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "slice",
        "dynamic_slice",
        "gather",
        "broadcast_in_dim",
        "transpose",
        "concatenate",
        "copy",
        "select_n",
        "optimization_barrier",
    }
)


def _key_leaves(program: TracedProgram) -> set[int]:
    """Visible inputs that are typed keys, or raw ``uint32`` keys on their way to random bits."""
    jaxpr = _compat.jaxpr_of(program.jaxpr)
    used = _feeds_random(jaxpr, [False] * len(jaxpr.outvars))
    found = set()
    for position in range(program.num_visible):
        aval = program.in_avals[position]
        if _compat.is_key_dtype(aval.dtype) or (used[position] and aval.shape and aval.dtype == np.uint32):
            found.add(position)
    return found


def _feeds_random(jaxpr: Any, wanted_outputs: Sequence[bool]) -> list[bool]:
    """Which inputs are moved, without arithmetic, into an operation that makes random bits (or a wanted output)."""
    atoms = zip(jaxpr.outvars, wanted_outputs, strict=True)
    wanted = {atom for atom, is_wanted in atoms if is_wanted and not isinstance(atom, Literal)}
    for equation in reversed(jaxpr.eqns):
        name = equation.primitive.name
        outs = [var in wanted for var in equation.outvars]
        if name in _RANDOM:
            used = [True] * len(equation.invars)
        elif name in ("scan", "while", "cond"):
            used = _random_operands(equation, outs)
        elif name in _MOVES and any(outs):
            used = [True] * len(equation.invars)
        else:
            continue
        wanted.update(
            atom
            for atom, is_used in zip(equation.invars, used, strict=True)
            if is_used and not isinstance(atom, Literal)
        )
    return [var in wanted for var in (*jaxpr.constvars, *jaxpr.invars)]


def _random_operands(equation: Any, outs: list[bool]) -> list[bool]:
    params = equation.params
    if equation.primitive.name == "scan":
        return _feeds_random(_compat.jaxpr_of(params["jaxpr"]), outs)
    if equation.primitive.name == "cond":
        branches = [_feeds_random(_compat.jaxpr_of(branch), outs) for branch in params["branches"]]
        return [False, *(any(column) for column in zip(*branches, strict=True))]
    num_cond = params["cond_nconsts"]
    return [False] * num_cond + _feeds_random(_compat.jaxpr_of(params["body_jaxpr"]), outs)


# --------------------------------------------------------------------------------------------------------- batch


def _said_batch(program: TracedProgram, leaves: Sequence[int]) -> set[int]:
    """The ranked leaves of the arguments that the caller calls the batch; they must agree."""
    ranked = [i for i in leaves if program.in_avals[i].shape[0] > 1] or list(leaves)
    if len({program.in_avals[i].shape[0] for i in ranked}) > 1:
        raise TraceError(
            f"The arguments of batch_argnums differ in their leading size: {_describe(program, ranked)}. Name only "
            "those that hold one example per row."
        )
    return set(ranked)


def _agreeing_batch(program: TracedProgram, rest: Sequence[int], state: set[Any]) -> set[int]:
    """The leaves of the arguments whose leaves share one leading size; subtrees shaped like state are left out."""
    by_argument: dict[str, list[int]] = defaultdict(list)
    for position in rest:
        if program.in_avals[position].shape[0] > 1:
            by_argument[program.in_keys[position][0]].append(position)
    roots = {node.keys[0]: node for node in _nodes(program.in_keys, program.in_avals, rest) if len(node.keys) == 1}
    groups = {
        name: leaves for name, leaves in by_argument.items() if len(leaves) == 1 or roots[name].signature not in state
    }

    def sizes(leaves: Iterable[int]) -> set[int]:
        return {program.in_avals[i].shape[0] for i in leaves}

    agreeing = [i for leaves in groups.values() if len(sizes(leaves)) == 1 for i in leaves]
    doubtful = agreeing or [i for leaves in groups.values() for i in leaves]
    if len(sizes(doubtful)) > 1:
        raise TraceError(
            f"Which inputs hold the batch? These neither come back as state nor agree on a leading size: "
            f"{_describe(program, doubtful)}. Say batch_argnums=… (positions or names of arguments; () for none)."
        )
    return set(agreeing)
