"""How many bytes a step holds on one device, told without compiling it.

With scratch buffers b of s_b bytes, each needed from position i_b to j_b in the order of work,

    temp ≥ max_t Σ {s_b : i_b ≤ t ≤ j_b}        total = argument + output − alias + temp

and a little more where no fixed offsets reach the bound.  Which buffers there are and in which order they are filled is
said by :mod:`autopar.cost_model.buffers`; which of them share bytes is decided here as XLA does it:

* an elementwise kernel writes over an operand that dies with it;
* a donated argument's bytes take the result that replaces it; if the argument is still read after that, it is copied
  first;
* while bytes of a donated argument or of a result are idle they serve as scratch space;
* of arrays in the memory of the host some are in flight at any time (:mod:`autopar.cost_model.hosted`).

The referee is ``compiled.memory_analysis()`` of XLA:CPU.  For other platforms the order of work is a guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from autopar import _compat
from autopar.cost_model.arrays import arrays_of
from autopar.cost_model.buffers import Kernels, kernels_of, order_of, precedence
from autopar.cost_model.combine import joined
from autopar.cost_model.hosted import hosted_bytes
from autopar.cost_model.nodes import Arrays, Form, Node, Tenant
from autopar.cost_model.tenants import largest_tenants
from autopar.graph.fusion import Fusion
from autopar.plan import Memory
from autopar.schedule.spmd import SpmdProgram

POINTER_BYTES = 8
"""Several results are a tuple in XLA: one pointer each."""

PACKED_BUFFERS = 512
"""So many of the biggest buffers are given offsets; smaller ones fit between them."""

NEGLIGIBLE_SHARE = 1e-3
"""Buffers below this share of the biggest are not moved into idle arguments: they are many, and it changes nothing."""

NO_NAMES: Mapping[int, str] = MappingProxyType({})

OF_A_PHASE = frozenset((Tenant.ACTIVATION, Tenant.GRADIENT, Tenant.UPDATE))


@dataclass(slots=True)
class Tenancy:
    """A buffer: who lives in it (the last node, if several do one after the other), and from when to when."""

    node: int
    size_bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Span:
    """``size_bytes`` needed from one time to another; what runs in a loop's body lies within the loop's one unit."""

    size_bytes: int
    start: float
    stop: float


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


def predict_memory(
    program: SpmdProgram,
    *,
    fusion: Fusion,
    state_pairs: tuple[tuple[int, int], ...],
    donated: frozenset[int],
    platform: str,
    names: Mapping[int, str] = NO_NAMES,
) -> Memory:
    """Bytes of a step on one device, in the words of ``compiled.memory_analysis()``.

    ``state_pairs`` are (input, output) positions of one and the same array before and after the step, ``donated`` the
    positions of the inputs that the step may overwrite, ``platform`` is ``"cpu"``, ``"cuda"`` or ``"tpu"``, ``names`` are
    paths of the graph's inputs by value.  Argument,
    output and alias bytes are exact, scratch bytes a prediction (see the module docstring).  ``by_kind`` divides the
    scratch bytes at their peak; arrays that the whole program keeps in registers (``fusion``) and that only this plan
    or this compiler keeps in memory are called copies there.
    """
    pairs = tuple(pair for pair in state_pairs if pair[0] in donated)
    arrays = arrays_of(program, pairs, platform)
    return memory_of(arrays, program, fusion=fusion, state_pairs=state_pairs, platform=platform, names=names)


def memory_of(
    arrays: Arrays,
    program: SpmdProgram,
    *,
    fusion: Fusion,
    state_pairs: tuple[tuple[int, int], ...],
    platform: str,
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
    temp_bytes = line.temp_bytes
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
    kinds["gaps between buffers"] = temp_bytes - sum(kinds.values())
    return {kind: size for kind, size in kinds.most_common() if size}


def timeline(arrays: Arrays, platform: str, *, outermost: bool = True) -> Timeline:
    """Scratch buffers of a level, those of the bodies of its loops included; only the outermost owns its results.

    Backends other than CPU combine collectives only up to some bytes, for their latency: not counted here.
    """
    arrays = joined(arrays) if platform == "cpu" else arrays
    kernels = kernels_of(arrays, platform)
    position = order_of(kernels, len(arrays.pairs) + 1, platform)
    end: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for kernel, reads in kernels.reads.items():
        for read in reads:
            owner = kernels.owner.get(read, read)
            end[owner] = max(end.get(owner, 0), position[kernel])
            readers.setdefault(owner, []).append(kernel)
    buffers, idle = _donations(arrays, kernels, position, readers)
    if outermost:
        idle += _unfilled_results(arrays, kernels, position)
    results = {kernels.owner[node] for node in arrays.outputs if node is not None and node in kernels.owner}
    buffers += _scratch(kernels, position, end, results)
    buffers += _in_flight(arrays, position)
    buffers = _lodge(buffers, idle)
    bodies = [
        (position[number], timeline(node.inner, platform, outermost=False))
        for number, node in enumerate(arrays.nodes)
        if node.inner is not None
    ]
    return _fullest(arrays.nodes, buffers, bodies)


def _donations(
    arrays: Arrays, kernels: Kernels, position: Mapping[int, int], readers: Mapping[int, list[int]]
) -> tuple[list[Tenancy], list[Tenancy]]:
    """Copies of donated inputs that may still be read when their successors are written; when donated bytes are idle.

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
    copies, idle = [], []
    for moment, (given, successor) in enumerate(pairs, start=1):
        size = kernels.nodes[given].size_bytes
        last = max((position[reader] for reader in readers.get(given, ())), default=0)
        if not all(
            given in kernels.overwrites.get(successor, ()) if reader == successor else comes_first(reader, successor)
            for reader in readers.get(given, ())
        ):
            copies.append(Tenancy(given, size, moment, last))
            last = moment
        idle.append(Tenancy(given, size, last + 1, position[successor] - 1))
    return copies, idle


