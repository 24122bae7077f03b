"""Trains the GPT of `model.py` on Python's standard library, over all devices, by a plan that nobody wrote by hand.

    python -m examples.gpt.train --preset demo --steps 450 --run-dir runs/gpt

The one line that concerns parallelism is `autopar.parallelize(train_step)`. With `--method none` that line becomes
`jax.jit`, and the rest of this file stays as it is. Ctrl-C ends the run after the step at hand and leaves a checkpoint;
the same command then goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from examples.gpt import data, generate, model
from examples.gpt.checkpoint import Checkpoints

NO_PLAN = "none"  # the method that plans nothing: plain jax.jit, for comparison
INTERRUPTED = 130  # the exit status of a program that Ctrl-C has ended
PROMPT = "def "


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run, as the command line describes it; sizes that are None are those of the preset."""

    preset: str = "demo"
    steps: int = 450
    run_dir: Path = Path("runs/gpt")
    method: str = "auto"
    batch_size: int = 16
    sequence: int | None = None
    layers: int | None = None
    scan_layers: bool = False
    remat: bool = False
    dropout: float = 0.0
    dtype: str = "float32"
    learning_rate: float = 6e-3
    seed: int = 0
    text_bytes: int = 6_000_000
    validation_batches: int = 8
    sample_tokens: int = 160
    checkpoint_every: int = 150
    cpu_devices: int = 8
    data_dir: Path | None = None
    hosts: int = 1
    stages: int | None = None

    def gpt_config(self) -> model.GPTConfig:
        preset = model.PRESETS[self.preset]
        return dataclasses.replace(
            preset,
            sequence=self.sequence or preset.sequence,
            layers=self.layers or preset.layers,
            scan_layers=self.scan_layers,
            remat=self.remat,
            dropout=self.dropout,
            dtype=jnp.dtype(self.dtype),
        )

    def optimizer_config(self) -> model.OptimizerConfig:
        return model.OptimizerConfig(
            peak_learning_rate=self.learning_rate, warmup_steps=max(1, self.steps // 20), total_steps=self.steps
        )

    def identity(self) -> dict[str, str | int]:
        """What must not change between a run and the run that resumes it."""
        architecture = {
            field.name: str(getattr(self.gpt_config(), field.name)) for field in dataclasses.fields(model.GPTConfig)
        }
        return {**architecture, "batch_size": self.batch_size, "seed": self.seed, "text_bytes": self.text_bytes}

    def task(self) -> Task:
        """The model that is trained."""
        config = self.gpt_config()
        init_fn = partial(model.create_state, jax.random.key(self.seed), config, self.optimizer_config())
        return Task("GPT", model.parameter_count(config), init_fn, model.train_step)

    def planning_options(self) -> dict[str, Any]:
        """What is asked of the planner besides the method."""
        options: dict[str, Any] = {} if self.stages is None else {"stages": self.stages}
        if self.hosts > 1:
            options["cluster"] = spread_over_hosts(self.hosts)
        return options


TrainStep = Callable[[model.TrainState, model.Batch], tuple[model.TrainState, model.Metrics]]


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained: its name, its size, a fresh state, and one step."""

    name: str
    parameters: int
    init_fn: Callable[[], model.TrainState]
    train_step: TrainStep


class Step(Protocol):
    """What this script needs of a train step, planned or not."""

    def init(self, init_fn: Callable[[], model.TrainState], *rest: Any) -> model.TrainState: ...

    def __call__(self, state: model.TrainState, batch: Any) -> tuple[model.TrainState, model.Metrics]: ...


class PlainStep:
    """The train step on one device under `jax.jit`."""

    def __init__(self, train_step: TrainStep) -> None:
        self._step = jax.jit(train_step, donate_argnums=0)

    def init(self, init_fn: Callable[[], model.TrainState], *rest: Any) -> model.TrainState:
        return jax.jit(init_fn)()

    def __call__(self, state: model.TrainState, batch: Any) -> tuple[model.TrainState, model.Metrics]:
        return self._step(state, batch)


def make_step(method: str, train_step: TrainStep = model.train_step, **options: Any) -> Step:
    """The train step under `method`: a method of autopar with options, or `none`."""
    if method == NO_PLAN:
        return PlainStep(train_step)
    import autopar

    return autopar.parallelize(method=method, **options)(train_step)


def spread_over_hosts(hosts: int) -> Any:
    """The devices of this process, described as those of several hosts with Ethernet of 1 Gb/s between them.

    What is planned for them is run here all the same; only the wires are faster than the plan believes.
    """
    from autopar.cluster import Cluster, Link

    local = Cluster.local()
    each, rest = divmod(local.num_devices, hosts)
    if rest:
        raise SystemExit(f"--hosts {hosts} does not divide the {local.num_devices} devices of this process")
    ethernet = Link(latency_seconds=2e-4, bytes_per_second=1e8, shared_by=each)
    return local.replace(name=f"{hosts} hosts with Ethernet", hosts=hosts, devices_per_host=each, network_link=ethernet)


def explain(method: str, step: Any, *shapes: Any) -> str:
    """Why the plan is what it is, and whether the predictions came true.

    A step that has not been called in this process is explained for `shapes`, a state and a batch (arrays or not).
    """
    if method == NO_PLAN:
        return "method none: plain jax.jit on one device, nothing was planned"
    import autopar

    return str(autopar.explain(step, *shapes))


class Interruption:
    """While entered, the first Ctrl-C (or SIGTERM) only sets `requested`; a second one is an ordinary Ctrl-C."""

    def __init__(self, console: Console) -> None:
        self.requested = False
        self._console = console
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        self._console.print("[yellow]stopping after this step, then saving; Ctrl-C again to stop at once")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class Report:
    """The progress bar, and a line for every twentieth part of the run."""

    def __init__(self, console: Console, settings: Settings, first: int, tokens_per_step: int) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", total=settings.steps, completed=first, loss=float("nan"), speed=0.0)
        self._every = max(1, settings.steps // 20)
        self._last_step = settings.steps
        self._tokens_per_step = tokens_per_step
        self._begun: tuple[float, int] | None = (
            None  # the end of the first step, which compiles, is where the clock starts
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def step(self, number: int, loss: float) -> None:
        """Step `number`, counted from one, is done."""
        now = self._progress.get_time()
        begun, at = self._begun or (now, number)
        self._begun = (begun, at)
        speed = (number - at) * self._tokens_per_step / (now - begun) if number > at else 0.0
        self._progress.update(self._task, completed=number, loss=loss, speed=speed)
        if number == 1 or number % self._every == 0 or number == self._last_step:
            self._progress.console.print(
                f"step {number:5d}   loss {loss:.3f}   {speed:8,.0f} tokens/s", highlight=False
            )


@dataclasses.dataclass(frozen=True)
class Session:
    """The parts of a run that stay the same from step to step."""

    settings: Settings
    console: Console
    step: Step
    batches: data.BatchIterator
    checkpoints: Checkpoints

    def save(self, state: model.TrainState) -> None:
        progress = {"position": self.batches.position, "identity": self.settings.identity()}
        self.checkpoints.save(int(state.step), state, progress)

    def resume(self, state: model.TrainState) -> model.TrainState:
        """The state of the latest checkpoint, laid out like `state`; `state` itself where there is none."""
        if self.checkpoints.latest_step is None:
            return state
        progress = self.checkpoints.restore_progress()
        identity = self.settings.identity()
        changed = [
            f"{name} was {progress['identity'].get(name)}, is {value}"
            for name, value in identity.items()
            if progress["identity"].get(name) != value
        ]
        if changed:
            raise SystemExit(
                f"{self.settings.run_dir} holds a run with other settings ({'; '.join(changed)}): "
                "repeat those settings, or choose another --run-dir"
            )
        state = self.checkpoints.restore_state(state)
        self.batches.position = progress["position"]
        self.console.print(
            f"[green]resumed after step {int(state.step)}, {self.batches.position} examples into the data"
        )
        return state


def train(
    session: Session, state: model.TrainState, on_step: Callable[[int, float], None]
) -> tuple[model.TrainState, bool]:
    """Steps until the run is complete (second result True) or interrupted (False); saves at the end in either case.

    `on_step` is told each step's number, counted from one, and its loss.
    """
    settings = session.settings
    first = int(state.step)
    with Interruption(session.console) as interruption:
        for number in range(first + 1, settings.steps + 1):
            state, metrics = session.step(state, next(session.batches))
            on_step(number, float(metrics["loss"]))
            if interruption.requested:
                break
            if number % settings.checkpoint_every == 0:
                session.save(state)
        session.save(state)
    return state, int(state.step) >= settings.steps


def in_one_place(params: Any) -> Any:
    """Parameters that one program can read: those of a pipeline lie on the devices of their stages, and are fetched."""
    devices = {frozenset(leaf.sharding.device_set) for leaf in jax.tree.leaves(params)}
    return params if len(devices) == 1 else jax.device_get(params)


def conclude(session: Session, state: model.TrainState, dataset: data.Dataset) -> None:
    """The validation loss and a sample of what the model writes."""
    settings, config = session.settings, session.settings.gpt_config()
    params = in_one_place(state.params) if settings.validation_batches or settings.sample_tokens else None
    if settings.validation_batches:
        held_out = data.BatchIterator(dataset.validation, settings.batch_size, config.sequence)
        batches = [next(held_out) for _ in range(settings.validation_batches)]
        loss = generate.mean_loss(state.apply_fn, params, batches)
        session.console.print(f"validation loss {loss:.3f} nats per token", highlight=False)
    if settings.sample_tokens:
        prompt = dataset.encode(PROMPT)
        tokens = generate.sample(state.apply_fn, params, prompt, config.sequence, settings.sample_tokens)
        session.console.rule("a sample")
        session.console.print(dataset.decode(tokens), markup=False, highlight=False, soft_wrap=True)
        session.console.rule()


def run(settings: Settings, console: Console) -> int:
    """The whole run; returns the exit status."""
    config, task = settings.gpt_config(), settings.task()
    with console.status("reading the standard library, training the tokenizer"):
        dataset = data.prepare(settings.data_dir or settings.run_dir / "data", config.vocab_size, settings.text_bytes)
    devices = jax.devices()
    console.print(
        f"{task.name} of {task.parameters / 1e6:,.2f} M parameters, {len(dataset.train) / 1e6:.2f} M tokens of "
        f"text, {len(devices)} × {devices[0].device_kind}, method {settings.method}",
        highlight=False,
    )
    batches = data.BatchIterator(dataset.train, settings.batch_size, config.sequence, settings.seed)
    shapes = batches.shapes()
    step = make_step(settings.method, task.train_step, **settings.planning_options())
    with Checkpoints(settings.run_dir / "checkpoints") as checkpoints:
        with console.status("planning, and creating the state"):
            state = step.init(task.init_fn, shapes)
        session = Session(settings, console, step, batches, checkpoints)
        state = session.resume(state)
        first = int(state.step)
        if first >= settings.steps:
            console.print(f"all {settings.steps} steps are done; --steps sets a later end", highlight=False)
            complete = True
        else:
            with Report(console, settings, first, settings.batch_size * config.sequence) as report:
                state, complete = train(session, state, report.step)
    if not complete:
        console.print(f"[yellow]interrupted after step {int(state.step)}; the same command goes on from there")
        return INTERRUPTED
    conclude(session, state, dataset)
    called = int(state.step) > first
    explanation = explain(settings.method, step) if called else explain(settings.method, step, state, shapes)
    (settings.run_dir / "explanation.txt").write_text(explanation + "\n", encoding="utf-8")
    console.print(explanation, markup=False, highlight=False, soft_wrap=True)
    return 0


def shared_options(parser: argparse.ArgumentParser, default: Settings) -> None:
    """The options of every model that this loop trains, one for each field of `Settings` but the preset's."""
    add = partial(parser.add_argument)
    add("--steps", type=int, default=default.steps, help="steps in all, those of earlier runs included")
    add("--run-dir", type=Path, default=default.run_dir, help="where data, checkpoints and the explanation are kept")
    add(
        "--method",
        default=default.method,
        help="auto, a hand-made method of autopar, or none: plain jax.jit on one device",
    )
    add("--batch-size", type=int, default=default.batch_size, help="sequences per step, over all devices")
    add("--sequence", type=int, help="tokens per sequence (default: the preset's)")
    add("--layers", type=int, help="number of layers (default: the preset's)")
    add("--dropout", type=float, default=default.dropout)
    add("--dtype", choices=["float32", "bfloat16"], default=default.dtype, help="what the blocks compute in")
    add("--learning-rate", type=float, default=default.learning_rate, help="at the peak of the schedule")
    add("--seed", type=int, default=default.seed)
    add("--text-bytes", type=int, default=default.text_bytes, help="how much of the standard library to read")
    add("--validation-batches", type=int, default=default.validation_batches)
    add("--sample-tokens", type=int, default=default.sample_tokens)
    add("--checkpoint-every", type=int, default=default.checkpoint_every, help="steps between checkpoints")
    add("--cpu-devices", type=int, default=default.cpu_devices, help="virtual devices where there is no accelerator")
    add("--data-dir", type=Path, help="where text and tokenizer are kept (default: in the run's folder)")
    add(
        "--hosts", type=int, default=default.hosts, help="plan as if the devices stood on so many hosts, 1 Gb/s between"
    )
    add("--stages", type=int, help="stages of a pipeline (default: the planner's choice)")


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """The settings that the command line describes."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m examples.gpt.train", description=(__doc__ or "").split("\n")[0])
    add = partial(parser.add_argument)
    add("--preset", choices=list(model.PRESETS), default=default.preset, help="size of the model")
    add("--scan-layers", action="store_true", help="one nn.scan over the layers in place of one block after another")
    add("--remat", action="store_true", help="recompute activations in the backward pass")
    shared_options(parser, default)
    return Settings(**vars(parser.parse_args(arguments)))


def offer_cpu_devices(count: int) -> None:
    """Splits the CPU into `count` devices, used where there is no accelerator; must come before JAX looks for them."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # that says it already
        jax.config.update("jax_num_cpu_devices", count)


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse(arguments)
    offer_cpu_devices(settings.cpu_devices)
    return run(settings, Console())


if __name__ == "__main__":
    sys.exit(main())
