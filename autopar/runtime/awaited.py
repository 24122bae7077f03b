"""How is an array waited for no longer than a limit?  JAX's own waiting has none, and nothing interrupts it.

So a thread waits, and is left behind when it takes too long: a daemon, which the end of the process does not wait for.
"""

from __future__ import annotations

import threading
from typing import Any

import jax

from autopar.runtime.collectives import unwrapped


def is_there(array: Any) -> bool:
    """Whether an array is computed; nobody asks for one that was given away."""
    if array.is_deleted():
        return True
    return bool(unwrapped(array).is_ready())


class Awaited:
    """Owns a thread that waits for some arrays."""

    def __init__(self, arrays: Any) -> None:
        self._is_over = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._wait, args=(arrays,), daemon=True, name="autopar-awaited").start()

    def within(self, seconds: float) -> bool:
        """Whether they are computed now, or when so many seconds have passed; raises what became of them instead."""
        if not self._is_over.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, arrays: Any) -> None:
        try:
            jax.block_until_ready(arrays)
        except Exception as error:  # noqa: BLE001 - told to whoever asks
            self._error = error
        self._is_over.set()
