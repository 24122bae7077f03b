"""The part of a benchmark that drives a cluster from its first host: the same module again, told what is around it.

Outside, :func:`rows_from_inside` starts ``python -m MODULE OPTIONS --figures FOLDER --inside PREFIX SAID`` there and reads what
it said; inside, :func:`say_rows` hands the hosts over and writes a JSON object for every row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.netns.hosts import Hosts, Network
from benchmarks.netns.nodes import RayNodes
from benchmarks.netns.testbed import HOSTS, ROOT, Figures

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--figures`` for the user, ``--inside`` for :func:`rows_from_inside`."""
    parser.add_argument(
        "--figures", type=Path, help="a folder for what is measured of hosts and links; what is there is not again"
    )
    parser.add_argument("--inside", nargs=2, metavar=("PREFIX", "SAID"), help=argparse.SUPPRESS)


def rows_from_inside(nodes: RayNodes, figures: Figures, module: str, options: Sequence[str]) -> list[dict[str, Any]]:
    """What the module says on the first host; ends the program where it fails there."""
    said = figures.folder / "said.json"
    command = [sys.executable, "-m", module, *options, "--figures", str(figures.folder)]
    if nodes.run([*command, "--inside", nodes.hosts.prefix, str(said)], {"PYTHONPATH": ROOT}):
        raise SystemExit(1)
    rows: list[dict[str, Any]] = json.loads(said.read_text())
    return rows


def say_rows(inside: tuple[str, str], drive: Callable[[Hosts], Iterable[DataclassInstance]]) -> None:
    """Write the rows that ``drive`` finds on the hosts that are there."""
    prefix, said = inside
    hosts = Hosts(Network(HOSTS, 0, prefix=prefix))
    Path(said).write_text(json.dumps([asdict(row) for row in drive(hosts)]))
