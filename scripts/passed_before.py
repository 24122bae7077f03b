"""A plugin of pytest: leaves out the tests that passed before.

``AUTOPAR_PASSED_BEFORE`` is a file of their names, a line each; :mod:`verify` writes it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = set(Path(os.environ["AUTOPAR_PASSED_BEFORE"]).read_text(encoding="utf-8").splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]
