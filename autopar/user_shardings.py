"""Which meshes and layouts do the user's own shardings leave to the planner?

The wishes that :mod:`autopar.graph.wishes` has found become one mesh, or a few, and for each wish on a mesh M the set

    { layout L of the array on M : axes of L's dimension d = entry d, wherever the wish has one }.

What was said in code, or by names, is kept or refused, because a program that was written for one layout may be wrong
about memory in another.  Where an array lies already is kept if it can be, and noted otherwise: arrays can be moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from autopar.cluster import Cluster, Mesh
from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.graph.wishes import Axes, Entry, Origin, Wish, Wishes
from autopar.intra_op.restrict import Restriction
from autopar.plan import Layout
from autopar.schedule.reshard import divides, layouts_of

MOST_AXES = 3
"""More axes of size 2 and above are not planned for."""

HOW_TO_IGNORE = 'or let the planner choose with user_shardings="ignore"'


class UserShardings(Enum):
    """What becomes of shardings that stand in the user's code."""

    RESPECT = "respect"
    IGNORE = "ignore"


@dataclass(frozen=True)
class UserDemands:
    """What is left of the wishes on one cluster: ``meshes`` to choose from (None: any), the wishes, and notes.

    ``axes`` are the names that exist on the user's mesh, those of size 1 included, which no planned mesh has.
    """

    wishes: tuple[Wish, ...] = ()
    meshes: tuple[Mesh, ...] | None = None
    axes: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def user_demands(
    said: Wishes, graph: Graph, cluster: Cluster, *, mesh_shape: tuple[int, ...] | None, is_free: bool
) -> UserDemands:
    """The user's shardings on a cluster; ``is_free`` where the method lays out as it likes (hand-made ones do not).

    Raises :class:`~autopar.errors.PlanError` when meshes in the code differ, or do not have the cluster's devices, or
    contradict ``mesh_shape``.
    """
    shapes = {value.id: value.shape for value in graph.all_values()}
    notes = list(said.notes)
    wishes = [wish for wish in said.wishes if _has_rank(wish, len(shapes[wish.value]), notes)]
    firm = [wish for wish in wishes if wish.origin is not Origin.PLACED]
    placed = [wish for wish in wishes if wish.origin is Origin.PLACED]
    mesh = _one_mesh(firm, said.ambient)
    if mesh is not None:
        _check_size(mesh, cluster, mesh_shape)
    placed = _kept_placements(placed, mesh[0] if mesh else None, cluster, mesh_shape, is_free, notes)
    axes = mesh[0] if mesh else placed[0].mesh if placed else None
    if axes is not None:
        names, planned = frozenset(name for name, _ in axes), _planned_mesh(axes)
        firm = [_known_names(wish, names, notes) for wish in firm]
        placed = [wish for wish in placed if _can_lie(wish, shapes[wish.value], planned, notes)]
        return UserDemands(_present([*firm, *placed]), (planned,), names, tuple(notes))
    used = tuple(dict.fromkeys(name for wish in firm for entry in wish.entries for name in entry or ()))
    if not firm or len(used) > MOST_AXES:
        if firm:
            notes.append(
                f"The names {', '.join(used)} on the arguments are more than {MOST_AXES} and there is no mesh in scope "
                "that says which of them are axes, so they were not kept; call the step inside jax.set_mesh(mesh)."
            )
        return UserDemands(notes=tuple(notes))
    meshes = _meshes_named(used, cluster) if used else None
    if meshes is not None and mesh_shape is not None:
        sizes = tuple(size for size in mesh_shape if size != 1)
        meshes = tuple(mesh for mesh in meshes if mesh.axis_sizes == (sizes or (1,)))
        if not meshes:
            raise PlanError(
                f"mesh_shape={mesh_shape} has no room for the mesh axes {', '.join(used)} that the names on the "
                f"arguments ask for; leave mesh_shape out, {HOW_TO_IGNORE}"
            )
    return UserDemands(tuple(firm), meshes, frozenset(used), tuple(notes))


def _has_rank(wish: Wish, rank: int, notes: list[str]) -> bool:
    if len(wish.entries) <= rank:
        return True
    notes.append(f"{wish.place} has {rank} dimensions, fewer than its names {wish.said}; they were not kept.")
    return False


def _can_lie(wish: Wish, shape: tuple[int, ...], mesh: Mesh, notes: list[str]) -> bool:
    """Whether an array can stay as it lies; else it is moved, with a note."""
    try:
        layouts_for(wish, shape, mesh)
    except PlanError as error:
        notes.append(f"An array of the state is moved: {error}.")
        return False
    return True


