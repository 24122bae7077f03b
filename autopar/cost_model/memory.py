"""How many bytes a step holds on one device, told without compiling it.

With scratch buffers b of s_b bytes, each needed from position i_b to j_b in the order of work,

    temp ≥ max_t Σ {s_b : i_b ≤ t ≤ j_b}        total = argument + output − alias + temp

and a little more where no fixed offsets reach the bound, in this order of work or one like it (:mod:`autopar.cost_model.heap`).
Which buffers there are is said by :mod:`autopar.cost_model.buffers`, in which order they are filled by
:mod:`autopar.cost_model.kernel_order`; which of them share bytes is decided here as XLA does it:

* what is made in place has the buffer of its operand, from the start;
* a donated argument's bytes take the result that replaces it; if the argument is still read after that, it is copied
  first;
* while bytes of a donated argument or of a result are idle they serve as scratch space (:mod:`autopar.cost_model.rooms`);
* an elementwise kernel writes over an operand that dies with it;
* of arrays in the memory of the host some are in flight at any time (:mod:`autopar.cost_model.hosted`).

The referee is ``compiled.memory_analysis()`` of XLA:CPU.  For other platforms the order of work is a guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from autopar import _compat
from autopar.cost_model.arrays import arrays_of
from autopar.cost_model.buffers import Kernels, kernels_of
from autopar.cost_model.combine import joined, ranks
from autopar.cost_model.heap import Span, bytes_in_near_orders, packed_bytes
from autopar.cost_model.hosted import hosted_bytes
from autopar.cost_model.kernel_order import order_of, precedence
from autopar.cost_model.nodes import Arrays, Form, Node, Tenant
from autopar.cost_model.rooms import Room, Tenancy, without_lodgers
from autopar.cost_model.tenants import largest_tenants
from autopar.devices import DeviceKind, Platform
from autopar.graph.fusion import Fusion
from autopar.plan import Memory
from autopar.schedule.spmd import SpmdProgram

POINTER_BYTES = 8
"""Several results are a tuple in XLA: one pointer each."""

NO_NAMES: Mapping[int, str] = MappingProxyType({})

OF_A_PHASE = frozenset((Tenant.ACTIVATION, Tenant.GRADIENT, Tenant.UPDATE))


@dataclass(frozen=True)
class Timeline:
    """Scratch buffers of one level: bytes that live at its fullest moment, whose they are, and all buffers."""

    live_bytes: int
    tenants: tuple[tuple[Node, int], ...]
    spans: tuple[Span, ...]

    @property
    def temp_bytes(self) -> int:
        """Bytes of the block that holds all buffers."""
        return max(self.live_bytes, packed_bytes(self.spans))

    @property
    def safe_bytes(self) -> int:
        """The same where the order of work is XLA's but for a few places."""
        return max(self.live_bytes, bytes_in_near_orders(self.spans))


def predict_memory(
    program: SpmdProgram,
    *,
    fusion: Fusion,
    state_pairs: tuple[tuple[int, int], ...],
    donated: frozenset[int],
    device: DeviceKind,
    names: Mapping[int, str] = NO_NAMES,
) -> Memory:
    """Bytes of a step on one device, in the words of ``compiled.memory_analysis()``.

    ``state_pairs`` are (input, output) positions of one and the same array before and after the step, ``donated`` the
    positions of the inputs that the step may overwrite, ``device`` is of the kind that runs it, ``names`` are
    paths of the graph's inputs by value.  Argument,
    output and alias bytes are exact, scratch bytes a prediction (see the module docstring).  ``by_kind`` divides the
    scratch bytes at their peak; arrays that the whole program keeps in registers (``fusion``) and that only this plan
    or this compiler keeps in memory are called copies there.
    """
    pairs = tuple(pair for pair in state_pairs if pair[0] in donated)
    arrays, platform = arrays_of(program, pairs, device), device.platform
    return memory_of(arrays, program, fusion=fusion, state_pairs=state_pairs, platform=platform, names=names)


