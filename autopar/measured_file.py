"""How are measurements kept in a file, and read from one that may be anybody's?

    read(write(stored)) = stored

A file is JSON, ``{"format": …, "version": …, NAME: {…}}``, read in two steps: the header says what it is and which release wrote
it, and only then is the rest held against its type.  Unknown fields, wrong types, NaN, negative numbers and cut files are refused
with the file, the place in it, and what to do.  Of profiles (:mod:`autopar.profile_file`) and networks
(:mod:`autopar.network_file`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from autopar.curves import Curve, Samples
from autopar.errors import ClusterError
from autopar.files import Header, write_atomically

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute")
"""Of collectives, as files name them."""

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
StoredSamples = Annotated[tuple[tuple[Positive, Positive], ...], Meta(min_length=1)]
Stored = TypeVar("Stored", bound=Struct)


@dataclass(frozen=True)
class MeasuredFile(Generic[Stored]):
    """One kind of file: ``name`` holds what was measured by ``command``, of the type ``stored``; the last version is written."""

    name: str
    command: str
    stored: type[Stored]
    versions: tuple[int, ...]

    @property
    def format(self) -> str:
        """What the file's header says."""
        return f"autopar-{self.name}"

    @property
    def advice(self) -> str:
        """What to do about a wrong file."""
        return f"correct it, or measure again with `{self.command}`"

    def write(self, stored: Stored, path: str | Path) -> None:
        """At once or not at all; makes the directory.  Raises ``ClusterError`` if that fails."""
        whole = {"format": self.format, "version": self.versions[-1], self.name: stored}
        data = msgspec.json.format(msgspec.json.encode(whole), indent=1)
        try:
            Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data + b"\n")
        except OSError as error:
            raise ClusterError(f"cannot write {self.name} {path}: {_reason(error)}; check the path") from error

    def read(self, path: str | Path) -> bytes:
        """All of the file; raises ``ClusterError`` if it cannot be read."""
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ClusterError(
                f"cannot read {self.name} {path}: {_reason(error)}; check the path, or measure with `{self.command}`"
            ) from error

    def version(self, data: bytes) -> int:
        """Of the release that wrote a file whose header is in order."""
        return msgspec.json.decode(data, type=Header).version

    def decoded(self, path: str, data: bytes) -> Stored:
        """What it holds; raises ``ClusterError`` naming the file, the place in it and what to do."""
        try:
            self._check_header(path, msgspec.json.decode(data, type=Header))
            return self._body(data)
        except msgspec.ValidationError as error:
            raise ClusterError(f"{path}: {error}; {self.advice}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ClusterError(
                f"{path} is not complete JSON ({error}); a {self.name} holds no NaN or infinity, and this one may have been "
                f"cut short: measure again with `{self.command}`"
            ) from error

    def _check_header(self, path: str, header: Header) -> None:
        if header.format != self.format:
            raise ClusterError(f"{path}: $.format is {header.format!r}, not {self.format!r}; this is no {self.name}")
        if header.version not in self.versions:
            raise ClusterError(
                f"{path}: $.version is {header.version}, this release reads {', '.join(map(str, self.versions))}; "
                f"measure again with `{self.command}`"
            )

    def _body(self, data: bytes) -> Stored:
        fields = [("format", str), ("version", int), (self.name, self.stored)]
        whole = msgspec.defstruct("File", fields, forbid_unknown_fields=True)
        body: Stored = getattr(msgspec.json.decode(data, type=whole), self.name)
        return body

    def check_kinds(self, path: str, places: dict[str, tuple[str, ...]]) -> None:
        """Raises ``ClusterError`` for a kind of collective that there is not; ``places`` holds the kinds of each field."""
        for place, kinds in places.items():
            for number, kind in enumerate(kinds):
                if kind not in KINDS:
                    raise ClusterError(
                        f"{path}: $.{self.name}.{place}[{number}].kind is {kind!r}, not one of {', '.join(KINDS)}; {self.advice}"
                    )


def curve_of(place: str, samples: Samples) -> Curve:
    """The curve through them; raises ``ClusterError`` naming their place."""
    with placed(place):
        return Curve(samples)


@contextmanager
def placed(place: str) -> Iterator[None]:
    """What is refused inside is refused with its place in the file."""
    try:
        yield
    except ClusterError as error:
        raise ClusterError(f"{place}: {error}") from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
