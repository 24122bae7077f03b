"""Which layouts does the user's own code ask for?

A *wish* says of one array a(i₁, …, iᵣ) which mesh axes cut each of its dimensions; it is read from

    code     ``with_sharding_constraint`` and what ends in its primitive: shardings of an inner ``jit``, Linen's boxes
             under a mesh, transposed constraints in the backward pass, at any depth of loops and branches
    names    Linen's ``Partitioned`` boxes and the metadata of NNX variables around leaves of the arguments
    placed   arguments that were committed to several devices before

Nothing is decided here: whether a wish can be met depends on a mesh, and that on the hardware.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves, tree_unflatten

from autopar import _compat
from autopar.graph.inline import SAY_ONLY_WHERE
from autopar.graph.ir import Graph, Operator
from autopar.graph.tracing import Call

Entry = tuple[str, ...] | None
"""Axes that cut a dimension, major to minor; None: anything may."""

Axes = tuple[tuple[str, int], ...]
"""A user's mesh: names and sizes."""


class Origin(Enum):
    """Where a wish was found."""

    CODE = "code"
    NAMES = "names"
    PLACED = "placed"


@dataclass(frozen=True)
class Wish:
    """Value ``value`` shall be cut by ``entries`` (dimensions beyond them are whole) on the user's mesh, if known.

    ``place`` is where it was said: ``model.py:12``, or the path of a leaf. ``source`` is the value that a constraint in
    the code was put on (an input that it is put on directly is told so).
    """

    value: int
    entries: tuple[Entry, ...]
    mesh: Axes | None
    origin: Origin
    place: str
    source: int | None = None

    @property
    def text(self) -> str:
        """What counts for the identity of a program, the same in every process."""
        return f"{self.value} {self.entries} {self.mesh} {self.origin.value}"

    @property
    def said(self) -> str:
        """The entries like a PartitionSpec."""
        parts = ["UNCONSTRAINED" if entry is None else _entry_text(entry) for entry in self.entries]
        return f"P({', '.join(parts)})"


def _entry_text(entry: tuple[str, ...]) -> str:
    return repr(entry if len(entry) > 1 else entry[0] if entry else None)


@dataclass(frozen=True)
class LeafWish:
    """The wish of one leaf of the arguments, before its value has a number."""

    entries: tuple[Entry, ...]
    mesh: Axes | None


@dataclass(frozen=True)
class LeafWishes:
    """What the arguments of a call say: by path of the leaf. ``ambient`` is the mesh in scope, if any."""

    names: Mapping[str, LeafWish]
    placed: Mapping[str, LeafWish]
    ambient: Axes | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wishes:
    """All that the user's code says of one program."""

    wishes: tuple[Wish, ...] = ()
    ambient: Axes | None = None
    notes: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """What counts for the identity of the program: not where arrays happen to lie, nor where things were said."""
        scope = () if self.ambient is None else (f"mesh {self.ambient}",)
        return (*scope, *(wish.text for wish in self.wishes if wish.origin is not Origin.PLACED))


def wishes_of(graph: Graph, paths: Sequence[str], state: Sequence[int], leaves: LeafWishes) -> Wishes:
    """Wishes in the program and on its inputs; ``paths`` are those of the inputs, ``state`` positions of state leaves.

    Arrays count as placed only where they are state: a batch is made anew for each step.
    """
    found: list[Wish] = []
    notes = list(leaves.notes)
    for operator, _ in graph.all_operators():
        if operator.primitive in SAY_ONLY_WHERE:
            _read_constraint(operator, len(operator.equation.outvars[0].aval.shape), found, notes)
    for position, path in enumerate(paths):
        value = graph.inputs[position]
        if not graph.values[value].shape:
            continue
        if (named := leaves.names.get(path)) is not None:
            found.append(Wish(value, named.entries, named.mesh, Origin.NAMES, path))
        if position in state and (placed := leaves.placed.get(path)) is not None:
            found.append(Wish(value, placed.entries, placed.mesh, Origin.PLACED, path))
    named_only = any(wish.origin is Origin.NAMES for wish in found)
    return Wishes(tuple(found), leaves.ambient if named_only else None, tuple(notes))


def _read_constraint(operator: Operator, rank: int, found: list[Wish], notes: list[str]) -> None:
    if not rank:
        return
    params = operator.equation.params
    sharding = params.get("sharding", params.get("dst_sharding"))
    if not isinstance(sharding, NamedSharding):
        notes.append(
            f"The constraint at {operator.source} is a {type(sharding).__name__}, which names no mesh axes; it was not "
            "kept. Say it as a NamedSharding."
        )
        return
    free = params.get("unconstrained_dims", frozenset())
    entries = [*entries_of(sharding.spec), *[()] * (rank - len(sharding.spec))]
    wanted = tuple(None if dim in free else entry for dim, entry in enumerate(entries))
    mesh = axes_of_mesh(sharding.mesh)
    found.append(
        Wish(operator.results[0], wanted, mesh, Origin.CODE, str(operator.source), source=operator.operands[0])
    )


