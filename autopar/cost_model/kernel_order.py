"""When does each kernel run?

XLA:CPU runs kernels breadth first: a kernel queues up when the last of its operands is there, and first come is first served.
So gathered parameters and zeros to accumulate into exist from the very start.  For other platforms the order is a guess.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from autopar.cost_model.buffers import Kernels
from autopar.cost_model.nodes import Form
from autopar.devices import Platform


def order_of(kernels: Kernels, first: int, platform: Platform) -> dict[int, int]:
    """Position of each kernel, from ``first`` on; inputs stand at 0.

    Breadth first on CPU; elsewhere in program order, which is close to what schedulers that save memory choose.  XLA:GPU
    then moves kernels beside collectives, but not in programs that rematerialise (:mod:`autopar.runtime.xla_options`).
    """
    inputs = [number for number, node in enumerate(kernels.nodes) if node.form is Form.INPUT]
    position = dict.fromkeys(inputs, 0)
    if platform is not Platform.CPU:
        return position | {kernel: first + time for time, kernel in enumerate(sorted(kernels.reads))}
    users: dict[int, list[int]] = {}
    waiting: dict[int, int] = {}
    for kernel, reads in sorted(kernels.reads.items(), key=lambda item: kernels.nodes[item[0]].is_made_anew):
        waiting[kernel] = len(reads)
        for read in reads:
            users.setdefault(read, []).append(kernel)
    queue = deque([*inputs, *(kernel for kernel, count in waiting.items() if not count)])
    time = first
    while queue:
        number = queue.popleft()
        if number in kernels.reads:
            position[number] = time
            time += 1
        for user in users.get(number, ()):
            waiting[user] -= 1
            if not waiting[user]:
                queue.append(user)
    return position


def precedence(kernels: Kernels, position: Mapping[int, int], asked: set[int]) -> Callable[[int, int], bool]:
    """A test whether kernel a (one of ``asked``) must run before kernel b, whatever the order."""
    bits = {kernel: 1 << index for index, kernel in enumerate(sorted(asked))}
    reached: dict[int, int] = {}
    for kernel in sorted(kernels.reads, key=position.__getitem__):
        mask = bits.get(kernel, 0)
        for read in kernels.reads[kernel]:
            mask |= reached.get(read, 0)
        reached[kernel] = mask
    return lambda a, b: bool(reached[b] & bits[a])
