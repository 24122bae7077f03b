"""Does a lower prediction mean a faster step?  Predicted seconds against the clock, over many plans of each model.

    python -m benchmarks.ranking [--models gpt …] [--size bench] [--rounds 9] [--processes 3]
                                [--profile auto|measure|none|FILE] [--resume FILE]

Every method on every mesh shape that it can use is planned, compiled and timed on 8 devices of this machine; the plans of a
model take turns, in as many rounds as asked for, and so many more that each plan runs for a second, and are held against each
other within rounds (:mod:`benchmarks.turns`).  Where arrays happen to lie makes some steps up to a tenth slower for as long as
their process lives, so several processes measure, and the rounds of all count alike.  The first plans and compiles; the others
take its plans, and its executables out of JAX's cache.  Per model:

    tau     Kendall's: (pairs in the right order − pairs in the wrong order) / pairs, over the pairs of plans whose clocks
            differ by at least 5%
    regret  clock of the plan with the lowest prediction / clock of the fastest

for predictions by the machine's profile and, of the same plans, by the plain figures of ``Cluster.local(profile=None)``, and what
``auto`` takes, on the mesh that it would take by the profile, over the fastest plan by hand.
Targets: tau of at least 0.8, regret and ``auto`` over plans by hand of at most 1.05.  Run it alone on the machine.  With
``--resume`` what was found of a model is appended to a file of JSON lines, and models that the file has are not run again,
by whatever profile they were foretold.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import msgspec
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster
from autopar.cost_model.predict import predict
from autopar.efforts import FULL, QUICK
from autopar.errors import PlanError
from autopar.graph.fusion import fuse
from autopar.host_memory import keep_freed_memory, variables
from autopar.measure import measure
from autopar.plan import Plan
from autopar.profile_file import save_profile
from benchmarks.intra_op import METHODS
from benchmarks.models import FAMILIES, Model, build
from benchmarks.turns import clocks, run_in_turn

SEPARATED = 0.05
TAU_WANTED, REGRET_WANTED = 0.8, 1.05
LEAST_SECONDS = 1.0
"""That the steps of every plan take at least, all rounds of a process together."""
MOST_SECONDS = 1800
"""That a process may take, plans and compilation included."""


@dataclass(frozen=True)
class Foretold:
    """One plan of one model: seconds of a step by the machine's profile, and by plain figures."""

    name: str
    profile_seconds: float
    plain_seconds: float


@dataclass(frozen=True)
class Timed(Foretold):
    """The same beside its seconds in every round of one process."""

    round_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Ranked(Foretold):
    """The same beside its seconds by the clock."""

    clock_seconds: float


@dataclass(frozen=True)
class Kept:
    """A folder in which the processes that measure a model leave things for one another."""

    folder: Path

    @property
    def rows(self) -> Path:
        """What the last process measured."""
        return self.folder / "rows.json"

    @property
    def plans(self) -> Path:
        """Where the plans lie, numbered, by name."""
        return self.folder / "plans"

    @property
    def variables(self) -> dict[str, str]:
        """Of an environment in which executables are kept here, however soon they were compiled."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "executables"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def write(self, plans: Mapping[str, Plan]) -> None:
        """Leave the plans for :meth:`read`."""
        self.plans.mkdir()
        for number, (name, plan) in enumerate(plans.items()):
            plan.save(self.plans / f"{number:02} {name}.json")

    def read(self) -> Iterator[tuple[str, Plan]]:
        """The plans and their names, in the order in which they were made."""
        for path in sorted(self.plans.iterdir()):
            yield path.stem.partition(" ")[2], Plan.load(path)


@dataclass(frozen=True)
class ModelRanked:
    """The plans of one model, fastest first."""

    model: str
    size: str
    plans: list[Ranked]


class Results:
    """Owns what is known of models, by name and size, and the file that remembers it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_bytes().splitlines() if path is not None and path.exists() else []
        found = [msgspec.json.decode(line, type=ModelRanked) for line in lines]
        self.known = {(one.model, one.size): one.plans for one in found}

    def add(self, one: ModelRanked) -> None:
        """Remember a model."""
        self.known[one.model, one.size] = one.plans
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(one) + b"\n")


@dataclass(frozen=True)
class Verdict:
    """How well one kind of prediction ranks the plans of a model; ``tau`` is None where the clock separates no pair."""

    tau: float | None
    pairs: int
    regret: float


