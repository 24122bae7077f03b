"""Trains the mixture of experts of `model.py` on Python's standard library, over all devices, by a plan nobody wrote.

    python -m examples.moe.train --steps 300 --run-dir runs/moe

Data, tokenizer, checkpoints and the loop itself are those of `examples.gpt`. Nothing here says that experts are to lie on
different devices: whether they do, and over which axis, is in the explanation at the end of the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from examples.gpt import train as gpt_train
from examples.gpt.model import GPTConfig
from examples.moe import model


@dataclasses.dataclass(frozen=True)
class Settings(gpt_train.Settings):
    """One run, as the command line describes it; sizes that are None are those of the preset."""

    run_dir: Path = Path("runs/moe")
    steps: int = 300
    learning_rate: float = 4e-3
    experts: int | None = None
    capacity_factor: float | None = None

    def moe_config(self) -> model.MoEConfig:
        preset = model.PRESETS[self.preset]
        base = dataclasses.replace(
            preset.base,
            sequence=self.sequence or preset.base.sequence,
            layers=self.layers or preset.base.layers,
            dropout=self.dropout,
            dtype=jnp.dtype(self.dtype),
        )
        return dataclasses.replace(
            preset,
            base=base,
            experts=self.experts or preset.experts,
            capacity_factor=self.capacity_factor or preset.capacity_factor,
        )

    def gpt_config(self) -> GPTConfig:
        return self.moe_config().base

    def identity(self) -> dict[str, str | int]:
        config = self.moe_config()
        routing = {field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)[1:]}
        return {**super().identity(), **routing}

    def task(self) -> gpt_train.Task:
        config = self.moe_config()
        init_fn = partial(model.create_state, jax.random.key(self.seed), config, self.optimizer_config())
        name = f"mixture of {config.experts} experts"
        return gpt_train.Task(name, model.parameter_count(config), init_fn, model.train_step)


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """The settings that the command line describes."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m examples.moe.train", description=(__doc__ or "").split("\n")[0])
    add = partial(parser.add_argument)
    add("--preset", choices=list(model.PRESETS), default=default.preset, help="size of the model")
    add("--experts", type=int, help="experts in every second block (default: the preset's)")
    add("--capacity-factor", type=float, help="places per expert over an equal share (default: the preset's)")
    gpt_train.shared_options(parser, default)
    return Settings(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse(arguments)
    gpt_train.offer_cpu_devices(settings.cpu_devices)
    return gpt_train.run(settings, Console())


if __name__ == "__main__":
    sys.exit(main())
