"""Do the example and the models of the benchmarks train, resume exactly, and mean the same in their several forms?"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console

from benchmarks.models import FAMILIES, Size, build, llama_nnx
from examples.gpt import data, generate, model, train
from examples.gpt.checkpoint import Checkpoints
from examples.moe import train as moe_train

TINY = model.GPTConfig(vocab_size=64, hidden=32, layers=2, heads=4, sequence=8)
TEXT_BYTES = 1_000_000
LEARNING = ("gpt_scan", "mlp_nnx")
"""Linen and NNX, a loop over layers and none; the default run of :mod:`tests.test_correctness` steps through others."""


@pytest.fixture(scope="session")
def dataset_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    data.prepare(folder, vocab_size=512, max_bytes=TEXT_BYTES)
    return folder


@pytest.fixture(scope="session")
def dataset(dataset_folder: Path) -> data.Dataset:
    return data.prepare(dataset_folder, vocab_size=512, max_bytes=TEXT_BYTES)


# ---------------------------------------------------------------------------------------------------------- the models


@pytest.mark.parametrize(
    "name", [name if name in LEARNING else pytest.param(name, marks=pytest.mark.verify) for name in FAMILIES]
)
def test_toy_step_learns_its_batch(name: str) -> None:
    toy = build(name, Size.TOY)
    state, batch, step = jax.jit(toy.make_state)(), toy.make_batch(toy.batch_size), jax.jit(toy.train_step)
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_toy_step_is_float64_throughout_when_asked(name: str) -> None:
    with jax.enable_x64(True):
        toy = build(name, Size.TOY, jnp.float64)
        state, batch = toy.abstract_state(), toy.abstract_batch()
        jaxpr = jax.make_jaxpr(toy.train_step)(state, batch)
        after, metrics = jax.eval_shape(toy.train_step, state, batch)
    assert metrics["loss"].dtype == jnp.float64
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    assert not re.search(r"f32\[\d", str(jaxpr)), "float32 arrays in the step; only Optax's scalar schedule may be that"


@pytest.mark.verify
def test_published_sizes_have_the_parameters_of_their_names() -> None:
    counts = {name: model.parameter_count(config) for name, config in model.PRESETS.items() if name != "demo"}
    unit = {"M": 1e6, "B": 1e9, "T": 1e12}
    for name, count in counts.items():
        assert count == pytest.approx(float(name[:-1]) * unit[name[-1]], rel=0.08), name
    llama = nnx.eval_shape(lambda: llama_nnx.Llama(llama_nnx.CONFIGS["8B"], jnp.float32, nnx.Rngs(0)))
    params = jax.tree.leaves(nnx.state(llama, nnx.Param))
    assert sum(math.prod(leaf.shape) for leaf in params) == 8_030_261_248  # the model card's 8.03 B


LINEN = ("gpt2", "wide_resnet", "unet", "vit", "t5", "lstm")
PUBLISHED = {name: [size for size in FAMILIES[name].sizes if size not in tuple(Size)] for name in LINEN}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if size == sizes[0] else pytest.mark.verify)
        for name, sizes in PUBLISHED.items()
        for size in sizes
    ],
)
def test_a_published_size_has_the_parameters_of_its_name(name: str, size: str) -> None:
    params = build(name, size).abstract_state().params
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert count == pytest.approx(float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]], rel=0.05)


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(KeyError, match="llama_nnx"):
        build("bert")
    with pytest.raises(KeyError, match=r"1\.3B"):
        build("gpt", "1.4B")


def _random_params(config: model.GPTConfig) -> Any:
    """Parameters of the right shapes, by NumPy: nothing to compile."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(model.GPT(config).init, jax.random.key(0), jnp.zeros((1, config.sequence), jnp.int32))
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * random.standard_normal(leaf.shape), leaf.dtype), shapes["params"]
    )


