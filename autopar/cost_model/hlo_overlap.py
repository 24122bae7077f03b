"""How much of its communication does a compiled program hide behind work?

XLA:GPU prints a collective in two instructions, ``all-reduce-start`` and ``all-reduce-done``, or ``async-start`` and
``async-done`` around one, and a scheduled module lists instructions in the order in which they are launched.  What stands
between the two runs beside the collective, on another stream; collectives share one stream and follow one another
(:class:`~autopar.cost_model.streams.TwoStreams`).  Nothing is hidden of a collective that is one instruction, as on
XLA:CPU, nor of one of which XLA says ``"is_sync":true``: kernels wait for it.

Seconds are those that the referee has for kernels and collectives, each alone on the device.  That both share its memory and
its cores while they run side by side is not known, and not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.cost_model.hlo_steps import Step, is_collective, is_synchronous
from autopar.cost_model.streams import TwoStreams


def hidden_seconds(steps: Iterable[Step], seconds: Sequence[float]) -> float:
    """Seconds of collectives during which a device works; ``seconds`` are what each of the steps takes, all its times."""
    streams = TwoStreams()
    started: dict[str, str] = {}
    for step, length in zip(steps, seconds, strict=True):
        instruction = step.instruction
        if is_collective(instruction):
            if (name := _started_as(step)) and not is_synchronous(instruction):
                streams.start(name, length)
                started[name] = name
            else:
                streams.work(length)
            continue
        streams.work(length)
        source = started.get(instruction.operands[0], "") if instruction.operands else ""
        if source and instruction.opcode.endswith("-update"):
            started[instruction.name] = source
        elif source and instruction.opcode.endswith("-done") and streams.awaits(source):
            streams.end(source)
    return streams.hidden_seconds


def _started_as(step: Step) -> str:
    """The name of the instruction that starts a collective and does not wait for it, if one does."""
    if step.started_as:
        return step.started_as
    return step.instruction.name if step.instruction.opcode.endswith("-start") else ""
