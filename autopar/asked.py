"""What does the user ask of meshes and layouts, by shardings in the code, by names, and by ``constraints``?

Two readers want to know: planners, for what is left to them, and explanations, for what was not theirs to choose.
"""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.constraints import path_matches
from autopar.graph.wishes import Origin
from autopar.likeness import as_there
from autopar.methods import IntraOp, method_of
from autopar.subjects import Demands, Subjected
from autopar.user_shardings import UserDemands, UserShardings, user_demands


def demands_of_user(subject: Subjected, cluster: Cluster, demands: Demands) -> UserDemands:
    """What shardings in the user's code leave of meshes and layouts (see :mod:`autopar.user_shardings`)."""
    if demands.user_shardings is UserShardings.IGNORE:
        return UserDemands()
    method = method_of(demands.method)
    is_free = isinstance(method, IntraOp)
    shape = shape_asked(demands)
    return user_demands(subject.wishes, subject.graph, cluster, mesh_shape=shape, is_free=is_free)


def shape_asked(demands: Demands) -> tuple[int, ...] | None:
    """The sizes of the mesh's axes, if they are asked for."""
    method = method_of(demands.method)
    return demands.mesh_shape or (method.mesh_shape if isinstance(method, IntraOp) else None)


def said_of_inputs(subject: Subjected, user: UserDemands, demands: Demands) -> dict[int, str]:
    """What explanations say of inputs (by position) of which the user has demanded a layout, and where."""
    position_of = {value: position for position, value in enumerate(subject.graph.inputs)}
    said = {}
    if demands.like is not None:
        there = as_there(demands.like, subject.program)
        said.update(dict.fromkeys(there.layouts, "it lies so in the step that like= names"))
    for wish in sorted(user.wishes, key=lambda wish: wish.origin is not Origin.CODE):
        if wish.origin is Origin.CODE and wish.source in position_of:
            said[position_of[wish.source]] = f"used as you asked: {wish.place.rsplit('/', 1)[-1]}"
        elif wish.origin is Origin.NAMES:
            said[position_of[wish.value]] = f"you asked for it: names {wish.said}"
        elif wish.origin is Origin.PLACED:
            said.setdefault(position_of[wish.value], "you asked for it: it was passed so")
    for pattern in demands.constraints:
        for position, path in enumerate(subject.program.in_paths):
            if path_matches(pattern, path):
                said[position] = f"you asked for it: constraints[{pattern!r}]"
    return said