def _stacked(params: dict[str, Any], layers: int) -> dict[str, Any]:
    """The parameters of the unrolled GPT as the scanned one keeps them."""
    rest = {name: value for name, value in params.items() if not name.startswith("layer")}
    return {
        **rest,
        "layers": jax.tree.map(lambda *parts: jnp.stack(parts), *(params[f"layer{i}"] for i in range(layers))),
    }


@pytest.mark.parametrize(("remat", "tie_embeddings"), [(False, True), (True, False)])
def test_scanned_layers_mean_what_unrolled_ones_do(remat: bool, tie_embeddings: bool) -> None:
    with jax.enable_x64(True):
        config = dataclasses.replace(TINY, dtype=jnp.float64, param_dtype=jnp.float64, tie_embeddings=tie_embeddings)
        scanned = model.GPT(dataclasses.replace(config, scan_layers=True, remat=remat))
        tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, config.sequence), dtype=np.int32)
        params = _random_params(config)

        def loss(module: model.GPT, params: Any) -> jax.Array:
            return model.cross_entropy(module.apply({"params": params}, tokens), tokens)

        expected, gradients = jax.jit(jax.value_and_grad(partial(loss, model.GPT(config))))(params)
        stacked = _stacked(params, config.layers)
        got, stacked_gradients = jax.jit(jax.value_and_grad(partial(loss, scanned)))(stacked)
        np.testing.assert_allclose(got, expected, rtol=1e-12)
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-14),
            stacked_gradients,
            _stacked(gradients, config.layers),
        )


def test_no_position_sees_those_after_it() -> None:
    module = model.GPT(TINY)
    apply = jax.jit(module.apply)
    tokens = jnp.arange(TINY.sequence)[None]
    params = {"params": _random_params(TINY)}
    before, after = apply(params, tokens), apply(params, tokens.at[0, 5].add(1))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert float(jnp.abs(before[:, 5:] - after[:, 5:]).max(axis=-1).min()) > 1e-6


def test_dropout_masks_change_with_the_step_and_not_with_the_call() -> None:
    config = dataclasses.replace(TINY, dropout=0.3)
    state = model.TrainState.create(
        apply_fn=model.GPT(config).apply,
        params=_random_params(config),
        tx=model.make_optimizer(model.OptimizerConfig()),
        dropout_key=jax.random.key(0),
    )
    batch = {"tokens": jnp.ones((2, 8), jnp.int32), "targets": jnp.zeros((2, 8), jnp.int32)}
    step = jax.jit(model.train_step)
    losses = [float(step(state.replace(step=jnp.int32(number)), batch)[1]["loss"]) for number in (3, 3, 4)]
    assert losses[0] == losses[1] != losses[2]


def test_weight_decay_pulls_matrices_only() -> None:
    params = jax.eval_shape(model.GPT(TINY).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    mask = model.decayed(params)
    assert mask["layer0"]["attention"]["query"] == {"kernel": True, "bias": False}
    assert mask["layer0"]["norm1"] == {"scale": False, "bias": False}
    assert mask["embed"]["embedding"] is True and mask["position"] is False


# ------------------------------------------------------------------------------------------------------------ the data


@given(text=st.text())
def test_every_string_survives_the_tokenizer(dataset: data.Dataset, text: str) -> None:
    assert dataset.decode(dataset.encode(text)) == text


def test_tokens_of_the_corpus_decode_to_its_files(dataset: data.Dataset) -> None:
    texts, held_out = data.read_corpus(TEXT_BYTES)
    for stream, files in ((dataset.train, texts), (dataset.validation, held_out)):
        end = dataset.tokenizer.token_to_id(data.END_OF_FILE)
        first = stream[: int(np.argmax(stream == end))]
        assert stream.dtype == np.uint16
        assert dataset.decode(first.tolist()) == files[0]
        assert np.count_nonzero(stream == end) == len(files)
    assert not set(texts).intersection(text for text in held_out if text)
    assert sum(len(text.encode()) for text in texts + held_out) <= TEXT_BYTES


def test_a_dataset_is_made_once_and_anew_for_other_arguments(dataset_folder: Path) -> None:
    stamp = (dataset_folder / "tokenizer.json").stat().st_mtime_ns
    data.prepare(dataset_folder, vocab_size=512, max_bytes=TEXT_BYTES)
    assert (dataset_folder / "tokenizer.json").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="uint16"):
        data.prepare(dataset_folder, vocab_size=70_000)


