"""NCCL's sends and receives between threads of this process, on memory of the host, by NCCL's rules.

    ranks       a communicator is there when all its ranks have joined, each once
    matching    of two ranks the n-th send meets the n-th receive; there are no names
    sizes       both say the same words and as many, or the communicator breaks
    streams     one kernel after the other; a kernel ends when all its sends and receives have met their other ends
    groups      what a thread sends and receives in a group is one kernel on each stream

NCCL waits for ever for what does not come.  Here whoever waits is told after a limit where every stream stands.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import TransportError
from autopar.runtime.nccl import UniqueId, Word


@dataclass(eq=False)
class _Transfer:
    """One side of a meeting."""

    is_send: bool
    name: UniqueId
    rank: int
    peer: int
    pointer: int
    count: int
    word: Word
    is_over: bool = False

    @property
    def link(self) -> tuple[UniqueId, int, int]:
        return (self.name, self.rank, self.peer) if self.is_send else (self.name, self.peer, self.rank)

    def __str__(self) -> str:
        way = f"sends to {self.peer}" if self.is_send else f"receives from {self.peer}"
        return f"rank {self.rank} {way}: {self.count} of {self.word.value} bytes"


class FakeNccl:
    """One for all processes of a run, which are threads here."""

    def __init__(self, limit_seconds: float = 120.0) -> None:
        self.limit_seconds = limit_seconds
        self.changed = threading.Condition()
        self.kernels = 0
        self.meetings = 0
        self._names = itertools.count(1)
        self._joined: defaultdict[UniqueId, dict[int, int]] = defaultdict(dict)
        self._lines: defaultdict[tuple[UniqueId, int, int], deque[_Transfer]] = defaultdict(deque)
        self._streams: list[FakeStream] = []
        self._aborted: set[tuple[UniqueId, int]] = set()
        self._failure: str | None = None
        self._open = threading.local()

    # --- what NCCL offers ---

    def unique_id(self) -> UniqueId:
        return (next(self._names),)

    def stream(self, device: Any) -> FakeStream:
        stream = FakeStream(self, device)
        with self.changed:
            self._streams.append(stream)
        return stream

    def join(self, name: UniqueId, size: int, ranks: Mapping[int, Any]) -> dict[int, Any]:
        with self.changed:
            joined = self._joined[name]
            for rank in ranks:
                assert 0 <= rank < size and rank not in joined, f"rank {rank} of {size} joins twice, or does not exist"
                joined[rank] = size
            self.changed.notify_all()
            self._wait(lambda: len(joined) == size, f"{sorted(joined)} of {size} ranks have joined")
            assert set(joined.values()) == {size}, "ranks differ on the size of their communicator"
        return {rank: FakeRank(self, name, rank, size) for rank in ranks}

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        assert not hasattr(self._open, "work"), "our groups are not nested"
        work: dict[FakeStream, list[_Transfer]] = {}
        self._open.work = work
        try:
            yield
        finally:
            del self._open.work
            self._start(work)

    # --- what goes on inside ---

    def put(self, stream: FakeStream, transfer: _Transfer) -> None:
        work = getattr(self._open, "work", None)
        if work is None:
            self._start({stream: [transfer]})
        else:
            work.setdefault(stream, []).append(transfer)

    def _start(self, work: Mapping[FakeStream, list[_Transfer]]) -> None:
        with self.changed:
            if self._failure is not None:
                raise TransportError(self._failure)
            for stream, kernel in work.items():
                if any((transfer.name, transfer.rank) in self._aborted for transfer in kernel):
                    raise TransportError("a communicator is used that was aborted")
                stream.queue.append(kernel)
                stream.put += 1
                self.kernels += 1
            self._advance()

    def abort(self, name: UniqueId, rank: int) -> None:
        """Ends this rank's side alone."""
        with self.changed:
            self._aborted.add((name, rank))
            for transfer in [one for stream in self._streams for kernel in stream.queue for one in kernel]:
                if (transfer.name, transfer.rank) == (name, rank) and not transfer.is_over:
                    transfer.is_over = True
                    if transfer in self._lines[transfer.link]:
                        self._lines[transfer.link].remove(transfer)
            self._advance()

    def _advance(self) -> None:
        """Post what stands first in every stream, and let ends meet, for as long as anything moves."""
        moved = True
        while moved:
            moved = False
            for stream in self._streams:
                while stream.queue:
                    if not stream.is_posted:
                        stream.is_posted = True
                        for transfer in stream.queue[0]:
                            self._post(transfer)
                    if not all(transfer.is_over for transfer in stream.queue[0]):
                        break
                    stream.queue.popleft()
                    stream.done += 1
                    stream.is_posted = False
                    moved = True
        self.changed.notify_all()

    def _post(self, transfer: _Transfer) -> None:
        if transfer.is_over or self._failure is not None:
            return
        waiting = self._lines[transfer.link]
        if not waiting or waiting[0].is_send is transfer.is_send:
            waiting.append(transfer)
            return
        other = waiting.popleft()
        if (other.word, other.count) != (transfer.word, transfer.count):
            self._failure = f"NCCL's rules are broken: {other}, but {transfer}"
            return
        there, here = (transfer, other) if other.is_send else (other, transfer)
        ctypes.memmove(there.pointer, here.pointer, there.count * there.word.value)
        transfer.is_over = other.is_over = True
        self.meetings += 1

    def wait_until(self, stream: FakeStream, place: int) -> None:
        with self.changed:
            self._wait(lambda: stream.done >= place, "a stream does not go on")

    def _wait(self, holds: Any, what: str) -> None:
        self.changed.wait_for(lambda: holds() or self._failure is not None, self.limit_seconds)
        if self._failure is not None:
            raise TransportError(self._failure)
        if not holds():
            stand = [str(transfer) for one in self._streams if one.queue for transfer in one.queue[0]]
            raise TransportError(
                f"{what}, though it had {self.limit_seconds:g} s: {'; '.join(stand) or 'nothing is under way'}"
            )


class FakeStream:
    """A queue of kernels; none has a handle, for memory of the host has no streams."""

    handle = None

    def __init__(self, library: FakeNccl, device: Any) -> None:
        self.library, self.device = library, device
        self.queue: deque[list[_Transfer]] = deque()
        self.is_posted = False
        self.put = self.done = 0

    def mark(self) -> FakeMark:
        return FakeMark(self, self.put)


@dataclass(frozen=True)
class FakeMark:
    """A place in a stream."""

    stream: FakeStream
    place: int

    def is_over(self) -> bool:
        return self.stream.done >= self.place

    def wait(self) -> None:
        self.stream.library.wait_until(self.stream, self.place)

    def go_before(self, handle: int | None) -> None:
        assert handle is None
        self.wait()


@dataclass(frozen=True)
class FakeRank:
    """One rank of a communicator."""

    library: FakeNccl
    name: UniqueId
    rank: int
    size: int

    def send(self, pointer: int, count: int, word: Word, peer: int, stream: FakeStream) -> None:
        self._put(stream, _Transfer(True, self.name, self.rank, peer, pointer, count, word))

    def receive(self, pointer: int, count: int, word: Word, peer: int, stream: FakeStream) -> None:
        self._put(stream, _Transfer(False, self.name, self.rank, peer, pointer, count, word))

    def abort(self) -> None:
        self.library.abort(self.name, self.rank)

    def _put(self, stream: FakeStream, transfer: _Transfer) -> None:
        assert transfer.pointer and transfer.count > 0, "nothing is sent, or nowhere"
        assert 0 <= transfer.peer < self.size and transfer.peer != self.rank
        self.library.put(stream, transfer)
