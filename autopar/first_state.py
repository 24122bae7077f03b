"""The first state, born where the plan wants it: no device ever holds the whole.

An initialiser is run as a program of its own whose outputs lie as the step wants its inputs.  For a pipeline it is run once
for every stage, without all that only other stages' leaves need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import tree_util

from autopar import _compat
from autopar.cluster import Cluster
from autopar.graph.build import build_graph
from autopar.graph.roles import Role, Roles
from autopar.graph.tracing import TracedProgram
from autopar.homes import devices_here
from autopar.inter_op.opened import LeafPieces, opened_initialiser
from autopar.inter_op.stacks import Rows
from autopar.intra_op.initial import plan_initialiser
from autopar.on_ray import fleet_of, step_on_ray
from autopar.plan import Plan
from autopar.runtime.executor import Executor, device_mesh, shardings_of
from autopar.runtime.one_world import elsewhere, is_here
from autopar.schedule.spmd import Hosted
from autopar.subjects import Subjected, subject_of


@dataclass(frozen=True)
class Initialiser:
    """A traced initialiser whose outputs are the first inputs of a plan.

    ``opened`` are the leaves that its function returns: the pieces that they are, or None.
    """

    program: TracedProgram
    opened: tuple[LeafPieces | None, ...]

    def together(
        self, parts: Sequence[Any], join: Callable[[list[Any], LeafPieces, Any], Any], avals: Sequence[Any]
    ) -> Any:
        """What stands for the outputs, as what the function returns; ``join`` makes one of what stands for pieces of a leaf."""
        rest, found = iter(parts), []
        for pieces, aval in zip(self.opened, avals, strict=True):
            found.append(next(rest) if pieces is None else join([next(rest) for _ in pieces.ends], pieces, aval))
        return tree_util.tree_unflatten(self.program.out_tree, found)


def initialiser_for(traced: TracedProgram, subject: Subjected, platform: str) -> Initialiser:
    """The initialiser of what a step takes first; where that step's loops over layers are cut, so are its own."""
    count = len(traced.out_avals)
    if subject.opened is None:
        return Initialiser(traced, (None,) * count)
    results = subject.opened.inputs[:count]
    layers = {position: Rows(dim, of) for position, dim, of in subject.opening.leaves if position < count}
    graph = build_graph(traced.jaxpr, platform=platform)
    program = opened_initialiser(traced, graph, results, layers, subject.opening.pieces)
    return Initialiser(program, results)


def born_sharded(traced: TracedProgram, plan: Plan, cluster: Cluster, stage_of: Mapping[int, int]) -> list[Any]:
    """What an initialiser returns, leaf k in the layout of the plan's input k; ``stage_of`` names the stages of a pipeline."""
    if cluster.runs_on is not None:
        fleet_of(cluster).worlds(
            [plan.devices_of(number) for number in range(len(plan.stages))], cluster.device.platform
        )
    found: dict[int, Any] = {}
    for number in range(len(plan.stages)):
        positions = [k for k in range(len(traced.out_avals)) if stage_of.get(k, 0) == number]
        if positions:
            part = traced if len(plan.stages) == 1 else _only(traced, positions, with_effects=number == 0)
            found.update(zip(positions, _born_on(part, positions, plan, number, cluster), strict=True))
    return [found[k] for k in sorted(found)]


def _born_on(traced: TracedProgram, positions: Sequence[int], plan: Plan, number: int, cluster: Cluster) -> list[Any]:
    stage, numbers = plan.stages[number], plan.devices_of(number)
    subject = subject_of(traced, Roles((Role.HIDDEN,) * len(traced.in_keys), (), None), cluster.device.platform.value)
    layouts = tuple(plan.in_layouts[k] for k in positions)
    program = plan_initialiser(subject.graph, stage.mesh, cluster.part(numbers), layouts)
    devices = devices_here(cluster, numbers)
    if cluster.is_distributed and not any(map(is_here, devices)):
        mesh = device_mesh(stage.mesh, devices)
        homes = shardings_of(mesh, layouts, ())
        return [elsewhere(aval, home) for aval, home in zip(traced.out_avals, homes, strict=True)]
    hosted = frozenset(place for place, position in enumerate(positions) if position in plan.hosted)
    program = replace(program, hosted=Hosted(outputs=hosted))
    if cluster.runs_on is not None:
        return step_on_ray(program, traced, frozenset(), cluster, devices=numbers)(list(traced.hidden))
    return Executor(program, traced.in_avals, frozenset(), devices)(list(traced.hidden))


def _only(traced: TracedProgram, positions: Sequence[int], *, with_effects: bool) -> TracedProgram:
    """The program with these outputs alone, and without what they do not need."""
    jaxpr = _compat.jaxpr_of(traced.jaxpr)
    outvars = [jaxpr.outvars[k] for k in positions]
    needed = {atom for atom in outvars if not isinstance(atom, _compat.Literal)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars) or (with_effects and equation.effects):
            kept.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, _compat.Literal))
    closed = _compat.make_closed_jaxpr(jaxpr.invars, outvars, kept[::-1], traced.jaxpr)
    keys, avals = (tuple(those[k] for k in positions) for those in (traced.out_keys, traced.out_avals))
    return replace(traced, jaxpr=closed, out_keys=keys, out_avals=avals)