def test_a_dataset_made_for_another_vocabulary_is_replaced(tmp_path: Path) -> None:
    for vocab_size in (300, 320):
        made = data.prepare(tmp_path, vocab_size, max_bytes=300_000)
        assert made.tokenizer.get_vocab_size() == vocab_size


@given(
    length=st.integers(60, 300),
    batch_size=st.integers(1, 7),
    before=st.integers(0, 20),
    seed=st.integers(0, 3),
)
def test_a_restored_iterator_goes_on_as_the_uninterrupted_one(
    length: int, batch_size: int, before: int, seed: int
) -> None:
    stream = np.arange(length, dtype=np.uint16)
    uninterrupted = data.BatchIterator(stream, batch_size, 10, seed)
    for _ in range(before):
        next(uninterrupted)
    resumed = data.BatchIterator(stream, batch_size, 10, seed, position=uninterrupted.position)
    for _ in range(5):
        expected, got = next(uninterrupted), next(resumed)
        np.testing.assert_array_equal(got["tokens"], expected["tokens"])
        np.testing.assert_array_equal(got["targets"], got["tokens"] + 1)
        assert got["tokens"].shape == (batch_size, 10)


def test_an_epoch_shows_every_window_once_and_the_next_another_order() -> None:
    stream = np.arange(1000, dtype=np.uint16)
    batches = data.BatchIterator(stream, batch_size=1, sequence=10)
    windows = 98
    epochs = [[int(next(batches)["tokens"][0, 0]) for _ in range(windows)] for _ in range(2)]
    for epoch in epochs:
        assert len(set(epoch)) == windows and len({start % 10 for start in epoch}) == 1
    assert epochs[0] != epochs[1]


def test_a_stream_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        data.BatchIterator(np.zeros(15, np.uint16), 1, 10)


# ---------------------------------------------------------------------------------------------------------- the script


def _settings(tmp_path: Path, **changes: Any) -> train.Settings:
    small = train.Settings(
        method=train.NO_PLAN,
        steps=8,
        run_dir=tmp_path / "run",
        batch_size=4,
        sequence=16,
        layers=1,
        dropout=0.1,
        text_bytes=TEXT_BYTES,
        validation_batches=1,
        sample_tokens=3,
        checkpoint_every=2,
    )
    return dataclasses.replace(small, **changes)


