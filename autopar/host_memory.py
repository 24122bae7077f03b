"""May the C library give memory back that the next step will want again?

XLA:CPU asks the C library for what is new to a call: its scratch block and the results that take over no argument's memory.
Blocks of m bytes that are given back to the operating system come back as new pages, mapped and cleared one by one at their
first touch: with pages of p bytes and f seconds a fault a step pays

    seconds = f · m / p

which on Linux (4 KiB, 0.25 µs and the clearing) is as long as it takes to go over the block two or three times, a fifth of a
small GPT's step on eight virtual devices.  The GNU C library gives back blocks above a threshold (at most 32 MiB by its own
choice) and what is free at the end of a heap.  A process that trains wants neither: it asks for the same blocks in every step.

What is kept stays with the process: the most that it needed at one time, and what lies between (the process of ``make demo``
grows by a twentieth).  The heap of a thread other than the first ends at 64 MiB, and larger blocks go back whatever is said; only
in the first heap they stay.  But threads that share a heap wait for one another whenever kernels ask for memory, and its list of
free blocks is long: with one heap for all, a Wide-ResNet's step on eight virtual devices took 1.1 to 1.5 times what it takes with
two, a U-Net's 1.05 to 1.2 times (``benchmarks/heaps.py``), while more than two gain little.  So there are two, and about half of
the threads keep blocks of any size.  How many there are must be known before threads begin: by the environment
(:func:`variables`), or at least before JAX looks for devices; threads that have begun keep the heaps that they have.

Other C libraries are left as they are, and so is a process whose environment says itself how the C library shall have its memory
(``MALLOC_…``, or ``GLIBC_TUNABLES`` of ``glibc.malloc``).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

_NEVER_BYTES = (1 << 31) - 1
"""No block is given back that is smaller; more does not fit into an argument of ``mallopt``."""
_AT_ONCE_BYTES = 64 << 20
"""So much more than wanted is asked of the operating system: a heap that grows by little gives back as little."""

# Names of the environment, and numbers of <malloc.h>.
_SETTINGS: Mapping[str, tuple[int, int]] = {
    "MALLOC_TRIM_THRESHOLD_": (-1, _NEVER_BYTES),
    "MALLOC_TOP_PAD_": (-2, _AT_ONCE_BYTES),
    "MALLOC_MMAP_THRESHOLD_": (-3, _NEVER_BYTES),
    "MALLOC_ARENA_MAX": (-8, 2),
}
_TUNABLES = "GLIBC_TUNABLES"
"""The other way to say such things, of many parts of the C library."""


def keep_freed_memory() -> bool:
    """Have this process keep what it frees; returns whether it does by this call's doing.  May be called again."""
    if sys.platform != "linux" or _said(os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    done = [library.mallopt(number, value) for number, value in _SETTINGS.values()]
    return all(done)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What a new process is to be told so that it keeps what it frees; no more than the environment given, where that says it."""
    return _said(environment) or {name: str(value) for name, (_, value) in _SETTINGS.items()}


def _said(environment: Mapping[str, str]) -> dict[str, str]:
    """What an environment says about the C library's memory."""
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith("MALLOC_") or (name == _TUNABLES and "glibc.malloc" in value))
    }
