"""Does ``scripts/verify.py`` go on where it was cut off, and only there?"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"

TESTS = """
import os
from pathlib import Path

import pytest

RUNS = Path(__file__).parent.parent / "runs"


@pytest.mark.parametrize("name", ["one", "and two", "broken"])
def test_something(name):
    with RUNS.open("a") as runs:
        runs.write(name + "\\n")
    assert name != "broken" or os.environ.get("MENDED")
"""


class Repository:
    """A repository of its own with the script and three tests, of which one fails."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        (root / "tests").mkdir()
        (root / "tests" / "test_it.py").write_text(TESTS)
        (root / ".gitignore").write_text("build\nruns\n__pycache__\n.pytest_cache\n")
        for command in (["init", "-q"], ["add", "."]):
            self.git(*command)
        self.commit()

    def git(self, *arguments: str) -> None:
        names = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        subprocess.run(["git", *names, *arguments], cwd=self.root, check=True)

    def commit(self) -> None:
        self.git("commit", "-q", "--allow-empty", "-m", "all")

    def verify(
        self, monkeypatch: pytest.MonkeyPatch, *options: str, mended: bool = False
    ) -> tuple[int, list[str], str]:
        """The script's status, the tests that it ran, and its log."""
        (self.root / "runs").unlink(missing_ok=True)
        monkeypatch.setenv("MENDED", "1" if mended else "")
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # but for one, they only take time here
        script, log = self.root / "scripts" / "verify.py", self.root / "build" / "verify.log"
        status = subprocess.run(
            [sys.executable, str(script), str(log), "-p", "xdist", *options], check=False, capture_output=True
        ).returncode
        runs = self.root / "runs"
        return status, sorted(runs.read_text().splitlines()) if runs.exists() else [], log.read_text()


def test_what_passed_at_the_same_commit_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, options = Repository(tmp_path), ("-n", "2")
    everything = ["and two", "broken", "one"]
    status, ran, log = repository.verify(monkeypatch, *options)
    assert (status, ran) == (1, everything) and "result:  FAILED (exit status 1)" in log
    status, ran, longer = repository.verify(monkeypatch, *options)
    assert (status, ran) == (1, ["broken"])
    assert longer.startswith(log) and "continued, 2 tests passed before" in longer
    status, ran, longest = repository.verify(monkeypatch, *options, mended=True)
    assert (status, ran) == (0, ["broken"]) and longest.rstrip().endswith("result:  passed")
    # What is complete is run anew.
    status, ran, log = repository.verify(monkeypatch, *options, mended=True)
    assert (status, ran) == (0, everything) and "continued" not in log


def test_another_commit_and_changed_files_are_run_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository(tmp_path)
    everything = ["and two", "broken", "one"]
    assert repository.verify(monkeypatch, "-n", "0")[:2] == (1, everything)
    repository.commit()
    assert repository.verify(monkeypatch, "-n", "0")[:2] == (1, everything)
    assert repository.verify(monkeypatch, "-n", "0", "-x")[:2] == (1, everything)  # and other arguments
    (tmp_path / "tests" / "test_it.py").write_text(TESTS + "\n")
    for _ in range(2):
        assert repository.verify(monkeypatch, "-n", "0")[:2] == (1, everything)


@pytest.mark.parametrize("processes", ["0", "2"])
def test_why_a_test_failed_is_said_before_the_others_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    _, _, log = Repository(tmp_path).verify(monkeypatch, "-n", processes)
    assert log.index("test_something[broken], call:") < log.index("assert name != ") < log.index("= FAILURES =")


def test_of_a_log_that_was_cut_off_what_stands_there_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository(tmp_path)
    _, _, log = repository.verify(monkeypatch, "-n", "0")
    cut = log[: log.index("test_something[and two] PASSED")]
    (tmp_path / "build" / "verify.log").write_text(cut)
    assert repository.verify(monkeypatch, "-n", "0")[1] == ["and two", "broken"]
    (tmp_path / "build" / "verify.log").write_text(log.replace("one] PASSED", "one] ERROR"))
    assert repository.verify(monkeypatch, "-n", "0")[1] == ["broken", "one"]