@dataclasses.dataclass(frozen=True)
class _Runs:
    """Runs that share one compiled step and one compiled initialiser, each with a folder of its own."""

    stream: data.Tokens
    step: train.Step
    init_fn: Any

    def __call__(self, settings: train.Settings, interrupt_after: int | None) -> tuple[dict[int, float], bool]:
        """A run, or its resumption; the losses of its steps, and whether it came to its end."""
        losses: dict[int, float] = {}

        def on_step(number: int, loss: float) -> None:
            losses[number] = loss
            if number == interrupt_after:
                signal.raise_signal(signal.SIGINT)

        batches = data.BatchIterator(self.stream, settings.batch_size, settings.gpt_config().sequence)
        with Checkpoints(settings.run_dir / "checkpoints") as checkpoints:
            session = train.Session(settings, Console(file=io.StringIO()), self.step, batches, checkpoints)
            state = session.resume(self.step.init(self.init_fn, batches.shapes()))
            _, complete = train.train(session, state, on_step)
        return losses, complete


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, as in a terminal; a job in the background is born deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_run_resumes_to_the_very_same_losses(tmp_path: Path, dataset: data.Dataset) -> None:
    settings = _settings(tmp_path)
    init_fn = partial(model.create_state, jax.random.key(0), settings.gpt_config(), settings.optimizer_config())
    runs = _Runs(dataset.train, train.make_step(train.NO_PLAN), init_fn)

    whole, complete = runs(dataclasses.replace(settings, run_dir=tmp_path / "whole"), None)
    assert complete and list(whole) == list(range(1, 9))

    first, complete = runs(settings, 3)
    assert not complete and list(first) == [1, 2, 3]
    second, complete = runs(settings, None)
    assert complete and list(second) == [4, 5, 6, 7, 8]
    assert {**first, **second} == whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_interrupt_is_an_ordinary_one() -> None:
    with train.Interruption(Console(file=io.StringIO())) as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_script_trains_then_finds_nothing_left_and_refuses_another_model(tmp_path: Path) -> None:
    settings = _settings(tmp_path, steps=2)
    texts = []
    for sample_tokens in (3, 0):
        output = io.StringIO()
        assert (
            train.run(dataclasses.replace(settings, sample_tokens=sample_tokens), Console(file=output, width=200)) == 0
        )
        texts.append(output.getvalue())
    assert "step     2   loss" in texts[0] and "resumed" not in texts[0]
    assert "resumed after step 2, 8 examples into the data" in texts[1] and "all 2 steps are done" in texts[1]
    validation = [line for text in texts for line in text.splitlines() if "validation loss" in line]
    assert len(validation) == 2 and validation[0] == validation[1]
    assert "plain jax.jit" in (settings.run_dir / "explanation.txt").read_text()
    with pytest.raises(SystemExit, match="layers was 1, is 2"):
        train.run(dataclasses.replace(settings, layers=2), Console(file=io.StringIO()))


def test_the_command_line_reaches_the_settings() -> None:
    arguments = "--preset 1M --steps 7 --method zero3 --layers 2 --scan-layers --dtype bfloat16 --run-dir somewhere"
    settings = train.parse(arguments.split())
    assert (settings.steps, settings.method, settings.run_dir) == (7, "zero3", Path("somewhere"))
    config = settings.gpt_config()
    assert (config.layers, config.scan_layers, config.dtype) == (2, True, jnp.bfloat16)
    assert train.parse([]) == train.Settings()


@pytest.mark.verify
def test_the_mixture_of_experts_trains_by_the_same_loop(tmp_path: Path) -> None:
    small = {name: getattr(_settings(tmp_path, steps=2), name) for name in ("method", "steps", "run_dir", "batch_size")}
    settings = moe_train.Settings(
        **small, sequence=16, text_bytes=TEXT_BYTES, validation_batches=1, sample_tokens=0, checkpoint_every=2
    )
    output = io.StringIO()
    assert train.run(settings, Console(file=output, width=200)) == 0
    assert "mixture of 8 experts" in output.getvalue() and "step     2   loss" in output.getvalue()
    with pytest.raises(SystemExit, match="experts was 8, is 4"):
        train.run(dataclasses.replace(settings, experts=4), Console(file=io.StringIO()))


def test_the_command_line_of_the_mixture_reaches_its_settings() -> None:
    settings = moe_train.parse("--preset 380M --experts 4 --capacity-factor 1.5 --layers 2 --dropout 0.1".split())
    config = settings.moe_config()
    assert (config.experts, config.base.layers, config.base.dropout) == (4, 2, 0.1)
    assert config.capacity == 768  # places for 2 × 1024 choices, shared out to four, and half as many again
    assert moe_train.parse([]) == moe_train.Settings()


def test_a_sample_follows_its_prompt_with_what_the_model_predicts() -> None:
    def counting(variables: Any, tokens: jax.Array) -> jax.Array:  # after t comes t + 1, without doubt
        return 100.0 * jax.nn.one_hot((tokens + 1) % 16, 16)

    assert generate.sample(counting, {}, [3, 4], sequence=4, length=6) == [3, 4, 5, 6, 7, 8, 9, 10]


