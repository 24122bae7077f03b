"""How long do collectives take in a world of several processes?

The devices of one CPU process pass arrays through its memory.  Where a mesh lies on several hosts, its processes form a world
(``jax.distributed``), and gloo carries all collectives of it through sockets, those between the devices of one host too: sums of
1 MiB among two devices took 2 ms in one process and 9 ms in a world.  It is processors that copy, add up and wait.

A process that is a world alone does the same without a network.  Collectives are chosen when JAX starts, so another process is
started for it: it measures as :mod:`autopar.measured_collectives` says, and tells what it found line by line.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO

import jax
import msgspec

from autopar.bench import Bench
from autopar.cluster import Platform
from autopar.cores import THREADS_VARIABLE, quota_cores, threads_of_xla
from autopar.curves import Curve, Samples
from autopar.measured_collectives import collective_curves
from autopar.profile import CollectiveCurve
from autopar.runtime.processes import environment_of, free_port
from autopar.timing import timer_of

SILENT_SECONDS = 120.0
"""A process that says nothing for so long is given up."""
_HOST = "127.0.0.1"


class Asked(msgspec.Struct, frozen=True):
    """What is measured: collectives of so many bytes between so many devices, ``seconds`` or more for each."""

    num_devices: int
    full_bytes: tuple[int, ...]
    work_side: int
    seconds: float
    least_runs: int


class _Now(msgspec.Struct, frozen=True, tag=True):
    """A line of the other process: what it measures now."""

    what: str


class _Measured(msgspec.Struct, frozen=True, tag=True):
    """A line of the other process: a curve."""

    kind: str
    group_size: int
    samples: Samples


def world_curves(asked: Asked, say: Callable[[str], None]) -> tuple[CollectiveCurve, ...]:
    """Curves of every kind and group size; none where no world can be formed here, of which ``say`` is told as well."""
    if asked.num_devices < 2:
        return ()
    found: tuple[CollectiveCurve, ...] = ()
    threads = {THREADS_VARIABLE: str(threads_of_xla(asked.num_devices))}
    with subprocess.Popen(
        [sys.executable, "-m", __name__, msgspec.json.encode(asked).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment_of(Platform.CPU), **threads},
    ) as process:
        assert process.stdout is not None
        try:
            found = tuple(_curves(process.stdout, say))
            process.wait(SILENT_SECONDS)
        except (TimeoutError, subprocess.TimeoutExpired):
            pass
        finally:
            process.kill()  # if it goes on, because it is late or who measures was interrupted
    if process.returncode:
        say("collectives between processes could not be measured")
        return ()
    return found


def _curves(stream: IO[bytes], say: Callable[[str], None]) -> Iterator[CollectiveCurve]:
    for line in _lines(stream):
        if not line.startswith(b"{"):  # gloo says who is connected
            continue
        match msgspec.json.decode(line, type=_Now | _Measured):
            case _Now(what):
                say(f"between processes, {what}")
            case _Measured(kind, group_size, samples):
                yield CollectiveCurve(kind, group_size, Curve(samples))


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Raises ``TimeoutError`` when none comes for :data:`SILENT_SECONDS`."""
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            waiting.put(line)
        waiting.put(b"")

    threading.Thread(target=read, daemon=True, name="autopar-world").start()
    while True:
        try:
            line = waiting.get(timeout=SILENT_SECONDS)
        except queue.Empty:
            raise TimeoutError from None
        if not line:
            return
        yield line


def main() -> None:
    """In the other process: form a world, measure, tell."""
    asked = msgspec.json.decode(sys.argv[1], type=Asked)
    jax.config.update("jax_num_cpu_devices", asked.num_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{_HOST}:{free_port(_HOST)}"
    jax.distributed.initialize(address, 1, 0, coordinator_bind_address=address)
    bench = Bench(jax.devices(), timer_of(asked.seconds, asked.least_runs, quota_cores()))
    curves = collective_curves(bench, asked.full_bytes, asked.work_side, lambda what: _tell(_Now(what)))
    for one in curves:
        _tell(_Measured(one.kind, one.group_size, one.curve.samples))


def _tell(told: _Now | _Measured) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
