"""Which planner makes the plan: the integer program over everything, or what an expert would write by hand.

A hand-made method says what an expert says – where parameters, optimizer state and batch lie, by mesh axis – and lets
that reach through the program as a compiler would: an axis may cut a value only in dimensions that are tied to a
dimension that the expert cut (:mod:`autopar.reach`).  The rest (which operator reduces where) is completed by the same
integer program, so the opponents are as strong as their idea allows.

* data parallel: batch over all devices, the rest whole (gradients are all-reduced);
* ZeRO-2: the same, optimizer state and update in pieces (Rajbhandari et al., 2020, §5);
* ZeRO-3: parameters rest in pieces as well and are gathered for use;
* expert parallel: ZeRO-2, but the experts of a mixture, with their optimizer state, lie on different devices, and examples are
  exchanged with them (Lepikhin et al., 2021, §3; Rajbhandari et al., DeepSpeed-MoE, 2022, §5);
* tensor parallel: Megatron-LM's columns and rows (Shoeybi et al., 2019, §3): the first matrix after a whole activation
  is cut by its outputs, the next by its inputs; vocabulary tables by rows; data parallel over the other axis;
* shares: data parallel over several meshes that hold the whole model, with unlike numbers of microbatches
  (:mod:`autopar.share_search`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.cluster import AXIS_NAMES, Cluster, Mesh
from autopar.errors import PlanError
from autopar.intra_op.restrict import Restriction
from autopar.plan import Layout
from autopar.reach import (
    Subject,
    any_operator,
    batch_reach,
    either,
    expert_cuts,
    in_pieces,
    is_update_or_gradient,
    megatron_cuts,
    narrowing_casts,
    propagate,
    split_state,
    whole_layout,
)


class Method(Protocol):
    """A way of planning: a name, the meshes it looks at, and what it forbids on each."""

    @property
    def name(self) -> str:
        """How reports call it."""

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """Logical meshes to try."""

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """What may not be chosen on a mesh."""


@dataclass(frozen=True)
class IntraOp:
    """The integer program over every layout, on every mesh of up to ``max_axes`` axes (or on one ``mesh_shape``)."""

    max_axes: int = 3
    mesh_shape: tuple[int, ...] | None = None
    name: str = "intra_op"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """All ordered factorisations of the number of devices."""
        if self.mesh_shape is not None:
            return (mesh_of(self.mesh_shape, cluster),)
        return tuple(cluster.logical_mesh_shapes(self.max_axes))

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """Nothing is forbidden."""
        return Restriction()


@dataclass(frozen=True)
class DataParallel:
    """Batch over all devices, everything else whole."""

    name: str = "data_parallel"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """One axis over all devices."""
        return (mesh_of((cluster.num_devices,), cluster),)

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """Only what is tied to the batch dimension is cut; state stays whole."""
        return Restriction(reach={"data": batch_reach(subject, mesh, "data")})


@dataclass(frozen=True)
class Zero2:
    """Data parallel with optimizer state and update in pieces."""

    name: str = "zero2"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """One axis over all devices."""
        return DataParallel().meshes(cluster)

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """Batch dimensions are cut, and in the update one dimension of every optimizer state."""
        parameters, optimizer = split_state(subject)
        whole = {value: whole_layout(subject.graph.values[value]) for value in parameters}
        return in_pieces(subject, mesh, optimizer, whole, {}, {})


@dataclass(frozen=True)
class Zero3:
    """ZeRO-2 with parameters at rest in pieces too, gathered whole for use, in the narrower type where they are used in one."""

    name: str = "zero3"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """One axis over all devices."""
        return DataParallel().meshes(cluster)

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """Batch dimensions are cut, and one dimension of every state; the copies for use are whole."""
        parameters, optimizer = split_state(subject)
        casts = narrowing_casts(subject, parameters)
        used = [*(value for value in parameters if value not in casts), *itertools.chain(*casts.values())]
        copies = {value: whole_layout(subject.graph.values[value]) for value in used}
        return in_pieces(subject, mesh, [*parameters, *optimizer], {}, copies, casts)


@dataclass(frozen=True)
class ExpertParallel:
    """ZeRO-2 with the experts of a mixture on different devices, ``expert_size`` of them (None: all).

    Where that is not all, each of the others has the experts of one of these, and they share the optimizer state of them.
    """

    expert_size: int | None = None
    name: str = "expert_parallel"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """One axis over all devices, or data × model with the experts along the second."""
        count, size = cluster.num_devices, self.expert_size
        if size is None or size == count:
            return DataParallel().meshes(cluster)
        if size < 1 or count % size:
            raise PlanError(f"expert_size={size} does not divide the {count} devices of {cluster.name}")
        return (mesh_of((count // size, size), cluster),)

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """As ZeRO-2, with parameters and optimizer state of experts cut by the number of the expert.

        Raises ``PlanError`` for a program without experts whose number divides over the last axis of the mesh.
        """
        *others, last = mesh.axis_names
        size = mesh.axis_size(last)
        experts = expert_cuts(subject, size)
        if not experts:
            raise PlanError(
                f"method='expert_parallel' finds no parameters of as many experts as divide over {size} devices: weights with "
                "a dimension that the other factor of their product has as well; use another method, or one of autopar.methods: "
                "ExpertParallel(expert_size=…) with a size that divides the number of experts"
            )
        parameters, optimizer = split_state(subject)
        through = propagate(subject.graph, experts, size, any_operator)
        used, kept = {}, {}
        for value in (*experts, *(value for value in optimizer if value in through)):
            cut = min(experts.get(value, through[value]))
            shape = subject.graph.values[value].shape
            layout = Layout(tuple((last,) if dim == cut else () for dim in range(len(shape))))
            if value in experts:
                used[value] = layout
            else:
                kept[value] = _in_pieces_too(layout, shape, tuple(others), mesh)
        whole = {value: whole_layout(subject.graph.values[value]) for value in parameters}
        rest = [value for value in optimizer if value not in kept]
        base = in_pieces(subject, mesh, rest, {**whole, **used, **kept}, used, {})
        pieces = {value: frozenset(dim for dim, axes in enumerate(kept[value].dims) if axes) for value in kept}
        updates = propagate(subject.graph, pieces, mesh.size, is_update_or_gradient)
        assert base.reach is not None
        reach = {axis: either(base.reach[axis], updates) for axis in others}
        return replace(base, reach={**reach, last: either(base.reach[last], through)})


def _in_pieces_too(layout: Layout, shape: tuple[int, ...], axes: tuple[str, ...], mesh: Mesh) -> Layout:
    """The layout, cut along the other axes as well in the largest dimension that is whole and divides, if there is one."""
    size = mesh.axis_size(*axes)
    dims = [dim for dim, cut in enumerate(layout.dims) if not cut and shape[dim] % size == 0]
    if size == 1 or not dims:
        return layout
    largest = max(dims, key=lambda dim: shape[dim])
    return Layout(tuple(axes if dim == largest else cut for dim, cut in enumerate(layout.dims)))


@dataclass(frozen=True)
class TensorParallel:
    """Megatron-LM's layout over ``model_size`` devices (None: the best of all sizes), data parallel over the others."""

    model_size: int | None = None
    name: str = "tensor_parallel"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """data × model with the model axis innermost; the model axis alone where it takes all devices."""
        count = cluster.num_devices
        sizes = [size for size in range(2, count + 1) if count % size == 0] or [1]
        if self.model_size is not None:
            if self.model_size < 1 or count % self.model_size:
                raise PlanError(f"model_size={self.model_size} does not divide the {count} devices of {cluster.name}")
            sizes = [self.model_size]
        return tuple(mesh_of((count // size, size), cluster) for size in sizes)

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """Columns and rows over the model axis, the batch over the data axis."""
        if "model" not in mesh.axis_names:
            return DataParallel().restriction(subject, mesh)
        seeds = megatron_cuts(subject, mesh.axis_size("model"))
        reach = propagate(subject.graph, subject.with_next(seeds), mesh.axis_size("model"), any_operator)
        data = {"data": batch_reach(subject, mesh, "data")} if "data" in mesh.axis_names else {}
        pinned = {}
        for position in subject.state:
            value = subject.graph.values[subject.graph.inputs[position]]
            dims = reach.get(value.id, frozenset())
            if len(dims) > 1:  # reached from two sides (an expert's gradient: by its features and by its number)
                continue
            cut = tuple(("model",) if dim in dims else () for dim in range(len(value.shape)))
            pinned[value.id] = Layout(cut)
        return Restriction(pinned=pinned, pinned_copies=pinned, reach={**data, "model": reach})


@dataclass(frozen=True)
class InterOp:
    """A pipeline and nothing else: a stage on every device.

    Where the model has fewer layers than there are devices, the stages are the next lower power of two, and the other
    devices are idle.
    """

    name: str = "inter_op"

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """The mesh of a stage's one device."""
        return (mesh_of((1,), cluster),)

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """On one device there is nothing to choose."""
        return Restriction()


@dataclass(frozen=True)
class Shares:
    """The whole model on several meshes, the kinds of devices, each of which works off its own share of the microbatches.

    ``microbatches`` are these shares, in the order of the meshes (None: the planner's choice); within a mesh the integer program
    lays the model out.
    """

    microbatches: tuple[int, ...] | None = None
    name: str = "shares"

    def __post_init__(self) -> None:
        said = self.microbatches
        if said is not None and (len(said) < 2 or not all(isinstance(one, int) and one >= 1 for one in said)):
            raise PlanError(
                f"Shares({said}) deals to no two meshes; give each mesh one microbatch or more: Shares((3, 1))"
            )

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """All ordered factorisations of the number of devices of a mesh."""
        return tuple(cluster.logical_mesh_shapes(3))

    def restriction(self, subject: Subject, mesh: Mesh) -> Restriction:
        """Nothing is forbidden."""
        return Restriction()


HAND_MADE: tuple[Method, ...] = (DataParallel(), Zero2(), Zero3(), TensorParallel())
"""The opponents of every benchmark and explanation."""

BY_NAME: dict[str, Method] = {
    method.name: method
    for method in (*HAND_MADE, ExpertParallel(), InterOp(), Shares(), IntraOp(), IntraOp(name="auto"))
}


def method_of(said: str | Method) -> Method:
    """The method of a name; a method is returned as it is.  Raises PlanError for an unknown name and for anything else."""
    known = ", ".join(sorted(BY_NAME))
    if not isinstance(said, str):
        parts = ("name", "meshes", "restriction")
        if isinstance(said, type) or not isinstance(said, Hashable) or not all(hasattr(said, part) for part in parts):
            raise PlanError(
                f"method={said!r} is no method; give one of the names {known}, or an object of autopar.methods, for "
                "example TensorParallel(model_size=2)"
            )
        return said
    if said not in BY_NAME:
        raise PlanError(f"method={said!r} is unknown; the names are {known}, or pass an object of autopar.methods")
    return BY_NAME[said]


def meshes_asked(method: Method, shape: tuple[int, ...] | None, cluster: Cluster) -> tuple[Mesh, ...]:
    """The meshes of a method, those of a demanded shape if there is one; raises PlanError where the method has none of it."""
    meshes = method.meshes(cluster)
    if shape is None:
        return meshes
    wanted = mesh_of(shape, cluster)
    if isinstance(method, IntraOp):
        return (wanted,)
    if wanted not in meshes:
        raise PlanError(f"method={method.name!r} cannot use mesh_shape={shape}; leave one of them out")
    return (wanted,)


def mesh_of(shape: tuple[int, ...], cluster: Cluster) -> Mesh:
    """The mesh of a shape; raises PlanError unless it uses all devices of the cluster with at most three axes.

    Axes of size 1 are left out: collectives along them are free, so a plan would be strewn with moves that do nothing.
    """
    if not 1 <= len(shape) <= 3 or min(shape) < 1 or math.prod(shape) != cluster.num_devices:
        raise PlanError(
            f"mesh_shape={tuple(shape)} does not fit {cluster.name}: give one to three sizes whose product is "
            f"{cluster.num_devices}, the number of its devices"
        )
    named = [(name, size) for name, size in zip(AXIS_NAMES, shape, strict=False) if size != 1]
    names, sizes = zip(*(named or [("data", 1)]), strict=True)
    return Mesh(names, sizes)
