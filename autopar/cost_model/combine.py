"""Which collectives a compiler makes one, and what that does to the arrays around them.

XLA combines collectives of one kind over the same groups of devices, with the same reduction and element type.  It goes
through the program in post-order, from its results back to their operands, and gathers collectives until one depends on
what is gathered; with that one the next set begins.  A combined collective starts when its last operand is there and
ends at once, so all its operands and all its results are in memory together (:mod:`autopar.cost_model.collectives` says what it
pays).  XLA:GPU lets a set grow to so many bytes of results only; what is larger by itself stays alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cluster import Platform
from autopar.cost_model.library import library_kernels
from autopar.cost_model.nodes import Arrays
from autopar.cost_model.places import Place, places_of
from autopar.cost_model.reshard import COMBINED_RESULT_BYTES
from autopar.schedule.spmd import Buffer

MOST_COMBINED = 256
"""So many collectives become one at most; XLA:CPU has no bound in bytes."""


def combined(arrays: Arrays, most_bytes: float = math.inf) -> list[tuple[int, ...]]:
    """The sets of nodes that become one collective, each in XLA's order; a collective on its own is a set too.

    The results of a set of several take ``most_bytes`` at most.
    """
    order = [node for node in _post_order(arrays) if arrays.nodes[node].combines is not None]
    above = _dependencies(arrays, order)
    bit = {node: 1 << index for index, node in enumerate(order)}
    found = []
    while order:
        group: list[int] = []
        left: list[int] = []
        taken = awaited = held_bytes = 0
        for index, node in enumerate(order):
            size_bytes = arrays.nodes[node].size_bytes
            unlike = arrays.nodes[node].combines != arrays.nodes[order[0]].combines
            is_full = bool(group) and (held_bytes + size_bytes > most_bytes or len(group) == MOST_COMBINED)
            if unlike or (group and size_bytes > most_bytes):
                left.append(node)
            elif is_full or above[node] & taken or awaited & bit[node]:
                left += order[index:]
                break
            else:
                group.append(node)
                held_bytes += size_bytes
                taken |= bit[node]
                awaited |= above[node]
        found.append(tuple(group))
        order = left
        behind = taken | awaited
        for node in order:  # what waits for one of a set waits for all of it
            if above[node] & taken:
                above[node] |= behind
    return found


def _post_order(arrays: Arrays) -> list[int]:
    """Nodes with buffers after those that they read, from the first result's first operand on; unread ones are left out.

    A kernel's operands stand as they came to it: of what it computes itself it took in the last in program order first,
    whose own operands were put last.
    """
    places = places_of(arrays, library_kernels(arrays), on_cpu=True)
    rank = {node: place for place, node in enumerate(_visited(arrays.outputs, lambda node: arrays.nodes[node].inputs))}

    def reads(node: int) -> Iterable[int]:
        found: dict[int, None] = {}
        inside: list[tuple[int, int]] = []
        taken = node
        while True:
            for read in arrays.nodes[taken].inputs:
                if read not in found:
                    found[read] = None
                    if places[read] is not Place.MEMORY:
                        heapq.heappush(inside, (-rank[read], read))
            if not inside:
                return found
            _, taken = heapq.heappop(inside)
            del found[taken]

    return _visited(arrays.outputs, reads)


def ranks(arrays: Arrays) -> dict[int, int]:
    """The place of each node with a buffer in XLA's order."""
    return {node: place for place, node in enumerate(_post_order(arrays))}


def _visited(last: Iterable[int | None], reads: Callable[[int], Iterable[int]]) -> list[int]:
    """All that is read to make ``last``, depth first, each after what it reads."""
    order: list[int] = []
    begun: set[int] = set()
    stack = [(node, False) for node in reversed([*last]) if node is not None]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in begun:
            begun.add(node)
            stack.append((node, True))
            stack += [(read, False) for read in reversed([*reads(node)]) if read not in begun]
    return order


def _dependencies(arrays: Arrays, candidates: Sequence[int]) -> dict[int, int]:
    """For each candidate the others that it waits for, as bits by their places."""
    bit = {node: 1 << index for index, node in enumerate(candidates)}
    above = [0] * len(arrays.nodes)
    for number, node in enumerate(arrays.nodes):
        for i in node.inputs:
            above[number] |= above[i] | bit.get(i, 0)
    return {node: above[node] for node in candidates}


def joined(arrays: Arrays) -> Arrays:
    """The same arrays with each set of combined collectives waiting for the operands of all its members."""
    groups = [group for group in combined(arrays) if len(group) > 1]
    if not groups:
        return arrays
    nodes = list(arrays.nodes)
    rank = list(range(len(nodes)))
    for group in groups:
        inputs = tuple(dict.fromkeys(i for node in group for i in nodes[node].inputs))
        for node, place in zip(group, sorted(group), strict=True):
            nodes[node] = replace(nodes[node], inputs=inputs)
            rank[node] = place
    order = _sorted([node.inputs for node in nodes], rank)
    new = {old: number for number, old in enumerate(order)}
    return Arrays(
        [replace(nodes[old], inputs=tuple(new[i] for i in nodes[old].inputs)) for old in order],
        [new[node] for node in arrays.inputs],
        [None if node is None else new[node] for node in arrays.outputs],
        arrays.pairs,
        {move: new[node] for move, node in arrays.moves.items()},
    )


def _sorted(inputs: Sequence[Iterable[int]], rank: Sequence[int]) -> list[int]:
    """Numbers after their inputs, otherwise by rank."""
    waiting = [len(set(sources)) for sources in inputs]
    users: list[list[int]] = [[] for _ in inputs]
    for number, sources in enumerate(inputs):
        for source in set(sources):
            users[source].append(number)
    ready = [(rank[number], number) for number, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for user in users[number]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (rank[user], user))
    return order


def led_by(arrays: Arrays, platform: Platform) -> Mapping[tuple[Buffer, int], tuple[Buffer, int]]:
    """For each move (target of its reshard, number in it) that is combined with others, the first move of that set."""
    found: dict[tuple[Buffer, int], tuple[Buffer, int]] = {}
    most_bytes = COMBINED_RESULT_BYTES.get(platform, math.inf)
    for level in levels(arrays):
        group_of = {node: number for number, group in enumerate(combined(level, most_bytes)) for node in group}
        first: dict[int, tuple[Buffer, int]] = {}
        for move, node in level.moves.items():
            if node in group_of:
                found[move] = first.setdefault(group_of[node], move)
    return found


def left_out(arrays: Arrays) -> frozenset[tuple[Buffer, int]]:
    """The moves (target of their reshard, number in it) that a compiler leaves out.

    It has made an equal one before, or what they would bring is one number everywhere.
    """
    found: set[tuple[Buffer, int]] = set()
    for level in levels(arrays):
        made: set[int] = set()
        for move, node in level.moves.items():
            if node in made or level.nodes[node].is_number:
                found.add(move)
            made.add(node)
    return frozenset(found)


def levels(arrays: Arrays) -> Iterator[Arrays]:
    """These arrays and those of all loop bodies in them."""
    waiting = [arrays]
    while waiting:
        level = waiting.pop()
        waiting += [node.inner for node in level.nodes if node.inner is not None]
        yield level
