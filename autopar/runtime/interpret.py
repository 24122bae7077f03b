"""Run the steps of an SPMD program on local shards, while JAX traces.

``interpret`` is called inside a ``jax.shard_map`` that is manual over every mesh axis: each array it sees is the piece
of one device, each collective is one that the plan asked for.  Loops and branches become ``lax.scan``,
``lax.while_loop`` and ``lax.switch`` over the interpreted bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar import _compat
from autopar.graph.build import LoopKind
from autopar.runtime.collectives import apply_moves
from autopar.schedule.local_ops import run_local
from autopar.schedule.reshard import replicated
from autopar.schedule.spmd import Buffer, Reshard, Run, SpmdProgram, Step


def interpret(program: SpmdProgram, arguments: Sequence[jax.Array]) -> list[jax.Array]:
    """Local outputs of a program, given its local inputs."""
    at_hand: dict[Buffer, Any] = dict(zip(program.inputs, arguments, strict=True))
    graph, jaxpr = program.graph, _compat.jaxpr_of(program.graph.jaxpr)
    for value, constant in zip(graph.constants, _compat.consts_of(graph.jaxpr), strict=True):
        at_hand[Buffer(value, replicated(len(program.values[value].shape)))] = constant
    run_steps(program, program.steps, at_hand, [buffer for buffer in program.outputs if buffer is not None])
    return [
        _literal(atom) if buffer is None else at_hand[buffer]
        for atom, buffer in zip(jaxpr.outvars, program.outputs, strict=True)
    ]


def run_steps(program: SpmdProgram, steps: Sequence[Step], at_hand: dict[Buffer, Any], kept: Iterable[Buffer]) -> None:
    """Take some steps of a program; ``at_hand`` gains the buffers that are kept, and loses those that are read."""
    last_use = _last_uses(steps, kept)
    for number, step in enumerate(steps):
        if isinstance(step, Reshard):
            at_hand[step.target] = apply_moves(at_hand[step.source], step.moves, program.mesh)
        else:
            operands = [
                _literal(atom) if buffer is None else at_hand[buffer]
                for atom, buffer in zip(step.operator.equation.invars, step.operands, strict=True)
            ]
            at_hand.update(zip(step.results, _run(step, operands, program), strict=True))
        for buffer in last_use.get(number, ()):
            at_hand.pop(buffer, None)


def _last_uses(steps: Sequence[Step], kept: Iterable[Buffer]) -> dict[int, list[Buffer]]:
    """Buffers that are never read after a step; those to be kept are left out."""
    last: dict[Buffer, int] = {}
    for number, step in enumerate(steps):
        for buffer in (step.source,) if isinstance(step, Reshard) else step.operands:
            if buffer is not None:
                last[buffer] = number
    for buffer in kept:
        last.pop(buffer, None)
    gone: dict[int, list[Buffer]] = {}
    for buffer, number in last.items():
        gone.setdefault(number, []).append(buffer)
    return gone


def _literal(atom: Any) -> jax.Array:
    return jnp.asarray(atom.val, dtype=atom.aval.dtype)


def _run(step: Run, operands: list[Any], program: SpmdProgram) -> list[Any]:
    operator, params = step.operator, step.operator.equation.params
    match operator.primitive:
        case LoopKind.SCAN:
            return _scan(step, operands, params)
        case LoopKind.WHILE:
            return _while(step, operands, params)
        case LoopKind.COND:
            branches = [_callable(body) for body in step.bodies]
            return list(jax.lax.switch(operands[0], branches, *operands[1:]))
    return run_local(operator, operator.equation, operands, step.strategy.factors, program.mesh)


def _callable(body: SpmdProgram) -> Callable[..., list[Any]]:
    return lambda *arguments: interpret(body, arguments)


def _scan(step: Run, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    consts, carries = _compat.scan_arity(params)
    fixed, init, sliced = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
    (body,) = step.bodies

    def trip(carry: list[Any], pieces: list[Any]) -> tuple[list[Any], list[Any]]:
        out = interpret(body, [*fixed, *carry, *pieces])
        return out[:carries], out[carries:]

    carry, stacked = jax.lax.scan(
        trip, init, sliced, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *stacked]


def _while(step: Run, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    split, consts = params["cond_nconsts"], params["body_nconsts"]
    tested, fixed, init = operands[:split], operands[split : split + consts], operands[split + consts :]
    condition, body = step.bodies
    return list(
        jax.lax.while_loop(
            lambda carry: interpret(condition, [*tested, *carry])[0],
            lambda carry: interpret(body, [*fixed, *carry]),
            init,
        )
    )
