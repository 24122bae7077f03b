"""A training run that outlives its workers: steps, checkpoints, and what happens when a process dies.

    state_0 = init_fn()  or the last checkpoint
    state_k, metrics_k = train_step(state_{k-1}, batch_k)

Batches are a function of the step, so a run that goes back to the checkpoint of step c repeats steps c+1, c+2, … with the same
batches, and its losses are those of a run that nothing happened to, bit for bit where the plan is the same.  Every step's
metrics are given out once, in order, some steps after the step was sent, so that waiting for them holds nothing up.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from autopar.checkpoints import Checkpoints
from autopar.cluster import Cluster
from autopar.errors import CheckpointError, ClusterError, OutOfMemoryError, WorkerError
from autopar.parallelized import Parallelized
from autopar.runtime.remote import RemoteExecutor
from autopar.runtime.replicas import Replicas, Rescued, lies_on_meshes

LAG = 2
"""So many steps are sent before the metrics of one are waited for."""

_log = logging.getLogger(__name__)


class Positioned(Protocol):
    """An iterator that says where it is and goes there, as those of grain do."""

    def __next__(self) -> Any:
        """The next batch."""

    def get_state(self) -> Any:
        """Where it is."""

    def set_state(self, state: Any) -> None:
        """Go there."""


Batches = Callable[[int], Iterable[Any]] | Positioned
"""Either a function of the number of steps done that gives the batches from there on, or an iterator that knows its place."""


@dataclass(frozen=True)
class Recovery:
    """What becomes of a run when processes or hosts of a Ray cluster die.

    ``max_restarts``: after so many failures the run ends with an error.  ``patience_seconds``: so long a host that is gone may
    take to come back; then the plan is made anew for those that are left, and again when it is back (at the next checkpoint).

    ``replicate_every_steps``: so often each host copies its part of the state into its memory (it then holds up to two copies);
    what a dead host had is taken from others that held the same, where there are any, and the run does not go back.  None:
    it goes back to the last checkpoint.
    """

    max_restarts: int = 10
    patience_seconds: float = 60.0
    replicate_every_steps: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_restarts", 0), ("patience_seconds", 0), ("replicate_every_steps", 1)):
            number = getattr(self, name)
            if number is not None and not number >= least:
                raise CheckpointError(f"{name}={number!r}; give a number of {least} or more")


class Run:
    """One training run; iterate over it for ``(step, metrics)``, the metrics as NumPy values.

    ``state`` is the newest state, ``step`` how many steps were sent, ``restarts`` what happened.
    """

    def __init__(
        self,
        train_step: Parallelized,
        init_fn: Callable[[], Any],
        batches: Batches,
        *,
        steps: int,
        checkpoints: Checkpoints | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        """``init_fn`` makes the first state; ``steps`` is the number of the last step.

        Without ``checkpoints`` a run that has lost its state begins anew.
        """
        self._train_step = train_step
        self._init_fn = init_fn
        self._batches = batches
        self._steps = steps
        self._checkpoints = checkpoints
        self._recovery = recovery or Recovery()
        self._replicas = Replicas()
        self._whole: Cluster | None = None  # while the run goes on with fewer hosts
        self._is_returning = False  # it is to go on with all hosts as soon as no step is under way
        self._places: dict[int, Mapping[str, Any]] = {}  # in the data, by the step that copies are of
        self._iterator: Any = None
        self._first_batch: Any = None
        self._pending: deque[tuple[int, Any]] = deque()  # steps that were sent, and their metrics
        self._fetched: deque[tuple[int, Any]] = deque()  # metrics that are there, and were not given out yet
        self._given_out = 0
        self.restarts: list[str] = []
        self.step = 0
        self.state: Any = None

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Run; raises ``WorkerError`` when there were more failures than ``max_restarts``, and names the checkpoint."""
        self._carry_on(self._begin)
        is_over = False
        while not is_over:
            try:
                is_over = self._advance()
            except WorkerError as error:
                self._recover(error)
            while self._fetched:
                number, metrics = self._fetched.popleft()
                if number > self._given_out:  # else it was done again after a failure
                    self._given_out = number
                    yield number, metrics

    def _advance(self) -> bool:
        """Send a step, or wait for the metrics of one; whether all is done."""
        if self._is_returning and not self._pending:
            self._return_to_all_hosts()
        sends = self.step < self._steps and not self._is_returning
        if sends and self._one_step() and len(self._pending) <= LAG:
            return False
        if not self._pending:
            self._finish()
            return True
        self._fetch(1)
        return False

    def _fetch(self, count: int) -> None:
        """Wait for the metrics of the oldest steps that were sent."""
        for _ in range(count):
            number, metrics = self._pending[0]
            self._fetched.append((number, jax.tree.map(np.asarray, metrics)))
            self._pending.popleft()

    # -------------------------------------------------------------------------------------------------------- steps

    def _one_step(self) -> bool:
        """Send a step; False if there is no batch for it, which ends the run."""
        batch = self._first_batch if self._first_batch is not None else next(self._iterator, None)
        self._first_batch = None
        if batch is None:
            self._steps = self.step
            return False
        self.state, metrics = self._train_step(self.state, batch)
        self.step += 1
        self._pending.append((self.step, metrics))
        if self._checkpoints is not None and self._checkpoints.due(self.step):
            self._fetch(len(self._pending))  # a run that comes back here does not do these steps again
            self._checkpoints.save(self.step, self.state, self._position())
            self._is_returning = self._whole is not None and self._are_all_back(self._whole)
        every = self._recovery.replicate_every_steps
        if every is not None and self.step % every == 0 and lies_on_meshes(self.state):
            self._replicas.keep(self.step, (self.state, list(self._pending)))
            self._places = {step: self._places[step] for step in sorted(self._places)[-1:]} | {
                self.step: self._position()
            }
        return True

    def _position(self) -> Mapping[str, Any]:
        known = getattr(self._batches, "get_state", None)
        return {} if known is None else {"batches": _as_json(known())}

    def _begin(self) -> None:
        """The last checkpoint, or the first state; and the batches from there on."""
        found = None
        if self._checkpoints is not None and (latest := self._checkpoints.latest) is not None:
            self._go_to(latest, {})
            found = self._checkpoints.restore(self._train_step, self._init_fn, self._peeked())
        if found is None:
            self._go_to(0, {})
            self.step, self.state = 0, self._train_step.init(self._init_fn, self._peeked())
            return
        self.step, self.state = found.step, found.state
        if "batches" in found.data:
            self._go_to(found.step, found.data)

    def _go_to(self, step: int, data: Mapping[str, Any]) -> None:
        self._first_batch = None
        if not callable(self._batches):
            if "batches" in data:
                self._batches.set_state(_from_json(data["batches"]))
            self._iterator = self._batches
        else:
            self._iterator = iter(self._batches(step))

    def _peeked(self) -> Any:
        """A batch, of which the plan needs the shapes; it stays the next one."""
        if self._first_batch is None:
            self._first_batch = next(self._iterator)
        return self._first_batch

    # ------------------------------------------------------------------------------------------------------ failures

    def _carry_on(self, attempt: Callable[[], None]) -> None:
        """Try until it succeeds or the restarts are used up."""
        while True:
            try:
                attempt()
                return
            except WorkerError as error:
                self._count(error)
                attempt = self._resume

    def _recover(self, error: WorkerError) -> None:
        self._count(error)
        started = time.monotonic()
        rescued = self._rescued()
        if self._checkpoints is not None:
            self._checkpoints.abandon()
        self._pending.clear()
        self.state, self._is_returning = None, False
        self._carry_on(partial(self._resume, rescued))
        _log.warning("the run goes on from step %d, %.1f s after the failure", self.step, time.monotonic() - started)

    def _resume(self, rescued: Rescued | None = None) -> None:
        """Bring what lives to rest, start what died, and take the newest state there is."""
        self._mend()
        if rescued is None or not self._goes_on_from(rescued):
            self._replicas.forget()
            self._begin()

    def _rescued(self) -> Rescued | None:
        """Copies of a state that survivors hold, newer than the last checkpoint."""
        if (remote := self._remote) is None or self._recovery.replicate_every_steps is None:
            return None
        remote.fleet.settle()
        try:
            rescued = self._replicas.rescue()
        except WorkerError as error:
            _log.warning("survivors could not give their copies: %s", error)
            return None
        latest = None if self._checkpoints is None else self._checkpoints.latest
        return None if rescued is None or (latest is not None and latest >= rescued.step) else rescued

    def _goes_on_from(self, rescued: Rescued) -> bool:
        """Take the state from the memory of the hosts; whether that succeeded."""
        remote = self._remote
        if remote is None or {world.devices for world in rescued.kept.worlds} != {w.devices for w in remote.worlds}:
            return False  # it was planned anew, for other hosts
        self.state, pending = self._replicas.restore(rescued, remote.worlds, remote.fleet.numbers)
        self._pending.extend(pending)
        self.step = rescued.step
        self._go_to(rescued.step, self._places[rescued.step])
        return True

    @property
    def _remote(self) -> RemoteExecutor | None:
        last = self._train_step.last
        return last.executor if last is not None and isinstance(last.executor, RemoteExecutor) else None

    def _count(self, error: WorkerError) -> None:
        if isinstance(error, OutOfMemoryError):
            raise error
        self.restarts.append(str(error))
        _log.warning("%s", error)
        if len(self.restarts) > self._recovery.max_restarts:
            where = (
                "no checkpoint" if self._checkpoints is None else f"the checkpoints in {self._checkpoints.directory}"
            )
            raise WorkerError(
                f"{len(self.restarts)} failures, more than max_restarts={self._recovery.max_restarts}; the last: {error}. "
                f"Running the script again goes on from {where}"
            ) from error

    def _mend(self) -> None:
        """Bring what lives to rest, and start what died; on the hosts that are left if some do not come back."""
        if (remote := self._remote) is None:
            return
        remote.fleet.mend()
        if remote.fleet.hosts.await_all(self._recovery.patience_seconds):
            remote.connect()
        else:
            self._go_on_without_lost_hosts()

    def _go_on_without_lost_hosts(self) -> None:
        cluster = self._train_step.cluster
        assert cluster.runs_on is not None
        left = cluster.runs_on.without_lost()
        if not left.nodes:
            raise ClusterError(f"no host of {cluster.name} is left; start the cluster, and the script again")
        gone = len(cluster.runs_on.nodes) - len(left.nodes)
        _log.warning(
            "%d hosts did not come back within %g s; planning anew for the %d that are left",
            gone,
            self._recovery.patience_seconds,
            len(left.nodes),
        )
        self._whole = self._whole or cluster
        cluster.runs_on.close()
        kept = cluster.runs_on.numbers_of(left)
        self._train_step.move_to(cluster.of_hosts(kept).replace(runs_on=left))

    def _are_all_back(self, whole: Cluster) -> bool:
        return whole.runs_on is not None and whole.runs_on.await_all(0.0)

    def _return_to_all_hosts(self) -> None:
        """Hosts that were lost are there again, and a checkpoint was just made: go on from there with all of them."""
        assert self._whole is not None
        assert self._checkpoints is not None
        _log.warning("all %d hosts are back; the run goes on with them from step %d", self._whole.hosts, self.step)
        self._checkpoints.wait()
        self._train_step.cluster.close()
        self._train_step.move_to(self._whole)
        self._whole, self.state, self._is_returning = None, None, False
        self._replicas.forget()
        self._begin()

    def _finish(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.save(self.step, self.state, self._position())
            self._checkpoints.wait()


def _as_json(position: Any) -> Any:
    """What an iterator says of its place: bytes (grain) as text."""
    return {"bytes": position.decode()} if isinstance(position, bytes) else position


def _from_json(position: Any) -> Any:
    if isinstance(position, dict) and set(position) == {"bytes"}:
        return str(position["bytes"]).encode()
    return position
