"""Which text does every machine with Python have? The sources of Python's own standard library.

The text is cut into tokens by byte-level byte-pair encoding trained on it (Sennrich et al., "Neural Machine Translation
of Rare Words with Subword Units", 2016; on bytes since GPT-2), and kept as one stream of uint16. Which tokens come when
is a pure function of (seed, number of examples already seen), so that number alone resumes an interrupted run exactly.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Tokens = npt.NDArray[np.uint16]
NumpyBatch = dict[str, npt.NDArray[np.int32]]

END_OF_FILE = "<|endoffile|>"
VALIDATION_EVERY = 20  # every twentieth file is held out whole, so no file is on both sides
# Installed packages and generated tables are not the standard library's prose; the tests would outweigh all the rest.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A tokenizer and the two streams of tokens that it made."""

    tokenizer: Tokenizer
    train: Tokens
    validation: Tokens

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))


def read_corpus(max_bytes: int, root: Path | None = None) -> tuple[list[str], list[str]]:
    """The files under `root` (default: the standard library), at most `max_bytes` of them, for training and validation.

    Files are taken in the order of their paths; those that are not UTF-8, or no longer fit, are passed over.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    train: list[str] = []
    validation: list[str] = []
    used = 0
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        size = len(text.encode())
        if used + size > max_bytes:
            continue
        used += size
        held_out = (len(train) + len(validation)) % VALIDATION_EVERY == VALIDATION_EVERY - 1
        (validation if held_out else train).append(text)
    if not validation:
        raise ValueError(f"{root} holds fewer than {VALIDATION_EVERY} Python files within {max_bytes} bytes")
    return train, validation


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE: every string can be encoded, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_files(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    """All files one after the other, each closed by the end-of-file token."""
    end = tokenizer.token_to_id(END_OF_FILE)
    parts = [np.asarray([*encoding.ids, end], np.uint16) for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate(parts)


def prepare(folder: Path, vocab_size: int, max_bytes: int = 6_000_000) -> Dataset:
    """The dataset kept in `folder`, made now if it is not there or was made for other arguments.

    Raises ValueError if the vocabulary does not fit into uint16 or is smaller than the alphabet of bytes.
    """
    if not 256 < vocab_size <= 2**16:
        raise ValueError(f"vocab_size is {vocab_size}; it must lie above 256 (the bytes) and at most at 65536 (uint16)")
    wanted = {"vocab_size": vocab_size, "max_bytes": max_bytes}
    tokenizer_file, made_for = folder / "tokenizer.json", folder / "made_for.json"
    if not (made_for.exists() and json.loads(made_for.read_text()) == wanted):
        folder.mkdir(parents=True, exist_ok=True)
        made_for.unlink(missing_ok=True)
        train, validation = read_corpus(max_bytes)
        tokenizer = train_tokenizer(train, vocab_size)
        tokenizer.save(str(tokenizer_file))
        np.save(folder / "train.npy", encode_files(tokenizer, train))
        np.save(folder / "validation.npy", encode_files(tokenizer, validation))
        # Written last and in one move: where it stands, the rest is whole.
        unfinished = made_for.with_suffix(".tmp")
        unfinished.write_text(json.dumps(wanted))
        os.replace(unfinished, made_for)
    return Dataset(
        tokenizer=Tokenizer.from_file(str(tokenizer_file)),
        train=np.load(folder / "train.npy"),
        validation=np.load(folder / "validation.npy"),
    )


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, windows: int, sequence: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Where the first window of this epoch starts, and the order in which its windows are read."""
    random = np.random.default_rng([seed, epoch])
    return int(random.integers(sequence)), random.permutation(windows)


@dataclasses.dataclass
class BatchIterator(Iterator[NumpyBatch]):
    """Endless batches {"tokens", "targets"}: int32[batch_size, sequence], targets one token ahead.

    Each epoch cuts the stream into windows, at an offset and in an order of its own. `position`, the number of
    examples already given out, is the whole state: save it, set it, and the same batches follow.
    """

    stream: Tokens
    batch_size: int
    sequence: int
    seed: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        if self._windows < 1:
            raise ValueError(f"{len(self.stream)} tokens are too few for sequences of {self.sequence}")

    @property
    def _windows(self) -> int:
        # One sequence less than fit, which leaves room for the offset and for the last target.
        return (len(self.stream) - 1) // self.sequence - 1

    def __next__(self) -> NumpyBatch:
        starts = [self._start(self.position + row) for row in range(self.batch_size)]
        rows = np.stack([self.stream[start : start + self.sequence + 1] for start in starts]).astype(np.int32)
        self.position += self.batch_size
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What every batch looks like, for planning."""
        shape = jax.ShapeDtypeStruct((self.batch_size, self.sequence), np.int32)
        return {"tokens": shape, "targets": shape}

    def _start(self, example: int) -> int:
        epoch, index = divmod(example, self._windows)
        offset, order = _epoch_order(self.seed, epoch, self._windows, self.sequence)
        return offset + int(order[index]) * self.sequence
