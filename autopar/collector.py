"""Planning makes millions of small objects that live to its end; how often does Python look through all of them?

The cyclic collector of CPython visits every container object each time that enough new ones have come up.  A third of the
time of tracing and planning a large step goes there, and next to nothing is found.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collection of cycles inside; afterwards the collector is as it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
