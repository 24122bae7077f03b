"""What of a call decides which plan it gets, and does a plan that was given fit it?"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import PlanError, TraceError
from autopar.graph.roles import Role
from autopar.graph.tracing import Call, aval_of_leaf
from autopar.inter_op.terms import Terms
from autopar.plan import Plan
from autopar.subjects import Subjected, fingerprint_on


def check_initialiser(init_fn: Any) -> None:
    """Refuse an initialiser that cannot be called without arguments."""
    if not callable(init_fn):
        raise TraceError(
            f"init() takes a function that makes the state, not {type(init_fn).__name__}; a state that is there already "
            "can be passed to the step as it is"
        )
    try:
        inspect.signature(init_fn).bind()
    except TypeError as error:
        raise TraceError(
            f"init_fn is called without arguments, and {error}; bind them first: functools.partial(init_fn, ...)"
        ) from error
    except ValueError:  # some callables written in C tell no signature
        return


def check_fits(plan: Plan, subject: Subjected, terms: Terms, cluster: Cluster) -> None:
    """Refuse a plan that was made for another program, or for another number of devices; raises ``PlanError``."""
    if plan.num_devices != cluster.num_devices:
        raise PlanError(
            f"the plan is for {plan.num_devices} devices of {plan.cluster}, {cluster.name} has {cluster.num_devices}; "
            "plan again for this cluster"
        )
    if plan.fingerprint != fingerprint_on(subject, terms):
        ours, theirs = set(subject.program.in_paths), set(plan.in_paths)
        odd = sorted(ours ^ theirs)[:3]
        where = (
            f"they differ in the arguments {', '.join(odd)}"
            if odd
            else "the same arguments, but another computation or other shardings in it, or other terms of microbatches"
        )
        raise PlanError(f"the plan was made for another program ({where}); plan again for this one")
    if plan.hosted and (cluster.runs_on is not None or cluster.is_distributed):
        raise PlanError(
            f"the plan keeps {plan.in_paths[plan.hosted[0]]} in the memory of the hosts, which is for the devices of one "
            f"process, and {cluster.name} has several; plan again for this cluster"
        )
    for position in plan.hosted:
        if subject.roles.roles[position] not in (Role.STATE, Role.OTHER):  # another step's state, where that is like=
            raise PlanError(
                f"the plan keeps {plan.in_paths[position]} in the memory of the hosts, which is no state of this step; plan again"
            )


def check_leaves(plan: Plan, subject: Subjected) -> None:
    """Refuse a plan whose loops over layers are cut as this step's cannot be; ``subject`` is cut so.  Raises ``PlanError``."""
    odd = sorted(set(plan.in_paths) ^ set(subject.program.in_paths))
    if odd:
        raise PlanError(
            f"the plan cuts loops over layers, and with them leaves, otherwise than they can be cut here ({odd[0]}); plan again "
            "for this step"
        )


def key_of(call: Call) -> Hashable:
    """Paths, shapes and dtypes of the leaves and the static arguments: what a plan depends on, never treedefs."""
    return tuple(zip(call.paths, map(type_of, call.leaves, call.paths), strict=True)), call.static


def type_of(leaf: Any, path: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype; a Python scalar counts as the array that JAX makes of it."""
    typed = leaf if hasattr(leaf, "dtype") else aval_of_leaf(leaf, path)
    return tuple(typed.shape), str(typed.dtype)
