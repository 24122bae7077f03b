"""What does it cost to keep arrays in the memory of the host between steps, or between the passes of a microbatch?

    seconds = Σ over copies (α + n / β)        α, β of the link between a device and its host, or as measured

with a copy to the device of every such array that is read and one back of every next value, n its bytes on one device.  One
follows the other here.  XLA:GPU overlaps them: a kernel reads its arrays over the link while what the one before has made is
copied back the other way.  How much that saves is for a clock to say, so it is not counted.

On the device there is, of all that, what is *in flight*.  Leaves that an update computes together (the two moments of a
parameter) are a group; the next values of one are copied back while the next group's are computed, so two groups are there at
the same time.  What is copied to the device first, because no fused kernel reads it, is there as well.

What a stage of a pipeline keeps for its backward pass (:mod:`autopar.schedule.residuals`) is copied to the host by the executable
that makes it, and to the device by each that reads it, at the same price; all that one call of an executable copies is on the
device as long as it runs, whatever the compiler does to need less.  The stages on one host copy at the same time, so there they
share a link as devices of one stage do.

XLA:CPU has one memory: nothing is copied, and nothing is saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autopar.cluster import Cluster, Platform
from autopar.curves import Curve
from autopar.errors import ClusterError
from autopar.graph.fusion import FUSIBLE
from autopar.graph.ir import Graph, Phase
from autopar.schedule.spmd import Buffer, Run, SpmdProgram, local_bytes

GROUPS_IN_FLIGHT = 2
"""One is computed while the one before is copied back."""


def has_host_memory(platform: Platform) -> bool:
    """Whether the memory of the host is another one than that of the devices."""
    return platform is not Platform.CPU


def hosted_bytes(program: SpmdProgram, platform: Platform) -> int:
    """Bytes of one device's part of the arrays that lie in the memory of the host."""
    if not has_host_memory(platform):
        return 0
    return sum(local_bytes(program, program.inputs[position]) for position in program.hosted.inputs)


def host_seconds(program: SpmdProgram, cluster: Cluster) -> float:
    """Seconds of the copies of a step, one after the other."""
    hosted = program.hosted
    if not hosted.is_any or not has_host_memory(cluster.device.platform):
        return 0.0
    read = _read(program)
    copied = [program.inputs[position] for position in hosted.inputs if program.inputs[position] in read]
    copied += [buffer for position in hosted.outputs if (buffer := program.outputs[position]) is not None]
    return copy_seconds(len(copied), sum(local_bytes(program, buffer) for buffer in copied), cluster)


def seconds_per_hosted_byte(cluster: Cluster) -> float:
    """Seconds that a byte of every device takes between device and host, one way: as measured, or by the cluster's link.

    Raises ClusterError if neither is known.
    """
    if (measured := _measured(cluster)) is not None:
        return measured.slope
    link = cluster.host_memory_link
    if link is None:
        raise ClusterError(
            f"{cluster.name} does not say how fast its devices reach the memory of their host; say so: "
            "cluster.replace(host_memory_link=Link(latency_seconds, bytes_per_second, shared_by))"
        )
    return min(link.shared_by, cluster.devices_per_host) / link.bytes_per_second


def _measured(cluster: Cluster) -> Curve | None:
    return None if cluster.profile is None else cluster.profile.host_copies


def _copy_latency(cluster: Cluster) -> float:
    if (measured := _measured(cluster)) is not None:
        return measured.at(0.0)
    assert cluster.host_memory_link is not None
    return cluster.host_memory_link.latency_seconds


def copy_seconds(copies: int, copied_bytes: float, cluster: Cluster) -> float:
    """Seconds of so many copies one way, of so many bytes of a device in all."""
    return copies * _copy_latency(cluster) + copied_bytes * seconds_per_hosted_byte(cluster)


def beside_others(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """The cluster of these devices alone, with what the other devices of their hosts leave them of the link to their memory."""
    part, link = cluster.part(devices), cluster.host_memory_link
    if link is None:
        return part
    alone, together = (min(link.shared_by, one.devices_per_host) for one in (part, cluster))
    if alone == together:
        return part
    return part.replace(host_memory_link=replace(link, bytes_per_second=link.bytes_per_second * alone / together))


def bytes_in_flight(program: SpmdProgram) -> int:
    """Bytes of arrays of the host that are on one device at the same time."""
    hosted, graph = program.hosted, program.graph
    early = {v for operator in graph.operators if operator.phase is not Phase.UPDATE for v in operator.operands}
    unfused = {v for operator in graph.operators if operator.primitive not in FUSIBLE for v in operator.operands}
    inputs = {graph.inputs[position]: local_bytes(program, program.inputs[position]) for position in hosted.inputs}
    throughout = sum(size for value, size in inputs.items() if value in early)
    copied = {value: size for value, size in inputs.items() if value in unfused and value not in early}
    made = {
        buffer.value: local_bytes(program, buffer)
        for position in hosted.outputs
        if (buffer := program.outputs[position]) is not None
    }
    groups: defaultdict[int, int] = defaultdict(int)
    for value, group in groups_of(graph, frozenset(inputs)).items():
        groups[group] += made.get(value, 0) + copied.get(value, 0)
    return throughout + sum(sorted(groups.values())[-GROUPS_IN_FLIGHT:])


def groups_of(graph: Graph, inputs: frozenset[int]) -> dict[int, int]:
    """For these inputs, and each array that is computed from them, the number of its group: those that one array depends on.

    Scalars join nothing: a norm over all leaves is there before and after them.
    """
    parent = {value: value for value in inputs}

    def root(value: int) -> int:
        while parent[value] != value:
            value = parent[value]
        return value

    for operator in graph.operators:
        roots = {root(value) for value in operator.operands if value is not None and value in parent}
        if roots:
            first = min(roots)
            parent.update(dict.fromkeys(roots, first))
            parent.update((result, first) for result in operator.results if graph.values[result].shape)
    return {value: root(value) for value in parent}


def _read(program: SpmdProgram) -> set[Buffer | None]:
    """Buffers that a step of the program reads."""
    found: set[Buffer | None] = set()
    for step in program.steps:
        found.update(step.operands if isinstance(step, Run) else (step.source,))
    return found
