"""Runs that outlive their workers: whatever is killed or stopped, the losses are those of an undisturbed run, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from tests.ray_cases import batch_of, create, train_step, workers_of

make = partial(create, 0)
STAGES = {"stages": 2, "num_microbatches": 2}


def batches(step: int) -> Iterator[Any]:
    while True:
        yield batch_of(step)
        step += 1


def losses(run: autopar.Run) -> list[float]:
    return [float(metrics["loss"]) for _, metrics in run]


@functools.cache
def on_one_mesh() -> autopar.Parallelized:
    """The step in this process: planned and compiled once for the tests that only ask what becomes of its state."""
    return autopar.parallelize(train_step, method="data_parallel")


@pytest.fixture
def step(cluster: autopar.Cluster) -> autopar.Parallelized:
    return autopar.parallelize(train_step, cluster=cluster, **STAGES)


def test_a_run_in_this_process(tmp_path: Path) -> None:
    step = on_one_mesh()
    run = autopar.Run(step, make, batches, steps=5, checkpoints=autopar.Checkpoints(tmp_path, every_steps=2))
    first = losses(run)
    assert len(first) == 5
    again = autopar.Run(step, make, batches, steps=8, checkpoints=autopar.Checkpoints(tmp_path))
    assert losses(again) == losses(autopar.Run(step, make, batches, steps=8))[5:]


def test_data_that_ends_ends_the_run() -> None:
    run = autopar.Run(on_one_mesh(), make, lambda step: map(batch_of, range(step, 3)), steps=10)
    assert len(losses(run)) == 3


class Places:
    """An iterator that knows its place, as those of grain do."""

    def __init__(self) -> None:
        self.place = 0

    def __next__(self) -> Any:
        self.place += 1
        return batch_of(self.place - 1)

    def get_state(self) -> bytes:
        return str(self.place).encode()

    def set_state(self, state: bytes) -> None:
        self.place = int(state)


def test_an_iterator_goes_back_to_its_place(tmp_path: Path) -> None:
    step = on_one_mesh()
    wanted = losses(autopar.Run(step, make, batches, steps=6))
    first = losses(autopar.Run(step, make, Places(), steps=3, checkpoints=autopar.Checkpoints(tmp_path)))
    second = losses(autopar.Run(step, make, Places(), steps=6, checkpoints=autopar.Checkpoints(tmp_path)))
    assert first + second == wanted


@pytest.mark.parametrize(
    "sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.verify)], ids=["killed", "stopped"]
)
def test_losses_are_those_of_an_undisturbed_run(
    step: autopar.Parallelized, tmp_path: Path, sign: signal.Signals
) -> None:
    wanted = losses(autopar.Run(step, make, batches, steps=14))
    run = autopar.Run(step, make, batches, steps=14, checkpoints=autopar.Checkpoints(tmp_path, every_steps=3))
    found, drawn = [], random.Random(0)
    before = set(workers_of(step))
    for number, metrics in run:
        found.append(float(metrics["loss"]))
        if number == 6:
            os.kill(drawn.choice(workers_of(step)), sign)
    np.testing.assert_array_equal(found, wanted)
    assert len(run.restarts) == 1
    after = set(workers_of(step))
    assert len(after & before) == len(before) - 1, "only the mesh that failed is built anew"


@pytest.mark.verify
@pytest.mark.timeout(900)  # processes are started twice, beside other tests
def test_a_host_that_answers_and_gets_nowhere(
    cluster: autopar.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own reader hangs, once: every process gives its signs of life, and no step ends."""
    monkeypatch.setattr("autopar.runtime.pace.HANGING_SECONDS", 2.0)
    monkeypatch.setattr("autopar.runtime.pace.FIRST_STEP_SECONDS", 10.0)
    hung, rows_of = tmp_path / "hung", batch_of

    def read(step: int, rows: slice) -> Any:
        if step == 4 and not hung.exists():
            hung.touch()
            time.sleep(600)
        return {name: leaf[rows] for name, leaf in rows_of(step).items()}

    step = autopar.parallelize(train_step, cluster=cluster, method="data_parallel")
    data = autopar.HostData(read, batch_of(0))
    wanted = losses(autopar.Run(step, make, batches, steps=8))
    checkpoints = autopar.Checkpoints(tmp_path / "run", every_steps=2)
    run = autopar.Run(
        step, make, lambda first: map(data.__getitem__, itertools.count(first)), steps=8, checkpoints=checkpoints
    )
    np.testing.assert_array_equal(losses(run), wanted)
    assert len(run.restarts) == 1
    assert "waited" in run.restarts[0]


@pytest.mark.verify
def test_too_many_failures_name_the_checkpoints(step: autopar.Parallelized, tmp_path: Path) -> None:
    checkpoints = autopar.Checkpoints(tmp_path, every_steps=2)
    run = autopar.Run(step, make, batches, steps=30, checkpoints=checkpoints, recovery=autopar.Recovery(max_restarts=0))

    def go() -> None:
        for number, _ in run:
            if number == 4:
                os.kill(workers_of(step)[0], signal.SIGKILL)

    with pytest.raises(autopar.WorkerError, match=rf"max_restarts=0.*{tmp_path}"):
        go()


@pytest.mark.verify
@pytest.mark.parametrize(
    ("options", "goes_back"), [({"method": "data_parallel"}, False), ({"method": "zero3"}, True)], ids=["whole", "cut"]
)
def test_survivors_have_what_the_dead_had_if_it_was_whole_there(
    cluster: autopar.Cluster, options: dict[str, Any], goes_back: bool
) -> None:
    step = autopar.parallelize(train_step, cluster=cluster, **options)
    begun: list[int] = []

    def batches_from(step: int) -> Iterator[Any]:
        begun.append(step)
        return batches(step)

    wanted = losses(autopar.Run(step, make, batches, steps=9))
    run = autopar.Run(step, make, batches_from, steps=9, recovery=autopar.Recovery(replicate_every_steps=1))
    found = []
    for number, metrics in run:
        found.append(float(metrics["loss"]))
        if number == 5:
            os.kill(workers_of(step)[0], signal.SIGKILL)
    np.testing.assert_array_equal(found, wanted)
    assert len(run.restarts) == 1
    assert begun[-1] == 0 if goes_back else begun[-1] >= 5


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_chaos(step: autopar.Parallelized, tmp_path: Path, seed: int) -> None:
    """Thirty random kills and stalls at random instants; the network is cut in tests/test_ray_hosts.py."""
    drawn = random.Random(seed)
    steps, blows = 90, 30
    wanted = losses(autopar.Run(step, make, batches, steps=steps))
    checkpoints = autopar.Checkpoints(tmp_path, every_steps=2)
    run = autopar.Run(
        step, make, batches, steps=steps, checkpoints=checkpoints, recovery=autopar.Recovery(max_restarts=2 * blows)
    )
    found = []
    for number, metrics in run:
        found.append(float(metrics["loss"]))
        if number % (steps // blows) == 0:
            victim = drawn.choice(workers_of(step))
            how = signal.SIGSTOP if drawn.random() < 0.2 else signal.SIGKILL
            threading.Timer(drawn.uniform(0, 0.05), _strike, (victim, how)).start()
    np.testing.assert_array_equal(found, wanted)
    assert len(run.restarts) >= blows // 2


def _strike(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)
