"""Run a command on the first host of an emulated Ray cluster, then take the cluster down: see :mod:`benchmarks.netns`."""

from __future__ import annotations

import argparse

from benchmarks.netns import Network, RayNodes, why_not


def main() -> None:
    """Bring up, run, take down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.netns", description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=int, default=200, help="rate of every link in either direction; 0: unlimited")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    arguments = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"no hosts can be emulated here: {reason}")
    with RayNodes(Network(arguments.hosts, arguments.mbit)) as nodes:
        raise SystemExit(nodes.run(arguments.command))


if __name__ == "__main__":
    main()
