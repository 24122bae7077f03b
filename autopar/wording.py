"""Names, sizes and places in words, the same in messages of the planner and in explanations.

Many alike names become one: ``layer0 … layer11`` is ``layer0..11``.  A path is cut into text and numbers.  Paths with
the same text form a family; the numbers at each place form a set, and the family is written with those sets only if its
members are all their combinations; otherwise it is split at its first number that varies.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable

SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8", "complex64": "c64",
}  # fmt: skip

Family = tuple[str, tuple[str, ...]]
"""The name of a family, and its members in the order given."""


def families(paths: Iterable[str]) -> tuple[Family, ...]:
    """The families of some distinct paths, in order of their first members."""
    by_text: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in paths:
        by_text[tuple(re.split(r"\d+", path))].append(path)
    found = [family for members in by_text.values() for family in _split(members)]
    return tuple(found)


def slashed(name: str) -> str:
    """``state.params['layer0..3']['kernel']`` as ``state/params/layer0..3/kernel``, the way constraints are written."""
    parts = re.sub(r"""\[(['"])(.*?)\1\]|[\[\]]|(?<!\.)\.(?!\.)""", lambda part: f"/{part[2] or ''}/", name)
    return re.sub(r"/+", "/", parts).strip("/").replace("/,", ",")


def family_name(paths: Iterable[str], most: int = 3) -> str:
    """One text for some paths: their families' names, at most so many of them."""
    names = [name for name, _ in families(paths)]
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _split(members: list[str]) -> list[Family]:
    numbers = {path: tuple(map(int, re.findall(r"\d+", path))) for path in members}
    places = [sorted(set(column)) for column in zip(*numbers.values(), strict=True)]
    if math.prod(map(len, places)) == len(members):
        texts = re.split(r"\d+", members[0])
        ranges = [*map(_ranges, places), ""]
        return [("".join(part for pair in zip(texts, ranges, strict=True) for part in pair), tuple(members))]
    place = next(k for k, column in enumerate(places) if len(column) > 1)
    parts: dict[int, list[str]] = defaultdict(list)
    for path in members:
        parts[numbers[path][place]].append(path)
    return [family for part in parts.values() for family in _split(part)]


def _ranges(numbers: list[int]) -> str:
    """``0..3,5`` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def bytes_text(size: float) -> str:
    """``1.25 GiB`` to three digits."""
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= scale:
            return f"{three_digits(size / scale)} {unit}"
    return f"{size:.0f} B"


def three_digits(number: float) -> str:
    """Without an exponent, rounded to what three digits say."""
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"


def array_text(shape: tuple[int, ...], dtype: str) -> str:
    """``f32[64,256]``."""
    return f"{SHORT_DTYPES.get(dtype, dtype)}[{','.join(map(str, shape))}]"


def source_text(source: str) -> str:
    """The file's own name and the line."""
    return source.rsplit("/", 1)[-1]