def in_pieces(leaf: jax.Array, mesh: jax.sharding.Mesh, dim_of: Callable[[tuple[int, ...]], int]) -> jax.Array:
    """The leaf cut over all devices along one of the dimensions that divide, whole where none does."""
    dims = [dim for dim, extent in enumerate(leaf.shape) if extent % mesh.size == 0]
    spec: list[str | None] = [None] * leaf.ndim
    if dims:
        spec[dims[dim_of(tuple(leaf.shape[dim] for dim in dims))]] = "x"
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))


CUTS: dict[str, Callable[[tuple[int, ...]], int]] = {
    "first": lambda extents: 0,
    "last": lambda extents: len(extents) - 1,
}


@functools.cache
def what_it_says(scanned: bool, cut: str | None) -> tuple[float, list[int]]:
    """The loss and a sample of a model, whole or in pieces."""
    config = dataclasses.replace(TINY, scan_layers=scanned)
    state = jax.jit(partial(model.create_state, jax.random.key(0), config, model.OptimizerConfig()))()
    params = state.params
    if cut is not None:
        mesh = jax.make_mesh((jax.device_count(),), ("x",), (AxisType.Auto,))
        params = jax.tree.map(lambda leaf: in_pieces(leaf, mesh, CUTS[cut]), params)
        assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))
    tokens = np.arange(24, dtype=np.int32).reshape(3, 8)
    loss = generate.mean_loss(state.apply_fn, params, [{"tokens": tokens, "targets": tokens[:, ::-1]}])
    return loss, generate.sample(state.apply_fn, params, [1, 2], TINY.sequence, 8)


@pytest.mark.parametrize(
    ("scanned", "cut"),
    [
        pytest.param(False, "first", marks=pytest.mark.verify),
        (True, "last"),
        pytest.param(False, "last", marks=pytest.mark.verify),
        pytest.param(True, "first", marks=pytest.mark.verify),
    ],
)
def test_what_a_model_in_pieces_says_is_what_it_says_whole(scanned: bool, cut: str) -> None:
    (loss, written), (whole_loss, whole_written) = what_it_says(scanned, cut), what_it_says(scanned, None)
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    assert written == whole_written


def test_hosts_and_stages_are_what_the_planner_is_asked_for() -> None:
    assert train.parse([]).planning_options() == {}
    options = train.parse("--hosts 2 --stages 2".split()).planning_options()
    cluster = options["cluster"]
    assert (cluster.hosts, cluster.devices_per_host, options["stages"]) == (2, 4, 2)
    assert cluster.network_link.bytes_per_second < cluster.local_link.bytes_per_second / 10
    with pytest.raises(SystemExit, match="does not divide the 8 devices"):
        train.parse(["--hosts", "3"]).planning_options()


def test_parameters_of_a_pipeline_are_fetched_to_be_read_by_one_program() -> None:
    first, second = jax.devices()[:2]
    together = {"a": jax.device_put(1.0, first), "b": jax.device_put(2.0, first)}
    assert train.in_one_place(together) is together
    apart = train.in_one_place({"a": together["a"], "b": jax.device_put(2.0, second)})
    assert float(jax.jit(lambda p: p["a"] + p["b"])(apart)) == 3.0


@pytest.mark.verify
def test_a_pipeline_trains_and_is_explained(tmp_path: Path) -> None:
    settings = _settings(tmp_path, method="auto", hosts=2, stages=2, layers=2, steps=4, batch_size=8, dropout=0.0)
    output = io.StringIO()
    assert train.run(settings, Console(file=output, width=200)) == 0
    text = output.getvalue()
    assert "2 stages, zb_h1 over 1 microbatch · 2 hosts with Ethernet" in text and "validation loss" in text
    assert "network between hosts" in (settings.run_dir / "explanation.txt").read_text()