def _one_mesh(firm: list[Wish], ambient: Axes | None) -> tuple[Axes, str] | None:
    """The mesh that code and names speak of, and where."""
    said = [(wish.mesh, wish.place) for wish in firm if wish.mesh is not None]
    if ambient is not None:
        said.append((ambient, "the mesh in scope"))
    if not said:
        return None
    (first, place) = said[0]
    for other, there in said[1:]:
        if _sized(other) != _sized(first):
            raise PlanError(
                f"shardings speak of two meshes, {_mesh_text(first)} at {place} and {_mesh_text(other)} at {there}; a "
                f"step has one mesh: use the same in both places, {HOW_TO_IGNORE}"
            )
    return tuple(dict(axis for mesh, _ in said for axis in mesh).items()), place


def _sized(mesh: Axes) -> Axes:
    return tuple((name, size) for name, size in mesh if size != 1)


def _mesh_text(mesh: Axes) -> str:
    return " × ".join(f"{name}={size}" for name, size in mesh)


def _planned_mesh(mesh: Axes) -> Mesh:
    """The mesh without axes of size 1, along which there is nothing to do."""
    names, sizes = zip(*(_sized(mesh) or mesh[:1]), strict=True)
    return Mesh(names, sizes)


def _fits(mesh: Axes, cluster: Cluster, mesh_shape: tuple[int, ...] | None) -> bool:
    sizes = tuple(size for _, size in _sized(mesh))
    fits_shape = mesh_shape is None or tuple(size for size in mesh_shape if size != 1) == sizes
    return _planned_mesh(mesh).size == cluster.num_devices and len(sizes) <= MOST_AXES and fits_shape


def _check_size(said: tuple[Axes, str], cluster: Cluster, mesh_shape: tuple[int, ...] | None) -> None:
    mesh, place = said
    if _fits(mesh, cluster, mesh_shape):
        return
    count = _planned_mesh(mesh).size
    if count != cluster.num_devices:
        raise PlanError(
            f"the mesh {_mesh_text(mesh)} at {place} has {count} devices, and {cluster.name} has "
            f"{cluster.num_devices}; make the mesh of all of them, or give cluster= with {count} devices, {HOW_TO_IGNORE}"
        )
    if len(_sized(mesh)) > MOST_AXES:
        raise PlanError(
            f"the mesh {_mesh_text(mesh)} at {place} has more than {MOST_AXES} axes of size 2 or more, which is more "
            f"than is planned for; join some of them, {HOW_TO_IGNORE}"
        )
    raise PlanError(
        f"mesh_shape={mesh_shape} contradicts the mesh {_mesh_text(mesh)} at {place}; leave mesh_shape out, "
        f"{HOW_TO_IGNORE}"
    )


def _kept_placements(
    placed: list[Wish],
    mesh: Axes | None,
    cluster: Cluster,
    mesh_shape: tuple[int, ...] | None,
    is_free: bool,
    notes: list[str],
) -> list[Wish]:
    """Placements of arrays if all of them are on one mesh that can be planned on, which is the code's, if it has one."""
    meshes = {_sized(wish.mesh) for wish in placed if wish.mesh is not None}
    if not placed:
        return []
    if not any(entry for wish in placed for entry in wish.entries):
        notes.append(
            "The state lies whole on every device already, which asks for nothing: under jax.set_mesh every new array "
            'lies so. To keep it whole, say constraints={"**": P()} with a pattern for its leaves.'
        )
        return []
    if not is_free:
        why = "the method has its own layouts"
    elif len(meshes) > 1:
        why = "they lie on several meshes"
    elif mesh is not None and meshes != {_sized(mesh)}:
        why = f"the code speaks of the mesh {_mesh_text(mesh)}"
    elif not _fits(next(iter(meshes)), cluster, mesh_shape):
        why = f"their mesh {_mesh_text(next(iter(meshes)))} is not one to plan on here"
    else:
        return placed
    notes.append(f"{len(placed)} arrays of the state lay on several devices already; they are moved, because {why}.")
    return []


def _known_names(wish: Wish, names: frozenset[str], notes: list[str]) -> Wish:
    """The wish without entries whose names are no axes; one of which nothing is left frees every dimension."""
    unknown = {name for entry in wish.entries for name in entry or ()} - names
    if not unknown:
        return wish
    notes.append(
        f"The names {', '.join(sorted(unknown))} on {wish.place} are no axes of the mesh ({', '.join(sorted(names))}), "
        "so they ask for nothing; rules that map them come from nn.logical_axis_rules(…)."
    )
    entries: list[Entry] = [None if entry and unknown & set(entry) else entry for entry in wish.entries]
    if not any(entries):
        return replace(wish, entries=())
    return replace(wish, entries=tuple(entries))


