"""A plugin of pytest for :mod:`verify`: leaves out the tests that passed before, and says at once why one fails.

``AUTOPAR_PASSED_BEFORE`` is a file of names of tests, a line each.  By itself pytest says why a test failed when all have run, so
a log that is cut off would not have it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = set(Path(os.environ["AUTOPAR_PASSED_BEFORE"]).read_text(encoding="utf-8").splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of several processes the one that has the terminal
        config.pluginmanager.register(_Failures(config))


class _Failures:
    """Writes the text of a test's failures when its outcome is written."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report)

    @pytest.hookimpl(trylast=True)  # after the line with the outcome
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        terminal = self._config.get_terminal_writer()
        for report in [one for one in self._failed if one.nodeid == nodeid]:
            terminal.line(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}\n")
            self._failed.remove(report)
