"""Which array outside of a loop or branch is which inside, and which becomes which from one trip to the next?

JAX's calling conventions of ``scan``, ``while_loop`` and ``cond``: constants, carries, what is stacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar import _compat
from autopar.graph.build import LoopKind
from autopar.graph.ir import Operator
from autopar.intra_op.nodes import Port


@dataclass(frozen=True)
class LoopLink:
    """An array crosses the border of a loop or branch body (``inside``: once per trip, from body to body)."""

    source: int
    source_port: Port
    target: int
    target_port: Port
    shape_of: int
    body: int = 0
    inside: bool = False


def loop_links(operator: Operator) -> list[LoopLink]:
    """Which value becomes which at the borders of an operator's bodies (JAX's calling conventions of its loops)."""
    match operator.primitive:
        case LoopKind.SCAN:
            return [*_scan_links(operator)]
        case LoopKind.WHILE:
            return [*_while_links(operator)]
        case LoopKind.COND:
            return [*_cond_links(operator)]
    return []


def _into(operands: Sequence[int | None], targets: Sequence[int], port: Port = Port.VALUE) -> Iterator[LoopLink]:
    for operand, target in zip(operands, targets, strict=True):
        if operand is not None:
            yield LoopLink(operand, Port.VALUE, target, port, operand)


def _carried(
    outs: Sequence[int | None], carries: Sequence[int], results: Sequence[int], body: int
) -> Iterator[LoopLink]:
    """What a trip leaves is what the next one finds, and in the end the result."""
    for out, carry, result in zip(outs, carries, results, strict=True):
        if out is not None:
            yield LoopLink(out, Port.VALUE, carry, Port.VALUE, carry, body, inside=True)
        yield LoopLink(carry, Port.VALUE, result, Port.VALUE, result)


def _scan_links(operator: Operator) -> Iterator[LoopLink]:
    (body,) = operator.bodies
    consts, carries = _compat.scan_arity(operator.equation.params)
    whole = consts + carries
    yield from _into(operator.operands[:whole], body.inputs[:whole])
    yield from _into(operator.operands[whole:], body.inputs[whole:], Port.STACKED)
    yield from _carried(body.outputs[:carries], body.inputs[consts:whole], operator.results[:carries], 0)
    for out, result in zip(body.outputs[carries:], operator.results[carries:], strict=True):
        if out is not None:
            yield LoopLink(out, Port.STACKED, result, Port.VALUE, result)


def _while_links(operator: Operator) -> Iterator[LoopLink]:
    condition, body = operator.bodies
    split, consts = operator.equation.params["cond_nconsts"], operator.equation.params["body_nconsts"]
    carries = body.inputs[consts:]
    yield from _into(operator.operands[:split], condition.inputs[:split])
    yield from _into(operator.operands[split : split + consts], body.inputs[:consts])
    yield from _into(operator.operands[split + consts :], carries)
    for carry, tested in zip(carries, condition.inputs[split:], strict=True):
        yield LoopLink(carry, Port.VALUE, tested, Port.VALUE, carry, 1, inside=True)
    yield from _carried(body.outputs, carries, operator.results, 1)


def _cond_links(operator: Operator) -> Iterator[LoopLink]:
    # All branches share the layouts of their inputs, so the first stands for them.
    yield from _into(operator.operands[1:], operator.bodies[0].inputs)
    for number, body in enumerate(operator.bodies):
        for out, result in zip(body.outputs, operator.results, strict=True):
            if out is not None:
                yield LoopLink(out, Port.VALUE, result, Port.VALUE, result, number)