def _present(wishes: list[Wish]) -> tuple[Wish, ...]:
    return tuple(wish for wish in wishes if wish.entries or wish.origin is not Origin.NAMES)


def _meshes_named(names: tuple[str, ...], cluster: Cluster) -> tuple[Mesh, ...]:
    """Meshes whose axes are called as the arguments' names say, first names outermost.

    Where the devices do not factor into as many axes, some names stand for axes of size 1.
    """
    shapes = cluster.logical_mesh_shapes(MOST_AXES)
    usual = tuple(mesh for mesh in shapes if set(names) <= set(mesh.axis_names))
    count = max(2, len(names))
    if fitting := tuple(mesh for mesh in usual if len(mesh.axis_names) <= count):
        return fitting
    most = min(len(names), max(len(mesh.axis_names) for mesh in shapes))
    return tuple(
        Mesh(chosen, mesh.axis_sizes)
        for mesh in shapes
        if len(mesh.axis_names) == most
        for chosen in itertools.combinations(names, most)
    )


# -------------------------------------------------------------------------------------------------- on one mesh


def with_wishes(restriction: Restriction, demands: UserDemands, graph: Graph, mesh: Mesh) -> Restriction:
    """The restriction, and the wishes on one mesh.

    Raises :class:`~autopar.errors.PlanError` for a wish in code or names that no layout on this mesh can meet.
    """
    shapes = _shapes_of(demands.wishes, graph)
    limited = dict(restriction.limited)
    names = dict(restriction.names)
    for wish in demands.wishes:
        shape = shapes[wish.value]
        is_placed = wish.origin is Origin.PLACED
        if not shape or 0 in shape or (is_placed and (wish.value in limited or wish.value in restriction.pinned)):
            continue
        layouts = layouts_for(wish, shape, mesh)
        limited[wish.value] = limited.get(wish.value, layouts) & layouts
        names.setdefault(wish.value, f"the value at {wish.place}")
    return replace(restriction, limited=limited, names=names)


def check_undivided(demands: UserDemands, graph: Graph, mesh: Mesh) -> None:
    """Hold what stands in the code against a step before its batch was cut into microbatches.

    In the loop dimensions that no longer divide are free; what could not be met before must not pass for one of them.
    Raises :class:`~autopar.errors.PlanError` for a wish that no layout on this mesh can meet.
    """
    asked = [wish for wish in demands.wishes if wish.origin is Origin.CODE]
    shapes = _shapes_of(asked, graph)
    for wish in asked:
        shape = shapes[wish.value]
        if shape and 0 not in shape:
            layouts_for(wish, shape, mesh)


def _shapes_of(wishes: Sequence[Wish], graph: Graph) -> dict[int, tuple[int, ...]]:
    """Shapes of the values of which something is wished; a large program without wishes is not walked for every mesh."""
    asked = {wish.value for wish in wishes}
    return {value.id: value.shape for value in graph.all_values() if value.id in asked} if asked else {}


def layouts_for(wish: Wish, shape: tuple[int, ...], mesh: Mesh) -> frozenset[Layout]:
    """The layouts of an array of this shape that a wish leaves; axes that the mesh does not have are of size 1.

    Raises :class:`~autopar.errors.PlanError` where there is none.
    """
    entries = [
        None if entry is None else tuple(axis for axis in entry if axis in mesh.axis_names)
        for entry in (*wish.entries, *[()] * (len(shape) - len(wish.entries)))
    ]
    for axes in filter(None, entries):
        in_order = tuple(name for name in mesh.axis_names if name in axes)
        if axes != in_order:
            raise PlanError(
                f"{wish.place}: {wish.said} cuts a dimension by {axes}; here axes of one dimension stand in the order of "
                f"the mesh, major to minor: write {in_order}, {HOW_TO_IGNORE}"
            )
    fixed = Layout(tuple(entry or () for entry in entries))
    if len({axis for axes in fixed.dims for axis in axes}) < sum(map(len, fixed.dims)):
        raise PlanError(f"{wish.place}: {wish.said} names an axis twice; an axis cuts one dimension")
    if not divides(shape, fixed, mesh):
        raise PlanError(
            f"{wish.place}: {wish.said} cannot be met, because shape {shape} does not divide over the mesh {mesh} and "
            f"arrays are cut evenly here; pad the array, change the spec, {HOW_TO_IGNORE}"
        )
    return frozenset(
        layout
        for layout in layouts_of(shape, mesh)
        if all(entry is None or entry == axes for entry, axes in zip(entries, layout.dims, strict=True))
    )
