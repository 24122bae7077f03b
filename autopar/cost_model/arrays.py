"""The local program as a list of arrays, one node per array that a compiler could keep (:mod:`autopar.cost_model.nodes`).

An operator becomes one node per result (:mod:`autopar.cost_model.computed_arrays`), a change of layout one per move
(:mod:`autopar.cost_model.moved_arrays`), and what compilers insert of themselves becomes a node too: the copy into another
order of dimensions that a matrix product or a collective along a minor dimension wants, the buffers that a loop fills.  The
body of a loop is a list of its own, made here.  All sizes are those of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar import _compat
from autopar.cost_model.array_list import ArrayList
from autopar.cost_model.computed_arrays import ComputedArrays
from autopar.cost_model.hosted import bytes_in_flight, has_host_memory
from autopar.cost_model.moved_arrays import MovedArrays
from autopar.cost_model.nodes import Arrays, Form, Node, Tenant
from autopar.devices import DeviceKind
from autopar.graph.build import LoopKind
from autopar.schedule.reshard import MoveKind
from autopar.schedule.spmd import Buffer, Reshard, Run, SpmdProgram, local_bytes


@dataclass(frozen=True)
class _Carried:
    """The operands of a loop, ``start`` to ``end``, that each trip makes anew; ``body_start`` is the first one's in the body."""

    start: int
    end: int
    body_start: int

    @property
    def number(self) -> int:
        """How many they are; so many of the results, the first ones, take their place."""
        return self.end - self.start


def arrays_of(
    program: SpmdProgram, pairs: tuple[tuple[int, int], ...], device: DeviceKind, scan: tuple[int, int] | None = None
) -> Arrays:
    """The nodes of a program on one ``device``; ``pairs`` are its donated inputs and the outputs that take their place.

    In the body of a ``scan`` (i, k) the inputs from position i on are slices that the body itself takes from stacked
    arrays, and the outputs from position k on are slices that it writes into stacked arrays.
    """
    nodes = ArrayList(program, device, frozenset(position for position, _ in pairs))
    if scan is not None:
        for buffer in program.inputs[scan[0] :]:
            nodes.at[buffer] = nodes.slice_of(nodes.at[buffer])
    moved, computed = MovedArrays(nodes), ComputedArrays(nodes)
    for step in program.steps:
        if isinstance(step, Reshard):
            moved.add(step)
        elif step.bodies:
            _loop(nodes, step)
        else:
            computed.add(step)
    arrays = nodes.arrays
    arrays.outputs = [None if buffer is None else nodes.at[buffer] for buffer in program.outputs]
    if scan is not None:
        stacked = [None if node is None else nodes.slice_of(node) for node in arrays.outputs[scan[1] :]]
        arrays.outputs[scan[1] :] = stacked
    arrays.pairs = pairs
    if has_host_memory(device.platform) and program.hosted.is_any:
        arrays.hosted = program.hosted
        arrays.in_flight = len(arrays.nodes)
        arrays.nodes.append(Node(Form.INPUT, (), bytes_in_flight(program), Tenant.HOSTED, -1, None))
    return arrays


def _loop(nodes: ArrayList, step: Run) -> None:
    operator = step.operator
    match operator.primitive:
        case LoopKind.SCAN:
            consts, carries = _compat.scan_arity(operator.equation.params)
            carried = _Carried(consts, consts + carries, consts)
            _repeat(nodes, step, carried, (consts + carries, carries))
        case LoopKind.WHILE:
            params = operator.equation.params
            skipped = params["cond_nconsts"] + params["body_nconsts"]
            _repeat(nodes, step, _Carried(skipped, len(step.operands), params["body_nconsts"]))
        case _:
            _branches(nodes, step)


def _repeat(nodes: ArrayList, step: Run, carried: _Carried, scan: tuple[int, int] | None = None) -> None:
    """A loop overwrites its carry in place and fills stacked results that exist from the start."""
    operator, body = step.operator, step.bodies[-1]
    cut_before = _cut_before(body) if nodes.on_cpu else {}
    inputs, owned = [], []
    for position, buffer in enumerate(step.operands):
        node = None if buffer is None else nodes.at[buffer]
        within = position - carried.start + carried.body_start
        if node is not None and position < carried.start and within >= 0:
            tenant, pieces = nodes[node].tenant, cut_before.get(body.inputs[within], ())
            inputs += [nodes.add(Form.KERNEL, (node,), size, tenant, -1, operator) for size in pieces]
            node = None if pieces else node
        if carried.start <= position < carried.end:
            result = step.results[position - carried.start]
            source = () if node is None else (node,)
            node = nodes.add(Form.IN_PLACE, source, nodes.bytes_of(result), Tenant.LOOP, result.value, operator)
            owned.append(node)
        if node is not None:
            inputs.append(node)
    for buffer in step.results[carried.number :]:
        owned.append(nodes.add(Form.KERNEL, (), nodes.bytes_of(buffer), Tenant.LOOP, buffer.value, operator))
    loop = nodes.add(Form.LOOP, (*inputs, *owned[carried.number :]), 0, Tenant.LOOP, -1, operator)
    pairs = tuple((carried.body_start + k, k) for k in range(carried.number))
    nodes[loop].inner = arrays_of(body, pairs, nodes.device, scan)
    for buffer, node in zip(step.results, owned, strict=True):
        nodes.buffer(Form.RENAME, (node, loop), buffer, Tenant.LOOP, operator)


def _branches(nodes: ArrayList, step: Run) -> None:
    operator = step.operator
    inputs = tuple(nodes.at[buffer] for buffer in step.operands if buffer is not None)
    owned = [
        nodes.add(Form.KERNEL, inputs, nodes.bytes_of(buffer), nodes.tenant_of(operator), buffer.value, operator)
        for buffer in step.results
    ]
    branches = []
    for body in step.bodies:
        branches.append(nodes.add(Form.LOOP, (*inputs, *owned), 0, Tenant.LOOP, -1, operator))
        nodes[branches[-1]].inner = arrays_of(body, (), nodes.device)
    for buffer, node in zip(step.results, owned, strict=True):
        nodes.buffer(Form.RENAME, (node, *branches), buffer, nodes.tenant_of(operator), operator)


def _cut_before(body: SpmdProgram) -> dict[Buffer, list[int]]:
    """Bytes of the pieces of arrays of which a loop reads nothing else: XLA cuts what the loop does not change before it."""
    pieces: dict[Buffer, list[int]] = {}
    whole = set(body.outputs)
    for step in body.steps:
        if isinstance(step, Run):
            whole.update(step.operands)
        elif all(move.kind is MoveKind.SLICE for move in step.moves):
            pieces.setdefault(step.source, []).append(local_bytes(body, step.target))
        else:
            whole.add(step.source)
    return {buffer: sizes for buffer, sizes in pieces.items() if buffer not in whole}
