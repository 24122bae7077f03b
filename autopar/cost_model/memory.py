"""How many bytes a step holds on one device, told without compiling it.

With buffers b, each of s_b bytes and needed from position i_b to j_b of the order of work,

    temp = max_t Σ {s_b : i_b ≤ t ≤ j_b}     total = argument + output − alias + temp

so all depends on three guesses about XLA, made here by its own rules:

* *which arrays get a buffer*: the others are computed inside the kernels that read them (:func:`_kernels`);
* *in which order kernels run*: XLA:CPU goes breadth first, a kernel is ready when its operands are, and first come is
  first served, so gathered parameters and zeros to be accumulated into exist from the very start (:func:`_order`);
* *which buffers are one*: elementwise kernels overwrite an operand that dies, donated arguments take the results that
  replace them, and while an argument is not needed its bytes serve as scratch space (:func:`_buffers`, :func:`_lodge`).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from autopar.cost_model.arrays import Arrays, Form, Node, arrays_of
from autopar.graph.fusion import Fusion
from autopar.plan import Memory
from autopar.schedule.spmd import SpmdProgram

REAL_BUFFERS = frozenset((Form.KERNEL, Form.IN_PLACE, Form.LOOP))
FUSED = frozenset((Form.CHEAP, Form.COSTLY))
LODGERS = 4096
PACKED = 512
SWALLOWED = "swallowed"


@dataclass(slots=True)
class Kernels:
    """What runs: ``reads[k]`` are the nodes with buffers (and the loops) that kernel k waits for, ``overwrites[k]``
    those that it may write over; both only for nodes that are kernels.
    """

    nodes: list[Node]
    reads: dict[int, frozenset[int]]
    overwrites: dict[int, frozenset[int]]
    owner: dict[int, int]


def _kernels(arrays: Arrays, reductions_read_memory: bool) -> Kernels:
    nodes = arrays.nodes
    real = _with_buffers(arrays, reductions_read_memory)
    stands = _standing_renames(nodes)
    count = len(nodes)
    reads: dict[int, frozenset[int]] = {}
    overwrites: dict[int, frozenset[int]] = {}
    owner: dict[int, int] = {}
    seen: list[frozenset[int]] = [frozenset()] * count  # what a kernel reads that computes the node itself
    equal: list[frozenset[int]] = [frozenset()] * count  # … and of these, what it reads at equal positions only
    view: list[frozenset[int]] = [frozenset()] * count  # what a kernel reads that is given the node's buffer
    for number, node in enumerate(nodes):
        if node.form is Form.INPUT:
            owner[number] = number
            seen[number] = equal[number] = view[number] = frozenset((number,))
            continue
        if real[number] in (None, False, SWALLOWED) and node.form is not Form.RENAME:
            if node.inputs and real[number] is not None:
                given = view if real[number] is SWALLOWED else seen
                seen[number] = frozenset().union(*[given[i] for i in node.inputs])
                equal[number] = _equal(node, seen, equal)
                view[number] = seen[number]
            continue
        if node.form is Form.RENAME:
            source = node.inputs[0]
            if source in owner:
                owner[number] = owner[source]
            view[number] = frozenset().union(*[view[i] for i in node.inputs])
            seen[number] = seen[source] | view[number] if len(node.inputs) > 1 else seen[source]
            equal[number] = equal[source]
            if number in stands and source in owner and len(node.inputs) == 1:
                reads[number], view[number] = view[number], frozenset((number,))
            continue
        owner[number] = number
        own = frozenset((number,))
        inner = seen if node.form in FUSED or (node.form is Form.REDUCE and not reductions_read_memory) else view
        reads[number] = frozenset().union(*[inner[i] for i in node.inputs])
        view[number] = own
        if node.form in FUSED:
            overwrites[number] = _equal(node, seen, equal)
            through = node.form is Form.CHEAP and node.unary
            seen[number] = reads[number] if through and len(reads[number]) <= 2 else own
            equal[number] = overwrites[number] if through and len(reads[number]) <= 2 else own
        else:
            overwrites[number] = view[node.inputs[0]] if node.form is Form.IN_PLACE and node.inputs else frozenset()
            seen[number] = equal[number] = own
    return Kernels(nodes, reads, overwrites, owner)


def _standing_renames(nodes: list[Node]) -> set[int]:
    """Changes of shape that are steps of their own: no kernel that makes the array can make it in the new shape."""
    users = Counter(i for node in nodes for i in set(node.inputs))
    return {
        number
        for number, node in enumerate(nodes)
        if node.form is Form.RENAME
        and nodes[node.inputs[0]].form is not Form.RENAME
        and not (nodes[node.inputs[0]].form in FUSED and users[node.inputs[0]] == 1)
    }


def _equal(node: Node, seen: list[frozenset[int]], equal: list[frozenset[int]]) -> frozenset[int]:
    if not node.elementwise:
        return frozenset()
    moved: frozenset[int] = frozenset().union(*[seen[i] - equal[i] for i in node.inputs])
    return frozenset().union(*[equal[i] for i in node.inputs]) - moved


def _with_buffers(arrays: Arrays, reductions_read_memory: bool) -> list[bool | str | None]:
    """For each node whether it is kept in memory; ``None`` where nothing reads it."""
    nodes = arrays.nodes
    real: list[bool | str | None] = [None] * len(nodes)
    whole = _not_duplicated(nodes)
    uses = [0] * len(nodes)
    needed = bytearray(len(nodes))
    reduced = bytearray(len(nodes))
    for output in arrays.outputs:
        if output is not None:
            uses[output] += 1
            needed[output] = 1
    for number in range(len(nodes) - 1, -1, -1):
        node = nodes[number]
        if node.form is Form.INPUT:
            real[number] = True
            continue
        if not uses[number] and node.form is not Form.LOOP:
            continue
        if node.form is Form.RENAME:
            real[number] = False
            for i in node.inputs:
                uses[i] += uses[number]
                needed[i] |= needed[number]
                reduced[i] |= reduced[number]
            continue
        swallowed = reduced[number] and node.taken_in and uses[number] == 1 and not needed[number]
        keep = node.form not in FUSED or bool(needed[number]) or (node.form is Form.COSTLY and uses[number] > 1)
        keep = keep or number in whole or (bool(reduced[number]) and not swallowed)
        real[number] = SWALLOWED if swallowed and not keep else keep
        for i in dict.fromkeys(node.inputs):
            uses[i] += 1
            if node.form in REAL_BUFFERS:
                needed[i] = 1
            elif (node.form is Form.REDUCE and reductions_read_memory) or (swallowed and not keep):
                reduced[i] = 1
            elif nodes[i].form is Form.COSTLY and nodes[i].size_bytes < node.size_bytes:
                needed[i] = 1
    return real


def _not_duplicated(nodes: list[Node]) -> set[int]:
    """Cheap nodes of several large inputs that XLA does not compute in every kernel that needs them.

    It refuses when from one use a path leads through a kernel to another use: then not all of them can be one kernel.
    """
    users = Counter(i for node in nodes for i in set(node.inputs))
    bit: dict[int, int] = {}
    soft = [0] * len(nodes)
    hard = [0] * len(nodes)
    refused = 0
    for number, node in enumerate(nodes):
        near = far = 0
        for i in node.inputs:
            near |= soft[i]
            far |= hard[i]
        if node.form is Form.RENAME:
            soft[number], hard[number] = near, far
            continue
        refused |= near & far
        if node.form not in FUSED or (node.form is Form.COSTLY and users[number] > 1):
            near, far = 0, near | far
        elif node.form is Form.CHEAP and not node.unary and users[number] > 1:
            bit[number] = 1 << len(bit)
            near |= bit[number]
        soft[number], hard[number] = near, far
    return {number for number, mask in bit.items() if refused & mask}


def _order(kernels: Kernels, first: int) -> dict[int, int]:
    """Position of each kernel when every kernel queues up as soon as all it reads is there; inputs stand at 0.

    Positions before ``first`` are left free: there the copies of donated inputs are made, one after the other."""
    users: dict[int, list[int]] = {}
    waiting: dict[int, int] = {}
    queue: deque[int] = deque()
    for number, node in enumerate(kernels.nodes):
        if node.form is Form.INPUT:
            queue.append(number)
        elif number in kernels.reads:
            waiting[number] = len(kernels.reads[number])
            for read in kernels.reads[number]:
                users.setdefault(read, []).append(number)
            if not kernels.reads[number]:
                queue.append(number)
    position: dict[int, int] = {}
    time = first - 1
    while queue:
        number = queue.popleft()
        if kernels.nodes[number].form is Form.INPUT:
            position[number] = 0
        else:
            time += 1
            position[number] = time
        for user in users.get(number, ()):
            waiting[user] -= 1
            if not waiting[user]:
                queue.append(user)
    return position


@dataclass(slots=True)
class Tenancy:
    """A buffer: the nodes that live in it one after the other, and from when to when."""

    node: int
    size_bytes: int
    start: int
    end: int


@dataclass
class Timeline:
    """The scratch space of one level."""

    temp_bytes: int
    tenants: list[tuple[Node, int]]


def timeline(arrays: Arrays, platform: str) -> Timeline:
    """The peak of a level and who lives there at that moment."""
    kernels = _kernels(arrays, platform == "cpu")
    position = _order(kernels, len(arrays.pairs) + 1)
    end: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for kernel, reads in kernels.reads.items():
        for read in reads:
            owner = kernels.owner.get(read, read)
            end[owner] = max(end.get(owner, 0), position[kernel])
            readers.setdefault(owner, []).append(kernel)
    last = len(position) + len(arrays.pairs) + 1
    fixed = {kernels.owner[o] for o in arrays.outputs if o is not None and o in kernels.owner}
    buffers, gaps = _claims(arrays, kernels, position, end, readers, last)
    buffers += _buffers(kernels, position, end, fixed)
    inner: list[tuple[int, Timeline]] = []
    for number, node in enumerate(arrays.nodes):
        if node.inner is not None:
            inner.append((position[number], timeline(node.inner, platform)))
    buffers = _lodge(buffers, gaps)
    return _peak(arrays.nodes, buffers, inner, last)


def _claims(
    arrays: Arrays,
    kernels: Kernels,
    position: dict[int, int],
    end: dict[int, int],
    readers: dict[int, list[int]],
    last: int,
) -> tuple[list[Tenancy], list[Tenancy]]:
    """Copies of donated inputs that are read after their successors are written, and when donated buffers are idle."""
    pairs = []
    for source, output in arrays.pairs:
        result = arrays.outputs[output]
        given = arrays.inputs[source]
        if result is None or result not in kernels.owner or kernels.owner[result] == given:
            continue
        successor = kernels.owner[result]
        if kernels.nodes[successor].form is not Form.INPUT:
            pairs.append((given, successor))
    before = _ancestors(kernels, position, {k for given, _ in pairs for k in readers.get(given, ())})
    copies, gaps = [], []
    for number, (given, successor) in enumerate(pairs, start=1):
        size = kernels.nodes[given].size_bytes
        safe = all(
            (given in kernels.overwrites.get(successor, ())) if reader == successor else before(reader, successor)
            for reader in readers.get(given, ())
        )
        if not safe:
            copies.append(Tenancy(given, size, number, end[given]))
        gaps.append(Tenancy(given, size, end.get(given, 0) if safe else number, position[successor]))
    return copies, gaps


def _ancestors(kernels: Kernels, position: dict[int, int], asked: set[int]):  # type: ignore[no-untyped-def]
    """A test whether kernel a must run before kernel b, for a in ``asked``."""
    bit = {kernel: 1 << index for index, kernel in enumerate(sorted(asked))}
    reached: dict[int, int] = {}
    for kernel in sorted(kernels.reads, key=position.__getitem__):
        mask = 0
        for read in kernels.reads[kernel]:
            mask |= reached.get(read, 0)
        reached[kernel] = mask | bit.get(kernel, 0)
    return lambda a, b: bool(reached[b] & bit[a])


def _buffers(kernels: Kernels, position: dict[int, int], end: dict[int, int], fixed: set[int]) -> list[Tenancy]:
    """All scratch buffers; a kernel that may write over an operand that dies with it takes its buffer."""
    found: dict[int, Tenancy] = {}
    for number in sorted(kernels.reads, key=position.__getitem__):
        node = kernels.nodes[number]
        if node.form in (Form.LOOP, Form.RENAME) or number in fixed:
            continue
        now = position[number]
        stop = max(end.get(number, now), now)
        for read in kernels.overwrites.get(number, ()):
            old = found.get(kernels.owner.get(read, read))
            if old is not None and old.end == now and old.size_bytes == node.size_bytes:
                old.end = stop
                old.node = number
                found[number] = old
                break
        else:
            found[number] = Tenancy(number, node.size_bytes, now, stop)
    return list({id(tenancy): tenancy for tenancy in found.values()}.values())


def _lodge(buffers: list[Tenancy], gaps: list[Tenancy]) -> list[Tenancy]:
    """Move buffers into donated inputs while those are idle: big ones first, each into the smallest that is free."""
    taken: list[list[Tenancy]] = [[] for _ in gaps]
    order = sorted(range(len(gaps)), key=lambda g: gaps[g].size_bytes)
    kept = []
    for number, buffer in enumerate(sorted(buffers, key=lambda b: -b.size_bytes)):
        home = None
        if number < LODGERS:
            for g in order:
                gap = gaps[g]
                if gap.size_bytes < buffer.size_bytes or buffer.start <= gap.start or buffer.end >= gap.end:
                    continue
                if all(buffer.end < other.start or other.end < buffer.start for other in taken[g]):
                    home = taken[g]
                    break
        if home is None:
            kept.append(buffer)
        else:
            home.append(buffer)
    return kept


def _peak(nodes: list[Node], buffers: list[Tenancy], inner: list[tuple[int, Timeline]], last: int) -> Timeline:
    change = [0] * (last + 2)
    for buffer in buffers:
        change[buffer.start] += buffer.size_bytes
        change[buffer.end + 1] -= buffer.size_bytes
    for moment, body in inner:
        change[moment] += body.temp_bytes
        change[moment + 1] -= body.temp_bytes
    held = peak = when = 0
    for moment, delta in enumerate(change):
        held += delta
        if held > peak:
            peak, when = held, moment
    tenants = [(nodes[b.node], b.size_bytes) for b in buffers if b.start <= when <= b.end]
    for moment, body in inner:
        if moment == when:
            tenants.extend(body.tenants)
    return Timeline(max(peak, packed_bytes(buffers, PACKED)), tenants)


def packed_bytes(buffers: list[Tenancy], most: int) -> int:
    """Bytes of one block that holds the ``most`` biggest buffers at fixed offsets, buffers of overlapping times apart.

    Biggest first, each into the smallest hole that is long enough (XLA's global decreasing size, best fit); ties in
    two orders, of which the better counts.
    """
    orders = (lambda b: (-b.size_bytes, b.start), lambda b: (-b.size_bytes, b.start - b.end))
    return min(_pack(sorted(buffers, key=order)[:most]) for order in orders)


def _pack(buffers: list[Tenancy]) -> int:
    start, end, low, high = np.zeros((4, len(buffers)), dtype=np.int64)
    for number, buffer in enumerate(buffers):
        near = (start[:number] <= buffer.end) & (end[:number] >= buffer.start)
        best, place, bottom = None, 0, 0
        lows, highs = low[:number][near], high[:number][near]
        for k in np.argsort(lows, kind="stable"):
            hole = lows[k] - bottom
            if hole >= buffer.size_bytes and (best is None or hole < best):
                best, place = hole, bottom
            bottom = max(bottom, highs[k])
        place = bottom if best is None else place
        start[number], end[number] = buffer.start, buffer.end
        low[number], high[number] = place, place + buffer.size_bytes
    return int(high.max(initial=0))


def predict_memory(
    program: SpmdProgram,
    *,
    fusion: Fusion,
    state_pairs: tuple[tuple[int, int], ...],
    donated: frozenset[int],
    platform: str,
) -> Memory:
    pairs = tuple((a, b) for a, b in state_pairs if a in donated)
    arrays = arrays_of(program, pairs, platform)
    line = timeline(arrays, platform)
    nodes = arrays.nodes
    argument = sum(nodes[i].size_bytes for i in arrays.inputs)
    output = 0
    for position, buffer in enumerate(program.outputs):
        output += 0 if buffer is None else nodes[arrays.outputs[position]].size_bytes
    alias = sum(nodes[arrays.inputs[a]].size_bytes for a, b in pairs)
    kinds = Counter()
    for node, size in line.tenants:
        kinds[node.tenant.value] += size
    return Memory(argument, output + 8 * len(program.outputs), alias, line.temp_bytes, dict(kinds), ())
