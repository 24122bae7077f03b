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
from typing import Any, Protocol

import jax
import numpy as np

from autopar.api import Parallelized
from autopar.checkpoints import Checkpoints
from autopar.cluster import Cluster
from autopar.errors import ClusterError, WorkerError
from autopar.runtime.remote import RemoteExecutor

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
        max_restarts: int = 10,
    ) -> None:
        """``init_fn`` makes the first state; ``steps`` is the number of the last step.

        Without ``checkpoints`` a run whose worker dies begins anew.
        """
        self._train_step = train_step
        self._init_fn = init_fn
        self._batches = batches
        self._steps = steps
        self._checkpoints = checkpoints
        self._max_restarts = max_restarts
        self._iterator: Any = None
        self._first_batch: Any = None
        self._given_out = 0
        self.restarts: list[str] = []
        self.step = 0
        self.state: Any = None

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Run; raises ``WorkerError`` when there were more failures than ``max_restarts``, and names the checkpoint."""
        pending: deque[tuple[int, Any]] = deque()
        self._carry_on(self._begin)
        while True:
            try:
                if (sent := self._one_step() if self.step < self._steps else None) is not None:
                    pending.append(sent)
                if sent is not None and len(pending) <= LAG:
                    continue
                if not pending:
                    self._finish()
                    return
                number, metrics = pending.popleft()
                metrics = jax.tree.map(np.asarray, metrics)
            except WorkerError as error:
                pending.clear()
                self._recover(error)
                continue
            if number > self._given_out:
                self._given_out = number
                yield number, metrics

    # -------------------------------------------------------------------------------------------------------- steps

    def _one_step(self) -> tuple[int, Any] | None:
        """Send a step; None if there is no batch for it, which ends the run."""
        batch = self._first_batch if self._first_batch is not None else next(self._iterator, None)
        self._first_batch = None
        if batch is None:
            self._steps = self.step
            return None
        self.state, metrics = self._train_step(self.state, batch)
        self.step += 1
        if self._checkpoints is not None and self._checkpoints.due(self.step):
            self._checkpoints.save(self.step, self.state, self._position())
        return self.step, metrics

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
                self._mend()

    def _recover(self, error: WorkerError) -> None:
        self._count(error)
        started = time.monotonic()
        if self._checkpoints is not None:
            self._checkpoints.abandon()
        self.state = None
        self._mend()
        self._carry_on(self._begin)
        _log.warning("the run goes on from step %d, %.1f s after the failure", self.step, time.monotonic() - started)

    def _count(self, error: WorkerError) -> None:
        self.restarts.append(str(error))
        _log.warning("%s", error)
        if len(self.restarts) > self._max_restarts:
            where = (
                "no checkpoint" if self._checkpoints is None else f"the checkpoints in {self._checkpoints.directory}"
            )
            raise WorkerError(
                f"{len(self.restarts)} failures, more than max_restarts={self._max_restarts}; the last: {error}. "
                f"Running the script again goes on from {where}"
            ) from error

    def _mend(self) -> None:
        """Bring what lives to rest, and start what died; on the hosts that are left if some do not come back."""
        last = self._train_step.last
        if last is None or not isinstance(last.executor, RemoteExecutor):
            return
        last.executor.fleet.mend()
        try:
            last.executor.connect()
        except ClusterError as error:
            cluster = self._train_step.cluster
            _log.warning("%s; planning anew for the hosts that are left", error)
            smaller = _without_lost_hosts(cluster, error)
            self._train_step = self._train_step.with_options(cluster=smaller)

    def _finish(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.save(self.step, self.state, self._position())
            self._checkpoints.wait()


def _without_lost_hosts(cluster: Cluster, error: ClusterError) -> Cluster:
    if cluster.runs_on is None:
        raise error
    left = cluster.runs_on.living()
    if not left.nodes or len(left.nodes) == len(cluster.runs_on.nodes):
        raise error  # the hosts are there; it is something else
    cluster.runs_on.close()
    return cluster.replace(hosts=len(left.nodes), runs_on=left)


def _as_json(position: Any) -> Any:
    """What an iterator says of its place: bytes (grain) as text."""
    return {"bytes": position.decode()} if isinstance(position, bytes) else position


def _from_json(position: Any) -> Any:
    if isinstance(position, dict) and set(position) == {"bytes"}:
        return str(position["bytes"]).encode()
    return position
