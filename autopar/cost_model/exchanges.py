"""What does it cost meshes in processes of their own to send and to receive?

Such a message is copied by the processors of both ends, which compute nothing meanwhile: a task takes what it computes, and

    Σ exchange(bytes) of the messages that bring its inputs  +  Σ exchange(bytes) of the messages that take its outputs away

where a message is of as many pieces as the busiest device of that end sends or receives, and *exchange* was measured
(:class:`autopar.profile.Profile`).  A message of what no task made is charged to the task after it.  Accelerators send without
their processors, and what was not measured costs nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from autopar.cluster import Cluster
from autopar.schedule.cross_mesh import CrossMeshTransfer
from autopar.schedule.instructions import InstructionList, Receive, Run, Send, Slot, Task


def exchange_seconds(
    lists: Sequence[InstructionList], transfers: Mapping[int, CrossMeshTransfer], cluster: Cluster
) -> dict[Task, float]:
    """Seconds that tasks take longer for their messages; tasks without any are left out."""
    profile = cluster.profile
    if profile is None or profile.exchanges is None or not cluster.meshes_are_processes:
        return {}
    found: defaultdict[Task, float] = defaultdict(float)
    sent, received = (
        {
            number: _end_seconds(devices, profile.exchanges.at(transfers[number].tile_bytes))
            for number, devices in end.items()
        }
        for end in _ends(transfers)
    )
    for instructions in lists:
        _charge(instructions, sent, received, found)
    return dict(found)


def _ends(transfers: Mapping[int, CrossMeshTransfer]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The devices that send a transfer's pieces, and those that receive them, as often as they do."""
    crossing = {
        number: [(tile.sender, tile.receiver) for tile in one.tiles if tile.sender != tile.receiver]
        for number, one in transfers.items()
    }
    senders = {number: [sender for sender, _ in tiles] for number, tiles in crossing.items()}
    return senders, {number: [receiver for _, receiver in tiles] for number, tiles in crossing.items()}


def _end_seconds(devices: Iterable[int], seconds_of_one: float) -> float:
    return seconds_of_one * max(Counter(devices).values(), default=0)


def _charge(
    instructions: InstructionList,
    sent: Mapping[int, float],
    received: Mapping[int, float],
    found: defaultdict[Task, float],
) -> None:
    """Add what the messages of one mesh cost its tasks."""
    makers: dict[Slot, Task] = {}
    coming: dict[Slot, float] = {}
    of_next = 0.0
    for instruction in instructions:
        if isinstance(instruction, Run):
            task = instruction.task
            seconds = of_next + sum(coming.pop(slot, 0.0) for slot in instruction.inputs)
            if seconds:
                found[task] += seconds
            of_next = 0.0
            makers.update(dict.fromkeys(instruction.outputs, task))
        elif isinstance(instruction, Receive):
            coming[instruction.target] = received[instruction.transfer]
        elif isinstance(instruction, Send):
            if (maker := makers.get(instruction.source)) is not None:
                found[maker] += sent[instruction.transfer]
            else:
                of_next += sent[instruction.transfer]