def memory_of(
    arrays: Arrays,
    program: SpmdProgram,
    *,
    fusion: Fusion,
    state_pairs: tuple[tuple[int, int], ...],
    platform: Platform,
    names: Mapping[int, str] = NO_NAMES,
) -> Memory:
    """The same of a program whose arrays, with their pairs, are known."""
    line = timeline(arrays, platform)
    hosted = arrays.hosted
    arguments = [
        0 if position in hosted.inputs else arrays.nodes[node].size_bytes for position, node in enumerate(arrays.inputs)
    ]
    literals = [_bytes_of_literal(atom) for atom in _compat.jaxpr_of(program.graph.jaxpr).outvars]
    results = [
        literals[position] if node is None else 0 if position in hosted.outputs else arrays.nodes[node].size_bytes
        for position, node in enumerate(arrays.outputs)
    ]
    # Of other backends the order is a guess of ours, and orders like it tell nothing.
    temp_bytes = line.safe_bytes if platform is Platform.CPU else line.temp_bytes
    return Memory(
        argument_bytes=sum(arguments),
        output_bytes=sum(results) + (POINTER_BYTES * len(results) if len(results) > 1 else 0),
        alias_bytes=sum(arguments[source] for source, _ in arrays.pairs),
        temp_bytes=temp_bytes,
        by_kind=_by_kind(line, temp_bytes, fusion),
        largest=largest_tenants(line.tenants, program, state_pairs, arguments, names),
        host_bytes=hosted_bytes(program, platform),
    )


def _bytes_of_literal(atom: Any) -> int:
    return int(atom.val.nbytes) if isinstance(atom, _compat.Literal) and hasattr(atom.val, "nbytes") else 0


def _by_kind(line: Timeline, temp_bytes: int, fusion: Fusion) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for node, size in line.tenants:
        local = node.tenant in OF_A_PHASE and node.value not in fusion.materialised
        kinds[(Tenant.COPY if local else node.tenant).value] += size
    kinds["room for gaps"] = temp_bytes - sum(kinds.values())
    return {kind: size for kind, size in kinds.most_common() if size}


def timeline(arrays: Arrays, platform: Platform, *, outermost: bool = True) -> Timeline:
    """Scratch buffers of a level, those of the bodies of its loops included; only the outermost owns its results.

    Backends other than CPU combine collectives only up to some bytes, for their latency: not counted here.
    """
    arrays = joined(arrays) if platform is Platform.CPU else arrays
    kernels = kernels_of(arrays, platform)
    position = order_of(kernels, len(arrays.pairs) + 1, platform)
    readers: dict[int, list[int]] = {}
    for kernel, reads in kernels.reads.items():
        for read in reads:
            readers.setdefault(kernels.owner.get(read, read), []).append(kernel)
    rank = ranks(arrays)
    results = {kernels.owner[node] for node in arrays.outputs if node is not None and node in kernels.owner}
    buffers = _buffers(kernels, position, readers, results)
    copies, rooms = _donations(arrays, kernels, buffers, position, readers)
    if outermost:
        rooms += _rooms_of_results(arrays, kernels, buffers)
    scratch = [buffer for number, buffer in buffers.items() if buffer.node == number and number not in results]
    rooms = [replace(room, rank=rank.get(room.tenants[-1].node, 0)) for room in rooms]
    lodging = [*copies, *scratch, *_in_flight(arrays, position)]
    kept = without_lodgers(lodging, rooms, kernels.overwrites, rank)
    bodies = [
        (position[number], timeline(node.inner, platform, outermost=False))
        for number, node in enumerate(arrays.nodes)
        if node.inner is not None
    ]
    return _fullest(arrays.nodes, _one_over_another(kept, kernels), bodies, rank)


def _buffers(
    kernels: Kernels, position: Mapping[int, int], readers: Mapping[int, list[int]], results: Collection[int]
) -> dict[int, Tenancy]:
    """The buffer of each kernel's array; what is made in place has that of its operand."""
    found: dict[int, Tenancy] = {}
    for number in sorted(kernels.reads, key=position.__getitem__):
        node, now = kernels.nodes[number], position[number]
        if kernels.owner.get(number) != number:  # a loop, a barrier, or another name
            continue
        end = max((position[reader] for reader in readers.get(number, ())), default=now)
        under = kernels.overwrites.get(number, ()) if node.form is Form.IN_PLACE else ()
        operands = {kernels.owner[read] for read in under} - {*results}
        old = next((found[operand] for operand in sorted(operands) if operand in found), None)
        if old is not None and old.end == now and old.size_bytes == node.size_bytes:
            old.node, old.end, old.is_shared = number, max(end, now), True
            found[number] = old
        else:
            found[number] = Tenancy(number, node.size_bytes, now, max(end, now))
    return found