def verdict(predicted: Sequence[float], clock: Sequence[float]) -> Verdict:
    """Kendall's tau over the pairs that the clock separates, where a tie in the prediction counts as neither right nor wrong, and
    the regret, where the slowest of those that are foretold to be the fastest is taken.
    """
    pairs = score = 0
    for a, b in itertools.combinations(range(len(clock)), 2):
        if abs(clock[a] - clock[b]) >= SEPARATED * min(clock[a], clock[b]):
            pairs += 1
            agreement = (clock[a] - clock[b]) * (predicted[a] - predicted[b])
            score += (agreement > 0) - (agreement < 0)
    chosen = min(range(len(clock)), key=lambda number: (predicted[number], -clock[number]))
    return Verdict(score / pairs if pairs else None, pairs, clock[chosen] / min(clock))


def main() -> None:
    """Print the plans of every model, then what the ranking is worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--size", default="bench")
    parser.add_argument("--rounds", type=int, default=9, help="in each process")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--kept", type=Path, help=argparse.SUPPRESS)  # of a process that measures one model for another
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--profile", default="auto", help="auto (measure if there is none), measure, none, or a file")
    parser.add_argument("--quick", action="store_true", help="measure quickly")
    parser.add_argument("--resume", type=Path, help="a file that remembers models")
    arguments = parser.parse_args()
    keep_freed_memory()  # as where steps run, and before JAX starts
    cluster = priced(arguments.profile, arguments.quick)
    if arguments.kept is not None:
        (name,), kept = arguments.models, Kept(arguments.kept)
        rows = rank(build(name, arguments.size), cluster, arguments.rounds, kept, arguments.turn)
        kept.rows.write_bytes(msgspec.json.encode(rows))
        return
    console, results, ranked = Console(width=130), Results(arguments.resume), {}
    for name in arguments.models:
        if (name, arguments.size) not in results.known:
            results.add(ModelRanked(name, arguments.size, rank_apart(name, arguments, cluster)))
        ranked[name] = results.known[name, arguments.size]
        console.print(plan_table(f"{name} ({arguments.size})", ranked[name]))
    console.print(verdict_table(ranked))


def priced(profile: str, quick: bool) -> Cluster:
    """This machine with the profile that was asked for."""
    if profile == "none":
        return Cluster.local(profile=None)
    cluster = Cluster.local(profile=None if profile == "measure" else profile)
    if cluster.profile is None:
        print("measuring this machine first")
        cluster = cluster.with_profile(measure(QUICK if quick else FULL))
    return cluster


def rank_apart(name: str, arguments: argparse.Namespace, cluster: Cluster) -> list[Ranked]:
    """Every plan, fastest first, as measured by processes of its own one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        profile, kept = Path(folder, "profile.json"), Kept(Path(folder))
        if cluster.profile is not None:
            save_profile(cluster.profile, profile)
        asked = ["--models", name, "--size", arguments.size, "--rounds", str(arguments.rounds), "--kept", folder]
        asked += ["--profile", "none" if cluster.profile is None else str(profile)]
        # Told before it starts, for the plans that take turns there leave holes in each other's memory.
        environment = {**os.environ, **variables(os.environ), **kept.variables}
        runs = []
        for turn in range(arguments.processes):
            command = [sys.executable, "-m", "benchmarks.ranking", *asked, "--turn", str(turn)]
            subprocess.run(command, check=True, timeout=MOST_SECONDS, env=environment)
            runs.append(msgspec.json.decode(kept.rows.read_bytes(), type=list[Timed]))
    return together(runs)


def together(runs: Sequence[Sequence[Timed]]) -> list[Ranked]:
    """Every plan, fastest first, by the rounds of all processes."""
    seconds: dict[str, list[float]] = {}
    for one in itertools.chain.from_iterable(runs):
        seconds.setdefault(one.name, []).extend(one.round_seconds)
    clock = clocks(seconds)
    ranked = [Ranked(one.name, one.profile_seconds, one.plain_seconds, clock[one.name]) for one in runs[0]]
    return sorted(ranked, key=lambda one: one.clock_seconds)


