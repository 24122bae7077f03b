"""Which layouts do the user's constraints leave, and on which meshes?

A constraint is a pattern over the paths of the arguments' leaves and a ``PartitionSpec`` in the names of our mesh axes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec

from autopar.cluster import AXIS_NAMES, Mesh
from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.intra_op.restrict import Restriction
from autopar.methods import IntraOp, Method
from autopar.plan import Layout
from autopar.subjects import Demands
from autopar.user_shardings import HOW_TO_IGNORE, UserDemands
from autopar.wording import slashed


def meshes_of_user(meshes: tuple[Mesh, ...], user: UserDemands, method: Method) -> tuple[Mesh, ...]:
    """Meshes that the user's shardings leave; the free method takes any, a hand-made one has its own."""
    if user.meshes is None:
        return meshes
    if isinstance(method, IntraOp):
        return user.meshes
    common = tuple(mesh for mesh in meshes if mesh in user.meshes)
    if not common:
        said = " or ".join(map(str, user.meshes))
        raise PlanError(
            f"method={method.name!r} cannot use the mesh {said} of the shardings in the code, its own are "
            f'{" or ".join(map(str, meshes))}; use method="auto", {HOW_TO_IGNORE}'
        )
    return common


def meshes_with_names(meshes: tuple[Mesh, ...], constraints: Mapping[str, PartitionSpec]) -> tuple[Mesh, ...]:
    """Meshes that have every axis that the constraints name.

    The names of axes are ours to give, so a user's name may stand for either axis of a mesh; the ordered
    factorisations cover both, for in each the sizes are exchanged.
    """
    named = {axis for spec in constraints.values() for entry in spec for axis in _axes_of(entry)}
    fitting = tuple(mesh for mesh in meshes if named <= set(mesh.axis_names))
    if not fitting:
        raise PlanError(
            f"the constraints name the mesh axes {sorted(named)}, but the meshes of this method have "
            f"{sorted({name for mesh in meshes for name in mesh.axis_names})}"
        )
    return fitting


def without_axes_of_one(demands: Demands) -> dict[str, PartitionSpec]:
    """The constraints without the axes that the demanded mesh shape gives size 1, which cut nothing and are left out."""
    shape = demands.mesh_shape or ()
    ones = {name for name, size in zip(AXIS_NAMES, shape, strict=False) if size == 1}

    def rest(entry: Any) -> Any:
        return tuple(axis for axis in _axes_of(entry) if axis not in ones) or None

    return {
        pattern: PartitionSpec(*map(rest, spec))
        if ones & {axis for entry in spec for axis in _axes_of(entry)}
        else spec
        for pattern, spec in demands.constraints.items()
    }


def _axes_of(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@dataclass(frozen=True)
class Leaves:
    """What constraints may speak of in a program: paths of input values, and which of these are cut into microbatches.

    Of the latter the leading dimension counts the microbatches, and constraints speak of the others.
    """

    graph: Graph
    names: Mapping[int, str]
    folded: frozenset[int] = frozenset()


def check_patterns(constraints: Mapping[str, PartitionSpec], paths: Sequence[str]) -> None:
    """Refuse a pattern that matches none of the paths, with the names that come close."""
    for pattern in constraints:
        if not any(path_matches(pattern, path) for path in paths):
            raise PlanError(_no_match(pattern, paths))


def with_constraints(
    restriction: Restriction, leaves: Leaves, constraints: Mapping[str, PartitionSpec], mesh: Mesh
) -> Restriction:
    """The restriction, and what the constraints say of the leaves that are there."""
    pinned = dict(restriction.pinned)
    names = leaves.names
    for pattern, spec in constraints.items():
        for value in [value for value, path in names.items() if path_matches(pattern, path)]:
            folded = 1 if value in leaves.folded else 0
            rank = len(leaves.graph.values[value].shape) - folded
            if len(spec) > rank:
                raise PlanError(
                    f"constraint {pattern!r}: {spec} has more entries than {names[value]} has dimensions ({rank})"
                )
            layout = _layout_of(pattern, spec, rank, mesh)
            layout = Layout(((),) * folded + layout.dims)
            if pinned.get(value, layout) != layout:
                raise PlanError(
                    f"constraint {pattern!r} wants {names[value]} as {layout}, which collides with {pinned[value]} "
                    "that another constraint or the method demands"
                )
            pinned[value] = layout
    return replace(restriction, pinned=pinned, names=names)


def _layout_of(pattern: str, spec: PartitionSpec, rank: int, mesh: Mesh) -> Layout:
    """The layout that a spec of at most ``rank`` entries says, refused where no layout can say the same."""
    entries = [_axes_of(entry) for entry in spec] + [()] * (rank - len(spec))
    said = [axis for axes in entries for axis in axes]
    twice = sorted({axis for axis in said if said.count(axis) > 1})
    if twice:
        raise PlanError(
            f"constraint {pattern!r}: {spec} names the mesh axis {twice[0]!r} twice; an axis cuts one dimension"
        )
    for axes in entries:
        in_order = tuple(name for name in mesh.axis_names if name in axes)
        if axes != in_order:
            raise PlanError(
                f"constraint {pattern!r}: {spec} cuts a dimension by {axes}; axes of one dimension stand in the "
                f"order of the mesh, major to minor: write {in_order}"
            )
    return Layout(tuple(entries))


def _no_match(pattern: str, paths: Any) -> str:
    import difflib

    leaves = [slashed(path) for path in paths]
    close = difflib.get_close_matches(pattern.replace("*", ""), leaves, n=3, cutoff=0.3) or leaves[:3]
    return f"constraint {pattern!r} matches no argument leaf; leaves are named like {', '.join(close)}"


def path_matches(pattern: str, path: str) -> bool:
    """Whether a leaf path matches a glob: ``*`` within a name, ``**`` over any number of names.

    A piece of a leaf (``params['kernel'][0:2]``) matches where the leaf does.
    """
    path = re.sub(r"\[(:, )*\d+:\d+\]$", "", path)
    expression = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    return re.fullmatch(expression, slashed(path)) is not None
