"""Checkpoints of a training run: the state in orbax's format, written where it lies, and the position in the data.

A checkpoint is a directory ``<directory>/<step>`` with the items ``state`` (a PyTree) and ``run`` (JSON): plain orbax reads it.
It is written beside the steps and appears under its name when it is complete.  It holds no layout: it comes back onto any
plan, method or number of devices.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax import tree_util

from autopar.errors import AutoparError, CheckpointError
from autopar.parallelized import Parallelized
from autopar.runtime.array_saver import registry

_STATE, _RUN = "state", "run"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held: the number of steps done, the state, and what was saved beside it."""

    step: int
    state: Any = field(repr=False)
    data: Mapping[str, Any]


class Checkpoints:
    """Owns the checkpoints of one run, in one directory that all hosts see."""

    def __init__(
        self,
        directory: str | Path,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int | None = 3,
    ) -> None:
        """``keep`` is how many of the last ones stay (None: all).

        With neither ``every_steps`` nor ``every_seconds`` nothing is due by itself; with both, whichever comes first.
        Raises ``CheckpointError`` for numbers that are none.
        """
        for name, number in (("every_steps", every_steps), ("every_seconds", every_seconds), ("keep", keep)):
            if number is not None and not number > 0:
                raise CheckpointError(f"{name}={number!r}; give a number above 0, or leave it out")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._last_seconds = time.monotonic()
        self._manager = _manager(self.directory, keep)

    # ------------------------------------------------------------------------------------------------------- writing

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after so many steps."""
        by_steps = self._every_steps is not None and step % self._every_steps == 0
        since = time.monotonic() - self._last_seconds
        return by_steps or (self._every_seconds is not None and since >= self._every_seconds)

    def save(self, step: int, state: Any, data: Mapping[str, Any] | None = None) -> None:
        """Begin to write the state after so many steps; ``data`` is JSON: the position in the data, for example.

        Returns when the values are safe from later steps; :meth:`wait` waits for the disk.  Under ``Cluster.distributed()`` all
        processes call it.  Raises ``CheckpointError`` where an earlier one could not be written.
        """
        import orbax.checkpoint as ocp

        items = {_STATE: ocp.args.PyTreeSave(state), _RUN: ocp.args.JsonSave({"step": step, "data": dict(data or {})})}
        try:
            if step in self._manager.all_steps():
                return
            self._manager.save(step, args=ocp.args.Composite(**items))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the state of step {step} cannot be saved in {self.directory}: {error}") from error
        self._last_seconds = time.monotonic()

    def wait(self) -> None:
        """Return when what was begun is on disk."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"a checkpoint in {self.directory} could not be written: {error}") from error

    def close(self) -> None:
        """Wait, and end the threads that write."""
        self.wait()
        self._manager.close()

    def abandon(self) -> None:
        """Give up what is being written, after a failure; finished checkpoints stay."""
        with contextlib.suppress(AutoparError, OSError, ValueError, RuntimeError):  # it was written by what has failed
            self._manager.wait_until_finished()
        self._manager = _manager(self.directory, self._keep)

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def latest(self) -> int | None:
        """Steps done at the last checkpoint that is complete; None if there is none."""
        self._manager.reload()
        return self._manager.latest_step()

    def restore(
        self, train_step: Parallelized, init_fn: Callable[[], Any], *rest: Any, step: int | None = None, **kwargs: Any
    ) -> Restored | None:
        """The last checkpoint (or that of ``step``), laid out as the step wants its state; None if there is none.

        ``init_fn`` and ``rest`` as for ``train_step.init``: the initialiser is traced for its shapes, not run.
        Raises ``CheckpointError`` for one of another model.
        """
        import orbax.checkpoint as ocp

        number = self.latest if step is None else step
        if number is None:
            return None
        shapes, homes = train_step.homes(init_fn, *rest, **kwargs)
        read = ocp.args.PyTreeRestore(item=shapes, restore_args=homes)
        try:
            found = self._manager.restore(
                number, args=ocp.args.Composite(**{_STATE: read, _RUN: ocp.args.JsonRestore()})
            )
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint of step {number} in {self.directory} does not fit the state that init_fn makes: {error}"
            ) from error
        state = tree_util.tree_unflatten(tree_util.tree_structure(shapes), jax.tree.leaves(found[_STATE]))
        return Restored(number, state, found[_RUN]["data"])


def _manager(directory: Path, keep: int | None) -> Any:
    import orbax.checkpoint as ocp

    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True),
        item_handlers={
            # One zarr directory for each array: several processes write one array without a coordinator of theirs.
            _STATE: ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry()),
            _RUN: ocp.JsonCheckpointHandler(),
        },
    )
