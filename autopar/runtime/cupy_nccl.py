"""NCCL and CUDA's streams as :mod:`autopar.runtime.nccl` asks for them, by way of cupy; nothing is decided here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.errors import ClusterError
from autopar.runtime.nccl import Communicator, Mark, Stream, UniqueId, Word


def nccl_lack() -> str | None:
    """Why there is no NCCL in this process, or None.

    To be asked when JAX has found its GPUs: it has then loaded the NCCL that came with it, and cupy takes the same.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return f"cupy cannot be imported ({error})"
    return None if nccl.available else "cupy finds no NCCL"


class CupyNccl:
    """See :class:`autopar.runtime.nccl.Library`."""

    def __init__(self) -> None:
        """Raises ``ClusterError`` where there is no NCCL."""
        if (lack := nccl_lack()) is not None:
            raise ClusterError(f'{lack}; install the extra on every host (pip install "autopar[nccl]")')
        import cupy
        from cupy.cuda import nccl

        self._cupy, self._nccl = cupy, nccl
        self._types = {
            Word.ONE_BYTE: nccl.NCCL_UINT8,
            Word.TWO_BYTES: nccl.NCCL_FLOAT16,
            Word.FOUR_BYTES: nccl.NCCL_UINT32,
            Word.EIGHT_BYTES: nccl.NCCL_UINT64,
        }

    def unique_id(self) -> UniqueId:
        """See :class:`autopar.runtime.nccl.Library`."""
        return self._nccl.get_unique_id()

    def stream(self, device: Any) -> Stream:
        """See :class:`autopar.runtime.nccl.Library`."""
        return _Stream(self._cupy.cuda, device.local_hardware_id)

    def join(self, name: UniqueId, size: int, ranks: Mapping[int, Any]) -> dict[int, Communicator]:
        """See :class:`autopar.runtime.nccl.Library`."""
        found: dict[int, Communicator] = {}
        with self.group():  # several ranks of one thread wait for each other, unless they are told at once
            for rank, device in ranks.items():
                with self._cupy.cuda.Device(device.local_hardware_id) as current:
                    communicator = self._nccl.NcclCommunicator(size, name, rank)
                    found[rank] = _Rank(communicator, current, self._types)
        return found

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """See :class:`autopar.runtime.nccl.Library`."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()


class _Rank:
    """See :class:`autopar.runtime.nccl.Communicator`."""

    def __init__(self, communicator: Any, device: Any, types: Mapping[Word, int]) -> None:
        self._communicator, self._device, self._types = communicator, device, types

    def send(self, pointer: int, count: int, word: Word, peer: int, stream: Stream) -> None:
        with self._device:
            self._communicator.send(pointer, count, self._types[word], peer, stream.handle)

    def receive(self, pointer: int, count: int, word: Word, peer: int, stream: Stream) -> None:
        with self._device:
            self._communicator.recv(pointer, count, self._types[word], peer, stream.handle)

    def abort(self) -> None:
        with self._device:
            self._communicator.abort()


class _Stream:
    """See :class:`autopar.runtime.nccl.Stream`."""

    def __init__(self, cuda: Any, device: int) -> None:
        self._cuda = cuda
        self._device = cuda.Device(device)
        with self._device:
            self._stream = cuda.Stream(non_blocking=True)

    @property
    def handle(self) -> int:
        return int(self._stream.ptr)

    def mark(self) -> Mark:
        with self._device:
            event = self._stream.record(self._cuda.Event(block=True, disable_timing=True))
        return _Mark(self._cuda, self._device, event)


class _Mark:
    """See :class:`autopar.runtime.nccl.Mark`."""

    def __init__(self, cuda: Any, device: Any, event: Any) -> None:
        self._cuda, self._device, self._event = cuda, device, event

    def is_over(self) -> bool:
        return bool(self._event.done)

    def wait(self) -> None:
        self._event.synchronize()

    def go_before(self, handle: int | None) -> None:
        if handle is None:
            self.wait()
            return
        with self._device:
            self._cuda.runtime.streamWaitEvent(handle, self._event.ptr)