def _in_flight(arrays: Arrays, position: Mapping[int, int]) -> list[Tenancy]:
    """Copies of arrays in the memory of the host; XLA:GPU updates a leaf as soon as its gradient is there, in mid-pass."""
    if arrays.in_flight is None:
        return []
    last = max(position.values(), default=1)
    return [Tenancy(arrays.in_flight, arrays.nodes[arrays.in_flight].size_bytes, 1, max(1, last))]


def _unfilled_results(arrays: Arrays, kernels: Kernels, position: Mapping[int, int]) -> list[Tenancy]:
    """The bytes of results that take over no argument's, until they are filled."""
    taken_over = {output for _, output in arrays.pairs} | arrays.hosted.outputs
    makers = [
        kernels.owner[node]
        for output, node in enumerate(arrays.outputs)
        if node is not None and output not in taken_over and node in kernels.owner
    ]
    return [
        Tenancy(maker, kernels.nodes[maker].size_bytes, 1, position[maker] - 1)
        for maker in dict.fromkeys(makers)
        if maker in position
    ]


def _scratch(kernels: Kernels, position: Mapping[int, int], end: Mapping[int, int], results: set[int]) -> list[Tenancy]:
    """Scratch buffers; a kernel that may write over an operand of its size that dies with it takes its buffer."""
    found: dict[int, Tenancy] = {}
    buffers = []
    for number in sorted(kernels.reads, key=position.__getitem__):
        node, now = kernels.nodes[number], position[number]
        if node.form in (Form.LOOP, Form.RENAME) or number in results:
            continue
        stop = max(end.get(number, now), now)
        for read in sorted(kernels.overwrites.get(number, ())):
            old = found.get(kernels.owner[read])
            if old is not None and old.end == now and old.size_bytes == node.size_bytes:
                old.node, old.end = number, stop
                found[number] = old
                break
        else:
            found[number] = Tenancy(number, node.size_bytes, now, stop)
            buffers.append(found[number])
    return buffers


def _lodge(buffers: list[Tenancy], idle: list[Tenancy]) -> list[Tenancy]:
    """The buffers that are left when idle donated bytes are used: big ones first, each into the smallest that fits."""
    if not buffers or not idle:
        return buffers
    least = NEGLIGIBLE_SHARE * max(buffer.size_bytes for buffer in buffers)
    holes = sorted((hole.size_bytes, hole.start, hole.end) for hole in idle if hole.size_bytes >= least)
    sizes, starts, ends = np.array(holes, dtype=np.int64).reshape(-1, 3).T
    kept = []
    for buffer in sorted(buffers, key=lambda buffer: -buffer.size_bytes):
        fits = (sizes >= max(buffer.size_bytes, least)) & (starts <= buffer.start) & (ends >= buffer.end)
        if buffer.size_bytes < least or not fits.any():
            kept.append(buffer)
            continue
        k = int(fits.argmax())  # what is left of the hole are two, before and after
        sizes = np.insert(sizes, k, sizes[k])
        starts = np.insert(starts, k + 1, buffer.end + 1)
        ends = np.insert(ends, k, buffer.start - 1)
    return kept


def _fullest(nodes: list[Node], buffers: list[Tenancy], bodies: list[tuple[int, Timeline]]) -> Timeline:
    change: Counter[int] = Counter()
    for size, start, stop in [
        *((buffer.size_bytes, buffer.start, buffer.end) for buffer in buffers),
        *((body.live_bytes, moment, moment) for moment, body in bodies),
    ]:
        change[start] += size
        change[stop + 1] -= size
    held = peak = when = 0
    for moment in sorted(change):
        held += change[moment]
        if held > peak:
            peak, when = held, moment
    tenants = [(nodes[buffer.node], buffer.size_bytes) for buffer in buffers if buffer.start <= when <= buffer.end]
    spans = [Span(buffer.size_bytes, buffer.start, buffer.end + 1) for buffer in buffers]
    for moment, body in bodies:
        length = max((span.stop for span in body.spans), default=1.0)
        spans += [
            Span(span.size_bytes, moment + span.start / length, moment + span.stop / length) for span in body.spans
        ]
        if moment == when:
            tenants += body.tenants
    return Timeline(peak, tuple(tenants), tuple(spans))


def packed_bytes(spans: Sequence[Span]) -> int:
    """Bytes of one block that holds the biggest of ``spans`` at fixed offsets, those of overlapping times apart.

    Biggest first, each into the smallest hole that is long enough, as XLA does; ties in two orders, of which the
    better counts.
    """
    biggest = sorted(spans, key=lambda span: (-span.size_bytes, span.start))[:PACKED_BUFFERS]
    longest = sorted(biggest, key=lambda span: (-span.size_bytes, span.start - span.stop))
    return min(_pack(biggest), _pack(longest))


def _pack(spans: Sequence[Span]) -> int:
    start, stop = np.array([(span.start, span.stop) for span in spans]).reshape(-1, 2).T
    low, high = np.zeros((2, len(spans)), dtype=np.int64)
    for number, span in enumerate(spans):
        near = np.flatnonzero((start[:number] < span.stop) & (stop[:number] > span.start))
        near = near[np.argsort(low[near], kind="stable")]
        tops = np.concatenate(([0], np.maximum.accumulate(high[near])))
        holes = low[near] - tops[:-1]
        fits = np.flatnonzero(holes >= span.size_bytes)
        low[number] = tops[fits[np.argmin(holes[fits])]] if len(fits) else tops[-1]
        high[number] = low[number] + span.size_bytes
    return int(high.max(initial=0))