def rank(model: Model, cluster: Cluster, rounds: int, kept: Kept, turn: int) -> list[Timed]:
    """Every plan; each ``turn`` has other rounds."""
    if not kept.plans.exists():
        kept.write(plans(model, cluster))
    arguments = model.abstract_state(), model.abstract_batch()
    found = []
    for name, plan in kept.read():
        step = autopar.parallelize(cluster=cluster)(model.train_step)
        step.use(plan)
        found.append((name, step.compile(*arguments)))
    begins = turn % len(found)
    compiled = dict(found[begins:] + found[:begins])
    plain = cluster.with_profile(None)
    foretold = {}
    for name, step in compiled.items():
        memory = step.plan.prediction.memory
        fusion = fuse(step.subject.graph)
        foretold[name] = [predict(step.program, fusion, one, memory).step_seconds for one in (cluster, plain)]
    shortest_seconds = min(seconds for seconds, _ in foretold.values())
    seconds = run_in_turn(model, compiled, max(rounds, math.ceil(LEAST_SECONDS / shortest_seconds)))
    return [Timed(name, *both, tuple(seconds[name])) for name, both in foretold.items()]


def plans(model: Model, cluster: Cluster) -> dict[str, Plan]:
    """Every plan by name; of plans that are the same the first."""
    state, batch = model.abstract_state(), model.abstract_batch()
    found: dict[str, Plan] = {}
    step = autopar.parallelize(cluster=cluster)(model.train_step)
    for method, mesh in itertools.product(METHODS, cluster.logical_mesh_shapes()):
        try:
            plan = step.with_options(method=method, mesh_shape=mesh.axis_sizes).plan(state, batch)
        except PlanError:
            continue  # not a mesh of this method, or too large for a device
        if plan.stages not in [one.stages for one in found.values()]:
            found[f"{method} {'×'.join(map(str, mesh.axis_sizes))}"] = plan
    return found


def over_hand_made(rows: Sequence[Ranked]) -> float | None:
    """Clock of the planner's plan that is foretold to be its fastest (of several the slowest) over that of the fastest by hand;
    None without either.
    """
    own = [row for row in rows if row.name.split()[0] == "auto"]
    by_hand = [row.clock_seconds for row in rows if row not in own]
    if not own or not by_hand:
        return None
    return min(own, key=lambda row: (row.profile_seconds, -row.clock_seconds)).clock_seconds / min(by_hand)


def plan_table(title: str, rows: Sequence[Ranked]) -> Table:
    """The plans of one model."""
    table = Table(title=title)
    table.add_column("plan")
    for column in ("clock ms", "by profile ms", "off by", "by plain figures ms", "off by"):
        table.add_column(column, justify="right")
    for row in rows:
        predictions = [(row.profile_seconds, row.clock_seconds), (row.plain_seconds, row.clock_seconds)]
        cells = [(f"{said * 1e3:.2f}", f"×{said / clock:.2f}") for said, clock in predictions]
        table.add_row(row.name, f"{row.clock_seconds * 1e3:.2f}", *cells[0], *cells[1])
    return table


def verdict_table(ranked: dict[str, list[Ranked]]) -> Table:
    """Tau, regret and what ``auto`` takes over plans by hand per model, the worst and the mean."""
    table = Table(title=f"wanted: tau ≥ {TAU_WANTED}, regret and auto / by hand ≤ {REGRET_WANTED}")
    table.add_column("model")
    for column in ("plans", "pairs", "tau", "regret", "tau, plain", "regret, plain", "auto / by hand"):
        table.add_column(column, justify="right")
    found = []
    ratios = {name: over_hand_made(rows) for name, rows in ranked.items()}
    for name, rows in ranked.items():
        clock = [row.clock_seconds for row in rows]
        both = [
            verdict([row.profile_seconds for row in rows], clock),
            verdict([row.plain_seconds for row in rows], clock),
        ]
        found.append(both)
        cells = [cell for one in both for cell in (tau_text(one.tau), f"{one.regret:.3f}")]
        table.add_row(name, str(len(rows)), str(both[0].pairs), *cells, ratio_text(ratios[name]))
    known = [ratio for ratio in ratios.values() if ratio is not None]
    for label, tau_of, regret_of in (("worst", min, max), ("mean", statistics.mean, statistics.mean)):
        cells = []
        for column in zip(*found, strict=True):
            taus = [one.tau for one in column if one.tau is not None]
            cells += [tau_text(tau_of(taus) if taus else None), f"{regret_of(one.regret for one in column):.3f}"]
        table.add_row(label, "", "", *cells, ratio_text(regret_of(known) if known else None), style="bold")
    return table


def ratio_text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def tau_text(tau: float | None) -> str:
    return "" if tau is None else f"{tau:.2f}"


if __name__ == "__main__":
    main()
