"""What do all files of ours have in common?  A header that says what they are, and that they are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from msgspec import Struct


class Header(Struct):
    """Read first and leniently, so that a file of another format or version is refused by that name."""

    format: str
    version: int


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write beside the target, which may be a link, and move over it: a rename within a directory is atomic.

    Raises ``OSError``, and leaves what was there.
    """
    target = Path(os.path.realpath(path))
    # Not the tempfile module: its files are for their owner alone, and these are to be shared.
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
