"""How does a run go on after a death without going back to a checkpoint?

Every few steps each process copies its pieces of the state into its host's memory.  A piece that is replicated (over the axes of
a mesh that do not cut it) has several holders.  When a process dies its mesh is given up, but the other processes of the mesh
still answer, though a collective may hold them for ever.  Let step c be one of which every living mesh has its copies; it can
be restored if

    for each mesh that is lost, each leaf on it and each distinct piece p:    holders(p) ∩ processes that answer ≠ ∅

The survivors then hand these pieces to Ray's object store, before they are ended; the processes of the new mesh take them from
there, those of living meshes take their own.  Nothing passes through the driver, and nothing through a disk.

A step is *complete* when every process has copied; at most one step is not, so two copies of the state are held at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import tree_util

from autopar.runtime.distributed_array import RemoteArray, stored_type
from autopar.runtime.fleet import MeshWorld
from autopar.runtime.kept_copies import Box
from autopar.runtime.messages import Where
from autopar.runtime.pieced_array import Grouping, put_together, taken_apart
from autopar.runtime.processes import ASIDE
from autopar.runtime.waiting import FETCHING_SECONDS, SILENT_SECONDS, collected
from autopar.schedule.cross_mesh import piece_box


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the state that lies on a mesh."""

    aval: Any
    where: Where
    world: MeshWorld

    def boxes(self, rank: int) -> list[Box]:
        """The part of each device of a process, in the order of the mesh."""
        shape, _, _ = stored_type(self.aval)
        placement, own = self.where.placement(len(shape)), set(self.world.devices_of(rank))
        return [
            piece_box(shape, placement, position) for position, device in enumerate(self.where.devices) if device in own
        ]


@dataclass(frozen=True)
class _Kept:
    """One step: leaves that lie on meshes, by number; the others as they are; and the calls that copy."""

    step: int
    tree: Any
    grouping: Grouping
    leaves: dict[int, _Leaf]
    others: dict[int, Any]
    calls: tuple[Any, ...] = field(repr=False)

    def on(self, world: MeshWorld) -> dict[int, _Leaf]:
        """The leaves on one mesh."""
        return {number: leaf for number, leaf in self.leaves.items() if leaf.world is world}

    @property
    def worlds(self) -> list[MeshWorld]:
        """The meshes."""
        return list(dict.fromkeys(leaf.world for leaf in self.leaves.values()))


@dataclass(frozen=True)
class Rescued:
    """A step that can be restored: of each lost mesh (by its devices), who gives what."""

    kept: _Kept
    given: dict[tuple[int, ...], dict[int, Any]]
    """Devices of a lost mesh → rank of a survivor → what it gives."""
    holders: dict[tuple[int, ...], dict[tuple[int, Box], int]]

    @property
    def step(self) -> int:
        """How many steps were done."""
        return self.kept.step


