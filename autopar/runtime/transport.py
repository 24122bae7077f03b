"""How does a value get from the mesh of one stage to that of another while both run?

A message is a transfer (an entry of the table of transfers) at one microbatch.  The meshes may be driven by several threads:
``send`` posts a message and returns, ``receive`` waits until it is posted.  Messages of one name arrive in the order in
which they were sent, so a sender may be a step ahead.

In one process an array is on its way as soon as it is sent, and takes memory on the receiving mesh from then on.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax

from autopar.errors import InternalError, TransportError
from autopar.runtime.cross_mesh import Mover, Sent
from autopar.runtime.run_ahead import Started, freely
from autopar.schedule.cross_mesh import CrossMeshTransfer

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Message:
    """One array that crosses meshes: the number of its transfer, and its microbatch (negative: once per step)."""

    transfer: int
    microbatch: int

    def __str__(self) -> str:
        return f"transfer {self.transfer}" + (f" of microbatch {self.microbatch}" if self.microbatch >= 0 else "")


Posted: TypeAlias = Callable[[], jax.Array]
"""An array that is on its way and is put together when it is first read: to be called once, by the mesh's own thread."""


class Transport(Protocol):
    """What an interpreter of instructions needs to exchange values with other meshes."""

    def send(self, message: Message, array: jax.Array) -> None:
        """Send an array that lies on the transfer's source; it may be donated or deleted afterwards."""

    def receive(self, message: Message) -> jax.Array | Posted:
        """The array in the transfer's landing layout; waits until it was sent, not until it is computed.

        Raises ``TransportError`` if it does not come.
        """


class SteppedTransport(Transport, Protocol):
    """A transport whose other ends are in other processes, perhaps in another step."""

    def begin(self, step: int) -> None:
        """Messages from now on belong to that step; raises ``TransportError`` where there can be none any more."""


class InProcessTransport:
    """The transport between meshes of one process, each driven by a thread of its own or all by one."""

    def __init__(
        self,
        transfers: Mapping[int, CrossMeshTransfer],
        devices: Sequence[Any],
        timeout_seconds: float = 600.0,
        started: Callable[[int], tuple[Started, Started]] = lambda number: (freely, freely),
    ) -> None:
        """``devices[i]`` is the JAX device with global id ``i``; ``timeout_seconds`` is how long a receiver waits.

        ``started`` gives what a transfer tells of its programs on the source mesh, and on the target mesh.
        """
        self._movers = {number: Mover(transfer, devices, started(number)) for number, transfer in transfers.items()}
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._posted: defaultdict[Message, deque[Sent]] = defaultdict(deque)
        self._failure: BaseException | None = None

    def send(self, message: Message, array: jax.Array) -> None:
        """Put the array on its way and post the message; see :class:`Transport`."""
        if (mover := self._movers.get(message.transfer)) is None:
            raise InternalError(f"{message} is in no table of transfers; report this with the program")
        sent = mover.send(array)
        with self._changed:
            self._posted[message].append(sent)
            self._changed.notify_all()

    def receive(self, message: Message) -> jax.Array:
        """The oldest array sent under that name; see :class:`Transport`."""
        return self._movers[message.transfer].land(self._oldest(message))

    def _oldest(self, message: Message) -> Sent:
        with self._changed:
            self._changed.wait_for(
                lambda: self._posted.get(message) or self._failure is not None, self._timeout_seconds
            )
            if waiting := self._posted.get(message):
                sent = waiting.popleft()
                if not waiting:
                    del self._posted[message]
                return sent
            if self._failure is not None:
                raise TransportError(f"{message} will not come: another mesh failed, see the cause") from self._failure
            raise TransportError(
                f"{message} did not come within {self._timeout_seconds:g} s; sent and not yet received: {self._pending()}. "
                "Give it more time, or see what its sender waits for"
            )

    def fail(self, cause: BaseException) -> None:
        """Wake all who wait for a message that was not sent: each raises ``TransportError`` from ``cause``."""
        with self._changed:
            self._failure = cause
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget what was sent and not received, and the failure, so that another step can begin."""
        with self._changed:
            self._posted.clear()
            self._failure = None

    def _pending(self) -> str:
        names = [str(message) for message in self._posted]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return (", ".join(names[:_MOST_NAMED]) or "nothing") + more
