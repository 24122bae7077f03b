"""How far may the host run ahead of the devices of a mesh?

A started program takes memory for its results at once and waits on its devices until its arguments are there.  A GPU or a TPU
makes the host wait where too many do.  XLA:CPU lets 32 wait on a device; whoever starts one more waits in a thread of the
pool that is to run the others, one for each device.  That pool has as many threads as there are devices (or cores, if these
are more): with all of them so taken no program goes on, and those that meet in a collective end the process after forty
seconds.  Plain ``jax.jit`` is not spared: eight devices, one sum over them, started a hundred times without waiting.

So on CPUs at most ``MOST_STARTED`` programs of a mesh are started and not done.  Those that are not told of (copies, the words
of keys) are few beside them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

MOST_STARTED = 8
"""A quarter of what XLA:CPU allows; more would not keep its devices busier."""

Started: TypeAlias = Callable[[jax.Array], None]
"""Is told a result of each program that was started on a mesh, and returns when another may be."""

Waiter: TypeAlias = Callable[[jax.Array], object]
"""Returns when a result is there; raises RuntimeError where it has been taken over, or its program failed."""


def run_ahead(mesh: jax.sharding.Mesh, wait: Waiter = jax.block_until_ready) -> Started:
    """What to tell of programs that are started on the devices of a mesh; ``wait`` is how a result of one is waited for."""
    return Bounded(MOST_STARTED, wait).started if mesh.devices.flat[0].platform == "cpu" else freely


def freely(result: jax.Array) -> None:
    """Where nothing is waited for."""


class Bounded:
    """Remembers a result of each program, which it keeps alive, until the program is done."""

    def __init__(self, most: int, wait: Waiter = jax.block_until_ready) -> None:
        """``most`` programs may be started and not done."""
        self._most, self._wait = most, wait
        self._running: deque[jax.Array] = deque()
        self._lock = threading.Lock()

    def started(self, result: jax.Array) -> None:
        """See :data:`Started`."""
        with self._lock:
            self._running.append(result)
            if len(self._running) < self._most:
                return
            while self._running:
                try:
                    self._wait(self._running.popleft())
                    return
                except RuntimeError:
                    # Another program has taken it over, which stands behind it and waits for it; or its own failed, and
                    # whoever reads the results learns why.
                    continue


def telling(function: Callable[..., Any], started: Started) -> Callable[..., Any]:
    """The function that starts a program and gives its results, or its one result, and tells of the smallest.

    Of several that are as small it is the last: a train step gives its state first, which the next one takes over, and then
    its loss, which can be waited for.
    """
    place: int | None = None

    def call(*arguments: Any) -> Any:
        nonlocal place
        results = function(*arguments)
        every = results if isinstance(results, list | tuple) else (results,)
        if place is None and every:
            place = min(range(len(every)), key=lambda index: (every[index].nbytes, -index))
        if place is not None:
            started(every[place])
        return results

    return call
