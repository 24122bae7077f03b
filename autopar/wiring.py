"""Which devices of a host are wired to each other?

A switch gives any group of devices all that each of them can send.  Without one a device has so many wires w, each to a certain
other device, and a group has only those between its members.  With c(a, b) wires between two devices, one wire giving β/w of
what a device sends in all, and at least one wire taken for all who talk to each other (through a third device, where two have
none),

    ring of a group       as many wires as the smallest cut of the group severs, 1 if none joins it: every ring crosses every cut
    permute               max(1, c(a, b)) wires for a message from a to b
    all-to-all            of n members, in messages of W/(n-1): direct ones over their own wires, others over two, which
                          all share: the larger of max over pairs 1/c(a, b) and max over a of (direct + 2·others)/Σ c(a, b)

are in use.  Trees from one device to all others reach the smallest cut (Edmonds, 1973; of collectives: Wang et al., Blink, 2020);
the groups that meshes make on a DGX-1 have as many rings.  What a message through a third device takes from that one's own is
counted in an all-to-all only.

A part of a host is taken for its first devices.  Messages between the meshes of a pipeline go as if through a switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from autopar.errors import ClusterError


@dataclass(frozen=True)
class Wiring:
    """Wires between the devices of a host: ``wires[a][b]`` of them between a and b, ``per_device`` at each device in all.

    Raises ``ClusterError`` for a table that is not square and symmetric with an empty diagonal, holds anything but counts, or
    has more wires in a row than a device has.
    """

    wires: tuple[tuple[int, ...], ...]
    per_device: int
    source: str = ""

    def __post_init__(self) -> None:
        if type(self.per_device) is not int or self.per_device < 1:
            raise ClusterError(f"per_device of a wiring is {self.per_device!r}; give an integer of 1 or more")
        size = len(self.wires)
        if any(len(row) != size for row in self.wires):
            raise ClusterError(f"wires of a host are {self.wires}; give a row for each device, with an entry for each")
        for one, row in enumerate(self.wires):
            for other, count in enumerate(row):
                if type(count) is not int or count < 0 or (one == other and count):
                    raise ClusterError(f"wires[{one}][{other}] is {count!r}; give a count, 0 of a device to itself")
                if count != self.wires[other][one]:
                    raise ClusterError(
                        f"wires[{one}][{other}] is {count} and wires[{other}][{one}] {self.wires[other][one]}; a wire goes "
                        "both ways, so give the same number"
                    )
            if sum(row) > self.per_device:
                raise ClusterError(
                    f"wires[{one}] has {sum(row)} wires, and a device has per_device={self.per_device}; correct one of them"
                )

    def first(self, count: int) -> Wiring:
        """The wires between the first devices.  Raises ``ClusterError`` for more than there are."""
        if count > len(self.wires):
            raise ClusterError(
                f"a host has {count} devices, and its wiring is of {len(self.wires)}; give a row for each, or local_wiring=None "
                "where all can send to all at once"
            )
        if count == len(self.wires):
            return self
        return Wiring(tuple(row[:count] for row in self.wires[:count]), self.per_device, self.source)

    def ring_share(self, members: Sequence[int]) -> float:
        """The share of what a device sends in all that it can send around a ring of these devices."""
        group = self._graph.subgraph(members)
        severed = nx.stoer_wagner(group)[0] if nx.is_connected(group) else 0
        return max(1, severed) / self.per_device

    def message_share(self, one: int, other: int) -> float:
        """The same of a message from one device to another."""
        return max(1, self.wires[one][other]) / self.per_device

    def exchange_share(self, members: Sequence[int]) -> float:
        """The same where each of the devices sends as much to each other one."""
        slowest = 0.0
        for one in members:
            counts = [self.wires[one][other] for other in members if other != one]
            relayed = counts.count(0)
            hops = len(counts) + relayed  # a message through a third device takes two wires
            single = max([1 / count for count in counts if count], default=1.0)
            shared = hops / sum(counts) if any(counts) else len(counts)
            slowest = max(slowest, single, shared)
        return min(1.0, (len(members) - 1) / (slowest * self.per_device))

    @cached_property
    def _graph(self) -> nx.Graph:
        graph = nx.Graph()
        graph.add_nodes_from(range(len(self.wires)))
        graph.add_weighted_edges_from(
            (one, other, count) for one, row in enumerate(self.wires) for other, count in enumerate(row) if count
        )
        return graph
