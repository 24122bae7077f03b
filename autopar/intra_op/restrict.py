"""What a planner may not choose: restrictions on the layouts of values, by hand-made methods and by users.

A :class:`Restriction` is said in terms of values.  A node takes the strictest word of any of its members; copies have
words of their own, because a parameter that rests in pieces may well be used whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from autopar.cluster import Mesh
from autopar.errors import PlanError
from autopar.intra_op.nodes import Problem, ValueNode
from autopar.plan import Axes, Layout
from autopar.schedule.reshard import divides, layouts_of

Reach = Mapping[int, frozenset[int]]
"""Value id → the dimensions that an axis may cut."""


@dataclass(frozen=True)
class Restriction:
    """``pinned``: value → its only layout.  ``reach``: axis → value → dimensions that this axis may cut; where it is
    given, every other value is whole along the axis.  ``pinned_copies``: value → the only layout of its copy.
    ``limited``: value → the layouts left to it, whatever its reach.
    """

    pinned: Mapping[int, Layout] = field(default_factory=dict)
    pinned_copies: Mapping[int, Layout] = field(default_factory=dict)
    reach: Mapping[str, Reach] | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    """Paths of values, for messages."""
    limited: Mapping[int, frozenset[Layout]] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """Equal for restrictions that say the same of the same values."""
        reach = self.reach or {}
        return (
            tuple(sorted((v, str(layout)) for v, layout in self.pinned.items())),
            tuple(sorted((v, str(layout)) for v, layout in self.pinned_copies.items())),
            tuple(sorted((v, tuple(sorted(map(str, layouts)))) for v, layouts in self.limited.items())),
            self.reach is None,
            tuple((axis, tuple(sorted((v, tuple(sorted(dims))) for v, dims in reach[axis].items()))) for axis in reach),
        )

    def of_nodes(self, problem: Problem, mesh: Mesh) -> dict[int, frozenset[Layout]]:
        """Node index → the layouts that are left to it (only nodes that are restricted).

        Raises :class:`~autopar.errors.PlanError` when two demands on one node collide.
        """
        found: dict[int, frozenset[Layout]] = {}
        copies = {node: value for value, node in problem.copy_of_value.items()}
        for index, node in enumerate(problem.nodes):
            if not isinstance(node, ValueNode):
                continue
            members = node.members or [copies[index]]
            pins = self.pinned_copies if index in copies else self.pinned
            pinned = {value: pins[value] for value in members if value in pins}
            if pinned:
                found[index] = self._agreed(pinned, node, mesh)
            elif self.reach is not None:
                found[index] = frozenset(self._reachable(members, node, mesh))
            limited = [value for value in members if value in self.limited] if index not in copies else []
            if limited:
                found[index] = self._common(limited, found[index] if pinned else None)
        return found

    def _common(self, values: list[int], pinned: frozenset[Layout] | None) -> frozenset[Layout]:
        sets = [self.limited[value] for value in values] + ([] if pinned is None else [pinned])
        if common := frozenset.intersection(*sets):
            return common
        said = "; ".join(
            f"{self.names.get(v, f'value {v}')} as {' or '.join(map(str, self.limited[v])) or 'nothing'}"
            for v in values
        )
        other = "" if pinned is None else f", and as {next(iter(pinned))} by the method or by constraints="
        raise PlanError(
            f"shardings in the code collide with what else is demanded: {said}{other}; make them agree, or say "
            'user_shardings="ignore"'
        )

    def _agreed(self, pinned: dict[int, Layout], node: ValueNode, mesh: Mesh) -> frozenset[Layout]:
        layouts = set(pinned.values())
        if len(layouts) > 1:
            said = ", ".join(f"{self.names.get(v, f'value {v}')} as {layout}" for v, layout in pinned.items())
            raise PlanError(f"constraints collide: arrays that must share one sharding are demanded as {said}")
        (layout,) = layouts
        if not divides(node.shape, layout, mesh):
            name = self.names.get(next(iter(pinned)), "a value")
            raise PlanError(
                f"the constraint {layout} on {name} cannot be met: shape {node.shape} does not divide over mesh {mesh}"
            )
        return frozenset(layouts)

    def _reachable(self, members: list[int], node: ValueNode, mesh: Mesh) -> list[Layout]:
        assert self.reach is not None
        allowed = {
            axis: frozenset().union(*(reach.get(value, frozenset()) for value in members))
            for axis, reach in self.reach.items()
        }

        def fits(layout: Layout) -> bool:
            return all(
                axis not in allowed or dim in allowed[axis] for dim, axes in enumerate(layout.dims) for axis in axes
            )

        return [layout for layout in layouts_of(node.shape, mesh, partial=node.may_be_partial) if fits(layout)]


def demand_keys(allowed: Mapping[int, frozenset[Layout]]) -> dict[int, Hashable]:
    """What keeps nodes with unlike demands in different classes."""
    return {node: tuple(sorted(map(_sort_key, layouts))) for node, layouts in allowed.items()}


def _sort_key(layout: Layout) -> tuple[tuple[Axes, ...], Axes]:
    return layout.dims, layout.partial
