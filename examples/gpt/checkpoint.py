"""What must be kept so that a second run goes on as if the first had never stopped?

The train state (parameters, optimizer state, step, dropout key), the position in the data, and the settings under which
both were made. Orbax writes each checkpoint beside the others and moves it into place whole, so a run that is killed
while it writes leaves the checkpoint before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints in `folder`, the last two of them kept. Use as a context manager: leaving it waits for writes."""

    def __init__(self, folder: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        step = self._manager.latest_step()
        return None if step is None else int(step)

    def save(self, step: int, state: Any, progress: Mapping[str, Any]) -> None:
        """Begins to write `state` (a pytree of arrays) and `progress` (plain JSON); nothing if `step` is there already.

        The arrays are copied before this returns, so they may be donated to the next step.
        """
        if step != self.latest_step:
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(dict(progress)))
            self._manager.save(step, args=args)

    def restore_progress(self) -> dict[str, Any]:
        """The `progress` of the latest checkpoint."""
        args = ocp.args.Composite(progress=ocp.args.JsonRestore())
        return dict(self._manager.restore(self.latest_step, args=args)["progress"])

    def restore_state(self, like: Any) -> Any:
        """The state of the latest checkpoint, laid out on the devices as `like` is; `like`'s values are not read."""
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(template))
        return self._manager.restore(self.latest_step, args=args)["state"]
