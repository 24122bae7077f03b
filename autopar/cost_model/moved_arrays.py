"""Which arrays does a change of layout make?

One per move, and what stands around it: XLA:CPU takes an all-to-all apart into its pieces, and a collective along an inner
dimension copies the array into an order in which what it sends lies together.  On CPU the interpreter makes that copy itself, of
what is scattered before it is sent and of what is gathered once it is there (:mod:`autopar.runtime.collectives`).  What is cut
into p pieces and put together of them is one kernel that reads the array as long as p ≤ 8; for more XLA:CPU keeps each piece
in a buffer of its own, B / p bytes, until all are there.
"""

from __future__ import annotations

from functools import partial

from autopar.cost_model.array_list import NARROW, ArrayList
from autopar.cost_model.collectives import Collective
from autopar.cost_model.nodes import Form, Tenant
from autopar.cost_model.reshard import COLLECTIVE_OF_MOVE, merging
from autopar.graph.merging import Merged, merged_values
from autopar.schedule.reshard import Move, MoveKind, after_move
from autopar.schedule.spmd import Buffer, Reshard

FUSED_PIECES = 8
"""XLA:CPU computes as many operands, at most, within the kernel that puts them together."""

_SENT_AS_IT_IS = frozenset((MoveKind.ALL_GATHER, MoveKind.ALL_TO_ALL))
"""Moves of an array that add nothing up."""


class MovedArrays:
    """Adds the nodes of changes of layout to a list."""

    def __init__(self, nodes: ArrayList) -> None:
        self._nodes, self._platform = nodes, nodes.device.platform
        # XLA:CPU combines all-reduces, of whatever arrays.
        self._merged = {} if nodes.on_cpu else merged_values(nodes.program.graph)
        self._turned: dict[int, int] = {}  # a collective's result in another order of dimensions: the collective

    def add(self, step: Reshard) -> None:
        """One node per move, and those around it."""
        layout, node = step.source.layout, self._nodes.at[step.source]
        for place, move in enumerate(step.moves):
            before, layout = layout, after_move(layout, move, self._nodes.program.mesh)
            ends = Buffer(step.source.value, before), Buffer(step.source.value, layout)
            make = partial(self._move, step, move, node, *ends)
            node = self._nodes.once((node, move), make)
            self._nodes[node].shape = self._nodes.shape_of(ends[1])
            self._nodes.arrays.moves[step.target, place] = self._turned.get(node, node)
        self._nodes.at[step.target] = node

    def _move(self, step: Reshard, move: Move, node: int, before: Buffer, after: Buffer) -> int:
        size, value = self._nodes.bytes_of(after), before.value
        shape = self._nodes.shape_of(before)
        tenant = Tenant.GATHERED if move.kind is MoveKind.ALL_GATHER else self._nodes.tenant_of(step.cause)
        if self._nodes[node].is_number and move.kind in _SENT_AS_IT_IS:
            return self._written(node, size, step)
        match move.kind:
            case MoveKind.SLICE | MoveKind.MASK:
                return self._nodes.add(Form.CHEAP, (node,), size, self._nodes.tenant_of(step.cause), value, step.cause)
            case MoveKind.ALL_REDUCE:
                return self._collective(move, (node,), size, tenant, step)
            case MoveKind.ALL_TO_ALL if self._nodes.on_cpu:
                cut = self._nodes.add(
                    Form.KERNEL, self._pieces(node, move, tenant, step), size, tenant, value, step.cause
                )
                self._nodes[cut].is_made_anew = True
                sent = self._nodes.add(Form.KERNEL, (cut,), size, tenant, value, step.cause)
                return self._nodes.add(
                    Form.COSTLY, self._pieces(sent, move, tenant, step), size, tenant, value, step.cause
                )
        order = (move.dim, *(dim for dim in range(len(shape)) if dim != move.dim))
        is_cut = any(extent > 1 for extent in shape[: max(move.dim, 0)])
        if self._nodes.on_cpu and is_cut:
            # The interpreter's own copy: of what is scattered before it is sent, of what is gathered once it is there.
            is_turned = move.kind is MoveKind.ALL_GATHER
            is_turned_before = not is_turned
        else:
            is_turned_before = is_cut or (self._nodes.on_cpu and move.dim > 0)
            lies_so = self._lies_transposed(node) and step.target not in self._nodes.program.outputs
            is_turned = is_turned_before or lies_so
        if is_turned_before:
            pieces = self._pieces(node, move, tenant, step) if self._nodes.on_cpu and is_cut else (node,)
            node = self._nodes.relayout(node, order) if pieces == (node,) else self._put_together(node, pieces)
        if move.kind is MoveKind.EXCHANGE_SUM:
            node = self._nodes.add(Form.KERNEL, (node,), self._nodes.bytes_of(before), tenant, value, step.cause)
            node = self._collective(move, (node,), self._nodes.bytes_of(before), tenant, step)
            node = self._nodes.add(Form.CHEAP, (node,), size, tenant, value, step.cause)
        else:
            node = self._collective(move, (node,), size, tenant, step)
        if is_turned:
            sent, node = node, self._nodes.relayout(node, ())
            self._turned[node] = sent
        return node

    def _written(self, node: int, size: int, step: Reshard) -> int:
        """A number that stands everywhere, where it is wanted."""
        written = self._nodes.add(
            Form.CHEAP, (), size, self._nodes.tenant_of(step.cause), step.source.value, step.cause
        )
        self._nodes[written].widens = self._nodes[written].is_number = True
        self._nodes[written].is_zero = self._nodes[node].is_zero
        return written

    def _put_together(self, node: int, pieces: tuple[int, ...]) -> int:
        """An array in which its pieces, each with a buffer, stand one after the other."""
        number = self._nodes.again(node, Form.KERNEL)
        self._nodes[number].inputs = pieces
        return number

    def _pieces(self, node: int, move: Move, tenant: Tenant, step: Reshard) -> tuple[int, ...]:
        """What an array is put together of: itself, or so many pieces that each has a buffer."""
        count = self._nodes.program.mesh.axis_size(*move.axes)
        if count <= FUSED_PIECES:
            return (node,)
        size = self._nodes[node].size_bytes // count
        return tuple(
            self._nodes.add(Form.KERNEL, (node,), size, tenant, step.source.value, step.cause) for _ in range(count)
        )

    def _lies_transposed(self, node: int) -> bool:
        """Whether XLA:CPU sends an array in the order of what it is the transpose of, so that nothing is moved for it."""
        source = self._nodes[node].source
        is_transpose = source is not None and source.primitive == "transpose"
        return self._nodes.on_cpu and is_transpose and self._nodes[node].form is Form.CHEAP

    def _collective(self, move: Move, inputs: tuple[int, ...], size: int, tenant: Tenant, step: Reshard) -> int:
        number = self._nodes.add(Form.KERNEL, inputs, size, tenant, step.source.value, step.cause)
        kind = COLLECTIVE_OF_MOVE[move.kind]
        merged = self._merged.get(step.source.value, Merged.NONE)
        if kind is Collective.ALL_REDUCE or kind in merging(merged, self._platform):  # as both sums of a batch norm
            dtype = self._nodes.program.values[step.source.value].dtype
            summed = "float32" if self._nodes.on_cpu and dtype in NARROW else dtype
            self._nodes[number].combines = kind, move.axes, summed
        return number
