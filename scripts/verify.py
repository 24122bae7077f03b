"""Run every test, the slow proofs included, and keep a log that says what was run, on what, for how long, and how it ended.

Those that need the extra gpu-compiler are left out; with ``-m gpu_compiler`` they are what is run.

Usage: python scripts/verify.py LOG [PYTEST_ARGUMENTS...]
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """The commit of the working tree, marked where files differ from it."""
    try:
        name = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git repository)"
    return name.stdout.strip()


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    log_path = Path(arguments[0])
    # With --capture=sys the log has what XLA says before it ends a process.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "not gpu_compiler",
        "--durations=25",
        "--capture=sys",
        *arguments[1:],
    ]
    log_path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log_path.open("w", encoding="utf-8") as log:

        def say(line: str) -> None:
            sys.stdout.write(line)
            sys.stdout.flush()
            log.write(line)
            log.flush()

        say(f"commit:  {commit()}\n")
        say(f"command: {shlex.join(command)}\n")
        say(f"python:  {platform.python_version()}, jax {version('jax')}, jaxlib {version('jaxlib')}\n")
        say(f"machine: {platform.machine()}, {os.cpu_count()} cores\n")
        say(f"started: {datetime.now(UTC).isoformat(timespec='seconds')}\n\n")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"AUTOPAR_VERIFY": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                say(line)
        outcome = "passed" if process.returncode == 0 else f"FAILED (exit status {process.returncode})"
        say(f"\nseconds: {time.monotonic() - started:.1f}\nresult:  {outcome}\n")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
