"""When are two programs the same?

When they differ only in what does not count: names of variables, source lines, addresses, names of arguments, and the
values of large closed-over arrays.  The fingerprint is the SHA-256 of a canonical text in which variables are numbered
in the order of their definition,

    fingerprint(P) = sha256( inputs' types ‖ primitive, parameters, operands, results' types of each equation ‖
                             outputs ‖ small constants ‖ static arguments ‖ shardings that are kept )

with functions written by their qualified names and bodies of loops in place.  It contains no ``hash()`` and no order of
a set, so it is the same in every process.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar import _compat
from autopar._compat import DropVar, Literal
from autopar.graph.inline import SAY_ONLY_WHERE
from autopar.graph.tracing import TracedProgram

SMALL_CONSTANT_BYTES = 1024
"""Closed-over arrays up to this size count by value."""

_ADDRESS = re.compile(r"\s*(?:\bat )?0x[0-9a-fA-F]+")
_SCAN_ARITY = frozenset({"num_consts", "num_carry", "ft_in", "ft_out"})
_MAX_DEPTH = 12
_OBJECT_DEPTH = 4  # objects that know no text of their own are followed three deep: they may point in circles


def fingerprint(program: TracedProgram, shardings: Sequence[str] = ()) -> str:
    """SHA-256, in hexadecimal, of what the program computes (see the module docstring). Linear in its size.

    ``shardings`` are the texts of those in the user's code that a plan must keep; in equations they do not count, for
    there JAX writes kinds of devices and memories with them.
    """
    parts: list[str] = [f"visible {program.num_visible}\n"]
    _write_jaxpr(_compat.jaxpr_of(program.jaxpr), parts)
    small = [v for v in program.hidden if not _compat.is_key_dtype(v.dtype) and v.nbytes <= SMALL_CONSTANT_BYTES]
    parts += [f"const {_encode(np.asarray(value))}\n" for value in small]
    parts += [f"static {name} {_encode(value)}\n" for name, value in program.static]
    parts += [f"sharding {text}\n" for text in shardings]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def structure(jaxpr: Any) -> str:
    """SHA-256, in hexadecimal, of the canonical text of a closed jaxpr: equal where two differ in names and places only."""
    parts: list[str] = []
    _write_jaxpr(_compat.jaxpr_of(jaxpr), parts)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def work(equation: Any) -> str:
    """Canonical text of what an equation computes of its operands: primitive, parameters, literals, types of results."""
    literals = ",".join(
        f"{_encode(atom.val)}:{_type(atom.aval)}" for atom in equation.invars if isinstance(atom, Literal)
    )
    results = " ".join(_type(var.aval) for var in equation.outvars)
    return f"{equation.primitive.name} {_encode_params(equation)} {literals} > {results}"


# ----------------------------------------------------------------------------------------------- canonical text


def _write_jaxpr(jaxpr: Any, parts: list[str]) -> None:
    """Append the canonical text of an open jaxpr; variables are numbered from 0 within it."""
    numbers: dict[Any, int] = {}

    def define(var: Any) -> str:
        numbers[var] = len(numbers)
        return _type(var.aval)

    def use(atom: Any) -> str:
        return f"={_encode(atom.val)}:{_type(atom.aval)}" if isinstance(atom, Literal) else f"%{numbers[atom]}"

    parts.append(f"in {' '.join(map(define, (*jaxpr.constvars, *jaxpr.invars)))}\n")
    for equation in jaxpr.eqns:
        operands = " ".join(map(use, equation.invars))
        params = _encode_params(equation)
        results = " ".join(
            "_" + _type(var.aval) if isinstance(var, DropVar) else define(var) for var in equation.outvars
        )
        parts.append(f"{equation.primitive.name} {params} {operands} > {results}\n")
    parts.append(f"out {' '.join(map(use, jaxpr.outvars))}\n")


@functools.lru_cache(maxsize=4096)
def _type_text(dtype: Any, shape: tuple[Any, ...], weak: bool) -> str:
    return f"{dtype}{list(shape)}{'~' if weak else ''}"


def _type(aval: Any) -> str:
    shape = getattr(aval, "shape", None)
    if shape is None:
        return _without_addresses(str(aval))
    return _type_text(aval.dtype, shape, _compat.is_weak(aval))


def _encode_params(equation: Any) -> str:
    params = equation.params
    if not params or equation.primitive.name in SAY_ONLY_WHERE:
        return ""
    if equation.primitive.name == "scan":
        params = {name: value for name, value in params.items() if name not in _SCAN_ARITY}
        params["arity"] = _compat.scan_arity(equation.params)
    return ",".join([f"{name}={_encode(params[name])}" for name in sorted(params)])


def _encode(value: Any, depth: int = 0) -> str:
    """Text of a parameter or a static argument: equal for equal content, in every process."""
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is float or kind is complex:
        return repr(value)
    if kind is str or kind is bytes:
        return repr(value)
    if kind is tuple or kind is list:
        inner = ",".join([_encode(item, depth + 1) for item in value])
        return f"({inner})" if kind is tuple else f"[{inner}]"
    if depth > _MAX_DEPTH:
        return f"<{_qualified_name(kind)}>"
    return _encode_object(value, depth)


def _encode_object(value: Any, depth: int) -> str:
    kind = type(value)
    if isinstance(value, enum.Enum):
        return f"{_qualified_name(kind)}.{value.name}"
    if _compat.is_jaxpr(value):
        return _encode_jaxpr(value)
    if isinstance(value, np.dtype):
        return f"dtype({value})"
    if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type):
        return _encode_array(value)
    if isinstance(value, dict):
        items = sorted((_encode(key, depth + 1), _encode(item, depth + 1)) for key, item in value.items())
        return "{" + ",".join([f"{key}:{item}" for key, item in items]) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(_encode(item, depth + 1) for item in value)) + "}"
    if isinstance(value, tuple):
        return f"{_qualified_name(kind)}({','.join([_encode(item, depth + 1) for item in value])})"
    if isinstance(value, functools.partial):
        pieces = (value.func, value.args, value.keywords)
        return f"partial{_encode(pieces, depth + 1)}"
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return _qualified_name(value)
    if dataclasses.is_dataclass(value):
        fields = [(item.name, getattr(value, item.name, None)) for item in dataclasses.fields(value) if item.compare]
        return f"{_qualified_name(kind)}{_encode(tuple(fields), depth + 1)}"
    if "__repr__" not in {name for base in kind.__mro__[:-1] for name in vars(base)}:  # its text would be an address
        return f"{_qualified_name(kind)}{_encode(dict(getattr(value, '__dict__', {})), depth + _OBJECT_DEPTH)}"
    return f"{_qualified_name(kind)}:{_without_addresses(repr(value))}"


def _encode_jaxpr(value: Any) -> str:
    parts = ["{"]
    _write_jaxpr(_compat.jaxpr_of(value), parts)
    parts += [f"const {_encode(const)}\n" for const in _compat.consts_of(value)]
    parts.append("}")
    return "".join(parts)


def _encode_array(value: Any) -> str:
    """An array by type and content (large ones by digest); keys and abstract shapes by type alone."""
    described = f"{value.dtype}{list(value.shape)}"
    if _compat.is_key_dtype(value.dtype) or not hasattr(value, "__array__"):
        return described
    array = np.asarray(value)
    if array.ndim == 0:
        return f"{described}{array.item()!r}" if array.dtype != object else described
    return described + hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _qualified_name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}"


def _without_addresses(text: str) -> str:
    return _ADDRESS.sub("", text)
