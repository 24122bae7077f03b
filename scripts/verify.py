"""Run every test, the slow proofs included, and keep a log that says what was run, on what, for how long, and how it ended.

Those that need the extra gpu-compiler are left out; with ``-m gpu_compiler`` they are what is run.  All of it takes hours: a run
that was cut off, or in which something failed, is continued by the same command.  What passed by the log, at the same commit with
the same Python, JAX and arguments, is not run again, and the log goes on.  Where files differ from the commit all is run.

Usage: python scripts/verify.py LOG [PYTEST_ARGUMENTS...]
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PASSED = "result:  passed"
NOTHING_LEFT = 5
"""What pytest returns where all tests are left out."""

# In several processes the outcome stands before the test's name, in one behind it.
_OUTCOMES = (
    re.compile(r"\[gw\d+\] \[ *\d+%\] (?P<outcome>PASSED|FAILED|ERROR) (?P<test>.+?) *$"),
    re.compile(r"(?P<test>\S+::.+) (?P<outcome>PASSED|FAILED|ERROR) +\[ *\d+%\]$"),
)


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


def header_of(command: Sequence[str]) -> str:
    """What is the same in all parts of a run."""
    return (
        f"commit:  {commit()}\n"
        f"command: {shlex.join(command)}\n"
        f"python:  {platform.python_version()}, jax {version('jax')}, jaxlib {version('jaxlib')}\n"
        f"machine: {platform.machine()}, {os.cpu_count()} cores\n"
    )


def passed_in(log: str, header: str) -> list[str]:
    """The tests whose last outcome in a log is to have passed; none if it is of something else, of changed files, or complete."""
    is_of_a_commit = re.match(r"commit:  [0-9a-f]{40}\n", header)
    if not is_of_a_commit or not log.startswith(header) or log.rstrip().endswith(PASSED):
        return []
    last: dict[str, str] = {}
    for line in log.splitlines():
        for pattern in _OUTCOMES:
            if found := pattern.match(line):
                last[found["test"]] = found["outcome"]
    return [test for test, outcome in last.items() if outcome == "PASSED"]


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    log_path = Path(arguments[0])
    # With --capture=sys the log has what XLA says before it ends a process.
    options = ("-m", "not gpu_compiler", "-v", "--durations=25", "--capture=sys", "-p", "verify_plugin")
    command = [sys.executable, "-m", "pytest", *options, *arguments[1:]]
    header = header_of(command)
    passed = passed_in(log_path.read_text(encoding="utf-8") if log_path.exists() else "", header)
    passed_path = log_path.with_suffix(".passed").absolute()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    passed_path.write_text("".join(f"{test}\n" for test in passed), encoding="utf-8")
    paths = os.pathsep.join(filter(None, (str(ROOT / "scripts"), os.environ.get("PYTHONPATH"))))
    settings = {"AUTOPAR_VERIFY": "1", "AUTOPAR_PASSED_BEFORE": str(passed_path), "PYTHONPATH": paths}
    started = time.monotonic()
    with log_path.open("a" if passed else "w", encoding="utf-8") as log:

        def say(line: str) -> None:
            sys.stdout.write(line)
            sys.stdout.flush()
            log.write(line)
            log.flush()

        say(f"\ncontinued, {len(passed)} tests passed before\n" if passed else header)
        say(f"started: {datetime.now(UTC).isoformat(timespec='seconds')}\n\n")
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                say(line)
        is_good = process.returncode == 0 or (bool(passed) and process.returncode == NOTHING_LEFT)
        outcome = PASSED if is_good else f"result:  FAILED (exit status {process.returncode})"
        say(f"\nseconds: {time.monotonic() - started:.1f}\n{outcome}\n")
    return 0 if is_good else process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
