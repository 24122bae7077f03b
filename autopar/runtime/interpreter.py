"""Carry out one mesh's static list of instructions: the same in this process and in every process of a mesh elsewhere.

What differs between them is handed in: executables, and a transport to the other meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax

from autopar.errors import InternalError
from autopar.runtime.collectives import apply_moves
from autopar.runtime.executor import partition_spec
from autopar.runtime.transport import Message, Posted, Transport
from autopar.schedule.cross_mesh import CrossMeshTransfer
from autopar.schedule.instructions import Free, Instruction, Part, Receive, Run, Send, Slot

Key = tuple[int, Part, int]
"""Stage, part and segment of an executable."""


class Interpreter:
    """Carries out the list of one mesh; owns the arrays in its slots."""

    def __init__(
        self,
        executables: Mapping[Key, Callable[[Sequence[jax.Array]], list[jax.Array]]],
        transport: Transport | None,
        finish: Mapping[int, Callable[[jax.Array], jax.Array]],
    ) -> None:
        """``finish`` makes, of what a transfer lands, what its readers want, where these differ.

        ``transport`` is None where lists send and receive nothing.
        """
        self._executables = executables
        self._transport = transport
        self._finish = finish

    def run(self, instructions: Sequence[Instruction], arrays: dict[Slot, jax.Array]) -> dict[Slot, jax.Array]:
        """What is left in the slots when all instructions are carried out (dispatched, that is).

        What comes is finished for its readers when the first of them is there: XLA:CPU runs the programs of a device in the order
        in which they are dispatched, so one that waits for a message holds up all behind it.
        """
        posted: dict[Slot, tuple[int, jax.Array | Posted]] = {}

        def read(slot: Slot) -> jax.Array:
            if slot in posted:
                arrays[slot] = self._finished(*posted.pop(slot))
            return arrays[slot]

        for instruction in instructions:
            match instruction:
                case Run(task, inputs, outputs, donated):
                    executable = self._executables[task.stage, task.part, task.segment]
                    results = executable([read(slot) for slot in inputs])
                    for position in donated:
                        del arrays[inputs[position]]
                    arrays.update(zip(outputs, results, strict=True))
                case Send(transfer, microbatch, source):
                    self._other_meshes.send(Message(transfer, microbatch), read(source))
                case Receive(transfer, microbatch, target):
                    posted[target] = transfer, self._other_meshes.receive(Message(transfer, microbatch))
                case Free(slots):
                    for slot in slots:
                        if posted.pop(slot, None) is None:
                            del arrays[slot]
        for slot in list(posted):
            read(slot)
        return arrays

    def _finished(self, transfer: int, coming: jax.Array | Posted) -> jax.Array:
        landed = coming if isinstance(coming, jax.Array) else coming()
        finish = self._finish.get(transfer)
        return landed if finish is None else finish(landed)

    @property
    def _other_meshes(self) -> Transport:
        if self._transport is None:
            raise InternalError(
                "a mesh without a transport is told to send or to receive; report this with the program"
            )
        return self._transport


def finisher(transfer: CrossMeshTransfer, mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    """What brings a landed array into the layout that its readers want."""
    local = jax.shard_map(
        lambda piece: apply_moves(piece, transfer.moves, transfer.target.mesh),
        mesh=mesh,
        in_specs=partition_spec(transfer.landing),
        out_specs=partition_spec(transfer.target.layout),
        check_vma=False,
    )
    return jax.jit(local)