def entries_of(spec: Iterable[Any]) -> tuple[Entry, ...]:
    """Entries of a PartitionSpec or of a tuple of names."""
    return tuple(
        None
        if entry is PartitionSpec.UNCONSTRAINED
        else ()
        if entry is None
        else (entry,)
        if isinstance(entry, str)
        else tuple(entry)
        for entry in spec
    )


def axes_of_mesh(mesh: Any) -> Axes | None:
    """Names and sizes of the axes of a JAX mesh, concrete or abstract; None for no mesh."""
    if mesh is None or not mesh.axis_names:
        return None
    return tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


# ------------------------------------------------------------------------------------------------- the arguments


def leaf_wishes(call: Call) -> LeafWishes:
    """What the arguments of a call say, by box, by metadata, or by lying somewhere; rules of names are those in scope.

    Linear in the number of leaves. Shapes with a ``sharding`` count as arrays that lie there.
    """
    names, notes = names_on(call)
    placed = {
        path: wish
        for leaf, path in zip(call.leaves, call.paths, strict=True)
        if (wish := _of_placement(leaf)) is not None
    }
    ambient = axes_of_mesh(_compat.ambient_mesh()) if names else None
    return LeafWishes(names, placed, ambient, notes)


def names_on(call: Call) -> tuple[dict[str, LeafWish], tuple[str, ...]]:
    """What names on the arguments say, by path, and notes on those that say nothing."""
    names: dict[str, LeafWish] = {}
    notes: list[str] = []
    for number, box in _boxes(call):
        wish = _of_box(box, call.paths[number], notes)
        if wish is not None:
            names[call.paths[number]] = wish
    return names, tuple(notes)


def _boxes(call: Call) -> list[tuple[int, Any]]:
    """Boxes around exactly one leaf of the arguments, each with the leaf's number."""
    kinds = _box_kinds()
    if not kinds:
        return []
    arguments = tree_unflatten(call.tree, call.leaves)
    found, number = [], 0
    for node in tree_leaves(arguments, is_leaf=lambda node: isinstance(node, kinds)):
        count = len(tree_leaves(node)) if isinstance(node, kinds) else 1
        if count == 1 and isinstance(node, kinds):
            found.append((number, node))
        number += count
    return found


def _box_kinds() -> tuple[type, ...]:
    """Flax's classes that carry names, as far as Flax is in use."""
    linen, nnx = sys.modules.get("flax.core.meta"), sys.modules.get("flax.nnx")
    return (*((linen.Partitioned,) if linen else ()), *((nnx.Variable,) if nnx else ()))


def _of_box(box: Any, path: str, notes: list[str]) -> LeafWish | None:
    spmd = sys.modules["flax.core.spmd"]
    scope = tuple(spmd.get_logical_axis_rules())
    if isinstance(box, sys.modules["flax.core.meta"].Partitioned):
        mesh = axes_of_mesh(box.mesh)
        if not hasattr(box, "rules"):
            return LeafWish(entries_of(box.names), mesh)
        rules = box.rules or scope
        if not rules:
            notes.append(
                f"The logical names {box.names} of {path} have no rules in scope, so they ask for nothing; call the step "
                "inside nn.logical_axis_rules(…)."
            )
            return None
        return LeafWish(entries_of(sys.modules["flax.linen"].logical_to_mesh_axes(box.names, rules)), mesh)
    metadata = box.get_metadata()
    said = next((metadata[key] for key in ("out_sharding", "sharding_names") if metadata.get(key)), None)
    if isinstance(said, NamedSharding):
        return LeafWish(entries_of(said.spec), axes_of_mesh(said.mesh))
    if not isinstance(said, (tuple, PartitionSpec)):
        return None
    rules = dict(spmd.composite_rules(scope, metadata.get("sharding_rules") or ()))
    mapped = [rules.get(name, name) if isinstance(name, str) else name for name in said]
    return LeafWish(entries_of(mapped), axes_of_mesh(metadata.get("mesh")))


def _of_placement(leaf: Any) -> LeafWish | None:
    """Where an array was put by its owner; one that JAX put somewhere itself says nothing."""
    sharding = getattr(leaf, "sharding", None)
    committed = isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "committed", False)
    if not committed or not isinstance(sharding, NamedSharding) or sharding.mesh.size < 2:
        return None
    return LeafWish(entries_of(sharding.spec), axes_of_mesh(sharding.mesh))