class Replicas:
    """Owns what is known of the copies in the memory of the hosts."""

    def __init__(self) -> None:
        self._last: list[_Kept] = []  # the newest may be under way, the one before is complete

    def keep(self, step: int, state: Any) -> None:
        """Let every host copy its pieces; waits until the copies before these are complete.

        Raises ``WorkerError`` where a process died meanwhile.
        """
        whole, tree = tree_util.tree_flatten(state)
        leaves, grouping = taken_apart(whole)
        mine = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, RemoteArray)}
        known = {number: _Leaf(leaf.aval, leaf.where, leaf.holder) for number, leaf in mine.items()}  # type: ignore[arg-type]
        if self._last:
            before = self._last[-1]
            for world in before.worlds[:1]:
                world.collected(before.calls, FETCHING_SECONDS, f"the hosts to copy the state of step {before.step}")
            self._last = [before]
        older_than = self._last[0].step if self._last else step
        calls: list[Any] = []
        for world in dict.fromkeys(leaf.world for leaf in known.values()):
            told = [(number, mine[number].number, leaf.where) for number, leaf in known.items() if leaf.world is world]
            calls += world.call("keep", step, told, older_than)
        others = {number: leaf for number, leaf in enumerate(leaves) if number not in known}
        self._last.append(_Kept(step, tree, grouping, known, others, tuple(calls)))

    def forget(self) -> None:
        """The state was made anew: what is known of copies is of no use."""
        self._last = []

    def rescue(self) -> Rescued | None:
        """What survivors can give, after all that lives has come to rest (:meth:`Fleet.settle`); None if that is too little."""
        steps = {world: _steps_kept(world) for kept in self._last for world in kept.worlds}
        for kept in reversed(self._last):
            holders = {world: _holders(kept, world, steps[world]) for world in kept.worlds}
            if all(found is not None for found in holders.values()):
                given = {
                    world.devices: _given(world, kept.step, found)
                    for world, found in holders.items()
                    if world.is_lost and found is not None
                }
                refs = [ref for by_rank in given.values() for ref in by_rank.values()]
                collected(refs, FETCHING_SECONDS, "survivors to give their copies")
                ranks = {world.devices: found for world, found in holders.items() if found is not None}
                return Rescued(kept, given, {devices: ranks[devices] for devices in given})
        return None

    def restore(self, rescued: Rescued, worlds: Sequence[MeshWorld], numbers: Iterator[int]) -> Any:
        """The state again, on meshes that live; raises ``WorkerError`` where another has died meanwhile."""
        kept = rescued.kept
        by_devices = {world.devices: world for world in worlds}
        found: dict[int, Any] = dict(kept.others)
        calls: list[Any] = []
        for old in kept.worlds:
            world = by_devices[old.devices]
            entries = []
            for number, leaf in kept.on(old).items():
                array = found[number] = world.new_array(leaf.aval, leaf.where, next(numbers))
                shape, _, key_impl = stored_type(leaf.aval)
                entries.append((number, array.number, leaf.where, shape, key_impl))
            given, holders = rescued.given.get(old.devices, {}), rescued.holders.get(old.devices, {})
            for rank, actor in enumerate(world.actors):
                wanted = {(number, box) for number, leaf in kept.on(old).items() for box in leaf.boxes(rank)}
                refs = [given[holder] for holder in sorted({holders[key] for key in wanted if key in holders})]
                boxes = {number: leaf.boxes(rank) for number, leaf in kept.on(old).items()}
                calls.append(actor.take_kept.remote(kept.step, entries, boxes, *refs))
        collected(calls, FETCHING_SECONDS, f"the hosts to take the state of step {kept.step}")
        self._last = []
        whole = put_together([found[number] for number in sorted(found)], kept.grouping)
        return tree_util.tree_unflatten(kept.tree, whole)


def _steps_kept(world: MeshWorld) -> list[frozenset[int]]:
    """Of which steps each process of a mesh has copies; none of those that do not answer."""
    import ray

    refs = [actor.kept_steps.options(concurrency_group=ASIDE).remote() for actor in world.actors]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=SILENT_SECONDS / 2)
    found = []
    for ref in refs:
        try:
            found.append(frozenset(ray.get(ref)) if ref in ready else frozenset())
        except ray.exceptions.RayError:
            found.append(frozenset())
    return found


def _holders(kept: _Kept, world: MeshWorld, steps: Sequence[frozenset[int]]) -> dict[tuple[int, Box], int] | None:
    """For each piece on a mesh a process that has it, the piece's own before others; None where one is missing."""
    ranks = [rank for rank, known in enumerate(steps) if kept.step in known]
    if not world.is_lost and len(ranks) < len(steps):
        return None  # its copy was not made: the step before it failed
    found: dict[tuple[int, Box], int] = {}
    for number, leaf in kept.on(world).items():
        for rank in ranks:
            for box in leaf.boxes(rank):
                found.setdefault((number, box), rank)
        if any((number, box) not in found for rank in range(len(steps)) for box in leaf.boxes(rank)):
            return None
    return found


def _given(world: MeshWorld, step: int, holders: dict[tuple[int, Box], int]) -> dict[int, Any]:
    by_rank: dict[int, list[tuple[int, Box]]] = {}
    for key, rank in holders.items():
        by_rank.setdefault(rank, []).append(key)
    return {
        rank: world.actors[rank].give_kept.options(concurrency_group=ASIDE).remote(step, keys)
        for rank, keys in by_rank.items()
    }


def lies_on_meshes(state: Any) -> bool:
    """Whether any leaf lies in other processes."""
    return any(isinstance(leaf, RemoteArray) for leaf in taken_apart(jax.tree.leaves(state))[0])