def _donations(
    arrays: Arrays,
    kernels: Kernels,
    buffers: Mapping[int, Tenancy],
    position: Mapping[int, int],
    readers: Mapping[int, list[int]],
) -> tuple[list[Tenancy], list[Room]]:
    """Copies of donated inputs that may still be read when their successors are written; who has donated bytes when.

    XLA decides on copies before it knows the order of work, so what counts is whether a reader *must* come first.
    """
    pairs = []
    for source, output in arrays.pairs:
        if source in arrays.hosted.inputs:
            continue
        given, result = arrays.inputs[source], arrays.outputs[output]
        successor = None if result is None else kernels.owner.get(result)
        if successor is not None and kernels.nodes[successor].form is not Form.INPUT:
            pairs.append((given, successor))
    comes_first = precedence(kernels, position, {reader for given, _ in pairs for reader in readers.get(given, ())})
    copies, rooms = [], []
    for moment, (given, successor) in enumerate(pairs, start=1):
        size = kernels.nodes[given].size_bytes
        last = max((position[reader] for reader in readers.get(given, ())), default=0)
        if not all(
            given in kernels.overwrites.get(successor, ()) if reader == successor else comes_first(reader, successor)
            for reader in readers.get(given, ())
        ):
            copies.append(Tenancy(given, size, moment, last))
            last = moment
        rooms.append(Room(size, (Tenancy(given, size, 0, last), buffers[successor])))
    return copies, rooms


def _in_flight(arrays: Arrays, position: Mapping[int, int]) -> list[Tenancy]:
    """Copies of arrays in the memory of the host; XLA:GPU updates a leaf as soon as its gradient is there, in mid-pass."""
    if arrays.in_flight is None:
        return []
    last = max(position.values(), default=1)
    return [Tenancy(arrays.in_flight, arrays.nodes[arrays.in_flight].size_bytes, 1, max(1, last))]


def _rooms_of_results(arrays: Arrays, kernels: Kernels, buffers: Mapping[int, Tenancy]) -> list[Room]:
    """The bytes of results that take over no argument's."""
    taken_over = {output for _, output in arrays.pairs} | arrays.hosted.outputs
    makers = [
        kernels.owner[node]
        for output, node in enumerate(arrays.outputs)
        if node is not None and output not in taken_over and node in kernels.owner
    ]
    made = [buffers[maker] for maker in dict.fromkeys(makers) if maker in buffers]
    return [Room(buffer.size_bytes, (buffer,)) for buffer in made]


def _one_over_another(buffers: Sequence[Tenancy], kernels: Kernels) -> list[list[Tenancy]]:
    """Buffers that have the same bytes, one after the other: a kernel writes over an operand of its size that dies with it."""
    last: dict[int, list[Tenancy]] = {}
    found = []
    for buffer in sorted(buffers, key=lambda buffer: buffer.start):
        under = () if buffer.is_shared else sorted(kernels.overwrites.get(buffer.node, ()))
        for operand in under:
            old = last.get(kernels.owner[operand])
            if old is not None and _gives_way(old[-1], buffer):
                del last[old[-1].node]
                old.append(buffer)
                break
        else:
            old = [buffer]
            found.append(old)
        last[buffer.node] = old
    return found


def _gives_way(old: Tenancy, new: Tenancy) -> bool:
    return old.end == new.start and old.size_bytes == new.size_bytes and not old.is_shared


def _fullest(
    nodes: list[Node], buffers: list[list[Tenancy]], bodies: list[tuple[int, Timeline]], rank: Mapping[int, int]
) -> Timeline:
    """``buffers`` are those that have the same bytes, one after the other."""
    change: Counter[int] = Counter()
    for size, start, stop in [
        *((one[0].size_bytes, one[0].start, one[-1].end) for one in buffers),
        *((body.live_bytes, moment, moment) for moment, body in bodies),
    ]:
        change[start] += size
        change[stop + 1] -= size
    held = peak = when = 0
    for moment in sorted(change):
        held += change[moment]
        if held > peak:
            peak, when = held, moment
    tenants = [(nodes[one[-1].node], one[0].size_bytes) for one in buffers if one[0].start <= when <= one[-1].end]
    spans = [
        Span(
            one[0].size_bytes,
            one[0].start,
            one[-1].end + 1,
            rank.get(one[0].node, 0),
            tuple(after.start for after in one[1:]),
        )
        for one in buffers
    ]
    for moment, body in bodies:
        length = max((span.stop for span in body.spans), default=1.0)
        spans += [
            replace(
                span,
                start=moment + span.start / length,
                stop=moment + span.stop / length,
                handed_over=tuple(moment + time / length for time in span.handed_over),
            )
            for span in body.spans
        ]
        if moment == when:
            tenants += body.tenants
    return Timeline(peak, tuple(tenants), tuple(spans))
